"""A model whose next-token log-probabilities are a table of the whole prefix, for searches that can be solved on paper.

The table is given, but which row of it is read goes through the cache, as in a real model. Every token is stored, and
each step puts its prefix together from what the cache hands back, so that a wrong slot, a wrong position or a beam
that sees another beam's token reads another row of the table (or none: that raises). Two models, one per read path:

    AttendingTable   by attention through transformers' interface                 the folded path
    GatheringTable   by looking into the keys that ``cache.update`` returned       the gathered path

Weights of attention are uniform there: a value is 1 at (position, token), so that the mean over what a beam sees,
times the length, is the prefix, written as one 1 in each row:

    prefix 2 0 1            token 0  1  2
                position 0:       0  0  1
                position 1:       1  0  0
                position 2:       0  1  0
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, LlamaConfig, LlamaPreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged_beam.generation import group
from hf_paged_beam.generation.rules import Rules
from hf_paged_beam.generation.state import Candidates, Chosen, SearchState
from hf_paged_beam.versions import CACHE_ARGUMENT

Prefix = tuple[int, ...]
Table = Callable[[Prefix], Sequence[float]]
"""From a whole prefix, prompt included, to a log-probability for each token of the vocabulary."""

POSITIONS = 24
"""Longest sequence, prompt included."""


class AttendingTable(LlamaPreTrainedModel, GenerationMixin):
    """Reads its prefix by attention, through transformers' attention and mask interfaces.

    Args:
        config: of a Llama with one layer; `table_model` makes it.
        table: log-probabilities for each prefix.
    """

    def __init__(self, config: LlamaConfig, table: Table):
        super().__init__(config)
        self.table = table
        self.is_causal = True
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, 1)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs) -> CausalLMOutputWithPast:
        """``[rows, q]`` int64 to logits ``[rows, 1, V]``: those of the last position alone.

        Each row is its row of the table plus another constant, so that a search has to normalise it.
        """
        cache = kwargs.get(CACHE_ARGUMENT)
        if cache is None and kwargs.get("use_cache"):  # some releases leave it to the model to make the default cache
            cache = DynamicCache(config=self.config)
        prefixes = self._prefixes(input_ids, attention_mask, position_ids, cache)
        rows = torch.tensor([self.table(prefix) for prefix in prefixes], dtype=torch.float64)
        constants = torch.tensor([2.0 * prefix[-1] - len(prefix) for prefix in prefixes])
        logits = (rows + constants.unsqueeze(-1)).unsqueeze(1)
        return CausalLMOutputWithPast(logits=logits.to(self.dtype), **{CACHE_ARGUMENT: cache})

    def _prefixes(self, input_ids, attention_mask, position_ids, cache) -> list[Prefix]:
        vocabulary = self.config.vocab_size
        places = (position_ids * vocabulary + input_ids).clamp(min=0)  # pads: anywhere, nobody sees them
        values = torch.nn.functional.one_hot(places, POSITIONS * vocabulary).to(self.dtype)
        values = values.unsqueeze(1)  # [rows, 1, q, positions · V]
        nothing = values.new_zeros(*input_ids.shape, 1)
        seen = 0 if cache is None else cache.get_seq_length()
        given = {
            "config": self.config, "attention_mask": attention_mask, "position_ids": position_ids,
            CACHE_ARGUMENT: cache, "inputs_embeds": nothing, "input_embeds": nothing,
            "cache_position": torch.arange(seen, seen + input_ids.shape[1]),
        }  # fmt: skip
        taken = inspect.signature(create_causal_mask).parameters  # they differ between releases
        mask = create_causal_mask(**{name: value for name, value in given.items() if name in taken})
        query = key = nothing.unsqueeze(1)
        if cache is not None:
            key, values = cache.update(key, values, 0)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        seen, _ = attend(self, query, key, values, mask, dropout=0.0, scaling=1.0)  # [rows, q, 1, positions · V]
        lengths = position_ids[:, -1] + 1
        counts = seen[:, -1, 0] * lengths.unsqueeze(-1)
        return [
            _one_per_position(count.view(POSITIONS, vocabulary), length)
            for count, length in zip(counts, lengths.tolist(), strict=True)
        ]


class GatheringTable(AttendingTable):
    """Reads its prefix out of the keys that the cache returns: no attention interface, so the gathered path."""

    def _prefixes(self, input_ids, attention_mask, position_ids, cache) -> list[Prefix]:
        tokens = input_ids[:, None, :, None].to(self.dtype)  # [rows, 1, q, 1]
        if cache is not None:
            tokens, _ = cache.update(tokens, tokens, 0)
        stored = tokens[:, 0, :, 0].long()  # [rows, length]
        if attention_mask is None or attention_mask.shape != stored.shape:
            return [tuple(row) for row in stored.tolist()]
        return [tuple(row[seen].tolist()) for row, seen in zip(stored, attention_mask.bool(), strict=True)]


def _one_per_position(counts: torch.Tensor, length: int) -> Prefix:
    """The prefix that was seen: ``[positions, V]`` must hold one 1 in each of the first `length` rows, 0 elsewhere."""
    expected = (torch.arange(POSITIONS) < length).to(counts)
    sums, errors = counts.sum(-1), counts - counts.round()
    if not torch.allclose(sums, expected, atol=1e-3) or errors.abs().max() > 1e-3:
        raise AssertionError(f"a beam of {length} tokens saw this many at each position: {sums.tolist()}")
    return tuple(counts[:length].argmax(-1).tolist())


def table_model(
    table: Table, vocabulary: int, *, eos: int | list[int] | None = None, kind: type = AttendingTable
) -> AttendingTable:
    """A model that follows `table`.

    Args:
        table: from a whole prefix, prompt included, to `vocabulary` log-probabilities.
        vocabulary: `V`.
        eos: end tokens.
        kind: `AttendingTable` or `GatheringTable`.
    """
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1,
        head_dim=1, max_position_embeddings=POSITIONS, pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = kind(config, table).eval()
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = eos, 0, None
    return model


def random_table(seed: int, vocabulary: int, *, ends: Sequence[int] = (), raised: float = 1.5) -> Table:
    """Log-probabilities drawn anew for every prefix, the same at every call; `ends` are made more probable."""

    @functools.cache
    def table(prefix: Prefix) -> tuple[float, ...]:
        draw = random.Random(f"{seed} {prefix}")
        logits = [draw.gauss(0.0, 1.5) + raised * (token in ends) for token in range(vocabulary)]
        normaliser = math.log(sum(map(math.exp, logits)))
        return tuple(logit - normaliser for logit in logits)

    return table


def written_table(rows: Mapping[str, Mapping[str, float]], letters: str) -> Table:
    """A table written down as probabilities.

    Args:
        rows: from a generated prefix, in letters, to the probability of each next letter, 0 where none is given. A
            prefix that is not listed has the row of the longest listed end of it: ``"b"`` serves ``"ab"`` too.
        letters: one letter for each token id; the prompt, one token of any kind, is not part of a prefix.
    """

    def table(prefix: Prefix) -> list[float]:
        written = "".join(letters[token] for token in prefix[1:])
        row = next(rows[written[cut:]] for cut in range(len(written) + 1) if written[cut:] in rows)
        return [math.log(row[letter]) if row.get(letter) else -math.inf for letter in letters]

    return table


def spelled(tokens: torch.Tensor, letters: str) -> list[str]:
    """Rows of generated ids as words."""
    return ["".join(letters[token] for token in row) for row in tokens.tolist()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What `advance` was given in one step of a search, and what it answered."""

    before: SearchState
    candidates: Candidates
    hits: torch.Tensor | None
    length: int
    rules: Rules
    after: SearchState
    chosen: Chosen


@contextlib.contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """Note every step of the searches that run inside."""
    steps: list[Step] = []
    advance = group.advance

    def recording(state: SearchState, candidates: Candidates, hits: torch.Tensor | None, **settings: Any):
        after, chosen = advance(state, candidates, hits, **settings)
        given = {"before": state, "candidates": candidates, "hits": hits}
        given.update(length=settings["length"], rules=settings["rules"])
        steps.append(Step(**given, after=after, chosen=chosen))
        return after, chosen

    group.advance = recording
    try:
        yield steps
    finally:
        group.advance = advance


def running_prefixes(steps: Sequence[Step], prompt: int = 0) -> Iterator[list[Prefix]]:
    """The generated tokens of each running beam of one prompt, after each step, as lists of whole sequences."""
    beams: list[Prefix] = [()]
    for step in steps:
        parents, tokens = step.chosen.parents[prompt].tolist(), step.chosen.tokens[prompt].tolist()
        beams = [beams[parent] + (token,) for parent, token in zip(parents, tokens, strict=True)]
        yield beams
