"""From the walked-back sequences to the object, or tensor, that transformers' search would return."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .. import versions
from ..cache import BeamRows
from .group import BeamGroup
from .history import Sequences
from .lengths import length_form
from .settings import SearchSettings


class StepOutputs:
    """What a caller asked to be kept of every step, in transformers' shapes (one row per beam from the first step on).

    Args:
        settings: what to keep.
        is_encoder_decoder: whether outputs carry the decoder's names.
        beams: the rows of all prompts.
    """

    def __init__(self, settings: SearchSettings, is_encoder_decoder: bool, beams: BeamRows):
        def wanted(asked: bool) -> tuple | None:
            return () if asked else None

        self.beams = beams
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

    def keep_scores(self, log_probs: torch.Tensor, first: bool) -> tuple | None:
        """Keep processed log-probabilities, ``[rows, V]``; those of all steps so far, if they are wanted."""
        if self.scores is not None:
            per_prompt = first and len(log_probs) != self.beams.count
            self.scores += (self._rows(log_probs, first) if per_prompt else log_probs.clone(),)
        return self.scores

    def _rows(self, tensors: Any, first: bool) -> Any:
        """Repeat a prompt's row for each of its beams, in tensors and tuples of tensors."""
        if tensors is None or not first:
            return tensors
        if isinstance(tensors, torch.Tensor):
            return self.beams.repeat(tensors)
        return tuple(self._rows(tensor, first) for tensor in tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found, best first in each prompt.

    Attributes:
        sequences: the best `n` of the prompt that returns most; parents are beams of the whole prompt.
        item_ids: ``[B, n]`` int64 of a search with a trie, else None.
        threshold: ``[B, n]`` float32 of a search that drew sequences, else None.
        group: ``[B, n]`` int64, the group of beams that found each.
        origin: ``[B, n]`` int64, number of each sequence's last candidate in its group; anything where there is none.
    """

    sequences: Sequences
    item_ids: torch.Tensor | None
    threshold: torch.Tensor | None
    group: torch.Tensor
    origin: torch.Tensor


def best_found(groups: Sequence[BeamGroup], counts: Sequence[int]) -> Found:
    """The best sequences of all groups.

    Args:
        groups: after the search.
        counts: how many are wanted of each prompt.
    """
    found = [_found_by(group, number, len(groups), counts) for number, group in enumerate(groups)]
    return found[0] if len(found) == 1 else _merged(found, max(counts))


def _found_by(group: BeamGroup, number: int, groups: int, counts: Sequence[int]) -> Found:
    most = min(max(counts), group.rules.kept)
    sequences = group.history.walk_back(group.state, most)
    device = sequences.scores.device
    if number:
        offset = torch.tensor(group.rules.widths, device=device).view(-1, 1, 1) * number
        sequences = dataclasses.replace(sequences, parents=sequences.parents + offset)
    item_ids = None
    if group.constraint is not None:
        nodes = group.history.last_nodes(group.state, most)
        item_ids = group.constraint.forest.items(nodes).masked_fill(sequences.scores == -torch.inf, -1)
    threshold = None
    if group.draws is not None:
        wanted = torch.tensor(counts, device=device)
        threshold = group.draws.threshold(group.state, wanted, group.rules).unsqueeze(1).expand(-1, most)
    return Found(
        sequences=sequences,
        item_ids=item_ids,
        threshold=threshold,
        group=torch.full_like(sequences.scores, number, dtype=torch.int64),
        origin=group.state.finished_origin[:, :most],
    )


def _merged(found: Sequence[Found], count: int) -> Found:
    """The best of several groups."""
    longest = max(one.sequences.tokens.shape[-1] for one in found)
    scores, places = torch.cat([one.sequences.scores for one in found], dim=1).sort(dim=1, descending=True, stable=True)
    scores, places = scores[:, :count], places[:, :count]

    def best(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(list(parts), dim=1)
        shape = places.shape + joined.shape[2:]
        return joined.gather(1, places.view(*places.shape, *[1] * (joined.dim() - 2)).expand(shape))

    def of_steps(name: str) -> torch.Tensor:
        parts = [getattr(one.sequences, name) for one in found]
        return best([torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts])

    items = [one.item_ids for one in found if one.item_ids is not None]
    return Found(
        sequences=Sequences(
            scores=scores, **{name: of_steps(name) for name in ("tokens", "parents", "token_scores", "inside")}
        ),
        item_ids=best(items) if items else None,
        threshold=None,
        group=best([one.group for one in found]),
        origin=best([one.origin for one in found]),
    )


def build_output(
    found: Found,
    prompt: torch.Tensor,
    settings: SearchSettings,
    kept: StepOutputs,
    *,
    cache: Any,
    encoder_outputs: Any,
    beam_path: str,
) -> Any:
    """The tensor or object to return.

    Args:
        found: by the search.
        prompt: ``[B, P]`` int64.
        settings: of the call.
        kept: outputs of every step.
        cache: the search's cache.
        encoder_outputs: of an encoder-decoder model, else None.
        beam_path: how keys were read.
    """
    sequences, counts = found.sequences, settings.counts
    returned = BeamRows(counts, sequences.scores.shape[1], prompt.device)
    rows = returned.rows
    inside = rows(sequences.inside)
    longest = inside.shape[-1]
    if settings.differ or settings.options.num_beam_groups > 1:
        # no longer than what is returned: other sequences of narrow prompts, or of groups, may be longer
        longest = int(inside.any(0).sum())  # host read: once, after the search
        inside = inside[:, :longest]
    tokens = torch.where(inside, rows(sequences.tokens)[:, :longest], settings.fill_token_id)
    whole = torch.cat([returned.repeat(prompt), tokens], dim=1)
    if not settings.return_dict:
        return whole
    beam_indices = (sequences.parents + kept.beams.first.unsqueeze(-1)).masked_fill(~sequences.inside, -1)
    own = {
        "token_logprobs": rows(sequences.token_scores)[:, :longest],
        "prompt_index": returned.prompt,
        "item_ids": None if found.item_ids is None else rows(found.item_ids),
    }
    scores = sequences.scores
    if found.threshold is not None:
        own.update(_drawn(found, rows))
        scores = _normalised(sequences, settings)
    common = {
        "sequences": whole,
        "sequences_scores": rows(scores) if settings.output_scores else None,
        "scores": kept.scores,
        "logits": kept.logits,
        "beam_indices": rows(beam_indices.to(torch.int32))[:, :longest],
        versions.CACHE_ARGUMENT: cache,
        **own,
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


def _drawn(found: Found, rows) -> dict[str, torch.Tensor]:
    return {
        "sequences_log_probs": rows(found.sequences.log_probs),
        "perturbed_scores": rows(found.sequences.scores),
        "threshold": rows(found.threshold),
    }


def _normalised(sequences: Sequences, settings: SearchSettings) -> torch.Tensor:
    """``[B, n]``: log-probabilities of drawn sequences over their length form, as other searches rank by."""
    lengths = sequences.inside.sum(-1).clamp(min=1).cpu()  # host read: float64, once, after the search
    penalties = [prompt.length_penalty for prompt in settings.prompts]
    forms = [
        length_form(own, by, settings.options.length_normalization) for own, by in zip(lengths, penalties, strict=True)
    ]
    return sequences.log_probs / torch.stack(forms).to(sequences.scores)
