"""Cache layers over a pool of slots.

    prompt:   keys [B, Hkv, P, D] are appended as they come, one row per prompt
    decode:   keys [R, Hkv, 1, D], one row per beam, are written into the slots that the index gave to the beams
    read:     folded   -> the pool itself, [B, Hkv, P + tree slots, D], no copy
              gathered -> one row per beam, [R, Hkv, length, D], copied out of the pool

A prompt may arrive as one row per beam (transformers' own search does that): the rows of a prompt are checked to be
equal, and one is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .. import versions
from .index import BeamIndex
from .packing import Packing

GROWTH, LEAST_SPARE = 8, 8
"""A pool that must grow is made larger than it must be by one part in `GROWTH`, and by `LEAST_SPARE` slots at least, so
that growth is rare."""

ROW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the largest entry, between rows that a model computed from equal prompts."""


class SeveralTokensError(ValueError):
    """The model gave beams more than one token in a step."""


def one_row_per_prompt(states: torch.Tensor, num_beams: int) -> torch.Tensor:
    """Keep one of the `num_beams` equal rows of each prompt: ``[B·W, ...]`` to ``[B, ...]``.

    Raises:
        ValueError: if the number of rows is no multiple of `num_beams`, or rows of one prompt differ.
    """
    if states.shape[0] % num_beams:
        raise ValueError(
            f"the cache was made for num_beams={num_beams}, but got {states.shape[0]} rows, no multiple of it. "
            f"Make the cache with the num_beams that generate() is called with."
        )
    rows = states.unflatten(0, (-1, num_beams))  # [B, W, Hkv, P, D]
    first = rows[:, :1]
    if states.numel():
        limit = ROW_TOLERANCE.get(states.dtype, 0.0) * states.abs().max()
        if (rows - first).abs().max() > limit:
            raise ValueError(
                f"the {num_beams} rows of one prompt hold different keys or values. The cache shares one prompt "
                f"between num_beams={num_beams} beams: call generate() with that num_beams, and pass a prefix that is "
                f"equal for all beams of a prompt."
            )
    return rows[:, 0].contiguous()


def write_slots(pool: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, prompts: torch.Tensor) -> None:
    """Write one token of every beam into its slot.

    Args:
        pool: ``[B, Hkv, S, D]``, written.
        states: ``[R, Hkv, 1, D]``.
        slots: ``[R]`` int64.
        prompts: ``[R]`` int64, prompt of each beam.
    """
    if pool.shape[0] == 1:
        pool.index_copy_(2, slots, states.transpose(0, 2))
    else:
        pool[prompts.to(pool.device), :, slots] = states.squeeze(2)


