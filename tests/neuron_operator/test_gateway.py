"""The gateway's data path, with real sockets: what goes in comes out, and who leaves or fails takes nobody along."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from helpers.gateways import (
    LAST_CHUNK,
    STREAM_HEAD,
    Asked,
    Behaviour,
    Client,
    answer,
    chunk,
    echo,
    head,
    replicas,
    running,
    until,
)
from neuron_operator.gateway import clients
from neuron_operator.gateway.models import Adapter

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
SHORT = {"silenceSeconds": 0.3, "firstByteSeconds": 0.6, "connectSeconds": 1, "avoidSeconds": 0.3}


def streaming(events: list[bytes], *, pause: asyncio.Event | None = None, ends: bool = True) -> Behaviour:
    """Sends the events one by one; before the last one it waits for `pause`."""

    async def behave(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        for number, event in enumerate(events):
            if pause is not None and number == len(events) - 1:
                await pause.wait()
            writer.write(chunk(event))
            await writer.drain()
        if ends:
            writer.write(LAST_CHUNK)
        return ends

    return behave


def saying(raw: bytes, *, stays: bool = True) -> Behaviour:
    async def behave(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(raw)
        return stays

    return behave


async def hang(asked: Asked, writer: asyncio.StreamWriter) -> bool:
    await asyncio.Event().wait()
    return False


async def reset(asked: Asked, writer: asyncio.StreamWriter) -> bool:
    writer.transport.abort()
    return False


@pytest.mark.parametrize(
    "path",
    [
        PATH,
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v1/something/new",
        "/tokenize",
        "/detokenize",
        "/invocations",
        "/rerank",
    ],
)
async def test_a_request_reaches_its_model_as_the_client_sent_it(path: str) -> None:
    async with replicas(echo, echo) as (chat, other), running() as gateway:
        gateway.serve("chat", chat)
        gateway.serve("other", other)
        body = b'{ "stream" : false, "model":"chat" , "prompt": "a\\u0062c \xc3\xbc" }'
        got = await gateway.post(f"{path}?beta=1", body, {"x-request-id": "mine", "x-app": "7"})
        assert got.status == 200
        assert got.json["path"] == f"{path}?beta=1"
        (asked,) = chat.asked
        assert (asked.body, asked.headers["x-app"], asked.headers["x-request-id"]) == (body, "7", "mine")
        assert got.headers["x-request-id"] == "mine"
        assert not other.asked


async def test_a_request_without_an_id_gets_one() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        got = await gateway.post(PATH, CHAT, {"x-request-id": "with space"})
        assert got.headers["x-request-id"] == chat.asked[0].headers["x-request-id"]
        assert got.headers["x-request-id"].startswith("req-")


async def test_headers_of_one_connection_are_not_passed_on() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        named = {"connection": "te, X-Hop", "x-hop": "of this connection alone"}
        dropped = {"te": "trailers", "keep-alive": "timeout=5", "proxy-authorization": "x", **named}
        await gateway.post(PATH, CHAT, {**dropped, "authorization": "Bearer of-the-server"})
        assert not dropped.keys() & chat.asked[0].headers.keys()
        assert chat.asked[0].headers["authorization"] == "Bearer of-the-server"


async def test_a_body_in_chunks_is_passed_on_with_its_length() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        raw = json.dumps(CHAT).encode()
        client.write(head("POST", PATH, {"transfer-encoding": "chunked", "expect": "100-continue"}))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.write(chunk(raw[:10]) + chunk(raw[10:]) + LAST_CHUNK)
        assert (await client.answer()).status == 200
        assert chat.asked[0].body == raw
        assert chat.asked[0].headers["content-length"] == str(len(raw))
        await client.aclose()


@pytest.mark.parametrize("refused", [{}, {"path": "/metrics"}, {"content-length": "5000"}])
async def test_a_client_that_awaits_a_word_before_its_body_gets_one(refused: dict[str, str]) -> None:
    """The word to continue or the refusal, also behind an earlier request."""
    go = asyncio.Event()

    async def wait(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await echo(asked, writer)

    raw = json.dumps(CHAT).encode()
    lines = {"content-length": str(len(raw)), "expect": "100-Continue", **refused}
    asks = head("POST", lines.pop("path", PATH), lines)
    async with replicas(wait) as (chat,), running({"limits": {"bodyBytes": 4096}}) as gateway, asyncio.timeout(5):
        gateway.serve("chat", chat)
        for is_behind in (False, True):
            client = await gateway.connect()
            if is_behind:
                client.send(PATH, CHAT)
                await until(lambda: len(chat.asked) > 0)
            client.write(asks)
            go.set()
            if is_behind:
                assert (await client.answer()).status == 200
            if refused:
                got = await client.answer()
                assert (got.status, got.headers["connection"]) == (413 if "content-length" in refused else 404, "close")
            else:
                assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                client.write(raw)
                assert (await client.answer()).status == 200
            go.clear()
            chat.asked.clear()
            await client.aclose()


async def test_a_client_of_http_1_0_is_given_no_word_before_its_answer() -> None:
    """It would take it for the answer."""
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        raw = json.dumps(CHAT).encode()
        lines = {"content-length": str(len(raw)), "expect": "100-continue"}
        client.write(head("POST", PATH, lines).replace(b"HTTP/1.1", b"HTTP/1.0") + raw)
        assert (await client.answer()).status == 200
        await client.aclose()


BODY = json.dumps(CHAT).encode()
LENGTH = f"content-length: {len(BODY)}\r\n".encode()
CHUNKED = b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        (LENGTH + b"content-length: 5\r\n", BODY),
        (b"content-length: +%d\r\n" % len(BODY), BODY),
        (CHUNKED + LENGTH, chunk(BODY) + LAST_CHUNK),
        (b"transfer-encoding : chunked\r\n" + LENGTH, BODY),
        (b"transfer-encoding: \x0bchunked\r\n", chunk(BODY) + LAST_CHUNK),
        (b"transfer-encoding: chunked, identity\r\n", chunk(BODY) + LAST_CHUNK),
        (CHUNKED, b"0x" + chunk(BODY) + LAST_CHUNK),
        (CHUNKED, chunk(BODY).replace(b"\r\n", b"\n") + LAST_CHUNK),
        (LENGTH + b"x-a: one\nx-b: two\r\n", BODY),
        (LENGTH + b"x-a: one\rx-b: two\r\n", BODY),
        (LENGTH + b"x-a: one\r\n two\r\n", BODY),
        (LENGTH + b"x-a: one\0two\r\n", BODY),
    ],
)
async def test_no_request_that_others_may_read_differently_reaches_a_replica(lines: bytes, body: bytes) -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.write(b"POST %b HTTP/1.1\r\nhost: test\r\n%b\r\n%b" % (PATH.encode(), lines, body))
        got = await client.answer()
        assert (got.status, got.headers["connection"]) == (400, "close")
        assert not chat.asked
        await client.aclose()


async def test_what_stands_behind_the_chunks_of_a_body_is_no_header_and_has_a_limit() -> None:
    async with replicas(echo) as (chat,), running({"limits": {"headBytes": 4096}}) as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        sent = head("POST", PATH, {"transfer-encoding": "chunked"}) + chunk(json.dumps(CHAT).encode()) + b"0\r\n"
        client.write(sent + b"x-first: 1\r\nx-second: 2\r\nx-last: 3\r\n\r\n")
        assert (await client.answer()).status == 200
        assert not [name for name in chat.asked[0].headers if name.startswith("x-") and name != "x-request-id"]
        client.write(sent)
        for number in range(100):
            client.write(b"x-%d: %b\r\n" % (number, b"y" * 100))
            await asyncio.sleep(0)
        assert (await client.answer()).status == 431
        assert len(chat.asked) == 1
        assert gateway.gateway.num_body_bytes == 0
        await client.aclose()


async def test_a_body_in_small_pieces_takes_little_more_memory_than_its_bytes() -> None:
    tracemalloc.start()
    try:
        async with running() as gateway:
            client = await gateway.connect()
            before, _ = tracemalloc.get_traced_memory()
            client.write(head("POST", PATH, {"transfer-encoding": "chunked"}) + chunk(b"ab") * 50_000)
            await until(lambda: gateway.gateway.num_body_bytes == 100_000)
            after, _ = tracemalloc.get_traced_memory()
            assert after - before < 10 * 100_000
            await client.aclose()
    finally:
        tracemalloc.stop()


async def test_the_answer_to_a_head_request_has_no_body() -> None:
    async with running() as gateway:
        client = await gateway.connect()
        client.write(head("HEAD", "/v1/models", {}) + head("GET", "/health", {}))
        assert (await client.head())[0] == 405
        got = await client.answer()
        assert (got.status, got.json) == (200, {"status": "ok"})
        await client.aclose()


@pytest.mark.parametrize("framing", ["content-length", "transfer-encoding"])
async def test_a_request_that_offers_another_protocol_is_answered_in_this_one(framing: str) -> None:
    """Java's HTTP client sends `Upgrade: h2c` with its first request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    raw = json.dumps(CHAT).encode()
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        if framing == "content-length":
            request = head("POST", PATH, {**offer, "content-length": str(len(raw))}) + raw
        else:
            request = head("POST", PATH, {**offer, "transfer-encoding": "chunked"}) + chunk(raw) + LAST_CHUNK
        pieces = [request[:40], request[40:-10], request[-10:], request + head("GET", "/health", offer), request]
        for piece in pieces:
            client.write(piece)
            await asyncio.sleep(0.01)
        answers = [await client.answer() for _ in range(4)]
        assert [one.status for one in answers] == [200] * 4
        assert answers[2].json == {"status": "ok"}
        assert [asked.body for asked in chat.asked] == [raw] * 3
        assert not offer.keys() & {name for asked in chat.asked for name in asked.headers}
        await client.aclose()


