"""Accounting for every number of the pages: each by exactly one of what is generated, run, computed, or listed.

In this order, and a number that was accounted for is not looked at again, except that a figure or a list must not name
what something else accounts for already:

    1. blocks that are generated from committed results, and equal to what is generated now     `generated`
    2. figures, computed and compared with what is stated                                       the registers
    3. numbers that are no results                                                              the registers
    4. code: settings in it, and output that a test compares                                    `code`
    5. names, versions, citations, settings in prose                                            `RULES`
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .page import ROOT, Fence, Number, Page, pattern
from .rules import DOCTESTS, RULES, TESTED_OUTPUT
from .stated import Entry, Figure, agrees

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_MACHINE = re.compile(r"x86_64|aarch64|AMD|Intel|NVIDIA")


class Fault(NamedTuple):
    """What is wrong: where, and why. `line` is 0 where no line is to blame."""

    page: str
    line: int
    number: str
    why: str

    def __str__(self) -> str:
        where = f"{self.page}:{self.line}" if self.line else self.page
        return f"{where}: {self.number or 'entry'}: {self.why}"


class Accounts:
    """Who accounts for which number of which page."""

    def __init__(self, pages: Mapping[str, Page]):
        self.pages = pages
        self.faults: list[Fault] = []
        self._by: dict[tuple[str, int], str] = {}

    def take(self, page: Page, numbers: Iterable[Number], by: str, *, again: bool = False) -> int:
        """Account for numbers; where one has an account already, that is a fault, or with `again` passed over.

        Returns:
            How many were new.
        """
        new = 0
        for number in numbers:
            before = self._by.setdefault((page.name, number.start), by)
            new += before == by
            if before != by and not again:
                self.blame(page, number, f"accounted for twice: by {before} and by {by}")
        return new

    def blame(self, page: Page, number: Number, why: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(page.name, page.line(number.start), number.text, why))

    def open(self) -> Iterator[tuple[Page, Number]]:
        """Numbers without an account."""
        for page in self.pages.values():
            yield from ((page, number) for number in page.numbers if (page.name, number.start) not in self._by)


def account(
    pages: Mapping[str, Page],
    generated: Iterable[tuple[str, Callable[[Page], Iterable[str]]]],
    entries: Iterable[Entry],
) -> list[Fault]:
    """All faults of the pages.

    Args:
        pages: by name.
        generated: name of a page, and a function that makes the blocks of it that are generated.
        entries: the registers.
    """
    accounts = Accounts(pages)
    for name, make in generated:
        _take_generated(accounts, name, make)
    for entry in entries:
        _take_entry(accounts, entry)
    for page in pages.values():
        for fence in page.fences:
            accounts.take(page, _in_code(page, fence), "code", again=True)
    _apply_rules(accounts)
    for page, number in accounts.open():
        accounts.blame(page, number, "nothing accounts for it: compute it, or list it in docs/numbers/")
    return sorted(set(accounts.faults))


def _take_generated(accounts: Accounts, name: str, make: Callable[[Page], Iterable[str]]) -> None:
    page = accounts.pages[name]
    try:
        blocks = list(make(page))
    except (LookupError, ValueError, OSError) as error:  # no such results, or no such table
        accounts.faults.append(Fault(name, 0, "", f"a block cannot be generated ({type(error).__name__}: {error})"))
        return
    for block in blocks:
        start = page.text.find(block)
        if start < 0:
            wanted = block.strip().splitlines()
            first = next((line for line in wanted if line not in page.text), wanted[0])
            accounts.faults.append(Fault(name, 0, "", f"a generated block differs; not on the page: {first[:160]}"))
        accounts.take(page, page.within(start, start + len(block)), "a generated block")


def _in_code(page: Page, fence: Fence) -> Iterator[Number]:
    """Numbers of a block that are settings, or output that a test compares: not those of comments."""
    if fence.language == "pycon" and not (ROOT / DOCTESTS).exists():
        return
    if fence.language in ("text", ""):
        if page.name in TESTED_OUTPUT and page.name.split("/")[-1] in (ROOT / TESTED_OUTPUT[page.name]).read_text():
            yield from page.within(fence.start, fence.end)
        return
    place = fence.start
    for line in fence.text.splitlines(keepends=True):
        code = line if line.lstrip().startswith(">>>") else re.split(r"(?:^|\s)# ", line)[0]
        yield from page.within(place, place + len(code))
        place += len(line)


def _take_entry(accounts: Accounts, entry: Entry) -> None:
    page = accounts.pages.get(entry.page)
    found = list(pattern(entry.sentence).finditer(page.text)) if page else []
    if not page or len(found) != 1:
        why = f"stands {len(found)} times on the page: {entry.sentence!r}" if page else "there is no such page"
        accounts.faults.append(Fault(entry.page, 0, "", why))
        return
    spans = [found[0].span(place + 1) for place in range(found[0].re.groups)]
    stated = [Number(*span, page.text[slice(*span)]) for span in spans]
    accounts.take(page, stated, f"{type(entry).__name__} {entry.sentence!r}")
    if isinstance(entry, Figure):
        if entry.timing:
            _check_machine_and_date(accounts, page, stated[0])
        _compare(accounts, page, stated, entry)


def _check_machine_and_date(accounts: Accounts, page: Page, number: Number) -> None:
    section = page.section(number.start)
    for what, known in (("machine", _MACHINE), ("date", _DATE)):
        if not known.search(section):
            accounts.blame(page, number, f"a timing, and its section names no {what}")


@functools.cache
def _values(compute: Callable[[], Sequence[Any]]) -> list[Any]:
    """Of a figure: computed once, however many pages are looked at."""
    return list(compute())


def _compare(accounts: Accounts, page: Page, stated: list[Number], entry: Figure) -> None:
    try:
        computed = _values(entry.compute)
    except (LookupError, ValueError, ArithmeticError, OSError) as error:  # results that lack what a figure needs
        accounts.blame(page, stated[0], f"cannot be computed ({type(error).__name__}: {error}): {entry.sentence!r}")
        return
    if len(computed) != len(stated):
        accounts.blame(page, stated[0], f"{len(computed)} values are computed of {entry.sentence!r}")
        return
    for number, value in zip(stated, computed, strict=True):
        if not agrees(number.text, value):
            accounts.blame(page, number, f"stated, but {value} is computed, of {entry.sentence!r}")


def _apply_rules(accounts: Accounts) -> None:
    for rule in RULES:
        matched = 0
        for page in accounts.pages.values():
            for found in rule.expression.finditer(page.text):
                if rule.page in ("", page.name) and rule.allows(found):
                    matched += accounts.take(page, page.within(*found.span()), rule.reason, again=True)
        if not matched:
            accounts.faults.append(Fault("docs/numbers/rules.py", 0, "", f"matches nothing: {rule.reason}"))
