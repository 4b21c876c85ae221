"""Responses to generation requests: pieces of text become one JSON object or a stream of server-sent events.

Stop 9 of a request, written as plain ASGI with prebuilt bytes: one write per wake-up. Headers are sent with the first
message of the engine, so that a refusal still gets its status.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neuron_runtime.core import FinishReason
from neuron_runtime.errors import ServingError
from neuron_runtime.requests.admission import Details
from neuron_runtime.server.exchange import exchange_of
from neuron_runtime.server.generation import Generation, Piece, TokenDetails
from neuron_runtime.server.http_protocol import body_writer
from neuron_runtime.server.logprobs import Located, Speller
from neuron_runtime.server.objects import (
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from neuron_runtime.server.wire import error_answer

SSE_END = b"data: [DONE]\n\n"

MANY_TOKENS = 256
"""Responses with log-probabilities of more tokens are formatted on a thread."""


class ClientGone(Exception):
    """The client disconnected."""


@dataclass(frozen=True)
class Shape:
    """The response format of one endpoint."""

    id_prefix: str
    whole: str
    """`object` of a whole response."""
    chunk: str
    """`object` of a part of a stream."""
    before_text: bytes
    after_text: bytes
    first: bytes
    """Content of a choice's first frame, which has no text; empty: streams start with text."""
    answer: Callable[..., msgspec.Struct]
    """Creates a whole response."""
    choice: Callable[..., msgspec.Struct]
    """Creates a whole choice."""
    text: Callable[[str, str | None], dict[str, Any]]
    """Fields for text and reasoning (None: the model has none) of a whole choice."""
    logprobs: Callable[[Speller, Sequence[Located], int], dict[str, Any]]
    prompt_beside_choices: bool
    """Data of the prompt is next to the choices, because there is one prompt; otherwise in each choice."""


def _message(text: str, reasoning: str | None) -> dict[str, Any]:
    if reasoning is None:
        return {"message": ChatAnswer(role="assistant", content=text, refusal=None)}
    # vLLM renamed the field; clients look for either.
    reasoning = reasoning or None
    message = ChatAnswer("assistant", text or None, None, reasoning=reasoning, reasoning_content=reasoning)
    return {"message": message}


COMPLETION = Shape(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    before_text=b',"text":',
    after_text=b',"logprobs":null,"finish_reason":',
    first=b"",
    answer=Completion,
    choice=CompletionChoice,
    text=lambda text, reasoning: {"text": text},
    logprobs=Speller.completion,
    prompt_beside_choices=False,
)
CHAT = Shape(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    before_text=b',"delta":{"content":',
    after_text=b'},"logprobs":null,"finish_reason":',
    first=b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]',
    answer=ChatCompletion,
    choice=ChatChoice,
    text=_message,
    logprobs=Speller.chat,
    prompt_beside_choices=True,
)


class DetailFormatter:
    """Formats the details of an answer besides its text, for whole responses and streams."""

    def __init__(self, shape: Shape, generation: Generation) -> None:
        self._shape = shape
        self._generation = generation
        self._details = generation.ask.details or Details()
        self._speller = Speller(generation.tokenizer, self._details.tokens_as_token_ids)

    def choice(self, token_details: TokenDetails) -> dict[str, Any]:
        """Fields of a choice, or of a part of one."""
        details = self._details
        fields: dict[str, Any] = {}
        if details.logprobs is not None:
            fields["logprobs"] = self._shape.logprobs(self._speller, token_details.located, details.logprobs)
        if details.token_ids:
            fields["token_ids"] = token_details.token_ids
        return fields

    def prompt(self, index: int, token_details: TokenDetails) -> dict[str, Any]:
        """Fields about the prompt of a choice."""
        details = self._details
        fields: dict[str, Any] = {}
        if details.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._speller.prompt(token_details.prompt_logprobs, details.prompt_logprobs)
        if details.token_ids:
            fields["prompt_token_ids"] = self._generation.choices[index].prompt_token_ids
        return fields


