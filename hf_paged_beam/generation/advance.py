"""One step of the search: candidates in, finished and running sequences out. A pure function of tensors."""

from __future__ import annotations

import torch

from .lengths import LengthTables
from .state import Candidates, Chosen, SearchState
from .stopping import still_open

_ENDED = 1e9
"""What transformers takes off the score of a candidate that ended, to rank it behind those that run on."""


def advance(
    state: SearchState,
    candidates: Candidates,
    hits: torch.Tensor | None,
    *,
    length: int,
    tables: LengthTables,
    early_stopping: bool | str,
) -> tuple[SearchState, Chosen]:
    """Let the candidates that ended finish, and the best others run on.

    Args:
        state: before the step.
        candidates: `K` per prompt, best first. Only the first `W` may finish; the others are there so that
            `W` can run on.
        hits: ``[B, K]`` bool, candidates that end here; None if none can, which the host knows in a search without an
            end token.
        length: tokens generated so far, this step's included.
        tables: length forms.
        early_stopping: with True, a prompt that has `W` finished sequences takes no more.

    Returns:
        The state after the step, and the beams that run on.
    """
    finished_scores, finished_origin = state.finished_scores, state.finished_origin
    if hits is not None:
        finished_scores, finished_origin = _finish(state, candidates, hits, length, tables, early_stopping)
    running_scores, ranks = _run_on(candidates.scores, hits, width=finished_scores.shape[1])
    after = SearchState(
        running_scores=running_scores,
        finished_scores=finished_scores,
        finished_origin=finished_origin,
        open=still_open(state.open, running_scores, finished_scores, tables, length),
    )
    chosen = Chosen(
        ranks=ranks,
        tokens=candidates.tokens.gather(1, ranks),
        parents=candidates.parents.gather(1, ranks),
    )
    return after, chosen


def _run_on(scores: torch.Tensor, hits: torch.Tensor | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best that did not end: their scores and ranks, ``[B, W]``.

    Where too few run on, the ended ones stand in, as in transformers, and for what no rule allows the best does: all at
    -inf, so that nothing comes of them, but a rule that is asked about them is asked about what it allowed.
    """
    if hits is None:
        ranked, ranks = scores.topk(width, dim=1)
        return ranked, ranks.masked_fill(ranked == -torch.inf, 0)
    ranked, ranks = scores.add(hits, alpha=-_ENDED).topk(width, dim=1)
    running_scores = ranked.masked_fill(hits.gather(1, ranks), -torch.inf)
    return running_scores, ranks.masked_fill(ranked == -torch.inf, 0)


def _finish(
    state: SearchState,
    candidates: Candidates,
    hits: torch.Tensor,
    length: int,
    tables: LengthTables,
    early_stopping: bool | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the sequences that end here into the finished ones: their scores and origins, ``[B, W]``, best first."""
    width = state.finished_scores.shape[1]
    takes = state.open & ~state.full if early_stopping is True else state.open
    ends = hits.narrow(1, 0, width) & takes.unsqueeze(1)
    scores = candidates.scores.narrow(1, 0, width) / tables.form.narrow(1, length, 1)
    scores = torch.where(ends, scores, -torch.inf)
    first = (length - 1) * hits.shape[1]
    origin = torch.arange(first, first + width, device=scores.device).expand_as(scores)
    merged, places = torch.cat([state.finished_scores, scores], dim=1).topk(width, dim=1)
    return merged, torch.cat([state.finished_origin, origin], dim=1).gather(1, places)
