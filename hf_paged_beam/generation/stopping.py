"""Which candidates end their sequence."""

from __future__ import annotations

import time

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from .state import Candidates

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
