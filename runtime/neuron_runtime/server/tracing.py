"""OpenTelemetry traces: one server span for every generation request, sent by OTLP over HTTP.

Created by the outermost layer if an endpoint is configured; OpenTelemetry is imported only then. A complete span is
created when its exchange ends, and the exporter's thread sends it: an endpoint that does not respond loses spans but
never delays requests. Attribute names are those of the GenAI conventions and, beyond them, vLLM's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.server.exchange import Exchange

SERVICE_NAME = "neuron-serving"
SPAN_NAME = "llm_request"
FLUSH_SECONDS = 2.0
"""How long the process waits for the export of spans when it exits."""
EXPORT_SECONDS = 5.0
"""Time limit of one export, including retries."""
COMPLAINT_SECONDS = 60.0
"""Minimum interval between log lines about failed exports."""

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""`gen_ai.operation.name` by path."""


class Traces:
    """Sends exchanges to the collector at this URL. Raises InvalidConfig if OpenTelemetry rejects its environment
    variables."""

    def __init__(self, endpoint: str) -> None:
        _complain_rarely(endpoint)
        try:
            resource = Resource({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:
            raise InvalidConfig("OTEL_*", f"OpenTelemetry rejects its environment variables: {error}") from error
        self._tracer = self._provider.get_tracer("neuron_runtime")
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, exchange: Exchange) -> None:
        if exchange.generation is None:
            return
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(_text(exchange.headers)),
            kind=SpanKind.SERVER,
            attributes=attributes(exchange),
            start_time=round(exchange.began_at * 1e9),
        )
        if exchange.error is not None:
            span.set_status(Status(StatusCode.ERROR, exchange.error.code or ""))
        span.end(round((exchange.began_at + exchange.seconds) * 1e9))

    def close(self) -> None:
        """Send queued spans, waiting at most FLUSH_SECONDS."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-flush", daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)


def attributes(exchange: Exchange) -> dict[str, str | int | float | bool | list[str]]:
    """Span attributes of a generation request; times in seconds. Contains no text of prompt or answer."""
    generation = exchange.generation
    assert generation is not None
    ask, sampling = generation.ask, generation.ask.sampling[0]
    span: dict[str, str | int | float | bool | list[str]] = {
        "gen_ai.operation.name": OPERATIONS.get(exchange.path, "text_completion"),
        "gen_ai.request.id": exchange.request_id,
        "gen_ai.request.model": exchange.model or "",
        "gen_ai.response.model": exchange.model or "",
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": ask.num_choices,
        "gen_ai.usage.prompt_tokens": ask.num_prompt_tokens,
        "gen_ai.usage.input_tokens": ask.num_prompt_tokens,
        "gen_ai.usage.cached_tokens": generation.num_cached_tokens,
        "gen_ai.usage.completion_tokens": generation.num_tokens,
        "gen_ai.usage.output_tokens": generation.num_tokens,
        "gen_ai.usage.num_sequences": len(generation.choices),
        "gen_ai.response.finish_reasons": [reason.value for reason in exchange.finish_reasons],
        "gen_ai.latency.e2e": exchange.seconds,
        "http.request.method": exchange.method,
        "http.response.status_code": exchange.status,
        "url.path": exchange.path,
        "client.address": exchange.client,
    }
    first, queued = exchange.first_token_seconds, exchange.queue_seconds
    if first is not None and queued is not None:
        span |= {
            "gen_ai.latency.time_in_queue": queued,
            "gen_ai.latency.time_to_first_token": first,
            "gen_ai.latency.time_in_model_prefill": max(0.0, first - queued),
            "gen_ai.latency.time_in_model_decode": exchange.seconds - first,
            "gen_ai.latency.time_in_model_inference": max(0.0, exchange.seconds - queued),
        }
    if exchange.error is not None:
        span["error.type"] = exchange.error.code or "invalid_request"
    return span


def _text(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers of the caller's trace (W3C trace context)."""
    names = (b"traceparent", b"tracestate")
    return {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}


class _Complaint(logging.Handler):
    """Prints messages of OpenTelemetry's logger, at most one per COMPLAINT_SECONDS."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._silent_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + COMPLAINT_SECONDS
            say(f"traces cannot be sent to {self._endpoint}: {record.getMessage()}"[:500])


def _complain_rarely(endpoint: str) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_Complaint(endpoint)]
    logger.propagate = False
