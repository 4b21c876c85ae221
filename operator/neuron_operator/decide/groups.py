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
from neuron_operator.read.objects import dig, instant, printable, text, written
from neuron_operator.read.placement import NodeRules
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import GroupView, Observed, PodView
from neuron_operator.read.world import FreeDevices, GroupSettings, NodeDevices, Object
from neuron_operator.render.groups import Attempt
from neuron_operator.render.serving import MAX_UNAVAILABLE
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
    needs: frozenset[Need] = frozenset()
    due: datetime | None = None
    is_room_known: bool = False


def plan(
    observed: Observed, revision: Revision, num_wanted: int, surges: bool | None, settings: GroupSettings
) -> GroupPlan:
    """The next step towards `num_wanted` groups of the revision. `surges`: whether a new one starts before an old one
    ends; None: if there is room for it."""
    draft = _Draft(observed, revision, num_wanted, settings)
    draft.take_stock()
    replaces, does_surge = draft.decide_pace(surges)
    draft.end_surplus(does_surge)
    draft.start_missing(num_wanted + (1 if does_surge and replaces else 0))
    return draft.result()


@dataclass
class _Draft:
    """What a pass reads, and what it collects."""

    observed: Observed
    revision: Revision
    num_wanted: int
    settings: GroupSettings
    start: list[Attempt] = field(default_factory=list)
    end: list[GroupView] = field(default_factory=list)
    alive: list[GroupView] = field(default_factory=list)
    records: dict[tuple[str, int], GroupStatus] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)
    needs: set[Need] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kept = {(one.revision or "", one.replica or 0): one for one in self.observed.model.groups}
        ordered = sorted(self.observed.groups, key=lambda g: g.attempt)
        self.newest = {(g.revision, g.replica): g.attempt for g in ordered}
        self.earlier = [pod for pod in self.observed.live if not pod.group]
        """Pods of an earlier revision on one node that stay."""
        self.room = _Room(self.revision, self.observed.free, self.settings.topology_key)

    def take_stock(self) -> None:
        """Tells groups that go on from those that have ended."""
        for group in sorted(self.observed.groups, key=lambda g: (g.replica, g.attempt)):
            key = (group.revision, group.replica)
            known = self.kept.get(key, _NEW)
            is_recorded = (known.attempt or 0) >= group.attempt and known.state in ENDS
            if is_recorded or group.attempt < self.newest[key]:
                self.end.append(group)
                if key in self.kept:
                    self.records.setdefault(key, known)
                continue
            record = self.records[key] = _record(group, known, self.observed, self.settings)
            self.alive.append(group)
            if record.state == "Starting" and group.created:
                self.times += [group.created + _patience(group, self.settings), group.created + PODS_PATIENCE]
            if (refusal := _refused(group, self.observed)) is not None:
                self.findings.append(refusal)

    def _is_surplus(self, group: GroupView) -> bool:
        return group.revision != self.revision.name or group.replica >= self.num_wanted

    def _missing(self) -> list[int]:
        made = {group.replica for group in self.alive if group.revision == self.revision.name}
        return [replica for replica in range(self.num_wanted) if replica not in made]

    def decide_pace(self, surges: bool | None) -> tuple[bool, bool]:
        """Whether the revision replaces another, and whether it surges."""
        replaces = bool(self.earlier) or any(group.revision != self.revision.name for group in self.alive)
        missing = self._missing()
        if self.revision.placement.on_devices and (missing or (replaces and surges is None)):
            self.needs.add(Need.FREE_DEVICES)
        if surges is not None:
            return replaces, surges
        begun = len(self.alive) + len(self.earlier) > self.num_wanted and not missing
        if begun or not replaces or not self.revision.placement.on_devices:
            return replaces, begun
        return replaces, self.room.is_known and self.room.find() is not None

    def end_surplus(self, does_surge: bool) -> None:
        """Ends what is too much, as long as what is promised answers: of a stopped model nothing is."""
        answering = sum(g.is_answering for g in self.alive) + sum(pod.is_answering for pod in self.earlier)
        spare = answering - (self.num_wanted - (0 if does_surge else MAX_UNAVAILABLE))

        def may_end(one: GroupView | PodView) -> bool:
            nonlocal spare
            if one.is_answering and self.num_wanted and spare <= 0:
                return False
            spare -= one.is_answering
            return True

        surplus = filter(self._is_surplus, sorted(self.alive, key=lambda g: (g.is_answering, -g.replica)))
        ended = [group for group in surplus if may_end(group)]
        self.end += ended
        self.alive = [group for group in self.alive if group not in ended]
        self.earlier = [pod for pod in sorted(self.earlier, key=lambda one: one.is_answering) if not may_end(pod)]

    def start_missing(self, limit: int) -> None:
        """Starts what is missing, one at a time; `limit`: groups and pods that there may be."""
        is_placing = any(not group.is_placed for group in self.alive)
        now = self.observed.now
        for replica in self._missing():
            key = (self.revision.name, replica)
            known = self.records.get(key) or self.kept.get(key, _NEW)
            due = _due(known, now, self.settings)
            if due is None:
                self.findings.append(_exhausted(known, self.settings))
            elif due > now:
                self.times.append(due)
                self.findings.append(_delayed(known, due))
            elif len(self.alive) + len(self.earlier) + len(self.start) >= limit:
                break
            elif is_placing or self.start:
                self.findings.append(_ONE_AT_A_TIME)
                break
            elif not self.room.has_counted(self.alive):
                self.findings.append(_ONE_AT_A_TIME)
                self.times.append(now + RECOUNT)
                break
            elif (domain := self.room.find()) is None:
                self.findings.append(self.room.explain())
                self.times.append(now + RECHECK)
                break
            else:
                number = 1 + max(known.attempt or 0, self.newest.get(key, 0))
                self.start.append(Attempt(replica, number, domain))

    def result(self) -> GroupPlan:
        for key, known in self.kept.items():
            if key[0] == self.revision.name and key[1] < self.num_wanted:
                self.records.setdefault(key, known)
        shown = sorted(self.records.values(), key=lambda one: (one.revision != self.revision.name, one.replica or 0))
        return GroupPlan(
            start=tuple(self.start),
            end=tuple(group.live for group in self.end),
            alive=tuple(self.alive),
            records=tuple(shown[:MAX_GROUPS]),
            findings=tuple(self.findings),
            num_earlier=len(self.earlier),
            needs=frozenset(self.needs),
            due=min((time for time in self.times if time > self.observed.now), default=None),
            is_room_known=self.room.is_known,
        )


