"""Caches of the objects that passes read. Each change of an object wakes its model.

Kopf delivers the NeuronModels; a reflector lists any other resource, watches it from there, and lists again when that
version has expired (410). Objects are kept as JSON, which takes a fifth of the memory, and are decoded when they are
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from itertools import islice

import msgspec

from neuron_operator.api import manifest, names
from neuron_operator.api.errors import ClusterFault
from neuron_operator.cluster.client import (
    CHILDREN,
    JOBS,
    NEURON_ADAPTERS,
    NEURON_MODELS,
    NODES,
    PODS,
    REPLICA_SETS,
    Client,
    Forbidden,
    Gone,
    Resource,
    Throttled,
)
from neuron_operator.cluster.containment import own_entries
from neuron_operator.cluster.workqueue import Backoff
from neuron_operator.read.objects import MAX_OWNERS, descends, items, labels_of, name_of, only, owners_of, text
from neuron_operator.read.views import NodeView, node_view
from neuron_operator.read.world import Object
from neuron_operator.why import nodes

logger = logging.getLogger(__name__)

NAMES = Resource(names.API_VERSION, names.KIND, names.PLURAL, is_only_metadata=True)
"""NeuronModels, of which a list brings the metadata alone."""
LOOK_SECONDS = 300.0
"""Until the next list of names, unless kopf lists the models before."""
FIRST_LOOK_SECONDS = 5.0
"""The same until kopf has delivered all: a model may have been deleted before kopf listed it."""
MAX_REMEMBERED_BYTES = 32_768
"""The JSON of an object that is kept decoded for a while, which takes several times that memory."""
_BACKOFF = Backoff(max_seconds=30.0)
SETTLE_SECONDS = 1.0
"""From the first model of a list of kopf to our list of names: the others follow at once."""

Key = tuple[str, ...]
"""Namespace and name of a NeuronModel, or of another object; of a NeuronAdapter its kind follows."""
Version = tuple[str, str]
"""UID and resource version of an object."""


def trimmed(obj: Object) -> Object:
    """The object with only our own entries of `managedFields`: the others only cost memory."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    ours = [*own_entries(obj), *own_entries(obj, "status")]
    if ours:
        metadata["managedFields"] = ours
    return {**obj, "metadata": metadata}


def trimmed_model(model: Object) -> Object:
    """The model with the metadata that passes read: labels and annotations of others may be heavier than the rest. Of a
    spec that is too heavy to keep only the weight, for which `manifest.parse` refuses it."""
    metadata = trimmed(model)["metadata"]
    annotations = only(metadata.get("annotations") or {}, names.MODEL_ANNOTATIONS)
    num_bytes, _ = manifest.weighed(model)
    kept = {**model, "metadata": {**only(metadata, _READ_OF_MODELS), "annotations": annotations}}
    if num_bytes > manifest.MAX_SPEC_BYTES:
        del kept["spec"]
        kept[manifest.SPEC_BYTES] = num_bytes
    return kept


_READ_OF_MODELS = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "managedFields",
)


def trimmed_node(node: Object) -> Object:
    """What `views.node_view` reads: kubelets report the rest often, and it is long."""
    status, devices = node.get("status") or {}, (names.DEVICE_RESOURCE, names.CORE_RESOURCE)
    said = [condition for condition in status.get("conditions") or () if condition["type"] in nodes.HEALTHY]
    return {
        "apiVersion": node["apiVersion"],
        "kind": node["kind"],
        "metadata": only(node["metadata"], ("name", "uid", "resourceVersion")),
        "status": {
            "conditions": said,
            **{part: only(status.get(part) or {}, devices) for part in ("capacity", "allocatable")},
        },
    }


def trimmed_owner(obj: Object) -> Object:
    """Whose it is. Its controller reports the rest often, which concerns no model."""
    kept = only(obj["metadata"], ("name", "namespace", "uid", "labels", "ownerReferences"))
    return {"kind": obj["kind"], "metadata": kept}


def key_of_model(obj: Object) -> Key:
    """The namespace is empty if the object has none."""
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def key_of_child(obj: Object) -> Key:
    """The name is empty if the object is shared."""
    return obj["metadata"]["namespace"], obj["metadata"].get("labels", {}).get(names.MODEL_LABEL, "")


def key_of_adapter(obj: Object) -> Key:
    """Of a NeuronAdapter, for its own passes."""
    return (*key_of_model(obj), names.ADAPTER_KIND)


def key_of_base(adapter: Object) -> Key:
    """The NeuronModel that a NeuronAdapter names."""
    return adapter["metadata"]["namespace"], text(adapter, "spec", "model")


