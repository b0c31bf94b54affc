"""What the attention and mask functions know of the step that is running.

transformers calls them without the cache, so the running step stands in a context variable: set before the model's
forward pass and cleared after it, also when it raises. Two threads can run two searches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from .borrow import borrow_attention, return_attention
from .index import BeamIndex
from .layers import CrossLayer, PoolLayer

_current: ContextVar[FoldedStep | None] = ContextVar("hf_paged_beam_step", default=None)


class CannotFoldError(RuntimeError):
    """The model does something with keys or masks that the folded attention cannot follow."""


class Traced:
    """Where a step stands while ``torch.compile`` traces it: what it traces cannot read a context variable.

    Attributes:
        step: set and cleared by what is traced, and so never seen outside.
    """

    step: Any = None


traced = Traced()


def current_step() -> Any:
    """The folded step that runs in this thread, or is being traced, if any: a `FoldedStep` or a `CapturedStep`."""
    return traced.step if torch.compiler.is_dynamo_compiling() else _current.get()


@contextlib.contextmanager
def running(step: Any) -> Iterator[None]:
    """Let attention and mask functions find `step`."""
    outer = _current.set(step)
    try:
        yield
    finally:
        _current.reset(outer)


class FoldedStep:
    """One forward pass of all beams over the pool, in a ``with``: what its layers share, computed once.

    Args:
        index: the index table.
        configs: see `attention_configs`; their attention is ours while the pass runs.
    """

    def __init__(self, index: BeamIndex, configs: Sequence[dict[str, Any]] = ()):
        self.index = index
        self._configs = configs
        self.beams = index.beams
        self._attended: set[int] = set()
        self._made_of_the_pool = 0
        self._memo: dict[tuple, tuple[tuple, torch.Tensor]] = {}

    def __enter__(self) -> FoldedStep:
        self.index.folded = True
        self._outer = _current.set(self)
        try:
            borrow_attention(self._configs)
        except BaseException:  # the caller's Ctrl-C
            self._leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            return_attention(self._configs)
        finally:
            self._leave()

    def _leave(self) -> None:
        _current.reset(self._outer)
        self.index.folded = False
        self.index.handed.clear()
        self.index.handing.clear()

    def visible(self) -> torch.Tensor:
        """``[B, W, S]`` bool: the slots that each beam's path names."""
        return self.memo(("visible",), (), self.index.visible)

    def visible_additive(self, dtype: torch.dtype) -> torch.Tensor:
        """``[B, 1, W, S]`` of `dtype`: 0 where a beam sees a slot, -inf elsewhere."""
        return self.memo(("additive", dtype), (), lambda: self.index.visible_additive(dtype))

    def positions(self) -> torch.Tensor:
        """``[B, S]`` int64: the cache position that each slot holds."""
        return self.memo(("positions",), (), self.index.positions)

    @property
    def slots(self) -> int:
        """`S`, slots in use: the prompt's and the tree's."""
        return self.index.slots_in_use

    def query_position(self) -> torch.Tensor:
        """0-dim int64: the cache position of this step's tokens."""
        device = self.index.paths.device
        return torch.full((), self.index.newest_position, device=device)  # no copy from the host

    def outside(self, window: int | None) -> torch.Tensor | None:
        """``[B, S]`` bool: slots of tokens that a window of so many tokens has left behind; None if there are none."""
        newest = self.index.newest_position
        return None if window is None or newest < window else self.positions() <= newest - window

    def covers(self, positions: int) -> bool:
        """Whether something given for so many cache positions is given for all."""
        return positions >= self.index.prompt_length + self.index.paths.shape[1]

    def speaks_of_slots(self, mask: torch.Tensor | None) -> bool:
        """Whether a mask is `pool_mask`'s, or a copy of it: ``[B or 1, 1, W, S]``.

        A mask over positions has one row for each beam and one query.
        """
        shape = (self.beams.width, self.slots)
        return mask is not None and mask.dim() == 4 and self.beams.width > 1 and mask.shape[2:] == shape

    def layer_that_handed(self, key: torch.Tensor) -> PoolLayer | CrossLayer | None:
        """The layer whose keys these very tensor is, if it came from the cache in this step; its use is noted."""
        keys, layer = self.index.handed.get(id(key), (None, None))
        if keys is None or keys() is not key:
            return None
        self._attended.add(id(layer))
        return layer

    def is_made_of_the_pool(self, key: torch.Tensor, rows: int, mask: torch.Tensor | None) -> bool:
        """Whether the model computed these keys slot by slot from what the cache handed out; their use is noted.

        So latent attention does, which keeps compressed keys. One row per prompt, as many positions as there are
        slots, and a mask over slots: nothing else in a step looks like that.

        Args:
            key: ``[B, H, S, D]``.
            rows: rows of the query.
            mask: what came with it.
        """
        one_per_prompt = key.shape[0] == self.beams.batch_size and rows == self.beams.count
        if not (one_per_prompt and key.shape[2] == self.slots and self.speaks_of_slots(mask)):
            return False
        self._made_of_the_pool += 1
        return True

    def window_of(self, layer: PoolLayer | None) -> int | None:
        """Window of a layer, in tokens; of layers whose keys the model remade, there must be none.

        Raises:
            CannotFoldError: if it cannot be told which layer keys are made of, and windows matter.
        """
        if layer is not None:
            return layer.sliding_window
        if any(getattr(handing, "sliding_window", None) for handing in self.index.handing.values()):
            raise CannotFoldError("the model remakes keys of layers with a window")
        return None

    def all_attended(self) -> bool:
        """Whether the attention function received the keys of every layer that handed keys to the model."""
        return len(self._attended) + self._made_of_the_pool == len(self.index.handing)

    def memo(self, key: tuple, sources: tuple, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute once per step for each `key` and each identity of `sources`, which are kept alive so that it stays
        theirs."""
        full = (key, *map(id, sources))
        if full not in self._memo:
            self._memo[full] = (sources, make())
        return self._memo[full][1]
