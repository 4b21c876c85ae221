"""The front end's connection to the engine: sends requests and delivers updates to their recipients.

One per front end; it outlives engine processes. When the supervisor reports that one has exited, all its requests get
an error, and the client connects to the next one. It has the state that `/health` reports.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from neuron_runtime.core import Request, TokenEvent
from neuron_runtime.engine import messages
from neuron_runtime.engine.backpressure import Backpressure, QueueLimits
from neuron_runtime.engine.messages import (
    Abort,
    AdapterNews,
    Add,
    DropAdapter,
    Joined,
    LoadAdapter,
    ModelFound,
    Ready,
    Refused,
    StartProgress,
    Step,
)
from neuron_runtime.engine.pixel_files import PixelFile, without_pixels
from neuron_runtime.errors import BackendFailed, InvalidRequest, Overloaded, ServingError
from neuron_runtime.server.metrics import Metrics

MAX_STEPS_AT_ONCE = 64
"""Messages that are processed before other work of the event loop gets a turn."""
MAX_IDS = 10**12
"""Number of request ids of one front-end process; its successor uses the following ones."""


class Recipient(Protocol):
    """Receives the updates of requests. All methods are called on the event loop and must not block."""

    def deliver(self, index: int, event: TokenEvent) -> None:
        """An update of the request with this index."""

    def show_pending(self) -> None:
        """All updates of one wake-up were delivered."""

    def fail(self, error: Exception) -> None:
        """Its requests ended with this error: a ServingError, or another exception for a bug."""


class EngineClient:
    """Requests in, updates out, across engine restarts.

    Args:
        on_model: called with the model's folder whenever an engine has found it.
        on_ready: called whenever an engine is ready.
        on_broken: called if receiving failed permanently, which is a bug.
        on_adapter: called with the outcome of each `load_adapter`.
    """

    def __init__(
        self,
        run_dir: Path,
        metrics: Metrics,
        *,
        on_model: Callable[[Path], None],
        on_ready: Callable[[Ready], None],
        on_broken: Callable[[BaseException], None],
        on_adapter: Callable[[AdapterNews], None] = lambda news: None,
    ) -> None:
        self.ready = False
        self.detail = "starting"
        self._stall = ""
        """Why the engine does not respond although it is ready; empty: it does."""
        self._run_dir = run_dir
        self._metrics = metrics
        self._on_model = on_model
        self._on_ready = on_ready
        self._on_broken = on_broken
        self._on_adapter = on_adapter
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ids = itertools.count()
        self._recipients: dict[str, tuple[Recipient, int, str]] = {}
        """Of each request that has not ended, with its index and the digest of its adapter."""
        self._queue = Backpressure(QueueLimits(), max_rows=0, now=time.monotonic())
        """Bounds what was sent, with the limits of the engine: it reads no requests during a step."""
        self._to_engine: zmq.Socket[bytes] | None = None
        self._from_engine: zmq.Socket[bytes] | None = None

    def engine_started(self, incarnation: int, num_predecessors: int = 0) -> None:
        """Connect to the n-th engine process; `num_predecessors`: earlier front ends that used it."""
        self._disconnect()
        self.ready, self.detail, self._stall = False, "starting", ""
        self._metrics.engine_started(incarnation, joined=num_predecessors > 0)
        self._from_engine = messages.socket(self._context, zmq.PULL, self._run_dir, messages.ENGINE_OUTBOX, incarnation)
        self._to_engine = messages.socket(self._context, zmq.PUSH, self._run_dir, messages.ENGINE_INBOX, incarnation)
        if num_predecessors:
            # Updates of their requests may still arrive.
            first_number = num_predecessors * MAX_IDS
            self._ids = itertools.count(first_number)
            self._send(Joined(first_number))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._from_engine.fileno(), self._receive)
        # The descriptor is edge-triggered: check once for messages that arrived before.
        loop.call_soon(self._receive)

    def engine_ended(self, message: str) -> None:
        self._disconnect()
        self.ready, self.detail = False, message
        self._metrics.engine_ended()
        self.fail_all(BackendFailed(message))
        # The next engine must not hear of them.
        self._recipients.clear()

    def engine_stalled(self, message: str) -> None:
        """Refuse requests until the message is empty; those in flight continue then."""
        self._stall = message

    def fail_all(self, error: ServingError) -> None:
        for recipient in {id(one): one for one, *_ in self._recipients.values()}.values():
            recipient.fail(error)

    def submit(
        self, requests: Iterable[Callable[[str], Request]], recipient: Recipient, pixels: PixelFile | None = None
    ) -> list[str]:
        """Create and send requests; updates of the i-th one have index i.

        pixels: those of all of them; the caller keeps the object until they have ended.

        Raises: BackendFailed, or Overloaded if too many are outstanding.
        """
        self.check_ready()
        ids: list[str] = []
        now = time.monotonic()
        if not self._recipients:
            self._queue.resume(now)
        for index, make in enumerate(requests):
            request_id = str(next(self._ids))
            request = make(request_id)
            try:
                self._queue.enter(request_id, len(request.prompt_token_ids), len(self._recipients), now)
            except Overloaded:
                self.abort(ids)
                raise
            self._recipients[request_id] = (recipient, index, request.adapter)
            self._send(Add(request) if pixels is None else Add(without_pixels(request), pixels.place()))
            ids.append(request_id)
        return ids

    def abort(self, ids: Sequence[str]) -> None:
        """Abort these requests; ids of ended ones are skipped."""
        live = tuple(one for one in ids if self._recipients.pop(one, None) is not None)
        if live and self.ready:
            self._queue.leave(live)
            self._send(Abort(live))

    def load_adapter(self, digest: str, folder: Path, name: str) -> None:
        """Requests may use the adapter once `on_adapter` has told so. An engine that starts knows none."""
        if self.ready:
            self._send(LoadAdapter(digest, str(folder), name))

    def drop_adapter(self, digest: str) -> None:
        """No further request uses the adapter."""
        if self.ready:
            self._send(DropAdapter(digest))

    def uses_adapter(self, digest: str) -> bool:
        """Whether a request that has not ended does."""
        return any(adapter == digest for *_, adapter in self._recipients.values())

    def check_ready(self) -> None:
        """Raises BackendFailed, with the reason or the progress of the startup, unless the engine is ready."""
        if not self.ready or self._stall:
            raise BackendFailed(f"not ready: {self._stall or self.detail}")

    def close(self) -> None:
        self._disconnect()
        self._context.destroy(linger=0)

    def _disconnect(self) -> None:
        if self._from_engine is not None:
            asyncio.get_running_loop().remove_reader(self._from_engine.fileno())
            self._from_engine.close(linger=0)
            self._from_engine = None
        if self._to_engine is not None:
            self._to_engine.close(linger=0)
            self._to_engine = None

    def _send(self, message: messages.ToEngine) -> None:
        assert self._to_engine is not None
        self._to_engine.send(messages.encoder.encode(message), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Process all pending messages, then let each recipient show its updates at once."""
        touched: dict[int, Recipient] = {}
        try:
            for _ in range(MAX_STEPS_AT_ONCE):
                if self._from_engine is None:
                    return
                self._handle(messages.decode_from_engine(self._from_engine.recv(zmq.NOBLOCK)), touched)
            asyncio.get_running_loop().call_soon(self._receive)
        except zmq.Again:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, no further message would be understood
            self._on_broken(error)
        finally:
            for recipient in touched.values():
                try:
                    recipient.show_pending()
                except Exception as error:  # noqa: BLE001 - a bug that one request meets must not end the others
                    _fail(recipient, error)

    def _handle(self, message: messages.FromEngine, touched: dict[int, Recipient]) -> None:
        match message:
            case Step():
                self._deliver(message, touched)
            case AdapterNews():
                self._on_adapter(message)
            case StartProgress(stage, share):
                self.detail = f"{stage} {share:.0%}"
            case ModelFound(model_dir):
                self._on_model(Path(model_dir))
            case Ready(limits, queue):
                # What may have been sent: the engine's queue, and the prompts of all rows until their first tokens.
                max_tokens = queue.max_tokens + limits.max_rows * limits.max_model_length
                outstanding = QueueLimits(queue.max_requests, max_tokens)
                self._queue = Backpressure(outstanding, limits.max_rows, time.monotonic())
                self.ready, self.detail = True, "ready"
                self._metrics.engine_ready(message)
                self._on_ready(message)

    def _deliver(self, step: Step, touched: dict[int, Recipient]) -> None:
        self._metrics.step(step)
        recipients, queue, ended = self._recipients, self._queue, []
        for event in step.events:
            # Unknown ids were aborted while their event was in flight.
            entry = recipients.get(event.request_id)
            if entry is not None:
                recipient, index, _ = entry
                touched[id(recipient)] = recipient
                if event.first is not None:
                    queue.take_up(event.request_id)
                if event.finish_reason is not None:
                    del recipients[event.request_id]
                    ended.append(event.request_id)
                try:
                    recipient.deliver(index, event)
                except Exception as error:  # noqa: BLE001 - a bug that one request meets must not end the others
                    _fail(recipient, error)
        if ended:
            queue.leave(ended)
            queue.turn(step.stats.num_running, time.monotonic())
        for refused in step.refused:
            queue.withdraw(refused.request_id)
            entry = recipients.pop(refused.request_id, None)
            if entry is not None:
                entry[0].fail(_refusal(refused))


def _fail(recipient: Recipient, error: Exception) -> None:
    traceback.print_exception(error)
    recipient.fail(error)


def _refusal(refused: Refused) -> ServingError:
    if refused.retry_after_seconds is not None:
        return Overloaded(refused.message, refused.retry_after_seconds)
    return InvalidRequest(refused.message, refused.field, code=refused.code)
