"""Runs one HTTP request on the engine: requests in, pieces of text per choice out.

Stop 8 of a request, together with `text.choice_text`. `server.answers` turns the pieces into bytes. If it ends early,
for any reason, the running requests are aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from neuron_runtime.core import FinishReason, Request, Sampling, TokenLogprobs
from neuron_runtime.engine.messages import Update
from neuron_runtime.errors import InvalidRequest, Overloaded, ServingError
from neuron_runtime.requests.admission import Ask
from neuron_runtime.requests.prompts import Echo
from neuron_runtime.server.engine_client import EngineClient
from neuron_runtime.server.logprobs import Located
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.text.choice_text import ChoiceText
from neuron_runtime.text.tokenizer import Tokenizer
from neuron_runtime.text.tool_calls import CallPiece


@dataclass(slots=True)
class TokenDetails:
    """Details of the tokens of a piece besides their text."""

    token_ids: list[int] = field(default_factory=list)
    located: list[Located] = field(default_factory=list)
    """The tokens with log-probabilities, after those of an echoed prompt; empty unless requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Only in the first piece of a prompt's first choice, if requested."""

    def add(self, later: TokenDetails) -> None:
        """Append the details of a later piece."""
        self.token_ids += later.token_ids
        self.located += later.located
        self.prompt_logprobs += later.prompt_logprobs


@dataclass(slots=True)
class Piece:
    """The new text of one choice."""

    index: int
    text: str
    num_tokens: int
    """Tokens of the choice so far."""
    finish_reason: FinishReason | None
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    """Behind the text."""
    details: TokenDetails | None = None
    """None if only text is requested."""


class Choice(ChoiceText):
    """One answer, with data for metrics."""

    def __init__(
        self,
        ask: Ask,
        prompt: tuple[int, ...],
        sampling: Sampling,
        tokenizer: Tokenizer,
        *,
        arrived: float,
        echo: Echo | None,
    ) -> None:
        self._details = ask.details
        locates = ask.details is not None and ask.details.logprobs is not None
        super().__init__(
            tokenizer,
            prompt,
            stop=ask.stop,
            include_stop=ask.include_stop,
            skip_special_tokens=ask.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            splitter=ask.make_splitter and ask.make_splitter(),
            calls=ask.make_calls and ask.make_calls(),
            locates=locates,
        )
        self.has_details = ask.details is not None or echo is not None
        """Whether `add_details` must be called."""
        self.prompt_token_ids = prompt
        self.num_prompt_tokens = len(prompt)
        self.stop_token_id: int | None = None
        """The token that ended the answer, if one did."""
        self._locates = locates
        self._echo = echo
        self._num_echoed_characters = 0
        self.num_cached_tokens = 0
        self.arrived = arrived
        self.queue_seconds: float | None = None
        """Queue time; None before its first token."""
        self.ended: FinishReason | None = None
        """Finish reason for the client; None while it runs, or if the engine refused it."""
        self.first_token_at: float | None = None
        self.last_token_at = arrived

    def add_details(self, piece: Piece, update: Update, num_tokens: int) -> None:
        """Add the details of an update to a piece; `num_tokens` of its tokens belong to the answer."""
        if piece.details is None:
            piece.details = TokenDetails()
        details, first = piece.details, self.num_tokens - num_tokens
        if self._echo is not None:
            self._repeat_prompt(self._echo, piece, details, update)
            self._echo = None
        token_ids = update.token_ids[:num_tokens]
        details.token_ids += token_ids
        if self._locates:
            offsets = (self._num_echoed_characters + one for one in self.text_offsets[first:])
            details.located += map(Located, token_ids, update.logprobs, offsets)
        if self._details is not None and self._details.prompt_logprobs is not None:
            details.prompt_logprobs += update.prompt_logprobs

    def _repeat_prompt(self, echo: Echo, piece: Piece, details: TokenDetails, update: Update) -> None:
        piece.text = echo.text + piece.text
        self._num_echoed_characters = len(echo.text)
        if self._locates:
            details.located += map(Located, self.prompt_token_ids, (None, *update.prompt_logprobs), echo.text_offsets)


class RepeatedPrompt(Choice):
    """An answer that consists of the prompt only: the one computed token is dropped."""

    def feed(self, token_ids: tuple[int, ...], finish_reason: FinishReason | None) -> str:
        self.finish_reason = FinishReason.LENGTH
        return ""