def is_adapter(key: Key) -> bool:
    return key[2:] == (names.ADAPTER_KIND,)


def version_of(obj: Object) -> Version:
    return obj["metadata"]["uid"], obj["metadata"]["resourceVersion"]


def _version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])


@dataclass(frozen=True, slots=True)
class _Kept:
    encoded: bytes
    version: int
    key: Key
    """The key of its model."""

    def decode(self) -> Object:
        light = len(self.encoded) <= MAX_REMEMBERED_BYTES
        obj: Object = _decoded(self.encoded) if light else msgspec.json.decode(self.encoded)
        return obj


_decoded = lru_cache(maxsize=256)(msgspec.json.decode)
"""The passes over the models of a namespace read the same objects again and again."""


@dataclass(eq=False)
class Cache:
    """The objects of `resource` in `namespace` (None: all), from which passes read. A subclass fills it in `turn`."""

    client: Client
    resource: Resource
    namespace: str | None
    _: KW_ONLY
    key_of: Callable[[Object], Key]
    """Returns the model that an object belongs to."""
    wake: Callable[[Object, Version | None], None]
    """Called with an object and its version on each change of it, without a version if it is gone."""
    trim: Callable[[Object], Object] = trimmed

    def __post_init__(self) -> None:
        self.synced = asyncio.Event()
        """Set permanently once the cache has had all objects."""
        self.is_refused = False
        """Whether the right to list or watch was withdrawn."""
        self._num_failures = 0
        self._objects: dict[Key, _Kept] = {}
        self._by_model: dict[Key, dict[Key, _Kept]] = defaultdict(dict)
        self._reached = 0
        """The latest version that a watch has delivered."""

    def find(self, namespace: str, name: str) -> Object | None:
        kept = self._objects.get((namespace, name))
        return None if kept is None else kept.decode()

    def of_model(self, key: Key) -> Iterable[Object]:
        return [kept.decode() for kept in self._by_model.get(key, {}).values()]

    def objects(self) -> Iterable[Object]:
        """Not remembered: a walk over all would drive out what the passes read."""
        return [msgspec.json.decode(kept.encoded) for kept in self._objects.values()]

    def known(self) -> Iterable[Key]:
        return self._objects.keys()

    def observe_written(self, obj: Object) -> None:
        """Store the result of a write before the watch delivers it, so that the next pass sees what this one did.

        If the watch has already passed that version, its state is at least as new and may be a deletion: keep it.
        Versions of one API server compare as numbers
        (https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions).
        """
        if _version(obj) > self._reached:
            self._put(obj)

    async def run(self) -> None:
        """Keep the cache up to date until cancelled. Raises Forbidden if the first list is refused."""
        is_told = False
        while True:
            hold_seconds = 0.0
            try:
                await self._turn()
                self._num_failures, is_told, self.is_refused = 0, False, False
                continue
            except Gone as fault:
                logger.debug("%s", fault)
            except Forbidden:
                if not self.synced.is_set():
                    raise
                self.is_refused = True
                where = f" in namespace {self.namespace}" if self.namespace else ""
                level = logging.DEBUG if is_told else logging.WARNING
                logger.log(level, "permission to watch %s%s was withdrawn", self.resource.plural, where)
                is_told = True
            except Throttled as fault:
                hold_seconds = fault.retry_after_seconds
            except ClusterFault as fault:
                logger.info("watch lost: %s", fault)
            self._num_failures += 1
            delay_seconds = _BACKOFF.delay_seconds(self._num_failures, random.random())  # noqa: S311
            await asyncio.sleep(max(hold_seconds, delay_seconds))

    async def _turn(self) -> None:
        """List and watch, until another list or watch is due. Raises ClusterFault."""
        raise NotImplementedError

    def _put(self, obj: Object) -> None:
        """Keep an object unless it is known in this version or a later one."""
        name, version = key_of_model(obj), _version(obj)
        known = self._objects.get(name)
        if known is not None and known.version >= version:
            return
        key = self.key_of(obj)
        if known is not None and known.key != key:
            self._drop(name)
        kept = _Kept(msgspec.json.encode(self.trim(obj)), version, key)
        self._objects[name] = self._by_model[key][name] = kept
        if known is None or known.encoded != kept.encoded:
            self.wake(obj, version_of(obj))

    def _drop(self, name: Key) -> None:
        """Forget an object, and wake the model that it belonged to when it was stored."""
        known = self._objects.pop(name, None)
        if known is None:
            return
        of_model = self._by_model[known.key]
        of_model.pop(name, None)
        if not of_model:
            del self._by_model[known.key]
        self.wake(known.decode(), None)

    def _drop_deleted(self, name: Key, version: int) -> None:
        """Forget an object that was deleted in this version, unless another one has its name by now."""
        known = self._objects.get(name)
        if known is not None and known.version <= version:
            self._drop(name)

    def _drop_unlisted(self, listed: Set[Key], version: int) -> None:
        for name in [name for name in self._objects if name not in listed]:
            self._drop_deleted(name, version)


