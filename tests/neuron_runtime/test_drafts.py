"""Drafts: what is found in a sequence's own tokens, how much work that is, and that drafts pay or stop."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_runtime.core import NO_TOKEN, Request, Sampling
from neuron_runtime.engine.drafting import Drafting
from neuron_runtime.engine.drafts import (
    MAX_HEADS,
    NUM_CANDIDATES,
    NUM_INDEXED,
    NUM_JUDGED,
    TRIED,
    Drafts,
    NGram,
    OnDevice,
)
from neuron_runtime.engine.sequence import Sequence


def found(
    tokens: Tokens[int], most: int = 4, min_match: int = 2, max_match: int = 8, steps: Tokens[int] = (1,)
) -> list[int]:
    """The drafts of a sequence that had its tokens one by one, or so many at a time, in turns."""
    ngram, state, ends = NGram(min_match, max_match), None, [0]
    while ends[-1] < len(tokens):
        ends.append(min(ends[-1] + steps[len(ends) % len(steps)], len(tokens)))
    for end in ends[1:]:
        state = ngram.look(list(tokens[:end]), state)
    assert state is not None
    return list(ngram.propose(list(tokens), state, most))


# What is found


def test_the_tokens_behind_the_last_match_are_proposed() -> None:
    assert found([7, 1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]
    assert found([7, 1, 2, 3, 4, 5, 9, 1, 2], most=2) == [3, 4]


def test_a_run_shorter_than_the_shortest_match_is_no_match() -> None:
    assert found([7, 1, 2, 3, 9, 8, 2]) == []
    assert found([7, 1, 2, 3, 9, 8, 2], min_match=1) == [3, 9, 8, 2]
    assert found([1]) == []


def test_the_longest_match_wins_and_among_equals_the_latest() -> None:
    long, short = [5, 1, 2, 30], [6, 1, 2, 40]
    assert found([*long, *short, 5, 1, 2], most=1) == [30]
    assert found([*long, *short, 9, 1, 2], most=1) == [40]


def test_a_match_that_overlaps_its_continuation_repeats() -> None:
    assert found([1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]
    assert found([3, 3, 3], most=4) == [3, 3, 3, 3]
    assert found([8, 1, 2, 3, 1, 2, 3], most=7) == [1, 2, 3, 1, 2, 3, 1]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
)
def test_whatever_is_proposed_follows_an_earlier_run_that_ends_like_the_sequence(
    tokens: list[int], min_match: int, more: int, steps: list[int]
) -> None:
    """However seldom it is looked at: while it waits or is preempted, nobody looks."""
    drafts = found(tokens, 5, min_match, min_match + more, steps)
    earlier = [at for at in range(min_match, len(tokens)) if tokens[at - min_match : at] == tokens[-min_match:]]
    continued = []
    for at in earlier:
        text = list(tokens)
        for i in range(5):
            text.append(text[at + i])
        continued.append(text[len(tokens) :])
    assert drafts in continued if earlier else not drafts


def test_a_long_prompt_is_indexed_in_parts_and_found_before_it_is_indexed_whole() -> None:
    prompt = list(range(10_000, 20_000))
    tokens, ngram, state, looks = [*prompt, *prompt[100:103]], NGram(), None, 0
    while state is None or len(state.before) <= len(tokens):
        before = 1 if state is None else len(state.before)
        state = ngram.look(tokens, state)
        assert len(state.before) - before <= NUM_INDEXED + NUM_JUDGED
        assert ngram.propose(tokens, state, 2) == tuple(prompt[103:105])
        looks += 1
    assert looks >= 10_000 // (NUM_INDEXED + NUM_JUDGED)


def test_sequences_do_not_see_each_others_tokens() -> None:
    ngram = NGram()
    first, second = [1, 2, 3, 4, 5, 1, 2], [9, 9, 7, 6, 8, 1, 2]
    states = ngram.look(first, None), ngram.look(second, None)
    assert [ngram.propose(one, state, 2) for one, state in zip((first, second), states, strict=True)] == [(3, 4), ()]


class Counted(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        got = super().__getitem__(at)
        self.num_read += len(got) if isinstance(at, slice) else 1
        return got


@pytest.mark.parametrize("num_words", [1, 2, 1000])
def test_the_work_of_a_step_does_not_grow_with_the_length(num_words: int) -> None:
    rng, ngram, state = random.Random(1), NGram(2, 8), None
    tokens = Counted(rng.randrange(num_words) for _ in range(20_000))
    while state is None or len(state.before) <= len(tokens):
        state = ngram.look(tokens, state)
    for _ in range(200):
        tokens.append(rng.randrange(num_words))
        tokens.num_read = 0
        state = ngram.look(tokens, state)
        assert tokens.num_read <= 2 + 2 + NUM_CANDIDATES * 2 * 8
    assert len(state.heads) <= MAX_HEADS
    assert len(state.before) == len(tokens) + 1


def test_the_device_makes_drafts_itself_and_a_sequence_whose_drafts_are_wrong_has_none_for_a_while() -> None:
    proposer = OnDevice()
    bad, good = proposer.look([1], None), proposer.look([1], None)
    assert proposer.propose([1], good, 3) == (NO_TOKEN,) * 3
    pauses, tokens = [], [1]
    for _ in range(3):
        while bad.rate > TRIED:
            proposer.learn(tokens, bad, 1, 0)
            proposer.learn(tokens, good, 1, 1)
        began = len(tokens)
        while proposer.look(tokens, bad).rate <= TRIED:
            tokens.append(1)
        pauses.append(len(tokens) - began)
    assert pauses == [16, 32, 64]
    assert good.rate > 0.9


def test_a_new_sequence_may_have_drafts_of_the_device_however_bad_those_of_others_were() -> None:
    proposer = OnDevice()
    for _ in range(1000):
        proposer.learn([1], proposer.look([1], None), 1, 0)
    assert proposer.look([1], None).rate > TRIED


# Whether they pay


class Device:
    """Rows of answers that are known, on a device of which only step times are known, driven as the engine drives one:
    a step without drafts is scheduled while the one before runs."""

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        *,
        waits: float = 0.0,
        noise: float = 0.0,
        right: float = 0.0,
        num_prompt_tokens: int = 0,
    ) -> None:
        self._seconds = seconds
        """Of a step with so many rows and so many drafts."""
        self._waits, self._noise = waits, noise
        """Seconds that a step takes longer which is not scheduled while the one before runs."""
        self._right = right
        """Probability that a draft of the device is right."""
        self._num_prompt_tokens = num_prompt_tokens
        """Of every second step, which take as long as so many rows."""
        self.num_drafted = 0

    def speed(self, num_rows: int, num_steps: int, text: Text, drafts: Drafting | None = None, seed: int = 1) -> float:
        """Tokens per second; a row that ends is followed by another."""
        rng = random.Random(seed)
        rows = [Row(text, rng) for _ in range(num_rows)]
        seconds, num_tokens, alone = 0.0, 0, False
        for number in range(num_steps):
            beside = self._num_prompt_tokens * (number % 2)
            sequences = [row.sequence for row in rows]
            alone = alone or (drafts is not None and drafts.wants(sequences))
            proposed = [()] * num_rows
            if drafts is not None and alone and drafts.wants(sequences):
                proposed = [drafts.propose(row.sequence, row.most) if row.most > 0 else () for row in rows]
            num_drafts = sum(map(len, proposed))
            step = self._seconds(num_rows + beside, num_drafts) + self._waits * alone
            step *= 1 + self._noise * rng.uniform(-1, 1)
            seconds += step
            for row, own in zip(rows, proposed, strict=True):
                num_accepted = row.take(own, self._right)
                num_tokens += 1 + num_accepted
                if own and drafts is not None:
                    drafts.learn(row.sequence, len(own), num_accepted)
            if drafts is not None:
                drafts.measure(num_rows, num_rows + num_drafts, step, beside)
            alone = num_drafts > 0
            self.num_drafted += alone
            rows = [row if row.most >= 0 else Row(text, rng) for row in rows]
        return num_tokens / seconds


class Row:
    def __init__(self, text: Text, rng: random.Random) -> None:
        prompt, self._answer = text(rng)
        self.sequence = sequence(prompt, len(self._answer))
        self._rng, self._num_prompt = rng, len(prompt)

    @property
    def most(self) -> int:
        """Drafts that its next step may have; negative: it is complete."""
        return len(self._answer) + self._num_prompt - len(self.sequence.tokens) - 1

    def take(self, drafts: tuple[int, ...], right: float) -> int:
        """The accepted drafts and one more token are its next tokens; returns how many drafts were accepted."""
        rest = self._answer[len(self.sequence.tokens) - self._num_prompt :]
        of_device = drafts[:1] == (NO_TOKEN,)
        wrong = (self._rng.random() >= right if of_device else a != b for a, b in zip(drafts, rest, strict=False))
        num_accepted = next((i for i, it_is in enumerate(wrong) if it_is), len(drafts))
        self.sequence.tokens.extend(rest[: num_accepted + 1])
        return num_accepted


Text = Callable[[random.Random], tuple[list[int], list[int]]]
"""A prompt and its answer."""


def sequence(prompt: list[int], num_tokens: int) -> Sequence:
    return Sequence(Request("r", tuple(prompt), Sampling(max_tokens=num_tokens)), (0, 0), 16, None, False)


def random_text(rng: random.Random) -> tuple[list[int], list[int]]:
    return [rng.randrange(5000) for _ in range(20)], [rng.randrange(5000) for _ in range(200)]


def few_words(rng: random.Random) -> tuple[list[int], list[int]]:
    """Everything was there before, but says nothing of what follows."""
    return [rng.randrange(12) for _ in range(20)], [rng.randrange(12) for _ in range(200)]


def edited_file(rng: random.Random) -> tuple[list[int], list[int]]:
    """The answer is the prompt with an edit about every 25 tokens."""
    prompt, answer = [rng.randrange(5000) for _ in range(250)], []
    for token in prompt:
        if rng.random() > 0.04:
            answer.append(token)
        elif rng.random() > 0.3:
            answer += [rng.randrange(5000) for _ in range(rng.randrange(1, 6))]
    return prompt, answer


def some_edit(rng: random.Random) -> tuple[list[int], list[int]]:
    return edited_file(rng) if rng.random() < 0.3 else random_text(rng)


def no_text(rng: random.Random) -> tuple[list[int], list[int]]:
    """Nothing of it is ever right if drafts are the device's."""
    return [rng.randrange(5000)], [rng.randrange(5000) for _ in range(150)]


