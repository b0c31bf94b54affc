"""Stochastic beam search: its samples have the distribution that enumeration gives, and its estimator is unbiased.

A batch of equal prompts is as many independent draws. Statistics are compared at seeds that are fixed, with bounds that
a right search fails about once in ten thousand seeds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import Prefix, from_model, from_table
from stochastic_oracle import (
    Probabilities,
    inclusion_probabilities,
    order_statistic,
    ordered_sample,
    ordered_samples,
    perturbed_draws,
    processed,
    sequence_probabilities,
    weight,
)
from table_model import AttendingTable, GatheringTable, random_table, table_model, written_table
from tiny_models import DECODERS, EOS, double_model, path_of, prompts_for
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerationMixin

import hf_paged_beam
from hf_paged_beam import TokenTrie

STOCHASTIC = dict(do_sample=True, sampling="stochastic_beam", top_k=0, return_dict_in_generate=True)
EULER = 0.5772156649
GUMBEL_DEVIATION = math.pi / math.sqrt(6)
FEWEST = 5
"""Outcomes that are expected less often than this are counted as one."""

TREE_LETTERS, TREE = "abe", {
    #       eight sequences of one to three letters; e ends; some letters cannot come at all
    "": {"a": 0.5, "b": 0.3, "e": 0.2},
    "a": {"a": 0.6, "e": 0.4},
    "b": {"b": 0.7, "e": 0.3},
    "aa": {"a": 0.5, "b": 0.2, "e": 0.3},
    "bb": {"a": 0.9, "e": 0.1},
}  # fmt: skip
TOYS: dict[str, tuple[Callable, int, tuple[int, ...], int]] = {
    # table, V, end tokens, T
    "tree": (written_table(TREE, TREE_LETTERS), 3, (2,), 3),
    "one end": (random_table(1, 3, ends=(2,), raised=0.5), 3, (2,), 2),
    "two ends": (random_table(2, 4, ends=(2, 3), raised=0.0), 4, (2, 3), 2),
    "no end": (random_table(3, 3), 3, (), 2),
}


def probabilities_of(toy: str, prompt: Prefix = (1,), **processors: Any) -> Probabilities:
    """All sequences of a toy."""
    table, _, ends, longest = TOYS[toy]
    rows = processed(from_table(table, prompt), **processors, ends=ends) if processors else from_table(table, prompt)
    return sequence_probabilities(rows, longest, ends)


def draw(toy: str, width: int, times: int, *, seed: int = 0, kind: type = GatheringTable, **settings: Any) -> Any:
    """As many independent draws as there are rows in the batch, all of the same prompt."""
    table, vocabulary, ends, longest = TOYS[toy]
    torch.manual_seed(seed)
    ids = torch.ones(times, 1, dtype=torch.int64)
    return table_model(table, vocabulary, kind=kind).generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate="hf_paged_beam",
        **{**STOCHASTIC, "num_beams": width, "num_return_sequences": width, "max_new_tokens": longest,
           "eos_token_id": list(ends) or None, **settings},
    )  # fmt: skip


def cut(row: Sequence[int], ends: Sequence[int]) -> Prefix:
    """A row of generated tokens up to its end token."""
    place = next((place for place, token in enumerate(row) if token in ends), len(row))
    return tuple(row[: place + 1])


def samples_of(output: Any, ends: Sequence[int], per_prompt: int, prompt_length: int = 1) -> list[tuple[Prefix, ...]]:
    """The sequences of each prompt in the order returned; rows that are none are left out."""
    rows = [cut(row, ends) for row in output.sequences[:, prompt_length:].tolist()]
    real = output.sequences_log_probs.isfinite().tolist()
    pairs = list(zip(rows, real, strict=True))
    return [
        tuple(row for row, is_real in pairs[first : first + per_prompt] if is_real)
        for first in range(0, len(pairs), per_prompt)
    ]


def check_counts(counted: Counter, chances: dict[Any, float], times: int) -> None:
    """Chi-square: within five standard deviations, and a bit for the tail, of what the right distribution gives."""
    assert set(counted) <= set(chances)
    assert sum(chances.values()) == pytest.approx(1.0)
    cells = [(counted[one], times * chance) for one, chance in chances.items() if times * chance >= FEWEST]
    rare = [(counted[one], times * chance) for one, chance in chances.items() if times * chance < FEWEST]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    assert freedom >= 2
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom) + 5, f"{statistic:.1f} at {freedom} degrees of freedom"


def check_rank(scores: Sequence[float], probabilities: Probabilities, rank: int) -> None:
    """Kolmogorov and Smirnov: the empirical distribution is nowhere far from that of the score of this rank."""
    count = len(scores)
    law = [order_statistic(probabilities, rank, x) for x in sorted(scores)]
    gap = max(max((place + 1) / count - below, below - place / count) for place, below in enumerate(law))
    assert gap <= 2.25 / math.sqrt(count), f"the distributions differ by {gap:.4f}"


def check_mean(values: torch.Tensor, expected: float, deviations: float = 4.0) -> None:
    """The mean lies within some standard errors of what is expected."""
    values = values.double()
    error = (values.std() / math.sqrt(len(values))).item()
    assert abs(values.mean().item() - expected) <= deviations * error + 1e-9, (values.mean().item(), expected, error)


def check_scores(output: Any, per_prompt: int) -> None:
    """Perturbed scores descend, and the threshold of a prompt is one number below all of them."""
    scores, threshold = (given.view(-1, per_prompt) for given in (output.perturbed_scores, output.threshold))
    for given in (output.perturbed_scores, output.threshold, output.sequences_log_probs):
        assert given.dtype == torch.float32 and given.shape == output.sequences.shape[:1]
        assert not given.isnan().any()
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    assert torch.equal(threshold, threshold[:, :1].expand_as(threshold))
    real = scores > -torch.inf
    assert torch.equal(real, output.sequences_log_probs.view_as(scores) > -torch.inf)
    assert (scores > threshold)[real].all()
    assert (threshold == -torch.inf)[~real].all()


# The oracle against itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toy", TOYS)
def test_oracle_two_ways_to_draw(toy: str) -> None:
    """Draws one after another and draws by noise on every sequence have one distribution, thresholds included."""
    probabilities, times, width = probabilities_of(toy), 6000, 2
    assert 6 <= len(probabilities) <= 10 and sum(probabilities.values()) == pytest.approx(1.0)
    draws = list(itertools.islice(perturbed_draws(probabilities, width, seed=5), times))
    check_counts(Counter(sample for sample, _, _ in draws), ordered_samples(probabilities, width), times)
    for rank in (1, 2):
        check_rank([scores[rank - 1] for _, scores, _ in draws], probabilities, rank)
    check_rank([kappa for _, _, kappa in draws], probabilities, width + 1)
    for tokens, chance in probabilities.items():  # the estimator: in the mean, each sequence weighs its probability
        weights = [
            weight(math.log(chance), kappa) if tokens in sample else 0.0 for sample, _, kappa in draws
        ]  # fmt: skip
        check_mean(torch.tensor(weights), chance, 4.5)


def test_oracle_processors_are_transformers() -> None:
    """The oracle's temperature, top-k, top-p and shortest length leave what transformers' processors leave."""
    model = small_llama()
    for settings in PROCESSORS.values():
        torch.manual_seed(0)
        stock = model.generate(
            torch.tensor([[1, 4]]), do_sample=True, num_beams=2, max_new_tokens=1, return_dict_in_generate=True,
            output_scores=True, **{"top_k": 0, **settings},
        )  # fmt: skip
        rows = processed(from_model(model, {"input_ids": torch.tensor([[1, 4]])}), **settings, ends=(7,))
        expected = torch.tensor(rows([()])).float()
        torch.testing.assert_close(stock.scores[0][:1].log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


def test_oracle_on_paper() -> None:
    """The tree's sequences, and one ordered sample: .2 · .189 / .8."""
    probabilities = probabilities_of("tree")
    named = {"".join(TREE_LETTERS[token] for token in tokens): chance for tokens, chance in probabilities.items()}
    wanted = {"e": 0.2, "ae": 0.2, "be": 0.09, "aaa": 0.15, "aab": 0.06, "aae": 0.09, "bba": 0.189, "bbe": 0.021}
    assert named == pytest.approx(wanted)
    assert ordered_sample(probabilities, [(2,), (1, 1, 0)]) == pytest.approx(0.2 * 0.189 / 0.8)


