"""Hung steps: the limit follows from measured steps, and a real hung process is ended."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers import strict_backend
from helpers.strict_backend import StrictBackend
from neuron_runtime.arguments import config_of
from neuron_runtime.artifacts import loading
from neuron_runtime.backend_protocol import ProgressCallback, StepTime, size_of
from neuron_runtime.core import Added, BackendLimits, Batch, Late, Request, Rows, Sampling, StepOutput
from neuron_runtime.distributed.layout import ALONE
from neuron_runtime.engine.messages import Add, FromEngine, Step, ToEngine
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.processes import engine as process
from neuron_runtime.processes.children import Child
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.processes.watchdog import ADAPTER_SECONDS, LATE_SECONDS, StepLimits, WatchedBackend

LIMITS = BackendLimits(max_rows=64, max_model_length=64, max_step_tokens=1024, num_blocks=64)


def batch(step: int, num_rows: int = 1, num_tokens: int = 1, num_prefills: int = 0) -> Batch:
    each = (num_tokens // num_rows,) * num_rows
    return Batch(step, Rows(slot=tuple(range(num_rows)), num_tokens=each), num_prefills)


def test_the_size_of_a_step_is_its_kind_and_rounded_rows_and_tokens() -> None:
    assert size_of(batch(0, num_rows=1)) == "decode of 1 rows, 1 tokens"
    assert size_of(batch(0, num_rows=5, num_tokens=5)) == "decode of 8 rows, 8 tokens"
    assert size_of(batch(0, 1, 65, num_prefills=1)) == "prefill of 1 rows, 128 tokens"
    assert size_of(batch(0, 2, 64, num_prefills=2)) == "prefill of 2 rows, 64 tokens"


def test_a_step_may_take_ten_times_the_usual_time_of_its_graph() -> None:
    limits = StepLimits(min_seconds=30.0, factor=10.0, first_seconds=600.0)
    assert limits.seconds("short") == limits.seconds("long") == 600.0
    limits.observe("short", 0.02)
    limits.observe("long", 8.0)
    assert limits.seconds("short") == 30.0
    assert limits.seconds("long") == 80.0
    assert limits.seconds("other") == 600.0


def test_no_limit_is_longer_than_any_step_may_take() -> None:
    limits = StepLimits(min_seconds=30.0, factor=10.0, first_seconds=600.0, max_seconds=20.0)
    assert limits.seconds("new") == 20.0
    limits.observe("known", 0.02)
    assert limits.seconds("known") == 20.0
    armed = Armed()
    device = replace(LIMITS, max_step_seconds=100.0)
    WatchedBackend(StrictBackend(device), armed.set).launch(
        Batch(0, Rows((0,), (0,), (2,), (-1,), (-1,), (True,)), 1, (Added(0, (1, 2), 2, Sampling(), (0,)),))
    )
    assert armed.seconds == [100.0]


def test_the_weight_of_one_compiling_step_fades() -> None:
    limits = StepLimits(min_seconds=1.0, factor=10.0, first_seconds=600.0)
    limits.observe("graph", 100.0)
    assert limits.seconds("graph") == 1000.0
    for _ in range(100):
        limits.observe("graph", 0.5)
    assert limits.seconds("graph") == pytest.approx(5.0)


class TimedBackend:
    """Every step takes the given time, after the previous one, on a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: dict[int, float] = {}
        self._end = 0.0
        self._ends: dict[int, float] = {}
        self.limits = LIMITS

    def clock(self) -> float:
        return self.now

    def warm_up(self, progress: ProgressCallback) -> list[StepTime]:
        self.now += 2000.0  # to compile
        return [(batch(0), 2.0), (batch(0, 1, 512, num_prefills=1), 0.5)]

    def graph(self, batch: Batch) -> str:
        return size_of(batch)

    def launch(self, batch: Batch) -> None:
        self._end = max(self._end, self.now) + self.seconds[batch.step]
        self._ends[batch.step] = self._end

    def sample(self, step: int, late: Late | None) -> None: ...

    def collect(self, step: int) -> StepOutput:
        self.now = max(self.now, self._ends[step])
        return StepOutput(step, ())

    def add_adapter(self, digest: str, folder: Path, weights: object) -> None: ...

    def close(self) -> None: ...


class Armed:
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.usual_seconds: list[float] = []

    def set(self, seconds: float, usual_seconds: float) -> None:
        self.seconds.append(seconds)
        self.usual_seconds.append(usual_seconds)


def test_a_deadline_covers_all_steps_in_flight_each_from_the_end_of_the_previous_one() -> None:
    device, armed = TimedBackend(), Armed()
    backend = WatchedBackend(device, armed.set, StepLimits(1.0, 10.0, 60.0), device.clock)
    device.seconds = dict.fromkeys(range(4), 2.0) | {4: 3.0}
    for step in (0, 1):
        backend.launch(batch(step))
    assert armed.seconds == [60.0, 120.0]
    backend.collect(0)
    assert armed.seconds[-1] == 20.0  # step 1, after one measurement
    backend.launch(batch(2))
    assert armed.seconds[-1] == 40.0
    for step in (1, 2):
        backend.collect(step)
    # Nothing runs: host work has its own limit, and a pause does not count in the next step.
    assert armed.seconds[-1] == 1.0
    device.now += 1000.0
    backend.launch(batch(3))
    backend.collect(3)
    backend.launch(batch(4))
    assert armed.seconds[-1] == 20.0
    backend.collect(4)
    backend.launch(batch(0))
    assert armed.seconds[-1] == 30.0


