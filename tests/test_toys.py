"""Searches that can be solved on paper, to the printed digit.

Tokens are letters. A table says how probable each letter is after each prefix; `table_model` makes a model of it.
"""

from __future__ import annotations

import math

import pytest
import torch
from table_model import AttendingTable, GatheringTable, recorded_steps, spelled, table_model, written_table
from transformers import LogitsProcessor, LogitsProcessorList

from hf_paged_beam.generation.candidates import best_candidates
from hf_paged_beam.generation.lengths import length_form
from hf_paged_beam.generation.rules import Rules
from hf_paged_beam.generation.settings import Options, PromptSettings

PROMPT = torch.zeros(1, 1, dtype=torch.int64)
KINDS = pytest.mark.parametrize(("kind", "path"), [(AttendingTable, "folded"), (GatheringTable, "gathered")])

TREE_LETTERS = "ABCxyz"
TREE = {
    #      step 1: the first letter
    "": {"A": 0.5, "B": 0.4, "C": 0.1},
    #      step 2: A is the more probable first letter, but after B one letter is nearly certain
    "A": {"x": 0.40, "y": 0.35, "z": 0.25},
    "B": {"x": 0.90, "y": 0.06, "z": 0.04},
    "C": {"x": 0.34, "y": 0.33, "z": 0.33},  # never reached at width 2
    #      a third step, for the tests that let beams run on: it tells the two beams apart
    "Bx": {"y": 1.0},
    "Ax": {"z": 1.0},
}


def search(model, **settings):
    """A search from a prompt of one token, by ours; everything that can be returned."""
    call = dict(return_dict_in_generate=True, output_scores=True, custom_generate="hf_paged_beam", do_sample=False)
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **{**call, **settings})


def words(output, letters):
    """The generated part of the returned sequences."""
    return spelled(output.sequences[:, 1:], letters)


def printed(numbers) -> list[str]:
    """Numbers as they stand in print."""
    return [f"{number:.3f}" for number in numbers]


def continuations(candidates, beams, letters):
    """What each candidate of the first prompt spells: its parent's letters and its own."""
    pairs = zip(candidates.parents[0].tolist(), candidates.tokens[0].tolist(), strict=True)
    return [beams[parent] + letters[token] for parent, token in pairs]


def test_two_step_tree_scores_of_all_candidates():
    """Selection alone: the second round of the tree, all six candidates with their scores."""
    table = written_table(TREE, TREE_LETTERS)
    logits = torch.tensor([table((0, 0)), table((0, 1))]) + torch.tensor([[3.0], [-1.0]])  # rows after A and after B
    running = torch.tensor([[math.log(0.5), math.log(0.4)]])
    rules = Rules([PromptSettings(num_beams=3, max_new_tokens=2)], Options(), num_ends=0, device=torch.device("cpu"))
    candidates = best_candidates(logits.log_softmax(-1), running, rules)
    #                                            B x: -0.916 - 0.105 = -1.022, the best although A led before
    assert continuations(candidates, ["A", "B"], TREE_LETTERS) == ["Bx", "Ax", "Ay", "Az", "By", "Bz"]
    assert printed(candidates.scores[0]) == ["-1.022", "-1.609", "-1.743", "-2.079", "-3.730", "-4.135"]
    assert printed(candidates.token_scores[0, :2]) == ["-0.105", "-0.916"]


@KINDS
def test_two_step_tree_step_by_step(kind, path):
    """The search itself: candidates, kept beams and their parents in both rounds (a third step lets beams run on)."""
    model = table_model(written_table(TREE, TREE_LETTERS), len(TREE_LETTERS), kind=kind)
    with recorded_steps() as steps:
        output = search(model, num_beams=2, max_new_tokens=3)
    first, second, third = steps
    assert output.beam_path == path

    # round 1: K = 4 candidates asked for, three letters are possible
    assert continuations(first.candidates, [""], TREE_LETTERS)[:3] == ["A", "B", "C"]
    assert printed(first.candidates.scores[0]) == ["-0.693", "-0.916", "-2.303", "-inf"]
    assert first.chosen.tokens.tolist() == [[0, 1]]  # A and B run on
    assert first.chosen.parents.tolist() == [[0, 0]]

    # round 2: the best four of six
    assert continuations(second.candidates, ["A", "B"], TREE_LETTERS) == ["Bx", "Ax", "Ay", "Az"]
    assert printed(second.candidates.scores[0]) == ["-1.022", "-1.609", "-1.743", "-2.079"]
    assert continuations(second.chosen, ["A", "B"], TREE_LETTERS) == ["Bx", "Ax"]  # kept
    assert second.chosen.parents.tolist() == [[1, 0]]  # parents [B, A]: the beams cross
    assert printed(second.after.running_scores[0]) == ["-1.022", "-1.609"]

    # round 3: each beam goes on from the history of its own parent
    assert continuations(third.candidates, ["Bx", "Ax"], TREE_LETTERS)[:2] == ["Bxy", "Axz"]
    assert printed(third.candidates.scores[0, :2]) == ["-1.022", "-1.609"]


