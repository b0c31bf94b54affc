"""Memory of a search: keys and values, and what a fresh process holds at most, less what it held before.

    python -m benchmarks.peak                                  # the cells below, all engines
    python -m benchmarks.peak --only 30m,1,50,100,10 --engines stock plain prepack --record

"peak" is the high-water mark of resident memory over a process's first search; "stays" is what is resident after it,
when its result is gone: allocators keep some, and with ``prepack=True`` the second copy of the weights stays, to be
compared with "weights". Where stock's keys are small, both are medians of three processes, for allocators vary. Linux
only.

The physics: transformers' search holds W · (P + T) tokens of keys per prompt and, while it reorders or appends to a
layer, that layer twice; ours holds P + live nodes of the tree, and a pool that grows is copied layer by layer.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import harness
from .harness import Cell, Conditions
from .models import random_prompts
from .physics import ModelCost

CELLS = [Cell.parse(text) for text in ("30m,1,10,100,10", "30m,1,50,100,10", "30m,1,50,1000,10", "30m,1,200,100,10",
                                       "30m,8,4,200,50", "160m,1,4,100,50", "160m,1,50,100,10")]  # fmt: skip
SMALL = 2**28
"""Bytes of stock's keys up to which a measurement is repeated."""
REPEATS = 3
MIB = 2**20


def measure_here(cell: Cell, engine: str, conditions: Conditions) -> dict[str, int]:
    """In a fresh process: run one search; bytes that it added at most, that stay, and that its keys and values take."""
    conditions.prepare_process()
    model = conditions.model(cell.model)
    inputs = random_prompts(model, cell.batch_size, cell.prompt_length)
    model(input_ids=inputs["input_ids"][:1, :4])  # what a first forward pass allocates is not the search's
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    model.generate(**inputs, **cell.settings, **conditions.arguments_of(engine))
    return {"peak_bytes": resident("VmHWM") - before, "stays_bytes": resident("VmRSS") - before}


def resident(field: str) -> int:
    """Bytes of a field of ``/proc/self/status``: what this process holds (VmRSS), or held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def measure(cell: Cell, engine: str, conditions: Conditions, repeats: int) -> dict[str, int]:
    """Medians over fresh processes. Not spawned by `multiprocessing`: what that brings along is no search's."""
    command = [
        sys.executable, "-m", "benchmarks.peak", "--one", engine, "--only", str(cell), "--dtype", conditions.dtype,
        "--threads", str(conditions.threads),
    ]  # fmt: skip
    runs = [_last_line(subprocess.run(command, capture_output=True, text=True)) for _ in range(repeats)]
    return {name: sorted(run[name] for run in runs)[repeats // 2] for name in runs[0]}


def _last_line(run: subprocess.CompletedProcess[str]) -> dict[str, int]:
    if run.returncode:
        raise RuntimeError(f"the process that measures memory ended with {run.returncode}:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def repeats_for(kv_bytes: int) -> int:
    """How often to measure, where stock's keys and values take so many bytes."""
    return REPEATS if kv_bytes <= SMALL else 1


def measure_all(cell: Cell, conditions: Conditions) -> dict[str, Any]:
    """One row: memory of every engine, and its keys and values as the outputs tell them."""
    told = harness.in_fresh_process(measure_kv, cell, conditions)
    repeats = repeats_for(max(one["kv_bytes"] for one in told["engines"].values()))
    for engine, row in told["engines"].items():
        row |= measure(cell, engine, conditions, repeats)
    return {**dataclasses.asdict(cell), **told}


def measure_kv(cell: Cell, conditions: Conditions) -> dict[str, Any]:
    """Bytes of the weights, and of each engine's keys and values."""
    conditions.prepare_process()
    model = conditions.model(cell.model)
    inputs = random_prompts(model, cell.batch_size, cell.prompt_length)
    engines = {}
    for engine in conditions.engines:
        call = {**inputs, **cell.settings, **conditions.arguments_of(engine)}
        engines[engine] = harness.kv_bytes(model.generate(**call, return_dict_in_generate=True))
    return {"weight_bytes": ModelCost.of(model).weight_bytes, "engines": engines}


def format_row(row: dict[str, Any]) -> str:
    """Lines of the printed table, one per engine."""
    cell = ",".join(str(row[name]) for name in ("model", "batch_size", "num_beams", "prompt_length", "new_tokens"))
    return "\n".join(
        f"{cell:>18s} {engine:>9s} {told['kv_bytes'] / MIB:9.1f} {told.get('live_kv_bytes', 0) / MIB:9.1f} "
        f"{told['peak_bytes'] / MIB:9.1f} {told['stays_bytes'] / MIB:9.1f} {row['weight_bytes'] / MIB:9.1f}"
        for engine, told in row["engines"].items()
    )


def main(argv: list[str] | None = None) -> int:
    parser = harness.new_parser(__doc__, engines=("stock", "plain", "prepack", "switches"))
    parser.add_argument("--only", type=Cell.parse, action="append", metavar="MODEL,B,W,P,T", help="only such cells")
    parser.add_argument("--one", choices=harness.SWITCHES, help="in this process: one engine, one cell")
    arguments = parser.parse_args(argv)
    conditions = harness.conditions_of(arguments)
    if conditions.device != "cpu":
        parser.error(f"--device must be cpu, for resident memory is the host's, but got {conditions.device!r}")
    if arguments.one:
        print(json.dumps(measure_here(arguments.only[0], arguments.one, conditions)))
        return 0
    print(f"{'MiB of':>28s} {'K/V':>9s} {'live':>9s} {'peak':>9s} {'stays':>9s} {'weights':>9s}", flush=True)
    rows = []
    for cell in arguments.only or CELLS:
        rows.append(measure_all(cell, conditions))
        print(format_row(rows[-1]), flush=True)
    harness.publish("peak", rows, conditions, record=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
