"""Prompts that are done leave the model's rows, and the others go on as if nothing had happened.

In a plain call, which returns a tensor, nobody reads the rows of a prompt that is done. transformers runs them to the
end; here they leave the batch, the pools and everything that is kept of rows. The sequences are the same.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from table_model import AttendingTable, GatheringTable, random_table, table_model
from test_mixed_settings import model_of
from test_oracle import padded
from tiny_models import BUILDERS, EOS, VOCABULARY, double_model, path_of, prompts_for
from transformers import LogitsProcessor, LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin
from watching import forward_rows

from hf_paged_beam import PagedBeamCache
from hf_paged_beam.versions import CACHE_ARGUMENT

MANY_ENDS = [EOS, *range(20, VOCABULARY, 4)]
MODES = [True, False, "never"]


def both_and_rows(model: Any, inputs: dict, **call: Any) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What transformers' search returns, what ours does, and how many rows each of our forward passes had."""
    call = {"do_sample": False, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9, **call}
    stock = GenerationMixin.generate(model, **inputs, **call)
    GenerationMixin.generate(
        model, **inputs, **call, custom_generate="hf_paged_beam"
    )  # the first call tries both paths
    with forward_rows(model) as rows:
        ours = GenerationMixin.generate(model, **inputs, **call, custom_generate="hf_paged_beam")
    return stock, ours, rows


def left_early(rows: list[int], batch_size: int, width: int) -> bool:
    """Whether some rows left before the last step; none may come back."""
    assert rows[0] == batch_size and all(after <= before for before, after in itertools.pairwise(rows[1:]))
    assert all(count % width == 0 for count in rows[1:])
    return len(rows) > 2 and rows[-1] < batch_size * width


@pytest.mark.parametrize("early_stopping", MODES)
@pytest.mark.parametrize("kind", BUILDERS)
def test_plain_calls_of_every_kind_of_model(kind: str, early_stopping: bool | str) -> None:
    """The same sequences; of several batches, at least one has a prompt that leaves, where `W` ended are enough."""
    model, left = double_model(kind), 0
    for seed in range(4):
        inputs = prompts_for(model, kind, 5, seed=seed)
        stock, ours, rows = both_and_rows(
            model, inputs, early_stopping=early_stopping, eos_token_id=MANY_ENDS, pad_token_id=0, length_penalty=0.0
        )
        assert torch.equal(ours, stock)
        left += left_early(rows, 5, 3)
    assert left or early_stopping is not True


@pytest.mark.parametrize("kind", [AttendingTable, GatheringTable])
@pytest.mark.parametrize("seed", range(12))
def test_random_tables(seed: int, kind: type) -> None:
    """On both read paths each row of the table is read through the cache: a wrong slot after leaving reads another."""
    ends = (3, 4)
    model = table_model(random_table(seed, 12, ends=ends), 12, kind=kind)
    rows_given = [(5,), (5, 6), (7, 6, 5), (8,), (9, 9)]
    stock, ours, rows = both_and_rows(
        model, padded(rows_given), early_stopping=True, eos_token_id=list(ends), pad_token_id=0, max_new_tokens=8
    )
    assert torch.equal(ours, stock)
    left_early(rows, 5, 3)


def test_recurrent_states_leave_with_their_beams() -> None:
    """Layers that keep a state for each row keep those of the prompts that stay."""
    model, left = model_of("falcon_h1"), 0
    for seed in range(4):
        inputs = prompts_for(double_model("llama"), "llama", 4, seed=seed)
        stock, ours, rows = both_and_rows(model, inputs, early_stopping=True, eos_token_id=MANY_ENDS, pad_token_id=0)
        assert torch.equal(ours, stock)
        left += left_early(rows, 4, 3)
    assert left


@pytest.mark.parametrize(
    "option", [{"beam_attention": "gathered"}, {"kv_dtype": "bfloat16"}, {"beam_attention": "folded"}]
)
@pytest.mark.parametrize("kind", ["llama", "mistral", "t5"])
def test_leaving_on_each_path(kind: str, option: dict) -> None:
    """The same as when all rows stay, which `output_scores` makes them do."""
    if option.get("beam_attention") == "folded" and path_of(kind) != "folded":
        pytest.skip("this model's attention does not go through the interface in this release")
    model = double_model(kind)
    inputs = prompts_for(model, kind, 5, seed=2)
    call = dict(num_beams=3, num_return_sequences=3, max_new_tokens=9, early_stopping=True, eos_token_id=MANY_ENDS,
                pad_token_id=0, do_sample=False, custom_generate="hf_paged_beam", **option)  # fmt: skip
    stay = GenerationMixin.generate(model, **inputs, **call, return_dict_in_generate=True, output_scores=True)
    with forward_rows(model) as rows:
        leave = GenerationMixin.generate(model, **inputs, **call)
    assert torch.equal(leave, stay.sequences)
    assert min(rows[1:]) < 15


class _Seen(LogitsProcessor):
    """A processor that we do not know; it notes how many rows it is shown."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(scores))
        return scores


def test_who_counts_on_all_rows_keeps_them() -> None:
    """A processor of the user's, a criterion of the user's, outputs of every step, a returned or a given cache."""
    model = double_model("llama")
    inputs = prompts_for(model, "llama", 5, seed=2)
    call = dict(num_beams=3, max_new_tokens=9, early_stopping=True, eos_token_id=MANY_ENDS, pad_token_id=0,
                do_sample=False, custom_generate="hf_paged_beam")  # fmt: skip

    def last_rows(**more: Any) -> int:
        with forward_rows(model) as rows:
            GenerationMixin.generate(model, **inputs, **call, **more)
        return rows[-1]

    assert last_rows() < 15 == last_rows(return_dict_in_generate=True)
    seen = _Seen()
    assert last_rows(logits_processor=LogitsProcessorList([seen])) == 15 and set(seen.rows) == {15}
    assert last_rows(stopping_criteria=[lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]) == 15
    assert last_rows(stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(60.0)])) < 15
    cache = PagedBeamCache(model.config, num_beams=3)
    assert last_rows(**{CACHE_ARGUMENT: cache}) == 15
    cache.check()
    assert cache.to_dynamic().get_seq_length() == cache.get_seq_length()
    assert last_rows(repetition_penalty=1.2) == 15  # one that transformers may make for rows of the whole batch
    assert last_rows(no_repeat_ngram_size=2) < 15
