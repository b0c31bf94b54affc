"""One decode step of the model, by the folded path where the model's attention allows it, else by the gathered one."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as hooks_of_all_modules
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

from .. import versions
from ..cache import (
    AsWritten,
    CannotFoldError,
    FoldedStep,
    SeveralTokensError,
    attention_before,
    attention_configs,
    is_compiled,
)
from ..versions import GenerativeModel
from .capture import CapturedSteps
from .memory import is_out_of_memory
from .prompt import HandOver, choose_rows, widen_inputs
from .same_logits import same_logits

_foldable: weakref.WeakKeyDictionary[GenerativeModel, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Models and attention implementations: whether folding them was tried and gave what gathering gives.

Of each model, not of its class: models of one class may hold any decoder, other experts, or modules that were replaced.
"""

_FOLDING_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError, KeyError)

_FEW_PROMPTS, _FEW_BEAMS = 2, 3
"""What both paths are tried on."""

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
        parts: all modules of the model.
        capture: whether to compile or record the folded step.
        most_slots: slots that the trees can need at most.

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
        parts: Sequence[torch.nn.Module],
        capture: bool = False,
        most_slots: int = 0,
    ):
        self.model = model
        self.cache = cache
        self.path = self._choose_path(beam_attention, wants_maps)
        self._must_fold = beam_attention == "folded"
        self._may_try, self._parts = may_try, parts
        self._wants_capture, self._most_slots = capture, most_slots
        self._captured: CapturedSteps | None = None  # with the path
        self._begun = False
        self._tried = False  # whether an error of a folded step is known not to be folding's
        self._found: bool | None = None  # whether this kind of model can be folded, if this call is the first to know
        self._kwargs = kwargs  # at one row per beam from the first step on
        self._last_token_only = versions.uses_stock_input_preparation(model)
        self._configs: list[dict[str, Any]] = []  # looked up before the first step
        self._as_written: contextlib.AbstractContextManager = contextlib.nullcontext()  # with them
        self._offsets = position_offsets(model, cache.index.batch_size)
        self._prompts_and_rows = (cache.index.batch_size, cache.index.beams.count)

    @property
    def needs_rows(self) -> bool:
        """Whether the model's own input preparation may read whole rows of ids."""
        return not self._last_token_only

    @property
    def path_is_known(self) -> bool:
        """Whether the next step runs the model once, and not to compare the two paths as well."""
        return self._begun or self.path == "gathered" or self._must_fold or self._verdict() is not None

    @property
    def beam_path(self) -> str:
        """What to tell the caller."""
        return "recurrent" if self.cache.has_recurrent_layers else self.path

    def __call__(self, tokens: torch.Tensor, rows: torch.Tensor | None) -> Any:
        """The model's outputs for the newest token of every beam.

        Args:
            tokens: ``[R]`` int64.
            rows: ``[R, length]`` int64 where `needs_rows`.
        """
        input_ids = tokens.unsqueeze(1) if self._last_token_only or rows is None else rows
        if not self._begun:
            self._begin(input_ids)
        try:
            outputs = self._gather_where_folding_fails(input_ids) if self.path == "folded" else self._forward(input_ids)
        except SeveralTokensError as error:  # as of adapters that put virtual tokens before every step
            raise HandOver(f"{type(self.model).__name__}: {error}") from error
        if self._found is not None:  # noted only now that the step has run: an error of the model's own is no verdict
            _foldable.setdefault(self.model, {})[attention_before(self.model.config)] = self._found
            self._found = None
        self._kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        self._check_that_the_cache_is_ours()
        return outputs

    def _check_that_the_cache_is_ours(self) -> None:
        """Beams are reordered in our cache; a model that goes on with another one would not see it."""
        returned = self._kwargs[versions.CACHE_ARGUMENT]
        if returned is not self.cache and getattr(returned, "index", None) is not self.cache.index:
            raise HandOver(f"{type(self.model).__name__} puts keys into another cache, a {type(returned).__name__}")

    def _begin(self, input_ids: torch.Tensor) -> None:
        """Before the first step: find the path, where it is not known, and give every beam its row of the inputs."""
        self._begun = True
        if self.path == "folded":
            self._configs = attention_configs(self._parts)
            self._as_written = AsWritten() if is_compiled(self._parts) else contextlib.nullcontext()
            self._tried = self._must_fold or self._verdict() is not None
            if not self._tried and self._may_try:
                self._try_both_paths(input_ids)
                self._tried = self._found is not None
        self._kwargs = self._widen(self._kwargs)
        self._give_offsets()
        if (
            self._wants_capture
            and self.path == "folded"
            and not is_compiled(self._parts)
            and not _hooked(self._parts)
            and self._carries_only_a_cache
        ):
            self._captured = CapturedSteps(self.model, self.cache, self._configs, self._most_slots)

    @property
    def _carries_only_a_cache(self) -> bool:
        """Whether nothing but the logits is read of a step's outputs, to go into the next step's inputs."""
        own = getattr(self.model._update_model_kwargs_for_generation, "__func__", None)
        return own is GenerationMixin._update_model_kwargs_for_generation

    def end(self, *, keep_cache: bool) -> None:
        """After the last step.

        Args:
            keep_cache: whether the caller gets the cache.
        """
        if self._captured is not None:
            self._captured.end(keep_cache)

    def _try_both_paths(self, input_ids: torch.Tensor) -> None:
        """Run a step of a few beams by both paths, and find whether folding gives what gathering gives.

        Where even the gathered step fails, as it may for a model that remembers its batch, nothing is found.
        """
        prompts, beams = self._few()
        ids = input_ids.index_select(0, self.cache.rows_of_first_beams(prompts, beams))
        gathered = self._few_logits("gathered", ids, prompts, beams)
        if isinstance(gathered, Exception):
            return
        folded = self._few_logits("folded", ids, prompts, beams)
        if isinstance(folded, Exception):  # what does not come again was not folding's
            folded = self._few_logits("folded", ids, prompts, beams)
        if isinstance(folded, Exception):
            self._found = None if is_out_of_memory(folded) else False
        else:
            self._found = same_logits(folded, gathered, self.model.dtype)
        if self._found is False:
            self.path = "gathered"
            reason = (
                folded if isinstance(folded, Exception) else "logits differ from those of the model's own attention"
            )
            logger.info(f"{type(self.model).__name__}: keys are gathered; folded, {reason}")

    def _few(self) -> tuple[list[int], int]:
        """The prompts of a trial, and how many beams of each."""
        widths = self.cache.index.beams.widths
        prompts = [prompt for prompt, width in enumerate(widths) if width > 1][:_FEW_PROMPTS] or [0]
        return prompts, min(_FEW_BEAMS, *(widths[prompt] for prompt in prompts))

    def _few_logits(
        self, path: str, input_ids: torch.Tensor, prompts: list[int], beams: int
    ) -> torch.Tensor | Exception:
        """One step of a few beams of their own: logits ``[rows, V]``, or the error."""
        few = copy.copy(self)
        few.path, few.cache = path, self.cache.sample(prompts, beams)
        few._captured = None
        kwargs = choose_rows(self._kwargs, self.cache.index.batch_size, prompts)
        few._kwargs = few._widen({**kwargs, versions.CACHE_ARGUMENT: few.cache})
        few._offsets = [(module, offsets[prompts]) for module, offsets in self._offsets]
        few._give_offsets()
        try:
            with self._as_written:  # nothing is compiled for a few beams
                return few._forward(input_ids).logits[:, -1]
        except _FOLDING_ERRORS as error:
            return error.with_traceback(None)  # whose frames hold this call, and the caller's: a cycle

    def _give_offsets(self) -> None:
        """Give every beam its row of the offsets that models keep: not all of them repeat what they kept."""
        for module, offsets in self._offsets:
            module.rope_deltas = self.cache.index.beams.repeat(offsets)

    def leave(self, kept: list[int], rows: torch.Tensor) -> None:
        """Go on with some of the prompts only; the cache has let the others go already.

        Args:
            kept: places of these prompts among those before.
            rows: ``[R]`` int64, rows before that are theirs.
        """
        batch, count = self._prompts_and_rows
        self._prompts_and_rows = (len(kept), len(rows))
        self._offsets = [(module, offsets[kept]) for module, offsets in self._offsets]
        if not self._begun:
            self._kwargs = choose_rows(self._kwargs, batch, kept)
        elif self.model.config.is_encoder_decoder and self.path == "folded":
            self._kwargs = choose_rows(self._kwargs, count, rows, part="decoder")
            self._kwargs = choose_rows(self._kwargs, batch, kept, part="encoder")
        else:
            self._kwargs = choose_rows(self._kwargs, count, rows)
        if self._begun:
            self._give_offsets()
        if self._captured is not None:
            self._captured.leave(kept)

    def _forward(self, input_ids: torch.Tensor) -> Any:
        inputs = self.model.prepare_inputs_for_generation(input_ids, **versions.NEWEST_TOKEN, **self._kwargs)
        if self.path == "gathered":
            return self.model(**inputs, return_dict=True)
        if self._captured is not None and self._tried:
            return self._captured(inputs, lambda: self._forward_folded(inputs))
        return self._forward_folded(inputs)

    def _forward_folded(self, inputs: dict[str, Any]) -> Any:
        with self._as_written, FoldedStep(self.cache.index, self._configs) as step:
            outputs = self.model(**inputs, return_dict=True)
            if not step.all_attended():
                raise CannotFoldError("the model's attention does not receive the cache's keys through the interface")
        return outputs

    def _gather_where_folding_fails(self, input_ids: torch.Tensor) -> Any:
        """A folded step. If it cannot be folded, for what only this call shows, it is run again, gathered."""
        states = None
        if not self._tried and self.cache.has_recurrent_layers:
            states = copy.deepcopy(self.cache.row_layers())
        try:
            return self._forward(input_ids)
        except CannotFoldError:
            if self._must_fold or (self._tried and self.cache.has_recurrent_layers):
                raise
        except _FOLDING_ERRORS as error:
            if self._tried or is_out_of_memory(error):
                raise
        self.path = "gathered"
        self._kwargs = self._widen_encoder(self._kwargs)
        self.cache.rewind(states)
        return self._forward(input_ids)

    def _verdict(self) -> bool | None:
        """Whether this kind of model can be folded; None if that is not known."""
        return _foldable.get(self.model, {}).get(attention_before(self.model.config))

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
        if self.model.config.is_encoder_decoder and self.path == "folded":
            return widen_inputs(kwargs, self.cache.index.beams, part="decoder")
        return widen_inputs(kwargs, self.cache.index.beams)

    def _widen_encoder(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What `_widen` left at `B` rows for the folded path."""
        if not self.model.config.is_encoder_decoder:
            return kwargs
        return widen_inputs(kwargs, self.cache.index.beams, part="encoder")


def _hooked(parts: Sequence[torch.nn.Module]) -> bool:
    """Whether something is called with what parts of a model get or return: a capture might not call it."""
    everywhere = hooks_of_all_modules._global_forward_hooks or hooks_of_all_modules._global_forward_pre_hooks
    return bool(everywhere) or any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def position_offsets(model: GenerativeModel, batch_size: int) -> list[tuple[Any, torch.Tensor]]:
    """Modules that keep position offsets of multimodal prompts, ``[B, 1]``, and these."""
    kept = [(module, vars(module).get("rope_deltas")) for module in {model, getattr(model, "base_model", model)}]
    return [(module, offsets) for module, offsets in kept if offsets is not None and offsets.shape[0] == batch_size]
