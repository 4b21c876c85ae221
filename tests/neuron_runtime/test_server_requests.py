"""Requests and responses over real HTTP, with a real engine on the strict backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.front_end import LIMITS, MODEL, Serving, make_model, serving
from neuron_runtime.config import ServerOptions

CHAT = [{"role": "user", "content": "What is a device?"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir) as one:
        yield one


pytestmark = pytest.mark.asyncio(loop_scope="module")


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a complete stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


def joined(parts: list[dict[str, Any]], index: int = 0) -> tuple[str, str | None]:
    """Text and finish reason of one choice of a stream."""
    text, reason = "", None
    for choice in (one for part in parts for one in part["choices"] if one["index"] == index):
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        reason = choice["finish_reason"] or reason
    return text, reason


async def complete(served: Serving, **body: Any) -> dict[str, Any]:
    answer = await served.http.post("/v1/completions", json={"prompt": "a core", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def refused(served: Serving, path: str = "/v1/completions", status: int = 400, **body: Any) -> dict[str, Any]:
    whole = {"messages": CHAT} if "chat" in path else {"prompt": "a core"}
    answer = await served.http.post(path, json={**whole, **body})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_the_chunks_of_a_stream_join_to_the_whole_answer(served: Serving) -> None:
    for path, ask in (("/v1/completions", {"prompt": "a core"}), ("/v1/chat/completions", {"messages": CHAT})):
        body = {"model": MODEL, "temperature": 0, "max_tokens": 40, **ask}
        whole = (await served.http.post(path, json=body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await served.http.post(path, json=body | options)
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = events(answer.text)
        choice = whole["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert joined(parts) == (text, choice["finish_reason"])
        assert text
        assert parts[-1]["usage"] == whole["usage"]
        assert parts[-1]["choices"] == []
        assert all(part["usage"] is None for part in parts[:-1])
        assert {part["id"] for part in parts} == {parts[0]["id"]}
        assert all(part["model"] == MODEL for part in parts)


async def test_a_chat_stream_starts_with_the_role_once(served: Serving) -> None:
    body = {"messages": CHAT, "stream": True, "max_tokens": 5}
    parts = events((await served.http.post("/v1/chat/completions", json=body)).text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert all("usage" not in part for part in parts)


async def test_usage_counts_the_prompt_with_bos_and_every_answer_token(served: Serving) -> None:
    tokens = (await served.http.post("/tokenize", json={"prompt": "a core"})).json()
    result = await complete(served, max_tokens=7, ignore_eos=True)
    usage = result["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens["count"], 7)
    assert usage["total_tokens"] == tokens["count"] + 7
    assert result["choices"][0]["finish_reason"] == "length"


async def test_continuous_usage_counts_up_to_the_final_usage(served: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a core", "stream": True, "stream_options": options, "max_tokens": 6, "ignore_eos": True}
    parts = events((await served.http.post("/v1/completions", json=body)).text)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 6


async def test_several_prompts_and_answers_are_indexed_prompt_by_prompt(served: Serving) -> None:
    alone = [await complete(served, prompt=prompt, max_tokens=5) for prompt in ("a core", "a node")]
    texts = [result["choices"][0]["text"] for result in alone]
    both = await complete(served, prompt=["a core", "a node"], n=2, max_tokens=5)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"]] == [texts[0], texts[0], texts[1], texts[1]]
    body = {"prompt": ["a core", "a node"], "n": 2, "max_tokens": 5, "stream": True, "temperature": 0}
    parts = events((await served.http.post("/v1/completions", json=body)).text)
    assert [joined(parts, index)[0] for index in range(4)] == [texts[0], texts[0], texts[1], texts[1]]


async def test_an_empty_prompt_is_one_bos(served: Serving) -> None:
    assert (await complete(served, prompt="", max_tokens=1))["usage"]["prompt_tokens"] == 1
    error = await refused(served, prompt="", add_special_tokens=False)
    assert (error["param"], "no tokens" in error["message"]) == ("prompt", True)


async def test_prompts_may_be_token_ids(served: Serving) -> None:
    ids = (await served.http.post("/tokenize", json={"prompt": "a core"})).json()["tokens"]
    text = (await complete(served, max_tokens=6))["choices"][0]["text"]
    assert (await complete(served, prompt=ids, max_tokens=6))["choices"][0]["text"] == text
    assert (await complete(served, prompt=[ids], max_tokens=6))["choices"][0]["text"] == text


async def test_an_answer_and_its_usage_end_before_the_stop_string(served: Serving) -> None:
    free = await complete(served, max_tokens=40, ignore_eos=True)
    text = free["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    at = text.index(stop)
    stopped = await complete(served, max_tokens=40, ignore_eos=True, stop=stop)
    choice = stopped["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[:at], "stop")
    assert stopped["usage"]["completion_tokens"] < 40
    included = await complete(served, max_tokens=40, ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    assert included["choices"][0]["text"] == text[: at + len(stop)]
    await served.until_metric("vllm:num_requests_running", 0)


async def test_a_stop_token_ends_the_answer_counts_in_usage_and_is_not_shown(served: Serving) -> None:
    ids = (await served.http.post("/tokenize", json={"prompt": "a core"})).json()["tokens"]
    free = await complete(served, prompt=ids, max_tokens=12, ignore_eos=True)
    again = (await served.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 12, "temperature": 0})).json()
    assert again["usage"]["completion_tokens"] <= 12
    every = list(range(4, 320))
    stopped = await complete(served, prompt=ids, max_tokens=12, stop_token_ids=every, ignore_eos=True)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == ""
    assert stopped["usage"]["completion_tokens"] >= 1
    late = await complete(served, prompt=ids, max_tokens=12, stop_token_ids=every, ignore_eos=True, min_tokens=4)
    assert 4 <= late["usage"]["completion_tokens"] <= 6
    assert free["choices"][0]["text"].startswith(late["choices"][0]["text"])


async def test_the_same_seed_repeats_the_answer_and_choices_differ(served: Serving) -> None:
    ask = {"temperature": 1.0, "seed": -5, "max_tokens": 20, "n": 2, "ignore_eos": True}
    first, second = [await complete(served, **ask) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["text"] != first["choices"][1]["text"]


async def test_an_invocation_is_a_chat_or_a_completion(served: Serving) -> None:
    for path, body in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "a core"})):
        ask = {**body, "max_tokens": 8, "temperature": 0}
        plain, invoked = [(await served.http.post(route, json=ask)).json() for route in (path, "/invocations")]
        assert (invoked["object"], invoked["choices"]) == (plain["object"], plain["choices"])
    for raw, field in ((b"{}", "messages"), (b"[]", None), (b"{", None)):
        answer = await served.http.post("/invocations", content=raw)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_load_and_configuration_are_reported(served: Serving) -> None:
    assert set((await served.http.get("/load")).json()) == {"server_load"}
    config = (await served.http.get("/server_info")).json()["vllm_config"]
    assert config["servedNames"] == [MODEL, "alias"]
    assert (await served.http.get("/ping")).json() == {"status": "ok"}


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
FUNCTIONS = {"functions": [{"name": "f"}]}


@pytest.mark.parametrize(
    "body",
    [
        {**TOOLS, "tool_choice": "none"},
        {**FUNCTIONS, "function_call": "none"},
        {"reasoning_effort": "low", "verbosity": "low"},
    ],
    ids="+".join,
)
async def test_what_cannot_change_an_answer_is_accepted(served: Serving, body: dict[str, Any]) -> None:
    chat = {"messages": CHAT, "max_tokens": 8, "temperature": 0}
    plain, answer = [(await served.http.post("/v1/chat/completions", json=chat | more)).json() for more in ({}, body)]
    assert answer["choices"] == plain["choices"]


async def test_neutral_values_of_unsupported_fields_are_accepted(served: Serving) -> None:
    neutral = {
        "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "logprobs": None,
        "echo": False, "best_of": 1, "min_p": 0.0, "bad_words": [], "user": "me", "suffix": None, "top_k": -1,
        "metadata": {"a": "b"}, "stop": None, "seed": None, "priority": 0, "use_beam_search": False, "n": 1,
    }  # fmt: skip
    await complete(served, max_tokens=2, **neutral)
    chat = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0,
        "parallel_tool_calls": True, "store": False, "service_tier": "auto", "max_completion_tokens": 2,
    }  # fmt: skip
    answer = await served.http.post("/v1/chat/completions", json={"messages": CHAT, **chat})
    assert answer.status_code == 200, answer.text


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "str | array"),
    ({"prompt": 5}, "prompt", "str | array"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": ["a", 1]}, "prompt", "list of texts"),
    ({"prompt": [1, "a"]}, "prompt", "list of texts"),
    ({"prompt": [1, [2]]}, "prompt", "list of texts"),
    ({"prompt": [320]}, "prompt", "320 is not a token id of this model (0 to 319)"),
    ({"prompt": [-1]}, "prompt", "-1 is not a token id"),
    ({"prompt": [2**70]}, "prompt", "is not a token id"),
    ({"prompt": [5] * 256}, "prompt", "maximum context length is 256 tokens"),
    ({"prompt": "x" * 5000}, "prompt", "maximum context length is 256 tokens"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -1}, "max_tokens", "at least 1"),
    ({"max_tokens": 256}, "max_tokens", "leaves room for"),
    ({"max_tokens": 10**30}, "max_tokens", "leaves room for"),
    ({"max_tokens": 1.5}, "max_tokens", "Expected `int"),
    ({"max_tokens": "many"}, "max_tokens", "Expected `int"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most 8 tokens"),
    ({"temperature": -0.1}, "temperature", "from 0 to 100"),
    ({"temperature": 101}, "temperature", "from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "Expected `float"),
    ({"top_p": -0.1}, "top_p", "from 0 to 1"),
    ({"top_p": 1.1}, "top_p", "from 0 to 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"seed": 2**63}, "seed", "from -9223372036854775808 to"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 7}, "n", "at most 6"),
    ({"stop": ""}, "stop", "must have 1 to 1024 characters"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop": [1]}, "stop[0]", "Expected `str`"),
    ({"stop_token_ids": [320]}, "stop_token_ids", "not a token id"),
    ({"stream": "yes"}, "stream", "Expected `bool"),
    ({"stream": True, "stream_options": 5}, "stream_options", "Expected `object"),
    ({"priority": 2**40}, "priority", "must be from"),
    ({"cache_salt": "x" * 300}, "cache_salt", "at most 256"),
    ({"best_of": 3, "n": 2}, "best_of", "must be 1 or `n`, got 3"),
    ({"suffix": "x"}, "suffix", "not supported yet"),
    ({"logprobs": -1}, "logprobs", "at least 0"),
    ({"logprobs": 6}, "logprobs", "at most 5, got 6"),
    ({"logprobs": True}, "logprobs", "Expected `int"),
    ({"prompt_logprobs": 6}, "prompt_logprobs", "at most 5, got 6"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"echo": 1}, "echo", "Expected `bool"),
    ({"echo": False, "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "at least 0"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "from -2 to 2"),
    ({"presence_penalty": -2.5}, "presence_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
    ({"min_p": 1.1}, "min_p", "from 0 to 1"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"320": 1}}, "logit_bias", "320 is not a token id"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "Expected `int`"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "Expected `float`"),
    ({"logit_bias": [5]}, "logit_bias", "Expected `object"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"allowed_token_ids": [320]}, "allowed_token_ids", "320 is not a token id"),
    ({"bad_words": [""]}, "bad_words", "must have 1 to 256 characters"),
    ({"bad_words": [str(n) for n in range(300)]}, "bad_words", "at most 256 words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to 255"),
    ({"truncate_prompt_tokens": 256}, "truncate_prompt_tokens", "from 1 to 255"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1 for as many as fit"),
    ({"messages": []}, "messages", "belongs to /v1/chat/completions"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "belongs to /v1/chat/completions"),
]


@pytest.mark.parametrize(("body", "field", "says"), BAD_FIELDS, ids=lambda value: str(value)[:40])
async def test_an_invalid_field_is_a_400_naming_it(
    served: Serving, body: dict[str, Any], field: str, says: str
) -> None:
    error = await refused(served, **body)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert says in error["message"]


TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [5] * 256}),
    ("/v1/completions", {"prompt": "x" * 5000}),
    ("/v1/completions", {"prompt": [5] * 200, "max_tokens": 57}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 400}]}),
    ("/v1/chat/completions", {"max_completion_tokens": 500}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LONG, ids=lambda value: str(value)[:40])
async def test_clients_recognize_a_request_that_is_too_long(served: Serving, path: str, body: dict[str, Any]) -> None:
    """LiteLLM and LangChain match this text, OpenAI's SDK the code."""
    error = await refused(served, path, **body)
    assert error["message"].startswith("This model's maximum context length is 256 tokens. However, ")
    assert error["code"] == "context_length_exceeded"


