"""Answers that must call a tool: `required` and a named tool in each API, whole and streamed. The model is random, so
whatever fits was forced."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS, MODEL, Serving, serving
from helpers.tool_templates import HERMES
from neuron_runtime.config import TextOptions

ASKED: Any = [{"role": "user", "content": "Will it rain?"}]
UNIT = {"enum": ["C", "F"]}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": UNIT},
}
SEARCH = {
    "type": "object",
    "properties": {"num": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["num"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "search": SEARCH}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
NAMED: Any = {"type": "function", "function": {"name": "search"}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), max_length=4096)


def limits_of(sampling: Any) -> Any:
    return replace(LIMITS, max_model_length=4096, max_step_tokens=4096, num_blocks=1024, sampling=sampling)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    options = TextOptions(chat_template=HERMES)
    async with serving(model_dir, limits=limits_of("Host"), vocabulary_size=400, text=options) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.http.base_url}/v1", api_key="any", max_retries=0) as one:
        yield one


def check_fits(name: str, arguments: str | dict[str, Any]) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name == "weather":
        assert set(given) == {"city", "unit"}
        assert given["city"] in ("Oslo", "Bergen")
        assert given["unit"] in ("C", "F")
    else:
        assert name == "search"
        assert given.keys() == {"num"}
        assert 1 <= given["num"] <= 9


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", range(3))
async def test_a_forced_answer_is_calls_whose_arguments_fit(client: AsyncOpenAI, choice: Any, seed: int) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=TOOLS, tool_choice=choice, seed=seed, temperature=1
    )
    said = answer.choices[0]
    calls = said.message.tool_calls or []
    assert (said.finish_reason, said.message.content) == ("tool_calls", None)
    assert calls
    for call in calls:
        assert call.type == "function"
        check_fits(call.function.name, call.function.arguments)
    if choice is NAMED:
        assert [call.function.name for call in calls if call.type == "function"] == ["search"]


async def test_without_parallel_calls_a_forced_answer_is_one_call(client: AsyncOpenAI) -> None:
    for seed in range(4):
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(answer.choices[0].message.tool_calls or ()) == 1


async def test_forced_calls_are_streamed_as_they_are_answered_whole(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "seed": 5}
    whole = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls or []
    parts: dict[int, list[str]] = {}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                parts.setdefault(piece.index, [piece.function.name or ""]).append(piece.function.arguments or "")
    expected = [(call.function.name, call.function.arguments) for call in whole if call.type == "function"]
    assert [(name, "".join(rest)) for name, *rest in parts.values()] == expected


async def test_a_tool_without_parameters_is_called_with_an_empty_object(client: AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now"}}]
    answer = await client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=tools, tool_choice="required", seed=1
    )
    calls = answer.choices[0].message.tool_calls or []
    assert calls
    for call in calls:
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "search"}])
async def test_messages_force_calls(served: Serving, choice: Any) -> None:
    tools: Any = [{"name": name, "input_schema": SCHEMAS[name]} for name in SCHEMAS]
    async with AsyncAnthropic(base_url=str(served.http.base_url), api_key="any", max_retries=0) as client:
        answer = await client.messages.create(
            model=MODEL, max_tokens=2000, messages=ASKED, tools=tools, tool_choice=choice
        )
    assert answer.stop_reason == "tool_use"
    assert answer.content
    for block in answer.content:
        assert block.type == "tool_use"
        check_fits(block.name, block.input)
        assert choice["type"] == "any" or block.name == "search"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "search"}])
async def test_responses_force_calls(client: AsyncOpenAI, choice: Any) -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMAS[name], "strict": True} for name in SCHEMAS]
    answer = await client.responses.create(
        model=MODEL, input="Will it rain?", tools=tools, tool_choice=choice, store=False
    )
    assert answer.status == "completed"
    assert answer.output
    for item in answer.output:
        assert item.type == "function_call"
        check_fits(item.name, item.arguments)
        assert choice == "required" or item.name == "search"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": None}, "`tool_choice` needs `tools`", "tool_choice"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        "`tool_choice.function.name` is `other`, which is none of `tools`",
        "tool_choice.function.name",
    ),
    (
        {"structured_outputs": {"json_object": True}},
        "`tool_choice` and `structured_outputs.json_object` are two forms of one answer: leave one out",
        "tool_choice",
    ),
    (
        {"min_tokens": 3},
        "`min_tokens` contradicts `tool_choice`: the answer ends when the form is complete",
        "min_tokens",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/none"}}}]},
        "`tool_choice` cannot be compiled: #/$defs/f: ",
        "tool_choice",
    ),
    (
        {"tools": [*TOOLS, {"type": "function", "function": {"name": "drop", "parameters": {"uniqueItems": True}}}]},
        '`tool_choice` cannot be compiled: #/$defs/drop: Unimplemented keys: ["uniqueItems"]',
        "tool_choice",
    ),
]


async def post(served: Serving, **fields: Any) -> httpx.Response:
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", **fields}
    return await served.http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(("fields", "message", "field"), WRONG)
async def test_a_call_that_cannot_be_forced_is_refused(
    served: Serving, fields: dict[str, Any], message: str, field: str
) -> None:
    answer = await post(served, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == field


async def test_a_server_that_samples_on_the_device_refuses_by_name(model_dir: Path) -> None:
    options = TextOptions(chat_template=HERMES)
    async with serving(model_dir, limits=limits_of("Device"), vocabulary_size=400, text=options) as one:
        answer = await post(one)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
