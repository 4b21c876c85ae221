"""Tools of a chat: checks them, and says what the template gets and how the calls of the answer are read.

Called by `admission` and `chats` with a typed body. It knows no tokens; `text.tool_calls` reads the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.bodies import (
    MAX_TOOL_NAME_CHARACTERS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    ChatBody,
    Function,
    Message,
    Tool,
)
from neuron_runtime.text.chat_template import ChatTemplate
from neuron_runtime.text.tool_calls import ToolCallSplitter, ToolFormat

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NO_PARAMETERS = {"type": "object", "properties": {}}
NO_TOOLS = (
    "the model's chat template knows no tools: serve the model with a template that does (--chat-template, "
    'serving.chatTemplate), leave them out, or send "tool_choice": "none"'
)


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools."""

    names: frozenset[str]
    form: ToolFormat
    one_call: bool

    def splitter(self) -> ToolCallSplitter:
        """A new one for each answer."""
        return ToolCallSplitter(self.form, self.names, one_call=self.one_call)


def callable_tools(tools: Sequence[Tool] | None, choice: Any) -> list[Function]:
    """The functions that an answer may call. Raises InvalidRequest."""
    functions = [_function(tool, f"tools[{at}]") for at, tool in enumerate(tools or ())]
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` must have at most {MAX_TOOLS} tools, got {len(functions)}", field="tools")
    names = [function.name for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            message = f"`tools[{at}].function.name`: there are two tools with the name `{name}`"
            raise InvalidRequest(message, field=f"tools[{at}].function.name")
    if functions and (size := len(msgspec.json.encode(functions))) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"`tools` must have at most {MAX_TOOLS_BYTES} bytes, got {size}", field="tools")
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(
            "`tool_choice` must be `auto` or `none`: others are not supported yet", field="tool_choice"
        )
    return [] if choice == "none" else functions


def tool_use(body: ChatBody, functions: Sequence[Function], form: ToolFormat | None) -> ToolUse | None:
    """How the answer's calls are read; None: it calls no tools. Raises InvalidRequest.

    Args:
        functions: those that the answer may call.
        form: how the model writes calls; None: not known.
    """
    if not functions:
        return None
    if form is None:
        message = (
            "`tools`: how this model writes calls is not known: set the server's --tool-call-parser "
            '(serving.toolCallParser), leave them out, or send "tool_choice": "none"'
        )
        raise InvalidRequest(message, field="tools")
    names = frozenset(function.name for function in functions)
    return ToolUse(names, form, body.parallel_tool_calls is False)


def check_template_knows(template: ChatTemplate, functions: Sequence[Function]) -> None:
    """Raises InvalidRequest if the template drops these tools."""
    if functions and not template.knows_tools:
        raise InvalidRequest(f"`tools`: {NO_TOOLS}", field="tools")


def for_template(functions: Sequence[Function]) -> list[dict[str, Any]] | None:
    """The tools as templates expect them; None: there are none."""
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                **({} if function.description is None else {"description": function.description}),
                "parameters": function.parameters or _NO_PARAMETERS,
            },
        }
        for function in functions
    ] or None


def calls_for_template(message: Message, at: str, template: ChatTemplate) -> list[dict[str, Any]]:
    """The calls of an earlier answer. Raises InvalidRequest."""
    calls = []
    for number, call in enumerate(message.tool_calls or ()):
        where = f"{at}.tool_calls[{number}]"
        if call.type != "function" or call.function is None:
            raise InvalidRequest(f"`{where}` must be the call of a function", field=f"{where}.type")
        arguments = call.function.arguments
        name = call.function.name
        calls.append(
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {"name": name, "arguments": _arguments(arguments, template)},
            }
        )
    return calls


def _arguments(given: str | dict[str, Any] | None, template: ChatTemplate) -> str | dict[str, Any]:
    """An object or its text, as the template handles it. What is no object stays as the model wrote it."""
    if isinstance(given, str) and given.strip():
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            return given
        if not isinstance(value, dict):
            return given
    else:
        value = given if isinstance(given, dict) else {}
    return value if template.takes_argument_objects else json.dumps(value, ensure_ascii=False)


def _function(tool: Tool, at: str) -> Function:
    function = tool.function
    if tool.type != "function":
        message = f"`{at}.type` must be `function`, got `{tool.type[:64]}`: other tools are not supported yet"
        raise InvalidRequest(message, field=f"{at}.type")
    if function is None:
        raise InvalidRequest(f"`{at}.function` is missing", field=f"{at}.function")
    if len(function.name) > MAX_TOOL_NAME_CHARACTERS or not _NAME.fullmatch(function.name):
        message = (
            f"`{at}.function.name` must have 1 to {MAX_TOOL_NAME_CHARACTERS} letters, digits, `_`, `-` or `.`, "
            f"got {function.name[:MAX_TOOL_NAME_CHARACTERS]!r}"
        )
        raise InvalidRequest(message, field=f"{at}.function.name")
    return function
