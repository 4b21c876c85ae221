"""The steps from a manifest to replicas. `decide` walks them; each step sets one condition.

A step may run a Job, which models of a namespace share. The record that it leaves is first copied into a ConfigMap, the
keeper, and then added to `Known` for the later steps. Pure: a step renders its Job and reads what is there; it never
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import msgspec

from neuron_operator.api import names
from neuron_operator.api.engines import honouring
from neuron_operator.api.errors import InvalidSpec, Unplaceable
from neuron_operator.api.model import NeuronModel
from neuron_operator.api.model_status import MAX_WORD
from neuron_operator.api.reasons import Finding, Reason, met, unmet
from neuron_operator.decide.pin import as_pinned, compiling_words
from neuron_operator.place.sizing import is_quantized
from neuron_operator.read.objects import instant, name_of, rendered_hash
from neuron_operator.read.records import AdapterFacts, Facts, Record, StoredArtifact, StoredWeights
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import JobView, KeeperView, Observed, PodView
from neuron_operator.read.world import Object, Place, Settings
from neuron_operator.render.jobs import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    check_job,
    compile_jobs,
    convert_job,
    fetch_job,
    keeper,
    leaves_open,
    memory_of,
    resolve_draft_job,
    resolve_job,
    with_owners,
)
from neuron_operator.render.pods import runtime_image
from neuron_operator.render.storage import is_fetched_by_job, source, words
from neuron_operator.why.jobs import explain_job, has_run_out_of_memory, ran_out_of_memory
from neuron_operator.why.pods import MAX_LINE, awaited, last_words

LOST_SECONDS = 20
"""A pod that still exists so long after its grace period is not ended by its kubelet any more."""
DISPUTED_SECONDS = 60
"""How long a record that tells of nothing new is believed, whatever a serving pod reports."""
HOW_TO_RETRY = f"set annotation {names.RETRY_ANNOTATION} to another value"


@dataclass(frozen=True)
class Known:
    """The input of a step: the manifest, and the results of earlier steps."""

    model: NeuronModel
    settings: Settings
    pin: Callable[[Facts], Revision]
    """Decides a new revision. Raises InvalidSpec or Unplaceable."""
    tried: frozenset[str] = frozenset()
    """Names of revisions that have, or had, replicas."""
    answers: bool = False
    """Whether a replica does, which a rollout could take away."""
    digest: str = ""
    """Of the source, which facts that are read again must have; empty: any."""
    facts: Facts | None = None
    is_open: bool = False
    """Whether the facts were read while the engine was open, which may need other weights."""
    draft: Facts | None = None
    """Of the draft model."""
    revision: Revision | None = None
    weights: StoredWeights | None = None
    """What the fetch Job brought to the place of the weights."""
    converted: StoredWeights | None = None
    """What the Job made of them that converts them."""
    draft_weights: StoredWeights | None = None
    artifact: StoredArtifact | None = None
    adapter: AdapterFacts | None = None
    """Of an adapter, of which `model` has the source."""
    before: tuple[str, ...] = ()
    """Names of the Jobs whose records it used before, for the same spec."""

    @property
    def resolved(self) -> Facts:
        """The facts, with those of the draft model. Raises LookupError in a step before Resolve."""
        if self.facts is None:
            raise LookupError("this step needs facts: place it after Resolve")
        return msgspec.structs.replace(self.facts, draft=self.draft) if self.draft else self.facts

    @property
    def pinned(self) -> Revision:
        """The revision. Raises LookupError in a step before Place."""
        if self.revision is None:
            raise LookupError("this step needs the revision: place it after Place")
        return self.revision


@dataclass(frozen=True)
class Task:
    """The Jobs of a step, of which one at a time runs."""

    waiting: Finding
    """The finding while the Job runs; other findings about the Job have the same condition."""
    jobs: Callable[[Known], tuple[Object, ...]]
    """The shared Job, and those that follow if one before runs out of memory; empty: the step needs none."""
    learn: Callable[[Known, Record], Known | None]
    """What is known after a successful Job; None if its record lacks it."""
    knows: Callable[[Known], bool] | None = None
    """Whether all this is known already; for a result that the revision pins."""
    is_lasting: bool = True
    """Whether the revision needs the result as long as it lives."""
    void_after: frozenset[int] = frozenset()
    """Exit codes of reasons with which a serving pod of the revision reports that the result is no longer there."""
    is_lost: Callable[[KeeperView], bool] | None = None
    """Whether whoever needs the result reports so while it runs, of what the keeper tells of."""
    disputed: Callable[[Known, str], Finding] | None = None
    """The finding if the Job, asked again, found all of it, and a pod, whose words these are, still does not. Otherwise
    the Job is asked for ever."""


@dataclass(frozen=True)
class Step:
    finish: Callable[[Known], tuple[Known, Finding | None]]
    """Called once the tasks are done. No finding: the rollout that follows sets the condition. Raises InvalidSpec or
    Unplaceable if the model cannot be served."""
    tasks: tuple[Task, ...] = ()
    """One after the other."""


@dataclass(frozen=True)
class Walk:
    """How far the steps got."""

    known: Known
    findings: tuple[Finding, ...]
    is_complete: bool = False
    desired: tuple[Object, ...] = ()
    """What the current step waits for: its Job, or the keeper of the record that the Job left."""
    stale: tuple[Object, ...] = ()
    """Live objects of the current step that have to be made again."""
    done: frozenset[str] = frozenset()
    """Names of the Jobs of the steps that are done."""
    used: frozenset[str] = frozenset()
    """Those whose results the revision needs as long as it lives."""
    failed: JobView | None = None
    """The Job of the current step, if it ended without a record that can be used."""
    retry_seconds: int = MIN_RETRY_SECONDS
    """When that Job is made again, counted from its end."""
    retry_at: datetime | None = None
    """The same of a Job that failed and does not end, because a container of others runs on."""


def walk(steps: Sequence[Step], known: Known, observed: Observed) -> Walk:
    """Take the steps in order, up to the first that waits for its Job or refuses the manifest."""
    so_far = Walk(known, ())
    for step in steps:
        for task in step.tasks:
            known, jobs = so_far.known, task.jobs(so_far.known)
            if not jobs:
                continue
            is_known = task.knows is not None and task.knows(known)
            used, after = (frozenset[str](), known) if is_known else _kept(task, jobs, known, observed)
            if after is None:
                return _wait(task, jobs, so_far, observed)
            done, lasts = so_far.done | used | set(map(name_of, jobs)), task.is_lasting and task.knows is None
            so_far = replace(so_far, known=after, done=done, used=so_far.used | used if lasts else so_far.used)
            if dispute := _dispute(task, used, after, observed):
                return replace(so_far, findings=(*so_far.findings, dispute))
        known = so_far.known
        try:
            known, finding = step.finish(known)
        except (InvalidSpec, Unplaceable) as refusal:
            return replace(so_far, known=known, findings=(*so_far.findings, refusal_of(refusal)))
        so_far = replace(so_far, known=known, findings=(*so_far.findings, finding) if finding else so_far.findings)
    return replace(so_far, is_complete=True)


def using(revision: Revision, done: Walk, observed: Observed) -> Revision:
    """The revision, with the Jobs whose results it needs. While a step is repeated, the results of later ones stay."""
    awaited = {name_of(obj) for obj in (*done.desired, *done.stale)}
    later = () if done.is_complete else observed.keepers.keys() & revision.shared
    return msgspec.structs.replace(revision, shared=tuple(sorted(done.used.union(awaited, later))))


def _kept(task: Task, jobs: Iterable[Object], known: Known, observed: Observed) -> tuple[frozenset[str], Known | None]:
    """What a keeper tells, with its name; None if there is none, or what it tells of has vanished since. What a
    revision has used stays in use, even if the Job would be another one today."""
    before = known.revision.shared if known.revision else known.before
    for name in dict.fromkeys((*map(name_of, jobs), *before)):
        kept = observed.keepers.get(name)
        if kept is not None and kept.record is not None and not _is_void(task, kept, known, observed):
            after = task.learn(known, kept.record)
            if after is not None:
                return frozenset({name}), after
    return frozenset(), None


def _is_void(task: Task, kept: KeeperView, known: Known, observed: Observed) -> bool:
    """Whether a serving pod of the revision reported so after the record was kept, and to ask the Job again may help.

    Where the Job found everything in its store, pod and store may disagree for ever: it runs again at intervals only,
    or once.
    """
    if task.is_lost is not None and task.is_lost(kept):
        return True
    misses = any(True for _ in _misses(task, kept, known, observed))
    return misses and (observed.model.wants_retry or _still_missed(task, kept, known, observed) is None)


def _misses(task: Task, kept: KeeperView, known: Known, observed: Observed) -> Iterator[tuple[PodView, str]]:
    """The serving pods of the revision that reported so after the record was kept, with their words."""
    if kept.created is None or kept.record is None:
        return
    valid_until = kept.created + timedelta(seconds=DISPUTED_SECONDS if kept.record.found_all else 0)
    revision_name = known.revision.name if known.revision else ""
    for pod in observed.replicas:
        end = pod.container.ended
        if pod.revision == revision_name and end and end.finished is not None and end.finished > valid_until:
            reason, said = known.model.spec.runs.explain(end.exit_code, end.message)
            if reason is not None and not task.void_after.isdisjoint(reason.row.exit_codes):
                yield pod, said or last_words(end)


def _still_missed(task: Task, kept: KeeperView, known: Known, observed: Observed) -> str | None:
    """The words of a pod that has missed something since before the Job found all of it. Of one that is younger than
    the record, the store may have lost it since."""
    if task.disputed is None or kept.record is None or not kept.record.found_all:
        return None
    older = (
        said for pod, said in _misses(task, kept, known, observed) if kept.created and pod.age_key[0] < kept.created
    )
    return next(older, None)


def _dispute(task: Task, used: Iterable[str], known: Known, observed: Observed) -> Finding | None:
    keepers = filter(None, map(observed.keepers.get, used))
    said = next(filter(None, (_still_missed(task, kept, known, observed) for kept in keepers)), None)
    return task.disputed(known, said) if said and task.disputed else None


def _wait(task: Task, jobs: Sequence[Object], so_far: Walk, observed: Observed) -> Walk:
    """Wait for the Job, or for its record to be copied. Keepers and Jobs that cannot be used are made again."""
    index = _current(jobs, task.waiting, observed)
    job, before = jobs[index], jobs[:index]
    name, known = name_of(job), so_far.known
    live, kept = observed.jobs.get(name), [one for one in map(observed.keepers.get, map(name_of, jobs)) if one]
    if before:
        memory = f" with {memory_of(job)} of memory, because {memory_of(before[-1])} were not enough"
        task = replace(task, waiting=replace(task.waiting, message=task.waiting.message + memory))
        so_far = replace(so_far, done=so_far.done | set(map(name_of, before)))
    usable = (record for record in observed.answers_of(name) if task.learn(known, record) is not None)
    record = next(usable, None)
    finding = task.waiting if live and record else explain_job(task.waiting, live, observed)
    waiting = replace(so_far, findings=(*so_far.findings, finding))
    if kept:
        return replace(
            waiting, stale=(*(one.live for one in kept), *((live.live,) if live and live.is_finished else ()))
        )
    if live is None:
        return replace(waiting, desired=(job,))
    if record is not None:
        return replace(waiting, desired=(with_owners(keeper(known.model, job, record), live.live),))
    is_lost = live.is_complete and not observed.pods_of(name)
    is_outdated = not live.is_complete and rendered_hash(live.live) != rendered_hash(job)
    retry_seconds = _retry_seconds(task, observed)
    retry_at = _retry_of_held(live, retry_seconds, observed)
    is_due = retry_at is not None and (retry_at <= observed.now or observed.model.wants_retry)
    is_mended = any(awaited(pod, observed) in observed.existing for pod in observed.pods_of(name))
    if is_lost or is_outdated or is_mended or is_due or _is_stuck(live, observed):
        return replace(waiting, stale=(live.live,))
    # The end of a pod may be seen after that of its Job.
    has_ended = all(pod.container.ended for pod in observed.pods_of(name))
    failed = live if live.is_finished and has_ended else None
    if failed is not None and observed.model.wants_retry:
        return replace(waiting, stale=(live.live,))
    return replace(waiting, desired=(job,), failed=failed, retry_seconds=retry_seconds, retry_at=retry_at)


def _is_stuck(job: JobView, observed: Observed) -> bool:
    """Whether the Job waits for a pod that nobody ends, because its node is lost.

    It is made again: the Job controller keeps the pods of a Job that exists, even deleted ones. Should both run, that
    does no harm: a store is locked, and an entry appears by one rename.
    """
    ends = (pod.should_be_gone for pod in observed.pods_of(job.name))
    return not job.is_finished and any(end and (observed.now - end).total_seconds() > LOST_SECONDS for end in ends)


def _retry_of_held(job: JobView, seconds: int, observed: Observed) -> datetime | None:
    """When a Job whose pod failed, and is kept alive by a container of others such as a mesh's, is made again: the Job
    controller would call it failed at its deadline, hours later."""
    ends = (pod.container.ended for pod in observed.pods_of(job.name)[:1] if pod.kept_by is not None)
    return next((end.finished + timedelta(seconds=seconds) for end in ends if end and end.finished), None)


def _current(jobs: Sequence[Object], waiting: Finding, observed: Observed) -> int:
    """Which of the Jobs is to run: the one after the last that ran out of memory."""
    last = max((index for index, job in enumerate(jobs) if name_of(job) in observed.jobs), default=None)
    if last is None:
        return len(jobs) - 1 if has_run_out_of_memory(waiting, observed) else 0
    ends = (pod.container.ended for pod in observed.pods_of(name_of(jobs[last]))[:1])
    is_over = any(end is not None and ran_out_of_memory(end) for end in ends)
    return min(last + is_over, len(jobs) - 1)


def _retry_seconds(task: Task, observed: Observed) -> int:
    """A tenth of the time that the step has been waiting: a cure is noticed soon after a short fault, and attempts
    become rarer without a stored count."""
    waited = seconds_of(observed, task.waiting.condition)
    return int(min(max(waited / 10, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS))


def seconds_of(observed: Observed, condition: str, status: str = "False") -> float:
    """For how long the condition has had this status; 0 if it has another."""
    before = observed.model.conditions.get(condition)
    since = instant(before.since) if before is not None and before.status == status else None
    return (observed.now - since).total_seconds() if since else 0.0


def refusal_of(refusal: InvalidSpec | Unplaceable) -> Finding:
    needs = refusal.needs if isinstance(refusal, Unplaceable) else ()
    return unmet(refusal.reason.row.conditions[-1], refusal.reason, str(refusal), needs)


def _finish_resolve(known: Known) -> tuple[Known, Finding]:
    facts = known.resolved
    check_task(known.model, facts)
    message = f"{facts.architecture}, {facts.parameters} parameters, at {facts.digest}"
    if facts.vector_size and known.model.spec.serving.task == "Embed":
        message += f"; vectors of {facts.vector_size} numbers"
    if facts.sees_pictures and known.model.spec.generates:
        message += "; sees pictures"
    graphs = f"; its graphs: {facts.graphs}" if facts.graphs and known.model.spec.runs.asks_cache else ""
    if facts.draft is not None:
        check_draft(known.model, facts, facts.draft, known.settings)
        graphs += f"; draft model: {facts.draft.architecture}, {facts.draft.parameters} parameters"
        graphs += f", at {facts.draft.digest}"
    return known, met("ModelResolved", message + graphs)


MADE_FOR = {"generate": "Generate", "embed": "Embed", "rerank": "Rerank"}
"""Values of `serving.task` by the runtime's words."""
DOES = {"Generate": "generates text", "Embed": "makes vectors of texts", "Rerank": "scores pairs of texts"}


