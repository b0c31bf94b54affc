"""Every family of encoder-decoder models: stock's result, an encoder that runs once, and its keys held once per prompt.

T5, BART and Whisper are looked at in more depth by the tests of inputs, outputs and calls.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from comparing import OLD_RELEASE, check_equal, check_identical, returned_cache, search_both
from tiny_models import EOS, PAD, SEQ2SEQ, START, VOCABULARY, random_model
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin
from watching import forward_rows, watching

from hf_paged_beam import disable, enable
from hf_paged_beam.cache.layers import GROWTH, LEAST_SPARE
from hf_paged_beam.versions import CACHE_ARGUMENT

NAME = "hf_paged_beam"
BATCH, WIDTH, LENGTH = 2, 4, 23
"""Prompts, beams, and tokens of an encoder's prompt: a length that nothing else in these models has."""

LANGUAGE = 90
"""Token of the language that a multilingual model is told to speak."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models, and what its published generation settings hold.

    Attributes:
        model: name of the model's class.
        config: name of its configuration's class.
        sizes: what the configuration is made with, or a function that makes the configuration.
        inputs: makes two prompts, the second padded, of `LENGTH` positions for the decoder to look at.
        settings: of the search.
        path: how keys are read, where the model's attention goes through transformers' interface.
        old_path: the same before 5.17, where that is another.
        dtype: float64 leaves nothing to rounding, so that orders can be compared exactly.
    """

    model: str
    config: str = ""
    sizes: dict[str, Any] | Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: str = "folded"
    old_path: str | None = None
    dtype: torch.dtype = torch.float64


# --- Prompts ---


def noise(*shape: int) -> torch.Tensor:
    """The same random features at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mask_of(count: int, pads: int) -> torch.Tensor:
    """Attention mask of two prompts, the second padded on the right, as encoders have it."""
    attention_mask = torch.ones(BATCH, count, dtype=torch.long)
    attention_mask[1, count - pads :] = 0
    return attention_mask


def text() -> dict[str, torch.Tensor]:
    """Ids."""
    attention_mask = mask_of(LENGTH, pads=4)
    ids = torch.randint(6, LANGUAGE, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.masked_fill(attention_mask == 0, PAD), "attention_mask": attention_mask}


def text_with_global_attention() -> dict[str, torch.Tensor]:
    """Ids, the first of which looks at all others and is looked at by them (LED)."""
    first = torch.zeros(BATCH, LENGTH, dtype=torch.long).index_fill(1, torch.tensor(0), 1)
    return {**text(), "global_attention_mask": first}


def spectrogram() -> dict[str, torch.Tensor]:
    """Sound as Whisper takes it, always of the length that its configuration says."""
    return {"input_features": noise(BATCH, 8, 2 * LENGTH)}


def frames(features: int, count: int) -> dict[str, torch.Tensor]:
    """Sound as frames of features, of which an encoder makes fewer positions."""
    return {"input_features": noise(BATCH, count, features), "attention_mask": mask_of(count, pads=32)}


def waveform(samples: int) -> dict[str, torch.Tensor]:
    """Sound as samples."""
    return {"input_values": noise(BATCH, samples), "attention_mask": mask_of(samples, pads=samples // 4)}


def patches() -> dict[str, torch.Tensor]:
    """An image as patches, each with its row and column (Pix2Struct)."""
    flattened, attention_mask = noise(BATCH, LENGTH, 2 + 12), mask_of(LENGTH, pads=4).float()
    places = torch.arange(LENGTH)
    flattened[..., 0], flattened[..., 1] = 1 + places // 8, 1 + places % 8
    return {"flattened_patches": flattened * attention_mask.unsqueeze(-1), "attention_mask": attention_mask}


def pixels() -> dict[str, torch.Tensor]:
    """An image that is one row of patches; a token of the encoder's own stands before them."""
    return {"pixel_values": noise(BATCH, 3, 4, 4 * (LENGTH - 1))}


# --- Configurations ---

