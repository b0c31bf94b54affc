"""The tables of docs/performance.md, from the committed results.

    python -m benchmarks.pages            # writes them into the page
    python -m benchmarks.pages --check    # says whether the page has them

A table stands between ``<!-- results: NAME -->`` and ``<!-- end -->``, and is left empty where nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- results: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("| --- ", "|---").replace("--- |", "---|") for line in lines)


def _where(results: dict[str, Any]) -> str:
    """The machine, versions and date of a run, in a line."""
    machine, versions = results["machine"], results["versions"]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['processor']}, {machine['threads']} threads; {told}; {results['date']}.\n\n"


def _cell(row: dict[str, Any]) -> list[str]:
    return [row["model"], *(str(row[name]) for name in ("batch_size", "num_beams", "prompt_length", "new_tokens"))]


_CELL = ["model", "B", "W", "P", "T"]


def peers(results: dict[str, Any]) -> str:
    """Stock's seconds over each engine's."""

    def ratio(row: dict[str, Any], name: str | None) -> str:
        told = row["engines"].get(name, {}).get("ratio")
        return "–" if told is None else f"{told:.2f}"

    rows = [
        [*_cell(row), *(ratio(row, name) for name in ("plain", "switches", "ctranslate2", row["openvino_best"]))]
        for row in results["cells"]
    ]
    return _where(results) + _table([*_CELL, "plain", "with both switches", "CTranslate2", "OpenVINO GenAI"], rows)


def breakdown(results: dict[str, Any]) -> str:
    """Share of a call that passes outside the model's forward, in percent."""
    rows = [
        [str(row["vocabulary"]), str(row["num_beams"]), row["engine"], f"{100 * row['outside']:.1f}",
         "–" if row["goal"] is None else f"{100 * row['goal']:.0f}"]
        for row in results["cells"]
    ]  # fmt: skip
    return _where(results) + _table(["V", "W", "engine", "outside the forward, %", "at most"], rows)


def _primitives(kind: str, columns: dict[str, str]) -> Callable[[dict[str, Any]], str]:
    def made(results: dict[str, Any]) -> str:
        rows = [row for row in results["cells"] if row["primitive"] == kind]
        shown = [[_number(row[column]) for column in columns] for row in rows]
        return _where(results) + _table(list(columns.values()), shown)

    return made


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"


linears = _primitives(
    "linear",
    {"in": "in", "out": "out", "rows": "rows", "linear": "`F.linear`, ms", "one_dnn": "oneDNN", "packed": "packed"},
)
selections = _primitives(
    "selection",
    {"W": "W", "V": "V", "flat": "one `topk`, ms", "row_by_row": "a `topk` per row", "by_blocks": "by blocks",
     "log_softmax": "`log_softmax`", "log_softmax_again": "in used memory", "logsumexp": "`logsumexp`"},
)  # fmt: skip
attentions = _primitives(
    "attention", {"W": "W", "P": "P", "tree": "tree slots", "whole": "one call, ms", "merged": "two, merged"}
)

TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "peers": ("peers", peers),
    "breakdown": ("breakdown", breakdown),
    "linears": ("primitives", linears),
    "selections": ("primitives", selections),
    "attentions": ("primitives", attentions),
}
"""Of each table: the results that it is made of, and how."""


def filled(page: str) -> str:
    """The page, its tables made anew."""

    def block(match: re.Match) -> str:
        source, make = TABLES[match[2]]
        path = RESULTS / f"{source}.json"
        return match[1] + (make(json.loads(path.read_text())) if path.exists() else "Not measured yet.\n") + match[3]

    return _BLOCK.sub(block, page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page differs")
    arguments = parser.parse_args(argv)
    written = PAGE.read_text()
    if arguments.check:
        return int(filled(written) != written)
    PAGE.write_text(filled(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
