"""Weights that a Job fetches once, into a claim or an object store, before pods that only read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.operator_worlds import (
    FACTS,
    SETTINGS,
    SPEC,
    carried_out,
    condition,
    ended,
    failure_record,
    find,
    finished,
    fresh,
    having_served,
    job_pod,
    resolved_pod,
    serving_pod,
    settings,
    settle,
    stepped,
    successful_pod,
)
from neuron_operator.api import names
from neuron_operator.api.reasons import Need
from neuron_operator.decide.course import decide
from neuron_operator.read.objects import items, name_of, owners_of
from neuron_operator.read.world import Decision, Object, Settings, World

CLAIM = {"weights": {"persistentVolumeClaim": {"claimName": "models", "subPath": "llm"}}}
STORE = {"weights": {"objectStore": {"uri": "s3://bucket/weights"}}}
TEMPLATE = {"storage": {"weights": {"pvcTemplate": {"storageClassName": "efs", "size": "1Ti"}}}}
SECRET = {"model": {"uri": "hf://acme/tiny", "credentialsSecretRef": {"name": "keys"}}}
MIRROR = {"jobs": {"env": ({"name": "HF_ENDPOINT", "value": "https://hub.example"},)}}


def resolved(spec: Object, using: Settings = SETTINGS, **metadata: Any) -> tuple[World, Decision]:
    """The state in which the model is resolved, and its fetch Job is wanted."""
    world, decision = settle(fresh(spec={**SPEC, **spec}, **metadata), using)
    world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)), using)
    return settle(finished(world), using)


def pod_of(workload: Object) -> tuple[Object, Object]:
    """The pod's spec and its container."""
    spec = workload["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


def variables(container: Object) -> set[str]:
    return {variable["name"] for variable in items(container, "env")}


def kinds(decision: Decision) -> set[str]:
    return {made["kind"] for made in decision.desired}


def test_no_replica_exists_before_the_weights_are_on_the_claim() -> None:
    world, decision = resolved({"storage": CLAIM})
    assert condition(decision.status, "WeightsReady")["reason"] == "Fetching"
    assert "Deployment" not in kinds(decision)
    world, decision = stepped(world, decision)
    assert "Deployment" in kinds(decision)
    ready = condition(decision.status, "WeightsReady")
    assert ready["status"] == "True"
    assert ready["message"] == f"6000000 bytes at {FACTS['digest']} are in claim models, folder llm"


def test_the_job_writes_the_claim_on_a_node_without_devices_with_the_credentials() -> None:
    pod, container = pod_of(find(resolved({"storage": CLAIM, **SECRET}, settings(MIRROR))[1].desired, "Job"))
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "weights"]
    assert mount == {"name": "weights", "mountPath": names.WEIGHTS_DIR, "subPath": "llm"}
    assert container["command"] == [
        *("neuron-runtime", "fetch", "hf://acme/tiny", names.WEIGHTS_DIR),
        *("--digest", FACTS["digest"], "--record", names.TERMINATION_LOG),
    ]
    assert variables(container) == {"HF_ENDPOINT", "HF_TOKEN", "HOME"}
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": "256Mi"}}
    (term,) = pod["affinity"]["nodeAffinity"][names.REQUIRED_AFFINITY]["nodeSelectorTerms"]
    assert names.NEURON_PRESENT_LABEL in [rule["key"] for rule in term["matchExpressions"]]


def test_replicas_read_the_claim_without_credentials_and_never_fetch() -> None:
    _, decision = stepped(*resolved({"storage": CLAIM, **SECRET}, settings(MIRROR)), settings(MIRROR))
    pod, container = pod_of(find(decision.desired, "Deployment"))
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "weights"]
    assert mount == {"name": "weights", "mountPath": names.WEIGHTS_DIR, "readOnly": True, "subPath": "llm"}
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "weights"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    assert container["command"][-4:] == ["--weights-dir", names.WEIGHTS_DIR, "--on-weights-miss", "fail"]
    assert not [name for name in variables(container) if name.startswith(("HF_", "AWS_", "HTTP"))]


def test_a_store_is_filled_with_the_token_of_the_hub_and_read_without_it() -> None:
    world, decision = resolved({"storage": STORE, **SECRET})
    _, job = pod_of(find(decision.desired, "Job"))
    assert job["command"][2:4] == ["hf://acme/tiny", "s3://bucket/weights"]
    assert job["resources"]["requests"]["ephemeral-storage"] == "70Mi", "the weights are on the disk on their way"
    assert {"HF_TOKEN", "AWS_ACCESS_KEY_ID"} <= variables(job)
    _, decision = stepped(world, decision)
    _, container = pod_of(find(decision.desired, "Deployment"))
    assert container["command"][-6:] == [
        *("--weights-dir", names.WEIGHTS_DIR, "--weights-store", "s3://bucket/weights", "--on-weights-miss", "fail")
    ]
    assert "AWS_ACCESS_KEY_ID" in variables(container)
    assert "HF_TOKEN" not in variables(container)


