"""Draws docs/figures/how_it_works.svg from a search run here. Needs matplotlib.

    python docs/figures/draw_how_it_works.py

Left the tokens that beams ever took, in the middle the index table, right the pool, all after the same step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from transformers.utils import logging

from hf_paged_beam import pronunciation

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen

FIGURE = Path(__file__).parent / "how_it_works.svg"
WORD, BEAMS, STEP = "vase", 4, 3
SPARE, CELLS_PER_ROW = 2, 5
"""Free cells of the pool that are drawn after the last that was used, and cells that are drawn in a row."""
SIZE, WIDTHS = (8.6, 3.7), (4.3, 2.1, 2.7)  # inches; shares of the three parts
LARGE, SMALL = 13, 11  # points
DARK, PALE = "black", "0.45"


def searched() -> tuple[Any, list[str], list[str]]:
    """The trace of a real search, the text of each token id, and the prompt's tokens."""
    model, tokenizer = pronunciation.load()
    ids = tokenizer([WORD], return_tensors="pt")["input_ids"]
    found = model.generate(
        ids, num_beams=BEAMS, max_new_tokens=16, do_sample=False, return_dict_in_generate=True,
        return_beam_trace=True, custom_generate="hf_paged_beam",
    )  # fmt: skip
    texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    prompt = [texts[token].replace("<sep>", ":") for token in ids[0].tolist()]
    return found.beam_trace, texts, prompt


def draw(trace: Any, texts: list[str], prompt: list[str]) -> Any:
    """The three parts side by side."""
    figure, axes = pyplot.subplots(1, 3, figsize=SIZE, width_ratios=WIDTHS, layout="constrained")
    titles = ("tokens, and their slots", "index table", "pool of slots")
    for part, title in zip(axes, titles, strict=True):
        part.set_title(title, fontsize=LARGE)
        part.axis("off")
    draw_tree(axes[0], trace, texts)
    draw_table(axes[1], trace)
    draw_pool(axes[2], trace, texts, prompt)
    return figure


def draw_tree(ax: Any, trace: Any, texts: list[str]) -> None:
    """A node for each beam of each step, at the height of its place among the beams."""
    paths = trace.index_table(STEP).tolist()
    on_path = {(step, path[step]) for path in paths for step in range(STEP + 1)}
    root = (-1, (BEAMS - 1) / 2)
    for step in range(STEP + 1):
        for beam, rank in enumerate(trace.running[0, step].tolist()):
            parent = int(trace.parents[0, step, rank])
            slot = int(trace.slots_given[0, step, beam])
            is_live = (step, slot) in on_path and _is_seen(trace, step, beam)
            start = root if step == 0 else (step - 1, parent)
            line = dict(color=DARK if is_live else PALE, linestyle="-" if is_live else "--", linewidth=1.6, zorder=1)
            ax.plot([start[0], step], [start[1], beam], **line)
            text = f"{texts[int(trace.tokens[0, step, rank])]}\n{slot}"
            _node(ax, step, beam, text, dashed=not is_live)
    _node(ax, *root, WORD, dashed=False)
    ax.set(xlim=(-1.5, STEP + 0.45), ylim=(BEAMS - 0.4, -0.75))
    for step in range(STEP + 1):
        ax.text(step, -0.65, f"step {step}", ha="center", va="center", fontsize=SMALL)


def _is_seen(trace: Any, step: int, beam: int) -> bool:
    """Whether a beam of the last step drawn continues this one."""
    seen = set(range(BEAMS))
    for later in range(STEP, step, -1):
        seen = {int(trace.parents[0, later, trace.running[0, later, place]]) for place in seen}
    return beam in seen


def _node(ax: Any, x: float, y: float, text: str, *, dashed: bool) -> None:
    box = dict(
        boxstyle="round,pad=0.25", facecolor="white", edgecolor=PALE if dashed else DARK,
        linestyle="--" if dashed else "-", linewidth=1.2,
    )  # fmt: skip
    colour = PALE if dashed else DARK
    ax.text(x, y, text, ha="center", va="center", fontsize=SMALL, color=colour, bbox=box, linespacing=1.1, zorder=2)


def draw_table(ax: Any, trace: Any) -> None:
    """A row of slots for each beam, at the height of the beam in the tree."""
    for beam, path in enumerate(trace.index_table(STEP).tolist()):
        for step, slot in enumerate(path):
            _cell(ax, step - 0.5, beam - 0.32, (1.0, 0.64))
            ax.text(step, beam, slot, ha="center", va="center", fontsize=LARGE)
        ax.text(-0.75, beam, f"beam {beam}", ha="right", va="center", fontsize=SMALL)
    ax.set(xlim=(-2.6, STEP + 0.6), ylim=(BEAMS - 0.4, -0.75))
    ax.text(STEP / 2, -0.65, "slots, step by step", ha="center", va="center", fontsize=SMALL)


def draw_pool(ax: Any, trace: Any, texts: list[str], prompt: list[str]) -> None:
    """What each slot holds: the prompt hatched, tokens of beams grey, free ones white."""
    held = dict(enumerate(prompt))
    for life in trace.slots().lifetimes:
        if life.given <= STEP and (life.freed is None or life.freed > STEP):
            held[life.slot] = texts[life.token]
    count = max(held) + 1 + SPARE
    for slot in range(count):
        row, column = divmod(slot, CELLS_PER_ROW)
        of_prompt = slot < trace.prompt_length
        face = "white" if of_prompt or slot not in held else "0.85"
        _cell(ax, column, row, (0.94, 0.9), face=face, hatch="////" if of_prompt else "")
        ax.text(column + 0.06, row + 0.2, slot, ha="left", va="center", fontsize=SMALL - 1)
        background = dict(facecolor=face, edgecolor="none", pad=0.8) if of_prompt else None
        ax.text(
            column + 0.47, row + 0.62, held.get(slot, ""), ha="center", va="center", fontsize=LARGE, bbox=background
        )
    rows = -(-count // CELLS_PER_ROW)
    _legend(ax, rows + 0.25)
    ax.set(xlim=(-0.1, CELLS_PER_ROW), ylim=(rows + 1.1, -0.45))


def _legend(ax: Any, top: float) -> None:
    kinds = ((0.02, "prompt", "white", "////"), (2.2, "live", "0.85", ""), (3.75, "free", "white", ""))
    for left, name, face, hatch in kinds:
        _cell(ax, left, top, (0.45, 0.45), face=face, hatch=hatch)
        ax.text(left + 0.55, top + 0.24, name, ha="left", va="center", fontsize=SMALL)


def _cell(ax: Any, left: float, top: float, size: tuple[float, float], *, face: str = "white", hatch: str = "") -> None:
    ax.add_patch(
        pyplot.Rectangle((left, top), *size, facecolor=face, hatch=hatch, edgecolor="0.3", linewidth=1.0, zorder=0)
    )


def write(path: Path) -> None:
    """Draw it into a file."""
    with pyplot.rc_context({"svg.hashsalt": "hf_paged_beam", "hatch.linewidth": 0.5}):
        figure = draw(*searched())
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    write(FIGURE)


if __name__ == "__main__":
    main()
