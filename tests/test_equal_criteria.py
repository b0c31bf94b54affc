"""Stopping criteria end sequences as in transformers' own search, and are shown the same rows and scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import check_equal, check_identical, search_both
from tiny_models import BUILDERS, EOS, VOCABULARY, double_model, prompts_for
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, StoppingCriteria

THREE_ENDS = [EOS, 20, 30]
ELEVEN_ENDS = [EOS, *range(20, 30)]
KINDS = ("llama", "mistral", "t5", "whisper")


class Recorder(StoppingCriteria):
    """Ends nothing, and keeps what it was shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, tuple | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: tuple | None, **kwargs: Any) -> torch.Tensor:
        seen = None if scores is None else tuple(step.clone() for step in scores)
        self.calls.append((input_ids.clone(), seen))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class EndsWith(StoppingCriteria):
    """Ends a row whose last tokens are among the given ones."""

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: tuple | None, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


class LongEnough(StoppingCriteria):
    """Ends every row at once, by a plain Python bool, as criteria of old did."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: tuple | None, **kwargs: Any) -> bool:
        return input_ids.shape[1] >= self.length


def check_search(kind: str, batch_size: int = 2, *, num_beams: int = 4, **settings: Any) -> tuple[Any, Any]:
    """Run the same search both ways on the float64 model, and assert that every field is the same."""
    model = double_model(kind)
    call = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 8, **settings}
    stock, ours = search_both(model, prompts_for(model, kind, batch_size), **call)
    check_identical(stock, ours)
    return stock, ours


@pytest.mark.parametrize("end_ids", [None, EOS, THREE_ENDS, ELEVEN_ENDS])
@pytest.mark.parametrize("output_scores", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_criterion_is_shown_what_stock_shows(kind: str, output_scores: bool, end_ids: Any) -> None:
    """Call by call: the rows of all `K` candidates of all prompts, and the scores so far where they are kept."""
    model, theirs, mine = double_model(kind), Recorder(), Recorder()
    stock, ours = search_both(
        model, prompts_for(model, kind, 2), num_beams=4, max_new_tokens=6, eos_token_id=end_ids,
        output_scores=output_scores, stock_only={"stopping_criteria": [theirs]},
        ours_only={"stopping_criteria": [mine]},
    )  # fmt: skip
    check_identical(stock, ours)
    assert len(mine.calls) == len(theirs.calls) > 1
    candidates = 4 * max(2, 1 + len(end_ids if isinstance(end_ids, list) else [0]))
    for (my_rows, my_scores), (their_rows, their_scores) in zip(mine.calls, theirs.calls, strict=True):
        assert my_rows.shape[0] == 2 * candidates
        assert my_rows.dtype == their_rows.dtype and torch.equal(my_rows, their_rows)
        assert (my_scores is None) == (their_scores is None) == (not output_scores)
        torch.testing.assert_close(my_scores or (), their_scores or (), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_criterion_may_end_some_rows(kind: str, length_penalty: float, early_stopping: bool | str) -> None:
    """Rows that end in one of twenty tokens are finished there, beside those that end in an end id."""
    _, ours = check_search(
        kind, stopping_criteria=[EndsWith(*range(40, 60))], length_penalty=length_penalty,
        early_stopping=early_stopping,
    )  # fmt: skip
    generated = ours.sequences[:, -ours.beam_indices.shape[1] :]
    last = generated.gather(1, (ours.beam_indices >= 0).sum(-1, keepdim=True) - 1)
    assert ((last >= 40) & (last < 60)).any()


@pytest.mark.parametrize("kind", BUILDERS)
def test_several_criteria_end_what_any_of_them_ends(kind: str) -> None:
    """Two criteria of the user's, the end ids and the longest length, together."""
    check_search(kind, stopping_criteria=[EndsWith(40, 41, 42), EndsWith(50, 51), Recorder()], eos_token_id=THREE_ENDS)


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_a_criterion_that_ends_every_row_ends_the_search(kind: str) -> None:
    """All candidates end at the same step: the search stops there, and the best `W` of them are returned."""
    length = 3 + (1 if kind == "bart" else 7)
    stock, ours = check_search(kind, stopping_criteria=[LongEnough(length)], eos_token_id=None)
    assert len(ours.scores) == len(stock.scores) == 3


@pytest.mark.parametrize("max_time", [0.0, 1e-9])
@pytest.mark.parametrize("kind", BUILDERS)
def test_no_time_means_one_token(kind: str, max_time: float) -> None:
    """When the time is over at once, the best first tokens come back."""
    stock, ours = check_search(kind, max_time=max_time)
    assert len(ours.scores) == len(stock.scores) == 1


@pytest.mark.parametrize("max_time", [0.0, 600.0])
def test_time_beside_a_criterion_that_needs_rows(max_time: float) -> None:
    """The clock is asked on the way with whole rows, too."""
    stock, ours = check_search("qwen3", max_time=max_time, stopping_criteria=[EndsWith(40, 41)])
    assert (len(ours.scores) == len(stock.scores) == 1) == (max_time == 0.0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each id: a letter and a digit, so that stop strings can span two tokens."""
    words = {f"{chr(97 + number // 10)}{number % 10}": number for number in range(VOCABULARY)}
    backend = Tokenizer(WordLevel(words, unk_token="a0"))
    backend.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a0")


@pytest.mark.parametrize(
    "stop_strings", [["b7", "c1", "d5", "g3", "h9", "i7"], "d", ["d", "f4"], ["3e", "7g", "1b", "8"]]
)
@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings(kind: str, stop_strings: str | list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Stop strings of one token, of a part of it, and across two tokens."""
    _, ours = check_search(kind, 3, stop_strings=stop_strings, tokenizer=tokenizer, length_penalty=0.0)
    texts = tokenizer.batch_decode(ours.sequences[:, -ours.beam_indices.shape[1] :].clamp(min=0))
    stops = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    assert any(stop in text for text in texts for stop in stops)


def test_stop_strings_need_the_tokenizer() -> None:
    """The error is transformers' own."""
    model = double_model("llama")
    for custom_generate in (None, "hf_paged_beam"):
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(
                **prompts_for(model, "llama"), num_beams=3, stop_strings=["a1"], custom_generate=custom_generate
            )


def test_a_criterion_that_leaves_fewer_rows_than_beams() -> None:
    """If nearly all candidates end at a step, beams run dry: the real sequences agree."""
    model = double_model("llama")
    stock, ours = search_both(
        model, prompts_for(model, "llama", 3), num_beams=4, num_return_sequences=4, max_new_tokens=6,
        eos_token_id=None, stopping_criteria=[EndsWith(*range(90))], length_penalty=0.0,
    )  # fmt: skip
    check_equal(stock, ours, 1e-5)
