"""Limits of kopf that the operator works around: it misses a model deleted while a watch was lost, and posts Events
only from handlers. If such a test fails, kopf has gained the feature and can replace our code."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web

from helpers import kubeconfigs
from neuron_operator.api.names import GROUP, KIND, PLURAL, VERSION
from neuron_operator.cluster.client import NEURON_MODELS, connect
from neuron_operator.cluster.reflector import Caches, Key
from neuron_operator.run.metrics import Metrics


def model(name: str, version: int) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"apiVersion": NEURON_MODELS.api_version, "kind": KIND, "metadata": metadata, "spec": {}}


class ForgetfulServer:
    """Serves the models `chat` and `other`. `chat` is deleted while the first watch is broken; a watch from the old
    version is answered with 410. The next watch reports a change of `other`."""

    def __init__(self) -> None:
        self.is_seen = asyncio.Event()
        """Set by the test after both models were reported."""
        self._num_lists = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        is_ours = request.path.endswith(f"/{PLURAL}")
        if "watch" in request.query:
            return await self._watch(request, is_ours)
        return self._list() if is_ours else web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    def _list(self) -> web.StreamResponse:
        self._num_lists += 1
        items = [model("chat", 1), model("other", 2)] if self._num_lists == 1 else [model("other", 2)]
        return web.json_response({"metadata": {"resourceVersion": str(10 * self._num_lists)}, "items": items})

    async def _watch(self, request: web.Request, is_ours: bool) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if is_ours and request.query["resourceVersion"] == "10":
            await self.is_seen.wait()
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        if is_ours:
            await response.write(json.dumps({"type": "MODIFIED", "object": model("other", 21)}).encode() + b"\n")
        await asyncio.Event().wait()
        return response


def resources(*entries: tuple[str, str, bool]) -> dict[str, Any]:
    verbs = ["list", "watch", "patch"]
    return {
        "resources": [
            {"name": name, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": verbs}
            for name, kind, namespaced in entries
        ]
    }


def group(name: str, version: str) -> dict[str, Any]:
    return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}


DISCOVERY: dict[str, Any] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": resources(("namespaces", "Namespace", False), ("events", "Event", True)),
    "/apis": {"groups": [group(GROUP, VERSION), group("apiextensions.k8s.io", "v1")]},
    f"/apis/{GROUP}/{VERSION}": resources((PLURAL, KIND, True)),
    "/apis/apiextensions.k8s.io/v1": resources(("customresourcedefinitions", "CustomResourceDefinition", False)),
}


@contextlib.asynccontextmanager
async def forgetful() -> AsyncIterator[tuple[ForgetfulServer, str]]:
    server = ForgetfulServer()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def kopf_running(url: str, registry: kopf.OperatorRegistry) -> AsyncIterator[None]:
    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=url)

    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    operator = kopf.operator(registry=registry, settings=settings, standalone=True, clusterwide=True)
    async with running(operator):
        yield


async def test_kopf_never_reports_a_model_that_was_deleted_while_its_watch_was_lost() -> None:
    known: dict[str, str] = {}
    registry = kopf.OperatorRegistry()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def seen(type: str | None, name: str, meta: Any, **_: Any) -> None:  # noqa: A002 - kopf's name
        if type == "DELETED":
            del known[name]
        else:
            known[name] = meta["resourceVersion"]

    async with forgetful() as (server, url), kopf_running(url, registry):
        await until(lambda: len(known) == 2)
        server.is_seen.set()
        await until(lambda: known["other"] == "21")
    assert set(known) == {"other", "chat"}


async def test_kopf_posts_events_from_handlers_of_a_watched_resource_only() -> None:
    posted: list[asyncio.Task[None]] = []
    registry = kopf.OperatorRegistry()

    async def work() -> None:
        kopf.event(kopf.Body(model("chat", 1)), type="Normal", reason="Ready", message="2 of 2 replicas serve")

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        posted.append(asyncio.create_task(work()))

    async with forgetful() as (_, url), kopf_running(url, registry):
        await until(lambda: bool(posted))
        with pytest.raises(LookupError):
            await posted[0]


async def test_the_operator_notices_a_model_deleted_while_its_watch_was_lost(tmp_path: Path) -> None:
    woken: list[Key] = []
    metrics = Metrics()
    async with forgetful() as (server, url), connect(kubeconfigs.write(tmp_path / "config", url)) as client:
        caches = Caches(client, [None], wake=lambda key, _: woken.append(key))
        metrics.report_models(caches.models)
        async with running(caches.run()):
            await caches.wait_synced()
            assert 'neuron_operator_models{reason="Unknown"} 2.0' in metrics.exposition().decode()
            woken.clear()
            server.is_seen.set()
            await until(lambda: ("ns", "other") in woken)
    assert ("ns", "chat") in woken
    assert caches.model(("ns", "chat")) is None
    assert 'neuron_operator_models{reason="Unknown"} 1.0' in metrics.exposition().decode()
