"""Bad input: every row of the table in the definition of "the same", with what the message must say.

A message names the argument, says what came and what is accepted; where the table says so, the model (its encoder
included) has not run when it comes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from comparing import check_equal, check_same_call, real_scores, search_both
from tiny_models import BUILDERS, EOS, VOCABULARY, met_model, prompts, tiny_model
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TextStreamer,
)
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging
from watching import forward_rows, of_its_own_class

import hf_paged_beam
from hf_paged_beam import PagedBeamCache, beam_search, enable, generate
from hf_paged_beam.cache.layers import PoolLayer
from hf_paged_beam.cache.step import current_step
from hf_paged_beam.versions import CACHE_ARGUMENT

NAME = "hf_paged_beam"
BEAMS = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 4, "do_sample": False}
WHOLE = {"return_dict_in_generate": True, "output_scores": True}


@contextlib.contextmanager
def refused_before_running(model: PreTrainedModel, *said: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """The call raises before the model or its encoder runs, and the message holds all of `said`."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else torch.nn.Identity()
    with forward_rows(model) as rows, forward_rows(encoder) as encoder_rows, pytest.raises(error) as raised:
        yield
    for part in said:
        assert re.search(part, str(raised.value)), f"{part!r} is not in {raised.value}"
    assert rows == [] and encoder_rows == []


def by_name(model: PreTrainedModel, **call: Any) -> Any:
    return model.generate(**call, custom_generate=NAME)


def as_callable(model: PreTrainedModel, **call: Any) -> Any:
    return model.generate(**call, custom_generate=beam_search)


def enabled(model: PreTrainedModel, **call: Any) -> Any:
    return enable(model).generate(**call)


def by_configuration(model: PreTrainedModel, **call: Any) -> Any:
    """The settings in a configuration object (set afterwards: it would refuse some itself when it is made)."""
    config = GenerationConfig()
    for name in [name for name in call if hasattr(config, name)]:
        setattr(config, name, call.pop(name))
    return model.generate(**call, generation_config=config, custom_generate=NAME)


def by_the_models_configuration(model: PreTrainedModel, **call: Any) -> Any:
    """The settings in the model's own configuration."""
    for name in [name for name in call if hasattr(model.generation_config, name)]:
        setattr(model.generation_config, name, call.pop(name))
    return model.generate(**call, custom_generate=NAME)


SETTING_ROUTES = [generate, by_name, enabled, by_configuration, by_the_models_configuration]


# --- num_beams and num_return_sequences ---


@pytest.mark.parametrize("route", SETTING_ROUTES)
@pytest.mark.parametrize("num_beams", [0, -1, 2.5, "4", True, {4}])
def test_num_beams_out_of_range(num_beams: Any, route: Callable) -> None:
    """No integer of at least 1: the argument, what came, and what is accepted."""
    model = tiny_model("llama")
    with refused_before_running(model, "num_beams", re.escape(repr(num_beams)), "integer of at least 1"):
        route(model, **prompts("llama", 2), num_beams=num_beams, num_return_sequences=1, max_new_tokens=4)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_integers_of_numpy(kind: str) -> None:
    """As transformers, we take integers of any kind: they come out of configurations and loops over arrays."""
    model = tiny_model(kind)
    plain = model.generate(**prompts(kind, 2), num_beams=4, num_return_sequences=2, max_new_tokens=6)
    call = {"num_beams": np.int64(4), "num_return_sequences": np.int32(2), "max_new_tokens": 6}
    for custom_generate in (NAME, beam_search):
        assert torch.equal(model.generate(**prompts(kind, 2), **call, custom_generate=custom_generate), plain)
    assert PagedBeamCache(model.config, num_beams=np.int64(4)).num_beams == 4


@pytest.mark.parametrize("route", SETTING_ROUTES)
@pytest.mark.parametrize("num_return_sequences", [0, -1, 1.5, "2"])
def test_num_return_sequences_out_of_range(num_return_sequences: Any, route: Callable) -> None:
    """Also what transformers would search for and then fail to return."""
    model = tiny_model("llama")
    said = ("num_return_sequences", re.escape(repr(num_return_sequences)), "integer of at least 1")
    with refused_before_running(model, *said):
        route(model, **prompts("llama", 2), num_beams=4, num_return_sequences=num_return_sequences, max_new_tokens=4)