class Generation:
    """All choices of one HTTP request."""

    def __init__(self, ask: Ask, client: EngineClient, metrics: Metrics, tokenizer: Tokenizer) -> None:
        now = time.monotonic()
        self.ask = ask
        self.choices: list[Choice] = []
        self._client = client
        self._metrics = metrics
        self.tokenizer = tokenizer
        self._requests: list[Callable[[str], Request]] = []
        self._ids: list[str] = []
        self._running: set[int] = set()
        self._pending: dict[int, Piece] = {}
        self._show: Callable[[list[Piece]], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        choice = Choice if ask.generates else RepeatedPrompt
        echoes = ask.echoes or (None,) * len(ask.prompts)
        locates = ask.details is not None and ask.details.logprobs is not None
        for prompt, sampling, echo in zip(ask.prompts, ask.sampling, echoes, strict=True):
            # Prompt logprobs are computed for the first answer only, unless each answer echoes them.
            later = sampling if echo is not None and locates else replace(sampling, prompt_logprobs=None)
            for number in range(ask.num_choices):
                self.choices.append(choice(ask, prompt, sampling, tokenizer, arrived=now, echo=echo))
                chosen = replace(later if number else sampling, choice=number)
                self._requests.append(partial(_request, prompt=prompt, sampling=chosen, ask=ask))

    @property
    def stop_reasons(self) -> list[int | str | None]:
        """For each choice, the stop string or stop token that ended it; None for the tokenizer's end token."""
        own = self.tokenizer.eos_token_id
        return [
            choice.stop_string or (None if choice.stop_token_id == own else choice.stop_token_id)
            for choice in self.choices
        ]

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.ask.num_choices])

    async def begin(self) -> None:
        """Send the requests and wait for the first update. Raises the engine's ServingErrors."""
        self._ids = self._client.submit(self._requests, self)
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

    def end(self) -> None:
        """Must always be called at the end: aborts and counts running choices."""
        self._show = None
        self._client.abort([self._ids[index] for index in self._running])
        error = self._error
        if isinstance(error, InvalidRequest | Overloaded):
            # Refused requests do not count as requests in metrics.
            return
        now = time.monotonic()
        for index in self._running:
            left = FinishReason.ERROR if isinstance(error, ServingError) else FinishReason.ABORT
            self._finish(self.choices[index], left, now)

    def deliver(self, index: int, update: Update) -> None:
        """An update of the choice with this index; `show_pending` follows after all updates."""
        if index not in self._running:
            return
        choice = self.choices[index]
        piece = self._pending.get(index)
        if piece is None:
            piece = self._pending[index] = Piece(index, "", 0, None)
        if update.first is not None:
            choice.num_cached_tokens = update.first.num_cached_tokens
        before = choice.num_tokens
        piece.text += choice.feed(update.token_ids, update.finish_reason)
        if choice.reasoning:
            piece.reasoning += choice.reasoning
            choice.reasoning = ""
        if choice.calls:
            piece.calls += choice.calls
            choice.calls = []
        num_tokens = choice.num_tokens - before
        if choice.has_details:
            choice.add_details(piece, update, num_tokens)
        self._count(choice, update, num_tokens)
        if choice.finish_reason is not None:
            if update.finish_reason is FinishReason.STOP and choice.stop_string is None:
                choice.stop_token_id = update.token_ids[-1]
            self._running.discard(index)
            self._finish(choice, choice.finish_reason, time.monotonic())
            if update.finish_reason is None:
                self._client.abort((self._ids[index],))
        piece.num_tokens, piece.finish_reason = choice.num_tokens, choice.finish_reason

    def show_pending(self) -> None:
        """Show pending pieces, and wake the task that waits for the first update or the end."""
        if self._show is not None and self._pending and self._show(list(self._pending.values())):
            self._pending.clear()
        if self._show is None or not (self._running or self._pending):
            self._wake()

    def fail(self, error: Exception) -> None:
        """End with this error, before pieces that were not shown yet."""
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

    def _count(self, choice: Choice, update: Update, num_tokens: int) -> None:
        if not num_tokens and update.first is None:
            return
        now = time.monotonic()
        if update.queue_seconds is not None:
            choice.first_token_at = now
            choice.queue_seconds = update.queue_seconds
            self._metrics.first_token(
                now - choice.arrived, update.queue_seconds, choice.num_prompt_tokens, choice.num_cached_tokens
            )
            self._metrics.tokens(num_tokens, None)
        else:
            self._metrics.tokens(num_tokens, now - choice.last_token_at)
        choice.last_token_at = now

    def _finish(self, choice: Choice, reason: FinishReason, now: float) -> None:
        choice.ended = reason
        first = choice.last_token_at if choice.first_token_at is None else choice.first_token_at
        waited = first - choice.arrived if choice.queue_seconds is None else choice.queue_seconds
        self._metrics.finished(
            reason,
            num_prompt_tokens=choice.num_prompt_tokens,
            num_cached_tokens=choice.num_cached_tokens,
            num_tokens=choice.num_tokens,
            seconds=now - choice.arrived,
            prefill_seconds=first - choice.arrived - waited,
            decode_seconds=choice.last_token_at - first,
        )


def _request(request_id: str, prompt: tuple[int, ...], sampling: Sampling, ask: Ask) -> Request:
    return Request(request_id, prompt, sampling, ask.priority, ask.cache_salt)
