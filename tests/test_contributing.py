"""docs/contributing.md: its changes are made in a copy of the package, and its commands are run there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import cache_utils

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contributing.md"
FENCE = re.compile(r"^```(diff|python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"(?:--- |# )(\S+\.py)\n")


class Block(NamedTuple):
    """A block of the page: "diff" changes a file, "python" is a new file, "bash" commands."""

    kind: str
    text: str

    @property
    def file(self) -> str:
        """Named in the first line."""
        named = FILE_NAME.match(self.text)
        assert named is not None, self.text
        return named[1]

    @property
    def body(self) -> str:
        """What follows the first line."""
        return self.text.partition("\n")[2]


def section(title: str) -> list[Block]:
    """The blocks under a heading."""
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(*found) for found in FENCE.findall(text)]


def changed(source: str, change: str) -> str:
    """A source with the lines of a change in place of those that it names, which must stand there once."""
    lines = change.splitlines()
    before, after = ("".join(line[1:] + "\n" for line in lines if not line or line[0] in kept) for kept in (" -", " +"))
    assert source.count(before) == 1, f"stands there {source.count(before)} times:\n{before}"
    return source.replace(before, after)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("hf_paged_beam", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", ".models"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def carry_out(blocks: list[Block], copy: Path) -> None:
    """Make the changes of a section, then run its commands."""
    for block in blocks:
        if block.kind == "diff":
            (copy / block.file).write_text(changed((copy / block.file).read_text(), block.body))
        elif block.kind == "python":
            assert not (copy / block.file).exists()
            (copy / block.file).write_text(block.body)
    commands = [block.text for block in blocks if block.kind == "bash"]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "pytest"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        assert " passed" in done.stdout


@pytest.mark.slow
def test_a_length_form(copy: Path) -> None:
    carry_out(section("A length form"), copy)


def test_a_constraint(copy: Path) -> None:
    carry_out(section("A constraint"), copy)


@pytest.mark.skipif(
    not hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING"), reason="this release has no table of layer kinds"
)
def test_a_kind_of_cache_layer(copy: Path) -> None:
    carry_out(section("A kind of cache layer"), copy)


def test_a_change_that_does_not_fit_is_noticed() -> None:
    """A line that is not there, or twice."""
    assert changed("a\n\nb\n", " a\n \n-b\n+c\n") == "a\n\nc\n"
    for source in ("a\nc\n", "a\nb\na\nb\n"):
        with pytest.raises(AssertionError, match="stands there"):
            changed(source, " a\n-b\n")
