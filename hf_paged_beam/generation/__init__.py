"""The search itself, in tensors. This folder knows nothing of slots: it calls the cache's verbs.

Read `search` first: it lists the steps and the file of each.
"""

from .prompt import OUR_CACHES, HandOver, reason_to_hand_over
from .search import SearchCall, run_search
from .settings import SearchSettings, check_counts, check_options
from .trie import TokenTrie

__all__ = [
    "OUR_CACHES",
    "HandOver",
    "SearchCall",
    "SearchSettings",
    "TokenTrie",
    "check_counts",
    "check_options",
    "reason_to_hand_over",
    "run_search",
]