async def test_a_stream_is_passed_on_byte_for_byte_and_as_it_comes() -> None:
    events = [b"data: %d\n\n" % number for number in range(50)] + [b"data: [DONE]\n\n"]
    pause = asyncio.Event()
    async with replicas(streaming(events, pause=pause)) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.send(PATH, {**CHAT, "stream": True})
        status, headers = await client.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        first = b"".join(map(chunk, events[:-1]))
        assert await client.reader.readexactly(len(first)) == first  # while the replica holds the last one back
        pause.set()
        last = chunk(events[-1]) + LAST_CHUNK
        assert await client.reader.readexactly(len(last)) == last
        client.send(PATH, {**CHAT, "stream": True})  # on the same connections
        assert (await client.answer()).raw == first + last
        assert chat.num_connections == 1
        await client.aclose()


@pytest.mark.parametrize("size", [1, 7, 65_536])
async def test_answers_in_any_pieces_are_the_same_answers(size: int) -> None:
    raw = STREAM_HEAD + chunk(b"data: a\n\n") + chunk(b"data: bb\n\n") + LAST_CHUNK

    async def behave(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        for at in range(0, len(raw), size):
            writer.write(raw[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        return True

    async with replicas(behave) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        got = await gateway.post(PATH, CHAT)
        assert got.raw == raw.partition(b"\r\n\r\n")[2]


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        for number in range(10):
            client.send(f"/v1/number/{number}", CHAT)
        paths = [(await client.answer()).json["path"] for _ in range(10)]
        assert paths == [f"/v1/number/{number}" for number in range(10)]
        await client.aclose()


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks_until_the_end_of_the_connection() -> None:
    async with replicas(streaming([b"data: a\n\n", b"data: b\n\n"])) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        raw = json.dumps(CHAT).encode()
        client.write(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(raw), raw))
        status, headers = await client.head()
        assert status == 200
        assert "transfer-encoding" not in headers
        assert await client.rest() == b"data: a\n\ndata: b\n\n"
        await client.aclose()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with (
        replicas(saying(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nall", stays=False)) as (chat,),
        running() as gateway,
    ):
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.send(PATH, CHAT)
        status, headers = await client.head()
        assert (status, headers["connection"], await client.rest()) == (200, "close", b"all")
        await client.aclose()


async def stream_for_ever(asked: Asked, writer: asyncio.StreamWriter) -> bool:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(chunk(b"data: a\n\n"))
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("behave", "status"), [(stream_for_ever, 200), (hang, 499)])
async def test_a_client_that_leaves_ends_its_request_at_the_replica(behave: Behaviour, status: int) -> None:
    async with replicas(behave) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.send(PATH, CHAT)
        await until(lambda: chat.asked)
        if status == 200:
            await client.head()
        await client.aclose()
        await until(lambda: all(reader.at_eof() for reader in chat.readers))
        assert not gateway.gateway.exchanges
        assert gateway.metric("gateway_in_flight", model="default/chat", replica=chat.address) == 0
        assert [(line["error"], line["status"]) for line in gateway.log] == [("client_left", status)]


async def test_a_client_that_ends_its_side_behind_its_requests_gets_their_answers() -> None:
    go = asyncio.Event()

    async def wait(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await echo(asked, writer)

    async with replicas(wait) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.send(PATH, CHAT)
        client.send("/v1/second", CHAT)
        await until(lambda: chat.asked)
        client.writer.write_eof()
        assert (await client.head())[0] == 100  # so that a client that has left can be told from it
        gateway.gateway.sweep()
        go.set()
        assert [(await client.answer()).json["path"] for _ in range(2)] == [PATH, "/v1/second"]
        assert await client.rest() == b""
        assert [line["status"] for line in gateway.log] == [200, 200]
        await client.aclose()


async def test_a_client_of_http_1_0_that_ends_its_side_gets_its_answer_and_nothing_before() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        raw = json.dumps(CHAT).encode()
        client = await gateway.connect()
        client.write(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(raw), raw))
        client.writer.write_eof()
        assert (await client.answer()).status == 200
        await client.aclose()


async def test_a_client_that_does_not_read_slows_its_replica_down() -> None:
    """The replica writes far more than all buffers between hold, and is not read until the client reads."""
    size, sent = 64 * 2**20, 0

    async def flood(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        piece = b"x" * 2**18
        while sent < size:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        return True

    async with replicas(flood, echo) as (chat, other), running() as gateway:
        gateway.serve("chat", chat)
        gateway.serve("other", other)
        client = await gateway.connect()
        client.send(PATH, CHAT)
        await client.head()
        client.writer.transport.pause_reading()
        await until(lambda: any(one.is_paused for one in gateway.gateway.connections))
        before = -1
        while before != sent:
            before = sent
            await gateway.post(PATH, {**CHAT, "model": "other"})  # others are served meanwhile
            await asyncio.sleep(0.05)
        assert sent < size / 2
        client.writer.transport.resume_reading()
        assert len(await client.reader.readexactly(size)) == size
        await client.aclose()


async def test_a_client_that_sends_ahead_and_reads_nothing_is_disconnected() -> None:
    go = asyncio.Event()

    async def wait(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await echo(asked, writer)

    async with replicas(wait) as (chat,), running({"timeouts": {"stalledSeconds": 0.5}}) as gateway:
        names = (f"name-{number}" for number in range(10_000))
        gateway.serve("chat", chat, served_names=("chat", *names))
        client = await gateway.connect()
        client.writer.transport.pause_reading()
        client.send(PATH, CHAT)
        client.write(head("GET", "/v1/models", {}) * 15)
        await until(lambda: chat.asked)
        go.set()
        await until(lambda: any(one.is_paused for one in gateway.gateway.connections))
        await until(lambda: not gateway.gateway.connections)
        await client.aclose()


async def test_the_body_of_a_request_that_needs_none_takes_no_memory() -> None:
    async with running() as gateway:
        client = await gateway.connect()
        client.write(head("GET", "/v1/models", {"content-length": "9000"}) + b"x" * 8000)
        await until(lambda: any(one._request for one in gateway.gateway.connections))
        await asyncio.sleep(0.05)
        assert gateway.gateway.num_body_bytes == 0
        client.write(b"x" * 1000)
        assert (await client.answer()).status == 200
        await client.aclose()


# Failures of replicas


DRAINING = answer(b"{}", status=503, headers={"connection": "close"})


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (reset, "reset"),
        (saying(DRAINING, stays=False), "draining"),
        (saying(answer(b"{}", status=529, headers={"connection": "close"}), stays=False), "draining"),
        (saying(answer(b"{}", status=503)), "not_ready"),
        (saying(answer(b"{}", status=429)), "full"),
    ],
)
async def test_a_replica_that_gives_no_answer_is_replaced_by_another(bad: Behaviour, reason: str) -> None:
    async with replicas(echo, bad) as (good, wrong), running({"timeouts": {"avoidSeconds": 0.001}}) as gateway:
        gateway.serve("chat", good, wrong)
        for number in range(20):
            prompt = {"model": "chat", "prompt": f"{number} begins differently"}
            assert (await gateway.post("/v1/completions", prompt)).status == 200
        assert wrong.asked
        assert gateway.metric("gateway_retries_total", model="default/chat", reason=reason) == len(wrong.asked)


async def test_a_request_is_refused_by_two_full_replicas_and_not_by_all_in_turn() -> None:
    full = saying(answer(b"{}", status=429, headers={"retry-after": "3"}))
    async with replicas(full, full, full, full) as chats, running() as gateway:
        gateway.serve("chat", *chats)
        got = await gateway.post(PATH, CHAT)
        assert (got.status, got.headers["retry-after"]) == (429, "3")
        assert sorted(len(chat.asked) for chat in chats) == [0, 0, 1, 1]


async def test_a_replica_that_refuses_connections_is_passed_over() -> None:
    async with replicas(echo, echo) as (good, gone), running() as gateway:
        gateway.serve("chat", good, gone)
        await gone.stop()
        for number in range(20):
            prompt = {"model": "chat", "prompt": f"{number} begins differently"}
            assert (await gateway.post("/v1/completions", prompt)).status == 200
        assert len(good.asked) == 20
        assert gateway.metric("gateway_retries_total", model="default/chat", reason="refused") == 1


async def test_a_kept_connection_that_was_closed_meanwhile_costs_no_request() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)

        async def once(asked: Asked, writer: asyncio.StreamWriter) -> bool:
            if chat.behave is once:
                writer.transport.abort()
                chat.behave = echo
                return False
            return True

        assert (await gateway.post(PATH, CHAT)).status == 200
        chat.behave = once
        assert (await gateway.post(PATH, CHAT)).status == 200
        assert chat.num_connections == 2
        assert gateway.metric("gateway_retries_total", model="default/chat", reason="stale") == 1


async def test_a_request_that_ends_every_server_is_given_up() -> None:
    async with replicas(*[reset] * 6) as fragile, running() as gateway:
        gateway.serve("chat", *fragile)
        got = await gateway.post(PATH, CHAT)
        assert (got.status, got.json["error"]["code"]) == (502, "replica_lost")
        assert sum(len(one.asked) for one in fragile) == 3


async def test_errors_of_a_server_are_passed_on() -> None:
    raw = b'{"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": null}}'
    async with replicas(saying(answer(raw, status=400)), saying(answer(raw, status=429))) as made, running() as gateway:
        for name, one, status in zip(("a", "b"), made, (400, 429), strict=True):
            gateway.serve(name, one)
            got = await gateway.post(PATH, {**CHAT, "model": name})
            assert (got.status, got.body) == (status, raw)


@pytest.mark.parametrize(
    ("path", "marks"),
    [
        (PATH, (b'data: {"error":', b"replica_lost")),
        ("/v1/messages", (b"event: error\ndata: ", b'"type":"api_error"')),
        ("/v1/responses", (b"event: error\ndata: ", b"replica_lost")),
    ],
)
async def test_a_replica_that_is_killed_in_a_stream_is_told_in_it_and_other_streams_go_on(
    path: str, marks: tuple[bytes, bytes]
) -> None:
    pause = asyncio.Event()
    events = [b"data: a\n\n", b"data: b\n\n"]
    behave = streaming(events, pause=pause)
    async with replicas(behave, behave) as (chat, other), running() as gateway:
        gateway.serve("chat", chat)
        gateway.serve("other", other)
        clients = []
        for model in ("chat", "other"):
            clients.append(await gateway.connect())
            clients[-1].send(path, {**CHAT, "model": model})
            await clients[-1].head()
            await clients[-1].reader.readuntil(b"a\n\n\r\n")
        await chat.stop()
        told = await clients[0].rest()
        assert told.endswith(LAST_CHUNK)
        assert all(mark in told for mark in marks)
        assert gateway.metric("gateway_broken_answers_total", model="default/chat", reason="replica_lost") == 1
        pause.set()
        rest = chunk(events[1]) + LAST_CHUNK
        assert await clients[1].reader.readexactly(len(rest)) == rest
        for client in clients:
            await client.aclose()


async def test_an_answer_that_breaks_off_within_a_chunk_or_is_no_stream_ends_with_its_connection() -> None:
    half = STREAM_HEAD + b"a\r\nhalf"
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    async with replicas(saying(half, stays=False), saying(whole, stays=False)) as made, running() as gateway:
        for name, one, rest in zip(("a", "b"), made, (b"a\r\nhalf", b"{"), strict=True):
            gateway.serve(name, one)
            client = await gateway.connect()
            client.send(PATH, {**CHAT, "model": name})
            await client.head()
            assert (await client.rest()) in (rest, b"")  # a reset may discard what was not read
            await client.aclose()


async def test_a_frozen_replica_breaks_only_its_own_streams_and_each_is_told() -> None:
    events = [b"data: a\n\n", b"data: b\n\n"]
    frozen, moving = asyncio.Event(), asyncio.Event()
    behaviours = (streaming(events, pause=frozen), streaming(events, pause=moving), hang)
    async with replicas(*behaviours) as (ice, chat, silent), running({"timeouts": SHORT}) as gateway:
        for name, one in (("ice", ice), ("chat", chat), ("silent", silent)):
            gateway.serve(name, one)
        clients = {name: await gateway.connect() for name in ("ice", "chat", "silent")}
        for name, client in clients.items():
            client.send(PATH, {**CHAT, "model": name})
        await clients["ice"].head()
        await clients["chat"].head()
        told = await clients["ice"].rest()
        assert b"replica_frozen" in told
        assert told.endswith(LAST_CHUNK)
        late = await clients["silent"].answer()
        assert (late.status, late.json["error"]["code"]) == (504, "replica_frozen")
        moving.set()
        for client in clients.values():
            await client.aclose()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        answer(b"{}") + answer(b"{}"),
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
async def test_a_replica_that_does_not_speak_http_never_reaches_a_client(raw: bytes) -> None:
    async with replicas(saying(raw)) as (chat,), running({"timeouts": {"avoidSeconds": 0.001}}) as gateway:
        gateway.serve("chat", chat)
        got = await gateway.post(PATH, CHAT)
        assert got.status == 502


# Requests that are not forwarded


REFUSED = [
    (b"", 400, None),
    (b"[]", 400, None),
    (b"{", 400, None),
    (b'"chat"', 400, None),
    (b'{"messages": []}', 400, "model"),
    (b'{"model": 5}', 400, "model"),
    (b'{"model": null}', 400, "model"),
    (b'{"model": ""}', 400, "model"),
    (b'{"model": "unknown"}', 404, "model"),
    (b'{"model": "' + b"x" * 100_000 + b'"}', 404, "model"),
    (b"[" * 100_000, 400, None),
    (b'{"model": "chat", "x": ' + b"[" * 100_000, 400, None),
    (b'{"model": "\xff\xfe"}', 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED, ids=lambda one: repr(one)[:40])
async def test_a_body_without_a_known_model_is_refused(body: bytes, status: int, param: str | None) -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.send(PATH, body)
        got = await client.answer()
        assert (got.status, got.json["error"]["param"]) == (status, param)
        assert len(got.body) < 1000
        client.send(PATH, CHAT)  # the connection is still good
        assert (await client.answer()).status == 200
        await client.aclose()


async def test_errors_on_anthropics_path_have_its_form() -> None:
    async with running() as gateway:
        got = await gateway.post("/v1/messages", {"model": "x"}, {"x-request-id": "mine"})
        assert got.status == 404
        assert got.json == {
            "type": "error",
            "error": {"type": "not_found_error", "message": got.json["error"]["message"]},
            "request_id": "mine",
        }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/load_lora_adapter/", 404),
        ("POST", "/v1/load%5Flora_adapter", 404),
        ("POST", "/v1//load_lora_adapter", 404),
        ("POST", "/v1/../adapters", 404),
        ("POST", "/metrics", 404),
        ("POST", "/", 404),
        ("PUT", PATH, 405),
        ("GET", "/metrics", 404),
        ("GET", "/server_info", 404),
    ],
)
async def test_routes_that_are_not_for_clients_are_not_forwarded(method: str, path: str, status: int) -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        raw = json.dumps({**CHAT, "lora_name": "x"}).encode() if method != "GET" else b""
        client.write(head(method, path, {"content-length": str(len(raw))}) + raw)
        assert (await client.answer()).status == status
        assert not chat.asked
        await client.aclose()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (head("POST", PATH, {"x": "y" * 70_000}), 431),
        (head("POST", "/" + "p" * 70_000, {}), 431),
        (head("POST", PATH, {"content-length": "99999999"}), 413),
        (head("POST", PATH, {"transfer-encoding": "chunked"}) + chunk(b"x" * 5000), 413),
        (head("POST", PATH, {"content-length": "5", "transfer-encoding": "chunked"}), 400),
    ],
)
async def test_a_request_that_exceeds_a_limit_or_is_not_http_is_refused_before_it_is_read(
    raw: bytes, status: int
) -> None:
    async with running({"limits": {"bodyBytes": 4096}}) as gateway:
        client = await gateway.connect()
        client.write(raw)
        got = await client.answer()
        assert (got.status, got.headers["connection"]) == (status, "close")
        assert await client.rest() == b""
        assert gateway.gateway.num_body_bytes == 0
        await client.aclose()


