"""Zero replicas and back: a replica that loads is not broken off, idle ones are taken away, and of several models that
wake the oldest gets devices first."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from helpers.operator_worlds import (
    NOW,
    SETTINGS,
    SPEC,
    carried_out,
    condition,
    ended,
    find,
    resolved_world,
    serving_pod,
    settle,
    unscheduled_pod,
)
from neuron_operator.api.reasons import IdleOf, Need
from neuron_operator.decide.course import decide
from neuron_operator.decide.zero import KEPT, PATIENCE, Spare
from neuron_operator.read.objects import written
from neuron_operator.read.placement import NodeRules, Placement
from neuron_operator.read.world import (
    Decision,
    FreeDevices,
    NodeDevices,
    Object,
    Provisionable,
    Refusal,
    RefusalCause,
    Settings,
    Told,
    Waker,
    World,
)

NEEDED = SPEC["accelerator"]["devices"]
ZERO = {**SPEC, "replicas": 0}


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def later(world: World, seconds: float) -> World:
    """So long after NOW; nothing was read since."""
    return replace(world, now=at(seconds), told={}, free=None, wakers=None)


def scaled(world: World, replicas: int) -> World:
    """Somebody writes `/scale`."""
    metadata = {**world.body["metadata"], "generation": world.body["metadata"]["generation"] + 1}
    spec = {**world.body["spec"], "replicas": replicas}
    return replace(world, body={**world.body, "metadata": metadata, "spec": spec})


def deployment(world: World) -> Object:
    return find(world.children, "Deployment")


def asked_for(decision: Decision) -> int:
    return int(find(decision.desired, "Deployment")["spec"]["replicas"])


def pod(world: World, name: str = "chat-1", *, began: float = 0, ready: float | None = None, **how: Any) -> Object:
    """A replica that got its node `began` seconds after NOW, and was ready after so many."""
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": written(at(began))}]
    changed = written(at(began if ready is None else ready))
    conditions.append({"type": "Ready", "status": str(ready is not None), "lastTransitionTime": changed})
    running = {"running": {"startedAt": written(at(began))}}
    return serving_pod(
        deployment(world),
        name,
        **{"ready": ready is not None, "state": running, "conditions": conditions, "podIP": "10.0.0.7", **how},
        created=written(at(began)),
    )


def with_pods(world: World, *pods: Object) -> World:
    jobs = tuple(one for one in world.pods if one["metadata"].get("ownerReferences"))
    return replace(world, pods=(*jobs, *pods))


def serving(replicas: int = 1, **spec: Any) -> World:
    """A model whose replicas took 85 s to load."""
    world, _ = resolved_world(spec={**SPEC, "replicas": replicas, **spec})
    world = later(world, 100)
    pods = (pod(world, f"chat-{number}", ready=85) for number in range(replicas))
    return settle(with_pods(world, *pods))[0]


def asleep(**spec: Any) -> World:
    """The same after its replicas ended."""
    return settle(with_pods(settle(scaled(serving(**spec), 0))[0]))[0]


def scaling(world: World) -> dict[str, Any]:
    return dict(world.body["status"].get("scaling") or {})


def available(decision: Decision) -> str:
    return str(condition(decision.status, "Available")["message"])


# At zero


def test_a_model_at_zero_says_how_long_it_takes_to_wake() -> None:
    world, decision = settle(asleep())
    assert condition(decision.status, "Available")["reason"] == "ScaledToZero"
    assert available(decision) == "spec.replicas is 0; wakes in about 85 s, where devices are free"
    assert condition(decision.status, "Ready")["status"] == "True"
    assert (asked_for(decision), scaling(world)["loadSeconds"]) == (0, 85)
    assert decision.requeue_after_seconds is None


def test_nothing_is_said_of_a_load_that_nobody_measured_or_that_was_on_other_nodes() -> None:
    world, _ = resolved_world(spec=ZERO)
    assert available(settle(world)[1]) == "spec.replicas is 0"
    world = asleep()
    moved = {**world.body["status"]["scaling"], "loadInstanceType": "trn2.48xlarge"}
    world = replace(world, body={**world.body, "status": {**world.body["status"], "scaling": moved}})
    assert available(settle(world)[1]) == "spec.replicas is 0"


@pytest.mark.parametrize("how", [{"began": 0, "ready": 900}, {"began": 200, "ready": 250, "restarts": 1}], ids=str)
def test_a_replica_is_measured_once_and_not_after_a_restart(how: dict[str, Any]) -> None:
    """One that ceased to be ready for a while did not load again."""
    world = serving()
    assert scaling(settle(with_pods(later(world, 1000), pod(world, **how)))[0])["loadSeconds"] == 85


def test_a_replica_that_started_later_is_measured_anew() -> None:
    world = serving()
    world, _ = settle(with_pods(later(world, 1000), pod(world, began=200, ready=230)))
    assert scaling(world)["loadSeconds"] == 30


# To zero while a replica loads


def test_a_replica_that_loads_outlives_a_scale_to_zero() -> None:
    """And stays for a minute once it is ready: whoever scaled may have done so while nobody could answer."""
    world = asleep()
    woken, _ = read_and_settle(scaled(later(world, 200), 1), free(NEEDED))
    loading = with_pods(woken, pod(woken, began=200))
    world, decision = settle(scaled(settle(later(loading, 210))[0], 0))
    assert asked_for(decision) == 1
    assert condition(decision.status, "Available")["reason"] == "ScaledToZero"
    assert "pod chat-1 is still loading, and is not broken off" in available(decision)

    ready = with_pods(later(world, 300), pod(world, began=200, ready=290))
    world, decision = settle(ready)
    assert asked_for(decision) == 1
    assert f"ends at {written(at(290) + KEPT)}" in available(decision)
    assert decision.requeue_after_seconds == 50
    again, decision = settle(scaled(world, 1))
    assert asked_for(decision) == 1, "who wakes it meanwhile has it at once"
    assert condition(decision.status, "Ready")["reason"] == "Ready"
    assert "keptSince" not in scaling(again)

    _, decision = settle(later(world, 351))
    assert asked_for(decision) == 0


def test_of_several_replicas_that_load_one_stays() -> None:
    world, _ = resolved_world(spec={**SPEC, "replicas": 3})
    pods = (pod(world, f"chat-{number}", began=number) for number in range(3))
    world, decision = settle(scaled(settle(with_pods(later(world, 10), *pods))[0], 0))
    assert asked_for(decision) == 1
    assert "pod chat-0 is still loading" in available(decision)


@pytest.mark.parametrize(
    "how",
    [
        {"ready": 85},
        {"last": ended(21), "restarts": 1},
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}},
        {"phase": "Failed"},
    ],
    ids=["ready", "ended", "no image", "refused"],
)
def test_a_replica_that_does_not_load_ends_at_once(how: dict[str, Any]) -> None:
    world, _ = resolved_world(spec={**SPEC, "replicas": 1})
    world, _ = settle(with_pods(later(world, 100), pod(world, **how)))
    assert asked_for(settle(scaled(world, 0))[1]) == 0


def test_a_replica_without_a_node_ends_at_once() -> None:
    """It may wait for ever."""
    world, _ = resolved_world(spec={**SPEC, "replicas": 1})
    waiting = unscheduled_pod(deployment(world), "0/3 nodes are available: 3 Insufficient aws.amazon.com/neuron.")
    world, _ = settle(with_pods(world, waiting))
    assert asked_for(settle(scaled(world, 0))[1]) == 0


def test_loading_without_an_end_is_broken_off() -> None:
    world, _ = resolved_world(spec={**SPEC, "replicas": 1, "rollout": {"progressDeadlineSeconds": 600}})
    world, decision = settle(scaled(settle(with_pods(later(world, 100), pod(world)))[0], 0))
    assert (asked_for(decision), asked_for(settle(later(world, 599))[1])) == (1, 1)
    assert decision.requeue_after_seconds is not None
    assert asked_for(settle(later(world, 601))[1]) == 0


def test_whoever_deletes_a_loading_pod_ends_it() -> None:
    world, _ = resolved_world(spec={**SPEC, "replicas": 1})
    world, _ = settle(scaled(settle(with_pods(later(world, 100), pod(world)))[0], 0))
    replaced = with_pods(later(world, 130), pod(world, "chat-2", began=120))
    assert asked_for(settle(replaced)[1]) == 0


# Idle

RULE = {"afterSeconds": 300}


def told(world: World, *seconds: float | None) -> World:
    """What the replicas answer; None: nothing."""
    needs = decide(world, SETTINGS).needs
    asked = sorted((need for need in needs if isinstance(need, IdleOf)), key=lambda need: need.pod)
    exposition = "# TYPE x gauge\nneuron_serving_idle_seconds {}\nvllm:x 1".format
    texts = (Told(fault="refused") if one is None else Told(exposition(one)) for one in seconds)
    return replace(world, told=dict(zip(asked, texts, strict=True)))


def asks(decision: Decision) -> bool:
    return any(isinstance(need, IdleOf) for need in decision.needs)


def test_replicas_without_requests_are_taken_away() -> None:
    world = serving(2, idle=RULE)
    decision = settle(later(world, 384))[1]
    assert not asks(decision), "they are not asked before they could have been idle for so long"
    assert decision.requeue_after_seconds == 1

    world = told(later(world, 400), 310, 300)
    decision = decide(world, SETTINGS)
    assert decision.scale_to == 0
    (event,) = decision.announcements
    expected = "scaled from 2 to 0 replicas: no request for 300 s (spec.idle.afterSeconds is 300)"
    assert (event.type, event.reason, event.message) == ("Normal", "ScaledDown", expected)

    world, decision = settle(with_pods(scaled(carried_out(world, decision), 0)))
    text = "took replicas away at 2026-03-01T12:06:40Z, by spec.idle: no request since 2026-03-01T12:01:40Z"
    assert text in available(decision)
    assert decision.scale_to is None
    assert not asks(decision)


@pytest.mark.parametrize(("answers", "asked_again_after"), [((310, 20), 280), ((310, None), 300), ((None, None), 300)])
def test_replicas_stay_while_one_is_busy_or_does_not_answer(
    answers: tuple[float | None, ...], asked_again_after: float
) -> None:
    world = told(later(serving(2, idle=RULE), 400), *answers)
    decision = decide(world, SETTINGS)
    assert decision.scale_to is None
    assert decision.requeue_after_seconds == asked_again_after
    assert ("does not say since when it is idle" in available(decision)) == (None in answers)
    world = later(carried_out(world, decision), 400 + asked_again_after - 10)
    assert not asks(decide(world, SETTINGS))


def test_a_clock_that_was_ahead_keeps_no_replica_for_ever() -> None:
    world = serving(idle=RULE)
    status = {**world.body["status"], "scaling": {**scaling(world), "activeAt": "2036-03-01T12:00:00Z"}}
    world, _ = settle(later(replace(world, body={**world.body, "status": status}), 400))
    assert asks(decide(later(world, 700), SETTINGS))


def test_as_many_replicas_stay_as_the_rule_says() -> None:
    world = told(later(serving(3, idle={**RULE, "minReplicas": 2}), 400), 310, 310, 310)
    decision = decide(world, SETTINGS)
    assert decision.scale_to == 2
    world = scaled(carried_out(world, decision), 2)
    world, decision = settle(with_pods(world, *(pod(world, f"chat-{number}", ready=85) for number in range(2))))
    assert "took replicas away" in available(decision)
    assert decision.scale_to is None
    assert not asks(decide(later(world, 4000), SETTINGS))


def test_replicas_that_load_are_not_idle() -> None:
    world = serving(2, idle=RULE)
    world = with_pods(later(world, 400), pod(world, ready=85), pod(world, "chat-2", began=390))
    assert not asks(settle(world)[1])


def test_nobody_is_asked_without_a_rule_or_while_paused() -> None:
    assert not asks(settle(later(serving(), 4000))[1])
    world = later(serving(idle=RULE), 4000)
    metadata = {**world.body["metadata"], "annotations": {"neuron-serving.dev/paused": "true"}}
    decision = decide(replace(world, body={**world.body, "metadata": metadata}), SETTINGS)
    assert not asks(decision)
    assert decision.scale_to is None


@pytest.mark.parametrize("text", ["", "neuron_serving_idle_seconds NaN", "neuron_serving_idle_seconds{", "a b"])
def test_what_is_no_answer_counts_as_busy(text: str) -> None:
    world = later(serving(idle=RULE), 400)
    (need,) = (need for need in decide(world, SETTINGS).needs if isinstance(need, IdleOf))
    decision = decide(replace(world, told={need: Told(text)}), SETTINGS)
    assert decision.scale_to is None
    assert "does not say since when it is idle" in available(decision)


def test_a_refused_scale_is_reported() -> None:
    world = told(later(serving(idle=RULE), 400), 310)
    refusal = Refusal(RefusalCause.FORBIDDEN, "NeuronModel", "chat", "cannot patch neuronmodels/scale")
    decision = decide(replace(world, refusals=(refusal,)), SETTINGS)
    assert decision.scale_to is None
    assert condition(decision.status, "Accepted")["reason"] == "OperatorForbidden"


def test_an_engine_that_does_not_tell_cannot_have_the_rule() -> None:
    body = resolved_world(spec=SPEC)[0].body
    spec = {**SPEC, "engine": {"backend": "vllm"}, "idle": RULE}
    decision = decide(World({**body, "spec": spec}, (), (), NOW), SETTINGS)
    assert "spec.idle" in condition(decision.status, "Accepted")["message"]
    assert condition(decision.status, "Accepted")["reason"] == "FieldNotSupported"


# Back


def free(*devices: int, instance_type: str = "") -> FreeDevices:
    """Nodes with 12 devices, of which so many are free."""
    labels = {"node.kubernetes.io/instance-type": instance_type} if instance_type else {}
    nodes = (NodeDevices(f"n{index}", 12, count, 24, 2 * count, labels) for index, count in enumerate(devices))
    return FreeDevices(tuple(nodes))


def waker(name: str, since: float, devices: int = NEEDED, node: str = "", instance_type: str = "") -> Waker:
    plan = {"devices": devices, "nodes": 1, "instanceType": instance_type}
    body = {
        "metadata": {"namespace": "team-a", "name": name},
        "spec": {"replicas": 1},
        "status": {"plan": plan, "scaling": {"wakingSince": written(at(since))}},
    }
    return Waker(body, ({"spec": {"nodeName": node}},) if node else ({"spec": {}},))


def read_and_settle(
    world: World, found: FreeDevices, *wakers: Waker, using: Settings = SETTINGS
) -> tuple[World, Decision]:
    """What the rim does with the needs of a model that wakes."""
    assert {Need.FREE_DEVICES, Need.WAKERS} <= decide(world, using).needs
    return settle(replace(world, free=found, wakers=wakers), using)


def woken(replicas: int = 1, **spec: Any) -> World:
    return scaled(later(asleep(**spec), 1000), replicas)


def test_a_model_that_wakes_starts_where_devices_are_free() -> None:
    world, decision = read_and_settle(woken(), free(NEEDED))
    assert asked_for(decision) == 1
    assert scaling(world)["wakingSince"] == written(at(1000))
    ready = settle(with_pods(later(world, 1100), pod(world, began=1001, ready=1090)))[0]
    assert "wakingSince" not in scaling(ready)
    assert scaling(ready)["loadSeconds"] == 89


def test_nothing_starts_before_free_devices_are_counted() -> None:
    assert asked_for(decide(woken(), SETTINGS)) == 0


@pytest.mark.parametrize(("devices", "started"), [((0,), 1), ((6,), 1), ((12, 6), 3), ((12, 12, 12), 5)])
def test_only_the_first_replica_may_buy_a_node(devices: tuple[int, ...], started: int) -> None:
    """An autoscaler may ask for many replicas at once, because requests wait."""
    world, decision = read_and_settle(woken(5), free(*devices))
    assert asked_for(decision) == started
    assert ("once the first is ready" in available(decision)) == (started < 5)
    loading = with_pods(world, *(pod(world, f"chat-{n}", began=1001) for n in range(started)))
    loading, decision = settle(later(loading, 1010))
    assert asked_for(decision) == started, "others are not started because some of their devices got free"
    ready = with_pods(loading, *(pod(world, f"chat-{n}", began=1001, ready=1090) for n in range(started)))
    assert asked_for(settle(later(ready, 1100))[1]) == 5


def test_a_model_that_starts_for_the_first_time_starts_all_replicas() -> None:
    world, decision = resolved_world(spec={**SPEC, "replicas": 4})
    assert asked_for(decision) == 4
    assert "wakingSince" not in scaling(world)


def test_who_has_waited_longer_gets_the_devices_first() -> None:
    world, decision = read_and_settle(woken(), free(NEEDED), waker("first", 900), waker("second", 950, node="n7"))
    assert asked_for(decision) == 0
    found = condition(decision.status, "Available")
    assert found["reason"] == "InsufficientNeuron"
    expected = f"waits for 6 Neuron devices; before it: team-a/first, waiting since {written(at(900))}; free: 6 (n0 6)"
    assert expected in found["message"]
    assert decision.requeue_after_seconds == 5

    world, decision = read_and_settle(later(world, 1010), free(0), waker("first", 900, node="n0"))
    assert asked_for(decision) == 1, "the first has its devices: now it is this one's turn, though nothing is free"


@pytest.mark.parametrize(
    ("found", "others"),
    [
        (free(NEEDED), (waker("younger", 1001),)),
        (free(12), (waker("first", 900),)),
        (free(NEEDED, NEEDED), (waker("first", 900),)),
        (free(NEEDED, instance_type="inf2.48xlarge"), (waker("elsewhere", 900, instance_type="trn2.48xlarge"),)),
        (free(NEEDED), (waker("huge", 900, devices=16),)),
        (FreeDevices(None), (waker("first", 900),)),
    ],
    ids=["is older", "both fit", "both fit on nodes", "other nodes", "fits nowhere", "may not count"],
)
def test_nobody_waits_for_a_model_that_takes_nothing_from_it(found: FreeDevices, others: tuple[Waker, ...]) -> None:
    assert asked_for(read_and_settle(woken(), found, *others)[1]) == 1


def changed(other: Waker, *path: str, to: Any) -> Waker:
    """A model that wakes, with something else at a place of its object, and without pods."""
    body = deepcopy(other.body)
    *outer, last = path
    part = body
    for key in outer:
        part = part.setdefault(key, {})
    part[last] = to
    return Waker(body)


@pytest.mark.parametrize(
    "other",
    [
        changed(waker("paused", 900), "metadata", "annotations", to={"neuron-serving.dev/paused": "true"}),
        changed(waker("deleted", 900), "metadata", "deletionTimestamp", to=written(at(950))),
        changed(waker("refused", 900), "status", "conditions", to=[{"type": "Accepted", "status": "False"}]),
        changed(
            waker("over quota", 900),
            "status",
            "conditions",
            to=[{"type": "Available", "status": "False", "reason": "QuotaExceeded"}],
        ),
        changed(waker("elsewhere", 900), "spec", "podTemplate", to={"spec": {"nodeSelector": {"team": "a"}}}),
    ],
    ids=lambda other: other.body["metadata"]["name"],
)
def test_nobody_waits_for_a_model_that_would_not_take_free_devices(other: Waker) -> None:
    """It may be so for ever."""
    assert asked_for(read_and_settle(woken(), free(NEEDED), other)[1]) == 1


def test_a_model_whose_pods_claim_devices_takes_none_of_the_plugin() -> None:
    claiming = {"spec": {"resourceClaims": [{"name": "neuron", "resourceClaimTemplateName": "first-devices"}]}}
    first = Waker(waker("first", 900).body, (claiming,))
    assert asked_for(read_and_settle(woken(), free(NEEDED), first)[1]) == 1


def test_devices_that_pods_claim_have_to_be_connected() -> None:
    """Twelve are free: two sets of four that are connected, or one of eight."""
    node = NodeDevices("n1", 16, 12, 0, 0, connected={1: 12, 4: 2, 8: 1, 16: 0})
    counts = [Spare([node]).count(Placement(devices=size, by_claim=True), NodeRules({})) for size in (1, 4, 8, 16)]
    assert counts == [12, 2, 1, 0]
    assert Spare([node]).count(Placement(devices=1), NodeRules({})) == 0, "the node has no device plugin"


def test_of_two_that_woke_at_the_same_time_one_waits() -> None:
    same = waker("aaa", 1000)
    assert asked_for(read_and_settle(woken(), free(NEEDED), same)[1]) == 0
    named_later = Waker({**same.body, "metadata": {"namespace": "zzz", "name": "z"}}, same.pods)
    assert asked_for(read_and_settle(woken(), free(NEEDED), named_later)[1]) == 1


def test_devices_are_kept_for_a_larger_model_for_a_while() -> None:
    """Without that a large model would never get its devices; for ever, and the small ones would wait for what may
    never come."""
    since = 1000 - PATIENCE.total_seconds()
    assert asked_for(read_and_settle(woken(), free(NEEDED), waker("large", since, devices=12))[1]) == 0
    assert asked_for(read_and_settle(woken(), free(NEEDED), waker("large", since - 1, devices=12))[1]) == 1


def test_nobody_waits_where_the_cluster_gets_nodes() -> None:
    for instance_type, started in {"inf2.24xlarge": 1, "inf2.48xlarge": 0}.items():  # the other grants no six devices
        using = replace(SETTINGS, provisionable=Provisionable(instance_types=(instance_type,)))
        assert asked_for(read_and_settle(woken(), free(0), waker("first", 900), using=using)[1]) == started


def test_a_model_that_is_scaled_to_zero_again_waits_no_longer() -> None:
    world, _ = read_and_settle(woken(), free(0), waker("first", 900))
    world, decision = settle(scaled(later(world, 1050), 0))
    assert "wakingSince" not in scaling(world)
    assert condition(decision.status, "Available")["reason"] == "ScaledToZero"


def test_devices_that_are_still_held_have_the_reason_of_devices() -> None:
    """The pod before ended, its devices are not free yet."""
    world, _ = read_and_settle(woken(), free(0))
    waiting = unscheduled_pod(deployment(world), "0/1 nodes are available: 1 Insufficient aws.amazon.com/neuron.")
    _, decision = settle(with_pods(replace(later(world, 1010), free=free(0)), waiting))
    assert condition(decision.status, "Available")["reason"] == "InsufficientNeuron"
    assert "free: 0" in available(decision)


def test_a_damaged_status_is_no_scaling() -> None:
    world = serving()
    broken = {**world.body["status"], "scaling": {"loadSeconds": "many"}}
    decision = settle(replace(world, body={**world.body, "status": broken}))[1]
    assert decision.status is not None
    assert decision.status["scaling"]["loadSeconds"] == 85
