"""Lists of settings: each prompt of a batch is searched with its own, and gets what it gets alone.

What a prompt gets alone is transformers' own search (greedy search for one beam), without padding.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from comparing import real_scores, returned_cache
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Rules, from_table, sampled_outcomes
from sweep_architectures import tiny_model as swept_model
from table_model import GatheringTable, random_table, table_model
from tiny_models import EOS, START, VOCABULARY, double_model, path_of, prompts_for
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from watching import forward_rows

import hf_paged_beam
from hf_paged_beam import TokenTrie
from hf_paged_beam.versions import SAMPLES_ARE_SORTED

NAME, TOLERANCE = "hf_paged_beam", 1e-4
ENDS, FEW_ENDS = [EOS, *range(20, 60)], [EOS, *range(20, 27)]
"""So many that sequences end early, and it matters when a search stops; and so few that they grow long."""
LISTED = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "max_new_tokens", "min_new_tokens")
WITH_SCORES = dict(return_dict_in_generate=True, output_scores=True)
KINDS = {
    # kind: options of our search, and the path that it takes
    "llama": ({}, "folded"),
    "gpt2": ({"beam_attention": "gathered"}, "gathered"),
    "falcon_h1": ({}, "recurrent"),
    "mistral": ({}, "folded"),
    "bart": ({}, "folded"),
    "t5": ({}, path_of("t5")),
}


@functools.cache
def model_of(kind: str) -> Any:
    """A float64 model, which has been searched once, so that its read paths are known."""
    if kind != "falcon_h1":
        model = double_model(kind)
    else:
        pair = next((pair for pair in MODEL_FOR_CAUSAL_LM_MAPPING.items() if pair[0].model_type == kind), None)
        if pair is None:
            pytest.skip(f"this release has no {kind}")
        model = swept_model(*pair).double()
    found = GenerationMixin.generate(
        model, **prompts_of(kind, 2), num_beams=2, max_new_tokens=3, return_dict_in_generate=True, custom_generate=NAME
    )
    if found.beam_path == "handed over":
        pytest.skip(f"in this release {kind} is handed over: {found.handed_over_because}")
    return model


def prompts_of(kind: str, batch_size: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left, or on the right for an encoder."""
    return prompts_for(double_model("llama"), "llama" if kind == "falcon_h1" else kind, batch_size)


def begins(model: Any, inputs: dict) -> int:
    """Column of the first generated token."""
    return 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def alone(model: Any, inputs: dict, prompt: int, call: dict) -> tuple[list[list[int]], list[float] | None]:
    """By transformers' own search of one prompt: all its beams' tokens, best first, and their scores.

    One beam is greedy search, which has no scores.
    """
    real = inputs["attention_mask"][prompt].bool()
    lone = {name: given[prompt, real].unsqueeze(0) for name, given in inputs.items()}
    width = call["num_beams"]
    if width == 1:
        call = {name: given for name, given in call.items() if name not in ("early_stopping", "length_penalty")}
    output = GenerationMixin.generate(
        model, **lone, **{**call, **WITH_SCORES, "do_sample": False, "num_return_sequences": width}
    )
    generated = output.sequences[:, begins(model, lone) :].tolist()
    if width == 1:
        ends = call["eos_token_id"] or []
        length = next((place for place, token in enumerate(generated[0], 1) if token in ends), len(generated[0]))
        return [generated[0][:length]], None
    lengths = (output.beam_indices >= 0).sum(-1).tolist()
    rows = [row[:length] for row, length in zip(generated, lengths, strict=True)]
    return rows, real_scores(output.sequences_scores).tolist()


def check_prompt(
    rows: list[list[int]], scores: list[float], expected: tuple[list[list[int]], list[float] | None], where: str
) -> None:
    """The first rows of what is expected; rows that nearly tie may stand in either order."""
    wanted, wanted_scores = expected
    if wanted_scores is None:
        assert rows == wanted, where
        return
    assert scores == pytest.approx(wanted_scores[: len(scores)], abs=TOLERANCE), where
    for place, row in enumerate(rows):
        near = [abs(other - wanted_scores[place]) <= TOLERANCE for other in wanted_scores]
        assert row in [other for other, is_near in zip(wanted, near, strict=True) if is_near], f"{where}, row {place}"


