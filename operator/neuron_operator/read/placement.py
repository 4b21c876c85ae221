"""What a replica holds on its nodes, and the nodes that its pod accepts: values, read from revisions and pods.

Made by `place/`, which decides them, and by `views`, which reads them back. It knows no legal sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from neuron_operator.api import names
from neuron_operator.read.objects import dig, items, only
from neuron_operator.read.world import NodeDevices, Object, Taint


@dataclass(frozen=True)
class Placement:
    """What one replica requests on its node; zero devices and cores: it runs on the CPU."""

    devices: int = 0
    cores: int = 0
    instance_type: str = ""
    """Empty: any node that has the devices."""
    nodes: int = 1
    """Each with so many devices or cores."""
    by_claim: bool = False
    """Whether the devices come from a claim (DRA), and not from the device plugin."""

    @property
    def on_devices(self) -> bool:
        return self.size > 0

    @property
    def size(self) -> int:
        """Devices, or cores if it holds those, of each node."""
        return self.cores or self.devices

    @property
    def resources(self) -> dict[str, str]:
        """Extended resources of the runtime container; requests and limits must be equal."""
        if self.by_claim:
            return {}
        counts = {names.DEVICE_RESOURCE: self.devices, names.CORE_RESOURCE: self.cores}
        return {name: str(count) for name, count in counts.items() if count}

    def free_on(self, node: NodeDevices) -> int:
        """Free devices, or cores, of a node."""
        return node.free_cores if self.cores else node.free_devices

    def has_room_on(self, node: NodeDevices, rules: NodeRules) -> bool:
        return self.fits_on(node, rules) and node.room(in_cores=bool(self.cores)).holds(self.size)

    def fits_on(self, node: NodeDevices, rules: NodeRules) -> bool:
        """Whether the node gives devices as the placement gets them, and may be used."""
        return node.schedulable and node.by_claim == self.by_claim and rules.accept(node)

    @property
    def words(self) -> str:
        if self.devices:
            held = counted(self.devices, "Neuron device")
        else:
            held = counted(self.cores, "NeuronCore") if self.cores else "no Neuron device"
        return f"{held} on each of {self.nodes} nodes" if self.nodes > 1 else held


TOLERATES_NEURON: Object = {"key": names.NEURON_TAINT, "operator": "Exists"}
"""What every pod with devices tolerates."""


@dataclass(frozen=True)
class NodeRules:
    """The nodes that a pod accepts: its nodeSelector, its required node affinity, and the taints that it tolerates."""

    selector: Mapping[str, str]
    terms: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Expressions over labels. A node matches all of one term; without terms every node matches."""
    tolerations: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, spec: Any) -> NodeRules:
        """Those of a pod's spec, whatever its fields contain."""
        selector = dig(spec, "nodeSelector")
        terms = items(spec, "affinity", "nodeAffinity", names.REQUIRED_AFFINITY, "nodeSelectorTerms")
        return cls(
            selector=selector if isinstance(selector, Mapping) else {},
            terms=tuple(tuple(items(term, "matchExpressions")) for term in terms),
            tolerations=tuple(items(spec, "tolerations")),
        )

    def accept(self, node: NodeDevices) -> bool:
        return self.accept_labels(node.labels) and self.refused_taint(node) is None

    def accept_labels(self, labels: Mapping[str, str]) -> bool:
        return self.selector.items() <= labels.items() and (
            not self.terms or any(all(_holds(rule, labels) for rule in term) for term in self.terms)
        )

    def refused_taint(self, node: NodeDevices) -> Taint | None:
        """The first taint of a node that they do not tolerate; None: they tolerate all."""
        return next((taint for taint in node.taints if not any(_tolerates(t, taint) for t in self.tolerations)), None)

    def accept_type(self, instance_type: str) -> bool:
        """Whether they accept a new node of a type: what labels it will have that do not follow from its type, is not
        known."""
        labels = labels_of_type(instance_type)
        known = replace(
            self,
            selector=only(self.selector, labels),
            terms=tuple(tuple(rule for rule in term if rule.get("key") in labels) for term in self.terms),
        )
        return known.accept_labels(labels)

    def without(self, rule: Object) -> NodeRules:
        return replace(self, terms=tuple(tuple(other for other in term if other != rule) for term in self.terms))


def labels_of_type(instance_type: str) -> dict[str, str]:
    """The labels of a node that follow from its type: of Karpenter and EKS Auto Mode, one for each part of its name."""
    labels = {names.INSTANCE_TYPE_LABEL: instance_type}
    match = re.fullmatch(r"(([a-z]+)([0-9]+)[-a-z0-9]*)[.]([-a-z0-9]+)", instance_type)
    if match:
        parts = dict(zip(("family", "category", "generation", "size"), match.groups(), strict=True))
        labels |= {f"{group}/instance-{part}": text for group in _NAMING_TYPES for part, text in parts.items()}
    return labels


_NAMING_TYPES = ("karpenter.k8s.aws", "eks.amazonaws.com")


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """As the scheduler does: what a toleration leaves out holds for all."""
    is_exists = toleration.get("operator") == "Exists"
    return (
        toleration.get("effect") in (None, "", taint.effect)
        and (toleration.get("key") == taint.key or (is_exists and not toleration.get("key")))
        and (is_exists or (toleration.get("value") or "") == taint.value)
    )


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
