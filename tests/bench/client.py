"""A lightweight client of the completions API that sends requests together and times their tokens.

Called by the suite, which compares its streams with the same prompts in process. It reads streams directly from the
socket (one callback per packet, a C parser), to use little of the machine that it loads. It is no load generator for
users: docs/benchmarks.md names those.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop

from bench.offline import random_prompts
from neuron_runtime.errors import ServingError

PATH = "/v1/completions"
TIMEOUT_SECONDS = 600.0


@dataclass(slots=True)
class Sample:
    """The result of a request; times in seconds on the monotonic clock.

    tokens_at: arrival of each event with text; events of one packet have the same time.
    num_output_tokens: as reported by the server.
    error: why it failed; empty on success.
    """

    began: float
    ended: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the clients of one run saw."""

    samples: tuple[Sample, ...]

    @property
    def output_rate(self) -> float:
        """Output tokens per second, from the first request to the end of the last answer."""
        seconds = max(one.ended for one in self.samples) - min(one.began for one in self.samples)
        return sum(one.num_output_tokens for one in self.samples) / seconds

    @property
    def first_token_seconds(self) -> tuple[float, ...]:
        return tuple(one.tokens_at[0] - one.began for one in self.samples)


def bodies(
    count: int, input_len: int, output_len: int, *, model: str, vocabulary_size: int, seed: int
) -> tuple[bytes, ...]:
    """Greedy completions of random prompts, streamed, with answers of exactly `output_len` tokens."""
    fixed = {"model": model, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    prompts = random_prompts(count, input_len, seed, vocabulary_size)
    return tuple(json.dumps({"prompt": prompt, **fixed, **stream}).encode() for prompt in prompts)


def send(base_url: str, requests: Sequence[bytes]) -> Outcome:
    """Send all requests at once and wait until they end. Raises ServingError if one fails."""
    outcome = Outcome(tuple(uvloop.run(_send_all(base_url, requests))))
    for sample in outcome.samples:
        if sample.error or not sample.tokens_at:
            raise ServingError(f"a request failed: {sample.error or 'its answer is empty'}")
    return outcome


async def _send_all(base_url: str, requests: Sequence[bytes]) -> list[Sample]:
    parts = urlsplit(base_url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    head = f"POST {PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n".encode()

    async def one(body: bytes) -> Sample:
        sample = Sample(time.monotonic())
        try:
            _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(sample), host, port)
        except OSError as error:
            sample.error = f"cannot connect: {error.strerror or error}"
            return sample
        await connection.ask(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        return sample

    return await asyncio.gather(*map(one, requests))


class Connection(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._now = 0.0
        self._line = b""
        self._other: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection was lost: {error}" if error else "the server closed the connection")

    async def ask(self, request: bytes) -> None:
        """Send the request and wait for the end of its response."""
        self._transport.write(request)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._ended
        except TimeoutError:
            self._sample.error = f"the response was incomplete after {TIMEOUT_SECONDS:.0f} s"
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
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
        body = b"".join(self._other)[:200].decode(errors="replace")
        self._end("" if self._status == 200 else f"HTTP {self._status}: {body}")

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if "error" in event:
            self._sample.error = str(event["error"])
            return
        self._sample.tokens_at += [self._now for choice in event["choices"] if choice["text"]]
        if usage := event.get("usage"):
            self._sample.num_output_tokens = usage["completion_tokens"]

    def _end(self, error: str) -> None:
        if not self._ended.done():
            self._sample.ended = time.monotonic()
            self._sample.error = self._sample.error or error
            self._ended.set_result(None)
