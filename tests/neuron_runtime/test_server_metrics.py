"""Counts of a front end, and the exposition for Prometheus."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from neuron_runtime.backend.simulated.device import SimulatedBackend, VirtualClock
from neuron_runtime.backend.simulated.options import Options, limits_of, step_times
from neuron_runtime.backend.simulated.step_times import PhaseTimes, StepTimes, constant
from neuron_runtime.config import CONFIG_VERSION, ModelSource, RuntimeConfig
from neuron_runtime.core import BackendLimits, DeviceMemory, FinishReason, GraphUse, Request, Sampling, StepKind
from neuron_runtime.engine import messages
from neuron_runtime.engine.backpressure import QueueLimits
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.messages import Abort, Add, Ready, Step, ToEngine
from neuron_runtime.engine.stats import EngineStats, StepStats
from neuron_runtime.errors import BackendFailed, Draining, InvalidRequest, Overloaded, ServingError, Unauthorized
from neuron_runtime.processes.engine import Worker
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.server.exchange import Exchange, count
from neuron_runtime.server.metrics import (
    ACCEPTED_BY_PLACE,
    CORE_MEMORY,
    FAMILIES,
    GROUP_WAIT,
    LOG_LINES_LOST,
    LORA_REQUESTS,
    OPEN_CONNECTIONS,
    PROCESS,
    Metrics,
)
from neuron_runtime.server.series import Book, Family

LIMITS = BackendLimits(max_rows=2, max_model_length=256, max_step_tokens=256, block_size=16, num_blocks=64)
Sample = tuple[str, frozenset[tuple[str, str]]]


def samples(text: bytes) -> dict[Sample, float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    series = frozenset({"model_name": "m", "engine": "0", **labels}.items())
    return samples(metrics.render())[name, series]


def step(**numbers: object) -> Step:
    return Step((), (), EngineStats(**numbers))  # type: ignore[arg-type]


def started(incarnation: int = 1) -> Metrics:
    metrics = Metrics("m")
    metrics.engine_started(incarnation)
    metrics.engine_ready(Ready(LIMITS, QueueLimits(), load_seconds=3.0, warm_up_seconds=2.0))
    return metrics


def test_the_memory_of_a_device_has_series_from_its_first_report_to_the_end_of_its_engine() -> None:
    metrics, used = started(), "neuron_serving_neuron_logical_core_memory_used_bytes"
    metrics.step(step())
    assert f"{used}{{" not in metrics.render().decode()
    sent = messages.encoder.encode(step(device_memory=DeviceMemory(7, 5)))
    received = messages.decode_from_engine(sent)
    assert isinstance(received, Step)
    metrics.step(received)
    assert value(metrics, used) == 7
    assert value(metrics, "neuron_serving_neuron_logical_core_memory_free_bytes") == 5
    metrics.engine_ended()
    assert f"{used}{{" not in metrics.render().decode()


# Numbers


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), max_size=30))
def test_a_histogram_uses_the_bucket_that_prometheus_uses(
    observed: list[tuple[float, int]],
) -> None:
    family = Family("h", "histogram", "h.", bounds=(0.5, 1.0, 5.0))
    book = Book([family], {})
    for number, times in observed:
        book.distribution(family).observe(number, times)
    book.distribution(family)
    found = samples(generate_latest(book))
    for le in (0.5, 1.0, 5.0):
        expected = sum(times for number, times in observed if number <= le)
        assert found["h_bucket", frozenset({("le", str(le))})] == expected
    total = sum(times for _, times in observed)
    assert found["h_count", frozenset()] == found["h_bucket", frozenset({("le", "+Inf")})] == total
    assert found["h_sum", frozenset()] == pytest.approx(sum(number * times for number, times in observed))


# The engine


def test_counters_continue_when_the_engine_restarts() -> None:
    metrics = started()
    metrics.step(step(num_preemptions_total=2))
    metrics.step(step(num_preemptions_total=3))
    metrics.engine_ended()
    metrics.engine_started(2)
    metrics.step(step(num_preemptions_total=1))
    assert value(metrics, "vllm:num_preemptions_total") == 4
    assert value(metrics, "neuron_serving_engine_restarts_total") == 1


def test_drafts_are_counted_as_in_vllm_and_by_their_position() -> None:
    metrics, stats = Metrics("m"), EngineStats()
    metrics.engine_started(1)
    metrics.engine_ready(Ready(replace(LIMITS, max_drafts=3), QueueLimits(), 1.0, 1.0))
    for num_drafts, num_accepted in ((3, 2), (2, 0), (2, 1)):
        stats.count_drafts(num_drafts, num_accepted)
        received = messages.decode_from_engine(messages.encoder.encode(Step((), (), stats)))
        assert isinstance(received, Step)
        metrics.step(received)
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 3
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 7
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 3
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, name, position=str(place)) for place in range(3)] == [2, 1, 0]


def test_an_ended_engine_reports_no_running_requests() -> None:
    metrics = started()
    metrics.step(step(num_running=2, num_waiting=3, num_blocks=8, num_blocks_used=4))
    assert value(metrics, "vllm:num_requests_waiting") == 3
    assert value(metrics, "neuron_serving_group_members_present") == 1
    metrics.engine_ended()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value(metrics, name) == 0
    assert value(metrics, "neuron_serving_group_members_present") == 0


def test_a_server_is_idle_since_its_last_request_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And before the first one since its start: the operator ends replicas by it."""
    now = 1000.0
    monkeypatch.setattr("neuron_runtime.server.metrics.time", SimpleNamespace(monotonic=lambda: now))
    metrics = Metrics("m")
    now = 1030.0
    assert value(metrics, "neuron_serving_idle_seconds") == 30
    for numbers in ({"num_waiting": 1}, {"num_running": 1}):
        metrics.step(step(**numbers))
        now += 500
        assert value(metrics, "neuron_serving_idle_seconds") == 0
    ended = SimpleNamespace(
        num_tokens=0, last_token_at=now, first_token_at=None, prompt_token_ids=(), num_cached_tokens=0, arrived=now
    )
    metrics.finished(cast(Any, SimpleNamespace(**vars(ended), queue_seconds=None)), FinishReason.ABORT)
    metrics.step(step())
    now += 7
    assert value(metrics, "neuron_serving_idle_seconds") == 7


