"""Progress lines on stderr: what is happening and how many seconds it took.

Used by every process of `neuron-runtime serve` and by the one-shot commands. Requests are logged by `access_log`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

REPORT_SECONDS = 5.0
"""Interval of progress lines during a stage."""

AMOUNT_SECONDS = 10.0
"""Interval of progress lines in bytes, unless they are redrawn on a terminal. The rate is that of this time."""

REDRAW_SECONDS = 1.0
"""Interval on a terminal, and time until the first line everywhere: it says how many bytes there are."""

CLEAR_LINE = "\r\x1b[K"


def say(line: str) -> None:
    """Print one line, in which control characters are escaped; a closed stderr is ignored."""
    _write(f"{CLEAR_LINE if sys.stderr.isatty() else ''}neuron-runtime: {printable(line)}\n")


def redraw(line: str) -> None:
    """Print a line on a terminal that the next one replaces."""
    _write(f"{CLEAR_LINE}neuron-runtime: {printable(line)}")


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except BrokenPipeError:
        return


def printable(text: str) -> str:
    """The text with an escape for each character that a terminal might obey. Names on a shared disk are anybody's."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def bytes_text(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} bytes"


def seconds_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class AmountLine:
    """Shows how many bytes of how many are done, at which rate, and the time left.

    On a terminal one line is redrawn; otherwise a line is printed now and then.
    """

    def __init__(self, title: str, terminal: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._clock = clock
        self._due = clock() + REDRAW_SECONDS
        self._recent: deque[tuple[float, int]] = deque()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        self._recent.append((now, done_bytes))
        while now - self._recent[0][0] > AMOUNT_SECONDS:
            self._recent.popleft()
        if now >= self._due:
            self._due = now + (REDRAW_SECONDS if self._terminal else AMOUNT_SECONDS)
            (redraw if self._terminal else say)(self._line(done_bytes, total_bytes))

    def _line(self, done_bytes: int, total_bytes: int) -> str:
        line = f"{self._title}: {bytes_text(done_bytes)} of {bytes_text(total_bytes)}"
        line += f" ({done_bytes / max(1, total_bytes):.0%})"
        (began, first), (now, last) = self._recent[0], self._recent[-1]
        if now > began and last > first:
            rate = (last - first) / (now - began)
            line += f", {bytes_text(rate)}/s, {seconds_text((total_bytes - done_bytes) / rate)} left"
        return line


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
            done = f"{share:.0%} after {now - self._began:.0f} s" if share else f"{now - self._began:.0f} s so far"
            self._show(f"{stage}: {done}")
