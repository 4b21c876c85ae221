"""Leader election: one replica acts, another follows in time, and none acts on a lease that may have expired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from helpers import virtual_time
from helpers.fake_cluster import FakeCluster
from neuron_operator.cluster.client import LEASES, Unreachable
from neuron_operator.cluster.lease import LeaderLease, LeaseTimings


class Replica:
    """One candidate with its own network and the times when it led (virtual seconds)."""

    def __init__(self, cluster: FakeCluster, name: str, timings: LeaseTimings = LeaseTimings()) -> None:  # noqa: B008 - it is frozen
        self.cluster = NetworkOf(cluster)
        self.worked: list[tuple[float, float]] = []
        self.works_since: float | None = None
        self._lease = LeaderLease(self.cluster, "ns", "operator", name, timings=timings)  # type: ignore[arg-type]

    async def work(self) -> None:
        self.works_since = virtual_time.now()
        try:
            await asyncio.Event().wait()
        finally:
            self.worked.append((self.works_since, virtual_time.now()))
            self.works_since = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replica]:
        task = asyncio.create_task(self._lease.run(self.work))
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class NetworkOf:
    """One replica's connection to the cluster, which can fail (`is_cut`) or hang (`hangs`)."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.is_cut = False
        self.hangs = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cluster, name)
        if name == "watch":
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.hangs:
                await asyncio.Event().wait()
            if self.is_cut:
                raise Unreachable("cut", retriable=True)
            return await method(*args, **kwargs)

        return call


def test_the_standby_starts_at_once_when_the_leader_releases_the_lease() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        async with AsyncExitStack() as others, Replica(cluster, "a").running() as a:
            await asyncio.sleep(1.0)
            b = await others.enter_async_context(Replica(cluster, "b").running())
            await asyncio.sleep(60.0)
            assert a.works_since is not None
            assert (b.works_since, b.worked) == (None, [])
            others.push_async_callback(follows, b, virtual_time.now())

    async def follows(b: Replica, ended: float) -> None:
        await asyncio.sleep(0.5)
        assert b.works_since is not None
        assert b.works_since - ended < 0.5

    virtual_time.run(main())


@pytest.mark.parametrize("fault", ["is_cut", "hangs"])
def test_a_leader_without_network_stops_before_another_starts(fault: str) -> None:
    async def main() -> None:
        cluster = FakeCluster()
        async with Replica(cluster, "a").running() as a:
            await asyncio.sleep(10.0)
            async with Replica(cluster, "b").running() as b:
                await asyncio.sleep(10.0)
                lost = virtual_time.now()
                setattr(a.cluster, fault, True)
                await asyncio.sleep(13.0)
                ((_, stopped),) = a.worked
                assert b.works_since is not None
                assert stopped < b.works_since
                assert stopped - lost <= 8.0
                assert b.works_since - lost <= 12.5
                setattr(a.cluster, fault, False)
                await asyncio.sleep(60.0)
                assert a.works_since is None

    virtual_time.run(main())


def test_the_standby_replaces_a_killed_leader_when_the_lease_expires() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        cut_off = Replica(cluster, "a")
        async with cut_off.running():
            await asyncio.sleep(1.0)
            cut_off.cluster.is_cut = True  # the lease is not released
        ended = virtual_time.now()
        async with Replica(cluster, "b").running() as b:
            await asyncio.sleep(20.0)
            assert b.works_since is not None
            assert 8.0 < b.works_since - ended <= 12.5

    virtual_time.run(main())


def test_a_short_server_fault_does_not_interrupt_the_leader() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        async with Replica(cluster, "a").running() as a:
            await asyncio.sleep(10.0)
            a.cluster.is_cut = True
            await asyncio.sleep(3.5)
            a.cluster.is_cut = False
            await asyncio.sleep(30.0)
            assert a.worked == []
            assert a.works_since is not None

    virtual_time.run(main())


def test_a_stolen_lease_stops_the_leader_at_the_next_renewal() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        async with Replica(cluster, "a").running() as a:
            await asyncio.sleep(9.0)
            live = await cluster.get(LEASES, "ns", "operator")
            stolen = {**live, "spec": {**live["spec"], "holderIdentity": "thief"}}
            await cluster.replace(LEASES, stolen)
            taken = virtual_time.now()
            await asyncio.sleep(4.5)
            ((_, stopped),) = a.worked
            assert stopped - taken <= 4.1
            held = await cluster.get(LEASES, "ns", "operator")
            assert held["spec"]["holderIdentity"] == "thief"

    virtual_time.run(main())


def test_a_leader_that_stops_releases_the_lease() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        async with Replica(cluster, "a").running() as a:
            await asyncio.sleep(5.0)
            assert a.works_since is not None
        live = await cluster.get(LEASES, "ns", "operator")
        assert live["spec"]["holderIdentity"] == ""

    virtual_time.run(main())


def test_an_exception_of_the_leader_releases_the_lease_and_is_raised() -> None:
    async def fail() -> None:
        await asyncio.sleep(1.0)
        raise ZeroDivisionError("of the work")

    async def main() -> None:
        cluster = FakeCluster()
        lease = LeaderLease(cluster, "ns", "operator", "a")
        with pytest.raises(ExceptionGroup, match="unhandled") as raised:
            await lease.run(fail)
        assert raised.group_contains(ZeroDivisionError)
        live = await cluster.get(LEASES, "ns", "operator")
        assert live["spec"]["holderIdentity"] == ""

    virtual_time.run(main())


def test_an_idle_standby_sends_only_its_watch() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        async with Replica(cluster, "a").running():
            await asyncio.sleep(1.0)
            async with Replica(cluster, "b").running():
                await asyncio.sleep(1.0)
                cluster.calls.clear()
                await asyncio.sleep(120.0)
                assert set(cluster.calls) == {"update"}
                assert len(cluster.calls) <= 30  # the leader's renewals

    virtual_time.run(main())
