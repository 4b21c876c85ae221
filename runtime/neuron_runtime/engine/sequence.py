"""A request's state inside the scheduler: its tokens, how many of them are computed, what it holds.

Made and changed by the scheduler alone. The one rule of scheduling reads here: `computed` must catch up with `tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from neuron_runtime.core import FinishReason, Request


class RowInFlight(NamedTuple):
    """The newest scheduled row of a sequence that is not applied yet."""

    step: int
    row: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    order: tuple[int, int]
    """(priority, arrival): who is served first and preempted last."""
    tokens: list[int]
    computed: int = 0
    """Leading tokens whose KV is in the cache, as far as steps have been applied."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    row: RowInFlight | None = None
    done: bool = False
    """Nobody waits for tokens any more: finished or aborted."""
    leaving: bool = False
    """Its slot has been (or will be, by the next batch) released; what it holds is freed after its last row."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_length(self) -> int:
        """Tokens at which the sequence ends for certain."""
        return self.num_prompt + self.request.sampling.max_tokens

    @property
    def fed(self) -> int:
        """Known tokens that are computed or being computed."""
        return self.computed + (self.row.num_tokens if self.row else 0)

    @property
    def samples(self) -> bool:
        """Whether the row in flight brings new tokens."""
        return self.row is not None and self.fed == len(self.tokens)

    @property
    def todo(self) -> int:
        """Tokens to feed next; behind a sampling row in flight it is the one newest token which that row brings."""
        return (len(self.tokens) - self.fed) or 1

    @property
    def decodes(self) -> bool:
        """One token is missing, and there is something before it: the next row is a decode row."""
        return self.todo == 1 and self.fed > 0

    def accept(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Walk sampled tokens in order up to the first reason to end; returns the tokens kept and that reason."""
        sampling = self.request.sampling
        for count, token in enumerate(token_ids, 1):
            num_before = len(self.tokens) - self.num_prompt
            self.tokens.append(token)
            if token in sampling.stop_token_ids and num_before >= sampling.min_tokens:
                return token_ids[:count], FinishReason.STOP
            if len(self.tokens) >= self.max_length:
                return token_ids[:count], FinishReason.LENGTH
        return token_ids, None
