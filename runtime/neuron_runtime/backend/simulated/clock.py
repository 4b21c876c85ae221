"""Clocks for an engine and its simulated device: wall time or virtual time.

Passed to `SimulatedBackend` and `Engine` when they are created.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start."""

    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None:
        """Wait until `moment`; returns at once if it has passed."""


class WallClock:
    """Real time, for serving."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


class VirtualClock:
    """Time that passes only in `sleep_until`: runs as fast as the host can, with equal results on any machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)
