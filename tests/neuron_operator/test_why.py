"""The state of pods becomes a condition with a declared reason and an actionable message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import (
    FACTS,
    JSON_VALUES,
    NOW,
    REFUSED,
    SETTINGS,
    SPEC,
    checked,
    condition,
    ended,
    failure_record,
    find,
    fresh,
    job_pod,
    resolved_pod,
    resolved_world,
    said,
    serving_pod,
    settle,
    unscheduled_pod,
)
from neuron_operator.api.errors import Unplaceable
from neuron_operator.api.manifest import parse
from neuron_operator.api.reasons import ADAPTER_CONDITIONS, CONDITIONS, SHOWN, Finding, LogOf, Need, Reason
from neuron_operator.decide.course import PROGRESS_SECONDS, decide
from neuron_operator.place.catalog import INSTANCE_TYPES
from neuron_operator.place.sizes import place
from neuron_operator.read.views import observe
from neuron_operator.read.world import BY_PLUGIN, Decision, FreeDevices, NodeDevices, Object, Settings
from neuron_operator.why import status
from neuron_operator.why.pods import UNEXPLAINED_POD_SECONDS
from neuron_operator.why.refusals import explain_denial
from neuron_operator.why.status import MAX_MESSAGE

INSUFFICIENT = (
    "0/3 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 2 Insufficient "
    "aws.amazon.com/neuron. no new claims to deallocate, preemption: 0/3 nodes are available: 1 Preemption is not "
    "helpful for scheduling, 2 No preemption victims found for incoming pod."
)
INF2 = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
NODES = (
    NodeDevices("n1", devices=6, free_devices=0, cores=12, free_cores=12, labels=INF2),
    NodeDevices("n2", devices=6, free_devices=4, cores=12, free_cores=12, labels=INF2),
    NodeDevices("n4", devices=6, free_devices=6, cores=12, free_cores=12, labels=INF2, schedulable=False),
)


def seen(*pods: Any, free: FreeDevices | None = None, events: tuple[Object, ...] = (), **changes: Any) -> Decision:
    """The decision for a resolved model with pods built by the functions `pods` from its Deployment."""
    world, _ = resolved_world(**changes)
    deployment = find(world.children, "Deployment")
    made = tuple(pod(deployment) if callable(pod) else pod for pod in pods)
    return decide(replace(world, pods=made, free=free, events=events), SETTINGS)


def pod(name: str = "chat-1", **state: Any) -> Any:
    return lambda deployment: serving_pod(deployment, name, **state)


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


PULL_BACK_OFF = 'Back-off pulling image "registry.example/x:1": ErrImagePull: rpc error: not found'
UNREADY_SINCE = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-03-01T11:55:00Z"}
UNREADY_BEFORE = {**UNREADY_SINCE, "lastTransitionTime": "2026-03-01T11:51:00Z"}
CRASH = waiting("CrashLoopBackOff", "back-off 10s restarting failed container")


EVICTED = {"phase": "Failed", "reason": "Evicted", "state": ended(0)}
FATAL = """Python path configuration:
  PYTHONHOME = '/nowhere'
Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding
Python runtime state: core initialized
ModuleNotFoundError: No module named 'encodings'

Current thread 0x00007f2c40db3b80 (most recent call first):
  <no Python frame>
