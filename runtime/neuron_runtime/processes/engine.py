"""The engine process: owns backend and engine, receives requests and sends one message per step.

Started by the supervisor as a command. A single thread uses the device, and an exception from it ends the process with
the exit code of its class and a record. It knows nothing of HTTP and text.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import zmq

from neuron_runtime import record
from neuron_runtime.adapters.peft import check_digest
from neuron_runtime.artifacts.loading import check_artifact, find_model, load_backend
from neuron_runtime.config import NO_PREFIX_CACHE, RuntimeConfig, load_config
from neuron_runtime.console import StageLines
from neuron_runtime.core import BackendLimits
from neuron_runtime.distributed.layout import Layout
from neuron_runtime.engine import messages
from neuron_runtime.engine.backends import warn_of_limits
from neuron_runtime.engine.backpressure import queue_limits
from neuron_runtime.engine.cache_events import CacheEvents
from neuron_runtime.engine.drafts import drafts_of
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.messages import (
    Abort,
    AdapterNews,
    Add,
    DropAdapter,
    FromEngine,
    Joined,
    LoadAdapter,
    ModelFound,
    Ready,
    Refused,
    Step,
    ToEngine,
)
from neuron_runtime.engine.pixel_files import with_pixels
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, InvalidRequest, Overloaded, ServingError
from neuron_runtime.grammars.guides import grammar_guides
from neuron_runtime.local_settings import LocalSettings, add_local_flags
from neuron_runtime.processes.cache_publisher import CachePublisher
from neuron_runtime.processes.children import ENGINE_MODULE, begun, child_parser
from neuron_runtime.processes.group import leading, place_of
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.processes.watchdog import LATE_SECONDS, MIN_STEP_SECONDS, WatchedBackend

PROGRESS_PERIOD_SECONDS = 0.2
IDLE_MILLISECONDS = 1000
"""An idle engine shows this often that it lives."""


class Border:
    """The engine's end of the sockets: an inbox from the front end and an outbox to it."""

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        self._context = zmq.Context()
        self._inbox = messages.socket(self._context, zmq.PULL, run_dir, messages.ENGINE_INBOX, incarnation)
        self._outbox = messages.socket(self._context, zmq.PUSH, run_dir, messages.ENGINE_OUTBOX, incarnation)
        self._model_messages: dict[type, bytes] = {}
        """Messages for a front end that joins later: the model and its limits."""
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)

    def stop_at_sigterm(self) -> Callable[[], bool]:
        """From now on SIGTERM ends a wait and makes the result true, instead of killing the process."""
        stops: list[int] = []
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        self._poller.register(read_fd, zmq.POLLIN)
        signal.set_wakeup_fd(write_fd)
        signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
        return lambda: bool(stops)

    def send(self, message: FromEngine) -> None:
        raw = messages.encoder.encode(message)
        if isinstance(message, ModelFound | Ready):
            self._model_messages[type(message)] = raw
        self._outbox.send(raw)

    def resend_model(self) -> None:
        """Send the model and its limits to a front end that replaces another one."""
        for raw in self._model_messages.values():
            self._outbox.send(raw)

    def watch(self, other: zmq.Socket[bytes]) -> None:
        """From now on a message in this socket ends a wait, too."""
        self._poller.register(other, zmq.POLLIN)

    def receive(self, wait: bool) -> list[ToEngine]:
        """All messages in the inbox; with `wait`, sleeps until there is one, SIGTERM arrives or a second has passed."""
        if wait:
            self._poller.poll(IDLE_MILLISECONDS)
        mail: list[ToEngine] = []
        while True:
            try:
                mail.append(messages.decode_to_engine(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return mail

    def close(self) -> None:
        self._context.destroy(linger=0)


class Worker:
    """Passes messages to the engine and sends its events, one turn per step."""

    def __init__(
        self,
        engine: Engine,
        border: Border,
        deadline: Deadline,
        cache_events: CacheEvents | None = None,
        publisher: CachePublisher | None = None,
    ) -> None:
        """cache_events, publisher: what the engine records of its prefix cache, and who sends it; both or neither."""
        self._engine = engine
        self._cache_events, self._publisher = cache_events, publisher
        self._border = border
        self._deadline = deadline
        self._first_number: int | None = None
        """The number of the first request of a front end that replaced another one; None: none did."""
        self._accounted_until = time.monotonic()
        self._backend_seconds = 0.0

    def run(self, stopping: Callable[[], bool]) -> None:
        """Run until `stopping` returns true. Exceptions of the device pass through."""
        while not stopping():
            self.turn()
        self._deadline.clear()

    def turn(self) -> None:
        # Until the watched backend sets one for the device.
        self._deadline.set(MIN_STEP_SECONDS, LATE_SECONDS)
        idle = not self._engine.has_work
        mail = self._border.receive(wait=idle and not self._engine.is_reading)
        if idle:
            self._accounted_until = time.monotonic()
        if refused := self._deliver(mail):
            # Before the step, which may take long.
            self._engine.stats.last_step = None
            self._border.send(Step((), tuple(refused), self._engine.stats))
        for digest, failure in self._engine.take_adapter_news():
            self._border.send(AdapterNews(digest, failure))
        works = self._engine.has_work
        events = self._engine.step() if works else []
        if self._publisher is not None and self._cache_events is not None:
            self._publisher.publish(self._cache_events.take())
            self._publisher.answer_replays()
        if not works:
            self._engine.stats.last_step = None
        if mail or works:
            late = tuple(_refused(name, error) for name, error in self._engine.take_refused())
            # An abort changes the statistics too, and a freed row must be visible at once.
            self._border.send(Step(tuple(events), late, self._account()))

    def _account(self) -> EngineStats:
        """The statistics with the times of this turn; sending them counts for the next one."""
        stats, now = self._engine.stats, time.monotonic()
        work = now - self._accounted_until
        stats.work_seconds_total += work
        if stats.last_step is not None:
            stats.last_step.host_seconds = work - (stats.backend_seconds_total - self._backend_seconds)
        self._accounted_until, self._backend_seconds = now, stats.backend_seconds_total
        return stats

    def _deliver(self, mail: list[ToEngine]) -> list[Refused]:
        refused = []
        for message in mail:
            match message:
                case Add(request) if self._is_abandoned(request.request_id):
                    pass
                case Add(request, pixels):
                    try:
                        self._engine.add(request if pixels is None else with_pixels(request, pixels))
                    except Overloaded as error:
                        wait = error.retry_after_seconds
                        refused.append(Refused(request.request_id, str(error), retry_after_seconds=wait))
                    except InvalidRequest as error:
                        refused.append(_refused(request.request_id, error))
                case Abort(request_ids):
                    for request_id in request_ids:
                        self._engine.abort(request_id)
                case LoadAdapter(digest, folder, name):
                    if self._cache_events is not None:
                        self._cache_events.adapter_names[digest] = name
                    self._engine.load_adapter(digest, Path(folder))
                case DropAdapter(digest):
                    self._engine.drop_adapter(digest)
                case Joined(first_number):
                    self._first_number = first_number
                    for request_id in filter(self._is_abandoned, self._engine.request_ids):
                        self._engine.abort(request_id)
                    self._border.resend_model()
        return refused

    def _is_abandoned(self, request_id: str) -> bool:
        """Whether the front end that sent a request was replaced."""
        return self._first_number is not None and int(request_id) < self._first_number


def _refused(request_id: str, error: InvalidRequest) -> Refused:
    return Refused(request_id, str(error), error.field, code=error.code)


class StartReport:
    """A `ProgressCallback` that prints progress and sends it, rate-limited, to the front end."""

    def __init__(self, border: Border) -> None:
        self._border = border
        self._lines = StageLines()
        self._sent = 0.0

    def __call__(self, stage: str, share: float) -> None:
        self._lines(stage, share)
        now = time.monotonic()
        if share >= 1.0 or now - self._sent >= PROGRESS_PERIOD_SECONDS:
            self._sent = now
            self._border.send(messages.StartProgress(stage, share))


class Ending:
    """Ends this process with a record of a command. Called from any thread."""

    def __init__(self, command: str, path: Path) -> None:
        self._command = command
        self._path = path
        self._began = time.monotonic()

    def write(self, failure: ServingError) -> int:
        """Returns the exit code."""
        outcome = record.failure(self._command, failure, time.monotonic() - self._began)
        record.write(outcome, self._path)
        return outcome.exit_code

    def code_of(self, work: Callable[[], None]) -> int:
        """Do the work of this process; returns the exit code."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever the device raised decides the exit code
            failure = device_failure(error)
            if failure is not error:
                traceback.print_exc()
            return self.write(failure)
        return 0

    def at_once(self, failure: ServingError) -> NoReturn:
        """Without waiting for other threads: the device may never answer."""
        os._exit(self.write(failure))


def device_failure(error: Exception) -> ServingError:
    """The error with an exit code for an exception of a backend."""
    if isinstance(error, ServingError):
        return error
    text = f"{type(error).__name__}: {error}"
    out_of_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "can't allocate" in text
    return FatalError(ExitCode.DEVICE_OUT_OF_MEMORY if out_of_memory else ExitCode.DEVICE_FAILED, text)


def serve(
    config: RuntimeConfig,
    settings: LocalSettings,
    layout: Layout,
    border: Border,
    *,
    deadline: Deadline,
    ending: Ending,
) -> None:
    """Load, warm up, then serve until SIGTERM. Raises FatalError or exceptions of the backend."""
    report = StartReport(border)
    publisher = _publisher(config)
    check_artifact(config, settings, report)
    model_dir = find_model(config, settings, report)
    border.send(ModelFound(str(model_dir)))
    with leading(layout, config, model_dir, ending.at_once) as group:
        group.meet(report)
        began = time.monotonic()
        report(f"starting the {config.backend} backend", 0.0)
        backend = group.replicated(load_backend(model_dir, config, settings, report, rank=place_of(layout, 0)))
        guides = grammar_guides(model_dir, backend.limits)
        try:
            loaded = time.monotonic()
            watched = WatchedBackend(backend, deadline.set)
            watched.warm_up(report)
            # Libraries and weights stay; a full collection that walks them would delay every stream by 100 ms.
            gc.collect()
            gc.freeze()
            warn_of_limits(config, backend.limits)
            queue = queue_limits(backend.limits, config.limits.max_queued_requests, config.limits.max_queued_tokens)
            cache_events = _recorder(config, backend.limits)
            engine = Engine(
                watched,
                max_queued_requests=queue.max_requests,
                max_queued_tokens=queue.max_tokens,
                guides=guides,
                drafting=drafts_of(config.speculation, backend.limits),
                check_adapter=check_digest,
                cache_events=cache_events,
            )
            if publisher is not None and publisher.replays is not None:
                border.watch(publisher.replays)
            border.send(Ready(backend.limits, queue, loaded - began, time.monotonic() - loaded, layout.size))
            with closing(engine):
                Worker(engine, border, deadline, cache_events, publisher).run(border.stop_at_sigterm())
        finally:
            guides.close()
            backend.close()


def _publisher(config: RuntimeConfig) -> CachePublisher | None:
    """What sends events of the prefix cache. It takes the port before the model is loaded: readers of an engine before
    this one have found it again by then, and learn that the cache is empty. Raises InvalidConfig."""
    return CachePublisher(config.cache_events, config.served_names[0]) if config.cache_events.endpoint else None


def _recorder(config: RuntimeConfig, limits: BackendLimits) -> CacheEvents | None:
    """What records events of the prefix cache, if they are published. Raises InvalidConfig."""
    if not config.cache_events.endpoint:
        return None
    if not limits.shares_prefixes:
        raise InvalidConfig("$.cacheEvents.endpoint", NO_PREFIX_CACHE)
    return CacheEvents(limits.block_size)


def main(arguments: list[str] | None = None) -> int:
    parser = child_parser(ENGINE_MODULE)
    add_local_flags(parser)
    parser.add_argument("--incarnation", type=int, required=True)
    options = begun(parser, arguments)
    border = Border(options.run_dir, options.incarnation)
    ending = Ending("serve", options.record)

    def work() -> None:
        with Deadline(options.run_dir / f"deadline-{options.incarnation}") as deadline:
            config, layout = load_config(options.config), Layout.of_folder(options.run_dir)
            serve(config, LocalSettings.of(options), layout, border, deadline=deadline, ending=ending)

    try:
        return ending.code_of(work)
    finally:
        border.close()


if __name__ == "__main__":
    sys.exit(main())
