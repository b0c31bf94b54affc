"""Where the time of a call goes: the model's forward, selection, index work, Python.

    python -m benchmarks.breakdown --record
    python -m benchmarks.breakdown --only 30m,1,50,100,10 --engines plain stock

Functions of the package and modules of the model are wrapped from here; a clock charges each moment to the innermost
wrapped call that is running, so that parts add up without overlap:

    in the model's forward
      products    its linear layers
      attention   its attention modules but for their linear layers: rotary embedding, attention itself
      K/V         the cache's `update`: what a layer writes, and how it shows the pool
      rest        norms, activations, sums, dispatch
    outside
      selection   log-softmax, processors, top-k, what runs on
      index       fork, masks over the pool (made inside the forward, but not the model's), growth, prompts that leave
      loop        the search's own Python, preparing the model's inputs, the one read on the host
      around      transformers' preparation of the call, and its end

"outside" is the share of all that is outside the model's forward; its goal is at most 5% at V = 32,000, at V = 151,936
10% for W up to 100 and 20% above. "unaccounted" is the call's time less the sum of the parts. "wrapped" is the wrapped
call's seconds over those of the call without wrappers, the two in turns: wrappers cost 2 to 4 us each, which falls on
small models. A compiled step has no parts: with the switches, the prompt's pass and what is compiled are "rest". On a
CPU only, where a call is over when it returns.

The physics: the forward does 2 · R · weights operations, selection reads R · V logits once or twice, index work touches
R · (P + t) numbers.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import cache_utils

from hf_paged_beam import cache
from hf_paged_beam.cache.index import BeamIndex
from hf_paged_beam.cache.layers import PoolLayer
from hf_paged_beam.generation import capture
from hf_paged_beam.generation.decode import DecodeSteps
from hf_paged_beam.generation.group import BeamGroup
from hf_paged_beam.generation.search import BeamSearch

from . import harness
from .harness import Cell, Conditions
from .models import random_prompts

CELLS = [Cell.parse(f"{model},1,{width},100,10") for model in ("30m", "30m-151936") for width in (10, 50, 100, 400)]

FORWARD = ("products", "attention", "K/V", "rest")
OUTSIDE = ("selection", "index", "loop", "around")
PARTS = (*FORWARD, *OUTSIDE)

WRAPPED = [
    (BeamSearch, "run", "loop"),
    (DecodeSteps, "__call__", "loop"),
    (BeamGroup, "step", "selection"),
    (cache.PagedBeamCache, "fork", "index"),
    (cache.PagedBeamCache, "grow", "index"),
    (cache.PagedBeamCache, "leave", "index"),
    (BeamIndex, "visible", "index"),
    (BeamIndex, "visible_additive", "index"),
    (BeamIndex, "positions", "index"),
    (PoolLayer, "update", "K/V"),
]
"""Functions of the package, and the part that their time is charged to."""

WRAPPED_OF_COMPILED = [
    (BeamSearch, "run", "loop"),
    (BeamSearch, "_prompt", "rest"),
    (DecodeSteps, "__call__", "loop"),
    (capture, "captured_step", "index"),
    (capture.Captures, "run_compiled", "rest"),
    *(one for one in WRAPPED if one[0] in (BeamGroup, cache.PagedBeamCache)),
]
"""Nothing is put into what is compiled."""

WRAPPED_OF_STOCK = [(cache_utils.DynamicLayer, "update", "K/V"), (cache_utils.Cache, "reorder_cache", "index")]
"""transformers' selection has no function of its own, and counts as "around"."""


