"""The prompt: which cache it goes into, its one forward pass at `B` rows, and what the decode steps need of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import utils as stock

from .. import versions
from ..cache import BeamRows, PagedBeamCache, PagedBeamEncoderDecoderCache, adopt_prefix
from ..versions import GenerativeModel

_PROMPT_ONLY = {"inputs_embeds", *getattr(stock, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())}
"""Inputs that no decode step reads: not carried on, let alone repeated for every beam."""

OUR_CACHES = (PagedBeamCache, PagedBeamEncoderDecoderCache)


class HandOver(Exception):
    """The call is one for transformers' own search.

    Args:
        reason: what is missing here, in one line.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def _has_an_adapter_per_row(model: GenerativeModel) -> bool:
    """Whether PEFT's hooks give each row an adapter of its own (``adapter_names``): they count one row per beam."""
    if not hasattr(model, "peft_config"):
        return False
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in (getattr(hook, "keywords", None) or {}) for hook in hooks)


def reason_to_hand_over(
    model: GenerativeModel, *, use_cache: bool, cache_implementation: str | None, given: Any
) -> str | None:
    """Why a pool cannot serve this model, these settings or this cache, in one line; None where it can.

    Args:
        given: the caller's cache, or the one that transformers made for the call, if any.
    """
    if not use_cache:
        return "use_cache=False recomputes every token, so that nothing is cached"
    if cache_implementation == "quantized":
        return (
            "cache_implementation='quantized' rounds the keys of all beams together, window by window, which a pool "
            "cannot repeat; kv_dtype='int8' rounds each token by itself"
        )
    if cache_implementation in ("offloaded", "offloaded_static"):
        return f"cache_implementation={cache_implementation!r} stores keys in a way that a pool does not"
    if hasattr(model, "_reorder_cache"):
        return f"{type(model).__name__} reorders its cache in a way of its own"
    if _has_an_adapter_per_row(model):
        return "adapter_names gives each row of every beam its adapter, before there are beams"
    if given is None:
        return None
    kind = type(given).__name__
    if not isinstance(given, Cache):
        return f"a cache of type {kind} is not a transformers Cache"
    if getattr(given, "offloading", False):
        return f"a {kind} that offloads its layers keeps them where a pool is not"
    if versions.is_quantized(given):
        return f"a {kind} with quantised layers stores keys in a way that a pool does not"
    return None


def prepare_cache(
    model: GenerativeModel,
    config: GenerationConfig,
    kwargs: dict[str, Any],
    batch_size: int,
    *,
    kv_dtype: torch.dtype | None,
) -> Any:
    """Our cache for this search, holding the prefix that the caller's cache holds, if any.

    Raises:
        HandOver: where the model, the configuration or the given cache asks for what a pool cannot do.
        ValueError: where the given cache does not fit the call.
    """
    given = kwargs.get(versions.CACHE_ARGUMENT)
    if given is None and config.use_cache and not versions.makes_default_cache_itself(model, kwargs):
        raise HandOver(f"{type(model).__name__} keeps its cache in a form of its own")
    reason = reason_to_hand_over(
        model, use_cache=config.use_cache, cache_implementation=config.cache_implementation, given=given
    )
    if reason is not None:
        raise HandOver(reason)
    if given is not None and versions.has_seen_tokens(given):
        return _adopt(given, model, config.num_beams, batch_size, kv_dtype)
    if isinstance(given, OUR_CACHES):
        if given.num_beams != config.num_beams:
            raise ValueError(
                f"the given cache was made for num_beams={given.num_beams}, but the call has "
                f"num_beams={config.num_beams}. Make it with the num_beams of the call."
            )
        if kv_dtype not in (None, given.kv_dtype):
            raise ValueError(
                f"the given cache was made with kv_dtype={given.kv_dtype}, but the call has kv_dtype={kv_dtype}. "
                f"Leave kv_dtype out of the call, or make the cache with it."
            )
        cache = given
    else:
        layers = versions.dynamic_layers(given)
        cache = PagedBeamCache(model.config, config.num_beams, kv_dtype=kv_dtype, stock_layers=layers)
    cache.accept_wide_prompt(False)
    if batch_size == 1 and cache.has_recurrent_layers and _is_padded(kwargs) and versions.takes_padding_in(model):
        raise HandOver(f"{type(model).__name__} takes padding into its states where there is one row")
    return cache


