"""The HTTP bodies that clients send: their types, how they are parsed, and error objects.

Stop 1 of a request: a body of bytes becomes a typed body or an InvalidRequest that names the field. Values are
checked against the model's limits afterwards, in `server.admission`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from neuron_runtime.errors import BackendFailed, Draining, InvalidRequest, Overloaded, ServingError, Unauthorized
from neuron_runtime.not_built import Surface, is_neutral, refuse

NEUTRAL_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
    "top_logprobs": (0,),
}
"""Of the fields that only one of the two generating routes has: values (besides null) that the other one accepts."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both ways to generate share; None means the model's default. Unknown ones are not looked at."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Generate, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only texts are served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = None
    function_call: Any = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None


class ChatBody(Generate, frozen=True, kw_only=True):
    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


GENERATING: dict[type[msgspec.Struct], str] = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions"}


Body = TypeVar("Body", bound=msgspec.Struct)


def parse_body(raw: bytes, body_type: type[Body]) -> Body:
    """Raises InvalidRequest with the field, or without one when the body itself is not a JSON object."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return typed(fields, body_type)


def typed(fields: Mapping[str, Any], body_type: type[Body], *, unknown_pass: bool = True) -> Body:
    """Named values, from a body or from a caller in Python, as a typed body.

    Args:
        unknown_pass: fields that no version of the API is known to have are not looked at, as OpenAI's clients expect;
            else they are refused.

    Raises:
        InvalidRequest: with the field that is wrong, or that is known and cannot be served.
    """
    known = body_type.__struct_fields__
    asked = {}
    for name, value in fields.items():
        if name in known:
            asked[name] = value
        elif not refuse(Surface.BODY, name, value):
            _pass_unserved(name, value, body_type, unknown_pass)
    try:
        return msgspec.convert(asked, body_type, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        found = _PATH.fullmatch(str(error))
        message, path = (found[1], found[2]) if found else (str(error), "")
        field = path.removeprefix(".").removesuffix("[...]")
        missing = message.partition("missing required field `")[2].rstrip("`")
        if missing:
            field = f"{field}.{missing}" if field else missing
        raise InvalidRequest(f"`{field}`: {message}" if field else message, field=field or None) from error


_PATH = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`")


def _pass_unserved(name: str, value: Any, body_type: type[msgspec.Struct], unknown_pass: bool) -> None:
    """Raises InvalidRequest for a field that `body_type` does not have and that asks for something."""
    if body_type in GENERATING:
        for other, path in GENERATING.items():
            if name in other.__struct_fields__:
                if not is_neutral(value, NEUTRAL_ELSEWHERE.get(name, ())):
                    raise InvalidRequest(f"`{name}` belongs to {path}: leave it out here", field=name)
                return
    if not unknown_pass:
        raise InvalidRequest(f"unknown field `{name}`", field=name)


def error_object(message: str, kind: str, field: str | None = None, code: str | None = None) -> bytes:
    """An OpenAI error object."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": field, "code": code}})


def error_answer(error: ServingError) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers with which a client learns of an error."""
    match error:
        case InvalidRequest():
            kind = "not_found_error" if error.status == 404 else "invalid_request_error"
            return error.status, error_object(str(error), kind, error.field, error.code), {}
        case Unauthorized():
            # RFC 6750, section 3: no error code where no key was sent.
            challenge = 'Bearer realm="neuron-serving"' + (', error="invalid_token"' if error.presented else "")
            body = error_object(str(error), "authentication_error", code=error.code)
            return 401, body, {"www-authenticate": challenge}
        case Overloaded():
            headers = {"retry-after": str(max(1, round(error.retry_after_seconds)))}
            return 429, error_object(str(error), "rate_limit_error", code=error.code), headers
        case Draining():
            body = error_object(str(error), "service_unavailable_error", code=error.code)
            return 503, body, {"retry-after": "1", "connection": "close"}
        case BackendFailed():
            return 503, error_object(str(error), "service_unavailable_error", code=error.code), {"retry-after": "5"}
        case _:
            raise TypeError(f"{type(error).__name__} is no answer to a client")
