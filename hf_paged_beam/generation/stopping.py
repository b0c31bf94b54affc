"""Which candidates end their sequence, and when a search is over."""

from __future__ import annotations

import time

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from .lengths import LengthTables
from .state import Candidates, SearchState

_WITHOUT_ROWS = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


class CandidateStopping:
    """Evaluates transformers' stopping criteria on candidates.

    The usual three (end token, longest length, longest time) look at the newest token, the length and the clock, so
    that no candidate's full row has to be put together. With any other criterion all are called exactly as
    transformers' search calls them: with the rows of all candidates and the scores so far.

    Args:
        criteria: as transformers prepared them.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.criteria = criteria
        self.needs_rows = any(type(criterion) not in _WITHOUT_ROWS for criterion in criteria)

    def hits(
        self, candidates: Candidates, length: int, rows: torch.Tensor | None, scores: tuple | None
    ) -> torch.Tensor | None:
        """Which candidates end here.

        Args:
            candidates: of this step.
            length: tokens of a candidate's row, prompt included.
            rows: ``[B·K, length]`` int64 where `needs_rows`, else None.
            scores: processed scores of the steps so far, or None, as transformers hands them over.

        Returns:
            ``[B, K]`` bool, or None if no criterion is about to end any.
        """
        tokens = candidates.tokens
        if self.needs_rows:
            return self.criteria(rows, scores).view_as(tokens)
        ended = None
        for criterion in self.criteria:
            if isinstance(criterion, EosTokenCriteria):
                ends = criterion.eos_token_id.to(tokens.device)
                hits = (tokens.unsqueeze(-1) == ends).any(-1)
                ended = hits if ended is None else ended | hits
            elif _all_end(criterion, length):
                ended = torch.ones_like(tokens, dtype=torch.bool)
        return ended


def _all_end(criterion: MaxLengthCriteria | MaxTimeCriteria, length: int) -> bool:
    """Whether every sequence of `length` tokens ends now, for want of room or time."""
    if isinstance(criterion, MaxTimeCriteria):
        return time.time() - criterion.initial_timestamp > criterion.max_time
    if criterion.max_position_embeddings is not None and length > criterion.max_position_embeddings:
        criterion(torch.empty(1, length, dtype=torch.int64, device="meta"), None)  # for its warning
    return length >= criterion.max_length


def still_open(
    was_open: torch.Tensor,
    running_scores: torch.Tensor,
    finished_scores: torch.Tensor,
    tables: LengthTables,
    length: int,
) -> torch.Tensor:
    """Whether a running beam may still beat a finished one: ``[B]`` bool.

    Args:
        was_open: ``[B]`` bool, of the step before.
        running_scores, finished_scores: ``[B, W]`` float32 of this step, best first.
        tables: length forms.
        length: tokens generated so far.
    """
    best = running_scores.select(1, 0) / tables.bound.select(1, length)
    return was_open & (best > finished_scores.select(1, -1))


def goes_on(state: SearchState, early_stopping: bool | str) -> torch.Tensor:
    """Whether some prompt can gain from another step: 0-dim bool.

    Where all candidates ended, none runs on, and `still_open` has closed the prompt.

    Args:
        state: after this step.
        early_stopping: with True, a prompt is done when `W` sequences have finished.
    """
    return (state.open & ~state.full if early_stopping is True else state.open).any()
