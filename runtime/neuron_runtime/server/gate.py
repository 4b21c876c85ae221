"""The gate of a serving process: open, draining (not healthy, still admitting), closed.

Asked by the routes, moved by the front end when it is told to drain. Counts what runs, so that a drain can wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from neuron_runtime.errors import Draining


class Gate:
    def __init__(self) -> None:
        self.draining = False
        """Told to end: `/health` says so, that is all."""
        self.closed = False
        """Nothing new is admitted."""
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return self._num_running

    def check_admits(self) -> None:
        """Raises Draining."""
        if self.closed:
            raise Draining("shutting down: send this to another replica")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Entered for as long as a request is worked on."""
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def drain(self, delay_seconds: float, seconds: float) -> bool:
        """Say so, admit for a while, close, wait until nothing runs; False when something still does in the end."""
        self.draining = True
        await asyncio.sleep(delay_seconds)
        self.closed = True
        try:
            async with asyncio.timeout(seconds):
                # What was read before the gate closed may begin just as the last one ends.
                while self._num_running:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
