"""From arrays of steps to nodes and edges.

A candidate that neither ran on nor finished was never a beam, and is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .trace import BeamTrace

Status = Literal["inner", "running", "finished", "returned", "dead"]
Place = tuple[int, int]
"""Step and rank of a candidate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeNode:
    """One token of the tree, or its root, the prompt.

    Attributes:
        number: of the node: the root is 0, the others follow step by step, best first.
        parent: number of the node that it continues; None at the root.
        step: in which it was chosen, from 0; -1 at the root.
        rank: among the candidates of its step; 0 at the root.
        token: its id; None at the root.
        score: summed log-probability from the root to it.
        log_prob: log-probability of its token alone.
        status: "returned" and "finished" (but not returned) end a sequence; "running" was alive after the prompt's last
            step; "inner" leads to one of these; "dead" leads to none.
        slot: of the pool that holds its token; None where none was given.
    """

    number: int
    parent: int | None
    step: int
    rank: int
    token: int | None
    score: float
    log_prob: float
    status: Status
    slot: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamTree:
    """All beams that a prompt ever had.

    Attributes:
        nodes: by number; a parent comes before its children.
        edges: numbers ``[parent, child]``.
        returned: numbers of the nodes that end returned sequences, best first.
        sequences_scores: what these were ranked by.
    """

    nodes: list[TreeNode]
    edges: list[list[int]]
    returned: list[int]
    sequences_scores: list[float]

    def path(self, number: int) -> list[TreeNode]:
        """The nodes from the first token to node `number`, the root left out."""
        backwards = []
        node = self.nodes[number]
        while node.parent is not None:
            backwards.append(node)
            node = self.nodes[node.parent]
        return backwards[::-1]


def build_tree(trace: BeamTrace, prompt: int) -> BeamTree:
    """The tree of one prompt.

    Raises:
        ValueError: if a candidate continues a beam that does not run.
    """
    steps = _PromptSteps(trace, prompt)
    places = sorted(place for place in {*steps.slot_at, *steps.ends} if steps.score(place) > -math.inf)
    numbers = {place: number for number, place in enumerate(places, start=1)}
    parents = [steps.parent(place, numbers) for place in places]
    ends = {numbers[place]: status for place, status in steps.ends.items() if place in numbers}
    root_status, *statuses = _statuses(parents, ends)
    root = TreeNode(
        number=0, parent=None, step=-1, rank=0, token=None, score=0.0, log_prob=0.0, status=root_status, slot=None
    )
    nodes = [root]
    for place, parent, status in zip(places, parents, statuses, strict=True):
        nodes.append(steps.node(place, nodes[parent], len(nodes), status))
    returned = {numbers[place]: score for place, score in steps.returned.items() if place in numbers}
    return BeamTree(
        nodes=nodes,
        edges=[[parent, child] for child, parent in enumerate(parents, start=1)],
        returned=list(returned),
        sequences_scores=list(returned.values()),
    )


class _PromptSteps:
    """One prompt's rows of a trace as lists.

    Attributes:
        slot_at: slot of each candidate that ran on.
        returned: score of each returned sequence, by the place of its last token, best first.
        ends: status of each candidate in which a line ends in a sequence or was alive at the end.
    """

    def __init__(self, trace: BeamTrace, prompt: int):
        self.tokens, self.parents = trace.listed("tokens", prompt), trace.listed("parents", prompt)
        self.scores, self.running = trace.listed("scores", prompt), trace.listed("running", prompt)
        slots = trace.listed("slots_given", prompt)
        self.slot_at = {
            (step, rank): slot if slot >= 0 else None
            for step, ranks in enumerate(self.running)
            for rank, slot in zip(ranks, slots[step], strict=True)
            if rank >= 0
        }
        found = zip(trace.listed("returned", prompt), trace.listed("sequences_scores", prompt), strict=True)
        self.returned = {divmod(origin, trace.tokens.shape[2]): score for origin, score in found if origin >= 0}
        last = self._last_step(trace.listed("finished", prompt))
        self.ends: dict[Place, Status] = {place: "running" for place in self.slot_at if place[0] == last}
        self.ends.update(dict.fromkeys(_places(trace.listed("finished", prompt)), "finished"))
        self.ends.update(dict.fromkeys(self.returned, "returned"))

    def _last_step(self, finished: list[list[bool]]) -> int:
        """The last step in which a beam ran on or finished: other prompts of the batch may have gone on."""
        steps = {step for step, _ in self.slot_at} | {step for step, ended in enumerate(finished) if any(ended)}
        return max(steps, default=-1)

    def score(self, place: Place) -> float:
        step, rank = place
        return self.scores[step][rank]

    def parent(self, place: Place, numbers: dict[Place, int]) -> int:
        """Number of the node that a candidate continues."""
        step, rank = place
        if step == 0:
            return 0
        beam = self.parents[step][rank]
        before = (step - 1, self.running[step - 1][beam])
        if before not in numbers:
            raise ValueError(
                f"parents: candidate {rank} of step {step} continues beam {beam}, which does not run after step "
                f"{step - 1}; expected a beam whose entry in running names a candidate with a score."
            )
        return numbers[before]

    def node(self, place: Place, parent: TreeNode, number: int, status: Status) -> TreeNode:
        step, rank = place
        return TreeNode(
            number=number,
            parent=parent.number,
            step=step,
            rank=rank,
            token=self.tokens[step][rank],
            score=self.score(place),
            log_prob=self.score(place) - parent.score,
            status=status,
            slot=self.slot_at.get(place),
        )


def _statuses(parents: Sequence[int], ends: dict[int, Status]) -> list[Status]:
    """Status of each node: what ends there, else whether anything below it does.

    Args:
        parents: of each node but the root.
        ends: status of the nodes in which something ends, by number.
    """
    statuses: list[Status] = [ends.get(number, "dead") for number in range(len(parents) + 1)]
    for number in range(len(parents), 0, -1):  # children come after their parents
        parent = parents[number - 1]
        if statuses[number] != "dead" and statuses[parent] == "dead":
            statuses[parent] = "inner"
    return statuses


def _places(flags: list[list[bool]]) -> list[Place]:
    """Step and rank of each flag that is set."""
    return [(step, rank) for step, row in enumerate(flags) for rank, is_set in enumerate(row) if is_set]
