"""The operator's errors: each class says who must act. Raised by the pure middle and by the client.

OperatorError
├── InvalidSpec          the user: condition Accepted with the field; no retry until an edit
│   └── FieldNotSupported    the same, with the cure
├── Unplaceable          the user: condition Placed with the numbers
└── ClusterFault         time or an admin: back-off per key if `retriable`, else a condition
    └── TermOver         this replica: it stops writing until it leads again
"""

from __future__ import annotations

from neuron_operator.reasons import Reason


class OperatorError(Exception):
    """Base of every error this package raises deliberately. `str(error)` is one sentence for whoever must act."""


class InvalidSpec(OperatorError):
    """The manifest is invalid at `field`, a path such as `spec.model.uri`."""

    reason = Reason.INVALID_SPEC

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class FieldNotSupported(InvalidSpec):
    """The manifest sets a value that this version does not support; `cure` says what to write instead."""

    reason = Reason.FIELD_NOT_SUPPORTED

    def __init__(self, field: str, value: str, cure: str) -> None:
        super().__init__(field, f"{value} is not supported by this version; {cure}")
        self.cure = cure


class Unplaceable(OperatorError):
    """No node can hold this model as configured; `reason` is `ModelTooLarge` or `TopologyImpossible`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClusterFault(OperatorError):
    """The API server or the network failed a request; `retriable`: a retry may succeed."""

    def __init__(self, message: str, *, retriable: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.retriable = retriable
        self.status = status


class TermOver(ClusterFault):
    """This replica's term as leader is over: it may no longer write."""
