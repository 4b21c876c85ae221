"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on what a client may leave unfinished.

Made by uvicorn for every connection, named in the front end's configuration. uvicorn bounds neither the size of a
head (one that never ends costs quadratic time and all memory) nor the time until it is complete. Bodies are bounded
by the routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from neuron_runtime.server.wire import error_object

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; also trailers, and what lies between two chunks."""
WRITE_BUFFER_BYTES = 16 * 1024
"""Where a client does not keep up, what it has not taken; the text of further tokens is gathered into one event."""
HEAD_SECONDS = 75.0
"""From the connection, or from a request's first byte, to the end of its head."""


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

    @property
    def in_use(self) -> bool:
        return not (self._cycle.response_complete or self._cycle.disconnected)

    def resume(self) -> None:
        if self._resume is not None and self.in_use:
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
        self._writers: list[BodyWriter] = []
        """Of the request that is answered and of those that wait behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unfinished_bytes += len(data)
        super().data_received(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, b"Request Header Fields Too Large", f"a head has at most {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._unfinished_bytes = 0
        super().on_headers_complete()
        writer = BodyWriter(self.cycle)
        # Whoever answers, a task that was just made or one that pipelining lets wait, has not seen the scope yet.
        self.cycle.scope["extensions"] = cast("Any", {_BODY_WRITER: writer})
        self._writers = [*(one for one in self._writers if one.in_use), writer]

    def on_body(self, body: bytes) -> None:
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished_bytes = 0
        super().on_message_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        for writer in self._writers:
            writer.resume()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, b"Bad Request", msg)

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, phrase: bytes, message: str) -> None:
        body = error_object(message, "invalid_request_error")
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, phrase, len(body)) + body)
        self.transport.close()
