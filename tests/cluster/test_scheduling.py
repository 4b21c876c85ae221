"""Where the real kube-scheduler puts replicas: rendered pods on Nodes that exist in the API server only."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.rig.binaries import ensure
from cluster.rig.machine import wait_until
from helpers.apiserver import ApiServer
from helpers.manifests import spec_with
from helpers.operator_rights import ensure_namespace
from helpers.operator_worlds import SETTINGS, find, resolved_world

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOM = {"cpu": "64", "memory": "512Gi", "pods": "100"}
HAS_IMAGE = [{"names": [SETTINGS.runtime_image], "sizeBytes": 8 * 10**9}]
"""The scheduler prefers a node that has the image."""


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    scheduler = ensure("hyper")["hyper"] / "kube-scheduler"
    arguments = (f"--kubeconfig={server.kubeconfig('admin')}", "--leader-elect=false", "--secure-port=0")
    quiet = subprocess.DEVNULL
    with subprocess.Popen([scheduler, *arguments], stdout=quiet, stderr=quiet) as process:
        yield server
        process.kill()


def add_node(server: ApiServer, pool: str, name: str, zone: str, images: list[dict[str, Any]]) -> None:
    labels = {"pool": pool, "kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64"}
    labels |= {"topology.kubernetes.io/zone": zone} if zone else {}
    server.apply(
        f"/api/v1/nodes/{name}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    )
    ready = [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}]
    status = {"conditions": ready, "capacity": ROOM, "allocatable": ROOM, "images": images}
    server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, "application/merge-patch+json")
    server.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, "application/merge-patch+json")


@pytest.mark.parametrize("zones", [("", "", ""), ("a", "a", "b")], ids=["without zones", "two zones"])
def test_replicas_start_on_different_nodes_and_in_different_zones(server: ApiServer, zones: tuple[str, ...]) -> None:
    pool = "-".join(("pool", *zones)).rstrip("-")
    for number, zone in enumerate(zones):
        add_node(server, pool, f"{pool}-{number}", zone, HAS_IMAGE if number == 0 else [])
    overlay = {"podTemplate": {"spec": {"nodeSelector": {"pool": pool}}}}
    _, decision = resolved_world(spec=spec_with({"accelerator": {"type": "CPU"}, **overlay}))
    template = find(decision.desired, "Deployment")["spec"]["template"]
    ensure_namespace(server, pool)
    nodes = []
    for number in range(2):
        pod = copy.deepcopy({"apiVersion": "v1", "kind": "Pod", **template})
        pod["metadata"]["name"] = f"replica-{number}"
        path = f"/api/v1/namespaces/{pool}/pods"
        server.call("POST", path, pod)
        wait_until(
            "the pod has a node", lambda at=f"{path}/replica-{number}": server.call("GET", at)["spec"].get("nodeName")
        )
        nodes.append(server.call("GET", f"{path}/replica-{number}")["spec"]["nodeName"])
    assert len(set(nodes)) == 2, nodes
    chosen = {zones[int(node[-1])] for node in nodes}
    assert len(chosen) == len(set(zones)), nodes
