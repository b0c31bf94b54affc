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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_FORMAT = "hf_paged_beam.TokenTrie"
_LARGEST_ID = 2**31 - 2
_KEY_BITS = 62


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

        Raises:
            ValueError: if there is no item, an item is empty, holds an id below 0 or above 2^31 - 2, goes on after the
                end token or (without an end token) begins with another item.
            TypeError: if items are not integers.
        """
        columns, lengths = _as_columns(items)
        _check_ids(columns, lengths)
        if eos_token_id is not None:
            columns, lengths = _with_end(columns, lengths, _as_id(eos_token_id))
        token, first_child, item = _build(columns, lengths)
        trie = cls(token, first_child, item, eos_token_id=None if eos_token_id is None else int(eos_token_id))
        inner = ((item >= 0) & (first_child.diff() > 0)).nonzero()
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
        return sum(array.numel() * array.element_size() for array in (self.token, self.first_child, self.item))

    def goes_on_after(self, token: int) -> bool:
        """Whether some item goes on after this token; found once for each token."""
        if token not in self._goes_on_after:
            inner = (self.token == token) & (self.first_child.diff() > 0)
            self._goes_on_after[token] = bool(inner.any())  # host read: before the search, once for each end token
        return self._goes_on_after[token]

    def to(self, device: torch.device | str) -> TokenTrie:
        """The trie on another device; itself if it is there already."""
        if self.token.device == torch.device(device):
            return self
        moved = object.__new__(type(self))
        moved.__dict__.update(self.__dict__)
        moved.token, moved.first_child, moved.item = (
            array.to(device) for array in (self.token, self.first_child, self.item)
        )
        return moved

    def save(self, path: str | Path) -> None:
        """Write the trie as one safetensors file."""
        arrays = {"token": self.token, "first_child": self.first_child, "item": self.item}
        metadata = {"format": _FORMAT, "eos_token_id": "" if self.eos_token_id is None else str(self.eos_token_id)}
        on_host = {name: array.cpu().contiguous() for name, array in arrays.items()}  # host read: a file is written
        save_file(on_host, str(path), metadata=metadata)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> TokenTrie:
        """Read a trie that `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged, or holds something else.
        """
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                metadata, arrays = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            if isinstance(error, FileNotFoundError) or not Path(path).exists():
                raise FileNotFoundError(f"there is no trie at {path}") from error
            raise ValueError(f"{path} is no whole safetensors file: {error}") from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} was not written by TokenTrie.save: its format is {metadata.get('format')!r}")
        fault = _fault(arrays, metadata.get("eos_token_id", ""))
        if fault is not None:
            raise ValueError(f"the trie in {path} is damaged: {fault}")
        end = metadata["eos_token_id"]
        return cls(**arrays, eos_token_id=int(end) if end else None).to(device)


def _levels(first_child: torch.Tensor) -> list[Level]:
    counts, starts = first_child.diff(), _level_starts(first_child)
    levels = [counts[start:end] for start, end in itertools.pairwise(starts)]
    return [Level(int(level.max()), bool((level == 0).any())) for level in levels]


def _level_starts(first_child: torch.Tensor) -> list[int]:
    """First node of each depth, and the number of nodes: a level begins where the children of the one above begin."""
    nodes, starts = len(first_child) - 1, [0, 1]
    while starts[-1] < nodes:
        starts.append(int(first_child[starts[-1]]))
    return starts


# --- building ---


def _as_id(given: Any) -> int:
    try:
        value = operator.index(given)
    except TypeError:
        raise TypeError(f"eos_token_id must be an integer or None, but got {given!r}") from None
    if isinstance(given, bool) or not 0 <= value <= _LARGEST_ID:
        raise ValueError(f"eos_token_id must be between 0 and {_LARGEST_ID}, but got {given!r}")
    return value


def _as_columns(items: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``[L, N]`` int32, -1 after each item's end, and ``[N]`` int64 lengths."""
    if isinstance(items, torch.Tensor):
        return _tensor_columns(items)
    items = items if isinstance(items, Sequence) else list(items)
    if not len(items):
        raise ValueError("a trie needs at least one item, but got none")
    try:
        lengths = torch.tensor([len(item) for item in items])
        flat = torch.tensor(list(itertools.chain.from_iterable(items)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"items must be sequences of token ids: {error}") from None
    if len(flat) and (flat.is_floating_point() or flat.dtype == torch.bool or flat.dim() != 1):
        raise TypeError(f"items must be sequences of integers, but got {flat.dtype} of {flat.dim()} dimensions")
    _refuse_out_of_range(flat, lambda place: int((lengths.cumsum(0) <= place).sum()))
    columns = torch.full((max(int(lengths.max()), 1), len(items)), -1, dtype=torch.int32)
    row = torch.repeat_interleave(torch.arange(len(items)), lengths)
    place = torch.arange(len(flat)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    columns[place, row] = flat.to(torch.int32)
    return columns, lengths


def _tensor_columns(items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if items.is_floating_point() or items.dtype == torch.bool or items.is_complex():
        raise TypeError(f"items must be integers, but got a tensor of {items.dtype}")
    if items.dim() != 2:
        raise ValueError(f"items as a tensor must be [N, L], padded with -1, but got {list(items.shape)}")
    if not items.shape[0]:
        raise ValueError("a trie needs at least one item, but got none")
    items = items.cpu()  # host read: a trie is built on the CPU, before any search
    _refuse_out_of_range(items.flatten(), lambda place: place // max(items.shape[1], 1), lowest=-1)
    columns = items.t().to(torch.int32, memory_format=torch.contiguous_format)
    lengths = (columns >= 0).sum(0)
    gaps = ((columns >= 0) != (torch.arange(len(columns)).unsqueeze(1) < lengths)).any(0).nonzero()
    if len(gaps):
        raise ValueError(f"item {int(gaps[0, 0])} has -1 between its ids; -1 may only stand after an item's end")
    return columns, lengths


def _refuse_out_of_range(flat: torch.Tensor, item_of: Any, lowest: int = 0) -> None:
    if not len(flat) or (int(flat.min()) >= lowest and int(flat.max()) <= _LARGEST_ID):
        return
    place = int(((flat < lowest) | (flat > _LARGEST_ID)).nonzero()[0, 0])
    raise ValueError(
        f"token ids must be between 0 and {_LARGEST_ID}, but item {item_of(place)} holds {int(flat[place])}"
    )


def _check_ids(columns: torch.Tensor, lengths: torch.Tensor) -> None:
    empty = (lengths == 0).nonzero()
    if len(empty):
        raise ValueError(f"item {int(empty[0, 0])} is empty; an item has at least one token")


def _with_end(columns: torch.Tensor, lengths: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Close every item that does not end with `end`."""
    last = columns.gather(0, (lengths - 1).unsqueeze(0)).squeeze(0)
    inner = (columns == end).sum(0) - (last == end).to(torch.int64)
    wrong = inner.nonzero()
    if len(wrong):
        raise ValueError(f"item {int(wrong[0, 0])} goes on after the end token {end}; a search ends there")
    lacks = last != end
    if bool(lacks.any()):
        columns = torch.cat([columns, torch.full_like(columns[:1], -1)])
        which = lacks.nonzero().squeeze(1)
        columns[lengths[which], which] = end
        lengths = lengths + lacks
    return columns[: int(lengths.max())], lengths


def _build(columns: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the items, and number the beginnings that differ, level by level."""
    order = _sorted_order(columns)
    count = columns.shape[1]
    tokens, items = [torch.tensor([-1], dtype=torch.int32)], [torch.tensor([-1], dtype=torch.int32)]
    children: list[torch.Tensor] = []  # number of children of each node of each level
    begins = torch.zeros(count, dtype=torch.bool)  # whether an item differs from the one before it, so far
    begins[0] = True
    above = torch.zeros(count, dtype=torch.int64)  # each item's node in the level above, counted within the level
    ends = lengths[order]
    for depth, unsorted in enumerate(columns):
        column = unsorted[order]
        begins[1:] |= column[1:] != column[:-1]
        opens = begins & (column >= 0)
        first = opens.nonzero().squeeze(1)  # the first item under each node of this level
        children.append(torch.bincount(above[first], minlength=len(tokens[-1])))
        tokens.append(column[first])
        items.append(torch.where(ends[first] == depth + 1, order[first], -1).to(torch.int32))
        above = opens.to(torch.int64).cumsum_(0).sub_(1)
    children.append(torch.zeros(len(tokens[-1]), dtype=torch.int64))
    first_child = torch.ones(sum(map(len, tokens)) + 1, dtype=torch.int32)
    first_child[1:] += torch.cat(children).cumsum(0).to(torch.int32)
    return torch.cat(tokens), first_child, torch.cat(items)


def _sorted_order(columns: torch.Tensor) -> torch.Tensor:
    """The order that sorts items by their tokens; equal items stay in order. A sort for all tokens of a key."""
    bits = max(int(columns.max()) + 1, 1).bit_length()
    per_key = max(_KEY_BITS // bits, 1)
    order: torch.Tensor | None = None
    for start in reversed(range(0, len(columns), per_key)):
        key = torch.zeros(columns.shape[1], dtype=torch.int64)
        for column in columns[start : start + per_key]:
            key = key.bitwise_left_shift_(bits).add_(column).add_(1)
        places = (key if order is None else key[order]).sort(stable=True).indices
        order = places if order is None else order[places]
    assert order is not None  # there is a column
    return order


# --- what a file may hold ---


def _fault(arrays: dict[str, torch.Tensor], end: str) -> str | None:
    """What is wrong with the arrays of a file, or None. Nothing that passes can lead a search out of them."""
    if set(arrays) != {"token", "first_child", "item"}:
        return f"it holds the arrays {sorted(arrays)}"
    for name, array in arrays.items():
        if array.dtype != torch.int32 or array.dim() != 1:
            return f"{name} is {array.dtype} of {array.dim()} dimensions, not int32 of one"
    token, first_child, item = arrays["token"], arrays["first_child"], arrays["item"]
    nodes = len(token)
    if nodes < 2 or len(item) != nodes or len(first_child) != nodes + 1:
        return f"its arrays have {nodes}, {len(first_child)} and {len(item)} entries"
    if not (end == "" or (end.isdecimal() and int(end) <= _LARGEST_ID)):
        return f"its end token is {end!r}"
    if int(first_child[0]) != 1 or int(first_child[-1]) != nodes or bool((first_child.diff() < 0).any()):
        return "its nodes are not numbered level by level"
    if bool((first_child[:-1] <= torch.arange(nodes)).any()):
        return "a node is its own ancestor"
    if int(token[0]) != -1 or bool((token[1:] < 0).any()) or bool((item < -1).any()):
        return "a token or an item is out of range"
    leaf = first_child.diff() == 0
    if bool((leaf & (item < 0)).any()):
        return "a leaf ends no item"
    siblings = torch.repeat_interleave(torch.arange(nodes), first_child.diff())
    if bool(((siblings[1:] == siblings[:-1]) & (token[2:] <= token[1:-1])).any()):
        return "children of a node are not in order"
    if end == "" and bool((~leaf & (item >= 0)).any()):
        return "an item goes on after its end"
    if end != "" and bool((leaf != (token == int(end))).any()):
        return f"items do not end with the end token {end}"
    return None
