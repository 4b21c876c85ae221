"""A NeuronAdapter is accepted, read, fetched and listed by passes of its own, and says which replica lacks it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given

from helpers.manifests import ADAPTERS, Manifests
from helpers.operator_worlds import (
    ADAPTER_FACTS,
    JSON_VALUES,
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
    having_served,
    job_pod,
    resolved_world,
    said,
    serving_pod,
    settle,
)
from neuron_operator.api import names
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.manifest import parse, parse_adapter
from neuron_operator.api.model import Claim
from neuron_operator.api.reasons import AdaptersOf
from neuron_operator.cluster.client import MAX_OBJECT_BYTES
from neuron_operator.decide.adapter import LOOK_SECONDS, POLL_SECONDS, decide_adapter
from neuron_operator.decide.course import RECHECK_SECONDS, decide
from neuron_operator.read.objects import name_of, written
from neuron_operator.read.world import (
    MAX_ADAPTER_JOBS,
    Decision,
    Object,
    Place,
    Refusal,
    RefusalCause,
    Settings,
    StorageSettings,
    Told,
    World,
)
from neuron_operator.run.pace import Key, Pace

MODEL_SPEC: dict[str, Any] = {**SPEC, "serving": {"adapters": {"maxActive": 4, "maxRank": 32, "targets": ["q_proj"]}}}
IN_CLAIM = replace(SETTINGS, storage=StorageSettings(weights=Place(persistent_volume_claim=Claim(claim_name="models"))))
DIGEST, SOURCE = ADAPTER_FACTS["digest"], "c1" * 20
FACTS = {**ADAPTER_FACTS, "sourceDigest": SOURCE}
FETCHED = {"digest": SOURCE, "bytes": FACTS["numBytes"], "readBytes": FACTS["numBytes"]}


def adapter(spec: Mapping[str, Any] | None = None, **metadata: Any) -> Object:
    """A NeuronAdapter as read."""
    given = {"model": "chat", "uri": "hf://acme/support-de", **(spec or {})}
    identity = {"name": "support-de", "namespace": "team", "uid": "uid-support-de", "generation": 1, **metadata}
    return {"apiVersion": names.API_VERSION, "kind": "NeuronAdapter", "metadata": identity, "spec": given}


def base(spec: Mapping[str, Any] = MODEL_SPEC, told: tuple[str, ...] = ("ModelResolved", "WeightsReady")) -> Object:
    """Its model, of which these conditions are true."""
    conditions = [{"type": kind, "status": "True", "message": "done"} for kind in told]
    status = {"conditions": conditions, "model": {"digest": "m1"}}
    return {**body(spec), "status": status}


def world(spec: Mapping[str, Any] | None = None, of: Object | None = None, **metadata: Any) -> World:
    return World(body=adapter(spec, **metadata), children=(), pods=(), now=NOW, base=of or base(), has_turn=True)


def settled(start: World, using: Settings = SETTINGS) -> tuple[World, Decision]:
    """After passes until nothing changes."""
    for _ in range(8):
        decision = decide_adapter(start, using)
        after = carried_out(start, decision)
        if after == start:
            return start, decision
        start = after
    raise AssertionError("not at rest")


def after_job(start: World, using: Settings = SETTINGS, **result: Any) -> tuple[World, Decision]:
    """After the Job that the adapter waits for ended with this result."""
    start, decision = settled(start, using)
    job = find(decision.desired, "Job")
    record = json.dumps({"version": 1, "command": "inspect", "ok": True, **result})
    pod = job_pod(job, ended(0, record), f"pod-of-{name_of(job)}", phase="Succeeded")
    return settled(finished(replace(start, pods=(*start.pods, pod))), using)


def passed(**metadata: Any) -> World:
    return after_job(world(**metadata), adapter=FACTS)[0]


def reason_of(decision: Decision, kind: str = "Ready") -> tuple[str, str]:
    found = condition(decision.status, kind)
    return found["status"], found["reason"]


def command_of(job: Object) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return list(container["command"])


def replica(name: str, ip: str = "10.0.0.1", ready: bool = True) -> Object:
    deployment, _ = resolved_world()
    return serving_pod(find(deployment.children, "Deployment"), name, ready=ready, podIP=ip)


def told(start: World, **said_by: Any) -> World:
    """The state in which replicas answer so: a state, with more fields after it, or what is not JSON."""
    answers = {}
    for number, (pod, said_) in enumerate(said_by.items()):
        need = AdaptersOf(pod, f"http://10.0.0.{number}:8000/adapters")
        answers[need] = said_ if isinstance(said_, Told) else Told(json.dumps({"adapters": said_}))
    pods = tuple(replica(need.pod, f"10.0.0.{number}") for number, need in enumerate(answers))
    return replace(start, pods=(*start.pods, *pods), told=answers)


def entry(state: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": "support-de", "state": state, "digest": DIGEST, **fields}]


def test_the_size_of_a_small_adapter_is_not_rounded_to_nothing() -> None:
    sizes = {num: after_job(world(), adapter={**FACTS, "numBytes": num})[1] for num in (2**20 + 2**19, 20_480)}
    shown = [decision.status["served"]["size"] for decision in sizes.values() if decision.status]
    assert shown == ["1.5 MiB", "20.0 KiB"]


@pytest.mark.parametrize(
    ("changed", "reason", "words"),
    [
        ({"base": None}, "NoSuchModel", "spec.model: namespace team has no NeuronModel chat"),
        ({"base": base(SPEC)}, "AdaptersNotServed", "set its spec.serving.adapters.maxActive"),
        (
            {"base": base({**MODEL_SPEC, "model": {"uri": "hf://acme/tiny", "servedNames": ["a", "support-de"]}})},
            "NameTaken",
            "metadata.name: NeuronModel chat itself is served as support-de",
        ),
        ({"base": base({**MODEL_SPEC, "replicas": -1})}, "InvalidSpec", "NeuronModel chat is refused: spec.replicas"),
        ({"body": adapter({"uri": "ftp://x"})}, "InvalidSpec", "spec.uri: must be hf://"),
        (
            {"body": adapter({"uri": "oci://registry/x"})},
            "FieldNotSupported",
            "spec.uri: a replica mounts nothing more",
        ),
        ({"body": adapter({"uri": "pvc://other/x"})}, "FieldNotSupported", "copy the adapter to s3:// or to a hub"),
        (
            {"body": adapter({"credentialsSecretRef": {"name": "mine"}})},
            "FieldNotSupported",
            "spec.credentialsSecretRef: the replicas of chat fetch adapters themselves",
        ),
        (
            {"base": base({**MODEL_SPEC, "parallelism": {"nodes": 2}})},
            "FieldNotSupported",
            "spec.uri: the 2 nodes of a replica must all find the adapter",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_cure(changed: dict[str, Any], reason: str, words: str) -> None:
    decision = decide_adapter(replace(world(), **changed), SETTINGS)
    assert reason_of(decision, "Accepted") == ("False", reason)
    assert words in condition(decision.status, "Ready")["message"]
    assert reason_of(decision) == ("False", reason)
    assert reason_of(decision, "Stalled") == ("True", reason)
    assert reason_of(decision, "Resolved") == ("Unknown", reason)
    assert not decision.desired


def test_the_adapter_of_a_model_that_is_not_known_yet_waits_for_it() -> None:
    decision = decide_adapter(world(of=base(told=())), SETTINGS)
    assert reason_of(decision, "Resolved") == ("False", "Resolving")
    assert "waiting until ModelResolved of model chat is true" in condition(decision.status, "Resolved")["message"]
    assert not decision.desired


def test_a_job_compares_the_adapter_with_its_model_and_its_limits() -> None:
    _, decision = settled(world())
    job = find(decision.desired, "Job")
    inspect = ["neuron-runtime", "inspect", "hf://acme/support-de", "--adapter-of", "hf://acme/tiny"]
    limits = ["--backend", "torch", "--max-rank", "32", "--targets", "q_proj"]
    assert command_of(job)[:-2] == [*inspect, *limits]
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("NeuronAdapter", "support-de")
    assert reason_of(decision) == ("False", "Resolving")


def test_with_a_claim_the_model_is_read_there_and_a_job_fetches_the_adapter_with_its_own_secret() -> None:
    start = world({"credentialsSecretRef": {"name": "mine"}})
    start, decision = settled(start, IN_CLAIM)
    job = find(decision.desired, "Job")
    assert command_of(job)[4] == f"file://{names.WEIGHTS_DIR}/m1"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == ["tmp", "weights"]
    start, decision = after_job(start, IN_CLAIM, adapter=FACTS)
    job = find(decision.desired, "Job")
    assert command_of(job)[:3] == ["neuron-runtime", "fetch", "hf://acme/support-de"]
    assert command_of(job)[3:] == [
        names.WEIGHTS_DIR,
        "--digest",
        SOURCE,
        "--record",
        names.TERMINATION_LOG,
        "--adapter",
    ]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    secrets = [one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"] if "valueFrom" in one]
    assert secrets == ["mine"]
    assert "served" not in decision.status  # type: ignore[operator]
    _, decision = after_job(start, IN_CLAIM, weights=FETCHED)
    assert decision.status is not None
    assert (decision.status["served"]["digest"], decision.status["served"]["sourceDigest"]) == (DIGEST, SOURCE)
    assert reason_of(decision, "Fetched") == ("True", "Fetched")


def aged(start: World, minutes: int) -> World:
    """The Jobs and their records are so old."""
    created = {"creationTimestamp": written(start.now - timedelta(minutes=minutes))}
    shared = tuple({**obj, "metadata": {**obj["metadata"], **created}} for obj in start.shared)
    return replace(start, shared=shared)


def in_claim() -> World:
    """An adapter that a Job has fetched an hour ago."""
    start, _ = after_job(world(), IN_CLAIM, adapter=FACTS)
    start, _ = after_job(start, IN_CLAIM, weights=FETCHED)
    return aged(replace(start, pods=()), 60)


@pytest.mark.parametrize("reason", ["WeightsMissing", "ChecksumMismatch"])
def test_what_a_replica_misses_in_the_claim_is_fetched_again(reason: str) -> None:
    lost = entry("Failed", digest="", reason=reason, message="gone")
    start = told(in_claim(), a=entry("Ready"), b=lost)
    decision = decide_adapter(start, IN_CLAIM)
    assert reason_of(decision, "Fetched") == ("False", "Fetching")
    assert "the version before" not in condition(decision.status, "Ready")["message"]
    assert decision.status is not None
    assert (decision.status["served"]["digest"], decision.status["ready"]) == (DIGEST, "1/2")
    assert {gone["kind"] for gone in decision.delete} == {"Job", "ConfigMap"}
    start = carried_out(start, decision)
    again = find(decide_adapter(start, IN_CLAIM).desired, "Job")
    assert command_of(again)[:2] == ["neuron-runtime", "fetch"]
    # Fetched: the replica tries again within minutes, and what it says until then changes nothing.
    start, _ = after_job(start, IN_CLAIM, weights=FETCHED)
    decision = decide_adapter(aged(start, 5), IN_CLAIM)
    assert reason_of(decision, "Fetched") == ("True", "Fetched")
    assert reason_of(decision) == ("False", reason)
    assert not decision.delete
    # It still says so: the claim may have lost it again.
    assert reason_of(decide_adapter(aged(start, 7), IN_CLAIM), "Fetched") == ("False", "Fetching")


def test_what_a_job_found_in_the_claim_is_looked_for_again_at_long_intervals() -> None:
    lost = entry("Failed", digest="", reason="WeightsMissing")
    start = told(in_claim(), a=lost)
    start = carried_out(start, decide_adapter(start, IN_CLAIM))
    start, _ = after_job(start, IN_CLAIM, weights={**FETCHED, "readBytes": 0})
    for minutes, expected in ((7, "True"), (59, "True"), (61, "False")):
        assert reason_of(decide_adapter(aged(start, minutes), IN_CLAIM), "Fetched")[0] == expected, minutes


def test_who_sets_the_annotation_has_a_lost_adapter_fetched_at_once() -> None:
    start, _ = after_job(world(), IN_CLAIM, adapter=FACTS)
    start, _ = after_job(start, IN_CLAIM, weights=FETCHED)
    start = told(start, a=entry("Failed", digest="", reason="WeightsMissing"))
    assert reason_of(decide_adapter(start, IN_CLAIM), "Fetched") == ("True", "Fetched")
    asked = adapter(annotations={names.RETRY_ANNOTATION: "1"})
    start = replace(start, body={**asked, "status": start.body["status"]})
    assert reason_of(decide_adapter(start, IN_CLAIM), "Fetched") == ("False", "Fetching")


def test_another_fault_of_a_replica_has_nothing_fetched_again() -> None:
    for answer in (entry("Failed", reason="StorageFull"), entry("Loading"), Told(fault="refused")):
        decision = decide_adapter(told(in_claim(), a=answer), IN_CLAIM)
        assert reason_of(decision, "Fetched") == ("True", "Fetched")


def test_an_adapter_stays_with_its_model_where_the_installation_names_a_claim_later() -> None:
    of, _ = resolved_world(spec=MODEL_SPEC)
    of, _ = settle(having_served(of), IN_CLAIM)
    start = replace(world(of=of.body), of_base=of.children)
    assert "persistentVolumeClaim" not in json.dumps(of.children)
    _, decision = settled(start, IN_CLAIM)
    assert command_of(find(decision.desired, "Job"))[3:5] == ["--adapter-of", "hf://acme/tiny"]
    _, decision = after_job(start, IN_CLAIM, adapter=FACTS)
    assert reason_of(decision, "Fetched") == ("True", "FetchedByPods")


def test_with_a_claim_an_adapter_is_compared_again_with_other_weights_of_its_model() -> None:
    start, _ = after_job(world(), IN_CLAIM, adapter=FACTS)
    start, _ = after_job(start, IN_CLAIM, weights=FETCHED)
    # The status of an edited model tells of its earlier weights until its next pass.
    edited = {**base({**MODEL_SPEC, "model": {"uri": "hf://acme/other"}}), "status": base()["status"]}
    start, _ = settled(replace(start, base=edited), IN_CLAIM)
    told_later = {**edited, "status": {**edited["status"], "model": {"digest": "m2"}}}
    _, decision = settled(replace(start, base=told_later), IN_CLAIM)
    assert command_of(find(decision.desired, "Job"))[4] == f"file://{names.WEIGHTS_DIR}/m2"
    assert decision.status is not None
    assert decision.status["served"]["digest"] == DIGEST


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (60, "RankTooHigh"),
        (61, "TargetsNotServed"),
        (62, "AdapterMismatch"),
        (63, "AdapterNotSupported"),
        (64, "InvalidAdapter"),
        (10, "ModelNotFound"),
        (11, "WeightsUnauthorized"),
    ],
)
def test_an_adapter_that_does_not_fit_says_why(code: int, reason: str) -> None:
    start, decision = settled(world())
    pod = job_pod(find(decision.desired, "Job"), ended(code, failure_record(code, reason, "rank 64 exceeds 32")))
    after, decision = settled(finished(replace(start, pods=(pod,)), "Failed"))
    assert reason_of(decision, "Resolved") == ("False", reason)
    assert "rank 64 exceeds 32" in said(condition(decision.status, "Ready"))
    assert reason_of(decision, "Stalled") == ("True", reason)
    # While it waits for its turn to be tried again, too.
    decision = decide_adapter(replace(after, pods=(), shared=(), children=(), has_turn=False), SETTINGS)
    assert decision.job == "Waiting"
    assert reason_of(decision, "Resolved") == ("False", reason)
    assert "rank 64 exceeds 32" in said(condition(decision.status, "Ready"))


def test_an_adapter_is_tried_again_once_for_each_value_of_the_annotation() -> None:
    def failed(start: World, name: str) -> World:
        start, decision = settled(start)
        pod = job_pod(find(decision.desired, "Job"), ended(64, failure_record(64, "InvalidAdapter", "damaged")), name)
        return finished(replace(start, pods=(pod,)), "Failed")

    start, _ = settled(failed(world(), "first"))
    asked = adapter(annotations={names.RETRY_ANNOTATION: "1"})
    start = replace(start, body={**asked, "status": start.body["status"]})
    decision = decide_adapter(start, SETTINGS)
    assert [gone["kind"] for gone in decision.delete] == ["Job"]
    start = failed(replace(carried_out(start, decision), pods=()), "second")
    assert not decide_adapter(start, SETTINGS).delete


def test_an_edit_that_does_not_fit_leaves_the_version_before_in_the_list() -> None:
    start = passed()
    edited = adapter({"uri": "hf://acme/wrong"}, generation=2)
    start, decision = settled(replace(start, body={**edited, "status": start.body["status"]}))
    pod = job_pod(find(decision.desired, "Job"), ended(60, failure_record(60, "RankTooHigh", "rank 64")), "second")
    start, decision = settled(finished(replace(start, pods=(*start.pods, pod)), "Failed"))
    assert reason_of(decision) == ("False", "RankTooHigh")
    assert decision.status is not None
    assert decision.status["served"]["uri"] == "hf://acme/support-de"
    assert "the version before is served on" in condition(decision.status, "Ready")["message"]
    # The record of the version before stays, and reverting the edit needs no Job.
    back = adapter(generation=3)
    _, decision = settled(replace(start, body={**back, "status": start.body["status"]}))
    assert reason_of(decision, "Resolved") == ("True", "Resolved")
    assert not [obj for obj in decision.desired if obj["kind"] == "Job"]


def test_an_adapter_is_read_again_for_another_backend_and_served_on_meanwhile() -> None:
    on_host = {**MODEL_SPEC, "accelerator": {"type": "CPU"}}
    before = after_job(world(of=base({**on_host, "engine": {"backend": "torch"}})), adapter=FACTS)[0]
    assert not [obj for obj in decide_adapter(before, SETTINGS).desired if obj["kind"] == "Job"]
    moved = replace(before, base=base({**on_host, "engine": {"backend": "simulated"}}))
    decision = decide_adapter(moved, SETTINGS)
    command = command_of(find(decision.desired, "Job"))
    assert command[command.index("--backend") + 1] == "simulated"
    assert decision.status is not None
    assert decision.status["served"]["digest"] == DIGEST


def test_an_upgrade_of_the_operator_reads_no_adapter_again() -> None:
    _, decision = settled(passed(), replace(SETTINGS, runtime_image="registry.example/neuron-serving-runtime:2"))
    assert reason_of(decision, "Resolved") == ("True", "Resolved")
    assert not [obj for obj in decision.desired if obj["kind"] == "Job"]


def test_an_adapter_that_a_version_without_the_backend_in_its_key_checked_is_not_read_again() -> None:
    start = passed()
    status = {**start.body["status"], "served": {**start.body["status"]["served"], "key": "19fc9bb8a6"}}
    upgraded = replace(start, body={**start.body, "status": status}, has_turn=False)
    new_image = replace(SETTINGS, runtime_image="registry.example/neuron-serving-runtime:2")
    after, decision = settled(upgraded, new_image)
    assert reason_of(decision, "Resolved") == ("True", "Resolved")
    assert decision.job is None
    # From then on the backend counts.
    assert after.body["status"]["served"]["key"] == start.body["status"]["served"]["key"]
    on_host = {**MODEL_SPEC, "accelerator": {"type": "CPU"}, "engine": {"backend": "simulated"}}
    assert decide_adapter(replace(after, base=base(on_host)), new_image).job == "Waiting"


def test_a_name_that_its_model_takes_leaves_the_list() -> None:
    taken = base({**MODEL_SPEC, "model": {"uri": "hf://acme/tiny", "servedNames": ["support-de"]}})
    decision = decide_adapter(replace(passed(), base=taken), SETTINGS)
    assert "served" not in (decision.status or {})


def test_it_is_ready_when_every_replica_serves_this_version() -> None:
    decision = decide_adapter(told(passed(), a=entry("Ready"), b=entry("Ready")), SETTINGS)
    assert reason_of(decision) == ("True", "Ready")
    assert decision.status is not None
    assert decision.status["ready"] == "2/2"
    assert decision.requeue_after_seconds == LOOK_SECONDS
    assert decision.announcements[0].type == "Normal"


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (entry("Loading"), "Loading", "b: Loading"),
        (
            entry("Failed", reason="StorageFull", message="no room"),
            "StorageFull",
            "b: Failed: StorageFull: no room",
        ),
        (entry("Failed", message="odd"), "AdapterNotLoaded", "b: Failed: odd"),
        (entry("Ready", digest="d0"), "Loading", "b: it serves the version before"),
        ([], "Loading", "b: it has not read the list yet"),
        (Told("Not Found"), "Loading", "b: it does not tell, as an earlier revision"),
        (Told('{"x": ' + "[" * 100_000), "Loading", "b: it does not tell, as an earlier revision"),
        (Told(fault="connection refused"), "Loading", "b: it does not tell: connection refused"),
    ],
)
def test_a_replica_that_lacks_it_is_named_with_the_cause(answer: Any, reason: str, words: str) -> None:
    decision = decide_adapter(told(passed(), a=entry("Ready"), b=answer), SETTINGS)
    assert reason_of(decision) == ("False", reason)
    assert words in condition(decision.status, "Ready")["message"]
    assert decision.status is not None
    assert decision.status["ready"] == "1/2"
    assert decision.requeue_after_seconds == POLL_SECONDS


def test_an_adapter_says_that_somebody_deletes_its_jobs() -> None:
    undone = Refusal(RefusalCause.UNDONE, "Job", "adapter-facts-1", "somebody deletes it before it ends")
    decision = decide_adapter(replace(world(), refusals=(undone,)), SETTINGS)
    assert reason_of(decision, "Contested") == ("True", "Contested")
    assert "somebody deletes it before it ends" in condition(decision.status, "Contested")["message"]


def test_a_replica_that_lacks_it_for_long_is_asked_more_rarely() -> None:
    start = told(passed(), a=entry("Ready"), b=[])
    start = carried_out(start, decide_adapter(start, SETTINGS))
    due = [decide_adapter(replace(start, now=NOW + timedelta(minutes=n)), SETTINGS) for n in (0, 3, 60)]
    assert [one.requeue_after_seconds for one in due] == [POLL_SECONDS, 9.0, RECHECK_SECONDS]


def test_a_replica_that_starts_is_not_asked_and_counts_as_lacking() -> None:
    start = replace(passed(), pods=(replica("a", ready=False),))
    decision = decide_adapter(start, SETTINGS)
    assert not decision.needs
    assert "a: it does not answer yet" in condition(decision.status, "Ready")["message"]


@given(JSON_VALUES, JSON_VALUES, JSON_VALUES)
def test_nothing_that_anybody_writes_makes_a_pass_raise(spec: Any, status: Any, answer: Any) -> None:
    start = told(passed(), a=answer, b=Told(json.dumps(answer)))
    for changed in ({"spec": spec}, {"status": status}, {"status": {"served": status, "conditions": status}}):
        decide_adapter(replace(start, body={**start.body, **changed}), SETTINGS)
    decide_adapter(replace(start, base={**base(), "spec": spec, "status": status}), SETTINGS)


def test_the_model_lists_what_passed_and_mounts_the_list() -> None:
    served = {"model": "chat", "uri": "hf://acme/x", "key": "k", "digest": "d1", "sourceDigest": "c1"}
    good, elsewhere, new = adapter(name="b"), adapter({"model": "other"}, name="c"), adapter(name="a")
    listed = ({**good, "status": {"served": served}}, {**elsewhere, "status": {"served": served}}, new)
    start, _ = resolved_world(spec=MODEL_SPEC)
    decision = decide(replace(start, adapters=listed), SETTINGS)
    found = next(obj for obj in decision.desired if name_of(obj) == "chat-adapters")
    document = json.loads(found["data"]["adapters.json"])
    assert document == {"adapters": [{"name": "b", "uri": "hf://acme/x", "digest": "d1", "sourceDigest": "c1"}]}
    assert "immutable" not in found
    template = find(decision.desired, "Deployment")["spec"]["template"]["spec"]
    assert {"name": "adapters", "configMap": {"name": "chat-adapters"}} in template["volumes"]
    assert "--adapters-file" in command_of({"spec": {"template": {"spec": template}}})
    assert not [gone for gone in decision.delete if name_of(gone) == "chat-adapters"]


def served_adapter(name: str, number: int = 0, uri: str = "hf://acme/x") -> Object:
    """One that passed its steps; of two, that with the lower number was created first."""
    served = {"model": "chat", "uri": uri, "key": "k", "digest": DIGEST, "sourceDigest": SOURCE}
    created = written(NOW + timedelta(seconds=number))
    return {**adapter(name=name, uid=name, creationTimestamp=created), "status": {"served": served}}


@pytest.mark.parametrize(
    ("uri", "most"),
    [("hf://acme/x", 256), ("s3://b/" + "\U0001f600" * 1017, 100), ("s3://b/" + '\\"' * 508, 100)],
    ids=["short", "four bytes a character", "quoted twice"],
)
def test_a_list_has_room_for_the_oldest_adapters_and_the_others_say_so(uri: str, most: int) -> None:
    everybody = tuple(served_adapter(f"a{number}", number, uri) for number in reversed(range(2000)))
    model, _ = resolved_world(spec=MODEL_SPEC)
    decision = decide(replace(model, adapters=everybody), SETTINGS)
    found = next(obj for obj in decision.desired if name_of(obj) == "chat-adapters")
    listed = {one["name"] for one in json.loads(found["data"]["adapters.json"])["adapters"]}
    assert listed == {f"a{number}" for number in range(len(listed))}
    assert most / 2 < len(listed) <= most
    assert len(json.dumps(found, ensure_ascii=False).encode()) < MAX_OBJECT_BYTES * 0.8
    assert condition(decision.status, "Accepted")["status"] == "True"

    def shown(number: int) -> Decision:
        start = passed(name=f"a{number}", uid=f"a{number}")
        body = {**start.body, "spec": {**start.body["spec"], "uri": uri}}
        body["status"]["served"]["uri"] = uri
        return decide_adapter(replace(told(replace(start, body=body), a=[]), of_base=(found,)), SETTINGS)

    assert shown(len(listed) - 1).needs
    assert not shown(len(listed)).needs, "nobody is asked about it"


def test_an_adapter_without_room_in_the_list_is_stalled() -> None:
    model, _ = resolved_world(spec=MODEL_SPEC)
    full = replace(model, adapters=tuple(served_adapter(f"a{number}", number) for number in range(256)))
    found = next(obj for obj in decide(full, SETTINGS).desired if name_of(obj) == "chat-adapters")
    decision = decide_adapter(replace(told(passed(), a=[]), of_base=(found,)), SETTINGS)
    assert reason_of(decision) == ("False", "TooManyAdapters")
    assert reason_of(decision, "Stalled") == ("True", "TooManyAdapters")
    assert "the list of model chat is full with 256 older adapters" in condition(decision.status, "Ready")["message"]
    assert decision.requeue_after_seconds == LOOK_SECONDS
    # The pass that finds it fit does not say so: the model's pass comes after it.
    start, decision = settled(world())
    record = json.dumps({"version": 1, "command": "inspect", "ok": True, "adapter": FACTS})
    pod = job_pod(find(decision.desired, "Job"), ended(0, record), "read", phase="Succeeded")
    start = finished(replace(start, pods=(pod,), of_base=(found,)))
    start = carried_out(start, decide_adapter(start, SETTINGS))
    assert reason_of(decide_adapter(start, SETTINGS)) == ("False", "Loading")


def test_the_pods_of_a_model_without_adapters_have_no_list() -> None:
    _, decision = resolved_world()
    assert "chat-adapters" not in map(name_of, decision.desired)
    assert "adapters" not in json.dumps(find(decision.desired, "Deployment"))


def test_only_a_model_with_adapters_lets_the_operator_ask_its_replicas() -> None:
    using = replace(SETTINGS, network_policy_ingress_from=({"podSelector": {}},), network_policy_operator=({"x": {}},))
    for spec, peers in ((SPEC, 1), (MODEL_SPEC, 2)):
        _, decision = resolved_world(using, spec=spec)
        (rule,) = find(decision.desired, "NetworkPolicy")["spec"]["ingress"]
        assert len(rule["from"]) == peers


@pytest.mark.parametrize(("of", "case"), ADAPTERS.cases())
def test_an_invalid_manifest_is_refused_naming_the_field(of: Manifests, case: Any) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_adapter({**adapter(), "spec": of.spec_with(case["spec"])})
    assert refused.value.field == case["field"]
    assert case.get("says", "") in str(refused.value)


@pytest.mark.parametrize(("of", "changes"), ADAPTERS.cases("accepted"))
def test_an_accepted_manifest_is_parsed(of: Manifests, changes: Any) -> None:
    spec = of.spec_with(changes)
    assert parse_adapter({**adapter(), "spec": spec}).spec.uri == spec["uri"]


def test_an_unknown_field_of_an_adapter_is_refused() -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_adapter(adapter({"x": 1}))
    assert refused.value.field == "spec"
    assert parse_adapter(adapter()).spec.uri == "hf://acme/support-de"
    assert parse(body(MODEL_SPEC)).spec.serves_adapters


def test_a_job_does_not_try_the_chat_template_of_an_adapter_if_the_models_is_set() -> None:
    serving = {**MODEL_SPEC["serving"], "chatTemplate": "{{ messages[0].content }}"}
    for of, is_tried in ((base(), True), (base({**MODEL_SPEC, "serving": serving}), False)):
        command = command_of(find(decide_adapter(world(of=of), SETTINGS).desired, "Job"))
        assert ("--ignore-chat-template" not in command) == is_tried


def test_an_adapter_starts_no_job_before_its_turn() -> None:
    waiting = replace(world(), has_turn=False)
    decision = decide_adapter(waiting, SETTINGS)
    assert (decision.desired, decision.job) == ((), "Waiting")
    found = condition(decision.status, "Resolved")
    assert (found["status"], found["reason"]) == ("False", "Resolving")
    assert "waiting for its turn, the oldest first: 8 adapters of a model" in found["message"]
    assert decide_adapter(replace(waiting, has_turn=True), SETTINGS).job == "Refused", "unless it is made"
    started, decision = settled(replace(waiting, has_turn=True))
    assert decision.job == "Running"
    # One that has started goes on, whoever leads, and one whose Job hangs makes room.
    went_on = decide_adapter(replace(started, has_turn=False), SETTINGS)
    assert (went_on.job, len(went_on.desired)) == ("Running", 1)
    assert decide_adapter(aged(started, 3), SETTINGS).job is None


def test_adapters_that_wait_get_their_turns_from_the_oldest_on_within_the_bounds() -> None:
    """Passes run as they are woken. Each adapter reads for some passes of others, and some are deleted meanwhile."""
    rng, queue = Random(3), list[Key]()
    pace = Pace(lambda key: queue.append(key) if key not in queue else None)
    bodies: dict[Key, Object] = {}
    for number in range(300):
        name, model = f"a{number:03}", ("chat", "code", "sql")[number % 3]
        created = f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z"
        key = ("team", name, names.ADAPTER_KIND)
        bodies[key] = adapter({"model": model}, name=name, creationTimestamp=created)
    queue += rng.sample(list(bodies), len(bodies))
    running, began, gone, most = set[Key](), list[Key](), set[Key](), 0
    for _ in range(20_000):
        if queue:
            key = queue.pop(0)
            if rng.random() < 0.02 and key not in running:
                gone.add(key)
            has_turn = key not in began and pace.take(key)
            if key in gone:
                pace.tell(key, None, None)
            elif has_turn:
                running.add(key)
                began.append(key)
                pace.tell(key, bodies[key], "Running")
            elif key not in began:
                pace.tell(key, bodies[key], "Waiting")
            by_model = Counter(bodies[one]["spec"]["model"] for one in running)
            most = max(most, len(running))
            assert most <= MAX_ADAPTER_JOBS.of_namespace
            assert all(number <= MAX_ADAPTER_JOBS.of_model for number in by_model.values())
        for key in [one for one in sorted(running) if rng.random() < 0.01]:
            running.remove(key)
            pace.tell(key, bodies[key], None)
    assert (set(began) | gone, most) == (bodies.keys(), MAX_ADAPTER_JOBS.of_namespace)
    told_first = began[MAX_ADAPTER_JOBS.of_namespace + 1 :]
    early = [one for one in told_first[:60] if one[1] > "a200"]
    assert not early, "the youngest begin last"


def test_adapters_that_fail_again_and_again_keep_no_younger_one_waiting() -> None:
    """Each of the older ones asks for another turn as soon as its Job has failed."""
    queue = list[Key]()
    pace = Pace(lambda key: queue.append(key) if key not in queue else None)
    bodies = {
        ("team", f"a{number:02}", names.ADAPTER_KIND): adapter(
            name=f"a{number:02}", creationTimestamp=f"2026-01-01T00:00:{number:02}Z"
        )
        for number in range(50)
    }
    unfit, running, passed_ = {*list(bodies)[:30]}, list[Key](), set[Key]()
    queue += bodies
    for _ in range(200):
        while queue:
            key = queue.pop(0)
            if key in running or key in passed_:
                continue
            if pace.take(key):
                running.append(key)
            pace.tell(key, bodies[key], "Running" if key in running else "Waiting")
        key = running.pop(0)
        pace.tell(key, bodies[key], None)
        if key in unfit:
            queue.append(key)
        else:
            passed_.add(key)
    assert passed_ == bodies.keys() - unfit


def test_an_adapter_whose_job_is_refused_is_tried_again_without_another_turn_and_keeps_nobody_waiting() -> None:
    """Otherwise it would say by turns why its Job is refused, and that it waits."""
    woken = list[Key]()
    pace = Pace(woken.append)
    keys = [("team", f"a{number}", names.ADAPTER_KIND) for number in range(MAX_ADAPTER_JOBS.of_model + 2)]
    bodies = [adapter(name=key[1], creationTimestamp=f"2026-01-01T00:00:0{key[1][1]}Z") for key in keys]
    for key, one in zip(keys, bodies, strict=True):
        pace.tell(key, one, "Waiting")
    assert pace.take(keys[0])
    pace.tell(keys[0], bodies[0], "Refused")
    assert woken[-1] == keys[1]
    assert pace.take(keys[0]), "tried again"
    pace.tell(keys[0], bodies[0], "Refused")
    for key in keys[1 : MAX_ADAPTER_JOBS.of_model + 1]:
        assert pace.take(key)
    assert not pace.take(keys[0]), "as many run as may"
    pace.tell(keys[1], bodies[1], None)
    assert woken[-1] == keys[-1]