_ONE_AT_A_TIME = unmet("Available", Reason.LOADING, "one group is placed at a time")
_NEW = GroupStatus(name="")
"""What the status says of a replica that was never started."""


def _record(group: GroupView, known: GroupStatus, observed: Observed, settings: GroupSettings) -> GroupStatus:
    """What the status says of a group that exists. `known`: what it said before, of this or an earlier attempt."""
    before = known.state if known.attempt == group.attempt else None
    restarts, reason, message = known.restarts or 0, known.reason, known.message
    state: State = "Serving" if group.is_answering or before == "Serving" else "Starting"
    end = _end(group, observed, settings)
    if end is not None:
        state, cause, said = end
        reason, message = str(cause), printable(said)[:MAX_WORD]
    if state == "Failed":
        since = instant(known.since) if before == "Serving" else None
        restarts = 1 if since is not None and observed.now - since >= RECOVERED else restarts + 1
    return GroupStatus(
        name=group.name,
        revision=group.revision,
        replica=group.replica,
        attempt=group.attempt,
        state=state,
        since=known.since if before == state else written(observed.now),
        restarts=restarts,
        members=group.size,
        ready_members=sum(pod.is_running for pod in group.members),
        reason=reason,
        message=message,
    )


def _end(group: GroupView, observed: Observed, settings: GroupSettings) -> tuple[State, Reason, str] | None:
    """State, reason and message of a group that ends: what has happened to one member happens to all. The member that
    failed itself is named, not those that then ended because of it."""
    revision = observed.revisions.get(group.revision)
    broken = [pod for pod in group.members if pod.has_failed or pod.container.num_restarts or pod.container.ended]
    leaving = [pod for pod in group.members if pod.is_deleting]
    for pod in leaving:
        signal = nodes.signal_of(pod, observed)
        if signal is not None:
            return "Left", signal.reason, f"member {pod.name} left node {pod.node}, which {signal.said}"
    if broken and revision is not None:
        first = min(broken, key=_blame)
        found_end = explain_pod(first, observed, revision.placement)
        reason = Reason.named(found_end.reason) or Reason.GROUP_INCOMPLETE
        others = f"; {len(broken)} of {group.size} members ended" if len(broken) > 1 else ""
        return "Failed", reason, f"on node {first.node}, {found_end.message}{others}"
    if leaving:
        pod = leaving[0]
        return "Left", Reason.DRAINING, f"member {pod.name} on node {pod.node} was evicted or deleted"
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
        return "Released", why, f"{text}; {refused.message}"
    text += f"; {waiting[0].name}: {waiting[0].unscheduled or ''}"
    lacks_devices = waiting[0].requests or waiting[0].claims_devices
    return "Released", Reason.INSUFFICIENT_NEURON if lacks_devices else Reason.NO_MATCHING_NODE, text


