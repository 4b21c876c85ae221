"""What the gateway serves, from watches: NeuronModels, NeuronAdapters, and EndpointSlices of the models' Services.

`process` runs it beside the gateway. It decides nothing: names, readiness and words are those of the objects. The one
thing that it writes is a model's /scale, from 0 to 1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from neuron_operator.api import names
from neuron_operator.cluster.client import ENDPOINT_SLICES, NEURON_ADAPTERS, NEURON_MODELS, Client, Conflict, Forbidden
from neuron_operator.cluster.reflector import Reflector, Version, key_of_base, key_of_model, trimmed_model
from neuron_operator.gateway.gateway import Gateway
from neuron_operator.gateway.models import Adapter, Key, Served
from neuron_operator.read.objects import dig, items, labels_of, name_of, text
from neuron_operator.read.world import Object

logger = logging.getLogger(__name__)

REFUSED_SECONDS = 60.0
SERVICE_LABEL = "kubernetes.io/service-name"


def served_of(model: Object, adapters: Iterable[Object], slices: Iterable[Object]) -> Served:
    """Pure."""
    namespace, name = key_of_model(model)
    given = dig(model, "spec", "model", "servedNames")
    served_names = tuple(one for one in given if isinstance(one, str)) if isinstance(given, list) else ()
    conditions = {text(one, "type"): one for one in items(model, "status", "conditions")}
    said = conditions.get("Available") or conditions.get("Ready")
    refusing = next((one for kind, is_bad in _REFUSES if text(one := conditions.get(kind), "status") == is_bad), None)
    length = dig(model, "status", "plan", "maxModelLength")
    return Served(
        namespace,
        name,
        served_names or (name,),
        addresses=addresses_of(slices),
        adapters=tuple(sorted(map(_adapter, adapters), key=lambda one: one.name)),
        created=_created(model),
        is_asleep=dig(model, "spec", "replicas") == 0,
        refused=_words(refusing),
        words=_words(said),
        max_model_len=length if isinstance(length, int) else None,
        uid=text(model, "metadata", "uid"),
    )


_REFUSES = (("Stalled", "True"), ("Accepted", "False"))
"""Conditions of a model that would not serve with any number of replicas."""


def _adapter(obj: Object) -> Adapter:
    return Adapter(name_of(obj), text(obj, "spec", "uri"), _created(obj))


def _words(condition: Any) -> str:
    if condition is None:
        return ""
    return ": ".join(filter(None, (text(condition, "reason"), text(condition, "message"))))


def _created(obj: Object) -> int:
    try:
        return int(datetime.fromisoformat(text(obj, "metadata", "creationTimestamp")).timestamp())
    except ValueError:
        return 0


def addresses_of(slices: Iterable[Object]) -> tuple[str, ...]:
    """Of the endpoints that are ready. A pod has one address, also where its Service has those of two families."""
    found: dict[str, str] = {}
    for one in sorted(slices, key=lambda one: text(one, "addressType")):  # IPv4 comes first
        ports = [port.get("port") for port in items(one, "ports") if port.get("name") == names.PORT_NAME]
        if not ports or not isinstance(ports[0], int):
            continue
        for endpoint in items(one, "endpoints"):
            addresses = endpoint.get("addresses")
            if dig(endpoint, "conditions", "ready") is False or not isinstance(addresses, list) or not addresses:
                continue
            host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
            address = f"{host}:{ports[0]}"
            found.setdefault(text(endpoint, "targetRef", "uid") or address, address)
    return tuple(sorted(found.values()))


def _key_of_slice(one: Object) -> Key:
    return one["metadata"]["namespace"], labels_of(one).get(SERVICE_LABEL, "")


class _Place:
    """A namespace, or all of them, and what is watched there."""

    def __init__(self, client: Client, namespace: str | None, wake: Callable[[Object, Version | None], None]) -> None:
        self.where = f"namespace {namespace}" if namespace else "the cluster"
        self.models = Reflector(client, NEURON_MODELS, namespace, key_of=key_of_model, wake=wake, trim=trimmed_model)
        self.adapters = Reflector(client, NEURON_ADAPTERS, namespace, key_of=key_of_base, wake=wake, trim=trimmed_model)
        # A slice has the labels of its Service.
        self.slices = Reflector(
            client, ENDPOINT_SLICES, namespace, key_of=_key_of_slice, wake=wake, label_selector=names.OWNED_SELECTOR
        )
        self.is_settled = asyncio.Event()
        """Whether it is known, or refused."""
        self.refusal: Forbidden | None = None

    async def run(self) -> None:
        """Until cancelled. A place that may not be watched is tried again: a namespace may be made after the chart."""
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    caches = (self.models, self.adapters, self.slices)
                    for cache in caches:
                        tasks.create_task(cache.run(), name=f"cache of {cache.resource.plural}")
                    for cache in caches:
                        await cache.synced.wait()
                    self.refusal = None
                    self.is_settled.set()
            except* Forbidden as refused:
                self.refusal = _first(refused)
                logger.warning("%s is left out: %s", self.where, self.refusal)
            self.is_settled.set()
            await asyncio.sleep(REFUSED_SECONDS)


def _first(refused: BaseExceptionGroup[Forbidden]) -> Forbidden:
    first = refused.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


class Watching:
    """Keeps the gateway's models up to date, in `namespaces`; with `(None,)`, in all."""

    def __init__(self, client: Client, namespaces: Sequence[str | None], gateway: Gateway) -> None:
        self._gateway = gateway
        self._changed: set[Key] = set()
        self._is_due = asyncio.Event()
        self._places = [_Place(client, namespace, self._wake) for namespace in namespaces]

    def _wake(self, obj: Object, version: Version | None) -> None:
        of = {names.KIND: key_of_model, names.ADAPTER_KIND: key_of_base}.get(obj["kind"], _key_of_slice)
        namespace, name, *_ = of(obj)
        self._changed.add((namespace, name))
        self._is_due.set()

    async def run(self) -> None:
        """Until cancelled. Raises Forbidden, in a group, if nothing may be watched."""
        async with asyncio.TaskGroup() as tasks:
            for place in self._places:
                tasks.create_task(place.run(), name=f"watches of {place.where}")
            for place in self._places:
                await place.is_settled.wait()
            if all(place.refusal for place in self._places) and self._places[0].refusal:
                raise self._places[0].refusal
            while True:
                changed, self._changed = self._changed, set()
                self._is_due.clear()
                for key in sorted(changed):
                    self._update(key)
                self._gateway.is_ready = True
                await self._is_due.wait()

    def _update(self, key: Key) -> None:
        found = (place.models.find(*key) for place in self._places)
        model = next((one for one in found if one is not None), None)
        if model is None:
            self._gateway.drop(key)
            return
        adapters = (one for place in self._places for one in place.adapters.of_model(key))
        slices = (one for place in self._places for one in place.slices.of_model(key))
        self._gateway.put(served_of(model, adapters, slices))


async def wake(client: Client, served: Served) -> bool:
    """Ask for one replica of a model that has none; False if somebody else did. Raises ClusterFault."""
    metadata = {"namespace": served.namespace, "name": served.name, "uid": served.uid}
    try:
        await client.scale(NEURON_MODELS, {"metadata": metadata, "spec": {"replicas": 0}}, 1)
    except Conflict:
        return False
    return True
