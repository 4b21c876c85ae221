"""The pass over one NeuronModel or NeuronAdapter: observe, decide, apply, prune, status. Called by the workers with a
key.

`decide` decides; this module orders the writes and handles refusals. A pass may run at any time, from any state, and be
interrupted at any request: the next one reads from the API what was done and continues. Between passes only caches of
the API's objects remain.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from functools import partial

from neuron_operator.api import names
from neuron_operator.api.errors import ClusterFault, TermOver
from neuron_operator.api.reasons import Asked, Exists, LogOf, Need, Needed, Trial
from neuron_operator.cluster.client import (
    BYTES,
    MAX_OBJECT_BYTES,
    PODS,
    SECRETS,
    AlreadyExists,
    Client,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Resource,
    Terminating,
    Throttled,
    resource_of,
)
from neuron_operator.cluster.containment import Contained, needs_apply
from neuron_operator.cluster.contests import DELETED, Contests, Difference, difference, status_of
from neuron_operator.cluster.holding import Holdings
from neuron_operator.cluster.on_demand import OnDemand
from neuron_operator.cluster.reflector import Caches, Key, Version, is_adapter, key_of_base, key_of_model, version_of
from neuron_operator.cluster.workqueue import WorkQueue
from neuron_operator.read.objects import (
    dig,
    instant,
    is_orphan,
    is_owned,
    is_shared,
    items,
    labels_of,
    name_of,
    owners_of,
    text,
)
from neuron_operator.read.world import (
    Announcement,
    Change,
    Decision,
    Object,
    Refusal,
    RefusalCause,
    Settings,
    Waker,
    World,
)
from neuron_operator.run.metrics import Metrics, PassResult
from neuron_operator.run.pace import Pace
from neuron_operator.run.upgrades import Turns

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""A write that fails for longer is reported in the status."""

Decide = Callable[[World, Settings], Decision]


@dataclass(frozen=True)
class Outcome:
    """What one pass did. `num_writes` counts write requests, whether or not they changed something; `written` are the
    versions that they led to."""

    num_writes: int = 0
    written: frozenset[Version] = frozenset()
    requeue_after_seconds: float | None = None


@dataclass
class _Refused(Exception):
    """A refused write that the next decision must see."""

    refusal: Refusal
    retry: ClusterFault | None = None
    """To be raised once the status is written."""


@dataclass(frozen=True)
class _Contested:
    """The condition of a model."""

    since: datetime
    message: str


def _contested(body: Object) -> _Contested | None:
    for one in items(body, "status", "conditions"):
        if text(one, "type") == "Contested" and (since := instant(one.get("lastTransitionTime"))):
            return _Contested(since, text(one, "message"))
    return None


