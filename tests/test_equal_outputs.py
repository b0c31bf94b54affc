"""What a search returns is what transformers' own returns: fields, shapes, dtypes, and the cache in its own layout."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from comparing import check_equal, check_identical, returned_cache, search_both
from tiny_models import BUILDERS, DECODER_ONLY, ENCODER_DECODER, EOS, double_model, path_of, prompts_for, tiny_model
from transformers import LogitsProcessor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerationMixin,
)

from hf_paged_beam.versions import CACHE_ARGUMENT

THREE_ENDS = [EOS, 20, 30]
ELEVEN_ENDS = [EOS, *range(20, 30)]
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
WINDOWED = ("mistral", "gemma3")
SEARCH = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 7, "eos_token_id": THREE_ENDS}


def eager_double(kind: str) -> Any:
    """A float64 model whose attention can return its maps.

    Its softmax is taken in float32, where the mask of a padded query is -inf throughout, so that transformers' own
    result on padding is NaN: prompts for it are not padded.
    """
    return eager(kind, torch.float64)


def eager(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model(kind, dtype=dtype)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("asked", [*((name,) for name in OUTPUTS), (), OUTPUTS])
@pytest.mark.parametrize("kind", BUILDERS)
def test_every_field_is_stocks(kind: str, asked: tuple[str, ...]) -> None:
    """Each output alone, none and all: the same fields are filled, with equal tensors of equal shape and dtype."""
    model = eager_double(kind)
    wanted = {name: name in asked for name in OUTPUTS}
    stock, ours = search_both(model, prompts_for(model, kind, 3, padded=False), **SEARCH, **wanted)
    check_identical(stock, ours)
    expected = GenerateBeamEncoderDecoderOutput if kind in ENCODER_DECODER else GenerateBeamDecoderOnlyOutput
    assert isinstance(ours, expected)
    assert (ours.sequences_scores is None) == ("output_scores" not in asked)
    assert ours.beam_indices.dtype == torch.int32
    assert ours.beam_path == ("gathered" if "output_attentions" in asked else path_of(kind))


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_field_of_a_padded_batch(kind: str) -> None:
    """Attention maps and hidden states at padded positions are stock's, too."""
    model = eager(kind)
    stock, ours = search_both(model, prompts_for(model, kind, 3), **SEARCH, **dict.fromkeys(OUTPUTS, True))
    check_identical(stock, ours, 2e-4)


@pytest.mark.parametrize("kind", BUILDERS)
def test_shapes_of_attentions_and_hidden_states(kind: str) -> None:
    """One row per beam from the first step on; later steps have one query each."""
    model, width, batch_size = eager_double(kind), 4, 2
    stock, ours = search_both(
        model, prompts_for(model, kind, batch_size, padded=False), num_beams=width, max_new_tokens=4, min_new_tokens=4,
        output_attentions=True, output_hidden_states=True,
    )  # fmt: skip
    prefix = "decoder_" if kind in ENCODER_DECODER else ""
    attentions, states = ours[prefix + "attentions"], ours[prefix + "hidden_states"]
    if not stock[prefix + "attentions"][0]:
        pytest.skip("this release of transformers gives no attention maps for this model")
    prompt = 1 if kind in ENCODER_DECODER else 7
    assert len(attentions) == len(states) == 4
    for step in range(4):
        queries, keys = (prompt, prompt) if step == 0 else (1, prompt + step)
        assert len(attentions[step]) == 2 and len(states[step]) == 3
        assert all(part.shape[0] == batch_size * width for part in (*attentions[step], *states[step]))
        assert all(part.shape[1] == queries for part in states[step])
        assert attentions[step][-1].shape[2] == queries
        assert attentions[step][-1].shape[3] == keys or kind == "mistral"  # its last layer, too, has a window


@pytest.mark.parametrize("kind", BUILDERS)
def test_hidden_states_and_logits_on_both_paths(kind: str) -> None:
    """Folded or gathered, each beam's row holds that beam's states."""
    model = double_model(kind)
    call = {**SEARCH, "output_logits": True, "output_hidden_states": True}
    for path in {path_of(kind), "gathered"}:
        stock, ours = search_both(model, prompts_for(model, kind, 2), **call, ours_only={"beam_attention": path})
        check_identical(stock, ours)
        assert ours.beam_path == path