def check_task(model: NeuronModel, facts: Facts) -> None:
    """Raises InvalidSpec if the model was made for another task. A decoder makes vectors, too."""
    task, made_for = model.spec.serving.task, MADE_FOR.get(facts.task)
    if made_for is None or task == made_for or (task == "Embed" and made_for == "Generate"):
        return
    cure = "choose a model that does" if made_for == "Generate" else f"set serving.task: {made_for}"
    if made_for != "Generate" and not model.spec.runs.honours("serving.task"):
        cure += f", and engine.backend: {honouring('serving.task')}"
    text = f"{task}: {facts.architecture} {DOES[made_for]}, and this task is for a model that {DOES[task]}: {cure}"
    raise InvalidSpec("spec.serving.task", text, Reason.UNSUPPORTED_ARCHITECTURE)


def check_draft(model: NeuronModel, facts: Facts, draft: Facts, settings: Settings) -> None:
    """Raises InvalidSpec if it cannot make drafts for the model.

    Quantized weights are not converted for an engine that makes drafts with others alone: all that could be made of
    them is the model that they were made of.
    """
    path = "spec.serving.speculation.model.uri"
    if draft.vocabulary_size != facts.vocabulary_size:
        sizes = f"its vocabulary has {draft.vocabulary_size} tokens, that of the model {facts.vocabulary_size}"
        raise InvalidSpec(path, f"{sizes}: choose a draft model of the model's family", Reason.DRAFT_MISMATCH)
    known = model.spec.runs.architectures
    if model.spec.serving.speculation.method == "Draft" and known and draft.architecture not in known:
        has = f"which has {', '.join(sorted(known))}"
        text = f"{draft.architecture} has no implementation in this engine, {has}"
        raise InvalidSpec(path, text, Reason.DRAFT_MISMATCH)
    if model.spec.may_convert and is_quantized(draft) and not leaves_open(model, settings):
        stored = draft.quantization or draft.dtype
        text = f"the draft model has quantized weights ({stored}), and this engine makes drafts with others alone"
        cure = "name the model that it was quantized from, or set method: NGram"
        raise InvalidSpec(path, f"{text}: {cure}", Reason.DRAFT_MISMATCH)