# Distributions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GatheringTable, AttendingTable])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("toy", TOYS)
def test_ordered_samples(toy: str, width: int, kind: type) -> None:
    """How often each ordered sample, and each sequence, is drawn; and the law of each score and of the threshold."""
    times = 3000 if kind is GatheringTable else 1000
    probabilities, ends = probabilities_of(toy), TOYS[toy][2]
    output = draw(toy, width, times, kind=kind)
    assert output.beam_path == ("gathered" if kind is GatheringTable else "folded")
    check_scores(output, width)
    samples = samples_of(output, ends, width)
    assert all(len(set(sample)) == width for sample in samples)
    exact = ordered_samples(probabilities, width)
    check_counts(Counter(samples), exact, times)
    included = Counter(itertools.chain(*samples))
    for tokens, chance in inclusion_probabilities(exact).items():
        assert abs(included[tokens] - times * chance) <= 4.5 * math.sqrt(times * chance * (1 - chance)) + 1
    scores = output.perturbed_scores.view(times, width)
    for rank in range(width):
        check_rank(scores[:, rank].tolist(), probabilities, rank + 1)
    check_rank(output.threshold[::width].tolist(), probabilities, width + 1)


@pytest.mark.parametrize("toy", TOYS)
def test_the_best_score_is_gumbel_and_nothing_else(toy: str) -> None:
    """Its mean is Euler's constant, its deviation pi over the root of six, whichever sequence it belongs to."""
    times, width = 4000, 2
    output = draw(toy, width, times, seed=1)
    best = output.perturbed_scores.view(times, width)[:, 0].double()
    check_mean(best, EULER)
    assert abs(best.std().item() - GUMBEL_DEVIATION) < 0.1
    winners = [sample[0] for sample in samples_of(output, TOYS[toy][2], width)]
    for tokens, count in Counter(winners).items():
        if count >= 100:
            check_mean(best[torch.tensor([winner == tokens for winner in winners])], EULER, 4.5)


