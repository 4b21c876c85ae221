"""A slow link that loses packets, for `faults.link_slow`. It needs no netem of the kernel: packets pass through a relay
in this process, between an interface that it makes in each node."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_PACKET_BYTES = 65536


def open_interface(netns: Path, name: str) -> int:
    """Creates an interface in a network namespace; it exists for as long as the returned file is open."""
    opened: list[int] = []

    def within() -> None:
        # The namespace of one thread, which ends with it.
        libc = ctypes.CDLL(None, use_errno=True)
        with netns.open("rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {netns}")
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        opened.append(file)

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    return opened[0]


class Relay:
    """Carries packets between two interfaces, as a context. It does not reorder them."""

    def __init__(self, one: int, other: int, *, delay_seconds: float, loss: float) -> None:
        self._peers = {one: other, other: one}
        self._delay_seconds = delay_seconds
        self._loss = loss
        self._random = random.Random(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay")
        self.num_carried = 0
        self.num_lost = 0

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for file in self._peers:
            os.close(file)

    def _run(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers = count()
        while not self._stop.is_set():
            pause = max(min(waiting[0][0] - time.monotonic(), 0.1), 0.0) if waiting else 0.1
            readable, _, _ = select.select(list(self._peers), [], [], pause)
            for file in readable:
                packet = os.read(file, _MAX_PACKET_BYTES)
                if self._random.random() < self._loss:
                    self.num_lost += 1
                else:
                    due = time.monotonic() + self._delay_seconds
                    heapq.heappush(waiting, (due, next(numbers), self._peers[file], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, file, packet = heapq.heappop(waiting)
                with suppress(BlockingIOError):  # as a router does whose queue is full
                    os.write(file, packet)
                    self.num_carried += 1
