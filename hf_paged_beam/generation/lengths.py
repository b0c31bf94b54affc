"""Length forms: what a finished sequence's summed log-probability is divided by, and what may still be reached.

    "length"  n ** length_penalty                 transformers' own
    "gnmt"    ((5 + n) / 6) ** length_penalty     Wu et al. 2016 (arXiv:1609.08144), equation 14
    "none"    1

`n` counts generated tokens, the end token included, the prompt not. Scores are negative, so a larger exponent
favours longer sequences in spite of transformers' name for it.

What a running sequence of n tokens may still reach decides when a prompt is done. For each `early_stopping`:

- False and True: its score as if it ended now. A heuristic (transformers' own): with a positive exponent a running
  sequence can still improve by growing longer.
- "never": its sum divided by the form at the length, from the current to the longest, where that is largest. This is a
  true upper bound while processed log-probabilities are at most 0: a running sum s can then only fall, so a
  continuation that ends at length m scores at most s / form(m), and since s <= 0 that is at most s / max form. Both
  forms are monotone in the length, so the maximum stands at the longest for a positive exponent, else at the current
  length. A processor that adds positive scores breaks the condition, and with it the bound.

A reward of r per token breaks it too: a sequence of m tokens scores s / form(m) + r · m. The bound of "never" is then
the largest of these over the lengths to come, which for the form "none" is that of Huang et al. 2017 (EMNLP, "When to
finish? Optimal beam search for neural text generation").
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


def most_attainable(
    best: torch.Tensor, length: int, form: torch.Tensor, reward: torch.Tensor, longest: torch.Tensor
) -> torch.Tensor:
    """The most that running sequences can reach with a reward per token: see the module's header.

    Args:
        best: ``[B]`` float32, the best running sum of each prompt.
        length: tokens that they have.
        form, reward: ``[B, T + 1]`` float32, at every length.
        longest: ``[B, 1]`` int64, length up to which to look ahead; below `length` to look no further than now.

    Returns:
        ``[B]`` float32.
    """
    lengths = torch.arange(form.shape[1], device=best.device)
    reached = best.unsqueeze(1) / form + reward  # [B, T + 1]
    now = lengths == length
    ahead = (lengths > length) & (lengths <= longest)
    return reached.masked_fill(~(now | ahead), -torch.inf).amax(1)
