"""Keys and values in fewer bytes: how far each number moves, and a search that moves them and nothing else."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from comparing import check_equal, returned_cache
from tiny_models import DECODER_ONLY, ENCODER_DECODER, path_of, prompts_for, shared_model
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import GenerationMixin

from hf_paged_beam import PagedBeamCache
from hf_paged_beam.cache.packing import KV_DTYPES, Packing, stored_dtype
from hf_paged_beam.versions import CACHE_ARGUMENT

NAME = "hf_paged_beam"
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "float8_e4m3fn": 1.0}


def packing(stored: str, computed: torch.dtype) -> Packing:
    return Packing(stored_dtype(stored), computed)


# --- numbers ---


@pytest.mark.parametrize("computed", COMPUTED, ids=str)
@pytest.mark.parametrize("size", [3, 8, 64])
def test_int8_moves_each_entry_by_half_a_step(size: int, computed: torch.dtype) -> None:
    """A step is the largest entry of the token's head over 127, and the computed dtype rounds once more."""
    states = torch.randn(2, 3, 5, size, generator=torch.manual_seed(0)).to(computed) * 4
    eight = packing("int8", computed)
    packed = eight.pack(states)
    assert packed.dtype == torch.int8 and packed.shape == (2, 3, 5, size + eight.scales.itemsize)
    largest = states.abs().amax(-1, keepdim=True).double()
    rounding = torch.finfo(computed).eps * largest
    moved = (eight.unpack(packed).double() - states.double()).abs()
    assert (moved <= largest / 127 / 2 + 2 * rounding).all() and moved.max() > 0


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("computed", COMPUTED, ids=str)
def test_small_numbers_keep_as_many_bits_as_large_ones(computed: torch.dtype, size: float) -> None:
    states = (torch.randn(50, 64, generator=torch.manual_seed(0)) * size).to(computed)
    eight = packing("int8", computed)
    moved = (eight.unpack(eight.pack(states)).double() - states.double()).norm() / states.double().norm()
    assert moved < 0.012


@pytest.mark.parametrize("computed", COMPUTED, ids=str)
def test_float8_keeps_three_bits_of_each_entry(computed: torch.dtype) -> None:
    """Half a unit in the last of four significant bits; below 2^-6 of the range, half of the least step, 2^-9."""
    states = torch.randn(2, 3, 5, 16, generator=torch.manual_seed(0)).to(computed) * 40
    eight = packing("float8_e4m3fn", computed)
    moved = (eight.unpack(eight.pack(states)).double() - states.double()).abs()
    largest = states.abs().amax(-1, keepdim=True).double()
    bound = states.abs().double() / 16 + largest / 448 * 2**-10 + 2 * torch.finfo(computed).eps * largest
    assert (moved <= bound).all() and moved.max() > 0


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("computed", COMPUTED, ids=str)
def test_zeros_stay_zeros_and_what_is_no_number_shows(stored: str, computed: torch.dtype) -> None:
    states = torch.zeros(3, 4, dtype=computed)
    states[1, 2], states[2, 0] = torch.nan, torch.inf
    unpacked = packing(stored, computed).unpack(packing(stored, computed).pack(states))
    assert (unpacked[0] == 0).all() and not unpacked[1].isfinite().any() and not unpacked[2].isfinite().any()


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_halves_are_casts(stored: str) -> None:
    states = torch.randn(2, 4)
    kind = getattr(torch, stored)
    assert packing(stored, torch.float32).pack(states).dtype == kind
    assert torch.equal(packing(stored, torch.float32).unpack(states.to(kind)), states.to(kind).float())


# --- searches: transformers' own, over a cache that rounds in the same places, is the reference ---


class _RoundedLayer(DynamicLayer):
    """Gives the prompt's own pass what it made, as one row per prompt would, and later steps what was rounded."""

    def __init__(self, stored: str):
        super().__init__()
        self.stored = stored

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first = not self.is_initialized
        rounded = [self._rounded(states) for states in (key_states, value_states)]
        keys, values = super().update(*rounded, *args, **kwargs)
        return (key_states, value_states) if first else (keys, values)

    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        if stored_dtype(self.stored) == states.dtype:
            return states
        kind = packing(self.stored, states.dtype)
        return kind.unpack(kind.pack(states))


