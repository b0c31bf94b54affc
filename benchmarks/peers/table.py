"""One cell after another: a worker for each engine, rounds in which they take turns, and the row that comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
from collections.abc import Iterator
from typing import Any

from ..compare import Cell
from ..models import SHAPES
from .environments import Environments
from .processes import IDLE_SHARE, Engine, NoWorker, Worker, command_of, stock_kv_bytes

CELLS = [
    Cell.parse(text)
    for text in (
        "30m,1,10,100,10", "30m,1,50,100,10", "30m,1,50,1000,10", "30m,1,50,100,100", "30m,1,200,100,10",
        "30m,4,10,200,50", "30m,8,4,200,50", "30m,1,4,100,50", "160m,1,10,100,10", "160m,1,50,100,10",
        "160m,1,50,1000,10", "160m,1,4,100,50",
    )
]  # fmt: skip

HEAVY_BYTES = 2e9
"""Stock's keys and values from which on it runs in fewer rounds; it copies them in every step."""

Answers = dict[str, list[dict[str, Any]]]
"""Of each engine, round by round; a failure alone where it failed in one."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How cells are measured.

    Attributes:
        engines: the columns, stock's first.
        rounds: timed rounds of a cell; None for a number that depends on the cell.
        stock_rounds: those of them in which stock runs, where its keys and values are heavy.
        threads: of every engine.
        limit_seconds: longest answer that is waited for.
        spin: leave OpenMP's waiting as it is by default.
    """

    engines: tuple[Engine, ...]
    rounds: int | None = None
    stock_rounds: int = 1
    threads: int = 2
    limit_seconds: float = 900.0
    spin: bool = False

    def rounds_of(self, cell: Cell) -> int:
        if self.rounds:
            return self.rounds
        held = cell.batch_size * cell.num_beams * (cell.prompt_length + cell.new_tokens)  # stock's tokens at the end
        read = held * cell.new_tokens
        return 3 if held > 25_000 or read > 500_000 else 5 if read > 100_000 else 9

    def stock_rounds_of(self, cell: Cell) -> int:
        rounds = self.rounds_of(cell)
        return min(self.stock_rounds, rounds) if is_heavy(cell) else rounds


def is_heavy(cell: Cell) -> bool:
    return kv_bytes(cell) > HEAVY_BYTES


def kv_bytes(cell: Cell) -> int:
    """Stock's keys and values at the end."""
    return stock_kv_bytes(cell.model, cell.batch_size * cell.num_beams, cell.prompt_length + cell.new_tokens)


def prompts_of(cell: Cell) -> list[list[int]]:
    """Random prompts, the same for every engine: `B` of `P` ids. Token 0 stands for padding and is left out."""
    drawn = random.Random(1)
    vocabulary = SHAPES[cell.model]["vocab_size"]
    return [[drawn.randrange(1, vocabulary) for _ in range(cell.prompt_length)] for _ in range(cell.batch_size)]


def measure(cell: Cell, plan: Plan, environments: Environments) -> dict[str, Any]:
    """One row of the table, from processes that start for it: what a cell leaves in an allocator helps the next."""
    fields = ("model", "batch_size", "num_beams", "prompt_length", "new_tokens")
    with workers_of(cell, plan, environments) as workers:
        return {
            **{field: getattr(cell, field) for field in fields},
            "stock_kv_bytes": kv_bytes(cell),
            "rounds": plan.rounds_of(cell),
            "stock_rounds": plan.stock_rounds_of(cell),
            **summary(take_turns(cell, plan, workers)),
            "idle_share": {name: idle_share(worker) for name, worker in workers.items()},
            "versions": {name: version for worker in workers.values() for name, version in worker.versions.items()},
        }


@contextlib.contextmanager
def workers_of(cell: Cell, plan: Plan, environments: Environments) -> Iterator[dict[str, Worker | NoWorker]]:
    """The workers of a cell's engines, by name; they start one after the other."""
    workers: dict[str, Worker | NoWorker] = {}
    try:
        for engine in plan.engines:
            if engine.worker not in workers:
                workers[engine.worker] = _worker(engine, cell, plan, environments)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def _worker(engine: Engine, cell: Cell, plan: Plan, environments: Environments) -> Worker | NoWorker:
    failure = environments.missing(engine.peer, cell.model)
    if failure:
        return NoWorker(failure)
    command = command_of(engine, environments, cell.model, plan.threads)
    return Worker(command, plan.threads, plan.limit_seconds, spin=plan.spin)


def take_turns(cell: Cell, plan: Plan, workers: dict[str, Worker | NoWorker]) -> Answers:
    """Warm up each engine, then time them round by round; who starts moves on by one with each round.

    An engine that has failed has no more turns.
    """
    asked = {"prompts": prompts_of(cell), "beams": cell.num_beams, "new_tokens": cell.new_tokens}
    answers: Answers = {engine.name: [] for engine in plan.engines}
    failed: Answers = {}
    for engine in plan.engines:
        warmed = workers[engine.worker].ask({**_warm_up(engine, cell, asked), "engine": engine.name})
        if "failed" in warmed:
            failed[engine.name] = [warmed]
    for turn in range(plan.rounds_of(cell)):
        first = turn % len(plan.engines)
        for engine in plan.engines[first:] + plan.engines[:first]:
            if engine.name in failed or (engine.name == "stock" and turn >= plan.stock_rounds_of(cell)):
                continue
            answer = workers[engine.worker].ask({**asked, "engine": engine.name})
            answers[engine.name].append(answer)
            if "failed" in answer:
                failed[engine.name] = [answer]
    return {**answers, **failed}


