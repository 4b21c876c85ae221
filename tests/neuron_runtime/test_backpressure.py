"""Bounds of the queue and retry times of refused clients, on a clock that only the test moves."""

from __future__ import annotations

import heapq
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_runtime.core import BackendLimits
from neuron_runtime.engine.backpressure import (
    MAX_RETRY_SECONDS,
    MOST_QUEUED_TOKENS,
    Backpressure,
    QueueLimits,
    Rate,
    queue_limits,
)
from neuron_runtime.errors import Overloaded


def backpressure(max_requests: int = 10, max_tokens: int = 1000, max_rows: int = 0) -> Backpressure:
    return Backpressure(QueueLimits(max_requests, max_tokens), max_rows, 0.0)


def test_requests_are_refused_beyond_rows_and_queue() -> None:
    queue = backpressure(max_requests=2, max_rows=3)
    for live in range(5):
        queue.enter(str(live), 1, live, 0.0)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        queue.enter("6", 1, 5, 0.0)


def test_waiting_tokens_are_bounded_but_an_empty_queue_accepts_any_request() -> None:
    queue = backpressure(max_tokens=100)
    queue.enter("a", 5000, 0, 0.0)
    with pytest.raises(Overloaded, match="5000 prompt tokens are waiting, at most 100 may"):
        queue.enter("b", 1, 1, 0.0)
    queue.take_up("a")
    queue.enter("b", 60, 1, 0.0)
    with pytest.raises(Overloaded):
        queue.enter("c", 41, 2, 0.0)
    queue.enter("c", 40, 2, 0.0)
    queue.leave(["b"])
    assert queue.num_tokens == 40
    queue.enter("d", 60, 2, 0.0)


@given(st.lists(st.tuples(st.sampled_from(["enter", "take", "leave"]), st.integers(0, 5), st.integers(1, 50))))
def test_waiting_tokens_are_those_of_queued_requests(
    moves: list[tuple[str, int, int]],
) -> None:
    queue, waiting = backpressure(max_requests=100, max_tokens=120), dict[str, int]()
    for move, number, tokens in moves:
        name = str(number)
        if move == "enter" and name not in waiting:
            if not waiting or sum(waiting.values()) + tokens <= 120:
                queue.enter(name, tokens, 0, 0.0)
                waiting[name] = tokens
            else:
                with pytest.raises(Overloaded):
                    queue.enter(name, tokens, 0, 0.0)
        elif move != "enter":
            queue.take_up(name) if move == "take" else queue.leave([name])
            waiting.pop(name, None)
        assert queue.num_tokens == sum(waiting.values())


def test_the_rate_is_measured_over_recent_time() -> None:
    rate = Rate(1.0, smoothing_seconds=10.0)
    assert rate.per_second == 1.0
    for _ in range(2000):
        rate.observe(5, 0.1)
    assert rate.per_second == pytest.approx(50.0, rel=0.01)
    for _ in range(1000):
        rate.observe(1, 0.1)
    assert rate.per_second == pytest.approx(10.0, rel=0.01)


def measured(queue: Backpressure, per_second: float, seconds: float = 200.0) -> float:
    """Completes requests of one token at this rate while others wait; returns the time afterwards."""
    now, step = 0.0, 0.05
    ended = 0.0
    while now < seconds:
        now += step
        ended += per_second * step
        queue.leave(["gone"] * int(ended))
        ended -= int(ended)
        queue.turn(1, now)
    return now


def refused(queue: Backpressure, now: float, num_tokens: int = 1) -> float:
    with pytest.raises(Overloaded) as info:
        queue.enter("x", num_tokens, 10, now)
    return info.value.retry_after_seconds


def test_each_refused_client_gets_the_time_after_those_refused_before() -> None:
    queue = backpressure()
    now = measured(queue, per_second=2.1)
    assert [refused(queue, now) for _ in range(7)] == [1, 1, 2, 2, 3, 3, 4]
    # Clients whose retry time has passed are no longer expected.
    assert refused(queue, now + 5.0) == 1


def test_idle_time_does_not_change_the_rate() -> None:
    queue = backpressure()
    now = measured(queue, per_second=2.1) + 10_000
    queue.resume(now)
    queue.turn(1, now + 0.5)
    queue.turn(0, now + 500)
    assert [refused(queue, now) for _ in range(5)] == [1, 1, 2, 2, 3]


def test_the_rate_scales_with_the_share_of_busy_rows() -> None:
    queue = backpressure(max_requests=2, max_rows=8)
    for turn in range(1, 2000):
        queue.leave(["one"])
        queue.turn(4, turn * 0.5)
    assert [refused(queue, 1000.0) for _ in range(9)] == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_the_retry_time_is_bounded() -> None:
    queue = backpressure()
    now = measured(queue, per_second=0.01)
    assert {refused(queue, now) for _ in range(50)} == {MAX_RETRY_SECONDS}
    fast = backpressure()
    assert refused(fast, measured(fast, per_second=1e4)) == 1


def test_the_default_token_bound_fits_all_rows_at_full_length_within_limits() -> None:
    small = BackendLimits(max_rows=4, max_model_length=100, max_step_tokens=100, num_blocks=40)
    assert queue_limits(small, max_requests=6) == QueueLimits(6, 1000)
    assert queue_limits(small).max_tokens == 260 * 100
    assert queue_limits(small, 0, 77) == QueueLimits(256, 77)
    large = BackendLimits(max_rows=4, max_model_length=131072, max_step_tokens=512, num_blocks=40)
    assert queue_limits(large).max_tokens == MOST_QUEUED_TOKENS


class Flood:
    """A server that completes `per_second` requests per second, and clients that return exactly at their retry time."""

    def __init__(self, per_second: float, capacity: int, num_clients: int) -> None:
        self.step = 1 / per_second
        self.queue = Backpressure(QueueLimits(capacity, 10**9), 0, 0.0)
        self.live: deque[str] = deque()
        self.attempts = [0] * num_clients
        self.coming = [(0.0, client) for client in range(num_clients)]
        self.served = 0

    def run(self) -> None:
        now = 0.0
        while self.served < len(self.attempts):
            now += self.step
            while self.coming and self.coming[0][0] < now:
                at, client = heapq.heappop(self.coming)
                self.attempts[client] += 1
                try:
                    self.queue.enter(str(client), 1, len(self.live), at)
                    self.live.append(str(client))
                except Overloaded as error:
                    heapq.heappush(self.coming, (at + error.retry_after_seconds, client))
            works = bool(self.live)
            if works:
                self.queue.leave([self.live.popleft()])
                self.served += 1
            self.queue.turn(works, now)


@given(
    per_second=st.floats(0.5, 100.0, allow_subnormal=False),
    capacity=st.integers(1, 50),
    num_clients=st.integers(1, 300),
)
def test_in_a_flood_every_client_that_honours_retry_after_is_served(
    per_second: float, capacity: int, num_clients: int
) -> None:
    flood = Flood(per_second, capacity, num_clients)
    flood.run()
    assert flood.served == num_clients
    # The rate is unknown when the flood starts. Clients beyond the longest retry time arrive in waves.
    waves = 1 + num_clients / (min(per_second, capacity) * MAX_RETRY_SECONDS)
    assert sum(flood.attempts) / num_clients <= 2 + 2 * waves, flood.attempts
