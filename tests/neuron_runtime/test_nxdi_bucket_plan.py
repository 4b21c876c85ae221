"""Buckets that nobody has set: the least padding for the fewest graphs."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_runtime.backend.neuron.bucket_plan import (
    FIXED_TOKENS,
    Lengths,
    choose,
    contexts_of,
    decode_cost,
    log_uniform,
    longest_of,
    prefill_cost,
)

LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
}


def spent(lengths: Lengths, buckets: tuple[int, ...], strict: bool = True) -> float:
    """Mean cost of a prefill, by the rule that the smallest bucket above the length takes it."""
    total = 0.0
    for length, probability in lengths:
        fits = (size for size in buckets if size > length or size == buckets[-1] or (not strict and size == length))
        total += probability * prefill_cost(next(fits))
    return total


@given(
    weights=st.lists(st.integers(0, 20), min_size=6, max_size=6).filter(any),
    count=st.integers(1, 4),
    strict=st.booleans(),
)
def test_no_other_choice_of_as_many_buckets_costs_less(weights: list[int], count: int, strict: bool) -> None:
    lengths = tuple((128 * at + 60, weight / sum(weights)) for at, weight in enumerate(weights))
    chosen = choose(lengths, 768, count, prefill_cost, strict=strict)
    every = [(*some, 768) for some in combinations(range(128, 768, 128), len(chosen) - 1)]
    assert spent(lengths, chosen, strict) == pytest.approx(min(spent(lengths, one, strict) for one in every))


@pytest.mark.parametrize("longest", [512, 4096, 32_768])
def test_chosen_buckets_pad_less_than_powers_of_two_of_about_the_same_number(longest: int) -> None:
    lengths = log_uniform(16, longest)
    chosen = choose(lengths, longest, 12, prefill_cost)
    doubled = tuple(128 << at for at in range(20) if 128 << at <= longest)
    assert len(chosen) <= len(doubled) + 2
    assert spent(lengths, chosen) <= spent(lengths, doubled)


def test_buckets_are_multiples_up_to_the_largest_and_start_at_the_least() -> None:
    chosen = choose(log_uniform(16, 5000), 5000, 12, prefill_cost, least=512, multiple=96)
    assert chosen[-1] == 5000
    assert chosen[0] >= 512
    assert all(size % 96 == 0 for size in chosen[:-1])
    assert list(chosen) == sorted(set(chosen))


def test_a_bucket_that_saves_nothing_is_not_compiled() -> None:
    assert choose(((1000, 1.0),), 1024, 12, prefill_cost) == (1024,)
    assert choose(log_uniform(16, 64), 64, 12, prefill_cost) == (64,)


def test_few_long_contexts_decide_the_length_of_a_decode_step() -> None:
    lengths = log_uniform(16, 8192)

    def mean(distribution: Lengths) -> float:
        return sum(length * probability for length, probability in distribution)

    assert sum(probability for _, probability in longest_of(lengths, 32)) == pytest.approx(1)
    assert mean(lengths) < mean(contexts_of(lengths, 32)) < mean(longest_of(lengths, 32))
    assert [p for _, p in contexts_of(lengths, 1)] == pytest.approx([p for _, p in lengths])


def test_decode_gets_more_buckets_where_the_cache_outweighs_the_weights() -> None:
    contexts = contexts_of(log_uniform(16, 8192), 32)
    alone, together = (choose(contexts, 8192, 8, decode_cost(LLAMA_8B, rows)) for rows in (1, 64))
    assert len(alone) < len(together)


def test_the_probabilities_add_up() -> None:
    for low, high in ((16, 17), (16, 4096), (100, 100), (1, 131_072)):
        assert sum(probability for _, probability in log_uniform(low, high)) == pytest.approx(1)
    assert prefill_cost(128) == FIXED_TOKENS + 128
