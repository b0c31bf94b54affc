"""What a hand-over leaves behind: the same call and result, from caches, random numbers and memory as they were."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from comparing import check_equal, check_same_call, returned_cache
from sweep_architectures import tiny_model as tiny_architecture
from tiny_models import prompts, tiny_model
from transformers import DynamicCache, EncoderDecoderCache, LlamaForCausalLM, LogitsProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import hf_paged_beam
from hf_paged_beam import PagedBeamCache
from hf_paged_beam.cache.layers import PoolLayer
from hf_paged_beam.versions import CACHE_ARGUMENT

NAME = "hf_paged_beam"
CALL = dict(num_beams=4, num_return_sequences=4, max_new_tokens=6, return_dict_in_generate=True, output_scores=True,
            do_sample=False)  # fmt: skip


def stocks(model: Any, inputs: dict[str, Any], call: dict[str, Any]) -> Any:
    """transformers' own search; skips where that raises in an older release."""
    try:
        return model.generate(**inputs, **call)
    except Exception as error:
        if CACHE_ARGUMENT != "cache":  # before 5.24
            pytest.skip(f"transformers' own search raises here in this release: {error!r}")
        raise


class Converts(LlamaForCausalLM):
    """Goes on with another cache after every pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        given = getattr(outputs, CACHE_ARGUMENT)
        other = DynamicCache(config=self.config)
        for number, layer in enumerate(given.layers):
            other.update(layer.keys.clone(), layer.values.clone(), number)
        setattr(outputs, CACHE_ARGUMENT, other)
        return outputs


class Copies(LlamaForCausalLM):
    """Goes on with a deep copy of its cache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        setattr(outputs, CACHE_ARGUMENT, copy.deepcopy(getattr(outputs, CACHE_ARGUMENT)))
        return outputs


class CopiesTheOutside(LlamaForCausalLM):
    """Goes on with a shallow copy, whose layers are ours."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        setattr(outputs, CACHE_ARGUMENT, copy.copy(getattr(outputs, CACHE_ARGUMENT)))
        return outputs


class AsksForMore(LlamaForCausalLM):
    """Asks its cache for something that transformers' own has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **{**kwargs, CACHE_ARGUMENT: self.known(kwargs[CACHE_ARGUMENT])})

    def known(self, cache: Any) -> Any:
        return cache if isinstance(cache, DynamicCache) else cache.what_only_others_have


class KeepsAState(LlamaForCausalLM):
    """Keeps a row of its own for every prompt."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        self.kept = torch.zeros(input_ids.shape[0], 3)
        return super().forward(input_ids=input_ids, **kwargs)


def llama_of(kind: type) -> Any:
    model = tiny_model("llama")
    model.__class__ = kind
    return model


@pytest.mark.parametrize(("kind", "path"), [(Converts, "handed over"), (Copies, "handed over"),
                                            (CopiesTheOutside, "folded"), (KeepsAState, "handed over"),
                                            (AsksForMore, "handed over")])  # fmt: skip
@pytest.mark.parametrize("sampling", [False, True])
def test_models_that_go_on_with_another_cache(kind: type, path: str, sampling: bool) -> None:
    """Beams that are reordered where nobody reads would be wrong. Draws are those of one seed, from its start."""
    model = llama_of(kind)
    settings = {**CALL, "do_sample": sampling}
    _, ours = check_same_call(model, prompts("llama", 2), **settings) if not sampling else _sampled(model, settings)
    assert ours.beam_path == path


def _sampled(model: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    outputs = []
    for route in ({}, {"custom_generate": NAME}):
        torch.manual_seed(5)
        outputs.append(model.generate(**prompts("llama", 2), **settings, **route))
    stock, ours = outputs
    if ours.beam_path == "handed over":
        assert torch.equal(stock.sequences, ours.sequences)
    return stock, ours


class Counts(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


def test_virtual_tokens_are_seen_before_anything_is_chosen() -> None:
    """An adapter that feeds several tokens per step: no processor has been called by then."""
    model = tiny_model("llama")
    prepare, counts = model.prepare_inputs_for_generation, Counts()

    def prepared(input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(input_ids, **kwargs)
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        twice = torch.cat([embeds[:, :1], embeds], dim=1)
        return {**inputs, "input_ids": None, "inputs_embeds": twice, "position_ids": None, "attention_mask": None}

    model.prepare_inputs_for_generation = prepared
    call = {**CALL, "logits_processor": [counts]}
    stock = stocks(model, prompts("llama", 2, padded=False), call)
    calls, counts.calls = counts.calls, 0
    ours = model.generate(**prompts("llama", 2, padded=False), **call, custom_generate=NAME)
    assert ours.beam_path == "handed over" and counts.calls == calls
    assert torch.equal(stock.sequences, ours.sequences)


@pytest.mark.parametrize("route", ["name", "callable"])
def test_an_empty_cache_of_ours_serves_no_hand_over(route: str) -> None:
    """It has taken the prompt by the time that the reason shows; it is emptied again."""
    model = llama_of(Converts)
    cache = PagedBeamCache(model.config, num_beams=4)
    stock = model.generate(**prompts("llama", 2), **CALL)
    way = {"name": NAME, "callable": hf_paged_beam.beam_search}[route]
    ours = model.generate(**prompts("llama", 2), **CALL, custom_generate=way, **{CACHE_ARGUMENT: cache})
    assert ours.beam_path == "handed over"
    check_equal(stock, ours, check_cache=False)
    if route == "name":
        assert cache.held_bytes() == 0 and not cache.index.decoding


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba2"])
def test_the_callers_empty_cache_stays_empty(name: str) -> None:
    """A cache of transformers' that the caller made serves two calls of different sizes, as in transformers."""
    classes = next((pair for pair in MODEL_FOR_CAUSAL_LM_MAPPING.items() if pair[0].model_type == name), None)
    if classes is None:
        pytest.skip(f"this release has no {name}")
    model = tiny_architecture(*classes)
    ids = torch.randint(6, 99, (2, 5), generator=torch.manual_seed(0))
    stocks(model, {"input_ids": ids, CACHE_ARGUMENT: DynamicCache(config=model.config)}, CALL)
    given = DynamicCache(config=model.config)
    hf_paged_beam.generate(model, ids[:1], **{**CALL, "num_beams": 4}, **{CACHE_ARGUMENT: given})
    if given.layers and any(getattr(layer, "keys", None) is not None for layer in given.layers):
        pytest.skip("handed over: transformers' own search fills what it is given")
    stock, ours = (model.generate(ids, **CALL, **route) for route in ({}, {"custom_generate": NAME,
                   CACHE_ARGUMENT: given}))  # fmt: skip
    check_equal(stock, ours, check_cache=False)


