"""Beam search over a paged cache: the loop.

1. prompt     once, at one row per prompt                                        prompt.py
2. choose     what every beam continues as                                       group.py
     scores       log-probabilities, processed                                       scores.py, per_prompt.py
     candidates   the K best continuations of each prompt                            candidates.py
                  with a trie: of those that stay on items                           constrain.py, trie.py
                  drawn as whole sequences                                           stochastic.py
     hits         which of them end here                                             stopping.py
     advance      the ended finish, the best others run on                           advance.py, rules.py, lengths.py
                  group after group, each kept from what earlier ones took           diverse.py
3. fork       beams continue their parents in the cache: indices move, no keys   cache/
4. read       is the search over? the one value that the host reads in a step    late.py, on a GPU
5. decode     the model on one token per beam, then 2 again                      decode.py, head.py, linears.py
                  compiled, or recorded as a graph                                   capture.py, replay.py
6. output     walk back from the best finished sequences                         history.py, output.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .. import versions
from ..cache import parts_of, stored_dtype
from ..trace import BeamTrace
from ..versions import GenerativeModel
from .coverage import last_cross_attention
from .decode import DecodeSteps
from .diverse import TakenTokens
from .group import BeamGroup, GroupRows
from .head import NarrowHead
from .late import READ_LATE_ON, LateReport
from .linears import OneDnnLinears
from .memory import explain_out_of_memory
from .output import Found, StepOutputs, best_found, build_output
from .prompt import HandOver, cache_with_prompt, prepare_cache, run_prompt
from .replay import RECORDERS
from .settings import SearchSettings
from .state import Chosen

_NOT_A_NUMBER = torch.iinfo(torch.int64).min
"""What a step reports to the host where scores are NaN. Else it reports what the cache must be told of the next step,
or, if the search is over, its complement, a negative number."""


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
    drawn = _random_states(call.input_ids.device) if call.settings.do_sample else []
    try:
        search = BeamSearch(call)
        with explain_out_of_memory(search), OneDnnLinears(search.parts, prepack=call.settings.options.prepack):
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
    """One search: the model, the cache and the groups of beams. `run` is the loop."""

    def __init__(self, call: SearchCall):
        self.call = call
        self.settings = call.settings
        self.batch_size, self.prompt_length = call.input_ids.shape[:2]
        self.device = call.input_ids.device
        options = self.settings.options
        self.parts = parts_of(call.model)
        self.cache = prepare_cache(
            call.model, call.config, call.model_kwargs, self.batch_size, kv_dtype=stored_dtype(options.kv_dtype)
        )
        self.taken = None
        if options.num_beam_groups > 1:
            self.taken = TakenTokens(self.batch_size, self.settings.eos_token_ids, self.settings.pad_token_id)
        self.groups = [BeamGroup(call, self.taken) for _ in range(options.num_beam_groups)]
        narrows = all(group.reads_few_columns for group in self.groups)
        self.head = NarrowHead(call.model, wanted=narrows and not call.synced_gpus)
        self.rows = self._rows(self.settings.widths)
        self.kept = StepOutputs(self.settings, call.model.config.is_encoder_decoder, self.rows.beams)
        self.present = list(range(self.batch_size))  # prompts whose beams are rows of the model
        self.may_leave = self._prompts_may_leave()
        self.slots: list[torch.Tensor] = []  # of every step, for a trace
        self.late = LateReport() if self._may_read_late() else None

    def _rows(self, widths: Sequence[int]) -> GroupRows:
        return GroupRows(widths, len(self.groups), self.settings.width, self.device)

    def _prompts_may_leave(self) -> bool:
        """Whether prompts that are done leave the model's rows: where nobody counts on theirs.

        transformers' outputs have rows of all prompts in every step, and so has its cache.
        """
        settings = self.settings
        reads_all = settings.keeps_step_outputs or any(group.reads_all_rows for group in self.groups)
        returns_cache = settings.return_dict and not settings.differ
        callers_cache = self.call.model_kwargs.get(versions.CACHE_ARGUMENT) is self.cache
        traced = settings.options.return_beam_trace
        recorded = settings.options.compile and self.device.type in RECORDERS  # for so many rows
        return self.batch_size > 1 and not (reads_all or returns_cache or callers_cache or traced or recorded)

    def _may_read_late(self) -> bool:
        """Whether the host may learn one step late that the search is over, so that a GPU never waits for it: nobody
        sees that one more step was run."""
        settings, options = self.settings, self.settings.options
        seen = settings.return_dict or options.return_beam_trace or self.call.synced_gpus or self.may_leave
        looks = len(self.groups) > 1 or options.draws_sequences or settings.do_sample or self.groups[0].calls_user_code
        return options.compile and self.device.type in READ_LATE_ON and not (seen or looks)

    def run(self) -> Any:
        outputs, decode = self._prompt()
        if decode.needs_rows:
            for group in self.groups:
                group.keep_ids(self.call.input_ids)
        self._other_ranks_search(over=False)
        while True:
            chosen = self._choose(outputs)
            del outputs
            if self._fork_and_read(chosen, decode):
                break
            self._other_ranks_search(over=False)
            outputs = self._decode(decode, chosen)
        while self._other_ranks_search(over=True):
            decode(*self._next_inputs(chosen))
        callers_cache = self.call.model_kwargs.get(versions.CACHE_ARGUMENT) is self.cache
        decode.end(keep_cache=self.settings.return_dict or callers_cache)
        self.cache.end()
        return self._output(decode.beam_path)

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return len(self.groups[0].history)

    def _prompt(self) -> tuple[Any, DecodeSteps]:
        call, settings = self.call, self.settings
        kwargs = {**call.model_kwargs, versions.CACHE_ARGUMENT: self.cache}
        if settings.options.coverage_penalty:
            kwargs["output_attentions"] = True
        with self.head.one_pass() as watch:
            outputs, kwargs = run_prompt(call.model, call.input_ids, call.config, kwargs)
            watch(outputs.logits)
        self.cache = cache_with_prompt(self.cache, kwargs, model=call.model, batch_size=self.batch_size)
        kwargs[versions.CACHE_ARGUMENT] = self.cache
        try:
            self.cache.begin_decode(self.batch_size, self.device, settings.widths)
        except NotImplementedError as error:
            raise HandOver(f"{type(call.model).__name__}: {error}") from error
        if settings.options.return_beam_trace:
            self.cache.keep_slots()
        decode = DecodeSteps(
            call.model,
            self.cache,
            kwargs,
            beam_attention=settings.options.beam_attention,
            wants_maps=bool(call.config.output_attentions or settings.options.coverage_penalty),
            may_try=not call.synced_gpus,
            parts=self.parts,
            capture=self._can_capture(),
            most_slots=max(settings.widths) * settings.max_new_tokens,
        )
        return outputs, decode

    def _can_capture(self) -> bool:
        """Whether decode steps may be captured: nothing but the logits is read of them, of all tokens."""
        settings = self.settings
        reads_more = settings.output_attentions or settings.output_hidden_states or settings.options.coverage_penalty
        return settings.options.compile and not reads_more and not self.head.wanted

    def _decode(self, decode: DecodeSteps, chosen: Sequence[Chosen]) -> Any:
        """The model on one token per beam; its logits only of tokens that a trie can ask for, where that is known to be
        safe and the search wants no others."""
        narrow = self.head.wanted and decode.path_is_known
        with self.head.one_pass(self.groups[0].step_tokens() if narrow else None) as watch:
            outputs = decode(*self._next_inputs(chosen))
            watch(outputs.logits)
        return outputs

    def _choose(self, outputs: Any) -> list[Chosen]:
        """What every beam continues as, group by group."""
        first = self.length == 0
        self.kept.keep_model_outputs(outputs, first)
        logits = outputs.logits[:, -1, :].to(self.device)  # [R, V]
        self.kept.keep_logits(logits, first)
        attention = None
        if self.settings.options.coverage_penalty:
            attention = last_cross_attention(outputs).to(self.device)
        if self.taken is None:
            keep = functools.partial(self.kept.keep_scores, first=first)
            return [self.groups[0].step(logits, attention, keep, self.head.column_of)]
        return self._choose_one_after_another(logits, attention, first)

    def _choose_one_after_another(
        self, logits: torch.Tensor, attention: torch.Tensor | None, first: bool
    ) -> list[Chosen]:
        scores: list[torch.Tensor] = []  # of each group, [R / G, V]

        def keep(log_probs: torch.Tensor) -> tuple | None:
            scores.append(log_probs)
            return self.kept.scores

        def of(number: int, rows: torch.Tensor) -> torch.Tensor:
            return rows if first else self.rows.of(number, rows)  # in the first step, one row of each prompt for all

        if self.taken is not None:
            self.taken.forget()
        chosen = []
        for number, group in enumerate(self.groups):
            seen = None if attention is None else of(number, attention)
            chosen.append(group.step(of(number, logits), seen, keep, self.head.column_of))
        if self.kept.scores is not None:
            wide = [
                part if len(part) == beams.count else beams.repeat(part)
                for beams, part in zip(self.rows.of_group, scores, strict=True)
            ]
            self.kept.keep_scores(self.rows.together(wide), first=False)
        return chosen

    def _fork_and_read(self, chosen: Sequence[Chosen], decode: DecodeSteps) -> bool:
        """Fork the beams in the cache, and let the host read whether the search is over."""
        self._seat()
        slots_report = self.cache.fork(self.rows.parent_rows([one.parents for one in chosen]))
        if self.settings.options.return_beam_trace:
            newest = [self.rows.of(number, self.cache.newest_slots()) for number in range(len(self.groups))]
            grids = [beams.grid(slots) for beams, slots in zip(self.rows.of_group, newest, strict=True)]
            self.slots.append(torch.cat(grids, dim=1))
        going_on_of = [group.rules.takes(group.state) for group in self.groups]
        go_on = functools.reduce(torch.logical_or, going_on_of)  # [B]
        report = slots_report.where(go_on.any(), ~slots_report)
        for group in self.groups:
            best = group.candidates.scores.select(1, 0).amax()  # NaN if one is: it comes before all numbers
            report = report.where(best >= -torch.inf, _NOT_A_NUMBER)
        if self.late is not None and self.length < self.settings.max_new_tokens:
            return self._read_late(self.late, report)
        if self.may_leave:
            told, *going_on = torch.cat([report.view(1), go_on.to(torch.int64)]).tolist()  # host read: once per step
        else:
            told, going_on = int(report), []  # host read: the stop test, once per step
        over = self._is_over(told, self.length)
        self.cache.grow(~told if over else told)
        if going_on and not over:
            self._let_leave(going_on, decode)
        return over

    def _read_late(self, late: LateReport, report: torch.Tensor) -> bool:
        """Read what the step before this one reported. If that ended the search, this one changed nothing: prompts that
        are done take no more sequences."""
        told = late.swap(report)
        if told is not None and self._is_over(told, self.length - 1):
            self.cache.grow(~told)
            return True
        self.cache.grow_late(told)
        return False

    @staticmethod
    def _is_over(told: int, length: int) -> bool:
        """What a step of sequences of `length` tokens reported."""
        if told == _NOT_A_NUMBER:
            raise RuntimeError(
                f"the scores at step {length} are NaN: the model's logits are NaN or infinite, or a logits "
                f"processor made them so. Check the model's weights and dtype, or pass remove_invalid_values=True."
            )
        return told < 0

    def _seat(self) -> None:
        """Tell every group which rows of the model are its beams."""
        for group, beams in zip(self.groups, self.rows.of_group, strict=True):
            group.beams = beams

    def _let_leave(self, going_on: Sequence[int], decode: DecodeSteps) -> None:
        """Take the prompts that are done out of the model's rows, and their keys out of the pools."""
        kept = [place for place, prompt in enumerate(self.present) if going_on[prompt]]
        if len(kept) == len(self.present):
            return
        self.present = [self.present[place] for place in kept]
        decode.leave(kept, self.cache.leave(kept))
        widths = [0] * self.batch_size
        for prompt in self.present:
            widths[prompt] = self.settings.widths[prompt]
        self.rows = self._rows(widths)
        self._seat()

    def _next_inputs(self, chosen: Sequence[Chosen]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Newest token of every row, ``[R]`` int64, and whole rows ``[R, length]`` where something reads them."""
        of_group = self.rows.of_group
        tokens = self.rows.together([beams.rows(one.tokens) for beams, one in zip(of_group, chosen, strict=True)])
        ids = [
            beams.rows(group.ids) for beams, group in zip(of_group, self.groups, strict=True) if group.ids is not None
        ]
        return tokens, self.rows.together(ids) if ids else None

    def _other_ranks_search(self, *, over: bool) -> bool:
        """With `synced_gpus`: tell the other ranks before each step whether this one is done; whether any is not.

        All ranks must run the model equally often, or those that still search wait for ever.
        """
        if not self.call.synced_gpus:
            return False
        return bool(self.call.model._has_unfinished_sequences(over, True, device=self.device))

    def _output(self, beam_path: str) -> Any:
        found = best_found(self.groups, self.settings.counts)
        output = build_output(
            found,
            self.call.input_ids,
            self.settings,
            self.kept,
            cache=self.cache,
            encoder_outputs=self.call.model_kwargs.get("encoder_outputs"),
            beam_path=beam_path,
        )
        if self.settings.options.return_beam_trace and self.settings.return_dict:
            output.beam_trace = self._trace(found)
        return output

    def _trace(self, found: Found) -> BeamTrace:
        steps = [group.history.trace() for group in self.groups]
        places, width = steps[0]["tokens"].shape[-1], self.groups[0].rules.width
        for number, one in enumerate(steps):
            one["parents"][:, 1:] += number * width  # in the first step all continue the prompt
            one["running"] = torch.where(one["running"] < 0, -1, one["running"] + number * places)
        joined = {name: torch.cat([one[name] for one in steps], dim=2) for name in steps[0]}
        slots = torch.stack(self.slots, dim=1)
        slots[:, -1] = -1  # given for a next token that never came
        step, rank = found.origin // places, found.origin % places
        wanted = torch.tensor(self.settings.counts, device=self.device).unsqueeze(1)
        absent = torch.arange(step.shape[1], device=self.device) >= wanted  # a prompt that returns fewer than others
        scores = found.sequences.scores.masked_fill(absent, -torch.inf)
        returned = step * places * len(self.groups) + found.group * places + rank
        told = {
            **joined,
            "slots_given": torch.where(joined["running"] < 0, -1, slots),
            "returned": returned.masked_fill(scores == -torch.inf, -1),
            "sequences_scores": scores,
        }
        on_host = {name: tensor.cpu() for name, tensor in told.items()}  # host read: asked for, once, after the search
        return BeamTrace(**on_host, prompt_length=self.cache.index.prompt_length)
