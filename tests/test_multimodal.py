"""Models that see or hear: beam search equals transformers', towers run once, and images are held once per prompt.

transformers repeats inputs for every beam. Where several images of a prompt lie one after another in a tensor, releases
before 5.24 repeat each image by itself for most families (prompts with images ab and c become aabbcc, where abab cc
is right), and 5.24 still does so for sounds. There the reference is transformers' search with the images of a prompt
repeated together, which is what those of its families do that repeat for themselves.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from comparing import OLD_RELEASE, check_equal, real_scores, returned_cache
from multimodal_models import FAMILIES, family_model, is_missing, path_of_family
from multimodal_prompts import Family, Prompts
from transformers import PreTrainedModel, VisionEncoderDecoderModel
from transformers.generation import utils as generation_utils
from watching import watching

import hf_paged_beam
from hf_paged_beam import versions
from hf_paged_beam.cache.layers import GROWTH, LEAST_SPARE, PoolLayer
from hf_paged_beam.versions import CACHE_ARGUMENT

WIDTH = 4
SEARCH = {
    "num_beams": WIDTH, "num_return_sequences": WIDTH, "max_new_tokens": 6, "do_sample": False,
    "return_dict_in_generate": True, "output_scores": True,
}  # fmt: skip
CASES = [(name, counts) for name, family in FAMILIES.items() for counts in family.counts]
OURS = [name for name, family in FAMILIES.items() if family.path != "handed over"]
ENCODER_DECODER = [name for name, family in FAMILIES.items() if family.encoder_decoder]


def case(name: str, counts: tuple[int, ...] | None = None, count: int = 4) -> tuple[PreTrainedModel, Family, Prompts]:
    """A family's model and prompts with `counts` images each (by default the first that it allows)."""
    if reason := is_missing(name):
        pytest.skip(reason)
    family, model = FAMILIES[name], family_model(name)
    prompts = family.prompts(model, counts or family.counts[0], count)
    given = {
        name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in prompts.inputs.items()
    }
    return model, family, Prompts(given, prompts.flat)


def paged(model: PreTrainedModel, prompts: Prompts, **settings: Any) -> Any:
    """Our search."""
    return model.generate(**prompts.inputs, **{**SEARCH, "custom_generate": "hf_paged_beam", **settings})


def stock(model: PreTrainedModel, prompts: Prompts, **settings: Any) -> Any:
    """transformers' search; skips where that itself fails on such inputs."""
    try:
        return model.generate(**prompts.inputs, **{**SEARCH, **settings})
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if CACHE_ARGUMENT == "cache":  # the newest releases have no such fault
            raise
        pytest.skip(f"transformers' own search raises here in this release: {error!r}")


def searcher_of(model: PreTrainedModel, family: Family) -> PreTrainedModel:
    """The model that the search runs on."""
    return model if family.searcher is None else getattr(model, family.searcher)


def repeat_parts(images: torch.Tensor, rows: list[int], times: int) -> torch.Tensor:
    """Repeat each part of `rows` rows as a whole."""
    return torch.cat([part.repeat(times, *[1] * (images.dim() - 1)) for part in images.split(rows)])


@contextlib.contextmanager
def images_stay_together(model: PreTrainedModel, flat: dict[str, list[int]]) -> Iterator[list[str]]:
    """Let transformers repeat the images of a prompt together; the list names the inputs that it would have repeated
    in another order, or failed to."""
    own, mixed = model._expand_inputs_for_generation, []

    def expand(expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in flat if kwargs.get(name) is not None}
        together = {name: repeat_parts(images, flat[name], expand_size) for name, images in given.items()}
        try:
            _, apart = own(expand_size=expand_size, input_ids=input_ids, **given)
        except RuntimeError:
            apart = {}
        mixed.extend(name for name in given if name not in apart or not torch.equal(apart[name], together[name]))
        ids, others = own(expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs)
        return ids, {**others, **together}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_expand_inputs_for_generation", expand, raising=False)
        yield mixed


@contextlib.contextmanager
def rows_seen(model: PreTrainedModel, tower: str) -> Iterator[list[int]]:
    """The rows of what each run of the tower was given, in a list that grows."""
    modules = [module for place, module in model.named_modules() if place.split(".")[-1] == tower]
    rows: list[int] = []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        rows.append(next(given).shape[0])

    hook = modules[0].register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


@pytest.mark.parametrize(("name", "counts"), CASES)
def test_equal_to_stock(name: str, counts: tuple[int, ...]) -> None:
    """All beams' scores and sequences, on the path that the architecture allows."""
    model, _, prompts = case(name, counts)
    ours = paged(model, prompts)
    assert ours.beam_path == path_of_family(name)
    with images_stay_together(model, prompts.flat) as mixed:
        together = stock(model, prompts)
    check_equal(together, ours, 1e-5)
    if not mixed:
        check_equal(stock(model, prompts), ours, 1e-5)
    for beams in ours.sequences.view(len(counts), WIDTH, -1).tolist():
        assert len(set(map(tuple, beams))) == WIDTH


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_seen_counts(name: str) -> None:
    """With other pixels the same prompts end elsewhere: the comparison above is about images, too."""
    model, _, prompts = case(name)
    pixels = next(given for given in prompts.inputs if prompts.inputs[given].is_floating_point())
    other = prompts.inputs[pixels].clone()
    other[..., 2:] = other[..., 2:].flip(-1)  # Pix2Struct's patches begin with their place
    other = {**prompts.inputs, pixels: other}
    first, second = paged(model, prompts), paged(model, Prompts(other))
    assert (first.sequences_scores - second.sequences_scores).abs().max() > 1e-3


