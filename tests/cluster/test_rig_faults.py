"""Each fault has its effect and can be undone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.faults import kill_containers, kubelet_killed, link_cut, link_slow, packets_lost, power_off, throttled
from cluster.rig.machine import wait_until
from cluster.rig.rig import Rig

if TYPE_CHECKING:
    from cluster.conftest import Pods

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _is_ready(rig: Rig, node: str) -> str:
    conditions = rig.get("node", node)["status"]["conditions"]
    return next(str(c["status"]) for c in conditions if c["type"] == "Ready")


def _wait_until_lost(rig: Rig, node: str) -> None:
    wait_until(f"{node} is lost", lambda: _is_ready(rig, node) == "Unknown", pause_seconds=0.2)


def _restarts(pods: Pods, name: str) -> int:
    return sum(status["restartCount"] for status in pods.get(name)["status"]["containerStatuses"])


def _container(pods: Pods, name: str) -> str:
    return str(pods.get(name)["status"]["containerStatuses"][0]["containerID"])


def test_a_node_without_power_becomes_not_ready_and_restarts_its_pods(rig: Rig, pods: Pods) -> None:
    pods.start("a", node="n2")
    container = _container(pods, "a")
    with power_off(rig, "n2"):
        assert rig.machine("n2").group.processes() == []
        _wait_until_lost(rig, "n2")
        # On a busy machine another node may miss its ten seconds and be lost for a moment.
        wait_until("the other node is ready", lambda: _is_ready(rig, "n1") == "True", pause_seconds=0.2)
        assert _is_ready(rig, "n2") == "Unknown"
    assert _is_ready(rig, "n2") == "True"
    pods.start("b", node="n2")
    wait_until(
        "the earlier pod was restarted or deleted",
        lambda: pods.is_gone("a") or _container(pods, "a") != container,
    )


def test_a_node_without_kubelet_becomes_not_ready_while_containers_run(rig: Rig, pods: Pods) -> None:
    pods.start("a", node="n1")
    pods.start("b", node="n3")
    address = pods.get("a")["status"]["podIP"]
    with kubelet_killed(rig, "n1"):
        _wait_until_lost(rig, "n1")
        assert pods.run("b", "get", f"http://{address}:8080").startswith("a ")
    assert _is_ready(rig, "n1") == "True"


def test_a_cut_link_isolates_a_node_until_it_is_restored(rig: Rig, pods: Pods) -> None:
    pods.start("a", node="n2")
    pods.start("b", node="n3")
    address = pods.get("a")["status"]["podIP"]
    with link_cut(rig, "n2"):
        with pytest.raises(CommandFailed, match=r"no route to host|i/o timeout|deadline exceeded"):
            pods.run("b", "get", f"http://{address}:8080")
        assert rig.machine("n2").is_running("kubelet")
        _wait_until_lost(rig, "n2")
    assert _is_ready(rig, "n2") == "True"
    pods.start("c", node="n2")
    address = pods.get("c")["status"]["podIP"]
    assert pods.run("b", "get", f"http://{address}:8080").startswith("c ")


def test_packets_between_the_pods_of_two_nodes_are_lost_while_both_stay_ready(rig: Rig, pods: Pods) -> None:
    pods.start("a", node="n1")
    pods.start("b", node="n2")
    pods.start("c", node="n3")
    url = f"http://{pods.get('a')['status']['podIP']}:8080"
    with packets_lost(rig, "n1", "n2"):
        with pytest.raises(CommandFailed, match=r"i/o timeout|deadline exceeded"):
            pods.run("b", "get", url)
        assert pods.run("c", "get", url).startswith("a ")
        assert _is_ready(rig, "n1") == _is_ready(rig, "n2") == "True"
    assert pods.run("b", "get", url).startswith("a ")


def test_a_slow_link_delays_each_packet_and_loses_some(rig: Rig, pods: Pods) -> None:
    pods.start("a", node="n1")
    pods.start("b", node="n2")
    url = f"http://{pods.get('a')['status']['podIP']}:8080"
    with link_slow(rig, "n1", "n2", delay_seconds=0.3, loss=0.05) as relay:
        began = time.monotonic()
        while not relay.num_lost:
            assert pods.run("b", "get", url).startswith("a ")
        # Connection, request and answer: two packets each way, one after the other.
        assert time.monotonic() - began >= 1.2
        carried = relay.num_carried
        assert carried > 0
    assert pods.run("b", "get", url).startswith("a ")
    assert relay.num_carried == carried


def test_killed_containers_are_restarted_in_their_pods(rig: Rig, pods: Pods, namespace: str) -> None:
    pods.start("a", node="n1")
    pods.start("b", node="n2")
    uid = pods.get("a")["metadata"]["uid"]
    assert sorted(kill_containers(rig, namespace, "app=probe")) == ["a", "b"]
    for name in ("a", "b"):
        wait_until(f"{name} was restarted", lambda name=name: _restarts(pods, name) == 1)  # type: ignore[misc]
        pods.wait(name, "condition=Ready")
    assert pods.get("a")["metadata"]["uid"] == uid


def test_killing_without_a_running_container_is_an_error(rig: Rig, namespace: str) -> None:
    with pytest.raises(ValueError, match="no container runs"):
        kill_containers(rig, namespace, "app=nothing")


def test_only_the_throttled_user_gets_429(rig: Rig, namespace: str) -> None:
    user = f"system:serviceaccount:{namespace}:default"
    path = f"/api/v1/namespaces/{namespace}/pods"
    binding = ("--clusterrole=view", f"--serviceaccount={namespace}:default")
    rig.kubectl("-n", namespace, "create", "rolebinding", "view", *binding)
    assert rig.ask(path, user).status == 200
    with throttled(rig, user):
        answer = rig.ask(path, user)
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert rig.ask(path, f"{user}-not").status == 403
        assert rig.ask(path).status == 200
    assert rig.ask(path, user).status == 200
