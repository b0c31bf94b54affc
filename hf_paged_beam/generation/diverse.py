"""Diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424), as transformers had it up to 4.56.

The beams of a prompt are groups, each a beam search of its own. In every step they choose one after another, and a
token's log-probability falls by `diversity_penalty` for each beam of an earlier group that takes it in this step. What
it lost stays lost: it counts in the sums.

Where that search and transformers' present one differ in when a group is done, the former is followed:

- A group compares its worst kept sequence with its best candidate, whether that ends or not.
- In the last step, sequences that end come before those that are cut: if they fill a group whose `early_stopping` is
  True, nothing that is cut is taken.
- The beams of a group that is done count as if they all took the padding token.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from .advance import finish, run_on
from .rules import Rules
from .state import Candidates, Chosen, SearchState

_NO_BEAM = -1e8
"""Below this, a ranked score is no real beam's: what ended has 1e9 taken off, what no rule allows is -inf."""


class TakenTokens:
    """The tokens that earlier groups have taken in the present step.

    Args:
        batch_size: `B`.
        end_token_ids: ``[n_eos]`` int64 or None.
        pad_token_id: 0-dim int64 or None.
    """

    def __init__(self, batch_size: int, end_token_ids: torch.Tensor | None, pad_token_id: torch.Tensor | None):
        self.batch_size, self.end_token_ids, self.pad_token_id = batch_size, end_token_ids, pad_token_id
        self._tokens: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def forget(self) -> None:
        """Begin a step."""
        self._tokens, self._weights = [], []

    def note(self, before: SearchState, candidates: Candidates, rules: Rules) -> None:
        """Count the tokens of a group's beams: the best that do not end, also where the search goes no further."""
        ranked, ranks = candidates.scores.sub(self._ends(candidates.tokens), alpha=1e9).topk(rules.width, dim=1)
        tokens, weights = candidates.tokens.gather(1, ranks), rules.only_beams(ranked) > _NO_BEAM
        if self.pad_token_id is not None:
            done = ~rules.takes(before).unsqueeze(1)
            tokens = torch.where(done, self.pad_token_id, tokens)
            every = torch.ones_like(weights) if rules.spare_beams is None else ~rules.spare_beams
            weights = torch.where(done, every, weights)
        self._tokens.append(tokens)
        self._weights.append(weights.float())

    def _ends(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.end_token_ids is None:
            return torch.zeros_like(tokens, dtype=torch.float32)
        return torch.isin(tokens, self.end_token_ids).float()

    def counts(self, vocabulary: int) -> torch.Tensor | None:
        """``[B, V]`` float32: how many beams of each prompt took each token; None for the first group."""
        if not self._tokens:
            return None
        tokens, weights = torch.cat(self._tokens, dim=1), torch.cat(self._weights, dim=1)
        return weights.new_zeros(self.batch_size, vocabulary).scatter_add_(1, tokens, weights)


class TokensTakenPenalty(LogitsProcessor):
    """Takes the penalty off the log-probabilities of tokens that earlier groups took.

    Args:
        taken: what they took.
        penalty: for each beam.
        rows_of: from ``[B, V]`` and a number of rows to that many.
    """

    row_by_row = True

    def __init__(self, taken: TakenTokens, penalty: float, rows_of):
        self.taken, self.penalty, self.rows_of = taken, penalty, rows_of

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = self.taken.counts(scores.shape[-1])
        if counts is None or not self.penalty:
            return scores
        return scores - self.penalty * self.rows_of(counts, len(scores))


def advance_group(
    state: SearchState,
    candidates: Candidates,
    hits: torch.Tensor | None,
    *,
    length: int,
    rules: Rules,
    end_token_ids: torch.Tensor | None,
) -> tuple[SearchState, Chosen]:
    """`advance` by the rules of the module's header; arguments and results are the same.

    Args:
        end_token_ids: ``[n_eos]`` int64 or None, to tell what ends from what is cut.
    """
    was_open = state.open
    ends = _ended(candidates, hits, end_token_ids)
    state = after_the_ended(state, candidates, ends, length=length, rules=rules)
    if hits is not None:
        state = finish(state, candidates, hits if ends is None else hits & ~ends, length, rules)
    running_scores, chosen = run_on(candidates, hits, rules)
    runs = running_scores.select(1, 0) > -torch.inf
    return state._replace(running_scores=running_scores, open=was_open & state.open & runs), chosen


def after_the_ended(
    state: SearchState, candidates: Candidates, ends: torch.Tensor | None, *, length: int, rules: Rules
) -> SearchState:
    """The state in which sequences that are cut find a group: with those that ended, and asked whether it is done.

    Args:
        ends: ``[B, K]`` bool, candidates whose token is an end; None where none can be.
    """
    was_open = state.open
    if ends is not None:
        state = finish(state, candidates, ends, length, rules)
    attainable = rules.attainable(candidates.scores.select(1, 0), length)
    return state._replace(open=was_open & (attainable > rules.closing_score(state.finished_scores)))


def taken_in_turn(
    state: SearchState,
    candidates: Candidates,
    hits: torch.Tensor,
    *,
    length: int,
    rules: Rules,
    end_token_ids: torch.Tensor | None,
) -> torch.Tensor:
    """``[B, K]`` bool: of the candidates that end here, those that find room, the ended before the cut.

    Args:
        state: before the step.
    """
    ends = _ended(candidates, hits, end_token_ids)
    after = after_the_ended(state, candidates, ends, length=length, rules=rules)
    cut = (hits if ends is None else hits & ~ends) & rules.takes(after).unsqueeze(1)
    return cut if ends is None else cut | ends


def _ended(
    candidates: Candidates, hits: torch.Tensor | None, end_token_ids: torch.Tensor | None
) -> torch.Tensor | None:
    if hits is None or end_token_ids is None:
        return None
    return hits & torch.isin(candidates.tokens, end_token_ids)
