"""What is refused before the model runs. Every error names the argument, what came, and what is accepted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import Cache

from .generation import Options, SearchSettings, TokenTrie, check_counts
from .versions import GenerativeModel, has_seen_tokens

_GONE = {
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}
"""Settings of searches that transformers has given up."""


def is_beam_search(model: GenerativeModel, arguments: dict[str, Any]) -> bool:
    """Whether the call asks for more than one beam and no other model's help; anything else is transformers' own."""
    num_beams, _ = _counts(model, arguments)
    one_beam = num_beams == 1 and not isinstance(num_beams, bool)
    return not one_beam and arguments.get("assistant_model") is None


def check_arguments(model: GenerativeModel, inputs: torch.Tensor | None, arguments: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that cannot give a right answer.

    Args:
        inputs: the first argument of ``generate``.
        arguments: all others; nothing is changed.

    Raises:
        ValueError: see the module's header.
    """
    check_counts(*_counts(model, arguments))
    if arguments.get("streamer") is not None:
        raise ValueError(
            "streamer cannot be used with beam search: the best sequence can change until the end. "
            "Leave it out, or set num_beams=1."
        )
    for name, search in _GONE.items():
        if setting(name, model, arguments, None) not in (None, 1):
            raise ValueError(
                f"{name} asks for {search}, which this package does not search. transformers keeps it in a repository "
                f"of its own: leave out custom_generate (and enable()), and pass trust_remote_code=True."
            )
    input_ids = arguments.get("input_ids") if inputs is None else inputs
    if arguments.get("encoder_outputs") is None:
        _check_prompt(model, input_ids, arguments)
    decoder_ids: Any = arguments.get("decoder_input_ids")
    if _are_ids(decoder_ids):
        _check_not_empty("decoder_input_ids", decoder_ids)
        _check_ids("decoder_input_ids", decoder_ids, model, decoder=True)
        _check_positions(model, decoder_ids.shape[1], decoder=True)


def check_options(model: GenerativeModel, options: Options) -> None:
    """Refuse own keywords that do not fit the model.

    Raises:
        ValueError: see the module's header.
    """
    if options.coverage_penalty and not model.config.is_encoder_decoder:
        raise ValueError(
            f"coverage_penalty={options.coverage_penalty} reads the attention over a source, but "
            f"{type(model).__name__} has no encoder: leave it out"
        )
    if options.coverage_penalty and options.beam_attention == "folded":
        raise ValueError(
            "coverage_penalty reads attention maps, which beam_attention='folded' does not compute: use 'auto'"
        )


