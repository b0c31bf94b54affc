"""`compile=True`: results as ever, few captures, none trusted unseen, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import check_equal, search_both
from tiny_models import BUILDERS, DECODERS, VOCABULARY, path_of, prompts, random_model, tiny_model
from transformers import FalconH1Config, FalconH1ForCausalLM, LlamaConfig, LogitsProcessor, LogitsProcessorList
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from watching import forward_rows

import hf_paged_beam
from hf_paged_beam import TokenTrie
from hf_paged_beam.cache.step import traced
from hf_paged_beam.generation import capture
from hf_paged_beam.generation.capture import captures_of

CALL: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 7, "do_sample": False}
TOLD = {**CALL, "return_dict_in_generate": True, "output_scores": True}
KINDS = [kind for kind in BUILDERS if path_of(kind) == "folded"]


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is ours to test; what compiles the graph then is not."""
    monkeypatch.setattr(capture, "BACKEND", "eager")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of captures."""
    messages: list[str] = []
    monkeypatch.setattr(capture.logger, "warning", lambda message, *args: messages.append(message))
    return messages


def small_llama() -> Any:
    """One layer: whatever is traced is traced in half the time."""
    return random_model(LlamaForCausalLM, LlamaConfig(**{**DECODERS, "num_hidden_layers": 1}), torch.float32)


def captured(model: Any) -> int:
    return captures_of(model).captured


def verdicts(model: Any) -> list[int | str]:
    return list(captures_of(model).verdicts.values())


def compiled(model: Any, inputs: dict, **settings: Any) -> Any:
    torch.manual_seed(7)
    return hf_paged_beam.generate(model, **inputs, **{**TOLD, "compile": True, **settings})


def plain(model: Any, inputs: dict, **settings: Any) -> Any:
    return compiled(model, inputs, **settings, compile=False)


# --- results ---


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_stock(kind: str, said: list[str]) -> None:
    """One prompt and several, padded: a capture for each, whole (`fullgraph`), of which no step is left out."""
    model = tiny_model(kind)
    for count, batch in enumerate((3, 1), start=1):
        stock, ours = search_both(model, prompts(kind, batch), ours_only={"compile": True}, **CALL)
        check_equal(stock, ours)
        assert ours.beam_path == "folded" and captured(model) == count and set(verdicts(model)) == {0}
    assert not said and traced.step is None


@pytest.mark.parametrize(("kind", "stored"), [("gemma3", "int8"), ("bart", "int8"), ("mistral", "bfloat16")])
def test_stored_in_fewer_bytes(kind: str, stored: str) -> None:
    model, inputs = tiny_model(kind), prompts(kind, 2, length=9)
    call = {"kv_dtype": stored, "max_new_tokens": 9, "eos_token_id": None}
    check_equal(plain(model, inputs, **call), compiled(model, inputs, **call))
    assert captured(model) == 1 and verdicts(model) == [0]


def test_one_capture_serves_all_sizes() -> None:
    """Other widths, prompts, lengths and batches are no other case; pools that grow are none either."""
    model = small_llama()
    for batch, width, length, steps in (
        (3, 3, 7, 6),
        (2, 3, 7, 6),
        (3, 2, 5, 4),
        (5, 4, 11, 30),
        (2, 7, 2, 5),
        (4, 4, 4, 4),
    ):
        call = dict(num_beams=width, num_return_sequences=1, max_new_tokens=steps, eos_token_id=None)
        inputs = prompts("llama", batch, length, padded=False)
        check_equal(*search_both(model, inputs, ours_only={"compile": True}, **call))
    assert captured(model) == 1
    for width, length, steps in ((3, 7, 4), (2, 5, 3), (4, 16, 25)):
        call = dict(num_beams=width, num_return_sequences=1, max_new_tokens=steps, eos_token_id=None)
        check_equal(*search_both(model, prompts("llama", 1, length), ours_only={"compile": True}, **call))
    assert captured(model) == 2


def test_most_settings() -> None:
    """Whatever acts on logits acts on those of a capture: one model, one capture."""
    model, inputs = small_llama(), prompts("llama", 2, padded=False)
    trie = TokenTrie.from_sequences([[10 + i % 5, 20 + i % 7, 30 + i % 3, 40 + i] for i in range(12)])
    for settings in (
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
        {"do_sample": True, "temperature": 1.5, "top_k": 30},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"trie": trie, "eos_token_id": None, "max_new_tokens": 4},
        {"sampling": "stochastic_beam", "do_sample": True},
        {"output_logits": True},
        {"return_beam_trace": True},
    ):
        first, second = plain(model, inputs, **settings), compiled(model, inputs, **settings)
        assert torch.equal(first.sequences, second.sequences)
        torch.testing.assert_close(second.sequences_scores, first.sequences_scores)
        torch.testing.assert_close(second.scores, first.scores)
        if "output_logits" in settings:
            torch.testing.assert_close(second.logits, first.logits)
    assert captured(model) == 1 and verdicts(model) == [0]


@pytest.mark.parametrize("more", [{"output_hidden_states": True}, {"output_attentions": True}])
def test_more_than_logits_is_not_captured(more: dict) -> None:
    model, inputs = small_llama(), prompts("llama", 2)
    first, second = plain(model, inputs, **more), compiled(model, inputs, **more)
    check_equal(first, second)
    name = "hidden_states" if "output_hidden_states" in more else "attentions"
    assert getattr(second, name) is not None and captured(model) == 0


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_prompts_that_leave(kind: str) -> None:
    """A plain call lets prompts leave that are done: rows, padding and the encoder's keys go with them."""
    model, inputs = tiny_model(kind, eos=[5, *range(20, VOCABULARY, 4)]), prompts(kind, 5)
    call = {**CALL, "max_new_tokens": 12}
    stock = model.generate(**inputs, **call)
    for _ in range(2):
        assert torch.equal(stock, hf_paged_beam.generate(model, **inputs, **call, compile=True))
    with forward_rows(model) as rows:
        hf_paged_beam.generate(model, **inputs, **call)
    assert kind != "llama" or len(set(rows[1:])) > 1  # some leave before others
    assert 1 <= captured(model) <= 2 and set(verdicts(model)) == {0}


