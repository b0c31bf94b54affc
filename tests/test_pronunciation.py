"""The model in the package: loads, pronounces held-out words as well as its card says, and gives stock's beams."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from comparing import check_equal, search_both

from hf_paged_beam import pronunciation
from hf_paged_beam.__main__ import main
from hf_paged_beam.pronunciation.evaluate import accuracy, pronounce
from hf_paged_beam.pronunciation.train import build_tokenizer, read_dictionary, split_words


def held_out() -> dict[str, list[list[str]]]:
    """The test words that ship with the package, phonemes apart."""
    return {word: [text.split() for text in accepted] for word, accepted in pronunciation.held_out().items()}


def test_accuracy_on_held_out_words() -> None:
    """At least 55% right at once and 80% within the best ten; near what the card says of all 5,000 words."""
    model, tokenizer = pronunciation.load()
    listed = held_out()
    words = list(listed)
    answers = pronounce(model, tokenizer, words, num_beams=10)
    top, best_of_ten = accuracy(answers, words, listed, 1), accuracy(answers, words, listed, 10)
    measured = json.loads((pronunciation.FOLDER / "evaluation.json").read_text())
    whole = next(row for row in measured["widths"] if row["num_beams"] == 10)
    assert top >= 0.55 and best_of_ten >= 0.80
    assert abs(top - whole["top_1"]) < 0.08 and abs(best_of_ten - whole["best_of_10_accuracy"]) < 0.05


def test_the_card_says_what_was_measured() -> None:
    """Every percentage of the card's table stands in the evaluation's record."""
    card = (pronunciation.FOLDER.parent / "README.md").read_text()
    rows = json.loads((pronunciation.FOLDER / "evaluation.json").read_text())["widths"]
    for row in rows:
        line = next(line for line in card.splitlines() if line.startswith(f"| {row['num_beams']} |"))
        assert re.findall(r"[\d.]+(?= %)", line) == [f"{100 * row[name]:.1f}" for name in ("top_1", "best_of_accuracy")]
    record = json.loads((pronunciation.FOLDER / "training.json").read_text())
    for number in (record["parameters"], record["training_words"], record["training_pronunciations"]):
        assert f"{number:,}" in card
    weights = pronunciation.FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 4 * 2**20 and 1e6 <= record["parameters"] <= 2e6


def test_the_same_beams_as_stock() -> None:
    """Fifty beams of eight words, left-padded."""
    model, tokenizer = pronunciation.load()
    inputs = tokenizer(list(held_out())[:8], return_tensors="pt", padding=True)
    stock, ours = search_both(model, dict(inputs), num_beams=50, num_return_sequences=50, max_new_tokens=24)
    check_equal(stock, ours)
    assert ours.beam_path == "folded"


def test_training_data_is_read_and_split_by_word(tmp_path: Path) -> None:
    """Comments, variants, stress marks and spellings with digits."""
    lines = ["read R EH1 D # past", "read(2) R IY1 D", "a.m. EY2 EH1 M", "3d TH R IY1 D IY1", "reads R IY1 D Z"]
    path = tmp_path / "cmudict.dict"
    path.write_text("\n".join(lines))
    listed = read_dictionary(path)
    assert listed == {
        "read": [["R", "EH", "D"], ["R", "IY", "D"]],
        "a.m.": [["EY", "EH", "M"]],
        "reads": [["R", "IY", "D", "Z"]],
    }
    assert sorted(word for part in split_words(listed) for word in part) == sorted(listed)
    assert split_words(listed) == split_words(dict(reversed(listed.items())))


def test_the_tokenizer_is_the_one_that_training_builds() -> None:
    """Letters in, phonemes out; capitals are folded, other signs are unknown."""
    _, tokenizer = pronunciation.load()
    built = build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    ids = tokenizer("Cat")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["c", "a", "t", "<sep>"]
    phonemes = tokenizer.convert_tokens_to_ids(["K", "AE", "T", "<eos>"])
    assert tokenizer.decode(phonemes, skip_special_tokens=True) == "K AE T"
    assert tokenizer.unk_token_id in tokenizer("c4t")["input_ids"]


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """Words, scores, the comparison with transformers, exit code 0."""
    torch.manual_seed(0)
    assert main(["demo", "beam", "search", "--num-beams", "4", "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr().out
    assert "B IY M" in printed and "S ER CH" in printed
    assert "the same beams" in printed and "K/V MiB" in printed and "ratio" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "naïve"], "naïve"),
        (["demo", "beam", "--num-beams", "1"], "--num-beams"),
        (["demo", "beam", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["demo", "--prompt", "text"], "--model and --prompt"),
        (["demo", "beam", "--model", "x", "--prompt", "y"], "WORD"),
        (["demo", "--model", "/no/such/folder", "--prompt", "y"], "/no/such/folder"),
    ],
)
def test_what_the_demo_refuses(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and a message that names the argument."""
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
