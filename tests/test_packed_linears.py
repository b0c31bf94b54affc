"""Packed weights of linear layers: made once, never stale, freed; and what the caller is told of them."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import check_equal, search_both
from test_linears import CALL, TOLD, layers_of, searched, small_layers_too
from tiny_models import prompts, prompts_for, tiny_model

import hf_paged_beam
from hf_paged_beam.generation import linears
from hf_paged_beam.generation.linears import OneDnnLinears, PackedWeight, drop_packed, packed_bytes

__all__ = ["small_layers_too"]  # a fixture for every test here

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shape of every weight that is packed."""
    shapes: list[torch.Size] = []
    pack = PackedWeight.__init__

    def noted(one: PackedWeight, weight: torch.Tensor, number: int | None = None) -> None:
        shapes.append(weight.shape)
        pack(one, weight, number)

    monkeypatch.setattr(PackedWeight, "__init__", noted)
    return shapes


def test_packed_once(packed: list) -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    for _ in range(3):
        searched(model, inputs, prepack=True)
        searched(model, inputs)
    assert len(packed) == len(layers_of(model))
    assert packed_bytes(model) == sum(4 * layer.weight.numel() for layer in layers_of(model))


def _optimizer_step(layer: torch.nn.Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def _other_parameter(layer: torch.nn.Linear) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 3)


CHANGES: dict[str, Callable[[torch.nn.Linear], Any]] = {
    "an optimizer step": _optimizer_step,
    "weight.data in place": lambda layer: layer.weight.data.mul_(3),
    "other weight.data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 3),
    "load_state_dict": lambda layer: layer.load_state_dict({k: v * 3 for k, v in layer.state_dict().items()}),
    "load_state_dict by assignment": lambda layer: layer.load_state_dict(
        {k: v * 3 for k, v in layer.state_dict().items()}, assign=True
    ),
    "a new parameter": _other_parameter,
    "copy_ in inference mode": lambda layer: _copy_in_inference_mode(layer),
}


def _copy_in_inference_mode(layer: torch.nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.copy_(layer.weight * 3)


@pytest.mark.parametrize("change", CHANGES)
def test_packed_anew_after_a_change(change: str, packed: list) -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    before = searched(model, inputs, prepack=True)
    count = len(packed)
    CHANGES[change](model.model.layers[0].mlp.up_proj)
    stock, ours = search_both(model, inputs, ours_only={"prepack": True}, **CALL)
    check_equal(stock, ours)
    assert len(packed) == count + 1
    assert (stock.sequences_scores - before.sequences_scores).abs().max() > 1e-3  # the change is seen


@torch.no_grad()
def test_one_entry_that_changes() -> None:
    """The weight counts its changes, so that none is too small to be seen."""
    layer, hidden = torch.nn.Linear(512, 512), torch.randn(2, 512)
    with OneDnnLinears([layer], prepack=True):
        layer(hidden)
    layer.weight[3, 5] += 10
    expected = layer(hidden)
    with OneDnnLinears([layer], prepack=True):
        torch.testing.assert_close(layer(hidden), expected)


def test_other_dtypes_of_one_model(packed: list) -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 1)
    searched(model, inputs, prepack=True)
    many = packed_bytes(model)
    searched(model.to(torch.bfloat16), inputs, prepack=True)
    assert packed_bytes(model) == many // 2
    searched(model.to(torch.float64), inputs)
    assert len(packed) == 2 * len(layers_of(model))


def test_freed_with_the_model() -> None:
    model = tiny_model("llama")
    searched(model, prompts("llama", 1), prepack=True)
    held = [weakref.ref(linears._packed[layer].packed) for layer in layers_of(model)]
    numbers = {linears._packed[layer].packed.number for layer in layers_of(model)}
    assert numbers <= set(linears._numbered)
    del model
    gc.collect()
    assert not any(one() for one in held) and not numbers & set(linears._numbered)


def test_freed_when_asked_for(packed: list) -> None:
    model, other = tiny_model("llama"), tiny_model("gpt2")
    for one, kind in ((model, "llama"), (other, "gpt2")):
        searched(one, prompts(kind, 1), prepack=True)
    held = [weakref.ref(linears._packed[layer].packed) for layer in layers_of(model)]
    drop_packed(model)
    gc.collect()
    assert packed_bytes(model) == 0 < packed_bytes(other) and not any(one() for one in held)
    count = len(packed)
    searched(model, prompts("llama", 1), prepack=True)
    assert len(packed) == count + len(held)


def test_weights_made_in_inference_mode_are_not_packed(packed: list) -> None:
    """Nobody counts their changes; they are computed from as they lie."""
    with torch.inference_mode():
        model = tiny_model("llama")
        inputs = prompts_for(model, "llama", 2)
        stock, ours = search_both(model, inputs, ours_only={"prepack": True}, **CALL)
    check_equal(stock, ours)
    assert not packed


# --- what the caller is told ---


def test_nothing_to_pack_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logger = logging.getLogger("hf_paged_beam")
    monkeypatch.setattr(logger, "warning", lambda message, *args, **kwargs: said.append(message))
    type(logger).warning_once.cache_clear() if hasattr(type(logger).warning_once, "cache_clear") else None
    model, inputs = tiny_model("llama", dtype=torch.float64), prompts("llama", 1)
    stock = model.generate(**inputs, **TOLD)
    for _ in range(2):
        check_equal(stock, searched(model, inputs, prepack=True))
    assert len([message for message in said if "prepack=True" in message]) == 1


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="prepack"):
        hf_paged_beam.generate(tiny_model("llama"), **prompts("llama", 1), **CALL, prepack=value)
