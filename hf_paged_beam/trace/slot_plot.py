"""The slots of a pool over the steps of a search, by matplotlib, which is imported only here and in plot.py.

States differ in grey, and the prompt in hatching, so that a black and white print tells them apart. Stretches of one
slot may be thinner than a hatch, so all states that alternate from slot to slot are plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .labels import check_tokenizer, shortened, token_text
from .plot import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .slots import SlotMap

_LARGEST_LABELLED = 40
"""Slots above the prompt's up to which tokens are written: beyond, they would be too small to read."""
_LONGEST_LABEL = 5
_CELL = (0.62, 0.36)  # inches, where tokens are written
_PLAIN_SIZE = (10.0, 7.0)  # inches, where none are


class _Look(NamedTuple):
    face: str
    hatch: str


_LOOKS = {
    "free": _Look("white", ""),
    "prompt": _Look("white", "////"),
    "live": _Look("0.6", ""),
    "freed": _Look("0.85", ""),
    "reused": _Look("0.15", ""),
}


def plot_slots(slots: SlotMap, tokenizer: Any, ax: Axes | None) -> Axes:
    """Draw a slot map.

    Raises:
        ValueError: if the tokenizer has no ``decode``.
        ImportError: without matplotlib.
    """
    require_matplotlib()
    check_tokenizer(tokenizer)
    states = slots.states[:-1]  # the last step writes nothing
    steps, count = states.shape
    written = count <= _LARGEST_LABELLED
    if ax is None:
        ax = _new_axes(steps, count, written)
    for name in slots.names:
        if name != "free":
            _draw_state(ax, (states == slots.names.index(name)).T.tolist(), _LOOKS[name], 0.6 if written else 0.0)
    if written:
        _write_tokens(ax, slots, tokenizer)
    _finish_axes(ax, steps, count)
    return ax


def _new_axes(steps: int, count: int, written: bool) -> Axes:
    from matplotlib import pyplot

    size = (2.5 + _CELL[0] * steps, 1.2 + _CELL[1] * count) if written else _PLAIN_SIZE
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _draw_state(ax: Axes, there: list[list[bool]], look: _Look, line: float) -> None:
    """One bar for each stretch of steps that a slot is in a state."""
    for slot, column in enumerate(there):
        spans = [(row - 1.5, 1) for row, is_so in enumerate(column) if is_so]  # row 0 is the prompt, step -1
        if spans:
            ax.broken_barh(
                spans, (slot - 0.5, 1), facecolor=look.face, hatch=look.hatch, edgecolor="0.3", linewidth=line
            )


def _write_tokens(ax: Axes, slots: SlotMap, tokenizer: Any) -> None:
    """Each token where its slot was given to it."""
    last = len(slots.states) - 2
    for life in slots.lifetimes:
        if life.given < last:
            dark = slots.names[slots.states[life.given + 1, life.slot]] == "reused"
            text = shortened(token_text(life.token, tokenizer), _LONGEST_LABEL)
            ax.text(
                life.given, life.slot, text, ha="center", va="center_baseline", parse_math=False,
                color="white" if dark else "black",
            )  # fmt: skip


def _finish_axes(ax: Axes, steps: int, count: int) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    ax.set_xticks(range(-1, steps - 1), ["prompt", *map(str, range(steps - 1))])
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlim=(-1.5, steps - 1.5), ylim=(-0.5, count - 0.5), xlabel="step", ylabel="slot of the pool")
    samples = [
        Patch(facecolor=look.face, hatch=look.hatch, edgecolor="0.3", label=name) for name, look in _LOOKS.items()
    ]
    ax.legend(
        handles=samples, handlelength=2.5, handleheight=1.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )
