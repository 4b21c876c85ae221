"""The seam between the scheduler and whoever proposes drafts: guesses of the tokens that follow a sequence's last one.

The scheduler asks while nothing is in flight, and tells what became of the drafts; the engine's loop tells the times of
steps. Who proposes knows no slots, blocks or limits, and never changes an answer: a backend keeps the drafts that equal
the tokens it samples itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from neuron_runtime.core import NO_TOKEN
from neuron_runtime.engine.guides import Guide
from neuron_runtime.engine.sequence import Sequence


class Drafting(Protocol):
    def wants(self, sequences: Collection[Sequence]) -> bool:
        """Whether the next step should have drafts for some of these, which decode.

        Asked while a step is in flight, which the next one then waits for, and again before drafts are proposed, when
        all tokens are known. So it costs almost nothing where drafts do not pay.
        """

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most `most` drafts, `most >= 1`, behind the last token of a sequence that has no row in flight."""

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What became of the drafts of a row, in its only step."""

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None:
        """The time of a step with `num_rows` decode rows, from the end of the step before to its own. They fed
        `num_tokens` tokens: as many as rows, or more with drafts. Prompts beside them fed others."""


MAX_IDLE_STEPS, STEPS_BETWEEN_LOOKS = 32, 8
"""After so many steps in which no form forced a token, one step in so many waits to see whether one does."""


class Guided:
    """Drafts that keep to the forms of answers: what a form forces is a draft, and others are cut where they leave it,
    before a device sees them."""

    def __init__(self, drafting: Drafting, guide_of: Mapping[str, Guide]) -> None:
        self._drafting, self._guide_of = drafting, guide_of
        self.learn, self.measure = drafting.learn, drafting.measure
        self._num_idle = 0
        """Steps with guides since one was found to force a token."""

    def wants(self, sequences: Collection[Sequence]) -> bool:
        wanted = self._drafting.wants(sequences)
        if not self._guide_of or not any(one.request.request_id in self._guide_of for one in sequences):
            return wanted
        self._num_idle += 1
        return wanted or self._num_idle < MAX_IDLE_STEPS or not self._num_idle % STEPS_BETWEEN_LOOKS

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        guide = self._guide_of.get(sequence.request.request_id)
        if guide is None:
            return self._drafting.propose(sequence, most)
        if forced := guide.forced(most):
            self._num_idle = 0
            return forced
        drafts = self._drafting.propose(sequence, most)
        return () if NO_TOKEN in drafts else drafts[: guide.num_kept(drafts)]
