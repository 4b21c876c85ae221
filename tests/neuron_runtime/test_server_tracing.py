"""Traces: spans that a collector receives over OTLP; an unresponsive collector only loses spans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from helpers.chat_model import write_chat_model
from helpers.front_end import MODEL, Serving, make_model, serving
from helpers.ports import free_ports
from helpers.serve_command import serve
from neuron_runtime.config import TRACES_ENDPOINT, ServerOptions
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.server import tracing
from neuron_runtime.server.edge import Edge
from neuron_runtime.server.exchange import Exchange

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "the treasure lies under the oak"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Receives spans like an OpenTelemetry collector."""

    def __init__(self) -> None:
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                collector.take(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class's name
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for one in request.resource_spans:
            self.resources.append(values(one.resource.attributes))
            self.spans += [span for scope in one.scope_spans for span in scope.spans]

    async def until(self, count: int) -> list[Span]:
        while len(self.spans) < count:
            await asyncio.sleep(0.01)
        return self.spans

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends spans at once and cleans up: no retrying exporter, no changed logging."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    logger = logging.getLogger("opentelemetry")
    before = logger.handlers, logger.propagate
    threads = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        # The thread pool of an event loop stays with the loop.
        if not thread.name.startswith("asyncio_"):
            thread.join(30)
            assert not thread.is_alive(), thread.name
    logger.handlers, logger.propagate = before


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def traced(model_dir: Path, endpoint: str, **more: Any) -> AsyncIterator[Serving]:
    options = ServerOptions(access_log=False, otlp_traces_endpoint=endpoint)
    async with serving(model_dir, options=options, **more) as served:
        yield served


async def test_a_request_is_a_span_with_its_usage_and_times(model_dir: Path, collector: Collector) -> None:
    before = time.time_ns()
    async with traced(model_dir, collector.endpoint) as served:
        body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "n": 2, "temperature": 0.5, "top_p": 0.25}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine", "user-agent": SECRET}
        usage = (await served.http.post("/v1/completions", json=body, headers=headers)).json()["usage"]
        (span,) = await collector.until(1)
    assert (span.name, span.kind) == ("llm_request", Span.SpanKind.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    assert span.status.code == Status.StatusCode.STATUS_CODE_UNSET
    reported = values(span.attributes)
    seconds = {key: reported.pop(key) for key in list(reported) if key.startswith("gen_ai.latency.")}
    assert reported == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "client.address": "127.0.0.1",
    }
    queue, first, end = (seconds[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e"))
    # One choice may wait while the other already has its first token.
    assert 0 <= queue <= end
    assert 0 <= first <= end
    assert seconds["gen_ai.latency.time_in_model_prefill"] == pytest.approx(max(0, first - queue))
    assert seconds["gen_ai.latency.time_in_model_decode"] == pytest.approx(end - first)
    assert seconds["gen_ai.latency.time_in_model_inference"] == pytest.approx(end - queue)
    assert collector.resources[0]["service.name"] == "neuron-serving"
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_other_routes_and_unsampled_requests_create_no_span(model_dir: Path, collector: Collector) -> None:
    async with traced(model_dir, collector.endpoint) as served:
        await served.http.get("/v1/models")
        await served.http.post("/v1/completions", json={"prompt": "x", "temperature": -1})
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        await served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=unsampled)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
        broken = {"traceparent": "00-not-a-trace-01"}
        await served.http.post("/v1/chat/completions", json=chat, headers=broken)
        (span,) = await collector.until(1)
    # Closing flushes, so there are no others.
    assert len(collector.spans) == 1
    assert values(span.attributes)["gen_ai.operation.name"] == "chat"
    assert span.parent_span_id == b""


async def test_failed_and_abandoned_answers_are_marked_in_their_spans(model_dir: Path, collector: Collector) -> None:
    body = {"prompt": "a core", "max_tokens": 200, "ignore_eos": True}
    async with traced(model_dir, collector.endpoint, paced=True) as served:
        failing = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await served.until_metric("vllm:num_requests_running", 1)
        await served.replace_engine("the engine ended")
        assert (await failing).status_code == 503
        await collector.until(1)
        await served.until(lambda: served.front_end.client.ready)
        leaving = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await served.until_metric("vllm:num_requests_running", 1)
        leaving.cancel()
        failed, left = await collector.until(2)
    assert failed.status.code == Status.StatusCode.STATUS_CODE_ERROR
    assert values(failed.attributes)["error.type"] == "not_ready"
    assert values(failed.attributes)["gen_ai.response.finish_reasons"] == ["error"]
    assert values(left.attributes)["gen_ai.response.finish_reasons"] == ["abort"]
    assert values(left.attributes)["http.response.status_code"] == 499


async def test_an_unavailable_endpoint_loses_spans_and_logs_one_line(
    model_dir: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.status = 400
    with free_ports() as nobodys:
        for endpoint in (collector.endpoint, f"http://127.0.0.1:{nobodys}/v1/traces"):
            reported = ""
            async with traced(model_dir, endpoint) as served:
                for _ in range(20):
                    answer = await served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
                    assert answer.status_code == 200
                while "traces cannot be sent" not in reported:
                    await asyncio.sleep(0.01)
                    reported += capsys.readouterr().err
            reported += capsys.readouterr().err
            assert reported.count("traces cannot be sent") == 1


async def test_shutdown_does_not_wait_for_a_slow_endpoint(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 3600.0)
    held = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
    async with traced(model_dir, endpoint) as served:
        await served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    # The server has ended although the collector still holds its span.
    assert "traces-flush" in [thread.name for thread in threading.enumerate()]
    held.set()
    server.close()
    await server.wait_closed()


async def test_close_sends_the_queued_spans(
    model_dir: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges: list[Exchange] = []

    class Keeping(tracing.Traces):
        def ended(self, exchange: Exchange) -> None:
            exchanges.append(exchange)

    with monkeypatch.context() as patched:
        patched.setattr(tracing, "Traces", Keeping)
        async with traced(model_dir, collector.endpoint) as served:
            await served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 60.0)
    traces = tracing.Traces(collector.endpoint)
    for _ in range(3):
        traces.ended(exchanges[-1])
    assert collector.spans == []
    traces.close()
    assert len(collector.spans) == 3


async def test_without_an_endpoint_opentelemetry_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACES_ENDPOINT, raising=False)
    monkeypatch.delitem(sys.modules, "neuron_runtime.server.tracing", raising=False)
    Edge(ServerOptions(access_log=False), None).close()
    assert "neuron_runtime.server.tracing" not in sys.modules


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "grpc://collector", "http://", "http://me:pw@collector/v1/traces"]
)
async def test_an_invalid_endpoint_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACES_ENDPOINT, endpoint)
    with pytest.raises(InvalidConfig, match="must be a URL") as refusal:
        Edge(ServerOptions(access_log=False), None)
    assert refusal.value.field == TRACES_ENDPOINT
    assert "pw" not in str(refusal.value)


async def test_an_environment_that_opentelemetry_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000")
    with pytest.raises(InvalidConfig, match="max_export_batch_size"):
        Edge(ServerOptions(access_log=False, otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"), None)


@pytest.mark.slow
async def test_a_drained_command_sends_its_spans(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They are sent only at the end.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setenv(TRACES_ENDPOINT, collector.endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    model = write_chat_model(tmp_path / "tiny", max_length=256)
    with serve(str(model), "--backend", "simulated", "--port", "0", "--no-access-log") as command:
        url = await asyncio.to_thread(command.until_ready)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(3):
                answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
                assert answer.status_code == 200
        assert collector.spans == []
        assert await asyncio.to_thread(command.end) == 0
    assert len(collector.spans) == 3
    assert collector.resources[0]["service.name"] == "mine"
