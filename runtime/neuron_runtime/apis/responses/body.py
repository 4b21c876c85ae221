"""OpenAI's Responses: the body of /v1/responses, and what it is as a chat.

Called by the route. `Admission.chat` does the rest, so both APIs have the same limits; its errors get the names of
this API. Nothing is stored: a request brings the whole conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from neuron_runtime.core import Sampling
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface
from neuron_runtime.requests.admission import Admission, Ask
from neuron_runtime.requests.bodies import (
    CalledFunction,
    ChatBody,
    ContentPart,
    Function,
    FunctionName,
    Message,
    MessageCall,
    NamedTool,
    Tool,
)
from neuron_runtime.requests.forms import JsonSchema, ResponseFormat
from neuron_runtime.requests.parameters import ON_DEVICE, ON_LOGITS, ON_TOKENS, Parameter

NAMES = {
    r"messages[^`]*": "input",
    "max_completion_tokens": "max_output_tokens",
    r"response_format": "text.format",
    r"(tools\[\d+\])\.function": r"\1",
}
"""Fields of a chat, as regular expressions, that have another name here."""

LOGPROBS = "message.output_text.logprobs"


class Part(msgspec.Struct, frozen=True):
    """A part of a message, of a result or of reasoning."""

    type: Annotated[str, "`input_text`, `output_text`, `text`, or a part of reasoning; others are not supported"]
    text: Annotated[str | None, "The text; required"] = None


class Item(msgspec.Struct, frozen=True):
    """An item of the conversation; which fields it has depends on its type."""

    type: Annotated[
        str, "`message`, `reasoning`, `function_call` or `function_call_output`; other types are not supported"
    ] = "message"
    role: Annotated[
        Literal["user", "assistant", "system", "developer"] | None, "With `message`: its author; required"
    ] = None
    content: Annotated[str | list[Part] | None, "With `message`: a text or parts; with `reasoning`: parts"] = None
    summary: Annotated[list[Part] | None, "With `reasoning`: used if there is no `content`"] = None
    call_id: Annotated[str | None, "Of a function's call or output: id of the call; required"] = None
    name: Annotated[str | None, "With `function_call`: name of the function; required"] = None
    arguments: Annotated[str | None, "With `function_call`: JSON of the arguments"] = None
    output: Annotated[str | list[Part] | None, "With `function_call_output`: a text or parts"] = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the answer may call."""

    type: Annotated[str, "`function`; other types are not supported"]
    name: Annotated[str | None, "Name of the function; required"] = None
    description: Annotated[str | None, "What it is for; the model reads it"] = None
    parameters: Annotated[dict[str, Any] | None, "JSON schema of the arguments, an object. Default: none"] = None
    strict: Annotated[bool | None, "As in `tools` of a chat"] = None


class FunctionChoice(msgspec.Struct, frozen=True):
    """The function that the answer must call."""

    type: Annotated[Literal["function"], "`function`"]
    name: Annotated[str, "Name of one of `tools`"]


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How the model should reason."""

    effort: Annotated[str | None, "Variable `reasoning_effort` for the template"] = None
    summary: Annotated[str | None, "Accepted without effect"] = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of the answer's text."""

    type: Annotated[Literal["text", "json_object", "json_schema"], "What the answer is"]
    name: Annotated[str | None, "Without effect"] = None
    description: Annotated[str | None, "Without effect"] = None
    schema: Annotated[dict[str, Any] | None, "With type `json_schema`: the JSON schema; required"] = None
    strict: Annotated[bool | None, "Without effect: the answer always fits the schema"] = None


