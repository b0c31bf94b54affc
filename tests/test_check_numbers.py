"""`docs.check_numbers`: the committed pages hold, and a changed figure, table, picture or register is noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest

import benchmarks.pages
from docs import check_numbers
from docs.numbers.account import account
from docs.numbers.page import Page, documentation, pattern, value_of
from docs.numbers.stated import About, AtMost, Figure, Said, agrees

ROOT = Path(__file__).parent.parent
PAGES = documentation()


def changed(name: str, old: str, new: str) -> list[str]:
    """Faults once a page's text is another, as lines."""
    page = PAGES[name]
    assert page.text.count(old) == 1, f"{name} has {old!r} {page.text.count(old)} times"
    pages = {**PAGES, name: dataclasses.replace(page, text=page.text.replace(old, new))}
    return [str(fault) for fault in check_numbers.faults(pages)]


def test_every_number_of_the_pages_holds() -> None:
    """What `python -m docs.check_numbers` says."""
    assert [str(fault) for fault in check_numbers.faults(PAGES)] == []
    assert {name for name, page in PAGES.items() if page.numbers} - set(MUTATIONS) == {"docs/index.md"}  # code alone


MUTATIONS = {
    "README.md": ("600 MiB of keys", "601 MiB of keys"),
    "docs/performance.md": ("| 50 | 0.47 | 2.05 |", "| 50 | 0.47 | 2.06 |"),
    "docs/differences.md": ("float8_e4m3fn | 0.35 | 49 of 50", "float8_e4m3fn | 0.35 | 50 of 50"),
    "docs/search.md": ("Cost: 58 bytes", "Cost: 56 bytes"),
    "docs/compatibility.md": ("0 differ, 0 fail", "0 differ, 1 fail"),
    "docs/how_it_works.md": ("the best `2W` continuations", "the best `3W` continuations"),
    "docs/memory.md": ("real searches were within 10% of it", "real searches were within 5% of it"),
    "docs/troubleshooting.md": ("leave out one of the two", "leave out one of the two, 2 times"),
    "docs/contributing.md": ("adds three things to the package", "adds three things to the package, in 3 files"),
    "docs/citing.md": ("version = {0.1.0}", "version = {9.9.9}"),
}
"""A figure of each page, and another one in its place."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_figure_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """By the command; the fault names the page."""
    old, new = MUTATIONS[name]
    assert old in PAGES[name].text
    other = dataclasses.replace(PAGES[name], text=PAGES[name].text.replace(old, new, 1))
    monkeypatch.setattr(check_numbers, "documentation", lambda: {**PAGES, name: other})
    assert check_numbers.main([]) == 1
    assert re.search(rf"^{re.escape(name)}(:\d+)?: ", capsys.readouterr().out, re.MULTILINE)


def test_a_figure_that_nobody_computes_is_noticed() -> None:
    """In digits and in words, in prose and in a table; with its line."""
    first = PAGES["README.md"].text.splitlines()[0]
    for sentence in ("It is 7.5 times as fast.", "It takes a third of the time.", "| it | 12 |"):
        found = changed("README.md", first + "\n", f"{first}\n{sentence}\n")
        assert len(found) == 1 and found[0].startswith("README.md:2: "), found


def test_every_computed_figure_is_compared() -> None:
    """Each figure of the registers, with a number in its place that is far off, is a fault; bounds may be wide."""
    for register in check_numbers.REGISTERS:
        for entry in register.ENTRIES:
            if isinstance(entry, Figure):
                (found,) = pattern(entry.sentence).finditer(PAGES[entry.page].text)
                computed = entry.compute()
                for stated, value in zip(found.groups(), computed, strict=True):
                    assert agrees(stated, value), entry
                    assert not agrees("987654", value), entry
                    with contextlib.suppress(ValueError):  # versions and dates have no value
                        worth = value_of(stated)
                        assert not any(agrees(f"{worth * factor:.12f}", value) for factor in (1 / 25, 25)), entry


def test_entries_that_match_nothing_are_noticed() -> None:
    """A figure, a list's line."""
    page = Page("p.md", "Nothing here.\n")
    for kind in (Figure("p.md", "takes # s", lambda: [1]), Said("p.md", "takes # s", "–")):
        assert any("0 times on the page" in str(fault) for fault in account({"p.md": page}, [], [kind])), kind


def test_timings_stand_beside_machine_and_date() -> None:
    """Both, in their section."""

    def faults(text: str) -> list[str]:
        found = account({"p.md": Page("p.md", text)}, [], [Figure("p.md", "takes # s", lambda: [3], timing=True)])
        return [fault.why for fault in found if "a timing" in fault.why]

    assert faults("## A\nIt takes 3 s (x86_64, 2026-12-01).\n") == []
    assert len(faults("## A\nIt takes 3 s.\n## B\nx86_64, 2026-12-01\n")) == 2
    assert faults("## A\nIt takes 3 s (x86_64).\n") == ["a timing, and its section names no date"]


def test_blocks_that_cannot_be_made_are_noticed() -> None:
    """A mark that is no table's."""
    found = changed("docs/performance.md", "<!-- results: fused -->", "<!-- results: nothing -->")
    assert any("a block cannot be generated (ValueError: there is no table 'nothing'" in fault for fault in found)


def test_results_that_are_not_there_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No table is left empty."""
    monkeypatch.setattr(benchmarks.pages, "RESULTS", tmp_path)
    found = [str(fault) for fault in check_numbers.faults(PAGES)]
    assert any("a block cannot be generated (FileNotFoundError" in fault for fault in found)


def test_a_number_has_one_account() -> None:
    """Two that claim it are a fault."""
    entries = [Said("p.md", "takes # s", "–"), Said("p.md", "It takes #", "–")]
    found = account({"p.md": Page("p.md", "It takes 3 s.\n")}, [], entries)
    assert any("accounted for twice" in fault.why for fault in found)


def test_output_that_no_test_compares_is_noticed() -> None:
    """A block of text on another page than those of the tests; and what a comment in code says."""
    for text in ("```text\n0.5\n```\n", "```python\nx = 1  # takes 3 s\n```\n"):
        found = account({"p.md": Page("p.md", text)}, [], [])
        assert [fault.line for fault in found if fault.page == "p.md"] == [2], text


def test_rounding() -> None:
    """A page may round; it may not be off by more."""
    assert agrees("2.96", 2.9558) and not agrees("2.97", 2.9558)
    assert agrees("32,000", 32_000) and agrees("2^24", "2^24") and agrees("twice", 2) and not agrees("three", 2)
    assert agrees("third", 0.34) and not agrees("third", 0.4) and not agrees("2026-12-01", 3)
    assert agrees("80", About(78.0, 0.1)) and not agrees("90", About(78.0, 0.1))
    assert agrees("1e-5", AtMost(4e-6)) and not agrees("1e-6", AtMost(4e-6)) and not agrees("1", AtMost(4e-6))
    assert value_of("1,000.5") == 1000.5 and value_of("a million".split()[1]) == 1e6