BARTS = {**SEQ2SEQ, "max_position_embeddings": 64}
T5S = dict(
    vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_decoder_layers=2, num_heads=4,
    pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD,
)  # fmt: skip
FSMTS = {name: size for name, size in BARTS.items() if name != "vocab_size"}
FSMTS |= dict(langs=["en", "de"], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)
PROPHETNETS = dict(
    vocab_size=VOCABULARY, hidden_size=32, encoder_ffn_dim=37, decoder_ffn_dim=37, num_encoder_layers=2,
    num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4, max_position_embeddings=64,
    pad_token_id=PAD, eos_token_id=EOS, bos_token_id=START, decoder_start_token_id=START, ngram=2, num_buckets=8,
    relative_max_distance=16,
)  # fmt: skip
SPEECHES = dict(
    SEQ2SEQ, max_source_positions=400, max_target_positions=64, num_conv_layers=2, conv_kernel_sizes=(3, 3),
    conv_channels=16, input_feat_per_channel=8, input_channels=1,
)  # fmt: skip
SEAMLESS = dict(
    vocab_size=VOCABULARY, t2u_vocab_size=60, hidden_size=32, max_position_embeddings=64, encoder_layers=2,
    encoder_ffn_dim=37, encoder_attention_heads=4, decoder_layers=2, decoder_ffn_dim=37, decoder_attention_heads=4,
    pad_token_id=PAD, eos_token_id=EOS, bos_token_id=2, decoder_start_token_id=START, speech_encoder_layers=1,
    speech_encoder_attention_heads=4, speech_encoder_intermediate_size=37, feature_projection_input_dim=16,
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, adaptor_kernel_size=8, adaptor_stride=8,
    num_adapter_layers=1, max_source_positions=400, conv_depthwise_kernel_size=3, t2u_encoder_layers=1,
    t2u_encoder_ffn_dim=37, t2u_encoder_attention_heads=4, t2u_decoder_layers=2, t2u_decoder_ffn_dim=37,
    t2u_decoder_attention_heads=4, t2u_max_position_embeddings=128, upsample_initial_channel=8,
    upsample_rates=(2, 2), upsample_kernel_sizes=(4, 4), resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3),),
    unit_hifi_gan_vocab_size=60, unit_embed_dim=8, lang_embed_dim=4, spkr_embed_dim=4, vocoder_num_langs=4,
    vocoder_num_spkrs=2, left_max_position_embeddings=8, right_max_position_embeddings=4, char_vocab_size=30,
)  # fmt: skip
MOONSHINES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=37, encoder_num_hidden_layers=2,
    decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
    decoder_num_key_value_heads=2, max_position_embeddings=64, bos_token_id=START, decoder_start_token_id=START,
    eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip
BERTS = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
    max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=START,
)  # fmt: skip
CROSS = {"is_decoder": True, "add_cross_attention": True}


def bert_to_bert() -> Any:
    """Two BERTs, the second with cross-attention."""
    encoder = transformers.BertConfig(**BERTS)
    return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, transformers.BertConfig(**BERTS, **CROSS), pad_token_id=PAD, decoder_start_token_id=START
    )


def bert_to_gpt2() -> Any:
    """BERT, and GPT-2 with cross-attention."""
    decoder = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, add_cross_attention=True,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=START,
    )  # fmt: skip
    return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**BERTS), decoder, pad_token_id=PAD, decoder_start_token_id=START
    )


def speech_to_bert() -> Any:
    """Wav2Vec2 and a BERT of another size, so that the encoder's states are projected."""
    encoder = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, conv_dim=(16, 16),
        conv_stride=(4, 4), conv_kernel=(8, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, vocab_size=32,
    )  # fmt: skip
    return transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, transformers.BertConfig(**BERTS, **CROSS), pad_token_id=PAD, decoder_start_token_id=START
    )


def image_to_bert() -> Any:
    """ViT and BERT."""
    encoder = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37, patch_size=4,
        image_size=(4, 4 * (LENGTH - 1)),
    )  # fmt: skip
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, transformers.BertConfig(**BERTS, **CROSS), pad_token_id=PAD, decoder_start_token_id=START
    )


