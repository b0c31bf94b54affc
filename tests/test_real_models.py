"""Real pretrained models: a chat model on chats, and a speech model on speech, equal to transformers' own search."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import real_models
import torch
from comparing import check_equal, check_rows_of_each_prompt
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


@pytest.mark.parametrize(("width", "questions"), [(5, QUESTIONS), (20, QUESTIONS[:1])])
def test_smollm2_equals_stock(width: int, questions: tuple[str, ...]) -> None:
    """Every sequence and score of every beam, from prompts that ran once and keys that are held once."""
    model, _ = real_models.smollm2()
    inputs = chats(*questions)
    call = {**inputs, **WHOLE, "num_beams": width, "num_return_sequences": width, "max_new_tokens": 12,
            "do_sample": False}  # fmt: skip
    stock = model.generate(**call)
    model.generate(**{**call, "max_new_tokens": 2}, custom_generate=NAME)  # this kind of model is met
    with forward_rows(model) as rows:
        ours = model.generate(**call, custom_generate=NAME)
    check_equal(stock, ours)
    check_rows_of_each_prompt(stock, ours, width)
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=1e-4, rtol=0)
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
    with forward_rows(enabled_whisper.get_encoder()) as encoder_rows, forward_rows(enabled_whisper) as rows:
        ours = enabled_whisper.generate(features(1, 2), num_beams=WIDTH)
    expected = stock_transcript()[1:3, : ours.shape[1]]
    assert torch.equal(ours, expected)
    assert encoder_rows == [2]
    assert rows[0] == 2 and set(rows[1:]) == {2 * WIDTH}


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
