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
_DEADLINE = struct.Struct("=d")


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
    """A time on the monotonic clock that one process sets and another reads, in a file of eight bytes.

    Shared memory, because a hung device call may hold the GIL, so that the process cannot report it itself.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_DEADLINE.size)
            self._memory = mmap.mmap(file.fileno(), _DEADLINE.size)

    def set(self, seconds: float) -> None:
        """Set the deadline to this long from now."""
        _DEADLINE.pack_into(self._memory, 0, time.monotonic() + seconds)

    def clear(self) -> None:
        _DEADLINE.pack_into(self._memory, 0, 0.0)

    @property
    def overdue_seconds(self) -> float:
        """Time since the deadline; 0 if there is none or it has not passed."""
        (deadline,) = _DEADLINE.unpack_from(self._memory, 0)
        return max(0.0, time.monotonic() - deadline) if deadline else 0.0

    def close(self) -> None:
        self._memory.close()

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
