"""transformers' own beam search against ours: seconds, prompt rows, bytes of keys and values, peak memory, the floor.

    python -m benchmarks.compare --record        # the table of the README
    python -m benchmarks.compare --rounds 5 --only 30m,1,50,100,10
    python -m benchmarks.compare --only tiny,1,4,5,20 --record     # one row anew, the others of today stay
    python -m benchmarks.compare --real          # SmolLM2-135M on English prompts, float32 and bfloat16

How cells are measured is told in `harness`, peak memory in `peak`, and what must at least be done in `physics`. "plain"
is ours without further keywords, "switches" with ``compile=True, prepack=True``, warm; goals are of stock's seconds
over theirs. "/floor" is a search's seconds over the least that this machine could take.

The physics: per step stock reads each beam's whole sequence, copies it to reorder it and once more to append to it,
about 3 · W · (P + t) tokens of keys and values; ours reads each live slot once, P + U. Both run the model's weights
over the same rows. Stock runs the prompt W times.
"""

from __future__ import annotations

import sys
from typing import Any

from . import harness, peak, real
from .harness import Cell, Conditions

CELLS = [
    Cell("30m", 1, 10, 100, 10, plain_goal=2.1, switches_goal=2.7),
    Cell("30m", 1, 50, 100, 10, plain_goal=4.2, switches_goal=5.5),
    Cell("30m", 1, 50, 1000, 10, plain_goal=28, switches_goal=35),
    Cell("30m", 1, 50, 100, 100, plain_goal=2.1, switches_goal=4),
    Cell("30m", 1, 200, 100, 10, plain_goal=6.2, switches_goal=9),
    Cell("30m", 4, 10, 200, 50, plain_goal=2.7, switches_goal=3.5),
    Cell("30m", 8, 4, 200, 50, plain_goal=2.1, switches_goal=2.7),
    Cell("30m", 1, 4, 100, 50, plain_goal=1.2, switches_goal=1.8),
    Cell("160m", 1, 10, 100, 10, plain_goal=2.1, switches_goal=3.6),
    Cell("160m", 1, 50, 100, 10, plain_goal=4.8, switches_goal=6),
    Cell("160m", 1, 50, 1000, 10, plain_goal=31, switches_goal=40),
    Cell("160m", 1, 4, 100, 50, plain_goal=1.14, switches_goal=1.9),
    Cell("30m", 1, 2, 10, 20, plain_goal=0.97),
    Cell("30m", 4, 4, 50, 20, plain_goal=0.97),
    Cell("tiny", 1, 2, 5, 50, plain_goal=0.97),
    Cell("tiny", 1, 4, 5, 20, plain_goal=0.97),
    Cell("tiny", 8, 4, 20, 20, plain_goal=0.97),
    Cell("tiny", 1, 16, 5, 5, plain_goal=0.97),
]


def measure(cell: Cell, conditions: Conditions, *, with_memory: bool) -> dict[str, Any]:
    """One row of the table."""
    row = harness.in_fresh_process(harness.measure_cell, cell, conditions)
    repeats = peak.repeats_for(max(told["kv_bytes"] for told in row["engines"].values()))
    for engine, told in row["engines"].items():
        told |= peak.measure(cell, engine, conditions, repeats) if with_memory else {}
    return row


HEADER = (
    f"{'model':>6s}{'B':>3s}{'W':>4s}{'P':>5s}{'T':>4s} {'engine':>9s}{'seconds':>9s}{'ratio':>7s}{'goal':>6s}"
    f"{'/floor':>7s}{'rows':>5s}{'K/V MiB':>9s}{'peak MiB':>9s}  same"
)


def format_row(row: dict[str, Any]) -> str:
    """Lines of the printed table, one per engine; the floor's last."""
    cell = (
        f"{row['model']:>6s}{row['batch_size']:3d}{row['num_beams']:4d}{row['prompt_length']:5d}{row['new_tokens']:4d}"
    )
    lines = [f"{cell} {_engine(name, told)}" for name, told in row["engines"].items()]
    return "\n".join([*lines, f"{cell} {'floor':>9s}{row['physics']['floor_seconds']:9.3f}"])


def _engine(name: str, told: dict[str, Any]) -> str:
    return (
        f"{name:>9s}{told['seconds']:9.3f}{_or_dash(told.get('ratio'), 7, 2)}{_or_dash(told['goal'], 6, 2)}"
        f"{told['over_floor']:7.1f}{_or_dash(told.get('prompt_rows'), 5, 0)}{told['kv_bytes'] / peak.MIB:9.1f}"
        f"{_or_dash(told.get('peak_bytes'), 9, 1, peak.MIB)}  {told['same']}"
    )


def _or_dash(value: float | None, width: int, digits: int, scale: int = 1) -> str:
    return "-".rjust(width) if value is None else f"{value / scale:{width}.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--only", type=Cell.parse, action="append", metavar="MODEL,B,W,P,T", help="only such cells")
    parser.add_argument("--no-memory", action="store_true", help="skip the fresh processes that measure peak memory")
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M on English prompts")
    arguments = parser.parse_args(argv)
    conditions = harness.conditions_of(arguments)
    if arguments.real:
        return real.run(conditions, record=arguments.record)
    goals = {str(cell): cell for cell in CELLS}
    print(HEADER, flush=True)
    rows = []
    for cell in [goals.get(str(cell), cell) for cell in arguments.only or CELLS]:
        rows.append(measure(cell, conditions, with_memory=not arguments.no_memory and conditions.device == "cpu"))
        print(format_row(rows[-1]), flush=True)
    if arguments.only and arguments.record:
        rows = harness.beside_recorded("compare", rows, conditions)
    harness.publish("compare", rows, conditions, record=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
