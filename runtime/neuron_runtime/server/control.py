"""What the supervisor tells the front end, as JSON lines on its standard input.

The end of the stream means that the supervisor is gone. The front end answers with its exit code only.
"""

from __future__ import annotations

import msgspec


class EngineStarted(msgspec.Struct, frozen=True, tag="engine_started"):
    """The n-th engine process was started; it is not ready yet, unless front ends in this one's place knew it."""

    incarnation: int
    num_predecessors: int = 0
    """So many of them have ended."""


class EngineEnded(msgspec.Struct, frozen=True, tag="engine_ended"):
    """The engine process is gone and with it every request it had; the message says why."""

    message: str


class StartDrain(msgspec.Struct, frozen=True, tag="start_drain"):
    """Not healthy from now on; admit for `delay_seconds` more, let answers run for `seconds` after that, then exit."""

    delay_seconds: float
    seconds: float


Control = EngineStarted | EngineEnded | StartDrain

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Control)


def encode_line(message: Control) -> bytes:
    return _encoder.encode(message) + b"\n"


def decode_line(line: bytes) -> Control:
    return _decoder.decode(line)