def of_prompt(lists: dict[str, Any], prompt: int) -> dict[str, Any]:
    """One prompt's settings."""
    return {name: given[prompt] if isinstance(given, list) else given for name, given in lists.items()}


def search(kind: str, inputs: dict, lists: dict[str, Any], **call: Any) -> Any:
    call = {**WITH_SCORES, "do_sample": False, "eos_token_id": ENDS, **KINDS[kind][0], **lists, **call}
    return GenerationMixin.generate(model_of(kind), **inputs, **call, custom_generate=NAME)


def check_as_alone(kind: str, inputs: dict, lists: dict[str, Any], **call: Any) -> Any:
    """Search with lists, and compare each prompt with itself alone; all that is known of the output's form too."""
    model, batch_size = model_of(kind), len(inputs["input_ids"])
    output = search(kind, inputs, lists, **call)
    own = [of_prompt({"num_return_sequences": 1, **lists}, prompt) for prompt in range(batch_size)]
    counts = [one["num_return_sequences"] for one in own]
    if len(output.scores) > 1 and max(one["num_beams"] for one in own) > 1:  # else nothing was read by any path
        assert output.beam_path == KINDS[kind][1]
    assert output.prompt_index.dtype == torch.int64
    assert output.prompt_index.tolist() == [prompt for prompt, count in enumerate(counts) for _ in range(count)]
    first = begins(model, inputs)
    check_form(output, inputs, model, first, sum(one["num_beams"] for one in own))
    lengths = (output.beam_indices >= 0).sum(-1).tolist()
    generated = output.sequences[:, first:].tolist()
    rows = [row[:length] for row, length in zip(generated, lengths, strict=True)]
    ends_at = 0
    for prompt, (one, count) in enumerate(zip(own, counts, strict=True)):
        begin, ends_at = ends_at, ends_at + count
        expected = alone(model, inputs, prompt, {"eos_token_id": ENDS, **call, **one})
        where = f"prompt {prompt} with {one}"
        check_prompt(rows[begin:ends_at], output.sequences_scores[begin:ends_at].tolist(), expected, where)
    return output


def check_form(output: Any, inputs: dict, model: Any, first: int, beams: int) -> None:
    """Shapes, prompts in front, one filler behind, and scores that fit together as transformers' do."""
    total, length = output.sequences.shape[0], output.sequences.shape[1] - first
    assert total == len(output.prompt_index) == len(output.sequences_scores)
    assert output.beam_indices.shape == (total, length) and output.beam_indices.dtype == torch.int32
    if model.config.is_encoder_decoder:
        assert (output.sequences[:, 0] == START).all()
    else:
        assert torch.equal(output.sequences[:, :first], inputs["input_ids"][output.prompt_index])
    inside = output.beam_indices >= 0
    assert length == inside.sum(-1).max()
    filler = output.sequences[:, first:][~inside]
    assert set(filler.tolist()) <= {0, EOS}
    assert all(scores.shape == (beams, VOCABULARY) for scores in output.scores)
    assert len(output.scores) >= length and output.beam_indices.max() < beams
    transitions = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    torch.testing.assert_close(transitions, output.token_logprobs, rtol=1e-5, atol=1e-5)
    returned_cache(output).check()


# Equality -------------------------------------------------------------------------------------------------------------