@dataclass
class Reconciler:
    client: Client
    caches: Caches
    settings: Settings
    decide: Decide
    _: KW_ONLY
    decide_adapter: Decide
    post: Callable[[Object, Announcement], None]
    """Sends an Event about the object of a pass, sooner or later."""
    now: Callable[[], datetime]
    """The wall clock."""
    check_term: Callable[[], None]
    """Raises TermOver when this replica may no longer write."""
    turns: Turns
    pace: Pace
    holdings: Holdings

    def __post_init__(self) -> None:
        self._on_demand = OnDemand(self.client, claims_devices=self.settings.claims_devices)
        self.contained = Contained()
        self.contests = Contests()
        self._logged: dict[Key, tuple[Refusal, ...]] = {}
        """The refusals of each model's last pass of this term: one that lasts is logged once."""

    def begin_term(self) -> None:
        """What the status of a model says is newer than what this process remembers."""
        self.contests = Contests()
        self._logged.clear()

    async def reconcile(self, key: Key, *, failing_seconds: float = 0.0) -> Outcome:
        """One pass. Raises ClusterFault if it must be retried; `failing_seconds`: how long this has been so."""
        body = self.caches.adapter(key) if is_adapter(key) else self.caches.model(key)
        decide = self.decide_adapter if is_adapter(key) else self.decide
        # Of a deleted model the garbage collector deletes the children.
        wait_seconds = None if body is None else await self.holdings.seconds_to_wait(key[0])
        if body is None or wait_seconds is not None:
            self._tell_turns(key, body, Decision())
            self._logged.pop(key, None)
            self.caches.use(key, frozenset())
            return Outcome(requeue_after_seconds=wait_seconds)
        contested = None if key in self._logged else _contested(body)
        writes = _Writes(self, key, contested, reports_faults=failing_seconds > PATIENCE_SECONDS)
        retry: ClusterFault | None = None
        world = self._observe(World(body=body, children=(), pods=(), now=self.now()), key)
        for job in world.shared:
            if job["kind"] == "Job" and items(job, "status", "conditions"):
                _forget_job(self.contests, job)  # it ended: the next one is another attempt
        read: frozenset[Needed] = frozenset()
        is_final = False
        while True:
            decision = decide(world, self.settings)
            if decision.uses is not None:
                self.caches.use(key, decision.uses)
            if decision.needs - read:
                world = await self._read(decision.needs - read, world, key)
                read |= decision.needs
                continue
            num_before = writes.number
            try:
                if not isinstance(retry, Throttled):  # then nothing but the status, which says so
                    await writes.carry_out(decision, body)
            except _Refused as refused:
                refusal, retry = refused.refusal, refused.retry or retry
                level = logging.DEBUG if refusal in self._logged.get(key, ()) else logging.WARNING
                what = refusal.why.value, refusal.kind, refusal.name, refusal.message
                logger.log(level, "%s: %s: %s %s %s", "/".join(key), *what)
                # The caches contain what this pass wrote so far. `decide` leaves out what was refused.
                world = replace(self._observe(world, key), refusals=(*world.refusals, refusal))
                continue
            if writes.number == 0 or is_final:
                break
            # Once more, so that one status tells what these writes led to. Only once: others may undo them.
            is_final = True
            world = self._observe(world, key)
        self._logged[key] = world.refusals
        self._tell_turns(key, body, decision)
        is_more_due = writes.number > num_before
        if decision.status is not None and needs_apply({"status": decision.status}, body, "status"):
            await writes.status(body, decision.status)
            is_more_due |= decision.follows
            for announcement in decision.announcements:
                self.post(body, announcement)
        if retry is not None:
            raise retry
        # This pass looked at what it wrote: nothing but `is_more_due` tells whether another one has to follow.
        due = 0.0 if is_more_due else decision.requeue_after_seconds
        return Outcome(writes.number, frozenset(writes.written), due)

    def _tell_turns(self, key: Key, body: Object | None, decision: Decision) -> None:
        if is_adapter(key):
            self.pace.tell(key, body, decision.job)
        else:
            self.turns.tell(key, decision.upgrade)

    def _observe(self, world: World, key: Key) -> World:
        """Of a NeuronAdapter, the pods are those of its model, and none of the children are its own."""
        caches = self.caches
        of_model = key_of_base(world.body) if is_adapter(key) else key
        model = caches.model(of_model) if is_adapter(key) else world.body
        children = caches.children(of_model)
        uid = model["metadata"]["uid"] if model is not None else ""
        pods = caches.pods(of_model, uid, children)
        return replace(
            world,
            children=() if is_adapter(key) else children,
            pods=pods,
            shared=tuple(obj for obj in caches.children((key[0], "")) if name_of(obj) != names.HOLDING),
            used_by_others=caches.used_by_others(key),
            nodes=caches.nodes_of(pods),
            has_turn=self.pace.take(key) if is_adapter(key) else self.turns.take(key),
            adapters=() if is_adapter(key) else caches.adapters_of(key),
            base=model if is_adapter(key) else None,
            of_base=children if is_adapter(key) else (),
        )

    async def _read(self, needs: frozenset[Needed], world: World, key: Key) -> World:
        if Need.FREE_DEVICES in needs:
            world = replace(world, free=await self._on_demand.free_devices())
        if Need.EVENTS in needs:
            about = (*world.children, *(obj for obj in world.shared if obj["kind"] == "Job"))
            world = replace(world, events=await self._on_demand.events(key, about, world.pods))
        if Need.CLAIM_EVENTS in needs:
            world = replace(world, claim_events=await self._on_demand.claim_events(key[0]))
        logs = {need.pod: await self._on_demand.log(key[0], need.pod) for need in needs if isinstance(need, LogOf)}
        existing = {one for one in needs if isinstance(one, Exists) and await self._on_demand.exists(key[0], one)}
        denials = {need: await self._on_demand.denial(need) for need in needs if isinstance(need, Trial)}
        asked = [need for need in needs if isinstance(need, Asked)]
        told = dict(zip(asked, await asyncio.gather(*map(self._on_demand.told, asked)), strict=True))
        world = replace(world, existing=world.existing | existing, denials={**world.denials, **denials})
        world = replace(world, told={**world.told, **told})
        if Need.WAKERS in needs:
            world = replace(world, wakers=tuple(self._wakers(key)))
        return replace(world, logs={**world.logs, **logs})

    def _wakers(self, key: Key) -> Iterator[Waker]:
        """The other models that wake."""
        for body in self.caches.models():
            other = key_of_model(body)
            if other != key and dig(body, "status", "scaling", "wakingSince"):
                children = self.caches.children(other)
                pods = self.caches.pods(other, body["metadata"]["uid"], children)
                yield Waker(body, tuple(pod for pod in pods if labels_of(pod).get(names.MODEL_LABEL) == other[1]))


