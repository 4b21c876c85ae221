"""Free devices of a node as the scheduler counts them."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_operator.cluster.devices import claimed_devices, node_devices, slices_by_node, taken_by
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


def offered(*numbers: int, generation: int = 1, slices: int = 1, **extra: Any) -> dict[str, Any]:
    """A slice of node n1 with these of its 16 devices, as the Neuron driver describes them."""
    groups = {f"resource.aws.com/devicegroup{size}_id": size for size in (4, 8, 16)}
    devices = [
        {
            "name": f"neurondevice{number}",
            "attributes": {name: {"string": f"{size}-{number // size}"} for name, size in groups.items()},
            **extra,
        }
        for number in numbers
    ]
    pool = {"name": "n1", "generation": generation, "resourceSliceCount": slices}
    return {"spec": {"driver": "neuron.aws.com", "nodeName": "n1", "pool": pool, "devices": devices}}


def claim(*numbers: int, **extra: Any) -> dict[str, Any]:
    results = [
        {"driver": "neuron.aws.com", "pool": "n1", "device": f"neurondevice{number}", **extra} for number in numbers
    ]
    return {"status": {"allocation": {"devices": {"results": results}}}}


def counted(slices: list[dict[str, Any]], *claims: dict[str, Any]) -> NodeDevices | None:
    current = slices_by_node(slices).get("n1")
    return claimed_devices(node_devices(node(devices=0), ()), current, set(taken_by(claims))) if current else None


def test_devices_that_pods_claim_are_counted_with_those_that_are_connected() -> None:
    found = counted([offered(*range(16))], claim(0, 1))
    assert found is not None
    assert (found.devices, found.free_devices, found.connected) == (16, 14, {4: 3, 8: 1, 16: 0})
    assert found.by_claim
    assert found.room(in_cores=False).holds(8)
    assert not found.room(in_cores=False).holds(16)


def test_free_devices_may_have_no_connected_set() -> None:
    found = counted([offered(*range(16))], claim(0), claim(4), claim(8, 12))
    assert found is not None
    assert (found.free_devices, found.connected) == (12, {4: 0, 8: 0, 16: 0})
    assert found.room(in_cores=False).holds(1)
    assert not found.room(in_cores=False).holds(4)


def test_only_a_complete_pool_of_the_newest_generation_counts() -> None:
    first, second = offered(*range(8), slices=2), offered(*range(8, 16), slices=2)
    assert counted([first]) is None
    assert (found := counted([first, second])) is not None
    assert found.devices == 16
    newer = offered(0, 1, generation=2)
    assert (found := counted([first, second, newer])) is not None
    assert found.devices == 2


def test_tainted_devices_and_whole_nodes_are_not_free_and_access_for_administration_takes_none() -> None:
    tainted = offered(1, taints=[{"key": "neuron", "effect": "NoExecute"}])["spec"]["devices"]
    noted = offered(2, taints=[{"key": "neuron", "effect": "None"}])["spec"]["devices"]
    kinds = ("resourceType", "neuron.aws.com/resourceType")  # which mean the same
    whole = [offered(3 + n, attributes={kind: {"string": "neuron_node"}}) for n, kind in enumerate(kinds)]
    one = offered(0)
    one["spec"]["devices"] += [*tainted, *noted, *(device for one in whole for device in one["spec"]["devices"])]
    found = counted([one], claim(0, adminAccess=True), claim(2, driver="other"))
    assert found is not None
    assert (found.devices, found.free_devices) == (2, 2)
