"""What all tables share: cells, engines, timing in turns, the machine's record, results.

A cell is measured in a process of its own: what one leaves behind in the allocator makes the next faster. There all
engines are warmed up, so that nothing compiles or packs in a timed round, then run in turns, round by round. Seconds
are medians; ratios are medians of the ratios of the rounds, for the machine drifts. All must return the same best
sequences.

    stock      transformers' own search
    plain      ours, without further keywords
    prepack    ours with ``prepack=True``
    switches   ours with what is offered: ``compile=True, prepack=True``, on a GPU ``compile=True``
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_paged_beam
from hf_paged_beam import versions
from hf_paged_beam.side_by_side import cache_bytes

from . import physics
from .models import SHAPES, random_model, random_prompts

RESULTS = Path(__file__).parent / "results"
NAME = "hf_paged_beam"
SWITCHES = {"stock": (), "plain": (), "prepack": ("prepack",), "switches": ("compile", "prepack")}
ENGINES = ("stock", "plain", "switches")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_ROUNDS, LEAST_ROUNDS = 31, 3
WARM_UPS = 2
"""Calls of our search before the timed ones; what is compiled may be compiled for a second shape in the second call."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of a table.

    Attributes:
        model: name of a shape.
        batch_size, num_beams, prompt_length, new_tokens: `B`, `W`, `P`, `T`.
        plain_goal, switches_goal: stock's seconds over the engine's that must at least be reached; None for no goal.
    """

    model: str
    batch_size: int
    num_beams: int
    prompt_length: int
    new_tokens: int
    plain_goal: float | None = None
    switches_goal: float | None = None

    @classmethod
    def parse(cls, text: str) -> Cell:
        """``model,B,W,P,T``.

        Raises:
            argparse.ArgumentTypeError: with what is accepted.
        """
        model, *numbers = text.split(",")
        if len(numbers) != 4 or not all(number.isdigit() and int(number) for number in numbers):
            raise argparse.ArgumentTypeError(f"expected model,B,W,P,T with numbers of at least 1, but got {text!r}")
        if model not in SHAPES:
            raise argparse.ArgumentTypeError(f"expected a model of {', '.join(SHAPES)}, but got {model!r}")
        return cls(model, *map(int, numbers))

    def __str__(self) -> str:
        return f"{self.model},{self.batch_size},{self.num_beams},{self.prompt_length},{self.new_tokens}"

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of ``generate``."""
        return {"num_beams": self.num_beams, "max_new_tokens": self.new_tokens, "do_sample": False}

    def goal_of(self, engine: str) -> float | None:
        """The goal of an engine's ratio."""
        return {"plain": self.plain_goal, "switches": self.switches_goal}.get(engine)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """How cells are measured.

    Attributes:
        engines: names of those to run; stock, where it is one of them, is what the others are compared with.
        rounds: timed rounds; None for as many as `seconds` allow, from 3 to 31.
        seconds: that the timed rounds of a cell may take.
        threads: of torch.
        dtype: name of the model's.
        device: of the model.
    """

    engines: tuple[str, ...] = ENGINES
    rounds: int | None = None
    seconds: float = 60.0
    threads: int = 2
    dtype: str = "float32"
    device: str = "cpu"

    def prepare_process(self) -> None:
        """Set what is set once per process."""
        torch.set_num_threads(self.threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def model(self, shape: str) -> Any:
        """A random model."""
        return random_model(shape, DTYPES[self.dtype], self.device)

    def measure_machine(self) -> physics.Machine:
        """Bandwidth and peak, here and now."""
        return physics.measure_machine(torch.device(self.device), DTYPES[self.dtype])

    def arguments_of(self, engine: str) -> dict[str, Any]:
        """What an engine adds to a call of ``generate``."""
        if engine == "stock":
            return {}
        return {"custom_generate": NAME, **dict.fromkeys(self._switches(engine), True)}

    def _switches(self, engine: str) -> tuple[str, ...]:
        return tuple(switch for switch in SWITCHES[engine] if self.device == "cpu" or switch != "prepack")

    def known(self) -> Conditions:
        """The same without the engines whose switches the installed package does not know, which are told."""
        known = hf_paged_beam.Options.__dataclass_fields__
        missing = {name: [switch for switch in self._switches(name) if switch not in known] for name in self.engines}
        for name, switches in missing.items():
            if switches:
                print(f"without {name!r}: this hf_paged_beam does not know {', '.join(switches)}", flush=True)
        return dataclasses.replace(self, engines=tuple(name for name in self.engines if not missing[name]))


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """How long a call takes, until a GPU is done as well."""
    physics.synchronize(device)
    start = time.perf_counter()
    run()
    physics.synchronize(device)
    return time.perf_counter() - start


def in_turns(runs: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every engine in every round; all run once in each."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds_of(run, device))
    return taken


def how_many_rounds(conditions: Conditions, one_round: float) -> int:
    """Timed rounds, where one takes so many seconds."""
    if conditions.rounds is not None:
        return conditions.rounds
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(conditions.seconds / one_round)))


