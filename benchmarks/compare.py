"""transformers' own beam search against ours: seconds, prompt rows, bytes of keys and values, peak memory.

    python -m benchmarks.compare                 # the table of the README
    python -m benchmarks.compare --rounds 5 --only 30m,1,50,100,10

Each cell has a process of its own, in which both run alternating, on the same prompts; seconds are medians, the ratio
is the median of the ratios of the rounds. Peak memory is what a fresh process for each engine holds at most, less what
it held before the search: the median of three.

The physics: per step stock reads each beam's whole sequence, copies it to reorder it and once more to append to it,
about 3 · W · (P + t) tokens of keys and values; ours reads each live slot once, P + U. Both run the model's weights
over the same rows. Stock runs the prompt W times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_paged_beam  # noqa: F401  registers the name
from hf_paged_beam.side_by_side import compare

from .models import random_llama, random_prompts

ENGINES = ("stock", "ours")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        model: name of a shape.
        batch_size, num_beams, prompt_length, new_tokens: `B`, `W`, `P`, `T`.
        goal: stock's seconds over ours that must at least be reached.
    """

    model: str
    batch_size: int
    num_beams: int
    prompt_length: int
    new_tokens: int
    goal: float

    @classmethod
    def parse(cls, text: str) -> Cell:
        """``model,B,W,P,T``."""
        model, *numbers = text.split(",")
        if len(numbers) != 4:
            raise argparse.ArgumentTypeError(f"expected model,B,W,P,T, but got {text!r}")
        return cls(model, *map(int, numbers), goal=0.0)

    def __str__(self) -> str:
        return f"{self.model},{self.batch_size},{self.num_beams},{self.prompt_length},{self.new_tokens}"


CELLS = [
    Cell("30m", 1, 50, 1000, 10, goal=25.0),
    Cell("30m", 1, 200, 100, 10, goal=5.5),
    Cell("30m", 1, 50, 100, 10, goal=3.8),
    Cell("30m", 1, 10, 100, 10, goal=1.9),
    Cell("30m", 1, 2, 10, 20, goal=0.97),
    Cell("30m", 4, 4, 50, 20, goal=0.97),
    Cell("tiny", 1, 2, 5, 50, goal=0.97),
    Cell("tiny", 1, 4, 5, 20, goal=0.97),
    Cell("tiny", 8, 4, 20, 20, goal=0.97),
    Cell("tiny", 1, 16, 5, 5, goal=0.97),
]


def settings_of(cell: Cell) -> dict[str, Any]:
    """Arguments of ``generate``."""
    return {"num_beams": cell.num_beams, "max_new_tokens": cell.new_tokens, "do_sample": False}


def prompt_rows(model: Any, inputs: dict[str, torch.Tensor], cell: Cell, engine: str) -> int:
    """Rows that the model's first forward pass sees."""
    rows: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(kwargs["input_ids"].shape[0])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model.generate(**inputs, **{**settings_of(cell), "max_new_tokens": 1}, **_engine(engine))
    finally:
        handle.remove()
    return rows[0]


def _engine(name: str) -> dict[str, str]:
    return {"custom_generate": "hf_paged_beam"} if name == "ours" else {}


def peak_memory(cell: Cell, engine: str) -> int:
    """Bytes that one search adds to a fresh process at most: the median of three, for allocators vary."""
    command = [sys.executable, "-m", "benchmarks.compare", "--memory-of", engine, "--only", str(cell)]
    told = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(3)]
    return sorted(int(run.strip().splitlines()[-1]) for run in told)[1]