# --- prompts with widths of their own ---

LISTS: dict[str, Any] = dict(num_beams=[2, 2, 2, 4], max_new_tokens=[2, 3, 2, 9], do_sample=False, eos_token_id=None)


def test_uneven_widths_run_as_written() -> None:
    model, inputs = small_llama(), prompts("llama", 2)
    call = dict(num_beams=[3, 2], max_new_tokens=5, do_sample=False)
    first = hf_paged_beam.generate(model, **inputs, **call)
    second = hf_paged_beam.generate(model, **inputs, **call, compile=True)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert captured(model) == 0


def test_uneven_widths_with_padding_until_one_prompt_is_left() -> None:
    """Which columns are padding is known for each prompt, not for every so many rows."""
    model, inputs = small_llama(), prompts("llama", 4)
    compiled(model, {name: given[3:] for name, given in inputs.items()}, num_beams=4)  # trusted before
    first = hf_paged_beam.generate(model, **inputs, **LISTS)
    second = hf_paged_beam.generate(model, **inputs, **LISTS, compile=True)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_uneven_widths_say_nothing_of_the_model(said: list[str]) -> None:
    """They are one call's; the next one, whose widths are equal, is captured."""
    model, inputs = small_llama(), prompts("llama", 2)
    hf_paged_beam.generate(model, **inputs, num_beams=[3, 2], max_new_tokens=4, do_sample=False, compile=True)
    compiled(model, inputs)
    assert captured(model) == 1 and verdicts(model) == [0]


# --- nothing is trusted unseen ---


def test_two_steps_are_checked() -> None:
    model, inputs, steps = small_llama(), prompts("llama", 2), []
    as_written = capture.CapturedSteps.__call__

    class Noted(capture.CapturedSteps):
        def __call__(self, inputs: dict, run: Callable) -> Any:
            steps.append(0)

            def noted() -> Any:
                steps[-1] += 1
                return run()

            return as_written(self, inputs, noted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged_beam.generation.decode.CapturedSteps", Noted)
        compiled(model, inputs, eos_token_id=None)
        assert steps == [1, 1, 0, 0, 0, 0]
        steps.clear()
        compiled(model, inputs, eos_token_id=None)
        assert steps == [0] * 6
        steps.clear()
        compiled(model, inputs, eos_token_id=None, kv_dtype="int8")  # another capture
        assert captured(model) == 2 and steps[:3] == [1, 1, 0]


CLOCK = {"length": 0}


@torch._dynamo.assume_constant_result
def clock() -> int:
    """What a capture bakes into itself and never looks at again."""
    return CLOCK["length"]


class Baking(LlamaForCausalLM):
    """Its logits depend on how long the sequences are, by a way that a capture does not see."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        tilt = torch.arange(VOCABULARY) * 0.05
        outputs.logits = outputs.logits + tilt * (clock() % 3)
        return outputs


class Reading(LlamaForCausalLM):
    """Reads a value on the host in every step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if outputs.logits.abs().max().item() > 1.0:
            outputs.logits = outputs.logits * 1.25
        return outputs


class Breaking(LlamaForCausalLM):
    """Cannot be one graph."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return super().forward(*args, **kwargs)


class Tick(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        CLOCK["length"] = input_ids.shape[1]
        return scores


@pytest.mark.parametrize(("kind", "reason"), [(Baking, "logits differ"), (Reading, ""), (Breaking, "")])
def test_models_that_cannot_be_captured(kind: type, reason: str, said: list[str]) -> None:
    """Each runs as it is written, with a warning for every kind of call, once, and equal results."""
    model, inputs = small_llama(), prompts("llama", 2)
    model.__class__ = kind
    found = []
    for settings in ({"custom_generate": None}, {}, {}):
        CLOCK["length"] = 0
        call = {**TOLD, "logits_processor": LogitsProcessorList([Tick()]), "eos_token_id": None}
        more = settings or {"custom_generate": "hf_paged_beam", "compile": True}
        found.append(model.generate(**inputs, **call, **more))
    for ours in found[1:]:
        check_equal(found[0], ours)
    assert len(said) == 1 and kind.__name__ in said[0] and reason in said[0]
    assert all(isinstance(verdict, str) for verdict in verdicts(model)) and traced.step is None


def test_a_recurrent_model(said: list[str]) -> None:
    config = FalconH1Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        pad_token_id=0,
    )  # fmt: skip
    model, inputs = random_model(FalconH1ForCausalLM, config, torch.float32), prompts("llama", 2, padded=False)
    check_equal(plain(model, inputs), compiled(model, inputs))
    assert captured(model) == 0 and len(said) <= 1
