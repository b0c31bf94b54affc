"""The benchmarks measure what they say. Nothing is timed here: cells, formulas, tables, and what the results tell."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import breakdown, compare, growth, harness, peak, physics, protocol, table
from benchmarks.harness import RESULTS, Cell, Conditions
from benchmarks.models import SHAPES, random_model, random_prompts
from benchmarks.physics import Machine, ModelCost, Pass, passes
from hf_paged_beam.generation import capture

TINY = Cell("tiny", 1, 3, 7, 4)


# --- Cells and engines ---


def test_cells_are_read_as_they_are_written() -> None:
    for cell in [
        *compare.CELLS,
        *peak.CELLS,
        *breakdown.CELLS,
        *(cell for of in growth.SERIES.values() for cell in of),
    ]:
        read = Cell.parse(str(cell))
        assert str(read) == str(cell) and read.settings == cell.settings
        assert cell.model in SHAPES


@pytest.mark.parametrize("text", ["30m,1,2,3", "30m,1,2,3,4,5", "30m,1,2,x,4", "30m,1,0,3,4", "40m,1,2,3,4"])
def test_other_cells_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        Cell.parse(text)


def test_goals_are_those_of_the_table() -> None:
    """Twelve cells have a goal for the switches; plain's, the column of the proof, is never above it."""
    both = [cell for cell in compare.CELLS if cell.switches_goal is not None]
    assert len(both) == 12
    assert all(cell.plain_goal is not None and cell.plain_goal < cell.switches_goal for cell in both)
    assert TINY.goal_of("plain") is None and both[0].goal_of("switches") == 2.7 and both[0].goal_of("stock") is None


def test_engines_that_the_package_does_not_know_are_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = dict.fromkeys(["compile"])
    monkeypatch.setattr(harness.hf_paged_beam.Options, "__dataclass_fields__", known)
    assert Conditions().known().engines == ("stock", "plain")
    assert "does not know prepack" in capsys.readouterr().out
    assert Conditions(device="cuda").known().engines == ("stock", "plain", "switches")
    known["prepack"] = None
    assert Conditions().known().engines == harness.ENGINES
    switches = Conditions().arguments_of("switches")
    assert switches == {"custom_generate": "hf_paged_beam", "compile": True, "prepack": True}
    assert Conditions().arguments_of("stock") == {}


# --- Timing, without a clock ---


def test_engines_take_turns() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in ("stock", "plain")}
    taken = harness.in_turns(runs, 3, torch.device("cpu"))
    assert order == ["stock", "plain"] * 3 and {name: len(rounds) for name, rounds in taken.items()} == {
        "stock": 3,
        "plain": 3,
    }


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """Not the ratio of the medians, which here is 3 / 2."""
    told = harness.summary({"stock": [1.0, 3.0, 8.0], "plain": [2.0, 1.0, 4.0]})
    assert told["stock"] == {"seconds": 3.0, "rounds": [1.0, 3.0, 8.0]}
    assert told["plain"]["seconds"] == 2.0 and told["plain"]["ratios"] == [0.5, 3.0, 2.0]
    assert told["plain"]["ratio"] == 2.0
    assert "ratio" not in harness.summary({"plain": [1.0]})["plain"]


def test_long_rounds_are_few() -> None:
    assert harness.how_many_rounds(Conditions(seconds=60.0), 0.01) == harness.MOST_ROUNDS
    assert harness.how_many_rounds(Conditions(seconds=60.0), 10.0) == 6
    assert harness.how_many_rounds(Conditions(seconds=60.0), 100.0) == harness.LEAST_ROUNDS
    assert harness.how_many_rounds(Conditions(rounds=1), 0.01) == 1


# --- Physics ---


def test_cost_of_a_tiny_model() -> None:
    """Counted by hand: 2 layers of width 64, 4 heads of 16, 2 of them with keys, inner 128; a head of 1,000."""
    cost = ModelCost.of(random_model("tiny"))
    attention = 64 * 64 + 64 * 32 + 64 * 32 + 64 * 64
    inner = 3 * 64 * 128
    assert cost.layer_weights == 2 * (attention + inner) == 73_728
    assert cost.head_weights == 64_000
    assert cost.weight_bytes == 4 * (73_728 + 64_000)
    assert cost.kv_bytes == 2 * 2 * 2 * 16 * 4
    assert cost.pair_flops == 2 * (2 * 4 * 16 + 2 * 4 * 16)
    assert ModelCost.of(random_model("tiny", torch.bfloat16)).weight_bytes * 2 == cost.weight_bytes