def summary(taken: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Of each engine: median seconds, and against stock, if it ran, the median of the rounds' ratios."""
    told: dict[str, dict[str, Any]] = {}
    for name, rounds in taken.items():
        told[name] = {"seconds": statistics.median(rounds), "rounds": [round(taken, 5) for taken in rounds]}
        if name != "stock" and "stock" in taken:
            ratios = [theirs / mine for theirs, mine in zip(taken["stock"], rounds, strict=True)]
            told[name] |= {"ratio": statistics.median(ratios), "ratios": [round(ratio, 3) for ratio in ratios]}
    return told


@contextmanager
def rows_noted(model: Any) -> Iterator[list[int]]:
    """Rows that each forward pass of the model sees."""
    rows: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(kwargs["input_ids"].shape[0])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def measure_cell(cell: Cell, conditions: Conditions) -> dict[str, Any]:
    """One row: of each engine seconds, ratio, rows of the prompt's pass, keys and values; and the physics.

    To be run in a process of its own, by `in_fresh_process`.
    """
    conditions.prepare_process()
    model = conditions.model(cell.model)
    inputs = random_prompts(model, cell.batch_size, cell.prompt_length)
    runs = {
        name: functools.partial(model.generate, **inputs, **cell.settings, **conditions.arguments_of(name))
        for name in conditions.engines
    }
    engines, one_round, outputs = {}, 0.0, {}
    for name, run in runs.items():
        engines[name], outputs[name], seconds = _first_calls(name, run, model)
        one_round += seconds
    taken = in_turns(runs, how_many_rounds(conditions, one_round), model.device)
    live = physics.live_of_steps(model, inputs, **cell.settings)
    machine = conditions.measure_machine()  # not before: what it frees would spare stock's copies their page faults
    told = physics.told(physics.ModelCost.of(model), machine, [cell.prompt_length] * cell.batch_size, cell.num_beams,
                        live)  # fmt: skip
    reference = next(iter(outputs.values())).sequences
    for name, timed in summary(taken).items():
        engines[name] |= {
            **timed, "same": torch.equal(outputs[name].sequences, reference), "goal": cell.goal_of(name),
            "over_floor": timed["seconds"] / told["floor_seconds"],
        }  # fmt: skip
    row = {"model": cell.model, "batch_size": cell.batch_size, "num_beams": cell.num_beams,
           "prompt_length": cell.prompt_length, "new_tokens": cell.new_tokens}  # fmt: skip
    return {**row, "engines": engines, "physics": told}


def _first_calls(name: str, run: Callable[..., Any], model: Any) -> tuple[dict[str, Any], Any, float]:
    """Warm an engine up: what its call holds, its output, and the seconds that its last warm-up call took."""
    told: dict[str, Any] = {}
    if name in ("stock", "plain"):  # what is compiled is left without hooks
        with rows_noted(model) as rows:
            seconds, output = _timed(run, model.device)
        told["prompt_rows"] = rows[0]
    else:
        seconds, output = _timed(run, model.device)
    if name != "stock":  # a call of stock's may take minutes; one is enough for it
        for _ in range(WARM_UPS - 1):
            seconds = seconds_of(run, model.device)
    return {**told, **kv_bytes(output)}, output, seconds


def kv_bytes(output: Any) -> dict[str, int]:
    """Bytes of keys and values that an engine held when it ended; of ours, also of the live ones."""
    usage = getattr(output, "kv_usage", None)
    if usage is None:
        return {"kv_bytes": cache_bytes(getattr(output, versions.CACHE_ARGUMENT))}
    return {"kv_bytes": usage.bytes_held, "live_kv_bytes": usage.bytes_live}


def _timed(run: Callable[..., Any], device: torch.device) -> tuple[float, Any]:
    physics.synchronize(device)
    start = time.perf_counter()
    output = run(return_dict_in_generate=True)
    physics.synchronize(device)
    return time.perf_counter() - start, output


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call that has a process to itself."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(function, *arguments).result()


def record_of_run(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The machine, versions and date that every results file tells."""
    machine: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count(), "threads": threads}
    if device != "cpu":
        machine["gpu"] = torch.cuda.get_device_name(device)
    versions_of = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        NAME: hf_paged_beam.__version__,
    }
    return {"machine": machine, "versions": versions_of, "date": datetime.date.today().isoformat()}


def _processor() -> str:
    """Name of the processor, with the instructions that matter here."""
    architecture = platform.processor() or platform.machine()
    return f"{architecture} ({torch.backends.cpu.get_cpu_capability()})"


def publish(table: str, rows: list[dict[str, Any]], conditions: Conditions, *, record: bool, **more: Any) -> None:
    """Print one JSON line; with `record`, keep it as ``benchmarks/results/TABLE.json``."""
    results = {
        "table": table, "cells": rows, **record_of_run(conditions.threads, conditions.device),
        "dtype": conditions.dtype, **more,
    }  # fmt: skip
    print(json.dumps(results), flush=True)
    if record:
        (RESULTS / f"{table}.json").write_text(json.dumps(results, indent=1) + "\n")


def beside_recorded(table: str, rows: list[dict[str, Any]], conditions: Conditions) -> list[dict[str, Any]]:
    """Rows of some cells, and of the other cells those that are kept of the same day, machine and versions.

    Args:
        table: name of the results.
        rows: of a run of some cells.
        conditions: of that run.
    """
    path = RESULTS / f"{table}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    told = {**record_of_run(conditions.threads, conditions.device), "dtype": conditions.dtype}
    if any(kept.get(name) != value for name, value in told.items()):
        return rows
    new = {_identity(row): row for row in rows}
    old = [_identity(row) for row in kept["cells"]]
    there = [new.get(identity, row) for identity, row in zip(old, kept["cells"], strict=True)]
    return there + [row for identity, row in new.items() if identity not in old]


def _identity(row: Mapping[str, Any]) -> tuple:
    return tuple(row[field] for field in ("model", "batch_size", "num_beams", "prompt_length", "new_tokens"))


def new_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the arguments that all tables have; `defaults` are those of `Conditions` that differ."""
    given = dataclasses.replace(Conditions(), **defaults)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=SWITCHES, default=list(given.engines), metavar="NAME",
                        help=f"of {', '.join(SWITCHES)} (default: {' '.join(given.engines)})")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 3 to 31, as --seconds allow)")
    parser.add_argument("--seconds", type=float, default=given.seconds, help="of a cell's rounds (%(default)s)")
    parser.add_argument("--threads", type=int, default=given.threads)
    parser.add_argument("--dtype", choices=DTYPES, default=given.dtype)
    parser.add_argument("--device", default=given.device)
    parser.add_argument("--record", action="store_true", help="keep the results in benchmarks/results")
    return parser


def conditions_of(arguments: argparse.Namespace) -> Conditions:
    """What the common arguments say, without engines that are not there."""
    names = [field.name for field in dataclasses.fields(Conditions)]
    given = {name: getattr(arguments, name) for name in names}
    return Conditions(**{**given, "engines": tuple(given["engines"])}).known()


def note(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)
