"""Incomplete requests are bounded in size and time and refused with error objects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.front_end import Serving, make_model, serving
from neuron_runtime.processes.control import StartDrain
from neuron_runtime.server import http_protocol
from neuron_runtime.server.http_protocol import MAX_HEAD_BYTES, MAX_PIPELINED

pytestmark = pytest.mark.asyncio(loop_scope="module")

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(make_model(tmp_path_factory.mktemp("model"))) as one:
        yield one


async def refusal(served: Serving, sent: bytes) -> tuple[int, Any]:
    """Status and body of the response with which the server closes the connection."""
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
async def test_an_endless_request_head_is_refused(served: Serving, start: bytes, endless: bytes) -> None:
    sent = start + endless * (MAX_HEAD_BYTES // len(endless) + 1)
    status, body = await refusal(served, sent)
    assert status == 431
    assert body["error"]["type"] == "invalid_request_error"


async def test_an_endless_trailer_is_refused(served: Serving) -> None:
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(POST)
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"0\r\nX: " + b"x" * MAX_HEAD_BYTES)
    assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_a_long_body_does_not_count_towards_the_head_limit(served: Serving) -> None:
    answer = await served.http.post("/v1/completions", content=b" " * (4 * MAX_HEAD_BYTES) + b"{}")
    assert answer.json()["error"]["param"] == "prompt"


async def test_invalid_http_gets_an_error_object(served: Serving) -> None:
    status, body = await refusal(served, b"hello\r\n\r\n")
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n" + GET], ids=["nothing", "half", "half of the second"])
async def test_a_connection_without_a_request_head_is_closed(
    served: Serving, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent)
    await reader.read()  # until the server closes it
    writer.close()


async def ask(served: Serving, *sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which `sent` was sent, one packet per part."""
    url = served.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    for part in sent:
        writer.write(part)
        await writer.drain()
        # The kernel may merge packets.
        await asyncio.sleep(0.05)
    return reader, writer


def post(body: dict[str, Any], *headers: bytes) -> bytes:
    raw = json.dumps(body).encode()
    head = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(raw), *headers, b"", b""]
    return b"\r\n".join(head) + raw


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Data received before the server closes or resets the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(65536):
            parts.append(part)
    return b"".join(parts)


LAST = GET + b"Connection: close\r\n\r\n"
H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB")
UPGRADED = post({"prompt": "a core", "max_tokens": 3, "ignore_eos": True}, *H2C)
HEAD, _, BODY = UPGRADED.partition(b"\r\n\r\n")
CHUNKED = b"%b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    HEAD.replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked"),
    *(len(BODY), BODY),
)
WEBSOCKET = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        ((UPGRADED + LAST,), b'"completion_tokens":3'),
        ((UPGRADED[:-20], UPGRADED[-20:] + LAST), b'"completion_tokens":3'),
        ((CHUNKED + LAST,), b'"completion_tokens":3'),
        ((WEBSOCKET + LAST,), b'{"status":"ok"}'),
    ],
    ids=["at once", "in two parts", "in chunks", "without a body"],
)
async def test_an_upgrade_request_is_answered_over_http_1_1(
    served: Serving, sent: tuple[bytes, ...], word: bytes
) -> None:
    reader, writer = await ask(served, *sent)
    answers = await reader.read()
    writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert word in answers


