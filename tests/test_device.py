"""Device and synchronisation, without a GPU.

On ``meta`` tensors there are no values, so that any read of one by the host raises. On the CPU every operation of a
whole search is counted: what the host reads, how many rows a forward pass gets, how large the tensors are.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from comparing import search_both
from tiny_models import (
    BUILDERS,
    DECODER_ONLY,
    DECODERS,
    ENCODER_DECODER,
    VOCABULARY,
    met_model,
    path_of,
    prompts,
    tiny_model,
)
from torch.utils._pytree import tree_map_only
from transformers import (
    EosTokenCriteria,
    LlamaConfig,
    LlamaForCausalLM,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerationMixin
from watching import Watch, forward_rows, watching

from hf_paged_beam import PagedBeamCache
from hf_paged_beam.cache import FoldedStep, folded_attention, parts_of
from hf_paged_beam.cache.index import BeamIndex
from hf_paged_beam.cache.layers import PoolLayer
from hf_paged_beam.generation import linears
from hf_paged_beam.generation.advance import advance
from hf_paged_beam.generation.candidates import best_candidates, sampled_candidates
from hf_paged_beam.generation.decode import DecodeSteps
from hf_paged_beam.generation.history import History
from hf_paged_beam.generation.lengths import LENGTH_NORMALIZATIONS
from hf_paged_beam.generation.prompt import run_prompt
from hf_paged_beam.generation.rules import Rules
from hf_paged_beam.generation.settings import Options, PromptSettings
from hf_paged_beam.generation.state import SearchState
from hf_paged_beam.generation.stopping import CandidateStopping
from hf_paged_beam.versions import CACHE_ARGUMENT, NEWEST_TOKEN

META = torch.device("meta")
FOLDED = [kind for kind in BUILDERS if path_of(kind) == "folded"]
BATCH, WIDTH, PROMPT, STEPS = 3, 7, 23, 5
"""B·W = 21 rows, and a prompt of 23: numbers that no dimension of the tiny models has."""


def no_values(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)


# --- no value is read: steps on meta tensors ---


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("normalization", LENGTH_NORMALIZATIONS)
def test_a_search_step_reads_no_value(normalization: str, early_stopping: bool | str) -> None:
    """Candidates, stopping, advance, history and the stop test run where there is nothing to read."""
    prompt = PromptSettings(num_beams=WIDTH, max_new_tokens=STEPS, length_penalty=0.7, early_stopping=early_stopping)
    rules = Rules([prompt] * BATCH, Options(length_normalization=normalization), num_ends=2, device=META)
    criteria = [MaxLengthCriteria(PROMPT + STEPS), EosTokenCriteria([3, 5]), MaxTimeCriteria(60.0, time.time())]
    stopping = CandidateStopping(StoppingCriteriaList(criteria))
    state, history = SearchState.initial(BATCH, WIDTH, META), History()
    with Watch() as watch:
        for length, rows in ((1, BATCH), (2, BATCH * WIDTH), (3, BATCH * WIDTH)):
            logits = torch.empty(rows, VOCABULARY, device=META)
            candidates = best_candidates(logits, state.running_scores, rules)
            hits = stopping.hits(candidates, PROMPT + length, None, None)
            state, chosen = advance(state, candidates, hits, length=length, rules=rules)
            history.record(candidates, chosen)
            another = rules.takes(state).any()
    assert another.device == META and another.shape == ()
    assert state.running_scores.shape == chosen.tokens.shape == (BATCH, WIDTH)
    assert "read" not in watch.events


@pytest.mark.parametrize("choose", [best_candidates, sampled_candidates])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 2])
def test_candidates_are_chosen_without_a_read(choose: Any, vocabulary: int) -> None:
    """Also where the vocabulary offers fewer continuations than asked for."""
    with Watch() as watch:
        rules = Rules(
            [PromptSettings(num_beams=WIDTH, max_new_tokens=STEPS)] * BATCH, Options(), num_ends=1, device=META
        )
        found = choose(torch.empty(BATCH, vocabulary, device=META), torch.empty(BATCH, 1, device=META), rules)
    assert found.scores.device == META
    assert found.scores.shape == found.tokens.shape == found.parents.shape == (BATCH, 2 * WIDTH)
    assert "read" not in watch.events


def meta_index(steps: int) -> BeamIndex:
    """An index table after some steps, its high-water mark bounded by the host alone."""
    index = BeamIndex(WIDTH)
    index.begin_decode(BATCH, PROMPT, META)
    for step in range(steps):
        highest = index.fork(no_values(BATCH * WIDTH))
        assert highest.shape == () and highest.device == META
        index.set_high_water((step + 1) * WIDTH - 1)
    return index


def test_the_index_table_moves_without_a_read() -> None:
    """Forking, liveness, visibility, positions and rows of the table are tensors all the way."""
    with Watch() as watch:
        index = meta_index(3)
        visible, positions, rows = index.visible(), index.positions(), index.beams.grid(index.rows(PROMPT + 3))
        live, write = index.live(), index.beams.grid(index.write_slots())
        index.drop_pending()
    slots = PROMPT + 3 * WIDTH
    assert visible.shape == (BATCH, WIDTH, slots) and positions.shape == (BATCH, slots)
    assert rows.shape == (BATCH, WIDTH, PROMPT + 3)
    assert live.shape == (BATCH, 3 * WIDTH) and write.shape == (BATCH, WIDTH)
    assert "read" not in watch.events


@pytest.mark.parametrize("batch_size", [1, BATCH])
def test_a_pool_is_written_and_attended_without_a_read(batch_size: int) -> None:
    """Growth, a write of one token per beam, and the folded attention over the pool."""
    index = BeamIndex(WIDTH)
    layer = PoolLayer(index)
    module = LlamaForCausalLM(tiny_model("llama").config).model.layers[0].self_attn
    with Watch() as watch:
        prompt = torch.empty(batch_size, 2, PROMPT, 8, device=META)
        layer.update(prompt, prompt)
        index.begin_decode(batch_size, PROMPT, META)
        for step in range(3):
            index.fork(no_values(batch_size * WIDTH))
            index.set_high_water((step + 1) * WIDTH - 1)
            token = torch.empty(batch_size * WIDTH, 2, 1, 8, device=META)
            with FoldedStep(index) as folded:
                keys, values = layer.update(token, token)
                query = torch.empty(batch_size * WIDTH, 4, 1, 8, device=META)
                attended, _ = folded_attention(module, query, keys, values, None)
                assert folded.all_attended()
    assert keys.shape == (batch_size, 2, PROMPT + 3 * WIDTH, 8)
    assert attended.shape == (batch_size * WIDTH, 1, 4, 8)
    assert "read" not in watch.events


def on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Model inputs without values, the cache's keys included."""
    cache = kwargs[CACHE_ARGUMENT]
    for layer in cache.indexed_layers():
        layer._keys, layer._values = layer._keys.to(META), layer._values.to(META)
    moved = {name: given for name, given in kwargs.items() if name != CACHE_ARGUMENT}
    return {**tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), moved), CACHE_ARGUMENT: cache}


