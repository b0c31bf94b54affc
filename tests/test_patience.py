"""`patience`: a prompt stops when ``ceil(patience · W)`` sequences have finished (Kasai et al. 2022)."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from comparing import check_identical, search_both
from oracle import Rules, beam_search, from_table, steps_taken
from table_model import AttendingTable, GatheringTable, Table, random_table, spelled, table_model, written_table
from test_oracle import check_as_expected, padded
from tiny_models import EOS, double_model, prompts_for
from transformers.generation.utils import GenerationMixin

FORMS = ("length", "gnmt", "none")
EXPONENTS = (1.0, 2.0, 3.0)
PATIENCE = (0.3, 0.5, 0.75, 1, 1.0, 1.25, 1.5, 2, 3.0)

LETTERS = "abe"
TREE = {
    #      one way to the end after another; the more letters, the better their mean
    "": {"a": 0.6, "e": 0.4},
    "a": {"a": 0.9, "e": 0.1},
}


def search(model: Any, inputs: dict, rules: Rules, **extra: Any) -> Any:
    settings = dict(
        num_beams=rules.num_beams, num_return_sequences=rules.num_beams, max_new_tokens=rules.max_new_tokens,
        early_stopping=rules.early_stopping, length_penalty=rules.length_penalty, patience=rules.patience,
        length_normalization=rules.normalization, eos_token_id=list(rules.ends) or None, do_sample=False,
        return_dict_in_generate=True, output_scores=True, custom_generate="hf_paged_beam",
    )  # fmt: skip
    return model.generate(**inputs, **{**settings, **extra})


def random_case(seed: int, patience: float) -> tuple[Rules, int, list[tuple[int, ...]]]:
    """Rules, a vocabulary size and prompts of several lengths."""
    draw = random.Random(seed)
    ends = tuple(range(3, 3 + draw.choice([1, 1, 2, 3])))
    rules = Rules(
        num_beams=draw.randint(2, 6), max_new_tokens=draw.choice([1, 4, 6, 8]), ends=ends, early_stopping=True,
        length_penalty=draw.choice(EXPONENTS), normalization=draw.choice(FORMS), patience=patience,
    )  # fmt: skip
    vocabulary = rules.num_candidates + draw.randint(0, 5)
    rows = [tuple(draw.choices(range(vocabulary), k=draw.randint(1, 4))) for _ in range(draw.randint(1, 4))]
    return rules, vocabulary, rows


def ending_table(seed: int, vocabulary: int, rules: Rules) -> Table:
    """Log-probabilities with which sequences end early enough for patience to matter."""
    return random_table(seed, vocabulary, ends=rules.ends, raised=2.5)


@pytest.mark.parametrize("patience", PATIENCE)
@pytest.mark.parametrize("seed", range(12))
def test_random_tables(seed: int, patience: float) -> None:
    """All rows against the oracle, which keeps every finished sequence; rows that never finished are -inf, and last.

    The number of steps too: a search that stops late finds as good, but is no search with patience.
    """
    rules, vocabulary, rows = random_case(seed, patience)
    table, inputs = ending_table(seed, vocabulary, rules), padded(rows)
    kind = (AttendingTable, GatheringTable)[seed % 2]
    model = table_model(table, vocabulary, kind=kind)
    output = search(model, inputs, rules)
    expected = [beam_search(from_table(table, row), rules) for row in rows]
    check_as_expected(output, expected, inputs["input_ids"].shape[1])
    assert len(output.scores) == max(steps_taken(from_table(table, row), rules) for row in rows)
    if len(output.scores) > 1:
        assert output.beam_path == ("folded" if kind is AttendingTable else "gathered")
    quiet = search(model, inputs, rules, output_scores=False, return_dict_in_generate=False)
    assert torch.equal(quiet, output.sequences)


def test_these_tables_tell_patience_apart() -> None:
    """The oracle's own results differ between neighbours, or nothing would be tested; and more patience never hurts."""
    differ, better = 0, 0
    for seed in range(12):
        best = []
        for patience in (0.5, 1.0, 2.0, 3.0):
            rules, vocabulary, rows = random_case(seed, patience)
            found = beam_search(from_table(ending_table(seed, vocabulary, rules), rows[0]), rules)
            best.append([one.score for one in found])
        differ += sum(first != second for first, second in itertools.pairwise(best))
        better += best[3][0] > best[1][0]
        assert all(first[0] <= second[0] for first, second in itertools.pairwise(best))
    assert differ >= 12 and better >= 2


