"""Searches over items: the same as transformers' with the equivalent prefix function, and every row an item."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import real_scores, search_both
from tiny_models import EOS, path_of, prompts_for, shared_model
from transformers.generation.utils import GenerationMixin

import hf_paged_beam
from hf_paged_beam import TokenTrie

NAME, WIDTH = "hf_paged_beam", 5
Items = list[list[int]]


def catalogue(count: int, shortest: int, longest: int, seed: int = 0) -> Items:
    """Random items over the tiny models' vocabulary."""
    ids = random.Random(seed)
    return [[ids.randrange(6, 99) for _ in range(ids.randint(shortest, longest))] for _ in range(count)]


def allowed_by(items: list[Items], skipped: int) -> Callable[[int, torch.Tensor], list[int]]:
    """transformers' prefix function for the items of each prompt, after `skipped` tokens."""
    following: list[dict[tuple[int, ...], set[int]]] = []
    for of_prompt in items:
        following.append({})
        for item in of_prompt:
            for end in range(len(item)):
                following[-1].setdefault(tuple(item[:end]), set()).add(item[end])

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        beginning = tuple(ids[skipped:].tolist())
        if len(ids) < skipped:  # a token before the items is forced
            return list(range(99))
        return sorted(following[prompt % len(following)].get(beginning, {EOS}))

    return allowed


def generated(output: Any, skipped: int) -> list[tuple[int, ...]]:
    """What each row generated, up to its first end token."""
    rows = []
    for row in output.sequences[:, skipped:].tolist():
        rows.append(tuple(row[: row.index(EOS) + 1] if EOS in row else row))
    return rows


