"""Answers of /v1/messages: Anthropic's objects and events. The writer creates them; `server.openapi` publishes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from neuron_runtime.apis.anthropic.errors import MessagesErrorObject
from neuron_runtime.apis.objects import Count, ModelName, RequestId

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
