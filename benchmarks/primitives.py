"""What a step is made of, each by the ways that were considered: the choices in the package stand on this.

    python -m benchmarks.primitives --record

Milliseconds, medians.

- Linear layers: `torch.nn.functional.linear`; oneDNN from the weight as it lies (what a search on a CPU does), and from
  a packed copy (``prepack=True``). Weights alternate, so that none stays in the processor's cache.
- Layers that read the same rows (query, key and value; gate and up), from packed copies: one after another, or as one
  layer whose weight is theirs together.
- Selection: one `topk` over all beams and tokens, one for each row, and by blocks.
- Log-probabilities: in new memory, in memory that is used again, and over the logits themselves.
- Attention over a pool: one call with a mask, or the prompt without a mask and the tree with one, merged by their
  log-sum-exp.

The physics: a linear layer reads its weight once, and multiplies at the processor's rate where there are many rows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hf_paged_beam.generation.candidates import largest

from . import harness

LINEARS = [(256, 512), (512, 512), (512, 1536), (512, 32000), (1024, 1024), (1024, 2816), (1024, 32000)]
ROWS = [4, 10, 50, 200]
FUSED = [(512, 512, 256, 256), (512, 1536, 1536), (1024, 1024, 512, 512), (1024, 2816, 2816)]
"""Rows that are read, and what each layer makes of them: query, key and value, gate and up, of "30m" and "160m"."""
SELECTIONS = [(10, 32000), (50, 32000), (10, 151936), (50, 151936), (100, 151936), (400, 151936)]
ATTENTIONS = [(10, 100, 60), (50, 100, 400), (50, 1000, 150), (50, 8000, 150)]
"""Beams, slots of the prompt, slots of the tree; 4 key heads of size 64 and 8 query heads, as in "30m"."""


def milliseconds(run: Callable[[], Any], seconds: float = 0.3) -> float:
    """Median of as many runs as fit into `seconds`, at least 5, after one."""
    start = time.perf_counter()
    run()
    times = []
    while len(times) < 5 or time.perf_counter() - start < seconds:
        begun = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def one_dnn(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """oneDNN's product, of a weight as it lies or packed."""
    return torch.ops.mkldnn._linear_pointwise(hidden, weight, None, "none", [], "")


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def how_many(numbers: int) -> int:
    """Weights of so many numbers that no processor's cache holds."""
    return max(1, int(96e6 / (4 * numbers)))


def linear(inner: int, outer: int, rows: int) -> dict[str, float]:
    """One layer, by three ways."""
    count = how_many(inner * outer)
    weights = [torch.randn(outer, inner) for _ in range(count)]
    copies = [packed(weight) for weight in weights]
    hidden = torch.randn(rows, inner)

    def each(run: Callable[[torch.Tensor, torch.Tensor], Any], given: list[torch.Tensor]) -> float:
        return milliseconds(lambda: [run(hidden, weight) for weight in given]) / count

    return {
        "linear": each(functional.linear, weights),
        "one_dnn": each(one_dnn, weights),
        "packed": each(one_dnn, copies),
    }


def fused(inner: int, outers: list[int], rows: int) -> dict[str, float]:
    """Layers that read the same rows: apart, and as one."""
    count = how_many(inner * sum(outers))
    apart = [[packed(torch.randn(outer, inner)) for outer in outers] for _ in range(count)]
    as_one = [packed(torch.randn(sum(outers), inner)) for _ in range(count)]
    hidden = torch.randn(rows, inner)
    return {
        "apart": milliseconds(lambda: [[one_dnn(hidden, weight) for weight in layers] for layers in apart]) / count,
        "as_one": milliseconds(lambda: [one_dnn(hidden, weight).split(outers, -1) for weight in as_one]) / count,
    }


def selection(width: int, vocabulary: int) -> dict[str, float]:
    """The 2W best continuations of one prompt, and the log-probabilities before them."""
    logits, running, count = torch.randn(width, vocabulary), torch.randn(1, width), 2 * width
    memory = torch.empty_like(logits)

    def flat() -> Any:
        return (logits + running.T).flatten().topk(count)

    def row_by_row() -> Any:
        return (logits.topk(count, dim=-1).values + running.T).flatten().topk(count)

    return {
        "flat": milliseconds(flat),
        "row_by_row": milliseconds(row_by_row),
        "by_blocks": milliseconds(lambda: largest(logits, running, count, None)),
        "log_softmax": milliseconds(lambda: logits.log_softmax(-1)),
        "log_softmax_again": milliseconds(lambda: torch.log_softmax(logits, -1, out=memory)),
        "log_softmax_over": milliseconds(lambda: torch.log_softmax(memory, -1, out=memory)),
        "logsumexp": milliseconds(lambda: logits.logsumexp(-1)),
    }


def attention(width: int, prompt: int, tree: int) -> dict[str, float]:
    """Attention of all beams over one layer's pool."""
    query = torch.randn(1, 4, 2 * width, 64)
    key, value = torch.randn(2, 1, 4, prompt + tree, 64).unbind()
    mask = torch.zeros(1, 1, 2 * width, prompt + tree)
    mask[..., prompt + 1 :].masked_fill_(torch.rand(2 * width, tree - 1) > 0.5, -torch.inf)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def merged() -> torch.Tensor:
        of_prompt, first = flash(query, key[:, :, :prompt], value[:, :, :prompt])
        of_tree, second = flash(query, key[:, :, prompt:], value[:, :, prompt:], attn_mask=mask[..., prompt:])
        gap = first - second  # log-sum-exps, by heads or by queries first
        share = torch.sigmoid(gap if gap.shape[1] == 4 else gap.transpose(1, 2)).unsqueeze(-1)
        return of_tree + share * (of_prompt - of_tree)

    def whole() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return {"whole": milliseconds(whole), "merged": milliseconds(merged)}


TABLES: dict[str, tuple[Callable[..., dict[str, float]], list[tuple], tuple[str, ...]]] = {
    "linear": (linear, [(*shape, rows) for shape in LINEARS for rows in ROWS], ("in", "out", "rows")),
    "fused": (fused, [(inner, outers, rows) for inner, *outers in FUSED for rows in ROWS], ("in", "out", "rows")),
    "selection": (selection, SELECTIONS, ("W", "V")),
    "attention": (attention, ATTENTIONS, ("W", "P", "tree")),
}


def main(argv: list[str] | None = None) -> int:
    parser = harness.new_parser(__doc__)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, (measure, cases, letters) in TABLES.items():
            for case in cases:
                taken = {way: round(median, 4) for way, median in measure(*case).items()}
                rows.append({"primitive": name, **dict(zip(letters, case, strict=True)), **taken})
                print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    harness.publish("primitives", rows, harness.conditions_of(arguments), record=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
