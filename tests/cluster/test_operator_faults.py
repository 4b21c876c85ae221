"""The operator reaches the same state, and deletes nothing twice, whatever happens between it and the API server.

The faults are made by a proxy in front of a real API server. Kubernetes' own controllers run, undisturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from helpers.api_proxy import ApiProxy, proxying
from helpers.apiserver import ApiServer
from helpers.controllers import controlling, kubelet
from helpers.operator_rights import OPERATOR_NAMESPACE
from helpers.operators import (
    BY_KIND,
    OPERATOR_USER,
    Namespace,
    client_of,
    eventually,
    is_ready,
    operating,
    run_settings,
    shape,
)
from neuron_operator.api import names
from neuron_operator.cluster.client import LEASES, NEURON_MODELS, PODS
from neuron_operator.cluster.lease import LeaseTimings
from neuron_operator.render.jobs import CHECK

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

OUTAGE_SECONDS = 8.0
"""Longer than a term of the Lease below and than the silence of a watch: an outage that goes on only lengthens the
back-offs. `test_reflector.py` has outages of five minutes and more, in virtual time."""
LEASE = LeaseTimings(duration_seconds=4, deadline_seconds=3, renew_seconds=0.5, retry_seconds=0.2)

Fault = Callable[[ApiProxy, Namespace], Awaitable[None]]
"""Runs beside the operator until cancelled; at its end the API server answers again."""


def refusal(code: int, reason: str, **headers: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": "a fault of the test"}
    return web.json_response(body, status=code, headers=headers)


async def storm(proxy: ApiProxy, _: Namespace) -> None:
    """Every third request is throttled."""
    number = itertools.count()
    retry = {"Retry-After": "1"}
    proxy.answer = lambda _: None if next(number) % 3 else refusal(429, "TooManyRequests", **retry)
    await asyncio.Event().wait()


async def silent_watches(proxy: ApiProxy, _: Namespace) -> None:
    """Watches go silent again and again, and their versions have expired."""
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}

    def expired(request: web.Request) -> web.Response | None:
        return web.json_response(gone) if "watch" in request.query and next(number) % 2 else None

    number = itertools.count()
    proxy.answer = expired
    while True:
        await asyncio.sleep(1.5)
        proxy.silence()


async def shuffled_events(proxy: ApiProxy, _: Namespace) -> None:
    """Events arrive twice, and in the reverse order."""
    proxy.reshape = lambda lines: [*reversed(lines), *lines]
    await asyncio.Event().wait()


async def outage(proxy: ApiProxy, _: Namespace) -> None:
    """No API server at all, for longer than a term."""
    proxy.answer = lambda _: refusal(503, "ServiceUnavailable")
    proxy.silence()
    await asyncio.sleep(OUTAGE_SECONDS)
    proxy.answer = lambda _: None
    await asyncio.Event().wait()


async def stolen_lease(_: ApiProxy, namespace: Namespace) -> None:
    """Another holder appears in the Lease for a moment, again and again."""
    path = LEASES.path(OPERATOR_NAMESPACE, "neuron-operator")
    while True:
        await asyncio.sleep(1.0)
        spec = {"holderIdentity": "thief", "leaseDurationSeconds": 1}
        await asyncio.to_thread(namespace.server.call, "PATCH", path, {"spec": spec}, "application/merge-patch+json")


async def jumping_clock(_: ApiProxy, namespace: Namespace) -> None:
    """See `clock`."""
    await asyncio.Event().wait()


async def silent_watches_and_stolen_lease(proxy: ApiProxy, namespace: Namespace) -> None:
    async with asyncio.TaskGroup() as both:
        both.create_task(silent_watches(proxy, namespace))
        both.create_task(stolen_lease(proxy, namespace))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(storm, silent_watches, shuffled_events, outage, stolen_lease, jumping_clock),
        silent_watches_and_stolen_lease,
    )
}
IN_CI = ("silent_watches_and_stolen_lease",)


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    with controlling(server):
        yield server


def jumps() -> Callable[[], datetime]:
    """A clock that is an hour ahead or behind at every call."""
    hours = itertools.cycle((0, 1, 0, -1))
    return lambda: datetime.now(UTC) + timedelta(hours=next(hours))


@contextlib.asynccontextmanager
async def under(fault: Fault | None, proxy: ApiProxy, namespace: Namespace) -> AsyncIterator[None]:
    task = asyncio.create_task(fault(proxy, namespace) if fault else asyncio.Event().wait())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        proxy.answer, proxy.reshape = lambda _: None, lambda lines: lines


async def live(server: ApiServer, fault: Fault | None) -> Any:
    """Two replicas of the operator, while models are made, edited and deleted; all objects at the end, that is when
    pods of the deleted models are garbage-collected (they count for the next model of their name)."""
    namespace = Namespace(server)
    flags = ("--watch-namespaces", namespace.name)
    options = {"now": jumps()} if fault is jumping_clock else {}
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxying(server))
        await stack.enter_async_context(kubelet(namespace))
        replicas = []
        for user, identity in ((OPERATOR_USER, "a"), (OPERATOR_USER, "b")):
            client = await stack.enter_async_context(client_of(server, user, proxy.url, watch_silence_seconds=2.0))
            settings = run_settings(*flags, identity=identity, lease=LEASE)
            replica = operating(client, settings, silence_seconds=2.0, **options)
            replicas.append(await stack.enter_async_context(replica))
        await eventually(lambda: any(replica.is_leading for replica in replicas))
        for name in ("chat", "other"):
            namespace.put_model(name)
        await eventually(lambda: is_ready(namespace) and is_ready(namespace, "other"), about=namespace.list_all)
        async with under(fault, proxy, namespace):
            await asyncio.sleep(0.5)
            namespace.put_model(serving={"maxModelLength": 99})
            namespace.put_model("late")
            namespace.delete(NEURON_MODELS, "other")
            namespace.delete(BY_KIND["Service"], "chat")
            await asyncio.sleep(0.5)
            first = namespace.get(NEURON_MODELS, "late")["metadata"]["uid"]
            namespace.delete(NEURON_MODELS, "late")
            assert namespace.put_model("late", replicas=1)["metadata"]["uid"] != first
            await asyncio.sleep(3.0)
            namespace.put_model(serving={"maxModelLength": 98})
            await eventually(lambda: is_ready(namespace) and is_ready(namespace, "late"), about=namespace.list_all)
        await eventually(lambda: has_only_pods_of(namespace, {"chat": 2, "late": 1}), about=namespace.list_all)
        await asyncio.sleep(3.0)  # longer than a watch is silent, and than a played kubelet needs
        await eventually(lambda: is_ready(namespace) and is_ready(namespace, "late"), about=namespace.list_all)
        ghosts = [replica.caches.children((namespace.name, "other")) for replica in replicas]
        assert ghosts == [(), ()]
    deleted = Counter(
        event["requestObject"]["preconditions"]["uid"]
        for event in server.requests(OPERATOR_USER)
        if event["verb"] == "delete" and event["responseStatus"]["code"] == 200
    )
    assert [uid for uid, count in deleted.items() if count > 1] == []
    return shape(namespace)


def has_only_pods_of(namespace: Namespace, wanted: Mapping[str, int]) -> bool:
    """Whether there are as many serving pods as wanted, and all of them are ready."""
    pods = [pod for pod in namespace.list(PODS) if names.MODEL_LABEL in pod["metadata"]["labels"]]
    ready = [pod for pod in pods if any(c["type"] == "Ready" for c in pod["status"].get("conditions", ()))]
    return Counter(pod["metadata"]["labels"][names.MODEL_LABEL] for pod in pods) == wanted and len(ready) == len(pods)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in FAULTS]
)
async def test_the_same_objects_exist_after_a_fault_and_nothing_is_deleted_twice(
    server: ApiServer, calm: list[Any], name: str
) -> None:
    assert without_old_revisions(await live(server, FAULTS[name])) == without_old_revisions(calm)


@pytest.fixture(scope="module")
def calm(server: ApiServer) -> Any:
    """The objects without a fault."""
    return asyncio.run(live(server, None))


def without_old_revisions(objects: list[Any]) -> list[Any]:
    """Whether a revision that was wanted for a moment was ever pinned, or its configuration checked, is left to
    chance."""
    kinds = ("revision", "config.json")
    kept = [one for one in objects if not ("data" in one and any(kind in str(one) for kind in kinds))]
    return [one for one in kept if not one["metadata"]["name"].startswith(f"{CHECK.prefix}-")]
