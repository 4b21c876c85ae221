"""The host side of a step: CPU seconds, order of the engine's calls, and utilisation of the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, get_args

import pytest

from bench import host
from bench.report import at_least, at_most
from neuron_runtime.backend.simulated.device import SimulatedBackend, VirtualClock
from neuron_runtime.backend.simulated.step_times import PhaseTimes, StepTimes, constant
from neuron_runtime.core import BackendLimits, Batch, Late, Request, Sampling, StepOutput, TokenFeedback
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.scheduler import Scheduler

pytestmark = pytest.mark.long


class LoggingBackend(SimulatedBackend):
    """Records the order of its calls."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.seen: list[tuple[str, int]] = []

    def launch(self, batch: Batch) -> None:
        self.seen.append(("launch", batch.step))
        super().launch(batch)

    def sample(self, step: int, late: Late | None) -> None:
        super().sample(step, late)

    def collect(self, step: int) -> StepOutput:
        self.seen.append(("collect", step))
        return super().collect(step)


class BlockingBackend(LoggingBackend):
    """Has no thread of its own: `launch` returns when the device is done."""

    def launch(self, batch: Batch) -> None:
        super().launch(batch)
        self._clock.sleep_until(self.timeline.free_at)


def decoding(
    rows: int,
    feedback: Any,
    host_seconds: float = 0.0,
    clock: VirtualClock | None = None,
    backend_class: type[LoggingBackend] = LoggingBackend,
) -> LoggingBackend:
    """Rows that decode to their end, 8 ms per step."""
    limits = BackendLimits(
        max_rows=rows,
        max_model_length=128,
        max_step_tokens=8 * rows,
        max_prefill_rows=rows,
        num_blocks=8 * rows,
        vocabulary_size=1000,
        steps_in_flight=1 if feedback == "host" else 2,
        token_feedback=feedback,
    )
    phase = PhaseTimes(constant(0.008))
    clock = clock or VirtualClock()
    backend = backend_class(limits, StepTimes(phase, phase), clock, host_seconds_per_step=host_seconds)
    engine = Engine(backend)
    for number in range(rows):
        engine.add(Request(f"r{number}", (number,) * 8, Sampling(max_tokens=100)))
    while engine.has_work:
        engine.step()
    return backend


def test_with_device_feedback_each_step_is_launched_before_the_previous_one_is_collected() -> None:
    calls = decoding(64, "device").seen
    steps = [step for call, step in calls if call == "launch"]
    late = [step for step in steps[1:] if calls.index(("launch", step)) > calls.index(("collect", step - 1))]
    # The result of the last step is unused, so no step may follow it.
    assert len(steps) >= 100
    assert late == []


@pytest.mark.parametrize("feedback", ["device", "same rows"])
@pytest.mark.parametrize("rows", [64, 256])
def test_a_device_with_feedback_never_waits_for_a_fast_host(rows: int, feedback: Any) -> None:
    assert decoding(rows, feedback, host_seconds=0.0075).timeline.busy_share >= 0.999


def test_the_device_is_idle_during_host_work_only_where_calls_block_or_tokens_pass_the_host(
    slow_scheduling: VirtualClock,
) -> None:
    # Per step of 8 ms the host takes 2 ms to build inputs and 1 ms each to schedule and to apply.
    idle = {}
    for name, feedback, backend_class in (
        ("no thread", "host", BlockingBackend),
        ("host", "host", LoggingBackend),
        ("same rows", "same rows", LoggingBackend),
        ("device", "device", LoggingBackend),
    ):
        timeline = decoding(8, feedback, 0.002, slow_scheduling, backend_class).timeline
        idle[name] = round(1 - timeline.busy_share, 2)
    assert idle == {"no thread": 0.33, "host": 0.2, "same rows": 0.0, "device": 0.0}


@pytest.mark.parametrize(("rows", "host_milliseconds", "share"), [(64, 0.3, 0.96), (256, 0.85, 0.90)])
def test_with_host_feedback_the_device_waits_only_between_collect_and_launch(
    rows: int, host_milliseconds: float, share: float
) -> None:
    # It would be less if schedule and apply also ran between collect and launch.
    assert decoding(rows, "host", host_milliseconds / 1000).timeline.busy_share >= share


