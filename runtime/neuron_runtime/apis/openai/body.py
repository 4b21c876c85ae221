"""OpenAI's completions and chat completions: their bodies, those of vLLM's routes about tokens, and what they are to
admission.

Each field is declared once, with type, description, range and default. Called by the routes and by the offline class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from neuron_runtime.apis.parts import PictureForm, contents_of, missing
from neuron_runtime.config import ServerOptions
from neuron_runtime.core import ACTS
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface, is_neutral, refuse, rows
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.requests.admission import Admission, Ask
from neuron_runtime.requests.chats import Chat, ChatTurn
from neuron_runtime.requests.options import ChatOptions, CompletionOptions
from neuron_runtime.requests.parameters import NO_NAMES, Names, Parameter, parameters_of
from neuron_runtime.requests.prompts import PromptField
from neuron_runtime.requests.tools import MAX_TOOLS, MAX_TOOLS_BYTES, EarlierCall, Function

_NOT_BUILT = "Not supported yet"

Elsewhere = Callable[[str, Any], bool]
"""From a field and its value, whether only the other generation route has the field. Raises InvalidRequest if the value
has an effect there."""


class CompletionBody(CompletionOptions, kw_only=True):
    """Prompts and how to continue them."""

    elsewhere: ClassVar[Elsewhere]

    prompt: Annotated[
        PromptField,
        "A text, a list of texts, a list of token ids, or a list of such lists; at most "
        f"{ServerOptions().max_prompts} prompts",
    ]
    best_of: Annotated[int | None, "Only 1 or `n`", Parameter(neutral=(1,))] = None


class ImageUrl(msgspec.Struct, frozen=True):
    """Where a picture is."""

    url: Annotated[str, "`data:image/...;base64,` and the picture, or an `https:` URL at one of the allowed hosts"]
    detail: Annotated[str | None, "Accepted without effect"] = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message: a text or, for models that see pictures, one of them."""

    type: Annotated[str, "`text` or, in messages of the user and of tools, `image_url`; others are not supported yet"]
    text: Annotated[str | None, "With `text`: the text; required"] = None
    image_url: Annotated[ImageUrl | str | None, "With `image_url`: where the picture is; required"] = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    type: Annotated[str | None, "`function`; other types are not supported yet"] = "function"
    function: Annotated[Function | None, "The function; required"] = None


class CalledFunction(msgspec.Struct, frozen=True):
    """The call of a function in an earlier answer."""

    name: Annotated[str, "Name of the function"]
    arguments: Annotated[str | dict[str, Any] | None, "JSON of the arguments"] = None


class MessageCall(msgspec.Struct, frozen=True):
    """A call in an earlier answer."""

    id: Annotated[str | None, "Id of the call"] = None
    type: Annotated[str | None, "`function`"] = "function"
    function: Annotated[CalledFunction | None, "The function; required"] = None


class Message(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        "Author of the message. `developer` and `system` are given under the name that the template shows; `tool` "
        "returns the result of a call; `function` is not supported yet",
    ]
    content: Annotated[str | list[ContentPart] | None, "A text or a list of parts; optional for `assistant`"] = None
    name: Annotated[str | None, "Name of the author, for the template"] = None
    reasoning: Annotated[str | None, "Reasoning of an earlier answer, for the template"] = None
    reasoning_content: Annotated[str | None, "Older name of `reasoning`"] = None
    refusal: Annotated[str | None, _NOT_BUILT] = None
    audio: Annotated[Any, _NOT_BUILT] = None
    function_call: Annotated[Any, _NOT_BUILT] = None
    tool_call_id: Annotated[str | None, "Role `tool`: id of the call that this is the result of"] = None
    tool_calls: Annotated[list[MessageCall] | None, "Role `assistant`: calls of an earlier answer"] = None


AddGenerationPrompt = Annotated[
    bool | None,
    "Let the template start an answer. Default: true, but false with `continue_final_message`",
    Parameter(neutral=(True,)),
]
ContinueFinalMessage = Annotated[
    bool | None,
    "Continue the last message instead of starting an answer; not with `add_generation_prompt`",
    Parameter(neutral=(False,), default=False),
]
TemplateVariables = Annotated[dict[str, Any] | None, "Variables for the template", Parameter(neutral=({},))]


Tools = Annotated[
    list[Tool] | None,
    f"Functions that the answer may call; at most {MAX_TOOLS}, and {MAX_TOOLS_BYTES} bytes",
    Parameter(neutral=([],)),
]


class ChatBody(ChatOptions, kw_only=True):
    """A chat and how to answer it."""

    elsewhere: ClassVar[Elsewhere]

    messages: Annotated[
        list[Message],
        "Roles `system`, `developer` (given under the name that the template shows), `user`, `assistant`, "
        "`tool`; `content` is a text or a list of `text` and `image_url` parts; `name`, `tool_call_id` and, for "
        "earlier answers, `tool_calls` and `reasoning` or `reasoning_content` are passed to the template",
    ]
    tools: Tools = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Annotated[
        str | None, "Variable for the template; without effect if the template does not use it"
    ] = None
    max_completion_tokens: Annotated[
        int | None,
        "Newer name of `max_tokens`; if both are set, they must be equal",
        Parameter(ACTS["max_tokens"], lowest=1),
    ] = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text or a chat."""

    model: Annotated[str | None, "One of the served names"] = None
    prompt: Annotated[str | None, "A text; either this or `messages`"] = None
    messages: Annotated[list[Message] | None, "A chat, rendered with the model's template"] = None
    tools: Tools = None
    add_special_tokens: Annotated[
        bool | None, "Add the tokenizer's special tokens. Default: true for a text, false for a chat"
    ] = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template_kwargs: TemplateVariables = None
    return_token_strs: Annotated[bool | None, "Return the tokens as texts too", Parameter(default=False)] = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Tokens."""

    model: Annotated[str | None, "One of the served names"] = None
    tokens: Annotated[list[int], "Token ids"]