def rounded_cache(model: Any, stored: str) -> Any:
    """A cache for transformers' own search."""

    def layers(count: int) -> DynamicCache:
        cache = DynamicCache()
        cache.layers = [_RoundedLayer(stored) for _ in range(count)]
        cache.layer_class_to_replicate = None
        return cache

    config = model.config
    if not config.is_encoder_decoder:
        return layers(config.num_hidden_layers)
    count = getattr(config, "decoder_layers", None) or config.num_decoder_layers
    return EncoderDecoderCache(layers(count), layers(count))


def searched(model: Any, kind: str, stored: str, **settings: Any) -> tuple[Any, Any]:
    """Both searches, each with keys that are stored as `stored`."""
    inputs = prompts_for(model, kind)
    call = dict(
        num_beams=6, num_return_sequences=6, max_new_tokens=8, return_dict_in_generate=True, output_scores=True,
        do_sample=False,
    )  # fmt: skip
    given = {CACHE_ARGUMENT: rounded_cache(model, stored)}
    stock = GenerationMixin.generate(model, **inputs, **call, **given)
    ours = GenerationMixin.generate(
        model, **inputs, **call, custom_generate=NAME, kv_dtype=stored, **settings
    )  # fmt: skip
    return stock, ours


FULL_ATTENTION = [kind for kind in (*DECODER_ONLY, *ENCODER_DECODER) if kind not in ("mistral", "gemma3")]


@pytest.mark.parametrize("path", ["folded", "gathered"])
@pytest.mark.parametrize("stored", KV_DTYPES)
@pytest.mark.parametrize("kind", FULL_ATTENTION)
def test_a_search_rounds_what_it_stores_and_nothing_else(kind: str, stored: str, path: str) -> None:
    if path == "folded" and path_of(kind) != path:
        pytest.skip("this release's attention cannot be folded")
    stock, ours = searched(shared_model(kind), kind, stored, beam_attention=path)
    check_equal(stock, ours, 1e-3)
    assert ours.beam_path == path


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_both_paths_agree_where_windows_slide(kind: str, stored: str) -> None:
    model = shared_model(kind)
    call = dict(num_beams=6, num_return_sequences=6, max_new_tokens=8, return_dict_in_generate=True,
                output_scores=True, kv_dtype=stored, custom_generate=NAME)  # fmt: skip
    outputs = [
        model.generate(**prompts_for(model, kind), **call, beam_attention=path) for path in ("gathered", "folded")
    ]
    check_equal(*outputs, 1e-3)


@pytest.mark.parametrize("stored", KV_DTYPES)
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_what_is_held_is_what_was_asked_for(kind: str, stored: str) -> None:
    model = shared_model(kind)
    call = dict(num_beams=5, max_new_tokens=6, return_dict_in_generate=True, custom_generate=NAME)
    whole = model.generate(**prompts_for(model, kind), **call).kv_usage
    packed = model.generate(**prompts_for(model, kind), **call, kv_dtype=stored).kv_usage
    size = 8
    scale = 4 if BYTES[stored] == 1 else 0
    expected = (size * BYTES[stored] + scale) / (size * 4)
    assert packed.bytes_separate / whole.bytes_separate == pytest.approx(expected)
    assert packed.bytes_held < whole.bytes_held


def test_the_models_own_dtype_is_stored_as_it_is() -> None:
    model = shared_model("llama")
    half = model.__class__(model.config).to(torch.bfloat16).eval()
    ours = half.generate(**prompts_for(half, "llama"), num_beams=3, max_new_tokens=4, custom_generate=NAME,
                         kv_dtype=torch.bfloat16, return_dict_in_generate=True)  # fmt: skip
    assert all(layer._packing is None for layer in returned_cache(ours).layers)


