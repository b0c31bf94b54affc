"""How a call reaches the search.

    model.generate(..., custom_generate="hf_paged_beam")   name hook -> `generate`
    hf_paged_beam.generate(model, ...)                      `generate`
    enable(model), PagedBeamMixin                           the model's own generate, with the name filled in
    custom_generate=hf_paged_beam.beam_search               `beam_search`, after transformers repeated the inputs

`generate` lets transformers prepare everything, exactly as for its own beam search, on a stand-in for the model that
differs in two points: inputs are not repeated for every beam, and the decoding method is ours.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
from transformers.utils import logging

from . import versions
from .checks import (
    check_arguments,
    check_options,
    check_prepared,
    check_processors,
    check_tries,
    is_beam_search,
    number_of_prompts,
    setting,
)
from .generation import (
    LISTED,
    OUR_CACHES,
    HandOver,
    Options,
    SearchCall,
    SearchSettings,
    check_lists,
    reason_to_hand_over,
    run_search,
)
from .versions import GenerativeModel

NAME = "hf_paged_beam"
"""What `custom_generate` is called with."""

logger = logging.get_logger("hf_paged_beam")


_SHARED_WITH_TRANSFORMERS = {"num_beam_groups": 1, "diversity_penalty": 0.0}
"""Own keywords that releases of transformers have in their configuration too, and what switches them off there."""


@dataclasses.dataclass(frozen=True)
class _Own:
    """What a call asks of this package alone.

    Attributes:
        options: its keywords.
        lists: settings given as one value for each prompt, by name.
    """

    options: Options
    lists: dict[str, list[Any]]

    def refuse_to_hand_over(self, reason: str, *, one_beam: bool = False) -> None:
        """Raise `ValueError` if transformers' own search would give another result than was asked for.

        Args:
            reason: why it is needed.
            one_beam: whether it is no beam search: then there is one sequence, and nothing to rank.
        """
        asked = {**self.options.unknown_to_transformers(), **self.lists}
        if one_beam:
            asked = {name: given for name, given in asked.items() if name not in _FOR_ONE_BEAM_TOO}
        for name, given in asked.items():
            what = name if name == "trie" else f"{name}={given!r}"
            if one_beam:
                raise ValueError(
                    f"{what} needs num_beams of at least 2, and no assistant_model: it is part of beam search"
                )
            raise ValueError(
                f"{what} is not known to transformers' own search, which this call needs: {reason}. Leave {name} "
                f"out, or change what keeps the call from ours."
            )


_FOR_ONE_BEAM_TOO = {"length_normalization"}
"""Options that change nothing where there is one sequence."""


def _with_options(door: Callable) -> Callable:
    """Show this package's own keywords in a door's signature: transformers passes a callable what that names."""
    shown = inspect.signature(door)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
        for field in dataclasses.fields(Options)
    ]
    *before, rest = shown.parameters.values()
    setattr(door, "__signature__", shown.replace(parameters=[*before, *own, rest]))  # noqa: B010  a function has no such field
    return door


def _own_part(model: GenerativeModel, arguments: dict[str, Any]) -> _Own:
    """Take what is this package's own out of the arguments of a call.

    A setting that was given as a list is left as one value that suits all prompts.
    """
    keywords = {name: arguments.pop(name) for name in _OPTIONS & arguments.keys()}
    configured = {name: setting(name, model, arguments, None) for name in _OPTIONS}
    for name, off in _SHARED_WITH_TRANSFORMERS.items():
        if configured[name] is not None:
            arguments[name] = off
    options = _options(keywords, configured)
    lists = _lists(model, arguments)
    for name, values in lists.items():
        arguments[name] = _for_all(name, values)
    return _Own(options, lists)


_OPTIONS = {field.name for field in dataclasses.fields(Options)}


def _options(keywords: dict[str, Any], configured: dict[str, Any]) -> Options:
    """Options from keywords, and where those say nothing, from configurations."""
    configured = {name: given for name, given in configured.items() if given is not None}
    keywords = {
        name: given for name, given in keywords.items() if given is not None or name not in _SHARED_WITH_TRANSFORMERS
    }
    if {**configured, **keywords}.get("num_beam_groups", 1) == 1:
        configured.pop("diversity_penalty", None)  # saved with a model, it waits for groups
    return Options(**{**configured, **keywords})


def _lists(model: GenerativeModel, arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """Settings that were given as one value for each prompt."""
    if _has_several(arguments.get("max_length")):
        raise ValueError("max_length must be one number; max_new_tokens may be a list of one for each prompt")
    for name in LISTED:
        if _has_several(getattr(model.generation_config, name, None)):
            raise ValueError(f"{name}: a list, of one value for each prompt, belongs into the call, not into the model")
    given = {name: setting(name, model, arguments, None) for name in LISTED}
    lists = {name: _as_list(values) for name, values in given.items() if _has_several(values)}
    check_lists(lists, None)
    return lists


def _has_several(given: Any) -> bool:
    """Whether a setting was given as one value for each prompt: a list, a tuple, an array or a tensor."""
    return isinstance(given, (list, tuple)) or getattr(given, "ndim", 0) == 1


def _as_list(given: Any) -> list[Any]:
    """Values as Python's own, where they are numpy's."""
    return [_own_number(value) for value in given]


def _own_number(value: Any) -> Any:
    is_scalar = hasattr(value, "dtype") and value.ndim == 0
    return value.item() if is_scalar else value  # host read: a setting, before the search


def _for_all(name: str, values: list[Any]) -> Any:
    """One value with which transformers prepares a call for prompts of different settings."""
    if name == "num_beams":
        return max(2, *values)  # one beam would be another method
    if name in ("num_return_sequences", "max_new_tokens"):
        return max(values)
    return min(values) if name == "min_new_tokens" else values[0]


@_with_options
def generate(model: GenerativeModel, inputs: torch.Tensor | None = None, **arguments: Any) -> Any:
    """Beam search over a paged cache, with the arguments of ``model.generate`` and its results.

    Args:
        model: any transformers model that can generate.
        inputs: as in ``model.generate``.
        **arguments: everything else that ``model.generate`` takes, and the keywords of `Options`. `num_beams`,
            `num_return_sequences`, `length_penalty`, `early_stopping`, `max_new_tokens` and `min_new_tokens` may each
            be a list with one value for each prompt. A prompt's sequences are then those that it has alone (with one
            beam: greedy search's), in the order of prompts.

    Returns:
        ``[N, L]`` int64, N the sum of `num_return_sequences` over all prompts, or with ``return_dict_in_generate=True``
        transformers' output object with more fields (`versions.BeamDecoderOnlyOutput`). A call that is none for a paged
        beam search (one beam, assisted decoding, ``use_cache=False`` and so on) is handed over to transformers: the
        same call and result.

    Raises:
        ValueError: for an argument that is out of range; the message names it, what came and what is accepted.
        RuntimeError: if the model's logits are not numbers; the message names the step.
    """
    own = _own_part(model, arguments)
    arguments.pop("trust_remote_code", None)
    if not is_beam_search(model, arguments):
        reason = HandOver("one beam, or the help of another model, is not beam search")
        own.refuse_to_hand_over(reason.reason, one_beam=True)
        return _mark_handed_over(GenerationMixin.generate(model, inputs, **arguments), reason)
    check_options(model, own.options)
    check_arguments(model, inputs, arguments)
    check_lists(own.lists, number_of_prompts(inputs, arguments))
    if arguments.get("cache_implementation") == "paged":
        del arguments["cache_implementation"]  # transformers would drop the beams; our cache is a paged one
    early = _early_reason(model, arguments)
    if early is not None:
        own.refuse_to_hand_over(early)
        return _mark_handed_over(GenerationMixin.generate(model, inputs, **arguments), HandOver(early))
    stand_in = _PromptOnce(model, own)
    fresh = _fresh_caches(arguments)
    try:
        return GenerationMixin.generate(stand_in, inputs, **arguments)
    except HandOver as handed_over:
        reason = HandOver(handed_over.reason)  # without its frames, which hold the pools of the search given up
    own.refuse_to_hand_over(reason.reason)
    for name in fresh:  # it may hold the prompt by now; transformers makes its own
        arguments.pop(name).reset()
    return _mark_handed_over(GenerationMixin.generate(model, inputs, **arguments), reason)


def _fresh_caches(arguments: dict[str, Any]) -> list[str]:
    """Names of the given caches of ours that hold nothing yet: a search puts its prompt into them."""
    ours = {name: given for name, given in arguments.items() if isinstance(given, OUR_CACHES)}
    return [name for name, given in ours.items() if not versions.has_seen_tokens(given)]


@_with_options
def beam_search(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """The search as a callable for ``custom_generate=``. transformers prepares, and repeats the inputs for each beam.

    Args:
        input_ids: ``[B·W, P]`` int64, the `W` rows of a prompt equal.
        **model_kwargs: the model's inputs, and the keywords of `Options`.

    On this route transformers drops `tokenizer`, `streamer` and `synced_gpus`, and refuses lists as settings;
    ``custom_generate="hf_paged_beam"`` takes them all, and does not repeat the inputs.
    """
    own = _own_part_of_callable(generation_config, model_kwargs)
    prepared = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "synced_gpus": synced_gpus,
    }
    mode = generation_config.get_generation_mode()
    fresh = _fresh_caches(model_kwargs)
    try:
        if GENERATION_MODES_MAPPING[mode] != "_beam_search" and own.options.num_beam_groups == 1:
            raise HandOver(f"{mode.value} is not beam search")
        narrow_ids, narrow_kwargs = _one_row_per_prompt(input_ids, model_kwargs, generation_config.num_beams)
        check_options(model, own.options)
        check_prepared(model, narrow_ids, narrow_kwargs)
        return _search(model, narrow_ids, own, **prepared, **narrow_kwargs)
    except HandOver as handed_over:
        reason = HandOver(handed_over.reason)
    own.refuse_to_hand_over(reason.reason, one_beam=mode.value in ("greedy_search", "sample"))
    method = getattr(type(model), GENERATION_MODES_MAPPING[mode], None)
    if method is None:
        raise ValueError(
            f"{mode.value} is no longer part of transformers; its repository is named by generate() without "
            f"custom_generate. This package searches plain beams: leave out what asks for {mode.value}."
        )
    for name in fresh:  # it may hold the prompt by now
        model_kwargs[name].reset()
    return _mark_handed_over(method(model, input_ids, **prepared, **model_kwargs), reason)


def _own_part_of_callable(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> _Own:
    """As `_own_part`, where transformers has put its part of the arguments into the configuration.

    It has put defaults there too: a keyword comes first.
    """
    keywords = {name: model_kwargs.pop(name) for name in _OPTIONS & model_kwargs.keys()}
    return _Own(_options(keywords, {name: getattr(generation_config, name, None) for name in _OPTIONS}), {})


class PagedBeamMixin:
    """Put before `GenerationMixin` (or a model class) among the bases: ``generate`` then searches over a paged cache.

    ``class Mine(PagedBeamMixin, LlamaForCausalLM): ...``
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own ``generate``, with ``custom_generate="hf_paged_beam"`` unless another is named."""
        if kwargs.get("custom_generate") is None:
            kwargs["custom_generate"] = NAME
        return super().generate(*args, **kwargs)  # type: ignore[misc]


def enable(model: GenerativeModel) -> GenerativeModel:
    """Let plain ``model.generate(num_beams=W)``, and a pipeline, search over a paged cache.

    Only this object is changed (its ``generate``), until `disable`. Calling it twice changes nothing more.

    Returns:
        The model itself.

    Raises:
        TypeError: if the object has no ``generate``.
    """
    if not callable(getattr(type(model), "generate", None)):
        raise TypeError(f"enable() takes a model with a generate method, but got {type(model).__name__}")
    model.__dict__["generate"] = functools.partial(_enabled_generate, model)
    return model


def disable(model: GenerativeModel) -> GenerativeModel:
    """Undo `enable`; a model that was not enabled stays as it is. Returns the model itself."""
    if getattr(model.__dict__.get("generate"), "func", None) is _enabled_generate:
        del model.__dict__["generate"]
    return model


def _enabled_generate(model: GenerativeModel, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("custom_generate") is None:
        kwargs["custom_generate"] = NAME
    return type(model).generate(model, *args, **kwargs)


def register_name() -> None:
    """Let ``custom_generate="hf_paged_beam"`` find `generate` from anywhere; other names go to transformers untouched.

    The one thing of transformers that is replaced: `GenerationMixin.load_custom_generate`, by a wrapper. Idempotent.
    """
    stock = GenerationMixin.load_custom_generate
    known = getattr(stock, "_hf_paged_beam", None)
    if known is generate:
        return
    if known is not None:  # the package was imported anew
        stock = stock.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def load_custom_generate(self, pretrained_model_name_or_path=None, *args, **kwargs):
        if pretrained_model_name_or_path == NAME:
            return generate
        return stock(self, pretrained_model_name_or_path, *args, **kwargs)

    setattr(load_custom_generate, "_hf_paged_beam", generate)  # noqa: B010  a function has no such field
    GenerationMixin.load_custom_generate = load_custom_generate


class _PromptOnce:
    """The model as `GenerationMixin.generate` sees it: everything is the model's own, but for what stands here."""

    def __init__(self, model: GenerativeModel, own: _Own):
        self.__dict__.update(_model=model, _own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    @property  # type: ignore[misc]
    def __class__(self):
        return type(self._model)

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        return input_ids, model_kwargs

    def _get_logits_processor(self, *args: Any, model_kwargs: dict | None = None, **kwargs: Any) -> Any:
        """Processors take one row per beam, so that what they read of the inputs is repeated for them."""
        config = kwargs["generation_config"]
        groups, widths = self._own.options.num_beam_groups, self._own.lists.get("num_beams")

        def repeat(given: torch.Tensor) -> torch.Tensor:
            if widths is None:
                return given.repeat_interleave((config.num_beams or 1) // groups, dim=0)
            each = torch.tensor([width // groups for width in widths], device=given.device)
            return given.repeat_interleave(each, dim=0)

        repeated = {
            name: repeat(given)
            for name, given in (model_kwargs or {}).items()
            if name in ("attention_mask", "decoder_attention_mask") and isinstance(given, torch.Tensor)
        }
        return self._model._get_logits_processor(*args, model_kwargs={**(model_kwargs or {}), **repeated}, **kwargs)

    def _beam_search(self, input_ids: torch.Tensor, **prepared: Any) -> Any:
        for dropped in ("tokenizer", "assistant_tokenizer"):
            prepared.pop(dropped, None)
        return _search(self._model, input_ids, self._own, **prepared)


def _other_method(name: str) -> Callable:
    def method(self, *args: Any, **kwargs: Any) -> Any:
        raise HandOver(f"{name.strip('_')} is not beam search")

    return method


for _name in versions.OTHER_DECODING_METHODS:
    setattr(_PromptOnce, _name, _other_method(_name))


def _search(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    own: _Own,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Search with what transformers prepared, at one row per prompt."""
    settings = SearchSettings.from_config(
        generation_config,
        batch_size=input_ids.shape[0],
        prompt_length=input_ids.shape[1],
        options=own.options,
        lists=own.lists,
    )
    check_processors(settings, logits_processor)
    check_tries(model, input_ids.shape[0], settings, logits_processor)
    call = SearchCall(
        model=model,
        input_ids=input_ids,
        processors=logits_processor,
        criteria=stopping_criteria,
        config=generation_config,
        settings=settings,
        model_kwargs=model_kwargs,
        synced_gpus=synced_gpus,
    )
    return run_search(call)


def _one_row_per_prompt(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], width: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Undo the repetition of `GenerationMixin._expand_inputs_for_generation`."""
    rows = input_ids.shape[0]

    def narrow(name: str, given: Any) -> Any:
        if name == "cache_position":
            return given
        if name == "encoder_outputs" and given is not None:
            return type(given)(**{part: narrow(part, tensor) for part, tensor in given.items()})
        if isinstance(given, torch.Tensor) and given.dim():
            if given.dim() == 3 and name == "position_ids":
                return given[:, ::width].contiguous()
            return given[::width].contiguous() if given.shape[0] == rows else given  # models take views of them
        return given

    uncertain = [name for name, given in model_kwargs.items() if _rows_are_uncertain(name, given, rows)]
    if uncertain:
        raise ValueError(
            f"custom_generate=hf_paged_beam.beam_search cannot tell which of the repeated {uncertain} belong to which "
            f"prompt. Use custom_generate='hf_paged_beam', which is called before inputs are repeated."
        )
    return input_ids[::width].contiguous(), {name: narrow(name, given) for name, given in model_kwargs.items()}


_LAID_FLAT = ("mm_encoder_outputs", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
"""Inputs that hold all images of a batch one after another, which transformers repeats in more than one way."""


def _rows_are_uncertain(name: str, given: Any, rows: int) -> bool:
    """Whether it cannot be told which rows of an input belong to which of `rows` beams."""
    if given is None or name == "cache_position":
        return False
    if name in _LAID_FLAT:
        return True
    per_row = given.shape[1 if name == "position_ids" and given.dim() == 3 else 0] if _has_rows(given) else rows
    return per_row not in (1, rows)


def _has_rows(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.dim() > 0


def _early_reason(model: GenerativeModel, arguments: dict[str, Any]) -> str | None:
    """A reason to hand over that shows before transformers prepares the call, which may run an encoder."""
    use_cache = setting("use_cache", model, arguments, True)
    if arguments.get("inputs_embeds") is not None and not model.config.is_encoder_decoder:
        use_cache = True  # as transformers sets it
    return reason_to_hand_over(
        model,
        use_cache=use_cache,
        cache_implementation=setting("cache_implementation", model, arguments, None),
        given=arguments.get(versions.CACHE_ARGUMENT, arguments.get("past_key_values")),
    )


def _mark_handed_over(output: Any, handed_over: HandOver) -> Any:
    """Say in the log, and on an output object, that transformers' own search ran."""
    logger.info(f"handed over to transformers' own generate: {handed_over.reason}")
    if not isinstance(output, torch.Tensor):
        output.beam_path = "handed over"
        output.handed_over_because = handed_over.reason
    return output
