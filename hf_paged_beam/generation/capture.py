"""Decode steps that were captured: ``compile=True``.

On a CPU, the model's forward pass over the pools is compiled by ``torch.compile``, whole, with the number of beams, of
prompts and of slots left open: once for one prompt and once for several serve every call of a model. On a GPU it is
recorded as a CUDA graph over pools and inputs that stay where they are, and replayed; pools have few sizes, so that few
are recorded.

A capture is never trusted unseen. The first steps of each kind of call are run as written too, and the logits
compared; where they differ, or where the model cannot be captured, all steps run as written, and a warning says why.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental import _config as _sizes
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from .. import versions
from ..cache import (
    CapturedStep,
    attention_before,
    can_capture,
    captured_cache,
    captured_step,
    forward_captured,
    our_attention,
    running,
)
from ..versions import GenerativeModel
from .memory import is_out_of_memory
from .replay import RECORDERS, Graph, Replays
from .same_logits import same_logits

BACKEND = "inductor"
"""What compiles on a CPU."""

_MOST_COMPILED = 4
"""Captures after which a search begins with none, so that torch's limit of 8 is not met between searches."""

_CHECKED_STEPS = 2
"""Steps that are run both ways before a capture is trusted: what was taken for a constant differs from one to the
next."""

logger = logging.get_logger("hf_paged_beam")


