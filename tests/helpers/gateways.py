"""A gateway in the test's own event loop, with real sockets, and replicas that do what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from neuron_operator.gateway.config import Config, parse
from neuron_operator.gateway.gateway import Gateway, Wake
from neuron_operator.gateway.metrics import Metrics
from neuron_operator.gateway.models import Served, static
from neuron_operator.gateway.process import serving


@dataclass(frozen=True)
class Asked:
    """A request as a replica got it."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def _headers(lines: list[str]) -> dict[str, str]:
    parts = (line.partition(": ") for line in lines)
    return {name.lower(): value for name, _, value in parts}


Behaviour = Callable[[Asked, asyncio.StreamWriter], Awaitable[bool]]
"""Answers a request; whether the connection stays open."""


def answer(
    body: bytes, *, status: int = 200, kind: str = "application/json", headers: dict[str, str] | None = None
) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = chunk(b"")


async def echo(asked: Asked, writer: asyncio.StreamWriter) -> bool:
    """Says what it was asked."""
    said = {"path": asked.line.split()[1], "model": asked.json.get("model")}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    writer.write(answer(json.dumps({**said, "usage": usage}).encode()))
    return True


@dataclass(eq=False)
class Replica:
    behave: Behaviour = echo
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    num_lost: int = 0
    """Connections that a client ended."""
    address: str = ""
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    readers: list[asyncio.StreamReader] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _port: int = 0

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=2**26)
        self._port = self.server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """As a process that is killed: its connections are reset."""
        if self.server is not None:
            self.server.close()
            self.server = None
        for writer in list(self.writers):
            writer.transport.abort()
        for task in list(self.tasks):
            task.cancel()
        while self.tasks:
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.add(writer)
        self.readers.append(reader)
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *rest = head.strip().split("\r\n")
                headers = _headers(rest)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(line, headers, body)
                self.asked.append(asked)
                if not await self.behave(asked, writer):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            self.num_lost += 1
        finally:
            self.tasks.discard(task)
            self.writers.discard(writer)
            writer.close()


@contextlib.asynccontextmanager
async def replicas(*behaviours: Behaviour) -> AsyncIterator[list[Replica]]:
    made = [Replica(one) for one in behaviours]
    for one in made:
        await one.start()
    try:
        yield made
    finally:
        for one in made:
            await one.stop()


@dataclass(eq=False)
class Running:
    gateway: Gateway
    port: int
    log: list[dict[str, Any]]

    def serve(self, name: str, *replicas: Replica, **served: Any) -> None:
        """The model is known, and these replicas of it are ready."""
        addresses = tuple(one.address for one in replicas)
        fields = {"namespace": "default", "served_names": (name,), "addresses": addresses, **served}
        self.gateway.put(Served(name=name, **fields))

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=2**26))

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        async with contextlib.aclosing(await self.connect()) as client:
            client.send(path, body, headers)
            return await client.answer()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        async with contextlib.aclosing(await self.connect()) as client:
            client.write(head("GET", path, headers or {}))
            return await client.answer()

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"neuron_serving_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def running(document: dict[str, Any] | None = None, *, wake: Wake | None = None) -> AsyncIterator[Running]:
    """A gateway with the configuration, on a free port."""
    config: Config = parse({"host": "127.0.0.1", "port": 0, **(document or {})})
    log: list[dict[str, Any]] = []
    gateway = Gateway(config, Metrics(), wake=wake, log=log.append)
    async with serving(gateway) as port:
        for model in config.models:
            gateway.put(static(model))
        gateway.is_ready = True
        try:
            yield Running(gateway, port, log)
        finally:
            for connection in list(gateway.connections):
                connection.transport.abort()
            for model in list(gateway.directory.models):
                gateway.drop(model)
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes = b""
    """The body as it came, with its chunks."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nhost: test\r\n{lines}\r\n".encode()


@dataclass(eq=False)
class Client:
    """A connection that a test drives byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, path: str, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.write(head("POST", path, {"content-length": str(len(raw)), **(headers or {})}) + raw)

    def write(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def head(self) -> tuple[int, dict[str, str]]:
        line, *rest = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        return int(line.split()[1]), _headers(rest)

    async def answer(self) -> Answer:
        status, headers = await self.head()
        if headers.get("transfer-encoding") != "chunked":
            body = await self.reader.readexactly(int(headers["content-length"]))
            return Answer(status, headers, body, body)
        body, raw = b"", b""
        while True:
            line = await self.reader.readuntil(b"\r\n")
            data = await self.reader.readexactly(int(line, 16) + 2)
            body, raw = body + data[:-2], raw + line + data
            if data == b"\r\n":
                return Answer(status, headers, body, raw)

    async def rest(self) -> bytes:
        """Until the gateway ends the connection."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    async def aclose(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
