"""Diverse beam search against a slow one (`diverse_oracle.py`), on paper, and against itself.

`compare_diverse.py` holds both against the last release of transformers that has this search.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter

import diverse_oracle
import pytest
import torch
from diverse_oracle import Group, diverse_beam_search
from oracle import Finished, Rules, beam_search, from_model, from_table
from table_model import AttendingTable, GatheringTable, random_table, spelled, table_model, written_table
from test_oracle import TOLERANCE, check_as_expected, padded
from tiny_models import ENCODER_DECODER, START, prompts, shared_model, tiny_model
from transformers import GenerationConfig

import hf_paged_beam
from hf_paged_beam import TokenTrie

FORMS = ("length", "gnmt", "none")
EARLY_STOPPING = (True, False, "never")
ENDS = {
    "llama": (10, 55, 91), "mistral": (40, 59, 61), "gemma3": (9, 11, 97), "gpt2": (17, 28, 53), "t5": (64, 68, 87),
    "bart": (4, 8, 79),
}  # fmt: skip
"""End tokens that searches of the tiny models meet."""
KINDS = pytest.mark.parametrize("kind", [AttendingTable, GatheringTable])
PROMPT = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "attention_mask": torch.ones(1, 1, dtype=torch.int64)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A search.

    Attributes:
        rules: `num_beams` is `W`, of all groups together.
        groups: `G`.
        penalty: `diversity_penalty`.
        pad: token that fills rows; each beam of a closed group counts as one that took it.
    """

    rules: Rules
    groups: int
    penalty: float
    pad: int = 0

    def expected(self, next_log_probs, **more) -> list[Finished]:
        """What the oracle finds."""
        return diverse_beam_search(next_log_probs, self.rules, self.groups, self.penalty, pad=self.pad, **more)

    @property
    def settings(self) -> dict:
        """The same for ``generate``, all `W` rows returned."""
        rules = self.rules
        return dict(
            num_beams=rules.num_beams, num_beam_groups=self.groups, diversity_penalty=self.penalty,
            num_return_sequences=rules.num_beams, max_new_tokens=rules.max_new_tokens,
            early_stopping=rules.early_stopping, length_penalty=rules.length_penalty,
            length_normalization=rules.normalization, eos_token_id=list(rules.ends) or None, pad_token_id=self.pad,
            do_sample=False, return_dict_in_generate=True, output_scores=True, custom_generate="hf_paged_beam",
        )  # fmt: skip


def search(model, inputs, case: Case, **more):
    """The search by ours; it must find the same where it need not return the scores of whole rows."""
    output = model.generate(**inputs, **{**case.settings, **more})
    quiet = model.generate(**inputs, **{**case.settings, "output_scores": False, **more})
    assert torch.equal(quiet.sequences, output.sequences)
    return output


def plain_search(model, inputs, rules: Rules):
    """Our search without groups, by the same rules."""
    settings = Case(rules=rules, groups=1, penalty=0.0).settings
    del settings["num_beam_groups"], settings["diversity_penalty"]
    return model.generate(**inputs, **settings)


def rows_of(output, prompt: int = 0, batch_size: int = 1, start: int = 1) -> list[tuple[float, tuple[int, ...]]]:
    """Score and generated ids, fill included, of one prompt's rows."""
    count = len(output.sequences) // batch_size
    rows = slice(prompt * count, (prompt + 1) * count)
    scores, sequences = output.sequences_scores[rows].tolist(), output.sequences[rows, start:].tolist()
    return [(score, tuple(tokens)) for score, tokens in zip(scores, sequences, strict=True)]


def printed(numbers) -> list[str]:
    """Numbers as they stand in print."""
    return [f"{number:.3f}" for number in numbers]


# --- on paper -----------------------------------------------------------------------------------------------------


def written_search(rows: dict, letters: str, kind=AttendingTable, *, ends: str = "", **case):
    """A search of a written table from a prompt of one token: scores in print, and words."""
    end_tokens = [letters.index(letter) for letter in ends]
    model = table_model(written_table(rows, letters), len(letters), eos=end_tokens or None, kind=kind)
    settings = {**dict(pad=0, groups=2), **case}
    groups, penalty, pad = (settings.pop(name) for name in ("groups", "penalty", "pad"))
    rules = Rules(ends=end_tokens, **settings)
    output = search(model, PROMPT, Case(rules=rules, groups=groups, penalty=penalty, pad=pad))
    words = [letters_up_to_the_end(word, ends) for word in spelled(output.sequences[:, 1:], letters)]
    return printed(output.sequences_scores.tolist()), words


