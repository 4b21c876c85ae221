"""The CronJob that deletes from a claim what no model of the namespace has needed for long."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helpers.operator_worlds import RESULTS, SETTINGS, SPEC, body, carried_out, fresh, patched, resolved_world, settle
from neuron_operator.api.model import Claim, ObjectStore
from neuron_operator.decide.course import decide
from neuron_operator.read.objects import name_of, owners_of
from neuron_operator.read.world import (
    ClaimTemplate,
    Decision,
    EngineSettings,
    JobSettings,
    Object,
    Place,
    Settings,
    StorageSettings,
    World,
)
from neuron_operator.render import cleaning

CLAIM = Place(persistent_volume_claim=Claim(claim_name="models", sub_path="weights"))
OTHER = {"name": "other", "uid": "uid-other"}


def storing(weights: Place = CLAIM, **changes: Any) -> Settings:
    return replace(SETTINGS, storage=StorageSettings(weights=weights, **changes))


def cron_jobs(decision: Decision) -> list[Object]:
    return [made for made in decision.desired if made["kind"] == "CronJob"]


def cleaner(using: Settings, **changes: Any) -> Object:
    (made,) = cron_jobs(resolved_world(using, **changes)[1])
    return made


def pod_of(made: Object) -> Object:
    spec: Object = made["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return spec


def command(made: Object) -> list[str]:
    (container,) = pod_of(made)["containers"]
    return list(container["command"])


def kept(made: Object) -> list[str]:
    words = command(made)
    return words[words.index("--keep") + 1 :] if "--keep" in words else []


def beside(world: World, **changes: Any) -> World:
    """Another model in the same namespace, which sees the same shared objects."""
    return replace(world, body=body(**{**OTHER, **changes}), children=())


def keeper(name: str, **record: Any) -> Object:
    """The record of a step of another model."""
    text = json.dumps({"version": 1, "command": "fetch", "ok": True, **record})
    labels = {"app.kubernetes.io/managed-by": "neuron-operator", "app.kubernetes.io/part-of": "neuron-serving"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels, "ownerReferences": [{"kind": "NeuronModel", **OTHER}]},
        "data": {"record.json": text},
    }


def fetched(name: str, digest: str) -> Object:
    return keeper(name, weights={"digest": digest, "bytes": 1, "readBytes": 1})


def with_shared(world: World, *objects: Object) -> World:
    return replace(world, shared=(*world.shared, *objects))


def test_a_claim_is_cleaned_daily_away_from_neuron_nodes() -> None:
    made = cleaner(storing())
    pod = pod_of(made)
    assert command(made)[:6] == [
        *("neuron-runtime", "weights", "prune", "/var/lib/neuron-serving/weights", "--unused-days", "30")
    ]
    (mount,) = (found for found in pod["containers"][0]["volumeMounts"] if found["name"] == "weights")
    assert mount == {"name": "weights", "mountPath": "/var/lib/neuron-serving/weights", "subPath": "weights"}
    assert {"name": "weights", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" in pod["affinity"]["nodeAffinity"]
    minute, hour, *rest = made["spec"]["schedule"].split()
    assert (int(minute) < 60, int(hour) < 24, rest) == (True, True, ["*"] * 3)
    assert "chat" not in str(made["spec"])


@pytest.mark.parametrize(
    "using",
    [
        SETTINGS,
        storing(keep_days=0),
        storing(Place(object_store=ObjectStore(uri="s3://bucket/weights"))),
    ],
)
def test_nothing_is_cleaned_in_pods_in_buckets_or_if_everything_is_kept(using: Settings) -> None:
    assert cron_jobs(resolved_world(using)[1]) == []


def test_the_operators_own_claim_is_cleaned_too() -> None:
    volumes = pod_of(cleaner(storing(Place(pvc_template=ClaimTemplate(size="1Ti")))))["volumes"]
    assert {"name": "weights", "persistentVolumeClaim": {"claimName": "neuron-serving-weights"}} in volumes


def test_artifacts_in_a_claim_are_cleaned_by_their_own_command() -> None:
    artifacts = Place(persistent_volume_claim=Claim(claim_name="compiled"))
    using = storing(Place(), artifacts=artifacts)
    world, _ = resolved_world(using, spec={**SPEC, "engine": {"backend": "torch", "compile": "Enabled"}})
    compiled = keeper(
        "artifact-1", artifact={"key": "c" * 64, "bytes": 1, "seconds": 1.0, "reused": False, "peakBytes": 1}
    )
    (made,) = cron_jobs(decide(with_shared(world, compiled), using))
    assert command(made)[:4] == ["neuron-runtime", "artifacts", "prune", "/var/lib/neuron-serving/artifacts"]
    assert kept(made) == sorted([RESULTS["compile"]["artifact"]["key"], "c" * 64])
    assert {"name": "artifacts", "persistentVolumeClaim": {"claimName": "compiled"}} in pod_of(made)["volumes"]


def test_graphs_of_vllm_are_cleaned_in_their_folder_of_the_claim_and_their_key_is_kept() -> None:
    place = Place(persistent_volume_claim=Claim(claim_name="kept"))
    using = replace(storing(place, artifacts=place), engines={"vllm": EngineSettings("vllm:0.24", "0.24")})
    nodes = {"spec": {"nodeSelector": {"node.kubernetes.io/instance-type": "trn2.48xlarge"}}}
    spec = {**SPEC, "accelerator": {}, "engine": {"backend": "vllm"}, "podTemplate": nodes}
    made = cron_jobs(resolved_world(using, spec=spec)[1])
    artifacts = "/var/lib/neuron-serving/artifacts"
    assert {command(one)[3] for one in made} == {
        "/var/lib/neuron-serving/weights",
        artifacts,
        f"{artifacts}/vllm",
    }
    (of_vllm,) = (one for one in made if command(one)[3].endswith("/vllm"))
    assert command(of_vllm)[:3] == ["neuron-runtime", "artifacts", "prune"]
    assert RESULTS["compile"]["artifact"]["key"] in kept(of_vllm)
    mounts = {mount["name"]: mount["mountPath"] for mount in pod_of(of_vllm)["containers"][0]["volumeMounts"]}
    assert mounts["artifacts"] == artifacts
    assert len({name_of(one) for one in made}) == 3


def test_models_that_use_one_claim_share_its_cronjob_whatever_else_they_want() -> None:
    using = storing()
    one = cleaner(using)
    jobs = {"resources": {"limits": {"memory": "9Gi"}}}
    two = cleaner(using, spec={**SPEC, "model": {"uri": "hf://acme/other"}, "jobs": jobs}, **OTHER)
    assert (name_of(one), one["spec"]) == (name_of(two), two["spec"])
    elsewhere = cleaner(storing(Place(persistent_volume_claim=Claim(claim_name="more"))))
    assert name_of(elsewhere) != name_of(one)


def test_settings_of_the_installation_and_new_instance_types_change_the_cronjob_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = replace(storing(keep_days=7), runtime_image="other:2", jobs=JobSettings(node_selector={"pool": "cpu"}))
    one = cleaner(storing())
    monkeypatch.setattr(cleaning, "NEVER_NEURON", {})
    two = cleaner(newer)
    assert name_of(one) == name_of(two)
    assert command(two)[5] == "7"
    assert pod_of(two)["nodeSelector"] == {"kubernetes.io/arch": "amd64", "pool": "cpu"}
    assert pod_of(two)["containers"][0]["image"] == "other:2"


def test_what_any_model_of_the_namespace_needs_is_kept() -> None:
    using = storing()
    world, _ = resolved_world(using)
    a, b = "a" * 40, "b" * 64
    records = (fetched("weights-1", b), fetched("weights-2", a), fetched("weights-3", a), keeper("facts-1"))
    (made,) = cron_jobs(decide(with_shared(world, *records), using))
    assert kept(made) == [a, b]
    assert kept(cron_jobs(decide(world, using))[0]) == []


@pytest.mark.parametrize("digest", ["--unused-days=0", "", "../up", "A" * 40, "a" * 39, "a" * 40 + "\n"])
def test_a_record_cannot_give_the_clean_up_orders(digest: str) -> None:
    using = storing()
    world, _ = resolved_world(using)
    (made,) = cron_jobs(decide(with_shared(world, fetched("weights-1", digest)), using))
    assert command(made) == command(cleaner(using))


def test_a_second_model_becomes_an_owner_and_the_last_one_takes_the_cronjob_with_it() -> None:
    using = storing()
    world, _ = resolved_world(using)
    other, _ = settle(beside(world), using)
    (live,) = (found for found in other.shared if found["kind"] == "CronJob")
    assert [owner["name"] for owner in owners_of(live)] == ["chat", "other"]
    elsewhere = storing(keep_days=0)
    world = replace(world, shared=other.shared)
    left = decide(world, elsewhere)
    (change,) = (change for change in left.changes if change.live["kind"] == "CronJob")
    assert [owner["name"] for owner in owners_of(patched(live, change.patch))] == ["other"]
    assert not [gone for gone in left.delete if gone["kind"] == "CronJob"]
    last = decide(beside(carried_out(world, left)), elsewhere)
    assert [gone["kind"] for gone in last.delete] == ["CronJob"]


def test_an_edit_that_is_still_being_resolved_keeps_the_cronjob() -> None:
    using = storing()
    world, _ = resolved_world(using)
    edited = replace(world, body={**world.body, "spec": {**SPEC, "model": {"uri": "hf://acme/other"}}})
    decision = decide(edited, using)
    assert len(cron_jobs(decision)) == 1
    assert not [gone for gone in decision.delete if gone["kind"] == "CronJob"]


def test_no_cronjob_exists_before_the_model_is_placed() -> None:
    assert cron_jobs(settle(fresh(), storing())[1]) == []
