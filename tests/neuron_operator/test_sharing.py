"""What the models of a namespace share: one Job for the same work, its record kept, owners that come and go."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from helpers.operator_worlds import (
    NOW,
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
    serving_pod,
    settle,
)
from neuron_operator.api import names
from neuron_operator.decide.course import decide
from neuron_operator.decide.steps import STEPS, Step
from neuron_operator.read.objects import MAX_OWNERS, name_of, owners_of, written
from neuron_operator.read.revision import from_object, from_running
from neuron_operator.read.world import JobSettings, Object, World

OTHER = {"name": "other", "uid": "uid-other"}


def beside(world: World, **changes: Any) -> World:
    """Another model in the same namespace, which sees the same shared objects."""
    return replace(world, body=body(**{**OTHER, **changes}), children=())


def first_job(world: World) -> Object:
    return find(settle(world)[1].desired, "Job")


def uids(found: Object) -> list[object]:
    return [owner["uid"] for owner in owners_of(found)]


def test_two_models_with_the_same_source_render_the_same_job() -> None:
    one, two = (
        first_job(fresh()),
        first_job(beside(fresh(), spec={**SPEC, "replicas": 7, "serving": {"maxSequences": 3}})),
    )
    assert one["spec"] == two["spec"]
    assert name_of(one) == name_of(two)
    assert names.MODEL_LABEL not in one["metadata"]["labels"]
    assert "chat" not in str(one["spec"])


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"uri": "hf://acme/other"}},
        {"model": {"uri": "hf://acme/tiny", "credentialsSecretRef": {"name": "mine"}}},
        {"engine": {"backend": "torch", "image": "registry.example/other:1"}},
        {"podTemplate": {"spec": {"serviceAccountName": "reader"}}},
    ],
)
def test_another_source_identity_or_image_is_another_job(changed: Object) -> None:
    assert name_of(first_job(fresh())) != name_of(first_job(fresh(spec={**SPEC, **changed})))


def test_a_new_setting_of_the_installation_replaces_a_running_job_and_repeats_no_finished_one() -> None:
    using = replace(SETTINGS, jobs=JobSettings(env=({"name": "HTTPS_PROXY", "value": "http://proxy"},)))
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    stopped = decide(world, using)
    assert [name_of(gone) for gone in stopped.delete] == [name_of(job)]
    again = find(decide(carried_out(world, stopped), using).desired, "Job")
    assert name_of(again) == name_of(job)
    assert again["spec"] != job["spec"]
    world, _ = settle(replace(world, pods=(resolved_pod(job),)))
    _, done = settle(finished(world), using)
    assert done.delete == ()


def test_a_model_joins_the_job_of_another() -> None:
    world, _ = settle(fresh())
    joined, decision = settle(beside(world))
    assert [gone["kind"] for gone in decision.delete] == []
    assert [uids(found) for found in joined.shared] == [["uid-chat", "uid-other"]]


def test_a_record_is_copied_for_all_owners_before_the_step_is_done() -> None:
    world, decision = settle(fresh())
    world, _ = settle(beside(world))
    world = replace(world, pods=(resolved_pod(find(decision.desired, "Job")),))
    copying = decide(world, SETTINGS)
    keeper = find(copying.desired, "ConfigMap")
    assert uids(keeper) == ["uid-chat", "uid-other"]
    assert keeper["immutable"] is True
    assert "Deployment" not in {made["kind"] for made in copying.desired}
    _, done = settle(world)
    assert "Deployment" in {made["kind"] for made in done.desired}


def test_a_later_model_needs_no_job_once_the_record_is_kept() -> None:
    world, decision = settle(fresh())
    world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)))
    keepers = tuple(found for found in world.shared if found["kind"] == "ConfigMap")
    _, later = settle(replace(beside(world), shared=keepers, pods=()))
    assert "Deployment" in {made["kind"] for made in later.desired}


def in_a_mesh(pod: Object) -> Object:
    """A container of others runs on after the runtime has ended."""
    mesh = {"name": "istio-proxy", "ready": True, "state": {"running": {"startedAt": "2026-03-01T11:59:00Z"}}}
    pod["spec"] = {"containers": [{"name": "runtime"}, {"name": "istio-proxy"}]}
    pod["status"] |= {"phase": "Running", "containerStatuses": [*pod["status"]["containerStatuses"], mesh]}
    return pod


def test_a_job_that_a_container_of_others_keeps_alive_ends_once_its_record_is_kept() -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    world = replace(world, pods=(in_a_mesh(resolved_pod(job)),))
    keeping = decide(world, SETTINGS)
    assert name_of(job) not in map(name_of, keeping.delete)
    kept = decide(carried_out(world, keeping), SETTINGS)
    assert name_of(job) in map(name_of, kept.delete)


def test_a_failed_job_that_a_container_of_others_keeps_alive_is_made_again_as_soon_as_any_other() -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    end = ended(10, failure_record(10, "ModelNotFound", "no such model"))
    end["terminated"]["finishedAt"] = written(NOW + timedelta(seconds=100))
    world = replace(world, pods=(in_a_mesh(job_pod(job, end)),), now=NOW + timedelta(seconds=104))
    waiting = decide(world, SETTINGS)
    assert condition(waiting.status, "Ready")["reason"] == "ModelNotFound"
    assert waiting.delete == ()
    assert waiting.requeue_after_seconds == 6, "a tenth of the 104 s, counted from its end"
    due = decide(replace(world, now=NOW + timedelta(seconds=112)), SETTINGS)
    assert [name_of(gone) for gone in due.delete] == [name_of(job)]
    assert condition(due.status, "Ready")["reason"] == "ModelNotFound"
    assert [name_of(gone) for gone in decide(asking(world, "now"), SETTINGS).delete] == [name_of(job)]


def test_the_finished_job_expires_only_after_its_record_is_kept() -> None:
    world, decision = settle(fresh())
    world = finished(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)))
    copying = decide(world, SETTINGS)
    assert copying.changes == ()
    after = decide(carried_out(world, copying), SETTINGS)
    assert [change.patch for change in after.changes] == [{"spec": {"ttlSecondsAfterFinished": 600}}]


@pytest.mark.parametrize(("waited", "expires"), [(2, 1), (100, 10), (100_000, 600)])
def test_a_failed_job_is_made_again_after_a_tenth_of_the_time_that_it_was_awaited(waited: int, expires: int) -> None:
    world, decision = settle(fresh())
    pod = job_pod(find(decision.desired, "Job"), ended(10, failure_record(10, "ModelNotFound", "no such model")))
    decision = decide(replace(finished(world, "Failed"), pods=(pod,), now=NOW + timedelta(seconds=waited)), SETTINGS)
    assert [change.patch for change in decision.changes] == [{"spec": {"ttlSecondsAfterFinished": expires}}]
    assert condition(decision.status, "Ready")["reason"] == "ModelNotFound"


def asking(world: World, token: str, **annotations: str) -> World:
    """The model with a token in its retry annotation."""
    metadata = {**world.body["metadata"], "annotations": {names.RETRY_ANNOTATION: token, **annotations}}
    return replace(world, body={**world.body, "metadata": metadata})


def failed(world: World) -> World:
    job = find(world.shared, "Job")
    pod = job_pod(job, ended(10, failure_record(10, "ModelNotFound", "no such model")))
    return finished(replace(world, pods=(pod,)), "Failed")


def test_the_reason_of_a_failed_job_stays_while_it_is_deleted_after_its_pods() -> None:
    world, told = settle(failed(settle(fresh())[0]))
    decision = decide(replace(world, pods=()), SETTINGS)
    assert condition(decision.status, "Ready") == condition(told.status, "Ready")
    assert condition(decision.status, "Ready")["reason"] == "ModelNotFound"


def test_a_new_retry_token_repeats_a_failed_job_at_once_and_only_once() -> None:
    world = failed(settle(fresh())[0])
    assert decide(world, SETTINGS).delete == ()
    asked = asking(world, "monday")
    decision = decide(asked, SETTINGS)
    assert [gone["kind"] for gone in decision.delete] == ["Job"]
    assert decision.status is not None
    assert decision.status["retryKey"] == "monday"
    again = replace(carried_out(asked, decision), pods=())
    assert find(decide(again, SETTINGS).desired, "Job")["spec"] == find(world.shared, "Job")["spec"]
    twice = failed(settle(again)[0])
    assert decide(twice, SETTINGS).delete == ()
    assert [gone["kind"] for gone in decide(asking(twice, "tuesday"), SETTINGS).delete] == ["Job"]


def test_a_retry_token_disturbs_no_running_job_and_waits_while_the_model_is_paused() -> None:
    world, _ = settle(fresh())
    assert decide(asking(world, "monday"), SETTINGS).delete == ()
    paused = decide(asking(failed(world), "monday", **{names.PAUSED_ANNOTATION: "true"}), SETTINGS)
    assert paused.delete == ()
    assert paused.status is not None
    assert "retryKey" not in paused.status


def test_a_model_that_needs_a_job_no_more_leaves_it_to_the_others() -> None:
    world, _ = settle(fresh())
    both, _ = settle(beside(world))
    edited = replace(both, body=body({**SPEC, "model": {"uri": "hf://acme/new"}}, **OTHER))
    left, decision = settle(edited)
    assert decision.delete == ()
    assert [uids(found) for found in left.shared] == [["uid-chat"], ["uid-other"]]


def test_models_that_leave_a_shared_job_at_the_same_time_leave_nothing() -> None:
    """Each of them still sees the other as an owner; the operator ends before it deletes the orphan."""
    both, _ = settle(beside(settle(fresh())[0]))
    one = replace(both, body=body({**SPEC, "model": {"uri": "hf://acme/new"}}, **OTHER))
    two = replace(both, body=body({**SPEC, "model": {"uri": "hf://acme/new"}}))
    leaving = decide(two, SETTINGS)
    assert [change.unchanged for change in leaving.changes] == [False]
    left = replace(carried_out(one, decide(one, SETTINGS)), body=two.body)
    orphaned = carried_out(left, replace(leaving, desired=()))
    assert [] in [uids(found) for found in orphaned.shared]
    later = settle(orphaned)[0]
    assert [uids(found) for found in later.shared] == [["uid-other", "uid-chat"]]


def test_the_last_model_deletes_the_job_that_nobody_needs() -> None:
    world, decision = settle(fresh())
    old = name_of(find(decision.desired, "Job"))
    edited = decide(replace(world, body=body({**SPEC, "model": {"uri": "hf://acme/new"}})), SETTINGS)
    assert [name_of(gone) for gone in edited.delete] == [old]


def test_the_record_of_an_earlier_revision_stays_as_long_as_the_revision() -> None:
    world, decision = settle(fresh())
    world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)))
    kept = {name_of(found) for found in world.shared if found["kind"] == "ConfigMap"}
    edited = {**SPEC, "serving": {"maxModelLength": 512}}
    world, _ = settle(replace(world, body={**world.body, "spec": edited}))
    assert kept <= {name_of(found) for found in world.shared}


def voidable() -> tuple[Step, ...]:
    """Facts are pinned and therefore never void: the same step, as one whose result is a file."""
    voided = replace(STEPS[0].tasks[0], knows=None, void_after=frozenset({20}))
    return (Step(STEPS[0].finish, (voided,)), *STEPS[1:])


def served(steps: tuple[Step, ...], **spec: Any) -> World:
    world, decision = settle(fresh(spec={**SPEC, **spec}), steps=steps)
    pods = (resolved_pod(find(decision.desired, "Job")),)
    return settle(finished(replace(world, pods=pods)), steps=steps)[0]


def disputed(world: World, code: int = 20, kept_at: str = "11:54:30", record: Object | None = None) -> World:
    """A pod ended with a code after the record was kept."""
    keeper = find(world.shared, "ConfigMap")
    kept = json.dumps(json.loads(keeper["data"]["record.json"]) | (record or {}))
    metadata = {**keeper["metadata"], "creationTimestamp": f"2026-03-01T{kept_at}Z"}
    keeper = {**keeper, "metadata": metadata, "data": {"record.json": kept}}
    last = {"terminated": {"exitCode": code, "finishedAt": "2026-03-01T11:55:00Z"}}
    pod = serving_pod(find(world.children, "Deployment"), last=last, restarts=1)
    return replace(world, shared=(find(world.shared, "Job"), keeper), pods=(*world.pods, pod))


NOTHING_NEW = {"weights": {"digest": "0" * 40, "bytes": 7, "readBytes": 0}}


@pytest.mark.parametrize(
    ("code", "kept_at", "record", "again"),
    [
        (20, "11:54:30", {}, True),
        (31, "11:54:30", {}, False),
        (20, "11:55:30", {}, False),
        (20, "11:54:30", NOTHING_NEW, False),
        (20, "11:53:30", NOTHING_NEW, True),
    ],
)
def test_a_record_is_void_once_a_serving_pod_misses_what_it_tells_of(
    code: int, kept_at: str, record: Object, again: bool
) -> None:
    decision = decide(disputed(served(voidable()), code, kept_at, record), SETTINGS, voidable())
    gone = {found["kind"] for found in decision.delete}
    assert gone == ({"ConfigMap", "Job"} if again else set())
    assert "Deployment" in {found["kind"] for found in decision.desired}, "the other replicas go on"


def test_a_revision_that_is_rebuilt_still_names_what_it_uses() -> None:
    world = served(voidable())
    kept = from_object(find(world.children, "ControllerRevision"))
    running = from_running(find(world.children, "Deployment"), [c for c in world.children if c["kind"] == "ConfigMap"])
    assert kept is not None
    assert running is not None
    assert running.shared == kept.shared == (name_of(find(world.shared, "Job")),)


@pytest.mark.parametrize(("overdue", "again"), [(5, False), (60, True)])
def test_a_job_that_waits_for_a_pod_on_a_lost_node_is_made_again(overdue: int, again: bool) -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    pod = job_pod(job, {"running": {}}, phase="Running")
    pod["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=overdue)).isoformat()
    stuck = decide(replace(world, pods=(pod,)), SETTINGS)
    assert [name_of(gone) for gone in stuck.delete] == ([name_of(job)] if again else [])
    assert name_of(find(decide(carried_out(world, stuck), SETTINGS).desired, "Job")) == name_of(job)


def test_models_that_say_the_same_in_other_words_do_not_replace_each_others_running_job() -> None:
    using = replace(SETTINGS, jobs=JobSettings(resources={"requests": {"memory": "1Gi"}}))
    world, _ = settle(fresh(), using)
    said = {**SPEC, "jobs": {"resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}}}
    _, other = settle(beside(world, spec=said), using)
    assert other.delete == ()


def test_a_pod_of_a_deleted_job_says_nothing_about_the_next_with_its_name() -> None:
    world, decision = settle(fresh())
    pod = resolved_pod(find(decision.desired, "Job"))
    again = tuple({**job, "metadata": {**job["metadata"], "uid": "another"}} for job in world.shared)
    waiting = decide(replace(world, shared=again, pods=(pod,)), SETTINGS)
    assert said(condition(waiting.status, "ModelResolved")) == "reading the model's configuration"
    assert "ConfigMap" not in {made["kind"] for made in waiting.desired}


def test_a_success_whose_pod_is_seen_to_end_later_does_not_expire_as_a_failure() -> None:
    world, decision = settle(fresh())
    pod = job_pod(find(decision.desired, "Job"), {"running": {}}, phase="Running")
    assert decide(finished(replace(world, pods=(pod,))), SETTINGS).changes == ()


def test_of_many_models_with_one_source_a_few_own_the_job_and_its_record() -> None:
    world, decision = settle(fresh())
    for number in range(30):
        world, joined = settle(replace(world, body=body(name=f"other-{number}", uid=f"uid-{number}"), children=()))
        assert joined.uses == {name_of(world.shared[0])}
    assert [len(owners_of(found)) for found in world.shared] == [MAX_OWNERS]
    world, _ = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job")),)))
    assert {found["kind"]: len(owners_of(found)) for found in world.shared} == {
        "Job": MAX_OWNERS,
        "ConfigMap": MAX_OWNERS,
    }


def test_the_last_owner_stays_until_another_model_that_needs_the_job_has_joined() -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    edited = {**SPEC, "model": {"uri": "hf://acme/other"}}
    moved, _ = settle(replace(world, body={**world.body, "spec": edited}, used_by_others=frozenset({name_of(job)})))
    assert [uids(found) for found in moved.shared if name_of(found) == name_of(job)] == [["uid-chat"]]
    joined, _ = settle(replace(beside(moved), used_by_others=frozenset()))
    assert ["uid-chat", "uid-other"] in map(uids, joined.shared)
    left, _ = settle(replace(moved, shared=joined.shared))
    assert [uids(found) for found in left.shared if name_of(found) == name_of(job)] == [["uid-other"]]