def pix2struct() -> Any:
    """A T5 that reads patches."""
    words = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4,
        "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD, "use_cache": True,
    }  # fmt: skip
    image = {
        "hidden_size": 32, "patch_embed_hidden_size": 12, "d_ff": 37, "d_kv": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "seq_len": 64,
    }  # fmt: skip
    return transformers.Pix2StructConfig(
        text_config=words, vision_config=image, decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=EOS
    )


def t5gemma() -> Any:
    """Gemma 2 as encoder and as decoder."""
    part = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "sliding_window": 64 if OLD_RELEASE else 8,  # whose own search cuts the encoder's keys to a window, too
        "max_position_embeddings": 64, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": START,
    }  # fmt: skip
    return transformers.T5GemmaConfig(encoder=part, decoder={**part, "cross_attention_hidden_size": 32})


def whisper() -> Any:
    """Whisper, whose encoder gives as many positions as its configuration says."""
    return transformers.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=LENGTH, max_target_positions=64)


SUMMARY = {"no_repeat_ngram_size": 2, "min_length": 5, "length_penalty": 2.0}
TRANSLATION = {"forced_bos_token_id": LANGUAGE}
CHAT = {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "min_length": 4, "length_penalty": 0.65}
LEDS = dict(SEQ2SEQ, attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64)
EXPERTS = dict(BARTS, num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1, expert_capacity=64)

