"""Replicas on several nodes against a real API server with Kubernetes' own StatefulSet and garbage controllers. There
are no nodes: the tests say of each pod what its kubelet would."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from helpers.apiserver import ApiServer
from helpers.controllers import controlling, kubelet
from helpers.operator_rights import CLUSTER_RULES, grant
from helpers.operators import BY_KIND, Namespace, client_of, eventually, is_ready, operating, run_settings
from helpers.quotas import delete_quota, set_quota
from neuron_operator.api import names
from neuron_operator.api.errors import ClusterFault
from neuron_operator.cluster.client import LEADER_WORKER_SETS, NEURON_MODELS, PODS
from neuron_operator.run.process import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STATEFUL_SET = BY_KIND["StatefulSet"]
AT_ONCE = ("--groups", '{"restartSeconds": 0}')
OF_GROUPS = ("StatefulSet", "Service", "NetworkPolicy")


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    with controlling(server):
        yield server


@pytest.fixture
def namespace(server: ApiServer) -> Namespace:
    return Namespace(server)


@contextlib.asynccontextmanager
async def running(namespace: Namespace, *flags: str) -> AsyncIterator[Operator]:
    settings = run_settings("--watch-namespaces", namespace.name, *(flags or AT_ONCE))
    async with client_of(namespace.server) as client, operating(client, settings) as operator:
        yield operator


def of_group(namespace: Namespace, kind: str) -> list[str]:
    found = namespace.list(BY_KIND[kind])
    return sorted(one["metadata"]["name"] for one in found if names.GROUP_LABEL in one["metadata"]["labels"])


def members(namespace: Namespace) -> list[Any]:
    found = [pod for pod in namespace.list(PODS) if names.GROUP_LABEL in pod["metadata"]["labels"]]
    return sorted((pod for pod in found if "deletionTimestamp" not in pod["metadata"]), key=name_of)


def name_of(found: Any) -> str:
    return str(found["metadata"]["name"])


def report(namespace: Namespace, pod: str, **container: Any) -> None:
    """Changes what the kubelet says of a pod's container."""
    path = PODS.path(namespace.name, pod, "status")
    now = namespace.get(PODS, pod)["status"]["containerStatuses"][0]
    status = {"containerStatuses": [{**now, **container}]}
    namespace.server.call("PATCH", path, {"status": status}, "application/merge-patch+json")


def crash(namespace: Namespace, pod: str, code: int, message: str) -> None:
    report(
        namespace, pod, restartCount=1, ready=False, lastState={"terminated": {"exitCode": code, "message": message}}
    )


async def scheduled(namespace: Namespace) -> None:
    """Plays the scheduler for what is there now: each pod of a group gets a node."""
    for pod in await eventually(lambda: members(namespace)):
        if not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name_of(pod)}}
            target = {"target": {"apiVersion": "v1", "kind": "Node", "name": "n1"}}
            with contextlib.suppress(urllib.error.HTTPError):  # deleted meanwhile
                namespace.server.call("POST", PODS.path(namespace.name, name_of(pod), "binding"), {**binding, **target})


@contextlib.asynccontextmanager
async def nodes(namespace: Namespace) -> AsyncIterator[None]:
    """Scheduler and kubelets."""

    async def work() -> None:
        while True:
            if await asyncio.to_thread(members, namespace):
                await scheduled(namespace)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(work())
    try:
        async with kubelet(namespace):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_group_comes_serves_fails_comes_again_and_leaves_nothing(namespace: Namespace) -> None:
    async with running(namespace), nodes(namespace):
        namespace.put_model(replicas=1, parallelism={"nodes": 2})
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        leader, follower = sorted(members(namespace), key=lambda pod: pod["metadata"]["labels"][names.ROLE_LABEL])[::-1]
        assert leader["metadata"]["labels"][names.ROLE_LABEL] == "leader"
        indices = [pod["metadata"]["labels"][names.POD_INDEX_LABEL] for pod in (leader, follower)]
        assert indices == ["0", "1"]
        await eventually(lambda: seen(namespace) == ("Serving", 2, 2), about=namespace.model)
        crash(namespace, name_of(follower), 33, "the step failed")
        await eventually(lambda: namespace.model()["status"]["groups"][0]["attempt"] == 2)
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        (record,) = namespace.model()["status"]["groups"]
        assert record["restarts"] == 1
        assert "exit code 33" in record["message"]
        assert "on node n1" in record["message"]
        await eventually(lambda: {kind: len(of_group(namespace, kind)) for kind in OF_GROUPS} == expected(1))
        namespace.put_model(replicas=0, parallelism={"nodes": 2})
        await eventually(lambda: {kind: len(of_group(namespace, kind)) for kind in OF_GROUPS} == expected(0))
        await eventually(lambda: not members(namespace))