"""


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        ({}, "Loading", "has been loading the model since 2026-03-01T11:51:00Z"),
        ({"started": True}, "Loading", "has been loading the model"),
        ({"started": True, "conditions": [UNREADY_BEFORE]}, "Loading", "has been loading the model"),
        ({"started": True, "conditions": [UNREADY_SINCE]}, "ProbeFailing", "does not answer /health"),
        ({"state": waiting("ContainerCreating")}, "Loading", "is starting"),
        ({"state": waiting("ImagePullBackOff", PULL_BACK_OFF)}, "ImagePull", "cannot be pulled: rpc error: not found"),
        ({"state": waiting("ErrImagePull", "rpc error: not found")}, "ImagePull", "cannot be pulled: rpc error"),
        ({"state": waiting("InvalidImageName", "bad")}, "ImagePull", "bad"),
        (
            {"state": waiting("CreateContainerConfigError", 'configmap "c" not found')},
            "ConfigMapNotFound",
            'configmap "c" not found; create it, or set optional: true in engine.env',
        ),
        ({"state": waiting("RunContainerError", "exec: no such file")}, "CrashLoop", "exec: no such file"),
        (
            {"state": CRASH, "last": ended(1, "a\nImportError: torch\n"), "restarts": 4},
            "CrashLoop",
            "ImportError: torch",
        ),
        (
            {"state": CRASH, "last": ended(137, "loading weights\n", reason="OOMKilled"), "restarts": 1},
            "DeviceOutOfMemory",
            "exit code 137 (OOMKilled) (restarts: 1): it has no memory limit, the estimate is 832Mi; raise "
            "podTemplate.spec.resources.limits.memory, or lower serving.maxSequences or maxModelLength; its last line: "
            "loading weights",
        ),
        (
            {"last": ended(50, failure_record(50, "RestartBudgetExhausted", "it crashed"), reason="OOMKilled")},
            "RestartBudgetExhausted",
            "exit code 50 (OOMKilled) (restarts: 0): it crashed",
        ),
        ({"last": ended(30, failure_record(30, "DeviceHeld", "held by 7"))}, "DeviceHeld", "held by 7"),
        ({"last": ended(31)}, "DeviceOutOfMemory", "exit code 31 (restarts: 0): it left no record and no log"),
        ({"last": ended(50, "garbage {")}, "RestartBudgetExhausted", "garbage {"),
        (
            REFUSED,
            "AllocationRejected",
            "node n1 refused pod chat-1: UnexpectedAdmissionError: Pod was rejected: Allocate failed",
        ),
        (
            {**EVICTED, "message": 'Usage of EmptyDir volume "weights" exceeds the limit "1Mi". '},
            "StorageFull",
            'Usage of EmptyDir volume "weights" exceeds the limit "1Mi".; raise storage.weights.emptyDir.sizeLimit',
        ),
        (
            {
                **EVICTED,
                "message": "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. ",
            },
            "StorageFull",
            "node n1 stopped pod chat-1: Evicted: Pod ephemeral local storage usage exceeds the total limit of "
            "containers 1Mi.; raise the limit of ephemeral-storage in podTemplate.spec.resources",
        ),
        (
            {
                **EVICTED,
                "message": "The node was low on resource: ephemeral-storage. Threshold quantity: 1, available: 0. ",
            },
            "StorageFull",
            "use nodes with larger disks, or request ephemeral-storage in podTemplate.spec.resources",
        ),
        (
            {**EVICTED, "message": "The node was low on resource: memory. Threshold quantity: 1, available: 0. "},
            "Evicted",
            "; request more memory in podTemplate.spec.resources",
        ),
        (
            {**REFUSED, "reason": "NodeShutdown", "message": "Pod was rejected as the node is shutting down."},
            "NodeLost",
            "",
        ),
        (
            {"state": CRASH, "last": ended(1, FATAL)},
            "CrashLoop",
            "No module named 'encodings'; check the variables in engine.env: Python did not start",
        ),
        (
            {"state": waiting("CreateContainerConfigError", "couldn't find key k in ConfigMap t/c")},
            "ConfigMapNotFound",
            "k",
        ),
    ],
)
def test_a_replica_that_is_not_ready_is_explained(state: dict[str, Any], reason: str, says: str) -> None:
    decision = seen(pod("chat-0", ready=True), pod(**state))
    ready = condition(decision.status, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert ready["message"].startswith("1 of 2 replicas answer, at least 1 promised; ")
    assert "pod chat-1" in ready["message"]
    assert says in ready["message"]
    available = condition(decision.status, "Available")
    assert (available["status"], available["reason"]) == ("True", "Available")
    assert available["message"] == said(ready)


def test_a_pull_without_access_says_where_pull_secrets_come_from() -> None:
    """The pods have a ServiceAccount of their own, so those of the default one do not count."""
    for message, says in (("pulling image: 401 Unauthorized", True), ("no such host", False)):
        found = seen(pod(state=waiting("ImagePullBackOff", f"Back-off pulling: ErrImagePull: {message}")))
        text = condition(found.status, "Ready")["message"]
        assert ("podTemplate.spec.imagePullSecrets: those of the namespace's default ServiceAccount" in text) == says


@pytest.mark.parametrize("num_wanted", range(1, 5))
def test_available_means_what_rollouts_and_evictions_leave(num_wanted: int) -> None:
    world, decision = resolved_world(spec={**SPEC, "replicas": num_wanted})
    deployment, budget = (find(decision.desired, kind) for kind in ("Deployment", "PodDisruptionBudget"))
    taken = deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"]
    assert budget["spec"]["maxUnavailable"] == taken
    for num_ready in range(num_wanted + 1):
        pods = tuple(serving_pod(deployment, f"chat-{n}", ready=n < num_ready) for n in range(num_wanted))
        status = decide(replace(world, pods=pods), SETTINGS).status
        available, ready = condition(status, "Available"), condition(status, "Ready")
        assert available["status"] == str(num_ready > 0 and num_ready >= num_wanted - taken)
        assert available["message"].startswith(f"{num_ready} of {num_wanted} replicas answer")
        assert ready["status"] == str(num_ready == num_wanted)
        assert status is not None
        assert status["ready"] == f"{num_ready}/{num_wanted}"


def test_ready_names_what_a_rollout_does_not_explain() -> None:
    """It says RollingOut from the first replica to the last, not the state of each in turn."""
    world, _ = resolved_world()
    old = serving_pod(find(world.children, "Deployment"), "chat-0", ready=True)
    edit = {**world.body["spec"], "serving": {"maxModelLength": 512}}
    world, _ = settle(checked(replace(world, body={**world.body, "spec": edit}, pods=(old,))))
    deployment = find(world.children, "Deployment")
    waiting_for_devices = unscheduled_pod(deployment, INSUFFICIENT)  # since 11:50
    since = datetime(2026, 3, 1, 11, 50, tzinfo=UTC)
    for new, now, reason in (
        (serving_pod(deployment), NOW, "RollingOut"),
        (waiting_for_devices, since + timedelta(seconds=60), "RollingOut"),
        (waiting_for_devices, since + timedelta(seconds=61), "InsufficientNeuron"),
        (
            serving_pod(deployment, state=CRASH, last=ended(137, reason="OOMKilled"), restarts=4),
            NOW,
            "DeviceOutOfMemory",
        ),
    ):
        decision = decide(replace(world, pods=(old, new), now=now), SETTINGS)
        reasons = {kind: condition(decision.status, kind)["reason"] for kind in ("Available", "UpToDate", "Ready")}
        assert reasons == {"Available": "Available", "UpToDate": "RollingOut", "Ready": reason}
        message = condition(decision.status, "Ready")["message"]
        assert "1 of 2 replicas answer" in message
        assert "pod chat-1" in message
        assert (Need.FREE_DEVICES in decision.needs) == (new is waiting_for_devices)


def test_ready_names_the_rollout_until_its_last_replica_answers() -> None:
    """Nothing of the earlier revision is left then but a pod that ends and holds its devices."""
    world, _ = resolved_world()
    answering = [serving_pod(find(world.children, "Deployment"), f"chat-{n}", ready=True) for n in range(2)]
    world, _ = settle(replace(world, pods=tuple(answering)))
    edit = {**world.body["spec"], "serving": {"maxModelLength": 512}}
    world, _ = settle(checked(replace(world, body={**world.body, "spec": edit})))
    deployment = find(world.children, "Deployment")
    new = serving_pod(deployment, "new-0", ready=True)
    ends = {**answering[0], "metadata": {**answering[0]["metadata"], "deletionTimestamp": "2026-03-01T12:05:00Z"}}
    last = unscheduled_pod(deployment, INSUFFICIENT)
    gone = datetime(2026, 3, 1, 12, 5, tzinfo=UTC)
    for pods, now, reason in (
        ((new, last, ends), NOW, "RollingOut"),
        ((new, last, ends), gone + timedelta(seconds=60), "RollingOut"),
        ((new, last, ends), gone + timedelta(seconds=61), "InsufficientNeuron"),
        ((new, serving_pod(deployment)), NOW, "RollingOut"),
    ):
        decision = decide(replace(world, pods=pods, now=now), SETTINGS)
        assert condition(decision.status, "Ready")["reason"] == reason
        assert condition(decision.status, "UpToDate")["status"] == "True"
    served, _ = settle(replace(world, pods=(new, serving_pod(deployment, ready=True))))
    later = decide(replace(served, pods=(new, serving_pod(deployment))), SETTINGS)
    assert condition(later.status, "Ready")["reason"] == "Loading", "the rollout is over"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, "Compiled"),
        (36, "Placed"),
        (10, "ModelResolved"),
        (11, "WeightsReady"),
        (14, "WeightsReady"),
        (15, "WeightsReady"),
    ],
)
def test_a_pod_that_failed_for_model_or_weights_explains_that_condition(code: int, kind: str) -> None:
    reason = str(Reason.of_exit_code(code))
    record = failure_record(code, reason, "the hub says no", "serve")
    decision = seen(pod(state=CRASH, last=ended(code, record), restarts=2))
    assert condition(decision.status, kind)["reason"] == reason
    assert condition(decision.status, "Ready")["reason"] == reason
    assert "the hub says no" in condition(decision.status, "Ready")["message"]
    of_pods = {15: "StorageFull", 36: "NoMatchingNode"}.get(code, "CrashLoop")
    assert condition(decision.status, "Available")["reason"] == of_pods


@pytest.mark.parametrize("text", ['secret "words" not found', "couldn't find key words in Secret team/words"])
def test_a_missing_secret_is_named(text: str) -> None:
    decision = seen(pod(state=waiting("CreateContainerConfigError", text)))
    assert condition(decision.status, "Ready")["reason"] == "SecretNotFound"
    assert text in condition(decision.status, "Ready")["message"]


def test_missing_devices_are_explained_by_needed_and_free_numbers() -> None:
    stuck = [lambda d, n=n: unscheduled_pod(d, INSUFFICIENT, f"chat-{n}") for n in range(2)]
    unexplained = seen(*stuck)
    assert unexplained.needs == {Need.FREE_DEVICES}
    found = seen(*stuck, free=FreeDevices(NODES))
    ready = condition(found.status, "Ready")
    assert ready["reason"] == "InsufficientNeuron"
    assert "0 of 2 replicas answer" in ready["message"]
    assert "needs 6 Neuron devices on one node; free: 4 (n2 4, n1 0); the scheduler reports 0/3" in ready["message"]
    assert said(ready).endswith("2 Insufficient aws.amazon.com/neuron (and 1 more with this reason)")
    assert found.requeue_after_seconds is not None


def test_without_the_right_the_free_devices_are_unknown() -> None:
    found = seen(lambda d: unscheduled_pod(d, INSUFFICIENT), free=FreeDevices(None))
    assert "needs 6 Neuron devices on one node; free: unknown" in condition(found.status, "Ready")["message"]


def test_the_message_says_when_no_node_has_devices() -> None:
    found = seen(lambda d: unscheduled_pod(d, INSUFFICIENT), free=FreeDevices(NODES[2:]))
    assert "free: 0 (no ready node that it may use offers any)" in condition(found.status, "Ready")["message"]


def test_a_request_for_cores_counts_the_cores_of_nodes_for_cores() -> None:
    spec = {**SPEC, "accelerator": {"cores": 1}}
    message = INSUFFICIENT.replace("neuron.", "neuroncore.")
    free = FreeDevices((*NODES, labelled("n5", CORE_NODE)))
    found = seen(lambda d: unscheduled_pod(d, message), free=free, spec=spec)
    assert "needs 1 NeuronCore on one node; free: 12 (n5 12)" in condition(found.status, "Ready")["message"]


def test_the_message_quotes_other_scheduler_reasons() -> None:
    found = seen(lambda d: unscheduled_pod(d, "0/3 nodes are available: 3 Insufficient memory."))
    assert condition(found.status, "Ready")["reason"] == "NoMatchingNode"
    assert "3 Insufficient memory" in condition(found.status, "Ready")["message"]


UNMATCHED = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector. no new claims to deallocate."
CORE_NODE = {**INF2, "neuron-serving.dev/allocation": "cores"}


def labelled(name: str, labels: Mapping[str, str]) -> NodeDevices:
    return NodeDevices(name, devices=6, free_devices=6, cores=12, free_cores=12, labels=labels)


@pytest.mark.parametrize(
    ("accelerator", "nodes", "reason", "says"),
    [
        (
            {"cores": 2},
            [labelled("n1", CORE_NODE)],
            "TopologyImpossible",
            "grant to one pod; choose one of 1, 12; other",
        ),
        (
            {"cores": 2},
            [labelled("n1", CORE_NODE)],
            "TopologyImpossible",
            "such as inf2.8xlarge, inf2.xlarge, trn1.2xl",
        ),
        ({"cores": 2}, [labelled("n1", INF2)], "NoMatchingNode", UNMATCHED),
        ({"cores": 2}, [], "NoMatchingNode", UNMATCHED),
        (
            {"cores": 2},
            [
                labelled("n1", CORE_NODE),
                labelled("n2", {**CORE_NODE, "node.kubernetes.io/instance-type": "inf2.xlarge"}),
            ],
            "NoMatchingNode",
            UNMATCHED,
        ),
        ({"devices": 12}, [labelled("n1", INF2), labelled("n2", INF2)], "TopologyImpossible", "(n1, n2) grant"),
        ({"devices": 12}, [labelled("n1", {}), labelled("n2", INF2)], "NoMatchingNode", UNMATCHED),
        ({"devices": 1}, [labelled("n1", INF2)], "NoMatchingNode", UNMATCHED),
    ],
)
def test_a_size_that_no_node_of_the_model_grants_is_reported_with_the_legal_ones(
    accelerator: Object, nodes: list[NodeDevices], reason: str, says: str
) -> None:
    spec = {**SPEC, "accelerator": accelerator}
    found = seen(lambda d: unscheduled_pod(d, UNMATCHED), free=FreeDevices(tuple(nodes)), spec=spec)
    ready = condition(found.status, "Ready")
    assert ready["reason"] == reason
    assert says in ready["message"]
    assert condition(found.status, "Available")["reason"] == "NoMatchingNode"
    assert "Deployment" in {child["kind"] for child in found.desired}, "an autoscaler may add a node"


@pytest.mark.parametrize("mode", BY_PLUGIN)
@pytest.mark.parametrize("accelerator", [{"devices": n} for n in range(1, 17)] + [{"cores": n} for n in range(1, 65)])
def test_a_pod_is_kept_off_exactly_the_known_nodes_that_would_refuse_its_size(accelerator: Object, mode: Any) -> None:
    (resource, count), *_ = accelerator.items()
    using = replace(SETTINGS, device_mode=mode)
    granting = {
        name for name, kind in INSTANCE_TYPES.items() if count in kind.sizes(mode, in_cores=resource == "cores")
    }
    if not granting:
        return
    world, _ = resolved_world(using, spec={**SPEC, "accelerator": accelerator})
    template = find(world.children, "Deployment")["spec"]["template"]
    rules = observe(replace(world, pods=(template,))).replicas[0].node_rules
    allocation = {"neuron-serving.dev/allocation": "cores"} if resource == "cores" else {}
    accepted = {
        name
        for name in (*INSTANCE_TYPES, "other.large")
        if rules.accept(labelled("n", {"node.kubernetes.io/instance-type": name, **allocation}))
    }
    assert accepted == {*granting, "other.large"}
    assert rules.accept(labelled("n", allocation))


def test_the_rules_of_the_manifest_for_nodes_are_kept_beside_those_for_sizes() -> None:
    ours = [{"key": "zone", "operator": "In", "values": ["a"]}, {"key": "spot", "operator": "DoesNotExist"}]
    terms = {"nodeSelectorTerms": [{"matchExpressions": ours[:1]}, {"matchExpressions": ours[1:]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    spec = {**SPEC, "podTemplate": {"spec": {"affinity": affinity}}}
    in_a, spot = {**INF2, "zone": "a", "spot": "yes"}, {**INF2, "zone": "b", "spot": "yes"}
    message = INSUFFICIENT
    free = FreeDevices((labelled("n1", in_a), labelled("n2", spot)))
    found = seen(lambda d: unscheduled_pod(d, message), free=free, spec=spec)
    assert "free: 6 (n1 6);" in condition(found.status, "Ready")["message"]


@pytest.mark.parametrize(
    ("message", "reason", "says"),
    [
        ("exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1", "QuotaExceeded", "raise the Resource"),
        (
            "failed quota: q: must specify limits.memory for: runtime",
            "QuotaExceeded",
            "in podTemplate.spec.resources: ",
        ),
        ('violates PodSecurity "restricted:latest": x', "PodSecurityDenied", "check podTemplate"),
        (
            'Internal error occurred: failed calling webhook "w": EOF',
            "AdmissionDenied",
            "the webhook's Service answers",
        ),
        ("no PriorityClass with name nope was found", "AdmissionDenied", "podTemplate.spec.priorityClassName"),
        ('pod rejected: RuntimeClass "nope" not found', "AdmissionDenied", "podTemplate.spec.runtimeClassName"),
        (
            'error looking up service account team/nope: serviceaccount "nope" not found',
            "AdmissionDenied",
            "podTemplate.spec.serviceAccountName",
        ),
        (
            "[minimum cpu usage per Container is 100m, but request is 10m, maximum memory usage per Container is 1Gi, "
            "but limit is 2Gi]",
            "AdmissionDenied",
            "change podTemplate.spec.resources: a LimitRange",
        ),
        (
            "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
            "AdmissionDenied",
            "policy of the cluster",
        ),
        ("an unknown check says no", "AdmissionDenied", "says no"),
    ],
)
def test_pods_that_cannot_be_created_are_explained_by_the_deployment(message: str, reason: str, says: str) -> None:
    world, _ = resolved_world()
    text = f'pods "chat-x" is forbidden: {message}'
    failure = {"conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": text}]}
    children = tuple({**c, "status": failure} if c["kind"] == "Deployment" else c for c in world.children)
    decision = decide(replace(world, children=children), SETTINGS)
    assert condition(decision.status, "Ready")["reason"] == reason
    assert f"pods cannot be created: {text}" in condition(decision.status, "Ready")["message"]
    assert says in condition(decision.status, "Ready")["message"]


@pytest.mark.parametrize(
    ("note", "says"),
    [
        (
            "failed quota: q: must specify limits.memory for: runtime",
            "set them in jobs.resources in the model or in the",
        ),
        ("maximum memory usage per Container is 1Gi, but limit is 2Gi", "change jobs.resources in the model or in the"),
        ("exceeded quota: q, requested: pods=1", "raise the ResourceQuota"),
    ],
)
def test_a_job_whose_pod_cannot_be_created_names_a_cure_that_reaches_it(note: str, says: str) -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    old = {"metadata": {**job["metadata"], "creationTimestamp": "2026-03-01T11:00:00Z"}}
    event = {"regarding": {"kind": "Job", "name": job["metadata"]["name"]}, "reason": "FailedCreate", "note": note}
    waiting = replace(world, shared=({**job, **old},), events=(event,))
    found = condition(decide(waiting, SETTINGS).status, "ModelResolved")
    assert f"FailedCreate: {note}; " in found["message"]
    assert says in found["message"]


@pytest.mark.parametrize(
    ("message", "reason", "says"),
    [
        (
            'Pod "chat-1" is invalid: spec.containers[0].resources.requests: Invalid value: "704Mi": must be less than '
            "or equal to memory limit of 512Mi",
            Reason.ADMISSION_DENIED,
            "set the limit in podTemplate.spec.resources.limits: a LimitRange",
        ),
        (
            'pods "chat-1" is forbidden: insufficient quota to match these scopes: [{PriorityClass In [high]}]',
            Reason.QUOTA_EXCEEDED,
            "admit the PriorityClass",
        ),
        (
            'pods "chat-1" is forbidden: unable to validate against any security context constraint: []',
            Reason.POD_SECURITY_DENIED,
            "SecurityContextConstraints",
        ),
        (
            'pods "chat-1" is forbidden: a rule of the year 2030',
            Reason.ADMISSION_DENIED,
            "correct what it names in pod",
        ),
    ],
)
def test_every_refusal_of_a_pod_has_a_cure(message: str, reason: Reason, says: str) -> None:
    found, cure = explain_denial(message)
    assert found is reason
    assert says in cure
    assert "jobs" in explain_denial('Pod "x" is invalid: must be less than or equal to memory limit', of_job=True)[1]
    assert explain_denial("") == (Reason.ADMISSION_DENIED, "")


def test_a_pod_that_no_scheduler_looks_at_names_the_scheduler() -> None:
    def ignored(deployment: Object) -> Object:
        made = unscheduled_pod(deployment, "")
        return {**made, "spec": {**made["spec"], "schedulerName": "my-scheduler"}, "status": {"phase": "Pending"}}

    found = condition(seen(ignored).status, "Ready")
    assert found["reason"] == "NoMatchingNode"
    assert "no scheduler has looked at pod chat-1 since it was created: see that my-scheduler runs" in found["message"]


def test_the_gates_that_others_added_are_named() -> None:
    def gated(deployment: Object) -> Object:
        made = unscheduled_pod(deployment, "Scheduling is blocked due to non-empty scheduling gates")
        return {**made, "spec": {**made["spec"], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}

    assert "others added the gates kueue.x-k8s.io/admission" in condition(seen(gated).status, "Ready")["message"]


def test_an_init_container_of_others_that_does_not_end_is_named() -> None:
    def hanging(deployment: Object) -> Object:
        made = serving_pod(deployment, phase="Pending", state={"waiting": {"reason": "PodInitializing"}})
        state = {"running": {"startedAt": "2026-03-01T11:51:00Z"}}
        init = [{"name": "istio-init", "ready": False, "restartCount": 0, "state": state}]
        return {
            **made,
            "spec": {**made["spec"], "initContainers": [{"name": "istio-init", "image": "x"}]},
            "status": {**made["status"], "initContainerStatuses": init},
        }

    message = condition(seen(hanging).status, "Ready")["message"]
    assert "starts after container istio-init, which has been running since 2026-03-01T11:51:00Z" in message
    assert "container istio-init is not the operator's" in message


def test_a_preempted_pod_is_named_as_such() -> None:
    by_scheduler = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    ended_at = {"deletionTimestamp": "2026-03-01T12:01:00Z"}
    for make in (
        lambda d: {**(p := serving_pod(d, conditions=[by_scheduler])), "metadata": {**p["metadata"], **ended_at}},
        lambda d: serving_pod(d, phase="Failed", reason="Preempting", message="Preempted to admit critical pod"),
    ):
        found = condition(seen(make).status, "Ready")
        assert found["reason"] == "Evicted"
        assert "set podTemplate.spec.priorityClassName, or add nodes" in found["message"]


def test_messages_link_to_the_page_that_the_chart_names() -> None:
    page = "https://wiki.example/troubleshooting"
    _, decision = resolved_world(replace(SETTINGS, troubleshooting_url=page))
    assert condition(decision.status, "Ready")["message"].endswith(f"; see {page}#loading")


def test_a_job_whose_pod_is_refused_says_so_within_seconds() -> None:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    made = {**job, "metadata": {**job["metadata"], "creationTimestamp": "2026-03-01T12:00:00Z"}}
    soon = decide(replace(world, shared=(made,)), SETTINGS)
    assert soon.requeue_after_seconds == UNEXPLAINED_POD_SECONDS
    later = world.now + timedelta(seconds=UNEXPLAINED_POD_SECONDS)
    assert Need.EVENTS in decide(replace(world, shared=(made,), now=later), SETTINGS).needs


def test_a_lost_node_is_reported_before_its_pods_are_evicted() -> None:
    def lost(deployment: Object) -> Object:
        made = serving_pod(deployment, ready=True)
        conditions = [
            c if c["type"] != "Ready" else {"type": "Ready", "status": "False"} for c in made["status"]["conditions"]
        ]
        return {**made, "status": {**made["status"], "conditions": conditions}}

    decision = seen(lost)
    assert condition(decision.status, "Ready")["reason"] == "NodeLost"
    assert "its node n1" in condition(decision.status, "Ready")["message"]


def test_a_terminating_pod_counts_as_draining_and_not_as_a_replica() -> None:
    def leaving(deployment: Object) -> Object:
        made = serving_pod(deployment, ready=True)
        return {**made, "metadata": {**made["metadata"], "deletionTimestamp": "2026-03-01T12:00:00Z"}}

    decision = seen(pod("chat-0", ready=True), leaving)
    assert condition(decision.status, "Ready")["reason"] == "Draining"
    assert decision.status is not None
    assert decision.status["replicas"] == 1


def test_a_failed_pod_is_ignored_when_newer_pods_are_starting() -> None:
    rejected = pod(
        "old", phase="Failed", reason="UnexpectedAdmissionError", message="no", state={}, created="2026-03-01T11:00:00Z"
    )
    decision = seen(rejected, pod("new"), spec={**SPEC, "replicas": 1})
    assert condition(decision.status, "Ready")["reason"] == "Loading"


# What others add to a pod


def with_container(state: Object, *, runtime_ready: bool = False, init: bool = False, **fields: Any) -> Any:
    """A pod to which a webhook has added the container `proxy`."""

    def made(deployment: Object) -> Object:
        pod = serving_pod(deployment, ready=runtime_ready)
        proxy = {"name": "proxy", "image": "proxy:1", "ready": False, "restartCount": 3, "state": state, **fields}
        kind, statuses = ("initContainers", "initContainerStatuses") if init else ("containers", "containerStatuses")
        spec = {**pod["spec"], kind: [*pod["spec"].get(kind, ()), {"name": "proxy", "image": "proxy:1"}]}
        own = pod["status"]["containerStatuses"]
        if init:
            own = [{**own[0], "state": waiting("PodInitializing")}]
        status = {**pod["status"], "containerStatuses": own}
        status = {**status, statuses: [*status.get(statuses, ()), proxy]}
        unready = [{"type": kind, "status": "False"} for kind in ("Ready", "ContainersReady")]
        return {**pod, "spec": spec, "status": {**status, "conditions": [*status["conditions"][:1], *unready]}}

    return made


@pytest.mark.parametrize(
    ("made", "reason", "says"),
    [
        (
            with_container(CRASH, runtime_ready=True, lastState=ended(1, "bind: address already in use")),
            "CrashLoop",
            "container proxy ended with exit code 1 (restarts: 3): bind: address already in use",
        ),
        (
            with_container(CRASH, runtime_ready=True, lastState=ended(0)),
            "CrashLoop",
            "container proxy ended with exit code 0 (restarts: 3): see kubectl logs chat-1 -c proxy",
        ),
        (with_container(waiting("ErrImagePull", "no such image")), "ImagePull", "image proxy:1 cannot be pulled"),
        (with_container(CRASH, init=True, lastState=ended(2, "iptables")), "CrashLoop", "ended with exit code 2"),
        (
            with_container(waiting("CreateContainerConfigError", 'configmap "mesh" not found'), runtime_ready=True),
            "ConfigMapNotFound",
            'configmap "mesh" not found',
        ),
        (with_container({"running": {}}, runtime_ready=True), "ProbeFailing", "container proxy is not ready"),
    ],
)
def test_a_container_of_others_that_breaks_the_pod_is_named(made: Any, reason: str, says: str) -> None:
    ready = condition(seen(made, spec={**SPEC, "replicas": 1}).status, "Ready")
    assert ready["reason"] == reason
    assert says in ready["message"]
    assert said(ready).endswith(
        "container proxy is not the operator's: a person or an admission webhook added it; repair or remove it there"
    )


def test_variables_of_others_are_named_when_the_container_crashes_without_a_reason() -> None:
    def crashing(last: Object) -> Any:
        def made(deployment: Object) -> Object:
            pod = serving_pod(deployment, state=CRASH, last=last)
            (container,) = pod["spec"]["containers"]
            env = [*container["env"], {"name": "PYTHONHOME", "value": "secret"}]
            return {**pod, "spec": {**pod["spec"], "containers": [{**container, "env": env}]}}

        return made

    message = condition(seen(crashing(ended(1, FATAL))).status, "Ready")["message"]
    assert "a person or an admission webhook added variables to its container: PYTHONHOME" in message
    assert "secret" not in message
    named = crashing(ended(31, failure_record(31, "DeviceOutOfMemory", "too little")))
    assert "PYTHONHOME" not in condition(seen(named).status, "Ready")["message"]


def test_what_others_add_to_the_own_container_is_named() -> None:
    def made(deployment: Object, **added: Any) -> Object:
        state = waiting("CreateContainerConfigError", 'configmap "theirs" not found')
        pod = serving_pod(deployment, state=state)
        (container,) = pod["spec"]["containers"]
        return {**pod, "spec": {**pod["spec"], "containers": [{**container, **added}]}}

    source = [{"configMapRef": {"name": "theirs"}}]
    ready = condition(seen(lambda d: made(d, envFrom=source)).status, "Ready")
    assert ready["reason"] == "ConfigMapNotFound"
    assert 'configmap "theirs" not found; the operator sets no envFrom' in ready["message"]

    def unscheduled(deployment: Object) -> Object:
        pod = unscheduled_pod(
            deployment, "0/3 nodes are available: 3 node(s) didn't have free ports for the requested."
        )
        (container,) = pod["spec"]["containers"]
        ports = [{"containerPort": 9, "hostPort": 9}]
        return {**pod, "spec": {**pod["spec"], "containers": [{**container, "ports": ports}]}}

    message = condition(seen(unscheduled).status, "Ready")["message"]
    assert "others added port 9 of container runtime" in message


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ('MountVolume.SetUp failed for volume "mesh" : configmap "mesh" not found', "ConfigMapNotFound"),
        ('MountVolume.SetUp failed for volume "mesh" : secret "mesh" not found', "SecretNotFound"),
        ('MountVolume.SetUp failed for volume "mesh" : hostPath type check failed', "VolumeNotBound"),
    ],
)
def test_a_volume_of_others_that_cannot_be_mounted_is_named(note: str, reason: str) -> None:
    event = {"regarding": {"kind": "Pod", "name": "chat-1"}, "reason": "FailedMount", "note": note}
    ready = condition(seen(pod(state=waiting("ContainerCreating")), events=(event,)).status, "Ready")
    assert ready["reason"] == reason
    assert said(ready).endswith(f"FailedMount: {note}; volume mesh is not the operator's")


def test_a_readiness_gate_of_others_does_not_look_like_a_lost_node() -> None:
    unready = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}
    gated = seen(pod(ready=True, conditions=[unready]), spec={**SPEC, "replicas": 1})
    ready = condition(gated.status, "Ready")
    assert ready["reason"] == "Loading"
    assert "answers, but is not ready: ReadinessGatesNotReady" in ready["message"]


def test_a_container_without_memory_is_told_its_limit_and_the_size_of_the_weights() -> None:
    template = {"spec": {"resources": {"limits": {"memory": "1Gi"}}}}
    killed = pod(state=CRASH, last=ended(137, reason="OOMKilled"))
    ready = condition(seen(killed, spec={**SPEC, "podTemplate": template}).status, "Ready")
    assert ready["reason"] == "DeviceOutOfMemory"
    assert "its memory limit is 1Gi, the estimate is 832Mi; raise podTemplate.spec.res" in ready["message"]


@pytest.mark.parametrize("phase", ["Running", "Failed", "Succeeded"])
def test_a_pod_that_is_deleted_is_no_failure_however_its_container_ended(phase: str) -> None:
    def leaving(deployment: Object) -> Object:
        made = serving_pod(deployment, phase=phase, state=ended(137))
        return {**made, "metadata": {**made["metadata"], "deletionTimestamp": "2026-03-01T12:00:00Z"}}

    decision = seen(leaving, spec={**SPEC, "replicas": 1})
    assert condition(decision.status, "Ready")["reason"] == "Draining"
    assert {announcement.type for announcement in decision.announcements} <= {"Normal"}


def test_the_reason_least_likely_to_clear_by_itself_is_shown() -> None:
    decision = seen(pod("a"), pod("b", state=waiting("ErrImagePull", "no such image")))
    assert condition(decision.status, "Ready")["reason"] == "ImagePull"


def test_events_are_read_for_a_pod_that_stays_unexplained_for_seconds() -> None:
    world, _ = resolved_world()
    made = pod(state=waiting("ContainerCreating"))(find(world.children, "Deployment"))
    fresh_pod = {**made, "metadata": {**made["metadata"], "creationTimestamp": f"{world.now:%Y-%m-%dT%H:%M:%SZ}"}}
    decision = decide(replace(world, pods=(fresh_pod,)), SETTINGS)
    assert (decision.needs, decision.requeue_after_seconds) == (frozenset(), UNEXPLAINED_POD_SECONDS)
    later = replace(world, pods=(fresh_pod,), now=world.now + timedelta(seconds=UNEXPLAINED_POD_SECONDS))
    assert decide(later, SETTINGS).needs == {Need.EVENTS}


def test_the_event_of_a_pod_explains_it() -> None:
    creating = pod(state=waiting("ContainerCreating"))
    unexplained = seen(creating)
    assert unexplained.needs == {Need.EVENTS}
    event = {"regarding": {"kind": "Pod", "name": "chat-1"}, "reason": "FailedMount", "note": "volume v is not there"}
    found = seen(creating, events=(event,))
    assert condition(found.status, "Ready")["reason"] == "VolumeNotBound"
    assert "volume v is not there" in condition(found.status, "Ready")["message"]


FAILED_MOUNT = 'MountVolume.SetUp failed for volume "%s" : %s'


@pytest.mark.parametrize(
    ("note", "reason", "named_by"),
    [
        (FAILED_MOUNT % ("api-key", 'secret "chat-keys" not found'), "SecretNotFound", "serving.apiKeySecretRef"),
        (
            FAILED_MOUNT % ("api-key", "references non-existent secret key: keys"),
            "SecretNotFound",
            "serving.apiKeySecretRef",
        ),
        (FAILED_MOUNT % ("ca-bundle", 'secret "private-ca" not found'), "SecretNotFound", "chart value caBundle"),
        (FAILED_MOUNT % ("ca-bundle", 'configmap "private-ca" not found'), "ConfigMapNotFound", "chart value caBundle"),
    ],
)
def test_a_missing_source_of_a_volume_is_reported_with_what_names_it(note: str, reason: str, named_by: str) -> None:
    event = {"regarding": {"kind": "Pod", "name": "chat-1"}, "reason": "FailedMount", "note": note}
    found = condition(seen(pod(state=waiting("ContainerCreating")), events=(event,)).status, "Ready")
    assert found["reason"] == reason
    assert named_by in found["message"]
    assert note in found["message"]


# The resolve Job


def resolving(state: Object, **fields: Any) -> Decision:
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    return decide(replace(world, pods=(job_pod(job, state, **fields),)), SETTINGS)


@pytest.mark.parametrize("code", [10, 11, 12, 13])
def test_the_message_of_inspect_is_shown_before_any_device_is_allocated(code: int) -> None:
    reason = str(Reason.of_exit_code(code))
    decision = resolving(ended(code, failure_record(code, reason, "the hub says no")))
    assert condition(decision.status, "ModelResolved")["reason"] == reason
    assert condition(decision.status, "Ready")["message"].startswith("the hub says no")
    assert "Deployment" not in {child["kind"] for child in decision.desired}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (ended(1, "Traceback\nConnectionError: hub.example\n"), "ConnectionError: hub.example"),
        (ended(10, "no record here"), "no record here"),
        (waiting("ImagePullBackOff", "no such image"), "cannot be pulled: no such image"),
        (ended(0, "no record here"), "no record here"),
        (ended(1, "\x1b]0;title\x07 \u202egnp.exe"), " ]0;title   gnp.exe"),
        (ended(137, reason="OOMKilled"), "(OOMKilled) and no result: it left no record and no log; raise jobs."),
    ],
)
def test_the_message_quotes_a_job_that_fails_or_cannot_start(state: Object, says: str) -> None:
    decision = resolving(state)
    assert condition(decision.status, "ModelResolved")["status"] == "False"
    assert says in condition(decision.status, "Ready")["message"]


def test_an_evicted_pod_whose_container_ended_well_is_explained_by_its_event() -> None:
    """The kubelet's last word is then the phase Succeeded, without a reason."""
    stopped = pod(phase="Succeeded", state=ended(0))
    decision = seen(stopped)
    assert decision.needs == {Need.EVENTS}
    note = "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. "
    events = [
        {"regarding": {"name": "chat-1"}, "reason": reason, "note": text}
        for reason, text in (("Evicted", note), ("Unhealthy", "Readiness probe failed"))
    ]
    ready = condition(seen(stopped, events=tuple(events)).status, "Ready")
    assert ready["reason"] == "StorageFull"
    assert f"node n1 stopped pod chat-1: Evicted: {note.strip()}; raise the limit" in ready["message"]
    assert "; the next pod is created at " in ready["message"]


