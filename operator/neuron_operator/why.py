"""Observations to reasons: why the model is not resolved, why replicas do not answer. Called by `decide`.

Each explanation is a Finding in the words of API.md. Messages carry numbers and names and no running clocks, so that a
state that does not change is not written again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from neuron_operator import names
from neuron_operator.objects import (
    condition,
    dig,
    instant,
    is_deleting,
    is_true,
    items,
    name_of,
    whole,
)
from neuron_operator.placement import Placement, describe_free
from neuron_operator.records import REASON_BY_EXIT_CODE, Facts, Record, parse_record
from neuron_operator.render.jobs import FINAL_EXIT_CODES, RETRY_AFTER_SECONDS
from neuron_operator.world import Need, Object, World

MAX_MESSAGE = 1024

CONDITIONS = ("Accepted", "ModelResolved", "Placed", "WeightsReady", "Compiled", "Available", "UpToDate")
"""In the order of the straight line; `Ready` is the first of them that is not true."""

REASONS = {
    "Accepted": {"InvalidSpec", "FieldNotSupported", "NameConflict", "OperatorForbidden", "StorageNotConfigured"},
    "ModelResolved": {
        *("Resolving", "ModelNotFound", "WeightsUnauthorized", "SecretNotFound"),
        *("UnsupportedArchitecture", "InvalidModel"),
    },
    "Placed": {"ModelTooLarge", "TopologyImpossible"},
    "WeightsReady": {
        *("Fetching", "WeightsUnauthorized", "SecretNotFound", "ChecksumMismatch", "StorageFull", "VolumeNotBound"),
    },
    "Compiled": {"Compiling", "CompileFailed", "CompileOutOfMemory", "InvalidEngineConfig"},
    "Available": {
        *("InsufficientNeuron", "NoMatchingNode", "QuotaExceeded", "NodeProvisioning", "AllocationRejected"),
        *("PodSecurityDenied", "ImagePull", "SecretNotFound", "VolumeNotBound", "Loading", "ArtifactMissing"),
        *("DeviceHeld",),
        *("DeviceOutOfMemory", "DeviceFailed", "DriverIncompatible", "DevicesNotAdjacent", "CrashLoop", "ProbeFailing"),
        *("GroupIncomplete", "RestartBudgetExhausted", "NodeLost", "Draining"),
    },
    "UpToDate": {"RollingOut", "WaitingForCapacity", "ProgressDeadlineExceeded", "RolledBack", "Paused"},
}
"""The closed set of reasons why a condition is not true."""

UNEXPLAINED_SECONDS = 20
"""A pod or Job that stays without a word for this long is worth reading its events."""

WEIGHT = {
    reason: weight
    for weight, reason in enumerate(
        (
            *("PodSecurityDenied", "QuotaExceeded", "AllocationRejected", "DevicesNotAdjacent", "DriverIncompatible"),
            *("DeviceFailed", "DeviceOutOfMemory", "DeviceHeld", "RestartBudgetExhausted", "ArtifactMissing"),
            *("GroupIncomplete", "ImagePull", "SecretNotFound", "CrashLoop", "VolumeNotBound", "NodeLost"),
            *("InsufficientNeuron", "NoMatchingNode", "ProbeFailing", "Draining", "Loading"),
        )
    )
}
"""Which reason is told where replicas differ: the one that least heals by waiting."""


@dataclass(frozen=True)
class Finding:
    """One condition as this pass sees it."""

    condition: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    needs: frozenset[Need] = frozenset()
    """Facts that would make the message better."""


def holds(kind: str, message: str, reason: str = "") -> Finding:
    return Finding(kind, "True", reason or kind, message)


def fails(kind: str, reason: str, message: str, needs: Iterable[Need] = ()) -> Finding:
    return Finding(kind, "False", reason, message, frozenset(needs))


# The resolve Job


def resolved_facts(pods: Iterable[Object]) -> Facts | None:
    """Facts from the record of a Job pod that ended well."""
    records = (record for pod in pods for record in _records(pod))
    return next((record.facts for record in records if record.ok and record.facts), None)


def explain_resolve(job: Object | None, pods: Sequence[Object], world: World) -> Finding:
    """Why there are no facts yet. `job` is the live resolve Job of the wanted spec and `pods` are its pods."""
    nothing_yet = fails("ModelResolved", "Resolving", "reading the model's configuration")
    if job is None:
        return _last_verdict(world) or nothing_yet
    ended = next(((pod, end) for pod in _newest_first(pods) for end in _terminations(pod)), None)
    if ended is not None:
        return _explain_resolve_end(job, *ended)
    if is_true(job, "Failed"):
        told = condition(job, "Failed").get("message") or "no message"
        return fails("ModelResolved", "Resolving", f"the Job {name_of(job)} failed without a record: {told}")
    return _last_verdict(world) or _explain_resolve_start(job, pods, world) or nothing_yet


def _explain_resolve_end(job: Object, pod: Object, end: Mapping[str, Any]) -> Finding:
    code = whole(end.get("exitCode"))
    reason = REASON_BY_EXIT_CODE.get(code, "")
    if code in FINAL_EXIT_CODES and reason in REASONS["ModelResolved"]:
        again = f"tried again every {RETRY_AFTER_SECONDS // 60} minutes"
        return fails("ModelResolved", reason, f"{_last_words(end)}; {again}")
    state = "is done with it" if is_true(job, "Failed") or not code else "will try again"
    text = f"pod {name_of(pod)} ended with {_exit(end)} and no facts: {_last_words(end)}; the Job {state}"
    return fails("ModelResolved", "Resolving", text)


def _explain_resolve_start(job: Object, pods: Sequence[Object], world: World) -> Finding | None:
    """Why the Job does not run; None where it does, or where it is too early to ask."""
    if pods:
        starting = _explain_start(_newest_first(pods)[0], world)
        if starting is None:
            return None
        text = f"the Job {name_of(job)} has not run yet: {starting.message}"
        return fails("ModelResolved", "Resolving", text, starting.needs)
    if _age(job, world) < timedelta(seconds=UNEXPLAINED_SECONDS):
        return None
    told = _event_words(name_of(job), world) or "its pod has not been made"
    return fails("ModelResolved", "Resolving", f"the Job {name_of(job)} waits: {told}", {Need.EVENTS})


def _last_verdict(world: World) -> Finding | None:
    """What the last Job for this generation found: it stands until the next one has found something else."""
    told = condition(world.body, "ModelResolved")
    current = told.get("observedGeneration") == dig(world.body, "metadata", "generation")
    reason = told.get("reason")
    if current and told.get("status") == "False" and reason in REASONS["ModelResolved"] - {"Resolving"}:
        return fails("ModelResolved", str(reason), str(told.get("message") or ""))
    return None


# The replicas


def explain_replicas(
    deployment: Object | None, pods: Sequence[Object], promised: int, placement: Placement, world: World
) -> tuple[Finding, ...]:
    """Why fewer than `promised` replicas answer: a Finding for Available, and others that pods gave evidence against.

    `pods` are the serving pods of the model, whatever their revision.
    """
    ready = [pod for pod in pods if is_answering(pod)]
    if promised == 0:
        return (holds("Available", "no replica is asked for", "ScaledToZero"),)
    if len(ready) >= promised:
        return (holds("Available", f"{len(ready)} of {promised} replicas answer"),)
    found = [
        *_explain_deployment(deployment),
        *(_explain_pod(pod, placement, world) for pod in _telling(pods) if not is_answering(pod)),
    ]
    elsewhere = {finding.condition: finding for finding in found if finding.condition != "Available"}
    counted = f"{len(ready)} of {promised} replicas answer"
    if not found:
        return (fails("Available", "Loading", f"{counted}; waiting for pods to be made"),)
    worst = min(found, key=lambda finding: WEIGHT.get(finding.reason, WEIGHT["CrashLoop"]))
    reason = worst.reason if worst.condition == "Available" else "CrashLoop"
    alike = sum(finding.reason == worst.reason for finding in found)
    others = f" (and {alike - 1} more like it)" if alike > 1 else ""
    available = fails("Available", reason, f"{counted}; {worst.message}{others}", worst.needs)
    return (*elsewhere.values(), available)


def is_answering(pod: Object) -> bool:
    return is_true(pod, "Ready") and not is_deleting(pod)


def is_live(pod: Object) -> bool:
    """Counts as a replica: not ended, not on its way out."""
    return not is_deleting(pod) and dig(pod, "status", "phase") not in ("Failed", "Succeeded")


def _telling(pods: Sequence[Object]) -> list[Object]:
    """Pods whose state says something about now: all but failed ones that newer pods have replaced for good."""
    living = [_created(pod) for pod in pods if is_live(pod)]
    newest = max(living, default="")
    failed = [pod for pod in pods if not is_live(pod) and not is_deleting(pod)]
    latest_failed = [pod for pod in _newest_first(failed)[:1] if _created(pod) >= newest]
    return [pod for pod in pods if is_live(pod) or is_deleting(pod)] + latest_failed


def _explain_deployment(deployment: Object | None) -> list[Finding]:
    """Pods that could not even be made: the Deployment carries its ReplicaSet's last error."""
    failure = condition(deployment, "ReplicaFailure")
    if failure.get("status") != "True":
        return []
    text = str(failure.get("message") or "")
    if "exceeded quota" in text:
        return [fails("Available", "QuotaExceeded", f"pods cannot be made: {text}")]
    if "PodSecurity" in text:
        return [fails("Available", "PodSecurityDenied", f"pods cannot be made: {text}")]
    return [fails("Available", "CrashLoop", f"pods cannot be made: {text}")]