async def test_a_body_may_be_as_long_as_the_limit_and_no_longer() -> None:
    async with replicas(echo) as (chat,), running({"limits": {"bodyBytes": 4096}}) as gateway:
        gateway.serve("chat", chat)
        assert (await gateway.post(PATH, BODY.ljust(4096))).status == 200
        assert (await gateway.post(PATH, BODY.ljust(4097))).status == 413
        assert [len(one.body) for one in chat.asked] == [4096]


async def test_bodies_together_have_a_limit_which_is_free_again_when_answers_begin() -> None:
    go = asyncio.Event()

    async def wait(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await echo(asked, writer)

    async with replicas(wait) as (chat,), running({"limits": {"allBodiesBytes": 10_000}}) as gateway:
        gateway.serve("chat", chat)
        long = {**CHAT, "x": "y" * 9000}
        first, second = await gateway.connect(), await gateway.connect()
        first.send(PATH, long)
        await until(lambda: chat.asked)
        second.send(PATH, long)
        assert (await second.answer()).status == 503
        go.set()
        assert (await first.answer()).status == 200
        assert gateway.gateway.num_body_bytes == 0
        assert (await gateway.post(PATH, long)).status == 200
        for client in (first, second):
            await client.aclose()


@pytest.mark.parametrize("begun", [b"POST /v1/completions HT", head("POST", PATH, {"content-length": "5000"})])
async def test_a_client_that_sends_too_slowly_is_disconnected(begun: bytes) -> None:
    """Whatever comes within the time of a whole request, byte by byte."""
    async with running({"timeouts": {"readSeconds": 0.3}}) as gateway:
        client = await gateway.connect()
        client.write(begun)
        async with asyncio.timeout(5):
            while not client.reader.at_eof() and client.reader.exception() is None:
                client.write(b"1")
                await asyncio.sleep(0.05)
        assert await client.rest() == b""
        assert gateway.gateway.num_body_bytes == 0
        await client.aclose()


class Open:
    """A connection of somebody else."""

    deadline = None


async def test_connections_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running({"limits": {"connections": 1024}}) as gateway:
        gateway.gateway.connections |= {Open() for _ in range(1024)}  # type: ignore[misc]
        got = await gateway.get("/health")
        assert got.status == 503
        monkeypatch.setattr(clients, "LINGER_SECONDS", 0.1)
        refused = await gateway.connect()
        assert (await refused.answer()).status == 503
        async with asyncio.timeout(5):
            while not refused.writer.transport.is_closing():  # it never ends its side
                refused.write(b"x")
                await asyncio.sleep(0.02)
        gateway.gateway.connections.clear()
        await refused.aclose()


# Names


async def test_models_lists_base_models_adapters_and_sleeping_ones() -> None:
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat, served_names=("chat", "gpt"), adapters=(Adapter("sql", "hf://a/sql"),), created=7)
        gateway.serve("tiny", is_asleep=True)
        listed = {one["id"]: one for one in (await gateway.get("/v1/models")).json["data"]}
        assert set(listed) == {"chat", "gpt", "sql", "tiny"}
        assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("chat", "hf://a/sql")
        assert (listed["gpt"]["parent"], listed["gpt"]["root"], listed["gpt"]["created"]) == (None, "chat", 7)
        assert (listed["tiny"]["ready"], listed["chat"]["ready"]) == (False, True)
        assert (await gateway.get("/v1/models/sql")).json == listed["sql"]
        assert (await gateway.get("/v1/models/nobody")).status == 404
        assert (await gateway.post(PATH, {**CHAT, "model": "sql"})).json["model"] == "sql"


