"""Answers of /v1/messages: Anthropic's objects and events, and the writer that makes them.

The routes use it for a body of `requests.anthropic`; `server.openapi` publishes the schemas. No I/O.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from neuron_runtime.core import FinishReason
from neuron_runtime.errors import ServingError
from neuron_runtime.server.blocks import Block, BlockKind, BlockWriter, event
from neuron_runtime.server.generation import Generation
from neuron_runtime.server.logprobs import Located
from neuron_runtime.server.objects import Count, MessagesErrorObject, ModelName, RequestId
from neuron_runtime.server.wire import ANTHROPIC, failure_of

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
BlockIndex = Annotated[Count, "Index of the block in `content`."]


class MessagesUsage(msgspec.Struct):
    """Token counts. The prompt has the sum of the three kinds of input tokens."""

    input_tokens: Annotated[Count, "Tokens of the prompt that were computed."]
    cache_read_input_tokens: Annotated[Count, "Tokens of the prompt found in the prefix cache."]
    cache_creation_input_tokens: Annotated[Count, "Always 0: what enters the cache is not counted apart."]
    output_tokens: Annotated[Count, "Tokens of the answer so far."]


class TextBlock(msgspec.Struct, tag="text", kw_only=True):
    """Text of the answer."""

    text: Annotated[str, "The text; empty where a stream begins it."]


class ThinkingBlock(msgspec.Struct, tag="thinking", kw_only=True):
    """Reasoning of the model."""

    thinking: Annotated[str, "The reasoning; empty where a stream begins it."]
    signature: Annotated[str, "Always empty: reasoning is not signed."] = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use", kw_only=True):
    """A call of a tool."""

    id: Annotated[str, "Id of the call, for its result."]
    name: Annotated[str, "Name of the tool."]
    input: Annotated[
        dict[str, Any],
        "The arguments; empty where a stream begins the block. What is no JSON object is the text `arguments` in one.",
    ]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(msgspec.Struct, tag="message", kw_only=True):
    """An answer."""

    id: RequestId
    role: Annotated[Literal["assistant"], "Role of the message."] = "assistant"
    model: ModelName
    content: Annotated[list[AnswerBlock], "Reasoning, text and calls, in order; empty where a stream begins."]
    stop_reason: Annotated[StopReason | None, "Why the answer ended; null where a stream begins."]
    stop_sequence: Annotated[str | None, "The text of `stop_sequences` that ended it."]
    usage: Annotated[MessagesUsage, "Token counts."]


class MessageStart(msgspec.Struct, tag="message_start", kw_only=True):
    """The first event of a stream."""

    message: Annotated[MessageAnswer, "The message without its content."]


class ContentBlockStart(msgspec.Struct, tag="content_block_start", kw_only=True):
    """A block begins."""

    index: BlockIndex
    content_block: Annotated[AnswerBlock, "The block without its content."]


class TextDelta(msgspec.Struct, tag="text_delta", kw_only=True):
    """New text of a block."""

    text: Annotated[str, "The new text."]


class ThinkingDelta(msgspec.Struct, tag="thinking_delta", kw_only=True):
    """New reasoning of a block."""

    thinking: Annotated[str, "The new reasoning."]


class InputJsonDelta(msgspec.Struct, tag="input_json_delta", kw_only=True):
    """New arguments of a call."""

    partial_json: Annotated[str, "The new part of the JSON."]


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta", kw_only=True):
    """A block grows."""

    index: BlockIndex
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, "The new part."]


class ContentBlockStop(msgspec.Struct, tag="content_block_stop", kw_only=True):
    """A block is complete."""

    index: BlockIndex


class MessageEnd(msgspec.Struct, kw_only=True):
    """How the answer ended."""

    stop_reason: Annotated[StopReason, "Why the answer ended."]
    stop_sequence: Annotated[str | None, "The text of `stop_sequences` that ended it."]


class MessageDelta(msgspec.Struct, tag="message_delta", kw_only=True):
    """The answer is complete."""

    delta: Annotated[MessageEnd, "How it ended."]
    usage: Annotated[MessagesUsage, "Token counts of the whole answer."]


class MessageStop(msgspec.Struct, tag="message_stop", kw_only=True):
    """The last event of a stream."""


MessagesEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessagesErrorObject
)


class TokenCount(msgspec.Struct):
    """The length of a prompt."""

    input_tokens: Annotated[Count, "Tokens of the prompt."]


_STOP_REASONS: dict[FinishReason | None, StopReason] = {FinishReason.LENGTH: "max_tokens"}


class MessagesWriter(BlockWriter):
    """Writes the answers of /v1/messages."""

    def __init__(self, model: str, generation: Generation, body: Any) -> None:
        super().__init__(generation)
        self._id = f"msg_{secrets.token_hex(16)}"
        self._model = model

    def started(self) -> bytes:
        return event(MessageStart(message=self._message([], None, None)))

    def opened(self, block: Block) -> bytes:
        return event(ContentBlockStart(index=block.index, content_block=_block(block)))

    def grown(self, block: Block, delta: str, located: Sequence[Located]) -> bytes:
        return event(ContentBlockDelta(index=block.index, delta=_DELTAS[block.kind](delta)))

    def closed(self, block: Block) -> bytes:
        return event(ContentBlockStop(index=block.index))

    def ended(self) -> bytes:
        reason, sequence = self._stop
        end = MessageEnd(stop_reason=reason, stop_sequence=sequence)
        return event(MessageDelta(delta=end, usage=self._usage)) + event(MessageStop())

    def failure(self, error: ServingError) -> bytes:
        return b"event: error\ndata: %b\n\n" % ANTHROPIC.body(failure_of(error), "")

    def answer(self) -> MessageAnswer:
        return self._message([_block(block) for block in self.blocks], *self._stop)

    @property
    def _stop(self) -> tuple[StopReason, str | None]:
        text = self.generation.stop_reasons[0]
        if isinstance(text, str):
            return "stop_sequence", text
        choice = self.generation.choices[0]
        natural: StopReason = "tool_use" if choice.calls_tools else "end_turn"
        return _STOP_REASONS.get(choice.finish_reason, natural), None

    @property
    def _usage(self) -> MessagesUsage:
        generation = self.generation
        cached = generation.num_cached_tokens
        return MessagesUsage(generation.ask.num_prompt_tokens - cached, cached, 0, generation.num_tokens)

    def _message(self, content: list[AnswerBlock], reason: StopReason | None, sequence: str | None) -> MessageAnswer:
        return MessageAnswer(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage,
        )


_DELTAS: dict[BlockKind, Callable[[str], TextDelta | ThinkingDelta | InputJsonDelta]] = {
    "text": lambda delta: TextDelta(text=delta),
    "reasoning": lambda delta: ThinkingDelta(thinking=delta),
    "call": lambda delta: InputJsonDelta(partial_json=delta),
}


def _block(block: Block) -> AnswerBlock:
    match block.kind:
        case "text":
            return TextBlock(text=block.text)
        case "reasoning":
            return ThinkingBlock(thinking=block.text)
        case "call":
            return ToolUseBlock(id=block.call_id, name=block.name, input=_input(block.text))


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
