"""A front end that replaces an ended one while the engine keeps running."""

from __future__ import annotations

import asyncio
from pathlib import Path

from helpers.front_end import make_model, serving, until_healthy
from neuron_runtime.engine.messages import Step
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.processes.control import EngineStarted
from neuron_runtime.server.engine_client import MAX_IDS
from neuron_runtime.server.metrics import Metrics

LONG = {"prompt": "a core", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


async def test_a_new_front_end_gets_the_limits_and_none_of_the_old_requests(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path), paced=True) as served:
        left = asyncio.create_task(served.http.post("/v1/completions", json=LONG))
        await served.until_metric("vllm:num_requests_running", 1)
        served.tell(EngineStarted(1, num_predecessors=1))
        await served.until_metric("vllm:num_requests_running", 0)
        await until_healthy(served)
        assert await served.metric("vllm:request_success_total", finished_reason="length") == 0
        asked = asyncio.create_task(served.http.post("/v1/completions", json=LONG | {"max_tokens": 3}))
        answer = await served.answer(asked)
        assert answer.json()["usage"]["completion_tokens"] == 3
        # Late events of the predecessor's requests are dropped.
        assert next(served.front_end.client._ids) == MAX_IDS + 1
        left.cancel()


def test_a_new_front_end_does_not_count_earlier_steps() -> None:
    metrics = Metrics("m")
    metrics.engine_started(1, joined=True)
    for queries in (50, 60):
        metrics.step(Step((), (), EngineStats(num_prefix_queries_total=queries)))
    assert b'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 10.0' in metrics.render()
