"""The data types of the request path: Request, Batch, StepOutput, TokenEvent, and BackendLimits.

Used by engine, backends, server and offline class. Plain frozen data with token ids only (text is in `text/`); no
torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

NO_TOKEN = -1
"""In `Rows.token`: the row does not name its token. In `StepOutput.token_ids`: padding."""

MAX_LOGPROBS = 20
"""Alternatives per token that backends report at most, as OpenAI's API."""

KNOWN = -1
"""In `Rows.after`: the row does not depend on a step in flight."""


Task = Literal["generate", "embed", "rerank"]
"""What a server computes: text, a vector of each text, or a score of each pair of texts, which is a vector of one."""
TASKS: tuple[Task, ...] = get_args(Task)


class StepKind(Enum):
    """What a step does: it has prefill rows, decode rows, or both. `Batch.num_prefills` says which rows are which."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


FormKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]


class Form(msgspec.Struct, frozen=True):
    """What the text of an answer must be. Admission has checked size and syntax; the engine compiles it.

    Equal forms have equal texts, so that they are compiled once.
    """

    kind: FormKind
    text: str
    """A JSON schema, a regular expression, a JSON list of strings, a grammar (Lark or GBNF), or structural tags in
    JSON."""
    behind: str = ""
    """The form begins behind this mark, the end of the model's reasoning; empty: it is the whole answer."""
    opening: str = ""
    """With `behind`: reasoning is optional and begins with this mark; empty: the answer begins inside it."""
    field: str = ""
    """The request's field that asks for it, for errors."""


FORM_BYTES = 8 << 20
"""Memory at most for a compiled form with the automaton that its answers share."""
FORMS_BYTES = 64 << 20
"""Memory for the forms that an engine keeps or compiles, beside those of rows."""
MAX_ROW_FORMS = 32
"""Rows whose forms have memory. With more rows, so many different forms and those of `FORMS_BYTES` are answered at a
time; further ones wait."""


def grammar_bytes(max_rows: int) -> int:
    """The memory that forms may take in an engine, with those that are just being compiled."""
    return FORMS_BYTES + FORM_BYTES * min(max_rows, MAX_ROW_FORMS)


