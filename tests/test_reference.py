"""docs/api.md shows every public name, and nothing without a docstring."""

from __future__ import annotations

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
    assert shown is not None and not inspect.ismodule(shown) and inspect.getdoc(shown)
    if inspect.isclass(shown) and shown.__module__.startswith("hf_paged_beam"):
        for name, member in vars(shown).items():
            if inspect.isfunction(member) and not name.startswith("_"):
                assert inspect.getdoc(getattr(shown, name)), f"{path}.{name}"
