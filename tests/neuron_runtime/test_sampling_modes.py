"""The table of sampling parameters: ranges, neutral values, and who serves what; token ids in clients' spellings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.sampling_modes import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MODES,
    PARAMETERS,
    Where,
    allowed_tokens,
    bias_entries,
    check_one_served,
    check_ranges,
    check_served,
)
from neuron_runtime.text.bad_words import bad_word_sequences


def limits(mode: Any, **changes: Any) -> BackendLimits:
    given = {"max_logprobs": 20, "reports_prompt_logprobs": True, **changes}
    return BackendLimits(
        max_rows=1, max_model_length=8, max_step_tokens=8, block_size=8, num_blocks=1, sampling=mode, **given
    )


def refusal(check: Any, *arguments: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", float("nan"), "from 0 to 100"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_k", -2, "at least -1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("presence_penalty", -2.5, "from -2 to 2"),
        ("frequency_penalty", float("inf"), "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("min_tokens", -1, "at least 0"),
        ("max_tokens", 0, "at least 1"),
        ("seed", 2**63, "from -9223372036854775808 to"),
        ("logprobs", -1, "at least 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(name: str, value: float, says: str) -> None:
    error = refusal(check_ranges, SimpleNamespace(**{name: value}))
    assert error.field == name
    assert says in str(error)


def test_the_ends_of_every_range_are_in_it() -> None:
    for name, parameter in PARAMETERS.items():
        for value in (parameter.lowest, parameter.highest, None, *parameter.neutral):
            check_ranges(SimpleNamespace(**{name: value}))


@pytest.mark.parametrize("mode", MODES)
def test_neutral_values_are_accepted_in_every_mode(mode: str) -> None:
    for name, parameter in PARAMETERS.items():
        for value in (None, *parameter.neutral):
            check_served(SimpleNamespace(**{name: value}), limits(mode, max_logprobs=0, reports_prompt_logprobs=False))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_mode_cannot_serve_is_refused_with_the_modes_that_can(mode: str) -> None:
    for name, parameter in PARAMETERS.items():
        if parameter.where(mode) is not Where.REFUSED:
            check_one_served(name, limits(mode))
            continue
        error = refusal(check_served, SimpleNamespace(**{name: 1 if not parameter.neutral else 0.5}), limits(mode))
        assert error.field == name
        for other in MODES:
            assert (f"`{other}`" in str(error)) == (parameter.where(other) is not Where.REFUSED)


def test_zero_asks_for_logprobs_and_false_does_not() -> None:
    assert PARAMETERS["logprobs"].asks(0)
    assert not PARAMETERS["logprobs"].asks(False)
    assert not PARAMETERS["min_p"].asks(0.0)


def test_no_more_logprobs_than_the_backend_reports() -> None:
    assert "at most 20 here, got 21" in str(refusal(check_served, SimpleNamespace(logprobs=21), limits("Host")))
    check_served(SimpleNamespace(logprobs=20, top_logprobs=20, prompt_logprobs=20), limits("Host"))


def test_logprobs_of_a_prompt_need_a_backend_that_has_them() -> None:
    error = refusal(check_one_served, "prompt_logprobs", limits("Host", reports_prompt_logprobs=False), "echo")
    assert (error.field, str(error)) == ("echo", "`echo` cannot be served by this backend: leave it out")


def test_a_bias_has_its_tokens_as_numbers_or_as_texts_of_numbers() -> None:
    assert bias_entries({"7": 1, 3: -100.0}, 10) == ((3, -100.0), (7, 1.0))
    assert bias_entries(None, 10) == bias_entries({}, 10) == ()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"x": 1.0}, "'x' is not a token id of this model (0 to 9)"),
        ({"10": 1.0}, "'10' is not a token id"),
        ({-1: 1.0}, "-1 is not a token id"),
        ({3: 101.0}, "`logit_bias[3]` must be from -100 to 100"),
        ({3: float("nan")}, "`logit_bias[3]` must be from -100 to 100"),
    ],
)
def test_a_bias_that_cannot_be_is_refused_with_its_entry(given: Any, says: str) -> None:
    error = refusal(bias_entries, given, 10)
    assert error.field == "logit_bias"
    assert says in str(error)


def test_too_many_biased_tokens_are_refused() -> None:
    bias_entries(dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0), 10_000)
    assert "at most" in str(refusal(bias_entries, dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0), 10_000))


def test_allowed_tokens_are_some_of_the_vocabulary() -> None:
    assert allowed_tokens(None, 10) is None
    assert allowed_tokens([7, 3, 7], 10) == (3, 7)
    assert "must not be empty" in str(refusal(allowed_tokens, [], 10))
    assert "10 is not a token id" in str(refusal(allowed_tokens, [1, 10], 10))


class Spelling:
    """Stands in for a tokenizer whose words have one token, and another one behind a space."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        assert not add_special_tokens
        ids = {"cat": (1,), " cat": (2,), "two words": (3, 4), " two words": (5, 4), "kitten": (6, 7), " kitten": (8,)}
        return ids.get(text, ())


def sequences(words: Any) -> Any:
    return bad_word_sequences(Spelling(), words)  # type: ignore[arg-type]


def test_a_bad_word_is_banned_at_the_beginning_of_a_text_and_behind_a_space() -> None:
    assert sequences(["cat", " cat", "two words", "kitten"]) == ((1,), (2,), (3, 4), (5, 4), (6, 7), (8,))
    assert sequences(None) == ()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cat", ""], "from 1 to"),
        (["x" * (MAX_BAD_WORD_CHARACTERS + 1)], "from 1 to"),
        (["unknown"], "'unknown' has no tokens"),
        ([str(n) for n in range(MAX_BAD_WORDS + 1)], "at most"),
    ],
)
def test_bad_words_that_cannot_be_are_refused(words: Any, says: str) -> None:
    error = refusal(sequences, words)
    assert error.field == "bad_words"
    assert says in str(error)
