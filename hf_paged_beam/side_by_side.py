"""The same call by transformers' own search and by ours, in one process: same beams or not, seconds, bytes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from . import versions
from .versions import GenerativeModel

NO_SEQUENCE = -1e8
"""transformers gives rows that are no sequence a score of -1e9 over the length form; here they have -inf."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
    """One comparison.

    Attributes:
        stock, ours: the outputs of both.
        stock_seconds, our_seconds: medians over the rounds.
        ratios: stock's seconds over ours, round by round.
        stock_bytes, our_bytes: key and value storage that each held when it ended.
    """

    stock: Any
    ours: Any
    stock_seconds: float
    our_seconds: float
    ratios: list[float]
    stock_bytes: int
    our_bytes: int

    @property
    def ratio(self) -> float:
        """Median of the ratios of the rounds."""
        return statistics.median(self.ratios)

    @property
    def largest_score_difference(self) -> float:
        """Between the scores of all returned sequences."""
        stock, ours = self.stock.sequences_scores, self.ours.sequences_scores
        stock = torch.where(stock <= NO_SEQUENCE, -torch.inf, stock)
        gap = torch.where(stock == ours, 0.0, (stock - ours).abs())
        return gap.max().item()  # host read: reporting

    @property
    def same_sequences(self) -> bool:
        """Whether every returned sequence is the same, in the same order."""
        return self.stock.sequences.shape == self.ours.sequences.shape and torch.equal(
            self.stock.sequences, self.ours.sequences
        )


def compare(model: GenerativeModel, inputs: dict[str, Any], *, rounds: int = 3, **settings: Any) -> SideBySide:
    """Run both, alternating, after one warm-up each.

    Args:
        model: the model.
        inputs: of ``generate``.
        rounds: timed rounds.
        **settings: of ``generate``; scores are always returned.
    """
    call = {"return_dict_in_generate": True, "output_scores": False, **settings}

    def stock() -> Any:
        return model.generate(**inputs, **call)

    def ours() -> Any:
        return model.generate(**inputs, **call, custom_generate="hf_paged_beam")

    scored = {**call, "output_scores": True}
    mine = model.generate(**inputs, **scored, custom_generate="hf_paged_beam")  # these two warm up as well
    theirs = model.generate(**inputs, **scored)
    pairs = [(_seconds(stock, model.device), _seconds(ours, model.device)) for _ in range(rounds)]
    return SideBySide(
        stock=theirs,
        ours=mine,
        stock_seconds=statistics.median(pair[0] for pair in pairs),
        our_seconds=statistics.median(pair[1] for pair in pairs),
        ratios=[pair[0] / pair[1] for pair in pairs],
        stock_bytes=cache_bytes(getattr(theirs, versions.CACHE_ARGUMENT)),
        our_bytes=mine.kv_usage.bytes_held if getattr(mine, "kv_usage", None) else 0,
    )


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values in one of transformers' caches, encoder-decoder pairs included."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    caches = [part for part in parts if part is not None] or [cache]
    tensors = [
        tensor
        for part in caches
        for layer in part.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
