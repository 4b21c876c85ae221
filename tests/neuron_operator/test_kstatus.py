"""What Flux, kpt and other users of kstatus conclude from the status of a NeuronModel.

`computed` restates kstatus' rules (cli-utils, pkg/kstatus/status: checkGenericProperties, checkReadyCondition).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from helpers.operator_worlds import (
    SETTINGS,
    SPEC,
    condition,
    ended,
    failure_record,
    find,
    fresh,
    job_pod,
    resolved_world,
    serving_pod,
    settle,
)
from neuron_operator.api import names
from neuron_operator.api.schema import definition
from neuron_operator.decide.course import decide
from neuron_operator.read.world import Object, Refusal, RefusalCause, World


def computed(model: Object) -> str:
    metadata, status = model["metadata"], model.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != metadata["generation"]:
        return "InProgress"
    conditions = status.get("conditions") or []
    for one in conditions:
        if (one["type"], one["status"]) == ("Reconciling", "True"):
            return "InProgress"
        if (one["type"], one["status"]) == ("Stalled", "True"):
            return "Failed"
    for one in conditions:
        if one["type"] == "Ready":
            return "Current" if one["status"] == "True" else "InProgress"
    return "Current"


def serving(num_ready: int = 2, **changes: object) -> World:
    world, _ = resolved_world(**changes)
    deployment = find(world.children, "Deployment")
    pods = tuple(serving_pod(deployment, f"chat-{n}", ready=n < num_ready) for n in range(2))
    return settle(replace(world, pods=pods))[0]


def edited(world: World, **spec: object) -> World:
    """After an edit that no pass has seen."""
    metadata = {**world.body["metadata"], "generation": world.body["metadata"]["generation"] + 1}
    return replace(world, body={**world.body, "metadata": metadata, "spec": {**world.body["spec"], **spec}})


def unknown_model() -> World:
    world, decision = settle(fresh())
    end = ended(10, failure_record(10, "ModelNotFound", "no such repository"))
    return settle(replace(world, pods=(job_pod(find(decision.desired, "Job"), end),)))[0]


def crashing() -> World:
    world = serving(1)
    deployment = find(world.children, "Deployment")
    return replace(world, pods=(world.pods[0], serving_pod(deployment, "chat-1", last=ended(1, "boom"), restarts=3)))


def taken_name() -> World:
    return replace(serving(), refusals=(Refusal(RefusalCause.TAKEN, "Service", "chat"),))


def contested() -> World:
    return replace(serving(), refusals=(Refusal(RefusalCause.UNDONE, "Deployment", "chat", "spec.x: wanted 1"),))


def failing_write() -> World:
    return replace(serving(), refusals=(Refusal(RefusalCause.FAILED, "Service", "chat", "webhook timed out"),))


def paused_edit(**spec: Any) -> World:
    world = edited(serving(), **spec)
    annotations = {names.PAUSED_ANNOTATION: "true"}
    return replace(world, body={**world.body, "metadata": {**world.body["metadata"], "annotations": annotations}})


@pytest.mark.parametrize(
    ("make", "expected", "abnormal"),
    [
        (fresh, "InProgress", "Reconciling"),
        (serving, "Current", ""),
        (lambda: serving(1), "InProgress", "Reconciling"),
        (lambda: serving(spec={**SPEC, "replicas": 0}), "Current", ""),
        (lambda: edited(serving(), serving={"maxModelLength": 512}), "InProgress", "Reconciling"),
        (lambda: edited(serving(), serving={"contextBuckets": [128]}), "Failed", "Stalled"),
        (lambda: edited(serving(), accelerator={"devices": 7}), "Failed", "Stalled"),
        (unknown_model, "Failed", "Stalled"),
        (crashing, "InProgress", "Reconciling"),
        (taken_name, "Failed", "Stalled"),
        (contested, "Current", ""),
        (failing_write, "InProgress", "Reconciling"),
        (paused_edit, "Current", ""),
        (lambda: paused_edit(serving={"maxModelLength": 512}), "InProgress", ""),
        (lambda: paused_edit(replicas=0), "InProgress", ""),
        (lambda: edited(crashing(), replicas=1), "Current", ""),
    ],
)
def test_kstatus_tells_work_from_failure(make: Callable[[], World], expected: str, abnormal: str) -> None:
    world = make()
    decision = decide(world, SETTINGS)
    assert decision.status is not None
    assert computed({**world.body, "status": decision.status}) == expected
    kinds = [one["type"] for one in decision.status["conditions"]]
    assert [kind for kind in kinds if kind in ("Reconciling", "Stalled")] == ([abnormal] if abnormal else [])
    if abnormal:
        ready, reported = (condition(decision.status, kind) for kind in ("Ready", abnormal))
        assert (reported["reason"], reported["message"]) == (ready["reason"], ready["message"])


def test_an_object_that_the_operator_has_not_seen_is_in_progress() -> None:
    served = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["default"]
    assert computed({**fresh().body, "status": served}) == "InProgress"
    world = serving()
    assert computed(world.body) == "Current"
    assert computed(edited(world, replicas=3).body) == "InProgress"
    assert computed({**world.body, "metadata": {**world.body["metadata"], "deletionTimestamp": "now"}}) == "Terminating"
