"""Layers with a sliding window keep no more of a long prompt than further tokens can see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparing import check_equal, check_same_call, returned_cache, search_both
from tiny_models import prompts, prompts_for, tiny_model

from hf_paged_beam import PagedBeamCache
from hf_paged_beam.cache.index import BeamIndex
from hf_paged_beam.cache.layers import PoolLayer
from hf_paged_beam.versions import CACHE_ARGUMENT

NAME, WINDOW = "hf_paged_beam", 4
CALL = dict(num_beams=6, num_return_sequences=6, max_new_tokens=8)


def windowed(kind: str) -> Any:
    """A model whose layers (gemma3: half of them) have a window of four tokens."""
    return tiny_model(kind)


def sliding_layers(cache: Any) -> list[PoolLayer]:
    return [layer for layer in cache.layers if layer.is_sliding]


@pytest.mark.parametrize("path", ["folded", "gathered"])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 40])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_prompts_shorter_and_longer_than_the_window(
    kind: str, length: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to stock; of the prompt a layer keeps what the next token sees, one less than the window."""
    model = windowed(kind)
    slots, told = [], BeamIndex.set_high_water

    def note(index: BeamIndex, report: int) -> int:
        needed = told(index, report)
        slots.append(index.tree_slots)
        return needed

    monkeypatch.setattr(BeamIndex, "set_high_water", note)
    _, ours = check_same_call(
        model, prompts_for(model, kind, 2, length=length), **CALL, ours_only={"beam_attention": path}
    )
    cache = returned_cache(ours)
    layers = sliding_layers(cache)
    assert ours.beam_path == path and layers
    for layer in layers:
        kept = min(cache.index.prompt_length, WINDOW - 1)
        assert layer.dropped == cache.index.prompt_length - kept
        assert layer._keys.shape[2] <= kept + max(slots) + max((length + max(slots)) // 8, 8) + 8


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_memory_does_not_grow_with_a_prompt_beyond_the_window(kind: str) -> None:
    """Bytes of the sliding layers are the same for prompts of 50 and 100 tokens, and less than transformers'."""
    model, held = windowed(kind), {}
    for length in (50, 100):
        stock, ours = search_both(model, prompts_for(model, kind, 2, length=length), **{**CALL, "num_beams": 24})
        held[length] = sum(layer.held_bytes() for layer in sliding_layers(returned_cache(ours)))
        assert returned_cache(ours).usage().bytes_live <= returned_cache(ours).usage().bytes_held
    assert abs(held[50] - held[100]) <= held[50] / 4  # the trees differ
    theirs = [layer for layer in returned_cache(stock).layers if layer.is_sliding]
    separate = sum(layer.keys.numel() * 4 * 2 for layer in theirs)
    usage = ours.kv_usage
    whole = [layer for layer in returned_cache(stock).layers if not layer.is_sliding]
    assert usage.bytes_separate == separate + sum(layer.keys.numel() * 4 * 2 for layer in whole)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_transformers_own_search_and_its_layout(kind: str) -> None:
    """Our cache under transformers' loop drops too, and a copy in its layout is what it would have made itself."""
    model = windowed(kind)
    inputs = prompts_for(model, kind, 2, length=12)
    call = {**CALL, "return_dict_in_generate": True, "output_scores": True, "do_sample": False, "eos_token_id": None}
    stock = model.generate(**inputs, **call)
    cache = PagedBeamCache(model.config, num_beams=6)
    ours = model.generate(**inputs, **call, **{CACHE_ARGUMENT: cache})
    check_equal(stock, _with_path(ours), check_cache=False)
    assert all(layer.dropped == 12 - (WINDOW - 1) for layer in sliding_layers(cache))
    cache.check()
    for mine, theirs in zip(cache.to_dynamic().layers, returned_cache(stock).layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.keys.shape == theirs.keys.shape


def _with_path(output: Any) -> Any:
    output.beam_path = "transformers"
    return output


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_search_goes_on_from_a_cache_that_dropped(kind: str) -> None:
    """The prompt and what was generated serve as a prefix; what was dropped is not seen again."""
    model = windowed(kind)
    ids = prompts(kind, 1, length=12)["input_ids"]
    cache = PagedBeamCache(model.config, num_beams=3)
    cache.accept_wide_prompt(False)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE_ARGUMENT: cache})
    cache.begin_decode(1, ids.device)
    longer = torch.cat([ids, torch.tensor([[7, 8]])], dim=1)
    call = {**CALL, "num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    whole = model.generate(longer, **call, custom_generate=NAME)
    went_on = model.generate(longer, **call, custom_generate=NAME, **{CACHE_ARGUMENT: copy.deepcopy(cache)})
    check_equal(whole, went_on)


def test_layers_with_windows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows and one mask over all slots: each layer drops by its own, which changes nothing of the result."""
    model, inputs = windowed("mistral"), prompts("mistral", 2, length=15)
    call = {**CALL, "return_dict_in_generate": True, "output_scores": True, "beam_attention": "folded"}

    def search() -> Any:
        cache = PagedBeamCache(model.config, num_beams=6)
        cache.layers[1].sliding_window = 7
        return model.generate(**inputs, **call, custom_generate=NAME, **{CACHE_ARGUMENT: cache})

    dropping = search()
    assert [layer.dropped for layer in returned_cache(dropping).layers] == [12, 9]
    monkeypatch.setattr(PoolLayer, "_drop_unseen", lambda layer: None)
    keeping = search()
    assert [layer.dropped for layer in returned_cache(keeping).layers] == [0, 0]
    check_equal(keeping, dropping)


@pytest.mark.parametrize("chunk", [None, 2, 3, 5])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_layer_drops_the_prompt_as_it_comes(kind: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer waits for the others, or for the prompt's last chunk, before it drops what no further token sees."""
    kept, append = [], PoolLayer._append_prompt

    def note(layer: PoolLayer, *states: torch.Tensor) -> Any:
        shown = append(layer, *states)
        if layer.is_sliding:
            kept.append(layer._keys.shape[2])
        return shown

    monkeypatch.setattr(PoolLayer, "_append_prompt", note)
    model = windowed(kind)
    check_same_call(model, prompts_for(model, kind, 2, length=40), **CALL, prefill_chunk_size=chunk)
    assert max(kept) == WINDOW - 1
