"""Situations that people reported with beam search in transformers, each by the smallest input that shows it.

Numbers are issues or pull requests of the transformers repository, unless another is named. The value asserted is the
right one, mostly found without transformers' search: from the model's own probabilities, or from the input alone.
Report 45563 (a paged cache that drops the beams) stands with the other cache implementations in ``test_calls.py``,
as do models and caches that are handed over.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import OLD_RELEASE, check_equal, check_same_call, real_scores, search_both
from tiny_models import (
    BUILDERS,
    DECODER_ONLY,
    ENCODER_DECODER,
    ENCODER_DECODER_PATHS,
    EOS,
    PAD,
    VOCABULARY,
    met_model,
    prompts,
    tiny_model,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerationMixin
from watching import forward_rows, watching

from hf_paged_beam import generate
from hf_paged_beam.cache import FoldedStep, folded_attention
from hf_paged_beam.cache.index import BeamIndex
from hf_paged_beam.cache.layers import PoolLayer
from hf_paged_beam.side_by_side import compare
from hf_paged_beam.versions import CACHE_ARGUMENT

BEAMS = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False}
WHOLE = {"return_dict_in_generate": True, "output_scores": True}
MANY_ENDS = [5, 9, 20, 33, 47, 60, 72, 81]
"""End ids that the tiny models often choose, so that sequences end at many lengths."""


def search(model: PreTrainedModel, inputs: dict, **settings: Any) -> Any:
    """Ours, by the general ``generate``, with everything that can be returned."""
    call = {**BEAMS, **WHOLE, "custom_generate": "hf_paged_beam", **settings}
    return GenerationMixin.generate(model, **inputs, **call)


def lengths_of(output: Any) -> torch.Tensor:
    """``[B·n]``: generated tokens of each returned row."""
    return (output.beam_indices >= 0).sum(1)


def generated_by(output: Any) -> list[list[int]]:
    """The generated tokens of each returned row, without what fills it up."""
    columns = output.beam_indices.shape[1]
    rows = output.sequences[:, output.sequences.shape[1] - columns :].tolist()
    return [row[:length] for row, length in zip(rows, lengths_of(output).tolist(), strict=True)]


def rescored(model: PreTrainedModel, inputs: dict, output: Any) -> torch.Tensor:
    """Log-probability of each generated token, ``[B·n, T]``, 0 after the end: the model runs on whole sequences."""
    inside = output.beam_indices >= 0
    steps, rows = inside.shape[1], output.sequences.shape[0]
    times = rows // next(iter(inputs.values())).shape[0]
    wide = {name: given.repeat_interleave(times, 0) for name, given in inputs.items()}
    sequences = output.sequences.clamp(min=0)
    if model.config.is_encoder_decoder:
        wide["decoder_input_ids"] = sequences
    else:
        mask = torch.cat([wide["attention_mask"], torch.ones(rows, steps, dtype=torch.int64)], 1)
        wide = {"input_ids": sequences, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        log_probs = model(**wide).logits[:, -steps - 1 : -1].log_softmax(-1)
    return log_probs.gather(2, sequences[:, -steps:].unsqueeze(2)).squeeze(2).masked_fill(~inside, 0.0)


# --- 1 to 3: beam indices and scores ---


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("kind", BUILDERS)
def test_beam_indices_lead_from_scores_to_sequences_scores(kind: str, length_penalty: float) -> None:
    """Reports 15869, 18839 and 20694: indices at the end token, for later prompts and after an early finish.

    Followed through `scores`, they give the log-probabilities that the model has for the sequence, and their sum over
    the length form is the sequence's score.
    """
    model, inputs = tiny_model(kind), prompts(kind, 3)
    ours = search(model, inputs, eos_token_id=MANY_ENDS, length_penalty=length_penalty)
    lengths = lengths_of(ours)
    for row, (indices, tokens) in enumerate(zip(ours.beam_indices.tolist(), generated_by(ours), strict=True)):
        first = 3 * (row // 3)
        assert all(first <= index < first + 3 for index in indices[: len(tokens)])
        assert indices[len(tokens) :] == [-1] * (len(indices) - len(tokens))
        assert not set(tokens[:-1]) & set(MANY_ENDS)
        assert tokens[-1] in MANY_ENDS or len(tokens) == 8
    followed = model.compute_transition_scores(ours.sequences, ours.scores, ours.beam_indices)
    expected = rescored(model, inputs, ours)
    torch.testing.assert_close(followed, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.token_logprobs, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.sequences_scores, followed.sum(1) / lengths**length_penalty, atol=1e-4, rtol=0)


def test_rows_of_one_prompt_end_at_different_steps() -> None:
    """Report 20694: the same where a later prompt ends early and others go on, which the test above must have met."""
    ours = search(tiny_model("llama"), prompts("llama", 3), eos_token_id=MANY_ENDS)
    assert len(set(lengths_of(ours).tolist())) > 2
    assert (ours.beam_indices[3:] >= 0).any(1).all()


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_beam_indices_speak_of_generated_tokens_only(kind: str) -> None:
    """Report 27383: they are not to be cut by the prompt's length; one column per generated token."""
    model = tiny_model(kind)
    for columns in (3, 17):
        ours = search(model, prompts(kind, 2, columns, padded=False))
        prompt = 1 if kind == "t5" else columns
        assert ours.beam_indices.shape == (6, ours.sequences.shape[1] - prompt)
        assert ours.beam_indices[:, 0].tolist() == [0, 0, 0, 3, 3, 3]  # the first token continues the prompt
        assert len(ours.scores) >= ours.beam_indices.shape[1]


