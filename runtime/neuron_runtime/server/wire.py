"""The HTTP bodies that clients send: their types, the fields that are refused until built, and error objects.

Stop 1 of a request: a body of bytes becomes a typed body or an InvalidRequest that names the field. Values are
checked against the model's limits afterwards, in `server.admission`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from neuron_runtime.errors import BackendFailed, Draining, InvalidRequest, Overloaded, ServingError

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's and vLLM's API that are refused by name until built, with the values (besides null) that ask for
nothing. A value is neutral only with its own type: `logprobs: 0` asks for something."""

WITHOUT_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields that say something about the caller and cannot change an answer."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that both ways to generate share; None means the model's default."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Generate, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatBody(Generate, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


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


def typed(fields: Mapping[str, Any], body_type: type[Body]) -> Body:
    """Named values, from a body or from a caller in Python, as a typed body. Raises InvalidRequest with the field."""
    asked = {name: value for name, value in fields.items() if name not in WITHOUT_EFFECT and _asks(name, value)}
    known = body_type.__struct_fields__
    for name in asked:
        if name in NOT_BUILT:
            raise InvalidRequest(f"`{name}` is not supported yet: leave it out", field=name)
        if name not in known:
            raise InvalidRequest(f"unknown field `{name}`", field=name)
    try:
        return msgspec.convert(asked, body_type)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").removeprefix(".")
        missing = message.partition("missing required field `")[2].rstrip("`")
        if missing:
            field = f"{field}.{missing}" if field else missing
        raise InvalidRequest(f"`{field}`: {message}" if field else message, field=field or None) from error


def _asks(name: str, value: Any) -> bool:
    neutral = NOT_BUILT.get(name)
    if neutral is None:
        return True
    return value is not None and not any(value == one and _same_type(value, one) for one in neutral)


def _same_type(value: Any, neutral: Any) -> bool:
    # 0, 0.0 are one number; False is not a number.
    return isinstance(value, bool) == isinstance(neutral, bool)


def error_object(message: str, kind: str, field: str | None = None, code: str | None = None) -> bytes:
    """An OpenAI error object."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": field, "code": code}})


def error_answer(error: ServingError) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers with which a client learns of an error."""
    match error:
        case InvalidRequest():
            kind = "not_found_error" if error.status == 404 else "invalid_request_error"
            return error.status, error_object(str(error), kind, error.field, error.code), {}
        case Overloaded():
            headers = {"retry-after": str(max(1, round(error.retry_after_seconds)))}
            return 429, error_object(str(error), "rate_limit_error", code="overloaded"), headers
        case Draining():
            body = error_object(str(error), "service_unavailable_error", code="draining")
            return 503, body, {"retry-after": "1", "connection": "close"}
        case BackendFailed():
            return 503, error_object(str(error), "service_unavailable_error", code="not_ready"), {"retry-after": "5"}
        case _:
            raise TypeError(f"{type(error).__name__} is no answer to a client")