def test_an_evicted_pod_of_a_job_is_reported_as_such() -> None:
    message = "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. "
    decision = resolving(ended(0), reason="Evicted", message=message)
    ready = condition(decision.status, "Ready")
    assert ready["reason"] == "Resolving"
    assert f"Evicted: {message.strip()}; raise the limit of ephemeral-storage in jobs.resources" in ready["message"]


RUNNING: Object = {"running": {"startedAt": "2026-03-01T11:00:00Z"}}


def resolving_with(log: str, *earlier: Object, body: Object | None = None) -> Decision:
    """A running resolve Job whose pod wrote `log`; `earlier` are the final states of its earlier pods."""
    world, decision = settle(fresh())
    job = find(decision.desired, "Job")
    pods = [job_pod(job, RUNNING, phase="Running"), *(job_pod(job, state, "earlier") for state in earlier)]
    pods[0]["metadata"]["creationTimestamp"] = "2026-03-01T11:59:30Z"
    return decide(replace(world, body=body or world.body, pods=tuple(pods), logs={"resolve-x": log}), SETTINGS)


def test_only_the_log_of_a_running_job_is_read_and_often() -> None:
    decision = resolving(RUNNING, phase="Running")
    assert decision.needs == {LogOf("resolve-x")}
    assert decision.requeue_after_seconds == PROGRESS_SECONDS
    assert said(condition(decision.status, "Ready")) == "reading the model's configuration"
    for state in (waiting("ContainerCreating"), ended(1), ended(0)):
        assert LogOf("resolve-x") not in resolving(state).needs


