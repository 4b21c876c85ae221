"""Tools of a chat: checks them, and says what the template gets and how the calls of the answer are read.

Called by `admission` and `chats`, with functions in the form of OpenAI's API. It knows no tokens; `text.tool_calls`
reads the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from neuron_runtime.core import Form
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.forms import form_of_schemas
from neuron_runtime.requests.options import ChatOptions, NamedTool, ToolChoice
from neuron_runtime.requests.parameters import Names
from neuron_runtime.text.tool_calls import FORCED, CallTag, ToolCallSplitter, ToolFormat

MAX_TOOLS = 128
MAX_TOOL_NAME_CHARACTERS = 128
MAX_TOOLS_BYTES = 1024 * 1024
MAX_FORCED_CALLS = 16
"""In an answer that must call tools: a small model writes one call after another for ever."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NO_PARAMETERS = {"type": "object", "properties": {}}
NO_TOOLS = (
    "the model's chat template knows no tools: serve the model with a template that does (--chat-template, "
    'serving.chatTemplate), leave them out, or send "tool_choice": "none"'
)


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: Annotated[str, f"1 to {MAX_TOOL_NAME_CHARACTERS} letters, digits, `_`, `-` or `.`"]
    description: Annotated[str | None, "What it is for; the model reads it"] = None
    parameters: Annotated[dict[str, Any] | None, "JSON schema of the arguments, an object. Default: none"] = None
    strict: Annotated[
        bool | None,
        "Arguments fit the schema, where the model's format of calls allows that; those of forced calls always do",
    ] = None


