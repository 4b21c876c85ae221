"""What the compile process tells its parent: lines of JSON in a pipe, apart from what compilers print."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from neuron_runtime.artifacts.store import CompiledGraph


class Began(msgspec.Struct, frozen=True, tag=True):
    """A graph is being compiled, or several together; they count from 1."""

    graph: int
    num_graphs: int
    name: str
    together: bool = False


class Made(msgspec.Struct, frozen=True, tag=True):
    """One of several that are compiled together is ready."""

    graph: int
    num_graphs: int
    name: str
    seconds: float
    """Since they began."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Everything is done."""

    tools: dict[str, str] = {}
    graphs: tuple[CompiledGraph, ...] = ()
    peak_bytes: int = 0
    """The peak memory of the largest of its processes."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The error with which it ends."""

    exit_code: int
    message: str
    trace: str = ""


Message = Began | Made | Ended | Failed


def encode_line(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class Lines:
    """Puts messages together from what was read."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, raw: bytes) -> Iterator[Message]:
        *lines, self._rest = (self._rest + raw).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=Message)
