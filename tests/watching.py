"""What a search does, seen from outside: forward passes and their rows, values read by the host, tensors made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = (
    "aten::_local_scalar_dense",  # item(), int(), bool(), float()
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::nonzero",  # and whatever else has a size that depends on values
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique",
)
"""Operations whose result the host must wait for."""


@contextlib.contextmanager
def forward_rows(model: torch.nn.Module) -> Iterator[list[int]]:
    """The rows that each forward pass of `model` gets while the context lasts, in a list that grows."""
    rows: list[int] = []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = (kwargs.get(name) for name in ("decoder_input_ids", "input_ids", "inputs_embeds", "input_features"))
        first = next((tensor for tensor in (*given, *args) if tensor is not None), None)
        rows.append(0 if first is None else first.shape[0])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def of_its_own_class(model: torch.nn.Module) -> Any:
    """The model, made an object of a class that no search has met, so that nothing is remembered of its attention."""
    model.__class__ = type(f"Own{type(model).__name__}", (type(model),), {})
    return model


class Watch(TorchDispatchMode):
    """Notes forward passes of a model and what torch runs, in order; refuses operands on different devices.

    Use it together with `watching`. Attributes:
        events: "enter" and "leave" of each forward pass, "read" for each value that the host read.
        phase: 0 before the prompt's pass, 1 within it, 2 after it, 3 within the first decode step, and so on.
        made: phase, operation, shape and dtype of every tensor that was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.phase = 0
        self.made: list[tuple[int, str, torch.Size, torch.dtype]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = operation.name()
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in operands if tensor.dim() > 0}
        if len(devices) > 1 and not name.startswith("aten::copy_"):
            raise AssertionError(f"{name} got operands on {devices}")
        if name.startswith(HOST_READS) or _indexes_by_bool(name, args):
            self.events.append("read")
        outputs = operation(*args, **kwargs)
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                self.made.append((self.phase, name, leaf.shape, leaf.dtype))
        return outputs

    def note(self, event: str) -> None:
        """Note the beginning or the end of a forward pass."""
        self.events.append(event)
        self.phase += 1

    def reads_between_forwards(self) -> tuple[list[int], list[int]]:
        """Values read within each forward pass, and after each until the next one (or the end)."""
        within, after, current = [], [], []
        for event in self.events:
            if event == "read":
                if current:
                    current[-1] += 1
                continue
            current = within if event == "enter" else after
            current.append(0)
        return within, after


@contextlib.contextmanager
def watching(model: torch.nn.Module) -> Iterator[Watch]:
    """Watch what runs in the context; `tolist` and `numpy` count as reads, though torch does not dispatch them."""
    watch = Watch()

    hooks = [
        model.register_forward_pre_hook(lambda *_: watch.note("enter")),
        model.register_forward_hook(lambda *_: watch.note("leave")),
    ]
    with pytest.MonkeyPatch.context() as patch, watch:
        for name in ("tolist", "numpy", "__array__"):
            patch.setattr(torch.Tensor, name, _counted(watch, getattr(torch.Tensor, name)))
        try:
            yield watch
        finally:
            for hook in hooks:
                hook.remove()


def _counted(watch: Watch, method: Callable) -> Callable:
    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.events.append("read")
        return method(self, *args, **kwargs)

    return counted


def _indexes_by_bool(name: str, args: tuple) -> bool:
    if not name.startswith(("aten::index.", "aten::index_put", "aten::_index_put")):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])