def _finish_place(known: Known) -> tuple[Known, Finding]:
    pinned = known.revision or known.pin(known.resolved)
    summary = pinned.pinned.plan.summary or pinned.placement.words
    return replace(known, model=as_pinned(known.model, pinned), revision=pinned), met("Placed", str(summary))


def _learn_facts(known: Known, record: Record) -> Known | None:
    if record.facts is None:
        return None
    is_open = leaves_open(known.model, known.settings)
    return replace(known, facts=msgspec.structs.replace(record.facts, draft=None), is_open=is_open)


def _resolve_chosen_jobs(known: Known) -> tuple[Object, ...]:
    """The Job that reads quantized weights once more, if the engine that is chosen by the devices may have to convert
    them."""
    if not known.is_open or not is_quantized(known.resolved):
        return ()
    try:
        chosen = as_pinned(known.model, known.pin(known.resolved))
    except (InvalidSpec, Unplaceable):
        return ()  # which the next step tells
    return (resolve_job(chosen, known.settings, known.digest),) if chosen.spec.may_convert else ()


def _learn_chosen(known: Known, record: Record) -> Known | None:
    learned = _learn_facts(known, record)
    return replace(learned, is_open=False) if learned else None


def _resolve_draft_jobs(known: Known) -> tuple[Object, ...]:
    model = known.model
    return (resolve_draft_job(model, model.draft, known.settings),) if model.draft else ()


