"""Every Prometheus series of a serving process, declared once.

Names, units and the label `model_name` are vLLM's where the meaning is the same, so boards and autoscalers work
unchanged; our own begin with `neuron_serving_`. The front end feeds them; nothing here decides or measures.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from neuron_runtime.core import BackendLimits, FinishReason, Kind
from neuron_runtime.engine.messages import Numbers, Step

__all__ = ["CONTENT_TYPE", "Metrics"]

# When a series began is nobody's question here, and it doubles what is scraped.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_GAP = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """The series of one served model, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._running = self._gauge("vllm:num_requests_running", "Requests that have a row.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a row.")
        self._cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.")
        self._preemptions = self._counter("vllm:num_preemptions", "Requests that lost their blocks and began again.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SHORT)
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Time between two tokens of a request.", _GAP)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token of a request after the first.", _GAP
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to the end of the answer.", _LONG)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Time a request waited for its first step.", _LONG
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Time from its first step to its first token.", _LONG
        )
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to last.", _LONG)
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_generation = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens fed in a step.", _STEP_TOKENS)
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._success = {reason: success.labels(model_name, reason.value) for reason in FinishReason}
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "The KV cache's shape; always 1.",
            ["model_name", "block_size", "num_gpu_blocks"],
            registry=self._registry,
        )
        step_seconds = Histogram(
            "neuron_serving_step_seconds",
            "Time the device worked on a step, by kind.",
            ["model_name", "kind"],
            buckets=_SHORT,
            registry=self._registry,
        )
        self._step_seconds = {kind: step_seconds.labels(model_name, kind.value) for kind in Kind}
        self._load = self._gauge("neuron_serving_load_seconds", "Time it took to load the model.")
        self._warm_up = self._gauge("neuron_serving_warm_up_seconds", "Time it took to warm up.")
        self._restarts = self._counter("neuron_serving_engine_restarts", "Engine processes started after the first.")
        self._last = Numbers()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def engine_started(self, incarnation: int) -> None:
        """Counters of an engine begin at zero with its process; ours go on."""
        self._last = Numbers()
        if incarnation > 1:
            self._restarts.inc()

    def engine_ready(self, limits: BackendLimits, load_seconds: float, warm_up_seconds: float) -> None:
        self._cache_config.labels(self._model_name, limits.block_size, limits.num_blocks).set(1)
        self._load.set(load_seconds)
        self._warm_up.set(warm_up_seconds)

    def engine_ended(self) -> None:
        for gauge in (self._running, self._waiting, self._cache_usage):
            gauge.set(0)

    def step(self, step: Step) -> None:
        """Called for every message of the engine, so only what a step always changes."""
        numbers, last = step.numbers, self._last
        self._running.set(numbers.num_running)
        self._waiting.set(numbers.num_waiting)
        self._cache_usage.set(numbers.cache_usage)
        if numbers.num_preemptions_total != last.num_preemptions_total:
            self._preemptions.inc(numbers.num_preemptions_total - last.num_preemptions_total)
        if numbers.step_kind is not None:
            self._iteration.observe(numbers.num_step_tokens)
            self._step_seconds[numbers.step_kind].observe(numbers.device_seconds)
        self._last = numbers

    def first_token(self, seconds: float, queue_seconds: float, num_prompt_tokens: int) -> None:
        """The first token of a request that arrived `seconds` ago and waited part of them; its prompt is computed."""
        self._first_token.observe(seconds)
        self._queue.observe(queue_seconds)
        self._prefill.observe(seconds - queue_seconds)
        self._prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, count: int, gap_seconds: float | None) -> None:
        """`count` more tokens of a request, `gap_seconds` after the ones before."""
        self._generation_tokens.inc(count)
        if gap_seconds is not None:
            self._gap.observe(gap_seconds / count)

    def finished(
        self, reason: FinishReason, num_prompt_tokens: int, num_tokens: int, seconds: float, decode_seconds: float
    ) -> None:
        """A request ended `seconds` after it arrived and `decode_seconds` after its first token."""
        self._success[reason].inc()
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(num_tokens)
        self._e2e.observe(seconds)
        self._decode.observe(decode_seconds)
        if num_tokens > 1:
            self._per_token.observe(decode_seconds / (num_tokens - 1))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self._registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model_name)
