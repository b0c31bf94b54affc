"""Logits processors whose limit differs between the prompts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from .settings import SearchSettings

_FIRST = tuple(
    getattr(logits_process, name)
    for name in ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SequenceBiasLogitsProcessor")
    if hasattr(logits_process, name)
)
"""Processors that transformers applies before all others."""

RowsOf = Callable[[torch.Tensor, int], torch.Tensor]
"""From ``[B]`` and a number of rows to that many: the value of each row's prompt."""


def put_early(processors: Sequence[LogitsProcessor], added: Sequence[LogitsProcessor]) -> LogitsProcessorList:
    """The processors, with others right after those that transformers applies first."""
    place = 0
    while place < len(processors) and type(processors[place]) in _FIRST:
        place += 1
    return LogitsProcessorList([*processors[:place], *added, *processors[place:]])


def with_own_limits(
    processors: LogitsProcessorList, settings: SearchSettings, prompt_length: int, rows_of: RowsOf
) -> LogitsProcessorList:
    """The processors with those whose limit differs between prompts in place of transformers' own.

    Args:
        processors: as transformers prepared them, by the largest `max_new_tokens` and the smallest `min_new_tokens`.
        settings: of the call.
        prompt_length: columns of the prompt.
        rows_of: values of prompts for rows of scores.
    """
    ends = settings.eos_token_ids
    shortest = [prompt.min_new_tokens for prompt in settings.prompts]
    longest = [prompt.max_new_tokens for prompt in settings.prompts]
    added: list[LogitsProcessor] = []
    if ends is not None and any(shortest):
        added.append(_NoEndBefore(prompt_length, shortest, ends, rows_of))
    if len(set(longest)) > 1:
        processors = LogitsProcessorList(
            _EndAt(prompt_length, longest, given.eos_token_id, rows_of)
            if isinstance(given, logits_process.ForcedEOSTokenLogitsProcessor)
            else given
            for given in processors
        )
    return put_early(processors, added) if added else processors


class _NoEndBefore(LogitsProcessor):
    """No end token while a sequence has fewer tokens than its prompt's `min_new_tokens`."""

    row_by_row = True

    def __init__(self, prompt_length: int, least: Sequence[int], ends: torch.Tensor, rows_of: RowsOf):
        self.prompt_length, self.ends, self.rows_of = prompt_length, ends, rows_of
        self.largest = max(least)
        self.least = torch.tensor(least, device=ends.device)  # [B]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1] - self.prompt_length
        if length >= self.largest:
            return scores
        short = self.rows_of(self.least, len(scores)) > length  # [rows]
        is_end = torch.isin(torch.arange(scores.shape[1], device=scores.device), self.ends)  # [V]
        return scores.masked_fill(short.unsqueeze(1) & is_end, -torch.inf)


class _EndAt(LogitsProcessor):
    """The forced end tokens as the last token that a prompt's sequences may get."""

    row_by_row = True

    def __init__(self, prompt_length: int, longest: Sequence[int], ends: torch.Tensor, rows_of: RowsOf):
        self.prompt_length, self.ends, self.rows_of = prompt_length, ends, rows_of
        self.lengths = set(longest)
        self.longest = torch.tensor(longest, device=ends.device)  # [B]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1] - self.prompt_length
        if length + 1 not in self.lengths:
            return scores
        last = self.rows_of(self.longest, len(scores)) == length + 1  # [rows]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ends] = 0.0
        return torch.where(last.unsqueeze(1), forced, scores)
