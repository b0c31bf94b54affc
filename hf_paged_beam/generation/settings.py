"""What a search was asked to do: frozen objects, checked when they are made.

Options           this package's own keywords
PromptSettings    transformers' settings that may differ between the prompts of a batch
SearchSettings    both, and what else transformers' configuration says
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig

from ..cache import stored_dtype
from .lengths import LENGTH_NORMALIZATIONS
from .trie import TokenTrie

BEAM_ATTENTION = ("auto", "folded", "gathered")
SAMPLING = ("beam", "stochastic_beam")

LISTED = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "max_new_tokens", "min_new_tokens")
"""Settings of transformers that may be lists, one value for each prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """This package's own keywords, beside those of ``model.generate``.

    Attributes:
        length_normalization: what finished scores are divided by: "length" (``n ** length_penalty``, as transformers),
            "gnmt" (``((5 + n) / 6) ** length_penalty``, Wu et al. 2016) or "none".
        length_reward: added to a finished score for each generated token (He et al. 2016; Huang et al. 2017).
        coverage_penalty: of encoder-decoder models: how much a finished score loses where the cross-attention left
            parts of the source out (Wu et al. 2016, equation 14).
        patience: with ``early_stopping=True``, a prompt stops when ``patience · num_beams`` sequences have finished
            (Kasai et al. 2022); None is 1.
        num_beam_groups: diverse beam search (Vijayakumar et al. 2016): the beams are so many groups, which choose one
            after another.
        diversity_penalty: what a group's scores lose for each beam of an earlier group that took the same token.
        sampling: with ``do_sample=True``, "beam" (as transformers) or "stochastic_beam" (Kool et al. 2019): sequences
            drawn from the model without replacement.
        trie: the items that sequences may be, one trie for all prompts or a list of one for each. Scores are those of
            the whole vocabulary; the output's `item_ids` tells which items came back.
        trie_renormalize: whether scores are log-probabilities among the tokens that the trie allows.
        beam_attention: how keys are read: "folded" (one attention over the pool), "gathered" (one row per beam), or
            "auto" (folded where the model allows it).
        kv_dtype: what keys and values are stored as: "float16", "bfloat16", "int8" or "float8_e4m3fn", or that
            torch.dtype; None for the model's own. The last two keep a scale per token and head. Results then differ
            from transformers' by that rounding; its size is measured in docs/differences.md.
        return_beam_trace: whether an output object tells every step's beams, in `beam_trace`.
        compile: whether the decode step is compiled, once for each model and kind of call; results are the same.
        prepack: whether a CPU model's linear layers are kept once more in the layout that oneDNN wants, as long as the
            model lives; results are the same.

    Raises:
        ValueError: naming the keyword, what came and what is accepted.
    """

    length_normalization: str = "length"
    length_reward: float = 0.0
    coverage_penalty: float = 0.0
    patience: float | None = None
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    sampling: str = "beam"
    trie: TokenTrie | Sequence[TokenTrie] | None = None
    trie_renormalize: bool = False
    beam_attention: str = "auto"
    kv_dtype: str | torch.dtype | None = None
    return_beam_trace: bool = False
    compile: bool = False
    prepack: bool = False

    def __post_init__(self) -> None:
        _check_one_of("length_normalization", self.length_normalization, LENGTH_NORMALIZATIONS)
        _check_one_of("beam_attention", self.beam_attention, BEAM_ATTENTION)
        _check_one_of("sampling", self.sampling, SAMPLING)
        _check_number("length_reward", self.length_reward)
        _check_number("coverage_penalty", self.coverage_penalty, least=0.0)
        _check_number("diversity_penalty", self.diversity_penalty, least=0.0)
        if self.patience is not None:
            _check_number("patience", self.patience, least=0.0)
            if self.patience == 0:
                raise ValueError("patience must be a number above 0, but got 0")
        check_count("num_beam_groups", self.num_beam_groups)
        object.__setattr__(self, "num_beam_groups", int(self.num_beam_groups))  # numpy's integers are welcome
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise ValueError(
                f"diversity_penalty={self.diversity_penalty} acts between groups of beams: set num_beam_groups to at "
                f"least 2, a divisor of num_beams"
            )
        stored_dtype(self.kv_dtype)
        _check_tries(self.trie, self.trie_renormalize)
        for name in ("return_beam_trace", "compile", "prepack"):
            _check_flag(name, getattr(self, name))

    @property
    def tries(self) -> tuple[TokenTrie, ...] | None:
        """The tries: one, or one for each prompt; None for no constraint."""
        if self.trie is None:
            return None
        return (self.trie,) if isinstance(self.trie, TokenTrie) else tuple(self.trie)

    @property
    def draws_sequences(self) -> bool:
        """Whether whole sequences are drawn without replacement."""
        return self.sampling == "stochastic_beam"

    @property
    def length_form(self) -> str:
        """The form by which finished sequences are ranked: drawn ones by what they drew."""
        return "none" if self.draws_sequences else self.length_normalization

    def unknown_to_transformers(self) -> dict[str, Any]:
        """What was asked for that transformers' own search would leave out, or do in another way."""
        same_result = ("beam_attention", "kv_dtype", "compile", "prepack")
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in same_result and getattr(self, field.name) != field.default
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """What may differ between prompts.

    Attributes:
        num_beams: `W`, at least 1.
        num_return_sequences: `n`, at most `W`.
        length_penalty: exponent of the length form.
        early_stopping: True, False or "never".
        max_new_tokens: `T`, most tokens that a sequence may get.
        min_new_tokens: tokens before which no sequence ends.
    """

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    max_new_tokens: int
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        check_counts(self.num_beams, self.num_return_sequences)
        _check_early_stopping("early_stopping", self.early_stopping)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of one call.

    Attributes:
        prompts: of each prompt.
        options: this package's own.
        differ: whether settings were given as lists, one value for each prompt.
        eos_token_ids: ``[n_eos]`` int64 or None.
        pad_token_id: 0-dim int64 or None.
        fill_token_id: id that fills sequences after their end, as transformers chooses it.
        do_sample: draw candidates instead of taking the best.
        return_dict, output_scores, output_logits, output_attentions, output_hidden_states: what to return.
    """

    prompts: tuple[PromptSettings, ...]
    options: Options
    differ: bool
    eos_token_ids: torch.Tensor | None
    pad_token_id: torch.Tensor | None
    fill_token_id: torch.Tensor | int
    do_sample: bool
    return_dict: bool
    output_scores: bool
    output_logits: bool
    output_attentions: bool
    output_hidden_states: bool

    @property
    def widths(self) -> list[int]:
        """Beams of each prompt."""
        return [prompt.num_beams for prompt in self.prompts]

    @property
    def width(self) -> int:
        """`W`: beams of the widest prompt."""
        return max(self.widths)

    @property
    def num_ends(self) -> int:
        """Number of end tokens."""
        return 0 if self.eos_token_ids is None else self.eos_token_ids.shape[0]

    @property
    def max_new_tokens(self) -> int:
        """`T` of the longest."""
        return max(prompt.max_new_tokens for prompt in self.prompts)

    @property
    def counts(self) -> list[int]:
        """Sequences to return of each prompt."""
        return [prompt.num_return_sequences for prompt in self.prompts]

    @property
    def keeps_step_outputs(self) -> bool:
        """Whether something of every step is returned, which then needs all rows in all steps."""
        return self.output_scores or self.output_logits or self.output_attentions or self.output_hidden_states

    @classmethod
    def from_config(
        cls,
        config: GenerationConfig,
        *,
        batch_size: int,
        prompt_length: int,
        options: Options,
        lists: Mapping[str, Sequence[Any]],
    ) -> SearchSettings:
        """Read transformers' prepared configuration.

        Args:
            config: with its special tokens prepared as tensors and `max_length` final.
            batch_size: `B`.
            prompt_length: columns of ``input_ids``, which do not count as generated.
            options: this package's own.
            lists: what the caller gave as lists, in place of what `config` says.

        Raises:
            ValueError: naming the argument, for a value out of range.
        """
        if config.low_memory:
            raise ValueError(
                "low_memory=True is not supported with beam search (in transformers neither); leave it out"
            )
        prompts = _each_prompt(config, batch_size, prompt_length, lists)
        _check_together(prompts, options, bool(config.do_sample))
        wants = bool(config.return_dict_in_generate)
        if options.return_beam_trace and not wants:
            raise ValueError(
                "return_beam_trace=True puts a trace into an output object: set return_dict_in_generate=True"
            )
        return cls(
            prompts=prompts,
            options=options,
            differ=bool(lists),
            eos_token_ids=config._eos_token_tensor,
            pad_token_id=config._pad_token_tensor,
            fill_token_id=_fill_token(config),
            do_sample=bool(config.do_sample),
            return_dict=wants,
            output_scores=wants and bool(config.output_scores),
            output_logits=wants and bool(config.output_logits),
            output_attentions=wants and bool(config.output_attentions),
            output_hidden_states=wants and bool(config.output_hidden_states),
        )


def check_counts(num_beams: object, num_return_sequences: object) -> None:
    """Raise `ValueError` unless both are integers with ``1 <= num_return_sequences <= num_beams``."""
    check_count("num_beams", num_beams)
    check_count("num_return_sequences", num_return_sequences)
    if num_return_sequences > num_beams:  # type: ignore[operator]
        raise ValueError(
            f"num_return_sequences must be at most num_beams, but got num_return_sequences={num_return_sequences} and "
            f"num_beams={num_beams}. Ask for fewer sequences or more beams."
        )


def check_lists(lists: Mapping[str, Sequence[Any]], batch_size: int | None) -> None:
    """Refuse lists of settings that do not fit one another, or the batch.

    Args:
        lists: by the name of the setting.
        batch_size: `B`, if it is known already.

    Raises:
        ValueError: naming the setting.
    """
    for name, given in lists.items():
        if batch_size is not None and len(given) != batch_size:
            raise ValueError(
                f"{name} must be one value, or a list of one for each prompt, but got {list(given)} for {batch_size} "
                f"prompts"
            )
        for value in given:
            _LIST_CHECKS[name](name, value)
    lengths = {name: len(given) for name, given in lists.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise ValueError(f"lists of settings must have one value for each prompt, but have these lengths: {lengths}")


def _each_prompt(
    config: GenerationConfig, batch_size: int, prompt_length: int, lists: Mapping[str, Sequence[Any]]
) -> tuple[PromptSettings, ...]:
    check_lists(lists, batch_size)
    longest = config.max_length - prompt_length
    common = {
        "num_beams": config.num_beams,
        "num_return_sequences": 1 if config.num_return_sequences is None else config.num_return_sequences,
        "length_penalty": 1.0 if config.length_penalty is None else float(config.length_penalty),
        "early_stopping": False if config.early_stopping is None else config.early_stopping,
        "max_new_tokens": longest,
    }
    prompts = []
    for number in range(batch_size):
        own = {name: given[number] for name, given in lists.items()}
        if "max_new_tokens" in own:
            own["max_new_tokens"] = min(own["max_new_tokens"], longest)
        settings = {**common, **own}
        for name in ("num_beams", "num_return_sequences"):
            check_count(name, settings[name])
            settings[name] = int(settings[name])  # numpy's integers are welcome
        if (
            lists and settings["num_beams"] == 1
        ):  # what one beam gives alone: greedy search, which ends at its first end
            settings["early_stopping"] = True
        prompts.append(PromptSettings(**settings))
    return tuple(prompts)


def _check_together(prompts: Sequence[PromptSettings], options: Options, do_sample: bool) -> None:
    """Refuse what cannot be had together."""
    if options.patience is not None and any(prompt.early_stopping is not True for prompt in prompts):
        raise ValueError(f"patience={options.patience} says when early_stopping=True stops: set early_stopping=True")
    if options.draws_sequences and not do_sample:
        raise ValueError("sampling='stochastic_beam' draws sequences: set do_sample=True")
    if options.draws_sequences and (options.patience is not None or options.length_reward or options.coverage_penalty):
        raise ValueError(
            "sampling='stochastic_beam' ranks sequences by what they drew, and stops when none can be among the drawn: "
            "patience, length_reward and coverage_penalty have nothing to act on; leave them out"
        )
    if do_sample and not options.draws_sequences and any(prompt.num_beams == 1 for prompt in prompts):
        raise ValueError(
            "num_beams has a prompt of one beam, which alone is not beam sampling: with do_sample=True give every "
            "prompt at least 2 beams, or call it apart"
        )
    groups = options.num_beam_groups
    uneven = [prompt.num_beams for prompt in prompts if prompt.num_beams % groups]
    if uneven:
        raise ValueError(
            f"num_beam_groups must divide num_beams, but got num_beam_groups={groups}, num_beams={uneven[0]}"
        )
    if groups > 1 and do_sample:
        raise ValueError("num_beam_groups keeps beams apart by a penalty, and draws none: set do_sample=False")


def _fill_token(config: GenerationConfig) -> torch.Tensor | int:
    """transformers' choice, quirks included: -1 without an end token, the end token where the pad id is 0."""
    if config._eos_token_tensor is None:
        return -1
    pad = config._pad_token_tensor
    return torch.where(pad == 0, config._eos_token_tensor[0], pad)


