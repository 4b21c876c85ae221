"""The operator dies at any request, and the next one ends with the same objects as without a death.

Deployments, Jobs and garbage are handled by Kubernetes' own controllers; only the kubelet is played.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.apiserver import ApiServer
from helpers.controllers import controlling, kubelet
from helpers.operators import (
    BY_KIND,
    Namespace,
    client_of,
    eventually,
    is_ready,
    operating,
    run_settings,
    shape,
)
from neuron_operator.cluster.client import LEASES, NEURON_MODELS, Client, Resource

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

AT_ONCE = 4
"""Operators that live at the same time."""


def all_ready(namespace: Namespace) -> bool:
    return all(is_ready(namespace, model["metadata"]["name"]) for model in namespace.list(NEURON_MODELS))


@dataclass(frozen=True)
class Scenario:
    """What is there before, what happens, and when all is done."""

    before: Callable[[Namespace], object] | None
    act: Callable[[Namespace], object]
    is_done: Callable[[Namespace], bool] = is_ready
    is_prepared: Callable[[Namespace], bool] = all_ready


def is_deleted(namespace: Namespace) -> bool:
    """The model is gone, and the other one is alone in what they shared."""
    return [model["metadata"]["name"] for model in namespace.list(NEURON_MODELS)] == ["other"] and not any(
        owner["name"] == "chat"
        for resource in BY_KIND.values()
        for found in namespace.list(resource)
        for owner in found["metadata"].get("ownerReferences", ())
    )


def two_models(namespace: Namespace) -> None:
    for name in ("chat", "other"):
        namespace.put_model(name)


ENDLESS = "file:///models/endless"
COMPILED = {"engine": {"backend": "torch", "compile": "Enabled"}}
SCENARIOS = {
    "install": Scenario(None, Namespace.put_model),
    "scale": Scenario(Namespace.put_model, lambda namespace: namespace.put_model(replicas=3)),
    "edit": Scenario(
        Namespace.put_model,
        lambda namespace: namespace.put_model(
            serviceTemplate={"metadata": {"annotations": {"a": "b"}}},
            podTemplate={"spec": {"priorityClassName": "system-node-critical"}},
        ),
    ),
    "rollout": Scenario(Namespace.put_model, lambda namespace: namespace.put_model(serving={"maxModelLength": 99})),
    "another source": Scenario(
        two_models, lambda namespace: namespace.put_model(model={"uri": "file:///models/another"})
    ),
    "another source, while a Job reads the first": Scenario(
        lambda namespace: namespace.put_model(model={"uri": ENDLESS}),
        Namespace.put_model,
        is_prepared=lambda namespace: namespace.condition("ModelResolved") == ("False", "Resolving"),
    ),
    "compile": Scenario(Namespace.put_model, lambda namespace: namespace.put_model(**COMPILED)),
    "delete": Scenario(two_models, lambda namespace: namespace.delete(NEURON_MODELS, "chat"), is_deleted),
}
"""By name, in the order in which a call is first needed."""
IN_CI = ("install", "scale", "edit", "another source, while a Job reads the first")
"""Between them they write in every way: they create, apply, delete, and patch a status."""


class Mortal(Client):
    """A client that dies at its n-th request: it is not sent (`before`), or its answer is lost. Nothing is sent after
    it. Requests about the Lease and watches do not count."""

    def __init__(self, client: Client, dies_at: int | None = None, *, before: bool = True) -> None:
        super().__init__(client.configuration, client.session)
        self._dies_at = dies_at
        self._before = before
        self.calls: list[tuple[str, str]] = []
        self.is_dead = False

    async def _request(self, verb: str, resource: Resource, path: str, **request: Any) -> Any:
        if resource == LEASES:
            return await super()._request(verb, resource, path, **request)
        number = len(self.calls)
        self.calls.append((verb, resource.plural + ("/status" if path.endswith("/status") else "")))
        if self.is_dead or (number == self._dies_at and self._before):
            await self._die()
        answer = await super()._request(verb, resource, path, **request)
        if number == self._dies_at:
            await self._die()
        return answer

    async def _die(self) -> None:
        self.is_dead = True
        await asyncio.Event().wait()


@dataclass(frozen=True)
class Life:
    calls: list[tuple[str, str]]
    is_dead: bool
    end: Any
    """All objects at the end."""


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    with controlling(server):
        yield server


async def live(
    server: ApiServer, client: Client, scenario: Scenario, dies_at: int | None = None, *, before: bool = True
) -> Life:
    """One operator prepares, the next one acts and dies, the last one completes the work."""
    namespace = Namespace(server)
    storage = json.dumps({"artifacts": {"persistentVolumeClaim": {"claimName": "compiled"}}})
    flags = ("--watch-namespaces", namespace.name, "--lease-name", namespace.name, "--storage", storage)
    settings = run_settings(*flags)
    mortal = Mortal(client, dies_at, before=before)
    async with kubelet(namespace):
        if scenario.before is not None:
            scenario.before(namespace)
            async with operating(client, settings):
                await eventually(lambda: scenario.is_prepared(namespace), about=namespace.list_all)
        async with operating(mortal, settings) as operator:
            await eventually(lambda: operator.is_leading or mortal.is_dead)
            scenario.act(namespace)
            await eventually(lambda: mortal.is_dead or scenario.is_done(namespace), about=namespace.list_all)
            if not mortal.is_dead:
                await asyncio.sleep(0.5)
        async with operating(client, settings):
            await eventually(lambda: scenario.is_done(namespace), about=namespace.list_all)
            await asyncio.sleep(0.5)
        return Life(mortal.calls, mortal.is_dead, shape(namespace))


async def check(
    server: ApiServer,
    points: Callable[[str, list[tuple[str, str]]], list[tuple[int, bool]]],
    names: Collection[str] = tuple(SCENARIOS),
) -> int:
    """Lives through each scenario once whole, then once for each of its `points`; how often an operator died."""
    turn = asyncio.Semaphore(AT_ONCE)
    num_deaths = 0
    async with client_of(server, "admin") as client:

        async def one(scenario: Scenario, at: int, before: bool) -> Life:
            async with turn:
                return await live(server, client, scenario, at, before=before)

        for name in names:
            scenario = SCENARIOS[name]
            whole = await live(server, client, scenario)
            chosen = points(name, whole.calls)
            lives = await asyncio.gather(*(one(scenario, at, before) for at, before in chosen))
            for (at, before), life in zip(chosen, lives, strict=True):
                assert differences(life.end, whole.end) == [], (name, whole.calls[at], before)
            num_deaths += sum(life.is_dead for life in lives)
    return num_deaths


def differences(found: list[Any], expected: list[Any]) -> list[tuple[Any, Any]]:
    """The objects that only one of two has."""
    lacking = [one for one in expected if one not in found]
    surplus = [one for one in found if one not in expected]
    return list(itertools.zip_longest(surplus, lacking))


async def test_an_operator_killed_at_writes_of_each_kind_reaches_the_same_state(server: ApiServer) -> None:
    """At every second kind of write of a scenario that no earlier one has."""
    seen: set[tuple[str, str]] = set()

    def points(name: str, calls: list[tuple[str, str]]) -> list[tuple[int, bool]]:
        # Who dies at a read dies after the write before it.
        writes = [(number, call) for number, call in enumerate(calls) if call[0] not in ("get", "list")]
        first: dict[tuple[str, str], int] = {}
        for number, call in writes:
            if call not in seen:
                first.setdefault(call, number)
        seen.update(first)
        return [(number, turn % 4 == 0) for turn, number in enumerate(first.values()) if turn % 2 == 0]

    assert await check(server, points, IN_CI) >= len(IN_CI)
    assert {verb for verb, _ in seen} >= {"create", "patch", "delete"}


@pytest.mark.long
@pytest.mark.timeout(3600, func_only=True)
async def test_an_operator_killed_at_any_request_reaches_the_same_state(server: ApiServer) -> None:
    """Before it is sent, and when its answer is lost."""

    def all_points(name: str, calls: list[tuple[str, str]]) -> list[tuple[int, bool]]:
        return [(number, before) for number in range(len(calls)) for before in (True, False)]

    # The number of requests varies: it depends on what a pass finds together.
    assert await check(server, all_points) >= 100
