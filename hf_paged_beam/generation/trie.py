"""The items that a constrained search may give, as a trie in flat arrays.

Nodes are numbered level by level, so that the children of a node, and of neighbours, lie side by side:

    items 3 4, 3 5, 7:        node        0   1   2   3   4
                              token      -1   3   7   4   5
          root                first child 1   3   5   5   5   5
         3    7               item       -1  -1   2   0   1
        4 5

The children of node `n` are `first_child[n] .. first_child[n + 1] - 1`. A node without children is a leaf, where its
item ends. Twelve bytes per node: a million items of four tokens over codebooks of 8,192 take 36 MB.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_FORMAT = "hf_paged_beam.TokenTrie"
_ARRAYS = ("token", "first_child", "item")
_LARGEST_ID = 2**31 - 2
_LONGEST = 2**16
"""Most tokens of an item. Each depth costs a few calls, to build, to check and to search."""
_LARGEST_FILE = 3 * 4 * 2**31 + 2**27
"""Bytes of the arrays, and more than safetensors allows a header."""
_KEY_BITS = 62
_CHUNK = 2**15
"""So many lists, or nodes, are converted at a time: what is made of them on the way stays small."""


class Level(NamedTuple):
    """The nodes of one depth.

    Attributes:
        most_children: the largest number of children of a node.
        has_leaves: whether some node has none.
    """

    most_children: int
    has_leaves: bool


class TokenTrie:
    """A set of token sequences, for ``generate(..., trie=trie)``. Make one with `from_sequences` or `load`.

    Attributes:
        token: ``[nodes]`` int32, token that leads to each node; -1 at the root, node 0.
        first_child: ``[nodes + 1]`` int32.
        item: ``[nodes]`` int32, index (as given to `from_sequences`) of the item that ends at a node, or -1.
        levels: what is known of each depth, the root's first.
        eos_token_id: the end token that closes every item, or None: items end at their last token.
    """

    def __init__(
        self, token: torch.Tensor, first_child: torch.Tensor, item: torch.Tensor, *, eos_token_id: int | None = None
    ):
        self.token, self.first_child, self.item, self.eos_token_id = token, first_child, item, eos_token_id
        self.levels = _levels(first_child)
        self.largest_token = int(token.max())
        self._num_items = int((item >= 0).sum())
        self._goes_on_after: dict[int, bool] = {}
        self._tokens_at: list[torch.Tensor] = []  # found once, when it is first asked for

    @classmethod
    def from_sequences(
        cls, items: Sequence[Sequence[int]] | torch.Tensor, eos_token_id: int | None = None
    ) -> TokenTrie:
        """Build a trie.

        Args:
            items: lists of token ids, or ``[N, L]`` integers padded at the end with -1. Equal items count once, as the
                first of them.
            eos_token_id: put at the end of every item that does not end with it. Items may then be prefixes of one
                another.

        Memory at its peak, beside the items: about 75 bytes per item of 4 tokens, the trie's own 36 among them.

        Raises:
            ValueError: if there is no item, an item is empty, longer than 65,536 tokens, holds an id below 0 or above
                2^31 - 2, goes on after the end token or (without an end token) begins with another item.
            TypeError: if items are not integers.
        """
        end = None if eos_token_id is None else _as_id(eos_token_id)
        token, first_child, item = _build(_PackedItems(_checked_columns(items, end)))
        trie = cls(token, first_child, item, eos_token_id=end)
        inner = ((item >= 0) & (first_child[1:] > first_child[:-1])).nonzero()
        if eos_token_id is None and len(inner):
            shorter = int(item[inner[0, 0]])
            raise ValueError(
                f"item {shorter} is the beginning of another item, so that a search could not tell where it ends. Pass "
                f"eos_token_id, which then closes every item, or leave one of the two out."
            )
        return trie

    def __len__(self) -> int:
        """Number of different items."""
        return self._num_items

    def __repr__(self) -> str:
        return (
            f"TokenTrie(items={len(self)}, nodes={len(self.token)}, depth={self.depth}, "
            f"MB={self.nbytes / 1e6:.1f}, device={self.token.device}, eos_token_id={self.eos_token_id})"
        )

    @property
    def depth(self) -> int:
        """Tokens of the longest item, its end token included."""
        return len(self.levels) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.numel() * array.element_size() for array in self._arrays().values())

    def _arrays(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in _ARRAYS}

    def goes_on_after(self, token: int) -> bool:
        """Whether some item goes on after this token; found once for each token."""
        if token not in self._goes_on_after:
            inner = (self.token == token) & (self.first_child.diff() > 0)
            self._goes_on_after[token] = bool(inner.any())  # host read: before the search, once for each end token
        return self._goes_on_after[token]

    def tokens_at(self, depth: int) -> torch.Tensor:
        """``[C]`` int64: the different tokens that lead to the nodes of a depth, in order. The root's depth is 0.

        Found once, for all depths. Takes a byte per token id, so ask only once ids are known to be of a vocabulary.
        """
        if not self._tokens_at:
            starts = _level_starts(self.first_child)
            self._tokens_at.extend(
                _different(self.token[start:end], self.largest_token) for start, end in itertools.pairwise(starts)
            )
        return self._tokens_at[depth]

    def to(self, device: torch.device | str) -> TokenTrie:
        """The trie on another device; itself if it is there already."""
        if self.token.device == torch.device(device):
            return self
        moved = object.__new__(type(self))
        moved.__dict__.update(self.__dict__)
        moved.__dict__.update({name: array.to(device) for name, array in self._arrays().items()})
        return moved

    def save(self, path: str | Path) -> None:
        """Write the trie as one safetensors file, with a checksum."""
        on_host = {name: array.cpu().contiguous() for name, array in self._arrays().items()}  # host read: of a file
        metadata = {
            "format": _FORMAT,
            "eos_token_id": "" if self.eos_token_id is None else str(self.eos_token_id),
            "crc32": _checksum(on_host),
        }
        save_file(on_host, str(path), metadata=metadata)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> TokenTrie:
        """Read a trie that `save` wrote. The trie does not depend on the file any more.

        Raises:
            FileNotFoundError: if there is no such file.
            PermissionError: if the file may not be read.
            ValueError: if the file is damaged, or holds something else.
        """
        metadata, arrays = _read(Path(path))
        fault = _fault(arrays, metadata["eos_token_id"])
        if fault is None and _checksum(arrays) != metadata["crc32"]:
            fault = "its checksum is not that of its arrays"
        if fault is not None:
            raise ValueError(f"the trie in {path} is damaged: {fault}")
        end = metadata["eos_token_id"]
        return cls(**arrays, eos_token_id=int(end) if end else None).to(device)


def _levels(first_child: torch.Tensor) -> list[Level]:
    counts, starts = first_child.diff(), _level_starts(first_child)
    levels = [counts[start:end] for start, end in itertools.pairwise(starts)]
    return [Level(int(level.max()), bool((level == 0).any())) for level in levels]


def _level_starts(first_child: torch.Tensor) -> list[int]:
    """First node of each depth, and the number of nodes: a level begins where the children of the one above begin.

    Of at most `_LONGEST` levels below the root: the last entry is not the number of nodes where there are more.
    """
    nodes, starts = len(first_child) - 1, [0, 1]
    while starts[-1] < nodes and len(starts) < _LONGEST + 2:
        starts.append(int(first_child[starts[-1]]))
    return starts


def _different(tokens: torch.Tensor, largest: int) -> torch.Tensor:
    """``[C]`` int64, the tokens without repetitions, in order. A flag per token id: cheaper than a sort."""
    seen = torch.zeros(largest + 2, dtype=torch.bool, device=tokens.device)  # the root's -1 comes first
    for part in tokens.split(_CHUNK):
        seen[part.to(torch.int64) + 1] = True
    return seen.nonzero().squeeze(1) - 1


# --- building ---


def _as_id(given: Any) -> int:
    try:
        value = operator.index(given)
    except TypeError:
        raise TypeError(f"eos_token_id must be an integer or None, but got {given!r}") from None
    if isinstance(given, bool) or not 0 <= value <= _LARGEST_ID:
        raise ValueError(f"eos_token_id must be between 0 and {_LARGEST_ID}, but got {given!r}")
    return value


def _checked_columns(items: Any, end: int | None) -> torch.Tensor:
    """``[L, N]`` int32: the items' tokens by place, -1 after each item's end; closed by `end` unless that is None."""
    columns = _tensor_columns(items) if isinstance(items, torch.Tensor) else _list_columns(items)
    empty = (columns[0] < 0).nonzero()
    if len(empty):
        raise ValueError(f"item {int(empty[0, 0])} is empty; an item has at least one token")
    return columns if end is None else _with_end(columns, end)


def _list_columns(items: Any) -> torch.Tensor:
    items = items if isinstance(items, Sequence) else list(items)
    if not len(items):
        raise ValueError("a trie needs at least one item, but got none")
    try:
        longest = max(map(len, items))
        _refuse_too_long(longest)
        columns = torch.full((max(longest, 1), len(items)), -1, dtype=torch.int32)
        ahead = iter(items)
        for start in range(0, len(items), _CHUNK):
            _fill(columns, start, list(itertools.islice(ahead, _CHUNK)))
    except TypeError as error:
        raise TypeError(f"items must be sequences of token ids: {error}") from None
    return columns


def _fill(columns: torch.Tensor, start: int, items: list[Sequence[int]]) -> None:
    """Write lists of ids into their columns ``[L, N]``, from column `start` on."""
    lengths = torch.tensor([len(item) for item in items])
    try:
        flat = torch.tensor(list(itertools.chain.from_iterable(items)))
    except (ValueError, OverflowError, RuntimeError) as error:
        _refuse_beyond_64_bits(items, start)
        raise TypeError(str(error)) from None
    if len(flat) and (flat.is_floating_point() or flat.dtype == torch.bool or flat.dim() != 1):
        raise TypeError(f"ids are integers, but got {flat.dtype} of {flat.dim()} dimensions")
    _refuse_out_of_range(flat, lambda place: start + int((lengths.cumsum(0) <= place).sum()))
    item = torch.repeat_interleave(torch.arange(len(items)), lengths)
    place = torch.arange(len(flat)) - (lengths.cumsum(0) - lengths)[item]
    columns[place, start + item] = flat.to(torch.int32)


def _refuse_beyond_64_bits(items: list[Sequence[int]], start: int) -> None:
    for number, item in enumerate(items, start):
        for token in item:
            if isinstance(token, int) and not -(2**63) <= token < 2**63:
                raise ValueError(f"token ids must be between 0 and {_LARGEST_ID}, but item {number} holds {token}")


def _tensor_columns(items: torch.Tensor) -> torch.Tensor:
    if items.is_floating_point() or items.dtype == torch.bool or items.is_complex() or items.layout != torch.strided:
        raise TypeError(f"items must be integers in a dense tensor, but got a {items.layout} tensor of {items.dtype}")
    if items.dim() != 2:
        raise ValueError(f"items as a tensor must be [N, L], padded with -1, but got {list(items.shape)}")
    if not items.shape[0]:
        raise ValueError("a trie needs at least one item, but got none")
    items = items.cpu()  # host read: a trie is built on the CPU, before any search
    if items.dtype in (torch.uint16, torch.uint32, torch.uint64):  # which torch does not compare
        items = items.to(torch.int64)
    _refuse_out_of_range(items, lambda place: place // items.shape[1], lowest=-1)
    longest = sum(bool((column >= 0).any()) for column in items.t())
    _refuse_too_long(longest)
    columns = torch.full((max(longest, 1), items.shape[0]), -1, dtype=torch.int32)
    columns[:longest] = items.t()[:longest]
    for column, following in itertools.pairwise(items.t()):
        gaps = ((column < 0) & (following >= 0)).nonzero()
        if len(gaps):
            raise ValueError(f"item {int(gaps[0, 0])} has -1 between its ids; -1 may only stand after an item's end")
    return columns


def _refuse_too_long(longest: int) -> None:
    if longest > _LONGEST:
        raise ValueError(f"an item may have at most {_LONGEST} tokens, but one has {longest}")


def _refuse_out_of_range(ids: torch.Tensor, item_of: Callable[[int], int], lowest: int = 0) -> None:
    if not ids.numel() or (int(ids.min()) >= lowest and int(ids.max()) <= _LARGEST_ID):
        return
    flat = ids.flatten()
    place = int(((flat < lowest) | (flat > _LARGEST_ID)).nonzero()[0, 0])
    raise ValueError(
        f"token ids must be between 0 and {_LARGEST_ID}, but item {item_of(place)} holds {int(flat[place])}"
    )


def _with_end(columns: torch.Tensor, end: int) -> torch.Tensor:
    """Close every item that does not end with `end`."""
    closed = torch.cat([columns, torch.full_like(columns[:1], -1)])
    for column, following in reversed(list(itertools.pairwise(closed))):
        wrong = ((column == end) & (following >= 0)).nonzero()
        if len(wrong):
            raise ValueError(f"item {int(wrong[0, 0])} goes on after the end token {end}; a search ends there")
        following.masked_fill_((column >= 0) & (column != end) & (following < 0), end)
    return closed if bool((closed[-1] >= 0).any()) else closed[:-1]


class _PackedItems:
    """Items with as many tokens in one integer as fit, the first highest: what is sorted, at 8 bytes for 4 tokens.

    Args:
        columns: ``[L, N]`` int32, -1 after each item's end.

    Attributes:
        keys: of ``[N]`` int64 each.
    """

    def __init__(self, columns: torch.Tensor):
        self.length = len(columns)
        self._bits = max(int(columns.max()) + 1, 1).bit_length()
        self._per_key = max(_KEY_BITS // self._bits, 1)
        self.keys = [self._packed(part) for part in columns.split(self._per_key)]

    def _packed(self, columns: torch.Tensor) -> torch.Tensor:
        key = torch.zeros(columns.shape[1], dtype=torch.int64)
        for column in columns:
            key.bitwise_left_shift_(self._bits).add_(column).add_(1)  # 0 after the end: the beginning comes first
        return key

    def sort(self) -> torch.Tensor:
        """Sort the items by their tokens; equal items stay in order. Returns the order, ``[N]`` int32."""
        order = torch.arange(len(self.keys[0]), dtype=torch.int32)
        for number in reversed(range(len(self.keys))):  # the last tokens first
            last = number == len(self.keys) - 1
            key, places = (self.keys[number] if last else self.keys[number].index_select(0, order)).sort(stable=True)
            order = order.index_select(0, places)
            if number == 0:
                self.keys[0] = key
        self.keys[1:] = [key.index_select(0, order) for key in self.keys[1:]]
        return order

    def tokens(self, depth: int, out: torch.Tensor) -> torch.Tensor:
        """Write the tokens of one place, -1 where there is none, into ``[N]`` int32."""
        if depth >= self.length:
            return out.fill_(-1)
        number, place = divmod(depth, self._per_key)
        last = min(self._per_key, self.length - number * self._per_key) - 1
        for part, into in zip(self.keys[number].split(_CHUNK), out.split(_CHUNK), strict=True):
            into.copy_((part >> self._bits * (last - place)).bitwise_and_((1 << self._bits) - 1).sub_(1))
        return out


def _build(items: _PackedItems) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the items, and number the beginnings that differ, level by level.

    In the sorted order, the items below a node lie side by side; `first` is the place of the first of them. A node's
    children begin after all nodes of the next level that open before that place.
    """
    order = items.sort()
    opened, column = torch.empty_like(order), torch.empty_like(order)
    following = items.tokens(0, torch.empty_like(order))
    begins = torch.zeros_like(order, dtype=torch.bool)  # whether an item differs from the one before it, so far
    begins[0] = True
    first = torch.zeros(1, dtype=torch.int32)  # of each node of the level above
    token, ends, children = [torch.tensor([-1], dtype=torch.int32)], [torch.tensor([-1], dtype=torch.int32)], []
    nodes = 1
    for depth in range(items.length):
        column, following = following, items.tokens(depth + 1, out=column)
        begins[1:] |= column[1:] != column[:-1]
        opens = begins & (column >= 0)
        torch.cumsum(opens, 0, out=opened)
        before = opened.index_select(0, first).sub_(opens.index_select(0, first).to(torch.int32))
        children.append(before.add_(nodes))
        first = opens.nonzero().squeeze(1).to(torch.int32)
        token.append(column.index_select(0, first))
        ends.append(order.index_select(0, first).masked_fill_(following.index_select(0, first) >= 0, -1))
        nodes += len(first)
        if nodes > _LARGEST_ID:
            raise ValueError(f"a trie has at most {_LARGEST_ID} nodes; make several of fewer items")
    children.append(torch.full((len(first) + 1,), nodes, dtype=torch.int32))
    del items, order, column, following, opened, begins, opens, before, first
    return _joined(token), _joined(children), _joined(ends)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts in one array, and nothing of them left."""
    array = torch.cat(parts)
    parts.clear()
    return array


# --- files ---


def _checksum(arrays: dict[str, torch.Tensor]) -> str:
    check = 0
    for name in _ARRAYS:
        check = zlib.crc32(arrays[name].numpy().data, check)  # host read: arrays of a file, on the host already
    return f"{check:08x}"


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """What is in a file, once its header says what `TokenTrie.save` writes. Arrays are read only then."""
    if not path.exists():
        raise FileNotFoundError(f"there is no trie at {path}")
    if not path.is_file():
        raise ValueError(f"{path} is no file; TokenTrie.load reads the file that TokenTrie.save wrote")
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"{path} is larger than any trie: it has {path.stat().st_size} bytes")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path} was not written by TokenTrie.save: its format is {metadata.get('format')!r}")
            shapes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            fault = _header_fault(metadata, {name: (a.get_dtype(), a.get_shape()) for name, a in shapes.items()})
            # A file may be large and hold nothing, so it is copied only once its nodes are seen to be numbered.
            fault = fault or _numbering_fault(file.get_tensor("first_child"))
            if fault is not None:
                raise ValueError(f"the trie in {path} is damaged: {fault}")
            # Copied, for these are views of the file: who cut it short later would end this process.
            return metadata, {name: file.get_tensor(name).clone() for name in _ARRAYS}
    except PermissionError:
        raise
    except (SafetensorError, OSError, RuntimeError) as error:  # the last where the memory has no room for the file
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error


def _header_fault(metadata: dict[str, str], arrays: dict[str, tuple[str, list[int]]]) -> str | None:
    """What is wrong with a header of dtypes and shapes, or None."""
    missing = [name for name in ("eos_token_id", "crc32") if name not in metadata]
    if missing:
        return f"its metadata lack {' and '.join(missing)}"
    end = metadata["eos_token_id"]
    if end != "" and not (end.isascii() and end.isdecimal() and len(end) <= 10 and int(end) <= _LARGEST_ID):
        return f"its end token is {end[:20]!r}"
    if set(arrays) != set(_ARRAYS):
        return f"it holds the arrays {sorted(arrays)[:5]}"
    for name, (dtype, shape) in arrays.items():
        if dtype != "I32" or len(shape) != 1:
            return f"{name} is {dtype} of {len(shape)} dimensions, not I32 of one"
    nodes = arrays["token"][1][0]
    if not 2 <= nodes <= _LARGEST_ID or arrays["item"][1] != [nodes] or arrays["first_child"][1] != [nodes + 1]:
        return f"its arrays have {', '.join(str(arrays[name][1][0]) for name in _ARRAYS)} entries"
    return None


def _numbering_fault(first_child: torch.Tensor) -> str | None:
    """What is wrong with the numbers of nodes, or None: then each node but the root has one parent, before it."""
    nodes = len(first_child) - 1
    if int(first_child[0]) != 1 or int(first_child[-1]) != nodes:
        return "its nodes are not numbered level by level"
    for start in range(0, nodes, _CHUNK):
        part = first_child[start : start + _CHUNK + 1]  # with the first of the next, to compare
        if bool((part[1:] < part[:-1]).any()):
            return "its nodes are not numbered level by level"
        if bool((part[:-1] <= torch.arange(start, start + len(part) - 1)).any()):
            return "a node is its own ancestor"
    return None


def _fault(arrays: dict[str, torch.Tensor], end: str) -> str | None:
    """What is wrong with the arrays of a file, or None. Nothing that passes can lead a search out of them."""
    token, first_child, item = (arrays[name] for name in _ARRAYS)
    nodes = len(token)
    fault = _numbering_fault(first_child)  # again: the file may have changed since
    if fault is not None:
        return fault
    if _level_starts(first_child)[-1] != nodes:
        return f"it is deeper than {_LONGEST} tokens"
    if int(token[0]) != -1 or int(token[1:].min()) < 0 or int(token.max()) > _LARGEST_ID or int(item.min()) < -1:
        return "a token or an item is out of range"
    leaf = first_child[1:] == first_child[:-1]
    if bool((leaf != (item >= 0)).any()):
        return "items do not end where nothing follows"
    if end != "" and bool((leaf != (token == int(end))).any()):
        return f"items do not end with the end token {end}"
    eldest = torch.zeros(nodes + 1, dtype=torch.bool)
    eldest[first_child.to(torch.int64)] = True
    if bool(((token[2:] <= token[1:-1]) & ~eldest[2:-1]).any()):
        return "children of a node are not in order"
    ids = item[leaf].sort().values
    if bool((ids[1:] == ids[:-1]).any()):
        return "two of its items are one"
    return None
