"""The formats of `/metrics` over HTTP, and which one a scrape gets. The official parsers read every answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from helpers.front_end import MODEL, Serving, make_model, serving
from neuron_runtime.processes.control import EngineEnded, EngineStarted
from neuron_runtime.processes.usage import Processes
from neuron_runtime.server.exposition import OPENMETRICS, TEXT, Format, chosen_format, encoded
from neuron_runtime.server.metrics import GENERATION_ROUTES, RESPONSE_CODES

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PARSERS: dict[str, Callable[[str], Iterable[Metric]]] = {
    TEXT.content_type: text_families,
    OPENMETRICS.content_type: openmetrics_families,
}
Sample = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html, application/json", TEXT),
        ("text/plain; version=1.0.0", TEXT),
        (PROMETHEUS_3, OPENMETRICS),
        ("Application/OpenMetrics-Text", OPENMETRICS),
        ('application/openmetrics-text; version="1.0.0"; charset=utf-8', OPENMETRICS),
        ("application/openmetrics-text; version=2.0.0", TEXT),
        ("application/openmetrics-text; version=0.0.1, text/plain", TEXT),
        ("application/openmetrics-text; q=0.5, text/plain", TEXT),
        ("application/openmetrics-text; q=0", TEXT),
        ("application/openmetrics-text; q=much", TEXT),
        ("application/openmetrics-text; version=first", TEXT),
    ],
)
def test_a_scrape_gets_the_format_that_it_prefers(accept: str, expected: Format) -> None:
    assert chosen_format(accept) is expected


@pytest.mark.parametrize(
    ("accept_encoding", "compressed"),
    [("", False), ("gzip", True), ("deflate, GZIP;q=0.5", True), ("gzip;q=0", False), ("identity", False)],
)
def test_an_answer_is_compressed_only_if_the_scraper_accepts_it(accept_encoding: str, compressed: bool) -> None:
    body, headers = encoded(b"a 1\n" * 100, accept_encoding)
    assert (len(body) < 400) is compressed
    assert headers.get("content-encoding") == ("gzip" if compressed else None)


@given(st.text(), st.text(alphabet='gzip;q=,.0"* '))
def test_no_header_of_a_client_raises(accept: str, accept_encoding: str) -> None:
    chosen_format(accept)
    chosen_format(f"application/openmetrics-text;{accept}")
    encoded(b"", accept_encoding)


async def scraped(served: Serving, accept: str, accept_encoding: str = "gzip") -> dict[Sample, float]:
    answer = await served.http.get("/metrics", headers={"accept": accept, "accept-encoding": accept_encoding})
    assert answer.status_code == 200
    assert answer.headers.get("content-encoding") == ("gzip" if accept_encoding else None)
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in PARSERS[answer.headers["content-type"]](answer.text)
        for sample in family.samples
    }


async def test_both_formats_have_the_same_series(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        body = {"model": MODEL, "prompt": "a core", "max_tokens": 3, "ignore_eos": True}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        text = await scraped(served, "", "")
        openmetrics = await scraped(served, PROMETHEUS_3)
        assert text.keys() == openmetrics.keys()
        moving = ("process_", "neuron_serving_open_connections")
        assert {
            key: value for key, value in text.items() if not key[0].startswith(moving)
        }.items() <= openmetrics.items()
        assert all({("model_name", MODEL), ("engine", "0")} <= labels for _, labels in openmetrics)
        answer = await served.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert answer.text.endswith("\n# EOF\n")
        assert "# TYPE vllm:prompt_tokens counter\n" in answer.text


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
    processes = Processes()
    processes.engine_pid = os.getppid()
    values = {(family.name, labels): value for family, labels, value in processes.read()}
    assert {labels[0] for _, labels in values} == {"front-end", "supervisor", "engine"}
    own = ("front-end",)
    assert values["process_resident_memory_bytes", own] > 1e6
    assert values["process_cpu_seconds_total", own] > 0
    assert 0 < values["process_open_fds", own] < values["process_max_fds", own]


async def test_a_process_that_has_ended_has_no_series(model_dir: Path) -> None:
    async with serving(model_dir) as served:

        async def processes() -> set[str]:
            found = await scraped(served, "")
            return {dict(labels)["process"] for name, labels in found if name == "process_cpu_seconds_total"}

        served.tell(EngineStarted(2, pid=os.getppid()))
        with_engine = {"front-end", "supervisor", "engine"}
        await served.until(lambda: served.front_end.client.detail == "starting")
        assert await processes() == with_engine
        served.tell(EngineEnded("it was killed"))
        await served.until(lambda: served.front_end.client.detail == "it was killed")
        assert await processes() == with_engine - {"engine"}
