"""How an edit reaches the replicas: whether a new one starts before an old one ends. Called by `decide`. Pure.

The Deployment carries it out and remembers what was chosen, so that it holds for a whole rollout. Devices are counted,
never bought: a new replica that would wait for devices could make a cluster add a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from neuron_operator.disruption import MAX_UNAVAILABLE
from neuron_operator.model import NeuronModel
from neuron_operator.objects import dig
from neuron_operator.placement import NodeRules
from neuron_operator.revision import Revision
from neuron_operator.views import Observed
from neuron_operator.world import FreeDevices, Need, NodeDevices

SURGE_PATIENCE = timedelta(seconds=30)
"""How long a surge may wait for a node: another pod may have taken the devices that were free."""


@dataclass(frozen=True)
class Pace:
    surges: bool
    words: str
    """For the condition, before the rollout begins: above all, whether nobody will answer."""
    needs: frozenset[Need] = frozenset()

    @property
    def max_surge(self) -> int:
        return 1 if self.surges else 0

    @property
    def max_unavailable(self) -> int:
        return 0 if self.surges else MAX_UNAVAILABLE


def pace_of(model: NeuronModel, observed: Observed, revision: Revision) -> Pace:
    """How this revision reaches the replicas."""
    strategy, deployment = model.spec.rollout.strategy, observed.deployment
    if strategy == "Surge":
        return _surge()
    if strategy == "Replace" or deployment is None or not observed.live:
        return _one_by_one(model)
    if not revision.placement.resources:
        return _one_by_one(model, "room on CPU nodes is not counted; rollout.strategy Surge avoids the gap")
    if deployment.revision != revision.name:
        return _by_room(model, observed.free, revision)
    due = surge_due(observed)
    is_over = due is not None and due <= observed.now and not any(pod.is_deleting for pod in observed.replicas)
    return _surge() if deployment.surges and not is_over else _one_by_one(model)


def surge_due(observed: Observed) -> datetime | None:
    """When a surge that found no node ends; None: it found one. Devices of a replica that ends are free soon."""
    deployment = observed.deployment
    if deployment is None or not deployment.surges:
        return None
    waiting = (pod for pod in observed.live if pod.revision == deployment.revision and pod.unscheduled is not None)
    return min((pod.created + SURGE_PATIENCE for pod in waiting if pod.created), default=None)


def _surge(needs: frozenset[Need] = frozenset()) -> Pace:
    return Pace(True, "each new replica starts before an old one ends", needs)


def _one_by_one(model: NeuronModel, why: str = "", needs: frozenset[Need] = frozenset()) -> Pace:
    """`why` it does not surge, with the way out."""
    if model.spec.replicas > 1:
        return Pace(False, "one replica at a time is replaced", needs)
    drain = model.spec.rollout.drain_delay_seconds + model.spec.rollout.drain_seconds
    gap = f"the only replica ends first, after at most {drain} s of drain: nobody answers until the new one has loaded"
    return Pace(False, f"{gap} ({why})" if why else gap, needs)


def _by_room(model: NeuronModel, free: FreeDevices | None, revision: Revision) -> Pace:
    needs = frozenset({Need.FREE_DEVICES})
    if free is None or free.nodes is None:
        return _one_by_one(model, "the operator may not count free devices", needs)
    if any(_has_room(node, revision) for node in free.nodes):
        return _surge(needs)
    return _one_by_one(model, f"no node has {revision.placement.words} to spare", needs)


def _has_room(node: NodeDevices, revision: Revision) -> bool:
    spec, placement = dig(revision.template, "spec"), revision.placement
    if not node.schedulable or not NodeRules.of(dig(spec, "nodeSelector"), dig(spec, "affinity")).accept(node):
        return False
    return node.free_devices >= placement.devices and node.free_cores >= placement.cores
