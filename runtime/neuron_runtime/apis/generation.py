"""What one HTTP request has generated: its choices, and the pieces of text, reasoning, calls and details that are new.

`server.generation` and the offline class feed it from the engine; the writers of the APIs turn the pieces into bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from neuron_runtime.apis.logprobs import Located
from neuron_runtime.core import FinishReason, Request, Sampling, TokenEvent, TokenLogprobs
from neuron_runtime.errors import ServingError
from neuron_runtime.requests.admission import Ask
from neuron_runtime.requests.prompts import Echo
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
    """Only in the first piece of a choice, if they were computed for it."""


@dataclass(slots=True)
class Piece:
    """The text of one choice that is new to the client; of an answer that is not streamed, all of it."""

    index: int
    text: str = ""
    num_tokens: int = 0
    """Tokens of the choice so far."""
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    """Behind the text."""
    details: TokenDetails | None = None
    """None if only text is requested."""
    vector: bytes = b""
    """The answer of a model that computes vectors: float32 numbers."""


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
        picture_ends: Sequence[int] = (),
    ) -> None:
        super().__init__(
            tokenizer,
            prompt,
            stop=ask.stop,
            include_stop=ask.include_stop,
            skip_special_tokens=ask.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            splitter=ask.make_splitter and ask.make_splitter(),
            calls=ask.make_calls and ask.make_calls(),
            locates=ask.details is not None and ask.details.logprobs is not None,
        )
        self.has_details = ask.details is not None or echo is not None
        """Whether `add_details` must be called."""
        self.prompt_token_ids = prompt
        self.picture_ends = picture_ends
        self.stop_token_id: int | None = None
        """The token that ended the answer, if one did."""
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

    def add_details(self, piece: Piece, event: TokenEvent, num_tokens: int) -> None:
        """Add the details of new tokens to a piece; `num_tokens` of its tokens belong to the answer."""
        if piece.details is None:
            piece.details = TokenDetails()
        details, first = piece.details, self.num_tokens - num_tokens
        if self._echo is not None:
            self._repeat_prompt(self._echo, piece, details, event)
            self._echo = None
        token_ids = event.token_ids[:num_tokens]
        details.token_ids += token_ids
        if self._locates:
            offsets = (self._num_echoed_characters + one for one in self.text_offsets[first:])
            details.located += map(Located, token_ids, event.logprobs, offsets)
        details.prompt_logprobs += event.prompt_logprobs

    def _repeat_prompt(self, echo: Echo, piece: Piece, details: TokenDetails, event: TokenEvent) -> None:
        piece.text = echo.text + piece.text
        self._num_echoed_characters = len(echo.text)
        if self._locates:
            details.located += map(Located, self.prompt_token_ids, (None, *event.prompt_logprobs), echo.text_offsets)


class RepeatedPrompt(Choice):
    """An answer that consists of the prompt only: the one computed token is dropped."""

    def feed(self, token_ids: tuple[int, ...], finish_reason: FinishReason | None) -> str:
        self.finish_reason = FinishReason.LENGTH
        return ""


class Generation:
    """All choices of one HTTP request."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer) -> None:
        now = time.monotonic()
        self.ask = ask
        self.tokenizer = tokenizer
        choice = Choice if ask.generates else RepeatedPrompt
        echoes = ask.echoes or (None,) * len(ask.prompts)
        ends = [[one.end for one in seen] for seen in ask.pictures or ((),) * len(ask.prompts)]
        self.choices: list[Choice] = [
            choice(ask, prompt, sampling, tokenizer, arrived=now, echo=echo, picture_ends=behind)
            for prompt, sampling, echo, behind in zip(ask.prompts, ask.sampling, echoes, ends, strict=True)
            for _ in range(ask.num_choices)
        ]

    def requests(self) -> Iterator[Callable[[str], Request]]:
        """For each choice, what makes its request from an id."""
        ask = self.ask
        echoes = ask.details is not None and ask.details.logprobs is not None and bool(ask.echoes)
        seconds = ask.second_at or (0,) * len(ask.prompts)
        pictures = ask.pictures or ((),) * len(ask.prompts)
        for prompt, sampling, second_at, seen in zip(ask.prompts, ask.sampling, seconds, pictures, strict=True):
            # Prompt logprobs are computed for the first answer only, unless each answer echoes them.
            later = sampling if echoes else replace(sampling, prompt_logprobs=None)
            for number in range(ask.num_choices):
                chosen = replace(later if number else sampling, choice=number)
                make = partial(Request, prompt_token_ids=prompt, sampling=chosen, second_at=second_at, pictures=seen)
                yield partial(make, priority=ask.priority, cache_salt=ask.cache_salt, adapter=ask.target.adapter)

    def take(self, event: TokenEvent, piece: Piece) -> int:
        """Add new tokens to a piece of their choice; returns how many of them belong to the answer."""
        choice = self.choices[piece.index]
        before = choice.num_tokens
        if event.first is not None:
            choice.num_cached_tokens = event.first.num_cached_tokens
            piece.vector = event.first.vector
        text, reasoning = piece.text, piece.reasoning
        # Only a text without other references grows in place, and a whole answer may be long.
        piece.text = piece.reasoning = ""
        text += choice.feed(event.token_ids, event.finish_reason)
        reasoning += choice.reasoning
        piece.text, piece.reasoning, choice.reasoning = text, reasoning, ""
        if choice.calls:
            piece.calls += choice.calls
            choice.calls = []
        num_tokens = choice.num_tokens - before
        if choice.has_details:
            choice.add_details(piece, event, num_tokens)
        ends = event.finish_reason is FinishReason.STOP and choice.finish_reason is not None
        if ends and event.token_ids and choice.stop_string is None:
            choice.stop_token_id = event.token_ids[-1]
        piece.num_tokens, piece.finish_reason = choice.num_tokens, choice.finish_reason
        return num_tokens

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


class Writer(Protocol):
    """Writes the answer to one request in the format of its API: either `whole`, or `pieces` until `end`."""

    def pieces(self, pieces: list[Piece]) -> bytes:
        """The events of all pieces of one wake-up; may be empty."""

    def end(self) -> bytes:
        """The events behind the last piece."""

    def failure(self, error: ServingError) -> bytes:
        """The events that end a stream which has begun."""

    def whole(self, answers: Sequence[Piece]) -> bytes:
        """The body of a response that is not streamed, from all of each choice."""
