"""What is kept of captured decode steps and what is not: weights, hooks, threads, errors; and the step alone."""

from __future__ import annotations

import gc
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from comparing import check_equal, search_both
from test_capture import CALL, TOLD, captured, compiled, plain, said, small_llama, traced_only, verdicts
from tiny_models import DECODER_ONLY, VOCABULARY, prompts, tiny_model
from watching import Watch

import hf_paged_beam
from hf_paged_beam.cache import attention_configs, our_attention, parts_of, running
from hf_paged_beam.cache.captured import CapturedCache, CapturedLayer, CapturedStep, forward_captured
from hf_paged_beam.cache.step import current_step, traced
from hf_paged_beam.generation import capture, linears
from hf_paged_beam.generation.capture import captures_of, drop_captures

__all__ = ["said", "traced_only"]  # fixtures


def test_nothing_of_the_model_is_changed() -> None:
    model, inputs = small_llama(), prompts("llama", 2)
    stock = model.generate(**inputs, **TOLD)
    before = [(dict(vars(part)), type(part)) for part in model.modules()]
    config = dict(vars(model.config))
    compiled(model, inputs, prepack=True)
    assert [(dict(vars(part)), type(part)) for part in model.modules()] == before
    assert dict(vars(model.config)) == config and not linears._holders and current_step() is None
    again = model.generate(**inputs, **TOLD)
    assert torch.equal(stock.sequences_scores, again.sequences_scores)


def test_freed_with_the_model_and_when_asked_for() -> None:
    model, inputs = small_llama(), prompts("llama", 2)
    compiled(model, inputs)
    kept, weight = weakref.ref(captures_of(model)), weakref.ref(model.lm_head.weight)
    drop_captures(model)
    gc.collect()
    assert kept() is None and captured(model) == 0
    compiled(model, inputs)
    assert captured(model) == 1
    kept = weakref.ref(captures_of(model))
    del model
    gc.collect()
    assert kept() is None and weight() is None


