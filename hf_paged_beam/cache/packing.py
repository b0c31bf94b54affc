"""Keys and values in fewer bytes than the model computes with.

    stored as float16, bfloat16        cast
    stored as int8, float8_e4m3fn      [..., D + scale bytes] int8: D entries | the scale of this token's head

Packed numbers are moved, gathered and grown as any others; they are unpacked where a layer hands them to the model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KV_DTYPES = ("float16", "bfloat16", "int8", "float8_e4m3fn")
"""Names of the dtypes that keys and values can be stored in, beside the model's own."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Packing(NamedTuple):
    """How keys and values are stored.

    Attributes:
        stored: dtype of the entries.
        computed: dtype that the model works in.
    """

    stored: torch.dtype
    computed: torch.dtype

    @property
    def scales(self) -> torch.dtype:
        """What scales are kept in: the model's own dtype, unless that has no room for small ones."""
        return torch.float32 if self.computed == torch.float16 else self.computed

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` as the model made it to what is stored: ``[..., D]``, or ``[..., D + scale bytes]`` int8.

        The largest entry of a token's head becomes the largest number of the dtype. Of states that are not finite
        nothing finite comes back.
        """
        largest = _LARGEST.get(self.stored)
        if largest is None:
            return states.to(self.stored)
        states = states.to(self.scales)
        scale = states.abs().amax(-1, keepdim=True).div_(largest).clamp_min_(torch.finfo(self.scales).tiny)
        entries = states.div(scale).clamp_(-largest, largest)
        if not self.stored.is_floating_point:
            entries.round_()
        return torch.cat([entries.to(self.stored).view(torch.int8), scale.view(torch.int8)], dim=-1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """What `pack` stored, in the model's dtype: ``[..., D]``."""
        if self.stored not in _LARGEST:
            return packed.to(self.computed)
        size = packed.shape[-1] - self.scales.itemsize
        entries, scale = packed.narrow(-1, 0, size), packed.narrow(-1, size, self.scales.itemsize)
        return entries.view(self.stored).to(self.scales).mul_(scale.contiguous().view(self.scales)).to(self.computed)


def stored_dtype(kv_dtype: object) -> torch.dtype | None:
    """The dtype that `kv_dtype` names; None where it asks for the model's own.

    Args:
        kv_dtype: None, a name of `KV_DTYPES`, or that torch.dtype itself.

    Raises:
        ValueError: for anything else.
    """
    if kv_dtype is None:
        return None
    name = str(kv_dtype).removeprefix("torch.") if isinstance(kv_dtype, torch.dtype) else kv_dtype
    if not isinstance(name, str) or name not in KV_DTYPES:
        raise ValueError(f"kv_dtype must be None or one of {', '.join(map(repr, KV_DTYPES))}, but got {kv_dtype!r}")
    return getattr(torch, name)
