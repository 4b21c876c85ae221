"""Decisions of the scheduler, each in the smallest setting that shows it. Every run checks tokens."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.engine_driver import RecordingBackend, Run, alone, picture, request, serve, start
from helpers.strict_backend import neuron_limits
from neuron_runtime.core import BackendLimits, FinishReason, PrefillBucket, Request, StepKind, StepOutput
from neuron_runtime.engine import prefix_cache
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.scheduler import Scheduler
from neuron_runtime.errors import BackendFailed

BLOCKS = BackendLimits(max_rows=4, max_model_length=32, max_step_tokens=16, block_size=4, num_blocks=32)
DEVICE = replace(BLOCKS, steps_in_flight=2, token_feedback="device")
NEURON = neuron_limits(max_rows=4, max_model_length=32)
DRAFTS = replace(DEVICE, max_drafts=3)
SMALL = replace(BLOCKS, num_blocks=8)
"""Room for one sequence of the model's length."""
SHARED = replace(BLOCKS, shares_prefixes=True)
EIGHT = (PrefillBucket(8, 8),)
SHARED_DEVICE = replace(DEVICE, shares_prefixes=True)


def buckets(limits: BackendLimits, *sizes: int) -> BackendLimits:
    """Prefill rows are padded to one of these sizes."""
    return replace(limits, prefill_buckets=tuple(PrefillBucket(size, size) for size in sizes))


def kinds(run: Run) -> str:
    """One letter per step: p, d or m."""
    return "".join(batch.kind.value[0] for batch in run.backend.batches)


# Prompts


def test_a_long_prompt_is_fed_in_chunks_and_only_the_last_one_samples() -> None:
    limits = replace(BLOCKS, max_step_tokens=8)
    rows = [batch.rows for batch in serve(limits, request("a", 20, max_tokens=2)).backend.batches]
    assert [r.num_tokens for r in rows] == [(8,), (8,), (4,), (1,)]
    assert [r.samples for r in rows] == [(False,), (False,), (True,), (True,)]


def test_only_the_last_chunk_may_be_shorter_than_the_minimum() -> None:
    limits = replace(BLOCKS, max_step_tokens=10, min_chunk_tokens=7, max_prefill_rows=4)
    run = serve(limits, *[request(name, 13, max_tokens=4) for name in "abc"])
    assert any(not samples for batch in run.backend.batches for samples in batch.rows.samples)


def test_a_chunk_is_never_longer_than_the_largest_bucket() -> None:
    run = serve(buckets(BLOCKS, 2, 5), request("a", 12, max_tokens=2))
    assert [batch.num_tokens for batch in run.backend.batches] == [5, 5, 2, 1]


def test_the_padding_of_prompts_counts_in_a_step() -> None:
    limits = buckets(replace(BLOCKS, max_rows=5, mixes_phases=False, max_step_tokens=31, max_prefill_rows=5), 8, 31)
    run = serve(limits, request("a", 27, 2), *[request(name, 3, 2) for name in "bcde"])
    prefills = [batch.rows.num_tokens for batch in run.backend.batches if batch.kind is StepKind.PREFILL]
    assert prefills == [(27,), (3, 3, 3), (3,)], "computing 31, 24 and 8 tokens"


def test_a_long_prompt_pads_no_short_one() -> None:
    sizes = (PrefillBucket(127, 128), PrefillBucket(4096, 4096))
    limits = replace(
        NEURON, max_step_tokens=4096, max_prefill_rows=4, prefill_buckets=sizes, max_model_length=4096, block_size=4096
    )
    run = serve(limits, *[request(name, length, 2) for name, length in (("a", 4000), ("b", 20), ("c", 20), ("d", 20))])
    prefills = [batch.rows.num_tokens for batch in run.backend.batches if batch.kind is StepKind.PREFILL]
    assert prefills == [(4000,), (20, 20, 20)]
    assert [sum(map(limits.num_computed, lengths)) for lengths in prefills] == [4096, 384]


def test_a_chunk_fills_a_bucket_and_the_rest_takes_the_smallest_that_fits() -> None:
    run = serve(buckets(BLOCKS, 3, 6, 9), request("a", 22, 2))
    assert [batch.num_tokens for batch in run.backend.batches] == [9, 9, 4, 1]


def test_a_chunk_is_as_long_as_fits_beside_other_rows() -> None:
    limits = replace(buckets(BLOCKS, 3, 6, 9), max_rows=2, max_step_tokens=10, max_prefill_rows=2)
    for length, rest in ((13, [(1, 9), (1,), (1,)]), (8, [(1, 5), (1,)])):
        run = serve(limits, request("a", 5, 2), request("b", length, 2))
        rows = [batch.rows.num_tokens for batch in run.backend.batches]
        assert rows == [(5, 3), *rest], "a computes 6 and leaves 4"


def test_no_chunk_starts_beyond_what_prefill_reaches() -> None:
    limits = replace(buckets(BLOCKS, 3, 6), max_rows=3, max_prefill_rows=2, max_step_tokens=11, max_prefill_start=18)
    assert limits.longest_prompt == 24
    run = serve(limits, request("a", 4, 2), request("b", 24, 2))
    starts = [start for batch in run.backend.batches for start in batch.rows.start[batch.num_decodes :]]
    assert starts == [0, 0, 6, 12, 18], "a chunk of 3 beside the first prompt would make the last one start at 21"