@st.composite
def mixed_settings(draw: Any) -> tuple[int, list[int], dict[str, Any]]:
    """A number of prompts, end tokens, and for each setting one value for all or a list."""
    batch_size = draw(st.integers(2, 4))

    def listed(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=batch_size, max_size=batch_size))

    widths = listed(st.integers(1, 5))
    longest = listed(st.integers(1, 7))
    chosen: dict[str, Any] = {"num_beams": widths if draw(st.booleans()) or min(widths) == 1 else widths[0]}
    own_widths = widths if isinstance(chosen["num_beams"], list) else [widths[0]] * batch_size
    chosen["num_return_sequences"] = [draw(st.integers(1, width)) for width in own_widths]
    chosen["length_penalty"] = listed(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]))
    chosen["early_stopping"] = listed(st.sampled_from([True, False, "never"]))
    chosen["max_new_tokens"] = longest
    chosen["min_new_tokens"] = [draw(st.integers(0, most)) for most in longest]
    for name, one_for_all in (
        ("num_return_sequences", 1), ("length_penalty", 1.0), ("early_stopping", False),
        ("max_new_tokens", max(longest)), ("min_new_tokens", min(chosen["min_new_tokens"])),
    ):  # fmt: skip
        if draw(st.integers(0, 3)) == 0:
            chosen[name] = one_for_all
    if not any(isinstance(given, list) for given in chosen.values()):
        chosen["num_beams"] = widths
    return batch_size, draw(st.sampled_from([ENDS, FEW_ENDS])), chosen


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(case=mixed_settings())
def test_random_lists(kind: str, case: tuple[int, list[int], dict[str, Any]]) -> None:
    """Each prompt's rows are those of its own call."""
    batch_size, ends, lists = case
    check_as_alone(kind, prompts_of(kind, batch_size), lists, eos_token_id=ends)


ONE_LIST: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": [2, 5, 1], "num_return_sequences": 1},
    "num_return_sequences": {"num_beams": 4, "num_return_sequences": [1, 4, 2]},
    "length_penalty": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": [-1.0, 0.0, 2.0]},
    "early_stopping": {"num_beams": 4, "num_return_sequences": 4, "early_stopping": [True, "never", False]},
    "max_new_tokens": {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": [1, 8, 3]},
    "min_new_tokens": {"num_beams": 4, "num_return_sequences": 4, "min_new_tokens": [5, 0, 2]},
}


@pytest.mark.parametrize("name", ONE_LIST)
@pytest.mark.parametrize("kind", KINDS)
def test_one_list(kind: str, name: str) -> None:
    """Each setting as the only list."""
    check_as_alone(kind, prompts_of(kind, 3), {"max_new_tokens": 8, **ONE_LIST[name]})


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_equal_values_are_that_value(kind: str) -> None:
    """As the call without lists, in every row and score."""
    inputs = prompts_of(kind, 3)
    plain = dict(num_beams=4, num_return_sequences=2, length_penalty=0.6, early_stopping="never", max_new_tokens=6,
                 min_new_tokens=2)  # fmt: skip
    expected = search(kind, inputs, plain)
    for names in (LISTED, *((name,) for name in LISTED)):
        lists = {name: [given] * 3 if name in names else given for name, given in plain.items()}
        output = search(kind, inputs, lists)
        assert torch.equal(output.sequences, expected.sequences)
        torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
        assert torch.equal(output.beam_indices, expected.beam_indices)


@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_for_every_prompt_is_greedy_search(kind: str) -> None:
    check_as_alone(kind, prompts_of(kind, 3), {"num_beams": [1, 1, 1], "max_new_tokens": 6})


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_one(kind: str) -> None:
    check_as_alone(kind, prompts_of(kind, 1), {"num_beams": [3], "num_return_sequences": [3], "max_new_tokens": [6]})


LISTS = dict(
    num_beams=[2, 5, 1, 3], num_return_sequences=[2, 4, 1, 1], length_penalty=[1.0, -0.5, 1.0, 2.0],
    early_stopping=[True, False, "never", "never"], max_new_tokens=[3, 8, 6, 5], min_new_tokens=[0, 2, 3, 0],
)  # fmt: skip


@pytest.mark.parametrize("end", [None, EOS, [EOS, 20, 30]])
@pytest.mark.parametrize("kind", KINDS)
def test_all_lists_at_once(kind: str, end: int | list[int] | None) -> None:
    """With no end token, one and several; and without a dictionary or scores the same sequences."""
    inputs = prompts_of(kind, 4)
    ends = {"eos_token_id": end if isinstance(end, list) or end is None else [end]}
    lists = LISTS if end is not None else {**LISTS, "min_new_tokens": 0}
    model = model_of(kind)
    output = GenerationMixin.generate(
        model, **inputs, **lists, **ends, **WITH_SCORES, do_sample=False, custom_generate=NAME, **KINDS[kind][0]
    )
    rows = [
        row[: int(count)]
        for row, count in zip(
            output.sequences[:, begins(model, inputs) :].tolist(), (output.beam_indices >= 0).sum(-1), strict=True
        )
    ]
    first = 0
    for prompt in range(4):
        one = of_prompt(lists, prompt)
        last = first + one["num_return_sequences"]
        expected = alone(model, inputs, prompt, {**ends, **one})
        check_prompt(rows[first:last], output.sequences_scores[first:last].tolist(), expected, f"prompt {prompt}")
        first = last
    plain = GenerationMixin.generate(
        model, **inputs, **lists, **ends, do_sample=False, custom_generate=NAME, **KINDS[kind][0]
    )
    assert plain.shape == output.sequences.shape
    inside = torch.cat([plain.new_ones(len(plain), begins(model, inputs)), (output.beam_indices >= 0).long()], 1).bool()
    assert torch.equal(plain[inside], output.sequences[inside])


