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
from neuron_runtime.requests.bodies import ChatBody, ContentPart, Message
from neuron_runtime.requests.parameters import ON_DEVICE, ON_TOKENS, Parameter

NAMES = {"stop": "stop_sequences"}
"""Fields of a chat that have another name here."""


class Block(msgspec.Struct, frozen=True):
    """A block of a message; which fields it has depends on its type."""

    type: Annotated[str, "`text` or, in the assistant's messages, `thinking`; other types are not supported"]
    text: Annotated[str | None, "With `text`: the text"] = None
    thinking: Annotated[str | None, "With `thinking`: reasoning of an earlier answer, for the template"] = None


class InputMessage(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: Annotated[Literal["user", "assistant", "system"], "Author of the message"]
    content: Annotated[str | list[Block], "A text or a list of blocks"]


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model should reason."""

    type: Annotated[Literal["enabled", "disabled", "adaptive"], "`adaptive`: as the model is used to"]
    budget_tokens: Annotated[int | None, "Accepted without effect"] = None
    display: Annotated[str | None, "Accepted without effect"] = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """A chat whose tokens are counted."""

    surface: ClassVar[Surface] = Surface.MESSAGES

    model: Annotated[str | None, "One of the served names. Default: the served model"] = None
    messages: Annotated[
        list[InputMessage],
        "Roles `user` and `assistant`; `content` is a text or a list of blocks: `text`, and `thinking` in earlier "
        "answers. If the last message is the assistant's, the answer continues it",
    ]
    system: Annotated[str | list[Block] | None, "Instructions before the messages: a text or `text` blocks"] = None
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
    continues = bool(messages) and messages[-1].role == "assistant"
    if body.system:
        messages.insert(0, Message("system", _texts(body.system, "system")))
    switch = _SWITCHES[body.thinking.type] if body.thinking is not None else None
    return ChatBody(
        model=body.model,
        messages=messages,
        continue_final_message=continues or None,
        chat_template_kwargs=switch,
        **sampling,
    )


_SWITCHES: Mapping[str, dict[str, Any] | None] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": None,
}


def _of_user(message: InputMessage, at: str) -> Iterator[Message]:
    yield Message(message.role, _texts(message.content, f"{at}.content"))


def _of_assistant(message: InputMessage, at: str) -> Iterator[Message]:
    if isinstance(message.content, str):
        yield Message("assistant", message.content)
        return
    kept = [block for block in message.content if block.type not in _REASONING]
    reasoning = "".join(block.thinking or "" for block in message.content if block.type in _REASONING)
    yield Message("assistant", _texts(kept, f"{at}.content"), reasoning=reasoning or None)


_MESSAGES: Mapping[str, Callable[[InputMessage, str], Iterator[Message]]] = {
    "user": _of_user,
    "system": _of_user,
    "assistant": _of_assistant,
}
_REASONING = ("thinking", "redacted_thinking")


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
