"""Engine and torch backend together: on real arithmetic too, each request gets the tokens it gets alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from neuron_runtime.backend.torch import load_backend
from neuron_runtime.config import EngineLimits, ModelSource, RuntimeConfig
from neuron_runtime.core import Request, SamplingParams
from neuron_runtime.engine.loop import Engine

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
NUM_REQUESTS = 8


def engine(**limits: int) -> Engine:
    config = RuntimeConfig(
        version=1,
        model=ModelSource(uri=MODEL.as_uri()),
        served_names=("demo",),
        dtype="float32",
        limits=EngineLimits(max_model_length=128, **limits),
    )
    return Engine(load_backend(MODEL, config, lambda stage, share: None))


def requests() -> list[Request]:
    """Greedy and drawn answers to prompts of random tokens."""
    numbers = random.Random(1)
    return [
        Request(
            f"r{number}",
            tuple(numbers.randrange(300) for _ in range(numbers.randrange(1, 60))),
            SamplingParams(max_tokens=24, temperature=float(number % 2), seed=number),
        )
        for number in range(NUM_REQUESTS)
    ]


def finish(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    quiet = engine(max_sequences=1)
    tokens: dict[str, list[int]] = {}
    for request in requests():
        quiet.add(request)
        tokens |= finish(quiet)
    return tokens


@pytest.mark.parametrize(
    ("limits", "preempts"),
    [
        ({"max_sequences": 4}, False),
        ({"max_sequences": 4, "max_step_tokens": 16}, False),
        ({"max_sequences": 6, "block_size": 8, "num_blocks": 16, "max_step_tokens": 32}, True),
    ],
    ids=["a line per sequence", "prompts in parts", "blocks too few for all"],
)
def test_together_each_request_gets_the_tokens_it_gets_alone(
    limits: dict[str, int], preempts: bool, alone: dict[str, list[int]]
) -> None:
    busy = engine(**limits)
    for request in requests():
        busy.add(request)
    assert finish(busy) == alone
    stats = busy.stats
    assert (stats.num_preemptions_total > 0) is preempts
    assert stats.num_decode_steps_ahead_total >= 0.9 * stats.num_decode_steps_total