@pytest.mark.parametrize("route", SETTING_ROUTES)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_more_sequences_than_beams(kind: str, route: Callable) -> None:
    """At most `num_beams` sequences can be returned: both numbers are named, and what to do."""
    model = tiny_model(kind)
    said = ("num_return_sequences=7", "num_beams=4", "at most num_beams|fewer sequences")
    with refused_before_running(model, *said):
        route(model, **prompts(kind, 2), num_beams=4, num_return_sequences=7, max_new_tokens=4)


@pytest.mark.parametrize("num_return_sequences", [0, -1, 1.5])
def test_num_return_sequences_as_a_callable(num_return_sequences: Any) -> None:
    """What transformers lets through to a callable is refused there."""
    model = tiny_model("llama")
    said = ("num_return_sequences", re.escape(repr(num_return_sequences)), "integer of at least 1")
    with refused_before_running(model, *said):
        as_callable(model, **prompts("llama", 2), num_beams=4, num_return_sequences=num_return_sequences)


@pytest.mark.parametrize("route", [generate, by_name, as_callable, enabled])
@pytest.mark.parametrize("option", ["length_normalization", "beam_attention"])
@pytest.mark.parametrize("given", ["mean", None, 1])
def test_our_own_keywords(given: Any, option: str, route: Callable) -> None:
    """A value that is none of the accepted ones, which are all listed."""
    model = tiny_model("llama")
    accepted = {"length_normalization": "'length', 'gnmt', 'none'", "beam_attention": "'auto', 'folded', 'gathered'"}
    with refused_before_running(model, option, re.escape(repr(given)), accepted[option]):
        route(model, **prompts("llama", 2), **BEAMS, **{option: given})


@pytest.mark.parametrize("early_stopping", ["always", 2, 0.5])
def test_early_stopping(early_stopping: Any) -> None:
    """Neither a boolean nor "never"."""
    model = tiny_model("llama")
    with refused_before_running(model, "early_stopping", str(early_stopping), "never"):
        generate(model, **prompts("llama", 2), **BEAMS, early_stopping=early_stopping)


def test_low_memory() -> None:
    """An option that transformers dropped: named, and what to do."""
    model = tiny_model("llama")
    with refused_before_running(model, "low_memory", "leave it out"):
        generate(model, **prompts("llama", 2), **BEAMS, low_memory=True)


# --- more candidates than the vocabulary holds ---


@pytest.mark.parametrize("width", [40, 64, 150])
@pytest.mark.parametrize("ends", [None, EOS, list(range(5, 16))])
def test_more_candidates_than_tokens(width: int, ends: Any) -> None:
    """`K` above the vocabulary's 99 tokens, also in the first step, where one row must offer all: as transformers."""
    stock, ours = search_both(tiny_model("llama"), prompts("llama", 2), num_beams=width, eos_token_id=ends,
                              num_return_sequences=width, max_new_tokens=3)  # fmt: skip
    check_equal(stock, ours)


@pytest.mark.parametrize("ends", [None, [1], [1, 2, 3], list(range(1, 8))])
def test_a_vocabulary_smaller_than_the_end_ids_need(ends: Any) -> None:
    """`K` up to all `W · V` continuations together: what transformers gives, or a result where it fails."""
    config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(0, 1)
    model.generation_config.pad_token_id = 0
    call = {"input_ids": torch.tensor([[4, 5], [6, 7]]), "num_beams": 20, "num_return_sequences": 20,
            "max_new_tokens": 2, "eos_token_id": ends, **WHOLE}  # fmt: skip
    ours = generate(model, **call)
    real = ours.sequences_scores.isfinite()
    assert real.view(2, 20).any(1).all()
    assert (ours.sequences_scores[real] > -100).all() and (ours.sequences_scores[~real] == -torch.inf).all()
    try:
        stock = model.generate(**call)
    except RuntimeError:
        assert len(ends) == 7  # K is 8 · W, and V is 8: "selected index k out of range", from inside torch
        return
    check_equal(stock, ours)


# --- prompts ---

PROMPT_ROUTES = [generate, by_name, enabled]


