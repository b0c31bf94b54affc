"""Decode steps recorded as CUDA graphs. This was not yet run on a GPU; what is not CUDA's own is tested on a CPU.

A recorded graph reads and writes the memory that it was recorded over. So its inputs stay where they are and are
filled before each replay, and its pools are the search's: a search that begins moves its prompt's keys into them, and
one that ends leaves them to the next.

Pools have few sizes. In one search the trees get room for a few steps first, then for many, then for all that they can
need: three graphs at most. The total is rounded up, so that prompts of other lengths use the same graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..cache import CapturedStep, captured_cache, captured_step, forward_captured, running
from ..versions import GenerativeModel

_MOST_GRAPHS = 4
"""Graphs that are kept of each model, each with the pools that it was recorded over."""

_SLOT_STEP = 256
"""Pools of recorded graphs hold a multiple of so many slots."""

_FIRST_ROOM, _MORE_ROOM = 4, 8
"""The trees' room at first, in slots for each beam, and by how much it grows."""


class Graph:
    """A recorded step, with the tensors that it reads and writes.

    Args:
        model: the model.
        cache: our cache, its pools as large as they are to be.
        step: of this pass; its tensors are the graph's from now on.
        inputs: of the model, likewise.
        record: runs a function once and returns what runs it again, and its result.
    """

    def __init__(self, model: GenerativeModel, cache: Any, step: CapturedStep, inputs: dict[str, Any], record: Any):
        self._step = step
        self._inputs = tree_map(lambda given: given.clone() if isinstance(given, torch.Tensor) else given, inputs)
        self.pools = [dict(_stored(layer)) for layer in cache.indexed_layers()]
        captured = captured_cache(cache, step)
        with running(step):
            self._replay, self._logits = record(
                lambda: forward_captured(model, step, captured, {**self._inputs, **_all_positions(model, step)})
            )

    def __call__(self, step: CapturedStep, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits ``[R, 1, V]``, valid until the next replay."""
        for mine, theirs in zip(self._tensors(self._step, self._inputs), self._tensors(step, inputs), strict=True):
            mine.copy_(theirs)
        self._replay()
        return self._logits

    @staticmethod
    def _tensors(step: CapturedStep, inputs: dict[str, Any]) -> list[torch.Tensor]:
        given = [step.visible(), step.positions(), step.newest, step.write_slots, *tree_leaves(inputs)]
        return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


class Replays:
    """The recorded steps of one search.

    Args:
        model: the model.
        cache: our cache, past the prompt.
        kept: graphs that no search uses now, by what they fit, the least recently used first.
        most_slots: slots that a tree can need at most.
        record: see `Graph`.
    """

    def __init__(
        self, model: GenerativeModel, cache: Any, kept: dict[tuple, Graph], most_slots: int, record: Callable
    ) -> None:
        self._model, self._cache, self._kept, self._record = model, cache, kept, record
        self._rooms = _rooms(cache.index.num_beams, most_slots)
        self._weights = _places_of_weights(model)
        self._used: dict[tuple, Graph] = {}
        self._current: tuple | None = None
        self._recorded = 0
        self.took_old = False  # whether the last step was the first of a graph that an earlier search recorded

    def __call__(self, inputs: dict[str, Any], padding: torch.Tensor | None) -> torch.Tensor:
        """Logits ``[R, 1, V]``, valid until the next step."""
        slots = self._slots()
        step = captured_step(self._cache.index, padding, slots)
        key = (slots, self._weights, _shapes(step, inputs), tuple(map(_places, self._cache.indexed_layers())))
        self.took_old = False
        if key != self._current:
            self.took_old = key not in self._used and key in self._kept
            self._used[key] = self._used.get(key) or self._kept.pop(key, None) or self._new(step, inputs, slots)
            self._move_into(self._used[key])
            self._current = key
        return self._used[key](step, inputs)

    def forget(self) -> None:
        """Drop the graphs that earlier searches recorded, and the present one."""
        self._kept.clear()
        if self._current is not None:
            self._used.pop(self._current, None)
        self._current = None

    def take_count(self) -> int:
        """How many steps were recorded since this was last asked."""
        count, self._recorded = self._recorded, 0
        return count

    def end(self, keep_cache: bool) -> None:
        """After the search. What the caller keeps is not written by the next one."""
        if keep_cache and self._used:
            for layer in self._cache.indexed_layers():
                for name, stored in _stored(layer):
                    setattr(layer, name, stored.clone())
        self._kept.update(self._used)
        self._used = {}
        for key in list(self._kept)[: max(0, len(self._kept) - _MOST_GRAPHS)]:
            self._kept.pop(key, None)  # another search may have taken it

    def _slots(self) -> int:
        """`S`: slots that pools have now, the smallest of their sizes that is enough."""
        index = self._cache.index
        self._rooms = [room for room in self._rooms if room >= index.tree_slots]  # never smaller again
        return -(-(index.prompt_length + self._rooms[0]) // _SLOT_STEP) * _SLOT_STEP

    def _new(self, step: CapturedStep, inputs: dict[str, Any], slots: int) -> Graph:
        for layer in self._cache.indexed_layers():
            layer.set_slots(slots)
        self._recorded += 1
        return Graph(self._model, self._cache, step, inputs, self._record)

    def _move_into(self, graph: Graph) -> None:
        """Let the search's layers hold the graph's pools, with what they held."""
        for layer, pools in zip(self._cache.indexed_layers(), graph.pools, strict=True):
            for name, stored in _stored(layer):
                pool = pools[name]
                if pool is not stored:
                    held = min(pool.shape[2], stored.shape[2])
                    pool[:, :, :held] = stored[:, :, :held]
                    setattr(layer, name, pool)


def _all_positions(model: GenerativeModel, step: CapturedStep) -> dict[str, torch.Tensor]:
    """A mask that masks nothing, ``[R, S]``: without one, some models read values to see whether they need one."""
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    shape = (step.beams.count, step.slots)
    return {name: torch.ones(shape, dtype=torch.int64, device=step.write_slots.device)}


def _rooms(width: int, most_slots: int) -> list[int]:
    """The sizes that trees get room for."""
    first = min(_FIRST_ROOM * width, most_slots)
    return [first, min(_MORE_ROOM * first, most_slots), most_slots]


def _stored(layer: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, getattr(layer, name)) for name in layer.STORED]


def _places(layer: Any) -> tuple:
    """What of a layer a graph depends on, beside the number of slots."""
    return layer.dropped, *(
        (stored.shape[0], stored.shape[1], stored.shape[3], stored.dtype) for _, stored in _stored(layer)
    )


def _shapes(step: CapturedStep, inputs: dict[str, Any]) -> tuple:
    """Shapes and dtypes of all tensors of a pass, and everything else that it is given."""
    leaves = [step.visible(), step.write_slots, *tree_leaves(inputs)]
    told = ((given.shape, given.dtype) if isinstance(given, torch.Tensor) else given for given in leaves)
    return tuple(inputs), *told


def _places_of_weights(model: GenerativeModel) -> int:
    """A number that changes if a weight is put elsewhere, which a graph would not see."""
    return hash(tuple(weight.data_ptr() for weight in (*model.parameters(), *model.buffers())))


def record_cuda_graph(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Run a function, record it as a CUDA graph, and return what replays it, and the result that this fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # first calls may set up what cannot be recorded
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result


RECORDERS: dict[str, Callable] = {"cuda": record_cuda_graph}
"""What records a step, by the type of the device; elsewhere it is compiled."""
