"""Logits processors change scores as in transformers' own search, and are shown the same rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import check_equal, check_identical, real_scores, search_both
from tiny_models import BUILDERS, ENCODER_DECODER, EOS, PAD, double_model, prompts_for, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

THREE_ENDS = [EOS, 20, 30]
PROCESSORS: dict[str, dict] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition reward": {"repetition_penalty": 0.7},
    "no_repeat_ngram_size=1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size=2": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [*([word] for word in range(6, 30)), *([w, w] for w in range(31, 90))]},
    "sequence_bias": {"sequence_bias": [*([[word], -4.0] for word in range(6, 99, 3)), [[EOS], 2.5], [[40, 41], 5.0]]},
    "suppress_tokens": {"suppress_tokens": [EOS, *range(6, 99, 2)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [EOS, *range(6, 80)]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.6)},
    "renormalize_logits": {"renormalize_logits": True, "no_repeat_ngram_size": 1},
    "remove_invalid_values": {"remove_invalid_values": True},
    "guidance_scale": {"guidance_scale": 1.6},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "suppress_tokens": [17, 21],
                "sequence_bias": [[[EOS], 1.0]], "renormalize_logits": True},
}  # fmt: skip
ENCODER_PROCESSORS: dict[str, dict] = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "encoder_no_repeat_ngram_size=1": {"encoder_no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size=2": {"encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 3},
}


class Recorder(LogitsProcessor):
    """Changes nothing, and keeps what it was shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append((input_ids.clone(), scores.clone()))
        return scores


class EditsInPlace(LogitsProcessor):
    """Writes into the scores that it was given."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 10:40] -= 3.0
        scores[:, 50] = -torch.inf
        return scores


class FavoursItsOwnCount(LogitsProcessor):
    """Remembers how often it was called, and lifts another token each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        lifted = scores.clone()
        lifted[:, 60 + self.count] += 4.0
        return lifted


class DependsOnWholeRows(LogitsProcessor):
    """Lifts a token that is computed from all ids of the row, prompt included."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = (input_ids.sum(-1, keepdim=True) * 7) % scores.shape[1]
        return scores.scatter_add(1, wanted, torch.full_like(scores[:, :1], 5.0))


def check_search(kind: str, batch_size: int = 3, **settings: Any) -> tuple[Any, Any]:
    """Run the same search both ways on the float64 model, and assert that every field is the same."""
    model = double_model(kind)
    call = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8, "eos_token_id": THREE_ENDS, **settings}
    stock, ours = search_both(model, prompts_for(model, kind, batch_size), **call)
    check_identical(stock, ours)
    return stock, ours


@functools.cache
def plain_scores(kind: str) -> torch.Tensor:
    """Every step's scores without a processor: ``[steps, B·W, V]``."""
    return torch.stack(check_search(kind)[0].scores)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_processors_of_the_generation_arguments(kind: str, name: str) -> None:
    """Each processor that an argument of `generate` switches on, for each kind of model, and that it does something."""
    if name == "guidance_scale" and kind in ENCODER_DECODER:
        pytest.skip("transformers' guidance takes decoder-only models")
    stock, _ = check_search(kind, **PROCESSORS[name])
    scores, plain = torch.stack(stock.scores).float(), plain_scores(kind)
    changed = scores.shape != plain.shape or not torch.allclose(scores, plain)
    assert changed != (name == "remove_invalid_values")


def test_infinite_values_are_removed() -> None:
    """A model that rules tokens out by -inf: `remove_invalid_values` makes finite scores of them."""
    model = tiny_model("llama", dtype=torch.float64)
    model.lm_head.register_forward_hook(
        lambda module, args, logits: logits.index_fill(2, torch.arange(40, 60), -torch.inf)
    )
    stock, ours = search_both(
        model, prompts_for(model, "llama", 2), num_beams=4, num_return_sequences=4, max_new_tokens=6,
        remove_invalid_values=True,
    )  # fmt: skip
    check_identical(stock, ours)
    assert all(step.isfinite().all() for step in ours.scores)


@pytest.mark.parametrize("name", ENCODER_PROCESSORS)
@pytest.mark.parametrize("kind", ["t5", "bart", "llama"])
def test_processors_that_read_the_encoders_input(kind: str, name: str) -> None:
    """They are given the prompts as transformers gives them, one row per prompt."""
    check_search(kind, **ENCODER_PROCESSORS[name])


