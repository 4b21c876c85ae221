"""Limits how often pods are created that a node refuses or ends: a ReplicaSet replaces a failed pod at once, forever.

Called by `decide` for the number of pods, the revision they are of and the failed pods to delete. Pure. The failed pods
themselves are the only state: deleting them allows the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from neuron_operator.read.objects import only
from neuron_operator.read.revision import Revision
from neuron_operator.read.views import Observed, PodView
from neuron_operator.why.pods import failures, next_attempt


@dataclass(frozen=True)
class Allowed:
    """What the Deployment may ask for now."""

    revision: Revision
    num_pods: int


def steer(observed: Observed, revision: Revision, num_wanted: int) -> Allowed:
    """The wanted pods of the wanted revision, unless pods of it failed.

    Then one more pod than the nodes hold is asked for at a time, and none until `next_attempt`. Until then an earlier
    revision that has live pods serves. How often groups start is limited in `groups`.
    """
    if observed.groups or revision.placement.nodes > 1:
        return Allowed(revision, num_wanted)
    if _is_waiting(observed, revision.name):
        live = {pod.revision for pod in observed.live} - {revision.name}
        earlier = only(observed.revisions, live)
        revision = max(earlier.values(), key=lambda known: known.number, default=revision)
    if not failures(observed, revision.name) or any(pod.revision != revision.name for pod in observed.live):
        return Allowed(revision, num_wanted)
    held = sum(pod.is_admitted for pod in observed.live)
    more = 0 if _is_waiting(observed, revision.name) else max(1, len(observed.live) - held)
    return Allowed(revision, min(num_wanted, held + more))


def surplus(observed: Observed, revision_names: Iterable[str]) -> Iterator[PodView]:
    """The failed pods that are not needed: all but the first and the last failure of these revisions."""
    failed = [failures(observed, name) for name in revision_names]
    kept = [pod for pods in failed for pod in (*pods[:1], *pods[-1:])]
    return (pod for pod in observed.replicas if pod.has_failed and pod not in kept)


def _is_waiting(observed: Observed, revision_name: str) -> bool:
    due = next_attempt(observed, revision_name)
    return due is not None and observed.now < due
