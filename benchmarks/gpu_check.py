"""What a GPU shows, in under six minutes: five parts, each of which prints as it goes and ends in one JSON line.

    benchmarks/gpu_check.sh                                        # all parts, each with its own time limit
    python -m benchmarks.gpu_check --part wide                     # one of them
    OUT=folder python -m benchmarks.gpu_check --device cpu --tiny  # the script itself, at sizes that tell nothing else

    correctness   small models, left padding, every early_stopping, float32 and bfloat16: stock's results or not
    protocol      prompts under 100 tokens, 10 new tokens, W = 10 ... 400: queries per second
    wide          W = 256 at contexts of 1000 and 5000, 3 new tokens: milliseconds
    floor         a decode step against what it must move
    reads         values that the host waits for in each step, and CUDA graphs that a search captures

Engines: "stock" is transformers' own search, "eager" ours without keywords, "compiled" ours with ``compile=True`` (left
out, and said so, where this version of the package does not know that keyword). The timed parts use the shape of
Qwen3-1.7B with random weights in bfloat16 and no end token, so that every run does the same work.

The physics: a step reads the weights once, and the keys and values of the prompt and of the tree's live slots once.
These bytes over the device's bandwidth are its floor. With many beams the products of the weights take their time too:
2 operations for each weight and row, stated beside it. Bandwidth and rate are measured first, in the same process.

Results go to ``$OUT/gpu.json``. Without ``OUT`` a run of full size on a GPU writes ``benchmarks/results/gpu.json``, and
any other writes nothing. A part that was cut has ``"complete": false`` and the rows that it reached.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import json
import os
import statistics
import sys
import time
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

import hf_paged_beam

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_models import prompts, tiny_model

RESULTS = Path(__file__).with_name("results") / "gpu.json"
ENGINES: dict[str, dict[str, Any]] = {
    "stock": {},
    "eager": {"custom_generate": "hf_paged_beam"},
    "compiled": {"custom_generate": "hf_paged_beam", "compile": True},
}
OURS = ("eager", "compiled")

QWEN3_1_7B = dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=16_384,
)  # fmt: skip
TINY = dict(
    QWEN3_1_7B, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=500,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much each part does.

    Attributes:
        shape: of the timed parts' model, keywords of its configuration.
        new_tokens: of the correctness part.
        protocol: beams, and stock's seconds over ours that must at least be reached (None: no goal).
        queries: of the protocol, for each number of beams.
        wide: context, batch, and milliseconds that must at most be reached (None: no goal).
        wide_beams: `W` of the wide part.
        floor: beams and contexts.
        copied, product: bytes of the copy, and side of the product, that bandwidth and rate are measured by.
        rounds: of the parts that repeat one call.
    """

    shape: dict[str, Any]
    new_tokens: int
    protocol: tuple[tuple[int, float | None], ...]
    queries: int
    wide: tuple[tuple[int, int, float | None], ...]
    wide_beams: int
    floor: tuple[tuple[int, int], ...]
    copied: int
    product: int
    rounds: int


FULL = Sizes(
    shape=QWEN3_1_7B,
    new_tokens=16,
    # Goals: what SGLang reaches over transformers in a public benchmark (its pull request 15645), and what
    # NVIDIA states of its SID-GR on an H100.
    protocol=((10, 2.6), (50, 2.7), (100, 3.0), (200, 3.5), (400, 4.0)),
    queries=5,
    wide=((1000, 1, 17.6), (5000, 1, None), (5000, 8, None)),
    wide_beams=256,
    floor=((10, 100), (50, 1000), (256, 1000)),
    copied=4 * 2**30,
    product=8192,
    rounds=5,
)
SMALL = Sizes(
    shape=TINY,
    new_tokens=6,
    protocol=((3, None), (8, None)),
    queries=1,
    wide=((40, 1, None), (40, 2, None)),
    wide_beams=8,
    floor=((4, 20),),
    copied=2**20,
    product=64,
    rounds=1,
)
STEP_GOAL, READS_GOAL, CAPTURES_GOAL = 1.5, 1.0, 3


