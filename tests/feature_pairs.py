"""The features of the search, and which of them cannot be had together. `test_feature_pairs.py` tries every pair.

`markdown` writes the table of docs/search.md:

    python tests/feature_pairs.py --markdown
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_paged_beam import TokenTrie

PAGE = Path(__file__).parent.parent / "docs" / "search.md"
VOCABULARY, PAD, START, END, OTHER_END = 12, 0, 1, 5, 7
WORDS = (2, 3, 4, 6, 8, 9, 10, 11)
"""Tokens that are neither special nor an end."""

EVERY_BEAM = "as many as num_beams"
BASE = dict(
    num_beams=4, num_return_sequences=2, max_new_tokens=6, eos_token_id=END, do_sample=False,
    return_dict_in_generate=True,
)  # fmt: skip
"""The call that features are added to, for two prompts."""


class NoTwins(LogitsProcessor):
    """A user's own processor, of which nothing is known: forbids a token right after itself, and notes how many rows
    it was shown."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(scores))
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class Feature:
    """One feature.

    Attributes:
        name: as the table shows it.
        own: keywords of ``generate`` that are the feature.
        needs: keywords that it asks for, or shows itself with, unless another feature sets them.
        encoder: whether it needs an encoder-decoder model.
    """

    name: str
    own: dict[str, Any]
    needs: dict[str, Any] = dataclasses.field(default_factory=dict)
    encoder: bool = False


def _items(remainder: int) -> list[list[int]]:
    """Items of one to three tokens, a third of all that there are."""
    every = [list(item) for length in (1, 2, 3) for item in itertools.product(WORDS, repeat=length)]
    return [item for item in every if sum(item) % 3 == remainder]


ENDED_ITEMS = _items(0)
LONG_ITEMS = [[item for item in _items(remainder) if len(item) == 3] for remainder in (1, 2)]
_TRIE = TokenTrie.from_sequences(ENDED_ITEMS, eos_token_id=END)
_TRIES = [TokenTrie.from_sequences(items) for items in LONG_ITEMS]

FEATURES = {
    "trie": Feature("`trie`, one for all", {"trie": _TRIE}),
    "tries": Feature("`trie`, one per prompt", {"trie": _TRIES}),
    "renormalize": Feature("`trie_renormalize`", {"trie_renormalize": True}, {"trie": _TRIE}),
    "lists": Feature(
        "settings per prompt",
        {"num_beams": [4, 2], "length_penalty": [0.2, 0.6], "max_new_tokens": [6, 4], "min_new_tokens": [3, 0]},
        {"num_return_sequences": [2, 1], "early_stopping": [False, "never"]},
    ),
    "groups": Feature("`num_beam_groups`, `diversity_penalty`", {"num_beam_groups": 2, "diversity_penalty": 0.7}),
    "stochastic": Feature('`sampling="stochastic_beam"`', {"sampling": "stochastic_beam"}, {"do_sample": True}),
    "sampling": Feature("beam sampling (`do_sample=True`)", {"do_sample": True, "sampling": "beam"}),
    "patience": Feature("`patience`", {"patience": 2.0}, {"early_stopping": True}),
    "coverage": Feature("`coverage_penalty`", {"coverage_penalty": 0.3}, encoder=True),
    "reward": Feature("`length_reward`", {"length_reward": 0.2}),
    "gnmt": Feature('`length_normalization="gnmt"`', {"length_normalization": "gnmt"}),
    "never": Feature('`early_stopping="never"`', {"early_stopping": "never"}),
    "trace": Feature("`return_beam_trace`", {"return_beam_trace": True}),
    "int8": Feature('`kv_dtype="int8"`', {"kv_dtype": "int8"}),
    "gathered": Feature('`beam_attention="gathered"`', {"beam_attention": "gathered"}),
    "folded": Feature('`beam_attention="folded"`', {"beam_attention": "folded"}),
    "outputs": Feature("`output_scores`, `output_logits`", {"output_scores": True, "output_logits": True}),
    "repetition": Feature("`repetition_penalty`", {"repetition_penalty": 1.3}),
    "processor": Feature("a logits processor of your own", {"logits_processor": LogitsProcessorList([NoTwins()])}),
    "ends": Feature("several end tokens", {"eos_token_id": [END, OTHER_END]}),
    "every": Feature("`num_return_sequences=num_beams`", {"num_return_sequences": EVERY_BEAM}),
}

Pair = frozenset[str]


def _pairs(one: str, *others: str) -> list[Pair]:
    return [frozenset((one, other)) for other in others]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Pairs that are refused.

    Attributes:
        pairs: names of features.
        named: arguments that the error names.
        reason: for the page.
    """

    pairs: list[Pair]
    named: tuple[str, ...]
    reason: str


REFUSALS = [
    Refusal(
        _pairs("groups", "stochastic", "sampling"),
        ("num_beam_groups", "do_sample"),
        "Groups are kept apart by a penalty on what earlier groups took; nothing says what a draw under it is a draw "
        "from. transformers refused it too.",
    ),
    Refusal(
        _pairs("stochastic", "patience", "coverage", "reward"),
        ("stochastic_beam", "patience", "length_reward", "coverage_penalty"),
        "Drawn sequences are ranked by what they drew, and the search stops when none can be among the drawn: there is "
        "no finished score to change, and no number of finished sequences to wait for.",
    ),
    Refusal(
        _pairs("patience", "never"),
        ("patience", "early_stopping"),
        '`patience` is a number of finished sequences at which to stop; "never" stops when none can be beaten.',
    ),
    Refusal(
        _pairs("coverage", "folded"),
        ("coverage_penalty", "beam_attention"),
        "Coverage reads attention maps, which the folded attention does not compute.",
    ),
]


def one_keyword(first: Feature, second: Feature) -> bool:
    """Whether two features are two values of one keyword, so that no call can have both."""
    return any(second.own[name] is not given for name, given in first.own.items() if name in second.own)


def refusal(first: str, second: str) -> Refusal | None:
    """Why a pair is refused; None where it is not."""
    return next((one for one in REFUSALS if frozenset((first, second)) in one.pairs), None)


def call_of(names: Sequence[str]) -> dict[str, Any]:
    """Keywords of a call with these features."""
    features = [FEATURES[name] for name in FEATURES if name in names]
    call = functools.reduce(lambda call, feature: {**call, **feature.needs}, features, dict(BASE))
    call = functools.reduce(lambda call, feature: {**call, **feature.own}, features, call)
    if call["num_return_sequences"] == EVERY_BEAM:
        call["num_return_sequences"] = call["num_beams"]
    return call


def _cell(first: str, second: str) -> str:
    if one_keyword(FEATURES[first], FEATURES[second]):
        return "="
    why = refusal(first, second)
    return "✓" if why is None else "abcd"[REFUSALS.index(why)]


def markdown() -> str:
    """The table of what combines with what, and the reasons below it."""
    numbers = list(range(1, len(FEATURES)))
    lines = [
        "| | | " + " | ".join(map(str, numbers)) + " |",
        "|---|---|" + "---|" * len(numbers),
    ]
    for row, (name, feature) in enumerate(FEATURES.items()):
        cells = [_cell(name, other) for other in list(FEATURES)[:row]]
        cells += [""] * (len(numbers) - len(cells))
        lines.append(f"| {row + 1} | {feature.name} | " + " | ".join(cells) + " |")
    reasons = [f"- {letter}: {refusal.reason}" for letter, refusal in zip("abcd", REFUSALS, strict=True)]
    return "\n".join([*lines, "", *reasons])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", required=True, help="print the table of docs/search.md")
    parser.parse_args()
    print(markdown())
