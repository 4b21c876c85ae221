"""The steps before replicas: `decide` walks a list up to the first step whose Job has no result. A new step is one more
entry of the list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from helpers.operator_worlds import (
    FACTS,
    SETTINGS,
    SPEC,
    body,
    carried_out,
    condition,
    ended,
    failure_record,
    find,
    finished,
    fresh,
    job_pod,
    resolved_pod,
    said,
    settle,
    uid_of_job,
)
from neuron_operator.api import names
from neuron_operator.api.errors import FieldNotSupported
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import Claim
from neuron_operator.api.reasons import CONDITIONS, Finding, Reason, met, unmet
from neuron_operator.decide.course import decide
from neuron_operator.decide.pin import pin
from neuron_operator.decide.steps import STEPS, Known, Step, Task
from neuron_operator.read.objects import name_of
from neuron_operator.read.records import Facts, Record
from neuron_operator.read.world import Decision, JobSettings, Object, Place, StorageSettings, World
from neuron_operator.render.cleaning import cleaners
from neuron_operator.render.jobs import check_job, compile_jobs, fetch_job, resolve_job
from neuron_operator.render.objects import shared

JOB_NAME = "chat-fetch-1234567890"


def fetch_jobs(known: Known) -> tuple[Object, ...]:
    """A step for tests with a Job; it does nothing for models with another digest."""
    if known.resolved.digest != "sha256:0123456789abcdef":
        return ()
    job = shared(known.model, "batch/v1", "Job", JOB_NAME, component="fetch", labels={names.ROLE_LABEL: "fetch"})
    return ({**job, "spec": {"template": {"metadata": {"labels": {}}}}},)


def learn_bytes(known: Known, record: Record) -> Known | None:
    if record.command != "fetch":
        return None
    return replace(known, facts=msgspec.structs.replace(known.resolved, weights_bytes=7))


def fetched(known: Known) -> tuple[Known, Finding]:
    return known, met("WeightsReady", f"{known.resolved.weights_bytes} bytes are there")


DOWNLOAD = Task(unmet("WeightsReady", Reason.FETCHING, "downloading the weights"), fetch_jobs, learn_bytes)
FETCH = Step(fetched, (DOWNLOAD,))
LONGER = (*STEPS[:2], FETCH, *STEPS[3:])


def fetching_world() -> tuple[World, Decision]:
    """Resolved and pinned; the test step has created its Job, which has no pod yet."""
    world, decision = settle(fresh())
    world = replace(finished(world), pods=(resolved_pod(find(decision.desired, "Job")),))
    return settle(world, steps=LONGER)


def with_pod(world: World, state: Object, **fields: Any) -> World:
    pod = job_pod(find(world.shared, "Job"), state, "fetch-x", **fields)
    owner = [{"kind": "Job", "name": JOB_NAME, "uid": uid_of_job(JOB_NAME)}]
    return replace(world, pods=(*world.pods, {**pod, "metadata": {**pod["metadata"], "ownerReferences": owner}}))


def jobs(decision: Decision) -> list[str]:
    return [name_of(made) for made in decision.desired if made["kind"] == "Job"]


def test_the_steps_set_their_conditions_in_order() -> None:
    world, decision = settle(fresh())
    _, decision = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)))
    true = [c["type"] for c in decision.status["conditions"] if c["status"] == "True"]  # type: ignore[index]
    assert true == [*(kind for kind in CONDITIONS if kind != "Available"), "Reconciling"]


def test_a_later_step_waits_for_its_job_while_the_revision_is_pinned() -> None:
    _, decision = fetching_world()
    assert jobs(decision) == [JOB_NAME]
    kinds = {made["kind"] for made in decision.desired}
    assert "ControllerRevision" in kinds
    assert "Deployment" not in kinds
    waiting = condition(decision.status, "WeightsReady")
    assert (waiting["reason"], said(waiting)) == ("Fetching", "downloading the weights")
    for behind in ("Compiled", "Available", "UpToDate"):
        assert condition(decision.status, behind)["message"] == "waiting for WeightsReady"
    assert condition(decision.status, "Ready")["reason"] == "Fetching"
    assert decision.requeue_after_seconds is not None


def test_the_earlier_revision_serves_while_a_step_of_an_edit_waits() -> None:
    world, decision = settle(fresh())
    world, before = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)))
    edit = {**world.body["spec"], "serving": {"maxModelLength": 512}}
    world = replace(world, body={**world.body, "spec": edit})
    for _ in range(2):
        decision = decide(world, SETTINGS, LONGER)
        world = carried_out(world, decision)
    assert jobs(decision) == [JOB_NAME]
    assert find(decision.desired, "Deployment") == find(before.desired, "Deployment")
    assert len([made for made in world.children if made["kind"] == "ControllerRevision"]) == 2
    assert condition(decision.status, "Available")["reason"] == "Loading"
    behind = condition(decision.status, "UpToDate")
    assert (behind["status"], behind["reason"]) == ("False", "Fetching")
    assert said(behind).endswith("serves until WeightsReady is true: downloading the weights")


def test_facts_of_a_job_reach_the_later_steps() -> None:
    world, _ = fetching_world()
    record = '{"version": 1, "command": "fetch", "ok": true}'
    world = with_pod(world, ended(0, record), phase="Succeeded")
    decision = decide(world, SETTINGS, LONGER)
    assert name_of(find(decision.desired, "ConfigMap")) == JOB_NAME
    assert condition(decision.status, "WeightsReady")["reason"] == "Fetching", "until the record is copied"
    world, decision = settle(world, steps=LONGER)
    assert condition(decision.status, "WeightsReady")["message"] == "7 bytes are there"
    assert jobs(decision) == []
    assert "Deployment" in {made["kind"] for made in decision.desired}
    assert decision.delete == ()


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        (ended(15, failure_record(15, "StorageFull", "no room for 9 bytes", "fetch")), "StorageFull", "no room"),
        (ended(1, "Traceback\nOSError: reset\n"), "Fetching", "OSError: reset"),
        ({"waiting": {"reason": "ErrImagePull", "message": "no such image"}}, "ImagePull", "no such image"),
    ],
)
def test_a_failing_job_is_explained_the_same_for_every_step(state: Object, reason: str, says: str) -> None:
    world, _ = fetching_world()
    decision = decide(with_pod(world, state), SETTINGS, LONGER)
    assert condition(decision.status, "WeightsReady")["reason"] == reason
    assert says in condition(decision.status, "WeightsReady")["message"]
    assert jobs(decision) == [JOB_NAME]


def test_a_step_without_work_creates_no_job() -> None:
    idle = replace(FETCH, tasks=(replace(DOWNLOAD, jobs=lambda _: ()),))
    world, decision = settle(fresh())
    world = replace(world, pods=(resolved_pod(find(decision.desired, "Job")),))
    _, decision = settle(world, steps=(*STEPS[:2], idle, *STEPS[3:]))
    assert jobs(decision) == []
    assert condition(decision.status, "WeightsReady")["message"] == "6000000 bytes are there"


def test_a_refusing_step_stops_the_sequence_and_keeps_the_serving_revision() -> None:
    def refuses(_: Known) -> tuple[Known, Finding]:
        raise FieldNotSupported("spec.storage", "this", "leave it out")

    world, decision = settle(fresh())
    world, before = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)))
    decision = decide(world, SETTINGS, (*STEPS[:3], Step(refuses)))
    assert condition(decision.status, "Accepted")["reason"] == "FieldNotSupported"
    assert find(decision.desired, "Deployment") == find(before.desired, "Deployment")


def test_a_misplaced_step_is_an_internal_error() -> None:
    with pytest.raises(LookupError, match="place it after Resolve"):
        decide(fresh(), SETTINGS, (FETCH,))
    with pytest.raises(LookupError, match="place it after Place"):
        decide(fresh(), SETTINGS, STEPS[3:])


def required_keys(affinity: Object) -> set[str]:
    terms = affinity.get(names.REQUIRED_AFFINITY, {}).get("nodeSelectorTerms", ())
    return {rule["key"] for term in terms for rule in term["matchExpressions"]}


def preferred_keys(affinity: Object) -> set[str]:
    terms = affinity.get(names.PREFERRED_AFFINITY, ())
    return {rule["key"] for term in terms for rule in term["preference"]["matchExpressions"]}


def test_replicas_on_cpus_run_where_their_image_does_and_leave_devices_to_others() -> None:
    def pod(**spec: Any) -> Object:
        model = parse(body({"model": {"uri": "hf://acme/tiny"}, "accelerator": {"type": "CPU"}, **spec}))
        template: Object = pin(model, msgspec.convert(FACTS, Facts), SETTINGS, 1).pinned.template
        return dict(template["spec"])

    neuron = {names.NEURON_PRESENT_LABEL, names.INSTANCE_TYPE_LABEL}
    assert pod()["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert preferred_keys(pod()["affinity"]["nodeAffinity"]) == neuron
    arm = {"kubernetes.io/arch": "arm64"}
    assert pod(podTemplate={"spec": {"nodeSelector": arm}})["nodeSelector"] == arm
    rule = {"key": "kubernetes.io/arch", "operator": "Exists"}
    ours = {"nodeAffinity": {names.REQUIRED_AFFINITY: {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}}}
    assert "nodeSelector" not in pod(podTemplate={"spec": {"affinity": ours}})
    on_device = pod(accelerator={"devices": 1}, engine={"backend": "torch"})
    assert "nodeSelector" not in on_device
    assert names.PREFERRED_AFFINITY not in on_device["affinity"]["nodeAffinity"]


def test_the_status_says_which_graphs_need_not_be_compiled() -> None:
    facts = msgspec.convert({**FACTS, "graphs": "cached for trn2, 4 cores, 4 requests of 4096 tokens"}, Facts)
    for backend, ends in (("optimum", f"; its graphs: {facts.graphs}"), ("nxdi", FACTS["digest"])):
        model = parse(body({"model": {"uri": "hf://acme/tiny"}, "engine": {"backend": backend}}))
        known = Known(model, SETTINGS, lambda facts: pytest.fail("nothing is pinned yet"), facts=facts)
        _, finding = STEPS[0].finish(known)
        assert finding is not None
        assert finding.message.endswith(ends)


def test_labels_and_annotations_of_the_pods_of_jobs_come_from_chart_and_manifest() -> None:
    keep, mesh = {"karpenter.sh/do-not-disrupt": "true"}, {"sidecar.istio.io/inject": "false"}
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, "jobs": {"labels": mesh, "annotations": keep}}))
    job = resolve_job(model, replace(SETTINGS, jobs=JobSettings(labels={"team": "a"}, annotations={"a": "b"})))
    metadata = job["spec"]["template"]["metadata"]
    assert {"team": "a", **mesh}.items() <= metadata["labels"].items()
    assert metadata["annotations"] == {"a": "b", **keep}
    plain = parse(body({"model": {"uri": "hf://acme/tiny"}}))
    assert name_of(resolve_job(plain, SETTINGS)) != name_of(resolve_job(model, SETTINGS)) == name_of(job)


def test_autoscalers_do_not_move_jobs_that_take_long() -> None:
    annotations = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    other = {"karpenter.sh/do-not-disrupt": "false"}
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, "jobs": {"annotations": other}}))
    plain = parse(body({"model": {"uri": "hf://acme/tiny"}}))

    def of(job: Object) -> Object:
        return job["spec"]["template"]["metadata"].get("annotations", {})

    place, facts = Place(persistent_volume_claim=Claim(claim_name="w")), msgspec.convert(FACTS, Facts)
    assert of(fetch_job(plain, SETTINGS, place, facts, "image")).items() >= annotations.items()
    assert of(fetch_job(model, SETTINGS, place, facts, "image")).items() >= {**annotations, **other}.items()
    assert not annotations.keys() & of(resolve_job(plain, SETTINGS)).keys()


def test_a_key_of_the_credentials_that_the_manifest_names_must_exist() -> None:
    def token(**secret: str) -> Object:
        source = {"uri": "hf://acme/tiny", "credentialsSecretRef": {"name": "hub", **secret}}
        job = resolve_job(parse(body({"model": source})), SETTINGS)
        env = job["spec"]["template"]["spec"]["containers"][0]["env"]
        return next(dict(one["valueFrom"]["secretKeyRef"]) for one in env if one["name"] == "HF_TOKEN")

    assert token() == {"name": "hub", "key": "HF_TOKEN", "optional": True}
    assert token(key="token") == {"name": "hub", "key": "token"}


def test_the_chart_may_name_another_architecture_for_jobs() -> None:
    arm = {"kubernetes.io/arch": "arm64"}
    model = parse(body({"model": {"uri": "hf://acme/tiny"}}))
    job = resolve_job(model, replace(SETTINGS, jobs=JobSettings(node_selector=arm)))
    assert job["spec"]["template"]["spec"]["nodeSelector"] == arm
    assert name_of(job) == name_of(resolve_job(model, SETTINGS))


def test_jobs_run_where_their_image_does_and_the_long_ones_away_from_devices() -> None:
    claim = Place(persistent_volume_claim=Claim(claim_name="models"))
    using = replace(SETTINGS, storage=StorageSettings(weights=claim, artifacts=claim))
    model = parse(body({**SPEC, "accelerator": {"type": "CPU"}, "engine": {"backend": "torch", "compile": "Enabled"}}))
    facts = msgspec.convert(FACTS, Facts)
    revision = pin(model, facts, using, 1)
    (compiling, *_), (cleaner, *_) = (
        compile_jobs(model, using, revision),
        cleaners(model, using, [revision], []),
    )
    resolving, checking = resolve_job(model, using), check_job(model, using, revision)
    fetching = fetch_job(model, using, claim, facts, revision.image)
    neuron = {names.NEURON_PRESENT_LABEL, names.INSTANCE_TYPE_LABEL}
    for job, is_long in (
        (resolving, False),
        (checking, False),
        (fetching, True),
        (compiling, True),
        (cleaner["spec"]["jobTemplate"], True),
    ):
        pod = job["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
        affinity = pod["affinity"]["nodeAffinity"]
        required, preferred = required_keys(affinity), preferred_keys(affinity)
        assert (required, preferred) == ((neuron, set()) if is_long else (set(), neuron))
