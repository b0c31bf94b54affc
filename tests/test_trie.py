"""The item trie: what it holds, what it refuses, and files that are damaged."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

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
        ([[3], [4, -(2**70)]], ValueError, f"item 1 holds {-(2**70)}"),
        ([[3]] * 40_000 + [[4, -1]], ValueError, "item 40000 holds -1"),
        ([[3]] * 40_000 + [[]], ValueError, "item 40000 is empty"),
        (torch.tensor([[3, 2**63]], dtype=torch.uint64), ValueError, "item 0 holds -9223372036854775808"),
        (torch.tensor([[3]]).to_sparse(), TypeError, "dense"),
        ("abc", TypeError, "token ids"),
        ([[[3]]], TypeError, "2 dimensions"),
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


def write(path: Path, arrays: dict[str, torch.Tensor], end: str = "", **changed: str | None) -> None:
    """A file as `save` writes it, checksum and all, of arrays that it would not write."""
    check = 0
    for name in ("token", "first_child", "item"):
        check = zlib.crc32(arrays[name].numpy().tobytes(), check) if name in arrays else check
    metadata = {"format": "hf_paged_beam.TokenTrie", "eos_token_id": end, "crc32": f"{check:08x}", **changed}
    save_file(arrays, path, metadata={name: given for name, given in metadata.items() if given is not None})


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "an array is missing": (lambda arrays: arrays.pop("item"), "it holds the arrays"),
    "an array too many": (lambda arrays: arrays.update(more=torch.zeros(2)), "it holds the arrays"),
    "another dtype": (lambda arrays: arrays.update(token=arrays["token"].long()), "token is I64"),
    "a dtype of eight bits": (lambda arrays: arrays.update(item=arrays["item"].to(torch.uint8)), "item is U8"),
    "another shape": (lambda arrays: arrays.update(token=arrays["token"].unsqueeze(0)), "of 2 dimensions"),
    "no shape": (lambda arrays: arrays.update(item=torch.tensor(1, dtype=torch.int32)), "of 0 dimensions"),
    "too few nodes": (lambda arrays: arrays.update(token=arrays["token"][:-1].clone()), "have 4, 6, 5 entries"),
    "empty": (lambda arrays: arrays.update({name: given[:0].clone() for name, given in arrays.items()}), "0, 0, 0"),
    "a root alone": (
        lambda arrays: arrays.update({name: given[: len(given) - 4].clone() for name, given in arrays.items()}),
        "have 1, 2, 1 entries",
    ),
    "children beyond the end": (lambda arrays: arrays["first_child"].__setitem__(-1, 1000), "not numbered"),
    "children before the root's": (lambda arrays: arrays["first_child"].__setitem__(0, 0), "not numbered"),
    "children before their parent": (lambda arrays: arrays["first_child"].__setitem__(slice(1, 3), 1), "own ancestor"),
    "children run backwards": (lambda arrays: arrays["first_child"].__setitem__(2, 2), "not numbered"),
    "differences that overflow": (
        lambda arrays: arrays["first_child"].__setitem__(slice(1, 3), torch.tensor([2**31 - 1, -(2**31)])),
        "not numbered",
    ),
    "a token below 0": (lambda arrays: arrays["token"].__setitem__(2, -5), "out of range"),
    "a token beyond the largest": (lambda arrays: arrays["token"].__setitem__(-1, 2**31 - 1), "out of range"),
    "a root with a token": (lambda arrays: arrays["token"].__setitem__(0, 1), "out of range"),
    "tokens out of order": (lambda arrays: arrays["token"].__setitem__(1, 90), "not in order"),
    "a token twice": (lambda arrays: arrays["token"].__setitem__(1, 7), "not in order"),
    "a leaf without an item": (lambda arrays: arrays["item"].__setitem__(-1, -1), "do not end where"),
    "an item on the way": (lambda arrays: arrays["item"].__setitem__(1, 5), "do not end where"),
    "an item at the root": (lambda arrays: arrays["item"].__setitem__(0, 5), "do not end where"),
    "an item below -1": (lambda arrays: arrays["item"].__setitem__(2, -7), "out of range"),
    "an item twice": (lambda arrays: arrays["item"].__setitem__(-1, 0), "two of its items are one"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(tmp_path: Path, damage: str) -> None:
    """Each is a clear error when the file is read, not an index out of range in a search."""
    path = tmp_path / "items.safetensors"
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7]])
    arrays = {name: getattr(trie, name).clone() for name in ("token", "first_child", "item")}
    write(path, arrays)
    assert paths(TokenTrie.load(path)) == paths(trie)  # what is refused is the damage
    change, message = DAMAGES[damage]
    change(arrays)
    write(path, arrays)
    with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
        TokenTrie.load(path)


@pytest.mark.parametrize("node", [0, 1, 5])
def test_an_item_on_the_way_to_an_end_token(tmp_path: Path, node: int) -> None:
    path = tmp_path / "items.safetensors"
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7]], eos_token_id=END)
    trie.item[node] = 8 if trie.item[node] < 0 else -1
    write(path, {name: getattr(trie, name) for name in ("token", "first_child", "item")}, end="9")
    with pytest.raises(ValueError, match="items do not end where nothing follows"):
        TokenTrie.load(path)


ENDS = {
    "9": "do not end with the end token", "x": "its end token is 'x'", "-1": "its end token", "99999999999": "its end",
    "2147483647": "its end token", "9" * 5000: "its end token", "٣": "its end token", "²": "its end token",
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_file_with_another_end_token(tmp_path: Path, end: str) -> None:
    path = tmp_path / "items.safetensors"
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7]])
    write(path, {name: getattr(trie, name) for name in ("token", "first_child", "item")}, end=end)
    with pytest.raises(ValueError, match=f"is damaged: .*{ENDS[end]}"):
        TokenTrie.load(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"eos_token_id": None}, "its metadata lack eos_token_id"),
        ({"crc32": None}, "its metadata lack crc32"),
        ({"crc32": "00000000"}, "its checksum is not that of its arrays"),
        ({"format": None}, r"was not written by TokenTrie\.save"),
        ({"format": "hf_paged_beam.TokenTrie2"}, r"was not written by TokenTrie\.save"),
    ],
)
def test_a_file_with_other_metadata(tmp_path: Path, changed: dict[str, str | None], message: str) -> None:
    path = tmp_path / "items.safetensors"
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7]])
    write(path, {name: getattr(trie, name) for name in ("token", "first_child", "item")}, **changed)
    with pytest.raises(ValueError, match=message):
        TokenTrie.load(path)


def test_items_that_are_too_long(tmp_path: Path) -> None:
    """Each depth costs some calls: neither a list, a tensor nor a small file can ask for millions of them."""
    for items in ([[3] * 65_537], torch.full((1, 65_537), 3)):
        with pytest.raises(ValueError, match="at most 65536 tokens, but one has 65537"):
            TokenTrie.from_sequences(items)
    nodes = 65_538
    chain = {
        "token": torch.full((nodes,), 3, dtype=torch.int32),
        "first_child": torch.arange(1, nodes + 2, dtype=torch.int32).clamp(max=nodes),
        "item": torch.full((nodes,), -1, dtype=torch.int32),
    }
    chain["token"][0], chain["item"][-1] = -1, 0
    write(tmp_path / "chain.safetensors", chain)
    with pytest.raises(ValueError, match="deeper than 65536 tokens"):
        TokenTrie.load(tmp_path / "chain.safetensors")


def test_a_trie_does_not_depend_on_its_file(tmp_path: Path) -> None:
    """It can be saved onto the file that it came from, and lives on when the file is cut short."""
    path = tmp_path / "items.safetensors"
    trie = TokenTrie.from_sequences(torch.randint(50, (5000, 3), generator=torch.manual_seed(0)))
    trie.save(path)
    loaded = TokenTrie.load(path)
    loaded.save(path)
    assert torch.equal(TokenTrie.load(path).token, trie.token)
    path.write_bytes(b"")
    assert torch.equal(loaded.token, trie.token)


def test_tokens_of_each_depth() -> None:
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7], [8, 4, 4]], eos_token_id=END)
    found = [trie.tokens_at(depth).tolist() for depth in range(trie.depth + 1)]
    assert found == [[-1], [3, 7, 8], [4, 5, END], [4, END], [END]]


MEMORY = """
import torch
from hf_paged_beam import TokenTrie

def peak(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

torch.set_num_threads(1)
TokenTrie.from_sequences([[1, 2]])
items = torch.randint(8192, (COUNT, 4), generator=torch.manual_seed(0))
before = peak("VmRSS")
trie = TokenTrie.from_sequences(items)
assert len(trie) == COUNT or COUNT > 10**6, len(trie)
print(peak("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's count of the memory in use")
@pytest.mark.parametrize(("count", "most"), [(1_000_000, 100), pytest.param(10_000_000, 1_180, marks=pytest.mark.slow)])
def test_memory_of_a_build(count: int, most: int) -> None:
    """A million items take at most 100 MB beside their own 32; ten million, 1.5 GB, their own 320 MB among them."""
    program = MEMORY.replace("COUNT", str(count))
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}  # else freed arrays count at times, as of chance
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=given_back)
    assert float(run.stdout) * 2**20 / 1e6 <= most