class TextConfig(msgspec.Struct, frozen=True):
    """Options of the answer's text."""

    format: Annotated[TextFormat | None, "The form of the text"] = None
    verbosity: Annotated[str | None, "Accepted without effect"] = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_obfuscation: Annotated[bool | None, "Accepted without effect"] = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """A conversation and how to answer it."""

    surface: ClassVar[Surface] = Surface.RESPONSES

    model: Annotated[str | None, "One of the served names. Default: the served model"] = None
    input: Annotated[
        str | list[Item],
        "A text of the user, or the items of the conversation: `message` (roles `user`, `assistant`, `system`, "
        "`developer`; `content` is a text or a list of `input_text` and `output_text` parts), `reasoning`, "
        "`function_call` and `function_call_output`",
    ]
    instructions: Annotated[str | None, "A system message before the input"] = None
    max_output_tokens: Annotated[
        int | None,
        "Maximum number of output tokens, reasoning included. Default: the model's `max_new_tokens`, else all that fit",
        Parameter(ON_TOKENS, lowest=1),
    ] = None
    temperature: Annotated[
        float | None,
        "Divides the logits; 0: greedy",
        Parameter(ON_DEVICE, lowest=0, highest=100, neutral=(1,), default=1.0, setting="temperature"),
    ] = None
    top_p: Annotated[
        float | None,
        "Sample from the smallest set of likeliest tokens whose probabilities add up to this",
        Parameter(ON_DEVICE, lowest=0, highest=1, above=True, neutral=(1,), default=1.0, setting="top_p"),
    ] = None
    top_logprobs: Annotated[
        int | None,
        f"Number of alternatives per token; with `{LOGPROBS}` in `include`",
        Parameter(ON_LOGITS, lowest=0, neutral=(0,), default=0),
    ] = None
    include: Annotated[
        list[str] | None,
        f"`{LOGPROBS}`: return log-probabilities of the answer's text; others have no effect",
        Parameter(neutral=([],)),
    ] = None
    reasoning: Annotated[ReasoningOptions | None, "`effort`: a variable for the template; others have no effect"] = None
    text: Annotated[TextConfig | None, "`format`: the form of the text; `verbosity` has no effect"] = None
    tools: Annotated[
        list[FunctionTool] | None, "Functions that the answer may call, as in a chat", Parameter(neutral=([],))
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | None,
        "As in a chat; a function is named by `type` and `name`",
        Parameter(default="auto"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, "false: at most one call in an answer", Parameter(neutral=(True, False), default=True)
    ] = None
    metadata: Annotated[dict[str, Any] | None, "Returned as it is"] = None
    stream: Annotated[bool | None, "Send server-sent events", Parameter(default=False)] = None
    stream_options: Annotated[ResponsesStreamOptions | None, "Accepted without effect"] = None

    @property
    def text_format(self) -> TextFormat:
        """The form of the answer's text."""
        return (self.text.format if self.text else None) or TextFormat("text")


def admitted(admission: Admission, body: ResponsesBody) -> Ask:
    """Raises InvalidRequest."""
    with InvalidRequest.renaming(NAMES):
        ask = admission.chat(chat_of(body))
    return dataclasses.replace(ask, sampling=tuple(map(_with_own_names, ask.sampling)))


def _with_own_names(sampling: Sampling) -> Sampling:
    """The form's field, which the engine names if the form cannot be compiled."""
    if sampling.form is None or sampling.form.field != "response_format":
        return sampling
    return dataclasses.replace(sampling, form=msgspec.structs.replace(sampling.form, field="text.format"))


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same conversation in the form of a chat. Raises InvalidRequest."""
    messages = list[Message]()
    if body.instructions is not None:
        messages.append(Message("system", body.instructions))
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for at, item in enumerate(items):
        add = _ITEMS.get(item.type)
        if add is None:
            message = f"`input[{at}].type`: items of type `{item.type}` are not supported"
            if item.type == "item_reference":
                message += ": nothing is stored, so send the item itself"
            raise InvalidRequest(message, field=f"input[{at}].type")
        add(messages, item, f"input[{at}]")
    reports = LOGPROBS in (body.include or ())
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=reports or None,
        top_logprobs=body.top_logprobs if reports else None,
        response_format=_response_format(body.text_format),
        tools=[_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        stream=body.stream,
    )


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    if form.schema is None:
        raise InvalidRequest("`text.format.schema` is required with this type", field="text.format.schema")
    return ResponseFormat(form.type, JsonSchema(schema=form.schema))


def _message(messages: list[Message], item: Item, at: str) -> None:
    if item.role is None:
        raise InvalidRequest(f"`{at}.role` is missing", field=f"{at}.role")
    if item.content is None:
        raise InvalidRequest(f"`{at}.content` is missing", field=f"{at}.content")
    content = _texts(item.content, f"{at}.content")
    # A model's reasoning and its text are two items here, and one message of a chat.
    if item.role == "assistant" and messages and _is_open(messages[-1]):
        messages[-1] = msgspec.structs.replace(messages[-1], content=content)
    else:
        messages.append(Message(item.role, content))


def _reasoning(messages: list[Message], item: Item, at: str) -> None:
    parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
    messages.append(Message("assistant", reasoning="".join(part.text or "" for part in parts)))


def _call(messages: list[Message], item: Item, at: str) -> None:
    name = _required(item, "name", at)
    call = MessageCall(_required(item, "call_id", at), function=CalledFunction(name, item.arguments))
    if messages and messages[-1].role == "assistant":
        calls = [*(messages[-1].tool_calls or ()), call]
        messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
    else:
        messages.append(Message("assistant", tool_calls=[call]))


def _output(messages: list[Message], item: Item, at: str) -> None:
    output = _texts(item.output or "", f"{at}.output")
    messages.append(Message("tool", output, tool_call_id=_required(item, "call_id", at)))


def _required(part: Item | FunctionTool, name: str, at: str) -> str:
    value: str | None = getattr(part, name)
    if value is None:
        raise InvalidRequest(f"`{at}.{name}` is missing", field=f"{at}.{name}")
    return value


def _tool(tool: FunctionTool, at: str) -> Tool:
    if tool.type != "function":
        message = f"`{at}.type`: tools of type `{tool.type}` are not supported"
        raise InvalidRequest(message, field=f"{at}.type")
    return Tool(function=Function(_required(tool, "name", at), tool.description, tool.parameters, tool.strict))


def _choice(choice: str | FunctionChoice | None) -> Any:
    return NamedTool("function", FunctionName(choice.name)) if isinstance(choice, FunctionChoice) else choice


def _is_open(message: Message) -> bool:
    """Whether the assistant's text is yet to come."""
    return message.role == "assistant" and message.content is None and not message.tool_calls


_ITEMS: Mapping[str, Callable[[list[Message], Item, str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
}


def _texts(content: str | Sequence[Part], at: str) -> str | list[ContentPart]:
    """Content that must be text. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return [_text(part, f"{at}[{number}]") for number, part in enumerate(content)]


def _text(part: Part, at: str) -> ContentPart:
    if part.type not in ("input_text", "output_text", "text"):
        message = f"`{at}.type`: parts of type `{part.type}` are not supported here"
        raise InvalidRequest(message, field=f"{at}.type")
    if part.text is None:
        raise InvalidRequest(f"`{at}.text` is missing", field=f"{at}.text")
    return ContentPart("text", part.text)
