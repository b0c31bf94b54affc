"""The ways to call, each in a fresh process; what is handed over; and that nothing of the user's is changed."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import OLD_RELEASE, both, check_equal, search_both
from tiny_models import (
    BUILDERS,
    DECODERS,
    ENCODER_DECODER,
    EOS,
    PAD,
    VOCABULARY,
    image_model,
    path_of,
    prompts,
    random_model,
    tiny_model,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RwkvConfig,
    RwkvForCausalLM,
    StoppingCriteriaList,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    WhisperForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
    pipeline,
)
from transformers.cache_utils import Cache, QuantizedLayer
from transformers.generation.utils import GenerationMixin
from watching import forward_rows, of_its_own_class

import hf_paged_beam
from hf_paged_beam import PagedBeamCache, PagedBeamMixin, beam_search, disable, enable, generate
from hf_paged_beam.cache.step import current_step
from hf_paged_beam.versions import CACHE_ARGUMENT

PACKAGE = Path(hf_paged_beam.__file__).parent
NAME = "hf_paged_beam"
BEAMS = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 6, "do_sample": False}
WHOLE = {"return_dict_in_generate": True, "output_scores": True}
CACHE_ARGUMENTS = sorted({"past_key_values", CACHE_ARGUMENT})


# --- the four ways, each in a fresh process ---

PREAMBLE = """
import sys

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

torch.set_num_threads(1)
folder = sys.argv[1]
causal = AutoModelForCausalLM.from_pretrained(folder + "/llama")
seq2seq = AutoModelForSeq2SeqLM.from_pretrained(folder + "/t5")
paths = {causal: "folded", seq2seq: sys.argv[3]}
inputs = {
    "input_ids": torch.tensor([[17, 63, 46, 21, 44, 20, 90], [0, 0, 24, 59, 33, 71, 12]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]),
}
call = dict(num_beams=4, num_return_sequences=4, max_new_tokens=6, do_sample=False)
call |= dict(return_dict_in_generate=True, output_scores=True)


def check_same(model, **ours):
    stock, ours = model.generate(**inputs, **call), model.generate(**inputs, **call, **ours)
    assert torch.equal(stock.sequences, ours.sequences), (stock.sequences, ours.sequences)
    torch.testing.assert_close(stock.sequences_scores, ours.sequences_scores, atol=1e-4, rtol=0)
    return ours

"""

BY_NAME = """
import hf_paged_beam

for model in (causal, seq2seq):
    assert check_same(model, custom_generate="hf_paged_beam").beam_path == paths[model]

# any other name goes to transformers
assert causal.generate(**inputs, custom_generate="./another", trust_remote_code=True) == "another way"
"""

BY_PATH = """
from pathlib import Path

path, parent = "./hf_paged_beam", sys.argv[2]
assert Path(path).resolve().parent == Path(parent).resolve()  # the working directory, which is not on sys.path

# an installed package is hidden, so that this is a process that cannot import it
sys.modules["hf_paged_beam"] = None
try:
    causal.generate(**inputs, **call, custom_generate=path, trust_remote_code=True)
except ImportError as error:
    message = str(error)
    assert "hf_paged_beam cannot be imported" in message, message
    assert "pip install" in message and "sys.path" in message, message
else:
    raise AssertionError("the package could not be imported, but nothing was said")
del sys.modules["hf_paged_beam"]

sys.path.insert(0, parent)
for model in (causal, seq2seq):
    assert check_same(model, custom_generate=path, trust_remote_code=True).beam_path == paths[model]
ours = causal.generate(**inputs, **call, custom_generate=path, trust_remote_code=True, length_normalization="gnmt")
check_same(causal, custom_generate="hf_paged_beam")  # now it is imported, the name works too
"""

AS_CALLABLE = """
import hf_paged_beam

for model in (causal, seq2seq):
    ours = check_same(model, custom_generate=hf_paged_beam.beam_search)
    assert ours.beam_path == paths[model]
    gathered = check_same(model, custom_generate=hf_paged_beam.beam_search, beam_attention="gathered")
    assert gathered.beam_path == "gathered"
    raw = model.generate(
        **inputs, **call, custom_generate=hf_paged_beam.beam_search, length_normalization="none"
    )
    torch.testing.assert_close(raw.sequences_scores, raw.token_logprobs.sum(1))
"""

CACHE_ALONE = """
import hf_paged_beam
from transformers import EncoderDecoderCache

for model in (causal, seq2seq):
    cache = hf_paged_beam.PagedBeamCache(model.config, num_beams=4)
    assert isinstance(cache, EncoderDecoderCache) == model.config.is_encoder_decoder
    check_same(model, past_key_values=cache)
    cache.check()
    assert cache.usage().bytes_live < cache.usage().bytes_separate
"""

IMPORT_AGAIN = """
import importlib

import transformers
from transformers.generation import utils
from transformers.generation.utils import GenerationMixin

caches = transformers.cache_utils
places = (GenerationMixin, transformers.PreTrainedModel, caches.Cache, utils, caches)
before = [dict(vars(place)) for place in places]
stock = GenerationMixin.load_custom_generate
import hf_paged_beam

for place, names in zip(places, before):
    changed = {name for name in {*names, *vars(place)} if names.get(name) is not vars(place).get(name)}
    assert changed == ({"load_custom_generate"} if place is GenerationMixin else set()), (place, changed)
hook = GenerationMixin.load_custom_generate
assert hook is not stock and hook.__wrapped__ is stock
hf_paged_beam.register_name()
importlib.reload(hf_paged_beam)
assert GenerationMixin.load_custom_generate is hook
check_same(causal, custom_generate="hf_paged_beam")

for name in [name for name in sys.modules if name.split(".")[0] == "hf_paged_beam"]:
    del sys.modules[name]
import hf_paged_beam

