"""A new operator moves running models to its runtime image one after another, on a real API server.

Kubernetes' own controllers run; kubelets are played.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from helpers.apiserver import ApiServer
from helpers.controllers import Status, controlling, ended_twice, finished_or_ready, kubelet
from helpers.operators import BY_KIND, OPERATOR_USER, Namespace, client_of, eventually, operating, run_settings
from neuron_operator.api import names
from neuron_operator.cluster.client import NEURON_MODELS
from neuron_operator.run.process import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MODELS = ("a", "b")


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    with controlling(server):
        yield server


def status_of(pod: Any) -> Status:
    """Pods of the broken image fail."""
    status = finished_or_ready(pod)
    is_broken = pod["spec"]["containers"][0]["image"].endswith(":broken")
    return ended_twice(status) if is_broken and status["phase"] == "Running" else status


@contextlib.asynccontextmanager
async def operator_with(server: ApiServer, namespace: Namespace, image: str) -> AsyncIterator[Operator]:
    flags = ("--runtime-image", image, "--runtime-upgrade", "Rolling", "--watch-namespaces", namespace.name)
    async with client_of(server, OPERATOR_USER) as client, operating(client, run_settings(*flags)) as operator:
        yield operator


def images(namespace: Namespace) -> dict[str, str]:
    """The image of each model's Deployment."""
    return {
        one["metadata"]["labels"][names.MODEL_LABEL]: one["spec"]["template"]["spec"]["containers"][0]["image"]
        for one in namespace.list(BY_KIND["Deployment"])
    }


def not_settled(namespace: Namespace) -> set[str]:
    """Models that are not up to date and ready."""
    found = set()
    for model in namespace.list(NEURON_MODELS):
        conditions = {c["type"]: c["status"] for c in model.get("status", {}).get("conditions", ())}
        if (conditions.get("UpToDate"), conditions.get("Ready")) != ("True", "True"):
            found.add(model["metadata"]["name"])
    return found


async def test_models_move_one_after_another_and_the_first_that_fails_stops_the_others(server: ApiServer) -> None:
    namespace = Namespace(server)
    async with kubelet(namespace, status_of):
        async with operator_with(server, namespace, "example.com/runtime:1"):
            for name in MODELS:
                namespace.put_model(name)
            await eventually(lambda: images(namespace).keys() == set(MODELS) and not not_settled(namespace))

        async with operator_with(server, namespace, "example.com/runtime:2"):
            most = 0

            def have_moved() -> bool:
                nonlocal most
                most = max(most, len(not_settled(namespace)))
                return not not_settled(namespace) and set(images(namespace).values()) == {"example.com/runtime:2"}

            await eventually(have_moved, about=namespace.list_all)
            assert most <= 1

        async with operator_with(server, namespace, "example.com/runtime:broken") as operator:
            await eventually(lambda: [namespace.condition("UpToDate", name)[1] for name in MODELS].count("RolledBack"))
            await eventually(lambda: set(images(namespace).values()) == {"example.com/runtime:2"})
            await asyncio.sleep(1.0)
            assert len(not_settled(namespace)) == 1
            assert dict(operator.turns.count()) == {"Failed": 1, "Waiting": 1}

        async with operator_with(server, namespace, "example.com/runtime:3"):
            await eventually(
                lambda: set(images(namespace).values()) == {"example.com/runtime:3"} and not not_settled(namespace),
                about=namespace.list_all,
            )
