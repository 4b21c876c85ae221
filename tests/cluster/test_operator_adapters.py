"""Adapters on a real API server: an adapter is read by a Job, listed for its model, and asked for in the replicas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.rig.machine import wait_until
from helpers.apiserver import ApiServer, service_account
from helpers.controllers import replica
from helpers.operator_worlds import ADAPTER_FACTS
from helpers.operators import (
    BY_KIND,
    Namespace,
    client_of,
    eventually,
    operating,
    run_settings,
)
from neuron_operator.api import names
from neuron_operator.cluster.client import NEURON_ADAPTERS, NEURON_MODELS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DIGEST = ADAPTER_FACTS["digest"]
CONFIG_MAPS = BY_KIND["ConfigMap"]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ROLES = Path(__file__).parents[2] / "charts" / "neuron-serving" / "templates" / "userroles.yaml"


@pytest.fixture
def namespace(server: ApiServer) -> Namespace:
    return Namespace(server)


def reason(namespace: Namespace, name: str = "support-de") -> tuple[str, str]:
    """Of its Ready: `1/2` and the reason."""
    status = namespace.get(NEURON_ADAPTERS, name).get("status", {})
    found = next((one["reason"] for one in status.get("conditions", ()) if one["type"] == "Ready"), "")
    return status.get("ready", ""), found


def listed(namespace: Namespace) -> list[Any] | None:
    """None: there is no list."""
    found = [one for one in namespace.list(CONFIG_MAPS) if one["metadata"]["name"] == "chat-adapters"]
    return list(json.loads(found[0]["data"]["adapters.json"])["adapters"]) if found else None


def start_replica(namespace: Namespace, name: str, address: str) -> None:
    ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "ContainersReady")]
    container = {"name": "runtime", "image": "i", "imageID": "i", "ready": True, "restartCount": 0, "state": {}}
    container["state"] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    ips = {"podIP": address, "podIPs": [{"ip": address}]}
    namespace.start_pod(name, {"phase": "Running", "conditions": ready, "containerStatuses": [container], **ips})


async def test_an_adapter_is_read_listed_and_ready_once_each_replica_serves_it(namespace: Namespace) -> None:
    settings = run_settings("--watch-namespaces", namespace.name)
    async with client_of(namespace.server) as client, operating(client, settings):
        namespace.put_adapter()
        await eventually(lambda: reason(namespace)[1] == "NoSuchModel")
        namespace.put_model(serving={"adapters": {"maxActive": 4}})
        await eventually(namespace.finish_resolve)
        await eventually(lambda: listed(namespace) == [])
        assert reason(namespace)[1] == "Resolving"
        await eventually(lambda: namespace.finish_job("resolve", adapter=ADAPTER_FACTS))
        await eventually(lambda: [one["name"] for one in listed(namespace) or ()] == ["support-de"])
        entry = {"name": "support-de", "digest": DIGEST, "state": "Loading"}
        async with replica("127.7.7.1", [entry]), replica("127.7.7.2", [{**entry, "state": "Ready"}]):
            start_replica(namespace, "chat-a", "127.7.7.1")
            start_replica(namespace, "chat-b", "127.7.7.2")
            await eventually(lambda: reason(namespace) == ("1/2", "Loading"))
            entry["state"] = "Ready"
            await eventually(lambda: reason(namespace) == ("2/2", "Ready"))
            # An edit that does not fit says so, and takes nothing away.
            namespace.put_adapter(uri="file:///adapters/wrong")
            await eventually(lambda: namespace.unfinished("resolve"))
            (job,) = namespace.unfinished("resolve")
            record = {"version": 1, "command": "inspect", "ok": False, "exitCode": 62, "reason": "AdapterMismatch"}
            message = json.dumps({**record, "message": "a shape"})
            namespace.end_job(job["metadata"]["name"], {"exitCode": 62, "message": message})
            await eventually(lambda: reason(namespace) == ("2/2", "AdapterMismatch"))
            assert [one["uri"] for one in listed(namespace) or ()] == ["file:///adapters/support-de"]
            namespace.delete(NEURON_ADAPTERS, "support-de")
            await eventually(lambda: listed(namespace) == [])


def test_who_may_create_adapters_needs_no_right_on_models(server: ApiServer, namespace: Namespace) -> None:
    user = service_account(namespace.name, "trainer")
    text = "".join(line for line in ROLES.read_text().splitlines(keepends=True) if not line.startswith("{{"))
    documents = yaml.safe_load_all(re.sub(r"\{\{ .*?\}\}", "chart", re.sub(r"\{\{- .*?\}\}", "", text)))
    (role,) = (one for one in documents if one["metadata"]["name"] == "chart-adapters")
    name = "neuron-adapters-test"
    group = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
    server.apply(f"{RBAC}/clusterroles/{name}", {**group, "kind": "ClusterRole", "rules": role["rules"]})
    subject = {"kind": "ServiceAccount", "name": "trainer", "namespace": namespace.name}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    binding = {**group, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]}
    server.apply(f"{RBAC}/namespaces/{namespace.name}/rolebindings/{name}", binding)

    def may(verb: str, plural: str, subresource: str = "", where: str = namespace.name) -> bool:
        return server.may(user, verb, plural, names.GROUP, subresource, namespace=where)

    try:
        wait_until("the rights are in force", lambda: may("create", NEURON_ADAPTERS.plural))
        assert all(may(verb, NEURON_ADAPTERS.plural) for verb in ("get", "list", "watch", "create", "patch", "delete"))
        assert not may("create", NEURON_ADAPTERS.plural, where="default")
        assert not may("patch", NEURON_ADAPTERS.plural, "status")
        assert not any(may(verb, NEURON_MODELS.plural) for verb in ("get", "create", "patch"))
    finally:
        server.call("DELETE", f"{RBAC}/clusterroles/{name}")
