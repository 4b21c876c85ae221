"""What the gateway itself tells a client, in the words of the API that was called. Pure.

The gateway's own errors look like those of the servers behind it, so that clients need to know only one form.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
_ANTHROPIC_KINDS = {413: "request_too_large", 502: "api_error", 503: "overloaded_error", 504: "timeout_error"}
_ANTHROPIC_STATUS = {503: 529}
"""Its clients expect 529 from a service that is busy, and try again."""


@dataclass
class Refusal(Exception):
    """A request that the gateway answers itself."""

    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None
    challenge: bool = False
    """Whether a key is missing or wrong."""

    def status_for(self, path: str) -> int:
        return _ANTHROPIC_STATUS.get(self.status, self.status) if _is_messages(path) else self.status

    def body(self, path: str, request_id: str) -> bytes:
        if _is_messages(path):
            kind = _ANTHROPIC_KINDS.get(self.status, self.kind)
            error = {"type": kind, "message": self.message}
            return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
        error_object = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error_object})

    def event(self, path: str, request_id: str) -> bytes:
        """The same as an event of a stream that has begun."""
        if _is_messages(path):
            return b"event: error\ndata: %b\n\n" % self.body(path, request_id)
        if path == RESPONSES_PATH:
            said = {"type": "error", "code": self.code, "message": self.message, "param": None, "sequence_number": -1}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(said)
        return b"data: %b\n\n" % self.body(path, request_id)

    def headers(self) -> bytes:
        lines = b""
        if self.retry_after is not None:
            lines += b"retry-after: %d\r\n" % self.retry_after
        if self.challenge:
            lines += b'www-authenticate: Bearer realm="neuron-serving"\r\n'
        return lines


def _is_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def head(status: int, length: int, headers: bytes, *, request_id: str, keeps: bool) -> bytes:
    """The head of an answer in JSON that the gateway writes itself."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bx-request-id: %b\r\n%b\r\n" % (
        status,
        reason(status),
        length,
        headers,
        request_id.encode("latin-1"),
        b"" if keeps else b"connection: close\r\n",
    )


def reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"


def invalid(message: str, *, param: str | None = None, status: int = 400) -> Refusal:
    return Refusal(status, "invalid_request_error", message, param=param)


def not_found(message: str, *, code: str | None = None, param: str | None = None) -> Refusal:
    return Refusal(404, "not_found_error", message, code=code, param=param)


def unavailable(message: str, code: str, *, retry_after: int = 1, status: int = 503) -> Refusal:
    return Refusal(status, "service_unavailable_error", message, code=code, retry_after=retry_after)


def limited(message: str, code: str, retry_after: int) -> Refusal:
    return Refusal(429, "rate_limit_error", message, code=code, retry_after=max(1, retry_after))