@pytest.mark.parametrize("prompt_length", [2, 19])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bart"])
def test_the_mean_leaves_the_prompt_out(kind: str, prompt_length: int) -> None:
    """Report 26624: with `length_penalty` 1 a score is the mean over generated tokens, however long the prompt is.

    Of an encoder-decoder model the decoder's own prompt does not count either.
    """
    model, inputs = tiny_model(kind), prompts(kind, 2, prompt_length, padded=False)
    settings = {"length_penalty": 1.0, "eos_token_id": MANY_ENDS}
    if kind in ENCODER_DECODER:
        settings["decoder_input_ids"] = torch.tensor([[1, *[7] * (prompt_length - 1)]] * 2)
    ours = search(model, inputs, **settings)
    assert ours.sequences.shape[1] - ours.beam_indices.shape[1] == prompt_length
    mean = rescored(model, inputs, ours).sum(1) / lengths_of(ours)
    torch.testing.assert_close(ours.sequences_scores, mean, atol=1e-4, rtol=0)


# --- 4: when a prompt is done ---


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_an_easy_and_a_hard_prompt_together(early_stopping: bool | str, length_penalty: float) -> None:
    """Reports 20901, 21368 and 38778: each of the three rules holds for each prompt by itself.

    The prompts of the batch stop at different steps when they are alone, and get in the batch what they get alone.
    """
    model, ids = tiny_model("llama"), prompts("llama", 8, 5, padded=False, seed=0)["input_ids"]
    call = {"eos_token_id": MANY_ENDS, "early_stopping": early_stopping, "length_penalty": length_penalty,
            "max_new_tokens": 12}  # fmt: skip
    alone = [search(model, {"input_ids": prompt.unsqueeze(0)}, **call) for prompt in ids]
    together = search(model, {"input_ids": ids}, **call)
    steps = {len(output.scores) for output in alone}
    assert len(together.scores) == max(steps)
    assert len(steps) > 1 or length_penalty == 2.0  # which favours length so much that all go on to the end
    for prompt, single in enumerate(alone):
        rows, columns = slice(3 * prompt, 3 * prompt + 3), single.sequences.shape[1]
        torch.testing.assert_close(together.sequences_scores[rows], single.sequences_scores, atol=1e-5, rtol=1e-5)
        assert torch.equal(together.sequences[rows, :columns], single.sequences)
    check_same_call(model, {"input_ids": ids}, **{**BEAMS, **call})


def test_the_three_rules_differ() -> None:
    """True stops first and "never" last, for each prompt; a later stop never finds a worse best sequence."""
    model, ids = tiny_model("llama"), prompts("llama", 8, 5, padded=False, seed=0)["input_ids"]
    rules = (True, False, "never")
    found = [
        [search(model, {"input_ids": prompt.unsqueeze(0)}, eos_token_id=MANY_ENDS, early_stopping=rule,
                max_new_tokens=12) for rule in rules]
        for prompt in ids
    ]  # fmt: skip
    steps = [[len(output.scores) for output in outputs] for outputs in found]
    assert all(first <= second <= third for first, second, third in steps)
    assert any(first < second < third for first, second, third in steps)
    best = [[output.sequences_scores[0].item() for output in outputs] for outputs in found]
    assert all(first <= second + 1e-6 and second <= third + 1e-6 for first, second, third in best)


