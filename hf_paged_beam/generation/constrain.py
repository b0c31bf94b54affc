"""Beams that stay on the items of a trie: each stands on a node, and its continuations are that node's children.

Without processors, only the children's log-probabilities are looked up and ranked, ``[B, R, F]`` for the `F` children
that a node of this depth has at most. Processors, sampling and `output_scores` want whole rows ``[B·R, V]``: there the
constraint is a processor itself, at the place of transformers' own prefix constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from ..cache import BeamRows
from .candidates import in_grid, pad_candidates, renormalized
from .head import shared_sets
from .rules import Rules
from .state import Candidates, Chosen
from .trie import Level, TokenTrie

_BEFORE_THE_CONSTRAINT = tuple(
    getattr(logits_process, name)
    for name in (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "HammingDiversityLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
"""Processors that transformers applies before its prefix constraint."""


LEFT = -1
"""Where a beam stands that left its trie, as a forced token can make it: on no node."""


class Forest:
    """The tries of a batch in one set of arrays.

    Args:
        tries: one for all prompts, or one for each.
        batch_size: `B`.
        device: of the search.

    Attributes:
        roots: ``[B, 1]`` int64, node that each prompt begins at.
        levels: of all tries together.
    """

    def __init__(self, tries: Sequence[TokenTrie], batch_size: int, device: torch.device):
        different = list({id(trie): trie for trie in tries}.values())
        self._tries, self._device = different, device
        self._step_tokens: list[torch.Tensor] = []  # found when they are first asked for
        sizes = [len(trie.first_child) for trie in different]  # one more than nodes: where the last node's children end
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        if len(different) == 1:
            trie = different[0].to(device)
            self._token, self._item, self._first_child = trie.token, trie.item, trie.first_child
        else:
            end = torch.full((1,), -1, dtype=torch.int32, device=device)
            self._token = torch.cat([part for trie in different for part in (trie.token.to(device), end)])
            self._item = torch.cat([part for trie in different for part in (trie.item.to(device), end)])
            self._first_child = torch.cat(
                [trie.first_child.to(device) + offset for trie, offset in zip(different, offsets, strict=True)]
            )
        self.levels = [_together(different, depth) for depth in range(max(len(trie.levels) for trie in different))]
        number = {id(trie): offset for trie, offset in zip(different, offsets, strict=True)}
        self.roots = (
            torch.tensor([number[id(trie)] for trie in tries], device=device).unsqueeze(1).expand(batch_size, 1)
        )

    def children(self, nodes: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The children of nodes.

        Args:
            nodes: ``[...]`` int64.
            most: `F`, at least as many as a node has.

        Returns:
            ``[..., F]`` int64 nodes and ``[..., F]`` bool, which of them there are.
        """
        inside = nodes.clamp(min=0)
        first = self._first_child[inside].to(torch.int64)
        count = torch.where(nodes == LEFT, 0, self._first_child[inside + 1] - first)
        place = torch.arange(most, device=nodes.device)
        there = place < count.unsqueeze(-1)
        return torch.where(there, first.unsqueeze(-1) + place, 0), there

    def tokens(self, nodes: torch.Tensor) -> torch.Tensor:
        """Token that leads to each node, int64; 0 at the root."""
        return self._token[nodes].to(torch.int64).clamp_(min=0)

    def step_tokens(self, depth: int) -> torch.Tensor:
        """``[C]`` int64, tokens in order, among which all that lead to nodes of a depth are; depths of nearly the same
        tokens share one tensor. Of depths from 2 on: the first tokens follow the prompt."""
        if not self._step_tokens:
            levels = range(min(2, len(self.levels) - 1), len(self.levels))
            sets = [
                [trie.tokens_at(level).to(self._device) for trie in self._tries if level < len(trie.levels)]
                for level in levels
            ]
            self._step_tokens = shared_sets([torch.unique(torch.cat(of_level)) for of_level in sets])
        return self._step_tokens[min(max(depth - 2, 0), len(self._step_tokens) - 1)]

    def child_with(self, nodes: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
        """The child that a token leads to, or `LEFT`: children are in the order of their tokens, and are bisected.

        Args:
            nodes, tokens: ``[...]`` int64.
            most: as in `children`.
        """
        inside = nodes.clamp(min=0)
        low = self._first_child[inside].to(torch.int64)
        end = torch.where(nodes == LEFT, low, self._first_child[inside + 1].to(torch.int64))
        high = end
        for _ in range(most.bit_length()):
            middle = (low + high) // 2
            before = self._token[middle.clamp(max=len(self._token) - 1)] < tokens
            low, high = torch.where(before & (low < high), middle + 1, low), torch.where(before, high, middle)
        found = self._token[low.clamp(max=len(self._token) - 1)] == tokens
        return torch.where(found & (low < end), low, LEFT)

    def is_leaf(self, nodes: torch.Tensor) -> torch.Tensor:
        """Whether nothing follows a node, bool."""
        inside = nodes.clamp(min=0)
        return (self._first_child[inside + 1] == self._first_child[inside]) | (nodes == LEFT)

    def items(self, nodes: torch.Tensor) -> torch.Tensor:
        """Index of the item that ends at a node, int64; -1 where none does."""
        return torch.where(nodes == LEFT, -1, self._item[nodes.clamp(min=0)].to(torch.int64))


def _together(tries: Sequence[TokenTrie], depth: int) -> Level:
    levels = [trie.levels[depth] for trie in tries if depth < len(trie.levels)]
    return Level(max(level.most_children for level in levels), any(level.has_leaves for level in levels))


class ItemConstraint:
    """Keeps the beams of a search on their items.

    Args:
        forest: the tries.
        begins: steps before the first item's token, in which a forced token stands before the root.
        renormalize: whether log-probabilities are those among the allowed tokens.

    Attributes:
        nodes: ``[B, N]`` int64, where each running beam stands.
    """

    def __init__(self, forest: Forest, *, begins: int, renormalize: bool):
        self.forest, self.begins, self.renormalize = forest, begins, renormalize
        self.nodes = forest.roots
        self._step = 0

    @property
    def _level(self) -> Level:
        depth = min(self._step - self.begins, len(self.forest.levels) - 1)
        return self.forest.levels[depth]

    @property
    def active(self) -> bool:
        """Whether this step's token is one of an item."""
        return self._step >= self.begins

    def step_tokens(self) -> torch.Tensor:
        """``[C]`` int64: the tokens whose scores this step's `candidates` can read."""
        return self.forest.step_tokens(self._step - self.begins + 1)

    def candidates(
        self,
        scores: torch.Tensor,
        running_scores: torch.Tensor,
        rules: Rules,
        beams: BeamRows | None,
        column_of: torch.Tensor | None = None,
    ) -> Candidates:
        """The best continuations that stay on items.

        The first `W` of a prompt are the best of all. The others are the best that end nowhere, so that `W` beams can
        run on.

        Args:
            scores: ``[R, V]`` float32, log-probabilities, or logits where they are renormalised; ``[R, C]`` with
                `column_of`.
            running_scores: ``[B, N]`` float32.
            rules: of each prompt.
            beams: the rows of a step; None for one row per prompt.
            column_of: ``[V]`` int64, the column of `scores` that belongs to each token; None where each has its own.
        """
        batch, count = running_scores.shape[0], rules.num_candidates
        most = max(self._level.most_children, 1)
        nodes, there = self.forest.children(self.nodes, most)  # [B, N, F]
        columns = self.forest.tokens(nodes)
        if column_of is not None:
            columns = column_of[columns]
        token_scores = scores.gather(1, columns.flatten(0, 1) if beams is None else beams.rows(columns))  # [R, F]
        token_scores = in_grid(token_scores, batch, beams).masked_fill(~there, -torch.inf)
        if self.renormalize:
            token_scores = renormalized(token_scores)
        ranked = (token_scores + running_scores.unsqueeze(-1)).view(batch, -1)
        nodes = nodes.view(batch, -1)
        scores, places = ranked.topk(min(count, ranked.shape[1]), dim=1)  # [B, K]
        if self._next_level_is_mixed:
            scores, places = self._runs_on_behind(ranked, nodes, scores, places, rules)
        nodes = nodes.gather(1, places)
        found = Candidates(
            scores=scores,
            tokens=self.forest.tokens(nodes),
            parents=places // most,
            token_scores=token_scores.view(batch, -1).gather(1, places),
            nodes=nodes,
        )
        return pad_candidates(found, count - places.shape[1])

    def _runs_on_behind(
        self, ranked: torch.Tensor, nodes: torch.Tensor, scores: torch.Tensor, places: torch.Tensor, rules: Rules
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best ``[B, K]`` with the best that run on behind the first `W`, in place of what could only end."""
        width, others = rules.width, places.shape[1] - rules.width
        if others <= 0:
            return scores, places
        runs_on = ranked.masked_fill(self.forest.is_leaf(nodes), -torch.inf).scatter(1, places[:, :width], -torch.inf)
        rest = runs_on.topk(others, dim=1)  # what ran out is -inf here, whatever it scores
        return (
            torch.cat([scores[:, :width], rest.values], dim=1),
            torch.cat([places[:, :width], rest.indices], dim=1),
        )

    @property
    def _next_level_is_mixed(self) -> bool:
        depth = self._step - self.begins + 1
        level = self.forest.levels[depth] if depth < len(self.forest.levels) else Level(0, True)
        return level.has_leaves and level.most_children > 0

    def placed(self, candidates: Candidates) -> Candidates:
        """Candidates that were chosen from whole rows, with their nodes."""
        parents = self.nodes.gather(1, candidates.parents)
        if not self.active:
            return candidates._replace(nodes=parents)
        nodes = self.forest.child_with(parents, candidates.tokens, self._level.most_children)
        return candidates._replace(nodes=nodes)

    def allowed(self, vocabulary: int) -> torch.Tensor:
        """``[B, N, V]`` bool: the tokens that may follow each beam."""
        nodes, there = self.forest.children(self.nodes, max(self._level.most_children, 1))
        tokens = torch.where(there, self.forest.tokens(nodes), vocabulary)
        allowed = torch.zeros(*tokens.shape[:2], vocabulary + 1, dtype=torch.bool, device=tokens.device)
        return allowed.scatter_(2, tokens, True)[..., :vocabulary]

    def hits(self, candidates: Candidates) -> torch.Tensor | None:
        """``[B, K]`` bool, candidates at whose node nothing follows; None before the first item's token."""
        nodes = _nodes_of(candidates)
        return self.forest.is_leaf(nodes) if self.active else None

    def follow(self, candidates: Candidates, chosen: Chosen) -> None:
        """Let the running beams stand where the chosen candidates stand."""
        self.nodes = _nodes_of(candidates).gather(1, chosen.ranks)
        self._step += 1


def _nodes_of(candidates: Candidates) -> torch.Tensor:
    if candidates.nodes is None:
        raise RuntimeError("candidates of a constrained search have no nodes")
    return candidates.nodes


def forced_tokens(processors: LogitsProcessorList, prompt_length: int) -> int:
    """How many tokens are forced before an item's first."""
    forced = any(isinstance(given, logits_process.ForcedBOSTokenLogitsProcessor) for given in processors)
    return 1 if forced and prompt_length == 1 else 0


class AllowedItems(LogitsProcessor):
    """The constraint as a processor of whole rows.

    Args:
        constraint: the beams and their nodes.
        rows_of: from ``[B, N, ...]`` and a number of rows to that many.
    """

    row_by_row = True

    def __init__(self, constraint: ItemConstraint, rows_of: Callable[[torch.Tensor, int], torch.Tensor]):
        self.constraint, self.rows_of = constraint, rows_of

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.constraint.active:
            return scores
        allowed = self.rows_of(self.constraint.allowed(scores.shape[1]), len(scores))
        scores = scores.masked_fill(~allowed, -torch.inf)
        return renormalized(scores) if self.constraint.renormalize else scores


def with_constraint(processors: LogitsProcessorList, constraint: AllowedItems) -> LogitsProcessorList:
    """The processors with the constraint where transformers puts its own."""
    earlier = [number for number, given in enumerate(processors) if type(given) in _BEFORE_THE_CONSTRAINT]
    place = earlier[-1] + 1 if earlier else 0
    return LogitsProcessorList([*processors[:place], constraint, *processors[place:]])
