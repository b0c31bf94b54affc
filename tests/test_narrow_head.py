"""The narrow output head: the same scores from fewer columns, only where that is certain, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import transformers
from tiny_models import DECODERS, EOS, prompts_for, random_model, shared_model, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerationMixin

import hf_paged_beam
from hf_paged_beam import TokenTrie
from hf_paged_beam.generation import head as head_module
from hf_paged_beam.generation.head import HeadPass, NarrowHead, is_plain, plain_head, shared_sets, standing_in

NAME = "hf_paged_beam"
TOKENS = torch.tensor([3, 7, 20, 41])


def narrow_pass(head: torch.nn.Linear, tokens: torch.Tensor = TOKENS) -> HeadPass:
    bias = None if head.bias is None else head.bias.detach()[tokens]
    return HeadPass(head, (head.weight.detach()[tokens], bias))


# --- the stand-in alone ---


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_columns_asked_for(bias: bool) -> None:
    head, hidden = torch.nn.Linear(16, 50, bias=bias), torch.randn(5, 1, 16)
    whole = head(hidden)
    with standing_in(narrow_pass(head)) as narrow:
        columns = head(hidden)
    assert columns.shape == (5, 1, 4) and narrow.calls == 1 and narrow.returned(columns)
    torch.testing.assert_close(columns, whole[..., TOKENS])
    assert torch.equal(head(hidden), whole)


def test_nothing_is_left_behind() -> None:
    """After a pass, after an error, and where two passes overlap."""
    head = torch.nn.Linear(16, 50)
    before = dict(vars(head))
    with contextlib.suppress(KeyError), standing_in(narrow_pass(head)):
        raise KeyError
    assert vars(head) == before and not head_module._under_way
    with standing_in(narrow_pass(head)):
        with standing_in(narrow_pass(head, TOKENS[:2])):
            assert head(torch.randn(1, 16)).shape[-1] == 2
        assert "forward" in vars(head) and head(torch.randn(1, 16)).shape[-1] == 4
        assert is_plain(head)
    assert vars(head) == before and not head_module._under_way


@torch.no_grad()
def test_other_threads_and_other_heads_see_the_whole_head() -> None:
    head, other, hidden = torch.nn.Linear(16, 50), torch.nn.Linear(16, 50), torch.randn(2, 16)
    seen: list[torch.Tensor] = []
    with standing_in(narrow_pass(head)):
        thread = threading.Thread(target=lambda: seen.append(head(hidden).detach()))
        thread.start()
        thread.join()
        assert other(hidden).shape[-1] == 50
    assert torch.equal(seen[0], head(hidden))


def test_passes_of_two_heads() -> None:
    """As of a search inside a pass of another model: each head's pass is its own; the inner one's is narrow."""
    head, inner = torch.nn.Linear(16, 50), torch.nn.Linear(16, 50)
    with standing_in(narrow_pass(head)), standing_in(narrow_pass(inner, TOKENS[:2])):
        assert [given(torch.randn(1, 16)).shape[-1] for given in (head, inner)] == [50, 2]


@torch.no_grad()
def test_two_threads_with_tokens_of_their_own() -> None:
    head, hidden, meet = torch.nn.Linear(16, 50), torch.randn(2, 16), threading.Barrier(2)
    found: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        with torch.no_grad(), standing_in(narrow_pass(head, TOKENS[: number + 1])):
            meet.wait(10)
            found[number] = head(hidden)
            meet.wait(10)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        torch.testing.assert_close(found[number], head(hidden)[:, TOKENS[: number + 1]])
    assert "forward" not in vars(head)


def _with_hook(head: torch.nn.Linear) -> torch.nn.Module:
    head.register_forward_hook(lambda module, given, output: output * 2)
    return head


def _with_pre_hook(head: torch.nn.Linear) -> torch.nn.Module:
    head.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    return head


def _with_forward(head: torch.nn.Linear) -> torch.nn.Module:
    head.forward = lambda hidden: hidden  # type: ignore[assignment]
    return head


def _compiled(head: torch.nn.Linear) -> torch.nn.Module:
    head.compile()
    return head


def _with_weight(weight: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    def replace(head: torch.nn.Linear) -> torch.nn.Module:
        head.weight = torch.nn.Parameter(weight(head.weight.data), requires_grad=False)
        return head

    return replace


class _OtherLinear(torch.nn.Linear):
    pass


class _OtherTensor(torch.Tensor):
    pass


NOT_PLAIN: dict[str, Callable[[torch.nn.Linear], torch.nn.Module]] = {
    "a subclass": lambda head: _OtherLinear(32, 99),
    "another layer": lambda head: torch.nn.Sequential(head),
    "a hook": _with_hook,
    "a hook before": _with_pre_hook,
    "another forward": _with_forward,
    "compiled": _compiled,
    "compiled by wrapping": lambda head: torch.compile(head),
    "parametrized": lambda head: torch.nn.utils.parametrizations.weight_norm(head),
    "pruned": lambda head: torch.nn.utils.prune.l1_unstructured(head, "weight", 0.5),
    "on the meta device": lambda head: head.to("meta"),
    "sharded": _with_weight(lambda weight: weight[:0]),
    "in part": _with_weight(lambda weight: weight[:50]),
    "sparse": _with_weight(lambda weight: weight.to_sparse()),
    "eight bits": _with_weight(lambda weight: weight.to(torch.float8_e4m3fn)),
    "a tensor subclass": _with_weight(lambda weight: weight.as_subclass(_OtherTensor)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", NOT_PLAIN)
def test_heads_that_stay_whole(change: str) -> None:
    model = tiny_model("llama")
    assert plain_head(model) is model.lm_head
    model.lm_head = NOT_PLAIN[change](model.lm_head)
    assert plain_head(model) is None


def test_heads_of_models_that_stay_whole() -> None:
    """Hooks of all modules, a compiled model, adapters, offloading, and models without a head."""
    model = tiny_model("llama")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, output: None)
    try:
        assert plain_head(model) is None
    finally:
        handle.remove()
    assert plain_head(model) is not None
    accelerate = pytest.importorskip("accelerate")
    hooked = tiny_model("llama")
    accelerate.hooks.add_hook_to_module(hooked.lm_head, accelerate.hooks.AlignDevicesHook(execution_device="cpu"))
    assert plain_head(hooked) is None
    model.compile()
    assert plain_head(model) is None
    assert plain_head(torch.nn.Linear(3, 4)) is None
    assert plain_head(tiny_model("llama").model) is None


def test_adapters() -> None:
    """A head with an adapter stays whole; one beside layers with adapters can be narrow."""
    peft = pytest.importorskip("peft")
    for targets, narrow in ((["q_proj"], True), (["lm_head"], False), (["q_proj", "lm_head"], False)):
        model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        assert (plain_head(model) is not None) == narrow
    saved = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    assert plain_head(peft.get_peft_model(tiny_model("llama"), saved)) is None


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda logits: logits,
    "a view": lambda logits: logits[:],
    "scaled": lambda logits: logits * 0.5,
    "scaled by one": lambda logits: logits * 1.0,
    "scaled in place": lambda logits: logits.mul_(0.5),
    "clamped in place, to no effect": lambda logits: logits.clamp_(-1e4, 1e4),
    "a column masked": lambda logits: logits.index_fill_(-1, torch.tensor([4]), -torch.inf),
    "written to without a trace": lambda logits: (logits.data.mul_(0.5), logits)[1],
    "another dtype": lambda logits: logits.double(),
    "a copy": lambda logits: logits.clone(),
    "cut": lambda logits: logits[..., :40],
    "positions cut": lambda logits: logits[:, -1:],
    "no tensor": lambda logits: None,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_seen_between_the_head_and_the_logits(change: str, mode: Callable) -> None:
    head = torch.nn.Linear(16, 50)
    with mode(), standing_in(HeadPass(head)) as whole:
        logits = CHANGES[change](head(torch.randn(2, 3, 16)))
        assert whole.returned(logits) == (change in ("nothing", "a view"))


def test_sets_that_neighbours_share() -> None:
    sets = [torch.arange(100), torch.arange(1, 100), torch.arange(100, 200), torch.arange(120, 210), torch.tensor([5])]
    shared = shared_sets(sets)
    assert [len(tokens) for tokens in shared] == [100, 100, 110, 110, 1]
    assert shared[0] is shared[1] and shared[2] is shared[3]
    assert all(torch.isin(tokens, given).all() for tokens, given in zip(sets, shared, strict=True))
    assert shared_sets(sets[:1]) == sets[:1]


def test_many_sets_do_not_grow_together() -> None:
    """Each shares with its neighbours, but what is shared stays near the smallest of them."""
    sets = [torch.arange(start, start + 100) for start in range(0, 300, 10)]
    for tokens, given in zip(sets, shared_sets(sets), strict=True):
        assert torch.isin(tokens, given).all() and len(given) <= 125


# --- searches ---


@contextlib.contextmanager
def watched_widths() -> Iterator[list[int]]:
    """Columns of every narrow pass that runs inside."""
    widths: list[int] = []
    given = HeadPass.__call__

    def call(self: HeadPass, hidden: torch.Tensor) -> torch.Tensor:
        logits = given(self, hidden)
        if self._narrow is not None:
            widths.append(logits.shape[-1])
        return logits

    HeadPass.__call__ = call  # type: ignore[method-assign]
    try:
        yield widths
    finally:
        HeadPass.__call__ = given  # type: ignore[method-assign]


def codebooks(count: int, size: int = 8, depth: int = 4, seed: int = 0) -> list[list[int]]:
    """Random items whose places have tokens of their own."""
    ids = random.Random(seed)
    return [[10 + size * place + ids.randrange(size) for place in range(depth)] for _ in range(count)]


CALL: dict[str, Any] = dict(
    num_beams=4, num_return_sequences=4, max_new_tokens=6, do_sample=False, return_dict_in_generate=True,
    custom_generate=NAME, trie_renormalize=True,
)  # fmt: skip


def search(model: Any, inputs: dict, trie: Any, **settings: Any) -> Any:
    return GenerationMixin.generate(model, **inputs, **CALL, trie=trie, **settings)


def check_same(narrow: Any, whole: Any, tolerance: float = 1e-5) -> None:
    assert torch.equal(narrow.item_ids, whole.item_ids) and torch.equal(narrow.sequences, whole.sequences)
    torch.testing.assert_close(narrow.token_logprobs, whole.token_logprobs, atol=tolerance, rtol=0)


def whole_head(model: Any, inputs: dict, trie: Any, **settings: Any) -> Any:
    """The same search with the whole head, in which whole rows of scores are asked for."""
    return search(model, inputs, trie, output_scores=True, **settings)


def _phi() -> Any:
    config = dict(DECODERS, num_key_value_heads=4)
    config.pop("head_dim")
    return random_model(transformers.PhiForCausalLM, transformers.PhiConfig(**config))


NARROW = ["llama", "qwen3", "mistral", "gpt2", "t5", "whisper", "phi"]


@pytest.mark.parametrize("end", [None, EOS])
@pytest.mark.parametrize("kind", NARROW)
def test_the_same_search_with_fewer_columns(kind: str, end: int | None) -> None:
    """Each step's head has as many columns as its depth has tokens: 8 of 99, then one for the end token. The head of
    T5, GPT-2 and Whisper is tied to the embedding; Phi's has a bias."""
    model = _phi() if kind == "phi" else shared_model(kind, torch.float64)
    inputs = prompts_for(model, "llama" if kind == "phi" else kind, 3)
    trie = TokenTrie.from_sequences(codebooks(200), eos_token_id=end)
    settings: dict[str, Any] = {} if end else {"eos_token_id": None}
    if kind == "whisper":
        settings["begin_suppress_tokens"] = None  # processors want all columns
    for _ in range(2):
        search(model, inputs, trie, **settings)  # the first to see this model
    before = {name: given.clone() for name, given in model.state_dict().items()}
    with watched_widths() as widths:
        narrow = search(model, inputs, trie, **settings)
    assert widths == [8, 8, 8] + ([1] if end else [])
    with watched_widths() as widths:
        whole = whole_head(model, inputs, trie, **settings)
    assert not widths
    check_same(narrow, whole)
    assert (narrow.item_ids >= 0).all()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert "forward" not in vars(model.get_output_embeddings())


