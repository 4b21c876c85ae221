"""The operator's errors. Raised by the pure middle and by the client.

Who must act on an InvalidSpec or Unplaceable is the user: it becomes a condition, and nothing is tried again until an
edit. On a ClusterFault time or an admin must: there is back-off per key if it is retriable, else a condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from neuron_operator.api.reasons import Need, Reason

MAX_REFUSAL = 900
"""Characters of all refusals of a manifest together: a condition's message holds them and a note."""


class OperatorError(Exception):
    """Base of every error this package raises deliberately. `str(error)` is one sentence for whoever must act."""


class InvalidSpec(OperatorError):
    """The manifest is invalid at `field`, a path such as `spec.model.uri`."""

    def __init__(self, field: str, message: str, reason: Reason = Reason.INVALID_SPEC) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = reason


class FieldNotSupported(InvalidSpec):
    """The manifest sets a value that this version does not support; `cure` says what to write instead."""

    def __init__(self, field: str, value: str, cure: str) -> None:
        super().__init__(field, f"{value} is not supported by this version; {cure}", Reason.FIELD_NOT_SUPPORTED)


class Refusals(InvalidSpec):
    """All that is wrong with a manifest, in one message; `field` is that of the first."""

    def __init__(self, refusals: Sequence[InvalidSpec]) -> None:
        OperatorError.__init__(self, _listed([str(refusal) for refusal in refusals]))
        self.field = refusals[0].field
        self.reason = refusals[0].reason


def _listed(messages: Sequence[str]) -> str:
    """The messages as sentences of one line, at least one and as many as fit, and the number of the others."""
    lengths = accumulate(len(message) + 2 for message in messages)
    shown = max(1, sum(length - 2 <= MAX_REFUSAL for length in lengths))
    more = [f"{len(messages) - shown} more are refused"] if shown < len(messages) else []
    return ". ".join([*messages[:shown], *more])


class Unplaceable(OperatorError):
    """No node can hold this model as configured; `reason` is `ModelTooLarge` or `TopologyImpossible`."""

    def __init__(self, reason: Reason, message: str, needs: Iterable[Need] = ()) -> None:
        """needs: facts with which the answer may be another one."""
        super().__init__(message)
        self.reason = reason
        self.needs = frozenset(needs)


class ClusterFault(OperatorError):
    """The API server or the network failed a request; `retriable`: a retry may succeed."""

    def __init__(self, message: str, *, retriable: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.retriable = retriable
        self.status = status


class TermOver(ClusterFault):
    """This replica's term as leader is over: it may no longer write."""
