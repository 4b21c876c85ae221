"""Typed views of the objects of a pass, read from JSON once. Called by `decide`; used by `steps`, `status` and `why`.

A view has only the fields that are used. Missing and wrongly typed parts read as absent: no JSON makes this raise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from neuron_operator.api import names
from neuron_operator.api.model_status import MAX_GROUPS, MAX_HISTORY, MAX_WORD, GroupStatus, PastRevision, Scaling
from neuron_operator.api.reasons import Exists
from neuron_operator.read import revision
from neuron_operator.read.objects import (
    dig,
    instant,
    is_orphan,
    is_owned,
    items,
    kind_of,
    labels_of,
    name_of,
    owners_of,
    text,
    whole,
)
from neuron_operator.read.placement import NodeRules
from neuron_operator.read.records import Record, parse_record
from neuron_operator.read.revision import Revision
from neuron_operator.read.world import FreeDevices, Object, World

Part = TypeVar("Part", PastRevision, GroupStatus)

EVICTED = "Evicted"
"""The kubelet's reason, in the status of a pod and of the Event about it."""
_EARLIEST = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class ConditionView:
    status: str = ""
    reason: str = ""
    message: str = ""
    since: str = ""
    """`lastTransitionTime` as written."""
    generation: int = 0
    """`observedGeneration`."""


@dataclass(frozen=True)
class ModelView:
    """The NeuronModel without its spec: its identity, and its status before this pass."""

    name: str
    namespace: str
    uid: str
    generation: int
    is_deleting: bool
    is_paused: bool
    conditions: Mapping[str, ConditionView]
    current_revision: str
    update_revision: str
    failed_revision: str
    history: tuple[PastRevision, ...]
    groups: tuple[GroupStatus, ...]
    scaling: Scaling
    retry: str
    """Value of the retry annotation."""
    retry_key: str
    """The value that was acted on."""

    @property
    def wants_retry(self) -> bool:
        return self.retry not in ("", self.retry_key)


@dataclass(frozen=True)
class Termination:
    """How a container ended."""

    exit_code: int
    reason: str
    """The kubelet's reason, such as OOMKilled."""
    message: str
    """The record, or the tail of the log if there is none."""
    finished: datetime | None = None

    @property
    def record(self) -> Record | None:
        return parse_record(self.message)


@dataclass(frozen=True)
class ContainerView:
    """A container of a pod; all fields but the name are empty until the kubelet reports."""

    name: str
    image: str
    is_init: bool
    num_restarts: int
    is_ready: bool
    has_run: bool
    """It runs, or has ended and has not been restarted yet."""
    running_since: str
    waiting_reason: str
    waiting_message: str
    ended: Termination | None
    """How it last ended; None if it is ready again."""


