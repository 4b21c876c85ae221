"""The operator's error tree: each class names who must act. Raised by the pure middle and by the client.

OperatorError
├── InvalidSpec          the user: condition Accepted with the field; no retry until an edit
│   └── FieldNotSupported    the same, with the cure
├── Unplaceable          the user: condition Placed with the numbers
└── ClusterFault         time or an admin: back-off per key where `retriable`, else a condition
"""

from __future__ import annotations

from neuron_operator.reasons import Reason


class OperatorError(Exception):
    """Base of every error this package raises on purpose. `str(error)` is one sentence for the person who acts."""


class InvalidSpec(OperatorError):
    """The manifest is wrong at `field` (a path as in `kubectl explain`, e.g. `spec.model.uri`)."""

    reason = Reason.INVALID_SPEC

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class FieldNotSupported(InvalidSpec):
    """The manifest asks for something that this version does not act on; `cure` says what to write instead."""

    reason = Reason.FIELD_NOT_SUPPORTED

    def __init__(self, field: str, asked: str, cure: str) -> None:
        super().__init__(field, f"{asked} is not supported by this version; {cure}")
        self.cure = cure


class Unplaceable(OperatorError):
    """No node could ever hold this model as asked; `reason` is `ModelTooLarge` or `TopologyImpossible`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClusterFault(OperatorError):
    """The API server or the network failed an operation; `retriable` says whether time may heal it."""

    def __init__(self, message: str, *, retriable: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.retriable = retriable
        self.status = status
