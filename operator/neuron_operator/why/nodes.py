"""What is wrong with a replica's node: the signals of its kubelet, its device plugin and the agents of others.

Called by `why`, by `groups` for members that leave, and by the reflector to wake the models on such a node. Pure. It
only reports: Kubernetes moves the pods of a lost node, and people drain one whose devices fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from neuron_operator.api import names
from neuron_operator.api.reasons import Reason
from neuron_operator.read.views import ConditionView, NodeView, Observed, PodView

NEURON_HEALTH = "NeuronHealth"
"""The condition that the Neuron node problem detector sets; True means a fault, as in all conditions of a detector."""
HARDWARE_READY = "AcceleratedHardwareReady"
"""The condition that EKS' node monitoring agent sets; False means a fault."""
READY = "Ready"
HEALTHY = {READY: "True", NEURON_HEALTH: "False", HARDWARE_READY: "True"}
"""The status of each condition on a node that is well."""


@dataclass(frozen=True)
class Signal:
    """What is wrong with a replica's node."""

    reason: Literal[Reason.NODE_LOST, Reason.DEVICE_UNHEALTHY]
    said: str
    """For a message, after the node's name."""


def signal_of(pod: PodView, observed: Observed) -> Signal | None:
    """What is wrong with the pod's node; None if nothing is, or if it concerns others only."""
    node = observed.nodes.get(pod.node)
    if node is None:
        return None
    lost = _lost(node)
    if lost is not None or not (pod.requests or pod.claims_devices):
        return lost
    return next(_faults(pod, node), None)


def has_failed(node: NodeView) -> bool:
    """Whether the node has a fault that concerns some of its replicas."""
    short = any(node.allocatable.get(name, 0) < number for name, number in node.capacity.items())
    return _lost(node) is not None or short or any(_reported(node))


def _lost(node: NodeView) -> Signal | None:
    ready = node.conditions.get(READY)
    if ready is None or ready.status == "True":
        return None
    verb = "does not respond" if ready.status == "Unknown" else "is not ready"
    return Signal(Reason.NODE_LOST, f"{verb}: {_quoted(ready)}")


def _faults(pod: PodView, node: NodeView) -> Iterator[Signal]:
    yield from _reported(node)
    for name, held in pod.requests.items():
        capacity, healthy = node.capacity.get(name, 0), node.allocatable.get(name, 0)
        word = "NeuronCores" if name == names.CORE_RESOURCE else "Neuron devices"
        said = f"has {healthy} healthy {word} of {capacity}, and the pod holds {held}"
        if pod.has_unhealthy_device or (healthy < capacity and _holds_unhealthy(pod, held, healthy)):
            yield Signal(Reason.DEVICE_UNHEALTHY, said)


def _holds_unhealthy(pod: PodView, held: int, healthy: int) -> bool:
    """Whether one of the pod's devices must be among the unhealthy ones. Which one a pod holds is not in the API. While
    the plugin restarts, no device counts as healthy: then, and if others could hold it, only the pod's own failure
    tells."""
    ended = pod.container.ended
    has_failed = ended is not None and Reason.of_exit_code(ended.exit_code) is Reason.DEVICE_FAILED
    return has_failed or 0 < healthy < held


def _reported(node: NodeView) -> Iterator[Signal]:
    for name, fault in ((NEURON_HEALTH, "True"), (HARDWARE_READY, "False")):
        condition = node.conditions.get(name)
        if condition is not None and condition.status == fault:
            said = name if fault == "True" else f"{name} False"
            yield Signal(Reason.DEVICE_UNHEALTHY, f"reports {said}: {_quoted(condition)}")


def _quoted(condition: ConditionView) -> str:
    return ": ".join(filter(None, (condition.reason, condition.message))) or condition.status
