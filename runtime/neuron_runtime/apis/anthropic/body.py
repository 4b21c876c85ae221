"""Anthropic's Messages: the bodies of /v1/messages and /v1/messages/count_tokens, and what they are to admission.

Called by the routes. Admission has the same limits for all APIs, and names fields in errors as this one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from neuron_runtime.apis.parts import PictureForm, content_of, contents_of, missing, required, text_of, texts_of
from neuron_runtime.core import Acts
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.requests.admission import Admission, Ask
from neuron_runtime.requests.chats import Chat, ChatTurn
from neuron_runtime.requests.forms import JsonSchema, ResponseFormat
from neuron_runtime.requests.options import ChatOptions, FunctionName, NamedTool
from neuron_runtime.requests.parameters import Names, Parameter
from neuron_runtime.requests.sampling_fields import MaxTokens, Temperature, TopK, TopP, sampling_of
from neuron_runtime.requests.tools import EarlierCall, Function, callable_here
from neuron_runtime.validation import explain


class ImageSource(msgspec.Struct, frozen=True):
    """Where a picture is."""

    type: Annotated[Literal["base64", "url"], "Whether it is in the request, or at a URL"]
    media_type: Annotated[str | None, "Without effect: the bytes say it"] = None
    data: Annotated[str | None, "With `base64`: the picture; required"] = None
    url: Annotated[str | None, "With `url`: an `https:` URL at one of the allowed hosts; required"] = None


class Block(msgspec.Struct, frozen=True):
    """A block of a message; which fields it has depends on its type."""

    type: Annotated[
        str,
        "`text`; `image` and `tool_result` of the user; `thinking` and `tool_use` of the assistant. Others are not "
        "supported",
    ]
    text: Annotated[str | None, "With `text`: the text"] = None
    thinking: Annotated[str | None, "With `thinking`: reasoning of an earlier answer, for the template"] = None
    id: Annotated[str | None, "With `tool_use`: id of the call; required"] = None
    name: Annotated[str | None, "With `tool_use`: name of the tool; required"] = None
    input: Annotated[dict[str, Any] | None, "With `tool_use`: the arguments"] = None
    tool_use_id: Annotated[str | None, "With `tool_result`: id of the call; required"] = None
    content: Annotated[str | list[Any] | None, "With `tool_result`: a text, or `text` and `image` blocks"] = None
    source: Annotated[ImageSource | None, "With `image`: where the picture is; required"] = None


class InputMessage(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: Annotated[Literal["user", "assistant", "system"], "Author of the message"]
    content: Annotated[str | list[Block], "A text or a list of blocks"]


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model should reason."""

    type: Annotated[Literal["enabled", "disabled", "adaptive"], "`adaptive`: as the model is used to"]
    budget_tokens: Annotated[int | None, "Accepted without effect"] = None
    display: Annotated[str | None, "Accepted without effect"] = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    type: Annotated[Literal["json_schema"], "What the answer is"]
    schema: Annotated[dict[str, Any], "The JSON schema"]


class OutputConfig(msgspec.Struct, frozen=True):
    """Options of the answer."""

    effort: Annotated[str | None, "Variable `reasoning_effort` for the template"] = None
    format: Annotated[OutputFormat | None, "The form of the text"] = None


class ToolDefinition(msgspec.Struct, frozen=True):
    """A tool that the answer may call."""

    name: Annotated[str, "Name of the tool"]
    type: Annotated[str | None, "`custom`; tools of other types are left out"] = None
    description: Annotated[str | None, "What it is for; the model reads it"] = None
    input_schema: Annotated[dict[str, Any] | None, "JSON schema of the arguments, an object. Default: none"] = None
    strict: Annotated[bool | None, "As in `tools` of a chat"] = None


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the answer calls tools."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"], "`any` and `tool`: as `required` and a named function of a chat"
    ]
    name: Annotated[str | None, "With `tool`: the tool; required"] = None
    disable_parallel_tool_use: Annotated[bool | None, "true: at most one call in an answer"] = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """A chat whose tokens are counted."""

    surface: ClassVar[Surface] = Surface.MESSAGES

    model: Annotated[str | None, "One of the served names. Default: the served model"] = None
    messages: Annotated[
        list[InputMessage],
        "Roles `user` and `assistant`; `content` is a text or a list of blocks: `text`, `image`, `tool_result` and, "
        "in earlier answers, `thinking` and `tool_use`. If the last message is the assistant's, the answer continues "
        "it",
    ]
    system: Annotated[str | list[Block] | None, "Instructions before the messages: a text or `text` blocks"] = None
    tools: Annotated[
        list[ToolDefinition] | None, "Tools that the answer may call, as in a chat", Parameter(neutral=([],))
    ] = None
    tool_choice: Annotated[ToolChoice | None, "`auto`, `any`, `tool` with a name, or `none`"] = None
    thinking: Annotated[
        Thinking | None,
        "`enabled` and `disabled` set the template's variable `enable_thinking`; without effect if the template does "
        "not use it. `budget_tokens` has no effect",
    ] = None
    output_config: Annotated[
        OutputConfig | None, "`effort`: a variable for the template; `format`: the form of the text, a JSON schema"
    ] = None


