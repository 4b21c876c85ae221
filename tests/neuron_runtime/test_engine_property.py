"""The engine under random limits, layouts, arrivals, aborts, stops, preemptions, with and without drafts.

Prompts share texts, so prefixes are shared, waited for and evicted. Requests have different sampling parameters, for
the device and for the host. Every request must get the tokens that it gets alone, within the step bound, and the
driver checks the engine's state after each step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import msgspec
import pytest

from helpers.engine_driver import Run, even_only, max_steps, start
from helpers.host_rows import is_of_host
from helpers.random_loads import some_limits, some_requests
from helpers.strict_backend import StrictBackend
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import NO_TOKEN, Added, Request, Sampling, StepKind
from neuron_runtime.engine.loop import stream_gap_bound

NUM_EXAMPLES = 200
NUM_LONG_RUNS = 100_000
EACH_IN = 100
"""Number of runs in which every event must occur at least once; else the loads are too easy."""


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
        assert run.worst_gap <= stream_gap_bound(limits, dict.fromkeys(StepKind, 1.0), prefills)
    return what_happened(run)


def what_happened(run: Run) -> dict[str, bool]:
    stats, batches, limits = run.engine.stats, run.backend.batches, run.backend.limits
    with_pictures = [added for batch in batches for added in batch.added if added.pictures]
    happened = {
        "preempted": stats.num_preemptions_total,
        "scheduled ahead": run.steps.num_ahead,
        "shared a prefix": stats.num_prefix_hits_total,
        "shared a prefix and preempted": stats.num_prefix_hits_total and stats.num_preemptions_total,
        "waited for a prefix": run.waited,
        "accepted drafts": any(accepted for _, accepted in run.guesses.learned),
        "rejected drafts": any(accepted < count for count, accepted in run.guesses.learned),
        "drafts beside a prompt": any(b.rows.drafts and b.num_prefills for b in batches),
        "drafts of the device": any(NO_TOKEN in drafts for b in batches for drafts in b.rows.drafts),
        "drafts in a form": run.backend.most_masks > 1,
        "drafts and preempted": any(b.rows.drafts for b in batches) and stats.num_preemptions_total,
        "drafts and a shared prefix": any(b.rows.drafts for b in batches) and stats.num_prefix_hits_total,
        "chunked": any(not s for b in batches for s in b.rows.samples),
        "aborted": run.aborted,
        "prompt logprobs": run.prompts,
        "fed the same rows": limits.token_feedback == "same rows" and any(b.waits_for_step_in_flight for b in batches),
        "sampled on the host": any(is_of_host(a.sampling, limits) for b in batches for a in b.added),
        "in a bucket": any(limits.prefill_buckets and not s for b in batches for s in b.rows.samples),
        "within reach": limits.max_prefill_start and any(not s for b in batches for s in b.rows.samples),
        "changed a place": any(b.adapters for b in batches),
        "waited for a place": run.waited_for_place,
        "read an adapter again": sum(call == "add" for call, _ in run.backend.calls) > len(run.known_adapters),
        "shared a picture": any(run.cached.get(name, 0) >= one[0].end for name, one in run.pictures.items()),
        "fed a picture in parts": run.backend.num_cut,
        "sent pictures again": any(len(a.token_ids) > a.num_prompt_tokens for a in with_pictures),
        "fed pictures whole, in chunks": limits.feeds_pictures_whole and limits.chunks_prefill and with_pictures,
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


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_random_runs_give_the_solo_tokens() -> None:
    happened = check_runs(range(NUM_LONG_RUNS))
    rare = {what: count for what, count in happened.items() if count * EACH_IN < NUM_LONG_RUNS}
    assert not rare
