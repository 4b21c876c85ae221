"""The gateway without its process: what all exchanges share, and what happens from time to time.

Exchanges call it for connections to replicas, for places to wait, and when they have ended. `process` makes it, feeds
it with models and opens its port.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import unquote

from neuron_operator.api.errors import ClusterFault
from neuron_operator.gateway import errors
from neuron_operator.gateway.access_log import entry
from neuron_operator.gateway.clients import ClientConnection, Request
from neuron_operator.gateway.config import Config
from neuron_operator.gateway.errors import Refusal
from neuron_operator.gateway.exchange import OPEN_PATHS, Exchange
from neuron_operator.gateway.keys import ApiKey, Keys
from neuron_operator.gateway.metrics import Metrics
from neuron_operator.gateway.models import Directory, Key, Model, Replica, Rooms, Served, described, unavailable_model
from neuron_operator.gateway.upstream import Upstream

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
WAKE_AGAIN_SECONDS = 5.0
"""A wake-up that had no effect is tried again after this time."""

FAREWELL_SECONDS = 3.0
"""For clients to read that the gateway has ended their answers; pods are killed 10 s after `drainSeconds`."""
QUIET_CHECK_SECONDS = 0.05

MODELS_PATH = "/v1/models"
_FORWARDED = re.compile(r"/(?:v[12]/[A-Za-z0-9_/-]+|(?:tokenize|detokenize|invocations|rerank|score|pooling|classify))")
"""Without `%`, `.` and `//`: a server behind the gateway must not read another path out of it than the gateway does."""
_NOT_FORWARDED = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""They change one replica, and are not for those who ask for answers."""

Wake = Callable[[Served], Awaitable[bool]]
"""Asks for a replica of a model that sleeps; whether this gateway was the one that woke it."""


