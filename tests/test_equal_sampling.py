"""Beam sampling draws from transformers' own distribution: candidates without replacement, over all beams."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from comparing import returned_cache
from tiny_models import BUILDERS, EOS, double_model, prompts_for
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerationMixin

DRAWS = 12_000
WORDS = 8
END = 7
FEWEST = 12
"""Outcomes seen less often than this, in both samples together, are counted as one."""


def llama_of(vocabulary: int, hidden_size: int) -> LlamaForCausalLM:
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden_size, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=16, pad_token_id=0,
            eos_token_id=END, bos_token_id=None, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model


@functools.cache
def eight_words() -> LlamaForCausalLM:
    """A vocabulary so small that the outcomes of a search can be counted."""
    return llama_of(WORDS, 8)


def draw(seed: int, settings: dict, **extra: Any) -> Any:
    """As many independent searches as there are rows in the batch, all of the same prompt."""
    torch.manual_seed(seed)
    return eight_words().generate(
        torch.tensor([[1, 4]]).expand(DRAWS, -1), do_sample=True, max_new_tokens=2, return_dict_in_generate=True,
        output_scores=True, **{"top_k": 0, "num_beams": 2, **settings}, **extra,
    )  # fmt: skip


def difference(theirs: Counter, mine: Counter) -> tuple[float, int]:
    """Two-sample chi-square statistic of equal numbers of draws, and its degrees of freedom."""
    rare = [outcome for outcome in theirs | mine if theirs[outcome] + mine[outcome] < FEWEST]
    cells = [(theirs[outcome], mine[outcome]) for outcome in theirs | mine if outcome not in rare]
    if rare:
        cells.append((sum(theirs[one] for one in rare), sum(mine[one] for one in rare)))
    return sum((a - b) ** 2 / (a + b) for a, b in cells), len(cells) - 1


def check_same_distribution(theirs: Counter, mine: Counter) -> None:
    """The statistic lies within seven standard deviations of what equal distributions give."""
    statistic, freedom = difference(theirs, mine)
    assert freedom >= 3
    assert statistic <= bound(freedom), f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def bound(freedom: int) -> float:
    return freedom + 7 * (2 * freedom) ** 0.5


def rows(sequences: torch.Tensor) -> Counter:
    """How often each generated sequence was drawn."""
    return Counter(map(tuple, sequences[:, 2:].tolist()))


SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 1.8},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "all three": {"temperature": 1.4, "top_k": 6, "top_p": 0.9},
    "three beams": {"num_beams": 3},
    "no end": {"eos_token_id": None},
    "two ends, favouring length": {"eos_token_id": [END, 5], "length_penalty": 2.0},
    "renormalised": {"top_k": 5, "renormalize_logits": True},
    "without repetition": {"no_repeat_ngram_size": 1},
    "first finished": {"early_stopping": True, "length_penalty": 0.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_best_sequence_has_stocks_distribution(name: str) -> None:
    """Frequencies of the best sequence over many independent draws, ours and stock's under different seeds."""
    theirs = draw(11, SETTINGS[name])
    mine = draw(12, SETTINGS[name], custom_generate="hf_paged_beam")
    check_same_distribution(rows(theirs.sequences), rows(mine.sequences))
    assert mine.beam_path == "folded"


def test_all_returned_sequences_have_stocks_joint_distribution() -> None:
    """Best and second-best together: draws are without replacement, so that they are never the same sequence."""
    settings = {"num_return_sequences": 2, "top_k": 4}
    outputs = [draw(13, settings), draw(14, settings, custom_generate="hf_paged_beam")]
    pairs = [Counter(map(tuple, output.sequences[:, 2:].reshape(DRAWS, -1).tolist())) for output in outputs]
    check_same_distribution(*pairs)
    assert all(pair[: len(pair) // 2] != pair[len(pair) // 2 :] for pair in pairs[1])


def test_the_bound_tells_distributions_apart() -> None:
    """A slightly other temperature is found out."""
    theirs, other = draw(11, {}), draw(12, {"temperature": 1.2})
    statistic, freedom = difference(rows(theirs.sequences), rows(other.sequences))
    assert statistic > bound(freedom)


@pytest.mark.parametrize("kind", BUILDERS)
def test_sampling_repeats_itself_under_a_seed(kind: str) -> None:
    """The same seed gives the same sequences and scores; another seed others. Scores are those of the tokens drawn."""
    model = double_model(kind)
    inputs = prompts_for(model, kind, 3)

    def sample(seed: int) -> Any:
        torch.manual_seed(seed)
        return GenerationMixin.generate(
            model, **inputs, do_sample=True, num_beams=4, num_return_sequences=4, max_new_tokens=6, top_k=30,
            temperature=1.5, eos_token_id=[EOS, 20, 30], return_dict_in_generate=True, output_scores=True,
            custom_generate="hf_paged_beam",
        )  # fmt: skip

    first, again, other = sample(1), sample(1), sample(2)
    assert torch.equal(first.sequences, again.sequences)
    assert torch.equal(first.sequences_scores, again.sequences_scores)
    assert not torch.equal(first.sequences, other.sequences)
    lengths = (first.beam_indices >= 0).sum(-1)
    transitions = model.compute_transition_scores(first.sequences, first.scores, first.beam_indices)
    torch.testing.assert_close(transitions, first.token_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(transitions.sum(-1) / lengths, first.sequences_scores, rtol=1e-5, atol=1e-5)
    returned_cache(first).check()


def test_more_candidates_than_stock_can_draw_from() -> None:
    """``W·V`` just above 2^24, where transformers' `multinomial` gives up."""
    model, width = llama_of(2**22 + 1, 2), 4
    call = {"do_sample": True, "num_beams": width, "num_return_sequences": width, "max_new_tokens": 2, "top_k": 0,
            "eos_token_id": None, "return_dict_in_generate": True, "output_scores": True}  # fmt: skip
    prompt = torch.tensor([[1, 4]])
    with pytest.raises(RuntimeError, match="2\\^24"):
        model.generate(prompt, **call)
    torch.manual_seed(5)
    ours = model.generate(prompt, **call, custom_generate="hf_paged_beam")
    assert ours.sequences_scores.isfinite().all()
    assert len({tuple(row) for row in ours.sequences.tolist()}) == width
    torch.testing.assert_close(ours.token_logprobs.sum(-1) / 2, ours.sequences_scores, rtol=1e-5, atol=1e-5)
