"""Draws the figures of docs/search.md, each from searches run here. Needs matplotlib.

    python docs/figures/draw_search.py            all of them
    python docs/figures/draw_search.py trie       some

They are PNG files in docs/figures/search.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers import BartConfig, BartForConditionalGeneration
from transformers.utils import logging

import hf_paged_beam
from hf_paged_beam import pronunciation

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen

FOLDER = Path(__file__).parent / "search"
SIZE = (6.4, 2.9)  # inches
DARK, GREY = "#000000", "#8a8a8a"

model, tokenizer = pronunciation.load()


def lexicon(count: int) -> dict[str, list[str]]:
    """The first words of the held-out list, with their accepted pronunciations."""
    return dict(itertools.islice(pronunciation.held_out().items(), count))


def search(words: Sequence[str], **settings: Any) -> Any:
    """As on the page."""
    inputs = tokenizer(list(words), return_tensors="pt", padding=True)
    call = dict(num_beams=4, max_new_tokens=24, do_sample=False, output_scores=True, return_dict_in_generate=True)
    return model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **{**call, **settings},
        custom_generate="hf_paged_beam",
    )  # fmt: skip


def generated(found: Any) -> list[tuple[int, ...]]:
    """Generated ids of each row, without what fills it; an empty row is no sequence."""
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    begin = found.sequences.shape[1] - found.beam_indices.shape[1]
    return [tuple(row[begin : begin + length].tolist()) for row, length in zip(found.sequences, lengths, strict=True)]


def new_axes(width: float = SIZE[0]) -> Any:
    _, axes = pyplot.subplots(figsize=(width, SIZE[1]), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def draw_trie() -> None:
    """Which share of rows at each rank is an item, with a trie and without."""
    words = lexicon(300)
    items = sorted({tuple(tokenizer.convert_tokens_to_ids(one.split())) for spoken in words.values() for one in spoken})
    trie = hf_paged_beam.TokenTrie.from_sequences([list(item) for item in items], eos_token_id=tokenizer.eos_token_id)
    known = {(*item, tokenizer.eos_token_id) for item in items}
    asked, width = list(words)[:60], 8
    axes = new_axes()
    for trie_given, colour, line, marker, label in (
        (trie, DARK, "-", "o", "with a trie"),
        (None, GREY, "--", "s", "without"),
    ):
        own = {} if trie_given is None else {"trie": trie_given}
        rows = generated(search(asked, num_beams=width, num_return_sequences=width, **own))
        share = [sum(row in known for row in rows[rank::width]) / len(asked) for rank in range(width)]
        axes.plot(range(1, width + 1), share, color=colour, linestyle=line, marker=marker, label=label)
    axes.set(xlabel="rank of the returned sequence", ylabel="share that is an item", ylim=(-0.04, 1.08))
    axes.set_title(f"{len(items)} items, {len(asked)} prompts, {width} beams", fontsize=10)
    axes.legend(frameon=False, loc="center right")


def rows_of_steps(words: Sequence[str], **settings: Any) -> list[int]:
    """Rows of each decode step of the model."""
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, given, named: rows.append(len(named["input_ids"])), with_kwargs=True
    )
    try:
        search(words, **settings)
    finally:
        hook.remove()
    return rows[1:]  # the first is the prompt's


def draw_per_prompt() -> None:
    """How many rows the model runs in each step, for four prompts that want different numbers of beams."""
    words, widths = ["read", "tomato", "hyperparameter", "encyclopaedia"], [2, 4, 16, 8]
    search(words, num_beams=2)  # the first search of a model tries both of its read paths
    axes = new_axes()
    plain = {"output_scores": False}
    for beams, colour, line, label in (
        (max(widths), GREY, "--", f"num_beams={max(widths)}"),
        (widths, DARK, "-", f"num_beams={widths}"),
    ):
        rows = rows_of_steps(words, num_beams=beams, **plain)
        axes.step(range(1, len(rows) + 1), rows, where="mid", color=colour, linestyle=line, linewidth=2, label=label)
    axes.set(xlabel="decode step", ylabel="rows of the model", ylim=(0, 72))
    axes.set_title("four prompts", fontsize=10)
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.72))


def draw_diverse() -> None:
    """Different sequences among four groups of one beam, and what the best of them cost, against the penalty."""
    words, penalties = list(lexicon(60)), [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]
    distinct, tokens = [], []
    for penalty in penalties:
        rows = generated(search(words, num_beam_groups=4, diversity_penalty=penalty, num_return_sequences=4))
        of_words = [rows[4 * place : 4 * place + 4] for place in range(len(words))]
        distinct.append(sum(len(set(own)) for own in of_words) / len(words))
        tokens.append(sum(_distinct_share(own) for own in of_words) / len(words))
    axes = new_axes()
    axes.plot(penalties, distinct, color=DARK, marker="o", label="different sequences (left)")
    axes.set(xlabel="diversity_penalty (nats)", ylabel="different sequences of 4", ylim=(0.8, 4.2))
    right = axes.twinx()
    right.spines["top"].set_visible(False)
    right.plot(penalties, tokens, color=GREY, linestyle="--", marker="s", label="different token pairs (right)")
    right.set(ylabel="share of different pairs", ylim=(0, 1))
    lines = axes.get_lines() + right.get_lines()
    axes.legend(lines, [line.get_label() for line in lines], frameon=False, loc="upper left")
    axes.set_title(f"4 groups of one beam, mean of {len(words)} words", fontsize=10)


def _distinct_share(rows: Sequence[tuple[int, ...]]) -> float:
    """Different pairs of neighbouring tokens over all pairs (distinct-2)."""
    pairs = [pair for row in rows for pair in itertools.pairwise(row)]
    return len(set(pairs)) / len(pairs)


def draw_stochastic() -> None:
    """Estimates of the expected length: mean and spread over repetitions, against the number of sequences drawn."""
    word, repetitions, counts = "villafuerte", 60, [2, 4, 8, 16, 32, 64]
    torch.manual_seed(0)
    drawn = {"do_sample": True, "sampling": "stochastic_beam", "output_scores": False}
    bands: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for count in counts:
        found = search([word] * repetitions, num_beams=count, num_return_sequences=count, **drawn)
        lengths = (found.beam_indices >= 0).sum(1).double()
        for normalize, band in bands.items():
            estimates = hf_paged_beam.estimate(lengths, found, normalize=normalize)
            band.append((float(estimates.mean()), float(estimates.std())))
    best = search([word], num_beams=800, num_return_sequences=800, **drawn)
    weights, lengths = best.sequences_log_probs.exp().double(), (best.beam_indices >= 0).sum(1)
    truth = float((weights * lengths).sum() / weights.sum())
    _draw_bands(counts, bands, truth, f"'{word}', {repetitions} repetitions; 800 drawn hold {weights.sum():.3f} of all")


def _draw_bands(counts: list[int], bands: dict[bool, list[tuple[float, float]]], truth: float, title: str) -> None:
    axes = new_axes()
    styles = {False: (DARK, "o", 0.97, "unbiased"), True: (GREY, "s", 1.03, "normalize=True")}
    for normalize, (colour, marker, shift, label) in styles.items():
        means, spreads = zip(*bands[normalize], strict=True)
        style = dict(color=colour, marker=marker, capsize=4, linestyle="none", label=label)
        axes.errorbar([count * shift for count in counts], means, yerr=spreads, **style)
    axes.axhline(truth, color=DARK, linewidth=0.8, linestyle=":", label="from 800 sequences")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="sequences drawn", ylabel="expected length (tokens)")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, loc="upper right")


def draw_patience() -> None:
    """Steps of a search, and the probability that its n-best list holds, against patience."""
    words, width = list(lexicon(60)), 4
    patience = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0]
    steps, held = [], []
    for given in patience:
        own = [
            search([word], num_beams=width, num_return_sequences=width, early_stopping=True, patience=given)
            for word in words
        ]
        steps.append(sum(len(found.scores) for found in own) / len(words))
        held.append(sum(map(_probability, own)) / len(words))
    axes = new_axes()
    axes.plot(patience, steps, color=DARK, marker="o", label="steps (left)")
    axes.set(xlabel="patience", ylabel="steps of the search")
    right = axes.twinx()
    right.spines["top"].set_visible(False)
    right.plot(patience, held, color=GREY, linestyle="--", marker="s", label="probability held (right)")
    right.set(ylabel="probability of the 4 together")
    lines = axes.get_lines() + right.get_lines()
    axes.legend(lines, [line.get_label() for line in lines], frameon=False, loc="lower right")
    axes.set_title(f"{width} beams, mean of {len(words)} words", fontsize=10)


def _probability(found: Any) -> float:
    """Of all returned sequences together."""
    there = found.sequences_scores > -torch.inf
    return float(found.token_logprobs.sum(1).exp()[there].sum())


def tiny_translator() -> BartForConditionalGeneration:
    """The random model of the page."""
    torch.manual_seed(2)
    config = BartConfig(
        vocab_size=12, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None, init_std=0.5,
    )  # fmt: skip
    translator = BartForConditionalGeneration(config).eval()
    translator.set_attn_implementation("eager")
    return translator


def draw_coverage() -> None:
    """Cross-attention of the best sequence without and with the penalty, and how far each source token is covered."""
    translator, source = tiny_translator(), torch.tensor([[4, 5, 6, 7, 8, 9]])
    _, columns = pyplot.subplots(1, 2, figsize=(6.4, 3.6), layout="constrained", sharey=True)
    for axes, penalty in zip(columns, (0.0, 0.5), strict=True):
        sequences = translator.generate(
            source, num_beams=4, max_new_tokens=8, coverage_penalty=penalty, custom_generate="hf_paged_beam"
        )
        with torch.no_grad():
            maps = translator(source, decoder_input_ids=sequences[:, :-1], output_attentions=True).cross_attentions
        attention = maps[-1][0].mean(0)  # [T, S]
        image = axes.imshow(attention.T, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        covered = attention.sum(0).clamp(max=1).tolist()
        axes.set_xticks(range(attention.shape[0]), sequences[0, 1:].tolist())
        axes.set_yticks(range(source.shape[1]), source[0].tolist())
        for place, share in enumerate(covered):
            axes.text(attention.shape[0] - 0.3, place, f"{share:.2f}", va="center", fontsize=9)
        axes.set_title(f"coverage_penalty={penalty}", fontsize=10, pad=16)
        axes.text(attention.shape[0] - 0.3, -0.72, "covered", fontsize=8, ha="left")
        axes.set_xlabel("generated token (id)")
    columns[0].set_ylabel("source token (id)")
    columns[1].figure.colorbar(image, ax=list(columns), label="attention", pad=0.02)


def draw_length_reward() -> None:
    """Mean length of the best sequence against the reward, and that of the right pronunciations."""
    words, rewards = lexicon(60), [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0]
    axes = new_axes()
    for width, colour, line, marker in ((2, GREY, "--", "s"), (8, DARK, "-", "o")):
        lengths = []
        for reward in rewards:
            found = search(
                list(words), num_beams=width, length_normalization="none", length_reward=reward, early_stopping="never"
            )
            lengths.append(sum(len(row) - 1 for row in generated(found)) / len(words))  # without the end token
        axes.plot(rewards, lengths, color=colour, linestyle=line, marker=marker, label=f"{width} beams")
    right = sum(len(spoken[0].split()) for spoken in words.values()) / len(words)
    axes.axhline(right, color=DARK, linewidth=0.8, linestyle=":", label="the dictionary's")
    axes.set(xlabel="length_reward (nats per token)", ylabel="mean length (phonemes)")
    axes.set_title(f"{len(words)} words, length_normalization='none', early_stopping='never'", fontsize=10)
    axes.legend(frameon=False, loc="upper left")


def draw_trace() -> None:
    """The tree of the page's search."""
    found = search(["tomato"], num_beams=3, num_return_sequences=2, max_new_tokens=16, return_beam_trace=True)
    found.beam_trace.plot(0, tokenizer)


FIGURES = {name.removeprefix("draw_"): draw for name, draw in list(globals().items()) if name.startswith("draw_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *FIGURES], help="figures to draw (default: all)")
    logging.set_verbosity_error()
    FOLDER.mkdir(exist_ok=True)
    for name in parser.parse_args().names or FIGURES:
        FIGURES[name]()
        path = FOLDER / f"{name}.png"
        pyplot.gcf().savefig(path, dpi=110, pil_kwargs={"optimize": True})
        pyplot.close("all")
        print(path.name, math.ceil(path.stat().st_size / 1024), "KB")


if __name__ == "__main__":
    main()
