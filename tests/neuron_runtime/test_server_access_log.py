"""The access log over real HTTP: content of a line, omitted data, and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from helpers.front_end import LIMITS, MODEL, Serving, make_model, serving
from neuron_runtime.config import ServerOptions
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.server import access_log, edge
from neuron_runtime.server.access_log import MAX_TEXT, entry
from neuron_runtime.server.exchange import Exchange, Exchanges

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "the treasure lies under the oak"
Logged = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Serving, "Log"]]]


class Log:
    """Lines written to stdout so far."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def text(self) -> str:
        return self._path.read_text()

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """The entries, when there are `count` of them."""
        while self.text.count("\n") < count:
            await asyncio.sleep(0.01)
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def logged(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Logged:
    """Starts a server with its log in a file."""

    @contextlib.asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[tuple[Serving, Log]]:
        more = {key: options.pop(key) for key in ("api_key_file", "paced", "max_queued") if key in options}
        with (tmp_path / "stdout").open("w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            async with serving(model_dir, options=ServerOptions(**options), **more) as served:
                yield served, Log(tmp_path / "stdout")

    return start


async def test_a_line_describes_the_request_and_its_cost(logged: Logged) -> None:
    async with logged() as (served, log):
        body = {"model": "alias", "prompt": ["a core", "a node"], "n": 2, "max_tokens": 3, "ignore_eos": True}
        answer = await served.http.post("/v1/completions?x=1", json=body, headers={"user-agent": "tests/1"})
        usage = answer.json()["usage"]
        (line,) = await log.lines(1)
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line.pop("request_id") == answer.headers["x-request-id"]
    # The first token of any choice and the longest wait of all: the last may wait while the first has tokens.
    seconds = line.pop("duration_seconds")
    assert 0 <= line.pop("queue_seconds") <= seconds
    assert 0 <= line.pop("first_token_seconds") <= seconds
    assert line == {
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "user_agent": "tests/1",
        "model": MODEL,
        "stream": False,
        "n": 2,
        "prompts": 2,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": 12,
        "finish_reasons": ["length"] * 4,
    }


async def test_the_queue_time_is_part_of_the_time_to_first_token(logged: Logged) -> None:
    async with logged() as (served, log):
        await served.http.post("/v1/completions", json={"prompt": "a core", "max_tokens": 3})
        (line,) = await log.lines(1)
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["duration_seconds"]


async def test_streams_refusals_and_other_routes_are_logged_and_probes_are_not(logged: Logged) -> None:
    async with logged() as (served, log):
        for path in ("/health", "/live", "/metrics", "/ping", "/version"):
            assert (await served.http.get(path)).status_code == 200
        chat = {"messages": [{"role": "user", "content": SECRET}], "stream": True, "max_tokens": 2}
        await served.http.post("/v1/chat/completions", json=chat)
        await served.http.post("/v1/completions", json={"prompt": SECRET, "temperature": -1})
        await served.http.post("/v1/completions", json={"prompt": SECRET, "logit_bias": {SECRET: 1}})
        await served.http.post("/v1/completions", json={"prompt": "x", "model": SECRET})
        await served.http.post("/v1/completions", content=f'{{"prompt": "{SECRET}')
        await served.http.get("/v1/models")
        await served.http.get(f"/{'y' * 300}")
        lines = await log.lines(7)
        text = log.text
    assert [line["status"] for line in lines] == [200, 400, 400, 404, 400, 200, 404]
    assert [line.get("error") for line in lines] == [
        *(None, "invalid_request", "invalid_request", "model_not_found", "invalid_request", None, None)
    ]
    assert [line.get("param") for line in lines] == [None, "temperature", "logit_bias", "model", None, None, None]
    assert lines[0]["stream"] is True
    assert lines[0]["finish_reasons"][0] in ("stop", "length")
    assert len(lines[-1]["path"]) == MAX_TEXT
    assert SECRET not in text


async def test_a_field_name_invented_by_a_client_is_not_logged() -> None:
    exchange = Exchange("id", "POST", "/v1/completions", "", {}, 0.0, 0.0)
    exchange.error = InvalidRequest("wrong", field=SECRET)
    assert entry(exchange)["param"] == "..."
    exchange.error = InvalidRequest("wrong", field="messages[0].content")
    assert entry(exchange)["param"] == "messages[0].content"


async def test_prompts_are_logged_only_on_request_and_truncated(logged: Logged) -> None:
    async with logged(log_prompts=True, max_logged_characters=16) as (served, log):
        await served.http.post("/v1/completions", json={"prompt": [SECRET, "x"], "max_tokens": 1})
        (line,) = await log.lines(1)
    first, second = line["prompt_texts"]
    assert len(first) == 16
    assert first == f"<|begin|>{SECRET}"[:16]
    assert second == "<|begin|>x"


async def test_a_trusted_proxy_supplies_the_client_address(logged: Logged) -> None:
    async with logged() as (served, log):
        await served.http.get("/v1/models", headers={"x-forwarded-for": "203.0.113.7"})
        (line,) = await log.lines(1)
    assert line["client"] == "203.0.113.7"


async def test_a_streamed_token_adds_no_logging_work(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []

    class Counting(Exchanges):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def counted(message: Message) -> None:
                passed.append(message["type"])
                await send(message)

            await super().__call__(scope, receive, counted)

    monkeypatch.setattr(edge, "Exchanges", Counting)
    async with logged() as (served, _):
        for num_tokens in (2, 100):
            passed.clear()
            body = {"prompt": "a core", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            answer = await served.http.post("/v1/completions", json=body)
            assert answer.text.count("data: ") >= 2
            assert passed == ["http.response.start", "http.response.body"]


async def test_a_key_is_logged_by_its_number(logged: Logged, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\nsk-two\n")
    async with logged(api_key_file=keys) as (served, log):
        for key in ("sk-two", "sk-three"):
            await served.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        lines = await log.lines(2)
        text = log.text
    assert [(line["status"], line.get("api_key"), line.get("error")) for line in lines] == [
        (200, 2, None),
        (401, None, "invalid_api_key"),
    ]
    assert "sk-" not in text


async def test_disconnected_clients_and_failed_engines_are_logged(logged: Logged) -> None:
    body = {"prompt": "a core", "max_tokens": 200, "ignore_eos": True}
    async with logged(paced=True) as (served, log):
        leaving = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await served.until_metric("vllm:num_requests_running", 1)
        leaving.cancel()
        (line,) = await log.lines(1)
        assert (line["status"], line["finish_reasons"]) == (499, ["abort"])
        await served.until_metric("vllm:num_requests_running", 0)
        failing = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await served.until_metric("vllm:num_requests_running", 1)
        await served.replace_engine("the engine ended")
        assert (await failing).status_code == 503
        _, line = await log.lines(2)
    assert (line["status"], line["error"], line["finish_reasons"]) == (503, "not_ready", ["error"])
    assert line["output_tokens"] > 0


async def test_a_client_that_disconnects_during_its_body_is_not_logged_as_refused(logged: Logged) -> None:
    async with logged() as (served, log):
        refused = await served.metric("neuron_serving_requests_refused_total")
        _, writer = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt')
        await writer.drain()
        writer.close()
        (line,) = await log.lines(1)
        assert (line["status"], line.get("error")) == (499, None)
        assert await served.metric("neuron_serving_requests_refused_total") == refused


async def test_an_internal_error_is_logged_as_one(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError(SECRET)

    async with logged() as (served, log):
        monkeypatch.setattr(served.front_end, "admissions", broken)
        answer = await served.http.post("/tokenize", json={"prompt": "x"})
        (line,) = await log.lines(1)
    assert (answer.status_code, line["status"]) == (500, 500)
    assert answer.headers["x-request-id"] == line["request_id"]
    assert SECRET not in answer.text + log.text


async def test_a_full_queue_is_logged_without_a_finish_reason(logged: Logged) -> None:
    body = {"prompt": "a core", "max_tokens": 50, "ignore_eos": True}
    async with logged(paced=True, max_queued=0) as (served, log):
        running = [asyncio.create_task(served.http.post("/v1/completions", json=body)) for _ in range(LIMITS.max_rows)]
        await served.until_metric("vllm:num_requests_running", LIMITS.max_rows)
        refused = await served.answer(asyncio.create_task(served.http.post("/v1/completions", json=body)))
        assert refused.status_code == 429
        (line,) = await log.lines(1)
        served.unpace()
        await asyncio.gather(*running)
    assert (line["status"], line["error"], line["finish_reasons"]) == (429, "overloaded", [])


@pytest.mark.parametrize("sent", ["abc-123", "x" * 128, "550e8400-e29b-41d4-a716-446655440000"])
async def test_a_valid_client_request_id_is_kept(logged: Logged, sent: str) -> None:
    async with logged() as (served, log):
        answer = await served.http.get("/v1/models", headers={"x-request-id": sent})
        assert answer.headers["x-request-id"] == sent
        (line,) = await log.lines(1)
    assert line["request_id"] == sent


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "two words", "tab\there", "caf\xe9"])
async def test_an_invalid_request_id_is_replaced_and_every_response_has_one(logged: Logged, sent: str | None) -> None:
    async with logged(access_log=False) as (served, log):
        headers = [] if sent is None else [(b"x-request-id", sent.encode("latin-1"))]
        made = set()
        for method, path in (
            *(("GET", "/health"), ("GET", "/nothing"), ("PUT", "/v1/models"), ("HEAD", "/v1/models")),
            *(("OPTIONS", "/v1/completions"), ("POST", "/v1/completions")),
        ):
            answer = await served.http.request(method, path, headers=headers)
            assert len(answer.headers.get_list("x-request-id")) == 1
            assert answer.headers["x-content-type-options"] == "nosniff"
            made.add(answer.headers["x-request-id"])
        assert len(made) == 6
        assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in made)
        assert log.text == ""


async def test_a_wrong_method_is_an_error_and_options_lists_the_methods(logged: Logged) -> None:
    async with logged(access_log=False) as (served, _):
        wrong = await served.http.put("/v1/completions", json={})
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["type"] == "invalid_request_error"
        asked = await served.http.options("/v1/models")
        assert (asked.status_code, set(asked.headers["allow"].split(", ")), asked.content) == (
            204,
            {"GET", "HEAD"},
            b"",
        )
        head = await served.http.head("/v1/models")
        get = await served.http.get("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(get.content))
        assert (await served.http.options("/nothing")).json()["error"]["type"] == "not_found_error"


async def test_lost_lines_are_counted_and_requests_continue(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(access_log, "MAX_QUEUED_LINES", 3)
        monkeypatch.setattr(access_log, "GATHER_SECONDS", 3600.0)
        async with serving(model_dir, options=ServerOptions()) as served:
            for _ in range(8):
                assert (await served.http.get("/v1/models")).status_code == 200
            assert await served.metric("neuron_serving_access_log_lines_lost_total") == 5
        # Queued lines are written at the end.
        assert len(os.read(read_fd, 65536).splitlines()) == 3
    os.close(read_fd)
