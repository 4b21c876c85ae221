"""Free devices of a node as the scheduler counts them, and the events of a model's children."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers import virtual_time
from neuron_operator.client import EVENTS, NODES, Forbidden, Page, Resource
from neuron_operator.devices import EVENTS_SECONDS, FREE_DEVICES_SECONDS, OnDemand, node_devices, requested
from neuron_operator.world import FreeDevices, NodeDevices

NEURON = "aws.amazon.com/neuron"


def container(devices: int, **extra: Any) -> dict[str, Any]:
    return {"resources": {"requests": {NEURON: str(devices)}}, **extra}


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"spec": {"containers": list(containers), "initContainers": list(init)}}


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("body", "devices"),
    [
        (pod(container(1), container(2)), 3),
        (pod({"resources": {}}, {}), 0),
        (pod({"resources": {"limits": {NEURON: "4"}}}), 4),
        (pod({"resources": {"limits": {NEURON: "1k"}}}), 1000),
        (pod(container(1), init=(container(6), container(2))), 6),
        (pod(container(2), init=(container(1, **SIDECAR),)), 3),
        (pod(container(1), init=(container(2, **SIDECAR), container(3))), 5),
        (pod(container(1), init=(container(3), container(2, **SIDECAR))), 3),
    ],
)
def test_the_requests_of_a_pod_are_counted_as_the_scheduler_counts(body: dict[str, Any], devices: int) -> None:
    assert requested(body, NEURON) == devices


def node(name: str = "n1", devices: int = 6, **spec: Any) -> dict[str, Any]:
    labels = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
    offered = {NEURON: str(devices)} if devices else {}
    status = {"capacity": offered, "allocatable": offered, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


def test_free_devices_are_allocatable_minus_requested_and_never_negative() -> None:
    labels = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
    expected = NodeDevices("n1", devices=6, free_devices=1, cores=0, free_cores=0, labels=labels)
    assert node_devices(node(), [pod(container(2)), pod(container(3))]) == expected
    assert node_devices(node(), [pod(container(9))]).free_devices == 0


def test_a_cordoned_or_not_ready_node_is_not_schedulable() -> None:
    assert node_devices(node(), []).schedulable
    assert not node_devices(node(unschedulable=True), []).schedulable
    down = node()
    down["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    assert not node_devices(down, []).schedulable


class Lists:
    """A cluster that only lists objects and counts the lists."""

    def __init__(self, events: tuple[dict[str, Any], ...] = (), refuses: bool = False) -> None:
        self.events = events
        self.refuses = refuses
        self.asked: list[str] = []

    async def list(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> Page:
        self.asked.append(f"{resource.plural} {field_selector}".strip())
        if self.refuses:
            raise Forbidden("no", retriable=False, status=403)
        if resource is NODES:
            return Page((node("n1"), node("n2"), node("cpu", devices=0)), "1")
        return Page(self.events if resource is EVENTS else (pod(container(2)),), "1")


def test_only_pods_on_neuron_nodes_are_listed_and_the_result_is_cached_for_seconds() -> None:
    async def main() -> None:
        lists = Lists()
        reads = OnDemand(lists)  # type: ignore[arg-type]
        first, second = await asyncio.gather(reads.free_devices(), reads.free_devices())
        assert first is second
        assert [n.free_devices for n in first.nodes or ()] == [4, 4]
        unfinished = "status.phase!=Succeeded,status.phase!=Failed"
        assert lists.asked == ["nodes", f"pods spec.nodeName=n1,{unfinished}", f"pods spec.nodeName=n2,{unfinished}"]
        await asyncio.sleep(FREE_DEVICES_SECONDS + 1)
        await reads.free_devices()
        assert len(lists.asked) == 6

    virtual_time.run(main())


def test_without_the_right_free_devices_are_unknown_and_events_are_missing() -> None:
    async def main() -> None:
        reads = OnDemand(Lists(refuses=True))  # type: ignore[arg-type]
        assert await reads.free_devices() == FreeDevices(None)
        assert await reads.events(("ns", "chat"), (), ()) == ()

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
        lists = Lists(events=mine + others)
        reads = OnDemand(lists)  # type: ignore[arg-type]
        assert await reads.events(("ns", "chat"), (deployment,), (chat_pod,)) == mine[::-1]
        await reads.events(("ns", "chat"), (deployment,), (chat_pod,))
        assert lists.asked == ["events type=Warning"]
        await asyncio.sleep(EVENTS_SECONDS + 1)
        await reads.events(("ns", "chat"), (deployment,), (chat_pod,))
        assert len(lists.asked) == 2

    virtual_time.run(main())
