"""The NxD Inference backend under random loads through the engine, on an application that computes token ids.

Every request must get the tokens that it gets alone with its own sampling parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest

from helpers.engine_driver import Guesses
from helpers.host_rows import is_of_host
from helpers.nxdi_tokens import TokenApplication, next_token, settings_of
from neuron_runtime.backend.neuron.device import device_parameters
from neuron_runtime.backend.nxdi.backend import NxdiBackend
from neuron_runtime.backend.nxdi.buckets import limits_of
from neuron_runtime.backend.nxdi.draft_model import accepting
from neuron_runtime.backend.nxdi.settings import DraftModel, Settings
from neuron_runtime.core import (
    NO_TOKEN,
    BackendLimits,
    Batch,
    Request,
    Sampling,
    StepOutput,
    name_of_step,
)
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.sequence import Sequence

NUM_EXAMPLES, NUM_LONG_EXAMPLES = 50, 10_000


def some_settings(random: Random) -> Settings:
    choice = random.choice
    max_rows, sampling = choice((1, 2, 3, 4, 7)), choice(("Device", "Device", "DeviceWithLogits", "Host"))
    length = choice((24, 40, 64))
    if choice((True, False)):
        drafts = choice((0, 1, 2, 4))
        draft = DraftModel(application="llama", config={}) if drafts and choice((True, False)) else None
        return settings_of(
            max_rows=max_rows,
            num_blocks=max_rows,
            max_model_length=length,
            max_context_length=length,
            block_size=length,
            context_buckets=(*choice(((), (8,), (8, 16))), length),
            token_buckets=(*choice(((), (8,), (8, 16))), length + drafts),
            row_buckets=choice(((), (), (1, 2))) if max_rows > 2 and not drafts else (),
            sampling="Device" if draft else "Host" if drafts else sampling,
            **({"global_topk": 0} if draft else {}),
            max_drafts=drafts,
            draft=draft,
        )
    block_size, segments = choice((2, 4, 8)), choice((True, True, False))
    context = (*choice(((), (8,), (8, 12))), 16 if segments else length)
    return settings_of(
        layout="blocks",
        max_rows=max_rows,
        max_model_length=length,
        max_context_length=context[-1],
        block_size=block_size,
        num_blocks=length // block_size * choice((1, 1, 2)) + choice((0, 1, 3)),
        context_buckets=context,
        prefix_buckets=(0, *choice(((), (8,))), length),
        token_buckets=(*choice(((), (8,), (8, 16))), length),
        segments=segments,
        shares_prefixes=choice((True, True, False)),
        sampling=sampling,
    )


def some_requests(random: Random, limits: BackendLimits) -> list[Request]:
    choice, requests = random.choice, list[Request]()
    longest = limits.longest_sequence - 1 if limits.chunks_prefill else min(limits.longest_prefill, 63)
    longest = min(longest, limits.max_new_tokens(0) - 1)
    for number in range(choice((3, 6, 10))):
        earlier = choice(requests).prompt_token_ids if requests and random.random() < 0.6 else ()
        count = choice((1, 2, 8, random.randint(1, longest), longest))
        common = earlier[: choice((count, count - 1, count // 2))]
        prompt = (*common, *(random.randrange(997) for _ in range(min(count, longest) - len(common))))[:longest]
        sampling = Sampling(
            max_tokens=random.randint(1, min(limits.max_new_tokens(len(prompt)), 20)),
            temperature=choice((0.0, 1e-9, 0.7, 1.0, 1.5)),
            top_k=choice((0, 1, 5, 64)),
            top_p=choice((1.0, 0.9, 0.25, 1e-60)),
            stop_token_ids=frozenset(range(choice((0, 0, 40)))),
        )
        requests.append(Request(f"r{number}", prompt, sampling, priority=choice((0, 0, 1))))
    return requests


def sampled_on_host(request: Request, random: Random) -> Request:
    """The same request, greedy, so that its tokens are known, and perhaps one that the device cannot sample."""
    logprobs = random.choice((None, 0, 2))
    return replace(request, sampling=replace(request.sampling, temperature=0.0, logprobs=logprobs))


def alone(request: Request, settings: Settings, limits: BackendLimits) -> list[int]:
    """The tokens of a request that nothing else influences."""
    of_host = settings.sampling == "Host" or is_of_host(request.sampling, limits)
    parameters = () if of_host else device_parameters(request.sampling, settings.global_topk)
    tokens, output = list(request.prompt_token_ids), list[int]()
    while len(output) < request.sampling.max_tokens:
        output.append(next_token(tokens, parameters, settings.vocabulary_size))
        tokens.append(output[-1])
        if output[-1] in request.sampling.stop_token_ids:
            break
    return output


class TokenGuesses(Guesses):
    """Drafts of which most are right."""

    def __init__(self, limits: BackendLimits, *, on_device: bool) -> None:
        super().__init__(limits)
        self._on_device = on_device

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        if self._on_device:
            return (NO_TOKEN,) * self._random.randint(0, most)
        context = list(sequence.tokens)
        for _ in range(self._random.randint(0, most)):
            right = next_token(context, (), 997)
            context.append(right if self._random.random() < 0.8 else right ^ 1)
        return tuple(token % 997 for token in context[len(sequence.tokens) :])


class CheckedBackend(NxdiBackend):
    """Compares what each step says of itself with the graphs that ran."""

    def launch(self, batch: Batch) -> None:
        self.expected = getattr(self, "expected", {})
        self.expected[batch.step] = self.graph(batch)
        super().launch(batch)

    def collect(self, step: int) -> StepOutput:
        output = super().collect(step)
        assert name_of_step(graph.name for graph in output.graphs) == self.expected.pop(step)
        return output


def run(random: Random) -> list[str]:
    """Serve a random load; returns what occurred."""
    settings = some_settings(random)
    limits = limits_of(settings, 600.0)
    application = TokenApplication(settings)
    backend = CheckedBackend(accepting(application) if settings.draft else application, settings, limits)
    if random.random() < 0.3:
        backend.warm_up(lambda stage, share: None)
        application.graphs.clear()
    drafting = TokenGuesses(limits, on_device=settings.draft is not None)
    engine = Engine(backend, max_consecutive_prefills=random.choice((1, 1, 3)), drafting=drafting)
    requests = some_requests(random, limits)
    if settings.sampling != "Device":
        all_of_them = settings.sampling == "Host"
        requests = [sampled_on_host(one, random) if all_of_them or random.random() < 0.5 else one for one in requests]
    if limits.greedy_only:
        requests = [replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests]
    logprobs = {one.request_id: one.sampling.logprobs is not None for one in requests}
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    ended: set[str] = set()
    buckets: list[str] = []
    waiting = requests[:]
    while waiting or engine.has_work:
        if waiting and random.random() < 0.5:
            engine.add(waiting.pop(0))
        if random.random() < 0.02:
            victim = random.choice(requests).request_id
            engine.abort(victim)
            ended.add(victim)
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            assert len(event.logprobs) == (len(event.token_ids) if logprobs[event.request_id] else 0)
            if event.finish_reason:
                ended.add(event.request_id)
        last = engine.stats.last_step
        if last is not None:
            buckets += [graph.name for graph in last.graphs]
            assert all(graph.num_computed_tokens >= graph.num_tokens for graph in last.graphs)
            assert sum(graph.num_tokens for graph in last.graphs) == last.num_tokens
    backend.close()
    for one in requests:
        expected = alone(one, settings, limits)
        got = tokens[one.request_id]
        assert got == expected or (one.request_id in ended and got == expected[: len(got)]), one.request_id
    assert set(buckets) == set(application.graphs)
    stats = engine.stats
    return [
        *(["preempted"] if stats.num_preemptions_total else []),
        *(["hit"] if stats.num_prefix_hits_total else []),
        *(["after a prefix"] if any("after" in name for name in application.graphs) else []),
        *(["one token"] if any(len(one.prompt_token_ids) == 1 for one in requests) else []),
        *(
            ["rows of host and device"]
            if {is_of_host(one.sampling, limits) for one in requests} == {True, False}
            else []
        ),
        *(["accepted drafts"] if any(accepted for _, accepted in drafting.learned) else []),
        *(["drafts of the device"] if settings.draft and any(count for count, _ in drafting.learned) else []),
        *(["rejected drafts"] if any(accepted < count for count, accepted in drafting.learned) else []),
        settings.layout,
        settings.sampling,
    ]


HAPPENINGS = {
    "accepted drafts",
    "rejected drafts",
    "drafts of the device",
    "preempted",
    "hit",
    "after a prefix",
    "one token",
    "rows of host and device",
}


@pytest.mark.parametrize(
    "num_examples",
    [NUM_EXAMPLES, pytest.param(NUM_LONG_EXAMPLES, marks=[pytest.mark.long, pytest.mark.timeout(0)])],
    ids=str,
)
def test_every_request_gets_its_own_tokens_under_random_loads(num_examples: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(num_examples):
        with reported(seed):
            seen.update(run(Random(seed)))
    assert set(seen) == HAPPENINGS | {"slots", "blocks", "Device", "DeviceWithLogits", "Host"}, seen


@contextmanager
def reported(seed: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"with seed {seed}")
        raise