def test_a_prompt_does_not_see_its_neighbours() -> None:
    """In another order of the batch each prompt gets the same."""
    inputs, order = prompts_of("llama", 4), [2, 0, 3, 1]
    output = search("llama", inputs, LISTS)
    turned = search(
        "llama", {name: given[order] for name, given in inputs.items()},
        {name: [given[one] for one in order] for name, given in LISTS.items()},
    )  # fmt: skip
    for place, prompt in enumerate(order):
        mine, theirs = turned.prompt_index == place, output.prompt_index == prompt
        torch.testing.assert_close(turned.sequences_scores[mine], output.sequences_scores[theirs], rtol=1e-5, atol=1e-5)
        length = LISTS["max_new_tokens"][prompt] + inputs["input_ids"].shape[1]
        kept = (turned.beam_indices[mine] >= 0).sum(-1)
        assert torch.equal(kept, (output.beam_indices[theirs] >= 0).sum(-1))
        for row, other in zip(turned.sequences[mine], output.sequences[theirs], strict=True):
            columns = min(length, len(row), len(other))
            assert torch.equal(row[:columns], other[:columns])


# What the model runs --------------------------------------------------------------------------------------------------

SHRINKING = dict(num_beams=[2, 5, 1, 3], max_new_tokens=[2, 8, 4, 5])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_the_model_sees(kind: str) -> None:
    """One per prompt, then one per beam of the prompts that still search; none for a prompt that has its last token."""
    model, inputs = model_of(kind), prompts_of(kind, 4)
    with forward_rows(model) as rows:
        GenerationMixin.generate(
            model, **inputs, **SHRINKING, do_sample=False, eos_token_id=None, custom_generate=NAME, **KINDS[kind][0]
        )
    assert rows == [4, 11, 9, 9, 8, 5, 5, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_prompts_that_end_by_themselves(kind: str) -> None:
    """Prompts that stop early leave too: rows never grow, and the last pass is for the prompts that are left alone."""
    model, inputs = model_of(kind), prompts_of(kind, 4)
    widths, longest = [2, 3, 2, 4], 10
    lists = dict(num_beams=widths, early_stopping=[True, "never", True, True], min_new_tokens=[0, 9, 0, 0])
    call = dict(max_new_tokens=longest, eos_token_id=list(range(1, VOCABULARY, 2)))
    passes = []
    for prompt in range(4):
        with forward_rows(model) as rows:
            alone(model, inputs, prompt, {**call, **of_prompt(lists, prompt)})
        passes.append(len(rows))
    assert passes[1] == longest and min(passes) <= 3
    with forward_rows(model) as rows:
        GenerationMixin.generate(
            model, **inputs, **lists, **call, do_sample=False, custom_generate=NAME, **KINDS[kind][0]
        )
    searching = [sum(width for width, count in zip(widths, passes, strict=True) if count > step) for step in range(10)]
    assert rows == [4, *searching[1:]]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_scores_keep_all_rows(kind: str) -> None:
    """With `output_scores` every step has a row for every beam of every prompt, as `beam_indices` count them."""
    output = search(kind, prompts_of(kind, 4), SHRINKING, eos_token_id=None)
    assert [tuple(scores.shape) for scores in output.scores] == [(11, VOCABULARY)] * 8
    spans = [(0, 2), (2, 7), (7, 8), (8, 11)]
    for row, prompt in zip(output.beam_indices, output.prompt_index.tolist(), strict=True):
        low, high = spans[prompt]
        numbers = row[row >= 0]
        assert len(numbers) == SHRINKING["max_new_tokens"][prompt]
        assert ((numbers >= low) & (numbers < high)).all()


# Together with other features -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"output_scores": False}])
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_a_trie_for_each_prompt(kind: str, extra: dict) -> None:
    """Items of its own catalogue, as alone with its trie; a width beyond the items leaves rows that are none."""
    model, inputs = model_of(kind), prompts_of(kind, 3)
    draws = torch.randint(30, 99, (3, 12, 3), generator=torch.manual_seed(3)).tolist()
    tries = [TokenTrie.from_sequences(items, eos_token_id=EOS) for items in (draws[0], draws[1], draws[2][:3])]
    lists = dict(num_beams=[3, 2, 5], num_return_sequences=[3, 1, 5], max_new_tokens=[5, 5, 4])
    call = {**WITH_SCORES, "do_sample": False, "eos_token_id": EOS, **extra}
    output = GenerationMixin.generate(model, **inputs, **lists, **call, trie=tries, custom_generate=NAME)
    assert output.prompt_index.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    first = 0
    for prompt in range(3):
        one, lone = of_prompt(lists, prompt), {name: given[prompt : prompt + 1] for name, given in inputs.items()}
        expected = GenerationMixin.generate(model, **lone, **one, **call, trie=tries[prompt], custom_generate=NAME)
        rows = slice(first, first + one["num_return_sequences"])
        first = rows.stop
        assert output.item_ids[rows].tolist() == expected.item_ids.tolist()
        if output.sequences_scores is not None:
            torch.testing.assert_close(output.sequences_scores[rows], expected.sequences_scores)
    assert output.item_ids[-2:].tolist() == [-1, -1] and (output.item_ids[:-2] >= 0).all()


class Chained(LogitsProcessor):
    """A processor of the user's own, which transformers gives one row per beam: makes tokens near the last likely."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shapes.append((len(input_ids), len(scores)))
        distance = (torch.arange(scores.shape[-1]) - input_ids[:, -1:]).abs()
        return scores - distance.to(scores) * 0.05 * input_ids.shape[1]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon_h1"])
def test_a_processor_of_the_users_own(kind: str) -> None:
    """It sees one row per beam from the first step on, each with the tokens of that beam."""
    inputs = {name: given[:, -4:] for name, given in prompts_of(kind, 3).items()}
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    inputs["input_ids"] = inputs["input_ids"].clamp(min=6)  # no padding: alone it would see other lengths
    processor = Chained()
    lists = dict(num_beams=[2, 5, 3], num_return_sequences=[2, 3, 3], max_new_tokens=[3, 7, 5])
    check_as_alone(kind, inputs, lists, logits_processor=LogitsProcessorList([processor]))
    shapes = processor.shapes[:7]
    assert all(ids == scores <= 10 for ids, scores in shapes) and shapes[0] == (10, 10)


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": [30, 31, 32], "begin_suppress_tokens": [40, 41]},
    "bias": {"sequence_bias": [[[33], 3.0], [[33, 34], 2.0]]},
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_processors_of_transformers(kind: str, name: str) -> None:
    """Those that read rows read each prompt's own. (Padding is a token like others to them: there is none here.)"""
    inputs = prompts_of(kind, 1)
    inputs = {part: torch.cat([given, given.flip(1)]) for part, given in inputs.items()}
    check_as_alone(kind, inputs, {"num_beams": [2, 4], "max_new_tokens": [7, 5]}, **PROCESSORS[name])


def test_a_prefix_function_is_told_the_prompt() -> None:
    """`prefix_allowed_tokens_fn` gets the number of the prompt, also where widths differ."""
    allowed = {0: list(range(30, 60)), 1: list(range(40, 80)), 2: list(range(50, 99))}
    model, inputs = model_of("llama"), prompts_of("llama", 3)
    lists = dict(num_beams=[2, 4, 3], num_return_sequences=[2, 4, 3], max_new_tokens=[5, 3, 4])
    output = search("llama", inputs, lists, prefix_allowed_tokens_fn=lambda prompt, ids: allowed[prompt])
    first, column = 0, inputs["input_ids"].shape[1]
    for prompt in range(3):
        one = of_prompt(lists, prompt)
        last = first + one["num_return_sequences"]
        expected = alone(
            model, inputs, prompt,
            {"eos_token_id": ENDS, **one, "prefix_allowed_tokens_fn": lambda _, ids, prompt=prompt: allowed[prompt]},
        )  # fmt: skip
        lengths = (output.beam_indices[first:last] >= 0).sum(-1).tolist()
        rows = [row[:n] for row, n in zip(output.sequences[first:last, column:].tolist(), lengths, strict=True)]
        check_prompt(rows, output.sequences_scores[first:last].tolist(), expected, f"prompt {prompt}")
        first = last


class EndsAbove(StoppingCriteria):
    """A criterion of the user's own: ends rows whose last token is above a number."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] > 85


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_criterion_of_the_users_own(kind: str) -> None:
    """It is asked about rows of every prompt's candidates, and answers for each."""
    inputs = prompts_of(kind, 3)
    lists = dict(num_beams=[2, 4, 3], num_return_sequences=[2, 4, 1], early_stopping=[True, False, "never"])
    criteria = StoppingCriteriaList([EndsAbove()])
    check_as_alone(kind, inputs, lists, max_new_tokens=6, stopping_criteria=criteria)


@pytest.mark.parametrize("form", ["gnmt", "none"])
def test_other_length_forms(form: str) -> None:
    """Each prompt's form has its own exponent."""
    inputs = prompts_of("llama", 3)
    lists = dict(num_beams=[2, 4, 3], num_return_sequences=[2, 4, 3], length_penalty=[0.5, 2.0, -1.0])
    output = search("llama", inputs, lists, length_normalization=form, max_new_tokens=6)
    lengths = (output.beam_indices >= 0).sum(-1)
    exponents = torch.tensor(lists["length_penalty"])[output.prompt_index]
    divisor = ((5 + lengths) / 6) ** exponents if form == "gnmt" else torch.ones_like(exponents)
    torch.testing.assert_close(output.sequences_scores, output.token_logprobs.sum(-1) / divisor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "option", [{"patience": 1.5, "early_stopping": True}, {"length_reward": 0.4, "early_stopping": "never"}]
)
def test_rules_of_ours_with_lists(option: dict) -> None:
    """Patience counts each prompt's own beams; a reward is the same for all."""
    inputs = prompts_of("llama", 3)
    lists = dict(num_beams=[2, 5, 3], num_return_sequences=[2, 5, 3], max_new_tokens=[7, 5, 8])
    output, first = search("llama", inputs, lists, **option), 0
    for prompt in range(3):
        one, lone = of_prompt(lists, prompt), {name: given[prompt : prompt + 1] for name, given in inputs.items()}
        expected = search("llama", lone, one, **option)
        rows = slice(first, first + one["num_return_sequences"])
        first = rows.stop
        torch.testing.assert_close(output.sequences_scores[rows], expected.sequences_scores, rtol=1e-5, atol=1e-5)
        columns = expected.sequences.shape[1]
        assert torch.equal(output.sequences[rows, :columns], expected.sequences)


def test_patience_with_a_list_of_early_stopping() -> None:
    """It needs True for every prompt."""
    inputs, lists = prompts_of("llama", 2), {"num_beams": [2, 3]}
    both = search("llama", inputs, {**lists, "early_stopping": [True, True]}, patience=2.0, max_new_tokens=6)
    plain = search("llama", inputs, {**lists, "early_stopping": True}, patience=2.0, max_new_tokens=6)
    assert torch.equal(both.sequences, plain.sequences)
    with pytest.raises(ValueError, match="patience"):
        search("llama", inputs, {**lists, "early_stopping": [True, False]}, patience=2.0, max_new_tokens=6)


@pytest.mark.parametrize("way", ["enable", "function"])
def test_other_routes(way: str) -> None:
    """After `enable` plain ``generate`` takes lists, and so does the function."""
    model, inputs = model_of("llama"), prompts_of("llama", 4)
    call = {**LISTS, "do_sample": False, "eos_token_id": ENDS}
    expected = GenerationMixin.generate(model, **inputs, **call, custom_generate=NAME)
    if way == "function":
        assert torch.equal(hf_paged_beam.generate(model, **inputs, **call), expected)
        return
    hf_paged_beam.enable(model)
    try:
        assert torch.equal(model.generate(**inputs, **call), expected)
    finally:
        hf_paged_beam.disable(model)


# Sampling -------------------------------------------------------------------------------------------------------------


def test_sampling() -> None:
    """Shapes and prompts, the same again under the same seed, another draw under another."""
    inputs = prompts_of("llama", 3)
    lists = dict(num_beams=[2, 5, 3], num_return_sequences=[2, 3, 1], max_new_tokens=[3, 6, 4])

    def sample(seed: int) -> Any:
        torch.manual_seed(seed)
        call = dict(do_sample=True, top_k=30, temperature=3.0, eos_token_id=FEW_ENDS)
        return search("llama", inputs, lists, **call)

    first, again, other = sample(1), sample(1), sample(2)
    assert first.prompt_index.tolist() == [0, 0, 1, 1, 1, 2]
    assert torch.equal(first.sequences, again.sequences)
    assert first.sequences.shape[0] == 6 and first.sequences.shape[1] <= inputs["input_ids"].shape[1] + 6
    assert first.sequences.shape != other.sequences.shape or not torch.equal(first.sequences, other.sequences)
    lengths = (first.beam_indices >= 0).sum(-1)
    assert (lengths <= torch.tensor(lists["max_new_tokens"])[first.prompt_index]).all()
    torch.testing.assert_close(first.sequences_scores, first.token_logprobs.sum(-1) / lengths, rtol=1e-5, atol=1e-5)


def test_sampled_searches_have_the_exact_distribution() -> None:
    """Among neighbours of other widths a prompt's draws are what they are alone: 4,000 against all that can happen."""
    times, vocabulary = 4000, 5
    rules = Rules(num_beams=2, max_new_tokens=2, ends=(3,))
    table = random_table(1, vocabulary, ends=(3,), raised=1.0)
    exact = sampled_outcomes(from_table(table, (1,)), rules, ordered_by_score=SAMPLES_ARE_SORTED)
    torch.manual_seed(0)
    ids = torch.ones(2 * times, 1, dtype=torch.int64)
    rows = table_model(table, vocabulary, kind=GatheringTable).generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=[2, 3] * times, num_return_sequences=[2, 1] * times,
        max_new_tokens=2, do_sample=True, top_k=0, eos_token_id=3, custom_generate=NAME,
    )[:, 1:].tolist()  # fmt: skip
    words = [(first,) if first == 3 else (first, second) for first, second in rows]
    counted = Counter(zip(words[::3], words[1::3], strict=True))
    assert set(counted) <= set(exact)
    for result, chance in exact.items():
        assert abs(counted[result] - times * chance) <= 5 * (times * chance * (1 - chance)) ** 0.5 + 2, result