@given(started=st.booleans(), ready=st.booleans(), state=st.sampled_from([None, RUNNING, CRASH, ended(1)]))
def test_the_log_of_a_serving_pod_is_never_read(started: bool, ready: bool, state: Object | None) -> None:
    decision = seen(pod(started=started, ready=ready, state=state))
    assert not [need for need in decision.needs if isinstance(need, LogOf)]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("neuron-runtime: one\nneuron-runtime: hf://a/b: 3.90 GiB of 15.30 GiB (26%)\n", "hf://a/b: 3.90 GiB of "),
        ("neuron-runtime: first\nPassword: secret\n  warnings.warn(\n\n", "first"),
        ("neuron-runtime: red \x1b[31mline\u202e\r\n", "red  [31mline"),
        ("neuron-runtime: " + "x" * 1000, "x" * 300),
    ],
)
def test_the_last_progress_line_of_a_running_job_is_shown_without_control_characters(log: str, said: str) -> None:
    decision = resolving_with(log)
    found = condition(decision.status, "ModelResolved")
    assert found["reason"] == "Resolving"
    assert found["message"].startswith(f"reading the model's configuration: {said}")
    assert found["message"].isprintable()
    assert len(found["message"]) < 400
    assert condition(decision.status, "Ready")["message"] == found["message"]
    assert decision.needs == {LogOf("resolve-x")}


