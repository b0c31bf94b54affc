"""Our search against a slow one that keeps whole sequences and no cache, and against exhaustive search.

The oracle (`oracle.py`) is itself held against transformers' search, so that it is known to state the same rules.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from oracle import Finished, Rules, beam_search, every_sequence, from_model, from_table, sampled_outcomes
from table_model import AttendingTable, GatheringTable, random_table, recorded_steps, running_prefixes, table_model
from tiny_models import ENCODER_DECODER, START, prompts, tiny_model

from hf_paged_beam import PagedBeamCache
from hf_paged_beam.versions import CACHE_ARGUMENT, SAMPLES_ARE_SORTED

TOLERANCE = 2e-5
FORMS = ("length", "gnmt", "none")
EXPONENTS = (-1.0, -0.5, 0.0, 0.6, 1.0, 2.0, 3.0)
EARLY_STOPPING = (True, False, "never")


def search(model, inputs, rules: Rules, *, ours: bool = True):
    """The same search by tensors: ours, or transformers' own."""
    settings = dict(
        num_beams=rules.num_beams, num_return_sequences=rules.num_beams, max_new_tokens=rules.max_new_tokens,
        early_stopping=rules.early_stopping, length_penalty=rules.length_penalty, eos_token_id=list(rules.ends) or None,
        return_dict_in_generate=True, output_scores=True, do_sample=False,
    )  # fmt: skip
    if not ours:
        return model.generate(**inputs, **settings)
    settings.update(custom_generate="hf_paged_beam", length_normalization=rules.normalization)
    output = model.generate(**inputs, **settings)
    quiet = model.generate(**inputs, **{**settings, "output_scores": False})  # takes another way to the candidates
    assert torch.equal(quiet.sequences, output.sequences)
    assert torch.allclose(quiet.token_logprobs, output.token_logprobs, atol=TOLERANCE)
    return output


def check_as_expected(output, expected: list[list[Finished]], prompt_length: int) -> None:
    """Assert that each prompt's rows are the expected sequences, best first, then rows of score -inf.

    Sequences whose scores tie within the tolerance may stand in either order.
    """
    width = len(output.sequences) // len(expected)
    scores = output.sequences_scores.view(len(expected), width).tolist()
    tokens = output.sequences[:, prompt_length:].view(len(expected), width, -1).tolist()
    for prompt, finished in enumerate(expected):
        wanted = [one.score for one in finished] + [-math.inf] * (width - len(finished))
        assert scores[prompt] == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE), f"prompt {prompt}"
        for row, one in enumerate(finished):
            ties = [other.tokens for other in finished if abs(other.score - one.score) <= TOLERANCE]
            assert tuple(tokens[prompt][row][: len(one.tokens)]) in ties, f"prompt {prompt}, row {row}: {finished}"


def padded(token_rows: list[tuple[int, ...]]) -> dict:
    """Prompts of several lengths as ids and mask, padded on the left."""
    longest = max(map(len, token_rows))
    ids = torch.tensor([(0,) * (longest - len(row)) + row for row in token_rows])
    mask = torch.tensor([(0,) * (longest - len(row)) + (1,) * len(row) for row in token_rows])
    return {"input_ids": ids, "attention_mask": mask}


