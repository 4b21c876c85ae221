"""What kopf does for the operator: NeuronModels reach the caches, Events leave a pass, and a watch that is refused ends
the process. What kopf does not tell is found all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from helpers import kubeconfigs
from neuron_operator.api.errors import ClusterFault
from neuron_operator.api.names import GROUP, KIND, PLURAL, VERSION
from neuron_operator.cluster import reflector
from neuron_operator.cluster.client import NEURON_MODELS, Forbidden, NotFound, accept_deep_json, connect
from neuron_operator.cluster.reflector import Caches, Key
from neuron_operator.read.world import Announcement
from neuron_operator.run import handlers
from neuron_operator.run.handlers import Poster, run_kopf
from neuron_operator.run.metrics import Metrics
from neuron_operator.run.process import one_line


def model(name: str, version: int) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"apiVersion": NEURON_MODELS.api_version, "kind": KIND, "metadata": metadata, "spec": {}}


class Server:
    """Serves `models` by name. A watch reports nothing; `expire` ends it with 410. `refusal` answers watches whose path
    has `refused`."""

    def __init__(self, *names: str) -> None:
        self.models = {name: model(name, number) for number, name in enumerate(names, 1)}
        self.refusal: int | None = None
        self.refused = ""
        self.num_refused = 0
        self.posted: list[tuple[str, Any]] = []
        self.watched: list[str] = []
        self._version = len(names)
        self._expired = asyncio.Event()

    def delete(self, name: str) -> None:
        self._version += 1
        del self.models[name]

    def expire(self) -> None:
        self._version += 1
        self._expired.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if request.method == "POST":
            self.posted.append((request.path, await request.json()))
            return web.json_response({})
        is_ours = request.path.endswith(f"/{PLURAL}")
        if "watch" in request.query:
            return await self._watch(request, is_ours)
        items = list(self.models.values()) if is_ours else []
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, is_ours: bool) -> web.StreamResponse:
        if is_ours and self.refusal is not None and self.refused in request.path:
            self.num_refused += 1
            text = 'neuronmodels.neuron-serving.dev is forbidden: User "operator" cannot watch resource "neuronmodels"'
            return web.json_response({"kind": "Status", "message": text, "code": self.refusal}, status=self.refusal)
        response = web.StreamResponse()
        await response.prepare(request)
        if is_ours:
            self.watched.append(request.path)
            await self._expired.wait()
            self._expired.clear()
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
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
async def serving(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    # Kopf waits at its end for all tasks of the event loop, so for connections that are kept alive.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1, keepalive_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
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


Use = Callable[[Caches, Poster], Coroutine[Any, Any, None]]


async def operate(
    server: Server, folder: Path, use: Use, *, woken: list[Key], namespaces: tuple[str, ...] = ()
) -> None:
    """Run kopf with caches; `use` is the operator's work and ends it."""
    async with serving(server) as url, connect(kubeconfigs.write(folder / "config", url)) as client:
        caches = Caches(client, namespaces or (None,), wake=lambda key, _: woken.append(key))
        poster = Poster()

        async def work() -> None:
            async with running(caches.run()):
                await caches.wait_synced()
                await use(caches, poster)

        await run_kopf(
            work,
            client.configuration,
            deliver=caches.deliver,
            poster=poster,
            namespaces=namespaces,
            identity="one",
        )


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits that spare an API server."""
    monkeypatch.setattr(reflector, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(reflector, "FIRST_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(handlers, "BACKOFF_SECONDS", (0.01,))


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("survivors", [("other",), ()], ids=["one of two", "the only one"])
async def test_a_model_deleted_while_its_watch_was_lost_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survivors: tuple[str, ...]
) -> None:
    """Kopf reports no deletion. It lists again, which brings the models that are left, or nothing at all."""
    if not survivors:
        monkeypatch.setattr(reflector, "LOOK_SECONDS", 0.5)
    server, woken = Server("chat", *survivors), list[Key]()
    metrics = Metrics()

    async def use(caches: Caches, _: Poster) -> None:
        metrics.report_models(caches.models)
        count = f'neuron_operator_models{{reason="Unknown"}} {1 + len(survivors)}.0'
        assert count in metrics.exposition().decode()
        await until(lambda: bool(server.watched))
        woken.clear()
        server.delete("chat")
        server.expire()
        await until(lambda: ("ns", "chat") in woken)
        assert caches.model(("ns", "chat")) is None
        assert count not in metrics.exposition().decode()
        assert [one["metadata"]["name"] for one in caches.models()] == list(survivors)

    await operate(server, tmp_path, use, woken=woken)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("status", "fault", "says"),
    [
        (401, Forbidden, 'cannot watch resource "neuronmodels"; grant it with the chart (helm upgrade neuron-serving)'),
        (404, NotFound, "; install the CRD with `kubectl apply --server-side -f crds/neuronmodels.yaml`"),
    ],
)
async def test_a_watch_that_no_role_can_cure_ends_the_process_and_says_what_can(
    tmp_path: Path, status: int, fault: type[ClusterFault], says: str
) -> None:
    server = Server("chat")
    server.refusal = status

    async def use(_: Caches, __: Poster) -> None:
        await asyncio.Event().wait()

    with pytest.raises(fault) as raised:
        await operate(server, tmp_path, use, woken=[])
    assert says in one_line(raised.value)
    assert "\n" not in one_line(raised.value)


@pytest.mark.usefixtures("soon")
async def test_a_manifest_with_brackets_as_deep_as_the_api_server_takes_them_stops_nothing(tmp_path: Path) -> None:
    class Deep(Server):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            answer = await super().answer(request)
            if isinstance(answer, web.Response) and answer.text:
                answer.text = answer.text.replace('"deep"', "[" * 9_900 + "]" * 9_900)
            return answer

    server = Deep("chat", "other")
    server.models["chat"]["spec"] = {"engine": {"overrideNeuronConfig": {"a": "deep"}}}

    async def use(caches: Caches, _: Poster) -> None:
        assert [one["metadata"]["name"] for one in caches.models()] == ["chat", "other"]

    accept_deep_json()
    await operate(server, tmp_path, use, woken=[])


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_is_deeper_than_any_manifest_does_not_end_the_process(opening: str) -> None:
    program = f"""
