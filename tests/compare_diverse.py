"""Compare diverse beam search with transformers 4.56.2, the last release that has it itself (later ones fetch it).

Tiny random models are saved, and the same calls run by the old release in an environment of its own and by this
package here. Sequences must be equal, near-ties apart, and scores to 1e-4.

    python tests/compare_diverse.py --build /some/folder               # make the environment there, then compare
    python tests/compare_diverse.py --old-python /some/folder/bin/python
    python tests/compare_diverse.py --old-python ... --oracle          # the old release against `diverse_oracle.py`
    python tests/compare_diverse.py --old-python ... --calls 200 llama t5

A line for each call, and a summary; the exit status is 1 if anything differs.

    OK        equal
    DIFF      sequences or scores differ; the first row that does follows
    FAILS     ours raises
    OLD       the old release raises
    SKIP      the oracle does not know the logits processor

What is known to differ and so evened out: the old release writes its first end token at the end of every finished
row, whichever ended it. Which calls these are is drawn by a seed; the end tokens are tokens that the model likes.

This file is run by both Pythons: the old one must not meet an import of this package, or of what needs it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    BartForConditionalGeneration,
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

OLD_RELEASE = "4.56.2"
CLASSES: dict[str, Any] = {
    "llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel, "bart": BartForConditionalGeneration,
    "t5": T5ForConditionalGeneration,
}  # fmt: skip
PAD, START, TOLERANCE = 0, 1, 1e-4
NO_CONTINUATION = -1e7
"""What is no real continuation has -1e9, over the length form, in the old release, and -inf here."""
WITHOUT_ENDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4}, {"renormalize_logits": True}, {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[17], [40, 41]]}, {"suppress_tokens": [7, 8, 9]}, {"forced_bos_token_id": 23},
    {"sequence_bias": [[[30], 1.5], [[12, 13], -2.0]]}, {"encoder_no_repeat_ngram_size": 1},
]  # fmt: skip
"""Settings that bring in a logits processor. Only `sequence_bias` stands before the penalty; most of the others see
another score, or leave another, for what was penalised. Not here is `encoder_repetition_penalty`, which the old
release applies to as many rows as there are prompts, and leaves the other beams alone."""
PROCESSORS = [
    *WITHOUT_ENDS, {"min_new_tokens": 3}, {"forced_eos_token_id": True},
    {"exponential_decay_length_penalty": (2, 1.2)},
]  # fmt: skip

Rows = list[tuple[float, tuple[int, ...]]]
"""Returned rows: score and generated tokens up to the first end token."""


def main() -> int:
    arguments = parsed(sys.argv[1:])
    if arguments.run_old is not None:
        run_old(arguments.run_old)
        return 0
    old_python = arguments.old_python or build(arguments.build)
    with tempfile.TemporaryDirectory() as folder:
        return compare(Path(folder), old_python, arguments)


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(CLASSES)}; all if none is named")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--old-python", help=f"a Python that has transformers {OLD_RELEASE}")
    where.add_argument("--build", help="a folder in which to make such an environment, by pip")
    where.add_argument("--run-old", type=Path, help=argparse.SUPPRESS)  # this file, run by the old Python
    parser.add_argument("--oracle", action="store_true", help="compare the old release with the oracle instead")
    parser.add_argument("--calls", type=int, default=60, help="calls of each kind of model")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other calls")
    arguments = parser.parse_args(words)
    unknown = sorted(set(arguments.kinds) - set(CLASSES))
    if unknown:
        parser.error(f"no such kinds of models: {unknown}; there are {', '.join(CLASSES)}")
    arguments.kinds = arguments.kinds or list(CLASSES)
    return arguments


def build(folder: str) -> str:
    """Make an environment with the old release, and the torch that runs here; returns its Python."""
    python = str(Path(folder) / "bin" / "python")
    torch_release = torch.__version__.split("+")[0]
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    wanted = [f"torch=={torch_release}", f"transformers=={OLD_RELEASE}", "safetensors"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True, env=own_environment())
    return python


def own_environment() -> dict[str, str]:
    """Without the variables by which one Python finds another's packages, and without a model hub."""
    kept = {name: given for name, given in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def compare(folder: Path, old_python: str, arguments: argparse.Namespace) -> int:
    """Print a line for each call; returns the exit status.

    Args:
        folder: an empty one, through which the two Pythons speak.
        old_python: of the old release.
        arguments: as given to this program.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models = {kind: saved(folder, kind) for kind in arguments.kinds}
    calls = [call for kind, model in models.items() for call in drawn_calls(kind, model, arguments)]
    old = old_results(folder, old_python, calls)
    print(f"transformers {old['release']} and {'the oracle' if arguments.oracle else transformers.__version__}")
    for kind, model in models.items():
        check_same_model(kind, model, torch.tensor(old["logits"][kind]))
    counted: collections.Counter[str] = collections.Counter()
    for call, theirs in zip(calls, old["rows"], strict=True):
        outcome, more = judged(models[call["kind"]], call, theirs, arguments.oracle)
        counted[outcome] += 1
        print(f"{outcome:5} {described(call)}{more}", flush=True)
    outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(counted.items()))
    print(f"in all: {outcomes}; {met(calls, old['rows'])}")
    return 1 if counted["DIFF"] or counted["FAILS"] or not counted["OK"] else 0


def saved(folder: Path, kind: str) -> Any:
    """A tiny model, saved for the old release, and loaded again as that one will load it."""
    from tiny_models import tiny_model  # not at the top: the old Python cannot import it

    tiny_model(kind).save_pretrained(folder / kind)
    return loaded(folder, kind)


def old_results(folder: Path, old_python: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """What `run_old` writes, run by the old Python."""
    (folder / "calls.json").write_text(json.dumps(calls))
    subprocess.run([old_python, __file__, "--run-old", str(folder)], check=True, env=own_environment())
    return json.loads((folder / "old.json").read_text())


def check_same_model(kind: str, model: Any, their_logits: torch.Tensor) -> None:
    """Print how far the two releases' logits are apart.

    Raises:
        RuntimeError: if they are not those of one model, so that there is no search to compare.
    """
    apart = (probe(model) - their_logits).abs().max().item()
    print(f"{kind}: logits differ by at most {apart:.1e}")
    if apart > TOLERANCE:
        raise RuntimeError(f"the two releases read different models from one checkpoint of {kind}: compare its configs")


def met(calls: list[dict[str, Any]], told: list[Any]) -> str:
    """How many of the old release's rows end by an end token, so that one sees that such were compared."""
    rows = [
        (tokens[-1] in (call["settings"]["eos_token_id"] or []), len(tokens) < call["settings"]["max_new_tokens"])
        for call, given in zip(calls, told, strict=True)
        if not isinstance(given, str)
        for _, tokens in given
    ]
    return (
        f"{len(rows)} rows, {sum(ends for ends, _ in rows)} with an end token, {sum(early for _, early in rows)} early"
    )


def loaded(folder: Path, kind: str) -> Any:
    """The model as saved, with settings of its own for no search: each call names all that it wants."""
    model = CLASSES[kind].from_pretrained(folder / kind).eval()
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, decoder_start_token_id=START if model.config.is_encoder_decoder else None
    )
    return model


