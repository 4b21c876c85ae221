"""Calls of tools over HTTP, whole and streamed, as OpenAI's client reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers import strict_backend
from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS, MODEL, Serving
from helpers.front_end import serving as serving_with
from helpers.tool_templates import ANSWERS, FIRST, HERMES, MISTRAL, SEARCH, SECOND, WEATHER, tool
from neuron_runtime.config import TextOptions
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

ASKED: Any = [{"role": "user", "content": "Will it rain?"}]
TOOLS: Any = [WEATHER, SEARCH]
PATH = "/v1/chat/completions"

serving = partial(
    serving_with,
    limits=replace(LIMITS, max_model_length=2048, max_step_tokens=2048, num_blocks=256),
    vocabulary_size=400,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), max_length=2048)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir, text=TextOptions(chat_template=HERMES)) as one:
        yield one


def client_of(served: Serving) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.http.base_url}/v1", api_key="any", max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(served) as one:
        yield one


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Callable[[str], None]:
    """Makes the model generate the given text."""
    tokenizer: Tokenizer = load_tokenizer(model_dir)

    def say(text: str) -> None:
        ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        monkeypatch.setattr(
            strict_backend, "next_token", lambda context, sampling, position, **_: ids[position % len(ids)]
        )

    return say


async def whole(client: AsyncOpenAI, **fields: Any) -> ChatCompletion:
    fields = {"model": MODEL, "messages": ASKED, "tools": TOOLS, **fields}
    raw = await client.chat.completions.with_raw_response.create(**fields)
    return ChatCompletion.model_validate_json(raw.text, strict=True)


async def streamed(client: AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(
        **{"model": MODEL, "messages": ASKED, "tools": TOOLS, **fields, "stream": True}
    )
    return [ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True)) async for chunk in stream]


def assembled(chunks: list[ChatCompletionChunk]) -> tuple[str, list[tuple[str, str]], str | None]:
    """Text, name and arguments of each call, finish reason; each call begins with its id, type and name."""
    text, calls, reason = "", dict[int, list[str]](), None
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            assert part.function is not None
            assert (part.index not in calls) == bool(part.id) == bool(part.function.name) == (part.type == "function")
            call = calls.setdefault(part.index, [part.function.name or "", ""])
            call[1] += part.function.arguments or ""
    assert list(calls) == list(range(len(calls)))
    return text, [(name, arguments) for name, arguments in calls.values()], reason


async def test_calls_are_returned_whole_and_streamed_alike(client: AsyncOpenAI, says: Callable[[str], None]) -> None:
    says(f"Let me look.\n{ANSWERS['hermes']}")
    expected = [("weather", FIRST), ("search", SECOND)]
    answer = (await whole(client)).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Let me look.")
    calls: Any = answer.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == expected
    assert len({call.id for call in calls}) == 2
    for more in ({}, {"logprobs": True}, {"stream_options": {"include_usage": True}}):
        assert assembled(await streamed(client, **more)) == ("Let me look.", expected, "tool_calls")


async def test_arguments_arrive_token_by_token(model_dir: Path, says: Callable[[str], None]) -> None:
    says('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>')
    text = TextOptions(chat_template=HERMES)
    async with serving(model_dir, text=text, paced=True) as served, client_of(served) as client:
        asked = asyncio.create_task(streamed(client))
        await served.answer_token_by_token(asked)
        chunks = asked.result()
    assert assembled(chunks) == ("", [("weather", '{"city": "Oslo"}')], "tool_calls")
    parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert len(parts) > 4


async def test_one_call_is_returned_without_parallel_calls(client: AsyncOpenAI, says: Callable[[str], None]) -> None:
    says(ANSWERS["hermes"])
    answer = (await whole(client, parallel_tool_calls=False)).choices[0]
    assert [call.function.name for call in answer.message.tool_calls or ()] == ["weather"]  # type: ignore[union-attr]
    assert answer.message.content is None
    assert assembled(await streamed(client, parallel_tool_calls=False))[1] == [("weather", FIRST)]


async def test_text_without_calls_is_an_answer_as_usual(client: AsyncOpenAI, says: Callable[[str], None]) -> None:
    says("It rains.")
    answer = (await whole(client)).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("stop", "It rains.", None)
    says(ANSWERS["hermes"])
    answer = (await whole(client, tool_choice="none")).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", ANSWERS["hermes"])


async def test_a_call_that_is_cut_ends_with_length(client: AsyncOpenAI, says: Callable[[str], None]) -> None:
    says(ANSWERS["hermes"])
    for answers in (await whole(client, max_tokens=30, n=2)).choices:
        assert answers.finish_reason == "length"
        (call,) = answers.message.tool_calls or ()
        assert FIRST.startswith(call.function.arguments)  # type: ignore[union-attr]
    assert assembled(await streamed(client, max_tokens=30))[2] == "length"


async def test_reasoning_text_and_calls_come_in_this_order(model_dir: Path, says: Callable[[str], None]) -> None:
    says(f"<think>I look.</think>\n\nLook:\n{ANSWERS['hermes']}")
    text = TextOptions(chat_template=HERMES, reasoning_parser="qwen3")
    async with serving(model_dir, text=text) as served, client_of(served) as client:
        message: Any = (await whole(client)).choices[0].message
        assert (message.reasoning, message.content, len(message.tool_calls)) == ("I look.", "\n\nLook:", 2)
        chunks = await streamed(client)
    assert assembled(chunks)[0] == "\n\nLook:"
    deltas = [choice.delta.model_dump(exclude_none=True) for chunk in chunks for choice in chunk.choices]
    order = [name for delta in deltas for name in ("reasoning", "content", "tool_calls") if delta.get(name)]
    assert order == sorted(order, key=("reasoning", "content", "tool_calls").index)


async def test_an_agent_sends_the_calls_and_their_results_back(
    served: Serving, client: AsyncOpenAI, says: Callable[[str], None]
) -> None:
    says(ANSWERS["hermes"])
    message = (await whole(client)).choices[0].message
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {at}"}
        for at, call in enumerate(message.tool_calls or ())
    ]
    history = [*ASKED, message.model_dump(), *results]
    body = {"messages": history, "tools": TOOLS}
    ids = (await served.http.post("/tokenize", json=body)).json()["tokens"]
    prompt = (await served.http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    assert json.dumps(json.loads(FIRST), ensure_ascii=False) in prompt
    assert prompt.index("weather") < prompt.index("result 0") < prompt.index("result 1")
    says("It rains.")
    assert (await whole(client, messages=history)).choices[0].message.content == "It rains."


async def test_marks_that_the_tokenizer_hides_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_chat_model(tmp_path / "model", max_length=2048)
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"added_tokens_decoder": {"400": {"content": "[TOOL_CALLS]", "special": True}}}))
    tokenizer = load_tokenizer(folder, MISTRAL)
    assert "[TOOL_CALLS]" in tokenizer.hidden_tokens
    ids = (*tokenizer.encode(ANSWERS["mistral"], add_special_tokens=False), tokenizer.eos_token_id)
    monkeypatch.setattr(strict_backend, "next_token", lambda context, sampling, position, **_: ids[position % len(ids)])
    async with serving(folder, text=TextOptions(chat_template=MISTRAL)) as served, client_of(served) as client:
        answer = (await whole(client)).choices[0]
        assert answer.message.content is None
        assert [call.function.name for call in answer.message.tool_calls or ()] == ["weather", "search"]  # type: ignore[union-attr]
        assert all(len(call.id) == 9 and call.id.isalnum() for call in answer.message.tool_calls or ())


async def test_the_parser_of_the_configuration_wins(model_dir: Path, says: Callable[[str], None]) -> None:
    says(ANSWERS["llama3_json"])
    text = TextOptions(chat_template=HERMES, tool_call_parser="llama3_json")
    async with serving(model_dir, text=text) as served, client_of(served) as client:
        assert len((await whole(client)).choices[0].message.tool_calls or ()) == 2


FUNCTION = WEATHER["function"]


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "two tools with the name `weather`"),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools", "at most 128 tools, got 129"),
        ({"tools": [tool("f", a={"description": "a" * 2**20})]}, "tools", "at most 1048576 bytes"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [tool("a" * 129)]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [tool("")]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be `function`, got `web_search`"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        (
            {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": 5}}]},
            "tools[0].function.parameters",
            "",
        ),
        ({"tools": {}}, "tools", "array"),
        ({"tool_choice": "always"}, "tool_choice", "always"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "bool"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]", "object"),
    ],
)
async def test_bad_tools_are_refused_by_name(served: Serving, fields: Any, field: str, says: str) -> None:
    answer = await served.http.post(PATH, json={"messages": ASKED, "tools": TOOLS, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert says in error["message"]


async def test_tools_of_a_model_that_knows_none_are_refused_only_if_one_could_be_called(model_dir: Path) -> None:
    async with serving(model_dir) as served, client_of(served) as client:
        with pytest.raises(openai.BadRequestError, match="knows no tools") as refused:
            await whole(client)
        assert refused.value.param == "tools"
        for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": [], "tool_choice": "auto"}):
            assert (await whole(client, max_tokens=2, **fields)).choices


async def test_tools_of_a_model_whose_calls_nobody_can_read_are_refused(model_dir: Path) -> None:
    text = TextOptions(chat_template="{{ tools }}{{ messages }}")
    async with serving(model_dir, text=text) as served, client_of(served) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await whole(client)
