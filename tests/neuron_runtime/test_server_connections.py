"""Connections that a client leaves unfinished: bounded in size and time, refused as error objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from helpers.front_end import Serving, make_model, serving
from neuron_runtime.server import http_protocol
from neuron_runtime.server.http_protocol import MAX_HEAD_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(make_model(tmp_path_factory.mktemp("model"))) as one:
        yield one


async def told(served: Serving, sent: bytes) -> tuple[int, Any]:
    """Status and body of the answer with which the server closes the connection."""
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    ("start", "endless"),
    [(GET + b"X: ", b"x"), (GET, b"X: y\r\n"), (b"GET /", b"x")],
    ids=["header", "headers", "path"],
)
async def test_a_head_without_an_end_is_refused(served: Serving, start: bytes, endless: bytes) -> None:
    sent = start + endless * (MAX_HEAD_BYTES // len(endless) + 1)
    status, body = await told(served, sent)
    assert status == 431
    assert body["error"]["type"] == "invalid_request_error"


async def test_a_trailer_without_an_end_is_refused(served: Serving) -> None:
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(POST)
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"0\r\nX: " + b"x" * MAX_HEAD_BYTES)
    assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_a_long_body_is_no_long_head(served: Serving) -> None:
    answer = await served.http.post("/v1/completions", content=b" " * (4 * MAX_HEAD_BYTES) + b"{}")
    assert answer.json()["error"]["param"] == "prompt"


async def test_what_is_not_http_gets_an_error_object_too(served: Serving) -> None:
    status, body = await told(served, b"hello\r\n\r\n")
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n" + GET], ids=["nothing", "half", "half of the second"])
async def test_a_head_that_never_comes_ends_the_connection(
    served: Serving, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent)
    await reader.read()  # to its end
    writer.close()
