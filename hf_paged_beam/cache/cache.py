"""`PagedBeamCache`: the transformers cache whose layers share one pool index.

Two callers drive it:

- our own search calls `begin_decode`, then `fork` once per step (parents in, slots out), and never copies;
- transformers' own search calls `reorder_cache`: the first call ends the prompt, each one is a `fork`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache

from .. import versions
from ..versions import PreTrainedConfig
from .beside_keys import IndexedPoolLayer, RecurrentPoolLayer
from .index import BeamIndex
from .layers import CrossLayer, PoolLayer, one_row_per_prompt
from .packing import stored_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """What a cache holds. Slots are counted over all prompts, in one layer; bytes over all layers.

    Attributes:
        slots: slots in use, the prompts' and up to the highest that a beam sees.
        live: slots that some beam sees.
        free: slots in use that no beam sees; they are reused first.
        bytes_held: bytes of key and value storage, spare room and cross-attention included.
        bytes_live: bytes of the live slots and of the cross-attention.
        bytes_separate: bytes that `num_beams` separate sequences per prompt would hold, each layer what it must: with a
            sliding window, the last tokens.
    """

    slots: int
    live: int
    free: int
    bytes_held: int
    bytes_live: int
    bytes_separate: int


class BeamVerbs:
    """What a search may ask of the cache; shared by the decoder-only and the encoder-decoder form."""

    index: BeamIndex
    max_cache_len = -1
    """No limit. Releases before 5.20 ask their caches for it, and PEFT goes on asking."""

    def indexed_layers(self) -> list[PoolLayer | CrossLayer]:
        """All layers that keep their data in the pool or once per prompt."""
        raise NotImplementedError

    def row_layers(self) -> list[Any]:
        """What keeps one row per beam: layers of transformers' own, and states that pool layers have beside keys."""
        kept = [layer.state if isinstance(layer, PoolLayer) else layer for layer in self._decoder_layers()]
        return [layer for layer in kept if layer is not None]

    def _decoder_layers(self) -> list[Any]:
        raise NotImplementedError

    @property
    def num_beams(self) -> int:
        return self.index.num_beams

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether some layer keeps a recurrent state per beam."""
        return any(versions.is_recurrent(layer) for layer in self.row_layers())

    @property
    def can_fold(self) -> bool:
        """Whether every attention layer of this cache lives in the pool."""
        rows = any(versions.is_attention(layer) for layer in self.row_layers())
        return not rows and all(layer.can_fold for layer in self._pool_layers())

    def begin_decode(self, batch_size: int, device: torch.device, widths: Sequence[int] | None = None) -> None:
        """Close the prompt: each prompt's beams stand at its end.

        Args:
            batch_size: `B`, prompts.
            device: where index tables live.
            widths: beams of each prompt; `num_beams` if None.

        Raises:
            NotImplementedError: if layers hold prompts of different lengths, as where some keep an image's keys, or
                none at all, as where the model keeps them itself, or if the model has put a tensor on this object.
        """
        bound = [name for name, given in vars(self).items() if isinstance(given, torch.Tensor)]
        if bound:
            raise NotImplementedError(f"it keeps {bound[0]} on the cache itself, outside its layers")
        layers = self._pool_layers()
        lengths = sorted({layer.length for layer in layers} - {0})  # some take no part, as where there is no image
        if layers and not lengths:
            raise NotImplementedError("it puts nothing into the cache that it is given")
        if len(lengths) > 1:
            raise NotImplementedError(f"its attention layers keep prompts of different lengths, {lengths}")
        length = lengths[0] if lengths else 0
        self._end_prompt(batch_size, length, device, widths)
        if self.row_layers():
            self._widen_row_layers()

    def _end_prompt(
        self, batch_size: int, length: int, device: torch.device, widths: Sequence[int] | None = None
    ) -> None:
        self.accept_wide_prompt(False)
        for layer in self.indexed_layers():
            layer.end_prompt()
        self.index.begin_decode(batch_size, length, device, widths)

    def _widen_row_layers(self) -> None:
        """Give every beam its row of the layers that keep rows, by their own `reorder_cache`."""
        before = [(layer, tree_leaves(list(vars(layer).values()))) for layer in self.row_layers()]
        batch = self.index.batch_size
        self._reorder_rows(self.index.beams.prompt)
        for layer, tensors in before:
            rows = {id(given) for given in tensors if isinstance(given, torch.Tensor) and given.shape[:1] == (batch,)}
            if any(id(given) in rows for given in tree_leaves(list(vars(layer).values()))):
                raise NotImplementedError(f"a {type(layer).__name__} keeps rows that it does not reorder")

    def fork(self, parents: torch.Tensor) -> torch.Tensor:
        """Let beams continue their parents, and give each a slot for its next token.

        Args:
            parents: ``[R]`` int64, row that each beam continues, counted over the whole batch.

        Returns:
            0-dim int64, not negative: a report that the host must hand to `grow` before the next forward pass.
        """
        self._reorder_rows(parents)
        return self.index.fork(parents)

    def newest_slots(self) -> torch.Tensor:
        """``[R]`` int64: the slot that the last `fork` gave each beam, counted from the start of its prompt's pool."""
        return self.index.write_slots()

    def leave(self, kept: Sequence[int]) -> torch.Tensor:
        """Go on with some of the prompts only, and give back what the others held; after a `fork`.

        Args:
            kept: places of these prompts among the present ones, in order.

        Returns:
            ``[R]`` int64: the rows so far that are theirs.
        """
        places = torch.tensor(kept, device=self.index.paths.device)
        for layer in self.indexed_layers():
            layer.leave(places)
        rows = self.index.leave(kept)
        self._reorder_rows(rows)
        return rows

    def keep_slots(self) -> None:
        """Let no token move to another slot in this search, because the caller notes `newest_slots`."""
        self.index.keeps_slots = True

    def grow(self, report: int) -> None:
        """Make room for the slots that the last `fork` gave (the pools grow when they are next written).

        Where the live slots lie too far apart, they move together: see index.py.
        """
        needed = self.index.set_high_water(report)
        if self.index.is_sparse(needed):
            old, new = self.index.compact(needed)
            for layer in self._pool_layers():
                if layer.length > self.index.prompt_length:  # one that takes no part in decoding has no such slots
                    layer.move(old, new)

    def grow_late(self, report: int | None) -> None:
        """As `grow`, knowing only what the `fork` before the last one reported, or nothing at the first."""
        self.index.bound_high_water(report)

    def rewind(self, row_layers: list[Any] | None = None) -> None:
        """Forget what the current step wrote, so that it can be run again.

        Args:
            row_layers: copies of `row_layers`, made before the step, to be put back.
        """
        for layer in self.indexed_layers():
            layer.rewind()
        if row_layers is not None:
            self._put_row_layers(row_layers)

    def _put_row_layers(self, row_layers: list[Any]) -> None:
        layers, copies = self._decoder_layers(), iter(row_layers)
        for number, layer in enumerate(layers):
            if not isinstance(layer, PoolLayer):
                layers[number] = next(copies)
            elif layer.state is not None:
                layer.state = next(copies)

    def sample(self, prompts: Sequence[int], num_beams: int) -> Any:
        """A cache of the first beams of some prompts, just after the prompt: what happens to it stays with it.

        Args:
            prompts: places of these prompts.
            num_beams: beams of each, at most as many as each has.
        """
        index = BeamIndex(max(2, num_beams))  # of a grid of one cell a mask looks like any other
        widths = [num_beams] * len(prompts)
        index.begin_decode(len(prompts), self.index.prompt_length, self.index.paths.device, widths)
        index.fork(index.beams.repeat(index.beams.first.squeeze(1)))
        index.set_high_water(num_beams - 1)
        return self._sampled(index, prompts, self.rows_of_first_beams(prompts, num_beams))

    def rows_of_first_beams(self, prompts: Sequence[int], num_beams: int) -> torch.Tensor:
        """``[prompts · num_beams]`` int64: rows of the first beams of some prompts."""
        first = self.index.beams.first[list(prompts)]
        return (first + torch.arange(num_beams, device=first.device)).flatten()

    def _sampled(self, index: BeamIndex, prompts: Sequence[int], rows: torch.Tensor) -> Any:
        raise NotImplementedError

    def end(self) -> None:
        """Close the search: slots given for a next token are taken back."""
        for layer in self.indexed_layers():
            layer.rewind()
        self.index.drop_pending()

    def accept_wide_prompt(self, wide: bool) -> None:
        """Say whether the prompt will arrive as one row per beam (True) or as one row per prompt (False)."""
        for layer in self.indexed_layers():
            layer.wide_prompt = wide

    def held_bytes(self) -> int:
        """Bytes of key and value storage, spare room and cross-attention included."""
        return sum(layer.held_bytes() for layer in self.indexed_layers())

    def usage(self) -> CacheUsage:
        """Count slots and bytes; reads values on the host, so not for use inside a search."""
        layers = self._pool_layers()
        length = max((layer.length for layer in layers), default=0)
        index = self.index
        cross = [layer for layer in self.indexed_layers() if isinstance(layer, CrossLayer)]
        cross_bytes = sum(layer.held_bytes() for layer in cross)
        rows = next((layer._keys.shape[0] for layer in layers if layer._keys is not None), 0)
        slots = rows * (index.prompt_length + index.tree_slots) if index.decoding else rows * length
        live = slots
        beams_per_prompt = index.beams.count / index.batch_size if index.batch_size else self.num_beams
        if index.decoding and layers:
            live = rows * index.prompt_length + int(index.live().sum())
        return CacheUsage(
            slots=slots,
            live=live,
            free=slots - live,
            bytes_held=self.held_bytes(),
            bytes_live=sum((live - rows * layer.dropped) * layer.bytes_per_token() for layer in layers) + cross_bytes,
            bytes_separate=round(
                beams_per_prompt
                * (sum(rows * layer.length_shown * layer.bytes_per_token() for layer in layers) + cross_bytes)
            ),
        )

    def check(self) -> None:
        """Raise `AssertionError` unless every slot is live or free, and every beam's path is whole."""
        self.index.check()
        for layer in self._pool_layers():
            if layer._keys is None or not self.index.decoding:
                continue
            steps = layer.length - self.index.prompt_length
            if steps not in (self.index.paths.shape[1], self.index.paths.shape[1] - 1):
                raise AssertionError(f"{layer} wrote {steps} steps, the index knows {self.index.paths.shape[1]}")
            written = layer._keys.shape[2] + layer.dropped - self.index.prompt_length
            if steps and written < int(self.index.paths[:, :steps].max()) + 1:
                raise AssertionError(f"{layer} has {written} tree slots, a path names a higher one")
        usage = self.usage()
        if usage.live + usage.free != usage.slots or usage.free < 0:
            raise AssertionError(f"slots are neither live nor free: {usage}")

    def _pool_layers(self) -> list[PoolLayer]:
        return [layer for layer in self.indexed_layers() if isinstance(layer, PoolLayer)]

    def _reorder_rows(self, parents: torch.Tensor) -> None:
        for layer in self.row_layers():
            layer.reorder_cache(parents)

    def _stock_reorder(self, beam_idx: torch.Tensor) -> None:
        """One step of transformers' own search: `beam_idx` ``[B·W]`` int, rows counted over the batch."""
        parents = beam_idx.to(torch.int64)
        if not self.index.decoding:
            self._end_wide_prompt(parents)
        self.grow(int(self.index.fork(parents)))  # host read: transformers' loop, not ours

    def _end_wide_prompt(self, parents: torch.Tensor) -> None:
        own = torch.arange(parents.shape[0], device=parents.device) // self.num_beams
        if not torch.equal(parents // self.num_beams, own):
            raise ValueError(
                f"the cache was made for num_beams={self.num_beams}, but generate() reorders beams of another number. "
                f"Make the cache with the num_beams that generate() is called with."
            )
        length = max((layer.length for layer in self._pool_layers()), default=0)
        self._end_prompt(parents.shape[0] // self.num_beams, length, parents.device)


class PagedBeamCache(BeamVerbs, Cache):
    """A cache that stores each token of the beam tree once.

    Args:
        config: the model's configuration. For an encoder-decoder configuration the object made is a
            `PagedBeamEncoderDecoderCache`.
        num_beams: `W`, beams per prompt, at least 1.
        kv_dtype: what keys and values are stored as: "float16", "bfloat16", "int8" or "float8_e4m3fn" (the last two
            with a scale per token and head), or that torch.dtype; None for the model's own. The prompt's pass (of a
            prompt in chunks, the first) computes with what it made, what comes later with what was stored.
        stock_layers: the empty layers that transformers would use, where they were already made.

    As ``model.generate(..., num_beams=W, past_key_values=PagedBeamCache(model.config, num_beams=W))`` it serves
    transformers' own search; ``custom_generate="hf_paged_beam"`` makes its own.

    Raises:
        ValueError: if `num_beams` is no positive integer or `kv_dtype` unknown, and, while in use, if rows show
            another `num_beams`.
    """

    def __new__(cls, config: PreTrainedConfig | None = None, num_beams: int = 1, **kwargs):
        if cls is PagedBeamCache and config is not None and config.is_encoder_decoder:
            return PagedBeamEncoderDecoderCache(config, num_beams, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        config: PreTrainedConfig,
        num_beams: int,
        *,
        kv_dtype: str | torch.dtype | None = None,
        stock_layers: list[Any] | None = None,
    ):
        if isinstance(num_beams, bool) or not isinstance(num_beams, (int, Integral)) or num_beams < 1:
            raise ValueError(f"num_beams must be an integer of at least 1, but got {num_beams!r}")
        self.index = BeamIndex(int(num_beams))
        self.kv_dtype = stored_dtype(kv_dtype)
        stock_layers = versions.stock_layers(config) if stock_layers is None else stock_layers
        layers = [self._our_layer(layer) for layer in stock_layers]
        self._grows = not layers
        super().__init__(layers=layers)
        self._empty_row_layers = copy.deepcopy(self.row_layers())
        self._stock_driven = True
        self._config = config
        self.accept_wide_prompt(True)

    def __repr__(self) -> str:
        return _describe(self, "PagedBeamCache", len(self.layers))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        while self._grows and len(self.layers) <= layer_idx:
            layer = PoolLayer(self.index, stored=self.kv_dtype)
            layer.wide_prompt = self._stock_driven and not self.index.decoding
            self.layers.append(layer)
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def accept_wide_prompt(self, wide: bool) -> None:
        """Say whether the prompt will arrive as one row per beam (True) or as one row per prompt (False)."""
        self._stock_driven = wide
        super().accept_wide_prompt(wide)

    def indexed_layers(self) -> list[PoolLayer | CrossLayer]:
        """The layers that keep their keys and values in the pool."""
        return [layer for layer in self.layers if isinstance(layer, PoolLayer)]

    def _decoder_layers(self) -> list[Any]:
        return self.layers

    def _sampled(self, index: BeamIndex, prompts: Sequence[int], rows: torch.Tensor) -> PagedBeamCache:
        sample = copy.copy(self)
        sample.index, sample.layers = index, []
        for layer in self.layers:
            pooled = isinstance(layer, PoolLayer)
            sample.layers.append(layer.of_prompts(index, prompts) if pooled else copy.deepcopy(layer))
            if pooled and layer.state is not None:
                sample.layers[-1].state = copy.deepcopy(layer.state)
        sample._reorder_rows(rows)
        return sample

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._reorder_rows(beam_idx)
        self._stock_reorder(beam_idx)

    def reset(self) -> None:
        """Forget all tokens; the cache is as new."""
        super().reset()
        self._put_row_layers(copy.deepcopy(self._empty_row_layers))  # their own `reset` keeps a row per beam
        self.index.reset()
        self.accept_wide_prompt(True)

    def to_dynamic(self) -> DynamicCache:
        """transformers' own layout: one row per beam, ``[B·W, Hkv, length, D]`` in each layer; all data is copied."""
        dynamic = DynamicCache(config=self._config.get_text_config(decoder=True))
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, PoolLayer):
                dynamic.layers[number] = copy.deepcopy(layer)
                continue
            if len(dynamic.layers) <= number:  # a configuration that tells nothing of layers, or one that a model added
                dynamic.layers.append(versions.dynamic_layer(layer.sliding_window))
            layer.give_rows(dynamic.layers[number])
        return dynamic

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, None]]:
        for layer in self.layers:
            yield layer.keys, layer.values, None

    def _our_layer(self, stock_layer: Any) -> Any:
        kind = (self.index, getattr(stock_layer, "sliding_window", None), self.kv_dtype)
        if versions.is_plain_attention(stock_layer):
            return PoolLayer(*kind)
        if versions.is_attention_with_state(stock_layer):
            return RecurrentPoolLayer(*kind, state=versions.state_alone(stock_layer))
        if versions.is_indexed_attention(stock_layer):
            return IndexedPoolLayer(self.index, self.kv_dtype)
        return copy.deepcopy(stock_layer)  # the caller's own may be among them


