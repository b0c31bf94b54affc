"""Edges where the search features meet models, processors and each other; each was wrong once."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from multimodal_models import FAMILIES, family_model, is_missing
from sweep_architectures import tiny_model as swept_model
from tiny_models import VOCABULARY, double_model, prompts_for
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import hf_paged_beam
from hf_paged_beam.cache.rows import BeamRows
from hf_paged_beam.generation.rules import Rules
from hf_paged_beam.generation.settings import Options, PromptSettings
from hf_paged_beam.generation.stochastic import Draws

NAME = "hf_paged_beam"
CPU = torch.device("cpu")


def search(model: Any, inputs: dict, **call: Any) -> Any:
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    return GenerationMixin.generate(model, **inputs, **{**settings, "custom_generate": NAME, **call})


def causal_model(kind: str) -> Any:
    pair = next((pair for pair in MODEL_FOR_CAUSAL_LM_MAPPING.items() if pair[0].model_type == kind), None)
    if pair is None:
        pytest.skip(f"this release has no {kind}")
    return swept_model(*pair)


def ids_of(batch_size: int) -> dict:
    ids = torch.randint(6, VOCABULARY, (batch_size, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("route", [NAME, hf_paged_beam.beam_search])
def test_groups_on_both_routes(route: Any) -> None:
    """A callable finds transformers' defaults in the configuration: the caller's keyword comes first."""
    model = double_model("llama")
    call = dict(num_beams=4, num_return_sequences=4, num_beam_groups=2, diversity_penalty=0.7)
    by_name, inputs = search(model, prompts_for(model, "llama", 2), **call), prompts_for(model, "llama", 2)
    here = search(model, inputs, **call, custom_generate=route)
    assert torch.equal(here.sequences, by_name.sequences)
    plain = search(model, inputs, num_beams=4, num_return_sequences=4)
    assert not torch.equal(plain.sequences_scores, here.sequences_scores)


@pytest.mark.parametrize("setting", [{"encoder_repetition_penalty": 4.0}, {"encoder_no_repeat_ngram_size": 1}])
@pytest.mark.parametrize("widths", [[1, 3], [3, 4], [5, 2]])
def test_processors_that_read_the_encoder(widths: list[int], setting: dict) -> None:
    """They find a row's prompt by its number: each prompt gets what it gets alone."""
    model = double_model("t5")
    inputs = prompts_for(model, "t5", 1)
    inputs = {name: torch.cat([given, given.flip(1)]) for name, given in inputs.items()}
    together = search(model, inputs, num_beams=widths, num_return_sequences=1, **setting).sequences
    for prompt, width in enumerate(widths):
        own = {name: given[prompt : prompt + 1] for name, given in inputs.items()}
        alone = GenerationMixin.generate(model, **own, num_beams=width, max_new_tokens=6, do_sample=False, **setting)
        columns = min(alone.shape[1], together.shape[1])
        assert torch.equal(together[prompt, :columns], alone[0, :columns])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_prompts_without_an_image_among_others(name: str) -> None:
    """Inputs laid one after another have no row per prompt: lists of widths leave them as they are."""
    if is_missing(name):
        pytest.skip("this release has no such model")
    family = FAMILIES[name]
    counts = next((counts for counts in family.counts if min(counts) == 0 and len(counts) > 1), None)
    if counts is None:
        pytest.skip("every prompt of this family has an image")
    model = family_model(name)
    given = family.prompts(model, counts, 4)
    widths = [3, 2, 2][: len(counts)]
    call = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0, custom_generate=NAME)
    lists = model.generate(**given.inputs, **call, num_beams=widths)
    wide = model.generate(**given.inputs, **call, num_beams=3)
    assert torch.equal(lists[0], wide[0])


def test_no_column_that_no_returned_sequence_needs() -> None:
    """Longer sequences of other groups are not returned, and leave nothing: transition scores add up."""
    model, ends = double_model("t5"), list(range(20, 80))
    for seed in range(12):
        found = search(model, prompts_for(model, "t5", 2, seed=seed), num_beams=8, num_beam_groups=4,
                       diversity_penalty=1.0, num_return_sequences=3, eos_token_id=ends)  # fmt: skip
        lengths = (found.beam_indices >= 0).sum(-1)
        assert found.sequences.shape[1] == 1 + int(lengths.max()) == 1 + found.token_logprobs.shape[1]
        steps = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
        torch.testing.assert_close(steps.sum(-1) / lengths, found.sequences_scores, rtol=1e-4, atol=1e-4)


