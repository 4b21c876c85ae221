"""The seam between the engine and whatever knows the forms of answers: which tokens keep to a form.

The engine asks for a guide when a request with a form arrives, tells it the tokens that were accepted, and asks for
masks while a step runs. Guides know no rows and no slots, so a preempted sequence keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from neuron_runtime.core import Request


class Guide(Protocol):
    """The state of one answer within its form."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were accepted; called for all but the last ones of an answer."""


class Masks(NamedTuple):
    bits: memoryview
    """One mask per guide, as in `Late`. That of a failed guide allows every token."""
    failed: Sequence[int]
    """Indexes of guides that cannot go on: a limit of work was reached."""


class Guides(Protocol):
    """Makes the guides of an engine, and their masks."""

    def prepare(self, request: Request) -> Future[Guide]:
        """The guide of a request that has a form; done at once if the form is known. Never blocks.

        The future fails with InvalidRequest if the form cannot be compiled, or not within the limits.
        """

    def masks(self, guides: Sequence[Guide]) -> Masks:
        """The tokens that may follow; called once for each token of an answer. No guides have no masks."""

    def close(self) -> None:
        """End threads and processes."""
