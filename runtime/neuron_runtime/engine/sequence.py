"""A request's state inside the scheduler: its tokens, how many of them are computed, what it holds.

Made and changed by the scheduler alone. The one rule of scheduling reads here: `computed` must catch up with `tokens`.
"""

from __future__ import annotations

import sys

from neuron_runtime.core import FinishReason, Request, TokenLogprobs
from neuron_runtime.engine.prefix_cache import Keys

NEVER = sys.maxsize


class Sequence:
    """`order` is (priority, arrival): who is served first and preempted last.

    A row is named by plain attributes: several hundred sequences are walked in every step.
    """

    __slots__ = (
        "_min_length",
        "_stop_token_ids",
        "blocks",
        "capacity",
        "computed",
        "decodes",
        "done",
        "fed",
        "keys",
        "leaving",
        "max_length",
        "next_full",
        "num_cached",
        "num_prompt",
        "order",
        "prompt_logprobs",
        "reads_cache",
        "request",
        "row",
        "samples",
        "slot",
        "step",
        "tokens",
    )

    def __init__(self, request: Request, order: tuple[int, int], block_size: int) -> None:
        sampling = request.sampling
        self.request = request
        self.order = order
        self.tokens = list(request.prompt_token_ids)
        self.keys = Keys(self.tokens, block_size, adapter=request.adapter, cache_salt=request.cache_salt)
        self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + sampling.max_tokens
        """Tokens at which the sequence ends for certain."""
        self._min_length = self.num_prompt + sampling.min_tokens
        self._stop_token_ids = sampling.stop_token_ids
        self.num_cached: int | None = None
        """Tokens that were cached when it was first admitted; None before, and where nothing is shared."""
        self.reads_cache = sampling.prompt_logprobs is None
        """Log-probabilities of a prompt need all of it computed."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """As far as the prompt is computed; those who do not ask have none."""

        self.computed = 0
        """Leading tokens whose KV is in the cache, as far as steps have been applied."""
        self.fed = 0
        """Known tokens that are computed or being computed."""
        self.next_full = NEVER
        """When so many tokens are computed, a block is full that the prefix cache does not know."""
        self.decodes = False
        """One token is missing, and there is something before it: its rows are decode rows from now on."""
        self.slot = -1
        self.blocks: list[int] = []
        self.capacity = 0
        """Known tokens for which its blocks have room, drafts aside."""
        self.step = -1
        """The step of its newest row."""
        self.row = -1
        """Its row in that step; -1 once that is applied."""
        self.samples = False
        """That row is in flight and brings new tokens."""
        self.done = False
        """Nobody waits for tokens any more: finished or aborted."""
        self.leaving = False
        """Its slot has been (or will be, by the next batch) released; what it holds is freed after its last row."""

    @property
    def output(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.num_prompt :]

    @property
    def todo(self) -> int:
        """Tokens to feed next; behind a sampling row in flight it is the one newest token which that row brings."""
        return 1 if self.samples else len(self.tokens) - self.fed

    def accept(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Walk sampled tokens in order up to the first reason to end; returns the tokens kept and that reason."""
        tokens = self.tokens
        for count, token in enumerate(token_ids, 1):
            tokens.append(token)
            if token in self._stop_token_ids and len(tokens) > self._min_length:
                return token_ids[:count], FinishReason.STOP
            if len(tokens) >= self.max_length:
                return token_ids[:count], FinishReason.LENGTH
        return token_ids, None
