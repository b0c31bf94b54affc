"""Compare the package with transformers' own beam search on every architecture that transformers registers.

For each causal and sequence-to-sequence model class a tiny random model is built, a batch of two padded prompts is
searched by both, and all beams' scores and sequences are compared.

    python tests/sweep_architectures.py                                  # all: a line each, and a summary
    python tests/sweep_architectures.py llama t5 mistral                 # only these model types
    python tests/sweep_architectures.py --markdown docs/compatibility.md # also write the table of the docs

Outcomes:
    OK        equal, on a path of ours: folded, gathered or recurrent
    HANDED    equal, because transformers' own search ran; the reason follows
    DIFF      scores or sequences differ
    FAILS     transformers' search runs, ours raises or hangs
    STOCK     transformers' search cannot run this tiny model
    UNBUILT   no tiny model could be made
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

import hf_paged_beam  # noqa: F401  registers the name

BEAMS, STEPS, EOS, TOLERANCE = 4, 8, 5, 1e-3
SECONDS = 60
"""Longest time that one architecture may take, building included."""

TINY = dict(
    vocab_size=99, hidden_size=32, n_embd=32, d_model=32, num_hidden_layers=2, n_layer=2, num_layers=2, n_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, num_key_value_heads=2, multi_query_group_num=2,
    head_dim=16, intermediate_size=37, ffn_dim=37, n_inner=37, d_ff=37, ffn_hidden_size=37,
    max_position_embeddings=128, n_positions=128, n_ctx=128, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1,
    n_shared_experts=1, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    sliding_window=5, word_embed_proj_dim=32, attention_window=8, attention_dropout=0.0, decoder_layers=2,
    decoder_attention_heads=4, decoder_ffn_dim=37, shared_expert_intermediate_size=24, partial_rotary_factor=0.5,
    encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=37, num_decoder_layers=2, d_kv=8,
    decoder_start_token_id=1, max_source_positions=20, max_target_positions=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
"""Sizes, given to every configuration that has such a field."""

LEFT_OUT = object()
"""In `PARTICULAR`: a field of `TINY` that this configuration does not take."""

_EQUAL_HEADS = dict(num_key_value_heads=4)
_WIDE_EXPERTS = dict(moe_intermediate_size=32, intermediate_size=32, shared_expert_intermediate_size=32)
_PROPHETNET = dict(
    num_hidden_layers=LEFT_OUT, num_encoder_layers=2, num_decoder_layers=2, ngram=1, num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
)  # fmt: skip
PARTICULAR: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk1", "axk2", "bailing_hybrid", "glm4_moe_lite",
         "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "sarvam_mla", "youtu", "helium"),
        _EQUAL_HEADS,
    ),
    **dict.fromkeys(
        ("aria_text", "cohere2_moe", "deepseek_v4", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa",
         "granitemoeshared", "inkling2_loop_text", "inkling2_text", "minimax", "minimax_m2", "minimax_m3_vl_text",
         "mixtral", "olmoe", "phimoe"),
        _WIDE_EXPERTS,
    ),
    "bamba": dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, attn_layer_indices=[1]),
    "codegen": dict(rotary_dim=4),
    "falcon": dict(head_dim=LEFT_OUT),
    "falcon_h1": dict(
        mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=16,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=8),
    "gptj": dict(rotary_dim=4),
    "helium": dict(num_key_value_heads=4, head_dim=8),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8, num_experts=2, moe_topk=1),
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=4, intermediate_size=32,
    ),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "ministral": dict(head_dim=8),
    "moshi": dict(ffn_dim=38),
    "nemotron": dict(num_key_value_heads=2, head_dim=8),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], lru_width=32, attention_window_size=8),
    "xlnet": dict(max_position_embeddings=LEFT_OUT),
    "xmod": dict(default_language="en_XX"),
    "prophetnet": _PROPHETNET,
    "xlm-prophetnet": _PROPHETNET,
}  # fmt: skip
"""What a model type needs beside `TINY`, or in its place; set even where its configuration shows no such field."""

TOO_SLOW_TO_BUILD = {
    "blt", "fuyu", "gemma3", "gemma4", "gemma4_unified", "gemma4_unified_assistant", "mllama", "git", "got_ocr2",
    "moss_transcribe_diarize", "phi4_multimodal", "audioflamingo3", "glmasr", "granite_speech",
    "granite_speech_plus", "musicflamingo", "nemo_speechlm", "omniasr", "qwen2_audio", "qwen3_asr", "t5gemma",
    "t5gemma2", "vibevoice_asr", "voxtral", "voxtral_realtime", "encoder-decoder",
}  # fmt: skip
"""Their default configurations hold whole towers; tests with configurations of their own look at some of them."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        kind: OK, HANDED, DIFF, FAILS, STOCK or UNBUILT.
        detail: the path that ran, or the reason.
        gap: largest difference of the scores of all beams.
    """

    kind: str
    detail: str
    gap: float | None = None

    def __str__(self) -> str:
        gap = "" if self.gap is None else f" (scores within {self.gap:.1e})"
        return f"{self.kind} {self.detail}{gap}".replace("\n", " ")


class Timeout(BaseException):
    """Raised by the alarm; no `Exception`, so that nothing takes it for a failure of the model."""


def tiny_config(config_class: type) -> Any:
    """A tiny configuration of this class, all kinds of layers included, or an error."""
    base = config_class()
    sizes = {
        name: size
        for name, size in TINY.items()
        if (current := _field(base, name)) is not None
        and not callable(current)
        and not isinstance(current, (list, dict))
    }
    sizes |= {**PARTICULAR.get(base.model_type, {}), "pad_token_id": 0}
    sizes = {name: size for name, size in sizes.items() if size is not LEFT_OUT}
    kinds = list(dict.fromkeys(getattr(base, "layer_types", None) or []))
    if not kinds or "layer_types" in sizes:
        return config_class(**sizes)
    layers = (kinds * 2)[:2] if len(kinds) <= 2 else kinds
    counted = {name: len(layers) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in sizes}
    try:
        return config_class(**{**sizes, **counted, "layer_types": layers})
    except Exception:
        return config_class(**sizes)


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:
        return None


def tiny_model(config_class: type, model_class: type) -> Any:
    """A tiny random model of this class, peaked enough that beams differ, or an error."""
    config = tiny_config(config_class)
    torch.manual_seed(0)
    model = model_class(config).eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > 60e6:
        raise RuntimeError(f"{count / 1e6:.0f} million parameters are too many")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.tie_weights()
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = EOS, 0, None
    settings.forced_eos_token_id = settings.forced_bos_token_id = None
    if config.is_encoder_decoder:
        settings.decoder_start_token_id = 1
    return model


def compare(stock: Any, ours: Any) -> tuple[float, bool]:
    """Largest difference of scores, and whether sequences agree wherever scores do not nearly tie."""
    theirs = torch.where(stock.sequences_scores <= -1e8, -torch.inf, stock.sequences_scores)
    mine = torch.where(ours.sequences_scores <= -1e8, -torch.inf, ours.sequences_scores)
    gap = torch.where(theirs == mine, torch.zeros_like(theirs), (theirs - mine).abs()).max().item()
    if stock.sequences.shape != ours.sequences.shape:
        return gap, False
    for row in (stock.sequences != ours.sequences).any(-1).nonzero().flatten().tolist():
        if ((theirs - theirs[row]).abs() < TOLERANCE).sum() < 2 and torch.isfinite(theirs[row]):
            return gap, False
    return gap, True


def outcome(config_class: type, model_class: type, seq2seq: bool) -> Outcome:
    """Build, search twice, compare."""
    try:
        model = tiny_model(config_class, model_class)
    except Exception as error:
        return Outcome("UNBUILT", _one_line(error))
    torch.manual_seed(1)
    prompts = torch.randint(6, model.config.get_text_config().vocab_size, (2, 7))
    mask = torch.ones_like(prompts)
    mask[1, slice(-3, None) if seq2seq else slice(3)] = 0
    call = dict(
        attention_mask=mask, num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=STEPS, do_sample=False,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    try:
        stock = model.generate(prompts, **call)
    except Exception as error:
        return Outcome("STOCK", _one_line(error))
    try:
        ours = model.generate(prompts, custom_generate="hf_paged_beam", **call)
    except Timeout:
        return Outcome("FAILS", "hangs")
    except Exception as error:
        return Outcome("FAILS", _one_line(error))
    gap, same = compare(stock, ours)
    if not gap < TOLERANCE or not same:
        return Outcome("DIFF", f"sequences {'equal' if same else 'differ'}", gap)
    if ours.beam_path == "handed over":
        return Outcome("HANDED", ours.handed_over_because, gap)
    return Outcome("OK", ours.beam_path, gap)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}".replace("\n", " ").replace("|", "/")


def sweep(only: list[str]) -> dict[str, Outcome]:
    """All architectures, or those whose model type is in `only`; prints each as it is known."""

    def on_alarm(*_: Any) -> None:
        raise Timeout

    signal.signal(signal.SIGALRM, on_alarm)
    outcomes = {}
    for mapping, seq2seq in ((MODEL_FOR_CAUSAL_LM_MAPPING, False), (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, True)):
        for config_class, model_class in mapping.items():
            name = config_class.model_type
            if (only and name not in only) or name in TOO_SLOW_TO_BUILD:
                continue
            signal.alarm(SECONDS)
            try:
                found = outcome(
                    config_class, model_class[0] if isinstance(model_class, tuple) else model_class, seq2seq
                )
            except Timeout:
                found = Outcome("UNBUILT", f"not within {SECONDS} s")
            finally:
                signal.alarm(0)
            key = ("seq2seq/" if seq2seq else "causal/") + name
            outcomes[key] = found
            print(f"{key:40s} {found}", flush=True)
    return outcomes


def markdown(outcomes: dict[str, Outcome]) -> str:
    """The page of the docs."""
    counts = collections.Counter(found.kind for found in outcomes.values())
    lines = [
        "# Compatibility",
        "",
        f"Written by `python tests/sweep_architectures.py --markdown docs/compatibility.md` with transformers "
        f"{transformers.__version__} and torch {torch.__version__.split('+')[0]}: tiny random models, "
        f"{BEAMS} beams, {STEPS} new tokens, a padded batch of two prompts, all beams compared with transformers' own "
        f"search.",
        "",
        f"{counts['OK']} architectures run on a path of this package, {counts['HANDED']} are handed over to "
        f"transformers' own search, {counts['DIFF']} differ, {counts['FAILS']} fail. {counts['STOCK']} tiny models "
        f"cannot be searched by transformers itself, {counts['UNBUILT']} could not be built; nothing is known of them "
        f"here.",
        "",
        "| architecture | path | largest score difference |",
        "|---|---|---|",
    ]
    words = {"OK": "{}", "HANDED": "handed over: {}", "DIFF": "**differs**: {}", "FAILS": "**fails**: {}"}
    for key, found in sorted(outcomes.items()):
        if found.kind in words:
            gap = "" if found.gap is None else f"{found.gap:.0e}" if found.gap else "0"
            lines.append(f"| {key} | {words[found.kind].format(found.detail)} | {gap} |")
    unknown = [(key, found) for key, found in sorted(outcomes.items()) if found.kind not in words]
    if unknown:
        lines += ["", "Not known:", ""] + [f"- {key}: {found.kind.lower()}, {found.detail}" for key, found in unknown]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of the docs")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    outcomes = sweep(arguments.model_types)
    counts = collections.Counter(found.kind for found in outcomes.values())
    print(" ".join(f"{kind}={counts[kind]}" for kind in ("OK", "HANDED", "DIFF", "FAILS", "STOCK", "UNBUILT")))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({key: dataclasses.asdict(found) for key, found in sorted(outcomes.items())}, indent=1) + "\n"
        )
    if arguments.markdown:
        arguments.markdown.write_text(markdown(outcomes))
    return 1 if counts["DIFF"] or counts["FAILS"] else 0


if __name__ == "__main__":
    sys.exit(main())