class Clock:
    """Charges time to the innermost part that is running.

    Attributes:
        spent: seconds of each part.
        entered: how often each was entered.
    """

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.entered = dict.fromkeys(PARTS, 0)
        self._running: list[str] = []
        self._since = 0.0

    def enter(self, part: str) -> None:
        """From now on, time is this part's."""
        now = time.perf_counter()
        if self._running:
            self.spent[self._running[-1]] += now - self._since
        self._running.append(part)
        self.entered[part] += 1
        self._since = time.perf_counter()

    def leave(self) -> None:
        """Time is again the part's that was entered before."""
        now = time.perf_counter()
        self.spent[self._running.pop()] += now - self._since
        self._since = time.perf_counter()

    def wrapping(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, its time charged."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed


@contextlib.contextmanager
def functions_wrapped(clock: Clock, wrapped: list[tuple[Any, str, str]]) -> Iterator[None]:
    """Wrap functions of classes while the context lasts.

    Raises:
        AttributeError: if one is not there any more.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, part in wrapped:
            inherited = name not in vars(owner)
            before = getattr(owner, name)
            setattr(owner, name, clock.wrapping(before, part))
            stack.callback(delattr, owner, name) if inherited else stack.callback(setattr, owner, name, before)
        yield


@contextlib.contextmanager
def modules_wrapped(clock: Clock, model: torch.nn.Module) -> Iterator[None]:
    """Hooks on the model, its attention modules and its linear layers, while the context lasts."""
    parts: list[tuple[torch.nn.Module, str]] = [(model, "rest")]
    parts += [(module, "attention") for module in model.modules() if type(module).__name__.endswith("Attention")]
    parts += [(module, "products") for module in model.modules() if isinstance(module, torch.nn.Linear)]
    handles = []
    for module, part in parts:
        handles.append(module.register_forward_pre_hook(lambda *_, part=part: clock.enter(part)))
        handles.append(module.register_forward_hook(lambda *_: clock.leave(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def parts_of_call(call: Callable[[], Any], model: torch.nn.Module, engine: str) -> tuple[Clock, float]:
    """The clock after one wrapped call, and the call's seconds.

    Args:
        call: of ``generate``.
        model: the model.
        engine: name; one with a compiled step is measured whole.
    """
    clock = Clock()
    with contextlib.ExitStack() as stack:
        if engine == "switches":
            stack.enter_context(functions_wrapped(clock, WRAPPED_OF_COMPILED))
        else:
            stack.enter_context(functions_wrapped(clock, WRAPPED_OF_STOCK if engine == "stock" else WRAPPED))
            stack.enter_context(modules_wrapped(clock, model))
        around = clock.wrapping(call, "around")
        start = time.perf_counter()
        around()
        return clock, time.perf_counter() - start


def measure(cell: Cell, engine: str, conditions: Conditions) -> dict[str, Any]:
    """One row: medians over rounds, each an unwrapped call and a wrapped one. To be run in a process of its own."""
    conditions.prepare_process()
    model = conditions.model(cell.model)
    inputs = random_prompts(model, cell.batch_size, cell.prompt_length)
    call = functools.partial(model.generate, **inputs, **cell.settings, **conditions.arguments_of(engine))
    call()
    one_round = parts_of_call(call, model, engine)[1] + harness.seconds_of(call, model.device)
    whole, parts, wrapped = [], [], []
    for _ in range(harness.how_many_rounds(conditions, one_round)):
        whole.append(harness.seconds_of(call, model.device))
        clock, seconds = parts_of_call(call, model, engine)
        wrapped.append(seconds)
        parts.append({part: spent / seconds for part, spent in clock.spent.items()})
    vocabulary = model.config.vocab_size
    return {
        **{name: getattr(cell, name) for name in ("model", "batch_size", "num_beams", "prompt_length", "new_tokens")},
        "vocabulary": vocabulary,
        "engine": engine,
        "seconds": statistics.median(whole),
        "rounds": len(whole),
        "wrapped_over_unwrapped": statistics.median(a / b for a, b in zip(wrapped, whole, strict=True)),
        "calls": clock.entered,
        **shares(parts),
        "goal": goal_of(cell.num_beams, vocabulary) if engine != "stock" else None,
    }


def shares(parts: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the rounds, of each part's share of its call, of all outside the forward, and of what is missing."""
    return {
        "shares": {part: statistics.median(one[part] for one in parts) for part in PARTS},
        "outside": statistics.median(sum(one[part] for part in OUTSIDE) for one in parts),
        "unaccounted": statistics.median(1 - sum(one.values()) for one in parts),
    }


def goal_of(num_beams: int, vocabulary: int) -> float:
    """Share of a call that may pass outside the model's forward."""
    if vocabulary <= 32_000:
        return 0.05
    return 0.10 if num_beams <= 100 else 0.20


HEADER = (
    f"{'V':>7s}{'W':>5s} {'engine':>9s}{'seconds':>9s}"
    + "".join(f"{part:>10s}" for part in PARTS)
    + f"{'outside':>9s}{'goal':>6s}{'unacc.':>8s}{'wrapped':>9s}"
)


def format_row(row: dict[str, Any]) -> str:
    """A line of the printed table: shares in percent."""
    parts = "".join(f"{100 * row['shares'][part]:10.1f}" for part in PARTS)
    goal = "-" if row["goal"] is None else f"{100 * row['goal']:.0f}"
    return (
        f"{row['vocabulary']:7d}{row['num_beams']:5d} {row['engine']:>9s}{row['seconds']:9.3f}{parts}"
        f"{100 * row['outside']:9.1f}{goal:>6s}{100 * row['unaccounted']:8.2f}{row['wrapped_over_unwrapped']:9.3f}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = harness.new_parser(__doc__, engines=("plain", "switches"), seconds=30.0)
    parser.add_argument("--only", type=Cell.parse, action="append", metavar="MODEL,B,W,P,T", help="only such cells")
    arguments = parser.parse_args(argv)
    conditions = harness.conditions_of(arguments)
    if conditions.device != "cpu":
        parser.error(f"--device must be cpu, where a call is over when it returns, but got {conditions.device!r}")
    print(HEADER, flush=True)
    rows = []
    for cell in arguments.only or CELLS:
        for engine in conditions.engines:
            rows.append(harness.in_fresh_process(measure, cell, engine, conditions))
            print(format_row(rows[-1]), flush=True)
    harness.publish("breakdown", rows, conditions, record=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