@dataclass
class _Writes:
    """The writes of one pass, counted; each can be repeated safely."""

    by: Reconciler
    key: Key
    contested: _Contested | None
    """In the first pass of a term: what others have undone before."""
    reports_faults: bool
    """A fault that a retry may cure does not end the pass either."""
    number: int = 0
    written: set[Version] = field(default_factory=set)
    has_scaled: bool = False
    """What this pass knows of the model is older, then."""

    def _next(self) -> Client:
        """For one write. Raises TermOver; time may have passed since the last one, when this process was frozen."""
        self.by.check_term()
        self.number += 1
        return self.by.client

    def _observe_written(self, resource: Resource, written: Object) -> None:
        self.written.add(version_of(written))
        self.by.caches.observe_written(resource, written)

    async def carry_out(self, decision: Decision, body: Object) -> None:
        """Raises _Refused at the first write that the next decision must know of."""
        for desired in decision.desired:
            await self.ensure(desired, body)
        for change in decision.changes:
            await self.change(change)
        for live in decision.delete:
            await self.delete(live)
        if decision.scale_to is not None and not self.has_scaled:
            await self.scale(body, decision.scale_to)

    async def ensure(self, desired: Object, body: Object) -> None:
        """Create, or apply if the live object lacks something. Raises _Refused if the live object is not ours."""
        resource, metadata = resource_of(desired), desired["metadata"]
        if resource is SECRETS:
            desired = {**desired, "stringData": {names.GROUP_SECRET_KEY: secrets.token_hex(SECRET_BYTES)}}
        refusal = partial(Refusal, kind=resource.kind, name=metadata["name"])
        live = self.by.caches.find(resource, metadata["namespace"], metadata["name"])
        try:
            if live is None:
                if resource.kind == "Job":
                    self._check_contest(_made_by(body, desired), DELETED, desired)
                live = await self._create_or_look(resource, desired, body)
            if resource is SECRETS:
                return  # its name is that of one attempt of a group, and nobody may read it
            if not _is_ours(live, desired, body):
                raise _Refused(refusal(RefusalCause.TAKEN))
            if "deletionTimestamp" in live["metadata"]:
                return  # its end wakes us
            if BYTES in live:
                size = f"it has {live[BYTES]} bytes, more than {MAX_OBJECT_BYTES}"
                raise _Refused(refusal(RefusalCause.HEAVY, message=size))
            if resource.kind in _NEVER_EDITED:
                return
            if is_shared(desired) and resource.kind in _CREATED_ONCE:
                # Its labels are repaired; its owners change by `Decision.changes`, its content never.
                if not (labels := labels_of(desired)).items() <= labels_of(live).items():
                    await self.change(Change(live, {"metadata": {"labels": dict(labels)}}))
                return
            if not self.by.contained.needs_apply(desired, live):
                if words := self.by.contests.still(_key_of(desired)):
                    raise _Refused(refusal(RefusalCause.UNDONE, message=words))
                return
            wants = difference(desired, live)
            self._check_contest(_key_of(desired), wants, desired)
            self._observe_written(resource, await self._apply(resource, desired, live))
            self.by.contests.wrote(_key_of(desired), wants)
        except (Terminating, Forbidden, Invalid) as fault:
            raise _Refused(refusal(_CAUSES[type(fault)], message=str(fault))) from fault
        except TermOver:
            raise
        except ClusterFault as fault:
            if not self.reports_faults:
                raise
            raise _Refused(refusal(RefusalCause.FAILED, message=str(fault)), retry=fault) from fault

    def _check_contest(self, contest: Hashable, wants: Difference, desired: Object) -> None:
        """Before a write that repairs this. Raises _Refused if somebody else undoes it and it has to wait."""
        kind, name = desired["kind"], name_of(desired)
        if self.contested is not None and f"{kind} {name}: {wants.subject}" in self.contested.message:
            self.by.contests.resume(contest, wants, (self.by.now() - self.contested.since).total_seconds())
        if words := self.by.contests.check(contest, wants):
            raise _Refused(Refusal(RefusalCause.UNDONE, kind, name, words))

    async def _apply(self, resource: Resource, desired: Object, live: Object) -> Object:
        try:
            return await self._next().apply(resource, desired, live)
        except Invalid as fault:
            if resource.kind not in _REPLACEABLE or _IMMUTABLE not in str(fault):
                raise
        await self._next().delete(resource, live)
        return await self._next().create(resource, desired)

    async def _create_or_look(self, resource: Resource, desired: Object, body: Object) -> Object:
        try:
            live = await self._next().create(resource, desired)
        except AlreadyExists:
            if resource is SECRETS:
                return desired
            metadata = desired["metadata"]
            return await self.by.client.get(resource, metadata["namespace"], metadata["name"])
        self._observe_written(resource, live)
        if resource.kind == "Job":  # which other models may have created at the same time
            self.by.contests.wrote(_made_by(body, live), DELETED, live["metadata"]["uid"])
        return live

    async def change(self, change: Change) -> None:
        resource, live = resource_of(change.live), change.live
        try:
            written = await self._next().patch(resource, live, change.patch, unchanged=change.unchanged)
        except NotFound as gone:
            logger.debug("already deleted: %s", gone)
            return
        except Forbidden as fault:
            raise _Refused(Refusal(RefusalCause.FORBIDDEN, resource.kind, name_of(live), str(fault))) from fault
        self._observe_written(resource, written)
        is_used = name_of(live) in self.by.caches.used_by_others(self.key)
        if not change.unchanged and is_orphan(written) and not is_used:
            await self.delete(written)  # its other owners left at the same time, and nobody is woken

    async def delete(self, live: Object) -> None:
        resource = resource_of(live)
        if "deletionTimestamp" in live["metadata"]:
            return
        _forget_job(self.by.contests, live)
        try:
            # Another model may become an owner of a shared object at any time.
            await self._next().delete(resource, live, unchanged=is_shared(live) and resource is not PODS)
        except (NotFound, Conflict) as gone:
            logger.debug("already deleted: %s", gone)
        except Forbidden as fault:
            raise _Refused(Refusal(RefusalCause.FORBIDDEN, resource.kind, name_of(live), str(fault))) from fault

    async def scale(self, body: Object, num_replicas: int) -> None:
        resource = resource_of(body)
        try:
            await self._next().scale(resource, body, num_replicas)
        except NotFound as gone:
            logger.debug("already deleted: %s", gone)
        except Forbidden as fault:
            raise _Refused(Refusal(RefusalCause.FORBIDDEN, resource.kind, name_of(body), str(fault))) from fault
        self.has_scaled = True

    async def status(self, body: Object, status: Object) -> None:
        wants = status_of(status)
        if words := self.by.contests.check(_key_of(body), wants):
            logger.warning("%s: %s", "/".join(_key_of(body)), words)
            return
        try:
            written = await self._next().apply_status(resource_of(body), body, status)
        except NotFound:  # perhaps while kopf's watch was lost: then nobody else says so
            self.by.caches.forget(body)
            return
        self._observe_written(resource_of(body), written)
        self.by.contests.wrote(_key_of(body), wants)


