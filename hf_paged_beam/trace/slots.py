"""Which slot of the pool lived when, from the beams alone.

step         prompt  0  1  2         P = 2; slots 0 and 1 hold the prompt
slot 0          #    #  #  #         # prompt
slot 1          #    #  #  #
slot 2          .    o  o  o         o live: some running beam's line goes through its token
slot 3          .    o  x  @         x freed: no line does any more; @ reused: live with another token
slot 4          .    .  o  x         . free: never used
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from .slot_plot import plot_slots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .trace import BeamTrace

_FREE, _PROMPT, _LIVE, _FREED, _REUSED = range(5)


class Lifetime(NamedTuple):
    """How long a slot held a token.

    Attributes:
        slot: counted from the start of the prompt's pool.
        given: step in which it was given to the token.
        freed: first step after which no running beam's line goes through the token; None if one did to the end.
        token: its id.
    """

    slot: int
    given: int
    freed: int | None
    token: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotMap:
    """The pool of one prompt over the steps of a search.

    Attributes:
        states: ``[T + 1, S]`` int8, index in `names` of the state of each slot: row 0 after the prompt, row ``t + 1``
            after the beams of step `t` were chosen. `S` is the prompt's length and the tree's slots together.
        lifetimes: of all slots that beams' tokens were given, in the order in which they were given.
        names: "free" (never used), "prompt", "live", "freed" (held a token, no running beam sees it), "reused" (live,
            and held another token before).
    """

    states: torch.Tensor
    lifetimes: list[Lifetime]
    names: ClassVar[tuple[str, ...]] = ("free", "prompt", "live", "freed", "reused")

    def live(self) -> list[int]:
        """Slots that hold what some beam still sees, the prompt's included, after each row of `states`."""
        return (self.states != _FREE).logical_and_(self.states != _FREED).sum(1).tolist()

    def plot(self, tokenizer: Any = None, ax: Axes | None = None) -> Axes:
        """Draw the map: slots from bottom to top, steps from left to right. Tokens are written where they have room.

        Args:
            tokenizer: something with ``decode([id])``; without it ids are written.
            ax: where to draw; by default a new figure.

        Raises:
            ValueError: if the tokenizer has no ``decode``.
            ImportError: without matplotlib, the optional extra ``viz``.
        """
        return plot_slots(self, tokenizer, ax)


def map_slots(trace: BeamTrace, prompt: int) -> SlotMap:
    """The slots of one prompt."""
    steps = trace.running.shape[1]
    lifetimes = _lifetimes(trace, prompt)
    width = max([trace.prompt_length, *(life.slot + 1 for life in lifetimes)])
    states = torch.full((steps + 1, width), _FREE, dtype=torch.int8)
    states[:, : trace.prompt_length] = _PROMPT
    for life in lifetimes:  # in the order in which they began: a later token of a slot paints over an earlier one's end
        first, end = life.given + 1, steps + 1 if life.freed is None else life.freed + 1
        states[first:end, life.slot] = _LIVE if states[life.given, life.slot] == _FREE else _REUSED
        states[end:, life.slot] = _FREED
    return SlotMap(states=states, lifetimes=lifetimes)


def _lifetimes(trace: BeamTrace, prompt: int) -> list[Lifetime]:
    running, slots = trace.listed("running", prompt), trace.listed("slots_given", prompt)  # [T, W]
    tokens, parents = trace.listed("tokens", prompt), trace.listed("parents", prompt)  # [T, K]
    seen = _last_seen(running, parents)
    return [
        Lifetime(slot, step, None if seen[step][beam] == len(running) - 1 else seen[step][beam] + 1, tokens[step][rank])
        for step, ranks in enumerate(running)
        for beam, (rank, slot) in enumerate(zip(ranks, slots[step], strict=True))
        if rank >= 0 and slot >= 0
    ]


def _last_seen(running: list[list[int]], parents: list[list[int]]) -> list[list[int]]:
    """``[T, W]``: the last step after which a running beam's line goes through each beam's token of each step."""
    seen = [[step] * len(ranks) for step, ranks in enumerate(running)]
    for step in range(len(running) - 1, 0, -1):  # a step's own entries are final once all later steps are done
        for beam, rank in enumerate(running[step]):
            if rank >= 0:
                parent = parents[step][rank]
                seen[step - 1][parent] = max(seen[step - 1][parent], seen[step][beam])
    return seen


def index_table(trace: BeamTrace, step: int, prompt: int) -> torch.Tensor:
    """``[W, step + 1]`` int64: see `BeamTrace.index_table`."""
    running, parents, slots = trace.running[prompt], trace.parents[prompt], trace.slots_given[prompt]
    table = slots.new_empty(running.shape[1], 0)
    for at in range(step + 1):
        there = running[at] >= 0
        inherited = table[parents[at][running[at].clamp_min(0)]]
        table = torch.cat([inherited, slots[at].unsqueeze(1)], dim=1)
        table[~there] = -1
    return table
