"""A keyed queue for level-triggered work: a key waits once, never runs twice at a time, and backs off on failure.

Reflectors add keys, workers take them: in turns from each party (the namespace of a model), so that who adds many waits
longer for them than others for their few. It knows nothing of Kubernetes; its only clock is the event loop's.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Set
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
_NOBODY = object()


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait after the n-th failure in a row: exponential, capped, with half of it drawn at random."""

    first_seconds: float = 0.25
    max_seconds: float = 60.0

    def delay_seconds(self, num_failures: int, draw: float) -> float:
        """`draw` is a random number in [0, 1)."""
        whole = min(self.max_seconds, self.first_seconds * 2.0 ** min(num_failures - 1, 32))
        return whole * (0.5 + draw / 2)


@dataclass(eq=False)
class WorkQueue(Generic[Key]):
    """Single-threaded: all methods are called on one event loop."""

    backoff: Backoff = Backoff()
    draw: Callable[[], float] = random.random
    _: KW_ONLY
    party_of: Callable[[Key], Hashable] = lambda key: None
    max_running: int | None = None
    """Keys of one party that run at the same time; None: as many as there are workers."""

    def __post_init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[Key]] = OrderedDict()
        """By party, whose turn is next first. None is empty."""
        self._dirty: dict[Key, set[Hashable]] = {}
        """Keys that must run: those in `_waiting`, and running keys that were added again; and why."""
        self._running: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._held_until: dict[Key, float] = {}
        self._num_failures: dict[Key, int] = {}
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Keys waiting for a worker."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs; timers may be pending."""
        return not self._dirty and not self._running

    def add(self, key: Key, cause: Hashable = None) -> None:
        """The key will run once after this call, however often it was added before it starts. `settle` can withdraw the
        cause."""
        wait_seconds = self._held_until.get(key, 0.0) - asyncio.get_running_loop().time()
        if wait_seconds > 0:
            self.add_after(key, wait_seconds)
            return
        self._held_until.pop(key, None)
        if key not in self._dirty:
            self._dirty[key] = set()
            if key not in self._running:
                self._append(key)
        self._dirty[key].add(cause)

    def settle(self, key: Key, causes: Set[Hashable]) -> None:
        """The running key has seen to these causes: they alone do not make it run again."""
        left = self._dirty.get(key)
        if left is not None:
            left -= causes
            if not left:
                del self._dirty[key]

    def add_after(self, key: Key, seconds: float) -> None:
        """Add the key later; of several calls the earliest counts. A run that starts earlier cancels it."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._timer_rang, key)

    def retry(self, key: Key, *, hold_seconds: float = 0.0) -> None:
        """Add a failed key after its back-off. A change may run it earlier, but not within `hold_seconds`."""
        failures = self._num_failures[key] = self._num_failures.get(key, 0) + 1
        if hold_seconds > 0:
            self._held_until[key] = asyncio.get_running_loop().time() + hold_seconds
            self._dirty.pop(key, None)  # added while it ran
        self.add_after(key, max(hold_seconds, self.backoff.delay_seconds(failures, self.draw())))

    def forget(self, key: Key) -> None:
        """The key succeeded: reset its back-off."""
        self._num_failures.pop(key, None)

    async def work(self, handle: Callable[[Key], Awaitable[None]]) -> None:
        """One worker: run key after key until cancelled. `handle` must not raise; it calls `retry` or `forget`."""
        while True:
            key = await self._take()
            try:
                await handle(key)
            finally:
                self._running.discard(key)
                if key in self._dirty:
                    self._append(key)
                self._arrived.set()  # its party may have more in work again
            # A run may end without having waited. Hundreds of them would hold up answers and the requests of others.
            await asyncio.sleep(0)

    async def _take(self) -> Key:
        while (party := next(filter(self._may_run, self._waiting), _NOBODY)) is _NOBODY:
            self._arrived.clear()
            await self._arrived.wait()
        keys = self._waiting[party]
        key = keys.popleft()
        if keys:
            self._waiting.move_to_end(party)
        else:
            del self._waiting[party]
        del self._dirty[key]
        self._running.add(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        return key

    def _may_run(self, party: Hashable) -> bool:
        return self.max_running is None or sum(self.party_of(key) == party for key in self._running) < self.max_running

    def _append(self, key: Key) -> None:
        self._waiting.setdefault(self.party_of(key), deque()).append(key)
        self._arrived.set()

    def _timer_rang(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)
