"""Which replicas leave a failed node now, which wait, and which node gets no more of them. Called by `decide`, and by
`why` for the signal. Pure.

It reads what nodes say about themselves (`NodeView`) and what their replicas do. It counts what all models together may
move (`World.moves_left`), but does not keep that count (`move_budget`). It never moves a replica whose node is well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from neuron_operator.api import names
from neuron_operator.api.reasons import Reason
from neuron_operator.read.disruption import MAX_UNAVAILABLE
from neuron_operator.read.views import NodeView, Observed, PodView
from neuron_operator.read.world import Announcement, Move
from neuron_operator.why import attempts
from neuron_operator.why.nodes import Signal, signal_of

FIRST_STAY = timedelta(seconds=60)
"""How long a replica stays at least that was started on a node which had already failed; then as long as the node had
failed before, up to MAX_STAY. The scheduler knows nothing of such a fault, and could return the replica without end."""
MAX_STAY = timedelta(hours=1)
CORDON_AFTER = timedelta(minutes=2)
"""How long a node must have refused the pods of a model, and no other node any of them, until it may be cordoned: a
kubelet or device plugin that restarts refuses some, too."""
RECHECK = timedelta(seconds=5)
"""When a replica that waits for others, for the budget, or was not allowed to leave, is looked at again. It costs no
request: the budget refuses a second attempt within a minute."""


@dataclass(frozen=True)
class Waiting:
    pod: PodView
    signal: Signal
    why: str

    @property
    def text(self) -> str:
        return f"{_leaves(self.pod, self.signal)}; {self.why}"


@dataclass(frozen=True)
class Plan:
    now: tuple[Move, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    due: datetime | None = None
    """When to look again."""

    @property
    def words(self) -> tuple[str, ...]:
        """For the condition of a model whose replicas all answer: some of them are about to leave their node."""
        leaving = (move.announcement.message for move in self.now if move.how != "Remove")
        return (*leaving, *(one.text for one in self.waiting))


NOBODY = Plan()


def plan(observed: Observed, num_wanted: int, moves_left: int, max_moves_per_minute: int) -> Plan:
    """Replicas that do not answer go first. Of those that answer, only as many go as an eviction may take away."""
    if not observed.rolled:
        return NOBODY  # none would make another one
    answering = {pod.group or pod.name for pod in observed.live if pod.is_answering}
    members = (*observed.live, *(pod for pod in observed.followers if pod.is_live))
    sick = [(pod, found) for pod in members if (found := signal_of(pod, observed)) is not None]
    num_answering = sum(pod.is_answering for pod in observed.live)
    spare = num_answering - max(0, num_wanted - MAX_UNAVAILABLE)

    def is_serving(pod: PodView) -> bool:
        """Whether the pod, or the leader of its group, answers."""
        return (pod.group or pod.name) in answering

    now: list[Move] = []
    waiting: list[Waiting] = []
    times: list[datetime] = []
    for pod, found in sorted(sick, key=lambda one: (is_serving(one[0]), one[0].age_key)):
        due = _due(pod, found)
        if due > observed.now:
            times.append(due)
        elif is_serving(pod) and spare <= 0:
            waiting.append(Waiting(pod, found, "it stays until the others answer"))
        elif len(now) >= moves_left:
            text = f"it waits: chart value nodeFailures.maxMovesPerMinute is {max_moves_per_minute}"
            waiting.append(Waiting(pod, found, text))
        else:
            spare -= is_serving(pod)
            answering.discard(pod.group or pod.name)  # with one member the whole group leaves
            now.append(_move(pod, found))
    for pod in (*observed.replicas, *observed.followers):
        if pod.is_deleting and pod.should_be_gone is not None and (found := signal_of(pod, observed)) is not None:
            if found.reason is Reason.NODE_LOST and pod.should_be_gone <= observed.now:
                now.append(_removal(pod, found))
            elif found.reason is Reason.NODE_LOST:
                times.append(pod.should_be_gone)
    if now or waiting:
        times.append(observed.now + RECHECK)
    return Plan(tuple(now), tuple(waiting), min(times, default=None))


def cordons(observed: Observed, revision_names: Iterable[str], num_left: int) -> tuple[Move, ...]:
    """The nodes that get no more pods of any model. What somebody uncordoned stays uncordoned."""
    found = {
        node.name: _cordon(node, failed)
        for name in revision_names
        if (failed := attempts.failures(observed, name))
        and (node := _refusing(observed, failed)) is not None
        and not (node.is_cordoned or node.cordoned)
    }
    return tuple(found.values())[: max(0, num_left)]


def _refusing(observed: Observed, failed: Sequence[PodView]) -> NodeView | None:
    """The node that refused all these pods for CORDON_AFTER. Only the first and the last of them are kept."""
    first, last = failed[0], failed[-1]
    is_refusal = all(pod.reason == names.UNEXPECTED_ADMISSION and not pod.is_admitted for pod in failed)
    if not is_refusal or len({pod.node for pod in failed}) > 1 or last.age_key[0] - first.age_key[0] < CORDON_AFTER:
        return None
    return observed.nodes.get(last.node)


def _cordon(node: NodeView, failed: Sequence[PodView]) -> Move:
    first, last = (f"{pod.age_key[0]:%Y-%m-%dT%H:%M:%SZ}" for pod in (failed[0], failed[-1]))
    text = f"node {node.name} is cordoned: it refused pods from {first} to {last}: {failed[-1].message.strip()}"
    return Move(node.live, "Cordon", Announcement("Warning", Reason.ALLOCATION_REJECTED, text))


def _due(pod: PodView, found: Signal) -> datetime:
    created = pod.age_key[0]
    if found.since is None or created <= found.since:
        return created
    return created + min(max(FIRST_STAY, created - found.since), MAX_STAY)


def _move(pod: PodView, found: Signal) -> Move:
    is_lost = found.reason is Reason.NODE_LOST
    announcement = Announcement("Warning", found.reason, _leaves(pod, found))
    return Move(pod.live, "Delete" if is_lost else "Evict", announcement)


def _leaves(pod: PodView, found: Signal) -> str:
    return f"pod {pod.name} leaves node {pod.node}, which {found.said}"


def _removal(pod: PodView, found: Signal) -> Move:
    text = f"pod {pod.name} is removed: its time to end is over, and node {pod.node} {found.said}"
    return Move(pod.live, "Remove", Announcement("Normal", found.reason, text))
