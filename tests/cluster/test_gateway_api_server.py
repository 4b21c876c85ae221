"""Two gateways on a real API server, with the rights that the chart grants them: what they read, and whom they wake.

The test plays the operator and the controller of EndpointSlices, with replicas in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.rig.machine import wait_until
from helpers.apiserver import ApiServer, service_account
from helpers.gateway_process import Process, started
from helpers.gateways import Client, Replica, Running, echo, replicas, running, until
from helpers.operator_rights import OPERATOR_NAMESPACE
from helpers.operators import Namespace, client_of
from helpers.ports import free_ports
from neuron_operator.api import names
from neuron_operator.cluster.client import ENDPOINT_SLICES, NEURON_MODELS
from neuron_operator.cluster.client import Client as ApiClient
from neuron_operator.gateway.watching import Watching, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ACCOUNT = "other-0"
USER = service_account(OPERATOR_NAMESPACE, ACCOUNT)
ADDRESS = "192.0.2.10"
"""Stands for this machine: the API server refuses loopback addresses in EndpointSlices."""
PATH = "/v1/chat/completions"
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server(server: ApiServer) -> ApiServer:
    template = Path(__file__).parents[2] / "charts" / "neuron-serving" / "templates" / "gateway.yaml"
    rules = [yaml.safe_load(line)[0] for line in re.findall(r"^ *(- \{apiGroups.*\})$", template.read_text(), re.M)]
    rbac = "rbac.authorization.k8s.io"
    bodies: dict[str, dict[str, Any]] = {
        "ClusterRole": {"rules": rules},
        "ClusterRoleBinding": {
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "neuron-gateway"},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": OPERATOR_NAMESPACE}],
        },
    }
    for kind, content in bodies.items():
        body = {"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": {"name": "neuron-gateway"}, **content}
        server.apply(f"/apis/{rbac}/v1/{kind.lower()}s/neuron-gateway", body)
    wait_until("the rights are in force", lambda: server.may(USER, "list", "endpointslices", "discovery.k8s.io"))
    return server


@contextlib.asynccontextmanager
async def watching(client: ApiClient, namespace: str) -> AsyncIterator[Running]:
    async with running(wake=partial(wake, client)) as gateway:
        loop, connect = gateway.gateway.loop, gateway.gateway.loop.create_connection

        async def here(factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
            return await connect(factory, "127.0.0.1" if host == ADDRESS else host, port, **options)

        loop.create_connection = here  # type: ignore[method-assign]
        gateway.gateway.is_ready = False
        task = asyncio.create_task(Watching(client, (namespace,), gateway.gateway).run())
        try:
            await until(lambda: gateway.gateway.is_ready or task.done(), 60)
            yield gateway
        finally:
            loop.create_connection = connect  # type: ignore[method-assign]
            task.cancel()
            await asyncio.wait([task])


def endpoints(namespace: Namespace, *ready: Replica) -> None:
    """As the controller of EndpointSlices writes them, with the labels of the Service."""
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "chat-x", "labels": {"kubernetes.io/service-name": "chat", **names.labels("chat")}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}} for _ in ready],
        "ports": [{"name": names.PORT_NAME, "port": int(one.address.rpartition(":")[2])} for one in ready],
    }
    namespace.server.apply(ENDPOINT_SLICES.path(namespace.name, "chat-x"), body)


def num_replicas(namespace: Namespace) -> int:
    return int(namespace.model()["spec"]["replicas"])


async def test_none_of_1000_requests_is_lost_while_two_gateways_wake_a_model_twice(server: ApiServer) -> None:
    namespace = Namespace(server)
    namespace.put_model(replicas=0)
    clients: list[Client] = []
    key = (namespace.name, "chat")

    async def ask(gateway: Running, count: int) -> None:
        for _ in range(count):
            clients.append(await gateway.connect())
            clients[-1].send(PATH, CHAT)

    async with (
        client_of(server, USER) as api,
        replicas(echo, echo) as (first, second),
        watching(api, namespace.name) as one,
        watching(api, namespace.name) as other,
    ):
        both = (one, other)
        for replica in (first, second):
            for gateway in both:
                await ask(gateway, 250)
            async with asyncio.timeout(60):
                while await asyncio.to_thread(num_replicas, namespace) != 1:
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(endpoints, namespace, replica)
            await until(lambda replica=replica: len(replica.asked) == 500, 60)  # type: ignore[misc]
            patch = partial(namespace.patch, NEURON_MODELS, "chat", {"spec": {"replicas": 0}})
            await asyncio.to_thread(patch)
            await asyncio.to_thread(endpoints, namespace)
            await until(lambda: all(each.gateway.directory.models[key].served.is_asleep for each in both), 60)
            await until(lambda: not any(each.gateway.directory.models[key].replicas for each in both), 60)
        assert [(await client.answer()).status for client in clients] == [200] * 1000
        for client in clients:
            await client.aclose()
    did = [event for event in server.requests(USER) if event["verb"] == "patch"]
    woken = [event for event in did if event["responseStatus"]["code"] == 200]
    assert len(woken) == 2, "each time by one of the two"
    assert {event["objectRef"].get("subresource") for event in did} == {"scale"}


async def test_the_rights_suffice_and_allow_nothing_else(server: ApiServer) -> None:
    for verb, resource, group in (
        ("get", "secrets", ""),
        ("list", "pods", ""),
        ("patch", "neuronmodels", names.GROUP),
        ("update", "neuronmodels", names.GROUP),
        ("delete", "neuronmodels", names.GROUP),
    ):
        assert not server.may(USER, verb, resource, group), (verb, resource)
    refused = [event for event in server.requests(USER) if event["responseStatus"]["code"] == 403]
    assert not refused


def test_the_process_serves_a_cluster_and_says_which_right_it_lacks(server: ApiServer, tmp_path: Path) -> None:
    namespace = Namespace(server)
    namespace.put_model(replicas=0)
    quick = {"timeouts": {"drainDelaySeconds": 0.1}}
    document = {"namespaces": [namespace.name], "kubeconfig": str(server.kubeconfig(USER)), **quick}
    with started(document) as process:
        assert f'held_requests{{model="{namespace.name}/chat"}} 0.0' in process.metrics()
        assert process.end() == 0
    other = {**document, "kubeconfig": str(server.kubeconfig(service_account(OPERATOR_NAMESPACE, "other-1")))}
    with free_ports(2) as port:
        process = Process(port, tmp_path / "log", other)
        assert process.process.wait(60) == 1
    said = process.log.read_text().splitlines()[-1]
    assert said.startswith("neuron-gateway: list ")
    assert "cannot list" in said