def _explain_pod(pod: Object, placement: Placement, world: World) -> Finding:
    name = name_of(pod)
    gone = condition(pod, "DisruptionTarget")
    if gone.get("reason") == "DeletionByTaintManager" or _lost_its_node(pod):
        node = dig(pod, "spec", "nodeName")
        return fails("Available", "NodeLost", f"pod {name}: its node {node} does not answer any more")
    if dig(pod, "status", "phase") == "Failed":
        told = f"{dig(pod, 'status', 'reason')}: {dig(pod, 'status', 'message')}"
        reason = "AllocationRejected" if dig(pod, "status", "reason") == "UnexpectedAdmissionError" else "CrashLoop"
        return fails("Available", reason, f"pod {name} was refused or ended by its node: {told}")
    if is_deleting(pod):
        return fails("Available", "Draining", f"pod {name} is finishing its streams before it ends")
    ends = _terminations(pod)
    if ends:
        return _explain_end(pod, ends[0])
    starting = _explain_start(pod, world, placement)
    if starting is not None:
        return starting
    status = next(iter(_container_statuses(pod)), {})
    since = dig(status, "state", "running", "startedAt")
    if _was_ready_since(pod, since):
        return fails("Available", "ProbeFailing", f"pod {name} runs since {since} and does not answer /health")
    return fails("Available", "Loading", f"pod {name} is loading the model since {since}")