def probe(model: Any) -> torch.Tensor:
    """Logits after a fixed prompt, to know that two releases mean the same by one checkpoint."""
    ids = torch.arange(11, 19).unsqueeze(0)
    start = {"decoder_input_ids": torch.tensor([[START, 21, 22]])} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **start).logits[0]


def liked_tokens(model: Any) -> list[int]:
    """Tokens that searches meet, the most frequent first: end tokens drawn from these do end sequences."""
    ids = torch.randint(6, 99, (8, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    found = model.generate(
        ids, attention_mask=mask, num_beams=6, num_return_sequences=6, max_new_tokens=8, do_sample=False
    )
    counted = collections.Counter(found[:, 1 if model.config.is_encoder_decoder else 5 :].flatten().tolist())
    return [token for token, _ in counted.most_common() if token not in (PAD, START)][:12]


def drawn_calls(kind: str, model: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    draw, liked = random.Random(f"{arguments.seed} {kind}"), liked_tokens(model)
    return [drawn_call(kind, number, draw, liked) for number in range(arguments.calls)]


def drawn_call(kind: str, number: int, draw: random.Random, liked: list[int]) -> dict[str, Any]:
    """One call as JSON: prompts, and settings that both releases know."""
    groups = draw.choice([2, 2, 3, 4])
    width = groups * draw.choice([1, 2, 2, 3])
    ends = draw.sample(liked, draw.choice([0, 1, 1, 3, 6]))
    rows = [draw.choices(range(6, 99), k=draw.randint(2, 7)) for _ in range(draw.randint(1, 3))]
    settings = {
        "num_beams": width,
        "num_beam_groups": groups,
        "diversity_penalty": draw.choice([0.2, 0.5, 1.0, 2.0]),
        "num_return_sequences": draw.choice([width, width, draw.randint(1, width)]),
        "max_new_tokens": draw.randint(1, 10),
        "early_stopping": draw.choice([True, False, "never"]),
        "length_penalty": draw.choice([0.0, 1.0, -1.0]),
        "eos_token_id": ends or None,
        "pad_token_id": draw.choice([PAD, PAD, ends[0]]) if ends else PAD,  # pads of closed groups count, too
    }
    if number % 3 == 2:
        settings.update(draw.choice(PROCESSORS if ends else WITHOUT_ENDS))
    if "forced_eos_token_id" in settings:
        settings["forced_eos_token_id"] = ends
    if "repetition_penalty" in settings:  # to the old release the padding of a prompt is a token that was seen
        rows = rows[:1]
    return {"kind": kind, "number": number, "rows": rows, "settings": settings}


def described(call: dict[str, Any]) -> str:
    settings = dict(call["settings"])
    shape = f"B={len(call['rows'])} W={settings.pop('num_beams')} G={settings.pop('num_beam_groups')}"
    return (
        f"{call['kind']}-{call['number']:02} {shape} {' '.join(f'{name}={given}' for name, given in settings.items())}"
    )


def inputs_of(model: Any, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Ids and mask, padded on the left, or for an encoder on the right."""
    longest = max(map(len, call["rows"]))
    ids = torch.zeros(len(call["rows"]), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(call["rows"]):
        where = slice(len(row)) if model.config.is_encoder_decoder else slice(longest - len(row), longest)
        ids[number, where], mask[number, where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def searched(model: Any, call: dict[str, Any], **only_here: Any) -> Rows:
    """The rows that ``model.generate`` returns, all prompts one after another."""
    settings = dict(call["settings"])
    if "sequence_bias" in settings:
        settings["sequence_bias"] = {tuple(tokens): bias for tokens, bias in settings["sequence_bias"]}
    inputs = inputs_of(model, call)
    output = model.generate(
        **inputs, **settings, **only_here, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    ends = settings["eos_token_id"] or []
    scores, sequences = output.sequences_scores.tolist(), output.sequences[:, start:].tolist()
    return [(score, shown(tokens, ends)) for score, tokens in zip(scores, sequences, strict=True)]


def shown(tokens: list[int] | tuple[int, ...], ends: list[int]) -> tuple[int, ...]:
    """A row up to its first end token, written as the first of `ends`, as the old release writes them all."""
    cut = next((place for place, token in enumerate(tokens) if token in ends), None)
    return tuple(tokens) if cut is None else (*tokens[:cut], ends[0])


def run_old(folder: Path) -> None:
    """What the old release does: logits of each kind, and the rows of each call, as JSON."""
    if transformers.__version__ != OLD_RELEASE:
        raise RuntimeError(f"--old-python has transformers {transformers.__version__}; it must be {OLD_RELEASE}")
    transformers.logging.set_verbosity_error()
    calls = json.loads((folder / "calls.json").read_text())
    models = {kind: loaded(folder, kind) for kind in {call["kind"] for call in calls}}
    told = {
        "release": transformers.__version__,
        "logits": {kind: probe(model).tolist() for kind, model in models.items()},
        "rows": [or_error(models[call["kind"]], call) for call in calls],
    }
    (folder / "old.json").write_text(json.dumps(told))


def or_error(model: Any, call: dict[str, Any]) -> Rows | str:
    """The rows of a call, or what it raises."""
    try:
        return searched(model, call)
    except Exception as error:
        return repr(error)


def judged(model: Any, call: dict[str, Any], told: list[Any] | str, by_oracle: bool) -> tuple[str, str]:
    """An outcome, and what more there is to say.

    Args:
        told: what the old release returned, from JSON: rows, or an error.
        by_oracle: whether the oracle stands in for this package.
    """
    if isinstance(told, str):
        return "OLD", f": {told}"
    theirs = [(score, tuple(tokens)) for score, tokens in told]
    try:
        mine = expected(model, call) if by_oracle else searched(model, call, custom_generate="hf_paged_beam")
    except NotImplementedError as error:
        return "SKIP", f": {error}"
    except Exception as error:
        return "FAILS", f": {error!r}"
    differs = next(differences(theirs, mine, call["settings"]["num_return_sequences"]), None)
    return ("OK", "") if differs is None else ("DIFF", f"\n      {differs}")


def differences(theirs: Rows, mine: Rows, count: int) -> Iterator[str]:
    """Rows that are not the same; rows of one prompt whose scores nearly tie may change places."""
    if len(mine) != len(theirs):
        yield f"{len(theirs)} rows and {len(mine)}"
        return
    for number, (their_row, my_row) in enumerate(zip(theirs, mine, strict=True)):
        first = number - number % count
        tied = [row for row in theirs[first : first + count] if near(row[0], their_row[0])]
        at_the_edge = len(tied) > 1 and tied[-1] is theirs[first + count - 1]  # its like may not have been returned
        same = at_the_edge or their_row[0] <= NO_CONTINUATION or my_row[1] in [tokens for _, tokens in tied]
        if not (same and near(their_row[0], my_row[0])):
            yield f"row {number}: old {their_row}, here {my_row}"


def near(one: float, other: float) -> bool:
    """Equal to rounding, or both no real continuation."""
    if min(one, other) <= NO_CONTINUATION:
        return max(one, other) <= NO_CONTINUATION
    return abs(one - other) <= TOLERANCE * max(1.0, abs(one))


def expected(model: Any, call: dict[str, Any]) -> Rows:
    """The rows that the oracle finds, each prompt alone.

    Raises:
        NotImplementedError: if the call asks for a logits processor that is not written down here.
    """
    from diverse_oracle import diverse_beam_search
    from oracle import Rules, from_model

    settings = call["settings"]
    ends = settings["eos_token_id"] or []
    rules = Rules(
        num_beams=settings["num_beams"], max_new_tokens=settings["max_new_tokens"], ends=ends,
        early_stopping=settings["early_stopping"], length_penalty=settings["length_penalty"],
    )  # fmt: skip
    rows: Rows = []
    for prompt in call["rows"]:
        start = [START] if model.config.is_encoder_decoder else []
        found = diverse_beam_search(
            from_model(model, {"input_ids": torch.tensor([prompt])}, start), rules, settings["num_beam_groups"],
            settings["diversity_penalty"], pad=settings["pad_token_id"],
            afterwards=behind_the_penalty(settings, start or prompt),
        )  # fmt: skip
        count = settings["num_return_sequences"]
        real = [(one.score, shown(one.tokens, ends)) for one in found[:count]]
        rows += real + [(-torch.inf, ())] * (count - len(real))
    return rows


def behind_the_penalty(settings: dict[str, Any], before: list[int]) -> Any:
    """What the call's logits processor, if any, makes of a penalised row.

    Args:
        settings: of the call.
        before: tokens of the decoder before the generated ones.
    """
    named = {name for processor in PROCESSORS for name in processor} & set(settings)
    if not named:
        return None
    (name,) = named
    processor = {
        "repetition_penalty": lambda tokens, row: repetition_penalty(row, {*before, *tokens}, settings[name]),
        "renormalize_logits": lambda tokens, row: torch.tensor(row, dtype=torch.float64).log_softmax(-1).tolist(),
        "min_new_tokens": lambda tokens, row: without(
            row, settings["eos_token_id"] if len(tokens) < settings[name] else []
        ),
        "suppress_tokens": lambda tokens, row: without(row, settings[name]),
        "forced_bos_token_id": lambda tokens, row: forced(
            row, [settings[name]] if len(before) == 1 > len(tokens) else []
        ),
        "forced_eos_token_id": lambda tokens, row: forced(
            row, settings[name] if len(tokens) + 1 == settings["max_new_tokens"] else []
        ),
    }.get(name)
    if processor is None:
        raise NotImplementedError(f"{name} is not written down for the oracle")
    return processor


def repetition_penalty(row: list[float], seen: set[int], factor: float) -> list[float]:
    return [(one * factor if one < 0 else one / factor) if token in seen else one for token, one in enumerate(row)]


def without(row: list[float], tokens: list[int]) -> list[float]:
    return [-torch.inf if token in tokens else one for token, one in enumerate(row)]


def forced(row: list[float], tokens: list[int]) -> list[float]:
    """Nothing but `tokens`, at log-probability 0; the row as it is if there are none."""
    return [0.0 if token in tokens else -torch.inf for token in range(len(row))] if tokens else row


if __name__ == "__main__":
    sys.exit(main())
