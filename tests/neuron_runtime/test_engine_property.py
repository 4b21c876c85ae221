"""The engine under random limits, layouts, arrivals, aborts, stops, preemptions, with 1 to 4 tokens per row.

Prompts share texts, so prefixes are shared, waited for and evicted. Requests have different sampling parameters, for
the device and for the host. Every request must get the tokens that it gets alone, within the step bound, and the
driver checks the engine's state after each step.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from helpers.engine_driver import VOCABULARY_SIZE, Run, alone, even_only, start
from helpers.strict_backend import StrictBackend
from neuron_runtime.backend.base import IllegalBatch
from neuron_runtime.core import Added, BackendLimits, Kind, PrefillBucket, Request, Sampling, needs_host
from neuron_runtime.engine.bounds import max_steps, stream_gap_bound

NUM_EXAMPLES = 200
NUM_RUNS = int(os.environ.get("NEURON_SERVING_PROPERTY_EXAMPLES", "2000"))
EACH_IN = 100
"""Number of runs in which every event must occur at least once; else the loads are too easy."""


def some_limits(random: Random) -> BackendLimits:
    """Random limits of a backend."""
    choice = random.choice
    max_rows, length, per_row = choice((2, 3, 4, 6, 1)), choice((20, 13, 31, 40, 8)), choice((1, 1, 1, 2, 3, 4))
    all_live, mixes, chunks = choice(
        ((True, False, False), *[(False, bool(mixes), bool(chunks)) for mixes in (0, 1) for chunks in (0, 1, 1)])
    )
    min_chunk = choice((1, 2, 3, 4)) if chunks else 1
    step_tokens = max_rows - 1 + min_chunk + choice((0, 1, 3, 8) if chunks else (length // 2, length, length))
    buckets = some_buckets(random, max(step_tokens // 2, min_chunk)) if choice((True, False)) else ()
    if buckets:
        step_tokens = max(step_tokens, buckets[-1].computes + (max_rows - 1 if mixes else 0))
    slots = choice((False, False, False, True))
    block_size = length if slots else choice((1, 2, 3, 4, 6))
    blocks_of_one = -(-length // block_size)
    few = (blocks_of_one // 2 + 1, blocks_of_one, blocks_of_one + 2, 3 * blocks_of_one // 2, 2 * blocks_of_one)
    shares = not slots and choice((True, True, True, False))
    largest = buckets[-1].fits if buckets else 0
    start = choice((0, 0, 2 * block_size, 5, largest, 2 * largest)) if buckets or (shares and not chunks) else 0
    device = choice((True, False))
    in_flight = choice((1, 2)) if device else 1
    sampling: Any = choice(("Device", "DeviceWithLogits", "Host"))
    samples_some = (
        {} if sampling == "Host" else {"max_top_k": choice((0, 3, 8)), "top_p_keeps_crossing": choice((True, False))}
    )
    return BackendLimits(
        max_rows=max_rows,
        max_model_length=length,
        max_step_tokens=step_tokens,
        max_prefill_rows=choice((1, 2, 3)),
        prefill_buckets=buckets,
        max_prefill_start=start,
        min_prefill_tokens=min(choice((1, 1, 2)), buckets[-1].fits if buckets else step_tokens),
        max_tokens_per_row=per_row,
        num_lookahead_tokens=per_row - 1 + choice((0, 0, 2)),
        layout="slots" if slots else "blocks",
        block_size=block_size,
        num_blocks=max_rows if slots else choice(few),
        mixes_phases=mixes,
        chunks_prefill=chunks,
        min_chunk_tokens=min_chunk,
        decodes_all_live_rows=all_live,
        sorts_rows=choice((True, False)),
        lowest_slot_first=choice((True, False)),
        shares_prefixes=shares,
        max_logprobs=2,
        reports_prompt_logprobs=sampling == "Host" and choice((True, False)),
        sampling=sampling,
        **samples_some,
        steps_in_flight=in_flight,
        token_feedback=choice(("device", "same rows")[:in_flight]) if device else "host",
    )


def some_buckets(random: Random, largest: int) -> tuple[PrefillBucket, ...]:
    """Up to three sizes, which may compute more than fits."""
    sizes = sorted({largest, random.randint(1, largest), random.randint(1, largest)})
    return tuple(
        PrefillBucket(size, size + padding)
        for size, padding in zip(sizes, sorted(random.choices((0, 0, 1, 3), k=len(sizes))), strict=True)
    )


def some_requests(random: Random, limits: BackendLimits) -> Iterator[Request]:
    """Prompts that share texts, for example an earlier request and its answer."""
    choice = random.choice
    longest, least = min(limits.longest_prompt, limits.max_new_tokens(0) - 1), limits.min_prefill_tokens
    num_late = 0 if limits.sampling == "Device" else choice((0, 0, 2))
    earlier: list[Request] = []
    for number in range(choice((4, 6, 8, 12, 1)) if longest >= least else 0):
        text: list[int] = []
        if earlier and random.random() < 0.75:
            previous = choice(earlier[-3:])
            text = [*previous.prompt_token_ids, *alone(previous, even_only, limits)[0]]
        num_prompt = choice((random.randint(least, max(longest // 2, least)), len(text), 2 * longest // 3))
        num_prompt = min(max(num_prompt, least), longest)
        room, seed = limits.max_new_tokens(num_prompt), random.randint(0, 99)
        max_tokens = choice((room, room, max(room // 2, 1), 1, min(room, 2), random.randint(1, room)))
        common = min(choice((num_prompt, num_prompt, num_prompt - 1, num_prompt // 2)), len(text))
        earlier.append(
            Request(
                f"{'even' if number < num_late else 'r'}{number}",
                (*text[:common], *(seed * (at + 1) % VOCABULARY_SIZE for at in range(common, num_prompt))),
                Sampling(
                    max_tokens=max_tokens,
                    seed=seed % 7,
                    choice=seed % 2,
                    stop_token_ids=frozenset(choice(((), (), (), (1, 2), (3, 5, 8, 9)))),
                    **some_parameters(random, limits, max_tokens),
                ),
                priority=choice((0, 0, 1, 2)),
                cache_salt=choice(("",) * 7 + ("salt",)),
                adapter=choice((0,) * 7 + (1,)),
            )
        )
        yield earlier[-1]


def some_parameters(random: Random, limits: BackendLimits, max_tokens: int) -> dict[str, Any]:
    """Of a request, within the sampling mode."""
    choice = random.choice
    given: dict[str, Any] = {
        "temperature": choice((0.0, 0.5, 1.0)),
        "top_k": choice((0, 0, 1, 3)),
        "top_p": choice((1.0, 0.9, 0.4)),
    }
    if limits.sampling != "Device" and choice((True, False)):
        given |= {
            "top_k": choice((0, 9)),
            "seeded": choice((True, False)),
            "min_tokens": random.randint(0, max_tokens),
            "logprobs": choice((None, 1)),
        }
    if limits.reports_prompt_logprobs:
        given["prompt_logprobs"] = choice((None,) * 4 + (1,))
    return given


def check_one_run(random: Random) -> dict[str, bool]:
    """Serves a random load; returns the events that occurred."""
    limits, prefills = some_limits(random), random.choice((1, 1, 1, 2, 5))
    run = start(limits, late=even_only, max_consecutive_prefills=prefills)
    requests: list[Request] = []
    for asked in some_requests(random, limits):
        run.add(asked)
        requests.append(asked)
        for _ in range(random.choice((0, 0, 0, 1, 2, 5))):
            run.step()
        victim = random.choice(requests).request_id
        if random.choice((True,) + (False,) * 9) and victim not in run.reasons:
            run.abort(victim)
    bound = max_steps(limits, requests, prefills)
    run.finish(bound)
    assert len(run.backend.batches) <= bound
    run.check_tokens(requests, even_only)
    if not run.engine.stats.num_preemptions_total:
        # Steps take a second each, so the bound on time is a bound on their number.
        assert run.worst_gap <= stream_gap_bound(limits, dict.fromkeys(Kind, 1.0), prefills)
    return what_happened(run)


def what_happened(run: Run) -> dict[str, bool]:
    stats, batches, limits = run.engine.stats, run.backend.batches, run.backend.limits
    happened = {
        "preempted": stats.num_preemptions_total,
        "scheduled ahead": run.steps.num_ahead,
        "shared a prefix": stats.num_prefix_hits_total,
        "shared a prefix and preempted": stats.num_prefix_hits_total and stats.num_preemptions_total,
        "waited for a prefix": run.waited,
        "surplus returned": any(b.kept_blocks for b in batches),
        "chunked": any(not s for b in batches for s in b.rows.samples),
        "aborted": run.aborted,
        "prompt logprobs": run.prompts,
        "fed the same rows": limits.token_feedback == "same rows" and any(b.waits_for_step_in_flight for b in batches),
        "sampled on the host": any(needs_host(a.sampling, limits) for b in batches for a in b.added),
        "in a bucket": any(limits.prefill_buckets and not s for b in batches for s in b.rows.samples),
        "within reach": limits.max_prefill_start and any(not s for b in batches for s in b.rows.samples),
        "sampled late": any(call == "sample late" for call, _ in run.backend.calls),
    }
    return {what: bool(how_much) for what, how_much in happened.items()}


def check_runs(seeds: range) -> Counter[str]:
    """Counts in how many runs each thing happened. A failure names the seed that repeats it."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened.update({what: int(so) for what, so in check_one_run(Random(seed)).items()})
        except Exception as error:
            error.add_note(f"in check_one_run(Random({seed}))")
            raise
    return happened


def test_every_request_gets_its_solo_tokens_within_the_step_bound() -> None:
    happened = check_runs(range(NUM_EXAMPLES))
    assert all(happened.values())


def test_a_row_sampled_with_the_parameters_of_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add, before = StrictBackend._add, [Sampling()]

    def mixed_up(backend: StrictBackend, added: Added) -> None:
        own, other = added.sampling, before[0]
        before[0] = own
        add(backend, msgspec.structs.replace(added, sampling=replace(own, top_k=other.top_k, top_p=other.top_p)))

    monkeypatch.setattr(StrictBackend, "_add", mixed_up)
    with pytest.raises((AssertionError, IllegalBatch)):
        check_runs(range(5))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_random_runs_give_the_solo_tokens() -> None:
    happened = check_runs(range(NUM_RUNS))
    rare = {what: count for what, count in happened.items() if count * EACH_IN < NUM_RUNS}
    assert not rare