def _learn_draft(known: Known, record: Record) -> Known | None:
    """Draft models are never converted: quantized ones are refused where they would have to be."""
    if record.facts is None:
        return None
    return replace(known, draft=msgspec.structs.replace(record.facts, draft=None, conversion=None))


def _fetch_jobs(known: Known) -> tuple[Object, ...]:
    return _fetching(known, known.model, known.pinned.pinned.facts)


def _fetch_draft_jobs(known: Known) -> tuple[Object, ...]:
    draft, facts = known.model.draft, known.pinned.pinned.facts.draft
    return _fetching(known, draft, facts) if draft and facts else ()


def _fetching(known: Known, model: NeuronModel, facts: Facts) -> tuple[Object, ...]:
    """The Job of one source. Sources that several models have are fetched once."""
    pinned = known.pinned
    place = pinned.pinned.weights
    if place is None or not is_fetched_by_job(model, place):
        return ()
    image = pinned.image if model.spec.runs.is_ours else runtime_image(model, known.settings)
    return (fetch_job(model, known.settings, place, facts, image),)


def _learn_weights(known: Known, record: Record) -> Known | None:
    weights = record.weights
    return replace(known, weights=weights) if weights and weights.digest == known.resolved.digest else None


def _learn_draft_weights(known: Known, record: Record) -> Known | None:
    weights, draft = record.weights, known.resolved.draft
    return replace(known, draft_weights=weights) if weights and draft and weights.digest == draft.digest else None


