"""A front end and an engine over the strict backend in one process: real HTTP, a real border, no torch, no waiting.

The engine runs on its own thread. With `paced=True` it makes a step only when the test permits one, so a test
controls what is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zmq
from msgspec.structs import replace

from helpers.chat_model import write_chat_model
from helpers.engine_driver import OfTheDevice
from helpers.strict_backend import StrictBackend
from neuron_runtime.adapters.peft import check_digest
from neuron_runtime.config import (
    CONFIG_VERSION,
    AdapterOptions,
    MediaOptions,
    ModelSource,
    RuntimeConfig,
    ServerOptions,
    TextOptions,
)
from neuron_runtime.core import BackendLimits, StepOutput, Task
from neuron_runtime.engine import messages
from neuron_runtime.engine.backpressure import QueueLimits
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.messages import Abort, ModelFound, Ready
from neuron_runtime.grammars.guides import grammar_guides
from neuron_runtime.local_settings import ONLY_NAMED, AdapterSettings, LocalSettings
from neuron_runtime.processes.control import Control, EngineEnded, EngineStarted, StartDrain, encode_line
from neuron_runtime.processes.engine import Border, Worker
from neuron_runtime.processes.front_end import HERE, FrontEnd
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.processes.supervisor import listen, url_of

MODEL = "test-model"
LIMITS = BackendLimits(
    max_rows=2,
    max_model_length=256,
    max_step_tokens=256,
    layout="blocks",
    block_size=16,
    num_blocks=64,
    max_logprobs=5,
    reports_prompt_logprobs=True,
)


class PacedBackend(StrictBackend):
    """Completes a step only when permitted."""

    def __init__(self, limits: BackendLimits, vocabulary_size: int, paced: bool) -> None:
        super().__init__(limits, vocabulary_size=vocabulary_size)
        self.paced = paced
        self.permits = threading.Semaphore(0)
        self.waiting = False
        self.num_collected = 0
        self.failure: Exception | None = None

    def collect(self, step: int) -> StepOutput:
        if self.paced:
            self.waiting = True
            self.permits.acquire()
            self.waiting = False
        if self.failure is not None:
            raise self.failure
        self.num_collected += 1
        batch = self._in_flight[0].batch
        output = super().collect(step)
        if not self.limits.vector_size:
            return output
        texts = {added.slot: added.token_ids for added in batch.added}
        vectors = tuple(vector_of(texts[slot], self.limits.vector_size) for slot in batch.rows.slot)
        return replace(output, token_ids=((),) * len(vectors), vectors=vectors)


def vector_of(token_ids: Sequence[int], size: int) -> bytes:
    """How often each remainder is among the ids of a text."""
    counts = [0.0] * size
    for token_id in token_ids:
        counts[token_id % size] += 1.0
    return array("f", counts).tobytes()


class EngineThread:
    """The work of the engine process, on a thread."""

    def __init__(
        self, run_dir: Path, incarnation: int, model_dir: Path, backend: PacedBackend, max_queued: int
    ) -> None:
        self.backend = backend
        self._guides = grammar_guides(model_dir, backend.limits)
        self.engine = Engine(
            backend,
            max_queued_requests=max_queued,
            guides=self._guides,
            drafting=OfTheDevice(backend.limits),
            check_adapter=check_digest,
        )
        self.error: Exception | None = None
        self._run_dir, self._incarnation = run_dir, incarnation
        self._border = Border(run_dir, incarnation)
        self._deadline = Deadline(run_dir / f"deadline-{incarnation}")
        self._worker = Worker(self.engine, self._border, self._deadline)
        self._stopping = False
        self._model_dir = model_dir
        self._max_queued = max_queued
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self, ready: bool = True) -> None:
        self._border.send(messages.StartProgress("loading weights", 0.25))
        if ready:
            self.become_ready()
        self._thread.start()

    def become_ready(self) -> None:
        self._border.send(ModelFound(str(self._model_dir)))
        self._border.send(Ready(self.backend.limits, QueueLimits(self._max_queued), 0.5, 0.25))

    def _run(self) -> None:
        try:
            self._worker.run(lambda: self._stopping)
        except Exception as error:  # noqa: BLE001 - the process would end with it
            self.error = error

    def stop(self) -> None:
        self._stopping = True
        self.backend.paced = False
        self.backend.permits.release()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        waker = messages.socket(context, zmq.PUSH, self._run_dir, messages.ENGINE_INBOX, self._incarnation)
        waker.send(messages.encoder.encode(Abort(())))
        self._thread.join()
        self.engine.close()
        self._guides.close()
        context.destroy(linger=0)
        self._border.close()
        self._deadline.close()


@dataclass
class Serving:
    """A running server and handles for the test."""

    http: httpx.AsyncClient
    front_end: FrontEnd
    engine: EngineThread
    run_dir: Path
    finished: asyncio.Task[None]
    orders: int
    start_engine: Callable[[int], EngineThread]
    incarnations: list[int] = field(default_factory=lambda: [1])

    @property
    def backend(self) -> PacedBackend:
        return self.engine.backend

    def tell(self, message: Control) -> None:
        """The state that the supervisor would report."""
        os.write(self.orders, encode_line(message))

    def permit(self, num_steps: int = 1) -> None:
        # A second look before the engine's thread has run must not find it waiting.
        self.backend.waiting = False
        self.backend.permits.release(num_steps)

    async def replace_engine(self, message: str) -> None:
        """Replaces the engine by a new one."""
        self.tell(EngineEnded(message))
        await asyncio.to_thread(self.engine.stop)
        self.incarnations.append(self.incarnations[-1] + 1)
        self.engine = self.start_engine(self.incarnations[-1])
        self.tell(EngineStarted(self.incarnations[-1]))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the series whose labels match."""
        text = (await self.http.get("/metrics")).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.partition("{")[0] == name and all(one in line for one in wanted)
        ]
        assert values, f"no series {name} {labels}"
        return sum(values)

    async def until(self, holds: Callable[[], Any]) -> None:
        """Waits for a condition, one step at a time where steps need a permit.

        The time limit of the test ends the wait.
        """
        while True:
            value = holds()
            if await value if asyncio.iscoroutine(value) else value:
                return
            if self.backend.waiting:
                self.permit()
            await asyncio.sleep(0.01)

    async def answer_token_by_token(self, asked: asyncio.Task[Any]) -> None:
        """Permits steps until a single request is done, each after the front end has got the previous token."""
        before = await self.metric("vllm:generation_tokens_total")
        for number in itertools.count(1):
            self.permit()
            while not asked.done() and await self.metric("vllm:generation_tokens_total") < before + number:
                await asyncio.sleep(0.001)
            if asked.done():
                return

    async def until_metric(self, name: str, expected: float, **labels: str) -> None:
        async def holds() -> bool:
            return await self.metric(name, **labels) == expected

        await self.until(holds)

    async def answer(self, asked: asyncio.Task[httpx.Response]) -> httpx.Response:
        """The result of a request that needs steps."""
        await self.until(asked.done)
        return asked.result()

    def unpace(self) -> None:
        """Lets the engine run freely from now on."""
        self.backend.paced = False
        self.permit()


