"""The edge of the HTTP server: the layers around the routes.

From the outside in: exchange (request id, access log, traces), CORS, API key, routes. The front end creates it from the
configuration, wraps its routes in it and closes it last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from neuron_runtime.config import TRACES_ENDPOINT, ServerOptions, check_url
from neuron_runtime.errors import Unauthorized
from neuron_runtime.server.access_log import LineWriter, log
from neuron_runtime.server.auth import ApiKeys, needs_key
from neuron_runtime.server.exchange import Exchanges, Observer, exchange_of
from neuron_runtime.server.wire import error_response

MAX_DROPPED_BYTES = 1024 * 1024
"""The connection of a refused request stays open if its unread body is at most this long."""


class Edge:
    """`observers` are in addition to access log and traces.

    Raises:
        InvalidConfig: the keys cannot be read, or the traces endpoint is invalid.
    """

    def __init__(self, options: ServerOptions, api_key_file: Path | None, observers: Iterable[Observer] = ()) -> None:
        self._options = options
        self._keys = None if api_key_file is None else ApiKeys(api_key_file)
        self._observers = list(observers)
        self._to_close: list[Callable[[], None]] = []
        self._writer: LineWriter | None = None
        # No log if stdout is closed.
        if options.access_log and sys.stdout is not None:
            self._writer = LineWriter(sys.stdout.fileno())
            prompt_characters = options.max_logged_characters * options.log_prompts
            self._observers.append(partial(log, self._writer.write, prompt_characters))
            self._to_close.append(self._writer.close)
        endpoint = options.otlp_traces_endpoint or os.environ.get(TRACES_ENDPOINT, "")
        if endpoint:
            check_url(endpoint, TRACES_ENDPOINT)
            from neuron_runtime.server.tracing import Traces  # noqa: PLC0415 - brings OpenTelemetry

            traces = Traces(endpoint)
            self._observers.append(traces.ended)
            self._to_close.append(traces.close)

    @property
    def num_log_lines_lost(self) -> int:
        return 0 if self._writer is None else self._writer.num_lost

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application to serve, routes included."""
        if self._keys is not None:
            app = Guard(app, self._keys)
        if self._options.allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=self._options.allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after"),
            )
        return Exchanges(app, self._observers)

    def close(self) -> None:
        """Flush the log and the traces; takes a few seconds at most."""
        for close in self._to_close:
            close()


class Guard:
    """An ASGI layer that answers requests without a valid key with 401, before it reads their body."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Browsers send OPTIONS without credentials.
        if needs_key(scope["path"]) and scope["method"] != "OPTIONS":
            exchange = exchange_of(scope)
            headers = exchange.headers
            # Anthropic's clients send their key in a header of its own.
            presented = _bearer(headers.get(b"authorization", b"")) or headers.get(b"x-api-key", b"")
            exchange.key = self._keys.number_of(presented) if presented else None
            if exchange.key is None:
                response = error_response(Unauthorized(bool(presented)), exchange)
                if b"transfer-encoding" in headers or int(headers.get(b"content-length", b"0")) > MAX_DROPPED_BYTES:
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _bearer(authorization: bytes) -> bytes:
    """The token of an Authorization header; empty for other schemes."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