again = GenerationMixin.load_custom_generate
assert not hasattr(again.__wrapped__, "__wrapped__")  # one wrapper around transformers' own, not two
check_same(causal, custom_generate="hf_paged_beam")
check_same(causal, custom_generate=hf_paged_beam.beam_search)
"""


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two saved models."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "t5"):
        tiny_model(kind).save_pretrained(folder / kind)
    return folder


def run_fresh(script: str, models: Path, folder: Path, working_directory: Path, *, importable: bool = True) -> None:
    """Run a script in a new process, with the package on its path or not, and show what it said if it fails."""
    file = folder / "script.py"
    file.write_text(PREAMBLE + script)
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(PACKAGE.parent) if importable else ""
    command = [sys.executable, str(file), str(models), str(PACKAGE.parent), path_of("t5")]
    done = subprocess.run(command, cwd=working_directory, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_by_name_from_any_working_directory(saved_models: Path, tmp_path: Path) -> None:
    """Way 1: import, then one argument, without `trust_remote_code`; another name goes to transformers."""
    another = tmp_path / "another" / "custom_generate"
    another.mkdir(parents=True)
    (another / "generate.py").write_text("def generate(model, *args, **kwargs):\n    return 'another way'\n")
    run_fresh(BY_NAME, saved_models, tmp_path, tmp_path)


def test_by_path_without_an_import(saved_models: Path, tmp_path: Path) -> None:
    """Way 2: by path, with `trust_remote_code`; if the package cannot be imported, the error says what to do."""
    run_fresh(BY_PATH, saved_models, tmp_path, PACKAGE.parent, importable=False)


def test_as_a_callable(saved_models: Path, tmp_path: Path) -> None:
    """Way 3: `beam_search` itself, with this package's own keywords."""
    run_fresh(AS_CALLABLE, saved_models, tmp_path, tmp_path)


def test_the_cache_alone(saved_models: Path, tmp_path: Path) -> None:
    """Way 4: transformers' own search over our cache."""
    run_fresh(CACHE_ALONE, saved_models, tmp_path, tmp_path)


def test_the_import_registers_the_name_once(saved_models: Path, tmp_path: Path) -> None:
    """One wrapper is all that is put into transformers, also after a reload and after all modules were dropped."""
    run_fresh(IMPORT_AGAIN, saved_models, tmp_path, tmp_path)


# --- the same ways in one process ---


class PagedLlama(PagedBeamMixin, LlamaForCausalLM):
    """As a user writes it."""


class PagedT5(PagedBeamMixin, T5ForConditionalGeneration):
    """As a user writes it."""


class PagedWhisper(PagedBeamMixin, WhisperForConditionalGeneration):
    """As a user writes it; Whisper has a ``generate`` of its own below the mixin."""


PAGED_CLASSES = {"llama": PagedLlama, "t5": PagedT5, "whisper": PagedWhisper}


def with_mixin(kind: str) -> PreTrainedModel:
    """`tiny_model`, of a class that inherits `PagedBeamMixin`."""
    plain = tiny_model(kind)
    model = PAGED_CLASSES[kind](plain.config).eval()
    model.load_state_dict(plain.state_dict())
    model.generation_config = plain.generation_config
    return model


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_all_ways_give_the_same(kind: str) -> None:
    """By name, by the function, by the callable, enabled, by inheritance: one result, transformers' own."""
    model, inputs = tiny_model(kind), prompts(kind, 3)
    call = {**inputs, **BEAMS, **WHOLE}
    stock = model.generate(**call)
    check_equal(stock, model.generate(**call, custom_generate=NAME))
    check_equal(stock, generate(model, **call))
    check_equal(stock, generate(model, inputs["input_ids"], **{**call, "input_ids": None}))
    check_equal(stock, model.generate(**call, custom_generate=beam_search))
    check_equal(stock, with_mixin(kind).generate(**call))
    check_equal(stock, enable(model).generate(**call))
    check_equal(stock, model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **BEAMS, **WHOLE))


@pytest.mark.parametrize("kind", PAGED_CLASSES)
@pytest.mark.parametrize("made", [with_mixin, lambda kind: enable(tiny_model(kind))], ids=["mixin", "enabled"])
def test_plain_generate_is_paged(kind: str, made: Callable[[str], PreTrainedModel]) -> None:
    """Without any argument of ours the search runs over the pool, at one row per prompt."""
    model, inputs = made(kind), prompts(kind, 2)
    model.generate(**inputs, num_beams=4, max_new_tokens=2)  # this kind of model is met
    with forward_rows(model) as rows:
        ours = model.generate(**inputs, num_beams=4, max_new_tokens=6)
    assert torch.equal(ours, tiny_model(kind).generate(**inputs, num_beams=4, max_new_tokens=6))
    assert rows[0] == 2 and rows[1] == 8


@pytest.mark.parametrize("made", [with_mixin, lambda kind: enable(tiny_model(kind))], ids=["mixin", "enabled"])
@pytest.mark.parametrize("kind", PAGED_CLASSES)
def test_our_keywords_come_before_validation(kind: str, made: Callable[[str], PreTrainedModel]) -> None:
    """transformers refuses keywords that no model takes; ours are taken first, and mean what they say."""
    model, inputs = made(kind), prompts(kind, 2)
    settings = {"num_beams": 4, "max_new_tokens": 6, "length_penalty": 2.0}
    raw = model.generate(**inputs, **settings, length_normalization="none")
    without_form = {**settings, "length_penalty": 0.0}
    assert torch.equal(raw, tiny_model(kind).generate(**inputs, **without_form))
    with pytest.raises(ValueError, match="length_normalization"):
        model.generate(**inputs, **settings, length_normalization="log")


@pytest.mark.parametrize("route", ["name", "callable", "enabled"])
@pytest.mark.parametrize("normalization", ["length", "gnmt", "none"])
def test_length_normalization_on_every_route(normalization: str, route: str) -> None:
    """Scores are the sums of the returned token scores over the form that was asked for."""
    model = tiny_model("llama")
    chosen = {"name": {"custom_generate": NAME}, "callable": {"custom_generate": beam_search}, "enabled": {}}[route]
    if route == "enabled":
        enable(model)
    ours = model.generate(**prompts("llama", 2), **BEAMS, **WHOLE, length_penalty=0.6, **chosen,
                          length_normalization=normalization)  # fmt: skip
    lengths = (ours.beam_indices >= 0).sum(1)
    form = {"length": lengths**0.6, "gnmt": ((5 + lengths) / 6) ** 0.6, "none": torch.ones_like(lengths)}[normalization]
    torch.testing.assert_close(ours.sequences_scores, ours.token_logprobs.sum(1) / form)


