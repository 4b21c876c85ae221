"""A lightweight client of the OpenAI API that sends requests at given times or as fast as possible and times tokens.

Called by `bench serve` and the suite, in this process or in several. It reads streams directly from the socket (one
callback per packet, a C parser), to use little of the machine that it loads.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop

START_SECONDS = 0.05
"""Delay before the first request."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test. `headers` are sent with each request, names in lower case."""

    base_url: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    body: JSON, with `"stream": true`.
    at_seconds: when to send it, counted from the start; 0: as soon as `max_concurrency` allows.
    """

    body: bytes
    at_seconds: float = 0.0


@dataclass(slots=True)
class Sample:
    """The result of a request; times in seconds on the monotonic clock.

    tokens_at: arrival of each event with text; events of one packet have the same time.
    num_prompt_tokens, num_output_tokens: as reported by the server, or None.
    error: why it failed; empty on success.
    """

    began: float
    ended: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run."""

    samples: tuple[Sample, ...]
    cpu_seconds: tuple[float, ...]
    """CPU time of each client process."""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.usable = False
        self._transport: asyncio.Transport | None = None
        self._sample: Sample | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._now = 0.0
        self._line = b""
        self._other: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._end(f"the connection was lost: {error}" if error else "the server closed the connection")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, head: bytes, body: bytes, timeout_seconds: float) -> Sample:
        """Send a request and wait for the end of its response."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._line, self._other, self._status = b"", [], 0
        self._ended = asyncio.get_running_loop().create_future()
        self._sample = sample = Sample(time.monotonic())
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended
        except TimeoutError:
            sample.error = f"the response was incomplete after {timeout_seconds:.0f} s"
            self.usable = False
        self._sample = None
        sample.ended = sample.ended or time.monotonic()
        if not sample.error and self._status != 200:
            sample.error = f"HTTP {self._status}: {_message(b''.join(self._other))}"
        if not self.usable:
            self.close()
        return sample

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.usable = False
            self._end(f"not HTTP: {error}")

    # Callbacks of the parser.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._status != 200:
            self._other.append(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self.usable = self._parser.should_keep_alive()
        self._end("")

    def _event(self, data: bytes) -> None:
        sample = self._sample
        if sample is None or data == b"[DONE]":
            return
        event = orjson.loads(data)
        if "error" in event:
            sample.error = sample.error or _message(data)
            return
        for choice in event.get("choices", ()):
            if choice.get("text") or _content(choice.get("delta")):
                sample.tokens_at.append(self._now)
        usage = event.get("usage")
        if usage:
            sample.num_prompt_tokens, sample.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def _end(self, error: str) -> None:
        if self._ended is not None and not self._ended.done():
            assert self._sample is not None
            self._sample.ended = time.monotonic()
            self._sample.error = self._sample.error or error
            self._ended.set_result(None)


def _content(delta: Mapping[str, object] | None) -> bool:
    return bool(delta and (delta.get("content") or delta.get("reasoning_content")))


def _message(body: bytes) -> str:
    """The message of an OpenAI error object; for other bodies their beginning."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")


def run_clients(server: Server, asks: Sequence[Ask], max_concurrency: int | None, num_processes: int = 1) -> Run:
    """Send all requests and wait until they end. A failure is a sample with an error, never an exception.

    Args:
        max_concurrency: maximum requests in flight over all processes; None: no limit.
        num_processes: client processes, which get requests in turn; 1: send from this process.
    """
    start = time.monotonic() + START_SECONDS
    if num_processes == 1:
        return _run_here(server, tuple(asks), max_concurrency, start)
    start += num_processes  # time for processes to start
    bounds = [
        None if max_concurrency is None else _share(max_concurrency, i, num_processes) for i in range(num_processes)
    ]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(_run_here, server, tuple(asks[i::num_processes]), bounds[i], start)
            for i in range(num_processes)
            if bounds[i] != 0
        ]
        runs = [part.result() for part in parts]
    return Run(tuple(s for run in runs for s in run.samples), tuple(cpu for run in runs for cpu in run.cpu_seconds))


def _share(count: int, index: int, parts: int) -> int:
    return count // parts + (index < count % parts)


def _run_here(server: Server, asks: tuple[Ask, ...], max_concurrency: int | None, start: float) -> Run:
    return uvloop.run(_send_all(server, asks, max_concurrency, start))


async def _send_all(server: Server, asks: tuple[Ask, ...], max_concurrency: int | None, start: float) -> Run:
    pool = _Pool(server)
    free = asyncio.Semaphore(max_concurrency or max(1, len(asks)))

    async def send(ask: Ask) -> Sample:
        try:
            return await pool.ask(ask.body)
        finally:
            free.release()

    await asyncio.sleep(max(0.0, start - time.monotonic()))
    began = time.process_time()
    tasks = []
    for ask in asks:
        if (wait := start + ask.at_seconds - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        await free.acquire()
        tasks.append(asyncio.create_task(send(ask)))
    samples = await asyncio.gather(*tasks)
    spent = time.process_time() - began
    pool.close()
    return Run(tuple(samples), (spent,))


class _Pool:
    """Keep-alive connections."""

    def __init__(self, server: Server) -> None:
        parts = urlsplit(server.base_url)
        self._host = parts.hostname or "127.0.0.1"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout_seconds = server.timeout_seconds
        headers = {"host": parts.netloc, "content-type": "application/json", **server.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f"POST {parts.path.rstrip('/')}{server.path} HTTP/1.1\r\n{lines}".encode()
        self._idle: deque[Connection] = deque()

    async def ask(self, body: bytes) -> Sample:
        began = time.monotonic()
        try:
            connection = await self._connection()
        except OSError as error:
            return Sample(began, time.monotonic(), error=f"cannot connect: {error.strerror or error}")
        sample = await connection.ask(self._head, body, self._timeout_seconds)
        sample.began = began
        if connection.usable:
            self._idle.append(connection)
        return sample

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
