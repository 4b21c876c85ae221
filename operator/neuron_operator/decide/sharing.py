"""Who owns what the models of a namespace share, and how long it stays. Called by `decide`. Pure.

The first few models that need a shared object are its owners: a patch of one with hundreds of owners takes seconds.
They join and leave by patches of one name without a version, so that a dozen can do so at once; the last deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from neuron_operator.api.model import NeuronModel
from neuron_operator.decide.steps import Walk
from neuron_operator.read.objects import MAX_OWNERS, is_orphan, is_owned, kind_of, name_of, owners_of
from neuron_operator.read.views import JobView, Observed
from neuron_operator.read.world import Change, Decision, Object
from neuron_operator.render.jobs import KEPT_SECONDS
from neuron_operator.render.objects import owner_reference

OWNED_KINDS = ("Job", "ConfigMap", "CronJob")


def upkeep(
    model: NeuronModel, observed: Observed, done: Walk, kept: frozenset[str], used_by_others: frozenset[str]
) -> Decision:
    """What is decided about shared objects, from how far the steps got; `kept` are those that kept revisions use."""
    waiting = frozenset(map(name_of, done.desired))
    needed = done.done | waiting
    stale = {name_of(obj) for obj in done.stale}
    uses = needed | kept | stale
    lasting = (needed | kept) - stale
    ours, others = list[Object](), list[Object]()
    for child in chain.from_iterable(observed.shared.get(kind, ()) for kind in OWNED_KINDS):
        (ours if is_owned(child, model.uid) else others).append(child)
    jobs = [observed.jobs[name_of(child)] for child in ours if kind_of(child) == "Job"]
    # The last owner stays until one of the others has joined.
    let_go = [
        child
        for child in ours
        if name_of(child) not in uses
        and not _is_over(child, observed)
        and not (_is_alone(model, child) and name_of(child) in used_by_others)
    ]
    joined, left = owner_reference(model), {"$patch": "delete", "uid": model.uid}
    known = uses | used_by_others
    orphans = [child for child in others if name_of(child) not in known and is_orphan(child)]
    return Decision(
        changes=(
            *(_owned(child, joined) for child in others if name_of(child) in lasting and _has_room(child)),
            *(_owned(child, left) for child in let_go if not _is_alone(model, child)),
            *_expiries(jobs, done, waiting),
        ),
        # An orphan is what its last owners left at the same time, if the operator ended between that and its deletion.
        delete=(*(child for child in let_go if _is_alone(model, child)), *orphans, *_held(jobs, observed, done)),
        uses=uses,
    )


def _owned(child: Object, owner: Object) -> Change:
    """One owner joins, or leaves."""
    return Change(child, {"metadata": {"ownerReferences": [owner]}}, unchanged=False)


def _is_alone(model: NeuronModel, child: Object) -> bool:
    return all(owner.get("uid") == model.uid for owner in owners_of(child))


def _has_room(child: Object) -> bool:
    """Whether the model is to be one more owner; who applies a CronJob, with its owners, is one already."""
    return kind_of(child) != "CronJob" and len(owners_of(child)) < MAX_OWNERS


def _is_over(child: Object, observed: Observed) -> bool:
    """A finished Job expires on its own, also if only its pod's end is seen yet."""
    if kind_of(child) != "Job":
        return False
    return observed.jobs[name_of(child)].is_finished or bool(observed.answers_of(name_of(child)))


def _held(jobs: Iterable[JobView], observed: Observed, done: Walk) -> Iterator[Object]:
    """Jobs whose records are kept, or after which another one with more memory runs, and whose pods would not end: a
    container of others runs on, such as a mesh's."""
    for job in jobs:
        is_over = (job.name in observed.keepers or job.name in done.done) and not job.is_finished
        if is_over and any(pod.kept_by is not None for pod in observed.pods_of(job.name)):
            yield job.live


def _expiries(jobs: Iterable[JobView], done: Walk, waiting: frozenset[str]) -> Iterator[Change]:
    """Finished Jobs are deleted some time later, but never before their record is copied or their failure is shown."""
    for job in jobs:
        if job.is_finished and not job.expires:
            if job is done.failed:
                yield Change(job.live, {"spec": {"ttlSecondsAfterFinished": done.retry_seconds}})
            elif job.name not in waiting:
                yield Change(job.live, {"spec": {"ttlSecondsAfterFinished": KEPT_SECONDS}})
