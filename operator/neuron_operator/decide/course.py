"""The decision of one pass over a World. Called by the rim (reconcile, local).

Pure: the same world gives the same decision, and no manifest or object makes it raise. The order is accept, the steps
(`steps.py`), serve; while a step is incomplete, the replicas that serve stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial

from neuron_operator.api import manifest, names
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.fields import as_json
from neuron_operator.api.model import NeuronModel
from neuron_operator.api.model_status import ArtifactStatus, ConversionStatus, Scaling, Status
from neuron_operator.api.reasons import Exists, Finding, LogOf, MetricsOf, Needed, Reason, Trial, met, unmet
from neuron_operator.decide import breaker, groups, nudge, pin, rollout, zero
from neuron_operator.decide.breaker import Allowed
from neuron_operator.decide.rollout import Setback
from neuron_operator.decide.sharing import upkeep
from neuron_operator.decide.steps import STEPS, Known, Step, Walk, refusal_of, seconds_of, using, walk
from neuron_operator.decide.zero import Scaled
from neuron_operator.place.planner import Held, is_stranded
from neuron_operator.read.drafts import accepted_length
from neuron_operator.read.objects import dig, is_owned, kind_of, name_of, only, text
from neuron_operator.read.revision import Revision, files_in
from neuron_operator.read.views import ConditionView, Observed, observe
from neuron_operator.read.world import Announcement, Decision, Object, Place, RefusalCause, Settings, Upgrade, World
from neuron_operator.render import serving
from neuron_operator.render.adapters import adapter_list
from neuron_operator.render.claims import claim_template
from neuron_operator.render.cleaning import cleaners
from neuron_operator.render.gateways import adapter_names, inference_pool
from neuron_operator.render.groups import group_owner, rest_of
from neuron_operator.render.jobs import with_owners
from neuron_operator.render.serving import Pace
from neuron_operator.render.storage import check_secret_of_draft, check_sources, own_claims, weights_place
from neuron_operator.why import status
from neuron_operator.why.pods import (
    UNEXPLAINED_POD_SECONDS,
    UNEXPLAINED_SECONDS,
    awaited,
    explain_failure,
    failures,
    next_attempt,
    unexplained_from,
)
from neuron_operator.why.refusals import explain_refusals, explain_trial
from neuron_operator.why.replicas import explain_replicas

MIN_RECHECK_SECONDS = 2.0
RECHECK_SECONDS = 30.0
"""For causes that wake no pass: objects of other owners, rights, devices held by other pods, Events. A refused write is
repeated after a twentieth of the time that the model has not been ready, within these two: a cure shows soon after a
short fault."""

AWAITED_SECONDS = 40.0
"""The same for a Secret or ConfigMap that a pod waits for, and for a pod that would be refused: a look takes one
request, and one for the pod's events."""

MAX_RECHECK_SECONDS = 300.0
"""What only makes a message better is read ever more rarely: after a tenth of the time that the model has not been
ready. Counting free devices takes a request for each node."""

METRICS_LOOK_SECONDS = 300.0
"""How often the metrics of replicas with drafts are read, if nothing else happens."""

STUCK_SECONDS = 60
"""A replica that waits for devices for so long may have to wait for ever, although a rollout goes on."""

STRANDED_SECONDS = 600
"""A model that has not served is planned again if none of its nodes has come for so long."""

PROGRESS_SECONDS = 5.0
"""How often an owner of a running Job reads its progress; the status changes no more often."""

BY_NEWER = "the newer runtime image would refuse it"

ACCEPTED = met("Accepted", "the spec is valid and supported")


@dataclass(frozen=True)
class Course:
    """How far this pass got, and the changes that follow."""

    findings: tuple[Finding, ...] = ()
    decision: Decision = field(default_factory=Decision)
    """Without what follows from all findings."""
    wanted: Revision | None = None
    """The revision pinned for this spec."""
    served: Revision | None = None
    """The revision of the replicas: the wanted one once all its steps are done."""
    is_told: bool = True
    """Whether the replicas need not wait for the status; see `_is_told`."""
    stays: str = ""
    """Why it keeps an engine or an older image that it would otherwise leave by itself."""
    num_wanted: int = 0
    """`spec.replicas`; of an invalid spec, the replicas of the last valid one."""
    setback: Setback | None = None
    pace: Pace | None = None
    """How `served` reaches the replicas."""
    due: tuple[datetime | None, ...] = ()
    """When the rollout fails, and what is to be tried again or explained."""
    groups: groups.GroupPlan | None = None
    """None: every replica is one pod, or what is wanted is not known in this pass."""
    scaled: Scaled | None = None
    """None: no revision serves, or what is wanted is not known in this pass."""


