"""Tiny models that see, whose images come as tensors of pixels, and inputs as their processors make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from multimodal_prompts import (
    BEGIN,
    END,
    IMAGE,
    NEWLINE,
    TEXT,
    VIDEO,
    VISION,
    Prompts,
    build,
    images_in_text,
    noise,
    per_prompt,
    rope_settings,
    takes,
    text_with,
    type_ids,
    words,
)
from tiny_models import EOS, PAD, START, VOCABULARY
from transformers import PreTrainedModel

# --- images laid one after another ---


def one_tensor_per_image(length: int, **around: Any) -> Callable[..., Prompts]:
    """``pixel_values`` ``[images, 3, H, W]``, as CLIP's and SigLIP's image processors make them for a flat list."""

    def make(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
        inputs = images_in_text(counts, count, length, **around)
        inputs["pixel_values"] = noise(sum(counts), 3, 28, 28)
        for name in ("token_type_ids", "mm_token_type_ids"):
            inputs |= type_ids(model, inputs["input_ids"], name)
        return Prompts(inputs, {"pixel_values": list(counts)})

    return make


def llava() -> PreTrainedModel:
    return build(
        "LlavaForConditionalGeneration", "LlavaConfig", text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **VISION}, image_token_index=IMAGE,
        image_seq_length=4,
    )  # fmt: skip


def gemma3() -> PreTrainedModel:
    text = dict(TEXT, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    return build(
        "Gemma3ForConditionalGeneration", "Gemma3Config", text_config=text, vision_config=VISION,
        image_token_index=IMAGE, mm_tokens_per_image=4, boi_token_index=BEGIN, eoi_token_index=END,
    )  # fmt: skip


def paligemma() -> PreTrainedModel:
    text = {"model_type": "gemma", **TEXT}
    vision = {"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False, **VISION}
    model = build(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig", text_config=text, vision_config=vision,
        image_token_index=IMAGE, projection_dim=32, hidden_size=32, vocab_size=VOCABULARY,
    )  # fmt: skip
    if hasattr(model.model, "text_config_dtype"):  # of masks, before 5.0; torch reads a float32 mask wrongly here
        model.model.text_config_dtype = torch.float64
    return model


def internvl() -> PreTrainedModel:
    vision = {**VISION, "image_size": [56, 56], "patch_size": [14, 14], "num_hidden_layers": 2}
    return build(
        "InternVLForConditionalGeneration", "InternVLConfig", text_config={"model_type": "qwen2", **TEXT},
        vision_config=vision, image_token_id=IMAGE, image_seq_length=4,
    )  # fmt: skip


def internvl_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`InternVLProcessor` cuts images into tiles of one size and adds a small whole one: tiles ``[all, 3, H, W]``."""
    tiles = [1, 3]  # of the first image, of every other
    lengths = [[4 * tiles[min(image, 1)] for image in range(own)] for own in counts]
    inputs = text_with([[[BEGIN, *[IMAGE] * length, END] for length in own] for own in lengths], count)
    rows = [sum(own) // 4 for own in lengths]
    inputs["pixel_values"] = noise(sum(rows), 3, 56, 56)
    return Prompts(inputs, {"pixel_values": rows})


def mistral3() -> PreTrainedModel:
    vision = dict(VISION, model_type="pixtral", image_size=56, head_dim=8)
    return build(
        "Mistral3ForConditionalGeneration", "Mistral3Config", text_config={"model_type": "mistral", **TEXT},
        vision_config=vision, image_token_index=IMAGE, spatial_merge_size=2,
    )  # fmt: skip


def mistral3_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`PixtralProcessor`: images padded to the largest, ``image_sizes`` ``[images, 2]``; a break after each row."""
    sizes = [(56, 28) if image % 2 else (28, 56) for image in range(sum(counts))]
    blocks = []
    for height, width in sizes:
        row = [*[IMAGE] * (width // 28), NEWLINE]
        blocks.append([*(row * (height // 28))[:-1], END])
    inputs = text_with(per_prompt(blocks, counts), count)
    inputs |= {"pixel_values": noise(len(sizes), 3, 56, 56), "image_sizes": torch.tensor(sizes)}
    return Prompts(inputs, {"pixel_values": list(counts), "image_sizes": list(counts)})


def llava_next() -> PreTrainedModel:
    return build(
        "LlavaNextForConditionalGeneration", "LlavaNextConfig", text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **VISION}, image_token_index=IMAGE,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]], vision_feature_select_strategy="default",
    )  # fmt: skip


def llava_onevision() -> PreTrainedModel:
    return build(
        "LlavaOnevisionForConditionalGeneration", "LlavaOnevisionConfig", text_config={"model_type": "qwen2", **TEXT},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
        image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )  # fmt: skip


def tiled_images(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`LlavaNextProcessor`: tiles ``[images, most tiles, 3, H, W]``, zeros where an image has fewer, and its size.

    The number of places is what the model makes of the image, as `_get_number_of_features` there computes it.
    """
    sizes = [(50, 50) if image % 2 else (24, 50) for image in range(sum(counts))]
    tiles = [5 if size == (50, 50) else 3 for size in sizes]
    pixels = noise(len(sizes), 5, 3, 28, 28)
    for image, used in enumerate(tiles):
        pixels[image, used:] = 0
    given = {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}
    flat = {name: list(counts) for name in given}
    if takes(model, "batch_num_images"):
        given["batch_num_images"] = torch.tensor(counts)
    with torch.no_grad():
        features = model.model.get_image_features(**given)
    lengths = [len(image) for image in getattr(features, "pooler_output", features)]
    blocks = [[IMAGE] * length for length in lengths]
    return Prompts({**text_with(per_prompt(blocks, counts), count), **given}, flat)


# --- images per prompt ---


def idefics3() -> PreTrainedModel:
    return build(
        "Idefics3ForConditionalGeneration", "Idefics3Config", text_config={"model_type": "llama", **TEXT},
        vision_config={**VISION, "patch_size": 7}, image_token_id=IMAGE, scale_factor=2, pad_token_id=PAD,
    )  # fmt: skip


def smolvlm() -> PreTrainedModel:
    return build(
        "SmolVLMForConditionalGeneration", "SmolVLMConfig", text_config={"model_type": "llama", **TEXT},
        vision_config={**VISION, "patch_size": 7}, image_token_id=IMAGE, scale_factor=2, pad_token_id=PAD,
    )  # fmt: skip


def images_per_prompt(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Idefics3ImageProcessor`: ``[B, most images, 3, H, W]``, zeros where there are fewer, and a mask of pixels."""
    pixels = noise(len(counts), max(counts), 3, 28, 28)
    mask = torch.ones(len(counts), max(counts), 28, 28, dtype=torch.int64)
    for prompt, own in enumerate(counts):
        pixels[prompt, own:], mask[prompt, own:] = 0, 0
    mask[0, 0, :, 21:] = 0  # an image that is narrower than the others
    inputs = images_in_text(counts, count, 4, around=([BEGIN], [BEGIN]))
    return Prompts({**inputs, "pixel_values": pixels, "pixel_attention_mask": mask})


# --- kinds of their own ---


def kosmos2() -> PreTrainedModel:
    text = dict(
        vocab_size=VOCABULARY, embed_dim=32, layers=2, ffn_dim=37, attention_heads=4, max_position_embeddings=512,
        dropout=0.0, attention_dropout=0.0, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    model = build(
        "Kosmos2ForConditionalGeneration", "Kosmos2Config", text_config=text, vision_config=VISION, latent_query_num=4
    )
    inner = model.text_model.generation_config
    inner.eos_token_id, inner.pad_token_id, inner.bos_token_id = EOS, PAD, None
    return model.float()  # its masks hold the smallest number of a dtype, which torch does not take for float64


def kosmos2_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Kosmos2Processor`: one image per prompt, and a mask of the places that it takes in the text."""
    inputs = images_in_text(counts, count, 4, around=([BEGIN], [END]))
    inputs |= {"pixel_values": noise(len(counts), 3, 28, 28)}
    return Prompts({**inputs, "image_embeds_position_mask": (inputs["input_ids"] == IMAGE).long()})


def git() -> PreTrainedModel:
    return build(
        "GitForCausalLM", "GitConfig", vision_config=VISION, vocab_size=VOCABULARY, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, max_position_embeddings=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=PAD, eos_token_id=EOS,
        bos_token_id=None,
    )  # fmt: skip


def git_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`GitProcessor`: the image has no places in the text, the model puts it in front. No padding: GIT takes none."""
    ids = torch.tensor([words(count, 70 + number) for number in range(len(counts))])
    return Prompts(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": noise(len(counts), 3, 28, 28)}
    )


def lfm2_vl() -> PreTrainedModel:
    text = dict(
        TEXT, model_type="lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3, block_ff_dim=37,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    vision = dict(
        model_type="siglip2_vision_model", hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, patch_size=4, num_patches=16, vision_use_head=False,
    )  # fmt: skip
    return build(
        "Lfm2VlForConditionalGeneration", "Lfm2VlConfig", text_config=text, vision_config=vision,
        image_token_id=IMAGE, projector_hidden_size=24, downsample_factor=2,
    )  # fmt: skip


def lfm2_vl_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Lfm2VlImageProcessor`: patches ``[images, most patches, values]``, a mask of them, rows and columns."""
    shapes = [(4, 4) if image % 2 else (2, 4) for image in range(sum(counts))]
    patches, mask = noise(len(shapes), 16, 3 * 4 * 4), torch.zeros(len(shapes), 16, dtype=torch.int64)
    for image, (rows, columns) in enumerate(shapes):
        patches[image, rows * columns :], mask[image, : rows * columns] = 0, 1
    inputs = text_with(per_prompt([[BEGIN, *[IMAGE] * (r * c // 4), END] for r, c in shapes], counts), count)
    given = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}
    return Prompts({**inputs, **given}, {name: list(counts) for name in given})


def mllama() -> PreTrainedModel:
    vision = dict(
        hidden_size=16, num_hidden_layers=2, num_global_layers=1, attention_heads=2, intermediate_size=16,
        vision_output_dim=32, image_size=28, patch_size=14, max_num_tiles=2, intermediate_layers_indices=[0],
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {
        **TEXT,
        "bos_token_id": START,
        "cross_attention_layers": [1],
        **rope_settings(rope),
    }
    return build(
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE,
    )


def mllama_prompts(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`MllamaProcessor`: tiles ``[B, most images, tiles, 3, H, W]``, and which of them each token sees."""
    inputs = images_in_text(counts, count, 1)
    images, (batch, length) = max(counts), inputs["input_ids"].shape
    ratios, mask = torch.zeros(batch, images, dtype=torch.int64), torch.zeros(batch, images, 2, dtype=torch.int64)
    sees = torch.zeros(batch, length, images, 2, dtype=torch.int64)
    pixels = noise(batch, images, 2, 3, 28, 28)
    for prompt, own in enumerate(counts):
        ratios[prompt, :own], mask[prompt, :own] = 2, 1
        mask[prompt, own:, 0] = 1
        pixels[prompt, own:] = 0
        places = (inputs["input_ids"][prompt] == IMAGE).nonzero().flatten().tolist()
        for image, place in enumerate(places):
            sees[prompt, place:, image] = 1
    inputs |= {"pixel_values": pixels, "aspect_ratio_ids": ratios, "aspect_ratio_mask": mask}
    return Prompts({**inputs, "cross_attention_mask": sees})