def _check_one_of(name: str, given: object, accepted: Sequence[object]) -> None:
    if given not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, but got {given!r}")


def check_count(name: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
        raise ValueError(f"{name} must be an integer of at least 1, but got {given!r}")


def _check_number(name: str, given: object, least: float = -math.inf) -> None:
    if isinstance(given, bool) or not isinstance(given, Real) or not math.isfinite(given) or given < least:
        wanted = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
        raise ValueError(f"{name} must be {wanted}, but got {given!r}")


def _check_early_stopping(name: str, given: object) -> None:
    if not (isinstance(given, bool) or given == "never"):
        raise ValueError(f"{name} must be True, False or 'never', but got {given!r}")


def _check_not_negative(name: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 0:
        raise ValueError(f"{name} must be an integer of at least 0, but got {given!r}")


def _check_flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ValueError(f"{name} must be True or False, but got {given!r}")


_LIST_CHECKS = {
    "num_beams": check_count,
    "num_return_sequences": check_count,
    "length_penalty": _check_number,
    "early_stopping": _check_early_stopping,
    "max_new_tokens": check_count,
    "min_new_tokens": _check_not_negative,
}


def _check_tries(trie: object, renormalize: object) -> None:
    tries = [] if trie is None else trie if isinstance(trie, (list, tuple)) else [trie]
    if not all(isinstance(given, TokenTrie) for given in tries) or (trie is not None and not tries):
        kinds = sorted({type(given).__name__ for given in tries})
        raise ValueError(
            f"trie must be a TokenTrie, or a list of one for each prompt, but got {kinds or 'an empty list'}"
        )
    if not isinstance(renormalize, bool) or (renormalize and trie is None):
        raise ValueError(f"trie_renormalize must be True or False, and True only with a trie, but got {renormalize!r}")