def decide(world: World, settings: Settings, steps: Sequence[Step] = STEPS) -> Decision:
    observed = observe(world)
    if observed.model.is_deleting:
        return Decision()  # the garbage collector deletes the children
    try:
        course = _set_course(world, observed, settings, steps)
    except InvalidSpec as error:
        course = Course(
            (refusal_of(error),),
            served=observed.serving(),
            num_wanted=_num_before(observed),
            groups=groups.GroupPlan(records=observed.model.groups),
        )
    is_terminating = any(refusal.why is RefusalCause.TERMINATING for refusal in world.refusals)
    if observed.model.is_paused:
        course = replace(course, findings=tuple(map(_noting_pause, course.findings)))
    is_held = observed.model.is_paused or is_terminating
    if is_held:  # report only, change nothing
        course = replace(course, decision=replace(course.decision, desired=(), changes=(), delete=(), scale_to=None))
    findings = status.complete((*course.findings, *_explain_serving(observed, course)))
    asked = _metrics_of(observed, course)
    told = accepted_length(world.told[need].text for need in asked if need in world.told)
    length = told or text(world.body, "status", "acceptedLength") if asked else ""
    page = settings.troubleshooting_url
    whole_status = _status(observed, course, findings, page, length, is_held=is_held)
    after = _requeue_after(world, observed, course, findings, steps)
    if asked:
        after = METRICS_LOOK_SECONDS if after is None else min(after, METRICS_LOOK_SECONDS)
    return replace(
        course.decision,
        status=whole_status,
        follows=not course.is_told or any(whole_status.get(n) != dig(world.body, "status", n) for n in _DECIDING),
        requeue_after_seconds=after,
        needs=frozenset[Needed](course.pace.needs if course.pace else ()).union(
            asked,
            course.groups.needs if course.groups else (),
            course.scaled.needs if course.scaled and not is_held else (),
            *(f.needs for f in findings),
        ),
        announcements=() if is_terminating else (*status.announcements(observed.model, findings), *_told(course)),
    )


def _told(course: Course) -> Iterator[Announcement]:
    """What the operator does by itself, beside what conditions say."""
    if course.scaled and course.decision.scale_to is not None:
        yield Announcement("Normal", "ScaledDown", course.scaled.told)


def _metrics_of(observed: Observed, course: Course) -> frozenset[MetricsOf]:
    """The replicas that make drafts: how many of them are right is shown."""
    if course.served is None or "speculation" not in course.served.pinned.config:
        return frozenset()
    answering = (pod for pod in observed.live if pod.is_answering and pod.address)
    return frozenset(MetricsOf(pod.name, pod.address + names.METRICS_PATH) for pod in answering)


def _noting_pause(finding: Finding) -> Finding:
    if finding.status != "False" or not finding.row.passing:
        return finding
    note = f"; paused: the operator changes nothing until annotation {names.PAUSED_ANNOTATION} is removed"
    return replace(finding, message=finding.message + note)


