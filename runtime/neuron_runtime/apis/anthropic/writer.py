"""Writes the answers of /v1/messages, as one object or as events. Called by `server.responding`. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from neuron_runtime.apis.anthropic import objects
from neuron_runtime.apis.anthropic.errors import ANTHROPIC
from neuron_runtime.apis.failures import failure_of
from neuron_runtime.apis.generation import Generation
from neuron_runtime.apis.logprobs import Located
from neuron_runtime.apis.sections import Section, SectionKind, SectionWriter, event
from neuron_runtime.core import FinishReason
from neuron_runtime.errors import ServingError

_STOP_REASONS: dict[FinishReason | None, objects.StopReason] = {FinishReason.LENGTH: "max_tokens"}


class MessagesWriter(SectionWriter):
    def __init__(self, model: str, generation: Generation, body: Any) -> None:
        super().__init__(generation)
        self._id = f"msg_{secrets.token_hex(16)}"
        self._model = model

    def started(self) -> bytes:
        return event(objects.MessageStart(message=self._message([], None, None)))

    def opened(self, section: Section) -> bytes:
        return event(objects.ContentBlockStart(index=section.index, content_block=_block(section)))

    def grown(self, section: Section, delta: str, located: Sequence[Located]) -> bytes:
        return event(objects.ContentBlockDelta(index=section.index, delta=_DELTAS[section.kind](delta)))

    def closed(self, section: Section) -> bytes:
        return event(objects.ContentBlockStop(index=section.index))

    def ended(self) -> bytes:
        reason, sequence = self._stop
        end = objects.MessageEnd(stop_reason=reason, stop_sequence=sequence)
        return event(objects.MessageDelta(delta=end, usage=self._usage)) + event(objects.MessageStop())

    def failure(self, error: ServingError) -> bytes:
        return b"event: error\ndata: %b\n\n" % ANTHROPIC.body(failure_of(error), "")

    def answer(self) -> objects.MessageAnswer:
        return self._message([_block(section) for section in self.sections], *self._stop)

    @property
    def _stop(self) -> tuple[objects.StopReason, str | None]:
        text = self.generation.stop_reasons[0]
        if isinstance(text, str):
            return "stop_sequence", text
        choice = self.generation.choices[0]
        natural: objects.StopReason = "tool_use" if choice.calls_tools else "end_turn"
        return _STOP_REASONS.get(choice.finish_reason, natural), None

    @property
    def _usage(self) -> objects.MessagesUsage:
        generation = self.generation
        cached = generation.num_cached_tokens
        return objects.MessagesUsage(generation.ask.num_prompt_tokens - cached, cached, 0, generation.num_tokens)

    def _message(
        self, content: list[objects.AnswerBlock], reason: objects.StopReason | None, sequence: str | None
    ) -> objects.MessageAnswer:
        return objects.MessageAnswer(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage,
        )


_DELTAS: dict[SectionKind, Callable[[str], objects.TextDelta | objects.ThinkingDelta | objects.InputJsonDelta]] = {
    "text": lambda delta: objects.TextDelta(text=delta),
    "reasoning": lambda delta: objects.ThinkingDelta(thinking=delta),
    "call": lambda delta: objects.InputJsonDelta(partial_json=delta),
}


def _block(section: Section) -> objects.AnswerBlock:
    match section.kind:
        case "text":
            return objects.TextBlock(text=section.text)
        case "reasoning":
            return objects.ThinkingBlock(thinking=section.text)
        case "call":
            return objects.ToolUseBlock(id=section.call_id, name=section.name, input=_input(section.text))


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
