"""All Prometheus metrics of a serving process: names, help texts and sources.

Names, units and labels are vLLM's where the meaning is the same, so dashboards and autoscalers work unchanged; our own
start with `neuron_serving_`. The front end updates one `Metrics`, and the route `/metrics` writes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import sub
from typing import Any, Literal

from prometheus_client import generate_latest
from prometheus_client.process_collector import ProcessCollector

from neuron_runtime.apis.generation import Choice
from neuron_runtime.core import FinishReason, GraphUse, StepKind
from neuron_runtime.engine.messages import Ready, Step
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.server.series import Book, Family, Reading, Source

# The bounds of vLLM, so that queries over both add equal buckets. Gaps have more at the low end, because steps take a
# few milliseconds; token counts do not end at the model's length, which is known only when the engine is ready.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_GAP = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_TOKENS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_STEP = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LOAD_OF_PICTURE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
_HOST = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.005, 0.01, 0.05, 0.1)

FAMILIES: list[Family] = []
"""In the order of the exposition."""


def _family(
    kind: Literal["counter", "gauge", "histogram"],
    source: Source,
    name: str,
    text: str,
    read: Callable[[Any], float] | None = None,
    *,
    bounds: tuple[float, ...] = (),
    labels: tuple[str, ...] = (),
    use: str = "",
) -> Family:
    FAMILIES.append(Family(name, kind, text, labels, bounds, source, read, use))
    return FAMILIES[-1]


_gauge, _counter, _histogram = (partial(_family, kind, "front_end") for kind in ("gauge", "counter", "histogram"))
_engine_gauge, _engine_counter = (partial(_family, kind, "engine") for kind in ("gauge", "counter"))
"""Values and totals of `EngineStats`, and values set when an engine starts."""
_step_counter, _step_histogram = (partial(_family, kind, "step") for kind in ("counter", "histogram"))
"""Each step adds a value of its `StepStats`; the label is its kind."""
_graph_counter = partial(_family, "counter", "step", labels=("kind", "bucket"))
"""Each call of a graph adds a value of its `GraphUse`; labels are the kind of the step and the graph's name."""
_process_gauge, _process_counter = (
    partial(_family, kind, "front_end", labels=("process",)) for kind in ("gauge", "counter")
)

