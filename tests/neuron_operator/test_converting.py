"""Quantized weights: a Job converts them once, between fetching and compiling, and replicas read the result."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers.operator_worlds import (
    CONVERSION,
    FACTS,
    FIGURES,
    NOW,
    SETTINGS,
    SPEC,
    carried_out,
    condition,
    ended,
    failure_record,
    find,
    finished,
    fresh,
    job_pod,
    resolved_pod,
    serving_pod,
    settings,
    settle,
    stepped,
    successful_pod,
)
from neuron_operator.api import names
from neuron_operator.decide.adapter import decide_adapter
from neuron_operator.decide.course import decide
from neuron_operator.kubectl import why
from neuron_operator.read.objects import kind_of, name_of
from neuron_operator.read.views import observe
from neuron_operator.read.world import Decision, FreeDevices, NodeDevices, Object, Settings, World

CONVERTED = FACTS | {"conversion": CONVERSION}
CLAIM = {"weights": {"persistentVolumeClaim": {"claimName": "models"}}}
STORE = {"weights": {"objectStore": {"uri": "s3://bucket/weights"}}}
INT8 = {"serving": {"quantization": "Int8"}, "storage": CLAIM}
IN_VOLUME = {"model": {"uri": "pvc://llm/tiny"}}
ON_DEVICES = {
    "engine": {"backend": "nxdi"},
    "accelerator": {},
    "storage": {**CLAIM, "artifacts": {"persistentVolumeClaim": {"claimName": "graphs"}}},
}
FREE = FreeDevices((NodeDevices("n1", 6, 6, 0, 0, labels={"node.kubernetes.io/instance-type": "inf2.24xlarge"}),))

TRN2 = FreeDevices((NodeDevices("n1", 16, 16, 0, 0, labels={"node.kubernetes.io/instance-type": "trn2.48xlarge"}),))


def resolved(
    spec: Object, facts: dict[str, Any] = CONVERTED, using: Settings = SETTINGS, **metadata: Any
) -> tuple[World, Decision]:
    """The state in which the model is resolved."""
    world = replace(fresh(spec={**SPEC, **spec}, **metadata), free=FREE)
    world, decision = settle(world, using)
    world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job"), facts),)), using)
    return settle(finished(world), using)


def after_job(world: World, decision: Decision) -> tuple[World, Decision]:
    """The state after the Job that is wanted succeeded."""
    world, _ = settle(replace(world, pods=(*world.pods, successful_pod(find(decision.desired, "Job")))))
    return settle(finished(world))


def job_of(decision: Decision) -> tuple[Object, Object, list[str]]:
    """The Job that is wanted, its pod and the command."""
    job = find(decision.desired, "Job")
    pod = job["spec"]["template"]["spec"]
    return job, pod, pod["containers"][0]["command"]


def document(decision: Decision) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(find(decision.desired, "ConfigMap")["data"]["config.json"])
    return found


def jobs(decision: Decision) -> list[str]:
    return [name_of(made) for made in decision.desired if made["kind"] == "Job"]


def test_weights_are_fetched_then_converted_then_compiled_and_only_then_served() -> None:
    world, decision = resolved({**INT8, **ON_DEVICES})
    reasons, prefixes = [], []
    while jobs(decision):
        assert "Deployment" not in map(kind_of, decision.desired)
        first = next(one for one in decision.status["conditions"] if one["status"] == "False")  # type: ignore[index]
        reasons.append((first["type"], first["reason"]))
        prefixes.append(jobs(decision)[0].partition("-")[0])
        world, decision = after_job(world, decision)
    assert prefixes == ["weights", "converted", "artifact"]
    assert reasons == [("WeightsReady", "Fetching"), ("WeightsReady", "Converting"), ("Compiled", "Compiling")]
    assert "Deployment" in map(kind_of, decision.desired)
    ready = condition(decision.status, "WeightsReady")
    assert ready["message"] == f"3400000 bytes, int8, at {CONVERSION['digest']} are in claim models"


def test_the_facts_are_asked_for_the_engine_and_the_wish() -> None:
    def asked(**spec: Any) -> list[str]:
        _, decision = settle(replace(fresh(spec={**SPEC, **spec}), free=FREE))
        return job_of(decision)[2][3:]

    end = ["--record", names.TERMINATION_LOG]
    assert asked() == end, "the torch backend reads every format"
    assert asked(serving={"quantization": "Int8"}) == [*end, "--backend", "torch", "--quantization", "int8"]
    assert asked(**ON_DEVICES) == [*end, "--backend", "nxdi"]
    both = asked(**ON_DEVICES, serving={"quantization": "None"})
    assert both == [*end, "--backend", "nxdi", "--quantization", "none"]


def test_the_job_reads_what_was_fetched_on_a_node_without_devices_with_room_to_measure_the_result() -> None:
    _, decision = after_job(
        *resolved({**INT8, "model": {"uri": "hf://acme/tiny", "credentialsSecretRef": {"name": "k"}}})
    )
    job, pod, command = job_of(decision)
    assert command == [
        *("neuron-runtime", "convert", "hf://acme/tiny", names.WEIGHTS_DIR, "--digest", FACTS["digest"]),
        *("--backend", "torch", "--quantization", "int8", "--converted", CONVERSION["digest"]),
        *("--record", names.TERMINATION_LOG),
    ]
    (container,) = pod["containers"]
    names_of = [variable["name"] for variable in container["env"]]
    assert names_of == ["HF_TOKEN", "HOME"], "what somebody deleted meanwhile is fetched again"
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "weights"]
    assert "readOnly" not in mount
    (term,) = pod["affinity"]["nodeAffinity"][names.REQUIRED_AFFINITY]["nodeSelectorTerms"]
    assert names.NEURON_PRESENT_LABEL in [rule["key"] for rule in term["matchExpressions"]]
    assert container["resources"] == {"requests": {"cpu": "1000m", "memory": "576Mi"}}, "the demo model is small"
    notes = job["spec"]["template"]["metadata"]["annotations"]
    assert notes["karpenter.sh/do-not-disrupt"] == "true"
    wide = CONVERTED | {"vocabularySize": 128_256, "hiddenSize": 4096, "numLayers": 32, "dtype": "bfloat16"}
    requested = []
    for parameters in (8 * 10**9, 70 * 10**9):
        _, decision = after_job(*resolved(INT8, wide | {"parameters": parameters, "weightsBytes": 2 * parameters}))
        requested.append(job_of(decision)[1]["containers"][0]["resources"]["requests"]["memory"])
    assert requested == ["5248Mi", "512Mi"], "of so large a model a few rows are in memory, and nothing is measured"


def test_a_model_that_is_read_in_place_is_converted_from_its_volume_without_a_copy() -> None:
    world, decision = resolved({**INT8, **IN_VOLUME})
    _, pod, command = job_of(decision)
    assert command[1:4] == ["convert", "pvc://llm/tiny", names.WEIGHTS_DIR]
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in pod["containers"][0]["volumeMounts"]}
    assert (mounts["/mnt/claims/llm"], mounts[names.WEIGHTS_DIR]) == (True, False)
    _, decision = after_job(world, decision)
    pod = find(decision.desired, "Deployment")["spec"]["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} >= {"weights"}
    assert "model" not in {volume["name"] for volume in pod["volumes"]}, "replicas read the converted weights alone"
    assert pod["containers"][0]["command"][-4:] == ["--weights-dir", names.WEIGHTS_DIR, "--on-weights-miss", "fail"]
    assert document(decision)["model"] == {
        "uri": "pvc://llm/tiny",
        "digest": FACTS["digest"],
        "converted": CONVERSION["digest"],
    }
    assert document(decision)["quantization"] == "int8"


def test_the_compile_job_reads_the_converted_weights_from_a_bucket_too() -> None:
    world, decision = resolved({**INT8, **ON_DEVICES, "storage": {**ON_DEVICES["storage"], **STORE}})  # type: ignore[dict-item]
    assert job_of(decision)[2][3] == "s3://bucket/weights"
    world, decision = after_job(world, decision)
    assert job_of(decision)[2][1:4] == ["convert", "hf://acme/tiny", "s3://bucket/weights"]
    assert job_of(decision)[1]["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "73Mi"
    world, decision = after_job(world, decision)
    job, _, command = job_of(decision)
    assert command[command.index("--weights-store") + 1] == "s3://bucket/weights"
    told = json.loads(job["spec"]["template"]["metadata"]["annotations"][names.CONFIG_ANNOTATION])
    assert told["model"]["converted"] == CONVERSION["digest"]
    assert told["quantization"] == "int8"


def test_models_of_one_source_share_the_download_and_those_of_one_format_the_conversion() -> None:
    fp8 = FACTS | {"conversion": CONVERSION | {"digest": "c1" * 32, "format": "fp8"}}
    wishes = [
        (INT8, CONVERTED),
        (INT8 | {"replicas": 3}, CONVERTED),
        ({**INT8, "serving": {"quantization": "Fp8"}}, fp8),
    ]
    fetches, conversions = [], []
    for number, (spec, facts) in enumerate(wishes):
        world, decision = resolved(spec, facts, name=f"m{number}", uid=f"uid-{number}")
        fetches.append(jobs(decision))
        _, decision = after_job(world, decision)
        conversions.append(jobs(decision))
    assert fetches[0] == fetches[1] == fetches[2]
    assert conversions[0] == conversions[1] != conversions[2]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (15, "StorageFull"),
        (16, "WeightsMissing"),
        (14, "ChecksumMismatch"),
        (17, "ConversionFailed"),
        (1, "Converting"),
        (137, "Converting"),
    ],
)
def test_the_end_of_the_job_is_the_reason_and_it_is_tried_again(code: int, reason: str) -> None:
    world, decision = after_job(*resolved(INT8))
    job = find(decision.desired, "Job")
    failed = successful_pod(job)
    failed["status"]["phase"] = "Failed"
    failed["status"]["containerStatuses"][0]["state"] = ended(code, failure_record(code, "x", "no room", "convert"))
    world = replace(world, pods=(*world.pods, failed))
    found = condition(decide(world, SETTINGS).status, "WeightsReady")
    assert found["reason"] == reason
    assert "no room" in found["message"]
    decision = decide(finished(world, "Failed"), SETTINGS)
    (expiry,) = [change for change in decision.changes if change.live["metadata"]["name"] == name_of(job)]
    assert expiry.patch == {"spec": {"ttlSecondsAfterFinished": 1}}, "then it is made again"


@pytest.mark.parametrize(("limit", "says"), [("2Gi", "its limit is 2Gi"), ("", "it has no limit")])
def test_a_conversion_without_enough_memory_has_failed_and_its_job_is_made_again(limit: str, says: str) -> None:
    own = {"jobs": {"resources": {"limits": {"memory": limit}}}} if limit else {}
    world, decision = after_job(*resolved({**INT8, **own}))
    job = find(decision.desired, "Job")
    killed = successful_pod(job)
    killed["spec"] = job["spec"]["template"]["spec"]
    killed["status"]["phase"] = "Failed"
    killed["status"]["containerStatuses"][0]["state"] = ended(137, "tiny: 40%\n", reason="OOMKilled")
    decision = decide(replace(finished(world, "Failed"), pods=(*world.pods, killed)), SETTINGS)
    found = condition(decision.status, "WeightsReady")
    assert found["reason"] == "ConversionFailed"
    assert found["message"].startswith(
        f"the conversion ran out of memory, {says}: tiny: 40%; set jobs.resources.limits.memory to more; the operator "
        "tries again"
    )
    assert condition(decision.status, "Stalled")["reason"] == "ConversionFailed"
    (expiry,) = [change for change in decision.changes if change.live["metadata"]["name"] == name_of(job)]
    assert expiry.patch == {"spec": {"ttlSecondsAfterFinished": 1}}, "then it is made again"


def test_a_replica_that_misses_the_converted_weights_has_them_fetched_and_converted_again() -> None:
    world, decision = stepped(*resolved(INT8))
    long_ago = "2026-03-01T11:00:00Z"
    shared = tuple(
        {**obj, "metadata": {**obj["metadata"], "creationTimestamp": long_ago}}
        for obj in world.shared
        if obj["kind"] != "Job"
    )
    end = ended(16, failure_record(16, "x", "the store lacks it", "serve"))
    end["terminated"]["finishedAt"] = "2026-03-01T11:59:00Z"
    pod = serving_pod(find(decision.desired, "Deployment"), state=end)
    world, again = replace(world, shared=shared, pods=(pod,)), decision
    roles = []
    for _ in range(2):
        for _ in range(2):
            again = decide(world, SETTINGS)
            world = carried_out(world, again)
        role = find(again.desired, "Job")["metadata"]["labels"][names.ROLE_LABEL]
        roles.append(role)
        world = replace(world, pods=(*world.pods, successful_pod(find(again.desired, "Job"))))
        world = carried_out(world, decide(world, SETTINGS))
        now = "2026-03-01T12:00:00Z"
        world = replace(
            world,
            shared=tuple(
                obj
                if "creationTimestamp" in obj["metadata"]
                else {**obj, "metadata": {**obj["metadata"], "creationTimestamp": now}}
                for obj in finished(world).shared
            ),
        )
    assert roles == ["fetch", "convert"]
    assert find(again.desired, "Deployment") == find(decision.desired, "Deployment")


def test_what_is_converted_for_a_revision_is_not_deleted_from_the_claim() -> None:
    _, decision = stepped(*resolved(INT8))
    template = find(decision.desired, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    kept = container["command"][container["command"].index("--keep") + 1 :]
    assert CONVERSION["digest"] in kept


def test_without_a_shared_place_torch_quantizes_as_it_loads_and_a_compiled_model_is_refused() -> None:
    _, decision = resolved({**INT8, "storage": {}})
    assert jobs(decision) == []
    assert "converted" not in document(decision)["model"]
    assert document(decision)["quantization"] == "int8"
    artifacts = {"artifacts": ON_DEVICES["storage"]["artifacts"]}  # type: ignore[index]
    _, decision = resolved({**INT8, **ON_DEVICES, "storage": artifacts})
    refused = condition(decision.status, "Accepted")
    assert refused["reason"] == "StorageNotConfigured"
    assert "spec.storage.weights: the weights are to be converted (int8), which needs a place" in refused["message"]


def test_an_engine_that_converts_nothing_ignores_what_was_found_for_another() -> None:
    using = settings({"engines": {"vllm": {"image": "vllm"}}, "engine_defaults": {"trn2": "vllm"}})
    spec = {"engine": {}, "accelerator": {}, "storage": CLAIM}
    world, decision = settle(replace(fresh(spec={"model": SPEC["model"], **spec}), free=TRN2), using)
    world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job"), CONVERTED),)), using)
    _, decision = settle(finished(world), using)
    assert jobs(decision)[0].startswith("weights-")
    pinned = find(decision.desired, "ControllerRevision")["data"]
    assert "conversion" not in pinned["facts"]


def test_the_status_tells_what_the_conversion_changed() -> None:
    world, decision = after_job(*resolved(INT8))
    assert decision.status is not None
    assert "conversion" not in decision.status, "nothing is known of it yet"
    _, decision = stepped(world, decision)
    assert decision.status is not None
    assert decision.status["conversion"] == {
        "format": "int8",
        "digest": CONVERSION["digest"],
        "bytes": 3_400_000,
        "layerError": "0.0081",
        "perplexity": "12.12",
        "convertedPerplexity": "12.13",
    }
    assert FIGURES["convertedPerplexity"] == 12.131


def test_kubectl_tells_what_the_conversion_changed_or_why_that_is_unknown() -> None:
    world, _ = stepped(*resolved(INT8))
    assert "\n  weights   converted to int8; largest error of a layer 0.0081; perplexity 12.13, before 12.12\n" in (
        why.report(world.body, observe(world), (), "")
    )
    told = {**world.body["status"]["conversion"], "unmeasured": "70,000,000,000 parameters take too long"}
    for name in ("perplexity", "convertedPerplexity"):
        del told[name]
    status = {**world.body["status"], "conversion": told}
    text = why.report({**world.body, "status": status}, observe(world), (), "")
    assert "a layer 0.0081; 70,000,000,000 parameters take too long\n" in text


@pytest.mark.parametrize("backend", ["torch", "nxdi"])
def test_facts_of_quantized_weights_are_read_again_for_another_engine(backend: str) -> None:
    """What is to be converted depends on the engine; other edits keep facts and digest."""
    stored = FACTS | {"quantization": "fp8: fp8 in blocks of 128 x 128", "dtype": "float8_e4m3fn"}
    for facts, again in ((stored, backend == "nxdi"), (FACTS, False)):
        world, _ = stepped(*resolved({"storage": ON_DEVICES["storage"]}, facts))
        edit = {**SPEC, **ON_DEVICES, "engine": {"backend": backend}, "serving": {"maxSequences": 2}}
        _, decision = settle(replace(world, body={**world.body, "spec": edit}))
        assert any(name.startswith("facts-") for name in jobs(decision)) == again


def test_facts_of_quantized_weights_are_read_again_for_the_engine_that_the_devices_choose() -> None:
    using = settings({"engines": {"vllm": {"image": "vllm"}}, "engine_defaults": {"trn2": "vllm"}})
    stored = FACTS | {"quantization": "fp8: fp8 in blocks of 128 x 128", "dtype": "float8_e4m3fn"}
    spec = {"engine": {}, "accelerator": {}, "storage": ON_DEVICES["storage"]}
    for free, facts, again in ((FREE, stored, True), (FREE, FACTS, False), (TRN2, stored, False)):
        world = replace(fresh(spec={"model": SPEC["model"], **spec}), free=free)
        world, decision = settle(world, using)
        assert "--backend" not in job_of(decision)[2], "either engine may have it"
        world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job"), facts),)), using)
        world, decision = settle(finished(world), using)
        assert jobs(decision)[0].startswith("facts-" if again else "weights-")
        if not again:
            continue
        assert job_of(decision)[2][-2:] == ["--backend", "nxdi"]
        told = resolved_pod(find(decision.desired, "Job"), stored | {"conversion": CONVERSION})
        told["metadata"]["name"] = "resolve-y"
        world, _ = settle(replace(world, pods=(*world.pods, told)), using)
        world, decision = settle(finished(world), using)
        pinned = find(decision.desired, "ControllerRevision")["data"]["config"]
        assert (pinned["backend"], pinned["model"]["converted"]) == ("nxdi", CONVERSION["digest"])
        assert jobs(decision)[0].startswith("weights-")


def test_an_edit_that_moves_a_quantized_model_to_an_engine_that_converts_reads_it_again() -> None:
    using = settings({"engines": {"vllm": {"image": "vllm"}}, "engine_defaults": {"trn2": "vllm"}})
    stored = FACTS | {"quantization": "fp8: fp8 in blocks of 128 x 128", "dtype": "float8_e4m3fn"}
    spec = {"model": SPEC["model"], "storage": ON_DEVICES["storage"]}
    world, decision = settle(replace(fresh(spec=spec), free=TRN2), using)
    world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job"), stored),)), using)
    world, _ = settle(finished(world), using)
    chosen = {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "inf2.24xlarge"}}}}
    for edit, again in ((chosen, True), ({"serving": {"maxSequences": 2}}, False)):
        both = FreeDevices((*FREE.nodes, *TRN2.nodes))  # type: ignore[misc]
        edited = replace(world, body={**world.body, "spec": {**spec, **edit}}, free=both)
        _, decision = settle(edited, using)
        assert jobs(decision)[0].startswith("facts-" if again else "weights-")
        if again:
            assert job_of(decision)[2][-2:] == ["--backend", "nxdi"]


@pytest.mark.parametrize(
    ("uri", "kept"), [("hf://acme/tiny@main", True), ("s3://models/tiny", True), ("pvc://llm/tiny", False)]
)
def test_another_quantization_is_that_of_the_model_which_is_pinned(uri: str, kept: bool) -> None:
    """A branch may have moved since. What is read in place is there as it is."""
    model = {"model": {"uri": uri}}
    world, _ = stepped(*resolved({**model, "storage": CLAIM}, FACTS))
    for wanted in ("Int8", "None"):
        edit = {**SPEC, **model, "storage": CLAIM, "serving": {"quantization": wanted}}
        world, decision = settle(replace(world, body={**world.body, "spec": edit}))
        command = job_of(decision)[2]
        assert command[:2] == ["neuron-runtime", "inspect"]
        asked = command[command.index("--digest") + 1] if kept else ""
        assert asked == (FACTS["digest"] if kept else "")
    again = {**world.body["metadata"], "annotations": {names.REFRESH_ANNOTATION: "2"}}
    _, decision = settle(replace(world, body={**world.body, "metadata": again}))
    assert "--digest" not in job_of(decision)[2]


@pytest.mark.parametrize(("dtype", "again"), [("float8_e4m3fn", True), ("bfloat16", False)])
def test_facts_of_a_version_that_converted_nothing_are_read_again_for_a_new_decision(dtype: str, again: bool) -> None:
    """What never served is decided anew when the runtime image changes."""
    world, decision = resolved(ON_DEVICES, FACTS | {"dtype": dtype})
    assert jobs(decision)[0].startswith("weights-")
    _, decision = settle(world, replace(SETTINGS, runtime_image="registry.example/neuron-serving-runtime:2"))
    assert jobs(decision)[0].startswith("facts-" if again else "weights-")


def test_a_format_that_the_model_cannot_have_is_told_before_anything_is_fetched() -> None:
    world, decision = settle(replace(fresh(spec={**SPEC, **INT8}), free=FREE))
    said = "--quantization is int8, but the checkpoint is quantized already (fp8: fp8 per tensor)"
    state = ended(2, failure_record(2, "InvalidEngineConfig", said))
    world = replace(world, pods=(job_pod(find(decision.desired, "Job"), state),))
    found = condition(decide(world, SETTINGS).status, "ModelResolved")
    assert found["reason"] == "InvalidEngineConfig"
    assert said in found["message"]


def test_an_adapter_is_checked_with_the_converted_model_and_fetched_beside_it() -> None:
    """The claim has no other entry of a model that is read in place."""
    spec = {**INT8, **IN_VOLUME, "serving": {"quantization": "Int8", "adapters": {"maxActive": 2}}}
    model, decision = stepped(*resolved(spec))
    assert decision.status is not None
    adapter = {
        "apiVersion": names.API_VERSION,
        "kind": names.ADAPTER_KIND,
        "metadata": {"name": "de", "namespace": "team", "uid": "uid-de", "generation": 1},
        "spec": {"model": "chat", "uri": "hf://acme/de"},
    }
    base = {**model.body, "status": decision.status}
    told = World(body=adapter, children=(), pods=(), now=NOW, base=base, of_base=model.children, has_turn=True)
    _, pod, command = job_of(decide_adapter(told, SETTINGS))
    assert command[command.index("--adapter-of") + 1] == f"file://{names.WEIGHTS_DIR}/{CONVERSION['digest']}"
    assert {"name": "weights", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]


def test_an_adapter_in_the_claim_of_a_converted_model_is_read_there() -> None:
    spec = {**INT8, **IN_VOLUME, "serving": {"quantization": "Int8", "adapters": {"maxActive": 2}}}
    model, decision = stepped(*resolved(spec))
    assert decision.status is not None
    pod = find(decision.desired, "Deployment")["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/mnt/claims/llm"] is True
    adapter = {
        "apiVersion": names.API_VERSION,
        "kind": names.ADAPTER_KIND,
        "metadata": {"name": "de", "namespace": "team", "uid": "uid-de", "generation": 1},
        "spec": {"model": "chat", "uri": "pvc://llm/de"},
    }
    base = {**model.body, "status": decision.status}
    told = World(body=adapter, children=(), pods=(), now=NOW, base=base, of_base=model.children, has_turn=True)
    _, pod, _ = job_of(decide_adapter(told, SETTINGS))
    assert {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]} >= {
        "/mnt/claims/llm",
        names.WEIGHTS_DIR,
    }