LONG = "x" * 1_000_000
LONG_INPUTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {"model": LONG}, 404, f"served models: {MODEL}"),
    ("/v1/completions", {"max_tokens": LONG}, 400, "Expected `int"),
    ("/v1/completions", {"n": 10**3000}, 400, "`n` must be"),
    ("/v1/completions", {"logit_bias": {LONG: 1}}, 400, "Expected `int`"),
    ("/v1/completions", {"stream_options": LONG}, 400, "Expected `object"),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}, 400, "must be one of `assistant`"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}, 400, "not supported yet"),
    (f"/v1/models/{'x' * 20_000}", {}, 405, "Method Not Allowed"),
    (f"/{'x' * 20_000}", {}, 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), LONG_INPUTS, ids=lambda value: str(value)[:40])
async def test_an_error_repeats_at_most_the_ends_of_a_long_input(
    served: Serving, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    error = await refused(served, path, status, **body)
    assert says in error["message"]
    assert len(error["message"]) <= 401
    assert len(error["param"] or "") <= 401


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "Expected `array`"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": ["hi"]}, "messages[0]", "Expected `object`"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing required field `role`"),
    (
        {"messages": [{"role": "king", "content": "hi"}]},
        "messages[0].role",
        "Invalid enum value 'king': must be one of `assistant`, `developer`, `function`, `system`, ",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "Expected `str | array"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
        "image_url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is missing"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "Expected `object`"),
    (
        {"messages": [*CHAT, {"role": "function", "content": "a"}]},
        "messages[1].role",
        "role `function` is not supported",
    ),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call", "not supported yet"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "not supported yet"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot be combined"),
    ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs: true`"),
    ({"top_logprobs": 6, "logprobs": True}, "top_logprobs", "at most 5, got 6"),
    ({"logprobs": 3}, "logprobs", "Expected `bool"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "leave `max_tokens` out"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"echo": True}, "echo", "belongs to /v1/completions"),
    ({"best_of": 2}, "best_of", "belongs to /v1/completions"),
    ({"messages": [{"role": "user", "content": "x " * 400}]}, "messages", "maximum context length is 256 tokens"),
    ({"chat_template": "x"}, "chat_template", "--chat-template"),
    ({"max_completion_tokens": 500}, "max_completion_tokens", "leaves room for"),
    ({"prompt": "x"}, "prompt", "belongs to /v1/completions"),
]


