"""A connection to a replica: one answer at a time, whose bytes are passed on as they come.

The parser only tells where an answer begins and ends. An `Exchange` decides what happens; nothing here retries.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    from neuron_operator.gateway.exchange import Exchange
    from neuron_operator.gateway.models import Replica

MAX_HEAD_BYTES = 65_536
Headers = list[tuple[bytes, bytes]]


class Answer:
    """The head of an answer."""

    __slots__ = ("headers", "is_chunked", "is_until_close", "reason", "status")

    def __init__(self, status: int, reason: bytes, headers: Headers) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        names = {name.lower(): value for name, value in headers}
        self.is_chunked = names.get(b"transfer-encoding", b"").lower() == b"chunked"
        self.is_until_close = not (self.is_chunked or b"content-length" in names or status in (204, 304))


class Upstream(asyncio.Protocol):
    """`only_body`: chunks are unpacked, for a client that does not know them."""

    def __init__(self, replica: Replica, *, only_body: bool = False) -> None:
        self.replica = replica
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport
        self.idle_since = 0.0
        self.was_used = False
        """Whether an answer has come over it: it may have been closed meanwhile."""
        self.at_boundary = True
        """Whether what was passed on ends with a whole chunk."""
        self.num_chunks = 0
        self.answer: Answer | None = None
        self._only_body = only_body
        self._body: list[bytes] = []
        if only_body:
            self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._raw_head = b""
        self._headers: Headers = []
        self._reason = b""
        self._num_begun = 0
        self._is_complete = self._keeps = False
        self.answer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def carry(self, exchange: Exchange) -> None:
        """Its answer is the next to come."""
        self.exchange = exchange
        self.num_chunks = 0
        self._reset()

    def let_go(self) -> None:
        """The exchange wants no more of it, and the replica is to notice."""
        self.exchange = None
        self.transport.abort()

    # Of the parser

    def on_message_begin(self) -> None:
        self._num_begun += 1

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.answer is None:  # behind the chunks of the body there may be more, which are passed on as they stand
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._num_begun == 1:
            self.answer = Answer(self._parser.get_status_code(), self._reason, self._headers)

    def on_chunk_header(self) -> None:
        self.at_boundary = False
        self.num_chunks += 1

    def on_chunk_complete(self) -> None:
        self.at_boundary = True

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._keeps = self._parser.should_keep_alive()

    # Of the transport

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # nothing was asked
            self.transport.abort()
            return
        is_head = self.answer is None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break("the answer is not HTTP")
            return
        if self._num_begun > 1:
            self._break("the replica sent more than one answer")
            return
        if is_head:
            self._raw_head += data
            if self.answer is None:
                if len(self._raw_head) > MAX_HEAD_BYTES:
                    self._break("the head of the answer is too long")
                return
            raw, self._raw_head = self._raw_head, b""
            end = raw.find(b"\r\n\r\n") + 4
            if end < 4 or self.answer.status < 200:
                self._break("the head of the answer is not allowed")
                return
            if not exchange.on_answer(self.answer):
                return
            data = raw[end:]
        if self._only_body:
            data = b"".join(self._body)
            self._body.clear()
        if data:
            exchange.on_data(data)
        if self._is_complete and self.exchange is not None:
            self._end(exchange, keeps=self._keeps and not self._only_body)

    def _end(self, exchange: Exchange, *, keeps: bool) -> None:
        self.exchange = None
        self.was_used = True
        if not keeps:
            self.transport.abort()
        exchange.on_end(self, keeps=keeps)

    def _break(self, why: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.transport.abort()
        if exchange is not None:
            exchange.on_broken(why, sent=True)

    def pause_writing(self) -> None:
        """A request is in memory as a whole, within the limits of all bodies: there is nobody to slow down."""

    def connection_lost(self, error: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            if self in self.replica.idle:
                self.replica.idle.remove(self)
        elif self.answer is not None and self.answer.is_until_close and error is None:
            self.was_used = True
            exchange.on_end(self, keeps=False)
        elif self.was_used and self.answer is None and not self._raw_head:
            exchange.on_stale()
        else:
            exchange.on_broken("the connection to the replica was lost", sent=True)
