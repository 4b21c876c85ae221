"""Request bodies: each field is declared once, with type, description, range and default.

Stop 1 of a request: named values from an HTTP body or a Python caller become a typed body, or an InvalidRequest that
names the field. `admission` then checks what depends on the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from neuron_runtime.config import ServerOptions
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.not_built import Surface, is_neutral, refuse
from neuron_runtime.requests.parameters import ON_LOGITS, ON_TOKENS, Parameter, parameters_of
from neuron_runtime.requests.sampling_fields import DEFAULT_COMPLETION_TOKENS, SamplingFields
from neuron_runtime.validation import explain, problems

MAX_SALT_CHARACTERS = 256
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARACTERS = 128
MAX_TOOLS_BYTES = 1024 * 1024

_NOT_BUILT = "Not supported yet"


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: Annotated[bool | None, "Send the usage in a last event"] = None
    continuous_usage_stats: Annotated[bool | None, "Send the usage in every event; with `include_usage`"] = None
    include_obfuscation: Annotated[bool | None, "Accepted without effect"] = None


class Generate(SamplingFields, kw_only=True):
    """Fields of both generation routes. Unknown fields are ignored."""

    model: Annotated[str | None, "One of the served names. Default: the served model"] = None
    add_special_tokens: Annotated[
        bool | None,
        "Add the tokenizer's special tokens, such as a BOS; chat templates write their own. Default: true for "
        "completions, false for chats",
    ] = None
    return_token_ids: Annotated[
        bool | None,
        "Return `token_ids` in each choice, and `prompt_token_ids` in each choice (chat: next to the choices)",
        Parameter(default=False),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, "Write tokens in log-probabilities as `token_id:N`", Parameter(default=False)
    ] = None
    priority: Annotated[
        int | None, "Lower numbers are served first", Parameter(lowest=-(2**31), highest=2**31 - 1, default=0)
    ] = None
    cache_salt: Annotated[
        str | None,
        f"Only requests with the same salt share cached prompt prefixes; at most {MAX_SALT_CHARACTERS} characters",
        Parameter(default=""),
    ] = None
    stream: Annotated[bool | None, "Send server-sent events, ended by `[DONE]`", Parameter(default=False)] = None
    stream_options: Annotated[
        StreamOptions | None,
        "With `stream`. `include_usage`: send the usage in a last event; `continuous_usage_stats`: send it in every "
        "event; `include_obfuscation`: accepted without effect",
    ] = None


class CompletionBody(Generate, kw_only=True):
    """Prompts and how to continue them."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        "A text, a list of texts, a list of token ids, or a list of such lists; at most "
        f"{ServerOptions().max_prompts} prompts",
    ]
    max_tokens: Annotated[
        int | None,
        "Maximum number of output tokens; prompt plus output must fit the model's length. 0 only with `echo`. "
        f"Default: the model's `max_new_tokens`, else {DEFAULT_COMPLETION_TOKENS}",
        Parameter(ON_TOKENS, lowest=0),
    ] = None
    logprobs: Annotated[
        int | None,
        "Return log-probabilities of output tokens, with this many alternatives each",
        Parameter(ON_LOGITS, lowest=0),
    ] = None
    echo: Annotated[
        bool | None,
        "Return the prompt before each answer; with `logprobs`, its log-probabilities too",
        Parameter(ON_TOKENS, neutral=(False,), default=False),
    ] = None
    best_of: Annotated[int | None, "Only 1 or `n`", Parameter(neutral=(1,))] = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1 and not self.echo:
            message = f"`max_tokens` must be at least 1 without `echo`, got {self.max_tokens}"
            raise InvalidRequest(message, field="max_tokens")


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is supported."""

    type: Annotated[str, "`text`; other types are not supported yet"]
    text: Annotated[str | None, "The text; required"] = None


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: Annotated[str, f"1 to {MAX_TOOL_NAME_CHARACTERS} letters, digits, `_`, `-` or `.`"]
    description: Annotated[str | None, "What it is for; the model reads it"] = None
    parameters: Annotated[dict[str, Any] | None, "JSON schema of the arguments, an object. Default: none"] = None
    strict: Annotated[
        bool | None,
        "Arguments fit the schema, where the model's format of calls allows that; those of forced calls always do",
    ] = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    type: Annotated[str, "`function`; other types are not supported yet"] = "function"
    function: Annotated[Function | None, "The function; required"] = None


class FunctionName(msgspec.Struct, frozen=True):
    """Names a function."""

    name: Annotated[str, "Name of one of `tools`"]


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that the answer must call."""

    type: Annotated[Literal["function"], "`function`"]
    function: Annotated[FunctionName, "The function"]


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


class CalledFunction(msgspec.Struct, frozen=True):
    """The call of a function in an earlier answer."""

    name: Annotated[str, "Name of the function"]
    arguments: Annotated[str | dict[str, Any] | None, "JSON of the arguments"] = None


