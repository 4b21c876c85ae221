"""Why a pod of a replica or Job does not run, and how its container ended. Called by `why.jobs` and `why.replicas`."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from neuron_operator import names
from neuron_operator.breaker import next_attempt
from neuron_operator.objects import instant
from neuron_operator.placement import Placement, describe_free, describe_sizes
from neuron_operator.reasons import Finding, Reason, unmet
from neuron_operator.views import Observed, PodView, Termination
from neuron_operator.world import Need

UNEXPLAINED_SECONDS = 20
"""Age at which the events of a pod or Job are read, if nothing else explains its state."""

OOM_KILLED = "OOMKilled"
"""The kubelet's reason. The kernel usually kills all processes of the container, so none is left to write a record."""

_STARTING = ("", "ContainerCreating", "PodInitializing")


def explain_pod(pod: PodView, observed: Observed, placement: Placement) -> Finding:
    if pod.disruption == "DeletionByTaintManager" or _is_node_lost(pod):
        text = f"pod {pod.name}: its node {pod.node} no longer responds"
        return unmet("Available", Reason.NODE_LOST, text)
    if pod.is_deleting:
        return unmet("Available", Reason.DRAINING, f"pod {pod.name} is finishing its responses before it stops")
    if pod.has_failed:
        return explain_failure(pod, observed)
    if pod.container.ended is not None:
        return _explain_end(pod, pod.container.ended)
    starting = explain_start(pod, observed, placement)
    if starting is not None:
        return starting
    since = pod.container.running_since
    if _was_ready_since(pod, instant(since)):
        text = f"pod {pod.name} has been running since {since} but does not answer /health"
        return unmet("Available", Reason.PROBE_FAILING, text)
    return unmet("Available", Reason.LOADING, f"pod {pod.name} has been loading the model since {since}")


def explain_failure(pod: PodView, observed: Observed) -> Finding:
    """Why its node refused, evicted or stopped a pod, and when the next one is created."""
    due = next_attempt(observed, pod.revision)
    again = f"; the next pod is created at {due:%Y-%m-%dT%H:%M:%SZ}" if due else ""
    if not pod.is_admitted:
        text = f"node {pod.node} refused pod {pod.name}: {pod.reason}: {pod.message}{again}"
        return unmet("Available", Reason.ALLOCATION_REJECTED, text)
    text = f"node {pod.node} stopped pod {pod.name}: {pod.reason}: {pod.message}{again}"
    return unmet("Available", Reason.CRASH_LOOP, text)


def _explain_end(pod: PodView, end: Termination) -> Finding:
    """How a container ended: the reason of its exit code, for that reason's condition."""
    how = f"pod {pod.name} ended with {how_it_ended(end)} (restarts: {pod.container.num_restarts})"
    if end.reason == OOM_KILLED and end.record is None:
        cure = "raise podTemplate.spec.resources.limits.memory, or lower serving.maxSequences or maxModelLength"
        return unmet("Available", Reason.DEVICE_OUT_OF_MEMORY, f"{how}: {cure}; its last line: {last_words(end)}")
    reason = Reason.of_exit_code(end.exit_code) or Reason.CRASH_LOOP
    text = f"{how}: {last_words(end)}"
    return unmet(reason.row.conditions[-1], reason, text)


def _was_ready_since(pod: PodView, started: datetime | None) -> bool:
    """Whether it was ready since its container started."""
    changed = pod.readiness_changed
    return changed is not None and started is not None and changed > started


def _is_node_lost(pod: PodView) -> bool:
    """The node controller marks the pod as not ready but leaves its containers ready."""
    return not pod.is_ready and pod.are_containers_ready


def explain_start(pod: PodView, observed: Observed, placement: Placement | None = None) -> Finding | None:
    """Why a pod's container has not run; None if it has. `placement` is that of a replica's pod, None for Jobs."""
    if pod.unscheduled is not None:
        return _explain_unscheduled(pod, pod.unscheduled, observed, placement)
    container = pod.container
    if container.has_run:
        return None
    reason, message = container.waiting_reason, container.waiting_message
    if "Image" in reason:
        message = message.rpartition("ErrImagePull: ")[2]
        text = f"pod {pod.name}: image {container.image} cannot be pulled: {message}"
        return unmet("Available", Reason.IMAGE_PULL, text)
    if reason == "CreateContainerConfigError" and "secret" in message:
        return unmet("WeightsReady", Reason.SECRET_NOT_FOUND, f"pod {pod.name}: {message}")
    if reason not in _STARTING:
        return unmet("Available", Reason.CRASH_LOOP, f"pod {pod.name} cannot start: {reason}: {message}")
    if observed.age(pod.created) < timedelta(seconds=UNEXPLAINED_SECONDS):
        return unmet("Available", Reason.LOADING, f"pod {pod.name} is starting")
    return _explain_by_events(pod, observed.warnings.get(pod.name, ""))


_NAMED_BY = {
    names.API_KEY_VOLUME: "the Secret in serving.apiKeySecretRef",
    names.CA_VOLUME: "the chart value caBundle in this namespace",
}
"""Volume to what names its source."""


def _explain_by_events(pod: PodView, warning: str) -> Finding:
    needs = {Need.EVENTS}
    if "FailedMount" in warning or "FailedAttachVolume" in warning:
        is_secret = re.search(r'secret ".*" not found|non-existent secret key', warning)
        reason = Reason.SECRET_NOT_FOUND if is_secret else Reason.VOLUME_NOT_BOUND
        named_by = next((by for volume, by in _NAMED_BY.items() if f'volume "{volume}"' in warning), "")
        text = f"pod {pod.name} is waiting for {named_by}: {warning}" if named_by else f"pod {pod.name}: {warning}"
        return unmet("Available", reason, text, needs)
    return unmet("Available", Reason.LOADING, f"pod {pod.name} is starting; {warning or 'no warnings so far'}", needs)


def _explain_unscheduled(pod: PodView, message: str, observed: Observed, placement: Placement | None) -> Finding:
    if "unbound immediate PersistentVolumeClaims" in message or "persistentvolumeclaim" in message:
        return unmet("Available", Reason.VOLUME_NOT_BOUND, f"pod {pod.name} cannot be scheduled: {message}")
    if placement is not None and f"Insufficient {names.NEURON_RESOURCE_PREFIX}" in message:
        free = describe_free(observed.free, placement, pod.node_rules)
        verdict = message.partition(". ")[0].rstrip(".")
        text = f"pod {pod.name} needs {placement.words} on one node; {free}; the scheduler reports {verdict}"
        return unmet("Available", Reason.INSUFFICIENT_NEURON, text, {Need.FREE_DEVICES})
    text = f"pod {pod.name} cannot be scheduled: {message or 'no reason given'}"
    if placement is None or not placement.resources:
        return unmet("Available", Reason.NO_MATCHING_NODE, text)
    needs = {Need.FREE_DEVICES}  # of the nodes, only their types and labels count here
    if wrong_size := describe_sizes(observed.free, placement, pod.node_rules):
        return unmet("Placed", Reason.TOPOLOGY_IMPOSSIBLE, wrong_size, needs)
    return unmet("Available", Reason.NO_MATCHING_NODE, text, needs)


def how_it_ended(end: Termination) -> str:
    """`exit code 137 (OOMKilled)`."""
    return f"exit code {end.exit_code}" + (f" ({end.reason})" if end.reason not in ("", "Error", "Completed") else "")


def last_words(end: Termination) -> str:
    """The message of the record, or else the last line of the log."""
    record = end.record
    if record is not None:
        return record.message or record.reason
    lines = [line.strip() for line in end.message.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it left no record and no log"
