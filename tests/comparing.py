"""What "the same as stock" means: scores within a tolerance, sequences exactly, except where stock's scores nearly tie."""

from __future__ import annotations

from typing import Any

import torch

TOLERANCE = 1e-4
NO_CONTINUATION = -1e8
"""transformers gives rows that are no real continuation a score near -1e9 over the length form; ours is -inf."""


def both(model: Any, inputs: dict, *, stock_only: dict | None = None, ours_only: dict | None = None, **settings: Any):
    """The same call by transformers' own search and by ours, after the same random seed."""
    call = dict(return_dict_in_generate=True, output_scores=True, do_sample=False)
    call.update(settings)
    torch.manual_seed(7)
    stock = model.generate(**inputs, **call, **(stock_only or {}))
    torch.manual_seed(7)
    ours = model.generate(**inputs, **call, custom_generate="hf_paged_beam", **(ours_only or {}))
    return stock, ours


def real_scores(scores: torch.Tensor) -> torch.Tensor:
    """Scores with transformers' stand-in for "no continuation" turned into -inf."""
    return scores.masked_fill(scores <= NO_CONTINUATION, -torch.inf)


def check_equal(stock: Any, ours: Any, tolerance: float = TOLERANCE, *, check_cache: bool = True) -> None:
    """Assert that two outputs of beam search say the same."""
    theirs, mine = real_scores(stock.sequences_scores), real_scores(ours.sequences_scores)
    assert mine.shape == theirs.shape
    assert torch.equal(mine.isfinite(), theirs.isfinite()), f"stock {theirs}, ours {mine}"
    finite = theirs.isfinite()
    assert (mine[finite] - theirs[finite]).abs().max() <= tolerance, f"stock {theirs}, ours {mine}"
    assert ours.sequences.dtype == stock.sequences.dtype and ours.beam_indices.dtype == stock.beam_indices.dtype
    if finite.all():
        assert ours.sequences.shape == stock.sequences.shape
        assert ours.beam_indices.shape == stock.beam_indices.shape
    for row in finite.nonzero().flatten().tolist():
        near = ((theirs - theirs[row]).abs() <= tolerance).sum() > 1
        if near:
            continue
        columns = min(ours.sequences.shape[1], stock.sequences.shape[1])
        assert torch.equal(ours.sequences[row, :columns], stock.sequences[row, :columns]), f"row {row}"
    if check_cache and ours.beam_path != "handed over":
        cache = getattr(ours, "cache", None) or ours.past_key_values
        cache.check()


def check_same_call(model: Any, inputs: dict, tolerance: float = TOLERANCE, **settings: Any):
    """Run both and assert equality; returns both outputs."""
    stock, ours = both(model, inputs, **settings)
    check_equal(stock, ours, tolerance)
    return stock, ours
