"""How many bytes of keys and values a search will need, from the model's configuration alone.

    one token           sum over layers of  heads · (size of a key + size of a value) · bytes of a number
    separate sequences  B · W · (P + T - 1)        the last token is chosen, and never run
    one tree            B · (P + nodes)            and the room that pools keep to grow

How many nodes a tree has is the text's and the model's business. Expected here is ``W + W/2 + W/3 + ...``, a term for
each step, the last one first, and none below one: so many of a step's `W` tokens are still on some beam's path if the
number of a beam's children is drawn geometrically with mean 1 (of `a` tokens on paths, ``a / (1 + a/W)`` parents are
then; a critical birth-death process). Where the prompt is long beside the tree, that is near; a tree alone can have
twice as many.
"""

from __future__ import annotations

import dataclasses
from numbers import Integral
from typing import Any

import torch

from .cache import GROWTH, LEAST_SPARE, Packing, PagedBeamCache, PoolLayer, stored_dtype
from .versions import PreTrainedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of keys and values that one search holds when it ends, which is when it holds most.

    Attributes:
        token: of one token in all layers, as ours stores it.
        separate: in transformers' own search, which stores every beam from its first token on, in the model's dtype.
        expected: in ours, room to grow included, for a tree as wide as chance makes it (see the module's header).
            Where the prompt has 512 tokens and more, and at least twice as many as that tree, searches are within 10%
            of it; of long answers after a short prompt, trees differ too much from model to model.
        most: in ours, if no two beams ever shared a generated token; it cannot be more. (On a GPU, `compile=True`
            rounds pools up, and keeps those of the last searches: see docs/memory.md.)
        nodes: of that expected tree, tokens per prompt.
    """

    token: int
    separate: int
    expected: int
    most: int
    nodes: int


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What one layer stores of a sequence: bytes of a token, and how many tokens at most (None: all)."""

    token: int
    window: int | None

    def kept(self, length: int) -> int:
        """Of so many tokens."""
        return length if self.window is None else min(length, self.window - 1)


def estimate_memory(
    config: PreTrainedConfig,
    batch_size: int,
    num_beams: int,
    prompt_length: int,
    max_new_tokens: int,
    dtype: torch.dtype | str | None = None,
    *,
    kv_dtype: torch.dtype | str | None = None,
    encoder_length: int | None = None,
) -> MemoryEstimate:
    """Estimate the keys and values of a search that runs for `max_new_tokens`; weights and logits are not counted.

    Args:
        config: of the model.
        batch_size: `B`, prompts.
        num_beams: `W`, beams per prompt.
        prompt_length: `P`, tokens of the longest prompt; with an encoder, of the decoder's prompt (usually 1).
        max_new_tokens: `T`.
        dtype: of the model: a torch.dtype or its name; None for the configuration's.
        kv_dtype: what `generate` is given as `kv_dtype`, for keys and values in fewer bytes than the model computes
            with.
        encoder_length: positions of the encoder's output, for encoder-decoder models.

    Raises:
        ValueError: for a count below 1, an unknown dtype, a missing or needless `encoder_length`, or a configuration
            whose layers keep something other than keys and values of tokens.

    Example:
        >>> from transformers import LlamaConfig
        >>> llama_3_8b = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        ...                          num_key_value_heads=8, dtype="bfloat16")
        >>> told = estimate_memory(llama_3_8b, batch_size=1, num_beams=4, prompt_length=1000, max_new_tokens=201)
        >>> told.token // 2**10, told.separate // 2**20
        (128, 600)
    """
    counts = dict(
        batch_size=batch_size, num_beams=num_beams, prompt_length=prompt_length, max_new_tokens=max_new_tokens
    )
    _check(config, counts, encoder_length)
    computed = _computed_dtype(config, dtype)
    layers = _layers(config, computed.itemsize)
    packed = _layers(config, *_stored_bytes(computed, kv_dtype))
    steps = max_new_tokens - 1  # the last token is not run
    tree = round(sum(max(num_beams / age, 1.0) for age in range(1, steps + 1)))

    def ours(nodes: int, share_of_room: float, spare: int) -> int:
        slots = [_slots(layer.kept(prompt_length), nodes, share_of_room, spare) for layer in packed]
        tokens = sum(layer.token * count for layer, count in zip(packed, slots, strict=True))
        return batch_size * (_cross_bytes(config, packed, encoder_length) + tokens)

    row = sum(layer.token * layer.kept(prompt_length + steps) for layer in layers)
    return MemoryEstimate(
        token=sum(layer.token for layer in packed),
        separate=batch_size * num_beams * (row + _cross_bytes(config, layers, encoder_length)),
        expected=ours(tree, 0.5, 0),
        most=ours(num_beams * steps, 1.0, 1),
        nodes=tree,
    )


def _slots(prompt: int, nodes: int, share_of_room: float, spare: int) -> int:
    """Slots of a pool with a prompt and a tree, and of the room that it has when it has just grown, so much.

    `spare` slots are there where a step is captured and does not know yet what it needs.
    """
    needed = prompt + nodes + spare
    return needed + round(share_of_room * max(needed // GROWTH, LEAST_SPARE)) if nodes else prompt


def _layers(config: PreTrainedConfig, size: int, scale: int = 0) -> list[_Layer]:
    """Self-attention's layers, for numbers of so many bytes, and a scale of so many with each head's."""
    decoder = config.get_text_config(decoder=True)
    heads, entries = _heads(config, decoder)
    token = heads * 2 * (entries * size + scale)
    windows = _windows(config)
    if getattr(decoder, "num_decoder_layers", None):  # beside `num_layers`, the encoder's, of which caches are made
        windows = [None] * decoder.num_decoder_layers
    if not windows:  # where a configuration tells nothing of layers
        windows = [None] * decoder.num_hidden_layers
    return [_Layer(token, window) for window in windows]


def _heads(config: PreTrainedConfig, decoder: PreTrainedConfig) -> tuple[int, int]:
    """Heads that have keys, and numbers of a head's key or value."""
    try:
        odd = [name for name in _OTHER_KEYS if getattr(decoder, name, None)]
        heads = decoder.num_attention_heads
        size = getattr(decoder, "head_dim", None) or getattr(decoder, "d_kv", None) or decoder.hidden_size // heads
        key_heads = getattr(decoder, "num_key_value_heads", None) or heads
    # No attention, or sizes that differ from layer to layer: each release says so by another exception.
    except Exception as error:
        raise _cannot_tell(config, f"no one number of heads and head size ({error})") from error
    if odd:
        raise _cannot_tell(config, f"{odd[0]}={getattr(decoder, odd[0])}")
    return key_heads, size


_OTHER_KEYS = (
    "kv_lora_rank", "v_head_dim", "multi_query", "num_kv_heads", "n_recurrent_loops", "prompt_length", "use_lang_emb",
    "cross_attention_layers",
)  # fmt: skip
"""Settings of models whose cached keys and values are not ``heads · head size`` of each token once."""


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """Of each layer that keeps keys, how many tokens the next one sees, or None for all."""
    cache: Any = PagedBeamCache(config, num_beams=2)
    layers = getattr(cache, "self_attention_cache", cache).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not PoolLayer})
    if others:
        raise _cannot_tell(config, f"cache layers of another kind ({', '.join(others)})")
    return [layer.sliding_window for layer in layers]


def _cannot_tell(config: PreTrainedConfig, what: str) -> ValueError:
    return ValueError(
        f"estimate_memory counts layers that keep keys and values of tokens, all of one size, but config "
        f"({type(config).__name__}) has {what}. Run a short search instead, with return_dict_in_generate=True: the "
        f"output's kv_usage tells the bytes."
    )


_JOINED = ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder")
"""Models joined from any two: their decoder may have no attention to the encoder."""


def _cross_bytes(config: PreTrainedConfig, layers: list[_Layer], encoder_length: int | None) -> int:
    """Keys and values of one prompt's encoder output, which all its beams share."""
    is_apart = config.model_type in _JOINED and not config.decoder.add_cross_attention
    return 0 if is_apart else (encoder_length or 0) * sum(layer.token for layer in layers)


def _computed_dtype(config: PreTrainedConfig, dtype: torch.dtype | str | None) -> torch.dtype:
    """What the model computes with, and transformers stores."""
    given = (getattr(config, "dtype", None) or torch.float32) if dtype is None else dtype
    known = {str(one).removeprefix("torch."): one for one in _COMPUTED}
    name = str(given).removeprefix("torch.")
    if name not in known:
        raise ValueError(
            f"dtype must be None or one of {', '.join(known)}, but got {given!r}. It is the model's; say with kv_dtype "
            f"what the cache stores instead."
        )
    return known[name]


_COMPUTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _stored_bytes(computed: torch.dtype, kv_dtype: torch.dtype | str | None) -> tuple[int, int]:
    """Bytes of a number, and of the scale that is stored with each head's."""
    stored = stored_dtype(kv_dtype) or computed
    return stored.itemsize, Packing(stored, computed).scales.itemsize if stored.itemsize == 1 else 0


def _check(config: PreTrainedConfig, counts: dict[str, Any], encoder_length: int | None) -> None:
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"config must be a model's configuration (model.config), but got {type(config).__name__}")
    if encoder_length is not None:
        counts = {**counts, "encoder_length": encoder_length}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, but got {count!r}")
    if bool(config.is_encoder_decoder) != (encoder_length is not None):
        needs = "an encoder: say how long its output is" if config.is_encoder_decoder else "no encoder: leave it out"
        raise ValueError(f"encoder_length is {encoder_length}, but the model ({type(config).__name__}) has {needs}")