class Acts(Enum):
    """What acts on a sampling parameter where the device samples. Where the host samples, the host does."""

    DEVICE = "device"
    HOST = "host"
    """The host, which then samples the row from its logits."""
    DRAW = "draw"
    """The host, but only for a row that is not greedy: random numbers of a device cannot be chosen."""
    PROMPT = "prompt"
    """The host, from the logits of every position of a prompt, which no compiled Neuron graph returns."""
    TOKENS = "tokens"
    """The host, which needs only the tokens."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop; admission has checked all values.

    temperature 0 is greedy. top_k 0 means the whole vocabulary; top_p 1.0 the whole mass; min_p 0.0 no minimum. The
    random number of a draw depends only on (seed, choice, output position), so a preempted or re-batched request
    draws the same tokens. Penalties, bias and banned tokens change logits before temperature, as in vLLM: the
    repetition penalty counts prompt and output, presence and frequency penalties only the output.

    Each parameter says what acts on it; its default has no effect.
    """

    max_tokens: Annotated[int, Acts.TOKENS] = 16
    temperature: Annotated[float, Acts.DEVICE] = 1.0
    top_k: Annotated[int, Acts.DEVICE] = 0
    top_p: Annotated[float, Acts.DEVICE] = 1.0
    min_p: Annotated[float, Acts.HOST] = 0.0
    """Tokens below this fraction of the likeliest token's probability are never drawn."""
    repetition_penalty: Annotated[float, Acts.HOST] = 1.0
    presence_penalty: Annotated[float, Acts.HOST] = 0.0
    frequency_penalty: Annotated[float, Acts.HOST] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], Acts.HOST] = ()
    """(token id, bias added to its logit), one entry per token."""
    allowed_token_ids: Annotated[tuple[int, ...] | None, Acts.HOST] = None
    """The only tokens that may be drawn; None: all."""
    form: Annotated[Form | None, Acts.HOST] = None
    """What the answer must be; the engine passes masks of the tokens that keep to it, see `Late`."""
    bad_words: Annotated[tuple[tuple[int, ...], ...], Acts.HOST] = ()
    """Token sequences that the output must not contain: the last token of each is never drawn after the others."""
    seed: Annotated[int, Acts.DRAW] = 0
    seeded: Annotated[bool, Acts.DRAW] = False
    """The client chose the seed, so its draws must be repeatable; otherwise we drew the seed, and any draw will do."""
    choice: Annotated[int, Acts.TOKENS] = 0
    """Index of this answer among the `n` answers to a prompt; separates their random numbers."""
    stop_token_ids: Annotated[frozenset[int], Acts.TOKENS] = frozenset()
    """Token ids that end the output with FinishReason.STOP, including the model's end tokens."""
    min_tokens: Annotated[int, Acts.HOST] = 0
    """A stop token ends the output only after at least this many tokens; backends that sample from logits do not draw
    one earlier."""
    logprobs: Annotated[int | None, Acts.HOST] = None
    """Number of alternatives to report per token; None: no logprobs."""
    prompt_logprobs: Annotated[int | None, Acts.PROMPT] = None
    """The same for prompt tokens except the first. The prefix cache is not used for such a prompt."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def acts_of(parameters: type) -> dict[str, Acts]:
    """What acts on each field. Raises TypeError for one that does not say it."""
    hints = get_type_hints(parameters, include_extras=True)
    acts = {
        name: one for name, hint in hints.items() for one in getattr(hint, "__metadata__", ()) if isinstance(one, Acts)
    }
    if silent := hints.keys() - acts.keys():
        raise TypeError(f"{parameters.__name__}: {', '.join(sorted(silent))}: annotate with what `Acts` on it")
    return acts


ACTS = acts_of(Sampling)
_ON_HOST = tuple((one.name, one.default) for one in fields(Sampling) if ACTS[one.name] is Acts.HOST)


class Picture(msgspec.Struct, frozen=True, gc=False):
    """A picture of a prompt: `num_tokens` of its tokens, from `start` on, stand for it.

    digest: of what the model's encoder reads; pictures with equal digests have equal features.
    pixels: what the encoder reads, as the model's own processor made it: a safetensors document, whose tensors have the
        processor's names and one picture in their first dimension.
    """

    digest: str
    start: int
    num_tokens: int
    pixels: memoryview

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue. `request_id` is unique among live requests; higher `priority` values run later."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """Digest of the adapter that it wants; empty: the base model."""
    second_at: int = 0
    """The first token of the second text of a pair; 0: there is one text."""
    pictures: tuple[Picture, ...] = ()
    """In the order of the prompt."""


class Added(msgspec.Struct, frozen=True, gc=False):
    """A sequence enters the backend's mirror at `slot`, which is free until added and after released.

    token_ids: all tokens known so far (the prompt, and after a preemption also the output); rows determine which of
        them are computed when.
    num_prompt_tokens: how many of them belong to the prompt, for output positions.
    blocks: KV blocks in order; with the slot layout exactly one, whose number equals the slot. If prefixes are shared,
        the blocks before the start of the first row are computed already and may belong to other sequences too.
    adapter: the place whose adapter computes the sequence, see `Batch.adapters`; 0: the base model.
    second_at: the first token of the second text of a pair; 0: there is one text.
    pictures: those of the prompt. The backend computes the features of each once, and keeps them until the rows have
        fed all its tokens.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    blocks: tuple[int, ...]
    adapter: int = 0
    second_at: int = 0
    pictures: tuple[Picture, ...] = ()