def test_a_restarted_engine_with_another_cache_drops_the_old_series() -> None:
    metrics = started()
    metrics.engine_started(2)
    metrics.engine_ready(Ready(BackendLimits(2, 256, 256, block_size=32, num_blocks=8), QueueLimits(), 1.0, 1.0))
    shapes = [dict(labels) for name, labels in samples(metrics.render()) if name == "vllm:cache_config_info"]
    assert shapes == [{"model_name": "m", "engine": "0", "block_size": "32", "num_gpu_blocks": "8"}]


GRAPHS = (GraphUse("prefill_128", 100, 128), GraphUse("prefill_16", 12, 16), GraphUse("prefill_16", 8, 16))


def test_steps_are_counted_by_kind_and_graph() -> None:
    metrics = started()
    prefill = {"kind": StepKind.PREFILL, "num_tokens": 120, "graphs": GRAPHS}
    decode = {"kind": StepKind.DECODE, "num_tokens": 3}
    for number, numbers in enumerate((prefill, decode, decode)):
        applied = StepStats(step=number, device_seconds=0.008, host_seconds=0.0004, **numbers)  # type: ignore[arg-type]
        metrics.step(step(last_step=applied, work_seconds_total=0.01 * (number + 1)))
    metrics.step(step(work_seconds_total=0.032))  # an iteration without an applied step
    for name, kind, bucket, expected in (
        ("fed", "prefill", "prefill_128", 100),
        ("computed", "prefill", "prefill_128", 128),
        ("fed", "prefill", "prefill_16", 20),
        ("computed", "prefill", "prefill_16", 32),
        ("fed", "decode", "none", 6),
        ("computed", "decode", "none", 6),
    ):
        assert value(metrics, f"neuron_serving_{name}_tokens_total", kind=kind, bucket=bucket) == expected
    assert value(metrics, "neuron_serving_step_seconds_count", kind="decode") == 2
    assert value(metrics, "neuron_serving_step_host_seconds_count") == 3
    assert value(metrics, "neuron_serving_device_busy_seconds_total") == pytest.approx(0.024)
    assert value(metrics, "neuron_serving_work_seconds_total") == pytest.approx(0.032)
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 126


