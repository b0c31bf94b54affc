"""The trace of a search: by hand, by a slow search that hands out slots itself, from real searches, and as pictures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
from oracle import Finished, Rules, is_closed
from table_model import AttendingTable, GatheringTable, random_table, table_model
from tiny_models import DECODER_ONLY, EOS, prompts, shared_model

from hf_paged_beam import TokenTrie
from hf_paged_beam.generation.lengths import length_form
from hf_paged_beam.trace import BeamTrace, Lifetime
from hf_paged_beam.trace.layout import lay_out

INF = math.inf
LIVE, REUSED = 2, 4

# ------------------------------------------------------------------------------------------------------- by hand
#
#   step 0          step 1         step 2             P = 2, W = 2, K = 4
#   a  slot 2, dies                                   a: no beam continues it
#   b  ends                                           b: returned second
#   c  slot 3 ──┬── x  slot 2 ──┬── e  ends           e: returned first; x has the slot that a left
#               │               └── g  runs           g: alive when the search stopped
#               └── z  slot 4 ───── f  ends           f: finished, not returned

LETTERS = "abcdefgxzwh"


def _ids(letters: str) -> list[int]:
    return [LETTERS.index(letter) for letter in letters]


def trace_by_hand() -> BeamTrace:
    return BeamTrace(
        tokens=torch.tensor([[_ids("abcd"), _ids("xwzh"), _ids("efgh")]]),
        parents=torch.tensor([[[0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]]),
        scores=torch.tensor([[[-1.0, -1.25, -1.5, -2.0], [-2.0, -2.25, -2.5, -3.0], [-2.25, -3.0, -3.5, -INF]]]),
        finished=torch.tensor([[[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]], dtype=torch.bool),
        running=torch.tensor([[[0, 2], [0, 2], [2, -1]]]),
        slots_given=torch.tensor([[[2, 3], [2, 4], [-1, -1]]]),
        prompt_length=2,
        returned=torch.tensor([[8, 1]]),
        sequences_scores=torch.tensor([[-0.75, -1.25]]),
    )


def test_nodes_by_hand():
    tree = trace_by_hand().tree()
    told = [(LETTERS[node.token], node.step, node.rank, node.parent, node.status, node.slot) for node in tree.nodes[1:]]
    assert told == [
        ("a", 0, 0, 0, "dead", 2), ("b", 0, 1, 0, "returned", None), ("c", 0, 2, 0, "inner", 3),
        ("x", 1, 0, 3, "inner", 2), ("z", 1, 2, 3, "inner", 4),
        ("e", 2, 0, 4, "returned", None), ("f", 2, 1, 5, "finished", None), ("g", 2, 2, 4, "running", None),
    ]  # fmt: skip
    assert [node.score for node in tree.nodes] == [0.0, -1.0, -1.25, -1.5, -2.0, -2.5, -2.25, -3.0, -3.5]
    assert [node.log_prob for node in tree.nodes] == [0.0, -1.0, -1.25, -1.5, -0.5, -1.0, -0.25, -0.5, -1.5]
    assert [node.number for node in tree.nodes] == list(range(9))
    root = tree.nodes[0]
    assert (root.parent, root.step, root.token, root.status, root.slot) == (None, -1, None, "inner", None)


def test_edges_and_returned_by_hand():
    tree = trace_by_hand().tree()
    assert tree.edges == [[0, 1], [0, 2], [0, 3], [3, 4], [3, 5], [4, 6], [5, 7], [4, 8]]
    assert tree.returned == [6, 2] and tree.sequences_scores == [-0.75, -1.25]
    assert [LETTERS[node.token] for node in tree.path(6)] == ["c", "x", "e"]
    assert tree.path(0) == []


def test_slots_by_hand():
    slots = trace_by_hand().slots()
    assert slots.states.dtype == torch.int8
    assert slots.states.tolist() == [
        [1, 1, 0, 0, 0],  # the prompt alone
        [1, 1, 2, 2, 0],  # a, c
        [1, 1, 4, 2, 2],  # x where a was, c, z
        [1, 1, 4, 2, 3],  # g runs on c x; z is seen by none
    ]
    a, c, x, z = _ids("acxz")
    assert slots.lifetimes == [
        Lifetime(2, 0, 1, a),
        Lifetime(3, 0, None, c),
        Lifetime(2, 1, None, x),
        Lifetime(4, 1, 2, z),
    ]
    assert [slots.names[state] for state in (0, 1, 2, 3, 4)] == ["free", "prompt", "live", "freed", "reused"]


def test_a_prompt_that_stopped_before_the_others():
    """Its last step is the last in which it had a candidate: what was alive then is "running", not "dead"."""
    trace = trace_by_hand()
    scores, running, finished = trace.scores.clone(), trace.running.clone(), trace.finished.clone()
    scores[0, 2], running[0, 2], finished[0, 2] = -INF, -1, False
    tree = dataclasses.replace(
        trace, scores=scores, running=running, finished=finished, returned=torch.tensor([[1, -1]])
    ).tree()
    assert [node.status for node in tree.nodes] == ["inner", "dead", "returned", "inner", "running", "running"]
    assert tree.returned == [2] and tree.sequences_scores == [-0.75]


def test_a_line_as_long_as_a_book():
    """No recursion over the steps."""
    steps = 5000
    ones = torch.ones(1, steps, 1)
    trace = BeamTrace(
        tokens=ones.long(), parents=0 * ones.long(), scores=-ones.cumsum(1), finished=ones > 1, running=0 * ones.long(),
        slots_given=torch.arange(3, steps + 3).view(1, steps, 1), prompt_length=3, returned=torch.tensor([[-1]]),
        sequences_scores=torch.tensor([[-INF]]),
    )  # fmt: skip
    tree = trace.tree()
    assert len(tree.path(steps)) == steps and tree.nodes[-1].status == "running" and tree.nodes[1].status == "inner"
    assert trace.slots().states[-1].tolist() == [1] * 3 + [LIVE] * steps


# --------------------------------------------------------------------------------- a slow search that hands out slots


@dataclasses.dataclass(frozen=True)
class SlowBeam:
    """A running beam: its score, its generated tokens, and the slot of each."""

    score: float = 0.0
    tokens: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


def slow_search(table, start: tuple[int, ...], rules: Rules) -> tuple[BeamTrace, list[list[int]]]:
    """Beam search in plain lists, with the lowest free slots for each step's tokens: its trace and what it found."""
    beams, finished = [SlowBeam()], []  # finished: sequence and number of its last candidate
    steps: list[dict[str, list]] = []
    while beams:
        step = len(steps)
        found = slow_candidates(table, start, beams, rules.num_candidates)
        texts = [(*beams[parent].tokens, token) for _, parent, token in found]
        over = [rules.is_over(tokens) for tokens in texts]
        done = [over[rank] and rank < rules.num_beams for rank in range(len(found))]
        for rank in itertools.compress(range(len(found)), done):
            sequence = Finished(found[rank][0] / rules.form(step + 1), texts[rank])
            finished.append((sequence, step * rules.num_candidates + rank))
        finished = sorted(finished, key=lambda one: -one[0].score)[: rules.num_beams]
        goes = [rank for rank in range(len(found)) if not over[rank]][: rules.num_beams]
        stop = not goes or is_closed(found[goes[0]][0], [one for one, _ in finished], step + 1, rules)
        above = [beams[found[rank][1]].slots for rank in goes]
        slots = [-1] * len(goes) if stop else lowest_free(above, first=len(start))
        scores, parents, tokens = zip(*found, strict=True)
        steps.append(
            dict(tokens=tokens, parents=parents, scores=scores, finished=done, running=goes, slots_given=slots)
        )
        told = zip(goes, above, slots, strict=True)
        beams = [] if stop else [SlowBeam(scores[rank], texts[rank], (*line, slot)) for rank, line, slot in told]
    return slow_trace(steps, finished, rules, len(start)), [list(one.tokens) for one, _ in finished]


