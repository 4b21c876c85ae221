"""The host sampler: whichever rows are sampled together and in which order, each gets what it gets alone."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from helpers.guides import mask_of
from neuron_runtime.backend.host_sampling.drawing import NotFinite
from neuron_runtime.backend.host_sampling.sampler import Chosen, HostSampler
from neuron_runtime.core import Added, Sampling

VOCABULARY = 300
NUM_SLOTS = 6
PROMPT = (5, 7, 7, 9)
LENGTH = 16


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
