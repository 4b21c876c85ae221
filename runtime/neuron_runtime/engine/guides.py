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

    def num_kept(self, drafts: Sequence[int]) -> int:
        """How many drafts, from the first on, keep to the form. Whoever proposes drafts cuts the others off, before a
        device sees them. The guide does not advance."""

    def forced(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens that spell what must follow: drafts that are almost always right, as a model may write
        the same text with other tokens. All of them keep to the form. The guide does not advance."""


class Masks(NamedTuple):
    bits: memoryview
    """`num_positions` masks per guide, as in `Late`. That of a failed guide allows every token."""
    failed: Sequence[int]
    """Indexes of guides that cannot go on: a limit of work was reached."""
    num_positions: int = 1
    """One more than the most drafts of a guide, or fewer if one cannot go on behind a draft: whether it fails there is
    found when its tokens are known, as without drafts."""


class Guides(Protocol):
    """Makes the guides of an engine, and their masks."""

    def prepare(self, request: Request) -> Future[Guide]:
        """The guide of a request that has a form; done at once if the form is known. Never blocks.

        The future fails with InvalidRequest if the form cannot be compiled, or not within the limits.
        """

    def masks(self, guides: Sequence[Guide], drafts: Sequence[Sequence[int]] = ()) -> Masks:
        """The tokens that may follow; called once for each step of an answer. No guides have no masks.

        drafts: of each guide, cut by `num_kept`; empty without any. A guide has a mask for the next token, and one
            behind each of its drafts; those at further positions allow every token, and nobody reads them. Guides do
            not advance.
        """

    def close(self) -> None:
        """End threads and processes."""
