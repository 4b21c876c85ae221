"""The other processes of a model on several nodes, as collectives of a device see them: a step waits for all of them.

Each process computes the whole model, so they exchange only what they are about to run; a device that ran another
graph, or other inputs, would compute nonsense or never end.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import fake_nxdi

if TYPE_CHECKING:
    import torch

ROOT_VARIABLE = "NEURON_RT_ROOT_COMM_ID"
MEETING_SECONDS = 60.0
DIGEST_BYTES = 32
SAME, OTHER = b"=", b"!"


class Others:
    """Connections to them; whoever has rank 0 listens. Raises OSError when one is gone."""

    def __init__(self, first: int, cores: int, world_size: int) -> None:
        host, port = _root()
        self._leads = first == 0
        if first % cores or world_size % cores:
            fake_nxdi.refuse("19.1", f"ranks from {first} on, {cores} of {world_size}: nodes differ in size")
        if self._leads:
            self._peers = _accepted(host, port, world_size // cores - 1)
        else:
            self._peers = [_connected(host, port)]

    def exchange(self, graph: str, inputs: Sequence[torch.Tensor]) -> None:
        """Returns when all run this graph with these inputs."""
        found = hashlib.sha256(graph.encode())
        for tensor in inputs:
            found.update(tensor.contiguous().numpy().tobytes())
        own = found.digest()
        if self._leads:
            digests = [_received(peer, DIGEST_BYTES) for peer in self._peers]
            same = all(digest == own for digest in digests)
            for peer in self._peers:
                peer.sendall(SAME if same else OTHER)
        else:
            self._peers[0].sendall(own)
            same = _received(self._peers[0], 1) == SAME
        if not same:
            fake_nxdi.refuse("19.3", f"{graph}: nodes of one model run another graph, or have other inputs")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def _root() -> tuple[str, int]:
    value = os.environ.get(ROOT_VARIABLE, "")
    host, _, port = value.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        fake_nxdi.refuse("18", f"{ROOT_VARIABLE} must be an address and a port with several processes, is {value!r}")
    return host.strip("[]"), int(port)


def _accepted(host: str, port: int, count: int) -> list[socket.socket]:
    with socket.create_server((host, port)) as listener:
        listener.settimeout(MEETING_SECONDS)
        return [listener.accept()[0] for _ in range(count)]


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            made = socket.create_connection((host, port), MEETING_SECONDS)
            made.settimeout(None)
            return made
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _received(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise ConnectionResetError("another process has ended")
        data += part
    return data
