"""The `K` best continuations of each prompt.

A candidate's score is its beam's score plus a token score, so that the best `K` of all are among each beam's best `K`:
one `topk` per row over `V`, then one over ``N · k``. That equals a `topk` over ``N · V`` (ties aside) and is
much cheaper. Sampling without replacement is the same with Gumbel noise added (Kool et al. 2019, arXiv:1903.06059):
the `K` largest of ``log p + Gumbel`` are `K` draws without replacement.
"""

from __future__ import annotations

import torch

from .. import versions
from ..cache import BeamRows
from .rules import Rules
from .state import Candidates

_SMALL = 2**16
"""Up to this many log-probabilities are searched in one `topk`: few short calls on one thread, where what is right for
more (a `topk` for each row) would mostly wait for threads to wake. With tiny models that was worth 3% of a whole
search on a CPU; from about 10 rows of 32,000 on, a `topk` for each row is twice as quick."""


def best_candidates(
    log_probs: torch.Tensor, running_scores: torch.Tensor, rules: Rules, beams: BeamRows | None = None
) -> Candidates:
    """The best continuations.

    Args:
        log_probs: ``[R, V]`` float32, processed.
        running_scores: ``[B, N]`` float32.
        rules: of each prompt.
        beams: the rows of a step; None for as many of each prompt, in order.
    """
    count = rules.num_candidates
    if log_probs.numel() <= _SMALL and (beams is None or beams.even):
        return _only_own(_flat(log_probs, running_scores, count), rules)
    token_scores, tokens = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)  # [R, k]
    return merge(tokens, token_scores, running_scores, rules, beams)


def _flat(log_probs: torch.Tensor, running_scores: torch.Tensor, count: int) -> Candidates:
    """One `topk` over all continuations of a prompt."""
    vocabulary = log_probs.shape[-1]
    token_scores = log_probs.view(running_scores.shape[0], -1, vocabulary)
    scores = (token_scores + running_scores.unsqueeze(-1)).flatten(1)  # [B, N·V]
    kept = min(count, scores.shape[-1])
    best, places = scores.topk(kept, dim=-1)
    found = Candidates(
        scores=best,
        tokens=places % vocabulary,
        parents=places // vocabulary,
        token_scores=token_scores.flatten(1).gather(1, places),
    )
    return pad_candidates(found, count - kept)


def sampled_candidates(
    log_probs: torch.Tensor, running_scores: torch.Tensor, rules: Rules, beams: BeamRows | None = None
) -> Candidates:
    """Continuations drawn without replacement from the softmax of their scores over all beams of a prompt.

    Args:
        log_probs, running_scores, rules, beams: as in `best_candidates`.

    Returns:
        Candidates ordered as transformers orders them: by score, or (before 5.24 or so) as they were drawn. Those of
        probability 0 have score -inf.
    """
    smallest = torch.finfo(torch.float32).tiny
    gumbel = torch.empty_like(log_probs).exponential_().clamp_(min=smallest).log_().neg_()
    perturbed, tokens = gumbel.add_(log_probs).topk(min(rules.num_candidates, log_probs.shape[-1]), dim=-1)
    drawn = merge(tokens, log_probs.gather(-1, tokens), running_scores, rules, beams, rank_by=perturbed)
    if not versions.SAMPLES_ARE_SORTED:
        return drawn
    scores, order = drawn.scores.sort(dim=-1, descending=True)
    return Candidates(
        scores=scores,
        tokens=drawn.tokens.gather(1, order),
        parents=drawn.parents.gather(1, order),
        token_scores=drawn.token_scores.gather(1, order),
    )


def merge(
    tokens: torch.Tensor,
    token_scores: torch.Tensor,
    running_scores: torch.Tensor,
    rules: Rules,
    beams: BeamRows | None,
    rank_by: torch.Tensor | None = None,
) -> Candidates:
    """The best of a prompt among the best `k` of each of its rows.

    Args:
        tokens, token_scores: ``[R, k]``.
        running_scores: ``[B, N]``.
        rules: of each prompt.
        beams: the rows of a step; None for as many of each prompt, in order.
        rank_by: ``[R, k]``, taken in place of `token_scores` to rank.
    """
    batch, per_row = running_scores.shape[0], tokens.shape[-1]
    tokens, token_scores = in_grid(tokens, batch, beams), in_grid(token_scores, batch, beams)  # [B, N, k]
    sums = running_scores.unsqueeze(-1)  # -inf in spare cells
    scores = (token_scores + sums).flatten(1)  # [B, N·k]
    ranked = scores if rank_by is None else (in_grid(rank_by, batch, beams) + sums).flatten(1)
    kept = min(rules.num_candidates, scores.shape[-1])
    best, places = ranked.topk(kept, dim=-1)  # [B, K]
    found = Candidates(
        scores=best if rank_by is None else scores.gather(1, places),
        tokens=tokens.flatten(1).gather(1, places),
        parents=places // per_row,
        token_scores=token_scores.flatten(1).gather(1, places),
    )
    return _only_own(pad_candidates(found, rules.num_candidates - kept), rules)


def in_grid(rows: torch.Tensor, batch_size: int, beams: BeamRows | None) -> torch.Tensor:
    """``[R, ...]`` to ``[B, N, ...]``."""
    if beams is None:
        return rows.reshape(batch_size, rows.shape[0] // batch_size, *rows.shape[1:])
    return beams.grid(rows)


def _only_own(found: Candidates, rules: Rules) -> Candidates:
    """Without what is beyond the `K` of narrower prompts."""
    if rules.spare_candidates is None:
        return found
    return found._replace(scores=found.scores.masked_fill(rules.spare_candidates, -torch.inf))


def renormalized(scores: torch.Tensor) -> torch.Tensor:
    """Log-probabilities among what is allowed, along the last dimension; -inf where nothing is."""
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.log_softmax(-1).masked_fill(nothing, -torch.inf)


def pad_candidates(found: Candidates, missing: int) -> Candidates:
    """Fill up with candidates of score -inf, where there are fewer continuations than asked for."""
    if not missing:
        return found
    pad = torch.nn.functional.pad
    return Candidates(
        scores=pad(found.scores, (0, missing), value=-torch.inf),
        tokens=pad(found.tokens, (0, missing)),
        parents=pad(found.parents, (0, missing)),
        token_scores=pad(found.token_scores, (0, missing), value=-torch.inf),
        nodes=None if found.nodes is None else pad(found.nodes, (0, missing)),
    )