@dataclass(frozen=True)
class PodView:
    """A serving pod or the pod of a Job."""

    name: str
    created: datetime | None
    role: str
    revision: str
    group: str
    """The name of its group; empty: the replica is this pod."""
    node: str
    phase: str
    reason: str
    message: str
    is_deleting: bool
    should_be_gone: datetime | None
    """The end of its grace period; None: nobody deletes it."""
    is_ready: bool
    are_containers_ready: bool
    readiness_changed: datetime | None
    unready_reason: str
    """Reason of the condition Ready."""
    node_rules: NodeRules
    unscheduled: str | None
    """The scheduler's message if it found no node, else None."""
    scheduler: str
    gates: tuple[str, ...]
    """Scheduling gates, which others added: no scheduler looks at it before they are gone."""
    scheduled: datetime | None
    """When it got its node."""
    disruption: str
    """Reason of the condition DisruptionTarget."""
    container: ContainerView
    """The runtime container; until it may start, the one that fetches the weights for it, if there is one."""
    memory_limit: str
    """The memory limit of the runtime container, as a quantity."""
    variables: frozenset[str]
    """Names of the runtime container's environment variables."""
    env_from: tuple[str, ...]
    """Names of the ConfigMaps and Secrets in its `envFrom`, which the operator never sets."""
    additions: tuple[ContainerView, ...]
    """Containers and init containers that the operator did not put there."""
    claims: tuple[str, ...]
    """Names of the PersistentVolumeClaims of its volumes."""
    host_ports: tuple[str, ...]
    """`port 80 of container x`; the operator uses none."""
    is_admitted: bool
    """The kubelet has accepted it."""
    requests: Mapping[str, int]
    """Neuron devices or cores that it holds, by resource; empty on a CPU, or if it has a claim instead."""
    claims_devices: bool
    """Its devices come from a claim (DRA)."""
    has_unhealthy_device: bool
    """The kubelet reports one among those that it was granted (Kubernetes' feature ResourceHealthStatus)."""
    live: Object

    @property
    def address(self) -> str:
        """The URL of its server; empty: it has none yet."""
        ip = text(self.live, "status", "podIP")
        return f"http://{f'[{ip}]' if ':' in ip else ip}:{names.PORT}" if ip else ""

    @property
    def is_answering(self) -> bool:
        return self.is_ready and not self.is_deleting

    @property
    def load_seconds(self) -> float | None:
        """From the start of its container until it was ready; None: it is not, or nobody tells."""
        began = instant(self.container.running_since)
        if not self.is_ready or began is None or self.readiness_changed is None:
            return None
        return max(0.0, (self.readiness_changed - began).total_seconds())

    @property
    def is_ignored(self) -> bool:
        """No scheduler has said anything about it."""
        is_seen = self.node or self.unscheduled is not None or self.scheduled is not None or self.is_admitted
        return not is_seen and self.phase in ("", "Pending")

    @property
    def kept_by(self) -> ContainerView | None:
        """A container of others that runs on although the runtime has ended, so that the pod does not end."""
        still = (container for container in self.additions if container.running_since and not container.is_init)
        has_ended = self.container.has_run and not self.container.running_since
        return next(still, None) if has_ended and not self.is_deleting else None

    @property
    def is_running(self) -> bool:
        """The runtime container runs."""
        return bool(self.container.running_since) and not self.is_deleting

    @property
    def is_live(self) -> bool:
        """Counts as a replica: neither ended nor being deleted."""
        return not self.is_deleting and self.phase not in ("Failed", "Succeeded")

    @property
    def has_failed(self) -> bool:
        """Refused, evicted or stopped by its node: a serving pod whose container ends is restarted in place. The
        kubelet says Succeeded if the container of a pod that it evicted ended well."""
        ended = ("Failed", "Succeeded") if self.role in names.SERVING_ROLES else ("Failed",)
        return self.phase in ended and not self.is_deleting

    @property
    def age_key(self) -> tuple[datetime, str]:
        """Sorts from the oldest to the newest."""
        return self.created or _EARLIEST, self.name


@dataclass(frozen=True)
class JobView:
    """It is read when it is asked: a pass looks at few of the Jobs of a namespace."""

    live: Object

    @property
    def name(self) -> str:
        return name_of(self.live)

    @property
    def role(self) -> str:
        return text(labels_of(self.live), names.ROLE_LABEL)

    @property
    def created(self) -> datetime | None:
        return _created(self.live)

    @cached_property
    def is_complete(self) -> bool:
        return _conditions(self.live).get("Complete", _ABSENT).status == "True"

    @cached_property
    def failure(self) -> str | None:
        """Message of the condition Failed; None: it has not failed."""
        failed = _conditions(self.live).get("Failed", _ABSENT)
        return failed.message if failed.status == "True" else None

    @property
    def is_finished(self) -> bool:
        return self.is_complete or self.failure is not None

    @property
    def is_suspended(self) -> bool:
        """Others decide when it may start."""
        return dig(self.live, "spec", "suspend") is True

    @property
    def expires(self) -> bool:
        """It will be deleted some time after its end."""
        return dig(self.live, "spec", "ttlSecondsAfterFinished") is not None

    @property
    def tried(self) -> str:
        """When the operator last had its pod tried again; empty: never."""
        return text(self.live, "metadata", "annotations", names.TRIED_ANNOTATION)


@dataclass(frozen=True)
class KeeperView:
    """The copied record of a Job. It is parsed when it is read: a pass reads few of those in a namespace."""

    live: Object

    @property
    def created(self) -> datetime | None:
        return _created(self.live)

    @cached_property
    def record(self) -> Record | None:
        """None: it was damaged."""
        return parse_record(text(self.live, "data", names.RECORD_KEY))


@dataclass(frozen=True)
class DeploymentView:
    revision: str
    """The revision of its pod template."""
    replicas: int
    surges: bool
    """A rollout starts a new pod before an old one ends."""
    replica_failure: str | None
    """Message of the condition ReplicaFailure; None: its pods can be created."""
    refused_since: datetime | None
    """Since when they cannot be."""
    tried: str
    """When the operator last had them tried again; empty: never."""