@pytest.mark.parametrize("name", OURS)
def test_the_tower_runs_once(name: str) -> None:
    """It sees each image once, as in a search of one beam: nothing is repeated for the beams before it."""
    model, family, prompts = case(name)
    with rows_seen(model, family.tower) as alone:
        model.generate(**prompts.inputs, max_new_tokens=2, do_sample=False)
    if len(alone) > family.runs:
        pytest.skip("in this release the model looks at the image anew in every step")
    with rows_seen(model, family.tower) as rows:
        ours = paged(model, prompts)
    assert ours.beam_path != "handed over"
    assert rows == alone and len(rows) == family.runs


@pytest.mark.parametrize("name", OURS)
def test_pixels_are_not_repeated(name: str) -> None:
    """Nothing in a search has the shape of the images, and more of them."""
    if not hasattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL"):
        pytest.skip(
            "this release leaves it to each model which step reads the images, so that all steps are given them"
        )
    model, _, prompts = case(name)
    paged(model, prompts)  # the first search of a class tries both paths
    largest = max((given for given in prompts.inputs.values() if given.is_floating_point()), key=torch.Tensor.numel)
    with watching(model) as watch:
        paged(model, prompts)
    rows = {shape[0] for _, _, shape, dtype in watch.made if dtype.is_floating_point and shape[1:] == largest.shape[1:]}
    assert all(number <= largest.shape[0] for number in rows)


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_the_encoder_is_held_once_per_prompt(name: str) -> None:
    """The encoder runs once at `B` rows, and its keys and values lie in the cache at `B` rows to the end."""
    model, family, prompts = case(name)
    inner = searcher_of(model, family)
    with rows_seen(inner, "encoder") as rows:
        ours = paged(model, prompts)
    batch = len(family.counts[0])
    assert rows == [batch]
    layers = returned_cache(ours).cross_attention_cache.layers
    assert [(layer._keys.shape[0], layer._values.shape[0]) for layer in layers] == [(batch, batch)] * 2


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_no_encoder_keys_per_beam_while_decoding(name: str) -> None:
    """Where the folded path runs, the largest tensor of a step is smaller than one layer's keys of the encoder would
    be at one row per beam."""
    model, family, prompts = case(name, count=30)
    if path_of_family(name) != "folded":
        pytest.skip("this decoder's attention does not go through transformers' interface in this release")
    width, inner = 8, searcher_of(model, family)
    settings = {"num_beams": width, "num_return_sequences": 1, "max_new_tokens": 4}
    paged(model, prompts, **settings)  # the first search of a class tries both paths
    with watching(inner) as watch:
        ours = paged(model, prompts, **settings)
    assert ours.beam_path == "folded"
    keys = returned_cache(ours).cross_attention_cache.layers[0]._keys
    sizes = [shape.numel() for phase, _, shape, _ in watch.made if phase >= 3]
    assert len(sizes) > 100
    assert max(sizes) < keys.numel() * width


def layers_of(cache: Any) -> tuple[list[Any], list[Any]]:
    """Layers of self-attention, and of cross-attention."""
    if not hasattr(cache, "self_attention_cache"):
        return list(cache.layers), []
    return list(cache.self_attention_cache.layers), list(cache.cross_attention_cache.layers)


def pooled_layers(cache: Any) -> tuple[list[Any], list[Any]]:
    """The same of a cache of ours, without layers that keep a recurrent state per beam, as transformers does."""
    own, cross = layers_of(cache)
    return [layer for layer in own if isinstance(layer, PoolLayer)], cross


def bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", OURS)
def test_memory_of_fifty_beams(name: str) -> None:
    """A prompt is held once where transformers holds it for each beam; what beams add is held by both.

    Of a layer, transformers holds ``W·(P + T)`` tokens per prompt for `T` steps (or the last window of them), the pool
    at most ``P + W·T`` and the room to grow, the encoder's keys ``W·L`` against `L`.
    """
    width, steps = 50, 2
    model, family, prompts = case(name, count=120)
    settings = {"num_beams": width, "num_return_sequences": 1, "min_new_tokens": steps + 1, "max_new_tokens": steps + 1}
    ours = paged(model, prompts, **settings)
    with images_stay_together(model, prompts.flat):
        theirs = stock(model, prompts, **settings)
    batch = len(family.counts[0])
    own, cross = pooled_layers(returned_cache(ours))
    prompt = own[0].length - steps
    slots = prompt + width * steps
    most = sum(layer.bytes_per_token() * batch * (slots + max(slots // GROWTH, LEAST_SPARE)) for layer in own)
    most += sum(layer.bytes_per_token() * batch * layer.get_seq_length() for layer in cross)
    assert ours.kv_usage.bytes_held <= most
    least = sum(
        layer.bytes_per_token() * batch * width * min(prompt + steps, (layer.sliding_window or prompt + steps + 1) - 1)
        for layer in own
    ) + sum(layer.bytes_per_token() * batch * width * layer.get_seq_length() for layer in cross)
    layers = [
        layer for layer in itertools.chain(*layers_of(returned_cache(theirs))) if not versions.is_recurrent(layer)
    ]
    held = itertools.chain.from_iterable((layer.keys, layer.values) for layer in layers)
    assert bytes_of(held) == least
    assert least > (8 if family.long_prompt else 1.5) * ours.kv_usage.bytes_held


@pytest.mark.parametrize(("name", "counts"), CASES)
def test_as_a_callable(name: str, counts: tuple[int, ...]) -> None:
    """After transformers repeated the inputs: the same result, or an error that says what to do instead."""
    model, _, prompts = case(name, counts)
    stock(model, prompts)  # skips where transformers cannot repeat the inputs
    with images_stay_together(model, prompts.flat):
        theirs = stock(model, prompts)
    try:
        ours = paged(model, prompts, custom_generate=hf_paged_beam.beam_search)
    except ValueError as error:
        assert "Use custom_generate='hf_paged_beam'" in str(error)
        return
    assert ours.beam_path == path_of_family(name)
    check_equal(theirs, ours, 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_prompt_alone(name: str) -> None:
    """A prompt's best sequence does not depend on the other prompts, their images or the padding."""
    model, family, prompts = case(name)
    together = paged(model, prompts, num_return_sequences=1)
    scores = real_scores(together.sequences_scores)
    for number in range(len(family.counts[0])):
        alone = paged(model, prompts.only(number), num_return_sequences=1)
        torch.testing.assert_close(real_scores(alone.sequences_scores)[0], scores[number], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [("donut", "trocr"), ("trocr", "donut")])
def test_one_class_around_two_decoders(order: tuple[str, str]) -> None:
    """`VisionEncoderDecoderModel` holds decoders of any kind: what was found of one is not held against another."""
    unmet = type("OwnVisionEncoderDecoderModel", (VisionEncoderDecoderModel,), {})
    for name in order:
        model, _, prompts = case(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "__class__", unmet)
            ours = paged(model, prompts)
        assert ours.beam_path == path_of_family(name)
        check_equal(stock(model, prompts), ours, 1e-5)


def image_processor(name: str, **settings: Any) -> Any:
    """An image processor of this release that works with PIL."""
    found = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return found(**settings)


PROCESSORS: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "llava": ("CLIPImageProcessor", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}, [
        (40, 30), (30, 40), (30, 30)]),
    "llava_next": ("LlavaNextImageProcessor", {
        "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28},
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}, [(24, 50), (50, 50), (24, 50)]),
    "qwen2_vl": ("Qwen2VLImageProcessor", {
        "patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}}, [(16, 16), (16, 24), (24, 16)]),
    "trocr": ("ViTImageProcessor", {"size": {"height": 28, "width": 28}}, [(30, 60), (20, 40)]),
    "idefics3": ("Idefics3ImageProcessor", {
        "size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False}, [
        (28, 21), (28, 28), (28, 28)]),
}  # fmt: skip
"""An image processor with its settings, and heights and widths of images that give what the families' prompts hold."""


@pytest.mark.parametrize("name", PROCESSORS)
def test_inputs_are_of_the_processors_form(name: str) -> None:
    """Names, shapes and kinds of numbers are those that the family's image processor makes."""
    pillow = pytest.importorskip("PIL.Image")
    processor, settings, sizes = PROCESSORS[name]
    if OLD_RELEASE and name == "qwen2_vl":
        pytest.skip("this release's processor takes sizes under other names")
    try:
        process = image_processor(processor, **settings)
    except ImportError as error:
        pytest.skip(f"this release's processor wants another package: {str(error).strip()[:80]}")
    _, family, prompts = case(name)
    images = [pillow.new("RGB", (width, height), (90, 120, 30)) for height, width in sizes]
    given = iter(images)
    nested = [[next(given) for _ in range(own)] for own in family.counts[0]]
    made = process(images=nested if name == "idefics3" else images, return_tensors="pt")
    for field in made:
        if field in ("rows", "cols"):
            continue  # for the text
        mine, theirs = prompts.inputs[field], made[field]
        assert (mine.shape, mine.is_floating_point()) == (theirs.shape, theirs.is_floating_point()), field


def test_cache_argument_of_this_release() -> None:
    """The returned cache stands under the name that this release gives it."""
    model, _, prompts = case("llava")
    assert isinstance(getattr(paged(model, prompts), CACHE_ARGUMENT), hf_paged_beam.PagedBeamCache)
