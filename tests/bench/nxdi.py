"""Host work of the NxD Inference backend per decode step, and the idle share of its device, on the fake library.

Used by the suite. The device is a timeline of steps of 8 ms. Two clocks of CPU seconds, of the engine's thread and of
the backend's, meet where one waits for the other; the time in which the fake computes does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.cpu_clock import CpuClock
from bench.host import STEP_MILLISECONDS, STEP_TARGETS
from bench.report import Load, Meter, Row, at_most
from helpers.nxdi import fake_nxdi
from helpers.random_model import model_config, write_random_model
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target
from neuron_runtime.backend.nxdi.backend import NxdiBackend
from neuron_runtime.backend.nxdi.buckets import limits_of
from neuron_runtime.backend.nxdi.library import application
from neuron_runtime.backend.nxdi.settings import Settings, settings_of
from neuron_runtime.backend.simulated.device import SimulatedBackend, Timeline
from neuron_runtime.backend.simulated.step_times import PhaseTimes, StepTimes, constant
from neuron_runtime.config import Buckets, EngineLimits, ModelSource, RuntimeConfig
from neuron_runtime.core import BackendLimits, Late, Request, Sampling, StepKind, StepOutput
from neuron_runtime.engine.loop import Engine

NUM_ROUNDS = 4
ROUND_STEPS = 40
NUM_PROMPT_TOKENS = 8
LENGTH = 128
ROWS = (64, 256)
IDLE_TARGETS = {False: 4.0, True: 0.5}
"""Percent, by asynchronous mode."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of decode steps with all rows, of the fastest round."""

    rows: int
    layout: str
    asynchronous: bool
    step_seconds: float
    """On the engine's thread: schedule, build the inputs, collect and apply the output."""
    thread_seconds: float
    """On the backend's thread, without `forward()`: the device waits for it, unless it runs ahead."""
    idle_share: float
    """The share of the device's timeline, median of the rounds."""
    simulated_seconds: float
    """On the engine's thread with a simulated backend of the same limits."""
    load: Load


class TimedSteps(NxdiBackend):
    """Two threads and a device on one timeline."""

    def __init__(self, made: Any, settings: Settings, limits: BackendLimits, library: Any) -> None:
        super().__init__(made, settings, limits)
        self.clock = CpuClock()
        """The clock of the engine's thread."""
        self.timeline = Timeline()
        self.thread_seconds = 0.0
        self._thread_clock: CpuClock | None = None
        self._made, self._library = made, library
        self._application = self.forward
        self._ends: list[float] = []
        self._begins_at: dict[int, float] = {}
        self._done_at: dict[int, float] = {}

    def sample(self, step: int, late: Late | None) -> None:
        self._begins_at[step] = self.clock.now()
        super().sample(step, late)

    def collect(self, step: int) -> StepOutput:
        output = super().collect(step)
        self.clock.sleep_until(self._done_at.pop(step))
        return output

    def _run(self, job: Any) -> Any:
        clock = self._thread_clock = self._thread_clock or CpuClock()
        number = job[0].batch.step
        clock.sleep_until(self._begins_at.pop(number))
        began = time.thread_time()
        self._inside = 0.0
        output = super()._run(job)
        self.thread_seconds += time.thread_time() - began - self._inside
        self._done_at[number] = clock.now()
        return output

    def forward(self, **arguments: Any) -> Any:
        """The fake's answer, when the device would have it: one step ahead in asynchronous mode."""
        clock = self._thread_clock
        assert clock is not None
        began, steps = time.thread_time(), self._library.COUNTS.steps
        output = self._made(**arguments)
        spent = time.thread_time() - began
        self._inside += spent
        now = clock.now() - spent
        for _ in range(self._library.COUNTS.steps - steps):
            self._ends.append(self.timeline.run(now, STEP_MILLISECONDS / 1000))
        ahead = getattr(self._made, "prior_outputs", None) is not None
        clock._waited -= spent
        clock.sleep_until(self._ends[-2 if ahead else -1])
        return output


