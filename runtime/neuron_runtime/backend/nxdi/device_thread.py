"""A thread that calls one function, on one job after another.

Used by the backend, whose `forward()` blocks. Two queues cost a step far less of the engine's time than the futures of
an executor do. What a job means, and what to do after one that failed, is the function's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class _Raised(NamedTuple):
    error: BaseException


class DeviceThread(Generic[Job, Result]):
    """Results come in the order of the jobs."""

    def __init__(self, run: Callable[[Job], Result]) -> None:
        self._run = run
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._results: SimpleQueue[Result | _Raised] = SimpleQueue()
        self._closed = False
        # The end of the process waits for no job: a device may hang.
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; never blocks."""
        self._jobs.put(job)

    def get(self) -> Result:
        """The result of the oldest job whose result was not taken; raises what the job raised."""
        result = self._results.get()
        if isinstance(result, _Raised):
            raise result.error
        return result

    def close(self) -> None:
        """Wait for the job that runs; the ones behind it never run. Idempotent."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            try:
                self._results.put(self._run(job))
            except BaseException as error:  # noqa: BLE001 - `get` raises it
                self._results.put(_Raised(error))
