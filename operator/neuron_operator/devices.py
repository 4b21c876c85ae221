"""Free Neuron devices of the cluster, and events about children: read on demand by passes and cached for seconds.

Neither is watched: a watch would mostly stream changes that concern no NeuronModel. Without the right to read them they
are unknown (`FreeDevices(None)`) or empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from neuron_operator.client import EVENTS, NODES, PODS, Cluster, Forbidden
from neuron_operator.names import CORE_RESOURCE, DEVICE_RESOURCE
from neuron_operator.reflector import Key, key_of_model
from neuron_operator.world import FreeDevices, NodeDevices, Object

FREE_DEVICES_SECONDS = 5.0
EVENTS_SECONDS = 15.0
MAX_READS = 8
"""Concurrent pod lists; there is one for each node with Neuron devices."""


class OnDemand:
    """The reads of one process, shared by its passes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._free: tuple[float, FreeDevices] | None = None
        self._free_lock = asyncio.Lock()
        self._events: dict[Key, tuple[float, tuple[Object, ...]]] = {}

    async def free_devices(self) -> FreeDevices:
        """For every node with Neuron devices: allocatable minus requested, cached for FREE_DEVICES_SECONDS."""
        async with self._free_lock:
            now = asyncio.get_running_loop().time()
            if self._free is None or now - self._free[0] > FREE_DEVICES_SECONDS:
                self._free = now, await self._read_free()
            return self._free[1]

    async def events(self, key: Key, children: Iterable[Object], pods: Iterable[Object]) -> tuple[Object, ...]:
        """Warnings about a model's Jobs, ReplicaSets and pods, newest last, cached for EVENTS_SECONDS."""
        now = asyncio.get_running_loop().time()
        for old in [old for old, (read_at, _) in self._events.items() if now - read_at > EVENTS_SECONDS]:
            del self._events[old]
        if key not in self._events:
            self._events[key] = now, await self._read_events(key[0], children, pods)
        return self._events[key][1]

    async def _read_free(self) -> FreeDevices:
        turn = asyncio.Semaphore(MAX_READS)

        async def devices_of(node: Object) -> NodeDevices:
            selector = f"spec.nodeName={node['metadata']['name']},status.phase!=Succeeded,status.phase!=Failed"
            async with turn:
                pods = await self._cluster.list(PODS, None, field_selector=selector)
            return node_devices(node, pods.items)

        try:
            nodes = [node for node in (await self._cluster.list(NODES, None)).items if _has_devices(node)]
            return FreeDevices(tuple(await asyncio.gather(*map(devices_of, nodes))))
        except Forbidden:
            return FreeDevices(None)

    async def _read_events(
        self, namespace: str, children: Iterable[Object], pods: Iterable[Object]
    ) -> tuple[Object, ...]:
        names = {(obj["kind"], key_of_model(obj)[1]) for obj in (*children, *pods)}
        try:
            page = await self._cluster.list(EVENTS, namespace, field_selector="type=Warning")
        except Forbidden:
            return ()
        return tuple(sorted((event for event in page.items if _concerns(event, names)), key=_time_of))


def node_devices(node: Object, pods: Iterable[Object]) -> NodeDevices:
    """A node's devices and cores in total, and without those of `pods`, all unfinished pods on the node."""
    metadata, status = node["metadata"], node.get("status", {})
    allocatable = status.get("allocatable", {})
    devices, cores = (int(parse_quantity(allocatable.get(name, 0))) for name in (DEVICE_RESOURCE, CORE_RESOURCE))
    pods = tuple(pods)
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
    return NodeDevices(
        name=metadata["name"],
        devices=devices,
        free_devices=max(0, devices - sum(requested(pod, DEVICE_RESOURCE) for pod in pods)),
        cores=cores,
        free_cores=max(0, cores - sum(requested(pod, CORE_RESOURCE) for pod in pods)),
        labels=metadata.get("labels", {}),
        schedulable=ready and not node.get("spec", {}).get("unschedulable", False),
    )


def requested(pod: Object, resource: str) -> int:
    """What the scheduler counts for a pod: the sum over its containers and sidecars, or its largest init container with
    the sidecars started before it (https://kubernetes.io/docs/concepts/workloads/pods/init-containers/)."""

    def of(container: Object) -> int:
        resources: dict[str, Any] = container.get("resources", {})
        return int(parse_quantity((resources.get("requests") or resources.get("limits") or {}).get(resource, 0)))

    spec = pod["spec"]
    sidecars = largest = 0
    for container in spec.get("initContainers", ()):
        if container.get("restartPolicy") == "Always":
            sidecars += of(container)
        else:
            largest = max(largest, sidecars + of(container))
    return max(largest, sidecars + sum(map(of, spec["containers"])))


def _has_devices(node: Object) -> bool:
    offered = node.get("status", {}).get("capacity", {})
    return DEVICE_RESOURCE in offered or CORE_RESOURCE in offered


def _concerns(event: Object, names: set[tuple[str, str]]) -> bool:
    about = event.get("regarding") or {}
    kind, name = about.get("kind", ""), about.get("name", "")
    if kind == "ReplicaSet":  # named after its Deployment, with a hash appended
        kind, name = "Deployment", name.rpartition("-")[0]
    return (kind, name) in names


def _time_of(event: Object) -> str:
    """When it last happened: RFC 3339 in UTC, which sorts as text."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    return str(next((time for time in times if time), ""))
