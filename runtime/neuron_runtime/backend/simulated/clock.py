"""What time it is for an engine and its simulated device: the wall's, none but what is waited for, or the CPU's.

Handed to `SimulatedBackend` and `Engine` by whoever puts them together.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What time it is for the engine and its device, in seconds from any start."""

    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None:
        """Let time pass; a moment that has passed is fine."""


class WallClock:
    """The time of day's pace, for serving."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


class VirtualClock:
    """Time that passes only where somebody waits: as fast as the host can, and the same on any machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


class CpuClock:
    """Time that passes with the CPU seconds of this thread, and jumps where it waits.

    What the host works on counts as on a quiet machine, whatever else this one does meanwhile.
    """

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited

    def sleep_until(self, moment: float) -> None:
        self._waited += max(0.0, moment - self.now())