# What all parts share -------------------------------------------------------------------------------------------------


class Report:
    """The results file, written anew after every row, and what is printed.

    Args:
        path: of the file; None to write none.
        run_id: of this run. What parts of the same run have written into the file is kept; of none, nothing.
        told: about this run as a whole.
    """

    def __init__(self, path: Path | None, *, run_id: str | None, told: dict[str, Any]):
        self.path = path
        before = json.loads(path.read_text()) if run_id and path and path.exists() else {}
        kept = before["parts"] if before.get("run_id") == run_id and run_id else {}
        self.results: dict[str, Any] = {"run": True, "run_id": run_id, **told, "parts": kept}

    def begin(self, part: str) -> None:
        """From here on rows are of this part."""
        print(f"--- {part}", flush=True)
        self.part = {"complete": False, "rows": []}
        self.results["parts"][part] = self.part
        self.began = time.perf_counter()
        self._write()

    def note(self, **facts: Any) -> None:
        """Facts about the part as a whole."""
        self.part.update(facts)
        print("    " + _line(facts), flush=True)
        self._write()

    def add(self, row: dict[str, Any]) -> None:
        self.part["rows"].append(row)
        print("    " + _line(row), flush=True)
        self._write()

    def end(self) -> None:
        self.part["complete"], self.part["seconds"] = True, round(time.perf_counter() - self.began, 1)
        self._write()

    @property
    def failed(self) -> bool:
        """Whether a result was wrong; a goal of speed that was missed is a row like others."""
        return any(row.get("equal") is False for part in self.results["parts"].values() for row in part["rows"])

    def _write(self) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")


