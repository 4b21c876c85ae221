"""The client's faults for responses of an API server, and its requests; other tests use a real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from helpers import kubeconfigs
from neuron_operator.api.errors import ClusterFault
from neuron_operator.api.names import MODEL_LABEL
from neuron_operator.cluster import client as module
from neuron_operator.cluster.client import (
    CHILDREN,
    MAX_OBJECT_BYTES,
    NEURON_MODELS,
    NODES,
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Terminating,
    Throttled,
    Unreachable,
    connect,
)

CONFIG_MAPS = next(resource for resource in CHILDREN if resource.kind == "ConfigMap")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    """The URL of a server that answers each request with `handle`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def answered(folder: Path, status: int, body: Any, headers: dict[str, str] | None = None) -> ClusterFault:
    """The fault raised by a create."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if isinstance(body, str):
            return web.Response(status=status, text=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    async with serving(handle) as server, connect(kubeconfigs.write(folder / "config", server)) as client:
        with pytest.raises(ClusterFault) as raised:
            await client.create(CONFIG_MAPS, {"metadata": {"namespace": "ns", "name": "a"}})
        return raised.value


TERMINATING = {"causes": [{"reason": "NamespaceTerminating"}]}


@pytest.mark.parametrize(
    ("status", "body", "kind", "retriable"),
    [
        (404, {"message": "not found"}, NotFound, True),
        (409, {"reason": "AlreadyExists"}, AlreadyExists, True),
        (409, {"reason": "Conflict"}, Conflict, True),
        (410, {"reason": "Expired"}, Gone, True),
        (422, {"reason": "Invalid"}, Invalid, False),
        (400, {"reason": "BadRequest"}, Invalid, False),
        (403, {"reason": "Forbidden"}, Forbidden, False),
        (403, {"reason": "Forbidden", "details": TERMINATING}, Terminating, False),
        (500, {"reason": "InternalError"}, ClusterFault, True),
        (500, {"message": "failed to create typed patch object: .x: field not declared in schema"}, Invalid, False),
        (502, "<html>bad gateway</html>", ClusterFault, True),
        (503, "[]", ClusterFault, True),
    ],
)
async def test_each_response_status_maps_to_a_fault(
    tmp_path: Path, status: int, body: Any, kind: type[ClusterFault], retriable: bool
) -> None:
    fault = await answered(tmp_path, status, body)
    assert type(fault) is kind
    assert fault.retriable == retriable
    assert str(fault).startswith("create configmaps: ")


@pytest.mark.parametrize(
    ("status", "body", "headers", "seconds"),
    [
        (429, {}, {"Retry-After": "7"}, 7.0),
        (429, {"details": {"retryAfterSeconds": 3}}, {}, 3.0),
        (429, {}, {}, 1.0),
        (503, {}, {"Retry-After": "2"}, 2.0),
        (429, {}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
    ],
)
async def test_a_fault_carries_the_retry_after_of_the_server(
    tmp_path: Path, status: int, body: Any, headers: dict[str, str], seconds: float
) -> None:
    fault = await answered(tmp_path, status, body, headers)
    assert isinstance(fault, Throttled)
    assert fault.retry_after_seconds == seconds


@pytest.mark.parametrize(
    ("codes", "num_requests", "is_done"),
    [((429, 200), 2, True), ((429, 429, 200), 2, False), ((503, 200), 1, False)],
)
async def test_a_throttled_request_is_made_once_more_when_the_server_says(
    tmp_path: Path, codes: tuple[int, ...], num_requests: int, is_done: bool
) -> None:
    asked: list[float] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(asyncio.get_running_loop().time())
        return web.json_response({}, status=codes[len(asked) - 1], headers={"Retry-After": "1"})

    async with serving(handle) as server, connect(kubeconfigs.write(tmp_path / "config", server)) as client:
        with contextlib.nullcontext() if is_done else pytest.raises(Throttled):
            await client.get(NODES, None, "n1")
    assert len(asked) == num_requests
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(asked))


async def test_an_unreachable_server_raises_unreachable(tmp_path: Path) -> None:
    async with connect(kubeconfigs.write(tmp_path / "config", "http://127.0.0.1:1")) as client:
        with pytest.raises(Unreachable, match="get nodes: "):
            await client.get(NODES, None, "n1")
        with pytest.raises(Unreachable, match="watch nodes: "):
            async for _ in client.watch(NODES, None, resource_version="1"):
                pass


def test_request_paths_contain_group_version_namespace_and_subresource() -> None:
    assert CONFIG_MAPS.path("ns", "a") == "/api/v1/namespaces/ns/configmaps/a"
    assert CONFIG_MAPS.path(None) == "/api/v1/configmaps"
    assert NODES.path("ns") == "/api/v1/nodes"
    status = "/apis/neuron-serving.dev/v1alpha1/namespaces/ns/neuronmodels/chat/status"
    assert NEURON_MODELS.path("ns", "chat", "status") == status


async def test_an_expired_token_of_an_exec_plugin_is_renewed(tmp_path: Path) -> None:
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        return web.json_response({})

    plugin = tmp_path / "plugin"
    plugin.write_text(
        """#!/bin/sh
        echo x >> "$0.calls"
        calls=$(wc -l < "$0.calls")
        status="{\\"token\\": \\"token-$calls\\", \\"expirationTimestamp\\": \\"2026-01-01T00:00:00Z\\"}"
        echo "{\\"apiVersion\\": \\"client.authentication.k8s.io/v1\\", \\"kind\\": \\"ExecCredential\\",
               \\"status\\": $status}"
        """
    )
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}}
    async with (
        serving(handle) as server,
        connect(kubeconfigs.write(tmp_path / "config", server, user), token_check_seconds=0.01) as client,
    ):
        while len(set(seen)) < 3:
            await client.get(NODES, None, "n1")
    assert seen[0].startswith("Bearer token-")


async def test_the_client_uses_proxy_and_no_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Host"])
        return web.json_response({})

    config = kubeconfigs.write(tmp_path / "config", "http://127.0.0.1:1")
    async with serving(handle) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        async with connect(config) as client:
            await client.get(NODES, None, "n1")
        assert seen == ["127.0.0.1:1"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with connect(config) as client:
            with pytest.raises(Unreachable):
                await client.get(NODES, None, "n1")


async def enter(kubeconfig: str = "") -> None:
    async with connect(kubeconfig):
        pass


async def test_an_unusable_kubeconfig_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(module, "DEFAULT_KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(ClusterFault, match=r"no kubeconfig at .*none; set KUBECONFIG or pass --kubeconfig"):
        await enter()
    broken = tmp_path / "broken"
    for content in ("", "{", "apiVersion: v1\nkind: Config\n", "[1]"):
        broken.write_text(content)
        with pytest.raises(ClusterFault, match="cannot load the cluster configuration: "):
            await enter(str(broken))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ClusterFault, match="cannot load the cluster configuration: "):
        await enter()


async def test_of_an_object_that_is_too_heavy_only_the_identity_is_read(tmp_path: Path) -> None:
    about = {"namespace": "ns", "uid": "u", "resourceVersion": "7", "labels": {MODEL_LABEL: "chat", "x": "y" * 100_000}}
    light = {"metadata": {**about, "name": "light"}, "data": {"a": "b"}}
    heavy = {"metadata": {**about, "name": "heavy"}, "data": {"a": "b" * MAX_OBJECT_BYTES}}

    async def handle(request: web.Request) -> web.Response:
        if "watch" in request.query:
            return web.Response(text=json.dumps({"type": "ADDED", "object": heavy}) + "\n")
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": [light, heavy]})

    async with serving(handle) as url, connect(kubeconfigs.write(tmp_path / "config", url)) as client:
        page = await client.list(CONFIG_MAPS, "ns")
        events = [event.object async for event in client.watch(CONFIG_MAPS, "ns", resource_version="9")]
    found = {one["metadata"]["name"]: one for one in page.items}
    assert found["light"]["data"] == {"a": "b"}
    assert events == [{key: value for key, value in found["heavy"].items() if key not in ("apiVersion", "kind")}]
    assert events[0].pop("bytes") > MAX_OBJECT_BYTES
    assert events == [{"metadata": {**about, "name": "heavy", "labels": {MODEL_LABEL: "chat"}, "ownerReferences": []}}]


@pytest.mark.parametrize("published", [{}, {"components": {}}, {"components": {"schemas": {"other": {}}}}])
async def test_a_crd_whose_schema_is_not_published_yet_has_none(tmp_path: Path, published: Any) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.path == "/openapi/v3/apis/neuron-serving.dev/v1alpha1"
        return web.json_response(published)

    async with serving(handle) as server, connect(kubeconfigs.write(tmp_path / "config", server)) as client:
        assert await client.schema(NEURON_MODELS) == {}
