"""Placement: the devices of one replica and the nodes it may run on, or Unplaceable with the numbers.

Called when a revision is pinned (`place`) and by `why` to describe free devices (`describe_free`). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuron_operator import names
from neuron_operator.catalog import INSTANCE_TYPES, InstanceType
from neuron_operator.errors import Unplaceable
from neuron_operator.model import NeuronModel
from neuron_operator.reasons import Reason
from neuron_operator.world import FreeDevices, Settings


@dataclass(frozen=True)
class Placement:
    """What one replica requests on its node; zero devices and cores: it runs on the CPU."""

    devices: int = 0
    cores: int = 0
    instance_type: str = ""
    """Empty: any node that has the devices."""

    @property
    def resources(self) -> dict[str, str]:
        """Extended resources of the runtime container; requests and limits must be equal."""
        counts = {names.DEVICE_RESOURCE: self.devices, names.CORE_RESOURCE: self.cores}
        return {name: str(count) for name, count in counts.items() if count}

    @property
    def words(self) -> str:
        if self.devices:
            return _count(self.devices, "Neuron device")
        return _count(self.cores, "NeuronCore") if self.cores else "no Neuron device"


def place(model: NeuronModel, settings: Settings) -> Placement:
    """The devices or cores of the manifest, or one device. Raises Unplaceable for a size that no node grants."""
    accelerator = model.spec.accelerator
    instance_type = model.spec.pod_template.spec.node_selector.get(names.INSTANCE_TYPE_LABEL, "")
    if accelerator.type == "CPU":
        return Placement(instance_type=instance_type)
    legal = "extension" if settings.device_mode == "PluginWithExtension" else "plain"
    if accelerator.cores is not None:
        _check("accelerator.cores", accelerator.cores, instance_type, f"{legal}_cores")
        return Placement(cores=accelerator.cores, instance_type=instance_type)
    devices = accelerator.devices or 1
    _check("accelerator.devices", devices, instance_type, f"{legal}_devices")
    return Placement(devices=devices, instance_type=instance_type)


def describe_free(free: FreeDevices | None, placement: Placement) -> str:
    """A clause for a condition: the number of free devices in total and per node, or that it is unknown."""
    if free is None or free.nodes is None:
        return "free: unknown (the operator may not list nodes and pods)"
    usable = [node for node in free.nodes if node.schedulable]
    if not usable:
        return "free: 0 (no ready node offers any)"
    by_node = {node.name: node.free_cores if placement.cores else node.free_devices for node in usable}
    shown = sorted(by_node.items(), key=lambda item: (-item[1], item[0]))[:8]
    more = ", ..." if len(by_node) > len(shown) else ""
    return f"free: {sum(by_node.values())} ({', '.join(f'{name} {count}' for name, count in shown)}{more})"


def _candidates(instance_type: str) -> tuple[InstanceType, ...]:
    """Instance types to check a size against: the given one if known, all if none is given."""
    if not instance_type:
        return tuple(INSTANCE_TYPES.values())
    known = INSTANCE_TYPES.get(instance_type)
    return (known,) if known else ()


def _check(field: str, count: int, instance_type: str, legal: str) -> None:
    """Raises Unplaceable unless the property `legal` of some candidate InstanceType contains the size."""
    tables: list[tuple[int, ...]] = [getattr(candidate, legal) for candidate in _candidates(instance_type)]
    if not tables or any(count in table for table in tables):
        return
    sizes = sorted({size for table in tables for size in table})
    where = instance_type or "any known instance type"
    hint = "; other sizes need the scheduler extension (chart value devices.mode)" if legal.startswith("plain") else ""
    raise Unplaceable(
        Reason.TOPOLOGY_IMPOSSIBLE,
        f"spec.{field}: {count} is not a size that {where} grants to one pod; choose one of {_ranges(sizes)}{hint}",
    )


def _ranges(numbers: list[int]) -> str:
    """`1, 6, 12` or `1-12, 16`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