@pytest.mark.parametrize("kind", BUILDERS)
def test_beams_of_each_prompt_are_its_own(kind: str) -> None:
    """`beam_indices` cover generated tokens only; prompt b names beams b·W to (b+1)·W - 1, and -1 after the end."""
    model, width, batch_size = double_model(kind), 5, 4
    _, ours = search_both(
        model, prompts_for(model, kind, batch_size), num_beams=width, num_return_sequences=width, max_new_tokens=8,
        eos_token_id=ELEVEN_ENDS, length_penalty=0.0,
    )  # fmt: skip
    inside = ours.beam_indices >= 0
    prompt = torch.arange(batch_size).repeat_interleave(width).unsqueeze(1)
    assert torch.equal(ours.beam_indices[inside] // width, prompt.expand_as(inside)[inside])
    assert (ours.beam_indices[~inside] == -1).all() and not inside.all()
    assert (inside.int().diff(dim=1) <= 0).all()
    assert (ours.beam_indices[:, 0] == prompt[:, 0] * width).all()  # only the first beam runs at the first step


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 2.0])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bart", "t5"])
def test_transition_scores(kind: str, length_penalty: float, early_stopping: bool) -> None:
    """`compute_transition_scores` gives what it gives on stock's output, and adds up to `sequences_scores`."""
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts_for(model, kind, 3), num_beams=4, num_return_sequences=4, max_new_tokens=9,
        eos_token_id=ELEVEN_ENDS, length_penalty=length_penalty, early_stopping=early_stopping, repetition_penalty=1.2,
    )  # fmt: skip
    theirs, mine = (
        model.compute_transition_scores(output.sequences, output.scores, output.beam_indices, normalize_logits=False)
        for output in (stock, ours)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.token_logprobs, mine.float(), rtol=1e-5, atol=1e-5)
    lengths = (ours.beam_indices >= 0).sum(-1)
    torch.testing.assert_close(
        mine.float().sum(-1) / lengths**length_penalty, ours.sequences_scores, rtol=1e-5, atol=1e-5
    )
    assert len(set(lengths.tolist())) > 1 or length_penalty > 0


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.6, 1.0])
@pytest.mark.parametrize("normalization", ["length", "gnmt", "none"])
@pytest.mark.parametrize("kind", ["qwen3", "whisper"])
def test_token_logprobs_add_up(
    kind: str, normalization: str, length_penalty: float, early_stopping: bool | str
) -> None:
    """The log-probabilities of a sequence's tokens, summed, over the length form are its score."""
    model = double_model(kind)
    ours = GenerationMixin.generate(
        model, **prompts_for(model, kind, 3), num_beams=5, num_return_sequences=5, max_new_tokens=9,
        eos_token_id=ELEVEN_ENDS, length_penalty=length_penalty, early_stopping=early_stopping,
        length_normalization=normalization, custom_generate="hf_paged_beam", return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    inside = ours.beam_indices >= 0
    lengths = inside.sum(-1)
    form = {
        "length": lengths.double() ** length_penalty,
        "gnmt": ((5 + lengths.double()) / 6) ** length_penalty,
        "none": torch.ones_like(lengths, dtype=torch.float64),
    }[normalization]
    assert ours.token_logprobs.dtype == torch.float32 and ours.token_logprobs.shape == ours.beam_indices.shape
    assert (ours.token_logprobs[~inside] == 0).all() and (ours.token_logprobs[inside] < 0).all()
    torch.testing.assert_close(
        (ours.token_logprobs.double().sum(-1) / form).float(), ours.sequences_scores, rtol=1e-5, atol=1e-5
    )


def test_token_logprobs_without_scores() -> None:
    """They come without `output_scores` too, when no step's scores are kept, and are the same numbers."""
    model = double_model("llama")
    call = {**SEARCH, "return_dict_in_generate": True, "custom_generate": "hf_paged_beam"}
    inputs = prompts_for(model, "llama", 2)
    without, kept = (model.generate(**inputs, **call, output_scores=scores) for scores in (False, True))
    assert without.scores is None and without.sequences_scores is None
    torch.testing.assert_close(without.token_logprobs, kept.token_logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(without.sequences, kept.sequences)


class EndsSoon(LogitsProcessor):
    """From the fourth step on the end id is nearly as probable as each beam's best token."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        end = scores.amax(dim=-1) - 0.1 if self.steps > 3 else torch.full_like(scores[:, 0], -torch.inf)
        return scores.index_copy(1, torch.tensor([EOS]), end.unsqueeze(1))


def early_end(kind: str, batch_size: int = 3) -> tuple[Any, Any]:
    """Both outputs of a search that stops while its beams still run, so that every row of the cache is a real beam."""
    model = double_model(kind)
    stock, ours = search_both(
        model, prompts_for(model, kind, batch_size), num_beams=4, num_return_sequences=4, max_new_tokens=40,
        stock_only={"logits_processor": [EndsSoon()]}, ours_only={"logits_processor": [EndsSoon()]},
        early_stopping=True,
    )  # fmt: skip
    check_identical(stock, ours)
    assert 4 < len(stock.scores) < 40
    return stock, ours


def self_attention(cache: Cache) -> Cache:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def check_layers(theirs: Cache, mine: Cache) -> None:
    """Assert that all layers hold equal keys and values, in equal shapes."""
    assert len(mine.layers) == len(theirs.layers)
    for my_layer, their_layer in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(my_layer.keys, their_layer.keys, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(my_layer.values, their_layer.values, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_returned_cache_in_stocks_layout(kind: str) -> None:
    """`to_dynamic` gives ``[B·W, Hkv, L, D]`` in every layer: the keys and values of the beams that still ran.

    A layer with a window holds its last columns only, as stock's does.
    """
    stock, ours = early_end(kind)
    theirs, mine = returned_cache(stock), returned_cache(ours).to_dynamic()
    check_layers(self_attention(theirs), self_attention(mine))
    assert self_attention(mine).get_seq_length() == self_attention(theirs).get_seq_length()
    if kind in ENCODER_DECODER:
        check_layers(theirs.cross_attention_cache, mine.cross_attention_cache)


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_returned_cache_indexed_per_row(kind: str) -> None:
    """``cache.layers[i].keys[row]`` is the row of one beam, as transformers' own code (Whisper's) takes it."""
    stock, ours = early_end(kind, 2)
    theirs, mine = returned_cache(stock), returned_cache(ours)
    assert isinstance(mine, type(theirs)) or kind not in ENCODER_DECODER
    pairs = list(zip(self_attention(theirs).layers, self_attention(mine).layers, strict=True))
    if kind in ENCODER_DECODER:
        pairs += zip(theirs.cross_attention_cache.layers, mine.cross_attention_cache.layers, strict=True)
    for their_layer, my_layer in pairs:
        for row in range(2 * 4):
            columns = their_layer.keys.shape[2]
            torch.testing.assert_close(my_layer.keys[row][:, -columns:], their_layer.keys[row], rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(
                my_layer.values[row][:, -columns:], their_layer.values[row], rtol=1e-8, atol=1e-8
            )


@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if kind not in WINDOWED])
def test_the_returned_cache_has_stocks_shapes_at_the_longest_length(kind: str) -> None:
    """At the longest length every beam has ended, and which rows are left is arbitrary; their shape is not."""
    model = double_model(kind)
    stock, ours = search_both(model, prompts_for(model, kind, 2), num_beams=3, max_new_tokens=5, eos_token_id=None)
    theirs, mine = (self_attention(cache) for cache in (returned_cache(stock), returned_cache(ours).to_dynamic()))
    for my_layer, their_layer in zip(mine.layers, theirs.layers, strict=True):
        assert my_layer.keys.shape == their_layer.keys.shape and my_layer.values.shape == their_layer.values.shape


@pytest.mark.parametrize("kind", DECODER_ONLY)
def test_generation_continues_from_the_returned_cache(kind: str) -> None:
    """The running beams' rows serve a next forward pass as stock's rows do."""
    stock, ours = early_end(kind, 2)
    model = double_model(kind)
    theirs, mine = copy.deepcopy(returned_cache(stock)), returned_cache(ours).to_dynamic()
    token, length = torch.full((8, 1), 11), theirs.get_seq_length()
    mask = torch.ones(8, length + 1, dtype=torch.int64)
    logits = [model(input_ids=token, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits for cache in (theirs, mine)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", BUILDERS)
def test_an_output_can_be_pickled(kind: str) -> None:
    """With its cache, as transformers' can, so that it can go to another process; what comes out is what went in."""
    stock, ours = search_both(double_model(kind), prompts_for(double_model(kind), kind, 2), **SEARCH)
    loaded = pickle.loads(pickle.dumps(ours))
    assert type(loaded) is type(ours) and loaded.beam_path == ours.beam_path
    check_identical(stock, loaded)
    check_layers(self_attention(returned_cache(ours)), self_attention(returned_cache(loaded)))
    assert returned_cache(loaded).usage() == returned_cache(ours).usage()


@pytest.mark.parametrize("asked", [{}, {"output_attentions": True, "output_hidden_states": True}])
@pytest.mark.parametrize("count", [1, 2])
def test_whispers_own_generate(count: int, asked: dict) -> None:
    """Whisper splits the output, cache included, into rows and stacks them again: all its fields are stock's."""
    model = eager_double("whisper")
    inputs = prompts_for(model, "whisper", 2)
    call = {"num_beams": 3, "num_return_sequences": count, "max_new_tokens": 6, "return_dict_in_generate": True,
            "output_scores": True, **asked}  # fmt: skip
    stock = model.generate(**inputs, **call)
    ours = model.generate(**inputs, **call, custom_generate="hf_paged_beam")
    check_equal(stock, ours, 1e-5, check_cache=False)
    for field in dataclasses.fields(stock):
        theirs, mine = getattr(stock, field.name), getattr(ours, field.name)
        if isinstance(theirs, Cache):
            assert [layer.keys.shape for layer in self_attention(mine).layers] == [
                layer.keys.shape for layer in self_attention(theirs).layers
            ]
            check_layers(theirs.cross_attention_cache, mine.cross_attention_cache)
        elif theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_whispers_own_generate_as_a_tensor(count: int) -> None:
    """Ids alone."""
    model = double_model("whisper")
    call = {"num_beams": 3, "num_return_sequences": count, "max_new_tokens": 6}
    inputs = prompts_for(model, "whisper", 2)
    assert torch.equal(
        model.generate(**inputs, **call, custom_generate="hf_paged_beam"), model.generate(**inputs, **call)
    )