@pytest.mark.parametrize("log", ["", "\n", "Traceback (most recent call last):\n", "a line of neuron-runtime: quoted"])
def test_lines_of_others_in_the_log_of_a_job_are_not_shown(log: str) -> None:
    assert said(condition(resolving_with(log).status, "Ready")) == "reading the model's configuration"


def test_a_second_attempt_shows_the_first_ones_end_until_it_reports_progress() -> None:
    failed = ended(137, "killed\n")
    silent = resolving_with("", failed)
    assert "exit code 137" in condition(silent.status, "Ready")["message"]
    assert silent.needs == {LogOf("resolve-x")}
    assert said(condition(resolving_with("neuron-runtime: 1 of 2", failed).status, "Ready")).endswith(": 1 of 2")


def test_the_verdict_on_the_previous_job_stays_until_the_next_one_reports_progress() -> None:
    verdict = resolving(ended(11, failure_record(11, "WeightsUnauthorized", "the hub says no")))
    body = {**fresh().body, "status": verdict.status}
    silent = resolving_with("", body=body)
    assert condition(silent.status, "Ready")["reason"] == "WeightsUnauthorized"
    assert silent.needs == {LogOf("resolve-x")}
    # The log may have its end before the pod has.
    ending = resolving_with("neuron-runtime: WeightsUnauthorized: the hub says no\n", body=body)
    assert condition(ending.status, "Ready")["reason"] == "WeightsUnauthorized"
    assert condition(resolving_with("neuron-runtime: 1 of 2", body=body).status, "Ready")["reason"] == "Resolving"


