"""One request and its answer: from the client through a replica, or several, back to the client.

It is a state machine of callbacks, because a task for each request would cost more than everything else here. Another
replica is tried only while the client has got nothing of an answer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_operator.gateway import bodies, errors
from neuron_operator.gateway.errors import Refusal

if TYPE_CHECKING:
    from neuron_operator.gateway.clients import ClientConnection, Request
    from neuron_operator.gateway.gateway import Gateway
    from neuron_operator.gateway.keys import ApiKey
    from neuron_operator.gateway.models import Replica, Target
    from neuron_operator.gateway.upstream import Answer, Upstream

OPEN_PATHS = frozenset({"/health", "/live", "/ping"})
"""For platforms: they need no key, and are neither logged nor counted."""
CLIENT_LEFT = 499
"""In log and metrics: a client that left before its answer began."""
MAX_RESETS = 2
"""Connections that may be lost with a request on them before it is given up: it may itself be what ends the servers."""
KEPT_PARTS = 4
"""The usage is in the last parts of a stream."""
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"),
        *(b"expect", b"content-length", b"x-request-id"),
    }
)
_HOP_BY_HOP_OF_ANSWERS = _HOP_BY_HOP - {b"content-length", b"x-request-id"}
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_BUSY = (503, 529)
"""What servers answer that drain or are not ready, 529 on Anthropic's path."""
_FULL = 429
"""What they answer when too many requests, or too long ones, wait there."""


