"""Bytes of keys and values of one search with Llama-3-8B's shape, from the slots that a small model's search uses.

    python -m benchmarks.memory

Slots depend on the tree of beams alone, not on the model's size: a small model with the same W, P and T is searched,
its slots are counted after every step, and each is priced at what one token costs in Llama-3-8B: keys and values of
8 heads of 128 numbers in 32 layers, bfloat16, 128 KiB. The price is checked: the small model's own bytes, counted from
its pools, equal slots times its price per token.
"""

from __future__ import annotations

import argparse
import json
import sys

import transformers

import hf_paged_beam

from .models import random_llama, random_prompts
from .physics import usage_of_steps

LLAMA_3_8B = {"layers": 32, "key_value_heads": 8, "head_size": 128, "bytes_per_number": 2}


def bytes_per_token(shape: dict[str, int]) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape["layers"] * shape["key_value_heads"] * shape["head_size"] * shape["bytes_per_number"]


def search_usage(num_beams: int, prompt_length: int, new_tokens: int) -> list[hf_paged_beam.CacheUsage]:
    """Usage after every step of a search with a small random model."""
    model = random_llama("tiny")
    settings = {"num_beams": num_beams, "max_new_tokens": new_tokens, "do_sample": False}
    return usage_of_steps(model, random_prompts(model, 1, prompt_length), **settings)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--prompt-length", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=200)
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    seen = search_usage(arguments.num_beams, arguments.prompt_length, arguments.new_tokens)
    config = random_llama("tiny").config
    price = bytes_per_token({"layers": config.num_hidden_layers, "key_value_heads": config.num_key_value_heads,
                             "head_size": config.head_dim, "bytes_per_number": 4})  # fmt: skip
    if any(usage.bytes_live != usage.live * price for usage in seen):
        raise SystemExit("the pools' bytes are not their slots times the price of a token")
    token = bytes_per_token(LLAMA_3_8B)
    peak = max(seen, key=lambda usage: usage.bytes_held)
    most_live = max(usage.live for usage in seen)
    mib = 2**20
    separate = arguments.num_beams * (arguments.prompt_length + arguments.new_tokens) * token
    result = {
        "separate_MiB": separate / mib,
        "most_live_MiB": most_live * token / mib,
        "held_MiB": peak.bytes_held / price * token / mib,
        "held_over_live": peak.bytes_held / price / most_live,
        "most_live_slots": most_live,
        "most_slots": max(usage.slots for usage in seen),
    }
    for name, value in result.items():
        print(f"{name:18s}{value:10.3f}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
