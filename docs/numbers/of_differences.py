"""The figures of docs/differences.md that stand outside its generated table."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from transformers import GenerationMixin

from hf_paged_beam.cache import KV_DTYPES
from hf_paged_beam.generation import capture, decode

from .results import last_with_groups, results, rows_of_table, search, section, version, works
from .stated import AtMost, Entry, Figure, Said

PAGE = "docs/differences.md"


def distance_of_scores() -> list[Any]:
    """The largest difference between our scores and transformers', over three searches of the small model."""
    gaps = []
    for word in ("tomato", "hyperparameter", "encyclopaedia"):
        theirs, mine = (
            search(word, custom_generate=name, num_beams=50, num_return_sequences=50).sequences_scores
            for name in (None, "hf_paged_beam")
        )
        gaps.append((theirs - mine).abs().max().item())
    return [AtMost(max(gaps), 20.0)]


def stock_without_a_beam() -> list[Any]:
    """What transformers' search gives a beam that runs no real sequence, less its sign."""
    (found,) = {float(one) for one in re.findall(r"-(1\.?0?e9)", inspect.getsource(GenerationMixin._beam_search))}
    return [found]


def most_categories() -> list[Any]:
    """The longest row that `torch.multinomial` draws from."""
    power = 20
    while power < 30 and _draws(2**power + 1):
        power += 1
    if not _draws(2**power):
        raise ValueError("the limit is no power of 2")
    return [f"2^{power}"]


def _draws(categories: int) -> bool:
    return works(lambda: torch.multinomial(torch.ones(1).expand(categories), 1))


def differences_of_diverse_beams() -> list[Any]:
    """What the other release does stands in brackets behind each."""
    listed = re.search(r"\*\*Diverse beams\*\*(.*?)\n- \*\*", section(PAGE, _SEARCHES), re.DOTALL)
    return [listed[1].count("(there,")] if listed else []


_SEARCHES = "Searches that transformers has not, or no more"


def with_a_scale() -> list[Any]:
    """Of the stored dtypes, those of one byte, which come last."""
    small = [getattr(torch, name).itemsize == 1 for name in KV_DTYPES]
    if small != sorted(small):
        raise ValueError("they do not come last")
    return [sum(small)]


def conditions() -> list[Any]:
    """Beams and versions of the table below."""
    return [results("kv_dtype")["num_beams"], version("kv_dtype", "torch"), version("kv_dtype", "transformers")]


ENTRIES: list[Entry] = [
    Figure(PAGE, "Scores agree within rounding (about # in float32", distance_of_scores),
    Figure(PAGE, "with scores near -# over the length form", stock_without_a_beam),
    Figure(PAGE, "beam sampling with `W · V` above #", most_categories),
    Said(PAGE, "the id that fills a row after its end is -# where", "an id that no token has"),
    Said(PAGE, "where `pad_token_id` is #, as transformers chooses", "an id"),
    Figure(PAGE, "are those of transformers #, the last release that had them", lambda: [last_with_groups()]),
    Figure(PAGE, "# things differ. An end token is shown", differences_of_diverse_beams),
    Figure(PAGE, "(there, near -#, and they count)", stock_without_a_beam),
    Said(PAGE, "made to sum to # before they are drawn from", "what probabilities sum to"),
    Figure(PAGE, "In the # checked steps of `compile=True`", lambda: [capture._CHECKED_STEPS]),
    Figure(PAGE, "the last # with a scale per token and head", with_a_scale),
    Figure(PAGE, "for best sequences of # beams scored anew without rounding (`python -m benchmarks.kv_dtype`, float32 "
                 "models, torch #, transformers #)", conditions),
    Figure(PAGE, "The # routes | route |", lambda: [rows_of_table(section(PAGE, "The four routes"))]),
    Figure(PAGE, "a step of at most # beams of # prompts is run by both paths",
           lambda: [decode._FEW_BEAMS, decode._FEW_PROMPTS]),
    Said(PAGE, "Forward hooks see these # passes", "the passes of the sentence before: by both paths"),
]  # fmt: skip
