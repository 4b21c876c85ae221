"""Why a pod of a replica or Job does not run, and how its container ended. Called by `why.jobs` and `why.replicas`."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta

from neuron_operator.api import names
from neuron_operator.api.engines.engine import by_exit_code
from neuron_operator.api.reasons import Exists, Finding, Need, Reason, unmet
from neuron_operator.place.sizes import describe_free, describe_sizes
from neuron_operator.read.objects import instant, items, text
from neuron_operator.read.placement import Placement
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import EVICTED, ContainerView, Observed, PodView, Termination
from neuron_operator.render.resources import mebibytes
from neuron_operator.why import nodes

MAX_LINE = 300
"""Characters of a line of a log that are shown."""

UNEXPLAINED_SECONDS = 20
"""Age at which a pod that no scheduler has seen is explained. What is silent is looked at as often."""

UNEXPLAINED_POD_SECONDS = 4
"""Age at which the events of a pod, or of a Job without one, are read, if nothing else explains why it does not start:
a kubelet tells at once what it cannot mount, the API server what it refuses."""

IN_USE_ELSEWHERE = "Multi-Attach"
"""In an event: the volume is attached to another node."""
ONE_NODE_AT_A_TIME = (
    "a volume can be used on one node at a time: give its claim the access mode ReadWriteMany, or set "
    "rollout.strategy: Replace"
)

OOM_KILLED = "OOMKilled"
"""The kubelet's reason. The kernel usually kills all processes of the container, so none is left to write a record."""

FIRST_DELAY = timedelta(seconds=10)
MAX_DELAY = timedelta(seconds=300)
"""As the kubelet waits between restarts of a container."""

_STARTING = ("", "ContainerCreating", "PodInitializing")


def explain_pod(pod: PodView, observed: Observed, placement: Placement) -> Finding:
    """Why a replica's pod does not answer."""
    signal = nodes.signal_of(pod, observed)
    if signal is not None:
        return unmet("Available", signal.reason, f"pod {pod.name} is on node {pod.node}, which {signal.said}")
    if pod.disruption == "DeletionByTaintManager" or _is_node_lost(pod):
        text = f"pod {pod.name}: its node {pod.node} no longer responds"
        return unmet("Available", Reason.NODE_LOST, text)
    if pod.disruption == "PreemptionByScheduler":
        text = f"pod {pod.name} gives its node {pod.node} to a pod of higher priority"
        return unmet("Available", Reason.EVICTED, f"{text}; {_IF_PREEMPTED}")
    if pod.is_deleting:
        return unmet("Available", Reason.DRAINING, f"pod {pod.name} is finishing its responses before it stops")
    if pod.has_failed:
        return explain_failure(pod, observed)
    if pod.container.ended is not None:
        return _explain_end(pod, pod.container.ended, observed)
    starting = explain_start(pod, observed, placement) or _explain_additions(pod)
    if starting is not None:
        return starting
    since = pod.container.running_since
    if pod.container.is_ready:
        return _explain_unready(pod)
    started, changed = instant(since), pod.readiness_changed
    if started is not None and changed is not None and changed > started:  # it was ready once
        text = f"pod {pod.name} has been running since {since} but does not answer /health"
        return unmet("Available", Reason.PROBE_FAILING, text)
    doing = "fetching the weights" if _fetches(pod) else "loading the model"
    return unmet("Available", Reason.LOADING, f"pod {pod.name} has been {doing} since {since}")


def _fetches(pod: PodView) -> bool:
    """Whether its runtime waits for our init container."""
    return pod.container.name == names.FETCH_CONTAINER


def meaning_of(end: Termination, pod: PodView, revision: Revision | None) -> tuple[Reason | None, str]:
    """What an end of the pod's container means, and the words that say so: `Engine.explain`. Our own runtime fetches,
    whatever the engine."""
    explain = revision.engine.explain if revision and not _fetches(pod) else by_exit_code
    return explain(end.exit_code, end.message)


def failures(observed: Observed, revision_name: str) -> tuple[PodView, ...]:
    """The failed pods of a revision since its last one that answers, oldest first."""
    pods = [pod for pod in observed.replicas if pod.revision == revision_name]
    answering = max((pod.age_key[0] for pod in pods if pod.is_answering), default=None)
    failed = (pod for pod in pods if pod.has_failed and (answering is None or pod.age_key[0] >= answering))
    return tuple(sorted(failed, key=lambda pod: pod.age_key))