def test_without_chunked_prefill_prompts_are_fed_whole() -> None:
    run = serve(NEURON, request("a", 20, max_tokens=3), request("b", 7, max_tokens=3))
    prefills = [batch for batch in run.backend.batches if batch.kind is StepKind.PREFILL]
    assert [batch.rows.num_tokens for batch in prefills] == [(20,), (7,)]


def test_a_step_prefills_at_most_the_rows_that_the_backend_allows() -> None:
    limits = replace(BLOCKS, max_prefill_rows=2)
    run = serve(limits, *[request(name, 3, max_tokens=2) for name in "abc"])
    assert [len(batch.rows) for batch in run.backend.batches] == [2, 3, 1]


# Progress


def test_at_most_one_prefill_runs_between_decode_steps_by_default() -> None:
    run = serve(NEURON, *[request(name, 5, max_tokens=6) for name in "abcdef"])
    assert kinds(run).startswith("ppdpdpd")
    assert "pp" not in kinds(run)[1:]


def test_more_prefills_run_between_decode_steps_when_configured() -> None:
    engine = Engine(backend := RecordingBackend(NEURON), max_consecutive_prefills=3)
    for name in "abcd":
        engine.add(request(name, 5, max_tokens=6))
    while engine.has_work:
        engine.step()
    assert "".join(batch.kind.value[0] for batch in backend.batches).startswith("ppppd")


def test_mixed_steps_advance_prompts_and_decodes_together() -> None:
    limits = replace(BLOCKS, max_step_tokens=6)
    run = serve(limits, request("a", 4, max_tokens=12), request("b", 20, max_tokens=2))
    assert kinds(run).startswith("pmm")
    names = [batch.rows.num_tokens for batch in run.backend.batches]
    assert names[1:4] == [(1, 5), (1, 5), (1, 5)]


def test_every_decode_step_contains_every_live_row_in_slot_order() -> None:
    run = serve(NEURON, request("a", 4, 2), *[request(name, 4, 14) for name in "bcd"])
    slots = [batch.rows.slot for batch in run.backend.batches if batch.kind is StepKind.DECODE]
    assert all(list(rows) == sorted(rows) for rows in slots)
    assert (0, 1, 2) in slots, "a line used again comes before those of older sequences"


def test_slots_are_allocated_lowest_first() -> None:
    run = serve(NEURON, request("a", 4, 2), request("b", 4, 20), request("c", 4, 20), request("d", 4, 4))
    assert [added.slot for batch in run.backend.batches for added in batch.added] == [0, 1, 0, 2]


def test_waiting_requests_are_admitted_by_priority_then_arrival() -> None:
    limits = replace(BLOCKS, max_rows=1)
    run = start(limits)
    asked = [request("late", 3, 2, priority=5), request("first", 3, 2), request("second", 3, 2)]
    run.add(*asked)
    run.finish()
    assert list(run.reasons) == ["first", "second", "late"]


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_request() -> None:
    run = serve(SMALL, request("running", 8, 8), request("large", 16, 8), request("small", 2, 2))
    lengths = [len(added.token_ids) for batch in run.backend.batches for added in batch.added]
    assert lengths == [8, 16, 2]


def test_each_free_row_goes_by_priority_then_arrival() -> None:
    run = start(replace(BLOCKS, max_rows=2))
    asked = [request(f"{priority}-{at}", 6, 6, priority=priority) for at, priority in enumerate((3, 1, 1, 2, 3, 1))]
    run.add(*asked)
    run.step()
    asked += [urgent := request("urgent", 6, 6, priority=-1)]
    run.add(urgent)
    run.finish()
    run.check_tokens(asked)
    assert list(run.reasons) == ["1-1", "1-2", "urgent", "1-5", "2-3", "3-0", "3-4"]


def test_a_prefill_in_progress_does_not_delay_a_request_of_higher_priority() -> None:
    for limits in (BLOCKS, DEVICE, replace(BLOCKS, mixes_phases=False)):
        run = start(replace(limits, max_step_tokens=6))
        asked = [request("long", 28, 2, priority=1), request("equal", 4, 2, priority=1)]
        run.add(*asked)
        run.step()
        asked += [request("urgent", 4, 2)]
        run.add(asked[-1])
        run.finish()
        run.check_tokens(asked)
        assert list(run.reasons) == ["urgent", "long", "equal"]


def test_a_step_that_repeats_the_rows_in_flight_has_the_same_rows_over_the_ends_of_blocks() -> None:
    limits = replace(DEVICE, block_size=2, num_blocks=64)
    batches = serve(limits, request("a", 3, max_tokens=12), request("b", 4, max_tokens=12)).backend.batches[3:9]
    first = batches[0].rows
    assert first.after == (0, 1)
    assert all(batch.rows is first for batch in batches)
    assert sum(len(batch.appended_blocks) for batch in batches) > 2


