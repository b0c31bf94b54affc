"""One architecture of each kind of cache and attention, and the path that its keys are read by.

All that transformers registers are looked at by `python tests/sweep_architectures.py`.
"""

from __future__ import annotations

import pytest
from comparing import OLD_RELEASE
from sweep_architectures import outcome
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

PATHS = {
    "llama": ("OK", "folded"),
    "gpt_oss": ("OK", "folded"),  # attention sinks
    "gemma2": ("OK", "folded"),  # soft-capped scores
    "gemma3_text": ("OK", "folded"),  # a window in some layers
    "moshi": ("OK", "folded"),  # a window that the cache alone enforces
    "deepseek_v3": ("OK", "folded"),  # latent attention: keys are made of what the cache keeps
    "falcon": ("OK", "gathered"),  # attention outside transformers' interface
    "qwen3_next": ("OK", "recurrent"),  # a recurrent state beside the pool
    "bamba": ("OK", "recurrent"),
    "recurrent_gemma": ("HANDED", "keeps a state per row outside the cache"),
    "xlnet": ("HANDED", "reorders its cache in a way of its own"),
    "bart": ("OK", "folded"),
    "t5": ("OK", "folded"),  # position biases
    "led": ("OK", "gathered"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_path_of_an_architecture(kind: str) -> None:
    """The search equals transformers', on the path that the architecture allows."""
    seq2seq = kind in ("bart", "t5", "led")
    mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING
    config_class, model_class = next(pair for pair in mapping.items() if pair[0].model_type == kind)
    found = outcome(config_class, model_class, seq2seq)
    if OLD_RELEASE:  # attention and caches were others
        assert found.kind in ("OK", "HANDED", "STOCK"), found
        return
    expected, detail = PATHS[kind]
    assert found.kind == expected and detail in found.detail, found
