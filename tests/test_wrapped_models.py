"""Models as people hold them equal stock: adapters, offloaded, split, quantised and compiled ones, in any precision."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from comparing import NO_CONTINUATION, OLD_RELEASE, check_equal, check_same_call, returned_cache, search_both
from packaging.version import parse
from tiny_models import (
    DECODERS,
    ENCODER_DECODER,
    EOS,
    START,
    double_model,
    path_of,
    prompts,
    prompts_for,
    random_model,
    shared_model,
    tiny_model,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from watching import Watch, of_its_own_class

import hf_paged_beam
from hf_paged_beam.cache import FoldedStep, attention_configs, parts_of
from hf_paged_beam.versions import CACHE_ARGUMENT, NEWEST_TOKEN

WIDTH = 4
SEARCH = {"num_beams": WIDTH, "num_return_sequences": WIDTH, "max_new_tokens": 7}
KINDS = ("llama", "gpt2", "t5", "bart")
BEFORE_5 = parse(transformers.__version__) < parse("5.0")


def check_path(model: Any, inputs: dict, path: str, **settings: Any) -> tuple[Any, Any]:
    """The same call both ways gives the same, and ours went the way that it should."""
    stock, ours = check_same_call(model, inputs, **{**SEARCH, **settings})
    assert ours.beam_path == path, getattr(ours, "handed_over_because", None)
    return stock, ours


def differ(one: Any, other: Any) -> bool:
    """Whether two outputs have other scores by more than rounding."""
    return not torch.allclose(one.sequences_scores, other.sequences_scores, atol=1e-3)


# --- adapters (PEFT) ---


def peft_module() -> Any:
    return pytest.importorskip("peft", reason="PEFT is not installed")


def knows_the_cache() -> bool:
    """Whether PEFT looks for the cache under the name that this transformers gives it.

    Where it does not, it takes every step for the prompt's: it puts virtual tokens before each token, and its prefix
    where no model looks.
    """
    source = inspect.getsource(peft_module().PeftModelForCausalLM.prepare_inputs_for_generation)
    return f'"{CACHE_ARGUMENT}"' in source


def adapter_config(method: str, kind: str) -> Any:
    peft = peft_module()
    task = "SEQ_2_SEQ_LM" if kind in ENCODER_DECODER else "CAUSAL_LM"
    if method == "lora":
        targets = {"t5": ["q", "v"], "gpt2": ["c_attn"]}.get(kind, ["q_proj", "v_proj"])
        return peft.LoraConfig(task_type=task, r=4, target_modules=targets, fan_in_fan_out=kind == "gpt2")
    if method == "ia3":
        return peft.IA3Config(task_type=task)
    if method == "p-tuning":
        return peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=16)
    makes = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    return makes[method](task_type=task, num_virtual_tokens=3)


def shake_adapters(model: Any) -> Any:
    """Give adapters weights that change the results: new ones begin as the identity."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "ia3" in name:
            parameter.data.uniform_(0.2, 2)
        elif "lora" in name or "prompt" in name:
            parameter.data.normal_(0, 0.3)
    return model.eval()


