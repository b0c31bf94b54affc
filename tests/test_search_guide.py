"""docs/search.md: its blocks run in order as one script and print what the page shows; its figures are there, small.

A printed number may differ by one in its last place: processors round differently. Output marked "drawn" depends on
the machine's random numbers too: there only the form is compared.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers.utils import logging

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "search.md"
FENCE = re.compile(r"^(<!-- drawn -->\n)?```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LARGEST = 60 * 2**10  # bytes


class Block(NamedTuple):
    """A block of code and what the page says that it prints: None where it shows nothing."""

    code: str
    printed: str | None
    drawn: bool
    line: int


def blocks(page: str) -> list[Block]:
    """The blocks of code of a page, each with the output that follows it."""
    found: list[Block] = []
    for fence in FENCE.finditer(page):
        drawn, kind, text = fence.groups()
        if kind == "python":
            found.append(Block(text, None, False, page.count("\n", 0, fence.start()) + 2))
        else:
            assert found[-1].printed is None, f"two outputs of one block: {text}"
            found[-1] = found[-1]._replace(printed=text, drawn=drawn is not None)
    return found


def check_printed(block: Block, printed: str) -> None:
    """Assert that a block printed what the page shows."""
    shown = block.printed or ""
    where = f"docs/search.md, line {block.line}, printed:\n{printed}"
    assert printed.count("\n") == shown.count("\n"), where
    if block.drawn:
        return
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), where
    for given, wanted in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        digits = len(wanted.partition(".")[2])
        step = 1.01 * 10**-digits if digits else 0
        assert abs(float(given) - float(wanted)) <= step, where


@pytest.fixture
def quiet() -> None:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


def test_the_blocks_print_what_is_shown(quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, one after another."""
    monkeypatch.chdir(tmp_path)  # one writes a page
    names: dict[str, object] = {"__name__": "guide"}
    for block in blocks(PAGE.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec"), names)
        check_printed(block, printed.getvalue())


def test_other_numbers_and_words_are_noticed() -> None:
    """`check_printed` can fail."""
    block = Block("", "read 0.52 R EH D\n", False, 1)
    check_printed(block, "read  0.53 R EH D\n")
    for other in ("read 0.54 R EH D\n", "read 0.52 R IY D\n", "read 0.52 R EH D\n\n", "read R EH D\n"):
        with pytest.raises(AssertionError):
            check_printed(block, other)


def test_figures_are_shown_and_small() -> None:
    """Each figure of the folder stands in the page, and none is larger than a page may load."""
    shown = set(re.findall(r"\]\((figures/search/[^)]+)\)", PAGE.read_text()))
    there = {str(path.relative_to(DOCS)) for path in (DOCS / "figures" / "search").iterdir()}
    assert shown == there
    assert all((DOCS / name).stat().st_size < LARGEST for name in there)
