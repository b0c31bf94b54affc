"""Real pretrained models: a chat model on chats, and a speech model on speech, equal to transformers' own search."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import real_models
import torch
from comparing import check_equal, check_rows_of_each_prompt, search_both
from transformers import EncoderDecoderCache
from watching import forward_rows

from hf_paged_beam import beam_search, disable, enable

pytestmark = pytest.mark.real_model

NAME = "hf_paged_beam"
WHOLE = {"return_dict_in_generate": True, "output_scores": True}


# --- SmolLM2 ---

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours, separated by commas.",
    "Continue with the next five numbers: one, two, three,",
)


def chats(*questions: str) -> dict[str, torch.Tensor]:
    """Chat prompts of several lengths, padded on the left."""
    _, tokenizer = real_models.smollm2()
    talks = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]
    return dict(tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))


@pytest.mark.parametrize(
    ("width", "questions", "tokens"), [(5, QUESTIONS, 12), (20, QUESTIONS[:1], 12), (50, QUESTIONS[1:2], 6)]
)
def test_smollm2_equals_stock(width: int, questions: tuple[str, ...], tokens: int) -> None:
    """Every sequence and score of every beam, from prompts that ran once and keys that are held once."""
    model, tokenizer = real_models.smollm2()
    inputs = chats(*questions)
    call = {**inputs, **WHOLE, "num_beams": width, "num_return_sequences": width, "max_new_tokens": tokens,
            "do_sample": False}  # fmt: skip
    stock = model.generate(**call)
    model.generate(**{**call, "max_new_tokens": 2}, custom_generate=NAME)  # this kind of model is met
    with forward_rows(model) as rows:
        ours = model.generate(**call, custom_generate=NAME)
    check_equal(stock, ours)
    check_rows_of_each_prompt(stock, ours, width)
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=1e-4, rtol=0)
    best = [tokenizer.batch_decode(output.sequences[::width], skip_special_tokens=True) for output in (stock, ours)]
    assert best[0] == best[1]
    assert ours.beam_path == "folded"
    assert rows[0] == len(questions) and set(rows[1:]) == {width * len(questions)}
    assert ours.kv_usage.bytes_held < ours.kv_usage.bytes_separate / 2


def test_smollm2_answers() -> None:
    """The search gives an answer that a reader would accept, also with another length form and an enabled model."""
    model, tokenizer = real_models.smollm2()
    inputs = chats(QUESTIONS[0])
    try:
        output = enable(model).generate(**inputs, num_beams=4, max_new_tokens=12, length_normalization="gnmt")
    finally:
        disable(model)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer


# --- Whisper ---

WIDTH = 5
OBJECT = {"num_beams": WIDTH, "num_return_sequences": 2, "max_new_tokens": 8, **WHOLE}


def words(text: str) -> list[str]:
    """A text's words as a transcript of speech writes them."""
    return re.sub(r"[^a-z' ]", "", text.lower().replace("-", " ").replace("mr.", "mister")).split()


def word_errors(heard: list[str], spoken: list[str]) -> int:
    """Edit distance between two lists of words."""
    row = list(range(len(heard) + 1))
    for count, word in enumerate(spoken, start=1):
        previous, row = row, [count]
        for place, other in enumerate(heard):
            row.append(min(previous[place] + (other != word), previous[place + 1] + 1, row[place] + 1))
    return row[-1]


def features(*numbers: int) -> torch.Tensor:
    """Spectrograms of some of the clips."""
    _, processor, clips = real_models.whisper()
    audio = [clips[number][1] for number in numbers]
    return processor(audio, sampling_rate=16000, return_tensors="pt").input_features


@lru_cache
def stock_transcript() -> torch.Tensor:
    """All clips by transformers' own search."""
    return real_models.whisper()[0].generate(features(*range(5)), num_beams=WIDTH)


@lru_cache
def stock_object() -> Any:
    """Two sequences of a short clip by transformers' own search, with everything that Whisper returns."""
    return real_models.whisper()[0].generate(features(1), **OBJECT)


