"""Reads request bodies within limits of size, time and memory, and processes long ones on a thread.

Used by the routes. All bodies that are being read or parsed count against one budget, so that many large ones cannot
exhaust memory; a body that arrives too slowly closes its connection. It does not parse bodies.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from neuron_runtime.errors import InvalidRequest, Overloaded

Made = TypeVar("Made")

DISCARDED_BODIES = 4
"""A body beyond this many times the maximum size closes the connection without being read to its end."""
BODIES_AT_ONCE = 4
"""Memory budget of all bodies, in bodies of maximum size."""
BODY_SECONDS = 60.0
"""Time limit for a short body to arrive."""
MIN_BYTES_PER_SECOND = 16 * 1024
"""Minimum rate of longer bodies."""
LONG_BODY_BYTES = 16 * 1024
"""Longer bodies are parsed and tokenized on a thread, so that streams do not stall."""
NUM_THREADS = 2
"""Long bodies processed concurrently; few, because a parsed body may take many times its size."""
NUM_WAITING_THREADS = 8
"""Bodies whose pictures are read concurrently; each may wait for another machine."""


class MustWait(Exception):
    """What the body asks for takes long: do it again on a thread that may wait."""


_thread = threading.local()


def check_may_wait() -> None:
    """Raises MustWait unless this is a thread that may wait."""
    if not getattr(_thread, "may_wait", False):
        raise MustWait


def _begin_waiting_thread() -> None:
    _thread.may_wait = True


class Bodies:
    """`max_bytes`: maximum size of one body; `seconds`: time limit for a short body to arrive."""

    def __init__(self, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="long-body")
        self._waiting_threads = ThreadPoolExecutor(
            NUM_WAITING_THREADS, thread_name_prefix="pictures", initializer=_begin_waiting_thread
        )

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """A whole body, which counts against the budget until the end of the context.

        A body that is somewhat too long is read to its end and dropped, because most clients read a response only then.

        Raises:
            InvalidRequest: too long (413), too slow (408), or compressed (415).
            ClientDisconnect: the client disconnected.
            Overloaded: the budget is exhausted.
        """
        parts: list[bytes] = []
        kept = 0
        try:
            async with aclosing(self._parts(request)) as incoming:
                async for part in incoming:
                    kept += len(part)
                    self._num_bytes += len(part)
                    if self._num_bytes > BODIES_AT_ONCE * self._max_bytes:
                        raise Overloaded(f"request bodies in memory have {self._num_bytes} bytes; try again later")
                    parts.append(part)
            whole = b"".join(parts)
            parts.clear()
            yield whole
        finally:
            self._num_bytes -= kept

    async def use(self, raw: bytes, use: Callable[[bytes], Made]) -> Made:
        """Returns `use(raw)`, computed on a thread if the body is long, or if it has to wait."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return use(raw) if len(raw) <= LONG_BODY_BYTES else await run(self._threads, use, raw)
        except MustWait:
            return await run(self._waiting_threads, use, raw)

    def close(self) -> None:
        for threads in (self._threads, self._waiting_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise InvalidRequest(
                f"Content-Encoding: {encoding} is not supported: send the body uncompressed",
                status=415,
                code="body_encoded",
            )
        max_bytes, size = self._max_bytes, 0
        if int(request.headers.get("content-length", "0")) > DISCARDED_BODIES * max_bytes:
            raise self._too_large()
        began = asyncio.get_running_loop().time()
        stream = aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout_at(began + self._seconds + size / MIN_BYTES_PER_SECOND):
                    part = await anext(stream)
            except StopAsyncIteration:
                break
            except TimeoutError as error:
                message = f"the body arrived too slowly: {size} bytes in {self._seconds:.0f} s"
                raise InvalidRequest(message, status=408, code="body_too_slow") from error
            size += len(part)
            if size <= max_bytes:
                yield part
            elif size > DISCARDED_BODIES * max_bytes:
                raise self._too_large()
        if size > max_bytes:
            raise self._too_large()

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(f"the body has more than {self._max_bytes} bytes", status=413, code="body_too_large")
