"""The tree by matplotlib, which is imported only when something is drawn.

What a line leads to shows in its style and in its end's marker as well as in colour, so that a black and white print
tells survivors, dead branches and finished beams apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .labels import cells, shortened, token_texts
from .layout import LIVES, TreeLayout, lay_out
from .tree import BeamTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LONGEST_LABEL = 10
_SMALL = 0.8  # of matplotlib's rcParams["font.size"], points: what all but the axes is written in
_LETTER = 0.602 / 72  # inches per point of size: a letter of DejaVu Sans Mono is as wide as 0.602 of its size
_ROW = 0.03  # inches per point of size
_SMALLEST = (8.5, 2.6)  # inches, for the legend and the name of the other axis
_ENTRY = 0.1625  # inches per point of size, of the legend
_LARGEST = 300.0  # inches: beyond some 65,000 pixels nothing can be drawn
_ELBOW = 0.12  # of a column: where lines of siblings part


class _Style(NamedTuple):
    """How a line and its end are drawn."""

    colour: str
    line: Literal["solid", "dashed", "dotted", "none"]
    width: float
    marker: str
    filled: bool
    meaning: str


_STYLES = {
    "returned": _Style("#0b3c7d", "solid", 2.4, "*", True, "returned (place, score)"),
    "running": _Style("#2a7f3f", "solid", 1.1, ">", True, "running at the end"),
    "finished": _Style("#b3560f", "dashed", 1.1, "s", False, "finished, not returned"),
    "dead": _Style("#555555", "dotted", 1.4, "x", True, "dead"),
    "inner": _Style("#333333", "none", 0.0, "o", False, "went on"),
}


def plot_tree(tree: BeamTree, tokenizer: Any, ax: Axes | None) -> Axes:
    """Draw a tree.

    Raises:
        ImportError: without matplotlib.
    """
    require_matplotlib()
    layout = lay_out(tree)
    labels = [shortened(text, _LONGEST_LABEL) for text in token_texts(tree, tokenizer)]
    if ax is None:
        ax = _new_axes(layout, longest=max(cells(label) for label in labels))
    _draw_lines(ax, tree, layout)
    _draw_markers(ax, tree, layout)
    _write_tokens(ax, tree, layout, labels)
    _write_scores(ax, tree, layout)
    _finish_axes(ax, tree, layout)
    return ax


def require_matplotlib() -> None:
    """Raise ImportError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("plots of a trace need matplotlib: pip install hf-paged-beam[viz]") from error


def _font_size() -> float:
    from matplotlib import rcParams

    return _SMALL * rcParams["font.size"]


def _new_axes(layout: TreeLayout, longest: int) -> Axes:
    """Axes of a new figure in which a row holds a line of text and a column the longest label."""
    from matplotlib import pyplot

    size = _font_size()
    column = (longest + 1) * _LETTER * size / (1 - _ELBOW) + 0.12
    wanted = (column * (layout.num_steps + 2.5) + 0.5, _ROW * size * (layout.num_rows + 1) + 1.1)
    inches = [min(max(given, least), _LARGEST) for given, least in zip(wanted, _SMALLEST, strict=True)]
    _, ax = pyplot.subplots(figsize=inches, layout="constrained")
    return ax


def _draw_lines(ax: Axes, tree: BeamTree, layout: TreeLayout) -> None:
    """Lines from parents to children, those of the best on top."""
    from matplotlib.collections import LineCollection

    for depth, life in enumerate(reversed(LIVES), start=1):
        style = _STYLES[life]
        lines = []
        for parent, child in tree.edges:
            if layout.lives[child] == life:
                column, above, row = tree.nodes[parent].step, layout.rows[parent], layout.rows[child]
                bend = column + _ELBOW
                lines.append([(column, above), (bend, above), (bend, row), (tree.nodes[child].step, row)])
        ax.add_collection(
            LineCollection(
                lines, colors=style.colour, linestyles=[style.line], linewidths=style.width, zorder=depth, label=life
            )
        )


def _draw_markers(ax: Axes, tree: BeamTree, layout: TreeLayout) -> None:
    for status, style in _STYLES.items():
        places = [(node.step, layout.rows[node.number]) for node in tree.nodes if node.status == status]
        if places:
            ax.plot(
                *zip(*places, strict=True), linestyle="none", marker=style.marker, markersize=_size(style),
                color=style.colour, markerfacecolor=_face(style), zorder=len(LIVES) + 1, gid=status,
            )  # fmt: skip


def _face(style: _Style) -> str:
    return style.colour if style.filled else "white"


def _size(style: _Style) -> float:
    return {"*": 10.0, "o": 3.5}.get(style.marker, 5.0)


def _write_tokens(ax: Axes, tree: BeamTree, layout: TreeLayout, labels: list[str]) -> None:
    """Each token on its own line, left of its marker."""
    for node, label in zip(tree.nodes[1:], labels[1:], strict=True):
        ax.annotate(
            label, (node.step, layout.rows[node.number]), xytext=(-4, 1.5), textcoords="offset points", ha="right",
            va="bottom", fontsize=_font_size(), family="monospace", parse_math=False, gid="token",
            color=_STYLES["dead"].colour if node.status == "dead" else "black",
        )  # fmt: skip


def _write_scores(ax: Axes, tree: BeamTree, layout: TreeLayout) -> None:
    """Place and score right of what was returned: a leaf's row is empty from there on."""
    for place, (number, score) in enumerate(zip(tree.returned, tree.sequences_scores, strict=True), start=1):
        ax.annotate(
            f"{place}. {score:.3f}", (tree.nodes[number].step, layout.rows[number]), xytext=(12, 0),
            textcoords="offset points", va="center", fontsize=_font_size(), gid="score",
        )  # fmt: skip


def _finish_axes(ax: Axes, tree: BeamTree, layout: TreeLayout) -> None:
    from matplotlib.lines import Line2D

    ax.set_xlim(-1.3, layout.num_steps - 1 + 1.2)
    ax.set_ylim(layout.num_rows - 0.5, -0.9)
    ax.set_xticks(range(-1, layout.num_steps), ["prompt", *map(str, range(layout.num_steps))])
    ax.set_yticks([])
    ax.set_xlabel("step")
    ax.set_ylabel("beams, best first")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    found = {node.status for node in tree.nodes}
    handles = [
        Line2D(
            [], [], color=style.colour, linestyle=style.line, linewidth=style.width, marker=style.marker,
            markersize=_size(style), markerfacecolor=_face(style), label=style.meaning,
        )
        for status, style in _STYLES.items() if status in found
    ]  # fmt: skip
    room = ax.get_window_extent().width / ax.figure.dpi / (_ENTRY * _font_size())
    ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=max(1, int(room)), frameon=False,
        fontsize=_font_size(), handlelength=3.0,
    )  # fmt: skip