def _convert_jobs(known: Known) -> tuple[Object, ...]:
    return convert_job(known.model, known.settings, known.pinned)


def _learn_converted(known: Known, record: Record) -> Known | None:
    weights, conversion = record.weights, known.pinned.pinned.conversion
    is_it = weights and conversion and weights.digest == conversion.digest
    return replace(known, converted=weights) if is_it else None


def _finish_fetch(known: Known) -> tuple[Known, Finding]:
    facts, place = known.resolved, known.pinned.pinned.weights
    said, reason = _where(known.model, facts, place, known.weights)
    if known.converted and place:
        made = known.pinned.pinned.conversion
        how = f", {made.words}," if made else ""
        said = f"{known.converted.bytes} bytes{how} at {known.converted.digest} are in {words(place)}"
        reason = ""
    if known.model.draft and facts.draft:
        of_draft, _ = _where(known.model.draft, facts.draft, place, known.draft_weights)
        said += f"; draft model: {of_draft}"
    return known, met("WeightsReady", said, reason)


def _where(model: NeuronModel, facts: Facts, place: Place | None, weights: StoredWeights | None) -> tuple[str, str]:
    """From where pods have the weights of one source, and the reason, if that is another than usual."""
    if place is not None and is_fetched_by_job(model, place):
        size = f"{weights.bytes} bytes" if weights else "the weights"
        return f"{size} at {facts.digest} are in {words(place)}", ""
    if source(model).remotes:
        return "serving pods download the weights themselves", "FetchedByPods"
    return f"serving pods read the weights from {model.spec.model.uri}", ""