@pytest.mark.parametrize("name", [*PROCESSORS, *ENCODER_PROCESSORS])
def test_processors_on_the_gathered_path(name: str) -> None:
    """How keys are read has no part in it."""
    kind = "t5" if name in ENCODER_PROCESSORS else "qwen3"
    settings = {**PROCESSORS, **ENCODER_PROCESSORS}[name]
    _, ours = check_search(kind, **settings, ours_only={"beam_attention": "gathered"})
    assert ours.beam_path == "gathered"


@pytest.mark.parametrize(
    "watermark",
    [
        WatermarkingConfig(bias=2.0, seeding_scheme="lefthash"),
        WatermarkingConfig(bias=2.0, seeding_scheme="selfhash", context_width=2),
        SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 14, 15, 92, 65]),
    ],
    ids=["lefthash", "selfhash", "synthid"],
)
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_watermarks(kind: str, watermark: Any) -> None:
    """Watermarks that transformers' own beam search can carry."""
    check_search(kind, 2, watermarking_config=watermark, max_new_tokens=5, num_beams=3, num_return_sequences=3)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_guidance_with_a_negative_prompt(kind: str, negative: bool) -> None:
    """Classifier-free guidance runs the model a second time, outside the paged cache."""
    model = double_model(kind)
    extra: dict[str, Any] = {"guidance_scale": 2.0}
    if negative:
        prompt = prompts_for(model, kind, 2, length=4, seed=8)
        extra |= {  # transformers wants one row per beam
            "negative_prompt_ids": prompt["input_ids"].repeat_interleave(3, dim=0),
            "negative_prompt_attention_mask": prompt["attention_mask"].repeat_interleave(3, dim=0),
        }
    check_search(kind, 2, num_beams=3, num_return_sequences=3, **extra)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_processor_is_shown_what_stock_shows(kind: str, batch_size: int) -> None:
    """Call by call: one row of ids and one row of log-probabilities for every beam, from the first step on."""
    model, theirs, mine = double_model(kind), Recorder(), Recorder()
    stock, ours = search_both(
        model, prompts_for(model, kind, batch_size), num_beams=4, max_new_tokens=6, eos_token_id=THREE_ENDS,
        stock_only={"logits_processor": [theirs]}, ours_only={"logits_processor": [mine]},
    )  # fmt: skip
    check_identical(stock, ours)
    assert len(mine.calls) == len(theirs.calls) > 1
    for (my_rows, my_scores), (their_rows, their_scores) in zip(mine.calls, theirs.calls, strict=True):
        assert my_rows.shape[0] == batch_size * 4
        assert my_rows.dtype == their_rows.dtype and torch.equal(my_rows, their_rows)
        torch.testing.assert_close(my_scores, their_scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [EditsInPlace, FavoursItsOwnCount, DependsOnWholeRows])
@pytest.mark.parametrize("kind", BUILDERS)
def test_own_processors(kind: str, own: type[LogitsProcessor]) -> None:
    """Processors of the user's: they may write in place, count, and read whole rows; raw logits stay raw."""
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts_for(model, kind, 3), num_beams=4, num_return_sequences=4, max_new_tokens=7, output_logits=True,
        eos_token_id=THREE_ENDS, stock_only={"logits_processor": [own()]}, ours_only={"logits_processor": [own()]},
    )  # fmt: skip
    check_identical(stock, ours)
    assert all(logits.isfinite().all() for logits in ours.logits)


def test_own_processors_beside_those_of_the_arguments() -> None:
    """A list of the user's is merged with what the arguments switch on, in transformers' order."""
    stock, ours = check_search(
        "llama", logits_processor=LogitsProcessorList([EditsInPlace(), DependsOnWholeRows()]), repetition_penalty=1.3,
        no_repeat_ngram_size=2, renormalize_logits=True,
    )  # fmt: skip
    assert torch.equal(ours.sequences, stock.sequences)


