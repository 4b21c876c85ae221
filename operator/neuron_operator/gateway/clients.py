"""A client's connection: reads requests, each within limits, and hands them to exchanges, one after another.

Bodies are read as a whole, because the model may stand at their end and a request may have to be sent again.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import socket
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import httptools

from neuron_operator.gateway import errors
from neuron_operator.gateway.errors import Refusal
from neuron_operator.gateway.exchange import Exchange

if TYPE_CHECKING:
    from neuron_operator.gateway.gateway import Gateway

MAX_WAITING = 16
"""Requests that a client may send before it has read their answers."""
LINGER_SECONDS = 2.0
"""A refused client may still send, and would not see the answer if the connection were reset."""
NEXT_SECONDS = 2.0
"""Behind an answer a client may already have sent its next request: closing would reset the connection under it."""
WRITE_BUFFER_BYTES = 65_536
"""A client that has not read this much of its answer slows the replica down."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Request:
    """What a client asks."""

    __slots__ = (
        "awaits_word",
        "body",
        "headers",
        "keeps",
        "method",
        "named",
        "num_bytes",
        "num_held",
        "path",
        "refusal",
        "request_id",
        "target",
        "version",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.path = ""
        self.version = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.named: Mapping[bytes, bytes] = {}
        """By their names in lower case."""
        self.body = bytearray()
        self.num_bytes = 0
        self.num_held = 0
        """Those that count as memory."""
        self.keeps = True
        self.awaits_word = False
        """Whether its client sends the body only when it is told to."""
        self.request_id = ""
        self.refusal: Refusal | None = None

    def num_freed(self) -> int:
        """Bytes of the body that were in memory, once."""
        freed, self.num_held, self.body = self.num_held, 0, bytearray()
        return freed


class ClientConnection(asyncio.Protocol):
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.address = ""
        self.deadline: float | None = None
        """When it is closed, unless something happens before."""
        self.is_paused = False
        self.is_closing = False
        """Nothing more is read of it."""
        self._has_ended = False
        """The client sends nothing more, and may still read."""
        self._answered_at = -math.inf
        self._lingers = False
        """Whether the client may still send what nobody reads."""
        self._waiting: deque[Request] = deque()
        self._request: Request | None = None
        """The one that is being read."""
        self._num_head_bytes = 0
        """Or behind the chunks of its body."""
        self._is_in_head = True
        self._came_on = False
        """Whether what was read ended a head, or had a part of a body."""
        self._repeats_head = False
        """Whether the parser reads what `_framing` made."""
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        # A port for both families shows the older one's addresses in the form of the newer.
        self.address = str(peer[0]).removeprefix("::ffff:") if isinstance(peer, tuple) else ""
        self.deadline = self.gateway.now() + self.gateway.config.timeouts.idle_seconds
        if not self.gateway.accepts(self):
            self._request = Request()
            self._refuse_now(errors.unavailable("the gateway has too many connections", "overloaded"))
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.abort)  # no sweep finds it

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closing = True
        self.gateway.connections.discard(self)
        for request in (*self._waiting, *((self._request,) if self._request else ())):
            self.gateway.free(request)
        self._waiting.clear()
        self._request = None
        if self.exchange is not None:
            self.exchange.on_client_left()

    def data_received(self, data: bytes) -> None:
        num_bytes, self._came_on = len(data), False
        while data and not self.is_closing:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as stopped:
                # Upgrade requests are answered in HTTP/1.1 (RFC 9110, section 7.8).
                data = self._framing() + data[stopped.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse_now(errors.invalid(f"the request is not HTTP: {error}"))
                return
        if self._request is not None and not self._came_on:
            # A single header may never end.
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > self.gateway.config.limits.head_bytes:
                self._refuse_now(errors.invalid("the head of the request is too long", status=431))

    def _framing_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [] if self._request is None else self._request.headers
        return [header for header in headers if header[0].lower() in (b"content-length", b"transfer-encoding")]

    def _framing(self) -> bytes:
        """A head for the parser, which assumes that an upgrade request ends with its head. Java's HTTP client sends
        `Upgrade: h2c` with its first request."""
        headers = self._framing_headers()
        self._repeats_head = bool(headers)
        return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % one for one in headers) if headers else b""

    # Of the parser

    def on_message_begin(self) -> None:
        if self._repeats_head:
            return
        self._request = Request()
        self._num_head_bytes, self._is_in_head = 0, True
        if self.exchange is None:
            self.deadline = self.gateway.now() + self.gateway.config.timeouts.read_seconds

    def on_url(self, url: bytes) -> None:
        if self._request is not None and not self._repeats_head:
            self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Behind the chunks of a body there may be more, which are not those of the request (RFC 9110, section 6.5.1).
        if self._request is not None and self._is_in_head:
            self._request.headers.append((name, value))

    def on_headers_complete(self) -> None:
        request = self._request
        self._came_on = True
        if self._repeats_head:
            self._repeats_head = False
            return
        if request is None or self.is_closing:
            return
        self._num_head_bytes, self._is_in_head = 0, False
        request.method = self._parser.get_method()
        request.version = self._parser.get_http_version()
        request.keeps = self._parser.should_keep_alive()
        request.path = request.target.partition(b"?")[0].decode("latin-1")
        named = request.named = {name.lower(): value for name, value in request.headers}
        given = named.get(b"x-request-id", b"")
        request.request_id = given.decode("latin-1") if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        length = named.get(b"content-length", b"0")
        num_bytes = int(length) if length.isdigit() and len(length) < 20 else 0
        head_bytes = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if head_bytes > self.gateway.config.limits.head_bytes:
            self._refuse_now(errors.invalid("the head of the request is too long", status=431))
            return
        request.refusal = self._too_long(num_bytes) or self.gateway.admit(request)
        request.awaits_word = request.version == "1.1" and named.get(b"expect", b"").lower() == b"100-continue"
        if request.refusal is not None and (num_bytes > WRITE_BUFFER_BYTES or b"transfer-encoding" in named):
            self._refuse_now(request.refusal)
        elif self.exchange is None and not self._waiting:
            self._give_word(request)

    def _give_word(self, request: Request) -> None:
        """Whether the body may come. It is the next word to the client: no earlier request waits for its answer."""
        if not request.awaits_word:
            return
        request.awaits_word = False
        if request.refusal is None:
            self.transport.write(CONTINUE)
        else:
            self._refuse_now(request.refusal)

    def on_body(self, body: bytes) -> None:
        request = self._request
        self._came_on = True
        if request is None:
            return
        request.awaits_word = False
        if self.is_closing or request.refusal is not None:
            return
        request.num_bytes += len(body)
        if request.method == b"POST":  # nobody reads others
            request.body += body
            request.num_held += len(body)
            self.gateway.num_body_bytes += len(body)
        if refusal := self._too_long(request.num_bytes):
            self._refuse_now(refusal)

    def _too_long(self, num_bytes: int) -> Refusal | None:
        """Of a body that has or will have so many bytes."""
        limits = self.gateway.config.limits
        if num_bytes > limits.body_bytes:
            return errors.invalid(f"the body is longer than {limits.body_bytes} bytes", status=413)
        if self.gateway.num_body_bytes > limits.all_bodies_bytes:
            return errors.unavailable("the gateway has too many bodies in memory", "overloaded")
        return None

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and self._framing_headers():
            return
        request, self._request = self._request, None
        if request is None or self.is_closing:
            return
        self._waiting.append(request)
        if self.exchange is None and not self.is_paused:
            self._next()
        elif len(self._waiting) > MAX_WAITING:
            self.transport.abort()

    # Of exchanges

    def _next(self) -> None:
        self.deadline = None
        request = self._waiting.popleft()
        self.exchange = Exchange(self.gateway, self, request)
        self.exchange.begin()

    def done(self, *, keeps: bool) -> None:
        """The answer was written as a whole."""
        self.exchange = None
        self._answered_at = self.gateway.now()
        if self.is_closing:
            return
        if not keeps or (self._has_ended and not self._waiting):
            self._close()
        elif self._waiting:
            if self.is_paused:
                self.deadline = self.gateway.now() + self.gateway.config.timeouts.stalled_seconds
            # Not at once: a client that sends many would have them answered in calls within each other.
            asyncio.get_running_loop().call_soon(self._continue)
        else:
            timeouts = self.gateway.config.timeouts
            self.deadline = self.gateway.now() + (timeouts.read_seconds if self._request else timeouts.idle_seconds)
            if self._request is not None:
                self._give_word(self._request)

    def _continue(self) -> None:
        if self.exchange is None and self._waiting and not self.is_closing and not self.is_paused:
            self._next()

    def _refuse_now(self, refusal: Refusal) -> None:
        """Answer before the request was read, and read nothing more."""
        request = self._request or Request()
        self._request = None
        self.gateway.free(request)
        if self.exchange is not None or self._waiting:  # an answer is under way
            self.is_closing = True
            self.transport.abort()
            return
        request.refusal = refusal
        request.keeps = False
        self._lingers = True
        self.exchange = Exchange(self.gateway, self, request)
        self.exchange.begin()

    def _close(self) -> None:
        """Once the client has read what it was told."""
        self.is_closing = True
        self.deadline = self.gateway.now() + self.gateway.config.timeouts.stalled_seconds
        if self._lingers:
            self.deadline = self.gateway.now() + LINGER_SECONDS
            self.transport.write_eof()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self.exchange is not None:
            self.exchange.on_stalled()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.exchange is not None:
            self.exchange.on_resumed()
        else:
            self._continue()

    def eof_received(self) -> bool:
        """Whether the connection stays open: a client may end its side behind its request and wait for the answer.

        One that has left looks the same until something is sent to it, a part of its answer or before that the word to
        continue: its system then resets the connection, which `has_left` sees.
        """
        if self.is_closing or (self.exchange is None and not self._waiting):
            return False
        self._has_ended = True
        if self.exchange is not None and not self.exchange.is_answered and self.exchange.request.version == "1.1":
            self.transport.write(CONTINUE)
        return True

    def has_left(self) -> bool:
        """Whether a client that sends nothing more does not read, either; nobody is told, as nothing is read of it."""
        if not self._has_ended or self.transport.is_closing():
            return False
        return bool(self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def is_quiet(self, now: float) -> bool:
        """Whether nothing runs for it, all that it was told is sent, and it has had the time to send its next request
        if it was not told that the connection ends."""
        is_idle = self.exchange is None and not self.is_closing and now - self._answered_at > NEXT_SECONDS
        return is_idle and not self.transport.get_write_buffer_size()

    def is_late(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now
