"""A page, the numbers on it, and what accounts for each of them.

A number is written in digits (1,000, 0.5, 1e-5, 2^24, 2026-12-01, 4.57.6) or in words (two, twice, a sixth, million).
"one", "first" and "second" are not counted: in English they are articles, pronouns and order more often than numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

WORDS = {
    "zero": 0, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "fifteen": 15, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60,
    "hundred": 100, "hundreds": 100, "thousand": 1e3, "thousands": 1e3, "million": 1e6, "millions": 1e6,
    "billion": 1e9, "twice": 2, "thrice": 3, "half": 1 / 2, "halves": 1 / 2, "halved": 1 / 2, "third": 1 / 3,
    "thirds": 1 / 3, "quarter": 1 / 4, "quarters": 1 / 4, "fifth": 1 / 5, "sixth": 1 / 6, "seventh": 1 / 7,
    "eighth": 1 / 8, "ninth": 1 / 9, "tenth": 1 / 10,
}  # fmt: skip
_DIGITS = r"\d{4}-\d{2}-\d{2}|\d+\^\d+|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)*(?:e-?\d+(?![\w]))?"
NUMBER = rf"(?:{_DIGITS}|(?i:\b(?:{'|'.join(WORDS)})\b))"
"""A regular expression without groups."""

_FENCE = re.compile(r"^( *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^\1```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,2} .*$", re.MULTILINE)


class Number(NamedTuple):
    """One number, as written, and where: ``page.text[start:end]``."""

    start: int
    end: int
    text: str


class Fence(NamedTuple):
    """A block of code: its language, its text, and where the text is."""

    language: str
    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the documentation.

    Attributes:
        name: path from the root of the repository.
        text: all of it.
    """

    name: str
    text: str

    @functools.cached_property
    def numbers(self) -> list[Number]:
        """All, in order."""
        return [Number(found.start(), found.end(), found[0]) for found in re.finditer(NUMBER, self.text)]

    @functools.cached_property
    def fences(self) -> list[Fence]:
        """Its blocks of code."""
        return [
            Fence(found["language"], found["text"], found.start("text"), found.end("text"))
            for found in _FENCE.finditer(self.text)
        ]

    def within(self, start: int, end: int) -> Iterator[Number]:
        """Numbers that lie between two places."""
        return (number for number in self.numbers if start <= number.start and number.end <= end)

    def line(self, place: int) -> int:
        """Number of the line, from 1."""
        return self.text.count("\n", 0, place) + 1

    def section(self, place: int) -> str:
        """What stands between the headings of the first two levels around a place."""
        headings = [found.start() for found in _HEADING.finditer(self.text) if not self._in_code(found.start())]
        begin = max((start for start in headings if start <= place), default=0)
        return self.text[begin : min((start for start in headings if start > place), default=len(self.text))]

    def _in_code(self, place: int) -> bool:
        return any(fence.start <= place < fence.end for fence in self.fences)


def documentation() -> dict[str, Page]:
    """README and the pages of docs/, by name."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    names = [str(path.relative_to(ROOT)) for path in paths]
    return {name: Page(name, path.read_text()) for name, path in zip(names, paths, strict=True)}


def value_of(stated: str) -> float:
    """What a number is worth.

    Raises:
        ValueError: for a date or a version.
    """
    if stated.lower() in WORDS:
        return WORDS[stated.lower()]
    base, _, power = stated.replace(",", "").partition("^")
    return float(base) ** float(power) if power else float(base)


def rounding_of(stated: str) -> float:
    """By how much a value may differ from the number that it is written as: half of the last digit that is shown.

    A tenth of what a fraction in words is worth, and of a power of ten.
    """
    if stated.lower() in WORDS or "e" in stated:
        return 0.1 * value_of(stated) if value_of(stated) < 1 or "e" in stated else 0.5
    return 0.5 * 10.0 ** -len(stated.partition(".")[2])


def pattern(written: str) -> re.Pattern[str]:
    """A regular expression for a text in which ``#`` stands for a number, a space for any blanks, ``...`` for a gap."""
    gaps = {"#": f"({NUMBER})", " ": r"\s+", "...": r".{0,400}?"}
    parts = re.split(r"(#| +|\.\.\.)", written)
    made = [gaps.get(part[:1] if part.isspace() else part, re.escape(part)) for part in parts]
    return re.compile("".join(made), re.DOTALL)
