"""The decision of one pass: what a World calls for next. Called by the rim (reconcile, local).

Pure: the same world gives the same decision, and nothing a manifest says makes it raise. The line is accept, resolve,
pin, serve; where a step cannot be made, what serves already is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from neuron_operator import model as manifest
from neuron_operator import names, revision, status, why
from neuron_operator.errors import InvalidSpec, Unplaceable
from neuron_operator.model import NeuronModel
from neuron_operator.objects import dig, is_deleting, is_true, items, labels_of, name_of, whole
from neuron_operator.records import Facts
from neuron_operator.render import serving
from neuron_operator.render.jobs import resolve_job
from neuron_operator.render.replicas import replicas
from neuron_operator.revision import Revision
from neuron_operator.why import Finding, fails, holds
from neuron_operator.world import Decision, Need, Object, Settings, World

LOOK_AGAIN_SECONDS = 30.0
"""Where what we wait for sends no event: another owner's object, rights, devices of other pods, events."""

KEPT_REVISIONS = 5

ACCEPTED = holds("Accepted", "the spec can be acted on")


@dataclass(frozen=True)
class Seen:
    """The children that are this model's by owner UID, sorted out."""

    children: tuple[Object, ...]
    deployment: Object | None
    jobs: dict[str, Object]
    revisions: tuple[Revision, ...]
    replicas: tuple[Object, ...]
    """Serving pods, whatever their revision."""
    job_pods: tuple[Object, ...]

    @property
    def serving(self) -> Revision | None:
        """The revision that pods are made of now; the last pinned one where somebody deleted the Deployment."""
        label = labels_of(dig(self.deployment, "spec", "template")).get(names.REVISION_LABEL)
        named = next((known for known in self.revisions if known.name == label), None)
        return named or max(self.revisions, key=lambda known: known.number, default=None)


@dataclass(frozen=True)
class Course:
    """How far this pass came on the line, and what it wants done."""

    findings: tuple[Finding, ...] = ()
    desired: tuple[Object, ...] = ()
    delete: tuple[Object, ...] = ()
    wanted: Revision | None = None
    promised: int | None = None
    """Replicas that the spec asks for; None where it cannot be read."""


def decide(world: World, settings: Settings) -> Decision:
    """The objects to apply and to delete now, and the whole status."""
    if is_deleting(world.body):
        return Decision()  # what is ours is collected with its owner
    seen = _look(world)
    course = _set_course(world, seen, settings)
    if manifest.is_paused(world.body):
        course = _paused(course)
    observed = _observe(world, seen, course)
    findings = status.complete((*course.findings, *observed))
    whole_status = _status(world, seen, course, findings)
    needs = frozenset[Need]().union(*(finding.needs for finding in findings))
    return Decision(
        desired=course.desired,
        delete=course.delete,
        status=whole_status,
        requeue_after_seconds=_look_again(world, findings),
        needs=needs,
        announcements=status.announcements(world.body, whole_status),
    )


def _paused(course: Course) -> Course:
    """Observe and report, change nothing."""
    told = f"; nothing is done while annotation {names.PAUSED_ANNOTATION} is set"
    findings = tuple(replace(f, message=f.message + told) if f.reason == "Resolving" else f for f in course.findings)
    return replace(course, findings=findings, desired=(), delete=())


def _look(world: World) -> Seen:
    uid = dig(world.body, "metadata", "uid")
    children = tuple(
        child
        for child in world.children
        if any(owner.get("uid") == uid for owner in items(child, "metadata", "ownerReferences"))
    )
    revisions = (revision.from_object(child) for child in children if child.get("kind") == "ControllerRevision")
    roles = [(labels_of(pod).get(names.ROLE_LABEL), pod) for pod in world.pods]
    return Seen(
        children=children,
        deployment=next((child for child in children if child.get("kind") == "Deployment"), None),
        jobs={name_of(child): child for child in children if child.get("kind") == "Job"},
        revisions=tuple(known for known in revisions if known is not None),
        replicas=tuple(pod for role, pod in roles if role == names.ROLE_LEADER),
        job_pods=tuple(pod for role, pod in roles if role == names.ROLE_RESOLVE),
    )