def test_passes_of_a_search() -> None:
    """Two prompts of 3 and 5 tokens, 4 beams, two steps that read 20 and 24 tokens."""
    cost = ModelCost(layer_weights=100, head_weights=10, weight_bytes=440, kv_bytes=8, pair_flops=2)
    prompt, first, second = passes(cost, [3, 5], 4, [20, 24])
    assert prompt == Pass(bytes=440 + 8 * 8, flops=2 * (8 * 100 + 2 * 10) + 2 * (6 + 15))
    assert first == Pass(bytes=440 + 20 * 8, flops=2 * 8 * 110 + 2 * 4 * (4 + 6))
    assert second == Pass(bytes=440 + 24 * 8, flops=2 * 8 * 110 + 2 * 4 * (5 + 7))


def test_the_floor_takes_the_slower_of_both_in_each_pass() -> None:
    machine = Machine(bandwidth=10.0, peak=100.0)
    assert machine.floor([Pass(bytes=50, flops=100), Pass(bytes=10, flops=300)]) == 5.0 + 3.0


def test_live_tokens_are_those_that_steps_read() -> None:
    """The first step reads the prompt and one token of each beam; no step reads more than separate beams would."""
    model = random_model("tiny")
    inputs = random_prompts(model, 2, TINY.prompt_length)
    live = physics.live_of_steps(model, inputs, **TINY.settings)
    assert len(live) == TINY.new_tokens - 1
    assert live[0] == 2 * (7 + 3)
    assert all(2 * (7 + step + 3 - 1) <= read <= 2 * (7 + 3 * step) for step, read in enumerate(live, 1))
    greedy = physics.live_of_steps(model, inputs, **{**TINY.settings, "num_beams": 1})
    assert greedy == [2 * (7 + step) for step in (1, 2, 3)]


def test_physics_of_a_row() -> None:
    cost = ModelCost(layer_weights=100, head_weights=10, weight_bytes=440, kv_bytes=8, pair_flops=2)
    told = physics.told(cost, Machine(bandwidth=10.0, peak=1e9), [3, 5], 4, [20, 24])
    assert told["kv_bytes_read"] == 8 * 44
    assert told["kv_bytes_touched_by_stock"] == 3 * 8 * 4 * (4 + 6 + 5 + 7)
    assert told["floor_seconds"] == pytest.approx((504 + 600 + 632) / 10)


def test_the_machine_is_measured() -> None:
    machine = physics.measure_machine(torch.device("cpu"), torch.float32, mib=1, order=64)
    assert machine.bandwidth > 0 and machine.peak > 0


# --- Tables, of a tiny search ---


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    """One measured row, in this process, on a machine whose speed is given."""
    conditions = Conditions(engines=("stock", "plain"), rounds=2, threads=torch.get_num_threads())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(physics, "measure_machine", lambda *_, **__: Machine(bandwidth=1e10, peak=1e11))
        patch.setattr(Conditions, "prepare_process", lambda self: None)  # other tests read what is logged
        return harness.measure_cell(TINY, conditions)


def test_a_row_tells_what_ran(row: dict[str, Any]) -> None:
    stock, plain = row["engines"]["stock"], row["engines"]["plain"]
    assert stock["same"] and plain["same"]
    assert (stock["prompt_rows"], plain["prompt_rows"]) == (3, 1)
    assert stock["kv_bytes"] == 3 * (7 + 3) * row["physics"]["kv_bytes_per_token"]
    assert plain["live_kv_bytes"] <= plain["kv_bytes"] < stock["kv_bytes"]
    assert len(plain["rounds"]) == len(plain["ratios"]) == 2
    assert plain["over_floor"] == plain["seconds"] / row["physics"]["floor_seconds"]