# --- 5 to 7: stopping ---


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one printable character per token: the ids from 5 on are ``!`` to ``~``."""
    letters = {f"<{number}>" if number < EOS else chr(28 + number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<1>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=f"<{PAD}>", eos_token=chr(28 + EOS))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_stop_strings(kind: str) -> None:
    """Report 34843: with beams they were ignored. A sequence ends with the first of them, and some do."""
    model, inputs, tokenizer = tiny_model(kind), prompts(kind, 3), letter_tokenizer()
    free = [tokenizer.decode(tokens) for tokens in generated_by(search(model, inputs, eos_token_id=None))]
    stops = [free[0][1:3], free[3][2]]  # one over two tokens, one of a single token
    call = {**BEAMS, "eos_token_id": None, "stop_strings": stops, "tokenizer": tokenizer}
    stock, ours = search_both(model, inputs, **call)
    check_equal(stock, ours)
    ended = 0
    for tokens in generated_by(ours):
        text = tokenizer.decode(tokens)
        assert not any(stop in text[:-1] for stop in stops)
        assert len(tokens) == 8 or any(text.endswith(stop) for stop in stops)
        ended += len(tokens) < 8
    assert ended or OLD_RELEASE  # whose random weights are others


class EndsWith(StoppingCriteria):
    """Stops at one token; keeps the rows that it stopped, and the shape of all that it was shown."""

    def __init__(self, token: int):
        self.token, self.stopped, self.shapes = token, set(), []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = input_ids[:, -1] == self.token
        self.stopped |= {tuple(row) for row in input_ids[done].tolist()}
        self.shapes.append(tuple(input_ids.shape))
        return done


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_a_criterion_sees_the_final_sequences(kind: str) -> None:
    """Report 34574: every returned sequence that a criterion ended is, word for word, a row that it was shown."""
    model, inputs = tiny_model(kind), prompts(kind, 2)
    middle = generated_by(search(model, inputs, eos_token_id=None))[0][2]
    criterion = EndsWith(middle)
    ours = search(model, inputs, eos_token_id=None, stopping_criteria=StoppingCriteriaList([criterion]))
    prompt_length = ours.sequences.shape[1] - ours.beam_indices.shape[1]
    ended = [
        tuple(sequence[: prompt_length + len(tokens)])
        for sequence, tokens in zip(ours.sequences.tolist(), generated_by(ours), strict=True)
        if tokens[-1] == middle
    ]
    assert ended and set(ended) <= criterion.stopped


class GivenProbabilities(LogitsProcessor):
    """Replaces the model's probabilities by the same ones at every step, and keeps the rows that it was shown."""

    def __init__(self, probabilities: dict[int, float]):
        self.probabilities, self.rows = probabilities, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(input_ids.tolist())
        given = torch.full_like(scores, -torch.inf)
        for token, probability in self.probabilities.items():
            given[:, token] = torch.tensor(probability).log()
        return given


def test_beams_go_on_when_the_best_candidates_end() -> None:
    """Report 34167: twice the width in candidates, so that `W` beams go on when the first `W` candidates end.

    At every step the end token is by far the best continuation of both beams. Step 1: end .6, A .2, B .1. Step 2: A end
    .12, B end .06, then A A .04, and A B and B A .02 each. Still two beams run on, and win: A A end has .024, A B end
    .012, and the score divides their logarithms by 9.
    """
    a, b = 30, 31
    given = GivenProbabilities({EOS: 0.6, a: 0.2, b: 0.1, 32: 0.05})
    ours = search(
        tiny_model("llama"), {"input_ids": torch.tensor([[8, 9]])}, num_beams=2, num_return_sequences=2,
        max_new_tokens=3, length_penalty=2.0, early_stopping="never", logits_processor=LogitsProcessorList([given]),
    )  # fmt: skip
    _, second, third = given.rows
    assert second == [[8, 9, a], [8, 9, b]]
    assert third[0] == [8, 9, a, a] and third[1] in ([8, 9, a, b], [8, 9, b, a])
    assert generated_by(ours)[0] == [a, a, EOS]
    torch.testing.assert_close(ours.sequences_scores, torch.tensor([0.024, 0.012]).log() / 9)


