"""A clock for measurements of host work on a busy machine. See `backend.simulated.device.Clock`."""

from __future__ import annotations

import time


class CpuClock:
    """Time that advances with the CPU seconds of this thread, and jumps in `sleep_until`.

    Host work counts as on an otherwise idle machine, whatever else runs.
    """

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited

    def sleep_until(self, moment: float) -> None:
        self._waited += max(0.0, moment - self.now())