def letters_up_to_the_end(word: str, ends: str) -> str:
    """A word without what fills its row after an end letter."""
    return next((word[: place + 1] for place, letter in enumerate(word) if letter in ends), word)


ONE_STEP = {"": {"a": 0.6, "b": 0.3, "c": 0.1}}


@KINDS
@pytest.mark.parametrize(
    ("penalty", "scores", "words"),
    [
        # ln .6 = -0.511, ln .3 = -1.204, ln .1 = -2.303
        (0.5, ["-0.511", "-1.011"], ["a", "a"]),  # a costs the second group 0.5: still better than b
        (1.0, ["-0.511", "-1.204"], ["a", "b"]),  # a would cost it 1.0: -1.511
    ],
)
def test_what_a_token_costs_the_second_group_on_paper(kind, penalty, scores, words):
    """Two groups of one beam: the penalty decides, and stays part of the score."""
    found = written_search(ONE_STEP, "abc", kind, num_beams=2, max_new_tokens=1, penalty=penalty)
    assert found == (scores, words)


def test_each_beam_of_each_earlier_group_counts_on_paper():
    """A third group loses twice what two groups took; a group of two beams takes two tokens."""
    three = written_search(ONE_STEP, "abc", num_beams=3, groups=3, max_new_tokens=1, penalty=0.4)
    #   third group: a -0.511 - 0.8 = -1.311 (if each counts), b -1.204
    assert three == (["-0.511", "-0.911", "-1.204"], ["a", "a", "b"])
    wide = written_search(ONE_STEP, "abc", num_beams=4, groups=2, max_new_tokens=1, penalty=2.0)
    #   first group: a, b; second group: c -2.303, a -2.511, b -3.204
    assert wide == (["-0.511", "-1.204", "-2.303", "-2.511"], ["a", "b", "c", "a"])


TWO_STEPS = {
    "": {"a": 0.5, "b": 0.4, "c": 0.1},
    "a": {"a": 0.5, "b": 0.3, "c": 0.2},
    "b": {"a": 0.6, "b": 0.3, "c": 0.1},
    "c": {"a": 0.4, "b": 0.3, "c": 0.3},
}


def test_losses_add_up_from_step_to_step_on_paper():
    """What was lost at the first step is part of the sum; only tokens of the same step cost anything."""
    #   first group:  a, then aa                      ln .5 + ln .5             = -1.386
    #   second group: a -0.693 - 0.1, b -0.916:  a;   ln .5 - 0.1 + ln .5 - 0.1 = -1.586
    #                 (ab would be ln .5 - 0.1 + ln .3 = -1.997)
    found = written_search(TWO_STEPS, "abc", num_beams=2, max_new_tokens=2, penalty=0.1, length_penalty=0.0)
    assert found == (["-1.386", "-1.586"], ["aa", "aa"])
    #   with 0.3, the second group takes b, and there a costs 0.3: ba -0.916 - 0.511 - 0.3 = -1.727, bb -2.120
    found = written_search(TWO_STEPS, "abc", num_beams=2, max_new_tokens=2, penalty=0.3, length_penalty=0.0)
    assert found == (["-1.386", "-1.727"], ["aa", "ba"])


def test_end_tokens_cost_nothing_on_paper():
    """All groups may end here: what counts of a group that ends is the token of the beam that would go on."""
    rows = {"": {".": 0.6, "a": 0.3, "b": 0.1}}
    found = written_search(rows, ".ab", ends=".", num_beams=2, max_new_tokens=3, penalty=5.0, early_stopping=True)
    assert found == (["-0.511", "-0.511"], [".", "."])


AFTER_A_CLOSED_GROUP = {
    "": {"a": 0.6, "b": 0.3, "c": 0.1},  # first group a; second group b, as a costs 1
    "a": {".": 0.9, "b": 0.1},  #           first group ends: with True, and one beam, it is closed. b counts
    "b": {"c": 0.9, "a": 0.1},  #           second group bc
    "bc": {"a": 0.6, "b": 0.4},  #          is a token counted for the closed group?
}


