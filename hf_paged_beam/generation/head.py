"""The output head, narrowed to the tokens that a trie can ask for.

    hidden states [rows, 1, H]  @  weight [V, H]      ->  logits [rows, 1, V]     the model's own head
    hidden states [rows, 1, H]  @  weight[tokens]     ->  logits [rows, 1, C]     while a narrow pass runs

Where log-probabilities are those among an item's continuations, no other column of the logits is read. The head is
narrowed only where nothing stands between it and the logits: it is a plain linear layer, and `outputs.logits` is the
very tensor that it returned, unchanged. A model that caps, scales, biases, masks, casts or cuts the head's output keeps
its whole head. That is seen at the prompt of every search and at a first decode step of every model, and checked at
every narrow pass again.

A narrow pass belongs to one context: the model's forward passes in other threads run as ever.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.modules import module as hooks_of_all_modules

from ..cache import is_compiled, parts_of
from ..versions import GenerativeModel
from .linears import CHANGING, LINEAR_FORWARD, StandIn, is_held, linear, own_forward

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_seen_at_decode: weakref.WeakKeyDictionary[GenerativeModel, weakref.ref[torch.nn.Linear]] = weakref.WeakKeyDictionary()
"""Models of which a decode step with the whole head was watched, and the head whose output its logits were."""


class HeadPass:
    """One forward pass of one search.

    Args:
        head: the model's output head.
        narrow: weight ``[C, H]`` and bias ``[C]`` or None, in place of the head's own. None for the head's own; then
            the last position's values are kept, to see changes that leave no other trace, as by kernels of other
            libraries.

    Attributes:
        calls: how often the head was called.
    """

    def __init__(self, head: torch.nn.Linear, narrow: tuple[torch.Tensor, torch.Tensor | None] | None = None):
        self.head, self.calls = head, 0
        self._narrow, self._whole = narrow, own_forward(head)
        self._returned: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._version = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to ``[..., C]``. Never an inference tensor: those do not count their changes."""
        with _counting_changes() if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            logits = self._whole(hidden) if self._narrow is None else linear(hidden, *self._narrow)
        self.calls += 1
        self._returned, self._version = logits, logits._version
        self._values = logits[..., -1:, :].clone() if self._narrow is None else None
        return logits

    def returned(self, logits: Any) -> bool:
        """Whether these are what the head returned last: the same place, not written to."""
        mine = self._returned
        if mine is None or not isinstance(logits, torch.Tensor) or logits.data_ptr() != mine.data_ptr():
            return False
        if (logits.shape, logits.stride(), logits.dtype) != (mine.shape, mine.stride(), mine.dtype):
            return False
        if mine._version != self._version:
            return False
        return self._values is None or torch.equal(self._values, mine[..., -1:, :])  # host read: not in every step


@contextlib.contextmanager
def _counting_changes() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


# --- standing in for the head's forward pass ---

_current: ContextVar[HeadPass | None] = ContextVar("hf_paged_beam_head_pass", default=None)
_under_way: weakref.WeakKeyDictionary[torch.nn.Linear, int] = weakref.WeakKeyDictionary()
"""Heads that have a stand-in at present, and how many passes hold it."""


class _StandIn:
    """`forward` of a head while some search's pass runs: that search's, and for all others the head's own."""

    def __init__(self, head: torch.nn.Linear):
        self._head, self._own = head, own_forward(head)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        current = _current.get()
        if current is None or current.head is not self._head:
            return self._own(hidden)
        return current(hidden)

    def leave(self) -> None:
        """Put back what stood here: nothing, or what computes the layer as long as a search runs."""
        del self._head.forward
        if isinstance(self._own, StandIn) and is_held(self._head):
            self._head.forward = self._own  # type: ignore[assignment]


@contextlib.contextmanager
def standing_in(head_pass: HeadPass) -> Iterator[HeadPass]:
    """In this context, calls of the head are `head_pass`'s. Nothing of the model is different afterwards."""
    head = head_pass.head
    with CHANGING:
        if head not in _under_way:
            head.forward = _StandIn(head)  # type: ignore[assignment]
        _under_way[head] = _under_way.get(head, 0) + 1
    token = _current.set(head_pass)
    try:
        yield head_pass
    finally:
        _current.reset(token)
        with CHANGING:
            _under_way[head] -= 1
            if not _under_way[head]:
                del _under_way[head]
                stand_in = vars(head).get("forward")
                if isinstance(stand_in, _StandIn):
                    stand_in.leave()


# --- which heads can be narrowed ---


def plain_head(model: GenerativeModel) -> torch.nn.Linear | None:
    """The model's output head, if it is a linear layer and nothing else; None else.

    Adapters, quantisation, offloading, sharding, hooks and compilation each leave a mark: another class of the layer
    or of its weight, a replaced `forward`, a hook, a weight that is elsewhere or of another shape.
    """
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    if type(head) is not torch.nn.Linear or not is_plain(head) or is_compiled(parts_of(model)):
        return None
    return head


