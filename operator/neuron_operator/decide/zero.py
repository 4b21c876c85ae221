"""To zero replicas and back: how many pods there may be now, when the operator takes idle replicas away, and which of
several models that wake gets devices first. Called by `decide`. Pure.

Whoever scales writes `spec.replicas`. What is remembered between passes is in `status.scaling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import msgspec

from neuron_operator.api import names
from neuron_operator.api.model import NeuronModel
from neuron_operator.api.model_status import Plan, Scaling
from neuron_operator.api.reasons import Finding, IdleOf, Need, Needed, Reason, unmet
from neuron_operator.place.sizes import describe_free
from neuron_operator.read.activity import idle_seconds
from neuron_operator.read.objects import dig, instant, items, name_of, text, whole, written
from neuron_operator.read.placement import TOLERATES_NEURON, NodeRules, Placement, counted
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import Observed, PodView, scaling_of
from neuron_operator.read.world import NodeDevices, Settings, Told, Waker, World
from neuron_operator.render.serving import progress_seconds
from neuron_operator.why.pods import explain_pod

change = msgspec.structs.replace

KEPT = timedelta(seconds=60)
"""A replica that was loading when the model was scaled to zero stays for so long once it is ready. Autoscalers look
every 15 to 30 s, at metrics that are scraped as often."""
PATIENCE = timedelta(minutes=5)
"""For so long, devices that get free are kept for a model that needs more of them than are free. Then smaller ones
pass: what it needs may never come."""
MIN_LOOK, MAX_LOOK = 5.0, 30.0
"""Seconds until a model looks again whether it is its turn: a tenth of the time that it has waited, within these."""
MAX_SHOWN = 3


@dataclass(frozen=True)
class Scaled:
    num_pods: int
    """Replicas that may exist now."""
    scaling: Scaling = field(default_factory=Scaling)
    note: str = ""
    """The end of the message of `Available`."""
    findings: tuple[Finding, ...] = ()
    needs: frozenset[Needed] = frozenset()
    due: datetime | None = None
    scale_to: int | None = None
    told: str = ""
    """Why the operator scales, for an Event."""


def plan(model: NeuronModel, world: World, observed: Observed, served: Revision, settings: Settings) -> Scaled:
    """served: the revision of the replicas."""
    scaling = _measured(model, observed, served)
    if model.spec.replicas == 0:
        return _at_zero(model, observed, served, _without_rule(model, scaling))
    scaling = change(scaling, kept_since=None)
    waking = instant(scaling.waking_since)
    if waking is None and _was_at_zero(observed):
        waking = observed.now
    if waking is None or any(pod.is_answering for pod in observed.live):
        return _idle(model, world, observed, change(scaling, waking_since=None))
    scaling = _without_rule(model, change(scaling, waking_since=written(waking)))
    return replace(_waking(model, world, observed, served, since=waking, settings=settings), scaling=scaling)


def _was_at_zero(observed: Observed) -> bool:
    available = observed.model.conditions.get("Available")
    return available is not None and available.reason == "ScaledToZero"


def _measured(model: NeuronModel, observed: Observed, served: Revision) -> Scaling:
    """With the load of the replica that started last. A replica is measured once: it may cease to be ready, and be
    ready again."""
    scaling = observed.model.scaling
    before = instant(scaling.load_began)
    most = progress_seconds(model, served)
    for pod in observed.live:
        if pod.revision != served.name or not pod.is_answering or pod.container.num_restarts:
            continue
        if pod.scheduled is None or pod.readiness_changed is None or (before and pod.scheduled <= before):
            continue
        seconds = (pod.readiness_changed - pod.scheduled).total_seconds()
        if 0 <= seconds <= most:
            before = pod.scheduled
            plan_of = served.pinned.plan
            scaling = change(
                scaling,
                load_seconds=round(seconds),
                load_began=written(before),
                load_instance_type=plan_of.instance_type,
            )
    return scaling


def wakes_in(scaling: Scaling, served: Plan) -> str:
    """Empty: nobody knows. A load on nodes of another type says nothing."""
    if scaling.load_seconds is None or scaling.load_instance_type != served.instance_type:
        return ""
    return f"wakes in about {scaling.load_seconds} s, where devices are free"


# To zero


def _at_zero(model: NeuronModel, observed: Observed, served: Revision, scaling: Scaling) -> Scaled:
    """A replica that loads is not broken off: who asked for it may ask again, and would find it at its beginning, again
    and again. Its load ends with the replica ready or failed, and has a deadline."""
    scaling = change(scaling, waking_since=None)
    recorded = instant(scaling.kept_since)
    since = recorded or (None if _was_at_zero(observed) else observed.now)
    kept = [
        (pod, until)
        for pod, until in _kept(model, observed, served, recorded)
        if since is not None and pod.age_key[0] <= since  # not what replaces one that somebody deleted
    ]
    words = ["spec.replicas is 0"]
    if not kept or since is None:
        words += [_by_rule(scaling), wakes_in(scaling, served.pinned.plan)]
        return Scaled(0, change(scaling, kept_since=None), "; ".join(filter(None, words)))
    # The one that is ready, else the one that has been loading longest.
    pod, until = min(kept, key=lambda one: (not one[0].is_answering, one[0].age_key))
    doing = f"ends at {written(until)}" if pod.is_answering else "is still loading, and is not broken off"
    cure = "" if pod.is_answering else f"it ends {KEPT.seconds} s after it is ready; delete the pod to end it now"
    words += [f"pod {pod.name} {doing}", cure]
    return Scaled(1, change(scaling, kept_since=written(since)), "; ".join(filter(None, words)), due=until)


def _kept(
    model: NeuronModel, observed: Observed, served: Revision, recorded: datetime | None
) -> Iterator[tuple[PodView, datetime]]:
    """Pods that stay although nobody wants them, and until when at most. recorded: since when some do."""
    for pod in observed.live:
        if pod.revision != served.name:
            continue
        if pod.is_answering:
            until = pod.readiness_changed + KEPT if recorded and pod.readiness_changed else observed.now
        else:
            loads = pod.node and explain_pod(pod, observed, served.placement).reason == Reason.LOADING
            until = (pod.scheduled or pod.age_key[0]) + timedelta(seconds=progress_seconds(model, served))
            until = until if loads else observed.now
        if until > observed.now:
            yield pod, until


# Idle


def _without_rule(model: NeuronModel, scaling: Scaling) -> Scaling:
    """Without what a rule left behind that is no longer in the spec, or that does not hold now."""
    if model.spec.idle is None:
        return change(scaling, active_at=None, idled_at=None)
    return scaling if model.spec.replicas <= model.spec.idle.min_replicas else change(scaling, idled_at=None)


def _by_rule(scaling: Scaling) -> str:
    if not scaling.idled_at:
        return ""
    return f"the operator took replicas away at {scaling.idled_at}, by spec.idle: no request since {scaling.active_at}"


def _idle(model: NeuronModel, world: World, observed: Observed, scaling: Scaling) -> Scaled:
    """Replicas are asked when they could have been idle for long enough, and not before: once in that time at most."""
    rule, num, live = model.spec.idle, model.spec.replicas, observed.live
    scaling = _without_rule(model, scaling)
    if rule is None or num <= rule.min_replicas:
        return Scaled(num, scaling, _by_rule(scaling))
    after = timedelta(seconds=rule.after_seconds)
    if len(live) < num or not all(pod.is_answering for pod in live):
        return Scaled(num, scaling)  # a change of the pods wakes the model
    began = (pod.readiness_changed for pod in live)
    active = max(filter(None, (instant(scaling.active_at), *began)), default=observed.now)
    active = min(active, observed.now)  # written by an operator whose clock was ahead
    scaling = change(scaling, active_at=written(active))
    if active + after > observed.now:
        return Scaled(num, scaling, due=active + after)
    needs = {pod.name: IdleOf(pod.name, pod.address and pod.address + names.METRICS_PATH) for pod in live}
    if any(need not in world.told for need in needs.values()):
        return Scaled(num, scaling, needs=frozenset(needs.values()))
    told = {name: world.told.get(need, Told()) for name, need in needs.items()}
    idle = {name: None if one.fault else idle_seconds(one.text) for name, one in told.items()}
    silent = [name for name, seconds in idle.items() if seconds is None]
    least = min((seconds for seconds in idle.values() if seconds is not None), default=0.0)
    active = observed.now if silent else observed.now - timedelta(seconds=min(least, 1e9))
    scaling = change(scaling, active_at=written(active))
    if active + after > observed.now + timedelta(seconds=1):
        who = f"pod {silent[0]} does not say since when it is idle, and counts as busy (spec.idle)" if silent else ""
        return Scaled(num, scaling, who, due=active + after)
    scaling = change(scaling, idled_at=written(observed.now))
    words = f"no request for {least:.0f} s (spec.idle.afterSeconds is {rule.after_seconds})"
    told_words = f"scaled from {num} to {counted(rule.min_replicas, 'replica')}: {words}"
    return Scaled(num, scaling, scale_to=rule.min_replicas, told=told_words)


# Back


def _waking(
    model: NeuronModel, world: World, observed: Observed, served: Revision, *, since: datetime, settings: Settings
) -> Scaled:
    """Of a model that wakes, only replicas whose devices are there already start with the first one, so that a number
    that an autoscaler computed from a queue buys one node at most. Once a replica is ready, all start."""
    num, placement = model.spec.replicas, served.placement
    if not placement.on_devices:
        return Scaled(num)
    deployed = observed.deployment.replicas if observed.deployment else 0
    if started := max(len(observed.live), len(observed.groups), deployed):
        return _only(max(1, min(num, started)), num)
    needs = frozenset[Needed]({Need.FREE_DEVICES, Need.WAKERS})
    if world.free is None:
        return Scaled(0, needs=needs)
    if world.free.nodes is None:
        return replace(_only(1, num), needs=needs)
    rules = NodeRules.of(dig(served.pinned.template, "spec"))
    room = Spare([node for node in world.free.nodes if node.schedulable])
    waiting = filter(None, map(_waiting, world.wakers or ()))
    mine = since, f"{model.namespace}/{model.name}"
    older = sorted((one for one in waiting if one.turn < mine), key=lambda one: one.turn)
    ahead = _ahead(room, older, observed.now, placement, rules)
    rooms = room.count(placement, rules)
    # No autoscaler adds a node for a claim.
    may_buy = not placement.by_claim and any(map(rules.accept_type, settings.provisionable.instance_types))
    if rooms or not ahead or may_buy:
        return replace(_only(max(1, min(num, rooms)), num), needs=needs)
    waited = (observed.now - since).total_seconds()
    due = observed.now + timedelta(seconds=min(max(waited / 10, MIN_LOOK), MAX_LOOK))
    more = f" and {len(ahead) - MAX_SHOWN} more" if len(ahead) > MAX_SHOWN else ""
    before = ", ".join(f"{one.name}, waiting since {written(one.since)}" for one in ahead[:MAX_SHOWN])
    text = f"waits for {placement.words}; before it: {before}{more}; {describe_free(world.free, placement, rules)}"
    return Scaled(0, findings=(unmet("Available", Reason.INSUFFICIENT_NEURON, text, needs),), needs=needs, due=due)


def _only(num_pods: int, num_wanted: int) -> Scaled:
    more = num_wanted - num_pods
    return Scaled(num_pods, note=f"{counted(more, 'more replica')} once the first is ready" if more > 0 else "")


@dataclass(frozen=True)
class _Ahead:
    """A model that has been waiting longer."""

    name: str
    since: datetime
    placement: Placement
    rules: NodeRules
    """Those of its manifest."""
    by_claim: bool | None = None
    """Whether its pods claim devices (DRA); None: it has no pod that tells."""

    @property
    def turn(self) -> tuple[datetime, str]:
        return self.since, self.name

    def may_use(self, node: NodeDevices) -> bool:
        """By its type, as far as the plan says, and by the rules of its manifest."""
        kind = self.placement.instance_type
        is_large = _all_of(node, self.placement) >= self.placement.size
        is_given = self.by_claim in (None, node.by_claim)
        return is_large and is_given and (not kind or node.instance_type in ("", kind)) and self.rules.accept(node)


def _ahead(room: Spare, older: Sequence[_Ahead], now: datetime, placement: Placement, rules: NodeRules) -> list[_Ahead]:
    """Those of the older ones that may take devices that a pod of this placement could use. What all of them get is
    taken from the room."""
    competing = []
    for one in older:
        could = [node for node in room.nodes if one.may_use(node)]
        if any(placement.fits_on(node, rules) and _all_of(node, placement) >= placement.size for node in could):
            competing.append(one)
        room.take(one, could, is_patient=now - one.since <= PATIENCE)
    return competing


def _all_of(node: NodeDevices, placement: Placement) -> int:
    """Its devices, or cores, free or not."""
    return node.cores if placement.cores else node.devices


_OF_DEVICES = ("", Reason.LOADING, Reason.INSUFFICIENT_NEURON)
"""Reasons of `Available` while a model waits for nothing but devices. Any other one may last for ever."""


def _waiting(waker: Waker) -> _Ahead | None:
    """None: it waits for no devices, has them already, or would not take them now."""
    body = waker.body
    since, plan = instant(scaling_of(body).waking_since), dig(body, "status", "plan")
    placement = Placement(
        devices=whole(dig(plan, "devices")),
        cores=whole(dig(plan, "cores")),
        instance_type=text(plan, "instanceType"),
        nodes=max(1, whole(dig(plan, "nodes"))),
    )
    ended = ("Failed", "Succeeded")
    live = [pod for pod in waker.pods if not dig(pod, "metadata", "deletionTimestamp")]
    has_node = any(text(pod, "spec", "nodeName") for pod in live if text(pod, "status", "phase") not in ended)
    if since is None or has_node or not placement.on_devices or not whole(dig(body, "spec", "replicas")):
        return None
    conditions = {text(one, "type"): one for one in items(body, "status", "conditions")}
    is_paused = text(body, "metadata", "annotations", names.PAUSED_ANNOTATION) == "true"
    is_refused = text(conditions.get("Accepted"), "status") == "False"
    is_off = is_paused or is_refused or bool(dig(body, "metadata", "deletionTimestamp"))
    if (is_off and not live) or text(conditions.get("Available"), "reason") not in _OF_DEVICES:
        return None
    spec = dig(body, "spec", "podTemplate", "spec")
    tolerations = [*items(spec, "tolerations"), TOLERATES_NEURON]
    return _Ahead(
        name=f"{text(body, 'metadata', 'namespace')}/{name_of(body)}",
        since=since,
        placement=placement,
        rules=replace(NodeRules.of(spec), tolerations=tuple(tolerations)),
        by_claim=bool(items(live[0], "spec", "resourceClaims")) if live else None,
    )


@dataclass
class Spare:
    """What is free on each node, less what others get first."""

    nodes: list[NodeDevices]

    def take(self, one: _Ahead, could: Sequence[NodeDevices], *, is_patient: bool) -> None:
        """Of each of its nodes the devices that it needs. If they are not free, all that is free on the fullest ones,
        for a while: more gets free there."""
        placement = one.placement
        by_room = sorted(could, key=placement.free_on)
        fitting = [node for node in by_room if _holds(node, placement)][: placement.nodes]
        if len(fitting) < placement.nodes and is_patient:
            fitting = by_room[-placement.nodes :]
        elif len(fitting) < placement.nodes:
            return
        for node in fitting:
            self.nodes[self.nodes.index(node)] = _without(node, placement)

    def count(self, placement: Placement, rules: NodeRules) -> int:
        """Replicas that fit."""
        each = [_count(node, placement) for node in self.nodes if placement.fits_on(node, rules)]
        return sum(each) if placement.nodes == 1 else sum(map(bool, each)) // placement.nodes


def _holds(node: NodeDevices, placement: Placement) -> bool:
    return node.room(in_cores=bool(placement.cores)).holds(placement.size)


def _count(node: NodeDevices, placement: Placement) -> int:
    """How often a pod fits on a node."""
    number = 0
    while _holds(node, placement):
        number, node = number + 1, _without(node, placement)
    return number


def _without(node: NodeDevices, placement: Placement) -> NodeDevices:
    """A node with a pod more, or with nothing free."""
    size, left = placement.size, max(0, placement.free_on(node) - placement.size)
    if placement.cores:
        return replace(node, free_cores=left)
    sets = node.connected and {one: max(0, min(n - size // one, left // one)) for one, n in node.connected.items()}
    return replace(node, free_devices=left, connected=sets)
