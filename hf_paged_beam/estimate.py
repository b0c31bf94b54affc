"""Expectations from sequences that stochastic beam search drew (Kool et al. 2019, arXiv:1903.06059)."""

from __future__ import annotations

from typing import Any

import torch

from .generation import importance_weights as _weights


def importance_weights(output: Any) -> torch.Tensor:
    """How much each drawn sequence counts: ``p / q``, q the probability that it is drawn above the threshold.

    Args:
        output: of ``generate(..., do_sample=True, sampling="stochastic_beam", return_dict_in_generate=True)``.

    Returns:
        ``[N]`` float32; 0 where there is no sequence.

    Raises:
        ValueError: if the output is of another search.
    """
    return _weights_of(output).float()


def _weights_of(output: Any) -> torch.Tensor:
    if getattr(output, "threshold", None) is None:
        raise ValueError(
            "output must come from generate(..., do_sample=True, sampling='stochastic_beam', "
            f"return_dict_in_generate=True), but this {type(output).__name__} has no threshold"
        )
    return _weights(output.sequences_log_probs, output.threshold)


def estimate(values: torch.Tensor, output: Any, normalize: bool = False) -> torch.Tensor:
    """The model's expectation of a function of whole sequences, for each prompt.

    ``sum of w · f`` is unbiased (Kool et al. 2019, equation 12). Divided by ``sum of w`` it is biased, but varies less
    where few sequences are drawn (equation 14).

    Args:
        values: ``[N]`` numbers, the function of each returned sequence.
        output: as in `importance_weights`.
        normalize: whether to divide by the sum of weights.

    Returns:
        ``[B]`` float64.

    Raises:
        ValueError: if the output is of another search, or `values` has another length.
    """
    weights = _weights_of(output)
    if not isinstance(values, torch.Tensor) or values.shape != weights.shape:
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"values must be a tensor of one number for each of {len(weights)} sequences, but got {given}")
    prompts = int(output.prompt_index.max()) + 1
    weighted = torch.where(weights > 0, weights * values.to(weights), 0.0)

    def per_prompt(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.new_zeros(prompts).index_add_(0, output.prompt_index, numbers)

    return per_prompt(weighted) / per_prompt(weights) if normalize else per_prompt(weighted)
