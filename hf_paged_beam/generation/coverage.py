"""Coverage penalty: a finished sequence loses where its cross-attention left parts of the source out.

Wu et al. 2016 (arXiv:1609.08144), equation 14: with a(i, j) the attention that generated token j paid to source
position i, a sequence's score becomes

    log P / form(n)  +  coverage_penalty · sum over i of log(min(sum over j of a(i, j), 1))

Attention is that of the decoder's last layer, the mean of its heads, in the pass that predicts token j. Padding of the
source does not count. The penalty is never above 0, so that every bound on what running beams may reach holds without
it.
"""

from __future__ import annotations

from typing import Any

import torch

from .state import Candidates, Chosen


class Coverage:
    """What the running beams of every prompt have attended to.

    Args:
        penalty: factor of the penalty.
        source_mask: ``[B, L]``, 0 where the source is padding; None where there is none.
    """

    def __init__(self, penalty: float, source_mask: torch.Tensor | None):
        self.penalty, self.source_mask = penalty, source_mask
        self._attended: torch.Tensor | None = None  # [B, N, L]

    def attend(self, attention: torch.Tensor) -> None:
        """Add the attention of a pass, ``[B, N, L]`` float32, of every running beam."""
        length = attention.shape[-1]
        if self._attended is None and self.source_mask is not None and self.source_mask.shape[-1] != length:
            self.source_mask = (attention > 0).any(1)  # the encoder shortened its source: what it hides has none
        self._attended = attention if self._attended is None else self._attended + attention

    def with_bonus(self, candidates: Candidates) -> Candidates:
        """Candidates with what their score loses if they finish: that of their parent, whose pass predicted them."""
        if self._attended is None:
            raise RuntimeError("no attention was seen before candidates were chosen")
        covered = self._attended.clamp(min=torch.finfo(torch.float32).tiny, max=1.0).log()
        if self.source_mask is not None:
            covered = covered.masked_fill(~self.source_mask.to(torch.bool).unsqueeze(1), 0.0)
        lost = covered.sum(-1) * self.penalty  # [B, N]
        return candidates._replace(bonus=lost.gather(1, candidates.parents))

    def follow(self, chosen: Chosen) -> None:
        """Let the running beams continue those that they were chosen from."""
        if self._attended is not None:
            places = chosen.parents.unsqueeze(-1).expand(-1, -1, self._attended.shape[-1])
            self._attended = self._attended.gather(1, places)


def last_cross_attention(outputs: Any) -> torch.Tensor:
    """Attention of a pass's newest token over the source, ``[rows, L]`` float32.

    Raises:
        ValueError: if the model gives none.
    """
    maps = getattr(outputs, "cross_attentions", None)
    if not maps or maps[-1] is None:
        raise ValueError(
            "coverage_penalty needs the model's cross-attention, but it gave none. Call "
            "model.set_attn_implementation('eager') first, or leave coverage_penalty out."
        )
    return maps[-1][:, :, -1].float().mean(1)
