"""`coverage_penalty`: finished sequences that left source tokens unattended lose (Wu et al. 2016, equation 14).

The oracle scores whole sequences: a full pass over each gives its cross-attention maps, without a cache or a search.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import check_identical, search_both
from oracle import NextLogProbs, Prefix, Rules, beam_search, every_sequence, from_model
from test_oracle import check_as_expected
from tiny_models import SEQ2SEQ, START, double_model, prompts_for, random_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.utils import GenerationMixin

VOCABULARY, END, PAD = 8, 5, 0
SMALL = dict(SEQ2SEQ, vocab_size=VOCABULARY, d_model=16, max_position_embeddings=32)
KINDS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "bart": (BartForConditionalGeneration, BartConfig(**SMALL)),
    "marian": (MarianMTModel, MarianConfig(**SMALL, decoder_vocab_size=VOCABULARY)),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_decoder_layers=2, num_heads=4,
            pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=START,
        ),
    ),
}  # fmt: skip

Attended = Callable[[Prefix], torch.Tensor]
"""From generated tokens to ``[n, S]`` float64: how much the pass that predicts each looks at each source token."""


@functools.cache
def small_model(kind: str, attention: str | None = "eager") -> PreTrainedModel:
    """A float64 model of eight tokens, made so that its maps are uneven and differ from token to token."""
    model_class, config = KINDS[kind]
    config = copy.deepcopy(config)
    if attention is not None:  # before the model is made: not every release passes it on to a decoder that is there
        config._attn_implementation = attention
    model = random_model(model_class, config)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("embed_tokens", "shared")):
            parameter.data.mul_(1 if kind == "marian" else 4)  # it has no norm behind its embedding
        elif any(part in name for part in ("q_proj.weight", "k_proj.weight", ".q.weight", ".k.weight")):
            parameter.data.mul_(1.5 if kind == "marian" else 3)
    settings = model.generation_config
    settings.decoder_start_token_id, settings.forced_eos_token_id, settings.bad_words_ids = START, None, None
    return model


def sources(batch_size: int = 3, length: int = 5) -> dict[str, torch.Tensor]:
    """Sources of several lengths, padded on the right."""
    draws = torch.randint(0, 5, (batch_size, length), generator=torch.manual_seed(2))
    mask = (torch.arange(length) < length - torch.arange(batch_size).unsqueeze(1)).long()
    return {"input_ids": torch.tensor([2, 3, 4, 6, 7])[draws] * mask, "attention_mask": mask}


def source(inputs: dict, prompt: int) -> torch.Tensor:
    """The ids of one source, without padding."""
    return inputs["input_ids"][prompt][inputs["attention_mask"][prompt].bool()]


def attention_of(model: PreTrainedModel, ids: torch.Tensor, start: Prefix = (START,)) -> Attended:
    """Cross-attention of the last decoder layer, the mean over its heads, of the passes that predict each token."""

    @functools.cache
    def maps(before: Prefix) -> torch.Tensor:
        with torch.no_grad():
            output = model(
                input_ids=ids.unsqueeze(0), decoder_input_ids=torch.tensor([start + before]), output_attentions=True,
                use_cache=False,
            )  # fmt: skip
        return output.cross_attentions[-1].double().mean(1)[0, len(start) - 1 :]

    return lambda tokens: maps(tokens[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveringRules(Rules):
    """Rules with a coverage penalty.

    Attributes:
        coverage_penalty: beta.
        attended: maps of one prompt.
    """

    coverage_penalty: float
    attended: Attended

    def finished_score(self, total: float, tokens: Prefix) -> float:
        """The score over the form, plus beta times the sum of ``log(min(attention received, 1))`` over the source."""
        received = self.attended(tokens).sum(0).tolist()
        lacking = sum(math.log(min(one, 1.0)) for one in received)
        return super().finished_score(total, tokens) + self.coverage_penalty * lacking


def search(model: PreTrainedModel, inputs: dict, rules: Rules, **settings: Any) -> Any:
    if isinstance(rules, CoveringRules):
        settings = {"coverage_penalty": rules.coverage_penalty, **settings}
    call = dict(
        num_beams=rules.num_beams, num_return_sequences=rules.num_beams, max_new_tokens=rules.max_new_tokens,
        early_stopping=rules.early_stopping, length_penalty=rules.length_penalty, eos_token_id=list(rules.ends),
        length_normalization=rules.normalization, return_dict_in_generate=True, output_scores=True, do_sample=False,
        custom_generate="hf_paged_beam",
    )  # fmt: skip
    return GenerationMixin.generate(model, **inputs, **{**call, **settings})


@functools.cache
def oracle_of(kind: str, prompt: int, start: Prefix = (START,)) -> tuple[NextLogProbs, Attended]:
    """Log-probabilities and maps for one of `sources`, each computed once."""
    model, ids = small_model(kind), source(sources(), prompt)
    row = functools.cache(lambda prefix: from_model(model, {"input_ids": ids.unsqueeze(0)}, start)([prefix])[0])
    return lambda prefixes: [row(prefix) for prefix in prefixes], attention_of(model, ids, start)


FORMS = [("gnmt", 0.6, 0.2), ("length", 1.0, 1.0), ("none", 1.0, 3.0)]
SEQUENCES = 1 + 7 + 7 * 7 * 8
"""Of eight tokens, one of which ends, and length 3 at most."""


def test_the_penalty_on_paper() -> None:
    """Two passes give the source tokens 1.3 and .7: the first has its fill, the second lacks ln .7."""
    rules = CoveringRules(
        num_beams=2, max_new_tokens=3, normalization="gnmt", length_penalty=1.0, coverage_penalty=2.0,
        attended=lambda tokens: torch.tensor([[0.5, 0.5], [0.8, 0.2]])[: len(tokens)],
    )  # fmt: skip
    assert rules.finished_score(-7.0, (3, 4)) == pytest.approx(-7.0 / (7 / 6) + 2 * math.log(0.7))
    assert rules.finished_score(-7.0, (3,)) == pytest.approx(-7.0 + 4 * math.log(0.5))


@pytest.mark.parametrize(("form", "exponent", "beta"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_exhaustive_search(kind: str, form: str, exponent: float, beta: float) -> None:
    """With room for all sequences, all come back, each with its exact score; the sources are padded."""
    shape = dict(
        num_beams=SEQUENCES, max_new_tokens=3, ends=(END,), early_stopping="never", length_penalty=exponent,
        normalization=form, coverage_penalty=beta,
    )  # fmt: skip
    expected = []
    for prompt in range(3):
        next_log_probs, attended = oracle_of(kind, prompt)
        expected.append(every_sequence(next_log_probs, CoveringRules(**shape, attended=attended)))
        assert len(expected[-1]) == SEQUENCES
    output = search(small_model(kind), sources(), CoveringRules(**shape, attended=attended))
    check_as_expected(output, expected, prompt_length=1)
    assert output.beam_path == "gathered"
    assert output.cross_attentions is None and output.decoder_attentions is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_changes_what_is_best(kind: str) -> None:
    """In the oracle, or the test above would test little: other sequences win, some source gets its fill."""
    next_log_probs, attended = oracle_of(kind, 0)
    shape = dict(num_beams=SEQUENCES, max_new_tokens=3, ends=(END,), attended=attended)
    ranked = [
        [one.tokens for one in every_sequence(next_log_probs, CoveringRules(**shape, coverage_penalty=beta))]
        for beta in (0.0, 1.0)
    ]
    assert ranked[0][:20] != ranked[1][:20]
    received = [attended(tokens).sum(0) for tokens in ranked[0][:50]]
    assert any((one > 1.0).any() and (one < 0.9).any() for one in received)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_searches(kind: str, early_stopping: bool | str) -> None:
    """Against the oracle's search: running beams are ranked without the penalty, finished ones with it."""
    model, inputs = small_model(kind), sources()
    for form, exponent, beta in FORMS:
        shape = dict(
            num_beams=3, max_new_tokens=5, ends=(END,), early_stopping=early_stopping, length_penalty=exponent,
            normalization=form, coverage_penalty=beta,
        )  # fmt: skip
        expected = []
        for prompt in range(3):
            next_log_probs, attended = oracle_of(kind, prompt)
            rules = CoveringRules(**shape, attended=attended)
            expected.append(beam_search(next_log_probs, rules))
        output = search(model, inputs, rules)
        check_as_expected(output, expected, prompt_length=1)
        lone = {name: given[2:] for name, given in inputs.items()}  # padded, and alone
        check_as_expected(search(model, lone, rules), expected[2:], prompt_length=1)
        quiet = search(model, inputs, rules, output_scores=False, return_dict_in_generate=False)
        assert torch.equal(quiet, output.sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_of_several_decoder_tokens(kind: str) -> None:
    """What the given decoder tokens looked at does not count, but for the last, whose pass predicts the first token."""
    start = (START, 3, 6)
    inputs = {**sources(), "decoder_input_ids": torch.tensor([start] * 3)}
    expected = []
    for prompt in range(3):
        next_log_probs, attended = oracle_of(kind, prompt, start)
        rules = CoveringRules(num_beams=3, max_new_tokens=4, ends=(END,), coverage_penalty=0.7, attended=attended)
        expected.append(beam_search(next_log_probs, rules))
    check_as_expected(search(small_model(kind), inputs, rules), expected, prompt_length=3)


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_returned_where_they_are_asked_for(kind: str) -> None:
    """`output_attentions` as without the penalty, whose sums are those that the penalty is made of."""
    model, inputs = small_model(kind), sources()
    rules = Rules(num_beams=3, max_new_tokens=4, ends=(END,))
    plain = search(model, inputs, rules, output_attentions=True)
    output = search(model, inputs, rules, output_attentions=True, coverage_penalty=0.0)
    for mine, theirs in zip(output.cross_attentions, plain.cross_attentions, strict=True):
        for layer, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(layer, expected)


@pytest.mark.parametrize("beta", [0, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_penalty_is_transformers_search(kind: str, beta: float) -> None:
    stock, ours = search_both(
        small_model(kind), sources(), num_beams=3, num_return_sequences=3, max_new_tokens=5, early_stopping="never",
        eos_token_id=END, ours_only={"coverage_penalty": beta},
    )  # fmt: skip
    check_identical(stock, ours)
    assert ours.beam_path != "handed over"


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_attention_that_has_no_maps(kind: str) -> None:
    """With "sdpa", the default, the same result or an error that says what to set: no score without the penalty."""
    model, inputs = small_model(kind, None), sources()
    eager = small_model(kind)
    rules = Rules(num_beams=3, max_new_tokens=4, ends=(END,))
    try:
        output = search(model, inputs, rules, coverage_penalty=0.8)
    except ValueError as error:
        assert "coverage_penalty" in str(error) and "eager" in str(error)
        return
    expected = search(eager, inputs, rules, coverage_penalty=0.8)
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(output.sequences, expected.sequences) and output.beam_path == "gathered"


@pytest.mark.parametrize("beta", [-0.1, math.nan, math.inf, True, False, "0.2", [0.2, 0.2, 0.2]])
def test_what_is_no_penalty(beta: object) -> None:
    rules = Rules(num_beams=2, max_new_tokens=3, ends=(END,))
    with pytest.raises(ValueError, match="coverage_penalty"):
        search(small_model("bart"), sources(), rules, coverage_penalty=beta)


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"num_beams": 1, "num_return_sequences": 1}])
def test_a_penalty_needs_our_search(settings: dict) -> None:
    rules = Rules(num_beams=2, max_new_tokens=3, ends=(END,))
    with pytest.raises(ValueError, match="coverage_penalty"):
        search(small_model("bart"), sources(), rules, coverage_penalty=0.2, **settings)


def test_a_decoder_has_no_source() -> None:
    model = double_model("llama")
    with pytest.raises(ValueError, match=r"coverage_penalty.*encoder"):
        search(
            model, prompts_for(model, "llama", 2), Rules(num_beams=2, max_new_tokens=3, ends=(END,)),
            coverage_penalty=0.2,
        )  # fmt: skip
