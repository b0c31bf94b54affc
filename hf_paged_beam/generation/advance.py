"""One step of the search: candidates in, finished and running sequences out. A pure function of tensors."""

from __future__ import annotations

import torch

from .rules import Rules
from .state import Candidates, Chosen, SearchState

_ENDED = 1e9
"""What transformers takes off the score of a candidate that ended, to rank it behind those that run on."""


def advance(
    state: SearchState, candidates: Candidates, hits: torch.Tensor | None, *, length: int, rules: Rules
) -> tuple[SearchState, Chosen]:
    """Let the candidates that ended finish, and the best others run on.

    Args:
        state: before the step.
        candidates: `K` per prompt, best first. Only the first `W` may finish; the others are there so that
            `W` can run on.
        hits: ``[B, K]`` bool, candidates that end here; None if none can, which the host knows in a search without an
            end token.
        length: tokens generated so far, this step's included.
        rules: of each prompt.

    Returns:
        The state after the step, and the beams that run on.
    """
    if hits is not None:
        state = finish(state, candidates, hits, length, rules)
    running_scores, chosen = run_on(candidates, hits, rules)
    attainable = rules.attainable(running_scores.select(1, 0), length)
    is_open = state.open & (attainable > rules.closing_score(state.finished_scores))
    return state._replace(running_scores=running_scores, open=is_open), chosen


def run_on(candidates: Candidates, hits: torch.Tensor | None, rules: Rules) -> tuple[torch.Tensor, Chosen]:
    """The best that did not end: their scores, ``[B, W]``, and which they are.

    Where too few run on, the ended ones stand in, as in transformers, and for what no rule allows the best does: all at
    -inf, so that nothing comes of them, but a rule that is asked about them is asked about what it allowed.
    """
    scores = candidates.scores
    if hits is None:
        running_scores, ranks = scores.topk(rules.width, dim=1)
        ranks = ranks.masked_fill(running_scores == -torch.inf, 0)
    else:
        ranked, ranks = scores.add(hits, alpha=-_ENDED).topk(rules.width, dim=1)
        running_scores = ranked.masked_fill(hits.gather(1, ranks), -torch.inf)
        ranks = ranks.masked_fill(ranked == -torch.inf, 0)
    chosen = Chosen(ranks=ranks, tokens=candidates.tokens.gather(1, ranks), parents=candidates.parents.gather(1, ranks))
    return rules.only_beams(running_scores), chosen


def finish(state: SearchState, candidates: Candidates, hits: torch.Tensor, length: int, rules: Rules) -> SearchState:
    """The state with the sequences that end here among the finished ones, best first."""
    ends = hits.narrow(1, 0, rules.width) & rules.takes(state).unsqueeze(1)
    scores = rules.normalised(candidates.scores.narrow(1, 0, rules.width), length)
    if candidates.bonus is not None:
        scores = scores + candidates.bonus.narrow(1, 0, rules.width)
    scores = rules.only_beams(torch.where(ends, scores, -torch.inf))
    first = (length - 1) * hits.shape[1]
    origin = torch.arange(first, first + rules.width, device=scores.device).expand_as(scores)
    merged, places = torch.cat([state.finished_scores, scores], dim=1).topk(rules.kept, dim=1)
    origins = torch.cat([state.finished_origin, origin], dim=1).gather(1, places)
    return state._replace(finished_scores=rules.only_kept(merged), finished_origin=origins)
