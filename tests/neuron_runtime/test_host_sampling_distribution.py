"""Draws follow the requested distribution and are independent of each other.

Chi-square tests with fixed seeds, so results are the same in every run. The bound is the 99.9 % point.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from helpers.chi_square import assert_follows, bound
from helpers.covering import covering
from neuron_runtime.backend.host_sampling.adjustments import Adjustments
from neuron_runtime.backend.host_sampling.drawing import SamplingTable, choose, weighed_at
from neuron_runtime.backend.host_sampling.likeliest import Scores
from neuron_runtime.core import Sampling

VOCABULARY = 30
PROMPT = (3, 4, 5, 28, 28)
ANSWER = (7, 8, 8, 29, 29, 29)
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(11)) * 1.5
NUM_DRAWS = 6000


def asked_for(params: Sampling) -> np.ndarray:
    """The distribution, computed step by step."""
    logits = [float(one) for one in LOGITS]
    for token in range(VOCABULARY):
        forbidden = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        ends_word = any(
            word[-1] == token and ANSWER[len(ANSWER) - len(word) + 1 :] == word[:-1] for word in params.bad_words
        )
        if forbidden or ends_word:
            logits[token] = -math.inf
        logits[token] += dict(params.logit_bias).get(token, 0.0)
        if token in PROMPT + ANSWER:
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        logits[token] -= params.frequency_penalty * ANSWER.count(token) + params.presence_penalty * (token in ANSWER)
    weights = np.exp(np.array(logits) / params.temperature)
    weights[weights < params.min_p * weights.max()] = 0.0
    order = np.argsort(-weights)
    weights[order[params.top_k or VOCABULARY :]] = 0.0
    shares = weights / weights.sum()
    before = 0.0
    for token in order:
        if before >= params.top_p:
            shares[token] = 0.0
        before += shares[token]
    return np.asarray(shares / shares.sum())


def drawn(params: Sampling, *, seeds: Any = 0, choices: Any = 0, positions: Any = 0) -> np.ndarray:
    """One draw per seed, choice and output position; each argument is one value for all draws or one per draw."""
    seeds, choices, positions = (one.ravel() for one in np.broadcast_arrays(seeds, choices, positions))
    num = len(seeds)
    table, adjustments = SamplingTable(num), Adjustments(num, VOCABULARY)
    for slot in range(num):
        table.set(slot, params, len(PROMPT))
    table.seed[:], table.choice[:] = seeds, choices
    adjustments.set(0, params, PROMPT + ANSWER, len(PROMPT))
    logits = LOGITS.expand(1, -1).clone()
    known = len(PROMPT + ANSWER)
    tokens = np.array([PROMPT + ANSWER], dtype=np.int32)
    adjustments.apply(logits.numpy(), np.zeros(1, dtype=np.int64), np.array([known]), tokens, {})
    slots = np.arange(num)
    scores = Scores.of(logits.expand(num, -1).contiguous(), weighed_at(table, slots, VOCABULARY))
    return choose(scores, table, slots, positions + len(PROMPT))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
        {"min_p": 0.1, "top_p": 0.9},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6, "temperature": 0.8},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -1.0, "top_p": 0.95},
        {"logit_bias": ((2, 2.0), (8, -3.0), (17, 1.0)), "top_k": 12},
        {"allowed_token_ids": (1, 2, 8, 29), "temperature": 1.3},
        {"bad_words": ((12,), (29, 6), (8, 29, 29, 29, 14), (1, 2)), "min_p": 0.02},
        {
            "temperature": 0.9, "top_k": 20, "top_p": 0.97, "min_p": 0.01, "repetition_penalty": 1.2,
            "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": ((5, 3.0),), "bad_words": ((29, 5), (2,)),
        },
    ],
    ids=lambda asked: "-".join(asked) or "plain",
)  # fmt: skip
def test_draws_follow_the_requested_distribution(asked: dict[str, Any]) -> None:
    params = Sampling(**asked)
    counts = np.bincount(drawn(params, seeds=5, positions=np.arange(NUM_DRAWS)), minlength=VOCABULARY)
    assert_follows(counts, asked_for(params))


def test_the_statistical_test_rejects_a_wrong_distribution() -> None:
    counts = np.bincount(drawn(Sampling(), seeds=5, positions=np.arange(NUM_DRAWS)), minlength=VOCABULARY)
    with pytest.raises(AssertionError):
        assert_follows(counts, asked_for(Sampling(temperature=1.1)))


FLAT: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_p": 0.9, "top_k": 3000}, {"min_p": 0.01, "top_p": 0.7}, {}]


@pytest.mark.parametrize(
    ("asked", "sigma"),
    [
        *covering(FLAT, (0.0, 3.0)),
        *(pytest.param(one, sigma, marks=pytest.mark.long) for one in FLAT for sigma in (0.5, 1.5)),
    ],
)
def test_draws_of_flat_distributions_follow_the_requested_distribution(asked: dict[str, Any], sigma: float) -> None:
    vocabulary, num, at_once, num_bins = 9000, 3000, 100, 40
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2)) * sigma
    weights = logits.double().exp()
    weights[weights < asked.get("min_p", 0.0) * weights.max()] = 0.0
    order = weights.argsort(descending=True)
    until = weights[order][: asked.get("top_k", vocabulary)].cumsum(0)
    last = int(torch.searchsorted(until, asked.get("top_p", 1.0) * until[-1] * (1 - 1e-9)))
    shares = torch.where(logits >= logits[order[last]], weights, 0.0).numpy()
    shares = shares / shares.sum()
    table = SamplingTable(1)
    table.set(0, Sampling(temperature=1.0, seed=4, **asked), 0)
    slots = np.zeros(at_once, dtype=np.int64)
    some = logits.expand(at_once, -1).contiguous()
    scores = Scores.of(some, weighed_at(table, slots, vocabulary))
    parts = [choose(scores, table, slots, np.arange(n, n + at_once)) for n in range(0, num, at_once)]
    counts = np.bincount(np.concatenate(parts), minlength=vocabulary)
    assert not counts[shares == 0].any()
    # Groups of neighbouring tokens with about equal shares.
    bins = np.minimum((shares.cumsum() - shares / 2) * num_bins, num_bins - 1).astype(int)
    assert_follows(*(np.bincount(bins, one, minlength=num_bins) for one in (counts, shares)))


def assert_independent(some: np.ndarray, others: np.ndarray) -> None:
    """A contingency table of the few likeliest tokens and the rest."""
    few = np.argsort(-asked_for(Sampling()))[:6]
    kinds = np.full(VOCABULARY, len(few))
    kinds[few] = np.arange(len(few))
    observed = np.zeros((len(few) + 1, len(few) + 1))
    np.add.at(observed, (kinds[some], kinds[others]), 1)
    expected = observed.sum(1, keepdims=True) * observed.sum(0, keepdims=True) / observed.sum()
    assert (((observed - expected) ** 2) / expected).sum() < bound(len(few) ** 2)


def test_draws_at_different_positions_are_independent() -> None:
    tokens = drawn(Sampling(), seeds=9, positions=np.arange(NUM_DRAWS))
    for lag in (1, 2, 7, 256):
        assert_independent(tokens[:-lag], tokens[lag:])


def test_draws_of_different_choices_are_independent() -> None:
    positions = np.arange(NUM_DRAWS)
    first, second, third = (drawn(Sampling(), seeds=9, choices=n, positions=positions) for n in range(3))
    assert_independent(first, second)
    assert_independent(first, third)
    assert_independent(first[:-1], second[1:])


@pytest.mark.parametrize("other", [1, 2**31, 2**32, 2**63 - 1])
def test_draws_of_different_seeds_are_independent(other: int) -> None:
    positions = np.arange(NUM_DRAWS)
    assert_independent(
        drawn(Sampling(), seeds=0, positions=positions), drawn(Sampling(), seeds=other, positions=positions)
    )


def test_consecutive_seeds_in_one_step_jointly_follow_the_distribution() -> None:
    tokens = drawn(Sampling(), seeds=np.arange(NUM_DRAWS), positions=3)
    assert_follows(np.bincount(tokens, minlength=VOCABULARY), asked_for(Sampling()))
    assert_independent(tokens[:-1], tokens[1:])
