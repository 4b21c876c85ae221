"""Writes the answers of /v1/responses, as one object or as events. Called by `server.responding`. No I/O."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from neuron_runtime.apis.failures import failure_of
from neuron_runtime.apis.generation import Generation
from neuron_runtime.apis.logprobs import Located, Speller
from neuron_runtime.apis.responses import objects
from neuron_runtime.apis.responses.body import ReasoningOptions, ResponsesBody, TextConfig, functions_of
from neuron_runtime.apis.sections import Section, SectionWriter, event
from neuron_runtime.core import FinishReason
from neuron_runtime.errors import ServingError


class ResponsesWriter(SectionWriter):
    def __init__(self, model: str, generation: Generation, body: ResponsesBody) -> None:
        super().__init__(generation)
        sampling = generation.ask.sampling[0]
        self._number = -1
        self._speller = Speller(generation.tokenizer, False)
        self._offered = {one.name_here: one for one in functions_of(body.tools or ())}
        self._response = objects.ResponseObject(
            id=f"resp_{secrets.token_hex(16)}",
            created_at=int(time.time()),
            status="in_progress",
            model=model,
            output=[],
            instructions=body.instructions,
            max_output_tokens=body.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_logprobs=body.top_logprobs or 0,
            reasoning=body.reasoning or ReasoningOptions(),
            text=TextConfig(body.text_format, body.text.verbosity if body.text else None),
            tools=body.tools or [],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            metadata=body.metadata or {},
        )

    def started(self) -> bytes:
        kinds = (objects.ResponseCreated, objects.ResponseInProgress)
        return b"".join(self._event(kind, response=self._response) for kind in kinds)

    def opened(self, section: Section) -> bytes:
        added = self._of_item(objects.OutputItemAdded, section, item=self._item(section, "in_progress"))
        if section.kind == "call":
            return added
        return added + self._within(objects.ContentPartAdded, section, part=self._part(section))

    def grown(self, section: Section, delta: str, located: Sequence[Located]) -> bytes:
        match section.kind:
            case "call":
                return self._within(objects.CallArgumentsDelta, section, delta=delta)
            case "reasoning":
                return self._within(objects.ReasoningTextDelta, section, delta=delta)
            case "text":
                return self._within(objects.OutputTextDelta, section, delta=delta, logprobs=self._logprobs(located))

    def closed(self, section: Section) -> bytes:
        match section.kind:
            case "call":
                name = self._offered[section.name].name
                done = self._within(objects.CallArgumentsDone, section, name=name, arguments=section.text)
            case "reasoning":
                done = self._within(objects.ReasoningTextDone, section, text=section.text)
            case "text":
                logprobs = self._logprobs(section.located)
                done = self._within(objects.OutputTextDone, section, text=section.text, logprobs=logprobs)
        if section.kind != "call":
            done += self._within(objects.ContentPartDone, section, part=self._part(section))
        return done + self._of_item(objects.OutputItemDone, section, item=self._item(section, self._status_of(section)))

    def ended(self) -> bytes:
        response = self.answer()
        kind = objects.ResponseCompleted if response.status == "completed" else objects.ResponseIncomplete
        return self._event(kind, response=response)

    def failure(self, error: ServingError) -> bytes:
        failure = failure_of(error)
        told = self._event(objects.ErrorEvent, code=failure.code, message=failure.message)
        reason = objects.ResponseError("server_error", failure.message)
        failed = msgspec.structs.replace(self._response, status="failed", error=reason)
        return told + self._event(objects.ResponseFailed, response=failed)

    def answer(self) -> objects.ResponseObject:
        is_cut = self._is_cut
        return msgspec.structs.replace(
            self._response,
            status="incomplete" if is_cut else "completed",
            incomplete_details=objects.IncompleteDetails("max_output_tokens") if is_cut else None,
            output=[self._item(section, self._status_of(section)) for section in self.sections],
            usage=self._usage,
        )

    @property
    def _is_cut(self) -> bool:
        return self.generation.choices[0].finish_reason is FinishReason.LENGTH

    @property
    def _usage(self) -> objects.ResponseUsage:
        generation = self.generation
        prompt, output = generation.ask.num_prompt_tokens, generation.num_tokens
        return objects.ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=objects.InputTokensDetails(generation.num_cached_tokens),
            output_tokens=output,
            output_tokens_details=objects.OutputTokensDetails(generation.num_reasoning_tokens),
            total_tokens=prompt + output,
        )

    def _status_of(self, section: Section) -> objects.Status:
        return "incomplete" if self._is_cut and section is self.sections[-1] else "completed"

    def _item(self, section: Section, status: objects.Status) -> objects.OutputItem:
        begins, identity = status == "in_progress", _item_id(section)
        match section.kind:
            case "call":
                called = self._offered[section.name]
                return objects.FunctionCallItem(
                    id=identity,
                    status=status,
                    call_id=section.call_id,
                    name=called.name,
                    namespace=called.namespace,
                    arguments=section.text,
                )
            case "reasoning":
                reasoning = [] if begins else [objects.ReasoningText(text=section.text)]
                return objects.ReasoningItem(id=identity, status=status, content=reasoning)
            case "text":
                return objects.OutputMessage(
                    id=identity, status=status, content=[] if begins else [self._text(section)]
                )

    def _part(self, section: Section) -> objects.ContentOfItem:
        return self._text(section) if section.kind == "text" else objects.ReasoningText(text=section.text)

    def _text(self, section: Section) -> objects.OutputText:
        return objects.OutputText(text=section.text, logprobs=self._logprobs(section.located))

    def _logprobs(self, located: Sequence[Located]) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._speller.chat(located, self._response.top_logprobs)["content"]
        return entries

    def _within(self, kind: type[objects.ItemEvent], section: Section, **fields: Any) -> bytes:
        """An event about a part of an item."""
        return self._of_item(kind, section, item_id=_item_id(section), **fields)

    def _of_item(self, kind: type[objects.ItemEvent], section: Section, **fields: Any) -> bytes:
        return self._event(kind, output_index=section.index, **fields)

    def _event(self, kind: type[objects.NumberedEvent], **fields: Any) -> bytes:
        self._number += 1
        return event(kind(sequence_number=self._number, **fields))


_ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


def _item_id(section: Section) -> str:
    return _ID_PREFIXES[section.kind] + section.id
