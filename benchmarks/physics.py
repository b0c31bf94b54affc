"""What a search must at least do: bytes, operations, and the seconds that this machine needs for them.

A forward pass of `R` rows reads the weights of the linear layers once and does two operations per row and weight. Its
attention reads the keys and values of every live token once per step, whatever the number of beams: `P` of the prompt
and one for each node of the beam tree that some beam still names. So

    bytes of a step        weights + (P + live) · bytes of one token's keys and values
    operations of a step   2 · R · weights + 4 · R · (P + t) · heads · head size · layers
    floor of a step        max(bytes / bandwidth, operations / peak)

and the floor of a search is the sum over its steps and the prompt, where the output head runs on the last token only.
Bandwidth and peak are measured in the same process, just after the search. Left out are embeddings, norms, and the
logits (written once, read once): the floor is below the truth by that. transformers' own search reads each beam's whole
sequence, copies it to reorder it, and once more to append to it: three times `R · (P + t)` tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

import hf_paged_beam
from hf_paged_beam import versions

STOCK_TOUCHES = 3
"""How often transformers' own search reads or writes each token's keys and values in a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What one model costs per row and per token.

    Attributes:
        layer_weights: numbers in its linear layers, the output head apart.
        head_weights: numbers in the output head.
        weight_bytes: bytes of both.
        kv_bytes: bytes of one token's keys and values in all layers.
        pair_flops: operations of one query token against one key token, in all layers.
    """

    layer_weights: int
    head_weights: int
    weight_bytes: int
    kv_bytes: int
    pair_flops: int

    @classmethod
    def of(cls, model: Any) -> ModelCost:
        """Counted from the linear layers of a decoder-only model and its configuration."""
        head = model.get_output_embeddings()
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        config, size = model.config, model.dtype.itemsize
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        layers = config.num_hidden_layers
        weights = {module: sum(given.numel() for given in module.parameters()) for module in linears}
        return cls(
            layer_weights=sum(count for module, count in weights.items() if module is not head),
            head_weights=weights[head],
            weight_bytes=sum(given.numel() * given.element_size() for one in linears for given in one.parameters()),
            kv_bytes=2 * layers * key_heads * head_size * size,
            pair_flops=4 * layers * heads * head_size,
        )


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass: bytes that it must read, operations that it must do."""

    bytes: int
    flops: int


def passes(cost: ModelCost, prompts: Sequence[int], num_beams: int, live: Sequence[int]) -> list[Pass]:
    """The forward passes of a search: the prompts', then one per step.

    Args:
        cost: of the model.
        prompts: tokens of each prompt.
        num_beams: `W`.
        live: tokens whose keys each step reads, over all prompts, prompts included; one number per step.
    """
    count, tokens = len(prompts), sum(prompts)
    prompt_pairs = sum(length * (length + 1) // 2 for length in prompts)
    made = [
        Pass(
            bytes=cost.weight_bytes + tokens * cost.kv_bytes,
            flops=2 * (tokens * cost.layer_weights + count * cost.head_weights) + prompt_pairs * cost.pair_flops,
        )
    ]
    rows = count * num_beams
    for step, read in enumerate(live, 1):
        pairs = num_beams * (tokens + count * step)
        weights = cost.layer_weights + cost.head_weights
        made.append(Pass(cost.weight_bytes + read * cost.kv_bytes, 2 * rows * weights + pairs * cost.pair_flops))
    return made


@dataclasses.dataclass(frozen=True)
class Machine:
    """What was measured: bytes per second from memory, operations per second of a matrix product."""

    bandwidth: float
    peak: float

    def floor(self, made: Sequence[Pass]) -> float:
        """Seconds that these forward passes take at least."""
        return sum(max(one.bytes / self.bandwidth, one.flops / self.peak) for one in made)


def best_seconds(run: Callable[[], Any], device: torch.device, tries: int = 6) -> float:
    """Of several runs, the shortest."""
    taken = []
    for _ in range(tries):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_machine(device: torch.device, dtype: torch.dtype, *, mib: int = 256, order: int | None = None) -> Machine:
    """Bandwidth by a copy and a sum of `mib` MiB (the better of the two), peak by a product of square matrices.

    On a CPU the product is made by torch's usual library and by oneDNN from packed weights; the faster counts. On some
    processors they differ by half.

    Args:
        device: to be measured.
        dtype: of the matrices.
        mib: size of what is copied, well beyond every cache.
        order: of the matrices; None for 1,024 on a CPU and 8,192 on a GPU.
    """
    source = torch.ones(mib * 2**18, device=device)  # float32
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = 2 * size / best_seconds(lambda: target.copy_(source), device)
    summed = size / best_seconds(source.sum, device)
    order = order or (1024 if device.type == "cpu" else 8192)
    matrix = torch.randn(order, order, device=device).to(dtype)
    seconds = best_seconds(lambda: matrix @ matrix, device)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix)
        one_dnn = functools.partial(torch.ops.mkldnn._linear_pointwise, matrix, packed, None, "none", [], "")
        seconds = min(seconds, best_seconds(one_dnn, device))
    return Machine(bandwidth=max(copied, summed), peak=2 * order**3 / seconds)


class StepUsage(transformers.StoppingCriteria):
    """Notes the cache's usage at every step; never stops anything."""

    def __init__(self, cache: hf_paged_beam.PagedBeamCache):
        self.cache = cache
        self.seen: list[hf_paged_beam.CacheUsage] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.seen.append(self.cache.usage())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def usage_of_steps(model: Any, inputs: dict[str, Any], **settings: Any) -> list[hf_paged_beam.CacheUsage]:
    """Our cache's usage after the prompt and after every step, by one more search (not to be timed).

    Args:
        model: the model.
        inputs: of ``generate``.
        **settings: of ``generate``, with `num_beams` of at least 2.
    """
    cache = hf_paged_beam.PagedBeamCache(model.config, num_beams=settings["num_beams"])
    usage = StepUsage(cache)
    model.generate(**inputs, **settings, custom_generate="hf_paged_beam", stopping_criteria=[usage],
                   **{versions.CACHE_ARGUMENT: cache})  # fmt: skip
    return usage.seen


def live_of_steps(model: Any, inputs: dict[str, Any], **settings: Any) -> list[int]:
    """Tokens whose keys each step after the prompt reads at least, over all prompts, prompts included."""
    if settings["num_beams"] == 1:
        batch_size, length = inputs["input_ids"].shape
        return [batch_size * (length + step) for step in range(1, settings["max_new_tokens"])]
    return [usage.live for usage in usage_of_steps(model, inputs, **settings)[1:]]


def told(cost: ModelCost, machine: Machine, prompts: Sequence[int], num_beams: int, live: Sequence[int]) -> dict:
    """The physics of one search, for a row of a table: see the module's header.

    Args:
        cost: of the model.
        machine: as measured.
        prompts: tokens of each prompt, padding included.
        num_beams: `W`.
        live: of `live_of_steps`.
    """
    made = passes(cost, prompts, num_beams, live)
    separate = sum(num_beams * (sum(prompts) + len(prompts) * step) for step in range(1, len(live) + 1))
    return {
        "weight_bytes": cost.weight_bytes,
        "kv_bytes_per_token": cost.kv_bytes,
        "kv_bytes_read": sum(live) * cost.kv_bytes,
        "kv_bytes_touched_by_stock": STOCK_TOUCHES * separate * cost.kv_bytes,
        "flops": sum(one.flops for one in made),
        "bandwidth": round(machine.bandwidth),
        "peak_flops": round(machine.peak),
        "floor_seconds": machine.floor(made),
    }