def _compile_jobs(known: Known) -> tuple[Object, ...]:
    if known.model.spec.names_artifact:
        return ()
    return compile_jobs(known.model, known.settings, known.pinned)


def _finish_compile(known: Known) -> tuple[Known, Finding]:
    artifact = known.artifact
    if known.model.spec.is_compiled and known.model.spec.names_artifact:
        message = f"replicas load the artifact that {names.ARTIFACT_VARIABLE} of spec.engine.env names, if it fits"
        return known, met("Compiled", message, "NotRequired")
    if known.model.spec.runs.compiles == "on device" and known.pinned.pinned.compiling is None:
        minutes = known.pinned.pinned.plan.compile_minutes
        return known, met("Compiled", compiling_words(minutes), "NotRequired")
    if artifact is None:
        return known, met("Compiled", "replicas need no compiled artifact", "NotRequired")
    how = "found in its store" if artifact.reused else f"compiled in {artifact.seconds:.0f} s"
    message = f"artifact {artifact.key[:MAX_WORD]} with {artifact.bytes} bytes, {how}"
    return known, met("Compiled", message)


def _disputed_artifact(known: Known, said: str) -> Finding:
    """Pods go on to end, ever more rarely: nothing is compiled any more."""
    artifact, compiling = known.artifact, known.pinned.pinned.compiling
    key = artifact.key[:MAX_WORD] if artifact else "?"
    place = words(compiling.artifacts) if compiling else "the store"
    cure = "see that image.compile has the same libraries as image.runtime"
    if known.model.spec.runs.compiles == "on device":
        cure = "set engine.compile: Disabled, so that replicas compile on their devices"
    text = f"a Job found artifact {key} whole in {place}, and a pod that loads it still says: {said[:MAX_LINE]}; {cure}"
    again = f"or delete the artifact there and {HOW_TO_RETRY}, to have it compiled again"
    return unmet("Compiled", Reason.ARTIFACT_UNUSABLE, f"{text}, {again}")


