"""Settings drawn at random, all at once: the output is transformers' own in every field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from comparing import NO_CONTINUATION, check_identical, search_both
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import BUILDERS, EOS, double_model, prompts_for
from transformers.generation.utils import GenerationMixin

PROCESSORS: tuple[dict, ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"sequence_bias": [[[EOS], 3.0], [[87], -2.0]]},
    {"min_new_tokens": 3, "suppress_tokens": [17, 21]},
    {"repetition_penalty": 0.8, "renormalize_logits": True, "min_length": 4},
)
OUTPUTS = ("output_scores", "output_logits", "output_hidden_states")


class EndsInOneOf:
    """A stopping criterion: rows whose last id is one of these end."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens, dtype=torch.int64)

    def __call__(self, rows: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(rows[:, -1], self.tokens)


@st.composite
def searches(draw: st.DrawFn) -> tuple[str, dict[str, int], dict[str, Any]]:
    """A kind of model, the shape and seed of its prompts, and the arguments of `generate`."""
    width = draw(st.integers(2, 12))
    arguments: dict[str, Any] = {
        "num_beams": width,
        "num_return_sequences": draw(st.integers(1, width)),
        "max_new_tokens": draw(st.integers(1, 12)),
        "length_penalty": draw(st.sampled_from([-1.0, -0.3, 0.0, 0.6, 1.0, 2.0])),
        "early_stopping": draw(st.sampled_from([True, False, "never"])),
        "eos_token_id": draw(st.sampled_from([None, EOS, [EOS, 20, 30], [EOS, *range(20, 30)]])),
        "pad_token_id": draw(st.sampled_from([0, 3])),
        **draw(st.sampled_from(PROCESSORS)),
        **{name: draw(st.booleans()) for name in OUTPUTS},
    }
    ends = draw(st.lists(st.integers(31, 98), max_size=12))
    if ends:
        arguments["stopping_criteria"] = [EndsInOneOf(ends)]
    shape = {
        "batch_size": draw(st.integers(1, 5)),
        "length": draw(st.integers(2, 12)),
        "seed": draw(st.integers(0, 99)),
    }
    return draw(st.sampled_from(sorted(BUILDERS))), shape, arguments


@contextlib.contextmanager
def watched_for_ties() -> Iterator[list[bool]]:
    """Whether candidates of stock's search had the same score to the bit: which one `topk` then prefers is chance."""
    stock, tied = GenerationMixin._get_top_k_continuations, []

    def watch(self, accumulated_log_probs: torch.Tensor, beams_to_keep: int, **others: Any) -> Any:
        best = accumulated_log_probs.topk(min(beams_to_keep + 1, accumulated_log_probs.shape[1])).values
        tied.append(bool(((best.diff(dim=1) == 0) & (best[:, 1:] > NO_CONTINUATION)).any()))
        return stock(self, accumulated_log_probs=accumulated_log_probs, beams_to_keep=beams_to_keep, **others)

    GenerationMixin._get_top_k_continuations = watch
    try:
        yield tied
    finally:
        GenerationMixin._get_top_k_continuations = stock


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(searches(), st.sampled_from(["auto", "gathered"]))
def test_any_search(search: tuple[str, dict[str, int], dict[str, Any]], path: str) -> None:
    """Width, batch, lengths, stopping, ends, processors, criteria and outputs together, on either read path."""
    kind, shape, arguments = search
    model = double_model(kind)
    inputs = prompts_for(model, kind, **shape)
    with watched_for_ties() as tied:
        stock, ours = search_both(model, inputs, **arguments, ours_only={"beam_attention": path})
    assume(not any(tied))
    check_identical(stock, ours)
    assert ours.beam_path == ("folded" if path == "auto" else path)
