"""What a model says about the nodes of its replicas: each signal, and whom it concerns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.operator_worlds import SETTINGS, SPEC, condition, ended, find, resolved_world, serving_pod
from neuron_operator.decide.course import decide
from neuron_operator.read.world import Object, World

DEVICES = "aws.amazon.com/neuron"

LOST = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting."}
NOT_READY = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "no runtime"}
DETECTED = {"type": "NeuronHealth", "status": "True", "reason": "NeuronHasError_DMA_ERROR", "message": "dma"}
MONITORED = {"type": "AcceleratedHardwareReady", "status": "False", "reason": "NeuronHBMUncorrectableError"}
WELL: list[Object] = [
    {"type": "Ready", "status": "True"},
    {"type": "NeuronHealth", "status": "False", "reason": "NeuronHasNoError"},
    {"type": "AcceleratedHardwareReady", "status": "True", "reason": "NeuronAcceleratedHardwareIsReady"},
]


def node(*conditions: Object, name: str = "n1", healthy: int = 6) -> Object:
    said = {one["type"]: one for one in (*WELL, *conditions)}
    status = {"conditions": list(said.values()), "capacity": {DEVICES: "6"}, "allocatable": {DEVICES: str(healthy)}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


def world_of(*pods: tuple[str, str, dict[str, Any]], nodes: tuple[Object, ...], **spec: Any) -> World:
    """Pods by name and node."""
    world, _ = resolved_world(spec={**SPEC, "replicas": len(pods), **spec})
    made = []
    for name, on, fields in pods:
        pod = serving_pod(find(world.children, "Deployment"), name, **{"ready": True, **fields})
        pod["metadata"]["uid"] = f"uid-{name}"
        made.append({**pod, "spec": {**pod["spec"], "nodeName": on}})
    return replace(world, pods=tuple(made), nodes=nodes)


def named(world: World) -> set[str]:
    """The replicas that the model names because of their nodes."""
    message = condition(decide(world, SETTINGS).status, "Available")["message"]
    return {name for name in "abc" if f"pod {name} is on node " in message}


@pytest.mark.parametrize(
    ("sick", "reason", "said"),
    [
        (node(LOST), "NodeLost", "does not respond: NodeStatusUnknown: Kubelet stopped posting."),
        (node(NOT_READY), "NodeLost", "is not ready: KubeletNotReady: no runtime"),
        (node(DETECTED), "DeviceUnhealthy", "reports NeuronHealth: NeuronHasError_DMA_ERROR: dma"),
        (node(MONITORED), "DeviceUnhealthy", "reports AcceleratedHardwareReady False: NeuronHBMUncorrectableError"),
        (node(healthy=5), "DeviceUnhealthy", "has 5 healthy Neuron devices of 6, and the pod holds 6"),
    ],
)
@pytest.mark.parametrize("metadata", [{}, {"deletionTimestamp": "2026-03-01T12:05:00Z"}], ids=["runs", "ends"])
def test_each_signal_is_shown_with_its_replica_and_node_and_changes_nothing(
    sick: Object, reason: str, said: str, metadata: Object
) -> None:
    text = f"pod a is on node n1, which {said}"
    world = world_of(("a", "n1", {}), ("b", "n2", {}), nodes=(sick, node(name="n2")))
    answering = decide(world, SETTINGS)
    available = condition(answering.status, "Available")
    assert (available["status"], available["message"]) == ("True", f"2 of 2 replicas answer; {text}")
    silent = world_of(("a", "n1", {"ready": False}), ("b", "n2", {}), nodes=(sick, node(name="n2")))
    silent.pods[0]["metadata"].update(metadata)
    decision = decide(silent, SETTINGS)
    ready = condition(decision.status, "Ready")
    assert ready["reason"] == reason
    assert text in ready["message"]
    assert (answering.delete, decision.delete) == ((), ())


@pytest.mark.parametrize(
    "well",
    [
        node(),
        node({"type": "NeuronHealth", "status": "Unknown"}),
        node({"type": "AcceleratedHardwareReady", "status": "Unknown"}),
        node(healthy=0),
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
    ],
    ids=["well", "npd is away", "agent is away", "plugin is away", "new"],
)
def test_a_node_without_a_signal_is_not_named(well: Object) -> None:
    assert named(world_of(("a", "n1", {}), nodes=(well,))) == set()
    assert named(world_of(("a", "n1", {}), nodes=())) == set()


def test_of_several_replicas_on_a_node_the_one_is_named_that_says_that_its_device_failed() -> None:
    failed, loading = {"ready": False, "restarts": 1, "last": ended(32)}, {"ready": False}
    world = world_of(("a", "n1", failed), ("b", "n1", loading), ("c", "n1", {}), nodes=(node(healthy=5),))
    for pod in world.pods:
        (container,) = pod["spec"]["containers"]
        pod["spec"]["containers"] = [{**container, "resources": {"limits": {DEVICES: "1"}}}]
    assert named(world) == {"a"}
    for health, expected in (("Healthy", set()), ("Unhealthy", {"b"})):
        told = [{"name": DEVICES, "resources": [{"resourceID": "neuron3", "health": health}]}]
        world.pods[1]["status"]["containerStatuses"][0]["allocatedResourcesStatus"] = told
        assert named(replace(world, pods=world.pods[1:])) == expected


def test_a_replica_on_a_cpu_ignores_faults_of_devices_but_not_a_lost_node() -> None:
    cpu = {"accelerator": {"type": "CPU"}}
    assert named(world_of(("a", "n1", {}), nodes=(node(DETECTED, healthy=0),), **cpu)) == set()
    assert named(world_of(("a", "n1", {}), nodes=(node(LOST),), **cpu)) == {"a"}
