"""The loop of a member that is not the leader: it repeats the leader's calls of the backend, and acknowledges steps."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from neuron_runtime.backend_protocol import Backend
from neuron_runtime.distributed import wire
from neuron_runtime.distributed.control import MemberControl, member_lost
from neuron_runtime.distributed.layout import Layout, bracketed
from neuron_runtime.distributed.wire import Ack, Collect, Keys, Launch, Sample, Welcome

CHECK_MILLISECONDS = 100


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
        if not self._steps.poll(CHECK_MILLISECONDS):
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
    backend: Backend, receiver: StepReceiver, control: MemberControl, idle: Callable[[], None] = lambda: None
) -> None:
    """Run steps until the leader's work is done. Raises why the group ended, and exceptions of the backend.

    idle: called whenever there is nothing to do for a while.
    """
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
