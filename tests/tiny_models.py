"""Tiny random models of the architectures that the core supports, one builder per kind, and their prompts."""

from __future__ import annotations

import functools
import inspect
import sys

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.utils import GenerationMixin

from hf_paged_beam.versions import PreTrainedConfig

VOCABULARY = 99
EOS, PAD, START = 5, 0, 1
DECODERS = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=PAD, eos_token_id=EOS,
    bos_token_id=None,
)  # fmt: skip
SEQ2SEQ = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, pad_token_id=PAD, eos_token_id=EOS,
    bos_token_id=None, decoder_start_token_id=START, forced_eos_token_id=None,
)  # fmt: skip


def _llama():
    return LlamaForCausalLM(LlamaConfig(**DECODERS))


def _qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**DECODERS))


def _mistral():
    return MistralForCausalLM(MistralConfig(**DECODERS, sliding_window=4))


def _gemma3():
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**DECODERS, sliding_window=4, layer_types=kinds))


def _gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )


def _t5():
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=START,
        )
    )


def _bart():
    return BartForConditionalGeneration(BartConfig(**SEQ2SEQ, max_position_embeddings=64))


def _whisper():
    config = dict(SEQ2SEQ, num_mel_bins=8, max_source_positions=20, max_target_positions=64)
    return WhisperForConditionalGeneration(WhisperConfig(**config))


BUILDERS = {
    "llama": _llama, "qwen3": _qwen3, "mistral": _mistral, "gemma3": _gemma3, "gpt2": _gpt2,
    "t5": _t5, "bart": _bart, "whisper": _whisper,
}  # fmt: skip
DECODER_ONLY = ("llama", "qwen3", "mistral", "gemma3", "gpt2")
ENCODER_DECODER = ("t5", "bart", "whisper")


def tiny_model(kind: str, *, eos: int | list[int] | None = EOS, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model with random weights, large enough that its distributions are peaked; the same at every call."""
    torch.manual_seed(0)
    model = BUILDERS[kind]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.tie_weights()
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = eos, PAD, None
    settings.forced_eos_token_id = settings.forced_bos_token_id = None
    if model.config.is_encoder_decoder:
        settings.decoder_start_token_id = START
    return model.to(dtype)


def random_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    """A random model of any class and configuration, as `tiny_model` makes them."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            parameter.data.normal_(0, 0.3)
        elif "gate" in name:
            parameter.data.fill_(1.0)
    model.tie_weights()
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = EOS, PAD, None
    return model.to(dtype)


def image_model(image_token: int) -> tuple[PreTrainedModel, dict]:
    """A tiny Gemma 3 that sees, and two prompts with an image each, the second padded.

    Args:
        image_token: the id that holds the place of an image's patches.
    """
    text = dict(DECODERS, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=image_token, image_token_id=image_token,
        mm_tokens_per_image=4, boi_token_index=7, eoi_token_index=8,
    )  # fmt: skip
    model = random_model(Gemma3ForConditionalGeneration, config)
    image = [7, *[image_token] * 4, 8]
    input_ids = torch.tensor([[11, 12, *image, 13, 14], [PAD, 15, *image, 16, 17]])
    generator = torch.Generator().manual_seed(2)
    return model, {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "token_type_ids": (input_ids == image_token).long(),
        "pixel_values": torch.randn(2, 3, 28, 28, generator=generator, dtype=torch.float64),
    }


def prompts(kind: str, batch_size: int = 2, length: int = 7, *, padded: bool = True, seed: int = 1) -> dict:
    """Inputs for `generate`: ids with a mask (padded on the left, or on the right for an encoder), or features."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "whisper":
        return {"input_features": torch.randn(batch_size, 8, 40, generator=generator)}
    input_ids = torch.randint(6, VOCABULARY, (batch_size, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(1, batch_size if padded else 1):
        pads = row % (length - 1)
        if not pads:
            continue
        where = slice(-pads, None) if kind in ENCODER_DECODER else slice(pads)
        attention_mask[row, where] = 0
        input_ids[row, where] = PAD
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def met_model(kind: str) -> PreTrainedModel:
    """`tiny_model`, after a first short search, which tries both read paths: what is counted then is the search."""
    model = tiny_model(kind)
    call = {"num_beams": 2, "max_new_tokens": 3, "eos_token_id": None, "do_sample": False}
    GenerationMixin.generate(model, **prompts(kind, 1), **call, custom_generate="hf_paged_beam")
    return model


@functools.cache
def shared_model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """`tiny_model`, made once for all tests that do not change it."""
    return tiny_model(kind, dtype=dtype)


def double_model(kind: str) -> PreTrainedModel:
    """The shared float64 model: its scores leave nothing to rounding, so that orders can be compared exactly."""
    return shared_model(kind, torch.float64)


def prompts_for(model: PreTrainedModel, kind: str, batch_size: int = 2, **shape: int) -> dict:
    """`prompts`, with features in the model's dtype."""
    inputs = prompts(kind, batch_size, **shape)
    return {name: given.to(model.dtype) if given.is_floating_point() else given for name, given in inputs.items()}


def path_of(kind: str) -> str:
    """How keys are read: "folded" where the model's attention goes through transformers' interface, as T5's did not
    before 5.17 or so."""
    source = inspect.getsource(sys.modules[type(tiny_model(kind)).__module__])
    return "folded" if "ALL_ATTENTION_FUNCTIONS" in source else "gathered"


ENCODER_DECODER_PATHS = [
    (kind, path) for kind in ENCODER_DECODER for path in ("folded", "gathered") if path in (path_of(kind), "gathered")
]