def test_other_sequences_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers otherwise than stock is not "same"."""
    conditions = Conditions(engines=("stock", "plain"), rounds=1, threads=torch.get_num_threads())
    monkeypatch.setattr(physics, "measure_machine", lambda *_, **__: Machine(bandwidth=1e10, peak=1e11))
    monkeypatch.setattr(Conditions, "prepare_process", lambda self: None)
    shorter = {"custom_generate": "hf_paged_beam", "max_new_tokens": 2}
    patched = {"plain": shorter, "stock": {"max_new_tokens": 4}}
    monkeypatch.setattr(Conditions, "arguments_of", lambda self, engine: patched[engine])
    monkeypatch.setattr(Cell, "settings", {"num_beams": 3, "do_sample": False})
    monkeypatch.setattr(physics, "live_of_steps", lambda *_, **__: [10])
    engines = harness.measure_cell(TINY, conditions)["engines"]
    assert engines["stock"]["same"] and not engines["plain"]["same"]


def test_tables_print(row: dict[str, Any]) -> None:
    """Every table has a line for a row, with what was not measured left open."""
    assert compare.format_row(row).count("\n") == 2
    of_growth = {"series": "beams", "value": 3, "stock_skipped": None, **row}
    assert "plain" in growth.format_row(of_growth)
    skipped = {**of_growth, "stock_skipped": "not run: too long", "engines": {"plain": row["engines"]["plain"]}}
    assert "stock " not in growth.format_row(skipped) and "[not run: too long]" in growth.format_row(skipped)


def test_the_readme_table(row: dict[str, Any]) -> None:
    """With and without the column of the switches, and without peak memory."""
    plain = table.markdown({"cells": [row]}).splitlines()
    assert plain[0].count("|") == plain[1].count("|") == plain[2].count("|")
    assert "switches" not in plain[0] and plain[2].startswith("| tiny | 1 | 3 | 7 | 4 | ")
    assert plain[2].endswith("| – |") and "| 3 → 1 |" in plain[2]
    engines = {**row["engines"], "switches": {"ratio": 9.876}}
    switched = table.markdown({"cells": [{**row, "engines": engines}, row]}).splitlines()
    assert "with switches" in switched[0] and "| 9.88 |" in switched[2] and "| – | 3 → 1" in switched[3]


def test_figures_are_drawn_from_results(row: dict[str, Any], tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("benchmarks.plots")
    switches = {**row["engines"]["plain"], "peak_bytes": 2**22}
    full = {**row, "engines": {**row["engines"], "switches": switches}}
    cells = [{"series": name, "value": value, **full} for name in growth.SERIES for value in (2, 4)]
    del cells[-1]["engines"]["stock"]  # not run
    first = plots.draw("growth", {"cells": cells}, tmp_path).read_bytes()
    assert plots.draw("growth", {"cells": cells}, tmp_path).read_bytes() == first
    assert plots.draw("speed", {"cells": [full, row]}, tmp_path).stat().st_size > 1000


# --- The protocol and the growth series ---


def test_the_protocol_asks_short_prompts() -> None:
    lengths = protocol.random_lengths(200)
    assert min(lengths) >= 20 and max(lengths) < 100 and lengths[:3] == protocol.random_lengths(3)
    queries = protocol.random_queries(random_model("tiny"), [20, 30])
    assert [tuple(query["input_ids"].shape) for query in queries] == [(1, 20), (1, 30)]


def test_qwen3_has_the_shape_that_it_is_named_after() -> None:
    """1.7 billion numbers, of which the head, tied to the embedding, is 151,936 rows of 2,048; made on no memory."""
    model = random_model("qwen3-1.7b", device="meta")
    cost = ModelCost.of(model)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert cost.head_weights == 151_936 * 2048
    layer = 2048 * (16 + 8 + 8) * 128 + 16 * 128 * 2048 + 3 * 2048 * 6144
    assert cost.layer_weights == 28 * layer
    assert cost.kv_bytes == 2 * 28 * 8 * 128 * 4


def test_stock_is_left_out_beyond_a_limit() -> None:
    """The 8,192 tokens of 50 beams: three times 50 · 8,202 tokens of 16 KiB are 18.8 GiB."""
    limits = growth.Limits(gib=6.0, seconds=100.0)
    longest = growth.SERIES["prompt"][-1]
    assert growth.bytes_needed(longest, 16 * 2**10) == 3 * 50 * 8202 * 16 * 2**10
    assert "18.8 GiB" in (growth.why_not(longest, 16 * 2**10, None, limits) or "")
    assert growth.why_not(TINY, 16 * 2**10, 99.0, limits) is None
    assert "extrapolation" in (growth.why_not(TINY, 16 * 2**10, 101.0, limits) or "")


def test_extrapolation_is_by_the_last_two_points() -> None:
    """Quadratic growth goes on so; what grew less than linearly is taken for linear; of nothing, nothing is known."""
    assert growth.seconds_expected([], 4) is None
    assert growth.seconds_expected([(2, 3.0)], 4) == 6.0
    assert growth.seconds_expected([(2, 3.0), (4, 12.0)], 8) == pytest.approx(48.0)
    assert growth.seconds_expected([(2, 3.0), (4, 3.0)], 8) == pytest.approx(6.0)


def test_growth_says_where_both_are_greedy(monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]) -> None:
    asked: list[tuple[str, ...]] = []

    def measured(function: Any, cell: Cell, conditions: Conditions) -> dict[str, Any]:
        asked.append(conditions.engines)
        engines = {name: row["engines"][name] for name in conditions.engines if name in row["engines"]}
        return {**row, "engines": engines}

    monkeypatch.setattr(harness, "in_fresh_process", measured)
    cells = [Cell("tiny", 1, width, 7, 4) for width in (1, 2, 4096)]
    rows = growth.measure_series("beams", cells, Conditions(), growth.Limits(gib=0.01, seconds=1e9))
    assert asked == [("stock", "plain"), ("stock", "plain", "switches"), ("plain", "switches")]
    assert rows[0]["note"] == growth.GREEDY and "note" not in rows[1]
    assert rows[2]["stock_skipped"].startswith("not run: needs")


# --- Memory, and where the time goes ---


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    threads = torch.get_num_threads()
    told = peak.measure(TINY, "plain", Conditions(engines=("plain",), threads=threads), repeats=1)
    assert 0 < told["peak_bytes"] < 2**30 and told["stays_bytes"] <= told["peak_bytes"]


def test_a_process_that_fails_is_told() -> None:
    failed = subprocess.CompletedProcess([], 3, stdout="", stderr="no such cell")
    with pytest.raises(RuntimeError, match="3:\nno such cell"):
        peak._last_line(failed)


def test_the_clock_charges_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of 5 seconds with 2 in a product is 3 and 2; parts add up to the whole."""
    clock, now = breakdown.Clock(), [0.0]
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: now[0])

    def product() -> None:
        now[0] += 2

    def forward() -> None:
        now[0] += 1
        clock.wrapping(product, "products")()
        now[0] += 2

    clock.wrapping(forward, "rest")()
    assert clock.spent["products"] == 2 and clock.spent["rest"] == 3 and sum(clock.spent.values()) == now[0]
    with pytest.raises(ZeroDivisionError):
        clock.wrapping(lambda: 1 / 0, "index")()
    assert clock._running == []


