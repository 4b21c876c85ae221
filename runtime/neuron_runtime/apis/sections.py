"""The sections of one answer in the order in which they come: reasoning, text, calls of tools.

Used by the writers of APIs with typed parts. `SectionWriter` tells where a section begins, grows and ends; a subclass
has the events and objects of its API. No I/O.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from neuron_runtime.apis.generation import Generation, Piece
from neuron_runtime.apis.logprobs import Located
from neuron_runtime.core import FinishReason
from neuron_runtime.errors import FormBroken
from neuron_runtime.text.tool_calls import CallPiece, whole_calls

SectionKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Section:
    index: int
    kind: SectionKind
    id: str
    name: str = ""
    """The name of the called function."""
    call_id: str = ""
    parts: list[str] = field(default_factory=list)
    located: list[Located] = field(default_factory=list)
    """Tokens of the text with log-probabilities, if requested."""

    @property
    def text(self) -> str:
        """The text, or the arguments of a call."""
        return "".join(self.parts)


class SectionWriter(ABC):
    """Writes the only choice of a request; a `Writer`."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.sections: list[Section] = []
        self._begun = False
        self._open: Section | None = None
        self._located: list[Located] = []
        """Tokens that no section has yet."""
        self._num_skipped = 0
        """Tokens of reasoning that were left out."""

    @abstractmethod
    def started(self) -> bytes:
        """Events before the first section."""

    @abstractmethod
    def opened(self, section: Section) -> bytes:
        """Events of a section that begins; it has no text yet."""

    @abstractmethod
    def grown(self, section: Section, delta: str, located: Sequence[Located]) -> bytes:
        """Events of new text, which the section has already."""

    @abstractmethod
    def closed(self, section: Section) -> bytes:
        """Events of a section that is complete."""

    @abstractmethod
    def ended(self) -> bytes:
        """Events behind the last section."""

    @abstractmethod
    def answer(self) -> msgspec.Struct:
        """The whole answer with all sections."""

    def pieces(self, pieces: list[Piece]) -> bytes:
        out = [] if self._begun else [self.started()]
        self._begun = True
        for piece in pieces:
            out += self._events(piece)
        return b"".join(out)

    def end(self) -> bytes:
        self._check()
        return b"".join((*self._close(), self.ended()))

    def whole(self, answers: Sequence[Piece]) -> bytes:
        self._check()
        (answer,) = answers
        answer.calls = whole_calls(answer.calls)
        self.pieces([answer])
        return msgspec.json.encode(self.answer())

    def _check(self) -> None:
        """Raises FormBroken: these APIs have an error in place of a reason why such an answer ended."""
        if self.generation.choices[0].finish_reason is FinishReason.ERROR:
            raise FormBroken("the model did not keep to the form of the answer: its backend is broken")

    def _events(self, piece: Piece) -> Iterator[bytes]:
        if piece.details is not None:
            self._located += piece.details.located
        if piece.reasoning and self.generation.ask.shows_reasoning:
            yield from self._add("reasoning", piece.reasoning)
        # Arguments of the call that is open come before text, which may come before the next call.
        calls = list(piece.calls)
        while calls and not calls[0].name:
            yield from self._add("call", calls.pop(0).arguments)
        if piece.text:
            yield from self._add("text", piece.text)
        for call in calls:
            if call.name:
                yield from self._begin("call", call)
            if call.arguments:
                yield from self._add("call", call.arguments)

    def _add(self, kind: SectionKind, delta: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        section = self.sections[-1]
        section.parts.append(delta)
        located = self._take() if kind == "text" else []
        section.located += located
        yield self.grown(section, delta, located)

    def _begin(self, kind: SectionKind, call: CallPiece | None = None) -> Iterator[bytes]:
        yield from self._close()
        self._open = Section(len(self.sections), kind, secrets.token_hex(16))
        if call is not None:
            self._open.name, self._open.call_id = call.name, call.id
        self.sections.append(self._open)
        yield self.opened(self._open)

    def _close(self) -> Iterator[bytes]:
        section, self._open = self._open, None
        if section is not None:
            yield self.closed(section)

    def _take(self) -> list[Located]:
        """The tokens since the last text, without those of the reasoning before it."""
        skipped = self.generation.num_reasoning_tokens - self._num_skipped
        self._num_skipped += skipped
        taken, self._located = self._located[skipped:], []
        return taken


def event(struct: msgspec.Struct) -> bytes:
    """A server-sent event that is named by its tag."""
    return b"event: %b\ndata: %b\n\n" % (str(struct.__struct_config__.tag).encode(), msgspec.json.encode(struct))