def adapted(method: str, kind: str, *more: str) -> Any:
    """A tiny model with an adapter named "default", and with as many more of its kind as names are given."""
    model = peft_module().get_peft_model(tiny_model(kind), adapter_config(method, kind))
    for name in more:
        model.add_adapter(name, adapter_config(method, kind))
    return shake_adapters(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_an_adapter_within_the_layers(method: str, kind: str) -> None:
    """LoRA and (IA)3 change what layers compute, and nothing else."""
    model, inputs = adapted(method, kind), prompts(kind, 3)
    stock, _ = check_path(model, inputs, path_of(kind))
    plain, _ = check_same_call(shared_model(kind), inputs, **SEARCH)
    assert differ(stock, plain)


@pytest.mark.parametrize("kind", ["llama", "t5", "bart"])
def test_several_adapters(kind: str) -> None:
    """Each one when it is active; none while they are disabled; the merged model, and the model without them."""
    model, inputs, path = adapted("lora", kind, "other"), prompts(kind, 3), path_of(kind)
    first, _ = check_path(model, inputs, path)
    model.set_adapter("other")
    second, _ = check_path(model, inputs, path)
    assert differ(first, second)
    plain = shared_model(kind).generate(**inputs, **SEARCH, return_dict_in_generate=True, output_scores=True)
    with model.disable_adapter():
        disabled, _ = check_path(model, inputs, path)
    assert not differ(disabled, plain)
    merged, _ = check_path(model.merge_and_unload(), inputs, path)
    assert not differ(merged, second)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_an_adapter_for_each_prompt(kind: str) -> None:
    """`adapter_names` binds an adapter to every row of every beam, before there are any: transformers' own search."""
    model, inputs = adapted("lora", kind, "other"), prompts(kind, 3)
    names = ["default", "other", "__base__"]
    stock, ours = check_path(model, inputs, "handed over", adapter_names=names)
    assert "adapter_names" in ours.handed_over_because
    for row, name in enumerate(names[:2]):
        model.set_adapter(name)
        alone, _ = check_path(model, inputs, path_of(kind))
        prompt = slice(row * WIDTH, (row + 1) * WIDTH)
        torch.testing.assert_close(alone.sequences_scores[prompt], stock.sequences_scores[prompt], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["prompt", "p-tuning"])
def test_virtual_tokens(method: str, kind: str) -> None:
    """Prompt tuning and P-tuning put embeddings before the prompt; a PEFT that does so at every step is stock's."""
    once = kind in ENCODER_DECODER or knows_the_cache()
    model, inputs = adapted(method, kind), prompts(kind, 3)
    stock, _ = check_path(model, inputs, path_of(kind) if once else "handed over")
    plain, _ = check_same_call(shared_model(kind), inputs, **SEARCH)
    assert differ(stock, plain)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral", "t5", "bart"])
def test_a_prefix_of_keys(kind: str) -> None:
    """Prefix tuning puts a cache that holds its prefix in the place of ours: the search goes on from there.

    Encoder-decoder models before 5.1 or so count positions without it, so that their own masks hide what is newest.
    """
    model, inputs = adapted("prefix", kind), prompts(kind, 3)
    path = "handed over" if not NEWEST_TOKEN and kind in ENCODER_DECODER else path_of(kind)
    stock, ours = check_path(model, inputs, path)
    if knows_the_cache() and kind != "mistral":  # its window has left the prefix behind
        plain, _ = check_same_call(shared_model(kind), inputs, **SEARCH)
        assert differ(stock, plain)
    if path != "handed over":
        assert isinstance(
            returned_cache(ours), (hf_paged_beam.PagedBeamCache, hf_paged_beam.PagedBeamEncoderDecoderCache)
        )


@pytest.mark.parametrize("order", ["adapter first", "enabled first"])
def test_an_enabled_model_with_an_adapter(order: str) -> None:
    """`enable` takes a PEFT model, and PEFT takes an enabled one: plain ``generate`` is paged in both."""
    if order == "adapter first":
        model = hf_paged_beam.enable(adapted("lora", "llama"))
    else:
        enabled = hf_paged_beam.enable(tiny_model("llama"))
        model = shake_adapters(peft_module().get_peft_model(enabled, adapter_config("lora", "llama")))
    call = {**prompts("llama", 3), **SEARCH, "return_dict_in_generate": True, "output_scores": True}
    ours = model.generate(**call)
    assert ours.beam_path == "folded"
    check_equal(adapted("lora", "llama").generate(**call), ours)


# --- parts elsewhere (accelerate) ---


@contextlib.contextmanager
def offloaded(how: str, kind: str, folder: Path) -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    model, device = tiny_model(kind), torch.device("cpu")
    if how == "cpu":
        yield accelerate.cpu_offload(model, execution_device=device)
    elif how == "disk":
        yield accelerate.disk_offload(model, str(folder), execution_device=device)
    else:
        model.save_pretrained(folder / "saved")
        places = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu",
                  "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
        yield type(model).from_pretrained(folder / "saved", device_map=places, offload_folder=folder / "parts")


@pytest.mark.parametrize(
    ("how", "kind"), [*(("cpu", kind) for kind in KINDS), ("disk", "llama"), ("disk", "t5"), ("device_map", "llama")]
)
def test_weights_kept_elsewhere(how: str, kind: str, tmp_path: Path) -> None:
    """Hooks fetch a layer's weights, and move what it is given: the model is none that has its weights at hand."""
    with offloaded(how, kind, tmp_path) as model:
        assert any(parameter.device.type == "meta" for parameter in model.parameters())
        assert any(hasattr(module, "_hf_hook") for module in model.modules())
        check_path(model, prompts(kind, 3), path_of(kind))


def moved_to(device: torch.device) -> Callable:
    """A hook that moves all that a layer is given, as accelerate's do; the cache moves nothing."""

    def move(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return given.to(device)
        return tuple(move(part) for part in given) if isinstance(given, tuple) else given

    return lambda module, args, kwargs: (move(args), {name: move(given) for name, given in kwargs.items()})


def split_model(kind: str, second: torch.device) -> PreTrainedModel:
    """A model whose second layer, and what follows, lie on another device."""
    model = tiny_model(kind)
    for part in (model.model.layers[1], model.model.norm, model.lm_head):
        part.to(second)
    model.model.layers[1].register_forward_pre_hook(moved_to(second), with_kwargs=True)
    return model


@pytest.mark.parametrize("path", ["folded", "gathered"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_layers_on_two_devices(kind: str, padded: bool, path: str) -> None:
    """No operation mixes devices: pools stay with their layers, and what a step shares follows to each.

    The device ``meta`` stands for a second accelerator: it has shapes and no values.
    """
    second, batch, width, length = torch.device("meta"), 2, 3, 5
    model = split_model(kind, second)
    cache = hf_paged_beam.PagedBeamCache(model.config, num_beams=width)
    cache.accept_wide_prompt(False)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1, :2] = 0 if padded else 1
    with torch.no_grad(), Watch():
        ids = torch.full((batch, length), 7)
        logits = model(input_ids=ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits
        cache.begin_decode(batch, torch.device("cpu"))
        mask = mask.repeat_interleave(width, dim=0)
        for step in range(4):
            highest = cache.fork(torch.arange(batch * width) // width * width)
            cache.grow(int(highest))
            mask = torch.cat([mask, mask.new_ones(batch * width, 1)], dim=1)
            given = {"input_ids": torch.full((batch * width, 1), 9), "attention_mask": mask,
                     "position_ids": mask.sum(1, keepdim=True) - 1, CACHE_ARGUMENT: cache}  # fmt: skip
            with (
                FoldedStep(cache.index, attention_configs(parts_of(model)))
                if path == "folded"
                else contextlib.nullcontext()
            ):
                logits = model(**given).logits
            assert logits.shape == (batch * width, 1, model.config.vocab_size) and logits.device == second
            assert [layer._keys.device for layer in cache.layers] == [torch.device("cpu"), second]
            assert cache.layers[1]._keys.shape == cache.layers[0]._keys.shape
            assert cache.layers[1].keys.device == second and cache.layers[1].length == length + step + 1


# --- tensor parallel ---

RANK_OF_TWO = """
import json, sys, torch
import torch.distributed as dist
from comparing import both, check_equal
from tiny_models import prompts
from transformers import AutoModelForCausalLM
from watching import forward_rows
import hf_paged_beam

dist.init_process_group("gloo")
try:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", device_mesh=mesh).eval()
except (RuntimeError, ImportError, TypeError) as error:
    print(json.dumps({"cannot": repr(error)}))
    sys.exit()
weight = model.model.layers[0].self_attn.q_proj.weight
local = weight.to_local() if hasattr(weight, "to_local") else weight
call = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 7}
stock, ours = both(model, prompts("llama", 3), **call)
check_equal(stock, ours)
passes = []
for settings in (call, {**call, "synced_gpus": True}):
    with forward_rows(model) as rows:
        again = model.generate(**prompts("llama", 3), **settings, custom_generate="hf_paged_beam",
                               return_dict_in_generate=True, output_scores=True)
    check_equal(stock, again)
    passes.append(rows)
print(json.dumps({"path": ours.beam_path, "passes": passes, "scores": ours.sequences_scores.tolist(),
                  "sequences": ours.sequences.tolist(), "local": list(local.shape)}))
"""


def run_on_two_ranks(script: str, *arguments: str) -> list[dict]:
    """Run a script in two processes that find each other; what each printed last, as JSON."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = str(chosen.getsockname()[1])
    tests = str(Path(__file__).parent)
    paths = os.pathsep.join([tests, str(Path(tests).parent), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2",
              "OMP_NUM_THREADS": "1"}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments], env={**common, "RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(errors[-3000:] for _, errors in said)
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in said]


def test_tensor_parallel(tmp_path: Path) -> None:
    """Heads split over two ranks: each has stock's result, and both run the model equally often."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    config = LlamaConfig(**{**DECODERS, "vocab_size": 100, "intermediate_size": 36})
    model = random_model(LlamaForCausalLM, config, torch.float32)
    model.save_pretrained(tmp_path)
    first, second = run_on_two_ranks(RANK_OF_TWO, str(tmp_path))
    if "cannot" in first:
        pytest.skip(f"from_pretrained(tp_plan='auto') raises on CPUs in this release: {first['cannot']}")
    assert first == second
    assert first["path"] == "folded" and first["local"] == [16, 32]
    alone = model.generate(
        **prompts("llama", 3), **SEARCH, return_dict_in_generate=True, output_scores=True, do_sample=False
    )
    torch.testing.assert_close(torch.tensor(first["scores"]), alone.sequences_scores, atol=1e-4, rtol=0)
    assert first["passes"][0][0] == 3 and set(first["passes"][0][1:]) == {3 * WIDTH}
    assert first["passes"][1] == first["passes"][0]


# --- quantised weights ---


def quanto(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    package = pytest.importorskip("optimum.quanto")
    package.quantize(model, weights=package.qint8)
    package.freeze(model)
    return model


def quanto_on_loading(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    pytest.importorskip("optimum.quanto")
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, quantization_config=transformers.QuantoConfig(weights="int8"))


def torchao(model: PreTrainedModel, folder: Path, config: str = "Int8WeightOnlyConfig") -> PreTrainedModel:
    package = pytest.importorskip("torchao.quantization")
    package.quantize_(model, getattr(package, config)())
    return model


def torchao_on_loading(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    package = pytest.importorskip("torchao.quantization")
    model.save_pretrained(folder)
    settings = transformers.TorchAoConfig(package.Int8WeightOnlyConfig())
    try:
        return type(model).from_pretrained(folder, quantization_config=settings)
    except NotImplementedError as error:
        if OLD_RELEASE:
            pytest.skip(f"this release cannot load it: {error}"[:100])
        raise


def bitsandbytes_on_loading(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model.save_pretrained(folder)
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    return type(model).from_pretrained(folder, quantization_config=settings)


QUANTISERS = [quanto, quanto_on_loading, torchao, torchao_on_loading, bitsandbytes_on_loading]


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("quantise", QUANTISERS)
def test_quantised_weights(quantise: Callable, kind: str, tmp_path: Path) -> None:
    """Weights of eight bits, quantised in place or on loading."""
    inputs = prompts(kind, 3)
    stock, _ = check_path(quantise(tiny_model(kind), tmp_path), inputs, path_of(kind))
    plain = shared_model(kind).generate(**inputs, **SEARCH, return_dict_in_generate=True, output_scores=True)
    assert not torch.equal(stock.sequences_scores, plain.sequences_scores)


@pytest.mark.parametrize("kind", ["llama", "t5", "bart"])
def test_quantised_activations(kind: str, tmp_path: Path) -> None:
    """Activations are quantised row by row: gathered keys give stock's scores, folded ones what rounding makes of them.

    A last bit can move an activation to the next of 255 levels, so that folded scores agree to a hundredth.
    """
    model = torchao(tiny_model(kind), tmp_path, "Int8DynamicActivationInt8WeightConfig")
    check_path(model, prompts(kind, 3), "gathered", ours_only={"beam_attention": "gathered"})
    stock, ours = (
        model.generate(**prompts(kind, 3), **SEARCH, return_dict_in_generate=True, output_scores=True, **extra)
        for extra in ({}, {"custom_generate": "hf_paged_beam"})
    )
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=2e-2, rtol=0)


@pytest.mark.parametrize("beam_attention", ["folded", "gathered"])
def test_keys_of_a_class_of_their_own(beam_attention: str) -> None:
    """Quanto's quantised activations are tensors of a subclass, which transformers' cache takes: so do pools.

    Their levels are coarse, so that in a batch the number of rows alone can move an activation to the next level.
    """
    package = pytest.importorskip("optimum.quanto")
    model = tiny_model("llama")
    package.quantize(model, weights=package.qint8, activations=package.qint8)
    package.freeze(model)
    check_path(model, prompts("llama", 1), beam_attention, ours_only={"beam_attention": beam_attention})
    stock, ours = (
        model.generate(**prompts("llama", 3), **SEARCH, return_dict_in_generate=True, output_scores=True, **extra)
        for extra in ({}, {"custom_generate": "hf_paged_beam", "beam_attention": beam_attention})
    )
    best = slice(None, None, WIDTH)
    torch.testing.assert_close(ours.sequences_scores[best], stock.sequences_scores[best], atol=2e-2, rtol=0)


# --- compiled models ---


def compiled_llama(how: str) -> Any:
    """A Llama of one layer, and of a class that no search has met, compiled by a backend that runs what was traced."""
    torch._dynamo.reset()
    model = of_its_own_class(tiny_llama())
    if how == "wrapped":
        return torch.compile(model, backend="eager")
    if how == "in place":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=how == "one graph")
    return model


def tiny_llama() -> PreTrainedModel:
    return random_model(LlamaForCausalLM, LlamaConfig(**{**DECODERS, "num_hidden_layers": 1}), torch.float32)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("how", ["wrapped", "in place", "forward", "one graph"])
def test_a_compiled_model(how: str) -> None:
    """Right, folded, and no more is compiled the longer a search goes on; also when the class was met before."""
    model, inputs = compiled_llama(how), prompts("llama", 3)
    torch._dynamo.utils.counters.clear()
    call = {**inputs, **SEARCH, "return_dict_in_generate": True, "output_scores": True}
    compiled = []
    for tokens in (4, 12, 12):
        ours = model.generate(**{**call, "max_new_tokens": tokens}, custom_generate="hf_paged_beam")
        check_equal(tiny_llama().generate(**{**call, "max_new_tokens": tokens}), ours)
        assert ours.beam_path == "folded"
        compiled.append(graphs())
    assert compiled[0] == compiled[-1]
    assert not torch._dynamo.utils.counters["graph_break"]
    if how != "wrapped":  # a wrapper's `generate` is that of the model within, which is not compiled
        assert compiled[0] > 0


def test_a_compiled_model_leaves_others_of_its_class_alone() -> None:
    """That a model is compiled says nothing of whether its class can be folded."""
    compiled, inputs = compiled_llama("one graph"), prompts("llama", 3)
    plain = tiny_llama()
    plain.__class__ = type(compiled)
    for model in (compiled, plain, compiled):
        ours = model.generate(
            **inputs, **SEARCH, return_dict_in_generate=True, output_scores=True, custom_generate="hf_paged_beam"
        )
        assert ours.beam_path == "folded"


def test_a_compiled_model_in_turn() -> None:
    """Ours and stock's by turns, with the same compiled forward: what was traced for one is not the other's."""
    model, inputs = compiled_llama("forward"), prompts("llama", 2)
    call = {**inputs, **SEARCH, "max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True}
    expected = tiny_llama().generate(**call)
    for custom_generate in ("hf_paged_beam", None, "hf_paged_beam", None):
        result = model.generate(**call, custom_generate=custom_generate)
        torch.testing.assert_close(result.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)
        assert torch.equal(result.sequences, expected.sequences)
        assert getattr(result, "beam_path", "folded") == "folded"
    assert model.config._attn_implementation == tiny_llama().config._attn_implementation


def test_compiled_models_in_two_threads() -> None:
    """Both are right, and what they run afterwards is compiled again."""
    torch._dynamo.reset()
    inputs, models = prompts("llama", 2), [compiled_llama("forward") for _ in range(2)]
    call = {**inputs, **SEARCH, "return_dict_in_generate": True, "output_scores": True}
    expected = tiny_llama().generate(**call)
    for model in models:  # traced one after the other: dynamo itself may not be entered twice
        model.generate(**call, custom_generate="hf_paged_beam")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        searches = [pool.submit(model.generate, **call, custom_generate="hf_paged_beam") for model in models * 3]
        for search in searches:
            check_equal(expected, search.result())
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_model_compiled_to_machine_code() -> None:
    """The default backend."""
    torch._dynamo.reset()
    model, inputs = tiny_llama(), prompts("llama", 2)
    expected = tiny_llama().generate(**inputs, **SEARCH, return_dict_in_generate=True, output_scores=True)
    model.forward = torch.compile(model.forward)
    _, ours = check_path(model, inputs, "folded")
    check_equal(expected, ours)


@pytest.mark.parametrize("setting", ["static", "config", "static and config"])
def test_settings_that_ask_for_a_compiled_search(setting: str) -> None:
    """`cache_implementation="static"` and `compile_config`: transformers' search of beams runs, and so does ours."""
    settings: dict[str, Any] = {"cache_implementation": "static"} if "static" in setting else {}
    if "config" in setting:
        settings["compile_config"] = transformers.CompileConfig(backend="eager", fullgraph=False)
    check_path(tiny_llama(), prompts("llama", 3), "folded", **settings)


# --- precision ---


def rescored(model: PreTrainedModel, inputs: dict, output: Any) -> torch.Tensor:
    """Mean log-probability of what each returned sequence generated, by `model`: ``[rows]`` float64."""
    scores = []
    for row, sequence in enumerate(output.sequences):
        prompt = {name: given[row // WIDTH] for name, given in inputs.items()}
        real = prompt["attention_mask"].bool()
        start = 1 if model.config.is_encoder_decoder else real.shape[0]
        generated = sequence[start:]
        ends = (generated == EOS).nonzero()
        generated = generated[: int(ends[0]) + 1] if len(ends) else generated
        source = prompt["input_ids"][real].unsqueeze(0)
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                decoder = torch.cat([torch.tensor([START]), generated]).unsqueeze(0)
                logits = model(input_ids=source, decoder_input_ids=decoder).logits
            else:
                logits = model(input_ids=torch.cat([source, generated.unsqueeze(0)], dim=1)).logits
        log_probs = logits[0, -len(generated) - 1 : -1].double().log_softmax(-1)
        scores.append(log_probs.gather(1, generated.unsqueeze(1)).mean())
    return torch.stack(scores)


def check_quality(model: PreTrainedModel, inputs: dict, stock: Any, ours: Any, allowed: float) -> None:
    """By an exact model, the sequences found are as good as stock's: each prompt's best, and all beams together."""
    assert (ours.sequences_scores > NO_CONTINUATION).all()
    theirs, mine = (rescored(model, inputs, output).view(-1, WIDTH) for output in (stock, ours))
    assert (theirs[:, 0] - mine[:, 0]).max() <= allowed, f"stock {theirs}, ours {mine}"
    assert (theirs.mean() - mine.mean()).abs() <= allowed, f"stock {theirs}, ours {mine}"
    assert (mine.view(-1) - ours.sequences_scores).abs().max() <= 2 * allowed


@pytest.mark.parametrize("beam_attention", ["auto", "gathered"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str, dtype: torch.dtype, beam_attention: str) -> None:
    """In 16 bits a near-tie may fall either way; what is found is as good."""
    model, inputs = shared_model(kind, dtype), prompts(kind, 3)
    call = {**SEARCH, "return_dict_in_generate": True, "output_scores": True}
    stock = model.generate(**inputs, **call)
    ours = model.generate(**inputs, **call, custom_generate="hf_paged_beam", beam_attention=beam_attention)
    assert ours.beam_path == (path_of(kind) if beam_attention == "auto" else "gathered")
    assert ours.sequences_scores.dtype == stock.sequences_scores.dtype == torch.float32
    check_quality(copy.deepcopy(model).float(), inputs, stock, ours, 0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str, dtype: torch.dtype) -> None:
    """Layers that compute in bfloat16 between float32 ones: pools take what keys they get."""
    model, inputs = shared_model(kind, dtype), prompts(kind, 3)
    call = {**SEARCH, "return_dict_in_generate": True, "output_scores": True}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model.generate(**inputs, **call)
        ours = model.generate(**inputs, **call, custom_generate="hf_paged_beam")
    assert ours.beam_path == path_of(kind)
    check_quality(copy.deepcopy(model).float(), inputs, stock, ours, 0.06)
    held = {layer._keys.dtype for layer in returned_cache(ours).indexed_layers()}
    assert held <= {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("rows_per_prompt", [1, WIDTH])
@pytest.mark.parametrize("prefix_dtype", [torch.float32, torch.bfloat16])
def test_autocast_over_a_prefix_of_another_dtype(prefix_dtype: torch.dtype, rows_per_prompt: int) -> None:
    """A prefix computed without autocast and a search with it, or the other way: one pool takes both dtypes."""
    model, inputs = shared_model("llama"), prompts("llama", 3, padded=False)

    def prefix(rows: int) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=prefix_dtype == torch.bfloat16)
        with torch.no_grad(), half:
            model(input_ids=inputs["input_ids"][:, :4].repeat_interleave(rows, dim=0), **{CACHE_ARGUMENT: cache})
        return cache

    call = {**SEARCH, "return_dict_in_generate": True, "output_scores": True}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=prefix_dtype == torch.float32):
        stock = model.generate(**inputs, **call, **{CACHE_ARGUMENT: prefix(WIDTH)})
        ours = model.generate(
            **inputs, **call, **{CACHE_ARGUMENT: prefix(rows_per_prompt)}, custom_generate="hf_paged_beam"
        )
    assert ours.beam_path == "folded"
    check_quality(model, inputs, stock, ours, 0.03)


# --- modes ---


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_modes(kind: str, mode: Callable) -> None:
    """Whatever the caller's mode; a cache that was returned under one mode can be read under another."""
    model, inputs = double_model(kind), prompts_for(double_model(kind), kind, 3)
    with mode():
        _, ours = check_path(model, inputs, path_of(kind))
    returned_cache(ours).to_dynamic()
    assert not ours.sequences_scores.requires_grad


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_mode(kind: str, checkpointing: bool) -> None:
    """In training mode, dropout aside, the same; where gradient checkpointing turns the cache off, stock's runs."""
    model, inputs = without_dropout(tiny_model(kind)).train(), prompts(kind, 3)
    if checkpointing:
        model.gradient_checkpointing_enable()
    stock, ours = search_both(model, inputs, **SEARCH)
    check_equal(stock, ours)
    assert model.training
    cache = returned_cache(stock)
    uncached = cache is None or cache.get_seq_length() == 0
    assert checkpointing or not uncached
    assert ours.beam_path == ("handed over" if uncached else path_of(kind))
    model.eval()
    check_path(model, inputs, path_of(kind))


def test_a_module_that_is_reloaded_between_calls() -> None:
    """Weights that change between two calls: nothing of the first one is left in the second."""
    model, inputs = tiny_model("llama"), prompts("llama", 3)
    first, _ = check_path(model, inputs, "folded")
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    second, _ = check_path(model, inputs, "folded")
    assert differ(first, second)
