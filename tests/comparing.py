"""What "the same as stock" means: scores within a tolerance, sequences exactly unless stock's scores nearly tie."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from packaging.version import parse
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin

from hf_paged_beam.versions import CACHE_ARGUMENT

OLD_RELEASE = parse(transformers.__version__) < parse("5.17")
"""Releases whose own search fails in some of the situations that are compared."""

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


def search_both(model: Any, inputs: dict, *, stock_only: dict | None = None, ours_only: dict | None = None, **settings):
    """As `both`, by the general ``generate``: Whisper's own would repeat prompts for `num_return_sequences`."""
    call = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False, **settings}
    torch.manual_seed(7)
    try:
        stock = GenerationMixin.generate(model, **inputs, **call, **(stock_only or {}))
    except Exception as error:
        if OLD_RELEASE:
            pytest.skip(f"transformers' own search raises here in this release: {error!r}")
        raise
    torch.manual_seed(7)
    ours = GenerationMixin.generate(model, **inputs, **call, custom_generate="hf_paged_beam", **(ours_only or {}))
    return stock, ours


def returned_cache(output: Any) -> Any:
    """The cache that a search returned, under this transformers' name for it."""
    return getattr(output, CACHE_ARGUMENT)


def check_identical(stock: Any, ours: Any, tolerance: float = 1e-5) -> None:
    """Assert that two outputs agree in every field of transformers' own class, row by row and step by step.

    For float64 models, whose float32 scores agree to the last bits, so that near-ties come out in the same order, and
    for searches in which every running beam is a real one. The cache is left to its own tests.
    """
    assert isinstance(ours, type(stock))
    for field in dataclasses.fields(stock):
        theirs, mine = getattr(stock, field.name), getattr(ours, field.name)
        if isinstance(theirs, Cache):
            returned_cache(ours).check()
        else:
            _check_same(theirs, mine, tolerance, field.name)


def check_rows_of_each_prompt(stock: Any, ours: Any, count: int, tolerance: float = 1e-5) -> None:
    """Assert that each prompt's `count` sequences are stock's, in order; only rows of one near-tie may change places.

    A near-tie that reaches the last returned row may also have members that were not returned, so it proves nothing.
    """
    all_scores = real_scores(stock.sequences_scores).view(-1, count)
    for prompt, scores in enumerate(all_scores):
        rows = slice(prompt * count, (prompt + 1) * count)
        theirs, mine = stock.sequences[rows].tolist(), ours.sequences[rows].tolist()
        for row in scores.isfinite().nonzero().flatten().tolist():
            tied = (scores - scores[row]).abs() <= tolerance
            if tied[-1] and int(tied.sum()) > 1:
                continue
            allowed = [theirs[other] for other in tied.nonzero().flatten().tolist()]
            assert mine[row] in allowed, f"prompt {prompt}, row {row}: stock {theirs[row]}, ours {mine[row]}"


def _check_same(theirs: Any, mine: Any, tolerance: float, where: str) -> None:
    assert type(mine) is type(theirs), f"{where}: stock {type(theirs)}, ours {type(mine)}"
    if isinstance(theirs, tuple):
        assert len(mine) == len(theirs), f"{where}: stock has {len(theirs)} entries, ours {len(mine)}"
        for number, (their_part, my_part) in enumerate(zip(theirs, mine, strict=True)):
            _check_same(their_part, my_part, tolerance, f"{where}[{number}]")
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda message: f"{where}: {message}"
        )
    else:
        assert mine == theirs, f"{where}: stock {theirs}, ours {mine}"
