"""Drafts that a backend makes itself, and requests that try them."""

from __future__ import annotations

from random import Random
from typing import Any

from neuron_runtime.backend.slots import FedRows
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.core import NO_TOKEN, Request, Sampling
from neuron_runtime.engine.drafting import Drafting
from neuron_runtime.engine.sequence import Sequence

MAX_DRAFTS = 3
BLOCKS: dict[str, Any] = {
    "layout": "blocks",
    "block_size": 8,
    "num_blocks": 40,
    "max_sequences": 4,
    "max_model_length": 120,
    "max_step_tokens": 32,
}
SLOTS = {**BLOCKS, "layout": "slots", "block_size": 0, "num_blocks": 0}


class EverySecond(Drafting):
    """As many drafts of the device as fit, in every second step of a row, so that the draft model falls behind."""

    def __init__(self, period: int = 2) -> None:
        self.learned: list[tuple[int, int]] = []
        self.period, self.num_asked = period, 0

    def wants(self, sequences: Any) -> bool:
        return bool(sequences)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self.num_asked += 1
        return (NO_TOKEN,) * most if self.num_asked % self.period == 0 else ()

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        if sequence.request.sampling.greedy:
            self.learned.append((num_drafts, num_accepted))

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None:
        pass


def some_requests() -> list[Request]:
    """With shared beginnings, longer than a step, and drawn ones."""
    random, found = Random(2), []
    text = tuple(random.randrange(256) for _ in range(80))
    for number, length in enumerate((3, 40, 70, 41, 66, 1, 24)):
        prompt = (*text[: length // 2], *(random.randrange(256) for _ in range(length - length // 2)))
        sampling = Sampling(temperature=0.7 * (number == 3), seed=number, max_tokens=min(30, 120 - length))
        found.append(Request(f"{number}", prompt, sampling))
    return found


class Seen:
    """The drafts of every row that has some, with the tokens that they follow."""

    def __init__(self, backend: TorchBackend) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        draft, mirror = backend._draft, backend._mirror
        assert draft is not None
        fill = draft.fill

        def filled(rows: FedRows) -> FedRows:
            found = fill(rows)
            if found.drafts is not None and found.num_drafts is not None:
                for slot, start, of_row, count in zip(
                    rows.slots, rows.start, found.drafts.tolist(), found.num_drafts, strict=True
                ):
                    if count:
                        self.drafts.append((mirror.tokens[slot, : start + 1].tolist(), of_row[:count]))
            return found

        draft.fill = filled  # type: ignore[method-assign]