@pytest.mark.parametrize(("body", "field", "says"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_an_invalid_chat_is_a_400_naming_the_field(
    served: Serving, body: dict[str, Any], field: str, says: str
) -> None:
    error = await refused(served, "/v1/chat/completions", **body)
    assert error["param"] == field
    assert says in error["message"]


BAD_BODIES = {
    "nothing": b"",
    "not JSON": b"{",
    "an array": b"[]",
    "a text": b'"x"',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800 x"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "a number beyond floats": b'{"prompt": "a", "temperature": 1e999}',
    "trailing text": b'{"prompt": "a"} x',
    "nested too deeply": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep variables": b'{"messages": [], "chat_template_kwargs": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_body_that_is_not_a_json_object_is_a_400(served: Serving, path: str, name: str) -> None:
    answer = await served.http.post(path, content=BAD_BODIES[name])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_unknown_model_is_a_404_and_every_served_name_is_accepted(served: Serving) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = await refused(served, path, status=404, model="other")
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert MODEL in error["message"]
    result = await complete(served, model="alias", max_tokens=1)
    assert result["model"] == MODEL


async def test_a_huge_body_is_a_413(served: Serving) -> None:
    answer = await served.http.post("/v1/completions", content=b" " * (ServerOptions().max_body_bytes + 1))
    assert answer.status_code == 413
    assert str(ServerOptions().max_body_bytes) in answer.json()["error"]["message"]


async def test_a_huge_body_without_a_length_is_a_413(served: Serving) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(33):
            yield b" " * 1024 * 1024

    answer = await served.http.post("/v1/completions", content=parts())
    assert answer.status_code == 413


async def test_a_body_with_an_enormous_declared_length_is_refused_unread(served: Serving) -> None:
    host, port = served.http.base_url.host, served.http.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in head.lower()
    writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("GET", "/v1/x", 404), ("POST", "/health", 405)]
)
async def test_a_wrong_path_or_method_is_an_error_object(served: Serving, method: str, path: str, status: int) -> None:
    answer = await served.http.request(method, path)
    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]