def check_prepared(model: GenerativeModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """The same for what transformers hands to a callable, whose encoder has run by then.

    Raises:
        ValueError: see the module's header.
    """
    if model.config.is_encoder_decoder:
        _check_ids("decoder_input_ids", input_ids, model, decoder=True)
        _check_positions(model, input_ids.shape[1], decoder=True)
    else:
        _check_prompt(model, input_ids, model_kwargs)


def check_processors(settings: SearchSettings, processors: LogitsProcessorList) -> None:
    """Refuse processors that keep a row of their own for every beam of every prompt where there is none.

    Raises:
        ValueError: see the module's header.
    """
    guided = any(isinstance(given, UnbatchedClassifierFreeGuidanceLogitsProcessor) for given in processors)
    uneven = len(set(settings.widths)) > 1
    if guided and (uneven or settings.options.num_beam_groups > 1):
        raise ValueError(
            f"guidance_scale runs the model on as many beams of every prompt, all at once: it cannot be had with "
            f"{'num_beams of different prompts' if uneven else 'num_beam_groups'}"
        )


def check_tries(
    model: GenerativeModel, batch_size: int, settings: SearchSettings, processors: LogitsProcessorList
) -> None:
    """Refuse tries that do not fit the call.

    Raises:
        ValueError: see the module's header.
    """
    tries = settings.options.tries
    if tries is None:
        return
    is_list = not isinstance(settings.options.trie, TokenTrie)
    if len(tries) not in (1, batch_size) or (len(tries) == 1 != batch_size and is_list):
        raise ValueError(
            f"trie has {len(tries)} tries for {batch_size} prompts. Pass one TokenTrie for all prompts, or a "
            f"list of one for each."
        )
    if any(isinstance(given, PrefixConstrainedLogitsProcessor) for given in processors):
        raise ValueError("prefix_allowed_tokens_fn and trie are two constraints of one kind; leave one of them out")
    rows = model.get_output_embeddings().weight.shape[0] if model.get_output_embeddings() is not None else None
    ends = [] if settings.eos_token_ids is None else settings.eos_token_ids.tolist()  # host read: before the search
    for trie in tries:
        if rows is not None and trie.largest_token >= rows:
            raise ValueError(f"trie holds the token {trie.largest_token}, but the model's vocabulary has {rows} tokens")
        for end in ends:
            if trie.goes_on_after(end):
                raise ValueError(
                    f"an item of trie goes on after the end token {end}, where a search ends. Leave such items out, or "
                    f"set eos_token_id to another token."
                )


def number_of_prompts(inputs: Any, arguments: dict[str, Any]) -> int | None:
    """`B`, from the first input that tells it; None if none does before transformers has prepared the call."""
    names = ("input_ids", "inputs_embeds", "input_features", "pixel_values")
    given = [inputs, *(arguments.get(name) for name in names)]
    return next((part.shape[0] for part in given if isinstance(part, torch.Tensor) and part.dim() > 1), None)


def _check_prompt(model: GenerativeModel, input_ids: Any, arguments: dict[str, Any]) -> None:
    embeds = arguments.get("inputs_embeds")
    if _are_ids(input_ids):
        if embeds is None:
            _check_not_empty("input_ids", input_ids)
        _check_ids("input_ids", input_ids, model, decoder=False)
    if embeds is not None:
        _check_not_empty("inputs_embeds", embeds)
    whole = embeds if embeds is not None else input_ids if _are_ids(input_ids) else None
    if whole is not None:
        _check_mask(whole.shape[:2], arguments)
        _check_positions(model, whole.shape[1], decoder=False)


def _check_not_empty(name: str, given: torch.Tensor) -> None:
    if 0 in given.shape[:2]:
        raise ValueError(f"{name} must hold at least one prompt of one token, but has shape {tuple(given.shape)}")


def _are_ids(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.dim() == 2 and not given.is_floating_point()


def _check_mask(shape: torch.Size, arguments: dict[str, Any]) -> None:
    mask = arguments.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return
    # With a prefix in a cache the mask covers the prefix too, of which only the cache knows the length.
    has_prefix = any(_holds_tokens(arguments.get(name)) for name in ("cache", "past_key_values"))
    wrong_length = mask.shape[-1] != shape[1] and not has_prefix
    if mask.dim() != 2 or mask.shape[0] != shape[0] or wrong_length:
        raise ValueError(
            f"attention_mask must have the shape of the prompt, {tuple(shape)}, but has shape {tuple(mask.shape)}"
        )


def _holds_tokens(cache: Any) -> bool:
    return isinstance(cache, Cache) and has_seen_tokens(cache)


def _check_ids(name: str, ids: torch.Tensor, model: GenerativeModel, *, decoder: bool) -> None:
    part = model.get_decoder() if decoder else model
    embedding = getattr(part, "get_input_embeddings", model.get_input_embeddings)()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None or ids.device.type == "meta" or ids.numel() == 0:
        return
    low, high = torch.stack(ids.aminmax()).tolist()  # host read: once, before the search
    if low < 0 or high >= rows:
        placeholders = torch.tensor(sorted(_placeholders(model.config)), dtype=ids.dtype, device=ids.device)
        real = ids[~torch.isin(ids, placeholders)]
        if real.numel() == 0:
            return
        low, high = torch.stack(real.aminmax()).tolist()  # host read: only where an id is out of range
    if low < 0 or high >= rows:
        raise ValueError(
            f"{name} must lie in 0..{rows - 1}, the model's vocabulary, but hold {low if low < 0 else high}. "
            f"Check that the tokenizer belongs to the model."
        )


def _placeholders(config: Any) -> set[int]:
    """Ids that stand for images, sound and the like; they may lie outside the vocabulary."""
    named = {name: given for name, given in vars(config).items() if name.endswith(("_token_id", "_token_index"))}
    return {given for given in named.values() if isinstance(given, int) and not isinstance(given, bool)}


def _check_positions(model: GenerativeModel, length: int, *, decoder: bool) -> None:
    """Refuse a prompt longer than a table of learned positions; models without one extrapolate, with a warning."""
    config = model.config.get_text_config(decoder=decoder)
    names = ("max_position_embeddings", "max_target_positions" if decoder else "max_source_positions")
    positions = next((size for size in (getattr(config, name, None) for name in names) if isinstance(size, int)), None)
    if positions is None or length <= positions:
        return
    part = model
    if model.config.is_encoder_decoder:
        part = model.get_decoder() if decoder else model.get_encoder()
    if _has_position_table(part, positions):
        raise ValueError(
            f"the prompt has {length} tokens, but {type(model).__name__} has a table of {positions} positions "
            f"(max_position_embeddings). Shorten the prompt."
        )


def _has_position_table(part: GenerativeModel, positions: int) -> bool:
    tokens = part.get_input_embeddings() if hasattr(part, "get_input_embeddings") else None
    tables = [module for module in part.modules() if isinstance(module, nn.Embedding) and module is not tokens]
    return any(positions <= table.num_embeddings <= positions + 2 for table in tables)  # some tables begin at 2


def _counts(model: GenerativeModel, arguments: dict[str, Any]) -> tuple[Any, Any]:
    return setting("num_beams", model, arguments, 1), setting("num_return_sequences", model, arguments, 1)


def setting(name: str, model: GenerativeModel, arguments: dict[str, Any], default: Any) -> Any:
    """A generation setting as transformers resolves it: keyword, then given configuration, then the model's."""
    given = arguments.get(name)
    for config in (arguments.get("generation_config"), model.generation_config):
        if given is None and config is not None:
            given = getattr(config, name, None)
    return default if given is None else given