TEXTS = [random_text, few_words, edited_file, some_edit]
DEVICES: dict[str, Callable[[int, int], float]] = {
    "drafts cost nothing": lambda rows, drafts: 10 + 0.05 * rows,
    "drafts cost as much as rows": lambda rows, drafts: 0.5 * (rows + drafts),
    "a graph for drafts": lambda rows, drafts: (10 + 0.05 * rows) * (1.5 if drafts else 1),
    "in between": lambda rows, drafts: 10 + 0.5 * (rows + drafts) + 2 * (drafts > 0),
}


@pytest.mark.parametrize("num_rows", [1, 3, 32])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("device", DEVICES)
def test_drafts_cost_two_percent_at_most_whatever_device_and_text(device: str, text: Text, num_rows: int) -> None:
    seconds = DEVICES[device]
    num_steps = 1500 if num_rows < 32 else 700
    without = Device(seconds).speed(num_rows, 50, random_text)
    assert Device(seconds, noise=0.1).speed(num_rows, num_steps, text, Drafts(NGram(), 4)) >= 0.98 * without


@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("text", TEXTS)
def test_drafts_beside_prompts_cost_two_percent_at_most(text: Text, num_rows: int) -> None:
    """Where they cost nothing in steps of decode rows alone, but as much as a token of a prompt beside prompts."""

    def seconds(rows: int, num_drafts: int) -> float:
        return max(5 * num_rows, rows + num_drafts)

    without = Device(seconds, num_prompt_tokens=200).speed(num_rows, 50, random_text)
    with_drafts = Device(seconds, noise=0.1, num_prompt_tokens=200).speed(num_rows, 1000, text, Drafts(NGram(), 4))
    assert with_drafts >= 0.98 * without