_CAUSES = {Terminating: RefusalCause.TERMINATING, Forbidden: RefusalCause.FORBIDDEN, Invalid: RefusalCause.REJECTED}


def _key_of(obj: Object) -> tuple[str, str, str]:
    return obj["kind"], obj["metadata"]["namespace"], name_of(obj)


def _made_by(body: Object, job: Object) -> tuple[str, ...]:
    """A Job, for one NeuronModel: it goes with its owners, and the next model of the same name may make it again."""
    return (*_key_of(job), body["metadata"]["uid"])


def _forget_job(contests: Contests, live: Object) -> None:
    for owner in owners_of(live):
        contests.forget((*_key_of(live), owner.get("uid", "")), live["metadata"].get("uid", ""))


_REPLACEABLE = frozenset({"ControllerRevision", "ConfigMap"})
"""Kinds with immutable content that pods survive the loss of: one with other content is deleted and created."""
_CREATED_ONCE = frozenset({"Job", "ConfigMap", "PersistentVolumeClaim"})
"""Shared kinds that are never applied again. Others write into a claim: the volume, and people enlarge it."""
_NEVER_EDITED = frozenset({"StatefulSet", names.LEADER_WORKER_SET})
"""Another attempt of a group is another object."""
SECRET_BYTES = 32
_IMMUTABLE = "field is immutable"
"""In the answer of the API server."""


