"""OpenAI's client against /v1/responses; its types, which are generated from the schema, validate the responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS, MODEL, Serving, serving
from helpers.scripted_text import sayer
from helpers.tool_templates import ANSWERS, FIRST, HERMES, SEARCH, SECOND, WEATHER
from neuron_runtime.config import TextOptions

QUESTION = "What is a device?"
ASK: dict[str, Any] = {"model": MODEL, "max_output_tokens": 24, "input": QUESTION, "temperature": 0}
TOOLS: Any = [{"type": "function", **one["function"], "strict": False} for one in (WEATHER, SEARCH)]
LONG = replace(LIMITS, max_model_length=2048, max_step_tokens=2048, num_blocks=256)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), max_length=2048)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    text = TextOptions(chat_template=HERMES)
    async with serving(model_dir, limits=LONG, vocabulary_size=400, text=text) as one:
        yield one


def client_of(served: Serving) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.http.base_url}/v1", api_key="any", max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(served) as one:
        yield one


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Callable[[str], None]:
    return sayer(monkeypatch, model_dir)


async def respond(client: AsyncOpenAI, **asked: Any) -> Response:
    """A whole answer, validated strictly but for times, which are integers here."""
    raw = await client.responses.with_raw_response.create(**{**ASK, **asked})
    return Response.model_validate_json(raw.text)


async def streamed(client: AsyncOpenAI, **asked: Any) -> list[ResponseStreamEvent]:
    """The events of an answer, each validated, with numbers in order."""
    stream = await client.responses.create(**{**ASK, **asked, "stream": True})
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(Annotated[ResponseStreamEvent, Field(discriminator="type")])
    events = [adapter.validate_json(event.model_dump_json(exclude_unset=True)) async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def chat(served: Serving, messages: list[dict[str, Any]], **asked: Any) -> dict[str, Any]:
    """What /v1/chat/completions answers."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, **asked}
    answer: dict[str, Any] = (await served.http.post("/v1/chat/completions", json=body)).json()
    return answer


async def chat_text(served: Serving, messages: list[dict[str, Any]], **asked: Any) -> str:
    text: str = (await chat(served, messages, **asked))["choices"][0]["message"]["content"]
    return text


async def test_a_response_is_the_answer_of_the_same_chat(client: AsyncOpenAI, served: Serving) -> None:
    answer = await respond(client, instructions="Be short.", metadata={"of": "a test"})
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    assert answer.output_text == await chat_text(served, messages)
    assert (answer.status, answer.model, answer.metadata) == ("incomplete", MODEL, {"of": "a test"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in answer.output] == ["message"]
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (24, 0)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 24


async def test_items_are_the_messages_of_a_chat(client: AsyncOpenAI, served: Serving) -> None:
    items: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "A machine.", "annotations": []}]},
        {"role": "user", "content": "And a core?"},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "A machine."},
        {"role": "user", "content": "And a core?"},
    ]
    assert (await respond(client, input=items)).output_text == await chat_text(served, messages)


async def test_a_stream_has_the_events_in_order_and_the_same_text(client: AsyncOpenAI) -> None:
    events = await streamed(client)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    whole = await respond(client)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    assert {getattr(event, "item_id", last.response.output[0].id) for event in events} == {last.response.output[0].id}


async def test_the_clients_own_stream_helper_collects_the_response(
    client: AsyncOpenAI, says: Callable[[str], None]
) -> None:
    says("A machine.")
    async with client.responses.stream(**ASK) as stream:
        collected = await stream.get_final_response()
    assert (collected.output_text, collected.status) == ("A machine.", "completed")


async def test_log_probabilities_are_those_of_the_chat(client: AsyncOpenAI, served: Serving) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await respond(client, **asked)
    expected = await chat(served, [{"role": "user", "content": QUESTION}], logprobs=True, top_logprobs=2)
    found = json.loads(answer.output[0].model_dump_json())["content"][0]["logprobs"]
    assert found == expected["choices"][0]["logprobs"]["content"]
    events = await streamed(client, **asked)
    parts = [part for event in events if event.type == "response.output_text.delta" for part in event.logprobs]
    assert [part.token for part in parts] == [one["token"] for one in found]


