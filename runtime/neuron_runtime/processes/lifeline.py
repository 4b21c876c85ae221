"""Ties a child process to the supervisor: it dies with the supervisor, and the supervisor can detect that it hangs.

Used by the engine process and the front ends, which set deadlines, and by the supervisor, which reads them and acts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
MIN_CHECKS = 2
"""A process hangs if this many checks in a row find it overdue; one is not enough after a freeze of the machine."""
_TIMES = struct.Struct("=dd")


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when `parent_pid` exits. No effect on systems other than Linux."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        # The parent exited before the call of prctl.
        os._exit(1)


class Deadline:
    """Two times on the monotonic clock that one process sets and another reads, in a file: when the process should have
    shown life again, and when it must have.

    Shared memory, because a hung device call may hold the GIL, so that the process cannot report it itself.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            # On a full disk this fails; a hole in the file would kill the process when it writes (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, _TIMES.size)
            self._memory = mmap.mmap(file.fileno(), _TIMES.size)
        self._num_overdue = 0

    def set(self, seconds: float, usual_seconds: float | None = None) -> None:
        """Set the deadline to this long from now; after `usual_seconds` the process is late."""
        now = time.monotonic()
        usual = seconds if usual_seconds is None else min(usual_seconds, seconds)
        _TIMES.pack_into(self._memory, 0, now + usual, now + seconds)

    def clear(self) -> None:
        _TIMES.pack_into(self._memory, 0, 0.0, 0.0)

    @property
    def late_seconds(self) -> float:
        """Time since it should have shown life; 0 if it is not late."""
        return self._seconds_since(0)

    @property
    def overdue_seconds(self) -> float:
        """Time since the deadline; 0 if there is none or it has not passed."""
        return self._seconds_since(1)

    def hangs(self) -> bool:
        """Whether the process that sets it does. Call this periodically."""
        self._num_overdue = self._num_overdue + 1 if self.overdue_seconds else 0
        return self._num_overdue >= MIN_CHECKS

    def _seconds_since(self, which: int) -> float:
        then = _TIMES.unpack_from(self._memory, 0)[which]
        return max(0.0, time.monotonic() - then) if then else 0.0

    def close(self) -> None:
        self._memory.close()

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