async def test_a_group_of_which_a_member_is_refused_says_so_and_is_made_again(namespace: Namespace) -> None:
    async with running(namespace, "--groups", '{"placeSeconds": 10}'), nodes(namespace):
        namespace.put_model(replicas=0, parallelism={"nodes": 2})
        await eventually(lambda: namespace.condition("Available") == ("True", "ScaledToZero"), about=namespace.model)
        set_quota(namespace, pods=0)
        namespace.put_model(replicas=1, parallelism={"nodes": 2})
        await eventually(lambda: namespace.condition() == ("False", "QuotaExceeded"), about=namespace.model)
        said = str(namespace.model()["status"]["conditions"])
        assert "2 of 2 members of group" in said
        assert "exceeded quota: few, requested: pods=1, used: pods=0, limited: pods=0" in said
        await eventually(lambda: namespace.model()["status"]["groups"][0]["state"] == "Released")
        delete_quota(namespace)
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        assert namespace.model()["status"]["groups"][0]["attempt"] > 1


def serve_leader_worker_sets(server: ApiServer) -> None:
    """An API without its controller: the real one cannot be installed here."""
    group, version = LEADER_WORKER_SETS.api_version.split("/")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {
        "group": group,
        "scope": "Namespaced",
        "names": {"kind": LEADER_WORKER_SETS.kind, "plural": LEADER_WORKER_SETS.plural},
        "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}],
    }
    name, api = f"{LEADER_WORKER_SETS.plural}.{group}", "apiextensions.k8s.io/v1"
    crd = {"apiVersion": api, "kind": "CustomResourceDefinition", "metadata": {"name": name}, "spec": spec}
    server.apply(f"/apis/{api}/customresourcedefinitions/{name}", crd)


def make_pods(namespace: Namespace, made: Any) -> None:
    """Plays the controller of LeaderWorkerSets."""
    for index, (end, part) in enumerate((("0", "leaderTemplate"), ("0-1", "workerTemplate"))):
        template = made["spec"]["leaderWorkerTemplate"][part]
        labels = {**template["metadata"]["labels"], names.WORKER_INDEX_LABEL: str(index)}
        metadata = {"name": f"{name_of(made)}-{end}", "namespace": namespace.name, "labels": labels}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        namespace.server.call("POST", PODS.path(namespace.name), pod)


async def allowed(server: ApiServer) -> bool:
    """Whether the operator may list them by now."""
    async with client_of(server) as client:
        with contextlib.suppress(ClusterFault):
            await client.list(LEADER_WORKER_SETS, None)
            return True
    return False


