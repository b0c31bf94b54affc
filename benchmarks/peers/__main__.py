"""The command: see the package's docstring.

The table's figures are stock's seconds over the engine's, medians of the ratios of the rounds: larger is faster. All
engines compute in float32, on the same weights and prompts, with the same number of threads, and return the best of `W`
sequences of `T` tokens. Each runs in a process of its own that holds the model and sleeps while another computes; who
starts moves on with each round. OpenMP's threads (torch's, CTranslate2's) sleep when they wait, or spin with --spin.

The physics: all run the model's weights over the same `B · W` rows in a step. They differ in how often they read keys
and values, and in how often they run the prompt: `B` times, or `B · W` times as stock does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..compare import Cell
from .environments import Environments
from .processes import ENGINES
from .table import CELLS, HEADER, Plan, format_row, measure
from .transformers_worker import known_switches

RESULTS = Path(__file__).parents[1] / "results" / "peers.json"


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    cells = arguments.only or CELLS
    if arguments.build:
        return 0 if build(arguments, cells) else 1
    plan = _plan(arguments)
    print(HEADER, flush=True)
    rows = []
    for cell in cells:
        rows.append(measure(cell, plan, Environments(arguments.environments)))
        print(format_row(rows[-1]), flush=True)
    results = {
        "date": datetime.date.today().isoformat(),
        "dtype": "float32",
        "openmp_waits": "spinning" if plan.spin else "asleep",
        "machine": machine(plan.threads),
        **gather(rows),
    }
    print(json.dumps(results))
    if arguments.record:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def build(arguments: argparse.Namespace, cells: list[Cell]) -> bool:
    """Environments, and models of the cells' shapes."""
    root = arguments.build.resolve()
    return Environments(root).build(sorted({cell.model for cell in cells}), arguments.torch)


def gather(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and once the versions that all of them ran."""
    versions = {name: version for row in rows for name, version in row["versions"].items()}
    return {"versions": versions, "cells": [{k: v for k, v in row.items() if k != "versions"} for row in rows]}


def machine(threads: int) -> dict[str, Any]:
    """What the figures depend on (Linux)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": processor, "cores": os.cpu_count(), "threads": threads, "memory_gib": round(memory / 2**30, 1)}


def _plan(arguments: argparse.Namespace) -> Plan:
    engines = [engine for engine in ENGINES if engine.name in ("stock", *(arguments.engines or _names()))]
    if not known_switches() and any(engine.name == "switches" for engine in engines):
        print("switches: left out, the installed package does not know compile=True and prepack=True", flush=True)
        engines = [engine for engine in engines if engine.name != "switches"]
    return Plan(
        engines=tuple(engines),
        rounds=arguments.rounds,
        stock_rounds=arguments.rounds_of_stock,
        threads=arguments.threads,
        limit_seconds=arguments.limit_seconds,
        spin=arguments.spin,
    )


def _names() -> list[str]:
    return [engine.name for engine in ENGINES]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="DIR", help="make the environments and convert the models there")
    what.add_argument("--environments", type=Path, metavar="DIR", help="where they are: measure")
    torch_version = torch.__version__.partition("+")[0]
    parser.add_argument(
        "--torch",
        default=f"torch=={torch_version}",
        metavar="REQUIREMENT",
        help="torch of the converters (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 3 to 9, fewer where a round is long)")
    parser.add_argument(
        "--rounds-of-stock",
        type=int,
        default=1,
        help="those of them where stock's keys and values are over 2 GB (%(default)s)",
    )
    parser.add_argument("--only", type=Cell.parse, action="append", metavar="MODEL,B,W,P,T", help="only such cells")
    parser.add_argument("--engines", nargs="+", choices=_names(), help="only these, and stock")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="longest answer waited for (%(default)s)")
    parser.add_argument(
        "--spin",
        action="store_true",
        help="let OpenMP's threads spin while they wait, its default; for a machine on which nothing else computes",
    )
    parser.add_argument("--record", action="store_true", help="keep the results in benchmarks/results/peers.json")
    arguments = parser.parse_args(argv)
    for name in ("rounds", "rounds_of_stock", "threads"):
        if (given := getattr(arguments, name)) is not None and given < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but got {given}")
    if arguments.record and arguments.only:
        parser.error("--record keeps the whole table; leave out --only")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