class Fixed:
    """Always so many drafts, where there are any."""

    def __init__(self, most: int) -> None:
        self._most, self._ngram = most, NGram()

    def wants(self, sequences: Collection[Sequence]) -> bool:
        return True

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        sequence.drafting = state = self._ngram.look(sequence.tokens, sequence.drafting)
        return self._ngram.propose(sequence.tokens, state, max(min(self._most, most), 0))

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None: ...

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None: ...


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_an_edited_file_is_nearly_as_fast_as_with_the_best_number_of_drafts(device: str, num_rows: int) -> None:
    seconds, num_steps = DEVICES[device], 1000 if num_rows == 1 else 400
    best = max(Device(seconds).speed(num_rows, 200, edited_file, Fixed(most), seed=2) for most in (0, 1, 2, 4))
    assert Device(seconds, noise=0.1).speed(num_rows, num_steps, edited_file, Drafts(NGram(), 4)) >= 0.92 * best


def test_one_row_that_repeats_gets_1_8_times_the_tokens() -> None:
    seconds = DEVICES["a graph for drafts"]
    without = Device(seconds).speed(1, 200, edited_file)
    assert Device(seconds, waits=0.5).speed(1, 1000, edited_file, Drafts(NGram(), 4)) > 1.8 * without


@pytest.mark.long
@given(
    num_rows=st.integers(1, 64),
    right=st.floats(0, 1),
    per_row=st.floats(0, 1),
    fixed=st.floats(0, 1),
    waits=st.floats(0, 0.5),
    noise=st.floats(0, 0.15),
    most=st.integers(1, 8),
    for_every_row=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_drafts_of_the_device_cost_two_percent_at_most(
    *,
    num_rows: int,
    right: float,
    per_row: float,
    fixed: float,
    waits: float,
    noise: float,
    most: int,
    for_every_row: bool,
    seed: int,
) -> None:
    """Whatever share of them is right, a step costs with them, and they cost each: from nothing to as much as a row."""

    def seconds(rows: int, num_drafts: int) -> float:
        return 1 + per_row * (rows + fixed * num_drafts) + fixed * (num_drafts > 0)

    without = Device(seconds).speed(num_rows, 50, no_text)
    num_steps = min(60_000 // num_rows, 3000)
    drafts = Drafts(OnDevice(), most, for_every_row=for_every_row)
    device = Device(seconds, waits=waits, noise=noise, right=right)
    assert device.speed(num_rows, num_steps, no_text, drafts, seed) >= 0.98 * without


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_proposer_that_is_always_wrong_and_sure_of_itself_costs_two_percent_at_most(num_rows: int) -> None:
    class Boaster(OnDevice):
        def look(self, tokens: list[int], state: Any) -> Any:
            boast = super().look(tokens, state)
            boast.rate = 0.99
            return boast

    seconds = DEVICES["a graph for drafts"]
    without = Device(seconds).speed(num_rows, 50, no_text)
    assert Device(seconds).speed(num_rows, 3000, no_text, Drafts(Boaster(), 4)) >= 0.98 * without


@pytest.mark.parametrize("num_rows", [1, 8])
def test_drafts_that_did_not_pay_are_tried_again_and_made_as_soon_as_they_pay(num_rows: int) -> None:
    """Though each step asks twice: while the one before runs, and when its tokens are known."""

    def seconds(rows: int, num_drafts: int) -> float:
        return 1 + 0.02 * num_drafts + 0.4 * (num_drafts > 0)

    drafts = Drafts(OnDevice(), 4)
    bad = Device(seconds, waits=0.05)
    assert bad.speed(num_rows, 1500, no_text, drafts) >= 0.98 * num_rows
    assert 3 <= bad.num_drafted < 50
    good = Device(seconds, waits=0.05, right=0.85)
    assert good.speed(num_rows, 2500, no_text, drafts) >= 1.2 * num_rows


@pytest.mark.parametrize("for_every_row", [True, False])
def test_every_row_takes_all_drafts_where_the_device_makes_them_whether_asked_or_not(for_every_row: bool) -> None:
    """What a row leaves is lost, and an EAGLE head goes on behind the last token that the device accepted."""
    asked: list[tuple[int, int]] = []

    class Watched(OnDevice):
        def propose(self, tokens: list[int], state: Any, most: int) -> tuple[int, ...]:
            asked.append((len(tokens), most))
            return super().propose(tokens, state, most)

    device = Device(lambda rows, drafts: 1.0, waits=0.1, right=0.3)
    device.speed(8, 300, no_text, Drafts(Watched(), 4, for_every_row=for_every_row))
    assert device.num_drafted > 100
    assert all(most == min(4, 150 - tokens) for tokens, most in asked) == for_every_row


def test_rows_are_not_looked_at_where_drafts_cannot_pay() -> None:
    class Watched(NGram):
        num_looks = 0

        def look(self, tokens: list[int], state: Any) -> Any:
            self.num_looks += 1
            return super().look(tokens, state)

    watched = Watched()
    device = Device(lambda rows, drafts: 1.0 * (rows + 3 * drafts))
    device.speed(64, 1000, edited_file, Drafts(watched, 4))
    assert 0 < device.num_drafted < 10
    assert watched.num_looks < 64 * 1000 / 10
