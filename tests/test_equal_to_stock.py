"""Beam search equals transformers' own: every kind of model, width and batch size, read path and dtype.

The other ``test_equal_*`` files go through one theme each: lengths and ends, processors, criteria, outputs, inputs,
sampling, and settings drawn at random.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import NO_CONTINUATION, check_equal, check_identical, check_rows_of_each_prompt, search_both
from tiny_models import (
    BUILDERS,
    DECODER_ONLY,
    ENCODER_DECODER,
    EOS,
    double_model,
    path_of,
    prompts,
    prompts_for,
    shared_model,
    tiny_model,
)
from transformers.generation.utils import GenerateBeamOutput, GenerationMixin

ELEVEN_ENDS = [EOS, *range(20, 30)]
END_IDS: dict[int, Any] = {2: EOS, 3: ELEVEN_ENDS, 5: None, 16: [EOS, 20, 30], 64: EOS}
"""End ids for each width, so that the grid also goes through 0, 1, 3 and 11 of them."""
WHOLE_OUTPUT = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [2, 3, 5, 16, 64])
@pytest.mark.parametrize("kind", BUILDERS)
def test_every_kind_width_and_batch_size(kind: str, width: int, batch_size: int) -> None:
    """All `W` sequences of a padded batch, their scores and their beams are transformers' own."""
    stock, ours = search_both(
        shared_model(kind), prompts(kind, batch_size), num_beams=width, num_return_sequences=width, max_new_tokens=7,
        eos_token_id=END_IDS[width],
    )  # fmt: skip
    check_equal(stock, ours)
    check_rows_of_each_prompt(stock, ours, width)
    assert ours.beam_path == path_of(kind)
    assert len(ours.scores) == len(stock.scores)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", BUILDERS)
def test_one_beam_is_handed_over(kind: str, batch_size: int) -> None:
    """Greedy search is transformers' own call, and says so."""
    stock, ours = search_both(shared_model(kind), prompts(kind, batch_size), num_beams=1, max_new_tokens=7)
    assert ours.beam_path == "handed over"
    assert not isinstance(ours, GenerateBeamOutput)
    assert torch.equal(ours.sequences, stock.sequences)
    torch.testing.assert_close(ours.scores, stock.scores, rtol=0, atol=0)


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_gathered_path_equals_stock(kind: str) -> None:
    """``beam_attention="gathered"`` reads one row per beam, with the model's own attention."""
    stock, ours = search_both(
        shared_model(kind), prompts(kind, 3), num_beams=5, num_return_sequences=5, max_new_tokens=8,
        eos_token_id=[EOS, 20, 30], ours_only={"beam_attention": "gathered"},
    )  # fmt: skip
    check_equal(stock, ours)
    assert ours.beam_path == "gathered"


@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if path_of(kind) == "folded"])
def test_the_folded_path_can_be_asked_for(kind: str) -> None:
    """``beam_attention="folded"`` gives what "auto" gives for these models, to the bit."""
    call = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 6, **WHOLE_OUTPUT}
    model, inputs = shared_model(kind), prompts(kind, 2)
    auto, folded = (
        GenerationMixin.generate(model, **inputs, **call, custom_generate="hf_paged_beam", beam_attention=asked)
        for asked in ("auto", "folded")
    )
    assert folded.beam_path == auto.beam_path == "folded"
    assert torch.equal(folded.sequences, auto.sequences)
    assert torch.equal(folded.sequences_scores, auto.sequences_scores)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_models_attention_setting_does_not_matter(kind: str, attention: str) -> None:
    """Eager and SDPA models both give transformers' result, and keep their setting."""
    model = tiny_model(kind)
    model.set_attn_implementation(attention)
    setting = model.config._attn_implementation  # T5 knew only one before 5.17 or so
    stock, ours = search_both(model, prompts(kind, 2), num_beams=3, num_return_sequences=3, max_new_tokens=6)
    check_equal(stock, ours)
    assert model.config._attn_implementation == setting


@pytest.mark.parametrize(("width", "batch_size"), [(2, 3), (7, 2), (20, 2)])
@pytest.mark.parametrize("kind", BUILDERS)
def test_float64_models_agree_to_the_order_of_the_last_beam(kind: str, width: int, batch_size: int) -> None:
    """In double precision nothing is left to rounding: sequences, beams and the scores of every step are the same."""
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts_for(model, kind, batch_size), num_beams=width, num_return_sequences=width,
        max_new_tokens=8, eos_token_id=[EOS, 20, 30], output_logits=True,
    )  # fmt: skip
    check_identical(stock, ours)


