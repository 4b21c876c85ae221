"""What members of a group send to each other: messages, their encoding (msgpack, validated against these types on
receipt), and the sockets.

Steps, acknowledgements and everything else (joining, heartbeats, the end) have sockets of their own, so that no
heartbeat waits behind a step. Connections are CurveZMQ's, and the leader's *public* key is derived from the group's
secret as well as its private one: whoever lacks the secret can neither greet the leader nor answer for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from neuron_runtime.core import Batch, Late
from neuron_runtime.errors import ExitCode, FatalError

PROTOCOL = 3
"""Raised when a message changes."""

MAX_STEP_BYTES = 256 * 2**20
"""The limit of a frame with a step, which has the token ids of all prompts that it adds."""
MAX_MESSAGE_BYTES = 64 * 2**10
"""The limit of any other frame."""
MAX_TEXT = 2000
CONNECT_MILLISECONDS = 3000
"""The kernel alone tries for minutes, ever more rarely: a leader that appears meanwhile would be noticed late."""
RECONNECT_MILLISECONDS = 50
MAX_RECONNECT_MILLISECONDS = 1000


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all ranks. Values are plain words or hashes."""

    config: str
    """Hash of the configuration."""
    weights: str
    """Digest of the model."""
    artifact: str = ""
    """Key of the compiled model, if it is compiled."""
    libraries: Mapping[str, str] = {}
    """Versions by name."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Member to leader, again and again until it is welcome.

    process: random, so that a member that was restarted is not taken for the one before it.
    """

    rank: int
    size: int
    process: str
    facts: Facts


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Both ways: its sender lives. group: that of the welcome. serving: from the leader, all ranks have loaded."""

    rank: int
    group: str
    serving: bool = False


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Member to leader: it has loaded and warmed up; limits: hash of the backend's limits."""

    rank: int
    group: str
    limits: str


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Member to leader: its node must be given up soon."""

    rank: int
    group: str


class ReadAdapter(msgspec.Struct, frozen=True, tag="read adapter"):
    """Leader to member: read your part of an adapter, and say how it went. number: of this request."""

    group: str
    number: int
    folder: str


class AdapterRead(msgspec.Struct, frozen=True, tag="adapter read"):
    """Member to leader: the answer. digest: of what its folder has; failure: why it cannot be read."""

    rank: int
    group: str
    number: int
    digest: str = ""
    failure: str = ""


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """Both ways: its sender ends, with this exit code. 0, from the leader only: the work is done."""

    rank: int
    group: str
    exit_code: int
    message: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Leader to member: all have joined; load now. group: random, the name of this start of the group."""

    group: str
    steps: str
    """Address of the leader's publishing socket; a port behind `:` alone is one on the leader's host."""
    acknowledgements: str
    """The same for its inbox."""


class Launch(msgspec.Struct, frozen=True, tag="launch", array_like=True):
    """Leader to members: `Backend.launch`. number: of this frame since the welcome, without gaps."""

    number: int
    batch: Batch


class Sample(msgspec.Struct, frozen=True, tag="sample", array_like=True):
    """Leader to members: `Backend.sample`."""

    number: int
    step: int
    late: Late | None


class Collect(msgspec.Struct, frozen=True, tag="collect", array_like=True):
    """Leader to members: `Backend.collect`, and then acknowledge."""

    number: int
    step: int


class AddAdapter(msgspec.Struct, frozen=True, tag="add adapter", array_like=True):
    """Leader to members: `Backend.add_adapter`. reading: number of the request by which they have read it."""

    number: int
    digest: str
    folder: str
    reading: int


class RemoveAdapter(msgspec.Struct, frozen=True, tag="remove adapter", array_like=True):
    """Leader to members: `Backend.remove_adapter`."""

    number: int
    digest: str


class Ack(msgspec.Struct, frozen=True, tag="ack", array_like=True):
    """Member to leader: the step is done here too. tokens: see `hash_of`."""

    rank: int
    group: str
    step: int
    tokens: bytes


ToLeader = Hello | Beat | Loaded | Leaving | AdapterRead | Farewell
ToMember = Welcome | Beat | ReadAdapter | Farewell
StepMessage = Launch | Sample | Collect | AddAdapter | RemoveAdapter

M = TypeVar("M")

_HEAD = bytes([0xC7, PROTOCOL])
"""The second byte is the version."""

_encoder = msgspec.msgpack.Encoder()


class BadFrame(ValueError):
    """A frame that no member of this version sends."""


def encode(message: ToLeader | ToMember | StepMessage | Ack) -> bytes:
    """A frame. Raises FatalError if it is larger than any receiver accepts."""
    frame = _HEAD + _encoder.encode(message)
    if len(frame) > MAX_STEP_BYTES:
        text = f"a step of {len(frame)} bytes is too large for the group, max {MAX_STEP_BYTES}: lower maxSequences"
        raise FatalError(ExitCode.DEVICE_FAILED, text)
    return frame


def _decoded(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    """Raises BadFrame."""
    if frame[:1] != _HEAD[:1] or len(frame) < len(_HEAD):
        raise BadFrame("this is not a frame of a group")
    if frame[1] != PROTOCOL:
        raise BadFrame(f"protocol version {frame[1]} instead of {PROTOCOL}")
    try:
        return decoder.decode(memoryview(frame)[len(_HEAD) :])
    except msgspec.DecodeError as error:
        raise BadFrame(f"a frame that cannot be read: {error}") from error


decode_to_leader: Callable[[bytes], ToLeader] = partial(_decoded, msgspec.msgpack.Decoder(ToLeader))
decode_to_member: Callable[[bytes], ToMember] = partial(_decoded, msgspec.msgpack.Decoder(ToMember))
decode_step: Callable[[bytes], StepMessage] = partial(_decoded, msgspec.msgpack.Decoder(StepMessage))
decode_ack: Callable[[bytes], Ack] = partial(_decoded, msgspec.msgpack.Decoder(Ack))


def hash_of(token_ids: Sequence[Sequence[int]]) -> bytes:
    """Eight bytes that tell whether two ranks sampled the same tokens."""
    return hashlib.blake2b(_encoder.encode(token_ids), digest_size=8).digest()


def fingerprint(value: Any) -> str:
    """A short hash of plain data, equal wherever the data is equal."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


class Keys:
    """The keys of a group's connections, from its secret."""

    def __init__(self, secret: bytes) -> None:
        self._server_private, self.server = _pair(secret, b"leader")
        self._client_private, self._client = _pair(secret, b"member")

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Before a socket binds."""
        socket.curve_server = True
        socket.curve_secretkey = self._server_private
        socket.curve_publickey = self.server

    def unlock(self, socket: zmq.Socket[bytes]) -> None:
        """Before a socket connects."""
        socket.curve_serverkey = self.server
        socket.curve_secretkey = self._client_private
        socket.curve_publickey = self._client


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    key = hashlib.blake2b(b"neuron-serving group " + role, key=hashlib.sha512(secret).digest(), digest_size=32)
    private = z85.encode(key.digest())
    return private, zmq.curve_public(private)


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, max_bytes: int) -> zmq.Socket[bytes]:
    """A socket that queues without limit, drops nothing, and refuses frames that are too large."""
    made = context.socket(kind)
    made.set_hwm(0)
    made.linger = 0
    made.maxmsgsize = max_bytes
    made.connect_timeout = CONNECT_MILLISECONDS
    made.reconnect_ivl = RECONNECT_MILLISECONDS
    made.reconnect_ivl_max = MAX_RECONNECT_MILLISECONDS
    made.ipv6 = True
    return made
