"""The protocol between the engine process and a front end: messages, encoding and sockets.

The engine sends its start-up progress, then **one message per step**. The encoding is msgpack, validated against these
types on receipt; both ends run on one machine from one installation, so there is no version.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from neuron_runtime.core import BackendLimits, Request, TokenEvent
from neuron_runtime.engine.backpressure import QueueLimits
from neuron_runtime.engine.pixel_files import PixelsAt
from neuron_runtime.engine.stats import EngineStats

ENGINE_INBOX = "engine-inbox"
ENGINE_OUTBOX = "engine-outbox"
RECONNECT_MILLISECONDS = 10
"""Retry interval while the other process has not opened its socket."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Front end to engine: an admitted request. Its id is a number, which rises from request to request."""

    request: Request
    pixels: PixelsAt | None = None
    """Of its pictures, which come without; None: it has none, or they are in it."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Front end to engine: stop these requests; unknown ids are ignored."""

    request_ids: tuple[str, ...]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Front end to engine, when it replaces one that has exited: abort the requests of the old one.

    Requests of the old one have lower numbers. They may arrive later than this message, because sockets are read in
    turn.
    """

    first_number: int


class LoadAdapter(msgspec.Struct, frozen=True, tag="load"):
    """Front end to engine: requests may use this adapter, once `AdapterNews` says that it is loaded.

    A new engine knows none. folder: of files that were checked. name: that clients ask for; empty: it has none.
    """

    digest: str
    folder: str
    name: str = ""


class DropAdapter(msgspec.Struct, frozen=True, tag="drop"):
    """Front end to engine: no further request uses this adapter; unknown ones are ignored."""

    digest: str


ToEngine = Add | Abort | Joined | LoadAdapter | DropAdapter


class StartProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Engine to front end, during start-up."""

    stage: str
    share: float


class ModelFound(msgspec.Struct, frozen=True, tag="model"):
    """Engine to front end: the folder of the model's files (not necessarily with weights)."""

    model_dir: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Engine to front end: ready to serve, with these limits."""

    limits: BackendLimits
    queue: QueueLimits
    load_seconds: float
    warm_up_seconds: float
    num_ranks: int = 1


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """The engine refused a request: 429 if it may be retried later, else as `InvalidRequest` with this code."""

    request_id: str
    message: str
    field: str | None = None
    retry_after_seconds: float | None = None
    code: str | None = None


class AdapterNews(msgspec.Struct, frozen=True, tag="adapter"):
    """Engine to front end: the outcome of `LoadAdapter`."""

    digest: str
    failure: str = ""
    """Why it cannot be loaded; empty: it is."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Engine to front end: the results of one turn of the loop."""

    events: tuple[TokenEvent, ...]
    refused: tuple[Refused, ...]
    stats: EngineStats


FromEngine = StartProgress | ModelFound | Ready | AdapterNews | Step


def socket(context: zmq.Context[Any], kind: int, run_dir: Path, name: str, incarnation: int) -> Any:
    """A socket of the n-th engine process; a restarted engine never receives messages for its predecessor.

    The receiver (PULL) binds and the sender (PUSH) connects, so sends never block: the sender queues messages until
    the receiver exists. The queue is bounded by the engine's limits and max_tokens.
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
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
