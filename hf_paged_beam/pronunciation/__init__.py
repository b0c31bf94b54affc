"""A small trained model that ships with the package: English spelling in, ARPAbet phonemes out.

`load` gives the model and its tokenizer, `held_out` words to try it on; the prompt is the spelling, one token per
letter. `train` made it, `evaluate` measured it; the folder's README.md is its card.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "model"
HELD_OUT = Path(__file__).parent / "held_out_words.tsv"


def load(dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The pronunciation model, in evaluation mode, and its tokenizer.

    Args:
        dtype: of the weights, which are stored in float16.
    """
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(FOLDER)


def held_out() -> dict[str, list[str]]:
    """300 of the words that training held out: spelling to accepted pronunciations, phonemes joined by blanks."""
    lines = [line.split("\t") for line in HELD_OUT.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {word: accepted.split("|") for word, accepted in lines}