class _IndexedLayer(CacheLayerMixin):
    """What the pool layer and the cross-attention layer share: storage, and reading in three ways."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    max_cache_len = -1  # releases before 5.0 ask for it: no limit
    is_cross = False

    state: Any = None
    STORED: tuple[str, ...] = ("_keys", "_values")
    """Names of the tensors with one row per prompt, ``[B, heads, S, D]``."""

    def __init__(self, index: BeamIndex, stored: torch.dtype | None = None):
        # The base class assigns `keys` and `values`, which are computed here.
        self.index = index
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.wide_prompt = False
        self._stored_dtype = stored
        self._packing: Packing | None = None  # known when the first keys come

    def __deepcopy__(self, memo: dict) -> Any:
        """A layer copied alone stays under its index; one that is copied with its cache comes under the copied index.

        Models that run some layers in a loop append copies of those layers to the cache that they are given.
        """
        layer = copy.copy(self)
        memo[id(self)] = layer
        own = {name: copy.deepcopy(given, memo) for name, given in vars(self).items() if name != "index"}
        layer.__dict__.update(own, index=memo.get(id(self.index), self.index))
        return layer

    @property
    def is_initialized(self) -> bool:
        return self._keys is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys as the model must see them now; see the module's header."""
        keys = self.read(self._keys)
        if self.index.folded and keys is not None:
            self.index.note_handed(keys, self)
        return keys

    @property
    def values(self) -> torch.Tensor | None:
        """Values as the model must see them now."""
        return self.read(self._values)

    def read(self, stored: torch.Tensor | None) -> torch.Tensor | None:
        raise NotImplementedError

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is made from the prompt."""

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        for name in self.STORED:
            setattr(self, name, None)
        self.wide_prompt = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Nothing moves: the index was reordered."""

    def held_bytes(self) -> int:
        """Bytes of key and value storage."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held())

    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in self._held())

    def _held(self) -> list[torch.Tensor]:
        return [stored for name in self.STORED if (stored := getattr(self, name)) is not None]

    def of_prompts(self, index: BeamIndex, prompts: Sequence[int]) -> Any:
        """The same layer under another index, with some of its prompts; it must not be written in decode before.

        Args:
            index: of as many prompts.
            prompts: places of these among the present ones.
        """
        layer = copy.copy(self)
        layer.index = index
        for name in self.STORED:
            stored = getattr(self, name)
            setattr(layer, name, None if stored is None else stored[list(prompts)])
        return layer

    def give_rows(self, stock_layer: Any) -> None:
        """Put what this layer holds into an empty layer of transformers, as one row per beam; all data is copied."""
        if self.is_initialized:
            stock_layer.update(self.keys, self.values)
            versions.set_length(stock_layer, self.get_seq_length())

    def _keep_prompt(self, states: torch.Tensor) -> torch.Tensor:
        rows = one_row_per_prompt(states, self.index.num_beams) if self.wide_prompt else states
        if self._packing is None and self._stored_dtype not in (None, states.dtype):
            self._packing = Packing(self._stored_dtype, states.dtype)
        return self._packed(rows)

    def _packed(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._packing is None else self._packing.pack(states)

    def _unpacked(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self._packing is None else self._packing.unpack(stored)

    def _as_rows(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, ...]`` to ``[R, ...]``: a view where there is one prompt, else a copy."""
        if self.index.decoding:
            return self.index.beams.repeat(states)
        return states.unsqueeze(1).expand(-1, self.index.num_beams, *states.shape[1:]).flatten(0, 1)

    def leave(self, kept: torch.Tensor) -> None:
        """Go on with some of the prompts only: ``[B']`` int64, their places among the present ones."""
        for name in self.STORED:
            stored = getattr(self, name)
            setattr(self, name, None if stored is None else stored.index_select(0, kept.to(stored.device)))


