"""Beams that are chosen together: all beams of every prompt, or with diverse beam search one group of them.

A group is a beam search without a model. `step` takes the logits of its beams and says which continue as what; what it
keeps from step to step are its `state`, and companions that follow the beams: where they stand in a trie, what they
attended to, what they drew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from ..cache import BeamRows
from .advance import advance
from .candidates import best_candidates, sampled_candidates
from .constrain import AllowedItems, Forest, ItemConstraint, forced_tokens, with_constraint
from .coverage import Coverage
from .diverse import TakenTokens, TokensTakenPenalty, advance_group, taken_in_turn
from .history import History
from .per_prompt import put_early, with_own_limits
from .rules import Rules
from .scores import LogSoftmax, ProcessedScores
from .settings import SearchSettings
from .state import Candidates, Chosen, SearchState
from .stochastic import Draws
from .stopping import CandidateStopping


class BeamGroup:
    """One group of beams of every prompt.

    Args:
        call: what transformers prepared (`SearchCall`).
        taken: the tokens that earlier groups take in a step; None where there is one group.

    Attributes:
        rules: of each prompt.
        state: after the last step.
        history: of all steps.
        candidates: of the last step.
        beams: the rows of a step; None before the first, when the model has run one row per prompt.
        all_beams: the rows of all prompts' beams, as long as none has left.
        ids: ``[B, N, length]`` int64, whole sequences of the running beams; None unless something reads them.
    """

    def __init__(self, call: Any, taken: TakenTokens | None = None):
        settings: SearchSettings = call.settings
        self.settings, self.taken = settings, taken
        self.batch_size, self.prompt_length = call.input_ids.shape[:2]
        device = call.input_ids.device
        self.rules = Rules(
            settings.prompts, settings.options, num_ends=settings.num_ends, device=device,
            groups=settings.options.num_beam_groups,
        )  # fmt: skip
        self.state = SearchState.initial(self.batch_size, self.rules.kept, device)
        self.history = History(settings.options.return_beam_trace)
        self.beams: BeamRows | None = None
        self.all_beams = BeamRows(self.rules.widths, self.rules.width, device)
        self.constraint = _constraint(call)
        self.process = ProcessedScores(self._processors(call.processors))
        self.log_softmax = LogSoftmax(reuse=not (self.process.needs_rows or settings.output_scores))
        self.stopping = CandidateStopping(call.criteria)
        self.coverage = _coverage(call)
        self.draws: Draws | None = None
        if settings.options.draws_sequences:
            self.draws = Draws(self.batch_size, device)
            self.state = self.draws.begin(self.state)
        needs_ids = self.process.needs_rows or self.stopping.needs_rows
        self.ids = call.input_ids.unsqueeze(1) if needs_ids else None

    @property
    def reads_few_columns(self) -> bool:
        """Whether the logits of `step_tokens` are all that is read."""
        options = self.settings.options
        return self._looks_up_children and options.trie_renormalize and not self.settings.output_logits

    def step_tokens(self) -> torch.Tensor | None:
        """``[C]`` int64: the tokens whose logits the next step can read; None for all."""
        return None if self.constraint is None else self.constraint.step_tokens()

    @property
    def reads_all_rows(self) -> bool:
        """Whether a processor or a criterion counts on the rows of all prompts in every step."""
        return self.process.wants_beam_rows or self.stopping.needs_rows

    @property
    def calls_user_code(self) -> bool:
        """Whether a step calls processors or criteria that may count how often they are called."""
        return self.process.needs_rows or self.stopping.needs_rows

    def keep_ids(self, input_ids: torch.Tensor) -> None:
        """Keep whole sequences, for the model's own preparation of inputs; before the first step."""
        self.ids = input_ids.unsqueeze(1)

    def step(
        self,
        logits: torch.Tensor,
        attention: torch.Tensor | None,
        keep_scores: Callable[[torch.Tensor], tuple | None],
        column_of: torch.Tensor | None = None,
    ) -> Chosen:
        """Choose what the beams continue as.

        Args:
            logits: ``[R, V]``, of the rows that `beams` tells; ``[R, C]`` with `column_of`.
            attention: ``[R, L]`` float32 over the source, where a coverage penalty reads it.
            keep_scores: is given processed log-probabilities ``[R, V]``, and answers with those of all steps so far.
            column_of: ``[V]`` int64, the column of each token that `step_tokens` names; None where each has its own.
        """
        candidates, scores = self._candidates(logits, keep_scores, column_of)
        if self.coverage is not None and attention is not None:
            self.coverage.attend(attention.unsqueeze(1) if self.beams is None else self.beams.grid(attention))
            candidates = self.coverage.with_bonus(candidates)
        hits = self._hits(candidates, scores)
        before = self.state
        self.state, chosen = self._advance(candidates, hits)
        self._follow(before, candidates, hits, chosen)
        self.candidates = candidates
        if self.settings.options.return_beam_trace:
            runs_on = (self.state.running_scores > -torch.inf) & self.rules.takes(before).unsqueeze(1)
            sums = candidates.scores if self.draws is None else self.draws.sums
            taken = self._taken(before, candidates, hits)
            self.history.record_traced(candidates, chosen, sums=sums, finished=taken, runs_on=runs_on)
        else:
            self.history.record(candidates, chosen)
        return chosen

    def _taken(self, before: SearchState, candidates: Candidates, hits: torch.Tensor | None) -> torch.Tensor:
        """``[B, K]`` bool: candidates that ended and were taken as finished sequences."""
        if hits is None:
            return torch.zeros_like(candidates.tokens, dtype=torch.bool)
        first = torch.arange(hits.shape[1], device=hits.device) < self.rules.width
        if self.rules.spare_beams is not None:
            first = first & torch.nn.functional.pad(
                ~self.rules.spare_beams, (0, hits.shape[1] - self.rules.width), value=False
            )
        if self.taken is not None:
            hits = taken_in_turn(
                before, candidates, hits, length=len(self.history) + 1, rules=self.rules,
                end_token_ids=self.settings.eos_token_ids,
            )  # fmt: skip
        return hits & first & self.rules.takes(before).unsqueeze(1) & (candidates.scores > -torch.inf)

    def _candidates(
        self,
        logits: torch.Tensor,
        keep_scores: Callable[[torch.Tensor], tuple | None],
        column_of: torch.Tensor | None,
    ) -> tuple[Candidates, tuple | None]:
        """The candidates, and the kept scores of all steps so far."""
        running_scores, rules, beams = self.state.running_scores, self.rules, self.beams
        if self.constraint is not None and self._looks_up_children:
            raw = logits.float() if self.settings.options.trie_renormalize else self.log_softmax(logits)
            return self.constraint.candidates(raw, running_scores, rules, beams, column_of), None
        log_probs = self._processed(logits)
        kept = keep_scores(log_probs)
        if beams is None and len(log_probs) != self.batch_size:
            log_probs = self.all_beams.first_of_each(log_probs)  # equal beams: the first of each prompt runs
        if self.draws is not None:
            candidates = self.draws.candidates(log_probs, running_scores, rules, beams)
        else:
            choose = sampled_candidates if self.settings.do_sample else best_candidates
            candidates = choose(log_probs, running_scores, rules, beams)
        return (candidates if self.constraint is None else self.constraint.placed(candidates)), kept

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed log-probabilities ``[R, V]``, in the first step of one row per prompt, or per beam if one asks."""
        log_probs = self.log_softmax(logits)
        if self.ids is None or not self.process.needs_rows:
            return log_probs
        if self.beams is not None:
            return self.process(log_probs, self.beams.rows(self.ids))
        rows = self.ids.flatten(0, 1)
        if not self.process.wants_beam_rows:
            return self.process(log_probs, rows)
        return self.process(self.all_beams.repeat(log_probs), self.all_beams.repeat(rows))

    def _hits(self, candidates: Candidates, scores: tuple | None) -> torch.Tensor | None:
        length = len(self.history) + 1
        candidate_rows = None
        if self.stopping.needs_rows and self.ids is not None:
            candidate_rows = _continued(self.ids, candidates.parents, candidates.tokens).flatten(0, 1)
        hits = self.stopping.hits(candidates, self.prompt_length + length, candidate_rows, scores)
        others = [self.rules.too_long(length), None if self.constraint is None else self.constraint.hits(candidates)]
        for ends in others:
            if ends is not None:
                hits = ends.expand_as(candidates.tokens) if hits is None else hits | ends
        return hits

    def _advance(self, candidates: Candidates, hits: torch.Tensor | None) -> tuple[SearchState, Chosen]:
        length = len(self.history) + 1
        if self.taken is None:
            return advance(self.state, candidates, hits, length=length, rules=self.rules)
        return advance_group(
            self.state, candidates, hits, length=length, rules=self.rules, end_token_ids=self.settings.eos_token_ids
        )

    def _follow(self, before: SearchState, candidates: Candidates, hits: torch.Tensor | None, chosen: Chosen) -> None:
        """Let everything that is kept of running beams follow those that were chosen."""
        if self.taken is not None:
            self.taken.note(before, candidates, self.rules)
        if self.draws is not None:
            self.draws.follow(before, self.state, candidates, hits, chosen, self.rules)
        if self.constraint is not None:
            self.constraint.follow(candidates, chosen)
        if self.coverage is not None:
            self.coverage.follow(chosen)
        if self.ids is not None:
            self.ids = _continued(self.ids, chosen.parents, chosen.tokens)

    def _processors(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """The processors, with what this group adds to them."""
        settings, options = self.settings, self.settings.options
        processors = with_own_limits(processors, settings, self.prompt_length, self._rows_of_prompts)
        processors = LogitsProcessorList(_for_beams(given, self.all_beams) for given in processors)
        if self.taken is not None and options.diversity_penalty:
            penalty = TokensTakenPenalty(self.taken, options.diversity_penalty, self._rows_of_prompts)
            processors = put_early(processors, [penalty])
        whole_rows = processors or settings.do_sample or settings.output_scores
        self._looks_up_children = self.constraint is not None and not whole_rows
        if self.constraint is None or self._looks_up_children:
            return processors
        return with_constraint(processors, AllowedItems(self.constraint, self._rows_of_beams))

    def _rows_of_prompts(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        """``[B, ...]`` for each of `rows` rows that a processor was given."""
        if self.beams is not None:
            return self.beams.repeat(values)
        return values if rows == self.batch_size else self.all_beams.repeat(values)

    def _rows_of_beams(self, grid: torch.Tensor, rows: int) -> torch.Tensor:
        """``[B, N, ...]`` for each of `rows` rows that a processor was given."""
        return self._rows_of_prompts(grid.squeeze(1), rows) if self.beams is None else self.beams.rows(grid)


def _constraint(call: Any) -> ItemConstraint | None:
    tries = call.settings.options.tries
    if tries is None:
        return None
    forest = Forest(tries, call.input_ids.shape[0], call.input_ids.device)
    begins = forced_tokens(call.processors, call.input_ids.shape[1])
    return ItemConstraint(forest, begins=begins, renormalize=call.settings.options.trie_renormalize)


def _coverage(call: Any) -> Coverage | None:
    penalty = call.settings.options.coverage_penalty
    return Coverage(penalty, call.model_kwargs.get("attention_mask")) if penalty else None


_COUNT_BEAMS = (
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
)


def _for_beams(processor: LogitsProcessor, beams: BeamRows) -> LogitsProcessor:
    """A processor that counts on as many beams of each prompt, for those that there are.

    The prefix constraint is told their number; what forbids or favours the encoder's tokens works it out from the rows.
    """
    if not hasattr(processor, "_num_beams") and not isinstance(processor, _COUNT_BEAMS):
        return processor
    if getattr(processor, "_num_beams", beams.width) != beams.width:
        processor = copy.copy(processor)
        processor._num_beams = beams.width
    return processor if beams.even else _OnGrid(processor, beams)


class _OnGrid(LogitsProcessor):
    """A processor that is shown a grid of beams, as wide for every prompt."""

    def __init__(self, processor: LogitsProcessor, beams: BeamRows):
        self.processor, self.beams = processor, beams

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids, grid = (self.beams.grid(given).flatten(0, 1) for given in (input_ids, scores))
        processed = self.processor(ids, grid)
        return self.beams.rows(processed.view(self.beams.batch_size, self.beams.width, -1))


def _continued(ids: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sequences, continued: ``[B, N, length]``, ``[B, M]``, ``[B, M]`` to ``[B, M, length + 1]``."""
    inherited = ids.gather(1, parents.unsqueeze(-1).expand(-1, -1, ids.shape[-1]))
    return torch.cat([inherited, tokens.unsqueeze(-1)], dim=-1)


