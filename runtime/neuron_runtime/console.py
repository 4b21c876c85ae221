"""Progress lines on stderr: what is happening and how many seconds it took.

Used by every process of `neuron-runtime serve` and by the one-shot commands. Requests are logged by `access_log`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

REPORT_SECONDS = 5.0
"""Interval of progress lines during a stage."""


def say(line: str) -> None:
    """Print one line; a closed stderr is ignored."""
    try:
        print(f"neuron-runtime: {line}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        return


class StageLines:
    """A `ProgressCallback` callback that prints each stage when it ends, and long ones every few seconds.

    A stage ends when its share reaches 1 or another stage begins.
    """

    def __init__(self, show: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._stage = ""
        self._began = self._shown = clock()

    def __call__(self, stage: str, share: float) -> None:
        now = self._clock()
        if stage != self._stage:
            if self._stage:
                self._show(f"{self._stage}: {now - self._began:.1f} s")
            self._stage, self._began, self._shown = stage, now, now
        if share >= 1.0:
            self._show(f"{stage}: {now - self._began:.1f} s")
            self._stage = ""
        elif now - self._shown >= REPORT_SECONDS:
            self._shown = now
            self._show(f"{stage}: {share:.0%} after {now - self._began:.0f} s")
