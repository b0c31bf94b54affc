"""What `prepack` and `compile` keep of a model, and how to be rid of it."""

from __future__ import annotations

from ..versions import GenerativeModel
from .capture import drop_captures
from .linears import drop_packed, packed_bytes

__all__ = ["packed_bytes", "release"]


def release(model: GenerativeModel) -> GenerativeModel:
    """Free what ``prepack=True`` and ``compile=True`` keep of a model: packed weights, compiled and recorded steps.

    They are kept as long as the model lives; a later call with these keywords makes them anew. Not while a search runs
    on the model.

    Returns:
        The model itself.
    """
    drop_captures(model)
    drop_packed(model)
    return model