@dataclass(frozen=True)
class EarlierCall:
    """A call in an earlier answer."""

    name: str
    arguments: str | dict[str, Any] | None
    """JSON, or its text."""
    id: str | None = None

    def plain(self, *, as_object: bool) -> dict[str, Any]:
        """As templates expect it; the arguments as an object or as its text."""
        function = {"name": self.name, "arguments": _arguments(self.arguments, as_object=as_object)}
        return {**({} if self.id is None else {"id": self.id}), "type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools."""

    names: frozenset[str]
    form: ToolFormat
    one_call: bool
    forced: Form | None = None
    """The form of an answer that must call a tool."""
    strict: Form | None = None
    """The form of an answer that may call tools, some of them strict. Any other form goes first."""

    def splitter(self) -> ToolCallSplitter:
        """A new one for each answer."""
        return ToolCallSplitter(self.form, self.names, one_call=self.one_call)


def callable_here(functions: Sequence[Function], num_asked: int, choice: ToolChoice) -> Sequence[Function]:
    """The functions of a request whose tools of other types are left out: nobody could call those here. Raises
    InvalidRequest if none remains of the tools that it asked for."""
    if num_asked and not functions and choice != "none":
        message = "`tools[0].type`: none of the tools is a function, and others are not supported"
        raise InvalidRequest(message, field="tools[0].type")
    return functions


def is_forced(choice: ToolChoice) -> bool:
    """Whether the answer must call a tool."""
    return choice not in (None, "none", "auto")


def named_by(choice: ToolChoice) -> str | None:
    """The one function that the answer must call."""
    return choice.function.name if isinstance(choice, NamedTool) else None


def callable_functions(functions: Sequence[Function], choice: ToolChoice, names: Names) -> list[Function]:
    """Returns the functions of a request that its answer may call. Raises InvalidRequest."""
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest.at("tools", f"must have at most {MAX_TOOLS} tools, got {len(functions)}")
    known = set[str]()
    for at, name in enumerate(function.name for function in functions):
        field = names["tools[].function"].replace("[]", f"[{at}]") + ".name"
        if len(name) > MAX_TOOL_NAME_CHARACTERS or not _NAME.fullmatch(name):
            message = (
                f"`{field}` must have 1 to {MAX_TOOL_NAME_CHARACTERS} letters, digits, `_`, `-` or `.`, "
                f"got {name[:MAX_TOOL_NAME_CHARACTERS]!r}"
            )
            raise InvalidRequest(message, field=field)
        if name in known:
            raise InvalidRequest(f"`{field}`: there are two tools with the name `{name}`", field=field)
        known.add(name)
    if functions and (size := len(msgspec.json.encode(functions))) > MAX_TOOLS_BYTES:
        raise InvalidRequest.at("tools", f"must have at most {MAX_TOOLS_BYTES} bytes, got {size}")
    if is_forced(choice):
        if not functions:
            raise InvalidRequest.at("tool_choice", "needs `tools`")
        named = named_by(choice)
        if named is not None and named not in known:
            field = names["tool_choice.function.name"]
            raise InvalidRequest.at(field, f"is `{named[:64]}`, which is none of `tools`")
    return [] if choice == "none" else list(functions)


def tool_use(
    options: ChatOptions, functions: Sequence[Function], form: ToolFormat | None, tag: CallTag | None
) -> ToolUse | None:
    """How the answer's calls are read; None: it calls no tools. Raises InvalidRequest.

    Args:
        functions: those that the answer may call.
        form: how the model writes calls; None: not known.
        tag: with which strict functions are kept to their schemas; None: they are not.
    """
    if not functions:
        return None
    names = frozenset(function.name for function in functions)
    one_call = options.parallel_tool_calls is False
    if is_forced(options.tool_choice):
        named = named_by(options.tool_choice)
        only_one = one_call or named is not None
        schema = _calls_schema([one for one in functions if named in (None, one.name)], only_one)
        reader = replace(FORCED, short_ids=form is not None and form.short_ids)
        return ToolUse(names, reader, only_one, form_of_schemas("json_schema", schema, "tool_choice"))
    if form is None:
        message = (
            "`tools`: how this model writes calls is not known: set the server's --tool-call-parser "
            '(serving.toolCallParser), leave them out, or send "tool_choice": "none"'
        )
        raise InvalidRequest(message, field="tools")
    strict = None if tag is None or not any(one.strict for one in functions) else _strict_form(functions, tag)
    return ToolUse(names, form, one_call, strict=strict)


def _strict_form(functions: Sequence[Function], tag: CallTag) -> Form:
    """Free text with calls. Those of strict functions fit their schemas, those of others have any object."""
    structures = [
        {
            "begin": tag.mark + tag.name % json.dumps(function.name),
            "schema": _arguments_schema(function) if function.strict else {"type": "object"},
            "end": tag.end,
        }
        for function in functions
    ]
    return form_of_schemas("structural_tag", {"structures": structures, "triggers": [tag.mark]}, "tools")


def _arguments_schema(function: Function) -> dict[str, Any]:
    return {"type": "object"} | (function.parameters or {**_NO_PARAMETERS, "additionalProperties": False})


def _calls_schema(functions: Sequence[Function], only_one: bool) -> dict[str, Any]:
    """The list of calls that a forced answer is. Each function's schema is a definition of its name, to which its
    own references point. Raises InvalidRequest."""
    calls, definitions = [], {}
    for function in functions:
        root = f"#/$defs/{function.name}"
        try:
            definitions[function.name] = _with_references(_arguments_schema(function), root)
        except RecursionError as error:
            raise InvalidRequest.at("tools", "are nested too deeply") from error
        properties = {"name": {"const": function.name}, "arguments": {"$ref": root}}
        calls.append(
            {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        )
    most = {"maxItems": 1} if only_one else {"maxItems": MAX_FORCED_CALLS}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions}


def _with_references(value: Any, root: str) -> Any:
    """A part of a schema, whose references point to its new place."""
    if isinstance(value, list):
        return [_with_references(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _with_references(one, root) for key, one in value.items()}
    target = value.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = root + target[1:]
    return moved


def for_template(functions: Sequence[Function], *, filled: bool) -> list[dict[str, Any]]:
    """The tools as templates expect them.

    filled: each has a description and properties.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                **({} if function.description is None and not filled else {"description": function.description or ""}),
                "parameters": (_NO_PARAMETERS if filled else {}) | (function.parameters or _NO_PARAMETERS),
            },
        }
        for function in functions
    ]


def _arguments(arguments: str | dict[str, Any] | None, *, as_object: bool) -> str | dict[str, Any]:
    """What is no object stays as the model wrote it."""
    value: Any = arguments or {}
    if isinstance(arguments, str) and arguments.strip():
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(value, dict):
            return arguments
    value = value if isinstance(value, dict) else {}
    return value if as_object else json.dumps(value, ensure_ascii=False)
