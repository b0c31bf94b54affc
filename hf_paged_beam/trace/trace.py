"""The record of a search: candidates, which of them ran on, where their tokens were stored, and what was returned.

    tokens, parents, scores, finished   [prompt, step, rank]   the candidates, best first
    running, slots_given                [prompt, step, beam]   the beams that go on from them

A candidate's `parent` is a beam of the step before; that beam's rank there is its entry in `running`:

    step 0      rank 0  1  2  3         running: 0 2    beam 0 is rank 0, beam 1 is rank 2
                     a  b. c  d                         "b" ended
    step 1      rank 0  1  2  3         parents: 1 0 1 1
                     x  y  z  w                         "x" continues beam 1, that is "c"
"""

from __future__ import annotations

import dataclasses
import os
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .labels import check_tokenizer
from .page import write_page
from .plot import plot_tree
from .slots import SlotMap, index_table, map_slots
from .tree import BeamTree, build_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BeamTrace:
    """What a search did: `B` prompts, `T` steps, `K` candidates, `W` beams, `n` returned sequences; all on the CPU.

    Steps are counted from 0; the step of the prompt, where a view shows it, is -1.

    Attributes:
        tokens: ``[B, T, K]`` int64, candidates of each step, best first.
        parents: ``[B, T, K]`` int64, running beam that each continues; 0 in the first step.
        scores: ``[B, T, K]`` float32, summed log-probability; -inf where there is no candidate. After its end, while
            other prompts go on, a prompt has candidates of which none runs on or finishes.
        finished: ``[B, T, K]`` bool, which ended there and were taken as finished sequences.
        running: ``[B, T, W]`` int64, rank of the candidate that each beam goes on as; -1 where no beam runs on.
        slots_given: ``[B, T, W]`` int64, slot that each beam's token was given, counted from the start of the prompt's
            pool, whose slots ``0..P-1`` hold the prompt; -1 where none was given (so in the whole last step).
        prompt_length: `P`.
        returned: ``[B, n]`` int64, ``step · K + rank`` of the last token of each returned sequence, best first; -1
            where there is none.
        sequences_scores: ``[B, n]`` float32, what they were ranked by; -inf where there is none.

    Raises:
        ValueError: on construction, if shapes do not fit each other, or a slot of the prompt was given.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    finished: torch.Tensor
    running: torch.Tensor
    slots_given: torch.Tensor
    prompt_length: int
    returned: torch.Tensor
    sequences_scores: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("tokens", "running"):
            if getattr(self, name).dim() != 3:
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}; expected three dimensions.")
        for name, like in _SAME_SHAPE.items():
            _check_shape(name, getattr(self, name).shape, getattr(self, like).shape, f"that of {like}")
        batch_size, steps, _ = self.tokens.shape
        _check_shape("running", self.running.shape[:2], (batch_size, steps), "[B, T, W] with tokens' B and T")
        _check_shape("returned", self.returned.shape[:-1], (batch_size,), "[B, n] with tokens' B")
        if ((self.slots_given >= 0) & (self.slots_given < self.prompt_length)).any():
            raise ValueError(
                f"slots_given names slots below prompt_length={self.prompt_length}, which hold the prompt; count slots "
                f"from the start of the prompt's pool."
            )

    def listed(self, name: str, prompt: int) -> list:
        """One prompt's part of an array, as lists."""
        return getattr(self, name)[prompt].tolist()  # host read: a trace is on the host

    def __repr__(self) -> str:
        (batch_size, steps, candidates), beams, returned = self.tokens.shape, self.running.shape[2], self.returned.shape
        return (
            f"BeamTrace(prompts={batch_size}, steps={steps}, beams={beams}, candidates={candidates}, "
            f"returned={returned[1]})"
        )

    def tree(self, prompt: int = 0) -> BeamTree:
        """The candidates of one prompt that ran on or finished, as a tree.

        Args:
            prompt: row of the batch.

        Raises:
            ValueError: if there is no such row, or a candidate continues a beam that does not run.
        """
        self._check_prompt(prompt)
        return build_tree(self, prompt)

    def slots(self, prompt: int = 0) -> SlotMap:
        """Which slot of one prompt's pool held which token in which steps.

        Args:
            prompt: row of the batch.

        Raises:
            ValueError: if there is no such row.
        """
        self._check_prompt(prompt)
        return map_slots(self, prompt)

    def index_table(self, step: int, prompt: int = 0) -> torch.Tensor:
        """The cache's index table after a step's beams were chosen: where each beam's generated tokens stand.

        Args:
            step: counted from 0.
            prompt: row of the batch.

        Returns:
            ``[W, step + 1]`` int64, slots counted from the start of the prompt's pool; -1 in the row of a beam that
            does not run on, and where no slot was given, as in the whole last step.

        Raises:
            ValueError: if there is no such row or step.
        """
        self._check_prompt(prompt)
        steps = self.running.shape[1]
        if isinstance(step, bool) or not isinstance(step, Integral) or not 0 <= int(step) < steps:
            raise ValueError(f"step={step!r}; expected a step of the search, a whole number in 0..{steps - 1}.")
        return index_table(self, int(step), prompt)

    def plot(self, prompt: int = 0, tokenizer: Any = None, ax: Axes | None = None) -> Axes:
        """Draw the tree from the prompt (left) to the last step (right), a row for each leaf, the best on top.

        Made for trees of some tens of leaves; wider ones are easier to read in `to_html`. Tokens are written in 0.8 of
        matplotlib's ``rcParams["font.size"]`` (points), which a new figure grows with.

        Args:
            prompt: row of the batch.
            tokenizer: something with ``decode([id])``; without it ids are written.
            ax: where to draw; by default a new figure, as large as the tree needs.

        Raises:
            ValueError: if there is no such row, or the tokenizer has no ``decode``.
            ImportError: without matplotlib, the optional extra ``viz``.
        """
        self._check_prompt(prompt)
        check_tokenizer(tokenizer)
        return plot_tree(self.tree(prompt), tokenizer, ax)

    def to_html(self, path: str | os.PathLike[str], tokenizer: Any = None, prompt: int = 0) -> Path:
        """Write the tree as one page that loads nothing: wheel to zoom, drag to move, point at a token for its numbers.

        Args:
            path: of the file to write.
            tokenizer: something with ``decode([id])``; without it ids are written.
            prompt: row of the batch.

        Returns:
            The path.

        Raises:
            ValueError: if there is no such row, or the tokenizer has no ``decode``.
        """
        self._check_prompt(prompt)
        check_tokenizer(tokenizer)
        _, steps, beams = self.running.shape
        title = f"Beam search of prompt {prompt}: {beams} beams, {steps} steps"
        return write_page(Path(path), self.tree(prompt), tokenizer, title=title)

    def _check_prompt(self, prompt: int) -> None:
        batch_size = self.tokens.shape[0]
        if isinstance(prompt, bool) or not isinstance(prompt, Integral) or not 0 <= int(prompt) < batch_size:
            raise ValueError(f"prompt={prompt!r}; expected a row of the batch, a whole number in 0..{batch_size - 1}.")


_SAME_SHAPE = {
    "parents": "tokens",
    "scores": "tokens",
    "finished": "tokens",
    "slots_given": "running",
    "sequences_scores": "returned",
}


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], meaning: str) -> None:
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(shape)}; expected {tuple(expected)}: {meaning}.")
