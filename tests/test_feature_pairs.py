"""Every pair of features: it works, and then what each feature promises holds of the result, or it is refused.

What a result should be is found by a slow way of its own: a full pass of the model over each returned sequence, without
a cache and a search, and processors, tries, penalties and rewards applied to it one after another by plain Python.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import feature_pairs
import pytest
import torch
from comparing import returned_cache
from feature_pairs import END, ENDED_ITEMS, FEATURES, LONG_ITEMS, PAD, START, VOCABULARY, call_of, one_keyword, refusal
from tiny_models import DECODERS, SEQ2SEQ, random_model
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from hf_paged_beam import TokenTrie, estimate, importance_weights

TOLERANCE = 1e-4
INT8_TOLERANCE = 0.3
"""Of a token's log-probability, with keys and values in 8 bits."""

KINDS = {
    "bart": (
        BartForConditionalGeneration,
        BartConfig(**dict(SEQ2SEQ, vocab_size=VOCABULARY, d_model=16, max_position_embeddings=32)),
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**dict(DECODERS, vocab_size=VOCABULARY, hidden_size=16))),
}
INF = math.inf


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    model = random_model(*KINDS[kind])
    settings = model.generation_config
    settings.eos_token_id, settings.forced_eos_token_id, settings.bad_words_ids = END, None, None
    if model.config.is_encoder_decoder:
        settings.decoder_start_token_id = START
        model.set_attn_implementation("eager")  # the one that gives maps
    return model


@functools.cache
def prompts_of(kind: str) -> dict[str, torch.Tensor]:
    """Two prompts after which sequences end early and late; the second is padded, right for an encoder, else left."""
    rows = [[3, 3, 3, 2], [8, 10, 6, PAD]] if kind == "bart" else [[6, 4, 11, 11], [PAD, 4, 3, 8]]
    input_ids = torch.tensor(rows)
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long()}


@dataclasses.dataclass
class Run:
    """One call and its result."""

    kind: str
    call: dict[str, Any]

    def again(self, **changes: Any) -> Any:
        """The same call after the same random seed, with changes."""
        return self.of_prompts(slice(None), **changes)

    def of_prompts(self, which: slice, **changes: Any) -> Any:
        inputs = {name: given[which] for name, given in prompts_of(self.kind).items()}
        model, call = model_of(self.kind), {**self.call, **changes}  # making the model draws too
        torch.manual_seed(3)
        return GenerationMixin.generate(model, **inputs, **call, custom_generate="hf_paged_beam")

    @functools.cached_property
    def output(self) -> Any:
        return self.again()

    @functools.cached_property
    def scored(self) -> Any:
        """The output with scores and a trace, which no pair with either may change."""
        return self.again(output_scores=True, return_beam_trace=True)

    @property
    def draws(self) -> bool:
        return bool(self.call["do_sample"])

    @property
    def stochastic(self) -> bool:
        return self.call.get("sampling") == "stochastic_beam"

    def of_prompt(self, name: str, prompt: int, default: Any = None) -> Any:
        """A setting of one prompt."""
        given = self.call.get(name, default)
        return given[prompt] if isinstance(given, list) and name != "eos_token_id" else given

    @functools.cached_property
    def ends(self) -> list[int]:
        given = self.call["eos_token_id"]
        return given if isinstance(given, list) else [given]

    @functools.cached_property
    def widths(self) -> list[int]:
        return [self.of_prompt("num_beams", prompt) for prompt in range(2)]

    @functools.cached_property
    def groups(self) -> int:
        return self.call.get("num_beam_groups", 1)

    @functools.cached_property
    def begins(self) -> int:
        """Column of the first generated token."""
        return 1 if self.kind == "bart" else prompts_of(self.kind)["input_ids"].shape[1]

    def rows(self, output: Any) -> list[Row]:
        lengths = (output.beam_indices >= 0).sum(-1).tolist()
        generated = output.sequences[:, self.begins :].tolist()
        trace = output.beam_trace
        rows, place = [], 0
        for number, prompt in enumerate(output.prompt_index.tolist()):
            place = 0 if not number or prompt != rows[-1].prompt else place + 1
            group = 0
            if trace is not None and self.groups > 1:
                places = trace.tokens.shape[2]
                group = int(trace.returned[prompt, place]) % places * self.groups // places
            rows.append(Row(number, prompt, place, group, generated[number][: lengths[number]]))
        return rows


