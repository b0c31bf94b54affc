"""Slow beam search in plain Python: lists of whole sequences, no cache, no tensors in the search, float64.

It follows the rules of transformers' search word by word and is the specification of the fast one:

1. every running sequence is continued by every token;
2. the best ``K = max(2, 1 + number of end tokens) · W`` of these are the candidates;
3. a candidate ends by an end token or at the longest length; only the first `W` may finish, with their summed
   log-probability divided by the length form, and a reward for each token if there is one; the best `W` finished
   sequences are returned;
4. the first `W` candidates that do not end run on;
5. a prompt is closed when `early_stopping` says so, and takes nothing more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from transformers import PreTrainedModel

Prefix = tuple[int, ...]
Beam = tuple[float, Prefix]
"""Summed log-probability and generated tokens."""

NextLogProbs = Callable[[Sequence[Prefix]], Sequence[Sequence[float]]]
"""From generated prefixes, all of one length, to a log-probability for each token of the vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a search.

    Attributes:
        num_beams: `W`.
        max_new_tokens: `T`.
        ends: end tokens.
        early_stopping: True, False, "never", or "exhaust": no rule at all, go on to the longest length.
        length_penalty: exponent of the length form.
        normalization: "length", "gnmt" or "none".
        patience: with ``early_stopping=True``, a prompt is closed when this times `W` sequences have finished (Kasai
            et al. 2022, arXiv:2204.05424).
        length_reward: added to a finished score for each generated token (Huang et al. 2017).
    """

    num_beams: int
    max_new_tokens: int
    ends: Collection[int] = ()
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    normalization: str = "length"
    patience: float = 1.0
    length_reward: float = 0.0

    @property
    def num_candidates(self) -> int:
        return max(2, 1 + len(self.ends)) * self.num_beams

    def form(self, length: int) -> float:
        """What the summed log-probability of `length` generated tokens is divided by."""
        if self.normalization == "none":
            return 1.0
        base = (5 + length) / 6 if self.normalization == "gnmt" else length
        return base**self.length_penalty

    @property
    def enough(self) -> int:
        """Finished sequences that close a prompt with ``early_stopping=True``."""
        return math.ceil(round(self.patience * self.num_beams, 6))  # 1.1 · 50 is a little above 55 in floats

    def finished_score(self, total: float, tokens: Prefix) -> float:
        """What a finished sequence of summed log-probability `total` is ranked by."""
        return total / self.form(len(tokens)) + self.length_reward * len(tokens)

    def hope(self, total: float, length: int) -> float:
        """What the best running beam, of `length` tokens, is held to reach: ``"never"`` looks at every length."""
        last = self.max_new_tokens if self.early_stopping == "never" else length
        return max(total / self.form(one) + self.length_reward * one for one in range(length, last + 1))

    def is_over(self, tokens: Prefix) -> bool:
        return tokens[-1] in self.ends or len(tokens) == self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished sequence: what it is ranked by, and its generated tokens."""

    score: float
    tokens: Prefix


def beam_search(next_log_probs: NextLogProbs, rules: Rules) -> list[Finished]:
    """The finished sequences of one prompt, best first; fewer than `W` where fewer exist."""
    running: list[Beam] = [(0.0, ())]
    finished: list[Finished] = []
    while running:
        candidates = continuations(next_log_probs, running)[: rules.num_candidates]
        running, finished = take_step(candidates, finished, rules)
    return finished[: rules.num_beams]


def steps_taken(next_log_probs: NextLogProbs, rules: Rules) -> int:
    """How many steps `beam_search` takes."""
    lengths: set[int] = set()

    def noting(prefixes: Sequence[Prefix]) -> Sequence[Sequence[float]]:
        lengths.add(len(prefixes[0]))
        return next_log_probs(prefixes)

    beam_search(noting, rules)
    return len(lengths)


def sampled_outcomes(
    next_log_probs: NextLogProbs, rules: Rules, *, ordered_by_score: bool
) -> dict[tuple[Prefix, ...], float]:
    """Probability of each result of the sampling search: candidates are drawn without replacement, all draws tried.

    Args:
        ordered_by_score: whether the best `W` of the drawn may finish, or the `W` that were drawn first.

    Returns:
        From the finished sequences, best first, to their probability.
    """
    outcomes: dict[tuple[Prefix, ...], float] = {}

    def go_on(running: list[Beam], finished: list[Finished], chance: float) -> None:
        if not running:
            result = tuple(one.tokens for one in finished[: rules.num_beams])
            outcomes[result] = outcomes.get(result, 0.0) + chance
            return
        possible = continuations(next_log_probs, running)
        weights = [math.exp(score) for score, _ in possible]
        first = rules.num_candidates if ordered_by_score else rules.num_beams
        for (may_finish, others), likely in ordered_draws(weights, rules.num_candidates, first).items():
            drawn = [possible[number] for number in sorted(may_finish) + sorted(others)]
            go_on(*take_step(drawn, finished, rules), chance * likely)

    go_on([(0.0, ())], [], 1.0)
    return outcomes


