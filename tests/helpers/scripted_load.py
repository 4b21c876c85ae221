"""A load with known numbers against a real server: `expected` has the values that its metrics must show.

Every phase waits for its own end, so counts do not depend on the speed of the machine. The server must run with
`FLAGS`. Every request ignores end tokens, so answers have their full length.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

BLOCK_SIZE, NUM_BLOCKS, ROWS, QUEUED, MODEL_LENGTH = 16, 1020, 2, 1, 16000
LONG = 8000
"""Length of an answer that is cut off: ten seconds on an idle machine, enough for the client's actions meanwhile."""
FLAGS = (
    *("--served-model-name", "chat", "--port", "0", "--layout", "blocks", "--dtype", "float32"),
    *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--max-num-seqs", str(ROWS), "--max-queued-requests", str(QUEUED), "--max-model-len", str(MODEL_LENGTH)),
)
VOCABULARY = 300
"""Token ids below this are plain tokens of the small model."""

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@lru_cache
def values_of(text: str) -> Values:
    """Every series of an exposition by name and labels, without those that all have."""
    return {
        (
            sample.name,
            frozenset((name, value) for name, value in sample.labels.items() if name not in ("model_name", "engine")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass(frozen=True)
class Scrape:
    """`/metrics` at some moment of the load."""

    text: str
    content_type: str

    @property
    def values(self) -> Values:
        return values_of(self.text)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series whose labels match."""
        found = [v for (n, have), v in self.values.items() if n == name and labels.items() <= dict(have).items()]
        assert found, f"no series {name} {labels}"
        return sum(found)


@dataclass
class Expected:
    """Expected counts of the requests so far. Token counts of interrupted requests are bounds."""

    finished: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    responses: Counter[str] = field(default_factory=Counter)
    """HTTP responses by status code, without scrapes."""
    prompts: list[int] = field(default_factory=list)
    """Prompt tokens of all finished requests."""
    answers: list[int] = field(default_factory=list)
    """Tokens of all complete answers."""
    cut_off: list[int] = field(default_factory=list)
    """Maximum tokens of answers that were interrupted after their first token."""
    max_tokens: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    """Requested answers, over all prompts of all bodies."""
    longest: list[int] = field(default_factory=list)
    """Tokens of the longest answer of each prompt whose answers are complete."""
    prefix_hits: int = 0
    preemptions: int = 0
    restarts: int = 0

    def ended(self, reason: str, num_prompt: int, num_tokens: int, max_tokens: int, choices: int = 1) -> None:
        """Counts a prompt with `choices` complete answers of equal length."""
        self.finished[reason] += choices
        self.prompts += [num_prompt] * choices
        self.answers += [num_tokens] * choices
        self.max_tokens += [max_tokens] * choices
        self.choices.append(choices)
        self.longest.append(num_tokens)

    def was_cut_off(self, reason: str, num_prompt: int, max_tokens: int) -> None:
        self.finished[reason] += 1
        self.prompts.append(num_prompt)
        self.cut_off.append(max_tokens)
        self.max_tokens.append(max_tokens)
        self.choices.append(1)


class ScriptedLoad:
    """Runs the phases, one after the other.

    killed_engine: kills the engine process; inside the context no other engine can serve.
    until_ready: waits until the server can serve again.
    """

    def __init__(
        self,
        url: str,
        killed_engine: Callable[[], contextlib.AbstractContextManager[None]],
        until_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self.expected = Expected()
        self.scrapes: list[Scrape] = []
        self.began, self.began_at = time.monotonic(), time.time()
        self.seconds = 0.0
        self._killed_engine, self._until_ready = killed_engine, until_ready
        self._random = random.Random(7)
        hooks = {"response": [self._count_response]}
        self._http = httpx.AsyncClient(base_url=url, timeout=60, verify=False, event_hooks=hooks)

    async def run(self) -> None:
        async with self._http:
            for phase in (
                self.idle,
                self.answers_of_all_kinds,
                self.shared_prefixes,
                self.a_full_queue,
                self.more_than_the_cache_holds,
                self.mistakes,
                self.a_client_that_leaves,
                self.an_engine_that_dies,
            ):
                await phase()
                await self.scrape()
        self.seconds = time.monotonic() - self.began

    async def idle(self) -> None:
        """Before the first request."""

    async def answers_of_all_kinds(self) -> None:
        for num_prompt, stream in ((7, False), (20, True), (33, False)):
            await self._complete(num_prompt, 5, stream=stream)
        message = [{"role": "user", "content": "What is a core?"}]
        body = {"model": "chat", "messages": message, "max_tokens": 6, "ignore_eos": True}
        answer = await self._post("/v1/chat/completions", body)
        self.expected.ended("length", answer["usage"]["prompt_tokens"], 6, 6)
        await self._post("/v1/completions", self._body(self._prompt(12), 4, n=3, temperature=1.0))
        self.expected.ended("length", 12, 4, 4, choices=3)
        await self._post("/v1/completions", self._body(self._prompt(9), 8, stop_token_ids=list(range(320))))
        self.expected.ended("stop", 9, 1, 8)

    async def shared_prefixes(self) -> None:
        prompt = self._prompt(40)
        for cached in (0, len(prompt) // BLOCK_SIZE * BLOCK_SIZE):
            answer = await self._post("/v1/completions", self._body(prompt, 3))
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            self.expected.ended("length", len(prompt), 3, 3)
            self.expected.prefix_hits += cached

    async def a_full_queue(self) -> None:
        """Two requests run, one waits, one is refused; then the running ones disconnect."""
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(self._stream(10, LONG)) for _ in range(ROWS)]
            for lines in streams:
                await anext(lines)
            waiting = asyncio.create_task(self._complete(11, 5))
            await self._until("vllm:num_requests_waiting", 1)
            refused = await self._http.post("/v1/completions", json=self._body(self._prompt(8), 5))
            assert refused.status_code == 429, refused.text
            self.expected.refused["overloaded"] += 1
        for _ in range(ROWS):
            self.expected.was_cut_off("abort", 10, LONG)
        await waiting

    async def more_than_the_cache_holds(self) -> None:
        """Two answers that fit alone but not together: the younger one is preempted."""
        num_prompt, max_tokens = 7800, 450
        length = num_prompt + max_tokens
        assert -(-length // BLOCK_SIZE) < NUM_BLOCKS < 2 * -(-length // BLOCK_SIZE)
        prompts = [self._prompt(num_prompt) for _ in range(2)]
        await self._post("/v1/completions", self._body(prompts, max_tokens))
        for _ in prompts:
            self.expected.ended("length", num_prompt, max_tokens, max_tokens)
        self.expected.preemptions += 1

    async def mistakes(self) -> None:
        for status, reason, changes in (
            (400, "invalid_request", {"temperature": -1}),
            (400, "invalid_request", {"max_tokens": "many"}),
            (404, "model_not_found", {"model": "another"}),
            (400, "context_length_exceeded", {"max_tokens": MODEL_LENGTH}),
        ):
            answer = await self._http.post("/v1/completions", json=self._body(self._prompt(8), 5) | changes)
            assert answer.status_code == status, answer.text
            self.expected.refused[reason] += 1

    async def a_client_that_leaves(self) -> None:
        async with self._stream(13, LONG) as lines:
            await anext(lines)
        self.expected.was_cut_off("abort", 13, LONG)
        await self._until("vllm:num_requests_running", 0)

    async def an_engine_that_dies(self) -> None:
        async with self._stream(14, LONG) as lines:
            await anext(lines)
            await self.scrape()
            with self._killed_engine():
                with contextlib.suppress(StopAsyncIteration):
                    while True:
                        last = await anext(lines)
                assert "error" in last
                # The front end gets the message later.
                await self._until("neuron_serving_group_members_present", 0)
        self.expected.was_cut_off("error", 14, LONG)
        self.expected.restarts += 1
        await self._until_ready()
        await self._complete(15, 5)

    async def scrape(self) -> Scrape:
        answer = await self._http.get("/metrics")
        made = Scrape(answer.text, answer.headers["content-type"])
        self.scrapes.append(made)
        return made

    # Requests

    async def _count_response(self, response: httpx.Response) -> None:
        if response.request.url.path != "/metrics":
            self.expected.responses[str(response.status_code)] += 1

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(10, VOCABULARY) for _ in range(length)]

    def _body(self, prompt: list[int] | list[list[int]], max_tokens: int, **changes: Any) -> dict[str, Any]:
        body = {"model": "chat", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return body | changes

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def _complete(self, num_prompt: int, max_tokens: int, stream: bool = False) -> None:
        if stream:
            async with self._stream(num_prompt, max_tokens) as lines:
                async for _ in lines:
                    pass
        else:
            await self._post("/v1/completions", self._body(self._prompt(num_prompt), max_tokens))
        self.expected.ended("length", num_prompt, max_tokens, max_tokens)

    @contextlib.asynccontextmanager
    async def _stream(self, num_prompt: int, max_tokens: int) -> AsyncIterator[AsyncIterator[str]]:
        body = self._body(self._prompt(num_prompt), max_tokens, stream=True)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            yield (line async for line in answer.aiter_lines() if line)

    async def _until(self, name: str, value: float) -> None:
        """The time limit of the test ends the wait."""
        while (await self.scrape()).total(name) != value:
            self.scrapes.pop()
            await asyncio.sleep(0.005)


@cache
def run_against_a_server() -> ScriptedLoad:
    """Runs the load against the command with a small model on the torch backend, once in this process."""
    from helpers.chat_model import write_chat_model
    from helpers.serve_command import ENGINE, serve, stopped

    with (
        tempfile.TemporaryDirectory() as folder,
        serve(str(write_chat_model(Path(folder, "model"), max_length=MODEL_LENGTH)), *FLAGS) as command,
    ):

        async def ready_again() -> None:
            await asyncio.to_thread(command.until_ready, 2)

        @contextlib.contextmanager
        def killed_engine() -> Iterator[None]:
            engine = command.child(ENGINE)
            os.kill(engine, signal.SIGKILL)
            with stopped(command.successor(ENGINE, engine)):
                yield

        load = ScriptedLoad(command.until_ready(), killed_engine, until_ready=ready_again)
        asyncio.run(load.run())
    return load
