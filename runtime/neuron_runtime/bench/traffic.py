"""Traffic of people who talk with a model: conversations that begin at random, some with a long document.

Made from a seed, so that two policies see the same. Called by `bench simulate`; knows no engine and no time but the
moments it draws.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY_SIZE = 128_256

Span = tuple[int, int]
"""The fewest and the most; in between, all orders of magnitude are equally likely."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked, on average. Token counts are drawn from spans."""

    rate: float
    """Requests per second, follow-up questions included."""
    short_prompt: Span
    long_prompt: Span
    long_share: float
    """Of conversations that begin with a long prompt."""
    answer: Span
    turns: float
    """Questions of a conversation, on average; 1: no follow-up."""
    follow_up: Span
    """What a follow-up adds to what was said."""
    think_seconds: float
    """Between an answer's end and the follow-up, on average."""
    system_tokens: int
    """The beginning that all prompts share."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question: what it adds to all that was said, and how long its answer is."""

    token_ids: tuple[int, ...]
    answer_tokens: int
    think_seconds: float
    """After the answer before; of the first turn 0."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """`begins`: when its first question comes, in seconds."""

    begins: float
    long: bool
    turns: tuple[Turn, ...]


def conversations(traffic: Traffic, seed: int, max_length: int) -> Iterator[Conversation]:
    """Without end, in order of their begin from 0 on; what would not fit into `max_length` is not asked.

    Arrivals are a Poisson process; numbers of turns are geometric.
    """
    numbers = random.Random(seed)  # noqa: S311 - traffic, no secret
    system = _token_ids(numbers, traffic.system_tokens)
    now = 0.0
    while True:
        now += numbers.expovariate(traffic.rate / traffic.turns)
        long = numbers.random() < traffic.long_share
        yield Conversation(now, long, tuple(_turns(numbers, traffic, system, long, max_length)))


def _turns(
    numbers: random.Random, traffic: Traffic, system: tuple[int, ...], long: bool, max_length: int
) -> Iterator[Turn]:
    """The first one is cut to fit; with a later one that does not fit the conversation ends."""
    answer = min(_draw(numbers, traffic.answer), max_length - 1)
    asked = max(_draw(numbers, traffic.long_prompt if long else traffic.short_prompt), 1)
    prompt = (system + _token_ids(numbers, asked))[: max_length - answer]
    yield Turn(prompt, answer, 0.0)
    said = len(prompt) + answer
    while numbers.random() >= 1 / traffic.turns:
        added, answer = max(_draw(numbers, traffic.follow_up), 1), _draw(numbers, traffic.answer)
        said += added + answer
        if said > max_length:
            return
        yield Turn(_token_ids(numbers, added), answer, numbers.expovariate(1.0) * traffic.think_seconds)


def _draw(numbers: random.Random, span: Span) -> int:
    low, high = span
    return round(math.exp(numbers.uniform(math.log(low), math.log(high))))


def _token_ids(numbers: random.Random, count: int) -> tuple[int, ...]:
    # All at once: prompts are long.
    raw = struct.unpack(f"<{count}I", numbers.randbytes(4 * count))
    return tuple(number % VOCABULARY_SIZE for number in raw)
