"""The client of the benchmarks against correct and faulty servers, and the server that they start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import client
from bench.client import Outcome, Sample
from bench.spawned import SpawnedServer
from helpers.ports import free_ports
from neuron_runtime.errors import ServingError

pytestmark = pytest.mark.long

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n'
END = b"data: [DONE]\n\n"


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server on its own thread with scripted responses; yields its URL."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    urls: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(lines["content-length"])))
        await answer(body, writer)
        await writer.drain()
        await reader.read()
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            started.set()
            await ended.wait()

    ended = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def requests(count: int = 1) -> tuple[bytes, ...]:
    return client.bodies(count, 4, 3, model="m", vocabulary_size=1000, seed=1)


def test_tokens_are_counted_for_any_split_of_the_bytes() -> None:
    stream = chunk(event("a\n\nb") + event("é")) + chunk(event("") + event("c") + USAGE + END) + chunk(b"")

    async def by_bytes(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for byte in HEAD + stream:
            writer.write(bytes([byte]))
            await writer.drain()

    with serving(by_bytes) as url:
        (sample,) = client.send(url, requests()).samples
    assert len(sample.tokens_at) == 3
    assert sample.tokens_at == sorted(sample.tokens_at)
    assert sample.num_output_tokens == 3
    assert sample.began < sample.tokens_at[0] <= sample.tokens_at[-1] <= sample.ended


def test_requests_run_together_and_ask_for_answers_of_full_length() -> None:
    bodies: list[dict[str, Any]] = []

    async def when_all_are_there(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        while len(bodies) < 3:
            await asyncio.sleep(0.01)
        writer.write(HEAD + chunk(event("a") + USAGE + END) + chunk(b""))

    with serving(when_all_are_there) as url:
        assert len(client.send(url, requests(3)).samples) == 3
    assert {len(body["prompt"]) for body in bodies} == {4}
    assert {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in bodies} == {(3, True, True)}
    assert requests(3) == requests(3)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\noops", "HTTP 502: oops"),
        (HEAD + chunk(event("a") + b'data: {"error":{"message":"died"}}\n\n') + chunk(b""), "died"),
        (b"SMTP ready\r\n", "not HTTP"),
        (HEAD + chunk(USAGE + END) + chunk(b""), "its answer is empty"),
    ],
)
def test_a_failed_request_ends_the_measurement(answer: bytes, error: str) -> None:
    async def badly(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    with serving(badly) as url, pytest.raises(ServingError, match=error):
        client.send(url, requests())


def test_an_absent_server_ends_the_measurement() -> None:
    with free_ports() as nobodys, pytest.raises(ServingError, match="cannot connect"):
        client.send(f"http://127.0.0.1:{nobodys}", requests(2))


def test_rates_count_from_the_first_request_to_the_last_end() -> None:
    outcome = Outcome((Sample(0.0, 4.0, [1.0, 2.0, 3.0], 5), Sample(0.5, 9.0, [1.5, 1.5], 4)))
    assert outcome.output_rate == pytest.approx(1.0)
    assert outcome.first_token_seconds == (1.0, 1.0)


def test_a_server_that_fails_to_start_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with (
        pytest.raises(ServingError, match=r"exited with code 10: .*ModelNotFound"),
        SpawnedServer([str(tmp_path / "none")]),
    ):
        pass