def next_attempt(observed: Observed, revision_name: str) -> datetime | None:
    """When `decide/breaker.py` lets the next pod be created: after as long as this has been failing, so that the delay
    doubles."""
    failed = failures(observed, revision_name)
    if not failed or failed[-1].created is None:
        return None
    first, last = failed[0].created or failed[-1].created, failed[-1].created
    return last + min(max(last - first, FIRST_DELAY), MAX_DELAY)


def explain_failure(pod: PodView, observed: Observed, resources: str = "podTemplate.spec.resources") -> Finding:
    """Why its node refused, evicted or stopped a pod, and when the next one is created. `resources`: the field that
    sets its requests and limits."""
    due = next_attempt(observed, pod.revision)
    again = f"; the next pod is created at {due:%Y-%m-%dT%H:%M:%SZ}" if due else ""
    verb = "stopped" if pod.is_admitted else "refused"
    reason, message, needs = pod.reason, pod.message.strip(), frozenset[Need]()
    if pod.phase == "Succeeded" and not reason:
        needs = frozenset({Need.EVENTS})
        said, _, note = observed.warnings.get(pod.name, "").partition(": ")
        reason, message = (said, note.strip()) if said == EVICTED else ("", "")
    text = f"node {pod.node} {verb} pod {pod.name}: {reason}: {message}"
    if reason in _SHUTDOWN:
        return unmet("Available", Reason.NODE_LOST, f"{text}{again}")
    if reason == "Preempting":
        return unmet("Available", Reason.EVICTED, f"{text}; {_IF_PREEMPTED}{again}")
    if reason == EVICTED:
        why, cure = _explain_eviction(message, resources)
        return unmet("Available", why, f"{text}; {cure}{again}", needs)
    if not pod.is_admitted:
        return unmet("Available", Reason.ALLOCATION_REJECTED, f"{text}{again}")
    if pod.container.ended is not None and not reason:
        return replace(_explain_end(pod, pod.container.ended, observed), needs=needs)
    return unmet("Available", Reason.CRASH_LOOP, f"{text}{again}")


_SHUTDOWN = ("NodeShutdown", "Terminated", "Shutdown")
_IF_PREEMPTED = "set podTemplate.spec.priorityClassName, or add nodes"


def _explain_eviction(message: str, resources: str) -> tuple[Reason, str]:
    """The reason and the cure; `resources` is the field that sets the pod's."""
    if f'EmptyDir volume "{names.WEIGHTS_VOLUME}" exceeds' in message:
        return Reason.STORAGE_FULL, "raise storage.weights.emptyDir.sizeLimit"
    if re.search("ephemeral|EmptyDir|DiskPressure|inodes", message):
        if "exceed" in message:
            return Reason.STORAGE_FULL, f"raise the limit of ephemeral-storage in {resources}"
        return Reason.STORAGE_FULL, f"use nodes with larger disks, or request ephemeral-storage in {resources}"
    return Reason.EVICTED, f"request more memory in {resources}"


def _explain_end(pod: PodView, end: Termination, observed: Observed) -> Finding:
    """How a container ended: the reason of its exit code, for that reason's condition."""
    doing = ", fetching the weights," if _fetches(pod) else ""
    how = f"pod {pod.name}{doing} ended with {how_it_ended(end)} (restarts: {pod.container.num_restarts})"
    revision = observed.revisions.get(pod.revision)
    if end.reason == OOM_KILLED and end.record is None and not _fetches(pod):
        limit = f"its memory limit is {pod.memory_limit}" if pod.memory_limit else "it has no memory limit"
        needs = revision.pinned.plan.host_bytes if revision else None
        estimate = f", the estimate is {mebibytes(needs)}" if needs else ""
        cure = "raise podTemplate.spec.resources.limits.memory, or lower serving.maxSequences or maxModelLength"
        text = f"{how}: {limit}{estimate}; {cure}; its last line: {last_words(end)}"
        return unmet("Available", Reason.DEVICE_OUT_OF_MEMORY, text)
    known, said = meaning_of(end, pod, revision)
    reason = known or Reason.CRASH_LOOP
    text = f"{how}: {said[:MAX_LINE] or last_words(end)}"
    if _fetches(pod):
        text += "; raise jobs.resources.limits.memory" if end.reason == OOM_KILLED else ""
    elif reason is Reason.CRASH_LOOP:
        text += _hint_at_variables(pod, end, revision)
    return unmet(reason.row.of_pods, reason, text)


