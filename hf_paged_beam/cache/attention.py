"""Attention of all beams of a prompt over one pool, registered with transformers' `AttentionInterface`.

    query [R, H, 1, D]    ->  [B, Hkv, G·W, D]      the beams, and the heads that share keys, become query positions
    key   [B, Hkv, S, D]      as it lies in the pool: no copy, no repetition
    mask  [B, 1, G·W, S]      which slots each beam sees

One SDPA call reads each stored key once per prompt instead of once per beam.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from .borrow import own_attention
from .rows import BeamRows
from .step import CannotFoldError, FoldedStep, current_step


def folded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' signature.

    Args:
        query: ``[R, H, 1, D]``, one row per beam.
        key, value: ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``, a pool, or what the model made of it slot by slot,
            or an encoder's keys as the cache handed them.
        attention_mask: what `pool_mask` made, or a mask over cache positions, or None.
        position_bias: ``[1 or R, H, 1, positions]``, added to the scores.
        softcap: scores become ``softcap · tanh(scores / softcap)``.
        s_aux: ``[H]``, logit of each head's attention sink.

    Returns:
        ``[R, 1, H, Dv]`` and None (no attention maps: those need the gathered path).

    Raises:
        CannotFoldError: if keys did not come from the cache, or a mask has another shape.
    """
    step = current_step()
    layer = None if step is None else step.layer_that_handed(key)
    if step is None or (layer is None and not step.is_made_of_the_pool(key, query.shape[0], attention_mask)):
        if step is not None and (key.shape[0] != query.shape[0] or step.speaks_of_slots(attention_mask)):
            raise CannotFoldError("the model's attention received keys that the cache did not hand out as they are")
        extras = {"dropout": dropout, "scaling": scaling, "position_bias": position_bias, "softcap": softcap}
        return _attend_rows(module, query, key, value, attention_mask, **extras, s_aux=s_aux, **kwargs)
    if query.shape[2] != 1:
        raise CannotFoldError(f"a folded step has one query per beam, but got {query.shape[2]}")
    key_heads = key.shape[1]
    groups = query.shape[1] // key_heads
    if layer is not None and layer.is_cross:
        mask = _cross_mask(step, attention_mask, position_bias, key, groups)
    else:
        mask = _pool_mask(step, attention_mask, position_bias, key, groups, step.window_of(layer))
    folded = fold(query, step.beams, key_heads)
    if softcap is None and s_aux is None:
        output = functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
    else:
        # [H] -> [1, Hkv, G, W]
        sinks = None if s_aux is None else s_aux.view(1, key_heads, groups, 1).expand(-1, -1, -1, step.beams.width)
        output = _explicit_attention(folded, key, value, mask, scaling, softcap, sinks)
    return unfold(output, step.beams, groups), None