@pytest.mark.parametrize(("ends", "times"), [(None, 2), (EOS, 2), ([5, 9], 3), (list(range(5, 16)), 12)])
def test_the_number_of_candidates(ends: Any, times: int) -> None:
    """Report 34167: ``max(2, 1 + number of end ids) · W`` per prompt, which is what a criterion is shown."""
    criterion = EndsWith(-1)
    search(tiny_model("llama"), prompts("llama", 2), eos_token_id=ends, max_new_tokens=3,
           stopping_criteria=StoppingCriteriaList([criterion]))  # fmt: skip
    assert criterion.shapes == [(2 * 3 * times, 7 + step) for step in (1, 2, 3)]


# --- 8 to 10: the reference, fillers, fewer continuations than beams ---


def test_the_reference_is_the_installed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 38116: results changed between releases. What is compared with is the search that is installed."""
    installed, called = GenerationMixin._beam_search, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        called.append(None)
        return installed(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_beam_search", noting)
    check_same_call(tiny_model("llama"), prompts("llama", 2), **BEAMS)
    assert len(called) == 1


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("ends", [[9, 5, *MANY_ENDS[2:]], None])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_what_fills_a_row_after_its_end(kind: str, ends: list[int] | None, pad: int) -> None:
    """Report 47286: `pad_token_id=0` is taken as missing, and the first end id fills instead. Kept, as installed."""
    stock, ours = search_both(tiny_model(kind), prompts(kind, 3), **BEAMS, pad_token_id=pad, eos_token_id=ends)
    check_equal(stock, ours)
    fillers = []
    for output in (stock, ours):
        columns = output.beam_indices.shape[1]
        fillers.append(output.sequences[:, -columns:][output.beam_indices < 0].unique().tolist())
    assert fillers[1] == fillers[0]
    if ends is None:
        assert fillers[1] == []
    elif kind == "llama":
        assert fillers[1] == [pad or 9]


TRIE = {
    (): [20, 21],
    (20,): [30], (20, 30): [EOS],
    (21,): [31, 32], (21, 31): [EOS], (21, 32): [40], (21, 32, 40): [EOS],
}  # fmt: skip
NAMES = {(20, 30, EOS), (21, 31, EOS), (21, 32, 40, EOS)}


def allowed_by_trie(prompt_length: int, asked: list | None = None) -> Callable[[int, torch.Tensor], list[int]]:
    """A constraint to three names, which notes what it is asked."""

    def allowed(batch_id: int, sentence: torch.Tensor) -> list[int]:
        if asked is not None:
            asked.append((batch_id, tuple(sentence.tolist())))
        return TRIE.get(tuple(sentence.tolist()[prompt_length:]), [EOS])

    return allowed


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [2, 3, 5, 12])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_fewer_legal_continuations_than_beams(kind: str, width: int, early_stopping: bool | str) -> None:
    """Report 2415 and facebookresearch/GENRE 51: duplicates and illegal tokens among the results.

    Three names are legal. Each that is found is found once, with the probability that the model gives it, and beams
    enough find all; every other row says by its score that it is no continuation, and comes last.
    """
    model, inputs, prompt_length = tiny_model(kind), prompts(kind, 2, padded=False), 1 if kind == "t5" else 7
    ours = search(
        model, inputs, num_beams=width, num_return_sequences=width, early_stopping=early_stopping, length_penalty=0.0,
        prefix_allowed_tokens_fn=allowed_by_trie(prompt_length),
    )  # fmt: skip
    real = ours.sequences_scores.isfinite().view(2, width)
    assert real.sum(1).tolist() == [min(width, 3)] * 2
    assert torch.equal(real.sort(1, descending=True).values, real)
    expected = rescored(model, inputs, ours).sum(1)[real.flatten()]
    torch.testing.assert_close(ours.sequences_scores[real.flatten()], expected, atol=1e-4, rtol=0)
    for prompt in range(2):
        rows = generated_by(ours)[prompt * width : (prompt + 1) * width]
        found = [tuple(tokens) for tokens, is_real in zip(rows, real[prompt].tolist(), strict=True) if is_real]
        assert len(set(found)) == len(found) and set(found) <= NAMES
        assert width < 3 or set(found) == NAMES


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_constraint_with_continuations_enough(kind: str) -> None:
    """The same constraint with no more beams than names: no row differs from transformers' result."""
    call = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 5, "do_sample": False}
    stock, ours = search_both(tiny_model(kind), prompts(kind, 2, padded=False), **call,
                              prefix_allowed_tokens_fn=allowed_by_trie(1 if kind == "t5" else 7))  # fmt: skip
    assert real_scores(stock.sequences_scores).isfinite().all()
    check_equal(stock, ours)