LAST_PARTS = {"StatefulSet": "Service", names.LEADER_WORKER_SET: "NetworkPolicy"}
"""What owns a group, and what of it is written last, with the same name. A LeaderWorkerSet makes its Service itself."""


@dataclass(frozen=True)
class GroupView:
    """One attempt at a replica on several nodes."""

    name: str
    revision: str
    replica: int
    attempt: int
    size: int
    created: datetime | None
    is_whole: bool
    """All its objects were created."""
    members: tuple[PodView, ...]
    """Its pods, the leader first."""
    live: Object
    """The object that owns it."""

    @property
    def is_answering(self) -> bool:
        return any(pod.is_answering and pod.role == names.ROLE_LEADER for pod in self.members)

    @property
    def is_placed(self) -> bool:
        """Every member has a node."""
        return sum(bool(pod.node) for pod in self.members) >= self.size


@dataclass(frozen=True)
class NodeView:
    """What a node says about itself, as far as it concerns the replicas on it."""

    name: str
    conditions: Mapping[str, ConditionView]
    capacity: Mapping[str, int]
    """Neuron devices and cores that the device plugin has registered."""
    allocatable: Mapping[str, int]
    """Those of them that are healthy; none while the plugin is away."""


@dataclass(frozen=True)
class Observed:
    """The objects of one pass as views. Children of other owners are left out."""

    model: ModelView
    children: tuple[Object, ...]
    deployment: DeploymentView | None
    jobs: Mapping[str, JobView]
    """The shared Jobs, by name."""
    keepers: Mapping[str, KeeperView]
    """Their copied records, by the same names."""
    shared: Mapping[str, Sequence[Object]]
    """All objects that the models of the namespace share, by kind."""
    revisions: Mapping[str, Revision]
    """The kept ones, and the running one if it is no longer kept; by name."""
    replicas: tuple[PodView, ...]
    """The pods that answer, one of each replica, whatever their revision."""
    followers: tuple[PodView, ...]
    """The other pods of replicas on several nodes."""
    groups: tuple[GroupView, ...]
    """Those that nobody deletes."""
    job_pods: Mapping[str, tuple[Object, ...]]
    """The pods of a Job, by its name."""
    warnings: Mapping[str, str]
    """The last warning about an object, by the object's name; empty if events were not read."""
    said_of_claims: Mapping[str, str]
    """The last event about a PersistentVolumeClaim, by its name; empty if they were not read."""
    free: FreeDevices | None
    nodes: Mapping[str, NodeView]
    """The nodes of the replicas, by name; empty if they may not be watched."""
    logs: Mapping[str, str]
    """The end of the log of a Job's pod, by the pod's name."""
    existing: frozenset[Exists]
    """What pods were waiting for that exists by now."""
    now: datetime

    @property
    def live(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.replicas if pod.is_live)

    @property
    def tried(self) -> frozenset[str]:
        """The revisions that have replicas: of the Deployment and of every pod, failed ones too."""
        deployed = (self.deployment.revision,) if self.deployment else ()
        of_groups = (group.revision for group in self.groups)
        return frozenset((*deployed, *of_groups, *(pod.revision for pod in self.replicas)))

    @property
    def rolled(self) -> str:
        """The name of the revision that the replicas get: of the Deployment, or the latest one with groups."""
        if not self.groups:
            return self.deployment.revision if self.deployment else ""
        numbers = {name: known.number for name, known in self.revisions.items()}
        return max(self.groups, key=lambda group: numbers.get(group.revision, 0)).revision

    def num_updated(self, revision_name: str) -> int:
        return sum(pod.revision == revision_name for pod in self.live)

    def serving(self, besides: Revision | None = None) -> Revision | None:
        """The revision of the replicas. If they were deleted: the last one that served, except `besides`, whose steps
        are not done. One that was only pinned serves nothing."""
        known, before = self.revisions, self.model.current_revision
        return known.get(self.rolled) or (None if besides and besides.name == before else known.get(before))

    def has_served(self, revision_name: str) -> bool:
        """Whether all its replicas could serve once, or one can now. Of a lost status only the pods tell."""
        past = (one.revision for one in self.model.history if one.state in ("Serving", "Replaced"))
        now = (pod.revision for pod in self.live if pod.is_answering)
        return revision_name in {self.model.current_revision, *past, *now}

    def pods_of(self, job_name: str) -> tuple[PodView, ...]:
        """The pods of a Job, newest first."""
        return tuple(sorted(map(_pod, self.job_pods.get(job_name, ())), key=lambda pod: pod.age_key, reverse=True))

    def answers_of(self, job_name: str) -> tuple[Record, ...]:
        """The records of a Job's pods that succeeded."""
        records = (pod.container.ended.record for pod in self.pods_of(job_name) if pod.container.ended)
        return tuple(record for record in records if record is not None and record.ok)

    def age(self, created: datetime | None) -> timedelta:
        """Zero if the time of creation is unknown."""
        return self.now - created if created else timedelta(0)