def _is_ours(live: Object, desired: Object, body: Object) -> bool:
    """Whether the model owns `live`, or nobody does and it has the operator's labels for this model: it is adopted.
    A shared object is ours if it has its labels, or any model as owner.

    Raises Conflict (retriable) for a child of a deleted model of the same name, until it is garbage-collected.
    """
    if is_shared(desired):
        has_labels = labels_of(desired).items() <= labels_of(live).items()
        return has_labels or any(owner.get("kind") in names.KINDS for owner in owners_of(live))
    owners = owners_of(desired)
    if is_owned(live, body["metadata"]["uid"]) or any(is_owned(live, owner["uid"]) for owner in owners):
        return True
    name = name_of(body)
    if is_orphan(live):
        return names.owner_labels(name).items() <= labels_of(live).items()
    namesakes = {(names.KIND, name), *((owner["kind"], owner["name"]) for owner in owners)}
    if any((owner["kind"], owner["name"]) in namesakes for owner in live["metadata"]["ownerReferences"]):
        message = f"{live['kind']} {name_of(live)} of a deleted {names.KIND} still exists"
        raise Conflict(message, retriable=True, status=409)
    return False


async def run_workers(queue: WorkQueue[Key], reconciler: Reconciler, metrics: Metrics, num_workers: int) -> None:
    """Work on `queue` until cancelled. The failure of one model never ends a worker."""
    failing_since: dict[Key, float] = {}

    async def handle(key: Key) -> None:
        started = time.perf_counter()
        failing_seconds = started - failing_since.get(key, started)
        result: PassResult = "failed"
        try:
            outcome = await reconciler.reconcile(key, failing_seconds=failing_seconds)
            queue.settle(key, outcome.written)
            result = "changed" if outcome.num_writes else "unchanged"
            queue.forget(key)
            failing_since.pop(key, None)
            if outcome.requeue_after_seconds is not None:
                queue.add_after(key, outcome.requeue_after_seconds)
        except TermOver:  # the Lease says so, and soon cancels this
            result = "cancelled"
            queue.retry(key)
        except ClusterFault as fault:
            result = "retried"
            logger.log(logging.INFO if fault.retriable else logging.ERROR, "%s: %s", "/".join(key), fault)
            failing_since.setdefault(key, started)
            asked = fault.retry_after_seconds if isinstance(fault, Throttled) else 0.0
            # A report of the fault wakes the model: its text may differ each time.
            queue.retry(key, hold_seconds=max(asked, PATIENCE_SECONDS if failing_seconds > PATIENCE_SECONDS else 0.0))
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        except Exception:  # a bug that affects one model must not stop the others
            logger.exception("%s: the pass failed", "/".join(key))
            queue.retry(key)
        finally:
            metrics.passes.labels(result).inc()
            metrics.pass_seconds.observe(time.perf_counter() - started)

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_workers):
            tasks.create_task(queue.work(handle), name=f"worker {number}")
