"""What passes read on demand and keep for seconds: free Neuron devices, events about children, the logs of Jobs' pods,
what replicas tell about their adapters.

None of it is watched: a watch would mostly stream changes that concern no NeuronModel. Without the right to read it,
it is unknown (`FreeDevices(None)`) or empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, TypeVarTuple

import msgspec

from neuron_operator.api.errors import ClusterFault
from neuron_operator.api.names import DEVICE_DRIVER, RUNTIME_CONTAINER
from neuron_operator.api.reasons import Asked, Exists, IdleOf, MetricsOf, Trial
from neuron_operator.cluster.asking import told_at
from neuron_operator.cluster.client import (
    CONFIG_MAPS,
    EVENTS,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    SECRETS,
    AlreadyExists,
    Client,
    Forbidden,
    Invalid,
    NotFound,
)
from neuron_operator.cluster.devices import claimed_devices, has_devices, node_devices, slices_by_node, taken_by
from neuron_operator.cluster.reflector import Key, key_of_model
from neuron_operator.read.activity import idle_line_in
from neuron_operator.read.drafts import counters_in
from neuron_operator.read.world import FreeDevices, NodeDevices, Object, Told

logger = logging.getLogger(__name__)

FREE_DEVICES_SECONDS = 5.0
EVENTS_SECONDS = 15.0
CLAIM_EVENTS_SECONDS = 5.0
LOG_SECONDS = 4.0
UNREADABLE_LOG_SECONDS = 30.0
"""A log that cannot be read, for lack of the right or because its node does not answer, is read again after this."""
EXISTS_SECONDS = 1.5
DENIAL_SECONDS = 1.5
TOLD_SECONDS = 2.0
UNTOLD_SECONDS = 10.0
"""The same if a replica does not answer: each question of a pass that nobody answers takes as long as the next."""
METRICS_SECONDS = 60.0
"""Metrics are only shown, and a replica that does not answer would hold up each pass."""
MAX_ASKED = 16
"""Replicas that are asked at the same time."""
MAX_READS = 8
"""Concurrent pod lists; there is one for each node with Neuron devices."""

Wanted = TypeVarTuple("Wanted")
Value = TypeVar("Value")


@dataclass
class _Slot(Generic[Value]):
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the value is read."""
    kept: tuple[float, Value] | None = None
    """The value, with the time until which it is kept."""


class _Kept(Generic[*Wanted, Value]):
    """Values by key. Passes that ask for one at the same time share one read.

    `read` returns the value and for how many seconds it is kept.
    """

    def __init__(self, read: Callable[[*Wanted], Awaitable[tuple[Value, float]]]) -> None:
        self._read = read
        self._slots: dict[tuple[*Wanted], _Slot[Value]] = {}

    async def __call__(self, *key: *Wanted) -> Value:
        now = asyncio.get_running_loop().time()
        for old, slot in list(self._slots.items()):
            if not slot.lock.locked() and slot.kept is not None and slot.kept[0] < now:
                del self._slots[old]
        slot = self._slots.setdefault(key, _Slot())
        async with slot.lock:
            if slot.kept is None or slot.kept[0] < now:
                value, seconds = await self._read(*key)
                slot.kept = asyncio.get_running_loop().time() + seconds, value
            return slot.kept[1]


