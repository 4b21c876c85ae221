"""How an edit reaches the replicas: whether a new one starts before an old one ends, and which revision comes back if
that fails. Called by `decide`. Pure.

The Deployment carries it out and remembers what was chosen, so that it holds for a whole rollout. Devices are counted,
never bought: a new replica that would wait for devices could make a cluster add a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import msgspec

from neuron_operator.api import names
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.model import NeuronModel
from neuron_operator.api.model_status import MAX_HISTORY, MAX_WORD, PastRevision
from neuron_operator.api.reasons import Need, Trial
from neuron_operator.decide import groups
from neuron_operator.read.objects import dig, printable, written
from neuron_operator.read.placement import NodeRules
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import Observed, PodView
from neuron_operator.render.serving import Pace, progress_seconds
from neuron_operator.why.pods import (
    IN_USE_ELSEWHERE,
    ONE_NODE_AT_A_TIME,
    UNEXPLAINED_POD_SECONDS,
    explain_pod,
    meaning_of,
)

SURGE_PATIENCE = timedelta(seconds=30)
"""How long a surge may wait for a node: another pod may have taken the devices that were free."""


@dataclass(frozen=True)
class Setback:
    """Another revision serves, or is about to, instead of the wanted one."""

    to: Revision
    why: str
    error: str = ""
    """What made the wanted one fail; empty: nothing did."""
    is_recorded: bool = True
    """The status tells it already: only then a pod is changed, so that nothing is forgotten if the operator dies."""


def pace_of(model: NeuronModel, observed: Observed, revision: Revision) -> Pace:
    strategy, deployment = model.spec.rollout.strategy, observed.deployment
    if strategy == "Surge":
        return _SURGE
    if observed.groups or revision.placement.nodes > 1:
        return _of_groups(model)
    if strategy == "Replace" or deployment is None or not observed.live:
        return _one_by_one(model, observed)
    if not revision.placement.on_devices:
        return _one_by_one(model, observed, "room on CPU nodes is not counted; rollout.strategy Surge avoids the gap")
    if deployment.revision != revision.name:
        return _by_room(model, observed, revision)
    due = surge_due(observed)
    is_over = due is not None and due <= observed.now
    if deployment.surges and not is_over:
        return replace(_SURGE, needs=frozenset({Need.EVENTS})) if _starting(observed) else _SURGE
    held = any(_lacks_volume(pod, observed) for pod in observed.live)
    return _one_by_one(model, observed, ONE_NODE_AT_A_TIME if held else "")


def _of_groups(model: NeuronModel) -> Pace:
    """`groups` counts nodes and chooses, unless the manifest does."""
    if model.spec.replicas > 1 or model.spec.rollout.strategy == "Auto":
        return Pace(False, "one group at a time is replaced, after the new one where there is room for both")
    gap = f"the only group ends first: nobody answers for at most {model.spec.rollout.drain_seconds} s of drain"
    return Pace(False, f"{gap} and until the new one has loaded")


def trial_of(model: NeuronModel, observed: Observed, revision: Revision, pace: Pace) -> Trial | None:
    """The pod to try before a replica ends for it: if it is refused then, nobody takes that one's place. None: no
    replica is at risk, or the rollout has begun."""
    if pace.surges or observed.model.is_paused or revision.placement.nodes > 1 or revision.name in observed.tried:
        return None
    if not any(pod.is_answering for pod in observed.live):
        return None
    template = revision.pinned.template
    own = {"namespace": observed.model.namespace, "name": f"{model.name}-{revision.name}"}
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], **own}}
    return Trial(msgspec.json.encode(pod, order="sorted").decode())


def surge_due(observed: Observed) -> datetime | None:
    """When a surge that found no node, or no volume that two nodes can use, ends; None: it found both.

    Devices of a replica that ends are free soon. One on a lost node never reports its end.
    """
    deployment = observed.deployment
    if deployment is None or not deployment.surges:
        return None
    waiting = (pod for pod in observed.live if pod.revision == deployment.revision and _is_stuck(pod, observed))
    since = min((pod.created for pod in waiting if pod.created), default=None)
    if since is None:
        return None
    return max((since, *(pod.should_be_gone for pod in observed.replicas if pod.should_be_gone))) + SURGE_PATIENCE


def next_look(observed: Observed) -> datetime | None:
    """When the events of a surge that is starting are read again: only they tell of a volume that it lacks."""
    is_surging = observed.deployment is not None and observed.deployment.surges
    return observed.now + SURGE_PATIENCE if is_surging and _starting(observed) else None


def _starting(observed: Observed) -> list[PodView]:
    """Pods of the latest revision that have a node and have not run for seconds."""
    since = observed.now - timedelta(seconds=UNEXPLAINED_POD_SECONDS)
    return [
        pod
        for pod in observed.live
        if pod.revision == observed.rolled and pod.node and not pod.container.has_run and pod.age_key[0] <= since
    ]


def _is_stuck(pod: PodView, observed: Observed) -> bool:
    """It waits for what an earlier replica may hold."""
    return pod.unscheduled is not None or _lacks_volume(pod, observed)


def _lacks_volume(pod: PodView, observed: Observed) -> bool:
    return IN_USE_ELSEWHERE in observed.warnings.get(pod.name, "")


_SURGE = Pace(True, "each new replica starts before an old one ends")


def _one_by_one(model: NeuronModel, observed: Observed, why: str = "") -> Pace:
    """`why` it does not surge, with the way out."""
    if model.spec.replicas > 1:
        return Pace(False, "one replica at a time is replaced")
    gap = f"the only replica ends first: nobody answers for at most {model.spec.rollout.drain_seconds} s of drain"
    loaded = next((pod.load_seconds for pod in observed.live if pod.is_answering), None)
    load = "until the new one has loaded" if loaded is None else f"about {loaded:.0f} s of loading, as the last time"
    return Pace(False, f"{gap} and {load} ({why})" if why else f"{gap} and {load}")


def _by_room(model: NeuronModel, observed: Observed, revision: Revision) -> Pace:
    free, placement = observed.free, revision.placement
    rules = NodeRules.of(dig(revision.pinned.template, "spec"))
    if free is None or free.nodes is None:
        pace = _one_by_one(model, observed, "the operator may not count free devices")
    elif any(placement.has_room_on(node, rules) for node in free.nodes):
        pace = _SURGE
    else:
        pace = _one_by_one(model, observed, f"no node has {placement.words} to spare")
    return replace(pace, needs=frozenset({Need.FREE_DEVICES}))


def setback_of(model: NeuronModel, observed: Observed, wanted: Revision) -> Setback | None:
    """Raises InvalidSpec if the annotation names no kept revision that has served: the steps of others may not be
    done."""
    kept = observed.revisions
    if model.rollback_to:
        served = sorted(filter(observed.has_served, kept))
        if model.rollback_to not in (*served, wanted.name):
            cure = f"choose one of {', '.join(served)}, or remove it" if served else "remove it: none has served yet"
            text = f"{model.rollback_to} is not a kept revision that has served; {cure}"
            raise InvalidSpec(f"metadata.annotations[{names.ROLLBACK_ANNOTATION}]", text)
        if model.rollback_to == wanted.name:
            return None
        why = f"annotation {names.ROLLBACK_ANNOTATION} holds it; remove it to roll out {wanted.name}"
        return Setback(kept[model.rollback_to], why)
    earlier = kept.get(observed.model.current_revision)
    if earlier is None or earlier.name == wanted.name:
        return None
    again = "it is not tried again until the spec changes"
    if observed.model.failed_revision == wanted.name:
        error = next((one.message for one in observed.model.history if one.revision == wanted.name), None) or ""
        return Setback(earlier, f"{error}; {again}", error)
    error = next(_failures(model, observed, wanted), "")
    if not error:
        return None
    error = printable(error)[:MAX_WORD]
    return Setback(earlier, f"{error}; {again}", error, is_recorded=False)


def _failures(model: NeuronModel, observed: Observed, revision: Revision) -> Iterator[str]:
    """Why the rollout of a revision, of which not all replicas have served yet, has failed."""
    seconds = progress_seconds(model, revision)
    for pod in observed.live:
        if pod.revision == revision.name and not pod.is_ready:
            due, error = _due(model, pod, revision), explain_pod(pod, observed, revision.placement).message
            if _is_hopeless(pod, revision):
                yield error
            elif due is not None and due <= observed.now:
                yield f"not ready within {seconds} s: {error}"
    yield from groups.failures(observed, revision.name)


def _is_hopeless(pod: PodView, revision: Revision) -> bool:
    """It has ended twice, for a reason that another start would not change."""
    end = pod.container.ended
    reason = meaning_of(end, pod, revision)[0] if end else None
    return reason is not None and reason.row.final and pod.container.num_restarts > 0


def next_deadline(model: NeuronModel, observed: Observed, revision: Revision) -> datetime | None:
    if observed.model.current_revision == revision.name:
        return None
    due = (_due(model, pod, revision) for pod in observed.live)
    return min((one for one in due if one is not None and one > observed.now), default=None)


def history_of(observed: Observed, wanted: Revision, serving: str, error: str) -> tuple[PastRevision, ...]:
    """`serving`: the last revision of which all replicas could serve; `error`: why the wanted one failed."""
    past = observed.model.history
    if not past or past[0].revision != wanted.name:
        newest = PastRevision(revision=wanted.name, state="RollingOut", since=written(observed.now))
        past = (newest, *past)[:MAX_HISTORY]
    serving_index = next((index for index, one in enumerate(past) if one.revision == serving), None)

    def state_of(index: int, one: PastRevision) -> str:
        if index == serving_index:
            return "Serving"
        if index == 0:
            return "RolledBack" if error else "RollingOut"
        return _ONCE_ANOTHER_IS_WANTED.get(one.state, one.state)

    return tuple(
        msgspec.structs.replace(one, state=state_of(index, one), message=error or None if index == 0 else one.message)
        for index, one in enumerate(past)
    )


_ONCE_ANOTHER_IS_WANTED = {"RollingOut": "Skipped", "Serving": "Replaced"}


def _due(model: NeuronModel, pod: PodView, revision: Revision) -> datetime | None:
    """When a pod that has a node but is not ready exceeds the deadline. Waiting for a node does not count."""
    if pod.revision != revision.name or pod.is_ready or pod.scheduled is None:
        return None
    since = max(pod.scheduled, pod.readiness_changed or pod.scheduled)
    return since + timedelta(seconds=progress_seconds(model, revision))