@dataclasses.dataclass(frozen=True)
class Row:
    """One returned sequence.

    Attributes:
        number: among all rows.
        prompt, place: its prompt, and its rank there.
        group: of beams, that found it.
        tokens: generated, without what fills the row; none where there is no sequence.
    """

    number: int
    prompt: int
    place: int
    group: int
    tokens: list[int]


# ---------------------------------------------------------------------------------------------- the slow way


def passes(run: Run, output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A full pass over each row: ``[N, L, V]`` log-probabilities of generated tokens, ``[N, L, S]`` cross-attention."""
    model, inputs = model_of(run.kind), prompts_of(run.kind)
    source, mask = (given[output.prompt_index] for given in inputs.values())
    with torch.no_grad():
        if run.kind == "bart":
            before = output.sequences[:, :-1]
            found = model(source, attention_mask=mask, decoder_input_ids=before, output_attentions=True)
            return found.logits.log_softmax(-1), found.cross_attentions[-1].mean(1)
        mask = torch.nn.functional.pad(mask, (0, output.sequences.shape[1] - mask.shape[1]), value=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(output.sequences, attention_mask=mask, position_ids=positions).logits
    return logits[:, run.begins - 1 : -1].log_softmax(-1), None


def items_of(run: Run, prompt: int) -> list[list[int]] | None:
    """Items of a prompt, as their sequences are; None without a trie."""
    trie = run.call.get("trie")
    if trie is None:
        return None
    return LONG_ITEMS[prompt] if isinstance(trie, list) else [[*item, END] for item in ENDED_ITEMS]


PENALTY_LEAVES_PADDING_OUT = "prompt_ignore_length" in inspect.getsource(GenerationMixin._get_logits_processor)
"""Of transformers' repetition penalty; older releases penalise the padding token where a prompt is padded."""


def leading_pads(run: Run, prompt: int) -> int:
    """Tokens at the front of a row that the repetition penalty does not see."""
    if run.kind == "bart" or not PENALTY_LEAVES_PADDING_OUT:
        return 0
    return int(prompts_of(run.kind)["attention_mask"][prompt].argmax())


def taken_before(run: Run, trace: Any, prompt: int, step: int, group: int, closing: bool = False) -> torch.Tensor:
    """``[V]``: how many beams of earlier groups took each token in a step, from the trace.

    Args:
        closing: whether a group of which nothing finishes in the last step was done in that step, not before: a trace
            does not tell.
    """
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    width, places = run.widths[prompt] // run.groups, trace.tokens.shape[2] // run.groups
    cells = trace.running.shape[2] // run.groups
    for earlier in range(group):
        ranks = slice(earlier * places, (earlier + 1) * places)
        beams = trace.running[prompt, step, earlier * cells : (earlier + 1) * cells]
        tokens, scores = trace.tokens[prompt, step, ranks].tolist(), trace.scores[prompt, step, ranks].tolist()
        last = closing and step == run.of_prompt("max_new_tokens", prompt) - 1
        if (beams < 0).all() and not trace.finished[prompt, step, ranks].any() and not last:  # done before
            counts[PAD] += width
            continue
        offered = [token for token, score in zip(tokens, scores, strict=True) if token not in run.ends and score > -INF]
        for token in offered[:width]:
            counts[token] += 1
    return counts


def processed(run: Run, row: Row, log_probs: torch.Tensor, before: list[int], taken: torch.Tensor) -> torch.Tensor:
    """``[V]`` log-probabilities of a row's next token, with all that the call does to them.

    Args:
        before: all tokens so far, prompt included.
        taken: ``[V]``, by earlier groups.
    """
    scores, call, step = log_probs.clone(), run.call, len(before) - run.begins
    scores -= call.get("diversity_penalty", 0.0) * taken
    if step < run.of_prompt("min_new_tokens", row.prompt, 0):
        scores[run.ends] = -INF
    if "repetition_penalty" in call:
        seen = torch.tensor(sorted(set(before[leading_pads(run, row.prompt) :])))
        scores[seen] *= call["repetition_penalty"]
    items = items_of(run, row.prompt)
    if items is not None:
        allowed = {item[step] for item in items if len(item) > step and item[:step] == row.tokens[:step]}
        scores[[token for token in range(VOCABULARY) if token not in allowed]] = -INF
        scores = scores.log_softmax(-1) if call.get("trie_renormalize") else scores
    if "logits_processor" in call:
        scores[before[-1]] = -INF
    return scores.log_softmax(-1) if run.stochastic else scores


def token_scores(run: Run, output: Any, row: Row, log_probs: torch.Tensor, closing: bool = False) -> list[float]:
    """What each token of a row should have been given; ``[N, L, V]`` log-probabilities as `passes` gives them."""
    ids, scores = output.sequences[row.number].tolist(), []
    for step, token in enumerate(row.tokens):
        taken = taken_before(run, output.beam_trace, row.prompt, step, row.group, closing)
        before = ids[: run.begins + step]
        scores.append(float(processed(run, row, log_probs[row.number, step], before, taken)[token]))
    return scores


def ranked_by(run: Run, row: Row, log_prob: float, attention: torch.Tensor | None) -> float:
    """The finished score of a row, from its summed log-probability and its attention ``[L, S]``."""
    length, penalty = len(row.tokens), run.of_prompt("length_penalty", row.prompt, 1.0)
    base = (5 + length) / 6 if run.call.get("length_normalization") == "gnmt" else length
    score = log_prob / base**penalty + run.call.get("length_reward", 0.0) * length
    if "coverage_penalty" in run.call and attention is not None:
        real = prompts_of(run.kind)["attention_mask"][row.prompt].bool()
        score += run.call["coverage_penalty"] * float(attention[:length, real].sum(0).clamp(max=1).log().sum())
    return score


# -------------------------------------------------------------------------------------- what holds of every result


def check_every_result(run: Run) -> None:
    """Rows in the order of prompts and scores; scores as the slow way finds them; the same with and without a trace."""
    for output in (run.output, run.scored):
        counts = [run.of_prompt("num_return_sequences", prompt) for prompt in range(2)]
        assert output.prompt_index.tolist() == [prompt for prompt in range(2) for _ in range(counts[prompt])]
        assert len(output.sequences) == sum(counts) and output.beam_path in ("folded", "gathered")
        returned_cache(output).check()
    if not run.draws:  # what is drawn depends on which rows are there
        assert torch.equal(run.scored.sequences, run.output.sequences)
        assert torch.allclose(run.scored.token_logprobs, run.output.token_logprobs, atol=TOLERANCE)
    check_scores(run)


def check_scores(run: Run) -> None:
    output, rows = run.scored, run.rows(run.scored)
    log_probs, attention = passes(run, output)
    scores = output.sequences_scores.tolist()
    near = INT8_TOLERANCE if "kv_dtype" in run.call else TOLERANCE
    for row in rows:
        given = output.token_logprobs[row.number].tolist()
        assert not any(given[len(row.tokens) :])
        if not row.tokens:
            assert scores[row.number] == -INF
            continue
        expected = [token_scores(run, output, row, log_probs, closing) for closing in (False, True)[: run.groups]]
        assert any(given[: len(row.tokens)] == pytest.approx(one, abs=near) for one in expected), (row, given, expected)
        seen = None if attention is None else attention[row.number]
        assert scores[row.number] == pytest.approx(ranked_by(run, row, sum(given), seen), abs=near), row
    if not run.stochastic:
        for prompt in range(2):
            own = [scores[row.number] for row in rows if row.prompt == prompt]
            assert own == sorted(own, reverse=True)


# ------------------------------------------------------------------------------------- what each feature promises


def check_items(run: Run) -> None:
    """Rows are items, and `item_ids` says which."""
    for output in (run.output, run.scored):
        ids = output.item_ids.tolist()
        rows = run.rows(output)
        assert len(ids) == len(rows) and any(number >= 0 for number in ids)
        for row, number in zip(rows, ids, strict=True):
            items = items_of(run, row.prompt)
            if number >= 0:
                assert items[number] == row.tokens
            else:
                cut = len(row.tokens) == run.of_prompt("max_new_tokens", row.prompt)
                assert not row.tokens or (cut and any(item[: len(row.tokens)] == row.tokens for item in items))


def check_renormalized(run: Run) -> None:
    """Scores are larger than without, by what the other tokens had."""
    plain = run.again(trie_renormalize=False)
    assert run.output.token_logprobs.sum() > plain.token_logprobs.sum() + TOLERANCE or run.stochastic
    check_items(run)


def check_lists(run: Run) -> None:
    """Each prompt has what it has alone; lengths are its own."""
    for row in run.rows(run.output):
        least, most = (run.of_prompt(name, row.prompt) for name in ("min_new_tokens", "max_new_tokens"))
        assert len(row.tokens) <= most and not set(row.tokens[:least]) & set(run.ends)
    names = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "max_new_tokens")
    for prompt in range(2) if not run.draws else ():
        own = {name: run.of_prompt(name, prompt) for name in (*names, "min_new_tokens") if name in run.call}
        if isinstance(run.call.get("trie"), list):
            own["trie"] = [run.call["trie"][prompt]]
        alone = run.of_prompts(slice(prompt, prompt + 1), **own)
        rows = [row.tokens for row in run.rows(run.output) if row.prompt == prompt]
        assert rows == [row.tokens for row in run.rows(alone)]


