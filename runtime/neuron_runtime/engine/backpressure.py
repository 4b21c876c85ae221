"""How much may wait, and when somebody who was sent away will find room.

Asked by `engine.loop` for every request, and told of every turn. The rate at which room becomes free is measured all
the time, as if all rows were busy; who was sent away with a time is expected back then, so the next one is given a
later time. Points in time come from the caller; no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import Overloaded

DEFAULT_MAX_QUEUED_REQUESTS = 256
MOST_QUEUED_TOKENS = 4 * 1024 * 1024
"""Of a default bound: some 150 MB of numbers."""

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
"""OpenAI's clients take no notice of a longer one."""
ROUNDING_SECONDS = 0.1
"""So little beyond a whole second does not cost another one: rates are estimates."""
SMOOTHING_SECONDS = 30.0
"""What was measured so long ago counts a third of what is measured now."""
USUAL_REQUEST_SECONDS = 4.0
"""How long a request is taken to run before any was measured."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait, of requests beyond those that fit into the backend's rows, and of prompt tokens.

    A queue without any prompt tokens takes one request whatever its length.
    """

    max_requests: int = DEFAULT_MAX_QUEUED_REQUESTS
    max_tokens: int = MOST_QUEUED_TOKENS


def queue_limits(limits: BackendLimits, max_requests: int = 0, max_tokens: int = 0) -> QueueLimits:
    """Where zero stands for the default: 256 requests, and tokens for as many of the longest, at most 4 Mi."""
    max_requests = max_requests or DEFAULT_MAX_QUEUED_REQUESTS
    return QueueLimits(
        max_requests, max_tokens or min((limits.max_rows + max_requests) * limits.max_model_length, MOST_QUEUED_TOKENS)
    )


class Rate:
    """Something per second, recent seconds before older ones; as much as is expected until it was measured."""

    def __init__(self, expected_per_second: float, smoothing_seconds: float = SMOOTHING_SECONDS) -> None:
        self._smoothing_seconds = smoothing_seconds
        self._count = expected_per_second
        self._seconds = 1.0

    def observe(self, count: float, seconds: float) -> None:
        keeps = math.exp(-seconds / self._smoothing_seconds)
        self._count = self._count * keeps + count
        self._seconds = self._seconds * keeps + seconds

    @property
    def per_second(self) -> float:
        return self._count / self._seconds


class Backpressure:
    """The queue as far as admission looks at it.

    Args:
        now: any clock's time in seconds; all other times are of the same clock.
    """

    def __init__(self, limits: QueueLimits, max_rows: int, now: float) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._waiting: dict[str, int] = {}
        self._num_tokens = 0
        expected = max(max_rows, 1) / USUAL_REQUEST_SECONDS
        self._requests = Rate(expected)
        self._tokens = Rate(expected)
        self._num_ended = 0
        self._num_taken_up = 0
        self._turned_at = now
        self._expected: dict[int, tuple[int, int]] = {}
        """Requests and tokens that were sent away, by the second in which they may be back."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of requests that no step has taken up."""
        return self._num_tokens

    def enter(self, request_id: str, num_tokens: int, num_live: int, now: float) -> None:
        """Let a request wait, or raise Overloaded with the time after which there should be room.

        num_live: requests that run or wait already.
        """
        limits = self._limits
        excess_requests = num_live + 1 - self._max_rows - limits.max_requests
        excess_tokens = self._num_tokens + num_tokens - limits.max_tokens
        if excess_requests > 0:
            what = f"{limits.max_requests} requests wait"
        elif excess_tokens > 0 and self._num_tokens:
            what = f"{self._num_tokens} prompt tokens wait, with these there would be more than {limits.max_tokens}"
        else:
            self._waiting[request_id] = num_tokens
            self._num_tokens += num_tokens
            return
        seconds = self._retry_seconds(excess_requests, excess_tokens, num_tokens, now)
        raise Overloaded(f"the queue is full ({what}); try again in {seconds} s", seconds)

    def take_up(self, request_id: str) -> None:
        """A step has it."""
        self._num_taken_up += self._leave(request_id)

    def leave(self, request_ids: Sequence[str]) -> None:
        """These ended, wherever they were; each is said once."""
        self._num_ended += len(request_ids)
        for request_id in request_ids:
            self._leave(request_id)

    def resume(self, now: float) -> None:
        """There was nothing to do until now."""
        self._turned_at = now

    def turn(self, num_running: int, now: float) -> None:
        """A step was applied while so many ran. What fewer of them than rows achieve is taken as a part of the rate."""
        seconds = max(now - self._turned_at, 0.0) * min(num_running / max(self._max_rows, 1), 1.0)
        self._requests.observe(self._num_ended, seconds)
        self._tokens.observe(self._num_taken_up, seconds)
        self._turned_at, self._num_ended, self._num_taken_up = now, 0, 0

    def _leave(self, request_id: str) -> int:
        num_tokens = self._waiting.pop(request_id, 0)
        self._num_tokens -= num_tokens
        return num_tokens

    def _retry_seconds(self, excess_requests: int, excess_tokens: int, num_tokens: int, now: float) -> int:
        """Whole seconds until that is free (where negative, it is), beside what those need who come back before."""
        self._expected = {second: sent for second, sent in self._expected.items() if second > now}
        requests = excess_requests + sum(sent for sent, _ in self._expected.values())
        tokens = excess_tokens + sum(sent for _, sent in self._expected.values())
        # Those who are told the same second come together: no more than the queue holds.
        per_second = min(self._requests.per_second, self._max_rows + self._limits.max_requests)
        tokens_per_second = min(self._tokens.per_second, self._limits.max_tokens)
        seconds = max(requests / per_second, tokens / max(tokens_per_second, 1.0))
        whole = min(max(math.ceil(seconds - ROUNDING_SECONDS), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        back = math.ceil(now + whole)
        known = self._expected.get(back, (0, 0))
        self._expected[back] = known[0] + 1, known[1] + num_tokens
        return whole
