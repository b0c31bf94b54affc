"""Which path reads the keys: folded where that gives what the model's own attention gives, gathered elsewhere."""

from __future__ import annotations

import pytest
import torch
from comparing import check_equal
from tiny_models import prompts, tiny_model
from transformers.models.llama.modeling_llama import LlamaAttention
from watching import forward_rows, of_its_own_class

import hf_paged_beam

CALL = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 6, "do_sample": False}
CALL |= {"return_dict_in_generate": True, "output_scores": True}


def with_scaling(change) -> torch.nn.Module:
    """A tiny Llama whose attention changes its scaling by what it is given."""
    model = of_its_own_class(tiny_model("llama"))

    class Attention(LlamaAttention):
        def forward(self, hidden_states, *args, **kwargs):
            self.scaling = change(self.head_dim**-0.5, kwargs)
            return super().forward(hidden_states, *args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    return model


def by_the_width_of_the_mask(scaling: float, kwargs: dict) -> float:
    """Attention that takes the width of the mask for the length of the sequence; a pool is wider."""
    return scaling / (1 + 0.05 * kwargs["attention_mask"].shape[-1])


def test_a_model_that_counts_slots_is_gathered() -> None:
    """Nothing fails when it is folded, and all scores would be wrong; comparing one step tells, once for all calls."""
    model, inputs = with_scaling(by_the_width_of_the_mask), prompts("llama", 2)
    stock = model.generate(**inputs, **CALL)
    for more in (1, 0):
        with forward_rows(model) as rows:
            ours = hf_paged_beam.generate(model, **inputs, **CALL)
        check_equal(stock, ours)
        assert ours.beam_path == "gathered"
        assert len(rows) == 6 + 2 * more
    wrong = hf_paged_beam.generate(model, **inputs, **CALL, beam_attention="folded")
    assert (wrong.sequences_scores - stock.sequences_scores).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "t5", "bart"])
def test_both_paths_run_once_and_then_the_folded_one(kind: str) -> None:
    """The first call of a kind of model runs a step of few beams by both paths; its result is that of the next."""
    model, inputs = of_its_own_class(tiny_model(kind)), prompts(kind, 2)
    stock, found = model.generate(**inputs, **CALL), []
    for more in (1, 0):
        with forward_rows(model) as rows:
            found.append(hf_paged_beam.generate(model, **inputs, **CALL))
        assert len(rows) == 6 + 2 * more and found[-1].beam_path == "folded"
        check_equal(stock, found[-1])
    assert torch.equal(found[0].sequences_scores, found[1].sequences_scores)


def test_other_ranks_count_the_passes() -> None:
    """With `synced_gpus` all ranks run the model equally often, whether this process met the model before or not."""
    model, inputs = of_its_own_class(tiny_model("llama")), prompts("llama", 2)
    model._has_unfinished_sequences = lambda over, synced, device: not over
    with forward_rows(model) as rows:
        ours = hf_paged_beam.generate(model, **inputs, **CALL, synced_gpus=True)
    assert len(rows) == 6 and ours.beam_path == "folded"
