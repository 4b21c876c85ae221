"""Every field of the API, one by one, and random bodies: an answer or a 400 with a message, never a 500."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from helpers.front_end import MODEL, Serving, make_model, serving
from neuron_runtime.apis.openai.body import ChatBody, CompletionBody
from neuron_runtime.not_built import Surface, rows
from neuron_runtime.requests.parameters import parameters_of

NOT_BUILT = {row.name: row.neutral for row in rows(Surface.BODY) if row.has_effect}
WITHOUT_EFFECT = [row.name for row in rows(Surface.BODY) if not row.has_effect]

CHAT = [{"role": "user", "content": "What is a device?"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    COMPLETIONS: (CompletionBody, {"prompt": "a core", "max_tokens": 2}),
    CHATS: (ChatBody, {"messages": CHAT, "max_tokens": 2}),
}

SAMPLES: dict[str, Any] = {
    "model": MODEL, "prompt": ["a core", "a node"], "messages": CHAT, "max_tokens": 3, "min_tokens": 1,
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logit_bias": {"5": 1.5, "6": -100}, "allowed_token_ids": [7, 8], "bad_words": ["core"],
    "seed": -(2**63), "n": 2, "stop": ["x", "y"], "stop_token_ids": [9], "ignore_eos": True, "stream": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "add_special_tokens": True, "priority": -5,
    "truncate_prompt_tokens": 4, "prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True,
    "cache_salt": "salt", "echo": True, "best_of": 1, "add_generation_prompt": False,
    "chat_template_kwargs": {"a": [1]}, "continue_final_message": True, "max_completion_tokens": 3,
    "include_reasoning": False, "reasoning_effort": "low", "tools": [], "tool_choice": "none",
    "parallel_tool_calls": False, "response_format": {"type": "json_object"},
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "structured_outputs": {"choice": ["a core", "a node"]}, "guided_choice": ["a"], "guided_grammar": 'start: "a"',
    "guided_json": {"type": "object"}, "guided_regex": "[a-c]+",
}  # fmt: skip
"""A supported value of every field."""

TOGETHER: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 3},
}
"""Fields that require another one."""

OWN: dict[tuple[str, str], Any] = {(COMPLETIONS, "logprobs"): 2, (CHATS, "logprobs"): True}
"""Fields of both endpoints with different meanings."""

ASKS: dict[str, Any] = {
    "audio": {}, "chat_template": "x", "documents": [{}], "function_call": {"name": "f"}, "functions": [{}],
    "kv_transfer_params": {}, "length_penalty": 2, "logits_processors": ["p"], "mm_processor_kwargs": {"a": 1},
    "modalities": ["audio"], "moderation": {}, "prediction": {}, "prompt_embeds": "e", "repetition_detection": {},
    "spaces_between_special_tokens": False, "suffix": "s", "thinking_token_budget": 5, "use_beam_search": True,
    "vllm_xargs": {"a": 1}, "web_search_options": {},
}  # fmt: skip
"""A value with an effect for every unsupported field."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(make_model(tmp_path_factory.mktemp("model"))) as one:
        yield one


async def post(served: Serving, path: str, **fields: Any) -> httpx.Response:
    return await served.http.post(path, json=BODIES[path][1] | fields)


def refused_for(answer: httpx.Response) -> Any:
    return answer.json()["error"]["param"] if answer.status_code == 400 else answer.status_code


@pytest.mark.parametrize("path", BODIES)
async def test_every_field_of_an_endpoint_is_supported(served: Serving, path: str) -> None:
    fields = set(BODIES[path][0].__struct_fields__)
    known = {*SAMPLES, *TOGETHER, *(name for where, name in OWN if where == path)}
    assert fields <= known
    for name in sorted(fields):
        asked = TOGETHER.get(name) or {name: OWN.get((path, name), SAMPLES.get(name))}
        answer = await post(served, path, **asked)
        assert answer.status_code == 200, (asked, answer.text)
        if name not in {"prompt", "messages"}:
            assert (await post(served, path, **{name: None})).status_code == 200, name


async def test_a_body_is_read_as_other_languages_write_it(served: Serving) -> None:
    fields = BODIES[COMPLETIONS][1] | {"model": "", "max_tokens": 4.0, "temperature": 0}
    answer = await served.http.post(COMPLETIONS, content=b"\xef\xbb\xbf" + json.dumps(fields).encode())
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    for value in (4.5, 1e300):
        assert refused_for(await post(served, COMPLETIONS, max_tokens=value)) == "max_tokens"


async def test_the_list_of_models_may_end_with_a_slash(served: Serving) -> None:
    assert (await served.http.get("/v1/models/")).json() == (await served.http.get("/v1/models")).json()