def _set_course(world: World, observed: Observed, settings: Settings, steps: Sequence[Step]) -> Course:
    """Raises InvalidSpec for a manifest that is refused before any step, or that names no revision to return to."""
    revisions = observed.revisions.values()
    has_defaults = bool(settings.engine_defaults) or any(known.default_for for known in revisions)
    written = manifest.parse(world.body, has_defaults=has_defaults)
    check_sources(written, settings)
    wanted = pin.wanted(written, revisions)
    newer, stays = pin.upgraded(written, wanted, settings, observed.free)
    is_behind = _is_behind(newer, observed, settings, wanted)
    refusal = pin.refusal_by_newer(newer, wanted, settings, observed.free) if is_behind and wanted else ""
    is_behind, stays = is_behind and not refusal, f"{BY_NEWER}: {refusal}" if refusal else stays
    moves, because = is_behind and world.has_turn, ""
    defaults = pin.defaults_key(pin.as_pinned(written, wanted), settings)
    idle = wanted if wanted and not observed.has_served(wanted.name) else None
    next_number, held = pin.next_number(revisions), pin.held(revisions, settings)
    if moves:
        wanted = pin.wanted(newer, revisions, images=pin.images(newer, settings))
        because = pin.words_of_images(newer, settings)
    elif idle is not None and idle.pinned.defaults not in ("", defaults):
        wanted, because = pin.wanted(written, revisions, settings=settings), defaults
    elif idle is not None and _is_stranded(written, observed, settings, idle, held):
        wanted, because = None, f"{next_number}:{defaults}"
    model = newer if moves else pin.as_pinned(written, wanted)
    if not moves:  # a running model stays where it is when the installation names another place
        check_secret_of_draft(model, (wanted.pinned.weights or Place()) if wanted else weights_place(model, settings))
    if has_defaults and written.spec.leaves_engine_open and (wanted is not None or moves):
        manifest.check_engine(model)
    facts, draft = pin.known_facts(model, settings, revisions)
    known = Known(
        model,
        settings,
        partial(pin.pin, model, settings=settings, number=next_number, upgrade=because, free=world.free, before=held),
        tried=frozenset((*observed.tried, observed.model.failed_revision)),
        answers=not observed.model.is_paused and any(pod.is_answering for pod in observed.live),
        facts=wanted.pinned.facts if wanted else facts,
        digest=pin.known_digest(model, settings, revisions) if wanted is None else "",
        is_open=wanted is None and pin.are_open(model, settings, revisions),
        draft=wanted.pinned.facts.draft if wanted else draft,
        revision=wanted,
    )
    done = walk(steps, known, observed)
    model = done.known.model
    pinned = done.known.revision and using(done.known.revision, done, observed)
    served = pinned if done.is_complete else observed.serving(besides=pinned)
    setback = rollout.setback_of(model, observed, pinned) if pinned else None
    if setback is not None and setback.is_recorded:
        served = setback.to
    scaled = zero.plan(model, world, observed, served, settings) if served else None
    num_pods = scaled.num_pods if scaled else 0
    grouped = _groups(model, settings, observed, done, served, num_pods=num_pods)
    allowed = breaker.steer(observed, served, num_pods) if served else None
    pace = rollout.pace_of(model, observed, allowed.revision) if allowed else None
    trial = rollout.trial_of(model, observed, allowed.revision, pace) if allowed and pace and not setback else None
    denied = _explain_trial(trial, world, observed, num_pods) if trial else ()
    if allowed and pace and trial:
        pace = replace(pace, needs=pace.needs | {trial})
        if denied and (before := observed.serving(besides=pinned)):
            allowed, pace = replace(allowed, revision=before), rollout.pace_of(model, observed, before)
    is_told = allowed is None or _is_told(observed, done, allowed.revision)
    kept_revisions = _kept_revisions(model, observed, pinned)
    cleaning = _cleaning(model, settings, observed, kept_revisions)
    desired = (
        *(pin.to_object(model, known) for known in _distinct(pinned, served, allowed.revision if allowed else None)),
        serving.service(model),
        serving.service_account(model),
        serving.disruption_budget(model, served.placement.nodes if served else 1),
        serving.network_policy(model, settings),
        *_claims(model, settings, observed, (pinned, served)),
        *_adapter_list(model, world, kept_revisions),
        *_for_gateways(model, world, settings),
        *(
            _workload(model, observed, settings, allowed=allowed, pace=pace, grouped=grouped)
            if allowed and pace and is_told
            else ()
        ),
        *done.desired,
        *cleaning,
    )
    # Hundreds of models may wait for a Job: its owners look after it.
    live_jobs = filter(None, map(observed.jobs.get, map(name_of, done.desired)))
    waited = [job for job in live_jobs if is_owned(job.live, model.uid)]
    nudges = (nudge.change(job, observed) for job in waited)
    due = (
        rollout.next_deadline(model, observed, pinned) if pinned else None,
        done.retry_at,
        nudge.of_deployment(observed).due,
        *(nudge.of_job(job, observed).due for job in waited),
        *(
            job.created + timedelta(seconds=UNEXPLAINED_POD_SECONDS)
            for job in waited
            if job.created is not None and not observed.pods_of(job.name)
        ),
    )
    # A Job that still works for an earlier one works for nothing.
    kept = (name for known in kept_revisions for name in known.shared if name in observed.keepers)
    shared = upkeep(model, observed, done, frozenset((*kept, *map(name_of, cleaning))), world.used_by_others)
    # May get new pods.
    attempted = {served.name, allowed.revision.name} if served and allowed and num_pods else set()
    delete = (
        *done.stale,
        *shared.delete,
        *(grouped.end if grouped else ()),
        *(pod.live for pod in observed.live if not pod.group and awaited(pod, observed) in observed.existing),
        *(pod.live for pod in breaker.surplus(observed, attempted) if not pod.group),
        *(_unneeded(model, observed, kept_revisions, desired) if done.is_complete and not world.refusals else ()),
    )
    return Course(
        findings=(ACCEPTED, *explain_refusals(world.refusals), *done.findings, *denied),
        decision=Decision(
            desired=tuple(_independent(desired, world, observed)),
            changes=(*shared.changes, *filter(None, nudges)),
            delete=tuple(_not_refused(delete, world)),
            scale_to=scaled.scale_to if scaled and not _is_scale_refused(world) else None,
            uses=shared.uses,
            upgrade=("Running" if moves else "Waiting") if is_behind else _begun(written, observed, pinned, setback),
        ),
        wanted=pinned,
        served=allowed.revision if allowed else None,
        is_told=is_told,
        stays=stays,
        num_wanted=model.spec.replicas,
        setback=setback,
        pace=pace,
        due=(*due, scaled.due if scaled else None),
        groups=grouped,
        scaled=scaled,
    )


