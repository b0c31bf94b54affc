"""The README's table, from the committed results of `benchmarks.compare`.

python -m benchmarks.table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "compare.json"


def markdown(results: dict[str, Any]) -> str:
    """One row per cell: the ratio of seconds, plain and with the switches, prompt rows, keys and values, peak memory.

    Rows, keys and peak are stock's and ours without further keywords; a column of what was not measured is left out.
    """
    cells = results["cells"]
    switches = any("switches" in row["engines"] for row in cells)
    head = ["model", "B", "W", "P", "T", "times faster", *(["with switches"] if switches else []), "prompt rows",
            "K/V MiB", "peak MiB"]  # fmt: skip
    lines = [_line(head), _line(["---"] * len(head)).replace(" ", "")]
    return "\n".join([*lines, *(_line(_cells(row, switches=switches)) for row in cells)])


def _cells(row: dict[str, Any], *, switches: bool) -> list[str]:
    engines = row["engines"]
    stock, plain = engines["stock"], engines["plain"]
    with_switches = [f"{engines['switches']['ratio']:.2f}" if "switches" in engines else "–"] if switches else []
    return [
        *(str(row[name]) for name in ("model", "batch_size", "num_beams", "prompt_length", "new_tokens")),
        f"{plain['ratio']:.2f}",
        *with_switches,
        f"{stock['prompt_rows']} → {plain['prompt_rows']}",
        _mib(stock, plain, "kv_bytes"),
        _mib(stock, plain, "peak_bytes"),
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mib(stock: dict[str, Any], ours: dict[str, Any], name: str) -> str:
    if stock.get(name) is None or ours.get(name) is None:
        return "–"
    return f"{stock[name] / 2**20:.1f} → {ours[name] / 2**20:.1f}"


if __name__ == "__main__":
    print(markdown(json.loads(RESULTS.read_text())))
