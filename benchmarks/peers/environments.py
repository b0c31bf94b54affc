"""What the peers need: an environment each, and the benchmarks' models in their formats.

    DIR/ctranslate2/                    a virtual environment
    DIR/openvino/                       another
    DIR/models/30m/transformers/        the model as saved by transformers, with a vocabulary
    DIR/models/30m/ctranslate2/         the same weights, converted
    DIR/models/30m/openvino/

Where a step fails, a file NAME.failed beside what it should have made says why; the table shows it. Building again
tries again, and makes only what is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ..models import SHAPES, random_llama


@dataclasses.dataclass(frozen=True)
class Peer:
    """An engine with an environment of its own.

    Attributes:
        name: of its environment and of its models' format.
        requirements: what pip installs, beside torch, which converts.
        converter: command of the environment that converts a model; ``{source}`` and ``{target}`` are folders.
    """

    name: str
    requirements: tuple[str, ...]
    converter: tuple[str, ...]


PEERS = {
    "ctranslate2": Peer(
        "ctranslate2",
        ("ctranslate2==4.8.5", "transformers==4.57.6"),
        ("ct2-transformers-converter", "--model", "{source}", "--output_dir", "{target}", "--quantization", "float32"),
    ),
    "openvino": Peer(
        "openvino",
        ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "transformers==5.5.4"),
        ("optimum-cli", "export", "openvino", "--model", "{source}", "--task", "text-generation-with-past",
         "--weight-format", "fp32", "{target}"),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Environments:
    """The folder of environments and models."""

    root: Path

    def python(self, peer: str) -> Path:
        return self.root / peer / "bin" / "python"

    def model(self, shape: str, form: str) -> Path:
        """Folder of a model, in the format of a peer or of transformers."""
        return self.root / "models" / shape / form

    def missing(self, peer: str | None, shape: str) -> str | None:
        """Why a model cannot be run by a peer, or by transformers (None); None where it can."""
        needed = [self.model(shape, "transformers")]
        if peer:
            needed += [self.root / peer, self.model(shape, peer)]
        for made in needed:
            note = _note_of(made)
            if note.exists():
                return note.read_text().strip()
            if not made.exists():
                return f"{made.relative_to(self.root)} is not there: make it with --build"
        return None

    def build(self, shapes: list[str], torch_requirement: str) -> bool:
        """Make what is missing. True if all of it is there now."""
        made = [self._make(self.model(shape, "transformers"), functools.partial(save, shape)) for shape in shapes]
        for peer in PEERS.values():
            environment = self.root / peer.name
            made.append(self._make(environment, functools.partial(install, peer, torch_requirement)))
            for shape in shapes if made[-1] else []:
                source = self.model(shape, "transformers")
                made.append(
                    self._make(self.model(shape, peer.name), functools.partial(convert, peer, environment, source))
                )
        return all(made)

    def _make(self, target: Path, make: Callable[[Path], None]) -> bool:
        """Make a folder, or leave a note why not. What was begun and not finished is made anew."""
        name, note = target.relative_to(self.root), _note_of(target)
        if target.exists() and not note.exists():
            print(f"{name}: there already", flush=True)
            return True
        print(f"{name}: being made", flush=True)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("its making was interrupted: build it again with --build\n")
        try:
            make(target)
        except Exception as error:
            note.write_text(f"{error}\n")
            print(f"{name}: failed: {error}", flush=True)
            return False
        note.unlink()
        return True


def _note_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.failed")


def install(peer: Peer, torch_requirement: str, target: Path) -> None:
    """A virtual environment with a peer in it."""
    _run([sys.executable, "-m", "venv", str(target)])
    pip = [str(target / "bin" / "python"), "-m", "pip"]
    _run([*pip, "install", "--quiet", torch_requirement])  # first, so that the peer takes this build of it
    _run([*pip, "install", "--quiet", torch_requirement, *peer.requirements])
    # A converter may ask for torchvision, of which the index may hold a build for another torch only. Then transformers
    # fails on it, and works without.
    if subprocess.run([*pip[:1], "-c", "import torchvision"], capture_output=True).returncode:
        _run([*pip, "uninstall", "--quiet", "--yes", "torchvision"])


def convert(peer: Peer, environment: Path, source: Path, target: Path) -> None:
    """The same weights in a peer's format."""
    program, *arguments = (part.format(source=source, target=target) for part in peer.converter)
    _run([str(environment / "bin" / program), *arguments])


def save(shape: str, target: Path) -> None:
    """A random model, and a vocabulary that names each token by its number; converters will not do without one."""
    random_llama(shape).save_pretrained(target)
    vocabulary = {f"t{token}": token for token in range(SHAPES[shape]["vocab_size"])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    unset = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t0", "unk_token": "t0"}
    (target / "tokenizer.json").write_text(json.dumps({**tokenizer, **unset}))
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


def _run(command: list[str]) -> None:
    """Raises:
    RuntimeError: the command's last words, where it ends in an error.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        words = [line for line in done.stdout.splitlines() if line.strip()][-2:]
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {' / '.join(words)[:300]}")
