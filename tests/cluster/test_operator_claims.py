"""Devices that pods claim (DRA): the operator with Kubernetes' own scheduler and controllers, and slices as the Neuron
driver writes them. Nodes exist in the API server only; their kubelets are played.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.rig.binaries import ensure
from cluster.rig.claims import device_class, slice_of
from cluster.rig.machine import wait_until
from helpers.apiserver import ApiServer
from helpers.controllers import Status, controlling, finished_or_ready, kubelet
from helpers.operator_rights import CLAIM_RULES, grant
from helpers.operators import OPERATOR_USER, Namespace, client_of, eventually, operating, run_settings
from neuron_operator.api import names
from neuron_operator.cluster.client import CLAIM_TEMPLATES, NEURON_MODELS, PODS, RESOURCE_CLAIMS
from neuron_operator.cluster.on_demand import FREE_DEVICES_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CLAIMS = "/apis/resource.k8s.io/v1"
ROOM = {"cpu": "128", "memory": "400Gi", "pods": "100"}
TYPE = "trn1.32xlarge"


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    """Nodes `claims`, whose 16 devices a driver offers, and `plugin`, with those of the device plugin."""
    with controlling(server):
        grant(server, CLAIM_RULES)
        scheduler = ensure("hyper")["hyper"] / "kube-scheduler"
        arguments = (f"--kubeconfig={server.kubeconfig('admin')}", "--leader-elect=false", "--secure-port=0")
        quiet = subprocess.DEVNULL
        add_node(server, "claims", {})
        add_node(server, "plugin", {names.DEVICE_RESOURCE: "16"})
        offered = slice_of("claims", 16, TYPE)
        server.apply(f"{CLAIMS}/resourceslices/{offered['metadata']['name']}", offered)
        server.apply(f"{CLAIMS}/deviceclasses/{names.DEVICE_DRIVER}", device_class())
        with subprocess.Popen([scheduler, *arguments], stdout=quiet, stderr=quiet) as process:
            yield server
            process.kill()


def add_node(server: ApiServer, name: str, devices: dict[str, str]) -> None:
    labels = {"pool": name, names.HOSTNAME_LABEL: name, "kubernetes.io/arch": "amd64", names.INSTANCE_TYPE_LABEL: TYPE}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    server.apply(f"/api/v1/nodes/{name}", node)
    ready = [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}]
    status = {"conditions": ready, "capacity": {**ROOM, **devices}, "allocatable": {**ROOM, **devices}}
    server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, "application/merge-patch+json")
    server.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, "application/merge-patch+json")


def on_its_node(pod: Any) -> Status:
    """A replica is ready once it has a node; Jobs need none."""
    is_replica = pod["metadata"]["labels"][names.ROLE_LABEL] in names.SERVING_ROLES
    return finished_or_ready(pod) if pod["spec"].get("nodeName") or not is_replica else {}


@pytest.fixture
def namespace(server: ApiServer) -> Iterator[Namespace]:
    namespace = Namespace(server)
    yield namespace
    for model in namespace.list(NEURON_MODELS):
        namespace.delete(NEURON_MODELS, model["metadata"]["name"])
    for pod in namespace.list(PODS):
        with contextlib.suppress(urllib.error.HTTPError):  # a controller was faster
            server.call("DELETE", f"{PODS.path(namespace.name, pod['metadata']['name'])}?gracePeriodSeconds=0")
    wait_until("the devices are free", lambda: not namespace.list(RESOURCE_CLAIMS))


def put(namespace: Namespace, name: str, devices: int, **changes: Any) -> None:
    namespace.put_model(
        name,
        replicas=1,
        accelerator={"devices": devices},
        engine={"backend": "nxdi"},
        storage={"artifacts": {"objectStore": {"uri": "s3://bucket/artifacts"}}},
        **changes,
    )


def replicas(namespace: Namespace, model: str) -> list[Any]:
    pods = (pod for pod in namespace.list(PODS) if pod["metadata"]["labels"].get(names.MODEL_LABEL) == model)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def message(namespace: Namespace, model: str, kind: str = "Available") -> str:
    conditions = namespace.model(model).get("status", {}).get("conditions", ())
    return next((f"{one['reason']}: {one['message']}" for one in conditions if one["type"] == kind), "")


async def until_ready(namespace: Namespace, model: str) -> None:
    await eventually(
        lambda: namespace.condition("Ready", model)[0] == "True", about=lambda: namespace.model(model).get("status")
    )


def devices_of(namespace: Namespace, pod: Any) -> list[int]:
    """Numbers of the devices that the scheduler gave the claim of a pod."""
    (claimed,) = pod["status"]["resourceClaimStatuses"]
    claim = namespace.get(RESOURCE_CLAIMS, claimed["resourceClaimName"])
    results = claim["status"]["allocation"]["devices"]["results"]
    return sorted(int(one["device"].removeprefix("neurondevice")) for one in results)


async def test_both_ways_to_give_devices_serve_in_one_cluster(server: ApiServer, namespace: Namespace) -> None:
    settings = run_settings("--device-mode", "Auto")
    async with client_of(server) as client, operating(client, settings), kubelet(namespace, on_its_node):
        put(namespace, "claimed", 4)
        put(namespace, "granted", 16, podTemplate={"spec": {"nodeSelector": {"pool": "plugin"}}})
        await until_ready(namespace, "claimed")
        await until_ready(namespace, "granted")
        (claimed,), (granted,) = replicas(namespace, "claimed"), replicas(namespace, "granted")
    assert (claimed["spec"]["nodeName"], granted["spec"]["nodeName"]) == ("claims", "plugin")
    held = devices_of(namespace, claimed)
    assert len(held) == 4
    assert len({number // 4 for number in held}) == 1, held
    assert "resourceClaims" not in granted["spec"]
    assert granted["spec"]["containers"][0]["resources"]["limits"][names.DEVICE_RESOURCE] == "16"


async def test_free_devices_that_are_not_connected_are_named(server: ApiServer, namespace: Namespace) -> None:
    taken = [0, 4, 8, 12]
    for number in taken:
        hold(namespace, number)
    settings = run_settings("--device-mode", "DRA")
    async with client_of(server) as client, operating(client, settings), kubelet(namespace, on_its_node):
        put(namespace, "chat", 4)
        said = await eventually(
            lambda: "InsufficientNeuron" in message(namespace, "chat") and "no 4" in message(namespace, "chat"),
            about=lambda: namespace.model("chat").get("status"),
        )
        assert said
        text = message(namespace, "chat")
        assert "needs 4 Neuron devices on one node; free: 12 (claims 12), no 4 connected" in text, text
        release(namespace, taken[0])
        await until_ready(namespace, "chat")
    for number in taken[1:]:
        release(namespace, number)


def hold(namespace: Namespace, number: int) -> None:
    """A pod of somebody else with this device."""
    selector = f"device.attributes['{names.DEVICE_DRIVER}'].deviceId == {number}"
    exactly = {"deviceClassName": names.DEVICE_DRIVER, "selectors": [{"cel": {"expression": selector}}]}
    spec = {"devices": {"requests": [{"name": "one", "exactly": exactly}]}}
    about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": f"held-{number}"}}
    namespace.server.call("POST", RESOURCE_CLAIMS.path(namespace.name), {**about, "spec": spec})
    container = {"name": "c", "image": "i", "resources": {"claims": [{"name": "one"}]}}
    claims = [{"name": "one", "resourceClaimName": f"held-{number}"}]
    role = {names.ROLE_LABEL: names.ROLE_LEADER}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"holder-{number}", "labels": role},
        "spec": {"containers": [container], "resourceClaims": claims},
    }
    namespace.server.call("POST", PODS.path(namespace.name), pod)


def release(namespace: Namespace, number: int) -> None:
    path = f"{PODS.path(namespace.name, f'holder-{number}')}?gracePeriodSeconds=0"
    namespace.server.call("DELETE", path)
    namespace.delete(RESOURCE_CLAIMS, f"held-{number}")


async def test_a_rollout_without_spare_devices_replaces_the_replica_and_its_claim(
    server: ApiServer, namespace: Namespace
) -> None:
    settings = run_settings("--device-mode", "DRA")
    async with client_of(server) as client, operating(client, settings), kubelet(namespace, on_its_node):
        put(namespace, "chat", 16)
        await until_ready(namespace, "chat")
        (before,) = replicas(namespace, "chat")
        (template,) = namespace.list(CLAIM_TEMPLATES)
        await asyncio.sleep(FREE_DEVICES_SECONDS)  # what was free before is forgotten
        put(namespace, "chat", 16, serving={"maxSequences": 2})
        await eventually(lambda: ends(namespace, before))
        await eventually(
            lambda: [pod for pod in replicas(namespace, "chat") if pod["metadata"]["uid"] != before["metadata"]["uid"]]
        )
        await until_ready(namespace, "chat")
        (after,) = replicas(namespace, "chat")
        assert len(devices_of(namespace, after)) == 16
        # What the claim says is the same, so is its template.
        assert [one["metadata"]["uid"] for one in namespace.list(CLAIM_TEMPLATES)] == [template["metadata"]["uid"]]
        put(namespace, "chat", 8, serving={"maxSequences": 2})
        await eventually(lambda: ends(namespace, after))
        await until_ready(namespace, "chat")
        (last,) = replicas(namespace, "chat")
        assert len(devices_of(namespace, last)) == 8


def ends(namespace: Namespace, pod: Any) -> bool:
    """Plays the kubelet: a pod that is being deleted is gone at once. False while nobody deletes it."""
    path = PODS.path(namespace.name, pod["metadata"]["name"])
    try:
        if "deletionTimestamp" not in namespace.server.call("GET", path)["metadata"]:
            return False
        namespace.server.call("DELETE", f"{path}?gracePeriodSeconds=0")
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    return True


def test_the_operator_reads_claims_with_the_mode_only(server: ApiServer) -> None:
    read = {event["objectRef"]["resource"] for event in server.requests(OPERATOR_USER)}
    assert {"resourceslices", "resourceclaims", "resourceclaimtemplates"} <= read
