"""What prompts of different widths cost in one batch: with lists, all at the widest, and one call after another.

    python -m benchmarks.mixed                             # widths 50 10 10 10, and 64 32 16 8 4 2
    python -m benchmarks.mixed --widths 50 10 --rounds 5

The "30m" model (vocabulary 32,000, random weights, float32), prompts of 100 tokens, 10 new tokens. The three run
alternating in one process; ratios are medians of the rounds' ratios.

The physics: a decode step reads the model's weights once, whatever the number of rows, and computes on every row. One
call with lists runs the sum of the widths; at the widest it would run B · W rows; one after another reads the weights B
times as often. What is padded to the widest is the attention's query alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_paged_beam  # noqa: F401  registers the name

from .harness import record_of_run, seconds_of
from .models import random_llama, random_prompts

PROMPT, NEW = 100, 10
RESULTS = Path(__file__).with_name("results") / "mixed.json"


def measure(widths: Sequence[int], rounds: int) -> dict[str, Any]:
    """One row of the table."""
    model = random_llama("30m")
    inputs = random_prompts(model, len(widths), PROMPT)
    call = {"max_new_tokens": NEW, "do_sample": False, "custom_generate": "hf_paged_beam"}

    def alone() -> list[torch.Tensor]:
        rows = [{name: given[row : row + 1] for name, given in inputs.items()} for row in range(len(widths))]
        return [model.generate(**row, **call, num_beams=width) for row, width in zip(rows, widths, strict=True)]

    runs: dict[str, Callable[[], Any]] = {
        "lists": lambda: model.generate(**inputs, **call, num_beams=list(widths)),
        "widest": lambda: model.generate(**inputs, **call, num_beams=max(widths)),
        "alone": alone,
    }
    if not torch.equal(runs["lists"](), torch.cat(alone())):
        raise SystemExit(f"widths {widths}: the results are not those of each prompt alone")
    runs["widest"]()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds_of(run, model.device))
    triples = list(zip(taken["lists"], taken["widest"], taken["alone"], strict=True))
    return {
        "widths": list(widths),
        "rows": sum(widths),
        "rows_at_the_widest": len(widths) * max(widths),
        "widest_over_lists": statistics.median(wide / mine for mine, wide, _ in triples),
        "alone_over_lists": statistics.median(each / mine for mine, _, each in triples),
        **{f"{name}_seconds": statistics.median(run) for name, run in taken.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", help="beams of each prompt; None for the two standard cases")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="keep the rows among the results")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    print(f"{'rows':>5s} {'of':>5s} {'widest/lists':>12s} {'alone/lists':>11s} {'lists s':>8s}  widths")
    rows = []
    for widths in [arguments.widths] if arguments.widths else [[50, 10, 10, 10], [64, 32, 16, 8, 4, 2]]:
        row = measure(widths, arguments.rounds)
        rows.append(row)
        print(
            f"{row['rows']:5d} {row['rows_at_the_widest']:5d} {row['widest_over_lists']:12.2f} "
            f"{row['alone_over_lists']:11.2f} {row['lists_seconds']:8.3f}  {widths}",
            flush=True,
        )
    results = {**record_of_run(threads=2), "rows": rows}
    print(json.dumps(results))
    if arguments.record:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