def observe(world: World) -> Observed:
    model = _model(world.body)
    children = tuple(child for child in world.children if is_owned(child, model.uid) or is_orphan(child))
    written = {(kind_of(child), name_of(child)) for child in world.children}
    shared = defaultdict[str, list[Object]](list)
    for obj in world.shared:
        shared[kind_of(obj)].append(obj)
    # By UID: pods of a deleted Job may outlive the creation of the next with its name.
    names_of_jobs = {text(job, "metadata", "uid"): name_of(job) for job in shared["Job"]}
    job_pods: dict[str, tuple[Object, ...]] = {}
    for pod in world.pods:
        job = names_of_jobs.get(_job_of(pod) or "", "")
        job_pods[job] = (*job_pods.get(job, ()), pod)
    pods = [_pod(pod) for pod in world.pods if _job_of(pod) is None]
    return Observed(
        model=model,
        children=children,
        deployment=next((_deployment(child) for child in children if kind_of(child) == "Deployment"), None),
        jobs={name_of(job): JobView(job) for job in shared["Job"]},
        keepers={name_of(record): KeeperView(record) for record in shared["ConfigMap"]},
        shared=shared,
        revisions=_revisions(children),
        replicas=tuple(pod for pod in pods if pod.role == names.ROLE_LEADER),
        followers=tuple(pod for pod in pods if pod.role == names.ROLE_FOLLOWER),
        groups=tuple(
            _group(child, pods, written)
            for child in children
            if kind_of(child) in LAST_PARTS and not _is_deleting(child)
        ),
        job_pods=job_pods,
        warnings=_said(sorted(world.events, key=lambda event: text(event, "reason") == EVICTED)),
        said_of_claims=_said(world.claim_events),
        free=world.free,
        nodes={name_of(obj): node_view(obj) for obj in world.nodes},
        logs=world.logs,
        existing=world.existing,
        now=world.now,
    )


def _said(events: Iterable[Object]) -> Mapping[str, str]:
    """The last of the events about each object, by the object's name."""
    return {text(event, "regarding", "name"): f"{text(event, 'reason')}: {text(event, 'note')}" for event in events}


def _revisions(children: Sequence[Object]) -> Mapping[str, Revision]:
    config_maps = [child for child in children if kind_of(child) == "ConfigMap"]
    kept = (revision.from_object(child) for child in children if kind_of(child) == "ControllerRevision")
    running = (revision.from_running(child, config_maps) for child in children if kind_of(child) == "Deployment")
    by_name: dict[str, Revision] = {}
    for known in (*kept, *running):
        if known is not None:
            by_name.setdefault(known.name, known)
    return by_name


def _model(body: Object) -> ModelView:
    return ModelView(
        name=name_of(body),
        namespace=text(body, "metadata", "namespace"),
        uid=text(body, "metadata", "uid"),
        generation=whole(dig(body, "metadata", "generation")),
        is_deleting=_is_deleting(body),
        is_paused=text(body, "metadata", "annotations", names.PAUSED_ANNOTATION) == "true",
        conditions=_conditions(body),
        current_revision=text(body, "status", "currentRevision"),
        update_revision=text(body, "status", "updateRevision"),
        failed_revision=text(body, "status", "failedRevision"),
        history=_read(body, "history", PastRevision)[:MAX_HISTORY],
        groups=_read(body, "groups", GroupStatus)[:MAX_GROUPS],
        scaling=scaling_of(body),
        retry=text(body, "metadata", "annotations", names.RETRY_ANNOTATION)[:MAX_WORD],
        retry_key=text(body, "status", "retryKey"),
    )


