"""The test cluster has the nodes, the isolation, the RBAC and the audit log that other tests rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.machine import wait_until
from cluster.rig.neuron_devices import CORE_RESOURCE, DEVICE_RESOURCE
from cluster.rig.rig import Rig

if TYPE_CHECKING:
    from cluster.conftest import Pods

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _allocatable(rig: Rig, node: str, resource: str) -> str | None:
    value: str | None = rig.get("node", node)["status"]["allocatable"].get(resource)
    return value


def test_two_nodes_are_inf2_24xlarge_and_the_third_has_no_devices(rig: Rig) -> None:
    nodes = {node["metadata"]["name"]: node for node in rig.get("nodes")["items"]}
    types = {name: node["metadata"]["labels"]["node.kubernetes.io/instance-type"] for name, node in nodes.items()}
    assert types == {"n1": "inf2.24xlarge", "n2": "inf2.24xlarge", "n3": "m7i.2xlarge"}
    for name in ("n1", "n2"):
        assert (_allocatable(rig, name, DEVICE_RESOURCE), _allocatable(rig, name, CORE_RESOURCE)) == ("6", "12")
    assert _allocatable(rig, "n3", DEVICE_RESOURCE) is None


@pytest.mark.parametrize("address", ["192.0.2.1:80", "1.1.1.1:53", "10.96.200.200:80", "198.18.0.1:22"])
def test_pods_cannot_reach_addresses_outside_the_cluster(rig: Rig, pods: Pods, address: str) -> None:
    pods.start("a", node="n1")
    with pytest.raises(CommandFailed, match=r"no route to host|network is unreachable"):
        pods.run("a", "dial", address)


def test_rbac_limits_a_service_account_and_the_audit_log_records_its_requests(
    rig: Rig, namespace: str, tmp_path: Path
) -> None:
    user = f"system:serviceaccount:{namespace}:reader"
    rig.kubectl("-n", namespace, "create", "serviceaccount", "reader")
    rig.kubectl("-n", namespace, "create", "role", "reader", "--verb=list", "--resource=pods")
    binding = ("--role=reader", f"--serviceaccount={namespace}:reader")
    rig.kubectl("-n", namespace, "create", "rolebinding", "reader", *binding)
    token = rig.kubectl("-n", namespace, "create", "token", "reader").strip()
    # Without the administrator's certificate, which would take precedence over the token.
    config = json.loads(rig.kubeconfig.read_text())
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    file = tmp_path / "reader.kubeconfig"
    file.write_text(json.dumps(config))
    as_reader = ("--kubeconfig", str(file), "-n", namespace, "get")
    rig.kubectl(*as_reader, "pods")
    with pytest.raises(CommandFailed, match="forbidden"):
        rig.kubectl(*as_reader, "secrets")
    expected = {("list", "pods", namespace, 200), ("list", "secrets", namespace, 403)}

    def requests() -> set[tuple[str, str, str, int]]:
        return {(e.verb, e.resource, e.namespace, e.code) for e in rig.audit_events() if e.user == user}

    # A client may get its response before the log is written.
    wait_until("the audit log has both", lambda: requests() >= expected)
