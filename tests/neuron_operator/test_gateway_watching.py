"""The gateway serves what the cluster has: models, adapters and ready addresses, as their objects say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from helpers.fake_cluster import FakeCluster
from helpers.gateways import Running, echo, replicas, running, until
from neuron_operator.api import names
from neuron_operator.cluster import reflector as reflector_module
from neuron_operator.cluster.client import ENDPOINT_SLICES, NEURON_ADAPTERS, NEURON_MODELS, Forbidden, Page, Resource
from neuron_operator.cluster.workqueue import Backoff
from neuron_operator.gateway import gateway as gateway_module
from neuron_operator.gateway import watching as watching_module
from neuron_operator.gateway.gateway import Wake
from neuron_operator.gateway.models import Adapter, Served
from neuron_operator.gateway.watching import Watching, addresses_of, served_of

CREATED = "2026-11-01T10:00:00Z"


def model(name: str = "chat", *, replicas: int = 1, conditions: tuple[tuple[str, ...], ...] = (), **spec: Any) -> Any:
    said = [dict(zip(("type", "status", "reason", "message"), one, strict=True)) for one in conditions]
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"namespace": "ns", "name": name, "uid": f"uid-{name}", "creationTimestamp": CREATED},
        "spec": {"replicas": replicas, **spec},
        "status": {"conditions": said, "plan": {"maxModelLength": 4096}},
    }


def adapter(name: str, base: str = "chat") -> Any:
    metadata = {"namespace": "ns", "name": name, "creationTimestamp": CREATED}
    spec = {"model": base, "uri": f"hf://org/{name}"}
    return {"apiVersion": names.API_VERSION, "kind": names.ADAPTER_KIND, "metadata": metadata, "spec": spec}


def endpoint(address: str, *, ready: bool | None = True, pod: str = "") -> Any:
    target = {"targetRef": {"kind": "Pod", "uid": pod}} if pod else {}
    return {"addresses": [address], "conditions": {} if ready is None else {"ready": ready}, **target}


def endpoint_slice(*endpoints: Any, service: str = "chat", port: int = 8000, kind: str = "IPv4") -> Any:
    labels = {"kubernetes.io/service-name": service, **names.labels(service)}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": "ns", "name": f"{service}-{kind.lower()}", "labels": labels},
        "addressType": kind,
        "endpoints": list(endpoints),
        "ports": [{"name": "metrics", "port": 1}, {"name": names.PORT_NAME, "port": port}],
    }


def test_a_model_is_served_by_its_names_and_those_of_its_adapters() -> None:
    found = served_of(model(model={"servedNames": ["gpt", "gpt-4"]}), [adapter("sql"), adapter("a")], [])
    assert found.served_names == ("gpt", "gpt-4")
    assert [one.name for one in found.adapters] == ["a", "sql"]
    assert found.adapters[1] == Adapter("sql", "hf://org/sql", 1793527200)
    assert (found.created, found.max_model_len, found.uid) == (1793527200, 4096, "uid-chat")
    assert served_of(model(), [], []).served_names == ("chat",)


@pytest.mark.parametrize(
    ("conditions", "replicas", "asleep", "refused", "words"),
    [
        ((("Available", "False", "ScaledToZero", "asleep"),), 0, True, "", "ScaledToZero: asleep"),
        ((("Available", "False", "Loading", "40%"),), 1, False, "", "Loading: 40%"),
        ((("Ready", "False", "X", "y"), ("Stalled", "True", "Unplaceable", "no")), 0, True, "Unplaceable: no", "X: y"),
        ((("Accepted", "False", "InvalidSpec", "bad"),), 0, True, "InvalidSpec: bad", ""),
        ((("Accepted", "True", "Accepted", ""), ("Stalled", "False", "X", "")), 0, True, "", ""),
    ],
)
def test_its_conditions_say_why_it_does_not_answer(
    conditions: Any, replicas: int, asleep: bool, refused: str, words: str
) -> None:
    found = served_of(model(replicas=replicas, conditions=conditions), [], [])
    assert (found.is_asleep, found.refused, found.words) == (asleep, refused, words)


def test_only_ready_endpoints_are_used_each_pod_once() -> None:
    slices = [
        endpoint_slice(endpoint("fd00::1", pod="a"), kind="IPv6"),
        endpoint_slice(
            endpoint("10.0.0.1", pod="a"),
            endpoint("10.0.0.2", ready=False, pod="b"),
            endpoint("10.0.0.3", ready=None, pod="c"),
        ),
        {**endpoint_slice(endpoint("10.0.0.4")), "ports": []},
    ]
    assert addresses_of(slices) == ("10.0.0.1:8000", "10.0.0.3:8000")
    assert addresses_of(slices[:1]) == ("[fd00::1]:8000",)


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": {"namespace": "ns", "name": "x"}},
        {"metadata": {"namespace": "ns", "name": "x"}, "spec": [], "status": "no"},
        {"metadata": {"namespace": "ns", "name": "x", "creationTimestamp": 5}, "spec": {"model": {"servedNames": [5]}}},
    ],
)
def test_no_object_can_end_the_gateway(odd: Any) -> None:
    assert served_of(odd, [odd], [odd]).served_names == ("x",)
    assert addresses_of([{"ports": [{"name": "http", "port": "x"}]}, {"endpoints": [5, {"addresses": "no"}]}]) == ()


@contextlib.asynccontextmanager
async def watching(cluster: FakeCluster, *namespaces: str, wake: Wake | None = None) -> AsyncIterator[Running]:
    async with running(wake=wake) as gateway:
        gateway.gateway.is_ready = False
        watches = Watching(cluster, namespaces or (None,), gateway.gateway)  # type: ignore[arg-type]
        task = asyncio.create_task(watches.run())
        await until(lambda: gateway.gateway.is_ready)
        try:
            yield gateway
        finally:
            task.cancel()
            await asyncio.wait([task])


async def names_of(gateway: Running) -> dict[str, bool]:
    return {one["id"]: one["ready"] for one in (await gateway.get("/v1/models")).json["data"]}


async def test_the_gateway_follows_the_objects_of_the_cluster() -> None:
    async with replicas(*()) as _:
        cluster = FakeCluster()
        chat = await cluster.create(NEURON_MODELS, model())
        await cluster.create(NEURON_ADAPTERS, adapter("sql"))
        ready = await cluster.create(ENDPOINT_SLICES, endpoint_slice(endpoint("10.0.0.1")))
        async with watching(cluster) as gateway:
            assert await names_of(gateway) == {"chat": True, "sql": True}
            other = await cluster.create(NEURON_ADAPTERS, adapter("tone"))
            await cluster.delete(ENDPOINT_SLICES, ready)
            await until(lambda: not gateway.gateway.directory.models["ns", "chat"].replicas)
            assert await names_of(gateway) == {"chat": False, "sql": False, "tone": False}
            await cluster.delete(NEURON_ADAPTERS, other)
            await cluster.create(NEURON_MODELS, model("tiny", replicas=0))
            await until(lambda: ("ns", "tiny") in gateway.gateway.directory.models)
            assert gateway.gateway.directory.models["ns", "tiny"].served.is_asleep
            await cluster.delete(NEURON_MODELS, chat)
            await until(lambda: ("ns", "chat") not in gateway.gateway.directory.models)
            assert await names_of(gateway) == {"tiny": False}


async def test_while_the_api_server_is_away_ready_models_are_served_and_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(gateway_module, "WAKE_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(reflector_module, "_BACKOFF", Backoff(max_seconds=0.1))
    cluster = FakeCluster()
    async with replicas(echo) as (replica,):
        host, _, port = replica.address.rpartition(":")
        await cluster.create(NEURON_MODELS, model())
        await cluster.create(NEURON_MODELS, model("tiny", replicas=0))
        await cluster.create(NEURON_ADAPTERS, adapter("tone", "tiny"))
        await cluster.create(ENDPOINT_SLICES, endpoint_slice(endpoint(host), port=int(port)))

        async def wake(served: Served) -> bool:
            tiny = await cluster.get(NEURON_MODELS, *served.key)
            await cluster.replace(NEURON_MODELS, {**tiny, "spec": {"replicas": 1}})
            await cluster.create(ENDPOINT_SLICES, endpoint_slice(endpoint(host), port=int(port), service="tiny"))
            return True

        async with watching(cluster, wake=wake) as gateway, asyncio.timeout(10):
            await cluster.cut(is_down=True)
            sleeps = asyncio.create_task(gateway.post("/v1/completions", {"model": "tone", "prompt": "x"}))
            await until(lambda: gateway.metric("gateway_wake_ups_total", model="ns/tiny", outcome="failed") >= 2)
            assert (await gateway.post("/v1/completions", {"model": "chat", "prompt": "x"})).status == 200
            assert (await gateway.get("/health")).status == 200
            await cluster.cut(is_down=False)
            assert ((await sleeps).status, replica.asked[-1].json["model"]) == (200, "tone")
            assert gateway.metric("gateway_wake_ups_total", model="ns/tiny", outcome="woken") == 1


async def test_a_slice_or_adapter_without_a_model_is_nothing() -> None:
    cluster = FakeCluster()
    await cluster.create(ENDPOINT_SLICES, endpoint_slice(endpoint("10.0.0.1"), service="else"))
    await cluster.create(NEURON_ADAPTERS, adapter("sql", "nobody"))
    async with watching(cluster) as gateway:
        assert await names_of(gateway) == {}


class Closed(FakeCluster):
    """One namespace may not be read, until `is_open`."""

    is_open = False

    async def list(self, resource: Resource, namespace: str | None, **selectors: str) -> Page:
        if namespace == "closed" and not self.is_open:
            raise Forbidden(f"cannot list {resource.plural}", retriable=False, status=403)
        return await super().list(resource, namespace, **selectors)


async def test_a_namespace_that_may_not_be_read_is_left_out_until_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_module, "REFUSED_SECONDS", 0.05)
    cluster = Closed()
    chat = model()
    await cluster.create(NEURON_MODELS, {**chat, "metadata": {**chat["metadata"], "namespace": "closed"}})
    cluster.is_open = True
    async with watching(cluster, "closed") as gateway:
        assert await names_of(gateway) == {"chat": False}
    cluster.is_open = False
    with pytest.raises(ExceptionGroup) as refused:
        async with running() as gateway:
            await Watching(cluster, ("closed",), gateway.gateway).run()  # type: ignore[arg-type]
    assert refused.group_contains(Forbidden, match="cannot list")


async def test_other_namespaces_are_served_without_one_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_module, "REFUSED_SECONDS", 0.05)
    cluster = Closed()
    async with watching(cluster, "open", "closed") as gateway:
        assert await names_of(gateway) == {}
        cluster.is_open = True
        await cluster.create(NEURON_MODELS, model())
        await until(lambda: ("ns", "chat") in gateway.gateway.directory.models)
