"""Properties that hold for whatever is given: the index table, selection, one step of the search, whole searches."""

from __future__ import annotations

import functools
import math
import types
from collections import Counter
from typing import Any

import pytest
import torch
from comparing import check_same_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import draws_without_replacement
from tiny_models import DECODER_ONLY, EOS, VOCABULARY, prompts, tiny_model

from hf_paged_beam.cache.index import BeamIndex
from hf_paged_beam.generation import candidates as candidates_module
from hf_paged_beam.generation.advance import advance
from hf_paged_beam.generation.candidates import best_candidates, sampled_candidates
from hf_paged_beam.generation.lengths import length_form
from hf_paged_beam.generation.rules import Rules
from hf_paged_beam.generation.settings import Options, PromptSettings
from hf_paged_beam.generation.state import Candidates, SearchState
from hf_paged_beam.versions import SAMPLES_ARE_SORTED

CPU = torch.device("cpu")


def examples(count: int):
    """The same examples at every run, as many as stated, however long one takes."""
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


# The index table ------------------------------------------------------------------------------------------------------


@st.composite
def forks(draw):
    """``(B, W, P, steps)``: for each step, for each prompt, the parent of each beam, counted within the prompt."""
    batch, width, prompt = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    parent = st.integers(0, width - 1)
    one_step = st.lists(st.lists(parent, min_size=width, max_size=width), min_size=batch, max_size=batch)
    return batch, width, prompt, draw(st.lists(one_step, min_size=1, max_size=8))


class TokenLists:
    """What the index stands for: every beam as the list of the names of its tokens, and a pool that holds the names.

    A name is ``(prompt, step, beam)`` for a generated token, ``(prompt, position)`` for one of the prompt.
    """

    def __init__(self, batch: int, width: int, prompt: int):
        self.width = width
        self.beams = [[[(b, position) for position in range(prompt)] for _ in range(width)] for b in range(batch)]
        self.pools = [{position: (b, position) for position in range(prompt)} for b in range(batch)]

    def fork(self, parents: list[list[int]], step: int) -> None:
        for b, chosen in enumerate(parents):
            self.beams[b] = [[*self.beams[b][parent], (b, step, w)] for w, parent in enumerate(chosen)]

    def write(self, slots: list[list[int]]) -> None:
        for b, row in enumerate(slots):
            self.pools[b].update({slot: self.beams[b][w][-1] for w, slot in enumerate(row)})

    def free_before(self, b: int, prompt: int, taken: list[int]) -> list[int]:
        """The lowest slots, counted from the prompt's end, that held no token of a surviving beam before `taken`."""
        survivors = {name for beam in self.beams[b] for name in beam[:-1]}
        live = {slot - prompt for slot, name in self.pools[b].items() if slot >= prompt and name in survivors}
        return [slot for slot in range(len(live) + len(taken)) if slot not in live][: len(taken)]


def fork_index(index: BeamIndex, parents: list[list[int]]) -> None:
    """One step of the index as the search does it: fork, then tell the high-water mark."""
    rows = torch.tensor([parent + b * index.num_beams for b, chosen in enumerate(parents) for parent in chosen])
    index.set_high_water(int(index.fork(rows)))


def check_against_lists(index: BeamIndex, lists: TokenLists) -> None:
    """Assert that every question to the index has the answer that the lists give."""
    length = index.prompt_length + index.paths.shape[1]
    rows, visible = index.beams.grid(index.rows(length)).tolist(), index.visible().tolist()
    positions, live = index.positions().tolist(), index.live().tolist()
    for b, beams in enumerate(lists.beams):
        pool = lists.pools[b]
        for w, names in enumerate(beams):
            assert [pool[slot] for slot in rows[b][w]] == names  # the history is read back, in order
            assert len(set(rows[b][w])) == length  # of distinct slots
            assert {slot for slot, seen in enumerate(visible[b][w]) if seen} == set(rows[b][w])
            assert [positions[b][slot] for slot in rows[b][w]] == list(range(length))
            assert index.beams.grid(index.rows(length - 1))[b, w].tolist() == rows[b][w][:-1]
        tree = {slot - index.prompt_length for w in range(lists.width) for slot in rows[b][w][index.prompt_length :]}
        assert {slot for slot, alive in enumerate(live[b]) if alive} == tree
        held = {name for names in beams for name in names[index.prompt_length :]}
        assert len(tree) == len(held)  # one slot for each token of the tree: shared tokens are stored once