@pytest.mark.parametrize("width", [3, 12])
def test_a_comparison_leaves_out_rows_that_are_none(width: int) -> None:
    """Rows that are no continuation have a score of -1e9 or so in transformers, and -inf here: that is no difference.

    Report 2415 once more: of so many beams only three are names.
    """
    result = compare(
        tiny_model("llama"), prompts("llama", 2, padded=False), rounds=1, num_beams=width, num_return_sequences=width,
        max_new_tokens=5, do_sample=False, prefix_allowed_tokens_fn=allowed_by_trie(7),
    )  # fmt: skip
    assert result.ours.sequences_scores.isfinite().sum() == 2 * 3
    assert result.largest_score_difference < 1e-4


# --- 11 to 15: what is run, stored and moved ---


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("kind", BUILDERS)
def test_the_prompt_is_run_once(kind: str, chunk: int | None) -> None:
    """Reports 27449, 31562 and 31564: the passes over the prompt see one row per prompt, not one per beam."""
    model = met_model(kind)
    chunked = chunk is not None and kind in DECODER_ONLY and hasattr(model, "_prefill")  # 4.57 has no chunks for beams
    with forward_rows(model) as rows:
        search(model, prompts(kind, 4), num_beams=6, **({"prefill_chunk_size": chunk} if chunked else {}))
    passes = 3 if chunked else 1  # 7 tokens in chunks of 3
    assert rows[:passes] == [4] * passes
    assert set(rows[passes:]) == {24}


def stored_bytes(cache: Any) -> int:
    """Bytes of keys and values in a cache of transformers' own."""
    is_pair = hasattr(cache, "self_attention_cache")
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if is_pair else [cache]
    stored = [tensor for part in parts for layer in part.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in stored)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "t5", "bart", "whisper"])
def test_many_beams_share_what_they_share(kind: str) -> None:
    """Reports 22639, 26304, 28833 and 35802: memory. A prompt is stored once and an ancestor once, for 40 beams.

    `kv_usage` says what the search holds, and what transformers' holds for the same call, to the byte.
    """
    width, steps = 40, 6
    stock, ours = search_both(tiny_model(kind), prompts(kind, 2, 30), num_beams=width, num_return_sequences=width,
                              max_new_tokens=steps, eos_token_id=None)  # fmt: skip
    usage, prompt_length = ours.kv_usage, 1 if kind in ENCODER_DECODER else 30
    assert usage.bytes_separate == stored_bytes(getattr(stock, CACHE_ARGUMENT))
    assert 2 * prompt_length < usage.live <= usage.slots
    assert usage.slots <= 2 * (prompt_length + width * (steps - 1))  # the last token is never run
    assert usage.bytes_live <= usage.bytes_held < usage.bytes_separate
    if kind in DECODER_ONLY:
        assert usage.bytes_held < usage.bytes_separate / 4


@pytest.mark.parametrize("setting", [{}, {"return_dict_in_generate": False, "output_scores": False},
                                     {"beam_attention": "gathered"}, {"repetition_penalty": 1.2}])  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_no_logits_of_an_earlier_step_are_kept(kind: str, setting: dict) -> None:
    """Report 30536: the logits of a step stayed alive through the next one. They are freed before the model runs."""
    model, alive = met_model(kind), []
    earlier: list[weakref.ref] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: alive.append(sum(logits() is not None for logits in earlier))),
        model.register_forward_hook(lambda module, args, outputs: earlier.append(weakref.ref(outputs.logits))),
    ]
    search(model, prompts(kind, 2), **setting)
    for hook in hooks:
        hook.remove()
    assert len(alive) >= 4 and set(alive) == {0}