_engine_gauge(
    "vllm:num_requests_running", "Number of requests in the running batch.", lambda stats: stats.num_running, use="load"
)
_engine_gauge(
    "vllm:num_requests_waiting", "Number of waiting requests.", lambda stats: stats.num_waiting, use="scale on this"
)
_engine_gauge(
    "vllm:kv_cache_usage_perc",
    "Fraction of KV cache blocks in use, 0 to 1.",
    lambda stats: stats.num_blocks_used / max(stats.num_blocks, 1),
    use="near 1 and with preemptions: the cache is too small",
)
CACHE_CONFIG = _engine_gauge(
    "vllm:cache_config_info",
    "Always 1. The labels are the block size in tokens and the number of blocks.",
    labels=("block_size", "num_gpu_blocks"),
    use="capacity in tokens",
)
LORA_REQUESTS = _engine_gauge(
    "vllm:lora_requests_info",
    "LoRA adapters in use at the Unix time in the value: how many may be, and the names of waiting and running ones.",
    labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    use="read by inference gateways",
)
_engine_counter(
    "vllm:num_preemptions_total",
    "Number of preemptions, after which a request is recomputed.",
    lambda stats: stats.num_preemptions_total,
    use="wasted work",
)
_engine_counter(
    "vllm:prefix_cache_queries_total",
    "Prompt tokens looked up in the prefix cache, once per request.",
    lambda stats: stats.num_prefix_queries_total,
)
_engine_counter(
    "vllm:prefix_cache_hits_total",
    "Prompt tokens found in the prefix cache.",
    lambda stats: stats.num_prefix_hits_total,
    use="divided by the queries: hit rate",
)
_engine_counter(
    "vllm:spec_decode_num_drafts_total",
    "Rows of steps that had draft tokens (speculative decoding).",
    lambda stats: stats.num_drafted_rows_total,
)
_engine_counter(
    "vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified.", lambda stats: stats.num_drafts_total
)
_engine_counter(
    "vllm:spec_decode_num_accepted_tokens_total",
    "Draft tokens that were accepted.",
    lambda stats: stats.num_accepted_drafts_total,
    use="divided by draft tokens: acceptance rate; divided by drafts, plus 1: mean accepted length",
)
ACCEPTED_BY_PLACE = _engine_counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Accepted draft tokens by their position in the draft, from 0.",
    labels=("position",),
    use="choose the number of draft tokens",
)
PROMPT_TOKENS = _counter(
    "vllm:prompt_tokens_total",
    "Prompt tokens of requests that got their first token, including those found in the prefix cache.",
    use="tokens in",
)
PROMPT_TOKENS_CACHED = _counter(
    "vllm:prompt_tokens_cached_total",
    "Prompt tokens of requests that got their first token, only those found in the prefix cache.",
    use="tokens in that were not computed",
)
PROMPT_TOKENS_BY_SOURCE = _counter(
    "vllm:prompt_tokens_by_source_total",
    "Prompt tokens of requests that got their first token, by source: local_compute, local_cache_hit.",
    labels=("source",),
)
PICTURES = _counter(
    "neuron_serving_pictures_total",
    "Pictures of requests that got their first token, by source: local_compute, or local_cache_hit (all of it is in "
    "the prefix cache).",
    labels=("source",),
    use="local_cache_hit: computations of the encoder avoided",
)
PICTURE_SECONDS = _histogram(
    "neuron_serving_picture_seconds",
    "Time to fetch, decode and resize a picture, with the time it waited for other ones.",
    bounds=_LOAD_OF_PICTURE,
    use="part of the time to the first token",
)
GENERATION_TOKENS = _counter("vllm:generation_tokens_total", "Generated tokens.", use="tokens out")
SUCCESS = _counter(
    "vllm:request_success_total",
    "Finished requests by reason: stop, length, abort (the client disconnected), error (the engine failed).",
    labels=("finished_reason",),
    use="traffic, errors",
)
FIRST_TOKEN = _histogram(
    "vllm:time_to_first_token_seconds",
    "Time from the arrival of a request to its first token.",
    bounds=_FIRST_TOKEN,
    use="responsiveness",
)
GAP = _histogram(
    "vllm:inter_token_latency_seconds",
    "Time between consecutive tokens of a request; tokens of one step share it equally.",
    bounds=_GAP,
    use="streaming speed",
)
PER_TOKEN = _histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time per output token of a request, without the first.",
    bounds=_GAP,
    use="streaming speed per request",
)
E2E = _histogram("vllm:e2e_request_latency_seconds", "Time from the arrival of a request to its end.", bounds=_LATENCY)
QUEUE = _histogram(
    "vllm:request_queue_time_seconds",
    "Time that a request waited in the engine for its first step.",
    bounds=_LATENCY,
    use="queueing time",
)
PREFILL = _histogram(
    "vllm:request_prefill_time_seconds", "Time from the first step of a request to its first token.", bounds=_LATENCY
)
DECODE = _histogram(
    "vllm:request_decode_time_seconds", "Time from the first token of a request to its last.", bounds=_LATENCY
)
INFERENCE = _histogram(
    "vllm:request_inference_time_seconds",
    "Time from the first step of a request to its last token: prefill plus decode.",
    bounds=_LATENCY,
)
REQUEST_PROMPT = _histogram(
    "vllm:request_prompt_tokens", "Prompt tokens per request.", bounds=_TOKENS, use="shape of the traffic"
)
REQUEST_COMPUTED = _histogram(
    "vllm:request_prefill_kv_computed_tokens",
    "Prompt tokens per request that were not found in the prefix cache.",
    bounds=_TOKENS,
)
REQUEST_GENERATION = _histogram(
    "vllm:request_generation_tokens", "Generated tokens per request.", bounds=_TOKENS, use="shape of the traffic"
)
REQUEST_LONGEST = _histogram(
    "vllm:request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.", bounds=_TOKENS
)
PARAMS_N = _histogram(
    "vllm:request_params_n", "Number of answers requested per prompt.", bounds=_CHOICES, use="shape of the traffic"
)
PARAMS_MAX_TOKENS = _histogram(
    "vllm:request_params_max_tokens",
    "Maximum number of tokens that a request may generate, from its parameter or by default.",
    bounds=_TOKENS,
)
_step_histogram(
    "vllm:iteration_tokens_total",
    "Tokens processed per step.",
    lambda step: step.num_tokens,
    bounds=_STEP_TOKENS,
    use="utilization of steps",
)
_step_histogram(
    "neuron_serving_step_seconds",
    "Device time per step.",
    lambda step: step.device_seconds,
    bounds=_STEP,
    labels=("kind",),
    use="a decode step bounds the time between tokens from below",
)
_step_histogram(
    "neuron_serving_step_host_seconds",
    "Time of the engine thread per step, without calls of the backend.",
    lambda step: step.host_seconds,
    bounds=_HOST,
    use="must stay well below the time of a step",
)
_step_counter(
    "neuron_serving_device_busy_seconds_total",
    "Total device time of steps.",
    lambda step: step.device_seconds,
    use="utilization",
)
_engine_counter(
    "neuron_serving_work_seconds_total",
    "Total time in which the engine had requests.",
    lambda stats: stats.work_seconds_total,
    use="with the previous one: idle time of the device under load",
)
GROUP_WAIT = _engine_counter(
    "neuron_serving_group_wait_seconds_total",
    "Total time in which a step was done on rank 0 and not yet on another rank, by that rank.",
    labels=("rank",),
    use="the slow node of a group, or its network",
)
_engine_gauge(
    "neuron_serving_stream_gap_bound_seconds",
    "Upper bound of the time between tokens of a running stream, from the longest step of each kind so far.",
    lambda stats: stats.stream_gap_bound_seconds,
    use="effect of many prompts on streams",
)
_graph_counter(
    "neuron_serving_fed_tokens_total",
    "Tokens processed in steps, by compiled shape (none: shapes are dynamic).",
    lambda graph: graph.num_tokens,
    use="with the next one: padding",
)
_graph_counter(
    "neuron_serving_computed_tokens_total",
    "Tokens computed by the device in steps, including padding.",
    lambda graph: graph.num_computed_tokens,
    use="choose buckets",
)
LOAD_SECONDS = _engine_gauge("neuron_serving_load_seconds", "Time to load the model.", use="startup time")
WARM_UP_SECONDS = _engine_gauge(
    "neuron_serving_warm_up_seconds", "Time to compile missing shapes and run every shape once.", use="startup time"
)
IDLE_SECONDS = _gauge(
    "neuron_serving_idle_seconds",
    "Seconds since a request last ran, waited or ended; before the first one, since the start.",
    use="read by the operator for `spec.idle`; which model nobody asks",
)
RESTARTS = _engine_counter(
    "neuron_serving_engine_restarts_total", "Number of restarts of the engine process.", use="should stay 0"
)
_engine_gauge(
    "neuron_serving_waiting_tokens",
    "Prompt tokens of waiting requests.",
    lambda stats: stats.num_waiting_tokens,
    use="compare with maxQueuedTokens",
)
REFUSED = _counter(
    "neuron_serving_requests_refused_total",
    "Requests that got an error before they ran, by the code of the error object, or invalid_request.",
    labels=("reason",),
    use="overloaded: add replicas",
)
RESPONSES = _counter(
    "neuron_serving_http_responses_total",
    "HTTP responses by route and status code, without probes and scrapes. 499: the client disconnected first.",
    labels=("route", "code"),
    use="error rate",
)
OPEN_CONNECTIONS = _gauge("neuron_serving_open_connections", "Open HTTP connections, including the one of the scrape.")
LOG_LINES_LOST = _counter(
    "neuron_serving_access_log_lines_lost_total",
    "Lines of the access log that were dropped because the reader was too slow.",
    use="should stay 0",
)
MEMBERS = _engine_gauge(
    "neuron_serving_group_members_present", "Number of active ranks of this replica; 0 while its engine is not ready."
)
PROCESS = (
    _process_counter("process_cpu_seconds_total", "CPU time.", use="front-end near 1: it is the limit, add replicas"),
    _process_gauge("process_resident_memory_bytes", "Resident memory.", use="memory limits, leaks"),
    _process_gauge("process_virtual_memory_bytes", "Virtual memory."),
    _process_gauge("process_open_fds", "Open file descriptors."),
    _process_gauge("process_max_fds", "Maximum number of open file descriptors.", use="bounds connections"),
    _process_gauge("process_start_time_seconds", "Start, in Unix time.", use="restarts"),
)
"""As in the library, by process: supervisor, engine, front-end."""
_PROCESS_BY_NAME = {family.name: family for family in PROCESS}

