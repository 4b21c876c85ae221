"""How many replicas may be away at a time. Read by the Deployment, the PodDisruptionBudget and the condition Available.

Devices are scarce, so an edit replaces one replica at a time without a surge.
"""

from __future__ import annotations

MAX_SURGE = 0
MAX_UNAVAILABLE = 1


def num_promised(num_wanted: int) -> int:
    """Replicas that answer during a rollout or an eviction. Of a single replica the loss is never promised away: its
    replacement is a gap."""
    return min(num_wanted, max(1, num_wanted - MAX_UNAVAILABLE))
