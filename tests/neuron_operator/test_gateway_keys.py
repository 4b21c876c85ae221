"""API keys of the gateway: who may ask for what, for how many tokens, and that no key is ever shown."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.gateways import LAST_CHUNK, STREAM_HEAD, Asked, Running, answer, chunk, echo, head, replicas, running
from neuron_operator.gateway import bodies
from neuron_operator.gateway import keys as keys_module
from neuron_operator.gateway.config import InvalidConfig
from neuron_operator.gateway.keys import parse

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"
ALICE, BOB = "alice-secret-key-0001", "bob-secret-key-00002"


def written(folder: Path, *entries: dict[str, Any]) -> str:
    path = folder / "keys.json"
    path.write_text(json.dumps(entries))
    return str(path)


async def post(gateway: Running, key: str, model: str = "chat", **headers: str) -> Any:
    return await gateway.post(PATH, {**CHAT, "model": model}, {"authorization": f"Bearer {key}", **headers})


async def test_each_key_reaches_its_models_and_no_server_sees_it(tmp_path: Path) -> None:
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    entries = [{"name": "alice", "key": ALICE, "models": ["chat"]}, {"name": "bob", "keySha256": digest}]
    async with replicas(echo) as (chat,), running({"keysFile": written(tmp_path, *entries)}) as gateway:
        for name in ("chat", "other"):
            gateway.serve(name, chat)
        assert (await post(gateway, ALICE)).status == 200
        refused = await post(gateway, ALICE, "other")
        assert (refused.status, refused.json["error"]["code"]) == (403, "model_not_allowed")
        assert (await post(gateway, BOB, "other")).status == 200
        assert (await gateway.post(PATH, CHAT, {"x-api-key": BOB})).status == 200  # as Anthropic's clients
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ALICE}"}):
            got = await gateway.post(PATH, CHAT, wrong)
            assert (got.status, got.json["error"]["code"]) == (401, "invalid_api_key")
            assert "www-authenticate" in got.headers
        assert not {"authorization", "x-api-key"} & {name for asked in chat.asked for name in asked.headers}
        assert [line.get("api_key") for line in gateway.log] == ["alice", "alice", "bob", "bob", None, None, None]
        shown = json.dumps(gateway.log) + gateway.gateway.metrics.exposition().decode()
        assert not any(secret in shown for secret in (ALICE, BOB, digest))
        assert gateway.metric("tokens_total", key="alice", model="default/chat") == 5


async def test_models_lists_what_a_key_may_use_and_health_needs_none(tmp_path: Path) -> None:
    entries = {"name": "alice", "key": ALICE, "models": ["b/chat"]}
    async with running({"keysFile": written(tmp_path, entries)}) as gateway:
        gateway.serve("chat", namespace="a")
        gateway.serve("chat", namespace="b")
        bearer = {"authorization": f"Bearer {ALICE}"}
        assert [one["id"] for one in (await gateway.get("/v1/models", bearer)).json["data"]] == ["b/chat"]
        assert (await gateway.get("/v1/models/b%2Fchat", bearer)).status == 200
        assert (await gateway.get("/v1/models/a%2Fchat", bearer)).status == 404
        said = await post(gateway, ALICE)
        assert (said.status, said.json["error"]["code"]) == (404, "ambiguous_model")
        assert "b/chat" in said.json["error"]["message"]
        assert "a/chat" not in said.json["error"]["message"]
        assert "a/chat" not in (await gateway.get("/v1/models/chat", bearer)).json["error"]["message"]
        assert (await gateway.get("/v1/models")).status == 401
        assert (await gateway.get("/health")).status == 200


async def test_a_key_that_has_used_its_tokens_is_told_when_there_are_more(tmp_path: Path) -> None:
    entries = {"name": "alice", "key": ALICE, "tokensPerMinute": 12}
    document = {"keysFile": written(tmp_path, entries), "gateways": 2}  # each has half of the tokens
    async with replicas(echo) as (chat,), running(document) as gateway:
        gateway.serve("chat", chat)
        assert [(await post(gateway, ALICE)).status for _ in range(2)] == [200, 200]  # 5 tokens each
        got = await post(gateway, ALICE)
        assert (got.status, got.json["error"]["code"]) == (429, "tokens_per_minute")
        assert 30 <= int(got.headers["retry-after"]) <= 60  # 5 tokens at 6 a minute


async def test_the_file_is_read_again_when_it_changes_and_an_invalid_one_changes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path, {"name": "alice", "key": ALICE, "tokensPerMinute": 6})
    async with replicas(echo) as (chat,), running({"keysFile": file}) as gateway:
        gateway.serve("chat", chat)
        assert [(await post(gateway, key)).status for key in (ALICE, ALICE, ALICE, BOB)] == [200, 200, 429, 401]
        bob = {"name": "bob", "key": BOB}
        written(tmp_path, {"name": "al", "key": ALICE, "tokensPerMinute": 6}, bob)
        gateway.gateway.keys.reload(gateway.gateway.now())
        assert [(await post(gateway, key)).status for key in (ALICE, BOB)] == [429, 200]  # what it used stays used
        for invalid in ("- {name: bob, key: }", "- {name: 2026-99-99}", "- !!int ''", "[" * 5000):
            Path(file).write_text(invalid)
            gateway.gateway.keys.reload(gateway.gateway.now())
            assert (await post(gateway, BOB)).status == 200
        written(tmp_path, bob)
        gateway.gateway.keys.reload(gateway.gateway.now())
        assert [(await post(gateway, key)).status for key in (ALICE, BOB)] == [401, 200]


async def test_an_invalid_file_is_read_once_and_a_missing_one_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A long one takes a second, in which no request is answered."""
    file = Path(written(tmp_path, {"name": "bob", "key": BOB}))
    async with running({"keysFile": str(file)}) as gateway:
        keys, bob = gateway.gateway.keys, {b"x-api-key": BOB.encode()}
        read = []
        monkeypatch.setattr(keys_module, "parse", lambda raw, source: read.append(raw) or parse(raw, source))
        file.write_text("- rotated to garbage")
        for _ in range(3):
            keys.reload(0.0)
        assert (len(read), len(caplog.records), keys.of(bob) is not None) == (1, 1, True)
        file.unlink()
        for _ in range(3):
            keys.reload(0.0)
        assert (len(read), len(caplog.records), keys.of(bob) is not None) == (1, 2, True)
        written(tmp_path, {"name": "robert", "key": BOB})
        keys.reload(0.0)
        assert keys.of(bob).name == "robert"  # type: ignore[union-attr]


