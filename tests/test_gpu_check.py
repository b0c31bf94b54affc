"""The script for a GPU runs: at tiny sizes on a CPU, where its timings mean nothing but its counts and scores do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from tiny_models import prompts, shared_model

from benchmarks import gpu_check
from benchmarks.gpu_check import BEAMS, DTYPES, ENDS, MODELS, OURS, PARTS, is_equal, rescored

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[str], dict]:
    """Exit status, printed lines and the written file of one run on a CPU."""
    folder = tmp_path_factory.mktemp("gpu")
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(folder))
        patch.setattr("builtins.print", lambda *words, **options: printed.append(" ".join(map(str, words))))
        status = gpu_check.main(["--device", "cpu", "--tiny", "--compile", "off"])
    return status, printed, json.loads((folder / "gpu.json").read_text())


def test_all_parts_run_on_a_cpu(run_once: tuple) -> None:
    """The last line is the results, as the file holds them; every part is complete and has rows."""
    status, printed, written = run_once
    assert status == 0
    assert json.loads(printed[-1]) == written
    assert list(written["parts"]) == list(PARTS) == ["correctness", "protocol", "wide", "floor", "reads"]
    for part in written["parts"].values():
        assert part["complete"] and part["rows"]
        assert not [name for row in part["rows"] for name in row if name.endswith("error")]
    assert written["run"] and written["tiny"] and written["device"] == "cpu"
    assert written["engines"] == ["stock", "eager"]
    assert set(written["versions"]) == {"torch", "cuda", "transformers", "hf_paged_beam"}


def test_results_are_compared_with_stock(run_once: tuple) -> None:
    """Every model, dtype and stopping rule, by our search and not by the one that it hands over to."""
    rows = run_once[2]["parts"]["correctness"]["rows"]
    assert len(rows) == len(MODELS) * len(DTYPES) * 3
    assert all(row["equal"] and row["path"] in ("folded", "gathered") for row in rows)
    assert all(row["same_sequences"] for row in rows if row["dtype"] == "float32")


def test_counts_and_ratios_are_told(run_once: tuple) -> None:
    """One read a step, no capture; the floor is the bytes over the bandwidth."""
    parts = run_once[2]["parts"]
    ours = next(row for row in parts["reads"]["rows"] if row["engine"] == "eager")
    assert ours["reads_per_step"] == 1.0 and ours["met"]
    assert ours["captures_of_the_first_two_calls"] == ours["replays_of_a_later_call"] == 0
    (step,) = parts["floor"]["rows"]
    floor = 1e3 * (step["weight_bytes"] + step["kv_bytes"]) / parts["floor"]["bytes_per_second"]
    assert step["floor_milliseconds"] == pytest.approx(floor)
    assert step["eager_over_floor"] == pytest.approx(step["eager_milliseconds"] / floor)
    for row in parts["protocol"]["rows"]:
        rates = [row[f"{name}_queries_per_second"] for name in ("eager", "stock")]
        assert row["stock_over_eager"] == pytest.approx(rates[0] / rates[1])


def test_a_run_without_a_place_for_results_keeps_the_committed_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only a run of full size on a GPU replaces them."""
    monkeypatch.delenv("OUT", raising=False)
    assert gpu_check.results_path(CPU, tiny=True) is None
    assert gpu_check.results_path(CPU, tiny=False) is None
    assert gpu_check.results_path(torch.device("cuda"), tiny=True) is None
    assert gpu_check.results_path(torch.device("cuda"), tiny=False) == gpu_check.RESULTS
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.results_path(CPU, tiny=True) == tmp_path / "gpu.json"


def test_parts_of_one_run_share_a_file(tmp_path: Path) -> None:
    """What an earlier process of the same run found stays, cut or not; of another run nothing does."""
    path = tmp_path / "gpu.json"
    first = gpu_check.Report(path, run_id="7", told={})
    first.begin("wide")
    first.add({"num_beams": 3})  # and here it was cut
    second = gpu_check.Report(path, run_id="7", told={})
    second.begin("reads")
    second.end()
    parts = json.loads(path.read_text())["parts"]
    assert parts["wide"] == {"complete": False, "rows": [{"num_beams": 3}]}
    assert parts["reads"]["complete"]
    for run_id in ("8", None):
        gpu_check.Report(path, run_id=run_id, told={}).begin("floor")
        assert list(json.loads(path.read_text())["parts"]) == ["floor"]


@pytest.mark.parametrize("kind", MODELS)
def test_rescoring_gives_the_scores_of_the_search(kind: str) -> None:
    """One pass over whole sequences, padding and ends included, sums to what transformers' search said."""
    model, inputs = shared_model(kind), prompts(kind, 6, 9)
    found = model.generate(
        **inputs, num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=8, eos_token_id=ENDS, do_sample=False,
        early_stopping=True, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert torch.allclose(rescored(model, inputs, found.sequences), found.sequences_scores, atol=1e-5)


def test_a_wrong_result_is_found() -> None:
    """Scores that differ in float32, a mean that is another or NaN in either dtype."""
    good = {"largest_score_difference": 1e-6, "stock_mean": -1.5, "our_mean": -1.51}
    assert is_equal(good, torch.float32) and is_equal(good, torch.bfloat16)
    assert not is_equal({**good, "largest_score_difference": 1e-3}, torch.float32)
    assert is_equal({**good, "largest_score_difference": 1e-3}, torch.bfloat16)
    for mean in (-1.6, -1.4, float("nan")):
        assert not is_equal({**good, "our_mean": mean}, torch.bfloat16)
    assert not is_equal({**good, "largest_score_difference": float("nan")}, torch.float32)


def test_an_engine_that_fails_is_told_of_and_the_others_run() -> None:
    """Its row says why; a result that is wrong fails the run."""

    def run(engine: str) -> None:
        if engine == "compiled":
            raise RuntimeError("cannot capture")

    check = gpu_check.Check(device=CPU, sizes=gpu_check.SMALL, engines=("stock", *OURS))
    row: dict = {}
    assert check.working(check.engines, run, row) == ["stock", "eager"]
    assert row["compiled_error"] == "RuntimeError: cannot capture"
    report = gpu_check.Report(None, run_id=None, told={})
    report.begin("correctness")
    report.add({"equal": True})
    assert not report.failed
    report.add({"equal": False})
    assert report.failed


def test_the_shell_script() -> None:
    """It can be read by bash, runs every part, and its limits are under six minutes together."""
    script = Path(gpu_check.__file__).with_suffix(".sh")
    subprocess.run(["bash", "-n", str(script)], check=True)
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("for part in ")]
    limits = dict(part.split(":") for part in line.removeprefix("for part in ").split(";")[0].split())
    assert list(limits) == list(PARTS)
    assert sum(map(int, limits.values())) < 360


def test_committed_results_say_what_they_are() -> None:
    """Either of a run of full size on a GPU, or that there was none."""
    results = json.loads(gpu_check.RESULTS.read_text())
    if not results["run"]:
        assert "never run" in results["note"] and set(results) == {"run", "note"}
        return
    assert not results["tiny"] and results["device"] != "cpu"
    assert all(results[name] for name in ("date", "versions", "parts"))
