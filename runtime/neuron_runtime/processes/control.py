"""Messages from the supervisor to a front end, as JSON lines on its standard input.

End of file means that the supervisor has exited. The only reply is the front end's exit code.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class EngineStarted(msgspec.Struct, frozen=True, tag="engine_started"):
    """The n-th engine process has started. It may be ready only if a front end replaces an earlier one."""

    incarnation: int
    num_predecessors: int = 0
    """Number of earlier front ends, whichever engine they used."""
    pid: int | None = None
    began: float = 0.0
    """Monotonic clock at the beginning of this start: of the command, or of the restart of a process."""


class EngineEnded(msgspec.Struct, frozen=True, tag="engine_ended"):
    """The engine process has exited and lost all its requests; `message` is the reason."""

    message: str


class EngineStalled(msgspec.Struct, frozen=True, tag="engine_stalled"):
    """The engine process does not respond, and may respond again; an empty `message` says that it does."""

    message: str


class StartDrain(msgspec.Struct, frozen=True, tag="start_drain"):
    """Report unhealthy, admit requests for `delay_seconds`, let running ones finish within `seconds`, then exit."""

    delay_seconds: float
    seconds: float


Control = EngineStarted | EngineEnded | EngineStalled | StartDrain

decode_line: Callable[[bytes], Control] = msgspec.json.Decoder(Control).decode


def encode_line(message: Control) -> bytes:
    return msgspec.json.encode(message) + b"\n"