@pytest.mark.parametrize("toy", TOYS)
def test_log_probabilities_are_the_sequences_own(toy: str) -> None:
    """`sequences_log_probs` is the sum of the tokens' and no perturbed number."""
    probabilities = probabilities_of(toy)
    output = draw(toy, 3, 100, output_scores=True, length_penalty=2.0)
    samples = samples_of(output, TOYS[toy][2], 3)
    exact = torch.tensor([math.log(probabilities[tokens]) for sample in samples for tokens in sample])
    torch.testing.assert_close(output.sequences_log_probs, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.token_logprobs.sum(-1), exact, rtol=1e-4, atol=1e-4)
    lengths = torch.tensor([len(tokens) for sample in samples for tokens in sample])
    torch.testing.assert_close(output.sequences_scores, exact / lengths**2.0, rtol=1e-4, atol=1e-4)


PROCESSORS: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "longer": {"min_new_tokens": 2},
    "all": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_new_tokens": 2},
}


@pytest.mark.parametrize("setting", PROCESSORS)
@pytest.mark.parametrize("toy", ["one end", "two ends"])
def test_processors_come_first_and_are_renormalised(toy: str, setting: str) -> None:
    """Samples are those of the processed distribution, and its probabilities sum to 1 again: scores say so."""
    processors, ends, times = PROCESSORS[setting], TOYS[toy][2], 3000
    probabilities = probabilities_of(toy, **processors)
    output = draw(toy, 2, times, seed=2, **processors)
    samples = samples_of(output, ends, 2)
    check_counts(Counter(samples), ordered_samples(probabilities, 2), times)
    exact = torch.tensor([math.log(probabilities[tokens]) for sample in samples for tokens in sample])
    torch.testing.assert_close(output.sequences_log_probs, exact, rtol=1e-4, atol=1e-4)
    check_mean(output.perturbed_scores[::2], EULER)
    check_rank(output.threshold[::2].tolist(), probabilities, 3)


