"""The line protocol of a worker: a JSON object on a line asks for a search, one on a line answers.

Asked: ``{"prompts": [[int]], "beams": W, "new_tokens": T, "engine": name}``. Answered: ``{"seconds": float,
"sequences": [[int]]}``, the new tokens of each prompt's best beam, or ``{"failed": why}``. The first line a worker
writes is ``{"versions": {...}}``, or ``{"failed": why}`` if its engine could not be loaded.

Standard library only: this file is also read by workers in environments where nothing else of ours is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO


class Engine(Protocol):
    """What a worker has loaded."""

    versions: dict[str, str]

    def prepare(self, asked: dict[str, Any]) -> Callable[[], Any]:
        """The search that was asked for; only calling it is timed."""

    def sequences(self, found: Any) -> list[list[int]]:
        """New tokens of each prompt's best beam, from what the search returned."""


def serve(load: Callable[[], Engine]) -> None:
    """Load, then answer until the input ends. Between two answers the process waits in a read, and computes nothing."""
    with _answers_alone() as answers:
        try:
            engine = load()
        except Exception as error:
            _say(answers, {"failed": _why(error)})
            return
        _say(answers, {"versions": engine.versions})
        for line in sys.stdin:
            _say(answers, _answer(engine, json.loads(line)))


def _answer(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        search = engine.prepare(asked)
        start = time.perf_counter()
        found = search()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "sequences": engine.sequences(found)}
    except Exception as error:
        return {"failed": _why(error)}


@contextlib.contextmanager
def _answers_alone() -> Iterator[TextIO]:
    """The standard output for answers alone: what libraries print there, from C++ too, goes to the standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def _say(answers: TextIO, told: dict[str, Any]) -> None:
    print(json.dumps(told), file=answers, flush=True)


def _why(error: Exception) -> str:
    """One short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
