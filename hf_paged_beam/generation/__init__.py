"""The search itself, in tensors. This folder knows nothing of slots: it calls the cache's verbs.

Read `search` first: it lists the steps and the file of each.
"""

from .kept import packed_bytes, release
from .prompt import OUR_CACHES, HandOver, reason_to_hand_over
from .search import SearchCall, run_search
from .settings import LISTED, Options, SearchSettings, check_counts, check_lists
from .stochastic import importance_weights
from .trie import TokenTrie

__all__ = [
    "LISTED",
    "OUR_CACHES",
    "HandOver",
    "Options",
    "SearchCall",
    "SearchSettings",
    "TokenTrie",
    "check_counts",
    "check_lists",
    "importance_weights",
    "packed_bytes",
    "reason_to_hand_over",
    "release",
    "run_search",
]