@pytest.mark.as_written
def test_unpacked_keys_of_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step unpacks is gone before the next layer's turn: the memory that packing saves is saved in steps too."""
    model, alive, most = shared_model("llama"), [], []
    unpack = Packing.unpack

    def counted(self: Packing, packed: torch.Tensor) -> torch.Tensor:
        states = unpack(self, packed)
        alive.append(weakref.ref(states))
        most.append(sum(reference() is not None for reference in alive))
        return states

    model.generate(**prompts_for(model, "llama"), num_beams=3, max_new_tokens=2, custom_generate=NAME, kv_dtype="int8")
    monkeypatch.setattr(Packing, "unpack", counted)
    model.generate(**prompts_for(model, "llama"), num_beams=3, max_new_tokens=6, custom_generate=NAME, kv_dtype="int8")
    assert len(alive) == 5 * 2 * model.config.num_hidden_layers and max(most) == 2


# --- the cache as an object ---


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_a_packed_cache_serves_transformers_own_search(kind: str) -> None:
    model = shared_model(kind)
    call = dict(num_beams=4, num_return_sequences=4, max_new_tokens=6, return_dict_in_generate=True,
                output_scores=True, do_sample=False)  # fmt: skip
    given = [
        {CACHE_ARGUMENT: rounded_cache(model, "int8")},
        {CACHE_ARGUMENT: PagedBeamCache(model.config, num_beams=4, kv_dtype="int8")},
    ]
    stock, ours = (model.generate(**prompts_for(model, kind), **call, **cache) for cache in given)
    torch.testing.assert_close(ours.sequences_scores, stock.sequences_scores, atol=1e-3, rtol=0)
    assert torch.equal(ours.sequences, stock.sequences)


def test_a_packed_cache_is_unpacked_for_others() -> None:
    model = shared_model("llama")
    ours = model.generate(**prompts_for(model, "llama"), num_beams=4, max_new_tokens=6, kv_dtype="int8",
                          custom_generate=NAME, return_dict_in_generate=True)  # fmt: skip
    dynamic = returned_cache(ours).to_dynamic()
    keys = dynamic.layers[0].keys
    assert keys.dtype == torch.float32 and keys.shape[-1] == model.config.head_dim and keys.abs().max() > 0


def test_a_packed_prefix_stays_packed() -> None:
    """A search that begins with a packed cache goes on packed, and gives what the whole prompt gives."""
    model = shared_model("llama")
    inputs = prompts_for(model, "llama", 1)
    cache = PagedBeamCache(model.config, num_beams=4, kv_dtype="bfloat16")
    cache.accept_wide_prompt(False)
    with torch.no_grad():
        model(input_ids=inputs["input_ids"][:, :-1], attention_mask=inputs["attention_mask"][:, :-1],
              **{CACHE_ARGUMENT: cache})  # fmt: skip
    ours = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, num_beams=4, max_new_tokens=5, custom_generate=NAME,
                          return_dict_in_generate=True, output_scores=True)  # fmt: skip
    held = returned_cache(ours)
    assert held.kv_dtype == torch.bfloat16 and held.layers[0]._keys.dtype == torch.bfloat16
    whole = model.generate(**inputs, num_beams=4, max_new_tokens=5, custom_generate=NAME,
                           return_dict_in_generate=True, output_scores=True)  # fmt: skip
    torch.testing.assert_close(ours.sequences_scores, whole.sequences_scores, atol=0.1, rtol=0)


@pytest.mark.parametrize("given", ["int4", "float32", 8, True, torch.int32, ["int8"], torch.zeros(2)])
def test_other_dtypes_are_refused(given: Any) -> None:
    model = shared_model("llama")
    for call in (
        lambda: model.generate(torch.tensor([[7]]), num_beams=2, custom_generate=NAME, kv_dtype=given),
        lambda: PagedBeamCache(model.config, num_beams=2, kv_dtype=given),
    ):
        with pytest.raises(ValueError, match="kv_dtype must be None or one of 'float16', 'bfloat16', 'int8'"):
            call()


def test_a_call_and_its_cache_agree() -> None:
    model = shared_model("llama")
    cache = PagedBeamCache(model.config, num_beams=2, kv_dtype="int8")
    with pytest.raises(ValueError, match=r"made with kv_dtype=torch\.int8, but the call has kv_dtype=torch\.bfloat16"):
        model.generate(torch.tensor([[7]]), num_beams=2, custom_generate=NAME, kv_dtype="bfloat16",
                       **{CACHE_ARGUMENT: cache})  # fmt: skip
