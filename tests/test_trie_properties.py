"""Tries of random items against Python's sets, searches over them against brute force, and hostile files."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from tiny_models import EOS, shared_model

import hf_paged_beam
from hf_paged_beam import TokenTrie

Items = list[list[int]]
ARRAYS = ("token", "first_child", "item")
END = 9

few_ids = st.integers(0, END)
any_ids = st.one_of(few_ids, st.integers(0, 2**31 - 2))
ITEMS = st.one_of(
    st.lists(st.lists(few_ids, min_size=1, max_size=6), min_size=1, max_size=40),
    st.lists(st.lists(any_ids, min_size=1, max_size=9), min_size=1, max_size=20),
)


def closed(items: Items, end: int) -> list[tuple[int, ...]]:
    """Items cut after their first end token, or closed by one."""
    return [tuple(item[: item.index(end) + 1]) if end in item else (*item, end) for item in items]


def without_prefixes(items: Items) -> Items:
    """The items that are no beginning of another."""
    beginnings = {tuple(item[:end]) for item in items for end in range(len(item))}
    return [item for item in items if tuple(item) not in beginnings]


def following(items: list[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """Every beginning of an item, and the tokens that may follow it, in order."""
    found: dict[tuple[int, ...], set[int]] = {}
    for item in items:
        for end in range(len(item)):
            found.setdefault(item[:end], set()).add(item[end])
        found.setdefault(item, set())
    return {beginning: sorted(tokens) for beginning, tokens in found.items()}


def check_holds(trie: TokenTrie, items: list[tuple[int, ...]]) -> None:
    """Every node is a beginning of an item, with its tokens in order and its first item, and none is missing."""
    expected, first = following(items), {item: place for place, item in reversed(list(enumerate(items)))}
    token, first_child, item = (getattr(trie, name).tolist() for name in ARRAYS)
    beginnings: list[tuple[int, ...]] = [()]
    for node, beginning in enumerate(beginnings):  # grows while it is walked: nodes are numbered level by level
        children = range(first_child[node], first_child[node + 1])
        assert [token[child] for child in children] == expected[beginning]
        assert item[node] == first.get(beginning, -1)
        assert children.start == len(beginnings)
        beginnings += [(*beginning, token[child]) for child in children]
    assert len(beginnings) == len(set(beginnings)) == len(expected) == len(token)
    assert len(trie) == len(first) and trie.depth == max(map(len, first))
    for depth in range(trie.depth + 1) if trie.largest_token < 2**20 else ():
        assert trie.tokens_at(depth).tolist() == sorted({b[-1] if b else -1 for b in beginnings if len(b) == depth})


def padded(items: Items, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    longest = max(map(len, items)) + 1
    return torch.tensor([item + [-1] * (longest - len(item)) for item in items], dtype=dtype)


def same(first: TokenTrie, second: TokenTrie) -> bool:
    return first.eos_token_id == second.eos_token_id and all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in ARRAYS
    )


@settings(deadline=None, max_examples=150)
@given(ITEMS)
def test_closed_items(items: Items) -> None:
    """With an end token: duplicates are one, items may begin with others, and all ways to give them are the same."""
    as_given = [[token for token in item if token != END] or [0] for item in items]
    as_given = [[*item, END] if number % 3 == 0 else item for number, item in enumerate(as_given)]
    trie = TokenTrie.from_sequences(as_given, eos_token_id=END)
    check_holds(trie, closed(as_given, END))
    for other in (
        padded(as_given),
        padded(as_given, torch.int32),
        padded(as_given).t().contiguous().t(),
        [list(item) for item in closed(as_given, END)],
        [torch.tensor(item) for item in as_given],
        iter(as_given),
    ):
        assert same(trie, TokenTrie.from_sequences(other, eos_token_id=END))


@settings(deadline=None, max_examples=150)
@given(ITEMS)
def test_open_items(items: Items) -> None:
    """Without an end token; and in another order only the indices differ."""
    items = without_prefixes(items)
    trie = TokenTrie.from_sequences(items)
    check_holds(trie, [tuple(item) for item in items])
    assert same(trie, TokenTrie.from_sequences(padded(items)))
    backwards = TokenTrie.from_sequences(items[::-1])
    assert torch.equal(backwards.token, trie.token) and torch.equal(backwards.first_child, trie.first_child)


def write(path: Path, arrays: dict[str, torch.Tensor], end: str = "") -> None:
    """A file with a true checksum."""
    check = 0
    for name in ARRAYS:
        check = zlib.crc32(arrays[name].numpy().tobytes(), check)
    metadata = {"format": "hf_paged_beam.TokenTrie", "eos_token_id": end, "crc32": f"{check:08x}"}
    save_file(arrays, path, metadata=metadata)


ONE_FOLDER = [HealthCheck.function_scoped_fixture]


@settings(deadline=None, max_examples=60, suppress_health_check=ONE_FOLDER)
@given(ITEMS, st.booleans())
def test_a_file_gives_the_same_trie(tmp_path: Path, items: Items, ends: bool) -> None:
    end = 2**31 - 2 if ends else None
    items = [[min(token, 2**31 - 3) for token in item] for item in items]
    trie = TokenTrie.from_sequences(items if ends else without_prefixes(items), eos_token_id=end)
    trie.save(tmp_path / "items.safetensors")
    loaded = TokenTrie.load(str(tmp_path / "items.safetensors"))
    assert same(trie, loaded) and loaded.levels == trie.levels and len(loaded) == len(trie)
    write(tmp_path / "again.safetensors", {name: getattr(trie, name) for name in ARRAYS}, str(end) if ends else "")
    assert same(trie, TokenTrie.load(tmp_path / "again.safetensors"))


small = st.integers(-2, 8)


@settings(deadline=None, max_examples=1500, suppress_health_check=ONE_FOLDER)
@given(st.data(), st.integers(2, 6), st.sampled_from(["", "3"]))
def test_arrays_that_are_no_trie_are_refused(tmp_path: Path, data: st.DataObject, nodes: int, end: str) -> None:
    """Whatever a file holds, what is loaded is what `from_sequences` makes of the items in it."""
    lists = {name: data.draw(st.lists(small, min_size=n, max_size=n)) for name, n in _sizes(nodes)}
    if data.draw(st.booleans()):  # nearer to a trie
        lists["first_child"] = sorted(max(1, min(child, nodes)) for child in lists["first_child"])
        lists["first_child"][0], lists["first_child"][-1], lists["token"][0] = 1, nodes, -1
        leaf = [a == b for a, b in zip(lists["first_child"], lists["first_child"][1:], strict=False)]
        lists["item"] = [item if is_leaf else -1 for item, is_leaf in zip(lists["item"], leaf, strict=True)]
        lists["token"] = [3 if end and is_leaf else t for t, is_leaf in zip(lists["token"], leaf, strict=True)]
    path = tmp_path / "items.safetensors"
    write(path, {name: torch.tensor(given, dtype=torch.int32) for name, given in lists.items()}, end)
    try:
        trie = TokenTrie.load(path)
    except ValueError as error:
        assert "is damaged" in str(error)
        return
    items = held_items(lists)
    again = TokenTrie.from_sequences(list(items), eos_token_id=int(end) if end else None)
    assert torch.equal(again.token, trie.token) and torch.equal(again.first_child, trie.first_child)
    indices = list(items.values())
    assert [indices[place] if place >= 0 else -1 for place in again.item.tolist()] == lists["item"]


def _sizes(nodes: int) -> list[tuple[str, int]]:
    return [("token", nodes), ("first_child", nodes + 1), ("item", nodes)]


def held_items(lists: dict[str, list[int]]) -> dict[tuple[int, ...], int]:
    """The items of arrays that are a trie, with their indices."""
    beginnings: list[tuple[int, ...]] = [()]
    for node, beginning in enumerate(beginnings):
        children = range(lists["first_child"][node], lists["first_child"][node + 1])
        beginnings += [(*beginning, lists["token"][child]) for child in children]
    return {b: item for b, item in zip(beginnings, lists["item"], strict=True) if item >= 0}


# --- files that are none, or that lie ---


@functools.cache
def good_file() -> bytes:
    trie = TokenTrie.from_sequences([[3, 4], [3, 5], [7]], eos_token_id=END)
    metadata = {"format": "hf_paged_beam.TokenTrie", "eos_token_id": "9"}
    arrays = {name: getattr(trie, name) for name in ARRAYS}
    check = functools.reduce(lambda so_far, name: zlib.crc32(arrays[name].numpy().tobytes(), so_far), ARRAYS, 0)
    return save(arrays, metadata={**metadata, "crc32": f"{check:08x}"})


def load_bytes(folder: Path, content: bytes) -> TokenTrie:
    (folder / "items.safetensors").write_bytes(content)
    return TokenTrie.load(folder / "items.safetensors")


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    content = good_file()
    assert len(load_bytes(tmp_path, content)) == 3
    for kept in range(len(content)):
        with pytest.raises(ValueError, match="is no whole safetensors file"):
            load_bytes(tmp_path, content[:kept])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        load_bytes(tmp_path, content + b"\0")


@pytest.mark.parametrize("change", [1, 4, 128, 255])
def test_any_byte_changed(tmp_path: Path, change: int) -> None:
    """Each is an error, or leaves the same trie, as a space of the header does that becomes another blank."""
    content = good_file()
    trie = load_bytes(tmp_path, content)
    unnoticed = 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= change
        try:
            assert same(load_bytes(tmp_path, bytes(damaged)), trie), place
            unnoticed += 1
        except ValueError:
            pass
    assert unnoticed <= 8, "what is not noticed can be only blanks"


@settings(deadline=None, max_examples=200, suppress_health_check=ONE_FOLDER)
@given(st.binary(max_size=200), st.booleans())
@example(b"", False)
@example(b"\0" * 8, False)
@example(b"\xff" * 16, False)
@example(pickle.dumps({"token": [1]}), False)
@example(b"[" * 100_000, True)
@example(b'{"a":' * 100_000, True)
def test_bytes_that_are_no_trie(tmp_path: Path, content: bytes, header: bool) -> None:
    """Anything in place of a file, or of its header."""
    if header:
        content = len(content).to_bytes(8, "little") + content
    with pytest.raises(ValueError, match=r"no whole safetensors file|not written by TokenTrie\.save"):
        load_bytes(tmp_path, content)


def with_header(change: dict[str, Any], size: int | None = None, body: bytes | None = None) -> bytes:
    """The good file with another header."""
    content = good_file()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, given_entry in change.items():
        header[name] = {**header.get(name, {}), **given_entry}
    text = json.dumps(header).encode()
    body = content[8 + length :] if body is None else body
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


LIES: dict[str, bytes] = {
    "a header of 2^63 bytes": with_header({}, size=2**63),
    "a header of 2^40 bytes": with_header({}, size=2**40),
    "a header longer than the file": with_header({}, size=10_000),
    "a header of no bytes": with_header({}, size=0),
    "a shape beyond the bytes": with_header({"token": {"shape": [2**40]}}),
    "a shape that overflows": with_header({"token": {"shape": [2**62, 4]}}),
    "a shape below 0": with_header({"token": {"shape": [-1]}}),
    "a shape of no numbers": with_header({"token": {"shape": ["8"]}}),
    "another dtype": with_header({"token": {"dtype": "F32"}}),
    "an unknown dtype": with_header({"token": {"dtype": "I33"}}),
    "bytes of another array": with_header({"token": {"data_offsets": [0, 32]}, "item": {"data_offsets": [0, 32]}}),
    "bytes beyond the end": with_header({"token": {"data_offsets": [2**40, 2**40 + 32]}}),
    "bytes that run backwards": with_header({"token": {"data_offsets": [64, 32]}}),
    "an array more": with_header({"more": {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}}),
    "metadata of numbers": with_header({"__metadata__": {"eos_token_id": 9}}),
    "no bytes": with_header({}, body=b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(tmp_path: Path, lie: str) -> None:
    assert same(load_bytes(tmp_path, with_header({})), load_bytes(tmp_path, good_file()))
    with pytest.raises(ValueError, match=r"is no whole safetensors file|is damaged"):
        load_bytes(tmp_path, LIES[lie])


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    torch.save({"token": torch.zeros(3)}, tmp_path / "trie.pt")
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        TokenTrie.load(tmp_path / "trie.pt")


def test_a_folder_and_a_pipe(tmp_path: Path) -> None:
    """A pipe would be waited for."""
    with pytest.raises(ValueError, match="is no file"):
        TokenTrie.load(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="is no file"):
            TokenTrie.load(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no trie at"):
        TokenTrie.load(tmp_path / "link")


def most_memory() -> int:
    """KiB that this process held at most; 0 where that is not told."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("nodes", "message"), [(2**33, "is larger than any trie"), (2**30, "not numbered|no whole")])