@contextmanager
def loaded(rows: int, layout: str, asynchronous: bool) -> Iterator[TimedSteps]:
    """A backend on the fake with a model so small that its computing hardly takes time."""
    model = model_config(
        hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=16, max_position_embeddings=LENGTH
    )
    config = RuntimeConfig(
        version=1,
        model=ModelSource(uri="file:///model"),
        served_names=("model",),
        backend="nxdi",
        dtype="float32",
        layout="blocks" if layout == "blocks" else "slots",
        async_mode=asynchronous,
        limits=EngineLimits(max_sequences=rows, max_model_length=LENGTH),
        buckets=Buckets(context=(LENGTH,), token_generation=(LENGTH,)),
    )
    with TemporaryDirectory() as temporary, fake_nxdi(version="0.9", mode="damage") as library:
        os.environ["BASE_COMPILE_WORK_DIR"] = f"{temporary}/work"
        folder = Path(temporary) / "model"
        write_random_model(folder, model)
        settings = settings_of(config, model, Target(PLATFORMS["trn2"], 2, 1))
        made = application(settings, folder)
        artifact = str(Path(temporary) / "artifact")
        made.compile(artifact)
        made.load(artifact, skip_warmup=True)
        backend = TimedSteps(made, settings, limits_of(settings, 600.0), library)
        yield backend
        backend.close()


def measure(
    rows: int, layout: str, *, asynchronous: bool = False, num_rounds: int = NUM_ROUNDS, round_steps: int = ROUND_STEPS
) -> Cost:
    meter = Meter()
    with loaded(rows, layout, asynchronous) as backend:
        rounds = []
        engine = Engine(backend, clock=backend.clock.now, max_consecutive_prefills=rows)
        for _ in range(num_rounds):
            fill(engine, rows)
            timeline, inside = backend.timeline, backend.thread_seconds
            began, busy = timeline.free_at, timeline.busy_seconds
            seconds = decode(engine, round_steps)
            # Sums of many steps: rounding can make the work longer than the time.
            idle = max(0.0, 1 - (timeline.busy_seconds - busy) / (timeline.free_at - began))
            rounds.append((seconds, (backend.thread_seconds - inside) / round_steps, idle))
            empty(engine)
        limits = backend.limits
    step_seconds, thread_seconds, _ = min(rounds)
    clock = CpuClock()
    phase = PhaseTimes(constant(STEP_MILLISECONDS / 1000))
    device = SimulatedBackend(limits, StepTimes(decode=phase, prefill=phase), clock)
    simulated = Engine(device, clock=clock.now, max_consecutive_prefills=rows)
    times = []
    for _ in range(num_rounds):
        fill(simulated, rows)
        times.append(decode(simulated, round_steps))
        empty(simulated)
    return Cost(
        rows=rows,
        layout=layout,
        asynchronous=asynchronous,
        step_seconds=step_seconds,
        thread_seconds=thread_seconds,
        idle_share=median(idle for *_, idle in rounds),
        simulated_seconds=min(times),
        load=meter.read(),
    )


def fill(engine: Engine, rows: int) -> None:
    """Every row decodes when it returns."""
    random = Random(rows)
    for number in range(rows):
        prompt = tuple(random.randrange(256) for _ in range(NUM_PROMPT_TOKENS))
        engine.add(Request(f"r{number}", prompt, Sampling(max_tokens=LENGTH - NUM_PROMPT_TOKENS - 1)))
    engine.step()  # the last step was one of the round before
    while not ((last := engine.stats.last_step) and last.kind is StepKind.DECODE and last.num_tokens == rows):
        engine.step()


def decode(engine: Engine, num_steps: int) -> float:
    """CPU seconds of this thread per step."""
    began = time.thread_time()
    for _ in range(num_steps):
        engine.step()
    return (time.thread_time() - began) / num_steps


def empty(engine: Engine) -> None:
    for request_id in engine.request_ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()


def measure_all(num_rounds: int = NUM_ROUNDS) -> list[Cost]:
    chosen = [(rows, layout, False) for layout in ("slots", "blocks") for rows in ROWS]
    return [
        measure(rows, layout, asynchronous=asynchronous, num_rounds=num_rounds)
        for rows, layout, asynchronous in (*chosen, (ROWS[0], "slots", True))
    ]


def figures(costs: list[Cost]) -> tuple[Row, ...]:
    spent = [
        Row(
            f"host time per step, {cost.rows} rows, {cost.layout}",
            (cost.step_seconds * 1000,),
            "ms",
            None if (target := STEP_TARGETS.get(cost.rows)) is None else at_most(target),
            f"simulated backend {cost.simulated_seconds * 1000:.3f}; the backend's thread "
            f"{cost.thread_seconds * 1000:.3f} more",
            cost.load,
        )
        for cost in costs
        if not cost.asynchronous
    ]
    idle = [
        Row(
            f"device idle, {cost.rows} rows, {cost.layout}{', asynchronous' if cost.asynchronous else ''}",
            (cost.idle_share * 100,),
            "%",
            at_most(IDLE_TARGETS[cost.asynchronous]),
            "steps of 8 ms, clocks of CPU seconds",
            cost.load,
        )
        for cost in costs
    ]
    return (*spent, *idle)
