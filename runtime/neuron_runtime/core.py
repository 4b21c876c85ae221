"""The nouns that travel down the request line: Request, Batch, StepOutput, TokenEvent, and what a backend can do.

Used by engine, backends, server and offline class. Plain frozen data, token ids only (text lives in `text/`); no
torch, no I/O, no clock.

How a batch speaks about time. While step n runs on the device, the engine already schedules step n+1. A row of
step n+1 whose sequence also has a row in step n does not know yet where it starts or which token it feeds, so it
says `after = j`: "row j of the step in flight decides". A row of a sequence with nothing in flight says it outright
(`start`, and `token` or the sequence's known tokens).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

import msgspec

NO_TOKEN = -1
"""Stands in `Rows.token` where the token is not named by the row, and in `StepOutput.token_ids` as padding."""

KNOWN = -1
"""Stands in `Rows.after` for a row that depends on no step in flight."""


class Kind(Enum):
    """What a step does. Stated in the batch, never guessed from shapes.

    A decode row feeds the one last known token of a sequence behind others and samples; any other row is a prefill row
    (a prompt, a part of one, a recomputation).
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop; already checked against the limits when it gets here.

    temperature 0 is greedy. top_k 0 means the whole vocabulary; top_p 1.0 the whole mass; min_p 0.0 no floor. The
    random number of a draw depends on (seed, choice, output position) alone, so a preempted or re-batched request
    draws the same. Penalties, bias and banned tokens change logits before temperature, as vLLM does: the repetition
    penalty counts prompt and answer, presence and frequency penalties the answer alone.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are never drawn."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), one entry per token."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer must not contain: the last token of each is never drawn behind the others."""
    seed: int = 0
    choice: int = 0
    """Which of the `n` answers to one prompt this is; separates their random numbers."""
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the answer with FinishReason.STOP, end tokens of the model included."""
    min_tokens: int = 0
    """A stop token ends the answer only when at least this many tokens were generated before it; whoever samples from
    logits draws none earlier."""
    logprobs: int | None = None
    """How many alternatives to report per token; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, the first one excepted; None: none. Such a prompt is computed whole."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed in ways that only the host knows."""
        return bool(
            self.min_p > 0.0
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued. `request_id` is unique among live requests; higher `priority` values run later."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    cache_salt: str = ""
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Added:
    """A sequence enters the backend's mirror at `slot` (a slot is free until added and after released).

    token_ids: every token known so far (the prompt, and after a preemption also the answer up to now); which of them
        are computed when is told by rows alone.
    num_prompt_tokens: how many of them are the client's, so output positions can be counted.
    blocks: KV blocks in order; with the slot layout exactly one, whose number equals the slot. Where prefixes are
        shared, those before the start of the first row hold its tokens already, and others may hold them too.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    blocks: tuple[int, ...]
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step as parallel tuples; row i feeds `num_tokens[i]` tokens of the sequence at `slot[i]`.

    start[i]: position of the first token fed; 0 where `after[i]` leaves it to the step in flight.
    token[i]: the token fed by a one-token row whose id the host knows; NO_TOKEN when the tokens are those of the
        mirror (a prompt or a chunk of it) or come from the step in flight.
    after[i]: row of the step in flight that decides start and token; KNOWN otherwise. The row then starts where that
        row ended up, and feeds the newest token of the sequence (what that row sampled, if it sampled; else the
        mirror's next known tokens).
    samples[i]: whether this row's last position is sampled.
    """

    slot: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    token: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def prefills(self) -> list[bool]:
        """Whether row i is a prefill row, see `Kind`."""
        return [
            num_tokens > 1 or not samples or (start == 0 and after == KNOWN)
            for num_tokens, samples, start, after in zip(
                self.num_tokens, self.samples, self.start, self.after, strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as a delta against the backend's slot mirror; the same value on every rank.

    Order of effects: `released`, then `kept_blocks`, then `added`, then `appended_blocks` ((slot, block) pairs), then
    the rows run. A preempted sequence is released and later added again with all its tokens.
    """

    step: int
    kind: Kind
    rows: Rows
    added: tuple[Added, ...] = ()
    appended_blocks: tuple[tuple[int, int], ...] = ()
    released: tuple[int, ...] = ()
    kept_blocks: tuple[tuple[int, int], ...] = ()
    """(slot, n) pairs: only the first n blocks of the slot stay; the rest was reserved for tokens that did not come.
    Empty unless rows may produce several tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(self.rows.num_tokens)

    @property
    def waits_for_step_in_flight(self) -> bool:
        return any(row != KNOWN for row in self.rows.after)


@dataclass(frozen=True, slots=True)
class Late:
    """What only the host could know after the previous step: per sampling row, the token ids still allowed.

    allowed_token_ids[i] belongs to row i of the batch; None leaves the row free. Made by the engine for batches that
    hold a row which needs the host; every other step samples with `late=None`.
    """

    allowed_token_ids: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the token chosen at one position, and of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1
    """1 more than the number of tokens of the vocabulary that are likelier than this one."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, row by row in the batch's order.

    token_ids[i]: the tokens sampled by row i, at most `max_tokens_per_row`; empty for rows that do not sample.
    logprobs: one tuple per row when any row asked for logprobs, else empty.
    prompt_logprobs: one tuple per row when any row fed prompt tokens of a request that wants them, else empty; of row
        i the prompt tokens at positions start + 1 to start + num_tokens, as far as the prompt goes.
    device_seconds: how long the device worked, for metrics.
    bucket: the compiled shape that the step ran in, as the backend names its shapes; empty where shapes are free.
    num_computed_tokens: tokens that the device computed, padding included; 0: no more than the batch fed.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    device_seconds: float = 0.0
    bucket: str = ""
    num_computed_tokens: int = 0


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """News of one request from one step: the new tokens, and how it ended if it did.

    With FinishReason.STOP the last of `token_ids` is the stop token itself: counted in usage, no part of the text.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first tokens: those of the prompt from its second token on, if asked for."""
    num_cached_tokens: int = 0
    first: bool = False
    """These are the first tokens of the request (marks time to first token)."""
    queue_seconds: float | None = None
    """With the first tokens: how long the request waited in the engine before a step took it up."""


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What a backend can do, as data. The scheduler reads nothing else about the device.

    The slot layout is the block layout with one block of the model's length per row (`block_size ==
    max_model_length`, `num_blocks == max_rows`, block number == slot).
    """

    max_rows: int
    """Live sequences (slots)."""
    max_model_length: int
    """Tokens of a sequence, prompt and answer together."""
    max_step_tokens: int
    """Tokens fed in one step over all rows."""
    max_prefill_rows: int = 1
    """Rows of one step that feed more than a decode row would (prompts or chunks)."""
    max_one_shot_prefill: int = 0
    """Longest prompt that one step can prefill, where buckets are shorter than max_step_tokens; 0: max_step_tokens."""
    min_prefill_tokens: int = 1
    """Shortest prompt that may be prefilled."""
    max_tokens_per_row: int = 1
    """Tokens that one decode row may produce (speculation)."""
    layout: Literal["slots", "blocks"] = "blocks"
    block_size: int = 16
    num_blocks: int = 0
    mixes_phases: bool = True
    """Prefill and decode rows may share a step."""
    chunks_prefill: bool = True
    """A prompt may be prefilled in parts."""
    min_chunk_tokens: int = 1
    """Shortest part of a prompt, the last one excepted."""
    decodes_all_live_rows: bool = False
    """Every live (prefilled, unreleased) slot must be a row of every decode step."""
    sorts_rows: bool = False
    """Rows of a decode step must come in ascending slot order."""
    lowest_slot_first: bool = False
    """A new sequence must take the lowest free slot (batch buckets need compact slots)."""
    shares_prefixes: bool = False
    """Blocks of an equal prefix may be shared between sequences."""
    max_prefix_hit: int = 0
    """Longest prefix hit in tokens; 0: no limit."""
    sampling: Literal["Device", "DeviceWithLogits", "Host"] = "Host"
    vocabulary_size: int = 0
    """Token ids are below this; 0: not known."""
    max_top_k: int = 0
    """Largest top_k; 0: no limit."""
    max_logprobs: int = 0
    """Most alternatives per token that can be reported."""
    reports_prompt_logprobs: bool = False
    """The logits of every position of a prompt can be looked at."""
    steps_in_flight: Literal[1, 2] = 1
    """2: the next step may be launched before the one before is collected."""
    token_feedback: Literal["device", "host"] = "host"
    """Who feeds a sampled token into the next step; with `host` a batch's `after` rows are filled before launch."""
    num_lookahead_tokens: int = 0
    """Positions beyond the ones fed that a row may write (draft tokens); at least `max_tokens_per_row - 1`."""

    def __post_init__(self) -> None:
        for wrong, rule in (
            (
                min(self.max_rows, self.max_model_length, self.max_step_tokens, self.num_blocks, self.block_size) < 1,
                "max_rows, max_model_length, max_step_tokens, num_blocks, block_size must be positive",
            ),
            (
                self.layout == "slots" and (self.block_size, self.num_blocks) != (self.max_model_length, self.max_rows),
                "slot layout: block_size must be max_model_length and num_blocks must be max_rows",
            ),
            (
                self.layout == "slots" and self.shares_prefixes,
                "slot layout: there is nothing to share, shares_prefixes must be off",
            ),
            (
                self.token_feedback == "host" and self.steps_in_flight != 1,
                "host feedback allows one step in flight",
            ),
            (
                self.num_lookahead_tokens < self.max_tokens_per_row - 1,
                "num_lookahead_tokens must be at least max_tokens_per_row - 1",
            ),
            (
                self.max_step_tokens < self.max_rows - 1 + (self.min_chunk_tokens if self.mixes_phases else 1),
                "max_step_tokens must hold a decode row of every sequence, or of all but one beside a chunk",
            ),
            (
                max(self.min_prefill_tokens, self.min_chunk_tokens) > self.longest_prefill,
                "min_prefill_tokens and min_chunk_tokens must fit in one step",
            ),
            (
                self.decodes_all_live_rows and (self.mixes_phases or self.chunks_prefill),
                "decodes_all_live_rows leaves no step for half a prompt: mixes_phases and chunks_prefill must be off",
            ),
        ):
            if wrong:
                raise ValueError(rule)

    @property
    def longest_prefill(self) -> int:
        """Most tokens of one sequence that one step can compute."""
        return min(self.max_one_shot_prefill or self.max_step_tokens, self.max_step_tokens)

    @property
    def longest_sequence(self) -> int:
        """Most tokens of prompt and answer together: the drafts of the last row must stay inside the model length."""
        return self.max_model_length - max(self.num_lookahead_tokens - 1, 0)

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """The largest `max_tokens` for a prompt of this length; not positive when the prompt is too long."""
        cached = self.num_blocks * self.block_size - self.num_lookahead_tokens
        return min(self.longest_sequence, cached + 1) - num_prompt_tokens

    @property
    def recomputes(self) -> bool:
        """Whether every sequence can be prefilled again, whatever it has grown to; without that none is preempted."""
        return self.chunks_prefill or self.longest_prefill >= self.longest_sequence - 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)


def fill(batch: Batch, output: StepOutput, previous: Batch) -> Batch:
    """The same batch with every `after` row resolved by `output`, the result of `previous`; for host feedback.

    A row after a sampling row starts behind all tokens that row kept and feeds the last one; a row after a chunk
    that did not sample starts behind the chunk and feeds the mirror's tokens.
    """
    if not batch.waits_for_step_in_flight:
        return batch
    rows = batch.rows
    start, token = list(rows.start), list(rows.token)
    for i, j in enumerate(rows.after):
        if j == KNOWN:
            continue
        begin, sampled = previous.rows.start[j], output.token_ids[j]
        if previous.rows.samples[j]:
            start[i] = begin + previous.rows.num_tokens[j] + len(sampled) - 1
            token[i] = sampled[-1]
        else:
            start[i] = begin + previous.rows.num_tokens[j]
    return replace(batch, rows=replace(rows, start=tuple(start), token=tuple(token), after=(KNOWN,) * len(rows.after)))
