"""Runs operators in this process against a real API server, cuts them off and observes them, and plays the missing
controllers (the Job controller, kubelets)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
import urllib.error
import uuid
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import yaml
from kopf._cogs.clients.auth import APIContext
from kubernetes.aio.client import Configuration

from cluster.rig.machine import WAIT_SECONDS, wait_until
from cluster.rig.needs import NotPossibleHere
from helpers import apiserver
from helpers.apiserver import ApiServer
from helpers.operator_rights import OPERATOR_ACCOUNT, OPERATOR_NAMESPACE, ensure_namespace, grant
from neuron_operator.api import names
from neuron_operator.cluster.client import (
    CHILDREN,
    NEURON_ADAPTERS,
    NEURON_MODELS,
    PODS,
    WATCH_SILENCE_SECONDS,
    Client,
    Resource,
    connect,
)
from neuron_operator.cluster.lease import LeaseTimings
from neuron_operator.run import settings as settings_module
from neuron_operator.run.handlers import Poster, run_kopf
from neuron_operator.run.metrics import Metrics
from neuron_operator.run.process import Operator
from neuron_operator.run.settings import RunSettings

CRDS = Path(__file__).parents[2] / "crds"
OPERATOR_USER = apiserver.service_account(OPERATOR_NAMESPACE, OPERATOR_ACCOUNT)
USERS = (OPERATOR_USER, *(apiserver.service_account(OPERATOR_NAMESPACE, f"other-{n}") for n in range(2)))
BY_KIND = {resource.kind: resource for resource in CHILDREN}

SPEC = {
    "model": {"uri": "file:///models/demo"},
    "replicas": 2,
    "accelerator": {"type": "CPU"},
    "engine": {"backend": "torch", "env": [{"name": "GREETING", "value": "héllo <&> \u2028 \x7f\x85\ufeff 😀"}]},
}
FACTS = {
    "architecture": "LlamaForCausalLM",
    "modelType": "llama",
    "parameters": 1000,
    "weightsBytes": 2000,
    "dtype": "bfloat16",
    "numLayers": 2,
    "hiddenSize": 64,
    "numHeads": 4,
    "numKvHeads": 2,
    "headDim": 16,
    "vocabularySize": 512,
    "maxPositionEmbeddings": 512,
    "digest": "sha256:" + "0" * 64,
}

Found = TypeVar("Found")


@contextlib.contextmanager
def served(
    folder: Path, bodies_of: tuple[str, ...] = (), host: str = ApiServer.host, flags: tuple[str, ...] = ()
) -> Iterator[ApiServer]:
    """An API server with the CRDs and the operator's rights; skips the test if its programs cannot be built."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(apiserver.running(folder, USERS, bodies_of, host, flags))
        except NotPossibleHere as reason:
            pytest.skip(str(reason))
        grant(server)
        for crd in (yaml.safe_load(file.read_text()) for file in sorted(CRDS.glob("*.yaml"))):
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
            server.apply(path, crd)
        until_served(server)
        yield server


def until_served(server: ApiServer) -> None:
    wait_until("the resources are served", lambda: all(serves(server, kind) for kind in RESOURCES))
    wait_until("the rights are in force", lambda: may_write_services(server))


RESOURCES = (NEURON_MODELS, NEURON_ADAPTERS)


def serves(server: ApiServer, resource: Resource = NEURON_MODELS) -> bool:
    """Whether the server serves the resource: with a delay after creation and deletion of the CRD."""
    try:
        server.call("GET", resource.path(None))
    except urllib.error.HTTPError as error:
        if error.code not in apiserver.NOT_YET_SERVED:
            raise
        return False
    return True


def may_write_services(server: ApiServer) -> bool:
    """Whether the rights of the last `grant` are in force, checked by one of them."""
    return server.may(OPERATOR_USER, "create", "services")