class Captures:
    """What is kept of one model, as long as it lives.

    Attributes:
        captured: how often its step was captured.
        verdicts: for each kind of call, how many steps are still to be checked, or why it cannot be captured.
        graphs: recorded graphs that no search uses now, the least recently used first.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.verdicts: dict[tuple, int | str] = {}
        self.graphs: dict[tuple, Graph] = {}
        self._renew()

    def begin(self) -> None:
        """Before a search: what was compiled goes where torch would soon compile no more."""
        if self.captured - self._captured_before >= _MOST_COMPILED:
            self._renew()

    def _renew(self) -> None:
        self._captured_before = self.captured
        code = forward_captured.__code__.replace()  # its own: what is compiled hangs on it, and torch limits how much
        function = types.FunctionType(code, forward_captured.__globals__, forward_captured.__name__)
        kept = weakref.ref(self)  # torch holds the backend as long as the code, where no garbage collector looks

        def count_and_compile(graph: Any, inputs: list[torch.Tensor]) -> Callable:
            alive = kept()
            if alive is not None:
                alive.captured += 1
            return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

        self._compiled = torch.compile(function, fullgraph=True, backend=count_and_compile)

    def run_compiled(self, model: GenerativeModel, step: CapturedStep, cache: Any, inputs: dict[str, Any]) -> Any:
        """Logits ``[R, 1, V]``."""
        _leave_sizes_open(step, cache, inputs)
        with _sizes_are_not_compared(), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            return self._compiled(model, step, cache, inputs)


_kept: weakref.WeakKeyDictionary[GenerativeModel, Captures] = weakref.WeakKeyDictionary()


def captures_of(model: GenerativeModel) -> Captures:
    """What is kept of a model; made when it is asked for."""
    return _kept.setdefault(model, Captures())


def drop_captures(model: GenerativeModel) -> None:
    """Free what was captured of a model."""
    _kept.pop(model, None)


class CapturedSteps:
    """The captured decode steps of one search.

    Args:
        model: the model.
        cache: our cache, past the prompt.
        configs: where the model reads its attention from.
        most_slots: slots that the trees can need at most, ``W · T``.
    """

    def __init__(self, model: GenerativeModel, cache: Any, configs: Sequence[dict[str, Any]], most_slots: int):
        self._model, self._cache, self._configs = model, cache, configs
        self._kept = captures_of(model)
        self._kept.begin()
        record = RECORDERS.get(cache.index.paths.device.type)
        self._replays = None if record is None else Replays(model, cache, self._kept.graphs, most_slots, record)
        self._padding: torch.Tensor | None = None
        self._begun = False

    def __call__(self, inputs: dict[str, Any], as_written: Callable[[], Any]) -> Any:
        """The model's outputs for a step.

        Args:
            inputs: as the model prepared them.
            as_written: runs the step without a capture.
        """
        if not can_capture(self._cache):  # of this call, not of the model: no verdict
            return as_written()
        if not self._begun:
            self._begin(inputs)
        kind = self._kind(inputs)
        left = self._kept.verdicts.get(kind, _CHECKED_STEPS)
        if isinstance(left, str):
            return as_written()
        captured = self._kept.captured
        try:
            logits = self._run(inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return self._give_up(kind, _what_failed(error), as_written)
        if self._kept.captured != captured:
            left = _CHECKED_STEPS  # what is new was never seen
        replays = self._replays
        is_old = replays is not None and replays.took_old
        if not left and not is_old:
            for layer in self._cache.indexed_layers():
                layer.note_written()
            return CausalLMOutput(logits=logits)
        outputs = as_written()  # writes the same keys into the same slots again
        prompts = self._cache.index.batch_size
        pairs = zip(logits[:, -1].chunk(prompts), outputs.logits[:, -1].chunk(prompts), strict=True)
        if not all(same_logits(one, other, self._model.dtype) for one, other in pairs):
            if replays is not None and is_old:  # the model is another since, in a way that a graph cannot see
                replays.forget()
                return outputs
            return self._give_up(kind, "its logits differ from those of the model as it is written", lambda: outputs)
        if not all(layer.has_written for layer in self._cache.indexed_layers()):
            return self._give_up(kind, "some layers take no part in its decode steps", lambda: outputs)
        self._kept.verdicts[kind] = max(left - 1, 0)
        return outputs

    def end(self, keep_cache: bool) -> None:
        """After the search; recorded graphs are free for the next one.

        Args:
            keep_cache: whether the caller gets the cache.
        """
        if self._replays is not None:
            self._replays.end(keep_cache)

    def _kind(self, inputs: dict[str, Any]) -> tuple:
        """What a verdict depends on, beside the model."""
        index = self._cache.index
        names = tuple(sorted(name for name, given in inputs.items() if isinstance(given, torch.Tensor)))
        model = self._model
        return names, self._padding is not None, index.batch_size > 1, attention_before(model.config), model.dtype

    def _run(self, inputs: dict[str, Any]) -> torch.Tensor:
        inputs = {name: given for name, given in inputs.items() if name not in self._of_the_cache}
        with our_attention(self._configs):
            if self._replays is not None:
                logits = self._replays(inputs, self._padding)
                self._kept.captured += self._replays.take_count()
                return logits
            step = captured_step(self._cache.index, self._padding)
            try:
                with running(step):
                    return self._kept.run_compiled(self._model, step, captured_cache(self._cache, step), inputs)
            finally:
                step.begin()

    def _begin(self, inputs: dict[str, Any]) -> None:
        """Before the first step: ``[B, P]`` bool, False where the prompt is padding, if any is."""
        self._begun = True
        mask_name = "decoder_attention_mask" if self._model.config.is_encoder_decoder else "attention_mask"
        self._of_the_cache = {versions.CACHE_ARGUMENT, mask_name}
        mask, index = inputs.get(mask_name), self._cache.index
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            real = index.beams.first_of_each(mask)[:, : index.prompt_length].to(torch.bool)
            self._padding = None if bool(real.all()) else real  # host read: once per search

    def leave(self, kept: list[int]) -> None:
        """Go on with some of the prompts only: their places among those before."""
        if self._padding is not None:
            self._padding = self._padding[kept]

    def _give_up(self, kind: tuple, reason: str, as_written: Callable[[], Any]) -> Any:
        self._kept.verdicts[kind] = reason
        logger.warning(
            f"compile=True: the decode step of {type(self._model).__name__} cannot be captured, and runs as it is "
            f"written ({reason}). Results are the same; leave compile=True out for this model."
        )
        return as_written()


def _what_failed(error: Exception) -> str:
    """One line of an error; of those of `torch.compile`, the one that names what it met."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = [line for line in lines if line.startswith("Developer debug context:")] or lines[:1] or [""]
    return f"{type(error).__name__}: {found[0].removeprefix('Developer debug context:').strip()[:200]}"


# --- compiled ---


def _leave_sizes_open(step: CapturedStep, cache: Any, inputs: dict[str, Any]) -> None:
    """Tell ``torch.compile`` which sizes change: beams, prompts, slots."""
    rows = step.write_slots.shape[0]
    _open(step.visible(), 0, 1, 2)
    _open(step.positions(), 0, 1)
    _open(step.write_slots, 0)
    for name, given in inputs.items():
        if isinstance(given, torch.Tensor) and name != "attention_mask":
            _open(given, *(dim for dim, size in enumerate(given.shape) if size == rows))
        else:  # the encoder's, [B, L, ...]
            for tensor in tree_leaves(given):
                if isinstance(tensor, torch.Tensor):
                    _open(tensor, *range(min(tensor.dim(), 2)))
    for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
        for layer in [] if part is None else part.layers:
            _open(layer.stored_keys, 0, 2)
            _open(layer.stored_values, 0, 2)


def _open(tensor: torch.Tensor, *dims: int) -> None:
    for dim in dims:
        if tensor.shape[dim] > 1:  # 1 is always a case of its own
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _sizes_are_not_compared() -> contextlib.AbstractContextManager:
    """Without it, two sizes that happen to be equal at first are compiled as one."""
    return _sizes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