class OnDemand:
    """The reads of one process, shared by its passes.

    claims_devices: whether nodes may give devices by claims.
    """

    def __init__(self, cluster: Client, *, claims_devices: bool = False) -> None:
        self._cluster = cluster
        self._claims_devices = claims_devices
        self.free_devices = _Kept(self._read_free)
        """For every node with Neuron devices: allocatable minus requested, or offered minus claimed."""
        self.log = _Kept(self._read_log)
        """The end of the log of a pod's runtime container; empty if it cannot be read."""
        self.exists = _Kept(self._look_for)
        """Whether a Secret or ConfigMap does; False if nobody says."""
        self.denial = _Kept(self._try_pod)
        """Why the API server would refuse a pod; empty if it would not, or if nobody says."""
        self.told = _Kept(self._ask)
        """What a replica tells about its adapters, its metrics or its idleness. All adapters of a model share the
        answer."""
        self._asking = asyncio.Semaphore(MAX_ASKED)
        self._events = _Kept(self._list_events)

    async def events(self, key: Key, children: Iterable[Object], pods: Iterable[Object]) -> tuple[Object, ...]:
        """Warnings about a model's Jobs, ReplicaSets and pods, newest last. The models of a namespace share a list."""
        names = {(obj["kind"], key_of_model(obj)[1]) for obj in (*children, *pods)}
        events_here = await self._events(key[0], "type=Warning", EVENTS_SECONDS)
        return tuple(event for event in events_here if _concerns(event, names))

    async def claim_events(self, namespace: str) -> tuple[Object, ...]:
        """What is said about the namespace's claims, newest last."""
        return await self._events(namespace, "regarding.kind=PersistentVolumeClaim", CLAIM_EVENTS_SECONDS)

    async def _look_for(self, namespace: str, need: Exists) -> tuple[bool, float]:
        """The operator may not read Secrets. It asks whether it could create one of that name, without creating it."""
        try:
            if need.kind == "ConfigMap":
                await self._cluster.get(CONFIG_MAPS, namespace, need.name)
                return True, EXISTS_SECONDS
            about = {"apiVersion": SECRETS.api_version, "kind": SECRETS.kind}
            named = {"metadata": {"namespace": namespace, "name": need.name}}
            await self._cluster.create(SECRETS, {**about, **named}, dry_run=True)
        except AlreadyExists:
            return True, EXISTS_SECONDS
        except NotFound:
            return False, EXISTS_SECONDS
        except ClusterFault as fault:
            logger.info("cannot tell whether %s %s/%s exists: %s", need.kind, namespace, need.name, fault)
        return False, EXISTS_SECONDS

    async def _try_pod(self, need: Trial) -> tuple[str, float]:
        pod = msgspec.json.decode(need.pod)
        try:
            await self._cluster.create(PODS, pod, dry_run=True)
        except (Forbidden, Invalid) as fault:
            return str(fault), DENIAL_SECONDS
        except ClusterFault as fault:
            logger.info("cannot try pod %s: %s", "/".join(key_of_model(pod)), fault)
        return "", DENIAL_SECONDS

    async def _ask(self, need: Asked) -> tuple[Told, float]:
        async with self._asking:
            told = await told_at(need.address)
        if isinstance(need, IdleOf):
            told = replace(told, text=idle_line_in(told.text))
        if isinstance(need, MetricsOf):
            return replace(told, text=counters_in(told.text)), METRICS_SECONDS
        return told, UNTOLD_SECONDS if told.fault else TOLD_SECONDS

    async def _read_free(self) -> tuple[FreeDevices, float]:
        turn = asyncio.Semaphore(MAX_READS)
        counted: set[str] = set()

        async def devices_of(node: Object) -> NodeDevices:
            selector = f"spec.nodeName={node['metadata']['name']},status.phase!=Succeeded,status.phase!=Failed"
            async with turn:
                pods = tuple((await self._cluster.list(PODS, None, field_selector=selector)).items)
            counted.update(pod["metadata"]["uid"] for pod in pods)
            return node_devices(node, pods)

        try:
            slices = await self._read_slices() if self._claims_devices else {}
            listed = (await self._cluster.list(NODES, None)).items
            with_devices = [node for node in listed if has_devices(node) or node["metadata"]["name"] in slices]
            nodes = await asyncio.gather(*map(devices_of, with_devices))
            if slices:  # claims are read after pods: a pod gets its node after its devices, which have to be counted
                taken = frozenset(taken_by((await self._cluster.list(RESOURCE_CLAIMS, None)).items))
                nodes = [claimed_devices(one, slices[one.name], taken) if one.name in slices else one for one in nodes]
            free = FreeDevices(tuple(nodes), frozenset(counted))
        except Forbidden:
            free = FreeDevices(None)
        return free, FREE_DEVICES_SECONDS

    async def _read_slices(self) -> Mapping[str, Sequence[Object]]:
        """What the Neuron DRA driver offers by node; nothing where the cluster has no claims."""
        try:
            of_driver = f"spec.driver={DEVICE_DRIVER}"
            return slices_by_node((await self._cluster.list(RESOURCE_SLICES, None, field_selector=of_driver)).items)
        except NotFound:  # before Kubernetes 1.34
            return {}

    async def _list_events(self, namespace: str, selector: str, seconds: float) -> tuple[tuple[Object, ...], float]:
        """Events of a namespace that match a selector, newest last; none without the right to list them."""
        try:
            events = (await self._cluster.list(EVENTS, namespace, field_selector=selector)).items
        except Forbidden:
            events = ()
        return tuple(sorted(events, key=_time_of)), seconds

    async def _read_log(self, namespace: str, pod: str) -> tuple[str, float]:
        try:
            return await self._cluster.log(namespace, pod, RUNTIME_CONTAINER), LOG_SECONDS
        except ClusterFault as fault:
            logger.info("cannot read the log of %s/%s: %s", namespace, pod, fault)
            return "", UNREADABLE_LOG_SECONDS


def _concerns(event: Object, names: set[tuple[str, str]]) -> bool:
    about = event.get("regarding") or {}
    kind, name = about.get("kind", ""), about.get("name", "")
    if kind == "ReplicaSet":  # named after its Deployment, with a hash appended
        kind, name = "Deployment", name.rpartition("-")[0]
    return (kind, name) in names


def _time_of(event: Object) -> str:
    """When it last happened: RFC 3339 in UTC, which sorts as text."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    return str(next((time for time in times if time), ""))
