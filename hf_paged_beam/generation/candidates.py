"""From log-probabilities to the `K` best continuations of each prompt.

A continuation's score is its beam's score plus its token's, so the best `K` of a prompt are among the best `K` of
each of its beams: a `topk` per row, then one over ``R · k``. That equals a `topk` over ``R · V`` (ties aside) and is
much cheaper. Sampling without replacement is the same with Gumbel noise added (Kool et al. 2019, arXiv:1903.06059):
the `K` largest of ``log p + Gumbel`` are `K` draws without replacement.
"""

from __future__ import annotations

import torch

from .. import versions
from .state import Candidates

_SMALL = 2**16
"""Up to this many log-probabilities are searched in one `topk`: few short calls on one thread, where what is right for
more (a `topk` for each row) would mostly wait for threads to wake. With tiny models that was worth 3% of a whole
search on a CPU; from about 10 rows of 32,000 on, a `topk` for each row is twice as quick."""


def best_candidates(log_probs: torch.Tensor, running_scores: torch.Tensor, count: int) -> Candidates:
    """The best continuations.

    Args:
        log_probs: ``[B·R, V]`` float32, processed.
        running_scores: ``[B, R]`` float32.
        count: `K`.
    """
    if log_probs.numel() <= _SMALL:
        return _flat(log_probs, running_scores, count)
    token_scores, tokens = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)  # [B·R, k]
    return _merge(tokens, token_scores, running_scores, count)


def _flat(log_probs: torch.Tensor, running_scores: torch.Tensor, count: int) -> Candidates:
    """One `topk` over all continuations of a prompt."""
    vocabulary = log_probs.shape[-1]
    scores = _per_prompt(log_probs, running_scores)  # [B, R·V]
    kept = min(count, scores.shape[-1])
    best, places = scores.topk(kept, dim=-1)
    found = Candidates(
        scores=best,
        tokens=places % vocabulary,
        parents=places // vocabulary,
        token_scores=log_probs.reshape(running_scores.shape[0], -1).gather(1, places),
    )
    return pad_candidates(found, count - kept)


def sampled_candidates(log_probs: torch.Tensor, running_scores: torch.Tensor, count: int) -> Candidates:
    """Continuations drawn without replacement from the softmax of their scores over all beams of a prompt.

    Args:
        log_probs: ``[B·R, V]`` float32, processed.
        running_scores: ``[B, R]`` float32.
        count: `K`.

    Returns:
        Candidates ordered as transformers orders them: by score, or (before 5.24 or so) as they were drawn. Those of
        probability 0 have score -inf.
    """
    smallest = torch.finfo(torch.float32).tiny
    gumbel = torch.empty_like(log_probs).exponential_().clamp_(min=smallest).log_().neg_()
    perturbed, tokens = gumbel.add_(log_probs).topk(min(count, log_probs.shape[-1]), dim=-1)
    drawn = _merge(tokens, log_probs.gather(-1, tokens), running_scores, count, rank_by=perturbed)
    if not versions.SAMPLES_ARE_SORTED:
        return drawn
    scores, order = drawn.scores.sort(dim=-1, descending=True)
    return Candidates(
        scores=scores,
        tokens=drawn.tokens.gather(1, order),
        parents=drawn.parents.gather(1, order),
        token_scores=drawn.token_scores.gather(1, order),
    )


def _merge(
    tokens: torch.Tensor,
    token_scores: torch.Tensor,
    running_scores: torch.Tensor,
    count: int,
    rank_by: torch.Tensor | None = None,
) -> Candidates:
    """The best `count` of a prompt among the best `k` of each of its rows.

    Args:
        tokens, token_scores: ``[B·R, k]``.
        running_scores: ``[B, R]``.
        rank_by: ``[B·R, k]``, taken in place of `token_scores` to rank.
    """
    batch, rows = running_scores.shape
    per_row = tokens.shape[-1]
    scores = _per_prompt(token_scores, running_scores)  # [B, R·k]
    ranked = scores if rank_by is None else _per_prompt(rank_by, running_scores)
    kept = min(count, rows * per_row)
    best, places = ranked.topk(kept, dim=-1)  # [B, K]
    found = Candidates(
        scores=best if rank_by is None else scores.gather(1, places),
        tokens=tokens.reshape(batch, -1).gather(1, places),
        parents=places // per_row,
        token_scores=token_scores.reshape(batch, -1).gather(1, places),
    )
    return pad_candidates(found, count - kept)


def _per_prompt(token_scores: torch.Tensor, running_scores: torch.Tensor) -> torch.Tensor:
    batch, rows = running_scores.shape
    return (token_scores.reshape(batch, rows, -1) + running_scores.unsqueeze(-1)).view(batch, -1)


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