def test_weights_in_the_pods_have_the_limit_of_the_manifest() -> None:
    weights = {"emptyDir": {"sizeLimit": "20Gi"}}
    _, decision = stepped(*resolved({"storage": {"weights": weights}}, settings(TEMPLATE)), settings(TEMPLATE))
    pod, container = pod_of(find(decision.desired, "Deployment"))
    assert {"name": "weights", "emptyDir": {"sizeLimit": "20Gi"}} in pod["volumes"]
    assert container["command"][-2:] == ["--weights-dir", names.WEIGHTS_DIR]
    assert "PersistentVolumeClaim" not in kinds(decision)


def test_an_edit_takes_the_weights_from_the_claim_of_the_chart_into_the_pods_and_back() -> None:
    using = settings(TEMPLATE)
    world, _ = stepped(*resolved({}, using), using)
    for storage, reason in (({"weights": {"emptyDir": {}}}, "FetchedByPods"), ({}, "WeightsReady")):
        world, decision = settle(replace(world, body={**world.body, "spec": {**SPEC, "storage": storage}}), using)
        assert condition(decision.status, "WeightsReady")["reason"] == reason


@pytest.mark.parametrize("uri", ["file:///opt/models/demo", "pvc://models/demo"])
def test_a_model_that_is_read_in_place_is_not_fetched(uri: str) -> None:
    _, decision = stepped(*settle(fresh(spec={**SPEC, "model": {"uri": uri}}), settings(TEMPLATE)), settings(TEMPLATE))
    assert kinds(decision).isdisjoint({"PersistentVolumeClaim", "Job"})
    assert condition(decision.status, "WeightsReady")["message"] == f"serving pods read the weights from {uri}"


def test_models_of_one_checkpoint_share_the_fetch_whatever_else_they_differ_in() -> None:
    _, one = resolved({"storage": CLAIM})
    _, two = resolved({"storage": CLAIM, "replicas": 3, "serving": {"maxSequences": 2}}, name="other", uid="uid-other")
    _, elsewhere = resolved({"storage": STORE})
    jobs = [find(decision.desired, "Job") for decision in (one, two, elsewhere)]
    assert jobs[0]["spec"] == jobs[1]["spec"]
    assert name_of(jobs[0]) == name_of(jobs[1]) != name_of(jobs[2])
    assert name_of(jobs[0]).startswith("weights-")


def test_the_claim_of_the_chart_is_made_once_belongs_to_no_model_and_is_never_changed_or_deleted() -> None:
    using = settings(TEMPLATE)
    world, decision = resolved({}, using)
    made = find(world.shared, "PersistentVolumeClaim")
    assert name_of(made) == "neuron-serving-weights"
    assert owners_of(made) == []
    assert made["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "efs",
        "resources": {"requests": {"storage": "1Ti"}},
    }
    world, decision = stepped(world, decision, using)
    smaller = settings({"storage": {"weights": {"pvcTemplate": {"size": "1Gi"}}}})
    for later in (smaller, SETTINGS):
        world, decision = settle(world, later)
        assert find(world.shared, "PersistentVolumeClaim")["spec"] == made["spec"]
        assert "PersistentVolumeClaim" not in {gone["kind"] for gone in decision.delete}


def test_a_new_place_in_the_chart_moves_no_model_that_is_served() -> None:
    world, before = stepped(*resolved({}, SETTINGS), SETTINGS)
    _, after = settle(having_served(world), settings(TEMPLATE))
    assert find(after.desired, "Deployment") == find(before.desired, "Deployment")
    assert kinds(after).isdisjoint({"PersistentVolumeClaim", "Job"})
    assert condition(after.status, "WeightsReady")["reason"] == "FetchedByPods"