class GroupRows:
    """Where the rows of several groups stand among the model's: prompt by prompt, there group by group.

    Args:
        widths: beams of each prompt, in all its groups; 0 for one that has left.
        groups: `G`.
        width: `W`, cells of each prompt in a grid.
        device: of the search.

    Attributes:
        beams: the rows of all groups together.
        of_group: the rows of each group alone.
    """

    def __init__(self, widths: Sequence[int], groups: int, width: int, device: torch.device):
        self.beams = BeamRows(widths, width, device)
        if groups == 1:
            self.of_group = [self.beams]
            return
        parts = [given // groups for given in widths]
        self.of_group = [BeamRows(parts, width // groups, device) for _ in range(groups)]
        one = self.of_group[0]
        place = torch.arange(one.count, device=device) - one.first.squeeze(1)[one.prompt]
        first = self.beams.first.squeeze(1)[one.prompt] + place
        size = torch.tensor(parts, device=device)[one.prompt]
        self._rows = [first + number * size for number in range(groups)]  # [R / G] of each group
        self._order = torch.cat(self._rows)

    def of(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """The rows of one group among all, ``[R, ...]`` to ``[R / G, ...]``."""
        return rows if len(self.of_group) == 1 else rows.index_select(0, self._rows[number])

    def together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of all groups, of one each ``[R / G, ...]`` to ``[R, ...]``."""
        if len(parts) == 1:
            return parts[0]
        joined = torch.cat(list(parts))
        return torch.empty_like(joined).index_copy_(0, self._order, joined)

    def parent_rows(self, parents: Sequence[torch.Tensor]) -> torch.Tensor:
        """``[R]`` int64: the row that each row continues, from each group's ``[B, W / G]`` beams."""
        found = [beams.parent_rows(given) for beams, given in zip(self.of_group, parents, strict=True)]
        if len(found) == 1:
            return found[0]
        return self.together([rows[given] for rows, given in zip(self._rows, found, strict=True)])
