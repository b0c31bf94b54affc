"""Tiny models with an encoder that sees or hears or asks, and those that hear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from multimodal_prompts import (
    AUDIO,
    BEGIN,
    END,
    IMAGE,
    TEXT,
    VISION,
    Prompts,
    build,
    images_in_text,
    noise,
    padded,
    per_prompt,
    takes,
    text_with,
    words,
)
from tiny_models import EOS, PAD, SEQ2SEQ, START, VOCABULARY
from transformers import PreTrainedModel

# --- a transformer that asks the image questions ---

QFORMER = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    encoder_hidden_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
OPT = dict(
    model_type="opt", vocab_size=VOCABULARY, hidden_size=32, ffn_dim=37, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=512, word_embed_proj_dim=32, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
)  # fmt: skip
T5 = dict(
    model_type="t5", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_decoder_layers=2,
    num_heads=4, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=START,
)  # fmt: skip


def blip2(text: dict, name: str = "Blip2") -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        model = build(
            f"{name}ForConditionalGeneration", f"{name}Config", text_config=text, vision_config=VISION,
            qformer_config=QFORMER, num_query_tokens=4, image_token_index=IMAGE,
        )  # fmt: skip
        inner = model.language_model.generation_config
        inner.eos_token_id, inner.pad_token_id, inner.bos_token_id = EOS, PAD, None
        if model.language_model.config.is_encoder_decoder:
            inner.decoder_start_token_id = START
        return model

    return make


def questioned_image(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Blip2Processor` and `InstructBlipProcessor`: one image per prompt, its places in front; those of the second
    kind give the text once more, to the transformer that asks."""
    inputs = images_in_text(counts, count, 4)
    inputs["pixel_values"] = noise(len(counts), 3, 28, 28)
    if takes(model, "qformer_input_ids"):
        asked = padded([words(3 + number, 40 + number) for number in range(len(counts))], side="right")
        inputs |= {f"qformer_{name}": given for name, given in asked.items()}
    return Prompts(inputs)


# --- encoder-decoder models ---


def florence2() -> PreTrainedModel:
    vision = dict(
        depths=[1, 1], patch_size=[7, 3], patch_stride=[4, 2], patch_padding=[3, 1], patch_prenorm=[False, True],
        embed_dim=[8, 16], num_heads=[2, 2], num_groups=[2, 2], window_size=4, projection_dim=32, drop_path_rate=0.0,
    )  # fmt: skip
    text = {"model_type": "bart", **SEQ2SEQ, "max_position_embeddings": 512}
    model = build(
        "Florence2ForConditionalGeneration", "Florence2Config", text_config=text, vision_config=vision,
        image_token_id=IMAGE, is_encoder_decoder=True,
    )  # fmt: skip
    return starting(model)


def starting(model: PreTrainedModel) -> PreTrainedModel:
    settings = model.generation_config
    settings.decoder_start_token_id, settings.forced_eos_token_id, settings.forced_bos_token_id = START, None, None
    return model