def _of(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**{**DECODERS, **settings})
        return random_model(getattr(transformers, f"{name}ForCausalLM"), config)

    return make


WHOLE: dict[str, Callable[[], Any]] = {
    "a soft cap": _of("Gemma2", final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "a scale": _of("Cohere", logit_scale=0.5),
    "a divisor": _of("Granite", logits_scaling=3.0),
    "a bias of all tokens": lambda: tiny_model("bart", dtype=torch.float64),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_done_to_logits_needs_the_whole_head(kind: str) -> None:
    model = WHOLE[kind]()
    inputs = prompts_for(model, "bart" if "bias" in kind else "llama", 2, padded=False)
    trie = TokenTrie.from_sequences(codebooks(99))
    if "bias" in kind:
        model.final_logits_bias.normal_()
    with watched_widths() as widths:
        found = [search(model, inputs, trie, eos_token_id=None) for _ in range(3)]
    assert not widths
    check_same(found[-1], whole_head(model, inputs, trie, eos_token_id=None))


class _Changed(LlamaForCausalLM):
    """Does to its logits what a test says."""

    change: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda logits: logits)
    at_decode_only = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.at_decode_only or output.logits.shape[1] == 1:
            output.logits = self.change(output.logits)
        return output


def _masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., [4, 12, 60]] = -1e4
    return logits