FAMILIES = {
    "bart": Family(
        model="BartForConditionalGeneration", config="BartConfig", sizes=BARTS, inputs=text,
        settings={**SUMMARY, "forced_bos_token_id": 7, "forced_eos_token_id": EOS},
    ),
    "mbart": Family(
        model="MBartForConditionalGeneration", config="MBartConfig", sizes=BARTS, inputs=text,
        settings={**TRANSLATION, "forced_eos_token_id": EOS},
    ),
    "marian": Family(
        model="MarianMTModel", config="MarianConfig", sizes=BARTS, inputs=text,
        settings={"decoder_start_token_id": PAD, "bad_words_ids": [[PAD]], "forced_eos_token_id": EOS},
    ),
    "m2m100": Family(
        model="M2M100ForConditionalGeneration", config="M2M100Config", sizes=BARTS, inputs=text, settings=TRANSLATION
    ),
    "nllb": Family(
        model="M2M100ForConditionalGeneration", config="M2M100Config", sizes=BARTS, inputs=text,
        settings={**TRANSLATION, "decoder_start_token_id": EOS, "no_repeat_ngram_size": 2},
    ),
    "nllb-moe": Family(  # its experts read the decoder's mask, so that a mask over slots would change them
        model="NllbMoeForConditionalGeneration", config="NllbMoeConfig", sizes=EXPERTS, inputs=text,
        settings=TRANSLATION, path="gathered", old_path="folded",
    ),
    "pegasus": Family(
        model="PegasusForConditionalGeneration", config="PegasusConfig", sizes=BARTS, inputs=text,
        settings={**SUMMARY, "length_penalty": 0.8, "decoder_start_token_id": PAD},
    ),
    "t5": Family(model="T5ForConditionalGeneration", config="T5Config", sizes=T5S, inputs=text, settings=SUMMARY),
    "mt5": Family(model="MT5ForConditionalGeneration", config="MT5Config", sizes=T5S, inputs=text),
    "umt5": Family(model="UMT5ForConditionalGeneration", config="UMT5Config", sizes=T5S, inputs=text),
    "led": Family(
        model="LEDForConditionalGeneration", config="LEDConfig", sizes=LEDS, inputs=text_with_global_attention,
        settings=SUMMARY, path="gathered",
    ),
    "prophetnet": Family(  # in float64 its masks are infinite
        model="ProphetNetForConditionalGeneration", config="ProphetNetConfig", sizes=PROPHETNETS, inputs=text,
        settings=SUMMARY, path="gathered", dtype=torch.float32,
    ),
    "fsmt": Family(
        model="FSMTForConditionalGeneration", config="FSMTConfig", sizes=FSMTS, inputs=text,
        settings={"forced_eos_token_id": EOS}, path="gathered",
    ),
    "blenderbot": Family(
        model="BlenderbotForConditionalGeneration", config="BlenderbotConfig", sizes=BARTS, inputs=text, settings=CHAT
    ),
    "whisper": Family(model="WhisperForConditionalGeneration", sizes=whisper, inputs=spectrogram),
    "speech2text": Family(
        model="Speech2TextForConditionalGeneration", config="Speech2TextConfig", sizes=SPEECHES,
        inputs=lambda: frames(8, 4 * LENGTH),
    ),
    "seamless": Family(
        model="SeamlessM4TForTextToText", config="SeamlessM4TConfig", sizes=SEAMLESS, inputs=text,
        settings={"no_repeat_ngram_size": 2},
    ),
    "seamless-speech": Family(
        model="SeamlessM4TForSpeechToText", config="SeamlessM4TConfig", sizes=SEAMLESS,
        inputs=lambda: frames(16, 8 * (LENGTH - 1)),
    ),
    "seamless-v2": Family(
        model="SeamlessM4Tv2ForTextToText", config="SeamlessM4Tv2Config", sizes=SEAMLESS, inputs=text
    ),
    "bert2bert": Family(model="EncoderDecoderModel", sizes=bert_to_bert, inputs=text, settings=SUMMARY),
    "bert2gpt2": Family(model="EncoderDecoderModel", sizes=bert_to_gpt2, inputs=text),
    "speech2bert": Family(
        model="SpeechEncoderDecoderModel", sizes=speech_to_bert, inputs=lambda: waveform(16 * LENGTH + 28)
    ),
    "image2bert": Family(model="VisionEncoderDecoderModel", sizes=image_to_bert, inputs=pixels),
    "pix2struct": Family(model="Pix2StructForConditionalGeneration", sizes=pix2struct, inputs=patches),
    "moonshine": Family(
        model="MoonshineForConditionalGeneration", config="MoonshineConfig", sizes=MOONSHINES,
        inputs=lambda: waveform(384 * LENGTH + 600),
    ),
    "t5gemma": Family(model="T5GemmaForConditionalGeneration", sizes=t5gemma, inputs=text, old_path="gathered"),
}  # fmt: skip
TRANSLATES_FROM_A_LANGUAGE = [name for name, family in FAMILIES.items() if "forced_bos_token_id" in family.settings]


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """The family's tiny random model, the same for all tests; the test is skipped where the release has none."""
    family = FAMILIES[name]
    classes = [getattr(transformers, given, None) for given in (family.model, family.config or family.model)]
    if None in classes:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model}")
    config = family.sizes() if callable(family.sizes) else classes[1](**family.sizes)
    model = random_model(classes[0], config, family.dtype)
    settings = model.generation_config
    settings.forced_bos_token_id = settings.forced_eos_token_id = None
    settings.decoder_start_token_id = START
    return model


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """The family's prompts, features in the model's dtype."""
    return {
        key: given.to(FAMILIES[name].dtype) if given.is_floating_point() else given
        for key, given in FAMILIES[name].inputs().items()
    }


def has_own_attention(model: PreTrainedModel) -> bool:
    """Whether this release's decoder has an attention outside transformers' interface, which cannot be folded."""
    return "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[type(model.get_decoder()).__module__])


def path_of(name: str) -> str:
    """The family's path in this release."""
    if has_own_attention(model_of(name)):
        return "gathered"
    return (OLD_RELEASE and FAMILIES[name].old_path) or FAMILIES[name].path


# --- Results ---

SEARCH = {"num_beams": WIDTH, "num_return_sequences": WIDTH, "max_new_tokens": 8}
OBJECT = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False}


@functools.cache
def ends_of(name: str) -> list[int]:
    """Ends of a text: tokens that the model says in the middle of one, so that beams do end early."""
    stock, _ = search_both(model_of(name), inputs_of(name), **{**SEARCH, **FAMILIES[name].settings})
    return sorted({EOS, *stock.sequences[:, -3:].flatten().tolist()})


