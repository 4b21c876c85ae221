"""Threads for reads that may never end, such as those of a network file system whose server is gone.

The manager of adapters reads on them, and the engine. Threads of `concurrent.futures` would hold the end of their
process until the read ends; these are left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_SECONDS = 2.0
"""A read that goes well has so long to end: its thread may be in a library that a process must not leave suddenly."""


class ReadingThreads(Executor):
    """At most so many calls at once, in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._num_started = 0
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._pending: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        if self._num_started < self._num_threads:
            self._num_started += 1
            Thread(target=self._work, name=f"{self._name}_{self._num_started}", daemon=True).start()
        return future

    def close(self) -> None:
        """Drop what has not begun, and leave what hangs."""
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if call is not None:
                call[0].cancel()
        for _ in range(self._num_started):
            self._calls.put(None)
        wait(list(self._pending), CLOSE_SECONDS)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, fn = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn()
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, fn
