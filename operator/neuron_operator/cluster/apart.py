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
    await _run(work, lambda job: asyncio.ensure_future(asyncio.to_thread(asyncio.run, job)))


async def run_on(loop: asyncio.AbstractEventLoop, work: Work) -> None:
    """Run `work` on the loop of another thread, and wait for its end, also when cancelled. Raises what it raises."""
    await _run(work, lambda job: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(job, loop)))


async def _run(work: Work, start: Callable[[Coroutine[Any, Any, None]], asyncio.Future[None]]) -> None:
    """`start` runs a coroutine on another loop."""
    here = asyncio.get_running_loop()
    started: asyncio.Future[Callable[[], object]] = here.create_future()

    async def cancellable() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        here.call_soon_threadsafe(started.set_result, partial(loop.call_soon_threadsafe, task.cancel))
        await work()

    ended = start(cancellable())
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        cancel = await started
        if not ended.done():
            cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ended
        raise
