"""What a replica holds on its nodes, and the nodes that its pod accepts: values, read from revisions and pods.

Made by `place/`, which decides them, and by `views`, which reads them back. It knows no legal sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from neuron_operator.api import names
from neuron_operator.read.objects import items
from neuron_operator.read.world import NodeDevices, Object


@dataclass(frozen=True)
class Placement:
    """What one replica requests on its node; zero devices and cores: it runs on the CPU."""

    devices: int = 0
    cores: int = 0
    instance_type: str = ""
    """Empty: any node that has the devices."""
    nodes: int = 1
    """Each with so many devices or cores."""

    @property
    def resources(self) -> dict[str, str]:
        """Extended resources of the runtime container; requests and limits must be equal."""
        counts = {names.DEVICE_RESOURCE: self.devices, names.CORE_RESOURCE: self.cores}
        return {name: str(count) for name, count in counts.items() if count}

    @property
    def words(self) -> str:
        if self.devices:
            held = counted(self.devices, "Neuron device")
        else:
            held = counted(self.cores, "NeuronCore") if self.cores else "no Neuron device"
        return f"{held} on each of {self.nodes} nodes" if self.nodes > 1 else held


@dataclass(frozen=True)
class NodeRules:
    """The nodes that a pod accepts: its nodeSelector, and its required node affinity."""

    selector: Mapping[str, str]
    terms: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Expressions over labels. A node matches all of one term; without terms every node matches."""

    @classmethod
    def of(cls, selector: Any, affinity: Any) -> NodeRules:
        """Those of a pod's spec, whatever these fields contain."""
        terms = items(affinity, "nodeAffinity", names.REQUIRED_AFFINITY, "nodeSelectorTerms")
        return cls(
            selector=selector if isinstance(selector, Mapping) else {},
            terms=tuple(tuple(items(term, "matchExpressions")) for term in terms),
        )

    def accept(self, node: NodeDevices) -> bool:
        return self.selector.items() <= node.labels.items() and (
            not self.terms or any(all(_holds(rule, node.labels) for rule in term) for term in self.terms)
        )

    def accept_type(self, instance_type: str) -> bool:
        """Whether they accept a new node of a type: what other labels it will have is not known."""
        labels = {names.INSTANCE_TYPE_LABEL: instance_type}
        return self.selector.get(names.INSTANCE_TYPE_LABEL, instance_type) == instance_type and (
            not self.terms
            or any(
                all(_holds(rule, labels) for rule in term if rule.get("key") == names.INSTANCE_TYPE_LABEL)
                for term in self.terms
            )
        )

    def without(self, rule: Object) -> NodeRules:
        return replace(self, terms=tuple(tuple(other for other in term if other != rule) for term in self.terms))


def _holds(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """One expression of a node affinity. `Gt` and `Lt` are left to the scheduler."""
    value, values = labels.get(rule.get("key", "")), rule.get("values") or ()
    match rule.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return True


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
