"""`SimulatedBackend`: the Backend protocol over a timeline; tokens are a cheap function of prompt and position.

It does not check batches (the strict backend of the tests does). All tokens are equally likely, so temperature, top-k
and the like have no effect. It draws only tokens that a request and its late rules allow.
"""

from __future__ import annotations

import math
import time
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from neuron_runtime.backend.simulated.step_times import PhaseTimes, StepTimes
from neuron_runtime.backend_protocol import IllegalBatch, ProgressCallback, StepTime, size_of
from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    GraphUse,
    Late,
    Rows,
    Sampling,
    StepOutput,
    TokenLogprobs,
    name_of_step,
)

STRIDE = 40_503
"""Distance of tokens at neighbouring positions; odd and coprime to common vocabulary sizes, so that few repeat."""


class Clock(Protocol):
    """Seconds since an arbitrary start."""

    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None:
        """Wait until `moment`; returns at once if it has passed."""


class WallClock:
    """Real time, for serving."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


class VirtualClock:
    """Time that passes only in `sleep_until`: runs as fast as the host can, with equal results on any machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


@dataclass
class ShapeUse:
    """How often one compiled size ran, and how many of its rows or tokens were used."""

    num_steps: int = 0
    num_used: int = 0
    num_padded: int = 0
    """Rows or tokens computed as padding."""
    seconds: float = 0.0
    num_positions: int = 0
    """Positions of the cache that its rows read, if its size limits them."""
    num_filled: int = 0
    """Those of them that hold a token."""

    @property
    def padded_share(self) -> float:
        return self.num_padded / (self.num_used + self.num_padded)

    @property
    def empty_share(self) -> float:
        return 1 - self.num_filled / self.num_positions


Shape = tuple[str, int] | tuple[str, int, int]
"""Phase (`decode`, `prefill`) and size; of a graph for so many positions before or with its tokens, also these."""


@dataclass
class Timeline:
    """One device: a step starts when it is launched or when the previous one ends, whichever is later."""

    began: float | None = None
    free_at: float = 0.0
    busy_seconds: float = 0.0
    num_steps: int = 0
    shapes: dict[Shape, ShapeUse] = field(default_factory=dict)

    def run(self, launched: float, seconds: float) -> float:
        """Add a step; returns when it ends."""
        start = max(launched, self.free_at)
        self.began = start if self.began is None else self.began
        self.free_at = start + seconds
        self.busy_seconds += seconds
        self.num_steps += 1
        return self.free_at

    def count(self, call: SimulatedCall) -> None:
        use = self.shapes.setdefault(call.shape, ShapeUse())
        use.num_steps += 1
        use.num_used += call.used
        use.num_padded += call.bucket - call.used
        use.seconds += call.seconds
        use.num_positions += call.num_positions
        use.num_filled += call.num_filled

    def busy_until(self, now: float) -> float:
        """Seconds of work done until now, without the part of the last steps that is still ahead."""
        return self.busy_seconds - max(0.0, self.free_at - now)

    @property
    def busy_share(self) -> float:
        """Share of the time from the start of the first step to the end of the last; 0 before the first."""
        return 0.0 if self.began is None else self.busy_seconds / (self.free_at - self.began)


# Tokens


def first_number(prompt: Iterable[int], sampling: Sampling, adapter: str = "") -> int:
    """Hash that determines all output tokens: of prompt, adapter and, unless greedy, seed and choice."""
    draw = (0, 0) if sampling.greedy else (sampling.seed & 0x7FFF_FFFF_FFFF_FFFF, sampling.choice)
    return zlib.crc32(array("q", [zlib.crc32(adapter.encode()), *draw, *prompt]).tobytes())


def token_at(number: int, position: int, vocabulary_size: int, allowed: tuple[int, ...] | None = None) -> int:
    """The token at a position (counted from the prompt's first token) of the sequence with this first number."""
    draw = number + STRIDE * position
    return allowed[draw % len(allowed)] if allowed else draw % vocabulary_size


