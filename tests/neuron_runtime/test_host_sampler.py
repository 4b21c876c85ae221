"""The host sampler: whichever rows are sampled together and in which order, each gets what it gets alone."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from helpers.guides import mask_of
from neuron_runtime.backend.host_sampling.drawing import NotFinite
from neuron_runtime.backend.host_sampling.sampler import Chosen, HostSampler
from neuron_runtime.core import NO_TOKEN, Added, Sampling

VOCABULARY = 300
NUM_SLOTS = 6
PROMPT = (5, 7, 7, 9)
LENGTH = 32


def some_parameters(random: Random) -> Sampling:
    """Each parameter is neutral in half of the requests."""
    given: dict[str, Any] = {
        "top_k": random.choice((1, 40)),
        "top_p": random.uniform(0.1, 1.0),
        "min_p": random.uniform(0.0, 0.2),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.4,
        "logit_bias": ((random.randrange(VOCABULARY), 8.0),),
        "allowed_token_ids": tuple(random.sample(range(VOCABULARY), 20)),
        "bad_words": ((random.randrange(VOCABULARY),),),
        "min_tokens": 3,
        "stop_token_ids": frozenset(random.sample(range(VOCABULARY), 100)),
        "logprobs": random.choice((0, 3)),
    }
    kept = {name: value for name, value in given.items() if random.random() < 0.5}
    return Sampling(temperature=random.choice((0.0, 0.3, 1.0, 2.0)), seed=random.getrandbits(63), **kept)


class Alone:
    """The sampler of one sequence, and its tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self.added = Added(0, PROMPT, len(PROMPT), sampling, (0,))
        self.tokens = np.zeros((1, LENGTH), dtype=np.int32)
        self.tokens[0, : len(PROMPT)] = PROMPT
        self.position = len(PROMPT)
        self.sampler = HostSampler(self.tokens, VOCABULARY)
        self.sampler.add(self.added)

    def next(self, logits: torch.Tensor, allowed: tuple[int, ...] | None) -> Chosen:
        masks = {} if allowed is None else {0: mask_of(allowed, VOCABULARY)}
        chosen = self.sampler.choose(logits.clone()[None], np.zeros(1, dtype=int), np.array([self.position]), masks)
        self.tokens[0, self.position] = chosen.tokens[0]
        self.position += 1
        return chosen


@pytest.mark.parametrize("seed", range(30))
def test_rows_sampled_together_get_what_each_gets_alone(seed: int) -> None:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    alone = [Alone(some_parameters(random)) for _ in range(NUM_SLOTS)]
    tokens = np.zeros((NUM_SLOTS, LENGTH), dtype=np.int32)
    sampler = HostSampler(tokens, VOCABULARY)
    for slot, one in enumerate(alone):
        tokens[slot, : len(PROMPT)] = PROMPT
        sampler.add(msgspec.structs.replace(one.added, slot=slot))
    for step in range(10):
        slots = random.sample(range(NUM_SLOTS), random.randint(1, NUM_SLOTS))
        if step == 5:  # a preempted sequence comes back in another slot with the tokens that it has
            old, new = random.sample(range(NUM_SLOTS), 2)
            alone[new] = alone[old]
            tokens[new] = alone[old].tokens[0]
            known = tuple(tokens[new, : alone[old].position].tolist())
            sampler.add(msgspec.structs.replace(alone[old].added, slot=new, token_ids=known))
            slots = [slot for slot in slots if slot != old] or [new]
        elif step > 5:
            slots = [slot for slot in slots if slot != old] or [new]
        logits = torch.randn(len(slots), VOCABULARY, generator=generator) * 4
        allowed = [random.choice((None, None, (3, 5, 8))) for _ in slots]
        expected = [alone[slot].next(row, only) for slot, row, only in zip(slots, logits, allowed, strict=True)]
        positions = np.array([alone[slot].position - 1 for slot in slots])
        masks = {row: mask_of(only, VOCABULARY) for row, only in enumerate(allowed) if only}
        chosen = sampler.choose(logits, np.array(slots), positions, masks)
        assert chosen.tokens.tolist() == [int(one.tokens[0]) for one in expected]
        assert (chosen.logprobs or [None] * len(slots)) == [(one.logprobs or [None])[0] for one in expected]
        tokens[slots, positions] = chosen.tokens


