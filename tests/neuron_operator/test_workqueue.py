"""The keyed queue: no key is lost or runs twice at once, and failures back off."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable

from hypothesis import given
from hypothesis import strategies as st

from helpers import virtual_time
from neuron_operator.cluster.workqueue import Backoff, WorkQueue


async def work_until_idle(
    queue: WorkQueue[str], handle: Callable[[str], Awaitable[None]], *, num_workers: int = 2, seconds: float = 1e6
) -> None:
    """Runs workers for `seconds` of virtual time."""
    workers = [asyncio.create_task(queue.work(handle)) for _ in range(num_workers)]
    await asyncio.sleep(seconds)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


def test_a_key_added_many_times_before_it_starts_runs_once() -> None:
    runs: list[str] = []

    async def handle(key: str) -> None:
        runs.append(key)

    async def main() -> None:
        queue = WorkQueue[str]()
        for key in "abaab":
            queue.add(key)
        assert len(queue) == 2
        await work_until_idle(queue, handle)
        assert queue.is_idle

    virtual_time.run(main())
    assert runs == ["a", "b"]


def test_a_key_added_during_its_run_only_for_what_the_run_did_itself_does_not_run_again() -> None:
    runs: list[str] = []

    async def main() -> None:
        queue = WorkQueue[str]()

        async def handle(key: str) -> None:
            runs.append(key)
            if runs.count(key) == 1:
                queue.add(key, "own")
                if key == "b":
                    queue.add(key, "other")
                await asyncio.sleep(1.0)
                queue.settle(key, {"own", "later"})

        queue.add("a")
        queue.add("b", "own")
        await work_until_idle(queue, handle)
        assert queue.is_idle

    virtual_time.run(main())
    assert sorted(runs) == ["a", "b", "b"]


def test_a_key_added_during_its_run_runs_once_more_afterwards() -> None:
    running: Counter[str] = Counter()
    ends: list[float] = []

    async def main() -> None:
        queue = WorkQueue[str]()

        async def handle(key: str) -> None:
            running[key] += 1
            assert running[key] == 1
            if not ends:
                queue.add(key)
                queue.add(key)
            await asyncio.sleep(1.0)
            running[key] -= 1
            ends.append(virtual_time.now())

        queue.add("a")
        await work_until_idle(queue, handle, num_workers=4)

    virtual_time.run(main())
    assert ends == [1.0, 2.0]


@given(
    adds=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), max_size=30),
    seconds=st.floats(0.01, 3),
    num_workers=st.integers(1, 4),
)
def test_every_add_is_followed_by_a_complete_run(
    adds: list[tuple[str, float]], seconds: float, num_workers: int
) -> None:
    added: list[tuple[str, float]] = []
    runs: list[tuple[str, float, float]] = []

    async def main() -> None:
        queue = WorkQueue[str]()

        async def handle(key: str) -> None:
            start = virtual_time.now()
            await asyncio.sleep(seconds)
            runs.append((key, start, virtual_time.now()))

        async def add(key: str, at: float) -> None:
            await asyncio.sleep(at)
            queue.add(key)
            added.append((key, virtual_time.now()))

        await asyncio.gather(work_until_idle(queue, handle, num_workers=num_workers), *(add(*a) for a in adds))
        assert queue.is_idle

    virtual_time.run(main())
    for key, at in added:
        assert any(ran == key and start >= at for ran, start, _ in runs)
    for key in "abc":
        mine = sorted((start, end) for ran, start, end in runs if ran == key)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
    assert len(runs) <= len(adds)


def test_failures_double_the_back_off_up_to_a_limit_and_a_success_resets_it() -> None:
    starts: list[float] = []

    async def main() -> None:
        queue = WorkQueue[str](Backoff(first_seconds=1.0, max_seconds=8.0), draw=lambda: 1.0)

        async def handle(key: str) -> None:
            starts.append(virtual_time.now())
            if len(starts) == 6:
                queue.forget(key)
            if len(starts) < 8:
                queue.retry(key)

        queue.add("a")
        await work_until_idle(queue, handle)

    virtual_time.run(main())
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == [1, 2, 4, 8, 8, 1, 2]


@given(failures=st.integers(1, 100), draw=st.floats(0, 1, exclude_max=True))
def test_the_back_off_is_drawn_from_its_upper_half(failures: int, draw: float) -> None:
    whole = min(60.0, 0.25 * 2.0 ** (failures - 1))
    assert whole / 2 <= Backoff().delay_seconds(failures, draw) <= whole


def test_a_change_shortens_a_back_off_but_not_a_retry_after() -> None:
    starts: dict[str, list[float]] = {"a": [], "b": []}

    async def main() -> None:
        queue = WorkQueue[str](Backoff(first_seconds=100.0), draw=lambda: 1.0)

        async def handle(key: str) -> None:
            starts[key].append(virtual_time.now())
            if len(starts[key]) == 1:
                queue.retry(key, hold_seconds=30.0 if key == "b" else 0.0)

        async def change() -> None:
            await asyncio.sleep(5.0)
            queue.add("a")
            queue.add("b")

        queue.add("a")
        queue.add("b")
        await asyncio.gather(work_until_idle(queue, handle), change())

    virtual_time.run(main())
    assert starts == {"a": [0.0, 5.0], "b": [0.0, 30.0]}


def test_a_change_during_a_run_does_not_end_the_hold_of_its_retry() -> None:
    starts: list[float] = []

    async def main() -> None:
        queue = WorkQueue[str](Backoff(first_seconds=1.0), draw=lambda: 1.0)

        async def handle(key: str) -> None:
            starts.append(virtual_time.now())
            if len(starts) == 1:
                queue.add(key)
                queue.retry(key, hold_seconds=30.0)

        queue.add("a")
        await work_until_idle(queue, handle)

    virtual_time.run(main())
    assert starts == [0.0, 30.0]


def test_the_earliest_delay_counts_and_a_run_before_it_cancels_it() -> None:
    starts: list[float] = []

    async def main() -> None:
        queue = WorkQueue[str]()

        async def handle(key: str) -> None:
            starts.append(virtual_time.now())

        queue.add_after("a", 20.0)
        queue.add_after("a", 10.0)
        queue.add_after("a", 15.0)
        await work_until_idle(queue, handle, seconds=12.0)
        queue.add_after("a", 10.0)
        queue.add("a")
        await work_until_idle(queue, handle, seconds=100.0)

    virtual_time.run(main())
    assert starts == [10.0, 12.0]


def test_runs_that_never_wait_let_other_tasks_of_the_event_loop_go_on() -> None:
    """As the passes after a restart, which write nothing."""
    turns_at: list[int] = []

    async def main() -> None:
        queue, turn = WorkQueue[str](), 0

        async def handle(key: str) -> None:
            turns_at.append(turn)

        for key in range(100):
            queue.add(str(key))
        worker = asyncio.create_task(queue.work(handle))
        while not queue.is_idle:
            turn += 1
            await asyncio.sleep(0)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)

    virtual_time.run(main())
    assert len(turns_at) == len(set(turns_at)) == 100


def test_a_cancelled_worker_returns_its_key_to_the_queue() -> None:
    async def main() -> None:
        queue = WorkQueue[str]()

        async def hang(key: str) -> None:
            queue.add(key)
            await asyncio.Event().wait()

        queue.add("a")
        worker = asyncio.create_task(queue.work(hang))
        await asyncio.sleep(1.0)
        assert not queue.is_idle
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker
        assert len(queue) == 1

    virtual_time.run(main())


def test_a_party_with_many_keys_holds_up_nobody_elses() -> None:
    runs: list[str] = []
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def handle(key: str) -> None:
        party = key[0]
        running[party] += 1
        most[party] = max(most[party], running[party])
        runs.append(key)
        await asyncio.sleep(10.0)
        running[party] -= 1

    async def main() -> None:
        queue = WorkQueue[str](party_of=lambda key: key[0], max_running=2)
        for number in range(100):
            queue.add(f"a{number}")
        workers = [asyncio.create_task(queue.work(handle)) for _ in range(4)]
        await asyncio.sleep(1.0)
        queue.add("b0")  # finds a free worker, although 98 wait
        await asyncio.sleep(1.0)
        assert runs == ["a0", "a1", "b0"]
        for number in range(1, 10):
            queue.add(f"b{number}")
            queue.add(f"c{number}")
        await asyncio.sleep(70.0)
        assert [sum(run[0] == party for run in runs) >= 8 for party in "bc"] == [True, True]
        await asyncio.sleep(1000.0)
        assert queue.is_idle
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    virtual_time.run(main())
    assert len(runs) == len(set(runs)) == 100 + 10 + 9
    assert max(most.values()) == 2
