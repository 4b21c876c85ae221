"""Many failures at once, side by side: each shows its reason with the message of tests/cases/failures.yaml, and is gone
when it is cured, without anybody's help. The seconds are printed, not asserted."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.failures import CPU_NODE, FAULTS, PULLER, TOKEN, Fault, Scene, model
from cluster.rig.images import build_image
from cluster.rig.machine import WAIT_SECONDS
from cluster.rig.rig import Rig
from cluster.servers import hub_in_pod, registry_in_pod
from cluster.stories import Story, install, listed, load_images, uninstall
from helpers.failures import FAILURES, Failure

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

STARTING = (None, "", "ContainerCreating", "PodInitializing")


@pytest.fixture
def scene(rig: Rig) -> Iterator[Scene]:
    """The operator with a hub, and a namespace."""
    images = load_images(rig)
    with contextlib.ExitStack() as undo:
        name = f"hub-{uuid.uuid4().hex[:8]}"
        repositories = {"demo/demo": 0, "demo/gated": 0, "demo/strange": 0, "demo/short": 0}
        edits = {
            "demo/strange": "sed -i s/LlamaForCausalLM/StrangeForCausalLM/ config.json",
            "demo/short": "truncate -s 1000000 model.safetensors",
        }
        hub = undo.enter_context(
            hub_in_pod(
                rig, name, images.runtime, node=CPU_NODE, models=repositories, gated={"demo/gated": TOKEN}, edits=edits
            )
        )
        # In the caches, because the images were loaded.
        runtime = build_image("runtime-cpu")
        undo.enter_context(
            registry_in_pod(rig, f"registry-{uuid.uuid4().hex[:8]}", runtime, node=CPU_NODE, login=PULLER)
        )
        values = {
            "nodeSelector": {"kubernetes.io/hostname": CPU_NODE},
            "jobs": {
                "env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}],
                "resources": {"requests": {"cpu": "50m"}},
            },
        }
        undo.callback(uninstall, rig)
        install(rig, images, values=values)
        yield Scene(rig, _story(rig, undo), hub, images.runtime, undo)


def _story(rig: Rig, undo: contextlib.ExitStack) -> Story:
    story = Story(rig, f"test-{uuid.uuid4().hex[:8]}")
    rig.create_namespace(story.namespace)
    undo.callback(rig.kubectl, "delete", "namespace", story.namespace, "--wait=false", "--ignore-not-found")
    return story


@dataclass
class Course:
    """What was seen of one failure, and when."""

    fault: Fault
    failure: Failure
    scene: Scene
    begun: float = 0.0
    fact: float | None = None
    """When its pods, Jobs or Deployment first showed it."""
    shown: float | None = None
    message: str = ""
    cured: float = 0.0
    gone: float | None = None

    def is_ready(self) -> bool:
        return bool(self.scene.story.condition(self.fault.name, "Ready")["status"] == "True")

    @property
    def line(self) -> str:
        numbers = [
            "-" if later is None else f"{later - earlier:.1f}"
            for earlier, later in (
                (self.begun, self.shown),
                (self.begun if self.fact is None else self.fact, self.shown),
                (self.cured, self.gone),
            )
        ]
        return f"| {self.fault.name} | {self.failure.reason} | {' | '.join(numbers)} | {self.message} |"


def test_each_failure_says_why_and_what_to_do_until_it_is_cured(scene: Scene, rig: Rig) -> None:
    story = scene.story
    courses = [
        Course(
            fault,
            FAILURES[fault.name],
            scene if not fault.apart else _apart(scene),
        )
        for fault in FAULTS
    ]
    with story.stage("reasons: models that work"):
        for one in courses:
            if one.fault.before is not None:
                one.scene.apply(model(one.fault.name, **one.fault.before))
        for one in courses:
            if one.fault.before is not None:
                one.scene.story.until(f"{one.fault.name} is ready", one.is_ready)
    with story.stage("reasons: shown"):
        ordered = sorted(courses, key=lambda one: one.fault.name == "forbidden")
        for one in ordered:
            if one.fault.name == "forbidden":
                _poll(rig, [other for other in courses if other is not one], _see)
            one.fault.start(one.scene)
            if one.fault.broken != one.fault.before:
                one.scene.apply(model(one.fault.name, **one.fault.broken))
            one.begun = time.monotonic()
            _look(rig, ordered[: ordered.index(one) + 1], _see)
        _poll(rig, courses, _see)
    with story.stage("reasons: gone"):
        for one in courses:
            one.fault.end(one.scene)
            if one.fault.mended is not None:
                one.scene.apply(model(one.fault.name, **one.fault.mended))
            one.cured = time.monotonic()
            _look(rig, [other for other in courses if other.cured], _see_gone)
        _poll(rig, [one for one in courses if one.cured], _see_gone)
    print("\n| failure | reason | s from begin | s from fact | s from cure | message |\n|---|---|---|---|---|---|")
    print("\n".join(one.line for one in courses))
    story.kubectl("delete", "nm", "--all", "--wait=false")


def _apart(scene: Scene) -> Scene:
    return Scene(scene.rig, _story(scene.rig, scene.undo), scene.hub, scene.image, scene.undo)


See = Callable[[Course, list[Any], float], bool]


def _look(rig: Rig, courses: list[Course], see: See) -> dict[str, list[Any]]:
    """Looks at all of them at once. Returns the conditions of those of which `see` is not true yet."""
    seen = listed(rig, "neuronmodels,pods,jobs,deployments")
    now = time.monotonic()
    return {one.fault.name: _conditions(one, seen) for one in courses if not see(one, seen, now)}


def _poll(rig: Rig, courses: list[Course], see: See) -> None:
    """Looks until `see` is true of each."""
    deadline = time.monotonic() + WAIT_SECONDS
    while missing := _look(rig, courses, see):
        assert time.monotonic() < deadline, f"timed out: {json.dumps(missing, indent=1)}"
        time.sleep(0.25)


def _see(one: Course, seen: list[Any], now: float) -> bool:
    if one.fact is None and one.begun and _has_happened(one, seen):
        one.fact = now
    if one.shown is None:
        for found in _conditions(one, seen):
            if found["reason"] == one.failure.reason and one.failure.is_said_in(found["message"]):
                one.shown, one.message = now, found["message"]
    return one.shown is not None


def _see_gone(one: Course, seen: list[Any], now: float) -> bool:
    if one.gone is None and one.failure.reason not in {found["reason"] for found in _conditions(one, seen)}:
        one.gone = now
    return one.gone is not None


def _conditions(one: Course, seen: list[Any]) -> list[Any]:
    """The conditions that are not true, if they are about the current spec."""
    for found in seen:
        if found["kind"] == "NeuronModel" and _is_of(one, found, found["metadata"]["name"]):
            conditions = found.get("status", {}).get("conditions", ())
            generation = found["metadata"]["generation"]
            return [c for c in conditions if c["status"] == "False" and c["observedGeneration"] == generation]
    return []


def _is_of(one: Course, found: Any, name: str | None) -> bool:
    return (found["metadata"]["namespace"], name) == (one.scene.story.namespace, one.fault.name)


def _has_happened(one: Course, seen: list[Any]) -> bool:
    """Whether Kubernetes shows that something is wrong with the model's pods."""
    jobs = {
        found["metadata"]["name"]
        for found in seen
        if found["kind"] == "Job"
        for owner in found["metadata"].get("ownerReferences", ())
        if _is_of(one, found, owner["name"])
    }
    for found in seen:
        labels: Mapping[str, str] = found["metadata"].get("labels", {})
        if found["kind"] == "Deployment" and _is_of(one, found, found["metadata"]["name"]):
            conditions = found.get("status", {}).get("conditions", ())
            if any((c["type"], c["status"]) == ("ReplicaFailure", "True") for c in conditions):
                return True
        is_ours = labels.get("neuron-serving.dev/model") == one.fault.name or labels.get("job-name") in jobs
        if found["kind"] == "Pod" and is_ours and found["metadata"]["namespace"] == one.scene.story.namespace:
            if any(c.get("reason") == "Unschedulable" for c in found["status"].get("conditions", ())):
                return True
            for status in found["status"].get("containerStatuses", ()):
                states = (status["state"], status.get("lastState", {}))
                if any(state.get("terminated", {}).get("exitCode") for state in states):
                    return True
                if states[0].get("waiting", {}).get("reason") not in STARTING:
                    return True
    return False