def _set_course(world: World, seen: Seen, settings: Settings) -> Course:
    try:
        model = manifest.parse(world.body)
    except InvalidSpec as error:
        return Course((fails("Accepted", error.reason, str(error)),))
    refusal = _refusal(world)
    if refusal is not None:
        return Course((refusal,), wanted=revision.wanted(model, seen.revisions), promised=model.spec.replicas)
    job = resolve_job(model, settings)
    wanted = revision.wanted(model, seen.revisions)
    if wanted is None:
        job_pods = [pod for pod in seen.job_pods if why.belongs_to_job(pod, name_of(job))]
        facts = revision.known_facts(model, settings, seen.revisions) or why.resolved_facts(job_pods)
        if facts is None:
            finding = why.explain_resolve(seen.jobs.get(name_of(job)), job_pods, world)
            return _resolving(model, settings, seen, (ACCEPTED, finding), job)
        resolved = _resolved(facts)
        try:
            wanted = revision.pin(model, facts, settings, _next_number(seen))
        except InvalidSpec as error:
            return _resolving(model, settings, seen, (fails("Accepted", error.reason, str(error)), resolved))
        except Unplaceable as error:
            return _resolving(model, settings, seen, (ACCEPTED, resolved, fails("Placed", error.reason, str(error))))
    elif wanted.number < _next_number(seen) - 1:
        wanted = msgspec.structs.replace(wanted, number=_next_number(seen))  # an earlier one is wanted again
    return _serve(model, settings, seen, wanted, name_of(job))


def _refusal(world: World) -> Finding | None:
    """What the API server refused in this pass."""
    if world.forbidden:
        told = "; ".join(f"{kind}: {message}" for kind, message in sorted(world.forbidden))
        return fails("Accepted", "OperatorForbidden", f"the operator lacks a right here: {told}")
    if world.taken:
        told = ", ".join(f"{kind} {name}" for kind, name in sorted(world.taken))
        return fails(
            "Accepted", "NameConflict", f"{told} exists and is not this model's; rename the model or delete it"
        )
    if world.rejected:
        told = "; ".join(f"{kind}: {message}" for kind, message in sorted(world.rejected))
        return fails("Accepted", "InvalidSpec", f"the API server refused what spec.podTemplate makes of {told}")
    return None


def _standing(model: NeuronModel, settings: Settings) -> tuple[Object, ...]:
    """What is there from the first pass on; the Service first, as its name is the one that others may have taken."""
    return (
        serving.service(model),
        serving.service_account(model),
        serving.disruption_budget(model),
        serving.network_policy(model, settings),
    )


def _resolving(
    model: NeuronModel, settings: Settings, seen: Seen, findings: tuple[Finding, ...], job: Object | None = None
) -> Course:
    """No revision can be pinned yet: what serves now goes on, at the scale that is asked for."""
    kept = _workload(model, seen, seen.serving) if seen.serving else ()
    lost = job is not None and _record_lost(seen, name_of(job))
    return Course(
        findings=findings,
        desired=(*_standing(model, settings), *kept, *((job,) if job and not lost else ())),
        delete=tuple(
            live for name, live in seen.jobs.items() if (lost if job and name == name_of(job) else not _finished(live))
        ),
        promised=model.spec.replicas,
    )


def _serve(model: NeuronModel, settings: Settings, seen: Seen, wanted: Revision, job_name: str) -> Course:
    kept = _kept_revisions(seen, wanted)
    pinned = wanted.pinned
    fetched = (
        holds("WeightsReady", "serving pods download the weights themselves", "FetchedByPods")
        if model.fetched_by_pods
        else holds("WeightsReady", "the weights are part of the runtime image")
    )
    return Course(
        findings=(
            ACCEPTED,
            _resolved(pinned.facts),
            holds("Placed", str(pinned.plan.get("summary") or wanted.placement.words)),
            fetched,
            holds("Compiled", f"backend {pinned.config.get('backend')} compiles nothing", "NotRequired"),
        ),
        desired=(
            revision.to_object(model, wanted),
            *_standing(model, settings),
            *_workload(model, seen, wanted),
        ),
        delete=tuple(_outlived(model, seen, kept, job_name)),
        wanted=wanted,
        promised=model.spec.replicas,
    )


def _workload(model: NeuronModel, seen: Seen, served: Revision) -> tuple[Object, ...]:
    """The replicas of one revision, with the documents of every revision that still has pods."""
    still = _with_pods(seen)
    documents = [served.pinned.config, *(known.pinned.config for known in seen.revisions if known.name in still)]
    config_maps = {name_of(found): found for found in (serving.config_map(model, document) for document in documents)}
    return (*config_maps.values(), *replicas(model, served))


def _kept_revisions(seen: Seen, wanted: Revision) -> tuple[Revision, ...]:
    """The wanted one, those that still have pods, and the latest few to go back to."""
    still = {wanted.name, *_with_pods(seen)}
    earlier = sorted((r for r in seen.revisions if r.name not in still), key=lambda r: r.number, reverse=True)
    return (
        wanted,
        *(r for r in seen.revisions if r.name in still and r.name != wanted.name),
        *earlier[:KEPT_REVISIONS],
    )


