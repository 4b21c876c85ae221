"""Writes the answers of /v1/messages, as one object or as events. Called by `server.responding`. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from neuron_runtime.apis.anthropic.errors import ANTHROPIC
from neuron_runtime.apis.anthropic.objects import (
    AnswerBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessagesUsage,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from neuron_runtime.apis.failures import failure_of
from neuron_runtime.apis.generation import Generation
from neuron_runtime.apis.logprobs import Located
from neuron_runtime.apis.sections import Section, SectionKind, SectionWriter, event
from neuron_runtime.core import FinishReason
from neuron_runtime.errors import ServingError

_STOP_REASONS: dict[FinishReason | None, StopReason] = {FinishReason.LENGTH: "max_tokens"}


class MessagesWriter(SectionWriter):
    """Writes the answers of /v1/messages."""

    def __init__(self, model: str, generation: Generation, body: Any) -> None:
        super().__init__(generation)
        self._id = f"msg_{secrets.token_hex(16)}"
        self._model = model

    def started(self) -> bytes:
        return event(MessageStart(message=self._message([], None, None)))

    def opened(self, section: Section) -> bytes:
        return event(ContentBlockStart(index=section.index, content_block=_block(section)))

    def grown(self, section: Section, delta: str, located: Sequence[Located]) -> bytes:
        return event(ContentBlockDelta(index=section.index, delta=_DELTAS[section.kind](delta)))

    def closed(self, section: Section) -> bytes:
        return event(ContentBlockStop(index=section.index))

    def ended(self) -> bytes:
        reason, sequence = self._stop
        end = MessageEnd(stop_reason=reason, stop_sequence=sequence)
        return event(MessageDelta(delta=end, usage=self._usage)) + event(MessageStop())

    def failure(self, error: ServingError) -> bytes:
        return b"event: error\ndata: %b\n\n" % ANTHROPIC.body(failure_of(error), "")

    def answer(self) -> MessageAnswer:
        return self._message([_block(section) for section in self.sections], *self._stop)

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


_DELTAS: dict[SectionKind, Callable[[str], TextDelta | ThinkingDelta | InputJsonDelta]] = {
    "text": lambda delta: TextDelta(text=delta),
    "reasoning": lambda delta: ThinkingDelta(thinking=delta),
    "call": lambda delta: InputJsonDelta(partial_json=delta),
}


def _block(section: Section) -> AnswerBlock:
    match section.kind:
        case "text":
            return TextBlock(text=section.text)
        case "reasoning":
            return ThinkingBlock(thinking=section.text)
        case "call":
            return ToolUseBlock(id=section.call_id, name=section.name, input=_input(section.text))


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
