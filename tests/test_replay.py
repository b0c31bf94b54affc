"""The CUDA path of `compile=True`, on a CPU: a recorder that, as a graph does, runs operations again, and no Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import check_equal, returned_cache, search_both
from tiny_models import BUILDERS, VOCABULARY, path_of, prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from watching import HOST_READS

import hf_paged_beam
from hf_paged_beam import PagedBeamCache
from hf_paged_beam.generation import capture, replay
from hf_paged_beam.generation.capture import captures_of
from hf_paged_beam.versions import CACHE_ARGUMENT

CALL: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 7, "do_sample": False}
TOLD = {**CALL, "return_dict_in_generate": True, "output_scores": True}
KINDS = [kind for kind in BUILDERS if path_of(kind) == "folded"]


class Operations(TorchDispatchMode):
    """Runs what it is given, and keeps it: operations, the tensors that they read, those that they returned.

    A value that the host reads is an error, as it is while a stream is captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operation.name().startswith(HOST_READS):
            raise RuntimeError(f"{operation.name()}: not permitted while a graph is recorded")
        outputs = operation(*args, **(kwargs or {}))
        self.run.append((operation, args, kwargs or {}, outputs))
        return outputs

    def again(self) -> None:
        """The same over the same memory: whatever Python computed from values stays as it was."""
        for operation, args, kwargs, before in self.run:
            outputs = operation(*args, **kwargs)
            for mine, theirs in zip(tree_leaves(before), tree_leaves(outputs), strict=True):
                if isinstance(mine, torch.Tensor) and mine is not theirs and mine.data_ptr() != theirs.data_ptr():
                    mine.copy_(theirs)


class Recorder:
    """Stands where `record_cuda_graph` does.

    Attributes:
        recorded, replayed: how often.
        under_way: replays that run at present, of each graph; never two of one.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.meet: Callable[[], Any] = lambda: None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.recorded += 1
        with torch.no_grad():
            with Operations() as operations:
                result = run()
            alone = threading.Lock()

        def again() -> None:
            assert alone.acquire(blocking=False), "two searches replay one graph at once"
            try:
                self.replayed += 1
                self.meet()
                with torch.no_grad():
                    operations.again()
            finally:
                alone.release()

        return again, result


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    one = Recorder()
    monkeypatch.setitem(replay.RECORDERS, "cpu", one)
    assert capture.RECORDERS is replay.RECORDERS
    yield one


def recorded(model: Any, inputs: dict, **settings: Any) -> Any:
    torch.manual_seed(7)
    return hf_paged_beam.generate(model, **inputs, **{**TOLD, "compile": True, **settings})


def plain(model: Any, inputs: dict, **settings: Any) -> Any:
    return recorded(model, inputs, **settings, compile=False)


def verdicts(model: Any) -> set:
    return set(captures_of(model).verdicts.values())


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_stock(kind: str, recorder: Recorder) -> None:
    """Several calls, one graph for each batch; all steps but the checked ones are replays alone."""
    model = tiny_model(kind)
    for seed, batch in ((1, 3), (2, 3), (3, 1), (4, 1)):
        stock, ours = search_both(model, prompts(kind, batch, seed=seed), ours_only={"compile": True}, **CALL)
        check_equal(stock, ours)
        assert verdicts(model) == {0}
    assert 2 <= recorder.recorded <= 4 and recorder.replayed >= 12


@pytest.mark.parametrize("settings", [
    {"kv_dtype": "int8"}, {"do_sample": True, "temperature": 1.5}, {"repetition_penalty": 1.7},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"output_logits": True}, {"prepack": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["mistral", "bart"])
def test_settings(kind: str, settings: dict, recorder: Recorder) -> None:
    model, inputs = tiny_model(kind), prompts(kind, 2)
    for _ in range(2):
        first, second = plain(model, inputs, **settings), recorded(model, inputs, **settings)
        assert torch.equal(first.sequences, second.sequences)
        close = 1e-2 if "kv_dtype" in settings else 1e-4  # another last bit can be another of 255 numbers
        torch.testing.assert_close(second.scores, first.scores, rtol=close, atol=close)
        if "output_logits" in settings:
            torch.testing.assert_close(second.logits, first.logits, rtol=1e-4, atol=1e-4)
    assert recorder.replayed and verdicts(model) == {0}


def test_three_graphs_at_most(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long search of a small step of slots: pools of three sizes, each moved into the next."""
    monkeypatch.setattr(replay, "_SLOT_STEP", 4)
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    call = {"max_new_tokens": 50, "eos_token_id": None}
    check_equal(plain(model, inputs, **call), recorded(model, inputs, **call))
    count = recorder.recorded
    assert 2 <= count <= 3
    check_equal(plain(model, inputs, **call), recorded(model, inputs, **call))
    assert recorder.recorded == count and verdicts(model) == {0}


