"""The linear layers of a model on a CPU, computed by oneDNN while a search runs the model.

    hidden states [..., in]  @  weight [out, in]     ->  [..., out]

`torch.nn.functional.linear` leaves float32 to the BLAS library that torch was built with, which is far from the
memory's and the processor's limits at the few rows of a decode step. oneDNN, which torch has too, is nearer: from the
weight as it lies, and nearer still from a copy in the layout that it wants (``prepack=True``). Both add in another
order than the BLAS library, so that results agree to rounding.

A layer gets a stand-in for its `forward` as long as a search runs, and is as before afterwards. Only plain layers do:
no subclass, no hook of another library in place of `forward`, no sharded, offloaded or quantised weight.
"""

from __future__ import annotations

import functools
import platform
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.utils import logging

from ..cache import is_compiled

LINEAR_FORWARD = torch.nn.Linear.forward
"""What a plain layer runs; if somebody has replaced it, no layer is plain."""

_SMALLEST = 2**17
"""Weights of fewer entries stay with `torch.nn.functional.linear`: models made of such are small enough to stay in the
processor's cache, and there oneDNN's longer way to a call (16 against 3 microseconds) is what counts."""

_PACKABLE = (torch.float32, torch.bfloat16)

logger = logging.get_logger("hf_paged_beam")


