"""A folded step in tensors alone, so that it can be captured: by ``torch.compile``, or as a CUDA graph.

What a folded step looks up on the way cannot be captured: the running step in a context variable, layers by the
identity of their keys, lengths as Python numbers that change from step to step. Here the same step is made of tensors
that are known before it begins:

    CapturedStep     what attention and mask functions ask: which beam sees which slot
    CapturedCache    what the model takes for its cache: the pools, and the slots to write

Both are made anew for every step; the pools are the real layers' own, written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from .. import versions
from .index import BeamIndex
from .layers import CrossLayer, PoolLayer, write_slots
from .step import CannotFoldError, traced


class EvenRows:
    """Rows where all prompts have as many beams: what `BeamRows` is to other steps.

    Args:
        batch_size: `B`.
        width: `W`.
        device: where rows are chosen.
    """

    def __init__(self, batch_size: int, width: int, device: torch.device):
        self._device = device
        self.batch_size, self.width, self.count = batch_size, width, batch_size * width

    @property
    def first(self) -> torch.Tensor:
        """``[B, 1]`` int64: row of each prompt's first beam."""
        return torch.arange(self.batch_size, device=self._device).unsqueeze(1) * self.width

    def cells(self, rows: torch.Tensor) -> torch.Tensor:
        """Every row is a cell."""
        return rows

    rows_of_cells = cells

    def first_of_each(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, ...]`` to ``[B, ...]``."""
        return rows.unflatten(0, (self.batch_size, self.width))[:, 0]


class CapturedStep:
    """One forward pass of all beams over the pools, in tensors.

    Args:
        visible: ``[B, W, S]`` bool, the slots that each beam sees; padding is not among them.
        positions: ``[B, S]`` int64, cache position of the token that each slot holds.
        newest: 0-dim int64, cache position of this step's tokens.
        slots: ``[R]`` int64, the slot that each beam writes.
    """

    def __init__(
        self, visible: torch.Tensor, positions: torch.Tensor, newest: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._visible, self._positions, self.newest, self.write_slots = visible, positions, newest, slots
        self.begin()

    def begin(self) -> None:
        """Forget what was computed in a pass; at the beginning of each."""
        batch, width, self.slots = self._visible.shape
        self.beams = EvenRows(batch, width, self._visible.device)
        self._handed: list[tuple[torch.Tensor, Any]] = []
        self._memo: list[tuple[tuple, tuple, torch.Tensor]] = []
        self._attended = 0

    @property
    def prompts(self) -> torch.Tensor:
        """``[R]`` int64: prompt of each row."""
        return torch.arange(self.beams.count, device=self._visible.device) // self.beams.width

    def visible(self) -> torch.Tensor:
        """``[B, W, S]`` bool."""
        return self._visible

    def visible_additive(self, dtype: torch.dtype) -> torch.Tensor:
        """``[B, 1, W, S]`` of `dtype`: 0 where a beam sees a slot, -inf elsewhere."""

        def make() -> torch.Tensor:
            zeros = torch.zeros(self._visible.shape, dtype=dtype, device=self._visible.device)
            return zeros.masked_fill(~self._visible, -torch.inf).unsqueeze(1)

        return self.memo(("additive", dtype), (), make)

    def positions(self) -> torch.Tensor:
        """``[B, S]`` int64."""
        return self._positions

    def query_position(self) -> torch.Tensor:
        """0-dim int64."""
        return self.newest

    def outside(self, window: int | None) -> torch.Tensor | None:
        """``[B, S]`` bool: slots of tokens that a window of so many tokens has left behind."""
        return None if window is None else self._positions <= self.newest - window

    def covers(self, positions: int) -> bool:
        """Whether something given for so many cache positions is given for all: there are as many slots at least."""
        return positions == self.slots

    def speaks_of_slots(self, mask: torch.Tensor | None) -> bool:
        """Whether a mask is `pool_mask`'s: ``[B or 1, 1, W, S]``."""
        return mask is not None and mask.dim() == 4 and mask.shape[2:] == self._visible.shape[1:]

    def note_handed(self, keys: torch.Tensor, layer: Any) -> None:
        """These very keys go to the model."""
        self._handed.append((keys, layer))

    def layer_that_handed(self, key: torch.Tensor) -> Any:
        """The layer whose keys these very tensor is; its use is noted."""
        for keys, layer in self._handed:
            if keys is key:
                self._attended += 1
                return layer
        return None

    def is_made_of_the_pool(self, key: torch.Tensor, rows: int, mask: torch.Tensor | None) -> bool:
        """Whether the model computed these keys slot by slot from what the cache handed out; their use is noted."""
        if not (key.shape[0] != rows and key.shape[2] == self.slots and self.speaks_of_slots(mask)):
            return False
        self._attended += 1
        return True

    def window_of(self, layer: Any) -> int | None:
        """Window of a layer, in tokens."""
        if layer is None and any(handing.sliding_window for _, handing in self._handed):
            raise CannotFoldError("the model remakes keys of layers with a window")
        return None if layer is None else layer.sliding_window

    def all_attended(self) -> bool:
        """Whether the attention function received the keys of every layer that handed keys to the model."""
        return self._attended == len(self._handed)

    def memo(self, key: tuple, sources: tuple, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute once per pass for each `key` and each identity of `sources`."""
        for known, theirs, made in self._memo:
            if known == key and len(theirs) == len(sources) and all(a is b for a, b in zip(theirs, sources)):  # noqa: B905
                return made
        made = make()
        self._memo.append((key, sources, made))
        return made


class CapturedLayer(CacheLayerMixin):
    """A pool, or an encoder's keys, as a captured step sees them.

    Args:
        layer: the real one, which holds keys and values ``[B, Hkv, S, D]``.
        step: of this pass.
    """

    is_compileable = True
    is_croppable = False
    is_cross = False
    max_cache_len = -1

    def __init__(self, layer: Any, step: CapturedStep):
        self.stored_keys, self.stored_values, self.step = layer._keys, layer._values, step
        self.sliding_window = getattr(layer, "sliding_window", None)
        self.is_sliding = self.sliding_window is not None
        self.dropped = getattr(layer, "dropped", 0)
        self.packing = layer._packing
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor:
        """Keys as the model must see them."""
        keys = self._shown(self.stored_keys)
        self.step.note_handed(keys, self)
        return keys

    @property
    def values(self) -> torch.Tensor:
        """Values as the model must see them."""
        return self._shown(self.stored_values)

    def _shown(self, stored: torch.Tensor) -> torch.Tensor:
        return self._unpacked(stored.narrow(2, 0, self.step.slots - self.dropped))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write ``[R, Hkv, 1, D]`` into the slots, and return the part of the pool that is in use."""
        slots, prompts = self.step.write_slots - self.dropped, self.step.prompts
        for pool, states in ((self.stored_keys, key_states), (self.stored_values, value_states)):
            write_slots(pool, states if self.packing is None else self.packing.pack(states), slots, prompts)
        return self.keys, self.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def get_seq_length(self) -> Any:
        """0-dim int64, not a number: a captured number would be the same in all steps."""
        return self.step.newest

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        return self.step.slots, 0

    def get_max_length(self) -> int:
        return self.step.slots

    def get_max_cache_shape(self) -> int:
        return self.step.slots

    def _unpacked(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.packing is None else self.packing.unpack(stored)


class CapturedCrossLayer(CapturedLayer):
    """An encoder's keys and values; written with the prompt."""

    is_cross = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        raise CannotFoldError("the model computes the encoder's keys in every step")

    def _shown(self, stored: torch.Tensor) -> torch.Tensor:
        return self._unpacked(stored)

    def get_seq_length(self) -> Any:
        return self.stored_keys.shape[2]

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        return self.stored_keys.shape[2], 0


class CapturedCache(Cache):
    """The layers of a decoder."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)


def captured_layer(layer: Any, step: CapturedStep) -> CapturedLayer:
    """A layer as a captured step sees it.

    Args:
        layer: a `PoolLayer` or a `CrossLayer`.
        step: of this pass.
    """
    if isinstance(layer, CrossLayer):
        return CapturedCrossLayer(layer, step)
    layer.make_room()  # a pool that is shown whole would be another case, to be compiled apart
    return CapturedLayer(layer, step)


def can_capture(cache: Any) -> bool:
    """Whether a step over this cache can be given in tensors: plain pools, and as many beams for every prompt."""
    layers = cache.indexed_layers()
    plain = all(type(layer) in (PoolLayer, CrossLayer) and layer._keys is not None for layer in layers)
    one_device = {layer._keys.device for layer in layers if layer._keys is not None} == {cache.index.paths.device}
    beams = cache.index.beams
    return plain and one_device and not cache.row_layers() and beams.even and beams.width == cache.index.num_beams > 1


def captured_cache(cache: Any, step: CapturedStep) -> Any:
    """What the model takes for its cache in a captured step.

    Args:
        cache: the real one.
        step: of this pass.
    """
    decoder = getattr(cache, "self_attention_cache", cache)
    captured = CapturedCache(layers=[captured_layer(layer, step) for layer in decoder.layers])
    if decoder is cache:
        return captured
    cross = CapturedCache(layers=[captured_layer(layer, step) for layer in cache.cross_attention_cache.layers])
    both = EncoderDecoderCache(captured, cross)
    both.is_updated = dict(cache.is_updated)
    return both


def captured_step(index: BeamIndex, padding: torch.Tensor | None, slots: int | None = None) -> CapturedStep:
    """The step that the index table stands before.

    Args:
        index: the table, after a fork.
        padding: ``[B, P]`` bool, False for columns of the prompt that are padding; None if there are none.
        slots: how many slots are shown, those in use if None.
    """
    visible, positions = index.visible(), index.positions()
    if padding is not None:
        visible[:, :, : index.prompt_length] &= padding.unsqueeze(1)
    spare = 0 if slots is None else slots - index.slots_in_use
    if spare:
        visible, positions = (torch.nn.functional.pad(given, (0, spare)) for given in (visible, positions))
    newest = torch.full((), index.newest_position, device=positions.device)
    return CapturedStep(visible, positions, newest, index.write_slots())


def forward_captured(model: Any, step: CapturedStep, cache: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The model on one token per beam: what is captured. Logits ``[R, 1, V]``.

    Args:
        model: the model, its attention ours.
        step: of this pass.
        cache: `captured_cache` of the same pass.
        inputs: of the model, without a cache and an attention mask.
    """
    step.begin()
    if torch.compiler.is_dynamo_compiling():
        traced.step = step
    logits = model(**inputs, **{versions.CACHE_ARGUMENT: cache}, return_dict=True).logits
    if torch.compiler.is_dynamo_compiling():
        traced.step = None
    if not step.all_attended():
        raise CannotFoldError("the model's attention does not receive the cache's keys through the interface")
    return logits