def test_the_callable_has_every_keyword_of_ours() -> None:
    """transformers passes a callable only what its signature names."""
    named = {name for name, parameter in inspect.signature(generate).parameters.items()
             if parameter.kind is inspect.Parameter.KEYWORD_ONLY}  # fmt: skip
    assert named >= {"length_normalization", "beam_attention"}
    assert named <= set(inspect.signature(beam_search).parameters)


@pytest.mark.parametrize("kind", ["llama", "t5", "bart"])
def test_the_callable_runs_the_prompt_once(kind: str) -> None:
    """transformers repeats the inputs before it calls us; everything after is at one row per prompt."""
    model = tiny_model(kind)
    generate(model, **prompts(kind, 3), **BEAMS)  # this kind of model is met
    with forward_rows(model) as rows:
        model.generate(**prompts(kind, 3), **BEAMS, custom_generate=beam_search)
    assert rows[0] == 3 and set(rows[1:]) == {12}


def test_what_the_callable_cannot_be_given() -> None:
    """transformers keeps the tokenizer from a callable, and images are repeated so that a batch cannot be undone."""
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**prompts("llama", 2), **BEAMS, stop_strings=["x"], tokenizer=word_tokenizer(),
                       custom_generate=beam_search)  # fmt: skip
    ids, config = prompts("llama", 2)["input_ids"].repeat_interleave(2, 0), GenerationConfig(num_beams=2)
    with pytest.raises(ValueError, match=r"pixel_values.*custom_generate='hf_paged_beam'"):
        beam_search(model, ids, LogitsProcessorList(), StoppingCriteriaList(), config, pixel_values=torch.zeros(4, 3))


def test_the_callable_cannot_be_given_an_image() -> None:
    """Not for one prompt either: it is told to use the name, by which images are searched with."""
    model, inputs = image_model(VOCABULARY - 1)
    inputs = {name: given[:1] for name, given in inputs.items()}
    with pytest.raises(ValueError, match="custom_generate='hf_paged_beam'"):
        model.generate(**inputs, **BEAMS, custom_generate=beam_search)
    check_equal(*search_both(model, inputs, **BEAMS))


def test_an_explicit_custom_generate_wins() -> None:
    """An enabled model and one with the mixin still run the method that a call names."""

    def nothing_new(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        return input_ids

    for model in (enable(tiny_model("llama")), with_mixin("llama")):
        with forward_rows(model) as rows:
            model.generate(**prompts("llama", 2), num_beams=4, max_new_tokens=3, custom_generate=nothing_new)
        assert rows == []


def whisper_fields(output: Any) -> dict[str, Any]:
    return {name: output[name] for name in ("sequences", "sequences_scores", "beam_indices")}


@pytest.mark.parametrize("route", ["name", "callable", "enabled", "mixin"])
def test_whisper_with_its_own_generate(route: str) -> None:
    """Whisper splits every field of the output by row and puts a new object together; ours takes part in that."""
    plain, inputs = tiny_model("whisper"), prompts("whisper", 2)
    call = {"num_beams": 4, "max_new_tokens": 6, **WHOLE}
    stock = plain.generate(**inputs, **call)
    model = with_mixin("whisper") if route == "mixin" else enable(plain) if route == "enabled" else plain
    chosen = {"name": {"custom_generate": NAME}, "callable": {"custom_generate": beam_search}}.get(route, {})
    ours = model.generate(**inputs, **call, **chosen)
    assert type(ours).__mro__[-1] is object and isinstance(ours, type(stock))
    for name, value in whisper_fields(stock).items():
        torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=0)
    assert len(ours.scores) == len(stock.scores)
    assert ours.kv_usage is None or ours.kv_usage.live  # where Whisper put another cache into the output, none of ours


