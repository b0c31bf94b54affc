"""The side of the benchmark that asks: one process for each worker, of which only one computes at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..models import SHAPES
from .environments import Environments

HERE = Path(__file__).parent
IDLE_SHARE = 0.02
"""Of a core: a worker that uses more while it waits disturbs the others' rounds."""

WAIT_QUIETLY = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
"""OpenMP's threads spin while they wait for each other, and after their work; with these they sleep at once."""

SPIN_SECONDS = 0.3
"""After this long without work they sleep by themselves; Intel's OpenMP spins 0.2 s."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A column of the table.

    Attributes:
        name: of the column; a worker with several engines is asked for it by this name.
        worker: which worker runs it.
        peer: its environment, None for that of the package.
    """

    name: str
    worker: str
    peer: str | None = None


ENGINES = [
    Engine("stock", "transformers"),
    Engine("plain", "transformers"),
    Engine("switches", "transformers"),
    Engine("ctranslate2", "ctranslate2", "ctranslate2"),
    Engine("openvino-sdpa", "openvino-sdpa", "openvino"),
    Engine("openvino-paged", "openvino-paged", "openvino"),
]


def command_of(engine: Engine, environments: Environments, shape: str, threads: int) -> list[str]:
    """The command of an engine's worker for a model."""
    model = str(environments.model(shape, engine.peer or "transformers"))
    counted = ["--threads", str(threads)]
    if engine.peer is None:
        return [sys.executable, "-m", "benchmarks.peers.transformers_worker", model, "--shape", shape, *counted]
    command = [str(environments.python(engine.peer)), str(HERE / f"{engine.peer}_worker.py"), model, *counted]
    attention = {"openvino-sdpa": "SDPA", "openvino-paged": "PA"}.get(engine.name)
    return [*command, "--attention", attention] if attention else command


class Worker:
    """A process that has loaded a model, waits for a search to be asked for, and answers.

    Args:
        command: of the process, which speaks `answering`'s protocol.
        threads: of OpenMP in it.
        limit_seconds: how long an answer, or loading, may take; then the process is ended.
        spin: leave OpenMP's waiting as it is by default; after each answer its spinning is waited out.

    Attributes:
        failure: why it can no longer be asked; None while it can.
        versions: of its libraries.
        idle_seconds, idle_cpu_seconds: how long it has waited between an answer and the next question, and what it
            computed meanwhile.
    """

    def __init__(self, command: list[str], threads: int, limit_seconds: float, *, spin: bool = False) -> None:
        self._limit = limit_seconds
        self._settle = SPIN_SECONDS if spin else 0.0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **({} if spin else WAIT_QUIETLY), "OMP_NUM_THREADS": str(threads)},
        )
        self.failure: str | None = None
        self.idle_seconds = self.idle_cpu_seconds = 0.0
        told = self._told()
        self.failure = told.get("failed")
        self.versions: dict[str, str] = told.get("versions", {})
        self._idle_since = self._clocks()

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer; ``{"failed": why}`` from a worker that has failed, now or earlier."""
        if self.failure:
            return {"failed": self.failure}
        self._count_idle()
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and reading says so
            os.write(self._process.stdin.fileno(), json.dumps(asked).encode() + b"\n")
        told = self._told()
        time.sleep(self._settle)
        self._idle_since = self._clocks()
        return told

    def close(self) -> None:
        """End the process: this one, and no other."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            pipe.close()

    def _told(self) -> dict[str, Any]:
        try:
            return json.loads(self._line())
        except TimeoutError:
            self._process.kill()
            self.failure = f"no answer within {self._limit:.0f} s"
        except EOFError:
            self.failure = f"its process ended with {self._process.wait()}: {self._last_words()}"
        return {"failed": self.failure}

    def _line(self) -> bytes:
        """The next line of its output."""
        output, deadline = self._process.stdout.fileno(), time.monotonic() + self._limit
        while b"\n" not in self._unread:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(output, 2**16)
            if not piece:
                raise EOFError
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

    def _clocks(self) -> tuple[float, float]:
        """Time, and what the process has computed so far, seconds of all its threads (Linux)."""
        if self.failure:
            return time.monotonic(), 0.0
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return time.monotonic(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _count_idle(self) -> None:
        now, computed = self._clocks()
        self.idle_seconds += now - self._idle_since[0]
        self.idle_cpu_seconds += computed - self._idle_since[1]


class NoWorker:
    """Stands where a worker could not be started, and says why when asked.

    Args:
        failure: why.
    """

    def __init__(self, failure: str) -> None:
        self.failure = failure
        self.versions: dict[str, str] = {}
        self.idle_seconds = self.idle_cpu_seconds = 0.0

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"failed": self.failure}

    def close(self) -> None:
        """Nothing to end."""


def stock_kv_bytes(shape: str, rows: int, tokens: int) -> int:
    """Bytes of float32 keys and values that transformers' own search holds at the end: each row its whole sequence.

    Args:
        shape: name of a model's shape.
        rows: `B · W`.
        tokens: `P + T`.
    """
    sizes = SHAPES[shape]
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return 2 * 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head * rows * tokens