def drafted(random: Random, one: Alone, logits: torch.Tensor, allowed: list[tuple[int, ...] | None]) -> list[int]:
    """Drafts of which the first ones are what the sequence goes on with, as far as it has come."""
    right = random.randint(0, len(logits) - 1)
    told = [int(one.next(row, only).tokens[0]) for row, only in zip(logits[:right], allowed, strict=False)]
    return told + [random.randrange(VOCABULARY) for _ in range(len(logits) - 1 - len(told))]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_verified_at_once_are_those_chosen_one_at_a_time(seed: int) -> None:
    """With equal log-probabilities, and a state from which the next ones are equal too."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    sampling = [
        some_parameters(random) if random.random() < 0.8 else Sampling(temperature=0.0) for _ in range(NUM_SLOTS)
    ]
    sampling = [replace(one, bad_words=((random.randrange(VOCABULARY),), (5, 8), (8, 3, 5))) for one in sampling]
    alone = [Alone(one) for one in sampling]
    tokens = np.zeros((NUM_SLOTS, LENGTH), dtype=np.int32)
    sampler = HostSampler(tokens, VOCABULARY)
    for slot, one in enumerate(alone):
        tokens[slot, : len(PROMPT)] = PROMPT
        sampler.add(msgspec.structs.replace(one.added, slot=slot))
    num_verified = 0
    for _ in range(4):
        slots = random.sample(range(NUM_SLOTS), random.randint(1, NUM_SLOTS))
        most = [random.randint(0, 4) for _ in slots]
        logits = [torch.randn(1 + count, VOCABULARY, generator=generator) * 4 for count in most]
        num_masks = random.randint(1, 5)
        forms = [[random.choice(((3, 5, 8), (5, 8, 40))) for _ in range(num_masks)] for _ in slots]
        masked = [random.random() < 0.3 for _ in slots]
        allowed = [form if is_masked else [None] * 5 for form, is_masked in zip(forms, masked, strict=True)]
        drafts = np.full((len(slots), max(most)), NO_TOKEN)
        for row, slot in enumerate(slots):
            guess = drafted(random, deepcopy(alone[slot]), logits[row], allowed[row])
            drafts[row, : most[row]] = guess
        positions = np.array([alone[slot].position for slot in slots])
        masks = {
            row: memoryview(b"".join(mask_of(only, VOCABULARY) for only in forms[row]))
            for row, is_masked in enumerate(masked)
            if is_masked
        }
        found = sampler.verify(
            torch.cat(logits), np.array(slots), positions, drafts, np.array(most), masks=masks, num_masks=num_masks
        )
        for row, slot in enumerate(slots):
            one, expected, reported = alone[slot], [], []
            for place in range(min(1 + most[row], len(allowed[row]))):
                chosen = one.next(logits[row][place], allowed[row][place])
                expected.append(int(chosen.tokens[0]))
                reported += chosen.logprobs
                if place < most[row] and expected[-1] != drafts[row, place]:
                    break
            assert found.tokens[row] == tuple(expected)
            assert found.logprobs[row] == tuple(reported)
            assert tokens[slot, : one.position].tolist() == one.tokens[0, : one.position].tolist()
            num_verified += len(expected) - 1
    assert num_verified > 0


@pytest.mark.parametrize(
    ("num_rows", "temperature"),
    [(5000, 1.0), *(pytest.param(100_000, one, marks=pytest.mark.long) for one in (0.7, 1.0, 1.5))],
)
def test_tokens_of_a_row_with_drafts_have_the_distribution_of_the_model(num_rows: int, temperature: float) -> None:
    """Its first token, and the second one behind an accepted draft, by chi-square."""
    size = 6
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5, 1.5, -1.0], [0.0, 2.0, 1.0, -1.0, 0.5, 0.0]])
    sampler = HostSampler(np.zeros((num_rows, 4), dtype=np.int32), size)
    for seed in range(num_rows):
        sampler.add(Added(seed, (1,), 1, Sampling(temperature=temperature, seed=seed), (seed,)))
    ones = np.ones(num_rows, dtype=int)
    found = sampler.verify(
        logits.repeat(num_rows, 1), np.arange(num_rows), ones, np.full((num_rows, 1), 4), ones
    ).tokens
    first = np.bincount([tokens[0] for tokens in found], minlength=size)
    second = np.bincount([tokens[1] for tokens in found if tokens[0] == 4], minlength=size)
    assert sum(map(len, found)) == first.sum() + second.sum()
    for counts, share in zip((first, second), (logits.double() / temperature).softmax(-1).numpy(), strict=True):
        expected = share * counts.sum()
        assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: one in a thousand


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    padded = torch.cat((logits, torch.full((4, 20), 50.0)), dim=1)
    tokens = np.zeros((4, LENGTH), dtype=np.int32)
    parameters = (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.5, logprobs=2), Sampling(bad_words=((3,),)))
    found = []
    for some in (logits, padded):
        sampler = HostSampler(tokens, VOCABULARY)
        for slot, sampling in enumerate(parameters):
            sampler.add(Added(slot, PROMPT, len(PROMPT), sampling, (slot,)))
        found.append(sampler.choose(some, np.arange(4), np.full(4, len(PROMPT))))
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    assert found[0].logprobs == found[1].logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature: float) -> None:
    sampler = HostSampler(np.zeros((2, LENGTH), dtype=np.int32), VOCABULARY)
    for slot in range(2):
        sampler.add(Added(slot, PROMPT, len(PROMPT), Sampling(temperature=temperature), (slot,)))
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 7] = float("nan")
    with pytest.raises(NotFinite, match="1 of the requests"):
        sampler.choose(logits, np.arange(2), np.full(2, len(PROMPT)))