import msgspec
from neuron_operator.cluster.client import accept_deep_json
accept_deep_json()
try:
    msgspec.json.decode({opening!r} * 100_000)
except RecursionError:
    print("too deep")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "too deep\n")


@pytest.mark.usefixtures("soon")
async def test_an_event_is_posted_from_the_operators_own_work(tmp_path: Path) -> None:
    server = Server("chat")
    wide = "😀" * 300

    async def use(caches: Caches, poster: Poster) -> None:
        (found,) = caches.models()
        poster.post(found, Announcement("Normal", "Ready", "2 of 2 replicas answer"))
        poster.post(found, Announcement("Warning", "Loading", wide))
        await until(lambda: len(server.posted) == 2)

    await operate(server, tmp_path, use, woken=[])
    (path, first), (_, second) = server.posted
    assert path == "/api/v1/namespaces/ns/events"
    assert (first["type"], first["reason"], first["message"]) == ("Normal", "Ready", "2 of 2 replicas answer")
    about = {"apiVersion": NEURON_MODELS.api_version, "kind": KIND, "namespace": "ns", "name": "chat", "uid": "chat"}
    assert first["involvedObject"] == about
    assert (first["reportingComponent"], first["reportingInstance"]) == (f"{GROUP}/neuron-operator", "one")
    assert second["message"] == "😀" * 256, "the API server counts bytes"


@pytest.mark.usefixtures("soon")
async def test_only_the_named_namespaces_are_watched(tmp_path: Path) -> None:
    server = Server()

    async def use(_: Caches, __: Poster) -> None:
        await until(lambda: len(server.watched) == 2)

    await operate(server, tmp_path, use, woken=[], namespaces=("a", "b"))
    root = f"/apis/{GROUP}/{VERSION}/namespaces"
    assert sorted(server.watched) == [f"{root}/a/{PLURAL}", f"{root}/b/{PLURAL}"]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("namespaces", [("there", "gone"), ("gone",), ()], ids=["one of two", "the only one", "all"])
async def test_what_may_not_be_watched_any_more_is_tried_until_it_may_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, namespaces: tuple[str, ...]
) -> None:
    """With a deleted namespace goes the operator's Role in it."""
    server = Server()
    server.refusal, server.refused = 403, "/namespaces/gone/" if namespaces else PLURAL

    async def use(_: Caches, __: Poster) -> None:
        await until(lambda: server.num_refused > 10)
        assert any("/namespaces/there/" in path for path in server.watched) == ("there" in namespaces)
        server.refusal = None
        await until(lambda: any(server.refused in path for path in server.watched))

    await operate(server, tmp_path, use, woken=[], namespaces=namespaces)
    (told,) = (line for line in caplog.text.splitlines() if "will retry" in line)
    assert 'cannot watch resource "neuronmodels"' in told
