"""One HTTP request on its way through the engine: requests in, pieces of text out, choice by choice.

Stop 8 of a request, whose text is `text.answer`'s. The routes read the pieces and write bytes. Leaving early, for
whatever reason, aborts what still runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from functools import partial

from neuron_runtime.core import FinishReason, Request, SamplingParams
from neuron_runtime.engine.messages import News
from neuron_runtime.errors import InvalidRequest, Overloaded, ServingError
from neuron_runtime.server.admission import Ask
from neuron_runtime.server.engine_client import EngineClient, Mailbox
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.text.answer import Answer
from neuron_runtime.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """New text of one choice: everything that was queued for it."""

    index: int
    text: str
    num_tokens: int
    """Tokens of the choice so far."""
    finish_reason: FinishReason | None


class Choice(Answer):
    """One answer, and what metrics want to know of it."""

    def __init__(
        self, ask: Ask, prompt: tuple[int, ...], sampling: SamplingParams, tokenizer: Tokenizer, arrived: float
    ) -> None:
        super().__init__(
            tokenizer,
            prompt,
            stop=ask.stop,
            include_stop=ask.include_stop,
            skip_special_tokens=ask.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )
        self.num_prompt_tokens = len(prompt)
        self.num_cached_tokens = 0
        self.arrived = arrived
        self.first_token_at: float | None = None
        self.last_token_at = arrived


class Generation:
    """All choices of one HTTP request."""

    def __init__(self, ask: Ask, client: EngineClient, metrics: Metrics, tokenizer: Tokenizer) -> None:
        now = time.monotonic()
        self.ask = ask
        self.mailbox = Mailbox()
        self.choices: list[Choice] = []
        self._client = client
        self._metrics = metrics
        self._requests: list[Callable[[str], Request]] = []
        for prompt, sampling in zip(ask.prompts, ask.sampling, strict=True):
            for number in range(ask.num_choices):
                self.choices.append(Choice(ask, prompt, sampling, tokenizer, now))
                chosen = replace(sampling, choice=number)
                self._requests.append(partial(_request, prompt=prompt, sampling=chosen, ask=ask))

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.ask.num_choices])

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """At most one piece per choice and wake-up. Raises what ServingErrors the engine answers with."""
        choices = self.choices
        ids = self._client.submit(self._requests, self.mailbox)
        running = set(range(len(ids)))
        left: FinishReason | None = FinishReason.ABORT
        try:
            while running:
                queued = await self.mailbox.take()
                now = time.monotonic()
                pieces: dict[int, Piece] = {}
                for index, news in queued:
                    choice = choices[index]
                    if index not in running:
                        continue
                    piece = pieces.get(index)
                    if piece is None:
                        piece = pieces[index] = Piece(index, "", 0, None)
                    before = choice.num_tokens
                    choice.num_cached_tokens = max(choice.num_cached_tokens, news.num_cached_tokens)
                    piece.text += choice.feed(news.token_ids, news.finish_reason)
                    self._count(choice, news, choice.num_tokens - before, now)
                    if choice.finish_reason is not None:
                        running.discard(index)
                        self._finish(choice, choice.finish_reason, now)
                        if news.finish_reason is None:
                            self._client.abort((ids[index],))
                    piece.num_tokens, piece.finish_reason = choice.num_tokens, choice.finish_reason
                yield list(pieces.values())
        except (InvalidRequest, Overloaded):
            left = None
            raise
        except ServingError:
            left = FinishReason.ERROR
            raise
        finally:
            self._client.abort([ids[index] for index in running])
            now = time.monotonic()
            for index in running:
                # Refused requests never were any, for the metrics.
                if left is not None:
                    self._finish(choices[index], left, now)

    def _count(self, choice: Choice, news: News, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if news.queue_seconds is not None:
            choice.first_token_at = now
            self._metrics.first_token(now - choice.arrived, news.queue_seconds, choice.num_prompt_tokens)
            self._metrics.tokens(num_tokens, None)
        else:
            self._metrics.tokens(num_tokens, now - choice.last_token_at)
        choice.last_token_at = now

    def _finish(self, choice: Choice, reason: FinishReason, now: float) -> None:
        began = now if choice.first_token_at is None else choice.first_token_at
        self._metrics.finished(reason, choice.num_prompt_tokens, choice.num_tokens, now - choice.arrived, now - began)


def _request(request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, ask: Ask) -> Request:
    return Request(request_id, prompt, sampling, ask.priority, ask.cache_salt)
