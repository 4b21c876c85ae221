"""A coroutine on a thread of its own: it goes on while the first loop is busy, and both ends are waited for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from neuron_operator.cluster.apart import run_apart, run_on


async def forever() -> None:
    await asyncio.Event().wait()


def test_it_goes_on_while_the_loop_that_started_it_is_blocked() -> None:
    async def main() -> None:
        begun, went_on, blocked = threading.Event(), threading.Event(), threading.Event()

        async def work() -> None:
            begun.set()
            await asyncio.to_thread(blocked.wait)
            went_on.set()

        task = asyncio.create_task(run_apart(work))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        blocked.set()
        assert went_on.wait(60), "this waits on the thread of the loop"
        await task

    asyncio.run(main())


@pytest.mark.parametrize("where", ["apart", "back"])
def test_an_exception_is_raised_by_whoever_waits(where: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def fail() -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await run_apart(fail if where == "apart" else lambda: run_on(loop, fail))

    asyncio.run(main())


def test_cancelling_ends_what_it_runs_on_both_threads_before_it_returns() -> None:
    async def main() -> None:
        loop, ends, working = asyncio.get_running_loop(), [], asyncio.Event()

        async def work() -> None:
            working.set()
            try:
                await forever()
            finally:
                await asyncio.sleep(0)
                ends.append("work")

        async def lead() -> None:
            try:
                await run_on(loop, work)
            finally:
                ends.append("lease")

        task = asyncio.create_task(run_apart(lead))
        await working.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["work", "lease"]

    asyncio.run(main())


def test_work_that_is_cancelled_before_it_starts_ends_too() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def lead() -> None:
            task = asyncio.create_task(run_on(loop, forever))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        await run_apart(lead)

    asyncio.run(main())