def _is_scale_refused(world: World) -> bool:
    return any(refusal.kind == names.KIND for refusal in world.refusals)


def _explain_trial(trial: Trial, world: World, observed: Observed, num_wanted: int) -> tuple[Finding, ...]:
    """Why no replica ends for the next revision; nothing if the pods of that would be created."""
    ending = [pod.live for pod in observed.live]
    explained = explain_trial(world.denials.get(trial, ""), ending, min(len(ending), num_wanted))
    if explained is None:
        return ()
    reason, message = explained
    return (unmet("UpToDate", reason, f"no replica ends, because the next pod would be refused: {message}", {trial}),)


def _is_behind(model: NeuronModel, observed: Observed, settings: Settings, wanted: Revision | None) -> bool:
    """Whether the model is to move to another runtime image by itself. One that does not answer is left to its owner:
    it would hold up all others. One whose engine has no image any more has nowhere to go, and one that the newer
    image would refuse stays, too (`pin.refusal_by_newer`)."""
    image, fetch_image = pin.images(model, settings)
    return (
        settings.runtime_upgrade == "Rolling"
        and not observed.model.is_paused
        and not model.rollback_to
        and wanted is not None
        and bool(image)
        and not (wanted.has_images(image, fetch_image) and wanted.backend == model.spec.backend)
        and sum(pod.is_answering for pod in observed.live) >= model.spec.replicas
    )


def _is_stranded(
    model: NeuronModel, observed: Observed, settings: Settings, wanted: Revision, held: Held | None
) -> bool:
    """Whether the cluster has changed since the model was planned, so that no node for its pods is left. Long enough
    for an autoscaler to bring one: to compile again may take an hour."""
    waiting_since = [
        pod.created for pod in observed.live if pod.revision == wanted.name and pod.unscheduled is not None
    ]
    until = observed.now - timedelta(seconds=STRANDED_SECONDS)
    if held is None or observed.free is None or not any(since and since <= until for since in waiting_since):
        return False
    return is_stranded(model, settings, held, observed.free)


def _begun(model: NeuronModel, observed: Observed, wanted: Revision | None, setback: Setback | None) -> Upgrade | None:
    """How far the model is if the wanted revision differs from the one that served last by its image, or by an engine
    that is a default, alone."""
    served = observed.revisions.get(observed.model.current_revision)
    if wanted is None or served is None or observed.model.is_paused or not model.spec.replicas:
        return None
    has_images = served.has_images(wanted.image, wanted.fetch_image or served.fetch_image)
    if not pin.is_of(model, served) or (has_images and wanted.backend == served.backend):
        return None
    if setback is not None:
        return "Failed" if setback.error else None
    return "Running"


def _groups(
    model: NeuronModel, settings: Settings, observed: Observed, done: Walk, served: Revision | None, *, num_pods: int
) -> groups.GroupPlan | None:
    """What happens to groups: those of this revision, or those that a revision on one node replaces."""
    if served is None or (served.placement.nodes == 1 and not observed.groups):
        return None
    surges = {"Surge": True, "Replace": False}.get(model.spec.rollout.strategy)
    num_wanted = num_pods if served.placement.nodes > 1 else 0
    planned = groups.plan(observed, served, num_wanted, surges, settings.groups)
    if _is_told(observed, done, served):
        return planned
    return replace(planned, start=(), end=(), alive=observed.groups, needs=frozenset())


def _cleaning(
    model: NeuronModel, settings: Settings, observed: Observed, kept_revisions: Iterable[Revision]
) -> tuple[Object, ...]:
    """The CronJobs of the claims that the model's revisions use, with all their owners: each of them may apply it."""
    records = (kept.record for kept in observed.keepers.values() if kept.record is not None)
    made = cleaners(model, settings, kept_revisions, records)
    live = {name_of(obj): obj for obj in observed.shared.get("CronJob", ())}
    return tuple(with_owners(obj, live.get(name_of(obj), {})) for obj in made)


