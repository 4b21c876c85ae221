"""The steps from a manifest to replicas. `decide` walks them; each step sets one condition.

A step may run a Job; the Job's record is added to `Known` for the later steps. Pure: a step renders its Job and reads
the record that the Job left; it never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from neuron_operator import revision
from neuron_operator.errors import InvalidSpec, Unplaceable
from neuron_operator.model import NeuronModel
from neuron_operator.objects import name_of
from neuron_operator.reasons import Finding, Reason, met, unmet
from neuron_operator.records import Facts, Record
from neuron_operator.render.jobs import resolve_job
from neuron_operator.render.storage import source
from neuron_operator.revision import Revision
from neuron_operator.views import JobView, Observed
from neuron_operator.why.jobs import explain_job
from neuron_operator.world import Object, Settings


@dataclass(frozen=True)
class Known:
    """The input of a step: the manifest, and the results of earlier steps."""

    model: NeuronModel
    settings: Settings
    next_number: int
    """Number of the revision if a new one is pinned."""
    facts: Facts | None = None
    revision: Revision | None = None

    @property
    def resolved(self) -> Facts:
        """The facts. Raises LookupError in a step before Resolve."""
        if self.facts is None:
            raise LookupError("this step needs facts: place it after Resolve")
        return self.facts

    @property
    def pinned(self) -> Revision:
        """The revision. Raises LookupError in a step before Place."""
        if self.revision is None:
            raise LookupError("this step needs the revision: place it after Place")
        return self.revision


@dataclass(frozen=True)
class Task:
    """The Job of a step."""

    waiting: Finding
    """The finding while the Job runs; other findings about the Job have the same condition."""
    job: Callable[[Known], Object | None]
    """The Job, named by the hash of its spec; None: the step needs none."""
    learn: Callable[[Known, Record], Known | None]
    """What is known after a successful Job; None if its record lacks it."""


@dataclass(frozen=True)
class Step:
    finish: Callable[[Known], tuple[Known, Finding]]
    """Called once the task is done. Raises InvalidSpec or Unplaceable if the model cannot be served."""
    task: Task | None = None


@dataclass(frozen=True)
class Walk:
    """How far the steps got."""

    known: Known
    findings: tuple[Finding, ...]
    is_complete: bool = False
    job: Object | None = None
    """The Job that the current step waits for."""
    lost: JobView | None = None
    """That Job, if it succeeded but its pod was deleted before the record was read: it has to run again."""


def walk(steps: Sequence[Step], known: Known, observed: Observed) -> Walk:
    """Take the steps in order, up to the first that waits for its Job or refuses the manifest."""
    findings: tuple[Finding, ...] = ()
    for step in steps:
        job = step.task.job(known) if step.task else None
        if step.task is not None and job is not None:
            learned = (step.task.learn(known, record) for record in observed.answers_of(name_of(job)))
            after = next((after for after in learned if after is not None), None)
            if after is None:
                return _wait(step.task, job, known, findings, observed)
            known = after
        try:
            known, finding = step.finish(known)
        except (InvalidSpec, Unplaceable) as refusal:
            return Walk(known, (*findings, refusal_of(refusal)))
        findings = (*findings, finding)
    return Walk(known, findings, is_complete=True)


def _wait(task: Task, job: Object, known: Known, findings: tuple[Finding, ...], observed: Observed) -> Walk:
    live = observed.jobs.get(name_of(job))
    is_lost = live is not None and live.is_complete and not observed.pods_of(live.name)
    waiting = explain_job(task.waiting, live, observed)
    return Walk(known, (*findings, waiting), job=job, lost=live if is_lost else None)


def refusal_of(refusal: InvalidSpec | Unplaceable) -> Finding:
    """The finding for a refused manifest."""
    return unmet(refusal.reason.row.conditions[-1], refusal.reason, str(refusal))


def _resolve_job(known: Known) -> Object | None:
    return resolve_job(known.model, known.settings) if known.facts is None else None


def _learn_facts(known: Known, record: Record) -> Known | None:
    return replace(known, facts=record.facts) if record.facts else None


def _finish_resolve(known: Known) -> tuple[Known, Finding]:
    facts = known.resolved
    text = f"{facts.architecture}, {facts.parameters} parameters, at {facts.digest}"
    return known, met("ModelResolved", text)


def _finish_place(known: Known) -> tuple[Known, Finding]:
    pinned = known.revision or revision.pin(known.model, known.resolved, known.settings, known.next_number)
    summary = pinned.pinned.plan.summary or pinned.placement.words
    return replace(known, revision=pinned), met("Placed", str(summary))


def _finish_fetch(known: Known) -> tuple[Known, Finding]:
    if source(known.model).remotes:
        return known, met("WeightsReady", "serving pods download the weights themselves", "FetchedByPods")
    return known, met("WeightsReady", f"serving pods read the weights from {known.model.spec.model.uri}")


def _finish_compile(known: Known) -> tuple[Known, Finding]:
    backend = known.pinned.pinned.config.get("backend")
    return known, met("Compiled", f"backend {backend} needs no compilation", "NotRequired")


STEPS = (
    Step(
        _finish_resolve,
        Task(
            waiting=unmet("ModelResolved", Reason.RESOLVING, "reading the model's configuration"),
            job=_resolve_job,
            learn=_learn_facts,
        ),
    ),
    Step(_finish_place),
    Step(_finish_fetch),
    Step(_finish_compile),
)
"""In the order of the conditions."""