def check_groups(run: Run) -> None:
    """A group's rows are distinct, and a penalty was paid by someone (how much, `check_scores` knows)."""
    output = run.again(num_return_sequences=run.call["num_beams"], return_beam_trace=True)
    found = [(row.prompt, row.group, *row.tokens) for row in run.rows(output) if row.tokens]
    assert len(set(found)) == len(found)
    assert {row.group for row in run.rows(output)} == {0, 1}
    trace = output.beam_trace
    first = taken_before(run, trace, 0, 0, 1)
    assert first.sum() == run.widths[0] / 2
    free = run.again(num_return_sequences=run.call["num_beams"], diversity_penalty=0.0)
    assert not torch.equal(free.token_logprobs, output.token_logprobs)


def check_stochastic(run: Run) -> None:
    """Distinct rows, ordered by what they drew, all above the threshold, and weights that estimate 1 from ones."""
    for output in (run.output, run.scored):
        rows = [(row.prompt, *row.tokens) for row in run.rows(output)]
        assert len(set(rows)) == len(rows)
        sums = output.token_logprobs.sum(-1)
        assert torch.allclose(sums, output.sequences_log_probs, atol=TOLERANCE)
        weights = importance_weights(output)
        assert ((weights > 0) & weights.isfinite()).all()
        assert torch.allclose(estimate(torch.ones(len(rows)), output, normalize=True), torch.ones(2).double())
        for prompt in range(2):
            own = output.prompt_index == prompt
            perturbed = output.perturbed_scores[own].tolist()
            assert perturbed == sorted(perturbed, reverse=True)
            assert (output.threshold[own] < perturbed[-1]).all() and (output.threshold[own] > -INF).all()
    every = run.again(num_return_sequences=run.call["num_beams"])
    for prompt, width in enumerate(run.widths):
        count = run.of_prompt("num_return_sequences", prompt)
        if count < width:  # the best that was not returned
            assert (
                run.output.threshold[run.output.prompt_index == prompt][0]
                == every.perturbed_scores[every.prompt_index == prompt][count]
            )


