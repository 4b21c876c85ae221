"""The processes of a node's ranks, for the supervisors of `serve` and `follow`: started, watched, and why they ended.

They are never restarted in place: a group loses its state with any of its ranks, and comes back as a whole.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from neuron_runtime.console import say
from neuron_runtime.distributed.layout import Layout
from neuron_runtime.errors import ExitCode, FatalError, ServingError
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.processes.children import RANK_MODULE, STOP_SECONDS, Child, Failures, start_child
from neuron_runtime.processes.lifeline import Deadline

SETTLE_SECONDS = 4.0
"""After one process of a group has ended, the others have this long to say why before they are killed."""
TICK_SECONDS = 0.05


class NodeRanks:
    """All ranks of this node; none without a group.

    engine: the process of rank 0, which the supervisor of `serve` starts and ends itself; None on other nodes.
    """

    def __init__(self, layout: Layout, settings: LocalSettings, run_dir: Path, engine: Child | None = None) -> None:
        self._layout = layout
        ranks = layout.own_ranks if layout.is_group else range(0)
        self._started = {
            rank: start_child(
                f"process of rank {rank}",
                RANK_MODULE,
                [*settings.arguments, f"--rank={rank}"],
                run_dir,
                f"deadline-rank-{rank}",
            )
            for rank in ranks
            if engine is None or rank > 0
        }
        self._all = self._started if engine is None or not ranks else {0: engine, **self._started}
        self._lifelines = {rank: Deadline(layout.lifeline(rank)) for rank in ranks}
        """Set by the thread of each that speaks to the others: if that does not run, the process is frozen."""
        self._frozen: dict[int, FatalError] = {}

    @property
    def live(self) -> bool:
        """Whether all of them do."""
        return all(child.lives for child in self._all.values())

    @property
    def failed(self) -> bool:
        """Whether one has ended otherwise than because the work was done."""
        return any(child.process.poll() for child in self._all.values())

    def kill_hung(self) -> None:
        """Call this periodically."""
        for child in self._started.values():
            child.kill_if_hung()
        for rank, lifeline in self._lifelines.items():
            if lifeline.hangs() and self._all[rank].lives:
                message = f"{self._layout.named(rank)}: silent for {self._layout.silence_seconds:g} s"
                self._frozen[rank] = FatalError(ExitCode.GROUP_MEMBER_LOST, message)
                say(f"{message}: killing it")
                self._all[rank].process.kill()
                self._all[rank].process.wait()

    def leave(self) -> None:
        """Ask the leader to end the group, because this node must be given up."""
        for child in self._started.values():
            child.process.send_signal(signal.SIGTERM)

    def failure(self, failures: Failures) -> FatalError:
        """Why a group ended of which at least one process has: what the one that failed by itself says, if any."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while any(child.lives for child in self._all.values()) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        ended = {rank: child for rank, child in self._all.items() if not child.lives}
        errors = (self._frozen.get(rank) or failures.of(child) for rank, child in ended.items())
        return min((self._weighed(error) for error in errors), key=lambda weighed: weighed[0])[1]

    def _weighed(self, error: ServingError) -> tuple[int, FatalError]:
        """What a process says of itself comes before that it vanished, and this before what others say of it."""
        if not isinstance(error, FatalError):
            return 1, FatalError(ExitCode.GROUP_MEMBER_LOST, str(error))
        if error.exit_code == ExitCode.GROUP_MEMBER_LOST:
            return 1 if error in self._frozen.values() else 2, error
        return 0, error

    def end(self, *, at_once: bool) -> None:
        """Wait for those that the leader has told to end, then kill what is left."""
        deadline = time.monotonic() + (0.0 if at_once else STOP_SECONDS)
        for child in self._started.values():
            while child.lives and time.monotonic() < deadline:
                time.sleep(TICK_SECONDS)
            child.process.kill()
            child.process.wait()
            child.close()
        for lifeline in self._lifelines.values():
            lifeline.close()
