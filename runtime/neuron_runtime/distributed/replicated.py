"""Steps of a group: `ReplicatedBackend` is the leader's backend, whose calls every other rank repeats in `follow`.

The engine cannot tell that there is a group. `launch`, `sample` and `collect` are sent before they run here; the output
of `collect` is returned only when every rank has acknowledged the step with the same tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from neuron_runtime.backend_protocol import AdapterBackend, Backend, ProgressCallback, StepTime
from neuron_runtime.core import Batch, Late, StepOutput
from neuron_runtime.distributed import wire
from neuron_runtime.distributed.control import LeaderControl, MemberControl, disagrees, member_lost
from neuron_runtime.distributed.layout import Layout, bracketed
from neuron_runtime.distributed.wire import (
    Ack,
    AddAdapter,
    Collect,
    Keys,
    Launch,
    RemoveAdapter,
    Sample,
    StepMessage,
    Welcome,
)
from neuron_runtime.reading_threads import CLOSE_SECONDS

CHECK_MILLISECONDS = 50
IDLE_MILLISECONDS = 100
"""How long a member waits for a step before it looks at other things."""
LATE_FACTOR = 3.0
"""A member that lives but does not acknowledge a step is late after this many times the limit for silence: rank 0 has
finished the step, so it only has to sample."""


class StepChannel:
    """The leader's sockets for steps and acknowledgements."""

    def __init__(self, layout: Layout, keys: Keys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._steps = wire.make_socket(self._context, zmq.XPUB, wire.MAX_MESSAGE_BYTES)
        self._steps.xpub_verbose = True
        self._acks = wire.make_socket(self._context, zmq.PULL, wire.MAX_MESSAGE_BYTES)
        self.addresses: list[str] = []
        """For the welcome."""
        for name, socket in (("steps", self._steps), ("acknowledgements", self._acks)):
            keys.guard(socket)
            if layout.num_nodes == 1:
                address = f"ipc://{layout.run_dir}/group-{name}"
                socket.bind(address)
            else:
                address = f":{socket.bind_to_random_port('tcp://*')}"
            self.addresses.append(address)
        self._others = range(1, layout.size)
        self._layout = layout
        self._number = 0

    def wait_subscribed(self, control: LeaderControl) -> None:
        """Until every member receives what is sent from now on. Raises why the group ended."""
        for _ in self._others:
            while not self._steps.poll(CHECK_MILLISECONDS):
                control.check()
            self._steps.recv()

    def send(self, message: type[StepMessage], *content: object) -> None:
        frame: StepMessage = message(self._number, *content)  # type: ignore[arg-type]
        self._number += 1
        self._steps.send(wire.encode(frame), zmq.NOBLOCK)

    def confirm(self, output: StepOutput, control: LeaderControl) -> tuple[float, ...]:
        """Until every member has done the step. Returns the seconds that each took.

        Raises FatalError if one sampled other tokens, or is late.
        """
        expected, missing = wire.hash_of(output.token_ids), set(self._others)
        waited = [0.0] * len(missing)
        began = time.monotonic()
        limit = self._layout.silence_seconds * LATE_FACTOR
        while missing:
            while not self._acks.poll(CHECK_MILLISECONDS):
                control.check()
                if time.monotonic() - began > limit:
                    late = self._layout.named(min(missing))
                    raise member_lost(f"{late}: did not acknowledge step {output.step} within {limit:.0f} s")
            ack = wire.decode_ack(self._acks.recv())
            if ack.group != control.group:
                continue
            if ack.step != output.step or ack.rank not in missing:
                raise disagrees(f"{self._layout.named(ack.rank)}: is at step {ack.step}, rank 0 at {output.step}")
            if ack.tokens != expected:
                raise disagrees(f"{self._layout.named(ack.rank)}: sampled other tokens in step {output.step}")
            missing.remove(ack.rank)
            waited[ack.rank - 1] = time.monotonic() - began
        return tuple(waited)

    def close(self) -> None:
        self._context.destroy(linger=0)


DigestOf = Callable[[Path], str]
"""Of the adapter in a folder; all ranks must have the same one."""


def no_digest(folder: Path) -> str:
    """Takes any for the same."""
    return ""


class ReplicatedBackend:
    """See `Backend`. Members run `follow`."""

    def __init__(
        self, backend: Backend, channel: StepChannel, control: LeaderControl, digest_of: DigestOf = no_digest
    ) -> None:
        self._backend = backend
        self._digest_of = digest_of
        self.limits = backend.limits
        self._channel = channel
        self._control = control

    def warm_up(self, progress: ProgressCallback) -> Iterable[StepTime]:
        """All ranks warm up by themselves, at the same time: the leader sends no steps for it."""
        times = self._backend.warm_up(progress)
        progress("waiting for the other ranks", 0.0)
        self._control.wait_loaded(wire.fingerprint(self.limits))
        self._channel.wait_subscribed(self._control)
        progress("waiting for the other ranks", 1.0)
        return times

    def graph(self, batch: Batch) -> str:
        return self._backend.graph(batch)

    def launch(self, batch: Batch) -> None:
        self._channel.send(Launch, batch)
        self._backend.launch(batch)

    def sample(self, step: int, late: Late | None) -> None:
        self._channel.send(Sample, step, late)
        self._backend.sample(step, late)

    def collect(self, step: int) -> StepOutput:
        self._channel.send(Collect, step)
        output = self._backend.collect(step)
        waited = self._channel.confirm(output, self._control)
        return msgspec.structs.replace(output, group_wait_seconds=waited)

    def read_adapter(self, folder: Path) -> Any:
        """This rank's part, when all others have read theirs: what one of them cannot read, none is told to add."""
        number = self._control.ask_to_read(str(folder))
        weights = cast(AdapterBackend, self._backend).read_adapter(folder)
        self._control.wait_read(self._digest_of(folder))
        return number, weights

    def add_adapter(self, digest: str, folder: Path, weights: Any) -> None:
        number, own = weights
        self._channel.send(AddAdapter, digest, str(folder), number)
        cast(AdapterBackend, self._backend).add_adapter(digest, folder, own)

    def remove_adapter(self, digest: str) -> None:
        self._channel.send(RemoveAdapter, digest)
        cast(AdapterBackend, self._backend).remove_adapter(digest)

    def close(self) -> None:
        self._channel.close()
        self._backend.close()


class StepReceiver:
    """A member's sockets for steps and acknowledgements."""

    def __init__(self, layout: Layout, keys: Keys, welcome: Welcome) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._steps = wire.make_socket(self._context, zmq.SUB, wire.MAX_STEP_BYTES)
        self._acks = wire.make_socket(self._context, zmq.PUSH, wire.MAX_MESSAGE_BYTES)
        self._number = 0
        for socket, address in ((self._steps, welcome.steps), (self._acks, welcome.acknowledgements)):
            keys.unlock(socket)
            socket.connect(f"tcp://{bracketed(layout.leader)}{address}" if address.startswith(":") else address)
        self._steps.subscribe(b"")

    def receive(self) -> wire.StepMessage | None:
        """The next message; None: there is none yet. Raises FatalError if one was lost."""
        if not self._steps.poll(IDLE_MILLISECONDS):
            return None
        message = wire.decode_step(self._steps.recv())
        if message.number != self._number:
            lost = message.number - self._number
            raise member_lost(f"{lost} messages of rank 0 were lost before message {message.number}")
        self._number += 1
        return message

    def acknowledge(self, ack: Ack) -> None:
        self._acks.send(wire.encode(ack), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


def follow(
    backend: Backend,
    receiver: StepReceiver,
    control: MemberControl,
    idle: Callable[[], None] = lambda: None,
    digest_of: DigestOf = no_digest,
) -> None:
    """Run steps until the leader's work is done. Raises why the group ended, and exceptions of the backend.

    idle: called whenever there is nothing to do for a while.
    """
    with closing(_AdapterParts(cast(AdapterBackend, backend), control, digest_of)) as parts:
        while not control.done:
            control.check()
            message = receiver.receive()
            match message:
                case None:
                    idle()
                case Launch(_, batch):
                    backend.launch(batch)
                case Sample(_, step, late):
                    backend.sample(step, late)
                case Collect(_, step):
                    output = backend.collect(step)
                    receiver.acknowledge(Ack(control.rank, control.group, step, wire.hash_of(output.token_ids)))
                case AddAdapter(_, digest, folder, reading):
                    cast(AdapterBackend, backend).add_adapter(digest, Path(folder), parts.take(reading))
                case RemoveAdapter(_, digest):
                    cast(AdapterBackend, backend).remove_adapter(digest)


class _AdapterParts:
    """A member's parts of adapters, read while steps go on. They are added in the order in which they are read, some
    never; the leader may ask for the next one before this member gets to adding the one before."""

    def __init__(self, backend: AdapterBackend, control: MemberControl, digest_of: DigestOf) -> None:
        self._backend, self._control, self._digest_of = backend, control, digest_of
        self._read: dict[int, Any] = {}
        """By the number of the request."""
        self._thread = threading.Thread(target=self._work, name="adapters", daemon=True)  # a read may hang
        self._thread.start()

    def take(self, number: int) -> Any:
        for passed in [one for one in list(self._read) if one < number]:
            del self._read[passed]
        return self._read.pop(number)

    def close(self) -> None:
        self._control.to_read.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while asked := self._control.to_read.get():
            number, folder = asked.number, Path(asked.folder)
            try:
                self._read[number] = self._backend.read_adapter(folder)
                self._control.read(number, self._digest_of(folder))
            except Exception as error:  # noqa: BLE001 - of a file, which refuses the adapter alone
                self._control.read(number, failure=str(error) or type(error).__name__)
