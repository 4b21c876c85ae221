"""An exchange: one HTTP request with its id and outcome, for access log, traces and metrics.

The outermost layer of the front end creates one for every request, routes and responses add data, and observers get it
when the response has ended. Nothing here runs per token.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuron_runtime.core import FinishReason

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from neuron_runtime.apis.generation import Choice, Generation
    from neuron_runtime.errors import ServingError
    from neuron_runtime.server.metrics import Metrics

OPEN_PATHS = frozenset({"/adapters", "/health", "/live", "/metrics", "/ping", "/version"})
"""Paths for platforms: need no key, are neither logged nor counted."""
NO_ROUTE = "none"
CLIENT_LEFT = 499
"""Status in the log for a client that disconnected before the response started."""

_KEY = "neuron_serving.exchange"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")


@dataclass(slots=True)
class Exchange:
    request_id: str
    method: str
    path: str
    """As the client wrote it."""
    client: str
    """Address of the peer."""
    headers: Mapping[bytes, bytes]
    began_at: float
    """Seconds since 1970."""
    began: float
    """On the monotonic clock, as all times of a request are."""
    seconds: float = 0.0
    route: str = NO_ROUTE
    """The path of the route that answered, as declared."""
    status: int = CLIENT_LEFT
    key: int | None = None
    """Number of its API key, from 1."""
    error: ServingError | None = None
    """Why it has no response, or an incomplete one."""
    generation: Generation | None = None
    model: str | None = None

    @property
    def choices(self) -> list[Choice]:
        return [] if self.generation is None else self.generation.choices

    @property
    def first_token_seconds(self) -> float | None:
        """Time from arrival to the first token of any choice."""
        first = [choice.first_token_at for choice in self.choices if choice.first_token_at is not None]
        return min(first) - self.began if first else None

    @property
    def queue_seconds(self) -> float | None:
        """The longest queue time of any choice; None if none was scheduled."""
        return max((one.queue_seconds for one in self.choices if one.queue_seconds is not None), default=None)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Finish reasons of the choices, in order; empty for a request that the engine refused."""
        return [choice.ended for choice in self.choices if choice.ended is not None]


Observer = Callable[[Exchange], None]
"""Gets every exchange when it has ended. Must return at once and never raise."""


def count(metrics: Metrics, exchange: Exchange) -> None:
    """Update metrics of responses, request parameters and refusals."""
    if exchange.path not in OPEN_PATHS:
        metrics.responded(exchange.route, exchange.status)
    error, generation = exchange.error, exchange.generation
    reasons = exchange.finish_reasons
    if error is not None and exchange.status >= 400 and FinishReason.ERROR not in reasons:
        metrics.refused(error.code or "invalid_request")
    elif generation is not None and reasons:
        n = generation.ask.num_choices
        for number, sampling in enumerate(generation.ask.sampling):
            choices = exchange.choices[number * n : (number + 1) * n]
            metrics.answered(sampling.max_tokens, [choice.num_tokens for choice in choices])


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[_KEY]
    return exchange


class Exchanges:
    """The outermost ASGI layer: creates an exchange per request and adds its id to the response."""

    def __init__(self, app: ASGIApp, observers: Iterable[Observer]) -> None:
        self._app = app
        self._observers = tuple(observers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = scope[_KEY] = _begun(scope)
        tags = ((b"x-request-id", exchange.request_id.encode()), _NO_SNIFFING)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *tags]
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception:
            if exchange.status == CLIENT_LEFT:
                exchange.status = 500
            raise
        finally:
            exchange.seconds = time.monotonic() - exchange.began
            # Set by the router; absent if a layer before it answered.
            exchange.route = getattr(scope.get("route"), "path", NO_ROUTE)
            for observe in self._observers:
                observe(exchange)


def _begun(scope: Scope) -> Exchange:
    headers = dict(scope["headers"])
    asked = headers.get(b"x-request-id", b"")
    client = scope.get("client")
    return Exchange(
        request_id=asked.decode() if _REQUEST_ID.fullmatch(asked) else secrets.token_hex(16),
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else "",
        headers=headers,
        began_at=time.time(),
        began=time.monotonic(),
    )