@pytest.mark.parametrize(("code", "is_fetched_again"), [(14, True), (16, True), (1, False), (31, False)])
def test_a_replica_that_misses_the_weights_has_them_fetched_again(code: int, is_fetched_again: bool) -> None:
    world, decision = stepped(*resolved({"storage": CLAIM}))
    kept = [made for made in world.shared if made["kind"] == "ConfigMap" and name_of(made).startswith("weights-")]
    assert len(kept) == 1
    made_at = {**kept[0], "metadata": {**kept[0]["metadata"], "creationTimestamp": "2026-03-01T11:00:00Z"}}
    shared = tuple(made_at if obj is kept[0] else obj for obj in world.shared if obj["kind"] != "Job")
    end = ended(code, failure_record(code, "x", "weights are missing", "serve"))
    end["terminated"]["finishedAt"] = "2026-03-01T11:59:00Z"
    pod = serving_pod(find(decision.desired, "Deployment"), state=end)
    world = replace(world, shared=shared, pods=(pod,))
    found = decide(world, SETTINGS)
    assert ([name_of(gone) for gone in found.delete] == [name_of(kept[0])]) == is_fetched_again
    again = decide(carried_out(world, found), SETTINGS)
    assert ("Job" in kinds(again)) == is_fetched_again
    assert find(again.desired, "Deployment") == find(decision.desired, "Deployment")


UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found."


def with_fetch_pod(state: Object, **fields: Any) -> tuple[World, Decision]:
    world, decision = resolved({"storage": CLAIM})
    job = find(decision.desired, "Job")
    pod = {**job_pod(job, state, "fetch-x", **fields), "spec": job["spec"]["template"]["spec"]}
    world = replace(world, pods=(*world.pods, pod))
    return world, decide(world, SETTINGS)


def test_a_claim_that_is_not_bound_is_named_until_the_job_starts() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNBOUND}
    world, decision = with_fetch_pod({}, phase="Pending", conditions=[unscheduled])
    found = condition(decision.status, "WeightsReady")
    assert found["reason"] == "VolumeNotBound"
    assert "unbound immediate PersistentVolumeClaims" in found["message"]
    assert "kubectl describe pvc models" in found["message"]
    assert Need.CLAIM_EVENTS in decision.needs
    said = tuple(
        {"regarding": {"kind": "PersistentVolumeClaim", "name": name}, "reason": reason, "note": note}
        for name, reason, note in (
            ("models", "WaitForFirstConsumer", "waiting for first consumer"),
            ("models", "ProvisioningFailed", 'storageclass "efs" not found'),
            ("others", "FailedBinding", "no volumes"),
        )
    )
    told = decide(replace(world, claim_events=said), SETTINGS)
    message = condition(told.status, "WeightsReady")["message"]
    assert 'claim models: ProvisioningFailed: storageclass "efs" not found; see docs/' in message
    *others, pod = carried_out(world, decision).pods
    running = {"phase": "Running", "containerStatuses": [{"name": "runtime", "state": {"running": {}}}]}
    world = replace(carried_out(world, decision), pods=(*others, {**pod, "status": running}))
    assert condition(decide(world, SETTINGS).status, "WeightsReady")["reason"] == "Fetching"


@pytest.mark.parametrize(
    ("code", "reason"),
    [(11, "WeightsUnauthorized"), (14, "ChecksumMismatch"), (15, "StorageFull"), (1, "Fetching"), (10, "Fetching")],
)
def test_the_end_of_the_job_is_the_reason(code: int, reason: str) -> None:
    record = failure_record(code, "x", "needs 3,400 more bytes", "fetch")
    found = condition(with_fetch_pod(ended(code, record))[1].status, "WeightsReady")
    assert found["reason"] == reason
    assert "needs 3,400 more bytes" in found["message"]


def test_a_missing_secret_of_the_chart_is_named_at_the_step_that_waits_for_it() -> None:
    state = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "proxy" not found'}}
    found = condition(with_fetch_pod(state, phase="Pending")[1].status, "WeightsReady")
    assert found["reason"] == "SecretNotFound"
    assert 'secret "proxy" not found; create it;' in found["message"], "no field of the engine is its cure"


def test_a_job_for_a_claim_takes_the_group_that_the_replicas_read_it_with() -> None:
    group = {"podTemplate": {"spec": {"securityContext": {"fsGroup": 2000}}}}
    for storage, expected in ((CLAIM, 2000), (STORE, None)):
        pod, _ = pod_of(find(resolved({"storage": storage, **group})[1].desired, "Job"))
        assert pod["securityContext"].get("fsGroup") == expected


def test_a_record_about_other_weights_is_not_believed() -> None:
    world, decision = resolved({"storage": CLAIM})
    job = find(decision.desired, "Job")
    pod = successful_pod(job)
    status = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    status["message"] = status["message"].replace(FACTS["digest"], "sha256:other")
    _, decision = settle(replace(world, pods=(*world.pods, pod)), SETTINGS)
    assert condition(decision.status, "WeightsReady")["status"] == "False"
