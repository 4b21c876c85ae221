"""A group whose members are threads of the test: the leader's backend, and loops that follow it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from neuron_runtime.backend_protocol import Backend
from neuron_runtime.distributed import wire
from neuron_runtime.distributed.control import LeaderControl, MemberControl
from neuron_runtime.distributed.layout import MIN_SECRET_BYTES, Layout, read_secret
from neuron_runtime.distributed.replicated import (
    DigestOf,
    ReplicatedBackend,
    StepChannel,
    StepReceiver,
    follow,
    no_digest,
)
from neuron_runtime.distributed.wire import Facts, Keys
from neuron_runtime.errors import FatalError
from neuron_runtime.processes.run_dir import made_run_dir

FACTS = Facts(config="c", weights="w", artifact="", libraries={"torch": "2.9"})


class Unwatched:
    """A lifeline that nobody reads."""

    def set(self, seconds: float) -> None: ...

    def clear(self) -> None: ...


def local_layout(run_dir: Path, size: int, silence_seconds: float = 60.0, join_seconds: float = 60.0) -> Layout:
    made = Layout(size=size, silence_seconds=silence_seconds, join_seconds=join_seconds)
    return made.in_folder(run_dir)


def tcp_layout(run_dir: Path, size: int, port: int, silence_seconds: float = 60.0) -> Layout:
    """Every member is a node of its own, over TCP on this machine."""
    secret = run_dir / "secret"
    secret.write_text("s" * MIN_SECRET_BYTES)
    return Layout(
        size=size,
        num_nodes=size,
        leader="127.0.0.1",
        port=port,
        secret_file=str(secret),
        silence_seconds=silence_seconds,
        join_seconds=60.0,
    )


@dataclass
class Ends:
    """What a member was told at the end."""

    told: list[FatalError] = field(default_factory=list)
    event: threading.Event = field(default_factory=threading.Event)

    def __call__(self, error: FatalError) -> None:
        self.told.append(error)
        self.event.set()

    def wait(self) -> FatalError:
        assert self.event.wait(60), "the group did not end"
        return self.told[0]


@dataclass
class Member:
    rank: int
    backend: Backend
    ends: Ends
    control: MemberControl
    thread: threading.Thread
    raised: list[BaseException] = field(default_factory=list)


@dataclass
class Group:
    leader: ReplicatedBackend
    control: LeaderControl
    channel: StepChannel
    ends: Ends
    members: list[Member]

    def finish(self) -> None:
        """End in good order; every member must have had no error."""
        self.control.finish(None)
        for member in self.members:
            member.thread.join(60)
            assert not member.thread.is_alive(), f"rank {member.rank} did not end"
            assert not member.raised, member.raised


def member_of(
    layout: Layout,
    rank: int,
    make: Callable[[], Backend],
    facts: Facts = FACTS,
    begin: bool = True,
    *,
    digest_of: DigestOf = no_digest,
) -> Member:
    ends, raised = Ends(), list[BaseException]()
    control = MemberControl(layout, rank, facts, ends, Unwatched())
    backend = make()

    def run() -> None:
        receiver = None
        try:
            receiver = StepReceiver(layout, control.keys, control.wait_joined())
            backend.warm_up(lambda stage, share: None)
            control.loaded(wire.fingerprint(backend.limits))
            follow(backend, receiver, control, digest_of=digest_of)
        except BaseException as error:  # noqa: BLE001 - asserted by the test
            raised.append(error)
        finally:
            if receiver is not None:
                receiver.close()

    member = Member(rank, backend, ends, control, threading.Thread(target=run, daemon=True), raised)
    control.start()
    if begin:
        member.thread.start()
    return member


def leader_of(layout: Layout, backend: Backend, facts: Facts = FACTS, digest_of: DigestOf = no_digest) -> Group:
    channel, ends = StepChannel(layout, Keys(read_secret(layout))), Ends()
    control = LeaderControl(layout, facts, channel.addresses, on_end=ends, lifeline=Unwatched())
    control.start()
    return Group(ReplicatedBackend(backend, channel, control, digest_of), control, channel, ends, [])


@contextmanager
def group_of(
    make: Callable[[], Backend],
    size: int,
    layout: Callable[[Path], Layout] | None = None,
    digest_of: DigestOf = no_digest,
) -> Iterator[Group]:
    """A group that has loaded and serves. At the end of the context whatever is left of it ends."""
    with made_run_dir() as run_dir, ExitStack() as stack:
        laid = layout(run_dir) if layout else local_layout(run_dir, size)
        group = leader_of(laid, make(), digest_of=digest_of)
        stack.callback(group.channel.close)
        stack.callback(group.control.finish, None)
        for rank in range(1, size):
            member = member_of(laid, rank, make, digest_of=digest_of)
            stack.callback(member.control.finish, None)
            group.members.append(member)
        group.control.wait_joined()
        list(group.leader.warm_up(lambda stage, share: None))
        yield group
