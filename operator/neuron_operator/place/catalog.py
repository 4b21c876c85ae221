"""A table of instance types with Neuron devices: what they have, which shares of it a pod may hold, what they cost.

`planner` chooses from it, and `sizing` reads the memory of a core. A type that is missing here is used by its family
and what its node offers; the kubelet and the scheduler decide.

Sources: the architecture pages of the Neuron documentation (devices, cores, memory), the feature guide of NxD Inference
(degrees), Karpenter's table of instance types (CPUs, allocatable host memory, EFA), and the release notes of the Neuron
SDK. Prices are explained at `InstanceType.price`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from neuron_operator.api.engines import ENGINES
from neuron_operator.read.world import EngineSettings, Granting

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Family:
    """Devices that run the same compiled models."""

    name: str
    """As compilers know it."""
    physical_cores: int
    """Physical cores of one device."""
    logical_core: Literal[1, 2]
    """Physical cores per logical core, unless a node is set up differently."""
    core_memory: int
    """Bytes of device memory per physical core."""
    degrees: tuple[int, ...]
    """Tensor-parallel degrees that NxD Inference documents for it."""
    last_sdk: str
    """Newest Neuron SDK whose images have an NxD Inference that runs on it, as in docs/neuron.md."""
    has_claims: bool = True
    """Whether the Neuron DRA driver runs on its nodes."""


FAMILIES = {
    family.name: family
    for family in (
        Family("inf2", 2, 1, 16 * GIB, (1, 2, 4, 8, 12, 24), "2.28", has_claims=False),
        Family("trn1", 2, 1, 16 * GIB, (1, 2, 8, 16, 32), "2.28"),
        Family("trn2", 8, 2, 12 * GIB, (1, 2, 4, 8, 16, 32, 64), "2.31"),
        Family("trn3", 8, 2, 18 * GIB, (1, 2, 4, 8, 16, 32, 64), "2.31"),
    )
}


def wrong_default(family: str, backend: str, engines: Mapping[str, EngineSettings]) -> str:
    """Why the engine cannot be the default for a family of devices, with these images; empty: it can."""
    row = ENGINES.get(backend)
    if family not in FAMILIES:
        return f"is no family of devices; known are {', '.join(FAMILIES)}"
    if row is None:
        return f"{backend} is no engine; known are {', '.join(ENGINES)}"
    if family not in _families_of(backend, engines):
        fit = (name for name in ENGINES if family in _families_of(name, engines))
        return f"{backend} does not run on {family}; {', '.join(fit)} do"
    setting = row.setting or backend
    if not row.is_ours and not engines.get(setting, EngineSettings()).image:
        return f"{backend} has no image: set {setting}.image"
    return ""


def _families_of(backend: str, engines: Mapping[str, EngineSettings]) -> Collection[str]:
    """On devices of which the engine runs, in the version of the installation."""
    row = ENGINES[backend]
    version = engines.get(row.setting or backend, EngineSettings()).version_of(row.versions)
    return (row.devices(version, (), {}).families or FAMILIES) if row.on_device else ()


HYPERPOD = "ml."
"""SageMaker HyperPod labels its nodes with the name of the type after this."""


def family_of(instance_type: str, families: Mapping[str, str] | None = None) -> Family | None:
    """By the first word of the type's name, so that new types of a family are known.

    families: by type, as an administrator names them (the chart value `devices.families`).
    """
    match = re.match("|".join(FAMILIES), instance_type.removeprefix(HYPERPOD))
    return FAMILIES.get((families or {}).get(instance_type) or (match[0] if match else ""))


def type_named(label: str) -> InstanceType | None:
    """The known type that a node has by its label."""
    return INSTANCE_TYPES.get(label.removeprefix(HYPERPOD))


def label_values(types: Iterable[str]) -> list[str]:
    """What nodes of these types may have as label, sorted."""
    return sorted({one for name in types for one in (name, *([f"{HYPERPOD}{name}"] if name in INSTANCE_TYPES else []))})


TORUS_SETS = (1, 4, 8, 16)
"""Numbers of devices that are adjacent on a torus."""


def claimed_sizes(devices: int) -> tuple[int, ...]:
    """How many devices of a node one claim may have: the driver says of such sets which are connected."""
    return tuple(size for size in TORUS_SETS if size <= devices)


@dataclass(frozen=True)
class InstanceType:
    """One node's Neuron devices. Cores are logical cores at the type's default setting."""

    name: str
    devices: int
    topology: Literal["single", "ring", "torus"]
    """How its devices are joined: a pod may hold adjacent ones only."""
    vcpus: int
    host_memory: int
    """Bytes that pods can request: a node keeps some for itself."""
    efa: int
    """Network interfaces for several nodes."""
    price: float
    """US dollars per hour, to compare types with each other, not to budget with. On demand in us-east-1 for inf2 and
    trn1. trn2.3xlarge: seen on demand in ap-southeast-4; trn2.48xlarge: 16 times that, which is also its price in a
    Capacity Block. Nothing public exists for trn2u (taken as a tenth more than trn2.48xlarge, whose devices it has) and
    trn3 (taken by device memory, 1.5 times that of trn2)."""

    @property
    def family(self) -> Family:
        family = family_of(self.name)
        assert family is not None
        return family

    @property
    def cores_per_device(self) -> int:
        return self.family.physical_cores // self.family.logical_core

    @property
    def cores(self) -> int:
        return self.devices * self.cores_per_device

    def sizes(self, granting: Granting, *, in_cores: bool) -> tuple[int, ...]:
        """How many devices (or cores) a pod may hold, ascending. The device plugin alone grants one, or all of a node.
        With the scheduler extension, which picks adjacent devices: on a torus the cores of one device, or whole sets;
        elsewhere any number. By a claim: whole sets, where the driver runs."""
        if granting == "DRA":
            return () if in_cores or not self.family.has_claims else claimed_sizes(self.devices)
        most, each = (self.cores, self.cores_per_device) if in_cores else (self.devices, 1)
        if granting == "Plugin":
            return tuple(sorted({1, most}))
        if self.topology != "torus":
            return tuple(range(1, most + 1))
        return tuple(sorted({*range(1, each + 1), *(each * devices for devices in TORUS_SETS)}))


INSTANCE_TYPES = {
    instance.name: instance
    for instance in (
        InstanceType("inf2.xlarge", 1, "single", 4, 14_162 * MIB, 0, 0.758),
        InstanceType("inf2.8xlarge", 1, "single", 32, 118_312 * MIB, 0, 1.968),
        InstanceType("inf2.24xlarge", 6, "ring", 96, 355_262 * MIB, 0, 6.491),
        InstanceType("inf2.48xlarge", 12, "ring", 192, 718_987 * MIB, 0, 12.981),
        InstanceType("trn1.2xlarge", 1, "single", 8, 29_317 * MIB, 0, 1.344),
        InstanceType("trn1.32xlarge", 16, "torus", 128, 481_894 * MIB, 8, 21.5),
        InstanceType("trn1n.32xlarge", 16, "torus", 128, 481_894 * MIB, 16, 24.78),
        # Memory and CPUs of trn2.3xlarge are not in Karpenter's table: a pod with a limit of 96 GiB was seen on one.
        InstanceType("trn2.3xlarge", 1, "single", 12, 96 * GIB, 0, 2.235),
        InstanceType("trn2.48xlarge", 16, "torus", 192, 1_938_410 * MIB, 16, 35.76),
        InstanceType("trn2u.48xlarge", 16, "torus", 192, 1_938_410 * MIB, 16, 39.34),
        # The name is the driver's; the host is that of a server of the documented UltraServer.
        InstanceType("trn3.48xlarge", 16, "torus", 192, 1_938_410 * MIB, 16, 53.64),
    )
}
