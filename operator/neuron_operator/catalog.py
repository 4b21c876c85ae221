"""A table of instance types with Neuron devices.

`placement` checks device counts against it. Types that are missing here are accepted: the kubelet and the scheduler
decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class InstanceType:
    """One node's Neuron devices. Cores are logical cores at the type's default setting."""

    name: str
    devices: int
    cores_per_device: int
    topology: Literal["single", "ring", "torus"]

    @property
    def cores(self) -> int:
        return self.devices * self.cores_per_device

    @property
    def plain_devices(self) -> tuple[int, ...]:
        """Device counts that the device plugin grants on its own: one, or all of a node."""
        return tuple(sorted({1, self.devices}))

    @property
    def extension_devices(self) -> tuple[int, ...]:
        """Device counts that are granted with the scheduler extension, which picks adjacent devices."""
        if self.topology == "torus":
            return (1, 4, 8, 16)
        return tuple(range(1, self.devices + 1))

    @property
    def plain_cores(self) -> tuple[int, ...]:
        return tuple(sorted({1, self.cores}))

    @property
    def extension_cores(self) -> tuple[int, ...]:
        """On a ring any number of cores; on a torus those of one device, or of a legal set of devices."""
        if self.topology == "ring":
            return tuple(range(1, self.cores + 1))
        within = range(1, self.cores_per_device + 1)
        return tuple(sorted({*within, *(self.cores_per_device * count for count in self.extension_devices)}))


INSTANCE_TYPES = {
    instance.name: instance
    for instance in (
        InstanceType("inf2.xlarge", 1, 2, "single"),
        InstanceType("inf2.8xlarge", 1, 2, "single"),
        InstanceType("inf2.24xlarge", 6, 2, "ring"),
        InstanceType("inf2.48xlarge", 12, 2, "ring"),
        InstanceType("trn1.2xlarge", 1, 2, "single"),
        InstanceType("trn1.32xlarge", 16, 2, "torus"),
        InstanceType("trn1n.32xlarge", 16, 2, "torus"),
        InstanceType("trn2.3xlarge", 1, 4, "single"),
        InstanceType("trn2.48xlarge", 16, 4, "torus"),
        InstanceType("trn2u.48xlarge", 16, 4, "torus"),
    )
}
