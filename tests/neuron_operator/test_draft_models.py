"""A draft model is a second source of a revision: it is resolved, compared with its model, fetched and counted as the
model is, and pods find it where they find the model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from helpers.operator_worlds import (
    FACTS,
    SETTINGS,
    SPEC,
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
)
from neuron_operator.api import names
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import Claim, ObjectStore
from neuron_operator.api.reasons import MetricsOf
from neuron_operator.decide.course import decide
from neuron_operator.decide.pin import pin
from neuron_operator.kubectl import why
from neuron_operator.place.catalog import FAMILIES
from neuron_operator.place.sizing import Load, Widths, memory_of
from neuron_operator.read.records import Facts
from neuron_operator.read.views import observe
from neuron_operator.read.world import Decision, Object, Place, StorageSettings, Told, World
from neuron_operator.render.storage import compiling

CLAIM = {"weights": {"persistentVolumeClaim": {"claimName": "models"}}}
SMALL: dict[str, Any] = {
    **FACTS,
    "numLayers": 1,
    "parameters": 700_000,
    "weightsBytes": 1_400_000,
    "digest": "sha256:d",
}


def drafting(uri: str = "hf://acme/small", **more: Any) -> Object:
    source, storage = {"uri": uri, **more.pop("source", {})}, more.pop("storage", CLAIM)
    speculation = {"method": "Draft", "numTokens": 3, "model": source}
    return {**SPEC, "serving": {"speculation": speculation}, "storage": storage, **more}


def answered(world: World, decision: Decision, facts: Object) -> tuple[World, Decision]:
    """The state after the Job that is wanted has reported these facts."""
    world, _ = settle(replace(world, pods=(*world.pods, resolved_pod(find(decision.desired, "Job"), facts))))
    return settle(finished(world))


def resolved(spec: Object, draft: Object = SMALL, **metadata: Any) -> tuple[World, Decision]:
    """The state after the Jobs for both sources have reported."""
    world, decision = answered(*settle(fresh(spec=spec, **metadata)), FACTS)
    return answered(world, decision, draft)


def command_of(workload: Object) -> list[str]:
    return list(workload["spec"]["template"]["spec"]["containers"][0]["command"])


def mounts_of(workload: Object) -> list[tuple[str, str]]:
    container = workload["spec"]["template"]["spec"]["containers"][0]
    return [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]]


def test_both_sources_are_resolved_before_the_revision_and_fetched_before_a_replica() -> None:
    world, decision = settle(fresh(spec=drafting()))
    assert "hf://acme/tiny" in command_of(find(decision.desired, "Job"))
    world, decision = answered(world, decision, FACTS)
    assert "hf://acme/small" in command_of(find(decision.desired, "Job"))
    waiting = condition(decision.status, "ModelResolved")
    assert waiting["status"] == "False"
    assert waiting["message"].startswith("reading the draft model's configuration")
    world, decision = answered(world, decision, SMALL)
    assert condition(decision.status, "ModelResolved")["message"].endswith("700000 parameters, at sha256:d")
    revision = find(decision.desired, "ControllerRevision")
    assert revision["data"]["facts"]["draft"]["digest"] == "sha256:d"
    assert revision["data"]["config"]["speculation"] == {
        "method": "Draft",
        "numTokens": 3,
        "model": {"uri": "hf://acme/small", "digest": "sha256:d"},
    }
    assert not [made for made in decision.desired if made["kind"] == "Deployment"]
    assert decision.status is not None
    assert decision.status["draft"]["digest"] == "sha256:d"


def test_a_head_is_read_as_one_and_compared_with_its_model() -> None:
    spec = drafting()
    spec["serving"]["speculation"]["method"] = "Eagle"
    world, decision = answered(*settle(fresh(spec=spec)), FACTS)
    assert command_of(find(decision.desired, "Job"))[:4] == [
        "neuron-runtime",
        "inspect",
        "hf://acme/small",
        "--eagle-head",
    ]
    _, refused = answered(world, decision, {**SMALL, "vocabularySize": 9})
    assert condition(refused.status, "ModelResolved")["reason"] == "DraftMismatch"
    _, decision = answered(world, decision, SMALL)
    assert find(decision.desired, "ControllerRevision")["data"]["config"]["speculation"]["method"] == "Eagle"


def test_what_made_drafts_as_a_model_is_read_again_before_it_does_as_a_head() -> None:
    world, _ = stepped(*resolved(drafting(storage={})))
    as_head = drafting(storage={})
    as_head["serving"]["speculation"]["method"] = "Eagle"
    edited = {**world.body, "spec": as_head, "metadata": {**world.body["metadata"], "generation": 2}}
    _, decision = settle(replace(world, body=edited))
    assert "--eagle-head" in command_of(find(decision.desired, "Job"))
    assert condition(decision.status, "ModelResolved")["status"] == "False"


def test_replicas_read_both_from_the_claim() -> None:
    world, decision = resolved(drafting())
    for facts in (FACTS, SMALL):
        job = find(decision.desired, "Job")
        assert facts["digest"] in command_of(job)
        stored = {"digest": facts["digest"], "bytes": facts["weightsBytes"], "readBytes": 1}
        record = {"version": 1, "command": "fetch", "ok": True, "weights": stored}
        pod = job_pod(job, ended(0, json.dumps(record)), f"of-{facts['digest'][-4:]}", phase="Succeeded")
        assert not [made for made in decision.desired if made["kind"] == "Deployment"]
        world, _ = settle(replace(world, pods=(*world.pods, pod)))
        world, decision = settle(finished(world))
    revision = find(decision.desired, "ControllerRevision")
    assert revision["metadata"]["annotations"][names.SHARED_ANNOTATION].count("weights-") == 2
    pod = find(decision.desired, "Deployment")
    assert [mount for mount in mounts_of(pod) if mount[0] == "weights"] == [("weights", names.WEIGHTS_DIR)]
    assert command_of(pod)[-4:] == ["--weights-dir", names.WEIGHTS_DIR, "--on-weights-miss", "fail"]
    said = condition(decision.status, "WeightsReady")["message"]
    assert said.count("are in claim models") == 2


def test_a_model_that_is_its_own_draft_is_resolved_and_fetched_once() -> None:
    world, decision = stepped(*answered(*settle(fresh(spec=drafting("hf://acme/tiny"))), FACTS))
    assert find(decision.desired, "Deployment")
    assert len([made for made in world.shared if made["kind"] == "Job"]) == 2


@pytest.mark.parametrize(
    ("model", "draft", "mounted"),
    [
        ("pvc://models/large", "pvc://models/small", [("model", "models")]),
        ("pvc://models/large", "pvc://other/small", [("model", "models"), ("draft-model", "other")]),
        ("hf://acme/tiny", "pvc://other/small", [("draft-model", "other")]),
        ("file:///models/demo", "hf://acme/small", []),
    ],
)
def test_a_draft_model_is_read_in_place_where_a_model_would_be(model: str, draft: str, mounted: list[Any]) -> None:
    spec = {**drafting(draft), "model": {"uri": model}}
    _, decision = stepped(*resolved(spec, {**SMALL, "digest": FACTS["digest"]}))
    mounts = mounts_of(find(decision.desired, "Deployment"))
    own = [(name, path) for name, path in mounts if name in (names.MODEL_VOLUME, names.DRAFT_VOLUME)]
    assert own == [(name, f"{names.CLAIMS_DIR}/{claim}") for name, claim in mounted]
    assert len({path for _, path in mounts}) == len(mounts)


@pytest.mark.parametrize(("backend", "refused"), [("nxdi", True), ("torch", False)])
def test_a_quantized_draft_model_is_refused_by_an_engine_that_makes_drafts_with_others_alone(
    backend: str, refused: bool
) -> None:
    storage = {**CLAIM, "artifacts": {"persistentVolumeClaim": {"claimName": "graphs"}}}
    spec = {**drafting(storage=storage), "engine": {"backend": backend}}
    stored = {"quantization": "fp8: fp8 in blocks of 128 x 128", "dtype": "float8_e4m3fn"}
    _, decision = resolved(spec, {**SMALL, **stored})
    told = condition(decision.status, "ModelResolved")
    assert (told["reason"] == "DraftMismatch") == refused
    if refused:
        assert told["message"].startswith(
            "spec.serving.speculation.model.uri: the draft model has quantized weights (fp8: fp8 in blocks of "
            "128 x 128), and this engine makes drafts with others alone: name the model that it was quantized from, or "
            "set method: NGram"
        )
    _, decision = resolved(spec, SMALL)
    assert condition(decision.status, "ModelResolved")["status"] == "True"


def test_another_vocabulary_is_refused_with_both_sizes_before_a_device_is_held() -> None:
    _, decision = resolved(drafting(), {**SMALL, "vocabularySize": 2000})
    refused = condition(decision.status, "ModelResolved")
    assert (refused["status"], refused["reason"]) == ("False", "DraftMismatch")
    assert refused["message"].startswith(
        "spec.serving.speculation.model.uri: its vocabulary has 2000 tokens, that of the model 2048: choose a draft"
    )
    assert condition(decision.status, "Stalled")["reason"] == "DraftMismatch"
    assert not [made for made in decision.desired if made["kind"] in ("Deployment", "ControllerRevision")]


def test_what_serves_goes_on_while_a_draft_model_cannot_be_read() -> None:
    world, decision = stepped(*answered(*settle(fresh(spec={**SPEC, "storage": CLAIM})), FACTS))
    before = find(decision.desired, "Deployment")
    edited = {**world.body, "spec": drafting(), "metadata": {**world.body["metadata"], "generation": 2}}
    world, decision = settle(replace(world, body=edited))
    job = find(decision.desired, "Job")
    assert "hf://acme/small" in command_of(job), "the facts of the model are known"
    pod = job_pod(job, ended(10, failure_record(10, "ModelNotFound", "hf://acme/small: no such repository")))
    _, decision = settle(finished(replace(world, pods=(*world.pods, pod)), "Failed"))
    refused = condition(decision.status, "ModelResolved")
    assert (refused["reason"], "hf://acme/small" in refused["message"]) == ("ModelNotFound", True)
    assert find(decision.desired, "Deployment")["spec"]["template"] == before["spec"]["template"]


def test_a_secret_of_its_own_needs_a_job_that_fetches() -> None:
    own = {"credentialsSecretRef": {"name": "drafts"}}
    _, decision = settle(fresh(spec=drafting(source=own, storage={})))
    assert "spec.serving.speculation.model.credentialsSecretRef" in condition(decision.status, "Accepted")["message"]
    world, decision = resolved(drafting(source=own))
    jobs = [made for made in world.shared if made["kind"] == "Job" and "hf://acme/small" in command_of(made)]
    for job in jobs:
        env = job["spec"]["template"]["spec"]["containers"][0]["env"]
        assert {one["valueFrom"]["secretKeyRef"]["name"] for one in env if "valueFrom" in one} == {"drafts"}
    assert jobs


def test_a_draft_model_with_a_secret_of_its_own_serves_on_where_the_installation_has_no_place_any_more() -> None:
    claim = Place(persistent_volume_claim=Claim(claim_name="models"))
    using = replace(SETTINGS, storage=StorageSettings(weights=claim))
    world, decision = settle(
        fresh(spec=drafting(source={"credentialsSecretRef": {"name": "drafts"}}, storage={})), using
    )
    for facts in (FACTS, SMALL):
        pod = resolved_pod(find(decision.desired, "Job"), facts)
        world, decision = settle(finished(settle(replace(world, pods=(*world.pods, pod)), using)[0]), using)
    for facts in (FACTS, SMALL):
        stored = {"digest": facts["digest"], "bytes": 1, "readBytes": 1}
        record = json.dumps({"version": 1, "command": "fetch", "ok": True, "weights": stored})
        pod = job_pod(find(decision.desired, "Job"), ended(0, record), f"of-{facts['digest'][-4:]}", phase="Succeeded")
        world, decision = settle(finished(settle(replace(world, pods=(*world.pods, pod)), using)[0]), using)
    deployment = find(decision.desired, "Deployment")
    pods = [serving_pod(deployment, f"chat-{one}", ready=True) for one in (1, 2)]
    world, _ = settle(replace(world, pods=(*world.pods, *pods)), using)
    _, decision = settle(world)
    assert condition(decision.status, "Accepted")["status"] == "True"
    assert find(decision.desired, "Deployment")["spec"]["template"] == deployment["spec"]["template"]


def test_the_compiler_reads_a_draft_model_with_a_secret_of_its_own_from_where_its_job_put_it() -> None:
    store = {"objectStore": {"uri": "s3://bucket/weights"}}
    spec = drafting(source={"credentialsSecretRef": {"name": "drafts"}}, storage={"weights": store})
    model = parse(fresh(spec={**spec, "model": {"uri": "file:///models/demo"}}).body)
    places = (Place(object_store=ObjectStore(uri=uri)) for uri in ("s3://bucket/weights", "s3://bucket/artifacts"))
    access = compiling(model, *places)
    assert access.remotes == {"s3"}, "the Job has the model's Secret alone"
    assert "--weights-store s3://bucket/weights" in " ".join(access.arguments)


def test_an_image_is_only_mounted_for_the_model() -> None:
    using = settings({"storage": {"imageVolumes": True}})
    _, decision = settle(fresh(spec=drafting("oci://registry.example/small#small")), using)
    assert "one image" in condition(decision.status, "Accepted")["message"]


def test_only_a_model_with_drafts_has_another_revision() -> None:
    plain, facts = parse(fresh().body), msgspec.convert(FACTS, Facts)
    draft = parse(fresh(spec=drafting(storage={})).body)
    assert pin(plain, facts, SETTINGS, 1).name != pin(draft, facts, SETTINGS, 1).name
    other = parse(fresh(spec=drafting("hf://acme/smaller", storage={})).body)
    assert pin(draft, facts, SETTINGS, 1).name != pin(other, facts, SETTINGS, 1).name


def test_weights_and_cache_of_a_draft_model_count_on_each_core_and_on_the_host() -> None:
    facts, small = msgspec.convert(FACTS, Facts), msgspec.convert(SMALL, Facts)
    with_small = msgspec.structs.replace(facts, draft=msgspec.structs.replace(small, weights_bytes=10**9))
    load, widths = Load(length=1024, sequences=4), Widths()
    family = FAMILIES["trn1"]
    alone, both = (memory_of(one, widths, load, 2, family=family, logical_core=1) for one in (facts, with_small))
    assert "draft" not in alone.parts
    cache = alone.cache // facts.num_layers
    assert both.parts["draft"] > cache
    assert both.total == alone.total + both.draft
    model = parse(fresh(spec=drafting(storage={})).body)
    hosts = [pin(model, one, SETTINGS, 1).pinned.plan.host_bytes or 0 for one in (facts, with_small)]
    assert hosts[0] < hosts[1]
    assert "draft model of 1000000000 bytes" in str(pin(model, with_small, SETTINGS, 1).pinned.plan.summary)


def metrics(drafted: float, accepted: float) -> Told:
    name = "vllm:spec_decode_num"
    return Told(
        f'# TYPE {name}_drafts counter\n{name}_drafts_total{{engine="0"}} {drafted}\n'
        f'{name}_accepted_tokens_total{{engine="0"}} {accepted}\n{name}_accepted_tokens_per_pos_total{{p="0"}} 9.0\n'
    )


def test_the_status_shows_how_many_tokens_a_step_with_drafts_yields() -> None:
    world, _ = stepped(*answered(*settle(fresh(spec=drafting("hf://acme/tiny"))), FACTS))
    deployment = find(world.children, "Deployment")
    pods = [serving_pod(deployment, f"chat-{one}", ready=True, podIP=f"10.0.0.{one}") for one in (1, 2)]
    world, decision = settle(replace(world, pods=tuple(pods)))
    asked = [MetricsOf(f"chat-{one}", f"http://10.0.0.{one}:8000/metrics") for one in (1, 2)]
    assert {need for need in decision.needs if isinstance(need, MetricsOf)} == {*asked}
    assert decision.requeue_after_seconds is not None
    world, decision = settle(replace(world, told=dict(zip(asked, [metrics(10, 15), metrics(30, 57)], strict=True))))
    assert decision.status is not None
    assert decision.status["acceptedLength"] == "2.8"
    report = why.report(world.body, observe(world), (), "")
    assert "\n  drafts    Draft, hf://acme/tiny, 2.8 tokens a step\n" in report
    for unclear in (Told(fault="timeout"), metrics(0, 0), Told("vllm:spec_decode_num_drafts_total x"), metrics(1, 1e9)):
        decision = decide(replace(world, told=dict.fromkeys(asked, unclear)), SETTINGS)
        assert decision.status is not None
        assert decision.status["acceptedLength"] == "2.8", "what was read before stays"


def test_replicas_without_drafts_are_not_asked() -> None:
    world, _ = stepped(*answered(*settle(fresh()), FACTS))
    pods = (serving_pod(find(world.children, "Deployment"), ready=True, podIP="10.0.0.1"),)
    _, decision = settle(replace(world, pods=pods))
    assert not [need for need in decision.needs if isinstance(need, MetricsOf)]
    assert decision.status is not None
    assert "acceptedLength" not in decision.status
