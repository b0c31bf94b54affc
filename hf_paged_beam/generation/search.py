"""Beam search over a paged cache: the loop.

1. prompt     once, at one row per prompt                                        prompt.py
2. scores     log-probabilities, processed                                       scores.py
3. candidates the K best continuations of each prompt                            candidates.py
              with a trie: of those that stay on items                           constrain.py, trie.py
4. hits       which of them end here                                             stopping.py
5. advance    the ended finish, the best others run on                           advance.py
6. fork       beams continue their parents in the cache: indices move, no keys   cache/
7. read       is the search over? the one value that the host reads in a step
8. decode     the model on one token per beam, then 2 again                      decode.py
9. output     walk back from the best finished sequences                         history.py, output.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .. import versions
from ..versions import GenerativeModel
from .advance import advance
from .candidates import best_candidates, sampled_candidates
from .constrain import Forest, ItemConstraint, forced_tokens, with_constraint
from .decode import DecodeSteps
from .history import History
from .lengths import LengthTables
from .memory import explain_out_of_memory
from .output import StepOutputs, build_output
from .prompt import HandOver, cache_with_prompt, prepare_cache, run_prompt
from .scores import ProcessedScores
from .settings import SearchSettings
from .state import Candidates, Chosen, SearchState
from .stopping import CandidateStopping, goes_on

_NOT_A_NUMBER = torch.iinfo(torch.int64).min
"""What a step reports to the host where scores are NaN. Else it reports the highest slot of the next step, or, if the
search is over, its complement, a negative number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchCall:
    """What transformers prepared for one call, at one row per prompt.

    Attributes:
        model: the model.
        input_ids: ``[B, P]`` int64; of an encoder-decoder model, the decoder's start.
        processors: logits processors.
        criteria: stopping criteria.
        config: generation configuration, lengths and special tokens final.
        settings: what this package reads of it, and its own options.
        model_kwargs: the model's inputs.
        synced_gpus: keep running the model until all ranks are done.
    """

    model: GenerativeModel
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    settings: SearchSettings
    model_kwargs: dict[str, Any]
    synced_gpus: bool = False


def run_search(call: SearchCall) -> Any:
    """Search, and return what transformers' search would return.

    Raises:
        HandOver: before a search step, if the call is one for transformers' own search.
        RuntimeError: if the model's logits are not numbers.
        torch.OutOfMemoryError: with what was searched, and what would make it smaller, added to its message.
    """
    search = BeamSearch(call)
    drawn = _random_states(search.device) if call.settings.do_sample else []
    try:
        with explain_out_of_memory(search):
            return search.run()
    except HandOver:
        for put_back, state in drawn:  # transformers' own search shall draw what it would have drawn
            put_back(state)
        raise