def check_same(name: str, stock: Any, ours: Any) -> None:
    """All fields of all beams, to the last bits where the model is of float64; and the path that was to be taken."""
    check_equal(stock, ours, 1e-5)
    if FAMILIES[name].dtype == torch.float64:
        check_identical(stock, ours)
    # Between 4.57 and 5.17 the attention of some models changed, and with it the path.
    assert ours.beam_path == path_of(name) or (OLD_RELEASE and ours.beam_path in ("folded", "gathered"))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_stock(name: str, early_stopping: bool | str) -> None:
    """On a padded batch, with the settings that the family is published with."""
    settings = {**SEARCH, **FAMILIES[name].settings, "early_stopping": early_stopping, "eos_token_id": ends_of(name)}
    stock, ours = search_both(model_of(name), inputs_of(name), **settings)
    check_same(name, stock, ours)
    beams = ours.sequences.view(BATCH, WIDTH, -1)
    assert all(len(of_prompt.unique(dim=0)) == WIDTH for of_prompt in beams)
    assert not torch.isclose(ours.sequences_scores[:WIDTH], ours.sequences_scores[WIDTH:], atol=1e-4, rtol=0).any()
    lengths = (ours.beam_indices >= 0).sum(-1)
    if early_stopping is True and not OLD_RELEASE:  # else a late end may be better; old releases may give other beams
        assert lengths.min() < SEARCH["max_new_tokens"]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_prompt_alone(name: str) -> None:
    """A batch of one, without padding: the gathered path may give the model a view of the encoder's keys."""
    inputs = {key: given[:1] for key, given in inputs_of(name).items()}
    stock, ours = search_both(model_of(name), inputs, **SEARCH, eos_token_id=ends_of(name))
    check_same(name, stock, ours)


@pytest.mark.parametrize("name", TRANSLATES_FROM_A_LANGUAGE)
def test_a_forced_first_token(name: str) -> None:
    """The language token, or what BART is told to begin with."""
    settings = {**SEARCH, **FAMILIES[name].settings}
    stock, ours = search_both(model_of(name), inputs_of(name), **settings)
    check_same(name, stock, ours)
    assert (ours.sequences[:, 1] == settings["forced_bos_token_id"]).all()


def test_marian_never_says_its_padding() -> None:
    """Marian begins with the padding token, which is a bad word in its generation settings, however likely it is."""
    model, inputs = copy.deepcopy(model_of("marian")), inputs_of("marian")
    model.final_logits_bias[0, PAD] = 20
    told = {**SEARCH, **FAMILIES["marian"].settings}
    untold = {name: setting for name, setting in told.items() if name != "bad_words_ids"}
    for settings, says_it in ((told, False), (untold, True)):
        stock, ours = search_both(model, inputs, **settings)
        check_same("marian", stock, ours)
        assert (ours.sequences[:, 0] == PAD).all()
        assert (ours.sequences[:, 1] == PAD).any() == says_it


@pytest.mark.parametrize(
    ("name", "given"),
    [("led", "global_attention_mask"), ("speech2text", "attention_mask"), ("seamless-speech", "attention_mask"),
     ("speech2bert", "attention_mask"), ("moonshine", "attention_mask"), ("bart", "attention_mask")],
)  # fmt: skip
def test_a_mask_of_the_encoder_counts(name: str, given: str) -> None:
    """Without it the second prompt, of which it hides a part, has other scores: in both searches the same."""
    inputs = inputs_of(name)
    _, masked = search_both(model_of(name), inputs, **SEARCH)
    unmasked = torch.zeros_like(inputs[given]) if given.startswith("global") else torch.ones_like(inputs[given])
    stock, ours = search_both(model_of(name), {**inputs, given: unmasked}, **SEARCH)
    check_same(name, stock, ours)
    assert (ours.sequences_scores[WIDTH:] - masked.sequences_scores[WIDTH:]).abs().min() > 1e-4


def test_models_of_one_class_are_judged_apart() -> None:
    """A decoder without experts can be folded; that says nothing of one of the same class that has some."""
    dense, sparse = (
        random_model(transformers.NllbMoeForConditionalGeneration, transformers.NllbMoeConfig(**sizes))
        for sizes in ({**EXPERTS, "decoder_sparse_step": 0}, EXPERTS)
    )
    for model, name in ((dense, "bart"), (sparse, "nllb-moe"), (dense, "bart")):
        stock, ours = search_both(model, text(), **SEARCH)
        check_same(name, stock, ours)


