"""How time and memory grow with the prompt, the beams, the new tokens and the batch.

    python -m benchmarks.growth --record                   # all four series
    python -m benchmarks.growth --series prompt beams --limit-gib 10 --limit-seconds 600

    series    varies                            at
    prompt    P = 128, 256 ... 8192             W = 50, T = 10, B = 1
    beams     W = 1, 2 ... 512                  P = 128, T = 10, B = 1
    tokens    T = 10, 20, 50 ... 400            W = 20, P = 128, B = 1
    batch     B = 1, 2 ... 16                   W = 10, P = 128, T = 10

All with the "30m" model. With W = 1 both sides are transformers' greedy search; such a row says so. A stock search that
would need more memory than --limit-gib (three times its B · W · (P + T) tokens of keys, for it copies them), or more
time than --limit-seconds, going by how the points before it grew, is not run; its row says why, and nothing of it is
filled in.

The physics: stock's bytes grow with B · W · (P + T), ours with B · (P + live nodes of the tree). Stock's prompt is
B · W · P rows through the model, ours B · P; the steps are B · W rows each for both.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from . import harness
from .harness import Cell, Conditions
from .models import random_model
from .physics import STOCK_TOUCHES, ModelCost

MODEL = "30m"
SERIES = {
    "prompt": [Cell(MODEL, 1, 50, 128 * 2**power, 10) for power in range(7)],
    "beams": [Cell(MODEL, 1, 2**power, 128, 10) for power in range(10)],
    "tokens": [Cell(MODEL, 1, 20, 128, tokens) for tokens in (10, 20, 50, 100, 200, 400)],
    "batch": [Cell(MODEL, 2**power, 10, 128, 10) for power in range(5)],
}
VARIES = {"prompt": "prompt_length", "beams": "num_beams", "tokens": "new_tokens", "batch": "batch_size"}
GREEDY = "greedy search of transformers on both sides"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Beyond which stock is not run."""

    gib: float
    seconds: float


def bytes_needed(cell: Cell, kv_bytes: int) -> int:
    """What stock's keys and values take, with its copies.

    Args:
        cell: to be measured.
        kv_bytes: of one token.
    """
    tokens = cell.batch_size * cell.num_beams * (cell.prompt_length + cell.new_tokens)
    return STOCK_TOUCHES * tokens * kv_bytes


def seconds_expected(seen: list[tuple[int, float]], value: int) -> float | None:
    """Seconds at a value by the growth of the last two points, linear at least; None where nothing was measured.

    Args:
        seen: values and seconds measured before.
        value: the next.
    """
    if not seen:
        return None
    power = 1.0
    (last, seconds) = seen[-1]
    if len(seen) > 1:
        (before, less) = seen[-2]
        power = max(1.0, math.log(seconds / less) / math.log(last / before))
    return seconds * (value / last) ** power


def why_not(cell: Cell, kv_bytes: int, expected: float | None, limits: Limits) -> str | None:
    """Why stock is not run; None if it is."""
    needed = bytes_needed(cell, kv_bytes) / 2**30
    if needed > limits.gib:
        return f"not run: needs about {needed:.1f} GiB, over the limit of {limits.gib:g} GiB"
    if expected is not None and expected > limits.seconds:
        return f"not run: about {expected:.0f} s by extrapolation, over the limit of {limits.seconds:g} s"
    return None


def measure_series(series: str, cells: list[Cell], conditions: Conditions, limits: Limits) -> list[dict[str, Any]]:
    """The rows of one series, printed as they come."""
    kv_bytes = ModelCost.of(random_model(cells[0].model)).kv_bytes
    seen: list[tuple[int, float]] = []
    rows = []
    for cell in cells:
        value = getattr(cell, VARIES[series])
        skipped = why_not(cell, kv_bytes, seconds_expected(seen, value), limits)
        left_out = {"stock" if skipped else None, *(("prepack", "switches") if cell.num_beams == 1 else ())}
        engines = tuple(name for name in conditions.engines if name not in left_out)
        row = harness.in_fresh_process(harness.measure_cell, cell, dataclasses.replace(conditions, engines=engines))
        row = {"series": series, "value": value, "stock_skipped": skipped, **row}
        if cell.num_beams == 1:
            row["note"] = GREEDY
        elif "stock" in row["engines"]:
            seen.append((value, row["engines"]["stock"]["seconds"]))
        rows.append(row)
        print(format_row(row), flush=True)
    return rows


def format_row(row: dict[str, Any]) -> str:
    """A line of the printed table."""
    engines = row["engines"]
    parts = [f"{row['series']:>7s}{row['value']:6d}{row['physics']['floor_seconds']:9.3f}"]
    parts += [
        f"  {name} {told['seconds']:.3f} s {told['kv_bytes'] / 2**20:.1f} MiB"
        + (f" ({told['ratio']:.2f}x)" if "ratio" in told else "")
        for name, told in engines.items()
    ]
    parts += [f"  [{text}]" for text in (row["stock_skipped"], row.get("note")) if text]
    if not all(told["same"] for told in engines.values()):
        parts.append("  sequences differ")
    return "".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = harness.new_parser(__doc__, seconds=20.0)
    parser.add_argument("--series", nargs="+", choices=SERIES, default=list(SERIES), metavar="NAME")
    parser.add_argument("--limit-gib", type=float, default=6.0, help="of stock's keys and their copies (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=300.0, help="of one stock search (%(default)s)")
    arguments = parser.parse_args(argv)
    conditions = harness.conditions_of(arguments)
    limits = Limits(arguments.limit_gib, arguments.limit_seconds)
    print(f"{'series':>7s}{'at':>6s}{'floor s':>9s}  each engine's seconds, keys and values, stock's seconds over its")
    rows = []
    for series in arguments.series:
        rows += measure_series(series, SERIES[series], conditions, limits)
    harness.publish("growth", rows, conditions, record=arguments.record, limits=dataclasses.asdict(limits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