async def test_a_name_that_two_namespaces_have_must_be_written_with_its_namespace() -> None:
    async with replicas(echo, echo) as (one, two), running() as gateway:
        gateway.serve("chat", one, namespace="a")
        gateway.serve("chat", two, namespace="b")
        got = await gateway.post(PATH, CHAT)
        assert (got.status, got.json["error"]["code"]) == (404, "ambiguous_model")
        assert "a/chat, b/chat" in got.json["error"]["message"]
        for name, replica in ((b"a/chat", one), (b"b/chat", two)):
            body = b'{"metadata": {"model": "%b"}, "temperature": 0.10,  "model" : "%b", "n": 1 }' % (name, name)
            assert (await gateway.post(PATH, body)).status == 200
            assert replica.asked[0].body == body.replace(b' : "%b"' % name, b' : "chat"')  # as the server knows it
            assert (await gateway.post(PATH, b'{"mod\\u0065l": "%b"}' % name)).status == 400
        assert {one["id"] for one in (await gateway.get("/v1/models")).json["data"]} == {"a/chat", "b/chat"}
        assert (await gateway.get("/v1/models/a%2Fchat")).json["namespace"] == "a"
        gateway.gateway.drop(("b", "chat"))
        assert (await gateway.post(PATH, CHAT)).status == 200


