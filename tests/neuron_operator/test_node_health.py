"""Which replicas leave a failed node: each signal, its order and its limits, then random clusters."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import NOW, REFUSED, SETTINGS, SPEC, condition, ended, find, resolved_world, serving_pod
from neuron_operator import node_health
from neuron_operator.decide import decide
from neuron_operator.move_budget import MoveBudget
from neuron_operator.objects import name_of
from neuron_operator.views import observe
from neuron_operator.world import Decision, NodeFailures, Object, World

DEVICES = "aws.amazon.com/neuron"
LONG_AGO, LATER = "2026-03-01T10:00:00Z", "2026-03-01T11:59:55Z"

LOST = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting."}
NOT_READY = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "no runtime"}
DETECTED = {"type": "NeuronHealth", "status": "True", "reason": "NeuronHasError_DMA_ERROR", "message": "dma"}
MONITORED = {"type": "AcceleratedHardwareReady", "status": "False", "reason": "NeuronHBMUncorrectableError"}
WELL: list[Object] = [
    {"type": "Ready", "status": "True"},
    {"type": "NeuronHealth", "status": "False", "reason": "NeuronHasNoError"},
    {"type": "AcceleratedHardwareReady", "status": "True", "reason": "NeuronAcceleratedHardwareIsReady"},
]


def node(*conditions: Object, name: str = "n1", healthy: int = 6, since: str = LATER) -> Object:
    said = {one["type"]: one for one in (*WELL, *({**one, "lastTransitionTime": since} for one in conditions))}
    status = {"conditions": list(said.values()), "capacity": {DEVICES: "6"}, "allocatable": {DEVICES: str(healthy)}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


def world_of(*pods: tuple[str, str, dict[str, Any]], nodes: tuple[Object, ...], **spec: Any) -> World:
    """Pods by name and node."""
    world, _ = resolved_world(spec={**SPEC, "replicas": len(pods), **spec})
    made = []
    for name, on, fields in pods:
        pod = serving_pod(find(world.children, "Deployment"), name, **{"ready": True, **fields})
        pod["metadata"]["uid"] = f"uid-{name}"
        made.append({**pod, "spec": {**pod["spec"], "nodeName": on}})
    return replace(world, pods=tuple(made), nodes=nodes, moves_left=10)


def moved(decision: Decision) -> list[tuple[str, str]]:
    return [(move.how, move.live["metadata"]["name"]) for move in decision.moves]


FIRST, SOON, LATE = (f"2026-03-01T11:5{minute}:00Z" for minute in (0, 1, 3))
WHY = {"annotations": {"neuron-serving.dev/cordoned": "it refused pods"}}


def refused(name: str, created: str, on: str = "n1", **status: Any) -> tuple[str, str, dict[str, Any]]:
    return name, on, {"created": created, "ready": False, **REFUSED, **status}


@pytest.mark.parametrize(
    ("pods", "changed", "left", "is_cordoned"),
    [
        ((refused("a", FIRST), refused("b", LATE)), {}, 1, True),
        ((refused("a", FIRST), refused("b", SOON)), {}, 1, False),
        ((refused("a", FIRST, on="n2"), refused("b", LATE)), {}, 1, False),
        ((refused("a", FIRST, reason="Evicted"), refused("b", LATE)), {}, 1, False),
        ((refused("a", FIRST), refused("b", LATE)), {}, 0, False),
        ((refused("a", FIRST), refused("b", LATE)), {}, -1, False),
        ((refused("a", FIRST), refused("b", LATE)), {"spec": {"unschedulable": True}}, 1, False),
        ((refused("a", FIRST), refused("b", LATE)), {"metadata": {"name": "n1", **WHY}}, 1, False),
    ],
    ids=[
        "long",
        "a moment",
        "two nodes",
        "evicted",
        "at the limit",
        "above it",
        "cordoned already",
        "uncordoned since",
    ],
)
def test_a_node_that_alone_refused_a_models_pods_for_long_is_cordoned_once(
    pods: tuple[tuple[str, str, dict[str, Any]], ...], changed: Object, left: int, is_cordoned: bool
) -> None:
    nodes = ({**node(), **changed}, node(name="n2"))
    decision = decide(replace(world_of(*pods, nodes=nodes), cordons_left=left), SETTINGS)
    assert moved(decision) == ([("Cordon", "n1")] if is_cordoned else [])
    for move in decision.moves:
        text = f"node n1 is cordoned: it refused pods from {FIRST} to {LATE}: Pod was rejected: Allocate failed"
        assert move.announcement.message.startswith(text)


@pytest.mark.parametrize(
    ("sick", "how", "said"),
    [
        (node(LOST), "Delete", "does not respond: NodeStatusUnknown: Kubelet stopped posting."),
        (node(NOT_READY), "Delete", "is not ready: KubeletNotReady: no runtime"),
        (node(DETECTED), "Evict", "reports NeuronHealth: NeuronHasError_DMA_ERROR: dma"),
        (node(MONITORED), "Evict", "reports AcceleratedHardwareReady False: NeuronHBMUncorrectableError"),
        (node(healthy=5), "Evict", "has 5 healthy Neuron devices of 6, and the pod holds 6"),
    ],
)
def test_each_signal_moves_the_replica_of_its_node_and_names_the_node(sick: Object, how: str, said: str) -> None:
    world = world_of(("a", "n1", {}), ("b", "n2", {}), nodes=(sick, node(name="n2")))
    decision = decide(world, SETTINGS)
    assert moved(decision) == [(how, "a")]
    (move,) = decision.moves
    assert move.announcement.message == f"pod a leaves node n1, which {said}"
    assert move.announcement.message in condition(decision.status, "Available")["message"]
    leaving = replace(
        world, pods=({**world.pods[0], "metadata": {**world.pods[0]["metadata"], **DELETED}}, *world.pods[1:])
    )
    decision = decide(leaving, SETTINGS)
    ready = condition(decision.status, "Ready")
    assert ready["reason"] == move.announcement.reason
    assert f"pod a is on node n1, which {said}" in ready["message"]
    assert moved(decision) == []


DELETED = {"deletionTimestamp": "2026-03-01T12:05:00Z"}


@pytest.mark.parametrize(
    "well",
    [
        node(),
        node({"type": "NeuronHealth", "status": "Unknown"}),
        node({"type": "AcceleratedHardwareReady", "status": "Unknown"}),
        node(healthy=0),
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
    ],
    ids=["well", "npd is away", "agent is away", "plugin is away", "new"],
)
def test_a_node_without_a_signal_keeps_its_replicas(well: Object) -> None:
    assert moved(decide(world_of(("a", "n1", {}), nodes=(well,)), SETTINGS)) == []
    assert moved(decide(world_of(("a", "n1", {}), nodes=()), SETTINGS)) == []


def test_of_several_replicas_on_a_node_the_one_moves_that_says_that_its_device_failed() -> None:
    failed, loading = {"ready": False, "restarts": 1, "last": ended(32)}, {"ready": False}
    world = world_of(("a", "n1", failed), ("b", "n1", loading), ("c", "n1", {}), nodes=(node(healthy=5),))
    for pod in world.pods:
        (container,) = pod["spec"]["containers"]
        pod["spec"]["containers"] = [{**container, "resources": {"limits": {DEVICES: "1"}}}]
    assert moved(decide(world, SETTINGS)) == [("Evict", "a")]
    for health, expected in (("Healthy", []), ("Unhealthy", [("Evict", "b")])):
        told = [{"name": DEVICES, "resources": [{"resourceID": "neuron3", "health": health}]}]
        world.pods[1]["status"]["containerStatuses"][0]["allocatedResourcesStatus"] = told
        assert moved(decide(replace(world, pods=world.pods[1:]), SETTINGS)) == expected


def test_a_replica_on_a_cpu_ignores_faults_of_devices_but_not_a_lost_node() -> None:
    cpu = {"accelerator": {"type": "CPU"}}
    assert moved(decide(world_of(("a", "n1", {}), nodes=(node(DETECTED, healthy=0),), **cpu), SETTINGS)) == []
    assert moved(decide(world_of(("a", "n1", {}), nodes=(node(LOST),), **cpu), SETTINGS)) == [("Delete", "a")]


def test_replicas_that_answer_leave_one_after_another() -> None:
    pods = tuple((name, "n1", {}) for name in ("a", "b", "c"))
    world = world_of(*pods, nodes=(node(DETECTED),))
    decision = decide(world, SETTINGS)
    assert moved(decision) == [("Evict", "a")]
    text = "pod b leaves node n1, which reports NeuronHealth: NeuronHasError_DMA_ERROR: dma; it stays until the others"
    assert text in condition(decision.status, "Available")["message"]
    assert condition(decision.status, "Ready")["status"] == "True"
    assert decision.requeue_after_seconds == node_health.RECHECK.total_seconds()
    loading = world_of(("a", "n2", {"ready": False}), *pods[1:], nodes=(node(DETECTED), node(name="n2")))
    assert moved(decide(loading, SETTINGS)) == []


def test_replicas_of_a_lost_node_leave_together_within_the_budget() -> None:
    pods = tuple((name, "n1", {"ready": False}) for name in ("a", "b", "c"))
    world = replace(world_of(*pods, nodes=(node(LOST),)), moves_left=2)
    assert moved(decide(world, SETTINGS)) == [("Delete", "a"), ("Delete", "b")]
    using = replace(SETTINGS, node_failures=NodeFailures(max_moves_per_minute=2))
    answering = world_of(("a", "n1", {}), nodes=(node(DETECTED),))
    decision = decide(replace(answering, moves_left=0), using)
    assert moved(decision) == []
    text = "dma; it waits: chart value nodeFailures.maxMovesPerMinute is 2"
    assert text in condition(decision.status, "Available")["message"]


def test_a_replica_that_was_started_on_a_failed_node_stays_there_for_doubling_times() -> None:
    failed_at = NOW - timedelta(hours=2)
    moves, created, now = 0, failed_at, failed_at
    while now < NOW:
        stamp = f"{created:%Y-%m-%dT%H:%M:%SZ}"
        sick = node(DETECTED, since=f"{failed_at:%Y-%m-%dT%H:%M:%SZ}")
        world = replace(world_of(("a", "n1", {"created": stamp}), nodes=(sick,)), now=now)
        decision = decide(world, SETTINGS)
        if decision.moves:
            moves, created = moves + 1, now
        now += timedelta(seconds=decision.requeue_after_seconds or 10)
    assert 6 <= moves <= 9


def test_a_pod_on_a_lost_node_is_removed_once_its_time_to_end_is_over() -> None:
    world = world_of(("a", "n1", {"ready": False}), ("b", "n2", {}), nodes=(node(LOST), node(name="n2")))
    leaving = {**world.pods[0], "metadata": {**world.pods[0]["metadata"], **DELETED}}
    world = replace(world, pods=(leaving, world.pods[1]), moves_left=0)
    decision = decide(world, SETTINGS)
    assert moved(decision) == []
    assert decision.requeue_after_seconds is not None
    later = replace(world, now=NOW + timedelta(minutes=5))
    assert moved(decide(later, SETTINGS)) == [("Remove", "a")]
    back = replace(later, nodes=(node(), node(name="n2")))
    assert moved(decide(back, SETTINGS)) == []


def test_a_paused_model_keeps_its_replicas() -> None:
    world = world_of(("a", "n1", {}), nodes=(node(DETECTED),))
    metadata = {**world.body["metadata"], "annotations": {"neuron-serving.dev/paused": "true"}}
    assert moved(decide(replace(world, body={**world.body, "metadata": metadata}), SETTINGS)) == []


NODES = (node(), node(LOST), node(DETECTED), node(MONITORED), node(healthy=5), node(healthy=0))


@given(seed=st.integers(0, 10**9), max_moves=st.integers(1, 3))
def test_every_replica_of_a_failed_node_moves_in_the_end_within_the_budget_and_no_other_does(
    seed: int, max_moves: int
) -> None:
    """A replica that moves gets a good node; replicas on good nodes answer sooner or later."""
    rng = random.Random(seed)
    nodes = tuple({**rng.choice(NODES), "metadata": {"name": f"n{n}"}} for n in range(3))
    pods = [(f"p{n}", f"n{rng.randrange(3)}", {"ready": rng.random() < 0.6}) for n in range(rng.randint(1, 6))]
    world = world_of(*pods, nodes=(*nodes, node(name="good")))
    begin = observe(world)
    sick = {pod.name for pod in begin.live if node_health.signal_of(pod, begin)}
    clock = [0.0]
    budget = MoveBudget(max_moves, lambda: clock[0])
    times: list[float] = []
    gone: list[str] = []
    live = {pod.name: pod for pod in begin.replicas}
    for _ in range(400):
        answering = sum(pod.is_answering for pod in live.values())
        now = replace(begin, replicas=tuple(live.values()))
        plan = node_health.plan(now, len(pods), budget.left, max_moves)
        taken = [name_of(move.live) for move in plan.now if budget.take(name_of(move.live))]
        assert sum(live[name].is_answering for name in taken) <= max(0, answering - (len(pods) - 1))
        for name in taken:
            live[f"new-{name}"] = replace(live.pop(name), name=f"new-{name}", node="good", is_ready=False)
        gone += taken
        times += [clock[0]] * len(taken)
        for name, pod in live.items():
            is_well = node_health.signal_of(pod, begin) is None
            live[name] = replace(pod, is_ready=pod.is_ready or (is_well and rng.random() < 0.5))
        clock[0] += 5.0
    assert sorted(gone) == sorted(sick)
    for end in times:
        assert sum(end - 60 < time <= end for time in times) <= max_moves


def test_a_new_leader_may_move_one_replica_at_once_and_the_others_over_a_minute() -> None:
    clock = [1000.0]
    budget = MoveBudget(6, lambda: clock[0])
    assert [budget.take(name) for name in "abc"] == [True, False, False]
    clock[0] += 10
    assert budget.take("b")
    assert not budget.take("b"), "it is being moved"
    budget.give_back()
    assert budget.take("c")
    assert not budget.take("d")
    clock[0] += 120
    assert budget.left == 6
    assert MoveBudget(0, lambda: clock[0]).left == 0