def _refused(group: GroupView, observed: Observed) -> Finding | None:
    """Why members have no pods: only events tell, because a StatefulSet has no condition for it."""
    missing = group.size - len(group.members)
    if not group.is_whole or missing <= 0 or observed.age(group.created) < PODS_PATIENCE:
        return None
    said = (observed.warnings.get(name, "") for name in (group.name, names.followers_name(group.name)))
    warning = next((one for one in said if one.startswith(FAILED_CREATE)), "")
    reason, cure = explain_denial(warning) if warning else (Reason.LOADING, "")
    text = f"{missing} of {group.size} members of group {group.name} have no pod: {warning or 'no warnings so far'}"
    return unmet("Available", reason, f"{text}; {cure}" if cure else text, {Need.EVENTS})


FAILED_CREATE = "FailedCreate: "
"""How the StatefulSet controller's warning begins."""


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


def _due(known: GroupStatus, now: datetime, settings: GroupSettings) -> datetime | None:
    """When the next attempt may start; None: never, unless something changes."""
    if known.state not in ("Failed", "Released"):
        return now
    since, failures = instant(known.since) or now, known.restarts or 0
    if known.state == "Released":
        return since + timedelta(seconds=settings.place_seconds / 4)
    if failures > settings.max_restarts:
        return None
    delay = timedelta(seconds=settings.restart_seconds * 2 ** min(failures - 1, 10))
    return since + min(delay, max(MAX_DELAY, timedelta(seconds=settings.restart_seconds)))


def _delayed(known: GroupStatus, due: datetime) -> Finding:
    reason = Reason.named(known.reason or "")
    if reason is None or "Available" not in reason.row.conditions:
        reason = Reason.GROUP_INCOMPLETE
    text = f"group {known.name} ended: {known.message}; the next attempt starts at {due:%Y-%m-%dT%H:%M:%SZ}"
    return unmet("Available", reason, text)


def _exhausted(known: GroupStatus, settings: GroupSettings) -> Finding:
    text = (
        f"group {known.name} failed {known.restarts} times in a row and is not started again (chart value "
        f"groups.maxRestarts is {settings.max_restarts}) until the spec or the refresh annotation changes, or the "
        f"model is scaled to 0 and back: {known.message}"
    )
    return unmet("Available", Reason.RESTART_BUDGET_EXHAUSTED, text)


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
        return NodeRules.of(dig(self.revision.pinned.template, "spec"))

    def find(self) -> Mapping[str, str] | None:
        """Labels of nodes of one type in one domain that have room for all members; None: there is none. Empty if
        nodes cannot be counted: CPUs, or without the right to. Of several domains, the one that is filled most."""
        if not self.revision.placement.on_devices or not self.is_known:
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
            if placement.has_room_on(node, self.rules):
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
