"""What a constraint to items costs: our search with a trie, without one, and transformers' with a prefix function.

    python -m benchmarks.constrained                       # W = 10, 50, 100, 500, and 100 after a longer history
    python -m benchmarks.constrained --widths 100 --items 1000 --prompt 100 500 1000 --rounds 5
    python -m benchmarks.constrained --json benchmarks/results/constrained.json

A history of P tokens (100; once 500) is followed by an item of 4 tokens over codebooks of 8,192, in the "30m" model
(vocabulary 32,000, random weights, float32). All run alternating in one process; ratios are medians of the rounds'
ratios.

The physics: per step the model's output head makes ``[W, V]`` logits and the search reads them once. Without a
constraint it then ranks all V of each row. With a trie it looks up the F children of each beam's node and ranks W · F:
less; with `trie_renormalize` the head makes only the columns that the trie uses ("among"). A prefix function is called
by Python once per beam, and its mask is written row by row.

Of the whole call, ours runs P + 3W tokens through the model, transformers' P·W + 3W, and reads and copies W · P tokens
of keys at every step: with a longer history the ratio tends to W times what a prompt row costs alone, over what it
costs in a batch of W.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_paged_beam  # noqa: F401  registers the name
from hf_paged_beam import TokenTrie

from .harness import record_of_run, seconds_of
from .models import random_llama, random_prompts

CODES, LENGTH = 8192, 4
PAIRS = [(10, 100), (50, 100), (100, 100), (500, 100), (100, 500)]
"""Beams, and tokens of the history."""


def random_items(count: int) -> torch.Tensor:
    """``[N, 4]`` int64."""
    return torch.randint(CODES, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def prefix_function(items: torch.Tensor) -> Callable[[int, torch.Tensor], list[int]]:
    """transformers' way to say the same: a dictionary from beginnings to what may follow. Takes an item's ids alone."""
    following: dict[tuple[int, ...], set[int]] = {}
    for item in items.tolist():
        for end in range(LENGTH):
            following.setdefault(tuple(item[:end]), set()).add(item[end])
    lists = {beginning: sorted(tokens) for beginning, tokens in following.items()}
    return lambda prompt, ids: lists[tuple(ids.tolist())]


RUNS = ("free", "trie", "among", "stock")
RATIOS = (("trie", "free"), ("among", "trie"), ("stock", "trie"))


def measure(width: int, prompt: int, trie: TokenTrie, allowed: Callable, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    model = random_llama("30m")
    call = dict(**random_prompts(model, 1, prompt), num_beams=width, max_new_tokens=LENGTH, do_sample=False)
    ours = dict(**call, custom_generate="hf_paged_beam")
    runs = {
        "free": lambda: model.generate(**ours),
        "trie": lambda: model.generate(**ours, trie=trie),
        "among": lambda: model.generate(**ours, trie=trie, trie_renormalize=True),
        "stock": lambda: model.generate(
            **call, prefix_allowed_tokens_fn=lambda number, ids: allowed(number, ids[prompt:])
        ),
    }
    if not torch.equal(runs["trie"](), runs["stock"]()):
        raise SystemExit(f"W={width}: the trie's best item is not the prefix function's")
    for name in ("free", "among"):
        runs[name]()
    taken: dict[str, list[float]] = {name: [] for name in RUNS}
    for _ in range(rounds):
        for name in RUNS:
            taken[name].append(seconds_of(runs[name], model.device))
    return {
        "num_beams": width,
        "prompt_length": prompt,
        "items": len(trie),
        **{f"{name}_seconds": statistics.median(taken[name]) for name in RUNS},
        **{f"{first}_over_{second}": _ratio(taken[first], taken[second]) for first, second in RATIOS},
        "stock_over_trie_rounds": [theirs / mine for theirs, mine in zip(taken["stock"], taken["trie"], strict=True)],
    }


def _ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def measure_all(pairs: list[tuple[int, int]], counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Every row of the table, printed as it comes: each pair of beams and tokens of the history, for each catalogue."""
    rows = []
    print(
        f"{'items':>9s} {'W':>4s} {'P':>5s} {'trie/free':>9s} {'among/trie':>10s} {'stock/trie':>10s} {'trie s':>8s} "
        f"{'build s':>8s} {'MB':>6s}"
    )
    for count in counts:
        items = random_items(count)
        built = time.perf_counter()
        trie = TokenTrie.from_sequences(items)
        built = time.perf_counter() - built
        allowed = prefix_function(items)
        for width, prompt in pairs:
            row = {**measure(width, prompt, trie, allowed, rounds), "build_seconds": built, "trie_bytes": trie.nbytes}
            rows.append(row)
            print(
                f"{count:9d} {width:4d} {prompt:5d} {row['trie_over_free']:9.3f} {row['among_over_trie']:10.3f} "
                f"{row['stock_over_trie']:10.1f} {row['trie_seconds']:8.3f} {built:8.2f} {trie.nbytes / 1e6:6.1f}",
                flush=True,
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", metavar="W")
    parser.add_argument("--items", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--prompt", type=int, nargs="+", metavar="P", help="tokens of the history")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    pairs = PAIRS
    if arguments.widths or arguments.prompt:
        pairs = list(itertools.product(arguments.widths or [100], arguments.prompt or [100]))
    rows = measure_all(pairs, arguments.items, arguments.rounds)
    figures = {
        "cells": rows,
        **record_of_run(arguments.threads),
        "dtype": "float32",
        "rounds": arguments.rounds,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
