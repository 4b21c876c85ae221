"""A table of instance types with Neuron devices.

`placement` checks device counts against it, and finds the cores of devices by family. Types that are missing here are
accepted: the kubelet and the scheduler decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from neuron_operator.errors import InvalidSpec


@dataclass(frozen=True)
class Family:
    """Devices that run the same compiled models."""

    name: str
    """As compilers know it."""
    physical_cores: int
    """Of one device."""
    logical_core: Literal[1, 2]
    """Physical cores per logical core, unless a node is set up differently."""

    def logical_cores(self, chosen: int | None) -> tuple[int, int]:
        """Physical cores per logical core, and logical cores per device. Raises InvalidSpec for what it does not have.

        chosen: that of the manifest.
        """
        logical_core = chosen or self.logical_core
        if logical_core > self.logical_core:
            message = f"{self.name} has no logical cores of {chosen} physical ones: remove it"
            raise InvalidSpec("spec.accelerator.logicalNeuronCore", message)
        return logical_core, self.physical_cores // logical_core


FAMILIES = {
    family.name: family
    for family in (Family("inf2", 2, 1), Family("trn1", 2, 1), Family("trn2", 8, 2), Family("trn3", 8, 2))
}


def family_of(instance_type: str) -> Family | None:
    """By the first word of the type's name, so that new types of a family are known."""
    found = re.match("|".join(FAMILIES), instance_type)
    return FAMILIES[found[0]] if found else None


@dataclass(frozen=True)
class InstanceType:
    """One node's Neuron devices. Cores are logical cores at the type's default setting."""

    name: str
    devices: int
    topology: Literal["single", "ring", "torus"]

    @property
    def family(self) -> Family:
        found = family_of(self.name)
        assert found is not None
        return found

    @property
    def cores_per_device(self) -> int:
        return self.family.logical_cores(None)[1]

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
        InstanceType("inf2.xlarge", 1, "single"),
        InstanceType("inf2.8xlarge", 1, "single"),
        InstanceType("inf2.24xlarge", 6, "ring"),
        InstanceType("inf2.48xlarge", 12, "ring"),
        InstanceType("trn1.2xlarge", 1, "single"),
        InstanceType("trn1.32xlarge", 16, "torus"),
        InstanceType("trn1n.32xlarge", 16, "torus"),
        InstanceType("trn2.3xlarge", 1, "single"),
        InstanceType("trn2.48xlarge", 16, "torus"),
        InstanceType("trn2u.48xlarge", 16, "torus"),
    )
}
