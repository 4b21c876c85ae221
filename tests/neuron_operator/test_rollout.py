"""How an edit reaches the replicas: a surge only into free devices, else one by one, and the gap is told before it
begins."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import (
    NOW,
    SETTINGS,
    SPEC,
    carried_out,
    checked,
    condition,
    ended,
    failure_record,
    find,
    finished,
    job_pod,
    resolved_world,
    serving_pod,
    stepped,
    unscheduled_pod,
)
from helpers.operator_worlds import settle as at_rest
from neuron_operator.api import names
from neuron_operator.api.reasons import Need, Trial
from neuron_operator.decide import pin
from neuron_operator.decide.course import decide
from neuron_operator.read.views import observe
from neuron_operator.read.world import Decision, FreeDevices, NodeDevices, Object, World

DEVICES = SPEC["accelerator"]["devices"]


def settle(world: World) -> tuple[World, Decision]:
    """The state after the passes and the Jobs that follow."""
    return stepped(*at_rest(world))


def serving_world(**spec: Any) -> World:
    """All replicas answer."""
    world, _ = resolved_world(spec={**SPEC, **spec})
    deployment = find(world.children, "Deployment")
    loaded = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-03-01T11:51:47Z"}
    pods = (
        serving_pod(deployment, f"chat-{n}", ready=True, conditions=[loaded])
        for n in range(deployment["spec"]["replicas"])
    )
    return settle(replace(world, pods=tuple(pods)))[0]


def edited(world: World, **spec: Any) -> World:
    metadata = {**world.body["metadata"], "generation": world.body["metadata"]["generation"] + 1}
    return replace(world, body={**world.body, "metadata": metadata, "spec": {**world.body["spec"], **spec}})


def with_free(world: World, *free_devices: int, **node: Any) -> World:
    nodes = (NodeDevices(f"n{i}", 12, free, 0, 0, **node) for i, free in enumerate(free_devices))
    return replace(world, free=FreeDevices(tuple(nodes)))


def limits(decision: Decision) -> tuple[int, int]:
    """Limits of the Deployment: how many pods more and how many fewer."""
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
    first = decide(checked(edited(world, **EDIT)), SETTINGS)
    assert Need.FREE_DEVICES in first.needs
    replaced = decide(checked(edited(world, rollout={"strategy": "Replace"}, **EDIT)), SETTINGS)
    assert Need.FREE_DEVICES not in replaced.needs


def test_without_the_right_to_count_devices_auto_replaces_one_by_one() -> None:
    _, decision = settle(edited(replace(serving_world(), free=FreeDevices(None)), **EDIT))
    assert limits(decision) == ONE_BY_ONE


def test_a_surge_stays_one_when_its_own_pod_has_taken_the_room() -> None:
    world, decision = settle(edited(with_free(serving_world(), DEVICES), **EDIT))
    new = serving_pod(find(world.children, "Deployment"), "new-1")
    _, later = settle(with_free(replace(world, pods=(*world.pods, new)), 0))
    assert limits(later) == limits(decision) == SURGE


def test_a_surge_whose_volume_another_node_holds_becomes_one_by_one() -> None:
    world, _ = settle(edited(with_free(serving_world(), DEVICES), **EDIT))
    new = serving_pod(find(world.children, "Deployment"), "new-1", state={"waiting": {"reason": "ContainerCreating"}})
    note = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) chat-1'
    event = {"reason": "FailedAttachVolume", "note": note, "regarding": {"kind": "Pod", "name": "new-1"}}
    world = with_free(replace(world, pods=(*world.pods, new)), 0)
    _, decision = settle(world)
    assert limits(decision) == SURGE
    assert Need.EVENTS in decision.needs
    assert decision.requeue_after_seconds == 30
    _, decision = settle(replace(world, events=(event,)))
    assert limits(decision) == ONE_BY_ONE


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
        lost = replace(late, now=NOW + timedelta(seconds=330))
        assert limits(decide(lost, SETTINGS)) == ONE_BY_ONE, "nobody reports the end of a pod on a lost node"
    else:
        assert limits(settle(world)[1]) == ONE_BY_ONE, "until the rollout is over"


@pytest.mark.parametrize(
    ("spec", "free", "says"),
    [
        ({"replicas": 1}, (0,), "the only replica ends first: nobody answers for at most 300 s of drain and about 47 s "
         "of loading, as the last time (no node has 6 Neuron devices to spare)"),
        ({"replicas": 1, "rollout": {"strategy": "Replace", "drainSeconds": 5}}, (12,), "at most 5 s of drain and "),
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
    world = checked(edited(with_free(world, *free), **EDIT))
    first = decide(world, SETTINGS)
    assert says in condition(first.status, "UpToDate")["message"]
    after = carried_out(world, first)
    assert find(after.children, "Deployment") == before, "the pass that tells changes no pod"
    assert find(settle(after)[0].children, "Deployment") != before


# A pod that the API server refuses

TOO_MUCH = 'create pods: pods "chat-1" is forbidden: maximum memory usage per Container is 64Mi, but limit is 1Gi'


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_replica_ends_while_the_next_pod_would_be_refused(replicas: int) -> None:
    world = serving_world(replicas=replicas, rollout={"strategy": "Replace"})
    before = find(world.children, "Deployment")
    (trial,) = decide(checked(edited(world, **EDIT)), SETTINGS).needs
    assert isinstance(trial, Trial)
    refused, decision = at_rest(replace(checked(edited(world, **EDIT)), denials={trial: TOO_MUCH}))
    assert find(refused.children, "Deployment") == before
    shown = condition(decision.status, "UpToDate")
    assert shown["reason"] == "AdmissionDenied"
    assert "64Mi, but limit is 1Gi; change podTemplate.spec.resources: a LimitRange" in shown["message"]
    assert condition(decision.status, "Available")["status"] == "True"
    assert decision.requeue_after_seconds is not None
    begun, decision = at_rest(replace(refused, denials={trial: ""}))
    assert condition(decision.status, "UpToDate")["reason"] == "RollingOut"
    tried, deployed = json.loads(trial.pod), find(begun.children, "Deployment")["spec"]["template"]
    assert tried["spec"] == deployed["spec"]
    assert tried["metadata"]["labels"] == deployed["metadata"]["labels"]
    assert not decide(begun, SETTINGS).needs, "once it has begun, nothing is tried"


@pytest.mark.parametrize(
    "message",
    [
        'pods "chat-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1',
        'pods "chat-1" is forbidden: exceeded quota: q',
        'pods is forbidden: User "operator" cannot create resource "pods" in API group "" in the namespace "ns"',
        'admission webhook "mesh.example" does not support dry run',
    ],
)
def test_what_says_nothing_about_the_next_pod_holds_no_rollout(message: str) -> None:
    world = checked(edited(serving_world(replicas=1, rollout={"strategy": "Replace"}), **EDIT))
    (trial,) = decide(world, SETTINGS).needs
    assert isinstance(trial, Trial)
    _, decision = at_rest(replace(world, denials={trial: message}))
    assert condition(decision.status, "UpToDate")["reason"] == "RollingOut"


@pytest.mark.parametrize(("replicas", "is_held"), [(1, False), (2, True)])
def test_no_replica_ends_where_a_quota_would_not_suffice_for_all_that_follow(replicas: int, is_held: bool) -> None:
    """Each holds 4 GiB of 16 GiB, others have the rest, and each of the next asks for 7 GiB: the first would fit."""
    world = checked(edited(serving_world(replicas=replicas, rollout={"strategy": "Replace"}), **EDIT))
    limits = {"resources": {"limits": {"memory": "4Gi"}}}
    pods = tuple({**p, "spec": {"containers": [{"name": "runtime", **limits}]}} for p in world.pods[:replicas])
    world = replace(world, pods=pods)
    (trial,) = decide(world, SETTINGS).needs
    assert isinstance(trial, Trial)
    amounts = "requested: limits.memory=7Gi,pods=1, used: limits.memory=12Gi,pods=3, limited: limits.memory=16Gi,pods=3"
    world, decision = at_rest(replace(world, denials={trial: f'pods "x" is forbidden: exceeded quota: q, {amounts}'}))
    shown = condition(decision.status, "UpToDate")
    assert shown["reason"] == ("QuotaExceeded" if is_held else "RollingOut")
    if is_held:
        assert shown["message"].startswith("no replica ends, because the next pod would be refused: pods")
        assert "pods=3; raise the ResourceQuota, or request less" in shown["message"]


@pytest.mark.parametrize(("limit", "is_held"), [(10, True), (11, False)])
def test_no_replica_ends_where_a_quota_is_so_far_below_todays_use_that_its_successor_would_not_fit(
    limit: int, is_held: bool
) -> None:
    """Each of three has 4 GiB, and each of the next asks for 3 GiB: together they would fit."""
    world = checked(edited(serving_world(replicas=3, rollout={"strategy": "Replace"}), **EDIT))
    memory = {"resources": {"limits": {"memory": "4Gi"}}}
    world = replace(
        world, pods=tuple({**p, "spec": {"containers": [{"name": "runtime", **memory}]}} for p in world.pods[:3])
    )
    (trial,) = decide(world, SETTINGS).needs
    amounts = f"requested: limits.memory=3Gi, used: limits.memory=12Gi, limited: limits.memory={limit}Gi"
    message = f'pods "x" is forbidden: exceeded quota: q, {amounts}'
    _, decision = at_rest(replace(world, denials={trial: message}))  # type: ignore[dict-item]
    assert condition(decision.status, "UpToDate")["reason"] == ("QuotaExceeded" if is_held else "RollingOut")


def test_a_quota_lowered_in_mid_rollout_is_named_with_its_cure() -> None:
    begun, _ = at_rest(checked(edited(serving_world(replicas=3, rollout={"strategy": "Replace"}), **EDIT)))
    text = 'pods "chat-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    failure = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": text}]}
    children = (obj | ({"status": failure} if obj["kind"] == "Deployment" else {}) for obj in begun.children)
    _, decision = at_rest(replace(begun, children=tuple(children), pods=begun.pods[:2]))
    shown = condition(decision.status, "Ready")
    assert shown["reason"] == "QuotaExceeded"
    assert "2 of 3 replicas answer" in shown["message"]
    assert "raise the ResourceQuota, or request less" in shown["message"]


def test_what_the_runtime_class_of_a_replica_adds_is_freed_with_it() -> None:
    """Its RuntimeClass adds 1 GiB to the 4 GiB that it has; the quota's controller counts both."""
    world = checked(edited(serving_world(replicas=1, rollout={"strategy": "Replace"}), **EDIT))
    memory = {"limits": {"memory": "4Gi"}, "requests": {"memory": "2Gi"}}
    spec = {"containers": [{"name": "runtime", "resources": memory}], "overhead": {"memory": "1Gi", "cpu": "100m"}}
    world = replace(world, pods=({**world.pods[0], "spec": spec},))
    (trial,) = decide(world, SETTINGS).needs
    wanted = "limits.memory=8Gi,requests.cpu=100m,requests.memory=8Gi"
    held = "limits.memory=13Gi,requests.cpu=100m,requests.memory=11Gi"
    most = "limits.memory=16Gi,requests.cpu=100m,requests.memory=16Gi"
    message = f'pods "x" is forbidden: exceeded quota: q, requested: {wanted}, used: {held}, limited: {most}'
    _, decision = at_rest(replace(world, denials={trial: message}))  # type: ignore[dict-item]
    assert condition(decision.status, "UpToDate")["reason"] == "RollingOut"


