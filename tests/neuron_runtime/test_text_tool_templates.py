"""What chat templates are told about tools: the calls and results of earlier turns, and which family they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import CHAT_TEMPLATE, write_chat_model
from helpers.tool_templates import DEEPSEEK_V3, HERMES, TEMPLATES, WEATHER
from neuron_runtime.apis.openai.body import ChatBody, chat_of
from neuron_runtime.checkpoint import TEMPLATES_FOLDER
from neuron_runtime.config import TextOptions
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.chats import chat_text
from neuron_runtime.requests.conversion import typed
from neuron_runtime.requests.texts import load_text
from neuron_runtime.text.chat_template import ChatTemplate
from neuron_runtime.text.tool_calls import TOOL_PARSERS, recognized


def called(arguments: Any, call_id: str = "abcdefghi") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "rain"},
    ]


def rendered(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = typed({"messages": messages, **fields}, ChatBody)
    return chat_text(ChatTemplate(template, {}), chat_of(body))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_family(name: str) -> None:
    assert recognized(TEMPLATES[name]) is TOOL_PARSERS[name]
    assert ChatTemplate(TEMPLATES[name], {}).shapes.tools


def test_the_template_for_tools_tells_the_family(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / TEMPLATES_FOLDER).mkdir()
    (tmp_path / TEMPLATES_FOLDER / "tool_use.jinja").write_text(HERMES)
    assert load_text(tmp_path, TextOptions()).tool_format is TOOL_PARSERS["hermes"]


def test_an_end_of_answers_that_the_files_do_not_name_is_reported(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    assert load_text(tmp_path, TextOptions()).defaults.notices == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    (notice,) = load_text(tmp_path, TextOptions()).defaults.notices
    assert "eos_token_id lacks 3, the chat template's end of an answer: answers may go on to max_tokens" in notice
    assert load_text(tmp_path, TextOptions(chat_template="{{ messages[0].role }}")).defaults.notices == []
    assert load_text(tmp_path, TextOptions(chat_template="{{ raise_exception('no') }}")).defaults.notices == []


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, "<tool_call><function=f><parameter=a>", "<tool_call>f<arg_key>"])
def test_other_templates_tell_none(source: str) -> None:
    assert recognized(source) is None
    assert not ChatTemplate(source, {}).shapes.tools


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_reach_the_template_in_the_form_that_it_handles(name: str) -> None:
    for arguments in ('{"city": "Köln"}', {"city": "Köln"}):
        text = rendered(TEMPLATES[name], called(arguments))
        assert '{"city": "Köln"}' in text
        assert "rain" in text


def test_tools_reach_the_template_without_what_was_not_given() -> None:
    bare = {"type": "function", "function": {"name": "f", "description": None, "strict": True}}
    text = rendered(HERMES, called("{}")[:1], tools=[WEATHER, bare])
    shown = [json.loads(line) for line in text.splitlines()[:2]]
    assert shown[0] == WEATHER
    assert shown[1]["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert "weather" not in rendered(HERMES, called("{}")[:1], tools=[WEATHER], tool_choice="none")


def test_a_result_names_its_function() -> None:
    template = "{{ tools }}{% for m in messages %}[{{ m.name }} {{ m.tool_call_id }} {{ m.tool_calls }}]{% endfor %}"
    assert "[weather abcdefghi ]" in rendered(template, called("{}"))


@pytest.mark.parametrize("broken", ["", '{"city": ', "[1]", "5", "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_the_model_wrote_them(broken: str) -> None:
    assert (json.dumps(broken) if broken else '"arguments": {}') in rendered(HERMES, called(broken))
    assert broken in rendered(DEEPSEEK_V3, called(broken))


@pytest.mark.parametrize(
    ("template", "messages", "fields", "field", "says"),
    [
        (CHAT_TEMPLATE, called("{}"), {}, "messages[1].tool_calls", "knows no tools"),
        (CHAT_TEMPLATE, called("{}")[2:], {}, "messages[0].role", "knows no tools"),
        (CHAT_TEMPLATE, called("{}")[:1], {"tools": [WEATHER]}, "tools", '"tool_choice": "none"'),
        (HERMES, called("{}")[:2], {"continue_final_message": True}, "continue_final_message", "with `tool_calls`"),
        (HERMES, [{"role": "assistant", "tool_calls": [{"id": "a"}]}], {}, "messages[0].tool_calls[0].type", "must be"),
        (HERMES, [{"role": "tool"}], {}, "messages[0].content", "is missing"),
    ],
)
def test_what_a_template_cannot_show_is_refused_by_name(
    template: str, messages: Any, fields: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        rendered(template, messages, **fields)
    assert refused.value.field == field