@pytest.fixture(params=[0.001])
def slow_scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """A clock on which schedule and apply take this time each."""
    clock, seconds = VirtualClock(), request.param

    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any) -> Any:
            clock.sleep_until(clock.now() + seconds)
            return method(*given)

        return wrapped

    for name in ("schedule", "apply"):
        monkeypatch.setattr(Scheduler, name, slow(getattr(Scheduler, name)))
    return clock


@pytest.mark.parametrize("slow_scheduling", [0.003], indirect=True)
@pytest.mark.parametrize("feedback", get_args(TokenFeedback))
def test_scheduling_and_applying_never_delay_the_device(feedback: Any, slow_scheduling: VirtualClock) -> None:
    # 3 ms each, in steps of 8 ms: in sequence with the device they would leave it busy for 8 of 14 ms.
    assert decoding(64, feedback, clock=slow_scheduling).timeline.busy_share >= 0.99


REFERENCE_MILLISECONDS = 1.6
"""Duration of `reference` on a quiet core of the machine for which the targets were set."""


def reference() -> float:
    """CPU milliseconds of a fixed amount of plain Python: the current speed of this machine."""

    def once() -> float:
        began = time.thread_time()
        sorted({number * 7919 % 4096: (number, str(number)) for number in range(4096)}.items())
        return 1000 * (time.thread_time() - began)

    return min(once() for _ in range(9))


@pytest.mark.parametrize("feedback", get_args(TokenFeedback))
@pytest.mark.parametrize("rows", [64, 256])
def test_cpu_time_per_step_and_busy_share_meet_their_targets(rows: int, feedback: Any) -> None:
    """On a slower machine, or one slowed down by others, a step may take longer in proportion. Repetitions remove
    momentary disturbances."""
    found = []
    for _ in range(6):
        slower = max(1.0, reference() / REFERENCE_MILLISECONDS)
        cost = host.measure(
            rows,
            feedback,
            num_rounds=3,
            round_steps=40,
            step_milliseconds=slower * host.STEP_MILLISECONDS,
        )
        assert 0 < cost.backend_seconds < cost.step_seconds <= cost.median_step_seconds
        milliseconds = (cost.step_seconds + cost.message_seconds) * 1000 / slower
        found.append((milliseconds, cost.busy_share))
        if milliseconds <= host.STEP_TARGETS[rows] and cost.busy_share >= host.BUSY_TARGETS[feedback, rows]:
            return
    pytest.fail(f"ms of CPU per step of {rows} rows and busy shares: {found}")


def test_a_slow_host_makes_the_device_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimulatedBackend.launch

    def launch(self: SimulatedBackend, batch: Batch) -> None:
        sum(range(200_000))
        slow(self, batch)

    monkeypatch.setattr(SimulatedBackend, "launch", launch)
    cost = host.measure(8, "host", num_rounds=1, round_steps=20, step_milliseconds=1.0)
    assert cost.busy_share < 0.8
    assert cost.backend_seconds > 0.0005


def test_figures_have_the_targets_of_their_rows_and_the_machine_load() -> None:
    costs = [host.measure(rows, "host", num_rounds=1, round_steps=5) for rows in (4, 64)]
    rows = {row.name: row for row in host.figures(costs)}
    assert list(rows) == [
        "device busy, 4 rows, host feedback",
        "device busy, 64 rows, host feedback",
        "host time per step, 4 rows, host feedback",
        "host time per step, 64 rows, host feedback",
    ]
    assert all(row.load is not None and row.load.wall_seconds > 0 for row in rows.values())
    targets = [row.target for row in rows.values()]
    assert targets == [None, at_least(96.0), None, at_most(0.5)]


def test_every_feedback_mode_and_row_count_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(host, "measure", lambda *given, **more: measured.append((*given, more)))
    host.measure_all(num_rounds=2)
    assert measured == [(rows, one, {"num_rounds": 2}) for one in get_args(TokenFeedback) for rows in (64, 256)]