class _CrossCache(Cache):
    """Cross-attention layers, made as the model asks for them."""

    def __init__(self, index: BeamIndex, stored: torch.dtype | None):
        self.wide_prompt = False
        self.index = index
        self._stored_dtype = stored
        super().__init__(layers=[])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        while len(self.layers) <= layer_idx:
            layer = CrossLayer(self.index, self._stored_dtype)
            layer.wide_prompt = self.wide_prompt
            self.layers.append(layer)
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Nothing moves: all beams of a prompt share the encoder's keys and values."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, None]]:
        for layer in self.layers:
            yield layer.keys, layer.values, None


class PagedBeamEncoderDecoderCache(BeamVerbs, EncoderDecoderCache):
    """`PagedBeamCache` for encoder-decoder models: a pool for self-attention, one row per prompt for cross-attention.

    Args:
        config: the model's configuration.
        num_beams: `W`, beams per prompt, at least 1.
        kv_dtype: as in `PagedBeamCache`; the cross-attention's keys and values are stored so too.
        stock_layers: the empty layers that transformers would use for the decoder, where they were already made.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        num_beams: int,
        *,
        kv_dtype: str | torch.dtype | None = None,
        stock_layers: list[Any] | None = None,
    ):
        self_attention = PagedBeamCache.__new__(PagedBeamCache)
        self_attention.__init__(config, num_beams, kv_dtype=kv_dtype, stock_layers=stock_layers)
        self.index, self.kv_dtype = self_attention.index, self_attention.kv_dtype
        super().__init__(self_attention, _CrossCache(self.index, self.kv_dtype))
        self.accept_wide_prompt(True)

    def __repr__(self) -> str:
        return _describe(self, "PagedBeamEncoderDecoderCache", len(self.self_attention_cache.layers))

    def indexed_layers(self) -> list[PoolLayer | CrossLayer]:
        """The decoder's layers that keep theirs in the pool, and those of its cross-attention."""
        return [*self.self_attention_cache.indexed_layers(), *self.cross_attention_cache.layers]

    def _decoder_layers(self) -> list[Any]:
        return self.self_attention_cache.layers

    def accept_wide_prompt(self, wide: bool) -> None:
        """Say whether the prompt will arrive as one row per beam (True) or as one row per prompt (False)."""
        self.self_attention_cache.accept_wide_prompt(wide)
        self.cross_attention_cache.wide_prompt = wide
        super().accept_wide_prompt(wide)

    def _sampled(self, index: BeamIndex, prompts: Sequence[int], rows: torch.Tensor) -> PagedBeamEncoderDecoderCache:
        sample = copy.copy(self)
        sample.index = index
        sample.self_attention_cache = self.self_attention_cache._sampled(index, prompts, rows)
        sample.cross_attention_cache = copy.copy(self.cross_attention_cache)
        sample.cross_attention_cache.index = index
        sample.cross_attention_cache.layers = [
            layer.of_prompts(index, prompts) for layer in self.cross_attention_cache.layers
        ]
        sample.is_updated = dict(self.is_updated)
        return sample

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._reorder_rows(beam_idx)
        self._stock_reorder(beam_idx)

    def reset(self) -> None:
        """Forget all tokens; the cache is as new."""
        super().reset()
        self.index.reset()
        self.accept_wide_prompt(True)

    def to_dynamic(self) -> EncoderDecoderCache:
        """transformers' own layout: one row per beam in self- and cross-attention."""
        cross = DynamicCache()
        for number, layer in enumerate(self.cross_attention_cache.layers):
            if layer.keys is not None:
                cross.update(layer.keys, layer.values, number)
        return EncoderDecoderCache(self.self_attention_cache.to_dynamic(), cross)