def test_a_trace_of_drawn_sequences_tells_log_probabilities() -> None:
    """Nodes carry what the model said, not what was drawn; a prompt's returned nodes are as many as its rows."""
    model = double_model("llama")
    found = search(model, prompts_for(model, "llama", 3), num_beams=[3, 5, 4], num_return_sequences=[2, 1, 3],
                   do_sample=True, sampling="stochastic_beam", top_k=0, return_beam_trace=True)  # fmt: skip
    row = 0
    for prompt, count in enumerate([2, 1, 3]):
        tree = found.beam_trace.tree(prompt)
        assert len(tree.returned) == count
        for number in tree.returned:
            said = [node.log_prob for node in tree.path(number)]
            assert said == pytest.approx(found.token_logprobs[row, : len(said)].tolist(), abs=1e-4)
            row += 1


def test_one_continuation_carries_its_parents_draw() -> None:
    """Far down, where a sum is large beside the differences, float32 still tells the largest from the second."""
    rules = Rules([PromptSettings(num_beams=2, max_new_tokens=4)] * 4000, Options(), num_ends=0, device=CPU)
    draws = Draws(4000, CPU)
    draws.log_probs = torch.full((4000, 1), -2000.0)
    torch.manual_seed(0)
    found = draws.candidates(torch.randn(4000, 50), torch.full((4000, 1), -1990.0), rules, None)
    same = (found.scores[:, 0] == found.scores[:, 1]).float().mean()
    assert (found.scores[:, 0] == -1990.0).float().mean() > 0.99 and same < 5e-3


def test_a_source_that_the_encoder_shortens_has_no_padding_to_cover() -> None:
    """Where the mask is of another length than the attention, what the model hides counts as padding."""
    from hf_paged_beam.generation.coverage import Coverage
    from hf_paged_beam.generation.state import Candidates

    coverage = Coverage(1.0, torch.ones(1, 8))
    coverage.attend(torch.tensor([[[0.5, 0.5, 0.0]]]))
    zeros = torch.zeros(1, 2)
    given = Candidates(scores=zeros, tokens=zeros.long(), parents=zeros.long(), token_scores=zeros)
    lost = coverage.with_bonus(given).bonus
    torch.testing.assert_close(lost, torch.full((1, 2), 2 * float(torch.tensor(0.5).log())))


@pytest.mark.parametrize("kind", ["dory", "llama"])
def test_one_prompt_is_left(kind: str) -> None:
    """The last prompt alone, after others left: the same sequences as in a batch where all stay."""
    model, inputs = causal_model(kind).double(), ids_of(4)
    call = dict(num_beams=3, max_new_tokens=6, eos_token_id=list(range(6, VOCABULARY, 2)), pad_token_id=0,
                early_stopping=True, return_dict_in_generate=False, output_scores=False)  # fmt: skip
    stock = search(model, inputs, **call, custom_generate=None)
    assert torch.equal(search(model, inputs, **call), stock)
    lone = {name: given[:1] for name, given in inputs.items()}
    assert torch.equal(search(model, lone, **call), search(model, lone, **call, custom_generate=None))


@pytest.mark.parametrize("lists", [{"num_beams": [1, 1, 1]}, {"num_beams": [1, 3, 1], "max_new_tokens": [4, 1, 4]}])
@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_narrow_lists_do_not_decide_how_a_model_is_read(kind: str, lists: dict) -> None:
    """Beams of one alone can be tried by both paths too."""
    model, inputs = causal_model(kind), ids_of(3)
    fresh = search(causal_model(kind), inputs, num_beams=3, eos_token_id=None, pad_token_id=0).beam_path
    search(model, inputs, **lists, eos_token_id=None, pad_token_id=0)
    assert search(model, inputs, num_beams=3, eos_token_id=None, pad_token_id=0).beam_path == fresh