@KINDS
def test_two_step_tree_width_two_beats_greedy(kind, path):
    """Greedy finds A x, joint probability 0.200; width 2 finds B x, joint probability 0.360."""
    model = table_model(written_table(TREE, TREE_LETTERS), len(TREE_LETTERS), kind=kind)
    greedy = search(model, num_beams=1, max_new_tokens=2)
    assert (words(greedy, TREE_LETTERS), greedy.beam_path) == (["Ax"], "handed over")
    joint = sum(model.table((0, 0))[3:4]) + model.table((0,))[0]
    assert printed([math.exp(joint)]) == ["0.200"]

    wide = search(model, num_beams=2, max_new_tokens=2, num_return_sequences=2, length_normalization="none")
    assert (words(wide, TREE_LETTERS), wide.beam_path) == (["Bx", "Ax"], path)
    assert printed(wide.sequences_scores.exp()) == ["0.360", "0.200"]
    assert wide.beam_indices.tolist() == [[0, 1], [0, 0]]  # B x: from the only beam, then from beam 1 (B)
    assert printed(wide.token_logprobs.flatten()) == ["-0.916", "-0.105", "-0.693", "-0.916"]


SHORT = 5 * math.log(0.8)
LONG = 10 * math.log(0.85)
NORMALISERS = [
    # form, exponent, short, long, winner
    ("none", 1.0, "-1.116", "-1.625", "short"),
    ("gnmt", 0.6, "-0.821", "-0.938", "short"),
    ("gnmt", 1.0, "-0.669", "-0.650", "long"),
    ("length", 0.6, "-0.425", "-0.408", "long"),
    ("length", 1.0, "-0.223", "-0.163", "long"),
]


@pytest.mark.parametrize(("form", "exponent", "short", "long", "winner"), NORMALISERS)
def test_normalisation_table(form, exponent, short, long, winner):
    """The length forms alone: 5 tokens of probability 0.8 against 10 tokens of probability 0.85."""
    divisors = length_form(torch.tensor([5, 10]), exponent, form)
    scores = (torch.tensor([SHORT, LONG], dtype=torch.float64) / divisors).tolist()
    assert printed(scores) == [short, long]
    assert ("short" if scores[0] > scores[1] else "long") == winner


RACE_LETTERS = "sleo"
RACE = {
    # the first letter decides: "sssse" ends after 5 letters, "llllllllle" after 10; "o" is the rest, and stays
    "": {"s": 0.8 / 1.65, "l": 0.85 / 1.65},
    "s": {"s": 0.8, "o": 0.2},
    "ssss": {"e": 0.8, "o": 0.2},
    "l": {"l": 0.85, "o": 0.15},
    "lllllllll": {"e": 0.85, "o": 0.15},
    "o": {"o": 1.0},
    "e": {"o": 1.0},  # after an end nothing is asked for
}


class FirstStepAsGiven(LogitsProcessor):
    """Puts back the sum of the first step's probabilities, 0.8 + 0.85, which softmax made 1."""

    def __call__(self, input_ids, scores):
        return scores + math.log(1.65) if input_ids.shape[1] == PROMPT.shape[1] else scores


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(("form", "exponent", "short", "long", "winner"), NORMALISERS)
def test_normalisation_table_by_search(form, exponent, short, long, winner, early_stopping):
    """A search whose two finished sequences are the short and the long one of the table, each row with its winner."""
    output = search(
        table_model(written_table(RACE, RACE_LETTERS), len(RACE_LETTERS), eos=RACE_LETTERS.index("e")),
        num_beams=2, num_return_sequences=2, max_new_tokens=10, length_penalty=exponent, length_normalization=form,
        early_stopping=early_stopping, logits_processor=LogitsProcessorList([FirstStepAsGiven()]),
    )  # fmt: skip
    found = dict(zip((word[: word.index("e") + 1] for word in words(output, RACE_LETTERS)),
                     printed(output.sequences_scores), strict=True))  # fmt: skip
    assert found == {"sssse": short, "llllllllle": long}
    assert next(iter(found)) == {"short": "sssse", "long": "llllllllle"}[winner]  # best first


STOP_LETTERS = "abe"
STOPS = {
    "": {"a": 0.6, "b": 0.1, "e": 0.3},
    "a": {"a": 0.65, "e": 0.35},
    "aa": {"a": 0.2, "b": 0.05, "e": 0.75},
    "aaa": {"a": 1.0},
    "aaaaaaa": {"e": 1.0},
    "b": {"b": 0.6, "e": 0.4},
    "e": {"a": 1.0},  # after an end nothing is asked for
}
"""Width 2, one end letter e, at most 8 letters, scores divided by the length. `p` is a joint probability.

step  candidates (p)                    finish, score         run on (p)         finished, best first
1     a .6, e .3, b .1                  e       ln .3         a .6, b .1         e -1.204
2     aa .39, ae .21, bb .06, be .04    ae      ln .21 / 2    aa .39, bb .06     ae -0.780, e -1.204

True: two have finished. The answer is ae, after 2 steps.

3     aae .2925, aaa .078, bbb .036     aae     ln .2925 / 3  aaa .078, bbb .036  aae -0.410, ae -0.780

False: the best running sequence, aaa, has ln .078 / 3 = -0.850 at its present length. That is below the worst
finished one, -0.780, so the search is over. The answer is aae, after 3 steps.

"never": could aaa keep its sum up to length 8, it would have ln .078 / 8 = -0.319, which is above -0.780: go on.

4..7  aaaa .078, bbbb .0216, ...        nothing               a..a .078, b..b    as before
8     aaaaaaae .078, bbbbbbbb .0028     both: longest         nothing            aaaaaaae -0.319, aae -0.410

The answer is aaaaaaae, after 8 steps.
"""


