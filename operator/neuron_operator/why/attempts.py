"""The failed pods of a revision, and when the next pod may be created. Called by `pods` for the message, and by
`decide/breaker.py`, which acts on it. The failed pods themselves are the only state.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from neuron_operator.read.views import Observed, PodView

FIRST_DELAY = timedelta(seconds=10)
MAX_DELAY = timedelta(seconds=300)
"""As the kubelet waits between restarts of a container."""


def failures(observed: Observed, revision_name: str) -> tuple[PodView, ...]:
    """The failed pods of a revision since its last one that answers, oldest first."""
    pods = [pod for pod in observed.replicas if pod.revision == revision_name]
    answering = max((pod.age_key[0] for pod in pods if pod.is_answering), default=None)
    failed = (pod for pod in pods if pod.has_failed and (answering is None or pod.age_key[0] >= answering))
    return tuple(sorted(failed, key=lambda pod: pod.age_key))


def next_attempt(observed: Observed, revision_name: str) -> datetime | None:
    """When the next pod may be created: after as long as this has been failing, so that the delay doubles."""
    failed = failures(observed, revision_name)
    if not failed or failed[-1].created is None:
        return None
    first, last = failed[0].created or failed[-1].created, failed[-1].created
    return last + min(max(last - first, FIRST_DELAY), MAX_DELAY)