# --- The encoder, and its keys ---


@contextmanager
def encoder_rows(model: PreTrainedModel) -> Iterator[list[int]]:
    """The rows that each pass of the encoder gave while the context lasts."""
    rows: list[int] = []
    hook = model.get_encoder().register_forward_hook(lambda module, args, output: rows.append(output[0].shape[0]))
    try:
        yield rows
    finally:
        hook.remove()


def storage_bytes(layer: Any) -> int:
    """Bytes of everything that a layer of a cache keeps alive, whatever it says itself."""
    kept = [given.untyped_storage() for given in tree_leaves(list(vars(layer).values())) if torch.is_tensor(given)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


@contextmanager
def cross_bytes(model: PreTrainedModel) -> Iterator[list[list[int]]]:
    """Bytes of the encoder's keys and values in each layer, after each pass of the model."""
    held: list[list[int]] = []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        held.append([storage_bytes(layer) for layer in kwargs[CACHE_ARGUMENT].cross_attention_cache.layers])

    hook = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield held
    finally:
        hook.remove()


def bytes_of(cache: Any) -> list[int]:
    """Bytes of each layer of a cache of transformers' own."""
    return [sum(states.numel() * states.element_size() for states in (layer.keys, layer.values))
            for layer in cache.layers]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_encoder_runs_once_and_its_keys_are_held_once_per_prompt(name: str) -> None:
    """In every layer and through the whole search: a part in `num_beams` of what transformers' own search holds."""
    model = model_of(name)
    stock, _ = search_both(model, inputs_of(name), **SEARCH)
    expected = [held // WIDTH for held in bytes_of(returned_cache(stock).cross_attention_cache)]
    with encoder_rows(model) as rows, cross_bytes(model) as held:
        ours = GenerationMixin.generate(model, **inputs_of(name), **SEARCH, **OBJECT, custom_generate=NAME)
    assert rows == [BATCH]
    assert len(expected) == 2 and held == [expected] * ours.beam_indices.shape[1]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.path == "folded"])
def test_a_folded_step_never_repeats_the_encoders_keys(name: str) -> None:
    """After the prompt nothing is made that has the encoder's length and is as large as its keys for all beams."""
    model, inputs = model_of(name), inputs_of(name)
    if path_of(name) == "gathered":
        pytest.skip("this release's attention of its own cannot be folded")
    search_both(model, inputs, **SEARCH)  # this model is met
    with watching(model) as watch:
        ours = GenerationMixin.generate(model, **inputs, **SEARCH, **OBJECT, custom_generate=NAME)
    layers = returned_cache(ours).cross_attention_cache.layers
    keys_of_all_beams = min(layer.keys.numel() for layer in layers)
    assert layers[0].keys.shape[0] == BATCH * WIDTH and layers[0].keys.shape[2] == LENGTH
    repeated = [
        (operation, shape)
        for phase, operation, shape, _ in watch.made
        if phase > 2 and LENGTH in shape and shape.numel() >= keys_of_all_beams
    ]
    assert watch.phase > 2 and not repeated


MANY = 50
"""Beams, where memory counts."""


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_of_many_beams(name: str) -> None:
    """The encoder's keys once instead of `MANY` times; the decoder's at most once per token of the tree, and room."""
    model, steps = model_of(name), 8
    stock, ours = search_both(
        model, inputs_of(name), num_beams=MANY, num_return_sequences=MANY, max_new_tokens=steps, min_new_tokens=steps
    )
    check_equal(stock, ours, 1e-5)
    theirs = returned_cache(stock)
    cross, decoder = (sum(bytes_of(part)) for part in (theirs.cross_attention_cache, theirs.self_attention_cache))
    per_slot = decoder // (MANY * steps)
    bound = cross // MANY + decoder * (GROWTH + 1) // GROWTH + per_slot * (LEAST_SPARE + 1)
    held = ours.kv_usage.bytes_held
    assert cross // MANY < held <= bound
    assert (cross + decoder) / held >= (LENGTH + steps) / (LENGTH / MANY + steps * (GROWTH + 1) / GROWTH + 1)


