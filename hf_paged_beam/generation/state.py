"""The state of a search: one row per prompt, since prompts may differ in width and settings."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SearchState(NamedTuple):
    """What one step hands to the next. `W` beams of the widest prompt; `N` beams that run: 1 after the prompt, then W.

    Attributes:
        running_scores: ``[B, N]`` float32, summed log-probability of each running beam, best first; -inf where there
            is none.
        finished_scores: ``[B, F]`` float32, normalised, best first; -inf where there is none. `F` is `W`, unless more
            are remembered.
        finished_origin: ``[B, F]`` int64, ``step · K + place`` of the candidate that finished there.
        open: ``[B]`` bool, whether a running beam may still beat a finished one; once False it stays so.
    """

    running_scores: torch.Tensor
    finished_scores: torch.Tensor
    finished_origin: torch.Tensor
    open: torch.Tensor

    @classmethod
    def initial(cls, batch_size: int, kept: int, device: torch.device) -> SearchState:
        """One running beam per prompt with score 0, none of `kept` sequences finished."""
        return cls(
            running_scores=torch.zeros(batch_size, 1, dtype=torch.float32, device=device),
            finished_scores=torch.full((batch_size, kept), -torch.inf, dtype=torch.float32, device=device),
            finished_origin=torch.full((batch_size, kept), -1, dtype=torch.int64, device=device),
            open=torch.ones(batch_size, dtype=torch.bool, device=device),
        )


class Candidates(NamedTuple):
    """The `K` best continuations of each prompt, best first.

    Attributes:
        scores: ``[B, K]`` float32, summed log-probability.
        tokens: ``[B, K]`` int64.
        parents: ``[B, K]`` int64, running beam that each continues.
        token_scores: ``[B, K]`` float32, processed log-probability of the token alone.
        nodes: ``[B, K]`` int64, where each stands in a trie; None without one.
        bonus: ``[B, K]`` float32, added to the normalised score of one that finishes; None for nothing.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    token_scores: torch.Tensor
    nodes: torch.Tensor | None = None
    bonus: torch.Tensor | None = None


class Chosen(NamedTuple):
    """The candidates that run on.

    Attributes:
        ranks: ``[B, W]`` int64, place of each among the candidates.
        tokens: ``[B, W]`` int64, the token that the model sees next.
        parents: ``[B, W]`` int64, running beam that each continues.
    """

    ranks: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
