"""A request's state inside the scheduler: its tokens, how many of them are computed, what it holds.

Made and changed by the scheduler and its parts alone; knows no other sequence and no step but its newest.
"""

from __future__ import annotations

import sys
from enum import Enum

import msgspec

from neuron_runtime.core import FinishReason, Request, TokenLogprobs
from neuron_runtime.engine.prefix_cache import Keys

NEVER = sys.maxsize


class Phase(Enum):
    """Where a sequence stands.

    WAITING -> PREFILL -> DECODE -> LEAVING -> FINISHED. Every phase may be followed by FINISHED (abort, stop token),
    WAITING by DECODE (all tokens but one are cached), and PREFILL and DECODE by WAITING (preemption).
    """

    WAITING = "waiting"
    """Holds nothing."""
    PREFILL = "prefill"
    """Holds a slot and blocks; more than its newest token is still to be fed, or nothing is before that."""
    DECODE = "decode"
    """Holds a slot and blocks; every further row feeds one token and samples."""
    LEAVING = "leaving"
    """Its last token is in flight; its slot is released by the next batch."""
    FINISHED = "finished"
    """Nothing waits for its tokens. It holds what a row in flight may still write to."""


class InFlight(msgspec.Struct, frozen=True, gc=False):
    """The step of a sequence's newest row; one value for all rows of the step that sample, and one for the others."""

    step: int
    samples: bool


class Sequence:
    """`order` is (priority, arrival): lower is served first and preempted last.

    The one rule of scheduling: `num_computed_tokens` must catch up with `tokens`. Plain attributes in slots, because
    several hundred sequences are walked in every step.
    """

    __slots__ = (
        "_min_length",
        "_stop_token_ids",
        "blocks",
        "capacity",
        "in_flight",
        "keys",
        "max_length",
        "next_full",
        "num_cached",
        "num_computed_tokens",
        "num_prompt",
        "num_scheduled_tokens",
        "order",
        "phase",
        "prompt_logprobs",
        "request",
        "row",
        "slot",
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
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Of the prompt as far as it is computed; empty unless the request wants them."""

        self.phase = Phase.WAITING
        self.in_flight: InFlight | None = None
        """The step of its newest row; None once that is applied."""
        self.row = 0
        """Its row in that step."""
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in the cache, by the steps that are applied."""
        self.num_scheduled_tokens = 0
        """The same once every scheduled step is applied, without surplus tokens of a row."""
        self.slot = -1
        self.blocks: list[int] = []
        self.capacity = 0
        """Known tokens for which its blocks have room, drafts aside."""
        self.next_full = NEVER
        """The number of computed tokens at which its next block is full that the prefix cache does not know."""

    @property
    def output(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.num_prompt :]

    @property
    def samples(self) -> bool:
        """Its newest row is in flight and brings new tokens."""
        return self.in_flight is not None and self.in_flight.samples

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens to feed next; behind a row that samples it is the newest token, which that row brings."""
        return 1 if self.samples else len(self.tokens) - self.num_scheduled_tokens

    def accept(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append sampled tokens in order up to the first reason to end; returns the tokens kept and that reason."""
        tokens, known = self.tokens, len(self.tokens)
        for token in token_ids:
            tokens.append(token)
            if token in self._stop_token_ids and len(tokens) > self._min_length:
                return token_ids[: len(tokens) - known], FinishReason.STOP
            if len(tokens) >= self.max_length:
                return token_ids[: len(tokens) - known], FinishReason.LENGTH
        return token_ids, None