def test_padding_and_busy_time_come_from_the_device() -> None:
    options = Options(decode_buckets=(4, 8), prefill_buckets=(32, 128), prefill="whole")
    config = RuntimeConfig(version=CONFIG_VERSION, model=ModelSource(uri="file:///m"), served_names=("m",))
    clock = VirtualClock()
    limits = limits_of(config, options, vocabulary_size=512, longest=200)
    backend = SimulatedBackend(limits, step_times(options), clock, host_seconds_per_step=0.001)
    engine = Engine(backend, clock=clock.now)
    for number, length in enumerate((20, 33, 100, 7, 64, 128)):
        engine.add(Request(f"r{number}", tuple(range(length)), Sampling(max_tokens=20 + number)))
    metrics = started()
    while engine.has_work:
        engine.step()
        metrics.step(Step((), (), engine.stats))
    assert {size for _, size in backend.timeline.shapes} == {4, 8, 32, 128}
    for (kind, size), use in backend.timeline.shapes.items():
        labels = {"kind": kind, "bucket": f"{kind}_{size}"}
        assert value(metrics, "neuron_serving_fed_tokens_total", **labels) == use.num_used
        assert value(metrics, "neuron_serving_computed_tokens_total", **labels) == use.num_used + use.num_padded
    busy = value(metrics, "neuron_serving_device_busy_seconds_total")
    assert busy == pytest.approx(backend.timeline.busy_seconds)


class Post:
    """Messages in virtual time: they arrive after a long wait, and every iteration takes host time."""

    WAIT, LOOK, SEND = 100.0, 0.001, 0.002

    def __init__(self, clock: VirtualClock, mail: list[ToEngine]) -> None:
        self.steps: list[Step] = []
        self.num_looks = 0
        self._clock = clock
        self._mail = mail

    def receive(self, wait: bool) -> list[ToEngine]:
        self.num_looks += not wait
        self._pass(self.WAIT if wait else self.LOOK)
        return [self._mail.pop()] if wait else []

    def send(self, step: Step) -> None:
        self.steps.append(cast(Step, messages.decode_from_engine(messages.encoder.encode(step))))
        self._pass(self.SEND)

    def _pass(self, seconds: float) -> None:
        self._clock.sleep_until(self._clock.now() + seconds)


def test_idle_time_and_device_time_do_not_count_as_host_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("neuron_runtime.processes.engine.time", SimpleNamespace(monotonic=clock.now))
    backend = SimulatedBackend(
        replace(LIMITS, vocabulary_size=512, steps_in_flight=1, token_feedback="host"),
        StepTimes(decode=PhaseTimes(constant(0.01)), prefill=PhaseTimes(constant(0.03))),
        clock,
    )
    engine = Engine(backend, clock=clock.now)
    post = Post(clock, [Add(Request(f"{number}", (1, 2, 3), Sampling(max_tokens=5))) for number in range(2)])
    with Deadline(tmp_path / "deadline") as deadline:
        worker = Worker(engine, cast(Any, post), deadline)
        for _ in range(2):
            worker.turn()
            while engine.has_work:
                worker.turn()
    metrics = started()
    for one in post.steps:
        metrics.step(one)
    busy = value(metrics, "neuron_serving_device_busy_seconds_total")
    assert busy == pytest.approx(2 * (0.03 + 4 * 0.01))
    # The cost of sending a message counts in the next iteration; there is none after the last one.
    host = sum(one.stats.last_step.host_seconds for one in post.steps if one.stats.last_step)
    assert host == pytest.approx(post.num_looks * Post.LOOK + (len(post.steps) - 2) * Post.SEND)
    # The next step runs while the host sends and receives: the device never waits for it.
    work = value(metrics, "neuron_serving_work_seconds_total")
    assert work == pytest.approx(busy)
    assert clock.now() == pytest.approx(work + 2 * Post.WAIT + 2 * Post.SEND)


