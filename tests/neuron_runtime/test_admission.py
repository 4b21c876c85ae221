"""Admission turns a body into requests: defaults of the model, limits of the sampling mode, requested work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat_model import write_chat_model
from helpers.checked_requests import check_request
from helpers.front_end import LIMITS
from helpers.strict_backend import neuron_limits
from neuron_runtime.apis.openai.body import ChatBody, CompletionBody, admitted_chat, admitted_completion, chat_of
from neuron_runtime.core import BackendLimits, PrefillBucket, Request, needs_host
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.admission import Admission, Admissions
from neuron_runtime.requests.conversion import typed
from neuron_runtime.requests.generation_defaults import GenerationDefaults
from neuron_runtime.requests.sampling_fields import SamplingFields
from neuron_runtime.requests.targets import Targets
from neuron_runtime.requests.texts import Text
from neuron_runtime.text.chat_template import ChatTemplate
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

DEFAULTS = GenerationDefaults(
    frozenset({1}), SamplingFields(temperature=0.6, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.1)
)
DEVICE = replace(LIMITS, sampling="Device", max_top_k=64, max_logprobs=0, reports_prompt_logprobs=False)
WITH_LOGITS = replace(LIMITS, sampling="DeviceWithLogits", max_top_k=64, reports_prompt_logprobs=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_chat_model(tmp_path_factory.mktemp("model")))


def admission(tokenizer: Tokenizer, limits: Any = LIMITS, defaults: GenerationDefaults = DEFAULTS) -> Admission:
    return Admissions(Text(tokenizer, defaults), limits, Targets(("m",)), 4).of(None)


def completion(**fields: Any) -> CompletionBody:
    return typed({"prompt": "a core", **fields}, CompletionBody)


def test_model_defaults_apply_only_where_the_client_sets_nothing(tokenizer: Tokenizer) -> None:
    admits = admission(tokenizer)
    (plain,) = admitted_completion(admits, completion()).sampling
    values = (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.repetition_penalty, plain.stop_token_ids)
    assert values == (0.6, 20, 0.8, 0.05, 1.1, frozenset({1}))
    own = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "ignore_eos": True}
    (asked,) = admitted_completion(admits, completion(**own)).sampling
    values = (asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty, asked.stop_token_ids)
    assert values == (0.0, 0, 1.0, 0.0, 1.0, frozenset())
    (likeliest,) = admitted_completion(admits, completion(top_p=0)).sampling
    assert 0 < likeliest.top_p < 1e-6


def test_a_default_top_k_above_what_the_device_has_is_reported_and_dropped(tokenizer: Tokenizer) -> None:
    large = GenerationDefaults(sampling=SamplingFields(top_k=100))
    dropped = large.served(DEVICE)
    assert dropped.not_applied == ("top_k=100 (the device has 64) with Device sampling",)
    for limits, top_k in ((DEVICE, 0), (WITH_LOGITS, 100), (LIMITS, 100)):
        (sampling,) = admitted_completion(admission(tokenizer, limits, large), completion()).sampling
        assert sampling.top_k == top_k
    assert large.served(LIMITS) == large
    (notice,) = large.served(WITH_LOGITS).notices
    assert "top_k=100 (the device has 64) needs logits" in notice


def test_a_top_k_of_the_whole_vocabulary_is_none_where_all_tokens_are_drawn_from(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocabulary_size
    for limits, top_k, meant in ((LIMITS, size, 0), (LIMITS, size - 1, size - 1), (WITH_LOGITS, size, size)):
        (sampling,) = admitted_completion(admission(tokenizer, limits), completion(top_k=top_k)).sampling
        assert sampling.top_k == meant
    assert needs_host(sampling, WITH_LOGITS)


def test_a_default_unsupported_by_the_sampling_mode_is_reported_and_dropped(tokenizer: Tokenizer) -> None:
    assert DEFAULTS.served(LIMITS) == DEFAULTS
    assert DEFAULTS.served(WITH_LOGITS) == replace(DEFAULTS, on_host=("min_p=0.05", "repetition_penalty=1.1"))
    left = DEFAULTS.served(DEVICE)
    assert [left.value(name) for name in ("min_p", "repetition_penalty", "temperature")] == [0.0, 1.0, 0.6]
    assert left.not_applied == ("min_p=0.05 with Device sampling", "repetition_penalty=1.1 with Device sampling")
    (sampling,) = admitted_completion(admission(tokenizer, DEVICE), completion()).sampling
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
def test_a_parameter_unsupported_by_the_sampling_mode_is_refused_naming_a_mode_that_supports_it(
    tokenizer: Tokenizer, limits: Any, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match="needs") as caught:
        admitted_completion(admission(tokenizer, limits), completion(**fields))
    assert caught.value.field == field
    neutral = {"min_p": 0, "logit_bias": {}, "echo": False, "repetition_penalty": 1.0, "logprobs": None}
    assert admitted_completion(admission(tokenizer, limits), completion(**neutral))


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 64}, False),
        ({"seed": None}, False),
        ({"seed": 0}, True),
        ({"seed": 0, "temperature": 0}, False),
        ({"min_p": 0.1}, True),
        ({"logit_bias": {"5": 1}}, True),
        ({"bad_words": ["core"]}, True),
        ({"logprobs": 0}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_rows_that_the_host_samples_are_told_by_their_parameters(
    tokenizer: Tokenizer, fields: dict[str, Any], needs: bool
) -> None:
    (sampling,) = admitted_completion(
        admission(tokenizer, WITH_LOGITS, GenerationDefaults()), completion(**fields)
    ).sampling
    assert needs_host(sampling, WITH_LOGITS) is needs
    assert (needs_host(sampling, LIMITS), needs_host(sampling, DEVICE)) == (False, False)
    large = replace(sampling, top_k=WITH_LOGITS.max_top_k + 1)
    assert needs_host(large, WITH_LOGITS) is (needs or not large.greedy)


def test_a_plain_text_request_requests_no_logprobs(tokenizer: Tokenizer) -> None:
    admits = admission(tokenizer)
    plain = admitted_completion(admits, completion(return_tokens_as_token_ids=True, stop=["x"], n=2))
    stated = admitted_chat(admits, typed({"messages": [{"role": "user", "content": "a"}], "logprobs": False}, ChatBody))
    for ask in (plain, stated):
        assert (ask.details, ask.make_splitter, ask.echoes) == (None, None, ())
        assert {(one.logprobs, one.prompt_logprobs) for one in ask.sampling} == {(None, None)}


def test_prompt_logprobs_use_the_larger_of_both_requested_numbers(tokenizer: Tokenizer) -> None:
    ask = admitted_completion(admission(tokenizer), completion(echo=True, logprobs=1, prompt_logprobs=3))
    assert (ask.sampling[0].logprobs, ask.sampling[0].prompt_logprobs) == (1, 3)
    ask = admitted_completion(admission(tokenizer), completion(echo=True, logprobs=2, prompt_logprobs=0))
    assert (ask.sampling[0].logprobs, ask.sampling[0].prompt_logprobs) == (2, 2)
    ask = admitted_completion(admission(tokenizer), completion(echo=True))
    assert (ask.sampling[0].logprobs, ask.sampling[0].prompt_logprobs) == (None, None)


def test_an_echo_without_an_answer_computes_one_hidden_token(tokenizer: Tokenizer) -> None:
    ask = admitted_completion(admission(tokenizer), completion(echo=True, max_tokens=0))
    assert (ask.generates, ask.sampling[0].max_tokens) == (False, 1)
    assert admitted_completion(admission(tokenizer), completion(echo=True, max_tokens=1)).generates


def ids(count: int) -> list[int]:
    return [5] * count


BLOCKS = replace(LIMITS, block_size=8, num_blocks=4)
NEURON = neuron_limits(max_rows=4, max_model_length=256)
SEGMENTS = replace(LIMITS, prefill_buckets=(PrefillBucket(8, 16), PrefillBucket(64, 64)), max_prefill_start=100)
REFUSED: list[tuple[BackendLimits, dict[str, Any], str, str]] = [
    (LIMITS, {"prompt": []}, "prompt", "must not be empty"),
    (LIMITS, {"prompt": [[]]}, "prompt", "at least one is required"),
    (replace(LIMITS, vocabulary_size=9), {"prompt": [3, 9, 4]}, "prompt", "`prompt[1]`: 9 is not a token id"),
    (replace(LIMITS, vocabulary_size=9), {"prompt": [3, -1, 4]}, "prompt", "`prompt[1]`: -1 is not a token id"),
    (replace(LIMITS, vocabulary_size=9), {"prompt": [2**40]}, "prompt", f"`prompt[0]`: {2**40} is not a token id"),
    (replace(LIMITS, vocabulary_size=9), {"prompt": "a core"}, "prompt", "is not a token id of this model (0 to 8)"),
    (NEURON, {"prompt": [5]}, "prompt", "has 1 tokens: this backend needs at least 2"),
    (replace(NEURON, max_step_tokens=100), {"prompt": ids(101)}, "prompt", "can prefill at most 100"),
    (replace(NEURON, max_step_tokens=100), {"prompt": ids(101)}, "prompt", "maximum context length is 256 tokens"),
    (replace(SEGMENTS, chunks_prefill=False), {"prompt": ids(65)}, "prompt", "can prefill at most 64"),
    (SEGMENTS, {"prompt": ids(129)}, "prompt", "can prefill at most 128"),
    (SEGMENTS, {"truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "from 1 to 128"),
    (LIMITS, {"prompt": ids(300)}, "prompt", "maximum context length is 256 tokens"),
    (LIMITS, {"prompt": ids(256)}, "prompt", "maximum context length is 256 tokens"),
    (BLOCKS, {"prompt": ids(33)}, "prompt", "maximum context length is 33 tokens"),
    (LIMITS, {"bad_words": ["\ud83d"]}, "bad_words", "half of a surrogate pair"),
    (LIMITS, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (LIMITS, {"prompt": ids(200), "max_tokens": 57}, "max_tokens", "leaves room for 56"),
    (BLOCKS, {"prompt": ids(20), "max_tokens": 14}, "max_tokens", "leaves room for 13"),
    (LIMITS, {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most 5 tokens"),
    (DEVICE, {"top_k": 65}, "top_k", "at most 64 with Device sampling, got 65: a larger one needs `DeviceWithLogits`"),
    (LIMITS, {"logprobs": 6}, "logprobs", "at most 5"),
    (LIMITS, {"prompt_logprobs": 6}, "prompt_logprobs", "at most 5"),
    (replace(LIMITS, reports_prompt_logprobs=False), {"prompt_logprobs": 0}, "prompt_logprobs", "by this backend"),
]  # fmt: skip


@pytest.mark.parametrize(("limits", "fields", "field", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_request_that_can_never_run_is_refused_with_field_and_limit(
    tokenizer: Tokenizer, limits: BackendLimits, fields: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admitted_completion(admission(tokenizer, limits), completion(**fields))
    assert caught.value.field == field
    assert says in str(caught.value)


some_limits = st.builds(
    replace,
    st.sampled_from(
        [
            LIMITS,
            BLOCKS,
            SEGMENTS,
            NEURON,
            DEVICE,
            WITH_LOGITS,
            replace(DEVICE, max_top_k=4),
            replace(WITH_LOGITS, max_top_k=0),
        ]
    ),
    vocabulary_size=st.sampled_from([0, 9, 100, 1000]),
)
some_fields = st.fixed_dictionaries(
    {"prompt": st.lists(st.integers(-1, 10), max_size=40) | st.text(max_size=300) | st.integers(1, 300).map(ids)},
    optional={
        "max_tokens": st.integers(-1, 300), "min_tokens": st.integers(-1, 300), "top_k": st.integers(-2, 400),
        "logprobs": st.integers(-1, 7), "prompt_logprobs": st.integers(-1, 7), "echo": st.booleans(),
        "truncate_prompt_tokens": st.integers(-2, 300), "add_special_tokens": st.booleans(), "temperature": st.floats(),
        "top_p": st.floats(), "n": st.integers(0, 3), "seed": st.integers(-(2**64), 2**64),
    },
)  # fmt: skip


def test_chats_with_tools_calls_or_results_have_the_template_for_tools(tokenizer: Tokenizer) -> None:
    shown = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    with_tools = ChatTemplate("T{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + TEXTS + shown, {})
    plain, own = tokenizer.chat_template, tokenizer.tool_template
    tokenizer.chat_template, tokenizer.tool_template = ChatTemplate("P" + TEXTS, {}), with_tools
    asked = {"role": "user", "content": "a"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "r"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    try:
        for fields, template in (
            ({"messages": [asked]}, "P"),
            ({"messages": [asked], "tools": tools}, "T"),
            ({"messages": [asked], "tools": tools, "tool_choice": "none"}, "P"),
            ({"messages": [asked, *results]}, "T"),
        ):
            assert admission(tokenizer).chat_text(chat_of(typed(fields, ChatBody)))[0] == template
    finally:
        tokenizer.chat_template, tokenizer.tool_template = plain, own


def test_ids_that_the_model_has_beyond_its_tokenizer_may_be_sent_back(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocabulary_size + 8
    admits = admission(tokenizer, replace(LIMITS, vocabulary_size=size))
    ask = admitted_completion(admits, completion(prompt=[5, size - 1], echo=True, logprobs=1))
    assert ask.prompts == ((5, size - 1),)
    assert ask.echoes[0].text == tokenizer.decode([5])
    with pytest.raises(InvalidRequest, match="is not a token id of this model"):
        admitted_completion(admits, completion(prompt=[5, size]))


@given(limits=some_limits, fields=some_fields, cuts=st.booleans())
def test_an_admitted_request_can_run(tokenizer: Tokenizer, limits: BackendLimits, fields: Any, cuts: bool) -> None:
    admits = replace(admission(tokenizer, limits).all, cuts_max_tokens=cuts).of(None)
    try:
        ask = admitted_completion(admits, completion(**fields))
    except InvalidRequest:
        return
    for prompt, sampling in zip(ask.prompts, ask.sampling, strict=True):
        check_request(limits, Request("a", prompt, sampling))
        assert (0 <= sampling.temperature <= 100, 0 < sampling.top_p <= 1) == (True, True)


def test_a_prompt_is_cut_to_what_can_be_prefilled(tokenizer: Tokenizer) -> None:
    for max_tokens, kept in ((1, 128), (100, 128), (200, 56)):
        fields = completion(prompt=ids(300), truncate_prompt_tokens=-1, max_tokens=max_tokens)
        assert len(admitted_completion(admission(tokenizer, SEGMENTS), fields).prompts[0]) == kept


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
def test_messages_are_converted_to_the_form_of_the_template(tokenizer: Tokenizer, template: str, expected: str) -> None:
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
        assert admits.chat_text(chat_of(body)) == expected
    finally:
        tokenizer.chat_template = known
