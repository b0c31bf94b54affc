"""What a constraint to items costs: our search with a trie, without one, and transformers' with a prefix function.

    python -m benchmarks.constrained                       # W = 10, 50, 100, 500; a thousand and a million items
    python -m benchmarks.constrained --widths 100 --items 1000 --rounds 5

A history of 100 tokens is followed by an item of 4 tokens over codebooks of 8,192, in the "30m" model (vocabulary
32,000, random weights, float32). The three run alternating in one process; ratios are medians of the rounds' ratios.

The physics: per step the model's output head makes ``[W, V]`` logits and the search reads them once. Without a
constraint it then ranks all V of each row. With a trie it looks up the F children of each beam's node and ranks W · F:
less. A prefix function is called by Python once per beam, and its mask is written row by row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import hf_paged_beam  # noqa: F401  registers the name
from hf_paged_beam import TokenTrie

from .models import random_llama, random_prompts

CODES, LENGTH, PROMPT = 8192, 4, 100


def random_items(count: int) -> torch.Tensor:
    """``[N, 4]`` int64."""
    return torch.randint(CODES, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def prefix_function(items: torch.Tensor) -> Callable[[int, torch.Tensor], list[int]]:
    """transformers' way to say the same: a dictionary from beginnings to what may follow."""
    following: dict[tuple[int, ...], set[int]] = {}
    for item in items.tolist():
        for end in range(LENGTH):
            following.setdefault(tuple(item[:end]), set()).add(item[end])
    lists = {beginning: sorted(tokens) for beginning, tokens in following.items()}
    return lambda prompt, ids: lists[tuple(ids[PROMPT:].tolist())]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(width: int, items: torch.Tensor, trie: TokenTrie, allowed: Callable, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    model = random_llama("30m")
    call = dict(**random_prompts(model, 1, PROMPT), num_beams=width, max_new_tokens=LENGTH, do_sample=False)
    runs = {
        "free": lambda: model.generate(**call, custom_generate="hf_paged_beam"),
        "trie": lambda: model.generate(**call, custom_generate="hf_paged_beam", trie=trie),
        "stock": lambda: model.generate(**call, prefix_allowed_tokens_fn=allowed),
    }
    if not torch.equal(runs["trie"](), runs["stock"]()):
        raise SystemExit(f"W={width}: the trie's best item is not the prefix function's")
    runs["free"]()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds(run))
    pairs = list(zip(taken["free"], taken["trie"], taken["stock"], strict=True))
    return {
        "num_beams": width,
        "items": len(items),
        "trie_over_free": statistics.median(mine / free for free, mine, _ in pairs),
        "stock_over_trie": statistics.median(theirs / mine for _, mine, theirs in pairs),
        **{f"{name}_seconds": statistics.median(run) for name, run in taken.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[10, 50, 100, 500])
    parser.add_argument("--items", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    rows = []
    print(f"{'items':>9s} {'W':>4s} {'trie/free':>9s} {'stock/trie':>10s} {'trie s':>8s} {'build s':>8s} {'MB':>6s}")
    for count in arguments.items:
        items = random_items(count)
        built = time.perf_counter()
        trie = TokenTrie.from_sequences(items)
        built = time.perf_counter() - built
        allowed = prefix_function(items)
        for width in arguments.widths:
            row = measure(width, items, trie, allowed, arguments.rounds)
            rows.append({**row, "build_seconds": built, "trie_bytes": trie.nbytes})
            print(
                f"{count:9d} {width:4d} {row['trie_over_free']:9.3f} {row['stock_over_trie']:10.1f} "
                f"{row['trie_seconds']:8.3f} {built:8.2f} {trie.nbytes / 1e6:6.1f}",
                flush=True,
            )
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
