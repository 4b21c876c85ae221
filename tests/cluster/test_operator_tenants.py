"""One tenant's models, however many or heavy, hold up nobody else's: `neuron-operator run` as a process on a real API
server, with the memory that the chart grants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.operator_scale import Bare, Request, bare_client, request, resident_mib
from helpers.apiserver import ApiServer
from helpers.operator_process import Process
from helpers.operators import BY_KIND, OPERATOR_USER, Namespace, eventually
from helpers.ports import free_ports
from neuron_operator.api.manifest import MAX_SPEC_BYTES
from neuron_operator.cluster.client import NEURON_MODELS
from neuron_operator.read.objects import MAX_OWNERS, number_of, owners_of

VALUES = yaml.safe_load(Path(__file__).parents[2].joinpath("charts/neuron-serving/values.yaml").read_text())
LIMIT_MIB = number_of(VALUES["resources"]["limits"]["memory"]) / 2**20
FIRST_STATUS_SECONDS = 5.0
WRITE_SECONDS = 2.0
NUM_HEAVY, NUM_TINY = 250, 600
TINY = {"model": {"uri": "file:///models/demo"}, "accelerator": {"type": "CPU"}, "engine": {"backend": "torch"}}
FILLING = {f"example.com/{number}": "x" * 4096 for number in range(32)}
HEAVY = {
    **TINY,
    "engine": {"backend": "torch", "env": [{"name": f"A{n}", "value": "x" * 4096} for n in range(64)]},
    "podTemplate": {"metadata": {"annotations": FILLING}},
    "serviceTemplate": {"metadata": {"annotations": FILLING}},
}
"""Within the bounds of every field: half a megabyte, and its annotations make it 0.6."""

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]


@pytest.fixture
async def bare(server: ApiServer) -> AsyncIterator[Bare]:
    async with bare_client(server) as bare:
        yield bare


def puts(namespace: Namespace, number: int, spec: Any, annotations: dict[str, str]) -> Iterator[list[Request]]:
    about = {"apiVersion": NEURON_MODELS.api_version, "kind": NEURON_MODELS.kind, "spec": spec}
    for one in range(number):
        metadata = {"name": f"m-{one:03}", "annotations": annotations}
        yield [request("POST", NEURON_MODELS.path(namespace.name), {**about, "metadata": metadata})]


async def seconds_until(done: Callable[[], Any]) -> float:
    began = time.monotonic()
    while not await asyncio.to_thread(done):
        await asyncio.sleep(0.02)
        assert time.monotonic() < began + 120
    return time.monotonic() - began


async def look_after(tenant: Namespace, name: str) -> tuple[float, float]:
    """Seconds until a new model has its first status, and until an edit of it has led to a write."""
    await asyncio.to_thread(tenant.put_model, name)
    first = await seconds_until(lambda: tenant.condition("Accepted", name)[0] == "True")
    await eventually(lambda: name in tenant.children()["Service"])
    annotated = {"serviceTemplate": {"metadata": {"annotations": {"example.com/edited": "yes"}}}}
    await asyncio.to_thread(tenant.patch, NEURON_MODELS, name, {"spec": annotated})

    def is_written() -> bool:
        return "example.com/edited" in tenant.get(BY_KIND["Service"], name)["metadata"].get("annotations", {})

    return first, await seconds_until(is_written)


@pytest.mark.timeout(900)
async def test_another_tenants_models_are_looked_after_beside_many_and_heavy_ones(
    server: ApiServer, bare: Bare, tmp_path: Path
) -> None:
    quiet, heavy, many = (Namespace(server) for _ in range(3))
    measured: list[tuple[float, float]] = []

    async def measure(name: str, process: Process) -> None:
        measured.append(await look_after(quiet, name))
        print(f"{name}: {measured[-1]}, {resident_mib(process, 'VmHWM'):.0f} MiB", flush=True)

    async def follow(process: Process) -> None:
        await eventually(process.is_leading)
        # The API server takes a tenth of a second of CPU time for each write of a heavy model, whoever waits.
        await bare.send_all(puts(heavy, NUM_HEAVY, HEAVY, {"example.com/note": "x" * 60_000}))
        await seconds_until(lambda: heavy.condition("Accepted", f"m-{NUM_HEAVY - 1}")[0])
        await look_after(quiet, "before")  # behind the last of their events
        load = asyncio.create_task(bare.send_all(puts(many, NUM_TINY, TINY, {})))
        while not load.done() or len(measured) < 6:
            await measure(f"chat-{len(measured)}", process)
        await seconds_until(lambda: many.condition("Accepted", f"m-{NUM_TINY - 1}")[0])

    async def begin_again(process: Process) -> None:
        await eventually(process.is_leading)
        for number in range(6):
            await measure(f"later-{number}", process)

    for work in (follow, begin_again):
        with free_ports(2) as ports:
            process = Process(server.kubeconfig(OPERATOR_USER), tmp_path / work.__name__, ports)
            try:
                await work(process)
                assert process.process.poll() is None
                assert resident_mib(process, "VmHWM") < LIMIT_MIB
                assert process.end() == 0
            finally:
                process.kill()
    (job,) = many.list(BY_KIND["Job"])
    assert MAX_OWNERS <= len(owners_of(job)) <= 2 * MAX_OWNERS
    assert heavy.condition("Accepted", "m-000") == ("False", "InvalidSpec")
    assert f"at most {MAX_SPEC_BYTES}" in str(heavy.model("m-000")["status"])
    assert max(first for first, _ in measured) < FIRST_STATUS_SECONDS, measured
    assert max(second for _, second in measured) < WRITE_SECONDS, measured
