"""The figures of README.md."""

from __future__ import annotations

import re
from typing import Any

from benchmarks import constrained
from benchmarks.memory import LLAMA_3_8B, bytes_per_token, search_usage
from benchmarks.models import SHAPES

from .page import ROOT
from .results import cells, conditions, last_with_groups, quiet, results, section, source
from .stated import About, Entry, Figure, Said

PAGE = "README.md"
MIB = 2**20


def commands() -> list[Any]:
    """Blocks of shell below the heading."""
    return [section(PAGE, "Two commands").count("```bash")]


def shapes() -> list[Any]:
    """Layers and widths of the three random models."""
    small, large, tiny = SHAPES["30m"], SHAPES["160m"], SHAPES["tiny"]
    if small["vocab_size"] != large["vocab_size"]:
        raise ValueError("the vocabularies differ")
    sizes = ("num_hidden_layers", "hidden_size")
    return [*(small[name] for name in sizes), *(large[name] for name in sizes), small["vocab_size"],
            *(tiny[name] for name in sizes)]  # fmt: skip


def tiny_milliseconds() -> list[Any]:
    """The shortest and the longest search with tiny models, by transformers and by us."""
    engines = [row["engines"][name] for row in cells("compare", model="tiny") for name in ("stock", "plain")]
    seconds = [1000 * engine["seconds"] for engine in engines]
    return [About(min(seconds), 0.15), About(max(seconds), 0.15)]


def llama_memory() -> list[Any]:
    """Separate sequences; the prompt once and nothing else shared; the tree that a small random model grew."""
    beams, prompt, tokens = 4, 1000, 200
    token = bytes_per_token(LLAMA_3_8B) / MIB
    with quiet():
        live = max(usage.live for usage in search_usage(beams, prompt, tokens))
    separate, most = beams * (prompt + tokens) * token, (prompt + beams * tokens) * token
    return [beams, prompt, tokens, separate, most, About(live * token, 0.05)]


def lessons() -> list[Any]:
    """The notebooks."""
    return [len(list(ROOT.glob("notebooks/*.ipynb")))]


def keywords_of_the_search() -> list[Any]:
    """Those that the sentence names, in code, with their values."""
    sentence = source(PAGE).partition("Of the new keywords, ")[2].partition("With `return_dict")[0]
    return [len(re.findall(r"`\w+=\"", sentence))]


def early_stopping_modes() -> list[Any]:
    """The values that the message about another one names."""
    settings = source("hf_paged_beam/generation/settings.py")
    message = re.search(r"must be (True), (False) or ('never'), but got", settings)
    return [len(message.groups())] if message else []


def oldest_transformers() -> list[Any]:
    """From the package's requirements."""
    return re.findall(r"transformers>=([\d.]+)", source("pyproject.toml"))


def tries() -> list[Any]:
    """Of all runs after the same history: trie over none; transformers over trie."""
    history = results("constrained")["cells"][0]["prompt_length"]
    rows = cells("constrained", prompt_length=history)
    counts = sorted({row["items"] for row in rows})
    shares = [row["trie_over_free"] for row in rows]

    def stock(width: int) -> list[float]:
        ratios = [row["stock_over_trie"] for row in rows if row["num_beams"] == width]
        return [min(ratios), max(ratios)]

    threads, _, _, date = conditions("constrained")
    (longer,) = {row["prompt_length"] for row in results("constrained")["cells"]} - {history}
    after_longer = cells("constrained", prompt_length=longer)
    (width,) = {row["num_beams"] for row in after_longer}
    ratios = [row["stock_over_trie"] for row in after_longer]
    return [history, constrained.LENGTH, threads, date, min(shares), max(shares), *counts, sum(stock(10)) / 2, 10,
            *stock(100), 100, *stock(500), 500, min(ratios), max(ratios), width, longer]  # fmt: skip


ENTRIES: list[Entry] = [
    Figure(PAGE, "`notebooks/` teach: # lessons", lessons),
    Figure(PAGE, "# commands See it work", commands),
    Figure(PAGE, "CPU, float32, # threads (x86_64, torch #, transformers #, #)", lambda: conditions("compare")),
    Figure(PAGE, '"30m" has # layers of width #, "160m" # of width #, both a vocabulary of #; "tiny" has # layers of '
                 "width #", shapes),
    Figure(PAGE, "a search takes # to # ms", tiny_milliseconds, timing=True),
    Figure(PAGE, "`W=# P=# T=#` in bfloat16: # MiB of keys and values become at most # MiB, and # MiB with the tree",
           llama_memory),
    Figure(PAGE, "Of the new keywords, # are about the search as it is", keywords_of_the_search),
    Figure(PAGE, "the # `early_stopping` modes", early_stopping_modes),
    Figure(PAGE, "It needs transformers # or newer", oldest_transformers),
    Figure(PAGE, "a history of # tokens and items of # (`python -m benchmarks.constrained`, x86_64, # threads, #), a "
                 "call with a trie took # to # of the time of one without, for a # items and a #; transformers with "
                 "`prefix_allowed_tokens_fn` took # times as long with # beams, # to # with # and # to # with #, and # "
                 "to # with # beams after a history of #",
           tries, timing=True),
    Figure(PAGE, "as transformers had them up to #", lambda: [last_with_groups().rpartition(".")[0]]),
    Said(PAGE, "padded with -#", "an id that no token has"),
    Said(PAGE, "index of each item in `items`, -# where", "an index that no item has"),
]  # fmt: skip
