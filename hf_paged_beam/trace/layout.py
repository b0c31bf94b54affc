"""Where a tree's nodes are drawn: a column for each step, a row for each leaf, the best line straight along the top.

prompt ─┬─ a ─┬─ b ── c     what was returned comes first, then what still ran, then what finished, then what died;
        │     └─ d          a parent stands on the row of its first child, so no two nodes of a column share a row
        └─ e
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .tree import BeamTree

LIVES = ("returned", "running", "finished", "dead")
"""What a line leads to, the best that it does first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeLayout:
    """A tree's places.

    Attributes:
        rows: of each node, from 0 at the top; anything where a node is left out.
        num_rows: the number of leaves.
        num_steps: columns beside the root's.
        lives: for each node, the best of `LIVES` that it or a node below it is.
        places: for each node, its place among the returned sequences, from 0; None where it ends none.
        shown: numbers of the nodes to draw, in the order in which to draw them: the best last, on top of all others.
    """

    rows: list[int]
    num_rows: int
    num_steps: int
    lives: list[str]
    places: list[int | None]
    shown: list[int]


def lay_out(tree: BeamTree, lives: Sequence[str] = LIVES) -> TreeLayout:
    """Rows and lives of all nodes.

    Args:
        tree: to draw.
        lives: which lines to draw; those that lead to something else are left out.
    """
    count = len(tree.nodes)
    places: list[int | None] = [None] * count
    for place, number in enumerate(tree.returned):
        places[number] = place
    keys = _best_below(tree, places)
    shown = [node.number for node in tree.nodes if node.parent is None or LIVES[keys[node.number][0]] in lives]
    rows, num_rows = _rows(tree, keys, set(shown))
    return TreeLayout(
        rows=rows,
        num_rows=num_rows,
        num_steps=max(node.step for node in tree.nodes) + 1,
        lives=[LIVES[life] for life, _, _ in keys],
        places=places,
        shown=sorted(shown, key=lambda number: -keys[number][0]),
    )


def _best_below(tree: BeamTree, places: list[int | None]) -> list[tuple[int, int, float]]:
    """What each node and its descendants are sorted by, the best first: what it leads to, its place, its score."""
    keys = []
    for node in tree.nodes:
        life = LIVES.index("dead" if node.status == "inner" else node.status)
        keys.append((life, places[node.number] or 0, -node.score))
    for parent, child in reversed(tree.edges):  # children come after their parents
        keys[parent] = min(keys[parent], keys[child])
    return keys


def _rows(tree: BeamTree, keys: list[tuple[int, int, float]], shown: set[int]) -> tuple[list[int], int]:
    """The row of each node, and how many there are: down the tree without recursion, for lines are long."""
    children: list[list[int]] = [[] for _ in tree.nodes]
    for parent, child in tree.edges:
        if child in shown:
            children[parent].append(child)
    rows, num_rows, waiting = [0] * len(tree.nodes), 0, [0]
    while waiting:
        number = waiting.pop()
        rows[number] = num_rows  # that of the first leaf below it, which comes next
        num_rows += not children[number]
        waiting.extend(sorted(children[number], key=keys.__getitem__, reverse=True))
    return rows, num_rows