def check_sampling(run: Run) -> None:
    """Another seed gives other rows."""
    torch.manual_seed(4)
    inputs = prompts_of(run.kind)
    found = [
        GenerationMixin.generate(model_of(run.kind), **inputs, **run.call, custom_generate="hf_paged_beam").sequences
        for _ in range(4)
    ]
    assert len({str(one.tolist()) for one in found}) > 1


def check_patience(run: Run) -> None:
    """A group finishes sequences until it has its quota, and no longer."""
    trace = run.scored.beam_trace
    places = trace.tokens.shape[2] // run.groups
    for prompt, group in itertools.product(range(2), range(run.groups)):
        quota = math.ceil(run.call["patience"] * run.widths[prompt] / run.groups)
        counts = trace.finished[prompt, :, group * places : (group + 1) * places].sum(-1).cumsum(0).tolist()
        steps = [step for step, count in enumerate(counts) if count > (counts[step - 1] if step else 0)]
        assert all(counts[step - 1] < quota for step in steps if step)
        if counts[-1] < quota:
            assert stopped_after(run, trace, prompt, group) is None


def check_never(run: Run) -> None:
    """A group that stopped has no running beam that could still beat the worst sequence that it keeps."""
    output = run.again(num_return_sequences=run.call["num_beams"], return_beam_trace=True, output_scores=True)
    scores = output.perturbed_scores if run.stochastic else output.sequences_scores
    for prompt, group in itertools.product(range(2), range(run.groups)):
        stopped = stopped_after(run, output.beam_trace, prompt, group)
        if stopped is None:
            continue
        step, best = stopped
        kept = [float(scores[row.number]) for row in run.rows(output) if (row.prompt, row.group) == (prompt, group)]
        assert len(kept) == run.widths[prompt] // run.groups
        lengths = range(step + 1, run.of_prompt("max_new_tokens", prompt) + 1)
        bound = best if run.stochastic else max(_without_coverage(run, prompt, best, length) for length in lengths)
        assert bound <= min(kept) + TOLERANCE


