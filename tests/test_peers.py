"""The benchmark against other engines, untimed and without them: workers, turns, rows, the printed table."""

import ast
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.compare import Cell
from benchmarks.models import SHAPES, random_llama
from benchmarks.peers import environments, table
from benchmarks.peers.__main__ import main
from benchmarks.peers.environments import Environments, Peer, convert
from benchmarks.peers.processes import ENGINES, NoWorker, Worker, command_of, stock_kv_bytes
from benchmarks.peers.transformers_worker import Transformers

PEERS = Path(environments.__file__).parent
ASKED = {"prompts": [[1, 2, 3], [4, 5, 6]], "beams": 2, "new_tokens": 2, "engine": "fake"}

FAKE = """
import os, sys, threading, time
from answering import serve

class Fake:
    versions = {"fake": "1.0"}

    def prepare(self, asked):
        if asked["beams"] > 4:
            raise ValueError("at most 4 beams,\\nbut got more")
        return lambda: self.search(asked)

    def search(self, asked):
        print("this is not an answer", flush=True)
        os.write(1, b"neither is this, and it is not even a line")
        return [[prompt[-1]] * asked["new_tokens"] for prompt in asked["prompts"]]

    def sequences(self, found):
        return found

def load():
    BODY
    return Fake()

serve(load)
"""


