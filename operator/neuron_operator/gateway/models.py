"""The models that the gateway serves: by which names, on which replicas, and who waits for one.

`watching` and the static configuration write `Served` values; exchanges find their model here. No I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from neuron_operator.gateway import picking
from neuron_operator.gateway.config import Config, Picking, StaticModel, split_address
from neuron_operator.gateway.errors import Refusal, limited, not_found

if TYPE_CHECKING:
    from neuron_operator.gateway.exchange import Exchange
    from neuron_operator.gateway.upstream import Upstream

_DELETED = "the model was deleted"
Key = tuple[str, str]
"""Namespace and name of a model."""


@dataclass(frozen=True)
class Adapter:
    name: str
    uri: str = ""
    created: int = 0


@dataclass(frozen=True)
class Served:
    """What is known of one model."""

    namespace: str
    name: str
    served_names: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    """Of the replicas that are ready."""
    adapters: tuple[Adapter, ...] = ()
    created: int = 0
    is_asleep: bool = False
    """No replica is requested."""
    refused: str = ""
    """Why no further replica would help, in the words of its condition: it is not woken."""
    words: str = ""
    """What its condition says."""
    max_model_len: int | None = None
    uid: str = ""

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def is_ready(self) -> bool:
        return bool(self.addresses)

    @property
    def hopeless(self) -> str:
        """Why nobody needs to wait for it. One that is ready may fail for a moment, and is asked again."""
        return "" if self.addresses else self.refused


def static(model: StaticModel) -> Served:
    """Raises InvalidConfig."""
    adapters = tuple(Adapter(one.name, one.uri) for one in model.adapters)
    for address in model.addresses:
        split_address(address)
    return Served(model.namespace, model.name, model.served_names or (model.name,), model.addresses, adapters)


@dataclass(eq=False, slots=True)
class Replica:
    """One address and what this gateway has there."""

    address: str
    host: str
    port: int
    seed: int
    in_flight: int = 0
    avoid_until: float = 0.0
    is_gone: bool = False
    """It is not ready any more: its connections are not kept."""
    idle: list[Upstream] = field(default_factory=list)

    @classmethod
    def at(cls, address: str) -> Replica:
        host, port = split_address(address)
        return cls(address, host, port, int.from_bytes(blake2b(address.encode(), digest_size=8).digest(), "big"))


@dataclass(eq=False)
class Model:
    """One model while the gateway runs."""

    served: Served
    replicas: dict[str, Replica] = field(default_factory=dict)
    in_flight: int = 0
    room: dict[Exchange, None] = field(default_factory=dict)
    """Requests that wait for a replica, in their order."""
    room_bytes: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        self.label = "/".join(self.served.key)

    def pick(
        self, affinity: int, now: float, settings: Picking, *, skip: Set[Replica] = frozenset(), most: int | None = None
    ) -> Replica | None:
        """The replica for a request; None if none is ready, or none has room with fewer than `most` requests."""
        able = [
            one
            for one in self.replicas.values()
            if one.avoid_until <= now and one not in skip and (most is None or one.in_flight < most)
        ]
        if not able:
            return None
        limit = picking.bound(self.in_flight, len(self.replicas), settings.load_factor, settings.spread_from)
        return picking.pick(able, affinity, limit)

    def update(self, served: Served) -> list[Replica]:
        """Returns the replicas that are gone."""
        self.served = served
        gone = [one for address, one in self.replicas.items() if address not in served.addresses]
        for replica in gone:
            replica.is_gone = True
        kept = {address: one for address, one in self.replicas.items() if address in served.addresses}
        self.replicas = {address: kept.get(address) or Replica.at(address) for address in served.addresses}
        return gone


@dataclass(frozen=True, slots=True)
class Target:
    """What a name of a request means."""

    model: Model
    name: str
    """As the server knows it."""
    parent: str | None = None
    root: str = ""
    created: int = 0

    @property
    def qualified(self) -> str:
        return f"{self.model.served.namespace}/{self.name}"


class Directory:
    """Names and what they mean. `namespace/name` always means one thing, a name alone if one namespace has it."""

    def __init__(self, config: Config, on_gone: Callable[[Replica], None]) -> None:
        self._config = config
        self._on_gone = on_gone
        self.models: dict[Key, Model] = {}
        self._qualified: dict[str, Target] = {}
        self._bare: dict[str, list[Target]] = {}
        self._is_indexed = True

    def put(self, served: Served) -> Model:
        model = self.models.get(served.key)
        names_changed = model is None or _names(model.served) != _names(served)
        if model is None:
            model = self.models[served.key] = Model(served)
        for replica in model.update(served):
            self._on_gone(replica)
        if names_changed:
            self._is_indexed = False
        return model

    def drop(self, key: Key) -> Model | None:
        """The model is gone: nobody is ready, its names mean nothing, what its replicas lost does not wait."""
        model = self.models.pop(key, None)
        if model is not None:
            for replica in model.update(Served(*key, served_names=(), refused=_DELETED, words=_DELETED)):
                self._on_gone(replica)
            self._is_indexed = False
        return model

    def _index(self) -> None:
        """When somebody asks: the first list of a cluster has thousands of models, one by one."""
        if self._is_indexed:
            return
        self._is_indexed = True
        self._qualified, bare = {}, defaultdict[str, list[Target]](list)
        every = (target for key in sorted(self.models) for target in _targets(self.models[key]))
        for target in sorted(every, key=_rank):
            if target.qualified not in self._qualified:
                self._qualified[target.qualified] = target
                bare[target.name].append(target)
        self._bare = dict(bare)

    def find(self, name: str, may_see: Callable[[Target], bool] | None = None) -> Target:
        """Raises Refusal if the name means nothing, or several things: it says those that the client `may_see`."""
        self._index()
        if (target := self._qualified.get(name)) is not None:
            return target
        targets = self._bare.get(name, ())
        if len(targets) == 1:
            return targets[0]
        if seen := [target.qualified for target in targets if may_see is None or may_see(target)]:
            which = ", ".join(seen)
            raise not_found(f"`model` {_short(name)!r} is in several namespaces: ask for one of {which}",
                            code="ambiguous_model", param="model")  # fmt: skip
        raise not_found(
            f"`model` {_short(name)!r} does not exist: GET /v1/models lists the models",
            code="model_not_found",
            param="model",
        )

    def listed(self) -> Iterator[tuple[str, Target]]:
        """Every target once, by the shortest name that means it."""
        self._index()
        for qualified, target in self._qualified.items():
            is_taken = target.name in self._qualified or len(self._bare[target.name]) > 1
            yield (qualified if is_taken else target.name), target


def described(name: str, target: Target) -> dict[str, Any]:
    """The entry of `/v1/models`."""
    served = target.model.served
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": target.created,
        "owned_by": "neuron-serving",
        "root": target.root,
        "parent": target.parent,
        "namespace": served.namespace,
        "ready": served.is_ready,
    }
    if served.max_model_len is not None:
        entry["max_model_len"] = served.max_model_len
    return entry


def _targets(model: Model) -> Iterable[Target]:
    served = model.served
    root = served.served_names[0] if served.served_names else served.name
    for name in served.served_names:
        yield Target(model, name, root=root, created=served.created)
    for adapter in served.adapters:
        yield Target(model, adapter.name, parent=root, root=adapter.uri, created=adapter.created)


def _rank(target: Target) -> int:
    """A model's own name is its own, whatever others of its namespace serve; and models come before adapters, which a
    server does not look for either under a name of its own."""
    if target.parent is not None:
        return 2
    return int(target.name != target.model.served.name)


def _names(served: Served) -> object:
    return served.served_names, served.adapters


def _short(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}…"


class Rooms:
    """Requests that wait, within the limits of their models."""

    def __init__(self, config: Config) -> None:
        self._hold = config.hold
        self._most_bytes = config.limits.all_bodies_bytes // 2
        """Of all rooms: models that sleep leave place for the bodies of others."""
        self._num_bytes = 0

    def enter(self, model: Model, exchange: Exchange, num_bytes: int) -> None:
        """Raises Refusal if there is no place."""
        hold, served = self._hold, model.served
        if served.hopeless:
            raise unavailable_model(served, served.hopeless, hold.retry_after_seconds)
        if self._num_bytes + num_bytes > self._most_bytes:
            waiting = f"requests of all models wait with {self._num_bytes} bytes already, which is the limit"
            raise limited(waiting, "too_many_held", hold.retry_after_seconds)
        if len(model.room) >= hold.requests or model.room_bytes + num_bytes > hold.bytes:
            waiting = f"{len(model.room)} requests wait for `{served.name}` already, which is the limit"
            said = f": {served.words}" if served.words else ""
            raise limited(f"{waiting}{said}", "too_many_held", hold.retry_after_seconds)
        model.room[exchange] = None
        model.room_bytes += num_bytes
        self._num_bytes += num_bytes

    def leave(self, model: Model, exchange: Exchange, num_bytes: int) -> bool:
        """Whether it was there."""
        if exchange not in model.room:
            return False
        del model.room[exchange]
        model.room_bytes -= num_bytes
        self._num_bytes -= num_bytes
        return True


def unavailable_model(served: Served, words: str, retry_after: int) -> Refusal:
    said = words or "no replica is ready"
    message = f"`{served.name}` has no ready replica: {said}"
    return Refusal(503, "service_unavailable_error", message, code="model_not_ready", retry_after=retry_after)


def by_address(models: Mapping[Key, Model]) -> Iterator[tuple[Model, Replica]]:
    return ((model, replica) for model in models.values() for replica in model.replicas.values())