def _random_states(device: torch.device) -> list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
    """States of the generators that a search on `device` draws from, each with what puts it back."""
    states: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type == "cuda":
        states.append((functools.partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    return states


class BeamSearch:
    """One search. `run` is the loop; every other method is one line of the list above."""

    def __init__(self, call: SearchCall):
        self.call = call
        self.settings = call.settings
        self.batch_size, self.prompt_length = call.input_ids.shape[:2]
        self.device = call.input_ids.device
        self.cache = prepare_cache(
            call.model, call.config, call.model_kwargs, self.batch_size, kv_dtype=self.settings.kv_dtype
        )
        self.constraint = self._constraint()
        self.process = ProcessedScores(self._processors(), self.settings.num_beams)
        self.stopping = CandidateStopping(call.criteria)
        self.tables = LengthTables(
            self.batch_size,
            self.settings.max_new_tokens,
            length_penalty=self.settings.length_penalty,
            normalization=self.settings.length_normalization,
            early_stopping=self.settings.early_stopping,
            device=self.device,
        )
        self.kept = StepOutputs(self.settings, call.model.config.is_encoder_decoder)
        self.history = History()
        self.first_rows = torch.arange(self.batch_size, device=self.device).unsqueeze(1) * self.settings.num_beams

    def _constraint(self) -> ItemConstraint | None:
        settings = self.settings
        if settings.trie is None:
            return None
        forest = Forest(settings.trie, self.batch_size, self.device)
        begins = forced_tokens(self.call.processors, self.prompt_length)
        return ItemConstraint(forest, begins=begins, renormalize=settings.trie_renormalize)

    def _processors(self) -> LogitsProcessorList:
        """The processors, the constraint among them where whole rows of scores are wanted."""
        processors, settings = self.call.processors, self.settings
        self.looks_up_children = self.constraint is not None and not (
            processors or settings.do_sample or settings.output_scores
        )
        if self.constraint is None or self.looks_up_children:
            return processors
        return with_constraint(processors, self.constraint)

    def run(self) -> Any:
        outputs, decode = self._prompt()
        self._other_ranks_search(over=False)
        rows = self.call.input_ids if self._needs_rows(decode) else None  # [B·R, length]
        state = SearchState.initial(self.batch_size, self.settings.num_beams, self.device)
        while True:
            candidates = self._candidates(outputs, rows, state)
            del outputs
            hits = self._hits(candidates, rows)
            state, chosen = advance(
                state, candidates, hits, length=self.length + 1, tables=self.tables,
                early_stopping=self.settings.early_stopping,
            )  # fmt: skip
            if self.constraint is not None:
                self.constraint.follow(candidates, chosen)
            rows = self._extend_rows(rows, chosen)
            self.history.record(candidates, chosen)
            if self._fork_and_read(state, candidates, chosen):
                break
            self._other_ranks_search(over=False)
            outputs = decode(chosen.tokens.flatten(), rows)
        while self._other_ranks_search(over=True):
            decode(chosen.tokens.flatten(), rows)
        self.cache.end()
        return self._output(state, decode.beam_path)

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return len(self.history)

    @property
    def first(self) -> bool:
        """Whether the model has run on the prompt only, at one row per prompt."""
        return self.length == 0

    def _prompt(self) -> tuple[Any, DecodeSteps]:
        call, settings = self.call, self.settings
        kwargs = {**call.model_kwargs, versions.CACHE_ARGUMENT: self.cache}
        outputs, kwargs = run_prompt(call.model, call.input_ids, call.config, kwargs)
        self.cache = cache_with_prompt(self.cache, kwargs, model=call.model, batch_size=self.batch_size)
        kwargs[versions.CACHE_ARGUMENT] = self.cache
        try:
            self.cache.begin_decode(self.batch_size, self.device)
        except NotImplementedError as error:
            raise HandOver(f"{type(call.model).__name__}: {error}") from error
        decode = DecodeSteps(
            call.model,
            self.cache,
            kwargs,
            beam_attention=settings.beam_attention,
            wants_maps=bool(call.config.output_attentions),
            may_try=not call.synced_gpus,
        )
        return outputs, decode

    def _needs_rows(self, decode: DecodeSteps) -> bool:
        return self.process.needs_rows or self.stopping.needs_rows or decode.needs_rows

    def _candidates(self, outputs: Any, rows: torch.Tensor | None, state: SearchState) -> Candidates:
        self.kept.keep_model_outputs(outputs, self.first)
        logits = outputs.logits[:, -1, :].to(self.device)  # [B·R, V]
        self.kept.keep_logits(logits, self.first)
        settings, count = self.settings, self.settings.num_candidates
        if self.constraint is not None and self.looks_up_children:
            scores = logits.float() if settings.trie_renormalize else self.process(logits, rows, self.first)
            return self.constraint.candidates(scores, state.running_scores, settings.num_beams, count)
        log_probs = self.process(logits, rows, self.first)
        wide = log_probs.shape[0] > logits.shape[0]
        self.kept.keep_scores(log_probs, self.first and not wide)
        if wide:
            log_probs = log_probs[:: settings.num_beams]  # only the first beam of a prompt runs at the first step
        choose = sampled_candidates if settings.do_sample else best_candidates
        candidates = choose(log_probs, state.running_scores, count)
        return candidates if self.constraint is None else self.constraint.placed(candidates)

    def _hits(self, candidates: Candidates, rows: torch.Tensor | None) -> torch.Tensor | None:
        candidate_rows = None
        if self.stopping.needs_rows and rows is not None:
            candidate_rows = _continue_rows(rows, candidates.parents, candidates.tokens)
        hits = self.stopping.hits(candidates, self.prompt_length + self.length + 1, candidate_rows, self.kept.scores)
        ends = None if self.constraint is None else self.constraint.hits(candidates)
        return hits if ends is None else ends if hits is None else hits | ends

    def _extend_rows(self, rows: torch.Tensor | None, chosen: Chosen) -> torch.Tensor | None:
        return None if rows is None else _continue_rows(rows, chosen.parents, chosen.tokens)

    def _fork_and_read(self, state: SearchState, candidates: Candidates, chosen: Chosen) -> bool:
        """Fork the beams in the cache, and let the host read whether the search is over."""
        highest_slot = self.cache.fork((chosen.parents + self.first_rows).flatten())
        report = highest_slot.where(goes_on(state, self.settings.early_stopping), ~highest_slot)
        best = candidates.scores.select(1, 0).amax()  # NaN if one is: it comes before all numbers
        told = int(report.where(best >= -torch.inf, _NOT_A_NUMBER))  # host read: the stop test, once per step
        if told == _NOT_A_NUMBER:
            raise RuntimeError(
                f"the scores at step {self.length} are NaN: the model's logits are NaN or infinite, or a logits "
                f"processor made them so. Check the model's weights and dtype, or pass remove_invalid_values=True."
            )
        over = told < 0
        self.cache.grow(~told if over else told)
        return over

    def _other_ranks_search(self, *, over: bool) -> bool:
        """With `synced_gpus`: tell the other ranks before each step whether this one is done; whether any is not.

        All ranks must run the model equally often, or those that still search wait for ever.
        """
        if not self.call.synced_gpus:
            return False
        return bool(self.call.model._has_unfinished_sequences(over, True, device=self.device))

    def _output(self, state: SearchState, beam_path: str) -> Any:
        return build_output(
            self.history.walk_back(state, self.settings.num_return_sequences),
            self.call.input_ids,
            self.settings,
            self.kept,
            cache=self.cache,
            encoder_outputs=self.call.model_kwargs.get("encoder_outputs"),
            beam_path=beam_path,
            item_ids=self._item_ids(state),
        )

    def _item_ids(self, state: SearchState) -> torch.Tensor | None:
        """``[B, n]`` int64: the item of each returned sequence, -1 where it is none."""
        if self.constraint is None:
            return None
        nodes = self.history.last_nodes(state, self.settings.num_return_sequences)
        found = state.finished_scores[:, : nodes.shape[1]] > -torch.inf
        return self.constraint.forest.items(nodes).masked_fill(~found, -1)


def _continue_rows(rows: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of ids, continued: ``[B·R, length]``, ``[B, N]``, ``[B, N]`` to ``[B·N, length + 1]``."""
    batch, count = parents.shape
    source = rows.view(batch, rows.shape[0] // batch, rows.shape[-1])  # the length may be 0
    inherited = source.gather(1, parents.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
    return torch.cat([inherited, tokens.unsqueeze(-1)], dim=-1).view(batch * count, -1)
