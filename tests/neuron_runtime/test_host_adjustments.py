"""Adjustments of logits: each row follows its definition, independent of other rows and earlier sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_runtime.backend.host_sampling.adjustments import Adjustments, SeenTokens
from neuron_runtime.core import Sampling

VOCABULARY = 12
LENGTH = 40


def by_definition(logits: np.ndarray, params: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """One row, token by token, in the order of vLLM's sampler."""
    row = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        for token in range(VOCABULARY):
            if token not in params.allowed_token_ids:
                row[token] = -math.inf
    left = row.copy()
    for word in params.bad_words:
        head = list(word[:-1])
        if len(head) <= len(answer) and list(answer[len(answer) - len(head) :]) == head:
            row[word[-1]] = -math.inf
    if len(answer) < params.min_tokens:
        for token in params.stop_token_ids:
            row[token] = -math.inf
    if (row == -math.inf).all():
        row = left
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in range(VOCABULARY):
        if token in prompt or token in answer:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else (row[token] * params.repetition_penalty)
            )
        row[token] -= params.frequency_penalty * list(answer).count(token)
        row[token] -= params.presence_penalty * (token in answer)
    return row


token = st.integers(0, VOCABULARY - 1)
asked = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.25, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.0]),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, 1.5, 3.0])).map(lambda d: tuple(d.items())),
    allowed_token_ids=st.none() | st.sets(token, min_size=1).map(tuple),
    bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    stop_token_ids=st.frozensets(token, max_size=3),
    min_tokens=st.integers(0, 4),
)
sequence = st.tuples(asked, st.lists(token, min_size=1, max_size=6), st.lists(token, max_size=6))


def changed(adjustments: Adjustments, logits: np.ndarray, sequences: Any, late: Any = None) -> np.ndarray:
    """The logits of all slots; slot i holds sequences[i]."""
    slots = np.arange(len(sequences))
    positions = np.array([len(prompt) + len(answer) for _, prompt, answer in sequences])
    tokens = np.zeros((len(sequences), LENGTH), dtype=np.int32)
    for slot, (_, prompt, answer) in enumerate(sequences):
        tokens[slot, : positions[slot]] = [*prompt, *answer]
    out = logits.copy()
    adjustments.apply(out, slots, positions, tokens, late or {})
    return out


@settings(derandomize=True, database=None)
@given(sequences=st.lists(sequence, min_size=1, max_size=5), data=st.data())
def test_each_row_is_adjusted_as_defined_in_any_batch_and_after_preemption(
    sequences: list[Any], data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    logits = np.random.default_rng(seed).normal(size=(len(sequences), VOCABULARY)).astype(np.float32) * 3
    adjustments = Adjustments(len(sequences), VOCABULARY)
    for slot, (params, prompt, answer) in enumerate(sequences):
        known = data.draw(st.integers(0, len(answer)), label="tokens of the answer known when it was added")
        adjustments.set(slot, params, (*prompt, *answer[:known]), len(prompt))
        for one in answer[known:]:
            adjustments.record(np.array([slot]), np.array([one]))
    out = changed(adjustments, logits, sequences)
    expected = np.array([by_definition(row, *one) for row, one in zip(logits, sequences, strict=True)])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_a_sequence_without_adjustments_is_skipped_and_min_tokens_only_as_long_as_needed() -> None:
    adjustments = Adjustments(3, VOCABULARY)
    adjustments.set(0, Sampling(temperature=0.5, top_p=0.5, min_p=0.1, stop_token_ids=frozenset({1})), (1, 2), 2)
    adjustments.set(1, Sampling(min_tokens=3, stop_token_ids=frozenset({4})), (1, 2), 2)
    adjustments.set(2, Sampling(min_tokens=3), (1, 2), 2)
    slots = np.arange(3)
    for position, expected in ((2, [1]), (4, [1]), (5, []), (30, [])):
        assert adjustments.adjusted(slots, np.full(3, position)).tolist() == expected
    adjustments.set(1, Sampling(), (1, 2), 2)
    assert adjustments.adjusted(slots, np.full(3, 2)).tolist() == []
    assert not adjustments._rules


def test_a_slot_forgets_its_previous_sequence() -> None:
    adjustments = Adjustments(1, VOCABULARY)
    penalised = Sampling(presence_penalty=1.0)
    adjustments.set(0, penalised, (1, 2, 3), 2)
    adjustments.set(0, penalised, (1, 2), 2)
    logits = np.zeros((1, VOCABULARY), dtype=np.float32)
    assert not changed(adjustments, logits, [(penalised, (1, 2), ())]).any()


@pytest.mark.parametrize(
    ("allowed", "late", "expected"),
    [
        (None, (3, 4), {3, 4}),
        ((4, 5), (3, 4), {4}),
        ((5,), (3, 4), {3, 4}),
    ],
)
def test_the_host_mask_applies_regardless_of_allowed_tokens(allowed: Any, late: Any, expected: set[int]) -> None:
    params = Sampling(allowed_token_ids=allowed)
    adjustments = Adjustments(2, VOCABULARY)
    adjustments.set(0, params, (1,), 1)
    adjustments.set(1, Sampling(), (1,), 1)
    logits = np.random.default_rng(0).normal(size=(2, VOCABULARY)).astype(np.float32)
    out = changed(adjustments, logits, [(params, (1,), ()), (Sampling(), (1,), ())], {0: np.array(late)})
    assert set(np.flatnonzero(np.isfinite(out[0])).tolist()) == expected
    assert all(out[0, token] == logits[0, token] for token in expected)
    assert (out[1] == logits[1]).all()


def test_tokens_excluded_by_the_model_are_equally_likely_when_only_they_are_allowed() -> None:
    params = Sampling(allowed_token_ids=(3, 4))
    adjustments = Adjustments(1, VOCABULARY)
    adjustments.set(0, params, (1,), 1)
    logits = np.zeros((1, VOCABULARY), dtype=np.float32)
    logits[0, [3, 4]] = -np.inf
    out = changed(adjustments, logits, [(params, (1,), ())])
    assert np.flatnonzero(out[0] > -np.inf).tolist() == [3, 4]
    assert out[0, 3] == out[0, 4]


def test_tokens_outside_the_vocabulary_are_never_sampled() -> None:
    beyond = VOCABULARY + 3
    params = Sampling(
        logit_bias=((1, 1.0), (beyond, 5.0)),
        allowed_token_ids=(1, 2, beyond),
        bad_words=((beyond,), (1, beyond)),
        stop_token_ids=frozenset({beyond}),
        min_tokens=2,
    )
    adjustments = Adjustments(1, VOCABULARY)
    adjustments.set(0, params, (1,), 1)
    out = changed(adjustments, np.zeros((1, VOCABULARY), dtype=np.float32), [(params, (1,), ())])
    assert out[0, :3].tolist() == [-math.inf, 1.0, 0.0]
    assert (out[0, 3:] == -math.inf).all()


@given(st.lists(st.integers(0, 400), max_size=200), st.lists(st.integers(0, 400), max_size=400))
def test_incremental_counts_equal_those_of_the_whole_answer(prompt: list[int], answer: list[int]) -> None:
    seen = SeenTokens(prompt, ())
    for one in answer:
        seen.add(one)
    assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == {
        one: float(answer.count(one)) for one in {*prompt, *answer}
    }
