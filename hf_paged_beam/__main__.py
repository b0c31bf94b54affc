"""``python -m hf_paged_beam demo``: see real beams, and the same call by transformers beside it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from . import __version__, pronunciation
from .side_by_side import SideBySide, compare

WORDS = ["colonel", "research", "tomato", "hyperparameter"]
SHOWN = 5
BAD_ARGUMENTS = 2


class DemoError(Exception):
    """What is wrong with the demo's arguments, in words for its user."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hf_paged_beam", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hf_paged_beam {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="search with real beams, and compare with transformers' own search",
        description="Without --model: best pronunciations of English words by the small model in the package. "
        "With --model and --prompt: best continuations by any causal or sequence-to-sequence model.",
    )
    demo.add_argument("words", nargs="*", metavar="WORD", help=f"English words (default: {' '.join(WORDS)})")
    demo.add_argument("--model", metavar="PATH_OR_ID", help="a model folder or hub id, instead of the package's model")
    demo.add_argument("--prompt", metavar="TEXT", help="what that model shall continue or translate")
    demo.add_argument("--num-beams", type=int, default=50, metavar="N", help="beams per prompt (default: 50)")
    demo.add_argument("--max-new-tokens", type=int, default=24, metavar="N", help="longest answer (default: 24)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 for arguments that cannot work."""
    arguments = build_parser().parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return demo(arguments)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS


def demo(arguments: argparse.Namespace) -> int:
    """Print beams and the comparison."""
    for name in ("num_beams", "max_new_tokens"):
        if getattr(arguments, name) < (2 if name == "num_beams" else 1):
            raise DemoError(f"--{name.replace('_', '-')} must be larger, but is {getattr(arguments, name)}")
    if (arguments.model is None) != (arguments.prompt is None):
        raise DemoError("--model and --prompt belong together: give both, or neither")
    if arguments.model is not None and arguments.words:
        raise DemoError("WORD is for the package's own model: with --model, put the text into --prompt")
    model, tokenizer, texts = _load(arguments)
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs = {name: given for name, given in inputs.items() if name in ("input_ids", "attention_mask")}
    print(f"{len(texts)} prompt(s), {arguments.num_beams} beams, at most {arguments.max_new_tokens} new tokens")
    result = compare(
        model,
        inputs,
        rounds=2,
        num_beams=arguments.num_beams,
        num_return_sequences=min(SHOWN, arguments.num_beams),
        max_new_tokens=arguments.max_new_tokens,
        do_sample=False,
    )
    prompt_length = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    _print_beams(texts, result.ours, tokenizer, prompt_length)
    _print_comparison(result)
    return 0


def _load(arguments: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    if arguments.model is None:
        words = arguments.words or WORDS
        model, tokenizer = pronunciation.load()
        for word in words:
            if tokenizer.unk_token_id in tokenizer(word)["input_ids"] or not word:
                raise DemoError(f"{word!r} is no English word: letters, apostrophe, hyphen and full stop are known")
        return model, tokenizer, words
    try:
        config = AutoConfig.from_pretrained(arguments.model)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_pretrained(arguments.model, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        raise DemoError(f"--model {arguments.model}: {str(error).strip().splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer, [arguments.prompt]


def _print_beams(texts: list[str], output: Any, tokenizer: Any, prompt_length: int) -> None:
    shown = len(output.sequences) // len(texts)
    answers = tokenizer.batch_decode(output.sequences[:, prompt_length:], skip_special_tokens=True)
    scores = output.sequences_scores.tolist()  # host read: printing
    for number, text in enumerate(texts):
        print(f"\n{text}")
        for row in range(number * shown, (number + 1) * shown):
            print(f"  {scores[row]:8.3f}  {answers[row].strip()}")


def _print_comparison(result: SideBySide) -> None:
    if result.same_sequences:
        verdict = "the same beams"
    else:
        gap = result.largest_score_difference
        verdict = f"beams that differ, scores by at most {gap:.1e}{' (near ties)' if gap < 1e-4 else ''}"
    mebibytes = 2**20
    print(f"\ntransformers' own search returns {verdict}.")
    print(f"{'':24s}{'seconds':>10s}{'K/V MiB':>10s}")
    print(f"{'transformers':24s}{result.stock_seconds:10.3f}{result.stock_bytes / mebibytes:10.2f}")
    print(f"{'hf_paged_beam':24s}{result.our_seconds:10.3f}{result.our_bytes / mebibytes:10.2f}")
    print(f"{'ratio':24s}{result.ratio:10.1f}{result.stock_bytes / max(result.our_bytes, 1):10.1f}")


if __name__ == "__main__":
    sys.exit(main())
