"""The pictures of README.md and docs/ are those that the committed scripts draw from the committed results."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from hf_paged_beam import pronunciation

ROOT = Path(__file__).parent.parent
LARGEST = 200 * 2**10  # bytes


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("matplotlib")
    return importlib.import_module("docs.figures.draw_readme")


def texts(svg: str) -> list[str]:
    """What is written: matplotlib puts it beside the outlines of its letters."""
    return re.findall(r"<!-- (.*?) -->", svg)


def drawn_by(svg: str) -> str:
    """Name and version of the program."""
    return re.findall(r"<dc:title>(.*?)</dc:title>", svg)[0]


def check_same(drawn: str, committed: str) -> None:
    """All texts and lines; all bytes, if the same matplotlib drew both."""
    assert texts(drawn) == texts(committed) and texts(drawn)
    assert drawn.count("<path") == committed.count("<path")
    if drawn_by(drawn) == drawn_by(committed):
        assert drawn == committed


@pytest.mark.parametrize("name", ["speed", "growth"])
def test_figures_of_the_benchmarks_are_drawn_from_results(name: str, tmp_path: Path) -> None:
    """Those of docs/performance.md."""
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("benchmarks.plots")
    results = json.loads((plots.RESULTS / plots.FIGURES[name][0]).read_text())
    drawn = plots.draw(name, results, tmp_path).read_text()
    check_same(drawn, (ROOT / "docs" / "figures" / f"{name}.svg").read_text())
    assert f"](figures/{name}.svg)" in (ROOT / "docs" / "performance.md").read_text()


def test_how_it_works_is_drawn_from_a_search(tmp_path: Path) -> None:
    """Of the model that ships, now."""
    pytest.importorskip("matplotlib")
    script = importlib.import_module("docs.figures.draw_how_it_works")
    script.write(tmp_path / "drawn.svg")
    check_same((tmp_path / "drawn.svg").read_text(), script.FIGURE.read_text())


@pytest.mark.parametrize("name", ["tree", "readme_bars"])
def test_pictures_are_drawn_from_results(script: ModuleType, name: str, tmp_path: Path) -> None:
    """The same bytes where the same matplotlib draws; the same texts and as many lines where it is another."""
    committed = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
    check_same(script.draw(name, tmp_path).read_text(), committed)
    assert f"](docs/figures/{name}.svg)" in (ROOT / "README.md").read_text()
    assert len(committed) < LARGEST


def test_the_tree_is_of_a_real_search(script: ModuleType) -> None:
    """The recorded trace is what the model does now."""
    kept = json.loads(script.RECORD.read_text())
    model, tokenizer = pronunciation.load()
    found = model.generate(
        **tokenizer([kept["word"]], return_tensors="pt"), **kept["settings"], return_beam_trace=True,
        return_dict_in_generate=True, custom_generate="hf_paged_beam",
    )  # fmt: skip
    recorded, trace = script.load_trace(kept), found.beam_trace
    for name in ("tokens", "parents", "finished", "running", "slots_given", "returned"):
        assert getattr(recorded, name).equal(getattr(trace, name)), name
    assert (recorded.scores - trace.scores).abs().nan_to_num(0).max() < 1e-3
    ids = recorded.tokens.unique().tolist()
    assert kept["texts"] == {str(token): tokenizer.decode([token]) for token in ids}
    assert kept["settings"]["num_beams"] == recorded.running.shape[2]


def test_a_token_of_the_tree_has_a_slot_of_its_own(script: ModuleType) -> None:
    """Among what is live at the same time: the picture shows one slot in each box but the last step's."""
    kept = json.loads(script.RECORD.read_text())
    tree = script.load_trace(kept).tree()
    last = max(node.step for node in tree.nodes)
    for step in range(last):
        given = [node.slot for node in tree.nodes if node.step == step and node.slot is not None]
        assert len(given) == len(set(given)) and given