def test_other_prompt_lengths_use_the_same_graphs(recorder: Recorder) -> None:
    model = tiny_model("llama")
    for length in (7, 3, 11, 20):
        stock, ours = search_both(model, prompts("llama", 2, length, padded=False), ours_only={"compile": True}, **CALL)
        check_equal(stock, ours)
    assert recorder.recorded == 1


def test_few_graphs_are_kept(recorder: Recorder) -> None:
    """The most recently used ones; another width is another graph."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    for width in (2, 3, 4, 5, 6, 7, 7, 6, 5, 4):
        recorded(model, inputs, num_beams=width, num_return_sequences=1, max_new_tokens=4)
        assert len(captures_of(model).graphs) <= replay._MOST_GRAPHS
    assert recorder.recorded == 6
    recorded(model, inputs, num_beams=2, num_return_sequences=1, max_new_tokens=4)
    assert recorder.recorded == 7


def test_prompts_that_leave(recorder: Recorder) -> None:
    model, inputs = tiny_model("llama", eos=[5, *range(20, VOCABULARY, 4)]), prompts("llama", 5)
    call = {**CALL, "max_new_tokens": 12}
    stock = model.generate(**inputs, **call)
    for _ in range(2):
        assert torch.equal(stock, hf_paged_beam.generate(model, **inputs, **call, compile=True))
    assert recorder.replayed and len(captures_of(model).graphs) <= replay._MOST_GRAPHS


@pytest.mark.as_written
def test_weights_that_change(recorder: Recorder) -> None:
    """In place, a graph reads what is there; elsewhere, it is recorded anew."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    recorded(model, inputs)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(3)
    check_equal(plain(model, inputs), recorded(model, inputs))
    assert recorder.recorded == 1
    weight.data = weight.data * 2
    check_equal(plain(model, inputs), recorded(model, inputs))
    assert recorder.recorded == 2


def test_late_hooks_are_seen(recorder: Recorder) -> None:
    """A hook that is added after a graph was recorded acts, as in any other step."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    recorded(model, inputs)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, given, output: output * 2)
    check_equal(plain(model, inputs), recorded(model, inputs))


def test_a_returned_cache_is_the_callers(recorder: Recorder) -> None:
    """What was returned is not written by the next search, which uses the same graph."""
    model = tiny_model("llama")
    first = recorded(model, prompts("llama", 2))
    cache = returned_cache(first)
    before = [(layer._keys.clone(), layer._values.clone()) for layer in cache.indexed_layers()]
    recorded(model, prompts("llama", 2, seed=5))
    for layer, (keys, values) in zip(cache.indexed_layers(), before, strict=True):
        assert torch.equal(layer._keys, keys) and torch.equal(layer._values, values)
    cache.check()
    assert recorder.recorded == 1


def test_a_cache_that_the_caller_gave_is_the_callers(recorder: Recorder) -> None:
    """Also where the call returns a tensor alone."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    recorded(model, inputs)
    cache = PagedBeamCache(config=model.config, num_beams=3)
    hf_paged_beam.generate(model, **inputs, **CALL, compile=True, **{CACHE_ARGUMENT: cache})
    before = [layer._keys.clone() for layer in cache.indexed_layers()]
    recorded(model, prompts("llama", 2, seed=5))
    for layer, keys in zip(cache.indexed_layers(), before, strict=True):
        assert torch.equal(layer._keys, keys)