def slow_candidates(table, start, beams: list[SlowBeam], count: int) -> list[tuple[float, int, int]]:
    """Score, parent and token of the best continuations, best first."""
    continued = [
        (beam.score + log_prob, parent, token)
        for parent, beam in enumerate(beams)
        for token, log_prob in enumerate(table((*start, *beam.tokens)))
    ]
    return sorted(continued, key=lambda candidate: -candidate[0])[:count]


def lowest_free(lines: list[tuple[int, ...]], first: int) -> list[int]:
    """A slot for each line, the lowest from `first` on that no line names."""
    taken = set().union(*lines)
    return list(itertools.islice((slot for slot in itertools.count(first) if slot not in taken), len(lines)))


def slow_trace(steps: list[dict[str, list]], finished: list, rules: Rules, prompt_length: int) -> BeamTrace:
    """The trace of what each step chose."""
    nothing = dict(tokens=0, parents=0, scores=-INF, finished=False, running=-1, slots_given=-1)
    widths = {name: rules.num_beams if name in ("running", "slots_given") else rules.num_candidates for name in nothing}
    arrays = {
        name: torch.tensor([[[*step[name], *[fill] * (widths[name] - len(step[name]))] for step in steps]])
        for name, fill in nothing.items()
    }
    missing = rules.num_beams - len(finished)
    return BeamTrace(
        **arrays,
        prompt_length=prompt_length,
        returned=torch.tensor([[number for _, number in finished] + [-1] * missing]),
        sequences_scores=torch.tensor([[one.score for one, _ in finished] + [-INF] * missing]),
    )