def random_case(seed: int, *, roomy: bool) -> tuple[Rules, int, list[tuple[int, ...]]]:
    """Rules, a vocabulary size and prompts.

    Args:
        roomy: a vocabulary that has all candidates of the first step, so that transformers' search has no need to
            fill up with repetitions; else a tiny one.
    """
    draw = random.Random(seed)
    width, ends = draw.randint(2, 6), draw.choice([0, 1, 1, 3, 11] if roomy else [0, 1, 1, 2])
    rules = Rules(
        num_beams=width,
        max_new_tokens=draw.randint(1, 8),
        ends=range(3, 3 + ends),
        early_stopping=draw.choice(EARLY_STOPPING),
        length_penalty=draw.choice(EXPONENTS),
    )
    vocabulary = max(rules.num_candidates, 3 + ends) + draw.randint(0, 9) if roomy else 4 + ends
    rows = [tuple(draw.choices(range(vocabulary), k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
    return rules, vocabulary, rows


def with_form(rules: Rules, form: str) -> Rules:
    """The same rules with another length form."""
    return Rules(**{**vars(rules), "normalization": form})


@pytest.mark.parametrize("seed", range(60))
def test_oracle_is_transformers_search(seed):
    """On random tables: the oracle's rules, with the length form "length", are those of transformers' search."""
    rules, vocabulary, rows = random_case(seed, roomy=True)
    table = random_table(seed, vocabulary, ends=rules.ends)
    inputs = padded(rows)
    output = search(table_model(table, vocabulary), inputs, rules, ours=False)
    expected = [beam_search(from_table(table, row), rules) for row in rows]
    check_as_expected(output, expected, inputs["input_ids"].shape[1])


@pytest.mark.parametrize("kind", [AttendingTable, GatheringTable])
@pytest.mark.parametrize("seed", range(60))
def test_random_tables(seed, kind):
    """On the same tables, ours with every length form; on both read paths; batches padded on the left."""
    rules, vocabulary, rows = random_case(seed, roomy=True)
    table = random_table(seed, vocabulary, ends=rules.ends)
    inputs, model = padded(rows), table_model(table, vocabulary, kind=kind)
    for form in FORMS:
        expected = [beam_search(from_table(table, row), with_form(rules, form)) for row in rows]
        output = search(model, inputs, with_form(rules, form))
        check_as_expected(output, expected, inputs["input_ids"].shape[1])
        getattr(output, CACHE_ARGUMENT).check()


@pytest.mark.parametrize("kind", [AttendingTable, GatheringTable])
@pytest.mark.parametrize("seed", range(30))
def test_transformers_search_over_our_cache(seed, kind):
    """Our cache under transformers' loop, which reorders it: the same sequences, and a whole cache at the end."""
    rules, vocabulary, rows = random_case(seed, roomy=True)
    table = random_table(seed, vocabulary, ends=rules.ends)
    model, inputs = table_model(table, vocabulary, kind=kind), padded(rows)
    cache = PagedBeamCache(model.config, num_beams=rules.num_beams)
    output = search(model, {**inputs, CACHE_ARGUMENT: cache}, rules, ours=False)
    expected = [beam_search(from_table(table, row), rules) for row in rows]
    check_as_expected(output, expected, inputs["input_ids"].shape[1])
    cache.check()


@pytest.mark.parametrize("seed", range(60))
def test_random_tables_of_tiny_vocabularies(seed):
    """Fewer continuations than candidates: no repetition is returned, missing sequences have score -inf."""
    rules, vocabulary, rows = random_case(seed, roomy=False)
    table = random_table(seed, vocabulary, ends=rules.ends)
    inputs, model = padded(rows), table_model(table, vocabulary)
    for form in FORMS:
        expected = [beam_search(from_table(table, row), with_form(rules, form)) for row in rows]
        output = search(model, inputs, with_form(rules, form))
        check_as_expected(output, expected, inputs["input_ids"].shape[1])


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "gpt2", "t5", "bart"])
def test_random_models(kind, early_stopping):
    """Tiny models in float64 against fresh forward passes over whole sequences, each prompt alone and unpadded."""
    model = tiny_model(kind, dtype=torch.float64)
    inputs = prompts(kind, batch_size=3)
    start = (START,) if kind in ENCODER_DECODER else ()
    for form, exponent in zip(FORMS, (1.0, -0.5, 2.0), strict=True):
        rules = Rules(
            num_beams=4, max_new_tokens=7, ends=(5, 17, 40), early_stopping=early_stopping, length_penalty=exponent,
            normalization=form,
        )  # fmt: skip
        alone = [
            {name: row[mask.bool()][None] for name, row in (("input_ids", ids), ("attention_mask", mask))}
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        scorers = [from_model(model, {"input_ids": one["input_ids"]}, start) for one in alone]
        expected = [beam_search(scorer, rules) for scorer in scorers]
        output = search(model, inputs, rules)
        check_as_expected(output, expected, len(start) or inputs["input_ids"].shape[1])


@pytest.mark.parametrize(("early_stopping", "exponent"), [(True, 1.0), (False, 1.0), ("never", 2.0)])
def test_sampled_searches_have_the_exact_distribution(early_stopping, exponent):
    """10,000 sampled searches against the probability of every result, found by trying all draws of all steps."""
    times, vocabulary = 10_000, 5
    rules = Rules(num_beams=2, max_new_tokens=2, ends=(3,), early_stopping=early_stopping, length_penalty=exponent)
    table = random_table(1, vocabulary, ends=(3,), raised=1.0)
    exact = sampled_outcomes(from_table(table, (1,)), rules, ordered_by_score=SAMPLES_ARE_SORTED)
    assert sum(exact.values()) == pytest.approx(1.0) and len(exact) > 20
    torch.manual_seed(0)
    rows = table_model(table, vocabulary, kind=GatheringTable).generate(
        **padded([(1,)] * times), num_beams=2, num_return_sequences=2, max_new_tokens=2, do_sample=True, top_k=0,
        eos_token_id=3, early_stopping=early_stopping, length_penalty=exponent, custom_generate="hf_paged_beam",
    )[:, 1:].tolist()  # fmt: skip
    words = [(first,) if first == 3 else (first, second) for first, second in rows]
    counted = Counter(zip(words[::2], words[1::2], strict=True))
    assert set(counted) <= set(exact)
    for result, chance in exact.items():
        error = math.sqrt(times * chance * (1 - chance))
        assert abs(counted[result] - times * chance) <= 5 * error + 2, (result, chance)


WIDE_ENOUGH = [
    # V, T, ends; a width that holds every prefix is V^T at most
    (3, 4, (2,)),
    (4, 3, (3,)),
    (4, 3, (2, 3)),
    (3, 3, ()),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize(("vocabulary", "longest", "ends"), WIDE_ENOUGH)
def test_width_beyond_need_is_exhaustive_search(vocabulary, longest, ends, exponent, form):
    """With room for every prefix, and "never", the best sequences of all are returned, each with its exact score."""
    rules = Rules(
        num_beams=vocabulary**longest, max_new_tokens=longest, ends=ends, early_stopping="never",
        length_penalty=exponent, normalization=form,
    )  # fmt: skip
    for seed in range(3):
        table = random_table(seed, vocabulary, ends=ends, raised=0.5)
        expected = every_sequence(from_table(table, (1,)), rules)
        output = search(table_model(table, vocabulary), padded([(1,)]), rules)
        check_as_expected(output, [expected[: rules.num_beams]], prompt_length=1)


def steps_of(model, rules: Rules):
    """The steps of our search after a prompt of one token."""
    with recorded_steps() as steps:
        model.generate(
            **padded([(1,)]), num_beams=rules.num_beams, max_new_tokens=rules.max_new_tokens, do_sample=False,
            early_stopping=rules.early_stopping, length_penalty=rules.length_penalty,
            eos_token_id=list(rules.ends) or None, length_normalization=rules.normalization,
            custom_generate="hf_paged_beam",
        )  # fmt: skip
    return steps


def best_completion(scorer, rules: Rules, prefix, score: float) -> float:
    """The best normalised score of all sequences that begin with `prefix`, found exhaustively."""
    return every_sequence(scorer, rules, prefix, score)[0].score


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_never_bounds_every_completion_at_every_step(exponent, form):
    """After each step of a search, no running beam has a completion above its running score over the bound."""
    rules = Rules(
        num_beams=3, max_new_tokens=4, ends=(2,), early_stopping="never", length_penalty=exponent, normalization=form
    )
    compared = 0
    for seed in range(6):
        table = random_table(seed, 3, ends=(2,), raised=0.0)
        scorer = from_table(table, (1,))
        steps = steps_of(table_model(table, 3), rules)
        for step, beams in zip(steps, running_prefixes(steps), strict=True):
            bounds = step.after.running_scores[0] / step.rules.bound[0, step.length]
            for beam, (running, bound) in zip(
                beams, zip(step.after.running_scores[0].tolist(), bounds.tolist(), strict=True), strict=True
            ):
                if running == -math.inf:
                    continue
                compared += 1
                assert best_completion(scorer, rules, beam, running) <= bound + 1e-5 * abs(bound)
    assert compared >= 30


def certain_after(first: float):
    """Token 0 with probability `first`, then token 0 with certainty; token 1 is the rest."""

    def table(prefix):
        return (math.log(first), math.log(1 - first)) if len(prefix) == 1 else (0.0, -math.inf)

    return table


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 2.0, 3.0])
def test_never_is_tight(exponent, form):
    """Where nothing more is lost on the way to the longest length, the best completion attains the bound."""
    rules = Rules(num_beams=2, max_new_tokens=6, early_stopping="never", length_penalty=exponent, normalization=form)
    table = certain_after(0.3)
    steps = steps_of(table_model(table, 2), rules)
    for step in steps[:-1]:
        running = step.after.running_scores[0, 1].item()  # the beam of token 0: ln .3 from the first step on
        assert running == pytest.approx(math.log(0.3), abs=1e-6)
        completion = best_completion(from_table(table, (1,)), rules, (0,) * step.length, running)
        assert (running / step.rules.bound[0, step.length]).item() == pytest.approx(completion, abs=1e-6)


@pytest.mark.parametrize(("form", "exponent"), [("length", 1.0), ("gnmt", 1.0)])
def test_false_is_no_bound(form, exponent):
    """The present length's form, which `early_stopping=False` takes, is surpassed by a longer completion."""
    rules = Rules(num_beams=2, max_new_tokens=6, early_stopping=False, length_penalty=exponent, normalization=form)
    table = certain_after(0.3)
    steps = steps_of(table_model(table, 2), rules)
    running = steps[0].after.running_scores[0, 1]
    claimed = (running / steps[0].rules.bound[0, 1]).item()
    assert best_completion(from_table(table, (1,)), rules, (0,), running.item()) > claimed + 0.1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_never_stops_only_where_nothing_is_lost(exponent, form):
    """Narrow searches with "never" find what they find without any stopping rule; and it does stop some early.

    (With a large exponent the bound is so loose that these never stop.)
    """
    steps_run = steps_possible = 0
    for seed in range(8):
        rules = Rules(
            num_beams=2, max_new_tokens=6, ends=(2,), early_stopping="never", length_penalty=exponent,
            normalization=form,
        )  # fmt: skip
        table = random_table(seed, 5, ends=(2,), raised=3.0)
        without_rule = beam_search(from_table(table, (1,)), Rules(**{**vars(rules), "early_stopping": "exhaust"}))
        output = search(table_model(table, 5), padded([(1,)]), rules)
        check_as_expected(output, [without_rule], prompt_length=1)
        steps_run, steps_possible = steps_run + len(output.scores), steps_possible + rules.max_new_tokens
    assert steps_run < steps_possible or exponent >= 2
