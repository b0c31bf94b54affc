"""Tiny models that take rows of patches with a grid, and positions in three dimensions: Qwen, GLM."""

from __future__ import annotations

import torch
from multimodal_prompts import (
    AUDIO,
    BEGIN,
    END,
    IMAGE,
    MROPE,
    TEXT,
    VIDEO,
    Prompts,
    build,
    noise,
    padded,
    per_prompt,
    rope_settings,
    takes,
    text_with,
    type_ids,
)
from transformers import PreTrainedModel

# --- images as rows of patches, with a grid ---


def qwen2_vl() -> PreTrainedModel:
    vision = dict(
        depth=2, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    return qwen("Qwen2VL", vision)


def qwen2_5_vl() -> PreTrainedModel:
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, window_size=8, out_hidden_size=32, fullatt_block_indexes=[1],
    )  # fmt: skip
    return qwen("Qwen2_5_VL", vision)


def qwen3_vl() -> PreTrainedModel:
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    return qwen("Qwen3VL", vision)


def qwen(name: str, vision: dict) -> PreTrainedModel:
    text = {**TEXT, **rope_settings(MROPE)}
    return build(
        f"{name}ForConditionalGeneration", f"{name}Config", text_config=text, vision_config=vision,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip


GRIDS = [[1, 4, 4], [1, 4, 6], [1, 6, 4]]
"""Frames, rows and columns of patches of the images."""


def number_of_patches(grids: list[list[int]]) -> int:
    return sum(frames * rows * columns for frames, rows, columns in grids)


def rows_of_patches(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Qwen2VLImageProcessor`: patches of all images ``[patches, channels x frames x height x width]``, and grids."""
    grids = (GRIDS * len(counts))[: sum(counts)]
    own = per_prompt(grids, counts)
    inputs = text_with(
        [[[BEGIN, *[IMAGE] * (number_of_patches([grid]) // 4), END] for grid in one] for one in own], count
    )
    inputs |= type_ids(model, inputs["input_ids"])
    inputs |= {"pixel_values": noise(number_of_patches(grids), 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor(grids)}
    return Prompts(inputs, {"pixel_values": [number_of_patches(one) for one in own], "image_grid_thw": list(counts)})


def rows_of_frames(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """`Qwen2VLVideoProcessor`: as images, with several pairs of frames; Qwen 2.5 also takes the seconds of a pair."""
    grids = [[2, 4, 4], [1, 4, 6], [3, 4, 4]][: sum(counts)]
    own = per_prompt(grids, counts)
    inputs = text_with([[video_places(model, grid) for grid in one] for one in own], count)
    inputs |= type_ids(model, inputs["input_ids"])
    pixels = noise(number_of_patches(grids), 3 * 2 * 4 * 4, seed=3)
    inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}
    flat = {"pixel_values_videos": [number_of_patches(one) for one in own], "video_grid_thw": list(counts)}
    if takes(model, "second_per_grid_ts"):
        inputs["second_per_grid_ts"] = torch.tensor([1.0, 0.5, 2.0][: len(grids)])
        flat["second_per_grid_ts"] = list(counts)
    return Prompts(inputs, flat)


def video_places(model: PreTrainedModel, grid: list[int]) -> list[int]:
    """Qwen 3 writes each pair of frames by itself, after its time (`Qwen3VLProcessor.replace_video_token`)."""
    frames, places = grid[0], number_of_patches([grid]) // 4
    if not type(model).__name__.startswith("Qwen3"):
        return [BEGIN, *[VIDEO] * places, END]
    pair = [BEGIN, *[VIDEO] * (places // frames), END]
    return [token for frame in range(frames) for token in (30 + frame, *pair)]


def images_and_videos(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    """Prompts that hold their images, then each one video."""
    seen, shown = rows_of_patches(model, counts, 2), rows_of_frames(model, (1,) * len(counts), count)
    rows = []
    for number in range(len(counts)):
        parts = [one.inputs["input_ids"][number][one.inputs["attention_mask"][number] == 1] for one in (seen, shown)]
        rows.append(torch.cat(parts).tolist())
    inputs = padded(rows)
    given = {**seen.inputs, **shown.inputs, **inputs, **type_ids(model, inputs["input_ids"])}
    return Prompts(given, {**seen.flat, **shown.flat})


def qwen3_5() -> PreTrainedModel:
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=32, num_position_embeddings=16,
    )  # fmt: skip
    rope = {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    text = dict(
        TEXT, head_dim=16, rope_parameters=rope, layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    return build(
        "Qwen3_5ForConditionalGeneration", "Qwen3_5Config", text_config=text, vision_config=vision,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip


def glm4v() -> PreTrainedModel:
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=32, image_size=24,
    )  # fmt: skip
    rope = {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    text = {**TEXT, **rope_settings(rope)}
    return build(
        "Glm4vForConditionalGeneration", "Glm4vConfig", text_config=text, vision_config=vision, image_token_id=IMAGE,
        video_token_id=VIDEO, image_start_token_id=BEGIN, image_end_token_id=END, video_start_token_id=96,
        video_end_token_id=97,
    )  # fmt: skip


def qwen2_5_omni() -> PreTrainedModel:
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2, window_size=8, out_hidden_size=32, fullatt_block_indexes=[1],
    )  # fmt: skip
    audio = dict(
        num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=16, d_model=16, n_window=10,
        max_source_positions=40, output_dim=32,
    )  # fmt: skip
    text = {**TEXT, **rope_settings(MROPE)}
    return build(
        "Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2_5OmniThinkerConfig", text_config=text,
        vision_config=vision, audio_config=audio, audio_token_index=AUDIO, image_token_index=IMAGE,
        video_token_index=VIDEO, audio_start_token_id=BEGIN, audio_end_token_id=END,
        vision_start_token_id=96, vision_end_token_id=97,
    )  # fmt: skip


def omni_images(model: PreTrainedModel, counts: tuple[int, ...], count: int) -> Prompts:
    prompts = rows_of_patches(model, counts, count)
    ids = prompts.inputs["input_ids"]
    prompts.inputs["input_ids"] = torch.where(ids == BEGIN, 96, torch.where(ids == END, 97, ids))
    return prompts
