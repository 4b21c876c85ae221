"""Kubernetes' own controllers on an API server of a test, and a played kubelet: pods run without nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import urllib.error
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from aiohttp import web

from cluster.rig import binaries
from helpers.apiserver import ApiServer
from helpers.operator_worlds import ADAPTER_FACTS
from helpers.operators import FACTS, Namespace
from neuron_operator.api import names
from neuron_operator.cluster.client import PODS

CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "statefulset-controller",
    "job-controller",
    "garbage-collector-controller",
    "resourceclaim-controller",
)
RESULTS: dict[str, Any] = {
    "resolve": {"facts": FACTS, "adapter": ADAPTER_FACTS},
    "fetch": {"weights": {"digest": FACTS["digest"], "bytes": 2000, "readBytes": 2000}},
    "compile": {"artifact": {"key": "ab" * 32, "bytes": 7, "seconds": 31.6, "reused": False, "peakBytes": 9}},
    "check": {},
}
"""What a Job of each role leaves in its record."""

Status = dict[str, Any]


@contextlib.contextmanager
def controlling(
    server: ApiServer,
    through: str | None = None,
    controllers: Sequence[str] = CONTROLLERS,
    flags: Sequence[str] = (),
) -> Iterator[None]:
    """Deployments, ReplicaSets and Jobs make pods, and garbage is collected. `through`: the address of a proxy."""
    program = binaries.ensure("hyper")["hyper"] / "kube-controller-manager"
    flags = (
        f"--kubeconfig={server.kubeconfig('admin', through)}",
        f"--controllers={','.join(controllers)}",
        *flags,
        *("--leader-elect=false", "--secure-port=0", "--kube-api-qps=500", "--kube-api-burst=1000"),
    )
    with (server.folder / "controllers.log").open("wb") as log:
        process = subprocess.Popen([program, *flags], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def finished_or_ready(pod: Any) -> Status:
    """A Job's pod has ended well, unless its model is named "endless"; any other is ready."""
    role = pod["metadata"]["labels"][names.ROLE_LABEL]
    container = {"name": pod["spec"]["containers"][0]["name"], "image": "i", "imageID": "i", "restartCount": 0}
    if role in RESULTS and "endless" not in json.dumps(pod["spec"]):
        record = json.dumps({"version": 1, "command": role, "ok": True, **RESULTS[role]})
        state = {"terminated": {"exitCode": 0, "message": record}}
        return {"phase": "Succeeded", "containerStatuses": [{**container, "ready": False, "state": state}]}
    ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
    running = {**container, "ready": True, "started": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    return {"phase": "Running", "conditions": ready, "containerStatuses": [running]}


def loading_on(node: str, namespace: Namespace, pod: Any) -> Status:
    """Binds a pod of a model to a node, where it runs but is not ready yet."""
    name, status = pod["metadata"]["name"], finished_or_ready(pod)
    target = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"name": node}}
    namespace.server.call("POST", PODS.path(namespace.name, name, "binding"), target)
    unready = [{**one, "status": str(one["type"] == "PodScheduled")} for one in status["conditions"]]
    running = [{**one, "ready": False, "started": False} for one in status["containerStatuses"]]
    return {**status, "conditions": unready, "containerStatuses": running}


def put_status(namespace: Namespace, pod: Any, status: Status) -> None:
    path = PODS.path(namespace.name, pod["metadata"]["name"], "status")
    namespace.server.call("PATCH", path, {"status": status}, "application/merge-patch+json")


def ended_twice(status: Status) -> Status:
    """The status of a ready pod, but of one that has ended twice, for a reason that another start would not change."""
    ended = {"terminated": {"exitCode": 10, "reason": "Error", "message": ""}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    broken = {"ready": False, "started": False, "restartCount": 1, "state": waiting, "lastState": ended}
    return {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [{**status["containerStatuses"][0], **broken}],
    }


@contextlib.asynccontextmanager
async def kubelet(namespace: Namespace, status_of: Callable[[Any], Status] = finished_or_ready) -> AsyncIterator[None]:
    """Gives each new pod of the namespace its status."""

    def sweep() -> None:
        for pod in namespace.list(PODS):
            metadata = pod["metadata"]
            if pod["status"].get("phase") == "Pending" and "deletionTimestamp" not in metadata:
                with contextlib.suppress(urllib.error.HTTPError):  # deleted meanwhile
                    put_status(namespace, pod, status_of(pod))

    async def work() -> None:
        while True:
            await asyncio.to_thread(sweep)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def replica(
    address: str, adapters: list[dict[str, str]], idle_seconds: Callable[[], float] = lambda: 0
) -> AsyncIterator[None]:
    """What a replica at this address tells about its adapters, and about how long it has been idle."""

    async def tell(_: web.Request) -> web.Response:
        return web.json_response({"adapters": adapters})

    async def metrics(_: web.Request) -> web.Response:
        labels = 'engine="0",model_name="chat"'
        return web.Response(text=f"neuron_serving_idle_seconds{{{labels}}} {idle_seconds()}\n")

    app = web.Application()
    app.add_routes([web.get(names.ADAPTERS_PATH, tell), web.get(names.METRICS_PATH, metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, names.PORT).start()
    try:
        yield
    finally:
        await runner.cleanup()
