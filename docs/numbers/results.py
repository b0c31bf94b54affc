"""What several figures are computed from: committed results, shapes of models, quick searches."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from hf_paged_beam import pronunciation

from .page import ROOT

TINY = "tiny"


@functools.cache
def results(name: str) -> dict[str, Any]:
    """Committed results of a benchmark."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def cells(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of results that have these values.

    Raises:
        LookupError: if there is none.
    """
    found = [row for row in results(name)["cells"] if all(row[field] == value for field, value in wanted.items())]
    if not found:
        raise LookupError(f"benchmarks/results/{name}.json has no row of {wanted}")
    return found


def version(name: str, package: str) -> str:
    """Of a package in a run: its first two numbers."""
    told = results(name)
    return ".".join(re.findall(r"\d+", told.get("versions", told)[package])[:2])


def conditions(name: str) -> list[Any]:
    """Threads, versions of torch and transformers, and date of a run."""
    told = results(name)
    return [told["machine"]["threads"], version(name, "torch"), version(name, "transformers"), told["date"]]


@functools.cache
def source(path: str) -> str:
    """A text file of the repository."""
    return (ROOT / path).read_text()


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next of its kind.

    Raises:
        LookupError: if there is no such heading.
    """
    found = re.search(rf"^(##+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", source(page), re.DOTALL | re.MULTILINE)
    if found is None:
        raise LookupError(f"{page} has no heading {heading!r}")
    return found[2]


def last_with_groups() -> str:
    """The release of transformers whose diverse beams ours are compared with."""
    (release,) = re.findall(r'^OLD_RELEASE = "([\d.]+)"', source("tests/compare_diverse.py"), re.MULTILINE)
    return release


def rows_of_table(text: str) -> int:
    """Of the first table, without its head."""
    lines = text.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("|---"))
    end = next((place for place, line in enumerate(lines) if place > begin and not line.startswith("|")), len(lines))
    return end - begin - 1


@functools.cache
def _pronouncer() -> tuple[Any, Any]:
    return pronunciation.load()


def search(word: str = "tomato", **settings: Any) -> Any:
    """A search of the pronunciation model with four beams, by this package; `custom_generate=None` is stock's."""
    model, tokenizer = _pronouncer()
    call = dict(num_beams=4, max_new_tokens=16, do_sample=False, output_scores=True, return_dict_in_generate=True,
                custom_generate="hf_paged_beam")  # fmt: skip
    call = {name: value for name, value in {**call, **settings}.items() if value is not None}
    with quiet():
        return model.generate(**tokenizer([word], return_tensors="pt"), **call)


class quiet:
    """transformers without its warnings."""

    def __enter__(self) -> None:
        self._verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()

    def __exit__(self, *_: Any) -> None:
        transformers.logging.set_verbosity(self._verbosity)


def works(call: Callable[[], Any]) -> bool:
    """Whether a call of torch's raises nothing."""
    try:
        call()
    except RuntimeError:
        return False
    return True


def tensors_of(told: Any) -> Iterator[torch.Tensor]:
    """Attributes of an object that are tensors."""
    return (value for value in vars(told).values() if isinstance(value, torch.Tensor))