def draws_without_replacement(weights: Sequence[float], count: int) -> dict[frozenset[int], float]:
    """Probability of each set of `count` draws without replacement."""
    return {drawn: chance for (drawn, _), chance in ordered_draws(weights, count, count).items()}


def ordered_draws(
    weights: Sequence[float], count: int, first: int
) -> dict[tuple[frozenset[int], frozenset[int]], float]:
    """Probability of each set of the `first` and set of the later of `count` draws, by going through all orders."""
    sets: dict[tuple[frozenset[int], frozenset[int]], float] = {}
    possible = [number for number, weight in enumerate(weights) if weight]
    for order in itertools.permutations(possible, count):
        chance, left = 1.0, sum(weights)
        for number in order:
            chance, left = chance * weights[number] / left, left - weights[number]
        drawn = frozenset(order[:first]), frozenset(order[first:])
        sets[drawn] = sets.get(drawn, 0.0) + chance
    return sets


def take_step(candidates: list[Beam], finished: list[Finished], rules: Rules) -> tuple[list[Beam], list[Finished]]:
    """Points 3 to 5 above: what runs on (nothing, if the prompt is closed) and all that has finished, best first."""
    width, length = rules.num_beams, len(candidates[0][1])
    ended = [
        Finished(rules.finished_score(total, tokens), tokens)
        for total, tokens in candidates[:width]
        if rules.is_over(tokens)
    ]
    finished = sorted(finished + ended, key=lambda one: -one.score)
    running = [candidate for candidate in candidates if not rules.is_over(candidate[1])]
    running = sorted(running, key=lambda candidate: -candidate[0])[:width]
    if running and is_closed(running[0][0], finished, length, rules):
        running = []
    return running, finished


def continuations(next_log_probs: NextLogProbs, running: list[Beam]) -> list[Beam]:
    """All continuations that have a probability at all, best first."""
    rows = next_log_probs([tokens for _, tokens in running])
    everything = [
        (score + log_prob, (*tokens, token))
        for (score, tokens), row in zip(running, rows, strict=True)
        for token, log_prob in enumerate(row)
        if log_prob > -math.inf
    ]
    return sorted(everything, key=lambda candidate: -candidate[0])


def is_closed(best_running: float, finished: list[Finished], length: int, rules: Rules) -> bool:
    """Whether the prompt takes nothing more after a step of `length` generated tokens."""
    if rules.early_stopping is True:
        return len(finished) >= rules.enough
    if len(finished) < rules.num_beams or rules.early_stopping == "exhaust":
        return False
    return not rules.hope(best_running, length) > finished[rules.num_beams - 1].score


def every_sequence(
    next_log_probs: NextLogProbs, rules: Rules, start: Prefix = (), score: float = 0.0
) -> list[Finished]:
    """All complete sequences that begin with `start`, best first: exhaustive search."""
    return sorted(_complete(next_log_probs, rules, start, score), key=lambda one: -one.score)


def _complete(next_log_probs: NextLogProbs, rules: Rules, start: Prefix, score: float) -> Iterator[Finished]:
    for token, log_prob in enumerate(next_log_probs([start])[0]):
        tokens, total = (*start, token), score + log_prob
        if log_prob == -math.inf:
            continue
        if rules.is_over(tokens):
            yield Finished(rules.finished_score(total, tokens), tokens)
        else:
            yield from _complete(next_log_probs, rules, tokens, total)


def from_table(table: Callable[[Prefix], Sequence[float]], prompt: Prefix) -> NextLogProbs:
    """Next log-probabilities after a prompt, from a table of whole prefixes."""
    return lambda prefixes: [table(prompt + prefix) for prefix in prefixes]


def from_model(model: PreTrainedModel, inputs: dict, start: Sequence[int] = ()) -> NextLogProbs:
    """Next log-probabilities by a fresh forward pass over whole sequences, without a cache.

    Args:
        model: decoder-only or encoder-decoder.
        inputs: of one prompt, without padding: ``input_ids`` ``[1, P]`` or what the encoder takes.
        start: decoder start tokens of an encoder-decoder model.
    """

    def next_log_probs(prefixes: Sequence[Prefix]) -> list[list[float]]:
        repeated = {name: given.expand(len(prefixes), *given.shape[1:]) for name, given in inputs.items()}
        generated = torch.tensor([(*start, *prefix) for prefix in prefixes], dtype=torch.int64)
        if model.config.is_encoder_decoder:
            repeated["decoder_input_ids"] = generated
        else:
            repeated["input_ids"] = torch.cat([repeated["input_ids"], generated], dim=1)
        with torch.no_grad():
            logits = model(**repeated, use_cache=False).logits[:, -1]
        return torch.log_softmax(logits.double(), dim=-1).tolist()

    return next_log_probs
