"""The figures of docs/performance.md that stand outside its tables."""

from __future__ import annotations

import itertools
import re
import statistics
import struct
from typing import Any

from benchmarks import protocol, real
from benchmarks.physics import STOCK_TOUCHES
from hf_paged_beam.cache.index import MOST_READ
from hf_paged_beam.generation import candidates, capture

from .of_readme import shapes
from .results import cells, results, search, section
from .stated import About, Entry, Figure, Said

PAGE = "docs/performance.md"
SMALL_VOCABULARY = 32_000


def switches() -> list[Any]:
    """Keywords that paragraphs of the section begin with."""
    return [len(re.findall(r"^`\w+=True`", section(PAGE, "Two switches"), re.MULTILINE))]


def goal_of_the_share() -> list[Any]:
    """Of the rows with the small vocabulary, all missed, in percent."""
    rows = cells("breakdown", vocabulary=SMALL_VOCABULARY)
    (goal,) = {row["goal"] for row in rows}
    if any(row["outside"] <= goal for row in rows):
        raise ValueError("a row reaches the goal")
    return [100 * goal]


def _milliseconds(row: dict[str, Any], share: float = 1.0) -> float:
    """Of a token, or of a share of its time."""
    return 1000 * share * row["seconds"] / row["new_tokens"]


def outside_of_few_beams() -> list[Any]:
    """Milliseconds of a token outside the forward, and in all; and the beams: the plain call."""
    (row,) = cells("breakdown", vocabulary=SMALL_VOCABULARY, num_beams=10, engine="plain")
    return [_milliseconds(row, row["outside"]), _milliseconds(row), row["num_beams"]]


def candidates_of_many_beams() -> list[Any]:
    """Milliseconds of a token for the choice of candidates, and in all; and the beams: the plain call."""
    (row,) = cells("breakdown", vocabulary=SMALL_VOCABULARY, num_beams=400, engine="plain")
    return [_milliseconds(row, row["shares"]["selection"]), _milliseconds(row), row["num_beams"]]


def rate_of_products() -> list[Any]:
    """Percent of what a large product reaches, in the cell that is described."""
    (row,) = cells("profile")
    if _cell(row) != _cell(_nearest()[0]):
        raise ValueError("the profile is of another cell")
    return [100 * row["rate"]]


def _cell(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in ("model", "batch_size", "num_beams", "prompt_length", "new_tokens"))


def largest_kept_block() -> list[Any]:
    """MiB of the largest block that glibc's `malloc` may keep: 4 MiB times the size of a C long."""
    return [4 * struct.calcsize("l")]


def over_the_logits() -> list[Any]:
    """Time that it spares, as a share: the least and the most of all sizes of more than half a millisecond."""
    rows = [row for row in cells("primitives", primitive="selection") if row["log_softmax_again"] > 0.5]
    shares = [1 - row["log_softmax_over"] / row["log_softmax_again"] for row in rows]
    return [About(min(shares), 0.15), About(max(shares), 0.15)]


def normaliser_alone() -> list[Any]:
    """`logsumexp` over log-probabilities in used memory: the least of all sizes, whole."""
    rows = cells("primitives", primitive="selection")
    return [round(min(row["logsumexp"] / row["log_softmax_again"] for row in rows))]


def faster_products() -> list[Any]:
    """The most that oneDNN makes of `F.linear`."""
    return [max(row["linear"] / row["one_dnn"] for row in cells("primitives", primitive="linear"))]


def _with_goals() -> list[tuple[dict[str, Any], float, float]]:
    """Row, ratio as the table shows it, and goal, of each ratio that has one."""
    pairs = itertools.product(cells("compare"), ("plain", "switches"))
    told = [(row, row["engines"][name]) for row, name in pairs]
    return [(row, round(one["ratio"], 2), one["goal"]) for row, one in told if one["goal"]]


def _nearest() -> tuple[dict[str, Any], float, float]:
    """Of the larger models, what is nearest to its goal; all reach theirs."""
    row, ratio, goal = min((one for one in _with_goals() if one[0]["model"] != "tiny"), key=lambda one: one[1] / one[2])
    if ratio < goal:
        raise ValueError(f"a goal is missed: {ratio} of {goal}")
    return row, ratio, goal


def nearest_goal() -> list[Any]:
    """Its cell, ratio and goal."""
    row, ratio, goal = _nearest()
    return [row["num_beams"], row["new_tokens"], ratio, goal]


def missed_with_tiny_models() -> list[Any]:
    """Their number, and the goal."""
    missed = [goal for row, ratio, goal in _with_goals() if row["model"] == "tiny" and ratio < goal]
    (goal,) = set(missed)
    return [len(missed), goal]


def rounds_of_the_last() -> list[Any]:
    """Of the last row beside other engines, and of all others."""
    *others, last = [row["rounds"] for row in cells("peers")]
    (usual,) = set(others)
    return [last, usual]


