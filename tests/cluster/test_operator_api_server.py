"""The operator against a real API server: its writes, its repairs, and leader election."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import ssl
import time
import urllib.error
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.utils.quantity import parse_quantity

from cluster.rig.machine import WAIT_SECONDS, wait_until
from helpers import manifests as refused_manifests
from helpers.api_proxy import proxying
from helpers.apiserver import ApiServer
from helpers.controllers import finished_or_ready, replica
from helpers.failures import check_says
from helpers.operator_rights import CLUSTER_RULES, LEASE_RULES, OPERATOR_ACCOUNT, OPERATOR_NAMESPACE, grant
from helpers.operator_worlds import FACTS, REFUSED, body
from helpers.operators import (
    BY_KIND,
    OPERATOR_USER,
    Namespace,
    client_of,
    eventually,
    may_write_services,
    operating,
    run_settings,
    without_versions,
)
from helpers.ports import free_ports
from helpers.quotas import delete_quota, set_quota
from neuron_operator.__main__ import main
from neuron_operator.api import names
from neuron_operator.api.model import Rollout
from neuron_operator.cluster import client as client_module
from neuron_operator.cluster import holding
from neuron_operator.cluster.client import (
    EVENTS,
    LEASES,
    NEURON_ADAPTERS,
    NEURON_MODELS,
    PODS,
    REPLICA_SETS,
    Client,
    Conflict,
    Resource,
    Unreachable,
)
from neuron_operator.cluster.contests import NUM_AT_ONCE
from neuron_operator.cluster.lease import LeaseTimings
from neuron_operator.cluster.on_demand import EVENTS_SECONDS, EXISTS_SECONDS, LOG_SECONDS
from neuron_operator.cluster.reflector import Caches, Key
from neuron_operator.decide.course import decide
from neuron_operator.read.objects import MAX_OWNERS, instant, is_shared, owners_of
from neuron_operator.read.world import Decision, Settings, World
from neuron_operator.run import handlers
from neuron_operator.run.installed import refused_namespaces
from neuron_operator.run.process import Operator, serving
from neuron_operator.run.settings import RunSettings

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LEASE = LeaseTimings(duration_seconds=12, deadline_seconds=8, renew_seconds=0.5, retry_seconds=0.2)
"""Renewed often for fast tests, yet long enough that a machine that stalls for some seconds does not lose it."""

HAND_EDITS: dict[str, Any] = {
    "Deployment": {
        "spec": {"replicas": 7, "template": {"spec": {"containers": [{"name": "runtime", "image": "other:1"}]}}}
    },
    "Service": {"spec": {"ports": [{"name": "http", "port": 8001}], "selector": {"app": "other"}}},
    "ConfigMap": {"metadata": {"labels": {"app.kubernetes.io/component": None}}},
    "ControllerRevision": {"metadata": {"labels": {"app.kubernetes.io/name": "other"}}},
    "ServiceAccount": {"automountServiceAccountToken": True},
    "PodDisruptionBudget": {"spec": {"maxUnavailable": None, "minAvailable": 1}},
    "NetworkPolicy": {"spec": {"ingress": None, "podSelector": {"matchLabels": {"app": "other"}}}},
    "Job": {"metadata": {"labels": {"app.kubernetes.io/managed-by": "other"}}},
}


@pytest.fixture
def namespace(server: ApiServer) -> Namespace:
    return Namespace(server)


def only(namespace: Namespace, *flags: str, **options: Any) -> Any:
    """Settings of an operator for this namespace only, so that models of other tests do not affect counts."""
    return run_settings("--watch-namespaces", namespace.name, *flags, **options)


def calls(server: ApiServer, since: float, user: str = OPERATOR_USER) -> list[tuple[str, str]]:
    """Verb and resource of the requests of the operator, or of another user, since a time."""
    return [(e["verb"], e["objectRef"]["resource"]) for e in server.requests(user, since)]


KEPT = Rollout().revision_history_limit
WRITES = ("create", "update", "patch", "delete", "deletecollection")


async def test_a_manifest_creates_children_and_a_status(server: ApiServer, namespace: Namespace) -> None:
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
    children = namespace.children()
    assert {kind: len(found) for kind, found in children.items()} == {
        **dict.fromkeys(BY_KIND, 1),
        "ConfigMap": 2,
        "CronJob": 0,
        "PersistentVolumeClaim": 0,
        "StatefulSet": 0,
    }
    assert namespace.condition("Accepted")[0] == "True"
    assert namespace.condition("Ready") == ("False", "Loading")


async def test_the_first_status_tells_what_its_own_pass_made(server: ApiServer, namespace: Namespace) -> None:
    """One status for all writes of a pass, not one more for what they led to."""
    statuses: list[Any] = []

    class Recording(Client):
        async def apply_status(self, resource: Resource, live: Any, status: Any) -> Any:
            statuses.append(status)
            return await super().apply_status(resource, live, status)

    async with client_of(server) as client, operating(Recording(client.configuration, client.session), only(namespace)):
        namespace.put_model()
        await eventually(lambda: namespace.condition("ModelResolved") == ("False", "Resolving"))
    assert statuses[0]["url"] == f"http://chat.{namespace.name}.svc:8000"


async def test_a_pass_is_not_followed_by_another_one_for_what_it_wrote(server: ApiServer, namespace: Namespace) -> None:
    decided: list[World] = []

    def counting(world: World, settings: Settings) -> Decision:
        decided.append(world)
        # Only changes lead to passes here: on a slow machine the time of the next look comes first.
        return replace(decide(world, settings), requeue_after_seconds=None)

    async with client_of(server) as client, operating(client, only(namespace), decide=counting):
        for number in range(10):
            namespace.put_model(f"m{number}", model={"uri": f"hf://acme/m{number}"})
        await eventually(lambda: all(namespace.condition("Ready", f"m{number}")[0] for number in range(10)))
        await asyncio.sleep(1.0)
    assert len(decided) == 2 * 10, "before the writes, and after them for the status"


async def test_a_restart_with_unchanged_objects_writes_only_the_lease(server: ApiServer, namespace: Namespace) -> None:
    async with client_of(server) as client:
        async with operating(client, only(namespace)):
            namespace.put_model()
            await namespace.settle()
        before = time.time()
        async with operating(client, only(namespace)) as operator:
            await eventually(lambda: operator.is_leading)
            namespace.wake()  # later passes are not the first
            await asyncio.sleep(1.0)
    written = [call for call in calls(server, before) if call[0] in WRITES]
    assert written
    assert {resource for _, resource in written} == {"leases"}


async def test_an_operator_with_another_default_image_changes_nothing_of_many_models(
    server: ApiServer, namespace: Namespace
) -> None:
    models, hub = [f"m{number}" for number in range(20)], {"uri": "hf://acme/tiny"}
    async with client_of(server) as client:
        async with operating(client, only(namespace)):
            for name in models:
                namespace.put_model(name, model=hub)
            await eventually(namespace.finish_resolve_once)
            await eventually(lambda: all(namespace.condition("UpToDate", name)[0] == "True" for name in models))
            await eventually(lambda: all(namespace.has_served(name) for name in models))
        newer = replace(only(namespace).models, runtime_image="example.com/runtime:2")
        before = time.time()
        async with operating(client, replace(only(namespace), models=newer)):
            for name in models:
                namespace.wake(name)
            namespace.put_model(models[0], model=hub, serving={"maxModelLength": 99})
            image = "example.com/runtime:2"
            await eventually(lambda: image in str(namespace.get(BY_KIND["Deployment"], models[0])))
            assert not [name for name in models[1:] if image in str(namespace.get(BY_KIND["Deployment"], name))]
    written = [
        event["objectRef"]["name"]
        for event in server.requests(OPERATOR_USER, since=before)
        if event["verb"] in WRITES and event["objectRef"]["resource"] in ("deployments", "neuronmodels")
    ]
    assert set(written) == {models[0]}, "an edit rolls the new image out, and only of its model"


async def test_conditions_of_others_stay_and_cost_no_writes(server: ApiServer, namespace: Namespace) -> None:
    audited = {
        "type": "example.com/Audited",
        "status": "True",
        "reason": "Audited",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    about = {"apiVersion": NEURON_MODELS.api_version, "kind": NEURON_MODELS.kind, "metadata": {"name": "chat"}}
    path = NEURON_MODELS.path(namespace.name, "chat", "status")
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
        server.apply(path, {**about, "status": {"conditions": [audited]}}, "auditor")
        await asyncio.sleep(1.0)
        before = time.time()
        namespace.wake()
        await asyncio.sleep(1.0)
        assert not [call for call in calls(server, before) if call[0] in WRITES and call[1] != "leases"]
        namespace.put_model(replicas=3)
        await eventually(lambda: namespace.model()["status"]["ready"] == "0/3")
        assert namespace.condition("example.com/Audited") == ("True", "Audited")
        server.apply(path, {**about, "status": {"conditions": [{**audited, "type": "Ready"}]}}, "auditor")
        await eventually(lambda: namespace.condition("Ready") == ("False", "Loading"))


async def test_an_idle_operator_sends_only_watches_and_lease_renewals(server: ApiServer, namespace: Namespace) -> None:
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
        renewal = ("update", "leases")
        # Three renewals, at least eight seconds, and no other request in between.
        await eventually(lambda: [c for c in calls(server, 0) if c[0] != "watch"][-3:] == [renewal] * 3)


async def test_a_manual_edit_of_a_child_is_reverted_and_a_deleted_one_is_made_again(
    server: ApiServer, namespace: Namespace
) -> None:
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await eventually(lambda: namespace.list(BY_KIND["Job"]))
        await _check_repairs(namespace, "Job")
        await namespace.settle()
        for kind in sorted(HAND_EDITS.keys() - {"Job"}):
            await _check_repairs(namespace, kind)


async def _check_repairs(namespace: Namespace, kind: str) -> None:
    resource = BY_KIND[kind]
    originals = namespace.list(resource)
    original = originals[0]
    name = original["metadata"]["name"]
    edited = namespace.patch(resource, name, HAND_EDITS[kind])
    assert without_versions(edited) != without_versions(original)
    await eventually(
        lambda: contains(namespace.get(resource, name), original),
        about=lambda: (without_versions(namespace.get(resource, name)), without_versions(original)),
    )
    assert namespace.get(resource, name)["metadata"]["uid"] == original["metadata"]["uid"]
    namespace.delete(resource, name)
    known = {item["metadata"]["uid"] for item in originals}
    (again,) = await eventually(
        lambda: [item for item in namespace.list(resource) if item["metadata"]["uid"] not in known], about=lambda: kind
    )
    assert again["metadata"]["name"] == name
    assert again["metadata"]["labels"] == original["metadata"]["labels"]


@pytest.mark.parametrize("change", ["deleted", "without our labels", "of another revision"])
async def test_a_lost_revision_is_rebuilt_without_replacing_a_pod(
    server: ApiServer, namespace: Namespace, change: str
) -> None:
    hub = {"uri": "hf://acme/tiny"}
    revisions, deployments = BY_KIND["ControllerRevision"], BY_KIND["Deployment"]
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(model=hub)
        await namespace.settle()
        await eventually(namespace.has_served)
    ((original,), (before,)) = namespace.list(revisions), namespace.list(deployments)
    name, labels = original["metadata"]["name"], original["metadata"]["labels"]
    if change == "deleted":
        namespace.delete(revisions, name)
    else:
        edit = {names.MANAGED_BY_LABEL: None} if "without" in change else {names.REVISION_LABEL: "zz"}
        namespace.patch(revisions, name, {"metadata": {"labels": edit}})
    newer = replace(only(namespace).models, runtime_image="example.com/runtime:2")
    using = replace(only(namespace), models=newer)
    async with client_of(server) as client, operating(client, using):
        await eventually(lambda: [r["metadata"]["labels"] for r in namespace.list(revisions)] == [labels])
        await asyncio.sleep(1.0)
        (after,) = namespace.list(deployments)
        assert after["metadata"]["generation"] == before["metadata"]["generation"]
        assert after["spec"] == before["spec"]
        assert namespace.condition("UpToDate")[0] == "True"
        namespace.put_model(model=hub, serving={"maxModelLength": 99})
        await eventually(lambda: "runtime:2" in str(namespace.get(deployments, "chat")["spec"]["template"]))
        namespace.put_model(model=hub)
        await eventually(lambda: namespace.get(deployments, "chat")["spec"]["template"] == before["spec"]["template"])


async def test_dropped_fields_leave_a_child_and_foreign_fields_stay(server: ApiServer, namespace: Namespace) -> None:
    deployment = BY_KIND["Deployment"]

    def containers() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = namespace.get(deployment, "chat")["spec"]["template"]["spec"]["containers"]
        return found

    def variables() -> set[str]:
        return {variable["name"] for variable in containers()[0]["env"]}

    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
        assert "GREETING" in variables()
        (runtime,) = containers()
        runtime["env"].append({"name": "INJECTED", "value": "x"})
        runtime["ports"].append({"containerPort": 9000, "protocol": "TCP"})
        with_sidecar = {"template": {"spec": {"containers": [runtime, {"name": "sidecar", "image": "proxy"}]}}}
        notes = {"annotations": {"example.com/note": "mine"}}
        namespace.patch(deployment, "chat", {"metadata": notes, "spec": with_sidecar})
        for _ in range(2):  # the first apply after the create, and one after an apply
            namespace.put_model(engine={"backend": "torch", "env": [{"name": "OTHER", "value": "x"}]})
            await eventually(lambda: variables() >= {"OTHER"})
            assert "GREETING" not in variables()
            namespace.put_model()
            await eventually(lambda: variables() >= {"GREETING"})
            assert "OTHER" not in variables()
    assert namespace.get(deployment, "chat")["metadata"]["annotations"]["example.com/note"] == "mine"
    assert "INJECTED" in variables()
    assert 9000 in [port["containerPort"] for port in containers()[0]["ports"]]
    assert [container["name"] for container in containers()][1:] == ["sidecar"]


async def test_annotations_and_type_of_the_service_follow_the_manifest(server: ApiServer, namespace: Namespace) -> None:
    service = BY_KIND["Service"]

    def found() -> tuple[str, dict[str, str], bool]:
        live = namespace.get(service, "chat")
        (port,) = live["spec"]["ports"]
        return live["spec"]["type"], live["metadata"].get("annotations") or {}, "nodePort" in port

    def template(kind: str, **annotations: str) -> dict[str, Any]:
        return {"metadata": {"annotations": annotations}, "spec": {"type": kind}}

    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(serviceTemplate=template("LoadBalancer", scheme="internal", old="1"))
        await namespace.settle()
        assert found() == ("LoadBalancer", {"scheme": "internal", "old": "1"}, True)
        namespace.put_model(serviceTemplate=template("LoadBalancer", scheme="internal"))
        await eventually(lambda: found() == ("LoadBalancer", {"scheme": "internal"}, True), about=found)
        namespace.patch(service, "chat", {"metadata": {"annotations": {"theirs": "kept"}}})
        namespace.put_model(serviceTemplate=template("NodePort", scheme="public"))
        await eventually(lambda: found() == ("NodePort", {"scheme": "public", "theirs": "kept"}, True), about=found)
        namespace.put_model()
        await eventually(lambda: found() == ("ClusterIP", {"theirs": "kept"}, False), about=found)


async def test_a_foreign_service_of_the_same_name_is_not_changed(server: ApiServer, namespace: Namespace) -> None:
    service = BY_KIND["Service"]
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}, "spec": {"ports": [{"port": 1}]}}
    server.call("POST", service.path(namespace.name), foreign)
    before = namespace.get(service, "chat")
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await eventually(lambda: namespace.condition() == ("False", "NameConflict"))
        assert namespace.get(service, "chat") == before
        namespace.delete(service, "chat")
        namespace.wake()
        await eventually(lambda: namespace.condition("Accepted")[0] == "True")


async def test_all_taken_names_are_reported_at_once(server: ApiServer, namespace: Namespace) -> None:
    metadata = {"name": "chat"}
    foreign = (
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 1}]}},
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": {"maxUnavailable": 1}},
    )
    for obj in foreign:
        server.call("POST", BY_KIND[str(obj["kind"])].path(namespace.name), obj)
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await eventually(lambda: "Service chat, PodDisruptionBudget chat exist" in message(namespace, "Accepted"))


async def test_children_without_an_owner_are_adopted(server: ApiServer, namespace: Namespace) -> None:
    """As after `kubectl delete --cascade=orphan` and a new model of the same name."""

    def owners() -> dict[str, list[str]]:
        found = (obj for resource in BY_KIND.values() for obj in namespace.list(resource))
        return {
            obj["metadata"]["name"]: [o["uid"] for o in obj["metadata"].get("ownerReferences", ())] for obj in found
        }

    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
    before = namespace.children()
    namespace.delete(NEURON_MODELS, "chat")
    for kind, children in before.items():  # the garbage collector does this
        for name in children:
            namespace.patch(BY_KIND[kind], name, {"metadata": {"ownerReferences": None}})
    assert set(map(tuple, owners().values())) == {()}
    async with client_of(server) as client, operating(client, only(namespace)):
        uid = namespace.put_model()["metadata"]["uid"]
        await eventually(lambda: namespace.condition("UpToDate")[0] == "True", about=namespace.model)
        jobs = before["Job"]
        await eventually(lambda: all(own == [uid] for name, own in owners().items() if name not in jobs), about=owners)
    assert namespace.children() == before


async def test_a_rejected_child_does_not_stop_a_scale(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_operator.decide.course.RECHECK_SECONDS", 1.0)
    denied = {"kind": "Status", "code": 422, "reason": "Invalid", "message": "denied by policy no-budgets"}

    def deny(request: web.Request) -> web.Response | None:
        is_denied = request.method == "PATCH" and "/poddisruptionbudgets/" in request.path
        return web.json_response(denied, status=422) if is_denied else None

    async with (
        proxying(server) as proxy,
        client_of(server, via=proxy.url) as client,
        operating(client, only(namespace)),
    ):
        namespace.put_model()
        await namespace.settle()
        proxy.answer = deny
        namespace.patch(BY_KIND["PodDisruptionBudget"], "chat", HAND_EDITS["PodDisruptionBudget"])
        await eventually(lambda: namespace.condition() == ("False", "InvalidSpec"))
        assert "rejected PodDisruptionBudget chat: " in message(namespace, "Accepted")
        namespace.put_model(replicas=3)
        await eventually(lambda: namespace.get(BY_KIND["Deployment"], "chat")["spec"]["replicas"] == 3)
        proxy.answer = lambda request: None
        await eventually(lambda: namespace.condition("Accepted")[0] == "True")


async def test_a_rejected_object_is_tried_again_without_a_change(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_operator.decide.course.RECHECK_SECONDS", 1.0)
    policy = {"kind": "Status", "code": 422, "reason": "Invalid", "message": "denied by policy no-budgets"}

    denied: list[str] = []

    def deny(request: web.Request) -> web.Response | None:
        if request.method != "POST" or not request.path.endswith("/poddisruptionbudgets"):
            return None
        denied.append(request.path)
        return web.json_response(policy, status=422)

    async with proxying(server) as proxy, client_of(server, via=proxy.url) as client:
        proxy.answer = deny
        async with operating(client, only(namespace)):
            namespace.put_model()
            await eventually(lambda: "denied by policy no-budgets" in message(namespace, "Accepted"))
            await asyncio.sleep(0.5)  # the pass that the written status wakes
            tried = len(denied)
            await eventually(lambda: len(denied) > tried + 2)
            proxy.answer = lambda request: None
            await eventually(lambda: namespace.condition("Accepted")[0] == "True")


async def test_a_write_that_keeps_failing_is_reported_once_and_the_others_are_done(
    server: ApiServer, namespace: Namespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an admission webhook does not answer."""
    monkeypatch.setattr("neuron_operator.run.reconcile.PATIENCE_SECONDS", 1.0)
    text = "Internal error occurred: failed calling webhook budgets.example.com: context deadline exceeded"
    status = {"kind": "Status", "code": 500, "reason": "InternalError", "message": text}
    attempts = []

    def fail(request: web.Request) -> web.Response | None:
        if request.method != "POST" or not request.path.endswith("/poddisruptionbudgets"):
            return None
        attempts.append(request.path)
        return web.json_response(status, status=500)

    async with proxying(server) as proxy, client_of(server, via=proxy.url) as client:
        proxy.answer = fail
        async with operating(client, only(namespace)):
            namespace.put_model()
            await eventually(lambda: namespace.condition() == ("False", "WriteFailed"), about=namespace.model)
            assert f"PodDisruptionBudget chat: create poddisruptionbudgets: {text}" in message(namespace, "Accepted")
            events = await eventually(lambda: namespace.list(EVENTS))
            assert ("Warning", "WriteFailed") in {(event["type"], event["reason"]) for event in events}
            await eventually(
                lambda: len(namespace.children()["NetworkPolicy"]) == len(namespace.children()["Job"]) == 1
            )
            num_before = len(attempts)
            namespace.wake()
            await eventually(lambda: len(attempts) >= num_before + 2)
            logged = [one for one in caplog.messages if "PodDisruptionBudget chat create" in one]
            assert len(logged) == 1, logged
            proxy.answer = lambda request: None
            namespace.wake()
            await namespace.settle()