@examples(150)
@given(forks())
def test_index_is_a_tree_of_token_lists(case):
    """After any forks the index answers as whole token lists do, and gives the lowest free slots."""
    batch, width, prompt, steps = case
    index, lists = BeamIndex(width), TokenLists(batch, width, prompt)
    index.begin_decode(batch, prompt, CPU)
    for number, parents in enumerate(steps):
        fork_index(index, parents)
        lists.fork(parents, number)
        slots = index.beams.grid(index.write_slots()).tolist()
        for b, row in enumerate(slots):
            assert [slot - prompt for slot in row] == lists.free_before(b, prompt, row)
        lists.write(slots)
        check_against_lists(index, lists)
        assert index.tree_slots <= width * (number + 1)
        index.check()


@examples(50)
@given(forks())
def test_index_without_its_last_fork(case):
    """`drop_pending` takes back the slots that the last fork gave, and nothing else."""
    batch, width, prompt, steps = case
    index, lists = BeamIndex(width), TokenLists(batch, width, prompt)
    index.begin_decode(batch, prompt, CPU)
    for number, parents in enumerate(steps):
        fork_index(index, parents)
        lists.fork(parents, number)
        lists.write(index.beams.grid(index.write_slots()).tolist())
    fork_index(index, steps[0])
    index.drop_pending()
    lists.fork(steps[0], len(steps))
    for b, beams in enumerate(lists.beams):
        for w, names in enumerate(beams):
            read = [lists.pools[b][slot] for slot in index.beams.grid(index.rows(prompt + len(steps)))[b, w].tolist()]
            assert read == names[:-1]
    index.check()


@examples(60)
@given(forks(), st.data())
def test_damage_to_the_index_is_noticed(case, data):
    """`check` fails when a slot is out of range, stands twice on a path, or has two different ways from the root."""
    batch, width, prompt, steps = case
    index = BeamIndex(width)
    index.begin_decode(batch, prompt, CPU)
    for parents in [*steps, steps[0]]:
        fork_index(index, parents)
    row = data.draw(st.integers(0, batch * width - 1))
    depth = data.draw(st.integers(1, len(steps)))
    whole = index.paths.clone()

    def damaged(slot: int) -> BeamIndex:
        index.paths = whole.clone()
        index.paths[row, depth] = slot
        return index

    for slot in (-1, index.tree_slots):
        with pytest.raises(AssertionError, match="outside"):
            damaged(slot).check()
    with pytest.raises(AssertionError, match="twice"):
        damaged(whole[row, depth - 1].item()).check()
    index.paths = whole
    index.check()


def test_two_ways_to_one_slot_are_noticed():
    """Beams that share a slot must share all that stands before it.

    beam 0: 0 2      beam 1: 1 3      damaged: beam 1 ends in slot 2 too, but came by slot 1
    """
    index = BeamIndex(2)
    index.begin_decode(1, 3, CPU)
    fork_index(index, [[0, 0]])
    fork_index(index, [[0, 1]])
    assert index.paths.tolist() == [[0, 2], [1, 3]]
    index.check()
    index.paths[1, 1] = 2
    with pytest.raises(AssertionError, match="differ above"):
        index.check()


# Selection ------------------------------------------------------------------------------------------------------------


@st.composite
def score_rows(draw):
    """``(logits [B·R, V], running scores [B, R], K)`` of distinct values; K up to more than there are."""
    batch, rows, vocabulary = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(batch * rows, vocabulary, generator=generator) * draw(st.sampled_from([0.5, 3.0, 20.0]))
    running = -3 * torch.rand(batch, rows, generator=generator)
    if draw(st.booleans()):
        running[:, 1:] = -torch.inf  # beams that do not exist
    return logits, running, draw(st.integers(1, rows * vocabulary + 4))


def wanting(count: int) -> Any:
    """Rules of equal prompts, as far as candidates ask for them."""
    return types.SimpleNamespace(num_candidates=count, spare_candidates=None)


def check_flat_topk(found: Candidates, log_probs: torch.Tensor, running: torch.Tensor, count: int) -> None:
    """Assert that candidates are those of one `topk` over all ``R · V`` continuations, filled up with -inf."""
    batch, rows = running.shape
    vocabulary = log_probs.shape[-1]
    everything = (log_probs.view(batch, rows, vocabulary) + running.unsqueeze(-1)).flatten(1)  # [B, R·V]
    exist = min(count, rows * vocabulary)
    best, places = everything.topk(exist, dim=-1)
    assert found.scores.shape == found.tokens.shape == found.parents.shape == (batch, count)
    assert torch.allclose(found.scores[:, :exist], best, atol=1e-5, rtol=1e-5)
    assert (found.scores[:, exist:] == -torch.inf).all()
    real = found.scores[:, :exist] > -torch.inf
    same = found.parents[:, :exist] * vocabulary + found.tokens[:, :exist] == places
    assert same[real].all()
    assert ((found.tokens >= 0) & (found.tokens < vocabulary) & (found.parents >= 0) & (found.parents < rows)).all()
    own = found.token_scores + running.gather(1, found.parents)
    finite = found.scores > -torch.inf
    assert torch.allclose(own[finite], found.scores[finite], atol=1e-5)