async def test_pipelined_requests_are_answered_in_order_up_to_a_limit(served: Serving) -> None:
    known, unknown = GET + b"\r\n", GET.replace(b"health", b"nowhere") + b"\r\n"
    reader, writer = await ask(served, (known + unknown) * (MAX_PIPELINED // 2) + LAST)
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", await reader.read())
    writer.close()
    assert statuses == [*[b"200", b"404"] * (MAX_PIPELINED // 2), b"200"]
    reader, writer = await ask(served, (GET + b"\r\n") * (MAX_PIPELINED + 2))
    assert (await until_closed(reader)).count(b"HTTP/1.1 ") < MAX_PIPELINED
    writer.close()


async def test_invalid_data_during_a_response_is_not_answered_within_it(served: Serving) -> None:
    stream = {"prompt": "a core", "max_tokens": 200, "ignore_eos": True, "stream": True}
    served.backend.paced = True
    reader, writer = await ask(served, post(stream))
    await served.until_metric("vllm:num_requests_running", 1)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"this is no request\r\n\r\n")
    assert b"HTTP/1.1" not in await until_closed(reader)
    writer.close()
    await served.until_metric("vllm:num_requests_running", 0)
    served.unpace()


async def test_a_disconnected_stream_with_a_pipelined_request_frees_its_row(
    served: Serving, capfd: pytest.CaptureFixture[str]
) -> None:
    served.backend.paced = True
    _, writer = await ask(served, post({"prompt": "a core", "max_tokens": 200, "ignore_eos": True, "stream": True}))
    await served.until_metric("vllm:num_requests_running", 1)
    aborted = await served.metric("vllm:request_success_total", finished_reason="abort")
    writer.write(GET + b"\r\n")
    await writer.drain()
    writer.transport.abort()
    await served.until_metric("vllm:request_success_total", aborted + 1, finished_reason="abort")
    await served.until_metric("vllm:num_requests_running", 0)
    served.unpace()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_sends_no_more_gets_its_whole_answer(served: Serving, stream: bool) -> None:
    served.backend.paced = True
    body = {"prompt": "a core", "max_tokens": 5, "ignore_eos": True, "stream": stream}
    reader, writer = await ask(served, post(body))
    await served.until_metric("vllm:num_requests_running", 1)
    writer.write_eof()
    # Longer than the first checks whether it has left.
    await asyncio.sleep(0.1)
    served.unpace()
    answer = await reader.read()  # until the server closes it
    writer.close()
    assert b"HTTP/1.1 200 OK" in answer
    assert (b"data: [DONE]" if stream else b'"completion_tokens":5') in answer
    # Where nothing was sent yet, the interim response tells whether the client has left.
    assert stream or answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")


async def test_a_stream_over_http_1_0_has_no_chunks(served: Serving) -> None:
    body = {"prompt": "a core", "max_tokens": 3, "ignore_eos": True, "stream": True}
    for stream in (True, False):
        sent = post({**body, "stream": stream}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        reader, writer = await ask(served, sent)
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"chunked" not in head.lower()
        assert b"connection: close" in head.lower()
        if stream:
            events = rest.decode().removesuffix("\n\n").split("\n\n")
            assert all(event.startswith("data: ") for event in events)
            assert events[-1] == "data: [DONE]"
        else:
            assert json.loads(rest)["usage"]["completion_tokens"] == 3


async def test_pipelined_requests_of_a_client_that_sends_no_more_are_answered(served: Serving) -> None:
    reader, writer = await ask(served, post({"prompt": "a core", "max_tokens": 3}) + GET + b"\r\n")
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    "sent", [b"", GET, post({"prompt": "a core"})[:-5], GET + b"\r\n"], ids=["nothing", "head", "body", "answered"]
)
async def test_the_connection_closes_if_no_answer_is_due_when_the_client_sends_no_more(
    served: Serving, sent: bytes
) -> None:
    reader, writer = await ask(served, sent)
    writer.write_eof()
    assert (await reader.read()).count(b"HTTP/1.1 ") == sent.endswith(b"\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_has_left_frees_its_row(served: Serving, stream: bool) -> None:
    served.backend.paced = True
    aborted = await served.metric("vllm:request_success_total", finished_reason="abort")
    body = {"prompt": "a core", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    _, writer = await ask(served, post(body))
    await served.until_metric("vllm:num_requests_running", 1)
    writer.close()
    # A stream needs a step; for a whole answer no step runs.
    while await served.metric("vllm:request_success_total", finished_reason="abort") == aborted:
        if stream and served.backend.waiting:
            served.permit()
        await asyncio.sleep(0.01)
    served.unpace()
    await served.until_metric("vllm:num_requests_running", 0)


async def test_clients_with_open_connections_are_sent_away_during_the_delay_of_a_drain(tmp_path: Path) -> None:
    health, short = GET + b"\r\n", post({"prompt": "a core", "max_tokens": 1, "ignore_eos": True})
    async with serving(make_model(tmp_path)) as served:
        kept, kept_writer = await ask(served, health)
        idle, idle_writer = await ask(served, health)
        assert b"connection" not in (await kept.readuntil(b'ok"}')) + (await idle.readuntil(b'ok"}'))
        served.tell(StartDrain(2.0, 60.0))
        while not served.front_end.gate.draining:
            await asyncio.sleep(0.01)
        kept_writer.write(short)
        new, new_writer = await ask(served, short)
        for reader in (kept, new):
            answer = await until_closed(reader)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert b"connection: close\r\n" in answer
        assert not served.front_end.gate.closed
        assert await until_closed(idle) == b"", "it is closed with the gate, before a request could be refused"
        for writer in (kept_writer, idle_writer, new_writer):
            writer.close()


def has_ended_at_once(connection: socket.socket) -> bool:
    """Reads a stream to its last chunk; whether the end of the connection came with it."""
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):
        received += connection.recv(65536)
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


async def test_the_end_of_a_connection_comes_with_the_last_part_of_a_stream(served: Serving) -> None:
    sent = post({"prompt": "a core", "max_tokens": 3, "ignore_eos": True, "stream": True}, b"Connection: close")

    def stream() -> bool:
        url = served.http.base_url
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(sent)
            return has_ended_at_once(connection)

    assert all([await asyncio.to_thread(stream) for _ in range(50)])


async def test_a_stream_that_began_before_a_drain_ends_its_connection(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path), paced=True) as served:
        # Without a seed, the first token may be the start of a character, which is held back.
        body = {"prompt": "a core", "max_tokens": 3, "ignore_eos": True, "stream": True, "seed": 1}
        reader, writer = await ask(served, post(body))
        served.permit()
        await reader.readuntil(b"data: ")
        served.tell(StartDrain(30.0, 60.0))
        while not served.front_end.gate.draining:
            await asyncio.sleep(0.01)
        served.unpace()
        assert (await until_closed(reader)).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert not served.front_end.gate.closed
        writer.close()


async def test_a_connection_made_just_before_a_drain_admits_nothing_gets_its_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "NEW_SECONDS", 60.0)
    body = {"prompt": "a core", "max_tokens": 3, "ignore_eos": True, "seed": 1}
    async with serving(make_model(tmp_path), paced=True) as served:
        running, running_writer = await ask(served, post(body))
        await served.until_metric("vllm:num_requests_running", 1)
        new, new_writer = await ask(served, b"")
        served.tell(StartDrain(0.1, 60.0))
        while not served.front_end.gate.closed:
            await asyncio.sleep(0.01)
        new_writer.write(post(body))
        answer = await until_closed(new)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close\r\n" in answer
        served.unpace()
        assert (await until_closed(running)).startswith(b"HTTP/1.1 200 OK")
        for writer in (running_writer, new_writer):
            writer.close()
