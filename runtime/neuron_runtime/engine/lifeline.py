"""What ties a child process to the supervisor: it dies when the supervisor does, and it can be seen to hang.

Used by the engine process and the front end at their start, and by the supervisor, which reads the deadline. No
policy: how long a step may take is the engine process's business, what to do about it the supervisor's.
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
from types import TracebackType

PR_SET_PDEATHSIG = 1
_DEADLINE = struct.Struct("=d")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when `parent_pid` ends, however that happens. Linux only, elsewhere nothing."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        # It ended before the kernel was told.
        os._exit(1)


class Deadline:
    """A point on the monotonic clock that one process sets and another reads, in a file of eight bytes.

    Shared memory, because a hung device call may hold the interpreter lock: the hung process cannot say so itself.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_DEADLINE.size)
            self._memory = mmap.mmap(file.fileno(), _DEADLINE.size)

    def set(self, seconds: float) -> None:
        """From now on the process has this long."""
        _DEADLINE.pack_into(self._memory, 0, time.monotonic() + seconds)

    def clear(self) -> None:
        _DEADLINE.pack_into(self._memory, 0, 0.0)

    @property
    def overdue_seconds(self) -> float:
        """How long ago the deadline passed; 0 when there is none or it lies ahead."""
        (deadline,) = _DEADLINE.unpack_from(self._memory, 0)
        return max(0.0, time.monotonic() - deadline) if deadline else 0.0

    def close(self) -> None:
        self._memory.close()

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