CORE_MEMORY = (
    _engine_gauge(
        "neuron_serving_neuron_logical_core_memory_used_bytes",
        "Device memory that this server uses of a logical core, by the Neuron runtime itself: weights, graphs and "
        "cache. All its cores hold equal parts.",
        use="compare with the plan",
    ),
    _engine_gauge(
        "neuron_serving_neuron_logical_core_memory_free_bytes",
        "Device memory that is left of a logical core, by the Neuron runtime itself.",
        use="room for more sequences or longer ones",
    ),
)
"""In the order of `DeviceMemory`. There are no series until a step has reported it."""

TOKEN_SOURCES = ("local_compute", "local_cache_hit")
ENGINE = "0"
"""The label of vLLM's engines; a process has one."""
GENERATION_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
RESPONSE_CODES = (200, 400, 404, 429, 499, 500, 503)
"""Common codes of these routes: their series start at 0."""
REASONS = (
    *("invalid_request", "context_length_exceeded", "model_not_found", "body_too_large", "invalid_api_key"),
    *("overloaded", "draining", "not_ready"),
    *("image_too_large", "invalid_image", "invalid_image_url", "failed_to_download_image"),
)
"""Known reasons of refusals: their series start at 0 too."""
NO_BUCKET = "none"
"""Label of steps with dynamic shapes."""

