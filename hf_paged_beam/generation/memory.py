"""What an exhausted memory is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of memory, on a GPU or (where the error is a plain `RuntimeError`) on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "not enough memory" in str(error)
    )


@contextlib.contextmanager
def explain_out_of_memory(search: Any) -> Iterator[None]:
    """Add to torch's error what was being searched, and what would make it smaller.

    Args:
        search: a `BeamSearch`; its cache is looked at when the error comes.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        held = search.cache.held_bytes() / 2**20
        raise type(error)(
            f"{error}\nThe search had {search.batch_size} prompts (B) of {search.cache.num_beams} beams each (W), "
            f"prompts of {search.prompt_length} tokens, and held {held:.1f} MiB of keys and values. A smaller batch, "
            f"fewer beams (num_beams), fewer tokens (max_new_tokens) or a smaller dtype need less memory."
        ) from error