def test_each_prompt_of_a_batch_has_its_own_distribution() -> None:
    """Two prompts of different lengths by turns, the shorter padded on the left."""
    table, vocabulary, ends, longest = TOYS["one end"]
    times, width = 3000, 2
    ids = torch.tensor([[0, 1], [2, 0]]).repeat(times // 2, 1)
    mask = torch.tensor([[0, 1], [1, 1]]).repeat(times // 2, 1)
    torch.manual_seed(3)
    output = table_model(table, vocabulary, kind=GatheringTable).generate(
        ids, attention_mask=mask, num_beams=width, num_return_sequences=width, max_new_tokens=longest,
        eos_token_id=list(ends), custom_generate="hf_paged_beam", **STOCHASTIC,
    )  # fmt: skip
    samples = samples_of(output, ends, width, prompt_length=2)
    for first, prompt in enumerate([(1,), (2, 0)]):
        exact = ordered_samples(probabilities_of("one end", prompt), width)
        check_counts(Counter(samples[first::2]), exact, times // 2)


@functools.cache
def small_llama() -> LlamaForCausalLM:
    """A vocabulary so small that all its sequences of two tokens can be written down."""
    torch.manual_seed(3)
    config = LlamaConfig(**{**DECODERS, "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "eos_token_id": 7})
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.5)
    return model


def test_samples_of_a_real_model() -> None:
    """On the folded path of a Llama, against the probabilities of its own full passes."""
    model, prompt, width, times = small_llama(), torch.tensor([[1, 4]]), 3, 6000
    probabilities = sequence_probabilities(from_model(model, {"input_ids": prompt}), 2, (7,))
    assert len(probabilities) == 1 + 7 * 8
    torch.manual_seed(4)
    output = model.generate(
        prompt.expand(times, -1), num_beams=width, num_return_sequences=width, max_new_tokens=2,
        custom_generate="hf_paged_beam", **STOCHASTIC,
    )  # fmt: skip
    assert output.beam_path == "folded"
    check_scores(output, width)
    samples = samples_of(output, (7,), width, prompt_length=2)
    assert all(len(set(sample)) == width for sample in samples)
    pairs = ordered_samples(probabilities, 2)
    check_counts(Counter(sample[:2] for sample in samples), pairs, times)
    for rank in range(width):
        check_rank(output.perturbed_scores[rank::width][:2000].tolist(), probabilities, rank + 1)
    check_rank(output.threshold[::width][:2000].tolist(), probabilities, width + 1)


# The estimator --------------------------------------------------------------------------------------------------------


def per_draw(output: Any, values: torch.Tensor, width: int, **options: Any) -> torch.Tensor:
    """The estimate of each prompt, checked for its shape."""
    estimated = hf_paged_beam.estimate(values, output, **options)
    assert estimated.dtype == torch.float64 and estimated.shape == (len(output.sequences) // width,)
    return estimated


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("toy", TOYS)
def test_the_estimator_is_unbiased(toy: str, width: int) -> None:
    """The mean length, and a value that falls with the probability; and for each sequence the mean of its weight."""
    probabilities, ends, times = probabilities_of(toy), TOYS[toy][2], 4000
    output = draw(toy, width, times, seed=6)
    samples = samples_of(output, ends, width)
    features: dict[str, Callable[[Prefix], float]] = {
        "one": lambda tokens: 1.0,
        "length": lambda tokens: float(len(tokens)),
        "surprise": lambda tokens: -math.log(probabilities[tokens]),
    }
    for feature in features.values():
        values = torch.tensor([feature(tokens) for sample in samples for tokens in sample])
        expected = sum(chance * feature(tokens) for tokens, chance in probabilities.items())
        check_mean(per_draw(output, values, width), expected)
    weights = hf_paged_beam.importance_weights(output).view(times, width).double()
    for tokens, chance in probabilities.items():
        drawn = torch.tensor([[one == tokens for one in sample] for sample in samples])
        check_mean((weights * drawn).sum(-1), chance, 4.5)


def test_weights_by_their_formula() -> None:
    """``p / (1 - exp(-exp(ln p - threshold)))``, their weighted sums, and these over the weights' sum."""
    width, times = 3, 50
    output = draw("one end", width, times)
    weights = hf_paged_beam.importance_weights(output)
    assert weights.shape == output.threshold.shape and weights.dtype == torch.float32
    pairs = zip(output.sequences_log_probs.tolist(), output.threshold.tolist(), strict=True)
    exact = torch.tensor([weight(log_prob, kappa) for log_prob, kappa in pairs])
    torch.testing.assert_close(weights, exact, rtol=1e-4, atol=1e-6)
    values = torch.randn(width * times, generator=torch.manual_seed(1))
    sums = (exact * values).view(times, width).sum(-1).double()
    torch.testing.assert_close(per_draw(output, values, width), sums, rtol=1e-4, atol=1e-5)
    total = exact.view(times, width).sum(-1).double()
    torch.testing.assert_close(per_draw(output, values, width, normalize=True), sums / total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("toy", TOYS)
def test_with_all_sequences_the_estimate_is_exact(toy: str, spare: int) -> None:
    """As many beams as sequences, or more: no threshold, weights are probabilities, spare rows are none."""
    probabilities, ends = probabilities_of(toy), TOYS[toy][2]
    width, times = len(probabilities) + spare, 5
    output = draw(toy, width, times)
    check_scores(output, width)
    assert (output.threshold == -torch.inf).all()
    samples = samples_of(output, ends, width)
    assert all(len(sample) == len(probabilities) and set(sample) == set(probabilities) for sample in samples)
    weights = hf_paged_beam.importance_weights(output).view(times, width)
    exact = torch.tensor([[probabilities[tokens] for tokens in sample] + [0.0] * spare for sample in samples])
    torch.testing.assert_close(weights, exact, rtol=1e-4, atol=1e-6)
    assert (weights[:, len(probabilities) :] == 0).all()
    length = torch.tensor([[float(len(tokens)) for tokens in sample] + [9.0] * spare for sample in samples])
    mean = sum(chance * len(tokens) for tokens, chance in probabilities.items())
    for normalize in (False, True):
        estimated = per_draw(output, length.flatten(), width, normalize=normalize)
        torch.testing.assert_close(estimated, torch.full_like(estimated, mean), rtol=1e-4, atol=1e-4)


def test_one_row_short_of_all_sequences() -> None:
    """One beam fewer than sequences: there is a threshold again."""
    width = len(probabilities_of("tree")) - 1
    output = draw("tree", width, 5)
    check_scores(output, width)
    assert output.threshold.isfinite().all()


def test_fewer_sequences_than_beams() -> None:
    """Two sequences for four beams: two rows are none, in every field."""
    table = written_table({"": {"a": 0.25, "b": 0.75}}, "abe")
    torch.manual_seed(0)
    output = table_model(table, 3).generate(
        torch.zeros(1, 1, dtype=torch.int64), attention_mask=torch.ones(1, 1, dtype=torch.int64), num_beams=4,
        num_return_sequences=4, max_new_tokens=1, eos_token_id=2, custom_generate="hf_paged_beam", output_scores=True,
        **STOCHASTIC,
    )  # fmt: skip
    check_scores(output, 4)
    for given in (output.sequences_log_probs, output.perturbed_scores, output.sequences_scores):
        assert given.isfinite().tolist() == [True, True, False, False] and (given[2:] == -torch.inf).all()
    assert (output.threshold == -torch.inf).all()
    weights = hf_paged_beam.importance_weights(output)
    assert sorted(weights.tolist()) == pytest.approx([0.0, 0.0, 0.25, 0.75])
    values = torch.tensor([1.0, 2.0, float("nan"), float("inf")])  # of rows that are no sequences: not looked at
    first, second = weights[:2].tolist()
    assert hf_paged_beam.estimate(values, output).tolist() == pytest.approx([first + 2 * second])


@pytest.mark.parametrize("log_prob", [-30.0, -150.0, -2000.0])
def test_weights_of_long_sequences(log_prob: float) -> None:
    """Where the probability itself is no number of float32 or float64 any more, the weight is: exp(threshold)."""
    output = draw("one end", 2, 1)
    output.sequences_log_probs = torch.tensor([log_prob, log_prob - 1])
    output.perturbed_scores, output.threshold = torch.tensor([0.5, 0.0]), torch.tensor([-1.25, -1.25])
    weights = hf_paged_beam.importance_weights(output)
    assert weights.tolist() == pytest.approx([math.exp(-1.25)] * 2, rel=1e-5)
    values = torch.tensor([1.0, 3.0])
    assert hf_paged_beam.estimate(values, output).item() == pytest.approx(4 * math.exp(-1.25), rel=1e-5)
    assert hf_paged_beam.estimate(values, output, normalize=True).item() == pytest.approx(2.0, rel=1e-5)


# Calls ----------------------------------------------------------------------------------------------------------------


def same_draw(first: Any, second: Any) -> bool:
    names = ("sequences", "sequences_log_probs", "perturbed_scores", "threshold")
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


def test_reproducible_under_a_seed() -> None:
    first, again, other = (draw("one end", 2, 20, seed=seed) for seed in (8, 8, 9))
    assert same_draw(first, again) and not same_draw(first, other)


@pytest.mark.parametrize("returned", [1, 2, 3])
def test_fewer_rows_than_beams(returned: int) -> None:
    """The first rows of the same draw; the threshold is the next row's score, so that weights are those of `n` rows."""
    whole = draw("tree", 4, 50)
    part = draw("tree", 4, 50, num_return_sequences=returned)
    for name in ("sequences", "sequences_log_probs", "perturbed_scores"):
        of_whole = getattr(whole, name).view(50, 4, -1)[:, :returned].reshape(50 * returned, -1)
        assert torch.equal(getattr(part, name).view(50 * returned, -1), of_whole[:, : part.sequences.shape[1]])
    next_scores = whole.perturbed_scores.view(50, 4)[:, returned]
    assert torch.equal(part.threshold.view(50, returned), next_scores.unsqueeze(1).expand(-1, returned))


def test_fewer_rows_than_beams_are_unbiased() -> None:
    probabilities, times = probabilities_of("tree"), 4000
    output = draw("tree", 3, times, num_return_sequences=1, seed=7)
    lengths = torch.tensor([float(len(sample[0])) for sample in samples_of(output, (2,), 1)])
    mean = sum(chance * len(tokens) for tokens, chance in probabilities.items())
    check_mean(per_draw(output, lengths, 1), mean)


@pytest.mark.parametrize("settings", [{"early_stopping": True}, {"early_stopping": "never"}, {"length_penalty": -3.0}])
def test_stopping_rules_do_not_bias_the_sample(settings: dict) -> None:
    """The sample is complete when its sequences are; what ranks beams elsewhere has no say."""
    assert same_draw(draw("tree", 3, 200), draw("tree", 3, 200, **settings))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "t5", "bart"])
def test_architectures(kind: str) -> None:
    """Distinct rows whose log-probabilities are those of a full pass; padded batches, long enough to end anywhere."""
    model, width = double_model(kind), 5
    inputs = prompts_for(model, kind, 3)
    torch.manual_seed(1)
    output = GenerationMixin.generate(
        model, **inputs, num_beams=width, num_return_sequences=width, max_new_tokens=6, eos_token_id=[EOS, 20, 30],
        custom_generate="hf_paged_beam", **STOCHASTIC,
    )  # fmt: skip
    assert output.beam_path == path_of(kind)
    check_scores(output, width)
    assert output.threshold.isfinite().all()
    begins = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    samples = samples_of(output, (EOS, 20, 30), width, prompt_length=begins)
    exact = [rescored(model, inputs, prompt, tokens) for prompt, sample in enumerate(samples) for tokens in sample]
    assert all(len(set(sample)) == width for sample in samples)
    torch.testing.assert_close(output.sequences_log_probs, torch.tensor(exact), rtol=1e-4, atol=1e-4)
    assert hf_paged_beam.importance_weights(output).isfinite().all()


def rescored(model: Any, inputs: dict, prompt: int, tokens: Prefix) -> float:
    """Summed log-probability by one full pass over the prompt, its padding taken off, and the tokens."""
    ids = inputs["input_ids"][prompt][inputs["attention_mask"][prompt].bool()].unsqueeze(0)
    generated = torch.tensor([tokens])
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            started = torch.cat([torch.tensor([[1]]), generated[:, :-1]], dim=1)
            logits = model(input_ids=ids, decoder_input_ids=started, use_cache=False).logits
        else:
            logits = model(torch.cat([ids, generated[:, :-1]], dim=1), use_cache=False).logits[:, ids.shape[1] - 1 :]
    return logits.double().log_softmax(-1)[0].gather(1, generated.T).sum().item()


def test_items_are_drawn_without_replacement() -> None:
    """With a trie every row is an item, no item comes twice, and all come where there is room for them."""
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    items = [[token, 40 + token % 3, 50] for token in range(20, 26)]
    trie = TokenTrie.from_sequences(items, eos_token_id=EOS)
    for width, found in ((4, 4), (8, 6)):
        torch.manual_seed(0)
        output = model.generate(
            **inputs, num_beams=width, num_return_sequences=width, max_new_tokens=5, trie=trie,
            custom_generate="hf_paged_beam", **STOCHASTIC,
        )  # fmt: skip
        for ids in output.item_ids.view(2, width).tolist():
            assert len(set(ids[:found])) == found and min(ids[:found]) >= 0 and set(ids[found:]) <= {-1}


def test_ordinary_beam_sampling_is_left_alone() -> None:
    """``sampling="beam"`` is the default, draws what it drew, and has none of the new fields."""
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    call = dict(num_beams=4, num_return_sequences=4, max_new_tokens=6, do_sample=True, return_dict_in_generate=True,
                output_scores=True, custom_generate="hf_paged_beam")  # fmt: skip
    outputs = []
    for settings in ({}, {"sampling": "beam"}):
        torch.manual_seed(2)
        outputs.append(model.generate(**inputs, **call, **settings))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert torch.equal(outputs[0].sequences_scores, outputs[1].sequences_scores)
    for name in ("sequences_log_probs", "perturbed_scores", "threshold"):
        assert getattr(outputs[1], name, None) is None
    with pytest.raises(ValueError, match="stochastic_beam"):
        hf_paged_beam.importance_weights(outputs[1])
    with pytest.raises(ValueError, match="stochastic_beam"):
        hf_paged_beam.estimate(torch.ones(8), outputs[1])


def test_a_tensor_alone() -> None:
    """Without ``return_dict_in_generate`` the same sequences."""
    whole = draw("one end", 2, 20, seed=3)
    assert torch.equal(draw("one end", 2, 20, seed=3, return_dict_in_generate=False), whole.sequences)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": "x"}, "sampling must be .*'stochastic_beam'.*'x'"),
        ({"sampling": None}, "sampling"),
        ({"sampling": True}, "sampling"),
        ({"do_sample": False}, "do_sample"),
        ({"num_beams": 1, "num_return_sequences": 1}, "num_beams|sampling"),
        ({"use_cache": False}, "sampling"),
    ],
)
def test_what_is_refused(settings: dict, message: str) -> None:
    model, inputs = double_model("llama"), prompts_for(double_model("llama"), "llama", 2)
    call = {**STOCHASTIC, "num_beams": 2, "max_new_tokens": 3, "custom_generate": "hf_paged_beam", **settings}
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, **call)


@pytest.mark.parametrize("shape", [(3,), (5,), (2, 3), ()])
def test_values_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="values"):
        hf_paged_beam.estimate(torch.ones(shape), draw("one end", 2, 2))