# Placement


@pytest.mark.parametrize(
    ("accelerator", "where", "mode", "legal"),
    [
        ({"devices": 1}, "", "Plugin", True),
        ({"devices": 6}, "", "Plugin", True),
        ({"devices": 6}, "inf2.24xlarge", "Plugin", True),
        ({"devices": 12}, "inf2.24xlarge", "Plugin", False),
        ({"devices": 2}, "inf2.24xlarge", "Plugin", False),
        ({"devices": 2}, "inf2.24xlarge", "PluginWithExtension", True),
        ({"devices": 2}, "trn1.32xlarge", "PluginWithExtension", False),
        ({"devices": 4}, "trn1.32xlarge", "PluginWithExtension", True),
        ({"devices": 4}, "trn1.32xlarge", "Plugin", False),
        ({"devices": 13}, "", "PluginWithExtension", False),
        ({"devices": 7}, "trn9.48xlarge", "Plugin", True),
        ({"cores": 1}, "", "Plugin", True),
        ({"cores": 3}, "inf2.24xlarge", "Plugin", False),
        ({"cores": 3}, "inf2.24xlarge", "PluginWithExtension", True),
        ({"cores": 12}, "inf2.24xlarge", "Plugin", True),
        ({"cores": 3}, "trn1.32xlarge", "PluginWithExtension", False),
        ({}, "", "Plugin", True),
        ({"type": "CPU"}, "", "Plugin", True),
    ],
)
def test_legal_sizes_are_placed_and_others_are_refused_with_the_legal_ones(
    accelerator: dict[str, Any], where: str, mode: Any, legal: bool
) -> None:
    spec = {**SPEC, "accelerator": accelerator}
    if where:
        spec["podTemplate"] = {"spec": {"nodeSelector": {"node.kubernetes.io/instance-type": where}}}
    model = parse(fresh(spec=spec).body)
    using = Settings(runtime_image="i", device_mode=mode)
    if legal:
        placement = place(model, using)
        assert placement.instance_type == where
        assert placement.devices == (0 if {"cores", "type"} & set(accelerator) else accelerator.get("devices", 1))
        assert placement.cores == accelerator.get("cores", 0)
    else:
        with pytest.raises(Unplaceable, match=r"is not a size .* choose one of 1") as refusal:
            place(model, using)
        assert "Placed" in refusal.value.reason.row.conditions