def test_stochastic_beams() -> None:
    """Each prompt has a sample of its own size, with its own threshold; the estimate has one number for each prompt."""
    inputs = prompts_of("llama", 3)
    lists = dict(num_beams=[2, 5, 3], num_return_sequences=[2, 3, 3], max_new_tokens=[3, 6, 4])
    torch.manual_seed(1)
    output = search("llama", inputs, {**lists, "do_sample": True}, sampling="stochastic_beam", top_k=0)
    assert output.prompt_index.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    for prompt in range(3):
        rows = output.prompt_index == prompt
        scores, threshold = output.perturbed_scores[rows], output.threshold[rows]
        assert (scores[:-1] > scores[1:]).all() and (threshold == threshold[0]).all() and (scores > threshold).all()
        assert len({tuple(row) for row in output.sequences[rows].tolist()}) == rows.sum()
    weights = hf_paged_beam.importance_weights(output).double()
    sums = torch.zeros(3, dtype=torch.float64).index_add(0, output.prompt_index, weights)
    torch.testing.assert_close(hf_paged_beam.estimate(torch.ones(8), output), sums, rtol=1e-5, atol=1e-6)


# What is refused ------------------------------------------------------------------------------------------------------


def refused(message: str, **call: Any) -> None:
    """The call, of two prompts, raises a `ValueError` before the model runs."""
    model = model_of("llama")
    call = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False, **call}
    with forward_rows(model) as rows, pytest.raises(ValueError, match=message):
        GenerationMixin.generate(model, **prompts_of("llama", 2), **call, custom_generate=NAME)
    assert not rows


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", LISTED)
def test_lists_of_another_length(name: str, count: int) -> None:
    """Not even one value for all: that is written without brackets."""
    value = {"length_penalty": 1.0, "early_stopping": True}.get(name, 2)
    refused(name, **{name: [value] * count})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("num_beams", [2, 0]),
        ("num_beams", [2, -1]),
        ("num_beams", [2, "3"]),
        ("num_beams", [2, True]),
        ("num_beams", [2, 2.5]),
        ("num_beams", [2, None]),
        ("num_beams", [[2], [3]]),
        ("num_return_sequences", [1, 3]),
        ("num_return_sequences", [1, 0]),
        ("num_return_sequences", [1, None]),
        ("num_return_sequences", [1, 1.0]),
        ("length_penalty", [1.0, "1.0"]),
        ("length_penalty", [1.0, None]),
        ("length_penalty", [1.0, float("nan")]),
        ("early_stopping", [True, "sometimes"]),
        ("early_stopping", [True, 1]),
        ("early_stopping", [True, None]),
        ("max_new_tokens", [3, 0]),
        ("max_new_tokens", [3, -2]),
        ("max_new_tokens", [3, "4"]),
        ("max_new_tokens", [3, 4.0]),
        ("max_new_tokens", [3, True]),
        ("min_new_tokens", [0, -1]),
        ("min_new_tokens", [0, "1"]),
        ("min_new_tokens", [0, 0.5]),
    ],
)
def test_lists_of_wrong_values(name: str, given: list) -> None:
    refused(name, **{name: given})


