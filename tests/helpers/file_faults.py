"""Faults of a server that sends files, ordered by a test, and a count of the bytes that it sent.

Used by the local hub and by the proxy in front of the local S3 server.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class FileFaults:
    """All off by default. Names are the last parts of paths."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of bodies by name."""
    flipped: dict[str, int] = field(default_factory=dict)
    """Name to the position of a byte that is sent wrong."""
    num_cuts: int = 0
    """Answers of more than `cut_bytes` that end there."""
    cut_bytes: int = 1000
    num_hangs: int = 0
    """Answers that stop after `cut_bytes` until `released`."""
    released: threading.Event = field(default_factory=threading.Event)
    bytes_per_second: float = 0.0
    """The speed of each answer."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_sent_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def body(self, path: str, begin: int, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """The blocks of a file from position `begin`, as they are sent."""
        name = path.rpartition("/")[2]
        cut, hang = self._take()
        left = self.cut_bytes
        for block in blocks:
            data = bytearray(block)
            position = self.flipped.get(name, -1) - begin
            if 0 <= position < len(data):
                data[position] ^= 1
            begin += len(data)
            if cut or hang:
                data, left = data[:left], max(0, left - len(data))
            if self.bytes_per_second:
                time.sleep(len(data) / self.bytes_per_second)
            with self._lock:
                self.sent_bytes[name] += len(data)
            yield bytes(data)
            if hang and not left:
                self.released.wait(60)
            if (cut or hang) and not left:
                return

    def _take(self) -> tuple[bool, bool]:
        with self._lock:
            cut, hang = self.num_cuts > 0, self.num_hangs > 0
            self.num_cuts -= cut
            self.num_hangs -= hang
            return cut, hang
