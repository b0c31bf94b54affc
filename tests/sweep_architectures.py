"""Compare the package with transformers' own beam search on every architecture that transformers registers.

For each causal and sequence-to-sequence model class a tiny random model is built, a batch of two padded prompts is
searched by both, and all beams' scores and sequences are compared.

    python tests/sweep_architectures.py                                  # all: a line each, and a summary
    python tests/sweep_architectures.py llama t5 mistral                 # only these model types
    python tests/sweep_architectures.py --compile                        # the same with compile=True
    python tests/sweep_architectures.py --record                         # also write docs/compatibility.json and .md

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
import logging
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

import hf_paged_beam
from hf_paged_beam import versions
from hf_paged_beam.generation import capture
from hf_paged_beam.versions import PreTrainedConfig

BEAMS, STEPS, EOS, TOLERANCE = 4, 8, 5, 1e-4
RECORD = Path(__file__).parent.parent / "docs" / "compatibility.json"
SECONDS = 60
"""Longest time that one architecture may take, building included."""

TINY = dict(
    vocab_size=99, hidden_size=32, n_embd=32, d_model=32, num_hidden_layers=2, n_layer=2, num_layers=2, n_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, num_key_value_heads=2, multi_query_group_num=2,
    head_dim=16, intermediate_size=37, ffn_dim=38, n_inner=37, d_ff=37, ffn_hidden_size=37,
    max_position_embeddings=128, n_positions=128, n_ctx=128, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1,
    n_shared_experts=1, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    sliding_window=5, word_embed_proj_dim=32, attention_window=8, attention_dropout=0.0, decoder_layers=2,
    decoder_attention_heads=4, decoder_ffn_dim=37, shared_expert_intermediate_size=24, partial_rotary_factor=0.5,
    encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=37, num_decoder_layers=2, d_kv=8,
    decoder_start_token_id=1, max_source_positions=20, max_target_positions=64, bos_token_id=1, eos_token_id=2,
    vocab_size_per_layer_input=99, hidden_size_per_layer_input=8, audio_hidden_size=32, use_mamba_kernels=False,
    expert_ffn_hidden_size=24,
)  # fmt: skip
"""Sizes, given to every configuration that has such a field."""

LEFT_OUT = object()
"""In `PARTICULAR`: a field of `TINY` that this configuration does not take."""

_EQUAL_HEADS = dict(num_key_value_heads=4)
_NARROW_HEADS = dict(head_dim=8)
_BLT_LOCAL = dict(head_dim=8, hidden_size_global=32)
_WIDE_EXPERTS = dict(moe_intermediate_size=32, intermediate_size=32, shared_expert_intermediate_size=32)
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_ROPE_OF_EACH_KIND = {
    kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 4]) for kind in _SLIDING_AND_FULL
}
_SHARED_KEYS = dict(num_hidden_layers=4, layer_types=_SLIDING_AND_FULL * 2, num_kv_shared_layers=2)
_PROPHETNET = dict(
    num_hidden_layers=LEFT_OUT, num_encoder_layers=2, num_decoder_layers=2, ngram=1, num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
)  # fmt: skip
_ZAMBA = dict(
    num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, layer_types=LEFT_OUT, mamba_d_state=8
)  # fmt: skip
PARTICULAR: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "axk1", "axk2", "bailing_hybrid", "glm4_moe_lite",
         "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "sarvam_mla", "youtu", "helium"),
        _EQUAL_HEADS,
    ),
    **dict.fromkeys(
        ("aria_text", "cohere2_moe", "deepseek_v4", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa",
         "granitemoeshared", "minimax", "minimax_m2", "minimax_m3_vl_text",
         "mixtral", "olmoe", "phimoe"),
        _WIDE_EXPERTS,
    ),
    **dict.fromkeys(("blt_patcher", "blt_global_transformer", "hunyuan_v1_dense", "ministral"), _NARROW_HEADS),
    **dict.fromkeys(("blt_local_encoder", "blt_local_decoder"), _BLT_LOCAL),
    "bamba": dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, attn_layer_indices=[1]),
    "blt": dict(num_hidden_layers=2, encoder_hash_byte_group_vocab=99),
    "codegen": dict(rotary_dim=4),
    "cohere_compass_text": dict(layer_types=_SLIDING_AND_FULL, rope_parameters=_ROPE_OF_EACH_KIND),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8), ffn_config=dict(ffn_hidden_size=32, moe_top_k=2)
    ),
    "deepseek_v2": dict(num_key_value_heads=4, num_experts_per_tok=2),
    "dory": dict(num_hidden_layers=3, n_input_layers=1, n_recurrent_layers=1, n_output_layers=1),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "dots3_note_audio_encoder": dict(adapter_input_size=32, adapter_output_size=32),
    "dots3_note_vision_encoder": dict(pyramid_num_routed=[-1, 4], adapter_in_dim=32, adapter_out_dim=32),
    "falcon": dict(head_dim=LEFT_OUT),
    "nemotron_h": dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=1, chunk_size=8),
    "nemotron3_5_transcribe_word_timestamp": dict(blank_token_id=98),
    "falcon_h1": dict(
        mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8
    ),
    "gemma3n_text": _SHARED_KEYS,
    "gemma4_text": _SHARED_KEYS,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=8),
    "gptj": dict(rotary_dim=4),
    "granitemoehybrid": dict(
        mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, layer_types=["mamba", "attention"],
        intermediate_size=32,
    ),
    "helium": dict(num_key_value_heads=4, head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8, num_experts=2, moe_topk=1, intermediate_size=32),
    "inkling2_text": dict(_WIDE_EXPERTS, unpadded_vocab_size=99),
    "inkling2_loop_text": dict(_WIDE_EXPERTS, unpadded_vocab_size=99),
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=4, intermediate_size=32,
    ),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba2": dict(num_heads=4, head_dim=16, n_groups=1, state_size=16),
    "mllama_text_model": dict(rope_scaling=dict(rope_type="default", rope_theta=1e4)),
    "nemotron": dict(num_key_value_heads=2, head_dim=8),
    "prophetnet": _PROPHETNET,
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2,
    ),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], lru_width=32, attention_window_size=8),
    "reformer": dict(is_decoder=True, axial_pos_embds=False, attn_layers=["local", "lsh"], hash_seed=0),
    "solar_open": dict(partial_rotary_factor=LEFT_OUT),
    "vibevoice_acoustic_tokenizer_encoder": dict(num_filters=2, depths=[1] * 7),
    "xlm-prophetnet": _PROPHETNET,
    "xlm": dict(mask_token_id=7),
    # transformers 4.57 cuts the encoder's keys to the decoder's window, which is therefore longer than the prompt.
    "t5_gemma_module": dict(sliding_window=8),
    "xlnet": dict(max_position_embeddings=LEFT_OUT),
    "xlstm": dict(hidden_size=128),
    "xmod": dict(default_language="en_XX"),
    "zamba": _ZAMBA,
    "zamba2": dict(_ZAMBA, num_key_value_heads=4),
    "zaya": dict(num_experts_per_tok=1),
}  # fmt: skip
"""What a model type needs beside `TINY`, or in its place; set even where its configuration shows no such field."""

EXTRA_INPUTS = {"voxtral_realtime": dict(input_features=(2, 128, 400))}
"""Shapes of the random inputs that a model type needs beside ids."""

WHY_NOT = {
    "gemma3n": "its image tower needs the package timm",
    "gemma4_assistant": "drafts for another model, whose keys it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys it reads",
    "musicgen": "its own generate knows no beams",
    "musicgen_melody": "its own generate knows no beams",
    "rwkv": "transformers' beam search refuses its cache, which it cannot reorder",
    "xlstm": "transformers' beam search refuses its cache, which it cannot reorder",
}
"""Why the model types that remain cannot be compared; shown where they cannot, in place of an error's text."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        kind: OK, HANDED, DIFF, FAILS, STOCK or UNBUILT.
        detail: the path that ran, or the reason.
        gap: largest difference of the scores of all beams.
        told_apart: beams whose score no other beam of their prompt nearly shares, so that their sequences had to agree.
    """

    kind: str
    detail: str
    gap: float | None = None
    told_apart: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}{self._measured()}".replace("\n", " ")

    def _measured(self) -> str:
        return "" if self.gap is None else f" (scores within {self.gap:.1e}, {self.told_apart} beams told apart)"


class Timeout(BaseException):
    """Raised by the alarm; no `Exception`, so that nothing takes it for a failure of the model."""


def tiny_config(config_class: type) -> Any:
    """A tiny configuration of this class, its parts and all kinds of layers included, or an error."""
    base = config_class()
    particular = PARTICULAR.get(base.model_type, {})
    sizes = {name: size for name, size in TINY.items() if _takes_size(base, name)}
    parts = {name: part for name, part in vars(base).items() if isinstance(part, PreTrainedConfig)}
    sizes |= {name: tiny_config(type(part)).to_dict() for name, part in parts.items() if name not in particular}
    sizes |= {**particular, "pad_token_id": 0}
    sizes = {name: size for name, size in sizes.items() if size is not LEFT_OUT}
    kinds = list(dict.fromkeys(getattr(base, "layer_types", None) or []))
    if not kinds or "layer_types" in particular:
        return config_class(**sizes)
    layers = (kinds * 2)[:2] if len(kinds) <= 2 else kinds
    counted = {name: len(layers) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in sizes}
    try:
        return config_class(**{**sizes, **counted, "layer_types": layers})
    except Exception:
        return config_class(**sizes)


def _takes_size(config: Any, name: str) -> bool:
    """Whether a configuration has a field of this name that holds one number, which may be made smaller."""
    current, declared = _field(config, name), getattr(type(config), name, None)
    if isinstance(declared, property) and declared.fset is None:
        return False
    return current is not None and not callable(current) and not isinstance(current, (list, dict))


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:
        return None


def tiny_model(config_class: type, model_class: type) -> Any:
    """A tiny random model of this class, peaked enough that beams differ, or an error."""
    config = tiny_config(config_class)
    if model_class.config_class is not config_class:
        config = config.get_text_config(decoder=True)  # as `AutoModelForCausalLM.from_config` does
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


def compare(stock: Any, ours: Any) -> tuple[float, bool, int]:
    """Largest difference of scores, whether sequences agree where scores do not nearly tie, and for how many beams."""
    theirs, mine = (
        scores.masked_fill(scores <= -1e8, -torch.inf) for scores in (stock.sequences_scores, ours.sequences_scores)
    )
    gap = torch.where(theirs == mine, torch.zeros_like(theirs), (theirs - mine).abs()).max().item()
    of_prompt = theirs.view(-1, BEAMS)  # [B, W]
    near = (of_prompt.unsqueeze(1) - of_prompt.unsqueeze(2)).abs() < TOLERANCE  # [B, W, W], each beam near itself
    alone = (near.sum(-1) == 1).flatten()
    if stock.sequences.shape != ours.sequences.shape:
        return gap, False, int(alone.sum())
    differ = (stock.sequences != ours.sequences).any(-1)
    return gap, not (differ & alone).any(), int(alone.sum())


def outcome(config_class: type, model_class: type, seq2seq: bool, compiled: bool = False) -> Outcome:
    """Build, search twice, compare.

    Args:
        compiled: search with ``compile=True``, by what traces the step and runs it as traced.
    """
    name = config_class.model_type
    try:
        model = tiny_model(config_class, model_class)
    except Exception as error:
        return Outcome("UNBUILT", WHY_NOT.get(name) or _one_line(error))
    prompts, call = search_inputs(model, seq2seq)
    try:
        stock = model.generate(prompts, **call)
    except Exception as error:
        return Outcome("STOCK", WHY_NOT.get(name) or _one_line(error))
    try:
        ours = model.generate(prompts, **call, custom_generate="hf_paged_beam", compile=compiled)
    except Timeout:
        return Outcome("FAILS", "hangs")
    except Exception as error:
        return Outcome("FAILS", _one_line(error))
    gap, same, told_apart = compare(stock, ours)
    if not gap < TOLERANCE or not same:
        return Outcome("DIFF", f"sequences {'equal' if same else 'differ'}", gap, told_apart)
    if ours.beam_path == "handed over":
        return Outcome("HANDED", ours.handed_over_because, gap, told_apart)
    wrong = _wrong_estimate(model, getattr(ours, versions.CACHE_ARGUMENT))
    if wrong:
        return Outcome("FAILS", wrong)
    return Outcome("OK", ours.beam_path + _captured(model) * compiled, gap, told_apart)


def _wrong_estimate(model: Any, cache: Any) -> str:
    """What `estimate_memory` tells of a token, where that is not what the cache holds; it may refuse to tell."""
    length = dict(encoder_length=1) if model.config.is_encoder_decoder else {}
    try:
        told = hf_paged_beam.estimate_memory(model.config, 2, BEAMS, 7, STEPS, torch.float32, **length).token
    except ValueError:
        return ""
    held = sum(layer.bytes_per_token() for layer in cache.indexed_layers() if not layer.is_cross)
    return "" if told == held else f"estimate_memory tells {told} bytes of a token, the cache holds {held}"


def _captured(model: Any) -> str:
    """Whether the model's decode step was captured, and if it was tried and was not, why."""
    kept = capture.captures_of(model)
    reasons = [verdict for verdict in kept.verdicts.values() if isinstance(verdict, str)]
    trusted = [verdict for verdict in kept.verdicts.values() if verdict == 0]
    return f", not captured: {reasons[0]}" if reasons else ", captured" if trusted and kept.captured else ""


