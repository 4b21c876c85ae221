"""Free devices of a node as the scheduler counts them."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_operator.cluster.devices import node_devices
from neuron_operator.read.objects import requested
from neuron_operator.read.world import NodeDevices, Taint

NEURON = "aws.amazon.com/neuron"


def container(devices: int, **extra: Any) -> dict[str, Any]:
    return {"resources": {"requests": {NEURON: str(devices)}}, **extra}


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"spec": {"containers": list(containers), "initContainers": list(init)}}


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("body", "devices"),
    [
        (pod(container(1), container(2)), 3),
        (pod({"resources": {}}, {}), 0),
        (pod({"resources": {"limits": {NEURON: "4"}}}), 4),
        (pod({"resources": {"limits": {NEURON: "1k"}}}), 1000),
        (pod(container(1), init=(container(6), container(2))), 6),
        (pod(container(2), init=(container(1, **SIDECAR),)), 3),
        (pod(container(1), init=(container(2, **SIDECAR), container(3))), 5),
        (pod(container(1), init=(container(3), container(2, **SIDECAR))), 3),
    ],
)
def test_the_requests_of_a_pod_are_counted_as_the_scheduler_counts(body: dict[str, Any], devices: int) -> None:
    assert requested(body, NEURON) == devices


@pytest.mark.parametrize(
    ("resources", "requests", "limits"),
    [({}, 1, 0), ({"requests": {"cpu": "2"}}, 3, 0), ({"requests": {"cpu": "2"}, "limits": {"cpu": "4"}}, 3, 5)],
)
def test_the_overhead_of_a_runtime_class_adds_to_requests_and_to_limits_that_are_set(
    resources: dict[str, Any], requests: int, limits: int
) -> None:
    body = {"spec": {"containers": [{"resources": resources}], "overhead": {"cpu": "1"}}}
    assert (requested(body, "cpu", ("requests",)), requested(body, "cpu", ("limits",))) == (requests, limits)


def node(name: str = "n1", devices: int = 6, **spec: Any) -> dict[str, Any]:
    labels = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
    offered = {NEURON: str(devices)} if devices else {}
    status = {"capacity": offered, "allocatable": offered, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


def test_free_devices_are_allocatable_minus_requested_and_never_negative() -> None:
    labels = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
    expected = NodeDevices("n1", devices=6, free_devices=1, cores=0, free_cores=0, labels=labels)
    assert node_devices(node(), [pod(container(2)), pod(container(3))]) == expected
    assert node_devices(node(), [pod(container(9))]).free_devices == 0


def test_taints_of_a_node_are_kept_unless_a_controller_takes_them_away_again() -> None:
    def tainted(key: str, effect: str) -> NodeDevices:
        return node_devices(node(taints=[{"key": key, "effect": effect}]), [])

    kept = tainted("dedicated", "NoSchedule")
    assert (kept.schedulable, kept.taints) == (True, (Taint("dedicated", "", "NoSchedule"),))
    assert tainted("dedicated", "PreferNoSchedule").taints == ()
    for key in ("node.kubernetes.io/disk-pressure", "karpenter.sh/disrupted"):
        passing = tainted(key, "NoSchedule")
        assert (passing.schedulable, passing.taints) == (False, ())


def test_a_cordoned_or_not_ready_node_is_not_schedulable() -> None:
    assert node_devices(node(), []).schedulable
    assert not node_devices(node(unschedulable=True), []).schedulable
    down = node()
    down["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    assert not node_devices(down, []).schedulable