@pytest.mark.parametrize("route", PROMPT_ROUTES)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_an_empty_prompt(kind: str, shape: tuple, route: Callable) -> None:
    """No token, or no prompt: the shape that came."""
    model, ids = tiny_model(kind), torch.empty(shape, dtype=torch.int64)
    with refused_before_running(model, "input_ids", re.escape(str(shape)), "at least one"):
        route(model, input_ids=ids, **BEAMS)
    with refused_before_running(model, "input_ids|attention_mask", re.escape(str(shape))):
        route(model, input_ids=ids, attention_mask=torch.ones_like(ids), **BEAMS)


def test_an_empty_prompt_of_embeddings() -> None:
    """The same for `inputs_embeds`."""
    model = tiny_model("llama")
    with refused_before_running(model, "inputs_embeds", re.escape("(2, 0, 32)"), "at least one"):
        generate(model, inputs_embeds=torch.empty(2, 0, 32), **BEAMS)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_empty_decoder_prompt(kind: str) -> None:
    """The same for `decoder_input_ids`."""
    model = tiny_model(kind)
    with refused_before_running(model, "decoder_input_ids", re.escape("(2, 0)"), "at least one"):
        generate(model, **prompts(kind, 2), decoder_input_ids=torch.empty(2, 0, dtype=torch.int64), **BEAMS)


WRONG_MASKS = [(3, 5), (3, 9), (2, 7), (7,), (1, 7)]


@pytest.mark.parametrize("route", PROMPT_ROUTES)
@pytest.mark.parametrize("shape", WRONG_MASKS)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_mask_of_another_shape(kind: str, shape: tuple, route: Callable) -> None:
    """Fewer or more columns, other rows, or a vector: both shapes are named."""
    model, ids = tiny_model(kind), prompts(kind, 3)["input_ids"]
    with refused_before_running(model, "attention_mask", re.escape("(3, 7)"), re.escape(str(shape))):
        route(model, input_ids=ids, attention_mask=torch.ones(shape, dtype=torch.int64), **BEAMS)


@pytest.mark.parametrize("shape", WRONG_MASKS[:3])
def test_a_mask_of_another_shape_for_embeddings(shape: tuple) -> None:
    """The same for `inputs_embeds`."""
    model = tiny_model("llama")
    embeddings = model.get_input_embeddings()(prompts("llama", 3)["input_ids"])
    with refused_before_running(model, "attention_mask", re.escape("(3, 7)"), re.escape(str(shape))):
        generate(model, inputs_embeds=embeddings, attention_mask=torch.ones(shape, dtype=torch.int64), **BEAMS)


@pytest.mark.parametrize("shape", [(3, 5), (3, 9)])
def test_a_mask_of_another_shape_as_a_callable(shape: tuple) -> None:
    """Where transformers lets it through to the callable."""
    model, ids = tiny_model("llama"), prompts("llama", 3)["input_ids"]
    mask = torch.ones(shape, dtype=torch.int64)
    mask[0, 0] = 0
    with refused_before_running(model, "attention_mask", "7", str(shape[1])):
        as_callable(model, input_ids=ids, attention_mask=mask, **BEAMS)


def wrong_ids(name: str, wrong: int) -> dict[str, torch.Tensor]:
    ids = torch.full((3, 7), 8)
    ids[1, 2] = wrong
    return {name: ids}


@pytest.mark.parametrize("route", [*PROMPT_ROUTES, as_callable])
@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 2**40])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_ids_outside_the_vocabulary(kind: str, wrong: int, route: Callable) -> None:
    """The id that came, and the range that the model has."""
    model = tiny_model(kind)
    with refused_before_running(model, "input_ids", str(wrong), r"0\.\.98", "tokenizer"):
        route(model, **wrong_ids("input_ids", wrong), **BEAMS)