def _distinct(*revisions: Revision | None) -> Iterable[Revision]:
    return {known.name: known for known in revisions if known is not None}.values()


_NEEDED_BY_PODS = frozenset(
    {
        "ControllerRevision",
        "ServiceAccount",
        "ConfigMap",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "Secret",
        names.CLAIM_TEMPLATE,
    }
)
_MAKE_PODS = frozenset({"Deployment", "StatefulSet", names.LEADER_WORKER_SET, "Job"})


def _independent(desired: Sequence[Object], world: World, observed: Observed) -> Iterator[Object]:
    """What can be written despite the refusals of this pass: no pods while an object that they need does not exist."""
    existing = {(kind_of(child), name_of(child)) for child in observed.children}
    lacking = any(r.kind in _NEEDED_BY_PODS and (r.kind, r.name) not in existing for r in world.refusals)
    for obj in _not_refused(desired, world):
        if not (lacking and obj["kind"] in _MAKE_PODS):
            yield obj


def _not_refused(objects: Sequence[Object], world: World) -> Iterator[Object]:
    refused = {(refusal.kind, refusal.name) for refusal in world.refusals}
    return (obj for obj in objects if (obj["kind"], name_of(obj)) not in refused)


def _claims(
    model: NeuronModel, settings: Settings, observed: Observed, revisions: Iterable[Revision | None]
) -> Iterator[Object]:
    """The chart's claims that the revisions need and that do not exist. Nobody changes one later: people may enlarge
    it."""
    existing = set(map(name_of, observed.shared.get("PersistentVolumeClaim", ())))
    places = (place for known in revisions if known for place in known.places)
    return (claim for claim in own_claims(model, settings, places) if name_of(claim) not in existing)


def _is_told(observed: Observed, done: Walk, wanted: Revision) -> bool:
    """Whether the status says already that the steps before the replicas of this revision are done, and how it is
    rolled out.

    Until it does, for one pass, its replicas are not created: whoever watches the API sees first that a model is
    compiled and whether nobody will answer, then a pod that holds devices.
    """
    is_new = done.is_complete and done.known.revision is not None and wanted.name == done.known.revision.name
    if not is_new or observed.rolled == wanted.name:
        return True
    shown = {kind for kind, condition in observed.model.conditions.items() if condition.status == "True"}
    rolls = observed.model.conditions.get("UpToDate", ConditionView()).reason in _ROLLS
    return rolls and observed.model.update_revision == wanted.name and {f.condition for f in done.findings} <= shown


_ROLLS = frozenset({"UpToDate", Reason.ROLLING_OUT, Reason.ROLLED_BACK})
"""Reasons of `UpToDate` that do not come from a step."""


def _workload(
    model: NeuronModel,
    observed: Observed,
    settings: Settings,
    *,
    allowed: Allowed,
    pace: Pace,
    grouped: groups.GroupPlan | None,
) -> Iterator[Object]:
    """The replicas of one revision, with the ConfigMaps, and the templates of claims, of every revision that still has
    pods."""
    still, served = _with_pods(observed), allowed.revision
    revisions = {served.name: served, **only(observed.revisions, still)}
    config_maps = (serving.config_map(model, known.pinned, _files(known, observed)) for known in revisions.values())
    yield from {name_of(config_map): config_map for config_map in config_maps}.values()
    if settings.claims_devices:  # otherwise nothing of claims may be written, and pods of before have their template
        claimed = (claim_template(model, known.pinned.claim) for known in revisions.values() if known.pinned.claim)
        yield from {name_of(template): template for template in claimed}.values()
    if served.placement.nodes == 1:
        yield serving.deployment(model, served, allowed.num_pods, pace, nudge.of_deployment(observed).value)
    elif observed.deployment is not None and grouped is not None:  # of an earlier revision on one node
        before = observed.revisions.get(observed.deployment.revision)
        if before is not None:
            yield serving.deployment(model, before, grouped.num_earlier, pace)
    if grouped is None:
        return
    for attempt in grouped.start:
        yield group_owner(model, served, attempt, settings.groups, is_room_known=grouped.is_room_known)
    for group in grouped.alive:
        made = rest_of(model, group.live, revisions.get(group.revision, served).engine)
        # Only these two are ever repaired: a member that is gone ends the group.
        yield from (part for part in made if not group.is_whole or part["kind"] in ("NetworkPolicy", "Service"))


