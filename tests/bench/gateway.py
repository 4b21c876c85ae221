"""What the gateway costs: requests per second of one core, CPU per streamed chunk, and latency that it adds.

Used by the suite. The gateway is the real process; this one plays clients, and for streams replicas, too. For requests
clients and replicas are processes of their own. Costs are CPU time of the gateway alone, so that they hold for one core
whatever else the machine does. Latency is not: its row says how long the gateway waited for a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median, quantiles
from typing import Any, cast

import httptools
import uvloop

from bench.front_end import cpu_seconds, waited_seconds
from bench.report import Meter, Row, at_least, at_most
from helpers.gateway_process import Process, started

NUM_REPLICAS = 100
NUM_CONNECTIONS = 64
NUM_STREAMS = 64
NUM_WARM_UP_ROUNDS = 20
MIN_REQUESTS_PER_SECOND = 1000.0
MUST_MICROSECONDS = 15.0
MUST_MILLISECONDS = 5.0
CHUNK = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1,"model":"chat","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'  # noqa: E501
BODY = {"id": "cmpl-1", "choices": [{"text": " answer"}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}


def measure(seconds: float, num_rounds: int, num_runs: int) -> list[Row]:
    return [*_request_rows(seconds, num_runs), _stream_row(num_rounds, num_runs)]


def _request_rows(seconds: float, num_runs: int) -> Iterator[Row]:
    with replicas(NUM_REPLICAS) as ports, started(_document(ports)) as process, _client() as driven:
        meter = Meter()
        driven((process.port,), seconds / 2)
        capacity, added = [], list[tuple[float, ...]]()
        for _ in range(num_runs):
            before = cpu_seconds(process.process.pid)
            (latencies,) = driven((process.port,), seconds)
            capacity.append(len(latencies) / (cpu_seconds(process.process.pid) - before))
        note = f"{NUM_REPLICAS} replicas, bodies of 200 bytes, {NUM_CONNECTIONS} connections; median of {num_runs} runs"
        target = at_least(MIN_REQUESTS_PER_SECOND)
        yield Row("gateway, requests", (median(capacity),), "/s of one core", target, note, meter.read())
        meter, rate = Meter(), MIN_REQUESTS_PER_SECOND / 2
        for _ in range(num_runs):
            before = waited_seconds(process.process.pid)
            # In turns, so that both meet the same machine.
            through, direct = driven((process.port, ports[0]), seconds, 2 * rate)
            waited = (waited_seconds(process.process.pid) - before) / len(through) * 1000
            late = [(_late(through, share), _late(direct, share)) for share in (50, 99)]
            added.append((waited, *late[1], *(one - other for one, other in late)))
        waited, with_it, without, p50, p99 = (median(column) for column in zip(*added, strict=True))
        note = (
            f"{rate:.0f} requests/s; the median {p50:.2f} ms; p99 {with_it:.2f} ms with it, {without:.2f} ms without;"
            f" it waited for a core {waited:.2f} ms a request"
        )
        yield Row("gateway, added latency, p99", (p99,), "ms", at_most(MUST_MILLISECONDS), note, meter.read())


def _document(ports: Sequence[int]) -> dict[str, Any]:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return {"models": [{"name": "chat", "addresses": addresses}]}


def _late(latencies: Sequence[float], share: int) -> float:
    """The percentile in milliseconds."""
    return quantiles(latencies, n=100, method="inclusive")[share - 1] * 1000


# Replicas of a process of their own


class _Replica(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        content = json.dumps(BODY).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._answer = head % len(content) + content

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(self._answer)


async def _serve(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Replica, "127.0.0.1", 0) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def replicas(count: int) -> Iterator[list[int]]:
    """The ports of replicas that answer at once."""
    with subprocess.Popen(
        [sys.executable, "-c", f"from bench.gateway import serve; serve({count})"],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def serve(count: int) -> None:
    uvloop.run(_serve(count))


# Clients


class _Connection(asyncio.Protocol):
    """Sends one request after another, and notes how long each took from when it was due."""

    def __init__(self, latencies: list[float]) -> None:
        self.latencies = latencies
        self.is_busy = False
        self.due = 0.0
        self.done = asyncio.Event()
        self.number = 0
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, number: int, due: float) -> None:
        prompt = f"Request {number} asks for an answer of some words. " * 3
        body = json.dumps({"model": "chat", "prompt": prompt, "max_tokens": 16}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\ncontent-length: %d\r\n\r\n"
        self.is_busy, self.due = True, due
        self.done.clear()
        self._transport.write(head % len(body) + body)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200
        self.latencies.append(time.perf_counter() - self.due)
        self.is_busy = False
        self.done.set()


async def _drive(ports: Sequence[int], seconds: float, rate: float | None) -> list[list[float]]:
    """Latencies by port, which get requests in turns; without a rate every connection sends when it has its answer."""
    loop, latencies = asyncio.get_running_loop(), [list[float]() for _ in ports]
    opened = [
        [
            (await loop.create_connection(partial(_Connection, found), "127.0.0.1", port))[1]
            for _ in range(NUM_CONNECTIONS)
        ]
        for port, found in zip(ports, latencies, strict=True)
    ]
    begin = time.perf_counter()
    end = begin + seconds

    async def busy(one: _Connection, first: int) -> None:
        number = first
        while (now := time.perf_counter()) < end:
            one.send(number, now)
            number += NUM_CONNECTIONS
            await one.done.wait()

    if rate is None:
        await asyncio.gather(*(busy(one, number) for each in opened for number, one in enumerate(each)))
    else:
        for number in range(int(seconds * rate)):
            due = begin + number / rate
            while (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(min(wait, 0.001))
            each = opened[number % len(opened)]
            free = next((one for one in each if not one.is_busy), each[number % NUM_CONNECTIONS])
            if free.is_busy:
                await free.done.wait()
            free.send(number, due)
    for one in (one for each in opened for one in each):
        if one.is_busy:
            await one.done.wait()
        one.close()
    return latencies


def drive(ports: Sequence[int], seconds: float, rate: float | None = None) -> list[list[float]]:
    return uvloop.run(_drive(ports, seconds, rate))


@contextlib.contextmanager
def _client() -> Iterator[Any]:
    """`drive` in a process of its own: here a section runs on a thread beside others."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda *arguments: pool.submit(drive, *arguments).result()


