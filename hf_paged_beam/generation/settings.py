"""What a search was asked to do: one frozen object, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral

import torch
from transformers import GenerationConfig

from ..cache import stored_dtype
from .lengths import LENGTH_NORMALIZATIONS
from .trie import TokenTrie

EARLY_STOPPING = (True, False, "never")
BEAM_ATTENTION = ("auto", "folded", "gathered")


def check_counts(num_beams: object, num_return_sequences: object) -> None:
    """Raise `ValueError` unless both are integers with ``1 <= num_return_sequences <= num_beams``."""
    for name, given in (("num_beams", num_beams), ("num_return_sequences", num_return_sequences)):
        if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
            raise ValueError(f"{name} must be an integer of at least 1, but got {given!r}")
    if num_return_sequences > num_beams:  # type: ignore[operator]
        raise ValueError(
            f"num_return_sequences must be at most num_beams, but got num_return_sequences={num_return_sequences} and "
            f"num_beams={num_beams}. Ask for fewer sequences or more beams."
        )


def check_options(
    length_normalization: object,
    beam_attention: object,
    kv_dtype: object = None,
    trie: object = None,
    trie_renormalize: object = False,
) -> None:
    """Raise `ValueError` unless this package's own keywords have values that it knows."""
    if length_normalization not in LENGTH_NORMALIZATIONS:
        raise ValueError(
            f"length_normalization must be one of {', '.join(map(repr, LENGTH_NORMALIZATIONS))}, "
            f"but got {length_normalization!r}"
        )
    if beam_attention not in BEAM_ATTENTION:
        raise ValueError(
            f"beam_attention must be one of {', '.join(map(repr, BEAM_ATTENTION))}, but got {beam_attention!r}"
        )
    stored_dtype(kv_dtype)
    tries = [] if trie is None else trie if isinstance(trie, (list, tuple)) else [trie]
    if not all(isinstance(given, TokenTrie) for given in tries) or (trie is not None and not tries):
        kinds = sorted({type(given).__name__ for given in tries})
        raise ValueError(
            f"trie must be a TokenTrie, or a list of one for each prompt, but got {kinds or 'an empty list'}"
        )
    if not isinstance(trie_renormalize, bool) or (trie_renormalize and trie is None):
        raise ValueError(
            f"trie_renormalize must be True or False, and True only with a trie, but got {trie_renormalize!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of one call.

    Attributes:
        num_beams: `W`.
        num_return_sequences: `n`, at most `W`.
        eos_token_ids: ``[n_eos]`` int64 or None.
        fill_token_id: id that fills sequences after their end, as transformers chooses it.
        max_new_tokens: `T`, most tokens that a sequence may get.
        do_sample: draw candidates instead of taking the best.
        early_stopping: True, False or "never".
        length_penalty: exponent of the length form.
        length_normalization: "length", "gnmt" or "none".
        beam_attention: "auto", "folded" or "gathered".
        kv_dtype: what keys and values are stored as; None for the model's own dtype.
        trie: the items that sequences may be: one trie for all prompts, or one for each; None for no constraint.
        trie_is_list: whether there is one for each.
        trie_renormalize: whether log-probabilities are those among the allowed tokens.
        return_dict, output_scores, output_logits, output_attentions, output_hidden_states: what to return.
    """

    num_beams: int
    num_return_sequences: int
    eos_token_ids: torch.Tensor | None
    fill_token_id: torch.Tensor | int
    max_new_tokens: int
    do_sample: bool
    early_stopping: bool | str
    length_penalty: float
    length_normalization: str
    beam_attention: str
    kv_dtype: torch.dtype | None
    trie: tuple[TokenTrie, ...] | None
    trie_is_list: bool
    trie_renormalize: bool
    return_dict: bool
    output_scores: bool
    output_logits: bool
    output_attentions: bool
    output_hidden_states: bool

    @property
    def num_candidates(self) -> int:
        """`K`: candidates per prompt and step, so that `W` remain even if every beam offers all end tokens."""
        ends = 0 if self.eos_token_ids is None else self.eos_token_ids.shape[0]
        return max(2, 1 + ends) * self.num_beams

    @classmethod
    def from_config(
        cls,
        config: GenerationConfig,
        prompt_length: int,
        *,
        length_normalization: str,
        beam_attention: str,
        kv_dtype: str | torch.dtype | None = None,
        trie: TokenTrie | Sequence[TokenTrie] | None = None,
        trie_renormalize: bool = False,
    ) -> SearchSettings:
        """Read transformers' prepared configuration.

        Args:
            config: with its special tokens prepared as tensors and `max_length` final.
            prompt_length: columns of ``input_ids``, which do not count as generated.

        Raises:
            ValueError: naming the argument, for a value out of range.
        """
        num_return = 1 if config.num_return_sequences is None else config.num_return_sequences
        check_counts(config.num_beams, num_return)
        check_options(length_normalization, beam_attention, kv_dtype, trie, trie_renormalize)
        early = False if config.early_stopping is None else config.early_stopping
        if early not in EARLY_STOPPING or (isinstance(early, int) and not isinstance(early, bool)):
            raise ValueError(f"early_stopping must be True, False or 'never', but got {early!r}")
        if config.low_memory:
            raise ValueError(
                "low_memory=True is not supported with beam search (in transformers neither); leave it out"
            )
        wants = bool(config.return_dict_in_generate)
        return cls(
            num_beams=int(config.num_beams),
            num_return_sequences=int(num_return),
            eos_token_ids=config._eos_token_tensor,
            fill_token_id=_fill_token(config),
            max_new_tokens=config.max_length - prompt_length,
            do_sample=bool(config.do_sample),
            early_stopping=early,
            length_penalty=1.0 if config.length_penalty is None else float(config.length_penalty),
            length_normalization=length_normalization,
            beam_attention=beam_attention,
            kv_dtype=stored_dtype(kv_dtype),
            trie=None if trie is None else (trie,) if isinstance(trie, TokenTrie) else tuple(trie),
            trie_is_list=isinstance(trie, (list, tuple)),
            trie_renormalize=trie_renormalize,
            return_dict=wants,
            output_scores=wants and bool(config.output_scores),
            output_logits=wants and bool(config.output_logits),
            output_attentions=wants and bool(config.output_attentions),
            output_hidden_states=wants and bool(config.output_hidden_states),
        )


def _fill_token(config: GenerationConfig) -> torch.Tensor | int:
    """transformers' choice, quirks included: -1 without an end token, the end token where the pad id is 0."""
    if config._eos_token_tensor is None:
        return -1
    pad = config._pad_token_tensor
    return torch.where(pad == 0, config._eos_token_tensor[0], pad)
