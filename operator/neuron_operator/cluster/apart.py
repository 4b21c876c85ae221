"""Runs a coroutine on an event loop in a thread of its own, and lets it run others on the loop that it came from. `run`
keeps the Lease so: a long pass must not delay a renewal. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

Work = Callable[[], Coroutine[Any, Any, None]]


async def run_apart(work: Work) -> None:
    """Run `work` on a loop in another thread, and wait for its end, also when cancelled. Raises what it raises."""
    here = asyncio.get_running_loop()
    started: asyncio.Future[Callable[[], object]] = here.create_future()

    async def cancellable() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        here.call_soon_threadsafe(started.set_result, partial(loop.call_soon_threadsafe, task.cancel))
        await work()

    ended = asyncio.ensure_future(asyncio.to_thread(asyncio.run, cancellable()))
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        await _cancelled(ended, await started)
        raise


async def run_on(loop: asyncio.AbstractEventLoop, work: Work) -> None:
    """Run `work` on the loop of another thread, and wait for its end, also when cancelled. Raises what it raises."""
    here = asyncio.get_running_loop()
    ended: asyncio.Future[None] = here.create_future()
    tasks: list[asyncio.Task[None]] = []

    def report(task: asyncio.Task[None]) -> None:
        here.call_soon_threadsafe(_end, ended, task)

    def start() -> None:
        tasks.append(loop.create_task(work()))
        tasks[0].add_done_callback(report)

    def cancel() -> None:
        tasks[0].cancel()

    loop.call_soon_threadsafe(start)
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        await _cancelled(ended, partial(loop.call_soon_threadsafe, cancel))
        raise


async def _cancelled(ended: asyncio.Future[None], cancel: Callable[[], object]) -> None:
    if not ended.done():
        cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ended


def _end(future: asyncio.Future[None], task: asyncio.Task[None]) -> None:
    if task.cancelled():
        future.cancel()
    elif error := task.exception():
        future.set_exception(error)
    else:
        future.set_result(None)