# --- the cache alone under transformers' own search ---


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("argument", CACHE_ARGUMENTS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_stock_search_over_our_cache(kind: str, argument: str) -> None:
    """The same result, each prompt's keys stored once, and the cache is the one that comes back."""
    model, batch_size, width = tiny_model(kind), 3, 4
    cache = PagedBeamCache(model.config, num_beams=width)
    assert isinstance(cache, EncoderDecoderCache) == (kind in ENCODER_DECODER)
    stock, ours = stock_search(model, kind), stock_search(model, kind, **{argument: cache})
    ours.beam_path = "gathered"
    check_equal(stock, ours)
    assert getattr(ours, CACHE_ARGUMENT) is cache
    cache.check()
    usage, prompt_length = cache.usage(), cache.index.prompt_length
    assert prompt_length == (1 if kind in ENCODER_DECODER else 7)
    generated = len(stock.scores) - 1
    assert usage.live <= batch_size * (prompt_length + width * generated)
    for layer in cache.indexed_layers():
        assert layer._keys.shape[0] == layer._values.shape[0] == batch_size
    if kind != "mistral":  # a window of four tokens, in all layers, is less than a tree
        assert usage.bytes_live < usage.bytes_separate


def stock_search(model: PreTrainedModel, kind: str, **settings: Any) -> Any:
    """transformers' own search, by the general ``generate`` (Whisper's would repeat prompts)."""
    return GenerationMixin.generate(model, **prompts(kind, 3), **{**BEAMS, **WHOLE, **settings})


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_stock_sampling_over_our_cache(kind: str) -> None:
    """Beam sampling draws the same sequences from the same seed."""
    model = tiny_model(kind)
    torch.manual_seed(3)
    stock = stock_search(model, kind, do_sample=True)
    torch.manual_seed(3)
    ours = stock_search(model, kind, do_sample=True, **{CACHE_ARGUMENT: PagedBeamCache(model.config, num_beams=4)})
    assert torch.equal(stock.sequences, ours.sequences)


@pytest.mark.parametrize("made_for", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bart", "whisper"])
def test_another_width_than_the_cache_is_refused(kind: str, made_for: int) -> None:
    """In both directions, whether or not the number of rows shows it, under transformers' search and under ours."""
    model = tiny_model(kind)
    with pytest.raises(ValueError, match=f"num_beams={made_for}"):
        stock_search(model, kind, **{CACHE_ARGUMENT: PagedBeamCache(model.config, num_beams=made_for)})
    cache = PagedBeamCache(model.config, num_beams=made_for)
    with pytest.raises(ValueError, match=f"num_beams={made_for}.*num_beams=4"):
        stock_search(model, kind, **{CACHE_ARGUMENT: cache}, custom_generate=NAME)


@pytest.mark.parametrize("custom_generate", [None, NAME])
def test_a_cache_for_beams_is_refused_by_a_call_for_one(custom_generate: str | None) -> None:
    """Four prompts and a cache for four beams: rows alone would fit, so their contents are compared."""
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="num_beams=4"):
        model.generate(**prompts("llama", 4), max_new_tokens=4, custom_generate=custom_generate,
                       **{CACHE_ARGUMENT: PagedBeamCache(model.config, num_beams=4)})  # fmt: skip


def test_equal_prompts_may_share_a_cache() -> None:
    """Two equal prompts of four beams cannot be told from one of eight; the result is right all the same."""
    model, inputs = tiny_model("llama"), prompts("llama", 1)
    twice = {name: given.repeat(2, 1) for name, given in inputs.items()}
    cache = PagedBeamCache(model.config, num_beams=8)
    ours = model.generate(**twice, **BEAMS, **WHOLE, **{CACHE_ARGUMENT: cache})
    ours.beam_path = "gathered"
    check_equal(model.generate(**twice, **BEAMS, **WHOLE), ours)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_cache_can_be_reset_and_used_again(kind: str) -> None:
    """After `reset` it is as new: for another batch size, and for either search after the other."""
    model = tiny_model(kind)
    cache = PagedBeamCache(model.config, num_beams=4)
    for batch_size, custom_generate in ((3, None), (2, NAME), (2, None)):
        call = {**prompts(kind, batch_size), **BEAMS, **WHOLE}
        ours = model.generate(**call, **{CACHE_ARGUMENT: cache}, custom_generate=custom_generate)
        ours.beam_path = "gathered"
        check_equal(model.generate(**call), ours)
        cache.reset()


@pytest.mark.parametrize("num_beams", [0, -1, 2.5, "4", True, None])
def test_a_cache_for_no_beams_is_refused(num_beams: Any) -> None:
    """`num_beams` is an integer of at least 1."""
    for kind in ("llama", "t5"):
        with pytest.raises(ValueError, match=r"num_beams must be .*at least 1"):
            PagedBeamCache(tiny_model(kind).config, num_beams=num_beams)


# --- enable and disable ---


def test_enable_and_disable_leave_no_trace() -> None:
    """Both can be repeated; after `disable` the model's own attributes are the ones it had, no more and no less."""
    model = tiny_model("llama")
    before = dict(model.__dict__)
    assert disable(model) is model and model.__dict__ == before
    assert enable(model) is model and enable(model) is model
    assert model.generate(**prompts("llama", 2), **BEAMS, **WHOLE).beam_path == "folded"
    assert set(model.__dict__) - set(before) == {"generate"}
    assert disable(model) is model and disable(model) is model
    assert model.__dict__.keys() == before.keys()
    assert all(model.__dict__[name] is value for name, value in before.items())
    assert not hasattr(model.generate(**prompts("llama", 2), **BEAMS, **WHOLE), "beam_path")


def test_enable_changes_one_model_only() -> None:
    """Another model of the class, and the class, search as before."""
    one, other = enable(tiny_model("llama")), tiny_model("llama")
    assert not hasattr(other.generate(**prompts("llama", 2), **BEAMS, **WHOLE), "beam_path")
    assert "generate" not in vars(type(one))


def test_disable_leaves_a_generate_of_the_users_own() -> None:
    """A method that somebody else put on the model is not ours to remove."""
    model = tiny_model("llama")
    model.generate = print
    disable(model)
    assert model.generate is print


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), None, "gpt2"])
def test_enable_takes_models_only(thing: Any) -> None:
    """Anything without a ``generate`` is refused, by name of its type."""
    with pytest.raises(TypeError, match=type(thing).__name__):
        enable(thing)


@pytest.mark.parametrize("kind", ["llama", "whisper"])
def test_a_copy_of_an_enabled_model_is_enabled_itself(kind: str) -> None:
    """A deep copy calls itself, not the original, and is disabled alone."""
    model = enable(tiny_model(kind))
    other = copy.deepcopy(model)
    with forward_rows(model) as original_rows, forward_rows(other) as rows:
        other.generate(**prompts(kind, 2), num_beams=4, max_new_tokens=4)
    assert original_rows == [] and rows[0] == 2
    disable(other)
    assert "generate" in model.__dict__ and "generate" not in other.__dict__


