"""From a step's logits to processed log-probabilities."""

from __future__ import annotations

import torch
from transformers import LogitNormalization, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

_ROW_BY_ROW = tuple(
    getattr(logits_process, name)
    for name in (
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopPLogitsWarper",
        "TopKLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "LogitNormalization",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
"""Processors that treat each row by itself and remember nothing of it, so that one row per prompt is enough for the
first step. All others (the prefix constraint, guidance, the user's own) get one row per beam, as in transformers."""


class ProcessedScores:
    """Applies transformers' logits processors.

    Args:
        processors: as transformers prepared them, and ours.

    Attributes:
        wants_beam_rows: whether one of them counts on a row for every beam of every prompt.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors = processors
        self.renormalizes = any(isinstance(processor, LogitNormalization) for processor in processors)
        self.wants_beam_rows = not all(is_row_by_row(processor) for processor in processors)

    @property
    def needs_rows(self) -> bool:
        """Whether rows of token ids must be kept up to date for the processors."""
        return len(self.processors) > 0

    def __call__(self, log_probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Processed log-probabilities.

        Args:
            log_probs: ``[rows, V]`` float32.
            rows: ``[rows, length]`` int64, the ids so far.

        Returns:
            ``[rows, V]`` float32.
        """
        not_a_number = log_probs[:, :1].isnan() if self.renormalizes else None  # [rows, 1]: NaN fills whole rows
        processed = self.processors(rows, log_probs)
        if not_a_number is None:
            return processed
        # Where every token is forbidden, renormalising divides by nothing: no continuation, not a broken model.
        forbidden = processed.isnan().all(dim=-1, keepdim=True) & ~not_a_number
        return processed.masked_fill(forbidden, -torch.inf)


def is_row_by_row(processor: LogitsProcessor) -> bool:
    """Whether a processor treats each row by itself, and remembers nothing of it."""
    return type(processor) in _ROW_BY_ROW or getattr(type(processor), "row_by_row", False)