def test_two_threads_do_not_share_a_graph(recorder: Recorder) -> None:
    """Two searches that meet in every replay: each has a graph, or waits for none."""
    model, found, given = tiny_model("llama"), {}, [prompts("llama", 2, seed=seed) for seed in (1, 2)]
    call = {**TOLD, "eos_token_id": None}
    stock = [model.generate(**inputs, **call) for inputs in given]
    recorded(model, given[0], eos_token_id=None)  # trusted, and one graph left
    meet = threading.Barrier(2)
    recorder.meet = lambda: meet.wait(30)

    def run(number: int) -> None:
        found[number] = hf_paged_beam.generate(model, **given[number], **call, compile=True)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate(stock):
        check_equal(expected, found[number])
    assert recorder.recorded == 2


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_only_static_tensors_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a later step, filled with NaN or zeros after they were copied, are not missed."""
    recorder = Recorder()
    monkeypatch.setitem(replay.RECORDERS, "cpu", recorder)
    given: list[torch.Tensor] = []
    call_graph = replay.Graph.__call__

    def poisoned(graph: replay.Graph, step: Any, inputs: dict[str, Any]) -> torch.Tensor:
        static = {id(tensor) for tensor in graph._tensors(graph._step, graph._inputs)}
        theirs = [tensor for tensor in graph._tensors(step, inputs) if id(tensor) not in static]
        assert (
            len(theirs) >= len(graph._tensors(graph._step, graph._inputs)) - 4
        )  # all inputs; of a new graph, not its step
        kept = [tensor.clone() for tensor in theirs]
        replay_graph = graph._replay

        def after_the_copy() -> None:
            for tensor in theirs:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
            given.extend(theirs)
            replay_graph()

        graph._replay = after_the_copy
        try:
            return call_graph(graph, step, inputs)
        finally:
            graph._replay = replay_graph
            for tensor, values in zip(theirs, kept, strict=True):
                tensor.copy_(values)

    model, inputs = tiny_model(kind), prompts(kind, 2)
    expected = plain(model, inputs)
    monkeypatch.setattr(replay.Graph, "__call__", poisoned)
    for _ in range(2):
        check_equal(expected, recorded(model, inputs))
    assert given and verdicts(model) == {0}


def test_an_error_leaves_no_graph_in_doubt(recorder: Recorder) -> None:
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    recorded(model, inputs)

    def fail() -> None:
        raise KeyboardInterrupt

    recorder.meet = fail
    with pytest.raises(KeyboardInterrupt):
        recorded(model, inputs)
    recorder.meet = lambda: None
    check_equal(plain(model, inputs), recorded(model, inputs))
    assert verdicts(model) == {0}


def test_stale_slots_of_an_earlier_search_are_not_seen(recorder: Recorder) -> None:
    """Pools go from search to search with what they held; even what is no number does no harm."""
    model, inputs = tiny_model("llama"), prompts("llama", 2)
    recorded(model, prompts("llama", 2, length=30, padded=False), max_new_tokens=20, eos_token_id=None)
    for graph in captures_of(model).graphs.values():
        for pools in graph.pools:
            for pool in pools.values():
                pool.fill_(1e4)
    for batch_inputs in (inputs, prompts("llama", 2, padded=False)):
        check_equal(plain(model, batch_inputs), recorded(model, batch_inputs))


def test_adapters_that_are_switched_off(recorder: Recorder) -> None:
    """A flag of Python's is in no graph: it is seen all the same."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model, inputs = peft.get_peft_model(tiny_model("llama"), config).eval(), prompts("llama", 2)
    call = {**TOLD, "custom_generate": "hf_paged_beam"}
    check_equal(model.generate(**inputs, **call), model.generate(**inputs, **call, compile=True))
    with model.disable_adapter():
        check_equal(model.generate(**inputs, **call), model.generate(**inputs, **call, compile=True))
    assert recorder.replayed
