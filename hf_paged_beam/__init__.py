"""Beam search for transformers that never copies a key or a value.

    import hf_paged_beam
    model.generate(**inputs, num_beams=50, custom_generate="hf_paged_beam")

Read the package in the order in which a call goes through it:

    door         how a call arrives, and what transformers prepares          checks: what is refused
    generation/  search: the loop, with a list of its steps and their files
    trace/       what a search did, and its pictures
    cache/       index: which slot holds which token of which beam, then the layers and the folded attention
    versions     everything that differs between transformers versions
"""

from .cache import CacheUsage, PagedBeamCache, PagedBeamEncoderDecoderCache
from .door import PagedBeamMixin, beam_search, disable, enable, generate, register_name
from .estimate import estimate, importance_weights
from .generation import Options, TokenTrie, packed_bytes, release
from .planning import MemoryEstimate, estimate_memory
from .trace import BeamTrace

__version__ = "0.1.0"
__all__ = [
    "BeamTrace",
    "CacheUsage",
    "MemoryEstimate",
    "Options",
    "PagedBeamCache",
    "PagedBeamEncoderDecoderCache",
    "PagedBeamMixin",
    "TokenTrie",
    "beam_search",
    "disable",
    "enable",
    "estimate",
    "estimate_memory",
    "generate",
    "importance_weights",
    "packed_bytes",
    "release",
]

register_name()
