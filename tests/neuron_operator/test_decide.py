"""One pass: resolve before devices are allocated, pin once, roll on edits, repair, keep what serves, do not touch
foreign objects; a second pass without changes does nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import (
    FACTS,
    JSON_VALUES,
    NOW,
    SETTINGS,
    SPEC,
    carried_out,
    checked,
    condition,
    ended,
    failure_record,
    find,
    finished,
    fresh,
    job_pod,
    resolved_pod,
    resolved_world,
    serving_pod,
    settle,
    stored,
    unscheduled_pod,
)
from neuron_operator.api import names
from neuron_operator.api.model import Claim
from neuron_operator.api.reasons import ABNORMAL, CONDITIONS, Need
from neuron_operator.cluster.contests import difference
from neuron_operator.decide.course import MIN_RECHECK_SECONDS, RECHECK_SECONDS, decide
from neuron_operator.read.records import parse_record
from neuron_operator.read.revision import from_object
from neuron_operator.read.world import (
    Decision,
    FreeDevices,
    JobSettings,
    Object,
    Place,
    Refusal,
    RefusalCause,
    StorageSettings,
    World,
)
from neuron_operator.why.pods import UNEXPLAINED_SECONDS

KINDS_BEFORE = ["Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"]


def kinds(decision: Decision) -> list[str]:
    return [child["kind"] for child in decision.desired]


def edited(world: World, **spec: Any) -> World:
    generation = world.body["metadata"]["generation"] + 1
    metadata = {**world.body["metadata"], "generation": generation}
    return replace(world, body={**world.body, "metadata": metadata, "spec": {**world.body["spec"], **spec}})


def annotated(world: World, **annotations: str) -> World:
    full = {f"{names.GROUP}/{key}": value for key, value in annotations.items()}
    return replace(world, body={**world.body, "metadata": {**world.body["metadata"], "annotations": full}})


def revision_of(decision: Decision) -> str:
    return str(find(decision.desired, "Deployment")["spec"]["template"]["metadata"]["labels"][names.REVISION_LABEL])


def with_ready_pods(world: World) -> World:
    deployment = find(world.children, "Deployment")
    pods = tuple(serving_pod(deployment, f"chat-{n}", ready=True) for n in range(deployment["spec"]["replicas"]))
    return replace(world, pods=pods)


# From a manifest to replicas


def test_an_unresolved_model_gets_a_service_and_a_job_but_no_replicas() -> None:
    decision = decide(fresh(), SETTINGS)
    assert kinds(decision) == [*KINDS_BEFORE, "Job"]
    assert condition(decision.status, "Ready")["reason"] == "Resolving"


def test_a_resolved_model_is_pinned_before_replicas_are_created() -> None:
    _, decision = resolved_world()
    assert kinds(decision) == ["ControllerRevision", *KINDS_BEFORE, "ConfigMap", "Deployment"]


def test_the_status_tells_that_the_steps_are_done_before_pods_of_a_revision_can_exist() -> None:
    """The first revision, and one that an edit makes."""
    rendered, _ = resolved_world()
    serving, before = settle(with_ready_pods(rendered))
    for world in (
        replace(without(rendered, "Deployment"), body=fresh().body),
        checked(edited(serving, serving={"maxModelLength": 1024})),
    ):
        first = decide(world, SETTINGS)
        assert "Deployment" not in kinds(first)
        assert condition(first.status, "Compiled")["status"] == "True"
        second = decide(carried_out(world, first), SETTINGS)
        assert first.status is not None
        assert revision_of(second) == first.status["updateRevision"]
    scaled = decide(edited(serving, replicas=1), SETTINGS)
    assert find(scaled.desired, "Deployment")["spec"]["replicas"] == 1, "a scaled revision is known already"
    assert revision_of(scaled) == revision_of(before)


def test_all_conditions_of_a_serving_model_are_true() -> None:
    world, _ = resolved_world()
    _, decision = settle(with_ready_pods(world))
    assert {c["type"]: c["status"] for c in decision.status["conditions"]} == dict.fromkeys(  # type: ignore[index]
        (*("Accepted", "ModelResolved", "Placed", "WeightsReady", "Compiled", "Available", "UpToDate", "Ready"),),
        "True",
    )
    status = decision.status
    assert status is not None
    assert status["url"] == "http://chat.team.svc:8000"
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert status["currentRevision"] == status["updateRevision"] == revision_of(decision)
    assert status["model"]["architecture"] == "LlamaForCausalLM"
    assert status["plan"]["devices"] == 6
    assert decision.requeue_after_seconds is None
    assert decision.announcements == ()


def test_a_transition_emits_one_event() -> None:
    world, _ = resolved_world()
    world = with_ready_pods(world)
    first = decide(world, SETTINGS)
    assert [(a.type, a.reason) for a in first.announcements] == [("Normal", "Ready")]
    assert decide(carried_out(world, first), SETTINGS).announcements == ()


def test_a_problem_emits_a_warning_event() -> None:
    decision = decide(fresh(spec={"model": {"uri": "hf://a/b"}, "accelerator": {"instanceTypes": ["x"]}}), SETTINGS)
    assert [(a.type, a.reason) for a in decision.announcements] == [("Warning", "FieldNotSupported")]


def test_zero_replicas_report_no_coming_replica() -> None:
    world, _ = resolved_world(spec={**SPEC, "replicas": 0})
    _, decision = settle(world)
    assert condition(decision.status, "Available")["reason"] == "ScaledToZero"
    assert condition(decision.status, "Ready") | {"lastTransitionTime": ""} == condition(decision.status, "Ready") | {
        "status": "True",
        "reason": "ScaledToZero",
        "lastTransitionTime": "",
    }


# Pinned once


def test_a_new_default_image_does_not_roll_running_pods() -> None:
    world, before = resolved_world()
    _, after = settle(
        with_ready_pods(world), replace(SETTINGS, runtime_image="registry.example/neuron-serving-runtime:2")
    )
    assert after.desired == before.desired


@pytest.mark.parametrize(
    "defaults",
    [{"runtime_image": "registry.example/neuron-serving-runtime:2"}, {"image_pull_secrets": ("registry",)}],
    ids=str,
)
def test_what_never_served_is_decided_anew_when_defaults_change(defaults: dict[str, Any]) -> None:
    """A new tag, a pull Secret: without an edit, and without resolving again. Once it has served it stays."""
    using = replace(SETTINGS, **defaults)
    world, before = resolved_world()
    first = revision_of(before)
    world, after = settle(world, using)
    assert revision_of(after) != first
    assert "Job" not in kinds(after)
    pod = find(after.desired, "Deployment")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == using.runtime_image
    assert [one["name"] for one in pod.get("imagePullSecrets", ())] == list(using.image_pull_secrets)
    again, back = settle(world)
    assert revision_of(back) == first, "the earlier decision is not made twice"
    served, _ = settle(with_ready_pods(again))
    assert revision_of(settle(served, using)[1]) == first


def test_defaults_that_no_pod_depends_on_change_nothing() -> None:
    world, before = resolved_world()
    other = replace(SETTINGS, jobs=JobSettings(node_selector={"pool": "cpu"}), network_policy_ingress_from=({},))
    assert revision_of(settle(world, other)[1]) == revision_of(before)


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 5},
        {"rollout": {"strategy": "Auto", "drainSeconds": 300}},
        {"serving": {"prefixCaching": "Auto", "sampling": "Host"}},
        {"serving": {"generationConfig": "Enabled", "accessLog": "Enabled"}},
        {"storage": {"weights": {"emptyDir": {}}}},
    ],
    ids=str,
)
def test_scaling_and_explicit_defaults_do_not_roll(spec: dict[str, Any]) -> None:
    world, before = resolved_world()
    _, after = settle(edited(world, **spec))
    assert revision_of(after) == revision_of(before)
    assert find(after.desired, "Deployment")["spec"]["replicas"] == spec.get("replicas", 2)


@pytest.mark.parametrize(
    "spec",
    [
        {"serving": {"maxModelLength": 512}},
        {"serving": {"generationConfig": "Disabled"}},
        {"serving": {"chatTemplate": "{{ messages }}"}},
        {"serving": {"reasoningParser": "qwen3"}},
        {"serving": {"accessLog": "Disabled"}},
        {"accelerator": {"devices": 1}},
        {"engine": {"backend": "torch", "image": "registry.example/other:1"}},
        {"engine": {"backend": "torch", "env": [{"name": "A", "value": "1"}]}},
        {"engine": {"backend": "simulated"}},
        {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
        {"rollout": {"drainSeconds": 1}},
    ],
    ids=str,
)
def test_a_pod_edit_rolls_without_resolving_again(spec: dict[str, Any]) -> None:
    world, before = resolved_world()
    _, after = settle(edited(world, **spec))
    assert revision_of(after) != revision_of(before)
    assert "Job" not in kinds(after)
    strategy = find(after.desired, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 0, "maxUnavailable": 1}


def test_a_changed_simulated_device_rolls() -> None:
    def simulated(sampling: str, milliseconds: int) -> dict[str, Any]:
        engine = {"backend": "simulated", "overrideNeuronConfig": {"stepMilliseconds": milliseconds}}
        return {"engine": engine, "serving": {"sampling": sampling}}

    world, _ = resolved_world()
    names = [
        revision_of(settle(edited(world, **simulated(*device)))[1])
        for device in (("Host", 8), ("Host", 9), ("Device", 8), ("Host", 8))
    ]
    assert len(set(names)) == 3
    assert names[0] == names[-1]


def test_the_old_model_serves_while_another_is_resolved() -> None:
    world, before = resolved_world()
    world = with_ready_pods(world)
    world, resolving = settle(edited(world, model={"uri": "hf://acme/other"}))
    assert revision_of(resolving) == revision_of(before)
    assert condition(resolving.status, "Available")["status"] == "True"
    assert condition(resolving.status, "Ready")["reason"] == "Resolving"
    job = find(resolving.desired, "Job")
    world = replace(world, pods=(*world.pods, resolved_pod(job, {**FACTS, "digest": "other"})))
    _, after = settle(checked(world))
    assert revision_of(after) != revision_of(before)
    assert condition(after.status, "UpToDate")["reason"] == "RollingOut"


def test_the_old_configuration_and_its_owner_stay_while_its_pods_exist() -> None:
    world, before = resolved_world()
    world = with_ready_pods(world)
    old = find(before.desired, "ConfigMap")["metadata"]["name"]
    world, rolling = settle(checked(edited(world, serving={"maxModelLength": 512})))
    assert old in {c["metadata"]["name"] for c in rolling.desired if c["kind"] == "ConfigMap"}
    assert {c["metadata"]["name"] for c in world.children if c["kind"] == "ConfigMap"} > {old}


def test_reverting_an_edit_reuses_the_earlier_revision() -> None:
    world, before = resolved_world()
    world, _ = settle(edited(world, serving={"maxModelLength": 512}))
    world, back = settle(edited(world, serving={}))
    assert revision_of(back) == revision_of(before)
    numbers = {
        c["metadata"]["labels"][names.REVISION_LABEL]: c["revision"]
        for c in world.children
        if c["kind"] == "ControllerRevision"
    }
    assert max(numbers, key=lambda name: numbers[name]) == revision_of(back)


def test_a_refresh_token_resolves_again_and_its_removal_changes_nothing() -> None:
    world, before = resolved_world()
    world, refreshing = settle(annotated(world, refresh="1"))
    job = find(refreshing.desired, "Job")
    assert revision_of(refreshing) == revision_of(before)
    world, refreshed = settle(replace(world, pods=(resolved_pod(job, {**FACTS, "digest": "moved"}),)))
    assert revision_of(refreshed) != revision_of(before)
    assert find(refreshed.desired, "ControllerRevision")["data"]["facts"]["digest"] == "moved"
    _, removed = settle(annotated(world))
    assert revision_of(removed) == revision_of(refreshed)


def test_only_the_latest_earlier_revisions_are_kept() -> None:
    world, _ = resolved_world()
    for length in range(100, 110):
        world, _ = settle(edited(world, serving={"maxModelLength": length}))
    keepers = [c for c in world.children if c["kind"] == "ControllerRevision"]
    documents = [c for c in world.children if c["kind"] == "ConfigMap"]
    assert len(keepers) == len(documents) == 6
    assert sorted(c["revision"] for c in keepers) == list(range(6, 12))


def test_a_revision_of_another_format_is_ignored() -> None:
    world, _ = resolved_world()
    keeper = find(world.children, "ControllerRevision")
    assert from_object(keeper) is not None
    assert from_object({**keeper, "data": {**keeper["data"], "format": 99}}) is None
    assert from_object({**keeper, "data": {"format": 1}}) is None
    assert from_object({**keeper, "data": None}) is None


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], [("not-ready", 30), ("unreachable", 30)]),
        ([{"key": "spot", "operator": "Exists"}], [("not-ready", 30), ("unreachable", 30)]),
        (
            [{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 600}],
            [("unreachable", 600), ("not-ready", 30)],
        ),
        ([{"operator": "Exists"}], []),
        ([{"operator": "Exists", "effect": "NoSchedule"}], [("not-ready", 30), ("unreachable", 30)]),
    ],
    ids=["none", "another", "a time of its own", "everything", "to be scheduled"],
)
def test_a_replica_leaves_a_lost_node_after_30_seconds_unless_its_manifest_says_otherwise(
    own: list[Object], expected: list[tuple[str, int]]
) -> None:
    _, decision = resolved_world(spec={**SPEC, "podTemplate": {"spec": {"tolerations": own}}})
    tolerations = find(decision.desired, "Deployment")["spec"]["template"]["spec"]["tolerations"]
    of_nodes = [one for one in tolerations if one.get("key", "").startswith("node.kubernetes.io/")]
    assert [(one["key"].partition("/")[2], one["tolerationSeconds"]) for one in of_nodes] == expected


def test_the_terms_of_an_affinity_are_kept_and_an_empty_one_still_matches_no_node() -> None:
    wanted = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
    terms = [wanted, {}, {"matchExpressions": []}]
    affinity = {"nodeAffinity": {names.REQUIRED_AFFINITY: {"nodeSelectorTerms": terms}}, "podAffinity": {"x": []}}
    _, decision = resolved_world(spec={**SPEC, "podTemplate": {"spec": {"affinity": affinity}}})
    rendered = find(decision.desired, "Deployment")["spec"]["template"]["spec"]["affinity"]
    assert rendered["podAffinity"] == affinity["podAffinity"]
    first, *empty = rendered["nodeAffinity"][names.REQUIRED_AFFINITY]["nodeSelectorTerms"]
    assert first["matchExpressions"][0] == wanted["matchExpressions"][0]
    assert len(first["matchExpressions"]) > 1
    assert empty == terms[1:]


# Repair, pause, refusal


NEW_IMAGE = replace(SETTINGS, runtime_image="registry.example/neuron-serving-runtime:2")


def without(world: World, *kinds: str) -> World:
    return replace(world, children=tuple(child for child in world.children if child["kind"] not in kinds))


def test_the_label_of_a_revision_does_not_name_it() -> None:
    world, before = resolved_world()
    world = with_ready_pods(world)
    keeper = find(world.children, "ControllerRevision")
    keeper["metadata"]["labels"][names.REVISION_LABEL] = "zz"
    world, after = settle(world, NEW_IMAGE)
    assert find(after.desired, "ControllerRevision") == find(before.desired, "ControllerRevision")
    assert find(after.desired, "Deployment") == find(before.desired, "Deployment")
    assert condition(after.status, "UpToDate")["status"] == "True"


@pytest.mark.parametrize("length", [52, 53, 63])
def test_a_model_with_a_long_name_keeps_its_earlier_revisions(length: int) -> None:
    world, before = resolved_world(name="a" * length)
    world, _ = settle(edited(with_ready_pods(world), serving={"maxSequences": 3}))
    kept = [child for child in world.children if child["kind"] == "ControllerRevision"]
    assert sorted(keeper["revision"] for keeper in kept) == [1, 2]
    assert find(before.desired, "ConfigMap")["metadata"]["name"] in {
        child["metadata"]["name"] for child in world.children if child["kind"] == "ConfigMap"
    }


def test_a_deleted_revision_is_rebuilt_from_what_runs_and_no_replica_is_replaced() -> None:
    world, before = resolved_world()
    world = with_ready_pods(world)
    world, after = settle(without(world, "ControllerRevision"), NEW_IMAGE)
    assert find(after.desired, "Deployment") == find(before.desired, "Deployment")
    rebuilt, kept = (find(decision.desired, "ControllerRevision") for decision in (after, before))
    assert rebuilt == kept
    assert "Job" not in kinds(after)
    assert condition(after.status, "Ready")["status"] == "True"


def test_the_serving_revision_is_rebuilt_while_another_is_resolved() -> None:
    world, before = resolved_world()
    world, _ = settle(edited(with_ready_pods(world), model={"uri": "hf://acme/other"}))
    _, after = settle(without(world, "ControllerRevision"), NEW_IMAGE)
    assert find(after.desired, "Deployment") == find(before.desired, "Deployment")
    assert find(after.desired, "ControllerRevision")["data"] == find(before.desired, "ControllerRevision")["data"]


def test_a_record_with_endless_brackets_is_a_damaged_one() -> None:
    assert parse_record('{"version": 1, "command": "fetch", "ok": true, "x": ' + "[" * 4000) is None


@pytest.mark.parametrize("pinned", ["", "{", '{"format": 1}', "[" * 100_000])
def test_a_revision_that_cannot_be_rebuilt_is_decided_again(pinned: str) -> None:
    """As for a Deployment of a version that did not annotate it."""
    world, before = resolved_world()
    world = without(with_ready_pods(world), "ControllerRevision", "Job")
    find(world.children, "Deployment")["metadata"]["annotations"] = {names.PINNED_ANNOTATION: pinned}
    world, resolving = settle(world, NEW_IMAGE)
    assert condition(resolving.status, "Ready")["reason"] == "Resolving"
    _, after = settle(replace(world, pods=(*world.pods, resolved_pod(find(resolving.desired, "Job")))), NEW_IMAGE)
    assert revision_of(after) == revision_of(before)
    (container,) = find(after.desired, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == NEW_IMAGE.runtime_image


def test_the_pod_template_of_a_deployment_of_an_earlier_version_does_not_change() -> None:
    world, before = resolved_world()
    world = with_ready_pods(world)
    del find(world.children, "Deployment")["metadata"]["annotations"]
    _, after = settle(world, NEW_IMAGE)
    assert find(after.desired, "Deployment") == find(before.desired, "Deployment")


@pytest.mark.parametrize("kind", ["Service", "ServiceAccount", "ConfigMap", "Deployment", "NetworkPolicy"])
def test_a_deleted_child_is_recreated_unchanged(kind: str) -> None:
    world, before = resolved_world()
    left = tuple(child for child in world.children if child["kind"] != kind)
    assert decide(replace(world, children=left), SETTINGS).desired == before.desired


def test_a_paused_model_is_reported_and_not_changed() -> None:
    world, _ = resolved_world()
    world = annotated(edited(with_ready_pods(world), serving={"maxModelLength": 512}), paused="true")
    decision = decide(world, SETTINGS)
    assert (decision.desired, decision.delete) == ((), ())
    assert condition(decision.status, "UpToDate")["reason"] == "Paused"
    assert condition(decision.status, "Available")["status"] == "True"


def test_a_model_created_paused_reports_it() -> None:
    decision = decide(annotated(fresh(), paused="true"), SETTINGS)
    assert decision.desired == ()
    assert "paused" in condition(decision.status, "Ready")["message"]


def test_a_refused_edit_keeps_the_serving_revision() -> None:
    world, _ = resolved_world()
    decision = decide(edited(with_ready_pods(world), serving={"contextBuckets": [128]}), SETTINGS)
    assert (decision.desired, decision.delete) == ((), ())
    assert condition(decision.status, "Accepted")["reason"] == "FieldNotSupported"
    assert condition(decision.status, "Available")["status"] == "True"
    assert condition(decision.status, "Ready")["reason"] == "FieldNotSupported"
    assert decision.status is not None
    assert decision.status["plan"]["devices"] == 6


def test_an_illegal_size_keeps_the_serving_revision_and_still_scales_it() -> None:
    world, before = resolved_world()
    _, decision = settle(edited(world, accelerator={"devices": 7}, replicas=1))
    assert revision_of(decision) == revision_of(before)
    assert find(decision.desired, "Deployment")["spec"]["replicas"] == 1
    assert condition(decision.status, "Ready")["reason"] == "TopologyImpossible"


def test_a_deleted_model_is_left_to_garbage_collection() -> None:
    assert decide(fresh(deletionTimestamp="2026-03-01T12:00:00Z"), SETTINGS) == Decision()


@pytest.mark.parametrize(
    ("refused", "reason", "says"),
    [
        (Refusal(RefusalCause.TAKEN, "Service", "chat"), "NameConflict", "Service chat exists"),
        (
            Refusal(
                RefusalCause.FORBIDDEN, "Service", "chat", 'services "chat" is forbidden: exceeded quota: q, requested'
            ),
            "QuotaExceeded",
            "requested; raise the ResourceQuota, or request less",
        ),
        (
            Refusal(
                RefusalCause.REJECTED,
                "Deployment",
                "chat",
                "deployments.apps \"chat\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied "
                "request: no",
            ),
            "AdmissionDenied",
            "denied request: no; that is a policy of the cluster",
        ),
        (
            Refusal(RefusalCause.REJECTED, "Job", "j", 'admission webhook "w.example.com" denied the request: no'),
            "AdmissionDenied",
            "that is a webhook's rule",
        ),
        (Refusal(RefusalCause.FORBIDDEN, "Deployment", "chat", "no create"), "OperatorForbidden", "chat: no create"),
        (
            Refusal(RefusalCause.REJECTED, "Deployment", "chat", "spec.x: Invalid"),
            "InvalidSpec",
            "Deployment chat: spec.x",
        ),
    ],
)
def test_a_refusal_is_shown_and_everything_else_is_written(refused: Refusal, reason: str, says: str) -> None:
    world, before = resolved_world()
    decision = decide(replace(with_ready_pods(world), refusals=(refused,)), SETTINGS)
    assert list(decision.desired) == [obj for obj in before.desired if obj["kind"] != refused.kind]
    assert condition(decision.status, "Ready")["reason"] == reason
    assert says in condition(decision.status, "Ready")["message"]
    assert condition(decision.status, "Available")["status"] == "True"
    assert decision.requeue_after_seconds == MIN_RECHECK_SECONDS


PULLING = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
UNDONE = Refusal(RefusalCause.UNDONE, "Deployment", "chat", "spec.x: wanted 1, but somebody else makes it 2")


def test_a_contest_is_a_condition_and_an_event_and_replicas_that_serve_are_ready() -> None:
    world, _ = settle(with_ready_pods(resolved_world()[0]))
    decision = decide(replace(world, refusals=(UNDONE,)), SETTINGS)
    assert (condition(decision.status, "Ready")["status"], condition(decision.status, "Accepted")["status"]) == (
        "True",
        "True",
    )
    contested = condition(decision.status, "Contested")
    assert (contested["status"], contested["reason"]) == ("True", "Contested")
    assert "somebody else makes it 2; set the field in the manifest" in contested["message"]
    assert [(told.type, told.reason) for told in decision.announcements] == [("Warning", "Contested")]
    world = replace(world, body={**world.body, "status": decision.status}, now=world.now + timedelta(minutes=4))
    later = decide(replace(world, refusals=(UNDONE,)), SETTINGS)
    assert later.announcements == ()
    assert later.requeue_after_seconds == 12, "a twentieth of the time that it has lasted"
    over = decide(world, SETTINGS)
    assert "Contested" not in {one["type"] for one in over.status["conditions"]}  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "field", "reaches"),
    [
        ("Service", "spec.selector.app", False),
        ("Service", "metadata.labels.team", True),
        ("NetworkPolicy", "spec.ingress", True),
    ],
)
def test_a_model_whose_service_somebody_else_changes_is_not_available_and_one_event_says_so(
    kind: str, field: str, reaches: bool
) -> None:
    world, _ = settle(with_ready_pods(resolved_world()[0]))
    undone = Refusal(RefusalCause.UNDONE, kind, "chat", f"{field}: wanted a, but somebody else makes it b")
    decision = decide(replace(world, refusals=(undone,)), SETTINGS)
    available, ready = (condition(decision.status, name) for name in ("Available", "Ready"))
    assert (available["status"], ready["status"]) == (("True", "True") if reaches else ("False", "False"))
    if not reaches:
        assert (available["reason"], ready["reason"]) == ("Contested", "Contested")
        assert available["message"].startswith("requests may not reach the replicas: Service chat: spec.selector.app")
    assert condition(decision.status, "UpToDate")["status"] == "True"
    assert condition(decision.status, "Contested")["status"] == "True"
    assert [(told.type, told.reason) for told in decision.announcements] == [("Warning", "Contested")]


def test_a_model_is_available_while_somebody_else_only_claims_the_fields_of_its_service() -> None:
    """As another server-side apply that is forced: the values are those that are wanted."""
    world, decision = settle(with_ready_pods(resolved_world()[0]))
    service = find(decision.desired, "Service")
    undone = Refusal(RefusalCause.UNDONE, "Service", "chat", difference(service, service).words)
    shown = decide(replace(world, refusals=(undone,)), SETTINGS).status
    assert [condition(shown, name)["status"] for name in ("Contested", "Available", "Ready")] == ["True"] * 3


def test_an_edit_that_waits_for_a_step_says_so_while_the_service_is_contested() -> None:
    world = with_ready_pods(resolved_world()[0])
    world = replace(world, body={**world.body, "spec": {**world.body["spec"], "model": {"uri": "hf://acme/other"}}})
    undone = Refusal(RefusalCause.UNDONE, "Service", "chat", "spec.type: wanted a")
    shown = condition(decide(replace(world, refusals=(undone,)), SETTINGS).status, "UpToDate")
    assert shown["reason"] == "Resolving"


@pytest.mark.parametrize(("state", "reason"), [({"running": {}}, "Contested"), (PULLING, "ImagePull")])
def test_a_contest_is_the_reason_of_what_time_alone_would_bring(state: Object, reason: str) -> None:
    world, _ = resolved_world()
    pod = serving_pod(find(world.children, "Deployment"), state=state)
    ready = condition(decide(replace(world, pods=(pod,), refusals=(UNDONE,)), SETTINGS).status, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert ready["message"].startswith("0 of 2 replicas answer; pod chat-1")
    assert ("somebody else makes it 2" in ready["message"]) == (reason == "Contested")


@pytest.mark.parametrize(("minutes", "seconds"), [(0, MIN_RECHECK_SECONDS), (4, 12.0), (60, RECHECK_SECONDS)])
def test_refused_writes_are_repeated_ever_more_rarely_and_no_more_often_because_replicas_load(
    minutes: int, seconds: float
) -> None:
    world, loading = resolved_world()
    assert loading.requeue_after_seconds == UNEXPLAINED_SECONDS
    later = world.now + timedelta(minutes=minutes)
    refused = (Refusal(RefusalCause.REJECTED, "Deployment", "chat", "invalid"),)
    assert decide(replace(world, now=later, refusals=refused), SETTINGS).requeue_after_seconds == seconds


@pytest.mark.parametrize("kind", ["ServiceAccount", "ConfigMap", "NetworkPolicy", "ControllerRevision"])
def test_no_pods_are_made_while_an_object_that_they_need_cannot_be_created(kind: str) -> None:
    world, before = resolved_world()
    refused = Refusal(RefusalCause.FORBIDDEN, kind, find(before.desired, kind)["metadata"]["name"], "denied")
    existing = decide(replace(world, refusals=(refused,)), SETTINGS)
    assert "Deployment" in {obj["kind"] for obj in existing.desired}
    others = tuple(child for child in world.children if child["metadata"]["name"] != refused.name)
    missing = decide(replace(world, children=others, refusals=(refused,)), SETTINGS)
    assert {"Deployment", "Job", kind}.isdisjoint(obj["kind"] for obj in missing.desired)
    assert "Service" in {obj["kind"] for obj in missing.desired}


def test_all_name_conflicts_are_named_at_once() -> None:
    refusals = tuple(Refusal(RefusalCause.TAKEN, kind, "chat") for kind in ("Service", "NetworkPolicy"))
    status = decide(replace(fresh(), refusals=refusals), SETTINGS).status
    assert condition(status, "Ready")["message"].startswith("Service chat, NetworkPolicy chat exist and do not belong")


def test_children_without_an_owner_are_read_and_written_but_not_pruned() -> None:
    world, before = resolved_world()
    orphans = tuple({**c, "metadata": {**c["metadata"], "ownerReferences": []}} for c in world.children)
    unused = {**find(orphans, "ConfigMap"), "metadata": {**find(orphans, "ConfigMap")["metadata"], "name": "unused"}}
    decision = decide(replace(world, children=(*orphans, unused)), SETTINGS)
    assert decision.desired == before.desired
    assert decision.delete == ()


def test_a_labelled_child_of_another_owner_is_neither_read_nor_deleted() -> None:
    world, before = resolved_world()
    other_owner = {"uid": "someone-else"}
    foreign = tuple(
        {**child, "metadata": {**child["metadata"], "name": "other", "ownerReferences": [other_owner]}}
        for child in world.children
    )
    decision = decide(replace(world, children=(*foreign, *world.children)), SETTINGS)
    assert decision.desired == before.desired
    assert decision.delete == ()


def test_a_revision_whose_artifacts_have_no_place_is_not_believed() -> None:
    world, _ = resolved_world()
    keeper = find(world.children, "ControllerRevision")
    compiling = {"image": "registry.example/compiler:1", "artifacts": {}}
    assert from_object(keeper) is not None
    assert from_object({**keeper, "data": {**keeper["data"], "compiling": compiling}}) is None


# The resolve Job


def test_a_superseded_running_job_is_deleted_and_a_finished_one_is_kept() -> None:
    world, decision = settle(fresh())
    old = find(decision.desired, "Job")["metadata"]["name"]
    running = decide(edited(world, model={"uri": "hf://acme/other"}), SETTINGS)
    assert [gone["metadata"]["name"] for gone in running.delete] == [old]
    over = decide(edited(finished(world, "Failed"), model={"uri": "hf://a/c"}), SETTINGS)
    assert over.delete == ()
    assert [change.patch for change in over.changes] == [{"spec": {"ttlSecondsAfterFinished": 600}}]


def test_the_job_that_resolved_the_model_is_left_to_finish() -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    _, pinned = settle(replace(world, pods=(resolved_pod(job),)))
    assert "Deployment" in kinds(pinned)
    assert pinned.delete == ()


def test_a_job_without_a_record_runs_again() -> None:
    world, _ = settle(fresh())
    decision = decide(finished(world), SETTINGS)
    assert [gone["kind"] for gone in decision.delete] == ["Job"]
    assert "Job" not in kinds(decision)
    assert "Job" in kinds(decide(carried_out(finished(world), decision), SETTINGS))


def test_a_failure_is_reported_until_the_next_job_replaces_it() -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    pod = job_pod(job, ended(10, failure_record(10, "ModelNotFound", "hf://acme/tiny does not exist")))
    world, failed = settle(replace(world, pods=(pod,)))
    assert condition(failed.status, "Ready")["reason"] == "ModelNotFound"
    world = replace(world, shared=(), pods=())
    again = decide(world, SETTINGS)
    assert "Job" in kinds(again)
    assert again.status == failed.status
    running = decide(replace(carried_out(world, again), pods=()), SETTINGS)
    assert running.status == failed.status
    elsewhere = decide(edited(world, model={"uri": "hf://a/b"}), SETTINGS)
    assert condition(elsewhere.status, "Ready")["reason"] == "Resolving"


@pytest.mark.parametrize(
    "state", [ended(1, "Traceback"), ended(137, "", "OOMKilled"), {"waiting": {}}], ids=["code", "memory", "evicted"]
)
def test_a_failure_without_a_record_is_reported_until_the_next_job_ends(state: Object) -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    evicted = {"reason": "Evicted", "message": "The node was low on memory"} if "waiting" in state else {}
    world, failed = settle(replace(finished(world, "Failed"), pods=(job_pod(job, state, **evicted),)))
    before = condition(failed.status, "ModelResolved")
    assert "the operator tries again" in before["message"]
    world = replace(world, shared=(), pods=())
    again = decide(world, SETTINGS)
    assert "Job" in kinds(again)
    assert condition(again.status, "ModelResolved") == before
    running = job_pod(job, {"running": {"startedAt": "2026-03-01T11:59:00Z"}}, phase="Running")
    world = replace(carried_out(world, again), pods=(running,))
    assert condition(decide(world, SETTINGS).status, "ModelResolved") == before


def test_free_devices_are_counted_for_a_replica_that_is_missing_beside_those_that_were_promised() -> None:
    """The operator may list nodes: nobody says otherwise only because they were not counted in this pass."""
    world, _ = resolved_world()
    deployment = find(world.children, "Deployment")
    pending = unscheduled_pod(deployment, "3 Insufficient aws.amazon.com/neuron.", "chat-2")
    world = replace(world, pods=(serving_pod(deployment, ready=True), pending))
    decision = decide(world, SETTINGS)
    assert Need.FREE_DEVICES in decision.needs
    assert condition(decision.status, "Available")["status"] == "True"
    assert "may not list" not in condition(decision.status, "Ready")["message"]


def test_the_events_of_a_job_without_a_pod_are_reported() -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    old = {**job, "metadata": {**job["metadata"], "creationTimestamp": "2026-03-01T11:59:00Z"}}
    waiting = decide(replace(world, shared=(old,)), SETTINGS)
    assert waiting.needs == {Need.EVENTS}
    event = {
        "regarding": {"kind": "Job", "name": job["metadata"]["name"]},
        "reason": "FailedCreate",
        "note": "exceeded quota: pods",
    }
    explained = decide(replace(world, shared=(old,), events=(event,)), SETTINGS)
    assert "FailedCreate: exceeded quota: pods" in condition(explained.status, "Ready")["message"]


# Always


POD_STATES = st.sampled_from(
    [
        {"ready": True},
        {},
        {"started": True},
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "x"}}},
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "last": ended(31), "restarts": 3},
        {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "a" not found'}}},
        {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no", "state": {}},
    ]
)
COMPILED = {"backend": "torch", "compile": "Enabled"}
STORING = replace(
    SETTINGS, storage=StorageSettings(artifacts=Place(persistent_volume_claim=Claim(claim_name="compiled")))
)
EDITS = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 4),
        "model": st.sampled_from([{"uri": "hf://acme/tiny"}, {"uri": "hf://acme/other"}, {"uri": "s3://bucket/x"}]),
        "accelerator": st.sampled_from([{"devices": 1}, {"devices": 6}, {"devices": 7}, {"cores": 1}, {"type": "CPU"}]),
        "serving": st.sampled_from([{}, {"maxModelLength": 512}, {"maxModelLength": 4096}, {"quantization": "Int8"}]),
        "engine": st.sampled_from([{"backend": "torch"}, COMPILED]),
    },
)


@given(st.lists(EDITS, max_size=3), st.lists(POD_STATES, max_size=4), st.booleans())
def test_decide_converges_from_any_state_and_stays_stable(
    edits: list[dict[str, Any]], states: list[dict[str, Any]], paused: bool
) -> None:
    world, _ = resolved_world()
    deployment = find(world.children, "Deployment")
    world = replace(world, pods=tuple(serving_pod(deployment, f"chat-{n}", **s) for n, s in enumerate(states)))
    for edit in edits:
        world, _ = settle(edited(world, **edit), STORING)
    if paused:
        world = annotated(world, paused="true")
    world, decision = settle(replace(world, free=FreeDevices(())), STORING)
    later = replace(world, now=NOW.replace(hour=23))
    again = decide(later, STORING)
    assert again.desired == decision.desired
    assert stored(again.desired) == again.desired, "desired objects are plain JSON"
    assert {c["reason"] for c in again.status["conditions"]} >= {c["reason"] for c in decision.status["conditions"]}  # type: ignore[index]


@given(JSON_VALUES, JSON_VALUES, JSON_VALUES)
def test_no_manifest_makes_decide_raise(spec: object, annotations: object, old_status: object) -> None:
    raw: Object = {"metadata": {"name": "chat", "annotations": annotations}, "spec": spec, "status": old_status}
    decision = decide(World(body=raw, children=(), pods=(), now=NOW), SETTINGS)
    assert condition(decision.status, "Accepted")["reason"] == "InvalidSpec"
    assert decision.desired == ()


def worlds_to_spoil() -> list[World]:
    """One model before it is resolved, one before it is compiled, one serving with a failed pod."""
    resolving, decision = settle(fresh())
    resolving = replace(resolving, pods=(job_pod(find(decision.desired, "Job"), ended(10, "x")),))
    world, _ = resolved_world()
    deployment = find(world.children, "Deployment")
    pods = (serving_pod(deployment, last=ended(31), restarts=2), serving_pod(deployment, "chat-2", ready=True))
    event = {"regarding": {"name": "chat-1"}, "reason": "FailedMount", "note": "no volume"}
    compiling, decision = settle(fresh(spec={**SPEC, "engine": COMPILED}), STORING)
    compiling, _ = settle(replace(finished(compiling), pods=(resolved_pod(find(decision.desired, "Job")),)), STORING)
    jobs = [found for found in compiling.shared if found["kind"] == "Job"]
    failed = (job_pod(job, ended(137, "x", "OOMKilled"), f"pod-{number}") for number, job in enumerate(jobs))
    return [resolving, replace(compiling, pods=tuple(failed)), replace(world, pods=pods, events=(event,))]


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything below an object or list."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


def spoiled(raw: dict[str, Any], changes: list[tuple[tuple[Any, ...], object]]) -> dict[str, Any]:
    """A copy with other JSON at these paths, where they still exist."""
    raw = copy.deepcopy(raw)
    for path, value in changes:
        part: Any = raw
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = value
    return raw


@pytest.mark.parametrize("world", worlds_to_spoil(), ids=["resolving", "compiling", "serving"])
@given(data=st.data())
def test_no_garbage_in_an_object_makes_decide_raise(world: World, data: st.DataObject) -> None:
    raw = {
        "status": world.body["status"],
        "children": list(world.children),
        "shared": list(world.shared),
        "pods": list(world.pods),
        "events": list(world.events or ()),
    }
    below = [path for path in places(raw) if len(path) > 2 or path[0] == "status"]
    changes = data.draw(st.lists(st.tuples(st.sampled_from(below), JSON_VALUES), min_size=1, max_size=6))
    found = spoiled(raw, changes)
    listed = {key: tuple(found[key]) for key in ("children", "shared", "pods", "events")}
    decision = decide(replace(world, body={**world.body, "status": found["status"]}, **listed), STORING)
    assert decision.status is not None
    assert {c["type"] for c in decision.status["conditions"]} - set(ABNORMAL) == {*CONDITIONS, "Ready"}


@pytest.mark.parametrize(("minutes", "seconds"), [(0, 30), (4, 30), (20, 120), (600, 300)])
def test_what_only_explains_a_failure_is_read_ever_more_rarely(minutes: int, seconds: int) -> None:
    world, _ = resolved_world()
    pod = unscheduled_pod(find(world.children, "Deployment"), "3 Insufficient aws.amazon.com/neuron.")
    world, decision = settle(replace(world, pods=(pod,), free=FreeDevices(())))
    assert condition(decision.status, "Ready")["reason"] == "InsufficientNeuron"
    later = replace(world, now=world.now + timedelta(minutes=minutes))
    assert decide(later, SETTINGS).requeue_after_seconds == seconds
