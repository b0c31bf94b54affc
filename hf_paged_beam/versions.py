"""Everything that differs between transformers versions. No other file asks for a version.

Differences are found by looking (a signature, a field), never by comparing version numbers, so that a release
candidate or a patched build is judged by what it does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, cache_utils, masking_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedLayer,
    StaticLayer,
)
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerationMixin,
)

try:
    from transformers import PreTrainedConfig
except ImportError:  # before 5.0
    from transformers import PretrainedConfig as PreTrainedConfig

GenerativeModel: TypeAlias = Any
"""A `PreTrainedModel` that is a `GenerationMixin` too; transformers has no name for that."""

CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""Name under which models take and return their cache: ``past_key_values`` became ``cache`` in 5.24."""

OTHER_DECODING_METHODS = {name for name in GENERATION_MODES_MAPPING.values() if "/" not in name} - {"_beam_search"}
"""Names of transformers' decoding methods (greedy, sampling, assisted) that are not beam search."""

_PREFILL_COUNTS_ITERATIONS = hasattr(GenerationMixin, "_prefill") and (
    "is_first_iteration" in inspect.signature(GenerationMixin._prefill).parameters
)

_PREPARATION = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

NEWEST_TOKEN = {"next_sequence_length": 1} if "next_sequence_length" in _PREPARATION else {}
"""Argument of `prepare_inputs_for_generation` that asks for the newest token alone. Earlier versions read that off
``cache_position``."""

bidirectional_mask_function = getattr(masking_utils, "bidirectional_mask_function", None)
"""The rule of cross-attention masks, where transformers makes them through the mask interface (from 5.0 on)."""

MASKS_NEED_VMAP = "use_vmap" not in inspect.signature(masking_utils.sdpa_mask).parameters
"""Whether mask functions are written for single indices only (before 5.0)."""

SAMPLES_ARE_SORTED = ".sort(" in inspect.getsource(GenerationMixin._get_top_k_continuations)
"""Whether beam sampling orders drawn candidates by score, or leaves them as drawn; only the first `W` may finish."""

RecurrentLayer = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
"""What transformers takes for a layer with a recurrent state; None in releases whose models keep those themselves."""

_ATTENTION_WITH_STATE = {
    getattr(cache_utils, name, None)
    for name in ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
}

RECURRENT_STATE_METHOD = "update_recurrent_state"  # present on every layer that keeps a state per row


class _SearchReport:
    """What the outputs of this package tell beside their items. No items themselves: code in transformers that splits
    outputs by row takes every item for something with a row per sequence."""

    beam_path: str | None = None
    beam_trace: Any = None

    @property
    def kv_usage(self) -> Any:
        """`PagedBeamCache.usage` of the returned cache, counted when it is asked for. A search leaves its cache as it
        was at the end. None if the cache was taken away, or another put in its place, as Whisper's `generate` does.
        """
        count = getattr(getattr(self, CACHE_ARGUMENT, None), "usage", None)
        return None if count is None else count()


@dataclasses.dataclass
class BeamDecoderOnlyOutput(GenerateBeamDecoderOnlyOutput, _SearchReport):
    """transformers' beam output for decoder-only models, with what this package adds. `N` sequences are returned, over
    all prompts: ``B · n``, or where prompts ask for different numbers, their sum.

    Args:
        token_logprobs: ``[N, T]`` float32, processed log-probability of each returned token, 0 after the end.
            Its row sums over the length form are `sequences_scores`.
        prompt_index: ``[N]`` int64, prompt of each sequence.
        item_ids: ``[N]`` int64, with a trie: index of the item that each sequence is, -1 where it is none.
        sequences_log_probs: ``[N]`` float32, with ``sampling="stochastic_beam"``: summed log-probability of each
            sequence; -inf where there is none.
        perturbed_scores: ``[N]`` float32, likewise: log-probability plus Gumbel noise, by which sequences are ordered.
        threshold: ``[N]`` float32, likewise: the largest perturbed score of the prompt's sequences that were not
            returned; -inf where there is none.

    Attributes:
        kv_usage: what the search's cache holds (`CacheUsage`), counted when it is asked for.
        beam_path: ``"folded"``, ``"gathered"``, ``"recurrent"`` or ``"handed over"``.
        beam_trace: `BeamTrace`, if it was asked for.
    """

    token_logprobs: torch.Tensor | None = None
    prompt_index: torch.Tensor | None = None
    item_ids: torch.Tensor | None = None
    sequences_log_probs: torch.Tensor | None = None
    perturbed_scores: torch.Tensor | None = None
    threshold: torch.Tensor | None = None


