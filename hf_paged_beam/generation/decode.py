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
"""Model classes and attention implementations: whether folding them was tried and gave what gathering gives."""

_FOLDING_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError, KeyError)

_LOGIT_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-2}
"""Largest difference of a row's logits, relative to the largest of them, that is put down to rounding."""

logger = logging.get_logger("hf_paged_beam")


class DecodeSteps:
    """Runs the model on one token per beam.

    Args:
        model: the user's model; its attention setting is changed only while a folded step runs.
        cache: our cache, past the prompt.
        kwargs: the model's inputs at ``B`` rows.
        beam_attention: "auto", "folded" or "gathered".
        wants_maps: whether attention maps are to be returned, which only the gathered path can.
        may_try: whether the model may run once more than the search needs, to compare the two paths. Not where other
            ranks count the runs.

    Attributes:
        path: "folded" or "gathered".
    """

    def __init__(
        self,
        model: GenerativeModel,
        cache: Any,
        kwargs: dict[str, Any],
        *,
        beam_attention: str,
        wants_maps: bool,
        may_try: bool,
    ):
        self.model = model
        self.cache = cache
        self.path = self._choose_path(beam_attention, wants_maps)
        self._must_fold = beam_attention == "folded"
        self._may_try = may_try
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
            self._switch_to(self.path)
            self._configs = _attention_configs(self.model) if self.path == "folded" else []
        try_it = first and self.path == "folded" and not self._must_fold
        outputs = self._first_folded(input_ids) if try_it else self._forward(input_ids)
        self._kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        return outputs

    def _forward(self, input_ids: torch.Tensor) -> Any:
        inputs = self.model.prepare_inputs_for_generation(input_ids, **versions.NEWEST_TOKEN, **self._kwargs)
        if self.path == "gathered":
            return self.model(**inputs, return_dict=True)
        with running(FoldedStep(self.cache.index)) as step, _attention_set_to(NAME, self._configs):
            outputs = self.model(**inputs, return_dict=True)
            if not step.all_attended():
                raise CannotFoldError("the model's attention does not receive the cache's keys through the interface")
        return outputs

    def _first_folded(self, input_ids: torch.Tensor) -> Any:
        """The first folded step of a call.

        Where folding this kind of model was not tried before, the step is gathered too and both are compared; where
        they differ, or folding fails, it is gathered for good.
        """
        states = copy.deepcopy(self.cache.row_layers()) if self.cache.has_recurrent_layers else None
        known = self._verdict() is not None or not self._may_try
        gathered = None if known else self._gathered_logits(input_ids, states)
        try:
            outputs = self._forward(input_ids)
            if gathered is not None and not _same_logits(outputs.logits[:, -1], gathered, self.model.dtype):
                raise CannotFoldError("folded attention does not give what the model's own attention gives")
        except _FOLDING_ERRORS as error:
            if is_out_of_memory(error):
                raise
            return self._gather_instead(input_ids, states, error)
        if gathered is not None:
            self._note_verdict(True)
        return outputs

    def _gathered_logits(self, input_ids: torch.Tensor, states: list[Any] | None) -> torch.Tensor | None:
        """``[B·W, V]``: what this step gives when it is gathered; the cache is as before. None where that fails."""
        self._switch_to("gathered")
        try:
            return self._forward(input_ids).logits[:, -1]
        except _FOLDING_ERRORS:
            return None  # for want of memory, or the folded step will fail as well and tell
        finally:
            self.cache.rewind(copy.deepcopy(states))
            self._switch_to("folded")

    def _gather_instead(self, input_ids: torch.Tensor, states: list[Any] | None, error: Exception) -> Any:
        self.cache.rewind(states)
        self._switch_to("gathered")
        outputs = self._forward(input_ids)
        # Noted only now: an error that has nothing to do with folding was raised again.
        self._note_verdict(False)
        logger.info(f"{type(self.model).__name__}: keys are gathered, because folding failed: {error}")
        return outputs

    def _switch_to(self, path: str) -> None:
        self.path = path
        self._kwargs = self._widen(self._prompt_kwargs)

    def _verdict(self) -> bool | None:
        """Whether this kind of model can be folded; None if that was not tried."""
        return _foldable.get(type(self.model), {}).get(self.model.config._attn_implementation)

    def _note_verdict(self, foldable: bool) -> None:
        _foldable.setdefault(type(self.model), {})[self.model.config._attn_implementation] = foldable

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
        if beam_attention == "gathered" or wants_maps or not self.cache.can_fold or self._verdict() is False:
            return "gathered"
        return "folded"

    def _widen(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        encoder_stays = self.model.config.is_encoder_decoder and self.path == "folded"
        return widen_inputs(kwargs, self.cache.num_beams, decoder_only_part=encoder_stays)


def _same_logits(folded: torch.Tensor, gathered: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two ``[B·W, V]`` differ by rounding only.

    A quarter of the rows may differ by more: where experts are chosen, rounding can change the choice.
    """
    gap = torch.where(folded == gathered, 0.0, (folded.float() - gathered.float()).abs()).amax(-1)
    scale = gathered.float().abs().nan_to_num(posinf=0.0).amax(-1)
    differs = gap > _LOGIT_TOLERANCE.get(dtype, 0.1) * scale
    return bool(differs.float().mean() <= 0.25)  # host read: once per kind of model


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