def fold(query: torch.Tensor, beams: BeamRows, key_heads: int) -> torch.Tensor:
    """``[R, H, 1, D]`` to ``[B, Hkv, G·W, D]``, group-major."""
    heads, size = query.shape[1], query.shape[3]
    grouped = beams.cells(query).view(beams.batch_size, beams.width, key_heads, heads // key_heads, size)
    return grouped.permute(0, 2, 3, 1, 4).reshape(beams.batch_size, key_heads, -1, size)


def unfold(output: torch.Tensor, beams: BeamRows, groups: int) -> torch.Tensor:
    """``[B, Hkv, G·W, Dv]`` back to ``[R, 1, H, Dv]``."""
    batch, key_heads, _, size = output.shape
    split = output.reshape(batch, key_heads, groups, beams.width, size)
    rows = split.permute(0, 3, 1, 2, 4).reshape(-1, 1, key_heads * groups, size)
    return beams.rows_of_cells(rows).contiguous()  # as transformers' own: some models take views of it


def _attend_rows(module, query, key, value, attention_mask, **extras):
    """Attention whose keys are not from this cache, one row per query row: what the module would do without us."""
    given = {name: extra for name, extra in extras.items() if extra is not None}
    attend = own_attention(module)
    if attend is None:
        raise CannotFoldError(f"the attention that {type(module).__name__} would use by itself is not known")
    return attend(module, query, key, value, attention_mask, **given)


def _pool_mask(
    step: FoldedStep,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key: torch.Tensor,
    groups: int,
    window: int | None,
) -> torch.Tensor:
    """Additive mask over the pool, ``[B, 1 or Hkv, G·W, S]``, made once per step for each mask, bias and grouping.

    A window is applied whatever the mask says: some models leave it to the cache, which forgets what is outside.
    """
    dropped = step.slots - key.shape[2]  # of a prompt longer than the window

    def make() -> torch.Tensor:
        if mask is None:
            additive = step.visible_additive(key.dtype).to(key.device)
        elif step.speaks_of_slots(mask):
            additive = mask.to(key) if mask.is_floating_point() else _additive(mask, key)
        else:
            additive = _masked(_at_slots(step, mask, key), step.visible().unsqueeze(1), key)
        if bias is not None:
            additive = additive + _at_slots(step, bias, key)  # [B, H, W, S]
        outside = step.outside(window)
        if outside is not None:
            additive = additive.masked_fill(outside[:, None, None, :].to(key.device), -torch.inf)
        return _fold_mask(additive[..., dropped:], groups)

    return step.memo(("pool", groups, window, dropped, key.dtype, key.device), (mask, bias), make)


def _cross_mask(
    step: FoldedStep, mask: torch.Tensor | None, bias: torch.Tensor | None, key: torch.Tensor, groups: int
) -> torch.Tensor | None:
    """Additive mask over the encoder's positions, ``[B, 1 or Hkv, G·W or 1, L]``, or None."""
    if mask is None and bias is None:
        return None

    def make() -> torch.Tensor:
        additive = torch.zeros(1, 1, 1, 1, dtype=key.dtype, device=key.device)
        if mask is not None:
            per_prompt = _per_prompt(step, mask)
            additive = _additive(per_prompt, key) if per_prompt.dtype == torch.bool else per_prompt.to(key)
        if bias is not None:
            additive = additive + _per_prompt(step, bias).to(key)
        shape = (step.beams.batch_size, additive.shape[1], step.beams.width, key.shape[2])
        return _fold_mask(additive.expand(shape), groups)

    return step.memo(("cross", groups, key.dtype, key.device), (mask, bias), make)


def _per_prompt(step: FoldedStep, tensor: torch.Tensor) -> torch.Tensor:
    """First row of each prompt of a tensor with 1, `B` or `R` rows."""
    if tensor.shape[0] in (1, step.beams.batch_size):
        return tensor
    if tensor.shape[0] != step.beams.count:
        raise CannotFoldError(f"a mask has {tensor.shape[0]} rows; expected 1, {step.beams.batch_size} or one per beam")
    return step.beams.first_of_each(tensor)


def _at_slots(step: FoldedStep, over_positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Gather ``[rows, h, 1, positions]`` at the position that each slot holds: ``[B, h, 1, S]``."""
    per_prompt = _per_prompt(step, over_positions)
    if per_prompt.shape[2] != 1 or not step.covers(per_prompt.shape[3]):
        raise CannotFoldError(f"a mask or bias of shape {tuple(over_positions.shape)} does not cover all positions")
    positions = step.positions().to(key.device)[:, None, None, :]  # [B, 1, 1, S]
    shape = (step.beams.batch_size, per_prompt.shape[1], 1, -1)
    return per_prompt.to(key.device).expand(shape).gather(3, positions.expand(shape))


def _additive(allowed: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """0 where allowed, -inf elsewhere, in the keys' dtype and on their device."""
    zeros = torch.zeros(allowed.shape, dtype=key.dtype, device=key.device)
    return zeros.masked_fill_(~allowed.to(key.device), -torch.inf)


def _masked(over_slots: torch.Tensor, visible: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A bool or additive ``[B, h, 1, S]`` narrowed to what each beam sees: ``[B, h, W, S]``, additive."""
    visible = visible.to(key.device)
    if over_slots.dtype == torch.bool:
        return _additive(over_slots & visible, key)
    return over_slots.to(key.dtype).masked_fill(~visible, -torch.inf)


def _fold_mask(additive: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, 1 or H, W, S]`` to ``[B, 1 or Hkv, G·W, S]``, in the order of `fold`."""
    batch, heads, beams, slots = additive.shape
    if heads == 1:
        return additive if groups == 1 else torch.cat([additive] * groups, dim=2)
    return additive.reshape(batch, heads // groups, groups * beams, slots)


def _explicit_attention(query, key, value, mask, scaling, softcap, sinks):
    """Attention written out, for what SDPA does not offer: soft-capped scores and attention sinks."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale  # [B, Hkv, G·W, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
    sink = sinks.flatten(2).unsqueeze(-1).expand(scores.shape[0], -1, -1, 1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(value.dtype) @ value