def print_memory(cell: Cell, engine: str) -> None:
    """In a fresh process: run one search, print the bytes it added."""
    model = random_llama(cell.model)
    inputs = random_prompts(model, cell.batch_size, cell.prompt_length)
    model(input_ids=inputs["input_ids"][:1, :4])  # what a first forward pass allocates is not the search's
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew (Linux)
    before = _resident("VmRSS")
    model.generate(**inputs, **settings_of(cell), **_engine(engine))
    print(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    """Bytes of a field of ``/proc/self/status``: what this process holds (VmRSS), or held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def measure(cell: Cell, rounds: int, with_memory: bool, threads: int) -> dict[str, Any]:
    """One row of the table, to be measured in a process of its own.

    What one cell leaves behind in the allocator makes the next faster, transformers' search more than ours: copies go
    into memory that needs no page faults any more.
    """
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = random_llama(cell.model)
    inputs = random_prompts(model, cell.batch_size, cell.prompt_length)
    result = compare(model, inputs, rounds=rounds, **settings_of(cell))
    row = {
        **dataclasses.asdict(cell),
        "stock_seconds": round(result.stock_seconds, 4),
        "our_seconds": round(result.our_seconds, 4),
        "ratio": round(result.ratio, 3),
        "ratios": [round(ratio, 3) for ratio in result.ratios],
        "same_sequences": result.same_sequences,
        "score_difference": result.largest_score_difference,
        "stock_kv_bytes": result.stock_bytes,
        "our_kv_bytes": result.our_bytes,
        "our_live_kv_bytes": result.ours.kv_usage.bytes_live,
    }
    for engine in ENGINES:
        row[f"{engine}_prompt_rows"] = prompt_rows(model, inputs, cell, engine)
        row[f"{engine}_peak_bytes"] = peak_memory(cell, engine) if with_memory else None
    return row


def default_rounds(cell: Cell) -> int:
    """Timed rounds: fewer where a round is long."""
    if cell.model == "tiny":
        return 31
    return 11 if cell.num_beams * cell.prompt_length < 10_000 else 3


HEADER = (
    f"{'model':>6s}{'B':>4s}{'W':>5s}{'P':>6s}{'T':>5s}{'stock s':>10s}{'ours s':>10s}{'ratio':>8s}{'goal':>7s}"
    f"{'rows':>10s}{'K/V MiB':>16s}{'peak MiB':>16s}  same"
)


def format_row(row: dict[str, Any]) -> str:
    """A line of the printed table; pairs are stock's and ours."""

    def pair(first: Any, second: Any, scale: int = 1) -> str:
        if first is None:
            return "-"
        return (
            f"{first / scale:.0f}/{second / scale:.0f}" if scale == 1 else f"{first / scale:.1f}/{second / scale:.1f}"
        )

    mib = 2**20
    return (
        f"{row['model']:>6s}{row['batch_size']:4d}{row['num_beams']:5d}{row['prompt_length']:6d}{row['new_tokens']:5d}"
        f"{row['stock_seconds']:10.3f}{row['our_seconds']:10.3f}{row['ratio']:8.2f}{row['goal']:7.2f}"
        f"{pair(row['stock_prompt_rows'], row['ours_prompt_rows']):>10s}"
        f"{pair(row['stock_kv_bytes'], row['our_kv_bytes'], mib):>16s}"
        f"{pair(row['stock_peak_bytes'], row['ours_peak_bytes'], mib):>16s}  {row['same_sequences']}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=None, help="timed rounds (default: 3 to 31, fewer where a round is long)"
    )
    parser.add_argument("--only", type=Cell.parse, action="append", metavar="MODEL,B,W,P,T", help="only such cells")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true", help="skip the fresh processes that measure peak memory")
    parser.add_argument("--memory-of", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.memory_of:
        torch.set_num_threads(arguments.threads)
        transformers.logging.set_verbosity_error()
        print_memory(arguments.only[0], arguments.memory_of)
        return 0
    goals = {str(cell): cell for cell in CELLS}
    cells = [goals.get(str(cell), cell) for cell in arguments.only or CELLS]
    print(HEADER, flush=True)
    rows = []
    for cell in cells:
        rounds = arguments.rounds or default_rounds(cell)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            rows.append(fresh.submit(measure, cell, rounds, not arguments.no_memory, arguments.threads).result())
        print(format_row(rows[-1]), flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
               "threads": arguments.threads}  # fmt: skip
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"cells": rows, "machine": machine, "versions": versions, "dtype": "float32"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