# --- Each class's own generate ---


def generate_each_way(model: PreTrainedModel, **call: Any) -> tuple[Any, list[Any]]:
    """Results of transformers' own search, of the search by name, and of an enabled model."""
    stock = model.generate(**copy.deepcopy(call))
    ours = [model.generate(**copy.deepcopy(call), custom_generate=NAME)]
    try:
        ours.append(enable(model).generate(**copy.deepcopy(call)))
    finally:
        disable(model)
    return stock, ours


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "whisper"])  # which tests of calls look at
def test_both_ways_to_call_it(name: str) -> None:
    """By name, and enabled."""
    stock, ours = generate_each_way(model_of(name), **inputs_of(name), **SEARCH, **OBJECT, eos_token_id=ends_of(name))
    for output in ours:
        check_same(name, stock, output)


LANGUAGES = {"text_decoder_lang_to_code_id": {"fra": LANGUAGE}, "t2u_lang_code_to_id": {"fra": 7}}
LANGUAGES |= {"vocoder_lang_code_to_id": {"fra": 1}}


def narrow(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Features in float32."""
    return {key: given.float() if given.is_floating_point() else given for key, given in inputs.items()}


def seamless(class_name: str) -> PreTrainedModel:
    """A tiny SeamlessM4T of this class, which speaks a language."""
    version = "v2" if "v2" in class_name else ""
    config = getattr(transformers, f"SeamlessM4T{version}Config")(**SEAMLESS)
    model = random_model(getattr(transformers, class_name), config, torch.float32)  # old releases overflow in float64
    for name, codes in LANGUAGES.items():
        setattr(model.generation_config, name, codes)
    return model


TO_TEXT = {**SEARCH, **OBJECT, "tgt_lang": "fra", "no_repeat_ngram_size": 2, "eos_token_id": [EOS, 10, 20, 30, 40]}


@pytest.mark.parametrize("modality", ["text", "speech"])
@pytest.mark.parametrize("version", ["", "v2"])
@pytest.mark.parametrize("whole", [False, True])
def test_seamless_translates(whole: bool, version: str, modality: str) -> None:
    """`tgt_lang` of the classes for one task, and of the whole model, which is asked for no speech."""
    task = "Model" if whole else f"For{modality.capitalize()}ToText"
    model = seamless(f"SeamlessM4T{version}{task}")
    inputs = text() if modality == "text" else narrow(frames(16, 8 * (LENGTH - 1)))
    stock, ours = generate_each_way(model, **inputs, **TO_TEXT, **({"generate_speech": False} if whole else {}))
    for output in ours:
        check_equal(stock, output)
        assert (output.sequences[:, 1] == LANGUAGE).all()
        assert output.beam_path == ("gathered" if has_own_attention(model) else "folded")


@pytest.mark.parametrize("task", ["ForTextToSpeech", "ForSpeechToSpeech", "Model"])
def test_seamless_speaks(task: str) -> None:
    """Two searches, for the text and for the units of sound, whose waveforms are the same."""
    model = seamless(f"SeamlessM4T{task}")
    inputs = narrow(frames(16, 8 * (LENGTH - 1))) if task == "ForSpeechToSpeech" else text()
    call = {
        **inputs, "num_beams": WIDTH, "max_new_tokens": 8, "do_sample": False, "tgt_lang": "fra",
        "return_intermediate_token_ids": True, "speech_suppress_tokens": [0, 3],  # no units of the vocoder
    }  # fmt: skip
    with forward_rows(model.t2u_model) as rows:
        stock, ours = generate_each_way(model, **call)
    for output in ours:
        assert torch.equal(output.sequences, stock.sequences)
        assert torch.equal(output.unit_sequences, stock.unit_sequences)
        torch.testing.assert_close(output.waveform, stock.waveform, rtol=1e-3, atol=1e-4)
    assert rows.count(BATCH) == 2  # the units' start ran once per prompt, in both calls of ours
