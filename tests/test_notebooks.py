"""The notebooks as they are committed: executed in order, without errors, and of the form that readers expect.

``python notebooks/run.py`` executes them.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

PATHS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_there_are_six() -> None:
    assert [path.stem[:3] for path in PATHS] == [f"{number:02d}_" for number in range(1, 7)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_executed_in_order(path: Path) -> None:
    """Every code cell once, from the first to the last; nothing raised, nothing on stderr, no place of a machine."""
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    written = [text(cell) for cell in json.loads(path.read_text())["cells"]]
    written += ["".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs]
    for words in written:
        assert not re.search(r"(^|[\s'\"(])/(home|root|tmp|work|usr|opt|Users)/", words), words[:200]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_opens_and_ends_as_a_lesson(path: Path) -> None:
    """What the reader will know comes first, three questions last."""
    markdown = [text(cell) for cell in cells(path, "markdown")]
    assert markdown[0].startswith("# ") and "What you will know at the end" in markdown[0]
    last = markdown[-1]
    assert "## Three questions" in last
    asked = last.partition("## Three questions")[2]
    assert re.findall(r"^(\d)\. ", asked, re.MULTILINE) == ["1", "2", "3"]


def private_names(code: str) -> list[str]:
    """Names that begin with one underscore and are not the code's own: attributes of anything, and what is imported."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            places = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [part for place in places for part in place.split(".")]
    return [name for name in found if re.match("_(?!_)", name)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_uses_what_the_package_offers(path: Path) -> None:
    """No notebook reaches into private names, the package's or another's, nor into those of the objects it is given."""
    code = [text(cell) for cell in cells(path, "code")]
    assert [name for source in code for name in private_names(source)] == []
    assert any("hf_paged_beam" in source for source in code)


def test_private_names() -> None:
    assert sorted(private_names("trace._x, f(model.config)._y[0].z")) == ["_x", "_y"]
    assert sorted(private_names("import a._b\nfrom a._c import d\nfrom a import _e, f as _g")) == ["_b", "_c", "_e"]
    assert private_names("_, own = a.__class__, _own(a.b_)\nx.y = 1") == []