def test_a_huge_file_of_nothing(tmp_path: Path, nodes: int, message: str, ends: bool) -> None:
    """Arrays of zeros that take no space on the disk: refused by their size, or by what is at their ends, or because
    they find no room."""
    header: dict[str, Any] = {"__metadata__": {"format": "hf_paged_beam.TokenTrie", "eos_token_id": "", "crc32": "0"}}
    start = 0
    for name, count in _sizes(nodes):
        header[name] = {"dtype": "I32", "shape": [count], "data_offsets": [start, start + 4 * count]}
        start += 4 * count
    text = json.dumps(header).encode()
    path = tmp_path / "items.safetensors"
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + start)
            if ends:  # the children of the root and of the last node, as they should be
                for place, child in ((nodes, 1), (2 * nodes, nodes)):
                    file.seek(8 + len(text) + 4 * place)
                    file.write(min(child, 2**31 - 1).to_bytes(4, "little"))
    except OSError:
        pytest.skip("this file system holds no file of this size, even one of holes")
    before = most_memory()
    with pytest.raises(ValueError, match=message):
        TokenTrie.load(path)
    assert most_memory() - before < 2**17, "it was read"


# --- searches ---

SEARCHED = st.lists(st.lists(st.integers(10, 14), min_size=1, max_size=3), min_size=1, max_size=25)
CALL: dict[str, Any] = dict(
    do_sample=False, max_new_tokens=5, length_penalty=0.0, early_stopping="never", return_dict_in_generate=True
)


