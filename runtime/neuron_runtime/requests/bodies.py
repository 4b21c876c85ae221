"""The bodies that clients send: each field declared once, with its type, meaning, range and default.

Stop 1 of a request: named values, from an HTTP body or from a caller in Python, become a typed body or an
InvalidRequest that names the field. What depends on the model is checked afterwards, in `admission`.
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

MAX_SALT_CHARACTERS = 256

_NOT_BUILT = "Not supported yet"


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells besides text."""

    include_usage: Annotated[bool | None, "A last event with the usage"] = None
    continuous_usage_stats: Annotated[bool | None, "The usage in each event; with `include_usage`"] = None
    include_obfuscation: Annotated[bool | None, "Accepted; nothing is padded"] = None


class Generate(SamplingFields, kw_only=True):
    """The fields that both generating routes share. Unknown ones are ignored."""

    model: Annotated[str | None, "One of the served names. Left out: the model that is served"] = None
    add_special_tokens: Annotated[
        bool | None,
        "Add what the tokenizer puts around a text, such as a BOS; a chat's template writes its own. Left out: "
        "true for completions, false for chats",
    ] = None
    return_token_ids: Annotated[
        bool | None,
        "Return `token_ids` in each choice, and `prompt_token_ids` beside it (chat: beside the choices)",
        Parameter(default=False),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, "Log-probabilities name tokens `token_id:N`", Parameter(default=False)
    ] = None
    priority: Annotated[
        int | None, "Lower numbers are served first", Parameter(lowest=-(2**31), highest=2**31 - 1, default=0)
    ] = None
    cache_salt: Annotated[
        str | None,
        f"At most {MAX_SALT_CHARACTERS} characters. Only requests of the same salt share cached beginnings of prompts",
        Parameter(default=""),
    ] = None
    stream: Annotated[bool | None, "Server-sent events, ended by `[DONE]`", Parameter(default=False)] = None
    stream_options: Annotated[
        StreamOptions | None,
        "With `stream`. `include_usage`: a last event with the usage; `continuous_usage_stats`: the usage in each "
        "event; `include_obfuscation`: accepted, nothing is padded",
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
        "The largest number of tokens of the answer; prompt and answer together must fit. 0 only with `echo`. Left "
        f"out: the model's `max_new_tokens`, else {DEFAULT_COMPLETION_TOKENS}",
        Parameter(ON_TOKENS, lowest=0),
    ] = None
    logprobs: Annotated[
        int | None,
        "Log-probabilities of the answer's tokens, with this many alternatives each, the chosen one always",
        Parameter(ON_LOGITS, lowest=0),
    ] = None
    echo: Annotated[
        bool | None,
        "The prompt stands before each answer; with `logprobs`, its log-probabilities too",
        Parameter(ON_TOKENS, neutral=(False,), default=False),
    ] = None
    best_of: Annotated[int | None, "1 or `n`", Parameter(neutral=(1,))] = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1 and not self.echo:
            message = f"`max_tokens` must be at least 1 without `echo`, got {self.max_tokens}"
            raise InvalidRequest(message, field="max_tokens")


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only texts are served."""

    type: Annotated[str, "`text`; other types are not supported yet"]
    text: Annotated[str | None, "The text; required"] = None


class Message(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        "Author of the message; `developer` is a system message where the template knows no such "
        "role, `tool` and `function` are not supported yet",
    ]
    content: Annotated[str | list[ContentPart] | None, "A text or a list of parts; required but for `assistant`"] = None
    name: Annotated[str | None, "Name of the author, for the template"] = None
    reasoning: Annotated[str | None, "Reasoning of an earlier answer, for the template"] = None
    reasoning_content: Annotated[str | None, "The older name of `reasoning`"] = None
    refusal: Annotated[str | None, _NOT_BUILT] = None
    audio: Annotated[Any, _NOT_BUILT] = None
    function_call: Annotated[Any, _NOT_BUILT] = None
    tool_call_id: Annotated[str | None, _NOT_BUILT] = None
    tool_calls: Annotated[list[Any] | None, _NOT_BUILT] = None


AddGenerationPrompt = Annotated[
    bool | None,
    "The template opens an answer. Left out: true, false with `continue_final_message`",
    Parameter(neutral=(True,)),
]
ContinueFinalMessage = Annotated[
    bool | None,
    "The last message is left open and the answer continues it; not together with `add_generation_prompt`",
    Parameter(neutral=(False,), default=False),
]
TemplateVariables = Annotated[dict[str, Any] | None, "Variables for the template", Parameter(neutral=({},))]


class ChatBody(Generate, kw_only=True):
    """A chat and how to answer it."""

    messages: Annotated[
        list[Message],
        "Roles `system`, `developer` (a system message where the template knows no developers), `user`, "
        "`assistant`; `content` is a text or a list of `text` parts; `name` and, of earlier answers, `reasoning` "
        "or `reasoning_content` are given to the template",
    ]
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Annotated[
        str | None, "A variable for the template; refused where the template does not read it"
    ] = None
    max_completion_tokens: Annotated[
        int | None, "The newer name of `max_tokens`; the two must not differ", Parameter(ON_TOKENS, lowest=1)
    ] = None
    logprobs: Annotated[
        bool | None, "Log-probabilities of the answer's tokens", Parameter(ON_LOGITS, neutral=(False,), default=False)
    ] = None
    top_logprobs: Annotated[
        int | None,
        "This many alternatives per token; with `logprobs`",
        Parameter(ON_LOGITS, lowest=0, neutral=(0,), default=0),
    ] = None
    include_reasoning: Annotated[
        bool | None, "Show the thoughts of a model that thinks", Parameter(neutral=(True,), default=True)
    ] = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text or a chat."""

    model: Annotated[str | None, "One of the served names"] = None
    prompt: Annotated[str | None, "A text; either this or `messages`"] = None
    messages: Annotated[list[Message] | None, "A chat, written with the model's template"] = None
    add_special_tokens: Annotated[
        bool | None, "Add what the tokenizer puts around a text. Left out: true for a text, false for a chat"
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
"""The generating routes; each refuses the fields that only the other one has."""

Body = TypeVar("Body", bound=msgspec.Struct)


def typed(fields: Mapping[str, Any], body_type: type[Body], *, ignores_unknown: bool = True) -> Body:
    """Named values, from an HTTP body or from a caller in Python, as a typed body whose values lie in their ranges.

    Args:
        ignores_unknown: fields that no version of the API is known to have are ignored, as OpenAI's clients expect;
            else they are refused.

    Raises:
        InvalidRequest: with the field that is wrong, or that is known and cannot be served.
    """
    known = body_type.__struct_fields__
    given = {}
    for name, value in fields.items():
        if name in known:
            given[name] = value
            continue
        is_known = refuse(Surface.BODY, name, value) or _of_other_route(name, value, body_type)
        if not is_known and not ignores_unknown:
            raise InvalidRequest(f"unknown field `{name}`", field=name)
    try:
        body = msgspec.convert(given, body_type, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        found = _PATH.fullmatch(str(error))
        message, path = (found[1], found[2]) if found else (str(error), "")
        field = path.removeprefix(".").removesuffix("[...]")
        missing = message.partition("missing required field `")[2].rstrip("`")
        if missing:
            field = f"{field}.{missing}" if field else missing
        raise InvalidRequest(f"`{field}`: {message}" if field else message, field=field or None) from error
    rows = parameters_of(body_type)
    for name in given:
        rows[name].check(name, getattr(body, name))
    return body


_PATH = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`")


def _of_other_route(name: str, value: Any, body_type: type[msgspec.Struct]) -> bool:
    """Whether only the other generating route has a field. Raises InvalidRequest where its value is not neutral."""
    for other, path in ROUTES.items() if body_type in ROUTES else ():
        row = parameters_of(other).get(name)
        if row is not None:
            if not is_neutral(value, row.neutral):
                raise InvalidRequest(f"`{name}` belongs to {path}: leave it out here", field=name)
            return True
    return False