class Gateway:
    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        *,
        wake: Wake | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Raises InvalidConfig if the keys cannot be read. Within an event loop."""
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.config = config
        self.metrics = metrics
        self.directory = Directory(config, self._close_idle)
        self.rooms = Rooms(config)
        self.keys = Keys(config.keys_file, config.gateways, self.now())
        self.connections: set[ClientConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.num_body_bytes = 0
        self.is_draining = False
        self.is_ready = False
        """Whether the models are known."""
        self._wake = wake
        self._waking: dict[Key, float] = {}
        """When each was last woken."""
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.report(self)

    # Models

    def put(self, served: Served) -> None:
        """A model is new or has changed."""
        model = self.directory.put(served)
        if not served.is_asleep:
            self._waking.pop(served.key, None)
        if model.room:
            if served.hopeless:
                self._refuse_all(model, served.hopeless)
            elif served.is_asleep:
                self._wake_up(model)
            self.release(model)

    def drop(self, key: Key) -> None:
        model = self.directory.drop(key)
        if model is not None:
            self._refuse_all(model, model.served.words)

    def _refuse_all(self, model: Model, words: str) -> None:
        for exchange in list(model.room):
            if self._leave_room(exchange):  # the end of one may have sent the next ones on
                exchange.refuse(unavailable_model(model.served, words, self.config.hold.retry_after_seconds))

    # Requests

    def accepts(self, connection: ClientConnection) -> bool:
        if len(self.connections) >= self.config.limits.connections:
            return False
        self.connections.add(connection)
        return True

    def admit(self, request: Request) -> Refusal | None:
        """What can be said before the body is read."""
        path, method = request.path, request.method
        if method == b"GET":
            return None
        if method != b"POST":
            return Refusal(405, "invalid_request_error", "the method must be GET or POST")
        if not _FORWARDED.fullmatch(path) or path.rstrip("/") in _NOT_FORWARDED or "//" in path:
            return errors.not_found("there is no such route")
        try:
            self.keys.of(request.named)
        except Refusal as refusal:
            return refusal
        return None

    def local_answer(self, request: Request, key: ApiKey | None) -> Any:
        """The answer to a GET. Raises Refusal."""
        path = request.path
        if path.rstrip("/") == MODELS_PATH:
            listed = self.directory.listed()
            allowed = [described(name, target) for name, target in listed if key is None or key.may_use(target)]
            return {"object": "list", "data": allowed}
        if path.startswith(f"{MODELS_PATH}/"):
            name = unquote(path.removeprefix(f"{MODELS_PATH}/"))
            target = self.directory.find(name, None if key is None else key.may_use)
            if key is not None and not key.may_use(target):
                raise errors.not_found(f"`model` {name!r} does not exist", code="model_not_found", param="model")
            return described(name, target)
        raise errors.not_found("there is no such route")

    def health(self, path: str) -> tuple[int, str]:
        if path == "/live":
            return 200, "ok"
        if self.is_draining:
            return 503, "draining"
        return (200, "ok") if self.is_ready else (503, "not ready")

    def free(self, request: Request) -> None:
        """Its body is not needed any more."""
        self.num_body_bytes -= request.num_freed()

    # Connections to replicas

    def kept(self, replica: Replica) -> Upstream | None:
        while replica.idle:
            upstream = replica.idle.pop()
            if not upstream.transport.is_closing():
                return upstream
        return None

    def keep(self, upstream: Upstream) -> None:
        replica = upstream.replica
        if replica.is_gone or self.is_draining or len(replica.idle) >= self.config.picking.idle_connections:
            upstream.transport.abort()
            return
        upstream.idle_since = self.now()
        upstream.transport.resume_reading()
        replica.idle.append(upstream)

    def connect(self, exchange: Exchange, replica: Replica, *, only_body: bool) -> None:
        self._start(self._connect(exchange, replica, only_body))

    async def _connect(self, exchange: Exchange, replica: Replica, only_body: bool) -> None:
        upstream = Upstream(replica, only_body=only_body)
        try:
            async with asyncio.timeout(self.config.timeouts.connect_seconds):
                await self.loop.create_connection(lambda: upstream, replica.host, replica.port)
        except (OSError, TimeoutError) as error:
            logger.info("replica %s of %s: %s", replica.address, exchange.model_name, error or "no answer")
            if exchange.replica is replica and not exchange.is_over:
                exchange.on_not_connected()
            return
        if exchange.is_over:
            self.keep(upstream)
        else:
            exchange.write_to(upstream)

    def _close_idle(self, replica: Replica) -> None:
        for upstream in replica.idle:
            upstream.transport.abort()
        replica.idle.clear()

    # Requests that wait

    def hold(self, exchange: Exchange) -> None:
        """Let it wait for a replica. Raises Refusal."""
        assert exchange.target is not None
        model = exchange.target.model
        if exchange.held_since is None:
            exchange.held_since = self.now()
        exchange.skipped = frozenset()  # they are asked again: nobody else is left
        self.rooms.enter(model, exchange, len(exchange.body))
        if model.served.is_asleep:
            self._wake_up(model)

    def release(self, model: Model) -> None:
        """Send on who waits, in their order, as far as there is room."""
        settings, most = self.config.picking, self.config.hold.per_replica
        while model.room:
            exchange = next(iter(model.room))
            replica = model.pick(exchange.affinity, self.now(), settings, skip=exchange.skipped, most=most)
            if replica is None:
                return
            self._leave_room(exchange)
            exchange.send_to(replica)

    def _leave_room(self, exchange: Exchange) -> bool:
        """Whether it was there."""
        assert exchange.target is not None
        return self.rooms.leave(exchange.target.model, exchange, len(exchange.body))

    def _wake_up(self, model: Model) -> None:
        """Once: the write has no effect if another gateway was faster."""
        if self._wake is None:
            return
        key, now = model.served.key, self.now()
        if model.served.refused or now - self._waking.get(key, -WAKE_AGAIN_SECONDS) < WAKE_AGAIN_SECONDS:
            return
        self._waking[key] = now
        self._start(self._waken(self._wake, model))

    async def _waken(self, wake: Wake, model: Model) -> None:
        outcome = "failed"
        try:
            outcome = "woken" if await wake(model.served) else "awake"
        except ClusterFault as error:
            logger.warning("%s could not be woken: %s", model.label, error)
        self.metrics.woken(model.label, outcome)

    # The end of an exchange, and the passing of time

    def ended(self, exchange: Exchange) -> None:
        self.exchanges.discard(exchange)
        self.free(exchange.request)
        target = exchange.target
        if target is not None:
            self.rooms.leave(target.model, exchange, len(exchange.body))
        if exchange.request.path not in OPEN_PATHS:
            if exchange.key is not None and exchange.usage is not None:
                exchange.key.use(exchange.usage.total, self.now())
            self.metrics.ended(exchange)
            if self._log is not None:
                self._log(entry(exchange, self.now()))
        if target is not None and target.model.room:
            self.release(target.model)

    async def keep_time(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        now, hold = self.now(), self.config.hold
        for connection in [one for one in self.connections if one.is_late(now) or one.has_left()]:
            connection.transport.abort()
        for exchange in list(self.exchanges):
            exchange.check(now)
        for model in list(self.directory.models.values()):
            for exchange in list(model.room):
                if exchange.held_since is None or now - exchange.held_since <= hold.seconds:
                    continue
                if self._leave_room(exchange):
                    waited = f"waited {hold.seconds:g} s; {model.served.words}".rstrip("; ")
                    exchange.refuse(unavailable_model(model.served, waited, hold.retry_after_seconds))
            if model.room:
                if model.served.is_asleep:
                    self._wake_up(model)
                self.release(model)
            for replica in model.replicas.values():
                self._close_old(replica, now - self.config.timeouts.replica_idle_seconds)
        self.keys.reload(now)

    def _close_old(self, replica: Replica, before: float) -> None:
        for upstream in [one for one in replica.idle if one.idle_since < before]:
            replica.idle.remove(upstream)
            upstream.transport.abort()

    async def drain(self) -> None:
        """Answer what runs, then end; what takes too long is told so."""
        self.is_draining = True
        timeouts = self.config.timeouts
        await asyncio.sleep(timeouts.drain_delay_seconds)
        await self._until_quiet(timeouts.drain_seconds)
        for exchange in list(self.exchanges):
            if not exchange.is_over:  # the end of one may have ended others
                exchange.stop()
        await self._until_quiet(FAREWELL_SECONDS)
        for connection in list(self.connections):
            connection.transport.abort()
        for model in self.directory.models.values():
            for replica in model.replicas.values():
                self._close_idle(replica)

    async def _until_quiet(self, seconds: float) -> None:
        """Until every answer has ended and was sent, at most for so long."""
        end = self.now() + seconds
        while (now := self.now()) < end:
            if all(one.is_quiet(now) for one in self.connections):
                return
            await asyncio.sleep(QUIET_CHECK_SECONDS)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