class Rows(msgspec.Struct, frozen=True, gc=False):
    """The rows of one step as parallel tuples; row i feeds `num_tokens[i]` tokens of the sequence at `slot[i]`.

    start[i]: position of the first token fed; 0 if `after[i]` refers to the step in flight.
    token[i]: the first token fed by a decode row, or the only one of a prefill row, whose id the host knows; NO_TOKEN
        if the tokens are in the mirror (a prompt or a chunk of it) or come from the step in flight.
    after[i]: the row of the step in flight that determines start and token, which nobody knows when this step is
        scheduled; else KNOWN. The row then starts where that row ended, and feeds the newest token of the sequence (the
        sampled one, or, if that row did not sample, the mirror's next known tokens).
    samples[i]: whether the row's last position is sampled or, of a backend that computes vectors, whether the row gives
        one.
    drafts[i]: guesses of the tokens behind the one that a decode row feeds, which it feeds too; `()` for a row without.
        The row samples at each position up to the first draft that differs from the token sampled there. NO_TOKEN: the
        device makes this draft. Empty if no row has any. A row with drafts never depends on the step in flight, and no
        row depends on it.
    """

    slot: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    token: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.slot)


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One step as a delta to the backend's slot mirror; equal on every rank.

    Order of effects: `released`, then `adapters`, then `added`, then `appended_blocks` ((slot, block) pairs), then the
    rows run. A preempted sequence is released and later added again with all its tokens.
    """

    step: int
    rows: Rows
    num_prefills: int = 0
    """The last rows prefill, so many of them: each feeds a prompt, a part of one, or a recomputation. Every row before
    them decodes: it feeds the last token of a started sequence, with its drafts, and samples. Backends do not guess it
    from lengths."""
    added: tuple[Added, ...] = ()
    appended_blocks: tuple[tuple[int, int], ...] = ()
    released: tuple[int, ...] = ()
    adapters: tuple[tuple[int, str], ...] = ()
    """(place, digest) pairs: from this step on the place, from 1 to `max_adapters`, has the weights of this adapter.
    No live sequence, and no row of the step in flight, has the place's adapter before it."""

    @property
    def num_decodes(self) -> int:
        return len(self.rows) - self.num_prefills

    @property
    def kind(self) -> StepKind:
        if not self.num_prefills:
            return StepKind.DECODE
        return StepKind.MIXED if self.num_decodes else StepKind.PREFILL

    @property
    def num_tokens(self) -> int:
        return sum(self.rows.num_tokens)

    @property
    def waits_for_step_in_flight(self) -> bool:
        return any(row != KNOWN for row in self.rows.after)


class Late(msgspec.Struct, frozen=True, gc=False):
    """Data that the host knows only after the previous step: masks of the tokens that rows may sample.

    The engine creates it for batches with a row that keeps to a form; all other steps sample with `late=None`. It
    travels to other ranks.
    """

    rows: tuple[int, ...]
    """The rows of the batch that have masks, ascending; the others are not restricted."""
    masks: memoryview
    """`[rows, num_positions, bytes]`: bit `t % 8` of byte `t // 8` is 1 if token t is allowed; at least one is. Tokens
    beyond the mask are not allowed."""
    num_positions: int = 1
    """Masks per row: one for the next token, then one behind each draft, as if all before were right. A row may
    produce at most so many tokens, also if it has more drafts; one with fewer has masks that nobody reads."""

    def allows(self, at: int, token_ids: Sequence[int]) -> bool:
        """Whether row `rows[at]` may produce these tokens."""
        size = len(self.masks) // (len(self.rows) * self.num_positions)
        return len(token_ids) <= self.num_positions and all(
            token // 8 < size and self.masks[place * size + token // 8] >> token % 8 & 1
            for place, token in enumerate(token_ids, at * self.num_positions)
        )

    def of_rows(self, rows: Iterable[int]) -> dict[int, memoryview]:
        """By index in `rows`, those of them that have masks; each with its own masks, one behind the other."""
        size = len(self.masks) // max(len(self.rows), 1)
        index = {row: i for i, row in enumerate(self.rows)}
        places = ((at, index.get(row)) for at, row in enumerate(rows))
        return {at: self.masks[size * i : size * (i + 1)] for at, i in places if i is not None}


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of the token chosen at one position, and of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1
    """1 plus the number of tokens in the vocabulary that are likelier."""


class GraphUse(NamedTuple):
    """One call of a compiled graph."""

    name: str
    num_tokens: int
    """Tokens fed."""
    num_computed_tokens: int
    """Tokens computed, including padding."""


class DeviceMemory(NamedTuple):
    """Memory of one core, as the device's runtime reports it."""

    used_bytes: int
    free_bytes: int