Update = tuple[Callable[[float], None], Callable[[Any], float]]
"""Adds to a series, and reads what to add from a step or graph."""


def process_readings(pids: Mapping[str, int | None]) -> Iterator[Reading]:
    """CPU time, memory and files of processes; nothing of one that has exited, and nothing without `/proc`."""
    for name, pid in pids.items():
        metrics = () if pid is None else ProcessCollector(pid=partial(int, pid), registry=None).collect()
        for sample in (sample for metric in metrics for sample in metric.samples):
            yield _PROCESS_BY_NAME[sample.name], (name,), sample.value


class Metrics:
    def __init__(self, model_name: str) -> None:
        self._book = book = Book(FAMILIES, {"model_name": model_name, "engine": ENGINE})
        self._last: EngineStats | None = None
        self._at_scrape: list[Callable[[], Iterable[Reading]]] = []
        self._active_at = time.monotonic()

        read = [(family, family.read) for family in FAMILIES if family.read is not None]
        from_engine = [(family, take) for family, take in read if family.source == "engine"]
        self._gauges = [(book.number(family), take) for family, take in from_engine if family.kind == "gauge"]
        self._totals = [(book.number(family), take) for family, take in from_engine if family.kind == "counter"]
        of_steps = [(family, take) for family, take in read if family.source == "step"]
        self._per_graph = [(family, take) for family, take in of_steps if "bucket" in family.labels]
        self._of_graph: dict[tuple[StepKind, str], list[Update]] = {}
        self._of_kind: dict[StepKind, list[Update]] = {
            kind: [(self._counter(family, kind), take) for family, take in of_steps if "bucket" not in family.labels]
            for kind in StepKind
        }
        # Those of each streamed token.
        self._generation_tokens, self._gap = book.number(GENERATION_TOKENS), book.distribution(GAP)
        # Series start at 0, which rates need.
        for family in FAMILIES:
            if family.kind == "histogram" and not family.labels:
                book.distribution(family)
            elif not family.labels and family not in CORE_MEMORY:
                book.number(family)
        for source in TOKEN_SOURCES:
            book.number(PROMPT_TOKENS_BY_SOURCE, source)
            book.number(PICTURES, source)
        for finished in FinishReason:
            book.number(SUCCESS, finished.value)
        for reason in REASONS:
            book.number(REFUSED, reason)
        for route in GENERATION_ROUTES:
            for code in RESPONSE_CODES:
                book.number(RESPONSES, route, str(code))

    # Exposition

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        for family in (*PROCESS, LORA_REQUESTS):
            # Processes that have ended, adapters that were in use.
            self._book.forget(family)
        for read in self._at_scrape:
            for family, labels, now in read():
                self._book.number(family, *labels).value = now
        now_at = time.monotonic()
        if self._last is not None and (self._last.num_running or self._last.num_waiting):
            self._active_at = now_at
        self._book.number(IDLE_SECONDS).value = now_at - self._active_at
        return generate_latest(self._book)

    def read_at_scrape(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._at_scrape.append(read)

    @property
    def adapters_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Digests of the adapters that requests wait for and that they run with."""
        last = self._last or EngineStats()
        return last.waiting_adapters, last.running_adapters

    # Events of the engine

    def engine_started(self, incarnation: int, joined: bool = False) -> None:
        """An engine's totals start at 0 with its process, ours continue. A joined engine has counted before."""
        self._last = None if joined else EngineStats()
        self._book.number(RESTARTS).value = incarnation - 1

    def engine_ready(self, ready: Ready) -> None:
        self._book.forget(CACHE_CONFIG)
        self._book.number(CACHE_CONFIG, str(ready.limits.block_size), str(ready.limits.num_blocks)).value = 1
        self._book.number(LOAD_SECONDS).value = ready.load_seconds
        self._book.number(WARM_UP_SECONDS).value = ready.warm_up_seconds
        self._book.number(MEMBERS).value = ready.num_ranks
        for rank in range(1, ready.num_ranks):
            self._book.number(GROUP_WAIT, str(rank))
        for place in range(ready.limits.max_drafts):
            self._book.number(ACCEPTED_BY_PLACE, str(place))

    def engine_ended(self) -> None:
        for gauge, _ in self._gauges:
            gauge.value = 0
        for family in CORE_MEMORY:
            self._book.forget(family)
        self._book.number(MEMBERS).value = 0

    def step(self, step: Step) -> None:
        stats = step.stats
        last = self._last or stats
        for gauge, read in self._gauges:
            gauge.value = read(stats)
        for total, read in self._totals:
            total.value += read(stats) - read(last)
        if waited := stats.group_wait_seconds_total:
            before = last.group_wait_seconds_total or (0.0,) * len(waited)
            for rank, seconds in enumerate(map(sub, waited, before), 1):
                self._book.number(GROUP_WAIT, str(rank)).value += seconds
        accepted = zip_longest(stats.accepted_by_place_total, last.accepted_by_place_total, fillvalue=0)
        for place, (now, earlier) in enumerate(accepted):
            self._book.number(ACCEPTED_BY_PLACE, str(place)).value += now - earlier
        if stats.device_memory is not None:
            for family, size in zip(CORE_MEMORY, stats.device_memory, strict=True):
                self._book.number(family).value = size
        if (applied := stats.last_step) is not None:
            for count, take in self._of_kind[applied.kind]:
                count(take(applied))
            for graph in applied.graphs or (GraphUse(NO_BUCKET, applied.num_tokens, applied.num_tokens),):
                key = (applied.kind, graph.name)
                counters = self._of_graph.get(key)
                if counters is None:
                    counters = [(self._counter(family, *key), take) for family, take in self._per_graph]
                    self._of_graph[key] = counters
                for count, take in counters:
                    count(take(graph))
        self._last = stats

    def _counter(self, family: Family, kind: StepKind, bucket: str = "") -> Callable[[float], None]:
        known = {"kind": kind.value, "bucket": bucket}
        labels = [known[label] for label in family.labels]
        if family.kind == "histogram":
            return self._book.distribution(family, *labels).observe
        return self._book.number(family, *labels).add

    # Events of requests

    def first_token(self, choice: Choice, seconds: float, queue_seconds: float) -> None:
        """A request got its first token `seconds` after arrival, of which it waited `queue_seconds`."""
        self._observe(FIRST_TOKEN, seconds)
        self._observe(QUEUE, queue_seconds)
        self._observe(PREFILL, seconds - queue_seconds)
        num_tokens, num_cached = len(choice.prompt_token_ids), choice.num_cached_tokens
        self._book.number(PROMPT_TOKENS).value += num_tokens
        self._book.number(PROMPT_TOKENS_CACHED).value += num_cached
        found = sum(end <= num_cached for end in choice.picture_ends)
        for family, all_of_it, cached in (
            (PROMPT_TOKENS_BY_SOURCE, num_tokens, num_cached),
            (PICTURES, len(choice.picture_ends), found),
        ):
            for source, count in zip(TOKEN_SOURCES, (all_of_it - cached, cached), strict=True):
                self._book.number(family, source).value += count

    def picture_read(self, seconds: float) -> None:
        """A picture was fetched, decoded and resized."""
        self._observe(PICTURE_SECONDS, seconds)

    def tokens(self, count: int, gap_seconds: float | None) -> None:
        """A request got `count` tokens, `gap_seconds` after the previous ones; None for its first tokens."""
        self._generation_tokens.value += count
        if gap_seconds is not None:
            self._gap.observe(gap_seconds / count, count)

    def finished(self, choice: Choice, reason: FinishReason) -> None:
        """A request ended, maybe without a first token."""
        self._active_at = time.monotonic()
        num_tokens, last = choice.num_tokens, choice.last_token_at
        decode_seconds = 0.0 if choice.first_token_at is None else last - choice.first_token_at
        self._book.number(SUCCESS, reason.value).value += 1
        self._observe(REQUEST_PROMPT, len(choice.prompt_token_ids))
        self._observe(REQUEST_COMPUTED, len(choice.prompt_token_ids) - choice.num_cached_tokens)
        self._observe(REQUEST_GENERATION, num_tokens)
        self._observe(E2E, time.monotonic() - choice.arrived)
        self._observe(INFERENCE, last - choice.arrived - (choice.queue_seconds or 0.0))
        self._observe(DECODE, decode_seconds)
        if num_tokens > 1:
            self._observe(PER_TOKEN, decode_seconds / (num_tokens - 1))

    def answered(self, max_tokens: int, num_tokens: Sequence[int]) -> None:
        """All choices of a prompt ended; `num_tokens` are their lengths."""
        self._observe(PARAMS_N, len(num_tokens))
        self._observe(PARAMS_MAX_TOKENS, max_tokens, len(num_tokens))
        self._observe(REQUEST_LONGEST, max(num_tokens))

    def refused(self, reason: str) -> None:
        """An HTTP request got an error before it ran."""
        self._book.number(REFUSED, reason).value += 1

    def responded(self, route: str, code: int) -> None:
        self._book.number(RESPONSES, route, str(code)).value += 1

    def _observe(self, family: Family, value: float, times: int = 1) -> None:
        self._book.distribution(family).observe(value, times)