async def test_an_api_server_that_keeps_throttling_is_reported_and_asked_for_nothing_else(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_operator.run.reconcile.PATIENCE_SECONDS", 1.0)
    status = {"kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "too many requests"}

    def too_many(request: web.Request) -> web.Response | None:
        is_service = request.method == "POST" and request.path.endswith("/services")
        return web.json_response(status, status=429, headers={"Retry-After": "1"}) if is_service else None

    async with proxying(server) as proxy, client_of(server, via=proxy.url) as client:
        proxy.answer = too_many
        async with operating(client, only(namespace)):
            namespace.put_model()
            await eventually(lambda: namespace.condition() == ("False", "WriteFailed"), about=namespace.model)
            check_says("throttled", ready(namespace))
            assert namespace.children()["Job"] == []
            proxy.answer = lambda request: None
            await namespace.settle()


async def test_a_recreated_model_waits_for_the_deletion_of_its_predecessors_children(
    server: ApiServer, namespace: Namespace
) -> None:
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
        namespace.delete(NEURON_MODELS, "chat")
        earlier = namespace.get(BY_KIND["Service"], "chat")
        namespace.put_model()
        await asyncio.sleep(1.0)
        assert namespace.get(BY_KIND["Service"], "chat") == earlier
        assert namespace.condition() == ("", "")
        namespace.collect_garbage()
        for pod in namespace.list(PODS):
            server.call("DELETE", PODS.path(namespace.name, pod["metadata"]["name"]), {"gracePeriodSeconds": 0})
        await namespace.settle()


async def test_models_of_one_source_share_the_job_and_its_record(server: ApiServer, namespace: Namespace) -> None:
    models = [f"m{number}" for number in range(8)]
    async with client_of(server) as client, operating(client, only(namespace)):
        for name in models[:-1]:
            namespace.put_model(name)
        await eventually(lambda: all(len(owners_of(job)) == 7 for job in namespace.list(BY_KIND["Job"])))
        await eventually(namespace.finish_resolve)
        for name in models[:-1]:
            await eventually(lambda n=name: namespace.condition("UpToDate", n)[0] == "True")
        namespace.put_model(models[-1])  # the record is there
        await eventually(lambda: namespace.condition("UpToDate", models[-1])[0] == "True")
        namespace.delete(NEURON_MODELS, models[0])
        namespace.put_model(models[1], model={"uri": "file:///models/other"})
        keepers = [found for found in namespace.list(BY_KIND["ConfigMap"]) if is_shared(found)]
        assert len(keepers) == 1
        await eventually(lambda: len(namespace.list(BY_KIND["Job"])) == 2)
    created = [
        event["objectRef"]["name"]
        for event in server.requests(OPERATOR_USER)
        if event["verb"] == "create"
        and event["objectRef"]["resource"] == "jobs"
        and event["objectRef"]["namespace"] == namespace.name
        and event["responseStatus"]["code"] == 201
    ]
    assert len(created) == len(set(created)) == 2, "one for each source"
    kept = namespace.get(BY_KIND["ConfigMap"], keepers[0]["metadata"]["name"])
    assert {owner["uid"] for owner in owners_of(kept)} >= {
        namespace.model(name)["metadata"]["uid"] for name in models[2:]
    }


async def test_five_models_of_one_source_in_two_formats_have_one_download_and_two_conversions(
    server: ApiServer, namespace: Namespace
) -> None:
    wishes = {"a": "Int8", "b": "Fp8", "c": "Int8", "d": "Fp8", "e": "Int8"}
    digests = {"int8": "c0" * 32, "fp8": "c1" * 32}

    def end_both(role: str) -> bool:
        """Once there is a Job for each format; false before."""
        jobs = namespace.unfinished(role)
        for job in jobs if len(jobs) == 2 else ():
            (container,) = job["spec"]["template"]["spec"]["containers"]
            form = container["command"][container["command"].index("--quantization") + 1]
            planned = {"digest": digests[form], "format": form, "bytes": 1000}
            weights = {"digest": digests[form], "bytes": 1000, "readBytes": 2000}
            figures = {"format": form, "layerError": 0.01, "perplexity": 12.0, "convertedPerplexity": 12.5}
            results = {"resolve": {"facts": FACTS | {"conversion": planned}}}
            result = results.get(role, {"weights": weights, "conversion": figures})
            record = {"version": 1, "command": role, "ok": True, **result}
            namespace.end_job(job["metadata"]["name"], {"exitCode": 0, "message": json.dumps(record)})
        return len(jobs) == 2

    using = only(namespace, "--storage", json.dumps({"weights": {"persistentVolumeClaim": {"claimName": "models"}}}))
    async with client_of(server) as client, operating(client, using):
        for name, wish in wishes.items():
            namespace.put_model(name, model={"uri": "hf://acme/tiny"}, serving={"quantization": wish})
        await eventually(lambda: end_both("resolve"))
        fetched = {"digest": FACTS["digest"], "bytes": 2000, "readBytes": 2000}
        await eventually(lambda: namespace.finish_job("fetch", weights=fetched))
        await eventually(lambda: end_both("convert"), about=namespace.list_all)
        for name in wishes:
            await eventually(lambda n=name: namespace.condition("UpToDate", n)[0] == "True", 20)
    created = [
        event["objectRef"]["name"].partition("-")[0]
        for event in server.requests(OPERATOR_USER)
        if event["verb"] == "create"
        and event["objectRef"]["resource"] == "jobs"
        and event["objectRef"]["namespace"] == namespace.name
        and event["responseStatus"]["code"] == 201
    ]
    assert sorted(created) == ["converted", "converted", "facts", "facts", "weights"]
    for name, wish in wishes.items():
        told = namespace.model(name)["status"]["conversion"]
        assert (told["format"], told["convertedPerplexity"]) == (wish.lower(), "12.50")
        (volume,) = (
            one
            for one in namespace.get(BY_KIND["Deployment"], name)["spec"]["template"]["spec"]["volumes"]
            if one["name"] == "config"
        )
        document = json.loads(namespace.get(BY_KIND["ConfigMap"], volume["configMap"]["name"])["data"]["config.json"])
        assert document["model"]["converted"] == digests[wish.lower()]


async def test_a_draft_model_that_does_not_fit_is_refused_until_another_one_is_named(namespace: Namespace) -> None:
    def drafting(uri: str) -> Any:
        return {"speculation": {"method": "Draft", "model": {"uri": uri}}}

    async with client_of(namespace.server) as client, operating(client, only(namespace)):
        namespace.put_model(serving=drafting("hf://acme/other"))
        await eventually(namespace.finish_resolve)
        other = {**FACTS, "vocabularySize": 9, "digest": "sha256:other"}
        await eventually(lambda: namespace.finish_job("resolve", facts=other))
        await eventually(lambda: namespace.condition("ModelResolved")[1] == "DraftMismatch")
        assert not namespace.list(BY_KIND["Deployment"])
        namespace.put_model(serving=drafting("hf://acme/small"))
        await eventually(namespace.finish_resolve)
        await eventually(lambda: bool(namespace.list(BY_KIND["Deployment"])))
        status = namespace.model()["status"]
        assert status["draft"] == status["model"]


async def test_a_model_that_makes_vectors_gets_a_deployment_with_its_task_once_the_manifest_names_it(
    namespace: Namespace,
) -> None:
    facts = {**FACTS, "architecture": "BertModel", "task": "embed", "vectorSize": 192}
    async with client_of(namespace.server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await eventually(lambda: namespace.finish_job("resolve", facts=facts))
        await eventually(lambda: namespace.condition("ModelResolved")[1] == "UnsupportedArchitecture")
        assert not namespace.list(BY_KIND["Deployment"])
        namespace.put_model(serving={"task": "Embed"})
        await eventually(lambda: bool(namespace.list(BY_KIND["Deployment"])))
        (deployment,) = namespace.list(BY_KIND["Deployment"])
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        (mounted,) = (one["configMap"]["name"] for one in volumes if "configMap" in one)
        (document,) = (one for one in namespace.list(BY_KIND["ConfigMap"]) if one["metadata"]["name"] == mounted)
        assert json.loads(document["data"][names.CONFIG_KEY])["task"] == "embed"
        assert namespace.model()["status"]["plan"]["task"] == "Embed"


async def test_a_dozen_models_leave_a_shared_job_at_once_without_a_refused_write(
    server: ApiServer, namespace: Namespace
) -> None:
    models = [f"m{number}" for number in range(12)]
    job, keeper = BY_KIND["Job"], BY_KIND["ConfigMap"]

    def has_owners() -> bool:
        """Whether there is one Job or record, with enough owners. Models that join at the same time may be more."""
        owners = [len(owners_of(f)) for kind in (job, keeper) for f in namespace.list(kind) if is_shared(f)]
        return len(owners) == 1 and MAX_OWNERS <= owners[0] <= len(models)

    async with client_of(server) as client, operating(client, only(namespace, "--num-workers", "12")):
        for name in models:
            namespace.put_model(name)
        await eventually(has_owners)
        (first,) = namespace.list(job)
        since = time.time()
        for name in models:
            namespace.put_model(name, model={"uri": "file:///models/other"})
        await eventually(lambda: has_owners() and first["metadata"]["name"] not in namespace.children()["Job"])
    refused = [
        (event["verb"], event["objectRef"]["name"])
        for event in server.requests(OPERATOR_USER, since=since)
        if event["responseStatus"]["code"] == 409 and event["verb"] == "patch"
    ]
    assert refused == []


async def test_a_model_is_compiled_by_a_job_with_ever_more_memory_before_its_deployment_exists(
    server: ApiServer, namespace: Namespace
) -> None:
    def compile_jobs() -> list[str]:
        """With the least memory first."""
        jobs = [job for job in namespace.list(BY_KIND["Job"]) if job["metadata"]["name"].startswith("artifact-")]
        return [job["metadata"]["name"] for job in sorted(jobs, key=memory)]

    def memory(job: Any) -> Any:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        return parse_quantity(container["resources"]["limits"]["memory"])

    storage = json.dumps({"artifacts": {"persistentVolumeClaim": {"claimName": "compiled"}}})
    settings = run_settings("--watch-namespaces", namespace.name, "--storage", storage)
    artifact = {"key": "ab" * 32, "bytes": 7, "seconds": 31.6, "reused": False, "peakBytes": 9}
    async with client_of(server) as client, operating(client, settings):
        namespace.put_model(engine={"backend": "torch", "compile": "Enabled"})
        await eventually(namespace.finish_resolve)
        (small,) = await eventually(compile_jobs)
        assert namespace.list(BY_KIND["Deployment"]) == []
        namespace.end_job(small, {"exitCode": 137, "reason": "OOMKilled"})
        await eventually(lambda: len(compile_jobs()) == 2)
        assert namespace.condition("Compiled") == ("False", "Compiling")
        record = {"version": 1, "command": "compile", "ok": True, "artifact": artifact}
        namespace.end_job(compile_jobs()[1], {"exitCode": 0, "message": json.dumps(record)})
        await eventually(lambda: namespace.condition("UpToDate")[0] == "True", about=namespace.model)
    assert namespace.condition("Compiled") == ("True", "Compiled")
    assert namespace.model()["status"]["artifacts"] == [{"key": "ab" * 32, "state": "Ready", "seconds": 32}]
    (container,) = namespace.get(BY_KIND["Deployment"], "chat")["spec"]["template"]["spec"]["containers"]
    assert "--on-artifact-miss fail" in " ".join(container["command"])


async def test_the_cronjob_of_a_claim_has_all_models_as_owners_and_keeps_what_they_need(
    server: ApiServer, namespace: Namespace
) -> None:
    claim = {"weights": {"persistentVolumeClaim": {"claimName": "models"}}}
    resource, hub = BY_KIND["CronJob"], {"uri": "hf://acme/tiny"}

    def using(days: int) -> Any:
        return run_settings(
            *("--watch-namespaces", namespace.name, "--storage", json.dumps({**claim, "keepDays": days}))
        )

    def found() -> list[Any]:
        return namespace.list(resource)

    def owners() -> list[str]:
        return sorted(owner["name"] for made in found() for owner in owners_of(made))

    def command() -> list[str]:
        (made,) = found()
        (container,) = made["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        return list(container["command"])

    async with client_of(server) as client:
        async with operating(client, using(30)):
            namespace.put_model(model=hub)
            await eventually(namespace.finish_resolve)
            await eventually(lambda: owners() == ["chat"])
            namespace.put_model("other", model=hub)
            await eventually(lambda: owners() == ["chat", "other"])
            record = {"version": 1, "command": "fetch", "ok": True}
            record["weights"] = {"digest": "a" * 40, "bytes": 1, "readBytes": 1}
            metadata = {"name": "weights-1", "labels": found()[0]["metadata"]["labels"]}
            owner = found()[0]["metadata"]["ownerReferences"][0]
            metadata["ownerReferences"] = [{**owner, "name": "third", "uid": str(uuid.uuid4())}]
            kept = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
            kept["data"] = {"record.json": json.dumps(record)}
            server.call("POST", BY_KIND["ConfigMap"].path(namespace.name), kept)
            namespace.wake()
            await eventually(lambda: command()[-2:] == ["--keep", "a" * 40], about=command)
            assert owners() == ["chat", "other"]
            (made,) = found()
            namespace.patch(resource, made["metadata"]["name"], {"spec": {"suspend": True, "schedule": "* * * * *"}})
            await eventually(lambda: found()[0]["spec"]["schedule"] == made["spec"]["schedule"])
            assert found()[0]["spec"]["suspend"], "a field that the operator does not set is left to others"
            namespace.delete(resource, made["metadata"]["name"])
            await eventually(lambda: owners() == ["chat", "other"])
        async with operating(client, using(0)):
            await eventually(lambda: found() == [])


async def test_a_field_that_somebody_else_keeps_changing_is_named_and_written_ever_more_rarely(
    server: ApiServer, namespace: Namespace
) -> None:
    """As an autoscaler of the Deployment does, only faster."""
    deployments = BY_KIND["Deployment"]

    def scaled() -> bool:
        if namespace.get(deployments, "chat")["spec"]["replicas"] == 1:
            namespace.patch(deployments, "chat", {"spec": {"replicas": 3}})
        return namespace.condition() == ("False", "Contested")

    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(replicas=1)
        await namespace.settle()
        before = time.time()
        await eventually(scaled, about=namespace.model)
        check_says("contested", ready(namespace))
        await asyncio.sleep(3.0)
        assert calls(server, before).count(("patch", "deployments")) < 2 * NUM_AT_ONCE
        assert namespace.get(deployments, "chat")["spec"]["replicas"] == 3


async def test_writes_of_an_object_that_has_just_changed_are_repeated_and_no_contest(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As controllers change a Deployment whose pods a node refuses."""
    deployments = BY_KIND["Deployment"]
    num_lost = 2 * NUM_AT_ONCE

    async def apply(self: Client, resource: Resource, desired: Any, live: Any, *, plain: Any = Client.apply) -> Any:
        nonlocal num_lost
        if resource == deployments and num_lost > 0:
            num_lost -= 1
            namespace.patch(deployments, "chat", {"metadata": {"annotations": {"changed": str(num_lost)}}})
        return await plain(self, resource, desired, live)

    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(replicas=1)
        await namespace.settle()
        monkeypatch.setattr(Client, "apply", apply)
        namespace.patch(deployments, "chat", {"spec": {"replicas": 3}})
        await eventually(
            lambda: namespace.get(deployments, "chat")["spec"]["replicas"] == 1 and num_lost == 0, about=namespace.model
        )
        assert "Contested" not in {one["type"] for one in namespace.model()["status"]["conditions"]}


async def test_a_job_that_somebody_keeps_deleting_is_named_and_made_ever_more_rarely(
    server: ApiServer, namespace: Namespace
) -> None:
    def deleted() -> bool:
        for job in namespace.children()["Job"]:
            namespace.delete(BY_KIND["Job"], job)
        return namespace.condition() == ("False", "Contested")

    async with client_of(server) as client, operating(client, only(namespace)):
        before = time.time()
        namespace.put_model()
        await eventually(deleted, about=namespace.model)
        assert "somebody deletes it before it ends" in message(namespace, "Contested")
        await asyncio.sleep(3.0)
        assert calls(server, before).count(("create", "jobs")) <= NUM_AT_ONCE


async def test_of_two_installations_one_acts_in_a_namespace_and_the_other_takes_over_when_it_is_gone(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their images differ: each would take the other's Job for an outdated one."""
    monkeypatch.setattr(holding, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(holding, "ASK_SECONDS", 1.0)
    caplog.set_level(logging.WARNING, holding.logger.name)
    first = only(namespace)
    second = only(namespace, "--runtime-image", "example.com/runtime:2", "--namespace", Namespace(server).name)

    def writes(user: str = "") -> Counter[tuple[str, str]]:
        """Of one operator here, or of both."""
        here = [one for one in server.requests(user) if one["objectRef"].get("namespace") == namespace.name]
        made = [one for one in here if one.get("userAgent") == names.FIELD_MANAGER and one["verb"] in WRITES]
        return Counter((one["verb"], one["objectRef"]["resource"]) for one in made)

    def is_held(settings: RunSettings, image: str) -> bool:
        data = namespace.get(BY_KIND["ConfigMap"], names.HOLDING)["data"]
        jobs = namespace.list(BY_KIND["Job"])
        images = [job["spec"]["template"]["spec"]["containers"][0]["image"] for job in jobs]
        return bool(data["holder"] == settings.installation and images == [image])

    def num_foreign(operator: Operator) -> float | None:
        return operator.metrics.registry.get_sample_value("neuron_operator_foreign_namespaces")

    async with client_of(server) as one, client_of(server, "admin") as two:
        async with operating(one, first) as acting:
            namespace.put_model()
            await eventually(lambda: namespace.condition("ModelResolved")[1] == "Resolving", about=namespace.model)
            async with operating(two, second) as waiting:
                await eventually(lambda: writes("admin")["patch", "configmaps"] >= 2)
                assert set(writes("admin")) == {("patch", "configmaps")}, "only questions"
                assert is_held(first, "example.com/runtime:1")
                assert (num_foreign(acting), num_foreign(waiting)) == (0, 1)
                (told,) = caplog.messages
                assert told.endswith(f"is left alone: the operator {first.installation} acts there")
        async with operating(two, second) as waiting:
            await eventually(lambda: is_held(second, "example.com/runtime:2"), about=namespace.list_all)
            assert f"is taken over: the operator {first.installation} does not answer" in caplog.messages[-1]
            async with operating(one, first) as late:
                await eventually(lambda: num_foreign(late) == 1)
                await asyncio.sleep(holding.ANSWER_SECONDS + 1.0)
                assert is_held(second, "example.com/runtime:2")
                assert writes()["create", "jobs"] == 2


async def test_a_model_that_is_deleted_and_made_again_often_contests_nothing(
    server: ApiServer, namespace: Namespace
) -> None:
    """Its Jobs go with it."""

    def has_job() -> bool:
        namespace.collect_garbage()
        uid = namespace.model()["metadata"]["uid"]
        return any(job["metadata"]["ownerReferences"][0]["uid"] == uid for job in namespace.list(BY_KIND["Job"]))

    def is_accepted() -> bool:
        namespace.collect_garbage()
        return namespace.condition("Accepted")[0] == "True"

    async with client_of(server) as client, operating(client, only(namespace)):
        for _ in range(NUM_AT_ONCE + 2):
            namespace.put_model()
            await eventually(has_job, about=namespace.model)
            namespace.delete(NEURON_MODELS, "chat")
        namespace.put_model()
        await eventually(has_job, about=namespace.model)
        await eventually(is_accepted, about=namespace.model)


async def test_unneeded_children_are_deleted(server: ApiServer, namespace: Namespace) -> None:
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(model={"uri": "file:///models/other"})
        (other,) = await eventually(lambda: namespace.children()["Job"])
        namespace.put_model()
        await eventually(lambda: other not in namespace.children()["Job"])
        await namespace.settle()
        for length in range(100, 108):
            namespace.put_model(serving={"maxModelLength": length})
            await eventually(lambda n=length: namespace.model()["status"]["plan"].get("maxModelLength") == n)
            await eventually(lambda: namespace.condition("UpToDate")[0] == "True", about=namespace.model)
        await eventually(lambda: len(namespace.children()["ControllerRevision"]) == KEPT + 1)
        expected = KEPT + 2  # with the record of the facts
        await eventually(lambda: len(namespace.children()["ConfigMap"]) == expected, about=namespace.children)


async def test_an_object_that_the_api_server_refuses_is_reported_to_the_user(
    server: ApiServer, namespace: Namespace
) -> None:
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(podTemplate={"spec": {"nodeSelector": {"not a label!": "x"}}})
        await eventually(namespace.finish_resolve)
        await eventually(lambda: namespace.condition() == ("False", "InvalidSpec"))
        namespace.put_model()
        await eventually(lambda: namespace.condition("UpToDate")[0] == "True")


async def test_an_annotation_that_an_existing_service_cannot_have_is_reported(
    server: ApiServer, namespace: Namespace
) -> None:
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
        namespace.put_model(serviceTemplate={"metadata": {"annotations": {"not a key!": "x"}}})
        await eventually(lambda: namespace.condition() == ("False", "InvalidSpec"), about=namespace.model)
        assert "not a key!" in message(namespace, "Accepted")
        namespace.put_model()
        await eventually(lambda: namespace.condition("Accepted")[0] == "True", about=namespace.model)


async def test_the_claim_of_the_chart_is_made_once_and_outlives_the_models(
    server: ApiServer, namespace: Namespace
) -> None:
    """A claim of somebody else with that name is left alone and reported."""
    claims, jobs, name = BY_KIND["PersistentVolumeClaim"], BY_KIND["Job"], "neuron-serving-weights"
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}}
    theirs = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
    server.call("POST", claims.path(namespace.name), theirs)
    using = only(namespace, "--storage", '{"weights": {"pvcTemplate": {"storageClassName": "efs", "size": "1Ti"}}}')
    async with client_of(server) as client, operating(client, using):
        namespace.put_model(model={"uri": "hf://acme/tiny"})
        await eventually(namespace.finish_resolve)
        await eventually(lambda: namespace.condition() == ("False", "NameConflict"), about=namespace.model)
        assert [job["metadata"]["labels"][names.ROLE_LABEL] for job in namespace.list(jobs)] == ["resolve"]
        namespace.patch(claims, name, {"metadata": {"finalizers": None}})
        namespace.delete(claims, name)
        await eventually(lambda: not namespace.list(claims))
        namespace.wake()
        await eventually(namespace.finish_fetch, about=namespace.model)
        (claim,) = namespace.list(claims)
        assert claim["spec"]["storageClassName"] == "efs"
        assert owners_of(claim) == []
        await eventually(lambda: namespace.condition("UpToDate")[0] == "True", 20, about=namespace.model)
        (pod,) = (job["spec"]["template"]["spec"] for job in namespace.list(jobs) if "fetch" in str(job["metadata"]))
        assert {"name": "weights", "persistentVolumeClaim": {"claimName": name}} in pod["volumes"]
        namespace.patch(claims, name, {"metadata": {"labels": {"app.kubernetes.io/component": "mine"}}})
        namespace.wake()
        namespace.delete(NEURON_MODELS, "chat")
        await asyncio.sleep(1.0)
        assert len(namespace.list(claims)) == 1


async def test_a_claim_that_a_pass_did_not_see_is_left_as_it_is(server: ApiServer, namespace: Namespace) -> None:
    """An operator with an earlier size in its chart has just made it, and it is bound."""
    claims, name = BY_KIND["PersistentVolumeClaim"], "neuron-serving-weights"
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}, "storageClassName": "efs"}
    metadata = {"name": name, "labels": names.shared_labels("weights")}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
    made = server.call("POST", claims.path(namespace.name), {**claim, "spec": {**spec, "volumeName": "volume-1"}})

    def unseeing(world: World, settings: Settings) -> Decision:
        seen = tuple(found for found in world.shared if found["kind"] != claims.kind)
        return decide(replace(world, shared=seen), settings)

    using = only(namespace, "--storage", '{"weights": {"pvcTemplate": {"storageClassName": "efs", "size": "1Ti"}}}')
    before = time.time()
    async with client_of(server) as client, operating(client, using, decide=unseeing):
        namespace.put_model(model={"uri": "hf://acme/tiny"})
        await eventually(namespace.finish_resolve)
        await eventually(lambda: len(namespace.list(BY_KIND["Job"])) == 2, about=namespace.model)
        await eventually(lambda: namespace.condition() == ("False", "Fetching"), about=namespace.model)
    assert ("patch", claims.plural) not in calls(server, before)
    assert namespace.get(claims, name)["spec"] == made["spec"]


async def test_what_is_said_about_a_claim_that_is_not_bound_is_shown(server: ApiServer, namespace: Namespace) -> None:
    """Also where it is no warning."""
    name, said = "neuron-serving-weights", "waiting for a volume to be created by the external provisioner"
    using = only(namespace, "--storage", '{"weights": {"pvcTemplate": {"storageClassName": "efs", "size": "1Ti"}}}')
    async with client_of(server) as client, operating(client, using):
        namespace.put_model(model={"uri": "hf://acme/tiny"})
        await eventually(namespace.finish_resolve)
        await eventually(lambda: len(namespace.list(BY_KIND["Job"])) == 2, about=namespace.model)
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": "reported", "namespace": namespace.name},
            "type": "Normal",
            "reason": "ExternalProvisioning",
            "note": said,
            "action": "Provision",
            "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": "persistentvolume-controller",
            "reportingInstance": "persistentvolume-controller",
            "regarding": {"kind": "PersistentVolumeClaim", "namespace": namespace.name, "name": name},
        }
        server.call("POST", EVENTS.path(namespace.name), event)
        (job,) = (found for found in namespace.list(BY_KIND["Job"]) if found["metadata"]["name"].startswith("weights-"))
        namespace.wait_for_volume(job)
        await eventually(lambda: namespace.condition("WeightsReady") == ("False", "VolumeNotBound"))
        await eventually(
            lambda: f"claim {name}: ExternalProvisioning: {said}" in message(namespace, "WeightsReady"),
            about=namespace.model,
        )


async def test_a_long_message_of_wide_characters_is_announced(server: ApiServer, namespace: Namespace) -> None:
    word = "😀" * 60
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(
            accelerator={"instanceTypes": [word] * 8},
            engine={"backend": "torch", "args": [word] * 8, "overrideNeuronConfig": {word: word}},
        )
        (event,) = await eventually(lambda: namespace.list(EVENTS))
        assert event["reason"] == "FieldNotSupported"
        assert len(event["note"]) < 1000 < len(event["note"].encode())


@pytest.mark.parametrize("was_made_before", [False, True])
async def test_a_misspelt_field_of_the_pod_template_is_refused_and_named(
    server: ApiServer, namespace: Namespace, was_made_before: bool
) -> None:
    """In the create of the Deployment, and in an apply onto one that exists."""
    misspelt = "requiredDuringSchedulingIgnoredDuringExecutionn"
    affinity = {"podAntiAffinity": {misspelt: [{"topologyKey": "kubernetes.io/hostname"}]}}
    async with client_of(server) as client, operating(client, only(namespace)):
        if was_made_before:
            namespace.put_model()
            await namespace.settle()
        namespace.put_model(podTemplate={"spec": {"affinity": affinity}})
        await eventually(namespace.finish_resolve_once)
        await eventually(lambda: namespace.condition() == ("False", "InvalidSpec"), about=namespace.model)
        assert misspelt in message(namespace, "Accepted")
        assert len(namespace.children()["Deployment"]) == was_made_before
        namespace.put_model()
        await eventually(lambda: namespace.condition("UpToDate")[0] == "True", about=namespace.model)


async def test_a_start_waits_for_a_role_that_the_api_server_learns_of_late(server: ApiServer) -> None:
    denied = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no such role yet"}
    answers = [web.json_response(denied, status=403)]
    async with proxying(server) as proxy, client_of(server, via=proxy.url) as client:
        proxy.answer = lambda request: answers.pop() if answers else None
        assert not await refused_namespaces(client, ())
    assert answers == []


async def test_a_missing_right_sets_a_condition_until_it_is_granted(server: ApiServer, namespace: Namespace) -> None:
    def without_services() -> list[dict[str, Any]]:
        return [
            {**rule, "verbs": [v for v in rule["verbs"] if v != "create"]} if "services" in rule["resources"] else rule
            for rule in CLUSTER_RULES
        ]

    async with client_of(server) as client, operating(client, only(namespace)):
        await eventually(lambda: calls(server, 0))
        grant(server, without_services())
        try:
            await eventually(lambda: not may_write_services(server))
            namespace.put_model()
            await eventually(lambda: namespace.condition() == ("False", "OperatorForbidden"))
        finally:
            grant(server)
        await eventually(lambda: may_write_services(server))
        await namespace.settle()


async def test_a_quota_is_not_reported_as_a_missing_right(server: ApiServer, namespace: Namespace) -> None:
    set_quota(namespace, services=0)
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await eventually(lambda: namespace.condition() == ("False", "QuotaExceeded"), about=namespace.model)
        assert "Service chat: create services: services" in message(namespace, "Accepted")
        delete_quota(namespace)
        await eventually(lambda: namespace.condition("Accepted")[0] == "True")


async def test_an_admission_policy_is_reported_as_such(server: ApiServer, namespace: Namespace) -> None:
    """For the Deployment in `Accepted`, and for the pods that its ReplicaSet cannot create in `Available`."""
    async with client_of(server) as client, operating(client, only(namespace)):
        with denying(server, namespace, "apps", "deployments"):
            namespace.put_model()
            await eventually(namespace.finish_resolve)
            await eventually(lambda: namespace.condition() == ("False", "AdmissionDenied"), about=namespace.model)
            assert "deployments need a ticket; that is a policy" in message(namespace, "Accepted")
        namespace.wake()
        await eventually(lambda: namespace.condition("UpToDate")[0] == "True", about=namespace.model)
        with denying(server, namespace, "", "pods"), pytest.raises(urllib.error.HTTPError) as denied:
            namespace.start_pod("chat-0", {})
        text = json.loads(denied.value.__notes__[0])["message"]
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": text}
        path = f"{BY_KIND['Deployment'].path(namespace.name, 'chat')}/status"
        server.call("PATCH", path, {"status": {"conditions": [failure]}}, "application/merge-patch+json")
        await eventually(lambda: namespace.condition("Available") == ("False", "AdmissionDenied"))
        assert "pods need a ticket; that is a policy" in message(namespace, "Available")


async def test_nothing_is_created_in_a_namespace_that_is_being_deleted(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_operator.decide.course.RECHECK_SECONDS", 0.5)
    namespace.put_model()
    namespace.patch(NEURON_MODELS, "chat", {"metadata": {"finalizers": ["example.com/kept"]}})
    server.call("DELETE", f"/api/v1/namespaces/{namespace.name}", {})
    async with client_of(server) as client, operating(client, only(namespace)):
        await eventually(lambda: namespace.condition() == ("False", "NamespaceTerminating"), about=namespace.model)
        check_says("namespace-terminating", ready(namespace))
        before = time.time()
        await asyncio.sleep(2.0)
        later = [call for call in calls(server, before) if call[0] in WRITES and call[1] != "leases"]
    assert set(later) == {("create", "services")}
    assert len(later) <= 5, "one write for each new attempt"
    assert namespace.children() == {kind: [] for kind in BY_KIND}
    assert namespace.list(EVENTS) == []


async def test_the_status_shows_the_number_of_free_devices(
    server: ApiServer, namespace: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = {"aws.amazon.com/neuron": "6"}
    labels = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": namespace.name, "labels": labels}}
    server.call("POST", "/api/v1/nodes", node)
    status = {"capacity": devices, "allocatable": devices, "conditions": [{"type": "Ready", "status": "True"}]}
    merge = "application/merge-patch+json"
    server.call("PATCH", f"/api/v1/nodes/{namespace.name}/status", {"status": status}, merge)
    # As the node controller does: the API server gives a new node the taint not-ready.
    server.call("PATCH", f"/api/v1/nodes/{namespace.name}", {"spec": {"taints": None}}, merge)
    limits = {"limits": {"aws.amazon.com/neuron": "4"}}
    container = {"name": "c", "image": "i", "resources": limits}
    holder = {"metadata": {"name": "holder"}, "spec": {"nodeName": namespace.name, "containers": [container]}}
    server.call("POST", PODS.path(namespace.name), {"apiVersion": "v1", "kind": "Pod", **holder})
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    (tmp_path / "model.yaml").write_text(json.dumps(body({"model": {"uri": "hf://acme/tiny"}})))
    files = ["-f", str(tmp_path / "model.yaml"), "--facts", str(tmp_path / "facts.json")]
    flags = ["plan", *files, "--cluster", "--kubeconfig", str(server.kubeconfig(OPERATOR_USER))]
    assert await asyncio.to_thread(main, flags) == 0
    assert "1 Neuron device of inf2.24xlarge, about $1.08 per hour (free on a node of" in capsys.readouterr().out
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(accelerator={"type": "Neuron", "devices": 6}, replicas=1)
        await namespace.settle()
        template = namespace.get(BY_KIND["Deployment"], "chat")["spec"]["template"]
        pod = {"metadata": {"name": "chat-0", "labels": template["metadata"]["labels"]}, "spec": template["spec"]}
        server.call("POST", PODS.path(namespace.name), {"apiVersion": "v1", "kind": "Pod", **pod})
        unschedulable = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "1 Insufficient aws.amazon.com/neuron.",
        }
        pending = {"status": {"phase": "Pending", "conditions": [unschedulable]}}
        server.call("PATCH", PODS.path(namespace.name, "chat-0", "status"), pending, merge)
        await eventually(lambda: namespace.condition() == ("False", "InsufficientNeuron"), about=namespace.model)
    assert "6 Neuron devices" in message(namespace, "Available")
    assert f"{namespace.name} 2" in message(namespace, "Available")


async def test_a_model_that_keeps_failing_costs_at_most_four_requests_a_minute(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs more devices than the two nodes have. Thirty times as fast: a minute is two seconds."""
    monkeypatch.setattr("neuron_operator.decide.course.RECHECK_SECONDS", 1.0)
    monkeypatch.setattr("neuron_operator.decide.course.MAX_RECHECK_SECONDS", 10.0)
    monkeypatch.setattr("neuron_operator.cluster.on_demand.FREE_DEVICES_SECONDS", 0.1)
    merge, devices = "application/merge-patch+json", {"aws.amazon.com/neuron": "1"}
    for number in range(2):
        name = f"{namespace.name}-{number}"
        server.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        status = {"capacity": devices, "allocatable": devices, "conditions": [{"type": "Ready", "status": "True"}]}
        server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, merge)
    text = "2 Insufficient aws.amazon.com/neuron."
    pending = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}

    asked = partial(unasked, server)
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(accelerator={"type": "Neuron", "devices": 6}, replicas=1)
        await namespace.settle()
        template = namespace.get(BY_KIND["Deployment"], "chat")["spec"]["template"]
        pod = {"metadata": {"name": "chat-0", "labels": template["metadata"]["labels"]}, "spec": template["spec"]}
        server.call("POST", PODS.path(namespace.name), {"apiVersion": "v1", "kind": "Pod", **pod})
        unscheduled = {"status": {"phase": "Pending", "conditions": [pending]}}
        server.call("PATCH", PODS.path(namespace.name, "chat-0", "status"), unscheduled, merge)
        await eventually(lambda: namespace.condition() == ("False", "InsufficientNeuron"), about=namespace.model)
        before = time.time()
        await eventually(lambda: len([call for call in asked(before) if call == ("list", "nodes")]) >= 2)
        aged = [{**found, "lastTransitionTime": long_ago()} for found in namespace.model()["status"]["conditions"]]
        path = NEURON_MODELS.path(namespace.name, "chat", "status")
        server.call("PATCH", path, {"status": {"conditions": aged}}, merge)
        await asyncio.sleep(2.0)
        before = time.time()
        await asyncio.sleep(6.0)
        assert len(asked(before)) <= 4 * 3, asked(before)


async def test_a_model_is_not_ready_by_pods_of_an_earlier_model_of_its_name(
    server: ApiServer, namespace: Namespace
) -> None:
    """The garbage collector, which is not running, has deleted what the first owned, but not yet its ReplicaSet."""

    def answer(pod: str) -> None:
        """Plays the Deployment controller and the kubelet: a ready pod of a ReplicaSet."""
        deployment = namespace.get(BY_KIND["Deployment"], "chat")
        template, selector = deployment["spec"]["template"], deployment["spec"]["selector"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat", "uid": deployment["metadata"]["uid"]}
        metadata = {"name": f"set-of-{pod}", "labels": template["metadata"]["labels"], "ownerReferences": [owner]}
        spec = {"replicas": 1, "selector": selector, "template": template}
        made = server.call(
            "POST",
            REPLICA_SETS.path(namespace.name),
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": metadata, "spec": spec},
        )
        namespace.start_pod(pod, finished_or_ready(template))
        between = {**owner, "kind": "ReplicaSet", "name": metadata["name"], "uid": made["metadata"]["uid"]}
        namespace.patch(PODS, pod, {"metadata": {"ownerReferences": [between]}})

    async with client_of(server) as client:
        async with operating(client, only(namespace)):
            namespace.put_model(replicas=1)
            await namespace.settle()
            answer("chat-0")
            await eventually(lambda: namespace.condition() == ("True", "Ready"), about=namespace.model)
        namespace.delete(NEURON_MODELS, "chat")
        for resource in BY_KIND.values():
            for child in namespace.list(resource):
                if names.MODEL_LABEL in child["metadata"]["labels"]:
                    namespace.delete(resource, child["metadata"]["name"])
        namespace.put_model(replicas=1)
        async with operating(client, only(namespace)):
            await eventually(lambda: namespace.condition("Available") == ("False", "Loading"), about=namespace.model)
            await eventually(lambda: namespace.list(BY_KIND["Deployment"]))
            assert namespace.model()["status"]["ready"] == "0/1"
            answer("chat-1")
            await eventually(lambda: namespace.condition() == ("True", "Ready"), about=namespace.model)
            assert namespace.model()["status"]["ready"] == "1/1"


async def test_pods_that_stay_refused_cost_at_most_four_requests_a_minute(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is two hours old. Six times as fast: a minute is ten seconds. Attempts differ by whole seconds."""
    for name, seconds in (("LEAST", 2), ("MOST", 20)):
        monkeypatch.setattr(f"neuron_operator.decide.nudge.{name}", timedelta(seconds=seconds / 6))
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: q"}
        failure |= {"lastTransitionTime": long_ago()}
        path = BY_KIND["Deployment"].path(namespace.name, "chat", "status")
        server.call("PATCH", path, {"status": {"conditions": [failure]}}, "application/merge-patch+json")
        await eventually(lambda: namespace.condition() == ("False", "QuotaExceeded"), about=namespace.model)
        await asyncio.sleep(1.0)
        before = time.time()
        await asyncio.sleep(15.0)
        asked = unasked(server, before)
    assert 1 <= len(asked) <= 4 * 1.5, asked
    assert set(asked) == {("patch", "deployments")}


async def test_a_secret_that_stays_away_costs_at_most_four_requests_a_minute(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has waited for two hours. Thirty times as fast: a minute is two seconds."""
    for name, value in {"MIN_RECHECK": 2, "AWAITED": 40, "RECHECK": 30, "MAX_RECHECK": 300}.items():
        monkeypatch.setattr(f"neuron_operator.decide.course.{name}_SECONDS", value / 30)
    monkeypatch.setattr("neuron_operator.why.pods.UNEXPLAINED_POD_SECONDS", 0)
    monkeypatch.setattr("neuron_operator.cluster.on_demand.EVENTS_SECONDS", EVENTS_SECONDS / 30)
    monkeypatch.setattr("neuron_operator.cluster.on_demand.EXISTS_SECONDS", EXISTS_SECONDS / 30)
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model()
        await namespace.settle()
        container = {"name": "runtime", "image": "i", "imageID": "i", "restartCount": 0, "ready": False}
        creating = {**container, "state": {"waiting": {"reason": "ContainerCreating"}}}
        namespace.start_pod("chat-0", {"phase": "Pending", "containerStatuses": [creating]})
        note = 'MountVolume.SetUp failed for volume "api-key" : secret "keys" not found'
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace.name, "name": "chat-0"}
        server.call("POST", EVENTS.path(namespace.name), warning("FailedMount", note, about))
        await eventually(lambda: namespace.condition() == ("False", "SecretNotFound"), about=namespace.model)
        aged = [{**found, "lastTransitionTime": long_ago()} for found in namespace.model()["status"]["conditions"]]
        path = NEURON_MODELS.path(namespace.name, "chat", "status")
        server.call("PATCH", path, {"status": {"conditions": aged}}, "application/merge-patch+json")
        await asyncio.sleep(2.0)
        before = time.time()
        await asyncio.sleep(6.0)
        asked = unasked(server, before)
        assert 1 <= len(asked) <= 4 * 3, asked
        assert set(asked) == {("create", "secrets"), ("list", "events")}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}}
        server.call("POST", f"/api/v1/namespaces/{namespace.name}/secrets", secret)
        await eventually(lambda: "deletionTimestamp" in namespace.get(PODS, "chat-0")["metadata"])


def long_ago() -> str:
    return (datetime.now(UTC) - timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")


def unasked(server: ApiServer, since: float) -> list[tuple[str, str]]:
    """The operator's requests that no change called for: neither the Event of a change, which may be posted late, nor
    the list of names that follows each list of kopf, which may come after the model."""
    made = [call for call in calls(server, since) if call[0] != "watch" and call[1] != "leases"]
    return [call for call in made if call not in (("create", "events"), ("list", NEURON_MODELS.plural))]


def warning(reason: str, note: str, about: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": uuid.uuid4().hex, "namespace": about["namespace"]},
        "type": "Warning",
        "reason": reason,
        "note": note,
        "action": "Start",
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "test",
        "reportingInstance": "test",
        "regarding": about,
    }


async def test_pods_that_a_node_refused_pause_the_deployment_until_the_next_attempt(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_operator.why.pods.FIRST_DELAY", timedelta(seconds=4))

    def replicas() -> int:
        return int(namespace.get(BY_KIND["Deployment"], "chat")["spec"]["replicas"])

    def names() -> set[str]:
        return {pod["metadata"]["name"] for pod in namespace.list(PODS)} - {job["metadata"]["name"] for job in jobs}

    async with client_of(server) as client:
        async with operating(client, only(namespace)):
            namespace.put_model()
            await namespace.settle()
            jobs = namespace.list(BY_KIND["Job"])
            for name in ("a", "b", "c", "d"):
                namespace.start_pod(f"chat-{name}", REFUSED)
            await eventually(lambda: names() == {"chat-a", "chat-d"} and replicas() == 0, about=names)
            await eventually(lambda: namespace.condition() == ("False", "AllocationRejected"), about=namespace.model)
        async with operating(client, only(namespace)):  # a new one continues
            await eventually(lambda: replicas() == 1)
            assert names() == {"chat-a", "chat-d"}
            for name in names():
                namespace.delete(PODS, name)
            await eventually(lambda: replicas() == 2)


async def test_a_model_reports_the_failed_nodes_of_its_replicas_and_ends_none(
    server: ApiServer, namespace: Namespace
) -> None:
    sick, lost, well = (f"{namespace.name}-{one}" for one in "abc")

    def say(node: str, kind: str, status: str, reason: str) -> None:
        said = {"type": kind, "status": status, "reason": reason, "lastTransitionTime": f"{datetime.now(UTC):%FT%TZ}"}
        path = f"/api/v1/nodes/{node}/status"
        strategic = "application/strategic-merge-patch+json"
        server.call("PATCH", path, {"status": {"conditions": [said]}}, strategic)

    for name in (sick, lost, well):
        server.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        devices = {"aws.amazon.com/neuron": "6"}
        path = f"/api/v1/nodes/{name}/status"
        status = {"status": {"capacity": devices, "allocatable": devices}}
        server.call("PATCH", path, status, "application/merge-patch+json")
        say(name, "Ready", "True", "KubeletReady")
    async with client_of(server) as client, operating(client, run_settings()):
        namespace.put_model(accelerator={"type": "Neuron", "devices": 6}, replicas=3)
        await namespace.settle()
        template = namespace.get(BY_KIND["Deployment"], "chat")["spec"]["template"]
        for name in (sick, lost, well):
            running = {**finished_or_ready(template), "startTime": f"{datetime.now(UTC):%FT%TZ}"}
            namespace.start_pod(name, running, node=name)
        await eventually(lambda: namespace.condition() == ("True", "Ready"), about=namespace.model)
        say(sick, "NeuronHealth", "True", "NeuronHasError_DMA_ERROR")
        text = f"pod {sick} is on node {sick}, which reports NeuronHealth: NeuronHasError_DMA_ERROR"
        await eventually(lambda: text in message(namespace, "Available"), about=namespace.model)
        assert namespace.condition() == ("True", "Ready")
        say(lost, "Ready", "Unknown", "NodeStatusUnknown")
        unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
        server.call("PATCH", PODS.path(namespace.name, lost, "status"), unready, "application/merge-patch+json")
        await eventually(lambda: namespace.condition() == ("False", "NodeLost"), about=namespace.model)
        say(sick, "NeuronHealth", "False", "NeuronHasNoError")
        await eventually(lambda: text not in message(namespace, "Available"), about=namespace.model)
        pods = {pod["metadata"]["name"]: pod["metadata"] for pod in namespace.list(PODS)}
        assert {sick, lost, well} <= {name for name, metadata in pods.items() if "deletionTimestamp" not in metadata}
    for name in (sick, lost, well):
        server.call("DELETE", f"/api/v1/nodes/{name}", {})


async def test_a_revision_that_does_not_get_ready_is_undone_and_so_is_one_on_request(
    server: ApiServer, namespace: Namespace
) -> None:
    """The operator dies right after it told of the failure; the next one undoes it."""
    deployment, since = BY_KIND["Deployment"], "2026-01-01T00:00:00Z"

    def revision() -> str:
        return str(namespace.get(deployment, "chat")["spec"]["template"]["metadata"]["labels"][names.REVISION_LABEL])

    def pod_status(ready: bool) -> dict[str, Any]:
        conditions = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": since},
            {"type": "Ready", "status": str(ready), "lastTransitionTime": since},
        ]
        ended = {"exitCode": 1, "reason": "Error", "message": "no such flag", "finishedAt": since}
        crashed = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}}
        running = {"state": {"running": {"startedAt": since}}, "lastState": {}}
        container = {"name": "runtime", "image": "i", "imageID": "i", "ready": ready, "restartCount": 3}
        container |= running if ready else crashed
        return {"phase": "Running", "conditions": conditions, "containerStatuses": [container]}

    def annotate(value: str | None) -> None:
        namespace.patch(NEURON_MODELS, "chat", {"metadata": {"annotations": {names.ROLLBACK_ANNOTATION: value}}})

    stop = asyncio.Event()

    def decide_until_told(world: World, settings: Settings) -> Decision:
        if world.body.get("status", {}).get("failedRevision"):
            stop.set()
            raise RuntimeError("killed")
        return decide(world, settings)

    async with client_of(server) as client:
        async with operating(client, only(namespace), decide=decide_until_told):
            namespace.put_model(replicas=1)
            await namespace.settle()
            working = revision()
            namespace.start_pod("chat-a", pod_status(ready=True))
            await eventually(lambda: namespace.model()["status"].get("currentRevision") == working)
            namespace.put_model(replicas=1, serving={"maxModelLength": 99})
            await eventually(namespace.finish_check)
            await eventually(lambda: revision() != working)
            failed = revision()
            namespace.delete(PODS, "chat-a")
            namespace.start_pod("chat-b", pod_status(ready=False))
            await stop.wait()
            assert revision() == failed
        async with operating(client, only(namespace)):
            await eventually(lambda: revision() == working, about=namespace.model)
            await eventually(lambda: namespace.condition("UpToDate") == ("False", "RolledBack"))
            namespace.delete(PODS, "chat-b")
            namespace.start_pod("chat-c", pod_status(ready=True))
            await eventually(lambda: namespace.condition() == ("False", "RolledBack"))
            newest, before = namespace.model()["status"]["history"]
            assert (newest["revision"], newest["state"]) == (failed, "RolledBack")
            assert "no such flag" in newest["message"]
            assert (before["revision"], before["state"]) == (working, "Serving")
            namespace.put_model(replicas=1, serving={"maxModelLength": 98})
            await eventually(namespace.finish_check)
            await eventually(lambda: revision() not in (working, failed), about=namespace.model)
            wanted = revision()
            assert "failedRevision" not in namespace.model()["status"]
            annotate(working)
            await eventually(lambda: revision() == working)
            await eventually(lambda: namespace.condition("UpToDate") == ("False", "RolledBack"))
            annotate(None)  # its Job has answered already
            await eventually(lambda: revision() == wanted)


async def test_a_configuration_that_the_runtime_refuses_changes_no_deployment(
    server: ApiServer, namespace: Namespace
) -> None:
    """With one replica, which would end before another starts."""
    rollout = {"strategy": "Replace"}
    refusal = {"exitCode": 2, "reason": "InvalidEngineConfig", "message": "$.text.chatTemplate: no valid template"}
    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(replicas=1, rollout=rollout)
        await namespace.settle()
        ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
        container = {"name": "runtime", "image": "i", "imageID": "i", "ready": True, "restartCount": 0}
        namespace.start_pod("chat-a", {"phase": "Running", "conditions": ready, "containerStatuses": [container]})
        await eventually(lambda: namespace.condition()[0] == "True", about=namespace.model)
        before = namespace.get(BY_KIND["Deployment"], "chat")["spec"]
        namespace.put_model(replicas=1, rollout=rollout, serving={"chatTemplate": "{% if %}"})
        (job,) = await eventually(lambda: namespace.unfinished("check"))
        await eventually(lambda: namespace.condition("UpToDate") == ("False", "Checking"))
        record = json.dumps({"version": 1, "command": "serve", "ok": False, **refusal})
        namespace.end_job(job["metadata"]["name"], {"exitCode": 2, "message": record})
        await eventually(lambda: namespace.condition("UpToDate") == ("False", "InvalidEngineConfig"))
        assert message(namespace, "UpToDate").startswith("$.text.chatTemplate: no valid template; ")
        assert namespace.condition("Available")[0] == "True"
        assert namespace.get(BY_KIND["Deployment"], "chat")["spec"] == before
        namespace.put_model(replicas=1, rollout=rollout, serving={"maxModelLength": 99})
        await eventually(namespace.finish_check)
        await eventually(lambda: namespace.get(BY_KIND["Deployment"], "chat")["spec"] != before)


async def test_an_event_explains_a_child_without_another_reason(
    server: ApiServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_operator.cluster.on_demand.EVENTS_SECONDS", 1.0)
    async with client_of(server) as client, operating(client, only(namespace), now=minutes_ahead):
        namespace.put_model()
        (job,) = await eventually(lambda: namespace.list(BY_KIND["Job"]))
        await eventually(lambda: "has not been created" in message(namespace, "ModelResolved"))
        named = {key: job["metadata"][key] for key in ("namespace", "name", "uid")}
        about = {"apiVersion": "batch/v1", "kind": "Job", **named}
        event = warning("FailedCreate", "pods are forbidden: exceeded quota", about)
        server.call("POST", EVENTS.path(namespace.name), event)
        await asyncio.sleep(1.0)  # events are read rarely
        namespace.wake()
        await eventually(lambda: "exceeded quota" in message(namespace, "ModelResolved"))


async def test_the_progress_of_a_running_job_is_shown_from_its_log_and_bounds_the_writes(
    server: ApiServer, namespace: Namespace
) -> None:
    line = "neuron-runtime: hf://acme/tiny: 3.90 GiB of 15.30 GiB (26%)"

    def writes() -> list[tuple[str, str]]:
        return [call for call in calls(server, before) if call[0] in WRITES and call[1] not in ("leases", "events")]

    async with (
        kubelet(server, namespace, lambda: f"{line}\nwarnings.warn(\n") as asked,
        client_of(server) as client,
        operating(client, only(namespace)),
    ):
        begin = time.monotonic()
        namespace.put_model()
        await eventually(lambda: namespace.start_resolve("resolve-0", namespace.name))
        shown = "reading the model's configuration: hf://acme/tiny: 3.90 GiB of 15.30 GiB (26%)"
        await eventually(lambda: message(namespace, "Ready").startswith(shown), about=namespace.model)
        before = time.time()
        for _ in range(20):  # changes read no log and write no status
            namespace.wake()
            await asyncio.sleep(0.05)
        line = line.replace("(26%)", "(27%)")
        await eventually(lambda: "(27%); see docs/" in message(namespace, "Ready"))
        seconds = time.monotonic() - begin
        await eventually(writes)  # the server logs a request some time after its answer
    assert 2 <= len(asked) <= 2 + seconds / LOG_SECONDS
    assert asked[0] == (f"/containerLogs/{namespace.name}/resolve-0/runtime", "limitBytes=16384&tailLines=20")
    assert writes() == [("patch", "neuronmodels")]


async def test_without_the_right_to_read_logs_a_running_job_has_its_usual_message(
    server: ApiServer, namespace: Namespace
) -> None:
    without = [rule for rule in CLUSTER_RULES if rule["resources"] != ["pods/log"]]
    grant(server, without)
    try:
        wait_until("the right is withdrawn", lambda: not server.may(OPERATOR_USER, "get", "pods", subresource="log"))
        async with (
            kubelet(server, namespace, lambda: "neuron-runtime: secret\n") as asked,
            client_of(server) as client,
            operating(client, only(namespace)),
        ):
            namespace.put_model()
            await eventually(lambda: namespace.start_resolve("resolve-0", namespace.name))
            await eventually(lambda: ("get", "pods") in calls(server, 0)[-20:])
            await namespace.settle()
    finally:
        grant(server)
        wait_until("the rights are in force", lambda: server.may(OPERATOR_USER, "get", "pods", subresource="log"))
    assert asked == []


async def test_the_operator_honours_retry_after(server: ApiServer, namespace: Namespace) -> None:
    refused: list[float] = []

    def too_many(request: web.Request) -> web.Response | None:
        if request.method != "POST" or not request.path.endswith("/services") or len(refused) == 3:
            return None
        refused.append(asyncio.get_running_loop().time())
        status = {"kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "too many requests"}
        return web.json_response(status, status=429, headers={"Retry-After": "1"})

    async with proxying(server) as proxy, client_of(server, via=proxy.url) as client:
        proxy.answer = too_many
        async with operating(client, only(namespace)):
            namespace.put_model()
            await eventually(lambda: refused)
            for _ in range(10):  # changes do not shorten the delay
                namespace.wake()
                await asyncio.sleep(0.05)
            await namespace.settle()
    assert len(refused) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(refused)) >= 1.0


@pytest.mark.parametrize("version_is_gone", [False, True])
async def test_deletions_during_a_silently_broken_watch_are_detected(
    server: ApiServer, namespace: Namespace, version_is_gone: bool
) -> None:
    """If the resource version is known the watch reports them; if it has expired (410) a new list does."""
    woken: list[Key] = []

    def gone(request: web.Request) -> web.Response | None:
        if "watch" not in request.query or not version_is_gone or lists:
            return None
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        return web.json_response(status, status=410)

    def count(plural: str, how: str) -> None:
        if how == "list":
            lists.append(plural)

    lists: list[str] = []
    resource = BY_KIND["ConfigMap"]
    labels = names.labels("chat")
    for name in ("a", "b", "c"):
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}}
        server.call("POST", resource.path(namespace.name), body)
    async with proxying(server) as proxy, client_of(server, via=proxy.url, watch_silence_seconds=1.0) as client:
        caches = Caches(client, [namespace.name], wake=lambda key, _: woken.append(key), count_start=count)
        task = asyncio.create_task(caches.run())
        await caches.wait_synced()
        key = (namespace.name, "chat")
        assert len(caches.children(key)) == 3
        await asyncio.sleep(0.2)
        lists.clear()
        proxy.answer = gone
        proxy.silence()
        for name in ("a", "c"):
            namespace.delete(resource, name)
        woken.clear()
        await eventually(lambda: [child["metadata"]["name"] for child in caches.children(key)] == ["b"])
        assert key in woken
        assert bool(lists) == version_is_gone
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_of_two_replicas_leads_and_the_other_takes_over(server: ApiServer, namespace: Namespace) -> None:
    users = [OPERATOR_USER, "admin"]
    async with (
        client_of(server, users[0]) as first,
        client_of(server, users[1]) as second,
        operating(second, only(namespace, identity="b", lease=LEASE)) as b,
    ):
        async with operating(first, only(namespace, identity="a", lease=LEASE)) as a:
            await eventually(lambda: a.is_leading or b.is_leading)
            await asyncio.sleep(1.5)
            assert a.is_leading != b.is_leading
            namespace.put_model()
            await namespace.settle()
            leader = lease(server)["spec"]["holderIdentity"]
            assert leader.startswith("a_" if a.is_leading else "b_")
        await eventually(lambda: b.is_leading)
        namespace.delete(BY_KIND["Service"], "chat")
        await eventually(lambda: namespace.children()["Service"])


async def test_the_lease_is_renewed_while_passes_block_their_event_loop(
    server: ApiServer, namespace: Namespace
) -> None:
    def renewed() -> str:
        path = LEASES.path(OPERATOR_NAMESPACE, "neuron-operator")
        return str(server.call("GET", path)["spec"]["renewTime"])

    settings = only(namespace, lease=LEASE)
    async with (
        client_of(server) as client,
        operating(client, settings, connect_lease=partial(client_of, server)) as operator,
    ):
        await eventually(lambda: operator.is_leading)
        times = {renewed()}
        wait_until("the lease is renewed", lambda: len(times) > 2 or times.add(renewed()))
        assert operator.is_leading


async def test_a_lease_edited_by_others_is_still_renewed(server: ApiServer, namespace: Namespace) -> None:
    async with client_of(server) as client, operating(client, only(namespace, lease=LEASE)) as operator:
        await eventually(lambda: operator.is_leading)
        path = LEASES.path(OPERATOR_NAMESPACE, "neuron-operator")
        touch = {"metadata": {"annotations": {"example.com/note": namespace.name}}}
        touched = server.call("PATCH", path, touch, "application/merge-patch+json")
        await eventually(lambda: lease(server)["spec"]["renewTime"] > touched["spec"]["renewTime"])
        await asyncio.sleep(LEASE.deadline_seconds)
        assert operator.is_leading


async def test_a_leader_without_connection_stops_before_another_leads(server: ApiServer, namespace: Namespace) -> None:
    async with client_of(server) as first, client_of(server, "admin") as second:
        cut = CutOff(first)
        settings = only(namespace, identity="a", lease=LEASE)
        async with operating(cut, settings, configuration=first.configuration) as a:
            await eventually(lambda: a.is_leading)
            async with operating(second, only(namespace, identity="b", lease=LEASE)) as b:
                await asyncio.sleep(0.5)
                cut.is_cut = True
                led_by = []
                while not b.is_leading:
                    led_by.append(a.is_leading)
                    await asyncio.sleep(0.01)
                assert led_by[0]
                assert not led_by[-1]
                assert not a.is_leading
                cut.is_cut = False
                await asyncio.sleep(1.0)
                assert b.is_leading
                assert not a.is_leading


async def test_a_leader_frozen_past_its_term_writes_nothing_before_it_leads_again(
    server: ApiServer, namespace: Namespace
) -> None:
    """As after SIGSTOP and SIGCONT: the pass goes on where it was."""
    timings = LeaseTimings(duration_seconds=3, deadline_seconds=2, renew_seconds=0.5, retry_seconds=0.2)
    async with client_of(server) as client:
        freezing = Freezing(client, seconds=timings.deadline_seconds + 0.5)
        async with operating(freezing, only(namespace, lease=timings)):
            namespace.put_model()
            await eventually(lambda: freezing.afterwards)
            assert freezing.afterwards[0] == LEASES
            await namespace.settle()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_late_write_of_an_earlier_leader_has_no_effect(
    server: ApiServer, namespace: Namespace, is_first: bool
) -> None:
    """Sent on time and held up on the way: only the API server can refuse it."""
    deployment = BY_KIND["Deployment"]
    async with client_of(server) as client:
        async with operating(client, only(namespace)):
            namespace.put_model()
            await namespace.settle()
            if not is_first:  # an apply after the create
                namespace.put_model(replicas=3)
                await eventually(lambda: namespace.get(deployment, "chat")["spec"]["replicas"] == 3)
        seen = namespace.get(deployment, "chat")
        late = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "chat", "namespace": namespace.name},
        }
        namespace.patch(deployment, "chat", {"spec": {"replicas": 4}})  # the next leader
        with pytest.raises(Conflict):
            await client.apply(deployment, {**late, "spec": {"replicas": 1}}, seen)
    assert namespace.get(deployment, "chat")["spec"]["replicas"] == 4


async def test_a_group_gets_a_secret_once_and_is_ended_with_one_deletion(
    server: ApiServer, namespace: Namespace
) -> None:
    stateful_set, flags = BY_KIND["StatefulSet"], ("--groups", '{"restartSeconds": 0}')
    async with client_of(server) as client, operating(client, only(namespace, *flags)):
        namespace.put_model(replicas=1, parallelism={"nodes": 2})
        await eventually(namespace.finish_resolve)
        first, followers = await eventually(lambda: pair(namespace.list(stateful_set)))
        name = first["metadata"]["name"]
        secrets = Resource("v1", "Secret", "secrets")
        secret = await eventually(lambda: found_one(namespace.list(secrets), name))
        assert len(base64.b64decode(secret["data"][names.GROUP_SECRET_KEY])) == 64
        assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [first["metadata"]["uid"]]
        assert followers["metadata"]["ownerReferences"][0]["uid"] == first["metadata"]["uid"]
        await eventually(lambda: found_one(namespace.list(BY_KIND["Service"]), name))
        # The next attempt's name is taken by somebody else.
        taken = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": f"{name[:-1]}2"}}
        spec = {key: first["spec"][key] for key in ("serviceName", "selector", "template")}
        server.call("POST", stateful_set.path(namespace.name), {**taken, "spec": {**spec, "replicas": 0}})
        template = followers["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name}-f-1", "labels": template["metadata"]["labels"]},
            "spec": {**template["spec"], "nodeName": "n1"},
        }
        server.call("POST", PODS.path(namespace.name), pod)
        status = {
            "phase": "Running",
            "containerStatuses": [
                {
                    "name": "runtime",
                    "image": "i",
                    "imageID": "i",
                    "ready": True,
                    "restartCount": 1,
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                    "lastState": {"terminated": {"exitCode": 33, "message": "the step failed"}},
                }
            ],
        }
        path = PODS.path(namespace.name, f"{name}-f-1", "status")
        server.call("PATCH", path, {"status": status}, "application/merge-patch+json")
        await eventually(lambda: namespace.condition("Accepted") == ("False", "NameConflict"))
        assert name not in [found["metadata"]["name"] for found in namespace.list(stateful_set)]
        (record,) = namespace.model()["status"]["groups"]
        assert (record["state"], record["restarts"]) == ("Failed", 1)
        assert "on node n1" in record["message"]
        namespace.delete(stateful_set, f"{name[:-1]}2")
        namespace.wake()
        await eventually(lambda: found_one(namespace.list(stateful_set), f"{name[:-1]}2-f"))


def pair(found: list[Any]) -> list[Any] | None:
    return sorted(found, key=lambda one: len(one["metadata"]["name"])) if len(found) == 2 else None


def found_one(found: list[Any], name: str) -> Any:
    return next((one for one in found if one["metadata"]["name"] == name), None)


async def test_an_adapter_without_a_model_says_so(server: ApiServer, namespace: Namespace) -> None:
    about = {"apiVersion": NEURON_ADAPTERS.api_version, "kind": NEURON_ADAPTERS.kind, "metadata": {"name": "voice"}}
    path = NEURON_ADAPTERS.path(namespace.name, "voice")
    server.apply(path, {**about, "spec": {"model": "chat", "uri": "hf://acme/voice"}})

    def reasons() -> set[str]:
        return {one["reason"] for one in server.call("GET", path).get("status", {}).get("conditions", ())}

    async with client_of(server) as client, operating(client, only(namespace)):
        await eventually(lambda: reasons() == {"NoSuchModel"}, about=reasons)


async def test_scale_has_a_selector_and_counts_replicas_that_load(server: ApiServer, namespace: Namespace) -> None:
    """Autoscalers ask for both at zero, and before the first revision: without a selector they do nothing, and
    replicas that load count, or they add more meanwhile."""

    def scale() -> tuple[int, int, bool]:
        found = server.call("GET", NEURON_MODELS.path(namespace.name, "chat", "scale"))
        selector = "neuron-serving.dev/model=chat,neuron-serving.dev/role=leader"
        spec, status = found["spec"], found["status"]
        return spec.get("replicas", 0), status["replicas"], status.get("selector") == selector

    async with client_of(server) as client, operating(client, only(namespace)):
        namespace.put_model(replicas=0)
        await eventually(lambda: namespace.condition("ModelResolved")[0] == "False")
        assert scale() == (0, 0, True)
        await namespace.settle()
        assert namespace.condition("Available") == ("True", "ScaledToZero")
        assert scale() == (0, 0, True)
        namespace.patch(NEURON_MODELS, "chat", {"spec": {"replicas": 1}})
        await eventually(lambda: namespace.condition("Available")[0] == "False")
        namespace.start_pod("chat-a", {"phase": "Running"})
        await eventually(lambda: scale() == (1, 1, True), about=scale)
        assert namespace.condition("Available") == ("False", "Loading")


async def test_idle_replicas_are_taken_away_through_scale(server: ApiServer, namespace: Namespace) -> None:
    idle = [20.0]
    async with (
        client_of(server) as client,
        operating(client, only(namespace)),
        replica("127.7.8.1", [], lambda: idle[-1]),
        replica("127.7.8.2", [], lambda: 7200),
    ):
        namespace.put_model(replicas=2, idle={"afterSeconds": 3600})
        await namespace.settle()
        for number in (1, 2):
            namespace.start_pod(f"chat-{number}", _ready_since("2026-01-01T00:00:00Z", f"127.7.8.{number}"))
        await eventually(lambda: namespace.condition() == ("True", "Ready"), about=namespace.model)
        assert namespace.model()["spec"]["replicas"] == 2, "one has had a request 20 s ago"
        status = namespace.model()["status"]["scaling"]
        asked = instant(status["activeAt"])
        assert asked is not None
        assert abs((datetime.now(UTC) - asked).total_seconds() - 20) < WAIT_SECONDS

        idle.append(7200)
        namespace.patch(NEURON_MODELS, "chat", {"spec": {"idle": {"afterSeconds": 60}}})  # it has been asked just now
        told = {"status": {"scaling": {**status, "activeAt": "2026-01-01T00:00:00Z"}}}
        path = NEURON_MODELS.path(namespace.name, "chat", "status")
        server.call("PATCH", path, told, "application/merge-patch+json")
        await eventually(lambda: namespace.model()["spec"]["replicas"] == 0, about=namespace.model)
        await eventually(lambda: namespace.get(BY_KIND["Deployment"], "chat")["spec"]["replicas"] == 0)
        await eventually(lambda: "no request since" in str(namespace.model()["status"]), about=namespace.model)
        await eventually(lambda: "ScaledDown" in {event["reason"] for event in namespace.list(EVENTS)})


async def test_a_scale_of_somebody_else_is_not_undone(server: ApiServer, namespace: Namespace) -> None:
    """A gateway wakes the model in the moment in which the operator ends its replicas."""
    async with client_of(server) as client:
        namespace.put_model(replicas=2)
        before = namespace.model()
        namespace.patch(NEURON_MODELS, "chat", {"spec": {"replicas": 3}})
        with pytest.raises(Conflict):
            await client.scale(NEURON_MODELS, before, 0)
        assert namespace.model()["spec"]["replicas"] == 3
        await client.scale(NEURON_MODELS, namespace.model(), 1)
        assert namespace.model()["spec"]["replicas"] == 1


def _ready_since(time: str, address: str) -> dict[str, Any]:
    """The status of a pod."""
    true = {"status": "True", "lastTransitionTime": time}
    ready = [{"type": kind, **true} for kind in ("PodScheduled", "Ready", "ContainersReady")]
    container = {"name": "runtime", "image": "i", "imageID": "i", "ready": True, "restartCount": 0}
    running = {**container, "state": {"running": {"startedAt": time}}}
    ips = {"podIP": address, "podIPs": [{"ip": address}]}
    return {"phase": "Running", "conditions": ready, "containerStatuses": [running], **ips}


async def test_every_granted_right_is_used_and_no_request_lacks_one(server: ApiServer) -> None:
    """Runs last: compares the requests of the tests above with the rights that the chart grants."""
    granted = {
        (group, resource, verb)
        for rule in (*CLUSTER_RULES, *LEASE_RULES)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used = set()
    for event in server.requests(OPERATOR_USER):
        ref = event["objectRef"]
        resource = f"{ref['resource']}/{ref['subresource']}" if "subresource" in ref else ref["resource"]
        used.add((ref.get("apiGroup", ""), resource, event["verb"]))
    assert used <= granted
    assert granted - used == set()


async def test_what_was_put_while_no_operator_ran_is_explained_when_one_starts(
    server: ApiServer, namespace: Namespace
) -> None:
    cases = [case for case in refused_manifests.REFUSED["cases"] if case["by"] == "operator"]
    for number, case in enumerate(cases):
        about = {"apiVersion": NEURON_MODELS.api_version, "kind": NEURON_MODELS.kind}
        metadata = {"name": f"m-{number}", "namespace": namespace.name}
        spec = refused_manifests.spec_with(case["spec"])
        server.call("POST", NEURON_MODELS.path(namespace.name), {**about, "metadata": metadata, "spec": spec})

    def unexplained() -> list[str]:
        found = namespace.list(NEURON_MODELS)
        return [
            model["metadata"]["name"]
            for model in found
            if not any(c["status"] == "False" and c["message"] for c in model.get("status", {}).get("conditions", ()))
        ]

    async with client_of(server) as client, operating(client, only(namespace)):
        await eventually(lambda: not unexplained(), about=unexplained)
    for number, case in enumerate(cases):
        assert namespace.condition("Accepted", f"m-{number}")[0] == "False", case


async def test_with_roles_in_its_namespaces_the_operator_lacks_only_the_nodes(
    server: ApiServer, namespace: Namespace
) -> None:
    """A ClusterRole is not needed with `watchNamespaces`; all but the nodes that it lists is in these namespaces."""

    def may(where: str) -> bool:
        return server.may(OPERATOR_USER, "create", "services", namespace=where)

    grant(server, namespaces=[namespace.name])
    try:
        await eventually(lambda: may(namespace.name) and not may("default"))
        before = time.time()
        async with client_of(server) as client, operating(client, only(namespace)):
            namespace.put_model()
            await namespace.settle()
            namespace.put_model(replicas=3)
            namespace.delete(BY_KIND["Service"], "chat")
            deployment = BY_KIND["Deployment"]
            await eventually(lambda: namespace.get(deployment, "chat")["spec"]["replicas"] == 3)
            await eventually(lambda: namespace.children()["Service"])
        refused = {
            event["objectRef"]["resource"]
            for event in server.requests(OPERATOR_USER, since=before)
            if event["responseStatus"]["code"] == 403
        }
        assert refused <= {"nodes"}
    finally:
        grant(server)
        await eventually(lambda: may_write_services(server))


@pytest.mark.parametrize("is_alone", [False, True], ids=["one of two", "the only one"])
async def test_a_namespace_that_loses_its_role_leaves_the_others_alone_and_comes_back_with_it(
    server: ApiServer,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_alone: bool,
) -> None:
    """As one that was deleted and made again."""
    for module in (client_module, handlers):
        monkeypatch.setattr(module, "WATCH_SECONDS", 2)
    monkeypatch.setattr(handlers, "BACKOFF_SECONDS", (0.5, 0.5))
    gone, resource = Namespace(server), BY_KIND["Service"]
    spaces = [gone] if is_alone else [namespace, gone]
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{gone.name}/rolebindings/{OPERATOR_ACCOUNT}-models"
    grant(server, namespaces=[one.name for one in spaces])
    try:
        await eventually(lambda: server.may(OPERATOR_USER, "create", "services", namespace=gone.name))
        settings = run_settings("--watch-namespaces", ",".join(one.name for one in spaces))
        with free_ports(1) as port:
            async with (
                client_of(server) as client,
                operating(client, settings) as operator,
                serving(operator, operator.metrics, "127.0.0.1", port),
                aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
            ):

                async def state() -> tuple[int, str, float | None]:
                    async with http.get("/readyz") as answer:
                        count = operator.metrics.registry.get_sample_value("neuron_operator_refused_namespaces")
                        return answer.status, await answer.text(), count

                for one in spaces:
                    one.put_model()
                await eventually(lambda: all(one.list(resource) for one in spaces))
                assert await state() == (200, "leading: True\n", 0)
                server.call("DELETE", role)
                told = f"permission to watch services in namespace {gone.name} was withdrawn"
                await eventually(lambda: told in caplog.text)
                await asyncio.sleep(4.0)
                lost = f"leading: True\nmay not be watched: {gone.name}\n"
                assert await state() == (503 if is_alone else 200, lost, 1)
                for one in spaces:
                    one.put_model("second")
                if not is_alone:
                    await eventually(lambda: len(namespace.list(resource)) == 2, about=namespace.list_all)
                assert len(gone.list(resource)) == 1
                grant(server)
                await eventually(lambda: len(gone.list(resource)) == 2, about=gone.list_all)
                await eventually(lambda: not operator.refused)
                assert await state() == (200, "leading: True\n", 0)
    finally:
        grant(server)
        await eventually(lambda: may_write_services(server))


class CutOff:
    """A client with a network that can be cut: requests fail, open watches end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name == "watch":
            return lambda *args, **kwargs: self._watch(method(*args, **kwargs))

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return await method(*args, **kwargs)

        return call

    def _check(self) -> None:
        if self.is_cut:
            raise Unreachable("cut off", retriable=True)

    async def _watch(self, events: Any) -> Any:
        self._check()
        try:
            pending = asyncio.ensure_future(anext(events))
            while True:
                done, _ = await asyncio.wait((pending,), timeout=0.05)
                self._check()
                if done:
                    try:
                        yield pending.result()
                    except StopAsyncIteration:
                        return
                    pending = asyncio.ensure_future(anext(events))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            await events.aclose()


class Freezing:
    """A client that stops the whole process for some seconds after its first write besides the Lease; `afterwards` has
    the resources of the writes that follow."""

    def __init__(self, client: Client, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._is_frozen = False
        self.afterwards: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name not in ("create", "replace", "apply", "apply_status", "delete"):
            return method

        async def write(resource: Any, *args: Any) -> Any:
            if self._is_frozen:
                self.afterwards.append(resource)
            answer = await method(resource, *args)
            if not self._is_frozen and resource != LEASES:
                self._is_frozen = True
                time.sleep(self._seconds)
            return answer

        return write


@contextlib.asynccontextmanager
async def kubelet(
    server: ApiServer, namespace: Namespace, log: Callable[[], str]
) -> AsyncIterator[list[tuple[str, str]]]:
    """A node named after the namespace, whose kubelet answers every request of the API server with `log()`; the
    requests."""
    asked: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path, request.query_string))
        return web.Response(text=log())

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(server.ca_file, server.ca_file.with_suffix(".key"))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    port = runner.addresses[0][1]
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": namespace.name}}
    await asyncio.to_thread(server.call, "POST", "/api/v1/nodes", node)
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    path, merge = f"/api/v1/nodes/{namespace.name}/status", "application/merge-patch+json"
    await asyncio.to_thread(server.call, "PATCH", path, {"status": status}, merge)
    try:
        yield asked
    finally:
        await asyncio.to_thread(server.call, "DELETE", f"/api/v1/nodes/{namespace.name}")
        await runner.cleanup()


@contextlib.contextmanager
def denying(server: ApiServer, namespace: Namespace, group: str, resource: str) -> Iterator[None]:
    """A policy that denies a resource in the namespace."""
    name = f"{namespace.name}-{resource}"
    root = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
    paths = (f"{root}ies", f"{root}ybindings")
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}}
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}
    specs: tuple[dict[str, Any], ...] = (
        {
            "matchConstraints": {"resourceRules": [rule], **where},
            "validations": [{"expression": "false", "message": f"{resource} need a ticket"}],
        },
        {"policyName": name, "validationActions": ["Deny"]},
    )
    for path, kind, spec in zip(paths, ("Policy", "PolicyBinding"), specs, strict=True):
        body = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": f"ValidatingAdmission{kind}"}
        server.call("POST", path, {**body, "metadata": {"name": name}, "spec": spec})

    def is_denied() -> bool:
        kinds = {"deployments": ("apps/v1", "Deployment"), "pods": ("v1", "Pod")}
        api_version, kind = kinds[resource]
        container = {"name": "c", "image": "i"}
        pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}}
        spec = {"selector": {"matchLabels": {"a": "b"}}, "template": pod} if kind == "Deployment" else pod["spec"]
        body = {"apiVersion": api_version, "kind": kind, "metadata": {"name": "probe"}, "spec": spec}
        at = next(r for r in (*BY_KIND.values(), PODS) if r.kind == kind).path(namespace.name)
        try:
            server.call("POST", f"{at}?dryRun=All", body)
        except urllib.error.HTTPError as error:
            return error.code == 422
        return False

    try:
        wait_until("the policy is in force", is_denied)
        yield
    finally:
        for path in reversed(paths):
            server.call("DELETE", f"{path}/{name}", {})
        wait_until("the policy is gone", lambda: not is_denied())


def ready(namespace: Namespace) -> Any:
    return next(c for c in namespace.model()["status"]["conditions"] if c["type"] == "Ready")


def message(namespace: Namespace, kind: str) -> str:
    conditions = namespace.model().get("status", {}).get("conditions", ())
    return next((str(c["message"]) for c in conditions if c["type"] == kind), "")


def minutes_ahead() -> datetime:
    """A clock that is minutes ahead, so that new objects seem old."""
    return datetime.now(UTC) + timedelta(minutes=5)


def lease(server: ApiServer) -> Any:
    return server.call("GET", LEASES.path(OPERATOR_NAMESPACE, "neuron-operator"))


def contains(live: Any, wanted: Any) -> bool:
    """Whether `live` equals `wanted`, ignoring versions, field ownership and status."""
    return without_versions(live) == without_versions(wanted)
