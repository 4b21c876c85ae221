"""Why fewer replicas answer than the spec requests. Called by `decide`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from neuron_operator.objects import instant
from neuron_operator.placement import Placement
from neuron_operator.reasons import Finding, Reason, met, unmet
from neuron_operator.rollout import num_promised
from neuron_operator.views import DeploymentView, Observed, PodView, Termination
from neuron_operator.why.pods import OOM_KILLED, explain_start, how_it_ended, last_words


def explain_replicas(observed: Observed, num_wanted: int, placement: Placement) -> tuple[Finding, ...]:
    """A Finding for Available, those that pods give for other conditions, and one for Ready if replicas are missing
    although Available is true."""
    num_answering = sum(pod.is_answering for pod in observed.replicas)
    counted = f"{num_answering} of {num_wanted} replicas answer"
    if num_wanted == 0:
        return (met("Available", "spec.replicas is 0", "ScaledToZero"),)
    if num_answering >= num_wanted:
        return (met("Available", counted),)
    found = [
        *_explain_deployment(observed.deployment),
        *(_explain_pod(pod, observed, placement) for pod in _current(observed.replicas) if not pod.is_answering),
    ]
    if not found:
        found = [unmet("Available", Reason.LOADING, "waiting for pods to be created")]
    elsewhere = {finding.condition: finding for finding in found if finding.condition != "Available"}
    worst = min(found, key=lambda finding: _reason(finding).weight)
    reason = _reason(worst)
    if "Available" not in reason.row.conditions:
        reason = Reason.NO_MATCHING_NODE if worst.condition == "Placed" else Reason.CRASH_LOOP
    alike = sum(finding.reason == worst.reason for finding in found)
    others = f" (and {alike - 1} more with this reason)" if alike > 1 else ""
    promised = num_promised(num_wanted)
    if num_answering < promised:
        text = f"{counted}; {worst.message}{others}"
        return (*elsewhere.values(), unmet("Available", reason, text, worst.needs))
    text = f"{counted}, at least {promised} promised; {worst.message}{others}"
    return (*elsewhere.values(), met("Available", text), unmet("Ready", reason, text, worst.needs))


def _reason(finding: Finding) -> Reason:
    return Reason.named(finding.reason) or Reason.CRASH_LOOP


def _current(pods: Sequence[PodView]) -> list[PodView]:
    """All pods except failed ones that newer pods have replaced."""
    alive = [pod for pod in pods if pod.is_live or pod.is_deleting]
    newest = max((pod.age_key[0] for pod in pods if pod.is_live), default=None)
    failed = max((pod for pod in pods if pod not in alive), key=lambda pod: pod.age_key, default=None)
    if failed is not None and (newest is None or failed.age_key[0] >= newest):
        alive.append(failed)
    return alive


def _explain_deployment(deployment: DeploymentView | None) -> list[Finding]:
    """Why pods could not be created: the Deployment has the last error of its ReplicaSet."""
    if deployment is None or deployment.replica_failure is None:
        return []
    message = deployment.replica_failure
    reason = Reason.CRASH_LOOP
    if "exceeded quota" in message:
        reason = Reason.QUOTA_EXCEEDED
    elif "PodSecurity" in message:
        reason = Reason.POD_SECURITY_DENIED
    return [unmet("Available", reason, f"pods cannot be created: {message}")]


def _explain_pod(pod: PodView, observed: Observed, placement: Placement) -> Finding:
    if pod.disruption == "DeletionByTaintManager" or _is_node_lost(pod):
        text = f"pod {pod.name}: its node {pod.node} no longer responds"
        return unmet("Available", Reason.NODE_LOST, text)
    if pod.phase == "Failed":
        was_refused = pod.reason == "UnexpectedAdmissionError"
        text = f"pod {pod.name} was rejected or stopped by its node: {pod.reason}: {pod.message}"
        return unmet("Available", Reason.ALLOCATION_REJECTED if was_refused else Reason.CRASH_LOOP, text)
    if pod.is_deleting:
        return unmet("Available", Reason.DRAINING, f"pod {pod.name} is finishing its responses before it stops")
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
