"""docs/api.md shows every public name, and nothing without a docstring."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import hf_paged_beam

PATHS = re.findall(r"^::: (\S+)$", (Path(__file__).parents[1] / "docs" / "api.md").read_text(), re.MULTILINE)


def located(path: str) -> Any:
    """What a path names; of a function and a module of one name, the module is passed through."""
    parent, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(parent), name)
    except ModuleNotFoundError:
        return getattr(located(parent), name)


def test_every_public_name_is_shown() -> None:
    """Where one object has two paths, either is enough."""
    shown = {id(located(path)) for path in PATHS}
    missing = [name for name in hf_paged_beam.__all__ if id(getattr(hf_paged_beam, name)) not in shown]
    assert not missing


@pytest.mark.parametrize("path", PATHS)
def test_what_is_shown_is_explained(path: str) -> None:
    """The object itself, and its public methods."""
    shown = located(path)
    assert shown is not None and not inspect.ismodule(shown) and is_explained(shown)
    if inspect.isclass(shown) and shown.__module__.startswith("hf_paged_beam"):
        for name, member in vars(shown).items():
            if inspect.isfunction(member) and not name.startswith("_") and not is_transformers_own(shown, name):
                assert is_explained(member), f"{path}.{name}"


def is_explained(shown: Any) -> bool:
    """By a docstring of its own: not a parent's, and not the signature that a dataclass without one is given."""
    text = shown.__doc__ if not inspect.isclass(shown) else vars(shown).get("__doc__")
    return bool(text) and not text.startswith(f"{getattr(shown, '__name__', '')}(")


def is_transformers_own(shown: type, name: str) -> bool:
    """Whether transformers' base class declares and explains a method, as `Cache.update`."""
    declared = [vars(parent)[name] for parent in shown.__mro__[1:] if name in vars(parent)]
    return any(one.__module__.startswith("transformers") and one.__doc__ for one in declared)


def test_what_is_not_explained_is_seen() -> None:
    @dataclasses.dataclass
    class Bare:
        size: int

    class Child(ValueError): ...

    assert not is_explained(Bare) and not is_explained(Child) and not is_explained(lambda: None)
    assert is_explained(is_explained)