def test_nothing_of_the_given_up_search_is_kept() -> None:
    """While transformers' own search runs, the pools of ours are gone."""
    model = llama_of(Converts)
    pools: list[weakref.ref] = []
    alive: list[int] = []
    end = PoolLayer.end_prompt

    def noting(layer: PoolLayer) -> None:
        end(layer)
        pools.append(weakref.ref(layer))

    hook = model.register_forward_pre_hook(lambda *_: alive.append(sum(pool() is not None for pool in pools)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoolLayer, "end_prompt", noting)
        gc.disable()
        try:
            ours = model.generate(**prompts("llama", 2), **CALL, custom_generate=NAME)
        finally:
            gc.enable()
            hook.remove()
    assert ours.beam_path == "handed over" and pools
    assert alive[-5:] == [0] * 5


def test_a_model_that_cannot_be_folded_leaves_no_cycle() -> None:
    """The first call tries both paths; what it kept for that is gone with its output."""
    classes = next(pair for pair in MODEL_FOR_CAUSAL_LM_MAPPING.items() if pair[0].model_type == "bloom")
    model = tiny_architecture(*classes)
    gc.collect()
    gc.disable()
    try:
        ours = hf_paged_beam.generate(model, torch.tensor([[7, 8, 9]]), **CALL)
        assert ours.beam_path == "gathered"
        pool = weakref.ref(returned_cache(ours).layers[0])
        del ours
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_a_prefix_in_our_encoder_decoder_cache(kind: str) -> None:
    """A cache of ours that holds the encoder's keys and the first decoder tokens begins a search."""
    model, inputs = tiny_model(kind), prompts(kind, 2)
    start = torch.tensor([[1, 20, 30], [1, 21, 31]])
    cache = PagedBeamCache(model.config, num_beams=4)
    cache.accept_wide_prompt(False)
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs)
        model(encoder_outputs=encoded, attention_mask=inputs["attention_mask"], decoder_input_ids=start[:, :2],
              **{CACHE_ARGUMENT: cache})  # fmt: skip
    theirs = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    wide = {name: given.repeat_interleave(4, dim=0) for name, given in inputs.items()}
    with torch.no_grad():
        model(**wide, decoder_input_ids=start[:, :2].repeat_interleave(4, dim=0), **{CACHE_ARGUMENT: theirs})
    call = {**inputs, **CALL, "decoder_input_ids": start, "decoder_attention_mask": torch.ones_like(start)}
    stock = model.generate(**call, **{CACHE_ARGUMENT: theirs})
    ours = model.generate(**call, custom_generate=NAME, **{CACHE_ARGUMENT: cache})
    check_equal(stock, ours)
    assert ours.beam_path != "handed over"
