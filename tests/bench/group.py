"""Time that a group adds to each step of the leader, with followers as processes on this machine.

Used by the suite. The device is simulated in real time; each follower has one of its own, and the sockets are those of
`serve`. Added is the time inside `ReplicatedBackend` beyond that inside the leader's own backend: sending the step, and
waiting for those who have not acknowledged it when it is done here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.report import Load, Meter, Row, at_most
from helpers.groups import Unwatched
from neuron_runtime.backend.simulated.device import SimulatedBackend, WallClock
from neuron_runtime.backend.simulated.step_times import PhaseTimes, StepTimes, constant
from neuron_runtime.backend_protocol import Backend, ProgressCallback, StepTime
from neuron_runtime.core import BackendLimits, Batch, Late, Request, Sampling, StepKind, StepOutput
from neuron_runtime.distributed.control import LeaderControl
from neuron_runtime.distributed.layout import Layout, read_secret
from neuron_runtime.distributed.replicated import ReplicatedBackend, StepChannel
from neuron_runtime.distributed.wire import Facts, Keys
from neuron_runtime.engine.loop import Engine
from neuron_runtime.processes.group import Following
from neuron_runtime.processes.run_dir import made_run_dir

RANKS = (1, 2, 4)
ROWS = 64
STEP_SECONDS = 0.008
NUM_STEPS = 300
AIM_MILLISECONDS = 0.3
FACTS = Facts(config="", weights="")
LIMITS = BackendLimits(
    max_rows=ROWS,
    max_model_length=1024,
    max_step_tokens=1024,
    max_prefill_rows=ROWS,
    block_size=32,
    num_blocks=ROWS * 32,
    sampling="Device",
    vocabulary_size=128_256,
    steps_in_flight=2,
    token_feedback="device",
)


@dataclass(frozen=True, slots=True)
class GroupCost:
    """seconds: median per step. worst_seconds: of the slowest percent."""

    num_ranks: int
    seconds: float
    worst_seconds: float
    load: Load


class Stopwatch:
    """A backend that sums the time inside its calls."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.seconds = 0.0

    @property
    def limits(self) -> BackendLimits:
        return self._backend.limits

    def warm_up(self, progress: ProgressCallback) -> Sequence[StepTime]:
        return tuple(self._backend.warm_up(progress))

    def graph(self, batch: Batch) -> str:
        return self._backend.graph(batch)

    def launch(self, batch: Batch) -> None:
        began = time.perf_counter()
        self._backend.launch(batch)
        self.seconds += time.perf_counter() - began

    def sample(self, step: int, late: Late | None) -> None:
        began = time.perf_counter()
        self._backend.sample(step, late)
        self.seconds += time.perf_counter() - began

    def collect(self, step: int) -> StepOutput:
        began = time.perf_counter()
        output = self._backend.collect(step)
        self.seconds += time.perf_counter() - began
        return output

    def close(self) -> None:
        self._backend.close()


def measure_all(num_steps: int = NUM_STEPS) -> list[GroupCost]:
    return [measure(num_ranks, num_steps) for num_ranks in RANKS]


def figures(costs: Sequence[GroupCost]) -> tuple[Row, ...]:
    return tuple(
        Row(
            f"time a group of {cost.num_ranks} ranks adds per step" if cost.num_ranks > 1 else "the same, one rank",
            (cost.seconds * 1000,),
            "ms",
            at_most(AIM_MILLISECONDS),
            f"{ROWS} rows, median; slowest percent {cost.worst_seconds * 1000:.2f}",
            cost.load,
        )
        for cost in costs
    )


def measure(num_ranks: int, num_steps: int) -> GroupCost:
    own = Stopwatch(simulated())
    meter = Meter()
    with replicated(own, num_ranks) as backend:
        whole = Stopwatch(backend)
        engine = Engine(whole)
        for number in range(ROWS):
            engine.add(Request(f"cmpl-{number:032x}", (number,) * 64, Sampling(max_tokens=900)))
        while (
            engine.stats.num_waiting or engine.stats.last_step is None or engine.stats.last_step.kind != StepKind.DECODE
        ):
            engine.step()
        added = []
        for _ in range(num_steps):
            before = whole.seconds - own.seconds
            engine.step()
            added.append(whole.seconds - own.seconds - before)
    added.sort()
    return GroupCost(num_ranks, median(added), added[int(len(added) * 0.99)], meter.read())


def simulated() -> SimulatedBackend:
    phase = PhaseTimes(constant(STEP_SECONDS))
    return SimulatedBackend(LIMITS, StepTimes(decode=phase, prefill=phase), WallClock())


@contextmanager
def replicated(backend: Backend, num_ranks: int) -> Iterator[Backend]:
    """The backend of a group that serves; for one rank the backend itself."""
    if num_ranks == 1:
        yield backend
        return
    with made_run_dir() as run_dir, ExitStack() as stack:
        layout = Layout(size=num_ranks).in_folder(run_dir)
        for rank in range(1, num_ranks):
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", "bench.group", str(run_dir), str(rank)]
            follower = stack.enter_context(subprocess.Popen(command, env=environment))
            stack.callback(follower.kill)
        channel = StepChannel(layout, Keys(read_secret(layout)))
        stack.callback(channel.close)
        control = LeaderControl(layout, FACTS, channel.addresses, on_end=_end, lifeline=Unwatched())
        control.start()
        stack.callback(control.finish, None)
        control.wait_joined()
        group = ReplicatedBackend(backend, channel, control)
        group.warm_up(lambda stage, share: None)
        yield group


def follow(run_dir: Path, rank: int) -> None:
    """What a follower's process does."""
    with Following(Layout.of_folder(run_dir), rank, FACTS, _end) as following:
        following.meet()
        following.follow(simulated(), idle=lambda: None)


def _end(error: Exception) -> None:
    print(f"bench: {error}", file=sys.stderr)
    os._exit(1)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), int(sys.argv[2]))
