"""Random models of the benchmarks; weights do not matter for time and memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

_30M = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4)

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=1000),
    "30m": dict(**_30M, vocab_size=32_000),
    "30m-151936": dict(**_30M, vocab_size=151_936),
    "160m": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
                 num_key_value_heads=8, vocab_size=32_000),
    "qwen3-1.7b": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
                       num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=True),
}  # fmt: skip
"""Llama's architecture, but for names that begin with "qwen3"."""


def config_of(shape: str) -> LlamaConfig | Qwen3Config:
    """The configuration of one of `SHAPES`, without an end token."""
    config_class = Qwen3Config if shape.startswith("qwen3") else LlamaConfig
    return config_class(max_position_embeddings=16384, eos_token_id=None, bos_token_id=None, pad_token_id=0,
                        **SHAPES[shape])  # fmt: skip


def random_model(shape: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A model of one of `SHAPES` that never ends a sequence, so that every run does the same work."""
    torch.manual_seed(0)
    config = config_of(shape)
    with torch.device(device):
        model = Qwen3ForCausalLM(config) if isinstance(config, Qwen3Config) else LlamaForCausalLM(config)
    model = model.eval().to(device=device, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_llama(shape: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A random Llama of one of `SHAPES`, on the CPU."""
    return random_model(shape, dtype)


def random_prompts(model: Any, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    """``input_ids`` and an ``attention_mask`` of ones, both ``[B, P]`` int64."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, model.config.vocab_size, (batch_size, length), generator=generator).to(model.device)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
