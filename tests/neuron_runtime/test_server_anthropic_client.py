"""Anthropic's client against /v1/messages; its types, which are generated from the schema, validate the responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anthropic
import pydantic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS, MODEL, Serving, make_model, serving
from helpers.scripted_text import sayer
from helpers.tool_templates import ANSWERS, FIRST, HERMES, SEARCH, SECOND, WEATHER
from neuron_runtime.config import ServerOptions, TextOptions

CHAT: Any = [{"role": "user", "content": "What is a device?"}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": CHAT, "extra_body": {"temperature": 0}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir) as one:
        yield one


def client_of(served: Serving, **changes: Any) -> AsyncAnthropic:
    return AsyncAnthropic(**{"base_url": str(served.http.base_url), "api_key": "any", "max_retries": 0, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Serving) -> AsyncIterator[AsyncAnthropic]:
    async with client_of(served) as one:
        yield one


async def message(client: AsyncAnthropic, **asked: Any) -> Message:
    """A whole answer, validated strictly."""
    raw = await client.messages.with_raw_response.create(**{**ASK, **asked})
    return Message.model_validate_json(raw.http_response.text, strict=True)


async def streamed(client: AsyncAnthropic, **asked: Any) -> list[RawMessageStreamEvent]:
    """The events of an answer, each validated strictly."""
    stream = await client.messages.create(**{**ASK, **asked, "stream": True})
    adapter: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    return [adapter.validate_json(event.model_dump_json(exclude_unset=True), strict=True) async for event in stream]


async def chat_text(served: Serving, messages: list[dict[str, Any]], **asked: Any) -> str:
    """What /v1/chat/completions answers."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, **asked}
    answer = (await served.http.post("/v1/chat/completions", json=body)).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_a_message_is_the_answer_of_the_same_chat(client: AsyncAnthropic, served: Serving) -> None:
    answer = await message(client, system="Be short.")
    expected = await chat_text(served, [{"role": "system", "content": "Be short."}, *CHAT])
    assert [block.type for block in answer.content] == ["text"]
    assert text_of(answer) == expected
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "max_tokens")
    assert answer.id.startswith("msg_")
    assert answer.usage.output_tokens == 24


async def test_texts_and_blocks_of_text_are_the_same_prompt(client: AsyncAnthropic) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "What is a device?", "cache_control": None}]}]
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    assert text_of(await message(client, system=system, messages=blocks)) == text_of(
        await message(client, system="Be short.")
    )


async def test_a_stream_has_the_events_in_order_and_the_same_text(client: AsyncAnthropic) -> None:
    events = await streamed(client)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")  # type: ignore[union-attr]
    whole = await message(client)
    assert text == text_of(whole)
    start, end = events[0], events[-2]
    assert start.type == "message_start"
    assert start.message.content == []
    assert start.message.stop_reason is None
    assert end.type == "message_delta"
    assert end.delta.stop_reason == "max_tokens"
    assert end.usage.output_tokens == 24


async def test_the_clients_own_stream_helper_collects_the_message(client: AsyncAnthropic) -> None:
    async with client.messages.stream(**ASK) as stream:
        collected = await stream.get_final_message()
    assert text_of(collected) == text_of(await message(client))
    assert collected.stop_reason == "max_tokens"


async def test_a_stop_sequence_ends_the_answer_and_is_named(client: AsyncAnthropic) -> None:
    whole = text_of(await message(client))
    sequence = whole[4:6]
    stopped = await message(client, stop_sequences=[sequence])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", sequence)
    assert text_of(stopped) == whole[: whole.index(sequence)]
    end = (await streamed(client, stop_sequences=[sequence]))[-2]
    assert end.type == "message_delta"
    assert (end.delta.stop_reason, end.delta.stop_sequence) == ("stop_sequence", sequence)


async def test_the_counted_tokens_are_those_of_the_prompt(client: AsyncAnthropic) -> None:
    chat: dict[str, Any] = {"messages": CHAT, "system": "Be short."}
    counted = await client.messages.count_tokens(model=MODEL, **chat)
    usage = (await message(client, **chat)).usage
    assert usage.cache_read_input_tokens is not None
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_cached_tokens_of_the_prompt_are_counted_apart(model_dir: Path) -> None:
    long = [{"role": "user", "content": "core " * 40}]
    limits = replace(LIMITS, shares_prefixes=True)
    async with serving(model_dir, limits=limits) as sharing, client_of(sharing) as client:
        first = (await message(client, messages=long)).usage
        again = (await message(client, messages=long)).usage
    assert again.cache_read_input_tokens is not None
    assert again.cache_read_input_tokens > 0
    assert first.input_tokens == again.input_tokens + again.cache_read_input_tokens


