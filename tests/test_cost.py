"""What a search does, counted, so that speed cannot rot unseen: no seconds here.

Forward passes and their rows, values that the host reads, tensors of the size of a step's logits, copies of the pools,
captures, products by oneDNN.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, met_model, prompts
from transformers import LlamaConfig, LlamaForCausalLM
from watching import Watch, forward_rows, watching

from hf_paged_beam.cache import layers
from hf_paged_beam.generation import candidates, capture, linears
from hf_paged_beam.versions import NEWEST_TOKEN

WIDTH, PROMPT, STEPS, VOCABULARY = 9, 21, 12, 20_000
"""Numbers that no dimension of the tiny models has."""

CALL: dict[str, Any] = {"num_beams": WIDTH, "max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None,
                        "custom_generate": "hf_paged_beam"}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama with a large vocabulary, of which it is known that it can be folded."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**DECODERS, "vocab_size": VOCABULARY})).eval()
    model.generate(**prompts("llama", 1, PROMPT), **CALL)
    return model


def watched(model: Any, batch_size: int = 1, **settings: Any) -> Watch:
    with watching(model) as watch:
        model.generate(**prompts("llama", batch_size, PROMPT), **CALL, **settings)
    return watch


def test_forward_passes_and_rows(model: Any) -> None:
    """One pass for the prompt, at one row, and one for each further token, at a row per beam."""
    with forward_rows(model) as rows:
        model.generate(**prompts("llama", 1, PROMPT), **CALL)
    assert rows == [1] + [WIDTH] * (STEPS - 1)


def test_values_that_the_host_reads(model: Any) -> None:
    """None within a decode step, one after each pass, and one more after the last."""
    within, after = watched(model).reads_between_forwards()
    assert within[1:] == [0] * (STEPS - 1)
    prepared = 0 if NEWEST_TOKEN else 1  # older releases read the newest position when they prepare a step's inputs
    assert after == [1 + prepared] * (STEPS - 1) + [2]


def test_tensors_of_the_size_of_the_logits(model: Any) -> None:
    """The logits, and their log-probabilities in memory that is made once; a pass reads them again only by blocks."""
    views = ("view", "_unsafe_view", "select", "slice", "detach", "unsqueeze", "t", "transpose", "unfold")
    made = Counter(
        name.removeprefix("aten::").split(".")[0]
        for phase, name, shape, dtype in watched(model).made
        if phase >= 2 and dtype == torch.float32 and shape.numel() >= WIDTH * VOCABULARY and shape[0] != VOCABULARY
    )
    for view in views:
        made.pop(view, None)
    products = sum(made.pop(name, 0) for name in ("mm", "mkldnn::_linear_pointwise"))
    assert products == STEPS - 1
    assert made == {"log_softmax": STEPS - 1, "empty_like": 1}


def test_candidates_read_few_scores_twice(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection's largest tensor beside the log-probabilities is that of all blocks' maxima, or of the best blocks."""
    monkeypatch.setattr(candidates, "_SMALL", 0)
    log_probs, running = torch.randn(WIDTH, VOCABULARY), torch.randn(1, WIDTH)
    count = 2 * WIDTH
    with Watch() as watch:
        found = candidates.largest(log_probs, running, count, None)
    blocks = -(-VOCABULARY // candidates._BLOCK)
    largest = max(
        shape.numel() for _, name, shape, _ in watch.made if not name.startswith(("aten::view", "aten::slice"))
    )
    assert found[0].shape == (1, count)
    assert largest <= max(WIDTH * blocks, count * candidates._BLOCK)


def test_copies_of_the_pools(model: Any) -> None:
    """A pool is copied when it grows, which is rare, and never else; at most `GROWTH` of it is spare."""
    config = model.config
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    pools = [
        (phase, shape[2])
        for phase, name, shape, dtype in watched(model).made
        if phase >= 3 and name == "aten::cat" and len(shape) == 4 and shape[0] == 1 and shape[1::2] == (heads, size)
    ]
    sizes = sorted({slots for _, slots in pools})
    assert len(pools) == 2 * config.num_hidden_layers * len(sizes)  # keys and values of each layer, once for each size
    assert 1 <= len(sizes) <= STEPS // 2
    for before, after in itertools.pairwise(sizes):
        assert after - before >= layers.LEAST_SPARE


def test_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for single prompts and one for several, whatever the numbers of beams, prompts, tokens and slots."""
    monkeypatch.setattr(capture, "BACKEND", "eager")
    model = met_model("llama")
    kept = capture.captures_of(model)
    for width, prompt, steps in ((3, 5, 4), (7, 30, 9), (20, 11, 12)):
        call = {**CALL, "num_beams": width, "max_new_tokens": steps, "compile": True}
        model.generate(**prompts("llama", 1, prompt), **call)
    assert kept.captured == 1
    for batch_size, width in ((2, 4), (3, 7)):
        model.generate(**prompts("llama", batch_size, 9), **{**CALL, "num_beams": width, "compile": True})
    assert kept.captured == 2


@pytest.mark.as_written
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_products_by_one_dnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All linear layers that are large enough, in every pass; packed once, however many calls there are."""
    with torch.no_grad():
        if not linears.is_available():
            pytest.skip("oneDNN is not the faster one on this processor")
    monkeypatch.setattr(linears, "_SMALLEST", 1)
    model = met_model("llama")
    layers_per_pass = 7 * model.config.num_hidden_layers + 1
    for settings, packed in (({}, 0), ({"prepack": True}, layers_per_pass), ({"prepack": True}, 0)):
        names = Counter(name for _, name, _, _ in watched(model, **settings).made)
        assert names["mkldnn::_linear_pointwise"] == layers_per_pass * STEPS
        assert names["aten::mm"] == names["aten::addmm"] == 0
        assert names["mkldnn::_reorder_linear_weight"] == packed