@dataclasses.dataclass
class BeamEncoderDecoderOutput(GenerateBeamEncoderDecoderOutput, _SearchReport):
    """transformers' beam output for encoder-decoder models, with the fields of `BeamDecoderOnlyOutput`."""

    token_logprobs: torch.Tensor | None = None
    prompt_index: torch.Tensor | None = None
    item_ids: torch.Tensor | None = None
    sequences_log_probs: torch.Tensor | None = None
    perturbed_scores: torch.Tensor | None = None
    threshold: torch.Tensor | None = None


def stock_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that transformers itself would make for this configuration's decoder."""
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)


def dynamic_layer(sliding_window: int | None) -> Any:
    """An empty growing layer as transformers makes it, with a window or without."""
    return DynamicLayer() if sliding_window is None else DynamicSlidingWindowLayer(sliding_window=sliding_window)


def takes_padding_in(model: GenerativeModel) -> bool:
    """Whether recurrent layers leave padding out only where there are several rows, as in releases up to 5.12 or so.

    transformers' own search always has several: one for each beam.
    """
    return any(_tests_for_several_rows(name) for name in {type(part).__module__ for part in model.modules()})


@functools.cache
def _tests_for_several_rows(module_name: str) -> bool:
    try:
        return "attention_mask.shape[0] > 1" in inspect.getsource(sys.modules[module_name])
    except (OSError, TypeError, KeyError):  # a module without a source
        return False