def test_a_step_counts_once_when_messages_follow_it(tmp_path: Path) -> None:
    clock = VirtualClock()
    times = StepTimes(decode=PhaseTimes(constant(0.01)), prefill=PhaseTimes(constant(0.03)))
    engine = Engine(SimulatedBackend(replace(LIMITS, vocabulary_size=512), times, clock), clock=clock.now)
    mail: list[ToEngine] = [Abort(("0",)), Add(Request("0", (1, 2, 3), Sampling(max_tokens=2)))]
    post, metrics = Post(clock, mail), started()
    with Deadline(tmp_path / "deadline") as deadline:
        worker = Worker(engine, cast(Any, post), deadline)
        while mail or engine.has_work:
            worker.turn()
    for one in post.steps:
        metrics.step(one)
    assert post.steps[-1].stats.last_step is None
    assert value(metrics, "vllm:iteration_tokens_total_count") == 2


# Finished requests


def over(error: ServingError | None, status: int, *ended: FinishReason) -> Exchange:
    exchange = Exchange("id", "POST", "/v1/completions", "", {}, 0.0, 0.0, status=status, error=error)
    choices = [SimpleNamespace(ended=reason, num_tokens=4 + number) for number, reason in enumerate(ended)]
    ask = SimpleNamespace(num_choices=2, sampling=[Sampling(max_tokens=9)] * (len(ended) // 2))
    exchange.generation = cast(Any, SimpleNamespace(choices=choices, ask=ask)) if ended else None
    return exchange


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (InvalidRequest("wrong"), 400, "invalid_request"),
        (InvalidRequest("long", code="context_length_exceeded"), 400, "context_length_exceeded"),
        (InvalidRequest("what?", status=404, code="model_not_found"), 404, "model_not_found"),
        (Unauthorized(presented=False), 401, "invalid_api_key"),
        (Overloaded("full"), 429, "overloaded"),
        (Draining("ends"), 503, "draining"),
        (BackendFailed("starts"), 503, "not_ready"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_refused_requests_are_counted_by_reason(error: ServingError, status: int, reason: str) -> None:
    metrics = started()
    assert value(metrics, "neuron_serving_requests_refused_total", reason=reason) == 0, "a rate begins at 0"
    count(metrics, over(error, status))
    assert value(metrics, "neuron_serving_requests_refused_total", reason=reason) == 1
    assert value(metrics, "vllm:request_params_n_count") == 0


def test_a_request_that_ran_is_never_counted_as_refused() -> None:
    metrics = started()
    count(metrics, over(BackendFailed("died"), 503, FinishReason.ERROR, FinishReason.ERROR))
    count(metrics, over(BackendFailed("died"), 200, FinishReason.STOP, FinishReason.ERROR))
    count(metrics, over(None, 200, *[FinishReason.STOP] * 4))
    refused = [v for (name, _), v in samples(metrics.render()).items() if name.endswith("requests_refused_total")]
    assert sum(refused) == 0
    assert value(metrics, "vllm:request_params_n_count") == 4, "once for each prompt"
    assert value(metrics, "vllm:request_params_max_tokens_sum") == 72, "once for each answer"
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 5 + 5 + 5 + 7


def test_some_values_are_read_at_each_scrape() -> None:
    metrics, lost = started(), iter((1, 2))
    cpu = next(family for family in PROCESS if family.kind == "counter")
    metrics.read_at_scrape(lambda: [(LOG_LINES_LOST, (), next(lost)), (OPEN_CONNECTIONS, (), 7)])
    metrics.read_at_scrape(lambda: [(cpu, ("front-end",), 1.0)])
    assert value(metrics, LOG_LINES_LOST.name) == 1
    assert value(metrics, LOG_LINES_LOST.name) == 2
    lost = iter((2, 2))
    assert value(metrics, OPEN_CONNECTIONS.name) == 7
    assert value(metrics, cpu.name, process="front-end") == 1


# The text


def test_series_for_the_board_exist_before_the_first_request() -> None:
    there, not_yet = (
        {name for name, _ in samples(started().render())},
        (*CORE_MEMORY, *PROCESS, GROUP_WAIT, LORA_REQUESTS, ACCEPTED_BY_PLACE),
    )
    for family in FAMILIES:
        if family.labels != ("kind", "bucket") and family not in not_yet:
            assert there & {family.name, f"{family.name}_count"}, family.name


VLLM: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "cases" / "vllm_metrics.yaml").read_text())
FINER = ("vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds")


def test_every_query_of_vllms_boards_finds_its_series() -> None:
    there = {name for name, _ in samples(started().render())}
    assert set(VLLM["boards"]) <= there


def test_metrics_of_vllm_have_its_types() -> None:
    ours = {family.name: family.kind for family in FAMILIES if family.name.startswith("vllm:")}
    theirs = {name: kind for kind in ("gauge", "counter", "histogram") for name in VLLM[kind].split()}
    assert ours.items() <= theirs.items()


def test_buckets_have_vllms_bounds() -> None:
    ours = {family.name: family.bounds for family in FAMILIES if family.name.startswith("vllm:") and family.bounds}
    theirs = {name: row["values"] for row in VLLM["bounds"] for name in row["metrics"].split()}
    assert ours.keys() == theirs.keys()
    for name, bounds in ours.items():
        assert set(theirs[name]) <= set(bounds), name
        assert name in FINER or list(bounds) == theirs[name], name


def test_every_metric_name_has_its_unit_as_prometheus_requires() -> None:
    seen: set[str] = set()
    for family in FAMILIES:
        assert family.name.startswith(("vllm:", "neuron_serving_", "process_"))
        assert family.name not in seen
        seen.add(family.name)
        assert family.text.endswith(".")
        if family.name.startswith("neuron_serving_"):
            assert family.name.endswith("_total") == (family.kind == "counter")
            assert not {"ms", "milliseconds", "minutes", "percent", "kb", "mb"} & set(family.name.split("_"))
        assert list(family.bounds) == sorted(set(family.bounds))


def test_bucket_bounds_are_exact_in_the_text() -> None:
    for family in FAMILIES:
        for bound in family.bounds:
            assert float(repr(bound)) == bound
            assert len(repr(bound)) < 9, "rules quote the bound as it is printed"


def test_the_cost_of_counting_is_constant() -> None:
    """Observations happen per token, so the stored data must not grow with them."""
    metrics = started()
    numbers = random.Random(1)
    for _ in range(2000):
        metrics.tokens(1, numbers.random())
    few = len(metrics.render())
    for _ in range(20_000):
        metrics.tokens(1, numbers.random())
    assert len(metrics.render()) - few < 200, "only the digits of counts grow"


def test_the_wait_for_each_other_rank_has_a_series_from_the_start_and_continues_over_engines() -> None:
    metrics = Metrics("m")
    for incarnation in (1, 2):
        metrics.engine_started(incarnation)
        metrics.engine_ready(Ready(LIMITS, QueueLimits(), 1.0, 1.0, num_ranks=3))
        metrics.step(step(group_wait_seconds_total=(0.5, 0.25)))
        metrics.step(step(group_wait_seconds_total=(1.5, 0.25)))
    waited = {rank: value(metrics, GROUP_WAIT.name, rank=rank) for rank in ("1", "2")}
    assert waited == {"1": 3.0, "2": 0.5}