class MessagesBody(CountTokensBody, kw_only=True, rename={"stop": "stop_sequences"}):
    """A chat and how to answer it."""

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    stop: Annotated[
        list[str] | None, "Texts that end the answer, as `stop` of a chat", Parameter(Acts.TOKENS, neutral=([],))
    ] = None
    stream: Annotated[bool | None, "Send server-sent events", Parameter(default=False)] = None


def admitted(admission: Admission, body: MessagesBody) -> Ask:
    """Raises InvalidRequest."""
    return admission.chat(chat_of(body, stream=body.stream, **sampling_of(body)))


def num_input_tokens(admission: Admission, body: CountTokensBody) -> int:
    """The tokens of the prompt. Raises InvalidRequest."""
    return len(admission.chat_tokens(chat_of(body)))


def chat_of(body: CountTokensBody, **options: Any) -> Chat:
    """Returns the chat that admission gets. Raises InvalidRequest.

    options: those that the body has beyond the chat.
    """
    turns = [
        turn for at, message in enumerate(body.messages) for turn in _TURNS[message.role](message, f"messages[{at}]")
    ]
    continues = bool(turns) and turns[-1].role == "assistant" and not turns[-1].calls
    if system := _system(body.system or ""):
        turns.insert(0, ChatTurn("system", system, "system"))
    choice, tools, output = body.tool_choice, body.tools or [], body.output_config or OutputConfig()
    tool_choice = _choice(choice)
    functions = [
        Function(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in tools
        if tool.type in (None, "custom")
    ]
    schema = None if output.format is None else JsonSchema(schema=output.format.schema)
    return Chat(
        turns=turns,
        options=ChatOptions(
            model=body.model,
            tool_choice=tool_choice,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            response_format=None if schema is None else ResponseFormat("json_schema", schema),
            **options,
        ),
        names=NAMES,
        tools=callable_here(functions, len(tools), tool_choice),
        variables={
            **({} if body.thinking is None else _SWITCHES[body.thinking.type]),
            **({} if output.effort is None else {"reasoning_effort": output.effort}),
        },
        continues=continues,
    )


NAMES = Names(
    {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "tools[].function": "tools[]",
        "tool_choice.function.name": "tool_choice.name",
    }
)
ATTRIBUTION = "x-anthropic-billing-header:"
"""Begins a block in front of Claude Code's instructions: a mark for its maker, other with each request, which no model
reads. In the prompt it would keep requests from sharing a cached prefix."""
_SWITCHES: Mapping[str, dict[str, Any]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},
}


def _system(system: str | Sequence[Block]) -> str | list[str]:
    texts = texts_of(system, "system")
    return texts if isinstance(texts, str) else [text for text in texts if not text.startswith(ATTRIBUTION)]


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type != "tool":
        return choice and {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise missing("name", "tool_choice")
    return NamedTool("function", FunctionName(choice.name))


def _of_user(message: InputMessage, at: str) -> Iterator[ChatTurn]:
    """Results of calls are turns of their own, and come first."""
    content = message.content
    if isinstance(content, str):
        yield ChatTurn(message.role, content, at)
        return
    parts = list[str | PictureAt]()
    for number, block in enumerate(content):
        where = f"{at}.content[{number}]"
        if block.type != "tool_result":
            parts.append(content_of(block, where, message.role, _PICTURES))
            continue
        call_id = required(block, "tool_use_id", where)
        result = contents_of(_blocks(block.content or "", where), f"{where}.content", "tool", _PICTURES)
        yield ChatTurn("tool", result, where, call_id=call_id)
    if parts or not content:
        yield ChatTurn(message.role, parts, at)


def _picture(block: Block, at: str) -> PictureAt:
    if block.source is None:
        raise missing("source", at)
    if block.source.type == "url":
        return PictureAt(required(block.source, "url", f"{at}.source"), f"{at}.source.url")
    data = required(block.source, "data", f"{at}.source")
    return PictureAt(f"data:;base64,{data}", f"{at}.source.data")


_PICTURES = PictureForm("image", _picture)


def _of_assistant(message: InputMessage, at: str) -> Iterator[ChatTurn]:
    content = message.content
    if isinstance(content, str):
        yield ChatTurn("assistant", content, at)
        return
    texts, calls, reasoning = list[str](), list[EarlierCall](), ""
    for number, block in enumerate(content):
        where = f"{at}.content[{number}]"
        match block.type:
            case "thinking":
                reasoning += block.thinking or ""
            case "redacted_thinking":
                # Only its author can read it.
                pass
            case "tool_use":
                name = required(block, "name", where)
                calls.append(EarlierCall(name, block.input, required(block, "id", where)))
            case _:
                texts.append(text_of(block, where))
    yield ChatTurn("assistant", texts, at, reasoning=reasoning or None, calls=calls)


def _blocks(content: str | list[Any], at: str) -> str | list[Block]:
    try:
        return msgspec.convert(content, str | list[Block])
    except (msgspec.ValidationError, RecursionError) as error:
        inside, problem = explain(error, str | list[Block])
        raise InvalidRequest.at(f"{at}.content{inside}", f"must be a text or blocks: {problem}") from error


_TURNS: Mapping[str, Callable[[InputMessage, str], Iterator[ChatTurn]]] = {
    "user": _of_user,
    "system": _of_user,
    "assistant": _of_assistant,
}