def _is_padded(kwargs: dict[str, Any]) -> bool:
    mask = kwargs.get("attention_mask")
    return mask is not None and not bool(mask.all())  # host read: before the search


def cache_with_prompt(cache: Any, kwargs: dict[str, Any], *, model: GenerativeModel, batch_size: int) -> Any:
    """The cache that holds the prompt: ours, also where the model put the prompt into another one.

    So PEFT's prefix tuning does, which begins every search with a cache that holds its prefix.

    Args:
        cache: ours, as the model was given it.
        kwargs: the inputs of the next step.

    Raises:
        HandOver: where a pool cannot continue what the model returned.
    """
    others = {name: given for name, given in kwargs.items() if isinstance(given, Cache) and given is not cache}
    returned = others.pop(versions.CACHE_ARGUMENT, None)
    if others:
        raise HandOver(f"{type(model).__name__} keeps rows in a cache of its own, {next(iter(others))}")
    if returned is None or not returned.get_seq_length():
        _check_next_inputs(model, kwargs)
        return cache
    if isinstance(returned, EncoderDecoderCache) != isinstance(cache, EncoderDecoderCache):
        raise HandOver(f"{type(model).__name__} wraps its cache in a {type(returned).__name__}")
    reason = reason_to_hand_over(model, use_cache=True, cache_implementation=None, given=returned)
    if reason is not None:
        raise HandOver(reason)
    if not versions.counts_from(returned, kwargs):
        raise HandOver(f"{type(model).__name__} does not count the tokens of the cache that it put the prompt into")
    return _adopt(returned, model, cache.num_beams, batch_size, cache.kv_dtype)


def _check_next_inputs(model: GenerativeModel, kwargs: dict[str, Any]) -> None:
    """Hand over, before anything is chosen, if what wraps the model prepares more than a step's one token, as adapters
    do which put virtual tokens before what they take for a prompt."""
    if "prepare_inputs_for_generation" not in vars(model):
        return
    rows = kwargs["attention_mask"].shape[0] if kwargs.get("attention_mask") is not None else 1
    token = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
    inputs = model.prepare_inputs_for_generation(token, **versions.NEWEST_TOKEN, **kwargs)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    given = [inputs.get(part) for part in (name, "inputs_embeds") if inputs.get(part) is not None]
    if any(part.shape[1] != 1 for part in given):
        raise HandOver(f"{type(model).__name__} is wrapped by what prepares several tokens for a step of one")


def _adopt(given: Cache, model: GenerativeModel, num_beams: int, batch_size: int, kv_dtype: torch.dtype | None) -> Any:
    try:
        return adopt_prefix(given, model.config, num_beams, batch_size, kv_dtype or getattr(given, "kv_dtype", None))
    except NotImplementedError as error:
        if isinstance(given, OUR_CACHES):
            raise ValueError(
                f"{error}. Pass {versions.CACHE_ARGUMENT}=cache.to_dynamic() for transformers' own search to continue."
            ) from error
        raise HandOver(str(error)) from error


_HANDLED_STATE = {"rope_deltas"}
"""State that models keep beside the cache and give to every beam themselves: position offsets of multimodal prompts."""

_keeps_state: weakref.WeakKeyDictionary[GenerativeModel, str | None] = weakref.WeakKeyDictionary()
"""Models that have run a prompt: the state per row that their modules keep themselves, if any."""


def _tensors_of_modules(model: GenerativeModel) -> dict[tuple[str, str], torch.Tensor]:
    """Tensors that are plain attributes of modules: no parameters and no buffers."""
    return {
        (type(module).__name__, f"{place}.{name}"): given
        for place, module in model.named_modules()
        for name, given in vars(module).items()
        if isinstance(given, torch.Tensor) and name not in _HANDLED_STATE
    }


