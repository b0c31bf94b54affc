"""What storing keys and values in fewer bytes costs: how far scores move, and which answers change.

    python -m benchmarks.kv_dtype                                  # the pronunciation model, on its held-out words
    python -m benchmarks.kv_dtype --model tests/.models/smollm2    # a chat model, on the questions below
    ... --record "pronunciation model"                             # also write benchmarks/results/kv_dtype.json

Each stored dtype searches the same prompts. Its best sequences are scored anew by one forward pass in float32 without
a cache, so that what is reported is what was lost, not what the rounded search believed:

    same       prompts whose best sequence is that of the unrounded search
    lost       mean of (score of the unrounded search's best sequence - that of the rounded search's), nats per token
    believed   largest difference between the score that the rounded search gave a sequence and its score anew
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged_beam
from hf_paged_beam import pronunciation
from hf_paged_beam.cache import KV_DTYPES

from .harness import record_of_run

RESULTS = Path(__file__).parent / "results" / "kv_dtype.json"
WORDS = (
    "abacus bewilder chrysalis daughter enough fuchsia gnome hierarchy isthmus jalapeno knight leisure mnemonic "
    "nuisance onomatopoeia pneumonia queue rendezvous subtle thorough unique vehicle wednesday xylophone yacht "
    "zucchini acquiesce bourgeois colonel debris epitome facade genre hyperbole indict juxtapose kaleidoscope "
    "lieutenant maneuver niche ocean pseudonym quinoa receipt segue tsunami unctuous victuals worcester yolk"
).split()
QUESTIONS = (
    "What is the capital of France?", "Name three colours.", "How do birds fly?", "Write one sentence about the sea.",
    "What is two plus two?", "Who wrote Hamlet?", "Why is the sky blue?", "Give a synonym of fast.",
    "What do bees make?", "Explain gravity to a child.", "Which animals live in Africa?", "What is a prime number?",
    "How is bread made?", "Translate good morning into French.", "What is the largest ocean?", "When do leaves fall?",
)  # fmt: skip


def prompts(folder: Path | None) -> tuple[Any, list[dict[str, torch.Tensor]], int]:
    """A model in float32, its prompts, one by one, and how many tokens to generate."""
    if folder is None:
        model, tokenizer = pronunciation.load()
        return model, [dict(tokenizer([word], return_tensors="pt")) for word in WORDS], 32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]
    encoded = [dict(tokenizer(text, return_tensors="pt", add_special_tokens=False)) for text in texts]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), encoded, 20


@torch.no_grad()
def score_anew(model: Any, ids: torch.Tensor, prompt_length: int) -> tuple[float, int]:
    """Mean log-probability of what follows the prompt, up to the first end token, and its length."""
    ends = torch.as_tensor(model.generation_config.eos_token_id).view(-1)
    generated = ids[prompt_length:]
    ended = torch.isin(generated, ends).nonzero().flatten().tolist()
    length = ended[0] + 1 if ended else generated.shape[0]
    ids = ids[: prompt_length + length]
    log_probs = model(ids.unsqueeze(0), use_cache=False).logits[0, prompt_length - 1 : -1].float().log_softmax(-1)
    return log_probs.gather(1, ids[prompt_length:, None]).mean().item(), length


def measure(model: Any, encoded: list[dict[str, torch.Tensor]], tokens: int, num_beams: int) -> list[dict[str, Any]]:
    """One row per dtype that keys and values can be stored in."""
    found: dict[str, list[tuple[torch.Tensor, float, float]]] = {}
    bytes_held = {}
    for stored in (None, *KV_DTYPES):
        name = stored or "as computed"
        for number, inputs in enumerate(encoded, 1):
            output = hf_paged_beam.generate(
                model, **inputs, num_beams=num_beams, max_new_tokens=tokens, do_sample=False, kv_dtype=stored,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            anew, _ = score_anew(model, output.sequences[0], inputs["input_ids"].shape[1])
            found.setdefault(name, []).append((output.sequences[0], output.sequences_scores[0].item(), anew))
            bytes_held[name] = output.kv_usage.bytes_separate
            print(f"\r{name}: {number}/{len(encoded)}   ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return [_row(name, found, bytes_held) for name in found]


def _row(name: str, found: dict[str, list], bytes_held: dict[str, int]) -> dict[str, Any]:
    whole, mine = found["as computed"], found[name]
    lost = [theirs[2] - ours[2] for theirs, ours in zip(whole, mine, strict=True)]
    return {
        "stored": name,
        "bytes": bytes_held[name] / bytes_held["as computed"],
        "same": sum(torch.equal(theirs[0], ours[0]) for theirs, ours in zip(whole, mine, strict=True)),
        "prompts": len(mine),
        "lost": sum(lost) / len(lost),
        "believed": max(abs(score - anew) for _, score, anew in mine),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a chat model of transformers' format")
    parser.add_argument("--num-beams", type=int, default=10)
    parser.add_argument("--record", metavar="NAME", help="keep the rows among the results, under this model's name")
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    rows = measure(*prompts(arguments.model), arguments.num_beams)
    print(f"{'stored':14s} {'bytes':>6s} {'same':>8s} {'lost':>9s} {'believed':>9s}")
    for row in rows:
        same = f"{row['same']}/{row['prompts']}"
        print(f"{row['stored']:14s} {row['bytes']:6.2f} {same:>8s} {row['lost']:9.5f} {row['believed']:9.5f}")
    print(json.dumps(rows))
    if arguments.record:
        record(arguments.record, rows, arguments.num_beams)
    return 0


def record(name: str, rows: list[dict[str, Any]], num_beams: int) -> None:
    """Put the rows of one model among the committed results."""
    kept = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    results = {
        **record_of_run(torch.get_num_threads()),
        "num_beams": num_beams,
        "models": {**kept, name: rows},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def markdown(results: dict[str, Any]) -> str:
    """The table of the docs."""
    lines = [
        "| model | stored as | bytes | best sequence the same | lost, nats per token | believed |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in results["models"].items():
        for row in rows:
            lines.append(
                f"| {name} | {row['stored']} | {row['bytes']:.2f} | {row['same']} of {row['prompts']} | "
                f"{row['lost']:.4f} | {row['believed']:.4f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
