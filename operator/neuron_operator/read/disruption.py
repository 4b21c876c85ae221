"""How many replicas may be away at a time. Read by the PodDisruptionBudget, the rollout and the condition Available."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_operator.api.reasons import Need

MAX_UNAVAILABLE = 1


def num_promised(num_wanted: int) -> int:
    """Replicas that answer during a rollout or an eviction. Of a single replica the loss is never promised away: its
    replacement is a gap."""
    return min(num_wanted, max(1, num_wanted - MAX_UNAVAILABLE))


@dataclass(frozen=True)
class Pace:
    """How a revision reaches the replicas."""

    surges: bool
    words: str
    """For the condition, before the rollout begins: above all, whether nobody will answer."""
    needs: frozenset[Need] = frozenset()
