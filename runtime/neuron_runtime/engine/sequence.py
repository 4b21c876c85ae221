"""The state of a request in the scheduler: its tokens, how many of them are computed, its slot and blocks.

Only the scheduler and its parts create and change it.
"""

from __future__ import annotations

import sys
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any

from neuron_runtime.core import FinishReason, Picture, Request, TokenLogprobs
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


@dataclass(slots=True, eq=False)
class Sequence:
    """The only scheduling rule: `num_computed_tokens` must catch up with `tokens`.

    It has plain attributes in slots, because every step iterates over several hundred sequences.
    """

    request: Request
    order: tuple[int, int]
    """(priority, arrival): lower is served first and preempted last."""
    block_size: InitVar[int]
    previous: InitVar[Sequence | None]
    """The sequence added before; that of another answer to the same prompt has the same keys."""
    needs_host: bool
    """Whether the host samples its rows beside rows that the device samples."""
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    max_length: int = field(init=False)
    """Number of tokens at which the sequence certainly ends."""
    keys: BlockKeys = field(init=False)
    num_cached: int | None = None
    """Tokens that were cached when it was first admitted; None before, and without prefix caching."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of the computed part of the prompt, if requested."""

    phase: Phase = Phase.WAITING
    in_flight: int | None = None
    """The step of its newest row; None once it is applied."""
    row: int = 0
    """Its row in that step."""
    samples: bool = False
    """Whether its newest row is in flight and samples."""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the cache, according to applied steps."""
    num_scheduled_tokens: int = 0
    """The same after all scheduled steps, without extra tokens of a row."""
    slot: int = -1
    place: int = 0
    """Of its adapter on the device, if it has a slot; 0: it has none."""
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0
    """Number of tokens that fit its blocks, without draft tokens."""
    horizon: int = 0
    """Number of tokens up to which a further row needs no block and cannot be the last one."""
    whole_pictures: tuple[Picture, ...] = ()
    """Those of its pictures that a row must feed whole, if the backend wants it."""
    drafting: Any = None
    """What the proposer of drafts remembers of it."""
    next_full: int = NEVER
    """Number of computed tokens at which the next block can be added to the prefix cache."""

    def __post_init__(self, block_size: int, previous: Sequence | None) -> None:
        request = self.request
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + request.sampling.max_tokens
        like = previous.keys if previous is not None and _same_prompt(previous.request, request) else None
        self.keys = BlockKeys(
            self.tokens,
            block_size,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            pictures=request.pictures,
            like=like,
        )

    @property
    def num_unscheduled_tokens(self) -> int:
        """Number of tokens to feed next; after a row that samples, the one token that it will produce."""
        return 1 if self.samples else len(self.tokens) - self.num_scheduled_tokens

    def cuts_picture(self, position: int) -> bool:
        """Whether a row that ends here would end within a picture that one row must feed."""
        return any(one.start < position < one.end for one in self.whole_pictures)

    def accept(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append sampled tokens up to the first reason to finish; returns the kept tokens and that reason.

        A sequence whose row gave no tokens has its vector, and wants nothing else.
        """
        tokens, known, sampling = self.tokens, len(self.tokens), self.request.sampling
        for token in token_ids:
            tokens.append(token)
            if token in sampling.stop_token_ids and len(tokens) > self.num_prompt + sampling.min_tokens:
                return token_ids[: len(tokens) - known], FinishReason.STOP
            if len(tokens) >= self.max_length:
                return token_ids[: len(tokens) - known], FinishReason.LENGTH
        return token_ids, None if token_ids else FinishReason.STOP


def _same_prompt(one: Request, other: Request) -> bool:
    return (
        len(one.prompt_token_ids) == len(other.prompt_token_ids)
        and (one.adapter, one.cache_salt) == (other.adapter, other.cache_salt)
        and one.prompt_token_ids == other.prompt_token_ids
        and (one.pictures is other.pictures or _placed(one) == _placed(other))
    )


def _placed(request: Request) -> list[tuple[str, int]]:
    return [(picture.digest, picture.start) for picture in request.pictures]