async def test_models_lists_every_served_name_with_its_length_and_sampling(served: Serving) -> None:
    models = (await served.http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == [MODEL, "alias"]
    assert all(model["max_model_len"] == LIMITS.max_model_length for model in models["data"])
    on_host = {"mode": "Host", "max_top_k": 0, "top_p_keeps_crossing": True}
    assert all(model["sampling"] == on_host for model in models["data"])
    assert (await served.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await served.http.get("/v1/models/other")).status_code == 404


async def test_tokenize_and_detokenize_are_inverse(served: Serving) -> None:
    text = "naïve ☃ 東京 😀"
    tokens = (await served.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert (await served.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": text}
    spelled = (await served.http.post("/tokenize", json={"prompt": "a", "return_token_strs": True})).json()
    assert spelled["token_strs"] == ["<|begin|>", "a"]
    assert (await refused(served, "/tokenize", messages=CHAT))["param"] == "prompt"
    answer = await served.http.post("/detokenize", json={"tokens": [999]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


async def test_tokenize_reads_only_as_much_text_as_could_fit(served: Serving) -> None:
    """Tokenizing megabytes would block a thread that requests need for seconds."""
    assert (await refused(served, "/tokenize", prompt="a" * 2_000_000))["param"] == "prompt"


async def test_a_chat_is_tokenized_with_exactly_one_bos(served: Serving) -> None:
    chat = (await served.http.post("/tokenize", json={"messages": CHAT})).json()["tokens"]
    bos = (await served.http.post("/tokenize", json={"prompt": ""})).json()["tokens"]
    assert chat[:1] == bos
    assert chat.count(bos[0]) == 1
    usage = (await served.http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1})).json()["usage"]
    assert usage["prompt_tokens"] == len(chat)


async def test_text_parts_are_one_text(served: Serving) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    whole = [{"role": "user", "content": "a\nb"}]
    one, two = [(await served.http.post("/tokenize", json={"messages": m})).json()["tokens"] for m in (parts, whole)]
    assert one == two


async def test_version_and_live_answer(served: Serving) -> None:
    versions = (await served.http.get("/version")).json()
    assert versions["version"] == version("neuron-serving")
    assert versions["backend"] == "torch"
    assert versions["libraries"] == {"torch": version("torch")}
    assert (await served.http.get("/live")).status_code == 200


async def test_a_chat_without_a_template_is_refused_naming_completions(model_dir: Path, tmp_path: Path) -> None:
    bare = make_model(tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    async with serving(bare) as one:
        error = await refused(one, "/v1/chat/completions")
        assert "/v1/completions" in error["message"]
        assert (await one.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_invalid_requests_leave_nothing_behind(served: Serving) -> None:
    await served.until_metric("vllm:num_requests_running", 0)
    await served.until_metric("vllm:num_requests_waiting", 0)
    assert served.engine.error is None
    assert served.front_end.gate.num_running == 0