RULES = [
    Rules(num_beams=3, max_new_tokens=6, ends=(0,)),
    Rules(num_beams=3, max_new_tokens=6, ends=(0,), early_stopping=True),
    Rules(num_beams=4, max_new_tokens=7, ends=(0, 1), early_stopping="never", length_penalty=0.5),
    Rules(num_beams=2, max_new_tokens=5, length_penalty=0.0),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rules", RULES)
def test_slow_search(rules, seed):
    trace, sequences = slow_search(random_table(seed, 9, ends=rules.ends), (2, 3), rules)
    check_trace(trace, 0, sequences, torch.tensor([1.0] + [rules.form(length) for length in range(1, 9)]))


@pytest.mark.parametrize("kind", [AttendingTable, GatheringTable])
@pytest.mark.parametrize("rules", RULES)
def test_real_search_equals_the_slow_one(rules, kind):
    """Every field, candidate by candidate and slot by slot."""
    table = random_table(5, 9, ends=rules.ends)
    slow, sequences = slow_search(table, (2, 3), rules)
    output = traced(
        table_model(table, 9, eos=list(rules.ends) or None, kind=kind), {"input_ids": torch.tensor([[2, 3]])},
        num_beams=rules.num_beams, max_new_tokens=rules.max_new_tokens, early_stopping=rules.early_stopping,
        length_penalty=rules.length_penalty, num_return_sequences=rules.num_beams,
    )  # fmt: skip
    real, there = output.beam_trace, slow.scores > -INF
    torch.testing.assert_close(real.scores, slow.scores, rtol=0, atol=1e-4)
    torch.testing.assert_close(real.sequences_scores, slow.sequences_scores, rtol=0, atol=1e-4)
    for name in ("tokens", "parents", "finished"):
        assert torch.equal(getattr(real, name)[there], getattr(slow, name)[there]), name
    for name in ("running", "slots_given", "returned"):
        assert torch.equal(getattr(real, name), getattr(slow, name)), name
    assert real.prompt_length == 2
    check_output(output, rules.num_beams, rules.length_penalty)
    assert [node.token for node in real.tree().path(real.tree().returned[0])] == sequences[0]


# ------------------------------------------------------------------------------------------------- real searches


def traced(model, inputs, **settings):
    call = dict(do_sample=False, return_dict_in_generate=True, output_scores=True, return_beam_trace=True)
    return model.generate(**inputs, **{**call, **settings}, custom_generate="hf_paged_beam")


def check_trace(trace: BeamTrace, prompt: int, sequences: list[list[int]], forms: torch.Tensor) -> None:
    """Assert what holds of any search: returned lines are `sequences`, scores add up, and slots are those of beams.

    Args:
        trace: of the search.
        prompt: row of the batch.
        sequences: tokens of the returned sequences, best first.
        forms: ``[T + 1]``, length form of each length.
    """
    tree = trace.tree(prompt)
    assert [[node.token for node in tree.path(number)] for number in tree.returned] == sequences
    for parent, child in tree.edges:
        assert tree.nodes[child].parent == parent and tree.nodes[child].step == tree.nodes[parent].step + 1
    normalised = {
        node.number: node.score / float(forms[node.step + 1]) for node in tree.nodes if node.token is not None
    }
    assert [normalised[number] for number in tree.returned] == pytest.approx(tree.sequences_scores, abs=1e-5)
    others = [normalised[node.number] for node in tree.nodes if node.status == "finished"]
    assert max(others, default=-INF) <= min(tree.sequences_scores, default=-INF) + 1e-5
    check_statuses(tree)
    check_slots(trace, prompt)


def check_statuses(tree) -> None:
    """Assert that dead lines lead to nothing and inner nodes to something; ends have no children."""
    children = {node.number: [] for node in tree.nodes}
    for parent, child in tree.edges:
        children[parent].append(tree.nodes[child].status)
    for node in tree.nodes:
        below = set(children[node.number])
        if node.status == "dead":
            assert below <= {"dead"}
        elif node.status == "inner":
            assert below - {"dead"}
        else:
            assert not below


def check_slots(trace: BeamTrace, prompt: int) -> None:
    """Assert that the map shows the slots on running beams' lines as live, and no slot ever holds two tokens."""
    slots, numbers = trace.slots(prompt), {(node.step, node.rank): node.number for node in trace.tree(prompt).nodes}
    held, lines = set(), {0: ()}  # lines: (slot, node) of each token of each running beam
    for step, ranks in enumerate(trace.running[prompt].tolist()):
        given = trace.slots_given[prompt, step].tolist()
        lines = {
            beam: (*lines[int(trace.parents[prompt, step, rank])], (given[beam], numbers[step, rank]))
            for beam, rank in enumerate(ranks) if rank >= 0
        }  # fmt: skip
        tokens = {pair for line in lines.values() for pair in line if pair[0] >= 0}
        row = slots.states[step + 1]
        live = ((row == LIVE) | (row == REUSED)).nonzero().flatten().tolist()
        assert live == sorted(slot for slot, _ in tokens), "one token in each live slot, and no other slot is live"
        assert row[: trace.prompt_length].eq(1).all()
        held |= {slot for slot, _ in tokens}
        touched = (row > 1).nonzero().flatten().tolist()
        assert touched == sorted(held)
    for slot, lives in itertools.groupby(sorted(slots.lifetimes), key=lambda life: life.slot):
        for before, after in itertools.pairwise(lives):
            assert before.freed is not None and before.freed <= after.given, slot


def check_output(output, returned: int, length_penalty: float = 1.0) -> None:
    """Assert that a search's trace tells what the search returned.

    Args:
        output: of the search.
        returned: sequences per prompt.
        length_penalty: the exponent.
    """
    trace = output.beam_trace
    batch_size, steps, _ = trace.tokens.shape
    forms = length_form(torch.arange(steps + 1).clamp(min=1), length_penalty, "length")
    assert torch.equal(trace.sequences_scores.flatten(), output.sequences_scores)
    for prompt in range(batch_size):
        rows, tree = range(prompt * returned, (prompt + 1) * returned), trace.tree(prompt)
        real = [row for row in rows if output.sequences_scores[row] > -INF]
        lengths = [int((output.beam_indices[row] >= 0).sum()) for row in real]
        generated = output.sequences[:, -output.beam_indices.shape[1] :]
        check_trace(trace, prompt, [generated[row, :n].tolist() for row, n in zip(real, lengths, strict=True)], forms)
        for row, number in zip(real, tree.returned, strict=True):
            told = [node.log_prob for node in tree.path(number)]
            assert told == pytest.approx(output.token_logprobs[row, : len(told)].tolist(), abs=1e-4)


SETTINGS = {
    "plain": {},
    "early": {"early_stopping": True},
    "never": {"early_stopping": "never", "length_penalty": 0.4},
    "several ends": {"eos_token_id": [EOS, *range(20, 40)]},
    "no end": {"eos_token_id": None},
    "sampling": {"do_sample": True, "top_k": 20},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_real_searches(kind, settings):
    torch.manual_seed(3)
    output = traced(
        shared_model(kind), prompts(kind, 3), num_beams=5, num_return_sequences=5, max_new_tokens=9, **settings
    )
    check_output(output, 5, settings.get("length_penalty", 1.0))


@pytest.mark.parametrize("kind", DECODER_ONLY)
def test_slots_lie_behind_the_prompt_of_the_pool(kind):
    """The first beams have the first slots behind the prompt, and the last step's tokens, which nothing reads, none."""
    output = traced(shared_model(kind), prompts(kind, 2), num_beams=4, num_return_sequences=4, max_new_tokens=6)
    check_output(output, 4)
    trace = output.beam_trace
    assert trace.prompt_length == output.sequences.shape[1] - output.beam_indices.shape[1]
    assert (trace.slots_given[:, 0] == trace.prompt_length + torch.arange(4)).all()
    assert (trace.slots_given[:, -1] == -1).all()


def test_fewer_items_than_beams():
    """A search on a trie, in which most beams are none."""
    trie = TokenTrie.from_sequences([[11, 12, 13], [11, 14], [15, 12, 13, 16]], eos_token_id=EOS)
    output = traced(shared_model("llama"), prompts("llama", 2), num_beams=6, num_return_sequences=6, trie=trie)
    check_output(output, 6)
    for prompt in range(2):
        tree = output.beam_trace.tree(prompt)
        assert len(tree.returned) == 3
        assert len(tree.nodes) == 1 + len("AE BDB CeC eF e".replace(" ", "")), "the trie itself, with its end tokens"


def test_a_prompt_tells_the_same_alone_and_beside_a_longer_one():
    """What ran when its search stopped is "running" also where the batch goes on."""
    model = shared_model("llama")
    both = prompts("llama", 2, padded=False)
    call = dict(num_beams=3, num_return_sequences=1, do_sample=False, early_stopping=True)
    limits = dict(eos_token_id=[EOS, *range(20, 60)])
    alone = traced(model, {name: rows[:1] for name, rows in both.items()}, **call, **limits, max_new_tokens=20)
    steps = alone.beam_trace.tokens.shape[1]
    beside = traced(model, both, **call, **limits, max_new_tokens=20, min_new_tokens=[0, steps + 3])
    assert beside.beam_trace.tokens.shape[1] > steps
    told = [[(node.token, node.status) for node in output.beam_trace.tree(0).nodes] for output in (alone, beside)]
    assert told[0] == told[1] and "running" in dict(told[0]).values()


def test_without_the_keyword_there_is_no_trace():
    output = traced(shared_model("llama"), prompts("llama", 1), num_beams=2, max_new_tokens=3, return_beam_trace=False)
    assert getattr(output, "beam_trace", None) is None


# ----------------------------------------------------------------------------------------------------- arguments


def test_short_repr():
    assert repr(trace_by_hand()) == "BeamTrace(prompts=1, steps=3, beams=2, candidates=4, returned=2)"


@pytest.mark.parametrize("prompt", [1, -1, False, "0", 0.0, None])
@pytest.mark.parametrize("view", ["tree", "slots", "plot", "to_html"])
def test_no_such_prompt(view, prompt, tmp_path):
    where = {"path": tmp_path / "tree.html"} if view == "to_html" else {}
    with pytest.raises(ValueError, match=rf"prompt={prompt!r}; expected a row of the batch, a whole number in 0..0"):
        getattr(trace_by_hand(), view)(**where, prompt=prompt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("view", ["plot", "to_html"])
def test_a_tokenizer_that_cannot_decode(view, tmp_path):
    where = {"path": tmp_path / "tree.html"} if view == "to_html" else {}
    with pytest.raises(ValueError, match="tokenizer='gpt2' has no method decode; expected a tokenizer"):
        getattr(trace_by_hand(), view)(**where, tokenizer="gpt2")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("tokens", torch.zeros(3, 4), r"tokens has shape \(3, 4\); expected three dimensions"),
        ("parents", torch.zeros(1, 3, 5), r"parents has shape \(1, 3, 5\); expected \(1, 3, 4\): that of tokens"),
        ("running", torch.zeros(1, 2, 2), r"slots_given has shape \(1, 3, 2\); expected \(1, 2, 2\): that of running"),
        ("returned", torch.zeros(2), r"sequences_scores has shape \(1, 2\); expected \(2,\): that of returned"),
        ("slots_given", torch.zeros(1, 3, 2), "slots_given names slots below prompt_length=2, which hold the prompt"),
    ],
)
def test_arrays_that_do_not_fit(name, array, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(trace_by_hand(), **{name: array})


def test_a_candidate_of_a_beam_that_does_not_run():
    trace = dataclasses.replace(trace_by_hand(), running=torch.tensor([[[0, -1], [0, 2], [2, -1]]]))
    with pytest.raises(ValueError, match="parents: candidate 0 of step 1 continues beam 1, which does not run"):
        trace.tree()


# ------------------------------------------------------------------------------------------------------ pictures


class Words:
    """A tokenizer: `words`, over and over."""

    def __init__(self, *words: str):
        self.words = words

    def decode(self, ids: list[int]) -> str:
        (token,) = ids
        return self.words[token % len(self.words)]


PLAIN = Words("ka", " the", "\n", "tion", " re", "$x_1$ y$", " hyperparameter", "e", "WWWWWWWWWWWWWW", "", "{{living}}")
SCRIPT = "<script>owned = 1</script>"
HOSTILE = Words(
    SCRIPT, '"><img src=x onerror="owned = 1">', "]]>-->", "&lt;b&gt;", "'\u2028\u202e\udce9\0", "</svg></g>"
)


def wide_search(beams: int, returned: int) -> BeamTrace:
    """A search of twelve steps."""
    rules = Rules(num_beams=beams, max_new_tokens=12, ends=(0,), early_stopping="exhaust")
    trace, _ = slow_search(random_table(1, 80, ends=(0,)), (2, 3), rules)
    return dataclasses.replace(
        trace, returned=trace.returned[:, :returned], sequences_scores=trace.sequences_scores[:, :returned]
    )


def test_layout_by_hand():
    """The best line is straight and on top; a row for each end; nothing is kept free for what is left out."""
    tree = trace_by_hand().tree()
    layout = lay_out(tree)
    assert dict(zip(" abcxzefg", layout.rows, strict=True)) == {
        " ": 0, "c": 0, "x": 0, "e": 0, "g": 1, "z": 2, "f": 2, "b": 3, "a": 4
    }  # fmt: skip
    assert (layout.num_rows, layout.num_steps) == (5, 3)
    best = ["returned", "dead", "returned", "returned", "returned", "finished", "returned", "finished", "running"]
    assert layout.lives == best
    assert layout.places == [None, None, 1, None, None, None, 0, None, None]
    assert layout.shown == [1, 5, 7, 8, 0, 2, 3, 4, 6]
    returned = lay_out(tree, ("returned",))
    assert (returned.num_rows, returned.shown, returned.rows[2]) == (2, [0, 2, 3, 4, 6], 1)


@pytest.fixture
def pyplot(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib (the extra viz) is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def drawn_texts(ax):
    """Texts in the picture, with the boxes that they take."""
    ax.figure.canvas.draw()
    texts = [text for text in ax.texts if text.get_text()]
    return texts, [text.get_window_extent() for text in texts]


@pytest.mark.parametrize("tokenizer", [None, PLAIN], ids=["ids", "words"])
@pytest.mark.parametrize("trace", [wide_search(5, 3), trace_by_hand()], ids=["five beams, twelve steps", "by hand"])
def test_plot_can_be_read(pyplot, trace, tokenizer):
    """No label lies on another or outside the picture; nor do the legend and the names of axes."""
    ax = trace.plot(tokenizer=tokenizer)
    texts, boxes = drawn_texts(ax)
    assert len(texts) == len(trace.tree().nodes) - 1 + len(trace.tree().returned)
    ticks = ax.get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["prompt", *map(str, range(trace.tokens.shape[1]))]
    names = [*ticks, ax.xaxis.label, ax.yaxis.label]
    assert ax.get_xlabel() == "step" and ax.get_ylabel() == "beams, best first"
    places = [*boxes, *(name.get_window_extent() for name in names), ax.get_legend().get_window_extent()]
    page = ax.figure.bbox
    for box in places:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    for one, other in itertools.combinations(places, 2):
        assert not one.overlaps(other), f"{one} lies on {other}; texts: {[text.get_text() for text in texts]}"


def test_plot_tells_lines_apart_without_colour(pyplot):
    """Each kind of line has a dash pattern or width of its own, and each end its marker; the legend shows them all."""
    ax = trace_by_hand().plot()
    handles = {
        text.get_text(): line
        for text, line in zip(ax.get_legend().get_texts(), ax.get_legend().get_lines(), strict=True)
    }
    assert set(handles) == {
        "returned (place, score)",
        "running at the end",
        "finished, not returned",
        "dead",
        "went on",
    }
    looks = [(line.get_linestyle(), line.get_linewidth()) for line in handles.values()]
    assert len(set(looks)) == 5 and len({line.get_marker() for line in handles.values()}) == 5
    styles = {lines.get_label(): len(lines.get_segments()) for lines in ax.collections}
    assert styles == {"returned": 4, "running": 1, "finished": 2, "dead": 1}  # c x e, b; g; z f; a
    markers = {line.get_gid(): len(line.get_xdata()) for line in ax.lines}
    assert markers == {"returned": 2, "running": 1, "finished": 1, "dead": 1, "inner": 4}


def test_plot_writes_tokens_as_they_are(pyplot):
    """No formula is made of dollars, blanks and line ends show, and long tokens are cut."""
    written = Words("$\\oops$", " a b", "\n", "hyperparameters", "", "\u202e", "$x", "\\frac", "}{", "_", "^")
    ax = trace_by_hand().plot(tokenizer=written)
    texts, _ = drawn_texts(ax)
    tokens = [text.get_text() for text in texts if text.get_gid() == "token"]
    assert tokens == ["$\\oops$", "␣a␣b", "\\n", "\\frac", "}{", "[4]", "\\u202e", "$x"]
    assert [text.get_text() for text in texts if text.get_gid() == "score"] == ["1. -0.750", "2. -1.250"]
    ax = trace_by_hand().plot(tokenizer=Words("hyperparameters"))
    assert {text.get_text() for text in ax.texts if text.get_gid() == "token"} == {"hyperpara…"}


def test_plot_on_given_axes(pyplot):
    _, (left, right) = pyplot.subplots(1, 2)
    assert trace_by_hand().plot(ax=right) is right
    assert not left.has_data() and right.has_data() and len(pyplot.get_fignums()) == 1


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    """Nothing but `plot` needs it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    trace = trace_by_hand()
    assert trace.tree().nodes and trace.slots().lifetimes and trace.to_html(tmp_path / "tree.html").exists()
    with pytest.raises(ImportError, match=r"pip install hf-paged-beam\[viz\]"):
        trace.plot()


# ---------------------------------------------------------------------------------------------------------- page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of these browsers is installed: {', '.join(BROWSERS)}")
    return found


def answer(browser: str, page: Path, script: str):
    """What a function body in JavaScript returns when it runs in the page, in a headless browser."""
    ask = f"<script>document.title = JSON.stringify((() => {{ {script} }})());</script></body>"
    asking = page.with_suffix(".asked.html")
    asking.write_text(page.read_text(encoding="utf-8").replace("</body>", ask), encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900",
        f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", asking.as_uri(),
    ]  # fmt: skip
    seen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search("<title>(.*?)</title>", seen, re.DOTALL)
    assert title is not None and title[1][:1] in '[{"', f"the script did not come to its end: {title and title[1]}"
    return json.loads(unescape(title[1]))


def test_the_page_is_one_file(tmp_path):
    page = trace_by_hand().to_html(str(tmp_path / "tree.html"), tokenizer=PLAIN)
    assert page == tmp_path / "tree.html"
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", text)
    assert "default-src 'none'" in text and "{{" not in text
    assert text.count("<script>") == text.count("</script>") == 1


def test_a_token_that_reads_like_a_place_of_the_template(tmp_path):
    text = trace_by_hand().to_html(tmp_path / "tree.html", tokenizer=Words("{{living}}")).read_text(encoding="utf-8")
    assert text.count(">{{living}}<") == 8 + 7, "all nodes, and again those that are not dead"


def test_the_page_escapes_tokens(tmp_path):
    text = trace_by_hand().to_html(tmp_path / "tree.html", tokenizer=HOSTILE).read_text(encoding="utf-8")
    assert text.count("<script>") == 1 and "<img" not in text and "&lt;script&gt;" in text
    assert text.count("</svg>") == text.count("<svg")


def test_hostile_tokens_do_nothing_in_a_browser(browser, tmp_path):
    page = trace_by_hand().to_html(tmp_path / "tree.html", tokenizer=HOSTILE)
    found = answer(
        browser, page,
        """const first = node => (tell(node, 9, 9), tip.textContent.split("\\n")[0]);
        const told = [...tree.querySelectorAll(".node")].map(first);
        return {owned: typeof owned, scripts: document.scripts.length, images: document.images.length,
                inTip: tip.children.length, told};""",
    )  # fmt: skip
    assert (found["owned"], found["images"], found["inTip"], found["scripts"]) == ("undefined", 0, 0, 2)
    assert f"{SCRIPT.replace(' ', '␣')}  (id 0)" in found["told"]


def test_hover_tells_a_token_and_marks_its_line(browser, tmp_path):
    page = trace_by_hand().to_html(tmp_path / "tree.html", tokenizer=Words(*LETTERS))
    found = answer(
        browser, page,
        """const at = nodes.get("6").querySelector(".place"), box = at.getBoundingClientRect();
        const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        top.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, clientX: box.x, clientY: box.y}));
        const on = [...document.querySelectorAll(".node.on")].map(node => Number(node.dataset.number)).sort();
        const told = [tip.textContent, tip.style.display];
        drawing.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
        return {on, told, after: [tip.style.display, document.querySelectorAll(".node.on").length],
                hit: top.closest(".node").dataset.number};""",
    )  # fmt: skip
    assert found["hit"] == "6" and found["on"] == [0, 3, 4, 6]  # c x e
    assert found["told"] == [
        "e  (id 4)\nstep 2, rank 0\nsum -2.2500\nlog-probability -0.2500\nstatus: returned\nslot: none\n"
        "returned as number 1, score -0.7500",
        "block",
    ]
    assert found["after"] == ["none", 0]


def test_zoom_and_pan(browser, tmp_path):
    """The wheel keeps what is under the pointer in its place; a drag moves all; names of steps follow their columns."""
    page = wide_search(5, 3).to_html(tmp_path / "tree.html")
    found = answer(
        browser, page,
        """const mark = () => nodes.get("9").querySelector(".mark").getBoundingClientRect();
        const middle = box => [box.x + box.width / 2, box.y + box.height / 2];
        const name = () => middle(document.querySelector('#steps text[data-column="2"]').getBoundingClientRect())[0];
        const before = mark(), offset = name() - middle(before)[0], [x, y] = middle(before).map(Math.floor);
        drawing.dispatchEvent(new WheelEvent("wheel", {deltaY: -400, clientX: x, clientY: y, cancelable: true}));
        const zoomed = mark(), scaled = scale, stays = [0, 1].map(n => (middle(before)[n] - [x, y][n]) * scale);
        drawing.dispatchEvent(new PointerEvent("pointerdown", {clientX: 300, clientY: 300}));
        dispatchEvent(new PointerEvent("pointermove", {clientX: 340, clientY: 280}));
        dispatchEvent(new PointerEvent("pointerup"));
        dispatchEvent(new PointerEvent("pointermove", {clientX: 900, clientY: 900}));
        const moved = mark(), named = name() - middle(moved)[0];
        byId("fit").click();
        const box = tree.getBoundingClientRect(), all = drawing.getBoundingClientRect();
        return {about: nodes.get("9").dataset.about, offset, named, scaled, ratio: zoomed.width / before.width,
                still: [middle(zoomed)[0] - x - stays[0], middle(zoomed)[1] - y - stays[1]],
                shift: [middle(moved)[0] - middle(zoomed)[0], middle(moved)[1] - middle(zoomed)[1]],
                fits: box.right <= all.right && box.bottom <= all.bottom
                      && box.left >= all.left && box.top >= all.top};""",
    )  # fmt: skip
    assert "step 1," in found["about"] and found["offset"] == pytest.approx(0, abs=1)
    assert found["named"] == pytest.approx(0, abs=1)
    assert found["ratio"] == pytest.approx(math.exp(0.8), rel=0.1) and found["scaled"] == pytest.approx(math.exp(0.8))
    assert found["still"] == pytest.approx([0, 0], abs=0.5) and found["shift"] == pytest.approx([40, -20], abs=0.5)
    assert found["fits"]


def test_the_page_can_be_read_at_fifty_beams(browser, tmp_path):
    """No label lies on another, nor do they without the dead branches, which then leave no gaps."""
    trace = wide_search(50, 5)
    tree = trace.tree()
    alive = sum(node.status != "dead" for node in tree.nodes)
    assert len(tree.nodes) > 400 and alive < len(tree.nodes) / 2
    page = trace.to_html(tmp_path / "tree.html", tokenizer=PLAIN)
    found = answer(
        browser, page,
        """const look = () => {
          const boxes = [...tree.querySelectorAll("text")].map(text => text.getBoundingClientRect());
          let overlaps = 0;
          boxes.forEach((a, n) => boxes.slice(n + 1).forEach(b => {
            if (a.x < b.right - 1 && b.x < a.right - 1 && a.y < b.bottom - 1 && b.y < a.bottom - 1) overlaps++;
          }));
          const best = [...tree.querySelectorAll(".mark.returned")].map(mark => mark.getBoundingClientRect().y);
          return {labels: boxes.length, overlaps, height: boxes[0].height, nodes: nodes.size, best: Math.min(...best)};
        };
        const whole = look();
        byId("dead").click();
        return [whole, look()];""",
    )  # fmt: skip
    whole, living = found
    assert whole["labels"] == len(tree.nodes) + 5 and living["labels"] == alive + 5
    assert whole["nodes"] == len(tree.nodes) and living["nodes"] == alive
    assert whole["overlaps"] == living["overlaps"] == 0
    assert whole["height"] >= 12 and whole["best"] < 200, "letters of a readable size, the best sequence in sight"