def test_an_enabled_model_can_be_saved(tmp_path: Path) -> None:
    """`state_dict` and `save_pretrained` hold what they held; what is loaded again is a plain model."""
    plain, model = tiny_model("llama"), enable(tiny_model("llama"))
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path / "enabled")
    plain.save_pretrained(tmp_path / "plain")
    files = {folder: sorted(file.name for file in (tmp_path / folder).iterdir()) for folder in ("enabled", "plain")}
    assert files["enabled"] == files["plain"]
    for name in files["plain"]:
        assert (tmp_path / "enabled" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
    call = {**prompts("llama", 2), **BEAMS, **WHOLE}
    check_equal(loaded.generate(**call), model.generate(**call))
    model.load_state_dict(loaded.state_dict())


def test_an_enabled_model_can_be_pickled() -> None:
    """As ``torch.save(model)`` and worker processes do."""
    model = enable(tiny_model("llama"))
    other = pickle.loads(pickle.dumps(model))
    call = {**prompts("llama", 2), **BEAMS, **WHOLE}
    check_equal(tiny_model("llama").generate(**call), other.generate(**call, custom_generate=NAME))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are ``w0`` to ``w98``."""
    words = models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w1")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}", padding_side="left"
    )


def test_a_pipeline_uses_an_enabled_model() -> None:
    """`pipeline("text-generation")` gives the same texts, from prompts that ran once."""
    texts = ["w7 w8 w9", "w10 w11 w40 w33"]
    call = {"num_beams": 4, "max_new_tokens": 5, "num_return_sequences": 3, "do_sample": False}
    stock = pipeline("text-generation", model=tiny_model("llama"), tokenizer=word_tokenizer())(texts, **call)
    model = enable(tiny_model("llama"))
    ours = pipeline("text-generation", model=model, tokenizer=word_tokenizer())
    with forward_rows(model) as rows:
        assert ours(texts, **call, length_penalty=1.0) == stock
        assert ours(texts, **call, batch_size=2) == stock
    assert rows.count(1) == 2 and rows.count(2) == 1  # three passes over a prompt: two alone, then both together
    disable(model)
    assert ours(texts, **call) == stock


# --- handing over ---

ONE_BEAM = {"num_beams": 1, "num_return_sequences": 1}
HANDED_OVER: dict[str, dict[str, Any]] = {
    "one beam": ONE_BEAM,
    "nothing said of beams": {},
    "sampling": {**ONE_BEAM, "do_sample": True, "num_return_sequences": 3},
    "no cache": {"use_cache": False},
    "sampling without a cache": {"use_cache": False, "do_sample": True},
    "prompt lookup": {**ONE_BEAM, "prompt_lookup_num_tokens": 2},
}


def settings_of(name: str) -> dict[str, Any]:
    return {**BEAMS, **HANDED_OVER[name]} if HANDED_OVER[name] else {"max_new_tokens": 6}


def check_handed_over(model: PreTrainedModel, inputs: dict, **settings: Any) -> None:
    stock, ours = search_both(model, inputs, **settings)
    assert ours.beam_path == "handed over"
    assert ours.handed_over_because
    assert type(ours) is type(stock)
    assert torch.equal(ours.sequences, stock.sequences)
    if getattr(stock, "sequences_scores", None) is not None:
        assert torch.equal(ours.sequences_scores, stock.sequences_scores)


@pytest.mark.parametrize("kind", ["llama", "t5", "whisper"])
@pytest.mark.parametrize("setting", HANDED_OVER)
def test_what_is_handed_over(setting: str, kind: str) -> None:
    """transformers' own result to the bit, in transformers' own class, and the object says who searched."""
    batch_size = 1 if "lookup" in setting else 3
    check_handed_over(tiny_model(kind), prompts(kind, batch_size), **settings_of(setting))


@pytest.mark.parametrize("custom_generate", [NAME, beam_search])
@pytest.mark.parametrize("setting", HANDED_OVER)
def test_what_is_handed_over_on_both_routes(setting: str, custom_generate: Any) -> None:
    """Through the name and as a callable, as objects and as tensors."""
    model, inputs = tiny_model("llama"), prompts("llama", 1)
    call = {**inputs, **settings_of(setting)}
    results = []
    for extra in ({}, {"custom_generate": custom_generate}):
        torch.manual_seed(5)
        results.append(model.generate(**call, **extra))
    assert torch.equal(*results)
    assert model.generate(**call, **WHOLE, custom_generate=custom_generate).beam_path == "handed over"


def test_assisted_decoding_is_handed_over() -> None:
    """A call with an assistant is transformers' own, assistant included."""
    model, assistant = tiny_model("llama"), tiny_model("llama")
    with forward_rows(assistant) as rows:
        check_handed_over(model, prompts("llama", 1), max_new_tokens=6, assistant_model=assistant)
    passes = len(rows)
    assert passes and passes % 2 == 0  # as many for ours as for transformers' own


@pytest.mark.parametrize("setting", [ONE_BEAM, {"use_cache": False}, {"cache_implementation": "offloaded"}])
@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_handing_over_runs_the_encoder_once(kind: str, setting: dict) -> None:
    """A call that is handed over costs what it costs without this package."""
    model = tiny_model(kind)
    with (
        forward_rows(model.get_encoder()) as rows,
        contextlib.suppress(RuntimeError, AssertionError),
    ):  # offloading needs a device
        generate(model, **prompts(kind, 2), **{**BEAMS, **setting})
    assert rows == [2]


class Printed:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


@pytest.mark.parametrize("way", ["name", "enabled"])
def test_a_streamer_with_one_beam_gets_every_token_once(way: str) -> None:
    """Handing over does not show it the prompt a second time."""
    stock, ours, model = Printed(), Printed(), tiny_model("llama")
    call = {**prompts("llama", 1), "num_beams": 1, "max_new_tokens": 4, "do_sample": False}
    model.generate(**call, streamer=stock)
    if way == "enabled":
        enable(model).generate(**call, streamer=ours)
    else:
        model.generate(**call, streamer=ours, custom_generate=NAME)
    assert ours.given == stock.given


def model_of(model_class: type, config: Any) -> PreTrainedModel:
    """A tiny random model of a class that keeps no keys in a pool."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.tie_weights()
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = EOS, PAD, None
    return model


def test_a_model_that_reorders_its_own_cache_is_handed_over() -> None:
    """XLNet keeps memories under another name and reorders them itself."""
    config = XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=37, mem_len=64)
    check_handed_over(model_of(XLNetLMHeadModel, config), prompts("llama", 2), **BEAMS)


def test_a_model_with_a_state_of_its_own() -> None:
    """RWKV: one beam is handed over; with several, transformers' own error says that it cannot be reordered."""
    config = RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32,
                        context_length=64, intermediate_size=37)  # fmt: skip
    model = model_of(RwkvForCausalLM, config)
    check_handed_over(model, prompts("llama", 2), max_new_tokens=6)
    try:
        stock = model.generate(**prompts("llama", 2), **BEAMS)
    except ValueError:
        with pytest.raises(ValueError, match="cannot be reordered"):
            generate(model, **prompts("llama", 2), **BEAMS)
    else:  # older releases search all the same
        assert torch.equal(generate(model, **prompts("llama", 2), **BEAMS), stock)


def test_a_model_without_attention() -> None:
    """Mamba: searched here or handed over, but transformers' result."""
    model = model_of(MambaForCausalLM, MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2))
    stock, ours = both(model, prompts("llama", 2), **BEAMS)
    check_equal(stock, ours, check_cache=False)
    assert ours.beam_path in ("recurrent", "handed over")


