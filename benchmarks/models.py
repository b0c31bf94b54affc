"""Random models of the benchmarks; weights do not matter for time and memory."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=1000),
    "30m": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=4, vocab_size=32000),
    "160m": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
                 num_key_value_heads=8, vocab_size=32000),
}  # fmt: skip


def random_llama(shape: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama of one of `SHAPES` that never ends a sequence, so that every run does the same work."""
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=16384, eos_token_id=None, bos_token_id=None, pad_token_id=0,
                         **SHAPES[shape])  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_prompts(model: LlamaForCausalLM, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    """``input_ids`` and an ``attention_mask`` of ones, both ``[B, P]`` int64."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, model.config.vocab_size, (batch_size, length), generator=generator)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