def _files(known: Revision, observed: Observed) -> Mapping[str, str]:
    """What the revision has beside its document. Of one that an earlier version pinned: what is there, since a
    ConfigMap is immutable, or what the engine has now."""
    if known.pinned.files or not known.engine.files:
        return known.pinned.files
    name = names.config_name(observed.model.name, known.pinned.config, {})
    kept = (child for child in observed.children if (kind_of(child), name_of(child)) == ("ConfigMap", name))
    return next(map(files_in, kept), known.engine.files)


def _adapter_list(model: NeuronModel, world: World, kept: Iterable[Revision]) -> tuple[Object, ...]:
    """The list of its adapters, as long as a kept revision serves some: pods wait for a ConfigMap that they mount."""
    is_needed = any("adapters" in known.pinned.config for known in kept)
    return (adapter_list(model, world.adapters),) if is_needed else ()


def _for_gateways(model: NeuronModel, world: World, settings: Settings) -> tuple[Object, ...]:
    """What gateways of others read, if there are any; the names of adapters where the model serves some."""
    if not settings.inference_pools.enabled:
        return ()
    routed = (adapter_names(model, world.adapters),) if model.spec.serves_adapters else ()
    return inference_pool(model, settings.inference_pools), *routed


def _unneeded(
    model: NeuronModel, observed: Observed, kept: Sequence[Revision], desired: Iterable[Object]
) -> Iterator[Object]:
    """Our revisions that nothing needs any more, with their ConfigMaps and templates of claims."""
    needed = {
        "ControllerRevision": {names.revision_name(model.name, known.name) for known in kept},
        "ConfigMap": {names.config_name(model.name, known.pinned.config, known.pinned.files) for known in kept},
        names.CLAIM_TEMPLATE: {
            names.claim_name(model.name, known.pinned.claim) for known in kept if known.pinned.claim
        },
    }
    if any("adapters" in known.pinned.config for known in kept):
        needed["ConfigMap"].add(names.adapters_name(model.name))
    needed["ConfigMap"] |= {name_of(one) for one in desired if one["kind"] == "ConfigMap"}
    for child in observed.children:
        name = name_of(child)
        if is_owned(child, observed.model.uid) and name not in needed.get(kind_of(child), {name}):
            yield child


def _kept_revisions(model: NeuronModel, observed: Observed, wanted: Revision | None) -> tuple[Revision, ...]:
    """The wanted revision, those that still have pods, the last that worked, and as many others as the model keeps."""
    in_use = {*_with_pods(observed), observed.model.current_revision, model.rollback_to}
    current = only(observed.revisions, in_use)
    if wanted is not None:
        current[wanted.name] = wanted
    others = (known for name, known in observed.revisions.items() if name not in current)
    earlier = sorted(others, key=lambda known: known.number, reverse=True)
    return (*current.values(), *earlier[: model.spec.rollout.revision_history_limit])


def _with_pods(observed: Observed) -> set[str]:
    of_pods = {pod.revision for pod in (*observed.replicas, *observed.followers)}
    return of_pods | {group.revision for group in observed.groups}


def _explain_serving(observed: Observed, course: Course) -> tuple[Finding, ...]:
    """Findings about the replicas, whether or not the steps are complete."""
    if course.served is None:
        return ()
    missing = (*(course.groups.findings if course.groups else ()), *(course.scaled.findings if course.scaled else ()))
    note = course.scaled.note if course.scaled else ""
    of_replicas = explain_replicas(observed, course.num_wanted, course.served, missing, note)
    of_revision = _explain_revision(observed, course, course.served)
    # The last of the new replicas may be starting, or waiting for one that ends.
    is_last = course.wanted is not None and observed.model.current_revision not in ("", course.wanted.name)
    of_rollout = (Reason.ROLLING_OUT, "UpToDate") if is_last else (Reason.ROLLING_OUT,)
    rolling = next((finding for finding in of_revision if finding.reason in of_rollout), None)
    if rolling is not None:
        of_replicas = tuple(_during(rolling, one, observed) for one in of_replicas)
    return (*of_replicas, *of_revision)


def _during(rolling: Finding, missing: Finding, observed: Observed) -> Finding:
    """Ready stays at RollingOut while a replica beyond those promised is missing as rollouts have it: it starts, ends,
    or waits for the devices of another that ends."""
    if missing.condition != "Ready":
        return missing
    ends = [pod.should_be_gone for pod in observed.replicas if pod.should_be_gone]
    waiting = (max((pod.created, *ends)) for pod in observed.live if pod.unscheduled is not None and pod.created)
    is_stuck = any(since < observed.now - timedelta(seconds=STUCK_SECONDS) for since in waiting)
    if missing.row.passing or (missing.reason == Reason.INSUFFICIENT_NEURON and not is_stuck):
        return replace(missing, reason=Reason.ROLLING_OUT, message=f"{rolling.message}; {missing.message}")
    return missing


