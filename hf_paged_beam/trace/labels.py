"""What is written on a tree: tokens made visible, and a node's numbers in words."""

from __future__ import annotations

import unicodedata
from typing import Any

from .tree import BeamTree, TreeNode

WORDS = {
    "returned": "returned",
    "running": "still running at the end",
    "finished": "finished, not returned",
    "dead": "dead (nothing came of it)",
    "inner": "went on",
}
"""Each status in words."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError unless `tokenizer` is None or can decode."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(
            f"tokenizer={tokenizer!r} has no method decode; expected a tokenizer of transformers, or None to write ids."
        )


def token_texts(tree: BeamTree, tokenizer: Any) -> list[str]:
    """What to write for each node: its decoded token (its id without a tokenizer), "prompt" for the root."""
    ids = {node.token for node in tree.nodes if node.token is not None}
    texts: dict[int | None, str] = {token: token_text(token, tokenizer) for token in ids}
    texts[None] = "prompt"
    return [texts[node.token] for node in tree.nodes]


def token_text(token: int, tokenizer: Any) -> str:
    """One token, decoded and made visible; its id without a tokenizer."""
    if tokenizer is None:
        return str(token)
    return visible(str(tokenizer.decode([token]))) or f"[{token}]"


def visible(text: str) -> str:
    """`text` with blanks and what cannot be printed shown, so that a tree shows where words begin and lines end."""
    shown = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return "".join(shown).replace(" ", "␣")


def cells(text: str) -> int:
    """Columns that a text takes in a font of fixed width."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def shortened(text: str, longest: int) -> str:
    """`text`, cut to so many columns."""
    if cells(text) <= longest:
        return text
    kept = text
    while cells(kept) > longest - 1:
        kept = kept[:-1]
    return kept + "…"


def about(node: TreeNode, text: str, place: int | None, sequence_score: float | None) -> str:
    """A node's numbers, a line each.

    Args:
        node: of the tree.
        text: its token's.
        place: its place among the returned sequences, from 0, or None.
        sequence_score: of the sequence that it ends, or None.
    """
    if node.token is None:
        return "the prompt"
    lines = [
        f"{text}  (id {node.token})",
        f"step {node.step}, rank {node.rank}",
        f"sum {node.score:.4f}",
        f"log-probability {node.log_prob:.4f}",
        f"status: {WORDS[node.status]}",
        "slot: none" if node.slot is None else f"slot {node.slot}",
    ]
    if place is not None:
        lines.append(f"returned as number {place + 1}, score {sequence_score:.4f}")
    return "\n".join(lines)
