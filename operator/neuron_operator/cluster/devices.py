"""Neuron devices of a node, as the scheduler counts them. Called by `on_demand`; pure."""

from __future__ import annotations

from collections.abc import Iterable

from kubernetes.utils.quantity import parse_quantity

from neuron_operator.api.names import CORE_RESOURCE, DEVICE_RESOURCE
from neuron_operator.read.objects import requested
from neuron_operator.read.world import NodeDevices, Object, Taint


def node_devices(node: Object, pods: Iterable[Object]) -> NodeDevices:
    """A node's devices and cores in total, and without those of `pods`, all unfinished pods on the node."""
    metadata, status = node["metadata"], node.get("status", {})
    allocatable = status.get("allocatable", {})
    devices, cores = (int(parse_quantity(allocatable.get(name, 0))) for name in (DEVICE_RESOURCE, CORE_RESOURCE))
    pods = tuple(pods)
    spec = node.get("spec", {})
    taints = [Taint(t["key"], t.get("value", ""), t["effect"]) for t in spec.get("taints", ()) if t["effect"] in _KEEPS]
    passing = [taint for taint in taints if taint.key.startswith(_PASSING)]
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
    return NodeDevices(
        name=metadata["name"],
        devices=devices,
        free_devices=max(0, devices - int(sum(requested(pod, DEVICE_RESOURCE) for pod in pods))),
        cores=cores,
        free_cores=max(0, cores - int(sum(requested(pod, CORE_RESOURCE) for pod in pods))),
        labels=metadata.get("labels", {}),
        schedulable=ready and not passing and not spec.get("unschedulable", False),
        taints=tuple(taint for taint in taints if taint not in passing),
    )


_KEEPS = ("NoSchedule", "NoExecute")
_PASSING = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "karpenter.sh/")
"""Controllers give and take taints with these keys, as the state of a node changes."""


def has_devices(node: Object) -> bool:
    offered = node.get("status", {}).get("capacity", {})
    return DEVICE_RESOURCE in offered or CORE_RESOURCE in offered