@pytest.mark.parametrize("small", [0, 2**16], ids=["row by row", "at once"])
def test_best_candidates_are_a_flat_topk(small, monkeypatch):
    """Narrowing to each row's best first loses nothing; scores need not be normalised."""
    monkeypatch.setattr(candidates_module, "_SMALL", small)

    @examples(150)
    @given(score_rows())
    def check(case):
        scores, running, count = case
        check_flat_topk(best_candidates(scores, running, wanting(count)), scores, running, count)

    check()


@pytest.mark.parametrize(
    ("log_probs", "running", "count"),
    [
        # two beams of three tokens; the second beam is the less probable one
        ([[-0.2, -1.7, -3.0], [-1.1, -1.0, -1.2]], [0.0, -0.7], 2),
        ([[-0.2, -1.7, -3.0], [-1.1, -1.0, -1.2]], [-5.0, -3.5], 4),
        # a forbidden token, and a beam that does not exist
        ([[-0.5, -math.inf, -0.9], [-1.1, -1.0, -1.2]], [-1.0, -math.inf], 2),
        # one row (the first step), every token but one drawn
        ([[-0.3, -1.5, -2.5, -4.0]], [0.0], 3),
    ],
)
def test_sampled_candidates_are_draws_without_replacement(log_probs, running, count):
    """Each set of candidates comes up as often as in sequential draws: 40,000 times, within five standard errors."""
    times = 40_000
    scores = torch.tensor(log_probs) + torch.tensor(running).unsqueeze(-1)
    exact = draws_without_replacement(scores.flatten().double().exp().tolist(), count)
    torch.manual_seed(0)
    drawn = sampled_candidates(
        torch.tensor(log_probs).repeat(times, 1), torch.tensor(running).expand(times, -1), wanting(count)
    )
    places = (drawn.parents * scores.shape[1] + drawn.tokens).tolist()
    counted = Counter(map(frozenset, places))
    assert sum(exact.values()) == pytest.approx(1.0)
    assert set(counted) <= set(exact)
    for chosen, chance in exact.items():
        error = math.sqrt(chance * (1 - chance) / times)
        assert abs(counted[chosen] / times - chance) <= 5 * error + 1e-9, (chosen, chance)
    if SAMPLES_ARE_SORTED:  # else they stay as they were drawn
        assert (drawn.scores.diff(dim=1) <= 0).all()
    assert torch.equal(drawn.scores, scores.flatten()[torch.tensor(places)])


def test_sampled_candidates_end_with_what_has_no_probability():
    """Where fewer continuations exist than are to be drawn, all that exist come, then others with score -inf."""
    log_probs = torch.tensor([[-0.5, -math.inf, -0.9, -math.inf]])
    drawn = sampled_candidates(log_probs.repeat(50, 1), torch.zeros(50, 1), wanting(6))
    assert drawn.tokens[:, :2].sort().values.tolist() == [[0, 2]] * 50
    assert (drawn.scores[:, 2:] == -torch.inf).all() and not drawn.scores.isnan().any()


# One step of the search -----------------------------------------------------------------------------------------------


@st.composite
def steps_of_one_prompt(draw):
    """A state, candidates and hits of one prompt as plain lists, and what stops the search."""
    width = draw(st.integers(1, 4))
    count = width * draw(st.integers(2, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def score(size: int) -> list[float]:
        return sorted((-4 * torch.rand(size, generator=generator)).tolist(), reverse=True)

    longest = draw(st.integers(2, 9))
    have = draw(st.integers(0, width))
    exist = draw(st.integers(1, count))
    return {
        "length": draw(st.integers(1, longest)),
        "longest": longest,
        "finished": score(have) + [-math.inf] * (width - have),
        "candidates": score(exist) + [-math.inf] * (count - exist),
        "hits": draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        "open": draw(st.booleans()),
        "penalty": draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.5])),
        "form": draw(st.sampled_from(["length", "gnmt", "none"])),
        "early_stopping": draw(st.sampled_from([True, False, "never"])),
    }