def is_right(number: int, position: int, acceptance: float) -> bool:
    """Whether a draft that the device makes for this position is right, which so great a share of them is."""
    mixed = (number * 0x9E3779B97F4A7C15 + position) * 0xBF58476D1CE4E5B9 % 2**64  # as SplitMix, so neighbours differ
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB % 2**64
    return mixed >> 32 < acceptance * 2**32


def allowed_from(mask: memoryview, token: int, vocabulary_size: int) -> int:
    """The first token from this one on that a mask of `Late` allows; behind the last one the first follows."""
    from neuron_runtime.backend.host_sampling.adjustments import allowed_ids  # noqa: PLC0415 - brings numpy

    allowed = allowed_ids(mask, vocabulary_size)
    if not len(allowed):
        raise IllegalBatch("a mask allows no token")
    return int(allowed[allowed.searchsorted(token) % len(allowed)])


@dataclass(slots=True)
class _Slot:
    """The mirror of one slot."""

    added: Added
    number: int
    end: int = 0
    """Position after the last token fed by any launched step."""

    @property
    def is_special(self) -> bool:
        """Whether the request restricts tokens or requests log-probabilities."""
        sampling = self.added.sampling
        wants = sampling.allowed_token_ids, sampling.form, sampling.logprobs, sampling.prompt_logprobs
        return any(want is not None for want in wants)


class SimulatedCall(NamedTuple):
    """One run of a graph, for the decode rows or for a prompt."""

    name: str
    shape: Shape
    used: int
    """Rows or tokens."""
    seconds: float
    is_compiled: bool = True
    """False: every size can run."""
    num_positions: int = 0
    """See `ShapeUse`."""
    num_filled: int = 0

    @property
    def bucket(self) -> int:
        return self.shape[1]


def _call(phase: str, times: PhaseTimes, used: int) -> SimulatedCall:
    bucket, is_compiled = times.bucket(used), bool(times.buckets)
    name = f"{phase}_{bucket}" if is_compiled else phase
    return SimulatedCall(name, (phase, bucket), used, times.curve.seconds(bucket), is_compiled)


class _SimulatedStep(NamedTuple):
    batch: Batch
    slots: list[_Slot]
    ends: list[int]
    plain: bool
    """No live sequence is special."""
    calls: list[SimulatedCall]
    seconds: float
    ready_at: float