@pytest.mark.parametrize(
    ("pad", "score", "word"),
    [
        # ln .3 + ln .9 = -1.309;  a: + ln .6 = -1.820;  b: + ln .4 = -2.226, -2.820 if b costs 1
        ("c", "-1.820", "bca"),
        ("a", "-2.226", "bcb"),  # a costs 1: -2.820
    ],
)
def test_a_closed_group_counts_with_its_pads_on_paper(pad, score, word):
    """As in transformers, where the rows of a group that is done are padded, and count as all rows do."""
    scores, words = written_search(
        AFTER_A_CLOSED_GROUP, "abc.", ends=".", num_beams=2, max_new_tokens=3, penalty=1.0, early_stopping=True,
        length_penalty=0.0, pad="abc.".index(pad),
    )  # fmt: skip
    assert (scores, words) == (["-0.616", score], ["a.", word])  # ln .6 + ln .9


FULL_AT_THE_END = {
    "": {"a": 0.55, ".": 0.25, "b": 0.2},
    "a": {"a": 0.6, ".": 0.4},
    "b": {".": 0.1, "a": 0.9},
}


def test_end_tokens_of_the_last_step_close_a_group_on_paper():
    """With `early_stopping=True`, two finished sequences fill a group of two: better ones at full length come late."""
    scores, words = written_search(
        FULL_AT_THE_END, "ab.", ends=".", num_beams=2, groups=1, max_new_tokens=2, penalty=0.0, early_stopping=True,
        length_penalty=0.0,
    )  # fmt: skip
    # not groups, so by the rules of the plain search: aa, ln .55 + ln .6 = -1.109, takes part
    assert (scores, words) == (["-1.109", "-1.386"], ["aa", "."])
    scores, words = written_search(
        FULL_AT_THE_END, "ab.", ends=".", num_beams=4, groups=2, max_new_tokens=2, penalty=1e-3, early_stopping=True,
        length_penalty=0.0,
    )  # fmt: skip
    # step 1: . finishes; a and b go on. Step 2: aa -1.109, a. -1.514, ba -1.715: a. is among the first two, finishes,
    # and fills the group. The second group has lost 0.001 with a, and an end token costs nothing.
    assert (scores, words) == (["-1.386", "-1.386", "-1.514", "-1.515"], [".", ".", "a.", "a."])


# --- random tables ------------------------------------------------------------------------------------------------


