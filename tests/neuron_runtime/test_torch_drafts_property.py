"""Random requests on the torch backend: each method of making drafts changes no answer, and planted faults are found.

Limits, parameters, forms, arrivals and aborts are drawn; the cache is often too small for all, prompts share beginnings
and repeat themselves. Every load is served without drafts, then with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.chat_model import byte_level_tokenizer
from helpers.eagle import head_config, head_tensors, write_copy, write_head
from helpers.mutation import Operator, left_out, mutate, unsliced, without
from helpers.torch_models import load_backend, random_model
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.config import DraftSource, Speculation
from neuron_runtime.core import FinishReason, Form, Request, Sampling
from neuron_runtime.engine.drafts import NGram, OnDevice, Proposer
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.sequence import Sequence
from neuron_runtime.errors import BackendFailed
from neuron_runtime.grammars.guides import GrammarGuides
from neuron_runtime.text.tokenizer import Tokenizer

METHODS = ("NGram", "Draft", "Eagle")
LENGTH = 48
FORMS = (Form("regex", "([ab]{3},)*"), Form("choice", '["the first of two", "the first of three"]'))
MAX_OTHERS = 0.002
"""Of the requests, those at most whose answers may differ at a near tie: a step with drafts rounds otherwise."""
Answer = tuple[list[int], FinishReason | None]
"""Without a reason if it was aborted."""


class Often:
    """Implements `Drafting`: as many drafts as a proposer has, or fewer, in most steps. No time decides."""

    def __init__(self, proposer: Proposer, seed: int) -> None:
        self._proposer, self._random = proposer, Random(seed)
        self.num_drafts = self.num_accepted = 0

    def wants(self, sequences: Collection[Sequence]) -> bool:
        return bool(sequences)

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        sequence.drafting = self._proposer.look(sequence.tokens, sequence.drafting)
        count = self._random.randint(0, most)
        return self._proposer.propose(sequence.tokens, sequence.drafting, count) if count else ()

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None:
        pass


def some_limits(random: Random) -> dict[str, Any]:
    limits = {
        "max_sequences": random.choice((1, 4, 6, 8)),
        "max_model_length": LENGTH,
        "max_step_tokens": random.choice((12, 24, LENGTH)),
        "layout": random.choice(("slots", "blocks", "blocks", "blocks")),
        "chunked_prefill": random.choice(("auto", "enabled")),
    }
    if limits["layout"] == "blocks":
        size = random.choice((2, 4, 8))
        limits |= {"block_size": size, "num_blocks": random.choice((LENGTH, LENGTH, 2 * LENGTH)) // size}
    return limits


def some_requests(random: Random, count: int) -> Iterator[Request]:
    choice = random.choice
    phrases = [[random.randrange(256) for _ in range(random.randint(1, 9))] for _ in range(4)]
    beginning = [token for _ in range(9) for token in choice(phrases)]
    for number in range(count):
        prompt = [*beginning[: choice((0, 0, 9, 18))], *choice(phrases), *choice(phrases)][: LENGTH - 2]
        sampling: dict[str, Any] = {
            "temperature": choice((0.0, 0.0, 0.3, 0.9)),
            "max_tokens": random.randint(1, LENGTH - len(prompt)),
            "seed": random.randrange(99),
            "stop_token_ids": frozenset(random.sample(range(256), choice((0, 10, 40)))),
            "form": choice((None,) * 7 + FORMS),
        }
        if choice((True, False)):
            sampling |= {
                "top_k": choice((0, 20)),
                "top_p": choice((1.0, 0.9)),
                "min_p": choice((0.0, 0.05)),
                "frequency_penalty": choice((0.0, 0.5)),
                "repetition_penalty": choice((1.0, 1.2)),
                "min_tokens": random.randint(0, sampling["max_tokens"]),
                "bad_words": choice(((), ((7,), (9, 11)))),
                "logit_bias": choice(((), ((9, 4.0), (11, 4.0)))),
                "logprobs": choice((None, 2)),
                "prompt_logprobs": choice((None, 1)),
            }
        yield Request(f"{number}", tuple(prompt), Sampling(**sampling))


def answers(engine: Engine, requests: list[Request], random: Random) -> dict[str, Answer]:
    """Some requests are aborted."""
    found: dict[str, Answer] = {}
    waiting = requests[::-1]
    while waiting or engine.has_work:
        if waiting and random.random() < 0.7:
            engine.add(one := waiting.pop())
            found[one.request_id] = [], None
        if found and random.random() < 0.02:
            engine.abort(random.choice([*found]))
        for event in engine.step():
            found[event.request_id] = [*found[event.request_id][0], *event.token_ids], event.finish_reason
    return found


def is_same(one: Answer, other: Answer) -> bool:
    """Equal, as far as one that was aborted has come."""
    if None in (one[1], other[1]):
        shorter = min(len(one[0]), len(other[0]))
        return one[0][:shorter] == other[0][:shorter]
    return one == other


class World:
    """A model, what makes drafts for it, by method, and what forms need."""

    def __init__(self, folder: Path) -> None:
        self.model = random_model(folder / "model", num_layers=1)
        other = random_model(folder / "draft", num_layers=1, hidden_size=32)
        config = head_config(1)
        head = write_head(folder / "head", config, head_tensors(1, config))
        # A head with random weights is hardly ever right.
        copy = write_copy(folder / "copy", self.model)
        self.sources = {"Draft": [self.model, self.model, other], "Eagle": [copy, copy, head]}
        self.guides = GrammarGuides(lambda: Tokenizer(byte_level_tokenizer()), 256)

    def check(self, method: str, num_requests: int, seed: int) -> Counter[str]:
        """Serves random loads of this many requests together; returns what happened."""
        happened: Counter[str] = Counter()
        while happened["requests"] < num_requests:
            self._check_load(method, Random(seed := seed + 1), happened)
        assert happened["other"] <= MAX_OTHERS * num_requests, happened
        return happened

    def _check_load(self, method: str, random: Random, happened: Counter[str]) -> None:
        limits, max_drafts, seed = some_limits(random), random.randint(1, 5), random.randrange(10**6)
        requests = list(some_requests(random, 10))
        sources = self.sources.get(method)
        source = DraftSource(uri=random.choice(sources).as_uri()) if sources else DraftSource()
        speculation = Speculation(method=method, num_tokens=max_drafts, model=source)
        found = []
        for drafts in (Speculation(), speculation):
            backend = load_backend(self.model, speculation=drafts, **limits)
            proposer: Proposer = NGram(1, 4) if method == "NGram" else OnDevice()
            drafting = Often(proposer, seed) if drafts.method else None
            engine = Engine(backend, guides=self.guides, drafting=drafting)
            try:
                found.append(answers(engine, requests, Random(seed)))
            finally:
                backend.close()
            if drafting:
                happened["accepted"] += drafting.num_accepted
                happened["rejected"] += drafting.num_drafts - drafting.num_accepted
            happened["preemptions"] += engine.stats.num_preemptions_total
            happened["hits"] += engine.stats.num_prefix_hits_total
        without, with_drafts = found
        happened["requests"] += len(requests)
        happened["tokens"] += sum(len(tokens) for tokens, _ in with_drafts.values())
        happened["other"] += sum(not is_same(without[name], one) for name, one in with_drafts.items())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("models"))
    yield made
    made.guides.close()


@pytest.mark.parametrize("num_requests", [40, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(0)])])
@pytest.mark.parametrize("method", METHODS)
def test_random_requests_get_the_same_tokens_with_drafts(method: str, num_requests: int, world: World) -> None:
    happened = world.check(method, num_requests, seed=0)
    assert {what for what, count in happened.items() if count} >= {"accepted", "rejected", "hits", "preemptions"}


FAULTS: dict[str, tuple[str, str, Operator]] = {
    "positions behind the drafts": ("NGram", "backend.slots:FedRows.samples_at", left_out("num_drafts")),
    "positions of a whole step": ("NGram", "backend.slots:places_in_runs", left_out("begins")),
    "rejected drafts stay in the cache": (
        "Draft",
        "engine.scheduler:Scheduler.apply",
        without("num_computed_tokens", nth=1),
    ),
    "the mask of another position": (
        "NGram",
        "backend.host_sampling.sampler:HostSampler.verify",
        left_out("place", nth=1),
    ),
    "drafts stay in a form": ("NGram", "grammars.guides:GrammarGuides.masks", without("retract")),
    "drafts across a stop": ("Draft", "engine.sequence:Sequence.accept", unsliced("STOP", 0)),
}
"""A method of drafts, and what is changed."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    method, where, operator = FAULTS[fault]
    mutate(monkeypatch, f"neuron_runtime.{where}", operator)
    with pytest.raises((AssertionError, IllegalBatch, BackendFailed, RuntimeError, ValueError, LookupError)):
        world.check(method, 40, seed=0)