def test_an_edit_in_place_does_not_reach_an_earlier_steps_scores() -> None:
    """What `scores` holds is a copy of each step's own."""
    kept: list[torch.Tensor] = []

    class Spoils(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if kept:
                kept[-1].fill_(123.0)
            kept.append(scores)
            return scores

    stock, ours = check_search("qwen3", logits_processor=[Spoils()])
    assert all((step != 123.0).all() for output in (stock, ours) for step in output.scores)


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_prefix_function_is_asked_what_stock_asks(kind: str) -> None:
    """It is called for every beam of every prompt, with the prompt's number and the beam's ids so far."""
    model = double_model(kind)
    asked: dict[str, list] = {"stock": [], "ours": []}

    def allowed_by(whose: str):
        def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
            asked[whose].append((prompt, ids.tolist()))
            first = 6 + (int(ids[-1]) * 13 + prompt * 5) % 40
            return [EOS, *range(first, first + 30)]

        return allowed

    stock, ours = search_both(
        model, prompts_for(model, kind, 3), num_beams=4, num_return_sequences=4, max_new_tokens=6,
        stock_only={"prefix_allowed_tokens_fn": allowed_by("stock")},
        ours_only={"prefix_allowed_tokens_fn": allowed_by("ours")},
    )  # fmt: skip
    check_identical(stock, ours)
    assert asked["ours"] == asked["stock"]


@pytest.mark.parametrize("width", [2, 5, 16])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_fewer_legal_sequences_than_beams(kind: str, width: int) -> None:
    """A tree of six legal sequences: each is found once; beams beyond are no continuation in both."""
    legal = [[11, 12, EOS], [11, 13, EOS], [14, 15, 16, EOS], [14, 15, 17, EOS], [18, EOS], [19, 11, EOS]]
    model = double_model(kind)
    inputs = prompts_for(model, kind, 2)
    start = 1 if kind == "t5" else inputs["input_ids"].shape[1]

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        sofar = ids[start:].tolist()
        return [one[len(sofar)] for one in legal if one[: len(sofar)] == sofar and len(one) > len(sofar)] or [PAD]

    stock, ours = search_both(
        model, inputs, num_beams=width, num_return_sequences=width, max_new_tokens=5, prefix_allowed_tokens_fn=allowed,
        length_penalty=0.0, early_stopping="never",
    )  # fmt: skip
    theirs, mine = (real_scores(output.sequences_scores).view(2, width) for output in (stock, ours))
    for prompt in range(2):
        real = mine[prompt].isfinite()
        assert int(real.sum()) == min(width, len(legal)) or width < len(legal)
        assert torch.equal(real, theirs[prompt].isfinite())
        torch.testing.assert_close(mine[prompt][real], theirs[prompt][real], rtol=1e-5, atol=1e-5)
        rows = ours.sequences[prompt * width : (prompt + 1) * width][real][:, start:].tolist()
        found = [row[: row.index(EOS) + 1] for row in rows]
        assert all(one in legal for one in found) and len({tuple(one) for one in found}) == len(found)
    check_equal(stock, ours, 1e-5)


def strict_trie(branches: tuple[int, ...], start: int) -> Callable[[int, torch.Tensor], list[int]]:
    """A constraint to a tree that branches so often at each level, then ends. What it never allowed is a KeyError."""
    tree: dict[tuple[int, ...], list[int]] = {}

    def grow(prefix: tuple[int, ...]) -> None:
        depth = len(prefix)
        if depth == len(branches):
            tree[prefix] = [EOS]
            tree[(*prefix, EOS)] = [EOS]  # transformers asks about sequences that ended, too
            return
        first = 10 + 20 * depth + sum(prefix) % 3
        tree[prefix] = list(range(first, first + branches[depth]))
        for token in tree[prefix]:
            grow((*prefix, token))

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        sofar = ids[start:].tolist()
        return tree[tuple(sofar[: sofar.index(EOS) + 1] if EOS in sofar else sofar)]

    grow(())
    return allowed


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [2, 3, 5, 9])
@pytest.mark.parametrize("branches", [(2, 20), (2, 20, 4), (3, 2, 19), (2, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_strict_trie_is_asked_about_legal_prefixes_only(
    kind: str, branches: tuple[int, ...], width: int, early_stopping: bool | str
) -> None:
    """Where fewer tokens are legal than there are beams, the beams to spare are legal as well: nothing else is asked.

    Later levels of the tree have room for all beams again.
    """
    model = double_model(kind)
    inputs = prompts_for(model, kind, 2)
    stock, ours = search_both(
        model, inputs, num_beams=width, num_return_sequences=width, max_new_tokens=len(branches) + 1,
        early_stopping=early_stopping,
        prefix_allowed_tokens_fn=strict_trie(branches, 1 if kind == "t5" else inputs["input_ids"].shape[1]),
    )  # fmt: skip
    check_equal(stock, ours, 1e-5)
    assert ours.sequences_scores.isfinite().any()
