"""Runs one HTTP request on the engine: requests in, pieces of text per choice out.

Stop 8 of a request, together with `text.choice_text`. A writer of `apis` turns the pieces into bytes. If it ends early,
for any reason, the running requests are aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from neuron_runtime.apis.generation import Choice, Generation, Piece
from neuron_runtime.core import FinishReason, TokenEvent
from neuron_runtime.engine.pixel_files import PixelFile
from neuron_runtime.errors import AdapterNotReady, InvalidRequest, Overloaded, ServingError
from neuron_runtime.requests.admission import Ask
from neuron_runtime.requests.targets import Targets
from neuron_runtime.server.engine_client import EngineClient
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.text.tokenizer import Tokenizer


class LiveGeneration(Generation):
    def __init__(
        self,
        ask: Ask,
        client: EngineClient,
        metrics: Metrics,
        tokenizer: Tokenizer,
        targets: Targets,
        *,
        pixels: PixelFile | None = None,
    ) -> None:
        super().__init__(ask, tokenizer)
        self._pixels = pixels
        self._targets = targets
        self._client = client
        self._metrics = metrics
        self._ids: list[str] = []
        self._running: set[int] = set()
        self._pending: dict[int, Piece] = {}
        self._show: Callable[[list[Piece]], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def begin(self) -> None:
        """Send the requests and wait for the first event. Raises the engine's ServingErrors."""
        self._ids = self._client.submit(self.requests(), self, self._pixels)
        self._running = set(range(len(self._ids)))
        await self._wait()

    async def finish(self, show: Callable[[list[Piece]], bool]) -> None:
        """Wait until every choice has ended and was shown. Raises ServingErrors.

        show: called at most once per wake-up, with at most one piece per choice; must not block. If it returns False,
            nothing was shown and the pieces grow until `show_pending` is called.
        """
        self._show = show
        self.show_pending()
        while self._running or self._pending:
            await self._wait()

    async def whole(self) -> list[Piece]:
        """Wait until every choice has ended; returns all of each, in order. Raises ServingErrors."""
        answers: list[Piece] = []

        def show(pieces: list[Piece]) -> bool:
            if not self._running:
                answers.extend(pieces)
            return not self._running

        await self.finish(show)
        return sorted(answers, key=lambda answer: answer.index)

    def end(self) -> None:
        """Must always be called at the end: aborts and counts running choices."""
        self._show = None
        self._client.abort([self._ids[index] for index in self._running])
        if self._pixels is not None:
            self._pixels.close()
        error = self._error
        if isinstance(error, InvalidRequest | Overloaded | AdapterNotReady):
            # Refused requests do not count as requests in metrics.
            return
        left = FinishReason.ERROR if isinstance(error, ServingError) else FinishReason.ABORT
        for index in self._running:
            self._finish(self.choices[index], left)

    def deliver(self, index: int, event: TokenEvent) -> None:
        """New tokens of the choice with this index; `show_pending` follows after all updates."""
        if index not in self._running:
            return
        choice = self.choices[index]
        piece = self._pending.get(index)
        if piece is None:
            piece = self._pending[index] = Piece(index)
        self._count(choice, event, self.take(event, piece))
        if choice.finish_reason is not None:
            self._running.discard(index)
            self._finish(choice, choice.finish_reason)
            if event.finish_reason is None:
                self._client.abort((self._ids[index],))

    def show_pending(self) -> None:
        """Show pending pieces, and wake the task that waits for the first update or the end."""
        if self._show is not None and self._pending and self._show(list(self._pending.values())):
            self._pending.clear()
        if self._show is None or not (self._running or self._pending):
            self._wake()

    def fail(self, error: Exception) -> None:
        """End with this error, before pieces that were not shown yet."""
        if isinstance(error, InvalidRequest) and error.code == AdapterNotReady.code:
            error = self._targets.loss(self.ask.target.name, str(error))
        self._error = self._error or error
        self._wake()

    async def _wait(self) -> None:
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count(self, choice: Choice, event: TokenEvent, num_tokens: int) -> None:
        if not num_tokens and event.first is None:
            return
        now = time.monotonic()
        if event.first is not None:
            choice.first_token_at = now
            choice.queue_seconds = event.first.queue_seconds
            self._metrics.first_token(choice, now - choice.arrived, event.first.queue_seconds)
            self._metrics.tokens(num_tokens, None)
        else:
            self._metrics.tokens(num_tokens, now - choice.last_token_at)
        choice.last_token_at = now

    def _finish(self, choice: Choice, reason: FinishReason) -> None:
        choice.ended = reason
        self._metrics.finished(choice, reason)
