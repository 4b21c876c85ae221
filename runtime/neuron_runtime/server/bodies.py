"""Bodies of requests: read within bounds of size, time and memory, and worked on where streams do not wait for it.

Used by the routes. All bodies that are being read or parsed count against one budget, so that many large ones cannot
take all memory; one that trickles in ends its connection. What is in a body is not looked at here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from neuron_runtime.errors import InvalidRequest, Overloaded

Made = TypeVar("Made")

DISCARDED_BODIES = 4
"""Beyond this many times the largest body a connection is closed without reading on."""
BODIES_AT_ONCE = 4
"""So many of the largest bodies may be in memory together."""
BODY_SECONDS = 60.0
"""How long a short body may take to arrive."""
MIN_BYTES_PER_SECOND = 16 * 1024
"""Longer ones may take longer, but must keep this pace."""
LONG_BODY_BYTES = 16 * 1024
"""Bodies beyond this are parsed and tokenized on a thread, so that streams do not stall."""
NUM_THREADS = 2
"""Long bodies that are worked on at a time: parsed, one may take many times its size."""


class Bodies:
    """
    Args:
        max_bytes: of one body.
        seconds: how long a short one may take to arrive.
    """

    def __init__(self, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="long-body")

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """A whole body, which counts against the budget until the context is left.

        A body that is somewhat too long is read to its end and dropped: most clients look for an answer only then.

        Raises:
            InvalidRequest: it is too long (413), too slow (408), or compressed (415).
            ClientDisconnect: the client has left.
            Overloaded: too many others are being read.
        """
        parts: list[bytes] = []
        kept = 0
        try:
            async with aclosing(self._parts(request)) as incoming:
                async for part in incoming:
                    kept += len(part)
                    self._num_bytes += len(part)
                    if self._num_bytes > BODIES_AT_ONCE * self._max_bytes:
                        raise Overloaded(f"requests that are being read fill {self._num_bytes} bytes; try again later")
                    parts.append(part)
            whole = b"".join(parts)
            parts.clear()
            yield whole
        finally:
            self._num_bytes -= kept

    async def use(self, raw: bytes, use: Callable[[bytes], Made]) -> Made:
        """What `use` makes of a body; of a long one on a thread."""
        if len(raw) <= LONG_BODY_BYTES:
            return use(raw)
        return await asyncio.get_running_loop().run_in_executor(self._threads, use, raw)

    def close(self) -> None:
        """Bodies that nobody has begun to work on are left."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise InvalidRequest(
                f"Content-Encoding: {encoding}: send the body as it is", status=415, code="body_encoded"
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
                message = f"the body came too slowly: {size} bytes of it within {self._seconds:.0f} s"
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