def test_keys_are_never_stored_twice() -> None:
    """Report 30536: twice the keys and values at the peak, while all beams were reordered.

    What is made in a decode step, temporary or not, is at most one layer's pool at a time (when it grows).
    """
    model, width = met_model("llama"), 8
    with watching(model) as watch:
        ours = search(model, prompts("llama", 2, 120), num_beams=width, num_return_sequences=width, eos_token_id=None)
    one_pool = max(layer._keys.numel() for layer in getattr(ours, CACHE_ARGUMENT).indexed_layers())
    sizes = [shape.numel() for phase, _, shape, dtype in watch.made if phase >= 3 and dtype == torch.float32]
    assert max(sizes) <= one_pool


def test_bookkeeping_is_not_done_beam_by_beam() -> None:
    """Reports 20820, 21234 and 27436: slower than the model at large widths. 45 beams take as many operations as 3."""

    def operations(width: int) -> list[int]:
        model = met_model("llama")
        with watching(model) as watch:
            search(model, prompts("llama", 2), num_beams=width, max_new_tokens=4, eos_token_id=None)
        phases = [phase for phase, *_ in watch.made]
        return [phases.count(phase) for phase in (2, 4, 6)]  # between two forward passes

    assert operations(45) == operations(3)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_constraint_is_asked_no_more_than_by_transformers(kind: str) -> None:
    """Report 25217: `prefix_allowed_tokens_fn` is a Python loop over every beam. The same questions, and no others."""
    model, inputs, prompt_length = tiny_model(kind), prompts(kind, 2, padded=False), 1 if kind == "t5" else 7
    call = {**BEAMS, **WHOLE, "num_beams": 2, "num_return_sequences": 2}
    asked: dict[str | None, list] = {None: [], "hf_paged_beam": []}
    for custom_generate, questions in asked.items():
        GenerationMixin.generate(model, **inputs, **call, custom_generate=custom_generate,
                                 prefix_allowed_tokens_fn=allowed_by_trie(prompt_length, questions))  # fmt: skip
    stock, ours = asked.values()
    legal = {(batch_id, sentence) for batch_id, sentence in stock if sentence[prompt_length:] in TRIE}
    assert {question for question in ours if question[1][prompt_length:] in TRIE} == legal
    assert len(ours) <= len(stock)


@pytest.mark.parametrize(("kind", "path"), ENCODER_DECODER_PATHS)
def test_cross_attention_is_stored_once_per_prompt(kind: str, path: str) -> None:
    """fairseq 1957 and OpenNMT/CTranslate2 1088: cross-attention keys were stored and reordered for every beam.

    The very tensors that the prompt's pass stored are there at the end, at one row per prompt.
    """
    model, stored = tiny_model(kind), []
    hook = model.register_forward_hook(lambda module, args, outputs: stored.append(
        [layer._keys for layer in getattr(outputs, CACHE_ARGUMENT).cross_attention_cache.layers]))  # fmt: skip
    ours = search(model, prompts(kind, 3), num_beams=5, beam_attention=path)
    hook.remove()
    assert ours.beam_path == path
    assert [keys.shape[0] for keys in stored[0]] == [3, 3]
    assert all(now is first for step in stored for now, first in zip(step, stored[0], strict=True))


