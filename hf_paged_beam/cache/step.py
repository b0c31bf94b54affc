"""What the attention and mask functions know of the step that is running.

transformers calls them without the cache, so the running step stands in a context variable: set before the model's
forward pass and cleared after it, also when it raises. Two threads can run two searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from .borrow import borrow_attention, return_attention
from .index import BeamIndex
from .layers import CrossLayer, PoolLayer

_current: ContextVar[FoldedStep | None] = ContextVar("hf_paged_beam_step", default=None)


class CannotFoldError(RuntimeError):
    """The model does something with keys or masks that the folded attention cannot follow."""


def current_step() -> FoldedStep | None:
    """The folded step that is running in this thread, if any."""
    return _current.get()


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

    def speaks_of_slots(self, mask: torch.Tensor | None) -> bool:
        """Whether a mask is `pool_mask`'s, or a copy of it: ``[B or 1, 1, W, S]``.

        A mask over positions has one row for each beam and one query.
        """
        shape = (self.beams.width, self.index.slots_in_use)
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
        if not (one_per_prompt and key.shape[2] == self.index.slots_in_use and self.speaks_of_slots(mask)):
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
        """Compute once per step; `sources` are kept alive so that an identity in `key` stays theirs."""
        if key not in self._memo:
            self._memo[key] = (sources, make())
        return self._memo[key][1]
