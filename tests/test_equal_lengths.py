"""Lengths and ends equal transformers' own: length penalties, stopping modes, end ids, limits, forced tokens."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from comparing import NO_CONTINUATION, check_equal, check_identical, real_scores, search_both
from tiny_models import BUILDERS, EOS, PAD, double_model, prompts_for
from transformers.generation.utils import GenerationMixin

THREE_ENDS = [EOS, 20, 30]
ELEVEN_ENDS = [EOS, *range(20, 30)]
LENGTH_PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0, 3.0)
STOPPING = (True, False, "never")
END_IDS = (None, EOS, THREE_ENDS, ELEVEN_ENDS)


def check_search(kind: str, batch_size: int = 3, **settings: Any) -> tuple[Any, Any]:
    """Run the same search both ways on the float64 model, and assert that every field is the same."""
    model = double_model(kind)
    settings.setdefault("num_return_sequences", settings["num_beams"])
    stock, ours = search_both(model, prompts_for(model, kind, batch_size), **settings)
    check_identical(stock, ours)
    return stock, ours


def lengths_of(output: Any) -> torch.Tensor:
    """Generated tokens of each returned sequence."""
    return (output.beam_indices >= 0).sum(-1)


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping", "end_ids", "kind"),
    [(*case, kind) for case, kind in zip(product(LENGTH_PENALTIES, STOPPING, END_IDS), cycle(BUILDERS), strict=False)],
)
def test_length_penalty_stopping_mode_and_end_ids(
    length_penalty: float, early_stopping: bool | str, end_ids: Any, kind: str
) -> None:
    """Every exponent with every stopping mode and 0, 1, 3 and 11 end ids, the kinds of model in turn."""
    check_search(
        kind, num_beams=3, max_new_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping,
        eos_token_id=end_ids,
    )  # fmt: skip


@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
def test_prompts_that_stop_at_different_steps(length_penalty: float, early_stopping: bool | str) -> None:
    """Eight prompts, end ids that are often the best: each prompt stops by its own rule, at its own step."""
    stock, _ = check_search(
        "llama", 8, num_beams=5, max_new_tokens=20, length_penalty=length_penalty, early_stopping=early_stopping,
        eos_token_id=ELEVEN_ENDS,
    )  # fmt: skip
    assert len(stock.scores) < 20 or length_penalty > 0  # a positive exponent lets sequences hope to improve
    assert len(set(lengths_of(stock).tolist())) > 1


def test_the_stopping_modes_and_exponents_differ() -> None:
    """The cases above would prove nothing if the settings made no difference to the search."""
    steps, best = set(), set()
    for length_penalty, early_stopping in product((-1.0, 3.0), STOPPING):
        stock, _ = check_search(
            "llama", 8, num_beams=3, max_new_tokens=25, length_penalty=length_penalty, early_stopping=early_stopping,
            eos_token_id=ELEVEN_ENDS,
        )  # fmt: skip
        steps.add(len(stock.scores))
        best.add(tuple(lengths_of(stock).tolist()))
    assert len(steps) >= 3
    assert len(best) >= 3


@pytest.mark.parametrize("kind", BUILDERS)
def test_without_an_end_id_the_filler_is_minus_one(kind: str) -> None:
    """No end id: all sequences are as long as allowed, and the ids that transformers would fill with are -1."""
    stock, ours = check_search(kind, num_beams=4, max_new_tokens=6, eos_token_id=None, pad_token_id=None)
    assert (lengths_of(ours) == 6).all()
    assert (stock.sequences != -1).all()


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_filler_after_an_own_criterion_without_end_ids(kind: str) -> None:
    """A criterion ends some sequences early: what follows them is -1, as in transformers."""

    def ends_in_an_even_id(rows: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return rows[:, -1] % 2 == 0

    stock, ours = check_search(
        kind, num_beams=4, max_new_tokens=6, eos_token_id=None, stopping_criteria=[ends_in_an_even_id],
        length_penalty=0.0,
    )  # fmt: skip
    assert (ours.sequences == -1).any()
    assert torch.equal(ours.sequences == -1, stock.sequences == -1)


@pytest.mark.parametrize("pad", [PAD, 3, None])
@pytest.mark.parametrize("kind", ["qwen3", "bart"])
def test_filler_with_end_ids(kind: str, pad: int | None) -> None:
    """The padding id fills; 0 is taken as missing, and the first end id fills instead."""
    _, ours = check_search(
        kind, num_beams=4, max_new_tokens=14, eos_token_id=ELEVEN_ENDS, pad_token_id=pad, length_penalty=0.0
    )
    generated = ours.sequences[:, -ours.beam_indices.shape[1] :]
    fillers = generated[ours.beam_indices < 0]
    assert len(fillers) and (fillers == (3 if pad == 3 else EOS)).all()


@pytest.mark.parametrize("limit", [{"max_length": 12}, {"max_length": 8}, {"max_new_tokens": 1}, {"max_new_tokens": 2}])
@pytest.mark.parametrize("kind", BUILDERS)
def test_longest_length(kind: str, limit: dict) -> None:
    """`max_length` counts the prompt, `max_new_tokens` does not; one single step is a search too."""
    check_search(kind, num_beams=4, eos_token_id=THREE_ENDS, **limit)


@pytest.mark.parametrize("kind", ["mistral", "whisper"])
def test_the_default_length(kind: str) -> None:
    """Without any limit transformers generates up to its default number of tokens."""
    check_search(kind, num_beams=2, eos_token_id=EOS)


@pytest.mark.parametrize(
    "limit", [{"min_length": 12}, {"min_new_tokens": 5}, {"min_new_tokens": 8}, {"min_length": 3, "min_new_tokens": 2}]
)
@pytest.mark.parametrize("kind", BUILDERS)
def test_shortest_length(kind: str, limit: dict) -> None:
    """No end id before the shortest length, though end ids are often the best continuation."""
    _, ours = check_search(kind, num_beams=4, max_new_tokens=8, eos_token_id=ELEVEN_ENDS, **limit)
    assert (lengths_of(ours) >= min(8, limit.get("min_new_tokens", 0))).all()


@pytest.mark.parametrize(
    "forced",
    [
        {"forced_bos_token_id": 11},
        {"forced_eos_token_id": EOS},
        {"forced_eos_token_id": [EOS, 20]},
        {"forced_bos_token_id": 11, "forced_eos_token_id": EOS},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "bart", "whisper", "t5"])
def test_forced_tokens(kind: str, forced: dict) -> None:
    """A forced first or last token leaves fewer continuations than beams: real rows agree, the others are none."""
    model = double_model(kind)
    # A decoder-only model's first token is forced where the prompt is a single token.
    shape = {"length": 1} if kind == "llama" else {}
    stock, ours = search_both(
        model, prompts_for(model, kind, 1, **shape), num_beams=4, num_return_sequences=2, max_new_tokens=6, **forced
    )
    check_equal(stock, ours, 1e-5)
    first_generated = ours.sequences[0, -ours.beam_indices.shape[1]]
    assert "forced_bos_token_id" not in forced or first_generated == 11


def test_forcing_the_same_token_everywhere() -> None:
    """With one legal continuation at every step there is one sequence; the other rows are no continuation."""
    model = double_model("llama")
    stock, ours = search_both(
        model, prompts_for(model, "llama", 2), num_beams=3, num_return_sequences=3, max_new_tokens=4,
        prefix_allowed_tokens_fn=lambda prompt, ids: [17],
    )  # fmt: skip
    check_equal(stock, ours, 1e-5)
    assert (stock.sequences_scores.view(2, 3)[:, 1:] < NO_CONTINUATION).all()
    assert (ours.sequences_scores.view(2, 3)[:, 1:] == -torch.inf).all()


def test_only_real_sequences_fill_a_prompt_under_early_stopping() -> None:
    """`early_stopping=True` ends at `W` finished sequences. transformers counts rows that are no continuation, too.

    Two real beams can end at each step from the second on, and six are wanted: the fourth step has found them. The
    other four beams are copies, whose ends transformers takes for finished ones. Ours finds what it does, and more.
    """
    model, width = double_model("llama"), 6

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        return [11, 12] if len(ids) == 7 else [EOS, 13]

    stock, ours = search_both(
        model, prompts_for(model, "llama", 2), num_beams=width, num_return_sequences=width, max_new_tokens=6,
        prefix_allowed_tokens_fn=allowed, early_stopping=True,
    )  # fmt: skip
    theirs, mine = (real_scores(output.sequences_scores).view(2, width) for output in (stock, ours))
    assert mine.isfinite().all() and not theirs.isfinite().all()
    for prompt in range(2):
        for score in theirs[prompt][theirs[prompt].isfinite()]:
            assert (mine[prompt] - score).abs().min() < 1e-5
    assert (mine >= theirs - 1e-5).all()


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("kind", ["gemma3", "t5"])
def test_number_of_returned_sequences(kind: str, count: int) -> None:
    """From the best one to all `W`, best first; the columns are as many as the longest of those returned."""
    _, ours = check_search(
        kind, num_beams=5, num_return_sequences=count, max_new_tokens=9, eos_token_id=THREE_ENDS, length_penalty=0.0
    )
    scores = ours.sequences_scores.view(3, count)
    assert torch.equal(scores, scores.sort(dim=1, descending=True).values)


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_tensor_is_returned_by_default(kind: str) -> None:
    """Without `return_dict_in_generate` the ids alone come back, whatever else was asked for."""
    model = double_model(kind)
    inputs = prompts_for(model, kind, 3)
    call = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 9, "eos_token_id": ELEVEN_ENDS}
    for extra in ({}, {"output_scores": True}, {"repetition_penalty": 1.3}):
        stock = GenerationMixin.generate(model, **inputs, **call, **extra)
        ours = GenerationMixin.generate(model, **inputs, **call, **extra, custom_generate="hf_paged_beam")
        assert isinstance(ours, torch.Tensor) and ours.dtype == stock.dtype
        assert torch.equal(ours, stock)