def makes_default_cache_itself(model: GenerativeModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a model that is given no cache makes a usual one in its forward pass (5.0), so that it can take ours.

    Not if it was given one under another name.
    """
    given = any(isinstance(value, Cache) for value in model_kwargs.values())
    return model._supports_default_dynamic_cache() and not given


def dynamic_layers(cache: Any) -> list[Any] | None:
    """The layers of a growing cache as transformers makes it by default; None for a cache of another kind."""
    decoder = getattr(cache, "self_attention_cache", cache)
    return list(decoder.layers) if type(decoder) is DynamicCache else None


def is_plain_attention(layer: Any) -> bool:
    """Whether a stock layer keeps nothing but keys and values per token, which a pool can hold."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def is_attention_with_state(layer: Any) -> bool:
    """Whether a stock layer keeps keys and values per token and a recurrent state beside them."""
    return type(layer) in _ATTENTION_WITH_STATE


def state_alone(layer: Any) -> Any:
    """An empty stock layer for the recurrent state that an `is_attention_with_state` layer keeps."""
    counted = {"number_of_states": layer.number_of_states} if hasattr(layer, "number_of_states") else {}
    return cache_utils.LinearAttentionLayer(**counted)


def is_indexed_attention(layer: Any) -> bool:
    """Whether a stock layer keeps keys and values per token and an indexer's keys beside them."""
    return type(layer) is getattr(cache_utils, "DynamicIndexedLayer", None)


def is_attention(layer: Any) -> bool:
    """Whether a stock layer keeps keys and values per token, alone or beside other state."""
    return isinstance(layer, CacheLayerMixin)


def is_placeholder(layer: Any) -> bool:
    """Whether a stock layer holds nothing: one that shares another's keys, or has no attention."""
    return type(layer) is getattr(cache_utils, "DummyLayer", None)


def rows_of(cache: Any) -> int | None:
    """Number of rows of a cache, from the first layer that holds any."""
    for layer in cache.layers:
        held = [getattr(layer, name, None) for name in ("keys", "conv_states", "recurrent_states")]  # one, or several
        rows = [given.shape[0] for given in tree_leaves(held) if isinstance(given, torch.Tensor)]
        if rows:
            return rows[0]
    return None


def is_recurrent(layer: Any) -> bool:
    """Whether a stock layer keeps a recurrent or convolution state per row."""
    return hasattr(layer, RECURRENT_STATE_METHOD)


def whole_states(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of all tokens that an attention layer of any cache has seen, ``[rows, Hkv, length, D]``.

    Where a window has moved on, zeros stand in for what it left behind, which no later token sees. None for a layer
    that holds anything else: recurrent states, indexer keys, a ring of slots.
    """
    ours = hasattr(layer, "index") and getattr(layer, "state", None) is None
    if not is_plain_attention(layer) and type(layer) is not StaticLayer and not ours:
        return None
    keys, values, length = layer.keys, layer.values, layer.get_seq_length()
    if keys is None or values is None:
        return None
    length = int(length)  # a tensor in static layers; host read: before the search
    if type(layer) is StaticLayer:
        return keys[:, :, :length], values[:, :, :length]
    dropped = length - keys.shape[-2]
    if not dropped:
        return keys, values
    if not layer.is_sliding or dropped < 0:
        return None
    return functional.pad(keys, (0, 0, dropped, 0)), functional.pad(values, (0, 0, dropped, 0))


def is_quantized(cache: Any) -> bool:
    """Whether a cache stores quantised keys."""
    return any(isinstance(layer, QuantizedLayer) or "Quantized" in type(layer).__name__ for layer in _layers(cache))


def has_seen_tokens(cache: Any) -> bool:
    """Whether a cache holds a prefix, in keys or in recurrent states."""
    if any(is_attention(layer) for layer in _layers(cache)):
        return cache.get_seq_length() > 0
    states = [getattr(layer, "has_previous_state", False) for layer in _layers(cache)]
    return any(any(state.values()) if isinstance(state, dict) else state for state in states)


def _layers(cache: Any) -> list[Any]:
    return list(getattr(cache, "self_attention_cache", cache).layers)


def set_length(layer: Any, length: int) -> None:
    """Tell a stock layer how many tokens it has seen, where it keeps fewer (a sliding window)."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length


def uses_stock_input_preparation(model: GenerativeModel) -> bool:
    """Whether the model reads only the newest token of each row when a step's inputs are prepared."""
    own = getattr(model.prepare_inputs_for_generation, "__func__", None)
    return own is GenerationMixin.prepare_inputs_for_generation


def run_prompt(model: GenerativeModel, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> Any:
    """One forward pass over the prompt, as transformers' own search makes it.

    Args:
        input_ids: ``[B, P]`` int64.
        config: the generation configuration.
        kwargs: the model's inputs; versions that count ``cache_position`` add it here.
    """
    if not hasattr(model, "_prefill"):  # before 5.0
        kwargs.update(model._get_initial_cache_position(input_ids.shape[1], input_ids.device, kwargs))
        return model(**model.prepare_inputs_for_generation(input_ids, **kwargs), return_dict=True)
    if _PREFILL_COUNTS_ITERATIONS:
        return model._prefill(input_ids, config, kwargs, is_first_iteration=not config.is_assistant)
    return model._prefill(input_ids, config, kwargs)


def counts_from(cache: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the next step's positions, where a version counts them beside the cache, go on from what the cache holds.

    Where they do not, that version's masks hide the newest tokens.
    """
    positions = kwargs.get("cache_position")
    return positions is None or int(positions[-1]) == cache.get_seq_length()  # host read: before the search


def speaks_of_cached_tokens(mask_function: Callable, arguments: dict[str, Any]) -> bool:
    """Whether a mask of a decode step is about the tokens in the cache, and not about the encoder's.

    Args:
        mask_function: the rule.
        arguments: what else a version hands to mask functions: ``q_offset``, or ``cache_position`` in its place, whose
            values are not read.
    """
    offset = arguments.get("q_offset")
    if offset is not None and not isinstance(offset, torch.Tensor):  # a tensor in a captured step
        return offset != 0
    return mask_function is not bidirectional_mask_function


def query_length(queries: int | torch.Tensor) -> int:
    """Number of queries, from what a version hands to `get_mask_sizes`: that number, or their positions."""
    return queries if isinstance(queries, int) else queries.shape[0]


def evaluate_unbatched(mask_function: Callable, batch: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
    """Evaluate a mask function that is not written for broadcasting, at each prompt's own key positions.

    Args:
        batch: ``[B]`` int64, row of each prompt.
        query: 0-dim int64, position of the query.
        key: ``[B, S]`` int64, positions of the keys.

    Returns:
        ``[B, S]`` bool.
    """
    head = torch.zeros((), dtype=torch.int64, device=key.device)
    over_keys = torch.vmap(mask_function, in_dims=(None, None, None, 0))
    over_prompts = torch.vmap(over_keys, in_dims=(0, None, None, 0))
    with TransformGetItemToIndex():
        return over_prompts(batch, head, query, key)
