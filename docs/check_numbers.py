"""Recomputes every figure that README.md and docs/*.md state, and fails where one has drifted.

    python -m docs.check_numbers               # exit status 1, and a line for each fault
    python -m docs.check_numbers --list        # also says of how many numbers each page consists

All numbers of a page are found, and each must be accounted for (`docs/numbers/account.py` says how). So a new figure
needs a line in the register of its page, `docs/numbers/of_PAGE.py`, with a function that computes it; a line there that
matches nothing any more is a fault as well. Timings are computed from the committed results, not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping

from docs.numbers import generated, of_differences, of_guide, of_performance, of_readme, of_search
from docs.numbers.account import Fault, account
from docs.numbers.page import Page, documentation

REGISTERS = (of_readme, of_performance, of_differences, of_search, of_guide)


def faults(pages: Mapping[str, Page]) -> list[Fault]:
    """What is wrong with the numbers of these pages."""
    entries = [entry for register in REGISTERS for entry in register.ENTRIES]
    return account(pages, generated.BLOCKS, entries)


def summary(pages: Mapping[str, Page]) -> Iterator[str]:
    """How many numbers there are on each page."""
    return (f"{name}: {len(page.numbers)} numbers" for name, page in pages.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also print how many numbers each page has")
    arguments = parser.parse_args(argv)
    pages = documentation()
    if arguments.list:
        print(*summary(pages), sep="\n")
    found = faults(pages)
    for fault in found:
        print(fault)
    print(f"{sum(len(page.numbers) for page in pages.values())} numbers on {len(pages)} pages, {len(found)} faults")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
