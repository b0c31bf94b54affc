"""The tables of docs/performance.md, from the committed results.

    python -m benchmarks.pages            # writes them into the page
    python -m benchmarks.pages --check    # says whether the page has them

A table stands between ``<!-- results: NAME -->`` and ``<!-- end -->``.
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


def compare(results: dict[str, Any]) -> str:
    """Stock's seconds over ours, beside the goals; and ours over the least that the machine could take."""

    def ratio(row: dict[str, Any], engine: str) -> list[str]:
        told = row["engines"][engine]
        return [f"{told['ratio']:.2f}", "–" if told["goal"] is None else f"{told['goal']:g}"]

    rows = [
        [*_cell(row), *ratio(row, "plain"), *ratio(row, "switches"),
         *(f"{row['engines'][engine]['over_floor']:.1f}" for engine in ("plain", "switches"))]
        for row in results["cells"]
    ]  # fmt: skip
    head = [*_CELL, "plain", "goal", "with both switches", "goal", "plain / floor", "switches / floor"]
    return _where(results) + _table(head, rows)


def protocol(results: dict[str, Any]) -> str:
    """Queries per second, and stock's seconds over ours."""
    rows = []
    for row in results["cells"]:
        engines = row["engines"]
        answered = [f"{engines[name]['queries_per_second']:.2f}" for name in ("stock", "plain", "switches")]
        ratios = [f"{engines[name]['ratio']:.2f}" for name in ("plain", "switches")]
        rows.append([str(row["num_beams"]), *answered, *ratios])
    head = ["W", "transformers, queries/s", "plain", "with both switches", "plain, times faster", "with both switches"]
    return _where(results) + _table(head, rows)


def real(results: dict[str, Any]) -> str:
    """Stock's seconds over ours on a trained model, and what is found."""
    rows = [
        [row["dtype"], str(row["num_beams"]), *(f"{engines[name]['ratio']:.2f}" for name in ("plain", "switches")),
         *(f"{engines[name]['same']} of {engines[name]['of']}" for name in ("plain", "switches")),
         *(f"{engines[name]['gain']:.4f}" for name in ("plain", "switches"))]
        for row in results["cells"] for engines in [row["engines"]]
    ]  # fmt: skip
    head = ["dtype", "W", "plain", "with both switches", "plain, same best", "with both", "plain, gain", "with both"]
    return _where(results) + _table(head, rows)


def peak(results: dict[str, Any]) -> str:
    """MiB of keys and values, of a search at most, and of what stays."""

    def mib(row: dict[str, Any], what: str, *engines: str) -> list[str]:
        return [f"{row['engines'][engine][what] / 2**20:.1f}" for engine in engines]

    rows = [
        [*_cell(row), *mib(row, "kv_bytes", "stock", "plain"),
         *mib(row, "peak_bytes", "stock", "plain", "prepack", "switches"), *mib(row, "stays_bytes", "prepack"),
         f"{row['weight_bytes'] / 2**20:.1f}"]
        for row in results["cells"]
    ]  # fmt: skip
    head = [*_CELL, "K/V, transformers", "K/V, ours", "peak, transformers", "plain", "prepack", "both switches",
            "stays with prepack", "weights"]  # fmt: skip
    return _where(results) + _table(head, rows)


_FORWARD = ("products", "attention", "K/V", "rest")
_OUTSIDE = ("selection", "index", "loop", "around")


def breakdown(results: dict[str, Any]) -> str:
    """Where the time of a call goes, in percent; the parts of a compiled forward are one."""

    def percent(share: float) -> str:
        return f"{100 * share:.1f}"

    rows = []
    for row in results["cells"]:
        shares = [row["shares"][part] for part in _FORWARD]
        compiled = row["engine"] == "switches"
        forward = ["–", "–", "–", percent(sum(shares))] if compiled else [percent(share) for share in shares]
        outside = [percent(row["shares"][part]) for part in _OUTSIDE]
        step = f"{1000 * row['seconds'] / row['new_tokens']:.0f}"
        goal = "–" if row["goal"] is None else f"{100 * row['goal']:.0f}"
        rows.append([str(row["vocabulary"]), str(row["num_beams"]), row["engine"], step, *forward, *outside,
                     percent(row["outside"]), goal])  # fmt: skip
    head = ["V", "W", "engine", "ms of a token", *_FORWARD, *_OUTSIDE, "outside", "at most"]
    return _where(results) + _table(head, rows)


def profile(results: dict[str, Any]) -> str:
    """Where the time of a call with a captured step goes, in percent."""
    parts = list(results["cells"][0]["shares"])
    rows = [[*_cell(row), *(f"{100 * row['shares'][part]:.0f}" for part in parts)] for row in results["cells"]]
    return _where(results) + _table([*_CELL, *parts], rows)


def _primitives(kind: str, columns: dict[str, str]) -> Callable[[dict[str, Any]], str]:
    def made(results: dict[str, Any]) -> str:
        rows = [row for row in results["cells"] if row["primitive"] == kind]
        shown = [[_number(row[column]) for column in columns] for row in rows]
        return _where(results) + _table(list(columns.values()), shown)

    return made


def _number(value: Any) -> str:
    """A time in two decimals; sizes as they are."""
    if isinstance(value, list):
        return " + ".join(map(str, value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


linears = _primitives(
    "linear",
    {"in": "in", "out": "out", "rows": "rows", "linear": "`F.linear`, ms", "one_dnn": "oneDNN", "packed": "packed"},
)
fused = _primitives(
    "fused", {"in": "in", "out": "out", "rows": "rows", "apart": "one after another, ms", "as_one": "as one"}
)
selections = _primitives(
    "selection",
    {"W": "W", "V": "V", "flat": "one `topk`, ms", "row_by_row": "a `topk` per row", "by_blocks": "by blocks",
     "log_softmax": "`log_softmax`", "log_softmax_again": "in used memory",
     "log_softmax_over": "over the logits", "logsumexp": "`logsumexp`"},
)  # fmt: skip
attentions = _primitives(
    "attention", {"W": "W", "P": "P", "tree": "tree slots", "whole": "one call, ms", "merged": "two, merged"}
)

TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "compare": ("compare", compare),
    "peers": ("peers", peers),
    "protocol": ("protocol", protocol),
    "real": ("real", real),
    "peak": ("peak", peak),
    "breakdown": ("breakdown", breakdown),
    "profile": ("profile", profile),
    "linears": ("primitives", linears),
    "fused": ("primitives", fused),
    "selections": ("primitives", selections),
    "attentions": ("primitives", attentions),
}
"""Of each table: the results that it is made of, and how."""


def filled(page: str) -> str:
    """The page, its tables made anew.

    Raises:
        OSError: where the results of one are not there.
        ValueError: where the page has a mark that is no table's.
    """

    def block(match: re.Match) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"there is no table {match[2]!r}, but {', '.join(TABLES)}")
        source, make = TABLES[match[2]]
        return match[1] + make(json.loads((RESULTS / f"{source}.json").read_text())) + match[3]

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
