"""Layers that keep something beside keys and values: a recurrent state, or the keys of an indexer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparing import check_equal, check_same_call, returned_cache, search_both
from sweep_architectures import tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from watching import forward_rows, watching

import hf_paged_beam
from hf_paged_beam import PagedBeamCache
from hf_paged_beam.cache.beside_keys import IndexedPoolLayer, RecurrentPoolLayer
from hf_paged_beam.cache.step import FoldedStep
from hf_paged_beam.versions import CACHE_ARGUMENT

NAME = "hf_paged_beam"
KINDS = {
    "falcon_h1": RecurrentPoolLayer,
    "deepseek_v32": IndexedPoolLayer,
    "glm_moe_dsa": IndexedPoolLayer,
    "qwen4_exp_text": IndexedPoolLayer,
}
CALL = dict(num_beams=5, num_return_sequences=5, max_new_tokens=8, return_dict_in_generate=True, output_scores=True,
            do_sample=False)  # fmt: skip


def built(kind: str) -> Any:
    """A tiny model, and its kind of layer; skips where this release has no such model or layer."""
    classes = next((pair for pair in MODEL_FOR_CAUSAL_LM_MAPPING.items() if pair[0].model_type == kind), None)
    if classes is None:
        pytest.skip(f"this release has no {kind}")
    try:
        model = tiny_model(*classes)
    except Exception as error:
        pytest.skip(f"no tiny {kind} in this release: {error}")
    cache = PagedBeamCache(model.config, num_beams=2)
    if not any(isinstance(layer, (RecurrentPoolLayer, IndexedPoolLayer)) for layer in cache.layers):
        pytest.skip(f"in this release {kind} keeps its cache in another form")
    if hf_paged_beam.generate(model, **padded_prompts(model), **CALL).beam_path == "handed over":
        pytest.skip(f"in this release {kind} puts more on its cache than layers")
    return model


def padded_prompts(model: Any, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(6, model.config.vocab_size, (2, length), generator=torch.manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_stock(kind: str) -> None:
    """All beams, for batches and alone, and what is held is a tree."""
    model = built(kind)
    inputs = padded_prompts(model)
    _, ours = check_same_call(model, inputs, **CALL)
    layers = returned_cache(ours).layers
    assert any(type(layer) is KINDS[kind] for layer in layers)
    assert len({tuple(row) for row in ours.sequences.tolist()}) == 10
    assert ours.kv_usage.bytes_held < ours.kv_usage.bytes_separate
    check_same_call(model, {name: given[:1] for name, given in inputs.items()}, **CALL)


@pytest.mark.parametrize("name", ["falcon_h1", "bamba", "qwen3_next", "mamba2", "jamba"])
def test_one_padded_prompt(name: str) -> None:
    """Padding is left out of recurrent states though there is one row; transformers' own search has one per beam."""
    classes = next((pair for pair in MODEL_FOR_CAUSAL_LM_MAPPING.items() if pair[0].model_type == name), None)
    if classes is None:
        pytest.skip(f"this release has no {name}")
    model = tiny_model(*classes)
    stock, ours = search_both(model, {part: given[1:] for part, given in padded_prompts(model).items()}, **CALL)
    check_equal(stock, ours)


def test_a_hybrid_layer_is_folded() -> None:
    """No key is made for a beam alone but the newest, though the layer keeps a state per beam."""
    model = built("falcon_h1")
    inputs = padded_prompts(model, 24)
    hf_paged_beam.generate(model, **inputs, **CALL)
    with watching(model) as watch:
        ours = hf_paged_beam.generate(model, **inputs, **CALL)
    assert ours.beam_path == "recurrent"
    heads = {layer._keys.shape[1] for layer in returned_cache(ours).layers}
    shapes = [shape for phase, _, shape, _ in watch.made if phase >= 3 and len(shape) == 4]
    of_beams = [shape for shape in shapes if shape[0] == 10 and shape[1] in heads and shape[2] > 24]
    assert not of_beams


