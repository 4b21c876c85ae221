"""Drives an engine over the strict backend, records the result of each request and checks the engine's state."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from helpers.checked_requests import check_request
from helpers.guides import FORM, Rule, RuleGuides, no_rule
from helpers.step_counts import StepCounts
from helpers.strict_backend import StrictBackend, next_token, with_features
from neuron_runtime.core import (
    NO_TOKEN,
    BackendLimits,
    Batch,
    FinishReason,
    Late,
    Picture,
    Request,
    Sampling,
    StepOutput,
)
from neuron_runtime.engine.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, CacheEvents
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.prefix_cache import BlockKeys
from neuron_runtime.engine.scheduler import Scheduler
from neuron_runtime.engine.sequence import Phase, Sequence

VOCABULARY_SIZE = 31


def max_steps(limits: BackendLimits, requests: Iterable[Request], max_consecutive_prefills: int = 1) -> int:
    """Maximum number of steps until all of `requests` end, for any order of arrival, preemptions and aborts.

    The running sequence that is first in order is never preempted and advances in every step that its phase allows.
    Another sequence becomes first at most twice per request (one ends, or an earlier one is admitted), and each time
    it may have to recompute all its tokens.
    """
    requests = list(requests)
    beside = limits.max_rows - 1 if limits.mixes_phases else 0
    # With buckets, the largest fits beside the rows of all others.
    part = min(limits.longest_prefill, limits.max_step_tokens - beside) if limits.chunks_prefill else None
    lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens - 1 for r in requests]
    prefills = max((-(-length // part) if part else 1 for length in lengths), default=0)
    advances = sum(r.sampling.max_tokens for r in requests) + 2 * len(requests) * prefills
    turns = 1 if limits.mixes_phases else 1 + max_consecutive_prefills
    # A request that ends unexpectedly leaves one unneeded step in flight.
    return advances * turns + len(requests)


def request(name: str, num_prompt: int, max_tokens: int = 8, priority: int = 0, **sampling: object) -> Request:
    """A greedy request (unless `sampling` says otherwise) with a prompt unique to its name; `even...` have a form."""
    seed = sum(map(ord, name))
    prompt = tuple((seed * 7 + 3 * i) % VOCABULARY_SIZE for i in range(num_prompt))
    form = FORM if name.startswith("even") else None
    params = Sampling(**{"temperature": 0.0, "max_tokens": max_tokens, "form": form, **sampling})  # type: ignore[arg-type]
    return Request(name, prompt, params, priority=priority)


def picture(name: str, start: int, num_tokens: int) -> Picture:
    pixels = name.encode()
    return Picture(hashlib.sha256(pixels).hexdigest(), start, num_tokens, memoryview(pixels))


class AtOnce(ThreadPoolExecutor):
    """Does what is submitted at once, so that runs can be repeated."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as an executor does
            done.set_exception(error)
        return done

    def close(self) -> None:
        """As `ReadingThreads` do."""
        self.shutdown()


def even_only(asked: Request) -> Rule | None:
    """Requests whose id starts with `even` may only generate even numbers, and none twice in a row."""
    if not asked.request_id.startswith("even"):
        return None
    return lambda output: tuple(token for token in range(0, VOCABULARY_SIZE, 2) if token not in output[-1:])


def alone(
    asked: Request, late: Callable[[Request], Rule | None] = no_rule, limits: BackendLimits | None = None
) -> tuple[tuple[int, ...], FinishReason]:
    """The expected tokens of a request, from the definition of the next token. limits: unless the host samples."""
    sampling, rule = asked.sampling, late(asked)
    output: list[int] = []
    while True:
        token = next_token(
            with_features(asked, [*asked.prompt_token_ids, *output], 0),
            sampling,
            len(output),
            vocabulary_size=VOCABULARY_SIZE,
            limits=limits,
            adapter=asked.adapter,
            allowed=rule(output) if rule else None,
        )
        output.append(token)
        if token in sampling.stop_token_ids and len(output) > sampling.min_tokens:
            return tuple(output), FinishReason.STOP
        if len(output) == sampling.max_tokens:
            return tuple(output), FinishReason.LENGTH


