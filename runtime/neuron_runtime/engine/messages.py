"""The border between the engine process and a front end: the messages, their encoding, and the sockets they take.

A front end sends requests and aborts, and says when it takes another's place; the engine sends how far its start is,
then **one message per step** with all that the step brought; where there are several front ends, one to each, with
what its own requests brought. The encoding is msgpack, checked against these types on the way in. Both ends run on one
machine and from one installation, so there is no version. Nothing here decides anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from neuron_runtime.core import BackendLimits, FinishReason, Request, TokenEvent, TokenLogprobs
from neuron_runtime.engine.backpressure import QueueLimits
from neuron_runtime.engine.stats import EngineStats

ENGINE_INBOX = "engine-inbox"
ENGINE_OUTBOX = "engine-outbox"
RECONNECT_MILLISECONDS = 10
"""How often whoever is early looks whether the other process is there yet."""


def request_id(front_end: int, number: int) -> str:
    """The id of the n-th request of a front end."""
    return f"{front_end}-{number}"


def front_end_of(request_id: str) -> int:
    """Whose request it is."""
    return int(request_id.partition("-")[0])


def outbox_of(front_end: int) -> str:
    """The name of the socket on which a front end hears from the engine."""
    return f"{ENGINE_OUTBOX}-{front_end}"


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Front end to engine: a request whose limits were checked."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Front end to engine: whoever asked has left; unknown ids are fine."""

    request_ids: tuple[str, ...]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Front end to engine, when it takes the place of one that has ended: nobody waits for what that one asked for."""

    front_end: int


ToEngine = Add | Abort | Joined


class StartProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Engine to front end, while it starts."""

    stage: str
    share: float


class ModelFound(msgspec.Struct, frozen=True, tag="model"):
    """Engine to front end: the model's files (not necessarily its weights) are in this folder."""

    model_dir: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Engine to front end: it can serve, within these limits."""

    limits: BackendLimits
    queue: QueueLimits
    load_seconds: float
    warm_up_seconds: float


class First(msgspec.Struct, frozen=True, array_like=True):
    """What is told once for a request, with its first tokens."""

    num_cached_tokens: int
    queue_seconds: float
    prompt_logprobs: tuple[TokenLogprobs, ...]


class News(msgspec.Struct, frozen=True, array_like=True):
    """What one step brought one request; a `core.TokenEvent` in few bytes."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if asked for."""
    first: First | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.first.num_cached_tokens if self.first else 0

    @property
    def queue_seconds(self) -> float | None:
        """With the first tokens alone."""
        return self.first.queue_seconds if self.first else None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the prompt from its second token on, if asked for; with the first tokens alone."""
        return self.first.prompt_logprobs if self.first else ()


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """The engine did not take a request: 429 when it may be sent again later, else 400."""

    request_id: str
    message: str
    field: str | None = None
    retry_after_seconds: float | None = None


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Engine to front end: all that one turn of the loop brought."""

    news: tuple[News, ...]
    refused: tuple[Refused, ...]
    stats: EngineStats


FromEngine = StartProgress | ModelFound | Ready | Step


def socket(context: zmq.Context[Any], kind: int, run_dir: Path, name: str, incarnation: int) -> Any:
    """An end of the n-th engine's border; a restarted engine never sees its predecessor's mail.

    Whoever receives (PULL) listens, whoever sends (PUSH) connects, so no send ever waits: a sender keeps its mail
    until the other side is there. What piles up is bounded by the engine's queue and by max_tokens.
    """
    made = context.socket(kind)
    made.set_hwm(0)
    made.linger = 0
    made.reconnect_ivl = RECONNECT_MILLISECONDS
    at = f"ipc://{run_dir}/{name}-{incarnation}"
    if kind == zmq.PULL:
        made.bind(at)
    else:
        made.connect(at)
    return made


encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def decode_to_engine(raw: bytes) -> ToEngine:
    return _to_engine.decode(raw)


def decode_from_engine(raw: bytes) -> FromEngine:
    return _from_engine.decode(raw)


def news(event: TokenEvent) -> News:
    first = None
    if event.first:
        first = First(event.num_cached_tokens, event.queue_seconds or 0.0, event.prompt_logprobs)
    return News(event.request_id, event.token_ids, event.finish_reason, event.logprobs, first)
