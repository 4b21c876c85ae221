"""The client of the engine: the limits of its queue hold while it takes no requests, and a new engine never meets
requests of the previous one."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from neuron_runtime.core import BackendLimits, FinishReason, Request, Sampling, TokenEvent
from neuron_runtime.engine.backpressure import QueueLimits
from neuron_runtime.engine.messages import Add, Ready, Step, ToEngine
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.errors import BackendFailed, Overloaded
from neuron_runtime.processes.engine import Border
from neuron_runtime.server.engine_client import EngineClient
from neuron_runtime.server.metrics import Metrics

LIMITS = BackendLimits(max_rows=2, max_model_length=64, max_step_tokens=64, num_blocks=64)


class Asker:
    """The recipient of requests."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.errors: list[Exception] = []

    def deliver(self, index: int, event: TokenEvent) -> None:
        self.tokens += event.token_ids

    def show_pending(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nr-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def engine(run_dir: Path, incarnation: int = 1) -> Iterator[Border]:
    """The sockets of an engine; the test plays the engine."""
    border = Border(run_dir, incarnation)
    yield border
    border.close()


@contextlib.asynccontextmanager
async def client_in(run_dir: Path) -> AsyncIterator[EngineClient]:
    made = EngineClient(
        run_dir,
        Metrics("model"),
        on_model=lambda folder: None,
        on_ready=lambda ready: None,
        on_broken=lambda error: None,
    )
    yield made
    made.close()


async def until_ready(border: Border, client: EngineClient, queue: QueueLimits, incarnation: int = 1) -> None:
    client.engine_started(incarnation)
    border.send(Ready(LIMITS, queue, 0.0, 0.0))
    while not client.ready:
        await asyncio.sleep(0.001)


def request(request_id: str, num_tokens: int) -> Request:
    return Request(request_id, (1,) * num_tokens, Sampling(max_tokens=5))


def submit(client: EngineClient, asker: Asker, num_tokens: int = 3) -> str:
    return client.submit([partial(request, num_tokens=num_tokens)], asker)[0]


def admitted(client: EngineClient, num_tokens: int = 3) -> list[str]:
    """Ids of all requests that it takes in."""
    ids: list[str] = []
    with contextlib.suppress(Overloaded):
        while len(ids) < 100:
            ids.append(submit(client, Asker(), num_tokens))
    return ids


async def received(border: Border, count: int) -> list[ToEngine]:
    mail: list[ToEngine] = []
    while len(mail) < count:
        mail += border.receive(wait=False)
        await asyncio.sleep(0.001)
    return mail


async def test_the_limit_of_requests_holds_while_a_step_runs(run_dir: Path) -> None:
    with engine(run_dir) as border:
        async with client_in(run_dir) as client:
            await until_ready(border, client, QueueLimits(max_requests=4))
            first = submit(client, Asker())
            ids = admitted(client)
            assert len(ids) == LIMITS.max_rows + 4 - 1
            client.abort(ids[:2])
            assert len(admitted(client)) == 2
            border.send(Step((TokenEvent(first, (7,), FinishReason.LENGTH),), (), EngineStats(num_running=1)))
            while first in client._recipients:
                await asyncio.sleep(0.001)
            assert len(admitted(client)) == 1


async def test_the_limit_of_prompt_tokens_holds_while_a_step_runs(run_dir: Path) -> None:
    with engine(run_dir) as border:
        async with client_in(run_dir) as client:
            await until_ready(border, client, QueueLimits(max_requests=1000, max_tokens=32))
            # The prompts of the rows are sent in addition.
            room = 32 + LIMITS.max_rows * LIMITS.max_model_length
            assert len(admitted(client, 16)) == room // 16


async def test_a_new_engine_meets_no_request_of_the_previous_one(run_dir: Path) -> None:
    asker = Asker()
    async with client_in(run_dir) as client:
        with engine(run_dir) as ended, engine(run_dir, 2) as border:
            await until_ready(ended, client, QueueLimits())
            old = [submit(client, asker) for _ in range(2)]
            await received(ended, 2)
            client.engine_ended("it was killed")
            await until_ready(border, client, QueueLimits(), 2)
            assert [str(error) for error in asker.errors] == ["it was killed"]
            # Their recipient ends only now.
            client.abort(old)
            new_asker = Asker()
            new = submit(client, new_asker)
            assert new not in old
            # Late tokens of the ended engine, under its own ids and even under the new one.
            ended.send(Step(tuple(TokenEvent(name, (6,)) for name in (*old, new)), (), EngineStats()))
            border.send(Step((TokenEvent(old[0], (8,)), TokenEvent(new, (7,), FinishReason.LENGTH)), (), EngineStats()))
            while not new_asker.tokens:
                await asyncio.sleep(0.001)
            assert (asker.tokens, new_asker.tokens) == ([], [7])
            (mail,) = await received(border, 1)
            assert isinstance(mail, Add)
            assert mail.request.request_id == new


async def test_requests_of_an_ended_engine_do_not_count_towards_the_limits_of_the_next(run_dir: Path) -> None:
    async with client_in(run_dir) as client:
        with engine(run_dir) as ended, engine(run_dir, 2) as border:
            await until_ready(ended, client, QueueLimits(max_requests=4))
            admitted(client)
            client.engine_ended("it was killed")
            with pytest.raises(BackendFailed, match="it was killed"):
                submit(client, Asker())
            await until_ready(border, client, QueueLimits(max_requests=4), 2)
            assert len(admitted(client)) == LIMITS.max_rows + 4
