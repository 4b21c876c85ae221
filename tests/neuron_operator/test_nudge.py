"""Pods that the API server refuses are tried again: how soon after a cure, and at what price. Simulated hours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from helpers.operator_worlds import (
    NOW,
    SETTINGS,
    carried_out,
    find,
    fresh,
    job_pod,
    resolved_world,
    serving_pod,
    settle,
)
from neuron_operator.api import names
from neuron_operator.decide.course import decide
from neuron_operator.read.objects import text
from neuron_operator.read.world import Object, World

FAILURE = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: few"}


def refused(since: datetime = NOW) -> World:
    """The API server refuses the pods of a Deployment."""
    world, _ = resolved_world()
    failure = {"conditions": [{**FAILURE, "lastTransitionTime": f"{since:%FT%TZ}"}]}
    children = (c if c["kind"] != "Deployment" else {**c, "status": failure} for c in world.children)
    return replace(world, children=tuple(children))


def waiting() -> World:
    """The API server refuses the pod of a Job, which nobody says."""
    world, _ = settle(fresh())
    job = find(world.shared, "Job")
    made = {**job, "metadata": {**job["metadata"], "creationTimestamp": f"{NOW:%FT%TZ}"}}
    return replace(world, shared=(made,), events=())


def tried(world: World) -> str:
    found = next(obj for obj in (*world.children, *world.shared) if obj["kind"] in ("Deployment", "Job"))
    return text(found, "metadata", "annotations", names.TRIED_ANNOTATION)


def attempts(world: World, seconds: float) -> Iterator[float]:
    """Seconds after NOW at which controllers are made to try again. Only what a pass asks for wakes the next one."""
    end = NOW + timedelta(seconds=seconds)
    while world.now < end:
        decision = decide(world, SETTINGS)
        after = carried_out(world, decision)
        if tried(after) != tried(world):
            yield (world.now - NOW).total_seconds()
        assert decision.requeue_after_seconds, "nothing else would wake the model"
        world = replace(after, now=world.now + timedelta(seconds=max(decision.requeue_after_seconds, 0.1)))


@pytest.mark.parametrize(("world", "patience"), [(refused(), 0.0), (waiting(), 20.0)], ids=["Deployment", "Job"])
def test_a_cure_is_noticed_after_a_twentieth_of_the_fault(world: World, patience: float) -> None:
    at = [patience, *attempts(world, 3600.0)]
    for before, after in itertools.pairwise(at):
        assert after - before <= min(max(2.0, (before - patience) / 20), 20.0) + 1.1, (before, after)
    last_minutes = [one for one in at if one >= 1800.0]
    assert len(last_minutes) <= 3 * 30, "a refusal that stays costs at most three writes a minute"
    assert len([one for one in at if one < 60.0]) <= 32


def test_after_the_cure_nothing_is_written() -> None:
    world = refused(NOW - timedelta(minutes=1))
    world = carried_out(world, decide(world, SETTINGS))
    value = tried(world)
    assert value == f"{NOW:%FT%TZ}"
    cured = tuple({**c, "status": {}} if c["kind"] == "Deployment" else c for c in world.children)
    world = replace(world, children=cured, pods=(serving_pod(find(world.children, "Deployment")),))
    world, _ = settle(replace(world, now=NOW + timedelta(hours=1)))
    assert tried(world) == value


@pytest.mark.parametrize("value", ["2099-01-01T00:00:00Z", "yesterday", "2026-01-01T00:00:00Z"])
def test_an_annotation_from_another_clock_or_hand_stops_no_attempt(value: str) -> None:
    world = refused(NOW - timedelta(minutes=1))
    deployment = find(world.children, "Deployment")
    edited = {**deployment["metadata"]["annotations"], names.TRIED_ANNOTATION: value}
    children = (
        c if c is not deployment else {**c, "metadata": {**c["metadata"], "annotations": edited}}
        for c in world.children
    )
    world = replace(world, children=tuple(children))
    assert tried(carried_out(world, decide(world, SETTINGS))) == f"{NOW.astimezone(UTC):%FT%TZ}"


def test_nothing_is_tried_while_the_model_is_paused() -> None:
    world = refused(NOW - timedelta(minutes=1))
    metadata = {**world.body["metadata"], "annotations": {names.PAUSED_ANNOTATION: "true"}}
    paused = replace(world, body={**world.body, "metadata": metadata})
    assert not tried(carried_out(paused, decide(paused, SETTINGS)))


@pytest.mark.parametrize("spec", [{"suspend": True}, {}])
def test_a_job_that_others_hold_back_or_that_has_a_pod_is_left_alone(spec: Object) -> None:
    world = waiting()
    job = find(world.shared, "Job")
    pods = () if spec else (job_pod(job, {"running": {"startedAt": f"{NOW:%FT%TZ}"}}, phase="Running"),)
    later = NOW + timedelta(hours=1)
    world = replace(
        world, shared=({**job, "spec": {**job["spec"], **spec}},), pods=pods, now=later, logs={"resolve-x": ""}
    )
    assert not tried(carried_out(world, decide(world, SETTINGS)))
