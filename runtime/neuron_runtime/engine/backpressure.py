"""Limits the waiting queue and estimates when a refused request can be retried, by the rate at which requests end.

`engine.loop` calls it for every request and after every step. Refused clients are expected back at their retry time, so
later ones get a later time. The caller passes all times; no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import Overloaded

DEFAULT_MAX_QUEUED_REQUESTS = 256
DEFAULT_MAX_QUEUED_TEXTS = 4096
"""Where vectors are computed: a request has many texts, each of them short work."""
MOST_QUEUED_TOKENS = 4 * 1024 * 1024
"""Maximum of the default bound: about 150 MB of token ids."""

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
"""OpenAI's clients ignore longer ones."""
ROUNDING_SECONDS = 0.1
"""A fraction of a second up to this is rounded down, because rates are estimates."""
SMOOTHING_SECONDS = 30.0
"""Time constant: measurements this old have a weight of 1/e."""
USUAL_REQUEST_SECONDS = 4.0
"""Assumed duration of a request before any measurement."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Maximum number of waiting requests, beyond those that fit the backend's rows, and of their prompt tokens.

    A queue without prompt tokens accepts one request of any length.
    """

    max_requests: int = DEFAULT_MAX_QUEUED_REQUESTS
    max_tokens: int = MOST_QUEUED_TOKENS


def queue_limits(limits: BackendLimits, max_requests: int = 0, max_tokens: int = 0) -> QueueLimits:
    """Replace zeros by defaults: 256 requests (4096 texts for vectors), and the tokens of as many longest ones, at most
    4 Mi."""
    max_requests = max_requests or (DEFAULT_MAX_QUEUED_TEXTS if limits.vector_size else DEFAULT_MAX_QUEUED_REQUESTS)
    return QueueLimits(
        max_requests, max_tokens or min((limits.max_rows + max_requests) * limits.max_model_length, MOST_QUEUED_TOKENS)
    )


class Rate:
    """An exponentially smoothed rate; starts at the expected value."""

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
    """Admission to the queue. now: seconds of any clock; all other times are of the same clock."""

    def __init__(self, limits: QueueLimits, max_rows: int, now: float) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._waiting: dict[str, int] = {}
        self.num_tokens = 0
        """Prompt tokens of waiting requests."""
        expected = max(max_rows, 1) / USUAL_REQUEST_SECONDS
        self._requests = Rate(expected)
        self._tokens = Rate(expected)
        self._num_ended = 0
        self._num_taken_up = 0
        self._turned_at = now
        self._expected: dict[int, tuple[int, int]] = {}
        """Number of refused requests and of their tokens, by the second of their retry."""

    def enter(self, request_id: str, num_tokens: int, num_live: int, now: float) -> None:
        """Queue a request, or raise Overloaded with the time until a retry should succeed.

        num_live: number of running and waiting requests.
        """
        limits = self._limits
        excess_requests = num_live + 1 - self._max_rows - limits.max_requests
        excess_tokens = self.num_tokens + num_tokens - limits.max_tokens
        if excess_requests > 0:
            what = f"{limits.max_requests} requests are waiting"
        elif excess_tokens > 0 and self.num_tokens:
            what = f"{self.num_tokens} prompt tokens are waiting, at most {limits.max_tokens} may"
        else:
            self._waiting[request_id] = num_tokens
            self.num_tokens += num_tokens
            return
        seconds = self._retry_seconds(excess_requests, excess_tokens, num_tokens, now)
        raise Overloaded(f"the queue is full ({what}); try again in {seconds} s", seconds)

    def take_up(self, request_id: str) -> None:
        """The first step of a request was scheduled."""
        self._num_taken_up += self.withdraw(request_id)

    def leave(self, request_ids: Sequence[str]) -> None:
        """Waiting or running requests ended; call it once per request."""
        self._num_ended += len(request_ids)
        for request_id in request_ids:
            self.withdraw(request_id)

    def resume(self, now: float) -> None:
        """Work starts after an idle time."""
        self._turned_at = now

    def turn(self, num_running: int, now: float) -> None:
        """A step was applied. With fewer running requests than rows, the measured rate is extrapolated to all rows."""
        seconds = max(now - self._turned_at, 0.0) * min(num_running / max(self._max_rows, 1), 1.0)
        self._requests.observe(self._num_ended, seconds)
        self._tokens.observe(self._num_taken_up, seconds)
        self._turned_at, self._num_ended, self._num_taken_up = now, 0, 0

    def withdraw(self, request_id: str) -> int:
        """The request does not wait any more; returns its prompt tokens, 0 if it did not wait."""
        num_tokens = self._waiting.pop(request_id, 0)
        self.num_tokens -= num_tokens
        return num_tokens

    def _retry_seconds(self, excess_requests: int, excess_tokens: int, num_tokens: int, now: float) -> int:
        """Whole seconds until the excess is gone, counting earlier refused requests that will retry before."""
        self._expected = {second: sent for second, sent in self._expected.items() if second > now}
        requests = excess_requests + sum(sent for sent, _ in self._expected.values())
        tokens = excess_tokens + sum(sent for _, sent in self._expected.values())
        # Clients with the same retry second come together, so no more than fit the queue may get the same one.
        per_second = min(self._requests.per_second, self._max_rows + self._limits.max_requests)
        tokens_per_second = min(self._tokens.per_second, self._limits.max_tokens)
        seconds = max(requests / per_second, tokens / max(tokens_per_second, 1.0))
        whole = min(max(math.ceil(seconds - ROUNDING_SECONDS), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        back = math.ceil(now + whole)
        known = self._expected.get(back, (0, 0))
        self._expected[back] = known[0] + 1, known[1] + num_tokens
        return whole