def _line(facts: dict[str, Any]) -> str:
    def short(value: Any) -> Any:
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return "  ".join(f"{name}={short(value)}" for name, value in facts.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One run of the script.

    Attributes:
        device: where models run.
        sizes: how much is done.
        engines: names among `ENGINES`.
    """

    device: torch.device
    sizes: Sizes
    engines: tuple[str, ...]

    def model(self) -> Qwen3ForCausalLM:
        """A new model for the timed parts: random, bfloat16, of a sequence without an end."""
        torch.manual_seed(0)
        config = Qwen3Config(**self.sizes.shape, eos_token_id=None, bos_token_id=None, pad_token_id=0)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def prompt(self, batch_size: int, length: int, seed: int = 1) -> dict[str, torch.Tensor]:
        """Random ids and a mask of ones, both ``[B, P]`` int64."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, self.sizes.shape["vocab_size"], (batch_size, length), generator=generator)
        return {"input_ids": ids.to(self.device), "attention_mask": torch.ones_like(ids).to(self.device)}

    def seconds(self, run: Callable[[], Any]) -> float:
        """Of one call, the device's work included."""
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def working(self, engines: tuple[str, ...], run: Callable[[str], Any], row: dict[str, Any]) -> list[str]:
        """Those of `engines` whose first call succeeds. `row` gets the seconds of that call, or the error."""
        found = []
        for name in engines:
            try:
                row[f"{name}_first_seconds"] = self.seconds(lambda name=name: run(name))
                found.append(name)
            except Exception as error:  # the other engines shall still be told of
                row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
        return found

    def medians(self, engines: list[str], run: Callable[[str], Any]) -> dict[str, float]:
        """Median seconds of each engine over the rounds, alternating."""
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(self.sizes.rounds):
            for name in engines:
                taken[name].append(self.seconds(lambda name=name: run(name)))
        return {name: statistics.median(times) for name, times in taken.items()}

    def ours(self, engines: tuple[str, ...] | list[str] | None = None) -> tuple[str, ...]:
        """Those engines that are ours."""
        return tuple(name for name in (self.engines if engines is None else engines) if name in OURS)


def goal_met(reached: list[float], goal: float | None, *, at_least: bool) -> bool | None:
    """Whether the best of our engines reached the goal; None where there is no goal, or no engine ran."""
    if goal is None or not reached:
        return None
    return max(reached) >= goal if at_least else min(reached) <= goal


# Correctness ----------------------------------------------------------------------------------------------------------

MODELS = ("llama", "qwen3", "gemma3", "bart", "t5")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ENDS = list(range(5, 16))
"""End tokens: enough of them that sequences do end, so that `early_stopping` matters."""

BEAMS, PROMPTS, SCORE_TOLERANCE, MEAN_TOLERANCE = 4, 6, 1e-4, 0.02
"""In float32 every score must be stock's within `SCORE_TOLERANCE`. In bfloat16 roundings of either search choose other
beams: the mean of our results, scored in float32, must be stock's within `MEAN_TOLERANCE` of its size."""


def correctness(check: Check, report: Report) -> None:
    """Our results against stock's, on a batch of prompts, all but the first padded (decoders: on the left)."""
    for kind in MODELS:
        for name, dtype in DTYPES.items():
            model = tiny_model(kind, dtype=dtype).to(check.device)
            exact = copy.deepcopy(model).to(torch.float32)
            inputs = {key: given.to(check.device) for key, given in prompts(kind, PROMPTS, 9).items()}
            for stopping in (True, False, "never"):
                call = dict(
                    num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=check.sizes.new_tokens,
                    early_stopping=stopping, eos_token_id=ENDS, do_sample=False, return_dict_in_generate=True,
                    output_scores=True,
                )  # fmt: skip
                stock = model.generate(**inputs, **call)
                for engine in check.ours():
                    row = {"model": kind, "dtype": name, "early_stopping": stopping, "engine": engine}
                    report.add({**row, **_against(model, exact, inputs, stock, {**call, **ENGINES[engine]})})


def _against(
    model: Any, exact: Any, inputs: dict[str, torch.Tensor], stock: Any, call: dict[str, Any]
) -> dict[str, Any]:
    """What a row of the correctness part tells of one call of ours."""
    try:
        ours = model.generate(**inputs, **call)
    except Exception as error:
        return {"equal": False, "error": f"{type(error).__name__}: {error}"[:300]}
    gap = (ours.sequences_scores - stock.sequences_scores).abs().max().item()
    told = {
        "path": getattr(ours, "beam_path", "transformers' own"),
        "same_sequences": bool(torch.equal(ours.sequences, stock.sequences)),
        "largest_score_difference": gap,
        "stock_mean": rescored(exact, inputs, stock.sequences).mean().item(),
        "our_mean": rescored(exact, inputs, ours.sequences).mean().item(),
    }
    searched = told["path"] in ("folded", "gathered")
    return {**told, "equal": searched and is_equal(told, model.dtype)}


def is_equal(told: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether a row's numbers are those of the same search; not where one is NaN."""
    if dtype == torch.float32 and not told["largest_score_difference"] <= SCORE_TOLERANCE:
        return False
    return abs(told["our_mean"] - told["stock_mean"]) <= MEAN_TOLERANCE * abs(told["stock_mean"])


@torch.no_grad()
def rescored(model: Any, inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
    """Mean log-probability of the generated tokens of each sequence, the first of `ENDS` included.

    Args:
        model: to score with; one pass over whole sequences, nothing cached.
        inputs: ``input_ids`` and ``attention_mask``, ``[B, P]``.
        sequences: ``[B · n, length]`` int64 as ``generate`` returned them.

    Returns:
        ``[B · n]`` of the model's dtype.
    """
    count = len(sequences) // len(inputs["input_ids"])
    wide = {name: given.repeat_interleave(count, dim=0) for name, given in inputs.items()}
    start = 1 if model.config.is_encoder_decoder else wide["input_ids"].shape[1]
    tokens = sequences[:, start:]
    ends = torch.isin(tokens, torch.tensor(ENDS, device=tokens.device)).long()
    counted = ends.cumsum(1) - ends == 0  # no end before the token
    shown = sequences.clamp_min(0)
    if model.config.is_encoder_decoder:
        logits = model(**wide, decoder_input_ids=shown).logits
    else:
        mask = torch.cat([wide["attention_mask"], torch.ones_like(tokens)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model(input_ids=shown, attention_mask=mask, position_ids=positions).logits
    log_probs = logits[:, start - 1 : -1].log_softmax(-1).gather(2, shown[:, start:].unsqueeze(2)).squeeze(2)
    return (log_probs * counted).sum(1) / counted.sum(1)


# Queries per second ---------------------------------------------------------------------------------------------------


def protocol(check: Check, report: Report) -> None:
    """One prompt after another, of 20 to 99 tokens; seconds over all of them."""
    model, new_tokens = check.model(), 10
    lengths = torch.randint(20, 100, (check.sizes.queries,), generator=torch.Generator().manual_seed(0)).tolist()
    queries = [check.prompt(1, length, seed) for seed, length in enumerate(lengths)]
    report.note(prompt_lengths=lengths, new_tokens=new_tokens)
    for width, goal in check.sizes.protocol:

        def run(engine: str, query: dict[str, torch.Tensor], width: int = width) -> Any:
            call = dict(num_beams=width, max_new_tokens=new_tokens, do_sample=False, **ENGINES[engine])
            return model.generate(**query, **call)

        def first(engine: str, run: Callable = run) -> None:
            for query in queries if engine == "compiled" else queries[:1]:  # what it captures is kept for each shape
                run(engine, query)

        row: dict[str, Any] = {"num_beams": width, "goal": goal}
        working = check.working(check.engines, first, row)
        taken: dict[str, list[float]] = {name: [] for name in working}
        for query in queries:
            for name in working:
                taken[name].append(check.seconds(lambda name=name, query=query, run=run: run(name, query)))
        row |= {f"{name}_queries_per_second": len(times) / sum(times) for name, times in taken.items()}
        if "stock" in taken:
            row |= {f"stock_over_{name}": sum(taken["stock"]) / sum(taken[name]) for name in check.ours(working)}
        reached = [row[f"stock_over_{name}"] for name in OURS if f"stock_over_{name}" in row]
        report.add({**row, "met": goal_met(reached, goal, at_least=True)})


# Wide searches of few tokens ------------------------------------------------------------------------------------------


def wide(check: Check, report: Report) -> None:
    """Milliseconds of one call of 3 new tokens, and of its prompt: a call of one token, which decodes nothing."""
    model = check.model()
    for context, batch, goal in check.sizes.wide:
        prompt = check.prompt(batch, context)

        def run(engine: str, new_tokens: int = 3, prompt: dict[str, torch.Tensor] = prompt) -> Any:
            call = dict(num_beams=check.sizes.wide_beams, max_new_tokens=new_tokens, do_sample=False)
            return model.generate(**prompt, **call, **ENGINES[engine])

        row: dict[str, Any] = {"num_beams": check.sizes.wide_beams, "context": context, "batch_size": batch}
        row["goal_milliseconds"] = goal
        working = check.working(check.ours(), run, row)
        taken = check.medians(working, run)
        row |= {f"{name}_milliseconds": 1e3 * seconds for name, seconds in taken.items()}
        if working:
            row["prompt_milliseconds"] = (
                1e3 * check.medians(working[-1:], lambda engine, run=run: run(engine, new_tokens=1)).popitem()[1]
            )
        reached = [1e3 * seconds for seconds in taken.values()]
        report.add({**row, "met": goal_met(reached, goal, at_least=False)})


# A step against its floor ---------------------------------------------------------------------------------------------

FEW, MANY = 2, 18
"""New tokens of two calls whose difference is ``MANY - FEW`` decode steps."""


def floor(check: Check, report: Report) -> None:
    """Seconds of a decode step: what a call of `MANY` tokens takes beyond one of `FEW`, over the steps between."""
    bandwidth, rate = measured_bandwidth(check), measured_rate(check)
    report.note(bytes_per_second=bandwidth, operations_per_second=rate)
    model = check.model()
    weights = weight_bytes(model)
    for width, context in check.sizes.floor:
        prompt = check.prompt(1, context)

        def run(engine: str, new_tokens: int, width: int = width, prompt: dict[str, torch.Tensor] = prompt) -> Any:
            call = dict(num_beams=width, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
            return model.generate(**prompt, **call, **ENGINES[engine])

        def both(engine: str, run: Callable = run) -> None:
            run(engine, FEW)
            run(engine, MANY)

        row: dict[str, Any] = {"num_beams": width, "context": context, "weight_bytes": weights}
        working = check.working(check.ours(), both, row)
        if working:
            kept = [run(working[0], tokens).kv_usage.bytes_live for tokens in (FEW, MANY)]
            row["kv_bytes"] = statistics.mean(kept)  # of the first of the steps, and of the last
            row["floor_milliseconds"] = 1e3 * (weights + row["kv_bytes"]) / bandwidth
            row["products_milliseconds"] = 1e3 * weights * width / rate  # 2 operations on each weight of 2 bytes
        reached = []
        for name in working:
            times = [check.medians([name], lambda engine, n=n, run=run: run(engine, n))[name] for n in (FEW, MANY)]
            row[f"{name}_milliseconds"] = 1e3 * (times[1] - times[0]) / (MANY - FEW)
            row[f"{name}_over_floor"] = row[f"{name}_milliseconds"] / row["floor_milliseconds"]
            reached.append(row[f"{name}_over_floor"])
        report.add({**row, "goal": STEP_GOAL, "met": goal_met(reached, STEP_GOAL, at_least=False)})


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the weights that a step reads: all of them, but of an embedding that is not the output head too."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.numel() * embedding.element_size()
    return sum(weight.numel() * weight.element_size() for weight in model.parameters()) - looked_up


def measured_bandwidth(check: Check) -> float:
    """Bytes that a large copy reads and writes, over its seconds: the best of several."""
    source = torch.ones(check.sizes.copied, dtype=torch.int8, device=check.device)
    target = torch.empty_like(source)
    return 2 * check.sizes.copied / min(check.seconds(lambda: target.copy_(source)) for _ in range(7))


def measured_rate(check: Check) -> float:
    """Operations per second of a large product of random bfloat16 matrices: the best of several."""
    side = check.sizes.product
    factors = [torch.randn(side, side, device=check.device, dtype=torch.bfloat16) for _ in range(2)]
    return 2 * side**3 / min(check.seconds(lambda: factors[0] @ factors[1]) for _ in range(7))


# What the host waits for ----------------------------------------------------------------------------------------------


def reads(check: Check, report: Report) -> None:
    """Reads of a step: those of a longer call less those of a shorter one, for every call prepares with some."""
    model, width = check.model(), check.sizes.protocol[0][0]
    prompt = check.prompt(1, 50)

    def run(engine: str, new_tokens: int) -> Any:
        call = dict(num_beams=width, max_new_tokens=new_tokens, do_sample=False, **ENGINES[engine])
        return model.generate(**prompt, **call)

    for engine in check.engines:
        row: dict[str, Any] = {"engine": engine, "num_beams": width}
        with counted_graphs() as graphs:
            working = check.working((engine,), lambda name: [run(name, tokens) for tokens in (FEW, MANY)], row)
        row["captures_of_the_first_two_calls"] = graphs["capture_begin"]
        if working:
            counted = {}
            for tokens in (FEW, MANY):
                with host_reads(check.device) as counts, counted_graphs() as graphs:
                    run(engine, tokens)
                counted[tokens] = counts["read"]
            row["reads_per_step"] = (counted[MANY] - counted[FEW]) / (MANY - FEW)
            row |= {"reads_of_a_call": counted[FEW], "captures_of_a_later_call": graphs["capture_begin"]}
            row["replays_of_a_later_call"] = graphs["replay"]
        met = None
        if engine in OURS and working:
            few_captures = row["captures_of_the_first_two_calls"] <= 2 * CAPTURES_GOAL
            met = row["reads_per_step"] <= READS_GOAL and few_captures and row["captures_of_a_later_call"] == 0
            if engine == "compiled" and check.device.type == "cuda":  # else it fell back to eager steps
                met = met and row["replays_of_a_later_call"] > 0
        report.add({**row, "met": met})


@contextlib.contextmanager
def host_reads(device: torch.device) -> Iterator[Counter]:
    """Counts under "read", when the context has ended, how often the host waited for a value of the device."""
    counts: Counter = Counter()
    if device.type != "cuda":  # nothing can be waited for: what would be is counted
        with contextlib.ExitStack() as patches:
            for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
                counting = _counting(getattr(torch.Tensor, name), counts, "read")
                patches.enter_context(unittest.mock.patch.object(torch.Tensor, name, counting))
            yield counts
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts["read"] = sum("called a synchronizing" in str(warning.message) for warning in caught)


def _counting(method: Callable, counts: Counter, name: str) -> Callable:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(self, *args, **kwargs)

    return counted


@contextlib.contextmanager
def counted_graphs() -> Iterator[Counter]:
    """Counts captures ("capture_begin") and replays ("replay") of CUDA graphs, whoever makes them."""
    counts: Counter = Counter()
    with contextlib.ExitStack() as patches:
        for name in ("capture_begin", "replay"):
            counting = _counting(getattr(torch.cuda.CUDAGraph, name), counts, name)
            patches.enter_context(unittest.mock.patch.object(torch.cuda.CUDAGraph, name, counting))
        yield counts


# The command ----------------------------------------------------------------------------------------------------------

PARTS = {"correctness": correctness, "protocol": protocol, "wide": wide, "floor": floor, "reads": reads}


def engines_known(wanted: str, device: torch.device) -> tuple[str, ...]:
    """The engines to run; says which are left out, and why.

    Args:
        wanted: "auto" (``compile=True`` is tried on a GPU alone), "on" or "off".
        device: that models run on.
    """
    if "compile" not in hf_paged_beam.Options.__dataclass_fields__:
        print("compile: this version of the package does not know that keyword; skipped", flush=True)
        return ("stock", "eager")
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        print("compile: left out", flush=True)
        return ("stock", "eager")
    return ("stock", "eager", "compiled")


def results_path(device: torch.device, tiny: bool) -> Path | None:
    """Where results are written, if anywhere; see the module's header."""
    if folder := os.environ.get("OUT"):
        return Path(folder) / "gpu.json"
    return RESULTS if device.type == "cuda" and not tiny else None


def about(device: torch.device, tiny: bool, engines: tuple[str, ...]) -> dict[str, Any]:
    """What the results say of the run as a whole."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "tiny": tiny,
        "engines": list(engines),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "hf_paged_beam": hf_paged_beam.__version__,
        },
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where models run (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="sizes that try the script alone")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--run-id", help="keep what parts with this id wrote into the results file")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="whether to run compile=True")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU; use --device cpu --tiny to try the script itself")
    transformers.logging.set_verbosity_error()
    engines = engines_known(arguments.compile, device)
    check = Check(device=device, sizes=SMALL if arguments.tiny else FULL, engines=engines)
    told = about(device, arguments.tiny, engines)
    report = Report(results_path(device, arguments.tiny), run_id=arguments.run_id, told=told)
    for part in arguments.part or PARTS:
        report.begin(part)
        PARTS[part](check, report)
        report.end()
    print(json.dumps(report.results), flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
