"""Conversions at the HTTP border: bytes to typed bodies, and errors to the error objects of the API that was called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from neuron_runtime.errors import (
    BackendFailed,
    Draining,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unauthorized,
    joined,
)
from neuron_runtime.requests.bodies import Body, typed
from neuron_runtime.server.objects import Error, ErrorObject, MessagesError, MessagesErrorObject

if TYPE_CHECKING:
    from neuron_runtime.server.exchange import Exchange

MESSAGES_PATH = "/v1/messages"
ECHOED_CHARACTERS = 200
"""Of a long text in an error, this many characters of its beginning and of its end are sent."""


def parse_body(raw: bytes, body_type: type[Body]) -> Body:
    """Raises InvalidRequest with the field, or without one if the body itself is not a JSON object."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return typed(fields, body_type)


@dataclass(frozen=True)
class Failure:
    """What a client is told about an error. Each message and the field are shortened, because they may contain data
    from the client."""

    status: int
    kind: str
    """OpenAI's type of the error."""
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        status: int,
        kind: str,
        *parts: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Failure:
        """Of one message or several."""
        message = joined([_shortened(part) for part in parts])
        return cls(status, kind, message, None if param is None else _shortened(param), code, headers or {})


@dataclass(frozen=True)
class ErrorFormat:
    """How an API reports errors."""

    struct: type[msgspec.Struct]
    body: Callable[[Failure, str], bytes]
    """From a failure and the request's id."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """The statuses that this API has other ones for."""

    def status(self, status: int) -> int:
        return self.statuses.get(status, status)


def _openai_body(failure: Failure, request_id: str) -> bytes:
    return msgspec.json.encode(ErrorObject(Error(failure.message, failure.kind, failure.param, failure.code)))


def _anthropic_body(failure: Failure, request_id: str) -> bytes:
    kind = ANTHROPIC_KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return msgspec.json.encode(
        MessagesErrorObject(error=MessagesError(kind, failure.message), request_id=request_id or None)
    )


ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
OPENAI = ErrorFormat(ErrorObject, _openai_body)
ANTHROPIC = ErrorFormat(MessagesErrorObject, _anthropic_body, {503: 529})
"""Its clients expect 529 from a service that is busy or restarts, and try again."""


def error_format(path: str) -> ErrorFormat:
    """The format of the API that this path belongs to."""
    return ANTHROPIC if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") else OPENAI


def _shortened(text: str) -> str:
    """Cut the middle of a long text: its beginning has the problem, its end the cure."""
    if len(text) <= 2 * ECHOED_CHARACTERS:
        return text
    return f"{text[:ECHOED_CHARACTERS]}…{text[-ECHOED_CHARACTERS:]}"


def failure_of(error: ServingError) -> Failure:
    """What the client is told about an error, with status and headers."""
    match error:
        case InvalidRequest():
            kind = "not_found_error" if error.status == 404 else "invalid_request_error"
            return Failure.of(error.status, kind, *error.parts, param=error.field, code=error.code)
        case Unauthorized():
            # RFC 6750, section 3: no error code where no key was sent.
            challenge = 'Bearer realm="neuron-serving"' + (', error="invalid_token"' if error.presented else "")
            status, kind, headers = 401, "authentication_error", {"www-authenticate": challenge}
        case Overloaded():
            seconds = str(max(1, round(error.retry_after_seconds)))
            status, kind, headers = 429, "rate_limit_error", {"retry-after": seconds}
        case Draining():
            status, kind, headers = 503, "service_unavailable_error", {"retry-after": "1", "connection": "close"}
        case BackendFailed():
            status, kind, headers = 503, "service_unavailable_error", {"retry-after": "5"}
        case _:
            raise TypeError(f"{type(error).__name__} has no HTTP response")
    return Failure.of(status, kind, str(error), code=error.code, headers=headers)


def error_answer(error: ServingError, exchange: Exchange) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the response for an error."""
    return failure_answer(failure_of(error), exchange)


def failure_answer(failure: Failure, exchange: Exchange) -> tuple[int, bytes, dict[str, str]]:
    """The same for a failure."""
    chosen = error_format(exchange.path)
    return chosen.status(failure.status), chosen.body(failure, exchange.request_id), dict(failure.headers)
