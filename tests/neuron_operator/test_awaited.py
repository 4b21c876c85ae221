"""A pod that waits for a Secret or ConfigMap is replaced as soon as that exists: the kubelet looks ever more rarely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from helpers.operator_worlds import NOW, SETTINGS, find, fresh, job_pod, resolved_world, serving_pod, settle
from neuron_operator.api import names
from neuron_operator.api.reasons import Exists
from neuron_operator.decide.course import AWAITED_SECONDS, MIN_RECHECK_SECONDS, decide
from neuron_operator.read.world import Decision, Object, World

KEYS = Exists("Secret", "keys")


def waiting(message: str) -> Object:
    return {"waiting": {"reason": "CreateContainerConfigError", "message": message}}


def mounting(note: str) -> tuple[World, Object]:
    """A pod that the kubelet cannot mount something for, long ago."""
    world, _ = resolved_world()
    pod = serving_pod(find(world.children, "Deployment"), state={"waiting": {"reason": "ContainerCreating"}})
    event = {"regarding": {"kind": "Pod", "name": "chat-1"}, "reason": "FailedMount", "note": note}
    return replace(world, pods=(pod,), events=(event,), now=NOW + timedelta(hours=1)), pod


def starting(message: str) -> tuple[World, Object]:
    world, _ = resolved_world()
    pod = serving_pod(find(world.children, "Deployment"), state=waiting(message))
    return replace(world, pods=(pod,)), pod


def deleted(decision: Decision) -> list[str]:
    return [found["metadata"]["name"] for found in decision.delete]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (starting('secret "keys" not found'), KEYS),
        (starting('configmap "words.all" not found'), Exists("ConfigMap", "words.all")),
        (mounting('MountVolume.SetUp failed for volume "api-key" : secret "keys" not found'), KEYS),
    ],
)
def test_a_pod_is_replaced_once_what_it_waits_for_exists(found: tuple[World, Object], wanted: Exists) -> None:
    world, pod = found
    before = decide(world, SETTINGS)
    assert wanted in before.needs
    assert deleted(before) == []
    after = decide(replace(world, existing=frozenset({wanted})), SETTINGS)
    assert after.delete == (pod,)


@pytest.mark.parametrize(
    "message",
    [
        "couldn't find key api in Secret team/keys",  # it exists, and a new pod would not find the key either
        'secret "../configmaps/x" not found',
        'secret "Keys" not found',
        "",
    ],
)
def test_nothing_else_is_looked_for(message: str) -> None:
    world, _ = starting(message)
    decision = decide(world, SETTINGS)
    assert not [need for need in decision.needs if isinstance(need, Exists)]
    assert deleted(decide(replace(world, existing=frozenset({KEYS})), SETTINGS)) == []


def test_a_pod_that_has_started_stays() -> None:
    world, pod = mounting('secret "keys" not found')
    running = {"name": "runtime", "state": {"running": {"startedAt": "2026-03-01T12:00:00Z"}}, "ready": False}
    started = {**pod, "status": {**pod["status"], "containerStatuses": [running]}}
    world = replace(world, pods=(started,), existing=frozenset({KEYS}))
    assert deleted(decide(world, SETTINGS)) == []


@pytest.mark.parametrize(("waited", "seconds"), [(5, MIN_RECHECK_SECONDS), (200, 10.0), (7200, AWAITED_SECONDS)])
def test_it_is_looked_for_ever_more_rarely(waited: int, seconds: float) -> None:
    world, _ = settle(starting('secret "keys" not found')[0])
    later = replace(world, now=NOW + timedelta(seconds=waited))
    assert decide(later, SETTINGS).requeue_after_seconds == pytest.approx(seconds)


def test_a_job_is_made_again_once_what_its_pod_waits_for_exists() -> None:
    world, _ = settle(fresh())
    job = find(world.shared, "Job")
    pod = job_pod(job, waiting('secret "keys" not found'), phase="Pending")
    world = replace(world, pods=(pod,))
    before = decide(world, SETTINGS)
    assert KEYS in before.needs
    assert deleted(before) == []
    assert deleted(decide(replace(world, existing=frozenset({KEYS})), SETTINGS)) == [job["metadata"]["name"]]


def test_a_paused_model_is_left_alone() -> None:
    world, _ = starting('secret "keys" not found')
    annotations: Mapping[str, str] = {names.PAUSED_ANNOTATION: "true"}
    body = {**world.body, "metadata": {**world.body["metadata"], "annotations": annotations}}
    assert deleted(decide(replace(world, body=body, existing=frozenset({KEYS})), SETTINGS)) == []