def rows_as_long_as_reading() -> list[Any]:
    """Rows whose 2 operations per weight take as long as reading the weight's 4 bytes; cores; date."""
    machines = [row["physics"] for row in cells("compare")]
    rows = statistics.median(2 * told["peak_flops"] / told["bandwidth"] for told in machines)
    told = results("compare")
    return [About(rows, 0.1), told["machine"]["cores"], told["date"]]


def protocol_lengths() -> list[Any]:
    """Shortest and longest prompt, new tokens."""
    (tokens,) = {row["new_tokens"] for row in cells("protocol")}
    return [protocol.SHORTEST, protocol.LONGEST, tokens]


def others_found_other_sequences() -> list[Any]:
    """The only row in which an engine's best sequences were not those of the others: prompts and beams."""
    odd = {(row["batch_size"], row["num_beams"], row["new_tokens"], name) for row in cells("peers")
           for name, told in row["engines"].items() if not told.get("same", True)}  # fmt: skip
    if {name.partition("-")[0] for *_, name in odd} != {"openvino"}:
        raise ValueError(f"another engine's sequences differ: {odd}")
    ((prompts, beams),) = {one[:2] for one in odd}
    return [prompts, beams]


def candidates_per_beam() -> int:
    """With one end token at most: of a search."""
    trace = search(num_beams=4, return_beam_trace=True).beam_trace
    return trace.tokens.shape[2] // trace.running.shape[2]


def blocks_of_logits() -> list[Any]:
    """Candidates of a beam, and blocks that they stand in; tokens of a block."""
    per_beam = candidates_per_beam()
    return [per_beam, candidates._BLOCK, per_beam, per_beam]


def primitives_measured() -> list[Any]:
    """Kinds of rows in the results."""
    return [len({row["primitive"] for row in results("primitives")["cells"]})]


ENTRIES: list[Entry] = [
    Figure(PAGE, "per step about `# · W · (P + t)`", lambda: [STOCK_TOUCHES]),
    Figure(PAGE, "where more than # times the live slots would be read", lambda: [MOST_READ]),
    Figure(PAGE, "Why the #% are missed", goal_of_the_share, timing=True),
    Figure(PAGE, "what is outside takes # ms of each token however fast the model is, where a token takes # ms in all "
                 "(# beams)", outside_of_few_beams, timing=True),
    Figure(PAGE, "the choice of candidates takes # of # ms (# beams)", candidates_of_many_beams, timing=True),
    Figure(PAGE, "Logits above # MiB are returned to the system", largest_kept_block),
    Figure(PAGE, "a normaliser alone (`logsumexp`, # as slow, see below)", normaliser_alone, timing=True),
    Figure(PAGE, "log-probabilities over the logits (a # to a # of their time less", over_the_logits, timing=True),
    Figure(PAGE, "linear layers are already up to # times as fast as `F.linear`", faster_products, timing=True),
    Figure(PAGE, "# switches Both leave results as they are", switches),
    Figure(PAGE, "The first # steps of each kind of call are run as written too", lambda: [capture._CHECKED_STEPS]),
    Figure(PAGE, '"30m" has # layers of width #, "160m" # of width #, both a vocabulary of #; "tiny" has # layers of '
                 "width #", shapes),
    Said(PAGE, "The last # columns are", "columns of the table below"),
    Figure(PAGE, "the nearest with # beams over # new tokens and both switches: # of #", nearest_goal, timing=True),
    Figure(PAGE, "The products run at #% of the rate", rate_of_products, timing=True),
    Figure(PAGE, 'In the "tiny" cells, # of which miss #, a search', missed_with_tiny_models, timing=True),
    Figure(PAGE, "Short prompts of # to # tokens one after another, # new tokens each", protocol_lengths),
    Figure(PAGE, "A trained model, SmolLM2-135M, on # English prompts, # new tokens",
           lambda: [len(real.PROMPTS), real.NEW_TOKENS]),
    Said(PAGE, "In bfloat16 # correct searches part at near ties", "any pair of searches"),
    Figure(PAGE, "with # prompts of # beams, which found others", others_found_other_sequences),
    Said(PAGE, "OpenVINO with the better of its # attentions", "what OpenVINO GenAI offers: by `sdpa`, and paged"),
    Figure(PAGE, "The row is of # rounds, the others of #", rounds_of_the_last, timing=True),
    Figure(PAGE, "The best `#W` continuations of one prompt. A row of logits is cut into blocks of #; the best `#W` "
                 "stand in the `#W` blocks", blocks_of_logits),
    Figure(PAGE, "(`logsumexp`) costs at least # as much", normaliser_alone, timing=True),
    Said(PAGE, "only for prompts of many # of tokens", "an order of magnitude, shown by the table below"),
    Figure(PAGE, "`python -m benchmarks.primitives --record` measures these #.", primitives_measured),
    Figure(PAGE, "as long as reading the weights (about # rows on # cores; x86_64, #)", rows_as_long_as_reading,
           timing=True),
    Said(PAGE, "bfloat16 # the weights to be read", "2 bytes of a number in place of 4"),
]  # fmt: skip