def _outlived(model: NeuronModel, seen: Seen, kept: Sequence[Revision], job_name: str) -> Iterator[Object]:
    """Children that nothing needs any more: revisions, their documents, Jobs of other specs. Finished Jobs go by
    themselves, and so does the one that found this revision's facts."""
    needed = {
        "ControllerRevision": {names.revision_name(model.name, known.name) for known in kept},
        "ConfigMap": {serving.config_name(model.name, known.pinned.config) for known in kept},
        "Job": {job_name, *(name for name, job in seen.jobs.items() if _finished(job))},
    }
    for child in seen.children:
        if name_of(child) not in needed.get(str(child.get("kind")), {name_of(child)}):
            yield child


def _with_pods(seen: Seen) -> set[str]:
    return {labels_of(pod).get(names.REVISION_LABEL, "") for pod in seen.replicas}


def _next_number(seen: Seen) -> int:
    return max((known.number for known in seen.revisions), default=0) + 1


def _finished(job: Object) -> bool:
    return is_true(job, "Complete") or is_true(job, "Failed")


def _record_lost(seen: Seen, job_name: str) -> bool:
    """The Job ended well and its pod is gone before the record was read: it has to run again."""
    job = seen.jobs.get(job_name)
    return is_true(job, "Complete") and not any(why.belongs_to_job(pod, job_name) for pod in seen.job_pods)


def _resolved(facts: Facts) -> Finding:
    return holds("ModelResolved", f"{facts.architecture}, {facts.parameters} parameters, at {facts.digest}")


def _observe(world: World, seen: Seen, course: Course) -> tuple[Finding, ...]:
    """What the replicas show, whatever the line found."""
    served = course.wanted or seen.serving
    if served is None:
        return ()
    promised = course.promised
    if promised is None:
        promised = whole(dig(seen.deployment, "spec", "replicas"))
    available = why.explain_replicas(seen.deployment, seen.replicas, promised, served.placement, world)
    return (*available, *_explain_revision(world, seen, course))


def _explain_revision(world: World, seen: Seen, course: Course) -> tuple[Finding, ...]:
    if course.wanted is None:
        return ()
    wanted = course.wanted.name
    live = [pod for pod in seen.replicas if why.is_live(pod)]
    updated = sum(_is_of(pod, wanted) for pod in live)
    if _is_of(dig(seen.deployment, "spec", "template"), wanted) and updated == len(live):
        return (holds("UpToDate", f"all replicas are of revision {wanted}"),)
    if manifest.is_paused(world.body):
        return (
            fails("UpToDate", "Paused", f"paused by annotation {names.PAUSED_ANNOTATION}; wants revision {wanted}"),
        )
    return (fails("UpToDate", "RollingOut", f"{updated} of {course.promised} replicas are of revision {wanted}"),)


def _is_of(value: Object | None, revision_name: str) -> bool:
    return labels_of(value).get(names.REVISION_LABEL) == revision_name


def _status(world: World, seen: Seen, course: Course, findings: Sequence[Finding]) -> Object:
    live = [pod for pod in seen.replicas if why.is_live(pod)]
    wanted = course.wanted.name if course.wanted else ""
    others = sorted(labels_of(pod).get(names.REVISION_LABEL, "") for pod in live if not _is_of(pod, wanted))
    current = others[0] if others else str(dig(world.body, "status", "currentRevision") or "")
    if any(finding.condition == "UpToDate" and finding.status == "True" for finding in findings):
        current = wanted
    service = next((child for child in seen.children if child.get("kind") == "Service"), None)
    address = f"{name_of(service)}.{dig(service, 'metadata', 'namespace')}.svc"
    return status.build(
        world.body,
        findings,
        counts={
            "replicas": len(live),
            "readyReplicas": sum(why.is_answering(pod) for pod in live),
            "updatedReplicas": sum(_is_of(pod, wanted) for pod in live),
        },
        shown=course.wanted or seen.serving,
        current_revision=current,
        update_revision=wanted or str(dig(world.body, "status", "updateRevision") or ""),
        url=f"http://{address}:{names.PORT}" if service else "",
        now=world.now,
    )


def _look_again(world: World, findings: Sequence[Finding]) -> float | None:
    """Where no event will come from what is waited for; None: events are enough."""
    if world.taken or world.forbidden or any(finding.needs for finding in findings):
        return LOOK_AGAIN_SECONDS
    starting = any(finding.reason in ("Loading", "Resolving") and finding.status == "False" for finding in findings)
    return float(why.UNEXPLAINED_SECONDS) if starting else None
