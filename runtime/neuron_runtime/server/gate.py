"""The gate of a serving process: open, draining (unhealthy but still admitting), or closed.

The routes check it; the front end closes it during a drain. It counts running requests, so that a drain can wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from neuron_runtime.errors import Draining


class Gate:
    def __init__(self) -> None:
        self.draining = False
        """`/health` returns 503."""
        self.closed = False
        """No request is admitted."""
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def check_admits(self) -> None:
        """Raises Draining."""
        if self.closed:
            raise Draining("the server is shutting down: send this request to another replica")

    @contextmanager
    def running(self) -> Iterator[None]:
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    async def drain(
        self, delay_seconds: float, seconds: float, *, on_closed: Callable[[], None] = lambda: None
    ) -> bool:
        """Set draining, wait `delay_seconds`, close, wait for running requests; False if some still run at the end."""
        self.draining = True
        await asyncio.sleep(delay_seconds)
        self.closed = True
        on_closed()
        try:
            async with asyncio.timeout(seconds):
                # A request read before the gate closed may start just after the last one ends.
                while self.num_running:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
