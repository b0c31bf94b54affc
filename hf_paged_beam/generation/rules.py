"""What each prompt is searched by, in tensors: one row per prompt, so that prompts of one batch may differ.

Where all prompts are alike, nothing has to be told apart: a mask is then None and a limit a number, and the operations
that would apply them are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .lengths import length_form, most_attainable
from .settings import Options, PromptSettings
from .state import SearchState


class Rules:
    """Widths, lengths and stopping of every prompt.

    Args:
        prompts: settings of each prompt.
        options: this package's own settings.
        num_ends: number of end tokens.
        device: of the search.
        groups: `G`, groups of beams that a prompt has, of which one is searched here.

    Attributes:
        width: `W`, beams of the widest prompt.
        num_candidates: `K`, candidates of the widest prompt: enough that `W` remain even if every beam offers all end
            tokens.
        kept: `F`, finished sequences that are remembered of each prompt.
        form: ``[B, T + 1]`` float32; column n divides the score of a sequence of n generated tokens.
        bound: ``[B, T + 1]`` float32; column n divides the best running score when all running sequences have n
            tokens and the search asks whether one of them can still beat a finished one; see `lengths`.
        reward: ``[B, T + 1]`` float32, added to the score of a sequence of n tokens; None without a reward.
        spare_beams: ``[B, W]`` bool, beams that a prompt has not; None where all have `W`.
        spare_candidates: ``[B, K]`` bool, likewise.
    """

    def __init__(
        self,
        prompts: Sequence[PromptSettings],
        options: Options,
        *,
        num_ends: int,
        device: torch.device,
        groups: int = 1,
    ):
        widths = [prompt.num_beams // groups for prompt in prompts]
        offered = max(2, 1 + num_ends)
        quotas = [
            width if options.patience is None else math.ceil(round(options.patience * width, 6)) for width in widths
        ]
        kept = [max(width, quota) + options.draws_sequences for width, quota in zip(widths, quotas, strict=True)]
        self.widths = widths
        self.width, self.num_candidates, self.kept = max(widths), offered * max(widths), max(kept)
        self.spare_beams = _beyond(widths, device)
        self.spare_candidates = _beyond([offered * width for width in widths], device)
        self._spare_finished = _beyond(kept, device)
        self._quota: Any = _alike(quotas, lambda: torch.tensor(quotas, device=device).unsqueeze(1))
        stops = [prompt.early_stopping is True and not options.draws_sequences for prompt in prompts]
        self._stops_when_full: Any = _alike(stops, lambda: torch.tensor(stops, device=device))
        longest = [prompt.max_new_tokens for prompt in prompts]
        self._longest = None if len(set(longest)) == 1 else torch.tensor(longest, device=device).unsqueeze(1)
        self._set_lengths(prompts, options, device)

    def _set_lengths(self, prompts: Sequence[PromptSettings], options: Options, device: torch.device) -> None:
        columns = max(prompt.max_new_tokens for prompt in prompts) + 1
        different = {_length_settings(prompt): prompt for prompt in prompts}
        lengths = torch.arange(columns).clamp_(min=1)  # on the CPU: not every device has float64
        made = {}
        for key, prompt in different.items():
            form = length_form(lengths, prompt.length_penalty, options.length_form)
            bound = form
            if prompt.early_stopping == "never" and prompt.length_penalty > 0:
                bound = form[prompt.max_new_tokens].expand(columns)
            made[key] = (form.to(torch.float32), bound.to(torch.float32))
        rows = [made[_length_settings(prompt)] for prompt in prompts]
        if len(different) == 1:
            self.form, self.bound = (table.to(device).expand(len(prompts), -1) for table in rows[0])
        else:
            self.form, self.bound = (torch.stack(tables).to(device) for tables in zip(*rows, strict=True))
        self.reward = None
        if options.length_reward:
            self.reward = (lengths * options.length_reward).to(torch.float32).to(device).expand(len(prompts), -1)
            to_the_end = [prompt.early_stopping == "never" for prompt in prompts]
            ends = [prompt.max_new_tokens if never else 0 for prompt, never in zip(prompts, to_the_end, strict=True)]
            self._looks_ahead_to = torch.tensor(ends, device=device).unsqueeze(1)

    def normalised(self, scores: torch.Tensor, length: int) -> torch.Tensor:
        """Scores ``[B, N]`` of sequences of `length` generated tokens, as finished sequences are ranked."""
        scores = scores / self.form.narrow(1, length, 1)
        return scores if self.reward is None else scores + self.reward.narrow(1, length, 1)

    def attainable(self, best: torch.Tensor, length: int) -> torch.Tensor:
        """``[B]``: the most that a running sequence of `length` tokens is believed to reach, from its sum ``[B]``."""
        if self.reward is None:
            return best / self.bound.select(1, length)
        return most_attainable(best, length, self.form, self.reward, self._looks_ahead_to)

    def closing_score(self, finished_scores: torch.Tensor) -> torch.Tensor:
        """``[B]``: the finished score that running beams must beat; -inf until enough have finished."""
        if isinstance(self._quota, int):
            return finished_scores.select(1, self._quota - 1)
        return finished_scores.gather(1, self._quota - 1).squeeze(1)

    def takes(self, state: SearchState) -> torch.Tensor:
        """``[B]`` bool: whether a prompt still takes finished sequences, and so goes on.

        With ``early_stopping=True`` it does not once its quota has finished. Where all candidates ended, none runs on,
        and `open` is False already.
        """
        if self._stops_when_full is False:
            return state.open
        wanted = self.closing_score(state.finished_scores) == -torch.inf
        return state.open & (wanted if self._stops_when_full is True else wanted | ~self._stops_when_full)

    def too_long(self, length: int) -> torch.Tensor | None:
        """``[B, 1]`` bool: prompts whose sequences of `length` generated tokens end; None where all have one limit,
        which transformers' criteria know."""
        return None if self._longest is None else self._longest <= length

    def only_kept(self, finished_scores: torch.Tensor) -> torch.Tensor:
        """Finished scores ``[B, F]`` without what narrower prompts do not keep."""
        return _without(finished_scores, self._spare_finished)

    def only_beams(self, running_scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[B, W]`` without beams that narrower prompts have not."""
        return _without(running_scores, self.spare_beams)


def _length_settings(prompt: PromptSettings) -> tuple:
    return prompt.length_penalty, prompt.early_stopping == "never", prompt.max_new_tokens


def _without(scores: torch.Tensor, spare: torch.Tensor | None) -> torch.Tensor:
    return scores if spare is None else scores.masked_fill(spare, -torch.inf)


def _beyond(counts: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """``[B, largest]`` bool, places that are not among the first `counts` of each row; None where all are equal."""
    if len(set(counts)) == 1:
        return None
    return torch.arange(max(counts), device=device) >= torch.tensor(counts, device=device).unsqueeze(1)


def _alike(values: Sequence, as_tensor: Callable[[], torch.Tensor]) -> Any:
    """The value that all share, or a tensor of them."""
    return values[0] if len(set(values)) == 1 else as_tensor()
