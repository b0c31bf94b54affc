"""The attention setting of the user's model, borrowed while a folded step runs, and what it was before.

transformers looks up a module's attention by a field of its configuration. While a folded step of one search runs, a
forward pass of another thread, or of another model with the same configuration object, finds ours there; it gets what
it would have got.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..versions import GenerativeModel

NAME = "hf_paged_beam"
"""Name of the attention and of the mask function in transformers' registries."""

_ATTENTION = "_attn_implementation_internal"
_borrowed: dict[int, tuple[dict[str, Any], Any, int]] = {}
"""Configurations whose attention is set at present: what stood there before, and how many searches hold it."""
_borrowing = threading.Lock()


def attention_configs(model: GenerativeModel) -> list[dict[str, Any]]:
    """Fields of every configuration object that some part of the model reads its attention implementation from."""
    found: dict[int, dict[str, Any]] = {}
    ahead, seen = [model], {id(model)}
    while ahead:  # as `model.modules()` walks, in a quarter of its time: this runs in every call
        module = ahead.pop()
        config = module.__dict__.get("config")
        if config is not None and id(config) not in found and _ATTENTION in getattr(config, "__dict__", {}):
            found[id(config)] = config.__dict__
        parts = [part for part in module._modules.values() if part is not None and id(part) not in seen]
        seen.update(map(id, parts))
        ahead.extend(parts)
    return list(found.values())


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


def attention_before(config: Any) -> str:
    """The attention implementation that a configuration names when it is not borrowed."""
    fields = getattr(config, "__dict__", {_ATTENTION: "sdpa"})
    with _borrowing:
        borrowed = _borrowed.get(id(fields))
        name = fields.get(_ATTENTION) if borrowed is None else borrowed[1]
    return "eager" if name is None else "sdpa" if name == NAME else name  # the last where a user names ours


def own_attention(module: Any) -> Callable | None:
    """The attention function that a module would call if its configuration were not borrowed; None if unknown."""
    name = attention_before(getattr(module, "config", None))
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    files = (sys.modules.get(part.__module__) for part in type(module).__mro__)
    return next((found for file in files if (found := getattr(file, "eager_attention_forward", None))), None)
