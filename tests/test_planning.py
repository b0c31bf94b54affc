"""`estimate_memory` beside real searches: transformers' cache to the byte, ours within 10%, and never above `most`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import DECODER_ONLY, prompts_for, tiny_model
from transformers import (
    BartConfig,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from benchmarks.models import config_of
from hf_paged_beam import estimate_memory
from hf_paged_beam.cache import KV_DTYPES
from hf_paged_beam.generation import capture
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


LONG = 512
BESIDE_TREE = 2
SHAPES = [
    (1, 4, 1000, 200), (1, 10, 600, 10), (1, 50, 512, 10), (1, 50, 512, 60), (1, 20, 600, 200), (1, 200, 3000, 10),
    (4, 10, 700, 50), (2, 3, 512, 2),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_ten_percent_of_a_real_run(model: Any, shape: tuple[int, int, int, int]) -> None:
    """Where the prompt has 512 tokens or more, and twice as many as the expected tree."""
    usage = usage_of(model, *shape)
    told = estimate_memory(model.config, *shape)
    assert shape[2] >= max(LONG, BESIDE_TREE * told.nodes)
    assert told.expected == pytest.approx(usage.bytes_held, rel=0.1)
    assert told.separate == usage.bytes_separate
    assert usage.bytes_held <= told.most


SMALL = [(1, 10, 20, 60), (3, 5, 7, 30), (1, 50, 3, 20), (2, 2, 1, 2), (1, 7, 40, 1), (1, 2, 9, 2), (1, 3, 20, 2)]


@pytest.mark.parametrize("captured", [False, True], ids=["as written", "captured"])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_never_above_most(
    model: Any, shape: tuple[int, int, int, int], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees that outweigh their prompts differ; the bound holds for all, and is no wider than it must be."""
    monkeypatch.setattr(capture, "BACKEND", "eager")
    usage = usage_of(model, *shape, compile=captured)
    told = estimate_memory(model.config, *shape)
    batch_size, num_beams, prompt_length, new_tokens = shape
    tokens = prompt_length + num_beams * (new_tokens - 1) + 1
    assert usage.bytes_held <= told.most <= told.token * batch_size * max(tokens * 9 / 8, tokens + 8)
    assert told.separate == usage.bytes_separate
    assert told.expected <= told.most


def test_what_the_benchmarks_recorded() -> None:
    """Every search of compare.json and growth.json: those with long prompts within 10%, none above `most`."""
    seen = 0
    for name in ("compare", "growth"):
        for cell in json.loads((RESULTS / f"{name}.json").read_text())["cells"]:
            shape = [cell[field] for field in ("batch_size", "num_beams", "prompt_length", "new_tokens")]
            if "plain" not in cell.get("engines", {}) or shape[1] == 1:
                continue
            held = {engine: figures["kv_bytes"] for engine, figures in cell["engines"].items()}
            told = estimate_memory(config_of(cell["model"]), *shape)
            assert told.token == cell["physics"]["kv_bytes_per_token"]
            assert held["plain"] <= told.most and held.get("switches", 0) <= told.most
            if cell["prompt_length"] >= max(LONG, BESIDE_TREE * told.nodes):
                seen += 1
                assert told.expected == pytest.approx(held["plain"], rel=0.1), shape
    assert seen >= 7


@pytest.mark.parametrize("kind", [*DECODER_ONLY, "t5", "bart"])
@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES])
def test_kinds_of_models(kind: str, kv_dtype: str | None) -> None:
    """Windows, encoders, and keys in fewer bytes: transformers' cache to the byte, ours within the bound."""
    model = tiny_model(kind, eos=None)
    check(model, prompts_for(model, kind), kv_dtype)


@pytest.mark.parametrize("window", [5, 12, 16])
def test_windows_at_their_edges(window: int) -> None:
    """A window that the prompt fills, that only the answer fills, and that nothing fills."""
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=window)).eval()
    check(model, {"input_ids": torch.arange(3, 21).view(2, 9)})


SEQ2SEQ = dict(vocab_size=99, d_model=32, pad_token_id=0, decoder_start_token_id=0)
T5 = dict(SEQ2SEQ, d_kv=6, d_ff=32, num_heads=4)
BART = dict(SEQ2SEQ, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, encoder_attention_heads=2,
            decoder_attention_heads=4)  # fmt: skip


T5_KINDS, BART_KINDS = ("T5", "MT5", "UMT5"), ("Bart", "MBart", "Marian", "Pegasus", "M2M100")


@pytest.mark.parametrize(
    ("kind", "of_encoder", "of_decoder"),
    [(kind, 4, 2) for kind in T5_KINDS + BART_KINDS] + [(kind, 1, 3) for kind in BART_KINDS],  # T5 itself cannot
)
def test_encoders_and_decoders_of_different_depth(kind: str, of_encoder: int, of_decoder: int) -> None:
    """What the decoder has is what counts."""
    if kind.endswith("T5"):
        settings = dict(T5, num_layers=of_encoder, num_decoder_layers=of_decoder)
    else:
        settings = dict(BART, encoder_layers=of_encoder, decoder_layers=of_decoder)
    config = getattr(transformers, f"{kind}Config")(**settings)
    name = {"Marian": "MarianMTModel"}.get(kind, f"{kind}ForConditionalGeneration")
    check(getattr(transformers, name)(config).eval(), {"input_ids": torch.arange(3, 21).view(2, 9)})


def check(model: Any, inputs: dict[str, Any], kv_dtype: str | None = None) -> None:
    """The estimate beside a search of transformers and one of ours."""
    call = dict(num_beams=3, max_new_tokens=12, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    stock = model.generate(**inputs, **call)
    usage = model.generate(**inputs, **call, kv_dtype=kv_dtype, custom_generate="hf_paged_beam").kv_usage
    encoded = model.config.is_encoder_decoder
    encoder = dict(encoder_length=encoder_positions(model, inputs)) if encoded else {}
    length = 1 if encoded else inputs["input_ids"].shape[1]
    told = estimate_memory(model.config, 2, 3, length, 12, kv_dtype=kv_dtype, **encoder)
    assert told.separate == cache_bytes(getattr(stock, CACHE_ARGUMENT))
    assert usage.bytes_held <= told.most
    assert kv_dtype or told.separate == usage.bytes_separate


def encoder_positions(model: Any, inputs: dict[str, Any]) -> int:
    """How many the encoder makes of these inputs."""
    given = {name: value for name, value in inputs.items() if name != "attention_mask"}
    return model.get_encoder()(**given)[0].shape[1]


def test_numpy_counts(model: Any) -> None:
    """Any integer will do."""
    counts = (1, 4, 100, 10)
    assert estimate_memory(model.config, *map(np.int64, counts)) == estimate_memory(model.config, *counts)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("batch_size", 0, "batch_size must be an integer of at least 1, but got 0"),
        ("num_beams", 2.0, "num_beams must be an integer of at least 1, but got 2.0"),
        ("prompt_length", True, "prompt_length must be an integer"),
        ("max_new_tokens", -1, "max_new_tokens must be an integer"),
        ("dtype", "int8", "dtype must be None or one of float64, float32, float16, bfloat16, but got 'int8'.*kv_dtype"),
        ("kv_dtype", "int4", "kv_dtype must be None or one of 'float16'"),
        ("config", "llama", "config must be a model's configuration .model.config., but got str"),
        ("config", MllamaTextConfig(), "cross_attention_layers"),
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
