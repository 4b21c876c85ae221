"""Random chat traffic: conversations that start at random times, some with a long document.

Generated from a seed, so that two policies get equal traffic. Called by `bench simulate`.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY_SIZE = 128_256

Span = tuple[int, int]
"""Minimum and maximum of a log-uniform distribution."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Parameters of the traffic. Token counts are drawn from spans."""

    rate: float
    """Requests per second, including follow-ups."""
    short_prompt: Span
    long_prompt: Span
    long_share: float
    """Share of conversations that start with a long prompt."""
    answer: Span
    turns: float
    """Mean number of requests per conversation; 1: no follow-up."""
    follow_up: Span
    """Tokens that a follow-up adds to the conversation."""
    think_seconds: float
    """Mean time between the end of an answer and the follow-up."""
    system_tokens: int
    """Tokens of the prefix shared by all prompts."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the tokens that it adds to the conversation, and the length of its answer."""

    token_ids: tuple[int, ...]
    answer_tokens: int
    think_seconds: float
    """Time since the previous answer; 0 for the first turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """`begins`: time of its first request, in seconds."""

    begins: float
    long: bool
    turns: tuple[Turn, ...]


def conversations(traffic: Traffic, seed: int, max_length: int) -> Iterator[Conversation]:
    """An endless sequence, ordered by start time, of conversations that fit `max_length`.

    Arrivals are a Poisson process; the number of turns is geometric.
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
    """Truncates the first turn to fit; the conversation ends before a later turn that does not fit."""
    answer = min(_draw(numbers, traffic.answer), max_length - 1)
    length = max(_draw(numbers, traffic.long_prompt if long else traffic.short_prompt), 1)
    prompt = (system + _token_ids(numbers, length))[: max_length - answer]
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
    # In one call, because prompts are long.
    raw = struct.unpack(f"<{count}I", numbers.randbytes(4 * count))
    return tuple(number % VOCABULARY_SIZE for number in raw)
