"""Length forms: what a finished sequence's summed log-probability is divided by.

    "length"  n ** length_penalty                 transformers' own
    "gnmt"    ((5 + n) / 6) ** length_penalty     Wu et al. 2016 (arXiv:1609.08144), equation 14
    "none"    1

`n` counts generated tokens, the end token included, the prompt not. Scores are negative, so a larger exponent
favours longer sequences in spite of transformers' name for it.
"""

from __future__ import annotations

import torch

LENGTH_NORMALIZATIONS = ("length", "gnmt", "none")


def length_form(lengths: torch.Tensor, length_penalty: float, normalization: str) -> torch.Tensor:
    """Divisor for each length.

    Args:
        lengths: int64, number of generated tokens, at least 1.
        length_penalty: the exponent.
        normalization: one of `LENGTH_NORMALIZATIONS`.

    Returns:
        float64, of the shape of `lengths`.
    """
    if normalization == "none":
        return torch.ones_like(lengths, dtype=torch.float64)
    base = lengths.to(torch.float64)
    return ((5 + base) / 6 if normalization == "gnmt" else base) ** length_penalty


class LengthTables:
    """The form at every length, made once per search, one row per prompt so that prompts may differ.

    Attributes:
        form: ``[B, T + 1]`` float32; column n divides the score of a sequence of n generated tokens.
        bound: ``[B, T + 1]`` float32; column n divides the best running score when all running sequences have n
            tokens and the search asks whether one of them can still beat a finished one.

    The bound, for each `early_stopping`:

    - False and True: the form at the current length. A heuristic (transformers' own): with a positive exponent a
      running sequence can still improve by growing longer.
    - "never": the form at the length, from the current to the longest, where it is largest. This is a true upper
      bound while processed log-probabilities are at most 0: a running sum s can then only fall, so a continuation
      that ends at length m scores at most s / form(m), and since s <= 0 that is at most s / max form. Both forms
      are monotone in the length, so the maximum stands at `T` for a positive exponent, else at the current length.
      A processor that adds positive scores breaks the condition, and with it the bound.
    """

    def __init__(
        self,
        batch_size: int,
        max_new_tokens: int,
        *,
        length_penalty: float,
        normalization: str,
        early_stopping: bool | str,
        device: torch.device,
    ):
        lengths = torch.arange(max_new_tokens + 1).clamp_(min=1)  # on the CPU: not every device has float64
        form = length_form(lengths, length_penalty, normalization).to(torch.float32).to(device)
        bound = form[-1:].expand(max_new_tokens + 1) if early_stopping == "never" and length_penalty > 0 else form
        self.form = form.expand(batch_size, -1)
        self.bound = bound.expand(batch_size, -1)
