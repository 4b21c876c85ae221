"""Pods get Neuron devices from a real kubelet with the semantics of the real plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.faults import devices_unhealthy, kubelet_killed
from cluster.rig.machine import wait_until
from cluster.rig.neuron_devices import CORE_RESOURCE, DEVICE_RESOURCE
from cluster.rig.rig import Rig

if TYPE_CHECKING:
    from cluster.conftest import Pods

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _seen_devices(pods: Pods, name: str) -> dict[str, int]:
    """Path in the container -> minor number."""
    lines = [line.split() for line in pods.run(name, "devices", "/dev/neuron*").splitlines()]
    return {line[0]: int(line[1]) for line in lines}


def _held(rig: Rig, node: str, namespace: str) -> dict[str, tuple[str, ...]]:
    return {h.pod: h.ids for h in rig.device_holdings(node) if h.namespace == namespace and h.ids}


def test_pods_with_one_device_each_share_a_node_without_overlap(rig: Rig, pods: Pods, namespace: str) -> None:
    for name in ("a", "b", "c"):
        pods.start(name, node="n1", resources={DEVICE_RESOURCE: 1})
    seen = {name: _seen_devices(pods, name) for name in "abc"}
    assert all(list(devices) == ["/dev/neuron0"] for devices in seen.values()), "renumbered from 0"
    minors = {name: devices["/dev/neuron0"] for name, devices in seen.items()}
    assert len(set(minors.values())) == 3
    assert _held(rig, "n1", namespace) == {name: (f"neuron{minor}",) for name, minor in minors.items()}
    assert pods.run("a", "environment", "NEURON_LOGICAL_NC_CONFIG") == "1"
    with pytest.raises(CommandFailed, match="is not set"):
        pods.run("a", "environment", "NEURON_RT_VISIBLE_CORES")


def test_a_device_file_has_no_driver(rig: Rig, pods: Pods) -> None:
    pods.start("a", resources={DEVICE_RESOURCE: 1})
    assert pods.run("a", "devices", "/dev/neuron0").endswith("no such device or address")


def test_a_pod_can_get_all_devices_of_a_node_in_order(rig: Rig, pods: Pods) -> None:
    pods.start("a", node="n2", resources={DEVICE_RESOURCE: 6})
    assert _seen_devices(pods, "a") == {f"/dev/neuron{i}": i for i in range(6)}


def test_a_core_is_allocated_with_its_device_and_numbered_from_0(rig: Rig, pods: Pods, namespace: str) -> None:
    pods.start("a", node="n2", resources={CORE_RESOURCE: 1})
    (core,) = _held(rig, "n2", namespace)["a"]
    number = int(core.removeprefix("neuroncore"))
    assert _seen_devices(pods, "a") == {"/dev/neuron0": number // 2}
    assert pods.run("a", "environment", "NEURON_RT_VISIBLE_CORES") == str(number % 2)


@pytest.mark.parametrize(("resource", "count"), [(DEVICE_RESOURCE, 2), (DEVICE_RESOURCE, 5), (CORE_RESOURCE, 4)])
def test_sizes_that_need_the_scheduler_extension_fail_at_admission(
    rig: Rig, pods: Pods, resource: str, count: int
) -> None:
    rig.apply(pods.manifest("a", resources={resource: count}))
    pods.wait("a", "jsonpath={.status.phase}=Failed")
    status = pods.get("a")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "The requested Neuron resources are invalid without the k8s-neuron-scheduler" in status["message"]


def test_a_pod_without_free_devices_stays_pending_with_a_reason(rig: Rig, pods: Pods, namespace: str) -> None:
    for name, node in (("a", "n1"), ("b", "n2")):
        pods.start(name, node=node, resources={DEVICE_RESOURCE: 6})
    rig.apply(pods.manifest("c", resources={DEVICE_RESOURCE: 1}))
    pods.wait("c", "condition=PodScheduled=false")
    (condition,) = [c for c in pods.get("c")["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert (condition["reason"], "Insufficient aws.amazon.com/neuron" in condition["message"]) == (
        "Unschedulable",
        True,
    )
    pods.delete("a")
    pods.wait("c", "condition=Ready")


def test_an_unhealthy_device_is_not_allocatable_until_it_recovers(rig: Rig, pods: Pods, namespace: str) -> None:
    def counts() -> tuple[str, str, str]:
        status = rig.get("node", "n1")["status"]
        allocatable, capacity = status["allocatable"], status["capacity"]
        return allocatable[DEVICE_RESOURCE], allocatable[CORE_RESOURCE], capacity[DEVICE_RESOURCE]

    pods.start("holder", node="n1", resources={DEVICE_RESOURCE: 1})
    (held,) = _held(rig, "n1", namespace)["holder"]
    with devices_unhealthy(rig, "n1", [int(held.removeprefix("neuron")), *_others(held)]):
        assert counts() == ("4", "8", "6")
        pods.run("holder", "devices", "/dev/neuron0")  # it still runs
    assert counts() == ("6", "12", "6")


def _others(held: str) -> list[int]:
    return [next(i for i in range(6) if f"neuron{i}" != held)]


def test_a_restarted_kubelet_gets_the_devices_and_keeps_allocations(rig: Rig, pods: Pods, namespace: str) -> None:
    pods.start("a", node="n1", resources={DEVICE_RESOURCE: 1})
    before = _held(rig, "n1", namespace)
    with kubelet_killed(rig, "n1"):
        pass
    wait_until("the new kubelet knows all allocations", lambda: _held(rig, "n1", namespace) == before)
    pods.start("b", node="n1", resources={DEVICE_RESOURCE: 1})
    after = _held(rig, "n1", namespace)
    assert after["a"] == before["a"]
    assert set(after["b"]).isdisjoint(after["a"])