@pytest.mark.parametrize("length", [3, 4, 9])
def test_keys_of_an_image_beside_those_of_the_prompt(length: int) -> None:
    """Mllama keeps both in one cache, as layers of different lengths (4 for the image): not one tree of tokens."""
    text = dict(DECODERS, num_hidden_layers=3, cross_attention_layers=[1], bos_token_id=1)
    text["rope_scaling"] = {"rope_type": "default"}  # older releases ask for it
    del text["head_dim"]
    vision = dict(
        image_size=28, patch_size=14, num_channels=3, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_global_layers=1, attention_heads=2, max_num_tiles=1, vision_output_dim=32,
        intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1]],
    )  # fmt: skip
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=98)
    model = random_model(MllamaForConditionalGeneration, config)
    inputs = prompts("llama", 2, length, padded=False)
    inputs["input_ids"][:, 0] = 98
    ones = torch.ones(2, 1, dtype=torch.int64)
    inputs |= {
        "pixel_values": torch.randn(2, 1, 1, 3, 28, 28, dtype=torch.float64),
        "aspect_ratio_ids": ones,
        "aspect_ratio_mask": ones.unsqueeze(2),
        "cross_attention_mask": torch.ones(2, length, 1, 1, dtype=torch.int64),
    }
    check_handed_over(model, inputs, **BEAMS)


class Rounded(QuantizedLayer):
    """A quantised layer without another package: keys and values are rounded to halves."""

    def __init__(self) -> None:
        super().__init__(residual_length=2)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return (tensor * 2).round()

    def _dequantize(self, quantized: torch.Tensor) -> torch.Tensor:
        return quantized / 2


@pytest.mark.parametrize("custom_generate", [NAME, beam_search])
def test_a_given_quantised_cache_is_handed_over(custom_generate: Any) -> None:
    """A caller's cache of another kind is used, not replaced: quantised keys give another result than exact ones."""
    model, inputs = tiny_model("llama"), prompts("llama", 3)

    def call(**settings: Any) -> Any:
        cache = Cache(layers=[Rounded(), Rounded()])
        return model.generate(**inputs, **BEAMS, **WHOLE, **{CACHE_ARGUMENT: cache}, **settings)

    try:
        stock = call()
    except IndexError:
        pytest.skip("this release of transformers does not reorder quantised keys (report 45510)")
    exact = model.generate(**inputs, **BEAMS, **WHOLE)
    assert not torch.allclose(stock.sequences_scores, exact.sequences_scores, atol=1e-2)
    ours = call(custom_generate=custom_generate)
    check_equal(stock, ours, check_cache=False)
    assert ours.beam_path == "handed over"


STORED_OTHERWISE = ("quantized", "offloaded", "offloaded_static")


@pytest.mark.parametrize("implementation", ["dynamic", "static", "hybrid", *STORED_OTHERWISE])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_cache_implementations(kind: str, implementation: str) -> None:
    """Equal where transformers runs them; handed over where keys are stored otherwise; else transformers' own error."""
    model, inputs = tiny_model(kind), prompts(kind, 2)
    call = {**inputs, **BEAMS, **WHOLE, "cache_implementation": implementation}
    try:
        stock = model.generate(**call)
    except Exception as error:  # a package or an accelerator is missing here
        with pytest.raises(type(error), match=re.escape(str(error).split("\n")[0][:40])):
            generate(tiny_model(kind), **call)  # the other keeps what it made before the error
        return
    ours = generate(model, **call)
    check_equal(stock, ours, check_cache=False)
    assert ours.beam_path == ("handed over" if implementation in STORED_OTHERWISE else path_of(kind))


@pytest.mark.parametrize("way", ["name", "enabled", "configuration"])
def test_a_paged_cache_implementation_keeps_the_beams(way: str) -> None:
    """transformers drops them without an error (report 45563); here it is the search that was asked for."""
    model, inputs = tiny_model("llama"), prompts("llama", 3)
    stock = model.generate(**inputs, **BEAMS, **WHOLE)
    if way == "configuration" and OLD_RELEASE:
        pytest.skip("this release has configurations check the name, and does not know it")
    if way == "configuration":
        config = GenerationConfig(cache_implementation="paged", **BEAMS, **WHOLE)
        ours = generate(model, **inputs, generation_config=config)
        assert config.cache_implementation == "paged"
    elif way == "enabled":
        ours = enable(model).generate(**inputs, **BEAMS, **WHOLE, cache_implementation="paged")
    else:
        ours = model.generate(**inputs, **BEAMS, **WHOLE, cache_implementation="paged", custom_generate=NAME)
    check_equal(stock, ours)
    assert ours.beam_path == "folded"


@pytest.mark.parametrize("custom_generate", [NAME, beam_search])
@pytest.mark.parametrize("setting", [{"force_words_ids": [[7]]}])
def test_searches_that_left_transformers(setting: dict, custom_generate: Any) -> None:
    """Constrained beams live in a repository of their own: the error says so, and how to reach it."""
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**prompts("llama", 2), **{**BEAMS, "num_return_sequences": 1}, **setting)
    with pytest.raises(ValueError, match=r"Beam Search|custom_generate|trust_remote_code"):
        model.generate(**prompts("llama", 2), **{**BEAMS, "num_return_sequences": 1}, **setting,
                       custom_generate=custom_generate)  # fmt: skip


# --- nothing of the user's is changed ---


