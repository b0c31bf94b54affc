"""Sampling sequences without replacement, by enumeration: what stochastic beam search (Kool et al. 2019) must draw.

Every complete sequence is written down with its probability p. Then all is elementary:

- draws one after another, each among what is left: an ordered sample (a, b, ...) has probability
  ``p_a · p_b / (1 - p_a) · ...``;
- the same, in one go: every sequence gets the score ``ln p + Gumbel noise``, and the best scores win. These scores are
  independent, a score exceeds x with probability ``1 - exp(-exp(ln p - x))``, and so the distribution of the r-th
  largest score of all is that of a number of independent successes.

The two are held against each other in `test_stochastic.py`. Nothing here is a search, and nothing knows of top-down.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence

from oracle import NextLogProbs, Prefix

Probabilities = Mapping[Prefix, float]
"""From complete sequences of generated tokens to their probability; they sum to 1."""


def sequence_probabilities(next_log_probs: NextLogProbs, longest: int, ends: Collection[int]) -> Probabilities:
    """All sequences that end by an end token or are cut at the longest length, and have a probability at all."""
    found: dict[Prefix, float] = {}
    ahead: list[tuple[Prefix, float]] = [((), 1.0)]
    while ahead:
        prefix, chance = ahead.pop()
        for token, log_prob in enumerate(next_log_probs([prefix])[0]):
            tokens, likely = (*prefix, token), chance * math.exp(log_prob)
            if likely == 0.0:
                continue
            if token in ends or len(tokens) == longest:
                found[tokens] = likely
            else:
                ahead.append((tokens, likely))
    return found


def processed(
    next_log_probs: NextLogProbs,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_new_tokens: int = 0,
    ends: Collection[int] = (),
) -> NextLogProbs:
    """The distribution after transformers' processors, in their order, renormalised at each step.

    Args:
        next_log_probs: the model's.
        temperature: divides log-probabilities.
        top_k: how many of the best tokens stay; 0 for all. As always with beams, one more than there are end tokens
            stay at least (two without one), here and below.
        top_p: of the worst tokens, those whose probabilities together reach ``1 - top_p`` at most are left out.
        min_new_tokens: no end token before it.
        ends: end tokens.
    """
    at_least = max(2, 1 + len(ends))

    def of_row(row: Sequence[float], length: int) -> list[float]:
        if length < min_new_tokens:
            row = [-math.inf if token in ends else value for token, value in enumerate(row)]
        row = normalised([value / temperature for value in row])
        by_size = sorted(range(len(row)), key=lambda token: row[token])
        out = set(by_size[: -max(top_k, at_least)]) if top_k else set()
        row = normalised([-math.inf if token in out else value for token, value in enumerate(row)])
        if top_p < 1.0:
            sums = itertools.accumulate(math.exp(row[token]) for token in by_size)
            tail = {token for token, total in zip(by_size, sums, strict=True) if total <= 1.0 - top_p}
            out = tail - set(by_size[-at_least:])
            row = normalised([-math.inf if token in out else value for token, value in enumerate(row)])
        return row

    return lambda prefixes: [
        of_row(row, len(prefix)) for prefix, row in zip(prefixes, next_log_probs(prefixes), strict=True)
    ]


def normalised(row: Sequence[float]) -> list[float]:
    """Log-probabilities that sum to 1."""
    normaliser = math.log(sum(map(math.exp, row)))
    return [value - normaliser for value in row]


def ordered_samples(probabilities: Probabilities, count: int) -> dict[tuple[Prefix, ...], float]:
    """Probability of each ordered sample of `count` distinct sequences; they sum to 1."""
    return {
        order: ordered_sample(probabilities, order)
        for order in itertools.permutations(probabilities, min(count, len(probabilities)))
    }


def ordered_sample(probabilities: Probabilities, order: Sequence[Prefix]) -> float:
    """Probability of drawing these sequences one after another, each among those that are left."""
    chance, left = 1.0, 1.0
    for tokens in order:
        chance, left = chance * probabilities[tokens] / left, left - probabilities[tokens]
    return chance


def inclusion_probabilities(samples: Mapping[tuple[Prefix, ...], float]) -> dict[Prefix, float]:
    """How probable it is that each sequence is in the sample."""
    included: dict[Prefix, float] = {}
    for order, chance in samples.items():
        for tokens in order:
            included[tokens] = included.get(tokens, 0.0) + chance
    return included


def exceeds(log_prob: float, x: float) -> float:
    """Probability that a sequence's perturbed score is above `x`."""
    return -math.expm1(-math.exp(log_prob - x))


def order_statistic(probabilities: Probabilities, rank: int, x: float) -> float:
    """Probability that the perturbed score of this rank, 1 for the largest, is at most `x`: that fewer exceed it."""
    counts = [1.0] + [0.0] * (rank - 1)  # probability of each number of sequences above x
    for chance in probabilities.values():
        above = exceeds(math.log(chance), x)
        counts = [
            here * (1.0 - above) + before * above for here, before in zip(counts, [0.0, *counts[:-1]], strict=True)
        ]
    return sum(counts)


def perturbed_draws(
    probabilities: Probabilities, count: int, seed: int
) -> Iterator[tuple[tuple[Prefix, ...], list[float], float]]:
    """Draws without end, made by giving every sequence of all its noise.

    Args:
        probabilities: of all sequences.
        count: how many are in a sample.
        seed: of the noise.

    Yields:
        The sample, best score first, its perturbed scores, and the threshold: the score next to them, -inf where there
        is none.
    """
    noise = random.Random(seed)
    while True:
        scores = {one: math.log(chance) - math.log(noise.expovariate(1.0)) for one, chance in probabilities.items()}
        order = sorted(scores, key=lambda tokens: -scores[tokens])
        ranked = [scores[tokens] for tokens in order]
        yield tuple(order[:count]), ranked[:count], ranked[count] if len(ranked) > count else -math.inf


def weight(log_prob: float, threshold: float) -> float:
    """Kool et al.'s importance weight ``p / q``, q the probability to be above the threshold."""
    return math.exp(log_prob) / exceeds(log_prob, threshold) if threshold > -math.inf else math.exp(log_prob)
