"""The front end's side of the border: sends requests to the engine and sorts its news into mailboxes.

One per front end; it outlives engines: when the supervisor says that one has ended, every request it had gets a clear
error, and the next incarnation is connected. It holds the state that `/health` reports.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from neuron_runtime.core import Request
from neuron_runtime.engine import messages
from neuron_runtime.engine.messages import Abort, Add, ModelFound, News, Progress, Ready, Refused, Step
from neuron_runtime.errors import BackendFailed, InvalidRequest, Overloaded, ServingError
from neuron_runtime.server.metrics import Metrics

Item = tuple[int, News] | BaseException


class Mailbox:
    """News for one HTTP request, in order; `put` never blocks, `take` hands out all there is."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, News]]:
        """Waits until there is something. Raises an exception that was put, at once and before older news."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items = self._items, []
        news = []
        for item in items:
            if isinstance(item, BaseException):
                raise item
            news.append(item)
        return news


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


class EngineClient:
    """Requests in, news out, across engine restarts.

    Args:
        on_model: called with the model's folder each time an engine has found it.
        on_ready: called each time an engine can serve.
        on_broken: called when receiving failed for good, which is a bug.
    """

    def __init__(
        self,
        run_dir: Path,
        metrics: Metrics,
        on_model: Callable[[Path], None],
        on_ready: Callable[[Ready], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self.state = EngineState.STARTING
        self.detail = "starting"
        self._run_dir = run_dir
        self._metrics = metrics
        self._on_model = on_model
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._context = zmq.asyncio.Context()
        self._ids = itertools.count()
        self._mailboxes: dict[str, tuple[Mailbox, int]] = {}
        self._to_engine: zmq.Socket[bytes] | None = None
        self._receiving: asyncio.Task[None] | None = None

    def engine_started(self, incarnation: int) -> None:
        """Connect to the n-th engine process."""
        self._disconnect()
        self.state, self.detail = EngineState.STARTING, "starting"
        self._metrics.engine_started(incarnation)
        outbox = messages.socket(self._context, zmq.PULL, self._run_dir, messages.ENGINE_OUTBOX, incarnation)
        # Sending needs no event loop, as it never waits.
        plain: zmq.Context[Any] = zmq.Context.shadow(self._context)
        self._to_engine = messages.socket(plain, zmq.PUSH, self._run_dir, messages.ENGINE_INBOX, incarnation)
        self._receiving = asyncio.get_running_loop().create_task(self._receive(outbox))
        self._receiving.add_done_callback(self._receiving_ended)

    def engine_ended(self, message: str) -> None:
        """Every request it had ends with an error."""
        self._disconnect()
        self.state, self.detail = EngineState.ENDED, message
        self._metrics.engine_ended()
        self.fail_all(BackendFailed(message))

    def fail_all(self, error: ServingError) -> None:
        """Every request in flight ends with this error."""
        for mailbox in {id(mailbox): mailbox for mailbox, _ in self._mailboxes.values()}.values():
            mailbox.put(error)

    def submit(self, requests: Sequence[Callable[[str], Request]], mailbox: Mailbox) -> list[str]:
        """Send requests, each made with the id it is given; news of the i-th carries index i. Raises BackendFailed."""
        self.check_ready()
        ids = []
        for index, make in enumerate(requests):
            request_id = str(next(self._ids))
            self._mailboxes[request_id] = (mailbox, index)
            self._send(Add(make(request_id)))
            ids.append(request_id)
        return ids

    def abort(self, ids: Sequence[str]) -> None:
        """Nobody waits for these any more. Ids that have ended are skipped."""
        live = tuple(one for one in ids if self._mailboxes.pop(one, None) is not None)
        if live and self.state is EngineState.READY:
            self._send(Abort(live))

    def check_ready(self) -> None:
        """Raises BackendFailed, saying how far the start is, unless the engine can serve."""
        if self.state is not EngineState.READY:
            raise BackendFailed(f"not ready: {self.detail}")

    def close(self) -> None:
        self._disconnect()
        self._context.destroy(linger=0)

    def _disconnect(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        if self._to_engine is not None:
            self._to_engine.close(linger=0)
            self._to_engine = None

    def _send(self, message: Add | Abort) -> None:
        assert self._to_engine is not None
        self._to_engine.send(messages.encoder.encode(message), zmq.NOBLOCK)

    def _receiving_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_broken(error)

    async def _receive(self, outbox: zmq.asyncio.Socket) -> None:
        with outbox:
            while True:
                self._handle(messages.decode_from_engine(await outbox.recv()))

    def _handle(self, message: messages.FromEngine) -> None:
        match message:
            case Step():
                self._deliver(message)
            case Progress(stage, share):
                self.detail = f"{stage} {share:.0%}"
            case ModelFound(model_dir):
                self._on_model(Path(model_dir))
            case Ready():
                self.state, self.detail = EngineState.READY, "ready"
                self._metrics.engine_ready(message.limits, message.load_seconds, message.warm_up_seconds)
                self._on_ready(message)

    def _deliver(self, step: Step) -> None:
        self._metrics.step(step)
        mailboxes = self._mailboxes
        for news in step.news:
            # An id that is not there was aborted while its news was on the way.
            entry = mailboxes.get(news.request_id)
            if entry is not None:
                entry[0].put((entry[1], news))
                if news.finish_reason is not None:
                    del mailboxes[news.request_id]
        for refused in step.refused:
            entry = mailboxes.pop(refused.request_id, None)
            if entry is not None:
                entry[0].put(_refusal(refused))


def _refusal(refused: Refused) -> ServingError:
    if refused.retry_after_seconds is not None:
        return Overloaded(refused.message, refused.retry_after_seconds)
    return InvalidRequest(refused.message, refused.field)
