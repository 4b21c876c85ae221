"""Strict functions that the model may call: its calls are kept to their schemas, in each API.

The model is scripted, and would break them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer as FastTokenizer

from helpers import strict_backend
from helpers.chat_model import write_chat_model
from helpers.front_end import LIMITS, Serving, serving
from helpers.scripts import next_of, script
from helpers.tool_templates import HERMES, LLAMA, SEARCH
from neuron_runtime.config import TextOptions
from neuron_runtime.text.tokenizer import load_tokenizer

CHATS = "/v1/chat/completions"
ASKED: Any = [{"role": "user", "content": "Will it rain?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Bergen"]}},
}
FUNCTION = {"name": "weather", "parameters": PARAMETERS, "strict": True}
STRICT: Any = {"type": "function", "function": FUNCTION}
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo Bay", "days": 5000}}\n</tool_call>'
FREE = '<tool_call>\n{"name": "search", "arguments": {"anything": [1, "x"]}}\n</tool_call>'
SAID = f"I look. {WRONG}\n{FREE}"

pytestmark = pytest.mark.asyncio(loop_scope="module")

limits = replace(LIMITS, max_model_length=4096, max_step_tokens=4096, num_blocks=512)
serves = partial(serving, vocabulary_size=400)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), max_length=4096)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serves(model_dir, limits=limits, text=TextOptions(chat_template=HERMES)) as one:
        yield one


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Callable[[str], None]:
    tokenizer = load_tokenizer(model_dir)

    def say(text: str) -> None:
        monkeypatch.setattr(strict_backend, "next_token", partial(next_of, script(tokenizer, text)))

    say(SAID)
    return say


async def ask(served: Serving, path: str = CHATS, **fields: Any) -> httpx.Response:
    body = {"messages": ASKED, "tools": [STRICT, SEARCH], "temperature": 0, **fields}
    return await served.http.post(path, json={name: value for name, value in body.items() if value is not None})


def check_fits(arguments: dict[str, Any]) -> None:
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Oslo", "Bergen")
    assert arguments["days"] in range(1, 8)


@pytest.mark.usefixtures("says")
async def test_calls_of_strict_functions_fit_and_those_of_others_have_any_object(served: Serving) -> None:
    (choice,) = (await ask(served)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    weather, search = (call["function"] for call in choice["message"]["tool_calls"])
    check_fits(json.loads(weather["arguments"]))
    assert (search["name"], json.loads(search["arguments"])) == ("search", {"anything": [1, "x"]})


@pytest.mark.usefixtures("says")
async def test_a_stream_has_the_same_calls(served: Serving) -> None:
    expected = (await ask(served)).json()["choices"][0]["message"]["tool_calls"]
    arguments: dict[int, str] = {}
    for line in (await ask(served, stream=True)).text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            for part in choice["delta"].get("tool_calls") or ():
                arguments[part["index"]] = arguments.get(part["index"], "") + part["function"].get("arguments", "")
    assert list(arguments.values()) == [call["function"]["arguments"] for call in expected]


@pytest.mark.usefixtures("says")
async def test_responses_and_messages_keep_strict_functions_too(served: Serving) -> None:
    tool = {"type": "function", **FUNCTION}
    response = await ask(served, "/v1/responses", messages=None, input="Will it rain?", tools=[tool], store=False)
    _, call, *_ = response.json()["output"]
    check_fits(json.loads(call["arguments"]))
    tool = {"name": "weather", "input_schema": PARAMETERS, "strict": True}
    message = await ask(served, "/v1/messages", model="alias", max_tokens=2000, tools=[tool])
    _, block, *_ = message.json()["content"]
    check_fits(block["input"])


async def test_text_is_free_and_only_the_tools_of_the_request_can_be_called(
    served: Serving, says: Callable[[str], None]
) -> None:
    says("Tools <tool> such as <toolbox> are not needed: 2 < 3.")
    (choice,) = (await ask(served)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"][:12]) == ("stop", "Tools <tool>")
    assert choice["message"]["content"].endswith("2 < 3.")
    says('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    (choice,) = (await ask(served, tools=[STRICT])).json()["choices"]
    names = {call["function"]["name"] for call in choice["message"]["tool_calls"]}
    assert names == {"weather"}


async def test_calls_behind_reasoning_fit(model_dir: Path, says: Callable[[str], None]) -> None:
    says(f"<think>Oslo, or <tool_call>?</think>{WRONG}")
    text = TextOptions(chat_template=HERMES, reasoning_parser="deepseek_r1")
    async with serves(model_dir, limits=limits, text=text) as served:
        (choice,) = (await ask(served)).json()["choices"]
    assert choice["message"]["reasoning"] == "Oslo, or <tool_call>?"
    (call,) = choice["message"]["tool_calls"]
    check_fits(json.loads(call["function"]["arguments"]))


@pytest.mark.usefixtures("says")
async def test_an_answer_with_another_form_has_that(served: Serving) -> None:
    (choice,) = (await ask(served, response_format={"type": "json_object"}, max_tokens=200)).json()["choices"]
    assert choice["message"]["content"].startswith("{")
    (choice,) = (await ask(served, guided_choice=["yes"])).json()["choices"]
    assert choice["message"]["content"] == "yes"


@pytest.mark.parametrize(
    ("fields", "says_what"),
    [
        ({"min_tokens": 3}, "`min_tokens` contradicts `tools`"),
        ({"tools": [{**STRICT, "function": {**FUNCTION, "parameters": {"not": {}}}}]}, "`tools` cannot be compiled"),
    ],
)
async def test_strict_functions_that_cannot_be_kept_are_refused(
    served: Serving, fields: dict[str, Any], says_what: str
) -> None:
    answer = await ask(served, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(says_what)


@pytest.mark.usefixtures("says")
async def test_where_calls_cannot_be_kept_they_are_what_the_model_writes(model_dir: Path, tmp_path: Path) -> None:
    async def first_arguments(model_dir: Path, mode: Any) -> Any:
        text, kept = TextOptions(chat_template=HERMES), replace(limits, sampling=mode)
        async with serves(model_dir, limits=kept, text=text) as served:
            (choice,) = (await ask(served)).json()["choices"]
        return json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])

    assert await first_arguments(model_dir, "Device") == {"city": "Oslo Bay", "days": 5000}
    check_fits(await first_arguments(model_dir, "DeviceWithLogits"))


async def test_a_format_without_a_mark_keeps_no_calls(model_dir: Path, says: Callable[[str], None]) -> None:
    says('{"name": "weather", "parameters": {"city": "Oslo Bay", "days": 5000}}')
    async with serves(model_dir, limits=limits, text=TextOptions(chat_template=LLAMA)) as served:
        (choice,) = (await ask(served)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo Bay", "days": 5000}


async def test_a_mark_that_the_tokenizer_hides_is_left_to_the_model(
    tmp_path: Path, says: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_chat_model(tmp_path / "model", max_length=4096)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(["<tool_call>"])
    fast.save(str(folder / "tokenizer.json"))
    says("Only text.")
    async with serves(folder, limits=limits, text=TextOptions(chat_template=HERMES)) as served:
        answer = await ask(served)
        assert answer.status_code == 200, answer.text
        assert served.engine.engine._guides._grammars == {}  # type: ignore[attr-defined]


async def test_an_answer_that_the_backend_takes_out_of_its_form_is_an_error_in_each_api(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_backend, "next_token", lambda *_, **__: 77)
    (choice,) = (await ask(served, response_format={"type": "json_object"})).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("error", "")
    tool = {"type": "function", **FUNCTION}
    forced = {"messages": None, "input": "Rain?", "tools": [tool], "tool_choice": "required", "store": False}
    response = await ask(served, "/v1/responses", **forced)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "form_broken")
    assert "did not keep to the form" in response.text
    stream = (await ask(served, "/v1/responses", **forced, stream=True)).text
    assert ("event: response.failed" in stream, "event: response.completed" in stream) == (True, False)
    assert ('"code":"form_broken"' in stream, "not_ready" in stream) == (True, False)
    tool = {"name": "weather", "input_schema": PARAMETERS}
    fields = {"model": "alias", "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "any"}}
    message = await ask(served, "/v1/messages", **fields)
    assert (message.status_code, message.json()["type"]) == (529, "error")
    stream = (await ask(served, "/v1/messages", **fields, stream=True)).text
    assert ("event: error" in stream, "event: message_stop" in stream) == (True, False)