def _hint_at_variables(pod: PodView, end: Termination, revision: Revision | None) -> str:
    """Environment variables that may have ended the container."""
    containers = items(revision.pinned.template, "spec", "containers") if revision else []
    ours = {text(variable, "name") for container in containers for variable in items(container, "env")}
    of_group = {*names.GROUP_VARIABLES, revision.engine.address_variable} if revision else set()
    added = sorted(pod.variables - ours - of_group) if revision else []
    if added:
        listed = ", ".join(added[:MAX_VARIABLES_SHOWN])
        return f"; a person or an admission webhook added variables to its container: {listed}"
    return "; check the variables in engine.env: Python did not start" if _NO_PYTHON in end.message else ""


_NO_PYTHON = "Fatal Python error: init"
MAX_VARIABLES_SHOWN = 8


def _explain_additions(pod: PodView) -> Finding | None:
    """A container that others added to the pod, and that keeps it from becoming ready."""
    for container in pod.additions:
        finding = None
        if container.ended is not None:
            how = f"container {container.name} ended with {how_it_ended(container.ended)}"
            where = f"see kubectl logs {pod.name} -c {container.name}"
            said = last_words(container.ended) if container.ended.message else where
            text = f"pod {pod.name}: {how} (restarts: {container.num_restarts}): {said}"
            finding = unmet("Available", Reason.CRASH_LOOP, text)
        elif container.is_init and container.running_since and not container.is_ready:
            text = f"pod {pod.name} starts after container {container.name}, which has been running since"
            finding = unmet("Available", Reason.LOADING, f"{text} {container.running_since}")
        finding = finding or _explain_waiting(pod, container)
        if finding is not None:
            return replace(finding, message=f"{finding.message}; {_not_ours(container)}")
    return None


def _explain_unready(pod: PodView) -> Finding:
    """The runtime answers, but the pod is not ready."""
    for container in pod.additions:
        if not container.is_ready:
            text = f"pod {pod.name}: container {container.name} is not ready; {_not_ours(container)}"
            return unmet("Available", Reason.PROBE_FAILING, text)
    text = f"pod {pod.name} answers, but is not ready: {pod.unready_reason or 'its node has not reported it yet'}"
    return unmet("Available", Reason.LOADING, text)


def _not_ours(container: ContainerView) -> str:
    return (
        f"container {container.name} is not the operator's: a person or an admission webhook added it; repair or "
        "remove it there"
    )


def _is_node_lost(pod: PodView) -> bool:
    """The node controller marks the pod as not ready but leaves its containers ready. So does a readiness gate."""
    return not pod.is_ready and pod.are_containers_ready and pod.unready_reason != "ReadinessGatesNotReady"


def awaited(pod: PodView, observed: Observed) -> Exists | None:
    """The Secret or ConfigMap without which the kubelet does not start a pod's container. It looks again ever more
    rarely, a replacement of the pod at once."""
    if pod.is_deleting or pod.container.has_run:
        return None
    missing = re.search(_MISSING, pod.container.waiting_message or observed.warnings.get(pod.name, ""))
    return Exists("Secret" if missing[1] == "secret" else "ConfigMap", missing[2]) if missing else None


_MISSING = r'(secret|configmap) "([a-z0-9][-a-z0-9.]*)" not found'
"""What the kubelet says. The name is part of a request."""


def explain_start(pod: PodView, observed: Observed, placement: Placement | None = None) -> Finding | None:
    """Why a pod's container has not run; None if it has. `placement` is that of a replica's pod, None for Jobs."""
    if pod.unscheduled is not None:
        return _explain_unscheduled(pod, pod.unscheduled, observed, placement)
    if pod.is_ignored and observed.age(pod.created) >= timedelta(seconds=UNEXPLAINED_SECONDS):
        text = f"no scheduler has looked at pod {pod.name} since it was created"
        return unmet("Available", Reason.NO_MATCHING_NODE, f"{text}: see that {pod.scheduler} runs")
    if pod.container.has_run:
        return None
    waiting = _explain_waiting(pod, pod.container) or _explain_additions(pod)
    if waiting is None:
        if observed.age(pod.created) < timedelta(seconds=UNEXPLAINED_POD_SECONDS):
            return unmet("Available", Reason.LOADING, f"pod {pod.name} is starting")
        waiting = _explain_by_events(pod, observed.warnings.get(pod.name, ""))
    missing = awaited(pod, observed)
    return replace(waiting, needs=waiting.needs | {missing}) if missing else waiting