async def test_an_adapter_or_a_served_name_cannot_take_the_place_of_a_model_of_its_namespace() -> None:
    async with replicas(echo, echo) as (thief, chat), running() as gateway:
        gateway.serve("a", thief, served_names=("a", "chat"), adapters=(Adapter("chat"), Adapter("other")))
        gateway.serve("chat", chat)
        gateway.serve("z", chat, served_names=("other",))
        for model in ("chat", "default/chat", "other"):
            assert (await gateway.post(PATH, {**CHAT, "model": model})).status == 200
        assert (len(thief.asked), len(chat.asked)) == (0, 3)
        assert (await gateway.get("/v1/models/chat")).json["parent"] is None


async def test_a_served_name_cannot_take_the_place_of_another_namespaces_model() -> None:
    async with replicas(echo, echo) as (one, thief), running() as gateway:
        gateway.serve("chat", one, namespace="a")
        gateway.serve("x", thief, namespace="b", served_names=("a/chat",))
        await gateway.post(PATH, {**CHAT, "model": "a/chat"})
        assert (len(one.asked), len(thief.asked)) == (1, 0)
        listed = [name["id"] for name in (await gateway.get("/v1/models")).json["data"]]
        assert listed == ["chat", "b/a/chat"]  # each means what it says
        await gateway.post(PATH, {**CHAT, "model": "b/a/chat"})
        assert (len(one.asked), len(thief.asked)) == (1, 1)