async def test_calls_of_functions_are_items_whole_and_streamed(
    client: AsyncOpenAI, says: Callable[[str], None]
) -> None:
    says(f"Let me look.\n{ANSWERS['hermes']}")
    asked: Any = {"tools": TOOLS, "max_output_tokens": 500}
    answer = await respond(client, **asked)
    assert (answer.status, answer.output_text) == ("completed", "Let me look.")
    calls: Any = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("weather", FIRST), ("search", SECOND)]
    assert [tool.type for tool in answer.tools] == ["function", "function"]
    events = await streamed(client, **asked)
    last: Any = events[-1]
    assert [item.type for item in last.response.output] == ["message", "function_call", "function_call"]
    for index, call in enumerate(calls, start=1):
        of_call: list[Any] = [event for event in events if getattr(event, "output_index", None) == index]
        assert of_call[0].type == "response.output_item.added"
        assert (of_call[0].item.arguments, of_call[0].item.status) == ("", "in_progress")
        assert "".join(event.delta for event in of_call[1:-2]) == call.arguments
        assert of_call[-2].type == "response.function_call_arguments.done"
        assert (of_call[-2].name, of_call[-2].arguments) == (call.name, call.arguments)
        assert (of_call[-1].type, of_call[-1].item.status) == ("response.output_item.done", "completed")


async def test_calls_and_results_are_sent_back_as_those_of_a_chat(client: AsyncOpenAI, served: Serving) -> None:
    items: Any = [
        {"role": "user", "content": "Will it rain?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Let me look."},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rome"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "b", "name": "search", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "no"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "nothing"}]},
    ]
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"id": "b", "type": "function", "function": {"name": "search", "arguments": "{}"}},
    ]
    messages = [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": "Let me look.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "no"},
        {"role": "tool", "tool_call_id": "b", "content": "nothing"},
    ]
    tools: Any = [WEATHER, SEARCH]
    answer = await respond(client, input=items, tools=TOOLS)
    expected = await chat(served, messages, tools=tools)
    assert answer.output_text == expected["choices"][0]["message"]["content"]
    assert answer.usage is not None
    assert answer.usage.input_tokens == expected["usage"]["prompt_tokens"]


async def test_reasoning_is_an_item_of_its_own(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sayer(monkeypatch, model_dir)("Hm.</think>A machine.")
    text = TextOptions(reasoning_parser="deepseek_r1")
    serving_it = serving(model_dir, limits=LONG, vocabulary_size=400, text=text)
    async with serving_it as thinking, client_of(thinking) as client:
        answer = await respond(client, include=["message.output_text.logprobs"])
        events = await streamed(client)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    reasoning, message = (json.loads(item.model_dump_json()) for item in answer.output)
    assert [part["text"] for part in reasoning["content"]] == ["Hm."]
    assert answer.output_text == "A machine."
    tokens = "".join(one["token"] for one in message["content"][0]["logprobs"])
    assert tokens.startswith("A machine.")
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm."


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"store": True}, "`store`"),
        ({"previous_response_id": "resp_1"}, "`previous_response_id`"),
        ({"conversation": "c"}, "`conversation`"),
        ({"background": True}, "`background`"),
        ({"max_output_tokens": 0}, "`max_output_tokens` must be at least 1"),
        ({"max_output_tokens": 10000}, "`max_output_tokens` is 10000"),
        ({"input": [{"role": "user"}]}, "`input[0].content` is missing"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "nothing is stored"),
        ({"input": [{"type": "computer_call"}]}, "`input[0].type`"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "`input[0].name` is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "`input[0].content[0].image_url` is missing",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "`text.format.type`"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "`text.format.schema` is required"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "`text.format` cannot be compiled"),
        ({"tools": [{"type": "web_search"}]}, "`tools[0].type`"),
        ({"tools": [{"type": "function", "name": "no spaces"}]}, "`tools[0].name`"),
        (
            {"tools": [{"type": "function", "name": "a"}], "tool_choice": {"type": "function", "name": "b"}},
            "`tool_choice.name` is `b`",
        ),
    ],
)
async def test_a_refused_field_is_named(client: AsyncOpenAI, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**{**ASK, "extra_body": asked})
    assert words in refused.value.message
    assert (refused.value.param or "").partition("[")[0].partition(".")[0] in asked


