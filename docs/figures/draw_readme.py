"""Draws the two pictures of README.md from committed results. Needs matplotlib.

    python -m docs.figures.draw_readme             tree.svg from tree.json, readme_bars.svg from benchmarks/results
    python -m docs.figures.draw_readme --record    searches first, and writes tree.json anew

Both are 8 inches wide, shown at some 800 pixels. Nothing is told by colour alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch

from hf_paged_beam import BeamTrace, pronunciation
from hf_paged_beam.trace.layout import TreeLayout, lay_out
from hf_paged_beam.trace.tree import BeamTree, TreeNode

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen
from matplotlib.lines import Line2D

FOLDER = Path(__file__).parent
COMPARED = FOLDER.parents[1] / "benchmarks" / "results" / "compare.json"
RECORD = FOLDER / "tree.json"

WORD, BEAMS, RETURNED = "tomato", 4, 2
CELLS = [("30m", 1, 10, 100, 10), ("30m", 1, 50, 100, 100), ("30m", 1, 50, 1000, 10), ("30m", 8, 4, 200, 50),
         ("160m", 1, 50, 100, 10), ("tiny", 1, 4, 5, 20)]  # fmt: skip
"""Model, prompts, beams, prompt tokens, new tokens; the last one is too small to gain anything."""

WIDTH = 8.0  # inches
STYLE = {
    "font.size": 13, "axes.labelsize": 13, "legend.fontsize": 13, "hatch.linewidth": 0.8,
    "svg.hashsalt": "readme", "svg.fonttype": "path",
}  # fmt: skip
GREY = "#6b6b6b"


# --- The tree ---


def record_tree() -> None:
    """Search, and keep the trace's arrays as lists, with the texts of its tokens."""
    model, tokenizer = pronunciation.load()
    inputs = tokenizer([WORD], return_tensors="pt")
    settings = {"num_beams": BEAMS, "num_return_sequences": RETURNED, "max_new_tokens": 16, "do_sample": False}
    found = model.generate(**inputs, **settings, return_beam_trace=True, return_dict_in_generate=True,
                           custom_generate="hf_paged_beam")  # fmt: skip
    arrays = {name: _listed(value) for name, value in _fields(found.beam_trace).items()}
    ids = sorted(set(found.beam_trace.tokens.flatten().tolist()))
    texts = {str(token): tokenizer.decode([token]) for token in ids}
    ends = [model.generation_config.eos_token_id]
    kept = {"word": WORD, "settings": settings, "end_tokens": ends, "texts": texts, "trace": arrays}
    RECORD.write_text(json.dumps(kept, allow_nan=False) + "\n")


def _fields(trace: BeamTrace) -> dict[str, Any]:
    return {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}


def _listed(value: Any) -> Any:
    """A tensor as lists, in which None stands for -inf."""
    if not isinstance(value, torch.Tensor):
        return value
    return _replaced(value.tolist(), float("-inf"), None)


def _replaced(value: Any, old: Any, new: Any) -> Any:
    if isinstance(value, list):
        return [_replaced(one, old, new) for one in value]
    return new if value == old and value is not False else value


def load_trace(kept: dict[str, Any]) -> BeamTrace:
    """The recorded trace."""
    arrays = {
        name: torch.tensor(_replaced(value, None, float("-inf"))) if isinstance(value, list) else value
        for name, value in kept["trace"].items()
    }
    return BeamTrace(**arrays)


def draw_tree(kept: dict[str, Any]) -> Any:
    """A column for each step, a row for each leaf; under each token the slot that holds its keys and values."""
    trace = load_trace(kept)
    tree = trace.tree()
    layout = lay_out(tree)
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.5 * layout.num_rows + 1.45), layout="constrained")
    for node in tree.nodes:
        if node.parent is not None:
            _draw_line(axes, tree, layout, node)
        _draw_token(axes, layout, node, _label(kept, node), _slot(trace, node))
    axes.set_xlim(-1.75, layout.num_steps - 0.55)
    axes.set_ylim(layout.num_rows - 0.4, -0.75)
    axes.set_xticks(range(layout.num_steps), [str(step) for step in range(layout.num_steps)])
    axes.set_yticks([])
    axes.set_xlabel("step of the search")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(handles=_meanings(), loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, frameon=False)
    return figure


LINES: dict[str, dict[str, Any]] = {
    "returned": {"color": "#000000", "linewidth": 3.0, "linestyle": "-"},
    "running": {"color": "#000000", "linewidth": 1.2, "linestyle": "-"},
    "finished": {"color": "#000000", "linewidth": 1.2, "linestyle": "--"},
    "dead": {"color": GREY, "linewidth": 1.2, "linestyle": ":"},
}


def _meanings() -> list[Line2D]:
    names = {"returned": "returned", "running": "still running at the end", "finished": "finished, not returned",
             "dead": "died"}  # fmt: skip
    return [Line2D([], [], label=name, **LINES[life]) for life, name in names.items()]


