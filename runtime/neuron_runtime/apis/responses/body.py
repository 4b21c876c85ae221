"""OpenAI's Responses: the body of /v1/responses, and what it is to admission.

Called by the route. Admission has the same limits for all APIs, and names fields in errors as this one does. Nothing
is stored: a request brings the whole conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from neuron_runtime.apis.parts import PictureForm, contents_of, missing, required
from neuron_runtime.core import ACTS
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.requests.admission import Admission, Ask
from neuron_runtime.requests.chats import Chat, ChatTurn
from neuron_runtime.requests.forms import JsonSchema, ResponseFormat
from neuron_runtime.requests.options import ChatOptions, FunctionName, NamedTool
from neuron_runtime.requests.parameters import Names, Parameter
from neuron_runtime.requests.sampling_fields import MaxTokens, Temperature, TopP, sampling_of
from neuron_runtime.requests.tools import EarlierCall, Function, callable_here

LOGPROBS = "message.output_text.logprobs"
_TEXT_TYPES = ("input_text", "output_text", "text")


class Part(msgspec.Struct, frozen=True):
    """A part of a message, of a result or of reasoning."""

    type: Annotated[
        str,
        "`input_text`, `output_text`, `text`, a part of reasoning or, in messages of the user and outputs of "
        "functions, `input_image`; others are not supported",
    ]
    text: Annotated[str | None, "The text; required"] = None
    image_url: Annotated[
        str | None,
        "With `input_image`: `data:image/...;base64,` and the picture, or an `https:` URL at one of the allowed hosts; "
        "required",
    ] = None
    file_id: Annotated[str | None, "Refused: nothing is stored here"] = None
    detail: Annotated[str | None, "Accepted without effect"] = None


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
    namespace: Annotated[str | None, "With `function_call`: namespace of the function"] = None
    arguments: Annotated[str | None, "With `function_call`: JSON of the arguments"] = None
    output: Annotated[str | list[Part] | None, "With `function_call_output`: a text or parts"] = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the answer may call, or a namespace of functions."""

    type: Annotated[str, "`function` or `namespace`; tools of other types are left out"]
    name: Annotated[str | None, "Name of the function or the namespace; required"] = None
    description: Annotated[str | None, "What it is for; the model reads it"] = None
    parameters: Annotated[dict[str, Any] | None, "JSON schema of the arguments, an object. Default: none"] = None
    strict: Annotated[bool | None, "As in `tools` of a chat"] = None
    tools: Annotated[
        list[FunctionTool] | None, "With `namespace`: its functions, whose names begin with that and `__` for the model"
    ] = None


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