# Streams


def _stream_row(num_rounds: int, num_runs: int) -> Row:
    meter = Meter()
    taken = []
    for _ in range(num_runs):
        with (
            socket.create_server(("127.0.0.1", 0), backlog=NUM_STREAMS) as replica,
            started(_document([replica.getsockname()[1]])) as process,
        ):
            taken.append(_cpu_microseconds_per_chunk(process, replica, num_rounds))
    return Row(
        f"gateway, {NUM_STREAMS} streams",
        (median(taken),),
        "us CPU/chunk",
        at_most(MUST_MICROSECONDS),
        f"median of {num_runs} runs of {num_rounds} chunks",
        meter.read(),
    )


def _cpu_microseconds_per_chunk(process: Process, replica: socket.socket, num_rounds: int) -> float:
    """The next chunks are sent when every client has read the last ones: each is an event of its own."""
    with contextlib.ExitStack() as stack:
        clients, servers = [], []
        body = json.dumps({"model": "chat", "prompt": "x", "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n" % len(body)
        for _ in range(NUM_STREAMS):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", process.port))))
            clients[-1].sendall(head + body)
            servers.append(stack.enter_context(replica.accept()[0]))
            servers[-1].recv(65_536)
            kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            servers[-1].sendall(b"HTTP/1.1 200 OK\r\n%b\r\n" % kind)
            clients[-1].recv(65_536)
        sent = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
        poll = select.epoll()
        stack.callback(poll.close)
        by_number = {one.fileno(): one for one in clients}
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        spent = 0.0
        for step in range(NUM_WARM_UP_ROUNDS + num_rounds):
            if step == NUM_WARM_UP_ROUNDS:
                spent = cpu_seconds(process.process.pid)
            for one in servers:
                one.sendall(sent)
            missing = len(sent) * NUM_STREAMS
            while missing:
                for number, _ in poll.poll():
                    missing -= len(by_number[number].recv(65_536))
        return (cpu_seconds(process.process.pid) - spent) / (num_rounds * NUM_STREAMS) * 1e6
