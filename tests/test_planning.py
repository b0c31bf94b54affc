"""`estimate_memory` beside real searches: transformers' cache to the byte, ours within 10%, and never above `most`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DECODER_ONLY, prompts_for, tiny_model
from transformers import BartConfig, DeepseekV3Config, LlamaConfig, LlamaForCausalLM, MambaConfig

from hf_paged_beam import estimate_memory
from hf_paged_beam.cache import KV_DTYPES
from hf_paged_beam.side_by_side import cache_bytes
from hf_paged_beam.versions import CACHE_ARGUMENT

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def usage_of(model: Any, batch_size: int, num_beams: int, prompt_length: int, new_tokens: int, **settings: Any) -> Any:
    """What our cache held at the end of a search of random prompts that ran to its longest."""
    torch.manual_seed(0)
    prompts = torch.randint(3, model.config.get_text_config().vocab_size, (batch_size, prompt_length))
    call = dict(num_beams=num_beams, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    found = model.generate(prompts, **{**call, **settings}, eos_token_id=None, custom_generate="hf_paged_beam")
    assert found.kv_usage is not None
    return found.kv_usage


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A small random model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


SHAPES = [(1, 4, 1000, 200), (1, 10, 600, 10), (1, 50, 512, 10), (1, 200, 3000, 10), (4, 10, 700, 50), (2, 3, 512, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_ten_percent_of_a_real_run(model: Any, shape: tuple[int, int, int, int]) -> None:
    """Prompts of 512 tokens and more, ours; transformers' to the byte."""
    usage = usage_of(model, *shape)
    told = estimate_memory(model.config, *shape, torch.float32)
    assert told.expected == pytest.approx(usage.bytes_held, rel=0.1)
    assert told.separate == usage.bytes_separate
    assert usage.bytes_held <= told.most


@pytest.mark.parametrize(
    "shape", [(1, 10, 20, 60), (3, 5, 7, 30), (1, 50, 3, 20), (2, 2, 1, 2), (1, 7, 40, 1)], ids=str
)
def test_never_above_most(model: Any, shape: tuple[int, int, int, int]) -> None:
    """Trees that outweigh their prompts differ; the bound holds for all, and is no wider than it must be."""
    usage = usage_of(model, *shape)
    told = estimate_memory(model.config, *shape, torch.float32)
    batch_size, num_beams, prompt_length, new_tokens = shape
    tokens = prompt_length + num_beams * (new_tokens - 1)
    assert usage.bytes_held <= told.most <= told.token * batch_size * max(tokens * 9 / 8, tokens + 8)
    assert told.separate == usage.bytes_separate
    assert told.expected <= told.most


def test_what_the_benchmarks_recorded() -> None:
    """Every search of compare.json and growth.json: the prompts from 512 tokens on within 10%, none above `most`."""
    seen = 0
    for name in ("compare", "growth"):
        for cell in json.loads((RESULTS / f"{name}.json").read_text())["cells"]:
            shape = [cell[field] for field in ("batch_size", "num_beams", "prompt_length", "new_tokens")]
            if "plain" not in cell.get("engines", {}) or shape[1] == 1:
                continue
            held, token = cell["engines"]["plain"]["kv_bytes"], cell["physics"]["kv_bytes_per_token"]
            config = LlamaConfig(hidden_size=token // 8, num_attention_heads=1, num_hidden_layers=1, dtype="float32")
            told = estimate_memory(config, *shape)
            assert told.token == token and held <= told.most
            if cell["prompt_length"] >= 512:
                seen += 1
                assert told.expected == pytest.approx(held, rel=0.1), shape
    assert seen >= 7


def test_transformers_cache_to_the_byte(model: Any) -> None:
    """`separate` is what transformers' own cache holds in the end."""
    prompts = torch.randint(3, 2000, (2, 9), generator=torch.manual_seed(0))
    found = model.generate(prompts, num_beams=4, max_new_tokens=6, do_sample=False, eos_token_id=None,
                           return_dict_in_generate=True)  # fmt: skip
    told = estimate_memory(model.config, 2, 4, 9, 6)
    assert told.separate == cache_bytes(getattr(found, CACHE_ARGUMENT))


@pytest.mark.parametrize("kind", [*DECODER_ONLY, "t5", "bart"])
@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES])
def test_kinds_of_models(kind: str, kv_dtype: str | None) -> None:
    """Windows, encoders, and keys in fewer bytes: transformers' bytes exactly (in its dtype), ours within the bound."""
    own = tiny_model(kind, eos=None)
    inputs = prompts_for(own, kind)
    call = dict(num_beams=3, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    usage = own.generate(**inputs, **call, kv_dtype=kv_dtype, custom_generate="hf_paged_beam").kv_usage
    encoder = dict(encoder_length=encoder_positions(own, inputs)) if own.config.is_encoder_decoder else {}
    length = 1 if own.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    told = estimate_memory(own.config, 2, 3, length, 12, kv_dtype or torch.float32, **encoder)
    assert told.separate == usage.bytes_separate
    assert usage.bytes_held <= told.most


def encoder_positions(model: Any, inputs: dict[str, Any]) -> int:
    return model.get_encoder()(**{name: given for name, given in inputs.items() if name != "attention_mask"})[0].shape[
        1
    ]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("batch_size", 0, "batch_size must be an integer of at least 1, but got 0"),
        ("num_beams", 2.0, "num_beams must be an integer of at least 1, but got 2.0"),
        ("prompt_length", True, "prompt_length must be an integer"),
        ("max_new_tokens", -1, "max_new_tokens must be an integer"),
        ("dtype", "int4", "dtype must be None or one of float64, float32, float16"),
        ("encoder_length", 5, "has no encoder: leave it out"),
        ("config", MambaConfig(), "MambaConfig"),
        ("config", BartConfig(), "has an encoder: say how long its output is"),
        ("config", DeepseekV3Config(), "kv_lora_rank"),
    ],
)
def test_refuses(model: Any, name: str, value: Any, words: str) -> None:
    settings = dict(config=model.config, batch_size=1, num_beams=4, prompt_length=5, max_new_tokens=3)
    with pytest.raises(ValueError, match=words):
        estimate_memory(**{**settings, name: value})