@pytest.mark.parametrize("prepack", [False, True])
def test_weights_that_change(prepack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture holds no weight: after a change in place, or of a whole layer, results are the new model's."""
    monkeypatch.setattr(linears, "_SMALLEST", 1)
    model, inputs = small_llama(), prompts("llama", 2)
    before = compiled(model, inputs, prepack=prepack)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    stock, ours = search_both(model, inputs, ours_only={"compile": True, "prepack": prepack}, **CALL)
    check_equal(stock, ours)
    assert (stock.sequences_scores - before.sequences_scores).abs().max() > 1e-3
    layer = torch.nn.Linear(32, 37, bias=False)
    torch.nn.init.normal_(layer.weight, 0, 0.3)
    model.model.layers[0].mlp.up_proj = layer
    check_equal(*search_both(model, inputs, ours_only={"compile": True, "prepack": prepack}, **CALL))


@pytest.mark.slow
def test_a_model_that_is_trained_on(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Searched after each of many epochs, with its weights packed anew: captured to the end."""
    monkeypatch.setattr(linears, "_SMALLEST", 1000)
    model, inputs = small_llama(), prompts("llama", 2)
    with torch._dynamo.config.patch(recompile_limit=5):  # 8 by default
        for _ in range(7):
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
            compiled(model, inputs, prepack=True, max_new_tokens=4)
    assert not said and set(verdicts(model)) == {0}


def test_hooks_that_come_later_and_go_again() -> None:
    """A hook acts from the call after it was added on, and no longer than it is there."""
    model, inputs = small_llama(), prompts("llama", 2)
    expected = compiled(model, inputs)
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, given, output: output * 2)
    check_equal(plain(model, inputs), compiled(model, inputs))
    hook.remove()
    check_equal(expected, compiled(model, inputs))


# --- threads, errors ---


def test_two_threads() -> None:
    model, found = small_llama(), {}
    given = [prompts("llama", 2, seed=seed) for seed in (1, 2, 3)]
    stock = [model.generate(**inputs, **TOLD) for inputs in given]

    def run(number: int) -> None:
        found[number] = [hf_paged_beam.generate(model, **given[number], **TOLD, compile=True) for _ in range(2)]

    with ThreadPoolExecutor() as threads:
        list(threads.map(run, range(3)))
    for number, expected in enumerate(stock):
        for ours in found[number]:
            check_equal(expected, ours)
    assert set(verdicts(model)) == {0} and traced.step is None


def test_a_search_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says to all threads that it compiles; a step that runs as written in another one is not compiled."""
    model, other, inputs = small_llama(), tiny_model("qwen3"), prompts("llama", 2)
    expected, found = plain(other, inputs), []

    def meanwhile() -> None:
        found.append(hf_paged_beam.generate(other, **inputs, **TOLD, compile=False))

    def backend(graph: Any, given: list) -> Any:
        with ThreadPoolExecutor() as threads:
            threads.submit(meanwhile).result()
        return graph

    monkeypatch.setattr(capture, "BACKEND", backend)
    compiled(model, inputs)
    assert len(found) == 1
    check_equal(expected, found[0])


class ModelError(ValueError):
    pass


def test_an_error_inside_a_step(said: list[str]) -> None:
    """The model's own error comes out, the model is as before, and the next search is right."""
    model, inputs, passes = small_llama(), prompts("llama", 2), []
    stock = model.generate(**inputs, **TOLD)
    compiled(model, inputs)

    def fail(module: Any, args: tuple, kwargs: dict) -> None:
        if kwargs["input_ids"].shape[1] == 1:
            passes.append(None)
            raise ModelError("the model's own")

    hook = model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(ModelError, match="the model's own"):
        compiled(model, inputs)
    hook.remove()
    assert passes and traced.step is None and current_step() is None
    assert model.config._attn_implementation == "sdpa" and not linears._holders
    check_equal(stock, compiled(model, inputs))


# --- the step alone ---


class _Pool:
    sliding_window, dropped, _packing = None, 0, None

    def __init__(self, prompts: int, slots: int, heads: int = 2, size: int = 8):
        self._keys, self._values = (torch.zeros(prompts, heads, slots, size, device="meta") for _ in range(2))


@pytest.mark.parametrize("kind", DECODER_ONLY)
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_no_value_is_read(kind: str, batch: int) -> None:
    """On the meta device there are none: a captured step is shapes and operations only."""
    width, slots, model = 4, 20, tiny_model(kind).to("meta")
    rows = batch * width

    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    step = CapturedStep(meta(batch, width, slots, dtype=torch.bool), meta(batch, slots), meta(), meta(rows))
    pools = [_Pool(batch, slots + 1, heads=4 if kind == "gpt2" else 2) for _ in range(2)]
    cache = CapturedCache(layers=[CapturedLayer(pool, step) for pool in pools])
    inputs = {"input_ids": meta(rows, 1), "position_ids": meta(rows, 1)}
    if kind == "gpt2":  # without one it looks for padding among the ids, unless it is compiled
        inputs["attention_mask"] = meta(rows, slots)
    with our_attention(attention_configs(parts_of(model))), running(step), Watch() as watch:
        logits = forward_captured(model, step, cache, inputs)
    assert logits.shape == (rows, 1, VOCABULARY) and "read" not in watch.events
    assert step.all_attended() and watch.made


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_compiled_for_good(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With inductor, and packed weights."""
    monkeypatch.setattr(capture, "BACKEND", "inductor")
    monkeypatch.setattr(linears, "_SMALLEST", 1)
    model = tiny_model(kind)
    for batch in (3, 1):
        stock, ours = search_both(model, prompts(kind, batch), ours_only={"compile": True, "prepack": True}, **CALL)
        check_equal(stock, ours)
    assert 2 <= captured(model) <= 3 and set(verdicts(model)) == {0}
