"""An event loop whose clock jumps to the next timer as soon as nothing else can run: minutes of back-off pass at once,
and the order of events is the same on any machine. For code that waits only on the loop itself."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jump(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Advances the clock by the requested time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "deadlock: all tasks wait and no timer is set"
            self.now += max(timeout, 0.0)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run, in virtual time that starts at 0."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


def now() -> float:
    """Virtual seconds since the start."""
    return asyncio.get_running_loop().time()
