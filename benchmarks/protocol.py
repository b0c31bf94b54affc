"""The public protocol of beam search servers: short prompts, one after another, 10 new tokens, queries per second.

    python -m benchmarks.protocol --record                      # "30m", W = 10, 50, 100, 200, 400
    python -m benchmarks.protocol --model qwen3-1.7b --dtype bfloat16 --widths 10 50 --queries 5

Prompts are random, of 20 to 99 tokens; all engines answer each in turn. The ratio is the median over the queries of
stock's seconds over the engine's. Goals, of our search with its switches on a GPU with Qwen3-1.7B's shape in bfloat16:
what a server's engine reached over transformers 4.57 on that protocol (SGLang, pull request 15645): 2.6, 2.7, 3.0, 3.5,
4.0. On a CPU no goal is stated. A row stops at --seconds, at 3 queries the soonest, and tells how many it answered.

The physics: 10 tokens are one pass over the prompt and 9 steps. Stock runs W · P + 9 · W rows through the model, ours
P + 9 · W: where rows are what costs, the ratio tends to 1 + P / 9 for many beams, about 8 for the middle prompt. Where
reading the weights is what costs, both read them 10 times, and the ratio is near 1.
"""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import torch

from . import harness, physics
from .harness import Conditions
from .models import SHAPES

WIDTHS = (10, 50, 100, 200, 400)
GPU_GOALS = dict(zip(WIDTHS, (2.6, 2.7, 3.0, 3.5, 4.0), strict=True))
SHORTEST, LONGEST, NEW_TOKENS = 20, 99, 10
LEAST_QUERIES = 3


def random_lengths(count: int) -> list[int]:
    """Tokens of each prompt: always the same draw."""
    draw = random.Random(0)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(count)]


def random_queries(model: Any, lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """Prompts, each ``[1, P]``."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = model.config.vocab_size
    rows = [torch.randint(1, vocabulary, (1, length), generator=generator).to(model.device) for length in lengths]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]


def measure(shape: str, width: int, count: int, conditions: Conditions) -> dict[str, Any]:
    """One row. To be run in a process of its own."""
    conditions.prepare_process()
    model = conditions.model(shape)
    queries = random_queries(model, random_lengths(count))
    settings = {"num_beams": width, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    calls = {engine: {**settings, **conditions.arguments_of(engine)} for engine in conditions.engines}
    _warm_up(model, queries, calls)
    taken: dict[str, list[float]] = {engine: [] for engine in calls}
    same = dict.fromkeys(calls, 0)
    for number, inputs in enumerate(queries):
        found: dict[str, torch.Tensor] = {}
        for engine, call in calls.items():
            run = functools.partial(_answer, model, inputs, call, found, engine)
            taken[engine].append(harness.seconds_of(run, model.device))
            same[engine] += torch.equal(found[engine], found[next(iter(calls))])
        if number + 1 >= LEAST_QUERIES and sum(map(sum, taken.values())) > conditions.seconds:
            break
    return _row(model, width, queries[: number + 1], taken, same, conditions) | {"model": shape}


def _answer(model: Any, inputs: dict, call: dict, found: dict[str, torch.Tensor], engine: str) -> None:
    found[engine] = model.generate(**inputs, **call)


def _warm_up(model: Any, queries: list[dict], calls: dict[str, dict]) -> None:
    """The first query for all; all queries where something compiles, which may depend on a prompt's length."""
    for call in calls.values():
        for inputs in queries if call.get("compile") else queries[:1]:
            model.generate(**inputs, **call)


def _row(
    model: Any, width: int, queries: list[dict], taken: dict[str, list[float]], same: dict[str, int],
    conditions: Conditions,
) -> dict[str, Any]:  # fmt: skip
    lengths = [inputs["input_ids"].shape[1] for inputs in queries]
    settings = {"num_beams": width, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    live = physics.live_of_steps(model, queries[middle], **settings)
    machine, cost = conditions.measure_machine(), physics.ModelCost.of(model)
    told = physics.told(cost, machine, [lengths[middle]], width, live)
    engines = harness.summary(taken)
    for name, summed in engines.items():
        summed |= {
            "queries_per_second": len(lengths) / sum(taken[name]),
            "same": same[name],
            "over_floor": summed["seconds"] / told["floor_seconds"],
            "goal": GPU_GOALS.get(width) if name == "switches" and conditions.device != "cpu" else None,
        }
    return {"num_beams": width, "new_tokens": NEW_TOKENS, "prompt_lengths": lengths, "engines": engines,
            "physics_of_a_median_prompt": told}  # fmt: skip


def format_row(row: dict[str, Any]) -> str:
    """Lines of the printed table, one per engine."""
    count = len(row["prompt_lengths"])
    return "\n".join(
        f"{row['num_beams']:5d} {name:>9s}{told['queries_per_second']:12.3f}{told.get('ratio', 1.0):8.2f}"
        f"{told['goal'] or '-':>6}{told['over_floor']:8.1f}  {told['same']}/{count}"
        for name, told in row["engines"].items()
    )


def main(argv: list[str] | None = None) -> int:
    parser = harness.new_parser(__doc__, seconds=120.0)
    parser.add_argument("--model", choices=SHAPES, default="30m")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--queries", type=int, default=20)
    arguments = parser.parse_args(argv)
    if arguments.queries < 1:
        parser.error(f"--queries must be at least 1, but got {arguments.queries}")
    if arguments.rounds is not None:
        parser.error("--rounds is not for this table, where each query is a round; give --queries")
    conditions = harness.conditions_of(arguments)
    print(f"{'W':>5s} {'engine':>9s}{'queries/s':>12s}{'ratio':>8s}{'goal':>6s}{'/floor':>8s}  same", flush=True)
    rows = []
    for width in arguments.widths:
        rows.append(harness.in_fresh_process(measure, arguments.model, width, arguments.queries, conditions))
        print(format_row(rows[-1]), flush=True)
    harness.publish("protocol", rows, conditions, record=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