def _num_before(observed: Observed) -> int:
    """Replicas of the last valid spec."""
    if observed.groups:
        return len({group.replica for group in observed.groups})
    return observed.deployment.replicas if observed.deployment else 0


def _explain_revision(observed: Observed, course: Course, served: Revision) -> tuple[Finding, ...]:
    if course.wanted is None:
        return _explain_waiting(course, served)
    wanted = course.wanted.name
    if course.setback is not None:
        text = f"revision {course.setback.to.name} serves instead of {wanted}: {course.setback.why}"
        return (unmet("UpToDate", Reason.ROLLED_BACK, text),)
    if failed := failures(observed, wanted) if wanted != served.name else ():
        text = f"revision {served.name} serves instead of {wanted}: {explain_failure(failed[-1], observed).message}"
        return (unmet("UpToDate", Reason.ROLLED_BACK, text),)
    if wanted != served.name:
        return _explain_waiting(course, served)
    updated = observed.num_updated(wanted)
    deployment = observed.deployment
    is_updated = _runs_only(observed, wanted)
    num_made = len(course.groups.alive) if course.groups else deployment.replicas if deployment is not None else -1
    is_scaled = num_made == course.num_wanted
    if observed.model.is_paused and not (is_updated and is_scaled):
        edit = f"revision {wanted} with {course.num_wanted} replicas"
        text = f"paused; {edit} rolls out once annotation {names.PAUSED_ANNOTATION} is removed"
        return (unmet("UpToDate", Reason.PAUSED, text),)
    if is_updated:
        waits = "; a newer runtime image waits for its turn" if course.decision.upgrade == "Waiting" else ""
        waits = f"; {course.stays}" if course.stays else waits
        return (met("UpToDate", f"all replicas run revision {wanted}{waits}"),)
    text = f"{updated} of {course.num_wanted} replicas run revision {wanted}"
    if observed.rolled and course.pace is not None and updated < len(observed.live):
        text += f"; {course.pace.words}"
    waiting = [pod.name for pod in observed.live if pod.revision == wanted and pod.unscheduled is not None]
    if waiting:
        text += f"; pod {waiting[0]} waits for a node, which does not count towards rollout.progressDeadlineSeconds"
    return (unmet("UpToDate", Reason.ROLLING_OUT, text),)


def _runs_only(observed: Observed, revision_name: str) -> bool:
    is_applied = observed.rolled == revision_name
    return is_applied and observed.num_updated(revision_name) == len(observed.live)


def _explain_waiting(course: Course, served: Revision) -> tuple[Finding, ...]:
    """An edit waits for a step: the reason is that of the step, unless that is about `UpToDate` itself."""
    waits = next((f for f in course.findings if f.status == "False" and f.condition not in _OF_NO_STEP), None)
    if waits is None or waits.condition == "UpToDate":
        return ()
    text = f"revision {served.name} serves until {waits.condition} is true: {waits.message}"
    return (replace(waits, condition="UpToDate", message=text),)


_OF_NO_STEP = ("Accepted", "Available")


def _status(
    observed: Observed, course: Course, findings: Sequence[Finding], page: str, accepted: str, *, is_held: bool
) -> Object:
    """`page`: with the sections about reasons. `accepted`: see `accepted_length`. `is_held`: nothing is changed in
    this pass."""
    model, shown = observed.model, course.wanted or course.served
    wanted = course.wanted.name if course.wanted else ""
    others = sorted(pod.revision for pod in observed.live if pod.is_answering and pod.revision != wanted)
    num_ready, num_wanted = sum(pod.is_answering for pod in observed.live), course.num_wanted
    current = model.current_revision or (others[0] if others else "")
    if course.served is not None and num_ready >= num_wanted > 0 and _runs_only(observed, course.served.name):
        current = course.served.name
    failed, history = model.failed_revision, model.history  # if what is wanted is not known in this pass
    if course.wanted is not None:
        error = course.setback.error if course.setback else ""
        failed, history = wanted if error else "", rollout.history_of(observed, course.wanted, current, error)
    service = next((child for child in observed.children if kind_of(child) == "Service"), None)
    built: Object = as_json(
        Status(
            observed_generation=model.generation,
            conditions=tuple(status.condition_of(finding, model, observed.now, page) for finding in findings),
            ready=f"{num_ready}/{num_wanted}",
            replicas=len(observed.live),
            ready_replicas=num_ready,
            updated_replicas=observed.num_updated(wanted),
            selector=names.selector_string(names.serving_selector(model.name)),
            url=f"http://{name_of(service)}.{model.namespace}.svc:{names.PORT}" if service else None,
            current_revision=current or None,
            update_revision=wanted or model.update_revision or None,
            failed_revision=failed or None,
            retry_key=(model.retry_key if is_held else model.retry) or None,
            history=history,
            model=status.facts_of(shown.pinned.facts) if shown else None,
            conversion=_conversion(observed, shown) if shown else None,
            draft=status.facts_of(shown.pinned.facts.draft) if shown and shown.pinned.facts.draft else None,
            accepted_length=accepted or None,
            plan=shown.pinned.plan if shown else None,
            scaling=_scaling(observed, course),
            artifacts=tuple({artifact.key: artifact for artifact in _artifacts(observed, course)}.values()),
            groups=course.groups.records if course.groups else (),
        )
    )
    return built


