"""Which replicas leave a failed node now, which wait, and which node gets no more of them. Called by `decide`, and by
`why` for the signal. Pure.

It reads what nodes say about themselves (`NodeView`) and what their replicas do. It counts what all models together may
move (`World.moves_left`), but does not keep that count (`move_budget`). It never moves a replica whose node is well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from neuron_operator import breaker, names
from neuron_operator.disruption import MAX_UNAVAILABLE
from neuron_operator.objects import instant
from neuron_operator.reasons import Reason
from neuron_operator.views import ConditionView, NodeView, Observed, PodView
from neuron_operator.world import Announcement, Move

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

NEURON_HEALTH = "NeuronHealth"
"""Of the Neuron node problem detector, for which True means a fault, as in all its conditions."""
HARDWARE_READY = "AcceleratedHardwareReady"
"""Of EKS' node monitoring agent, for which False means a fault."""
READY = "Ready"
HEALTHY = {READY: "True", NEURON_HEALTH: "False", HARDWARE_READY: "True"}
"""The status of each condition on a node that is well."""
CONDITIONS = tuple(HEALTHY)


@dataclass(frozen=True)
class Signal:
    """What is wrong with a replica's node."""

    reason: Literal[Reason.NODE_LOST, Reason.DEVICE_UNHEALTHY]
    said: str
    """For a message, after the node's name."""
    since: datetime | None = None
    """None: nobody says."""


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
        if (failed := breaker.failures(observed, name))
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


def signal_of(pod: PodView, observed: Observed) -> Signal | None:
    """What is wrong with the pod's node; None if nothing is, or if it concerns others only."""
    node = observed.nodes.get(pod.node)
    if node is None:
        return None
    lost = _lost(node)
    if lost is not None or not pod.requests:
        return lost
    return next(_faults(pod, node), None)


def has_failed(node: NodeView) -> bool:
    """Whether a replica on this node may have to leave it."""
    short = any(node.allocatable.get(name, 0) < number for name, number in node.capacity.items())
    return _lost(node) is not None or short or any(_reported(node))


def _lost(node: NodeView) -> Signal | None:
    ready = node.conditions.get(READY)
    if ready is None or ready.status == "True":
        return None
    verb = "does not respond" if ready.status == "Unknown" else "is not ready"
    return Signal(Reason.NODE_LOST, f"{verb}: {_quoted(ready)}", instant(ready.since))


def _faults(pod: PodView, node: NodeView) -> Iterator[Signal]:
    yield from _reported(node)
    for name, held in pod.requests.items():
        capacity, healthy = node.capacity.get(name, 0), node.allocatable.get(name, 0)
        word = "NeuronCores" if name == names.CORE_RESOURCE else "Neuron devices"
        said = f"has {healthy} healthy {word} of {capacity}, and the pod holds {held}"
        if pod.has_unhealthy_device or (healthy < capacity and _holds_unhealthy(pod, held, healthy)):
            yield Signal(Reason.DEVICE_UNHEALTHY, said)


def _holds_unhealthy(pod: PodView, held: int, healthy: int) -> bool:
    """Whether one of the pod's devices must be among the unhealthy ones. Which one a pod holds is not in the API. While
    the plugin restarts, no device counts as healthy: then, and if others could hold it, only the pod's own failure
    tells."""
    ended = pod.container.ended
    has_failed = ended is not None and Reason.of_exit_code(ended.exit_code) is Reason.DEVICE_FAILED
    return has_failed or 0 < healthy < held


def _reported(node: NodeView) -> Iterator[Signal]:
    health, hardware = node.conditions.get(NEURON_HEALTH), node.conditions.get(HARDWARE_READY)
    if health is not None and health.status == "True":
        yield Signal(Reason.DEVICE_UNHEALTHY, f"reports {NEURON_HEALTH}: {_quoted(health)}", instant(health.since))
    if hardware is not None and hardware.status == "False":
        text = f"reports {HARDWARE_READY} False: {_quoted(hardware)}"
        yield Signal(Reason.DEVICE_UNHEALTHY, text, instant(hardware.since))


def _quoted(condition: ConditionView) -> str:
    return ": ".join(filter(None, (condition.reason, condition.message))) or condition.status


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
