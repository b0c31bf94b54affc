"""What a number may be without being a result, on any page: part of a name, a version, a citation, a setting."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

from benchmarks.models import SHAPES

from .page import ROOT

TESTED_OUTPUT = {"docs/search.md": "tests/test_search_guide.py"}
"""Pages whose blocks of output a test compares with what is printed, and that test."""

DOCTESTS = "tests/test_doctests.py"
"""The test that runs all blocks of the language pycon."""

LETTERS = {"B", "W", "P", "T", "K", "V", "n"}
"""How the documentation names sizes."""

_RELEASE = r"(?:4\.5\d|5\.\d\d)(?:\.\d+)?"
_BEFORE_RELEASE = r"(?:transformers|before|until|up\s+to|under|in|cache,)"
"""Words that a release of transformers follows."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of number.

    Attributes:
        reason: what it is.
        page: the only page that it is for; empty for all.
        expression: all numbers within a match are of this kind.
        allows: a further condition on the match.
    """

    reason: str
    expression: re.Pattern[str]
    allows: Callable[[re.Match[str]], bool] = lambda found: True
    page: str = ""


@functools.cache
def _arguments() -> set[str]:
    """Names of settings: of transformers' generation, of this package's, and of the functions that pages call."""
    import dataclasses as fields_of
    import inspect

    from transformers import GenerationConfig

    import hf_paged_beam

    functions = [getattr(hf_paged_beam, name) for name in hf_paged_beam.__all__]
    signatures = [inspect.signature(one).parameters for one in functions if callable(one)]
    own = {field.name for field in fields_of.fields(hf_paged_beam.Options)}
    return LETTERS | own | set(GenerationConfig().to_dict()) | {name for names in signatures for name in names}


RULES = [
    Rule(
        "a setting in code",
        re.compile(r"(?<=[`(\s,])(\w+)(?:=| [<>]=? )(?:\[[^\]]*\]|-?[\d.]+)(?=[^`\n]*`)"),
        lambda found: found[1] in _arguments(),
    ),
    Rule("an argument in code", re.compile(r"(?<=[`.])\w+\(\d+(?=[,)][^`\n]*`)")),
    Rule(
        "part of a name",
        re.compile(r"\b(?:[A-Za-z]{2,}[A-Za-z_]*-?\d(?:[\w.-]*\w)?|x86_64|T5\w*|Gemma 3|GLM-4V|CC0)\b"),
    ),
    Rule(
        "a model of the benchmarks",
        re.compile("|".join(rf"(?<![\w.]){name}(?!\w)" for name in SHAPES if name[0].isdigit())),
    ),
    Rule(
        "a version",
        re.compile(rf"\b{_BEFORE_RELEASE}\s+{_RELEASE}(?!\s*(?:times|s|ms|MiB|%))|\b(?:torch|PEFT)\s+\d\.\d+"),
    ),
    Rule(
        "a message of the package, which tests/test_troubleshooting.py compares with the source",
        re.compile(r"^\|(?: `[^`\n]*`,?)+ \|", re.MULTILINE),
        page="docs/troubleshooting.md",
    ),
    Rule(
        "the name of a notebook",
        re.compile(r"`(\d\d_\w+)`"),
        lambda found: (ROOT / "notebooks" / f"{found[1]}.ipynb").exists(),
    ),
    Rule("the number of a step", re.compile(r"^\| \d \|", re.MULTILINE), page="docs/how_it_works.md"),
    Rule("a year", re.compile(r"(?:et\s+al\.|\b[A-Z]\w+\s+and\s+[A-Z]\w+)\s+\(?(?:19|20)\d\d\b")),
    Rule("a paper", re.compile(r"arXiv:\d{4}\.\d{5}|\bequations?\s+\d+(?:\s+and\s+\d+)?")),
]
