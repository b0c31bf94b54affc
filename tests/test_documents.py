"""What README and docs state is what was measured, and their links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import kv_dtype, pages
from benchmarks.memory import LLAMA_3_8B, bytes_per_token, search_usage
from benchmarks.table import RESULTS, markdown
from hf_paged_beam.cache import KV_DTYPES

ROOT = Path(__file__).parent.parent


def test_the_readme_shows_the_committed_results() -> None:
    """Its table is made from the JSON."""
    assert markdown(json.loads(RESULTS.read_text())) in (ROOT / "README.md").read_text()


def test_the_docs_show_what_fewer_bytes_cost() -> None:
    """The table is made from the JSON, and names what can be asked for."""
    results = json.loads(kv_dtype.RESULTS.read_text())
    assert kv_dtype.markdown(results) in (ROOT / "docs" / "differences.md").read_text()
    for rows in results["models"].values():
        assert [row["stored"] for row in rows] == ["as computed", *KV_DTYPES]


def test_the_performance_page_shows_the_committed_results() -> None:
    """Its tables are made from the JSON of the runs."""
    written = pages.PAGE.read_text()
    assert pages.filled(written) == written
    named = pages._BLOCK.findall(written)
    assert {name for _, name, _ in named} == set(pages.TABLES)


def test_memory_of_llama_3_8b() -> None:
    """600 MiB of separate sequences become at most 225 MiB live, and at most 1.25 times that is held."""
    seen = search_usage(num_beams=4, prompt_length=1000, new_tokens=200)
    token = bytes_per_token(LLAMA_3_8B)
    assert token == 128 * 2**10
    assert 4 * (1000 + 200) * token == 600 * 2**20
    live = max(usage.live for usage in seen)
    assert live >= 1000 + 200 and live * token <= 225 * 2**20
    stated = re.search(r"(\d+) MiB\nwith the tree", (ROOT / "README.md").read_text())
    assert stated is not None and abs(live * token / 2**20 - int(stated[1])) < 10
    peak = max(seen, key=lambda usage: usage.bytes_held)
    price = peak.bytes_live / peak.live
    assert peak.bytes_held / price <= 1.25 * live


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def links(text: str) -> list[tuple[str, str]]:
    """Files and headings that relative links lead to; either can be empty."""
    targets = re.findall(r"\]\(\s*([^)\s]+)\s*\)", text)
    return [target.partition("#")[::2] for target in targets if not re.match(r"\w+:", target)]


def headings(text: str) -> set[str]:
    """How links name them: small letters, no signs, blanks as hyphens; and what a page of docstrings is asked for."""
    named = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    written = {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in named}
    return written | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of README and docs: the file is there, and the heading in it."""
    for target, heading in links(page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if heading:
            assert heading in headings(file.read_text()), f"{target}#{heading}"


def test_links_that_lead_nowhere_are_seen() -> None:
    """With a heading and without, over two lines; addresses of other sites are not looked up."""
    text = "[a](b.md#c-d) ![e\nf](g.svg) [h](#i) [j](https://k.l/m)\n"
    assert links(text) == [("b.md", "c-d"), ("g.svg", ""), ("", "i")]
    assert headings("# A: `b` c\n::: d.e\n") == {"a-b-c", "d.e"}