def test_a_step_before_which_adapters_were_added_may_take_longer_and_is_not_measured() -> None:
    device, armed = TimedBackend(), Armed()
    backend = WatchedBackend(device, armed.set, StepLimits(1.0, 10.0, 60.0), device.clock)
    device.seconds = {0: 2.0, 1: 90.0, 2: 2.0}
    backend.launch(batch(0))
    backend.collect(0)
    for name in ("x", "y"):
        backend.add_adapter(name, Path(name), None)
    backend.launch(batch(1))
    assert armed.seconds[-1] == 20.0 + 2 * ADAPTER_SECONDS
    backend.collect(1)
    backend.launch(batch(2))
    assert armed.seconds[-1] == 20.0


def test_steps_are_late_some_seconds_after_one_and_a_half_times_their_usual_time_but_a_long_step_alone_is_not() -> None:
    device, armed = TimedBackend(), Armed()
    backend = WatchedBackend(device, armed.set, StepLimits(30.0, 10.0, 600.0), device.clock)
    device.seconds = {0: 20.0, 1: 20.0, 2: 20.0}
    backend.launch(batch(0))
    # Nothing is known of the shape.
    assert armed.usual_seconds == [600.0 + LATE_SECONDS]
    backend.collect(0)
    assert armed.usual_seconds[-1] == LATE_SECONDS
    backend.launch(batch(1))
    assert armed.usual_seconds[-1] == 1.5 * 20.0 + LATE_SECONDS
    backend.launch(batch(2))
    assert armed.usual_seconds[-1] == 2 * 1.5 * 20.0 + LATE_SECONDS


def test_warm_up_steps_count_as_measurements_and_have_no_deadline() -> None:
    device, armed = TimedBackend(), Armed()
    backend = WatchedBackend(device, armed.set, StepLimits(10.0, 10.0, 600.0), device.clock)
    backend.warm_up(lambda what, share: None)
    assert armed.seconds == []
    device.seconds = dict.fromkeys(range(3), 1.0)
    for launched in (batch(0), batch(1, 1, 512, num_prefills=1), batch(2, num_rows=2, num_tokens=2)):
        backend.launch(launched)
    assert armed.seconds == [20.0, 20.0 + 10.0, 20.0 + 10.0 + 600.0]


class WarmBackend(StrictBackend):
    """A backend whose warm-up reports a slow prompt of three tokens."""

    def warm_up(self, progress: ProgressCallback) -> tuple[StepTime, ...]:
        return ((batch(0, 1, 3, num_prefills=1), 7.0),)


class OneRequest:
    """The connection of the engine process: sends one request and, after its answer, SIGTERM."""

    def __init__(self, asked: Request) -> None:
        self._mail: list[ToEngine] = [Add(asked)]
        self._stops = False

    def stop_at_sigterm(self) -> Callable[[], bool]:
        return lambda: self._stops

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self._stops = any(news.finish_reason for news in message.events)

    def receive(self, wait: bool) -> list[ToEngine]:
        mail, self._mail = self._mail, []
        assert mail or not wait
        return mail


class ArmedDeadline(Armed):
    def clear(self) -> None: ...


def test_the_engine_process_knows_warmed_up_shapes_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    package = SimpleNamespace(
        needs_weights=lambda config: False, load_backend=lambda *given, **rank: WarmBackend(LIMITS)
    )
    monkeypatch.setattr(loading, "backend_package", lambda config: package)
    armed = ArmedDeadline()
    asked = Request("1", (5, 6, 7), Sampling(max_tokens=1))
    try:
        settings = LocalSettings(weights_dir=tmp_path, artifacts_dir=tmp_path)
        process.serve(
            config_of(tmp_path.as_uri(), {}),
            settings,
            ALONE,
            cast(Any, OneRequest(asked)),
            deadline=cast(Any, armed),
            ending=process.Ending("serve", tmp_path / "record.json"),
        )
    finally:
        gc.unfreeze()
    assert max(armed.seconds) == 70.0


HANG = """
    import faulthandler, sys, time
    from pathlib import Path
    from helpers.strict_backend import StrictBackend
    from neuron_runtime.core import BackendLimits, Request, Sampling
    from neuron_runtime.processes.lifeline import Deadline
    from neuron_runtime.engine.loop import Engine
    from neuron_runtime.processes.watchdog import StepLimits, WatchedBackend

    class HangingBackend(StrictBackend):
        def collect(self, step):
            if step == 5:
                Path(sys.argv[2]).touch()
                time.sleep(1000)
            return super().collect(step)

    faulthandler.enable()
    limits = BackendLimits(max_rows=2, max_model_length=64, max_step_tokens=64, num_blocks=8)
    backend = HangingBackend(limits, vocabulary_size=100)
    with Deadline(Path(sys.argv[1])) as deadline:
        engine = Engine(WatchedBackend(backend, deadline.set, StepLimits(0.1, 10.0, FIRST)))
        engine.add(Request("1", (5, 6, 7), Sampling(max_tokens=40)))
        while engine.has_work:
            engine.step()
"""


@pytest.mark.parametrize("first", [0.1, 1000.0], ids=["of a known shape", "with longer limits for other shapes"])
def test_a_process_with_a_hung_step_is_ended_with_its_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], first: float
) -> None:
    code = textwrap.dedent(HANG).replace("FIRST", str(first))
    hangs = tmp_path / "hangs"
    with Deadline(tmp_path / "deadline") as deadline:
        environment = {**os.environ, "PYTHONPATH": str(Path(strict_backend.__file__).parents[1])}
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "deadline"), str(hangs)], env=environment
        )
        child = Child("engine process", process, tmp_path / "record", deadline)
        while child.lives:
            time.sleep(0.02)
            if hangs.exists():  # earlier, a stalled machine could make a step take as long
                child.kill_if_hung()
    assert "SIGABRT" in str(child.failure())
    stated = capfd.readouterr().err
    assert "the engine process hangs" in stated
    assert "in collect" in stated