class Namespace:
    """A fresh namespace, read and edited as admin."""

    def __init__(self, server: ApiServer, name: str = "") -> None:
        self.server = server
        self.name = name or f"t-{uuid.uuid4().hex[:8]}"
        ensure_namespace(server, self.name)

    def put_model(self, name: str = "chat", **changes: Any) -> Any:
        body = {
            "apiVersion": NEURON_MODELS.api_version,
            "kind": NEURON_MODELS.kind,
            "metadata": {"name": name, "namespace": self.name},
            "spec": {**SPEC, **changes},
        }
        return self.server.apply(NEURON_MODELS.path(self.name, name), body, "user")

    def put_adapter(self, name: str = "support-de", **changes: Any) -> Any:
        spec = {"model": "chat", "uri": f"file:///adapters/{name}", **changes}
        about = {"apiVersion": names.API_VERSION, "kind": names.ADAPTER_KIND, "metadata": {"name": name}}
        return self.server.apply(NEURON_ADAPTERS.path(self.name, name), {**about, "spec": spec}, "user")

    def model(self, name: str = "chat") -> Any:
        return self.get(NEURON_MODELS, name)

    def condition(self, kind: str = "Ready", name: str = "chat") -> tuple[str, str]:
        """Status and reason; empty strings while the condition is missing."""
        conditions = self.model(name).get("status", {}).get("conditions", ())
        return next(((c["status"], c["reason"]) for c in conditions if c["type"] == kind), ("", ""))

    def get(self, resource: Resource, name: str) -> Any:
        return self.server.call("GET", resource.path(self.name, name))

    def list(self, resource: Resource) -> list[Any]:
        """Without the ConfigMap that names the operator: no model has it."""
        items = self.server.call("GET", resource.path(self.name))["items"]
        return [item for item in items if item["metadata"]["name"] != names.HOLDING]

    def patch(self, resource: Resource, name: str, patch: Any) -> Any:
        """A manual edit."""
        return self.server.call("PATCH", resource.path(self.name, name), patch, "application/merge-patch+json")

    def delete(self, resource: Resource, name: str) -> Any:
        return self.server.call("DELETE", resource.path(self.name, name), {"propagationPolicy": "Background"})

    def wake(self, name: str = "chat") -> None:
        """An edit without effect on the model, which triggers the operator."""
        self.patch(NEURON_MODELS, name, {"metadata": {"annotations": {"test/woken": uuid.uuid4().hex}}})

    def children(self) -> dict[str, Any]:
        """Names by kind."""
        return {resource.kind: [item["metadata"]["name"] for item in self.list(resource)] for resource in CHILDREN}

    def collect_garbage(self) -> None:
        """Plays the garbage collector: deletes children of models that are gone. A pass that was at work when its model
        was deleted may still create some, so call this until nothing is wrong any more."""
        uids = {model["metadata"]["uid"] for model in self.list(NEURON_MODELS)}
        for resource in CHILDREN:
            for child in self.list(resource):
                owners = {owner["uid"] for owner in child["metadata"].get("ownerReferences", ())}
                if owners and not owners & uids:
                    self.delete(resource, child["metadata"]["name"])

    def list_all(self) -> Any:
        """Children, and the statuses of the models."""
        return self.children(), {m["metadata"]["name"]: m.get("status") for m in self.list(NEURON_MODELS)}

    def start_resolve(self, name: str, node: str) -> bool:
        """Plays Job controller and kubelet: the pod of the resolve Job runs on `node`. False while the Job is
        missing."""
        jobs = self.list(BY_KIND["Job"])
        for job in jobs:
            self._put_job_pod(job, name, {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "Running", nodeName=node)
        return bool(jobs)

    def finish_resolve(self) -> bool:
        """Plays Job controller and kubelet: a pod of the resolve Job ends with a record. False while the Job is
        missing."""
        return self.finish_job("resolve", facts=FACTS)

    def finish_fetch(self) -> bool:
        """The same for the Job that fetches weights."""
        return self.finish_job("fetch", weights={"digest": FACTS["digest"], "bytes": 2000, "readBytes": 2000})

    def finish_check(self) -> bool:
        """The same for the Job that checks the configuration of an edit."""
        return self.finish_job("check")

    def unfinished(self, role: str) -> Sequence[Any]:
        """The Jobs of a step that `finish_job` has not ended yet."""
        ended = {pod["metadata"]["name"] for pod in self.list(PODS)}
        jobs = [job for job in self.list(BY_KIND["Job"]) if job["metadata"]["labels"][names.ROLE_LABEL] == role]
        return [job for job in jobs if job["metadata"]["name"] not in ended]

    def finish_job(self, role: str, **result: Any) -> bool:
        jobs = self.unfinished(role)
        record = json.dumps({"version": 1, "command": role, "ok": True, **result})
        for job in jobs:
            ended = {"terminated": {"exitCode": 0, "message": record}}
            self._put_job_pod(job, job["metadata"]["name"], ended, "Succeeded")
        return bool(jobs)

    def end_job(self, name: str, state: dict[str, Any]) -> None:
        """Plays Job controller and kubelet: the pod of a Job ends so."""
        phase = "Failed" if state["exitCode"] else "Succeeded"
        self._put_job_pod(self.get(BY_KIND["Job"], name), name, {"terminated": state}, phase)

    def wait_for_volume(self, job: Any) -> None:
        """Plays Job controller and scheduler: the pod of a Job has a claim that is not bound."""
        name = job["metadata"]["name"]
        self._put_job_pod(job, name, {"waiting": {}}, "Pending")
        text = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
        status = {"status": {"conditions": [unscheduled], "containerStatuses": []}}
        self.server.call("PATCH", PODS.path(self.name, name, "status"), status, "application/merge-patch+json")

    def _put_job_pod(self, job: Any, pod: str, state: dict[str, Any], phase: str, **spec: str) -> None:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        metadata = {"name": pod, "labels": template["metadata"]["labels"], "ownerReferences": [owner]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**template["spec"], **spec}}
        self.server.call("POST", PODS.path(self.name), body)
        container = {
            "name": template["spec"]["containers"][0]["name"],
            "image": "image",
            "imageID": "id",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
        status = {"status": {"phase": phase, "containerStatuses": [container]}}
        self.server.call("PATCH", PODS.path(self.name, pod, "status"), status, "application/merge-patch+json")

    def start_pod(self, name: str, status: dict[str, Any], model: str = "chat", node: str = "n1") -> None:
        """Plays the ReplicaSet and the kubelet: a pod of the Deployment with a status."""
        template = self.get(BY_KIND["Deployment"], model)["spec"]["template"]
        pod = {"metadata": {"name": name, "labels": template["metadata"]["labels"]}, "spec": template["spec"]}
        pod["spec"] = {**pod["spec"], "nodeName": node}
        self.server.call("POST", PODS.path(self.name), {"apiVersion": "v1", "kind": "Pod", **pod})
        path = PODS.path(self.name, name, "status")
        self.server.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    def finish_resolve_once(self) -> bool:
        """`finish_resolve` unless already done; True when done."""
        return bool(self.list(PODS)) or self.finish_resolve()

    def has_served(self, name: str = "chat") -> bool:
        """Writes into the status that all replicas have served once; True when the operator has noticed."""
        status = self.model(name)["status"]
        if not status.get("currentRevision"):
            told = {"status": {"currentRevision": status["updateRevision"]}}
            path = NEURON_MODELS.path(self.name, name, "status")
            self.server.call("PATCH", path, told, "application/merge-patch+json")
        return any(one["state"] == "Serving" for one in status.get("history", ()))

    async def settle(self, name: str = "chat") -> None:
        """Waits until the model is resolved and rendered; no pods are created."""
        await eventually(self.finish_resolve)
        await eventually(lambda: self.condition("UpToDate", name)[0] == "True", about=lambda: self.model(name))


VERSIONS = ("resourceVersion", "managedFields", "generation", "uid", "creationTimestamp")


def without_versions(obj: Any) -> Any:
    metadata = {key: value for key, value in obj["metadata"].items() if key not in VERSIONS}
    content = {
        key: value for key, value in obj.items() if key not in ("status", "kind", "apiVersion")
    }  # missing in list items
    return {**content, "metadata": metadata}


def shape(namespace: Namespace) -> Any:
    """All objects of a namespace, without values that differ between namespaces."""
    found = []
    for resource in (*BY_KIND.values(), NEURON_MODELS):
        for item in namespace.list(resource):
            clean = without_versions(item)
            for owner in clean["metadata"].get("ownerReferences", ()):
                del owner["uid"]
            # Of the deployment controller: how often it saw another template.
            clean["metadata"].get("annotations", {}).pop("deployment.kubernetes.io/revision", None)
            if resource.kind == "Job":
                clean = {"metadata": {"name": item["metadata"]["name"]}}  # the server copies its UID into other objects
            if resource.kind == "CronJob":
                del clean["spec"]["schedule"]  # differs by namespace
            if resource.kind == "Service":
                for key in ("clusterIP", "clusterIPs"):
                    clean["spec"].pop(key)
            if resource == NEURON_MODELS:
                conditions = item["status"]["conditions"]
                clean["status"] = {c["type"]: (c["status"], c["reason"]) for c in conditions}
            found.append(clean)
    return json.loads(json.dumps(found).replace(namespace.name, "NAMESPACE"))


def is_ready(namespace: Namespace, name: str = "chat") -> bool:
    """The newest spec serves with all its replicas."""
    model = namespace.model(name)
    status, generation = model.get("status", {}), model["metadata"]["generation"]
    num = model["spec"]["replicas"]
    true = {c["type"] for c in status.get("conditions", ()) if c["status"] == "True"}
    return (
        status.get("observedGeneration") == generation
        and status["ready"] == f"{num}/{num}"
        and {"Ready", "UpToDate"} <= true
    )


async def eventually(
    check: Callable[[], Found], seconds: float = WAIT_SECONDS, about: Callable[[], object] = lambda: ""
) -> Found:
    """Polls until `check` returns a true value. Fails with its last value and the result of `about`.

    It pauses for a tenth of the time that has passed: most of what is awaited comes at once, and what takes long costs
    few requests.
    """
    began = time.monotonic()
    while True:
        found = check()
        if found:
            return found
        passed = time.monotonic() - began
        assert passed < seconds, f"still {found!r} after {seconds} s; {about()}"
        await asyncio.sleep(min(max(passed / 10, 0.05), 0.5))


def run_settings(*flags: str, identity: str = "one", lease: LeaseTimings | None = None) -> RunSettings:
    loaded = settings_module.load(
        ["--runtime-image", "example.com/runtime:1", "--namespace", OPERATOR_NAMESPACE, "--identity", identity, *flags],
        {},
    )
    return dataclasses.replace(loaded, lease=lease or loaded.lease)


@contextlib.asynccontextmanager
async def client_of(
    server: ApiServer, user: str = OPERATOR_USER, via: str | None = None, **options: Any
) -> AsyncIterator[Client]:
    """A client as `user`; `via` is the URL of a proxy."""
    try:
        async with connect(str(server.kubeconfig(user, via)), **options) as client:
            yield client
    finally:  # the Lease's own thread always ends by cancellation
        _abort_closing_connections()
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn


def _abort_closing_connections() -> None:
    """Closes the sockets of TLS connections that wait for the server's close_notify, for up to 30 s if it is busy.

    A socket that outlives its event loop is reported in whatever test happens to run when it is collected.
    """
    for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
        protocol = transport.get_protocol()
        if isinstance(protocol, SSLProtocol) and (app := protocol._app_transport) and app.is_closing():
            transport.abort()


_SESSIONS: ContextVar[list[aiohttp.ClientSession]] = ContextVar("the sessions of the kopf that this task belongs to")
_begin_context = APIContext.__init__


def _remember_session(context: APIContext, *arguments: Any) -> None:
    """Kopf leaves a session open if it is stopped while it logs in or begins a request."""
    _begin_context(context, *arguments)
    if (sessions := _SESSIONS.get(None)) is not None:
        sessions.append(context.session)


APIContext.__init__ = _remember_session  # type: ignore[assignment, method-assign]


@contextlib.asynccontextmanager
async def operating(
    cluster: Client,
    settings: RunSettings,
    *,
    configuration: Configuration | None = None,
    silence_seconds: float = WATCH_SILENCE_SECONDS,
    **options: Any,
) -> AsyncIterator[Operator]:
    """A running replica, shut down cleanly at the end. `configuration` is kopf's; None: that of `cluster`, a client."""
    poster = Poster()
    operator = Operator(cluster, settings, Metrics(), post=poster.post, **options)
    connection = configuration or cluster.configuration
    task = asyncio.create_task(operator.run())
    try:
        async with delivering(operator, settings, connection, poster, silence_seconds):
            yield operator
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def delivering(
    operator: Operator, settings: RunSettings, configuration: Configuration, poster: Poster, silence_seconds: float
) -> AsyncIterator[None]:
    """Kopf on a thread of its own: at its end it cancels all tasks of its event loop that are younger than itself."""
    loop, ended = asyncio.get_running_loop(), threading.Event()

    def deliver(kind: str | None, model: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the test is over
            loop.call_soon_threadsafe(operator.caches.deliver, kind, model)

    async def wait() -> None:
        while not ended.is_set():
            await asyncio.sleep(0.02)

    async def run() -> None:
        sessions: list[aiohttp.ClientSession] = []
        _SESSIONS.set(sessions)
        try:
            await run_kopf(
                wait,
                configuration,
                deliver=deliver,
                poster=poster,
                namespaces=settings.watch_namespaces,
                identity=settings.identity,
                silence_seconds=silence_seconds,
            )
        finally:
            for session in sessions:
                await session.close()
            _abort_closing_connections()
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="kopf")
    thread.start()
    try:
        yield
        assert thread.is_alive(), "kopf has ended"
    finally:
        ended.set()
        await asyncio.to_thread(thread.join)