def name_of_step(graphs: Iterable[str]) -> str:
    """Name of a step that calls these graphs, each any number of times."""
    return "+".join(sorted(set(graphs)))


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """Results of a step, in the order of the batch's rows.

    token_ids[i]: the tokens sampled by row i: one, and one more for each draft that equals the token sampled at its
        position; empty for rows that do not sample.
    vectors[i]: what the row gives in the place of tokens, float32 numbers, if the backend computes vectors; else
        `vectors` is empty.
    without_drafts: rows whose drafts the device had no time to make; they fed one token.
    logprobs: one tuple per row if any row requests logprobs, else empty.
    prompt_logprobs: one tuple per row if any row fed prompt tokens of a request for prompt logprobs, else empty. Row i
        has the prompt tokens at positions start + 1 to start + num_tokens, up to the end of the prompt.
    device_seconds: time that the device worked, for metrics.
    graphs: what the device ran, one entry per call; empty if shapes are dynamic.
    device_memory: after this step; None: not asked, or the device does not tell.
    group_wait_seconds: for each other rank, time until it had done the step too; empty without a group.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    device_seconds: float = 0.0
    graphs: tuple[GraphUse, ...] = ()
    device_memory: DeviceMemory | None = None
    group_wait_seconds: tuple[float, ...] = ()
    without_drafts: tuple[int, ...] = ()
    vectors: tuple[bytes, ...] = ()

    @property
    def counts(self) -> list[int]:
        """How many tokens, or vectors, each row gives."""
        return list(map(len, self.token_ids)) if not self.vectors else [int(bool(one)) for one in self.vectors]


class First(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What comes with the first tokens of a request alone, or with its vector."""

    num_cached_tokens: int
    queue_seconds: float
    """Time that the request waited in the engine for its first step."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Logprobs of the prompt from its second token on, if requested."""
    vector: bytes = b""
    """Float32 numbers, in the place of tokens."""


class TokenEvent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """New tokens of one request from one step, and its finish reason if it ended.

    With FinishReason.STOP the last of `token_ids` is the stop token, which counts as usage but is not part of the text.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if requested."""
    first: First | None = None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.first.prompt_logprobs if self.first else ()


TokenFeedback = Literal["device", "same rows", "host"]

SamplingMode = Literal["Device", "DeviceWithLogits", "Host"]
SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)