@dataclass(eq=False, kw_only=True)
class Reflector(Cache):
    """Lists and watches the objects that match the selectors."""

    label_selector: str = ""
    field_selector: str = ""
    count_start: Callable[[str, str], None] = lambda plural, how: None
    """Called on each list ("list") and each opened watch ("watch")."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._selectors = {"label_selector": self.label_selector, "field_selector": self.field_selector}
        self._resource_version = ""
        """Where the next watch begins; empty: with a list."""

    async def _turn(self) -> None:
        try:
            if not self._resource_version:
                await self._list()
                self._num_failures = 0
            await self._follow()
        except (Gone, Forbidden):
            self._resource_version = ""
            raise

    async def _list(self) -> None:
        self.count_start(self.resource.plural, "list")
        page = await self.client.list(self.resource, self.namespace, **self._selectors)
        self._pass(page.resource_version)
        listed = set()
        for obj in page.items:
            listed.add(key_of_model(obj))
            self._put(obj)
        self._drop_unlisted(listed, self._reached)
        self.is_refused = False
        self.synced.set()

    async def _follow(self) -> None:
        self.count_start(self.resource.plural, "watch")
        events = self.client.watch(
            self.resource, self.namespace, resource_version=self._resource_version, **self._selectors
        )
        async with aclosing(events) as stream:  # type: ignore[type-var]
            async for event in stream:
                # Our own writes were stored before the watch delivers them, and the events that preceded them.
                about = event.metadata
                name, version = (about.namespace, about.name), int(about.resource_version)
                known = self._objects.get(name)
                if event.type == "DELETED":
                    self._drop_deleted(name, version)
                elif event.type != "BOOKMARK" and (known is None or known.version < version):
                    self._put(event.object)
                self._pass(about.resource_version)

    def _pass(self, resource_version: str) -> None:
        self._resource_version, self._reached = resource_version, int(resource_version)


class Models(Cache):
    """The NeuronModels in `namespace` (None: all), as kopf delivers them. `synced` is set once it has delivered all
    that a list of names contained.

    Kopf says neither when its first list is complete nor that a model was deleted while its watch was lost. A list of
    names says both: it is made at the start, after each later list of kopf, and every LOOK_SECONDS.
    """

    def __init__(
        self, client: Client, namespace: str | None, *, wake: Callable[[Object, Version | None], None]
    ) -> None:
        super().__init__(client, NEURON_MODELS, namespace, key_of=key_of_model, wake=wake, trim=trimmed_model)
        self._listed: Set[Key] | None = None
        """Names in the first list."""
        self._is_due = asyncio.Event()

    def deliver(self, kind: str | None, model: Object) -> None:
        """Take one event of kopf. `kind` is None for a model that kopf listed."""
        if kind == "DELETED":
            self._drop_deleted(key_of_model(model), _version(model))
        else:
            self._put(model)
        self._reached = max(self._reached, _version(model))
        if self.synced.is_set() and kind is None:
            self._is_due.set()
        self._check_synced()

    def forget(self, model: Object) -> None:
        """Forget a model of which the API server says that it does not exist."""
        known = self.find(*key_of_model(model))
        if known is not None and known["metadata"]["uid"] == model["metadata"]["uid"]:
            self._drop(key_of_model(model))

    async def _turn(self) -> None:
        page = await self.client.list(NAMES, self.namespace)
        self._listed = {key_of_model(model) for model in page.items}
        self.is_refused = False
        self._drop_unlisted(self._listed, int(page.resource_version))
        self._check_synced()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS if self.synced.is_set() else FIRST_LOOK_SECONDS):
                await self._is_due.wait()
        await asyncio.sleep(SETTLE_SECONDS)
        self._is_due.clear()

    def _check_synced(self) -> None:
        if not self.synced.is_set() and self._listed is not None and self._listed <= self._objects.keys():
            self.synced.set()


def _is_looked_after(job: Object) -> bool:
    ends = {"Complete", "Failed"} & {text(condition, "type") for condition in items(job, "status", "conditions")}
    return len(owners_of(job)) >= MAX_OWNERS and not ends


class Caches:
    """Everything passes read: NeuronModels, their children and pods, in `namespaces`; with `(None,)`, in all, and the
    nodes."""

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[str | None],
        *,
        wake: Callable[[Key, Version | None], None],
        children: Sequence[Resource] = CHILDREN,
        count_start: Callable[[str, str], None] = lambda plural, reason: None,
    ) -> None:
        def wake_concerned(obj: Object, version: Version | None) -> None:
            for key in self._concerned(obj, is_gone=version is None):
                wake(key, version)

        reflect = partial(
            Reflector,
            client,
            label_selector=names.OWNED_SELECTOR,
            key_of=key_of_child,
            wake=wake_concerned,
            count_start=count_start,
        )

        def wake_with_adapters(model: Object, version: Version | None) -> None:
            key = key_of_model(model)
            wake(key, version)
            for adapter in self._objects(NEURON_ADAPTERS, key):
                wake(key_of_adapter(adapter), None)

        def wake_with_base(adapter: Object, version: Version | None) -> None:
            wake(key_of_adapter(adapter), version)
            wake(key_of_base(adapter), None)

        self._models = tuple(Models(client, namespace, wake=wake_with_adapters) for namespace in namespaces)
        self._caches: dict[Resource, Sequence[Cache]] = {
            NEURON_MODELS: self._models,
            **{
                resource: tuple(reflect(resource, namespace) for namespace in namespaces)
                for resource in (*children, PODS)
            },
            NEURON_ADAPTERS: tuple(
                reflect(
                    NEURON_ADAPTERS,
                    namespace,
                    label_selector="",
                    key_of=key_of_base,
                    wake=wake_with_base,
                    trim=trimmed_model,
                )
                for namespace in namespaces
            ),
            REPLICA_SETS: tuple(reflect(REPLICA_SETS, namespace, trim=trimmed_owner) for namespace in namespaces),
        }
        self._wake = wake
        self._children = tuple(children)
        self._users: dict[str, dict[str, set[Key]]] = defaultdict(dict)
        """By namespace and name of a shared object: the models that need it, of which few are its owners."""
        self._used: dict[Key, frozenset[str]] = {}
        self._failed_nodes: dict[str, NodeView] = {}
        """As they were when they last woke a model."""
        if None in namespaces:  # the right to watch nodes is one for the whole cluster
            of_nodes = partial(reflect, label_selector="", key_of=key_of_model, wake=self._wake_replicas_of)
            self._caches[NODES] = (of_nodes(NODES, None, trim=trimmed_node),)

    async def run(self) -> None:
        """Keep all of them up to date until cancelled. Raises Forbidden if one may not be listed."""
        async with asyncio.TaskGroup() as tasks:
            for cache in self._all():
                tasks.create_task(cache.run(), name=f"cache of {cache.resource.plural}")

    def deliver(self, kind: str | None, model: Object) -> None:
        for models in self._models:
            if models.namespace in (None, model["metadata"]["namespace"]):
                models.deliver(kind, model)

    def forget(self, model: Object) -> None:
        for models in self._models:
            models.forget(model)

    @property
    def is_synced(self) -> bool:
        return all(cache.synced.is_set() for cache in self._all())

    @property
    def refused(self) -> Set[str]:
        """The namespaces of which something may not be watched any more; empty text: the cluster."""
        return {cache.namespace or "" for cache in self._all() if cache.is_refused}

    async def wait_synced(self) -> None:
        """No pass may run earlier: objects that are not listed yet would look deleted."""
        for cache in self._all():
            await cache.synced.wait()

    def models(self) -> tuple[Object, ...]:
        return tuple(obj for models in self._models for obj in models.objects())

    def model_keys(self) -> Iterable[Key]:
        return (key for models in self._models for key in models.known())

    def model(self, key: Key) -> Object | None:
        return self.find(NEURON_MODELS, *key)

    def adapter_keys(self) -> Iterable[Key]:
        return ((*name, names.ADAPTER_KIND) for cache in self._of(NEURON_ADAPTERS) for name in cache.known())

    def adapter(self, key: Key) -> Object | None:
        return self.find(NEURON_ADAPTERS, key[0], key[1])

    def adapters(self) -> tuple[Object, ...]:
        return tuple(obj for cache in self._of(NEURON_ADAPTERS) for obj in cache.objects())

    def adapters_of(self, key: Key) -> tuple[Object, ...]:
        """Those that name the model."""
        return tuple(self._objects(NEURON_ADAPTERS, key))

    def children(self, key: Key) -> tuple[Object, ...]:
        return tuple(obj for kind in self._children for obj in self._objects(kind, key))

    def pods(self, key: Key, uid: str, children: Iterable[Object]) -> tuple[Object, ...]:
        """The pods of the model with this UID and these children, and of the Jobs that models of its namespace share.
        An earlier model of the same name may have left pods that still answer until they are collected."""
        between = (*children, *self._objects(REPLICA_SETS, key))
        owners = {text(owner, "metadata", "uid"): owner for owner in between}
        # The StatefulSets between a LeaderWorkerSet and its pods do not have our labels.
        sets = {
            name_of(owner) for owner in between if owner["kind"] == names.LEADER_WORKER_SET and descends(owner, uid, {})
        }

        def is_ours(pod: Object) -> bool:
            return descends(pod, uid, owners) or labels_of(pod).get(names.GROUP_LABEL) in sets

        return (*filter(is_ours, self._objects(PODS, key)), *self._objects(PODS, (key[0], "")))

    def _objects(self, resource: Resource, key: Key) -> Iterable[Object]:
        return (obj for cache in self._of(resource) for obj in cache.of_model(key))

    def use(self, key: Key, shared: frozenset[str]) -> None:
        """The model needs these shared objects from now on: their changes wake it."""
        before, here = self._used.pop(key, frozenset()), self._users[key[0]]
        for name in before - shared:
            here[name].discard(key)
            if not here[name]:
                del here[name]
        for name in shared - before:
            here.setdefault(name, set()).add(key)
        if shared:
            self._used[key] = shared
        if not here:
            del self._users[key[0]]

    def used_by_others(self, key: Key) -> frozenset[str]:
        """Names of the shared objects of the namespace that other models need."""
        here = self._users.get(key[0], {})
        return frozenset(name for name, users in here.items() if len(users) > (key in users))

    def nodes_of(self, pods: Iterable[Object]) -> tuple[Object, ...]:
        """The nodes that the pods run on, if nodes are watched."""
        nodes_here = (self.find(NODES, "", name) for name in sorted({text(pod, "spec", "nodeName") for pod in pods}))
        return tuple(node for node in nodes_here if node is not None)

    def _wake_replicas_of(self, node: Object, version: Version | None) -> None:
        """If the node failed, recovered, or says something else about its failure."""
        view = node_view(node)
        before, now = self._failed_nodes.pop(view.name, None), view if nodes.has_failed(view) else None
        if now is not None:
            self._failed_nodes[view.name] = now
        if now == before:
            return
        for cache in self._of(PODS):
            for pod in cache.objects():
                key = key_of_child(pod)
                if key[1] and text(pod, "spec", "nodeName") == view.name:
                    self._wake(key, None)

    def _concerned(self, obj: Object, *, is_gone: bool) -> Iterable[Key]:
        """The models that a change of the object concerns: the one that it belongs to, or those that own or need it; of
        a pod, those that own or need its Job. A Job that waits or runs is looked after by its owners, if it has
        enough."""
        key = key_of_child(obj)
        if key[1]:
            return (key,)
        if name_of(obj) == names.HOLDING:  # a question needs one answer; who waits looks again by itself
            here = (one for one in (*self.model_keys(), *self.adapter_keys()) if one[0] == key[0])
            return islice(here, 1 if text(obj, "data", "asks") else 0)
        shared = [obj]
        if obj["kind"] == "Pod":
            jobs = (self.find(JOBS, key[0], text(owner, "name")) for owner in owners_of(obj))
            shared = [job for job in jobs if job is not None]
        owners = [owner for one in shared for owner in owners_of(one)]
        of_models = ((key[0], text(owner, "name")) for owner in owners if owner.get("kind") == names.KIND)
        of_adapters = (
            (key[0], text(owner, "name"), names.ADAPTER_KIND)
            for owner in owners
            if owner.get("kind") == names.ADAPTER_KIND
        )
        objects = [] if obj["kind"] == "Job" and not is_gone and _is_looked_after(obj) else shared
        users = (user for one in objects for user in self._users.get(key[0], {}).get(name_of(one), ()))
        return {*of_models, *of_adapters, *users}

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        objects = (cache.find(namespace, name) for cache in self._of(resource))
        return next((obj for obj in objects if obj is not None), None)

    def observe_written(self, resource: Resource, obj: Object) -> None:
        for cache in self._of(resource):
            if cache.namespace in (None, obj["metadata"].get("namespace")):
                cache.observe_written(obj)

    def _of(self, resource: Resource) -> Sequence[Cache]:
        return self._caches.get(resource, ())

    def _all(self) -> Iterable[Cache]:
        return (cache for caches in self._caches.values() for cache in caches)