class Machine(BaseModel):
    kind: Literal["device", "core"]
    count: int = Field(ge=1, le=64)


async def test_an_answer_is_parsed_into_a_class(client: AsyncOpenAI) -> None:
    answer = await client.responses.parse(**{**ASK, "max_output_tokens": 200}, text_format=Machine)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Machine)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


async def test_what_clients_send_for_every_model_is_accepted(client: AsyncOpenAI) -> None:
    answer = await respond(
        client,
        store=False,
        truncation="auto",
        include=["reasoning.encrypted_content"],
        prompt_cache_key="key",
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
    )
    assert answer.output_text
    assert answer.store is False  # type: ignore[attr-defined]


SPACE: Any = {"type": "namespace", "name": "mcp__sky", "description": "The sky", "tools": [TOOLS[1]]}
CALLED = {"type": "function_call", "name": "mcp__sky__search", "arguments": "{}"}
HOSTED: Any = [
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
    },
]


async def test_a_function_of_a_namespace_is_called_by_its_name_and_comes_back(
    client: AsyncOpenAI, says: Callable[[str], None]
) -> None:
    says('<tool_call>{"name": "mcp__sky__search", "arguments": {}}</tool_call>')
    asked: Any = {"tools": [HOSTED[0], TOOLS[0], SPACE, *HOSTED[1:]], "max_output_tokens": 500}
    answer = await respond(client, **asked)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name, call.arguments) == ("mcp__sky", "search", "{}")
    last: Any = (await streamed(client, **asked))[-1]
    assert [(item.namespace, item.name) for item in last.response.output] == [("mcp__sky", "search")]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "clouds"}
    first = {"role": "user", "content": "Look."}
    sent_back, otherwise_named = [
        await respond(client, tools=[SPACE], input=[first, {**called, "call_id": call.call_id}, result])
        for called in (call.model_dump(exclude_none=True), CALLED)
    ]
    assert sent_back.usage is not None
    assert otherwise_named.usage is not None
    assert sent_back.usage.input_tokens == otherwise_named.usage.input_tokens


async def test_an_empty_input_is_an_empty_message(client: AsyncOpenAI) -> None:
    empty = await respond(client, input=[])
    assert empty.usage == (await respond(client, input="")).usage


async def test_a_forced_call_has_no_text_that_keeps_to_a_format(client: AsyncOpenAI) -> None:
    """Instructor, in its mode for Responses, sends both."""
    choice: Any = {"type": "function", "name": "weather"}
    form: Any = {"format": {"type": "json_schema", "name": "weather", "schema": {"type": "integer"}}}
    answer = await respond(client, tools=TOOLS, tool_choice=choice, text=form, max_output_tokens=500)
    assert [item.type for item in answer.output] == ["function_call"]


async def test_a_stream_that_fails_ends_with_response_failed(model_dir: Path) -> None:
    async with serving(model_dir, paced=True, limits=LONG, vocabulary_size=400) as paced:
        asked = asyncio.create_task(paced.http.post("/v1/responses", json={**ASK, "stream": True}))
        await paced.until_metric("vllm:time_to_first_token_seconds_count", 1)
        await paced.replace_engine("the device failed")
        events = [json.loads(event.partition("data: ")[2]) for event in (await asked).text.split("\n\n") if event]
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "the device failed" in events[-2]["message"]
    assert events[-1]["response"]["status"] == "failed"
    assert "the device failed" in events[-1]["response"]["error"]["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
