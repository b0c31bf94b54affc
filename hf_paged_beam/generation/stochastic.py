"""Stochastic beam search (Kool et al. 2019, arXiv:1903.06059): whole sequences drawn without replacement.

Give every complete sequence s its log-probability plus Gumbel noise, G(s). The W largest are W draws without
replacement. They are found from the top down: a beginning's G is the largest of the sequences that begin with it, so
that the G of its continuations are Gumbel variables of which the largest is known. A beam search that ranks by G, and
otherwise goes as always, ends with the W largest:

    candidates   G of the continuations of each beam, given the beam's own               `Draws.candidates`
    finished     ranked by G, undivided; a prompt is done when no running beam's G is larger than the W-th finished
    threshold    the largest G of all that was not returned                              `Draws.threshold`

The threshold is known without an extra beam: what a search discards carries the G of the best sequence below it.
"""

from __future__ import annotations

import torch

from ..cache import BeamRows
from .candidates import best_candidates, renormalized
from .rules import Rules
from .state import Candidates, Chosen, SearchState


class Draws:
    """What a search that draws keeps beside its state.

    Args:
        batch_size: `B`.
        device: of the search.

    Attributes:
        log_probs: ``[B, N]`` float32, summed log-probability of every running beam. The state's scores are their G.
        sums: ``[B, K]`` float32, that of the last step's candidates.
    """

    def __init__(self, batch_size: int, device: torch.device):
        self.log_probs = self.sums = torch.zeros(batch_size, 1, device=device)
        self._lost = torch.full((batch_size,), -torch.inf, device=device)

    def begin(self, state: SearchState) -> SearchState:
        """The state before the first step: the G of the best sequence of all is a Gumbel variable."""
        return state._replace(running_scores=_gumbel(state.running_scores))

    def candidates(
        self, log_probs: torch.Tensor, running_scores: torch.Tensor, rules: Rules, beams: BeamRows | None
    ) -> Candidates:
        """The continuations of the largest G.

        Args:
            log_probs: ``[R, V]`` float32, processed; made to sum to 1 here.
            running_scores: ``[B, N]`` float32, G of every running beam.
            rules: of each prompt.
            beams: the rows of a step; None for one row per prompt.
        """
        rows = torch.flatten if beams is None else beams.rows
        log_probs = renormalized(log_probs)
        noisy = _gumbel(log_probs).add_(log_probs)
        perturbed = _given_the_largest(noisy, rows(self.log_probs).unsqueeze(1), rows(running_scores).unsqueeze(1))
        no_beam = running_scores == -torch.inf
        found = best_candidates(perturbed, no_beam.float().masked_fill(no_beam, -torch.inf), rules, beams)
        token_scores = _at(log_probs, found, beams)
        return found._replace(token_scores=token_scores.masked_fill(found.scores == -torch.inf, -torch.inf))

    def follow(
        self,
        before: SearchState,
        after: SearchState,
        candidates: Candidates,
        hits: torch.Tensor | None,
        chosen: Chosen,
        rules: Rules,
    ) -> None:
        """Note what the step discarded, and let the running beams continue their parents."""
        lost = torch.where(after.open, -torch.inf, after.running_scores.select(1, 0))
        runs_on, ends = candidates.scores, None
        if hits is not None:
            runs_on, ends = runs_on.masked_fill(hits, -torch.inf), runs_on.masked_fill(~hits, -torch.inf)
        lost = lost.maximum(_best_beyond(runs_on.sort(dim=1, descending=True).values, rules))
        if ends is not None:
            lost = lost.maximum(_best_beyond(ends, rules))
        self._lost = torch.where(before.open, self._lost.maximum(lost), self._lost)
        self.sums = self.log_probs.gather(1, candidates.parents) + candidates.token_scores
        self.log_probs = self.sums.gather(1, chosen.ranks)

    def threshold(self, state: SearchState, counts: torch.Tensor, rules: Rules) -> torch.Tensor:
        """``[B]`` float32: the largest G of the sequences that are not returned; -inf where there is none.

        Args:
            state: at the end.
            counts: ``[B]`` int64, how many of each prompt are returned.
            rules: of each prompt.
        """
        next_best = state.finished_scores.gather(1, counts.unsqueeze(1)).squeeze(1)
        widths = torch.tensor(rules.widths, device=counts.device)
        return torch.where(counts == widths, next_best.maximum(self._lost), next_best)


_TINY = -30.0
"""Below this, log(1 - exp(-exp(x))) is x in float64."""


def importance_weights(log_probs: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """``p / q`` of drawn sequences: q is the probability that a sequence's G is above the threshold.

    ``sum of p / q · f`` over a prompt's sequences estimates the expectation of f without bias (Kool et al. 2019,
    equation 12). Where nothing was left undrawn the threshold is -inf, and the weight is p.

    Args:
        log_probs, threshold: float, of one shape.

    Returns:
        float64, of that shape; 0 where there is no sequence.
    """
    log_probs, threshold = log_probs.double(), threshold.double()
    above = log_probs - threshold
    log_q = torch.log(-torch.expm1(-above.exp()))  # q = P(Gumbel(log p) > threshold)
    log_q = torch.where(above < _TINY, above, log_q)
    weights = (log_probs - log_q).exp()
    return weights.masked_fill(weights.isnan(), 0.0)


def _best_beyond(ranked: torch.Tensor, rules: Rules) -> torch.Tensor:
    """``[B]``: the best of ``[B, K]`` that is not among a prompt's first `W`."""
    if ranked.shape[1] <= rules.width and rules.spare_beams is None:
        return ranked.new_full(ranked.shape[:1], -torch.inf)
    if rules.spare_beams is None:
        return ranked[:, rules.width :].amax(1)
    beyond = torch.arange(ranked.shape[1], device=ranked.device) >= (~rules.spare_beams).sum(1, keepdim=True)
    return ranked.masked_fill(~beyond, -torch.inf).amax(1)


def _gumbel(like: torch.Tensor) -> torch.Tensor:
    """Gumbel noise."""
    smallest = torch.finfo(torch.float32).tiny
    return torch.empty_like(like).exponential_().clamp_(min=smallest).log_().neg_()


def _given_the_largest(noisy: torch.Tensor, sums: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Gumbel variables ``sums + noisy`` shifted so that the largest of each row is `largest`.

    The numerically stable form of Kool et al. 2019, appendix B.3. The gap to the largest is taken before the row's own
    sum is added: in a long sequence that sum is large, and would round gaps away, so that several were the largest.

    Args:
        noisy: ``[R, V]``, log-probabilities of the tokens with Gumbel noise.
        sums: ``[R, 1]``, log-probability of what they continue.
        largest: ``[R, 1]``.
    """
    gap = noisy - noisy.amax(-1, keepdim=True)  # at most 0
    over = (largest - sums) - noisy + torch.log(-torch.expm1(gap))
    shifted = largest - over.clamp(min=0) - torch.log1p(torch.exp(-over.abs()))
    return shifted.masked_fill((noisy == -torch.inf) | (sums == -torch.inf), -torch.inf)


def _at(log_probs: torch.Tensor, found: Candidates, beams: BeamRows | None) -> torch.Tensor:
    """Log-probability of each candidate's token, ``[B, K]``."""
    first = torch.arange(len(found.parents), device=log_probs.device).unsqueeze(1) if beams is None else beams.first
    return log_probs[(first + found.parents).clamp_(max=len(log_probs) - 1), found.tokens]
