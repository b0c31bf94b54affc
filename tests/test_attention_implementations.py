"""Whatever attention the user chose runs over the prompt; the beams are folded all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import check_equal, search_both
from tiny_models import path_of, prompts, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CALL = dict(num_beams=5, num_return_sequences=5, max_new_tokens=6)


class Counted:
    """An attention function that notes how many query positions it was called with."""

    def __init__(self, attend: Callable):
        self.attend = attend
        self.queries: list[int] = []

    def __call__(self, module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.queries.append(query.shape[2])
        return self.attend(module, query, *args, **kwargs)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "bart"])
def test_the_prompt_keeps_the_users_choice(kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to stock under the same choice, which sees the prompt once and no decode step. Nothing is compiled here."""
    if path_of(kind) != "folded":
        pytest.skip("this release's attention of its own has no choice")
    model = tiny_model(kind)
    model.set_attn_implementation(implementation)
    with torch.compiler.set_stance("force_eager"):
        stock, ours = search_both(model, prompts(kind, 2, length=9), **CALL)
    check_equal(stock, ours)
    assert ours.beam_path == "folded" and model.config._attn_implementation == implementation
    if implementation == "eager":  # no function of the registry
        return
    counted = Counted(ALL_ATTENTION_FUNCTIONS[implementation])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, implementation, counted)
    with torch.compiler.set_stance("force_eager"):
        model.generate(**prompts(kind, 2, length=9), **CALL, custom_generate="hf_paged_beam")
    layers = {"bart": 2 + 2 + 2}.get(kind, 2)  # the encoder's, and the decoder's two kinds
    assert len(counted.queries) == layers
