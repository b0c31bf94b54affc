"""The families of models that see or hear, each with inputs of the form that its own processor makes."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from comparing import OLD_RELEASE
from multimodal_grids import (
    glm4v,
    images_and_videos,
    omni_images,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
    rows_of_frames,
    rows_of_patches,
)
from multimodal_images import (
    gemma3,
    git,
    git_prompts,
    idefics3,
    images_per_prompt,
    internvl,
    internvl_prompts,
    kosmos2,
    kosmos2_prompts,
    lfm2_vl,
    lfm2_vl_prompts,
    llava,
    llava_next,
    llava_onevision,
    mistral3,
    mistral3_prompts,
    mllama,
    mllama_prompts,
    one_tensor_per_image,
    paligemma,
    smolvlm,
    tiled_images,
)
from multimodal_prompts import BEGIN, END, Family, ReleaseLacksError
from multimodal_seq2seq import (
    OPT,
    T5,
    blip2,
    chunks_of_sound,
    donut,
    donut_prompts,
    flattened_patches,
    florence2,
    florence2_prompts,
    masked_spectra,
    only_pixels,
    padded_waves,
    pix2struct,
    questioned_image,
    qwen2_audio,
    speech_encoder_decoder,
    trocr,
    voxtral,
)
from transformers import PreTrainedModel

ONE_IMAGE: dict[str, Any] = dict(tower="vision_model", counts=((1, 1),), searcher="language_model")
PICTURE_TO_TEXT: dict[str, Any] = dict(tower="encoder", counts=((1, 1),), encoder_decoder=True, long_prompt=False)
FAMILIES: dict[str, Family] = {
    "llava": Family(llava, one_tensor_per_image(4)),
    "llava_next": Family(llava_next, tiled_images),
    "llava_onevision": Family(llava_onevision, tiled_images),
    "gemma3": Family(gemma3, one_tensor_per_image(4, around=([BEGIN], [END]))),
    "paligemma": Family(paligemma, one_tensor_per_image(4)),
    "internvl": Family(internvl, internvl_prompts),
    "mistral3": Family(mistral3, mistral3_prompts),
    "qwen2_vl": Family(qwen2_vl, rows_of_patches, tower="visual"),
    "qwen2_vl_video": Family(qwen2_vl, rows_of_frames, tower="visual"),
    "qwen2_5_vl": Family(qwen2_5_vl, rows_of_patches, tower="visual"),
    "qwen2_5_vl_video": Family(qwen2_5_vl, rows_of_frames, tower="visual"),
    "qwen3_vl": Family(qwen3_vl, rows_of_patches, tower="visual"),
    "qwen3_vl_video": Family(qwen3_vl, rows_of_frames, tower="visual"),
    "qwen2_vl_both": Family(qwen2_vl, images_and_videos, tower="visual", runs=2),
    "qwen2_5_vl_both": Family(qwen2_5_vl, images_and_videos, tower="visual", runs=2),
    "qwen3_vl_both": Family(qwen3_vl, images_and_videos, tower="visual", runs=2),
    "idefics3": Family(idefics3, images_per_prompt, tower="vision_model"),
    "smolvlm": Family(smolvlm, images_per_prompt, tower="vision_model"),
    "blip2_opt": Family(blip2(OPT), questioned_image, **ONE_IMAGE),
    "instructblip_opt": Family(blip2(OPT, "InstructBlip"), questioned_image, **ONE_IMAGE),
    "blip2_t5": Family(blip2(T5), questioned_image, decoder="t5", encoder_decoder=True, **ONE_IMAGE),
    "instructblip_t5": Family(
        blip2(T5, "InstructBlip"), questioned_image, decoder="t5", encoder_decoder=True, **ONE_IMAGE
    ),
    "florence2": Family(florence2, florence2_prompts, counts=((1, 1),), encoder_decoder=True),
    "trocr": Family(trocr, only_pixels(28, 28), decoder="trocr", **PICTURE_TO_TEXT),
    "donut": Family(donut, donut_prompts, decoder="mbart", **PICTURE_TO_TEXT),
    "pix2struct": Family(pix2struct, flattened_patches, decoder="pix2struct", **PICTURE_TO_TEXT),
    "speech_encoder_decoder": Family(speech_encoder_decoder, padded_waves, decoder="bart", **PICTURE_TO_TEXT),
    "kosmos2": Family(kosmos2, kosmos2_prompts, tower="vision_model", counts=((1, 1),), searcher="text_model"),
    "git": Family(git, git_prompts, tower="image_encoder", counts=((1, 1),), path="gathered"),
    "qwen3_5": Family(qwen3_5, rows_of_patches, tower="visual", path="recurrent"),
    # transformers 5.24 mixes up several images of one of its prompts, after its tower has run
    "glm4v": Family(glm4v, rows_of_patches, tower="visual", counts=((1, 1), (1, 0))),
    "lfm2_vl": Family(
        lfm2_vl,
        lfm2_vl_prompts,
        path="recurrent",
        fails_before_5_17="the model's own cache cannot be reordered",
    ),
    "omni_images": Family(qwen2_5_omni, omni_images, tower="visual"),
    "omni_sounds": Family(qwen2_5_omni, masked_spectra, tower="audio_tower"),
    "mllama": Family(mllama, mllama_prompts, tower="vision_model", counts=((2, 1), (1, 1)), path="handed over"),
    "qwen2_audio": Family(qwen2_audio, masked_spectra, tower="audio_tower"),
    "voxtral": Family(voxtral, chunks_of_sound, tower="audio_tower"),
}


def is_missing(name: str) -> str | None:
    """Why this release has no such family, or cannot search with it, if so."""
    if OLD_RELEASE and FAMILIES[name].fails_before_5_17:
        return FAMILIES[name].fails_before_5_17
    try:
        family_model(name)
    except ReleaseLacksError as error:
        return str(error)
    return None


def path_of_family(name: str) -> str:
    """How keys are read: "folded", unless the decoder's attention does not go through transformers' interface."""
    decoder = FAMILIES[name].decoder
    if decoder is None:
        return FAMILIES[name].path
    module = importlib.import_module(f"transformers.models.{decoder}.modeling_{decoder}")
    return "folded" if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(module) else "gathered"


@functools.cache
def family_model(name: str) -> PreTrainedModel:
    """The family's model, made once."""
    return FAMILIES[name].build()
