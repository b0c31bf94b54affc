"""The examples that begin with ``>>>``, in the package's docstrings and on the pages of docs/, print what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import logging

import hf_paged_beam

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
FENCE = re.compile(r"^```pycon\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = doctest.ELLIPSIS


def of_docstrings() -> Iterator[doctest.DocTest]:
    """Those of every module of the package."""
    for module in pkgutil.walk_packages(hf_paged_beam.__path__, "hf_paged_beam."):
        if not module.name.endswith("__main__") and ".custom_generate" not in module.name:
            yield from doctest.DocTestFinder().find(importlib.import_module(module.name))


def of_page(path: Path, text: str) -> doctest.DocTest:
    """Those of a page, one after another; the other lines are empty, so that a failure names its line."""
    lines = [""] * (text.count("\n") + 1)
    for fence in FENCE.finditer(text):
        first = text.count("\n", 0, fence.start()) + 1
        inside = fence[1].splitlines()
        lines[first : first + len(inside)] = inside
    return doctest.DocTestParser().get_doctest("\n".join(lines), {}, path.name, str(path), 0)


EXAMPLES = [
    found for found in (*of_docstrings(), *(of_page(path, path.read_text()) for path in PAGES)) if found.examples
]


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def failures(example: doctest.DocTest) -> int:
    return doctest.DocTestRunner(optionflags=FLAGS).run(example).failed


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples(example: doctest.DocTest, capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(example) == 0, capsys.readouterr().out


def test_examples_are_found() -> None:
    """In docstrings and on pages, and none on a page outside the blocks that are run."""
    names = {example.name for example in EXAMPLES}
    assert {"hf_paged_beam.planning.estimate_memory", "memory.md"} <= names
    for path in PAGES:
        assert ">>>" not in FENCE.sub("", path.read_text()).replace("`>>>`", ""), path.name


def test_an_example_that_prints_something_else_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(of_page(Path("page.md"), "text\n\n```pycon\n>>> 1 + 1\n2\n```\n")) == 0
    assert failures(of_page(Path("page.md"), "text\n\n```pycon\n>>> 1 + 1\n3\n```\n")) == 1
    assert 'page.md", line 4' in capsys.readouterr().out