class SimulatedBackend:
    """See `backend_protocol.Backend`. Layout, feedback and phases are those of the limits."""

    def __init__(
        self,
        limits: BackendLimits,
        times: StepTimes,
        clock: Clock,
        *,
        host_seconds_per_step: float = 0.0,
        acceptance: float = 0.0,
        draft_cost: float = 0.0,
    ) -> None:
        """Uses the limits as given. Raises ValueError if they have no vocabulary.

        host_seconds_per_step: time that passes before each launch, to simulate host work.
        acceptance: probability that a draft which the device makes is right, if those before it are.
        draft_cost: time of the model that makes them relative to that of this one, for a token of each row and for a
            prompt.
        """
        if not limits.vocabulary_size:
            raise ValueError("a simulated backend draws tokens from a vocabulary of known size")
        self._acceptance, self._draft_cost = acceptance, draft_cost
        self.timeline = Timeline()
        self.limits = limits
        self._times = times
        self._clock = clock
        self._host_seconds = host_seconds_per_step
        self._slots: dict[int, _Slot] = {}
        self._in_flight: deque[_SimulatedStep] = deque()
        self._adapters: dict[int, str] = {}
        """What each place has."""
        self._late: dict[int, Late] = {}
        self._special: set[int] = set()
        """Slots of special sequences."""

    def warm_up(self, progress: ProgressCallback) -> tuple[StepTime, ...]:
        progress("warming up", 1.0)
        return ()

    def graph(self, batch: Batch) -> str:
        calls = self.calls(batch)
        return name_of_step(call.name for call in calls) if any(call.is_compiled for call in calls) else size_of(batch)

    def launch(self, batch: Batch) -> None:
        if self._host_seconds:
            self._clock.sleep_until(self._clock.now() + self._host_seconds)
        for number in batch.released:
            del self._slots[number]
            self._special.discard(number)
        self._adapters |= dict(batch.adapters)
        for added in batch.added:
            prompt = added.token_ids[: added.num_prompt_tokens]
            adapter = self._adapters[added.adapter] if added.adapter else ""
            slot = self._slots[added.slot] = _Slot(added, first_number(prompt, added.sampling, adapter))
            if slot.is_special:
                self._special.add(added.slot)
        calls = self.calls(batch)
        for call in calls:
            self.timeline.count(call)
        rows = batch.rows
        slots = [self._slots[number] for number in rows.slot]
        ends = []
        for slot, start, num_tokens, after in zip(slots, rows.start, rows.num_tokens, rows.after, strict=True):
            # A row that waits starts where the one in flight ends, which is known: that one has no drafts.
            slot.end = (start if after == KNOWN else slot.end) + num_tokens
            ends.append(slot.end)
        if rows.drafts:
            ends = [end - len(drafts) for end, drafts in zip(ends, rows.drafts, strict=True)]
        seconds = sum(call.seconds for call in calls)
        ready_at = self.timeline.run(self._clock.now(), seconds)
        self._in_flight.append(_SimulatedStep(batch, slots, ends, not self._special, calls, seconds, ready_at))

    def sample(self, step: int, late: Late | None) -> None:
        if late is not None:
            self._late[step] = late

    def collect(self, step: int) -> StepOutput:
        done = self._in_flight.popleft()
        if done.batch.step != step:
            raise IllegalBatch(f"step {step} was collected before step {done.batch.step}, which was launched first")
        self._clock.sleep_until(done.ready_at)
        late, size = self._late.pop(step, None), self.limits.vocabulary_size
        samplings = [slot.added.sampling for slot in done.slots]
        samples, drafts = done.batch.rows.samples, done.batch.rows.drafts
        lengths = done.batch.rows.num_tokens
        if drafts:
            lengths = tuple(n - len(of_row) for n, of_row in zip(lengths, drafts, strict=True))
        prompts = (
            slot.added.token_ids[: slot.added.num_prompt_tokens][end - num_tokens + 1 : end + 1]
            for slot, end, num_tokens in zip(done.slots, done.ends, lengths, strict=True)
        )
        if drafts:
            masks = late.of_rows(range(len(samples))) if late else {}
            token_ids = tuple(
                self._verified(slot, end, of_row, masks.get(row), late.num_positions if late else 1) if sampled else ()
                for row, (slot, end, of_row, sampled) in enumerate(
                    zip(done.slots, done.ends, drafts, samples, strict=True)
                )
            )
        elif late is None and done.plain:
            token_ids = tuple(
                ((slot.number + STRIDE * end) % size,) if sampled else ()
                for slot, end, sampled in zip(done.slots, done.ends, samples, strict=True)
            )
        else:
            masks = late.of_rows(range(len(samples))) if late else {}
            token_ids = tuple(
                (_restricted(slot, end, size, masks.get(row)),) if sampled else ()
                for row, (slot, end, sampled) in enumerate(zip(done.slots, done.ends, samples, strict=True))
            )
        return StepOutput(
            step=step,
            token_ids=token_ids,
            logprobs=() if done.plain else self._uniform([one.logprobs for one in samplings], token_ids),
            prompt_logprobs=() if done.plain else self._uniform([one.prompt_logprobs for one in samplings], prompts),
            device_seconds=done.seconds,
            graphs=tuple(GraphUse(call.name, call.used, call.bucket) for call in done.calls)
            if any(call.is_compiled for call in done.calls)
            else (),
        )

    def read_adapter(self, folder: Path) -> None:
        """There are no weights: an adapter only changes which tokens come."""

    def add_adapter(self, digest: str, folder: Path, weights: object) -> None:
        pass

    def remove_adapter(self, digest: str) -> None:
        pass

    def close(self) -> None:
        self._in_flight.clear()

    def starts(self, rows: Rows) -> list[int]:
        """The position at which each row starts."""
        columns = zip(rows.slot, rows.start, rows.after, strict=True)
        return [start if after == KNOWN else self._slots[slot].end for slot, start, after in columns]

    def calls(self, batch: Batch) -> list[SimulatedCall]:
        """What the device runs: all decode rows together, and with prefill buckets each prompt alone. Called before the
        batch's rows are fed."""
        times, fed = self._times, batch.rows.num_tokens[batch.num_decodes :]
        decode = [_call("decode", times.decode, batch.num_decodes)] if batch.num_decodes else []
        if batch.rows.drafts:
            decode = [self._verification(decode[0], sum(batch.rows.num_tokens[: batch.num_decodes]), batch.rows.drafts)]
        prompts = fed if self.limits.prefill_buckets else [sum(fed)] if fed else []
        prefills = [_call("prefill", times.prefill, num_tokens) for num_tokens in prompts]
        return decode + [one._replace(seconds=one.seconds * (1 + self._draft_cost)) for one in prefills]

    def _verification(self, decode: SimulatedCall, num_fed: int, drafts: Sequence[tuple[int, ...]]) -> SimulatedCall:
        """In place of a decode step, if a row has drafts. Its tokens are computed at once, as those of a prompt; a
        compiled graph has room for all drafts of all its rows. Before it, a model that makes drafts computes one after
        the other."""
        most = self.limits.max_drafts
        num_tokens, num_drafts = (
            (decode.bucket * (1 + most), most) if decode.is_compiled else (num_fed, max(map(len, drafts)))
        )
        seconds = max(decode.seconds, self._times.prefill.curve.seconds(num_tokens))
        seconds += num_drafts * self._draft_cost * decode.seconds
        name, shape = decode.name.replace("decode", "verify"), ("verify", decode.bucket)
        return decode._replace(name=name, shape=shape, seconds=seconds)

    def _verified(
        self, slot: _Slot, end: int, drafts: tuple[int, ...], masks: memoryview | None, num_masks: int
    ) -> tuple[int, ...]:
        """The tokens of a row that feeds these drafts behind its token at `end - 1`."""
        size, tokens = 0 if masks is None else len(masks) // num_masks, []
        drafts = drafts if masks is None else drafts[: num_masks - 1]
        for at in range(len(drafts) + 1):
            mask = None if masks is None else masks[at * size : (at + 1) * size]
            tokens.append(_restricted(slot, end + at, self.limits.vocabulary_size, mask))
            if at == len(drafts):
                break
            of_device = drafts[at] == NO_TOKEN and is_right(slot.number, end + at, self._acceptance)
            if not (of_device or drafts[at] == tokens[-1]):
                break
        return tuple(tokens)

    def _uniform(
        self, counts: list[int | None], tokens_of_rows: Iterable[tuple[int, ...]]
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Log-probabilities of tokens of rows, each with so many alternatives, if its row has a count. All tokens are
        equally likely; the alternatives are the token itself and the ones after it."""
        if all(count is None for count in counts):
            return ()
        size = self.limits.vocabulary_size
        logprob = -math.log(size)

        def likely(token: int, count: int) -> TokenLogprobs:
            return TokenLogprobs(token, logprob, tuple(((token + rank) % size, logprob) for rank in range(count)))

        return tuple(
            () if count is None else tuple(likely(token, count) for token in tokens)
            for tokens, count in zip(tokens_of_rows, counts, strict=True)
        )


def _restricted(slot: _Slot, end: int, vocabulary_size: int, mask: memoryview | None) -> int:
    """The token at this position of a sequence that may be special."""
    if mask is None:
        return token_at(slot.number, end, vocabulary_size, slot.added.sampling.allowed_token_ids)
    return allowed_from(mask, token_at(slot.number, end, vocabulary_size), vocabulary_size)