async def test_thousands_of_models_that_come_one_by_one_are_known_within_a_moment() -> None:
    """The first list of a cluster: nothing else is done until all of its models are known."""
    async with running() as gateway:
        began = time.process_time()
        for number in range(3000):
            gateway.serve(f"chat-{number}", namespace=f"team-{number % 30}")
        assert len((await gateway.get("/v1/models")).json["data"]) == 3000
        assert (await gateway.get("/v1/models/chat-2999")).json["namespace"] == "team-29"
        assert time.process_time() - began < 3  # 15 s, if names were looked through for each of them


async def test_the_log_has_the_address_of_a_client_as_servers_write_it() -> None:
    async with running({"host": "::"}) as gateway:
        await gateway.get("/v1/models")
        assert gateway.log[-1]["client"] == "127.0.0.1"


async def test_health_follows_readiness() -> None:
    async with running() as gateway:
        assert (await gateway.get("/health")).status == 200
        gateway.gateway.is_ready = False
        assert [(await gateway.get(path)).status for path in ("/health", "/ping", "/live")] == [503, 503, 200]
        assert not gateway.log


# The end of a gateway

ENDING = {"timeouts": {"drainDelaySeconds": 0, "drainSeconds": 0.2}}


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
async def test_a_stream_that_outlasts_a_gateway_that_ends_is_told_so_and_a_request_without_an_answer_too(
    path: str,
) -> None:
    async with replicas(stream_for_ever, hang) as (chat, slow), running(ENDING) as gateway:
        gateway.serve("chat", chat)
        gateway.serve("slow", slow)
        stream, unanswered, held = [await gateway.connect() for _ in range(3)]
        stream.send(path, CHAT)
        unanswered.send(path, {**CHAT, "model": "slow"})
        gateway.serve("sleepy", is_asleep=True)
        held.send(path, {**CHAT, "model": "sleepy"})
        await until(lambda: chat.asked and slow.asked and len(gateway.gateway.exchanges) == 3)
        await asyncio.gather(gateway.gateway.drain(), until(lambda: len(gateway.log) == 3))
        told = await stream.answer()
        assert told.body.startswith(b"data: a\n\n")
        assert b"the gateway was stopped" in told.body.split(b"\n\n")[-2]
        for client in (unanswered, held):
            got = await client.answer()
            assert (got.status, got.headers["connection"]) == (529 if path == "/v1/messages" else 503, "close")
            assert got.headers["retry-after"] == "1"
        assert {line["error"] for line in gateway.log} == {"gateway_stopped"}
        assert gateway.metric("gateway_broken_answers_total", model="default/chat", reason="gateway_stopped") == 1
        for client in (stream, unanswered, held):
            assert await client.rest() == b""
            await client.aclose()