def test_more_rows_than_a_prompt_has_beams() -> None:
    """For any prompt, whether one of the two is a list or both."""
    refused("num_return_sequences", num_beams=[4, 2], num_return_sequences=[2, 3])
    refused("num_return_sequences", num_beams=[4, 2], num_return_sequences=3)
    refused("num_return_sequences", num_beams=4, num_return_sequences=[2, 5])


def test_one_beam_cannot_be_sampled() -> None:
    """It would be plain sampling, which is no beam search."""
    refused("num_beams", num_beams=[2, 1], do_sample=True)


@pytest.mark.parametrize("name", LISTED)
def test_lists_need_our_search(name: str) -> None:
    """Where the call would be handed over, the error says which list keeps it from that."""
    values = dict(num_beams=[2, 3], num_return_sequences=[1, 2], length_penalty=[1.0, 2.0],
                  early_stopping=[True, False], max_new_tokens=[2, 3], min_new_tokens=[0, 1])  # fmt: skip
    refused(name, **{name: values[name]}, use_cache=False)


def same_or_refused(name: str, expected: torch.Tensor, call: dict) -> None:
    """Either what the list gives, or a `ValueError` that names the argument: never another search."""
    try:
        output = GenerationMixin.generate(model_of("llama"), **prompts_of("llama", 2), **call, custom_generate=NAME)
    except ValueError as error:
        assert name in str(error)
        return
    assert torch.equal(output, expected)


@pytest.mark.parametrize("name", ["num_beams", "length_penalty", "min_new_tokens"])
def test_lists_in_other_clothes(name: str) -> None:
    """A tuple, and a list in a `GenerationConfig` (which itself refuses the other three names)."""
    values = dict(num_beams=[2, 3], length_penalty=[-1.0, 2.0], min_new_tokens=[0, 4])
    call = dict(num_beams=2, max_new_tokens=5, do_sample=False, eos_token_id=ENDS)
    expected = GenerationMixin.generate(
        model_of("llama"), **prompts_of("llama", 2), **{**call, name: values[name]}, custom_generate=NAME
    )
    same_or_refused(name, expected, {**call, name: tuple(values[name])})
    given = GenerationConfig(**{**call, "num_beams": 2, name: values[name]}, pad_token_id=0)
    same_or_refused(name, expected, {"generation_config": given})