def test_an_indexer_cannot_be_folded() -> None:
    model = built("deepseek_v32")
    with pytest.raises(ValueError, match="needs all attention layers in the pool"):
        hf_paged_beam.generate(model, **padded_prompts(model), **CALL, beam_attention="folded")


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_in_chunks(kind: str) -> None:
    model = built(kind)
    check_same_call(model, padded_prompts(model), **CALL, prefill_chunk_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_our_cache_under_transformers_own_search(kind: str) -> None:
    model = built(kind)
    inputs = padded_prompts(model)
    stock = model.generate(**inputs, **CALL)
    ours = model.generate(**inputs, **CALL, **{CACHE_ARGUMENT: PagedBeamCache(model.config, num_beams=5)})
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=1e-4, rtol=0)
    assert torch.equal(ours.sequences, stock.sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_to_dynamic_gives_transformers_layout(kind: str) -> None:
    """Layer by layer what transformers' own search returns: keys, values, and what is beside them."""
    model = built(kind)
    call = {**CALL, "eos_token_id": None, "max_new_tokens": 5}
    stock, ours = (
        model.generate(**padded_prompts(model), **call, **route) for route in ({}, {"custom_generate": NAME})
    )
    theirs, mine = returned_cache(stock), returned_cache(ours).to_dynamic()
    for number, (their_layer, my_layer) in enumerate(zip(theirs.layers, mine.layers, strict=True)):
        assert type(my_layer) is type(their_layer)
        for name, given in vars(their_layer).items():
            if name == "max_batch_size":  # of the prompt, in releases that note it
                continue
            same_state(getattr(my_layer, name), given, f"layer {number} {name}")


def same_state(mine: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3, msg=lambda message: f"{where}: {message}")
    elif isinstance(theirs, dict):
        for key, part in theirs.items():
            same_state(mine[key], part, f"{where}[{key}]")
    else:
        assert mine == theirs, where


def test_a_state_follows_a_step_that_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first folded step of a hybrid fails after its states have moved on: gathered, it begins where they were."""
    model = copy.deepcopy(built("falcon_h1"))  # that nothing is known of
    inputs = padded_prompts(model)
    stock = model.generate(**inputs, **CALL)
    monkeypatch.setattr(FoldedStep, "all_attended", lambda self: False)
    model._has_unfinished_sequences = lambda over, synced_gpus, device: not over  # as if all ranks were done at once
    with forward_rows(model) as rows:
        ours = hf_paged_beam.generate(model, **inputs, **CALL, synced_gpus=True)
    check_equal(stock, ours)
    assert len(rows) == 1 + 8  # the prompt, seven steps, and the first of them again


@pytest.mark.parametrize("kind", KINDS)
def test_a_used_cache_is_no_prefix(kind: str) -> None:
    """What is beside the keys cannot be taken over; the error says how transformers' own search can go on."""
    model = built(kind)
    first = hf_paged_beam.generate(model, **padded_prompts(model), **CALL)
    with pytest.raises(ValueError, match=r"holds more or less than the keys.*cache\.to_dynamic\(\)"):
        hf_paged_beam.generate(model, first.sequences[::5], **CALL, **{CACHE_ARGUMENT: returned_cache(first)})


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_reset(kind: str) -> None:
    model = built(kind)
    ours = hf_paged_beam.generate(model, **padded_prompts(model), **CALL)
    cache = copy.deepcopy(returned_cache(ours))
    assert cache.held_bytes() == returned_cache(ours).held_bytes() > 0
    cache.reset()
    assert cache.held_bytes() == 0 and not cache.index.decoding
    again = model.generate(**padded_prompts(model), **CALL, **{CACHE_ARGUMENT: cache}, custom_generate=NAME)
    check_equal(ours, again)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_bytes(kind: str) -> None:
    """`kv_dtype` packs the indexer's keys too, and leaves recurrent states as they are."""
    model = built(kind)
    whole, packed = (
        hf_paged_beam.generate(model, **padded_prompts(model), **CALL, kv_dtype=kind_of_bytes)
        for kind_of_bytes in (None, "bfloat16")
    )
    assert packed.kv_usage.bytes_separate * 2 == whole.kv_usage.bytes_separate
    torch.testing.assert_close(packed.sequences_scores, whole.sequences_scores, atol=0.2, rtol=0)
