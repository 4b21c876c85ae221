"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on what a client may leave unfinished.

Made by uvicorn for every connection, named in the front end's configuration. uvicorn bounds neither the size of a
head (one that never ends costs quadratic time and all memory) nor the time until it is complete, nor how many requests
wait behind one another. Bodies are bounded by the routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from neuron_runtime.server.wire import error_object

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; also trailers, and what lies between two chunks."""
WRITE_BUFFER_BYTES = 16 * 1024
"""Where a client does not keep up, what it has not taken; the text of further tokens is gathered into one event."""
HEAD_SECONDS = 75.0
"""From the connection, or from a request's first byte, to the end of its head."""
MAX_PIPELINED = 64
"""Requests that wait behind the one that is answered; a connection that brings more ends."""

_BODY_WRITER = "neuron_serving.body_writer"


class BodyWriter:
    """Writes parts of an answer whose head was sent, without a task that waits; the last part goes through ASGI.

    The way of a streamed token: from the message of the engine to the socket in one go.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._resume: Callable[[], None] | None = None

    @property
    def writable(self) -> bool:
        """Whether the client keeps up: there is room in the connection's buffer."""
        return not self._flow.write_paused

    def write(self, body: bytes) -> None:
        """Nothing happens where the client is gone, or `body` is empty."""
        if body and not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def when_writable(self, call: Callable[[], None]) -> None:
        """Call it each time that the client has caught up, until the answer has ended."""
        self._resume = call

    def resume(self) -> None:
        """The client has caught up."""
        if self._resume is not None and not (self._cycle.response_complete or self._cycle.disconnected):
            self._resume()


def body_writer(scope: Scope) -> BodyWriter:
    """Of the answer to this request, whose head names no length."""
    writer = scope["extensions"][_BODY_WRITER]
    assert isinstance(writer, BodyWriter)
    return writer


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unfinished_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        """The request that is answered, or was last; uvicorn's `cycle` is the newest, which may wait behind it."""
        self._repeats_head = False
        """The parser is given the end of a head again: see `_framing`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unfinished_bytes += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                break
            except HttpParserUpgrade as stopped:
                # Who asks for another protocol is answered in this one (RFC 9110, section 7.8).
                data = self._framing() + data[stopped.args[0] :]
            except HttpParserError:
                self.send_400_response("this is not HTTP/1.1")
                return
        if self._unfinished_bytes > MAX_HEAD_BYTES:
            self._refuse(431, b"Request Header Fields Too Large", f"a head has at most {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if not self._repeats_head:
            self._await_head()
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._repeats_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            self._repeats_head = False
            return
        self._stop_waiting()
        self._unfinished_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests at once")
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        # Whoever answers, a task that was just made or one that pipelining lets wait, has not seen the scope yet.
        self.cycle.scope["extensions"] = cast("Any", {_BODY_WRITER: BodyWriter(self.cycle)})

    def on_body(self, body: bytes) -> None:
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished_bytes = 0
        if not (self.parser.should_upgrade() and self._framing_headers()):
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answered is not None:
            body_writer(cast("Scope", self._answered.scope)).resume()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, b"Bad Request", msg)

    def _framing_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]

    def _framing(self) -> bytes:
        """What the parser must be told so that it reads the body of a request that asks for another protocol.

        It takes such a request to end with its head. Java's HTTP client asks for h2c with every first request.
        """
        headers = self._framing_headers()
        self._repeats_head = bool(headers)
        return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % one for one in headers) if headers else b""

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, phrase: bytes, message: str) -> None:
        answered = self._answered
        if answered is not None and answered.response_started and not answered.response_complete:
            # In the middle of an answer there is no room for another one.
            self.transport.abort()
        if self.transport.is_closing():
            return
        body = error_object(message, "invalid_request_error")
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, phrase, len(body)) + body)
        self.transport.close()
