"""Drafts from answers that are known, most of them right, so that rows with drafts come in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from neuron_runtime.core import TokenEvent
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.sequence import Sequence


class Told:
    """Implements `Drafting`. answers: by request. A draft is wrong with probability `wrong`."""

    def __init__(self, answers: Mapping[str, list[int]], *, wrong: float = 0.2, vocabulary_size: int = 256) -> None:
        self._answers, self._wrong, self._random = answers, wrong, Random(1)
        self._vocabulary_size = vocabulary_size
        self.num_drafts = self.num_accepted = 0

    def wants(self, sequences: Iterable[Sequence]) -> bool:
        return True

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        known, random = len(sequence.tokens) - sequence.num_prompt, self._random
        right = self._answers[sequence.request.request_id][known : known + random.randint(0, most)]
        return tuple(
            random.randrange(self._vocabulary_size) if random.random() < self._wrong else token for token in right
        )

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None:
        assert num_tokens >= num_rows > 0


def events_of(engine: Engine, requests: Iterable[Any]) -> dict[str, list[TokenEvent]]:
    """Requests arrive one by one, some steps apart."""
    found: dict[str, list[TokenEvent]] = {}
    for request in [*requests, None]:
        if request is not None:
            engine.add(request)
        num_steps = 0
        while engine.has_work and (request is None or num_steps < 3):
            for event in engine.step():
                found.setdefault(event.request_id, []).append(event)
            num_steps += 1
    return found


def tokens_of(events: Mapping[str, list[TokenEvent]]) -> dict[str, list[int]]:
    return {name: [token for one in of_request for token in one.token_ids] for name, of_request in events.items()}
