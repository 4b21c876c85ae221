"""What a body becomes before the engine: the model's defaults, what a sampling mode serves, what is paid for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.admission import Admission
from neuron_runtime.requests.bodies import ChatBody, CompletionBody, typed
from neuron_runtime.requests.generation_defaults import GenerationDefaults
from neuron_runtime.requests.sampling_fields import SamplingFields
from neuron_runtime.text.chat_template import ChatTemplate
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

DEFAULTS = GenerationDefaults(
    frozenset({1}), SamplingFields(temperature=0.6, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.1)
)
DEVICE = replace(LIMITS, sampling="Device", max_logprobs=0, reports_prompt_logprobs=False)
WITH_LOGITS = replace(LIMITS, sampling="DeviceWithLogits", reports_prompt_logprobs=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_chat_model(tmp_path_factory.mktemp("model")))


def admission(tokenizer: Tokenizer, limits: Any = LIMITS, defaults: GenerationDefaults = DEFAULTS) -> Admission:
    return Admission(tokenizer, limits, ("m",), defaults.served(limits), 4)


def completion(**fields: Any) -> CompletionBody:
    return typed({"prompt": "a core", **fields}, CompletionBody)


def test_the_models_defaults_hold_where_a_client_says_nothing_and_only_there(tokenizer: Tokenizer) -> None:
    admits = admission(tokenizer)
    (plain,) = admits.completion(completion()).sampling
    told = (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.repetition_penalty, plain.stop_token_ids)
    assert told == (0.6, 20, 0.8, 0.05, 1.1, frozenset({1}))
    own = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "ignore_eos": True}
    (asked,) = admits.completion(completion(**own)).sampling
    told = (asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty, asked.stop_token_ids)
    assert told == (0.0, 0, 1.0, 0.0, 1.0, frozenset())


def test_a_default_that_the_sampling_mode_cannot_serve_is_told_and_left_out(tokenizer: Tokenizer) -> None:
    assert DEFAULTS.served(LIMITS) == DEFAULTS.served(WITH_LOGITS) == DEFAULTS
    left = DEFAULTS.served(DEVICE)
    assert [left.value(name) for name in ("min_p", "repetition_penalty", "temperature")] == [0.0, 1.0, 0.6]
    assert left.not_applied == ("min_p=0.05 (with Device sampling)", "repetition_penalty=1.1 (with Device sampling)")
    (sampling,) = admission(tokenizer, DEVICE).completion(completion()).sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("limits", "fields", "field"),
    [
        (DEVICE, {"min_p": 0.1}, "min_p"),
        (DEVICE, {"logprobs": 0}, "logprobs"),
        (DEVICE, {"seed": 5}, "seed"),
        (DEVICE, {"logit_bias": {"5": 1}}, "logit_bias"),
        (WITH_LOGITS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (WITH_LOGITS, {"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_what_a_sampling_mode_cannot_serve_is_refused_with_the_mode_that_can(
    tokenizer: Tokenizer, limits: Any, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match="needs") as caught:
        admission(tokenizer, limits).completion(completion(**fields))
    assert caught.value.field == field
    neutral = {"min_p": 0, "logit_bias": {}, "echo": False, "repetition_penalty": 1.0, "logprobs": None}
    assert admission(tokenizer, limits).completion(completion(**neutral))


def test_whoever_asks_for_text_alone_pays_for_nothing_else(tokenizer: Tokenizer) -> None:
    admits = admission(tokenizer)
    plain = admits.completion(completion(return_tokens_as_token_ids=True, stop=["x"], n=2))
    said = admits.chat(typed({"messages": [{"role": "user", "content": "a"}], "logprobs": False}, ChatBody))
    for ask in (plain, said):
        assert (ask.details, ask.thinks, ask.echoes) == (None, None, ())
        assert {(one.logprobs, one.prompt_logprobs) for one in ask.sampling} == {(None, None)}


def test_the_prompt_is_computed_for_the_larger_of_both_numbers_that_tell_of_it(tokenizer: Tokenizer) -> None:
    ask = admission(tokenizer).completion(completion(echo=True, logprobs=1, prompt_logprobs=3))
    assert (ask.sampling[0].logprobs, ask.sampling[0].prompt_logprobs) == (1, 3)
    ask = admission(tokenizer).completion(completion(echo=True, logprobs=2, prompt_logprobs=0))
    assert (ask.sampling[0].logprobs, ask.sampling[0].prompt_logprobs) == (2, 2)
    ask = admission(tokenizer).completion(completion(echo=True))
    assert (ask.sampling[0].logprobs, ask.sampling[0].prompt_logprobs) == (None, None)


def test_an_echo_without_an_answer_computes_one_token_that_nobody_sees(tokenizer: Tokenizer) -> None:
    ask = admission(tokenizer).completion(completion(echo=True, max_tokens=0))
    assert (ask.generates, ask.sampling[0].max_tokens) == (False, 1)
    assert admission(tokenizer).completion(completion(echo=True, max_tokens=1)).generates


LISTS = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content or '' }}{% endfor %}"
DEVELOPERS = TEXTS + "{# developer #}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LISTS, "<system>Be brief.<user>ab<assistant>"),
        (TEXTS, "<system>Be brief.<user>a\nb<assistant>thought"),
        (DEVELOPERS, "<developer>Be brief.<user>a\nb<assistant>thought"),
    ],
)
def test_messages_are_written_in_the_form_that_the_template_takes(
    tokenizer: Tokenizer, template: str, expected: str
) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "thought", "tool_calls": []},
    ]
    body = typed({"messages": messages}, ChatBody)
    admits = admission(tokenizer)
    known = tokenizer.chat_template
    tokenizer.chat_template = ChatTemplate(template, {})
    try:
        assert admits.chat_text(body.messages, body) == expected
    finally:
        tokenizer.chat_template = known
