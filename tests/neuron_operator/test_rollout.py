"""How an edit reaches the replicas: a surge only into free devices, else one by one, and the gap is told before it
begins."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from helpers.operator_worlds import (
    NOW,
    SETTINGS,
    SPEC,
    carried_out,
    condition,
    find,
    resolved_world,
    serving_pod,
    settle,
    unscheduled_pod,
)
from neuron_operator.decide import decide
from neuron_operator.world import Decision, FreeDevices, Need, NodeDevices, World

DEVICES = SPEC["accelerator"]["devices"]


def serving_world(**spec: Any) -> World:
    """All replicas answer."""
    world, _ = resolved_world(spec={**SPEC, **spec})
    deployment = find(world.children, "Deployment")
    pods = (serving_pod(deployment, f"chat-{n}", ready=True) for n in range(deployment["spec"]["replicas"]))
    return settle(replace(world, pods=tuple(pods)))[0]


def edited(world: World, **spec: Any) -> World:
    metadata = {**world.body["metadata"], "generation": world.body["metadata"]["generation"] + 1}
    return replace(world, body={**world.body, "metadata": metadata, "spec": {**world.body["spec"], **spec}})


def with_free(world: World, *free_devices: int, **node: Any) -> World:
    nodes = (NodeDevices(f"n{i}", 12, free, 0, 0, **node) for i, free in enumerate(free_devices))
    return replace(world, free=FreeDevices(tuple(nodes)))


def limits(decision: Decision) -> tuple[int, int]:
    """Of the Deployment: how many pods more and how many fewer."""
    rolling = find(decision.desired, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    return rolling["maxSurge"], rolling["maxUnavailable"]


SURGE, ONE_BY_ONE = (1, 0), (0, 1)
EDIT = {"serving": {"maxModelLength": 512}}


@pytest.mark.parametrize(
    ("strategy", "free", "expected"),
    [
        ("Surge", (), SURGE),
        ("Replace", (DEVICES,), ONE_BY_ONE),
        ("Auto", (0, DEVICES), SURGE),
        ("Auto", (DEVICES - 1, DEVICES - 1), ONE_BY_ONE),
        ("Auto", (), ONE_BY_ONE),
    ],
)
def test_auto_surges_only_where_one_node_has_the_devices_free(
    strategy: str, free: tuple[int, ...], expected: tuple[int, int]
) -> None:
    world = edited(with_free(serving_world(), *free), rollout={"strategy": strategy}, **EDIT)
    _, decision = settle(world)
    assert limits(decision) == expected


@pytest.mark.parametrize("node", [{"schedulable": False}, {"labels": {"zone": "b"}}], ids=str)
def test_a_node_that_the_pod_cannot_use_is_no_room(node: dict[str, Any]) -> None:
    pods = {"podTemplate": {"spec": {"nodeSelector": {"zone": "a"}}}}
    _, decision = settle(edited(with_free(serving_world(**pods), 12, **node), **EDIT))
    assert limits(decision) == ONE_BY_ONE
    _, decision = settle(edited(with_free(serving_world(**pods), 12, labels={"zone": "a"}), **EDIT))
    assert limits(decision) == SURGE


def test_auto_counts_the_devices_before_the_rollout_begins_and_never_when_nothing_rolls() -> None:
    world = serving_world()
    assert decide(world, SETTINGS).needs == frozenset()
    first = decide(edited(world, **EDIT), SETTINGS)
    assert first.needs == {Need.FREE_DEVICES}
    replaced = decide(edited(world, rollout={"strategy": "Replace"}, **EDIT), SETTINGS)
    assert replaced.needs == frozenset()


def test_without_the_right_to_count_devices_auto_replaces_one_by_one() -> None:
    _, decision = settle(edited(replace(serving_world(), free=FreeDevices(None)), **EDIT))
    assert limits(decision) == ONE_BY_ONE


def test_a_surge_stays_one_when_its_own_pod_has_taken_the_room() -> None:
    world, decision = settle(edited(with_free(serving_world(), DEVICES), **EDIT))
    new = serving_pod(find(world.children, "Deployment"), "new-1")
    _, later = settle(with_free(replace(world, pods=(*world.pods, new)), 0))
    assert limits(later) == limits(decision) == SURGE


@pytest.mark.parametrize(("seconds", "expected"), [(29, SURGE), (30, ONE_BY_ONE)])
def test_a_surge_that_finds_no_node_for_half_a_minute_becomes_one_by_one(
    seconds: int, expected: tuple[int, int]
) -> None:
    world, _ = settle(edited(with_free(serving_world(), DEVICES), **EDIT))
    pod = unscheduled_pod(find(world.children, "Deployment"), "0/3 nodes are available", "new-1")
    pod["metadata"]["creationTimestamp"] = NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
    world = replace(world, pods=(*world.pods, pod), now=NOW + timedelta(seconds=seconds))
    decision = decide(world, SETTINGS)
    assert limits(decision) == expected
    if expected == SURGE:
        assert decision.requeue_after_seconds == 1
        draining = [
            {**world.pods[0], "metadata": {**world.pods[0]["metadata"], "deletionTimestamp": "2026-03-01T12:05:00Z"}}
        ]
        late = replace(world, pods=(*draining, *world.pods[1:]), now=NOW + timedelta(seconds=300))
        assert limits(decide(late, SETTINGS)) == SURGE, "the devices of a replica that ends are free soon"
    else:
        assert limits(settle(world)[1]) == ONE_BY_ONE, "until the rollout is over"


@pytest.mark.parametrize(
    ("spec", "free", "says"),
    [
        ({"replicas": 1}, (0,), "ends first, after at most 310 s of drain: nobody answers until the new one has loaded "
         "(no node has 6 Neuron devices to spare)"),
        ({"replicas": 1, "rollout": {"strategy": "Replace", "drainSeconds": 5}}, (12,), "after at most 15 s of drain"),
        ({"replicas": 1}, (6,), "each new replica starts before an old one ends"),
        ({"replicas": 2}, (0,), "one replica at a time is replaced"),
        ({"replicas": 1, "accelerator": {"type": "CPU"}}, (6,), "rollout.strategy Surge avoids the gap"),
    ],
)  # fmt: skip
def test_the_condition_tells_of_the_gap_before_a_pod_ends(
    spec: dict[str, Any], free: tuple[int, ...], says: str
) -> None:
    world = serving_world(**spec)
    before = find(world.children, "Deployment")
    first = decide(edited(with_free(world, *free), **EDIT), SETTINGS)
    assert says in condition(first.status, "UpToDate")["message"]
    after = carried_out(edited(with_free(world, *free), **EDIT), first)
    assert find(after.children, "Deployment") == before, "the pass that tells changes no pod"
    assert find(settle(after)[0].children, "Deployment") != before


def test_an_edit_of_the_strategy_replaces_no_pod() -> None:
    world = serving_world()
    _, decision = settle(edited(world, rollout={"strategy": "Surge"}))
    pods = find(decision.desired, "Deployment")["spec"]["template"]
    assert pods == find(world.children, "Deployment")["spec"]["template"]
    assert condition(decision.status, "Ready")["status"] == "True"


@hypothesis_settings(deadline=None)
@given(
    st.sampled_from(["Auto", "Surge", "Replace"]),
    st.integers(1, 4),
    st.lists(st.integers(0, 12), max_size=3),
    st.lists(st.sampled_from(["ready", "loading", "unscheduled"]), max_size=3),
    st.integers(0, 600),
)
def test_at_most_one_replica_is_away_and_at_most_one_is_too_many(
    strategy: str, replicas: int, free: list[int], new: list[str], seconds: int
) -> None:
    world = with_free(serving_world(replicas=replicas), *free)
    world, _ = settle(edited(world, rollout={"strategy": strategy}, **EDIT))
    deployment = find(world.children, "Deployment")
    pods = [
        unscheduled_pod(deployment, "no node", f"new-{n}")
        if state == "unscheduled"
        else serving_pod(deployment, f"new-{n}", ready=state == "ready")
        for n, state in enumerate(new)
    ]
    world = replace(world, pods=(*world.pods, *pods), now=NOW + timedelta(seconds=seconds))
    world, decision = settle(world)
    assert limits(decision) in (SURGE, ONE_BY_ONE)
    assert limits(settle(replace(world, now=world.now + timedelta(hours=1)))[1]) in (limits(decision), ONE_BY_ONE)
    if strategy != "Auto":
        assert limits(decision) == {"Surge": SURGE, "Replace": ONE_BY_ONE}[strategy]