def plain_step(case: dict) -> dict:
    """The step on lists: finished scores with the rank they came from (None: from before), ranks that run on, open."""
    width, length = len(case["finished"]), case["length"]

    def form(at: int) -> float:
        return length_form(torch.tensor([at]), case["penalty"], case["form"]).item()

    finished = [(score, None) for score in case["finished"] if score > -math.inf]
    takes = case["open"] and not (case["early_stopping"] is True and len(finished) == width)
    for rank in range(width):
        if takes and case["hits"][rank] and case["candidates"][rank] > -math.inf:
            finished.append((case["candidates"][rank] / form(length), rank))
    finished = sorted(finished, key=lambda one: -one[0])[:width]
    running = [rank for rank, hit in enumerate(case["hits"]) if not hit and case["candidates"][rank] > -math.inf]
    running = running[:width]
    bound = form(case["longest"] if case["early_stopping"] == "never" and case["penalty"] > 0 else length)
    worst = finished[-1][0] if len(finished) == width else -math.inf
    may_improve = bool(running) and case["candidates"][running[0]] / bound > worst
    return {"finished": finished, "running": running, "open": case["open"] and may_improve}


def tensor_step(cases: list[dict], none_can_end: bool = False):
    """The step by `advance`, for prompts that share all but their scores; tokens are ranks plus 100."""
    first = cases[0]
    width, count = len(first["finished"]), len(first["candidates"])
    state = SearchState(
        running_scores=torch.zeros(len(cases), width),
        finished_scores=torch.tensor([case["finished"] for case in cases]),
        finished_origin=torch.full((len(cases), width), -7),
        open=torch.tensor([case["open"] for case in cases]),
    )
    ranks = torch.arange(count).expand(len(cases), -1)
    scores = torch.tensor([case["candidates"] for case in cases])
    prompt = PromptSettings(
        num_beams=width, max_new_tokens=first["longest"], length_penalty=first["penalty"],
        early_stopping=first["early_stopping"],
    )  # fmt: skip
    rules = Rules([prompt] * len(cases), Options(length_normalization=first["form"]), num_ends=1, device=CPU)
    return advance(
        state, Candidates(scores=scores, tokens=ranks + 100, parents=ranks % width, token_scores=scores),
        None if none_can_end else torch.tensor([case["hits"] for case in cases]), length=first["length"], rules=rules,
    )  # fmt: skip


@examples(100)
@given(steps_of_one_prompt())
def test_a_step_in_which_none_can_end_is_one_in_which_none_ends(case):
    """`advance` without hits skips what finishes sequences, and gives the same."""
    case = dict(case, hits=[False] * len(case["hits"]))
    (after, chosen), (shorter, as_chosen) = tensor_step([case]), tensor_step([case], none_can_end=True)
    real = after.finished_scores > -torch.inf  # where there is no sequence, its origin is nothing
    assert torch.equal(after.finished_origin[real], shorter.finished_origin[real])
    assert all(map(torch.equal, after._replace(finished_origin=real), shorter._replace(finished_origin=real)))
    assert all(map(torch.equal, chosen, as_chosen))


@examples(400)
@given(steps_of_one_prompt(), st.booleans())
def test_one_step_is_the_step_on_lists(case, other_open):
    """`advance` finishes, runs on and closes as the same step on plain lists; prompts of a batch are independent."""
    width = len(case["finished"])
    other = dict(case, open=other_open, hits=case["hits"][::-1])
    after, chosen = tensor_step([case, other])
    for prompt, one in enumerate((case, other)):
        expected = plain_step(one)
        scores = [score for score, _ in expected["finished"]]
        missing = [-math.inf] * (width - len(scores))
        assert after.finished_scores[prompt].tolist() == pytest.approx(scores + missing, rel=1e-5, abs=1e-6)
        origins = after.finished_origin[prompt].tolist()[: len(scores)]
        assert origins == [
            -7 if rank is None else (one["length"] - 1) * len(one["hits"]) + rank for _, rank in expected["finished"]
        ]
        runs = len(expected["running"])
        assert chosen.ranks[prompt, :runs].tolist() == expected["running"]
        assert chosen.tokens[prompt, :runs].tolist() == [rank + 100 for rank in expected["running"]]
        assert chosen.parents[prompt, :runs].tolist() == [rank % width for rank in expected["running"]]
        assert (after.running_scores[prompt, runs:] == -math.inf).all()
        assert bool(after.open[prompt]) == expected["open"]


