"""Slow diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424) in plain Python, by transformers 4.56's rules.

4.56 is the last release that has this search itself (``_group_beam_search``); `compare_diverse.py` holds this file
against it. The groups of a prompt go one after another through each step, each a beam search of width ``W / G``:

1. every running sequence of the group is continued by every token; a continuation loses `diversity_penalty` for every
   beam of an earlier group that goes on, in this very step, with the same token. What is lost stays lost: it is part
   of the sum, and so of all later ranks and of the returned score;
2. the best ``max(2, 1 + number of end tokens) · W/G`` of these are the candidates;
3. of the first ``W/G`` candidates, those with an end token finish, with their sum divided by the length form; the best
   ``W/G`` finished sequences of the group are kept;
4. the first ``W/G`` candidates without an end token run on, also in the step that closes the group and at the longest
   length: it is their tokens that later groups count. So an end token is counted by nobody;
5. a group is closed when `early_stopping` says so of its ``W/G`` finished sequences. The sum that it asks about is that
   of the step's best candidate, whether or not that one ended here. A closed group takes nothing more;
6. at the longest length, the running sequences of the groups that are not closed by then finish;
7. the sequences of all groups are ranked together. The same sequence may come from several groups.

Points 5 and 6 are not those of `oracle.py`, which asks about the best sequence that runs on, and at the longest length
lets sequences finish even if that step's end tokens fill the list. All else is, for a group, the search there.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping

from oracle import Beam, Finished, NextLogProbs, Prefix, Rules, is_closed

Afterwards = Callable[[Prefix, list[float]], list[float]]
"""From generated tokens and their penalised row of log-probabilities to the row that is searched."""


@dataclasses.dataclass
class Group:
    """The search of one group.

    Attributes:
        rules: those of the whole search, with the width of the group.
        afterwards: as in `diverse_beam_search`.
        running: best first.
        finished: best first.
        closed: whether it takes nothing more.
    """

    rules: Rules
    afterwards: Afterwards | None = None
    running: list[Beam] = dataclasses.field(default_factory=lambda: [(0.0, ())])
    finished: list[Finished] = dataclasses.field(default_factory=list)
    closed: bool = False

    def take_step(self, next_log_probs: NextLogProbs, lost: Mapping[int, float]) -> None:
        """Points 1 to 5.

        Args:
            next_log_probs: as in `oracle.py`.
            lost: from a token to what its continuations lose; nothing where it is not named.
        """
        width, ends = self.rules.num_beams, self.rules.ends
        candidates = self.continuations(next_log_probs, lost)[: self.rules.num_candidates]
        self.finish([beam for beam in candidates[:width] if beam[1][-1] in ends])
        self.running = [beam for beam in candidates if beam[1][-1] not in ends][:width]
        if candidates:
            self.closed = self.closes(candidates)

    def continuations(self, next_log_probs: NextLogProbs, lost: Mapping[int, float]) -> list[Beam]:
        """All that have a probability at all, less what their tokens lose, best first."""
        rows = next_log_probs([tokens for _, tokens in self.running]) if self.running else []
        everything = []
        for (score, tokens), row in zip(self.running, rows, strict=True):
            row = [log_prob - lost.get(token, 0.0) for token, log_prob in enumerate(row)]
            if self.afterwards is not None:
                row = self.afterwards(tokens, row)
            everything += [(score + one, (*tokens, token)) for token, one in enumerate(row) if one > -math.inf]
        return sorted(everything, key=lambda beam: -beam[0])

    def finish(self, beams: list[Beam]) -> None:
        """Merge beams that end here into the finished sequences."""
        ended = [Finished(score / self.rules.form(len(tokens)), tokens) for score, tokens in beams]
        self.finished = sorted(self.finished + ended, key=lambda one: -one.score)[: self.rules.num_beams]

    def closes(self, candidates: list[Beam]) -> bool:
        """Point 5, asked after the step's end tokens have finished."""
        best, tokens = candidates[0]
        return is_closed(best, self.finished, len(tokens), self.rules)

    def finish_at_the_longest_length(self) -> None:
        """Point 6."""
        if not self.closed:
            self.finish(self.running)


def diverse_beam_search(
    next_log_probs: NextLogProbs,
    rules: Rules,
    num_beam_groups: int,
    diversity_penalty: float,
    *,
    pad: int | None = None,
    afterwards: Afterwards | None = None,
) -> list[Finished]:
    """The finished sequences of all groups of one prompt, best first; fewer than `W` where fewer exist.

    Args:
        next_log_probs: from prefixes to log-probabilities.
        rules: of the whole search: `num_beams` is `W`.
        num_beam_groups: `G`, a divisor of `W`.
        diversity_penalty: what a continuation loses for each beam of an earlier group that took its token.
        pad: transformers writes this token into each beam of a group that was closed before the step, and counts it
            as it counts any other. With None nothing is counted there.
        afterwards: what logits processors behind the penalty make of a penalised row.
    """
    width = rules.num_beams // num_beam_groups
    group_rules = dataclasses.replace(rules, num_beams=width)
    groups = [Group(group_rules, afterwards) for _ in range(num_beam_groups)]
    for _ in range(rules.max_new_tokens):
        taken: collections.Counter[int] = collections.Counter()
        for group in groups:
            if group.closed:
                taken.update([] if pad is None else [pad] * width)
                continue
            group.take_step(next_log_probs, {token: diversity_penalty * count for token, count in taken.items()})
            taken.update(tokens[-1] for _, tokens in group.running)
        if all(group.closed for group in groups):
            break
    for group in groups:
        group.finish_at_the_longest_length()
    return ranked_together(groups)


def ranked_together(groups: list[Group]) -> list[Finished]:
    """The finished sequences of all groups, best first; of equal ones, that of the later group first."""
    everything = [one for group in reversed(groups) for one in group.finished]
    return sorted(everything, key=lambda one: -one.score)