async def test_an_answer_continues_a_last_message_of_the_assistant(client: AsyncAnthropic, served: Serving) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "A device holds"}]
    expected = await chat_text(served, chat, continue_final_message=True)
    assert text_of(await message(client, messages=chat)) == expected


async def test_reasoning_is_a_thinking_block_and_can_be_sent_back(model_dir: Path) -> None:
    text = TextOptions(reasoning_parser="deepseek_r1")
    async with serving(model_dir, text=text) as thinking, client_of(thinking) as client:
        answer = await message(client)
        events = await streamed(client)
        content = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
        again = await message(client, messages=[*CHAT, {"role": "assistant", "content": content}, *CHAT])
    assert [block.type for block in answer.content] == ["thinking"]
    assert answer.content[0].thinking  # type: ignore[union-attr]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"thinking_delta"}
    assert "".join(delta.thinking for delta in deltas) == answer.content[0].thinking  # type: ignore[union-attr]
    assert again.content


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_tokens": 0}, "`max_tokens` must be at least 1"),
        ({"max_tokens": 1000}, "`max_tokens` is 1000"),
        ({"stop_sequences": ["x" * 2000]}, "`stop_sequences` strings"),
        ({"temperature": -1}, "`temperature`"),
        ({"messages": []}, "`messages` must not be empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "`messages[0].role`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "`messages[0].content[0].source` is missing",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`messages[0].content[0].text` is missing"),
        ({"system": [{"type": "image"}]}, "`system[0].type`"),
        ({"container": "c"}, "`container`"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "`tools[0].type`"),
        ({"tools": [{"name": "no spaces"}]}, "`tools[0].name`"),
        ({"tool_choice": {"type": "tool"}}, "`tool_choice.name` is missing"),
        ({"tools": [{"name": "a"}], "tool_choice": {"type": "tool", "name": "b"}}, "`tool_choice.name` is `b`"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id` is missing"),
    ],
)
async def test_a_refused_field_is_named_in_an_error_of_anthropics_shape(
    client: AsyncAnthropic, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**{**ASK, "extra_body": asked})
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]
    assert body["request_id"] == refused.value.response.headers["x-request-id"]


TOOLS: Any = [
    {"name": one["function"]["name"], "description": "Does it.", "input_schema": one["function"]["parameters"]}
    for one in (WEATHER, SEARCH)
]


@pytest.fixture(scope="module")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), max_length=2048)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(long_model_dir: Path) -> AsyncIterator[Serving]:
    limits = replace(LIMITS, max_model_length=2048, max_step_tokens=2048, num_blocks=256)
    text = TextOptions(chat_template=HERMES)
    async with serving(long_model_dir, limits=limits, vocabulary_size=400, text=text) as one:
        yield one


async def test_calls_of_tools_are_blocks_whole_and_streamed(
    agent: Serving, long_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sayer(monkeypatch, long_model_dir)(f"Let me look.\n{ANSWERS['hermes']}")
    async with client_of(agent) as client:
        answer = await message(client, tools=TOOLS, max_tokens=500)
        events = await streamed(client, tools=TOOLS, max_tokens=500)
        async with client.messages.stream(**{**ASK, "tools": TOOLS, "max_tokens": 500}) as stream:
            collected = await stream.get_final_message()
    assert (answer.stop_reason, text_of(answer)) == ("tool_use", "Let me look.")
    expected = [("weather", json.loads(FIRST)), ("search", json.loads(SECOND))]
    for found in (answer, collected):
        assert [(block.name, block.input) for block in found.content if block.type == "tool_use"] == expected
    starts = [event for event in events if event.type == "content_block_start"]
    assert [(event.index, event.content_block.type) for event in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert starts[1].content_block.input == {}  # type: ignore[union-attr]


async def test_results_of_tools_are_sent_back_as_those_of_a_chat(agent: Serving) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "no"}]}
    messages: Any = [
        *CHAT,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    as_chat: Any = [
        *CHAT,
        {"role": "assistant", "content": "Let me look.", "tool_calls": [{"id": "a", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "no"},
        {"role": "user", "content": "And?"},
    ]
    tools = [
        {"type": "function", "function": {**one["function"], "description": "Does it."}} for one in (WEATHER, SEARCH)
    ]
    async with client_of(agent) as client:
        answer = await message(client, tools=TOOLS, messages=messages)
        counted = await client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS)
    assert text_of(answer) == await chat_text(agent, as_chat, tools=tools)
    assert counted.input_tokens == answer.usage.input_tokens


TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Bergen"]}},
    "required": ["town"],
    "additionalProperties": False,
}


class Town(pydantic.BaseModel):
    town: Literal["Oslo", "Bergen"]


async def test_an_answer_keeps_to_the_format_of_its_output(client: AsyncAnthropic) -> None:
    config: Any = {"effort": "high", "format": {"type": "json_schema", "schema": TOWN}}
    answer = await message(client, output_config=config, max_tokens=100)
    assert Town.model_validate_json(text_of(answer))
    parsed = await client.messages.parse(**{**ASK, "max_tokens": 100}, output_format=Town)
    assert isinstance(parsed.parsed_output, Town)
    with pytest.raises(anthropic.BadRequestError, match="cannot be compiled"):
        await message(client, output_config={"format": {"type": "json_schema", "schema": {"type": "x"}}})


async def test_effort_is_a_variable_of_the_template(long_model_dir: Path) -> None:
    template = "{{ messages[0].content }}{% if reasoning_effort == 'low' %} Be quick, and think of nothing.{% endif %}"
    text = TextOptions(chat_template=template)
    async with serving(long_model_dir, vocabulary_size=400, text=text) as one, client_of(one) as client:
        low, high = [
            await client.messages.count_tokens(model=MODEL, messages=CHAT, output_config={"effort": effort})
            for effort in ("low", "high")
        ]
    assert low.input_tokens > high.input_tokens


def claude_code(mark: str) -> dict[str, Any]:
    """A body as Claude Code sends it; `mark` is other with each request."""
    header = f"x-anthropic-billing-header: cc_version=2.1.100.{mark}; cc_entrypoint=cli; cch={mark};"
    kept = {"cache_control": {"type": "ephemeral"}}
    return {
        "max_tokens": 8,
        "temperature": 1,
        "system": [{"type": "text", "text": header}, {"type": "text", "text": "Follow the rules. " * 40, **kept}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **kept}]}],
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "u"},
    }


async def test_requests_of_claude_code_share_a_cached_prefix(long_model_dir: Path) -> None:
    limits = replace(LIMITS, max_model_length=2048, max_step_tokens=2048, num_blocks=256, shares_prefixes=True)
    text = TextOptions(chat_template=HERMES)
    async with serving(long_model_dir, limits=limits, vocabulary_size=400, text=text) as one:
        answers = [await one.http.post("/v1/messages?beta=true", json=claude_code(mark)) for mark in ("aaaaa", "bbbbb")]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (answer.json()["usage"] for answer in answers)
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > second["input_tokens"]


async def test_an_unknown_model_is_not_found(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**{**ASK, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="other", messages=CHAT)


async def test_both_headers_carry_the_key(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right")
    async with serving(model_dir, api_key_file=tmp_path / "keys") as guarded:
        for changes in ({"api_key": "right"}, {"api_key": None, "auth_token": "right"}):
            async with client_of(guarded, **changes) as client:
                assert (await message(client)).content
        async with client_of(guarded, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**ASK)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert "wrong" not in refused.value.message


async def test_a_large_body_is_too_large(model_dir: Path) -> None:
    options = ServerOptions(access_log=False, max_body_bytes=1000)
    async with serving(model_dir, options=options) as small, client_of(small) as client:
        with pytest.raises(anthropic.RequestTooLargeError) as refused:
            await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 1500}]})
    assert refused.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]


async def test_a_server_that_is_not_ready_is_overloaded(model_dir: Path) -> None:
    async with serving(model_dir, ready=False) as starting, client_of(starting) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**ASK)
    assert refused.value.status_code == 529
    assert refused.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert int(refused.value.response.headers["retry-after"]) >= 1


async def test_a_full_queue_is_a_rate_limit(model_dir: Path) -> None:
    async with serving(model_dir, paced=True, max_queued=1) as paced, client_of(paced) as client:
        asked = [asyncio.create_task(client.messages.create(**ASK)) for _ in range(8)]
        await paced.until(lambda: any(one.done() for one in asked))
        paced.unpace()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in answers if isinstance(one, BaseException)]
    assert refused
    assert all(isinstance(one, anthropic.RateLimitError) for one in refused)


async def test_a_stream_that_fails_ends_with_an_error_event(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as paced:
        body = {"max_tokens": 24, "messages": CHAT, "stream": True}
        asked = asyncio.create_task(paced.http.post("/v1/messages", json=body))
        await paced.until_metric("vllm:time_to_first_token_seconds_count", 1)
        await paced.replace_engine("the device failed")
        events = [event for event in (await asked).text.split("\n\n") if event]
    assert events[0].startswith("event: message_start\n")
    name, _, last = events[-1].partition("\ndata: ")
    assert name == "event: error"
    error = json.loads(last)["error"]
    assert error["type"] == "overloaded_error"
    assert "the device failed" in error["message"]
