"""A trained model on English: SmolLM2-135M, four prompts one after another, in float32 and bfloat16.

    python tests/fetch_models.py smollm2 && python -m benchmarks.compare --real

A round is all four prompts. In float32 the best sequences must be stock's. In bfloat16 rounding moves near ties, and
two correct searches part; there each engine's best sequences are scored anew in float32, without a cache: "gain" is the
mean over the prompts of the engine's score less stock's, in nats per token. Near 0, neither searches worse.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import harness, physics
from .harness import DTYPES, Conditions
from .kv_dtype import score_anew

FOLDER = Path(__file__).parent.parent / "tests" / ".models" / "smollm2"
NAME, NEW_TOKENS, WIDTHS = "SmolLM2-135M", 20, (4, 10, 50)
PROMPTS = (
    "The lighthouse keeper climbed the stairs every evening, and",
    "Water boils at a lower temperature on a high mountain than at the coast. The reason is that",
    "Three friends opened a small bakery near the station. In the first week nobody came. In the second week",
    "To plant a tree, dig a hole twice as wide as its roots. Set the tree upright, fill the hole with soil, and",
)


def measure(width: int, conditions: Conditions) -> dict[str, Any]:
    """One row: all prompts, with so many beams. To be run in a process of its own."""
    conditions.prepare_process()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=DTYPES[conditions.dtype]).eval().to(conditions.device)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    prompts = [dict(tokenizer([text], return_tensors="pt").to(model.device)) for text in PROMPTS]
    settings = {"num_beams": width, "max_new_tokens": NEW_TOKENS, "do_sample": False}

    def all_prompts(engine: str) -> list[torch.Tensor]:
        arguments = {**settings, **conditions.arguments_of(engine)}
        return [model.generate(**inputs, **arguments)[0] for inputs in prompts]

    runs = {engine: functools.partial(all_prompts, engine) for engine in conditions.engines}
    found = {engine: run() for engine, run in runs.items()}  # and a warm-up
    one_round = sum(harness.seconds_of(run, model.device) for run in runs.values())
    taken = harness.in_turns(runs, harness.how_many_rounds(conditions, one_round), model.device)
    row = {"model": NAME, "dtype": conditions.dtype, "num_beams": width, "new_tokens": NEW_TOKENS,
           "prompt_lengths": [inputs["input_ids"].shape[1] for inputs in prompts]}  # fmt: skip
    told = _physics(model, conditions.measure_machine(), prompts, settings)
    engines = harness.summary(taken)
    for summed in engines.values():
        summed["over_floor"] = summed["seconds"] / told["floor_seconds"]
    return {**row, "engines": _with_scores(engines, found, row["prompt_lengths"]), "physics": told}


def _physics(model: Any, machine: physics.Machine, prompts: list[dict], settings: dict) -> dict[str, Any]:
    """Of all prompts together; the same numbers of each are added up, the machine's are not."""
    cost = physics.ModelCost.of(model)
    each = [
        physics.told(cost, machine, [inputs["input_ids"].shape[1]], settings["num_beams"],
                     physics.live_of_steps(model, inputs, **settings))
        for inputs in prompts
    ]  # fmt: skip
    summed = ("kv_bytes_read", "kv_bytes_touched_by_stock", "flops", "floor_seconds")
    return {**each[0], **{name: sum(one[name] for one in each) for name in summed}}


def _with_scores(engines: dict, found: dict[str, list[torch.Tensor]], lengths: list[int]) -> dict[str, Any]:
    """How many best sequences are those of the first engine, and how scores anew differ from its."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    scores = {
        name: [score_anew(model, ids.cpu(), length)[0] for ids, length in zip(rows, lengths, strict=True)]
        for name, rows in found.items()
    }
    reference = next(iter(found))
    for name, told in engines.items():
        same = [torch.equal(mine, theirs) for mine, theirs in zip(found[name], found[reference], strict=True)]
        gains = [mine - theirs for mine, theirs in zip(scores[name], scores[reference], strict=True)]
        told |= {"same": sum(same), "of": len(same), "gain": statistics.mean(gains)}
    return engines


def format_row(row: dict[str, Any]) -> str:
    """Lines of the printed table, one per engine."""
    return "\n".join(
        f"{row['dtype']:>9s}{row['num_beams']:5d} {name:>9s}{told['seconds']:9.3f}{told.get('ratio', 1):7.2f}"
        f"{told['over_floor']:8.1f}  {told['same']}/{told['of']} {told['gain']:9.5f}"
        for name, told in row["engines"].items()
    )


def run(conditions: Conditions, *, record: bool) -> int:
    """The table; a line where the model is not there."""
    if not (FOLDER / "config.json").exists():
        print(f"skipped: {NAME} is not in {FOLDER.relative_to(FOLDER.parents[2])}; "
              f"fetch it by: python tests/fetch_models.py smollm2", flush=True)  # fmt: skip
        return 0
    print(
        f"{'dtype':>9s}{'W':>5s} {'engine':>9s}{'seconds':>9s}{'ratio':>7s}{'/floor':>8s}  same {'gain':>9s}",
        flush=True,
    )
    rows = []
    for dtype in ("float32", "bfloat16"):
        for width in WIDTHS:
            rows.append(harness.in_fresh_process(measure, width, dataclasses.replace(conditions, dtype=dtype)))
            print(format_row(rows[-1]), flush=True)
    harness.publish("real", rows, conditions, record=record, prompts=PROMPTS)
    return 0
