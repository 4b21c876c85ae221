"""Who is who in a group: the ranks of one replica, over one or several nodes, from configuration and environment.

Read by `serve` and `follow`, and passed on to the processes of ranks as a file. Pure but for reading the secret.

A *node* is a pod of the group, a *rank* a process of it. Node 0 leads: it has HTTP server, scheduler and rank 0.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from neuron_runtime.config import RuntimeConfig
from neuron_runtime.engine.backends import backend_package
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

NODE_VARIABLE = "NEURON_SERVING_RANK"
NUM_NODES_VARIABLE = "NEURON_SERVING_GROUP_SIZE"
LEADER_VARIABLE = "NEURON_SERVING_LEADER"
SECRET_VARIABLE = "NEURON_SERVING_GROUP_SECRET_FILE"
PORT_VARIABLE = "NEURON_SERVING_GROUP_PORT"
ADDRESS_VARIABLE = "NEURON_SERVING_POD_IP"
JOIN_VARIABLE = "NEURON_SERVING_GROUP_JOIN_SECONDS"
SILENCE_VARIABLE = "NEURON_SERVING_GROUP_SILENCE_SECONDS"

DEFAULT_PORT = 8010
DEFAULT_JOIN_SECONDS = 1800.0
DEFAULT_SILENCE_SECONDS = 10.0
NUM_PORTS = 2
"""Ports in a row on the leader: the wire, and where backends of all nodes meet."""
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 256
MAX_NODES = 64
MAX_RANKS = 1024
LAYOUT_FILE = "group.json"
SECRET_FILE = "group-secret"
RENDEZVOUS_FILE = "group-rendezvous"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A group as one of its nodes sees it.

    size: processes in the group. num_nodes: pods. leader: host of node 0. secret_file: see `read_secret`.
    run_dir: where sockets of a group on one node are; such a group needs no port.
    """

    size: int = 1
    num_nodes: int = 1
    node: int = 0
    leader: str = ""
    port: int = DEFAULT_PORT
    address: str = ""
    """The address at which others reach this node; empty: that from which it reaches the leader."""
    secret_file: str = ""
    run_dir: str = ""
    join_seconds: Annotated[float, Meta(gt=0)] = DEFAULT_JOIN_SECONDS
    """How long members wait for each other to start."""
    silence_seconds: Annotated[float, Meta(gt=0)] = DEFAULT_SILENCE_SECONDS
    """A member that says nothing for this long is lost."""

    @property
    def is_group(self) -> bool:
        return self.size > 1

    @property
    def per_node(self) -> int:
        """Ranks of each node."""
        return self.size // self.num_nodes

    @property
    def own_ranks(self) -> range:
        return range(self.node * self.per_node, (self.node + 1) * self.per_node)

    def named(self, rank: int) -> str:
        """A rank, for people."""
        return f"rank {rank} (node {rank // self.per_node})" if self.num_nodes > 1 else f"rank {rank}"

    @property
    def wire(self) -> str:
        """Address of the leader's socket for members."""
        return f"ipc://{self.run_dir}/group" if self.num_nodes == 1 else f"tcp://{bracketed(self.leader)}:{self.port}"

    def lifeline(self, rank: int) -> Path:
        """The file in which a rank of this node says until when it shows life."""
        return Path(self.run_dir, f"alive-rank-{rank}")

    def in_folder(self, run_dir: Path) -> Self:
        """With the folder of this node's processes. A group on one node gets a secret of its own there."""
        if not self.is_group:
            return self
        placed = msgspec.structs.replace(self, run_dir=str(run_dir))
        if self.num_nodes == 1:
            path = run_dir / SECRET_FILE
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(MIN_SECRET_BYTES))
            placed = msgspec.structs.replace(placed, secret_file=str(path))
        (run_dir / LAYOUT_FILE).write_bytes(msgspec.json.encode(placed))
        return placed

    @classmethod
    def of_folder(cls, run_dir: Path) -> Self:
        """What `in_folder` wrote; without it, one rank."""
        if not (run_dir / LAYOUT_FILE).exists():
            return cls()
        return msgspec.json.decode((run_dir / LAYOUT_FILE).read_bytes(), type=cls)