def search_inputs(model: Any, seq2seq: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Two prompts, of which the second is padded, and the other arguments of a search."""
    torch.manual_seed(1)
    prompts = torch.randint(6, model.config.get_text_config().vocab_size, (2, 7))
    mask = torch.ones_like(prompts)
    mask[1, slice(-3, None) if seq2seq else slice(3)] = 0
    extra = {name: torch.randn(shape) for name, shape in EXTRA_INPUTS.get(model.config.model_type, {}).items()}
    return prompts, dict(
        attention_mask=mask, num_beams=BEAMS, num_return_sequences=BEAMS, max_new_tokens=STEPS, do_sample=False,
        return_dict_in_generate=True, output_scores=True, **extra,
    )  # fmt: skip


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}".replace("\n", " ").replace("|", "/")


def sweep(only: list[str], compiled: bool = False) -> dict[str, Outcome]:
    """All architectures, or those whose model type is in `only`; prints each as it is known."""

    def on_alarm(*_: Any) -> None:
        raise Timeout

    signal.signal(signal.SIGALRM, on_alarm)
    outcomes = {}
    for mapping, seq2seq in ((MODEL_FOR_CAUSAL_LM_MAPPING, False), (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, True)):
        for config_class, model_class in mapping.items():
            name = config_class.model_type
            if only and name not in only:
                continue
            signal.alarm(SECONDS)
            try:
                first = model_class[0] if isinstance(model_class, tuple) else model_class
                found = outcome(config_class, first, seq2seq, compiled)
            except Timeout:
                found = Outcome("UNBUILT", f"not within {SECONDS} s")
            finally:
                signal.alarm(0)
            key = ("seq2seq/" if seq2seq else "causal/") + name
            outcomes[key] = found
            print(f"{key:40s} {found}", flush=True)
    return outcomes


def record_of(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """A run, to be written as JSON."""
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    told = {key: dataclasses.asdict(found) for key, found in sorted(outcomes.items())}
    return {"versions": versions, "outcomes": told}


def page_of(run: dict[str, Any]) -> str:
    """The page of the docs, from what `record_of` gave."""
    return markdown({key: Outcome(**found) for key, found in run["outcomes"].items()}, run["versions"])


def markdown(outcomes: dict[str, Outcome], versions: dict[str, str]) -> str:
    """The page of the docs, of a run with these versions."""
    counts = collections.Counter(found.kind for found in outcomes.values())
    lines = [
        "# Compatibility",
        "",
        f"Written by `python tests/sweep_architectures.py --record` with transformers {versions['transformers']} and "
        f"torch {versions['torch']}: tiny random models, "
        f"{BEAMS} beams, {STEPS} new tokens, a padded batch of two prompts, all beams compared with transformers' own "
        f"search. Sequences had to agree for every beam whose score no other beam of its prompt nearly shares: it is "
        f"told apart.",
        "",
        f"{counts['OK']} architectures run on a path of this package, {counts['HANDED']} are handed over to "
        f"transformers' own search, {counts['DIFF']} differ, {counts['FAILS']} fail. {counts['STOCK']} tiny models "
        f"cannot be searched by transformers itself, {counts['UNBUILT']} could not be built; nothing is known of them "
        f"here.",
        "",
        f"| architecture | path | largest score difference | beams told apart, of {2 * BEAMS} |",
        "|---|---|---|---|",
    ]
    words = {"OK": "{}", "HANDED": "handed over: {}", "DIFF": "**differs**: {}", "FAILS": "**fails**: {}"}
    for key, found in sorted(outcomes.items()):
        if found.kind in words:
            gap = "" if found.gap is None else f"{found.gap:.0e}" if found.gap else "0"
            lines.append(f"| {key} | {words[found.kind].format(found.detail)} | {gap} | {found.told_apart} |")
    unknown = [(key, found) for key, found in sorted(outcomes.items()) if found.kind not in words]
    if unknown:
        lines += ["", "Not known:", ""] + [f"- {key}: {found.kind.lower()}, {found.detail}" for key, found in unknown]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    parser.add_argument("--record", action="store_true", help=f"write them as {RECORD.name}, and the page made of them")
    parser.add_argument("--compile", action="store_true", help="search with compile=True, its step traced only")
    arguments = parser.parse_args(argv)
    capture.BACKEND = "eager"
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)  # tiny configurations are not what they warn of
    outcomes = sweep(arguments.model_types, arguments.compile)
    counts = collections.Counter(found.kind for found in outcomes.values())
    print(" ".join(f"{kind}={counts[kind]}" for kind in ("OK", "HANDED", "DIFF", "FAILS", "STOCK", "UNBUILT")))
    run = record_of(outcomes)
    for path in [*([arguments.json] if arguments.json else []), *([RECORD] if arguments.record else [])]:
        path.write_text(json.dumps(run, indent=1) + "\n")
    if arguments.record:
        RECORD.with_suffix(".md").write_text(page_of(run))
    return 1 if counts["DIFF"] or counts["FAILS"] else 0


if __name__ == "__main__":
    sys.exit(main())