@pytest.mark.parametrize("limits", [BLOCKS, DEVICE, SHARED_DEVICE, replace(BLOCKS, mixes_phases=False), NEURON])
def test_a_flood_of_long_prompts_starves_no_request(limits: BackendLimits) -> None:
    """Streams get a token in every or every other step; each new request gets its turn during the flood."""
    per_turn = 1 if limits.mixes_phases else 2
    chunks = 1 if limits.longest_prefill >= 28 else 2
    flood = (request(f"flood {at}", 26, 4) for at in range(1000))
    run = start(limits, max_queued_requests=1000)
    asked = [request("stream", 3, 28)]
    run.add(*asked)
    run.step()
    at_step: dict[str, list[int]] = {"stream": [], "short": []}
    arrived = None
    for step in range(200):
        if "short" in run.reasons and "stream" in run.reasons:
            break
        if run.engine.stats.num_waiting < 6:
            asked.append(next(flood))
            run.add(asked[-1])
        if step == 8:
            arrived, ahead = len(run.backend.batches), run.engine.stats.num_waiting
            asked.append(request("short", 4, 3))
            run.add(asked[-1])
        before = {name: len(run.tokens.get(name, ())) for name in at_step}
        run.step()
        for name, steps in at_step.items():
            if len(run.tokens.get(name, ())) > before[name]:
                steps.append(len(run.backend.batches))
    assert max(after - before for before, after in pairwise(at_step["stream"])) <= per_turn
    assert arrived is not None
    # Each earlier request in the queue takes its prefill steps, and its row is free after its answer.
    assert at_step["short"][0] - arrived <= (ahead + limits.max_rows) * (chunks + 4) * per_turn
    run.finish()
    run.check_tokens(asked)


def test_no_step_is_spent_on_a_row_whose_end_is_known() -> None:
    for limits in (BLOCKS, DEVICE, NEURON):
        run = serve(limits, request("a", 5, max_tokens=6))
        assert kinds(run) == "pddddd"


def test_a_foreseen_end_frees_its_row_without_delay() -> None:
    run = serve(NEURON, request("a", 5, 4), request("b", 5, 20))
    assert run.steps.num_ahead == run.steps.num(StepKind.DECODE)
    assert sum(len(batch.rows) for batch in run.backend.batches) == 4 + 20, "a row ran for nothing"


# Cached prefixes


def again(asked: Request, name: str, more: int = 0, **changes: Any) -> Request:
    """Another request with the same prompt, or with `more` further tokens."""
    prompt = (*asked.prompt_token_ids, *range(1, more + 1))
    return replace(asked, request_id=name, prompt_token_ids=prompt, **changes)


def one_after_another(limits: BackendLimits, *requests: Request) -> Run:
    run = start(limits)
    for asked in requests:
        run.add(asked)
        run.finish()
    run.check_tokens(requests)
    return run


def num_fed(run: Run) -> int:
    return sum(batch.num_tokens for batch in run.backend.batches)


@pytest.mark.parametrize("limits", [SHARED, SHARED_DEVICE, replace(SHARED, mixes_phases=False, chunks_prefill=False)])
def test_tokens_computed_by_an_earlier_request_are_reused(limits: BackendLimits) -> None:
    first = request("first", 14, 3)
    run = one_after_another(limits, first, again(first, "same"), again(first, "longer", more=2))
    assert run.cached == {"first": 0, "same": 12, "longer": 12}
    assert num_fed(run) == (14 + 2) + (2 + 2) + (4 + 2)
    stats = run.engine.stats
    assert (stats.num_prefix_queries_total, stats.num_prefix_hits_total) == (14 + 14 + 16, 12 + 12)


def test_at_least_one_token_is_fed_for_a_cached_prompt() -> None:
    for length, cached in ((16, 12), (17, 16), (18, 16)):
        first = request("first", length, 3)
        run = one_after_another(SHARED, first, again(first, "same"))
        assert run.cached["same"] == cached
    apart = replace(SHARED, max_step_tokens=20, mixes_phases=False, chunks_prefill=False, sorts_rows=True)
    first = request("first", 17, 3)
    run = one_after_another(apart, first, again(first, "same"))
    assert run.cached["same"] == 12, "a row of one token would be a decode row"


def test_a_prompt_cached_up_to_one_token_becomes_a_decode_row_in_slot_order() -> None:
    limits = replace(SHARED, sorts_rows=True, max_rows=3)
    first = request("first", 17, 2)
    run = one_after_another(limits, first)
    asked = [request("short", 3, 2), request("long", 3, 12), again(first, "same", sampling=replace(first.sampling))]
    run.add(*asked)
    run.finish()
    run.check_tokens(asked)
    assert run.cached["same"] == 16


def test_the_next_turn_reuses_the_cached_answer() -> None:
    for limits in (SHARED, SHARED_DEVICE, replace(DRAFTS, shares_prefixes=True)):
        first = request("first", 6, 11)
        turn = replace(first, request_id="turn", prompt_token_ids=(*first.prompt_token_ids, *alone(first)[0], 1, 2))
        run = one_after_another(limits, first, turn)
        assert run.cached["turn"] == 16, "the last token of an answer is never computed"


def test_a_prompt_followed_by_one_answer_token_is_cached() -> None:
    for limits in (SHARED, SHARED_DEVICE):
        first = request("first", 9, 1)
        run = one_after_another(limits, first, again(first, "same"))
        assert run.cached["same"] == 8


