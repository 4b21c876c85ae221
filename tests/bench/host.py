"""CPU seconds of the engine per step and utilisation of the device, with the simulated backend.

Used by the suite. The device is a timeline whose clock is the CPU time of the engine's thread, so that other work on
the machine does not count, except for its effect on caches and clock rates: the fastest of several rounds is reported.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import get_args

from bench.cpu_clock import CpuClock
from bench.report import Load, Meter, Row, at_least, at_most
from neuron_runtime.backend.simulated.device import SimulatedBackend
from neuron_runtime.backend.simulated.step_times import PhaseTimes, StepTimes, constant
from neuron_runtime.core import BackendLimits, Batch, Form, Late, Request, Sampling, StepKind, StepOutput, TokenFeedback
from neuron_runtime.engine import messages
from neuron_runtime.engine.guides import Guides
from neuron_runtime.engine.loop import Engine

STEP_MILLISECONDS = 8.0
NUM_ROUNDS = 8
ROUND_STEPS = 100
NUM_PROMPT_TOKENS = 64
ANSWER_TOKENS = (100, 400)
"""Minimum and maximum: rows join and leave all the time."""
BLOCK_SIZE = 32
VOCABULARY_SIZE = 128_256

FEEDBACKS: tuple[TokenFeedback, ...] = get_args(TokenFeedback)
ROWS = (64, 256)

BUSY_TARGETS = {
    ("device", 64): 0.99,
    ("device", 256): 0.97,
    # Only while no row joins or leaves, which with 256 rows happens in almost every step.
    ("same rows", 64): 0.96,
    ("same rows", 256): 0.90,
    ("host", 64): 0.96,
    ("host", 256): 0.90,
}
STEP_TARGETS = {64: 0.5, 256: 1.5}
"""Milliseconds by rows."""
STEP_AIMS = {64: 0.25, 256: 0.8}


@dataclass(frozen=True, slots=True)
class HostCost:
    """CPU seconds of the engine's thread for steps with all rows decoding; the fastest round."""

    rows: int
    feedback: TokenFeedback
    busy_share: float
    """Share of the device timeline."""
    step_seconds: float
    """Schedule, build and launch the batch, collect and apply the output."""
    backend_seconds: float
    """Part of it inside the simulated backend, which mirrors all rows as any backend does."""
    message_seconds: float
    """Events of all rows and statistics of the engine, encoded for the front end."""
    median_step_seconds: float
    """Total of all rounds."""
    load: Load


class TimedBackend(SimulatedBackend):
    """Sums the CPU seconds of its calls."""

    spent_seconds = 0.0

    def launch(self, batch: Batch) -> None:
        began = time.thread_time()
        super().launch(batch)
        self.spent_seconds += time.thread_time() - began

    def sample(self, step: int, late: Late | None) -> None:
        began = time.thread_time()
        super().sample(step, late)
        self.spent_seconds += time.thread_time() - began

    def collect(self, step: int) -> StepOutput:
        began = time.thread_time()
        output = super().collect(step)
        self.spent_seconds += time.thread_time() - began
        return output


def measure_all(num_rounds: int = NUM_ROUNDS) -> list[HostCost]:
    """One measurement per feedback mode and number of rows."""
    return [measure(count, feedback, num_rounds=num_rounds) for feedback in FEEDBACKS for count in ROWS]


def figures(costs: Sequence[HostCost]) -> tuple[Row, ...]:
    """The measurements as table rows."""
    busy = [
        Row(
            f"device busy, {cost.rows} rows, {cost.feedback} feedback",
            (cost.busy_share * 100,),
            "%",
            None if (target := BUSY_TARGETS.get((cost.feedback, cost.rows))) is None else at_least(target * 100),
            "steps of 8 ms, clock of CPU seconds",
            cost.load,
        )
        for cost in costs
    ]
    spent = [
        Row(
            f"host time per step, {cost.rows} rows, {cost.feedback} feedback",
            (cost.step_seconds * 1000,),
            "ms",
            None if (target := STEP_TARGETS.get(cost.rows)) is None else at_most(target),
            _step_note(cost),
            cost.load,
        )
        for cost in costs
    ]
    return (*busy, *spent)


