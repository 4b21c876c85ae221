"""Models that sleep or load: their requests wait, wake the model once, and none is lost."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest

from helpers.gateways import Asked, Client, Running, answer, echo, replicas, running, until
from neuron_operator.api.errors import ClusterFault
from neuron_operator.gateway import gateway as gateway_module
from neuron_operator.gateway.models import Adapter, Served

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
SLEEPING = "ScaledToZero: spec.replicas is 0; it wakes in about 40 s"


async def waiting(gateway: Running, count: int, **body: Any) -> list[Client]:
    clients = []
    for _ in range(count):
        clients.append(await gateway.connect())
        clients[-1].send(PATH, {**CHAT, **body})
    await until(lambda: gateway.metric("gateway_held_requests", model="default/chat") == count)
    return clients


class Sleeper:
    """A cluster with one model: it wakes when it is asked to."""

    def __init__(self) -> None:
        self.woken: list[Served] = []
        self.fault: ClusterFault | None = None

    async def wake(self, served: Served) -> bool:
        self.woken.append(served)
        if self.fault is not None:
            raise self.fault
        return True


async def test_requests_of_a_sleeping_model_wait_wake_it_once_and_are_sent_in_their_order() -> None:
    sleeper = Sleeper()
    async with replicas(echo) as (chat,), running({"hold": {"perReplica": 1}}, wake=sleeper.wake) as gateway:
        gateway.serve("chat", is_asleep=True)
        clients = []
        for number in range(20):
            clients += await waiting_one(gateway, number)
        assert [one.key for one in sleeper.woken] == [("default", "chat")]
        gateway.serve("chat")  # it loads
        await asyncio.sleep(0)
        assert not chat.asked
        gateway.serve("chat", chat)
        for number, client in enumerate(clients):
            got = await client.answer()
            assert (got.status, got.json["path"]) == (200, f"/v1/number/{number}")
            await client.aclose()
        assert [one.line.split()[1] for one in chat.asked] == [f"/v1/number/{number}" for number in range(20)]
        assert gateway.metric("gateway_wake_ups_total", model="default/chat", outcome="woken") == 1
        assert gateway.log[-1]["held_seconds"] > 0


async def waiting_one(gateway: Running, number: int) -> list[Client]:
    client = await gateway.connect()
    client.send(f"/v1/number/{number}", CHAT)
    await until(lambda: gateway.metric("gateway_held_requests", model="default/chat") == number + 1)
    return [client]


async def test_requests_of_a_model_that_loads_wait_and_wake_nothing() -> None:
    sleeper = Sleeper()
    async with replicas(echo) as (chat,), running(wake=sleeper.wake) as gateway:
        gateway.serve("chat")
        (client,) = await waiting(gateway, 1)
        gateway.serve("chat", chat)
        assert (await client.answer()).status == 200
        assert not sleeper.woken
        await client.aclose()


async def test_a_sleeping_model_that_is_refused_is_not_woken() -> None:
    sleeper = Sleeper()
    async with running(wake=sleeper.wake) as gateway:
        gateway.serve("chat", is_asleep=True, refused="Unplaceable: no node has 4 devices")
        got = await gateway.post(PATH, CHAT)
        assert (got.status, got.headers["retry-after"]) == (503, "10")
        assert "Unplaceable: no node has 4 devices" in got.json["error"]["message"]
        gateway.serve("chat", is_asleep=True)
        (client,) = await waiting(gateway, 1)
        gateway.serve("chat", refused="Unplaceable: gone")  # while it waits
        assert "gone" in (await client.answer()).json["error"]["message"]
        assert len(sleeper.woken) == 1
        await client.aclose()


async def test_a_ready_replica_that_fails_for_a_moment_is_awaited_though_its_model_is_refused() -> None:
    """A model that is `Stalled` in a rollout still serves with its last revision."""
    sleeper = Sleeper()
    async with replicas(echo) as (chat,), running(wake=sleeper.wake) as gateway:
        gateway.serve("chat", chat, refused="Unplaceable: no node has 4 devices", is_asleep=True)
        (replica,) = gateway.gateway.directory.models["default", "chat"].replicas.values()
        replica.avoid_until = math.inf
        (client,) = await waiting(gateway, 1)
        gateway.serve("chat", chat, refused="Unplaceable: no node has 4 devices", is_asleep=True)
        replica.avoid_until = 0.0
        gateway.gateway.sweep()
        assert (await client.answer()).status == 200
        assert not sleeper.woken
        await client.aclose()


async def test_a_failed_wake_up_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "WAKE_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(gateway_module, "SWEEP_SECONDS", 0.05)
    sleeper = Sleeper()
    sleeper.fault = ClusterFault("the API server is down", retriable=True)
    async with running(wake=sleeper.wake) as gateway:
        gateway.serve("chat", is_asleep=True)
        (client,) = await waiting(gateway, 1)
        await until(lambda: len(sleeper.woken) >= 2)
        assert gateway.metric("gateway_wake_ups_total", model="default/chat", outcome="failed") >= 1
        await client.aclose()


@pytest.mark.parametrize("limit", [{"requests": 3}, {"bytes": 1024}])
async def test_what_is_beyond_a_limit_is_told_when_to_come_back(limit: dict[str, int]) -> None:
    async with running({"hold": {**limit, "retryAfterSeconds": 17}}) as gateway:
        gateway.serve("chat", is_asleep=True, words=SLEEPING)
        clients = await waiting(gateway, 3, x="y" * 200)
        client = await gateway.connect()
        client.send(PATH, {**CHAT, "x": "y" * 200})
        got = await client.answer()
        assert (got.status, got.headers["retry-after"]) == (429, "17")
        assert SLEEPING in got.json["error"]["message"]
        await clients.pop().aclose()  # a client that leaves makes room
        await until(lambda: gateway.metric("gateway_held_requests", model="default/chat") == 2)
        client.send(PATH, {**CHAT, "x": "y" * 200})
        await until(lambda: gateway.metric("gateway_held_requests", model="default/chat") == 3)
        for one in (*clients, client):
            await one.aclose()


async def test_models_that_sleep_leave_place_for_the_bodies_of_others() -> None:
    """Requests that wait may have half of the bytes of all bodies."""
    async with replicas(echo) as (chat,), running({"limits": {"allBodiesBytes": 20_000}}) as gateway:
        gateway.serve("awake", chat)
        for name in ("chat", "other"):
            gateway.serve(name, is_asleep=True)
        clients = await waiting(gateway, 2, x="y" * 4500)
        got = await gateway.post(PATH, {**CHAT, "model": "other", "x": "y" * 4500})
        assert (got.status, got.json["error"]["code"]) == (429, "too_many_held")
        assert (await gateway.post(PATH, {**CHAT, "model": "awake", "x": "y" * 9000})).status == 200
        await clients.pop().aclose()
        await until(lambda: gateway.metric("gateway_held_requests", model="default/chat") == 1)
        clients.append(await gateway.connect())
        clients[-1].send(PATH, {**CHAT, "model": "other", "x": "y" * 4500})
        await until(lambda: gateway.metric("gateway_held_requests", model="default/other") == 1)
        for one in clients:
            await one.aclose()


async def test_who_has_waited_too_long_is_told_the_condition() -> None:
    async with running({"hold": {"seconds": 0.2}}) as gateway:
        gateway.serve("chat", is_asleep=True, words=SLEEPING)
        got = await gateway.post(PATH, CHAT)
        assert (got.status, got.headers["retry-after"]) == (503, "10")
        assert SLEEPING in got.json["error"]["message"]
        assert gateway.log[-1]["error"] == "model_not_ready"


async def test_a_model_that_is_deleted_refuses_who_waits() -> None:
    async with running() as gateway:
        gateway.serve("chat", is_asleep=True)
        (client,) = await waiting(gateway, 1)
        gateway.gateway.drop(("default", "chat"))
        assert (await client.answer()).status == 503
        await client.aclose()


async def test_a_request_that_meets_only_draining_replicas_waits_for_the_next_one() -> None:
    draining = answer(b"{}", status=503, headers={"connection": "close"})

    async def drain(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(draining)
        return False

    async with replicas(drain, echo) as (old, new), running() as gateway:
        gateway.serve("chat", old)
        (client,) = await waiting(gateway, 1)
        gateway.serve("chat", new)
        assert (await client.answer()).status == 200
        await client.aclose()


async def test_no_more_of_those_that_waited_run_at_once_than_the_servers_queue_takes() -> None:
    running_now, most = 0, 0

    async def slow(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.01)
        running_now -= 1
        return await echo(asked, writer)

    async with replicas(slow) as (chat,), running({"hold": {"perReplica": 8}}) as gateway:
        gateway.serve("chat", is_asleep=True)
        clients = await waiting(gateway, 50)
        gateway.serve("chat", chat)
        assert [(await client.answer()).status for client in clients] == [200] * 50
        assert most == 8
        for client in clients:
            await client.aclose()


async def test_requests_that_come_later_do_not_pass_those_that_wait() -> None:
    """Otherwise those that woke the model would wait for ever, while it serves at its limit."""
    released = asyncio.Semaphore(0)

    async def slow(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        await released.acquire()
        return await echo(asked, writer)

    async with replicas(slow) as (chat,), running({"hold": {"perReplica": 2}}) as gateway:
        gateway.serve("chat", is_asleep=True)
        clients = []
        for number in range(4):
            clients += await waiting_one(gateway, number)
        gateway.serve("chat", chat)
        await until(lambda: len(chat.asked) == 2)
        for number in range(4, 8):
            clients.append(await gateway.connect())
            clients[-1].send(f"/v1/number/{number}", CHAT)
            await until(lambda so=number: gateway.metric("gateway_held_requests", model="default/chat") == so - 1)
        for client in clients:
            released.release()
            assert (await client.answer()).status == 200
            await client.aclose()
        assert [one.line.split()[1] for one in chat.asked] == [f"/v1/number/{number}" for number in range(8)]


async def test_none_of_1000_requests_is_lost_while_their_model_sleeps_and_wakes_twice() -> None:
    """0 -> 1 -> 0 -> 1: the second half comes while the model falls asleep again, and its replica drains."""
    sleeper = Sleeper()
    async with replicas(echo, echo) as (first, second), running(wake=sleeper.wake) as gateway:
        gateway.serve("chat", is_asleep=True)
        clients = await waiting(gateway, 500)
        gateway.serve("chat", first)
        arriving = []

        async def arrive() -> None:
            client = await gateway.connect()
            client.send(PATH, CHAT)
            arriving.append(client)

        for _ in range(100):
            await arrive()

        async def draining(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            writer.write(answer(b"{}", status=503, headers={"connection": "close"}))
            return False

        first.behave = draining
        for _ in range(100):
            await arrive()
        gateway.serve("chat", is_asleep=True)
        await first.stop()
        for _ in range(300):
            await arrive()
        await until(lambda: len(sleeper.woken) == 2, seconds=20)
        gateway.serve("chat")
        gateway.serve("chat", second)
        statuses = [(await client.answer()).status for client in itertools.chain(clients, arriving)]
        assert statuses == [200] * 1000
        for client in itertools.chain(clients, arriving):
            await client.aclose()


async def test_an_adapter_is_served_by_its_name_as_long_as_it_exists() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat, adapters=(Adapter("sql"),))
        assert (await gateway.post(PATH, {**CHAT, "model": "sql"})).status == 200
        gateway.serve("chat", chat)
        assert (await gateway.post(PATH, {**CHAT, "model": "sql"})).status == 404


async def test_a_request_is_told_once_that_it_waited_too_long_and_counts_nowhere_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "SWEEP_SECONDS", 60.0)  # the test sweeps
    async with replicas(echo) as (chat,), running({"hold": {"seconds": 0.1}}) as gateway:
        gateway.serve("chat", chat)
        model = gateway.gateway.directory.models["default", "chat"]
        (replica,) = model.replicas.values()
        replica.avoid_until = math.inf
        clients = await waiting(gateway, 3)
        await asyncio.sleep(0.15)  # all have waited too long, and now the replica may be asked
        replica.avoid_until = 0.0
        gateway.gateway.sweep()
        statuses = [(await client.answer()).status for client in clients]
        assert statuses == [503, 200, 200]
        for client in clients:
            client.send(PATH, CHAT)
            assert (await client.answer()).status == 200  # and not the answer of the request before
            await client.aclose()
        assert (replica.in_flight, model.in_flight) == (0, 0)


async def test_a_request_whose_replica_ends_with_its_model_is_told_so() -> None:
    gone = asyncio.Event()

    async def end(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        await gone.wait()
        writer.transport.abort()
        return False

    async with replicas(end) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.send(PATH, CHAT)
        await until(lambda: chat.asked)
        gateway.gateway.drop(("default", "chat"))
        gone.set()
        async with asyncio.timeout(5):
            got = await client.answer()
        assert (got.status, got.json["error"]["code"]) == (503, "model_not_ready")
        assert "the model was deleted" in got.json["error"]["message"]
        await client.aclose()


async def test_a_request_that_one_replica_cannot_answer_keeps_nobody_behind_it_from_that_replica() -> None:
    """As with an adapter that only one replica has: that one is lost, and the request waits."""

    async def only_base(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        if asked.json["model"] == "chat":
            return await echo(asked, writer)
        writer.write(answer(b"{}", status=503))
        return True

    async with replicas(only_base, echo) as (base, lost), running({"timeouts": {"avoidSeconds": 60}}) as gateway:
        gateway.serve("chat", base, lost, adapters=(Adapter("sql"),))
        seen = gateway.gateway.directory.models["default", "chat"].replicas
        seen[lost.address].in_flight = 100  # so that the other one is asked first
        await lost.stop()
        client, other = await gateway.connect(), await gateway.connect()
        client.send(PATH, {**CHAT, "model": "sql"})
        await until(lambda: gateway.metric("gateway_held_requests", model="default/chat") == 1)
        seen[base.address].avoid_until = math.inf
        other.send(PATH, CHAT)
        await until(lambda: gateway.metric("gateway_held_requests", model="default/chat") == 2)
        seen[base.address].avoid_until = 0.0
        gateway.serve("chat", base, adapters=(Adapter("sql"),))  # the lost one is not ready any more
        async with asyncio.timeout(5):
            assert (await other.answer()).status == 200
            assert (await client.answer()).status == 503
        for one in (client, other):
            await one.aclose()