def _scaling(observed: Observed, course: Course) -> Scaling | None:
    scaling = course.scaled.scaling if course.scaled else observed.model.scaling
    return None if scaling == Scaling() else scaling


_DECIDING = ("currentRevision", "updateRevision", "failedRevision", "retryKey", "history", "groups", "scaling")
"""Fields of the status that decisions read. Of the conditions they only read what `_is_told` asks for, and since when
one is false, which for a new one is now."""


def _conversion(observed: Observed, shown: Revision) -> ConversionStatus | None:
    """What the Job has reported that converted the weights of a revision."""
    planned = shown.pinned.conversion
    for kept in filter(None, map(observed.keepers.get, shown.shared)) if planned else ():
        record = kept.record
        if planned and record and record.weights and record.conversion and record.weights.digest == planned.digest:
            return status.conversion_of(planned, record.weights, record.conversion)
    return None


def _artifacts(observed: Observed, course: Course) -> Iterator[ArtifactStatus]:
    """The artifacts of the wanted revision, and of the one that serves until then."""
    for known in _distinct(course.wanted, course.served):
        for name in known.shared if known.pinned.compiling else ():
            kept, job = observed.keepers.get(name), observed.jobs.get(name)
            if kept is not None and kept.record is not None and (artifact := kept.record.artifact):
                yield ArtifactStatus(key=artifact.key[:128], state="Ready", seconds=round(artifact.seconds))
            elif job is not None and job.role == names.ROLE_COMPILE and kept is None:
                yield ArtifactStatus(key=name, state="Compiling" if job.failure is None else "Failed")


def _requeue_after(
    world: World, observed: Observed, course: Course, findings: Sequence[Finding], steps: Sequence[Step]
) -> float | None:
    """When to run again although no watch event may come; None: watch events suffice."""
    silent = {Reason.LOADING, *(task.waiting.reason for step in steps for task in step.tasks)}
    is_silent = any(finding.reason in silent and finding.status == "False" for finding in findings)
    is_reporting = any(isinstance(need, LogOf) for finding in findings for need in finding.needs)
    owns_job = any(is_owned(job.live, observed.model.uid) for job in observed.jobs.values())
    retries = (next_attempt(observed, known.name) for known in _distinct(course.wanted, course.served))
    starting = (unexplained_from(pod) for pod in observed.live)
    of_groups = course.groups.due if course.groups else None
    looks = (rollout.surge_due(observed), rollout.next_look(observed), of_groups)
    times = (*retries, *starting, *looks, *course.due)
    wait = seconds_of(observed, "Ready") or seconds_of(observed, "Contested", "True")
    is_awaiting = any(isinstance(need, Exists | Trial) for finding in findings for need in finding.needs)
    delays = (
        min(max(wait / 20, MIN_RECHECK_SECONDS), RECHECK_SECONDS) if world.refusals else None,
        min(max(wait / 20, MIN_RECHECK_SECONDS), AWAITED_SECONDS) if is_awaiting else None,
        min(max(wait / 10, RECHECK_SECONDS), MAX_RECHECK_SECONDS)
        if any(needing.needs for needing in findings)
        else None,
        # Each pass repeats the refused writes.
        float(UNEXPLAINED_SECONDS) if is_silent and not world.refusals else None,
        (PROGRESS_SECONDS if owns_job else RECHECK_SECONDS) if is_reporting and not world.refusals else None,
        *((due - observed.now).total_seconds() for due in times if due and due > observed.now),
    )
    return min((delay for delay in delays if delay is not None), default=None)
