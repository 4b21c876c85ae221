"""Sampling parameters: ranges, neutral values, support per mode, and the forms of token ids."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from helpers.guides import FORM
from helpers.host_rows import is_of_host
from neuron_runtime.apis.openai.body import ChatBody, CompletionBody
from neuron_runtime.core import ACTS, SAMPLING_MODES, Acts, BackendLimits, Sampling, acts_of, needs_host
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import is_neutral
from neuron_runtime.requests.conversion import typed
from neuron_runtime.requests.parameters import Where, check_parameter_served, check_served, parameters_of
from neuron_runtime.requests.sampling_fields import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    SamplingFields,
)
from neuron_runtime.requests.token_ids import allowed_tokens, bad_word_sequences, bias_entries

REQUIRED: dict[Any, dict[str, Any]] = {CompletionBody: {"prompt": "a"}, ChatBody: {"messages": []}}
SAMPLING = [(body, name) for body in REQUIRED for name, row in parameters_of(body).items() if row.acts]


def body_with(body: Any, name: str, value: Any) -> Any:
    return typed({**REQUIRED[body], name: value}, body)


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
        ("top_p", -0.1, "from 0 to 1"),
        ("top_p", 1.5, "from 0 to 1"),
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
def test_an_out_of_range_value_is_refused_with_the_range(name: str, value: float, says: str) -> None:
    error = refusal(body_with, CompletionBody, name, value)
    assert error.field == name
    assert says in str(error)


@pytest.mark.parametrize(("body", "name"), SAMPLING)
def test_range_ends_and_neutral_values_are_in_range(body: Any, name: str) -> None:
    row = parameters_of(body)[name]
    for value in (row.highest, None, row.default, *row.neutral, *([] if name == "max_tokens" else [row.lowest])):
        assert msgspec.to_builtins(getattr(body_with(body, name, value), name)) == value


def test_zero_tokens_are_allowed_only_with_echo() -> None:
    assert typed({"prompt": "a", "max_tokens": 0, "echo": True}, CompletionBody).max_tokens == 0
    error = refusal(typed, {"prompt": "a", "max_tokens": 0}, CompletionBody)
    assert (error.field, str(error)) == ("max_tokens", "`max_tokens` must be at least 1 without `echo`, got 0")


@pytest.mark.parametrize("mode", SAMPLING_MODES)
@pytest.mark.parametrize(("body", "name"), SAMPLING)
def test_neutral_values_are_accepted_in_every_mode(body: Any, name: str, mode: str) -> None:
    for value in (None, *parameters_of(body)[name].neutral):
        check_served(body_with(body, name, value), limits(mode, max_logprobs=0, reports_prompt_logprobs=False))


@pytest.mark.parametrize("mode", SAMPLING_MODES)
@pytest.mark.parametrize(("body", "name"), SAMPLING)
def test_an_unsupported_value_is_refused_naming_the_modes_that_support_it(body: Any, name: str, mode: str) -> None:
    row = parameters_of(body)[name]
    if row.where(mode) is not Where.REFUSED:
        check_parameter_served(name, row, limits(mode))
        return
    changed = body_with(body, name, None)
    setattr(changed, name, 0.5)
    error = refusal(check_served, changed, limits(mode))
    assert error.field == name
    for other in SAMPLING_MODES:
        assert (f"`{other}`" in str(error)) == (row.where(other) is not Where.REFUSED)


def test_a_parameter_of_the_engine_that_does_not_say_what_acts_on_it_is_refused() -> None:
    class Forgotten:
        top_k: Annotated[int, Acts.DEVICE] = 0
        top_z: float = 0.0

    with pytest.raises(TypeError, match="Forgotten: top_z: annotate"):
        acts_of(Forgotten)


ON_HOST: tuple[dict[str, Any], ...] = (
    {"min_p": 0.1},
    {"repetition_penalty": 0.9},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"logit_bias": ((3, 1.0),)},
    {"allowed_token_ids": ()},
    {"form": FORM},
    {"bad_words": ((3,),)},
    {"min_tokens": 1},
    {"logprobs": 0},
    {"seeded": True, "temperature": 0.5},
    {"top_k": 9, "temperature": 0.5},
)
"""With each of these the host samples the row, if the device draws from the 8 likeliest tokens."""
ON_DEVICE: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.5, "temperature": 0.5, "seed": 7, "choice": 2},
    {"top_k": 8, "temperature": 0.5},
    {"max_tokens": 7, "stop_token_ids": frozenset({1})},
    {"seeded": True},
    {"top_k": 9},
)


@pytest.mark.parametrize(
    ("asked", "of_host"), [*((one, True) for one in ON_HOST), *((one, False) for one in ON_DEVICE)]
)
def test_the_host_samples_the_rows_whose_parameters_need_logits(asked: dict[str, Any], of_host: bool) -> None:
    sampling = Sampling(**{"temperature": 0.0, **asked})
    for rule in (needs_host, is_of_host):
        assert rule(sampling, limits("DeviceWithLogits", max_top_k=8)) is of_host
        assert not rule(sampling, limits("Device", max_top_k=8))
        assert not rule(sampling, limits("Host"))
        if set(asked) == {"top_k", "temperature"}:
            assert not rule(sampling, limits("DeviceWithLogits"))


def test_every_parameter_that_the_host_acts_on_is_among_them() -> None:
    assert {name for name, acts in ACTS.items() if acts is Acts.HOST} == {name for one in ON_HOST[:10] for name in one}


def test_every_default_is_neutral() -> None:
    for body, name in SAMPLING:
        row = parameters_of(body)[name]
        assert is_neutral(row.default, row.neutral)


def test_zero_logprobs_reports_the_chosen_token_and_false_reports_nothing() -> None:
    assert refusal(check_served, body_with(CompletionBody, "logprobs", 0), limits("Device")).field == "logprobs"
    check_served(body_with(ChatBody, "logprobs", False), limits("Device"))


def test_logprobs_are_limited_by_the_backend() -> None:
    for body, name in ((CompletionBody, "logprobs"), (ChatBody, "top_logprobs"), (CompletionBody, "prompt_logprobs")):
        says = f"`{name}` must be at most 20, got 21"
        assert says in str(refusal(check_served, body_with(body, name, 21), limits("Host")))
        check_served(body_with(body, name, 20), limits("Host"))


def test_prompt_logprobs_need_a_supporting_backend() -> None:
    row = parameters_of(SamplingFields)["prompt_logprobs"]
    error = refusal(check_parameter_served, "echo", row, limits("Host", reports_prompt_logprobs=False))
    assert (error.field, str(error)) == ("echo", "`echo` is not supported by this backend: leave it out")


def test_biased_tokens_are_sorted() -> None:
    assert bias_entries({7: 1.0, 3: -100.0}, 10) == ((3, -100.0), (7, 1.0))
    assert bias_entries(None, 10) == bias_entries({}, 10) == ()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({10: 1.0}, "10 is not a token id of this model (0 to 9)"),
        ({-1: 1.0}, "-1 is not a token id"),
        ({3: 101.0}, "`logit_bias[3]` must be from -100 to 100"),
        ({3: float("nan")}, "`logit_bias[3]` must be from -100 to 100"),
    ],
)
def test_an_invalid_bias_is_refused_naming_its_entry(given: Any, says: str) -> None:
    error = refusal(bias_entries, given, 10)
    assert error.field == "logit_bias"
    assert says in str(error)


def test_too_many_biased_tokens_are_refused() -> None:
    bias_entries(dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0), 10_000)
    assert "at most" in str(refusal(bias_entries, dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0), 10_000))


def test_allowed_tokens_must_be_in_the_vocabulary() -> None:
    assert allowed_tokens(None, 10) is None
    assert allowed_tokens([7, 3, 7], 10) == (3, 7)
    assert "must not be empty" in str(refusal(allowed_tokens, [], 10))
    assert "10 is not a token id" in str(refusal(allowed_tokens, [1, 10], 10))


class Spelling:
    """Replaces a tokenizer whose words have one token, and another one after a space."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        assert not add_special_tokens
        ids = {"cat": (1,), " cat": (2,), "two words": (3, 4), " two words": (5, 4), "kitten": (6, 7), " kitten": (8,)}
        return ids.get(text, ())


def sequences(words: Any) -> Any:
    return bad_word_sequences(words, Spelling())  # type: ignore[arg-type]


def test_a_bad_word_is_banned_at_the_start_and_after_a_space() -> None:
    assert sequences(["cat", " cat", "two words", "kitten"]) == ((1,), (2,), (3, 4), (5, 4), (6, 7), (8,))
    assert sequences(None) == ()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cat", ""], "must have 1 to"),
        (["x" * (MAX_BAD_WORD_CHARACTERS + 1)], "must have 1 to"),
        (["unknown"], "'unknown' has no tokens"),
        ([str(n) for n in range(MAX_BAD_WORDS + 1)], "at most"),
    ],
)
def test_invalid_bad_words_are_refused(words: Any, says: str) -> None:
    error = refusal(sequences, words)
    assert error.field == "bad_words"
    assert says in str(error)
