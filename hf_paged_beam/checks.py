"""What is refused before the model runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .generation import check_counts
from .versions import GenerativeModel


def is_beam_search(model: GenerativeModel, arguments: dict[str, Any]) -> bool:
    """Whether the call asks for more than one beam and no other model's help; anything else is transformers' own."""
    num_beams, _ = _counts(model, arguments)
    one_beam = num_beams == 1 and not isinstance(num_beams, bool)
    return not one_beam and arguments.get("assistant_model") is None


def check_arguments(model: GenerativeModel, inputs: torch.Tensor | None, arguments: dict[str, Any]) -> None:
    """Refuse what cannot give a right answer, before anything is computed.

    Args:
        inputs: the first argument of ``generate``.
        arguments: all others; nothing is changed.

    Raises:
        ValueError: naming the argument, what came, and what is accepted.
    """
    check_counts(*_counts(model, arguments))
    if arguments.get("streamer") is not None:
        raise ValueError(
            "streamer cannot be used with beam search: the best sequence can change until the end. "
            "Leave it out, or set num_beams=1."
        )
    input_ids = arguments.get("input_ids") if inputs is None else inputs
    _check_ids(model, input_ids, arguments)


def _check_ids(model: GenerativeModel, input_ids: Any, arguments: dict[str, Any]) -> None:
    is_ids = isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and not input_ids.is_floating_point()
    if not is_ids or arguments.get("encoder_outputs") is not None:
        return
    embeds = arguments.get("inputs_embeds")
    if input_ids.shape[0] == 0 or (input_ids.shape[1] == 0 and embeds is None):
        raise ValueError(
            f"input_ids must hold at least one prompt of at least one token, but has shape {tuple(input_ids.shape)}"
        )
    mask = arguments.get("attention_mask")
    columns = input_ids.shape[1] if embeds is None else embeds.shape[1]
    has_prefix = arguments.get("cache") is not None or arguments.get("past_key_values") is not None
    if mask is not None and (mask.shape[0] != input_ids.shape[0] or (mask.shape[-1] != columns and not has_prefix)):
        raise ValueError(
            f"attention_mask must have the shape of the prompt, {(input_ids.shape[0], columns)}, "
            f"but has shape {tuple(mask.shape)}"
        )
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None or input_ids.device.type == "meta" or input_ids.numel() == 0:
        return
    low, high = torch.stack([input_ids.min(), input_ids.max()]).tolist()  # host read: once, before the search
    if low < 0 or high >= rows:
        raise ValueError(
            f"input_ids must lie in 0..{rows - 1}, the model's vocabulary, but hold {low if low < 0 else high}. "
            f"Check that the tokenizer belongs to the model."
        )


def check_prompt_fits(model: GenerativeModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse a prompt that is longer than the table of learned positions; other models extrapolate, with a warning.

    Raises:
        ValueError: with the prompt's length and the model's.
    """
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = input_ids.shape[1]
    if not isinstance(positions, int) or length <= positions or not _has_position_table(model, positions):
        return
    raise ValueError(
        f"the prompt has {length} tokens, but {type(model).__name__} has a table of {positions} positions "
        f"(max_position_embeddings). Shorten the prompt."
    )


def _has_position_table(model: GenerativeModel, positions: int) -> bool:
    inputs = model.get_input_embeddings()
    return any(
        isinstance(module, nn.Embedding)
        and module is not inputs
        and positions <= module.num_embeddings <= positions + 2
        for module in model.modules()
    )


def _counts(model: GenerativeModel, arguments: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(_setting(name, model, arguments, 1) for name in ("num_beams", "num_return_sequences"))  # type: ignore


def _setting(name: str, model: GenerativeModel, arguments: dict[str, Any], default: Any) -> Any:
    """A generation setting as transformers resolves it: keyword, then given configuration, then the model's."""
    given = arguments.get(name)
    for config in (arguments.get("generation_config"), model.generation_config):
        if given is None and config is not None:
            given = getattr(config, name, None)
    return default if given is None else given
