"""What may account for a number: a figure that is computed, or a number that is none of the package's results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .page import rounding_of, value_of


class Claim(Protocol):
    """A value that can be compared with what a page states."""

    def agrees(self, stated: str) -> bool: ...


@dataclasses.dataclass(frozen=True)
class About:
    """Equal up to a share of itself: for what is stated in round numbers, or moves a little between machines."""

    value: float
    share: float

    def agrees(self, stated: str) -> bool:
        """Whether a stated number is near enough."""
        return abs(value_of(stated) - self.value) <= self.share * abs(self.value)

    def __str__(self) -> str:
        return f"{self.value:.6g} (within {100 * self.share:g}%)"


@dataclasses.dataclass(frozen=True)
class AtMost:
    """A measure that must not exceed what is stated, as "within 1e-5", and must not be far below it."""

    value: float
    slack: float = 10.0

    def agrees(self, stated: str) -> bool:
        """Whether the stated bound holds, and says something."""
        return self.value <= value_of(stated) <= self.slack * self.value

    def __str__(self) -> str:
        return f"{self.value:.6g} (at most {self.slack:g} times that may be stated)"


def agrees(stated: str, computed: Any) -> bool:
    """Whether a page's number is the computed one: the same text, or the same number, rounded as the page rounds."""
    if isinstance(computed, str):
        return stated == computed
    try:
        if hasattr(computed, "agrees"):
            return computed.agrees(stated)
        return abs(value_of(stated) - computed) <= rounding_of(stated) * (1 + 1e-9)
    except ValueError:  # a date or a version where a number should stand
        return False


@dataclasses.dataclass(frozen=True)
class Figure:
    """Figures of one sentence, and what computes them.

    Attributes:
        page: name of the page.
        sentence: as in `page.pattern`; each ``#`` is one figure.
        compute: gives as many values as there are figures: a number, a text to be found as it is, or a `Claim`.
        timing: measured on one machine on one day: its section must name both. Computed from the results of that run.
    """

    page: str
    sentence: str
    compute: Callable[[], Sequence[Any]]
    timing: bool = False


@dataclasses.dataclass(frozen=True)
class Said:
    """Numbers that are no results.

    Attributes:
        page, sentence: as of `Figure`.
        reason: what they are.
    """

    page: str
    sentence: str
    reason: str


Entry = Figure | Said
"""A line of a register."""
