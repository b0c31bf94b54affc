"""The attention setting of the user's model, borrowed while a folded step runs, and what it was before.

transformers looks up a module's attention by a field of its configuration. While a folded step of one search runs, a
forward pass of another thread, or of another model with the same configuration object, finds ours there; it gets what
it would have got.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..versions import GenerativeModel

NAME = "hf_paged_beam"
"""Name of the attention and of the mask function in transformers' registries."""

_ATTENTION = "_attn_implementation_internal"
_borrowed: dict[int, tuple[dict[str, Any], Any, int]] = {}
"""Configurations whose attention is set at present: what stood there before, and how many searches hold it."""
_borrowing = threading.Lock()


def parts_of(model: GenerativeModel) -> list[torch.nn.Module]:
    """The model and all modules in it: `model.modules()` in a quarter of its time, since this runs in every call."""
    parts, seen = [model], {id(model)}
    for module in parts:  # grows while it is walked
        new = [part for part in module._modules.values() if part is not None and id(part) not in seen]
        seen.update(map(id, new))
        parts.extend(new)
    return parts


def attention_configs(parts: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """Fields of every configuration object that some part of a model reads its attention implementation from."""
    found: dict[int, dict[str, Any]] = {}
    for module in parts:
        config = module.__dict__.get("config")
        if config is not None and id(config) not in found and _ATTENTION in getattr(config, "__dict__", {}):
            found[id(config)] = config.__dict__
    return list(found.values())


def is_compiled(parts: Sequence[torch.nn.Module]) -> bool:
    """Whether the forward pass of some part of a model was given to ``torch.compile``."""
    return any(
        part._compiled_call_impl is not None or hasattr(part.forward, "_torchdynamo_orig_callable") for part in parts
    )


def borrow_attention(configs: Sequence[dict[str, Any]]) -> None:
    """Set the attention implementation of these configurations to ours, until `return_attention`."""
    taken: list[dict[str, Any]] = []
    try:
        with _borrowing:
            for fields in configs:
                _, before, holders = _borrowed.get(id(fields), (fields, fields[_ATTENTION], 0))
                _borrowed[id(fields)] = (fields, before, holders + 1)
                taken.append(fields)
                fields[_ATTENTION] = NAME
    except BaseException:
        return_attention(taken)
        raise


def return_attention(configs: Sequence[dict[str, Any]]) -> None:
    """Undo one `borrow_attention`. Models in two threads may share a configuration: the last one puts it back."""
    with _borrowing:
        for fields in configs:
            _, before, holders = _borrowed.pop(id(fields))
            if holders > 1:
                _borrowed[id(fields)] = (fields, before, holders - 1)
            else:
                fields[_ATTENTION] = before


@contextlib.contextmanager
def our_attention(configs: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Set the attention implementation of these configurations to ours inside."""
    borrow_attention(configs)
    try:
        yield
    finally:
        return_attention(configs)


def attention_before(config: Any) -> str:
    """The attention implementation that a configuration names when it is not borrowed."""
    fields = getattr(config, "__dict__", {_ATTENTION: "sdpa"})
    with _borrowing:
        borrowed = _borrowed.get(id(fields))
        name = fields.get(_ATTENTION) if borrowed is None else borrowed[1]
    return "eager" if name is None else "sdpa" if name == NAME else name  # the last where a user names ours


class AsWritten:
    """In a ``with``: compiled forward passes run as they are written, in all threads, until the last one leaves.

    A compiled pass would be compiled anew at every folded step, which has other slots and tensors, or, where the user
    wants one whole graph, refuse the running step's context variable. torch's setting is one for the process.
    """

    _holders = 0
    _stance: Any = None

    def __enter__(self) -> None:
        with _borrowing:
            try:
                if AsWritten._holders == 0:
                    AsWritten._stance = torch.compiler.set_stance("force_eager")  # in force once it is made
                AsWritten._holders += 1
            except BaseException:  # the caller's Ctrl-C
                AsWritten._put_back()
                raise

    def __exit__(self, *error: object) -> None:
        with _borrowing:
            try:
                AsWritten._holders -= 1
            finally:
                AsWritten._put_back()

    @staticmethod
    def _put_back() -> None:
        if AsWritten._holders == 0 and AsWritten._stance is not None:
            AsWritten._stance.__exit__(None, None, None)
            AsWritten._stance = None


def own_attention(module: Any) -> Callable | None:
    """The attention function that a module would call if its configuration were not borrowed; None if unknown."""
    name = attention_before(getattr(module, "config", None))
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    files = (sys.modules.get(part.__module__) for part in type(module).__mro__)
    return next((found for file in files if (found := getattr(file, "eager_attention_forward", None))), None)