@pytest.mark.parametrize("route", PROMPT_ROUTES)
@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_ids_outside_the_vocabulary_for_an_encoder(kind: str, wrong: int, route: Callable) -> None:
    """The same before the encoder runs."""
    model = tiny_model(kind)
    with refused_before_running(model, "input_ids", str(wrong), r"0\.\.98"):
        route(model, **wrong_ids("input_ids", wrong), **BEAMS)
    with refused_before_running(model, "input_ids", str(wrong), r"0\.\.98"):
        route(model, **wrong_ids("inputs", wrong), **BEAMS)


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_decoder_ids_outside_the_vocabulary(kind: str) -> None:
    """The same for what the decoder starts with."""
    model = tiny_model(kind)
    with refused_before_running(model, "decoder_input_ids", str(VOCABULARY), r"0\.\.98"):
        GenerationMixin.generate(model, **prompts(kind, 3), **wrong_ids("decoder_input_ids", VOCABULARY), **BEAMS,
                                 custom_generate=NAME)  # fmt: skip


TOO_LONG = 130


@pytest.mark.parametrize("route", [*PROMPT_ROUTES, as_callable])
def test_a_prompt_beyond_the_learned_positions(route: Callable) -> None:
    """GPT-2 has a table of 128 positions: both lengths are named, before an index error from inside torch."""
    model = tiny_model("gpt2")
    with refused_before_running(model, str(TOO_LONG), "128", "positions", "Shorten"):
        route(model, input_ids=torch.full((2, TOO_LONG), 8), **BEAMS)


def test_embeddings_beyond_the_learned_positions() -> None:
    """The same for `inputs_embeds`."""
    model = tiny_model("gpt2")
    with refused_before_running(model, str(TOO_LONG), "128", "positions"):
        generate(model, inputs_embeds=torch.zeros(2, TOO_LONG, 32), **BEAMS)


