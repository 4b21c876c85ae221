"""The engine of an `LLM` in a process of its own: the engine process of a server, with the `LLM` as its front end.

Made by `engines.engine_of` for a backend whose device is freed only by the end of a process. It starts the process,
passes requests and events on, and ends it.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import BackendLimits, Request, TokenEvent
from neuron_runtime.engine import messages
from neuron_runtime.engine.messages import Abort, Add, LoadAdapter, ModelFound, Ready, Step
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, InvalidRequest, ServingError
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.processes.children import CONFIG_FILE, ENGINE_MODULE, ENGINE_NAME, Child, Failures, start_child
from neuron_runtime.processes.run_dir import made_run_dir

CHECK_MILLISECONDS = 1000
"""While it waits for a message, the caller checks this often that the engine process lives."""

M = TypeVar("M", ModelFound, Ready, Step)


class ProcessEngine:
    """See `OfflineEngine`. The process is started as a command, so it does not import the caller's program, and it ends
    with this process."""

    def __init__(self, config: RuntimeConfig, settings: LocalSettings) -> None:
        self.stats = EngineStats()
        self._live: set[str] = set()
        self._failures = Failures()
        limits = msgspec.structs.replace(config.limits, max_queued_requests=sys.maxsize, max_queued_tokens=sys.maxsize)
        config = msgspec.structs.replace(config, limits=limits)
        with ExitStack() as stack:
            run_dir = stack.enter_context(made_run_dir())
            (run_dir / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.destroy, linger=0)
            self._from_engine = messages.socket(context, zmq.PULL, run_dir, messages.ENGINE_OUTBOX, 1)
            self._to_engine = messages.socket(context, zmq.PUSH, run_dir, messages.ENGINE_INBOX, 1)
            self._child = _started([*settings.arguments, "--incarnation=1"], run_dir)
            stack.callback(self._child.close)
            stack.callback(self._child.end)
            self._end = weakref.finalize(self, _closed_by, os.getpid(), stack.pop_all())

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def find_model(self) -> Path:
        return Path(self._next(ModelFound).model_dir)

    def load(self) -> BackendLimits:
        return self._next(Ready).limits

    def load_adapter(self, digest: str, folder: Path) -> None:
        self._send(LoadAdapter(digest, str(folder)))

    def add(self, request: Request) -> None:
        self._live.add(request.request_id)
        self._send(Add(request))

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._live.remove(request_id)
            self._send(Abort((request_id,)))

    def step(self) -> list[TokenEvent]:
        """What the engine has done since the last call, at least one step of it."""
        try:
            step = self._next(Step)
        except BaseException:
            self.close()
            raise
        self.stats = step.stats
        for refused in step.refused:
            raise InvalidRequest(refused.message, refused.field)
        # Events of requests that were aborted meanwhile are of no use to anybody.
        events = [event for event in step.events if event.request_id in self._live]
        self._live -= {event.request_id for event in events if event.finish_reason is not None}
        return events

    def close(self) -> None:
        self._live.clear()
        self._end()

    def _send(self, message: messages.ToEngine) -> None:
        if self._end.alive:
            self._to_engine.send(messages.encoder.encode(message), zmq.NOBLOCK)

    def _next(self, kind: type[M]) -> M:
        """The next message of this type; others before it are of no use here. Raises what ended the engine process."""
        while True:
            if self._from_engine.poll(CHECK_MILLISECONDS):
                message = messages.decode_from_engine(self._from_engine.recv(zmq.NOBLOCK))
                if isinstance(message, kind):
                    return message
            elif not self._child.lives:
                raise _as_raised(self._failures.of(self._child))
            else:
                self._child.kill_if_hung()


def _started(arguments: list[str], run_dir: Path) -> Child:
    """The engine process. A thread of its own starts it and waits for its end, because the kernel ends a child with the
    thread that started it, and the caller's may be a short one."""
    made: Future[Child] = Future()

    def keep() -> None:
        try:
            child = start_child(ENGINE_NAME, ENGINE_MODULE, arguments, run_dir, "deadline-1")
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            made.set_exception(error)
        else:
            made.set_result(child)
            child.process.wait()

    threading.Thread(target=keep, name="engine-keeper", daemon=True).start()
    return made.result()


def _closed_by(pid: int, stack: ExitStack) -> None:
    """A fork of the caller's process, which ends too, must not end the engine."""
    if os.getpid() == pid:
        stack.close()


def _as_raised(failure: ServingError) -> ServingError:
    """The error that the engine process reports with its exit code, as it was raised there."""
    if isinstance(failure, FatalError) and failure.exit_code == ExitCode.INVALID_ENGINE_CONFIG:
        field, _, message = str(failure).partition(": ")
        return InvalidConfig(field, message)
    return failure
