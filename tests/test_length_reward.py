"""`length_reward`: a reward for each generated token, and a ``"never"`` that knows of it (Huang et al. 2017)."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from comparing import check_identical, search_both
from oracle import Rules, beam_search, every_sequence, from_table, steps_taken
from table_model import AttendingTable, GatheringTable, random_table, spelled, table_model, written_table
from test_oracle import check_as_expected, padded
from tiny_models import EOS, double_model, prompts_for
from transformers.generation.utils import GenerationMixin

FORMS = ("none", "length", "gnmt")
EXPONENTS = (-1.0, 0.0, 0.6, 1.0, 2.0)
REWARDS = (-1.0, -0.2, 0.1, 0.5, 2.0)
EARLY_STOPPING = (True, False, "never")


def search(model: Any, inputs: dict, rules: Rules) -> Any:
    return model.generate(
        **inputs, num_beams=rules.num_beams, num_return_sequences=rules.num_beams,
        max_new_tokens=rules.max_new_tokens, early_stopping=rules.early_stopping, length_penalty=rules.length_penalty,
        length_normalization=rules.normalization, length_reward=rules.length_reward,
        eos_token_id=list(rules.ends) or None, do_sample=False, return_dict_in_generate=True, output_scores=True,
        custom_generate="hf_paged_beam",
    )  # fmt: skip


def varied(rules: Rules, **changes: Any) -> Rules:
    return Rules(**{**vars(rules), **changes})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize(("vocabulary", "longest", "ends"), [(3, 4, (2,)), (4, 3, (2, 3)), (3, 3, ())])
def test_width_beyond_need_is_exhaustive_search(
    vocabulary: int, longest: int, ends: tuple[int, ...], reward: float, form: str
) -> None:
    """With room for every prefix, and "never", the best of all sequences come back, each with its exact score."""
    for seed, exponent in enumerate(EXPONENTS):
        rules = Rules(
            num_beams=vocabulary**longest, max_new_tokens=longest, ends=ends, early_stopping="never",
            length_penalty=exponent, normalization=form, length_reward=reward,
        )  # fmt: skip
        table = random_table(seed, vocabulary, ends=ends, raised=0.5)
        expected = every_sequence(from_table(table, (1,)), rules)
        output = search(table_model(table, vocabulary), padded([(1,)]), rules)
        check_as_expected(output, [expected], prompt_length=1)


@pytest.mark.parametrize("seed", range(40))
def test_random_tables(seed: int) -> None:
    """All rows against the oracle with each way to stop, each form, batches padded on the left, on both read paths."""
    draw = random.Random(seed)
    ends = tuple(range(3, 3 + draw.choice([0, 1, 1, 2, 3])))
    rules = Rules(
        num_beams=draw.randint(2, 5), max_new_tokens=draw.randint(1, 7), ends=ends,
        length_penalty=draw.choice(EXPONENTS), length_reward=draw.choice(REWARDS),
    )  # fmt: skip
    vocabulary = max(rules.num_candidates, 3 + len(ends)) + draw.randint(0, 4)
    rows = [tuple(draw.choices(range(vocabulary), k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
    kind = draw.choice([AttendingTable, GatheringTable])
    table, inputs = random_table(seed, vocabulary, ends=ends), padded(rows)
    model = table_model(table, vocabulary, kind=kind)
    for early_stopping in EARLY_STOPPING:
        for form in FORMS:
            one = varied(rules, early_stopping=early_stopping, normalization=form)
            output = search(model, inputs, one)
            expected = [beam_search(from_table(table, row), one) for row in rows]
            check_as_expected(output, expected, inputs["input_ids"].shape[1])
            if len(output.scores) > 1:
                assert output.beam_path == ("folded" if kind is AttendingTable else "gathered")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reward", REWARDS)
def test_never_stops_where_nothing_is_lost_and_no_later(reward: float, form: str) -> None:
    """Narrow searches with "never" find what a search without any rule finds, in as many steps as the bound needs."""
    for seed, exponent in enumerate(EXPONENTS):
        rules = Rules(
            num_beams=2, max_new_tokens=6, ends=(2,), early_stopping="never", length_penalty=exponent,
            normalization=form, length_reward=reward,
        )  # fmt: skip
        table = random_table(seed, 5, ends=(2,), raised=3.0)
        scorer = from_table(table, (1,))
        output = search(table_model(table, 5), padded([(1,)]), rules)
        check_as_expected(output, [beam_search(scorer, varied(rules, early_stopping="exhaust"))], prompt_length=1)
        assert len(output.scores) == steps_taken(scorer, rules)


def test_the_bound_is_worth_something() -> None:
    """In the oracle: with a reward below 0, and with a small one, "never" does stop before the longest length."""
    for reward in (-1.0, -0.2, 0.1):
        rules = Rules(
            num_beams=2, max_new_tokens=6, ends=(2,), early_stopping="never", normalization="none",
            length_reward=reward,
        )  # fmt: skip
        tables = [random_table(seed, 5, ends=(2,), raised=3.0) for seed in range(5)]
        assert min(steps_taken(from_table(table, (1,)), rules) for table in tables) < 6


LETTERS = "aef"
LATE = {"": {"a": 0.2, "e": 0.5, "f": 0.3}, "a": {"a": 1.0}}
"""Two sequences end at once; what goes on is improbable, then certain, and so earns a reward for each token."""


@pytest.mark.parametrize("form", FORMS)
def test_the_bound_without_the_reward_would_stop_too_early(form: str) -> None:
    """e and f finish in the first step, with scores above a's log-probability over any form; aaaaaa is far above."""
    rules = Rules(
        num_beams=2, max_new_tokens=6, ends=(1, 2), early_stopping="never", normalization=form, length_reward=1.5
    )
    scorer = from_table(written_table(LATE, LETTERS), (0,))
    worst = math.log(0.3) + 1.5
    assert max(math.log(0.2) / rules.form(length) for length in range(1, 7)) < worst
    model, prompt = table_model(written_table(LATE, LETTERS), 3), padded([(0,)])
    output = search(model, prompt, rules)
    check_as_expected(output, [beam_search(scorer, rules)], prompt_length=1)
    assert spelled(output.sequences[:1, 1:], LETTERS) == ["aaaaaa"]
    assert output.sequences_scores[0].item() == pytest.approx(math.log(0.2) / rules.form(6) + 6 * 1.5, abs=1e-5)
    assert output.sequences_scores[0].item() == pytest.approx(every_sequence(scorer, rules)[0].score, abs=1e-5)
    hasty = search(model, prompt, varied(rules, early_stopping=True))
    assert spelled(hasty.sequences[:, 1:], LETTERS) == ["e", "f"] and len(hasty.scores) == 1


