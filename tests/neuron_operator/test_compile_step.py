"""The Compile step: one Job for each artifact, more memory if it runs out, and replicas that only read the artifact."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kubernetes.utils.quantity import parse_quantity

from helpers.failures import check_says
from helpers.operator_worlds import (
    COMPILED,
    FACTS,
    NOW,
    SETTINGS,
    body,
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
    said,
    serving_pod,
    settle,
    stepped,
    stored,
)
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import Claim, ObjectStore
from neuron_operator.decide.course import decide
from neuron_operator.decide.pin import pin
from neuron_operator.read.objects import labels_of, name_of
from neuron_operator.read.records import Facts
from neuron_operator.read.world import (
    Decision,
    JobSettings,
    Object,
    Place,
    Settings,
    StorageSettings,
    World,
)
from neuron_operator.render.jobs import compile_jobs as render_compile_jobs

PLACE = Place(persistent_volume_claim=Claim(claim_name="compiled", sub_path="models"))
USING = replace(
    SETTINGS, compile_image="registry.example/compiler:1", storage=StorageSettings(weights=Place(), artifacts=PLACE)
)
SPEC: dict[str, Any] = {
    "model": {"uri": "hf://acme/tiny"},
    "accelerator": {"type": "CPU"},
    "engine": {"backend": "torch", "compile": "Enabled"},
}
STORE = Place(object_store=ObjectStore(uri="s3://models/compiled"))
KEY = "ab" * 32
MIB = 2**20


def compiled_record(**changes: Any) -> str:
    artifact = {"key": KEY, "bytes": 7 * MIB, "seconds": 31.6, "reused": False, "peakBytes": 2**31, **changes}
    return json.dumps({"version": 1, "command": "compile", "ok": True, "artifact": artifact})


def resolved(using: Settings = USING, **spec: Any) -> tuple[World, Decision]:
    """The model is resolved and pinned; if it is compiled, its Job has been created."""
    world, decision = settle(fresh(spec={**SPEC, **spec}), using)
    job = find(decision.desired, "Job")
    return settle(replace(finished(world), pods=(resolved_pod(job),)), using)


def compile_jobs(world: World) -> list[Object]:
    return [found for found in world.shared if found["kind"] == "Job" and name_of(found).startswith("artifact-")]


def container_of(workload: Object) -> Object:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def memory_limit(job: Object) -> float:
    limits, requests = (container_of(job)["resources"][kind] for kind in ("limits", "requests"))
    assert limits["memory"] == requests["memory"]
    return float(parse_quantity(limits["memory"]))


def after(world: World, job: Object, state: Object, using: Settings = USING) -> tuple[World, Decision]:
    """The state once the pod of a Job ended, and the Job with it."""
    is_well = state["terminated"]["exitCode"] == 0
    pod = job_pod(job, state, f"{name_of(job)}-x", phase="Succeeded" if is_well else "Failed")
    pod = {**pod, "spec": job["spec"]["template"]["spec"]}
    kind = "Complete" if is_well else "Failed"
    over = {**job, "status": {"conditions": [{"type": kind, "status": "True", "message": "BackoffLimitExceeded"}]}}
    shared = tuple(over if found is job else found for found in world.shared)
    return settle(replace(world, shared=shared, pods=(*world.pods, pod)), using)


def compiled(using: Settings = USING, **spec: Any) -> tuple[World, Decision]:
    world, _ = resolved(using, **spec)
    (job,) = compile_jobs(world)
    return after(world, job, ended(0, compiled_record()), using)


OUT_OF_MEMORY = ended(137, "neuron-runtime: decode of 8 rows", reason="OOMKilled")


def test_a_model_is_compiled_before_a_replica_exists() -> None:
    world, decision = resolved()
    (job,) = compile_jobs(world)
    assert "Deployment" not in {found["kind"] for found in decision.desired}
    waiting = condition(decision.status, "Compiled")
    assert (waiting["status"], waiting["reason"], said(waiting)) == ("False", "Compiling", "compiling the model")
    assert container_of(job)["image"] == USING.compile_image
    assert container_of(job)["command"] == [
        *("neuron-runtime", "compile", "--config", "/etc/neuron-serving/config.json"),
        *("--artifacts-dir", "/var/lib/neuron-serving/artifacts", "--record", "/dev/termination-log"),
    ]
    claim = {"name": "artifacts", "mountPath": "/var/lib/neuron-serving/artifacts", "subPath": "models"}
    assert claim in container_of(job)["volumeMounts"]
    (terms,) = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"].values()
    (term,) = terms["nodeSelectorTerms"]
    required = {expression["key"]: expression for expression in term["matchExpressions"]}
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert required["neuron.amazonaws.com/present"]["operator"] == "DoesNotExist"


def test_the_job_gets_the_part_of_the_configuration_that_artifacts_depend_on() -> None:
    world, _ = resolved(serving={"maxSequences": 3, "chatTemplate": "secret {{ messages }}"})
    (job,) = compile_jobs(world)
    template = job["spec"]["template"]
    (volume,) = (volume for volume in template["spec"]["volumes"] if volume["name"] == "config")
    (item,) = volume["downwardAPI"]["items"]
    assert item == {
        "path": "config.json",
        "fieldRef": {"fieldPath": "metadata.annotations['neuron-serving.dev/config']"},
    }
    document = json.loads(template["metadata"]["annotations"]["neuron-serving.dev/config"])
    assert document["compile"] is True
    assert document["limits"] == {"maxSequences": 3}
    assert document["model"] == {"digest": "sha256:0123456789abcdef", "uri": "hf://acme/tiny"}
    assert "chat" not in str(job["spec"])


@pytest.mark.parametrize(
    ("changed", "is_shared"),
    [
        ({"replicas": 7}, True),
        ({"model": {"uri": "hf://acme/tiny", "servedNames": ["other"]}}, True),
        ({"serving": {"accessLog": "Disabled", "maxQueuedRequests": 3}}, True),
        ({"serving": {"dtype": "float32"}}, False),
        ({"serving": {"maxSequences": 3}}, False),
        ({"model": {"uri": "hf://acme/other"}}, False),
        ({"engine": {"backend": "torch", "compile": "Enabled", "image": "registry.example/other:1"}}, False),
        ({"jobs": {"resources": {"limits": {"memory": "9Gi"}}}}, False),
    ],
)
def test_models_share_a_job_if_they_share_an_artifact(changed: dict[str, Any], is_shared: bool) -> None:
    (one,), (two,) = (compile_jobs(resolved(**spec)[0]) for spec in ({}, changed))
    assert (name_of(one) == name_of(two)) == is_shared
    assert (one["spec"] == two["spec"]) == is_shared


def test_replicas_read_the_artifact_and_never_compile() -> None:
    _, decision = compiled()
    container = container_of(find(decision.desired, "Deployment"))
    assert container["command"][-4:] == [
        *("--artifacts-dir", "/var/lib/neuron-serving/artifacts", "--on-artifact-miss", "fail"),
    ]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "artifacts")
    assert mount["readOnly"] is True
    assert container["image"] == USING.runtime_image
    done = condition(decision.status, "Compiled")
    assert (done["status"], done["reason"]) == ("True", "Compiled")
    assert done["message"] == f"artifact {KEY} with {7 * MIB} bytes, compiled in 32 s"
    assert decision.status is not None
    assert decision.status["artifacts"] == [{"key": KEY, "state": "Ready", "seconds": 32}]


def test_an_artifact_in_an_object_store_is_read_by_its_uri() -> None:
    using = replace(USING, storage=StorageSettings(artifacts=STORE))
    world, _ = resolved(using)
    (job,) = compile_jobs(world)
    assert "--artifacts-store s3://models/compiled" in " ".join(container_of(job)["command"])
    _, decision = after(world, job, ended(0, compiled_record(reused=True)), using)
    command = " ".join(container_of(find(decision.desired, "Deployment"))["command"])
    assert "--artifacts-store s3://models/compiled --on-artifact-miss fail" in command
    assert condition(decision.status, "Compiled")["message"].endswith("found in its store")


@pytest.mark.parametrize(
    ("weights", "folder", "has_token"),
    [(Place(), "", True), (PLACE, "--weights-dir /var/lib/neuron-serving/weights", False), (STORE, "", True)],
)
def test_the_compiler_reads_the_model_where_it_is_and_has_credentials_only_to_download(
    weights: Place, folder: str, has_token: bool
) -> None:
    source = {"uri": "hf://acme/tiny", "credentialsSecretRef": {"name": "token"}}
    model = parse(body({**SPEC, "model": source}))
    using = replace(USING, storage=StorageSettings(weights=weights, artifacts=PLACE))
    revision = pin(model, msgspec.convert(FACTS, Facts), using, 1)
    container = container_of(render_compile_jobs(model, using, revision)[0])
    assert folder in " ".join(container["command"])
    assert ("HF_TOKEN" in {variable["name"] for variable in container["env"]}) == has_token
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {"tmp": False, "config": True, **({"weights": True} if folder else {}), "artifacts": False}


def test_without_compiling_nothing_waits_for_an_artifact() -> None:
    for engine in ({"backend": "torch"}, {"backend": "torch", "compile": "Disabled"}):
        world, decision = resolved(engine=engine)
        assert compile_jobs(world) == []
        assert condition(decision.status, "Compiled")["reason"] == "NotRequired"
        assert "--artifacts-dir" not in container_of(find(decision.desired, "Deployment"))["command"]
        assert decision.status is not None
        assert "artifacts" not in decision.status


@pytest.mark.parametrize("place", [PLACE, Place()])
def test_a_model_that_names_its_artifact_is_not_compiled_and_its_pods_load_that_or_end(place: Place) -> None:
    named = {**SPEC["engine"], "env": [{"name": "NEURON_COMPILED_ARTIFACTS", "value": "/opt/compiled"}]}
    using = replace(USING, storage=StorageSettings(artifacts=place))
    world, decision = resolved(using, engine=named)
    assert compile_jobs(world) == []
    done = condition(decision.status, "Compiled")
    assert (done["status"], done["reason"]) == ("True", "NotRequired")
    assert "NEURON_COMPILED_ARTIFACTS of spec.engine.env" in done["message"]
    container = container_of(find(decision.desired, "Deployment"))
    assert "--on-artifact-miss fail" in " ".join(container["command"])
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts.get("artifacts") == (True if place is PLACE else None)
    missing = serving_pod(
        find(decision.desired, "Deployment"), last=ended(20, failure_record(20, "ArtifactMissing", "no")), restarts=1
    )
    after = decide(replace(world, pods=(*world.pods, missing)), using)
    assert compile_jobs(carried_out(world, after)) == []
    assert condition(after.status, "Ready")["reason"] == "ArtifactMissing"


def test_an_artifact_without_a_name_is_compiled() -> None:
    world, _ = resolved(engine={**SPEC["engine"], "env": [{"name": "NEURON_COMPILED_ARTIFACTS", "value": ""}]})
    assert len(compile_jobs(world)) == 1


def test_a_compiled_model_without_a_place_for_artifacts_is_refused_with_the_chart_value() -> None:
    _, decision = resolved(replace(USING, storage=StorageSettings()))
    refused = condition(decision.status, "Accepted")
    assert (refused["status"], refused["reason"]) == ("False", "StorageNotConfigured")
    assert "storage.artifacts.pvcTemplate.size=10Gi" in refused["message"]
    assert condition(decision.status, "Stalled")["status"] == "True"


def test_a_compiler_that_runs_out_of_memory_gets_twice_as_much_twice() -> None:
    world, _ = resolved()
    limits = []
    for _ in range(3):
        job = compile_jobs(world)[-1]
        limits.append(memory_limit(job))
        world, decision = after(world, job, OUT_OF_MEMORY)
    assert [limit / limits[0] for limit in limits] == [1, 2, 4]
    assert len(compile_jobs(world)) == 3, "the logs of the attempts can be read"
    failed = condition(decision.status, "Compiled")
    check_says("compiler-memory", failed)
    assert f"its limit is {limits[2] / MIB:.0f}Mi" in failed["message"]
    assert "set jobs.resources.limits.memory to more" in failed["message"]
    assert condition(decision.status, "Stalled")["reason"] == "CompileOutOfMemory"


def test_while_it_compiles_again_the_message_has_both_amounts() -> None:
    world, _ = resolved()
    (job,) = compile_jobs(world)
    _, decision = after(
        world, job, ended(22, failure_record(22, "CompileOutOfMemory", "decode: too little", "compile"))
    )
    again = condition(decision.status, "Compiled")
    small, large = (f"{times * memory_limit(job) / MIB:.0f}Mi" for times in (1, 2))
    assert (again["reason"], said(again)) == (
        "Compiling",
        f"compiling the model with {large} of memory, because {small} were not enough",
    )


def test_a_compiler_that_ran_out_of_all_memory_is_tried_again_with_the_most() -> None:
    world, _ = resolved()
    for _ in range(3):
        world, _ = after(world, compile_jobs(world)[-1], OUT_OF_MEMORY)
    largest = compile_jobs(world)[-1]
    expired = tuple(found for found in world.shared if found not in compile_jobs(world))
    world, decision = settle(replace(world, shared=expired, pods=world.pods[:1]), USING)
    assert [name_of(job) for job in compile_jobs(world)] == [name_of(largest)]
    assert condition(decision.status, "Compiled")["reason"] == "CompileOutOfMemory", "until this attempt ends"


@pytest.mark.parametrize("by", ["manifest", "chart"])
def test_memory_that_somebody_set_is_not_multiplied(by: str) -> None:
    resources = {"limits": {"memory": "3Gi"}, "requests": {"memory": "3Gi"}}
    using = replace(USING, jobs=JobSettings(resources=resources)) if by == "chart" else USING
    world, _ = resolved(using, **({"jobs": {"resources": resources}} if by == "manifest" else {}))
    (job,) = compile_jobs(world)
    world, decision = after(world, job, OUT_OF_MEMORY, using)
    assert len(compile_jobs(world)) == 1
    assert "its limit is 3Gi" in condition(decision.status, "Compiled")["message"]


def test_more_memory_in_the_charts_values_is_tried_at_once() -> None:
    world, _ = resolved()
    for _ in range(3):
        world, _ = after(world, compile_jobs(world)[-1], OUT_OF_MEMORY)
    cured = replace(USING, jobs=JobSettings(resources={"limits": {"memory": "64Gi"}, "requests": {"memory": "64Gi"}}))
    decision = decide(world, cured)
    (again,) = decision.delete
    without = tuple(found for found in world.shared if name_of(found) != name_of(again))
    pods = tuple(pod for pod in world.pods if name_of(pod) != f"{name_of(again)}-x")
    decision = decide(replace(world, shared=without, pods=pods), cured)
    assert memory_limit(find(decision.desired, "Job")) == 64 * 2**30


def test_a_larger_attempt_that_succeeds_is_the_artifact() -> None:
    world, _ = resolved()
    world, _ = after(world, compile_jobs(world)[0], OUT_OF_MEMORY)
    world, decision = after(world, compile_jobs(world)[1], ended(0, compiled_record()))
    assert condition(decision.status, "Compiled")["status"] == "True"
    expired = tuple(found for found in world.shared if found["kind"] != "Job")
    _, decision = settle(replace(world, shared=expired, pods=()), USING)
    assert condition(decision.status, "Compiled")["status"] == "True", "its record is kept"


def test_a_compiler_that_fails_is_quoted() -> None:
    world, _ = resolved()
    (job,) = compile_jobs(world)
    record = failure_record(21, "CompileFailed", "decode of 8 rows: g++: internal compiler error", "compile")
    world, decision = after(world, job, ended(21, record))
    failed = condition(decision.status, "Compiled")
    assert failed["reason"] == "CompileFailed"
    assert "internal compiler error" in failed["message"]
    assert decision.status is not None
    assert decision.status["artifacts"] == [{"key": name_of(job), "state": "Failed"}]


@pytest.mark.parametrize(
    ("code", "reason"), [(15, "StorageFull"), (11, "WeightsUnauthorized"), (2, "InvalidEngineConfig")]
)
def test_what_a_job_lacks_to_compile_is_a_reason_of_compiled(code: int, reason: str) -> None:
    world, _ = resolved()
    (job,) = compile_jobs(world)
    _, decision = after(world, job, ended(code, failure_record(code, reason, "7 of 9 bytes", "compile")))
    found = condition(decision.status, "Compiled")
    assert found["reason"] == reason
    assert found["message"].startswith("7 of 9 bytes; the operator tries again")
    assert condition(decision.status, "WeightsReady")["status"] == "True"


def test_the_earlier_revision_serves_until_the_artifact_of_an_edit_is_there() -> None:
    world, before = compiled()
    edit = {**SPEC, "serving": {"dtype": "float32"}}
    world, decision = settle(replace(world, body={**world.body, "spec": edit}), USING)
    assert find(decision.desired, "Deployment") == find(before.desired, "Deployment")
    behind = condition(decision.status, "UpToDate")
    assert (behind["status"], behind["reason"]) == ("False", "Compiling")
    job = compile_jobs(world)[-1]
    assert decision.status is not None
    assert decision.status["artifacts"] == [
        {"key": name_of(job), "state": "Compiling"},
        {"key": KEY, "state": "Ready", "seconds": 32},
    ]
    world, decision = after(world, job, ended(0, compiled_record(key="cd" * 32)))
    assert find(decision.desired, "Deployment") != find(before.desired, "Deployment")


def test_an_edit_that_needs_no_other_artifact_compiles_nothing() -> None:
    world, before = compiled()
    world, decision = settle(
        replace(world, body={**world.body, "spec": {**SPEC, "serving": {"reasoningParser": "qwen3"}}}), USING
    )
    assert len(compile_jobs(world)) == 1
    assert labels_of(find(decision.desired, "Deployment")["spec"]["template"]) != labels_of(
        find(before.desired, "Deployment")["spec"]["template"]
    )


NEW_COMPILER = replace(USING, compile_image="registry.example/compiler:2")
NEW_RELEASE = replace(NEW_COMPILER, runtime_image="registry.example/runtime:2")


@pytest.mark.parametrize("newer", [NEW_COMPILER, NEW_RELEASE])
def test_new_images_of_the_installation_compile_no_artifact_again(newer: Settings) -> None:
    world, before = compiled()
    world, decision = settle(having_served(world), newer)
    assert len(compile_jobs(world)) == 1
    assert find(decision.desired, "Deployment") == find(before.desired, "Deployment")


@pytest.mark.parametrize("newer", [NEW_COMPILER, NEW_RELEASE])
def test_a_model_that_never_served_is_compiled_by_a_corrected_image_at_once(newer: Settings) -> None:
    world, decision = settle(resolved()[0], newer)
    assert [container_of(job)["image"] for job in compile_jobs(world)] == [newer.compile_image]
    assert condition(decision.status, "Compiled")["reason"] == "Compiling"


def test_a_lost_artifact_of_a_served_model_is_compiled_by_the_image_that_fits_its_runtime() -> None:
    world, _ = compiled()
    kept = tuple(found for found in world.shared if not name_of(found).startswith("artifact-"))
    for newer, image in ((NEW_COMPILER, NEW_COMPILER.compile_image), (NEW_RELEASE, USING.compile_image)):
        after_loss, _ = settle(having_served(replace(world, shared=kept, pods=())), newer)
        assert [container_of(job)["image"] for job in compile_jobs(after_loss)] == [image]


def test_a_replica_without_its_artifact_has_it_compiled_again() -> None:
    world, decision = compiled()
    at = NOW.isoformat()
    shared = stored(
        {**found, "metadata": {**found["metadata"], "creationTimestamp": "2026-03-01T11:00:00Z"}}
        if found["kind"] == "ConfigMap"
        else found
        for found in world.shared
    )
    message = failure_record(20, "ArtifactMissing", "no artifact of this configuration", "serve")
    gone = {**ended(20, message), "terminated": {**ended(20, message)["terminated"], "finishedAt": at}}
    pod = serving_pod(
        find(decision.desired, "Deployment"), state={"waiting": {"reason": "CrashLoopBackOff"}}, last=gone
    )
    decision = decide(replace(world, shared=shared, pods=(*world.pods, pod)), USING)
    assert {found["kind"] for found in decision.delete} == {"ConfigMap", "Job"}
    assert condition(decision.status, "Compiled")["reason"] == "Compiling"
    assert find(decision.desired, "Deployment")


def test_while_weights_are_fetched_again_the_artifact_stays_kept() -> None:
    weights = Place(persistent_volume_claim=Claim(claim_name="weights"))
    using = replace(USING, storage=StorageSettings(weights=weights, artifacts=PLACE))
    world, _ = stepped(*settle(fresh(spec=SPEC), using), using)
    lost = tuple(found for found in world.shared if not name_of(found).startswith("weights-"))
    world = replace(world, shared=lost, pods=())
    for _ in range(3):
        decision = decide(world, using)
        assert [name_of(gone) for gone in decision.delete if gone["kind"] == "ConfigMap"] == []
        cleaners = [made for made in decision.desired if made["kind"] == "CronJob"]
        assert [COMPILED["key"] in str(made) for made in cleaners] == [True, True]
        world = carried_out(world, decision)
    assert condition(decision.status, "WeightsReady")["reason"] == "Fetching"


@pytest.mark.parametrize(
    "lie", [{"seconds": 1e300}, {"seconds": -1}, {"bytes": -1}, {"bytes": 2**64}, {"peakBytes": 10**40}]
)
def test_a_record_with_an_impossible_number_is_not_believed(lie: dict[str, Any]) -> None:
    world, _ = resolved()
    (job,) = compile_jobs(world)
    _, decision = after(world, job, ended(0, compiled_record(**lie)))
    assert condition(decision.status, "Compiled")["status"] == "False"