def _describe(cache: BeamVerbs, name: str, layers: int) -> str:
    usage = cache.usage()
    return (
        f"{name}(layers={layers}, num_beams={cache.num_beams}, batch_size={cache.index.batch_size}, "
        f"prompt_length={cache.index.prompt_length}, slots={usage.slots}, live={usage.live}, free={usage.free}, "
        f"MiB={usage.bytes_held / 2**20:.1f}, separate_MiB={usage.bytes_separate / 2**20:.1f})"
    )


def adopt_prefix(
    prefix: Cache, config: PreTrainedConfig, num_beams: int, batch_size: int, kv_dtype: torch.dtype | None = None
) -> Any:
    """A `PagedBeamCache` that begins with the keys and values of another cache, which stays as it is.

    Args:
        prefix: a cache with ``B`` or ``B·W`` rows; in the second case the rows of one prompt must be equal.
        config: the model's configuration.
        num_beams: `W`.
        batch_size: `B`.
        kv_dtype: as in `PagedBeamCache`.

    Raises:
        ValueError: if the number of rows is neither, or rows of one prompt differ.
        NotImplementedError: if the prefix holds anything but whole keys and values of attention layers.
    """
    cache = PagedBeamCache(config, num_beams, kv_dtype=kv_dtype)
    cache.accept_wide_prompt(False)
    ours, theirs = cache, prefix
    if isinstance(prefix, EncoderDecoderCache):
        ours, theirs = cache.self_attention_cache, prefix.self_attention_cache
        _adopt_layers(prefix.cross_attention_cache, cache.cross_attention_cache, num_beams, batch_size)
        cache.is_updated = dict(prefix.is_updated)
    _adopt_layers(theirs, ours, num_beams, batch_size)
    return cache


