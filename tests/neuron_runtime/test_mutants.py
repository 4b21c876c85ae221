"""Mutants of scheduling, each with one changed decision and the test that must fail because of it."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from helpers.mutation import (
    Operator,
    appended,
    called_instead,
    concatenated,
    flag_flipped,
    forced,
    left_out,
    mutate,
    not_removed,
    skipped_if_short,
    unsliced,
    unwrapped,
    valued,
    without,
)
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.errors import BackendFailed

SCHEDULER = "scheduler:Scheduler"
BLOCKS = "blocks:BlockManager"
CACHE = "prefix_cache:PrefixCache"
MUTANTS = [
    # A function of the engine, the change of one of its decisions, and the test that detects it.
    (
        f"{SCHEDULER}.schedule",
        forced("_consecutive_prefills", True),
        "at_most_one_prefill_runs_between_decode_steps_by_default",
    ),
    (
        f"{SCHEDULER}.schedule",
        left_out("decoding"),
        "a_prefill_continues_when_all_decoding_sequences_were_preempted",
    ),
    ("running:RunningSet._decode", appended("insort"), "every_decode_step_contains_every_live_row_in_slot_order"),
    (
        "running:WaitingQueue.insert_in_order",
        appended("insort"),
        "waiting_requests_are_admitted_by_priority_then_arrival",
    ),
    (
        f"{SCHEDULER}._make_room",
        called_instead("max", "min"),
        "the_youngest_sequence_of_the_lowest_priority_is_preempted",
    ),
    (f"{SCHEDULER}._make_room", forced("scheduled", False), "a_preempted_sequence_resumes_where_it_stopped"),
    (f"{BLOCKS}.allocate", without("num_computed_tokens"), "identical_prompts_arriving_together_are_computed_once"),
    (
        f"{BLOCKS}.num_spare",
        left_out("blocks"),
        "a_prompt_is_admitted_only_with_a_spare_block_for_each_growing_sequence",
    ),
    (
        "running:RunningSet.startable",
        left_out("num_free"),
        "waiting_requests_are_admitted_by_priority_then_arrival",
    ),
    (
        "adapters:Places.startable",
        forced("setdefault", False),
        "a_held_request_starts_although_others_of_the_placed_adapters_keep_coming",
    ),
    ("adapters:Places.take", without("append"), "the_place_that_was_left_longest_ago_is_given_away"),
    (f"{SCHEDULER}._free", without("give_back"), "the_place_that_was_left_longest_ago_is_given_away"),
    (
        f"{SCHEDULER}._candidates",
        concatenated("merge"),
        "a_prefill_in_progress_does_not_delay_a_request_of_higher_priority",
    ),
    (
        f"{SCHEDULER}._candidates",
        skipped_if_short("num_claimed"),
        "the_head_of_the_queue_is_not_overtaken_by_a_smaller_request",
    ),
    (f"{SCHEDULER}._free", forced("_slots_wait", False), "blocks_that_the_step_in_flight_may_write_are_not_reused"),
    (f"{SCHEDULER}._free", forced("_blocks_wait", False), "blocks_that_the_step_in_flight_may_write_are_not_reused"),
    (f"{SCHEDULER}._drafts", left_out("max_length"), "drafts_never_reach_beyond_the_last_token_that_is_fed"),
    (f"{SCHEDULER}._drafts", left_out("budget"), "drafts_take_what_a_step_has_left"),
    (f"{SCHEDULER}._drafts", without("make_room"), "drafts_take_the_blocks_that_are_free"),
    (f"{SCHEDULER}.apply", without("num_scheduled_tokens"), "drafts_take_what_a_step_has_left"),
    (
        f"{BLOCKS}.secures",
        forced("is_preemptible", True),
        "no_sequence_is_preempted_that_could_not_be_recomputed",
    ),
    (
        f"{SCHEDULER}._prefill_rows",
        forced("max_prefill_rows", False),
        "a_step_prefills_at_most_the_rows_that_the_backend_allows",
    ),
    (
        f"{SCHEDULER}._part",
        called_instead("max", "min"),
        "a_chunk_is_never_longer_than_the_largest_bucket",
    ),
    (f"{SCHEDULER}._part", left_out("num_computed"), "a_chunk_is_as_long_as_fits_beside_other_rows"),
    (f"{SCHEDULER}._part", forced("reaches", True), "no_chunk_starts_beyond_what_prefill_reaches"),
    (f"{SCHEDULER}._prefill_rows", without("num_computed"), "the_padding_of_prompts_counts_in_a_step"),
    (
        f"{SCHEDULER}._candidates",
        forced("secures", True),
        "a_sequence_that_is_never_preempted_waits_if_an_earlier_one_could_then_not_grow",
    ),
    (f"{SCHEDULER}._part", forced("min_chunk_tokens", True), "only_the_last_chunk_may_be_shorter_than_the_minimum"),
    (f"{SCHEDULER}.schedule", forced("max_length", False), "a_foreseen_end_frees_its_row_without_delay"),
    (
        f"{SCHEDULER}.apply",
        without("num_computed_tokens", nth=1),
        "drafts_never_reach_beyond_the_last_token_that_is_fed",
    ),
    (f"{SCHEDULER}.apply", forced("finished", True, nth=0), "the_row_of_an_ended_request_is_discarded"),
    (
        "sequence:Sequence.accept",
        forced("min_tokens", True),
        "a_stop_token_before_min_tokens_does_not_end_the_answer",
    ),
    ("sequence:Sequence.accept", unsliced("STOP", 0), "an_answer_ends_at_the_first_stop_token_among_accepted_drafts"),
    ("pool:Pool._return", appended("heappush"), "slots_are_allocated_lowest_first"),
    (f"{BLOCKS}.find", valued("_min_fed", 0), "at_least_one_token_is_fed_for_a_cached_prompt"),
    (f"{BLOCKS}.__init__", forced("mixes_phases", True), "at_least_one_token_is_fed_for_a_cached_prompt"),
    (f"{BLOCKS}._may_begin", forced("reaches", True), "a_prefix_hit_is_limited_by_the_backend"),
    (
        f"{SCHEDULER}.schedule",
        unwrapped("sorted"),
        "a_prompt_cached_up_to_one_token_becomes_a_decode_row_in_slot_order",
    ),
    (
        f"{SCHEDULER}.__init__",
        left_out("shares_prefixes"),
        "a_prompt_followed_by_one_answer_token_is_cached",
    ),
    (f"{BLOCKS}.allocate", without("share"), "identical_prompts_arriving_together_are_computed_once"),
    (
        f"{BLOCKS}.find",
        forced("prompt_logprobs", True),
        "a_prompt_with_requested_logprobs_is_computed_whole_and_cached",
    ),
    (
        f"{SCHEDULER}._candidates",
        forced("num_coming", True),
        "identical_prompts_arriving_together_are_computed_once",
    ),
    (f"{BLOCKS}.num_claimed", left_out("num_idle"), "an_unshared_released_block_is_free"),
    (f"{BLOCKS}.remember", left_out("tokens"), "tokens_computed_after_a_stop_are_not_cached"),
    (
        f"{BLOCKS}.free",
        unwrapped("reversed"),
        "the_least_recently_used_blocks_are_evicted_first_and_later_ones_of_a_prompt_before_earlier",
    ),
    (
        "prefix_cache:BlockKeys.first",
        left_out("keys", nth=1),
        "an_equal_block_after_a_different_prefix_does_not_match",
    ),
    ("prefix_cache:BlockKeys.__init__", left_out("cache_salt"), "different_salts_and_adapters_share_no_blocks"),
    ("prefix_cache:BlockKeys.__init__", left_out("adapter"), "different_salts_and_adapters_share_no_blocks"),
    (
        f"{CACHE}.find",
        left_out("_coming", nth=1),
        "identical_prompts_arriving_together_are_computed_once",
    ),
    (f"{CACHE}.find", left_out("order"), "no_request_waits_for_the_prefix_of_a_later_one"),
    (f"{CACHE}.share", without("_idle"), "held_blocks_are_not_evicted"),
    (
        f"{CACHE}._next",
        without("_forget"),
        "the_least_recently_used_blocks_are_evicted_first_and_later_ones_of_a_prompt_before_earlier",
    ),
    (
        f"{CACHE}._next",
        flag_flipped("popitem"),
        "the_least_recently_used_blocks_are_evicted_first_and_later_ones_of_a_prompt_before_earlier",
    ),
    (
        f"{CACHE}._return",
        left_out("_coming"),
        "a_request_computes_the_awaited_prefix_when_its_producer_leaves",
    ),
    (
        "loop:stream_gap_bound",
        left_out("max_consecutive_prefills"),
        "the_bound_on_the_gap_is_reached",
    ),
    ("loop:stream_gap_bound", forced("mixes_phases", True), "the_bound_on_the_gap_is_reached"),
    ("loop:Engine.add", without("_applied_at"), "the_bound_on_the_gap_is_reached"),
    ("loop:Engine.abort", without("_guide_of"), "an_abort_forgets_the_guide"),
    (
        "loop:Engine._is_fed_by_device",
        forced("token_feedback", False),
        "with_feedback_to_the_same_rows_a_step_is_launched_ahead_only_if_all_its_rows_follow_the_same_rows",
    ),
    (
        "loop:Engine._is_fed_by_device",
        forced("needs_host", False),
        "nothing_is_launched_behind_a_step_with_a_row_that_the_host_samples",
    ),
    ("loop:Engine.abort", without("_leave"), "an_abort_of_a_waiting_request_leaves_room_in_the_queue"),
    (
        f"{SCHEDULER}._preempt",
        without("prompt_logprobs"),
        "a_prompt_preempted_halfway_reports_each_logprob_once",
    ),
    ("loop:Engine._schedule", not_removed(), "the_queue_time_is_reported_with_the_first_tokens"),
]


@cache
def killing_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("where", "operator", "killer"),
    MUTANTS,
    ids=[f"{where.partition(':')[2]}-{number}" for number, (where, *_) in enumerate(MUTANTS)],
)
def test_a_mutant_is_killed_by_its_test(
    where: str, operator: Operator, killer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (killing_test,) = (
        test
        for name in ("test_scheduler", "test_engine", "test_engine_adapters")
        if (test := getattr(killing_module(name), f"test_{killer}", None))
    )
    killing_test()
    mutate(monkeypatch, f"neuron_runtime.engine.{where}", operator)
    with pytest.raises((AssertionError, IllegalBatch, BackendFailed, RuntimeError, ValueError, LookupError)):
        killing_test()