def _explain_start(pod: Object, world: World, placement: Placement | None = None) -> Finding | None:
    """Why a pod has no running container; None where it has one. For pods of replicas and of Jobs alike."""
    name = name_of(pod)
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _explain_unscheduled(pod, str(scheduled.get("message") or ""), placement, world)
    status = next(iter(_container_statuses(pod)), {})
    if dig(status, "state", "running") or dig(status, "state", "terminated"):
        return None
    waiting = dig(status, "state", "waiting") or {}
    reason, told = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if "Image" in reason:
        told = told.rpartition("ErrImagePull: ")[2]
        return fails("Available", "ImagePull", f"pod {name}: image {status.get('image')} cannot be pulled: {told}")
    if reason == "CreateContainerConfigError" and "secret" in told:
        return fails("WeightsReady", "SecretNotFound", f"pod {name}: {told}")
    if reason not in ("", "ContainerCreating", "PodInitializing"):
        return fails("Available", "CrashLoop", f"pod {name} cannot start: {reason}: {told}")
    if _age(pod, world) < timedelta(seconds=UNEXPLAINED_SECONDS):
        return fails("Available", "Loading", f"pod {name} is being started")
    told = _event_words(name, world)
    if "FailedMount" in told and re.search(r'secret ".*" not found|non-existent secret key', told):
        text = f"pod {name} waits for the Secret of serving.apiKeySecretRef: {told}"
        return fails("Available", "SecretNotFound", text, {Need.EVENTS})
    if "FailedMount" in told or "FailedAttachVolume" in told:
        return fails("Available", "VolumeNotBound", f"pod {name}: {told}", {Need.EVENTS})
    return fails("Available", "Loading", f"pod {name} is being started; {told or 'no event tells more'}", {Need.EVENTS})