@pytest.mark.parametrize("route", PROMPT_ROUTES)
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_prompt_beyond_the_learned_positions_of_an_encoder_decoder(side: str, route: Callable) -> None:
    """BART has tables of 64 positions in its encoder and in its decoder."""
    model, inputs = tiny_model("bart"), prompts("bart", 2)
    inputs["input_ids" if side == "encoder" else "decoder_input_ids"] = torch.full((2, 70), 8)
    if side == "encoder":
        del inputs["attention_mask"]
        with refused_before_running(model, "70", "64", "positions"):
            route(model, **inputs, **BEAMS)
        return
    with forward_rows(model) as rows, pytest.raises(ValueError, match=r"7\d.*64.*positions"):
        route(model, **inputs, **BEAMS)
    assert rows == []


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_long_prompt_where_positions_are_computed(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rotary phases and relative distances have no table: transformers' result, with its warning where it warns."""
    model = tiny_model(kind)
    logging.enable_propagation()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()  # another test may have set it
    warnings = []
    try:
        for custom_generate in (None, NAME):
            caplog.clear()
            type(logging.get_logger("transformers")).warning_once.cache_clear()
            output = model.generate(torch.full((1, TOO_LONG), 8), **BEAMS, **WHOLE, custom_generate=custom_generate)
            warnings.append([record.message for record in caplog.records if "maximum length" in record.message])
            if custom_generate is None:
                stock = output
    finally:
        logging.set_verbosity(verbosity)
        logging.disable_propagation()
    check_equal(stock, output)
    assert warnings[1] == warnings[0]
    assert bool(warnings[0]) == (kind == "llama")


# --- a cache of another kind ---


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("argument", sorted({"past_key_values", CACHE_ARGUMENT}))
def test_a_tuple_for_a_cache(argument: str, kind: str) -> None:
    """Keys and values in tuples, as in old releases: refused in transformers' words."""
    model, states = tiny_model(kind), torch.zeros(8, 2, 3, 8)
    call = {**prompts(kind, 2), **BEAMS, argument: ((states, states),) * 2}
    if not hasattr(model, "_prefill"):
        pytest.skip("4.57 still took tuples; they are handed over")
    with pytest.raises(ValueError, match="tuple") as stock:
        model.generate(**call)
    for route in (generate, by_name, as_callable):
        with pytest.raises(ValueError, match="tuple") as ours:
            route(model, **call)
        assert str(ours.value) == str(stock.value)


# --- streamer ---


@pytest.mark.parametrize("route", [generate, by_name, enabled])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_streamer(kind: str, route: Callable) -> None:
    """Refused, with the reason and what to do; it is given nothing."""
    model = tiny_model(kind)

    class Silent(TextStreamer):
        def __init__(self) -> None:
            pass

        def put(self, value: Any) -> None:
            raise AssertionError("the streamer was given something")

    with refused_before_running(model, "streamer", "until the end", "num_beams=1"):
        route(model, **prompts(kind, 2), **BEAMS, streamer=Silent())


# --- logits that are not numbers ---


@contextlib.contextmanager
def logits_replaced(model: PreTrainedModel, step: int, where: Any, value: float) -> Iterator[None]:
    """Put `value` into the logits of one forward pass."""
    passes = []

    def replace(module: torch.nn.Module, args: tuple, outputs: Any) -> None:
        if len(passes) == step:
            outputs.logits[where] = value
        passes.append(None)

    hook = model.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


ALL, ONE_ROW, ONE_TOKEN = (slice(None), -1), (1, -1), (slice(None), -1, 7)


@pytest.mark.parametrize("setting", [{}, {"do_sample": True}, {"repetition_penalty": 1.2}, WHOLE])
@pytest.mark.parametrize("where", [ALL, ONE_ROW, ONE_TOKEN], ids=["all", "one row", "one token"])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_nan_in_the_logits(kind: str, step: int, where: tuple, setting: dict) -> None:
    """An error that names the step, counted from 1, and not a wrong answer; the next call works."""
    model, inputs = met_model(kind), prompts(kind, 2)
    call = {**inputs, **BEAMS, "eos_token_id": None, **setting}
    nan, raised = float("nan"), pytest.raises(RuntimeError, match=rf"step {step + 1}\b.*NaN")
    with logits_replaced(model, step, where, nan), forward_rows(model) as rows, raised:
        generate(model, **call)
    assert len(rows) == step + 1
    check_same_call(model, inputs, **BEAMS)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinite_logits(value: float) -> None:
    """A row without any finite logit has no probabilities; one forbidden token is nothing unusual."""
    model, inputs = met_model("llama"), prompts("llama", 2)
    with logits_replaced(model, 1, ALL, value), pytest.raises(RuntimeError, match="step 2"):
        generate(model, **inputs, **BEAMS)
    with logits_replaced(model, 1, ONE_TOKEN, float("-inf")):
        stock = model.generate(**inputs, **BEAMS, **WHOLE)
    with logits_replaced(model, 1, ONE_TOKEN, float("-inf")):
        check_equal(stock, generate(model, **inputs, **BEAMS, **WHOLE))


def test_invalid_values_can_be_removed() -> None:
    """What the message proposes works, as in transformers."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    outputs = []
    for search in (model.generate, lambda **call: generate(model, **call)):
        with logits_replaced(model, 1, ONE_TOKEN, float("nan")):
            outputs.append(search(**inputs, **BEAMS, **WHOLE, remove_invalid_values=True))
    torch.testing.assert_close(outputs[1].scores[0], outputs[0].scores[0])
    assert all(scores.isfinite().all() for scores in outputs[1].scores)


# --- a processor that forbids every token ---


class Forbid(LogitsProcessor):
    """Forbids every token but `kept`, in the rows of some prompts, once `after` tokens were generated."""

    def __init__(self, prompt_length: int, after: int, prompts: tuple[int, ...] = (0, 1), kept: tuple[int, ...] = ()):
        self.first_length, self.prompts, self.kept = prompt_length + after, prompts, kept

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self.first_length:
            return scores
        forbidden = torch.ones_like(scores, dtype=torch.bool)
        forbidden[:, list(self.kept)] = False
        rows = torch.arange(len(scores)) // (len(scores) // 2)
        concerned = torch.isin(rows, torch.tensor(self.prompts))
        return scores.masked_fill(forbidden & concerned.unsqueeze(1), -torch.inf)


def forbidding(kind: str, *args: Any, **kwargs: Any) -> LogitsProcessorList:
    return LogitsProcessorList([Forbid(1 if kind in ("t5", "bart", "whisper") else 7, *args, **kwargs)])


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("kind", BUILDERS)
def test_every_token_forbidden(kind: str, after: int) -> None:
    """As in transformers the search ends; no row is a real continuation, and the scores say so."""
    stock, ours = search_both(
        tiny_model(kind), prompts(kind, 2), **BEAMS, eos_token_id=None, logits_processor=forbidding(kind, after)
    )
    assert (real_scores(stock.sequences_scores) == -torch.inf).all()
    assert (ours.sequences_scores == -torch.inf).all()
    assert ours.sequences.shape[0] == stock.sequences.shape[0]
    assert (ours.token_logprobs.sum(1) <= 0).all()


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("concerned", [0, 1])
def test_every_token_forbidden_for_one_prompt(concerned: int, after: int) -> None:
    """The other prompt of the batch gets what it gets alone."""
    model, inputs, kept = tiny_model("llama"), prompts("llama", 2), 1 - concerned
    ours = generate(model, **inputs, **BEAMS, **WHOLE, eos_token_id=None,
                    logits_processor=forbidding("llama", after, (concerned,)))  # fmt: skip
    alone = {name: given[kept : kept + 1] for name, given in inputs.items()}
    expected = model.generate(**alone, **BEAMS, **WHOLE, eos_token_id=None)
    scores = ours.sequences_scores.view(2, 4)
    assert (scores[concerned] == -torch.inf).all()
    torch.testing.assert_close(scores[kept], expected.sequences_scores, atol=1e-4, rtol=0)
    assert torch.equal(ours.sequences.view(2, 4, -1)[kept], expected.sequences)


@pytest.mark.parametrize("setting", [{}, {"do_sample": True}, {"early_stopping": True}, {"early_stopping": "never"}])
def test_fewer_tokens_than_beams_allowed(setting: dict) -> None:
    """Two tokens are left for four beams: two real rows, best first, then rows that say that they are none."""
    call = {**BEAMS, "max_new_tokens": 1, "eos_token_id": None, **setting}
    stock, ours = search_both(
        tiny_model("llama"), prompts("llama", 2), **call, logits_processor=forbidding("llama", 0, kept=(7, 8))
    )
    check_equal(stock, ours)
    scores = ours.sequences_scores.view(2, 4)
    assert scores[:, :2].isfinite().all() and (scores[:, 2:] == -torch.inf).all()
    generated = ours.sequences[:, 7].view(2, 4)[:, :2]
    assert generated.sort(1).values.tolist() == [[7, 8], [7, 8]]


# --- memory and interrupts ---


def exhausted(kind: str) -> Exception:
    """torch's error on an accelerator, and the one on the CPU."""
    if kind == "accelerator":
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: not enough memory: you tried to "
                        "allocate 64 bytes.")  # fmt: skip


