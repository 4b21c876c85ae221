"""Anthropic's Messages: the bodies of /v1/messages and /v1/messages/count_tokens, and what they are as a chat.

Called by the routes. `Admission.chat` does the rest, so both APIs have the same limits; its errors get the names of
this API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

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
from neuron_runtime.requests.parameters import ON_DEVICE, ON_TOKENS, Parameter

NAMES = {"stop": "stop_sequences", r"(tools\[\d+\])\.function": r"\1"}
"""Fields of a chat, as regular expressions, that have another name here."""


class Block(msgspec.Struct, frozen=True):
    """A block of a message; which fields it has depends on its type."""

    type: Annotated[
        str, "`text`; `tool_result` of the user; `thinking` and `tool_use` of the assistant. Others are not supported"
    ]
    text: Annotated[str | None, "With `text`: the text"] = None
    thinking: Annotated[str | None, "With `thinking`: reasoning of an earlier answer, for the template"] = None
    id: Annotated[str | None, "With `tool_use`: id of the call; required"] = None
    name: Annotated[str | None, "With `tool_use`: name of the tool; required"] = None
    input: Annotated[dict[str, Any] | None, "With `tool_use`: the arguments"] = None
    tool_use_id: Annotated[str | None, "With `tool_result`: id of the call; required"] = None
    content: Annotated[str | list[Any] | None, "With `tool_result`: a text or `text` blocks"] = None


class InputMessage(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: Annotated[Literal["user", "assistant", "system"], "Author of the message"]
    content: Annotated[str | list[Block], "A text or a list of blocks"]


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model should reason."""

    type: Annotated[Literal["enabled", "disabled", "adaptive"], "`adaptive`: as the model is used to"]
    budget_tokens: Annotated[int | None, "Accepted without effect"] = None
    display: Annotated[str | None, "Accepted without effect"] = None


class ToolDefinition(msgspec.Struct, frozen=True):
    """A tool that the answer may call."""

    name: Annotated[str, "Name of the tool"]
    type: Annotated[str | None, "`custom`; other types are not supported"] = None
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
        "Roles `user` and `assistant`; `content` is a text or a list of blocks: `text`, `tool_result` and, in "
        "earlier answers, `thinking` and `tool_use`. If the last message is the assistant's, the answer continues it",
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


class MessagesBody(CountTokensBody, kw_only=True):
    """A chat and how to answer it."""

    max_tokens: Annotated[
        int | None,
        "Maximum number of output tokens; prompt plus output must fit the model's length. Default: the model's "
        "`max_new_tokens`, else all that fit",
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
    top_k: Annotated[
        int | None,
        "Sample from this many likeliest tokens; 0 and -1: from all",
        Parameter(ON_DEVICE, lowest=-1, neutral=(0, -1), default=0, setting="top_k"),
    ] = None
    stop_sequences: Annotated[
        list[str] | None, "Texts that end the answer, as `stop` of a chat", Parameter(ON_TOKENS, neutral=([],))
    ] = None
    stream: Annotated[bool | None, "Send server-sent events", Parameter(default=False)] = None


def admitted(admission: Admission, body: MessagesBody) -> Ask:
    """Raises InvalidRequest."""
    with InvalidRequest.renaming(NAMES):
        return admission.chat(
            chat_of(
                body,
                max_tokens=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                stop=body.stop_sequences,
                stream=body.stream,
            )
        )


def num_input_tokens(admission: Admission, body: CountTokensBody) -> int:
    """The tokens of the prompt. Raises InvalidRequest."""
    with InvalidRequest.renaming(NAMES):
        return admission.num_prompt_tokens(chat_of(body))


def chat_of(body: CountTokensBody, **sampling: Any) -> ChatBody:
    """The same chat in OpenAI's form. Raises InvalidRequest."""
    messages = [
        translated
        for at, message in enumerate(body.messages)
        for translated in _MESSAGES[message.role](message, f"messages[{at}]")
    ]
    continues = bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
    if body.system:
        messages.insert(0, Message("system", _texts(body.system, "system")))
    switch = _SWITCHES[body.thinking.type] if body.thinking is not None else None
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        continue_final_message=continues or None,
        chat_template_kwargs=switch,
        **sampling,
    )


_SWITCHES: Mapping[str, dict[str, Any] | None] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": None,
}


def _tool(tool: ToolDefinition, at: str) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"`{at}.type`: tools of type `{tool.type}` are not supported"
        raise InvalidRequest(message, field=f"{at}.type")
    return Tool(function=Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type != "tool":
        return choice and {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise InvalidRequest("`tool_choice.name` is missing", field="tool_choice.name")
    return NamedTool("function", FunctionName(choice.name))


def _of_user(message: InputMessage, at: str) -> Iterator[Message]:
    """Results of calls are messages of their own in a chat, and come first."""
    content = message.content
    if isinstance(content, str):
        yield Message(message.role, content)
        return
    for number, block in enumerate(content):
        if block.type == "tool_result":
            where = f"{at}.content[{number}]"
            call_id = _required(block, "tool_use_id", where)
            yield Message("tool", _texts(_blocks(block.content or "", where), f"{where}.content"), tool_call_id=call_id)
    texts = [
        _text(block, f"{at}.content[{number}]") for number, block in enumerate(content) if block.type != "tool_result"
    ]
    if texts or not content:
        yield Message(message.role, texts)


def _of_assistant(message: InputMessage, at: str) -> Iterator[Message]:
    content = message.content
    if isinstance(content, str):
        yield Message("assistant", content)
        return
    texts, calls, reasoning = list[ContentPart](), list[MessageCall](), ""
    for number, block in enumerate(content):
        where = f"{at}.content[{number}]"
        match block.type:
            case "thinking":
                reasoning += block.thinking or ""
            case "redacted_thinking":
                # Only its author can read it.
                pass
            case "tool_use":
                name = _required(block, "name", where)
                calls.append(MessageCall(_required(block, "id", where), function=CalledFunction(name, block.input)))
            case _:
                texts.append(_text(block, where))
    yield Message("assistant", texts, reasoning=reasoning or None, tool_calls=calls or None)


def _blocks(content: str | list[Any], at: str) -> str | list[Block]:
    try:
        return msgspec.convert(content, str | list[Block])
    except msgspec.ValidationError as error:
        message = f"`{at}.content` must be a text or blocks: {error}"
        raise InvalidRequest(message, field=f"{at}.content") from error


def _required(block: Block, name: str, at: str) -> str:
    value: str | None = getattr(block, name)
    if value is None:
        raise InvalidRequest(f"`{at}.{name}` is missing", field=f"{at}.{name}")
    return value


_MESSAGES: Mapping[str, Callable[[InputMessage, str], Iterator[Message]]] = {
    "user": _of_user,
    "system": _of_user,
    "assistant": _of_assistant,
}


def _texts(content: str | Sequence[Block], at: str) -> str | list[ContentPart]:
    """Content that must be text. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return [_text(block, f"{at}[{number}]") for number, block in enumerate(content)]


def _text(block: Block, at: str) -> ContentPart:
    if block.type != "text":
        message = f"`{at}.type`: blocks of type `{block.type}` are not supported here"
        raise InvalidRequest(message, field=f"{at}.type")
    if block.text is None:
        raise InvalidRequest(f"`{at}.text` is missing", field=f"{at}.text")
    return ContentPart("text", block.text)