class ResponsesBody(msgspec.Struct, kw_only=True, rename={"max_tokens": "max_output_tokens"}):
    """A conversation and how to answer it."""

    surface: ClassVar[Surface] = Surface.RESPONSES

    model: Annotated[str | None, "One of the served names. Default: the served model"] = None
    input: Annotated[
        str | list[Item],
        "A text of the user, or the items of the conversation: `message` (roles `user`, `assistant`, `system`, "
        "`developer`; `content` is a text or a list of `input_text`, `input_image` and `output_text` parts), "
        "`reasoning`, `function_call` and `function_call_output`",
    ]
    instructions: Annotated[str | None, "A system message before the input"] = None
    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_logprobs: Annotated[
        int | None,
        f"Number of alternatives per token; with `{LOGPROBS}` in `include`",
        Parameter(ACTS["logprobs"], lowest=0, neutral=(0,), default=0),
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
        return (self.text.format if self.text else None) or TextFormat("text")


def admitted(admission: Admission, body: ResponsesBody) -> Ask:
    """Raises InvalidRequest."""
    return admission.chat(chat_of(body))


def chat_of(body: ResponsesBody) -> Chat:
    """Returns the chat that admission gets. Raises InvalidRequest."""
    turns = list[ChatTurn]()
    if body.instructions is not None:
        turns.append(ChatTurn("system", body.instructions, "instructions"))
    # Some clients try a server with an empty list.
    text = body.input or ""
    items = [Item(role="user", content=text)] if isinstance(text, str) else text
    for at, item in enumerate(items):
        add = _ITEMS.get(item.type)
        if add is None:
            message = f"`input[{at}].type`: items of type `{item.type}` are not supported"
            if item.type == "item_reference":
                message += ": nothing is stored, so send the item itself"
            raise InvalidRequest(message, field=f"input[{at}].type")
        add(turns, item, f"input[{at}]")
    reports = LOGPROBS in (body.include or ())
    effort = body.reasoning and body.reasoning.effort
    choice, tools = _choice(body.tool_choice), body.tools or []
    functions = [
        Function(one.name_here, one.tool.description, one.tool.parameters, one.tool.strict)
        for one in functions_of(tools)
    ]
    return Chat(
        turns=turns,
        options=ChatOptions(
            model=body.model,
            logprobs=reports or None,
            top_logprobs=body.top_logprobs if reports else None,
            response_format=_response_format(body.text_format),
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            stream=body.stream,
            **sampling_of(body),
        ),
        names=NAMES,
        tools=callable_here(functions, len(tools), choice),
        variables={} if effort is None else {"reasoning_effort": effort},
    )


class Offered(NamedTuple):
    """A function, and where the request has it."""

    tool: FunctionTool
    name: str
    namespace: str | None

    @property
    def name_here(self) -> str:
        """The name that the model gets."""
        return _joined(self.namespace, self.name)


def functions_of(tools: Sequence[FunctionTool], namespace: str | None = None, at: str = "tools") -> list[Offered]:
    """The functions of a request, also those in namespaces. Tools of other types are left out, because nobody could
    call them here. Raises InvalidRequest."""
    offered = list[Offered]()
    for number, tool in enumerate(tools):
        place = f"{at}[{number}]"
        if tool.type == "function":
            offered.append(Offered(tool, required(tool, "name", place), namespace))
        elif tool.type == "namespace" and namespace is None:
            offered += functions_of(tool.tools or (), required(tool, "name", place), f"{place}.tools")
    return offered


def _joined(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


NAMES = Names(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": "include",
        "tools[].function": "tools[]",
        "tool_choice.function.name": "tool_choice.name",
    }
)


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    if form.schema is None:
        raise InvalidRequest.at("text.format.schema", "is required with this type")
    return ResponseFormat(form.type, JsonSchema(schema=form.schema))


def _message(turns: list[ChatTurn], item: Item, at: str) -> None:
    role = required(item, "role", at)
    if item.content is None:
        raise missing("content", at)
    content = contents_of(item.content, f"{at}.content", role, _PICTURES, _TEXT_TYPES)
    # A model's reasoning and its text are two items here, and one turn of a chat.
    if role == "assistant" and turns and _is_open(turns[-1]):
        turns[-1] = replace(turns[-1], content=content)
    else:
        turns.append(ChatTurn(role, content, at))


def _reasoning(turns: list[ChatTurn], item: Item, at: str) -> None:
    parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
    turns.append(ChatTurn("assistant", None, at, reasoning="".join(part.text or "" for part in parts)))


def _call(turns: list[ChatTurn], item: Item, at: str) -> None:
    name = required(item, "name", at)
    call = EarlierCall(_joined(item.namespace, name), item.arguments, required(item, "call_id", at))
    if turns and turns[-1].role == "assistant":
        turns[-1] = replace(turns[-1], calls=[*turns[-1].calls, call], at=at)
    else:
        turns.append(ChatTurn("assistant", None, at, calls=[call]))


def _output(turns: list[ChatTurn], item: Item, at: str) -> None:
    output = contents_of(item.output or "", f"{at}.output", "tool", _PICTURES, _TEXT_TYPES)
    turns.append(ChatTurn("tool", output, at, call_id=required(item, "call_id", at)))


def _picture(part: Part, at: str) -> PictureAt:
    if part.file_id is not None and part.image_url is None:
        raise InvalidRequest.at(f"{at}.file_id", "names a file, and nothing is stored here: send the picture itself")
    return PictureAt(required(part, "image_url", at), f"{at}.image_url")


_PICTURES = PictureForm("input_image", _picture)


def _choice(choice: str | FunctionChoice | None) -> Any:
    return NamedTool("function", FunctionName(choice.name)) if isinstance(choice, FunctionChoice) else choice


def _is_open(turn: ChatTurn) -> bool:
    """Whether the assistant's text is yet to come."""
    return turn.role == "assistant" and turn.content is None and not turn.calls


_ITEMS: Mapping[str, Callable[[list[ChatTurn], Item, str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
}
