"""Facts that are expensive and therefore read on demand only: a decision names those that could change it.

Used by reasons and errors, which say what could disprove them, and by whoever reads the facts (`cluster/on_demand.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Need(Enum):
    """Facts that are expensive and therefore read on demand only."""

    FREE_DEVICES = "free devices"
    EVENTS = "events"
    """Warnings about this model's Jobs, ReplicaSets and pods."""
    CLAIM_EVENTS = "events of claims"
    """All events of the namespace's PersistentVolumeClaims: why one is not bound is no warning in some cases."""


@dataclass(frozen=True)
class LogOf:
    """A need like the others: the end of the log of a Job's pod. Serving pods have none: theirs may quote requests."""

    pod: str


@dataclass(frozen=True)
class Exists:
    """A need like the others: whether an object that a pod waits for exists by now. Of a Secret no more is learned."""

    kind: Literal["Secret", "ConfigMap"]
    name: str


Needed = Need | LogOf | Exists
