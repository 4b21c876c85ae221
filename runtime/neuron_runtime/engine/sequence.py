"""The state of a request in the scheduler: its tokens, how many of them are computed, its slot and blocks.

Only the scheduler and its parts create and change it.
"""

from __future__ import annotations

import sys
from enum import Enum

import msgspec

from neuron_runtime.core import FinishReason, Request, TokenLogprobs
from neuron_runtime.engine.prefix_cache import BlockKeys

NEVER = sys.maxsize


class Phase(Enum):
    """The phase of a sequence.

    WAITING -> PREFILL -> DECODE -> LEAVING -> FINISHED. FINISHED may follow every phase (abort, stop token), DECODE may
    follow WAITING (all tokens but one are cached), and WAITING may follow PREFILL and DECODE (preemption).
    """

    WAITING = "waiting"
    """Has no slot and no blocks."""
    PREFILL = "prefill"
    """Has a slot and blocks; more than its newest token must be fed, or it is the first token."""
    DECODE = "decode"
    """Has a slot and blocks; every further row feeds one token and samples."""
    LEAVING = "leaving"
    """Its last token is in flight; the next batch releases its slot."""
    FINISHED = "finished"
    """Produces no more events. It keeps the blocks that a row in flight may still write."""


class InFlight(msgspec.Struct, frozen=True, gc=False):
    """The step of a sequence's newest row; shared by all sampling rows of the step, and by all others."""

    step: int
    samples: bool


class Sequence:
    """`order` is (priority, arrival): lower is served first and preempted last.

    The only scheduling rule: `num_computed_tokens` must catch up with `tokens`. It has plain attributes in slots,
    because every step iterates over several hundred sequences.
    """

    __slots__ = (
        "_min_length",
        "_stop_token_ids",
        "blocks",
        "capacity",
        "horizon",
        "in_flight",
        "keys",
        "max_length",
        "needs_host",
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

    def __init__(
        self, request: Request, order: tuple[int, int], block_size: int, previous: Sequence | None = None
    ) -> None:
        """previous: the sequence added before; that of another answer to the same prompt has the same keys."""
        sampling = request.sampling
        self.request = request
        self.order = order
        self.tokens = list(request.prompt_token_ids)
        like = previous.keys if previous is not None and _same_prompt(previous.request, request) else None
        self.keys: BlockKeys = BlockKeys(
            self.tokens, block_size, adapter=request.adapter, cache_salt=request.cache_salt, like=like
        )
        self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + sampling.max_tokens
        """Number of tokens at which the sequence certainly ends."""
        self.needs_host = False
        """Whether the host samples its rows beside rows that the device samples."""
        self._min_length = self.num_prompt + sampling.min_tokens
        self._stop_token_ids = sampling.stop_token_ids
        self.num_cached: int | None = None
        """Tokens that were cached when it was first admitted; None before, and without prefix caching."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Logprobs of the computed part of the prompt, if requested."""

        self.phase = Phase.WAITING
        self.in_flight: InFlight | None = None
        """The step of its newest row; None once it is applied."""
        self.row = 0
        """Its row in that step."""
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in the cache, according to applied steps."""
        self.num_scheduled_tokens = 0
        """The same after all scheduled steps, without extra tokens of a row."""
        self.slot = -1
        self.blocks: list[int] = []
        self.capacity = 0
        """Number of tokens that fit its blocks, without draft tokens."""
        self.horizon = 0
        """Number of tokens up to which a further row needs no block and cannot be the last one."""
        self.next_full = NEVER
        """Number of computed tokens at which the next block can be added to the prefix cache."""

    @property
    def samples(self) -> bool:
        """Whether its newest row is in flight and samples."""
        return self.in_flight is not None and self.in_flight.samples

    @property
    def num_unscheduled_tokens(self) -> int:
        """Number of tokens to feed next; after a row that samples, the one token that it will produce."""
        return 1 if self.samples else len(self.tokens) - self.num_scheduled_tokens

    def accept(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append sampled tokens up to the first reason to finish; returns the kept tokens and that reason."""
        tokens, known = self.tokens, len(self.tokens)
        for token in token_ids:
            tokens.append(token)
            if token in self._stop_token_ids and len(tokens) > self._min_length:
                return token_ids[: len(tokens) - known], FinishReason.STOP
            if len(tokens) >= self.max_length:
                return token_ids[: len(tokens) - known], FinishReason.LENGTH
        return token_ids, None


def _same_prompt(one: Request, other: Request) -> bool:
    return (
        len(one.prompt_token_ids) == len(other.prompt_token_ids)
        and (one.adapter, one.cache_salt) == (other.adapter, other.cache_salt)
        and one.prompt_token_ids == other.prompt_token_ids
    )