def model_state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything of a model that a search could leave changed."""
    modules = list(model.named_modules())
    configs = {name: module.config for name, module in modules if hasattr(module, "config")}
    return {
        "generation_config": copy.deepcopy(vars(model.generation_config)),
        "configs": {name: (id(config), copy.deepcopy(config.to_dict())) for name, config in configs.items()},
        "attention": {name: config._attn_implementation for name, config in configs.items()},
        "attributes": {name: {key: id(value) for key, value in vars(module).items()} for name, module in modules},
        "hooks": {name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in modules},
        "training": [module.training for _, module in modules],
        "parameters": {name: (id(value), value._version) for name, value in model.named_parameters()},
    }


ROUTES: dict[str, dict[str, Any]] = {
    "name": {"custom_generate": NAME}, "gathered": {"custom_generate": NAME, "beam_attention": "gathered"},
    "callable": {"custom_generate": beam_search}, "handed over": {"custom_generate": NAME, "use_cache": False},
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_search_changes_nothing_of_the_model(kind: str, route: str, attention: str) -> None:
    """Configurations (attention included), attributes, hooks and weights are as before."""
    model = tiny_model(kind)
    model.set_attn_implementation(attention)
    before = model_state(model)
    assert attention in before["attention"].values() or path_of(kind) == "gathered"  # T5 of old has one attention
    GenerationMixin.generate(model, **prompts(kind, 2), **BEAMS, **WHOLE, **ROUTES[route])
    assert model_state(model) == before
    assert current_step() is None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_search_changes_nothing_of_its_arguments(kind: str, route: str) -> None:
    """Tensors, lists and the configuration object are as the caller made them, and can be passed again."""
    model = tiny_model(kind)
    config = GenerationConfig(**BEAMS, **WHOLE, eos_token_id=[EOS, 9], pad_token_id=PAD, bad_words_ids=[[7], [8, 9]])
    call = {
        **prompts(kind, 2), "generation_config": config, "stopping_criteria": StoppingCriteriaList(),
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.7)]), **ROUTES[route],
    }  # fmt: skip
    given, before = dict(call), copy.deepcopy({key: value for key, value in call.items() if key != "custom_generate"})
    first = model.generate(**call)
    assert call == given
    assert vars(config) == vars(before["generation_config"])
    assert len(call["logits_processor"]) == 1 and len(call["stopping_criteria"]) == 0
    for name, value in prompts(kind, 2).items():
        assert torch.equal(call[name], value) and torch.equal(call[name], before[name])
    check_equal(first, model.generate(**call))


def test_the_model_s_own_settings_are_the_defaults() -> None:
    """`generation_config` of the model is read, and a keyword overrides it for one call only."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    model.generation_config.update(num_beams=5, num_return_sequences=3, max_new_tokens=4)
    assert generate(model, **inputs).shape == (6, 11)
    assert generate(model, **inputs, num_return_sequences=5).shape == (10, 11)
    assert generate(model, **inputs).shape == (6, 11)
    assert model.generation_config.num_return_sequences == 3


class Broken(RuntimeError):
    """Something that a user's hook or kernel raises."""


def fail_at(model: PreTrainedModel, step: int, error: BaseException, *, once: bool = True) -> Callable[[], None]:
    """Let the last decoder layer raise in its forward pass number `step` (or from then on); returns what undoes it."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    layer = (decoder.layers if hasattr(decoder, "layers") else decoder.block)[-1]
    calls = []

    def raise_there(*_: Any) -> None:
        calls.append(None)
        if len(calls) == step + 1 or (len(calls) > step and not once):
            raise error

    return layer.register_forward_pre_hook(raise_there).remove


@pytest.mark.parametrize("route", ["name", "callable"])
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("error", [Broken("out of luck"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("kind", ["llama", "t5", "bart"])
def test_an_error_in_the_middle_leaves_nothing_behind(kind: str, error: BaseException, step: int, route: str) -> None:
    """The caller gets the error, the model is as before, and the next call is the folded search that it would be."""
    model, inputs = of_its_own_class(tiny_model(kind)), prompts(kind, 2)
    stock, before = model.generate(**inputs, **BEAMS, **WHOLE), model_state(model)
    undo = fail_at(model, step, error, once=False)
    with pytest.raises(type(error)):
        model.generate(**inputs, **BEAMS, **WHOLE, **ROUTES[route])
    undo()
    assert model_state(model) == before
    assert current_step() is None
    ours = model.generate(**inputs, **BEAMS, **WHOLE, **ROUTES[route])
    check_equal(stock, ours)
    assert ours.beam_path == path_of(kind)


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("error", [Broken("out of luck"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_that_happens_once(error: BaseException, step: int) -> None:
    """An interrupt reaches the caller; an error does, or the step is run again and the result is right."""
    model, inputs = of_its_own_class(tiny_model("llama")), prompts("llama", 2)
    stock, before = model.generate(**inputs, **BEAMS, **WHOLE), model_state(model)
    undo = fail_at(model, step, error)
    try:
        check_equal(stock, generate(model, **inputs, **BEAMS, **WHOLE))
        assert isinstance(error, Broken)
    except type(error):
        pass
    undo()
    assert model_state(model) == before
    check_equal(stock, generate(model, **inputs, **BEAMS, **WHOLE))


def test_an_interrupt_under_stock_search_leaves_our_cache_resettable() -> None:
    """A cache that was in use when the search was interrupted serves again after `reset`."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    cache = PagedBeamCache(model.config, num_beams=4)
    undo = fail_at(model, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **BEAMS, **{CACHE_ARGUMENT: cache})
    undo()
    cache.reset()
    ours = model.generate(**inputs, **BEAMS, **WHOLE, **{CACHE_ARGUMENT: cache})
    ours.beam_path = "gathered"
    check_equal(model.generate(**inputs, **BEAMS, **WHOLE), ours)


# --- two threads ---


class Rendezvous:
    """Two threads wait for each other at each of their meetings, but not for long, should one be kept out by a lock."""

    def __init__(self) -> None:
        self.arrived = [0, 0]
        self.changed = threading.Condition()

    def arrive(self, thread: int) -> None:
        with self.changed:
            self.arrived[thread] += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.arrived[1 - thread] >= self.arrived[thread], timeout=0.3)


class MeetAtScores(LogitsProcessor):
    """Meets between two forward passes, where no folded step is running, at the steps named."""

    def __init__(self, meeting: Rendezvous, thread: int, steps: range):
        self.meeting, self.thread, self.steps, self.step = meeting, thread, steps, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.step in self.steps:
            self.meeting.arrive(self.thread)
        self.step += 1
        return scores


