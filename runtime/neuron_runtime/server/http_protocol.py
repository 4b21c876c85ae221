"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on what a client may leave unfinished.

Made by uvicorn for every connection, named in the front end's configuration. uvicorn bounds neither the size of a
head (one that never ends costs quadratic time and all memory) nor the time until it is complete. Bodies are bounded
by the routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from neuron_runtime.server.wire import error_object

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; also trailers, and what lies between two chunks."""
HEAD_SECONDS = 75.0
"""From the connection, or from a request's first byte, to the end of its head."""


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unfinished_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

    def on_body(self, body: bytes) -> None:
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished_bytes = 0
        super().on_message_complete()

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
