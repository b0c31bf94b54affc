"""What a call with a captured step spends its time on, by torch's own profiler.

    python -m benchmarks.profile --record
    python -m benchmarks.profile --only 30m,1,50,100,100

`benchmarks.breakdown` wraps modules, and a compiled step has none. Here the operations are counted that torch runs, in
one call after the warm-up, each with the time that is its own:

    products     linear layers
    attention    attention itself
    compiled     what inductor has made of the rest of the model: norms, activations, rotary embedding, the mask
    guards       dynamo's look whether what was compiled is for this call
    search       all other operations: log-probabilities, candidates, what runs on, the index
    Python       the call's time less all of these

"rate" is the operations of the products over their time, as a share of what a large square product reaches here.

The physics: products do 2 · R · weights operations and read the weights; see `benchmarks.physics`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from torch.profiler import ProfilerActivity, profile

from . import harness, physics
from .harness import Cell, Conditions
from .models import random_prompts

CELLS = [Cell.parse("30m,1,50,100,100")]
PARTS = ("products", "attention", "compiled", "guards", "search", "Python")
ENGINE = "switches"

_NAMES = {
    "products": ("linear", "mm", "matmul"),
    "attention": ("attention",),
    "compiled": ("CompiledFxGraph", "Torch-Compiled Region"),
    "guards": ("Dynamo Cache Lookup",),
}
"""Parts of the names of a part's events. Everything else is the search's."""


def part_of(event: str) -> str:
    """The part that an event of the profiler belongs to."""
    return next((part for part, names in _NAMES.items() if any(name in event for name in names)), "search")


def measure(cell: Cell, conditions: Conditions) -> dict[str, Any]:
    """One row: shares of a call. To be run in a process of its own."""
    conditions.prepare_process()
    model = conditions.model(cell.model)
    inputs = random_prompts(model, cell.batch_size, cell.prompt_length)
    call = functools.partial(model.generate, **inputs, **cell.settings, **conditions.arguments_of(ENGINE))
    for _ in range(harness.WARM_UPS):
        call()
    seconds = harness.seconds_of(call, model.device)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        wrapped = harness.seconds_of(call, model.device)
    spent, events = dict.fromkeys(PARTS, 0.0), []
    for event in profiled.key_averages():
        spent[part_of(event.key)] += event.self_cpu_time_total / 1e6
        events.append((event.self_cpu_time_total / 1e6, event.count, event.key, part_of(event.key)))
    spent["Python"] = wrapped - sum(spent.values())
    live = physics.live_of_steps(model, inputs, **cell.settings)
    cost, machine = physics.ModelCost.of(model), conditions.measure_machine()
    rows = cell.batch_size * cell.num_beams * len(live)
    products = 2 * rows * (cost.layer_weights + cost.head_weights)
    products += 2 * cell.batch_size * (cell.prompt_length * cost.layer_weights + cost.head_weights)
    return {
        **{field.name: getattr(cell, field.name) for field in dataclasses.fields(cell) if "goal" not in field.name},
        "seconds": seconds,
        "wrapped_over_unwrapped": wrapped / seconds,
        "shares": {part: taken / wrapped for part, taken in spent.items()},
        "rate": products / spent["products"] / machine.peak,
        "largest": [
            {"event": key, "part": part, "count": count, "share": taken / wrapped}
            for taken, count, key, part in sorted(events, reverse=True)[:16]
        ],
    }


def format_row(row: dict[str, Any]) -> str:
    """Lines of the printed table: shares in percent, then the largest events."""
    cell = ",".join(str(row[name]) for name in ("model", "batch_size", "num_beams", "prompt_length", "new_tokens"))
    parts = "".join(f"{100 * row['shares'][part]:10.1f}" for part in PARTS)
    lines = [f"{cell:>18s}{parts}{100 * row['rate']:8.0f}{row['wrapped_over_unwrapped']:9.3f}"]
    lines += [
        f"{'':18s}{100 * one['share']:6.1f} {one['count']:6d} {one['part']:>10s}  {one['event']}"
        for one in row["largest"]
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = harness.new_parser(__doc__, engines=(ENGINE,))
    parser.add_argument("--only", type=Cell.parse, action="append", metavar="MODEL,B,W,P,T", help="only such cells")
    arguments = parser.parse_args(argv)
    conditions = harness.conditions_of(arguments)
    if conditions.device != "cpu" or conditions.engines != (ENGINE,):
        parser.error(
            f"--device must be cpu and --engines {ENGINE}, but got {conditions.device!r}, {conditions.engines}"
        )
    print(f"{'percent of a call':>18s}" + "".join(f"{part:>10s}" for part in PARTS) + f"{'rate':>8s}{'wrapped':>9s}")
    rows = []
    for cell in arguments.only or CELLS:
        rows.append(harness.in_fresh_process(measure, cell, conditions))
        print(format_row(rows[-1]), flush=True)
    harness.publish("profile", rows, conditions, record=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