async def test_a_client_that_was_not_told_to_close_its_connection_may_use_it_again_while_the_gateway_ends() -> None:
    go = asyncio.Event()
    events = [b"data: a\n\n", b"data: [DONE]\n\n"]
    timeouts = {"timeouts": {"drainDelaySeconds": 0}}
    async with replicas(streaming(events, pause=go)) as (chat,), running(timeouts) as gateway:
        gateway.serve("chat", chat)
        client = await gateway.connect()
        client.send(PATH, CHAT)
        await until(lambda: gateway.gateway.exchanges and chat.asked)
        answering = asyncio.create_task(client.answer())
        await asyncio.sleep(0.05)  # the answer has begun
        ending = asyncio.create_task(gateway.gateway.drain())
        await asyncio.sleep(0.05)
        go.set()
        assert "connection" not in (await answering).headers
        await asyncio.sleep(0.1)
        client.send(PATH, CHAT)
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.rest() == b""
        await ending
        await client.aclose()


async def test_a_client_that_reads_slowly_gets_the_whole_answer_of_a_gateway_that_ends() -> None:
    whole = b"x" * 2**18
    loop = asyncio.get_running_loop()
    async with replicas(saying(answer(whole))) as (chat,), running({"timeouts": {"drainDelaySeconds": 0}}) as gateway:
        gateway.serve("chat", chat)
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            await until(lambda: gateway.gateway.connections)
            (connection,) = gateway.gateway.connections
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            raw = json.dumps(CHAT).encode()
            await loop.sock_sendall(client, head("POST", PATH, {"content-length": str(len(raw))}) + raw)
            got = b""
            while not gateway.log:  # the replica's part is over
                got += await loop.sock_recv(client, 1024)
            ending = asyncio.create_task(gateway.gateway.drain())
            await asyncio.sleep(0.1)
            while part := await loop.sock_recv(client, 2**16):
                got += part
            assert got.endswith(b"\r\n\r\n" + whole)
            await ending