def prompt_that_ran(kind: str, model: torch.nn.Module, *, masked: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """The prompt's ids and the model's inputs after a pass over padded prompts."""
    inputs = prompts(kind, BATCH, PROMPT)
    kwargs: dict[str, Any] = {CACHE_ARGUMENT: PagedBeamCache(model.config, WIDTH), "use_cache": True}
    kwargs[CACHE_ARGUMENT].accept_wide_prompt(False)
    if masked and kind != "whisper":
        kwargs["attention_mask"] = inputs.pop("attention_mask")
    inputs.pop("attention_mask", None)
    if kind in ENCODER_DECODER:
        shown = {**inputs, **({"attention_mask": kwargs["attention_mask"]} if "attention_mask" in kwargs else {})}
        kwargs["encoder_outputs"] = model.get_encoder()(**shown, return_dict=True)
        ids = torch.ones(BATCH, 1, dtype=torch.int64)
    else:
        ids = inputs["input_ids"]
    _, kwargs = run_prompt(model, ids, model.generation_config, kwargs)
    return ids, kwargs


@pytest.mark.parametrize(
    ("kind", "path"), [*((kind, "folded") for kind in FOLDED), *((kind, "gathered") for kind in DECODER_ONLY)]
)
@torch.no_grad()
def test_a_decode_step_of_a_model_reads_no_value(kind: str, path: str) -> None:
    """Two steps of the whole model over the cache; folded, with a mask of the prompt's padding.

    On the gathered path the model's masks are transformers' own, which reads what it is given (BART gives it a mask of
    ones even where the caller gave none, so that encoder-decoder models are left out there).
    """
    if not NEWEST_TOKEN:
        pytest.skip("this release reads the newest position when it prepares a step's inputs")
    model = tiny_model(kind)
    model.config.pad_token_id = None  # GPT-2 would look for padding where it gets no mask
    ids, kwargs = prompt_that_ran(kind, model, masked=path == "folded")
    model.to(META)
    kwargs, cache = on_meta(kwargs), kwargs[CACHE_ARGUMENT]
    cache.begin_decode(BATCH, META)
    decode = DecodeSteps(
        model, cache, kwargs, beam_attention=path, wants_maps=False, may_try=False, parts=parts_of(model)
    )
    with Watch() as watch:
        for step in range(2):
            cache.fork(no_values(BATCH * WIDTH))
            cache.grow((step + 1) * WIDTH - 1)
            outputs = decode(no_values(BATCH * WIDTH), no_values(BATCH * WIDTH, ids.shape[1] + step + 1))
    assert outputs.logits.shape == (BATCH * WIDTH, 1, VOCABULARY)
    assert outputs.logits.device == META
    assert "read" not in watch.events


# --- what the host reads in a whole search ---

SETTINGS: dict[str, dict[str, Any]] = {
    "tensor": {"return_dict_in_generate": False, "output_scores": False},
    "object": {},
    "processors": {"repetition_penalty": 1.3, "min_new_tokens": 2, "temperature": 0.7},
    "sampling": {"do_sample": True, "top_k": 20},
    "eleven ends": {"eos_token_id": list(range(5, 16))},
    "never": {"early_stopping": "never", "length_penalty": -0.5},
    "gathered": {"beam_attention": "gathered"},
    "one prompt": {},
}


def watched_search(model: Any, inputs: dict, **settings: Any) -> tuple[Watch, Any]:
    """A search, by the general ``generate`` (Whisper's own reads values of its own)."""
    call = {"num_beams": WIDTH, "max_new_tokens": STEPS, "return_dict_in_generate": True, "output_scores": True,
            "do_sample": False, "custom_generate": "hf_paged_beam"}  # fmt: skip
    model.config.pad_token_id = None  # GPT-2 would look for padding in the ids of every forward pass
    with watching(model) as watch:
        output = GenerationMixin.generate(model, **inputs, **{**call, **settings})
    return watch, output


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_host_reads_one_value_per_step(kind: str, setting: str) -> None:
    """The stop test, once per step; after the search the longest length. What the cache holds is counted when asked.

    Reads before the loop, and within the prompt's forward pass, are transformers' own preparation.
    """
    batch_size = 1 if setting == "one prompt" else BATCH
    watch, _ = watched_search(met_model(kind), prompts(kind, batch_size, PROMPT), **SETTINGS[setting])
    within, after = watch.reads_between_forwards()
    assert len(within) == len(after) >= 3
    if setting != "gathered" and kind in FOLDED:  # there, masks are transformers' own
        assert within[1:] == [0] * (len(within) - 1)
    prepared = 0 if NEWEST_TOKEN else 1  # older releases read the newest position when they prepare a step's inputs
    assert after[:-1] == [1 + prepared] * (len(after) - 1)
    assert after[-1] == 2


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_work_of_a_step_does_not_depend_on_the_width(kind: str) -> None:
    """As many operations with 3 beams as with 40: nothing is done beam by beam. Only pools grow more often."""

    def operations(width: int, first: int) -> list[int]:
        watch, _ = watched_search(met_model(kind), prompts(kind, BATCH, PROMPT), num_beams=width, eos_token_id=None)
        phases = [phase for phase, *_ in watch.made]
        return [phases.count(phase) for phase in range(first, 2 * STEPS, 2)]

    assert operations(3, first=2) == operations(40, first=2)
    assert abs(max(operations(3, first=3)) - max(operations(40, first=3))) < 20


# --- how many rows there are ---


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_rows_of_each_forward_pass(kind: str, setting: str) -> None:
    """The prompt and the encoder run once, at one row per prompt; each decode step at one row per beam."""
    model = met_model(kind)
    batch_size = 1 if setting == "one prompt" else BATCH
    encoder = model.get_encoder() if kind in ENCODER_DECODER else torch.nn.Identity()
    call = {"num_beams": WIDTH, "max_new_tokens": STEPS, "custom_generate": "hf_paged_beam", **SETTINGS[setting]}
    with forward_rows(model) as rows, forward_rows(encoder) as encoder_rows:
        GenerationMixin.generate(model, **prompts(kind, batch_size, PROMPT), **call)
    assert rows == [batch_size] + [batch_size * WIDTH] * (len(rows) - 1)
    assert len(rows) >= 3
    assert encoder_rows == ([batch_size] if kind in ENCODER_DECODER else [])


@pytest.mark.parametrize("kind", BUILDERS)
def test_nothing_at_one_row_per_beam_while_the_prompt_runs(kind: str) -> None:
    """From the beginning of the call to the end of the prompt's pass: no hidden states, keys or logits of B·W rows."""
    watch, _ = watched_search(met_model(kind), prompts(kind, BATCH, PROMPT))
    early = [entry for entry in watch.made if entry[0] <= 1 and entry[3].is_floating_point]
    assert len(early) > 50
    for _, name, shape, _ in early:
        assert not shape or shape[0] != BATCH * WIDTH, f"{name} made {tuple(shape)}"


@pytest.mark.parametrize("kind", FOLDED)
def test_no_keys_per_beam_while_decoding(kind: str) -> None:
    """The largest tensor of a decode step is smaller than one layer's prompt keys at one row per beam."""
    config = tiny_model(kind).config.get_text_config(decoder=True)
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    prompt_columns = 20 if kind == "whisper" else PROMPT
    keys_per_beam = BATCH * WIDTH * key_heads * prompt_columns * 8  # heads have 8 entries in all tiny models
    watch, _ = watched_search(met_model(kind), prompts(kind, BATCH, PROMPT))
    sizes = [shape.numel() for phase, _, shape, _ in watch.made if phase >= 3]
    assert len(sizes) > 100
    assert max(sizes) < keys_per_beam


@pytest.mark.parametrize("kind", FOLDED)
def test_attention_reads_each_key_once_per_prompt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention call of the search, cross-attention included, gets keys at `B` rows, as they lie in the pool."""
    called = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noting(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        called.append((query.shape, key.shape))
        return attention(query, key, *args, **kwargs)

    model = met_model(kind)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    watched_search(model, prompts(kind, BATCH, PROMPT))
    assert {key[0] for _, key in called} == {BATCH}
    folded = [query for query, _ in called if query[2] % WIDTH == 0]
    layers_read = 4 if kind in ENCODER_DECODER else 2
    assert len(folded) == (STEPS - 1) * layers_read


@pytest.mark.parametrize("setting", ["tensor", "processors", "object"])
def test_log_probabilities_are_made_once_per_step(setting: str) -> None:
    """One log-softmax of a step's logits; without processors nothing else of their size, and memory for it once."""
    vocabulary = 30_000
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**DECODERS, "vocab_size": vocabulary})).eval()
    watch, _ = watched_search(model, prompts("llama", BATCH, PROMPT), **SETTINGS[setting])
    shapes = [tuple(shape) for _, name, shape, _ in watch.made if "log_softmax" in name]
    assert shapes == [(BATCH, vocabulary)] + [(BATCH * WIDTH, vocabulary)] * (STEPS - 1)
    if setting == "tensor":
        views = ("view", "_unsafe_view", "select", "slice", "detach", "unsqueeze", "t", "transpose")
        large = [
            name.removeprefix("aten::").split(".")[0]
            for _, name, shape, dtype in watch.made
            if dtype == torch.float32 and shape.numel() >= BATCH * WIDTH * vocabulary and shape[0] != vocabulary
        ]
        made = [name for name in large if name not in views]
        with torch.no_grad():
            product = "mkldnn::_linear_pointwise" if linears.is_available() else "mm"
        assert sorted(made) == ["empty_like"] + ["log_softmax"] * (STEPS - 1) + [product] * (STEPS - 1), made


@pytest.mark.parametrize("kind", DECODER_ONLY)
def test_the_watched_search_is_the_right_one(kind: str) -> None:
    """What is measured above is the search that equals transformers' own, by the folded path."""
    stock, ours = search_both(tiny_model(kind), prompts(kind, BATCH, PROMPT), num_beams=WIDTH, max_new_tokens=STEPS)
    assert torch.equal(stock.sequences, ours.sequences)
    assert ours.beam_path == "folded"
