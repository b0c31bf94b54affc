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
        lengths: ``[B, n]`` int64, tokens of each, end token included; 0 where there is no sequence.
        scores: ``[B, n]`` float32, normalised; -inf where there is no sequence.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    token_scores: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor

    @property
    def inside(self) -> torch.Tensor:
        """``[B, n, L]`` bool: which entries are tokens of a sequence."""
        return torch.arange(self.tokens.shape[2], device=self.tokens.device) < self.lengths.unsqueeze(-1)


class History:
    """Candidates and choices of every step, a few numbers per beam and step."""

    def __init__(self) -> None:
        self._steps: list[tuple[Candidates, Chosen]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def record(self, candidates: Candidates, chosen: Chosen) -> None:
        """Note one step."""
        self._steps.append((candidates, chosen))

    def walk_back(self, state: SearchState, count: int) -> Sequences:
        """Put the best `count` finished sequences of each prompt together, from their last token to their first.

        Args:
            state: at the end of the search.
            count: `n`, at most `W`.
        """
        scores = state.finished_scores[:, :count]  # [B, n]
        width = state.finished_scores.shape[1]
        origin = state.finished_origin[:, :count].masked_fill(scores == -torch.inf, -1)
        end, rank = origin // width, origin % width  # step that finished it, and its place there
        beam = torch.zeros_like(rank)
        places = []
        for step in reversed(range(len(self))):
            candidates, chosen = self._steps[step]
            places.append(torch.where(end == step, rank, chosen.ranks.gather(1, beam)))
            beam = torch.where(end >= step, candidates.parents.gather(1, places[-1]), beam)
        place = torch.stack(places[::-1])  # [T, B, n]
        tokens, parents, token_scores = (
            torch.stack([getattr(candidates, name) for candidates, _ in self._steps]).gather(2, place).permute(1, 2, 0)
            for name in ("tokens", "parents", "token_scores")
        )
        longest = int((end + 1).amax())  # host read: once, after the search
        cut = Sequences(
            tokens=tokens[..., :longest],
            parents=parents[..., :longest],
            token_scores=token_scores[..., :longest],
            lengths=end + 1,
            scores=scores,
        )
        return dataclasses.replace(cut, token_scores=cut.token_scores.masked_fill(~cut.inside, 0.0))