def search_at_once(models: list[PreTrainedModel], inputs: list[dict], steps: int = 4) -> list[Any]:
    """Two searches whose decode steps overlap.

    thread 0:  [ layer 0   layer 1 ]   scores  ...      [ ] a forward pass, in which settings may be changed
    thread 1:     scores [ layer 0   layer 1 ] ...      each column is a meeting
    """
    meeting, results = Rendezvous(), [None, None]

    def meet(thread: int) -> Callable[..., None]:
        return lambda module, args: meeting.arrive(thread) if args[0].shape[1] == 1 else None

    def search(thread: int) -> None:
        meet_at = MeetAtScores(meeting, thread, range(1, steps) if thread == 0 else range(steps - 1))
        call = {**BEAMS, **WHOLE, "eos_token_id": None, "max_new_tokens": steps}
        try:
            results[thread] = generate(models[thread], **inputs[thread], **call, logits_processor=[meet_at])
        except Exception as error:
            results[thread] = error

    layers = [(thread, layer) for thread in (0, 1) for layer in models[thread].model.layers]
    hooks = [layer.register_forward_pre_hook(meet(thread)) for thread, layer in layers]
    threads = [threading.Thread(target=search, args=(thread,)) for thread in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    return results


@pytest.mark.parametrize("shared_configuration", [False, True], ids=["two configurations", "one configuration"])
def test_two_threads_search_on_two_models_at_once(shared_configuration: bool) -> None:
    """Each gets its own result, and both models their settings back, also if they were made from one configuration."""
    first, second = of_its_own_class(tiny_model("llama")), of_its_own_class(tiny_model("llama"))
    if shared_configuration:
        second = type(second)(first.config).eval()
        second.load_state_dict(first.state_dict())
        second.generation_config = copy.deepcopy(first.generation_config)
    inputs = [prompts("llama", 3), prompts("llama", 2, 5, seed=3)]
    call = {**BEAMS, **WHOLE, "eos_token_id": None, "max_new_tokens": 4}
    stock = [first.generate(**given, **call) for given in inputs]
    before = [model_state(model) for model in (first, second)]
    ours = search_at_once([first, second], inputs)
    failed = [result for result in ours if isinstance(result, BaseException)]
    assert not failed, failed
    for expected, result in zip(stock, ours, strict=True):
        check_equal(expected, result)
    assert [model.config._attn_implementation for model in (first, second)] == ["sdpa", "sdpa"]
    assert [result.beam_path for result in ours] == ["folded", "folded"]
    assert [model_state(model) for model in (first, second)] == before


def test_a_thread_without_a_search_is_not_disturbed() -> None:
    """While one thread decodes over the pool, another one's plain forward pass of another model is its own."""
    model, other = tiny_model("llama"), tiny_model("qwen3")
    ids = prompts("qwen3", 2)["input_ids"]
    expected, seen = other(ids).logits, []

    def meanwhile(module: torch.nn.Module, args: tuple) -> None:
        if args[0].shape[1] == 1 and not seen:
            thread = threading.Thread(target=lambda: seen.extend([current_step(), other(ids).logits]))
            thread.start()
            thread.join()

    hook = model.model.layers[1].register_forward_pre_hook(meanwhile)
    generate(model, **prompts("llama", 2), **BEAMS)
    hook.remove()
    assert seen[0] is None
    torch.testing.assert_close(seen[1], expected)


def with_sinks() -> PreTrainedModel:
    """A tiny gpt-oss, whose attention is transformers' eager one, with a sink in each head."""
    experts = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    return random_model(GptOssForCausalLM, GptOssConfig(**{**DECODERS, **experts}, sliding_window=4), torch.float32)


def with_softcap() -> PreTrainedModel:
    """A tiny Gemma 2, which caps its attention scores."""
    config = Gemma2Config(**DECODERS, sliding_window=4, attn_logit_softcapping=0.5, attn_implementation="eager")
    return random_model(Gemma2ForCausalLM, config, torch.float32)


@pytest.mark.parametrize("same_model", [True, False], ids=["the same model", "a model of the same configuration"])
@pytest.mark.parametrize("made", [with_sinks, with_softcap])
def test_a_plain_forward_pass_in_the_middle_of_a_folded_step(made: Callable, same_model: bool) -> None:
    """In another thread it finds the borrowed attention setting, and gets what the model's own attention gives.

    So does a search of transformers' own there, with its cache; and the search that was interrupted goes on folded.
    """
    model = of_its_own_class(made())
    other = model if same_model else copy.deepcopy(model)
    for module in other.modules():
        if not same_model and hasattr(module, "config"):
            module.config = model.config
    inputs, meanwhile_inputs = prompts("llama", 2), prompts("llama", 3, 6, seed=5)

    def plain() -> list[torch.Tensor]:
        with torch.no_grad():
            logits = other(**meanwhile_inputs).logits
        return [logits, other.generate(**meanwhile_inputs, **BEAMS, **WHOLE).sequences_scores]

    stock, expected, seen = model.generate(**inputs, **BEAMS, **WHOLE), plain(), []

    def meanwhile(module: torch.nn.Module, args: tuple) -> None:
        if current_step() is not None and not seen:
            assert model.config._attn_implementation == NAME
            seen.append("begun")
            thread = threading.Thread(target=lambda: seen.extend(plain()))
            thread.start()
            thread.join()

    hook = model.model.layers[1].register_forward_pre_hook(meanwhile)
    ours = generate(model, **inputs, **BEAMS, **WHOLE)
    hook.remove()
    check_equal(stock, ours)
    assert ours.beam_path == "folded"
    torch.testing.assert_close(seen[1:], expected, rtol=0, atol=0)


def test_a_given_cache_of_transformers_own_stays_the_callers() -> None:
    """An empty `DynamicCache` for the call is accepted; a prefix in it is read, and not written to."""
    model, inputs = tiny_model("llama"), prompts("llama", 2, padded=False)
    stock = model.generate(**inputs, **BEAMS, **WHOLE)
    ours = generate(model, **inputs, **BEAMS, **WHOLE, **{CACHE_ARGUMENT: DynamicCache(config=model.config)})
    check_equal(stock, ours)
    prefix = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:, :-1], **{CACHE_ARGUMENT: prefix})
    ours = generate(model, **inputs, **BEAMS, **WHOLE, **{CACHE_ARGUMENT: prefix})
    check_equal(stock, ours)
    assert prefix.get_seq_length() == 6 and prefix.layers[0].keys.shape[0] == 2