async def test_everything_wrong_with_a_body_is_said_at_once(served: Serving) -> None:
    wrong = {"top_p": 7, "functions": [{}], "temperature": "hot", "best_of": 2, "messages": [{"role": "x"}], "n": 0}
    error = (await served.http.post("/v1/chat/completions", json=wrong)).json()["error"]
    assert error["param"] == "functions"
    assert [part.split("`")[1] for part in error["message"].split("; ")] == [
        *("functions", "best_of", "temperature", "messages[0].role", "top_p", "n"),
    ]
    # Values of a client are shortened one by one, and the number of problems is bounded.
    wrong = dict.fromkeys(("audio", "moderation", "prediction", "suffix"), "x") | {"model": 1, "user": 3}
    many = dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "n", "seed"), "x")
    error = (await served.http.post("/v1/completions", json=wrong | many | {"prompt": "a"})).json()["error"]
    assert error["message"].endswith("; and 2 more")
    assert error["message"].count("; ") == 10
    answer = await served.http.post("/v1/chat/completions", json={"messages": [{"role": "x" * 9000}], "top_p": 7})
    message = answer.json()["error"]["message"]
    assert len(message) < 900
    assert message.endswith("; `top_p` must be from 0 to 1, got 7")


async def test_a_field_of_the_other_endpoint_is_refused_unless_neutral(served: Serving) -> None:
    for path, other in ((COMPLETIONS, CHATS), (CHATS, COMPLETIONS)):
        strange = set(BODIES[other][0].__struct_fields__) - set(BODIES[path][0].__struct_fields__)
        assert strange
        for name in strange:
            neutral = parameters_of(BODIES[other][0])[name].neutral
            value = {**SAMPLES, "top_logprobs": 2, "echo": True, "best_of": 2}[name]
            if value not in neutral:
                assert refused_for(await post(served, path, **{name: value})) == name
            for passes in (None, *neutral):
                assert (await post(served, path, **{name: passes})).status_code == 200, (name, passes)


@pytest.mark.parametrize("path", BODIES)
async def test_unsupported_fields_are_refused_by_name_unless_neutral(served: Serving, path: str) -> None:
    assert ASKS.keys() == NOT_BUILT.keys()
    for name, value in ASKS.items():
        assert refused_for(await post(served, path, **{name: value})) == name
    for turn in range(max(map(len, NOT_BUILT.values()))):
        neutral = {name: (*values, None, None)[turn] for name, values in NOT_BUILT.items()}
        answer = await post(served, path, **neutral)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_without_effect_accepts_any_value(served: Serving, path: str) -> None:
    for value in ("x", 5, {"a": "b"}, None):
        assert (await post(served, path, **dict.fromkeys(WITHOUT_EFFECT, value))).status_code == 200


# Random bodies


numbers = (
    st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, -(10**30), 1e308, 5e-324, -0.0, 0.1])
    | st.floats(allow_nan=True, allow_infinity=True)
)
texts = st.text(max_size=12) | st.sampled_from(["\ud800", "a\udfffb", "\x00", "☃" * 40, "<|end|>", "true", "null"])
plain = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
names = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, *NOT_BUILT, "tokens"})
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | values, "content": values},
        optional={"name": values, "tool_calls": values, "reasoning": values},
    ),
    max_size=3,
)
right = {name: st.just(value) for name, value in SAMPLES.items() if name not in {"n", "max_tokens", "prompt", "stream"}}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Some valid and some invalid fields, often with the required ones."""
    body = {name: draw(right[name]) for name in draw(st.lists(st.sampled_from(sorted(right)), max_size=3))}
    body |= {name: draw(values) for name in draw(st.lists(st.sampled_from(names), max_size=3))}
    body |= draw(st.sampled_from([{}, {"prompt": "a core"}, {"messages": CHAT}, {"prompt": [5, 6]}, {"tokens": [5]}]))
    if draw(st.booleans()):
        body["messages"] = draw(messages)
    return {"max_tokens": draw(st.sampled_from([1, 3])), "stream": draw(st.booleans()), **body}


def as_json(value: Any) -> bytes:
    """JSON with NaN, infinities and lone surrogates."""
    return json.dumps(value).encode()


@given(path=st.sampled_from([COMPLETIONS, CHATS, "/tokenize", "/detokenize"]), body=bodies() | values)
async def test_every_body_gets_an_answer_or_a_readable_error(served: Serving, path: str, body: Any) -> None:
    answer = await served.http.post(path, content=as_json(body))
    assert answer.status_code in {200, 400, 404}, (body, answer.status_code, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    assert served.engine.error is None


@given(path=st.sampled_from([COMPLETIONS, CHATS, "/tokenize", "/detokenize"]), raw=st.binary(max_size=60))
async def test_invalid_json_gets_a_readable_error(served: Serving, path: str, raw: bytes) -> None:
    answer = await served.http.post(path, content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [100, 900, 1100, 50_000])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "logit_bias", "messages", "tools", "anything"])
async def test_a_deeply_nested_body_is_answered_or_refused(served: Serving, depth: int, field: str) -> None:
    value = b'{"a":' * depth + b"1" + b"}" * depth
    body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "%b": %b}' % (field.encode(), value)
    answer = await served.http.post(CHATS, content=body)
    assert answer.status_code in {200, 400}
    assert answer.status_code == 200 or answer.json()["error"]["message"]


async def test_the_engine_still_serves(served: Serving) -> None:
    await served.until_metric("vllm:num_requests_running", 0)
    await served.until_metric("vllm:num_requests_waiting", 0)
    assert served.engine.error is None
    assert not served.front_end._over.done()
    assert (await post(served, COMPLETIONS)).status_code == 200