ALONE = Layout()


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def address_of(host: str) -> str:
    """The address of the leader. Raises FatalError if it has none any more."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # a name that is too long is a UnicodeError
        message = f"{host}: has no address: {error}"
        raise FatalError(ExitCode.GROUP_MEMBER_LOST, message) from error


def num_nodes_of(environment: Mapping[str, str]) -> int:
    """Nodes of the group of this process; 1 without one. Raises InvalidConfig."""
    return _number(environment, NUM_NODES_VARIABLE, 1, 1, MAX_NODES)


def layout_for(config: RuntimeConfig, *, leads: bool, environment: Mapping[str, str] = os.environ) -> Layout:
    """The group of this command. leads: it is `serve`, not `follow`. Raises InvalidConfig with the variable, or with
    the field that a group cannot have."""
    package = backend_package(config)
    layout = layout_of(environment, config.parallelism.tensor, process_per_rank=package.PROCESS_PER_RANK)
    if layout.num_nodes == 1 and not leads:
        raise InvalidConfig(NUM_NODES_VARIABLE, "is the number of pods of the group, at least 2: use `serve` for one")
    if (layout.node == 0) != leads:
        here, there = ("follow", "serve") if layout.node == 0 else ("serve", "follow")
        raise InvalidConfig(NODE_VARIABLE, f"is {layout.node}: use `neuron-runtime {there}` here instead of `{here}`")
    if layout.num_nodes > 1 and config.adapters.max_active and not package.PROCESS_PER_RANK:
        message = f"{config.backend} serves no adapters over {layout.num_nodes} nodes: leave it out, or use one node"
        raise InvalidConfig("$.adapters.maxActive", message)
    return layout


def layout_of(environment: Mapping[str, str], tensor: int, *, process_per_rank: bool) -> Layout:
    """The group of this node. Raises InvalidConfig with the variable and what it must be.

    Args:
        tensor: `parallelism.tensor`, the ranks of all nodes; 0: one per node.
        process_per_rank: whether each rank is a process; otherwise one process drives all ranks of its node.
    """
    num_nodes = num_nodes_of(environment)
    if num_nodes > 1 and not tensor and not process_per_rank:
        raise InvalidConfig("$.parallelism.tensor", f"must be set in a group of {num_nodes} nodes")
    tensor = tensor or num_nodes
    if tensor > MAX_RANKS:
        raise InvalidConfig("$.parallelism.tensor", f"must be at most {MAX_RANKS}, got {tensor}")
    if tensor % num_nodes:
        message = f"must be a multiple of the number of nodes ({NUM_NODES_VARIABLE}={num_nodes}), got {tensor}"
        raise InvalidConfig("$.parallelism.tensor", message)
    size = tensor if process_per_rank else num_nodes
    join_seconds = _seconds(environment, JOIN_VARIABLE, DEFAULT_JOIN_SECONDS)
    silence_seconds = _seconds(environment, SILENCE_VARIABLE, DEFAULT_SILENCE_SECONDS)
    if num_nodes == 1:
        return Layout(size=size, join_seconds=join_seconds, silence_seconds=silence_seconds)
    node = _number(environment, NODE_VARIABLE, None, 0, num_nodes - 1)
    for variable in (LEADER_VARIABLE, SECRET_VARIABLE):
        if not environment.get(variable):
            raise InvalidConfig(variable, f"must be set in a group of {num_nodes} nodes")
    layout = Layout(
        size=size,
        num_nodes=num_nodes,
        node=node,
        leader=environment[LEADER_VARIABLE],
        port=_number(environment, PORT_VARIABLE, DEFAULT_PORT, 1, 65535 - NUM_PORTS),
        address=environment.get(ADDRESS_VARIABLE, ""),
        secret_file=environment[SECRET_VARIABLE],
        join_seconds=join_seconds,
        silence_seconds=silence_seconds,
    )
    read_secret(layout)
    return layout


def read_secret(layout: Layout) -> bytes:
    """What all members know and nobody else. Raises InvalidConfig if there is no such file, or it is too short."""
    try:
        secret = Path(layout.secret_file).read_bytes().strip()
    except OSError as error:
        raise InvalidConfig(SECRET_VARIABLE, f"cannot read {layout.secret_file}: {error.strerror}") from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        message = f"{layout.secret_file} must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, has {len(secret)}"
        raise InvalidConfig(SECRET_VARIABLE, message)
    return secret


def _number(environment: Mapping[str, str], name: str, default: int | None, least: int, most: int) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit() or not least <= int(text[:10]) <= most:
        raise InvalidConfig(name, f"must be a number from {least} to {most}, got {text!r}")
    return int(text)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        seconds = float(environment.get(name, default))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InvalidConfig(name, f"must be a number of seconds above 0, got {environment[name]!r}")
    return seconds
