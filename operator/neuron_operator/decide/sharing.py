"""Who owns what the models of a namespace share, and how long it stays. Called by `decide`. Pure.

The first few models that need a shared object are its owners: a patch of one with hundreds of owners takes seconds.
They join and leave by patches of one name without a version, so that a dozen can do so at once; the last deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from neuron_operator.api.model import NeuronModel
from neuron_operator.decide.steps import Walk
from neuron_operator.read.objects import MAX_OWNERS, is_orphan, is_owned, name_of, owners_of
from neuron_operator.read.views import ChildView, JobView, Observed
from neuron_operator.read.world import Change, Decision
from neuron_operator.render.jobs import KEPT_SECONDS
from neuron_operator.render.objects import owner_reference

OWNED_KINDS = frozenset({"Job", "ConfigMap", "CronJob"})


def upkeep(
    model: NeuronModel, observed: Observed, done: Walk, kept: frozenset[str], used_by_others: frozenset[str]
) -> Decision:
    """What is decided about shared objects, from how far the steps got; `kept` are those that kept revisions use."""
    waiting = frozenset(map(name_of, done.desired))
    needed = done.done | waiting
    stale = {name_of(obj) for obj in done.stale}
    uses = needed | kept | stale
    ours, others = list[ChildView](), list[ChildView]()
    for child in observed.shared:
        if child.kind in OWNED_KINDS:
            (ours if is_owned(child.live, model.uid) else others).append(child)
    # The last owner stays until one of the others has joined.
    let_go = [
        child
        for child in ours
        if child.name not in uses
        and not _is_over(child, observed)
        and not (_is_alone(model, child) and child.name in used_by_others)
    ]
    orphans = [child for child in others if child.name not in uses | used_by_others and is_orphan(child.live)]
    return Decision(
        changes=(
            *(_joined(model, child) for child in others if child.name in (needed | kept) - stale and _has_room(child)),
            *(_left(model, child) for child in let_go if not _is_alone(model, child)),
            *_expiries((observed.jobs[child.name] for child in ours if child.kind == "Job"), done, waiting),
        ),
        # An orphan is what its last owners left at the same time, if the operator ended between that and its deletion.
        delete=tuple(
            child.live for child in (*(f for f in let_go if _is_alone(model, f)), *orphans, *_held(ours, observed))
        ),
        uses=uses,
    )


def _joined(model: NeuronModel, child: ChildView) -> Change:
    return Change(child.live, {"metadata": {"ownerReferences": [owner_reference(model)]}}, unchanged=False)


def _left(model: NeuronModel, child: ChildView) -> Change:
    gone = {"$patch": "delete", "uid": model.uid}
    return Change(child.live, {"metadata": {"ownerReferences": [gone]}}, unchanged=False)


def _is_alone(model: NeuronModel, child: ChildView) -> bool:
    return all(owner.get("uid") == model.uid for owner in owners_of(child.live))


def _has_room(child: ChildView) -> bool:
    """Whether the model is to be one more owner; who applies a CronJob, with its owners, is one already."""
    return child.kind != "CronJob" and len(owners_of(child.live)) < MAX_OWNERS


def _is_over(child: ChildView, observed: Observed) -> bool:
    """A finished Job expires on its own, also if only its pod's end is seen yet."""
    if child.kind != "Job":
        return False
    return observed.jobs[child.name].is_finished or bool(observed.answers_of(child.name))


def _held(ours: Iterable[ChildView], observed: Observed) -> Iterator[ChildView]:
    """Jobs whose records are kept, and whose pods would not end: a container of others runs on, such as a mesh's."""
    jobs = (child for child in ours if child.kind == "Job" and child.name in observed.keepers)
    for child in jobs:
        is_held = any(pod.kept_by is not None for pod in observed.pods_of(child.name))
        if is_held and not observed.jobs[child.name].is_finished:
            yield child


def _expiries(jobs: Iterable[JobView], done: Walk, waiting: frozenset[str]) -> Iterator[Change]:
    """Finished Jobs are deleted some time later, but never before their record is copied or their failure is shown."""
    for job in jobs:
        if job.is_finished and not job.expires:
            if job is done.failed:
                yield Change(job.live, {"spec": {"ttlSecondsAfterFinished": done.retry_seconds}})
            elif job.name not in waiting:
                yield Change(job.live, {"spec": {"ttlSecondsAfterFinished": KEPT_SECONDS}})
