"""`neuron-gateway` as a process, in front of real servers of the runtime (whose device is simulated)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers import gateway_process
from helpers.gateway_process import Process
from helpers.serve_command import FRONT_END, ServeCommand, serve

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
PATH = "/v1/chat/completions"
STEP_SECONDS = 0.02
QUICK = {"drainDelaySeconds": 0.2, "silenceSeconds": 1.0, "connectSeconds": 1.0}

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def servers(count: int, *flags: str) -> Iterator[list[ServeCommand]]:
    override = json.dumps({"stepMilliseconds": STEP_SECONDS * 1000})
    arguments = (str(MODEL), "--backend", "simulated", "--port", "0", "--override-neuron-config", override)
    names = ("--served-model-name", "chat", "--no-access-log")
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(count) as starting:
            begun = [starting.submit(stack.enter_context, serve(*arguments, *names, *flags)) for _ in range(count)]
        made = [one.result() for one in begun]
        for one in made:
            one.until_ready()
        yield made


def address(server: ServeCommand) -> str:
    return server.url().removeprefix("http://")


def model(*made: ServeCommand) -> dict[str, Any]:
    return {"name": "chat", "addresses": [address(one) for one in made]}


class Stream:
    """A streamed answer, read by a thread of its own."""

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        self.events: list[str] = []
        self.error = ""
        self.is_over = threading.Event()
        self._body = {"model": "chat", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=self._body, timeout=60, verify=False) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line)
        except httpx.HTTPError as error:
            self.error = str(error) or type(error).__name__
        finally:
            self.is_over.set()

    @property
    def is_whole(self) -> bool:
        return self.is_over.is_set() and self.events[-1:] == ["data: [DONE]"]

    @property
    def told(self) -> str:
        """Why it broke off."""
        return self.error or next((event for event in self.events if event.startswith('data: {"error"')), "")

    def join(self) -> None:
        assert self.is_over.wait(60)
        self._thread.join()


def until(holds: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def running(server: ServeCommand) -> int:
    return int(httpx.get(f"{server.url()}/load", timeout=60, verify=False).json()["server_load"])


def spread(process: Process, made: Sequence[ServeCommand], each: int, max_tokens: int) -> dict[str, list[Stream]]:
    """Streams until every server has `each` of this gateway."""
    found: dict[str, list[Stream]] = {address(one): [] for one in made}
    for number in range(200):
        if all(len(streams) >= each for streams in found.values()):
            return found
        before = {one: process.metric("gateway_in_flight", f'replica="{one}"') for one in found}
        stream = Stream(process.url, f"{number} is a number", max_tokens)
        until(lambda stream=stream: stream.events)
        where = [one for one in found if process.metric("gateway_in_flight", f'replica="{one}"') > before[one]]
        found[where[0]].append(stream)
    raise AssertionError("one server got nothing")


@pytest.fixture(scope="module")
def two() -> Iterator[list[ServeCommand]]:
    with servers(2) as made:
        yield made


def test_a_frozen_or_killed_server_and_a_killed_gateway_break_only_their_own_streams(two: list[ServeCommand]) -> None:
    document = {"models": [model(*two)], "timeouts": QUICK}
    with gateway_process.started(document) as first, gateway_process.started(document) as second:
        frozen, alive = map(address, two)
        streams = {id(one): spread(one, two, 1, 400) for one in (first, second)}
        front_end = two[0].child(FRONT_END)
        os.kill(front_end, signal.SIGSTOP)
        try:
            for one in (first, second):
                for stream in streams[id(one)][frozen]:
                    stream.join()
                    assert "replica_frozen" in stream.told
            assert not any(stream.is_over.is_set() for one in streams.values() for stream in one[alive])
        finally:
            os.kill(front_end, signal.SIGCONT)
        first.end(signal.SIGKILL)
        for stream in streams[id(first)][alive]:
            stream.join()
            assert stream.told
        for stream in streams[id(second)][alive]:
            stream.join()
            assert stream.is_whole, stream.events[-3:]
        again = spread(second, two, 1, 200)
        os.kill(front_end, signal.SIGKILL)  # the supervisor starts another one
        for stream in again[frozen]:
            stream.join()
            assert "replica_lost" in stream.told
        answers = [
            httpx.post(f"{second.url}/v1/completions", timeout=60, verify=False,
                       json={"model": "chat", "prompt": f"{n} is", "max_tokens": 2}).status_code
            for n in range(8)
        ]  # fmt: skip
        assert answers == [200] * 8
        for stream in again[alive]:
            stream.join()
            assert stream.is_whole


def test_a_client_that_leaves_ends_its_generation_and_a_gateway_that_is_stopped_ends_none(
    two: list[ServeCommand],
) -> None:
    server = two[1]
    with gateway_process.started({"models": [model(server)], "timeouts": QUICK}) as gateway:
        body = {"model": "chat", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=60, verify=False) as answer:
            next(answer.iter_lines())
            until(lambda: running(server) == 1)
        until(lambda: running(server) == 0)
        stream = Stream(gateway.url, "It is", 100)
        until(lambda: stream.events)
        gateway.process.send_signal(signal.SIGTERM)
        until(lambda: gateway.status("/readyz") == 503)
        short = {"model": "chat", "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{gateway.url}/v1/completions", json=short, timeout=60, verify=False).status_code == 200
        stream.join()
        assert stream.is_whole
        assert gateway.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{gateway.url}/health", verify=False)
        lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if line.startswith("{")]
        assert {(line["status"], line["model"], line.get("error")) for line in lines} == {
            (200, "chat", None),
            (200, "chat", "client_left"),
        }


def cached(url: str, num_chats: int, turns: int) -> float:
    """The share of prompt tokens that the servers had in their caches, of chats that go on in turns."""
    source = random.Random(3)
    words = ["node", "device", "core", "request", "queue", "row", "token", "step", "model", "answer"]
    system = {"role": "system", "content": "You answer questions about this. " * 10}
    chats = [[system, {"role": "user", "content": " ".join(source.choices(words, k=40))}] for _ in range(num_chats)]
    prompt = found = 0
    with httpx.Client(timeout=60, verify=False) as client:
        for _ in range(turns):
            for messages in chats:
                body = {"model": "chat", "messages": messages, "max_tokens": 8}
                answer = client.post(f"{url}{PATH}", json=body).json()
                prompt += answer["usage"]["prompt_tokens"]
                found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "user", "content": " ".join(source.choices(words, k=20))})
    return found / prompt


@pytest.mark.long
def test_chats_find_their_prefixes_on_4_servers_as_on_one() -> None:
    flags = ("--enable-prefix-caching",)
    with servers(5, *flags) as (alone, *four), gateway_process.started({"models": [model(*four)]}) as gateway:
        together = cached(gateway.url, 24, 4)
        on_one = cached(alone.url(), 24, 4)
        print(f"prefix hits: {together:.3f} of prompt tokens on 4 servers, {on_one:.3f} on one")
        assert together >= 0.9 * on_one > 0.3
