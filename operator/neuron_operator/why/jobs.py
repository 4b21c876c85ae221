"""Why the Job of a step has left no record. Called by `steps`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from neuron_operator.api import names
from neuron_operator.api.reasons import Finding, LogOf, Need, Reason, unmet
from neuron_operator.read.views import JobView, Observed, PodView, Termination
from neuron_operator.render.jobs import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS
from neuron_operator.why.pods import (
    MAX_LINE,
    OOM_KILLED,
    UNEXPLAINED_POD_SECONDS,
    explain_failure,
    explain_start,
    how_it_ended,
    last_words,
)
from neuron_operator.why.refusals import explain_denial

AGAIN = f"the operator tries again, first after {MIN_RETRY_SECONDS} s, at last every {MAX_RETRY_SECONDS // 60} minutes"


def explain_job(waiting: Finding, job: JobView | None, observed: Observed) -> Finding:
    """Why a step's Job has left no record; `waiting` is the finding if nothing is wrong.

    `job` is the live Job; None: not created yet, or deleted.
    """
    if job is None:
        return _last_verdict(waiting, observed) or waiting
    pods = observed.pods_of(job.name)
    running = next((pod for pod in pods if pod.is_running), None)
    if running is None:
        return _explain_state(waiting, job, pods, observed)
    progress = _last_line(observed.logs.get(running.name, ""))
    if progress:
        finding = replace(waiting, message=f"{waiting.message}: {progress}")
    else:
        finding = _explain_state(waiting, job, pods, observed)
    return replace(finding, needs=finding.needs | {LogOf(running.name)})


def _last_line(log: str) -> str:
    """The last line of the runtime about its progress; empty if there is none. Why it ends is none: the record tells
    that, once it is known that the pod has ended."""
    lines = (line.removeprefix(names.LOG_PREFIX) for line in log.splitlines() if line.startswith(names.LOG_PREFIX))
    *_, last = ("", *lines)
    return "" if Reason.named(last.partition(":")[0]) else last.strip()[:MAX_LINE]


def _explain_state(waiting: Finding, job: JobView, pods: tuple[PodView, ...], observed: Observed) -> Finding:
    """Why a Job has left no record, by its state and that of its pods, newest first."""
    for pod in pods:
        if pod.has_failed and pod.reason:
            finding = _of_step(waiting, explain_failure(pod, observed, "jobs.resources"))
            return replace(finding, message=f"{finding.message}; {AGAIN}")
        if pod.container.ended is not None:
            return _explain_end(waiting, pod, pod.container.ended)
    if job.failure is not None:
        # Its pods are deleted before it is, and it expires once it was said how they ended.
        verdict = _last_verdict(waiting, observed) if job.expires else None
        if verdict is not None:
            return verdict
        text = f"Job {job.name} failed and left no record: {job.failure or 'no message'}; {AGAIN}"
        return replace(waiting, message=text)
    starting = _explain_start(waiting, job, pods, observed)
    if starting is not None and starting.reason != waiting.reason:
        return starting
    return _last_verdict(waiting, observed) or starting or waiting


def _of_step(waiting: Finding, finding: Finding, prefix: str = "") -> Finding:
    """What is found about a Job's pod, about the step: with that reason if the step's condition can have it."""
    shown = finding.reason if finding.row.is_of(waiting.condition) else waiting.reason
    return replace(waiting, reason=shown, message=f"{prefix}{finding.message}", needs=finding.needs)


_NEEDS_MEMORY: Mapping[str, tuple[str, Reason]] = {
    Reason.COMPILING: ("the compiler", Reason.COMPILE_OUT_OF_MEMORY),
    Reason.CONVERTING: ("the conversion", Reason.CONVERSION_FAILED),
}
"""By the reason while a Job runs, what runs out of memory, and the reason then."""


def ran_out_of_memory(end: Termination) -> bool:
    """Whether a container ended because it needed more than its limit."""
    is_said = end.exit_code in Reason.COMPILE_OUT_OF_MEMORY.row.exit_codes
    return is_said or (end.reason == OOM_KILLED and end.record is None)


def has_run_out_of_memory(waiting: Finding, observed: Observed) -> bool:
    """Whether the previous Job did, the last of those with ever more memory."""
    verdict = _last_verdict(waiting, observed)
    return verdict is not None and verdict.reason == Reason.COMPILE_OUT_OF_MEMORY


def _explain_end(waiting: Finding, pod: PodView, end: Termination) -> Finding:
    if waiting.reason in _NEEDS_MEMORY and ran_out_of_memory(end):
        what, lacks = _NEEDS_MEMORY[waiting.reason]
        limit = f"its limit is {pod.memory_limit}" if pod.memory_limit else "it has no limit"
        cure = "set jobs.resources.limits.memory to more"
        text = f"{what} ran out of memory, {limit}: {last_words(end)}; {cure}; {AGAIN}"
        return unmet(waiting.condition, lacks, text)
    reason = Reason.of_exit_code(end.exit_code)
    if reason is not None and reason.row.is_of(waiting.condition):
        return unmet(waiting.condition, reason, f"{last_words(end)}; {AGAIN}")
    cure = "; raise jobs.resources.limits.memory" if end.reason == OOM_KILLED else ""
    text = f"pod {pod.name} ended with {how_it_ended(end)} and no result: {last_words(end)}{cure}; {AGAIN}"
    return replace(waiting, message=text)


def _explain_start(waiting: Finding, job: JobView, pods: tuple[PodView, ...], observed: Observed) -> Finding | None:
    """Why the Job has not started; None if it runs or was created just now."""
    if pods:
        starting = explain_start(pods[0], observed)
        if starting is None:
            return None
        return _of_step(waiting, starting, f"Job {job.name} has not started: ")
    if observed.age(job.created) < timedelta(seconds=UNEXPLAINED_POD_SECONDS):
        return None
    warning = observed.warnings.get(job.name, "")
    _, cure = explain_denial(warning, of_job=True)
    text = f"Job {job.name} is waiting: {warning or 'its pod has not been created'}"
    return replace(waiting, message=f"{text}; {cure}" if cure else text, needs=frozenset({Need.EVENTS}))


def _last_verdict(waiting: Finding, observed: Observed) -> Finding | None:
    """How the previous Job for this generation ended, which stays until the next one ends. Of an end without a reason
    of its own its message tells."""
    before = observed.model.conditions.get(waiting.condition)
    if before is None or before.status != "False" or before.generation != observed.model.generation:
        return None
    reason = Reason.named(before.reason)
    is_end = AGAIN in before.message or (reason is not None and bool(reason.row.exit_codes))
    if reason is None or not is_end or not reason.row.is_of(waiting.condition):
        return None
    return unmet(waiting.condition, reason, before.message)
