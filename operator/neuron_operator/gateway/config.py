"""The gateway's configuration: one document, in YAML or JSON, each value declared once with its bounds and default.

The chart writes it from its values; on a user's own machine it is a file, or flags of the command. An unknown field or
a value out of bounds is refused with its name before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from neuron_operator.api.errors import OperatorError

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Bytes = Annotated[int, Meta(ge=1024, le=2**40)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
"""0: a free one."""


class InvalidConfig(OperatorError):
    """The configuration is wrong; the message names the field."""


class Part(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A part of the document."""


class Hold(Part, frozen=True):
    """Requests of a model that has no ready replica wait, up to these limits of each model."""

    requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    bytes: Bytes = 64 * 2**20
    """Of their bodies."""
    seconds: Seconds = 300.0
    per_replica: Count = 128
    """So many requests run on a replica before more of those that waited are sent to it: its own queue is bounded."""
    retry_after_seconds: Annotated[int, Meta(ge=1, le=3600)] = 10
    """What a client is told that was not held, or too long."""


class Timeouts(Part, frozen=True):
    read_seconds: Seconds = 60.0
    """For a request to arrive, from its first byte to its last."""
    idle_seconds: Seconds = 90.0
    """A client's connection stays open so long without a request. Load balancers close theirs earlier."""
    replica_idle_seconds: Seconds = 60.0
    """The same of connections to replicas, which close theirs after 75."""
    connect_seconds: Seconds = 3.0
    first_byte_seconds: Seconds = 600.0
    """From a request to its answer, which comes at once as a whole if it is not streamed."""
    silence_seconds: Seconds = 60.0
    """Between two parts of an answer. A replica that is silent for longer is taken for frozen."""
    stalled_seconds: Seconds = 120.0
    """A client that does not read its answer for so long is disconnected."""
    avoid_seconds: Seconds = 1.0
    """A replica that refused a connection or drains gets no request for so long, if there is another one."""
    drain_delay_seconds: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    """After SIGTERM requests are still accepted for so long, until all who send them have heard of it."""
    drain_seconds: Seconds = 120.0
    """After that answers may take so long to end."""


class Picking(Part, frozen=True):
    prefix_characters: Annotated[int, Meta(ge=16, le=1_000_000)] = 2048
    """Requests go to the same replica if each message up to the first of the user begins with the same so many
    characters; of a prompt without messages its beginning counts."""
    load_factor: Annotated[float, Meta(ge=1, le=100)] = 1.25
    """A replica with more requests than this multiple of the mean is passed over."""
    spread_from: Count = 8
    """A replica with fewer requests than these is never passed over."""
    idle_connections: Count = 64
    """Kept to each replica."""


class Limits(Part, frozen=True):
    head_bytes: Bytes = 65_536
    body_bytes: Bytes = 32 * 2**20
    all_bodies_bytes: Bytes = 256 * 2**20
    """Of all requests whose answer has not begun. Those that wait for a replica may have half of it."""
    connections: Count = 10_000
    """From clients."""


class StaticAdapter(Part, frozen=True):
    name: str
    uri: str = ""


class StaticModel(Part, frozen=True):
    """A model that is known without a cluster."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    addresses: tuple[str, ...]
    """`host:port` of each replica."""
    namespace: Annotated[str, Meta(min_length=1, max_length=63)] = "default"
    served_names: tuple[str, ...] = ()
    adapters: tuple[StaticAdapter, ...] = ()


class Config(Part, frozen=True):
    host: str = "::"
    port: Port = 8000
    metrics_port: Port = 8080
    namespaces: tuple[str, ...] = ()
    """Those whose models are served; empty: all."""
    models: tuple[StaticModel, ...] = ()
    """Serve these, without a cluster; empty: those of the cluster."""
    keys_file: str = ""
    gateways: Count = 1
    """How many gateways share the limits of API keys."""
    kubeconfig: str = ""
    log_level: str = "info"
    access_log: bool = True
    hold: Hold = Hold()
    timeouts: Timeouts = Timeouts()
    picking: Picking = Picking()
    limits: Limits = Limits()


def parse(document: Any) -> Config:
    """Raises InvalidConfig."""
    if not isinstance(document, Mapping):
        raise InvalidConfig("the configuration must be an object")
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"the configuration is invalid: {error}") from error
    for model in config.models:
        for address in model.addresses:
            split_address(address)
    return config


def split_address(address: str) -> tuple[str, int]:
    """Host and port; an IPv6 address is in brackets. Raises InvalidConfig."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
        raise InvalidConfig(f"{address!r} is no address: write host:port")
    return host.strip("[]"), int(port)