@pytest.mark.parametrize("kind", DECODER_ONLY)
def test_a_long_prompt_and_many_steps(kind: str) -> None:
    """Windows are passed several times over, slots are freed and used again, the pool grows: still the same beams."""
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts(kind, 2, length=40), num_beams=6, num_return_sequences=6, max_new_tokens=40, eos_token_id=EOS
    )
    check_identical(stock, ours)
    assert ours.kv_usage.slots < 2 * (40 + 6 * 39)  # slots were reused: fewer than one for each token ever written


@pytest.mark.parametrize("kind", ENCODER_DECODER)
def test_many_steps_after_a_short_start(kind: str) -> None:
    """An encoder-decoder model's tree begins after a single token."""
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts_for(model, kind, 3), num_beams=6, num_return_sequences=6, max_new_tokens=40
    )
    check_identical(stock, ours)


@pytest.mark.parametrize("kind", BUILDERS)
def test_each_prompt_of_a_batch_is_searched_as_if_alone(kind: str) -> None:
    """Padding and neighbours change nothing: each prompt's beams equal those of the prompt by itself."""
    model, width = double_model(kind), 4
    inputs = prompts_for(model, kind, 4)
    call = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": 9, "eos_token_id": [EOS, 20, 30, 40]}
    call |= {"custom_generate": "hf_paged_beam", **WHOLE_OUTPUT}
    together = GenerationMixin.generate(model, **inputs, **call)
    prompt_columns = together.sequences.shape[1] - together.beam_indices.shape[1]
    for prompt in range(4):
        row = {name: given[prompt : prompt + 1] for name, given in inputs.items()}
        if "attention_mask" in row:
            real = row["attention_mask"][0].bool()
            row = {name: given[:, real] for name, given in row.items()}
        alone = GenerationMixin.generate(model, **row, **call)
        mine = slice(prompt * width, (prompt + 1) * width)
        torch.testing.assert_close(together.sequences_scores[mine], alone.sequences_scores, rtol=1e-5, atol=1e-5)
        generated = alone.sequences[:, -alone.beam_indices.shape[1] :]
        steps = generated.shape[1]
        inside = alone.beam_indices >= 0
        assert torch.equal(together.sequences[mine, prompt_columns : prompt_columns + steps][inside], generated[inside])
        assert (together.beam_indices[mine, steps:] == -1).all()


@pytest.mark.parametrize("kind", BUILDERS)
def test_bfloat16_finds_sequences_as_good_as_stocks(kind: str) -> None:
    """Both results, rescored by the same weights in float32: ours are at most one part in a hundred worse."""
    model = shared_model(kind, torch.bfloat16)
    referee = tiny_model(kind, dtype=torch.bfloat16).float()
    inputs = prompts_for(model, kind, 8)
    stock, ours = search_both(model, inputs, num_beams=8, max_new_tokens=8, eos_token_id=[EOS, 20, 30])
    theirs, mine = (_rescored(referee, prompts_for(referee, kind, 8), output.sequences) for output in (stock, ours))
    assert ours.sequences_scores.isfinite().all()
    assert mine.mean() >= theirs.mean() - 1e-2 * theirs.mean().abs()


def _rescored(model: Any, inputs: dict, sequences: torch.Tensor) -> torch.Tensor:
    """Mean log-probability of each row's generated tokens, its end included: ``[B]`` float32."""
    prompt = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    if model.config.is_encoder_decoder:
        logits = model(**inputs, decoder_input_ids=sequences).logits
    else:
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, sequences.shape[1] - prompt), value=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=sequences, attention_mask=mask, position_ids=positions).logits
    generated = sequences[:, prompt:]
    log_probs = logits[:, prompt - 1 : -1].float().log_softmax(-1).gather(-1, generated.unsqueeze(-1)).squeeze(-1)
    ends = torch.isin(generated, torch.tensor([EOS, 20, 30])).int()
    inside = ends.cumsum(-1) - ends == 0
    return (log_probs * inside).sum(-1) / inside.sum(-1)


def test_the_fixtures_end_early_and_at_different_lengths() -> None:
    """The grid above would prove little if every sequence ran to the longest length."""
    lengths = set()
    for width in (3, 16):
        stock, _ = search_both(
            shared_model("llama"), prompts("llama", 8), num_beams=width, num_return_sequences=width, max_new_tokens=7,
            eos_token_id=END_IDS[width],
        )  # fmt: skip
        assert (stock.sequences_scores > NO_CONTINUATION).all()
        lengths |= set((stock.beam_indices >= 0).sum(-1).tolist())
    assert len(lengths) >= 3
