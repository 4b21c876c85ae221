"""Decides, when a child process has exited, whether the supervisor restarts it or exits itself, and with which code.

Pure functions of exit codes and times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from neuron_runtime.errors import BackendFailed, ExitCode, FatalError, ServingError

MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 600.0

CURED_BY_RESTART = frozenset({ExitCode.DEVICE_FAILED})
"""Exit codes after which an immediate restart may succeed; the other codes would occur again."""
CURED_BY_REPLACEMENT = CURED_BY_RESTART | {ExitCode.DEVICE_OUT_OF_MEMORY}
"""The same for a front end: what filled its memory ends with it, while an engine loads the same model again."""


def cured_by_restart(failure: ServingError, codes: Set[ExitCode] = CURED_BY_RESTART) -> bool:
    """Whether to restart a process at once after this failure.

    True if it died without a record. An error with a record needs a change by a person or, for an unreachable hub that
    was retried already, time; the platform restarts with increasing delays.
    """
    return failure.exit_code in codes if isinstance(failure, FatalError) else isinstance(failure, BackendFailed)


class RestartBudget:
    """Allows at most `max_restarts` within `window_seconds`."""

    def __init__(self, max_restarts: int = MAX_RESTARTS, window_seconds: float = RESTART_WINDOW_SECONDS) -> None:
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._restarts: deque[float] = deque()

    def failure_to_end_with(
        self, failure: ServingError, now: float, codes: Set[ExitCode] = CURED_BY_RESTART
    ) -> ServingError | None:
        """None: restart it (counts a restart). Otherwise the error with which the command exits."""
        if not cured_by_restart(failure, codes):
            return failure
        while self._restarts and now - self._restarts[0] >= self._window_seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            restarts = f"restarted {self._max_restarts} times within {self._window_seconds:.0f} s"
            message = f"{restarts}, and failed again: {failure}"
            return FatalError(ExitCode.RESTART_BUDGET_EXHAUSTED, message)
        self._restarts.append(now)
        return None