@contextlib.contextmanager
def memory_ends(model: PreTrainedModel, step: int, error: Exception, *, once: bool = False) -> Iterator[None]:
    """Let the model's last layer raise `error` from forward pass number `step` on (or in that one only)."""
    passes = []

    def fail(*_: Any) -> None:
        passes.append(None)
        if len(passes) == step + 1 or (len(passes) > step and not once):
            raise error

    hook = model.model.layers[-1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("route", [generate, by_name, as_callable, enabled])
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("kind", ["accelerator", "cpu"])
def test_out_of_memory(kind: str, step: int, route: Callable) -> None:
    """torch's error, with the pool's size, `B`, `W` and what would shrink it; the model is restored and works."""
    model, inputs = of_its_own_class(tiny_model("qwen3")), prompts("qwen3", 3)
    error = exhausted(kind)
    with memory_ends(model, step, error), pytest.raises(type(error)) as raised:
        route(model, **inputs, **BEAMS)
    message = str(raised.value)
    assert str(error) in message
    for said in (r"\b3 prompts", r"\b4 beams", r"[\d.]+ ([KMG]i?)?B", "num_beams", "batch", "max_new_tokens", "dtype"):
        assert re.search(said, message), f"{said!r} is not in {message}"
    assert model.config._attn_implementation == "sdpa"
    assert current_step() is None
    with memory_ends(model, 100, error):
        ours = generate(model, **inputs, **BEAMS, **WHOLE)
    check_equal(tiny_model("qwen3").generate(**inputs, **BEAMS, **WHOLE), ours)
    assert ours.beam_path == "folded"


@pytest.mark.parametrize("kind", ["accelerator", "cpu"])
def test_out_of_memory_is_not_tried_again(kind: str) -> None:
    """In the first decode step too, where another failure may mean that keys must be gathered, which takes more."""
    model = of_its_own_class(tiny_model("llama"))
    generate(model, **prompts("llama", 3), **BEAMS)
    with memory_ends(model, 1, exhausted(kind), once=True), pytest.raises(RuntimeError, match="memory"):
        generate(model, **prompts("llama", 3), **BEAMS)


@pytest.mark.parametrize("kind", ["accelerator", "cpu"])
def test_too_little_memory_to_compare_paths(kind: str) -> None:
    """A model is gathered once beside being folded, to compare both; without the memory for that, folding goes on."""
    model, inputs = of_its_own_class(tiny_model("llama")), prompts("llama", 3)
    with memory_ends(model, 1, exhausted(kind), once=True):
        ours = generate(model, **inputs, **BEAMS, **WHOLE)
    check_equal(tiny_model("llama").generate(**inputs, **BEAMS, **WHOLE), ours)
    assert ours.beam_path == "folded"
    for passes in (4, 2):  # the prompt, a step of few beams by both paths, a step; then what a search needs
        with forward_rows(model) as rows:
            generate(model, **inputs, **{**BEAMS, "max_new_tokens": 2})
        assert len(rows) == passes


def test_out_of_memory_while_the_pool_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's own allocation is part of the search: the same error, and the same help."""
    model, inputs = of_its_own_class(tiny_model("llama")), prompts("llama", 3)
    with monkeypatch.context() as patch:
        patch.setattr(PoolLayer, "_grown", staticmethod(lambda pool, slots: (_ for _ in ()).throw(exhausted("cpu"))))
        with pytest.raises(RuntimeError, match=r"(?s)not enough memory.*3 prompts.*4 beams.*num_beams"):
            generate(model, **inputs, **BEAMS)
    assert model.config._attn_implementation == "sdpa"
    _, ours = check_same_call(model, inputs, **BEAMS)
    assert ours.beam_path == "folded"


def test_other_errors_are_not_explained_as_memory() -> None:
    """An error of the model's own reaches the caller as it is."""
    model = tiny_model("llama")
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with memory_ends(model, 0, error), pytest.raises(RuntimeError) as raised:
        generate(model, **prompts("llama", 2), **BEAMS)
    assert raised.value is error


@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("setting", [{}, {"beam_attention": "gathered"}, {"do_sample": True}])
def test_an_interrupt(setting: dict, step: int) -> None:
    """Ctrl-C while a layer runs: it reaches the caller, settings are restored, the next call works."""
    model, inputs = of_its_own_class(tiny_model("llama")), prompts("llama", 2)
    generate(model, **inputs, **BEAMS)
    passes = []

    def interrupt(*_: Any) -> None:
        passes.append(None)
        if len(passes) == step + 1:
            assert step == 0 or setting.get("beam_attention") or model.config._attn_implementation == NAME
            raise KeyboardInterrupt

    hook = model.model.layers[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(model, **inputs, **{**BEAMS, "eos_token_id": None, **setting})
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert current_step() is None
    _, ours = check_same_call(model, inputs, **BEAMS)
    assert ours.beam_path == "folded"


def test_an_interrupt_between_two_passes() -> None:
    """Ctrl-C in a processor of the caller's."""

    class Interrupt(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 9:
                raise KeyboardInterrupt
            return scores

    model, inputs = tiny_model("llama"), prompts("llama", 2)
    with pytest.raises(KeyboardInterrupt):
        generate(model, **inputs, **BEAMS, logits_processor=LogitsProcessorList([Interrupt()]))
    assert model.config._attn_implementation == "sdpa"
    check_same_call(model, inputs, **BEAMS)


@pytest.mark.parametrize("route", ["name", "callable"])
def test_what_transformers_does_not_know_is_not_handed_over(route: str) -> None:
    """A length form of ours cannot be kept by transformers' own search: an error, not another form's scores."""
    model = tiny_model("llama")
    way = {"name": "hf_paged_beam", "callable": hf_paged_beam.beam_search}[route]
    call = {**prompts("llama", 2), **BEAMS, "custom_generate": way, "use_cache": False}
    model.generate(**call, length_normalization="length")
    with pytest.raises(ValueError, match=r"length_normalization='gnmt' is not known.*use_cache=False"):
        model.generate(**call, length_normalization="gnmt")
    model.generate(**{**call, "num_beams": 1, "num_return_sequences": 1}, length_normalization="gnmt")