@pytest.mark.parametrize("at_decode_only", [False, True])
@pytest.mark.parametrize("change", [_masked, lambda logits: logits * 0.5, lambda logits: logits.div_(2)])
def test_models_that_change_their_logits_themselves(change: Callable, at_decode_only: bool) -> None:
    """Also those that do so only at one position: a first decode step is watched as well as the prompt."""
    model = random_model(_Changed, LlamaConfig(**DECODERS))
    model.change, model.at_decode_only = change, at_decode_only
    inputs, trie = prompts_for(model, "llama", 2), TokenTrie.from_sequences(codebooks(99))
    with watched_widths() as widths:
        found = [search(model, inputs, trie, eos_token_id=None) for _ in range(3)]
    assert not widths
    for output in found:
        check_same(output, whole_head(model, inputs, trie, eos_token_id=None))


def test_a_model_that_begins_to_change_its_logits() -> None:
    """Never a wrong score: an error, and the next search has the whole head."""
    model = random_model(_Changed, LlamaConfig(**DECODERS))
    inputs, trie = prompts_for(model, "llama", 2), TokenTrie.from_sequences(codebooks(99))
    model.at_decode_only = True
    for _ in range(2):
        search(model, inputs, trie, eos_token_id=None)
    model.change = lambda logits: logits * 0.5
    with pytest.raises(RuntimeError, match="now changes what its output head returns"):
        search(model, inputs, trie, eos_token_id=None)
    assert "forward" not in vars(model.lm_head) and not head_module._under_way
    with watched_widths() as widths:
        found = search(model, inputs, trie, eos_token_id=None)
    assert not widths
    check_same(found, whole_head(model, inputs, trie, eos_token_id=None))


