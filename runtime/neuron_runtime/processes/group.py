"""A process's place in its group: what `serve`, `follow` and the processes of ranks need to take part.

`Leading` surrounds rank 0's work, `Following` that of every other rank: both meet the others, tell them how they end,
and learn why the others did.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from neuron_runtime.adapters import peft
from neuron_runtime.artifacts.compiling import digest_of, wanted_artifact
from neuron_runtime.backend_protocol import ONE_RANK, Backend, ProgressCallback, Rank
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.distributed import wire
from neuron_runtime.distributed.control import LeaderControl, MemberControl, OnEnd
from neuron_runtime.distributed.layout import RENDEZVOUS_FILE, Layout, bracketed, read_secret
from neuron_runtime.distributed.replicated import ReplicatedBackend, StepChannel, StepReceiver, follow
from neuron_runtime.distributed.wire import Facts, Keys
from neuron_runtime.engine.backends import backend_package, compiles
from neuron_runtime.errors import ExitCode, FatalError, ServingError
from neuron_runtime.processes.lifeline import Deadline

Control = TypeVar("Control", LeaderControl, MemberControl)

WAITING = "waiting for the other ranks"


def place_of(layout: Layout, rank: int) -> Rank:
    """What a backend must know to be this rank."""
    if not layout.is_group:
        return ONE_RANK
    if layout.num_nodes == 1:
        return Rank(rank, layout.size, layout.per_node, f"file://{layout.run_dir}/{RENDEZVOUS_FILE}", "127.0.0.1")
    meeting = f"tcp://{bracketed(layout.leader)}:{layout.port + 1}"
    return Rank(rank, layout.size, layout.per_node, meeting, layout.address or _own_address(layout))


def _own_address(layout: Layout) -> str:
    """The address from which this node reaches the leader. Raises FatalError if the leader has no address any more."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(layout.leader, layout.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        message = f"{layout.leader}: cannot be reached: {error.strerror or error}"
        raise FatalError(ExitCode.GROUP_MEMBER_LOST, message) from error


def facts_of(config: RuntimeConfig, model_dir: Path) -> Facts:
    """What every rank must agree on. Raises as `wanted_artifact`."""
    package = backend_package(config)
    return Facts(
        config=wire.fingerprint(msgspec.to_builtins(config)),
        weights=config.model.served_digest or digest_of(model_dir, with_weights=package.needs_weights(config)),
        artifact=wanted_artifact(config, model_dir).key if compiles(config) else "",
        libraries={"neuron-serving": version("neuron-serving"), **package.versions()},
    )


class _Part(Generic[Control]):
    """A rank's part in a group, as a context. At its end it tells the others why the rank ends, and raises a better
    reason for its error, if another rank gives one."""

    _control: Control

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, ServingError):
            failure: ServingError | None = error
        else:
            failure = FatalError(ExitCode.DEVICE_FAILED, f"{type(error).__name__}: {error}")
        if isinstance(failure, FatalError) and failure.exit_code == ExitCode.GROUP_MEMBER_LOST:
            failure = self._control.cause_of(failure)
        self._control.finish(failure)
        if failure is not None and failure is not error and isinstance(error, ServingError):
            raise failure from error


class Leading(_Part[LeaderControl]):
    """Rank 0's part: its end is the end of the group.

    on_end: another rank ended the group with this error. Called on another thread, because this one may wait for a
    device that never answers; it ends the process.
    """

    def __init__(self, layout: Layout, facts: Facts, on_end: OnEnd) -> None:
        self._channel = StepChannel(layout, Keys(read_secret(layout)))
        self._control = LeaderControl(
            layout,
            facts,
            self._channel.addresses,
            on_end=on_end,
            on_leaving=_drain,
            lifeline=Deadline(layout.lifeline(0)),
        )

    def meet(self, progress: ProgressCallback) -> None:
        """Wait for all others. Raises FatalError."""
        self._control.start()
        progress(WAITING, 0.0)
        self._control.wait_joined()
        progress(WAITING, 1.0)

    def replicated(self, backend: Backend) -> ReplicatedBackend:
        return ReplicatedBackend(backend, self._channel, self._control, peft.digest_of)


class NoGroup:
    """As `Leading`, for a replica of one process."""

    def meet(self, progress: ProgressCallback) -> None: ...

    def replicated(self, backend: Backend) -> Backend:
        return backend

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def leading(layout: Layout, config: RuntimeConfig, model_dir: Path, on_end: OnEnd) -> Leading | NoGroup:
    """Rank 0's part."""
    return Leading(layout, facts_of(config, model_dir), on_end) if layout.is_group else NoGroup()


def _drain(message: str) -> None:
    """Stop the supervisor as SIGTERM does, because a node of the group must be given up."""
    say(f"{message}: stopping the group")
    os.kill(os.getppid(), signal.SIGTERM)


class Following(_Part[MemberControl]):
    """Any other rank's part. on_end: see `Leading`."""

    def __init__(self, layout: Layout, rank: int, facts: Facts, on_end: OnEnd) -> None:
        self._layout = layout
        self._control = MemberControl(layout, rank, facts, on_end, Deadline(layout.lifeline(rank)))
        self._receiver: StepReceiver

    def meet(self) -> None:
        """Wait for all others. Raises FatalError."""
        self._control.start()
        self._receiver = StepReceiver(self._layout, self._control.keys, self._control.wait_joined())

    def leave(self) -> None:
        self._control.leave()

    def follow(self, backend: Backend, idle: Callable[[], None]) -> None:
        """Repeat rank 0's steps on a backend that has warmed up, until the work is done. Raises why it ended."""
        self._control.loaded(wire.fingerprint(backend.limits))
        follow(backend, self._receiver, self._control, idle, peft.digest_of)
