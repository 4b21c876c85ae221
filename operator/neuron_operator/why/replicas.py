"""Why fewer replicas answer than the spec requests. Called by `decide`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from neuron_operator.api.reasons import Finding, Reason, met, unmet
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import DeploymentView, Observed, PodView
from neuron_operator.render.serving import num_promised
from neuron_operator.why import nodes
from neuron_operator.why.pods import explain_pod
from neuron_operator.why.refusals import explain_denial


def explain_replicas(
    observed: Observed,
    num_wanted: int,
    served: Revision,
    of_missing: Sequence[Finding] = (),
    note: str = "",
) -> tuple[Finding, ...]:
    """A Finding for Available, those that pods of the served revision give for other conditions, and one for Ready if
    replicas are missing although Available is true. `of_missing`: why replicas are missing that have no pods.
    `note`: the end of what Available says."""
    num_answering = sum(pod.is_answering for pod in observed.replicas)
    counted = f"{num_answering} of {num_wanted} replicas answer"
    if num_wanted == 0:
        return (met("Available", note or "spec.replicas is 0", "ScaledToZero"),)
    ending = f"; {note}" if note else ""
    if num_answering >= num_wanted:
        return (met("Available", "; ".join((counted, *_on_failed_nodes(observed))) + ending),)
    missing = [pod for pod in _current(observed.replicas) if not pod.is_answering]
    silent = {pod.group for pod in missing if pod.group}
    missing += [pod for pod in _current(observed.followers) if pod.group in silent and not pod.is_running]
    of_pods = [(pod, explain_pod(pod, observed, served.placement)) for pod in missing]
    findings = [*_explain_deployment(observed.deployment), *of_missing, *(finding for _, finding in of_pods)]
    if not findings:
        findings = [unmet("Available", Reason.LOADING, "waiting for pods to be created")]
    of_revision = [finding for pod, finding in of_pods if pod.revision == served.name]
    elsewhere = {finding.condition: finding for finding in of_revision if finding.condition != "Available"}
    worst = min(findings, key=lambda finding: _reason(finding).weight)
    reason = _reason(worst)
    if "Available" not in reason.row.conditions:
        reason = Reason.NO_MATCHING_NODE if worst.condition == "Placed" else Reason.CRASH_LOOP
    alike = sum(finding.reason == worst.reason for finding in findings)
    others = f" (and {alike - 1} more with this reason)" if alike > 1 else ""
    promised = num_promised(num_wanted)
    if num_answering < promised:
        text = f"{counted}; {worst.message}{others}{ending}"
        return (*elsewhere.values(), unmet("Available", reason, text, worst.needs))
    text = f"{counted}, at least {promised} promised; {worst.message}{others}"
    return (*elsewhere.values(), met("Available", text), unmet("Ready", reason, text, worst.needs))


def _on_failed_nodes(observed: Observed) -> Iterator[str]:
    """What is wrong with the nodes of replicas that answer, or of members of their groups."""
    for pod in (*observed.live, *observed.followers):
        if pod.is_running and (signal := nodes.signal_of(pod, observed)) is not None:
            yield f"pod {pod.name} is on node {pod.node}, which {signal.said}"


def _reason(finding: Finding) -> Reason:
    return Reason.named(finding.reason) or Reason.CRASH_LOOP


def _current(pods: Sequence[PodView]) -> list[PodView]:
    """All pods except failed ones whose successors got further."""
    alive = [pod for pod in pods if not pod.has_failed]
    got_further = (pod.age_key[0] for pod in alive if pod.is_live and (pod.is_admitted or pod.unscheduled is not None))
    newest = max(got_further, default=None)
    failed = max((pod for pod in pods if pod.has_failed), key=lambda pod: pod.age_key, default=None)
    if failed is not None and (newest is None or failed.age_key[0] >= newest):
        alive.append(failed)
    return alive


def _explain_deployment(deployment: DeploymentView | None) -> list[Finding]:
    """Why pods could not be created: the Deployment has the last error of its ReplicaSet."""
    if deployment is None or deployment.replica_failure is None:
        return []
    reason, cure = explain_denial(deployment.replica_failure)
    text = f"pods cannot be created: {deployment.replica_failure}"
    return [unmet("Available", reason, f"{text}; {cure}" if cure else text)]
