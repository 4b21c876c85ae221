"""When the controller that makes pods is to try again. It waits ever longer after each refusal, a Deployment's up to a
quarter of an hour, and nobody tells it of a larger quota or of a webhook that answers again. Called by `decide`. Pure.

A new value of an annotation makes it try at once: the Deployment controller copies it to the ReplicaSet, and a change
of a ReplicaSet or a Job ends its wait. The value, the time of the last attempt, is the only state.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from neuron_operator.api import names
from neuron_operator.read.objects import instant, written
from neuron_operator.read.views import JobView, Observed
from neuron_operator.read.world import Change

LEAST, MOST = timedelta(seconds=2), timedelta(seconds=20)
"""Between two attempts: a twentieth of the time for which pods have been refused, within these. Each is one write."""
JOB_PATIENCE = timedelta(seconds=20)
"""Until then the Job controller tries often enough, and may just be busy."""


@dataclass(frozen=True)
class Nudge:
    value: str
    """The value of the annotation; empty: pods have never been refused."""
    due: datetime | None = None
    """When it changes next; None: pods are not refused."""


def of_deployment(observed: Observed) -> Nudge:
    deployment = observed.deployment
    if deployment is None:
        return Nudge("")
    if deployment.refused_since is None:
        return Nudge(deployment.tried)
    return _nudge(deployment.tried, deployment.refused_since, observed.now)


def of_job(job: JobView, observed: Observed) -> Nudge:
    """Nobody says that its pod is refused: it has none."""
    if job.created is None or job.is_finished or job.is_suspended or observed.pods_of(job.name):
        return Nudge(job.tried)
    return _nudge(job.tried, job.created + JOB_PATIENCE, observed.now)


def change(job: JobView, observed: Observed) -> Change | None:
    """If an attempt of the Job is due."""
    nudge = of_job(job, observed)
    if nudge.value == job.tried:
        return None
    return Change(job.live, {"metadata": {"annotations": {names.TRIED_ANNOTATION: nudge.value}}}, unchanged=False)


def _nudge(tried: str, since: datetime, now: datetime) -> Nudge:
    last = instant(tried)
    if last is None or not since <= last <= now:  # of an earlier refusal, or the clock was set back
        last = since
    due = last + _pause(last - since)
    if due > now:
        return Nudge(tried, due)
    return Nudge(written(now), now + _pause(now - since))


def _pause(refused_for: timedelta) -> timedelta:
    return min(max(refused_for / 20, LEAST), MOST)
