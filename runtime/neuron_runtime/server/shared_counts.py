"""Numbers that each front end of one command writes about itself and the others read, in shared memory.

Used by `accepting`, to divide connections, and by `engine_client`, to divide the engine's queue. A front end writes
only its own numbers, so there are no locks; it starts with zeros, whatever its predecessor left.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path

NUM_BYTES = 8


class Count(IntEnum):
    """The numbers of each front end."""

    OPEN = 0
    """Open connections."""
    BUSY = 1
    """Connections with a request, see `accepting.Connections`."""
    REQUESTS = 2
    """Requests sent to the engine that have not ended."""
    TOKENS = 3
    """Prompt tokens of those without a first token."""


class SharedCounts:
    """
    Args:
        run_dir: the folder shared by the processes of one command.
        front_end: index of the front end that writes.
    """

    def __init__(self, run_dir: Path, front_end: int, num_front_ends: int) -> None:
        self._front_end = front_end
        self._num_front_ends = num_front_ends
        with (run_dir / "counts").open("a+b") as file:
            # On a full disk this fails; a hole in the file would kill the process when it writes (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, len(Count) * num_front_ends * NUM_BYTES)
            # An item of this view is written and read in one piece.
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        for count in Count:
            self.set(count, 0)

    def set(self, count: Count, number: int) -> None:
        """Write a number of this front end."""
        self._numbers[count * self._num_front_ends + self._front_end] = number

    def others(self, count: Count) -> list[int]:
        """The numbers of the other front ends, in a fixed order."""
        numbers = self._numbers[count * self._num_front_ends :][: self._num_front_ends].tolist()
        del numbers[self._front_end]
        return numbers