# Affinity


def chats(count: int) -> list[list[dict[str, str]]]:
    system = {"role": "system", "content": "You are helpful. " * 300}
    return [[system, {"role": "user", "content": f"question {number} " * 20}] for number in range(count)]


async def test_a_chat_stays_on_its_replica_and_chats_are_spread() -> None:
    async with replicas(*[echo] * 4) as made, running() as gateway:
        gateway.serve("chat", *made)
        where: dict[int, set[str]] = {}
        for number, messages in enumerate(chats(40)):
            for turn in range(3):
                await gateway.post(PATH, {"model": "chat", "messages": messages})
                where.setdefault(number, set()).add(gateway.log[-1]["replica"])
                messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"more {turn}"}]
        assert all(len(places) == 1 for places in where.values())
        assert all(len(one.asked) >= 12 for one in made)  # of 120, 30 each on average


async def test_a_replica_with_more_than_its_share_is_passed_over() -> None:
    async with replicas(*[hang] * 4) as made, running() as gateway:
        gateway.serve("chat", *made)
        clients: list[Client] = []
        for _ in range(100):
            clients.append(await gateway.connect())
            clients[-1].send(PATH, CHAT)
        await until(lambda: sum(len(one.asked) for one in made) == 100)
        assert max(len(one.asked) for one in made) <= 32  # 1.25 times the mean, rounded up
        for client in clients:
            await client.aclose()


async def test_a_replica_that_comes_moves_only_its_own_share() -> None:
    async with replicas(*[echo] * 5) as made, running() as gateway:
        gateway.serve("chat", *made[:4])
        before, after = [], []
        for places, count in ((before, 4), (after, 5)):
            gateway.serve("chat", *made[:count])
            for messages in chats(60):
                await gateway.post(PATH, {"model": "chat", "messages": messages})
                places.append(gateway.log[-1]["replica"])
        moved = [(was, now) for was, now in zip(before, after, strict=True) if was != now]
        assert 1 <= len(moved) <= 24
        assert {now for _, now in moved} == {made[4].address}


# Anything at all


def mutated(source: random.Random) -> bytes:
    raw = bytearray(head("POST", PATH, {"content-length": "66"}) + json.dumps(CHAT).encode())
    for _ in range(source.randint(1, 8)):
        at = source.randrange(len(raw))
        match source.randrange(4):
            case 0:
                raw[at] = source.randrange(256)
            case 1:
                del raw[at : at + source.randint(1, 20)]
            case 2:
                raw[at:at] = bytes(source.randrange(256) for _ in range(source.randint(1, 20)))
            case _:
                raw[at:at] = raw[: source.randrange(len(raw))]
        if not raw:
            raw += b"\r\n"
    return bytes(raw)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
async def test_no_bytes_from_a_client_harm_the_gateway(count: int) -> None:
    source = random.Random(7)
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with replicas(echo) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        for _ in range(count):
            client = await gateway.connect()
            client.write(mutated(source))
            client.writer.write_eof()
            await client.rest()
            await client.aclose()
        await until(lambda: not gateway.gateway.connections)
        assert (await gateway.post(PATH, CHAT)).status == 200
        assert gateway.gateway.num_body_bytes == 0
        assert not problems


async def test_a_port_that_is_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        async with running({"port": taken.getsockname()[1]}):
            pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "chat"], "NAME=HOST:PORT"),
        (["--model", "chat=here"], "'here' is no address"),
        (["--config", "/nowhere"], "cannot be read"),
        (["--port", "70000", "--model", "a=b:1"], "$.port"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from neuron_operator.gateway.process import main

    assert main(arguments) == 2
    assert words in capsys.readouterr().err


PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()


async def test_the_docs_list_exactly_the_metrics_and_the_fields_of_the_access_log() -> None:
    async with replicas(echo) as (chat,), running({"keysFile": ""}) as gateway:
        gateway.serve("chat", chat)
        await gateway.post(PATH, CHAT)
        families = {one.name: one.type for one in gateway.gateway.metrics.registry.collect()}
        made = {f"{name}_total" if kind == "counter" else name for name, kind in families.items()}
        assert made == set(re.findall(r"^\| `(neuron_serving_\w+)` \|", PAGE, re.MULTILINE))
        listed = PAGE.partition("The access log is")[2].partition("\n## ")[0]
        assert {*gateway.log[-1], "api_key", "error"} == set(re.findall(r"`(\w+)`", listed))


def test_the_example_of_keys_is_valid() -> None:
    from neuron_operator.gateway.keys import parse

    example = Path(__file__).parents[2] / "examples" / "gateway-keys.yaml"
    assert {one.name for one in parse(example.read_bytes(), "example").values()} == {"alice", "batch-jobs"}