def test_a_surge_tries_no_pod() -> None:
    world = checked(edited(serving_world(rollout={"strategy": "Surge"}), **EDIT))
    assert decide(world, SETTINGS).needs == frozenset()


# A configuration that the runtime refuses

BAD = {"serving": {"chatTemplate": "{% if %}"}}


@pytest.mark.parametrize("strategy", ["Auto", "Surge", "Replace"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_no_replica_ends_before_the_runtime_has_accepted_the_configuration(strategy: str, replicas: int) -> None:
    world = serving_world(replicas=replicas, rollout={"strategy": strategy})
    before = find(world.children, "Deployment")
    world, decision = at_rest(edited(world, **BAD))
    assert find(world.children, "Deployment") == before
    assert condition(decision.status, "UpToDate")["reason"] == "Checking"
    job = find(decision.desired, "Job")
    refusal = failure_record(2, "InvalidEngineConfig", "$.text.chatTemplate: not a valid template: line 1", "serve")
    world = replace(finished(world, "Failed"), pods=(*world.pods, job_pod(job, ended(2, refusal))))
    for _ in range(3):
        world, decision = at_rest(later(world, 60))
        refused = condition(decision.status, "UpToDate")
        assert refused["reason"] == "InvalidEngineConfig"
        assert refused["message"].startswith("$.text.chatTemplate: not a valid template: line 1; the operator tries")
        assert condition(decision.status, "Available")["status"] == "True"
        assert condition(decision.status, "Stalled")["status"] == "True"
        assert find(world.children, "Deployment") == before
    corrected, decision = settle(edited(world, serving={"maxModelLength": 256}))
    assert revision_of(corrected) != revision_of(world)
    assert condition(decision.status, "UpToDate")["reason"] == "RollingOut"


def test_the_check_asks_the_new_image_about_the_whole_document_and_holds_no_device() -> None:
    engine = {"backend": "torch", "image": "registry.example/new:2"}
    _, decision = at_rest(edited(serving_world(), engine=engine, **BAD))
    job = find(decision.desired, "Job")
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry.example/new:2"
    assert container["command"][:2] == ["neuron-runtime", "serve"]
    assert container["command"][-1] == "--check"
    assert not any("neuron" in resource for part in container["resources"].values() for resource in part)
    document = json.loads(pod["metadata"]["annotations"][names.CONFIG_ANNOTATION])
    assert document["text"]["chatTemplate"] == "{% if %}"
    assert job["spec"]["activeDeadlineSeconds"] <= 1800


def test_one_check_suffices_for_a_rollout_whatever_happens_to_pods() -> None:
    world, _ = settle(edited(serving_world(), **EDIT))
    for pods in ((), world.pods, with_ready(world), world.pods):
        world, decision = at_rest(replace(world, pods=pods))
        assert not [made for made in decision.desired if made["kind"] == "Job"]


def test_nothing_is_checked_while_no_replica_answers_or_the_model_is_paused() -> None:
    world = serving_world()
    dead = tuple(serving_pod(find(world.children, "Deployment"), f"chat-{n}") for n in range(2))
    down, decision = at_rest(edited(replace(world, pods=dead), **EDIT))
    assert revision_of(down) != revision_of(world)
    paused = edited(world, **EDIT)
    metadata = {**paused.body["metadata"], "annotations": {names.PAUSED_ANNOTATION: "true"}}
    _, decision = at_rest(replace(paused, body={**paused.body, "metadata": metadata}))
    assert condition(decision.status, "UpToDate")["reason"] == "Paused"


def test_an_edit_of_the_strategy_replaces_no_pod() -> None:
    world = serving_world()
    _, decision = settle(edited(world, rollout={"strategy": "Surge"}))
    pods = find(decision.desired, "Deployment")["spec"]["template"]
    assert pods == find(world.children, "Deployment")["spec"]["template"]
    assert condition(decision.status, "Ready")["status"] == "True"


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


# A rollout that fails


def revision_of(world: World) -> str:
    template = find(world.children, "Deployment")["spec"]["template"]
    return str(template["metadata"]["labels"][names.REVISION_LABEL])


def later(world: World, seconds: float) -> World:
    return replace(world, now=world.now + timedelta(seconds=seconds))


def at(world: World) -> str:
    return world.now.strftime("%Y-%m-%dT%H:%M:%SZ")


def rolling_world(deadline: int = 100, *, exit_code: int = 1, restarts: int = 3, **spec: Any) -> World:
    """The edit took one of two pods away; its pod was scheduled just now and crashes."""
    rollout = {"strategy": "Replace", "progressDeadlineSeconds": deadline}
    world, _ = settle(edited(serving_world(rollout=rollout), **EDIT, **spec))
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(world)}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    crashed = {"terminated": {"exitCode": exit_code, "reason": "Error", "message": "chat template: unexpected end"}}
    deployment = find(world.children, "Deployment")
    new = serving_pod(deployment, "new-1", state=waiting, last=crashed, restarts=restarts, conditions=[scheduled])
    return settle(replace(world, pods=(world.pods[0], new)))[0]


@pytest.mark.parametrize(("deadline", "is_over"), [(3600, False), (3601, True)], ids=["by default", "by the manifest"])
def test_the_deadline_is_no_sooner_by_default_than_the_end_of_a_start(
    deadline: int, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "start_seconds", lambda *_: 7200)
    world = rolling_world(deadline)
    wanted = revision_of(world)
    assert (revision_of(settle(later(world, 3700))[0]) != wanted) == is_over
    assert revision_of(settle(later(world, 7200))[0]) != wanted


def test_after_the_deadline_the_last_revision_that_worked_comes_back_and_the_failed_one_stays_visible() -> None:
    working = revision_of(serving_world())
    world = rolling_world()
    failed = revision_of(world)
    assert world.body["status"]["currentRevision"] == working
    assert decide(later(world, 60), SETTINGS).requeue_after_seconds is not None
    assert revision_of(settle(later(world, 99))[0]) == failed
    world, decision = settle(later(world, 100))
    status = decision.status
    assert status is not None
    assert revision_of(world) == working
    assert (status["currentRevision"], status["updateRevision"], status["failedRevision"]) == (working, failed, failed)
    up_to_date = condition(status, "UpToDate")
    assert up_to_date["reason"] == "RolledBack"
    assert f"revision {working} serves instead of {failed}: not ready within 100 s: " in up_to_date["message"]
    assert "chat template: unexpected end" in up_to_date["message"]
    assert [(one["revision"], one["state"]) for one in status["history"]] == [
        (failed, "RolledBack"),
        (working, "Serving"),
    ]
    gone = replace(later(world, 9999), pods=with_ready(world))
    _, after = settle(gone)
    assert condition(after.status, "UpToDate")["message"] == up_to_date["message"], (
        "the pods are gone, the error is not"
    )
    assert condition(after.status, "Available")["status"] == "True"


def with_ready(world: World) -> tuple[Object, ...]:
    deployment = find(world.children, "Deployment")
    return tuple(serving_pod(deployment, f"back-{n}", ready=True) for n in range(deployment["spec"]["replicas"]))


def test_a_failure_is_in_the_status_before_a_pod_is_changed() -> None:
    """So that an operator that dies in between does not forget it."""
    world = later(rolling_world(), 100)
    decision = decide(world, SETTINGS)
    assert decision.status is not None
    assert decision.status["failedRevision"] == revision_of(world)
    assert revision_of(carried_out(world, decision)) == revision_of(world)


def test_waiting_for_a_node_does_not_count_towards_the_deadline() -> None:
    world = rolling_world()
    pod = unscheduled_pod(find(world.children, "Deployment"), "0/3 nodes are available", "new-1")
    world, decision = settle(later(replace(world, pods=(world.pods[0], pod)), 86_400))
    assert condition(decision.status, "UpToDate")["reason"] == "RollingOut"
    assert "new-1 waits for a node" in condition(decision.status, "UpToDate")["message"]
    assert revision_of(world) == world.body["status"]["updateRevision"]


def test_a_failed_revision_is_tried_again_once_the_spec_has_changed() -> None:
    world, _ = settle(later(rolling_world(), 100))
    failed, working = world.body["status"]["failedRevision"], revision_of(world)
    other, _ = settle(edited(world, serving={"maxModelLength": 256}))
    assert revision_of(other) not in (failed, working)
    assert "failedRevision" not in other.body["status"]
    undone, decision = settle(edited(replace(world, pods=with_ready(world)), serving={}))
    assert revision_of(undone) == working
    assert condition(decision.status, "Ready")["status"] == "True"
    again, _ = settle(edited(undone, **EDIT))
    assert revision_of(again) == failed


def test_a_first_revision_and_one_that_has_served_have_no_deadline() -> None:
    world = rolling_world()
    ready = replace(world, pods=with_ready(world))
    worked, _ = settle(ready)
    assert worked.body["status"]["currentRevision"] == revision_of(worked)
    broken = replace(worked, pods=tuple({**pod, "status": world.pods[1]["status"]} for pod in worked.pods))
    assert "failedRevision" not in settle(later(broken, 9999))[0].body["status"]


# Going back on request


def test_the_annotation_serves_a_kept_revision_until_it_is_removed() -> None:
    world = serving_world()
    first = revision_of(world)
    world, _ = settle(edited(world, **EDIT))
    world, _ = settle(replace(world, pods=with_ready(world)))
    second = revision_of(world)
    assert [one["state"] for one in world.body["status"]["history"]] == ["Serving", "Replaced"]
    held, decision = settle(annotated(world, first))
    assert revision_of(held) == first
    held, decision = settle(replace(held, pods=with_ready(held)))
    assert condition(decision.status, "UpToDate")["reason"] == "RolledBack"
    assert f"remove it to roll out {second}" in condition(decision.status, "UpToDate")["message"]
    assert [one["state"] for one in held.body["status"]["history"]] == ["RollingOut", "Serving"]
    assert revision_of(settle(edited(held, serving={"maxModelLength": 256}))[0]) == first
    released, decision = settle(annotated(held, ""))
    assert revision_of(released) == second
    assert condition(decision.status, "UpToDate")["reason"] == "RollingOut"


def annotated(world: World, revision: str) -> World:
    annotations = {names.ROLLBACK_ANNOTATION: revision} if revision else {}
    return replace(world, body={**world.body, "metadata": {**world.body["metadata"], "annotations": annotations}})


def test_an_unknown_revision_in_the_annotation_is_refused_and_what_serves_stays() -> None:
    world = serving_world()
    after, decision = settle(annotated(world, "abc"))
    message = condition(decision.status, "Accepted")["message"]
    refused = f"metadata.annotations[{names.ROLLBACK_ANNOTATION}]: abc is not a kept revision that has served; "
    assert message.startswith(refused)
    assert revision_of(world) in message
    assert after.children == world.children


@pytest.mark.parametrize("limit", [0, 2])
def test_as_many_revisions_are_kept_as_the_manifest_says_and_the_history_is_bounded(limit: int) -> None:
    world = serving_world(rollout={"revisionHistoryLimit": limit})
    for length in range(100, 115):
        world, _ = settle(edited(world, serving={"maxModelLength": length}))
        world, _ = settle(replace(world, pods=with_ready(world)))
    assert sum(child["kind"] == "ControllerRevision" for child in world.children) == limit + 1
    assert len(world.body["status"]["history"]) == 10


def test_a_corrected_edit_is_rolled_out_although_pods_of_the_wrong_one_refuse_their_configuration() -> None:
    world, decision = settle(rolling_world(exit_code=2, restarts=0))
    assert condition(decision.status, "Compiled")["reason"] == "InvalidEngineConfig"
    wrong = revision_of(world)
    world, decision = settle(edited(world, serving={"maxModelLength": 256}))
    assert revision_of(world) != wrong
    assert condition(decision.status, "Compiled")["status"] == "True"


@pytest.mark.parametrize(
    ("exit_code", "restarts", "fails"),
    [(2, 0, False), (2, 1, True), (12, 1, True), (1, 9, False), (30, 9, False)],
    ids=["once", "a refused configuration", "an unknown architecture", "without a reason", "devices still held"],
)
def test_a_rollout_fails_at_once_if_its_pod_ended_twice_for_a_reason_that_no_restart_changes(
    exit_code: int, restarts: int, fails: bool
) -> None:
    world = rolling_world(exit_code=exit_code, restarts=restarts)
    wanted = world.body["status"]["updateRevision"]
    assert (revision_of(world) != wanted) == fails
    assert (world.body["status"].get("failedRevision") == wanted) == fails
    if fails:
        message = condition(world.body["status"], "UpToDate")["message"]
        assert "chat template: unexpected end; it is not tried again until the spec changes" in message


# A revision of a newer operator, after a downgrade


def of_unknown_engine(world: World) -> World:
    """What runs was pinned for an engine that this version does not know."""

    def renamed(obj: Object) -> Object:
        data = msgspec.json.encode(obj.get("data")).replace(b"torch", b"newer")
        return {**obj, "data": msgspec.json.decode(data)} if "data" in obj else obj

    return replace(world, children=tuple(map(renamed, world.children)))


def test_a_revision_whose_engine_only_a_newer_operator_knows_serves_on_until_an_edit_retires_it() -> None:
    world = of_unknown_engine(serving_world())
    assert {known.pinned.config["backend"] for known in observe(world).revisions.values()} == {"newer"}
    refused = edited(world, engine={"backend": "newer"})
    crashed = serving_pod(find(world.children, "Deployment"), "chat-0", last=ended(1, "boom"), restarts=3)
    decision = decide(replace(refused, pods=(crashed, *world.pods[1:])), SETTINGS)
    assert condition(decision.status, "Accepted")["message"].startswith("spec.engine.backend: must be one of")
    shown = condition(decision.status, "Available")
    assert (shown["status"], "pod chat-0 ended with exit code 1" in shown["message"]) == ("True", True)
    assert (decision.desired, decision.delete) == ((), ())
    begun, decision = settle(edited(refused, engine={"backend": "simulated"}))
    assert condition(decision.status, "UpToDate")["reason"] == "RollingOut"
    kept = [str(obj["data"]) for obj in begun.children if obj["kind"] == "ConfigMap"]
    assert any("newer" in data for data in kept), "a pod of the earlier revision may start again until it is replaced"