def unexplained_from(pod: PodView) -> datetime | None:
    """When the events of a pod that has not started are worth a read; None: its state says enough."""
    if pod.created is None or pod.unscheduled is not None or pod.container.has_run:
        return None
    return pod.created + timedelta(seconds=UNEXPLAINED_POD_SECONDS)


def _explain_waiting(pod: PodView, container: ContainerView) -> Finding | None:
    """Why the kubelet cannot start a container; None if it is starting or running."""
    reason, message = container.waiting_reason, container.waiting_message
    if reason in _STARTING:
        return None
    if "Image" in reason:
        message = message.rpartition("ErrImagePull: ")[2]
        text = f"pod {pod.name}: image {container.image} cannot be pulled: {message}"
        if pod.role in names.SERVING_ROLES and _NO_ACCESS.search(message):
            text = f"{text.rstrip('.')}; {_PULL_SECRETS}"
        return unmet("Available", Reason.IMAGE_PULL, text)
    if reason == "CreateContainerConfigError" and "secret" in message.lower():
        text = f"pod {pod.name}: {_absent(pod, container, message)}"
        return unmet("WeightsReady", Reason.SECRET_NOT_FOUND, text)
    if reason == "CreateContainerConfigError" and "configmap" in message.lower():
        text = f"pod {pod.name}: {_absent(pod, container, message)}"
        return unmet("Available", Reason.CONFIG_MAP_NOT_FOUND, text)
    return unmet("Available", Reason.CRASH_LOOP, f"pod {pod.name} cannot start: {reason}: {message}")


_NO_ACCESS = re.compile(r"40[13]|unauthorized|authori[sz]ation|authentication|denied|credentials", re.IGNORECASE)
_PULL_SECRETS = (
    "pull secrets come from the chart value image.pullSecrets and podTemplate.spec.imagePullSecrets: those of the "
    "namespace's default ServiceAccount do not count, because the pods have one of their own"
)


def _absent(pod: PodView, container: ContainerView, message: str) -> str:
    """What to do about a ConfigMap or Secret that an environment variable refers to."""
    if any(f'"{name}"' in message for name in pod.env_from):
        return f"{message}; the operator sets no envFrom: a person or an admission webhook added it"
    if container.name == names.RUNTIME_CONTAINER:
        is_of_job = pod.role not in names.SERVING_ROLES  # whose variables are those of credentials and of the chart
        return f"{message}; create it" + ("" if is_of_job else ", or set optional: true in engine.env")
    return message


_NAMED_BY = {
    names.API_KEY_VOLUME: "the Secret in serving.apiKeySecretRef",
    names.CA_VOLUME: "the chart value caBundle in this namespace",
    names.MODEL_VOLUME: "the volume of model.uri",
    names.DRAFT_VOLUME: "the volume of serving.speculation.model.uri",
    names.WEIGHTS_VOLUME: "the claim of storage.weights",
    names.ARTIFACTS_VOLUME: "the claim of storage.artifacts",
}
"""Volume to what names its source."""
_OWN_VOLUMES = ("config", "tmp", "weights", "artifacts", *_NAMED_BY)
_ABSENT = {
    r'secret ".*" not found|non-existent secret key': Reason.SECRET_NOT_FOUND,
    r'configmap ".*" not found|non-existent config key': Reason.CONFIG_MAP_NOT_FOUND,
}
"""What the kubelet says when the source of a volume is missing."""