def _check_jobs(known: Known) -> tuple[Object, ...]:
    """Nothing is at risk if no replica answers, or the rollout has begun."""
    is_needed = known.model.spec.runs.is_ours and known.answers and known.pinned.name not in known.tried
    return (check_job(known.model, known.settings, known.pinned),) if is_needed else ()


_LOST = frozenset((*Reason.CHECKSUM_MISMATCH.row.exit_codes, *Reason.WEIGHTS_MISSING.row.exit_codes))

STEPS = (
    Step(
        _finish_resolve,
        (
            Task(
                waiting=unmet("ModelResolved", Reason.RESOLVING, "reading the model's configuration"),
                jobs=lambda known: (resolve_job(known.model, known.settings, known.digest),),
                learn=_learn_facts,
                knows=lambda known: known.facts is not None,
            ),
            Task(
                waiting=unmet("ModelResolved", Reason.RESOLVING, "reading how the weights are quantized"),
                jobs=_resolve_chosen_jobs,
                learn=_learn_chosen,
                knows=lambda known: not known.is_open,
            ),
            Task(
                waiting=unmet("ModelResolved", Reason.RESOLVING, "reading the draft model's configuration"),
                jobs=_resolve_draft_jobs,
                learn=_learn_draft,
                knows=lambda known: known.draft is not None,
            ),
        ),
    ),
    Step(_finish_place),
    Step(
        _finish_fetch,
        (
            Task(
                waiting=unmet("WeightsReady", Reason.FETCHING, "fetching the weights"),
                jobs=_fetch_jobs,
                learn=_learn_weights,
                void_after=_LOST,
            ),
            Task(
                waiting=unmet("WeightsReady", Reason.FETCHING, "fetching the weights of the draft model"),
                jobs=_fetch_draft_jobs,
                learn=_learn_draft_weights,
                void_after=_LOST,
            ),
            Task(
                waiting=unmet("WeightsReady", Reason.CONVERTING, "converting the weights"),
                jobs=_convert_jobs,
                learn=_learn_converted,
                void_after=_LOST,
            ),
        ),
    ),
    Step(
        _finish_compile,
        (
            Task(
                waiting=unmet("Compiled", Reason.COMPILING, "compiling the model"),
                jobs=_compile_jobs,
                learn=lambda known, record: replace(known, artifact=record.artifact) if record.artifact else None,
                void_after=frozenset(Reason.ARTIFACT_MISSING.row.exit_codes),
                disputed=_disputed_artifact,
            ),
        ),
    ),
    Step(
        lambda known: (known, None),
        (
            Task(
                waiting=unmet(
                    "UpToDate", Reason.CHECKING, "the runtime checks the configuration before a replica ends"
                ),
                jobs=_check_jobs,
                learn=lambda known, record: known if record.command == names.ROLE_CHECK else None,
                is_lasting=False,
            ),
        ),
    ),
)
"""In the order of the conditions."""
