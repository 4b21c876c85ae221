"""`/metrics` over HTTP: what a scrape gets of responses and processes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from helpers.front_end import MODEL, make_model, serving
from neuron_runtime.processes.control import EngineEnded, EngineStarted
from neuron_runtime.server.metrics import GENERATION_ROUTES, RESPONSE_CODES, process_readings


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


async def test_a_scrape_gets_series_with_the_labels_that_all_have(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        answer = await served.http.get("/metrics")
        assert answer.headers["content-type"] == CONTENT_TYPE_PLAIN_0_0_4
        found = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
        assert all(sample.labels.items() >= {"model_name": MODEL, "engine": "0"}.items() for sample in found)
        assert "# TYPE vllm:prompt_tokens_total counter\n" in answer.text


# Responses


async def test_responses_are_counted_by_route_and_code_but_not_probes(model_dir: Path) -> None:
    async with serving(model_dir) as served:

        async def count(route: str, code: str) -> float:
            return await served.metric("neuron_serving_http_responses_total", route=route, code=code)

        for route in GENERATION_ROUTES:
            assert [await count(route, str(code)) for code in RESPONSE_CODES] == [0] * len(RESPONSE_CODES)
        good = {"model": MODEL, "prompt": "a core", "max_tokens": 1}
        for body in (good, good | {"stream": True}, good | {"temperature": -1}):
            await served.http.post("/v1/completions", json=body)
        await served.http.get("/v1/models/unknown")
        await served.http.get("/v1/nowhere")
        await served.http.get("/v1/completions")
        await served.http.get("/health")
        assert await count("/v1/completions", "200") == 2
        assert await count("/v1/completions", "400") == 1
        assert await count("/v1/completions", "405") == 1
        assert await count("/v1/models/{model:path}", "404") == 1
        assert await count("none", "404") == 1, "a path of a client never becomes a label"
        assert await served.metric("neuron_serving_http_responses_total") == 6


# Processes


def test_the_front_end_reports_all_processes() -> None:
    pids = {"supervisor": os.getppid(), "engine": os.getppid(), "front-end": os.getpid()}
    values = {(family.name, labels): value for family, labels, value in process_readings(pids)}
    assert {labels[0] for _, labels in values} == {"front-end", "supervisor", "engine"}
    own = ("front-end",)
    assert values["process_resident_memory_bytes", own] > 1e6
    assert values["process_cpu_seconds_total", own] > 0
    assert 0 < values["process_open_fds", own] < values["process_max_fds", own]


async def test_a_process_that_has_ended_has_no_series(model_dir: Path) -> None:
    async with serving(model_dir) as served:

        async def processes() -> set[str]:
            text = (await served.http.get("/metrics")).text
            return set(re.findall(r'process_cpu_seconds_total{.*process="(.*?)"', text))

        served.tell(EngineStarted(2, pid=os.getppid()))
        with_engine = {"front-end", "supervisor", "engine"}
        await served.until(lambda: served.front_end.client.detail == "starting")
        assert await processes() == with_engine
        served.tell(EngineEnded("it was killed"))
        await served.until(lambda: served.front_end.client.detail == "it was killed")
        assert await processes() == with_engine - {"engine"}