def _explain_by_events(pod: PodView, warning: str) -> Finding:
    needs = {Need.EVENTS}
    if "FailedMount" in warning or "FailedAttachVolume" in warning:
        volume = re.search(r'volume "([^"]*)"', warning)
        name = volume[1] if volume else ""
        text = f"pod {pod.name} is waiting for {_NAMED_BY[name]}" if name in _NAMED_BY else f"pod {pod.name}"
        if IN_USE_ELSEWHERE in warning:
            return unmet("Available", Reason.VOLUME_NOT_BOUND, f"{text}: {warning}; {ONE_NODE_AT_A_TIME}", needs)
        added = f"; volume {name} is not the operator's" if name and name not in _OWN_VOLUMES else ""
        reasons = (reason for pattern, reason in _ABSENT.items() if re.search(pattern, warning))
        reason = next(reasons, Reason.VOLUME_NOT_BOUND)
        return unmet("Available", reason, f"{text}: {warning}{added}", needs)
    if _UNPREPARED in warning:
        text = f"node {pod.node} cannot prepare the devices of pod {pod.name}: {warning}; {_SEE_DRIVER}"
        return unmet("Available", Reason.ALLOCATION_REJECTED, text, needs)
    return unmet("Available", Reason.LOADING, f"pod {pod.name} is starting; {warning or 'no warnings so far'}", needs)


_UNPREPARED = "FailedPrepareDynamicResources"
_SEE_DRIVER = "see the pod of the Neuron DRA driver on that node"


def _explain_unscheduled(pod: PodView, message: str, observed: Observed, placement: Placement | None) -> Finding:
    if "unbound immediate PersistentVolumeClaims" in message or "persistentvolumeclaim" in message:
        text = f"pod {pod.name} cannot be scheduled: {message.rstrip('.')}"
        said = [
            f"claim {name}: {observed.said_of_claims[name]}" for name in pod.claims if name in observed.said_of_claims
        ]
        if said:
            text += f"; {'; '.join(said)}"
        elif pod.claims:
            text += f"; see kubectl describe pvc {' '.join(pod.claims)}"
        return unmet("Available", Reason.VOLUME_NOT_BOUND, text, {Need.CLAIM_EVENTS})
    lacks = f"Insufficient {names.NEURON_RESOURCE_PREFIX}" in message or _NO_CLAIM in message
    if placement is not None and lacks:
        free = describe_free(observed.free, placement, pod.node_rules)
        verdict = message.partition(". ")[0].rstrip(".")
        text = f"pod {pod.name} needs {placement.words} on one node; {free}; the scheduler reports {verdict}"
        return unmet("Available", Reason.INSUFFICIENT_NEURON, text, {Need.FREE_DEVICES})
    text = f"pod {pod.name} cannot be scheduled: {message or 'no reason given'}"
    if f"device class {names.DEVICE_DRIVER} does not exist" in message:
        text += "; install the Neuron DRA driver, or set the chart value devices.mode to Plugin"
    if pod.gates:
        text += f"; others added the gates {', '.join(pod.gates)}: who removes them admits it, such as a queue"
    if pod.host_ports and "free ports" in message:
        text += f"; the operator asks for no port of a node: others added {', '.join(pod.host_ports)}"
    if placement is None or not placement.on_devices:
        return unmet("Available", Reason.NO_MATCHING_NODE, text)
    needs = {Need.FREE_DEVICES}  # of the nodes, only their types and labels count here
    if wrong_size := describe_sizes(observed.free, placement, pod.node_rules):
        return unmet("Placed", Reason.TOPOLOGY_IMPOSSIBLE, wrong_size, needs)
    return unmet("Available", Reason.NO_MATCHING_NODE, text, needs)


_NO_CLAIM = "cannot allocate all claims"
"""What the scheduler says of nodes whose devices do not suffice for a claim, or are not connected."""


def how_it_ended(end: Termination) -> str:
    """`exit code 137 (OOMKilled)`."""
    return f"exit code {end.exit_code}" + (f" ({end.reason})" if end.reason not in ("", "Error", "Completed") else "")


def last_words(end: Termination) -> str:
    """The message of the record, or else the last line of the log that says something."""
    record = end.record
    if record is not None:
        return record.message or record.reason
    lines = [line.strip() for line in end.message.splitlines() if line.strip()]
    said = [line for line in lines if not re.match(_DUMP, line)]
    return (said or lines)[-1][:MAX_LINE] if lines else "it left no record and no log"


_DUMP = r'<no Python frame>|File ".*", line \d|(Current t|T)hread 0x|Python runtime state:|Extension modules:'
"""What Python prints after the cause of a fatal error."""