def _read(body: Object, part: str, kind: type[Part]) -> tuple[Part, ...]:
    """A list of the status; empty if it is not one."""
    try:
        return tuple(msgspec.convert(one, kind) for one in items(body, "status", part))
    except msgspec.ValidationError:
        return ()


def scaling_of(body: Object) -> Scaling:
    """What the status of a model says about it; nothing if that cannot be read."""
    try:
        return msgspec.convert(dig(body, "status", "scaling") or {}, Scaling)
    except msgspec.ValidationError:
        return Scaling()


def _pod(pod: Object) -> PodView:
    conditions = _conditions(pod)
    scheduled, ready = conditions.get("PodScheduled", _ABSENT), conditions.get("Ready", _ABSENT)
    containers = [*items(pod, "spec", "containers"), *items(pod, "spec", "initContainers")]
    ours, fetcher = (
        next((one for one in containers if one.get("name") == name), {})
        for name in (names.RUNTIME_CONTAINER, names.FETCH_CONTAINER)
    )
    return PodView(
        name=name_of(pod),
        created=_created(pod),
        role=text(labels_of(pod), names.ROLE_LABEL),
        revision=text(labels_of(pod), names.REVISION_LABEL),
        group=text(labels_of(pod), names.GROUP_LABEL),
        node=text(pod, "spec", "nodeName"),
        phase=text(pod, "status", "phase"),
        reason=text(pod, "status", "reason"),
        message=text(pod, "status", "message"),
        is_deleting=_is_deleting(pod),
        should_be_gone=instant(dig(pod, "metadata", "deletionTimestamp")),
        is_ready=ready.status == "True",
        are_containers_ready=conditions.get("ContainersReady", _ABSENT).status == "True",
        readiness_changed=instant(ready.since),
        unready_reason=ready.reason,
        node_rules=NodeRules.of(dig(pod, "spec")),
        unscheduled=scheduled.message if scheduled.status == "False" else None,
        scheduler=text(pod, "spec", "schedulerName") or "default-scheduler",
        gates=tuple(text(gate, "name") for gate in items(pod, "spec", "schedulingGates")),
        scheduled=instant(scheduled.since) if scheduled.status == "True" else None,
        disruption=conditions.get("DisruptionTarget", _ABSENT).reason,
        container=_in_turn(_container(names.FETCH_CONTAINER, pod), _container(names.RUNTIME_CONTAINER, pod)),
        memory_limit=text(ours, "resources", "limits", "memory"),
        variables=frozenset(text(variable, "name") for variable in items(ours, "env")),
        env_from=tuple(
            text(source, kind, "name") for source in items(ours, "envFrom") for kind in ("configMapRef", "secretRef")
        ),
        additions=tuple(_container(text(c, "name"), pod) for c in containers if c is not ours and c is not fetcher),
        claims=tuple(
            text(volume, "persistentVolumeClaim", "claimName")
            for volume in items(pod, "spec", "volumes")
            if dig(volume, "persistentVolumeClaim")
        ),
        host_ports=tuple(
            f"port {whole(port['hostPort'])} of container {text(container, 'name')}"
            for container in containers
            for port in items(container, "ports")
            if port.get("hostPort")
        ),
        is_admitted=bool(items(pod, "status", "containerStatuses")),
        requests=_neuron(dig(ours, "resources", "limits")),
        claims_devices=any(one.get("name") == names.CLAIM for one in items(ours, "resources", "claims")),
        has_unhealthy_device=any(
            device.get("health") == "Unhealthy"
            for container in items(pod, "status", "containerStatuses")
            for granted in items(container, "allocatedResourcesStatus")
            if text(granted, "name").startswith(names.NEURON_RESOURCE_PREFIX)
            for device in items(granted, "resources")
        ),
        live=pod,
    )


def node_view(node: Object) -> NodeView:
    return NodeView(
        name=name_of(node),
        conditions=_conditions(node),
        capacity=_neuron(dig(node, "status", "capacity")),
        allocatable=_neuron(dig(node, "status", "allocatable")),
    )


def _neuron(quantities: Any) -> Mapping[str, int]:
    amounts = ((name, dig(quantities, name)) for name in (names.DEVICE_RESOURCE, names.CORE_RESOURCE))
    return {name: whole(quantity) for name, quantity in amounts if quantity is not None}