def florence2_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Florence2Processor`: one image per prompt, its places in front, padded on the right as BART's tokenizer does."""
    pixels = noise(len(counts), 3, 32, 32)
    with torch.no_grad():
        features = model.model.get_image_features(pixels)
    length = getattr(features, "pooler_output", features).shape[1]
    rows = [[*[IMAGE] * length, *words(count + number, 50 + number)] for number in range(len(counts))]
    return Prompts({**padded(rows, side="right"), "pixel_values": pixels})


def trocr() -> PreTrainedModel:
    encoder = {"model_type": "vit", **VISION, "patch_size": 7}
    decoder = dict(
        model_type="trocr", vocab_size=VOCABULARY, d_model=32, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=37, max_position_embeddings=512, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=START,
        decoder_start_token_id=START, is_decoder=True, add_cross_attention=True, cross_attention_hidden_size=16,
    )  # fmt: skip
    return starting(build("VisionEncoderDecoderModel", "VisionEncoderDecoderConfig", encoder=encoder, decoder=decoder))


def donut() -> PreTrainedModel:
    encoder = dict(
        model_type="donut-swin", image_size=[32, 16], patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2],
        window_size=2, drop_path_rate=0.0,
    )  # fmt: skip
    decoder = dict(
        SEQ2SEQ, model_type="mbart", max_position_embeddings=512, is_decoder=True, add_cross_attention=True,
        scale_embedding=True, add_final_layer_norm=True,
    )  # fmt: skip
    return starting(build("VisionEncoderDecoderModel", "VisionEncoderDecoderConfig", encoder=encoder, decoder=decoder))


def only_pixels(height: int, width: int) -> Callable[..., Prompts]:
    """`TrOCRProcessor`, `DonutProcessor`: the image alone; the decoder starts from its start token."""

    def make(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
        return Prompts({"pixel_values": noise(len(counts), 3, height, width)})

    return make


def donut_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`DonutProcessor` with a task's prompt, which the decoder starts from."""
    ids = torch.tensor([[30, *words(2, 60)]] * len(counts))
    return Prompts({"pixel_values": noise(len(counts), 3, 32, 16), "decoder_input_ids": ids})


def pix2struct() -> PreTrainedModel:
    text = dict(
        vocab_size=VOCABULARY, hidden_size=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, use_cache=True,
        dropout_rate=0.0, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=START,
    )  # fmt: skip
    vision = dict(
        hidden_size=32, patch_embed_hidden_size=3 * 4 * 4, d_ff=37, d_kv=8, num_hidden_layers=2, num_attention_heads=4,
        seq_len=64,
    )  # fmt: skip
    return starting(
        build("Pix2StructForConditionalGeneration", "Pix2StructConfig", text_config=text, vision_config=vision)
    )


def flattened_patches(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Pix2StructImageProcessor`: each patch with its row and column in front, a mask over the padding at the end."""
    patches = noise(len(counts), 12, 2 + 3 * 4 * 4)
    patches[:, :, 0], patches[:, :, 1] = torch.arange(12) // 4 + 1, torch.arange(12) % 4 + 1
    mask = torch.ones(len(counts), 12)
    for number in range(1, len(counts)):
        patches[number, 12 - 4 * number :], mask[number, 12 - 4 * number :] = 0, 0
    return Prompts({"flattened_patches": patches, "attention_mask": mask.double()})


def speech_encoder_decoder() -> PreTrainedModel:
    encoder = dict(
        model_type="wav2vec2", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, conv_dim=[8, 8], conv_stride=[5, 4], conv_kernel=[10, 8], num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm="layer", conv_bias=True,
        do_stable_layer_norm=True, layerdrop=0.0, apply_spec_augment=False,
    )  # fmt: skip
    decoder = dict(SEQ2SEQ, model_type="bart", max_position_embeddings=512, is_decoder=True, add_cross_attention=True)
    return starting(build("SpeechEncoderDecoderModel", "SpeechEncoderDecoderConfig", encoder=encoder, decoder=decoder))


def padded_waves(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Wav2Vec2FeatureExtractor`: waves padded at the end, and their mask."""
    waves, mask = noise(len(counts), 400), torch.ones(len(counts), 400, dtype=torch.int32)
    for number in range(1, len(counts)):
        waves[number, 400 - 120 * number :], mask[number, 400 - 120 * number :] = 0, 0
    return Prompts({"input_values": waves, "attention_mask": mask})


# --- sounds ---


def qwen2_audio() -> PreTrainedModel:
    audio = dict(
        model_type="qwen2_audio_encoder", num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2,
        encoder_ffn_dim=16, d_model=16, max_source_positions=20,
    )  # fmt: skip
    return build(
        "Qwen2AudioForConditionalGeneration", "Qwen2AudioConfig", text_config={"model_type": "qwen2", **TEXT},
        audio_config=audio, audio_token_index=AUDIO,
    )  # fmt: skip


def masked_spectra(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Qwen2AudioProcessor`: spectra of all sounds ``[sounds, bins, frames]`` and a mask over frames."""
    frames = [40 - 6 * sound for sound in range(sum(counts))]
    spectra, mask = noise(len(frames), 8, 40), torch.zeros(len(frames), 40, dtype=torch.int32)
    for sound, length in enumerate(frames):
        mask[sound, :length] = 1
    blocks = [[BEGIN, *[AUDIO] * (((length - 1) // 2 + 1 - 2) // 2 + 1), END] for length in frames]
    inputs = text_with(per_prompt(blocks, counts), count)
    inputs |= {"input_features": spectra, "feature_attention_mask": mask}
    return Prompts(inputs, {"input_features": list(counts), "feature_attention_mask": list(counts)})


def voxtral() -> PreTrainedModel:
    audio = dict(
        num_mel_bins=8, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_source_positions=20,
    )  # fmt: skip
    return build(
        "VoxtralForConditionalGeneration", "VoxtralConfig", text_config={"model_type": "llama", **TEXT},
        audio_config=audio, audio_token_id=AUDIO,
    )  # fmt: skip


def chunks_of_sound(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`VoxtralProcessor`: spectra of chunks of 30 s ``[chunks, bins, frames]``, each with the same number of places."""
    inputs = text_with([[[BEGIN, *[AUDIO] * 5]] * own for own in counts], count)
    inputs["input_features"] = noise(sum(counts), 8, 40)
    return Prompts(inputs, {"input_features": list(counts)})
