"""Conversions at the HTTP border: bytes to typed bodies, and errors to OpenAI error objects with their status."""

from __future__ import annotations

from collections.abc import Sequence

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


def error_object(message: str | Sequence[str], kind: str, field: str | None = None, code: str | None = None) -> bytes:
    """An OpenAI error object of one message or several. Each message and the field are shortened, because they may
    contain data from the client."""
    message = joined([_shortened(part) for part in ((message,) if isinstance(message, str) else message)])
    param = None if field is None else _shortened(field)
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _shortened(text: str) -> str:
    """Cut the middle of a long text: its beginning has the problem, its end the cure."""
    if len(text) <= 2 * ECHOED_CHARACTERS:
        return text
    return f"{text[:ECHOED_CHARACTERS]}…{text[-ECHOED_CHARACTERS:]}"


def error_answer(error: ServingError) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the response for an error."""
    match error:
        case InvalidRequest():
            kind = "not_found_error" if error.status == 404 else "invalid_request_error"
            return error.status, error_object(error.parts, kind, error.field, error.code), {}
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
            raise TypeError(f"{type(error).__name__} has no HTTP response")