def _only_in(body: type[msgspec.Struct], path: str) -> Elsewhere:
    def elsewhere(name: str, value: Any) -> bool:
        row = parameters_of(body).get(name)
        if row is not None and not is_neutral(value, row.neutral):
            raise InvalidRequest.at(name, f"belongs to {path}: leave it out here")
        return row is not None

    return elsewhere


CompletionBody.elsewhere = _only_in(ChatBody, "/v1/chat/completions")
ChatBody.elsewhere = _only_in(CompletionBody, "/v1/completions")


def admitted_completion(admission: Admission, body: CompletionBody, pictures: Sequence[PictureAt] = ()) -> Ask:
    """Raises InvalidRequest.

    pictures: of a Python caller, for the one prompt.
    """
    if body.best_of not in (None, 1, body.n):
        raise InvalidRequest.at("best_of", f"must be 1 or `n`, got {body.best_of}: other values are not supported yet")
    return admission.completion(body.prompt, body, pictures)


def admitted_chat(admission: Admission, body: ChatBody) -> Ask:
    """Raises InvalidRequest."""
    return admission.chat(chat_of(body))


def tokens_of(admission: Admission, body: TokenizeBody) -> tuple[int, ...]:
    """Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of `prompt` and `messages` is required", field="prompt")
    if body.prompt is not None:
        return admission.text_tokens(body.prompt, body.add_special_tokens is not False)
    return admission.chat_tokens(_chat(body, ChatOptions(add_special_tokens=body.add_special_tokens)))


def chat_of(body: ChatBody) -> Chat:
    """Returns the chat that admission gets. Raises InvalidRequest."""
    if body.max_completion_tokens is None:
        return _chat(body, body)
    if body.max_tokens not in (None, body.max_completion_tokens):
        message = (
            f"`max_tokens` ({body.max_tokens}) and `max_completion_tokens` ({body.max_completion_tokens}) differ: "
            "leave `max_tokens` out"
        )
        raise InvalidRequest(message, field="max_tokens")
    options = msgspec.structs.replace(body, max_tokens=body.max_completion_tokens)
    return _chat(body, options, Names(max_tokens="max_completion_tokens"))


def _chat(body: ChatBody | TokenizeBody, options: ChatOptions, names: Names = NO_NAMES) -> Chat:
    messages = body.messages or []
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message and body.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` cannot be combined: leave out one of them"
        raise InvalidRequest(message, field="continue_final_message")
    if body.continue_final_message and messages and messages[-1].tool_calls:
        raise InvalidRequest.at("continue_final_message", "cannot continue a message with `tool_calls`")
    return Chat(
        turns=[_turn(message, f"messages[{at}]") for at, message in enumerate(messages)],
        options=options,
        names=names,
        tools=[_function(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())],
        variables=variables,
        opens_answer=body.add_generation_prompt is not False,
        continues=body.continue_final_message is True,
    )


_REFUSED_IN_MESSAGES = [row.name for row in rows(Surface.MESSAGE)]


def _turn(message: Message, at: str) -> ChatTurn:
    for field in _REFUSED_IN_MESSAGES:
        value = getattr(message, field)
        if value is not None:
            refuse(Surface.MESSAGE, field, value, at=f"{at}.{field}")
    refuse(Surface.ROLE, message.role, message.role, at=f"{at}.role")
    content = message.content
    if content is None and message.role != "assistant":
        raise missing("content", at)
    calls = list(_calls(message, at))
    return ChatTurn(
        role=message.role,
        content=None if content is None else contents_of(content, f"{at}.content", message.role, _PICTURES),
        at=at,
        name=message.name,
        reasoning=message.reasoning_content if message.reasoning is None else message.reasoning,
        calls=calls,
        call_id=message.tool_call_id,
        tools_at=f"{at}.tool_calls" if calls else f"{at}.role",
    )


def _picture(part: ContentPart, at: str) -> PictureAt:
    if part.image_url is None:
        raise missing("image_url", at)
    return PictureAt(part.image_url if isinstance(part.image_url, str) else part.image_url.url, f"{at}.image_url")


_PICTURES = PictureForm("image_url", _picture)


def _calls(message: Message, at: str) -> Iterator[EarlierCall]:
    for number, call in enumerate(message.tool_calls or ()):
        where = f"{at}.tool_calls[{number}]"
        if call.type not in (None, "function") or call.function is None:
            raise InvalidRequest(f"`{where}` must be the call of a function", field=f"{where}.type")
        yield EarlierCall(call.function.name, call.function.arguments, call.id)


def _function(tool: Tool, at: str) -> Function:
    if tool.type not in (None, "function"):
        message = f"`{at}.type` must be `function`, got `{tool.type[:64]}`: other tools are not supported yet"
        raise InvalidRequest(message, field=f"{at}.type")
    if tool.function is None:
        raise missing("function", at)
    return tool.function