def test_identical_prompts_arriving_together_are_computed_once() -> None:
    for limits in (SHARED, SHARED_DEVICE, replace(SHARED, mixes_phases=False)):
        first = request("a", 22, 4, temperature=1.0)
        choices = [replace(first, request_id=f"a{n}", sampling=replace(first.sampling, choice=n)) for n in range(4)]
        run = serve(replace(limits, max_step_tokens=8, max_prefill_rows=4), *choices)
        assert run.cached == {"a0": 0, "a1": 20, "a2": 20, "a3": 20}
        held = {added.blocks[:5] for batch in run.backend.batches for added in batch.added}
        assert len(held) == 1, "the same blocks"


def test_a_request_waiting_for_a_prefix_does_not_block_others() -> None:
    limits = replace(SHARED, max_step_tokens=12, max_prefill_rows=4)
    first, other = request("a", 18, 8), request("b", 3, 8)
    run = serve(limits, first, again(first, "waits"), other)
    lengths = [[len(added.token_ids) for added in batch.added] for batch in run.backend.batches]
    assert lengths[:4] == [[18], [3], [], [18]]


def test_a_request_waiting_for_a_prefix_keeps_its_blocks() -> None:
    limits = replace(SHARED, max_rows=2, max_step_tokens=12, max_prefill_rows=4)
    first = request("a", 18, 8)
    run = serve(limits, first, again(first, "waits"), request("b", 3, 8))
    lengths = [len(added.token_ids) for batch in run.backend.batches for added in batch.added]
    assert lengths == [18, 18, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_step_tokens": 8},
        {"prefill_buckets": EIGHT},
        {"prefill_buckets": EIGHT, "max_prefill_rows": 4, "max_step_tokens": 15},
    ],
)
def test_a_step_without_room_looks_up_no_prefix(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(replace(SHARED, **changes))
    find = Mock(wraps=run.scheduler.blocks.find)
    monkeypatch.setattr(run.scheduler.blocks, "find", find)
    first = request("a", 24, 2)
    for one in (first, *(again(first, name) for name in "bcd")):
        run.engine.add(one)
    run.engine.step()
    assert [batch.num_tokens for batch in run.backend.batches] == [8, 8]
    assert find.call_count == 1, "for the one that started"


def test_no_request_waits_for_the_prefix_of_a_later_one() -> None:
    limits = replace(SHARED, prefill_buckets=EIGHT, max_prefill_rows=4)
    low = request("low", 24, 4, priority=5)
    run = start(limits)
    run.add(low)
    run.step()
    high = again(low, "high", priority=0)
    run.add(high)
    run.step()
    assert {s.request.request_id for s in run.scheduler.running} == {"low", "high"}
    run.finish()
    run.check_tokens([low, high])


def test_a_request_computes_the_awaited_prefix_when_its_producer_leaves() -> None:
    first = request("a", 24, 4)
    asked = [first, again(first, "b"), again(first, "c")]
    for limits in (SHARED, SHARED_DEVICE):
        for after in range(1, 5):
            run = start(replace(limits, max_step_tokens=8))
            run.add(*asked)
            for _ in range(after):
                run.step()
            run.abort("a")
            run.finish()
            run.check_tokens(asked)
            assert run.cached["c"] == 20


def test_different_salts_and_adapters_share_no_blocks() -> None:
    first = request("first", 14, 3)
    salted, adapted = again(first, "salt", cache_salt="x"), again(first, "adapter", adapter="x")
    others = [again(first, "other", cache_salt="y"), again(first, "odd", cache_salt="\ud800")]
    limits = replace(SHARED, max_adapters=1, max_loaded_adapters=1, max_adapter_rank=8)
    run = one_after_another(limits, first, salted, adapted, *others, again(salted, "same salt"))
    assert run.cached == {"first": 0, "salt": 0, "adapter": 0, "other": 0, "odd": 0, "same salt": 12}


def test_an_equal_block_after_a_different_prefix_does_not_match() -> None:
    first = request("first", 12, 3)
    beginning = tuple(token + 1 for token in first.prompt_token_ids[:4])
    short = replace(first, request_id="short", prompt_token_ids=(*beginning, 0))
    other = replace(first, request_id="other", prompt_token_ids=(*beginning, *first.prompt_token_ids[4:]))
    run = one_after_another(SHARED, first, short, other)
    assert run.cached["other"] == 4, "the prefix of the short one, and nothing of the first"


SEEING = replace(SHARED, max_pictures=4, max_picture_tokens=10)
WHOLE = replace(SEEING, feeds_pictures_whole=True)


def test_the_same_picture_at_the_same_place_shares_blocks_and_another_one_does_not() -> None:
    first = replace(request("first", 18, 3), pictures=(picture("cat", 5, 6), picture("dog", 12, 4)))
    cat, dog = first.pictures
    run = one_after_another(
        SEEING,
        first,
        again(first, "same"),
        again(first, "other", pictures=(cat, picture("owl", 12, 4))),
        again(first, "none before", pictures=(dog,)),
        again(first, "moved", pictures=(picture("cat", 6, 6), dog)),
        again(first, "text", pictures=()),
    )
    assert run.cached == {"first": 0, "same": 16, "other": 12, "none before": 4, "moved": 4, "text": 12}


def test_a_sequence_computed_again_gets_its_pictures_again() -> None:
    limits = replace(SEEING, num_blocks=11, shares_prefixes=False)
    run = serve(limits, *(replace(request(name, 12, 20), pictures=(picture(name, 2, 7),)) for name in "ab"))
    added = [(one.num_prompt_tokens < len(one.token_ids), one.pictures) for b in run.backend.batches for one in b.added]
    assert (True, (picture("b", 2, 7),)) in added


@pytest.mark.parametrize(("start", "fed"), [(0, [16, 4]), (2, [16, 4]), (3, [16, 4]), (11, [11, 9]), (14, [14, 6])])
def test_a_chunk_ends_before_a_picture_that_it_cannot_feed_whole(start: int, fed: list[int]) -> None:
    asked = replace(request("a", 20, 1), pictures=(picture("cat", start, 6),))
    run = serve(replace(WHOLE, max_model_length=24), asked)
    assert [batch.num_tokens for batch in run.backend.batches] == fed


def test_a_chunk_before_a_picture_is_not_smaller_than_the_least() -> None:
    limits = replace(WHOLE, min_chunk_tokens=3)
    ahead, asked = request("ahead", 9, 1), replace(request("a", 16, 1), pictures=(picture("cat", 2, 10),))
    run = serve(limits, ahead, asked)
    assert [batch.rows.num_tokens for batch in run.backend.batches] == [(9,), (16,)]


@pytest.mark.parametrize(("limits", "cached"), [(SEEING, 12), (WHOLE, 8)])
def test_a_prefix_hit_does_not_end_within_a_picture_that_is_fed_whole(limits: BackendLimits, cached: int) -> None:
    """Its last token is not cached, as at least one must be fed."""
    first = replace(request("first", 16, 1), pictures=(picture("cat", 9, 7),))
    run = one_after_another(limits, first, again(first, "same"))
    assert run.cached["same"] == cached


def test_pictures_fed_whole_must_fit_beside_the_rows_of_all_others() -> None:
    with pytest.raises(ValueError, match="max_picture_tokens that a step fits"):
        replace(WHOLE, max_picture_tokens=14)
    replace(WHOLE, max_picture_tokens=14, chunks_prefill=False)


def test_a_prefix_hit_is_limited_by_the_backend() -> None:
    first = request("first", 20, 3)
    run = one_after_another(
        replace(SHARED, max_step_tokens=20, chunks_prefill=False, max_prefill_start=11), first, again(first, "same")
    )
    assert run.cached["same"] == 8


def test_a_prefix_hit_is_cut_so_that_the_chunks_after_it_stay_within_reach() -> None:
    limits = replace(buckets(SHARED, 6), max_prefill_start=18)
    first = request("first", 24, 3)
    run = one_after_another(limits, first, again(first, "same"), request("else", 20, 3))
    assert run.cached["same"] == 12, "from 16 or 20 on, chunks of 6 would start at 22 or 20"


def test_a_prompt_with_requested_logprobs_is_computed_whole_and_cached() -> None:
    limits = replace(SHARED, max_logprobs=3, reports_prompt_logprobs=True, max_step_tokens=8)
    first = request("first", 20, 3)
    reported = again(first, "reported", sampling=replace(first.sampling, prompt_logprobs=2))
    run = one_after_another(limits, reported, again(reported, "reported again"), again(first, "plain"))
    assert run.cached == {"reported": 0, "reported again": 0, "plain": 16}
    assert run.engine.stats.num_prefix_queries_total == 20, "a request that does not look up a prefix does not count"


def test_the_prompt_of_several_answers_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def sha256(data: bytes) -> Any:
        hashed.append(data)
        return hashlib.sha256(data)

    monkeypatch.setattr(prefix_cache, "hashlib", Mock(sha256=sha256))
    first = request("first", 20, 1)
    run = start(SHARED)
    # Not by the driver, which hashes prompts too.
    for number in range(3):
        run.engine.add(Request(f"r{number}", (*first.prompt_token_ids,), replace(first.sampling, choice=number)))
    run.engine.add(Request("salted", first.prompt_token_ids, first.sampling, cache_salt="salt"))
    while run.engine.has_work:
        run.engine.step()
    blocks = [data for data in hashed if len(data) > 32]
    assert len(blocks) == len(set(blocks)) == 2 * 5, "one prompt, under two salts"


def test_the_least_recently_used_blocks_are_evicted_first_and_later_ones_of_a_prompt_before_earlier() -> None:
    limits = replace(SHARED, num_blocks=8)
    a, b, c = (request(name, 13, 2) for name in "abc")
    run = one_after_another(limits, a, b, again(a, "touch a"), c, again(a, "a again"), again(b, "b again"))
    assert run.cached["a again"] == 12, "used later than b"
    assert run.cached["b again"] == 4


def test_held_blocks_are_not_evicted() -> None:
    first = request("first", 9, 1)
    asked = [again(first, "holds"), *(request(name, 9, 2) for name in "abcdef")]
    asked[0] = replace(asked[0], sampling=replace(first.sampling, max_tokens=20))
    run = one_after_another(replace(SHARED, num_blocks=11, max_rows=2), first)
    run.add(*asked)
    run.finish()
    run.check_tokens(asked)
    assert run.cached["holds"] == 8


def test_an_unshared_released_block_is_free() -> None:
    # Of 8 blocks the running one holds 3 and may grow; the long prompt needs 5, whether 2 of them are cached or not.
    limits = replace(SHARED, num_blocks=8, max_prefill_rows=2)
    first = request("first", 9, 1)
    run = one_after_another(limits, first)
    long = again(first, "long", more=10, sampling=replace(first.sampling, max_tokens=10))
    asked = [request("grows", 10, 6), long]
    run.add(*asked)
    run.finish()
    run.check_tokens(asked)
    assert run.cached["long"] == 8
    assert run.engine.stats.num_preemptions_total == 0


def test_tokens_computed_after_a_stop_are_not_cached() -> None:
    for num_prompt in range(5, 9):
        plain = request("a", num_prompt, 20)
        tokens = alone(plain)[0]
        for limits in (replace(DRAFTS, shares_prefixes=True), SHARED_DEVICE):
            for at in range(1, 12):
                stops = frozenset({tokens[at]})
                serve(limits, replace(plain, sampling=replace(plain.sampling, stop_token_ids=stops)))


def test_a_preempted_sequence_reuses_its_remaining_blocks() -> None:
    for limits in (replace(SMALL, shares_prefixes=True), replace(SHARED_DEVICE, num_blocks=8)):
        asked = request("a", 8, 20), request("b", 8, 20)
        plain = serve(replace(limits, shares_prefixes=False), *asked)
        run = serve(limits, *asked)
        stats = run.engine.stats
        assert stats.num_preemptions_total > 0
        assert num_fed(run) < num_fed(plain)
        assert (stats.num_prefix_queries_total, stats.num_prefix_hits_total) == (16, 0), "the first time counts"


def test_without_prefix_sharing_nothing_is_cached() -> None:
    first = request("first", 14, 3)
    run = one_after_another(BLOCKS, first, again(first, "same"))
    stats = run.engine.stats
    assert (run.cached["same"], stats.num_prefix_queries_total, run.known) == (0, 0, {})


# Preemption


def test_the_youngest_sequence_of_the_lowest_priority_is_preempted() -> None:
    limits = replace(BLOCKS, num_blocks=9, max_prefill_rows=4)
    run = start(limits)
    run.add(request("a", 4, 24), request("low", 4, 24, priority=1), request("b", 4, 24))
    preempted: list[str] = []
    while run.engine.has_work:
        before = {s.request.request_id for s in run.scheduler.running}
        run.step()
        back = {s.request.request_id for s in run.scheduler.waiting}
        preempted += sorted(before & back)
    assert preempted[0] == "low"
    assert "b" in preempted
    assert "a" not in preempted


def test_a_preempted_sequence_resumes_where_it_stopped() -> None:
    for limits in (SMALL, replace(SMALL, steps_in_flight=2, token_feedback="device")):
        run = serve(limits, request("a", 8, 20), request("b", 8, 20), request("c", 4, 10, temperature=1.0, seed=3))
        assert run.engine.stats.num_preemptions_total > 0
        added = [added for batch in run.backend.batches for added in batch.added]
        assert len(added) == 3 + run.engine.stats.num_preemptions_total
        assert any(len(a.token_ids) > a.num_prompt_tokens for a in added), "the answer so far was included"


def test_a_prompt_preempted_halfway_reports_each_logprob_once() -> None:
    for limits in (BLOCKS, DEVICE):
        run = start(
            replace(limits, max_rows=2, max_step_tokens=2, num_blocks=9, max_logprobs=1, reports_prompt_logprobs=True)
        )
        scored = request("scored", 20, 2, prompt_logprobs=1)
        asked = [request("first", 4, 20), scored]
        run.add(asked[0])
        while len(run.tokens["first"]) < 2:
            run.step()
        run.add(scored)
        run.finish()
        run.check_tokens(asked)
        readmitted = [added for batch in run.backend.batches for added in batch.added][2:]
        assert [len(added.token_ids) for added in readmitted] == [20], "preempted once, before its first token"


def test_a_prefill_continues_when_all_decoding_sequences_were_preempted() -> None:
    for limits in (BLOCKS, DEVICE):
        run = start(replace(limits, mixes_phases=False, max_rows=2, max_step_tokens=2, num_blocks=9))
        asked = [request("low", 4, 28, priority=1), request("high", 20, 2)]
        run.add(asked[0])
        while len(run.tokens["low"]) < 4:
            run.step()
        run.add(asked[1])
        run.finish()
        run.check_tokens(asked)
        assert run.engine.stats.num_preemptions_total == 1
        assert list(run.reasons) == ["high", "low"]


def test_no_sequence_is_preempted_that_could_not_be_recomputed() -> None:
    limits = replace(SMALL, chunks_prefill=False, prefill_buckets=EIGHT)
    run = serve(limits, request("a", 8, 16), request("b", 8, 16), request("c", 8, 16))
    assert run.engine.stats.num_preemptions_total == 0


def test_a_sequence_that_is_never_preempted_waits_if_an_earlier_one_could_then_not_grow() -> None:
    limits = replace(SMALL, block_size=2, num_blocks=16, chunks_prefill=False, prefill_buckets=EIGHT)
    run = serve(limits, request("grows to 4 blocks", 2, 7), request("keeps 13 blocks", 8, 19))
    assert run.engine.stats.num_preemptions_total == 0
    assert [batch.step for batch in run.backend.batches if batch.added] == [0, 7]


SEGMENTS = BackendLimits(
    max_rows=32,
    max_model_length=128,
    max_step_tokens=32,
    max_prefill_rows=4,
    prefill_buckets=(PrefillBucket(8, 8), PrefillBucket(32, 32)),
    max_prefill_start=96,
    mixes_phases=False,
    block_size=8,
    num_blocks=8 * 16,
)
"""Blocks for 8 sequences of the model's length."""


@pytest.mark.parametrize(
    ("limits", "max_tokens", "num_at_once"),
    [
        (SEGMENTS, 122, 32),
        (replace(SEGMENTS, chunks_prefill=False), 122, 8),
        (replace(SEGMENTS, chunks_prefill=False), 27, 32),
    ],
    ids=["recomputed in segments", "never recomputed", "recomputed at once"],
)
def test_short_chats_hold_no_blocks_for_tokens_that_they_may_never_have(
    limits: BackendLimits, max_tokens: int, num_at_once: int
) -> None:
    chats = [request(f"{n:02}", 6, max_tokens, min_tokens=20, stop_token_ids=frozenset(range(8))) for n in range(32)]
    run = serve(limits, *chats)
    assert max(len(batch.rows) for batch in run.backend.batches) == num_at_once


def test_no_sequence_is_preempted_with_one_line_per_sequence() -> None:
    run = serve(NEURON, *[request(name, 20, 12) for name in "abcde"])
    assert run.engine.stats.num_preemptions_total == 0


def test_a_prompt_is_admitted_only_with_a_spare_block_for_each_growing_sequence() -> None:
    # a holds 1 block and may grow to 2; b needs 6 and may grow to 7: of 8 blocks 7 are free, one too few.
    asked = request("a", 2, 6), request("b", 21, 8)
    for num_blocks, waits in ((8, True), (9, False)):
        run = serve(replace(SMALL, num_blocks=num_blocks, max_prefill_rows=2), *asked)
        added = [batch.step for batch in run.backend.batches for _ in batch.added]
        assert (added[1] >= 5) is waits
        assert run.engine.stats.num_preemptions_total == 0


# Steps in flight


def test_blocks_that_the_step_in_flight_may_write_are_not_reused() -> None:
    # Both end at an unforeseen stop token, so a row of each is still in flight when its slot is free.
    for limits in (DEVICE, replace(DEVICE, mixes_phases=False)):
        first = [request(name, 6, 20, seed=1) for name in "ab"]
        stops = [replace(r, sampling=replace(r.sampling, stop_token_ids=frozenset(alone(r)[0][3:4]))) for r in first]
        run = serve(replace(limits, max_rows=2), *stops, request("c", 6, 6), request("d", 6, 6))
        assert run.reasons["a"] is FinishReason.STOP
    # The other one needs a block just when the only one of the ended request is free.
    short = request("a", 2, 20)
    short = replace(short, sampling=replace(short.sampling, stop_token_ids=frozenset(alone(short)[0][1:2])))
    serve(replace(DEVICE, max_rows=2), short, request("b", 3, 20))


def test_the_row_of_an_ended_request_is_discarded() -> None:
    stop = request("a", 6, 20)
    stop = replace(stop, sampling=replace(stop.sampling, stop_token_ids=frozenset(alone(stop)[0][2:3])))
    run = serve(DEVICE, stop)
    assert len(run.backend.batches) > len(run.tokens["a"]), "the row scheduled early was wasted"


def test_drafts_never_reach_beyond_the_last_token_that_is_fed() -> None:
    for limits in (DRAFTS, neuron_limits(max_rows=3, max_model_length=32, max_drafts=3)):
        for max_tokens in range(1, 9):
            serve(limits, request("a", 8, max_tokens), request("b", 5, 12), request("c", 9, max_tokens))
        for num_prompt in range(8, 16):
            run = serve(limits, request("to the edge", num_prompt, limits.max_new_tokens(num_prompt)))
            rows = [batch.rows for batch in run.backend.batches]
            assert max(one.start[0] + one.num_tokens[0] for one in rows) <= limits.max_model_length - 1


def test_drafts_take_what_a_step_has_left() -> None:
    limits = replace(DRAFTS, max_rows=3, max_step_tokens=9, min_chunk_tokens=2)
    run = serve(limits, request("a", 5, 20), request("b", 4, 20), request("c", 20, 8))
    steps = run.backend.batches
    assert max(batch.num_tokens for batch in steps) == limits.max_step_tokens
    assert any(batch.num_prefills and batch.rows.drafts for batch in steps), "a prompt left nothing"


def test_drafts_take_the_blocks_that_are_free() -> None:
    limits = replace(DRAFTS, max_rows=2, block_size=2, num_blocks=13)
    asked = request("a", 9, 12), request("b", 3, 2)
    run = serve(limits, *asked)
    rows = [batch.rows for batch in run.backend.batches]
    assert any(len(of_row) == limits.max_drafts for row in rows for of_row in row.drafts)
    assert run.engine.stats.num_preemptions_total == 0
    serve(replace(limits, num_blocks=11), asked[0])


def test_a_step_with_drafts_is_alone_in_flight() -> None:
    run = serve(DRAFTS, request("a", 6, 26), request("b", 5, 24), request("c", 9, 22))
    calls = [name for name, _ in run.backend.calls]
    alone_in_flight = {batch.step for batch in run.backend.batches if batch.rows.drafts}
    assert alone_in_flight
    for at, (name, step) in enumerate(run.backend.calls):
        if name == "launch":
            in_flight = calls[:at].count("launch") - calls[:at].count("collect")
            assert not (in_flight and {step, step - 1} & alone_in_flight)


def test_at_most_two_steps_are_scheduled_and_not_yet_applied() -> None:
    run = start(DEVICE)
    run.add(request("a", 4, 20))
    while run.engine.has_work:
        run.step()
        assert len(run.scheduler.scheduled) <= 1


# Ends


def test_an_answer_ends_at_the_first_stop_token_among_accepted_drafts() -> None:
    plain = request("a", 6, 20)
    tokens = alone(plain)[0]
    for limits in (DRAFTS, BLOCKS):
        for at in range(1, 12):
            stops = frozenset({tokens[at]})
            asked = replace(plain, sampling=replace(plain.sampling, stop_token_ids=stops))
            run = serve(limits, asked)
            assert run.tokens["a"] == list(tokens[: tokens.index(tokens[at]) + 1])
            assert run.reasons["a"] is FinishReason.STOP


def test_a_stop_token_before_min_tokens_does_not_end_the_answer() -> None:
    plain = request("a", 6, 12)
    tokens = alone(plain)[0]
    sampling = replace(plain.sampling, stop_token_ids=frozenset(tokens), min_tokens=5)
    run = serve(BLOCKS, replace(plain, sampling=sampling))
    assert run.tokens["a"] == list(tokens[:6])


def test_an_abort_frees_everything_in_any_state_of_the_request() -> None:
    for limits in (BLOCKS, DEVICE, DRAFTS, SMALL, NEURON):
        for after in range(12):
            for victim in "abcde":
                run = start(limits)
                asked = [request(name, 6, 8) for name in "abcde"]
                run.add(*asked)
                for _ in range(after):
                    run.step()
                if victim not in run.reasons:
                    run.abort(victim)
                    run.abort(victim)
                run.finish()
                run.check_tokens(asked)


def test_aborting_unknown_and_finished_requests_is_harmless() -> None:
    run = serve(BLOCKS, request("a", 3, 2))
    run.engine.abort("a")
    run.engine.abort("nobody")
    assert not run.engine.has_work


# The contract of the backend


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (StepOutput(1, ((1,),)), "step 1 with 1 rows, expected step 0 with 1 rows"),
        (StepOutput(0, ((1,), (2,))), "step 0 with 2 rows, expected step 0 with 1 rows"),
        (StepOutput(0, ((),)), r"rows returned \[0\] tokens, expected at least one and at most \[1\]"),
        (StepOutput(0, ((1, 2),)), r"rows returned \[2\] tokens, expected at least one and at most \[1\]"),
    ],
)
def test_an_output_that_does_not_match_its_step_is_refused(output: StepOutput, complaint: str) -> None:
    scheduler = Scheduler(BLOCKS)
    scheduler.add(request("a", 3, 4))
    scheduler.schedule()
    with pytest.raises(BackendFailed, match=complaint):
        scheduler.apply(output)


