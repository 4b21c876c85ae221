"""Drafts: what is found in a sequence's own tokens, how much work that is, and that drafts pay or stop."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.drafts import NUM_INDEXED, NUM_JUDGED, Drafts, NGram
from neuron_runtime.engine.sequence import Sequence


def found(tokens: Tokens[int], most: int = 4, min_match: int = 2, max_match: int = 8) -> list[int]:
    """The drafts of a sequence that had its tokens one by one."""
    ngram, state = NGram(min_match, max_match), None
    for end in range(1, len(tokens) + 1):
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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 4))
def test_whatever_is_proposed_follows_an_earlier_run_that_ends_like_the_sequence(
    tokens: list[int], min_match: int, more: int
) -> None:
    drafts = found(tokens, 5, min_match, min_match + more)
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


# Whether they pay


class Device:
    """Rows of answers that are known, on a device of which only step times are known, driven as the engine drives one:
    a step without drafts is scheduled while the one before runs."""

    def __init__(self, seconds: Callable[[int, int], float], *, waits: float = 0.0, noise: float = 0.0) -> None:
        self._seconds = seconds
        """Of a step with so many rows and so many drafts."""
        self._waits, self._noise = waits, noise
        """Seconds that a step takes longer which is not scheduled while the one before runs."""
        self.num_drafted = 0

    def speed(self, num_rows: int, num_steps: int, text: Text, drafts: Drafts | None = None, seed: int = 1) -> float:
        """Tokens per second; a row that ends is followed by another."""
        rng = random.Random(seed)
        rows = [Row(text, rng) for _ in range(num_rows)]
        seconds, num_tokens, alone = 0.0, 0, False
        for _ in range(num_steps):
            sequences = [row.sequence for row in rows]
            alone = alone or (drafts is not None and drafts.wants(sequences))
            proposed = [()] * num_rows
            if drafts is not None and alone and drafts.wants(sequences):
                proposed = [drafts.propose(row.sequence, row.most) for row in rows]
            num_drafts = sum(map(len, proposed))
            step = self._seconds(num_rows, num_drafts) + self._waits * alone
            step *= 1 + self._noise * rng.uniform(-1, 1)
            seconds += step
            for row, own in zip(rows, proposed, strict=True):
                num_accepted = row.take(own)
                num_tokens += 1 + num_accepted
                if own and drafts is not None:
                    drafts.learn(row.sequence, len(own), num_accepted)
            if drafts is not None:
                drafts.measure(num_rows, num_rows + num_drafts, step)
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

    def take(self, drafts: tuple[int, ...]) -> int:
        """The accepted drafts and one more token are its next tokens; returns how many drafts were accepted."""
        rest = self._answer[len(self.sequence.tokens) - self._num_prompt :]
        num_accepted = next((i for i, (a, b) in enumerate(zip(drafts, rest, strict=False)) if a != b), len(drafts))
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


TEXTS = [random_text, few_words, edited_file, some_edit]
DEVICES: dict[str, Callable[[int, int], float]] = {
    "drafts cost nothing": lambda rows, drafts: 10 + 0.05 * rows,
    "drafts cost as much as rows": lambda rows, drafts: 0.5 * (rows + drafts),
    "a graph for drafts": lambda rows, drafts: (10 + 0.05 * rows) * (1.5 if drafts else 1),
    "in between": lambda rows, drafts: 10 + 0.5 * (rows + drafts) + 2 * (drafts > 0),
}


@pytest.mark.parametrize("num_rows", [1, 3, 64])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("device", DEVICES)
def test_drafts_cost_two_percent_at_most_whatever_device_and_text(device: str, text: Text, num_rows: int) -> None:
    seconds = DEVICES[device]
    num_steps = 1500 if num_rows < 64 else 700
    without = Device(seconds).speed(num_rows, 50, random_text)
    assert Device(seconds, noise=0.1).speed(num_rows, num_steps, text, Drafts(NGram(), 4)) >= 0.98 * without
