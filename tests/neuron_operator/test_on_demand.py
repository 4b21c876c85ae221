"""What passes read on demand: free devices, events about children and logs of Jobs' pods, each kept for seconds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from helpers import virtual_time
from neuron_operator.api.reasons import Exists, MetricsOf, Trial
from neuron_operator.cluster.client import (
    EVENTS,
    NODES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    AlreadyExists,
    Forbidden,
    NotFound,
    Page,
    Resource,
    Unreachable,
)
from neuron_operator.cluster.on_demand import (
    EVENTS_SECONDS,
    EXISTS_SECONDS,
    FREE_DEVICES_SECONDS,
    LOG_SECONDS,
    UNREADABLE_LOG_SECONDS,
    OnDemand,
)
from neuron_operator.read.drafts import ACCEPTED, DRAFTED, MAX_LINES, accepted_length
from neuron_operator.read.world import FreeDevices

NEURON = "aws.amazon.com/neuron"
FORBIDDEN = Forbidden("no", retriable=False, status=403)


def node(name: str, devices: int) -> dict[str, Any]:
    offered = {NEURON: str(devices)} if devices else {}
    return {"metadata": {"name": name}, "status": {"capacity": offered, "allocatable": offered}}


POD = {"metadata": {"uid": "of a pod"}, "spec": {"containers": [{"resources": {"requests": {NEURON: "2"}}}]}}


class Reads:
    """A cluster that can only be read and counts the reads; `fault`: what every read ends with."""

    def __init__(self, events: tuple[dict[str, Any], ...] = (), fault: Exception | None = None) -> None:
        self.events = events
        self.fault = fault
        self.asked: list[str] = []

    async def list(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> Page:
        await self._read(f"{resource.plural} {field_selector}".strip())
        if resource is NODES:
            return Page((node("n1", 6), node("n2", 6), node("cpu", 0)), "1")
        return Page(self.events if resource is EVENTS else (POD,), "1")

    async def log(self, namespace: str, pod: str, container: str, **limits: float) -> str:
        return f"read {await self._read(f'log of {namespace}/{pod}/{container}')}"

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any]:
        await self._read(f"{resource.plural} {namespace}/{name}")
        return {}

    async def create(self, resource: Resource, obj: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        assert dry_run, "nothing may be created"
        await self._read(f"trial of {resource.plural} {obj['metadata']['namespace']}/{obj['metadata']['name']}")
        return obj

    async def _read(self, what: str) -> int:
        self.asked.append(what)
        number = len(self.asked)
        await asyncio.sleep(0.01)
        if self.fault is not None:
            raise self.fault
        return number


def on_demand(cluster: Reads) -> OnDemand:
    return OnDemand(cluster)  # type: ignore[arg-type]


def test_only_pods_on_neuron_nodes_are_listed_and_the_result_is_kept_for_seconds() -> None:
    async def main() -> None:
        cluster = Reads()
        reads = on_demand(cluster)
        first, second = await asyncio.gather(reads.free_devices(), reads.free_devices())
        assert first is second
        assert [n.free_devices for n in first.nodes or ()] == [4, 4]
        assert first.pods == {"of a pod"}
        unfinished = "status.phase!=Succeeded,status.phase!=Failed"
        assert cluster.asked == ["nodes", f"pods spec.nodeName=n1,{unfinished}", f"pods spec.nodeName=n2,{unfinished}"]
        await asyncio.sleep(FREE_DEVICES_SECONDS + 1)
        await reads.free_devices()
        assert len(cluster.asked) == 6

    virtual_time.run(main())


def test_the_devices_of_a_pod_that_gets_its_node_meanwhile_are_not_free() -> None:
    """Its claim has them before."""
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": "neurondevice0"}, {"name": "neurondevice1"}]
    offered = {"spec": {"driver": "neuron.aws.com", "nodeName": "n1", "pool": pool, "devices": devices}}
    results = [{"driver": "neuron.aws.com", "pool": "n1", "device": "neurondevice0"}]
    claim = {"status": {"allocation": {"devices": {"results": results}}}}

    class Scheduling(Reads):
        """The scheduler allocates a claim, and gives its pod a node, once nodes were listed."""

        async def list(
            self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
        ) -> Page:
            page = await super().list(resource, namespace, field_selector=field_selector)
            if resource is RESOURCE_SLICES:
                return Page((offered,), "1")
            is_scheduled = any(what.startswith("pods ") for what in self.asked)
            return Page((claim,) if is_scheduled else (), "1") if resource is RESOURCE_CLAIMS else page

    async def main() -> None:
        found = await OnDemand(Scheduling(), claims_devices=True).free_devices()  # type: ignore[arg-type]
        assert found.pods == {"of a pod"}
        assert [(one.name, one.by_claim, one.free_devices) for one in found.nodes or ()] == [
            ("n1", True, 1),
            ("n2", False, 4),
        ]

    virtual_time.run(main())


def test_without_the_right_free_devices_are_unknown_and_events_and_logs_are_missing() -> None:
    async def main() -> None:
        reads = on_demand(Reads(fault=FORBIDDEN))
        assert await reads.free_devices() == FreeDevices(None)
        assert await reads.events(("ns", "chat"), (), ()) == ()
        assert await reads.log("ns", "fetch-x") == ""

    virtual_time.run(main())


def event(kind: str, name: str, at: str) -> dict[str, Any]:
    return {"metadata": {"creationTimestamp": at}, "regarding": {"kind": kind, "name": name}, "eventTime": None}


def test_events_of_jobs_replica_sets_and_pods_are_sorted_oldest_first() -> None:
    deployment = {"kind": "Deployment", "metadata": {"namespace": "ns", "name": "chat"}}
    chat_pod = {"kind": "Pod", "metadata": {"namespace": "ns", "name": "chat-x-1"}}
    mine = (event("ReplicaSet", "chat-6d5f", "2026-01-02T00:00:00Z"), event("Pod", "chat-x-1", "2026-01-01T00:00:00Z"))
    others = (
        event("ReplicaSet", "chat-two-6d5f", "2026-01-01T00:00:00Z"),
        event("Pod", "other", "2026-01-01T00:00:00Z"),
    )

    async def main() -> None:
        cluster = Reads(events=mine + others)
        reads = on_demand(cluster)
        assert await reads.events(("ns", "chat"), (deployment,), (chat_pod,)) == mine[::-1]
        await reads.events(("ns", "chat"), (deployment,), (chat_pod,))
        assert cluster.asked == ["events type=Warning"]
        await asyncio.sleep(EVENTS_SECONDS + 1)
        await reads.events(("ns", "chat"), (deployment,), (chat_pod,))
        assert len(cluster.asked) == 2

    virtual_time.run(main())


@pytest.mark.parametrize(("fault", "said"), [(None, ""), (FORBIDDEN, "no"), (Unreachable("down", retriable=True), "")])
def test_a_pod_is_only_tried_and_what_is_no_refusal_says_nothing(fault: Exception | None, said: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "ns", "name": "chat-1"}}

    async def main() -> None:
        cluster = Reads(fault=fault)
        assert await on_demand(cluster).denial(Trial(json.dumps(pod))) == said
        assert cluster.asked == ["trial of pods ns/chat-1"]

    virtual_time.run(main())


def test_passes_of_all_models_that_wait_for_a_pod_share_one_read_of_its_log() -> None:
    async def main() -> None:
        cluster = Reads()
        reads = on_demand(cluster)
        assert await asyncio.gather(*(reads.log("ns", "fetch-x") for _ in range(50))) == ["read 1"] * 50
        assert await reads.log("ns", "fetch-x") == "read 1"
        assert cluster.asked == ["log of ns/fetch-x/runtime"]
        assert await asyncio.gather(reads.log("ns", "fetch-y"), reads.log("other", "fetch-x")) == ["read 2", "read 3"]
        await asyncio.sleep(LOG_SECONDS + 1)
        assert await reads.log("ns", "fetch-x") == "read 4"

    virtual_time.run(main())


@pytest.mark.parametrize("fault", [FORBIDDEN, Unreachable("get pods: TimeoutError", retriable=True)])
def test_a_log_that_cannot_be_read_is_seldom_tried_again(fault: Exception) -> None:
    async def main() -> None:
        cluster = Reads(fault=fault)
        reads = on_demand(cluster)
        assert await reads.log("ns", "fetch-x") == ""
        await asyncio.sleep(LOG_SECONDS + 1)
        assert await reads.log("ns", "fetch-x") == ""
        assert len(cluster.asked) == 1
        await asyncio.sleep(UNREADABLE_LOG_SECONDS)
        cluster.fault = None
        assert await reads.log("ns", "fetch-x") == "read 2"

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("wanted", "fault", "exists"),
    [
        (Exists("Secret", "keys"), None, False),
        (Exists("Secret", "keys"), AlreadyExists("it exists", retriable=True, status=409), True),
        (Exists("Secret", "keys"), FORBIDDEN, False),
        (Exists("Secret", "keys"), Unreachable("gone", retriable=True), False),
        (Exists("ConfigMap", "keys"), None, True),
        (Exists("ConfigMap", "keys"), NotFound("no", retriable=False, status=404), False),
        (Exists("ConfigMap", "keys"), FORBIDDEN, False),
    ],
)
def test_whether_a_secret_exists_is_learned_without_reading_it(
    wanted: Exists, fault: Exception | None, exists: bool
) -> None:
    async def main() -> None:
        cluster = Reads(fault=fault)
        reads = on_demand(cluster)
        assert await asyncio.gather(reads.exists("team", wanted), reads.exists("team", wanted)) == [exists] * 2
        how = {"Secret": "trial of secrets", "ConfigMap": "configmaps"}[wanted.kind]
        assert cluster.asked == [f"{how} team/keys"]
        await asyncio.sleep(EXISTS_SECONDS + 1)
        await reads.exists("team", wanted)
        assert len(cluster.asked) == 2

    virtual_time.run(main())


def test_of_the_metrics_of_a_replica_only_a_few_lines_are_kept() -> None:
    """Of hundreds of replicas the operator would else keep a megabyte each, which their owners choose."""
    counted = f'{DRAFTED}{{engine="0"}} 10.0\n{ACCEPTED}{{engine="0"}} 15.0\n'

    async def kept(exposition: str) -> str:
        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=exposition)

        app = web.Application()
        app.add_routes([web.get("/metrics", metrics)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            return (await on_demand(Reads()).told(MetricsOf("chat-1", f"http://{host}:{port}/metrics"))).text
        finally:
            await runner.cleanup()

    text = asyncio.run(kept("# HELP other\nother 1.0\n" * 10_000 + counted))
    assert (text, accepted_length([text])) == (counted.strip(), "2.5")
    assert len(asyncio.run(kept(counted * 10_000)).splitlines()) == MAX_LINES