@torch.no_grad()
def brute_force(prompt: list[int], items: list[tuple[int, ...]], among_allowed: bool) -> dict[int, float]:
    """Log-probability of every different item, by its first index: the whole vocabulary's, or among what may follow."""
    model, allowed = shared_model("llama", torch.float64), following(items)
    found: dict[tuple[int, ...], tuple[int, float]] = {}
    for number, item in enumerate(items):
        if item in found:
            continue
        logits = model(torch.tensor([[*prompt, *item]])).logits[0, len(prompt) - 1 : -1]
        total = 0.0
        for place, (row, token) in enumerate(zip(logits, item, strict=True)):
            among = allowed[item[:place]] if among_allowed else list(range(len(row)))
            total += float(row[token] - row[among].logsumexp(0))
        found[item] = number, total
    return dict(found.values())


def check_all_found(output: Any, prompt: int, width: int, expected: dict[int, float]) -> None:
    """The rows of a prompt are all items, best first, then rows that are none."""
    rows = slice(prompt * width, (prompt + 1) * width)
    ids, scores = output.item_ids[rows].tolist(), output.token_logprobs[rows].sum(-1).tolist()
    ranked = sorted(expected, key=lambda item: -expected[item])
    assert ids[len(ranked) :] == [-1] * (width - len(ranked))
    assert sorted(ids[: len(ranked)]) == sorted(ranked)
    for item, score, in_order in zip(ids, scores, ranked, strict=False):
        assert score == pytest.approx(expected[item], abs=1e-4)
        assert expected[item] == pytest.approx(expected[in_order], abs=1e-4)  # so the order is theirs, ties aside


