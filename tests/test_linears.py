"""Linear layers by oneDNN: results as ever, only plain layers, packed weights that are never stale, nothing left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from comparing import check_equal, search_both
from tiny_models import BUILDERS, VOCABULARY, prompts, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged_beam
from hf_paged_beam import TokenTrie
from hf_paged_beam.generation import linears
from hf_paged_beam.generation.head import HeadPass, standing_in
from hf_paged_beam.generation.linears import OneDnnLinears, StandIn, packed_bytes

CALL: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "do_sample": False}
TOLD = {**CALL, "return_dict_in_generate": True, "output_scores": True}
WAYS = [{}, {"prepack": True}]

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_SMALLEST", 1)
    monkeypatch.setattr(linears.platform, "machine", lambda: "x86_64")


class Calls(list):
    """What some function was called with, in order; it is called as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str):
        super().__init__()
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.append(args)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """One entry for every call of a layer that oneDNN computes."""
    return Calls(monkeypatch, linears, "_one_dnn")


class Look(LogitsProcessor):
    """Calls `look` at every step, and leaves the scores as they are."""

    def __init__(self, look: Callable[[], Any]):
        self.look, self.seen = look, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.look())
        return scores


def searched(model: Any, inputs: dict, look: Callable[[], Any] | None = None, **settings: Any) -> Any:
    processors = LogitsProcessorList([] if look is None else [Look(look)])
    return hf_paged_beam.generate(model, **inputs, **{**TOLD, **settings}, logits_processor=processors)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [part for part in model.modules() if type(part) is torch.nn.Linear]


def stand_ins(model: torch.nn.Module) -> int:
    return sum("forward" in vars(part) for part in model.modules())


# --- results ---


