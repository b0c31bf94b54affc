"""From the walked-back sequences to the object, or tensor, that transformers' search would return."""

from __future__ import annotations

from typing import Any

import torch

from .. import versions
from .history import Sequences
from .settings import SearchSettings


class StepOutputs:
    """What a caller asked to be kept of every step, in transformers' shapes (one row per beam from the first step on).

    Args:
        settings: what to keep.
        is_encoder_decoder: whether outputs carry the decoder's names.
    """

    def __init__(self, settings: SearchSettings, is_encoder_decoder: bool):
        def wanted(asked: bool) -> tuple | None:
            return () if asked else None

        self.width = settings.num_beams
        self.is_encoder_decoder = is_encoder_decoder
        self.scores = wanted(settings.output_scores)
        self.logits = wanted(settings.output_logits)
        self.attentions = wanted(settings.output_attentions)
        self.cross_attentions = wanted(settings.output_attentions)
        self.hidden_states = wanted(settings.output_hidden_states)

    def keep_model_outputs(self, outputs: Any, first: bool) -> None:
        """Keep attention maps and hidden states of a forward pass."""
        prefix = "decoder_" if self.is_encoder_decoder else ""
        if self.attentions is not None and self.cross_attentions is not None:
            self.attentions += (self._rows(getattr(outputs, prefix + "attentions", None), first),)
            if self.is_encoder_decoder:
                self.cross_attentions += (self._rows(outputs.cross_attentions, first),)
        if self.hidden_states is not None:
            self.hidden_states += (self._rows(getattr(outputs, prefix + "hidden_states", None), first),)

    def keep_logits(self, logits: torch.Tensor, first: bool) -> None:
        """Keep raw logits, ``[rows, V]``."""
        if self.logits is not None:
            self.logits += (self._rows(logits.to(torch.float32, copy=True), first),)

    def keep_scores(self, log_probs: torch.Tensor, first: bool) -> None:
        """Keep processed log-probabilities, ``[rows, V]``."""
        if self.scores is not None:
            self.scores += (self._rows(log_probs, first) if first else log_probs.clone(),)

    def _rows(self, tensors: Any, first: bool) -> Any:
        """Repeat a prompt's row for each of its beams, in tensors and tuples of tensors."""
        if tensors is None or not first:
            return tensors
        if isinstance(tensors, torch.Tensor):
            return tensors.repeat_interleave(self.width, dim=0)
        return tuple(self._rows(tensor, first) for tensor in tensors)


def build_output(
    sequences: Sequences,
    prompt: torch.Tensor,
    settings: SearchSettings,
    kept: StepOutputs,
    *,
    cache: Any,
    encoder_outputs: Any,
    beam_path: str,
    item_ids: torch.Tensor | None,
) -> Any:
    """The tensor or object to return.

    Args:
        sequences: walked back.
        prompt: ``[B, P]`` int64.
        settings: of the call.
        kept: outputs of every step.
        cache: the search's cache.
        encoder_outputs: of an encoder-decoder model, else None.
        beam_path: how keys were read.
        item_ids: ``[B, n]`` int64 of a constrained search, else None.
    """
    inside = sequences.inside
    tokens = torch.where(inside, sequences.tokens, settings.fill_token_id)
    whole = torch.cat([prompt.repeat_interleave(settings.num_return_sequences, dim=0), tokens.flatten(0, 1)], dim=1)
    if not settings.return_dict:
        return whole
    first_row = torch.arange(prompt.shape[0], device=prompt.device).view(-1, 1, 1) * settings.num_beams
    beam_indices = (sequences.parents + first_row).masked_fill(~inside, -1).to(torch.int32)
    common = {
        "sequences": whole,
        "sequences_scores": sequences.scores.flatten() if settings.output_scores else None,
        "scores": kept.scores,
        "logits": kept.logits,
        "beam_indices": beam_indices.flatten(0, 1),
        "token_logprobs": sequences.token_scores.flatten(0, 1),
        "item_ids": None if item_ids is None else item_ids.flatten(),
        versions.CACHE_ARGUMENT: cache,
    }
    if kept.is_encoder_decoder:
        output: Any = versions.BeamEncoderDecoderOutput(
            encoder_attentions=encoder_outputs.get("attentions") if settings.output_attentions else None,
            encoder_hidden_states=encoder_outputs.get("hidden_states") if settings.output_hidden_states else None,
            decoder_attentions=kept.attentions,
            cross_attentions=kept.cross_attentions,
            decoder_hidden_states=kept.hidden_states,
            **common,
        )
    else:
        output = versions.BeamDecoderOnlyOutput(attentions=kept.attentions, hidden_states=kept.hidden_states, **common)
    output.beam_path = beam_path
    return output