@pytest.fixture
def enabled_whisper() -> Iterator[Any]:
    """The shared model, enabled for one test."""
    model = enable(real_models.whisper()[0])
    yield model
    disable(model)


def test_whisper_equals_stock_and_hears_what_was_said() -> None:
    """The same tokens, hence the same text, and at most one word in eight is not the transcript's."""
    model, processor, clips = real_models.whisper()
    ours = model.generate(features(*range(5)), num_beams=WIDTH, custom_generate=NAME)
    assert torch.equal(ours, stock_transcript())
    heard = [words(text) for text in processor.batch_decode(ours, skip_special_tokens=True)]
    spoken = [words(transcript) for _, _, transcript in clips]
    errors = sum(word_errors(one, other) for one, other in zip(heard, spoken, strict=True))
    assert errors / sum(map(len, spoken)) < 1 / 8


def test_enabled_whisper(enabled_whisper: Any) -> None:
    """Plain ``generate``, Whisper's own preparation included: the same tokens, and the encoder sees each clip once."""
    enabled_whisper.generate(features(1, 2), num_beams=WIDTH)  # a model's first search tries paths on a few rows
    with forward_rows(enabled_whisper.get_encoder()) as encoder_rows, forward_rows(enabled_whisper) as rows:
        ours = enabled_whisper.generate(features(1, 2), num_beams=WIDTH)
    expected = stock_transcript()[1:3, : ours.shape[1]]
    assert torch.equal(ours, expected)
    assert encoder_rows == [2]
    assert rows[:2] == [2, 2 * WIDTH] and set(rows[1:]) <= {
        2 * WIDTH,
        WIDTH,
    }  # the shorter clip is done first, and leaves


def test_whisper_with_timestamps(enabled_whisper: Any) -> None:
    """Segments with the same times and texts, by Whisper's own cutting of the result."""
    model, inputs = enabled_whisper, features(4)
    call = {"num_beams": WIDTH, "return_timestamps": True, "return_segments": True}
    ours = model.generate(inputs, **call)
    stock = disable(model).generate(inputs, **call)
    assert torch.equal(ours["sequences"], stock["sequences"])
    for our_clip, stock_clip in zip(ours["segments"], stock["segments"], strict=True):
        for our_segment, stock_segment in zip(our_clip, stock_clip, strict=True):
            assert our_segment["start"] == stock_segment["start"] and our_segment["end"] == stock_segment["end"]
            assert torch.equal(our_segment["tokens"], stock_segment["tokens"])
    assert any(segment["end"] > 1 for clip in ours["segments"] for segment in clip)


@pytest.mark.parametrize("custom_generate", [NAME, beam_search])
def test_whisper_returns_objects_and_several_sequences(custom_generate: Any) -> None:
    """`num_return_sequences` and an output object, which Whisper splits by row and puts together again."""
    stock = stock_object()
    ours = real_models.whisper()[0].generate(features(1), **OBJECT, custom_generate=custom_generate)
    assert torch.equal(ours.sequences, stock.sequences) and ours.sequences.shape[0] == 2
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=1e-4, rtol=0)
    assert torch.equal(ours.beam_indices, stock.beam_indices)
    assert len(ours.scores) == len(stock.scores)


@pytest.mark.parametrize("width", [5, 50])
def test_whisper_hears_the_same_at_any_width(width: int) -> None:
    """Every sequence and score of every beam; the best of them is the transcript, from keys that are held once."""
    model, processor, _ = real_models.whisper()
    settings = model.generation_config
    start = torch.tensor([[settings.decoder_start_token_id, settings.no_timestamps_token_id]])
    call = {"decoder_input_ids": start, "num_beams": width, "num_return_sequences": width, "max_new_tokens": 12}
    stock, ours = search_both(model, {"input_features": features(1)}, **call)
    check_equal(stock, ours)
    check_rows_of_each_prompt(stock, ours, width, tolerance=1e-4)
    assert ours.beam_path == "folded"
    rows = [ours.sequences[0].tolist(), stock_transcript()[1].tolist()]
    heard, transcript = processor.batch_decode(rows, skip_special_tokens=True)
    assert heard == transcript
    assert ours.kv_usage.bytes_held < 1.25 * ours.kv_usage.bytes_separate / width


