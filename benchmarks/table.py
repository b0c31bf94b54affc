"""The README's table, from the committed results of `benchmarks.compare`.

python -m benchmarks.table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "compare.json"


def markdown(results: dict[str, Any]) -> str:
    """One row per cell: the ratio of seconds, prompt rows, keys and values, peak memory."""
    lines = [
        "| model | B | W | P | T | times faster | prompt rows | K/V MiB | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["cells"]:
        numbers = " | ".join(str(row[name]) for name in ("batch_size", "num_beams", "prompt_length", "new_tokens"))
        lines.append(
            f"| {row['model']} | {numbers} | {row['ratio']:.2f} | {row['stock_prompt_rows']} → "
            f"{row['ours_prompt_rows']} | {_pair(row, 'stock_kv_bytes', 'our_kv_bytes')} | "
            f"{_pair(row, 'stock_peak_bytes', 'ours_peak_bytes')} |"
        )
    return "\n".join(lines)


def _pair(row: dict[str, Any], stock: str, ours: str) -> str:
    if row[stock] is None:
        return "–"
    return f"{row[stock] / 2**20:.1f} → {row[ours] / 2**20:.1f}"


if __name__ == "__main__":
    print(markdown(json.loads(RESULTS.read_text())))
