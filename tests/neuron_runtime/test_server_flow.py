"""Requests in flight: disconnecting clients, full queues, drains, engine exits. Steps run when permitted."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from helpers.front_end import LIMITS, MODEL, Serving, make_model, serving, until_healthy
from neuron_runtime.processes.control import EngineEnded, EngineStalled, EngineStarted, StartDrain
from neuron_runtime.server.http_protocol import BoundedProtocol

LONG = {"prompt": "a core", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
STREAM = {**LONG, "stream": True}

SERIES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "neuron_serving_step_seconds_bucket",
    "neuron_serving_load_seconds",
    "neuron_serving_warm_up_seconds",
    "neuron_serving_engine_restarts_total",
)


ONE_ROW = replace(LIMITS, max_rows=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def post(served: Serving, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(served.http.post("/v1/completions", json={**LONG, **body}))


async def test_health_reports_the_start_progress_and_becomes_ready(model_dir: Path) -> None:
    async with serving(model_dir, ready=False) as served:
        await served.until(lambda: "loading" in served.front_end.client.detail)
        health = await served.http.get("/health")
        assert (health.status_code, health.json()["detail"]) == (503, "not ready: loading weights 25%")
        assert (await served.http.get("/live")).status_code == 200
        assert (await served.http.get("/metrics")).status_code == 200
        assert (await served.http.get("/v1/models")).json()["data"][0]["id"] == MODEL
        early = await served.http.post("/v1/completions", json=LONG)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "not_ready")
        assert "retry-after" in early.headers
        served.engine.become_ready()
        await until_healthy(served)


@pytest.mark.parametrize("body", [LONG, STREAM], ids=["whole", "stream"])
async def test_a_disconnected_client_frees_its_row(model_dir: Path, body: dict[str, Any]) -> None:
    async with serving(model_dir, paced=True) as served:
        asked = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await served.until_metric("vllm:num_requests_running", 1)
        asked.cancel()
        await served.until_metric("vllm:request_success_total", 1, finished_reason="abort")
        await served.until_metric("vllm:num_requests_running", 0)
        await served.until_metric("vllm:kv_cache_usage_perc", 0)
        await served.until(lambda: served.front_end.gate.num_running == 0)


async def test_a_client_that_leaves_a_stream_frees_its_row(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as served:
        served.permit(20)
        async with served.http.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
        await served.until_metric("vllm:request_success_total", 1, finished_reason="abort")
        await served.until_metric("vllm:num_requests_running", 0)


async def test_a_full_queue_is_a_429_with_retry_after(model_dir: Path) -> None:
    async with serving(model_dir, paced=True, max_queued=1) as served:
        # Two rows and one place in the queue.
        admitted = [post(served, stream=number == 0) for number in range(3)]
        await served.until_metric("vllm:num_requests_waiting", 1)
        await served.until_metric("vllm:num_requests_running", 2)
        assert (await served.http.get("/load")).json() == {"server_load": 3}
        for body in ({}, {"stream": True}, {"n": 2}):
            refused = await served.answer(post(served, **body))
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        served.unpace()
        assert [answer.status_code for answer in await asyncio.gather(*admitted)] == [200, 200, 200]
        assert await served.metric("vllm:request_success_total", finished_reason="length") == 3
        assert await served.metric("vllm:request_success_total", finished_reason="abort") == 0


@pytest.mark.parametrize("body", [{}, {"n": 2}], ids=["one choice", "two choices"])
async def test_the_queue_is_bounded_while_a_step_runs(model_dir: Path, body: dict[str, Any]) -> None:
    async with serving(model_dir, paced=True, max_queued=2) as served:
        first = post(served, **body)
        while not served.backend.waiting:
            await asyncio.sleep(0.01)
        # The engine is in a step and reads nothing. Two rows and two places in the queue are 4 choices.
        num_choices = body.get("n", 1)
        flood = [post(served, **body) for _ in range(8)]
        while (num_refused := sum(one.done() for one in flood)) < 8 - (4 // num_choices - 1):
            await asyncio.sleep(0.01)
        assert served.backend.num_collected == 0
        assert num_refused == 8 - (4 // num_choices - 1)
        assert {one.result().status_code for one in flood if one.done()} == {429}
        assert len(served.front_end.client._recipients) == 4
        served.unpace()
        answers = [await first, *await asyncio.gather(*flood)]
        assert [answer.status_code for answer in answers].count(200) == 4 // num_choices
        # What ended leaves room.
        assert (await post(served, **body)).status_code == 200


async def test_a_stop_string_frees_the_row_at_once(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        text = (await post(served)).json()["choices"][0]["text"]
    async with serving(model_dir, paced=True) as served:
        answer = (await served.answer(post(served, stop=text[5:8]))).json()
        assert answer["choices"][0] | {"text": text[:5]} == answer["choices"][0]
        await served.until_metric("vllm:num_requests_running", 0)
        assert served.engine.backend.num_collected < 100


async def test_queued_tokens_are_sent_in_one_event(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as served:
        served.permit(20)
        async with served.http.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = (line async for line in answer.aiter_lines() if line)
            await anext(lines)
            # Steps end while the front end, which shares this thread, cannot look.
            served.permit(40)
            while served.engine.backend.num_collected < 59:
                time.sleep(0.001)
            served.unpace()
            rest = [line async for line in lines]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) < 200 - 30


async def test_a_drain_admits_for_its_delay_then_refuses_and_lets_streams_end(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as served:
        gate = served.front_end.gate
        stream = post(served, stream=True)
        await served.until_metric("vllm:num_requests_running", 1)
        served.tell(StartDrain(3600.0, 60.0))
        await served.until(lambda: gate.draining)
        assert (await served.http.get("/health")).json() == {"status": "draining"}
        late = post(served, max_tokens=5)
        await served.until(lambda: len(served.front_end.client._recipients) == 2)
        # The delay is over; tests of the gate cover that it ends by itself.
        served.tell(StartDrain(0.0, 60.0))
        await served.until(lambda: gate.closed)
        refused = await served.http.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.json()["error"]["code"] == "draining"
        assert (await served.http.get("/live")).status_code == 200
        served.unpace()
        assert (await late).status_code == 200
        assert (await stream).text.endswith("data: [DONE]\n\n")
        await served.finished


async def test_a_drain_past_its_deadline_ends_streams_with_an_error(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as served:
        stream, whole = post(served, stream=True), post(served)
        await served.until_metric("vllm:num_requests_running", 2)
        served.tell(StartDrain(0.0, 0.1))
        last = [line for line in (await stream).text.split("\n\n") if line][-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert (await whole).status_code == 503
        await served.finished


async def test_a_front_end_whose_drain_fails_ends_at_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model_dir) as served:
        monkeypatch.setattr(BoundedProtocol, "drain", Mock(side_effect=OSError("the connection is broken")))
        served.tell(StartDrain(3600.0, 60.0))
        with pytest.raises(OSError, match="the connection is broken"):
            await served.finished


async def test_an_engine_exit_fails_its_requests_and_the_next_engine_serves(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as served:
        stream, whole = post(served, stream=True), post(served)
        await served.until_metric("vllm:num_requests_running", 2)
        await served.until_metric("vllm:time_to_first_token_seconds_count", 2)
        await served.replace_engine("the engine process was killed by SIGKILL")
        broken = await whole
        assert broken.status_code == 503
        assert "SIGKILL" in broken.json()["error"]["message"]
        last = [line for line in (await stream).text.split("\n\n") if line][-1]
        assert "SIGKILL" in json.loads(last.removeprefix("data: "))["error"]["message"]
        await until_healthy(served)
        served.unpace()
        assert (await post(served)).status_code == 200
        assert await served.metric("neuron_serving_engine_restarts_total") == 1
        assert await served.metric("vllm:request_success_total", finished_reason="error") == 2


async def test_health_reports_why_there_is_no_engine(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        served.tell(EngineEnded("the device failed"))
        await served.until(lambda: served.front_end.client.detail == "the device failed")
        health = await served.http.get("/health")
        assert (health.status_code, "the device failed" in health.text) == (503, True)
        assert (await post(served)).status_code == 503
        assert await served.metric("vllm:num_requests_running") == 0
        served.tell(EngineStarted(2))
        await served.until(lambda: served.front_end.client.detail == "starting")


async def test_a_stalled_engine_is_not_ready_and_takes_no_requests_until_it_responds_again(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as served:
        running = post(served)
        await served.until_metric("vllm:num_requests_running", 1)
        served.tell(EngineStalled("the engine process is stopped"))

        async def refused() -> bool:
            return (await served.http.get("/health")).status_code == 503

        await served.until(refused)
        assert "the engine process is stopped" in (await served.http.get("/health")).text
        assert (await served.http.get("/live")).status_code == 200
        answer = await post(served)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        served.tell(EngineStalled(""))
        await until_healthy(served)
        served.unpace()
        assert [(await one).status_code for one in (running, post(served))] == [200, 200]


async def test_a_device_exception_ends_the_engine_but_not_the_front_end(model_dir: Path) -> None:
    async with serving(model_dir, paced=True) as served:
        asked = post(served)
        served.backend.failure = RuntimeError("device lost")
        await served.until(lambda: served.engine.error is not None)
        assert str(served.engine.error) == "device lost"
        served.tell(EngineEnded("device lost"))
        assert (await asked).status_code == 503


async def test_the_front_end_ends_with_its_supervisor(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        os.dup2(os.open(os.devnull, os.O_WRONLY), served.orders)
        await served.finished


async def test_every_documented_series_is_exported(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        answers = [(await post(served, max_tokens=tokens)).json() for tokens in (3, 5)]
        text = (await served.http.get("/metrics")).text
        assert all(any(line.startswith(name + "{") for line in text.splitlines()) for name in SERIES)
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert all(f'model_name="{MODEL}"' in line for line in lines)
        usage = [answer["usage"] for answer in answers]
        assert await served.metric("vllm:prompt_tokens_total") == sum(one["prompt_tokens"] for one in usage)
        assert await served.metric("vllm:generation_tokens_total") == 8
        assert await served.metric("vllm:request_success_total", finished_reason="length") == 2
        assert await served.metric("vllm:e2e_request_latency_seconds_count") == 2
        assert await served.metric("vllm:inter_token_latency_seconds_count") <= 6
        assert await served.metric("neuron_serving_load_seconds") == 0.5


async def test_queue_time_and_template_time_are_reported_separately(model_dir: Path) -> None:
    """Queue and prefill add up to the time to first token; requests without a token count in neither."""
    async with serving(model_dir, paced=True, limits=ONE_ROW) as served:
        first = post(served)
        await served.until_metric("vllm:num_requests_running", 1)
        second = post(served, max_tokens=2)
        await served.until_metric("vllm:num_requests_waiting", 1)
        leaves = post(served, max_tokens=2)
        await served.until_metric("vllm:num_requests_waiting", 2)
        leaves.cancel()
        await served.until_metric("vllm:request_success_total", 1, finished_reason="abort")
        served.unpace()
        await served.answer(first)
        await served.answer(second)
        parts = {
            name: await served.metric(f"vllm:{name}_seconds_sum")
            for name in ("request_queue_time", "request_prefill_time", "time_to_first_token")
        }
        assert parts["request_queue_time"] + parts["request_prefill_time"] == pytest.approx(
            parts["time_to_first_token"]
        )
        assert min(parts.values()) > 0
        for name in ("request_queue_time", "request_prefill_time", "time_to_first_token"):
            assert await served.metric(f"vllm:{name}_seconds_count") == 2
