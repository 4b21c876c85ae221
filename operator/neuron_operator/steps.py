"""The way from a manifest to replicas, as a list of steps. `decide` walks it; each step answers for one condition.

A step finds out something by a Job, or has nothing to find out. What it finds out is added to `Known` for the steps
behind it. Pure: a step renders its Job and reads the record that the Job left; it never waits.
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
from neuron_operator.revision import Revision
from neuron_operator.views import JobView, Observed
from neuron_operator.why.jobs import explain_job
from neuron_operator.world import Object, Settings


@dataclass(frozen=True)
class Known:
    """What the steps may use: the manifest, and what the steps before have found out."""

    model: NeuronModel
    settings: Settings
    next_number: int
    """Of the revision, where a new one is pinned."""
    facts: Facts | None = None
    revision: Revision | None = None

    @property
    def resolved(self) -> Facts:
        """The facts. Raises LookupError in a step that stands before the one that finds them."""
        if self.facts is None:
            raise LookupError("this step needs facts: it has to stand behind the step that resolves the model")
        return self.facts

    @property
    def pinned(self) -> Revision:
        """The revision. Raises LookupError in a step that stands before the one that pins it."""
        if self.revision is None:
            raise LookupError("this step needs the revision: it has to stand behind the step that pins it")
        return self.revision


@dataclass(frozen=True)
class Task:
    """The Job of a step."""

    waiting: Finding
    """The finding while the Job is under way; other findings about it have its condition."""
    job: Callable[[Known], Object | None]
    """The Job, named by the hash of what it runs; None: there is nothing (left) to find out."""
    learn: Callable[[Known, Record], Known | None]
    """What is known after a Job that ended well; None where its record does not say it."""


@dataclass(frozen=True)
class Step:
    finish: Callable[[Known], tuple[Known, Finding]]
    """Called once the task has nothing left to find out. Raises InvalidSpec or Unplaceable where the way ends here."""
    task: Task | None = None


@dataclass(frozen=True)
class Walk:
    """How far the steps came."""

    known: Known
    findings: tuple[Finding, ...]
    is_complete: bool = False
    job: Object | None = None
    """The Job that the next step waits for."""
    lost: JobView | None = None
    """That Job, where it ended well and its pod is gone before its record was read: it has to run again."""


def walk(steps: Sequence[Step], known: Known, observed: Observed) -> Walk:
    """Take one step after the other, up to the first whose Job has not answered or that cannot be taken."""
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
    """The finding for a manifest that cannot be met."""
    return unmet(refusal.reason.row.conditions[-1], refusal.reason, str(refusal))


# Resolve: what the model is


def _resolve_job(known: Known) -> Object | None:
    return resolve_job(known.model, known.settings) if known.facts is None else None


def _learn_facts(known: Known, record: Record) -> Known | None:
    return replace(known, facts=record.facts) if record.facts else None


def _resolved(known: Known) -> tuple[Known, Finding]:
    facts = known.resolved
    text = f"{facts.architecture}, {facts.parameters} parameters, at {facts.digest}"
    return known, met("ModelResolved", text)


# Place: where it runs, pinned for this spec


def _placed(known: Known) -> tuple[Known, Finding]:
    pinned = known.revision or revision.pin(known.model, known.resolved, known.settings, known.next_number)
    summary = pinned.pinned.plan.summary or pinned.placement.words
    return replace(known, revision=pinned), met("Placed", str(summary))


# Fetch and compile: nothing to do beforehand


def _fetched(known: Known) -> tuple[Known, Finding]:
    if known.model.fetched_by_pods:
        return known, met("WeightsReady", "serving pods download the weights themselves", "FetchedByPods")
    return known, met("WeightsReady", "the weights are part of the runtime image")


def _compiled(known: Known) -> tuple[Known, Finding]:
    backend = known.pinned.pinned.config.get("backend")
    return known, met("Compiled", f"backend {backend} compiles nothing", "NotRequired")


STEPS = (
    Step(
        _resolved,
        Task(
            waiting=unmet("ModelResolved", Reason.RESOLVING, "reading the model's configuration"),
            job=_resolve_job,
            learn=_learn_facts,
        ),
    ),
    Step(_placed),
    Step(_fetched),
    Step(_compiled),
)
"""In the order of the conditions."""
