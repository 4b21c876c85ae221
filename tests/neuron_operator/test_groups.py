"""Replicas on several nodes, as pure decisions: a group starts, ends and is replaced as one; room is counted before;
failures are budgeted; nothing is forgotten if the operator dies between two passes."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import yaml

from helpers.manifests import CASES
from helpers.operator_worlds import (
    SETTINGS,
    carried_out,
    checked,
    condition,
    ended,
    resolved_world,
    settle,
    stored,
)
from helpers.rendered_cases import Plain
from neuron_operator.api import names
from neuron_operator.api.engines import own
from neuron_operator.api.reasons import Need
from neuron_operator.decide.course import decide
from neuron_operator.read.objects import name_of
from neuron_operator.read.world import Decision, FreeDevices, GroupSettings, NodeDevices, Object, World

CPU: dict[str, Any] = {
    "model": {"uri": "hf://acme/tiny"},
    "accelerator": {"type": "CPU"},
    "parallelism": {"nodes": 2},
    "replicas": 1,
}
DEVICES: dict[str, Any] = {**CPU, "accelerator": {"devices": 6}, "engine": {"backend": "torch"}}
VLLM: dict[str, Any] = {
    **CPU,
    "model": {"uri": "pvc://models/tiny"},
    "engine": {"backend": "vllm", "image": "vllm-cpu"},
}
USING = replace(SETTINGS, groups=GroupSettings(restart_seconds=60, max_restarts=2, place_seconds=100))


def node(name: str, zone: str = "a", free: int = 6, kind: str = "inf2.24xlarge", **more: Any) -> NodeDevices:
    labels = {names.INSTANCE_TYPE_LABEL: kind, names.ZONE_LABEL: zone}
    return NodeDevices(name, devices=6, free_devices=free, cores=0, free_cores=0, labels=labels, **more)


def sets(objects: Any) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == "StatefulSet"}


def leaders(world: World) -> list[Object]:
    found = sets(world.children).values()
    return [one for one in found if one["spec"]["template"]["metadata"]["labels"][names.ROLE_LABEL] == "leader"]


def passed(world: World, using: Any = USING) -> tuple[World, Decision]:
    """One pass, as an API server and the StatefulSet controller carry it out: UIDs, garbage, pods."""
    decision = decide(world, using)
    world = carried_out(world, decision)
    children = tuple(
        one
        if one["kind"] != "StatefulSet" or "creationTimestamp" in one["metadata"]
        else {**one, "metadata": {**one["metadata"], "creationTimestamp": world.now.isoformat()}}
        for one in world.children
    )
    owners = {one["metadata"].get("uid") for one in children}
    children = tuple(
        one
        for one in children
        if all(o["kind"] != "StatefulSet" or o["uid"] in owners for o in one["metadata"].get("ownerReferences", ()))
    )
    alive = {one["metadata"]["labels"][names.GROUP_LABEL] for one in sets(children).values()}
    pods = [pod for pod in world.pods if pod["metadata"]["labels"].get(names.GROUP_LABEL, "") in {*alive, ""}]
    have = {pod["metadata"]["name"] for pod in pods}
    for made in sets(children).values():
        first = made["spec"].get("ordinals", {}).get("start", 0)
        for number in range(first, first + made["spec"]["replicas"]):
            name = f"{made['metadata']['name']}-{number}"
            if name not in have:
                pods.append(new_pod(made, name, world))
    return replace(world, children=children, pods=tuple(pods)), decision


def new_pod(made: Object, name: str, world: World) -> Object:
    template = copy.deepcopy(made["spec"]["template"])
    about = {"name": name, "namespace": "team", "uid": f"uid of {name}", "creationTimestamp": world.now.isoformat()}
    metadata = {**template["metadata"], **about}
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    status = {"phase": "Pending", "conditions": [unscheduled]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status}


def running(pod: Object, node: str = "n1", **container: Any) -> Object:
    """As its kubelet reports it: a follower is ready as soon as it runs."""
    is_ready = str(container.get("ready", True))
    told = {"PodScheduled": "True", "ContainersReady": is_ready, "Ready": is_ready}
    conditions = [{"type": kind, "status": known} for kind, known in told.items()]
    state = {
        "name": "runtime",
        "ready": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": "2026-03-01T11:51:00Z"}},
        **container,
    }
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [state]}
    return {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": status}


def with_running(world: World, **changed: dict[str, Any]) -> World:
    """All pods run and are ready; `changed`: container fields of some, by the end of their names."""
    pods = []
    for number, pod in enumerate(world.pods):
        if names.GROUP_LABEL in pod["metadata"]["labels"]:
            name = pod["metadata"]["name"]
            fields = next((more for end, more in changed.items() if name.endswith(end.replace("_", "-"))), {})
            pods.append(running(pod, f"n{number}", **fields))
        else:
            pods.append(pod)
    return replace(world, pods=tuple(pods))


def later(world: World, seconds: float) -> World:
    return replace(world, now=world.now + timedelta(seconds=seconds))


def rested(world: World, using: Any = USING, most: int = 10) -> tuple[World, Decision]:
    """Passes until nothing changes."""
    for _ in range(most):
        after, decision = passed(world, using)
        if after == world:
            return world, decision
        world = after
    raise AssertionError("not at rest")


def ungrouped(world: World) -> tuple[Object, ...]:
    """Without the groups that `resolved_world` made: without UIDs and pods."""
    return tuple(one for one in world.children if names.GROUP_LABEL not in one["metadata"]["labels"])


def begun(spec: dict[str, Any] = CPU, using: Any = USING, **more: Any) -> tuple[World, Decision]:
    """A resolved model with as many groups as may be started at first."""
    world, _ = resolved_world(replace(using), spec=spec)
    world = replace(world, children=ungrouped(world), **more)
    return rested(replace(world, body={**world.body, "status": {**world.body["status"], "groups": []}}), using)


def serving(spec: dict[str, Any] = CPU, using: Any = USING, **more: Any) -> World:
    world, _ = begun(spec, using, **more)
    for _ in range(spec["replicas"] + 1):
        world, _ = rested(with_running(world), using)
    return world


def status(decision: Decision) -> Object:
    assert decision.status is not None
    return decision.status


def group(decision: Decision, number: int = 0) -> Object:
    found: Object = status(decision)["groups"][number]
    return found


CRASHED = {
    "restartCount": 1,
    "lastState": ended(33, json.dumps({"version": 1, "command": "follow", "ok": False, "message": "the step failed"})),
}
FOLLOWED = {"restartCount": 1, "ready": False, "lastState": ended(40, "")}


def test_a_group_is_a_leader_and_its_followers_and_all_that_they_share() -> None:
    world, _ = begun()
    made = [one for one in world.children if "uid-chat-0" in json.dumps(one["metadata"]["ownerReferences"])]
    assert sorted(one["kind"] for one in made) == ["NetworkPolicy", "Secret", "Service", "StatefulSet"]
    leader, follower = sets(world.children).values()
    name = leader["metadata"]["name"]
    assert follower["metadata"]["name"] == f"{name}-f"
    assert (leader["spec"]["replicas"], follower["spec"]["replicas"]) == (1, 1)
    for found in (leader, follower):
        assert found["spec"]["podManagementPolicy"] == "Parallel"
        assert found["spec"]["updateStrategy"] == {"type": "OnDelete"}
        assert found["spec"]["serviceName"] == name
        variables = {one["name"]: one for one in found["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert variables["NEURON_SERVING_LEADER"]["value"] == f"{name}-0.{name}.team.svc"
        assert variables["NEURON_SERVING_GROUP_SIZE"]["value"] == "2"
    assert follower["spec"]["ordinals"] == {"start": 1}
    container = follower["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:2] == ["neuron-runtime", "follow"]
    assert not container.keys() & {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    service = next(one for one in world.children if one["kind"] == "Service" and one["metadata"]["name"] == "chat")
    chosen = service["spec"]["selector"].items()
    assert chosen <= leader["spec"]["template"]["metadata"]["labels"].items()
    assert not chosen <= follower["spec"]["template"]["metadata"]["labels"].items()


def test_the_secret_of_a_group_has_no_content_in_the_decision() -> None:
    world, _ = begun()
    secret = next(one for one in world.children if one["kind"] == "Secret")
    assert not secret.keys() & {"data", "stringData"}


def test_a_follower_gets_the_flags_of_the_leader_but_those_about_clients() -> None:
    serve = ["neuron-runtime", "serve", "--config", "serve", "--host", "0.0.0.0", "--port", "8000"]
    follower = own.follow([*serve, "--weights-dir", "/w", "--api-key-file", "/k"])
    assert follower.command == ("neuron-runtime", "follow", "--config", "serve", "--weights-dir", "/w")


def test_a_group_serves_when_its_leader_answers() -> None:
    world, decision = rested(serving())
    assert condition(decision.status, "Ready")["status"] == "True"
    assert (group(decision)["state"], group(decision)["readyMembers"], group(decision)["members"]) == ("Serving", 2, 2)
    assert status(decision)["ready"] == "1/1"
    assert decide(world, USING).delete == ()


@pytest.mark.parametrize("model", ["a" * 63, "a-" * 31 + "z"])
def test_names_of_a_group_leave_room_for_what_controllers_append(model: str) -> None:
    leader = names.group_name(model, 999, "0123456789", 99_999)
    assert len(names.followers_name(leader)) <= 52
    assert leader != names.group_name(model[:-1] + "y", 999, "0123456789", 99_999)


def test_an_end_is_recorded_before_anything_is_deleted_and_names_the_member_that_failed() -> None:
    world = with_running(serving(), _f_1=CRASHED, _0=FOLLOWED)
    after, decision = passed(world)
    assert decision.delete == ()
    assert (group(decision)["state"], group(decision)["restarts"]) == ("Failed", 1)
    assert group(decision)["message"].startswith("on node n")
    assert "-f-1 ended" in group(decision)["message"]
    assert "exit code 33" in group(decision)["message"]
    again = decide(after, USING)
    assert [one["kind"] for one in again.delete] == ["StatefulSet"]
    assert again.delete[0]["spec"]["template"]["metadata"]["labels"][names.ROLE_LABEL] == "leader"


@pytest.mark.parametrize("spec", [CPU, VLLM], ids=["torch", "vllm"])
def test_a_killed_member_is_reported_without_suspecting_the_variables_of_its_group(spec: dict[str, Any]) -> None:
    world = with_running(serving(spec), _f_1={"restartCount": 1, "lastState": ended(137, "")})
    _, decision = passed(world)
    assert "exit code 137" in group(decision)["message"]
    assert "variables" not in group(decision)["message"]


def test_the_next_attempt_waits_for_the_devices_and_then_has_another_name() -> None:
    world = with_running(serving(), _f_1=CRASHED, _0=FOLLOWED)
    before = sets(world.children).keys()
    world, decision = rested(world)
    assert sets(world.children) == {}
    assert condition(decision.status, "Available")["reason"] == "DeviceFailed"
    assert "the next attempt starts at" in condition(decision.status, "Available")["message"]
    assert decision.requeue_after_seconds == pytest.approx(60, abs=1)
    world, decision = rested(later(world, 61))
    assert len(sets(world.children)) == 2
    assert not before & sets(world.children).keys()
    assert (group(decision)["attempt"], group(decision)["restarts"]) == (2, 1)


def failed_again(world: World) -> tuple[World, Decision]:
    return rested(with_running(world, _f_1=CRASHED, _0=FOLLOWED))


def test_a_group_that_fails_again_and_again_is_given_up_until_an_edit() -> None:
    world, _ = failed_again(serving())
    for delay in (60, 120):
        world, _ = rested(later(world, delay + 1))
        assert len(sets(world.children)) == 2
        world, decision = failed_again(world)
    assert condition(decision.status, "Available")["reason"] == "RestartBudgetExhausted"
    assert "exit code 33" in condition(decision.status, "Available")["message"]
    world, _ = rested(later(world, 86_400))
    assert sets(world.children) == {}
    spec = {**world.body["spec"], "serving": {"maxModelLength": 512}}
    world, _ = rested(checked(replace(world, body={**world.body, "spec": spec}), USING))
    assert len(sets(world.children)) == 2


def test_a_group_that_served_for_long_has_its_whole_budget_again() -> None:
    world, _ = failed_again(serving())
    world, _ = rested(later(world, 61))
    world, decision = rested(with_running(world))
    assert group(decision)["restarts"] == 1
    _, decision = failed_again(later(world, 601))
    assert group(decision)["restarts"] == 1


def test_the_end_of_one_group_does_not_touch_another() -> None:
    world = serving({**CPU, "replicas": 2})
    first = group(rested(world)[1])["name"]
    crashed = {f"{first}-0": FOLLOWED, f"{first}-f-1": CRASHED}
    pods = [
        running(pod, **crashed[pod["metadata"]["name"]]) if pod["metadata"]["name"] in crashed else pod
        for pod in world.pods
    ]
    world = replace(world, pods=tuple(pods))
    world, decision = rested(world)
    assert [one["state"] for one in status(decision)["groups"]] == ["Failed", "Serving"]
    assert len(leaders(world)) == 1
    assert status(decision)["ready"] == "1/2"


def test_a_member_that_is_evicted_takes_the_group_with_it_and_costs_no_restart() -> None:
    world = serving()
    pods = [
        {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-03-01T12:05:00Z"}}
        if pod["metadata"]["name"].endswith("-f-1")
        else pod
        for pod in world.pods
    ]
    world, decision = passed(replace(world, pods=tuple(pods)))
    assert (group(decision)["state"], group(decision)["restarts"]) == ("Left", 0)
    world, decision = passed(world)
    world, decision = rested(world)
    assert (group(decision)["attempt"], group(decision)["restarts"]) == (2, 0)


def test_the_budget_for_evictions_counts_all_members_of_all_groups() -> None:
    world = serving({**CPU, "replicas": 2})
    budget = next(one for one in world.children if one["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == 3
    assert "maxUnavailable" not in budget["spec"]


def test_no_group_is_made_without_room_for_all_of_it() -> None:
    some = (node("n1", "a"), node("n2", "b"), node("n3", "a", free=2), node("n4", "a", schedulable=False))
    world, decision = begun(DEVICES, free=FreeDevices(some))
    assert sets(world.children) == {}
    found = condition(decision.status, "Available")
    assert found["reason"] == "InsufficientNeuron"
    assert "needs 6 Neuron devices on each of 2 nodes" in found["message"]
    assert "1 of these nodes are free" in found["message"]
    world, _ = rested(replace(world, free=FreeDevices((*some, node("n5", "b")))))
    leader = leaders(world)[0]["spec"]["template"]["spec"]
    assert leader["nodeSelector"] == {names.ZONE_LABEL: "b", names.INSTANCE_TYPE_LABEL: "inf2.24xlarge"}
    assert leader["affinity"]["podAntiAffinity"][names.REQUIRED_AFFINITY][0]["topologyKey"] == names.HOSTNAME_LABEL


def test_nodes_are_counted_only_where_devices_are_wanted() -> None:
    world, _ = resolved_world(USING, spec=DEVICES)
    world = replace(world, children=ungrouped(world))
    assert Need.FREE_DEVICES in decide(world, USING).needs
    world, decision = rested(serving())
    assert decision.needs == frozenset()


def test_without_the_right_to_count_the_scheduler_keeps_the_members_together() -> None:
    world, _ = begun(DEVICES, free=FreeDevices(None))
    affinity = leaders(world)[0]["spec"]["template"]["spec"]["affinity"]
    keys = [term["topologyKey"] for term in affinity["podAffinity"][names.REQUIRED_AFFINITY]]
    assert keys == [names.INSTANCE_TYPE_LABEL, names.ZONE_LABEL]


def test_one_group_is_placed_at_a_time() -> None:
    world, _ = begun({**CPU, "replicas": 3})
    assert len(leaders(world)) == 1
    world, _ = rested(with_running(world))
    assert len(leaders(world)) == 2


def test_a_group_waits_for_a_count_that_knows_of_the_group_before() -> None:
    nodes = tuple(node(f"n{number}") for number in range(4))
    world, _ = begun({**DEVICES, "replicas": 2}, free=FreeDevices(nodes, frozenset()))
    world, decision = rested(with_running(world))
    assert len(leaders(world)) == 1
    assert "one group is placed at a time" in condition(decision.status, "Ready")["message"]
    assert decision.requeue_after_seconds == 5
    counted = frozenset(pod["metadata"].get("uid", "") for pod in world.pods)
    full, decision = rested(replace(world, free=FreeDevices(nodes[:1], counted)))
    assert len(leaders(full)) == 1
    assert condition(decision.status, "Ready")["reason"] == "InsufficientNeuron"
    world, _ = rested(replace(world, free=FreeDevices(nodes, counted)))
    assert len(leaders(world)) == 2


def test_a_group_with_only_some_of_its_nodes_gives_them_back_and_tries_later() -> None:
    world, _ = begun()
    half = [running(pod, ready=False) if pod["metadata"]["name"].endswith("-0") else pod for pod in world.pods]
    world, decision = rested(later(replace(world, pods=tuple(half)), 99))
    assert group(decision)["state"] == "Starting"
    world, decision = rested(later(world, 60))
    assert group(decision)["state"] == "Released"
    assert "1 of 2 members found a node" in group(decision)["message"]
    assert sets(world.children) == {}
    assert group(decision)["restarts"] == 0
    world, decision = rested(later(world, 30))
    assert (len(leaders(world)), group(decision)["attempt"]) == (1, 2)


QUOTA = 'create Pod x in StatefulSet x failed error: pods "x" is forbidden: exceeded quota: few'


def refused(note: str = QUOTA) -> World:
    """The API server refuses the follower of a group whose leader has a node."""
    world, _ = begun()
    pods = tuple(running(pod, ready=False) for pod in world.pods if pod["metadata"]["name"].endswith("-0"))
    (follower,) = (name for name in sets(world.children) if name not in {name_of(one) for one in leaders(world)})
    event = {"regarding": {"kind": "StatefulSet", "name": follower}, "reason": "FailedCreate", "note": note}
    return replace(world, pods=pods, events=(event,))


def test_members_that_the_api_server_refuses_are_explained_by_events() -> None:
    world = later(refused(), 5)
    found = condition(decide(world, USING).status, "Available")
    assert found["reason"] == "QuotaExceeded"
    assert (
        f"1 of 2 members of group {name_of(leaders(world)[0])} have no pod: FailedCreate: create Pod x"
        in found["message"]
    )
    assert "raise the ResourceQuota" in found["message"]
    unread = replace(world, events=())
    assert Need.EVENTS in decide(unread, USING).needs
    assert condition(decide(unread, USING).status, "Available")["reason"] == "Loading"


def test_a_group_whose_member_is_refused_is_made_again() -> None:
    """Its StatefulSet would pause for ever longer, and the operator has no right to change it."""
    world = later(refused(), 99)
    assert group(decide(world, USING))["state"] == "Starting"
    world = later(world, 60)
    decision = decide(world, USING)
    assert (group(decision)["state"], group(decision)["reason"]) == ("Released", "QuotaExceeded")
    world, _ = rested(carried_out(world, decision))
    world, decision = rested(later(replace(world, events=()), 30))
    assert (len(leaders(world)), group(decision)["attempt"], group(decision)["restarts"]) == (1, 2, 0)


def test_a_group_whose_member_has_no_pod_yet_stays() -> None:
    world = later(replace(refused(), events=()), 600)
    assert group(decide(world, USING))["state"] == "Starting"


def edited(world: World, **spec: Any) -> World:
    return replace(world, body={**world.body, "spec": {**world.body["spec"], **spec}})


def revisions(world: World) -> list[str]:
    return [one["metadata"]["labels"][names.REVISION_LABEL] for one in leaders(world)]


def test_a_rollout_keeps_all_but_one_group_answering() -> None:
    world = serving({**CPU, "replicas": 2})
    old = revisions(world)[0]
    world = checked(edited(world, serving={"maxModelLength": 512}), USING)
    fewest = 2
    for _ in range(12):
        world, _ = passed(world)
        fewest = min(fewest, status(decide(world, USING))["readyReplicas"])
        world = with_running(world)
    assert fewest == 1
    assert old not in revisions(world)
    assert len(revisions(world)) == 2
    _, decision = rested(world)
    assert condition(decision.status, "UpToDate")["status"] == "True"


def test_a_rollout_starts_the_new_group_first_where_there_is_room_for_both() -> None:
    free = FreeDevices(tuple(node(f"n{number}") for number in range(2)))
    world = serving(DEVICES, free=free)
    old = revisions(world)[0]
    world = checked(edited(world, serving={"maxModelLength": 512}), USING)
    world, _ = rested(world)
    assert len(revisions(world)) == 2
    assert old in revisions(world)
    world, decision = rested(replace(with_running(world), free=FreeDevices((node("n1", free=0),))))
    assert old not in revisions(world)
    assert status(decision)["readyReplicas"] == 1


def test_a_revision_whose_groups_fail_is_rolled_back() -> None:
    world = serving()
    old = revisions(world)[0]
    world = checked(edited(world, serving={"maxModelLength": 512}), USING)
    world, _ = rested(world)
    for delay in (0, 61):
        world, _ = rested(later(world, delay))
        world, decision = failed_again(world)
    assert condition(decision.status, "UpToDate")["reason"] == "RolledBack"
    world, _ = rested(later(world, 61))
    assert revisions(world) == [old]


def test_scaling_down_ends_the_highest_and_to_zero_all() -> None:
    world = serving({**CPU, "replicas": 3})
    world, _ = rested(edited(world, replicas=1))
    assert [one["metadata"]["labels"][names.REPLICA_LABEL] for one in leaders(world)] == ["0"]
    world, decision = rested(edited(world, replicas=0))
    assert leaders(world) == []
    assert status(decision).get("groups", []) == []


def test_a_model_moves_from_one_node_to_several_and_back() -> None:
    world, _ = resolved_world(USING, spec={**CPU, "parallelism": {}})
    world, _decision = rested(world)
    world, _ = rested(edited(world, parallelism={"nodes": 2}))
    assert len(leaders(world)) == 1
    deployment = next(one for one in world.children if one["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 0
    world, _ = rested(edited(world, parallelism={}))
    assert leaders(world) == []
    deployment = next(one for one in world.children if one["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 1


def test_a_paused_model_keeps_its_groups_and_starts_none() -> None:
    world = with_running(serving(), _f_1=CRASHED, _0=FOLLOWED)
    metadata = {**world.body["metadata"], "annotations": {names.PAUSED_ANNOTATION: "true"}}
    world = replace(world, body={**world.body, "metadata": metadata})
    world, decision = rested(world)
    assert len(leaders(world)) == 1
    assert group(decision)["state"] == "Failed"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"parallelism": {"nodes": 2, "tensor": 3}}, "spec.parallelism.tensor: 3 is not a multiple"),
        ({"parallelism": {"nodes": 2}, "replicas": 17}, "spec.replicas: 17 exceeds 16"),
    ],
)
def test_what_no_group_can_be_is_refused(spec: dict[str, Any], says: str) -> None:
    _, decision = resolved_world(USING, spec={**CPU, **spec})
    found = condition(decision.status, "Accepted")
    assert (found["reason"], says in found["message"]) == ("InvalidSpec", True)


def test_a_group_of_records_that_make_no_sense_is_started_as_if_there_were_none() -> None:
    world, _ = begun()
    broken = [{"name": "x", "attempt": "many"}, {"name": 3}]
    world = replace(world, body={**world.body, "status": {**world.body["status"], "groups": broken}})
    _, decision = rested(world)
    assert group(decision)["attempt"] == 1


def test_what_is_rendered_does_not_change_while_the_group_lives() -> None:
    world = serving()
    again = decide(world, USING)
    kinds = [one["kind"] for one in again.desired if names.GROUP_LABEL in one["metadata"]["labels"]]
    assert kinds == ["NetworkPolicy", "Service"]
    assert stored(again.desired)
    assert settle(world, USING)


LWS = replace(USING, groups=GroupSettings(restart_seconds=60, controller="LeaderWorkerSet"))
GOLDEN = CASES / "leader-worker-set.yaml"


def with_leader_worker_set() -> tuple[World, Object]:
    world, _ = resolved_world(LWS, spec=CPU)
    world, _ = settle(world, LWS)
    (made,) = (one for one in world.children if one["kind"] == "LeaderWorkerSet")
    return world, made


def pods_of(made: Object) -> tuple[Object, ...]:
    """As the controller of LeaderWorkerSets names and labels them, by its documentation."""
    name, spec = made["metadata"]["name"], made["spec"]["leaderWorkerTemplate"]
    pods = []
    for index, (pod, part) in enumerate(((f"{name}-0", "leaderTemplate"), (f"{name}-0-1", "workerTemplate"))):
        template = spec[part]
        labels = {**template["metadata"]["labels"], names.WORKER_INDEX_LABEL: str(index)}
        metadata = {"name": pod, "namespace": "team", "labels": labels}
        pods.append(running({"metadata": metadata, "spec": template["spec"]}, f"n{index}"))
    return tuple(pods)


def test_a_group_can_be_a_leader_worker_set() -> None:
    """`NEURON_SERVING_UPDATE_CASES=1` updates the file; check the diff."""
    world, made = with_leader_worker_set()
    if os.environ.get("NEURON_SERVING_UPDATE_CASES") == "1":
        GOLDEN.write_text(yaml.dump(made, Dumper=Plain, sort_keys=False, width=120))
    assert made == yaml.safe_load(GOLDEN.read_text())
    assert not sets(world.children)
    parts = [
        one["kind"]
        for one in world.children
        if any(owner["kind"] == made["kind"] for owner in one["metadata"].get("ownerReferences", ()))
    ]
    assert parts == ["Secret", "NetworkPolicy"], "its controller makes the Service"


def test_a_group_of_a_leader_worker_set_serves_and_ends_as_one() -> None:
    world, made = with_leader_worker_set()
    leader, follower = pods_of(made)
    world, decision = settle(replace(world, pods=(leader, follower)), LWS)
    assert condition(decision.status, "Available")["status"] == "True"
    assert not decision.delete
    world = replace(world, pods=(leader, running(follower, "n1", restartCount=1)))
    decision = decide(world, LWS)
    assert not decision.delete, "the end is recorded before"
    decision = decide(carried_out(world, decision), LWS)
    assert [(one["kind"], name_of(one)) for one in decision.delete] == [(made["kind"], name_of(made))]
