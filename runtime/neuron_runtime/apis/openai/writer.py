"""OpenAI's completions and chat completions: pieces of text become one JSON object or a stream of server-sent events.

Called by `server.responding`, with prebuilt bytes where it runs per token. No I/O.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from neuron_runtime.apis.failures import failure_of
from neuron_runtime.apis.generation import Choice, Generation, Piece, TokenDetails
from neuron_runtime.apis.logprobs import Located, Speller
from neuron_runtime.apis.openai import objects
from neuron_runtime.apis.openai.errors import OPENAI
from neuron_runtime.core import FinishReason
from neuron_runtime.errors import ServingError
from neuron_runtime.requests.admission import Details
from neuron_runtime.text.tool_calls import CallPiece, whole_calls

SSE_END = b"data: [DONE]\n\n"


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
    text: Callable[[str, str | None, list[CallPiece]], dict[str, Any]]
    """Fields for text, reasoning (None: the model has none) and calls of a whole choice."""
    logprobs: Callable[[Speller, Sequence[Located], int], dict[str, Any]]
    prompt_beside_choices: bool
    """Data of the prompt is next to the choices, because there is one prompt; otherwise in each choice."""


def _message(text: str, reasoning: str | None, calls: list[CallPiece]) -> dict[str, Any]:
    message = objects.ChatAnswer("assistant", text if reasoning is None and not calls else text or None, None)
    if calls:
        message.tool_calls = [
            objects.ToolCall(one.id, "function", objects.FunctionCall(one.name, one.arguments)) for one in calls
        ]
    if reasoning is not None:
        # vLLM renamed the field; clients look for either.
        message.reasoning = message.reasoning_content = reasoning or None
    return {"message": message}


def finish_reason(choice: Choice) -> str:
    """As the client sees it."""
    reason = choice.finish_reason or FinishReason.ERROR
    return "tool_calls" if reason is FinishReason.STOP and choice.calls_tools else reason.value


def _part(piece: CallPiece) -> objects.ToolCallPart:
    if not piece.name:
        return objects.ToolCallPart(piece.index, objects.FunctionCallPart(piece.arguments))
    return objects.ToolCallPart(
        piece.index, objects.FunctionCallPart(piece.arguments, piece.name), piece.id, "function"
    )


COMPLETION = Shape(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    before_text=b',"text":',
    after_text=b',"logprobs":null,"finish_reason":',
    first=b"",
    answer=objects.Completion,
    choice=objects.CompletionChoice,
    text=lambda text, reasoning, calls: {"text": text},
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
    answer=objects.ChatCompletion,
    choice=objects.ChatChoice,
    text=_message,
    logprobs=Speller.chat,
    prompt_beside_choices=True,
)


_REASONING = b',"delta":{"reasoning":'
_REASONING_CONTENT = b',"reasoning_content":'
_REASONING_END = b'},"logprobs":null,"finish_reason":null}]'


class OpenAIWriter:
    def __init__(self, shape: Shape, model: str, generation: Generation) -> None:
        self._shape = shape
        self._generation = generation
        self._usage = generation.ask.include_usage
        self._continuous = generation.ask.continuous_usage
        self._shows_reasoning = generation.ask.shows_reasoning
        self._details = generation.ask.details or Details()
        self._speller = Speller(generation.tokenizer, self._details.tokens_as_token_ids)
        self._head = {
            "id": shape.id_prefix + secrets.token_hex(16),
            "object": shape.whole,
            "created": int(time.time()),
            "model": model,
        }
        self._frame_head = b"data: " + orjson.dumps(self._head | {"object": shape.chunk})[:-1]
        self._begun: set[int] = set()

    def pieces(self, pieces: list[Piece]) -> bytes:
        shape = self._shape
        out: list[bytes] = []
        for piece in pieces:
            if piece.details is not None or piece.finish_reason is not None or piece.calls:
                out += self._detailed(piece, piece.details or TokenDetails())
                continue
            head = b'%b,"choices":[{"index":%d' % (self._frame_head, piece.index)
            if shape.first and piece.index not in self._begun:
                self._begun.add(piece.index)
                out += (head, shape.first, self._tail(piece))
            if piece.reasoning and self._shows_reasoning:
                raw = orjson.dumps(piece.reasoning)
                out += (head, _REASONING, raw, _REASONING_CONTENT, raw, _REASONING_END, self._tail(piece))
            if piece.text or self._continuous:
                text = orjson.dumps(piece.text)
                out += (head, shape.before_text, text, shape.after_text, b"null}]", self._tail(piece))
        return b"".join(out)

    def end(self) -> bytes:
        if not self._usage:
            return SSE_END
        counts = msgspec.json.encode(usage(self._generation))
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._frame_head, counts, SSE_END)

    def failure(self, error: ServingError) -> bytes:
        """Takes the place of [DONE]."""
        return b"data: %b\n\n" % OPENAI.body(failure_of(error), "")

    def whole(self, answers: Sequence[Piece]) -> bytes:
        shape, generation, ask = self._shape, self._generation, self._generation.ask
        beside = shape.prompt_beside_choices
        details = [answer.details or TokenDetails() for answer in answers]
        choices = []
        for index, (answer, stop_reason) in enumerate(zip(answers, generation.stop_reasons, strict=True)):
            reasoning = answer.reasoning if ask.make_splitter is not None and ask.shows_reasoning else None
            first = index - index % ask.num_choices
            fields = {
                **shape.text(answer.text, reasoning, whole_calls(answer.calls)),
                "logprobs": None,
                "finish_reason": finish_reason(generation.choices[index]),
                "stop_reason": stop_reason,
                **self._of_choice(details[index]),
                **({} if beside else self._of_prompt(index, details[first])),
            }
            choices.append(shape.choice(index=index, **fields))
        prompt = self._of_prompt(0, details[0]) if beside else {}
        return msgspec.json.encode(shape.answer(**self._head, choices=choices, usage=usage(generation), **prompt))

    def _of_choice(self, token_details: TokenDetails) -> dict[str, Any]:
        """Fields of a choice, or of a part of one, besides its text."""
        details = self._details
        fields: dict[str, Any] = {}
        if details.logprobs is not None:
            fields["logprobs"] = self._shape.logprobs(self._speller, token_details.located, details.logprobs)
        if details.token_ids:
            fields["token_ids"] = token_details.token_ids
        return fields

    def _of_prompt(self, index: int, token_details: TokenDetails) -> dict[str, Any]:
        """Fields about the prompt of a choice."""
        details = self._details
        fields: dict[str, Any] = {}
        if details.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._speller.prompt(token_details.prompt_logprobs, details.prompt_logprobs)
        if details.token_ids:
            fields["prompt_token_ids"] = self._generation.choices[index].prompt_token_ids
        return fields

    def _detailed(self, piece: Piece, token_details: TokenDetails) -> Iterator[bytes]:
        """Frames of a piece with details, or of the last one of a choice."""
        shape, index = self._shape, piece.index
        prompt: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            prompt = self._of_prompt(index, token_details)
            if shape.prompt_beside_choices:
                yield self._frame(piece, {"delta": {"role": "assistant", "content": ""}, **_OPEN}, beside=prompt)
                prompt = {}
        if piece.reasoning and self._shows_reasoning:
            delta = {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}
            # In its own frame, because clients read either reasoning or text.
            yield self._frame(piece, {"delta": delta, **_OPEN})
        if piece.calls:
            if piece.text:
                yield self._frame(piece, {"delta": {"content": piece.text}, **_OPEN})
                piece.text = ""
            for call in piece.calls:
                yield self._frame(piece, {"delta": {"tool_calls": [msgspec.to_builtins(_part(call))]}, **_OPEN})
        more = self._of_choice(token_details)
        if not (piece.text or more or prompt or piece.finish_reason or self._continuous):
            return
        text = {"delta": {"content": piece.text}} if shape.first else {"text": piece.text}
        choice: dict[str, Any] = {**text, **_OPEN, **more, **prompt}
        if piece.finish_reason is not None:
            choice["finish_reason"] = finish_reason(self._generation.choices[index])
            choice["stop_reason"] = self._generation.stop_reasons[index]
        yield self._frame(piece, choice)

    def _frame(self, piece: Piece, choice: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        fields = orjson.dumps({**(beside or {}), "choices": [{"index": piece.index, **choice}]})
        return b"%b,%b%b" % (self._frame_head, fields[1:-1], self._tail(piece))

    def _tail(self, piece: Piece) -> bytes:
        if self._continuous:
            prompt = len(self._generation.choices[piece.index].prompt_token_ids)
            return b',"usage":%b}\n\n' % msgspec.json.encode(_counts(prompt, piece.num_tokens))
        return b',"usage":null}\n\n' if self._usage else b"}\n\n"


_OPEN = {"logprobs": None, "finish_reason": None}
"""Fields of a frame that is not the last one of its choice."""


def usage(generation: Generation) -> objects.Usage:
    """A prompt with several answers counts once."""
    counts = _counts(generation.ask.num_prompt_tokens, generation.num_tokens)
    counts.prompt_tokens_details = objects.PromptTokensDetails(generation.num_cached_tokens)
    if generation.ask.make_splitter is not None:
        counts.completion_tokens_details = objects.CompletionTokensDetails(generation.num_reasoning_tokens)
    return counts


def _counts(prompt: int, completion: int) -> objects.Usage:
    return objects.Usage(prompt, completion, prompt + completion)