class Guesses:
    """Implements `Drafting`: drafts of which most are right, also behind a stop; now and then none, or the device's."""

    def __init__(self, limits: BackendLimits, seed: int = 0) -> None:
        self._limits = limits
        self._random = Random(seed)
        self.learned: list[tuple[int, int]] = []
        """Drafts of rows, and how many were accepted."""

    def wants(self, sequences: Iterable[Sequence]) -> bool:
        some = list(sequences)
        return bool(some) and (some[0].in_flight is None or self._random.random() < 0.8)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        assert sequence.in_flight is None
        random, count = self._random, self._random.randint(0, most)
        if random.random() < 0.2:
            return (NO_TOKEN,) * count
        asked = sequence.request
        context = with_features(asked, sequence.tokens, 0)
        for at in range(len(context), len(context) + count):
            token = next_token(
                context,
                asked.sampling,
                at - sequence.num_prompt,
                vocabulary_size=VOCABULARY_SIZE,
                limits=self._limits,
                adapter=asked.adapter,
            )
            context.append(random.randrange(VOCABULARY_SIZE) if random.random() < 0.2 else token)
        return tuple(context[len(sequence.tokens) :])

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts <= self._limits.max_drafts
        self.learned.append((num_drafts, num_accepted))

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None:
        assert num_tokens >= num_rows > 0


class OfTheDevice(Guesses):
    """As many drafts as fit, all of them the device's."""

    def wants(self, sequences: Iterable[Sequence]) -> bool:
        return True

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return (NO_TOKEN,) * most


class RecordingBackend(StrictBackend):
    """The strict backend with a log of its calls."""

    def __init__(self, limits: BackendLimits) -> None:
        super().__init__(limits, vocabulary_size=VOCABULARY_SIZE)
        self.batches: list[Batch] = []
        self.calls: list[tuple[str, int]] = []
        self.most_masks = 0
        """Masks of a row in a step, at most."""
        self.num_cut = 0
        """Rows that begin within a picture."""

    def launch(self, batch: Batch) -> None:
        super().launch(batch)
        self.batches.append(batch)
        self.calls.append(("launch", batch.step))
        for number, start in zip(batch.rows.slot, batch.rows.start, strict=True):
            self.num_cut += any(one.start < start < one.end for one in self._slots[number].added.pictures)

    def sample(self, step: int, late: Late | None) -> None:
        super().sample(step, late)
        self.most_masks = max(self.most_masks, late.num_positions if late else 0)
        self.calls.append(("sample late" if late else "sample", step))

    def add_adapter(self, digest: str, folder: Path, weights: str) -> None:
        super().add_adapter(digest, folder, weights)
        self.calls.append(("add", len(self.batches)))

    def collect(self, step: int) -> StepOutput:
        output = super().collect(step)
        self.calls.append(("collect", step))
        return output


