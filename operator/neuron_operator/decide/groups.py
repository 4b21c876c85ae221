"""Replicas on several nodes: which groups exist, end and start, so that each starts, serves and fails as one.

Called by `decide`. Pure. A group is never repaired: if a member ends, the whole group ends and another attempt is made.
The end is first recorded in `status.groups`, and the objects are deleted in a later pass, so that a crash of the
operator forgets neither how often a group failed nor when. Rendering is in `render/groups.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from neuron_operator.api import names
from neuron_operator.api.model_status import MAX_GROUPS, MAX_WORD, GroupStatus
from neuron_operator.api.reasons import Finding, Need, Reason, unmet
from neuron_operator.place.sizes import describe_free
from neuron_operator.read.disruption import MAX_UNAVAILABLE
from neuron_operator.read.objects import dig, instant, printable, text
from neuron_operator.read.placement import NodeRules
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import GroupView, Observed, PodView
from neuron_operator.read.world import FreeDevices, GroupSettings, NodeDevices, Object
from neuron_operator.render.groups import Attempt
from neuron_operator.why import nodes
from neuron_operator.why.pods import UNEXPLAINED_POD_SECONDS, explain_pod
from neuron_operator.why.refusals import explain_denial

RECOVERED = timedelta(minutes=10)
"""A group that served for so long and then fails has failed for the first time."""
MAX_DELAY = timedelta(minutes=10)
PODS_PATIENCE = timedelta(seconds=UNEXPLAINED_POD_SECONDS)
"""How long the members of a new group may lack pods without an explanation."""
RECHECK = timedelta(seconds=15)
"""When room is looked for again."""
RECOUNT = timedelta(seconds=5)
"""Free devices are counted so often at most. A count may be older than the last group's pods on their nodes."""

ENDS = ("Failed", "Left", "Released")
"""States of a group that is to be deleted, or was."""

State = Literal["Starting", "Serving", "Failed", "Left", "Released"]