# --- 17: devices ---


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_index_on_another_device_than_the_layer(batch_size: int) -> None:
    """Reports 9200, 24969 and 35762: index tensors on another device than a layer's keys. They follow the layer.

    The table is on the CPU, a layer on ``meta``, which stands for a second accelerator.
    """
    width, index, meta = 4, BeamIndex(4), torch.device("meta")
    layers = [PoolLayer(index), PoolLayer(index)]
    devices = [torch.device("cpu"), meta]
    module = tiny_model("llama").model.layers[0].self_attn
    for layer, device in zip(layers, devices, strict=True):
        prompt = torch.zeros(batch_size, 2, 5, 8, device=device)
        layer.update(prompt, prompt)
    index.begin_decode(batch_size, 5, torch.device("cpu"))
    for _ in range(2):
        index.set_high_water(int(index.fork(torch.arange(batch_size * width) // width * width)))
        with FoldedStep(index):
            for layer, device in zip(layers, devices, strict=True):
                token = torch.zeros(batch_size * width, 2, 1, 8, device=device)
                keys, values = layer.update(token, token)
                query = torch.zeros(batch_size * width, 4, 1, 8, device=device)
                attended, _ = folded_attention(module, query, keys, values, None)
                assert keys.device == attended.device == device
    gathered = layers[1].keys
    assert gathered.device == meta and gathered.shape == (batch_size * width, 2, 7, 8)


# --- 18 and 19: inputs ---


@pytest.mark.parametrize("kind", DECODER_ONLY)
def test_embeddings_only(kind: str) -> None:
    """Report 29968: `inputs_embeds` alone gives the search from the ids that they embed, without the prompt's ids."""
    model, inputs = tiny_model(kind), prompts(kind, 3)
    embeddings = model.get_input_embeddings()(inputs["input_ids"])  # Gemma's own scale is in this module
    given = {"inputs_embeds": embeddings.detach(), "attention_mask": inputs["attention_mask"]}
    from_ids, from_embeddings = (search(model, prompt, eos_token_id=MANY_ENDS) for prompt in (inputs, given))
    torch.testing.assert_close(from_embeddings.sequences_scores, from_ids.sequences_scores, atol=1e-4, rtol=0)
    assert torch.equal(from_embeddings.sequences, from_ids.sequences[:, 7:])
    assert torch.equal(from_embeddings.beam_indices, from_ids.beam_indices)
    check_same_call(model, given, **BEAMS)


@pytest.mark.parametrize("kind", BUILDERS)
def test_each_row_of_a_padded_batch_is_the_row_alone(kind: str) -> None:
    """Report 22707: padding changed the result. In float64, so that nothing is left to rounding."""
    model = tiny_model(kind, dtype=torch.float64)
    inputs = {name: given.double() if given.is_floating_point() else given for name, given in prompts(kind, 5).items()}
    together = search(model, inputs, eos_token_id=MANY_ENDS)
    prompt_length = together.sequences.shape[1] - together.beam_indices.shape[1]
    for row in range(5):
        own = {name: given[row : row + 1] for name, given in inputs.items()}
        if "attention_mask" in own:
            kept = own["attention_mask"][0].bool()
            own = {name: given[:, kept] for name, given in own.items()}
        alone, rows = search(model, own, eos_token_id=MANY_ENDS), slice(3 * row, 3 * row + 3)
        generated = alone.sequences[:, alone.sequences.shape[1] - alone.beam_indices.shape[1] :]
        batched = together.sequences[rows, prompt_length : prompt_length + generated.shape[1]]
        assert torch.equal(batched, generated)
        torch.testing.assert_close(together.sequences_scores[rows], alone.sequences_scores, atol=1e-6, rtol=0)


# --- 20: several ranks ---


class Ranks:
    """Ranks whose forward passes, and whose test for unfinished ones, are collectives, as under ZeRO-3 or FSDP.

    Where one rank runs the model while another asks whether all are done, both would wait for ever; here both raise.
    """

    def __init__(self, count: int):
        self.barrier = threading.Barrier(count, timeout=10)
        self.at: list[Any] = [None] * count
        self.history: list[list[str]] = [[] for _ in range(count)]

    def meet(self, rank: int, collective: str, value: Any = None) -> list[Any]:
        self.at[rank] = (collective, value)
        self.history[rank].append(collective)
        self.barrier.wait()
        together = list(self.at)
        self.barrier.wait()
        if len({name for name, _ in together}) > 1:
            raise RuntimeError(f"ranks wait for each other in different collectives: {together}")
        return [value for _, value in together]

    def join(self, rank: int, model: PreTrainedModel) -> None:
        def any_unfinished(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
            assert synced_gpus
            return not all(self.meet(rank, "all done?", bool(this_peer_finished)))

        model._has_unfinished_sequences = any_unfinished
        model.register_forward_pre_hook(lambda *_: self.meet(rank, "forward") and None)


def search_on_ranks(inputs: list[dict], **settings: Any) -> tuple[list[Any], Ranks]:
    """One search per rank, in threads; raises what a rank raised."""
    ranks, results = Ranks(len(inputs)), [None] * len(inputs)
    models_of = [tiny_model("llama") for _ in inputs]
    for rank, model in enumerate(models_of):
        ranks.join(rank, model)

    def run(rank: int) -> None:
        try:
            results[rank] = search(models_of[rank], inputs[rank], synced_gpus=True, **settings)
        except Exception as error:
            results[rank] = error
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, RuntimeError) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    assert not any(isinstance(result, Exception) for result in results), results
    return results, ranks


@pytest.mark.parametrize("custom_generate", [None, "hf_paged_beam"], ids=["transformers", "ours"])
def test_ranks_keep_in_step(custom_generate: str | None) -> None:
    """Reports 10753 and 22242: `synced_gpus`. Ranks whose searches end at different steps run the model equally often.

    In the same order of collectives, too; each has the result that it has alone. transformers' own search shows that
    the stage is set right.
    """
    ids = prompts("llama", 8, 5, padded=False, seed=0)["input_ids"]
    inputs = [{"input_ids": ids[prompt : prompt + 1]} for prompt in (1, 2, 7)]
    call = {"eos_token_id": MANY_ENDS, "early_stopping": True, "max_new_tokens": 12}
    alone = [search(tiny_model("llama"), given, **call) for given in inputs]
    assert len({len(output.scores) for output in alone}) == 3
    results, ranks = search_on_ranks(inputs, **call, custom_generate=custom_generate)
    assert ranks.history[0] == ranks.history[1] == ranks.history[2]
    for expected, result in zip(alone, results, strict=True):
        assert torch.equal(result.sequences, expected.sequences)
        torch.testing.assert_close(result.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_rank_runs_on_for_the_others(kind: str) -> None:
    """After its own end a rank runs the model until all are done, and its result does not change."""
    model, inputs, answers = tiny_model(kind), prompts(kind, 2), []

    def others_need(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        answers.append(bool(this_peer_finished))
        return not this_peer_finished or answers.count(True) <= 3

    expected = search(model, inputs, max_new_tokens=4)
    with forward_rows(model) as alone:
        search(model, inputs, max_new_tokens=4)
    model._has_unfinished_sequences = others_need
    with forward_rows(model) as rows:
        ours = search(model, inputs, max_new_tokens=4, synced_gpus=True)
    assert len(rows) == len(alone) + 3
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, atol=0, rtol=0)
    assert len(ours.scores) == len(expected.scores)
    getattr(ours, CACHE_ARGUMENT).check()


# --- 23: wide searches over short item identifiers ---


def item_model(vocabulary: int) -> PreTrainedModel:
    """A tiny Llama over the tokens of item identifiers alone, without an end token."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )).eval()  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


@pytest.mark.parametrize("width", [50, 200, 1000])
def test_wide_searches_over_item_identifiers(width: int) -> None:
    """vllm 45815 and sglang 15645: 50 to 1000 beams over identifiers of three tokens, from histories of 20."""
    model = item_model(64)
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    call = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": 3}
    stock, ours = search_both(model, {"input_ids": ids}, **call)
    check_equal(stock, ours)
    assert ours.beam_path == "folded"
    assert ours.sequences[:width].unique(dim=0).shape[0] == width


def test_beams_enough_for_every_item() -> None:
    """With as many beams as there are items, all come back, once each, best first, with their exact probability."""
    model, ids = item_model(6), torch.tensor([[1, 4, 2, 5]])
    items = torch.tensor(list(itertools.product(range(6), repeat=3)))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(216, -1), items], 1)).logits
    exact = logits[:, 3:-1].log_softmax(-1).gather(2, items.unsqueeze(2)).sum((1, 2))
    ours = generate(model, ids, num_beams=216, num_return_sequences=216, max_new_tokens=3, length_penalty=0.0, **WHOLE)
    torch.testing.assert_close(ours.sequences_scores, exact.sort(descending=True).values, atol=1e-4, rtol=0)
    found = ours.sequences[:, 4:]
    assert {tuple(item) for item in found.tolist()} == {tuple(item) for item in items.tolist()}
    numbers = (found * torch.tensor([36, 6, 1])).sum(1)
    torch.testing.assert_close(ours.sequences_scores, exact[numbers], atol=1e-4, rtol=0)
