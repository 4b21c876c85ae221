"""A request's state inside the scheduler: its tokens, how many of them are computed, what it holds.

Made and changed by the scheduler alone. The one rule of scheduling reads here: `computed` must catch up with `tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

from neuron_runtime.core import FinishReason, Request


class RowInFlight(NamedTuple):
    """The newest scheduled row of a sequence that is not applied yet."""

    step: int
    row: int
    num_tokens: int
    samples: bool


class Sequence:
    """`order` is (priority, arrival): who is served first and preempted last."""

    __slots__ = (
        "blocks",
        "computed",
        "done",
        "leaving",
        "max_length",
        "num_prompt",
        "order",
        "request",
        "row",
        "slot",
        "tokens",
    )

    def __init__(self, request: Request, order: tuple[int, int]) -> None:
        self.request = request
        self.order = order
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + request.sampling.max_tokens
        """Tokens at which the sequence ends for certain."""
        self.computed = 0
        """Leading tokens whose KV is in the cache, as far as steps have been applied."""
        self.slot = -1
        self.blocks: list[int] = []
        self.row: RowInFlight | None = None
        self.done = False
        """Nobody waits for tokens any more: finished or aborted."""
        self.leaving = False
        """Its slot has been (or will be, by the next batch) released; what it holds is freed after its last row."""

    @property
    def output(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.num_prompt :]

    @property
    def samples(self) -> bool:
        """Whether the row in flight brings new tokens."""
        return self.row is not None and self.row.samples

    @property
    def fed(self) -> int:
        """Known tokens that are computed or being computed."""
        return self.computed + (self.row.num_tokens if self.row else 0)

    @property
    def todo(self) -> int:
        """Tokens to feed next; behind a sampling row in flight it is the one newest token which that row brings."""
        return 1 if self.samples else len(self.tokens) - self.fed

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