class PoolLayer(_IndexedLayer):
    """Self-attention keys and values of one layer: one slot per node of the beam tree.

    Args:
        index: the table shared by all layers.
        sliding_window: the layer's window in tokens, or None. The part of the prompt that no further token sees is
            dropped as the prompt comes. In a folded step the mask decides what is seen of the rest; otherwise the layer
            shows what transformers' sliding layer would: the last window of tokens.
        stored: dtype that keys and values are stored in; None for the model's own.

    Attributes:
        length: cache positions written: the prompt's, then one per step.
        dropped: slots of the prompt, from the first on, that are kept no more. The pool begins with the next one.
        state: what the layer keeps in one row per beam, with a `reorder_cache`; None in a plain layer.
    """

    can_fold = True

    def __init__(self, index: BeamIndex, sliding_window: int | None = None, stored: torch.dtype | None = None):
        super().__init__(index, stored)
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.length = 0
        self.dropped = 0

    def __repr__(self) -> str:
        shape = None if self._keys is None else tuple(self._keys.shape)
        return f"PoolLayer(length={self.length}, pool={shape})"

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store new keys and values, and return all that the queries of this step may see.

        Args:
            key_states, value_states: during the prompt ``[B, Hkv, q, D]`` (or ``[B·W, ...]`` where the cache was told
                so), then ``[R, Hkv, 1, D]``, a row for each beam.

        Returns:
            Keys and values: see the module's header.
        """
        if not self.index.decoding:
            return self._append_prompt(key_states, value_states)
        if key_states.shape[-2] != 1:
            raise SeveralTokensError(f"a beam takes one token per step, but got {key_states.shape[-2]}")
        first = 0 if self.index.folded else self._first_shown()
        self.write(key_states, value_states)
        return self._show(first)

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write one token per beam into the slots that the index gave it."""
        if self._keys is None or self._values is None:
            raise RuntimeError("a layer that took no part in the prompt got a beam's keys")
        slots = self.index.write_slots()  # [R]
        self._keys = self._store(self._keys, self._packed(key_states), slots)
        self._values = self._store(self._values, self._packed(value_states), slots)
        self.note_written()

    def note_written(self) -> None:
        """The slots that the index gave hold this step's tokens."""
        self.length = self.index.prompt_length + self.index.paths.shape[1]

    @property
    def has_written(self) -> bool:
        """Whether they do."""
        return self.length == self.index.prompt_length + self.index.paths.shape[1]

    def make_room(self) -> None:
        """Let the pool have all slots that the index may give for this step, and one more."""
        for name in self.STORED:
            setattr(self, name, self._with_room(getattr(self, name), spare=1))

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Move what stands in some slots into others, in place: the pools stay where they are.

        Args:
            old, new: ``[B, n]`` int64, as `BeamIndex.compact` returned them.
        """
        for pool in self._held():
            old, new = old.to(pool.device), new.to(pool.device)
            if pool.shape[0] == 1:
                moved = pool.index_select(2, old[0] - self.dropped)
                pool.index_copy_(2, new[0] - self.dropped, moved)
            else:
                prompts = torch.arange(len(old), device=pool.device).unsqueeze(1)
                pool[prompts, :, new - self.dropped] = pool[prompts, :, old - self.dropped]

    def end_prompt(self) -> None:
        """What comes next are beams, each with one token."""
        self.wide_prompt = False

    def rewind(self) -> None:
        """Undo the last `write`, so that the same step can be run again."""
        self.length = min(self.length, self.index.prompt_length + self.index.paths.shape[1] - 1)

    def read(self, stored: torch.Tensor | None, first: int | None = None) -> torch.Tensor | None:
        """Keys or values as the model must see them, from position `first` on (not in a folded step: all slots)."""
        if stored is None:
            return None
        if self.index.decoding and self.index.folded:
            return self._unpacked(stored.narrow(2, 0, self.index.slots_in_use - self.dropped))
        first = self._first_shown() if first is None else first
        if self.index.decoding:
            return self._unpacked(self._gather(stored, first, self.length))
        return self._read_prompt(stored, first)

    def _read_prompt(self, stored: torch.Tensor, first: int) -> torch.Tensor:
        prompt = self._unpacked(stored[:, :, first - self.dropped :])
        return self._as_rows(prompt) if self.wide_prompt else prompt

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, queries: int | torch.Tensor) -> tuple[int, int]:
        first = self._first_shown()
        return self.length + versions.query_length(queries) - first, first

    @property
    def length_shown(self) -> int:
        """How many of a sequence's tokens a next token may see."""
        return self.length - self._first_shown()

    def _first_shown(self) -> int:
        """First cache position that a query after the present tokens may see."""
        return 0 if self.sliding_window is None else max(self.length - self.sliding_window + 1, 0)

    def _show(self, first: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What `update` returns: `keys` and `values` from position `first` on."""
        if self._keys is None or self._values is None:
            return None, None
        if self.index.folded:
            return self.keys, self.values
        return self.read(self._keys, first), self.read(self._values, first)

    def reset(self) -> None:
        super().reset()
        self.length = self.dropped = 0

    def _append_prompt(self, key_states: torch.Tensor, value_states: torch.Tensor):
        key_rows, value_rows = self._keep_prompt(key_states), self._keep_prompt(value_states)
        first = self._first_shown()
        self.length += key_rows.shape[-2]
        if self._keys is None or self._values is None:
            self._keys, self._values = key_rows, value_rows
            shown: tuple[torch.Tensor | None, torch.Tensor | None] = key_states, value_states
        else:
            self._keys = torch.cat([self._keys, key_rows], dim=-2)
            self._values = torch.cat([self._values, value_rows], dim=-2)
            shown = self._show(first)
        self._drop_unseen()
        return shown

    def _drop_unseen(self) -> None:
        """Keep of the prompt so far what further tokens can see."""
        first = self._first_shown()
        if first > self.dropped:
            for name in PoolLayer.STORED:
                setattr(self, name, getattr(self, name)[:, :, first - self.dropped :].contiguous())
            self.dropped = first

    def _store(self, pool: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Write ``[R, Hkv, 1, D]`` into ``[B, Hkv, S, D]`` at ``[R]``; the pool grows if it must."""
        if states.dtype != pool.dtype:  # autocast began or ended after the prompt: promoted, as `torch.cat` would
            pool = pool.to(torch.promote_types(pool.dtype, states.dtype))
            states = states.to(pool.dtype)
        if self.dropped:
            slots = slots - self.dropped
        pool = self._with_room(pool)
        if slots.device != pool.device:
            slots = slots.to(pool.device)
        write_slots(pool, states, slots, self.index.beams.prompt)
        return pool

    def set_slots(self, slots: int) -> None:
        """Let the pool have exactly so many slots in all, the prompt's and those that were dropped included."""
        for name in self.STORED:
            pool = getattr(self, name)
            setattr(self, name, self._grown(pool, slots - self.dropped))

    def _with_room(self, pool: torch.Tensor, spare: int = 0) -> torch.Tensor:
        needed = self.index.slots_in_use - self.dropped + spare
        if pool.shape[2] >= needed:
            return pool
        return self._grown(pool, needed + max(needed // GROWTH, LEAST_SPARE))

    @staticmethod
    def _grown(pool: torch.Tensor, slots: int) -> torch.Tensor:
        # Zeroed, not merely allocated: a slot that no beam sees still meets the mask, and NaN would survive it.
        spare = pool.new_zeros(*pool.shape[:2], slots - pool.shape[2], pool.shape[3])
        return torch.cat([pool, spare], dim=2)  # as transformers' cache does: keys may be of a subclass of tensors

    def _gather(self, stored: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """``[B, Hkv, S, D]`` to ``[R, Hkv, length - first, D]``."""
        rows = self.index.rows(length)[:, first:].to(stored.device) - self.dropped  # [R, length - first]
        batch, heads, slots, size = stored.shape
        first_slot = torch.arange(0, batch * heads * slots, slots, device=stored.device).view(batch, heads)
        first_slot = self.index.beams.repeat(first_slot)  # [R, Hkv]
        places = (
            first_slot.unsqueeze(2) + rows.unsqueeze(1)
        ).flatten()  # [R·Hkv·(length - first)] of the pool laid flat
        gathered = stored.reshape(-1, size).index_select(0, places)
        return gathered.view(len(rows), heads, rows.shape[1], size)


class CrossLayer(_IndexedLayer):
    """Cross-attention keys and values of one layer: one row per prompt, for the whole search."""

    is_sliding = False
    is_cross = True
    has_written = True  # with the prompt
    dropped = 0

    def __repr__(self) -> str:
        return f"CrossLayer(stored={None if self._keys is None else tuple(self._keys.shape)})"

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Keep the encoder's keys and values, ``[B, H, L, D]`` (or one row per beam, of which one is kept)."""
        self._keys, self._values = self._keep_prompt(key_states), self._keep_prompt(value_states)
        return key_states, value_states

    def read(self, stored: torch.Tensor | None) -> torch.Tensor | None:
        if stored is None:
            return None
        wide = (self.index.decoding or self.wide_prompt) and not self.index.folded
        states = self._unpacked(stored)
        return self._as_rows(states) if wide else states

    def get_seq_length(self) -> int:
        return 0 if self._keys is None else self._keys.shape[-2]

    def get_mask_sizes(self, queries: int | torch.Tensor) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def end_prompt(self) -> None:
        self.wide_prompt = False

    def rewind(self) -> None:
        """Nothing was written."""

    def note_written(self) -> None:
        """Nothing was."""

    def set_slots(self, slots: int) -> None:
        """There is nothing beside the encoder's."""
