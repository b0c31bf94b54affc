"""The item trie: what it holds, what it refuses, and files that are damaged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_paged_beam import TokenTrie

END = 9


def paths(trie: TokenTrie) -> dict[tuple[int, ...], int]:
    """Every item of a trie, by walking it, and its index."""
    found, ahead = {}, [(0, ())]
    while ahead:
        node, path = ahead.pop()
        if trie.item[node] >= 0:
            found[path] = int(trie.item[node])
        for child in range(int(trie.first_child[node]), int(trie.first_child[node + 1])):
            ahead.append((child, (*path, int(trie.token[child]))))
    return found


def expected(items: list[list[int]], end: int | None) -> dict[tuple[int, ...], int]:
    closed = [item if end is None or item[-1] == end else [*item, end] for item in items]
    first: dict[tuple[int, ...], int] = {}
    for number, item in enumerate(closed):
        first.setdefault(tuple(item), number)
    return first


ITEMS = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=5), min_size=1, max_size=30)


@settings(deadline=None, max_examples=150)
@given(ITEMS, st.booleans())
def test_a_trie_holds_its_items(items: list[list[int]], closes_some: bool) -> None:
    """As a Python set of tuples would, from lists and from a padded tensor; duplicates keep the first index."""
    if closes_some:
        items = [[*item, END] if number % 3 == 0 else item for number, item in enumerate(items)]
    longest = max(map(len, items))
    padded = torch.tensor([item + [-1] * (longest - len(item)) for item in items])
    for given_items in (items, padded, padded.to(torch.int32), [torch.tensor(item).tolist() for item in items]):
        trie = TokenTrie.from_sequences(given_items, eos_token_id=END)
        held = expected(items, END)
        assert paths(trie) == held and len(trie) == len(held)
        assert trie.depth == max(map(len, held))


@settings(deadline=None, max_examples=60)
@given(ITEMS)
def test_nodes_are_in_order(items: list[list[int]]) -> None:
    """Level by level, children by their tokens, and as many as there are different beginnings."""
    trie = TokenTrie.from_sequences(items, eos_token_id=END)
    beginnings = {item[:end] for item in expected(items, END) for end in range(len(item) + 1)}
    assert len(trie.token) == len(beginnings)
    counts = trie.first_child.diff()
    start, size = 0, 1
    for level in trie.levels:
        of_level = counts[start : start + size]
        assert int(of_level.max()) == level.most_children
        assert bool((of_level == 0).any()) == level.has_leaves
        start, size = start + size, int(of_level.sum())
    assert start == len(trie.token) and size == 0


@settings(deadline=None, max_examples=40)
@given(ITEMS)
def test_without_an_end_token_no_item_begins_with_another(items: list[list[int]]) -> None:
    begins = any(a != b and b[: len(a)] == a for a in items for b in items)
    if begins:
        with pytest.raises(ValueError, match=r"item \d+ is the beginning of another item"):
            TokenTrie.from_sequences(items)
    else:
        assert paths(TokenTrie.from_sequences(items)) == expected(items, None)


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([], ValueError, "at least one item"),
        (torch.zeros(0, 3, dtype=torch.int64), ValueError, "at least one item"),
        ([[3], []], ValueError, "item 1 is empty"),
        (torch.tensor([[3, 4], [-1, -1]]), ValueError, "item 1 is empty"),
        ([[3], [4, -1]], ValueError, "item 1 holds -1"),
        ([[3, 2**31]], ValueError, "item 0 holds 2147483648"),
        (torch.tensor([[3, -2]]), ValueError, "item 0 holds -2"),
        (torch.tensor([[3, 4], [-1, 4]]), ValueError, "item 1 has -1 between its ids"),
        ([[3, END, 4]], ValueError, "item 0 goes on after the end token 9"),
        ([[3], [END, END]], ValueError, "item 1 goes on after the end token 9"),
        ([[3.5]], TypeError, "integers"),
        ([[True, False]], TypeError, "integers"),
        ([["a"]], TypeError, "token ids"),
        ([3, 4], TypeError, "sequences of token ids"),
        (torch.tensor([[0.5]]), TypeError, "integers"),
        (torch.tensor([3]), ValueError, r"\[N, L\]"),
    ],
)
def test_what_is_refused(items: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenTrie.from_sequences(items, eos_token_id=END)


@pytest.mark.parametrize(
    ("end", "error"), [(-1, ValueError), (True, ValueError), (2**31, ValueError), ("9", TypeError)]
)
def test_end_tokens_that_are_refused(end: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="eos_token_id must be"):
        TokenTrie.from_sequences([[3]], eos_token_id=end)


def test_many_columns_of_large_ids() -> None:
    """More bits than one sort key holds."""
    ids = random.Random(0)
    items = [[ids.randrange(2**31 - 2) for _ in range(7)] for _ in range(50)]
    items += [[*item[:6], item[6] ^ 1] for item in items]
    assert paths(TokenTrie.from_sequences(items)) == expected(items, None)


def test_length_and_text() -> None:
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7], [7]], eos_token_id=END)
    assert len(trie) == 3
    assert repr(trie) == "TokenTrie(items=3, nodes=8, depth=3, MB=0.0, device=cpu, eos_token_id=9)"
    assert trie.nbytes == 4 * (8 + 9 + 8)
    assert trie.to("cpu") is trie and trie.to("meta").token.device.type == "meta"


# --- files ---


@pytest.mark.parametrize("end", [None, END])
def test_a_file_gives_the_trie_back(tmp_path: Path, end: int | None) -> None:
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7]], eos_token_id=end)
    trie.save(tmp_path / "items.safetensors")
    loaded = TokenTrie.load(tmp_path / "items.safetensors")
    assert paths(loaded) == paths(trie) and loaded.eos_token_id == end and loaded.levels == trie.levels


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no trie at"):
        TokenTrie.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("kept", [0, 7, 8, 40, 200, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "items.safetensors"
    TokenTrie.from_sequences([[3, 4], [3, 5], [7]]).save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        TokenTrie.load(path)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "items.safetensors"
    save_file({"token": torch.zeros(3, dtype=torch.int32)}, path)
    with pytest.raises(ValueError, match=r"was not written by TokenTrie\.save"):
        TokenTrie.load(path)


DAMAGES = {
    "an array is missing": lambda arrays: arrays.pop("item"),
    "another dtype": lambda arrays: arrays.update(token=arrays["token"].long()),
    "another shape": lambda arrays: arrays.update(token=arrays["token"].unsqueeze(0)),
    "too few nodes": lambda arrays: arrays.update(token=arrays["token"][:-1].clone()),
    "children beyond the end": lambda arrays: arrays["first_child"].__setitem__(-1, 1000),
    "children before their parent": lambda arrays: arrays["first_child"].__setitem__(slice(1, 3), 1),
    "children run backwards": lambda arrays: arrays["first_child"].__setitem__(2, 2),
    "a token below 0": lambda arrays: arrays["token"].__setitem__(2, -5),
    "tokens out of order": lambda arrays: arrays["token"].__setitem__(1, 90),
    "a leaf without an item": lambda arrays: arrays["item"].__setitem__(-1, -1),
    "an item on the way": lambda arrays: arrays["item"].__setitem__(1, 0),
    "an item below -1": lambda arrays: arrays["item"].__setitem__(2, -7),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(tmp_path: Path, damage: str) -> None:
    """Each is a clear error when the file is read, not an index out of range in a search."""
    path = tmp_path / "items.safetensors"
    TokenTrie.from_sequences([[3, 4], [3, 5], [7]]).save(path)
    arrays = load_file(path)
    DAMAGES[damage](arrays)
    save_file(arrays, path, metadata={"format": "hf_paged_beam.TokenTrie", "eos_token_id": ""})
    with pytest.raises(ValueError, match="is damaged"):
        TokenTrie.load(path)


@pytest.mark.parametrize("end", ["9", "x", "-1", "99999999999"])
def test_a_file_with_another_end_token(tmp_path: Path, end: str) -> None:
    path = tmp_path / "items.safetensors"
    TokenTrie.from_sequences([[3, 4], [3, 5], [7]]).save(path)
    save_file(load_file(path), path, metadata={"format": "hf_paged_beam.TokenTrie", "eos_token_id": end})
    with pytest.raises(ValueError, match="is damaged"):
        TokenTrie.load(path)