@contextlib.asynccontextmanager
async def serving(
    model_dir: Path,
    *,
    limits: BackendLimits = LIMITS,
    max_queued: int = 4,
    paced: bool = False,
    ready: bool = True,
    vocabulary_size: int = 320,
    options: ServerOptions | None = None,
    text: TextOptions | None = None,
    api_key_file: Path | None = None,
    settings: LocalSettings = HERE,
    adapters: AdapterSettings = ONLY_NAMED,
    stall_seconds: int = 60,
    task: Task = "generate",
    media: MediaOptions | None = None,
) -> AsyncIterator[Serving]:
    """A server on a free port, ready by default; everything is closed afterwards."""
    config = RuntimeConfig(
        version=CONFIG_VERSION,
        model=ModelSource(uri=model_dir.as_uri()),
        served_names=(MODEL, "alias"),
        task=task,
        media=media or MediaOptions(),
        server=options or ServerOptions(access_log=False),
        text=text or TextOptions(),
        adapters=AdapterOptions(max_active=limits.max_adapters, max_rank=limits.max_adapter_rank or 16),
    )
    with tempfile.TemporaryDirectory(prefix="nr-") as folder, listen("127.0.0.1", 0, stall_seconds) as listener:
        run_dir = Path(folder)

        def start_engine(incarnation: int) -> EngineThread:
            backend = PacedBackend(limits, vocabulary_size, paced)
            engine = EngineThread(run_dir, incarnation, model_dir, backend, max_queued)
            engine.start(ready)
            return engine

        front_end = FrontEnd(
            config, run_dir, url_of(listener), api_key_file=api_key_file, settings=settings, adapters=adapters
        )
        read_fd, write_fd = os.pipe()
        finished = asyncio.create_task(front_end.run(listener, os.fdopen(read_fd)))
        # Nothing here is encrypted; loading certificates would take a tenth of a test.
        async with httpx.AsyncClient(base_url=url_of(listener), timeout=60, verify=False) as http:
            served = Serving(http, front_end, start_engine(1), run_dir, finished, write_fd, start_engine)
            served.tell(EngineStarted(1))
            try:
                if ready:
                    await until_healthy(served)
                yield served
            finally:
                if not finished.done():
                    served.tell(StartDrain(0.0, 0.0))
                await asyncio.wait((finished,))
                await asyncio.to_thread(served.engine.stop)
                os.close(write_fd)


async def until_healthy(served: Serving) -> None:
    async def healthy() -> bool:
        return (await served.http.get("/health")).status_code == 200

    await served.until(healthy)


def make_model(folder: Path) -> Path:
    return write_chat_model(folder, max_length=256)
