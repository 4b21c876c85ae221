"""What to do when a child process has ended: start it again here, or end the command with which code.

Pure decisions of the supervisor over exit codes and points in time.
"""

from __future__ import annotations

import signal
from collections import deque

from neuron_runtime.errors import BackendFailed, ExitCode, FatalError, ServingError

MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 600.0

CURED_BY_RESTART = frozenset({ExitCode.DEVICE_FAILED})
"""Named codes after which the same command may succeed at once. Every other named code would come back."""


def cured_by_restart(failure: ServingError) -> bool:
    """Whether a process that ended like this is worth starting again at once.

    One that died without a word is. One that named what it lacks is not: somebody must change something, or (an
    unreachable hub, tried for a while already) time must pass, which the platform counts, with growing pauses.
    """
    return (
        failure.exit_code in CURED_BY_RESTART if isinstance(failure, FatalError) else isinstance(failure, BackendFailed)
    )


class RestartBudget:
    """Restarts in place: at most `max_restarts` within `window_seconds`."""

    def __init__(self, max_restarts: int = MAX_RESTARTS, window_seconds: float = RESTART_WINDOW_SECONDS) -> None:
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._restarts: deque[float] = deque()

    def failure_to_end_with(self, failure: ServingError, now: float) -> ServingError | None:
        """None: start it again (counted). Else the error to end the command with.

        failure: the error that a process named, or BackendFailed where it died without naming one.
        """
        if not cured_by_restart(failure):
            return failure
        while self._restarts and now - self._restarts[0] >= self._window_seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            restarts = f"restarted {self._max_restarts} times within {self._window_seconds:.0f} s"
            message = f"{restarts}, and it ended again: {failure}"
            return FatalError(ExitCode.RESTART_BUDGET_EXHAUSTED, message)
        self._restarts.append(now)
        return None


def describe_exit(name: str, return_code: int) -> str:
    """How a process died that left no record."""
    if return_code >= 0:
        return f"the {name} ended with exit code {return_code}"
    try:
        killer = signal.Signals(-return_code).name
    except ValueError:
        killer = f"signal {-return_code}"
    hint = " (often: the machine ran out of memory)" if killer == "SIGKILL" else ""
    return f"the {name} was ended by {killer}{hint}"