def test_a_head_that_is_replaced_is_watched_anew() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    inputs, trie = prompts_for(model, "llama", 2), TokenTrie.from_sequences(codebooks(99))
    for _ in range(2):
        search(model, inputs, trie, eos_token_id=None)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data.neg_()
    with watched_widths() as widths:
        found = search(model, inputs, trie, eos_token_id=None)
    assert widths == [8, 8]  # the first decode step was watched
    check_same(found, whole_head(model, inputs, trie, eos_token_id=None))


@pytest.mark.parametrize(
    "settings",
    [
        {"output_scores": True}, {"output_logits": True}, {"repetition_penalty": 1.2}, {"do_sample": True},
        {"trie_renormalize": False}, {"size": 99},
    ],
)  # fmt: skip
def test_searches_that_want_all_columns(settings: dict[str, Any]) -> None:
    """Also where the items use more than half of the vocabulary."""
    model = shared_model("llama", torch.float64)
    size = settings.pop("size", None)
    items = codebooks(99) if size is None else [[token % 99, (token * 7) % 99, 5] for token in range(98)]
    inputs, trie = prompts_for(model, "llama", 2), TokenTrie.from_sequences(items)
    for _ in range(2):
        search(model, inputs, trie, eos_token_id=None)
    call = {**CALL, **settings, "eos_token_id": None}
    with watched_widths() as widths:
        GenerationMixin.generate(model, **inputs, **call, trie=trie)
    assert widths == ([] if size is None else [1])


