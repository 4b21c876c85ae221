"""Neuron devices of a node, as the scheduler counts them: those of the device plugin, or those that pods claim.

Called by `on_demand`; pure. Of a DRA driver, a slice lists devices of a node, and a claim says which of them it has
(resource.k8s.io/v1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from neuron_operator.api.names import CORE_RESOURCE, DEVICE_DRIVER, DEVICE_RESOURCE
from neuron_operator.place.catalog import TORUS_SETS
from neuron_operator.read.objects import dig, items, requested, text, whole
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


def claimed_devices(node: NodeDevices, slices: Iterable[Object], taken: Collection[Device]) -> NodeDevices:
    """The node with the devices of the driver in place of the plugin's.

    Args:
        slices: those of the node, see `slices_by_node`.
        taken: what claims have.
    """
    offered = {
        (text(one, "spec", "pool", "name"), text(device, "name")): device
        for one in slices
        for device in items(one, "spec", "devices")
    }
    healthy = {key: device for key, device in offered.items() if _is_device(device) and not _is_tainted(device)}
    free = [device for key, device in healthy.items() if key not in taken]
    connected = {size: _whole_sets(free, size) for size in TORUS_SETS if size > 1}
    return replace(node, devices=len(healthy), free_devices=len(free), connected=connected)


Device = tuple[str, str]
"""Pool and name."""


def slices_by_node(slices: Iterable[Object]) -> dict[str, list[Object]]:
    """The slices of the driver that are in force, by node: those of the newest generation of a pool. A pool that is not
    complete yet is left out, as the scheduler does."""
    pools, by_node = defaultdict[str, list[Object]](list), defaultdict[str, list[Object]](list)
    for one in slices:
        if text(one, "spec", "driver") == DEVICE_DRIVER:
            pools[text(one, "spec", "pool", "name")].append(one)
    for one in chain.from_iterable(map(_in_force, pools.values())):
        by_node[text(one, "spec", "nodeName")].append(one)
    return by_node


def _in_force(slices: list[Object]) -> list[Object]:
    newest = max(whole(dig(one, "spec", "pool", "generation")) for one in slices)
    current = [one for one in slices if whole(dig(one, "spec", "pool", "generation")) == newest]
    return current if len(current) == whole(dig(current[0], "spec", "pool", "resourceSliceCount")) else []


def taken_by(claims: Iterable[Object]) -> Iterator[Device]:
    """The devices of the driver that claims have; one with access for administration takes none away."""
    for claim in claims:
        for result in items(claim, "status", "allocation", "devices", "results"):
            if text(result, "driver") == DEVICE_DRIVER and result.get("adminAccess") is not True:
                yield text(result, "pool"), text(result, "device")


def _is_device(device: Mapping[str, Any]) -> bool:
    """The driver also offers whole nodes of UltraServers."""
    attributes = dig(device, "attributes")  # a name without a domain has the driver's
    kinds = {text(attributes, name, "string") for name in ("resourceType", f"{DEVICE_DRIVER}/resourceType")}
    return kinds <= {"", "neuron_device"}


def _is_tainted(device: Mapping[str, Any]) -> bool:
    return any(taint.get("effect") in _KEEPS for taint in items(device, "taints"))


def _whole_sets(free: Iterable[Mapping[str, Any]], size: int) -> int:
    """How many sets of connected devices are free. Nodes with EFA have the first attribute, others the second."""
    ids = (
        dig(device, "attributes", f"resource.aws.com/devicegroup{size}_id")
        or dig(device, "attributes", f"{DEVICE_DRIVER}/topology{size}_id")
        or dig(device, "attributes", f"topology{size}_id")
        for device in free
    )
    members = Counter(str(one) for one in ids if one)
    return sum(count // size for count in members.values())
