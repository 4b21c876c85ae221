"""Accepts connections such that several front ends on one socket get equal shares of a burst.

Created by the front end process. The kernel wakes all front ends for a connection, and one that is awake already could
take a whole burst. So a front end with more connections than another lets it go first, for at most a tenth of a second:
a front end that is frozen, starting or has exited costs its share, but no client. Connections that nobody accepted stay
with the kernel, for any front end. It does not read requests.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from neuron_runtime.console import say
from neuron_runtime.server.shared_counts import Count, SharedCounts

TURN_SECONDS = 0.001
MAX_TURNS = 100
"""How often a front end lets another go first that does not accept. On a machine with more work than CPUs, a process
may wait for tens of milliseconds."""
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
LOST = frozenset({
    errno.ECONNABORTED, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EPERM, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET,
})  # fmt: skip
"""What `accept` reports of a connection that is lost already; EPERM is from a firewall."""
RETRY_SECONDS = 1.0


class Connections:
    """Counts the open and the busy connections of this front end and shares the numbers.

    A new connection is busy until its first response has ended.
    """

    def __init__(self, counts: SharedCounts) -> None:
        self._counts = counts
        self.num_open = 0
        self.num_busy = 0

    def opened(self) -> None:
        self._add(1, 1)

    def became_busy(self) -> None:
        self._add(0, 1)

    def became_idle(self) -> None:
        self._add(0, -1)

    def closed(self, *, busy: bool) -> None:
        self._add(-1, -busy)

    def _add(self, num_open: int, num_busy: int) -> None:
        self.num_open += num_open
        self.num_busy += num_busy
        self._counts.set(Count.OPEN, self.num_open)
        self._counts.set(Count.BUSY, self.num_busy)


class Share:
    """Decides whether this front end should let another one accept the next connection.

    Busy connections decide. Idle ones count only between front ends that are about equally busy: one that has just
    started does not get every new stream until it has as many idle connections as the others.
    """

    def __init__(self, counts: SharedCounts, connections: Connections) -> None:
        self._counts = counts
        self._connections = connections
        self._seen = self._others()
        self._num_turns = [0] * len(self._seen)
        """Turns of each other front end since its numbers changed. One that lets them all pass does not accept. They
        are not counted per connection: with short requests, our numbers would fall before it had enough of them."""

    @property
    def is_exceeded(self) -> bool:
        """Whether another front end should accept the next connection."""
        return bool(self._first())

    def let_others_go(self) -> None:
        """Count a turn of those that should accept first."""
        for index in self._first():
            self._num_turns[index] += 1

    def _first(self) -> list[int]:
        """Those that should accept before this one."""
        others, before = self._others(), self._seen
        self._seen = others
        for index, numbers in enumerate(others):
            if numbers != before[index]:
                self._num_turns[index] = 0
        return [
            index
            for index, numbers in enumerate(others)
            if self._num_turns[index] < MAX_TURNS and self._exceeds(*numbers)
        ]

    def _exceeds(self, num_busy: int, num_open: int) -> bool:
        ours = self._connections
        if _is_above(ours.num_busy, num_busy):
            return True
        return not _is_above(num_busy, ours.num_busy) and _is_above(ours.num_open, num_open)

    def _others(self) -> list[tuple[int, int]]:
        return list(zip(self._counts.others(Count.BUSY), self._counts.others(Count.OPEN), strict=True))


def _is_above(one: int, other: int) -> bool:
    """Clearly above: with exact shares, front ends would spend most of a burst waiting for each other."""
    return one > other + 1 + other // 8


class Acceptor:
    """
    Args:
        listener: the socket, shared with other front ends.
        make_protocol: creates the protocol of a connection.
    """

    def __init__(self, listener: socket.socket, share: Share, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._share = share
        self._make_protocol = make_protocol
        self._connecting: set[asyncio.Task[Any]] = set()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    async def run(self) -> NoReturn:
        """Accept connections until cancelled, one per turn of the event loop."""
        while True:
            await self._until_one_waits()
            try:
                while await self._is_our_turn() and self._accept():  # noqa: ASYNC110 - a turn for the rest of the loop
                    await asyncio.sleep(0)
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                say(f"cannot accept a connection: {error.strerror}; trying again in {RETRY_SECONDS:.0f} s")
                await asyncio.sleep(RETRY_SECONDS)

    async def _until_one_waits(self) -> None:
        loop = asyncio.get_running_loop()
        waits = asyncio.Event()
        loop.add_reader(self._listener, waits.set)
        try:
            await waits.wait()
        finally:
            loop.remove_reader(self._listener)

    async def _is_our_turn(self) -> bool:
        """Let others go first if they should; False if they took all connections."""
        for _ in range(MAX_TURNS):
            if not self._share.is_exceeded:
                return True
            self._share.let_others_go()
            await asyncio.sleep(TURN_SECONDS)
            if not self._poll.poll(0):
                return False
        return True

    def _accept(self) -> bool:
        """Whether there was a connection."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in LOST:
                return True
            raise
        connecting = asyncio.create_task(
            asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        )
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        return True