@settings(deadline=None, max_examples=25)
@given(SEARCHED, st.booleans(), st.booleans(), st.booleans())
def test_wide_searches_find_every_item(items: Items, closes: bool, among_allowed: bool, whole_rows: bool) -> None:
    """As scoring every item one by one would, from whole rows or from the children, with and without an end token."""
    items = items if closes else without_prefixes(items)
    as_searched = closed(items, EOS) if closes else [tuple(item) for item in items]
    trie, width, prompt = TokenTrie.from_sequences(items, eos_token_id=EOS if closes else None), 27, [7, 8, 9]
    output = hf_paged_beam.generate(
        shared_model("llama", torch.float64), torch.tensor([prompt]), num_beams=width, num_return_sequences=width,
        trie=trie, trie_renormalize=among_allowed, output_scores=whole_rows, eos_token_id=EOS if closes else None,
        **CALL,
    )  # fmt: skip
    check_all_found(output, 0, width, brute_force(prompt, as_searched, among_allowed))


@settings(deadline=None, max_examples=15)
@given(st.lists(SEARCHED, min_size=3, max_size=3), st.booleans())
def test_a_trie_for_each_prompt(catalogues: list[Items], among_allowed: bool) -> None:
    """Each prompt finds its own items, all of them."""
    prompts, width = [[7, 8, 9], [20, 21, 22], [9, 9, 8]], 27
    output = hf_paged_beam.generate(
        shared_model("llama", torch.float64), torch.tensor(prompts), num_beams=width, num_return_sequences=width,
        trie=[TokenTrie.from_sequences(items, eos_token_id=EOS) for items in catalogues], eos_token_id=EOS,
        trie_renormalize=among_allowed, **CALL,
    )  # fmt: skip
    for number, (prompt, items) in enumerate(zip(prompts, catalogues, strict=True)):
        check_all_found(output, number, width, brute_force(prompt, closed(items, EOS), among_allowed))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 6), st.booleans())
def test_narrow_searches_find_items_only(seed: int, width: int, among_allowed: bool) -> None:
    """Each returned row is the item that it is said to be, with its score, and no item comes twice."""
    ids = random.Random(seed)
    items = [[ids.randrange(10, 40) for _ in range(ids.randint(1, 4))] for _ in range(ids.randint(width, 60))]
    output = hf_paged_beam.generate(
        shared_model("llama", torch.float64), torch.tensor([[7, 8, 9]]), num_beams=width, num_return_sequences=width,
        trie=TokenTrie.from_sequences(items, eos_token_id=EOS), trie_renormalize=among_allowed, eos_token_id=EOS,
        **CALL,
    )  # fmt: skip
    expected, as_searched = brute_force([7, 8, 9], closed(items, EOS), among_allowed), closed(items, EOS)
    real = [item for item in output.item_ids.tolist() if item >= 0]
    assert len(set(real)) == len(real) == min(width, len(expected))
    for row, item, logprobs in zip(output.sequences[:, 3:].tolist(), real, output.token_logprobs, strict=False):
        assert tuple(row[: len(as_searched[item])]) == as_searched[item]
        assert float(logprobs.sum()) == pytest.approx(expected[item], abs=1e-4)