def _adopt_layers(theirs: Cache, ours: Cache, num_beams: int, batch_size: int) -> None:
    allowed = (batch_size, batch_size * num_beams)
    rows = versions.rows_of(theirs)
    if rows is not None and rows not in allowed:
        raise ValueError(
            f"the given cache has {rows} rows; expected {allowed[0]} (one per prompt) or {allowed[1]} (one per beam)"
        )
    for number, layer in enumerate(theirs.layers):
        if versions.is_placeholder(layer):
            continue
        whole = versions.whole_states(layer)
        if whole is None:
            what = f"layer {number} of the given cache, {layer}, holds more or less than the keys of a whole prefix"
            if rows not in (None, allowed[1]):
                raise ValueError(
                    f"{what}. Only transformers' own search can continue that, from {allowed[1]} rows, one per beam; "
                    f"the cache has {rows}."
                )
            raise NotImplementedError(what)
        keys, values = whole
        if keys.shape[0] == allowed[1]:
            keys, values = one_row_per_prompt(keys, num_beams), one_row_per_prompt(values, num_beams)
        if isinstance(ours, PagedBeamCache) and number == len(ours.layers):  # one that the model has added
            ours.layers.append(ours._our_layer(versions.dynamic_layer(getattr(layer, "sliding_window", None))))
        ours.update(keys, values, number)