def random_case(seed: int, *, roomy: bool = True) -> tuple[Case, int, list[tuple[int, ...]]]:
    """A search, a vocabulary size and prompts.

    Args:
        roomy: a vocabulary that has all candidates of a group's first step; else a tiny one.
    """
    draw = random.Random(seed)
    groups = draw.choice([2, 2, 3, 4])
    width = groups * draw.randint(1, 3)
    ends = range(3, 3 + draw.choice([0, 1, 1, 1, 3] if roomy else [0, 1, 1, 2]))
    rules = Rules(
        num_beams=width,
        max_new_tokens=draw.randint(1, 8),
        ends=ends,
        early_stopping=draw.choice(EARLY_STOPPING),
        length_penalty=draw.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
        normalization=draw.choice(["length", *FORMS]),
    )
    case = Case(
        rules=rules,
        groups=groups,
        penalty=draw.choice([0.2, 0.5, 1.0, 2.0]),
        pad=draw.choice([0, *ends[:1]]),
    )
    least = max(rules.num_candidates // groups if roomy else 0, 4 + len(ends))
    vocabulary = least + draw.randint(0, 9 if roomy else 1)
    rows = [tuple(draw.choices(range(vocabulary), k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
    return case, vocabulary, rows


def table_of(seed: int, case: Case, vocabulary: int):
    return random_table(seed, vocabulary, ends=case.rules.ends, raised=random.Random(seed).choice([1.5, 2.5]))


class AsksWhatRunsOn(Group):
    """Another rule: a group is closed by the best sequence that runs on, as the plain search is."""

    def closes(self, candidates):
        return bool(self.running) and super().closes(self.running)


class LastStepTakesAll(Group):
    """Another rule: at the longest length, sequences finish also where that step's end tokens closed the group."""

    def finish_at_the_longest_length(self):
        if self.running and len(self.running[0][1]) == self.rules.max_new_tokens:
            self.finish(self.running)


TELLING: dict[type[Group] | None, tuple[int, ...]] = {
    AsksWhatRunsOn: (47, 107, 131, 135, 163, 199, 223, 248),
    LastStepTakesAll: (44, 51, 246, 253, 360, 372, 426, 467),
    None: (9, 65, 67, 168, 181, 193, 246, 253),
}
"""Seeds of cases in which another rule finds something else; None: nothing counts for a closed group."""
SEEDS = sorted({*range(30), *itertools.chain(*TELLING.values())})


@pytest.mark.parametrize(
    ("other", "seed"), [(other, seed) for other, seeds in TELLING.items() for seed in seeds], ids=str
)
def test_cases_tell_the_rules_apart(other, seed, monkeypatch):
    """The rules that were easy to take for others matter in the cases that ours is held to."""
    case, vocabulary, rows = random_case(seed)
    table = table_of(seed, case, vocabulary)
    expected = [case.expected(from_table(table, row)) for row in rows]
    if other is None:
        others = [dataclasses.replace(case, pad=None).expected(from_table(table, row)) for row in rows]
    else:
        monkeypatch.setattr(diverse_oracle, "Group", other)
        others = [case.expected(from_table(table, row)) for row in rows]
    apart = [
        abs(one.score - another.score)
        for found, other_found in zip(expected, others, strict=True)
        for one, another in zip(found, other_found, strict=True)
    ]
    assert max(apart) > 100 * TOLERANCE


@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_random_tables(seed, kind):
    """Random searches on both read paths; batches padded on the left."""
    case, vocabulary, rows = random_case(seed)
    table = table_of(seed, case, vocabulary)
    inputs, model = padded(rows), table_model(table, vocabulary, kind=kind)
    expected = [case.expected(from_table(table, row)) for row in rows]
    check_as_expected(search(model, inputs, case), expected, inputs["input_ids"].shape[1])


@pytest.mark.parametrize("seed", range(40))
def test_random_tables_of_tiny_vocabularies(seed):
    """Fewer continuations than beams: missing sequences have score -inf, and take no token from later groups."""
    case, vocabulary, rows = random_case(seed, roomy=False)
    table = table_of(seed, case, vocabulary)
    inputs, model = padded(rows), table_model(table, vocabulary)
    expected = [case.expected(from_table(table, row)) for row in rows]
    check_as_expected(search(model, inputs, case), expected, inputs["input_ids"].shape[1])


# --- tiny models --------------------------------------------------------------------------------------------------


def scorers_of(model, kind: str, inputs: dict):
    """The oracle's view of each prompt of a batch, alone and without padding."""
    start = (START,) if kind in ENCODER_DECODER else ()
    rows = [ids[mask.bool()][None] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    return [from_model(model, {"input_ids": row}, start) for row in rows]


def columns_before(kind: str, inputs: dict) -> int:
    return 1 if kind in ENCODER_DECODER else inputs["input_ids"].shape[1]


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt2", "t5", "bart"])
def test_random_models(kind, early_stopping):
    """Tiny models in float64 against fresh forward passes over whole sequences."""
    model, inputs = shared_model(kind, torch.float64), prompts(kind, batch_size=2)
    scorers = scorers_of(model, kind, inputs)
    for form, exponent, (width, groups), penalty in [
        ("length", 1.0, (4, 2), 0.5), ("length", -1.0, (6, 3), 1.0),
        ("none", 0.0, (4, 4), 2.0), ("gnmt", 0.6, (6, 2), 0.2),
    ]:  # fmt: skip
        rules = Rules(
            num_beams=width, max_new_tokens=6, ends=ENDS[kind], early_stopping=early_stopping,
            length_penalty=exponent, normalization=form,
        )  # fmt: skip
        case = Case(rules=rules, groups=groups, penalty=penalty)
        expected = [case.expected(scorer) for scorer in scorers]
        check_as_expected(search(model, inputs, case), expected, columns_before(kind, inputs))


# --- against itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_groups_without_penalty_are_separate_searches(kind):
    """Penalty 0: each group finds what a search of its width finds; where no end token is, that is the plain one."""
    model, inputs = shared_model(kind, torch.float64), prompts(kind, batch_size=2)
    start = columns_before(kind, inputs)
    rules = Rules(num_beams=6, max_new_tokens=6)
    groups = search(model, inputs, Case(rules=rules, groups=3, penalty=0.0))
    alone = plain_search(model, inputs, dataclasses.replace(rules, num_beams=2))
    for prompt in range(2):
        merged = rows_of(groups, prompt, 2, start)
        separate = [row for row in rows_of(alone, prompt, 2, start) for _ in range(3)]
        assert [tokens for _, tokens in merged] == [tokens for _, tokens in separate]
        assert [score for score, _ in merged] == pytest.approx([score for score, _ in separate], abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(12))
def test_groups_without_penalty_are_separate_groups(seed):
    """The same with end tokens, by the oracle's search of one group."""
    case, vocabulary, rows = random_case(seed)
    case = dataclasses.replace(case, penalty=0.0)
    table, inputs = table_of(seed, case, vocabulary), padded(rows)
    output = search(table_model(table, vocabulary), inputs, case)
    one = dataclasses.replace(case.rules, num_beams=case.rules.num_beams // case.groups)
    alone = [diverse_beam_search(from_table(table, row), one, 1, 0.0) for row in rows]
    expected = [[row for row in found for _ in range(case.groups)] for found in alone]
    check_as_expected(output, expected, inputs["input_ids"].shape[1])


def test_one_group_is_the_plain_search():
    """`num_beam_groups=1` asks for nothing; the plain search keeps transformers' newer rules."""
    model, inputs = shared_model("llama", torch.float64), prompts("llama")
    rules = Rules(num_beams=4, max_new_tokens=6, ends=ENDS["llama"], early_stopping=True)
    one, plain = search(model, inputs, Case(rules=rules, groups=1, penalty=0.0)), plain_search(model, inputs, rules)
    assert torch.equal(one.sequences, plain.sequences)
    assert torch.equal(one.sequences_scores, plain.sequences_scores)
    scorers = scorers_of(model, "llama", inputs)
    check_as_expected(one, [beam_search(scorer, rules) for scorer in scorers], columns_before("llama", inputs))


@pytest.mark.parametrize("seed", range(12))
def test_later_groups_change_nothing_in_earlier_ones(seed):
    """The rows of the first groups are among those of more groups of the same width."""
    case, vocabulary, rows = random_case(seed)
    width = case.rules.num_beams // case.groups
    more = dataclasses.replace(
        case, groups=case.groups + 1, rules=dataclasses.replace(case.rules, num_beams=case.rules.num_beams + width)
    )
    model = table_model(table_of(seed, case, vocabulary), vocabulary)
    few, many = (search(model, padded(rows[:1]), one) for one in (case, more))
    start = len(rows[0])

    def counted(output):
        return Counter(
            (round(score, 4), ended(tokens, case.rules.ends)) for score, tokens in rows_of(output, start=start)
        )

    assert not counted(few) - counted(many)


def ended(tokens, ends) -> tuple[int, ...]:
    """Tokens up to the first end token."""
    cut = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tuple(tokens[: cut + 1])


def test_a_great_penalty_keeps_groups_apart():
    """Groups of one beam, a penalty beyond all scores: no two have the same token at the same step."""
    model, inputs = shared_model("gpt2", torch.float64), prompts("gpt2")
    case = Case(rules=Rules(num_beams=6, max_new_tokens=8), groups=6, penalty=1000.0)
    output = search(model, inputs, case)
    for prompt in range(2):
        words = [tokens for _, tokens in rows_of(output, prompt, 2, columns_before("gpt2", inputs))]
        assert all(len(set(tokens)) == 6 for tokens in zip(*words, strict=True))


@pytest.mark.parametrize("seed", [1, 4, 6, 9])
def test_each_prompt_as_if_alone(seed):
    """Penalties go from group to group, never from prompt to prompt, whenever their groups are closed."""
    case, vocabulary, _ = random_case(seed)
    draw = random.Random(seed)
    rows = [tuple(draw.choices(range(vocabulary), k=draw.randint(1, 4))) for _ in range(4)]
    model = table_model(table_of(seed, case, vocabulary), vocabulary)
    batch, longest = search(model, padded(rows), case), max(map(len, rows))
    for prompt, row in enumerate(rows):
        together = rows_of(batch, prompt, 4, longest)
        alone = rows_of(search(model, padded([row]), case), start=len(row))
        assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], abs=TOLERANCE)
        ends = case.rules.ends
        assert [ended(tokens, ends) for _, tokens in together] == [ended(tokens, ends) for _, tokens in alone]


# --- outputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_fewer_rows_are_the_best_rows(count):
    """`num_return_sequences` takes the best of all groups together."""
    model, inputs = shared_model("llama", torch.float64), prompts("llama")
    case = Case(rules=Rules(num_beams=6, max_new_tokens=6, ends=ENDS["llama"]), groups=3, penalty=0.7)
    start = columns_before("llama", inputs)
    everything, some = search(model, inputs, case), search(model, inputs, case, num_return_sequences=count)
    for prompt in range(2):
        all_rows, rows = rows_of(everything, prompt, 2, start), rows_of(some, prompt, 2, start)
        assert len(rows) == count
        for (score, tokens), (all_score, all_tokens) in zip(rows, all_rows, strict=False):
            assert score == all_score
            assert ended(tokens, ENDS["llama"]) == ended(all_tokens, ENDS["llama"])


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_scores_and_beam_indices_add_up(kind):
    """`scores` hold the penalties, and `beam_indices` name rows of them: together they give `sequences_scores`."""
    model, inputs = shared_model(kind, torch.float64), prompts(kind)
    width, groups = 6, 3
    rules = Rules(num_beams=width, max_new_tokens=5, ends=ENDS[kind], early_stopping=True)
    output = search(model, inputs, Case(rules=rules, groups=groups, penalty=1.5))
    assert all(scores.shape == (2 * width, 99) for scores in output.scores)
    token_scores = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    lengths = (output.beam_indices >= 0).sum(-1)
    torch.testing.assert_close(
        (token_scores.sum(-1) / lengths).float(), output.sequences_scores, atol=TOLERANCE, rtol=TOLERANCE
    )
    torch.testing.assert_close(
        output.token_logprobs.sum(-1) / lengths, output.sequences_scores, atol=TOLERANCE, rtol=TOLERANCE
    )
    assert output.beam_indices.dtype == torch.int32
    for row, indices in enumerate(output.beam_indices.tolist()):
        used = [index for index in indices if index >= 0]
        assert all(row // width == index // width for index in used)  # its own prompt's beams,
        assert len({index // (width // groups) for index in used}) == 1  # all of one group


def test_scores_hold_the_penalties_of_the_step():
    """`scores` of the first step, on paper: the second group's rows lack what the first group took."""
    table = written_table(ONE_STEP, "abc")
    model = table_model(table, 3)
    case = Case(rules=Rules(num_beams=4, max_new_tokens=1), groups=2, penalty=2.0)
    (scores,) = search(model, PROMPT, case).scores
    free = torch.tensor(table((0,))).float()
    lost = free - torch.tensor([2.0, 2.0, 0.0])  # the first group takes a and b
    torch.testing.assert_close(scores, torch.stack([free, free, lost, lost]))


# --- logits processors, tries, other settings -----------------------------------------------------------------------


def check_with_processor(afterwards, *, penalty: float = 1.0, order_matters: bool = True, **setting) -> None:
    """A call with a logits processor against the oracle with the same written down.

    Args:
        afterwards: the processor as the oracle takes it.
        penalty: `diversity_penalty`.
        order_matters: whether something else would be found if the penalty came after the processor.
        setting: that of ``generate`` that brings in the processor.
    """
    model, inputs = shared_model("t5", torch.float64), prompts("t5")
    rules = Rules(num_beams=6, max_new_tokens=5, ends=ENDS["t5"], early_stopping=True)
    case = Case(rules=rules, groups=3, penalty=penalty)
    scorers = scorers_of(model, "t5", inputs)

    def processed_before(scorer):
        return lambda prefixes: [afterwards(*pair) for pair in zip(prefixes, scorer(prefixes), strict=True)]

    expected = [case.expected(scorer, afterwards=afterwards) for scorer in scorers]
    if expected == [case.expected(scorer) for scorer in scorers]:
        pytest.skip("the processor changes nothing with the weights that this release draws")
    assert (expected != [case.expected(processed_before(scorer)) for scorer in scorers]) == order_matters
    check_as_expected(search(model, inputs, case, **setting), expected, 1)


def test_renormalized_after_the_penalty():
    """`renormalize_logits` makes a distribution of what the penalty left."""
    check_with_processor(
        lambda tokens, row: torch.tensor(row, dtype=torch.float64).log_softmax(-1).tolist(),
        penalty=3.0,
        renormalize_logits=True,
    )


def test_repetition_penalty_multiplies_the_penalised_scores():
    """As transformers ordered them, `repetition_penalty` sees scores from which the diversity penalty is taken."""

    def repeated(tokens, row):
        seen = {START, *tokens}
        return [(one * 0.5 if one < 0 else one / 0.5) if token in seen else one for token, one in enumerate(row)]

    check_with_processor(repeated, penalty=0.7, repetition_penalty=0.5)


def test_forced_tokens_cost_nothing():
    """A forced token has log-probability 0, also where an earlier group has it."""

    def forced(tokens, row):
        if len(tokens) == 0:
            return [0.0 if token == 23 else -math.inf for token in range(len(row))]
        return row

    check_with_processor(forced, forced_bos_token_id=23)


def test_masks_and_groups():
    """Tokens that a rule forbids are forbidden in every group."""

    def no_end_yet(tokens, row):
        return [-math.inf if len(tokens) < 3 and token in ENDS["t5"] else one for token, one in enumerate(row)]

    check_with_processor(no_end_yet, order_matters=False, min_new_tokens=3)


def test_prefix_constraint_knows_its_prompt():
    """`prefix_allowed_tokens_fn` is asked with each row's own prompt, whatever its group."""
    table = random_table(3, 12)
    rows = [(1, 2), (4, 4), (5,)]
    allowed = {2: [1, 2, 3, 4, 5], 4: [3, 4, 5, 6, 7], 5: [7, 8, 9, 10, 11]}  # by the last token of a prompt
    case = Case(rules=Rules(num_beams=4, max_new_tokens=4), groups=2, penalty=0.8)

    def masked(row):
        def next_log_probs(prefixes):
            rows_of_scores = from_table(table, row)(prefixes)
            return [
                [one if token in allowed[row[-1]] else -math.inf for token, one in enumerate(scores)]
                for scores in rows_of_scores
            ]

        return next_log_probs

    inputs = padded(rows)
    output = search(
        table_model(table, 12), inputs, case,
        prefix_allowed_tokens_fn=lambda prompt, ids: allowed[int(inputs["input_ids"][prompt, -1])],
    )  # fmt: skip
    check_as_expected(output, [case.expected(masked(row)) for row in rows], inputs["input_ids"].shape[1])


@pytest.mark.parametrize("quiet", [False, True], ids=["scores", "no scores"])
def test_groups_on_a_trie(quiet):
    """Every row is an item or none; scores are those of the oracle with all else forbidden."""
    end, table = 3, random_table(5, 12, ends=(3,))
    draw = random.Random(2)
    items = sorted({tuple(draw.choices(range(4, 12), k=draw.randint(1, 4))) for _ in range(25)})
    beginnings = {item[:cut] for item in items for cut in range(len(item) + 1)}
    rows = [(1, 2), (4,)]
    case = Case(rules=Rules(num_beams=6, max_new_tokens=5, ends=(end,), early_stopping=True), groups=3, penalty=0.9)

    def on_items(row):
        def next_log_probs(prefixes):
            return [
                [
                    one if (prefix in items if token == end else (*prefix, token) in beginnings) else -math.inf
                    for token, one in enumerate(scores)
                ]
                for prefix, scores in zip(prefixes, from_table(table, row)(prefixes), strict=True)
            ]

        return next_log_probs

    inputs = padded(rows)
    trie = TokenTrie.from_sequences([list(item) for item in items], eos_token_id=end)
    output = table_model(table, 12).generate(**inputs, **{**case.settings, "trie": trie})
    if quiet:  # a search that returns no scores looks children up instead of masking rows
        scored, settings = output, {**case.settings, "trie": trie, "output_scores": False}
        output = table_model(table, 12).generate(**inputs, **settings)
        output.sequences_scores = scored.sequences_scores
    check_as_expected(output, [case.expected(on_items(row)) for row in rows], inputs["input_ids"].shape[1])
    for tokens, item in zip(output.sequences[:, inputs["input_ids"].shape[1] :].tolist(), output.item_ids, strict=True):
        assert ended(tokens, (end,)) == (*items[item], end)


def test_groups_from_configurations():
    """The settings may stand in a `GenerationConfig`, or in the model's own."""
    model, inputs = tiny_model("llama"), prompts("llama")
    case = Case(rules=Rules(num_beams=4, max_new_tokens=5, ends=ENDS["llama"]), groups=2, penalty=0.9)
    expected = search(model, inputs, case)
    settings = dict(case.settings)
    own = {name: settings.pop(name) for name in ("custom_generate", "length_normalization")}
    output = model.generate(**inputs, **own, generation_config=GenerationConfig(**settings))
    assert torch.equal(output.sequences, expected.sequences)
    groups = {name: settings.pop(name) for name in ("num_beam_groups", "diversity_penalty")}
    model.generation_config.update(**groups)
    output = model.generate(**inputs, **own, **settings)
    assert torch.equal(output.sequences, expected.sequences)
    assert {name: getattr(model.generation_config, name) for name in groups} == groups  # the call changed nothing


def test_groups_by_enable():
    """An enabled model's plain ``generate`` takes groups, too."""
    model, inputs = tiny_model("llama"), prompts("llama")
    case = Case(rules=Rules(num_beams=4, max_new_tokens=5, ends=ENDS["llama"]), groups=2, penalty=0.9)
    expected, settings = search(model, inputs, case), dict(case.settings)
    del settings["custom_generate"]
    assert torch.equal(hf_paged_beam.enable(model).generate(**inputs, **settings).sequences, expected.sequences)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 5}, "num_beam_groups"),  # 2 does not divide 5
        ({"num_beams": 2, "num_beam_groups": 4}, "num_beam_groups"),
        ({"num_beam_groups": 0}, "num_beam_groups"),
        ({"num_beam_groups": -2}, "num_beam_groups"),
        ({"num_beam_groups": 2.0}, "num_beam_groups"),
        ({"num_beam_groups": True}, "num_beam_groups"),
        ({"num_beam_groups": "2"}, "num_beam_groups"),
        ({"num_beam_groups": [2, 2]}, "num_beam_groups"),
        ({"diversity_penalty": -0.5}, "diversity_penalty"),
        ({"diversity_penalty": math.nan}, "diversity_penalty"),
        ({"diversity_penalty": math.inf}, "diversity_penalty"),  # times no beam it is no number
        ({"diversity_penalty": "0.5"}, "diversity_penalty"),
        ({"diversity_penalty": True}, "diversity_penalty"),
        ({"diversity_penalty": [0.5, 0.5]}, "diversity_penalty"),
        ({"num_beam_groups": 1}, "diversity_penalty"),  # without groups it would do nothing
        ({"num_beam_groups": None}, "diversity_penalty"),
        ({"do_sample": True}, "do_sample"),
        ({"num_return_sequences": 5}, "num_return_sequences"),
    ],
    ids=str,
)
def test_refused(settings, named):
    """Each is a `ValueError` that names the argument, before the model runs."""
    model = shared_model("llama")
    call = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "max_new_tokens": 3, "do_sample": False}
    with pytest.raises(ValueError, match=named):
        model.generate(**prompts("llama"), **{**call, **settings}, custom_generate="hf_paged_beam")


def test_groups_that_transformers_would_have_to_search_are_refused():
    """Without a cache the call would be transformers' own, which has no groups any more."""
    call = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "max_new_tokens": 3, "do_sample": False}
    with pytest.raises(ValueError, match="num_beam_groups"):
        shared_model("llama").generate(**prompts("llama"), **call, use_cache=False, custom_generate="hf_paged_beam")


@pytest.mark.parametrize("penalty", [0, 1, None], ids=str)
def test_penalties_of_other_kinds(penalty):
    """An integer is a number; None is none."""
    model, inputs = shared_model("llama", torch.float64), prompts("llama")
    case = Case(rules=Rules(num_beams=4, max_new_tokens=4), groups=2, penalty=float(penalty or 0))
    expected = search(model, inputs, case)
    output = search(model, inputs, case, diversity_penalty=penalty)
    assert torch.equal(output.sequences, expected.sequences)
