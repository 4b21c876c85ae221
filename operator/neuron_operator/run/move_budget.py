"""How many replicas have left failed nodes within the last minute, in all models together. Asked by `reconcile`.

It is in memory: a new leader begins as if its predecessor had used all but one move, evenly over the last minute. So a
replica on the node that took the leader with it moves at once, and many leaders one after another move few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60.0


class MoveBudget:
    """Single-threaded; `clock` is monotonic, in seconds."""

    def __init__(self, max_per_minute: int, clock: Callable[[], float]) -> None:
        self._max = max_per_minute
        self._clock = clock
        now = clock()
        self._times = deque(now - WINDOW_SECONDS * (1 - n / max_per_minute) for n in range(1, max_per_minute))
        self._tried: dict[str, float] = {}
        """When each pod was moved, or could not be: neither is repeated within the window."""

    @property
    def left(self) -> int:
        self._forget()
        return self._max - len(self._times)

    def take(self, uid: str) -> bool:
        """Whether the pod may be moved now; if so, that counts."""
        if self.left <= 0 or uid in self._tried:
            return False
        self._tried[uid] = self._clock()
        self._times.append(self._clock())
        return True

    def give_back(self) -> None:
        """The last move did not happen."""
        self._times.pop()

    def _forget(self) -> None:
        begin = self._clock() - WINDOW_SECONDS
        while self._times and self._times[0] <= begin:
            self._times.popleft()
        self._tried = {uid: time for uid, time in self._tried.items() if time > begin}
