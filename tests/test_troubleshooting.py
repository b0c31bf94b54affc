"""docs/troubleshooting.md names every message of the package, and none that the package has not.

Messages are found in the source: what is raised, what is logged, and reasons that functions return. What a message
names of a call stands as "…", on the page too.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
SAID_BY = re.compile(r"logger\.\w+|warnings\.warn|HandOver|\w+Error|self\._give_up")
"""Calls that say something, or make what will be raised, beside the calls in `raise`."""
REASONS = re.compile(r"reason_|_\w*fault")
"""Names of functions whose returned texts are put into messages."""
HANDED_ON = {"reason", "early", "fault", "handed_over.reason", "str(error)", "_what_failed(error)", "None"}
"""Texts that other functions have made, where they are read; and nothing."""
FEWEST_LETTERS = 12
"""Letters of a phrase that is not a whole message: a phrase that could be part of anything would hide a missing row."""


def texts_of(node: ast.expr, function: ast.AST) -> list[str]:
    """What an expression can be: texts, "…" for what is not known before it runs; none where it is no text.

    One of two, and a name that was given one in the same function, are followed.
    """
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.IfExp):
        return texts_of(node.body, function) + texts_of(node.orelse, function)
    if isinstance(node, ast.Name):
        given = [other for other in ast.walk(function) if isinstance(other, ast.Assign)]
        values = [other.value for other in given if node.id in map(ast.unparse, other.targets)]
        return [text for value in values for text in texts_of(value, function)]
    if isinstance(node, ast.JoinedStr):
        parts = [texts_of(_inside(part), function) or ["…"] for part in node.values]
        return ["".join(chosen) for chosen in itertools.product(*parts)]
    return []


def _inside(part: ast.expr) -> ast.expr:
    return part.value if isinstance(part, ast.FormattedValue) else part


def said_in(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Line and text of each message of a function."""
    for node in ast.walk(function):
        given: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            given = node.exc.args
        elif isinstance(node, ast.Call) and SAID_BY.fullmatch(ast.unparse(node.func)):
            given = node.args
        elif isinstance(node, ast.Return) and node.value is not None and REASONS.match(function.name):
            given = [node.value]
        if (
            ast.unparse(node).removeprefix("raise ") == "AttributeError(name)"
        ):  # of `__getattr__`: what Python itself would say
            continue
        if given and not any(texts_of(one, function) or ast.unparse(one) in HANDED_ON for one in given):
            raise ValueError(f"{function.name}, line {node.lineno}: what {ast.unparse(node)} says cannot be read here")
        for text in (text for argument in given for text in texts_of(argument, function)):
            if re.search(r"\w", text):
                yield node.lineno, " ".join(text.split())


@functools.cache
def messages() -> dict[str, str]:
    """The package's messages, by their place."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "hf_paged_beam").rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            for line, text in said_in(function):
                found[f"{path.relative_to(ROOT)}:{line} {text}"] = text
    return found


def phrases_of(page: str) -> list[str]:
    """The code in the first column of the page's tables."""
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    return [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


PHRASES = phrases_of(PAGE.read_text())


def names(phrase: str, message: str) -> bool:
    """Whether a phrase is in a message; its "…" stands for anything."""
    parts = [re.escape(part.strip()) for part in phrase.split("…")]
    return re.search(".*".join(parts), message) is not None


def test_messages_and_rows_are_found() -> None:
    """One of each kind: raised, logged, returned as a reason, put together from two places."""
    assert len(messages()) > 120 and len(PHRASES) > 100
    whole = "\n".join(messages().values())
    for part in (
        "num_beam_groups must divide num_beams",
        "cannot be captured, and runs as it is written",
        "rounds the keys of all beams together",
        "but the model (…) has an encoder: say how long its output is",
    ):
        assert part in whole


@pytest.mark.parametrize("place", messages())
def test_every_message_has_a_row(place: str) -> None:
    assert any(names(phrase, messages()[place]) for phrase in PHRASES)


@pytest.mark.parametrize("phrase", PHRASES)
def test_every_row_has_a_message(phrase: str) -> None:
    assert len(re.sub(r"\W", "", phrase)) >= FEWEST_LETTERS or phrase in messages().values()
    assert any(names(phrase, message) for message in messages().values())


@pytest.mark.parametrize("said", ['"the moon is full: " + name', '"the {} is full".format(name)', "MESSAGE"])
def test_what_cannot_be_read_is_an_error(said: str) -> None:
    """A message that is put together in another way would be in no table, and nobody would see it."""
    function = ast.parse(f"def search(name):\n    raise ValueError({said})").body[0]
    assert isinstance(function, ast.FunctionDef)
    with pytest.raises(ValueError, match="cannot be read here"):
        list(said_in(function))


def test_no_phrase_stands_twice() -> None:
    assert len(set(PHRASES)) == len(PHRASES)


def test_another_message_would_be_missed() -> None:
    """And what is no message would be seen."""
    function = ast.parse('def search():\n    raise ValueError(f"{moon} is full: wait until it is not")').body[0]
    assert isinstance(function, ast.FunctionDef)
    [text] = {text for _, text in said_in(function)}
    assert text == "… is full: wait until it is not"
    assert not any(names(phrase, text) for phrase in PHRASES)
    assert phrases_of("| `… is full: wait`, `or not` | why `x` |") == ["… is full: wait", "or not"]