@pytest.mark.parametrize("engine", ["plain", "switches", "stock"])
def test_the_breakdown_sees_every_part(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is wrapped is called as often as it must be, and everything is as it was afterwards."""
    model = random_model("tiny")
    inputs = random_prompts(model, 1, TINY.prompt_length)
    monkeypatch.setattr(capture, "BACKEND", "eager")
    ours = {} if engine == "stock" else {"custom_generate": "hf_paged_beam", "compile": engine == "switches"}

    def call() -> Any:
        return model.generate(**inputs, **TINY.settings, **ours)

    before = call()
    owners = {owner for owner, *_ in [*breakdown.WRAPPED, *breakdown.WRAPPED_OF_STOCK]}
    functions = {owner: dict(vars(owner)) for owner in owners}
    clock, seconds = breakdown.parts_of_call(call, model, engine)
    layers, linears, steps = 2, 7 * 2 + 1, TINY.new_tokens
    if engine == "switches":
        assert clock.entered["rest"] == steps and clock.entered["products"] == 0
    else:
        assert clock.entered["rest"] == steps and clock.entered["products"] == steps * linears
        assert clock.entered["attention"] == clock.entered["K/V"] == steps * layers
    assert clock.entered["selection"] == (0 if engine == "stock" else steps)
    assert sum(clock.spent.values()) <= seconds
    assert {owner: dict(vars(owner)) for owner in owners} == functions
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(call(), before)


def test_shares_are_of_the_call() -> None:
    spent = dict.fromkeys(breakdown.PARTS, 0.1)
    told = breakdown.shares([spent, spent])
    assert told["outside"] == pytest.approx(0.4) and told["unaccounted"] == pytest.approx(0.2)
    assert breakdown.goal_of(400, 32_000) == 0.05
    assert (breakdown.goal_of(100, 151_936), breakdown.goal_of(400, 151_936)) == (0.10, 0.20)


# --- Results ---

BEFORE_THE_HARNESS = {"kv_dtype.json", "mixed.json"}
"""Measured before results told their machine; a name goes when it is measured anew."""


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_tell_machine_versions_and_date(path: Any) -> None:
    results = json.loads(path.read_text())
    if results.get("run") is False:  # a file that says that it was never run
        assert results["note"]
        return
    datetime.date.fromisoformat(results["date"])
    if path.name not in BEFORE_THE_HARNESS:
        assert results["machine"]["cores"] >= 1 and results["machine"]["threads"] >= 1
        assert {"torch", "transformers"} <= set(results["versions"])


def test_results_are_kept_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str], row: dict[str, Any]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.publish("some", [row], Conditions(), record=False)
    assert not list(tmp_path.iterdir())
    harness.publish("some", [row], Conditions(), record=True, more=1)
    kept = json.loads((tmp_path / "some.json").read_text())
    assert kept == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert kept["more"] == 1 and kept["table"] == "some" and {"machine", "versions", "date"} <= set(kept)


def test_some_cells_are_recorded_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, row: dict[str, Any]
) -> None:
    """Those of another machine or day are not kept: one file is one machine on one day."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    other, anew = {**row, "num_beams": row["num_beams"] + 1}, {**row, "more": 1}
    assert harness.beside_recorded("some", [row], Conditions()) == [row]
    harness.publish("some", [row, other], Conditions(), record=True)
    assert harness.beside_recorded("some", [anew], Conditions()) == [anew, other]
    assert harness.beside_recorded("some", [anew], Conditions(threads=1)) == [anew]