def _step_note(cost: HostCost) -> str:
    aim = f"aim {STEP_AIMS[cost.rows]}; " if cost.rows in STEP_AIMS else ""
    return f"{aim}median {cost.median_step_seconds * 1000:.3f}; message {cost.message_seconds * 1000:.3f} more"


def measure(
    rows: int,
    feedback: TokenFeedback,
    *,
    num_rounds: int = NUM_ROUNDS,
    round_steps: int = ROUND_STEPS,
    step_milliseconds: float = STEP_MILLISECONDS,
    vocabulary_size: int = VOCABULARY_SIZE,
    form: Form | None = None,
    guides: Guides | None = None,
) -> HostCost:
    """Keep `rows` requests running for `num_rounds` times `round_steps` steps.

    form: of all answers.
    guides: what makes the masks of that form.
    """
    length = NUM_PROMPT_TOKENS + ANSWER_TOKENS[1]
    limits = BackendLimits(
        max_rows=rows,
        max_model_length=length,
        max_step_tokens=rows + 4 * NUM_PROMPT_TOKENS,
        max_prefill_rows=rows,
        block_size=BLOCK_SIZE,
        num_blocks=rows * -(-length // BLOCK_SIZE),
        shares_prefixes=True,
        sampling="Device" if form is None else "DeviceWithLogits",
        vocabulary_size=vocabulary_size,
        steps_in_flight=1 if feedback == "host" else 2,
        token_feedback=feedback,
    )
    phase = PhaseTimes(constant(step_milliseconds / 1000))
    clock = CpuClock()
    backend = TimedBackend(limits, StepTimes(decode=phase, prefill=phase), clock)
    engine = Engine(backend, clock=clock.now, guides=guides)
    arrivals = _requests(random.Random(rows), vocabulary_size, form)
    num_running = 0

    def turn() -> tuple[float, float]:
        """One step with all rows occupied; CPU seconds of the step and of its message."""
        nonlocal num_running
        for _ in range(rows - num_running):
            engine.add(next(arrivals))
        began = time.thread_time()
        events = engine.step()
        stepped = time.thread_time()
        sent = messages.Step(tuple(events), (), engine.stats)
        messages.encoder.encode(sent)
        ended = time.thread_time()
        num_running = rows - sum(event.finish_reason is not None for event in events)
        return stepped - began, ended - stepped

    turn()
    while (
        engine.stats.num_waiting or engine.stats.last_step is None or engine.stats.last_step.kind is not StepKind.DECODE
    ):
        turn()
    meter, timeline = Meter(), backend.timeline
    rounds: list[tuple[float, float, float, float]] = []
    for _ in range(num_rounds):
        began, busy, spent = timeline.free_at, timeline.busy_seconds, backend.spent_seconds
        steps, sent = map(sum, zip(*(turn() for _ in range(round_steps)), strict=True))
        share = (timeline.busy_seconds - busy) / (timeline.free_at - began)
        inside = backend.spent_seconds - spent
        rounds.append((steps / round_steps, inside / round_steps, sent / round_steps, share))
    step_seconds, backend_seconds, message_seconds, _ = min(rounds)
    return HostCost(
        rows=rows,
        feedback=feedback,
        busy_share=median(share for *_, share in rounds),
        step_seconds=step_seconds,
        backend_seconds=backend_seconds,
        message_seconds=message_seconds,
        median_step_seconds=median(step for step, *_ in rounds),
        load=meter.read(),
    )


def _requests(numbers: random.Random, vocabulary_size: int, form: Form | None) -> Iterator[Request]:
    ends = frozenset[int]() if form is None else frozenset({0})
    for number in itertools.count():
        prompt = tuple(numbers.randrange(vocabulary_size) for _ in range(NUM_PROMPT_TOKENS))
        sampling = Sampling(max_tokens=numbers.randint(*ANSWER_TOKENS), form=form, stop_token_ids=ends)
        yield Request(f"cmpl-{number:032x}", prompt, sampling)
