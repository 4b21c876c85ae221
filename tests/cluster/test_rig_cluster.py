"""The cluster is what it says: a real Kubernetes on three nodes that reach each other and nothing else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.machine import wait_until
from cluster.rig.neuron_devices import CORE_RESOURCE, DEVICE_RESOURCE
from cluster.rig.rig import Rig

if TYPE_CHECKING:
    from cluster.conftest import Pods

pytestmark = pytest.mark.cluster


def _service(namespace: str, name: str, **spec: Any) -> dict[str, Any]:
    ports = [{"port": 80, "targetPort": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": "probe"}, "ports": ports, **spec},
    }


def _processes(rig: Rig) -> list[int]:
    """Process numbers of every program that `up` starts, without what those start and end by themselves."""
    everything = [(program.command, machine.program_group(program.name)) for machine, program in rig.everything()]
    return [process.pid for command, group in everything for process in group.processes() if process.command == command]


def _allocatable(rig: Rig, node: str, resource: str) -> str | None:
    value: str | None = rig.get("node", node)["status"]["allocatable"].get(resource)
    return value


def test_two_nodes_play_inf2_24xlarge_and_the_third_has_no_devices(rig: Rig) -> None:
    nodes = {node["metadata"]["name"]: node for node in rig.get("nodes")["items"]}
    types = {name: node["metadata"]["labels"]["node.kubernetes.io/instance-type"] for name, node in nodes.items()}
    assert types == {"n1": "inf2.24xlarge", "n2": "inf2.24xlarge", "n3": "m7i.2xlarge"}
    for name in ("n1", "n2"):
        assert (_allocatable(rig, name, DEVICE_RESOURCE), _allocatable(rig, name, CORE_RESOURCE)) == ("6", "12")
    assert _allocatable(rig, "n3", DEVICE_RESOURCE) is None


def test_pods_of_different_nodes_reach_each_other_with_their_own_addresses(rig: Rig, pods: Pods) -> None:
    pods.start("a", node="n1")
    pods.start("b", node="n3")
    address = pods.get("b")["status"]["podIP"]
    assert pods.run("a", "get", f"http://{address}:8080").split() == ["b", pods.get("a")["status"]["podIP"]]


def test_a_service_is_found_by_name_and_spreads_over_nodes(rig: Rig, pods: Pods, namespace: str) -> None:
    rig.apply(_service(namespace, "web"), _service(namespace, "each", clusterIP="None"))
    pods.start("a", node="n1")
    pods.start("b", node="n2")
    answered = set()

    def both_answered() -> bool:
        # Its name, and that it has pods, are known on a node a moment after the API server knows.
        with contextlib.suppress(CommandFailed):
            answered.add(pods.run("a", "get", "http://web").split()[0])
        return answered == {"a", "b"}

    wait_until("both pods have answered", both_answered)
    for name in (f"web.{namespace}", f"web.{namespace}.svc.cluster.local"):
        assert pods.run("a", "get", f"http://{name}").split()[0] in {"a", "b"}
    addresses = sorted(pods.get(name)["status"]["podIP"] for name in "ab")

    def found() -> list[str]:
        with contextlib.suppress(CommandFailed):
            return pods.run("a", "lookup", "each").split()
        return []

    wait_until("the name has the addresses of both", lambda: found() == addresses)


@pytest.mark.parametrize("address", ["192.0.2.1:80", "1.1.1.1:53", "10.96.200.200:80", "198.18.0.1:22"])
def test_nothing_of_the_cluster_reaches_beyond_it(rig: Rig, pods: Pods, address: str) -> None:
    pods.start("a", node="n1")
    with pytest.raises(CommandFailed, match=r"no route to host|network is unreachable"):
        pods.run("a", "dial", address)


def test_an_unknown_name_is_refused(rig: Rig, pods: Pods) -> None:
    pods.start("a")
    with pytest.raises(CommandFailed, match=r"no such host|server misbehaving"):
        pods.run("a", "lookup", "registry.example.com.")


def test_a_service_account_may_do_what_its_role_says_and_the_audit_log_tells_both(
    rig: Rig, namespace: str, tmp_path: Path
) -> None:
    user = f"system:serviceaccount:{namespace}:reader"
    rig.kubectl("-n", namespace, "create", "serviceaccount", "reader")
    rig.kubectl("-n", namespace, "create", "role", "reader", "--verb=list", "--resource=pods")
    binding = ("--role=reader", f"--serviceaccount={namespace}:reader")
    rig.kubectl("-n", namespace, "create", "rolebinding", "reader", *binding)
    token = rig.kubectl("-n", namespace, "create", "token", "reader").strip()
    # A configuration without the administrator's certificate, which would win over the token.
    config = json.loads(rig.kubeconfig.read_text())
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    file = tmp_path / "reader.kubeconfig"
    file.write_text(json.dumps(config))
    as_reader = ("--kubeconfig", str(file), "-n", namespace, "get")
    rig.kubectl(*as_reader, "pods")
    with pytest.raises(CommandFailed, match="forbidden"):
        rig.kubectl(*as_reader, "secrets")
    told = {("list", "pods", namespace, 200), ("list", "secrets", namespace, 403)}

    def asked() -> set[tuple[str, str, str, int]]:
        return {(e.verb, e.resource, e.namespace, e.code) for e in rig.audit_events() if e.user == user}

    # An answer may reach who asked before the log is written.
    wait_until("the audit log tells both", lambda: asked() >= told)


def test_the_cluster_s_own_programs_are_not_in_the_audit_log(rig: Rig) -> None:
    users = {event.user for event in rig.audit_events()}
    assert not [user for user in users if user.startswith(("system:node:", "system:kube-", "system:apiserver"))]
    assert "admin" in users


def test_helm_talks_to_it(rig: Rig, namespace: str) -> None:
    assert rig.helm("list", "--namespace", namespace, "--output", "json").strip() == "[]"


def test_up_again_changes_nothing(rig: Rig, pods: Pods) -> None:
    pods.start("a")
    before = _processes(rig)
    assert len(before) == len(list(rig.everything()))
    rig.up(say=lambda line: None)
    assert _processes(rig) == before