def test_a_negative_reward_asks_for_short_sequences() -> None:
    """On paper: e at ln .3 - 2, and ae at ln .63 - 4; without the reward ae is first."""
    table = written_table({"": {"a": 0.7, "e": 0.3}, "a": {"a": 0.1, "e": 0.9}}, "ae")
    for reward, first in ((0.0, [0, 1]), (-2.0, [1])):
        rules = Rules(
            num_beams=2, max_new_tokens=3, ends=(1,), early_stopping="never", normalization="none",
            length_reward=reward,
        )  # fmt: skip
        output = search(table_model(table, 2), padded([(0,)]), rules)
        assert output.sequences[0, 1 : 1 + len(first)].tolist() == first
        assert output.sequences_scores[0].item() == pytest.approx(
            math.log(0.63) if reward == 0.0 else math.log(0.3) - 2, abs=1e-5
        )


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_no_reward_is_transformers_search(kind: str, early_stopping: bool | str) -> None:
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts_for(model, kind, 3), num_beams=4, num_return_sequences=4, max_new_tokens=7,
        early_stopping=early_stopping, length_penalty=0.6, eos_token_id=[EOS, *range(20, 30)],
        ours_only={"length_reward": 0.0},
    )  # fmt: skip
    check_identical(stock, ours)
    assert ours.beam_path != "handed over"


def test_scores_of_a_real_model() -> None:
    """Summed log-probability over the form, plus the reward: `token_logprobs` stay what the model said."""
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 3)
    output = GenerationMixin.generate(
        model, **inputs, num_beams=4, num_return_sequences=4, max_new_tokens=6, eos_token_id=[EOS, *range(20, 30)],
        length_reward=0.1, length_penalty=0.5, return_dict_in_generate=True, output_scores=True, do_sample=False,
        custom_generate="hf_paged_beam",
    )  # fmt: skip
    lengths = (output.beam_indices >= 0).sum(-1)
    assert len(set(lengths.tolist())) > 1
    expected = output.token_logprobs.sum(-1) / lengths**0.5 + 0.1 * lengths
    torch.testing.assert_close(output.sequences_scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, True, False, "0.5", [0.5, 0.5]])
def test_what_is_no_reward(reward: object) -> None:
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    with pytest.raises(ValueError, match="length_reward"):
        GenerationMixin.generate(
            model, **inputs, num_beams=2, max_new_tokens=3, length_reward=reward, do_sample=False,
            custom_generate="hf_paged_beam",
        )  # fmt: skip


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"num_beams": 1}])
def test_a_reward_needs_our_search(settings: dict) -> None:
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    call = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False, "length_reward": 0.5, **settings}
    with pytest.raises(ValueError, match="length_reward"):
        GenerationMixin.generate(model, **inputs, **call, custom_generate="hf_paged_beam")