def _warm_up(engine: Engine, cell: Cell, asked: dict[str, Any]) -> dict[str, Any]:
    """The search itself; where stock's keys and values are heavy, it warms up on a tenth of the prompt."""
    if engine.name != "stock" or not is_heavy(cell):
        return asked
    return {**asked, "prompts": [prompt[: max(1, len(prompt) // 10)] for prompt in asked["prompts"]]}


def summary(answers: Answers) -> dict[str, Any]:
    """Of each engine: median seconds, stock's seconds over its, and whether its best sequences are stock's.

    Rounds are paired with stock's; where stock ran in fewer rounds, the others with the median of its.
    """
    stock = answers["stock"]
    reference = None if "failed" in stock[0] else stock[0]
    pace = [answer["seconds"] for answer in stock] if reference else []
    engines = {name: _summary_of(given, reference, pace) for name, given in answers.items()}
    timed = {name: engine["seconds"] for name, engine in engines.items() if "seconds" in engine}
    openvino = [name for name in timed if name.startswith("openvino")]
    return {
        "engines": engines,
        "fastest": min(timed, key=timed.__getitem__, default=None),
        "openvino_best": min(openvino, key=timed.__getitem__, default=None),
    }


def _summary_of(given: list[dict[str, Any]], reference: dict[str, Any] | None, pace: list[float]) -> dict[str, Any]:
    if "failed" in given[0]:
        return {"failed": given[0]["failed"]}
    seconds = [answer["seconds"] for answer in given]
    told: dict[str, Any] = {"seconds": round(statistics.median(seconds), 4)}
    if reference:
        rest = [statistics.median(pace)] * (len(seconds) - len(pace))
        ratios = [stock / own for stock, own in zip([*pace, *rest], seconds, strict=False)]
        told["ratio"] = round(statistics.median(ratios), 3)
        told["ratios"] = [round(ratio, 3) for ratio in ratios]
        told["same"] = all(answer["sequences"] == reference["sequences"] for answer in given)
    return told


def idle_share(worker: Worker | NoWorker) -> float:
    """Of a core, while it waited for its turns."""
    return round(worker.idle_cpu_seconds / worker.idle_seconds, 4) if worker.idle_seconds else 0.0


COLUMNS = {"plain": "plain", "switches": "switches", "ctranslate2": "CTranslate2", "openvino_best": "OpenVINO"}
HEADER = (
    f"{'model':>6s}{'B':>4s}{'W':>5s}{'P':>6s}{'T':>5s}{'stock s':>10s}"
    + "".join(f"{title:>13s}" for title in COLUMNS.values())
    + f"  {'fastest':16s}not the same, failed, not idle"
)


def format_row(row: dict[str, Any]) -> str:
    """A line of the printed table: stock's seconds, then stock's seconds over each engine's, so larger is faster.

    OpenVINO's is the better of its two attentions: s for SDPA, p for pages.
    """
    engines = row["engines"]
    numbers = (f"{row[name]:{width}d}" for name, width in
               (("batch_size", 4), ("num_beams", 5), ("prompt_length", 6), ("new_tokens", 5)))  # fmt: skip
    stock = engines["stock"].get("seconds")
    return (
        f"{row['model']:>6s}{''.join(numbers)}{'-' if stock is None else format(stock, '.3f'):>10s}"
        + "".join(f"{_ratio(row, column):>13s}" for column in COLUMNS)
        + f"  {row['fastest'] or '-':16s}{'; '.join(remarks(row)) or '-'}"
    )


def _ratio(row: dict[str, Any], column: str) -> str:
    name = row["openvino_best"] if column == "openvino_best" else column
    mark = {"openvino-sdpa": " s", "openvino-paged": " p"}.get(name, "")
    ratio = row["engines"].get(name, {}).get("ratio")
    return "-" if ratio is None else f"{ratio:.2f}{mark}"


def remarks(row: dict[str, Any]) -> list[str]:
    """What a reader of the row must know beside its figures."""
    engines = row["engines"].items()
    others = [f"{name}: not stock's sequences" for name, engine in engines if engine.get("same") is False]
    failures: dict[str, list[str]] = {}
    for name, engine in engines:
        if "failed" in engine:
            failures.setdefault(engine["failed"], []).append(name)
    failed = [f"failed: {', '.join(names)}: {why}" for why, names in failures.items()]
    restless = [
        f"{name} used {share:.0%} of a core while it waited"
        for name, share in row["idle_share"].items()
        if share > IDLE_SHARE
    ]
    return others + failed + restless
