"""Real models for tests, loaded once per run; the test is skipped where they cannot be fetched.

Import this from test files only: ``smollm2()`` and ``whisper()`` call ``pytest.skip`` with the reason when
``fetch_models`` cannot provide a model, for example without a network.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

# isort: split
import fetch_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, WhisperForConditionalGeneration, WhisperProcessor

Clip = tuple[str, np.ndarray, str]


def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct in float32 on the CPU, and its tokenizer (padding on the left, for batches).

    The objects are shared by all tests of a run: leave their settings as they are, or put them back.
    """
    loaded = _load_smollm2()
    if isinstance(loaded, fetch_models.FetchError):
        pytest.skip(f"SmolLM2 is not available: {loaded}")
    return loaded


def whisper() -> tuple[WhisperForConditionalGeneration, WhisperProcessor, list[Clip]]:
    """Return Whisper tiny.en in float32 on the CPU, its processor, and (name, audio, transcript) of five clips.

    ``processor(audio, sampling_rate=16000, return_tensors="pt").input_features`` is what ``generate`` takes, and
    ``processor.batch_decode`` turns its result into text. The objects are shared by all tests of a run.
    """
    loaded = _load_whisper()
    if isinstance(loaded, fetch_models.FetchError):
        pytest.skip(f"Whisper is not available: {loaded}")
    return loaded


@lru_cache
def _load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | fetch_models.FetchError:
    """Load the language model; a failure is returned, so that it is cached and not tried again by every test."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder = fetch_models.fetch_smollm2(fetch_models.MODELS_FOLDER)
    except fetch_models.FetchError as error:
        return error
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


@lru_cache
def _load_whisper() -> tuple[WhisperForConditionalGeneration, WhisperProcessor, list[Clip]] | fetch_models.FetchError:
    """Load the speech model and the clips; a failure is returned, like that of ``_load_smollm2``."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    try:
        folder = fetch_models.fetch_whisper(fetch_models.MODELS_FOLDER)
        clips_folder = fetch_models.fetch_clips(fetch_models.MODELS_FOLDER)
    except fetch_models.FetchError as error:
        return error
    spoken = fetch_models.transcripts(clips_folder)
    clips = [(name, fetch_models.read_clip(clips_folder / f"{name}.wav"), spoken[name]) for name in sorted(spoken)]
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    return model, WhisperProcessor.from_pretrained(folder), clips
