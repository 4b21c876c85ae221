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


class RestartBudget:
    """Allows at most MAX_RESTARTS within RESTART_WINDOW_SECONDS."""

    def __init__(self) -> None:
        self._restarts: deque[float] = deque()

    def failure_to_end_with(
        self, failure: ServingError, now: float, codes: Set[ExitCode] = CURED_BY_RESTART
    ) -> ServingError | None:
        """None: restart it (counts a restart). Otherwise the error with which the command exits.

        A process that died without a record is restarted. An error with a record needs a change by a person or, for an
        unreachable hub that was retried already, time; the platform restarts with increasing delays.
        """
        cured = failure.exit_code in codes if isinstance(failure, FatalError) else isinstance(failure, BackendFailed)
        if not cured:
            return failure
        while self._restarts and now - self._restarts[0] >= RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            restarts = f"restarted {MAX_RESTARTS} times within {RESTART_WINDOW_SECONDS:.0f} s"
            message = f"{restarts}, and failed again: {failure}"
            return FatalError(ExitCode.RESTART_BUDGET_EXHAUSTED, message)
        self._restarts.append(now)
        return None
