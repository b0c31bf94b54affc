"""The figures of docs/search.md outside its blocks of code, which tests/test_search_guide.py runs."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged_beam.generation.lengths import length_form

from .results import last_with_groups, search, tensors_of
from .stated import Entry, Figure, Said

PAGE = "docs/search.md"


def patience_of_two() -> list[Any]:
    """The value, and how many sequences are waited for, over the beams: seen from the search that keeps them."""
    asked = 2.0
    found = search("cubs'", early_stopping=True, patience=asked, num_return_sequences=4, return_beam_trace=True)
    plain = search("cubs'", early_stopping=True, num_return_sequences=4, return_beam_trace=True)
    finished = [int(one.beam_trace.finished.sum()) for one in (found, plain)]
    if finished[0] < asked * 4 or not 4 <= finished[1] < asked * 4:
        raise ValueError(f"{finished} sequences had finished when the searches stopped")
    return [asked, asked]


def constants_of_gnmt() -> list[Any]:
    """The form is ``((a + n) / b) ** exponent``: `a` and `b` from two of its values."""
    first, second = length_form(torch.tensor([1, 2]), 1.0, "gnmt").tolist()
    divisor = 1 / (second - first)
    return [first * divisor - 1, divisor]


def bytes_of_a_trace() -> list[Any]:
    """Of the trace's arrays, per beam and step; returned sequences, which are not per step, left out."""
    trace = search("tomato", return_beam_trace=True).beam_trace
    held = sum(value.nbytes for value in tensors_of(trace) if value.dim() == 3)
    return [held / trace.running.numel()]


ENTRIES: list[Entry] = [
    Said(PAGE, "have -# in `item_ids`", "an index that no item has"),
    Said(PAGE, "Different pronunciations among # beams", "a setting of the picture's searches"),
    Said(PAGE, "# groups may find the same sequence", "any pair of groups"),
    Figure(PAGE, "`patience=#` waits for # as many", patience_of_two),
    Said(PAGE, "`patience=#` stops earlier", "a setting"),
    Figure(PAGE, "in the form that transformers had until #", lambda: [last_with_groups().rpartition(".")[0]]),
    Said(PAGE, "stays below # at a source token", "the largest coverage, of the formula"),
    Said(PAGE, "Cross-attention of # sequences", "panels of the picture"),
    Said(PAGE, "Σ over generated tokens of attention, #))", "the formula's"),
    Figure(PAGE, "divides by `((# + n) / #) ** length_penalty`", constants_of_gnmt),
    Figure(PAGE, "Cost: # bytes per beam and step", bytes_of_a_trace),
    Said(PAGE, "`=` is one keyword with # values", "what the sign means"),
]  # fmt: skip