# The closed sets


def test_every_reason_has_its_conditions_in_order() -> None:
    for reason in Reason:
        conditions = reason.row.conditions
        order = (*ADAPTER_CONDITIONS, "Ready") if reason.row.of_adapters else SHOWN
        assert conditions == tuple(kind for kind in order if kind in conditions) != ()
        assert re.fullmatch(r"[A-Z][A-Za-z]*", reason)


def test_every_exit_code_maps_to_one_reason() -> None:
    codes = [code for reason in Reason for code in reason.row.exit_codes]
    assert len(codes) == len(set(codes))


@given(st.lists(st.tuples(st.sampled_from(CONDITIONS), st.sampled_from(["True", "False", "Unknown"])), max_size=10))
def test_ready_is_the_first_condition_that_is_not_true(given: list[tuple[Any, Any]]) -> None:
    findings = [Finding(kind, state, f"{kind}{state}", "m") for kind, state in given]
    found = status.complete(findings)
    of_steps, ready = found[: len(CONDITIONS)], found[len(CONDITIONS)]
    assert [finding.condition for finding in of_steps] == [*CONDITIONS]
    first = next((finding for finding in of_steps if finding.status != "True"), None)
    assert (ready.condition, ready.status) == ("Ready", "False" if first else "True")
    assert first is None or ready.reason == first.reason


