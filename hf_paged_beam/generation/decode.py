"""One decode step of the model, by the folded path where the model's attention allows it, else by the gathered one."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import logging

from .. import versions
from ..cache import NAME, CannotFoldError, FoldedStep, running
from ..versions import GenerativeModel
from .memory import is_out_of_memory
from .prompt import widen_inputs

_foldable: weakref.WeakKeyDictionary[type, dict[str | None, bool]] = weakref.WeakKeyDictionary()
"""Model classes and attention implementations that could not be folded, so that they are not tried again."""

logger = logging.get_logger("hf_paged_beam")


class DecodeSteps:
    """Runs the model on one token per beam.

    Args:
        model: the user's model; its attention setting is changed only while a folded step runs.
        cache: our cache, past the prompt.
        kwargs: the model's inputs at ``B`` rows.
        beam_attention: "auto", "folded" or "gathered".
        wants_maps: whether attention maps are to be returned, which only the gathered path can.

    Attributes:
        path: "folded" or "gathered".
    """

    def __init__(
        self, model: GenerativeModel, cache: Any, kwargs: dict[str, Any], *, beam_attention: str, wants_maps: bool
    ):
        self.model = model
        self.cache = cache
        self.path = self._choose_path(beam_attention, wants_maps)
        self._must_fold = beam_attention == "folded"
        self._tried = False
        self._prompt_kwargs = kwargs
        self._kwargs: dict[str, Any] = {}  # at one row per beam, from the first step on
        self._last_token_only = versions.uses_stock_input_preparation(model)
        self._configs: list[dict[str, Any]] = []  # looked up by the first step

    @property
    def needs_rows(self) -> bool:
        """Whether the model's own input preparation may read whole rows of ids."""
        return not self._last_token_only

    @property
    def beam_path(self) -> str:
        """What to tell the caller."""
        return "recurrent" if self.cache.has_recurrent_layers else self.path

    def __call__(self, tokens: torch.Tensor, rows: torch.Tensor | None) -> Any:
        """The model's outputs for the newest token of every beam.

        Args:
            tokens: ``[B·W]`` int64.
            rows: ``[B·W, length]`` int64 where `needs_rows`.
        """
        input_ids = tokens.unsqueeze(1) if self._last_token_only or rows is None else rows
        first, self._tried = not self._tried, True
        if first:
            self._kwargs = self._widen(self._prompt_kwargs)
            self._configs = _attention_configs(self.model) if self.path == "folded" else []
        outputs = self._try_folded(input_ids) if first and self.path == "folded" else self._forward(input_ids)
        self._kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        return outputs

    def _forward(self, input_ids: torch.Tensor) -> Any:
        inputs = self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self._kwargs)
        if self.path == "gathered":
            return self.model(**inputs, return_dict=True)
        with running(FoldedStep(self.cache.index)) as step, _attention_set_to(NAME, self._configs):
            outputs = self.model(**inputs, return_dict=True)
            if not step.all_attended():
                raise CannotFoldError("the model's attention does not receive the cache's keys through the interface")
        return outputs

    def _try_folded(self, input_ids: torch.Tensor) -> Any:
        """The first folded step of a call: if it cannot be folded, it is run again, gathered."""
        if self._must_fold:
            return self._forward(input_ids)
        states = copy.deepcopy(self.cache.row_layers()) if self.cache.has_recurrent_layers else None
        try:
            outputs = self._forward(input_ids)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            return self._gather_instead(input_ids, states, error)
        return outputs

    def _gather_instead(self, input_ids: torch.Tensor, states: list[Any] | None, error: Exception) -> Any:
        self.path = "gathered"
        self._kwargs = self._widen(self._prompt_kwargs)
        self.cache.rewind(states)
        outputs = self._forward(input_ids)
        # Noted only now: an error that has nothing to do with folding was raised again.
        _foldable.setdefault(type(self.model), {})[self.model.config._attn_implementation] = False
        logger.info(f"{type(self.model).__name__}: keys are gathered, because folding failed: {error}")
        return outputs

    def _choose_path(self, beam_attention: str, wants_maps: bool) -> str:
        if beam_attention == "folded":
            if wants_maps:
                raise ValueError(
                    "beam_attention='folded' computes no attention maps; use beam_attention='auto' with "
                    "output_attentions=True"
                )
            if not self.cache.can_fold:
                raise ValueError(
                    f"beam_attention='folded' needs all attention layers in the pool, but {type(self.model).__name__} "
                    f"has others; use beam_attention='auto'"
                )
            return "folded"
        foldable = _foldable.get(type(self.model), {}).get(self.model.config._attn_implementation, True)
        if beam_attention == "gathered" or wants_maps or not self.cache.can_fold or not foldable:
            return "gathered"
        return "folded"

    def _widen(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        encoder_stays = self.model.config.is_encoder_decoder and self.path == "folded"
        return widen_inputs(kwargs, self.cache.num_beams, decoder_only_part=encoder_stays)


def _attention_configs(model: GenerativeModel) -> list[dict[str, Any]]:
    """Fields of every configuration object that some part of the model reads its attention implementation from."""
    found: dict[int, dict[str, Any]] = {}
    ahead, seen = [model], {id(model)}
    while ahead:  # as `model.modules()` walks, in a quarter of its time: this runs in every call
        module = ahead.pop()
        config = module.__dict__.get("config")
        if config is not None and id(config) not in found and _ATTENTION in getattr(config, "__dict__", {}):
            found[id(config)] = config.__dict__
        parts = [part for part in module._modules.values() if part is not None and id(part) not in seen]
        seen.update(map(id, parts))
        ahead.extend(parts)
    return list(found.values())


_ATTENTION = "_attn_implementation_internal"
_borrowed: dict[int, tuple[dict[str, Any], Any, int]] = {}
"""Configurations whose attention is set at present: what stood there before, and how many searches hold it."""
_borrowing = threading.Lock()


@contextlib.contextmanager
def _attention_set_to(name: str, configs: list[dict[str, Any]]) -> Iterator[None]:
    """Set the attention implementation of these configurations, and put back what was there.

    Models in two threads may share a configuration: the last one to leave puts it back.
    """
    with _borrowing:
        for fields in configs:
            _, before, holders = _borrowed.get(id(fields), (fields, fields[_ATTENTION], 0))
            _borrowed[id(fields)] = (fields, before, holders + 1)
            fields[_ATTENTION] = name
    try:
        yield
    finally:
        with _borrowing:
            for fields in configs:
                _, before, holders = _borrowed.pop(id(fields))
                if holders > 1:
                    _borrowed[id(fields)] = (fields, before, holders - 1)
                else:
                    fields[_ATTENTION] = before
