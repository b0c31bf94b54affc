"""A small trained model that ships with the package: English spelling in, ARPAbet phonemes out.

`load` gives the model and its tokenizer; the prompt is the spelling, one token per letter. `train` made it, `evaluate`
measured it; the folder's README.md is its card.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "model"


def load(dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The pronunciation model, in evaluation mode, and its tokenizer.

    Args:
        dtype: of the weights, which are stored in float16.
    """
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(FOLDER)