class CacheReader:
    """Follows the events of a prefix cache as a gateway does: the tokens of each block that it has, by hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}

    def read(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case BlockStored(hashes, parent, tokens, size):
                    assert len(tokens) == len(hashes) * size
                    assert not self.blocks.keys() & set(hashes), "stored twice"
                    for at, one in enumerate(hashes):
                        self.blocks[one] = tokens[at * size : (at + 1) * size]
                        self.parents[one], parent = parent, one
                case BlockRemoved(hashes):
                    for one in hashes:
                        del self.blocks[one]
                case AllBlocksCleared():
                    self.blocks.clear()

    def hits(self, tokens: list[int]) -> int:
        """Cached tokens of a prompt, as a gateway counts them: of its blocks from the first one on, without the last
        token."""
        by_parent = {(self.parents[one], content): one for one, content in self.blocks.items()}
        size = len(next(iter(self.blocks.values()), ()))
        at, parent = 0, None
        while size and at + size < len(tokens) and (found := by_parent.get((parent, tuple(tokens[at : at + size])))):
            at, parent = at + size, found
        return at


@dataclass
class Run:
    """An engine over a strict backend, and its results."""

    engine: Engine
    backend: RecordingBackend
    guesses: Guesses
    events: CacheEvents
    reader: CacheReader = field(default_factory=CacheReader)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    known_adapters: set[str] = field(default_factory=set)
    waited_for_place: bool = False
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    cached: dict[str, int] = field(default_factory=dict)
    """Cached tokens of each request, known with its first tokens."""
    pictures: dict[str, tuple[Picture, ...]] = field(default_factory=dict)
    """Of requests that have some."""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Prompt logprobs of requests that want them."""
    late: Callable[[Request], Rule | None] = no_rule
    worst_gap: int = 0
    """Maximum number of steps between two tokens of a stream."""
    last_step: dict[str, int] = field(default_factory=dict)
    waited: bool = False
    """Whether a request waited for a prefix that another one computed."""
    held: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Every possible block key and the content of its block."""
    texts: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """The same with the tokens of pictures, as events tell them."""

    def __post_init__(self) -> None:
        self.steps = StepCounts(self.engine)

    @property
    def scheduler(self) -> Scheduler:
        return self.engine._scheduler

    @property
    def known(self) -> dict[bytes, int]:
        """The findable blocks, by key."""
        cache = self.scheduler.blocks.cache
        return {key: block for key, block in cache._block_of.items() if block not in cache._coming}

    def add(self, *requests: Request) -> None:
        for asked in requests:
            check_request(self.backend.limits, asked)
            if asked.adapter:
                self.load(asked.adapter)
            self.engine.add(asked)
            self.tokens[asked.request_id] = []
            if asked.pictures:
                self.pictures[asked.request_id] = asked.pictures
            if asked.sampling.prompt_logprobs is not None:
                self.prompts[asked.request_id] = list(asked.prompt_token_ids)
            if self.backend.limits.shares_prefixes:
                self._foresee(asked)

    def load(self, digest: str) -> None:
        """Make an adapter known, unless it is."""
        if digest not in self.known_adapters:
            self.known_adapters.add(digest)
            self.engine.load_adapter(digest, Path(digest))

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.aborted.add(request_id)

    def step(self) -> None:
        for event in self.engine.step():
            name = event.request_id
            assert name not in self.reasons, f"{name} ended and got another event"
            assert name not in self.aborted, f"{name} was aborted and got another event"
            assert event.token_ids, f"{name} got an event without tokens"
            assert (event.first is None) == bool(self.tokens[name])
            if event.first:
                self.cached[name] = event.first.num_cached_tokens
                reported = [entry.token_id for entry in event.prompt_logprobs]
                assert reported == (self.prompts[name][1:] if name in self.prompts else []), name
            self.tokens[name] += event.token_ids
            step = self.engine.stats.last_step
            assert step is not None
            self.worst_gap = max(self.worst_gap, step.step - self.last_step.get(name, step.step))
            self.last_step[name] = step.step
            if event.finish_reason:
                self.reasons[name] = event.finish_reason
        self.check_books()

    def finish(self, most: int = 10_000) -> None:
        while self.engine.has_work:
            self.step()
            assert len(self.backend.batches) <= most, f"unfinished after {most} steps"

    def check_books(self) -> None:
        """Checks slots and blocks: each is free or has its holders, and no sequence holds more than it needs."""
        scheduler, limits = self.scheduler, self.backend.limits
        slot_pool, cache = scheduler.running.slots, scheduler.blocks.cache
        in_flight = {id(s): s for step in scheduler.scheduled for s in step.sequences}
        holders = list({id(s): s for s in (*scheduler.running, *in_flight.values())}.values())
        slots = [s.slot for s in holders if s.slot >= 0]
        blocks = Counter(block for s in holders for block in s.blocks)
        assert len(set(slots)) == len(slots) == slot_pool.num_used
        assert len(slots) + slot_pool.num_free == limits.max_rows
        assert {block: count for block, count in enumerate(cache._holders) if count} == blocks
        assert len(blocks) == cache.num_used
        assert len(blocks) + cache.num_free == limits.num_blocks
        assert limits.shares_prefixes or blocks.total() == len(blocks)
        if limits.layout == "slots":
            assert all(s.blocks == [s.slot] for s in holders if s.slot >= 0)
        extras: dict[int, tuple[str, str]] = {}
        for s in holders:
            extra = (s.request.adapter, s.request.cache_salt)
            assert all(extras.setdefault(block, extra) == extra for block in s.blocks), "shared across salts"
        self.check_cache()
        self.check_phases()
        self.waited = self.waited or any(scheduler.blocks.find(s).num_coming for s in scheduler.waiting)
        for s in scheduler.running:
            ahead = min(s.samples + limits.max_drafts, s.max_length - len(s.tokens))
            held = len(s.tokens) + ahead + limits.num_lookahead_tokens
            assert len(s.blocks) <= limits.blocks_for(held), "more blocks than a row in flight can use"
        stats = self.engine.stats
        assert stats.num_running + stats.num_waiting <= len(self.tokens)
        self.check_places(holders)
        free = scheduler.running.slots.num_free
        held = len(scheduler.running.startable(scheduler.waiting)) < min(free, len(scheduler.waiting))
        self.waited_for_place = self.waited_for_place or held
        if not self.engine.has_work:
            assert (stats.num_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
            assert slot_pool.num_used == 0

    def check_places(self, holders: list[Sequence]) -> None:
        """Checks that each place has the adapter of its users, and counts them and those of loaded adapters."""
        places, adapters = self.scheduler.running.places, self.engine._adapters
        users = Counter(s.place for s in holders if s.place)
        assert users == {place: count for place, count in enumerate(places._num_users) if count}
        assert all((s.request.adapter == "") == (s.place == 0) for s in holders if s.slot >= 0)
        assert all(places._digest[s.place] == s.request.adapter for s in holders if s.slot >= 0)
        assert places._place_of == {digest: place for place, digest in enumerate(places._digest) if digest}
        assert set(places._idle) == set(range(1, len(places._digest))) - users.keys()
        if adapters is not None:
            live = Counter(s.request.adapter for s in self.scheduler._live.values() if s.request.adapter)
            assert live == {digest: count for digest, count in adapters._num_users.items() if count}
            assert adapters._loaded.keys() == self.backend._adapters

    def check_phases(self) -> None:
        """Checks that a sequence is in the queue of its phase and holds what the phase allows."""
        scheduler, running = self.scheduler, self.scheduler.running
        for phase, sequences in (
            (Phase.WAITING, scheduler.waiting),
            (Phase.PREFILL, running.prefilling),
            (Phase.DECODE, running.decoding),
        ):
            assert all(s.phase is phase for s in sequences)
        assert not any(s.slot >= 0 or s.blocks or s.in_flight is not None for s in scheduler.waiting)
        assert running.prefilling == sorted(running.prefilling, key=lambda s: s.order)
        assert running.decoding == sorted(running.decoding, key=lambda s: s.slot)
        newest = {id(s): (step.batch, row) for step in scheduler.scheduled for row, s in enumerate(step.sequences)}
        for s in scheduler._live.values():
            batch, row = newest.get(id(s), (None, 0))
            assert (s.in_flight is None) == (batch is None)
            num_coming = sum(
                num_tokens
                for step in scheduler.scheduled
                for one, num_tokens in zip(step.sequences, step.batch.rows.num_tokens, strict=True)
                if one is s
            )
            assert s.phase is Phase.WAITING or s.num_scheduled_tokens == s.num_computed_tokens + num_coming
            if batch:
                assert (s.in_flight, s.row, s.samples) == (batch.step, row, batch.rows.samples[row])

    def check_cache(self) -> None:
        """Checks that every findable block has the content of its key and that no step in flight writes to it."""
        known = self.known
        assert not known or self.backend.limits.shares_prefixes
        writable = self.backend._written_in_flight()
        for key, block in known.items():
            assert tuple(token for token, _ in self.backend._cache[block]) == self.held[key]
            assert block not in writable
        self.reader.read(self.events.take())
        told = {int.from_bytes(key[:8], "big"): self.texts[key] for key in known}
        assert self.reader.blocks == told, "who follows the events knows something else than the cache has"

    def _foresee(self, asked: Request) -> None:
        tokens = [*asked.prompt_token_ids, *alone(asked, self.late, self.backend.limits)[0]]
        size = self.backend.limits.block_size
        of_request = {"adapter": asked.adapter, "cache_salt": asked.cache_salt}
        keys = BlockKeys(tokens, size, **of_request, pictures=asked.pictures).first(len(tokens) // size)
        seen = with_features(asked, tokens, 0)
        for at, key in enumerate(keys):
            self.texts[key] = tuple(tokens[at * size : (at + 1) * size])
            block = tuple(seen[at * size : (at + 1) * size])
            assert self.held.setdefault(key, block) == block, "one key for two different contents"

    def check_tokens(self, requests: Iterable[Request], late: Callable[[Request], Rule | None] = no_rule) -> None:
        """Checks that every request got its solo tokens, and an aborted one a prefix of them."""
        for asked in requests:
            name, (expected, reason) = asked.request_id, alone(asked, late, self.backend.limits)
            got = tuple(self.tokens[name])
            if name in self.reasons:
                assert (got, self.reasons[name]) == (expected, reason), name
            else:
                assert name in self.aborted, f"{name} never ended"
                assert got == expected[: len(got)], name


def start(
    limits: BackendLimits,
    late: Callable[[Request], Rule | None] = no_rule,
    max_queued_requests: int = 100,
    max_consecutive_prefills: int = 1,
    reads_at_once: bool = True,
) -> Run:
    """reads_at_once: adapters are read without a thread, so that a run can be repeated."""
    backend, guesses, events = RecordingBackend(limits), Guesses(limits), CacheEvents(limits.block_size)
    engine = Engine(
        backend,
        cache_events=events,
        guides=RuleGuides(late, VOCABULARY_SIZE),
        drafting=guesses,
        max_queued_requests=max_queued_requests,
        max_consecutive_prefills=max_consecutive_prefills,
    )
    if engine._adapters is not None and reads_at_once:
        engine._adapters._thread = AtOnce()
    return Run(engine, backend, guesses, events, late=late)


def serve(limits: BackendLimits, *requests: Request) -> Run:
    """Adds all requests, runs them to the end within the step bound, and checks tokens and state."""
    run = start(limits)
    run.add(*requests)
    run.finish(max_steps(limits, requests))
    run.check_tokens(requests)
    return run
