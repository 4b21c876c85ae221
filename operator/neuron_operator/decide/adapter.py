"""The decision of one pass over a NeuronAdapter. Called by the rim (reconcile), as `course.decide` for NeuronModels.

Pure: the same world gives the same decision, and no manifest or object makes it raise. An adapter is read and fetched
as its model would be with another source, by the same steps, shared Jobs and keepers. It changes nothing of the model:
the model's own pass lists what `status.served` says here, and what passed the steps stays listed until an edit has too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import msgspec

from neuron_operator.api import manifest, names
from neuron_operator.api.adapter import AdapterStatus, ServedAdapter
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.fields import as_json
from neuron_operator.api.model import ModelSource, NeuronModel
from neuron_operator.api.model_status import MAX_WORD
from neuron_operator.api.reasons import ADAPTER_CONDITIONS, AdaptersOf, Finding, LogOf, Reason, met, unmet
from neuron_operator.decide import nudge
from neuron_operator.decide.course import MIN_RECHECK_SECONDS, PROGRESS_SECONDS, RECHECK_SECONDS
from neuron_operator.decide.sharing import upkeep
from neuron_operator.decide.steps import Known, Step, Task, Walk, seconds_of, walk
from neuron_operator.read.adapters import ReplicaAdapter, adapters_in
from neuron_operator.read.objects import dig, is_owned, items, kind_of, name_of, printable, text
from neuron_operator.read.records import Facts, Record
from neuron_operator.read.revision import Revision, from_object
from neuron_operator.read.views import JobView, KeeperView, Observed, PodView, observe
from neuron_operator.read.world import MAX_ADAPTER_JOBS, Decision, JobTurn, Object, Place, Settings, Told, World
from neuron_operator.render.adapters import num_before, served_of
from neuron_operator.render.jobs import fetch_adapter_job, resolve_adapter_job
from neuron_operator.render.pods import runtime_image
from neuron_operator.render.storage import adapters_claim, check_adapter, source, weights_place, words
from neuron_operator.why import status
from neuron_operator.why.jobs import AGAIN
from neuron_operator.why.pods import UNEXPLAINED_POD_SECONDS, UNEXPLAINED_SECONDS
from neuron_operator.why.refusals import explain_refusals

POLL_SECONDS = 3.0
"""How often replicas are asked at first that do not serve the adapter yet. A replica may lack all of hundreds of
adapters for days: they are asked ever more rarely, as refused writes are repeated."""
LOOK_SECONDS = 300.0
"""The same once all do. A replica that starts again changes the status of the model, which wakes its adapters."""
BELIEVED_SECONDS = 360.0
"""So long after a Job has fetched an adapter, a replica may still say what it saw before: it tries again within five
minutes."""
FOUND_SECONDS = 3600.0
"""The same after a Job that found the adapter in the claim: replica and claim may disagree for ever, as where a replica
of an earlier revision reads another claim. Each of hundreds of adapters would have a Job every few minutes."""
MAX_TURN_SECONDS = 120.0
"""So long a Job that runs counts among those that may run at a time."""
MAX_REPLICAS_SHOWN = 8
_REVISION = "ControllerRevision"

_LOST = (Reason.WEIGHTS_MISSING, Reason.CHECKSUM_MISMATCH)
"""Of a replica: the claim lacks the adapter, or has it damaged."""
_UNLISTED = frozenset({Reason.NAME_TAKEN, Reason.ADAPTERS_NOT_SERVED})
"""Refusals after which not even the version before is served. A typing error in the model takes no adapter away."""


@dataclass(frozen=True)
class _Subject:
    """An adapter that is accepted, with what it is checked against."""

    adapter: NeuronModel
    """The manifest of its model, with the source and the identity of the adapter."""
    base: NeuronModel
    claim: Place | None
    """Into which a Job fetches it; None: replicas fetch it themselves."""
    digest: str
    """Of the model."""
    key: str
    """Hash of all that decides whether it may be served."""
    key_before: str
    """The same without the backend, as versions made it that did not compare that: an upgrade reads nothing again."""
    waits: str
    """Why nothing can be read yet; empty: it can."""

    def is_of(self, served: ServedAdapter | None) -> bool:
        """Whether this is what was checked."""
        return served is not None and served.key in (self.key, self.key_before)


def decide_adapter(world: World, settings: Settings) -> Decision:
    observed = observe(world)
    if observed.model.is_deleting:
        return Decision()
    served, done, subject = served_of(world.body), None, None
    findings: list[Finding] = []
    try:
        subject = _subject(world, settings)
    except InvalidSpec as refusal:
        findings = [unmet("Accepted", refusal.reason, str(refusal))]
        served = None if refusal.reason in _UNLISTED else served
    if subject is not None:
        findings = [met("Accepted", f"model {subject.base.name} serves adapters"), *explain_refusals(world.refusals)]
        before = served.jobs if served is not None and subject.is_of(served) else ()
        if subject.waits and not before:
            findings.append(unmet("Resolved", Reason.RESOLVING, subject.waits))
        else:
            steps = _steps(subject, partial(_is_lost, _Replicas.of(world, observed, served), observed))
            done = _paced(walk(steps, Known(subject.adapter, settings, _pins_nothing, before=before), observed), world)
            findings += done.findings
            if done.is_complete:
                served = _passed(subject, done)
    contested = [one for one in findings if one.condition == "Contested"]
    findings = _in_order(findings)
    replicas = _Replicas.of(world, observed, served)
    is_before = served is not None and (subject is None or not subject.is_of(served))
    ready = _ready(findings, replicas, is_before, world)
    shown = (*findings, ready, *status.abnormal(ready), *contested)
    decision, turn = Decision(), _turn(observed, done, world) if done else None
    if subject is not None:
        done = done or Walk(Known(subject.adapter, settings, _pins_nothing), ())
        decision = _carried(observed, done, served, world)
        if turn == "Waiting":
            decision = replace(decision, desired=())
    return replace(
        decision,
        status=as_json(
            AdapterStatus(
                observed_generation=observed.model.generation,
                conditions=tuple(
                    status.condition_of(one, observed.model, world.now, settings.troubleshooting_url) for one in shown
                ),
                ready=f"{replicas.num_ready}/{replicas.num_wanted}",
                replicas=replicas.num_wanted,
                ready_replicas=replicas.num_ready,
                served=served,
                retry_key=observed.model.retry or None,
            )
        ),
        follows=False,
        job=turn,
        requeue_after_seconds=_requeue_after(world, observed, done, shown, replicas),
        needs=replicas.needs.union(*(one.needs for one in shown)),
        announcements=status.announcements(observed.model, shown),
    )


def _subject(world: World, settings: Settings) -> _Subject:
    """Raises InvalidSpec for an adapter that is refused before any step."""
    written = manifest.parse_adapter(world.body)
    if world.base is None:
        said = f"namespace {written.namespace} has no NeuronModel {written.spec.model}"
        raise InvalidSpec("spec.model", said, Reason.NO_SUCH_MODEL)
    try:
        base = manifest.parse(world.base, has_defaults=bool(settings.engine_defaults))
    except InvalidSpec as refusal:
        said = f"NeuronModel {written.spec.model} is refused: {refusal}"
        raise InvalidSpec("spec.model", said, refusal.reason) from refusal
    if not base.spec.serves_adapters:
        said = f"NeuronModel {base.name} serves no adapters: set its spec.serving.adapters.maxActive"
        raise InvalidSpec("spec.model", said, Reason.ADAPTERS_NOT_SERVED)
    if written.name in (base.spec.model.served_names or (base.name,)):
        said = f"NeuronModel {base.name} itself is served as {written.name}; give the NeuronAdapter another name"
        raise InvalidSpec("metadata.name", said, Reason.NAME_TAKEN)
    own = written.spec.credentials_secret_ref
    read = ModelSource(uri=written.spec.uri, credentials_secret_ref=own or base.spec.model.credentials_secret_ref)
    adapter = replace(
        base,
        kind=names.ADAPTER_KIND,
        name=written.name,
        uid=written.uid,
        refresh=written.refresh,
        rollback_to="",
        spec=msgspec.structs.replace(base.spec, model=read),
    )
    known = _revision(base, world)
    # A running model stays where it is when the installation names another place.
    place = (known.pinned.weights or Place()) if known else weights_place(base, settings)
    conversion = known.pinned.conversion if known else None
    base = replace(base, reads_converted=conversion is not None)
    check_adapter(adapter, own is not None, base, place)
    claim = adapters_claim(base, place)
    limits = base.spec.serving.adapters
    image = runtime_image(base, settings) if "file" in (adapter.uri.scheme, base.uri.scheme) else ""
    digest = conversion.digest if conversion else text(world.base, "status", "model", "digest")
    model = [base.spec.model.uri, base.refresh, *([digest] if claim else [])]
    checked = [as_json(read), model, written.refresh, image]
    within = [as_json(claim), limits.max_rank, as_json(limits.targets)]
    return _Subject(
        adapter,
        base,
        claim,
        digest=digest,
        key=names.digest([*checked, base.spec.backend, *within]),
        key_before=names.digest([*checked, *within]),
        waits=_waits_for(world.base, "WeightsReady" if claim else "ModelResolved"),
    )


def _revision(base: NeuronModel, world: World) -> Revision | None:
    """The one that the model serves, or comes to."""
    pinned = names.revision_name(base.name, text(world.base, "status", "updateRevision"))
    kept = (from_object(one) for one in world.of_base if (kind_of(one), name_of(one)) == (_REVISION, pinned))
    return next(filter(None, kept), None)


def _waits_for(base: Object, kind: str) -> str:
    """Why nothing can be compared with the model yet; empty: its condition is true."""
    found = next((one for one in items(base, "status", "conditions") if one.get("type") == kind), {})
    if found.get("status") == "True":
        return ""
    return f"waiting until {kind} of model {name_of(base)} is true: {text(found, 'message') or 'it is not yet'}"


def _pins_nothing(facts: Facts) -> Revision:
    raise LookupError(f"an adapter is pinned by its status, not by a revision: {facts}")


def _is_lost(replicas: _Replicas, observed: Observed, kept: KeeperView) -> bool:
    """Whether replicas miss in the claim what a Job has fetched."""
    believed = FOUND_SECONDS if kept.record is not None and kept.record.found_all else BELIEVED_SECONDS
    is_told = observed.age(kept.created).total_seconds() > believed or observed.model.wants_retry
    return is_told and replicas.miss_it


def _steps(subject: _Subject, is_lost: Callable[[KeeperView], bool]) -> tuple[Step, ...]:
    """Those of a model that an adapter needs, about its own conditions."""
    adapter, claim = subject.adapter, subject.claim
    is_fetched = claim is not None and bool(source(adapter).remotes)

    def resolve(known: Known) -> tuple[Object, ...]:
        return (resolve_adapter_job(adapter, subject.base, subject.digest, known.settings, claim),)

    def fetch(known: Known) -> tuple[Object, ...]:
        if claim is None or not is_fetched or known.adapter is None:
            return ()
        return (fetch_adapter_job(adapter, known.settings, claim, known.adapter.source_digest),)

    def resolved(known: Known) -> tuple[Known, Finding]:
        facts = known.adapter
        said = f"rank {facts.rank}, {', '.join(facts.targets)}, {_size(facts.num_bytes)}" if facts else "read"
        return known, met("Resolved", said)

    def fetched(known: Known) -> tuple[Known, Finding]:
        if claim is not None and is_fetched:
            return known, met("Fetched", f"the adapter is in {words(claim)}")
        return known, met("Fetched", "replicas fetch the adapter themselves", "FetchedByPods")

    return (
        Step(
            resolved,
            (
                Task(
                    waiting=unmet("Resolved", Reason.RESOLVING, "reading the adapter"),
                    jobs=resolve,
                    learn=lambda known, record: replace(known, adapter=record.adapter) if record.adapter else None,
                ),
            ),
        ),
        Step(
            fetched,
            (
                Task(
                    waiting=unmet("Fetched", Reason.FETCHING, "fetching the adapter"),
                    jobs=fetch,
                    learn=_learn_weights,
                    is_lost=is_lost,
                ),
            ),
        ),
    )


def _paced(done: Walk, world: World) -> Walk:
    """It waits, unless it is its turn. How its last Job ended is said on."""
    if world.has_turn or not _starts(done, world):
        return done
    *before, last = done.findings
    if AGAIN in last.message:
        return done
    most = MAX_ADAPTER_JOBS
    turn = f"waiting for its turn, the oldest first: {most.of_model} adapters of a model have a Job at a time"
    finding = replace(last, message=f"{turn}, {most.of_namespace} of a namespace")
    return replace(done, findings=(*before, finding))


def _starts(done: Walk, world: World) -> bool:
    """Whether it waits for a Job that does not exist."""
    live = {name_of(one) for one in world.shared if kind_of(one) == "Job"}
    return any(kind_of(one) == "Job" and name_of(one) not in live for one in done.desired)


def _turn(observed: Observed, done: Walk, world: World) -> JobTurn | None:
    """A Job that hangs, as for a node or a source, makes room for others after some time."""
    if _starts(done, world):
        return "Refused" if world.has_turn else "Waiting"
    jobs = filter(None, map(observed.jobs.get, map(name_of, done.desired)))
    runs = any(not job.is_finished and observed.age(job.created).total_seconds() < MAX_TURN_SECONDS for job in jobs)
    return "Running" if runs else None


def _learn_weights(known: Known, record: Record) -> Known | None:
    is_ours = record.weights and known.adapter and record.weights.digest == known.adapter.source_digest
    return replace(known, weights=record.weights) if is_ours else None


def _passed(subject: _Subject, done: Walk) -> ServedAdapter | None:
    """What replicas are told, once all steps are done."""
    facts = done.known.adapter
    if facts is None:
        return None
    return ServedAdapter(
        model=subject.base.name,
        uri=subject.adapter.spec.model.uri,
        key=subject.key,
        digest=_word(facts.digest),
        source_digest=_word(facts.source_digest) or None,
        rank=min(facts.rank, 2**31 - 1),
        targets=tuple(map(_word, facts.targets[:16])),
        bytes=facts.num_bytes,
        base_model=_word(facts.base_model) or None,
        size=_size(facts.num_bytes),
        jobs=tuple(sorted(done.used)),
    )


def _word(reported: str) -> str:
    return printable(reported)[:MAX_WORD]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def _in_order(found: Sequence[Finding]) -> list[Finding]:
    """One for every condition: of several the last that is not true; without one it waits for the first such."""
    by_condition: dict[str, Finding] = {}
    for one in found:
        if one.condition not in by_condition or one.status != "True":
            by_condition[one.condition] = one
    first = _first_unmet(by_condition.values())
    reason = first.reason if first else Reason.RESOLVING
    waits = f"waiting for {first.condition}" if first else "not checked yet"
    return [by_condition.get(kind) or Finding(kind, "Unknown", reason, waits) for kind in ADAPTER_CONDITIONS]


def _first_unmet(findings: Iterable[Finding]) -> Finding | None:
    in_order = sorted(findings, key=lambda one: (*ADAPTER_CONDITIONS, one.condition).index(one.condition))
    return next((one for one in in_order if one.status != "True"), None)


@dataclass(frozen=True)
class _Replicas:
    """Which replicas of the model serve the version that is listed."""

    num_wanted: int = 0
    num_ready: int = 0
    lacking: tuple[tuple[str, str], ...] = ()
    """Name of the pod, and why it does not serve it."""
    failed: Reason | None = None
    """Why a replica will not serve it, if one does not."""
    miss_it: bool = False
    """One looked for it in the claim in vain."""
    num_before: int = 0
    """Older adapters that leave no room for it in the list; nobody is asked then."""
    needs: frozenset[AdaptersOf] = frozenset()

    @classmethod
    def of(cls, world: World, observed: Observed, served: ServedAdapter | None) -> _Replicas:
        wanted = dig(world.base, "spec", "replicas")
        found = cls(num_wanted=wanted if isinstance(wanted, int) else 1 if world.base else 0)
        if served is None:
            return found
        # What this pass is about to write, the model could not list yet.
        if served == served_of(world.body) and (older := num_before(observed.model.name, served, _list_of(world))):
            return replace(found, num_before=older)
        for pod in observed.live:
            need = _question(pod)
            if not pod.is_answering or need is None:
                found = replace(found, lacking=(*found.lacking, (pod.name, "it does not answer yet")))
                continue
            found = replace(found, needs=found.needs | {need})
            told = world.told.get(need, Told())
            mine = (adapters_in(told.text) or {}).get(observed.model.name) if told.text else None
            if mine is not None and mine.state == "Ready" and mine.digest in ("", served.digest):
                found = replace(found, num_ready=found.num_ready + 1)
                continue
            if mine is not None and mine.state == "Failed":
                failed = _reason_of(mine)
                found = replace(found, failed=failed, miss_it=found.miss_it or failed in _LOST)
            found = replace(found, lacking=(*found.lacking, (pod.name, _why_not(told, mine))))
        return found

    @property
    def words(self) -> str:
        more = len(self.lacking) - MAX_REPLICAS_SHOWN
        shown = [f"{name}: {why}" for name, why in self.lacking[:MAX_REPLICAS_SHOWN]]
        return "; ".join((*shown, *([f"and {more} more"] if more > 0 else [])))


def _list_of(world: World) -> Object | None:
    wanted = ("ConfigMap", names.adapters_name(name_of(world.base)))
    return next((one for one in world.of_base if (kind_of(one), name_of(one)) == wanted), None)


def _question(pod: PodView) -> AdaptersOf | None:
    """None: nobody could answer."""
    return AdaptersOf(pod.name, pod.address + names.ADAPTERS_PATH) if pod.address else None


def _reason_of(mine: ReplicaAdapter) -> Reason:
    named = Reason.named(mine.reason)
    return named if named is not None and named.row.exit_codes else Reason.ADAPTER_NOT_LOADED


def _why_not(told: Told, mine: ReplicaAdapter | None) -> str:
    if told.fault:
        return f"it does not tell: {told.fault}"
    if told.text and adapters_in(told.text) is None:
        return "it does not tell, as an earlier revision without adapters"
    if mine is None:
        return "it has not read the list yet, which takes a kubelet a minute"
    if mine.state == "Ready":
        return "it serves the version before"
    return printable(mine.words)


def _ready(findings: Sequence[Finding], replicas: _Replicas, is_before: bool, world: World) -> Finding:
    """`is_before`: what is listed is the version before."""
    first = _first_unmet(findings)
    if first is not None:
        said = first.message + ("; the version before is served on" if is_before else "")
        return Finding("Ready", "False", first.reason, said, first.needs)
    if replicas.num_before:
        said = f"the list of model {name_of(world.base)} is full with {replicas.num_before} older adapters"
        return unmet("Ready", Reason.TOO_MANY_ADAPTERS, said)
    if replicas.num_ready >= replicas.num_wanted:
        if replicas.num_wanted == 0:
            return met("Ready", "the model has no replicas", "ScaledToZero")
        return met("Ready", f"{replicas.num_ready} replicas serve it")
    said = f"{replicas.num_ready} of {replicas.num_wanted} replicas serve it"
    if replicas.lacking:
        return unmet("Ready", replicas.failed or Reason.LOADING, f"{said}; {replicas.words}")
    of_model = next((one for one in items(world.base, "status", "conditions") if one.get("type") == "Ready"), {})
    return unmet("Ready", Reason.LOADING, f"{said}; the model has no others: {text(of_model, 'message') or 'not yet'}")


def _carried(observed: Observed, done: Walk, served: ServedAdapter | None, world: World) -> Decision:
    """The Jobs and keepers of the steps. What the served version needs stays while another one is read."""
    kept = frozenset(served.jobs if served is not None else ()) & observed.keepers.keys()
    shared = upkeep(done.known.model, observed, done, kept, world.used_by_others)
    refused = {(refusal.kind, refusal.name) for refusal in world.refusals}
    nudges = (nudge.change(job, observed) for job in _own_jobs(observed, done))
    return Decision(
        desired=tuple(obj for obj in done.desired if (obj["kind"], name_of(obj)) not in refused),
        changes=(*shared.changes, *filter(None, nudges)),
        delete=tuple(obj for obj in (*done.stale, *shared.delete) if (obj["kind"], name_of(obj)) not in refused),
        uses=shared.uses,
    )


def _own_jobs(observed: Observed, done: Walk) -> Iterator[JobView]:
    """Those that the adapter waits for and owns."""
    for job in filter(None, map(observed.jobs.get, map(name_of, done.desired))):
        if is_owned(job.live, observed.model.uid):
            yield job


def _requeue_after(
    world: World,
    observed: Observed,
    done: Walk | None,
    findings: Sequence[Finding],
    replicas: _Replicas,
) -> float | None:
    """When to run again although no watch event may come."""
    waited = seconds_of(observed, "Ready")
    jobs = list(_own_jobs(observed, done)) if done else []
    times = (
        done.retry_at if done else None,
        *(nudge.of_job(job, observed).due for job in jobs),
        *(
            job.created + timedelta(seconds=UNEXPLAINED_POD_SECONDS)
            for job in jobs
            if job.created is not None and not observed.pods_of(job.name)
        ),
    )
    needs = frozenset().union(*(one.needs for one in findings))
    recheck = partial(min, RECHECK_SECONDS)
    delays = (
        recheck(max(waited / 20, MIN_RECHECK_SECONDS)) if world.refusals else None,
        PROGRESS_SECONDS if any(isinstance(need, LogOf) for need in needs) else None,
        float(UNEXPLAINED_SECONDS) if jobs or needs else None,
        (recheck(max(waited / 20, POLL_SECONDS)) if replicas.lacking else LOOK_SECONDS) if replicas.needs else None,
        LOOK_SECONDS if replicas.num_before else None,
        *((due - observed.now).total_seconds() for due in times if due and due > observed.now),
    )
    return min((delay for delay in delays if delay is not None), default=None)