def _one_dnn(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(hidden, weight, bias, "none", [], "")


# Compiled code cannot hold weights in oneDNN's layout, and would lower a call with another one to something else: it
# calls these two operators, which it does not look into.
def _library() -> torch.library.Library:
    """A library of this import's own: a package that is imported anew cannot define an operator again."""
    names = ("hf_paged_beam" + "_again" * times for times in range(100))
    own = next(name for name in names if not hasattr(getattr(torch.ops, name), "linear"))
    library = torch.library.Library(own, "FRAGMENT")
    library.define("linear(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor")
    library.define("packed_linear(Tensor hidden, int number, int out_features, Tensor? bias) -> Tensor")
    library.impl("linear", _one_dnn, "CPU")
    library.impl("linear", lambda hidden, weight, bias: hidden.new_empty(*hidden.shape[:-1], weight.shape[0]), "Meta")
    library.impl("packed_linear", _packed_linear, "CPU")
    library.impl("packed_linear", lambda hidden, _, out, bias: hidden.new_empty(*hidden.shape[:-1], out), "Meta")
    return library


def _packed_linear(hidden: torch.Tensor, number: int, out_features: int, bias: torch.Tensor | None) -> torch.Tensor:
    return _one_dnn(hidden, _numbered[number], bias)


_kept_library = _library()
_operators = getattr(torch.ops, _kept_library.ns)

_numbered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Packed weights by number: compiled code knows them by it."""


class PackedWeight:
    """A copy of a layer's weight in oneDNN's layout.

    Args:
        weight: ``[out, in]`` float32 or bfloat16, on a CPU.

    Attributes:
        packed: the copy; an opaque tensor.
        number: its key in `_numbered`.
    """

    _count = 0

    def __init__(self, weight: torch.Tensor, number: int | None = None):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        PackedWeight._count += number is None
        self.number = PackedWeight._count if number is None else number
        self.bytes = weight.numel() * weight.element_size()
        _numbered[self.number] = self.packed
        self._mark = self._mark_of(weight)
        self._sample = self._sample_of(weight)

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether the weight is still what was packed.

        A change is counted by the weight, except one through ``weight.data``: a sample of its entries shows that.
        """
        return self._mark == self._mark_of(weight) and torch.equal(self._sample, self._sample_of(weight))

    def seems_of(self, weight: torch.Tensor) -> bool:
        """As `is_of`, as far as can be told in a microsecond."""
        return self._mark[0] == id(weight) and self._mark[2] == weight._version

    @staticmethod
    def _mark_of(weight: torch.Tensor) -> tuple:
        return id(weight), weight.data_ptr(), weight._version, weight.dtype, weight.shape, weight.stride()

    @staticmethod
    def _sample_of(weight: torch.Tensor) -> torch.Tensor:
        places = torch.arange(max(weight.shape))  # an entry of every row and of every column
        return weight.detach()[places % weight.shape[0], places % weight.shape[1]]


class StandIn:
    """`forward` of a linear layer while a search runs.

    Args:
        layer: the layer; its weight and bias are read at every call.
        packed: its packed weight, to be used instead.
    """

    def __init__(self, layer: torch.nn.Linear, packed: PackedWeight | None):
        self._layer, self.packed = weakref.ref(layer), packed

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        layer, packed = self._layer(), self.packed
        assert layer is not None  # who else would call
        if torch.compiler.is_dynamo_compiling():
            if packed is None:
                return _operators.linear(hidden, layer.weight, layer.bias)
            return _operators.packed_linear(hidden, packed.number, layer.out_features, layer.bias)
        weight, bias = layer.weight, layer.bias
        if not _computes(hidden, weight, bias):  # another caller's pass: gradients, autocast, another dtype or place
            return LINEAR_FORWARD(layer, hidden)
        if packed is not None and packed.seems_of(weight):
            return _one_dnn(hidden, packed.packed, bias)
        return _one_dnn(hidden, weight, bias)

    def __deepcopy__(self, memo: dict) -> Any:
        return functools.partial(LINEAR_FORWARD, memo[id(self._layer())])

    def __reduce__(self) -> tuple:
        return functools.partial, (LINEAR_FORWARD, self._layer())


def _computes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        hidden.dtype == weight.dtype
        and hidden.device.type == weight.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


# One object for each layer, as long as it lives: what was compiled with it stays good.
_plain: weakref.WeakKeyDictionary[torch.nn.Linear, StandIn] = weakref.WeakKeyDictionary()
_packed: weakref.WeakKeyDictionary[torch.nn.Linear, StandIn] = weakref.WeakKeyDictionary()


def packed_bytes(model: torch.nn.Module) -> int:
    """Bytes of the copies that ``prepack=True`` has made of a model's weights."""
    stand_ins = [_packed.get(part) for part in model.modules() if isinstance(part, torch.nn.Linear)]
    return sum(known.packed.bytes for known in stand_ins if known is not None and known.packed is not None)


def drop_packed(model: torch.nn.Module) -> None:
    """Free the copies that ``prepack=True`` has made of a model's weights."""
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            _packed.pop(part, None)


_holders: dict[int, tuple[torch.nn.Linear, int]] = {}
"""Layers that have a stand-in at present, by identity, and how many searches hold it."""
CHANGING = threading.Lock()
"""Held while a layer's `forward` is changed, here and in head.py."""


def is_held(layer: torch.nn.Linear) -> bool:
    """Whether some search has a stand-in for a layer."""
    return id(layer) in _holders


class OneDnnLinears:
    """In a ``with``: the linear layers of a model on a CPU are computed by oneDNN.

    Args:
        parts: all modules of the model.
        prepack: whether to use packed weights, made once for each layer and kept as long as it lives.
    """

    def __init__(self, parts: Sequence[torch.nn.Module], *, prepack: bool = False):
        self._parts, self._prepack = parts, prepack
        self._held: list[torch.nn.Linear] = []

    def __enter__(self) -> OneDnnLinears:
        try:
            with CHANGING:
                for layer in self._layers():
                    self._hold(layer)
        except BaseException:  # the caller's Ctrl-C
            self.__exit__()
            raise
        if self._prepack and not any(layer in _packed for layer in self._held):
            logger.warning_once(
                "prepack=True packs float32 and bfloat16 linear layers of a model on a CPU; this model has none that "
                "are plain and large enough. The search runs as without it."
            )
        return self

    def __exit__(self, *error: object) -> None:
        with CHANGING:
            while self._held:
                layer = self._held.pop()
                _, holders = _holders.pop(id(layer))
                if holders > 1:
                    _holders[id(layer)] = (layer, holders - 1)
                elif isinstance(vars(layer).get("forward"), StandIn):
                    del layer.forward

    def _hold(self, layer: torch.nn.Linear) -> None:
        _, holders = _holders.get(id(layer), (layer, 0))
        if not holders or (self._prepack and self._stand_in(layer) is not vars(layer)["forward"]):
            layer.forward = self._stand_in(layer)  # type: ignore[assignment]
        _holders[id(layer)] = (layer, holders + 1)
        self._held.append(layer)

    def _layers(self) -> Iterator[torch.nn.Linear]:
        if not is_available() or is_compiled(self._parts):
            return
        dtypes = _PACKABLE if self._prepack else _PACKABLE[:1]  # bfloat16 is oneDNN's business anyway
        # PEFT's layers take what they merged out of the weight in their own forward pass, as adapters are disabled
        # (asked of the class first: a module that has no such name is slow to say so)
        merged = {
            id(getattr(part, "base_layer", None))
            for part in self._parts
            if hasattr(type(part), "merged") and part.merged
        }
        for part in self._parts:
            if type(part) is torch.nn.Linear and id(part) not in merged and _is_plain_layer(part, dtypes):
                yield part

    def _stand_in(self, layer: torch.nn.Linear) -> StandIn:
        if not self._prepack or layer.weight.is_inference():  # whose changes are not counted
            return _plain.setdefault(layer, StandIn(layer, None))
        known = _packed.get(layer)
        if known is None or known.packed is None or not known.packed.is_of(layer.weight):
            if known is None or known.packed is None:
                known = _packed[layer] = StandIn(layer, PackedWeight(layer.weight))
            else:  # under the same number: what was compiled with it stays good
                known.packed = PackedWeight(layer.weight, known.packed.number)
        return known


def own_forward(layer: torch.nn.Linear) -> Any:
    """What a plain layer runs now: its stand-in, or the class's `forward`."""
    stands = vars(layer).get("forward")
    return stands if isinstance(stands, StandIn) else functools.partial(LINEAR_FORWARD, layer)


def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``hidden @ weight.T + bias``, by the faster way."""
    if is_available() and _is_plain(weight, bias, _PACKABLE[:1]):
        return _one_dnn(hidden, weight, bias)
    return torch.nn.functional.linear(hidden, weight, bias)


def is_available() -> bool:
    """Whether oneDNN is here, wanted, and the faster one; it computes no gradients and knows no autocast."""
    return (
        platform.machine().lower() in ("x86_64", "amd64")  # elsewhere `linear` calls it itself
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain_layer(layer: torch.nn.Linear, dtypes: tuple[torch.dtype, ...]) -> bool:
    stands = vars(layer).get("forward")
    return (
        (stands is None or isinstance(stands, StandIn))
        and torch.nn.Linear.forward is LINEAR_FORWARD
        and layer._compiled_call_impl is None
        and layer._parameters.get("weight") is not None  # not one that a hook makes anew in every pass
        and _is_plain(layer.weight, layer.bias, dtypes)
    )


def _is_plain(weight: torch.Tensor, bias: torch.Tensor | None, dtypes: tuple[torch.dtype, ...]) -> bool:
    return (
        weight.numel() >= _SMALLEST
        and _is_plain_tensor(weight, dtypes)
        and (bias is None or (_is_plain_tensor(bias, dtypes) and bias.dtype == weight.dtype and bias.is_contiguous()))
    )


def _is_plain_tensor(given: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    return (
        type(given) in (torch.nn.Parameter, torch.Tensor)
        and given.layout == torch.strided
        and given.dtype in dtypes
        and given.device.type == "cpu"
    )