async def test_a_group_can_be_a_leader_worker_set(namespace: Namespace) -> None:
    serve_leader_worker_sets(namespace.server)
    verbs = ["get", "list", "watch", "create", "delete"]
    group = LEADER_WORKER_SETS.api_version.partition("/")[0]
    grant(
        namespace.server,
        [*CLUSTER_RULES, {"apiGroups": [group], "resources": [LEADER_WORKER_SETS.plural], "verbs": verbs}],
    )
    async with asyncio.timeout(60):
        while not await allowed(namespace.server):
            await asyncio.sleep(0.1)

    def attempts() -> list[Any]:
        with contextlib.suppress(urllib.error.HTTPError):  # not served yet
            return namespace.list(LEADER_WORKER_SETS)
        return []

    flags = ("--groups", '{"restartSeconds": 0, "controller": "LeaderWorkerSet"}')
    async with running(namespace, *flags), nodes(namespace):
        namespace.put_model(replicas=1, parallelism={"nodes": 2})
        (first,) = await eventually(attempts, about=namespace.model)
        make_pods(namespace, first)
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        await eventually(lambda: of_group(namespace, "NetworkPolicy"))
        assert not of_group(namespace, "StatefulSet")
        assert not of_group(namespace, "Service"), "its controller makes it"
        crash(namespace, f"{name_of(first)}-0-1", 33, "the step failed")
        await eventually(lambda: name_of(first) not in map(name_of, attempts()) and attempts(), about=namespace.model)
        await eventually(lambda: namespace.model()["status"]["groups"][0]["attempt"] == 2, about=namespace.model)


def serves_at(namespace: Namespace, attempt: int) -> bool:
    groups = namespace.model().get("status", {}).get("groups", ())
    return [group["attempt"] for group in groups] == [attempt] and seen(namespace) == ("Serving", 2, 2)


def seen(namespace: Namespace) -> tuple[str, int, int]:
    (record,) = namespace.model()["status"]["groups"]
    return record["state"], record["readyMembers"], record["members"]


def expected(num_groups: int) -> dict[str, int]:
    return {"StatefulSet": 2 * num_groups, "Service": num_groups, "NetworkPolicy": num_groups}


async def test_an_operator_that_died_in_the_middle_of_a_group_is_followed_by_one_that_completes_it(
    namespace: Namespace,
) -> None:
    async with running(namespace), kubelet(namespace):
        namespace.put_model(replicas=1, parallelism={"nodes": 2})
        await eventually(lambda: len(of_group(namespace, "StatefulSet")) == 2)
        (name,) = await eventually(lambda: of_group(namespace, "Service"))
    namespace.delete(BY_KIND["Service"], name)
    namespace.delete(STATEFUL_SET, names.followers_name(name))
    await eventually(lambda: not of_group(namespace, "Service"))
    async with running(namespace):
        await eventually(lambda: of_group(namespace, "Service") == [name])
        assert of_group(namespace, "StatefulSet") == [name, names.followers_name(name)]


async def test_the_restart_budget_outlives_the_operator(namespace: Namespace) -> None:
    flags = ("--groups", '{"restartSeconds": 0, "maxRestarts": 1}')
    for attempt in (1, 2):
        async with running(namespace, *flags), nodes(namespace):
            namespace.put_model(replicas=1, parallelism={"nodes": 2})
            await eventually(lambda made=attempt: serves_at(namespace, made), about=namespace.model)  # type: ignore[misc]
            pod = name_of(members(namespace)[0])
        crash(namespace, pod, 33, "the step failed")
    async with running(namespace, *flags), nodes(namespace):
        await eventually(lambda: namespace.condition("Available") == ("False", "RestartBudgetExhausted"))
        await eventually(lambda: not of_group(namespace, "StatefulSet"))
        refresh = {"metadata": {"annotations": {names.REFRESH_ANNOTATION: "again"}}}
        namespace.patch(NEURON_MODELS, "chat", refresh)
        await eventually(lambda: is_ready(namespace), about=namespace.model)


async def test_an_edit_replaces_group_by_group_and_services_select_leaders_only(namespace: Namespace) -> None:
    async with running(namespace), nodes(namespace):
        namespace.put_model(replicas=2, parallelism={"nodes": 2})
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        before = set(of_group(namespace, "Service"))
        namespace.put_model(replicas=2, parallelism={"nodes": 2}, serving={"maxModelLength": 128})
        await eventually(lambda: not before & set(of_group(namespace, "Service")))
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        service = namespace.get(BY_KIND["Service"], "chat")
        chosen = [
            pod
            for pod in members(namespace)
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(members(namespace)) == 4
        assert len(chosen) == 2