def check_parts(theirs: Any, mine: Any, where: str = "") -> None:
    """Assert that what Whisper returns is the same in every part that transformers' own search gives."""
    assert type(mine) is type(theirs), f"{where}: stock {type(theirs)}, ours {type(mine)}"
    if isinstance(theirs, dict):
        for name, part in theirs.items():
            check_parts(part, mine[name], f"{where}.{name}")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for number, (part, my_part) in enumerate(zip(theirs, mine, strict=True)):
            check_parts(part, my_part, f"{where}[{number}]")
    elif isinstance(theirs, EncoderDecoderCache):
        for name in ("self_attention_cache", "cross_attention_cache"):
            states = [[(layer.keys, layer.values) for layer in getattr(cache, name).layers] for cache in (theirs, mine)]
            check_parts(*states, f"{where}.{name}")
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3, msg=lambda message: f"{where}: {message}")
    else:
        assert mine == theirs, where


def long_recording() -> dict[str, torch.Tensor]:
    """All clips and some of them again, half a second apart: longer than the half minute that the model hears."""
    _, processor, clips = real_models.whisper()
    pause = np.zeros(8000, dtype=np.float32)
    audio = np.concatenate([part for number in (1, 2, 3, 4, 0, 1, 4) for part in (clips[number][1], pause)])
    assert len(audio) > 30 * 16000
    call = {"truncation": False, "padding": "longest", "return_attention_mask": True}
    return dict(processor(audio, sampling_rate=16000, return_tensors="pt", **call))


@pytest.mark.parametrize("conditioned", [False, True])
def test_whisper_long_form(conditioned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows one after the other, each searched, or sampled where the search's text repeats itself too much.

    Every field of every segment is the same, and what the search gave for it.
    """
    model, inputs, decisions = real_models.whisper()[0], long_recording(), []
    judge = type(model)._need_fallback

    def judged(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        decisions.append(judge(self, *args, **kwargs))
        return decisions[-1]

    monkeypatch.setattr(type(model), "_need_fallback", judged)
    call = {
        **inputs, "num_beams": 2, "return_timestamps": True, "return_segments": True, "temperature": (0.0, 0.2),
        "condition_on_prev_tokens": conditioned, "compression_ratio_threshold": 0.95, "logprob_threshold": -1.0,
        "no_speech_threshold": 0.6,
    }  # fmt: skip
    results = []
    for custom_generate in (None, NAME):
        torch.manual_seed(0)
        results.append(model.generate(**call, custom_generate=custom_generate))
    check_parts(*results)
    segments = results[1]["segments"][0]
    assert len(segments) > 4 and segments[-1]["end"] > 30
    fallbacks = [needed for needed, _ in decisions]
    assert any(fallbacks) and not all(fallbacks)
    assert fallbacks[: len(fallbacks) // 2] == fallbacks[len(fallbacks) // 2 :]


@pytest.mark.parametrize(
    "asked",
    [
        {"return_timestamps": True, "return_segments": True, "num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, **WHOLE},
    ],
    ids=["segments", "several"],
)
def test_whisper_token_timestamps(asked: dict[str, Any]) -> None:
    """Times of tokens, from the attention maps of a search, in segments and with several sequences."""
    model, inputs = real_models.whisper()[0], features(1)
    assert model.generation_config.alignment_heads
    call = {**asked, "max_new_tokens": 12, "return_token_timestamps": True}
    stock, ours = (model.generate(inputs, **call, custom_generate=name) for name in (None, NAME))
    times = ours["segments"][0][0]["token_timestamps"] if "segments" in ours else ours["token_timestamps"]
    assert times.amax() > 1
    for name in stock:
        check_parts(stock[name], ours[name], name)
