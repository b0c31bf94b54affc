"""The figures of the pages that explain: how it works, memory planning, troubleshooting, contributing."""

from __future__ import annotations

import itertools
import re
from typing import Any

from transformers import LlamaConfig

import hf_paged_beam
from benchmarks.models import config_of
from benchmarks.physics import STOCK_TOUCHES
from hf_paged_beam import estimate_memory
from hf_paged_beam.cache import GROWTH, LEAST_SPARE
from hf_paged_beam.generation import replay

from .of_performance import candidates_per_beam
from .results import cells, source
from .stated import AtMost, Entry, Figure, Said

HOW = "docs/how_it_works.md"
MEMORY = "docs/memory.md"
TROUBLES = "docs/troubleshooting.md"
CONTRIBUTING = "docs/contributing.md"
CITING = "docs/citing.md"


def beams_of_the_picture() -> list[Any]:
    """What the script that draws it searches with."""
    setting = re.search(r"^WORD, BEAMS, STEP = \"\w+\", (\d+), \d+$", source("docs/figures/draw_how_it_works.py"), re.M)
    return [int(setting[1])] if setting else []


def example() -> list[Any]:
    """Prompt, beams and new tokens of the page's first call of `estimate_memory`."""
    call = re.search(r"num_beams=(\d+), prompt_length=(\d+), max_new_tokens=(\d+)", source(MEMORY))
    return [int(call[2]), int(call[1]), int(call[3])] if call else []


def tokens_that_are_not_run() -> list[Any]:
    """Of each separate sequence."""
    config = LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    told = estimate_memory(config, batch_size=3, num_beams=5, prompt_length=11, max_new_tokens=7)
    return [11 + 7 - told.separate / told.token / (3 * 5)]


def long_prompts() -> list[Any]:
    """The shortest prompt that the test holds to 10%, and by how many percent recorded longer ones differ at most."""
    first, twice = (
        int(re.findall(rf"^{name} = (\d+)", source("tests/test_planning.py"), re.M)[0])
        for name in ("LONG", "BESIDE_TREE")
    )
    missed = []
    for row in [*cells("compare"), *cells("growth")]:
        if row["num_beams"] == 1 or "plain" not in row.get("engines", {}):
            continue
        shape = [row[name] for name in ("batch_size", "num_beams", "prompt_length", "new_tokens")]
        told = estimate_memory(config_of(row["model"]), *shape)
        if row["prompt_length"] >= max(first, twice * told.nodes):
            missed.append(100 * abs(told.expected / row["engines"]["plain"]["kv_bytes"] - 1))
    return [first, twice, AtMost(max(missed), 1.5)]


def tree_shares() -> list[Any]:
    """Of a wide tree's last steps but one and two, by what their tokens are divided."""
    config = LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    nodes = [estimate_memory(config, 1, 6, 5, new_tokens).nodes for new_tokens in range(1, 10)]
    steps = [after - before for before, after in itertools.pairwise(nodes)]
    assert steps[0] == 6
    return [6 / steps[1], 6 / steps[2]]


ENTRIES: list[Entry] = [
    Figure(HOW, "the best `#W` continuations", lambda: [candidates_per_beam()]),
    Said(HOW, "# beams that continue the same parent", "any pair of beams"),
    Figure(HOW, "![# beams of one word", beams_of_the_picture),
    Figure(HOW, "a real search of # beams", beams_of_the_picture),
    Said(HOW, "then step # again", "a row of the table"),
    Said(HOW, "Steps # to # are tensor operations", "rows of the table"),
    Said(HOW, "# rules keep the files apart", "the sentences that follow"),
    Figure(HOW, "transformers touches about `# · W · (P + t)`", lambda: [STOCK_TOUCHES]),
    Figure(MEMORY, "`B · W · (P + T - #)`", tokens_that_are_not_run),
    Figure(MEMORY, "`B · (P + W · (T - #))`", tokens_that_are_not_run),
    Said(MEMORY, "if no # beams ever share", "any pair of beams"),
    Figure(MEMORY, "`U` lies between `T - #` (in the end all beams are one) and `W · (T - #)`",
           lambda: 2 * tokens_that_are_not_run()),
    Figure(MEMORY, "a pool holds `T - # + W` at least", lambda: [1 + tokens_that_are_not_run()[0]]),
    Figure(MEMORY, "just after it, `W / #` a step later, then `W / #`, and so on", tree_shares),
    Figure(MEMORY, "of # tokens and more, and at least # as many as `nodes`, real searches were within #% of it",
           long_prompts),
    Figure(MEMORY, "by one slot in #, and by # at least", lambda: [GROWTH, LEAST_SPARE]),
    Figure(MEMORY, "one prompt of # tokens, # beams, # new tokens", example),
    Figure(MEMORY, "multiples of # slots, and the pools of the last # recorded graphs",
           lambda: [replay._SLOT_STEP, replay._MOST_GRAPHS]),
    Said(MEMORY, "# arrays of `B · W` rows", "logits, and log-probabilities"),
    Said(TROUBLES, "leave out one of the # |", "a keyword, and the reason"),
    Said(TROUBLES, "a whole number from # on | | `must be an integer of at least 0", "the bound of the message"),
    Said(TROUBLES, "for `min_new_tokens` | a whole number from # on", "the bound of the message"),
    Said(TROUBLES, "a negative number | a number from # on", "the bound of the message"),
    Said(TROUBLES, "another value of `early_stopping` | one of the # |", "values that the message names"),
    Said(TROUBLES, "a patience of # would stop", "the bound of the message"),
    Said(TROUBLES, "a list of `num_beams` with a #, and `do_sample=True` | at least # beams", "beam search has two"),
    Said(TROUBLES, "`prefix_allowed_tokens_fn` and `trie` | one of the #", "the two that are named"),
    Said(TROUBLES, "another number of dimensions | # dimensions", "those of `[N, L]`"),
    Said(TROUBLES, "no such prompt | a number from # to `B` - #", "how rows are counted"),
    Said(TROUBLES, "no such step | a number from # to `T` - #", "how steps are counted"),
    Said(TROUBLES, "one of the # is missing", "the two that are named"),
    Said(TROUBLES, "fewer than # beams, or no tokens", "beam search has two"),
    Figure(CITING, "version = {#}", lambda: [hf_paged_beam.__version__]),
    Said(CITING, "year = {#}", "of the version"),
    Said(CONTRIBUTING, "adds # things to the package", "the headings below"),
    Said(CONTRIBUTING, "new form shall be `log2(# + n) ** length_penalty`", "the form that the example adds"),
    Said(CONTRIBUTING, "in the group of beams, # places", "the places that are named"),
    Said(CONTRIBUTING, "ids below # are special", "what the tokenizer of the example begins with"),
    Said(CONTRIBUTING, "beside the keys, `[rows, heads, length, #]`", "a size of a shape"),
    Said(CONTRIBUTING, "sigmoid().transpose(1, 2)... [rows, heads, new, #]", "a size of a shape"),
]  # fmt: skip
