"""HTTP/1.1 on one connection: uvicorn's protocol with limits for incomplete and pipelined requests.

uvicorn creates it for every connection, as configured by the front end. uvicorn itself limits neither the size of
request heads (an endless one takes quadratic time and all memory), nor the time until a head is complete, nor the
number of pipelined requests. The routes limit bodies.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from neuron_runtime.apis.failures import Failure
from neuron_runtime.apis.openai.errors import OPENAI
from neuron_runtime.server.gate import Gate

MAX_HEAD_BYTES = 64 * 1024
"""Request line plus headers; also trailers, and data between two chunks."""
WRITE_BUFFER_BYTES = 16 * 1024
"""Write buffer for a slow client; when it is full, the text of further tokens is collected into one event."""
HEAD_SECONDS = 75.0
"""Time limit of a head, from the connection or the first byte of the request."""
NEW_SECONDS = 1.0
"""In which a client sends its first request, once it is connected."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LEFT_SECONDS = 0.01, 1.0
"""Time until the first check whether a client that sends no more has left, and the longest time between checks."""
TCP_CLOSED = 7
"""The state of a connection that the peer has reset, in the kernel's `struct tcp_info`."""
MAX_PIPELINED = 64
"""Maximum number of pipelined requests; more close the connection."""

_BODY_WRITER = "neuron_serving.body_writer"


class BodyWriter:
    """Writes parts of a response body directly to the transport, without a waiting task; ASGI then ends the body.

    So a streamed token goes from the engine's message to the socket in one call.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._resume: Callable[[], None] | None = None

    @property
    def writable(self) -> bool:
        return not self._flow.write_paused

    def begin(self) -> None:
        """Before the response: its length is unknown. HTTP/1.0 has no chunks, the end of the connection ends it."""
        if self._cycle.scope["http_version"] == "1.0":
            self._cycle.chunked_encoding = False

    def write(self, body: bytes) -> None:
        """No effect if the client has disconnected or `body` is empty."""
        if body and not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._cycle.chunked_encoding else body)

    def end(self) -> None:
        """Before the last part of the body. If the connection ends with it, the client gets both in one segment: it
        cannot send another request between them, which would be lost."""
        if not (self._cycle.keep_alive or self._cycle.disconnected) and hasattr(socket, "TCP_CORK"):
            connection = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)

    def when_writable(self, call: Callable[[], None]) -> None:
        """Call it whenever the write buffer has room again, until the response ends."""
        self._resume = call

    def resume(self) -> None:
        if self._resume is not None and not (self._cycle.response_complete or self._cycle.disconnected):
            self._resume()


def body_writer(scope: Scope) -> BodyWriter:
    """The writer of this request's response, which must have no stated length."""
    writer = scope["extensions"][_BODY_WRITER]
    assert isinstance(writer, BodyWriter)
    return writer


class BoundedProtocol(HttpToolsProtocol):
    """`gate` tells whether this process drains: then each answer that begins tells the client to use another
    connection, which leads to another replica."""

    def __init__(self, *arguments: Any, gate: Gate, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._gate = gate
        self._made_at = 0.0
        self._unfinished_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        """The request being answered, or answered last; uvicorn's `cycle` is the newest one, which may be pipelined."""
        self._repeats_head = False
        """The parser gets the end of a head again, see `_framing`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made_at = self.loop.time()
        if self.client is not None:  # of IPv4, on a socket for both families
            self.client = self.client[0].removeprefix("::ffff:"), self.client[1]
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._await_head()

    @property
    def is_new(self) -> bool:
        """Whether its first request may be on the way: closing would reset the connection under it."""
        return self._answered is None and self.loop.time() - self._made_at < NEW_SECONDS

    def drain(self) -> None:
        """Each answer ends its connection. One that has begun cannot say so any more, see `BodyWriter.end`."""
        for cycle in (self._answered, *(pipelined for pipelined, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection: a client that sends no more may still read (RFC 9112, section 9.6).

        A client that has left looks the same until something is sent to it, which its system refuses with a reset. The
        next part of a stream is such a thing. Before a response, it is an interim one, which clients skip.
        """
        answered = self._answered
        if answered is None or answered.response_complete or self.cycle.more_body or not _can_interim(answered):
            return False
        self.cycle.keep_alive = False
        if not answered.response_started:
            self.transport.write(CONTINUE)
        self._check_left(LEFT_SECONDS[0])
        return True

    def _check_left(self, seconds: float) -> None:
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSED:
            self.transport.abort()
        else:
            self.loop.call_later(seconds, self._check_left, min(2 * seconds, LEFT_SECONDS[1]))

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unfinished_bytes += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                break
            except HttpParserUpgrade as stopped:
                # Upgrade requests are answered in HTTP/1.1 (RFC 9110, section 7.8).
                data = self._framing() + data[stopped.args[0] :]
            except HttpParserError:
                self.send_400_response("the request is not valid HTTP/1.1")
                return
        if self._unfinished_bytes > MAX_HEAD_BYTES:
            message = f"request line and headers must have at most {MAX_HEAD_BYTES} bytes"
            self._refuse(431, b"Request Header Fields Too Large", message)

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
        if self._gate.draining:
            self.cycle.keep_alive = False
        # The task that handles the request has not read the scope yet.
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
        """A head for the parser, so that it reads the body of an upgrade request.

        The parser assumes that such a request ends with its head. Java's HTTP client sends `Upgrade: h2c` with every
        first request.
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
            # Within a response, no other response can be sent.
            self.transport.abort()
        if self.transport.is_closing():
            return
        body = OPENAI.body(Failure.of(status, "invalid_request_error", message), "")
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, phrase, len(body)) + body)
        self.transport.close()


def _can_interim(cycle: RequestResponseCycle) -> bool:
    """Whether the client understands interim responses, and the system reports resets."""
    return cycle.scope["http_version"] == "1.1" and hasattr(socket, "TCP_INFO")
