"""Decisions of the Neuron device plugin, without I/O: which sizes are valid and what a container gets.

The rules are those of the AWS plugin (Neuron SDK 2.3x, Inf2): it advertises `aws.amazon.com/neuron` (whole devices)
and `aws.amazon.com/neuroncore` (cores), which the kubelet counts separately. One or all of the node is always valid;
any other number needs the scheduler extension, which this cluster does not have. In the container devices are numbered
from 0 and keep the host's minor numbers. `device_plugin` serves these decisions to a kubelet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.rig.topology import NeuronHardware

DEVICE_RESOURCE = "aws.amazon.com/neuron"
CORE_RESOURCE = "aws.amazon.com/neuroncore"
VISIBLE_CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"

_DEVICE_PREFIX = "neuron"
_CORE_PREFIX = "neuroncore"

# Inf2 has no logical cores of two physical ones.
_LOGICAL_CORE_SIZE = 1


class InvalidSize(Exception):
    """A number of devices or cores that the plugin refuses; the kubelet fails the pod at admission with this text."""


@dataclass(frozen=True)
class DeviceNode:
    """A device in a container: the host's device with that minor number, under another name."""

    minor: int
    container_path: str


@dataclass(frozen=True)
class Allocation:
    devices: tuple[DeviceNode, ...]
    environment: dict[str, str]


def resource_ids(hardware: NeuronHardware, resource: str) -> list[str]:
    """Ids of everything that the plugin advertises under `resource`, in the order of the hardware."""
    if resource == DEVICE_RESOURCE:
        return [f"{_DEVICE_PREFIX}{i}" for i in range(hardware.num_devices)]
    return [f"{_CORE_PREFIX}{i}" for i in range(hardware.num_cores)]


def unhealthy_ids(hardware: NeuronHardware, resource: str, unhealthy_devices: Collection[int]) -> set[str]:
    """Ids under `resource` on an unhealthy device."""
    ids = resource_ids(hardware, resource)
    per_device = len(ids) // hardware.num_devices
    return {name for index, name in enumerate(ids) if index // per_device in unhealthy_devices}


def allocate(hardware: NeuronHardware, resource: str, ids: Sequence[str]) -> Allocation:
    """What a container with `ids` of `resource` gets.

    Raises:
        InvalidSize: neither one nor all of the node.
    """
    known = resource_ids(hardware, resource)
    if len(ids) not in (1, len(known)):
        raise InvalidSize("The requested Neuron resources are invalid without the k8s-neuron-scheduler")
    indices = sorted(known.index(name) for name in ids)
    per_device = len(known) // hardware.num_devices
    minors = sorted({index // per_device for index in indices})
    devices = tuple(DeviceNode(minor, f"/dev/neuron{number}") for number, minor in enumerate(minors))
    environment = {"NEURON_LOGICAL_NC_CONFIG": str(_LOGICAL_CORE_SIZE)}
    if resource == CORE_RESOURCE:
        # Numbered from the container's view: its first device has cores 0 and 1.
        local = [minors.index(index // per_device) * per_device + index % per_device for index in indices]
        environment[VISIBLE_CORES_VARIABLE] = str(local[0]) if len(local) == 1 else f"{local[0]}-{local[-1]}"
    return Allocation(devices, environment)