def is_plain(head: torch.nn.Linear) -> bool:
    """Whether calling a linear layer is ``hidden @ weight.T + bias`` and nothing else."""
    stands = vars(head).get("forward")
    shape = (head.out_features, head.in_features)
    return (
        (stands is None or isinstance(stands, (_StandIn, StandIn)))
        and torch.nn.Linear.forward is LINEAR_FORWARD
        and LINEAR_FORWARD.__module__ == "torch.nn.modules.linear"
        and head._compiled_call_impl is None
        and not (head._forward_hooks or head._forward_pre_hooks)
        and not (hooks_of_all_modules._global_forward_hooks or hooks_of_all_modules._global_forward_pre_hooks)
        and _is_plain_tensor(head.weight, shape)
        and (head.bias is None or _is_plain_tensor(head.bias, shape[:1]))
    )


def _is_plain_tensor(given: Any, shape: tuple[int, ...]) -> bool:
    return (
        type(given) in (torch.nn.Parameter, torch.Tensor)
        and given.layout == torch.strided
        and given.dtype in _DTYPES
        and tuple(given.shape) == shape
        and not given.is_meta
    )


# --- one search ---


class NarrowHead:
    """The output head during one search, whole or narrow from pass to pass.

    Args:
        model: the model.
        wanted: whether the search can do with a narrow head at all.

    Attributes:
        column_of: ``[V]`` int64, the column of each token in the logits of the last pass (0 for what has none); None
            where these have a column for every token.
    """

    def __init__(self, model: GenerativeModel, *, wanted: bool = True):
        self.column_of: torch.Tensor | None = None
        self._model = model
        self._head = plain_head(model) if wanted else None
        self._knows_prompt = False
        self._tokens: torch.Tensor | None = None  # of the narrow weight, with it
        self._weight: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._columns: torch.Tensor | None = None

    @property
    def wanted(self) -> bool:
        """Whether passes may still be narrow: so far, nothing stands between the head and the logits."""
        return self._head is not None

    @contextlib.contextmanager
    def one_pass(self, tokens: torch.Tensor | None = None) -> Iterator[Callable[[Any], None]]:
        """Run one forward pass of the model inside; the first is the prompt's.

        Args:
            tokens: ``[C]`` int64, in order, the only tokens whose logits will be read; None for all. The same tensor
                object as before uses the narrow weight that was made for it.

        Yields:
            A function to call with the pass's `outputs.logits`. After it, `column_of` says what they are.

        Raises:
            RuntimeError: from that function, if the logits of a narrow pass are not what the narrow head returned.
        """
        self.column_of = None
        if self._head is None or not is_plain(self._head):
            self._head = None
            yield lambda logits: None
        elif self._narrows(self._head, tokens):
            assert tokens is not None
            with standing_in(HeadPass(self._head, self._narrow_weight(self._head, tokens))) as narrow:
                yield lambda logits: self._check(narrow, logits)
        elif not self._knows_prompt or (tokens is not None and not self._knows_decode(self._head)):
            with standing_in(HeadPass(self._head)) as whole:
                yield lambda logits: self._learn(whole, logits)
        else:
            yield lambda logits: None

    def _knows_decode(self, head: torch.nn.Linear) -> bool:
        seen = _seen_at_decode.get(self._model)
        return seen is not None and seen() is head

    def _narrows(self, head: torch.nn.Linear, tokens: torch.Tensor | None) -> bool:
        """Whether it can be done, and pays: at more than half of the columns, choosing them costs what it saves."""
        known = self._knows_prompt and self._knows_decode(head)
        return known and tokens is not None and 0 < 2 * len(tokens) <= head.out_features

    def _learn(self, whole: HeadPass, logits: Any) -> None:
        """See whether the logits of a whole pass are what the head returned."""
        is_prompt = not self._knows_prompt
        if not whole.returned(logits) or (whole.calls > 1 and not is_prompt):  # a long prompt may run in parts
            self._head = None
        elif is_prompt:
            self._knows_prompt = True
        else:
            _seen_at_decode[self._model] = weakref.ref(whole.head)

    def _check(self, narrow: HeadPass, logits: Any) -> None:
        if not narrow.returned(logits):
            _seen_at_decode.pop(self._model, None)
            raise RuntimeError(
                f"{type(self._model).__name__} now changes what its output head returns, as it did not before. Search "
                f"again: now the logits of all tokens are computed; output_scores=True asks for that too."
            )
        self.column_of = self._columns

    def _narrow_weight(self, head: torch.nn.Linear, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[C, H]`` and ``[C]`` or None."""
        if self._weight is None or self._tokens is not tokens:
            self._weight = None  # freed before the next is made
            rows = tokens.to(head.weight.device)
            bias = None if head.bias is None else head.bias.detach().index_select(0, rows)
            self._weight = head.weight.detach().index_select(0, rows), bias
            self._tokens = tokens
            self._columns = torch.zeros(head.out_features, dtype=torch.int64, device=tokens.device)
            self._columns[tokens] = torch.arange(len(tokens), device=tokens.device)
        return self._weight


def shared_sets(sets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each of several sets of tokens in a row, one that holds it; one object for neighbours that are nearly equal.

    So a narrow weight is made once for codebooks that have their tokens in common, and stays small for others.

    Args:
        sets: ``[C]`` int64 each, in order.
    """
    shared: list[torch.Tensor] = []
    start = 0  # of the neighbours that share the last set
    for number, tokens in enumerate(sets):
        union = torch.unique(torch.cat([shared[-1], tokens])) if shared else tokens
        smallest = min(map(len, sets[start : number + 1]))
        if shared and 4 * len(union) <= 5 * smallest:
            shared[start:] = [union] * (number - start)
        else:
            start, union = number, tokens
        shared.append(union)
    return shared
