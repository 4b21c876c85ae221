"""`ReplicatedBackend`: the leader's backend, whose calls every other rank repeats in the same order.

The engine cannot tell that there is a group. `launch`, `sample` and `collect` are sent before they run here; the output
of `collect` is returned only when every rank has acknowledged the step with the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
import zmq

from neuron_runtime.backend_protocol import Backend, ProgressCallback, StepTime
from neuron_runtime.core import Batch, Late, StepOutput
from neuron_runtime.distributed import wire
from neuron_runtime.distributed.control import LeaderControl, disagrees, member_lost
from neuron_runtime.distributed.layout import Layout
from neuron_runtime.distributed.wire import Collect, Keys, Launch, Sample, StepMessage

CHECK_MILLISECONDS = 50
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
        self.addresses = []
        for name, socket in (("steps", self._steps), ("acknowledgements", self._acks)):
            keys.guard(socket)
            self.addresses.append(_bind(socket, layout, name))
        self._others = range(1, layout.size)
        self._layout = layout
        self._number = 0

    def wait_subscribed(self, control: LeaderControl) -> None:
        """Until every member receives what is sent from now on. Raises why the group ended."""
        for _ in self._others:
            while not self._steps.poll(CHECK_MILLISECONDS):
                control.check()
            self._steps.recv()

    def send(self, message: type[Launch] | type[Sample] | type[Collect], *content: object) -> None:
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


class ReplicatedBackend:
    """See `Backend`. Members run `following.follow`."""

    def __init__(self, backend: Backend, channel: StepChannel, control: LeaderControl) -> None:
        self._backend = backend
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

    def close(self) -> None:
        self._channel.close()
        self._backend.close()


def _bind(socket: zmq.Socket[bytes], layout: Layout, name: str) -> str:
    """Bind a socket of the leader to any free port, and return its address for the welcome."""
    if layout.num_nodes == 1:
        address = f"ipc://{layout.run_dir}/group-{name}"
        socket.bind(address)
        return address
    return f":{socket.bind_to_random_port('tcp://*')}"