def test_a_batch_contains_each_change_once() -> None:
    run = serve(DEVICE, *[request(name, 5, 9) for name in "abcdef"])
    added = [a.slot for batch in run.backend.batches for a in batch.added]
    released = [slot for batch in run.backend.batches for slot in batch.released]
    assert len(added) == 6
    # Releases are sent with the next batch, and nothing follows the last one.
    assert 3 <= len(released) <= 6
    blocks = [block for batch in run.backend.batches for _, block in batch.appended_blocks]
    assert len(blocks) == 6 * (DEVICE.blocks_for(13) - DEVICE.blocks_for(5))


def test_steps_are_numbered_consecutively() -> None:
    run = serve(BLOCKS, request("a", 5, 9), request("b", 5, 9))
    assert all(after.step == before.step + 1 for before, after in pairwise(run.backend.batches))


# The pool


def test_a_pool_allocates_the_lowest_numbers_and_tracks_holders() -> None:
    pool = prefix_cache.PrefixCache(5)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([1])
    assert pool.take(2) == [1, 3]
    pool.share([0])
    pool.give_back([0])
    assert pool.num_used == 4, "one holder of 0 is left"
    pool.give_back([0])
    assert pool.take(1) == [0]
    with pytest.raises(ValueError, match="cannot take 2 numbers: 1 are free"):
        pool.take(2)
    with pytest.raises(ValueError, match="4 is free already"):
        pool.give_back([4])
    with pytest.raises(ValueError, match="4 is free and cannot be shared"):
        pool.share([4])
