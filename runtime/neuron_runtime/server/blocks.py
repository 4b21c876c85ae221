"""The parts of one answer in the order in which they come: reasoning, text. Used by writers of APIs with typed parts.

`BlockWriter` tells where a part begins, grows and ends; a subclass has the events and objects of its API. No I/O.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from neuron_runtime.server.generation import Generation, Piece
from neuron_runtime.server.responding import Answer

BlockKind = Literal["reasoning", "text"]


@dataclass(slots=True)
class Block:
    """One part."""

    index: int
    kind: BlockKind
    id: str
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockWriter(ABC):
    """Writes the only choice of a request; a `Writer`."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.blocks: list[Block] = []
        self._begun = False
        self._open = False
        self._shows_reasoning = generation.ask.shows_reasoning

    @abstractmethod
    def started(self) -> bytes:
        """Events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> bytes:
        """Events of a block that begins; it has no text yet."""

    @abstractmethod
    def grown(self, block: Block, delta: str) -> bytes:
        """Events of new text, which the block has already."""

    @abstractmethod
    def closed(self, block: Block) -> bytes:
        """Events of a block that is complete."""

    @abstractmethod
    def ended(self) -> bytes:
        """Events behind the last block."""

    @abstractmethod
    def answer(self) -> msgspec.Struct:
        """The whole answer with all blocks."""

    def pieces(self, pieces: list[Piece]) -> bytes:
        out = [] if self._begun else [self.started()]
        self._begun = True
        for piece in pieces:
            if piece.reasoning and self._shows_reasoning:
                out += self._add("reasoning", piece.reasoning)
            if piece.text:
                out += self._add("text", piece.text)
        return b"".join(out)

    def end(self) -> bytes:
        return b"".join((*self._close(), self.ended()))

    def whole(self, answers: Sequence[Answer]) -> bytes:
        answer = answers[0]
        parts: tuple[tuple[BlockKind, list[str]], ...] = (
            ("reasoning", answer.reasonings if self._shows_reasoning else []),
            ("text", answer.texts),
        )
        for kind, texts in parts:
            if any(texts):
                self.blocks.append(Block(len(self.blocks), kind, secrets.token_hex(16), texts))
        return msgspec.json.encode(self.answer())

    def _add(self, kind: BlockKind, delta: str) -> list[bytes]:
        out = []
        if not self._open or self.blocks[-1].kind != kind:
            out += self._close()
            self.blocks.append(Block(len(self.blocks), kind, secrets.token_hex(16)))
            self._open = True
            out.append(self.opened(self.blocks[-1]))
        block = self.blocks[-1]
        block.parts.append(delta)
        return [*out, self.grown(block, delta)]

    def _close(self) -> list[bytes]:
        was_open, self._open = self._open, False
        return [self.closed(self.blocks[-1])] if was_open else []


def event(struct: msgspec.Struct) -> bytes:
    """A server-sent event that is named by its tag."""
    return b"event: %b\ndata: %b\n\n" % (str(struct.__struct_config__.tag).encode(), msgspec.json.encode(struct))
