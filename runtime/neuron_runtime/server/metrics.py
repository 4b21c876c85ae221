"""Every Prometheus series of a serving process: what it is called, what it counts, and who counts it.

Names, units and labels are vLLM's where the meaning is the same, so boards and autoscalers work unchanged; our own
begin with `neuron_serving_`. Each front end has one `Metrics` and feeds it; `render` adds up what all front ends of a
server counted. Nothing here decides or measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from neuron_runtime.core import BackendLimits, FinishReason, Kind
from neuron_runtime.engine.messages import Step
from neuron_runtime.engine.stats import EngineStats, StepStats
from neuron_runtime.server.series import Book, Exported, Family

__all__ = ["CONTENT_TYPE", "FAMILIES", "Metrics"]

# Every bound that vLLM has, so that rules which name one work; finer below, where a step takes few milliseconds.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_GAP = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_STEP = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HOST = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.005, 0.01, 0.05, 0.1)

FAMILIES: list[Family] = []
"""In the order in which they are scraped."""


def _family(family: Family) -> Family:
    FAMILIES.append(family)
    return family


def _engine_gauge(name: str, text: str, read: Callable[[EngineStats], float], use: str = "") -> Family:
    """A value that `EngineStats` holds."""
    return _family(Family(name, "gauge", text, counted_by="engine", read=read, use=use))


def _engine_counter(name: str, text: str, read: Callable[[EngineStats], float], use: str = "") -> Family:
    """A total that `EngineStats` holds; it starts at 0 with each engine process."""
    return _family(Family(name, "counter", text, counted_by="engine", read=read, use=use))


def _step_counter(name: str, text: str, read: Callable[[StepStats], float], *labels: str, use: str = "") -> Family:
    """Each step adds a number of its `StepStats`; its kind and bucket are the labels."""
    return _family(Family(name, "counter", text, labels, counted_by="step", read=read, use=use))


def _step_histogram(
    name: str, text: str, bounds: tuple[float, ...], read: Callable[[StepStats], float], *labels: str, use: str = ""
) -> Family:
    """One observation for each step."""
    return _family(Family(name, "histogram", text, labels, bounds, "step", read, use))


def _start_gauge(name: str, text: str, *labels: str, use: str = "") -> Family:
    """A value that is known when an engine starts."""
    return _family(Family(name, "gauge", text, labels, counted_by="engine", use=use))


def _counter(name: str, text: str, *labels: str, use: str = "") -> Family:
    return _family(Family(name, "counter", text, labels, use=use))


def _histogram(name: str, text: str, bounds: tuple[float, ...], use: str = "") -> Family:
    return _family(Family(name, "histogram", text, bounds=bounds, use=use))


_engine_gauge(
    "vllm:num_requests_running", "Requests that have a row of the batch.", lambda stats: stats.num_running, use="load"
)
_engine_gauge(
    "vllm:num_requests_waiting", "Requests that wait for a row.", lambda stats: stats.num_waiting, use="scale on this"
)
_engine_gauge(
    "vllm:kv_cache_usage_perc",
    "Share of the KV blocks in use, 0 to 1.",
    lambda stats: stats.num_blocks_used / max(stats.num_blocks, 1),
    use="near 1 with preemptions: the cache is too small",
)
CACHE_CONFIG = _start_gauge(
    "vllm:cache_config_info",
    "Always 1; the labels are tokens per block and the number of blocks.",
    "block_size",
    "num_gpu_blocks",
    use="capacity in tokens",
)
LORA_REQUESTS = _start_gauge(
    "vllm:lora_requests_info",
    "Adapters in use, at the Unix time that is the value. Adapters are not built: 0 and empty lists.",
    *("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    use="read by inference gateways",
)
_engine_counter(
    "vllm:num_preemptions_total",
    "Times that a request lost its blocks and had to be computed again.",
    lambda stats: stats.num_preemptions_total,
    use="work done twice",
)
_engine_counter(
    "vllm:prefix_cache_queries_total",
    "Prompt tokens looked up in the prefix cache, once for each request.",
    lambda stats: stats.num_prefix_queries_total,
)
_engine_counter(
    "vllm:prefix_cache_hits_total",
    "Prompt tokens found in the prefix cache, and not computed again.",
    lambda stats: stats.num_prefix_hits_total,
    use="its share of the queries is what the cache saves",
)
PROMPT_TOKENS = _counter(
    "vllm:prompt_tokens_total",
    "Prompt tokens of requests that got their first token; those found in the prefix cache count too.",
    use="tokens in",
)
GENERATION_TOKENS = _counter("vllm:generation_tokens_total", "Tokens generated.", use="tokens out")
SUCCESS = _counter(
    "vllm:request_success_total",
    "Requests that ended: stop, length, abort (the client left), error (the engine ended).",
    "finished_reason",
    use="traffic, errors",
)
FIRST_TOKEN = _histogram(
    "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN, use="what a person waits for"
)
GAP = _histogram(
    "vllm:inter_token_latency_seconds",
    "Time between two tokens of a request; tokens that came together share it.",
    _GAP,
    use="fluency",
)
PER_TOKEN = _histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time per token of a request after the first.",
    _GAP,
    use="fluency, each request once",
)
E2E = _histogram("vllm:e2e_request_latency_seconds", "Arrival to the end of the answer.", _LATENCY)
QUEUE = _histogram(
    "vllm:request_queue_time_seconds",
    "Time a request waited in the engine for its first step.",
    _LATENCY,
    use="queueing apart from computing",
)
PREFILL = _histogram(
    "vllm:request_prefill_time_seconds", "Time from the first step of a request to its first token.", _LATENCY
)
DECODE = _histogram("vllm:request_decode_time_seconds", "First token to last.", _LATENCY)
REQUEST_PROMPT = _histogram(
    "vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS, use="shape of the traffic"
)
REQUEST_GENERATION = _histogram(
    "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS, use="shape of the traffic"
)
REQUEST_LONGEST = _histogram(
    "vllm:request_max_num_generation_tokens", "Tokens of the longest of the answers to a prompt.", _TOKENS
)
PARAMS_N = _histogram("vllm:request_params_n", "Answers wanted for a prompt.", _CHOICES, use="shape of the traffic")
PARAMS_MAX_TOKENS = _histogram(
    "vllm:request_params_max_tokens",
    "Most tokens that a request may generate, by its parameter or by default.",
    _TOKENS,
)
_step_histogram(
    "vllm:iteration_tokens_total",
    "Tokens fed in a step.",
    _STEP_TOKENS,
    lambda step: step.num_tokens,
    use="how full steps are",
)
_step_histogram(
    "neuron_serving_step_seconds",
    "Time the device worked on a step.",
    _STEP,
    lambda step: step.device_seconds,
    "kind",
    use="a decode step is the floor of the gap",
)
_step_histogram(
    "neuron_serving_step_host_seconds",
    "Time of the engine's thread around a step, without the calls of the backend.",
    _HOST,
    lambda step: step.host_seconds,
    use="must stay well below a step",
)
_step_counter(
    "neuron_serving_device_busy_seconds_total",
    "Time the device worked on steps.",
    lambda step: step.device_seconds,
    use="utilization",
)
_engine_counter(
    "neuron_serving_work_seconds_total",
    "Time in which the engine had requests.",
    lambda stats: stats.work_seconds_total,
    use="with the one before: the share of the time in which the device idles",
)
_engine_gauge(
    "neuron_serving_stream_gap_bound_seconds",
    "A running stream gets its next token within this time, judged by the longest step of each kind so far.",
    lambda stats: stats.stream_gap_bound_seconds,
    use="what a flood of prompts can do to streams",
)
_step_counter(
    "neuron_serving_fed_tokens_total",
    "Tokens fed to steps, by the compiled shape they ran in (none where shapes are free).",
    lambda step: step.num_tokens,
    *("kind", "bucket"),
    use="with the next one: padding waste",
)
_step_counter(
    "neuron_serving_computed_tokens_total",
    "Tokens that the device computed in steps, padding included.",
    lambda step: step.num_computed_tokens,
    *("kind", "bucket"),
    use="choose buckets",
)
LOAD_SECONDS = _start_gauge("neuron_serving_load_seconds", "Time it took to load the model.", use="starts")
WARM_UP_SECONDS = _start_gauge(
    "neuron_serving_warm_up_seconds",
    "Time it took to compile what was not compiled, and to run every shape once.",
    use="starts",
)
RESTARTS = _family(
    Family(
        "neuron_serving_engine_restarts_total",
        "counter",
        "Engine processes started after the first.",
        counted_by="engine",
        use="should stay 0",
    )
)
_engine_gauge(
    "neuron_serving_waiting_tokens",
    "Prompt tokens of requests that no step has taken up.",
    lambda stats: stats.num_waiting_tokens,
    use="compare with maxQueuedTokens",
)
REFUSED = _counter(
    "neuron_serving_requests_refused_total",
    "Requests answered with an error before they ran; the reason is the code of the error object, or invalid_request.",
    "reason",
    use="overloaded: add replicas",
)
OPEN_CONNECTIONS = _family(
    Family("neuron_serving_open_connections", "gauge", "HTTP connections, the one of the scrape included.")
)
LOG_LINES_LOST = _counter(
    "neuron_serving_access_log_lines_lost_total",
    "Lines of the access log that were dropped because nothing read them in time.",
    use="should stay 0",
)
MEMBERS = _start_gauge(
    "neuron_serving_group_members_present", "Ranks of this replica that take part; 0 while its engine is not ready."
)

REASONS = (
    *("invalid_request", "context_length_exceeded", "model_not_found", "body_too_large", "invalid_api_key"),
    *("overloaded", "draining", "not_ready"),
)
"""Why requests are refused, as far as that is known before the first one: a rate needs a series that began at 0."""
NO_BUCKET = "none"
"""Label of steps whose shapes are free."""


class Metrics:
    """What one front end counted of one served model."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self._book = book = Book(FAMILIES)
        self._heard = 0
        self._last: EngineStats | None = None
        self._at_scrape: list[tuple[Family, Callable[[], float]]] = []
        self._seen: dict[str, float] = {}

        read = [(family, family.read) for family in FAMILIES if family.read is not None]
        told = [(family, take) for family, take in read if family.counted_by == "engine"]
        self._gauges = [(book.number(family), take) for family, take in told if family.kind == "gauge"]
        self._totals = [(book.number(family), take) for family, take in told if family.kind == "counter"]
        self._per_step = [(family, take) for family, take in read if family.counted_by == "step"]
        self._of_shape: dict[tuple[Kind, str], list[tuple[Callable[[float], None], Callable[[Any], float]]]] = {}
        """How a step of this kind and bucket counts."""
        for family, _ in self._per_step:
            if "bucket" not in family.labels:
                for kind in Kind:
                    self._counter_of_step(family, kind, "")
        self._prompt_tokens = book.number(PROMPT_TOKENS)
        self._generation_tokens = book.number(GENERATION_TOKENS)
        self._success = {reason: book.number(SUCCESS, reason.value) for reason in FinishReason}
        for reason in REASONS:
            book.number(REFUSED, reason)
        for family in (OPEN_CONNECTIONS, LOG_LINES_LOST):
            book.number(family)
        self._first_token, self._gap = book.distribution(FIRST_TOKEN), book.distribution(GAP)
        self._per_token, self._e2e = book.distribution(PER_TOKEN), book.distribution(E2E)
        self._queue, self._prefill = book.distribution(QUEUE), book.distribution(PREFILL)
        self._decode = book.distribution(DECODE)
        self._request_prompt = book.distribution(REQUEST_PROMPT)
        self._request_generation = book.distribution(REQUEST_GENERATION)
        self._request_longest = book.distribution(REQUEST_LONGEST)
        self._params_n, self._params_max_tokens = book.distribution(PARAMS_N), book.distribution(PARAMS_MAX_TOKENS)
        self._load, self._warm_up = book.number(LOAD_SECONDS), book.number(WARM_UP_SECONDS)
        self._restarts, self._members = book.number(RESTARTS), book.number(MEMBERS)

    # What is told to Prometheus

    def export(self) -> Exported:
        """What this front end counted, for another one to render."""
        for family, read in self._at_scrape:
            seen, now = self._seen.get(family.name, 0.0), read()
            if family.kind == "counter":
                # On top of what a predecessor counted.
                self._book.number(family).value += now - seen
            else:
                self._book.number(family).value = now
            self._seen[family.name] = now
        return self._book.export(self._heard)

    def restore(self, exported: Exported) -> None:
        """Go on counting from what a predecessor exported."""
        self._heard = exported.heard
        self._book.restore(exported)
        # What an engine had then, none has now.
        self.engine_ended()

    def render(self, others: Iterable[Exported] = ()) -> bytes:
        """The text that Prometheus scrapes: this front end's numbers and those of the others, added up."""
        return self._book.text((self.export(), *others), self._labels)

    def read_at_scrape(self, family: Family, read: Callable[[], float]) -> None:
        """A number that somebody else keeps, from 0 on."""
        self._at_scrape.append((family, read))

    # What the engine tells

    def engine_started(self, incarnation: int, joined: bool = False) -> None:
        """Counts of an engine begin at zero with its process, ours go on. One that was joined has counted before."""
        self._last = None if joined else EngineStats()
        self._restarts.value = incarnation - 1

    def engine_ready(self, limits: BackendLimits, load_seconds: float, warm_up_seconds: float) -> None:
        self._heard += 1
        for family in (CACHE_CONFIG, LORA_REQUESTS):
            self._book.forget(family)
        self._book.number(CACHE_CONFIG, str(limits.block_size), str(limits.num_blocks)).value = 1
        # Adapters are not built: none can be loaded, none waits, none runs.
        self._book.number(LORA_REQUESTS, "0", "", "").value = time.time()
        self._load.value, self._warm_up.value = load_seconds, warm_up_seconds
        self._members.value = 1

    def engine_ended(self) -> None:
        for gauge, _ in self._gauges:
            gauge.value = 0
        self._members.value = 0

    def step(self, step: Step) -> None:
        """Called for every message of the engine."""
        stats = step.stats
        last = self._last or stats
        self._heard += 1
        for gauge, read in self._gauges:
            gauge.value = read(stats)
        for total, read in self._totals:
            total.value += read(stats) - read(last)
        if (applied := stats.last_step) is not None:
            shape = (applied.kind, applied.bucket)
            counters = self._of_shape.get(shape)
            if counters is None:
                counters = [(self._counter_of_step(family, *shape), take) for family, take in self._per_step]
                self._of_shape[shape] = counters
            for count, take in counters:
                count(take(applied))
        self._last = stats

    def _counter_of_step(self, family: Family, kind: Kind, bucket: str) -> Callable[[float], None]:
        known = {"kind": kind.value, "bucket": bucket or NO_BUCKET}
        labels = [known[label] for label in family.labels]
        if family.kind == "histogram":
            return self._book.distribution(family, *labels).observe
        return self._book.number(family, *labels).add

    # What becomes of requests

    def first_token(self, seconds: float, queue_seconds: float, num_prompt_tokens: int) -> None:
        """The first token of a request that arrived `seconds` ago and waited part of them; its prompt is computed."""
        self._first_token.observe(seconds)
        self._queue.observe(queue_seconds)
        self._prefill.observe(seconds - queue_seconds)
        self._prompt_tokens.value += num_prompt_tokens

    def tokens(self, count: int, gap_seconds: float | None) -> None:
        """`count` more tokens of a request, `gap_seconds` after the ones before; None for its first ones."""
        self._generation_tokens.value += count
        if gap_seconds is not None:
            self._gap.observe(gap_seconds / count, count)

    def finished(
        self, reason: FinishReason, num_prompt_tokens: int, num_tokens: int, seconds: float, decode_seconds: float
    ) -> None:
        """A request ended `seconds` after it arrived; its last token came `decode_seconds` after its first."""
        self._success[reason].value += 1
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(num_tokens)
        self._e2e.observe(seconds)
        self._decode.observe(decode_seconds)
        if num_tokens > 1:
            self._per_token.observe(decode_seconds / (num_tokens - 1))

    def answered(self, max_tokens: int, num_tokens: Sequence[int]) -> None:
        """All choices of one prompt are over, each with so many tokens of at most `max_tokens`."""
        self._params_n.observe(len(num_tokens))
        self._params_max_tokens.observe(max_tokens, len(num_tokens))
        self._request_longest.observe(max(num_tokens))

    def refused(self, reason: str) -> None:
        """An HTTP request was answered with an error and never ran."""
        self._book.number(REFUSED, reason).value += 1
