"""Mutants of scheduling, one decision each, and the test that kills each: those tests can fail, and for this reason."""

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
from neuron_runtime.backend.base import IllegalBatch
from neuron_runtime.errors import BackendFailed

SCHEDULER = "scheduler:Scheduler"
BLOCKS = "blocks:BlockManager"
CACHE = "prefix_cache:PrefixCache"
MUTANTS = [
    # A function of the engine, what becomes of one of its decisions, and the test that notices.
    (
        f"{SCHEDULER}.schedule",
        forced("_consecutive_prefills", True),
        "one_prefill_at_most_comes_between_decode_steps_while_rows_run",
    ),
    (
        f"{SCHEDULER}.schedule",
        left_out("decoding"),
        "a_prompt_in_progress_goes_on_when_all_that_decode_were_preempted_for_want_of_blocks",
    ),
    ("running:RunningSet._decode", appended("insort"), "every_live_row_is_in_every_decode_step_in_slot_order"),
    (
        "running:WaitingQueue.insert_in_order",
        appended("insort"),
        "waiting_requests_are_admitted_by_priority_then_arrival",
    ),
    (f"{SCHEDULER}._make_room", called_instead("max", "min"), "the_youngest_of_the_lowest_priority_is_preempted"),
    (f"{SCHEDULER}._make_room", forced("scheduled", False), "a_preempted_sequence_goes_on_where_it_was"),
    (f"{SCHEDULER}._preempt", without("num_computed_tokens"), "a_preempted_sequence_finds_what_is_left_of_it"),
    (f"{BLOCKS}.allocate", without("num_computed_tokens"), "identical_prompts_that_arrive_together_are_computed_once"),
    (
        f"{BLOCKS}.num_spare",
        left_out("blocks"),
        "a_prompt_is_admitted_only_with_a_block_to_spare_for_each_that_may_grow",
    ),
    (f"{SCHEDULER}._candidates", left_out("num_free"), "waiting_requests_are_admitted_by_priority_then_arrival"),
    (
        f"{SCHEDULER}._candidates",
        concatenated("merge"),
        "a_long_prompt_in_progress_does_not_hold_up_one_that_is_served_before_it",
    ),
    (
        f"{SCHEDULER}._candidates",
        skipped_if_short("num_claimed"),
        "the_head_of_the_queue_is_not_overtaken_by_a_smaller_request",
    ),
    (f"{SCHEDULER}._free", forced("_slots_wait", False), "what_a_step_in_flight_may_write_to_is_not_handed_out"),
    (f"{SCHEDULER}._free", forced("_blocks_wait", False), "what_a_step_in_flight_may_write_to_is_not_handed_out"),
    (f"{BLOCKS}._needed", valued("max_tokens_per_row", 1), "a_row_behind_one_that_may_be_the_last_waits"),
    (f"{SCHEDULER}._make_room", forced("max_length", True), "a_row_behind_one_that_may_be_the_last_waits"),
    (f"{SCHEDULER}._make_room", forced("decodes_all_live_rows", False), "a_row_behind_one_that_may_be_the_last_waits"),
    (
        f"{BLOCKS}.return_surplus",
        without("kept"),
        "blocks_are_reserved_for_the_most_a_row_can_take_and_the_surplus_returns",
    ),
    (f"{SCHEDULER}._release", without("pop"), "an_abort_frees_everything_wherever_the_request_stands"),
    (
        f"{BLOCKS}._needed",
        forced("recomputes", True),
        "nobody_is_preempted_where_a_long_sequence_could_not_be_computed_again",
    ),
    (
        f"{SCHEDULER}._prefill_rows",
        forced("max_prefill_rows", False),
        "a_step_prefills_no_more_rows_than_the_backend_can",
    ),
    (
        f"{SCHEDULER}._part",
        left_out("longest_prefill"),
        "no_step_computes_more_of_a_sequence_than_one_shot_allows",
    ),
    (f"{SCHEDULER}._part", forced("min_chunk_tokens", True), "no_part_but_the_last_is_shorter_than_the_minimum"),
    (f"{SCHEDULER}.schedule", forced("max_length", False), "a_foreseen_end_makes_nobody_wait"),
    (f"{SCHEDULER}.apply", without("num_computed_tokens", nth=1), "a_row_behind_one_that_may_be_the_last_waits"),
    (f"{SCHEDULER}.apply", forced("finished", True, nth=0), "a_row_of_a_request_that_has_ended_is_discarded"),
    (
        "sequence:Sequence.accept",
        forced("_min_length", True),
        "a_stop_token_before_min_tokens_does_not_end_the_answer",
    ),
    ("sequence:Sequence.accept", unsliced("STOP"), "an_answer_ends_at_the_first_stop_token_in_a_row_of_several"),
    ("pool:Pool._return", appended("heappush"), "the_lowest_free_slot_is_handed_out"),
    (f"{BLOCKS}.find", valued("_min_fed", 0), "one_token_at_least_is_fed_however_much_is_cached"),
    (f"{BLOCKS}.__init__", forced("mixes_phases", True), "one_token_at_least_is_fed_however_much_is_cached"),
    (f"{BLOCKS}.__init__", left_out("max_prefix_hit"), "a_hit_is_no_longer_than_the_backend_allows"),
    (
        f"{SCHEDULER}.schedule",
        unwrapped("sorted"),
        "all_but_one_token_cached_makes_a_decode_row_in_slot_order",
    ),
    (
        f"{SCHEDULER}.__init__",
        left_out("shares_prefixes"),
        "a_prompt_with_one_token_of_answer_is_cached_too",
    ),
    (f"{BLOCKS}.allocate", without("share"), "identical_prompts_that_arrive_together_are_computed_once"),
    (
        f"{BLOCKS}.find",
        forced("prompt_logprobs", True),
        "a_prompt_whose_logprobs_are_wanted_is_computed_whole_and_cached",
    ),
    (
        f"{SCHEDULER}._candidates",
        forced("num_coming", True),
        "identical_prompts_that_arrive_together_are_computed_once",
    ),
    (f"{BLOCKS}.num_claimed", left_out("num_idle"), "a_block_that_nobody_holds_is_free_until_it_is_shared"),
    (f"{BLOCKS}.remember", left_out("tokens"), "what_was_computed_behind_a_stop_is_not_cached"),
    (
        f"{BLOCKS}.free",
        unwrapped("reversed"),
        "blocks_are_reused_least_recently_used_first_and_the_ends_of_prompts_before_their_beginnings",
    ),
    (
        "prefix_cache:Keys.first",
        left_out("keys", nth=1),
        "an_equal_block_behind_another_beginning_is_not_taken_for_it",
    ),
    ("prefix_cache:Keys.__init__", left_out("cache_salt"), "salts_and_adapters_share_nothing"),
    ("prefix_cache:Keys.__init__", left_out("adapter"), "salts_and_adapters_share_nothing"),
    (
        f"{CACHE}.find",
        left_out("_coming", nth=1),
        "identical_prompts_that_arrive_together_are_computed_once",
    ),
    (f"{CACHE}.find", left_out("order"), "nobody_waits_for_a_prefix_of_one_that_is_served_later"),
    (f"{CACHE}.share", without("_idle"), "blocks_that_somebody_holds_are_not_reused"),
    (
        f"{CACHE}._next",
        without("_forget"),
        "blocks_are_reused_least_recently_used_first_and_the_ends_of_prompts_before_their_beginnings",
    ),
    (
        f"{CACHE}._next",
        flag_flipped("popitem"),
        "blocks_are_reused_least_recently_used_first_and_the_ends_of_prompts_before_their_beginnings",
    ),
    (
        f"{CACHE}._return",
        left_out("_coming"),
        "who_waited_for_a_prefix_computes_it_when_the_other_one_leaves",
    ),
    (
        "bounds:stream_gap_bound",
        left_out("max_consecutive_prefills"),
        "the_bound_on_the_gap_is_reached",
    ),
    ("bounds:stream_gap_bound", forced("mixes_phases", True), "the_bound_on_the_gap_is_reached"),
    ("loop:Engine.add", without("_applied_at"), "the_bound_on_the_gap_is_reached"),
    ("loop:Engine._schedule", not_removed(), "the_time_in_the_queue_comes_with_the_first_tokens"),
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
        for name in ("test_scheduler", "test_engine")
        if (test := getattr(killing_module(name), f"test_{killer}", None))
    )
    killing_test()
    mutate(monkeypatch, f"neuron_runtime.engine.{where}", operator)
    with pytest.raises((AssertionError, IllegalBatch, BackendFailed, RuntimeError, ValueError, KeyError)):
        killing_test()
