"""What a client is told about an error, and how an API writes it. Used by the writers and by the server. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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

ECHOED_CHARACTERS = 200
"""An error sends so many characters of the beginning and of the end of a long text."""


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
        """A failure with one message or several."""
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