_REASONING = b',"delta":{"reasoning":'
_REASONING_CONTENT = b',"reasoning_content":'
_REASONING_END = b'},"logprobs":null,"finish_reason":null}]'


class Frames:
    """Server-sent events of one stream."""

    def __init__(self, shape: Shape, head: dict[str, Any], generation: Generation) -> None:
        self._shape = shape
        self._head = b"data: " + orjson.dumps(head | {"object": shape.chunk})[:-1]
        self._usage = generation.ask.include_usage
        self._continuous = generation.ask.continuous_usage
        self._generation = generation
        self._shows_reasoning = generation.ask.shows_reasoning
        self._formatter = DetailFormatter(shape, generation)
        self._begun: set[int] = set()

    def pieces(self, pieces: list[Piece]) -> bytes:
        """The frames of all pieces of one wake-up; may be empty."""
        shape = self._shape
        out: list[bytes] = []
        for piece in pieces:
            if piece.details is not None or piece.finish_reason is not None:
                out += self._detailed(piece, piece.details or TokenDetails())
                continue
            index = b',"choices":[{"index":%d' % piece.index
            if shape.first and piece.index not in self._begun:
                self._begun.add(piece.index)
                out += (self._head, index, shape.first, self._tail(piece))
            if piece.reasoning and self._shows_reasoning:
                raw = orjson.dumps(piece.reasoning)
                out += (self._head, index, _REASONING, raw, _REASONING_CONTENT, raw, _REASONING_END, self._tail(piece))
            if piece.text or self._continuous:
                text = orjson.dumps(piece.text)
                out += (self._head, index, shape.before_text, text, shape.after_text, b"null}]", self._tail(piece))
        return b"".join(out)

    def end(self) -> bytes:
        if not self._usage:
            return SSE_END
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (
            self._head,
            msgspec.json.encode(usage(self._generation)),
            SSE_END,
        )

    def _detailed(self, piece: Piece, token_details: TokenDetails) -> Iterator[bytes]:
        """Frames of a piece with details, or of the last one of a choice."""
        shape, index = self._shape, piece.index
        prompt: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            prompt = self._formatter.prompt(index, token_details)
            if shape.prompt_beside_choices:
                begin = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                yield self._frame(piece, begin, beside=prompt)
                prompt = {}
        if piece.reasoning and self._shows_reasoning:
            delta = {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}
            # In its own frame, because clients read either reasoning or text.
            yield self._frame(piece, {"delta": delta, "logprobs": None, "finish_reason": None})
        more = self._formatter.choice(token_details)
        if not (piece.text or more or prompt or piece.finish_reason or self._continuous):
            return
        text = {"delta": {"content": piece.text}} if shape.first else {"text": piece.text}
        choice: dict[str, Any] = {**text, "logprobs": None, "finish_reason": None, **more, **prompt}
        if piece.finish_reason is not None:
            choice["finish_reason"] = piece.finish_reason.value
            choice["stop_reason"] = self._generation.stop_reasons[index]
        yield self._frame(piece, choice)

    def _frame(self, piece: Piece, choice: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        fields = orjson.dumps({**(beside or {}), "choices": [{"index": piece.index, **choice}]})
        return b"%b,%b%b" % (self._head, fields[1:-1], self._tail(piece))

    def _tail(self, piece: Piece) -> bytes:
        if self._continuous:
            prompt = self._generation.choices[piece.index].num_prompt_tokens
            return b',"usage":%b}\n\n' % msgspec.json.encode(_counts(prompt, piece.num_tokens))
        return b',"usage":null}\n\n' if self._usage else b"}\n\n"


class GenerationResponse(Response):
    """The ASGI response of one generation request.

    Args:
        running: entered while the request runs, so that a drain can wait for it.
    """

    def __init__(self, shape: Shape, model: str, generation: Generation, running: AbstractContextManager[None]) -> None:
        super().__init__()
        self._shape = shape
        self._generation = generation
        self._running = running
        self._head = {
            "id": shape.id_prefix + secrets.token_hex(16),
            "object": shape.whole,
            "created": int(time.time()),
            "model": model,
        }
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            with self._running:
                await (self._stream(scope, send) if self._generation.ask.stream else self._whole(send))
        except ServingError as error:
            exchange_of(scope).error = error
            await self._fail(error, send)
        except ClientGone:
            return
        finally:
            watch.cancel()
            self._generation.end()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ClientGone())

    async def _stream(self, scope: Scope, send: Send) -> None:
        generation = self._generation
        await generation.begin()
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self._begin(200, headers, send)
        frames, body = Frames(self._shape, self._head, generation), body_writer(scope)

        def show(pieces: list[Piece]) -> bool:
            if not body.writable:
                return False
            body.write(frames.pieces(pieces))
            return True

        body.when_writable(generation.show_pending)
        await generation.finish(show)
        await send({"type": "http.response.body", "body": frames.end(), "more_body": False})

    async def _whole(self, send: Send) -> None:
        generation = self._generation
        texts: list[list[str]] = [[] for _ in generation.choices]
        reasonings: list[list[str]] = [[] for _ in generation.choices]
        details = [TokenDetails() for _ in generation.choices]

        def show(pieces: list[Piece]) -> bool:
            for piece in pieces:
                texts[piece.index].append(piece.text)
                reasonings[piece.index].append(piece.reasoning)
                if piece.details is not None:
                    details[piece.index].add(piece.details)
            return True

        await generation.begin()
        await generation.finish(show)
        if sum(len(one.located) + len(one.prompt_logprobs) for one in details) > MANY_TOKENS:
            # Formatting them would delay streams.
            body = await asyncio.to_thread(self._body, texts, reasonings, details)
        else:
            body = self._body(texts, reasonings, details)
        await self._begin(200, {"content-type": "application/json", "content-length": str(len(body))}, send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _body(self, texts: list[list[str]], reasonings: list[list[str]], details: list[TokenDetails]) -> bytes:
        """The whole response."""
        shape, generation, ask = self._shape, self._generation, self._generation.ask
        formatter = DetailFormatter(shape, generation)
        beside = shape.prompt_beside_choices
        choices = []
        for index, (parts, one, stop_reason) in enumerate(zip(texts, details, generation.stop_reasons, strict=True)):
            reasoning = "".join(reasonings[index]) if ask.make_splitter is not None and ask.shows_reasoning else None
            fields = {
                **shape.text("".join(parts), reasoning),
                "logprobs": None,
                "finish_reason": (generation.choices[index].finish_reason or FinishReason.ERROR).value,
                "stop_reason": stop_reason,
                **formatter.choice(one),
                **({} if beside else formatter.prompt(index, details[index - index % ask.num_choices])),
            }
            choices.append(shape.choice(index=index, **fields))
        prompt = formatter.prompt(0, details[0]) if beside else {}
        return msgspec.json.encode(shape.answer(**self._head, choices=choices, usage=usage(generation), **prompt))

    async def _fail(self, error: ServingError, send: Send) -> None:
        status, body, headers = error_answer(error)
        if self._begun:
            # The status was sent: the stream ends with the error instead of [DONE].
            body = b"data: " + body + b"\n\n"
        else:
            headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
            await self._begin(status, headers, send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, status: int, headers: dict[str, str], send: Send) -> None:
        self._begun = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


def usage(generation: Generation) -> Usage:
    """A prompt with several answers counts once."""
    counts = _counts(generation.ask.num_prompt_tokens, generation.num_tokens)
    counts.prompt_tokens_details = PromptTokensDetails(generation.num_cached_tokens)
    if generation.ask.make_splitter is not None:
        counts.completion_tokens_details = CompletionTokensDetails(generation.num_reasoning_tokens)
    return counts


def _counts(prompt: int, completion: int) -> Usage:
    return Usage(prompt, completion, prompt + completion)