async def test_tokens_of_a_request_that_runs_while_other_keys_change_are_counted(tmp_path: Path) -> None:
    file = written(tmp_path, {"name": "alice", "key": ALICE, "tokensPerMinute": 6})
    asked, go = asyncio.Event(), asyncio.Event()

    async def wait(of: Asked, writer: asyncio.StreamWriter) -> bool:
        asked.set()
        await go.wait()
        return await echo(of, writer)

    async with replicas(wait) as (chat,), running({"keysFile": file}) as gateway:
        gateway.serve("chat", chat)
        runs = asyncio.create_task(post(gateway, ALICE))
        await asked.wait()
        written(tmp_path, {"name": "alice", "key": ALICE, "tokensPerMinute": 6}, {"name": "bob", "key": BOB})
        gateway.gateway.keys.reload(gateway.gateway.now())
        go.set()
        assert (await runs).status == 200
        assert [(await post(gateway, ALICE)).status for _ in range(2)] == [200, 429]  # 5 tokens each


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not YAML"),
        ("- {name: 2026-99-99}", "is not YAML"),  # for the parser a date that does not exist
        ("{}", "Expected `array`"),
        ("- {name: a}", "entry 1 must have one of key and keySha256"),
        (f"- {{name: a, key: {ALICE}, keySha256: '{'0' * 64}'}}", "entry 1 must have one of"),
        (f"- {{name: a, key: {ALICE}}}\n- {{name: b, key: {ALICE}}}", "two entries have the same key"),
        ("- {name: a, key: short}", "key"),
        (f"- {{name: a, key: {ALICE}, tokens: 5}}", "unknown field `tokens`"),
        (f"- {{name: 'a b', key: {ALICE}}}", "name"),
    ],
)
def test_an_invalid_file_is_refused_without_showing_a_key(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as refused:
        parse(text.encode(), "keys.yaml")
    assert ALICE not in str(refused.value)


async def test_a_refused_body_is_read_whatever_the_limit_of_heads(tmp_path: Path) -> None:
    document = {"keysFile": written(tmp_path, {"name": "bob", "key": BOB}), "limits": {"headBytes": 1024}}
    async with running(document) as gateway:
        client = await gateway.connect()
        client.write(head("POST", PATH, {"content-length": "4000"}))
        for _ in range(4):
            client.write(b"x" * 1000)
            await asyncio.sleep(0.01)
        assert (await client.answer()).status == 401
        await client.aclose()


async def test_a_missing_file_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidConfig, match="cannot read /nowhere"):
        async with running({"keysFile": "/nowhere"}):
            pass


# Usage

CHUNK = b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
STARTED = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":7,"output_tokens":0}}}\n\n'
DELTA = b'event: message_delta\ndata: {"usage":{"input_tokens":5,"cache_read_input_tokens":2,"output_tokens":3}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
COMPLETED = b'data: {"response":{"output":[],"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":0},"output_tokens":3}}}\n\n'  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([CHUNK, CHUNK, LAST, DONE], (7, 3, False)),
        ([STARTED, CHUNK, DELTA, STOP], (7, 3, False)),
        ([CHUNK, COMPLETED], (7, 3, False)),
        ([CHUNK] * 5 + [DONE], (25, 7, True)),  # a chunk for each token, and two more
    ],
)
async def test_the_tokens_of_a_stream_are_those_that_it_ends_with_or_its_chunks(
    events: list[bytes], expected: tuple[int, int, bool]
) -> None:
    async def behave(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        for event in events:
            writer.write(chunk(event))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(LAST_CHUNK)
        return True

    async with replicas(behave) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        body = json.dumps(CHAT).encode()
        await gateway.post(PATH, body + b" " * (100 - len(body)))
        line = gateway.log[-1]
        assert (line["prompt_tokens"], line["output_tokens"], line["is_estimated"]) == expected
        assert gateway.metric("tokens_total", key="", model="default/chat") == sum(expected[:2])


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}', (4, 0)),
        (
            b'{"usage": {"prompt_tokens": 4, "completion_tokens": 2}, "x": "\\"usage\\":{\\"prompt_tokens\\":9}"}',
            (4, 2),
        ),
        (b'{"usage":null}', None),
        (b"", None),
        (b'"usage":', None),
    ],
)
def test_usage_is_read_where_it_stands(tail: bytes, expected: tuple[int, int] | None) -> None:
    found = bodies.usage_of(tail)
    assert (None if found is None else (found.prompt, found.output)) == expected


async def test_errors_cost_no_tokens() -> None:
    async def behave(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer(b'{"error": {}, "usage": {"prompt_tokens": 5}}', status=400))
        return True

    async with replicas(behave) as (chat,), running() as gateway:
        gateway.serve("chat", chat)
        await gateway.post(PATH, CHAT)
        assert gateway.metric("tokens_total", key="", model="default/chat") == 0