def spin():
    """Source of a `load` that leaves a thread computing."""
    return "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes a worker of the fake engine; `body` is run when it loads."""
    monkeypatch.setenv("PYTHONPATH", str(PEERS))  # a real one lies beside `answering`
    made = []

    def make(body="pass", limit_seconds=60.0):
        script = tmp_path / "fake_worker.py"
        script.write_text(textwrap.dedent(FAKE).replace("BODY", body))
        made.append(Worker([sys.executable, str(script)], 1, limit_seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_worker_answers_and_what_its_libraries_print_is_no_answer(worker):
    fake = worker()
    assert fake.failure is None and fake.versions == {"fake": "1.0"}
    for _ in range(2):
        answer = fake.ask(ASKED)
        assert answer["sequences"] == [[3, 3], [6, 6]] and answer["seconds"] >= 0


def test_a_failed_search_is_an_answer_and_the_next_one_works(worker):
    fake = worker()
    assert fake.ask({**ASKED, "beams": 5}) == {"failed": "ValueError: at most 4 beams, but got more"}
    assert fake.ask(ASKED)["sequences"] == [[3, 3], [6, 6]]


def test_an_engine_that_cannot_be_loaded_says_why(worker):
    fake = worker("raise ImportError('no such engine')")
    assert fake.failure == "ImportError: no such engine"
    assert fake.ask(ASKED) == {"failed": "ImportError: no such engine"}


def test_a_worker_that_ends_says_how(worker):
    fake = worker("print('out of memory', file=sys.stderr, flush=True); os._exit(3)")
    assert fake.failure == "its process ended with 3: out of memory"


def test_a_worker_that_does_not_answer_is_ended(worker):
    fake = worker("time.sleep(60)", limit_seconds=0.5)
    assert fake.failure == "no answer within 0 s" or fake.failure == "no answer within 1 s"
    assert "failed" in fake.ask(ASKED)


def test_idle_workers_are_watched(worker):
    """One that sleeps, and one that computes while it waits."""
    shares = {}
    for name, body in (("asleep", "pass"), ("computing", spin())):
        fake = worker(body)
        time.sleep(0.5)
        fake.ask(ASKED)
        shares[name] = table.idle_share(fake)
    assert shares["asleep"] < table.IDLE_SHARE < shares["computing"]


class Scripted:
    """A worker that knows its answers: seconds of each engine's turns, the warm-up's first."""

    def __init__(self, seconds, sequences=((1, 2),)):
        self.seconds = {name: list(turns) for name, turns in seconds.items()}
        self.answer = [list(sequence) for sequence in sequences]
        self.asked = []

    def ask(self, asked):
        self.asked.append(asked)
        seconds = self.seconds[asked["engine"]].pop(0)
        return {"failed": "broke"} if seconds is None else {"seconds": seconds, "sequences": self.answer}


CELL = Cell.parse("tiny,1,2,20,2")


def turns(workers, rounds=3, **plan):
    engines = tuple(engine for engine in ENGINES if engine.worker in workers and engine.name != "switches")
    return table.take_turns(CELL, table.Plan(engines, rounds=rounds, **plan), workers)


def test_rounds_are_paired_and_sequences_compared():
    workers = {
        "transformers": Scripted({"stock": [9, 4, 6, 8], "plain": [9, 2, 2, 2]}),
        "ctranslate2": Scripted({"ctranslate2": [9, 8, 3, 4]}, sequences=[(1, 3)]),
        "openvino-sdpa": Scripted({"openvino-sdpa": [9, 4, 4, 4]}),
        "openvino-paged": Scripted({"openvino-paged": [9, 3, 3, 3]}),
    }
    found = table.summary(turns(workers))
    assert found["engines"]["stock"] == {"seconds": 6, "ratio": 1.0, "ratios": [1, 1, 1], "same": True}
    assert found["engines"]["plain"] == {"seconds": 2, "ratio": 3.0, "ratios": [2, 3, 4], "same": True}
    assert found["engines"]["ctranslate2"] == {"seconds": 4, "ratio": 2.0, "ratios": [0.5, 2, 2], "same": False}
    assert (found["fastest"], found["openvino_best"]) == ("plain", "openvino-paged")


def test_an_engine_that_fails_has_no_more_turns_and_the_others_have():
    workers = {
        "transformers": Scripted({"stock": [9, 4, 4, 4], "plain": [9, 2, 2, 2]}),
        "ctranslate2": Scripted({"ctranslate2": [9, 1, None, 1]}),
        "openvino-sdpa": NoWorker("openvino is not there"),
    }
    found = table.summary(turns(workers))["engines"]
    assert found["ctranslate2"] == {"failed": "broke"} and len(workers["ctranslate2"].asked) == 3
    assert found["openvino-sdpa"] == {"failed": "openvino is not there"}
    assert found["plain"]["ratio"] == 2


def test_without_stock_there_are_seconds_and_no_ratios():
    workers = {"transformers": Scripted({"stock": [None], "plain": [9, 2, 2, 2]})}
    assert table.summary(turns(workers))["engines"] == {"stock": {"failed": "broke"}, "plain": {"seconds": 2}}


def test_heavy_stock_runs_in_fewer_rounds_and_warms_up_on_less(monkeypatch):
    monkeypatch.setattr(table, "HEAVY_BYTES", 1.0)
    worker = Scripted({"stock": [9, 6, 4], "plain": [9, 2, 2, 1]})
    found = table.summary(turns({"transformers": worker}, stock_rounds=2))["engines"]
    assert found["plain"]["ratios"] == [3, 2, 5] and found["stock"]["ratios"] == [1, 1]  # the third: of 6 and 4
    lengths = {name: [len(asked["prompts"][0]) for asked in worker.asked if asked["engine"] == name] for name in found}
    assert lengths == {"stock": [2, 20, 20], "plain": [20, 20, 20, 20]}


def test_who_starts_moves_on_with_each_round():
    worker = Scripted({"stock": [1] * 4, "plain": [1] * 4})
    turns({"transformers": worker})
    assert [asked["engine"] for asked in worker.asked][2:] == ["stock", "plain", "plain", "stock", "stock", "plain"]


def test_the_heavy_cell_of_the_table():
    """160m, 50 beams, 1000 tokens: 12 layers of 8 heads of 64, keys and values, 4 bytes each."""
    assert stock_kv_bytes("160m", 50, 1010) == 12 * 8 * 64 * 2 * 4 * 50 * 1010
    assert [str(cell) for cell in table.CELLS if table.is_heavy(cell)] == ["160m,1,50,1000,10"]
    assert len({str(cell) for cell in table.CELLS}) == 12


def test_prompts_are_the_same_for_all_and_not_of_each_other():
    cell = Cell.parse("30m,3,2,50,1")
    prompts = table.prompts_of(cell)
    assert prompts == table.prompts_of(cell) and len({tuple(prompt) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {50} and min(min(prompt) for prompt in prompts) > 0


def test_a_printed_row():
    row = {
        **{
            field: getattr(CELL, field) for field in ("model", "batch_size", "num_beams", "prompt_length", "new_tokens")
        },
        "engines": {
            "stock": {"seconds": 1.5, "ratio": 1.0},
            "plain": {"seconds": 0.5, "ratio": 3.0, "same": True},
            "ctranslate2": {"failed": "no space"},
            "openvino-sdpa": {"seconds": 1.0, "ratio": 1.5, "same": False},
            "openvino-paged": {"failed": "no space"},
        },
        "fastest": "plain",
        "openvino_best": "openvino-sdpa",
        "idle_share": {"transformers": 0.5, "openvino-sdpa": 0.0},
    }
    line = table.format_row(row)
    assert line.split()[:10] == ["tiny", "1", "2", "20", "2", "1.500", "3.00", "-", "-", "1.50"]
    assert line.split()[10:12] == ["s", "plain"]
    assert line.endswith(
        "openvino-sdpa: not stock's sequences; failed: ctranslate2, openvino-paged: no space; "
        "transformers used 50% of a core while it waited"
    )
    assert len(line[: line.index("  plain")]) == len(table.HEADER[: table.HEADER.index("  fastest")])


def test_what_is_missing_is_named_and_a_failed_step_leaves_its_reason(tmp_path):
    there = Environments(tmp_path)
    assert there.missing(None, "tiny").startswith("models/tiny/transformers is not there")
    environments.save("tiny", tmp_path / "models" / "tiny" / "transformers")
    assert there.missing(None, "tiny") is None
    assert there.missing("openvino", "tiny").startswith("openvino is not there")

    def fail(target):
        target.mkdir()
        raise RuntimeError("no space")

    def interrupt(target):
        target.mkdir()
        raise KeyboardInterrupt

    assert not there._make(tmp_path / "openvino", fail)
    assert there.missing("openvino", "tiny") == "no space"
    with pytest.raises(KeyboardInterrupt):
        there._make(tmp_path / "openvino", interrupt)
    assert there.missing("openvino", "tiny").startswith("its making was interrupted")
    assert there._make(tmp_path / "openvino", Path.mkdir)  # which would fail on a folder that is there
    assert there._make(tmp_path / "openvino", fail)  # there already
    assert there.missing("openvino", "tiny").startswith("models/tiny/openvino is not there")


def test_a_converter_that_fails_gives_its_last_words(tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "converter"
    program.write_text('#!/bin/sh\necho "converting $1 to $2"\necho "no such layer" >&2\nexit 4\n')
    program.chmod(0o755)
    peer = Peer("peer", (), ("converter", "{source}", "{target}"))
    with pytest.raises(RuntimeError, match=r"converter ended with 4: converting a to b / no such layer"):
        convert(peer, tmp_path, Path("a"), Path("b"))


def test_our_worker_runs_the_saved_model_and_its_engines_agree(tmp_path):
    environments.save("tiny", tmp_path)
    engine = Transformers(tmp_path, "tiny", 1)
    asked = {"prompts": [[5, 6, 7], [8, 9, 10]], "beams": 3, "new_tokens": 4}
    found = {name: engine.sequences(engine.prepare({**asked, "engine": name})()) for name in ("stock", "plain")}
    assert found["stock"] == found["plain"]
    assert [len(sequence) for sequence in found["plain"]] == [4, 4]
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == SHAPES["tiny"]["vocab_size"] == random_llama("tiny").config.vocab_size


@pytest.mark.parametrize("name", ["ctranslate2_worker", "openvino_worker", "answering"])
def test_peers_scripts_import_nothing_of_ours(name):
    """Their environments do not have it."""
    tree = ast.parse((PEERS / f"{name}.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    roots = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    roots |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert not any(getattr(node, "level", 0) for node in imports)
    allowed = {"answering", "ctranslate2", "openvino", "openvino_genai", "numpy"} | sys.stdlib_module_names
    assert {root.partition(".")[0] for root in roots} <= allowed


def test_every_engine_has_a_command(tmp_path):
    there = Environments(tmp_path)
    commands = {engine.worker: command_of(engine, there, "30m", 2) for engine in ENGINES}
    assert commands["openvino-paged"][-2:] == ["--attention", "PA"]
    assert commands["openvino-sdpa"][-2:] == ["--attention", "SDPA"]
    assert commands["ctranslate2"][0] == str(tmp_path / "ctranslate2" / "bin" / "python")
    for command in commands.values():
        assert command[0] == sys.executable or Path(command[1]).exists()


def test_arguments_that_make_no_sense_are_refused(tmp_path, capsys):
    for wrong, words in (
        ([], "required"),
        (["--rounds", "0"], "--rounds must be at least 1, but got 0"),
        (["--record", "--only", "30m,1,2,3,4"], "leave out --only"),
    ):
        with pytest.raises(SystemExit):
            main([*(["--environments", str(tmp_path)] if wrong else []), *wrong])
        assert words in capsys.readouterr().err


def test_a_table_without_any_environment_says_so(tmp_path, capsys):
    assert main(["--environments", str(tmp_path), "--only", "tiny,1,2,3,4", "--rounds", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    results = json.loads(told[-1])
    assert "models/tiny/transformers is not there" in told[-2]
    assert {"date", "machine", "versions", "cells", "dtype"} <= set(results)
    assert all("failed" in engine for engine in results["cells"][0]["engines"].values())


def test_the_worker_of_the_package_is_a_module(tmp_path):
    """As the benchmark starts it: a model that is not there is an answer, not a silence."""
    command = command_of(ENGINES[0], Environments(tmp_path), "tiny", 1)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=PEERS.parents[1])
    assert "FileNotFoundError" in json.loads(done.stdout)["failed"]
