"""What each step chose, and the walk back from finished sequences to their tokens."""

from __future__ import annotations

import dataclasses

import torch

from .state import Candidates, Chosen, SearchState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Returned sequences, best first in each prompt; `n` per prompt, `L` tokens at most.

    Attributes:
        tokens: ``[B, n, L]`` int64; anything after the end.
        parents: ``[B, n, L]`` int64, running beam that each token continued.
        token_scores: ``[B, n, L]`` float32, 0 after the end.
        inside: ``[B, n, L]`` bool, which entries are tokens of a sequence, end token included; none where there is no
            sequence.
        scores: ``[B, n]`` float32, normalised; -inf where there is no sequence.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    token_scores: torch.Tensor
    inside: torch.Tensor
    scores: torch.Tensor

    @property
    def log_probs(self) -> torch.Tensor:
        """``[B, n]`` float32: summed log-probability; -inf where there is no sequence."""
        return self.token_scores.sum(-1).masked_fill(~self.inside.any(-1), -torch.inf)


class History:
    """Candidates and choices of every step, a few numbers per beam and step.

    Args:
        traced: whether `trace` will be asked for.
    """

    def __init__(self, traced: bool = False) -> None:
        self._steps: list[tuple[Candidates, Chosen]] = []
        self._traced: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = [] if traced else None

    def __len__(self) -> int:
        return len(self._steps)

    def record(self, candidates: Candidates, chosen: Chosen) -> None:
        """Note one step."""
        self._steps.append((candidates, chosen))

    def record_traced(
        self,
        candidates: Candidates,
        chosen: Chosen,
        *,
        sums: torch.Tensor,
        finished: torch.Tensor,
        runs_on: torch.Tensor,
    ) -> None:
        """Note one step with what a trace tells of it.

        Args:
            candidates, chosen: of the step.
            sums: ``[B, K]`` float32, summed log-probability of each candidate.
            finished: ``[B, K]`` bool, candidates that ended and were taken.
            runs_on: ``[B, W]`` bool, beams that are one.
        """
        if self._traced is not None:
            self._traced.append((sums, finished, chosen.ranks.masked_fill(~runs_on, -1)))
        self.record(candidates, chosen)

    def trace(self) -> dict[str, torch.Tensor]:
        """Every step of the search: ``[B, T, K]`` tokens, parents, scores and finished, ``[B, T, W]`` running ranks."""
        if self._traced is None:
            raise RuntimeError("the steps of this search were not traced")
        fields = {
            name: torch.stack([getattr(candidates, name) for candidates, _ in self._steps], dim=1)
            for name in ("tokens", "parents")
        }
        told = [torch.stack(parts, dim=1) for parts in zip(*self._traced, strict=True)]
        return {**fields, **dict(zip(("scores", "finished", "running"), told, strict=True))}

    def walk_back(self, state: SearchState, count: int) -> Sequences:
        """Put the best `count` finished sequences of each prompt together, from their last token to their first.

        A candidate has one number, ``step · K + place``, and one candidate that it continues: one gather goes back a
        step in all sequences at once.

        Args:
            state: at the end of the search.
            count: `n`, at most as many as are remembered.
        """
        scores = state.finished_scores[:, :count]  # [B, n]
        number = state.finished_origin[:, :count].masked_fill(scores == -torch.inf, -1)
        places = self._steps[0][0].tokens.shape[1]  # K
        end = number.div(places, rounding_mode="floor")  # step that finished each: -1 where there is no sequence
        longest = int(end.amax()) + 1  # host read: once, after the search
        parents = self._of_all("parents")  # [B, T·K]
        numbers = [number.clamp(min=0)]
        if longest > 1:
            continued = self._continued(parents, places)
            for _ in range(longest - 1):
                numbers.append(continued.gather(1, numbers[-1]))
        back = end.unsqueeze(-1) - torch.arange(longest, device=scores.device)  # [B, n, L] steps from end to position
        inside = back >= 0
        which = torch.stack(numbers, dim=-1).gather(2, back.clamp(min=0)).view(len(scores), -1)  # [B, n·L]
        return Sequences(
            tokens=self._of_all("tokens").gather(1, which).view_as(inside),
            parents=parents.gather(1, which).view_as(inside),
            token_scores=self._of_all("token_scores").gather(1, which).view_as(inside).masked_fill(~inside, 0.0),
            inside=inside,
            scores=scores,
        )

    def last_nodes(self, state: SearchState, count: int) -> torch.Tensor:
        """``[B, n]`` int64: the node on which each of the best finished sequences ended; any where there is none."""
        return self._of_all("nodes").gather(1, state.finished_origin[:, :count].clamp(min=0))

    def _of_all(self, name: str) -> torch.Tensor:
        """A field of all candidates of all steps: ``[B, T·K]``."""
        return torch.cat([getattr(candidates, name) for candidates, _ in self._steps], dim=1)

    def _continued(self, parents: torch.Tensor, places: int) -> torch.Tensor:
        """Number of the candidate that each candidate continues, ``[B, T·K]`` int64; 0 in the first step."""
        ranks = torch.stack([chosen.ranks for _, chosen in self._steps[:-1]], dim=1)  # [B, T-1, W]
        first = torch.arange(0, places * ranks.shape[1], places, device=ranks.device).view(1, -1, 1)
        before = (first + ranks).gather(2, parents[:, places:].view(len(ranks), -1, places))  # [B, T-1, K]
        return torch.cat([first.new_zeros(len(ranks), places), before.flatten(1)], dim=1)
