"""What ends a failure is noticed without anybody's help, where Kubernetes by itself would look ever more rarely: its
own controllers run, and a played kubelet that does not look again at all. The seconds are printed, not asserted."""

from __future__ import annotations

import asyncio
import time
import urllib.error
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from helpers.apiserver import ApiServer
from helpers.controllers import RESULTS, Status, controlling, finished_or_ready, kubelet
from helpers.operators import (
    BY_KIND,
    OPERATOR_USER,
    Namespace,
    client_of,
    eventually,
    is_ready,
    operating,
    run_settings,
)
from helpers.quotas import delete_quota, set_quota
from neuron_operator.api import names
from neuron_operator.cluster.client import PODS
from neuron_operator.read.objects import instant, text

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FAULT_SECONDS = 13.0
"""Then the ReplicaSet controller pauses for 10 and 20 s."""
ABSENT = {"secret": ("Secret", {"stringData": {"all": "yes"}}), "configmap": ("ConfigMap", {"data": {"all": "yes"}})}


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    with controlling(server):
        yield server


@pytest.fixture
def namespace(server: ApiServer) -> Namespace:
    return Namespace(server)


def tried(namespace: Namespace, kind: str) -> datetime:
    """When the operator last had pods tried again; long ago if never."""
    (found,) = namespace.list(BY_KIND[kind])
    return instant(text(found, "metadata", "annotations", names.TRIED_ANNOTATION)) or datetime.min.replace(tzinfo=UTC)


async def test_refused_replicas_are_made_when_the_quota_is_raised(server: ApiServer, namespace: Namespace) -> None:
    async with (
        client_of(server) as client,
        operating(client, run_settings("--watch-namespaces", namespace.name)),
        kubelet(namespace),
    ):
        namespace.put_model(replicas=0)
        await eventually(lambda: is_ready(namespace) or namespace.condition()[1] == "ScaledToZero")
        set_quota(namespace, pods=0)
        namespace.put_model(replicas=2)
        await eventually(lambda: namespace.condition() == ("False", "QuotaExceeded"), about=namespace.model)
        await asyncio.sleep(FAULT_SECONDS)
        delete_quota(namespace)
        cured, begin = datetime.now(UTC).replace(microsecond=0), time.monotonic()
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        print(f"ready {time.monotonic() - begin:.1f} s after the quota went; it had lasted {FAULT_SECONDS:.0f} s")
        assert tried(namespace, "Deployment") >= cured


async def test_the_refused_pod_of_a_job_is_made_when_the_quota_is_raised(
    server: ApiServer, namespace: Namespace
) -> None:
    async with (
        client_of(server) as client,
        operating(client, run_settings("--watch-namespaces", namespace.name)),
        kubelet(namespace),
    ):
        set_quota(namespace, pods=0)
        namespace.put_model(replicas=0)
        await eventually(lambda: "exceeded quota: few" in str(namespace.model()["status"]), about=namespace.model)
        first = tried(namespace, "Job")
        await eventually(lambda: tried(namespace, "Job") > first)
        delete_quota(namespace)
        cured, begin = datetime.now(UTC).replace(microsecond=0), time.monotonic()
        await eventually(lambda: namespace.condition("ModelResolved")[0] == "True", about=namespace.model)
        print(f"resolved {time.monotonic() - begin:.1f} s after the quota went")
        assert tried(namespace, "Job") >= cured


async def test_no_replica_ends_for_one_that_a_limit_range_refuses(server: ApiServer, namespace: Namespace) -> None:
    def replicas() -> set[str]:
        pods = (pod["metadata"] for pod in namespace.list(PODS))
        return {pod["name"] for pod in pods if pod["labels"][names.ROLE_LABEL] == names.ROLE_LEADER}

    path = f"/api/v1/namespaces/{namespace.name}/limitranges"
    bounds = {"limits": [{"type": "Container", "max": {"memory": "4Gi"}}]}
    large = {"resources": {"limits": {"memory": "5Gi"}}}
    async with (
        client_of(server) as client,
        operating(client, run_settings("--watch-namespaces", namespace.name)),
        kubelet(namespace),
    ):
        namespace.put_model(replicas=1)
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        before = replicas()
        about = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}}
        server.call("POST", path, {**about, "spec": bounds})
        namespace.put_model(replicas=1, rollout={"strategy": "Replace"}, podTemplate={"spec": large})
        await eventually(lambda: namespace.condition("UpToDate") == ("False", "AdmissionDenied"), about=namespace.model)
        assert namespace.condition("Available")[0] == "True"
        assert replicas() == before
        server.call("DELETE", f"{path}/small", {})
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        assert replicas().isdisjoint(before)


@pytest.mark.parametrize("kind", ABSENT)
@pytest.mark.parametrize("role", ["serve", "resolve"])
async def test_a_pod_is_replaced_when_what_it_waits_for_is_created(
    server: ApiServer, namespace: Namespace, kind: str, role: str
) -> None:
    """The kubelet would wait for up to two minutes."""
    known: set[str] = set()

    def status_of(pod: Any) -> Status:
        """The status of a pod that was there before the object, for ever."""
        if pod["metadata"]["labels"][names.ROLE_LABEL] in RESULTS and role == "serve":
            return finished_or_ready(pod)
        try:
            server.call("GET", f"/api/v1/namespaces/{namespace.name}/{kind}s/words")
        except urllib.error.HTTPError:
            known.add(pod["metadata"]["name"])
        if pod["metadata"]["name"] not in known:
            return finished_or_ready(pod)
        waits = {"reason": "CreateContainerConfigError", "message": f'{kind} "words" not found'}
        container = {"name": "runtime", "image": "i", "imageID": "i", "restartCount": 0, "ready": False}
        return {"phase": "Pending", "containerStatuses": [{**container, "state": {"waiting": waits}}]}

    async with (
        client_of(server) as client,
        operating(client, run_settings("--watch-namespaces", namespace.name)),
        kubelet(namespace, status_of),
    ):
        namespace.put_model(replicas=1)
        await eventually(lambda: '"words" not found' in str(namespace.model()["status"]), about=namespace.model)
        before = time.time()
        name, content = ABSENT[kind]
        made = {"apiVersion": "v1", "kind": name, "metadata": {"name": "words"}, **content}
        server.call("POST", f"/api/v1/namespaces/{namespace.name}/{kind}s", made)
        begin = time.monotonic()
        await eventually(lambda: is_ready(namespace), about=namespace.model)
        print(f"{kind}, {role}: ready {time.monotonic() - begin:.1f} s after it was created")
    assert len(known) == 1, "pods are replaced only after the cure"
    later = server.requests(OPERATOR_USER, since=before)
    assert {e["objectRef"]["resource"] for e in later if e["verb"] == "get"} <= {"configmaps"}, "no Secret is read"
