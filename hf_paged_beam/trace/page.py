"""The tree as one page: an SVG that stands in the page, and a short script that zooms, moves and tells.

Whatever a tokenizer says is escaped here, and the script shows it as text only; the page's own policy forbids to load
anything.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from .labels import WORDS, about, cells, shortened, token_texts
from .layout import LIVES, TreeLayout, lay_out
from .tree import BeamTree, TreeNode

_TEMPLATE = Path(__file__).with_name("page.html")
_LONGEST_LABEL = 14
_LETTER, _ROW = 7.3, 18  # pixels, of a 12-pixel font of fixed width
_ELBOW, _MARK = 12, 6  # pixels: where lines of siblings part; half of a marker, with some air
_SCORE = 12  # columns of text that a place and a score take
_SHAPES = {
    "returned": "M0 -7L2 -2L7 -2L3 1L5 6L0 3L-5 6L-3 1L-7 -2L-2 -2Z",
    "running": "M-4 -4L5 0L-4 4Z",
    "finished": "M-4 -4H4V4H-4Z",
    "dead": "M-4 -4L4 4M-4 4L4 -4",
    "inner": "M-2.5 0A2.5 2.5 0 1 0 2.5 0A2.5 2.5 0 1 0 -2.5 0Z",
}
"""SVG path of each status's marker."""


def write_page(path: Path, tree: BeamTree, tokenizer: Any, *, title: str) -> Path:
    """Write the page, and return its path."""
    texts = token_texts(tree, tokenizer)
    living = tuple(life for life in LIVES if life != "dead")
    everything, without_dead = (_Drawing(tree, texts, lay_out(tree, lives)) for lives in (LIVES, living))
    parts = {
        "title": escape(title),
        "legend": _legend(tree),
        "column": str(everything.column),
        "steps": _step_names(everything.layout),
        "everything": everything.group("everything"),
        "living": without_dead.group("living"),
    }
    page = _TEMPLATE.read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)  # in one go: a token may read {{title}}
    path.write_text(page, encoding="utf-8")
    return path


class _Drawing:
    """A tree as SVG: a row of `_ROW` pixels for each leaf, a column of `column` pixels for each step."""

    def __init__(self, tree: BeamTree, texts: list[str], layout: TreeLayout):
        self.tree, self.texts, self.layout = tree, texts, layout
        self.labels = [shortened(text, _LONGEST_LABEL) for text in texts]
        self.column = round(max(map(cells, self.labels)) * _LETTER + _ELBOW + 2 * _MARK)

    def group(self, name: str) -> str:
        """All of it, with its size in pixels."""
        width = self.column * self.layout.num_steps + round(_SCORE * _LETTER)
        nodes = "\n".join(self.node(self.tree.nodes[number]) for number in self.layout.shown)
        size = f'data-width="{width}" data-height="{_ROW * self.layout.num_rows}"'
        return f'<g id="{name}" class="tree" {size}>\n{nodes}\n</g>'

    def node(self, node: TreeNode) -> str:
        """A node with the line that leads to it, its token, and what the script has to know."""
        place = self.layout.places[node.number]
        score = None if place is None else self.tree.sequences_scores[place]
        told = escape(about(node, self.texts[node.number], place, score))
        parent = "" if node.parent is None else f' data-parent="{node.parent}"'
        return (
            f'<g class="node {node.status}" data-number="{node.number}"{parent} data-about="{told}">'
            f"{self._line(node)}{self._end(node)}{self._score(node, place, score)}</g>"
        )

    def _at(self, node: TreeNode) -> tuple[int, int]:
        return self.column * (node.step + 1), _ROW * self.layout.rows[node.number]

    def _line(self, node: TreeNode) -> str:
        """The line from its parent, and the area that answers to the pointer."""
        if node.parent is None:
            return ""
        x, y = self._at(node)
        start, above = self._at(self.tree.nodes[node.parent])
        area = f'x="{start + _ELBOW}" y="{y - _ROW + 2}" width="{self.column - _ELBOW + _MARK}" height="{_ROW}"'
        line = f'class="line {self.layout.lives[node.number]}" d="M{start} {above}h{_ELBOW}V{y}H{x}"'
        return f'<path {line}/><rect class="place" {area}/>'

    def _end(self, node: TreeNode) -> str:
        """Marker and token."""
        x, y = self._at(node)
        mark = f'class="mark {node.status}" d="{_SHAPES[node.status]}" transform="translate({x} {y})"'
        return f'<path {mark}/><text x="{x - _MARK}" y="{y - 4}">{escape(self.labels[node.number])}</text>'

    def _score(self, node: TreeNode, place: int | None, score: float | None) -> str:
        """Place and score of a returned sequence, right of its end: a leaf's row is empty from there on."""
        if place is None:
            return ""
        x, y = self._at(node)
        return f'<text class="score" x="{x + 2 * _MARK}" y="{y - 1}">{place + 1}. {score:.3f}</text>'


def _step_names(layout: TreeLayout) -> str:
    names = ["prompt", *map(str, range(layout.num_steps))]
    return "".join(f'<text y="15" data-column="{column}">{name}</text>' for column, name in enumerate(names))


def _legend(tree: BeamTree) -> str:
    """A line and its end for each status that the tree has."""
    found = {node.status for node in tree.nodes}
    samples = []
    for status, meaning in WORDS.items():
        if status not in found:
            continue
        line = "" if status == "inner" else f'<path class="line {status}" d="M2 8H36"/>'
        mark = f'<path class="mark {status}" d="{_SHAPES[status]}" transform="translate(36 8)"/>'
        samples.append(f"<span><svg>{line}{mark}</svg> {meaning}</span>")
    return "\n  ".join(samples)
