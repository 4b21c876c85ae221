"""Engine and torch backend together: with real arithmetic, each request gets the tokens that it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.step_counts import StepCounts
from neuron_runtime.backend.torch import load_backend
from neuron_runtime.config import EngineLimits, ModelSource, RuntimeConfig
from neuron_runtime.core import Request, Sampling, StepKind
from neuron_runtime.engine.loop import Engine

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
NUM_REQUESTS = 8


def engine(*, prefix_caching: Any = "auto", **limits: int) -> Engine:
    config = RuntimeConfig(
        version=1,
        model=ModelSource(uri=MODEL.as_uri()),
        served_names=("demo",),
        dtype="float32",
        prefix_caching=prefix_caching,
        limits=EngineLimits(max_model_length=128, **limits),
    )
    return Engine(load_backend(MODEL, config, lambda stage, share: None))


def requests() -> list[Request]:
    """Greedy and drawn answers to prompts of random tokens. With these seeds no draw is near a tie."""
    numbers = random.Random(1)
    return [
        Request(
            f"r{number}",
            tuple(numbers.randrange(300) for _ in range(numbers.randrange(1, 60))),
            Sampling(max_tokens=24, temperature=float(number % 2), seed=200 + number),
        )
        for number in range(NUM_REQUESTS)
    ]


def finish(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return tokens


def chat() -> list[Request]:
    """Turns with a common prefix, some identical, one of another tenant."""
    numbers = random.Random(2)
    begin = tuple(numbers.randrange(300) for _ in range(37))
    turns = [(*begin, *(numbers.randrange(300) for _ in range(11 * number))) for number in range(4)]
    turns += [turns[3], turns[3], turns[2]]
    asked = [
        Request(f"t{at}", prompt, Sampling(max_tokens=12, temperature=float(at % 2), seed=at))
        for at, prompt in enumerate(turns)
    ]
    return [*asked, replace(asked[-1], request_id="tenant", cache_salt="another")]


@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 16}, {"num_blocks": 34}], ids=["whole", "parts", "few"])
def test_a_cached_prefix_does_not_change_tokens(limits: dict[str, int]) -> None:
    tokens, fed, preemptions = [], [], []
    for prefix_caching in ("enabled", "disabled"):
        shares = engine(prefix_caching=prefix_caching, block_size=4, max_sequences=4, **limits)
        num_fed = 0
        found: dict[str, list[int]] = {}
        for requests in (chat()[:1], chat()[1:]):
            for request in requests:
                shares.add(request)
            while shares.has_work:
                for event in shares.step():
                    found.setdefault(event.request_id, []).extend(event.token_ids)
                num_fed += shares.stats.last_step.num_tokens if shares.stats.last_step else 0
        tokens.append(found)
        fed.append(num_fed)
        stats = shares.stats
        assert (stats.num_prefix_hits_total >= 6 * 32) is (prefix_caching == "enabled")
        assert stats.num_prefix_hits_total <= stats.num_prefix_queries_total
        preemptions.append(stats.num_preemptions_total)
    assert tokens[0] == tokens[1]
    assert fed[0] <= fed[1] - 6 * 32
    assert (preemptions[0] > 0) is ("num_blocks" in limits)


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
def test_concurrent_requests_get_their_solo_tokens(
    limits: dict[str, int], preempts: bool, alone: dict[str, list[int]]
) -> None:
    busy = engine(**limits)
    steps = StepCounts(busy)
    for request in requests():
        busy.add(request)
    assert finish(busy) == alone
    assert (busy.stats.num_preemptions_total > 0) is preempts
    assert steps.num_ahead >= 0.9 * steps.num(StepKind.DECODE)