@pytest.mark.as_written
@pytest.mark.parametrize("way", WAYS, ids=["plain", "prepack"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_equal_to_stock(kind: str, way: dict, computed: Calls) -> None:
    model, inputs = tiny_model(kind), prompts(kind, 3)
    stock, ours = search_both(model, inputs, ours_only=way, **CALL)
    check_equal(stock, ours)
    assert len(computed) >= 5  # a forward pass each, at least
    assert not stand_ins(model) and not linears._holders
    assert (packed_bytes(model) > 0) == bool(way)


@pytest.mark.as_written
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_bfloat16(kind: str, computed: Calls) -> None:
    """Packed, logits agree to rounding; left plain, bfloat16 is nothing to stand in for."""
    model, inputs = tiny_model(kind, dtype=torch.bfloat16), prompts(kind, 2)
    call = dict(num_beams=2, num_return_sequences=2, max_new_tokens=1, eos_token_id=None, output_logits=True)
    stock, plain = search_both(model, inputs, **call)
    assert not computed
    check_equal(stock, plain, 1e-6)
    _, ours = search_both(model, inputs, ours_only={"prepack": True}, **call)
    assert computed and ours.logits[0].dtype == stock.logits[0].dtype
    largest = stock.logits[0].abs().max()
    torch.testing.assert_close(ours.logits[0], plain.logits[0], rtol=0, atol=float(largest) * 0.03)


@pytest.mark.parametrize("way", WAYS, ids=["plain", "prepack"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (0, 16)])
@torch.no_grad()
def test_a_layer_alone(shape: tuple[int, ...], bias: bool, way: dict, computed: Calls) -> None:
    layer, hidden = torch.nn.Linear(16, 50, bias=bias), torch.randn(shape)
    expected = layer(hidden)
    with OneDnnLinears([layer], **way):
        found = layer(hidden)
    assert len(computed) == 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(linears.linear(hidden, layer.weight, layer.bias), expected)


@pytest.mark.parametrize("way", WAYS, ids=["plain", "prepack"])
@torch.no_grad()
def test_compiled_code_calls_the_operator(way: dict) -> None:
    """What is compiled while a search runs gives what the layer gives; the operators agree with their shapes."""
    layer, hidden = torch.nn.Linear(16, 50), torch.randn(2, 3, 16)
    expected = layer(hidden)
    with OneDnnLinears([layer], **way):
        found = torch.compile(lambda given: layer(given), backend="aot_eager", fullgraph=True)(hidden)
    torch.testing.assert_close(found, expected)
    on_meta = torch.ops.hf_paged_beam.linear(hidden.to("meta"), layer.weight.to("meta"), None)
    assert on_meta.shape == expected.shape


@pytest.mark.parametrize("way", WAYS, ids=["plain", "prepack"])
def test_a_narrow_head(way: dict, computed: Calls) -> None:
    """A trie's head of few columns stands in for the stand-in, and leaves it where it was."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    trie = TokenTrie.from_sequences([[10 + i % 5, 20 + i % 7, 30 + i % 3, 40 + i] for i in range(12)])
    call = {"trie": trie, "trie_renormalize": True, "max_new_tokens": 4, "eos_token_id": None}
    seen = []
    for smallest in (2**60, 1):
        linears._SMALLEST = smallest  # put back by the fixture
        for _ in range(2):
            seen.append(searched(model, inputs, **call, output_scores=False, **(way if smallest == 1 else {})))
    for ours in seen[1:]:
        assert torch.equal(ours.sequences, seen[0].sequences)
        torch.testing.assert_close(ours.sequences_scores, seen[0].sequences_scores, rtol=1e-4, atol=1e-4)
    assert computed and any(given[1].shape[0] < VOCABULARY for given in computed if given[1].layout == torch.strided)
    assert not stand_ins(model)


@torch.no_grad()
def test_a_narrow_pass_leaves_the_stand_in() -> None:
    head, hidden = torch.nn.Linear(16, 50), torch.randn(2, 16)
    with OneDnnLinears([head], prepack=True):
        mine = vars(head)["forward"]
        with standing_in(HeadPass(head)) as whole:
            head(hidden)
        assert whole.calls == 1 and vars(head)["forward"] is mine
    assert "forward" not in vars(head)


# --- the stand-in comes and goes ---


@pytest.mark.parametrize("way", WAYS, ids=["plain", "prepack"])
def test_there_during_a_search_and_gone_after_it(way: dict) -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    before = [dict(vars(part)) for part in model.modules()]
    seen: list[int] = []
    searched(model, inputs, lambda: seen.append(stand_ins(model)), **way)
    assert set(seen) == {len(layers_of(model))}
    assert [dict(vars(part)) for part in model.modules()] == before and not linears._holders


def test_gone_after_an_error() -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 2)

    def fail() -> None:
        assert stand_ins(model)
        raise KeyError("a processor's own")

    for way in WAYS:
        with pytest.raises(KeyError, match="a processor's own"):
            searched(model, inputs, fail, **way)
        assert not stand_ins(model) and not linears._holders


def test_gone_after_an_error_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, made = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)], []

    def interrupted(layer: torch.nn.Linear) -> Any:
        made.append(layer)
        if len(made) == 3:
            raise KeyboardInterrupt
        return StandIn(layer, None)

    search = OneDnnLinears(layers)
    monkeypatch.setattr(search, "_stand_in", interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        search.__enter__()
    assert not any("forward" in vars(layer) for layer in layers) and not linears._holders


def test_two_threads_search_one_model() -> None:
    """The first to leave takes nothing from the other; one packs and one does not."""
    model, inputs, meet = tiny_model("llama"), prompts("llama", 2), threading.Barrier(2)
    stock = model.generate(**inputs, **TOLD)
    found: dict[int, Any] = {}
    left = threading.Event()
    counts: list[int] = []

    def look(number: int, state: list[int]) -> None:
        state.append(stand_ins(model))
        if len(state) == 1:
            meet.wait(30)
        if number == 1 and len(state) == 3:
            left.wait(30)
            counts.append(stand_ins(model))

    def run(number: int) -> None:
        state: list[int] = []
        found[number] = searched(model, inputs, lambda: look(number, state), **WAYS[number])
        if number == 0:
            left.set()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        check_equal(stock, found[number])
    assert counts == [len(layers_of(model))]
    assert not stand_ins(model) and not linears._holders


# --- layers that are left alone ---


class _OtherLinear(torch.nn.Linear):
    pass


class _OtherTensor(torch.Tensor):
    pass


def _replaced(layer: torch.nn.Linear, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Linear:
    layer.weight = torch.nn.Parameter(make(layer.weight.data), requires_grad=False)
    return layer


def _with_forward(layer: torch.nn.Linear) -> torch.nn.Linear:
    layer.forward = lambda hidden: hidden  # type: ignore[assignment]
    return layer


def _compiled(layer: torch.nn.Linear) -> torch.nn.Linear:
    layer.compile()
    return layer


NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: _OtherLinear(16, 50),
    "another forward": lambda: _with_forward(torch.nn.Linear(16, 50)),
    "compiled": lambda: _compiled(torch.nn.Linear(16, 50)),
    "on the meta device": lambda: torch.nn.Linear(16, 50, device="meta"),
    "float64": lambda: torch.nn.Linear(16, 50, dtype=torch.float64),
    "float16": lambda: torch.nn.Linear(16, 50, dtype=torch.float16),
    "eight bits": lambda: _replaced(torch.nn.Linear(16, 50), lambda weight: weight.to(torch.float8_e4m3fn)),
    "a tensor subclass": lambda: _replaced(torch.nn.Linear(16, 50), lambda weight: weight.as_subclass(_OtherTensor)),
    "sparse": lambda: _replaced(torch.nn.Linear(16, 50), lambda weight: weight.to_sparse()),
    "sharded away": lambda: _replaced(torch.nn.Linear(16, 50), lambda weight: weight[:0]),
    "quantised": lambda: torch.ao.nn.quantized.dynamic.Linear(16, 50),
    "parametrized": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 50)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", NOT_PLAIN)
def test_layers_that_are_not_plain(what: str) -> None:
    layer = NOT_PLAIN[what]()
    before = vars(layer).get("forward")
    for way in WAYS:
        with torch.no_grad(), OneDnnLinears([layer], **way):
            assert vars(layer).get("forward") is before
    assert packed_bytes(torch.nn.Sequential(layer)) == 0


@pytest.mark.parametrize("what", ["gradients", "autocast", "switched off", "a replaced class"])
def test_states_in_which_no_layer_is_plain(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(16, 50)
    with torch.no_grad(), OneDnnLinears([layer]):
        assert "forward" in vars(layer)
    if what == "a replaced class":
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, hidden: hidden)
    context: Any = {
        "gradients": torch.enable_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "switched off": torch.backends.mkldnn.flags(enabled=False),
    }.get(what, torch.no_grad())
    with torch.no_grad(), context, OneDnnLinears([layer], prepack=True):
        assert "forward" not in vars(layer)


def test_autocast_searches_as_stock() -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    with torch.autocast("cpu", torch.bfloat16):
        stock, ours = search_both(model, inputs, ours_only={"prepack": True}, **CALL)
    check_equal(stock, ours, 2e-2)
    assert packed_bytes(model) == 0


def test_hooks_still_run(computed: Calls) -> None:
    """Hooks of a layer that keeps its own `forward` are run around the stand-in, and may change what it returns."""
    model, inputs, ran = tiny_model("llama"), prompts("llama", 2), []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, given, output: output * 2)
    layer.register_forward_pre_hook(lambda module, given: ran.append(stand_ins(model)))
    for way in WAYS:
        check_equal(*search_both(model, inputs, ours_only=way, **CALL))
    assert computed and {0, len(layers_of(model))} == set(ran)


def test_a_compiled_model_is_left_alone(computed: Calls) -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    stock = model.generate(**inputs, **TOLD)
    model.model.layers[0].forward = torch.compile(model.model.layers[0].forward, backend="eager")
    check_equal(stock, searched(model, inputs, prepack=True))
    assert not computed and packed_bytes(model) == 0


def test_adapters(computed: Calls) -> None:
    """The layers below LoRA's are plain, and so are LoRA's own; the wrapper is no linear layer of ours."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    inputs = prompts("llama", 2)
    stock = model.generate(**inputs, **TOLD)
    for way in WAYS:
        check_equal(stock, model.generate(**inputs, **TOLD, **way, custom_generate="hf_paged_beam"))
    assert computed and not stand_ins(model)
    base = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert type(base) is torch.nn.Linear and base in linears._packed
