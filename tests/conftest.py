"""Run the tests with the switches of speed on, which must change no result.

    pytest --switches tests/test_equal_to_stock.py ...

Every search then has ``compile=True, prepack=True`` unless it says otherwise. Steps are traced whole and run as
traced, which shows what compiling could break in a tenth of its time; oneDNN computes layers of every size. Tests that
are marked `as_written` count what calls without the switches do, and are skipped.
"""

from __future__ import annotations

import pytest

from hf_paged_beam import Options
from hf_paged_beam.generation import capture, linears


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--switches", action="store_true", help="search with compile=True, prepack=True")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--switches"):
        reason = pytest.mark.skip(reason="counts what calls without the switches do")
        for item in items:
            if item.get_closest_marker("as_written"):
                item.add_marker(reason)


@pytest.fixture(autouse=True)
def _switches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--switches"):
        return
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "compile", True)
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "prepack", True)
    monkeypatch.setattr(capture, "BACKEND", "eager")
    monkeypatch.setattr(linears, "_SMALLEST", 1)
