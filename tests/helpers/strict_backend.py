"""A backend on integers that refuses every illegal batch, for tests of everything above the Backend protocol.

Its KV cache holds token ids, each with a fingerprint of all tokens before it, and the next token is a pure function of
the cache contents that the row reads. It enforces every limit in `BackendLimits` and every rule of `Batch`;
`neuron_limits` are those of a compiled Neuron model without prefix caching, which are the strictest.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.host_rows import asks_for_logits, is_of_host
from neuron_runtime.backend_protocol import IllegalBatch, ProgressCallback, StepTime, size_of
from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    Late,
    Request,
    Rows,
    Sampling,
    StepOutput,
    TokenLogprobs,
    fill,
)

EMPTY = -1
"""Content of a cache position that was never written."""
BEYOND = -2
"""Content of a position that a row wrote beyond the tokens that it fed."""
STRANGE = -3
"""Read in place of a token that was computed after another prefix than that of the row."""
FEATURES = -1000
"""Numbers from here downwards are of pictures."""
SECONDS_PER_TOKEN = 1e-6


def neuron_limits(max_rows: int = 4, max_model_length: int = 64, max_drafts: int = 0) -> BackendLimits:
    """Contiguous cache lines, one whole prompt per prefill call, every live row in every decode call in line order."""
    return BackendLimits(
        max_rows=max_rows,
        max_model_length=max_model_length,
        max_step_tokens=max_model_length,
        max_prefill_rows=1,
        min_prefill_tokens=2,
        max_drafts=max_drafts,
        layout="slots",
        block_size=max_model_length,
        num_blocks=max_rows,
        mixes_phases=False,
        chunks_prefill=False,
        decodes_all_live_rows=True,
        sorts_rows=True,
        lowest_slot_first=True,
        sampling="Device",
        steps_in_flight=1,
        token_feedback="host",
    )


def next_token(
    context: Sequence[int],
    sampling: Sampling,
    output_position: int,
    *,
    vocabulary_size: int,
    limits: BackendLimits | None = None,
    adapter: str = "",
    allowed: tuple[int, ...] | None = None,
) -> int:
    """The token that follows `context` (the cache contents, position by position).

    A pure function. The context determines the likeliest token, and those after it are ever less likely. A drawn one
    depends on seed, choice, output position, and on the number of tokens that `limits` and the request's parameters
    keep; limits None: as on the host, which also samples restricted rows.
    """
    number = zlib.crc32(array("q", [*context, weights_of(adapter), 0, 0, 0]).tobytes())
    choices = allowed or range(vocabulary_size)
    if not sampling.greedy:
        number += _rank(sampling, output_position, len(choices), None if allowed else limits)
    return choices[number % len(choices)]


def weights_of(adapter: str) -> int:
    """What an adapter, named by its digest, adds to the model."""
    return zlib.crc32(adapter.encode()) if adapter else 0


FALL = math.log(0.95)
"""The fall of the logit from one token to the next likeliest."""


def _rank(sampling: Sampling, output_position: int, num_tokens: int, limits: BackendLimits | None) -> int:
    """Which of the likeliest tokens is drawn; 0 is the likeliest."""
    draw = array("q", [sampling.seed, sampling.choice, output_position])
    number, fall = zlib.crc32(draw.tobytes()) / 2**32, FALL / sampling.temperature
    kept = num_kept(sampling, num_tokens, limits)
    return min(int(math.log1p(number * math.expm1(kept * fall)) / fall), kept - 1)


def num_kept(sampling: Sampling, num_tokens: int, limits: BackendLimits | None) -> int:
    """How many of the likeliest tokens may be drawn, by top_k and top_p."""
    device = limits if limits and limits.sampling != "Host" and not is_of_host(sampling, limits) else None
    most = min(sampling.top_k or num_tokens, num_tokens)
    if device and device.max_top_k:
        most = min(most, device.max_top_k)
    if sampling.top_p == 1.0:
        return most
    fall = FALL / sampling.temperature
    crossing = math.log1p(sampling.top_p * math.expm1(most * fall)) / fall
    keeps = device is None or device.top_p_keeps_crossing
    return min(max(math.ceil(crossing) if keeps else math.floor(crossing), 1), most)


def needs_logits(sampling: Sampling, limits: BackendLimits) -> bool:
    """Whether only a host that has the logits can serve these parameters."""
    return sampling.seeded or asks_for_logits(sampling, limits.max_top_k)


def tokens_of(mask: memoryview, vocabulary_size: int) -> tuple[int, ...]:
    """The tokens that a mask of `Late` allows."""
    size = min(vocabulary_size, len(mask) * 8)
    return tuple(token for token in range(size) if mask[token // 8] >> token % 8 & 1)


Cell = tuple[int, int]
"""A position of the cache: the token, and a fingerprint of it and of all tokens before it."""


def _bound(before: int, token: int) -> Cell:
    return token, hash((before, token))


def with_features(asked: Added | Request, token_ids: Sequence[int], start: int) -> list[int]:
    """The tokens at `start` and behind, with what the cache has instead of them where pictures are."""
    seen = list(token_ids)
    for picture in asked.pictures:
        for position in range(max(picture.start, start), min(picture.end, start + len(seen))):
            place = f"{picture.digest} {position - picture.start}"
            seen[position - start] = FEATURES - zlib.crc32(place.encode())
    return seen


@dataclass(eq=False)
class _Slot:
    """Mirror of one slot, updated from batches and sampled tokens."""

    added: Added
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    shared: int = 0
    """Tokens of a shared prefix."""
    prefilled: bool = False
    """Whether a sampling row was launched for it."""


@dataclass(eq=False)
class _Step:
    """A launched step: the batch, and slots and block tables as they were at launch."""

    batch: Batch
    slots: list[_Slot]
    tables: list[tuple[int, ...]]
    sampled: bool = False
    late: Late | None = None


class StrictBackend:
    """Implements `Backend`. A step runs when it is collected, on the block tables of its launch."""

    def __init__(self, limits: BackendLimits, *, vocabulary_size: int = 101) -> None:
        self._limits = limits
        self._vocabulary_size = vocabulary_size
        self._slots: dict[int, _Slot] = {}
        self._holders: Counter[int] = Counter()
        """Number of slots that hold each block."""
        self._cache: list[list[Cell]] = [[(EMPTY, 0)] * limits.block_size for _ in range(limits.num_blocks)]
        self._places = [""] * (limits.max_adapters + 1)
        """The adapter of each place, as its weights are now: a step reads them when it runs."""
        self._adapters: set[str] = set()
        self._in_flight: deque[_Step] = deque()
        self._num_launched = 0
        self._rows_before: set[int] = set()
        """Slots of the step launched last, which may still have run when the next batch was built."""

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    def warm_up(self, progress: ProgressCallback) -> tuple[StepTime, ...]:
        progress("warm up", 1.0)
        return ()

    def close(self) -> None:
        self._in_flight.clear()

    def graph(self, batch: Batch) -> str:
        return size_of(batch)

    def read_adapter(self, folder: Path) -> str:
        return f"weights of {folder}"

    def add_adapter(self, digest: str, folder: Path, weights: str) -> None:
        self._demand(weights == f"weights of {folder}", f"adapter {digest} gets {weights}")
        self._demand(digest not in self._adapters, f"adapter {digest} is added twice")
        self._adapters.add(digest)
        most = self._limits.max_loaded_adapters
        self._demand(len(self._adapters) <= most, f"{len(self._adapters)} adapters are loaded, the limit is {most}")

    def remove_adapter(self, digest: str) -> None:
        self._demand(digest in self._adapters, f"adapter {digest} is removed but not loaded")
        fed = (slot for step in self._in_flight for slot in step.slots)
        self._demand(digest not in self._adapters_of(fed), f"adapter {digest} is removed but a step in flight uses it")
        self._adapters.remove(digest)

    def _adapters_of(self, slots: Iterable[_Slot]) -> set[str]:
        return {self._places[slot.added.adapter] for slot in slots} - {""}

    def _change_places(self, batch: Batch) -> None:
        for place, digest in batch.adapters:
            self._demand(1 <= place < len(self._places), f"place {place} does not exist")
            self._demand(digest in self._adapters, f"place {place} gets adapter {digest}, which is not loaded")
            live = (*self._slots.values(), *(slot for step in self._in_flight for slot in step.slots))
            self._demand(
                all(slot.added.adapter != place for slot in live),
                f"place {place} gets adapter {digest}, but a sequence uses {self._places[place]}",
            )
            self._places[place] = digest

    def launch(self, batch: Batch) -> None:
        self._demand(batch.step == self._num_launched, f"step {self._num_launched} is next, got {batch.step}")
        self._demand(
            len(self._in_flight) < self._limits.steps_in_flight,
            f"{len(self._in_flight)} steps are in flight, the limit is {self._limits.steps_in_flight}",
        )
        self._demand(all(step.sampled for step in self._in_flight), "the step launched before was not sampled")
        drafts = [one.rows.drafts for one in (batch, *(step.batch for step in self._in_flight)) if one.rows.drafts]
        self._demand(not (drafts and self._in_flight), "a step with drafts is not alone in flight")
        self._num_launched += 1
        for step in self._in_flight:
            self._check_behind(batch, step)
        self._apply(batch)
        self._check_rows(batch)
        slots = [self._slots[slot] for slot in batch.rows.slot]
        gone = self._adapters_of(slots) - self._adapters
        self._demand(not gone, f"rows have adapters {gone}, which are not loaded")
        for slot, samples in zip(slots, batch.rows.samples, strict=True):
            slot.prefilled = slot.prefilled or samples
        step = _Step(batch, slots, [tuple(slot.blocks) for slot in slots])
        if not batch.waits_for_step_in_flight:
            self._check_values(step)
        self._in_flight.append(step)
        self._rows_before = set(batch.rows.slot)

    def sample(self, step: int, late: Late | None) -> None:
        newest = self._in_flight[-1] if self._in_flight else None
        if newest is None or newest.batch.step != step:
            raise IllegalBatch(f"step {step} is sampled but was not launched last")
        self._demand(not newest.sampled, f"step {step} is sampled twice")
        if late is not None:
            self._check_late(newest.batch, late)
        newest.sampled, newest.late = True, late

    def collect(self, step: int) -> StepOutput:
        if not self._in_flight or self._in_flight[0].batch.step != step:
            raise IllegalBatch(f"step {step} is collected but is not the oldest step in flight")
        self._demand(self._in_flight[0].sampled, f"step {step} is collected before it was sampled")
        done = self._in_flight.popleft()
        output = self._run(done)
        for following in self._in_flight:
            waits = following.batch.waits_for_step_in_flight
            following.batch = fill(following.batch, output, done.batch)
            if waits:
                self._check_values(following)
        return output

    def _check_late(self, batch: Batch, late: Late) -> None:
        rows, num_rows = batch.rows, len(late.rows)
        sampling = [row for row, samples in enumerate(rows.samples) if samples]
        self._demand(
            bool(late.rows) and list(late.rows) == sorted(set(late.rows) & set(sampling)),
            f"late has masks of rows {late.rows}, rows that sample are {sampling}",
        )
        for row in late.rows:
            slot = rows.slot[row]
            self._demand(
                self._slots[slot].added.sampling.form is not None, f"late has a mask of slot {slot}, which has no form"
            )
        most = 1 + max((len(rows.drafts[row]) for row in late.rows if rows.drafts), default=0)
        self._demand(
            1 <= late.num_positions <= most,
            f"late has {late.num_positions} positions per row, its rows have up to {most}",
        )
        num_bytes, num_masks = len(late.masks), num_rows * late.num_positions
        self._demand(num_bytes % num_masks == 0, f"late has {num_bytes} bytes for {num_masks} masks")
        for at in range(num_masks):
            size = num_bytes // num_masks
            allowed = tokens_of(late.masks[size * at : size * (at + 1)], self._vocabulary_size)
            self._demand(bool(allowed), f"mask {at} allows no token")

    def _demand(self, holds: bool, rule: str) -> None:
        if not holds:
            raise IllegalBatch(rule)

    # The delta

    def _apply(self, batch: Batch) -> None:
        """Updates the mirror."""
        for number in batch.released:
            self._demand(number in self._slots, f"slot {number} is released but free")
            self._holders.subtract(self._slots.pop(number).blocks)
        self._change_places(batch)
        written = self._written_in_flight()
        starts = dict(zip(batch.rows.slot, batch.rows.start, strict=False))
        for added in batch.added:
            self._add(added)
            num_shared = self._share(added, starts.get(added.slot, 0), written)
            self._hand_out(added.slot, added.blocks[num_shared:], written)
        for number, block in batch.appended_blocks:
            self._slot(number).blocks.append(block)
            self._hand_out(number, (block,), written)

    def _add(self, added: Added) -> None:
        limits, number = self._limits, added.slot
        self._demand(0 <= number < limits.max_rows, f"slot {number} is added, slots are 0 to {limits.max_rows - 1}")
        self._demand(number not in self._slots, f"slot {number} is added but taken")
        busy = {slot for step in self._in_flight for slot in step.batch.rows.slot}
        self._demand(number not in busy, f"slot {number} is added while the step in flight has a row in it")
        taken = self._slots.keys() | (self._rows_before if limits.steps_in_flight == 2 else set())
        lowest = min((s for s in range(limits.max_rows) if s not in taken), default=number)
        self._demand(
            not limits.lowest_slot_first or number <= lowest, f"slot {number} is added, the lowest free is {lowest}"
        )
        self._demand(
            limits.layout == "blocks" or added.blocks == (number,),
            f"slot layout: slot {number} has blocks {added.blocks} instead of its own line",
        )
        length = len(added.token_ids)
        # A token that follows must fit too, but none follows where vectors are computed.
        longest = limits.max_model_length - (not limits.vector_size)
        self._demand(
            limits.min_prefill_tokens <= length <= longest,
            f"slot {number} is added with {length} tokens, allowed are {limits.min_prefill_tokens} to {longest}",
        )
        self._demand(
            0 <= added.adapter < len(self._places) and (not added.adapter or self._places[added.adapter] != ""),
            f"slot {number} has the adapter of place {added.adapter}, which has none",
        )
        self._demand(
            1 <= added.num_prompt_tokens <= length,
            f"slot {number}: {added.num_prompt_tokens} of {length} tokens are called the prompt",
        )
        sampling = added.sampling
        self._demand(
            (sampling.logprobs or 0) <= limits.max_logprobs,
            f"slot {number}: {sampling.logprobs} logprobs are above {limits.max_logprobs}",
        )
        self._demand(
            sampling.prompt_logprobs is None
            or (
                limits.sampling == "Host"
                and limits.reports_prompt_logprobs
                and sampling.prompt_logprobs <= limits.max_logprobs
            ),
            f"slot {number}: {sampling.prompt_logprobs} prompt logprobs are not supported",
        )
        self._demand(
            limits.sampling != "Device" or not needs_logits(sampling, limits),
            f"slot {number} requests what only logits on the host can serve",
        )
        self._check_pictures(added)
        self._slots[number] = _Slot(added, list(added.token_ids), list(added.blocks))

    def _check_pictures(self, added: Added) -> None:
        """Checks that they are in order, inside the prompt, within the limits, and what their digests say."""
        limits, number, before = self._limits, added.slot, 0
        self._demand(
            len(added.pictures) <= limits.max_pictures,
            f"slot {number} has {len(added.pictures)} pictures, the limit is {limits.max_pictures}",
        )
        for picture in added.pictures:
            self._demand(
                before <= picture.start < picture.end <= added.num_prompt_tokens,
                f"slot {number} has a picture at {picture.start} to {picture.end}, behind {before}",
            )
            self._demand(
                not limits.max_picture_tokens or picture.num_tokens <= limits.max_picture_tokens,
                f"slot {number} has a picture of {picture.num_tokens} tokens, the limit is {limits.max_picture_tokens}",
            )
            self._demand(
                hashlib.sha256(picture.pixels).hexdigest() == picture.digest,
                f"slot {number} has a picture whose pixels are not what its digest says",
            )
            before = picture.end

    def _share(self, added: Added, start: int, written: set[int]) -> int:
        """Checks that the blocks before `start` hold the prefix of the sequence; returns their number."""
        limits, number = self._limits, added.slot
        if not limits.shares_prefixes or not start:
            return 0
        self._demand(start < len(added.token_ids), f"slot {number} starts at {start}: nothing is left to feed")
        self._demand(
            not limits.max_prefill_start or start <= limits.max_prefill_start,
            f"slot {number} shares {start} tokens, the limit is {limits.max_prefill_start}",
        )
        self._demand(
            start % limits.block_size == 0,
            f"slot {number} shares {start} tokens, which is not a multiple of the block size",
        )
        self._demand(
            added.sampling.prompt_logprobs is None,
            f"slot {number} shares {start} tokens but requests prompt logprobs",
        )
        blocks = added.blocks[: start // limits.block_size]
        for block in blocks:
            self._demand(
                block not in written, f"slot {number} shares block {block}, to which the step in flight still writes"
            )
        context = self._read(added.blocks, start, weights_of(self._places[added.adapter]))
        self._demand(
            context == with_features(added, added.token_ids[:start], 0),
            f"slot {number} shares {start} tokens, but blocks {blocks} do not contain them",
        )
        self._holders.update(blocks)
        slot = self._slots[number]
        slot.computed = slot.shared = start
        return len(blocks)

    def _hand_out(self, number: int, blocks: tuple[int, ...], written: set[int]) -> None:
        for block in blocks:
            self._demand(
                0 <= block < self._limits.num_blocks, f"slot {number} gets block {block}, which does not exist"
            )
            self._demand(not self._holders[block], f"slot {number} gets block {block}, which another slot holds")
            self._demand(
                block not in written, f"slot {number} gets block {block}, to which the step in flight still writes"
            )
        self._holders.update(blocks)

    def _slot(self, number: int) -> _Slot:
        if number not in self._slots:
            raise IllegalBatch(f"slot {number} is free")
        return self._slots[number]

    def _written_in_flight(self) -> set[int]:
        written: set[int] = set()
        for step in self._in_flight:
            rows = step.batch.rows
            for table, start, num_tokens in zip(step.tables, rows.start, rows.num_tokens, strict=True):
                end = start + num_tokens + self._limits.num_lookahead_tokens
                written.update(table[start // self._limits.block_size : self._limits.blocks_for(end)])
        return written

    # The rows

    def _check_behind(self, batch: Batch, in_flight: _Step) -> None:
        """Checks that the device can take what the batch needs of the step in flight without the host."""
        limits, rows = self._limits, in_flight.batch.rows
        self._demand(
            limits.token_feedback != "same rows" or batch.rows.after == tuple(range(len(rows))),
            f"the rows follow rows {batch.rows.after} of the step in flight, which has {len(rows)}: not the same rows",
        )
        on_host = [
            number
            for number, slot, samples in zip(rows.slot, in_flight.slots, rows.samples, strict=True)
            if samples and is_of_host(slot.added.sampling, limits)
        ]
        self._demand(not on_host, f"a step is launched behind one whose slots {on_host} the host samples")

    def _check_rows(self, batch: Batch) -> None:
        """Checks rows before the result of the step in flight is known."""
        limits, rows = self._limits, batch.rows
        columns = (rows.slot, rows.start, rows.num_tokens, rows.token, rows.after, rows.samples)
        self._demand(len(set(map(len, columns))) == 1, "the columns of the rows differ in length")
        self._demand(len(rows) > 0, "the batch has no rows")
        self._demand(len(set(rows.slot)) == len(rows), f"a slot has two rows: {rows.slot}")
        for number in rows.slot:
            self._slot(number)
        self._demand(min(rows.num_tokens, default=1) > 0, f"a row feeds no token: {rows.num_tokens}")
        self._check_after(batch)
        self._check_drafts(batch)
        prefills = [i >= batch.num_decodes for i in range(len(rows))]
        shapes = _prefills(rows)
        self._demand(prefills == shapes, f"the batch calls its last {batch.num_prefills} rows prefill rows: {shapes}")
        fed = rows.num_tokens[batch.num_decodes :]
        self._demand(
            max(fed, default=0) <= limits.longest_prefill,
            f"a row prefills {max(fed, default=0)} tokens, the limit is {limits.longest_prefill}",
        )
        num_computed = sum(rows.num_tokens[: batch.num_decodes]) + sum(map(limits.num_computed, fed))
        self._demand(
            num_computed <= limits.max_step_tokens,
            f"the step computes {num_computed} tokens, the limit is {limits.max_step_tokens}",
        )
        self._demand(
            limits.mixes_phases or batch.num_prefills in (0, len(rows)), "prefill and decode rows share a step"
        )
        self._demand(
            batch.num_prefills <= limits.max_prefill_rows,
            f"the step prefills {batch.num_prefills} rows, the limit is {limits.max_prefill_rows}",
        )
        if not batch.num_prefills:
            self._demand(
                not limits.sorts_rows or list(rows.slot) == sorted(rows.slot),
                f"rows are not in slot order: {rows.slot}",
            )
            idle = [n for n, slot in self._slots.items() if slot.prefilled and n not in rows.slot]
            self._demand(
                not (limits.decodes_all_live_rows and idle), f"live slots have no row in the decode step: {idle}"
            )

    def _check_after(self, batch: Batch) -> None:
        in_flight = self._in_flight[-1] if self._in_flight else None
        for number, after in zip(batch.rows.slot, batch.rows.after, strict=True):
            if after == KNOWN:
                behind = in_flight is not None and self._slots[number] in in_flight.slots
                self._demand(not behind, f"slot {number} has a row in flight, and its next row does not wait for it")
            elif self._limits.token_feedback == "host":
                raise IllegalBatch(f"slot {number} waits for a row, and the host feeds tokens here")
            elif in_flight is None:
                raise IllegalBatch(f"slot {number} waits for a row, and no step is in flight")
            elif not (after < len(in_flight.slots) and in_flight.slots[after] is self._slots[number]):
                raise IllegalBatch(f"slot {number} waits for row {after} of the step in flight, which is another's")

    def _check_drafts(self, batch: Batch) -> None:
        rows, most = batch.rows, self._limits.max_drafts
        if not rows.drafts:
            return
        self._demand(len(rows.drafts) == len(rows), "the columns of the rows differ in length")
        self._demand(any(rows.drafts), "the rows have drafts, and none has one")
        for i, drafts in enumerate(rows.drafts):
            number = rows.slot[i]
            self._demand(len(drafts) <= most, f"slot {number} has {len(drafts)} drafts, the limit is {most}")
            self._demand(not drafts or i < batch.num_decodes, f"slot {number} prefills and has drafts")
            self._demand(
                i >= batch.num_decodes or rows.num_tokens[i] == 1 + len(drafts),
                f"slot {number} feeds {rows.num_tokens[i]} tokens and has {len(drafts)} drafts",
            )
            strange = [token for token in drafts if not NO_TOKEN <= token < self._vocabulary_size]
            mixed = NO_TOKEN in drafts and set(drafts) != {NO_TOKEN}
            self._demand(not (strange or mixed), f"slot {number} has the drafts {drafts}")

    def _check_values(self, step: _Step) -> None:
        """Checks start, tokens and extent of every row when all are known."""
        limits, rows = self._limits, step.batch.rows
        for i, slot in enumerate(step.slots):
            num_drafts = len(rows.drafts[i]) if rows.drafts else 0
            number, start, end = rows.slot[i], rows.start[i], rows.start[i] + rows.num_tokens[i] - num_drafts
            known, token = len(slot.tokens), rows.token[i]
            self._demand(
                start == slot.computed, f"slot {number} starts at {start}, and {slot.computed} tokens are computed"
            )
            self._demand(end <= known, f"slot {number} feeds tokens up to {end}, and {known} are known")
            self._demand(
                token == NO_TOKEN or (end - start == 1 and slot.tokens[start : start + 1] == [token]),
                f"slot {number} feeds token {token} at {start}, which is not the sequence's",
            )
            self._demand(
                rows.samples[i] == (end == known), f"slot {number} samples {rows.samples[i]} at {end} of {known} tokens"
            )
            reach = end + num_drafts + (limits.num_lookahead_tokens if rows.samples[i] else 0)
            held = len(step.tables[i]) * limits.block_size
            self._demand(reach <= held, f"slot {number} writes up to {reach}, its blocks hold {held}")
            self._demand(
                reach <= limits.max_model_length,
                f"slot {number} writes up to {reach}, the model's length is {limits.max_model_length}",
            )
            if limits.feeds_pictures_whole:
                cut = [one for one in slot.added.pictures if one.start < end < one.end or one.start < start < one.end]
                self._demand(not cut, f"slot {number} feeds {start} to {end}, which ends inside a picture")
            if i >= step.batch.num_decodes:
                self._check_prefill(slot, number, start, end)

    def _check_prefill(self, slot: _Slot, number: int, start: int, end: int) -> None:
        limits, known = self._limits, len(slot.tokens)
        self._demand(
            not limits.max_prefill_start or start <= limits.max_prefill_start,
            f"slot {number} prefills from {start}, the limit is {limits.max_prefill_start}",
        )
        self._demand(
            end == known or not limits.prefill_buckets or end - start in [b.fits for b in limits.prefill_buckets],
            f"slot {number} prefills a part of {end - start} tokens, which is not a bucket",
        )
        self._demand(
            limits.chunks_prefill or (start == slot.shared and end == known),
            f"slot {number} prefills {start} to {end} of {known} tokens, only whole prompts can be prefilled",
        )
        self._demand(
            end == known or end - start >= limits.min_chunk_tokens,
            f"slot {number} prefills a part of {end - start} tokens, at least {limits.min_chunk_tokens} are needed",
        )

    # The device

    def _run(self, step: _Step) -> StepOutput:
        batch = step.batch
        token_ids = tuple(self._run_row(step, i) for i in range(len(batch.rows)))
        return StepOutput(
            step=batch.step,
            token_ids=token_ids,
            logprobs=self._logprobs(step, token_ids),
            prompt_logprobs=self._prompt_logprobs(step),
            device_seconds=batch.num_tokens * SECONDS_PER_TOKEN,
        )

    def _run_row(self, step: _Step, i: int) -> tuple[int, ...]:
        limits, rows, slot = self._limits, step.batch.rows, step.slots[i]
        drafts = rows.drafts[i] if rows.drafts else ()
        start, end = rows.start[i], rows.start[i] + rows.num_tokens[i] - len(drafts)
        table = step.tables[i]
        digest = self._places[slot.added.adapter]
        adapter = weights_of(digest)
        self._write(table, start, self._fed(step, i), adapter)
        slot.computed = end
        if not rows.samples[i]:
            return ()
        masks = step.late.of_rows((i,)).get(0) if step.late else None
        size = 0 if masks is None or step.late is None else len(masks) // step.late.num_positions

        def following(context: list[int]) -> int:
            at = len(context) - end
            allowed = None if masks is None else tokens_of(masks[size * at : size * (at + 1)], self._vocabulary_size)
            return next_token(
                context,
                slot.added.sampling,
                len(context) - slot.added.num_prompt_tokens,
                vocabulary_size=self._vocabulary_size,
                limits=limits,
                adapter=digest,
                allowed=allowed,
            )

        if NO_TOKEN in drafts:
            drafts = self._own_drafts(self._read(table, end, adapter), len(drafts), following)
        self._write(table, end, [*drafts, *[BEYOND] * limits.num_lookahead_tokens], adapter)
        sampled: list[int] = []
        for at in range(1 + len(drafts) if masks is None or step.late is None else step.late.num_positions):
            token = following(self._read(table, end + at, adapter))
            sampled.append(token)
            if drafts[at : at + 1] != (token,):
                break
        slot.tokens = [*slot.tokens[:end], *sampled]
        slot.computed = end + len(sampled) - 1
        return tuple(sampled)

    def _own_drafts(self, context: list[int], count: int, following: Callable[[list[int]], int]) -> tuple[int, ...]:
        """Drafts as a model on the device makes them: two of three are right."""
        known = len(context)
        for _ in range(count):
            token = following(context)
            wrong = zlib.crc32(array("q", context).tobytes(), 1) % 3 == 0
            context.append((token + wrong) % self._vocabulary_size)
        return tuple(context[known:])

    def _fed(self, step: _Step, i: int) -> list[int]:
        rows, start = step.batch.rows, step.batch.rows.start[i]
        if rows.token[i] != NO_TOKEN:
            return with_features(step.slots[i].added, [rows.token[i]], start)
        slot = step.slots[i]
        return with_features(slot.added, slot.tokens[start : start + rows.num_tokens[i]], start)

    def _write(self, table: tuple[int, ...], start: int, tokens: list[int], adapter: int) -> None:
        before = self._cell(table, start - 1)[1] if start else adapter
        for position, token in enumerate(tokens, start):
            block, offset = self._place(table, position)
            self._cache[block][offset] = _bound(before, token)
            before = self._cache[block][offset][1]

    def _read(self, table: tuple[int, ...], end: int, adapter: int) -> list[int]:
        """The tokens that a row reads at the positions before `end`."""
        context, before = [], adapter
        for position in range(end):
            cell = self._cell(table, position)
            context.append(cell[0] if cell == _bound(before, cell[0]) else STRANGE)
            before = cell[1]
        return context

    def _cell(self, table: tuple[int, ...], position: int) -> Cell:
        block, offset = self._place(table, position)
        return self._cache[block][offset]

    def _place(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._limits.block_size)
        return table[index], offset

    def _logprobs(self, step: _Step, token_ids: tuple[tuple[int, ...], ...]) -> tuple[tuple[TokenLogprobs, ...], ...]:
        wanted = [slot.added.sampling.logprobs for slot in step.slots]
        if not any(count is not None for count in wanted):
            return ()
        return tuple(
            tuple(_token_logprobs(token, count) for token in sampled) if count is not None else ()
            for sampled, count in zip(token_ids, wanted, strict=True)
        )

    def _prompt_logprobs(self, step: _Step) -> tuple[tuple[TokenLogprobs, ...], ...]:
        rows, found = step.batch.rows, []
        for i, slot in enumerate(step.slots):
            added, begin = slot.added, rows.start[i] + 1
            count = added.sampling.prompt_logprobs
            tokens = added.token_ids[begin : min(begin + rows.num_tokens[i], added.num_prompt_tokens)]
            found.append(tuple(_token_logprobs(token, count or 0) for token in tokens) if count is not None else ())
        return tuple(found) if any(found) else ()


def _prefills(rows: Rows) -> list[bool]:
    """For each row, whether it looks like a prefill row: a decode row feeds one token behind others, with its drafts,
    and samples."""
    drafts = rows.drafts or ((),) * len(rows)
    fed = [num - len(of_row) for num, of_row in zip(rows.num_tokens, drafts, strict=True)]
    columns = zip(fed, rows.samples, rows.start, rows.after, strict=True)
    return [num > 1 or not samples or (start == 0 and after == KNOWN) for num, samples, start, after in columns]


def _token_logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, tuple((token + rank, -1.0 - rank) for rank in range(count)))
