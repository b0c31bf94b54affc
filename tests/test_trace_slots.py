"""A trace's slots beside the cache that they were taken from, and their picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_trace import LETTERS, trace_by_hand
from tiny_models import prompts, shared_model
from transformers import StoppingCriteria

from hf_paged_beam import BeamTrace, PagedBeamCache
from hf_paged_beam.versions import CACHE_ARGUMENT


class NoteTables(StoppingCriteria):
    """Notes the cache's own table before each step's tokens are chosen; stops nothing."""

    def __init__(self, cache: Any):
        self.cache, self.tables, self.live = cache, [], []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tables.append(self.cache.index.paths.clone())
        self.live.append(self.cache.usage().live)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture(scope="module")
def searched() -> tuple[BeamTrace, NoteTables]:
    """A search that runs to its longest, whose trace and whose cache's tables are noted."""
    model = shared_model("llama")
    cache = PagedBeamCache(model.config, num_beams=5)
    note = NoteTables(cache)
    found = model.generate(
        **prompts("llama", 1), num_beams=5, max_new_tokens=9, eos_token_id=None, do_sample=False,
        return_dict_in_generate=True, return_beam_trace=True, stopping_criteria=[note], custom_generate="hf_paged_beam",
        **{CACHE_ARGUMENT: cache},
    )  # fmt: skip
    return found.beam_trace, note


def test_index_table_is_the_caches(searched: tuple[BeamTrace, NoteTables]) -> None:
    """Step by step, slot by slot. When criteria are asked, the tokens of the step before last have their slots."""
    trace, note = searched
    compared = 0
    for table in note.tables:
        step = table.shape[1] - 1
        if step >= 0:
            assert torch.equal(trace.index_table(step), table + trace.prompt_length)
            compared += 1
    assert compared == trace.tokens.shape[1] - 1
    assert (trace.index_table(compared)[:, -1] == -1).all(), "the last step's tokens are given no slots"


def test_live_slots_are_the_caches(searched: tuple[BeamTrace, NoteTables]) -> None:
    """The cache counts them after each step; the trace's first count is of the prompt alone."""
    trace, note = searched
    live = trace.slots().live()
    assert live[0] == trace.prompt_length
    assert live[: len(note.live)] == note.live


def test_index_table_by_hand() -> None:
    """Rows of beams that do not run on are -1."""
    trace = trace_by_hand()
    assert trace.index_table(0).tolist() == [[2], [3]]
    assert trace.index_table(1).tolist() == [[3, 2], [3, 4]]
    assert trace.index_table(2).tolist() == [[3, 2, -1], [-1, -1, -1]]
    assert trace.slots().live() == [2, 4, 5, 4]


@pytest.mark.parametrize("step", [3, -1, True, 1.0, None])
def test_no_such_step(step: object) -> None:
    with pytest.raises(ValueError, match=rf"step={step!r}; expected a step of the search, a whole number in 0..2"):
        trace_by_hand().index_table(step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt=1; expected a row of the batch"):
        trace_by_hand().index_table(0, prompt=1)


# --- the picture ---


class Words:
    def decode(self, ids: list[int]) -> str:
        return LETTERS[ids[0]]


@pytest.fixture
def pyplot() -> Any:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib, of the extra viz, is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@pytest.mark.parametrize(("tokenizer", "written"), [(Words(), ["a", "c", "x", "z"]), (None, ["0", "2", "7", "8"])])
def test_the_picture_shows_the_map(pyplot: Any, tokenizer: Any, written: list[str]) -> None:
    """A bar for every state of every slot but "free", and each token where it was written."""
    ax = trace_by_hand().slots().plot(tokenizer)
    assert [text.get_text() for text in ax.texts] == written
    assert [text.get_position() for text in ax.texts] == [(0, 2), (0, 3), (1, 2), (1, 4)]
    bars = [collection.get_hatch() or "" for collection in ax.collections]
    assert bars.count("////") == 2 and len(bars) == 2 + 3 + 1  # prompt; live; reused. No step shows a freed slot
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "slot of the pool")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["prompt", "0", "1"]


def test_states_differ_without_colour(pyplot: Any) -> None:
    """In the legend each is told by its grey or its hatching."""
    legend = trace_by_hand().slots().plot().get_legend()
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()}
    assert len(looks) == len(legend.get_texts()) == 5
    assert all(red == green == blue for (red, green, blue, _), _ in looks)


def test_wide_maps_have_no_tokens(pyplot: Any, searched: tuple[BeamTrace, NoteTables]) -> None:
    """Where they would be too small to read; on given axes nothing else is drawn."""
    _, (left, right) = pyplot.subplots(1, 2)
    assert trace_by_hand().slots().plot(ax=right) is right
    assert not left.has_data()
    wide = trace_by_hand().slots()
    wide.states.resize_(4, 60).zero_()
    assert not wide.plot().texts
    assert searched[0].slots().plot().texts


def test_refuses_what_cannot_decode() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra viz, is not installed")
    with pytest.raises(ValueError, match="tokenizer='gpt2' has no method decode"):
        trace_by_hand().slots().plot("gpt2")