def test_patience_on_paper() -> None:
    """Two beams: e, ae, aae and so on finish one in each step; the later, the better for each token.

        n      1      2      3      4
        ln p   -.916  -2.813 -2.919 -3.024
        / n    -.916  -1.407 -.973  -.756
    """  # fmt: skip
    model, ids = table_model(written_table(TREE, LETTERS), 3), torch.zeros(1, 1, dtype=torch.int64)
    found = {}
    for patience in (0.5, 1, 1.5, 2):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=2, num_return_sequences=2, max_new_tokens=6,
            early_stopping=True, patience=patience, eos_token_id=2, return_dict_in_generate=True, output_scores=True,
            do_sample=False, custom_generate="hf_paged_beam",
        )  # fmt: skip
        words = [word[: word.find("e") + 1] for word in spelled(output.sequences[:, 1:], LETTERS)]
        real = output.sequences_scores.isfinite().tolist()
        found[patience] = [word for word, is_real in zip(words, real, strict=True) if is_real], len(output.scores)
    assert found == {
        0.5: (["e"], 1),
        1: (["e", "ae"], 2),
        1.5: (["e", "aae"], 3),
        2: (["aaae", "e"], 4),
    }


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("patience", [1, 1.0])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "t5", "bart"])
def test_patience_of_one_is_early_stopping(kind: str, patience: float, batch_size: int) -> None:
    """In every field of the output transformers' own ``early_stopping=True``."""
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts_for(model, kind, batch_size), num_beams=4, num_return_sequences=4, max_new_tokens=8,
        early_stopping=True, eos_token_id=[EOS, *range(20, 30)], ours_only={"patience": patience},
    )  # fmt: skip
    check_identical(stock, ours)
    assert ours.beam_path != "handed over"


def test_fewer_rows_than_beams() -> None:
    """The first rows of all."""
    rules, vocabulary, rows = random_case(3, 1.5)
    model = table_model(ending_table(3, vocabulary, rules), vocabulary)
    whole, part = search(model, padded(rows), rules), search(model, padded(rows), rules, num_return_sequences=1)
    assert torch.equal(part.sequences_scores, whole.sequences_scores[:: rules.num_beams])


def test_in_a_generation_config_that_stops_early() -> None:
    """`early_stopping` may come from the model's configuration."""
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    call = dict(num_beams=3, max_new_tokens=6, do_sample=False, custom_generate="hf_paged_beam", patience=2.0)
    expected = model.generate(**inputs, **call, early_stopping=True)
    model.generation_config.early_stopping = True
    try:
        assert torch.equal(model.generate(**inputs, **call), expected)
    finally:
        model.generation_config.early_stopping = False


@pytest.mark.parametrize("patience", [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, True, False, "1.5", [1.0]])
def test_what_is_no_patience(patience: object) -> None:
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    with pytest.raises(ValueError, match="patience"):
        GenerationMixin.generate(
            model, **inputs, num_beams=2, max_new_tokens=3, early_stopping=True, patience=patience, do_sample=False,
            custom_generate="hf_paged_beam",
        )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{}, {"early_stopping": False}, {"early_stopping": "never"}, {"early_stopping": True, "use_cache": False},
     {"early_stopping": True, "num_beams": 1}],
)  # fmt: skip
def test_patience_needs_our_search_and_early_stopping(settings: dict) -> None:
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    call = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False, "patience": 2.0, **settings}
    with pytest.raises(ValueError, match="patience"):
        GenerationMixin.generate(model, **inputs, **call, custom_generate="hf_paged_beam")
