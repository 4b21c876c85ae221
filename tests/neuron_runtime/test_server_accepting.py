"""Several front ends accept from one socket: each gets its share, and a frozen one costs no client."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from helpers.front_end import make_model, serving
from neuron_runtime.server.accepting import MAX_TURNS, TURN_SECONDS, Acceptor, Connections, Share
from neuron_runtime.server.shared_counts import Count, SharedCounts
from neuron_runtime.server.supervisor import listen


class Protocol(asyncio.Protocol):
    """A connection that stays busy, for ever or as long as its front end says."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._front_end.connections.opened()
        self._front_end.transports.append(transport)
        transport.write(b"!")
        if self._front_end.busy_seconds is not None:
            asyncio.get_running_loop().call_later(self._front_end.busy_seconds, self._front_end.connections.became_idle)


class FrontEnd:
    """The accepting part of one."""

    def __init__(self, run_dir: Path, number: int, num_front_ends: int) -> None:
        counts = SharedCounts(run_dir, number, num_front_ends)
        self.connections = Connections(counts)
        self.share = Share(counts, self.connections)
        self.transports: list[asyncio.WriteTransport] = []
        self.busy_seconds: float | None = None

    @contextlib.asynccontextmanager
    async def accepting(self, listener: socket.socket) -> AsyncIterator[None]:
        with listener.dup() as own:
            task = asyncio.create_task(Acceptor(own, self.share, lambda: Protocol(self)).run())
            yield
            task.cancel()
            await asyncio.wait((task,))
        for transport in self.transports:
            transport.abort()

    @property
    def num_open(self) -> int:
        return self.connections.num_open


class Clients:
    def __init__(self, listener: socket.socket) -> None:
        self._address = listener.getsockname()
        self._opened = contextlib.ExitStack()

    async def burst(self, count: int) -> None:
        """Opens connections at once and waits until each was accepted."""
        sockets = [self._opened.enter_context(socket.create_connection(self._address)) for _ in range(count)]
        for one in sockets:
            one.setblocking(False)
            await asyncio.get_running_loop().sock_recv(one, 1)

    def close(self) -> None:
        self._opened.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as made:
        yield made


@pytest.fixture
def clients(listener: socket.socket) -> Iterator[Clients]:
    made = Clients(listener)
    yield made
    made.close()


@pytest.mark.parametrize("count", [2, 4])
async def test_a_burst_is_divided_evenly(tmp_path: Path, listener: socket.socket, clients: Clients, count: int) -> None:
    front_ends = [FrontEnd(tmp_path, number, count) for number in range(count)]
    async with contextlib.AsyncExitStack() as running:
        for one in front_ends:
            await running.enter_async_context(one.accepting(listener))
        await clients.burst(48)
        assert sum(one.num_open for one in front_ends) == 48
        assert max(one.num_open for one in front_ends) <= 1.2 * 48 / count


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Share]:
    """Grows by one whenever a front end lets others go first."""
    made: list[Share] = []
    original = Share.let_others_go
    monkeypatch.setattr(Share, "let_others_go", lambda share: (made.append(share), original(share)))
    return made


async def test_a_front_end_that_does_not_accept_costs_no_client_and_one_wait(
    tmp_path: Path, listener: socket.socket, clients: Clients, turns: list[Share]
) -> None:
    works, _frozen = (FrontEnd(tmp_path, number, 2) for number in range(2))
    async with works.accepting(listener):
        await clients.burst(48)
        assert works.num_open == 48
        assert len(turns) == MAX_TURNS


async def test_a_front_end_that_does_not_accept_costs_one_wait_also_if_requests_are_short(
    tmp_path: Path, listener: socket.socket, clients: Clients, turns: list[Share]
) -> None:
    works, _frozen = (FrontEnd(tmp_path, number, 2) for number in range(2))
    works.busy_seconds = 20 * TURN_SECONDS
    async with works.accepting(listener):
        await clients.burst(48)
        assert len(turns) <= MAX_TURNS


async def test_a_front_end_that_continues_gets_connections_again(
    tmp_path: Path, listener: socket.socket, clients: Clients
) -> None:
    works, frozen = (FrontEnd(tmp_path, number, 2) for number in range(2))
    async with works.accepting(listener):
        await clients.burst(20)
        async with frozen.accepting(listener):
            await clients.burst(20)
            assert frozen.num_open >= 15


async def test_a_successor_gets_connections_whatever_its_predecessor_left(
    tmp_path: Path, listener: socket.socket, clients: Clients
) -> None:
    works, killed = (FrontEnd(tmp_path, number, 2) for number in range(2))
    for _ in range(100):
        killed.connections.opened()
    async with works.accepting(listener):
        await clients.burst(20)
        successor = FrontEnd(tmp_path, 1, 2)
        async with successor.accepting(listener):
            await clients.burst(20)
            assert successor.num_open >= 15


class Losing(socket.socket):
    """A listener whose first connections were lost before they were accepted."""

    errors: ClassVar = [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH]

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors.pop(), "lost")
        return super().accept()


async def test_a_connection_that_is_lost_before_it_is_accepted_ends_nothing(
    tmp_path: Path, listener: socket.socket, clients: Clients
) -> None:
    works = FrontEnd(tmp_path, 0, 1)
    with Losing(fileno=listener.detach()) as losing:
        async with works.accepting(losing):
            await clients.burst(3)
            assert works.num_open == 3
        assert losing.errors == []


def test_idle_connections_count_only_between_front_ends_that_are_equally_busy(tmp_path: Path) -> None:
    old, new = (FrontEnd(tmp_path, number, 2) for number in range(2))
    for _ in range(100):
        old.connections.opened()
        old.connections.became_idle()
    assert old.share.is_exceeded
    assert not new.share.is_exceeded
    for _ in range(10):
        new.connections.opened()
    assert not old.share.is_exceeded
    assert new.share.is_exceeded


async def test_a_connection_is_busy_until_its_response_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_model(tmp_path)) as served:
        written: dict[Count, list[int]] = {count: [] for count in Count}
        monkeypatch.setattr(SharedCounts, "set", lambda self, count, number: written[count].append(number))
        body = {"prompt": "a core", "max_tokens": 3, "ignore_eos": True}
        await served.http.post("/v1/completions", json=body)
        await served.http.post("/v1/completions", json=body)
        assert (written[Count.OPEN], written[Count.BUSY]) == ([1, 1, 1, 1], [1, 0, 1, 0])