def check_items(output: Any, items: list[Items], skipped: int, per_prompt: int) -> None:
    """`item_ids` names the item that each real row is; other rows are -inf, last, and -1; no item comes twice."""
    rows, ids, scores = generated(output, skipped), output.item_ids.tolist(), output.sequences_scores
    assert output.item_ids.dtype == torch.int64
    for number, (row, item, score) in enumerate(zip(rows, ids, scores.tolist(), strict=True)):
        of_prompt = items[(number // per_prompt) % len(items)]
        first = {tuple(known): place for place, known in reversed(list(enumerate(of_prompt)))}
        assert item == (first[row] if score > -float("inf") and row in first else -1)
    for start in range(0, len(ids), per_prompt):
        of_prompt = [item for item in ids[start : start + per_prompt] if item >= 0]
        assert len(set(of_prompt)) == len(of_prompt)
        real = scores[start : start + per_prompt].isfinite()
        assert torch.equal(real.sort(descending=True, stable=True).values, real)


SETTINGS: dict[str, dict[str, Any]] = {
    "children": {},
    "rows": {"output_scores": True},
    "processors": {"repetition_penalty": 1.4, "min_new_tokens": 2, "output_scores": True},
    "gnmt": {"length_penalty": 0.6},
    "never": {"early_stopping": "never", "length_penalty": -0.5},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("count", [3, 40, 800])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "bart", "t5"])
def test_equal_to_a_prefix_function(kind: str, count: int, setting: str) -> None:
    """Scores of the whole vocabulary, not renormalised, for items that may be prefixes of one another."""
    model, inputs = shared_model(kind), prompts_for(shared_model(kind), kind, 3)
    items = [[*item, EOS] for item in catalogue(count, 1, 4)]
    trie = TokenTrie.from_sequences(catalogue(count, 1, 4), eos_token_id=EOS)
    skipped = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    call = dict(num_beams=WIDTH, num_return_sequences=WIDTH, max_new_tokens=6, return_dict_in_generate=True,
                do_sample=False, **SETTINGS[setting])  # fmt: skip
    if setting == "gnmt":  # transformers has no such form
        call["length_normalization"] = "gnmt"
    ours = GenerationMixin.generate(model, **inputs, **call, custom_generate=NAME, trie=trie)
    call.pop("length_normalization", None)
    stock = GenerationMixin.generate(
        model, **inputs, **{**call, "output_scores": True}, prefix_allowed_tokens_fn=allowed_by([items], skipped)
    )  # fmt: skip
    if setting == "gnmt":
        both = GenerationMixin.generate(model, **inputs, **call, output_scores=True, custom_generate=NAME, trie=trie,
                                        length_normalization="gnmt")  # fmt: skip
        assert torch.equal(both.item_ids, ours.item_ids)
        check_items(both, [items], skipped, WIDTH)
        return
    theirs = real_scores(stock.sequences_scores)
    mine = ours.sequences_scores
    if mine is None:  # rows were not asked for, so that only children were looked up
        mine = summed(ours, SETTINGS[setting].get("length_penalty", 1.0))
        mine = torch.where(theirs.isfinite(), mine, -torch.inf)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    tied = (theirs.view(-1, 1, WIDTH) - theirs.view(-1, WIDTH, 1)).abs().lt(1e-4).sum(-1).flatten() > 1
    for row, (my_row, their_row) in enumerate(zip(generated(ours, skipped), generated(stock, skipped), strict=True)):
        assert my_row == their_row or tied[row] or not theirs[row].isfinite()
    ours.sequences_scores = mine
    check_items(ours, [items], skipped, WIDTH)


def summed(output: Any, length_penalty: float) -> torch.Tensor:
    """Scores from the log-probabilities of the tokens."""
    length = (output.beam_indices >= 0).sum(-1).clamp(min=1)
    return output.token_logprobs.sum(-1) / length**length_penalty


@pytest.mark.parametrize("setting", ["children", "rows"])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_items_without_an_end_token(kind: str, setting: str) -> None:
    """Items of one length finish at their leaf, as transformers' do at `max_new_tokens`."""
    model, inputs = shared_model(kind), prompts_for(shared_model(kind), kind, 2)
    items = [item for item in catalogue(300, 3, 3) if EOS not in item]
    skipped = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    call = dict(num_beams=WIDTH, num_return_sequences=WIDTH, return_dict_in_generate=True, do_sample=False,
                eos_token_id=None)  # fmt: skip
    stock = GenerationMixin.generate(model, **inputs, **call, max_new_tokens=3, output_scores=True,
                                     prefix_allowed_tokens_fn=allowed_by([items], skipped))  # fmt: skip
    ours = GenerationMixin.generate(model, **inputs, **call, max_new_tokens=9, trie=TokenTrie.from_sequences(items),
                                    custom_generate=NAME, **SETTINGS[setting])  # fmt: skip
    assert ours.sequences.shape == stock.sequences.shape and (ours.item_ids >= 0).all()
    torch.testing.assert_close(summed(ours, 1.0), stock.sequences_scores, atol=1e-4, rtol=0)
    assert [tuple(row) for row in ours.sequences[:, skipped:].tolist()] == [tuple(items[i]) for i in ours.item_ids]


@pytest.mark.parametrize("setting", ["children", "rows"])
def test_items_of_different_lengths_without_an_end_token(setting: str) -> None:
    """With beams for all, every item comes back once, with its exact probability: none is crowded out by leaves."""
    model, prompt = shared_model("llama"), torch.tensor([[7, 8, 9]])
    items = [[20, child] for child in range(30, 60)] + [[21, 30, 31], [21, 30, 32], [22, 30, 31, 33]]
    trie = TokenTrie.from_sequences(items)
    for width, found in ((33, 33), (40, 33), (4, 4)):
        ours = hf_paged_beam.generate(
            model, prompt, num_beams=width, num_return_sequences=width, max_new_tokens=8, length_penalty=0.0,
            eos_token_id=None, early_stopping="never", return_dict_in_generate=True, trie=trie, **SETTINGS[setting],
        )  # fmt: skip
        ids = [item for item in ours.item_ids.tolist() if item >= 0]
        assert len(set(ids)) == len(ids) == found
        for row, item in zip(ours.token_logprobs, ours.item_ids.tolist(), strict=True):
            if item >= 0:
                assert abs(row.sum().item() - exact(model, prompt, items[item])) < 1e-4


@torch.no_grad()
def exact(model: Any, prompt: torch.Tensor, item: list[int]) -> float:
    """Log-probability of an item after a prompt."""
    logits = model(torch.cat([prompt, torch.tensor([item])], 1)).logits[0, prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(item)[:, None]).sum().item()


@pytest.mark.parametrize("setting", ["children", "rows"])
def test_scores_among_what_is_allowed(setting: str) -> None:
    """`trie_renormalize`: probabilities of all items sum to one, and each is the product along its path."""
    model, prompt = shared_model("llama"), torch.tensor([[7, 8, 9], [9, 8, 7]])
    items = [list(item) for item in itertools.product(range(20, 23), range(30, 32), [40])]
    ours = hf_paged_beam.generate(
        model, prompt, num_beams=6, num_return_sequences=6, max_new_tokens=4, length_penalty=0.0, eos_token_id=None,
        return_dict_in_generate=True, trie=TokenTrie.from_sequences(items), trie_renormalize=True, **SETTINGS[setting],
    )  # fmt: skip
    torch.testing.assert_close(ours.token_logprobs.sum(-1).exp().view(2, 6).sum(1), torch.ones(2))
    with torch.no_grad():
        first = model(prompt).logits[:, -1, 20:23].log_softmax(-1)
    for row in range(12):
        token = ours.sequences[row, 3] - 20
        assert abs(ours.token_logprobs[row, 0] - first[row // 6, token]) < 1e-4


@pytest.mark.parametrize("setting", ["children", "rows"])
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_a_trie_for_each_prompt(kind: str, setting: str) -> None:
    """Each prompt's result is its result alone with its own trie; one trie may serve several prompts."""
    model, inputs = shared_model(kind), prompts_for(shared_model(kind), kind, 3)
    skipped = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    catalogues = [catalogue(50, 2, 3, seed) for seed in (1, 2)]
    first, second = (TokenTrie.from_sequences(items, eos_token_id=EOS) for items in catalogues)
    call = dict(num_beams=4, num_return_sequences=4, max_new_tokens=5, return_dict_in_generate=True, do_sample=False,
                custom_generate=NAME, **SETTINGS[setting])  # fmt: skip
    together = GenerationMixin.generate(model, **inputs, **call, trie=[first, second, first])
    for prompt, trie in enumerate((first, second, first)):
        alone = GenerationMixin.generate(
            model, **{name: given[prompt : prompt + 1] for name, given in inputs.items()}, **call, trie=trie
        )
        rows = slice(4 * prompt, 4 * prompt + 4)
        assert together.item_ids[rows].tolist() == alone.item_ids.tolist()
        assert generated(alone, skipped) == generated(together, skipped)[rows]


@pytest.mark.parametrize("route", ["name", "callable", "enabled"])
def test_every_route_takes_a_trie(route: str) -> None:
    model, inputs = shared_model("llama"), prompts_for(shared_model("llama"), "llama", 2)
    trie = TokenTrie.from_sequences(catalogue(50, 2, 3), eos_token_id=EOS)
    call = dict(num_beams=4, max_new_tokens=5, return_dict_in_generate=True, do_sample=False, trie=trie)
    expected = hf_paged_beam.generate(model, **inputs, **call)
    if route == "enabled":
        hf_paged_beam.enable(model)
    try:
        way = {"name": {"custom_generate": NAME}, "callable": {"custom_generate": hf_paged_beam.beam_search}}
        ours = model.generate(**inputs, **call, **way.get(route, {}))
    finally:
        hf_paged_beam.disable(model)
    assert torch.equal(ours.item_ids, expected.item_ids) and (ours.item_ids >= 0).all()


def test_a_forced_token_comes_before_the_items() -> None:
    """As mBART's language token does: the trie begins after it."""
    model, inputs = shared_model("bart"), prompts_for(shared_model("bart"), "bart", 2)
    items = catalogue(60, 2, 3)
    closed = [[*item, EOS] for item in items]
    call = dict(num_beams=4, num_return_sequences=4, max_new_tokens=6, forced_bos_token_id=50)
    stock, ours = search_both(
        model, inputs, **call, stock_only={"prefix_allowed_tokens_fn": allowed_by([closed], 2)},
        ours_only={"trie": TokenTrie.from_sequences(items, eos_token_id=EOS)},
    )  # fmt: skip
    torch.testing.assert_close(ours.sequences_scores, real_scores(stock.sequences_scores), atol=1e-4, rtol=0)
    assert (ours.sequences[:, 1] == 50).all()
    check_items(ours, [closed], 2, 4)


def test_cut_items_are_no_items() -> None:
    """At the longest length a row may be the beginning of an item: it has a score, and no item."""
    model, inputs = shared_model("llama"), prompts_for(shared_model("llama"), "llama", 1)
    items = [[20, 30, 40], [21], [20, 31, 41]]
    ours = hf_paged_beam.generate(
        model, **inputs, num_beams=3, num_return_sequences=3, max_new_tokens=2, return_dict_in_generate=True,
        output_scores=True, trie=TokenTrie.from_sequences(items, eos_token_id=EOS),
    )  # fmt: skip
    assert ours.sequences_scores.isfinite().all()
    assert sorted(ours.item_ids.tolist()) == [-1, -1, 1]


@pytest.mark.parametrize("setting", [{}, {"output_scores": True}, {"repetition_penalty": 1.2}])
def test_drawn_items_are_items(setting: dict[str, Any]) -> None:
    """Beam sampling draws items only."""
    model, inputs = shared_model("llama"), prompts_for(shared_model("llama"), "llama", 2)
    trie = TokenTrie.from_sequences(catalogue(200, 2, 3), eos_token_id=EOS)
    torch.manual_seed(0)
    call = dict(num_beams=4, num_return_sequences=4, max_new_tokens=5, do_sample=True, return_dict_in_generate=True)
    ours = hf_paged_beam.generate(model, **inputs, **call, trie=trie, **setting)
    assert (ours.item_ids >= 0).all()


TRIE = TokenTrie.from_sequences([[20, 30], [21]], eos_token_id=EOS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trie": [[20, 30]]}, r"trie must be a TokenTrie, or a list of one for each prompt, but got \['list'\]"),
        ({"trie": []}, "trie must be a TokenTrie"),
        ({"trie": [TRIE]}, "trie has 1 tries for 2 prompts"),
        ({"trie": [TRIE] * 3}, "trie has 3 tries for 2 prompts"),
        ({"trie_renormalize": True}, "trie_renormalize must be"),
        ({"trie": TRIE, "trie_renormalize": 1}, "trie_renormalize must be"),
        ({"trie": TokenTrie.from_sequences([[20, 99]])}, "holds the token 99, but the model's vocabulary has 99"),
        ({"trie": TokenTrie.from_sequences([[20, EOS, 30]])}, f"goes on after the end token {EOS}"),
        ({"trie": TRIE, "prefix_allowed_tokens_fn": lambda prompt, ids: [20]}, "prefix_allowed_tokens_fn and trie"),
        ({"trie": TRIE, "num_beams": 1}, "num_beams of at least 2"),
        ({"trie": TRIE, "use_cache": False}, "trie"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    """Nothing that asks for items is answered without them."""
    model, inputs = shared_model("llama"), prompts_for(shared_model("llama"), "llama", 2)
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, **{"num_beams": 3, "max_new_tokens": 3, **settings}, custom_generate=NAME)


def test_the_folded_path_and_the_index_of_items() -> None:
    """A million items are searched as quickly as a thousand: nothing of a step depends on their number."""
    model, inputs = shared_model("llama"), prompts_for(shared_model("llama"), "llama", 1)
    items = torch.randint(6, 99, (100_000, 4), generator=torch.manual_seed(0))
    call = dict(
        num_beams=50, num_return_sequences=50, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True
    )
    ours = hf_paged_beam.generate(model, **inputs, **call, trie=TokenTrie.from_sequences(items))
    assert ours.beam_path == path_of("llama") and (ours.item_ids >= 0).all()
    assert torch.equal(items[ours.item_ids], ours.sequences[:, -4:])