def _in_turn(fetcher: ContainerView, runtime: ContainerView) -> ContainerView:
    """A pod that was stopped with its node begins again: what fetches runs once more, and the runtime, which has run
    before, waits for it."""
    is_over = fetcher.has_run and not fetcher.running_since
    has_fetched = fetcher.is_ready or (is_over and fetcher.ended is not None and fetcher.ended.exit_code == 0)
    waits = not runtime.has_run and not runtime.is_ready and runtime.waiting_reason in ("", "PodInitializing")
    if not fetcher.is_init or has_fetched or not waits:
        return runtime
    return replace(fetcher, ended=None) if fetcher.ended is not None and fetcher.ended.exit_code == 0 else fetcher


def _container(name: str, pod: Object) -> ContainerView:
    statuses = [*items(pod, "status", "containerStatuses"), *items(pod, "status", "initContainerStatuses")]
    status = next((status for status in statuses if status.get("name") == name), {})
    state = dig(status, "state")
    ended = dig(state, "terminated") or dig(status, "lastState", "terminated")
    termination = None
    # Nothing probes a follower: it is ready as soon as it runs again.
    is_probed = text(labels_of(pod), names.ROLE_LABEL) != names.ROLE_FOLLOWER
    if isinstance(ended, Mapping) and not (is_probed and status.get("ready")):
        code, finished = whole(ended.get("exitCode")), instant(ended.get("finishedAt"))
        termination = Termination(code, text(ended, "reason"), text(ended, "message"), finished)
    return ContainerView(
        name=name,
        image=text(status, "image"),
        is_init=any(init.get("name") == name for init in items(pod, "spec", "initContainers")),
        num_restarts=whole(status.get("restartCount")),
        is_ready=status.get("ready") is True,
        has_run=bool(dig(state, "running") or dig(state, "terminated")),
        running_since=text(state, "running", "startedAt"),
        waiting_reason=text(state, "waiting", "reason"),
        waiting_message=text(state, "waiting", "message"),
        ended=termination,
    )


def _job_of(pod: Object) -> str | None:
    """UID of the Job that owns the pod; None: none does."""
    return next((text(owner, "uid") for owner in owners_of(pod) if owner.get("kind") == "Job"), None)


def _group(leader: Object, pods: Sequence[PodView], written: Collection[tuple[str, str]]) -> GroupView:
    name, labels = name_of(leader), labels_of(leader)
    members = (pod for pod in pods if pod.group == name)
    return GroupView(
        name=name,
        revision=text(labels, names.REVISION_LABEL),
        replica=whole(labels.get(names.REPLICA_LABEL)),
        attempt=whole(labels.get(names.ATTEMPT_LABEL)),
        size=whole(labels.get(names.GROUP_SIZE_LABEL)),
        created=_created(leader),
        is_whole=(LAST_PARTS[leader["kind"]], name) in written,
        members=tuple(sorted(members, key=lambda pod: (pod.role != names.ROLE_LEADER, pod.name))),
        live=leader,
    )


def _deployment(deployment: Object) -> DeploymentView:
    failure = _conditions(deployment).get("ReplicaFailure", _ABSENT)
    return DeploymentView(
        revision=text(labels_of(dig(deployment, "spec", "template")), names.REVISION_LABEL),
        replicas=whole(dig(deployment, "spec", "replicas")),
        surges=whole(dig(deployment, "spec", "strategy", "rollingUpdate", "maxSurge")) > 0,
        replica_failure=failure.message if failure.status == "True" else None,
        refused_since=instant(failure.since) if failure.status == "True" else None,
        tried=text(deployment, "metadata", "annotations", names.TRIED_ANNOTATION),
    )


_ABSENT = ConditionView()


def _conditions(value: Object) -> Mapping[str, ConditionView]:
    return {
        text(condition, "type"): ConditionView(
            status=text(condition, "status"),
            reason=text(condition, "reason"),
            message=text(condition, "message"),
            since=text(condition, "lastTransitionTime"),
            generation=whole(condition.get("observedGeneration")),
        )
        for condition in items(value, "status", "conditions")
    }


def _is_deleting(value: Any) -> bool:
    return bool(dig(value, "metadata", "deletionTimestamp"))


def _created(value: Any) -> datetime | None:
    return instant(dig(value, "metadata", "creationTimestamp"))