@pytest.mark.parametrize("path", ["folded", "gathered"])
def test_both_paths_and_inference_mode(path: str) -> None:
    model = shared_model("llama", torch.float64)
    inputs, trie = prompts_for(model, "llama", 2), TokenTrie.from_sequences(codebooks(99))
    search(model, inputs, trie, eos_token_id=None)
    with torch.inference_mode(), watched_widths() as widths:
        narrow = search(model, inputs, trie, eos_token_id=None, beam_attention=path)
    assert widths == [8, 8, 8]
    check_same(narrow, whole_head(model, inputs, trie, eos_token_id=None))


def test_a_trie_for_each_prompt_and_common_tokens() -> None:
    """The columns are those of all tries; places with the same tokens share one weight."""
    model = shared_model("llama", torch.float64)
    inputs = prompts_for(model, "llama", 2)
    tries = [TokenTrie.from_sequences(items) for items in (codebooks(99), codebooks(99, depth=3, size=6, seed=1))]
    for _ in range(2):
        search(model, inputs, tries, eos_token_id=None)
    with watched_widths() as widths:
        narrow = search(model, inputs, tries, eos_token_id=None)
    assert widths == [10, 12, 8]
    check_same(narrow, whole_head(model, inputs, tries, eos_token_id=None))
    ids = random.Random(0)
    common = TokenTrie.from_sequences([[ids.randrange(10, 40) for _ in range(4)] for _ in range(500)])
    assert common.tokens_at(2).tolist() == list(range(10, 40))
    made: list[torch.Tensor] = []
    given = NarrowHead._narrow_weight
    try:
        NarrowHead._narrow_weight = lambda *args: made.append(weight := given(*args)) or weight  # type: ignore
        narrow = search(model, inputs, common, eos_token_id=None)
    finally:
        NarrowHead._narrow_weight = given  # type: ignore[method-assign]
    assert len(made) == 3 and made[0] is made[1] is made[2]
    check_same(narrow, whole_head(model, inputs, common, eos_token_id=None))


def test_an_error_in_a_narrow_pass_leaves_nothing() -> None:
    model = tiny_model("llama")
    inputs, trie = prompts_for(model, "llama", 2), TokenTrie.from_sequences(codebooks(99))
    for _ in range(2):
        expected = search(model, inputs, trie, eos_token_id=None)
    before = dict(vars(model.lm_head))
    steps = itertools.count()

    def interrupt(*args: Any) -> None:
        if next(steps) == 2:
            raise KeyboardInterrupt

    handle = model.model.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        search(model, inputs, trie, eos_token_id=None)
    handle.remove()
    assert vars(model.lm_head) == before and not head_module._under_way
    check_same(search(model, inputs, trie, eos_token_id=None), expected)


def test_two_searches_on_one_model_at_once() -> None:
    """Each has its own trie and columns; a third thread runs the model as ever."""
    model = tiny_model("llama", dtype=torch.float64)
    inputs = prompts_for(model, "llama", 2)
    tries = [TokenTrie.from_sequences(codebooks(99, size=size, seed=size)) for size in (5, 9)]
    for trie in tries:
        search(model, inputs, trie, eos_token_id=None)
    expected = [whole_head(model, inputs, trie, eos_token_id=None) for trie in tries]
    with torch.no_grad():
        logits = model(**inputs).logits
    errors: list[BaseException] = []

    def repeat(check: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                for _ in range(8):
                    check()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=run)

    def forward() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, logits)

    checks = [
        lambda which=which: check_same(search(model, inputs, tries[which], eos_token_id=None), expected[which])
        for which in range(2)
    ]
    threads = [repeat(check) for check in (*checks, forward)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert "forward" not in vars(model.lm_head)


def test_the_first_search_of_a_model() -> None:
    """The step that compares the two read paths has the whole head, then one is watched, then steps are narrow."""
    model = tiny_model("llama", dtype=torch.float64)
    inputs, trie = prompts_for(model, "llama", 2), TokenTrie.from_sequences(codebooks(99))
    with watched_widths() as widths:
        first = search(model, inputs, trie, eos_token_id=None)
        assert widths in ([8], [8, 8])  # where there is one path only, nothing is compared
        second = search(model, inputs, trie, eos_token_id=None)
    assert widths[-3:] == [8, 8, 8]
    check_same(first, second)
    assert hf_paged_beam.generate(model, **inputs, num_beams=2, trie=trie, trie_renormalize=True).shape[0] == 2