@given(JSON_VALUES, JSON_VALUES, st.text(max_size=3000))
def test_every_status_uses_declared_reasons_and_stays_small(state: object, last: object, text: str) -> None:
    odd = pod(state={"waiting": {"reason": text[:9], "message": text}}, restarts=1)
    world, _ = resolved_world()
    deployment = find(world.children, "Deployment")
    container = {"name": "runtime", "ready": False, "state": state, "lastState": last}
    made = {**serving_pod(deployment, "b"), "status": {"containerStatuses": [container], "phase": text[:9]}}
    for decision in (seen(odd), decide(replace(world, pods=(made,)), SETTINGS)):
        assert decision.status is not None
        for found in decision.status["conditions"]:
            if found["status"] == "False" and found["type"] != "Ready":
                reason = Reason.named(found["reason"])
                assert reason is not None
                assert found["type"] in reason.row.conditions
            assert re.fullmatch(r"[A-Z][A-Za-z]*", found["reason"])
            assert len(found["message"]) <= MAX_MESSAGE
        assert len(msgspec.json.encode(decision.status)) <= 16 * 1024


@pytest.mark.parametrize("length", [1, MAX_MESSAGE, 10 * MAX_MESSAGE])
def test_the_message_of_what_is_missing_ends_with_the_section_of_its_reason_however_long_it_is(length: int) -> None:
    shown = waiting("ImagePullBackOff", "x" * length)
    decision = seen(pod(state=shown), spec={**SPEC, "replicas": 1})
    link = "; see docs/troubleshooting.md#imagepull"
    assert decision.status is not None
    linked = [found for found in decision.status["conditions"] if link in found["message"]]
    assert {found["type"] for found in linked} == {"Available", "Ready", "Reconciling"}
    for found in linked:
        assert (found["message"].count(link), found["message"].endswith(link)) == (1, True)
        assert len(found["message"]) <= MAX_MESSAGE
    (event,) = decision.announcements
    assert link not in event.message


def test_the_verdict_on_an_earlier_job_is_repeated_without_a_second_link() -> None:
    verdict = resolving(ended(11, failure_record(11, "WeightsUnauthorized", "x" * 2000)))
    repeated = resolving_with("", body={**fresh().body, "status": verdict.status})
    before, after = (condition(decision.status, "ModelResolved")["message"] for decision in (verdict, repeated))
    assert before.endswith("; see docs/troubleshooting.md#weightsunauthorized")
    assert after == before


def test_long_names_keep_the_status_small() -> None:
    world, decision = settle(fresh(spec={**SPEC, "engine": {"applicationClass": "private:Class"}}))
    facts = {**FACTS, "architecture": "A" * 100_000, "digest": "d" * 100_000, "dtype": "t" * 100_000}
    _, decision = settle(replace(world, pods=(resolved_pod(find(decision.desired, "Job"), facts),)))
    assert decision.status is not None
    assert condition(decision.status, "ModelResolved")["status"] == "True"
    assert len(msgspec.json.encode(decision.status)) <= 16 * 1024


def test_the_transition_time_changes_only_with_the_status() -> None:
    world, _ = resolved_world()
    deployment = find(world.children, "Deployment")
    world, _ = settle(replace(world, pods=(serving_pod(deployment),)))
    later = replace(world, now=world.now.replace(hour=13))
    failing = decide(replace(later, pods=(serving_pod(deployment, conditions=[UNREADY_SINCE]),)), SETTINGS)
    assert condition(failing.status, "Available")["reason"] == "ProbeFailing"
    assert condition(failing.status, "Available")["lastTransitionTime"] == "2026-03-01T12:00:00Z"
    pods = tuple(serving_pod(deployment, f"c{n}", ready=True) for n in range(2))
    assert condition(decide(replace(later, pods=pods), SETTINGS).status, "Available")["lastTransitionTime"] == (
        "2026-03-01T13:00:00Z"
    )


def test_every_condition_has_the_observed_generation() -> None:
    decision = decide(fresh(generation=7), SETTINGS)
    assert decision.status is not None
    assert {c["observedGeneration"] for c in decision.status["conditions"]} == {7}


def test_a_claim_that_its_node_cannot_prepare_is_named() -> None:
    note = "Failed to prepare dynamic resources: DRA driver neuron.aws.com is not registered"
    event = {"regarding": {"kind": "Pod", "name": "chat-1"}, "reason": "FailedPrepareDynamicResources", "note": note}
    ready = condition(seen(pod(state=waiting("ContainerCreating")), events=(event,)).status, "Ready")
    assert ready["reason"] == "AllocationRejected"
    assert note in ready["message"]
    assert "see the pod of the Neuron DRA driver on that node" in ready["message"]


def test_a_cluster_without_the_driver_for_claims_is_told_what_to_install() -> None:
    verdict = "0/1 nodes are available: request devices: device class neuron.aws.com does not exist."
    found = seen(lambda deployment: unscheduled_pod(deployment, verdict))
    available = condition(found.status, "Available")
    assert available["reason"] == "NoMatchingNode"
    assert "install the Neuron DRA driver" in available["message"]