@KINDS
@pytest.mark.parametrize(
    ("early_stopping", "steps_run", "answers", "scores"),
    [
        (True, 2, ["ae", "e"], ["-0.780", "-1.204"]),
        (False, 3, ["aae", "ae"], ["-0.410", "-0.780"]),
        ("never", 8, ["aaaaaaae", "aae"], ["-0.319", "-0.410"]),
    ],
)
def test_three_stopping_rules_give_three_answers(early_stopping, steps_run, answers, scores, kind, path):
    """The table `STOPS`, stopped by each rule; transformers' own search gives the same."""
    model = table_model(written_table(STOPS, STOP_LETTERS), len(STOP_LETTERS), eos=STOP_LETTERS.index("e"), kind=kind)
    settings = dict(num_beams=2, num_return_sequences=2, max_new_tokens=8, early_stopping=early_stopping)
    for output in (search(model, **settings), search(model, **settings, custom_generate=None)):
        assert [word[: word.index("e") + 1] for word in words(output, STOP_LETTERS)] == answers
        assert printed(output.sequences_scores) == scores
        assert len(output.scores) == steps_run
        assert getattr(output, "beam_path", path) == path


def test_stopping_example_step_by_step():
    """The rows of the comment at `STOPS`: who ends, who runs on, and the finished scores, of the longest search."""
    model = table_model(written_table(STOPS, STOP_LETTERS), len(STOP_LETTERS), eos=STOP_LETTERS.index("e"))
    with recorded_steps() as steps:
        search(model, num_beams=2, max_new_tokens=8, early_stopping="never")
    rows = [
        (printed(step.after.running_scores[0].exp()), printed(step.after.finished_scores[0]), bool(step.after.open))
        for step in steps
    ]
    assert rows[0] == (["0.600", "0.100"], ["-1.204", "-inf"], True)
    assert rows[1] == (["0.390", "0.060"], ["-0.780", "-1.204"], True)
    assert rows[2] == (["0.078", "0.036"], ["-0.410", "-0.780"], True)
    assert rows[3] == (["0.078", "0.022"], ["-0.410", "-0.780"], True)
    assert rows[7] == (["0.000", "0.000"], ["-0.319", "-0.410"], False)


def test_only_the_first_w_candidates_may_finish():
    """An end that is not among the best `W` candidates is dropped, although its score would be the best of all.

    step 1, W = 2:  a .5, b .3, e .2      e is third: it may not finish
    step 2:         aa .25, ae .25, ...   the only sequences that finish end at the longest length
    """
    rows = {"": {"a": 0.5, "b": 0.3, "e": 0.2}, "a": {"a": 0.6, "b": 0.4}, "b": {"a": 0.9, "b": 0.1},
            "e": {"a": 1.0}}  # fmt: skip
    output = search(
        table_model(written_table(rows, "abe"), 3, eos=2),
        num_beams=2, num_return_sequences=2, max_new_tokens=2, length_penalty=-3.0,
    )  # fmt: skip
    assert words(output, "abe") == ["aa", "ba"]  # p .30 and .27; e alone would have -1.609 against -1.204 * 8
    assert printed(output.sequences_scores) == printed([math.log(0.30) * 8, math.log(0.27) * 8])


def test_enough_candidates_run_on_when_every_end_token_leads():
    """Three end letters: ``K = (1 + 3) · W = 8`` candidates, so that two beams run on behind all three ends.

    step 1, W = 2:  e .30, f .25, g .20, a .15, b .10      e and f finish, a and b run on
    """
    rows = {"": {"e": 0.30, "f": 0.25, "g": 0.20, "a": 0.15, "b": 0.10}, "a": {"a": 1.0}, "b": {"b": 1.0},
            "e": {"a": 1.0}, "f": {"a": 1.0}, "g": {"a": 1.0}}  # fmt: skip
    model = table_model(written_table(rows, "abefgxyz"), 8, eos=[2, 3, 4])
    with recorded_steps() as steps:
        output = search(
            model, num_beams=2, num_return_sequences=2, max_new_tokens=3, length_penalty=2.0, early_stopping="never"
        )
    assert steps[0].candidates.scores.shape == (1, 8)
    assert steps[0].chosen.tokens.tolist() == [[0, 1]]
    assert printed(steps[0].after.finished_scores[0].exp()) == ["0.300", "0.250"]
    assert words(output, "abefgxyz") == ["aaa", "bbb"]  # ln .15 / 9 and ln .10 / 9 are above ln .30
    assert printed(output.sequences_scores) == printed([math.log(0.15) / 9, math.log(0.10) / 9])
