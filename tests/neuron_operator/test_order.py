"""No pod holds devices before the steps of its revision are done, whatever is edited, asked for, lost or refused, and
whenever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import (
    SETTINGS,
    SPEC,
    carried_out,
    condition,
    ended,
    failure_record,
    fresh,
    job_pod,
    serving_pod,
    successful_pod,
)
from neuron_operator.api import names
from neuron_operator.api.model import Claim
from neuron_operator.decide.course import decide
from neuron_operator.read.objects import labels_of, name_of, owners_of
from neuron_operator.read.world import Object, Place, Settings, StorageSettings, World

USING = replace(
    SETTINGS, storage=StorageSettings(artifacts=Place(persistent_volume_claim=Claim(claim_name="compiled")))
)
COMPILED_SPEC = {**SPEC, "engine": {"backend": "torch", "compile": "Enabled"}}
STEPS_DONE = ("Accepted", "ModelResolved", "Placed", "WeightsReady", "Compiled")


@dataclass
class Story:
    """A model, and what its status has told so far."""

    world: World = field(default_factory=lambda: fresh(spec=COMPILED_SPEC))
    using: Settings = USING
    told: set[str] = field(default_factory=set)
    """Revisions of which the status said that every step is done."""
    served: set[str] = field(default_factory=set)
    """Revisions of which all replicas have answered."""

    def run_pass(self) -> None:
        decision = decide(self.world, self.using)
        for made in decision.desired:
            if made["kind"] == "Deployment":
                assert revision_of(made) in self.told, f"a pod of {revision_of(made)} before its steps are done"
        self.world = carried_out(self.world, decision)
        jobs = {found["metadata"]["uid"] for found in self.world.shared if found["kind"] == "Job"}
        self.world = replace(self.world, pods=tuple(p for p in self.world.pods if _owner(p) in {*jobs, ""}))
        status = self.world.body["status"]
        if all(condition(status, kind)["status"] == "True" for kind in STEPS_DONE):
            self.told.add(status.get("updateRevision", ""))
        assert status.get("currentRevision", "") in {*self.served, ""}, "a revision that never served"
        assert {one["revision"] for one in status.get("history", ()) if one["state"] == "Serving"} <= self.served

    def edit(self, **spec: Any) -> None:
        self._write(spec=spec)

    def annotate(self, **annotations: str) -> None:
        before = self.world.body["metadata"].get("annotations", {})
        full = {f"{names.GROUP}/{key}": value for key, value in annotations.items()}
        self._write(annotations={**before, **full})

    def _write(self, spec: Object | None = None, annotations: Object | None = None) -> None:
        body = self.world.body
        metadata = {**body["metadata"], "generation": body["metadata"]["generation"] + (spec is not None)}
        metadata = {**metadata, "annotations": annotations} if annotations is not None else metadata
        self.world = replace(self.world, body={**body, "metadata": metadata, "spec": {**body["spec"], **(spec or {})}})

    def end_job(self, *, well: bool = True) -> None:
        """The pod of the oldest Job that runs ends."""
        running = [found for found in self.world.shared if found["kind"] == "Job" and "status" not in found]
        for job in running[:1]:
            error = failure_record(21, "CompileFailed", "no")
            pod = successful_pod(job) if well else job_pod(job, ended(21, error))
            pod = {**pod, "metadata": {**pod["metadata"], "name": f"{name_of(job)}-x"}}
            over = {**job, "status": {"conditions": [{"type": "Complete" if well else "Failed", "status": "True"}]}}
            shared = tuple(over if found is job else found for found in self.world.shared)
            self.world = replace(self.world, shared=shared, pods=(*self.world.pods, pod))

    def running(self, role: str) -> set[str]:
        """Names of the Jobs of the role that have not ended."""
        jobs = (found for found in self.world.shared if found["kind"] == "Job" and "status" not in found)
        return {name_of(job) for job in jobs if labels_of(job)[names.ROLE_LABEL] == role}

    def answer(self, *, ready: bool = True) -> None:
        """The pods of the Deployment are there."""
        deployments = [found for found in self.world.children if found["kind"] == "Deployment"]
        for deployment in deployments:
            of_jobs = tuple(pod for pod in self.world.pods if _owner(pod))
            numbers = range(deployment["spec"]["replicas"])
            pods = (serving_pod(deployment, f"{revision_of(deployment)}-{n}", ready=ready) for n in numbers)
            self.world = replace(self.world, pods=(*of_jobs, *pods))
            self.served |= {revision_of(deployment)} if ready else set()

    def lose(self, kind: str) -> None:
        self.world = replace(self.world, children=tuple(c for c in self.world.children if c["kind"] != kind))
        if kind == "Deployment":
            self.world = replace(self.world, pods=tuple(pod for pod in self.world.pods if _owner(pod)))

    def lose_status(self) -> None:
        self.world = replace(self.world, body={k: v for k, v in self.world.body.items() if k != "status"})

    def use_image(self, tag: str) -> None:
        self.using = replace(USING, runtime_image=f"registry.example/neuron-serving-runtime:{tag}")

    def go_back(self, index: int) -> None:
        """To one of the kept revisions."""
        kept = [found for found in self.world.children if found["kind"] == "ControllerRevision"]
        if kept:
            found = kept[index % len(kept)]
            self.annotate(**{"rollback-to": labels_of(found)[names.REVISION_LABEL]})


def revision_of(deployment: Object) -> str:
    return str(labels_of(deployment["spec"]["template"])[names.REVISION_LABEL])


def _owner(pod: Object) -> str:
    return next((owner["uid"] for owner in owners_of(pod)), "")


ACTIONS: dict[str, Callable[[Story], None]] = {
    "edit": lambda story: story.edit(serving={"maxModelLength": 512}),
    "another edit": lambda story: story.edit(serving={"maxModelLength": 256}),
    "revert": lambda story: story.edit(serving={}),
    "invalid": lambda story: story.edit(serving={"contextBuckets": [128]}),
    "too large": lambda story: story.edit(accelerator={"devices": 7}),
    "legal again": lambda story: story.edit(accelerator={"devices": 6}),
    "none": lambda story: story.edit(replicas=0),
    "one": lambda story: story.edit(replicas=1),
    "refresh": lambda story: story.annotate(refresh="1"),
    "refresh again": lambda story: story.annotate(refresh="2"),
    "roll back": lambda story: story.go_back(0),
    "roll back further": lambda story: story.go_back(1),
    "let go": lambda story: story.annotate(**{"rollback-to": ""}),
    "pause": lambda story: story.annotate(paused="true"),
    "go on": lambda story: story.annotate(paused=""),
    "step done": lambda story: story.end_job(),
    "step done too": lambda story: story.end_job(),
    "step failed": lambda story: story.end_job(well=False),
    "answers": lambda story: story.answer(),
    "loads": lambda story: story.answer(ready=False),
    "Deployment lost": lambda story: story.lose("Deployment"),
    "revisions lost": lambda story: story.lose("ControllerRevision"),
    "other defaults": lambda story: story.use_image("2"),
    "the first defaults": lambda story: story.use_image("1"),
    "status lost": lambda story: story.lose_status(),
}
MOMENTS = st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 4))


@given(st.lists(MOMENTS, max_size=20))
def test_no_pod_of_a_revision_is_made_before_its_steps_are_done(moments: list[tuple[str, int]]) -> None:
    story = Story()
    for action, num_passes in moments:
        ACTIONS[action](story)
        for _ in range(num_passes):
            story.run_pass()


@pytest.mark.parametrize(
    "changes", [["edit"], ["refresh"], ["invalid"], ["too large"], ["edit", "roll back"], ["edit", "roll back further"]]
)
@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_whatever_is_changed_before_the_first_revision_is_compiled_no_pod_is_made(
    changes: list[str], num_done: int
) -> None:
    """At every pass between the manifest and the pod."""
    for num_passes in range(9):
        story = Story()
        for _ in range(num_done):
            for _ in range(6):
                story.run_pass()
            story.end_job()
        for action in (*changes, "step failed"):
            for _ in range(num_passes):
                story.run_pass()
            ACTIONS[action](story)
        for _ in range(6):
            story.run_pass()


def test_a_compilation_for_an_edited_manifest_ends_unless_it_is_needed() -> None:
    story = Story()
    while not story.running(names.ROLE_COMPILE):
        story.end_job()
        for _ in range(6):
            story.run_pass()
    before = story.running(names.ROLE_COMPILE)
    story.edit(replicas=2)
    for _ in range(6):
        story.run_pass()
    assert story.running(names.ROLE_COMPILE) == before, "replicas are not compiled"
    story.edit(serving={"maxModelLength": 512})
    for _ in range(6):
        story.run_pass()
    after = story.running(names.ROLE_COMPILE)
    assert len(after) == 1
    assert after != before