# Whole searches -------------------------------------------------------------------------------------------------------


FORBIDDING = ("no_repeat_ngram_size", "min_new_tokens", "suppress_tokens", "bad_words_ids", "forced_eos_token_id",
              "prefix_allowed_tokens_fn")  # fmt: skip


@functools.cache
def model_of(kind: str):
    """One tiny model of each kind for all examples; end tokens are set in the call."""
    return tiny_model(kind)


@st.composite
def calls(draw, kinds):
    """Arguments of `generate`: a model's kind, its inputs, and settings that the search has to honour together."""
    kind = draw(st.sampled_from(kinds))
    width = draw(st.integers(2, 9))
    ends = draw(st.sampled_from([[5], [5, 17, 40], list(range(5, 16)), []]))
    inputs = prompts(kind, draw(st.integers(1, 3)), draw(st.integers(2, 8)), seed=draw(st.integers(0, 10_000)))
    longest = draw(st.integers(1, 9))
    arguments = {
        "num_beams": width,
        "num_return_sequences": draw(st.integers(1, width)),
        "max_new_tokens": longest,
        "early_stopping": draw(st.sampled_from([True, False, "never"])),
        "length_penalty": draw(st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0, 3.0])),
        "eos_token_id": ends or None,
    }
    optional = {
        "repetition_penalty": st.sampled_from([1.3, 0.8]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(1, longest),
        "suppress_tokens": st.just([7, 8, 9, 30, 31]),
        "renormalize_logits": st.just(True),
        "bad_words_ids": st.just([[11], [12, 13], [40, 41]]),
        "sequence_bias": st.just([[[20], -3.0], [[21, 22], 4.0]]),
        "exponential_decay_length_penalty": st.just((2, 1.2)),
        "forced_eos_token_id": st.just(5),
        "prefix_allowed_tokens_fn": st.just(_every_second),
    }
    needs_end = ("exponential_decay_length_penalty", "forced_eos_token_id")
    for name, values in optional.items():
        if draw(st.integers(0, 4)) == 0 and (ends or name not in needs_end):
            arguments[name] = draw(values)
    if "exponential_decay_length_penalty" in arguments:  # older releases make NaN of an end that is forbidden
        for name in FORBIDDING:
            arguments.pop(name, None)
    return kind, inputs, arguments


def _every_second(batch_id: int, sentence: torch.Tensor) -> list[int]:
    """A constraint that depends on the prompt and on the prefix, and leaves every beam enough to go on with."""
    first = int(sentence.sum() + batch_id) % 2
    return [EOS, *range(first, VOCABULARY, 2)]


def check_call(call) -> None:
    """Assert that ours equals transformers', that its scores are made of its parts, and that asking for no scores,
    which takes another way to the candidates, changes nothing else."""
    kind, inputs, arguments = call
    model = model_of(kind)
    _, ours = check_same_call(model, inputs, **arguments)
    parts = model.compute_transition_scores(ours.sequences, ours.scores, ours.beam_indices)
    assert torch.allclose(parts, ours.token_logprobs, atol=1e-6)
    lengths = (ours.beam_indices >= 0).sum(dim=1)
    whole = ours.token_logprobs.double().sum(dim=1) / length_form(lengths, arguments["length_penalty"], "length")
    real = ours.sequences_scores > -torch.inf  # other rows hold no sequence
    assert torch.allclose(whole.float()[real], ours.sequences_scores[real], atol=1e-4, rtol=1e-5)
    assert (lengths[~real] == 0).all()
    unasked = {"return_dict_in_generate": True, "custom_generate": "hf_paged_beam", "do_sample": False}
    quiet = model.generate(**inputs, **arguments, **unasked)
    assert quiet.sequences_scores is None and quiet.scores is None
    assert torch.equal(quiet.sequences, ours.sequences) and torch.equal(quiet.beam_indices, ours.beam_indices)
    assert torch.allclose(quiet.token_logprobs, ours.token_logprobs, atol=1e-5)
    assert torch.equal(model.generate(**inputs, **arguments, **unasked | {"return_dict_in_generate": False}),
                       ours.sequences)  # fmt: skip


@examples(90)
@given(calls(DECODER_ONLY))
def test_searches_of_decoders_equal_stock(call):
    """Width, batch, penalties, processors, stopping and end tokens in any combination: transformers' result."""
    check_call(call)


@examples(45)
@given(calls(("t5", "bart")))
def test_searches_of_encoder_decoders_equal_stock(call):
    """The same for encoder-decoder models."""
    check_call(call)
