"""How the members of a group meet, notice that one is gone, and end together.

Each member has one thread here that owns a socket. It speaks while the other threads load a model or wait inside a
collective of the device that may never end, so it is this thread that ends a process: it calls `on_end`, which must not
return to work.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from neuron_runtime.artifacts.key import differences
from neuron_runtime.distributed import wire
from neuron_runtime.distributed.layout import Layout, read_secret
from neuron_runtime.distributed.wire import (
    AdapterRead,
    Beat,
    Facts,
    Farewell,
    Hello,
    Keys,
    Leaving,
    Loaded,
    ReadAdapter,
    Welcome,
)
from neuron_runtime.errors import ExitCode, FatalError, ServingError, joined

LOADING_FACTOR = 6.0
"""While models are loaded, a member may be silent this many times as long: a library may stop all threads."""
BEATS_PER_LIMIT = 8.0
MAX_BEAT_SECONDS = 1.0
POLL_MILLISECONDS = 50
FAREWELL_MILLISECONDS = 1000
"""Time that the last frames have to leave."""
CLOSED_SHARE = 0.25
"""A member whose connection is closed is lost after this share of the limit for silence."""
CAUSE_SECONDS = 3.0
"""How long a rank whose collective failed waits for somebody to say why."""

OnEnd = Callable[[FatalError], None]


class Lifeline(Protocol):
    """Where the thread says until when it will show life again; see `processes.lifeline.Deadline`. Whoever started the
    process reads it: a process that is stopped cannot end itself."""

    def set(self, seconds: float) -> None: ...

    def clear(self) -> None: ...


def member_lost(message: str) -> FatalError:
    return FatalError(ExitCode.GROUP_MEMBER_LOST, message)


def disagrees(message: str) -> FatalError:
    return FatalError(ExitCode.GROUP_DISAGREES, message)


@dataclass
class _Peer:
    """What a member knows of another one."""

    heard: float
    closed_since: float | None = None
    process: str = ""
    limits: str | None = None


class _Control(ABC):
    """The thread, and what others wait for."""

    def __init__(self, layout: Layout, kind: int, on_end: OnEnd, lifeline: Lifeline) -> None:
        self.layout = layout
        self._lifeline = lifeline
        self._on_end = on_end
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = wire.make_socket(self._context, kind, wire.MAX_MESSAGE_BYTES)
        self.keys = Keys(read_secret(layout))
        self._changed = threading.Condition()
        self.failure: FatalError | None = None
        """Why the group ended, if it did."""
        self._farewell: tuple[int, str] | None = None
        self._beat_seconds = min(layout.silence_seconds / BEATS_PER_LIMIT, MAX_BEAT_SECONDS)
        self._closed_limit = layout.silence_seconds * CLOSED_SHARE
        """Seconds for which a connection may be closed."""
        self._serving = False
        """Whether all ranks have loaded."""
        self._peers: dict[int, _Peer] = {}
        """Those that this member hears, by rank. Only the thread writes it."""
        self._next_beat = 0.0
        self._last_turn = time.monotonic()
        self._deadline = self._last_turn + layout.join_seconds
        """When the meeting fails."""
        self._thread = threading.Thread(target=self._run, name="group", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises why the group ended, if it did."""
        if self.failure is not None:
            raise self.failure

    def finish(self, error: ServingError | None) -> None:
        """Tell the others why this member ends, and stop. None: its work is done."""
        code = 0 if error is None else int(error.exit_code) if isinstance(error, FatalError) else 1
        with self._changed:
            self._farewell = self._farewell or (code, "" if error is None else str(error))
        self._thread.join()

    def cause_of(self, error: FatalError) -> FatalError:
        """A collective failed here, because another rank ended. Returns why, if somebody says so in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, CAUSE_SECONDS)
        return self.failure or error

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ready() or self.failure is not None)
        self.check()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        failure: FatalError | None = None
        try:
            while self._farewell is None:
                self._socket.poll(POLL_MILLISECONDS)
                self._turn()
        except Exception as error:  # noqa: BLE001 - without this thread nobody would notice that the group is gone
            failure = error if isinstance(error, FatalError) else member_lost(f"{type(error).__name__}: {error}")
            self._farewell = (int(failure.exit_code), str(failure))
        self._lifeline.clear()
        self._say_farewell(*self._farewell)
        self._close()
        if failure is not None:
            self.failure = failure
            self._notify()
            self._on_end(failure)

    def _close(self) -> None:
        self._socket.close(linger=FAREWELL_MILLISECONDS)
        self._context.term()

    def _turn(self) -> None:
        before, self._last_turn = self._last_turn, time.monotonic()
        if self._last_turn - before > self.layout.silence_seconds / 2:
            # This process did not run; what others said meanwhile has not been read yet.
            for peer in self._peers.values():
                peer.heard, peer.closed_since = self._last_turn, peer.closed_since and self._last_turn
        self._lifeline.set(self._patience)
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._receive(frames, time.monotonic())
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_seconds
            self._beat(now)
        self._look(now)

    @property
    def _patience(self) -> float:
        """Seconds for which a member may be silent now."""
        return self.layout.silence_seconds * (1.0 if self._serving else LOADING_FACTOR)

    def _check_peers(self, now: float) -> None:
        """Raises FatalError if one is silent for too long, or stays without a connection."""
        for rank, peer in self._peers.items():
            if now - peer.heard > self._patience:
                raise member_lost(f"{self.layout.named(rank)}: silent for {now - peer.heard:.1f} s")
            if peer.closed_since is not None and now - peer.closed_since > self._closed_limit:
                raise member_lost(f"{self.layout.named(rank)}: closed its connection")

    @abstractmethod
    def _receive(self, frames: list[bytes], now: float) -> None: ...

    @abstractmethod
    def _beat(self, now: float) -> None: ...

    @abstractmethod
    def _look(self, now: float) -> None:
        """Raises FatalError if somebody is gone."""

    @abstractmethod
    def _say_farewell(self, code: int, message: str) -> None: ...


class LeaderControl(_Control):
    """Rank 0's side.

    Args:
        addresses: for the welcome, of steps and of acknowledgements.
        on_end: another member ended the group; called once, on the thread.
        on_leaving: a node of the group must be given up soon.
    """

    def __init__(
        self,
        layout: Layout,
        facts: Facts,
        addresses: Sequence[str],
        *,
        on_end: OnEnd,
        on_leaving: Callable[[str], None] = lambda message: None,
        lifeline: Lifeline,
    ) -> None:
        super().__init__(layout, zmq.ROUTER, on_end, lifeline)
        self.group = os.urandom(8).hex()
        self._facts = facts
        self._welcome = Welcome(self.group, *addresses)
        self._on_leaving = on_leaving
        self._welcomed = False
        self._others = range(1, layout.size)
        self._asked: ReadAdapter | None = None
        """What is to be sent."""
        self._reading = 0
        """Number of the latest request to read an adapter."""
        self._read: dict[int, AdapterRead] = {}
        """Answers to it, by rank."""
        self.keys.guard(self._socket)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        self._socket.bind(layout.wire if layout.num_nodes == 1 else f"tcp://*:{layout.port}")

    def wait_joined(self) -> None:
        """Until all members have said hello and agree. Raises FatalError."""
        self._wait(lambda: self._welcomed)

    def wait_loaded(self, limits: str) -> None:
        """Until all members have loaded, with limits of this hash. Raises FatalError."""
        self._wait(lambda: all(member.limits is not None for member in self._peers.values()))
        for rank, member in sorted(self._peers.items()):
            if member.limits != limits:
                raise disagrees(f"{self.layout.named(rank)}: other limits of the backend than rank 0")
        self._serving = True
        self._next_beat = 0.0

    def ask_to_read(self, folder: str) -> int:
        """All others read their parts of an adapter. One request at a time; returns its number."""
        with self._changed:
            self._reading += 1
            self._read.clear()
            self._asked = ReadAdapter(self.group, self._reading, folder)
            return self._reading

    def wait_read(self, digest: str) -> None:
        """Until all have. Raises FatalError if one cannot, or has another adapter than the one with this digest; the
        group goes on."""
        self._wait(lambda: len(self._read) == len(self._others))
        for rank, answer in sorted(self._read.items()):
            if failure := answer.failure or (answer.digest != digest and "it has another adapter there"):
                raise FatalError(ExitCode.INVALID_ADAPTER, f"{self.layout.named(rank)}: {failure}")

    def _receive(self, frames: list[bytes], now: float) -> None:
        identity, frame = frames[0], frames[-1]
        try:
            message = wire.decode_to_leader(frame)
        except wire.BadFrame as error:
            raise disagrees(f"rank {identity.decode(errors='replace')[:20]}: {error}") from error
        if isinstance(message, Hello):
            self._greet(message, now)
            return
        rank, group = message.rank, message.group
        if group != self.group or rank not in self._peers:
            text = "the leader of the group was started anew"
            self._send(rank, Farewell(0, group, int(ExitCode.GROUP_MEMBER_LOST), text))
            return
        self._peers[rank].heard = now
        match message:
            case Loaded(limits=limits):
                self._peers[rank].limits = limits
                self._notify()
            case AdapterRead(number=number) if number == self._reading:
                self._read[rank] = message
                self._notify()
            case Leaving():
                self._on_leaving(f"{self.layout.named(rank)} must leave")
            case Farewell(_, _, code, text):
                raise FatalError(_code_for_others(code), f"{self.layout.named(rank)}: {text}")

    def _greet(self, hello: Hello, now: float) -> None:
        rank = hello.rank
        if rank not in self._others or hello.size != self.layout.size:
            text = f"rank {rank} of {hello.size} wants to join, but the leader has ranks 1 to {self.layout.size - 1}"
            raise disagrees(text)
        differing = differences(msgspec.structs.asdict(self._facts), msgspec.structs.asdict(hello.facts))
        if differing:
            raise disagrees(f"{self.layout.named(rank)} differs from rank 0: {joined(differing)}")
        known = self._peers.get(rank)
        if self._welcomed:
            if known is None or known.process != hello.process:
                raise member_lost(f"{self.layout.named(rank)} was restarted")
            known.heard = now
            self._send(rank, self._welcome)
            return
        self._peers[rank] = _Peer(now, process=hello.process)
        if len(self._peers) == len(self._others):
            self._welcomed = True
            for other in self._others:
                self._send(other, self._welcome)
            self._notify()

    def _beat(self, now: float) -> None:
        if not self._welcomed:
            return
        for rank, member in self._peers.items():
            if self._send(rank, Beat(0, self.group, self._serving)):
                member.closed_since = None
            else:
                member.closed_since = member.closed_since or now

    def _look(self, now: float) -> None:
        if self._welcomed:
            self._check_peers(now)
            self._send_asked()
            return
        for rank in [rank for rank, peer in self._peers.items() if now - peer.heard > self._patience]:
            del self._peers[rank]
        if now > self._deadline:
            missing = [self.layout.named(rank) for rank in self._others if rank not in self._peers]
            raise member_lost(f"{joined(missing)}: did not join within {self.layout.join_seconds:.0f} s")

    def _send_asked(self) -> None:
        with self._changed:
            asked, self._asked = self._asked, None
        if asked is not None:
            for rank in self._others:
                self._send(rank, asked)

    def _say_farewell(self, code: int, message: str) -> None:
        for rank in self._others:
            self._send(rank, Farewell(0, self.group, code, message[: wire.MAX_TEXT]))

    def _send(self, rank: int, message: wire.ToMember) -> bool:
        """False if there is no connection to this rank."""
        try:
            self._socket.send_multipart([str(rank).encode(), wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


class MemberControl(_Control):
    """The side of every other rank.

    on_end: the leader or another member ended the group with an error; called once, on the thread.
    """

    def __init__(self, layout: Layout, rank: int, facts: Facts, on_end: OnEnd, lifeline: Lifeline) -> None:
        super().__init__(layout, zmq.DEALER, on_end, lifeline)
        self.rank = rank
        self._hello = Hello(rank, layout.size, os.urandom(8).hex(), facts)
        self.welcome: Welcome | None = None
        self.done = False
        """Whether the leader said that the work is done."""
        self._leader = self._peers[0] = _Peer(time.monotonic())
        self._must_leave = False
        self._waiting: list[Loaded | Leaving | AdapterRead] = []
        self.to_read: SimpleQueue[ReadAdapter | None] = SimpleQueue()
        """Adapters that the leader asks to read. The first may come before somebody takes it."""
        self.keys.unlock(self._socket)
        self._socket.identity = str(rank).encode()
        self._connection = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(layout.wire)

    @property
    def group(self) -> str:
        return self.welcome.group if self.welcome else ""

    def wait_joined(self) -> Welcome:
        """Until the leader has welcomed all. Raises FatalError."""
        self._wait(lambda: self.welcome is not None or self.done)
        assert self.welcome is not None
        return self.welcome

    def loaded(self, limits: str) -> None:
        """Tell the leader that this rank is ready for steps."""
        self._waiting.append(Loaded(self.rank, self.group, limits))

    def read(self, number: int, digest: str = "", failure: str = "") -> None:
        """Answer a request to read an adapter."""
        self._waiting.append(AdapterRead(self.rank, self.group, number, digest, failure[: wire.MAX_TEXT]))

    def leave(self) -> None:
        """Ask the leader to end the group in good order, because this node must be given up. It goes on until then; if
        there is no group yet, it ends."""
        self._must_leave = True
        self._waiting.append(Leaving(self.rank, self.group))

    def _receive(self, frames: list[bytes], now: float) -> None:
        self._leader.heard = now
        try:
            message = wire.decode_to_member(frames[-1])
        except wire.BadFrame as error:
            raise disagrees(f"rank 0: {error}") from error
        match message:
            case Welcome(group) if self.welcome is None:
                self.welcome = message
                self._notify()
            case Welcome(group) | Beat(_, group) if self.welcome is not None and group != self.group:
                raise member_lost("the leader of the group was started anew")
            case Beat(_, _, serving):
                self._serving = serving
            case ReadAdapter():
                self.to_read.put(message)
            case Farewell(_, _, 0):
                self.done = True
                self._farewell = (0, "")
                self._notify()
            case Farewell(_, _, code, text):
                raise FatalError(_code_for_others(code), f"rank 0 ended: {text}" if text else "rank 0 ended")

    def _beat(self, now: float) -> None:
        self._send(self._hello if self.welcome is None else Beat(self.rank, self.group))

    def _look(self, now: float) -> None:
        while self._waiting and self.welcome is not None:
            self._send(self._waiting.pop(0))
        while self._connection.poll(0):
            event = recv_monitor_message(self._connection)["event"]
            self._leader.closed_since = now if event == zmq.EVENT_DISCONNECTED else None
        if self.welcome is None:
            if self._must_leave:
                raise member_lost("this node must be given up, and the group is not complete")
            if now > self._deadline:
                raise member_lost(f"the group was not complete within {self.layout.join_seconds:.0f} s")
        else:
            self._check_peers(now)

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._connection.close()
        super()._close()

    def _say_farewell(self, code: int, message: str) -> None:
        if code:
            self._send(Farewell(self.rank, self.group, code, message[: wire.MAX_TEXT]))

    def _send(self, message: wire.ToLeader) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK)


def _code_for_others(code: int) -> ExitCode:
    """A member's own failure is, for the others, a lost member."""
    return ExitCode.GROUP_DISAGREES if code == ExitCode.GROUP_DISAGREES else ExitCode.GROUP_MEMBER_LOST