def _label(kept: dict[str, Any], node: TreeNode) -> str:
    if node.token is None:
        return kept["word"]
    return "end" if node.token in kept["end_tokens"] else kept["texts"][str(node.token)].strip()


def _slot(trace: BeamTrace, node: TreeNode) -> str:
    if node.token is None:
        return f"slots 0–{trace.prompt_length - 1}"
    return "" if node.slot is None else str(node.slot)


def _draw_line(axes: Any, tree: BeamTree, layout: TreeLayout, node: TreeNode) -> None:
    """From the parent's column along the child's row."""
    parent = tree.nodes[node.parent or 0]
    above, row, bend = layout.rows[parent.number], layout.rows[node.number], parent.step + 0.42
    life = layout.lives[node.number]
    order = 2 if life == "returned" else 1
    axes.plot([parent.step, bend, bend, node.step], [above, above, row, row], zorder=order,
              solid_joinstyle="miter", **LINES[life])  # fmt: skip


def _draw_token(axes: Any, layout: TreeLayout, node: TreeNode, label: str, slot: str) -> None:
    """The token in a box, bold where it was returned, and its slot below the box."""
    life = layout.lives[node.number]
    place = (node.step, layout.rows[node.number])
    box = {"boxstyle": "round,pad=0.22", "facecolor": "#ffffff", "edgecolor": LINES[life]["color"],
           "linewidth": 1.8 if life == "returned" else 0.9}  # fmt: skip
    axes.annotate(label, place, ha="center", va="center", bbox=box, zorder=3, fontsize=12,
                  weight="bold" if life == "returned" else "normal")  # fmt: skip
    axes.annotate(slot, place, xytext=(0, -10.5), textcoords="offset points", fontsize=11, zorder=4, ha="center",
                  va="top")  # fmt: skip


# --- The bars ---


def draw_bars(results: dict[str, Any]) -> Any:
    """Shares of what transformers takes: of its seconds, and of its peak memory; the numbers themselves at the bars."""
    fields = ("model", "batch_size", "num_beams", "prompt_length", "new_tokens")
    rows = {tuple(row[field] for field in fields): row for row in results["cells"]}
    figure, panels = pyplot.subplots(1, 2, figsize=(WIDTH, 1.3 + 0.82 * len(CELLS)), sharey=True, layout="constrained")
    _draw_shares(panels[0], [rows[cell] for cell in CELLS], "seconds", lambda value: f"{_short(value)} s")
    _draw_shares(panels[1], [rows[cell] for cell in CELLS], "peak_bytes", lambda value: f"{_short(value / 2**20)} MiB")
    panels[0].set_xlabel("time, as a share of\ntransformers' own")
    panels[1].set_xlabel("peak memory, as a share\nof transformers' own")
    panels[0].set_yticks(range(len(CELLS)), [_named(cell) for cell in CELLS], fontsize=12)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _short(value: float) -> str:
    """In two digits, larger numbers whole."""
    return f"{value:.0f}" if value >= 10 else f"{value:#.2g}"


def _named(cell: tuple[str, int, int, int, int]) -> str:
    model, prompts, beams, prompt, tokens = cell
    several = f"{prompts} prompts, " if prompts > 1 else ""
    return f'"{model}", {several}W = {beams}\nP = {prompt}, T = {tokens}'


def _draw_shares(axes: Any, rows: list[dict[str, Any]], name: str, told: Callable[[float], str]) -> None:
    looks = {"stock": ("transformers", "#000000", ""), "plain": ("this package", "#ffffff", "////")}
    for order, (engine, (label, colour, hatch)) in enumerate(looks.items()):
        values = [row["engines"][engine][name] for row in rows]
        shares = [value / row["engines"]["stock"][name] for value, row in zip(values, rows, strict=True)]
        places = [place + (order - 0.5) * 0.38 for place in range(len(rows))]
        axes.barh(places, shares, 0.38, label=label, color=colour, hatch=hatch, edgecolor="#000000")
        for place, share, value in zip(places, shares, values, strict=True):
            axes.annotate(told(value), (share, place), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=12)  # fmt: skip
    axes.set_xlim(0, 1.75)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


FIGURES: dict[str, tuple[Path, Callable[[dict[str, Any]], Any]]] = {
    "tree": (RECORD, draw_tree),
    "readme_bars": (COMPARED, draw_bars),
}
"""Of each picture: what it is made of, and how."""


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Write one picture; the same results and the same matplotlib give the same bytes."""
    source, make = FIGURES[name]
    with pyplot.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "Agg"}):
        figure = make(json.loads(source.read_text()))
        target = folder / f"{name}.svg"
        figure.savefig(target, metadata={"Date": None})
        pyplot.close(figure)
    return target


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="search anew, and write tree.json")
    if parser.parse_args(argv).record:
        record_tree()
    for name in FIGURES:
        print(draw(name).name)


if __name__ == "__main__":
    main()