def _state_kept(before: dict, after: dict, rows: int) -> str | None:
    """Name of a module that took on a tensor with one row per prompt, if any did."""
    changed = [key for key, given in after.items() if given is not before.get(key) and given.dim() > 0]
    return next((kind for kind, place in changed if after[kind, place].shape[0] == rows), None)


def run_prompt(
    model: GenerativeModel, input_ids: torch.Tensor, config: GenerationConfig, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Run the prompt once, at one row per prompt.

    Args:
        input_ids: ``[B, P]`` int64.
        kwargs: the model's inputs, at ``B`` rows, with our cache.

    Returns:
        The model's outputs, and the inputs brought up to date, still at ``B`` rows.

    Raises:
        HandOver: if the model keeps a state per row outside the cache, which would not follow its beam, or asks the
            cache for what ours has not.
    """
    before = None if model in _keeps_state else _tensors_of_modules(model)
    try:
        outputs = versions.run_prompt(model, input_ids, config, kwargs)
    except AttributeError as error:
        if error.obj is None or error.obj is not kwargs.get(versions.CACHE_ARGUMENT):
            raise
        raise HandOver(f"{type(model).__name__} asks its cache for {error.name}, which ours has not") from error
    if before is not None:
        _keeps_state[model] = _state_kept(before, _tensors_of_modules(model), input_ids.shape[0])
    if _keeps_state[model] is not None:
        raise HandOver(f"{_keeps_state[model]} keeps a state per row outside the cache")
    kwargs = model._update_model_kwargs_for_generation(
        outputs, kwargs, is_encoder_decoder=model.config.is_encoder_decoder
    )
    return outputs, {name: given for name, given in kwargs.items() if name not in _PROMPT_ONLY}


def widen_inputs(kwargs: dict[str, Any], beams: BeamRows, *, part: str = "all") -> dict[str, Any]:
    """Give every beam its row of the model's inputs.

    Args:
        kwargs: inputs at ``B`` rows.
        beams: the rows of a step. What has another number of rows than it has prompts stays: images laid one after
            another, which no step reads again.
        part: of an encoder-decoder model, "decoder" or "encoder" to repeat only inputs of that part. What belongs to
            the encoder can stay at ``B`` rows where the folded attention reads it.
    """

    def repeat(name: str, given: torch.Tensor) -> torch.Tensor:
        dim = _row_dimension(name, given)
        return beams.repeat(given, dim=dim) if given.shape[dim] == beams.batch_size else given

    return {**kwargs, **_map_rows(_of_part(kwargs, part), repeat)}


def choose_rows(
    kwargs: dict[str, Any], count: int, chosen: torch.Tensor | Sequence[int], *, part: str = "all"
) -> dict[str, Any]:
    """Some rows of the model's inputs.

    Args:
        kwargs: inputs.
        count: rows that they have; what has another number of rows stays.
        chosen: which rows.
        part: as in `widen_inputs`.
    """

    def choose(name: str, given: torch.Tensor) -> torch.Tensor:
        dim = _row_dimension(name, given)
        if given.shape[dim] != count:
            return given
        return given.index_select(dim, torch.as_tensor(chosen, device=given.device))

    return {**kwargs, **_map_rows(_of_part(kwargs, part), choose)}


def _of_part(kwargs: dict[str, Any], part: str) -> dict[str, Any]:
    of_decoder = part == "decoder"
    return {name: given for name, given in kwargs.items() if part == "all" or name.startswith("decoder_") == of_decoder}


def _row_dimension(name: str, given: torch.Tensor) -> int:
    return 1 if name == "position_ids" and given.dim() == 3 else 0


def _map_rows(kwargs: dict[str, Any], change: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Change all inputs that have rows, those in `encoder_outputs` too."""
    changed = dict(kwargs)
    for name, given in kwargs.items():
        if isinstance(given, torch.Tensor) and given.dim() > 0 and name != "cache_position":
            changed[name] = change(name, given)
        elif name == "encoder_outputs" and given is not None:
            changed[name] = type(given)(**_map_rows(given, change))
    return changed
