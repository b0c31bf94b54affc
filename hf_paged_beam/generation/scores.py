"""From a step's logits to processed log-probabilities."""

from __future__ import annotations

import torch
from transformers import LogitNormalization, LogitsProcessorList
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
        processors: as transformers prepared them.
        num_beams: `W`.
    """

    def __init__(self, processors: LogitsProcessorList, num_beams: int):
        self.processors = processors
        self.num_beams = num_beams
        self.renormalizes = any(isinstance(processor, LogitNormalization) for processor in processors)
        self.wants_beam_rows = any(type(processor) not in _ROW_BY_ROW for processor in processors)

    @property
    def needs_rows(self) -> bool:
        """Whether rows of token ids must be kept up to date for the processors."""
        return len(self.processors) > 0

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor | None, first: bool) -> torch.Tensor:
        """Processed log-probabilities.

        Args:
            logits: ``[rows, V]``, one row per prompt at the first step, then one per beam.
            rows: ``[rows, length]`` int64, the ids so far, where `needs_rows`.
            first: whether this is the first step.

        Returns:
            ``[rows, V]`` float32; at the first step one row per prompt, or one per beam if a processor wants that.
        """
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        if rows is None:
            return log_probs
        if first and self.wants_beam_rows:
            rows, log_probs = (given.repeat_interleave(self.num_beams, dim=0) for given in (rows, log_probs))
        not_a_number = log_probs[:, :1].isnan() if self.renormalizes else None  # [rows, 1]: NaN fills whole rows
        processed = self.processors(rows, log_probs)
        if not_a_number is None:
            return processed
        # Where every token is forbidden, renormalising divides by nothing: no continuation, not a broken model.
        forbidden = processed.isnan().all(dim=-1, keepdim=True) & ~not_a_number
        return processed.masked_fill(forbidden, -torch.inf)
