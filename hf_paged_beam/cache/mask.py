"""The mask of a folded step, registered with transformers' `AttentionMaskInterface`.

transformers describes a mask by a function of indices, ``mask_function(batch, head, query position, key position)``.
Here the key positions are those that the *slots* hold, so that sliding windows, chunks, padding and every other rule
of that kind need no code of their own. What a beam may see at all is the index table's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from .. import versions
from .borrow import attention_before
from .step import FoldedStep, current_step


def pool_mask(
    *,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = versions.MASKS_NEED_VMAP,
    **kwargs,
) -> torch.Tensor | None:
    """Mask over the pool: ``[B, 1, W, P + tree slots]``, bool, or to be added where only the index table decides.

    A mask that is not about the pool (cross-attention: its queries have no offset) is made as for SDPA, with one row
    per prompt. The arguments are those of transformers' mask functions.
    """
    step = current_step()
    of_pool = step is not None and versions.speaks_of_cached_tokens(mask_function, kwargs)
    if step is not None and not of_pool and mask_function is versions.bidirectional_mask_function and not use_vmap:
        # Cross-attention: padding is all there is, and whether there is any is not looked up, which would be a read.
        return None if attention_mask is None else attention_mask[:, None, None, :].to(torch.bool)
    if step is None or not of_pool:
        make = ALL_MASK_ATTENTION_FUNCTIONS.get(attention_before(kwargs.get("config")))
        if make is None:
            return None  # as transformers does for an attention without a mask function
        return make(mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, **kwargs)
    if mask_function is causal_mask_function and attention_mask is None:
        return step.visible_additive(kwargs.get("dtype", torch.float32))
    visible = step.visible()  # [B, W, S]
    if mask_function is not causal_mask_function:
        allowed = _at_slots(mask_function, step, use_vmap)
        visible = visible & allowed.unsqueeze(1)
    if attention_mask is not None:
        rows = attention_mask.shape[0] == step.beams.count
        per_prompt = step.beams.first_of_each(attention_mask) if rows else attention_mask  # [B, length]
        visible = visible & per_prompt.gather(1, step.positions()).to(torch.bool).unsqueeze(1)
    return visible.unsqueeze(1)


def _at_slots(mask_function: Callable, step: FoldedStep, use_vmap: bool) -> torch.Tensor:
    """Evaluate the rule for each prompt's first beam at the positions its slots hold: ``[B, S]`` bool."""
    positions = step.positions()
    device = positions.device
    batch, query = step.beams.first.squeeze(1), step.query_position()
    if use_vmap:
        return versions.evaluate_unbatched(mask_function, batch, query, positions)
    head = torch.zeros((), dtype=torch.int64, device=device)
    allowed = mask_function(batch.view(-1, 1, 1, 1), head, query, positions[:, None, None, :])
    return allowed.expand(positions.shape[0], 1, 1, positions.shape[1])[:, 0, 0]
