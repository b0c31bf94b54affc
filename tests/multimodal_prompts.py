"""What the tiny models that see or hear have in common: ids, and prompts with places for images in them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from tiny_models import DECODERS, PAD, random_model
from transformers import PreTrainedModel

IMAGE, VIDEO, BEGIN, END, NEWLINE, AUDIO = 90, 91, 92, 93, 94, 95
"""Ids that stand for a part of an image, a video or a sound, and around them."""

LAST_WORD = 89
"""Words are the ids from 6 to here."""

TEXT = {**DECODERS, "max_position_embeddings": 512}
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
)
"""A tower that makes 4 patches of an image."""

MROPE = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch for a model that sees or hears.

    Attributes:
        inputs: what ``generate`` takes.
        flat: of inputs that lay all images of the batch one after another, how many rows belong to each prompt.
    """

    inputs: dict[str, Any]
    flat: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def only(self, number: int) -> Prompts:
        """One prompt of the batch, its padding included."""
        rows = {name: slice(sum(own[:number]), sum(own[: number + 1])) for name, own in self.flat.items()}
        given = {name: given[rows.get(name, slice(number, number + 1))] for name, given in self.inputs.items()}
        return Prompts(given, {name: [own[number]] for name, own in self.flat.items()})


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        build: makes the model.
        prompts: makes inputs, of the model, the number of images per prompt and the number of words per prompt.
        tower: name of the module that sees or hears, the last part of it.
        counts: numbers of images per prompt that the family's processor allows.
        path: how keys are read, as far as the family decides.
        decoder: model type whose attention decides the path, where it did not use transformers' interface in every
            release, or does not yet.
        runs: how often the tower runs for a batch.
        encoder_decoder: whether there is cross-attention.
        searcher: attribute that holds the model whose ``generate`` the family's own ``generate`` calls, if any.
        fails_before_5_17: why it cannot be compared in releases before 5.17, if it cannot.
        long_prompt: whether the words of a prompt reach the decoder, or an encoder whose keys the cache holds.
    """

    build: Callable[[], PreTrainedModel]
    prompts: Callable[[PreTrainedModel, tuple[int, ...], int], Prompts]
    tower: str = "vision_tower"
    counts: tuple[tuple[int, ...], ...] = ((2, 1), (1, 0))
    path: str = "folded"
    decoder: str | None = None
    runs: int = 1
    encoder_decoder: bool = False
    searcher: str | None = None
    fails_before_5_17: str | None = None
    long_prompt: bool = True


class ReleaseLacksError(Exception):
    """A class that this release of transformers does not have."""


def class_of(name: str) -> Any:
    """A class of transformers, or None where this release has none of that name."""
    return getattr(transformers, name, None)


BEFORE_5 = class_of("PreTrainedConfig") is None


def build(name: str, configuration: str, **settings: Any) -> PreTrainedModel:
    """A random model of a class and a configuration class, by name."""
    if class_of(name) is None:
        raise ReleaseLacksError(f"this release has no {name}")
    return random_model(class_of(name), class_of(configuration)(**settings))


def rope_settings(rope: dict[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions, under the name that they have in this release."""
    return {"rope_scaling" if BEFORE_5 else "rope_parameters": rope}


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward pass takes an input of that name in this release."""
    return name in inspect.signature(model.forward).parameters


def noise(*shape: int, seed: int = 2) -> torch.Tensor:
    """Pixels or features, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(count: int, seed: int) -> list[int]:
    """`count` words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, LAST_WORD + 1, (count,), generator=generator).tolist()


def padded(rows: list[list[int]], *, side: str = "left") -> dict[str, torch.Tensor]:
    """Rows of ids and their mask, as a tokenizer pads them."""
    longest = max(map(len, rows))
    pads = [[PAD] * (longest - len(row)) for row in rows]
    pairs = list(zip(pads, rows, strict=True))
    input_ids = torch.tensor([pad + row if side == "left" else row + pad for pad, row in pairs])
    masks = [
        [0] * len(pad) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(pad) for pad, row in pairs
    ]
    return {"input_ids": input_ids, "attention_mask": torch.tensor(masks)}


def text_with(blocks: Iterable[list[list[int]]], count: int) -> dict[str, torch.Tensor]:
    """Each prompt: its blocks of places with a word before each, then `count` words, one more in every later prompt."""
    rows = []
    for number, own in enumerate(blocks):
        before = words(len(own), 10 + number)
        inner = [token for word, block in zip(before, own, strict=True) for token in (word, *block)]
        rows.append([*inner, *words(count + number, 20 + number)])
    return padded(rows)


def images_in_text(
    counts: tuple[int, ...], count: int, length: int, *, around: tuple[list[int], list[int]] = ([], [])
) -> dict[str, torch.Tensor]:
    """Prompts with `counts` images of `length` places each."""
    block = [*around[0], *[IMAGE] * length, *around[1]]
    return text_with([[block] * own for own in counts], count)


def type_ids(
    model: PreTrainedModel, input_ids: torch.Tensor, name: str = "mm_token_type_ids"
) -> dict[str, torch.Tensor]:
    """1 for an image's places, 2 for a video's (`ProcessorMixin.create_mm_token_type_ids`), if the model takes it."""
    kinds = (input_ids == IMAGE).long() + 2 * (input_ids == VIDEO).long() + 3 * (input_ids == AUDIO).long()
    return {name: kinds} if takes(model, name) else {}


def per_prompt(blocks: list[Any], counts: tuple[int, ...]) -> list[list[Any]]:
    """A list of all images' blocks, divided among prompts."""
    given = iter(blocks)
    return [[next(given) for _ in range(own)] for own in counts]