class MessageCall(msgspec.Struct, frozen=True):
    """A call in an earlier answer."""

    id: Annotated[str | None, "Id of the call"] = None
    type: Annotated[str, "`function`"] = "function"
    function: Annotated[CalledFunction | None, "The function; required"] = None


class Message(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        "Author of the message. `developer` becomes `system` if the template does not handle it; `tool` returns the "
        "result of a call; `function` is not supported yet",
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


class ChatBody(Generate, kw_only=True):
    """A chat and how to answer it."""

    messages: Annotated[
        list[Message],
        "Roles `system`, `developer` (becomes `system` if the template does not handle it), `user`, `assistant`, "
        "`tool`; `content` is a text or a list of `text` parts; `name`, `tool_call_id` and, for earlier answers, "
        "`tool_calls` and `reasoning` or `reasoning_content` are passed to the template",
    ]
    tools: Tools = None
    tool_choice: Annotated[
        ToolChoice,
        "`auto`: the model decides whether to call tools; `none`: it does not see them; `required`: the answer calls "
        "at least one; a named function: it calls this one",
        Parameter(ON_LOGITS, neutral=("none", "auto"), default="auto"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, "false: at most one call in an answer", Parameter(neutral=(True, False), default=True)
    ] = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Annotated[
        str | None, "Variable for the template; without effect if the template does not use it"
    ] = None
    max_completion_tokens: Annotated[
        int | None, "Newer name of `max_tokens`; if both are set, they must be equal", Parameter(ON_TOKENS, lowest=1)
    ] = None
    logprobs: Annotated[
        bool | None, "Return log-probabilities of output tokens", Parameter(ON_LOGITS, neutral=(False,), default=False)
    ] = None
    top_logprobs: Annotated[
        int | None,
        "Number of alternatives per token; with `logprobs`",
        Parameter(ON_LOGITS, lowest=0, neutral=(0,), default=0),
    ] = None
    include_reasoning: Annotated[
        bool | None, "Return the reasoning of a reasoning model", Parameter(neutral=(True,), default=True)
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


ROUTES: dict[type[msgspec.Struct], str] = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions"}
"""The generation routes; each refuses fields that only the other one has."""

Body = TypeVar("Body", bound=msgspec.Struct)


def typed(fields: Mapping[str, Any], body_type: type[Body], *, ignores_unknown: bool = True) -> Body:
    """Convert named values from an HTTP body or a Python caller to a typed body, and check their ranges.

    Args:
        ignores_unknown: ignore unknown fields, as OpenAI's clients expect; otherwise refuse them.

    Raises:
        InvalidRequest: says everything that is wrong, and names the first field.
    """
    known = body_type.__struct_fields__
    surface: Surface = getattr(body_type, "surface", Surface.BODY)
    given = {name: value for name, value in fields.items() if name in known}
    wrong: list[InvalidRequest] = []
    for name, value in fields.items():
        if name not in known:
            try:
                is_known = refuse(surface, name, value, others=fields) or _of_other_route(name, value, body_type)
                if not is_known and not ignores_unknown:
                    raise InvalidRequest(f"unknown field `{name}`", field=name)
            except InvalidRequest as error:
                wrong.append(error)
    body, mistyped = None, set[str]()
    try:
        body = msgspec.convert(given, body_type, str_keys=True)
    except InvalidRequest as error:
        wrong.append(error)
    except (msgspec.ValidationError, RecursionError) as error:
        found = list(problems(given, body_type)) or [explain(error, body_type)]
        wrong += [_as_request_error(path, message) for path, message in found]
        mistyped = {name for path, _ in found for name in _KEY.findall(path)[:1]}
    rows = parameters_of(body_type)
    for name, value in given.items():
        if name not in mistyped:
            try:
                rows[name].check(name, value)
            except InvalidRequest as error:
                wrong.append(error)
    if wrong or body is None:
        raise InvalidRequest.together(wrong) if len(wrong) > 1 else wrong[0]
    return body


_KEY = re.compile(r"[^.\[]+")


def _as_request_error(path: str, message: str) -> InvalidRequest:
    field = path.removeprefix(".").removesuffix("[...]")
    missing = message.partition("missing required field `")[2].rstrip("`")
    if missing:
        field = f"{field}.{missing}" if field else missing
    return InvalidRequest(f"`{field}`: {message}" if field else message, field=field or None)


def _of_other_route(name: str, value: Any, body_type: type[msgspec.Struct]) -> bool:
    """Whether only the other generation route has the field. Raises InvalidRequest if its value is not neutral."""
    for other, path in ROUTES.items() if body_type in ROUTES else ():
        row = parameters_of(other).get(name)
        if row is not None:
            if not is_neutral(value, row.neutral):
                raise InvalidRequest(f"`{name}` belongs to {path}: leave it out here", field=name)
            return True
    return False
