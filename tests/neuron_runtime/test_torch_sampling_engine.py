"""Sampling through the engine: a request gets the tokens and logprobs that it gets alone, in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.markov_backend import markov_backend, random_table
from neuron_runtime.backend.torch import backend as torch_backend
from neuron_runtime.core import FinishReason, Request, Sampling, TokenLogprobs
from neuron_runtime.engine.loop import Engine

VOCABULARY = 14
TABLE = random_table(VOCABULARY)
END = 3


class Got:
    """The result of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[tuple[TokenLogprobs, ...]] = []
        self.reason: FinishReason | None = None


def answers(requests: Sequence[Request], table: torch.Tensor = TABLE, **limits: Any) -> tuple[list[Got], int]:
    """The result of each request, and the number of preemptions."""
    backend = markov_backend(table, **limits)
    try:
        engine = Engine(backend)
        got = {request.request_id: Got() for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for event in engine.step():
                one = got[event.request_id]
                one.tokens += event.token_ids
                one.logprobs += event.logprobs
                if event.prompt_logprobs:
                    one.prompt_logprobs.append(event.prompt_logprobs)
                one.reason = event.finish_reason
        return list(got.values()), engine.stats.num_preemptions_total
    finally:
        backend.close()


token = st.integers(0, VOCABULARY - 1)
parameters = st.builds(
    Sampling,
    max_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(token, st.sampled_from([-2.0, 3.0]), max_size=2).map(lambda d: tuple(d.items())),
    allowed_token_ids=st.none() | st.sets(token, min_size=4).map(tuple),
    bad_words=st.lists(st.lists(token, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    seed=st.integers(0, 5),
    choice=st.integers(0, 2),
    stop_token_ids=st.just(frozenset({END})),
    min_tokens=st.integers(0, 1),
    logprobs=st.none() | st.integers(0, 3),
    prompt_logprobs=st.none() | st.integers(0, 3),
)
prompts = st.lists(token, min_size=1, max_size=20).map(tuple)


def check(requests: list[Request], **limits: Any) -> int:
    together, preemptions = answers(requests, **limits)
    for request, got in zip(requests, together, strict=True):
        (alone,), _ = answers([request])
        assert (got.tokens, got.reason) == (alone.tokens, alone.reason)
        assert same(got.logprobs, alone.logprobs)
        reported = request.sampling.prompt_logprobs is not None and len(request.prompt_token_ids) > 1
        assert len(got.prompt_logprobs) == len(alone.prompt_logprobs) == reported
        if reported:
            assert [one.token_id for one in got.prompt_logprobs[0]] == list(request.prompt_token_ids[1:])
            assert same(got.prompt_logprobs[0], alone.prompt_logprobs[0])
    return preemptions


def same(some: Sequence[TokenLogprobs], others: Sequence[TokenLogprobs]) -> bool:
    """Equal except for rounding in sums of different shapes."""
    return len(some) == len(others) and all(
        (one.token_id, one.rank, [t for t, _ in one.top]) == (other.token_id, other.rank, [t for t, _ in other.top])
        and np.allclose([one.logprob, *(v for _, v in one.top)], [other.logprob, *(v for _, v in other.top)], atol=1e-5)
        for one, other in zip(some, others, strict=True)
    )


@settings(derandomize=True, database=None)
@given(st.lists(st.tuples(prompts, parameters), min_size=1, max_size=6), st.sampled_from([9, 12, 64]))
def test_a_request_gets_its_solo_result_in_any_batch_and_after_preemption(
    asked: list[tuple[tuple[int, ...], Sampling]], num_blocks: int
) -> None:
    check([Request(str(n), *one) for n, one in enumerate(asked)], num_blocks=num_blocks, max_step_tokens=8)


def test_preemption_occurs_in_these_tests_and_repeats_no_token() -> None:
    params = Sampling(
        max_tokens=25, temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1
    )
    requests = [Request(str(n), (1, 2, 3, 4, 5, n), replace(params, seed=n)) for n in range(4)]
    assert check(requests, num_blocks=14) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_token_is_suppressed_until_min_tokens(temperature: float) -> None:
    table = TABLE.clone()
    table[:, :, END] += 50.0
    params = Sampling(max_tokens=9, temperature=temperature, min_tokens=4, stop_token_ids=frozenset({END}), seed=1)
    (got,), _ = answers([Request("a", (1, 2), params)], table)
    assert END not in got.tokens[:4]
    assert (got.tokens[4:], got.reason) == ([END], FinishReason.STOP)


def test_a_banned_sequence_never_appears_but_its_parts_do() -> None:
    table = torch.full((1, VOCABULARY, VOCABULARY), -20.0)
    for one in range(VOCABULARY):  # a cycle: n is followed by n + 1, else by n + 2
        table[0, one, (one + 1) % VOCABULARY], table[0, one, (one + 2) % VOCABULARY] = 0.0, -1.0
    params = Sampling(max_tokens=9, temperature=0.0, bad_words=((5, 6), (8,)))
    (got,), _ = answers([Request("a", (1, 2, 3, 4, 5), params)], table)
    # A 6 may follow the 5 of the prompt: only the answer must not contain the words.
    assert got.tokens == [6, 7, 9, 10, 11, 12, 13, 0, 1]
    (got,), _ = answers([Request("a", (1, 2, 3, 4), params)], table)
    assert got.tokens == [5, 7, 9, 10, 11, 12, 13, 0, 1]


def test_logprobs_are_those_of_the_model_before_adjustments() -> None:
    params = Sampling(max_tokens=6, temperature=0.0, logit_bias=((7, 100.0),), logprobs=2, top_k=1)
    (got,), _ = answers([Request("a", (1, 2), params)])
    assert got.tokens == [7] * 6
    raw = TABLE[1, 2].log_softmax(-1)
    assert got.logprobs[0].logprob == pytest.approx(float(raw[7]), abs=1e-5)
    assert got.logprobs[0].rank == int((raw > raw[7]).sum()) + 1
    assert [one for one, _ in got.logprobs[0].top] == raw.topk(2).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_a_bias_changes_the_best_token_across_a_large_vocabulary(temperature: float) -> None:
    params = Sampling(max_tokens=3, temperature=temperature, logit_bias=((250, 100.0),), top_p=0.9)
    (got,), _ = answers([Request("a", (1, 2), params)], random_table(300, period=1))
    assert got.tokens == [250] * 3
    params = replace(params, logit_bias=(), allowed_token_ids=(299, 130), max_tokens=20, temperature=temperature * 1e6)
    (got,), _ = answers([Request("a", (1, 2), params)], random_table(300, period=1))
    assert set(got.tokens) <= {299, 130}


@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_prompt_logprobs_match_the_model_for_each_token_after_the_first(length: int) -> None:
    prompt = tuple((5 * n + n * n) % VOCABULARY for n in range(length))
    params = Sampling(max_tokens=2, prompt_logprobs=3)
    (got,), _ = answers([Request("a", prompt, params)], max_step_tokens=8)
    (reported,) = got.prompt_logprobs or [()]
    assert len(reported) == length - 1
    for position, one in enumerate(reported):
        raw = TABLE[position % len(TABLE), prompt[position]].log_softmax(-1)
        assert one.token_id == prompt[position + 1]
        assert one.logprob == pytest.approx(float(raw[one.token_id]), abs=1e-5)
        assert one.rank == int((raw > raw[one.token_id]).sum()) + 1
        assert [found for found, _ in one.top] == raw.topk(3).indices.tolist()


def test_reported_prompt_logprobs_are_not_recomputed_after_preemption() -> None:
    backend = markov_backend(TABLE, num_blocks=14)
    try:
        engine = Engine(backend)
        for n in range(4):
            engine.add(Request(str(n), (1, 2, 3, 4, 5, n), Sampling(max_tokens=25, prompt_logprobs=0)))
        sampled = 0
        while engine.has_work:
            sampled += sum(len(event.token_ids) for event in engine.step())
        decoder: Any = backend._decoder
        assert engine.stats.num_preemptions_total > 0
        # Five positions of each prompt once, and a few rows of ended requests.
        assert 0 <= decoder.num_logits - sampled - 4 * 5 <= 8
    finally:
        backend.close()


def test_logits_of_a_long_prompt_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "LOGITS_AT_ONCE", 5 * VOCABULARY)
    backend = markov_backend(TABLE, max_step_tokens=60)
    try:
        engine = Engine(backend)
        engine.add(Request("a", tuple([1, 2, 3] * 17), Sampling(max_tokens=1, prompt_logprobs=0)))
        (event,) = engine.step()
        assert len(event.prompt_logprobs) == 50
        assert backend._decoder.most_logits == 5  # type: ignore[attr-defined]
    finally:
        backend.close()
