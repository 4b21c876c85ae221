"""Who proposes drafts, guesses of a sequence's next tokens, and whether they pay. Pure: no clock, no device.

The scheduler asks `Drafts` before each step and tells what became of drafts; the loop tells the times of steps. A draft
never changes an answer, because a backend keeps those that equal the tokens it samples. It can only cost time.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import deque
from collections.abc import Collection
from typing import Any, Protocol

from neuron_runtime.config import LEAST_MATCH, METHODS_WITH_MODEL, MOST_MATCH, Speculation
from neuron_runtime.core import NO_TOKEN, BackendLimits
from neuron_runtime.engine.sequence import Sequence

# Proposers


class Prospect:
    """What a proposer remembers of a sequence, and what it thinks of its next drafts."""

    __slots__ = ("has_drafts", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        """Probability that a draft is right if all drafts before it are."""
        self.has_drafts = True


class Proposer(Protocol):
    def look(self, tokens: list[int], state: Any) -> Prospect:
        """The prospect of a sequence that has these tokens; `state` is what the last call returned, at first None."""

    def propose(self, tokens: list[int], state: Any, most: int) -> tuple[int, ...]:
        """At most `most` drafts, after `look` at the same tokens."""

    def learn(self, tokens: list[int], state: Any, num_drafts: int, num_accepted: int) -> None: ...


NUM_INDEXED = 256
"""Tokens that one look at a sequence indexes at most: a long prompt is indexed in several steps."""
NUM_CANDIDATES = 8
"""Earlier places that are compared with the last tokens at most."""
NUM_JUDGED = 64
"""Newest tokens at most whose prediction is judged in one look."""
FIRST_RATE = 0.5
ROW_WEIGHT, ALL_WEIGHT = 0.15, 0.01
"""Weights of the newest prediction in the rate of a sequence, and in the rate with which new sequences begin."""
MAX_HEADS = 1 << 16


class _Trail(Prospect):
    """The index of a sequence's own tokens, as a compressor's: the latest place of each short run by its hash, and for
    each place the one before with the same hash. So it needs a few bytes per token.

    A place is the number of tokens before it: a run ends there, and `tokens[place]` continues it.
    """

    __slots__ = ("before", "heads", "mask", "match", "num_prompt")

    def __init__(self, rate: float, num_tokens: int) -> None:
        super().__init__(rate)
        size = min(1 << max(2 * num_tokens, 512).bit_length(), MAX_HEADS)
        self.heads = array("i", bytes(4 * size))
        self.mask = size - 1
        self.before = array("i", [0])
        """By place; its length is the first place that is not indexed."""
        self.match = 0
        """The earlier place that is thought to continue as the sequence will; 0: none."""
        self.num_prompt = num_tokens
        """Its first tokens, which say nothing about an answer."""


class NGram:
    """Drafts from the sequence's own tokens: what followed the last time its newest tokens occurred.

    Whether a draft would have been right shows in the tokens that come, also while none are proposed: so the rate of a
    sequence is known without a try.
    """

    def __init__(self, min_match: int = LEAST_MATCH, max_match: int = MOST_MATCH) -> None:
        """min_match, max_match: the shortest run of tokens that is looked for, and the longest that is told apart."""
        self._min, self._max = min_match, max(min_match, max_match)
        self._rate = FIRST_RATE

    def look(self, tokens: list[int], state: _Trail | None) -> _Trail:
        trail = _Trail(self._rate, len(tokens)) if state is None else state
        place, end = len(trail.before), len(tokens)
        if place > end:
            return trail
        bulk = min(end + 1 - NUM_JUDGED, place + NUM_INDEXED)
        if place < bulk:
            trail.match = 0
            for at in range(place, bulk):
                self._add(tokens, trail, at)
            place = bulk
        if place <= end - NUM_JUDGED:  # the rest is indexed later; only the newest tokens are looked up
            trail.match = self._longest(tokens, trail, end, trail.heads[self._key(tokens, trail, end)])
        else:
            for at in range(place, end + 1):
                self._follow(tokens, trail, at)
        trail.has_drafts = trail.match > 0
        return trail

    def propose(self, tokens: list[int], state: _Trail, most: int) -> tuple[int, ...]:
        begin, end = state.match, len(tokens)
        if not begin:
            return ()
        if begin + most <= end:
            return tuple(tokens[begin : begin + most])
        period = tokens[begin:end]  # the run overlaps its own continuation: it repeats
        return tuple([period[i % len(period)] for i in range(most)])

    def learn(self, tokens: list[int], state: _Trail, num_drafts: int, num_accepted: int) -> None:
        """The tokens tell it."""

    def _follow(self, tokens: list[int], trail: _Trail, at: int) -> None:
        """Add a place, judge the prediction of the token before it, and find the match there."""
        match = trail.match
        if match:
            right = tokens[match] == tokens[at - 1]
            match = match + 1 if right else 0
            if at > trail.num_prompt:
                trail.rate += ROW_WEIGHT * (right - trail.rate)
                self._rate += ALL_WEIGHT * (right - self._rate)
        head = self._add(tokens, trail, at)
        trail.match = match or self._longest(tokens, trail, at, head)

    def _add(self, tokens: list[int], trail: _Trail, at: int) -> int:
        """Index a place; returns the latest one before it with the same hash."""
        if at < self._min:
            trail.before.append(0)
            return 0
        key = self._key(tokens, trail, at)
        head = trail.heads[key]
        trail.before.append(head)
        trail.heads[key] = at
        return head

    def _key(self, tokens: list[int], trail: _Trail, at: int) -> int:
        return hash(tuple(tokens[at - self._min : at])) & trail.mask

    def _longest(self, tokens: list[int], trail: _Trail, at: int, place: int) -> int:
        """Of the latest places from `place` back, the one before which most tokens equal those before `at`; 0: none."""
        best, longest, shortest, before = 0, self._min - 1, self._min, trail.before
        for _ in range(NUM_CANDIDATES):
            if not place:
                break
            length, limit = 0, min(self._max, place)
            while length < limit and tokens[place - 1 - length] == tokens[at - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length >= self._max:
                    break
            place = before[place]
        return best if longest >= shortest else 0


class _Guessed(Prospect):
    __slots__ = ("pause", "retry")

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.pause = 16
        self.retry = 0


class OnDevice:
    """Drafts that the device makes itself. How good they are is known of those that were tried."""

    def __init__(self) -> None:
        self._rate = FIRST_RATE

    def look(self, tokens: list[int], state: _Guessed | None) -> _Guessed:
        # However bad others were, it is worth a try: otherwise nobody would notice that drafts are better now.
        tried = max(self._rate, 1.5 * TRIED)
        guessed = _Guessed(tried) if state is None else state
        if guessed.retry and len(tokens) >= guessed.retry:
            guessed.rate, guessed.retry = tried, 0
        return guessed

    def propose(self, tokens: list[int], state: _Guessed, most: int) -> tuple[int, ...]:
        return (NO_TOKEN,) * most

    def learn(self, tokens: list[int], state: _Guessed, num_drafts: int, num_accepted: int) -> None:
        for right in (True,) * num_accepted + (False,) * (num_accepted < num_drafts):
            state.rate += ROW_WEIGHT * (right - state.rate)
            self._rate += ALL_WEIGHT * (right - self._rate)
        if num_accepted:
            state.pause = 16
        elif not state.retry:  # rejected ones are tried again ever more rarely
            state.retry = len(tokens) + state.pause
            state.pause = min(2 * state.pause, 1024)


# Whether they pay

REPAID = 0.01
"""Share of the time without drafts that may be lost by drafts."""
MOST_OWED = 4
"""Steps without drafts whose time may be lost before drafts rest."""
NUM_CALM = 3
"""Answers of no before a step without drafts is like any other: the steps before it overlap as usual."""
FIRST_PATIENCE, MAX_PATIENCE = 32, 4096
"""Steps after which drafts that did not pay are tried again; doubled each time."""
NUM_SKIPPED = 16
"""Steps for which drafts that cannot pay are not thought of."""
TRIED = 0.1
"""Probability below which no draft is made where its cost is unknown."""


class _Pace:
    """Times of decode steps of a number of rows between two powers of two.

    `debt` are the seconds that drafts have lost: steps without any repay a small share of their time. So all that is
    lost by trying is bounded, however the device and the texts behave.
    """

    def __init__(self) -> None:
        self.plain = 0.0
        """Seconds of a step without drafts: the median of the last ones."""
        self.debt = 0.0
        self.rest = 0
        """Steps until drafts are thought of again."""
        self.patience = FIRST_PATIENCE
        self.num_idle = 0
        """Steps since the last one with drafts."""
        self.is_trying = False
        """Whether a try has begun: the next answer is the same, as one step asks twice."""
        self.num_drafted = 0
        """Steps with drafts since the last measured one without."""
        self.renewal = 64
        """Such steps after which some are made without drafts, to know their time."""
        self.fixed = self.each = 0.0
        """A step with n drafts is thought to take fixed + n * each seconds."""
        self.speed = 0.0
        """Tokens per second that drafts should reach."""
        self._plain: deque[float] = deque(maxlen=9)
        self._drafted: deque[tuple[int, float]] = deque(maxlen=24)

    @property
    def is_ready(self) -> bool:
        return len(self._plain) >= NUM_CALM and self.plain > 0

    @property
    def is_known(self) -> bool:
        return bool(self._drafted)

    def seconds(self, num_drafts: int) -> float:
        return max(self.fixed + num_drafts * self.each, self.plain)

    def add_plain(self, seconds: float) -> None:
        before = self.plain
        self._plain.append(seconds)
        self.plain = statistics.median(self._plain)
        self.num_drafted = 0
        same = abs(self.plain - before) <= 0.1 * before
        self.renewal = min(self.renewal + 16, 512) if same else 64
        self._fit()

    def add_drafted(self, num_drafts: int, seconds: float) -> None:
        if self._drafted:
            expected = self.seconds(num_drafts)
            if seconds < 0.6 * expected:
                self._drafted.clear()  # what was measured was an exception, or is over
            elif len(self._drafted) > NUM_CALM:
                seconds = min(seconds, 1.5 * expected)
        self._drafted.append((num_drafts, seconds))
        self._fit()

    def owe(self, seconds: float) -> None:
        """Drafts lost these seconds, or won them if negative."""
        self.debt = max(self.debt + seconds, -MOST_OWED * self.plain)

    def _fit(self) -> None:
        """The line with least squares; a step without drafts counts a little, so that one number of drafts suffices."""
        if not self._drafted:
            return
        prior = 0.1
        weight = prior + len(self._drafted)
        mean = sum(n for n, _ in self._drafted) / weight
        mean_seconds = (prior * self.plain + sum(t for _, t in self._drafted)) / weight
        spread = prior * mean * mean + sum((n - mean) ** 2 for n, _ in self._drafted)
        common = -prior * mean * (self.plain - mean_seconds)
        common += sum((n - mean) * (t - mean_seconds) for n, t in self._drafted)
        self.each = max(common / spread, 0.0)
        self.fixed = mean_seconds - self.each * mean


class Drafts:
    """Proposes drafts while they pay: while tokens per second with them are more than without.

    A step without drafts may overlap with the next; one with drafts may not, and computes more tokens. What that costs
    is measured by number of rows. What it yields is estimated by each sequence's rate.
    """

    def __init__(self, proposer: Proposer, max_drafts: int, *, for_every_row: bool = False) -> None:
        """for_every_row: see `BackendLimits.drafts_every_row`."""
        self._proposer, self._max, self._for_every_row = proposer, max_drafts, for_every_row
        self._paces: dict[int, _Pace] = {}
        self._threshold = 1.0
        """Probability from which a draft pays in this step."""
        self._going = False
        self._num_calm = 0
        self._num_accepted = 0

    def wants(self, sequences: Collection[Sequence]) -> bool:
        """Whether the next step should have drafts for some of these, which decode.

        Asked while a step is in flight, so that the next one waits for it, and again before drafts are proposed.
        """
        self._num_accepted = 0
        self._going = bool(self._max and sequences) and self._pays(sequences)
        self._num_calm = 0 if self._going else self._num_calm + 1
        return self._going

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most `most` drafts for a sequence that has no row in flight; none unless `wants` said yes."""
        if not self._going:
            return ()
        tokens = sequence.tokens
        sequence.drafting = prospect = self._proposer.look(tokens, sequence.drafting)
        number = min(self._number(prospect.rate), most) if prospect.has_drafts else 0
        return self._proposer.propose(tokens, prospect, number) if number > 0 else ()

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What became of the drafts of a row."""
        self._num_accepted += num_accepted
        if sequence.drafting is not None:  # else a form forced the drafts
            self._proposer.learn(sequence.tokens, sequence.drafting, num_drafts, num_accepted)

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None:
        """See `Drafting.measure`."""
        if not self._max or not num_rows:
            return
        pace, num_drafts = self._pace(num_rows), num_tokens - num_rows
        if num_prompt_tokens:
            if num_drafts and pace.is_ready:
                # What it takes without drafts is not known. Their share of it is at most that of its tokens.
                cost = seconds * num_drafts / (num_tokens + num_prompt_tokens)
                self._charge(pace, cost - self._num_accepted / num_rows * pace.plain, num_drafts / num_rows)
        elif num_drafts and pace.is_ready:
            pace.num_idle, pace.is_trying = 0, False
            pace.num_drafted += 1
            pace.add_drafted(num_drafts, seconds)
            self._charge(pace, seconds - (num_rows + self._num_accepted) / num_rows * pace.plain, num_drafts / num_rows)
        elif not num_drafts and self._num_calm >= NUM_CALM:
            pace.num_idle += 1
            pace.add_plain(seconds)
            pace.owe(-REPAID * pace.plain)
        elif pace.is_ready:  # it waited for drafts that did not come, or for the step with drafts before
            self._charge(pace, seconds - pace.plain, 0.0)

    def _charge(self, pace: _Pace, lost: float, num_more: float) -> None:
        """Drafts that lose too much rest until that is repaid. What took still longer did so for other reasons."""
        pace.owe(min(lost, (2 + num_more) * pace.plain))
        if pace.debt > MOST_OWED * pace.plain:
            pace.rest = math.ceil(pace.debt / (REPAID * pace.plain))
            pace.patience = min(2 * pace.patience, MAX_PATIENCE)
        elif pace.debt <= -MOST_OWED * pace.plain:
            pace.patience = FIRST_PATIENCE

    def _pace(self, num_rows: int) -> _Pace:
        name = num_rows.bit_length()
        if name not in self._paces:
            self._paces[name] = _Pace()
        return self._paces[name]

    def _pays(self, sequences: Collection[Sequence]) -> bool:
        num_rows = len(sequences)
        pace = self._pace(num_rows)
        if pace.rest:
            pace.rest -= 1
            return False
        if not pace.is_ready:
            return False
        if pace.num_drafted >= pace.renewal:
            pace.rest = NUM_CALM
            return False
        plain_speed = num_rows / pace.plain
        most = num_rows * self._max
        tries = pace.is_trying or not pace.is_known or pace.num_idle >= pace.patience
        if not tries and num_rows + most <= plain_speed * pace.seconds(most):
            pace.rest = NUM_SKIPPED  # it would not pay if all were right
            return False
        self._threshold = pace.each * max(plain_speed, pace.speed) if pace.is_known else TRIED
        num_drafts, expected = self._expected(sequences)
        speed = (num_rows + expected) / pace.seconds(num_drafts) if num_drafts else 0.0
        if pace.is_known and speed > 1.01 * plain_speed:
            pace.speed = speed
            return True
        pace.speed = 0.0
        if pace.debt <= 0 and tries:
            self._threshold = min(self._threshold, TRIED)
            num_drafts, expected = self._expected(sequences)
            if num_drafts:
                if not pace.is_trying:
                    pace.patience = min(2 * pace.patience, MAX_PATIENCE)
                pace.is_trying = not pace.is_trying
                return True
        pace.is_trying = False
        pace.rest = min(num_rows // 8, 8)
        return False

    def _expected(self, sequences: Collection[Sequence]) -> tuple[int, float]:
        """Drafts that these would have, and how many of them would be accepted."""
        look, num_drafts, expected = self._proposer.look, 0, 0.0
        for sequence in sequences:
            sequence.drafting = prospect = look(sequence.tokens, sequence.drafting)
            if prospect.has_drafts:
                rate = prospect.rate
                if number := self._number(rate):
                    num_drafts += number
                    expected += rate * (1 - rate**number) / (1 - rate) if rate < 1 else number
        return num_drafts, expected

    def _number(self, rate: float) -> int:
        """Drafts that pay for a sequence: the last of them is right with at least the threshold's probability."""
        if self._for_every_row:
            return self._max
        if rate <= self._threshold:
            return 0
        if self._threshold <= 0 or rate >= 1:
            return self._max
        return min(int(math.log(self._threshold) / math.log(rate)), self._max)


def drafts_of(configured: Speculation, limits: BackendLimits) -> Drafts | None:
    """Who proposes drafts to a backend; None where no row may have any."""
    if not configured.method or not limits.max_drafts:
        return None
    proposer: Proposer = OnDevice() if configured.method in METHODS_WITH_MODEL else NGram(*configured.match)
    return Drafts(proposer, limits.max_drafts, for_every_row=limits.drafts_every_row)
