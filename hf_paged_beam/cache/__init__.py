"""Keys and values of a beam tree, each stored once. This folder knows nothing of scores.

Read in this order: `rows` (which row is which beam), `index` (which slot holds which token of which beam), `layers`
(the pools), `beside_keys` (pools with more than keys), `packing` (pools in fewer bytes), `cache` (what transformers
sees), then the folded read: `step` (what is running), `mask` (who sees which slot), `attention`, `borrow` (how the
model comes to call it), `captured` (the same step in tensors alone).
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import folded_attention
from .borrow import NAME, AsWritten, attention_before, attention_configs, is_compiled, our_attention, parts_of
from .cache import CacheUsage, PagedBeamCache, PagedBeamEncoderDecoderCache, adopt_prefix
from .captured import CapturedStep, can_capture, captured_cache, captured_step, forward_captured
from .layers import GROWTH, LEAST_SPARE, PoolLayer, SeveralTokensError
from .mask import pool_mask
from .packing import KV_DTYPES, Packing, stored_dtype
from .rows import BeamRows
from .step import CannotFoldError, FoldedStep, running

AttentionInterface.register(NAME, folded_attention)
AttentionMaskInterface.register(NAME, pool_mask)

__all__ = [
    "GROWTH",
    "KV_DTYPES",
    "LEAST_SPARE",
    "AsWritten",
    "BeamRows",
    "CacheUsage",
    "CannotFoldError",
    "CapturedStep",
    "FoldedStep",
    "Packing",
    "PagedBeamCache",
    "PagedBeamEncoderDecoderCache",
    "PoolLayer",
    "SeveralTokensError",
    "adopt_prefix",
    "attention_before",
    "attention_configs",
    "can_capture",
    "captured_cache",
    "captured_step",
    "forward_captured",
    "is_compiled",
    "our_attention",
    "parts_of",
    "running",
    "stored_dtype",
]
