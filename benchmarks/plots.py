"""Draws the figures of the benchmarks from the committed results. Needs matplotlib.

    python -m benchmarks.plots            docs/figures/growth.svg and docs/figures/speed.svg
    python -m benchmarks.plots growth     one of them

Nothing is measured or filled in here: what was not run is not drawn. Engines differ by marker, line and hatching as
well as by grey, so that a print in black and white, at half size, can be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # after the backend is chosen

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parents[1] / "docs" / "figures"

MIB = 2**20
LABELS = {"stock": "transformers", "plain": "this package", "switches": "this package, compile and prepack"}
TIMES = {"stock": ("#000000", "o", "-"), "plain": ("#555555", "s", "--"), "switches": ("#999999", "^", "-.")}
"""Of each engine: grey, marker, line."""
HATCHES = {"stock": "", "plain": "////", "switches": "...."}
PANELS = {
    "prompt": "prompt, tokens (W = 50, T = 10)",
    "beams": "beams (P = 128, T = 10)",
    "tokens": "new tokens (W = 20, P = 128)",
    "batch": "prompts in the batch (W = 10, P = 128, T = 10)",
}
STYLE = {
    "font.size": 13, "axes.labelsize": 13, "legend.fontsize": 11, "lines.linewidth": 2, "lines.markersize": 8,
    "svg.hashsalt": "benchmarks", "svg.fonttype": "path", "hatch.linewidth": 0.8,
}  # fmt: skip


def draw_growth(results: dict[str, Any]) -> Any:
    """A panel of seconds and one of MiB for each series: a figure of two rows, log-log."""
    series = [name for name in PANELS if any(row["series"] == name for row in results["cells"])]
    figure, axes = pyplot.subplots(2, len(series), figsize=(5.2 * len(series), 8.4), squeeze=False)
    for column, name in enumerate(series):
        rows = [row for row in results["cells"] if row["series"] == name and "note" not in row]
        _lines(axes[0][column], rows, "seconds", 1)
        _lines(axes[1][column], rows, "kv_bytes", MIB)
        axes[1][column].set_xlabel(PANELS[name])
    for row, unit in enumerate(("one search, seconds", "keys and values, MiB")):
        axes[row][0].set_ylabel(unit)
    floor = (0, (1, 2))
    for column, name in enumerate(series):
        rows = [row for row in results["cells"] if row["series"] == name and "note" not in row]
        floors = [row["physics"]["floor_seconds"] for row in rows]
        axes[0][column].plot([row["value"] for row in rows], floors, color="#000000", linestyle=floor, linewidth=1.5,
                             label="the machine's floor")  # fmt: skip
    _legend_above(figure, axes[0][0])
    return figure


def _legend_above(figure: Any, axes: Any) -> None:
    """The legend of some axes over the whole figure, where it covers nothing."""
    lines, labels = axes.get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(labels), frameon=False)


def _lines(axes: Any, rows: list[dict[str, Any]], name: str, scale: int) -> None:
    for engine, (grey, marker, line) in TIMES.items():
        measured = [row for row in rows if engine in row["engines"]]
        if measured:
            axes.plot(
                [row["value"] for row in measured], [row["engines"][engine][name] / scale for row in measured],
                color=grey, marker=marker, linestyle=line, markerfacecolor="white" if engine != "stock" else grey,
                label=LABELS[engine],
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row["value"] for row in rows], [str(row["value"]) for row in rows], rotation=45)
    axes.minorticks_off()
    axes.grid(True, color="#dddddd")


def draw_speed(results: dict[str, Any]) -> Any:
    """Bars of every cell: how many times faster than stock, and the peak memory of each engine."""
    rows = [row for row in results["cells"] if "engines" in row]
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(15, 1.2 + 0.85 * len(rows)), sharey=True)
    _bars(times, rows, [name for name in TIMES if name != "stock"], lambda told: told.get("ratio"))
    times.axvline(1, color="#000000", linewidth=1.5)
    times.set_xlabel("times as fast as transformers' search")
    _bars(memory, rows, list(TIMES), lambda told: told["peak_bytes"] / MIB if told.get("peak_bytes") else None)
    memory.set_xlabel("peak memory that one search adds, MiB")
    names = ("batch_size", "num_beams", "prompt_length", "new_tokens")
    labels = [
        f"{row['model']}  B={row[names[0]]} W={row[names[1]]} P={row[names[2]]} T={row[names[3]]}" for row in rows
    ]
    times.set_yticks(range(len(rows)), labels)
    times.invert_yaxis()
    _legend_above(figure, memory)
    return figure


def _bars(axes: Any, rows: list[dict], engines: list[str], value: Callable[[dict], float | None]) -> None:
    present = [name for name in engines if any(name in row["engines"] for row in rows)]
    height = 0.84 / len(present)
    for order, engine in enumerate(present):
        drawn = [(place, value(row["engines"][engine])) for place, row in enumerate(rows) if engine in row["engines"]]
        drawn = [(place, length) for place, length in drawn if length is not None]
        places = [place + (order - (len(present) - 1) / 2) * height for place, _ in drawn]
        axes.barh(places, [length for _, length in drawn], height, label=LABELS[engine], hatch=HATCHES[engine],
                  color="#000000" if engine == "stock" else "#ffffff", edgecolor="#000000")  # fmt: skip
        for place, (_, length) in zip(places, drawn, strict=True):
            number = f"{length:.0f}" if length >= 100 else f"{length:.3g}"
            axes.annotate(number, (length, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if _decades(axes) < 2.5 else (1,)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.3, high * 1.3)  # the shortest bar is to be seen, and the longest bar's number
    axes.grid(True, axis="x", color="#dddddd")
    axes.set_axisbelow(True)


def _decades(axes: Any) -> float:
    """Powers of ten that the horizontal axis spans: over more than a few, ticks between them have no room."""
    low, high = axes.get_xlim()
    return math.log10(high / low)


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "growth": ("growth.json", draw_growth),
    "speed": ("compare.json", draw_speed),
}


def draw(name: str, results: dict[str, Any], folder: Path) -> Path:
    """Write one figure; the same results give the same bytes."""
    with pyplot.rc_context(STYLE):
        figure = FIGURES[name][1](results)
        figure.tight_layout()
        target = folder / f"{name}.svg"
        figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
    return target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="of growth, speed (default: both)")
    arguments = parser.parse_args(argv)
    for name in arguments.figures or FIGURES:
        source = RESULTS / FIGURES[name][0]
        results = json.loads(source.read_text()) if source.exists() else {}
        if "table" not in results:
            print(f"{name}: not drawn, for {source.name} is not there or was written by an older harness")
            continue
        print(f"{name}: {draw(name, results, FOLDER).name} from {source.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