@pytest.mark.parametrize("given", [
    {"num_beams": numpy.array([2, 3, 2])}, {"num_beams": torch.tensor([2, 3, 2])}, {"num_beams": (2, 3, 2)},
    {"num_beams": [numpy.int64(2), numpy.int64(3), numpy.int64(2)]},
    {"early_stopping": [numpy.True_] * 3, "num_beams": [2, 3, 2]},
    {"min_new_tokens": [numpy.int64(1)] * 3, "num_beams": [2, 3, 2]},
])  # fmt: skip
def test_numbers_of_any_kind(given: dict) -> None:
    """Arrays, tensors, tuples and numpy's numbers are what they say."""
    model = double_model("llama")
    inputs = prompts_for(model, "llama", 3)
    plain = {
        name: [bool(one) if name == "early_stopping" else int(one) for one in values] for name, values in given.items()
    }
    assert torch.equal(search(model, inputs, **given).sequences, search(model, inputs, **plain).sequences)


def test_groups_of_numpys_integers() -> None:
    model = double_model("llama")
    call = dict(num_beams=4, num_beam_groups=numpy.int64(2), diversity_penalty=0.5)
    assert search(model, prompts_for(model, "llama", 2), **call).sequences.shape[0] == 2


@pytest.mark.parametrize(("call", "said"), [
    ({"early_stopping": [1.0] * 3}, "early_stopping must be True, False or 'never'"),
    ({"max_length": [9, 9, 9]}, "max_new_tokens may be a list"),
    ({"return_beam_trace": True, "return_dict_in_generate": False, "output_scores": False}, "return_dict_in_generate"),
    ({"guidance_scale": 1.5, "num_beams": [2, 3, 2]}, "guidance_scale"),
])  # fmt: skip
def test_what_is_refused(call: dict, said: str) -> None:
    model = double_model("llama")
    with pytest.raises(ValueError, match=said):
        search(model, prompts_for(model, "llama", 3), **{"num_beams": 3, **call})


def test_options_in_a_configuration() -> None:
    """What a configuration holds counts; a saved penalty without groups waits for groups."""
    model = double_model("llama")
    inputs = prompts_for(model, "llama", 2)
    call = dict(num_beams=3, num_return_sequences=3, max_new_tokens=6, do_sample=False)
    config = GenerationConfig(**call, length_normalization="none", return_dict_in_generate=True, output_scores=True)
    found = GenerationMixin.generate(model, **inputs, generation_config=config, custom_generate=NAME)
    expected = search(model, inputs, **call, length_normalization="none")
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    waiting = GenerationConfig(**call, diversity_penalty=0.5, return_dict_in_generate=True, output_scores=True)
    plain = search(model, inputs, **call)
    same = GenerationMixin.generate(model, **inputs, generation_config=waiting, custom_generate=NAME)
    assert torch.equal(same.sequences, plain.sequences)


def test_a_list_in_the_models_own_configuration_is_refused() -> None:
    model = double_model("llama")
    before = model.generation_config.max_new_tokens
    try:
        model.generation_config.max_new_tokens = [3, 4]
        with pytest.raises(ValueError, match="max_new_tokens"):
            hf_paged_beam.generate(model, **prompts_for(model, "llama", 2), num_beams=2)
    finally:
        model.generation_config.max_new_tokens = before


@pytest.mark.parametrize(("patience", "width", "enough"), [(1.1, 50, 55), (1.1, 100, 110), (0.5, 3, 2), (1.0, 7, 7)])
def test_patience_is_not_rounded_up_for_noise(patience: float, width: int, enough: int) -> None:
    """1.1 · 50 is 55.000000000000007 in floats."""
    prompt = PromptSettings(num_beams=width, max_new_tokens=3, early_stopping=True)
    assert Rules([prompt], Options(patience=patience), num_ends=1, device=CPU)._quota == enough


def test_rows_of_prompts() -> None:
    """Rows are counted prompt by prompt, whatever the widths."""
    beams = BeamRows([2, 0, 3, 1], 3, CPU)
    assert beams.rows_of([2, 3]).tolist() == [2, 3, 4, 5]
    assert beams.grid(torch.arange(6)).tolist()[0] == [0, 1, 0] and beams.grid(torch.arange(6)).tolist()[3] == [5, 5, 5]
    assert torch.equal(beams.rows(beams.grid(torch.arange(6))), torch.arange(6))


def test_estimates_want_a_tensor() -> None:
    model = double_model("llama")
    found = search(model, prompts_for(model, "llama", 1), num_beams=2, num_return_sequences=2, do_sample=True,
                   sampling="stochastic_beam")  # fmt: skip
    with pytest.raises(ValueError, match="values must be a tensor"):
        hf_paged_beam.estimate([1.0, 2.0], found)  # type: ignore[arg-type]