def _explain_unscheduled(pod: Object, told: str, placement: Placement | None, world: World) -> Finding:
    name = name_of(pod)
    if "unbound immediate PersistentVolumeClaims" in told or "persistentvolumeclaim" in told:
        return fails("Available", "VolumeNotBound", f"pod {name} cannot be scheduled: {told}")
    if placement is not None and f"Insufficient {names.NEURON_RESOURCE_PREFIX}" in told:
        free = describe_free(world.free, placement)
        judged = told.partition(". ")[0].rstrip(".")
        text = f"pod {name} needs {placement.words} on one node; {free}; the scheduler says {judged}"
        return fails("Available", "InsufficientNeuron", text, {Need.FREE_DEVICES})
    return fails("Available", "NoMatchingNode", f"pod {name} cannot be scheduled: {told or 'no reason given'}")


def _explain_end(pod: Object, end: Mapping[str, Any]) -> Finding:
    """A container that ended: its record's reason, told by the condition that the reason belongs to."""
    reason = REASON_BY_EXIT_CODE.get(whole(end.get("exitCode")), "CrashLoop")
    owner = next((kind for kind in reversed(CONDITIONS) if reason in REASONS[kind]), "Available")
    restarts = sum(whole(status.get("restartCount")) for status in _container_statuses(pod))
    text = f"pod {name_of(pod)} ended with {_exit(end)} (restarts: {restarts}): {_last_words(end)}"
    return fails(owner, reason, text)


def _was_ready_since(pod: Object, started_at: Any) -> bool:
    """Whether it answered before and does not now; the first answer is a moment later than the end of loading."""
    changed, started = instant(condition(pod, "Ready").get("lastTransitionTime")), instant(started_at)
    return changed is not None and started is not None and changed > started


def _lost_its_node(pod: Object) -> bool:
    """The node controller marks the pod not ready and leaves its containers as they last were: ready."""
    return condition(pod, "Ready").get("status") == "False" and is_true(pod, "ContainersReady")


# Words


def _terminations(pod: Object) -> list[Mapping[str, Any]]:
    """How the runtime container last ended, where it is not ready since."""
    ends = []
    for status in _container_statuses(pod):
        end = dig(status, "state", "terminated") or dig(status, "lastState", "terminated")
        if isinstance(end, Mapping) and not status.get("ready"):
            ends.append(end)
    return ends


def _container_statuses(pod: Object) -> list[Mapping[str, Any]]:
    return [s for s in items(pod, "status", "containerStatuses") if s.get("name") == names.RUNTIME_CONTAINER]


def _records(pod: Object) -> list[Record]:
    found = [parse_record(end.get("message")) for end in _terminations(pod)]
    return [record for record in found if record is not None]


def _last_words(end: Mapping[str, Any]) -> str:
    """The record's message, or the last line of the log that the kubelet put in its place."""
    record = parse_record(end.get("message"))
    if record is not None:
        return record.message or record.reason
    lines = [line.strip() for line in str(end.get("message") or "").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it left no record"


def _exit(end: Mapping[str, Any]) -> str:
    named = end.get("reason")
    suffix = f" ({named})" if named not in (None, "", "Error", "Completed") else ""
    return f"exit code {end.get('exitCode')}{suffix}"


def _event_words(name: str, world: World) -> str:
    """The last warning about an object, empty where there is none. Events come oldest first."""
    told = [event for event in world.events or () if dig(event, "regarding", "name") == name]
    return f"{told[-1].get('reason')}: {told[-1].get('note')}" if told else ""


def _age(value: Object, world: World) -> timedelta:
    created = instant(_created(value))
    return world.now - created if created else timedelta(0)


def _created(value: Object) -> str:
    return str(dig(value, "metadata", "creationTimestamp") or "")


def _newest_first(values: Iterable[Object]) -> list[Object]:
    return sorted(values, key=lambda value: (_created(value), name_of(value)), reverse=True)


def belongs_to_job(pod: Object, job_name: str) -> bool:
    owners = items(pod, "metadata", "ownerReferences")
    return any((owner.get("kind"), owner.get("name")) == ("Job", job_name) for owner in owners)
