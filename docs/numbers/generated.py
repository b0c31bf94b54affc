"""Blocks of the pages that are made from committed results."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from benchmarks import kv_dtype, pages, table

from .page import ROOT, Page
from .results import results


@functools.cache
def _of_tests(name: str) -> ModuleType:
    """A module of tests/, which is no package."""
    path = ROOT / "tests" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_tests_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def table_of_readme(page: Page) -> Iterable[str]:
    """Of `benchmarks.compare`."""
    return [table.markdown(results("compare"))]


def tables_of_performance(page: Page) -> Iterable[str]:
    """Each between its marks, made anew."""
    return [found[0] for found in pages._BLOCK.finditer(pages.filled(page.text))]


def table_of_stored_dtypes(page: Page) -> Iterable[str]:
    """Of `benchmarks.kv_dtype`."""
    return [kv_dtype.markdown(results("kv_dtype"))]


def table_of_pairs(page: Page) -> Iterable[str]:
    """What combines with what: what tests/test_feature_pairs.py tries."""
    return [_of_tests("feature_pairs").markdown()]


def compatibility(page: Page) -> Iterable[str]:
    """The whole page, of a run over all architectures."""
    run = json.loads((ROOT / "docs" / "compatibility.json").read_text())
    return [_of_tests("sweep_architectures").page_of(run)]


BLOCKS: list[tuple[str, Callable[[Page], Iterable[str]]]] = [
    ("README.md", table_of_readme),
    ("docs/performance.md", tables_of_performance),
    ("docs/differences.md", table_of_stored_dtypes),
    ("docs/search.md", table_of_pairs),
    ("docs/compatibility.md", compatibility),
]
"""A page, and what makes its blocks."""