class PrefillBucket(NamedTuple):
    """One compiled size of a prefill row: a row of at most `fits` tokens computes `computes`, padding included."""

    fits: int
    computes: int


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Capabilities of a backend, as data. The scheduler knows nothing else about the device.

    The slot layout is the block layout with one block of the model's length per row (`block_size ==
    max_model_length`, `num_blocks == max_rows`, block number == slot).
    """

    max_rows: int
    """Live sequences (slots)."""
    max_model_length: int
    """Tokens of a sequence, prompt plus output."""
    max_step_tokens: int
    """Tokens computed in one step, over all rows; with `prefill_buckets` the padding of prefill rows counts."""
    max_prefill_rows: int = 1
    """Prefill rows (prompts or chunks) in one step."""
    prefill_buckets: tuple[PrefillBucket, ...] = ()
    """Compiled sizes of a prefill row, ascending; a row takes the smallest that fits it. A chunk, except the last of
    its prompt, fills one exactly. Empty: a row computes what it feeds."""
    max_prefill_start: int = 0
    """Largest position at which a prefill row may start, after a prefix hit or a chunk; 0: no limit."""
    min_prefill_tokens: int = 1
    """Shortest prompt that can be prefilled."""
    max_drafts: int = 0
    """Drafts that a decode row may feed behind its token; 0: none."""
    drafts_every_row: bool = False
    """Each decode step makes all drafts of each row, whether asked or not. A row that takes fewer than were accepted
    loses them, and the next drafts of an EAGLE head are worse."""
    layout: Literal["slots", "blocks"] = "blocks"
    block_size: int = 16
    num_blocks: int = 0
    mixes_phases: bool = True
    """Prefill and decode rows may share a step."""
    chunks_prefill: bool = True
    """A prompt may be prefilled in chunks."""
    min_chunk_tokens: int = 1
    """Shortest chunk of a prompt, except the last."""
    decodes_all_live_rows: bool = False
    """Every live (prefilled, unreleased) slot must be a row of every decode step."""
    sorts_rows: bool = False
    """Rows of a decode step must come in ascending slot order."""
    lowest_slot_first: bool = False
    """A new sequence must take the lowest free slot (batch buckets need compact slots)."""
    shares_prefixes: bool = False
    """Sequences with an equal prefix may share its blocks."""
    sampling: SamplingMode = "Host"
    vocabulary_size: int = 0
    """Token ids are below this; 0: unknown."""
    max_top_k: int = 0
    """The device draws from at most this many likeliest tokens, also for a row whose top_k is 0; 0: from all."""
    top_p_keeps_crossing: bool = True
    """On the device, top_p keeps the token that crosses the limit. Otherwise it drops it, but never the likeliest."""
    greedy_only: bool = False
    """The device takes the likeliest token of every row, whatever the row's temperature."""
    max_logprobs: int = 0
    """Maximum number of alternatives per token."""
    reports_prompt_logprobs: bool = False
    """The backend can report logprobs of prompt tokens."""
    steps_in_flight: Literal[1, 2] = 1
    """2: a step may be launched before the previous one is collected."""
    token_feedback: TokenFeedback = "host"
    """Where a step gets sampled tokens of the previous one; with `host`, `after` rows are filled before launch. With
    `same rows` the device feeds only a step whose row i follows row i of the step in flight, for all rows of both; any
    other is launched after that one is collected, with its `after` rows filled."""
    num_lookahead_tokens: int = 0
    """Positions beyond the fed ones that a row may write."""
    begins_with_prefill: bool = False
    """The first row of a sequence must prefill, also if all of its tokens but one are cached."""
    max_adapters: int = 0
    """Places for adapters: live sequences use at most so many different ones; 0: the base model alone."""
    max_loaded_adapters: int = 0
    """Adapters whose weights are kept in memory, at least `max_adapters`."""
    max_adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    """Projections that adapters may change, by their short names (`q_proj`)."""
    vector_size: int = 0
    """Numbers of the vector that a sequence gives when its prompt is computed, in the place of tokens; 0: tokens."""
    max_pictures: int = 0
    """Pictures of a prompt; 0: the model sees none."""
    max_picture_tokens: int = 0
    """Tokens that stand for one picture; 0: as many as a prompt may have."""
    max_tokens_of_pictures: int = 0
    """The same for all pictures of a prompt."""
    feeds_pictures_whole: bool = False
    """One row feeds all tokens of a picture: no chunk of a prompt ends inside one."""
    max_step_seconds: float = 0.0
    """Longest that any step may take, shorter than the time after which the device itself ends one; 0: unknown."""

    def __post_init__(self) -> None:
        if rule := next(self._broken_rules(), None):
            raise ValueError(rule)

    def _broken_rules(self) -> Iterator[str]:
        slots, buckets, num_others = self.layout == "slots", self.prefill_buckets, self.max_rows - 1
        if min(self.max_rows, self.max_model_length, self.max_step_tokens, self.num_blocks, self.block_size) < 1:
            yield "max_rows, max_model_length, max_step_tokens, num_blocks, block_size must be positive"
        if slots and (self.block_size, self.num_blocks) != (self.max_model_length, self.max_rows):
            yield "slot layout: block_size must be max_model_length and num_blocks must be max_rows"
        if slots and self.shares_prefixes:
            yield "slot layout cannot share prefixes: shares_prefixes must be off"
        if self.token_feedback == "host" and self.steps_in_flight != 1:
            yield "host feedback allows one step in flight"
        if self.token_feedback == "same rows" and self.steps_in_flight != 2:
            yield "feedback to the same rows needs two steps in flight"
        if self.max_step_tokens < num_others + (self.min_chunk_tokens if self.mixes_phases else 1):
            yield "max_step_tokens must fit a decode row of every sequence, or of all but one plus a chunk"
        if max(self.min_prefill_tokens, self.min_chunk_tokens) > self.longest_prefill:
            yield "min_prefill_tokens and min_chunk_tokens must fit in one step"
        too_small = any(not 0 < bucket.fits <= bucket.computes for bucket in buckets)
        if too_small or any(a.fits >= b.fits or a.computes > b.computes for a, b in pairwise(buckets)):
            yield "prefill_buckets must be ascending, and each must compute at least the tokens that fit"
        if buckets and self.max_step_tokens < buckets[-1].computes + (num_others if self.mixes_phases else 0):
            yield "max_step_tokens must fit the largest prefill bucket, if phases mix beside a decode row of all others"
        if self.max_prefill_start > 0 and self.chunks_prefill and not buckets:
            yield "max_prefill_start with chunks needs prefill_buckets"
        if not 0 <= self.max_adapters <= self.max_loaded_adapters or bool(self.max_adapters) != bool(
            self.max_adapter_rank
        ):
            yield "max_adapters needs max_loaded_adapters of at least as many, and max_adapter_rank"
        if min(self.max_prefill_start, self.max_step_seconds, self.max_drafts, self.num_lookahead_tokens) < 0:
            yield "max_prefill_start, max_step_seconds, max_drafts, num_lookahead_tokens must be >= 0"
        if self.sampling == "Host" and (self.max_top_k > 0 or not self.top_p_keeps_crossing):
            yield "max_top_k and top_p_keeps_crossing are of a device that samples: not with Host sampling"
        if self.greedy_only and self.sampling != "Device":
            yield "greedy_only is of a device that samples all rows: only with Device sampling"
        if self.feeds_pictures_whole and self.chunks_prefill:
            beside = num_others if self.mixes_phases else 0
            if buckets or not 0 < self.max_picture_tokens + self.min_chunk_tokens - 1 <= self.max_step_tokens - beside:
                yield "feeds_pictures_whole with chunks needs max_picture_tokens that a step fits, no prefill_buckets"
        if self.decodes_all_live_rows and (self.mixes_phases or self.chunks_prefill):
            yield "decodes_all_live_rows excludes partial prompts: mixes_phases and chunks_prefill must be off"

    @property
    def longest_prefill(self) -> int:
        """Maximum tokens of one sequence that one step can prefill."""
        return self.prefill_buckets[-1].fits if self.prefill_buckets else self.max_step_tokens

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a sequence that prefill rows can compute."""
        if not self.chunks_prefill:
            return self.longest_prefill
        if not self.max_prefill_start:
            return self.longest_sequence
        return (self.max_prefill_start // self.longest_prefill + 1) * self.longest_prefill

    def reaches(self, num_tokens: int, start: int) -> bool:
        """Whether prefill rows of the largest size from `start` on can compute a sequence of this length."""
        last_start = start + (num_tokens - start - 1) // self.longest_prefill * self.longest_prefill
        return not self.max_prefill_start or last_start <= self.max_prefill_start

    def num_computed(self, num_tokens: int) -> int:
        """Tokens that a prefill row of this length computes."""
        if not self.prefill_buckets:
            return num_tokens
        return next(bucket.computes for bucket in self.prefill_buckets if num_tokens <= bucket.fits)

    @property
    def longest_sequence(self) -> int:
        """Maximum tokens of prompt plus output; what the last row writes must stay within the model length."""
        return self.max_model_length - max(self.num_lookahead_tokens - 1, 0)

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """The largest `max_tokens` for a prompt of this length; <= 0 if the prompt is too long."""
        cached = self.num_blocks * self.block_size - self.num_lookahead_tokens
        return min(self.longest_sequence, cached + 1) - num_prompt_tokens

    def recomputes(self, max_length: int) -> bool:
        """Whether a sequence can be prefilled again at any length up to this one; otherwise it is never preempted."""
        return self.longest_prompt >= max_length - 1

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def needs_host(sampling: Sampling, limits: BackendLimits) -> bool:
    """Whether the host samples the rows of this request from their logits, beside rows that the device samples.

    False in mode `Device`, which admits no such request, and in mode `Host`, where the host samples every row anyway.
    """
    return limits.sampling == "DeviceWithLogits" and bool(
        any(getattr(sampling, name) != default for name, default in _ON_HOST)
        or (not sampling.greedy and (sampling.seeded or 0 < limits.max_top_k < sampling.top_k))
    )


def fill(batch: Batch, output: StepOutput, previous: Batch) -> Batch:
    """For host feedback: the batch with every `after` row resolved by `output`, the result of `previous`.

    A row starts where the one before ended. It feeds the token that was sampled there or, behind a chunk, tokens of the
    mirror.
    """
    if not batch.waits_for_step_in_flight:
        return batch
    rows = batch.rows
    start, token = list(rows.start), list(rows.token)
    for i, j in enumerate(rows.after):
        if j == KNOWN:
            continue
        start[i] = previous.rows.start[j] + previous.rows.num_tokens[j]
        if previous.rows.samples[j]:
            (token[i],) = output.token_ids[j]
    return replace(batch, rows=replace(rows, start=tuple(start), token=tuple(token), after=(KNOWN,) * len(rows.after)))