class Exchange:
    __slots__ = (
        "affinity",
        "began",
        "body",
        "broken",
        "client",
        "error",
        "first_byte",
        "gateway",
        "head",
        "held_seconds",
        "held_since",
        "is_answered",
        "is_chunked",
        "is_over",
        "is_stream",
        "key",
        "last_byte",
        "last_replica",
        "model_name",
        "num_resets",
        "num_retries",
        "replica",
        "request",
        "sent_at",
        "skipped",
        "stalled_since",
        "status",
        "tail",
        "target",
        "upstream",
        "usage",
    )

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request) -> None:
        self.gateway = gateway
        self.client = client
        self.request = request
        self.began = gateway.now()
        self.key: ApiKey | None = None
        self.target: Target | None = None
        self.model_name = ""
        self.affinity = 0
        self.body = b""
        self.head = b""
        self.replica: Replica | None = None
        self.last_replica = ""
        """Its address."""
        self.upstream: Upstream | None = None
        self.skipped: frozenset[Replica] = frozenset()
        """Replicas that cannot answer this request, but may others."""
        self.held_since: float | None = None
        self.held_seconds = 0.0
        self.num_resets = 0
        self.num_retries = 0
        self.sent_at = 0.0
        self.last_byte = 0.0
        self.first_byte: float | None = None
        self.stalled_since: float | None = None
        self.is_answered = False
        """Whether the client has got the beginning of an answer."""
        self.is_chunked = False
        self.is_stream = False
        self.is_over = False
        self.status = CLIENT_LEFT
        self.error = ""
        self.broken = ""
        self.tail: deque[bytes] = deque(maxlen=KEPT_PARTS)
        self.usage: bodies.Usage | None = None

    def begin(self) -> None:
        self.gateway.exchanges.add(self)
        try:
            if self.request.refusal is not None:
                raise self.request.refusal
            if self.request.path in OPEN_PATHS:
                status, word = self.gateway.health(self.request.path)
                self._reply(status, {"status": word})
                return
            self.key = self.gateway.keys.of(self.request.named)
            if self.request.method == b"GET":
                self._reply(200, self.gateway.local_answer(self.request, self.key))
                return
            self._prepare()
        except Refusal as refusal:
            self.refuse(refusal)
            return
        self.place()

    def _prepare(self) -> None:
        """Read what the gateway needs of the body. Raises Refusal."""
        request, gateway = self.request, self.gateway
        raw = bytes(request.body)
        request.body = bytearray()
        peeked = bodies.peek(raw, gateway.config.picking.prefix_characters)
        self.target = gateway.directory.find(peeked.model, None if self.key is None else self.key.may_use)
        self.model_name = self.target.name
        self.affinity = peeked.affinity
        gateway.keys.check(self.key, self.target, self.began)
        self.body = raw if peeked.model == self.target.name else bodies.with_model(raw, self.target.name)
        dropped = _HOP_BY_HOP | _KEY_HEADERS if self.gateway.keys.are_set else _HOP_BY_HOP
        if (connection := request.named.get(b"connection")) is not None:  # it names more of them
            dropped |= {one.strip() for one in connection.lower().split(b",")}
        lines = [b"%b: %b\r\n" % header for header in request.headers if header[0].lower() not in dropped]
        self.head = b"%b %b HTTP/1.1\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            request.method,
            request.target,
            b"".join(lines),
            request.request_id.encode("latin-1"),
            len(self.body),
        )

    # To a replica

    def place(self) -> None:
        """Send it to a replica, or let it wait for one."""
        assert self.target is not None
        gateway, model = self.gateway, self.target.model
        # Who waits has come earlier. One that is sent again has had its turn.
        is_behind = bool(model.room) and not self.num_retries
        if not is_behind:
            replica = model.pick(self.affinity, gateway.now(), gateway.config.picking, skip=self.skipped)
            if replica is not None:
                self.send_to(replica)
                return
        try:
            gateway.hold(self)
        except Refusal as refusal:
            self.refuse(refusal)
            return
        if is_behind:
            gateway.release(model)

    def send_to(self, replica: Replica) -> None:
        assert self.target is not None
        if self.held_since is not None:
            self.held_seconds = self.gateway.now() - self.held_since
        self.replica, self.last_replica = replica, replica.address
        replica.in_flight += 1
        self.target.model.in_flight += 1
        is_old = self.request.version == "1.0"
        if not is_old and (upstream := self.gateway.kept(replica)) is not None:
            self.write_to(upstream)
        else:
            self.gateway.connect(self, replica, only_body=is_old)

    def write_to(self, upstream: Upstream) -> None:
        self.upstream = upstream
        upstream.carry(self)
        self.sent_at = self.last_byte = self.gateway.now()
        if len(self.body) < 65_536:
            upstream.transport.write(self.head + self.body)
        else:
            upstream.transport.write(self.head)
            upstream.transport.write(self.body)

    def _leave_replica(self) -> None:
        replica, self.replica, self.upstream = self.replica, None, None
        if replica is not None and self.target is not None:
            replica.in_flight -= 1
            self.target.model.in_flight -= 1

    def _try_again(self, reason: str) -> None:
        assert self.target is not None
        self.num_retries += 1
        self.gateway.metrics.retried(self.target.model.label, reason)
        self.place()

    def on_not_connected(self) -> None:
        """Nothing was sent: another replica may be asked as often as there are any."""
        self._avoid()
        self._leave_replica()
        if not self.is_over:
            self._try_again("refused")

    def _avoid(self) -> None:
        assert self.replica is not None
        self.replica.avoid_until = self.gateway.now() + self.gateway.config.timeouts.avoid_seconds

    def on_stale(self) -> None:
        """A kept connection was closed by its replica before it had read the request, as far as one can see."""
        self._lost("stale")

    def _lost(self, reason: str) -> None:
        self._leave_replica()
        self.num_resets += 1
        if self.num_resets > MAX_RESETS:
            message = "the connection to the replica was lost before its answer, several times"
            self.refuse(errors.unavailable(message, "replica_lost", status=502))
        else:
            self._try_again(reason)

    # From a replica

    def on_answer(self, answer: Answer) -> bool:
        """The head of an answer; whether the client gets it."""
        # Of full ones a second one is asked, and no more: all may be full.
        is_theirs = answer.status in _BUSY or (answer.status == _FULL and not self.skipped)
        if is_theirs and self._goes_elsewhere(answer):
            return False
        request, gateway = self.request, self.gateway
        now = gateway.now()
        self.is_answered, self.status, self.first_byte = True, answer.status, now - self.began
        self.is_chunked = answer.is_chunked and request.version != "1.0"
        gateway.free(request)
        self.body = b""
        lines = [b"HTTP/1.1 %d %b\r\n" % (answer.status, answer.reason)]
        has_id = False
        for name, value in answer.headers:
            lowered = name.lower()
            if lowered in _HOP_BY_HOP_OF_ANSWERS:
                continue
            if lowered == b"content-type":
                self.is_stream = value.startswith(b"text/event-stream")
            has_id = has_id or lowered == b"x-request-id"
            lines.append(b"%b: %b\r\n" % (name, value))
        if self.is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not has_id:
            lines.append(b"x-request-id: %b\r\n" % request.request_id.encode("latin-1"))
        if answer.is_until_close or request.version == "1.0":
            request.keeps = False
        request.keeps = request.keeps and not gateway.is_draining
        if not request.keeps:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.client.transport.write(b"".join(lines))
        return True

    def _goes_elsewhere(self, answer: Answer) -> bool:
        assert self.target is not None
        assert self.replica is not None
        assert self.upstream is not None
        is_full = answer.status == _FULL
        closes = not is_full and any(
            name.lower() == b"connection" and value.lower() == b"close" for name, value in answer.headers
        )
        model, settings = self.target.model, self.gateway.config.picking
        skipped = self.skipped | {self.replica}
        if closes:  # it drains: there will be another one, or the model is woken
            self._avoid()
        elif model.pick(self.affinity, self.gateway.now(), settings, skip=skipped) is not None:
            self.skipped = skipped
        else:
            return False
        upstream = self.upstream
        self._leave_replica()
        upstream.let_go()
        self._try_again("draining" if closes else "full" if is_full else "not_ready")
        return True

    def on_data(self, data: bytes) -> None:
        """A part of the answer's body, with its chunks."""
        self.last_byte = self.gateway.now()
        self.tail.append(data)
        self.client.transport.write(data)

    def on_end(self, upstream: Upstream, *, keeps: bool) -> None:
        num_chunks = upstream.num_chunks
        self._leave_replica()
        if keeps:
            self.gateway.keep(upstream)
        self._count(num_chunks)
        self._finish()
        self.client.done(keeps=self.request.keeps)

    def _count(self, num_chunks: int) -> None:
        if self.status != 200:
            return
        tail = b"".join(self.tail)[-bodies.TAIL_BYTES :]
        self.usage = bodies.usage_of(tail)
        if self.usage is None and self.is_stream:
            self.usage = bodies.estimated(self.request.num_bytes, num_chunks)

    def on_broken(self, why: str, *, sent: bool) -> None:
        """The replica, or the connection to it, failed."""
        if not self.is_answered:
            self._avoid()
            self._lost("reset")
            return
        self._tell(errors.unavailable(f"the answer is incomplete: {why}", "replica_lost", status=502))

    def _tell(self, refusal: Refusal) -> None:
        """Of an answer that has begun: as an event if it is a stream, by the end of the connection in any case."""
        upstream = self.upstream
        num_chunks = 0 if upstream is None else upstream.num_chunks
        is_whole = upstream is not None and upstream.at_boundary and (not self.tail or self.tail[-1].endswith(b"\r\n"))
        self._leave_replica()
        if upstream is not None:
            upstream.let_go()
        self.broken = self.error = refusal.code or ""
        self._count(num_chunks)
        self.request.keeps = False
        can_tell = self.is_stream and self.is_chunked and is_whole
        if can_tell:
            event = refusal.event(self.request.path, self.request.request_id)
            self.client.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        self._finish()
        if can_tell:
            self.client.done(keeps=False)
        else:
            self.client.exchange = None
            self.client.transport.abort()

    def check(self, now: float) -> None:
        """Called from time to time: whether replica or client are frozen."""
        timeouts = self.gateway.config.timeouts
        if self.stalled_since is not None and self.client.is_paused:
            if now - self.stalled_since > timeouts.stalled_seconds:
                self.error = "client_stalled"
                self.client.transport.abort()
        elif self.upstream is None:
            return
        elif not self.is_answered:
            if now - self.sent_at > timeouts.first_byte_seconds:
                message = f"the replica has not answered within {timeouts.first_byte_seconds:g} s"
                self._give_up(errors.unavailable(message, "replica_frozen", status=504))
        elif now - self.last_byte > timeouts.silence_seconds:
            message = f"the answer is incomplete: the replica is silent for {timeouts.silence_seconds:g} s"
            self._tell(errors.unavailable(message, "replica_frozen", status=504))

    def stop(self) -> None:
        """The gateway ends."""
        if self.is_answered:
            self._tell(errors.unavailable("the answer is incomplete: the gateway was stopped", "gateway_stopped"))
        else:
            self._give_up(errors.unavailable("the gateway was stopped before the answer", "gateway_stopped"))

    def _give_up(self, refusal: Refusal) -> None:
        upstream = self.upstream
        self._leave_replica()
        if upstream is not None:
            upstream.let_go()
        self.refuse(refusal)

    # From the client

    def on_client_left(self) -> None:
        if self.is_over:
            return
        upstream = self.upstream
        num_chunks = 0 if upstream is None else upstream.num_chunks
        self._leave_replica()
        if upstream is not None:
            upstream.let_go()
        self.error = self.error or "client_left"
        if self.is_answered:
            self._count(num_chunks)
        self._finish()

    def on_stalled(self) -> None:
        self.stalled_since = self.gateway.now()
        if self.upstream is not None:
            self.upstream.transport.pause_reading()

    def on_resumed(self) -> None:
        self.stalled_since = None
        if self.upstream is not None:
            self.last_byte = self.gateway.now()
            self.upstream.transport.resume_reading()

    # The gateway's own answers

    def refuse(self, refusal: Refusal) -> None:
        path, request = self.request.path, self.request
        self.error = refusal.code or refusal.kind
        body = refusal.body(path, request.request_id)
        self._write(refusal.status_for(path), body, refusal.headers())

    def _reply(self, status: int, answer: Any) -> None:
        self._write(status, msgspec.json.encode(answer), b"")

    def _write(self, status: int, body: bytes, headers: bytes) -> None:
        request = self.request
        self.status = status
        self.is_answered = True
        keeps = request.keeps and request.version != "1.0" and not self.gateway.is_draining
        head = errors.head(status, len(body), headers, request_id=request.request_id, keeps=keeps)
        self.client.transport.write(head if request.method == b"HEAD" else head + body)
        self._finish()
        self.client.done(keeps=keeps)

    def _finish(self) -> None:
        self.is_over = True
        self.gateway.ended(self)