@dataclass(frozen=True)
class GroupPlan:
    start: tuple[Attempt, ...] = ()
    end: tuple[Object, ...] = ()
    """The objects that own everything else of their groups."""
    alive: tuple[GroupView, ...] = ()
    """Groups that stay."""
    records: tuple[GroupStatus, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Why replicas are missing that have no pods."""
    num_earlier: int = 0
    """Pods that the Deployment of an earlier revision on one node keeps."""
    surges: bool = False
    needs: frozenset[Need] = frozenset()
    due: datetime | None = None
    is_room_known: bool = False


@dataclass
class _Draft:
    """What a pass collects."""

    start: list[Attempt] = field(default_factory=list)
    end: list[GroupView] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)
    needs: set[Need] = field(default_factory=set)


def plan(
    observed: Observed, revision: Revision, num_wanted: int, surges: bool | None, settings: GroupSettings
) -> GroupPlan:
    """The next step towards `num_wanted` groups of the revision.

    Args:
        surges: whether a new group starts before an old one ends; None: if there is room for it.
    """
    draft = _Draft()
    kept = {(one.revision or "", one.replica or 0): one for one in observed.model.groups}
    newest = {(g.revision, g.replica): g.attempt for g in sorted(observed.groups, key=lambda g: g.attempt)}
    records: dict[tuple[str, int], GroupStatus] = {}
    alive: list[GroupView] = []
    for group in sorted(observed.groups, key=lambda g: (g.replica, g.attempt)):
        key = (group.revision, group.replica)
        known = kept.get(key)
        is_recorded = known is not None and (known.attempt or 0) >= group.attempt and known.state in ENDS
        if is_recorded or group.attempt < newest[key]:
            draft.end.append(group)
            if known is not None:
                records.setdefault(key, known)
            continue
        record = _record(group, known, observed, settings)
        records[key] = record
        alive.append(group)
        if record.state == "Starting" and group.created:
            draft.times += [group.created + _patience(group, settings), group.created + PODS_PATIENCE]
        if (refusal := _refused(group, observed)) is not None:
            draft.findings.append(refusal)
    earlier = [pod for pod in observed.live if not pod.group]
    alive, num_earlier, does_surge = _roll(
        draft,
        observed,
        revision,
        num_wanted,
        surges=surges,
        settings=settings,
        kept=kept,
        records=records,
        alive=alive,
        earlier=earlier,
    )
    for key, known in kept.items():
        if key not in records and key[0] == revision.name and key[1] < num_wanted:
            records[key] = known
    shown = sorted(records.values(), key=lambda one: (one.revision != revision.name, one.replica or 0))
    return GroupPlan(
        start=tuple(draft.start),
        end=tuple(group.live for group in draft.end),
        alive=tuple(alive),
        records=tuple(shown[:MAX_GROUPS]),
        findings=tuple(draft.findings),
        num_earlier=num_earlier,
        surges=does_surge,
        needs=frozenset(draft.needs),
        due=min((time for time in draft.times if time > observed.now), default=None),
        is_room_known=observed.free is not None and observed.free.nodes is not None,
    )


def _roll(
    draft: _Draft,
    observed: Observed,
    revision: Revision,
    num_wanted: int,
    *,
    surges: bool | None,
    settings: GroupSettings,
    kept: Mapping[tuple[str, int], GroupStatus],
    records: Mapping[tuple[str, int], GroupStatus],
    alive: list[GroupView],
    earlier: Sequence[PodView],
) -> tuple[list[GroupView], int, bool]:
    """Ends what is too much and starts what is missing, one at a time. Returns the groups that stay, how many pods of
    an earlier revision on one node stay, and whether the revision surges."""
    old = [g for g in alive if g.revision != revision.name or g.replica >= num_wanted]
    replaces = any(g.revision != revision.name for g in old) or bool(earlier)
    missing = [n for n in range(num_wanted) if (revision.name, n) not in {(g.revision, g.replica) for g in alive}]
    begun = len(alive) + len(earlier) > num_wanted and not missing
    room = _Room.of(observed, revision, settings)
    if missing or (replaces and surges is None):
        draft.needs |= room.needs
    does_surge = begun if surges is None else surges
    if surges is None and not begun and replaces and revision.placement.resources:
        does_surge = room.find() is not None and room.is_known
    answering = sum(g.is_answering for g in alive) + sum(pod.is_answering for pod in earlier)
    spare = answering - (num_wanted - (0 if does_surge else MAX_UNAVAILABLE))
    for group in sorted(old, key=lambda g: (g.is_answering, -g.replica)):
        # A scaled-down model keeps what it promises, a stopped one nothing.
        if group.is_answering and num_wanted and spare <= 0:
            continue
        spare -= group.is_answering
        draft.end.append(group)
        alive = [one for one in alive if one is not group]
    num_earlier = len(earlier)
    for pod in sorted(earlier, key=lambda one: one.is_answering):
        if pod.is_answering and num_wanted and spare <= 0:
            continue
        spare -= pod.is_answering
        num_earlier -= 1
    limit = num_wanted + (1 if does_surge and replaces else 0)
    is_placing = any(not g.is_placed for g in alive)
    for replica in missing:
        known = records.get((revision.name, replica)) or kept.get((revision.name, replica))
        due = _due(known, observed.now, settings)
        if known is not None and due is None:
            draft.findings.append(_exhausted(known, settings))
        elif due is not None and due > observed.now and known is not None:
            draft.times.append(due)
            draft.findings.append(_delayed(known, due))
        elif len(alive) + num_earlier + len(draft.start) >= limit:
            break
        elif is_placing or draft.start:
            draft.findings.append(_ONE_AT_A_TIME)
            break
        elif not room.has_counted(alive):
            draft.findings.append(_ONE_AT_A_TIME)
            draft.times.append(observed.now + RECOUNT)
            break
        elif (domain := room.find()) is None:
            draft.findings.append(room.explain())
            draft.times.append(observed.now + RECHECK)
            break
        else:
            number = 1 + max((known.attempt or 0) if known else 0, _highest(observed, revision.name, replica))
            draft.start.append(Attempt(replica, number, domain))
    return alive, num_earlier, does_surge


_ONE_AT_A_TIME = unmet("Available", Reason.LOADING, "one group is placed at a time")


def _highest(observed: Observed, revision: str, replica: int) -> int:
    same = (g.attempt for g in observed.groups if (g.revision, g.replica) == (revision, replica))
    return max(same, default=0)


def _record(group: GroupView, known: GroupStatus | None, observed: Observed, settings: GroupSettings) -> GroupStatus:
    """What the status says of a group that exists. `known`: what it said before, of this or an earlier attempt."""
    is_same = known is not None and known.attempt == group.attempt
    before = known.state if known is not None and is_same else ""
    restarts = (known.restarts or 0) if known is not None else 0
    state: State = "Serving" if group.is_answering or before == "Serving" else "Starting"
    reason, message = (known.reason, known.message) if known is not None else (None, None)
    end = _end(group, observed, settings)
    if end is not None:
        state, reason, message = end.state, str(end.reason), printable(end.message)[:MAX_WORD]
    if state == "Failed":
        since = instant(known.since) if known is not None and before == "Serving" else None
        restarts = 1 if since is not None and observed.now - since >= RECOVERED else restarts + 1
    return GroupStatus(
        name=group.name,
        revision=group.revision,
        replica=group.replica,
        attempt=group.attempt,
        state=state,
        since=known.since if known is not None and is_same and before == state else _written(observed.now),
        restarts=restarts,
        members=group.size,
        ready_members=sum(pod.is_running for pod in group.members),
        reason=reason,
        message=message,
    )


@dataclass(frozen=True)
class End:
    """Why a group has to end."""

    state: State
    reason: Reason
    message: str


def _end(group: GroupView, observed: Observed, settings: GroupSettings) -> End | None:
    """What has happened to one member happens to all. The member that failed itself is named, not those that then
    ended because of it."""
    revision = next((known for known in observed.revisions if known.name == group.revision), None)
    broken = [pod for pod in group.members if pod.has_failed or pod.container.num_restarts or _has_ended(pod)]
    leaving = [pod for pod in group.members if pod.is_deleting]
    for pod in leaving:
        signal = nodes.signal_of(pod, observed)
        if signal is not None:
            return End("Left", signal.reason, f"member {pod.name} left node {pod.node}, which {signal.said}")
    if broken and revision is not None:
        first = min(broken, key=_blame)
        found_end = explain_pod(first, observed, revision.placement)
        reason = Reason.named(found_end.reason) or Reason.GROUP_INCOMPLETE
        others = f"; {len(broken)} of {group.size} members ended" if len(broken) > 1 else ""
        return End("Failed", reason, f"on node {first.node}, {found_end.message}{others}")
    if leaving:
        pod = leaving[0]
        return End("Left", Reason.DRAINING, f"member {pod.name} on node {pod.node} was evicted or deleted")
    if group.is_placed or group.created is None or observed.now < group.created + _patience(group, settings):
        return None
    waiting = [pod for pod in group.members if not pod.node]
    found_num = sum(bool(pod.node) for pod in group.members)
    text = f"{found_num} of {group.size} members found a node"
    if not waiting:  # some members have no pod: another attempt helps if the API server refused it
        refused = _refused(group, observed)
        why = Reason.named(refused.reason) if refused else None
        if refused is None or why is None or why is Reason.LOADING:
            return None
        return End("Released", why, f"{text}; {refused.message}")
    text += f"; {waiting[0].name}: {waiting[0].unscheduled or ''}"
    return End("Released", Reason.INSUFFICIENT_NEURON if waiting[0].requests else Reason.NO_MATCHING_NODE, text)


def _refused(group: GroupView, observed: Observed) -> Finding | None:
    """Why members have no pods: only events tell, because a StatefulSet has no condition for it."""
    missing = group.size - len(group.members)
    if not group.is_whole or missing <= 0 or observed.age(group.created) < PODS_PATIENCE:
        return None
    said = (observed.warnings.get(name, "") for name in (group.name, f"{group.name}{names.FOLLOWERS_SUFFIX}"))
    warning = next((one for one in said if one.startswith(FAILED_CREATE)), "")
    reason, cure = explain_denial(warning) if warning else (Reason.LOADING, "")
    text = f"{missing} of {group.size} members of group {group.name} have no pod: {warning or 'no warnings so far'}"
    return unmet("Available", reason, f"{text}; {cure}" if cure else text, {Need.EVENTS})


FAILED_CREATE = "FailedCreate: "
"""How the StatefulSet controller's warning begins."""


def _has_ended(pod: PodView) -> bool:
    return pod.container.ended is not None


_FOLLOWED = (40, 0)
"""Exit codes of members that ended because another did."""


def _blame(pod: PodView) -> tuple[bool, datetime]:
    """Sorts what caused the end before what followed."""
    end = pod.container.ended
    is_cause = end is not None and end.exit_code not in _FOLLOWED
    finished = end.finished if end is not None and end.finished is not None else datetime.max.replace(tzinfo=UTC)
    return not (is_cause or pod.has_failed), finished


def _patience(group: GroupView, settings: GroupSettings) -> timedelta:
    """How long a group may wait for nodes: never as long as another, so that two that block each other do not give up
    at the same time, again and again."""
    share = int(names.digest(group.name), 16) % 1000 / 1000
    return timedelta(seconds=settings.place_seconds * (1 + share / 2))


def _due(known: GroupStatus | None, now: datetime, settings: GroupSettings) -> datetime | None:
    """When the next attempt may start; None: never, unless something changes."""
    if known is None or known.state not in ENDS:
        return now
    since, failures = instant(known.since) or now, known.restarts or 0
    if known.state == "Left":
        return now
    if known.state == "Released":
        return since + timedelta(seconds=settings.place_seconds / 4)
    if failures > settings.max_restarts:
        return None
    delay = timedelta(seconds=settings.restart_seconds * 2 ** min(failures - 1, 10))
    return since + min(delay, max(MAX_DELAY, timedelta(seconds=settings.restart_seconds)))


def _delayed(known: GroupStatus, due: datetime) -> Finding:
    text = f"group {known.name} ended: {known.message}; the next attempt starts at {due:%Y-%m-%dT%H:%M:%SZ}"
    return unmet("Available", _reason_of(known), text)


def _exhausted(known: GroupStatus, settings: GroupSettings) -> Finding:
    text = (
        f"group {known.name} failed {known.restarts} times in a row and is not started again (chart value "
        f"groups.maxRestarts is {settings.max_restarts}) until the spec or the refresh annotation changes, or the "
        f"model is scaled to 0 and back: {known.message}"
    )
    return unmet("Available", Reason.RESTART_BUDGET_EXHAUSTED, text)


def _reason_of(known: GroupStatus) -> Reason:
    reason = Reason.named(known.reason or "")
    return reason if reason is not None and "Available" in reason.row.conditions else Reason.GROUP_INCOMPLETE


def failures(observed: Observed, revision_name: str) -> Iterator[str]:
    """Why groups of a revision fail that has not served yet: those that failed twice in a row."""
    for one in observed.model.groups:
        if one.revision == revision_name and (one.restarts or 0) > 1:
            yield f"group {one.name}: {one.message}"


@dataclass(frozen=True)
class _Room:
    """Free nodes for a whole group, counted before any of them is taken."""

    revision: Revision
    free: FreeDevices | None
    topology_key: str

    @classmethod
    def of(cls, observed: Observed, revision: Revision, settings: GroupSettings) -> _Room:
        return cls(revision, observed.free, settings.topology_key)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.FREE_DEVICES}) if self.revision.placement.resources else frozenset()

    @property
    def is_known(self) -> bool:
        return self.free is not None and self.free.nodes is not None

    def has_counted(self, groups: Iterable[GroupView]) -> bool:
        """Whether the devices that these groups hold are not among the free ones."""
        if self.free is None or (counted := self.free.pods) is None:
            return True
        nodes = {node.name for node in self.free.nodes or ()}
        members = (pod.live for group in groups for pod in group.members if pod.node in nodes)
        return all(text(pod, "metadata", "uid") in counted for pod in members)

    @property
    def rules(self) -> NodeRules:
        spec = dig(self.revision.template, "spec")
        return NodeRules.of(spec)

    def find(self) -> Mapping[str, str] | None:
        """Labels of nodes of one type in one domain that have room for all members; None: there is none. Empty if
        nodes cannot be counted: CPUs, or without the right to. Of several domains, the one that is filled most."""
        if not self.revision.placement.resources or not self.is_known:
            return {}
        fitting = [members for members in self._domains().values() if len(members) >= self.revision.placement.nodes]
        if not fitting:
            return None
        best = min(fitting, key=lambda nodes: (len(nodes), nodes[0].name))[0]
        keys = (names.INSTANCE_TYPE_LABEL, *((self.topology_key,) if self.topology_key else ()))
        return {key: best.labels[key] for key in keys if best.labels.get(key)}

    def _domains(self) -> Mapping[tuple[str, str], Sequence[NodeDevices]]:
        placement, domains = self.revision.placement, defaultdict[tuple[str, str], list[NodeDevices]](list)
        for node in (self.free and self.free.nodes) or ():
            offered = node.free_cores if placement.cores else node.free_devices
            if node.schedulable and self.rules.accept(node) and offered >= (placement.cores or placement.devices):
                domains[node.instance_type, node.labels.get(self.topology_key, "")].append(node)
        return domains

    def explain(self) -> Finding:
        placement = self.revision.placement
        most = max((len(nodes) for nodes in self._domains().values()), default=0)
        where = f", alike and in one {self.topology_key}" if self.topology_key else " of one instance type"
        text = (
            f"a group needs {placement.words}{where}; {most} of these nodes are free now, so it holds none; "
            f"{describe_free(self.free, placement, self.rules)}"
        )
        return unmet("Available", Reason.INSUFFICIENT_NEURON, text, {Need.FREE_DEVICES})


def _written(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
