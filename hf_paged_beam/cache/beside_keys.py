"""Pool layers that keep something beside keys and values.

    RecurrentPoolLayer    attention and a recurrent or convolution state in one layer: the state has a row per beam
    IndexedPoolLayer      sparse attention that chooses tokens by keys of its own: those have slots too

What has a row per beam is the layer's `state`, an object of its own with a `reorder_cache`, small beside the keys.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from .. import versions
from .index import BeamIndex
from .layers import PoolLayer


class RecurrentPoolLayer(PoolLayer):
    """A pool, and a recurrent state that transformers' own layer keeps.

    Args:
        index, sliding_window, stored: as in `PoolLayer`.
        state: transformers' layer for the state alone. What is not the pool's is looked up there.
    """

    def __init__(
        self, index: BeamIndex, sliding_window: int | None = None, stored: torch.dtype | None = None, *, state: Any
    ):
        super().__init__(index, sliding_window, stored)
        self.state = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "state" not in self.__dict__:  # while it is copied it has none yet
            raise AttributeError(name)
        return getattr(self.state, name)

    def give_rows(self, stock_layer: Any) -> None:
        vars(stock_layer).update(vars(copy.deepcopy(self.state)))
        super().give_rows(stock_layer)


if versions.RecurrentLayer is not None:
    versions.RecurrentLayer.register(RecurrentPoolLayer)


class _RowPositions:
    """Positions that some models lay beside the indexer's keys: ``[dimensions, rows, length]`` int64, or None."""

    def __init__(self) -> None:
        self.ids: torch.Tensor | None = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.ids is not None:
            self.ids = self.ids.index_select(1, beam_idx.to(self.ids.device))


class IndexedPoolLayer(PoolLayer):
    """A pool with a third tensor, the indexer's keys ``[B, 1, S, D]``. Its reader chooses tokens for each row, so that
    the model sees one row per beam."""

    STORED = (*PoolLayer.STORED, "_indexer")
    can_fold = False

    def __init__(self, index: BeamIndex, stored: torch.dtype | None = None):
        super().__init__(index, stored=stored)  # transformers' layer of this kind has no window
        self._indexer: torch.Tensor | None = None
        self.state = _RowPositions()

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        return self.state.ids

    @indexer_position_ids.setter
    def indexer_position_ids(self, ids: torch.Tensor | None) -> None:
        self.state.ids = ids

    @property
    def is_indexer_initialized(self) -> bool:
        return self._indexer is not None

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """``[rows, length, D]``."""
        keys = self.read(self._indexer)
        return None if keys is None else keys.squeeze(1)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the indexer's new keys, ``[rows, new, D]``, and return all, ``[rows, length, D]``."""
        states = indexer_key_states.unsqueeze(1)
        if self.index.decoding:
            if self._indexer is None:
                raise RuntimeError("an indexer that took no part in the prompt got a beam's keys")
            self._indexer = self._store(self._indexer, self._packed(states), self.index.write_slots())
            length = self.index.prompt_length + self.index.paths.shape[1]  # the keys may be written after this
            return self._unpacked(self._gather(self._indexer, 0, length)).squeeze(1)
        rows = self._keep_prompt(states)
        if self._indexer is None:
            self._indexer = rows
            return indexer_key_states
        self._indexer = torch.cat([self._indexer, rows], dim=-2)
        return self._read_prompt(self._indexer, 0).squeeze(1)

    def give_rows(self, stock_layer: Any) -> None:
        super().give_rows(stock_layer)
        if self.indexer_keys is not None:
            stock_layer.update_indexer(self.indexer_keys)
            stock_layer.indexer_position_ids = self.indexer_position_ids