def stopped_after(run: Run, trace: Any, prompt: int, group: int) -> tuple[int, float] | None:
    """The step after which a group stopped although beams ran on, and their best score; None where none did."""
    places, cells = (given.shape[2] // run.groups for given in (trace.tokens, trace.running))
    ranks = slice(group * places, (group + 1) * places)
    running = trace.running[prompt, :, group * cells : (group + 1) * cells]
    step = max((running >= 0).any(-1).nonzero().flatten().tolist(), default=None)
    if step is None:
        return None
    if run.groups > 1 and step + 2 == run.of_prompt("max_new_tokens", prompt):
        return None  # a group may also be done in the midst of the last step, and then takes nothing that is cut
    following = slice(step + 1, step + 2)
    nowhere_to_go = (trace.scores[prompt, following, ranks] == -INF).all() and step + 1 < trace.tokens.shape[1]
    if trace.finished[prompt, following, ranks].any() or nowhere_to_go:
        return None
    ranked = running[step]
    return step, float(trace.scores[prompt, step, ranked[ranked >= 0]].max())


def _without_coverage(run: Run, prompt: int, log_prob: float, length: int) -> float:
    return ranked_by(run, Row(0, prompt, 0, 0, [0] * length), log_prob, None)


def check_trace(run: Run) -> None:
    """Walking back from what was returned gives the sequences; what finished and was not returned is no better."""
    trace, rows = run.output.beam_trace, run.rows(run.output)
    for row in rows:
        number = int(trace.returned[row.prompt, row.place])
        assert (number >= 0) == bool(row.tokens)
        if row.tokens:
            assert walked_back(trace, row.prompt, number) == row.tokens
    for prompt in range(2):
        real = sum(bool(row.tokens) for row in rows if row.prompt == prompt)
        assert len(trace.tree(prompt).returned) == real and trace.slots(prompt) is not None
    if "coverage_penalty" not in run.call:  # whose attention is known of returned sequences only
        check_nothing_better_was_left(run)


def walked_back(trace: Any, prompt: int, number: int) -> list[int]:
    """The tokens of a candidate, ``step · K + rank``, by its parents."""
    step, rank = divmod(number, trace.tokens.shape[2])
    assert bool(trace.finished[prompt, step, rank])
    tokens = [int(trace.tokens[prompt, step, rank])]
    while step:
        beam = int(trace.parents[prompt, step, rank])
        step, rank = step - 1, int(trace.running[prompt, step - 1, beam])
        assert 0 <= beam < trace.running.shape[2] and rank >= 0
        tokens.insert(0, int(trace.tokens[prompt, step, rank]))
    return tokens


def check_nothing_better_was_left(run: Run) -> None:
    output = run.again(num_return_sequences=run.call["num_beams"], return_beam_trace=True)
    trace, rows = output.beam_trace, run.rows(output)
    for prompt, step, rank in trace.finished.nonzero().tolist():
        number, group = step * trace.tokens.shape[2] + rank, rank * run.groups // trace.tokens.shape[2]
        if number in trace.returned[prompt].tolist():
            continue
        score = float(trace.scores[prompt, step, rank])
        ranked = score if run.stochastic else _without_coverage(run, prompt, score, step + 1)
        kept = [row for row in rows if row.tokens and (row.prompt, row.group) == (prompt, group)]
        assert len(kept) == run.widths[prompt] // run.groups
        assert ranked <= min(float(trace.sequences_scores[prompt, row.place]) for row in kept) + TOLERANCE


def check_int8(run: Run) -> None:
    """Keys and values take less than half of the room."""
    rounded, plain = run.again(), run.again(kv_dtype=None)
    assert rounded.kv_usage.bytes_live / rounded.kv_usage.live < 0.6 * plain.kv_usage.bytes_live / plain.kv_usage.live


def check_path(path: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        """The path is taken, and its result is the other one's."""
        other = run.again(beam_attention="auto" if path == "gathered" else "gathered")
        assert run.output.beam_path == path
        if "coverage_penalty" not in run.call:
            assert other.beam_path != path
        assert torch.equal(run.output.sequences, other.sequences)
        assert torch.allclose(run.output.token_logprobs, other.token_logprobs, atol=TOLERANCE)

    return check


def check_outputs(run: Run) -> None:
    """transformers' own sum over the kept scores is `sequences_scores`; kept logits are the model's."""
    output, model = run.output, model_of(run.kind)
    found = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    real = output.sequences_scores > -INF
    assert torch.allclose(found[real], output.token_logprobs[real], atol=TOLERANCE)
    assert len(output.scores) == len(output.logits)
    assert all(len(step) == sum(run.widths) for step in (*output.scores, *output.logits))
    near = INT8_TOLERANCE if "kv_dtype" in run.call else TOLERANCE
    log_probs, _ = passes(run, output)
    for row in run.rows(output):
        for step in range(len(row.tokens)):
            beam = int(output.beam_indices[row.number, step])
            logits = output.logits[step][beam].double().log_softmax(-1)
            assert torch.allclose(logits, log_probs[row.number, step], atol=near), (row, step)


def check_repetition(run: Run) -> None:
    """Candidates are others than without it; what their scores should be, `check_scores` knows."""
    with_it, without = (run.again(repetition_penalty=given, return_beam_trace=True).beam_trace for given in (1.3, 1.0))
    assert with_it.scores.shape != without.scores.shape or not torch.equal(with_it.scores, without.scores)


def check_processor(run: Run) -> None:
    """No token follows itself, and the processor was shown all rows, or those of a group, in every step."""
    processor = run.call["logits_processor"][0]
    processor.rows.clear()
    output = run.again()
    assert set(processor.rows) == {sum(run.widths) // run.groups}
    for row in run.rows(output):
        assert all(one != next_one for one, next_one in itertools.pairwise(row.tokens))


def check_ends(run: Run) -> None:
    """A sequence ends at its first end token, at the longest length, or where its item ends."""
    for row in run.rows(run.output):
        assert not set(row.tokens[:-1]) & set(run.ends)
        if row.tokens and len(row.tokens) < run.of_prompt("max_new_tokens", row.prompt):
            assert row.tokens[-1] in run.ends or row.tokens in (items_of(run, row.prompt) or [])


def check_every(run: Run) -> None:
    """As many rows as beams, no sequence of a group twice."""
    assert run.output.prompt_index.bincount().tolist() == run.widths
    found = [(row.prompt, row.group, *row.tokens) for row in run.rows(run.scored) if row.tokens]
    assert len(set(found)) == len(found)


def check_changed(**without: Any) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        """The feature shows: scores are others than without it. What they should be, `check_scores` knows."""
        plain = run.again(output_scores=True, **without)
        assert not torch.allclose(run.again(output_scores=True).sequences_scores, plain.sequences_scores)

    return check


CHECKS: dict[str, Callable[[Run], None]] = {
    "trie": check_items,
    "tries": check_items,
    "renormalize": check_renormalized,
    "lists": check_lists,
    "groups": check_groups,
    "stochastic": check_stochastic,
    "sampling": check_sampling,
    "patience": check_patience,
    "coverage": check_changed(coverage_penalty=0.0),
    "reward": check_changed(length_reward=0.0),
    "gnmt": check_changed(length_normalization="length"),
    "never": check_never,
    "trace": check_trace,
    "int8": check_int8,
    "gathered": check_path("gathered"),
    "folded": check_path("folded"),
    "outputs": check_outputs,
    "repetition": check_repetition,
    "processor": check_processor,
    "ends": check_ends,
    "every": check_every,
}

CASES = [(name,) for name in FEATURES] + [
    pair for pair in itertools.combinations(FEATURES, 2) if not one_keyword(*(FEATURES[name] for name in pair))
]


@pytest.mark.parametrize("names", CASES, ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_pair(kind: str, names: tuple[str, ...]) -> None:
    """Each feature alone and with each other."""
    run = Run(kind, call_of(names))
    why = refusal(*names) if len(names) == 2 else None
    needs_encoder = kind != "bart" and any(FEATURES[name].encoder for name in names)
    if why is not None or needs_encoder:
        with pytest.raises(ValueError) as refused:
            run.again()
        named = ("coverage_penalty",) if needs_encoder else why.named
        assert all(name in str(refused.value) for name in named), refused.value
        return
    check_every_result(run)
    for name in names:
        CHECKS[name](run)


@pytest.mark.parametrize("longest", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_trace_of_groups_that_are_full(kind: str, longest: int) -> None:
    """What is cut in the last step finishes only where the group has room: the trace says so too."""
    call = {**call_of(("groups", "trace", "ends")), "early_stopping": True, "max_new_tokens": longest}
    check_trace(Run(kind, call))


def test_the_page_shows_the_table() -> None:
    """docs/search.md says what is tested here."""
    assert feature_pairs.markdown() in feature_pairs.PAGE.read_text(), "python tests/feature_pairs.py --markdown"


def test_every_feature_has_a_check() -> None:
    assert list(CHECKS) == list(FEATURES)
    assert all(isinstance(given, TokenTrie) for given in FEATURES["tries"].own["trie"])
