"""One-line mutants of scheduling, each killed by a named test: those tests can fail, and fail for this reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from neuron_runtime.backend.base import IllegalBatch
from neuron_runtime.engine import admission, blocks, loop, prefix_cache, scheduler, sequence
from neuron_runtime.errors import BackendFailed

MUTANTS = [
    # One line of a module, what becomes of it, and the test in test_scheduler.py or test_engine.py that notices.
    (
        scheduler,
        "self._consecutive_prefills < self._max_consecutive_prefills",
        "True",
        "one_prefill_at_most_comes_between_decode_steps_while_rows_run",
    ),
    (
        scheduler,
        "if limits.mixes_phases or not self.decoding:",
        "if limits.mixes_phases:",
        "a_prompt_in_progress_goes_on_when_all_that_decode_were_preempted_for_want_of_blocks",
    ),
    (
        scheduler,
        "insort(self.decoding, sequence, key=_slot)",
        "self.decoding.append(sequence)",
        "every_live_row_is_in_every_decode_step_in_slot_order",
    ),
    (
        scheduler,
        "self._preempt(max(self.running, key=_order))",
        "self._preempt(min(self.running, key=_order))",
        "the_youngest_of_the_lowest_priority_is_preempted",
    ),
    (
        scheduler,
        "            if self.planned:",
        "            if False:",
        "a_preempted_sequence_goes_on_where_it_was",
    ),
    (
        scheduler,
        "        sequence.computed = sequence.fed = len(cached) * self.limits.block_size",
        "        pass",
        "a_preempted_sequence_goes_on_where_it_was",
    ),
    (
        scheduler,
        "spare = self.blocks.num_free - sum(len(s.blocks) < self._max_blocks(s) for s in self.running)",
        "spare = self.blocks.num_free",
        "a_prompt_is_admitted_only_with_a_block_to_spare_for_each_that_may_grow",
    ),
    (
        scheduler,
        "self.waiting[: self.slots.num_free]",
        "self.waiting[:]",
        "waiting_requests_are_admitted_by_priority_then_arrival",
    ),
    (
        scheduler,
        "merge(self.starting[:], waiting, key=_order)",
        "[*self.starting, *waiting]",
        "a_long_prompt_in_progress_does_not_hold_up_one_that_is_served_before_it",
    ),
    (
        scheduler,
        "insort(self.waiting, sequence, key=_order)",
        "self.waiting.append(sequence)",
        "waiting_requests_are_admitted_by_priority_then_arrival",
    ),
    (
        scheduler,
        "            if spare < 0:\n                continue",
        "            spare = max(spare, self.blocks.num_free - 1)",
        "the_head_of_the_queue_is_not_overtaken_by_a_smaller_request",
    ),
    (
        scheduler,
        "if sequence.slot >= 0 and not (in_flight and self._slots_wait):",
        "if sequence.slot >= 0:",
        "what_a_step_in_flight_may_write_to_is_not_handed_out",
    ),
    (
        scheduler,
        "if not (in_flight and self._blocks_wait):",
        "if True:",
        "what_a_step_in_flight_may_write_to_is_not_handed_out",
    ),
    (
        scheduler,
        "if len(s.tokens) + (most if s.samples else 0) > s.capacity]",
        "if len(s.tokens) + (1 if s.samples else 0) > s.capacity]",
        "a_row_behind_one_that_may_be_the_last_waits",
    ),
    (
        scheduler,
        "if not (s.samples and len(s.tokens) + most >= s.max_length)]",
        "]",
        "a_row_behind_one_that_may_be_the_last_waits",
    ),
    (
        scheduler,
        "if self.limits.decodes_all_live_rows and len(ready) < len(self.decoding):",
        "if False:",
        "a_row_behind_one_that_may_be_the_last_waits",
    ),
    (
        scheduler,
        "            self._kept[sequence.slot] = keep",
        "            pass",
        "blocks_are_reserved_for_the_most_a_row_can_take_and_the_surplus_returns",
    ),
    (
        scheduler,
        "        self._kept.pop(sequence.slot, None)",
        "        pass",
        "an_abort_frees_everything_wherever_the_request_stands",
    ),
    (
        scheduler,
        "        if not self._recomputes:",
        "        if False:",
        "nobody_is_preempted_where_a_long_sequence_could_not_be_computed_again",
    ),
    (
        scheduler,
        "if not budget or len(rows) == self.limits.max_prefill_rows:",
        "if not budget:",
        "a_step_prefills_no_more_rows_than_the_backend_can",
    ),
    (
        scheduler,
        "part = min(todo, budget, self.limits.longest_prefill)",
        "part = min(todo, budget)",
        "no_step_computes_more_of_a_sequence_than_one_shot_allows",
    ),
    (
        scheduler,
        "return part if part == todo or (self.limits.chunks_prefill and part >= self.limits.min_chunk_tokens) else 0",
        "return part",
        "no_part_but_the_last_is_shorter_than_the_minimum",
    ),
    (
        scheduler,
        "if s.samples and len(s.tokens) + 1 >= s.max_length]:",
        "if False]:",
        "a_foreseen_end_makes_nobody_wait",
    ),
    (
        scheduler,
        "                sequence.computed += len(sampled) - 1",
        "                pass",
        "a_row_behind_one_that_may_be_the_last_waits",
    ),
    (
        scheduler,
        "            if not sequence.done:",
        "            if True:",
        "a_row_of_a_request_that_has_ended_is_discarded",
    ),
    (
        sequence,
        "len(tokens) > self._min_length:",
        "len(tokens) > self._min_length + 1:",
        "a_stop_token_before_min_tokens_does_not_end_the_answer",
    ),
    (
        sequence,
        "return token_ids[:count], FinishReason.STOP",
        "return token_ids, FinishReason.STOP",
        "an_answer_ends_at_the_first_stop_token_in_a_row_of_several",
    ),
    (
        blocks,
        "heapq.heappush(self._free, number)",
        "self._free.append(number)",
        "the_lowest_free_slot_is_handed_out",
    ),
    (
        scheduler,
        "self._min_fed = 1 if limits.mixes_phases else 2",
        "self._min_fed = 0",
        "one_token_at_least_is_fed_however_much_is_cached",
    ),
    (
        scheduler,
        "self._min_fed = 1 if limits.mixes_phases else 2",
        "self._min_fed = 1",
        "one_token_at_least_is_fed_however_much_is_cached",
    ),
    (
        scheduler,
        "(limits.max_prefix_hit or limits.max_model_length)",
        "limits.max_model_length",
        "a_hit_is_no_longer_than_the_backend_allows",
    ),
    (
        scheduler,
        "decoders = sorted(decoders + cached, key=_slot)",
        "decoders = decoders + cached",
        "all_but_one_token_cached_makes_a_decode_row_in_slot_order",
    ),
    (
        scheduler,
        "self._blocks_wait = self._slots_wait or self._max_hit > 0",
        "self._blocks_wait = self._slots_wait",
        "a_prompt_with_one_token_of_answer_is_cached_too",
    ),
    (
        scheduler,
        "        self.blocks.share(cached)",
        "        pass",
        "identical_prompts_that_arrive_together_are_computed_once",
    ),
    (
        scheduler,
        "if not sequence.reads_cache:",
        "if False:",
        "a_prompt_whose_logprobs_are_wanted_is_computed_whole_and_cached",
    ),
    (
        scheduler,
        "if spare >= 0 and not prefix.num_coming:",
        "if spare >= 0:",
        "identical_prompts_that_arrive_together_are_computed_once",
    ),
    (
        scheduler,
        "spare -= num_blocks - known + prefix.num_idle + (num_blocks < self._max_blocks(sequence))",
        "spare -= num_blocks - known + (num_blocks < self._max_blocks(sequence))",
        "a_block_that_nobody_holds_is_free_until_it_is_shared",
    ),
    (
        scheduler,
        "last = min(sequence.computed, len(sequence.tokens)) // size",
        "last = sequence.computed // size",
        "what_was_computed_behind_a_stop_is_not_cached",
    ),
    (
        scheduler,
        "self.blocks.give_back(reversed(sequence.blocks))",
        "self.blocks.give_back(sequence.blocks)",
        "blocks_are_reused_least_recently_used_first_and_the_ends_of_prompts_before_their_beginnings",
    ),
    (
        prefix_cache,
        "hashlib.sha256(keys[-1] + tokens)",
        "hashlib.sha256(tokens)",
        "an_equal_block_behind_another_beginning_is_not_taken_for_it",
    ),
    (
        prefix_cache,
        'f"{adapter} {cache_salt}"',
        'f"{adapter}"',
        "salts_and_adapters_share_nothing",
    ),
    (
        prefix_cache,
        'f"{adapter} {cache_salt}"',
        'f"{cache_salt}"',
        "salts_and_adapters_share_nothing",
    ),
    (
        prefix_cache,
        "if num_coming or block in self._coming:",
        "if num_coming:",
        "identical_prompts_that_arrive_together_are_computed_once",
    ),
    (
        prefix_cache,
        "if block is None or self._coming.get(block, order) > order:",
        "if block is None:",
        "nobody_waits_for_a_prefix_of_one_that_is_served_later",
    ),
    (
        prefix_cache,
        "                del self._idle[number]\n",
        "",
        "blocks_that_somebody_holds_are_not_reused",
    ),
    (
        prefix_cache,
        "        self._forget(block)\n        return block",
        "        return block",
        "blocks_are_reused_least_recently_used_first_and_the_ends_of_prompts_before_their_beginnings",
    ),
    (
        prefix_cache,
        "self._idle.popitem(last=False)",
        "self._idle.popitem(last=True)",
        "blocks_are_reused_least_recently_used_first_and_the_ends_of_prompts_before_their_beginnings",
    ),
    (
        prefix_cache,
        "if number in self._key_of and number not in self._coming:",
        "if number in self._key_of:",
        "who_waited_for_a_prefix_computes_it_when_the_other_one_leaves",
    ),
    (
        admission,
        "own + max_consecutive_prefills * prefill",
        "own + prefill",
        "the_bound_on_the_gap_is_reached",
    ),
    (
        admission,
        "turn = own if limits.mixes_phases else own",
        "turn = own",
        "the_bound_on_the_gap_is_reached",
    ),
    (
        loop,
        "        if not self.has_work:\n            self._applied_at = None",
        "        if not self.has_work:\n            pass",
        "the_bound_on_the_gap_is_reached",
    ),
    (
        loop,
        "self._queue_seconds[name] = now - self._added_at.pop(name)",
        "self._queue_seconds[name] = now - self._added_at[name]",
        "the_time_in_the_queue_comes_with_the_first_tokens",
    ),
]


USED: dict[ModuleType, list[tuple[ModuleType | None, str]]] = {
    scheduler: [(loop, "Scheduler")],
    sequence: [(scheduler, "Sequence")],
    blocks: [(scheduler, "Pool")],
    prefix_cache: [(scheduler, "PrefixCache"), (sequence, "Keys")],
    admission: [(loop, "stream_gap_bound")],
    loop: [(None, "Engine")],
}
"""Who uses what of a module; None: the tests themselves."""


def load_cases(killer: str) -> ModuleType:
    """The tests that this one stands among, as a module of its own."""
    folder = Path(__file__).parent
    (path,) = [
        folder / name for name in ("test_scheduler.py", "test_engine.py") if killer in (folder / name).read_text()
    ]
    spec = importlib.util.spec_from_file_location("cases", path)
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    return cases


def mutate(module: ModuleType, line: str, replacement: str) -> ModuleType:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(line) == 1, f"{line!r} stands {source.count(line)} times in {module.__name__}"
    mutant = ModuleType(module.__name__)
    mutant.__dict__["__file__"] = module.__file__
    exec(compile(source.replace(line, replacement), module.__file__, "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize(
    ("module", "line", "replacement", "killer"),
    MUTANTS,
    ids=[f"{number}-{killer}" for number, (*_, killer) in enumerate(MUTANTS)],
)
def test_a_mutant_is_killed_by_its_test(
    module: ModuleType, line: str, replacement: str, killer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = load_cases(f"def test_{killer}(")
    killing_test = getattr(cases, f"test_{killer}")
    killing_test()
    mutant = mutate(module, line, replacement)
    for place, name in USED[module]:
        monkeypatch.setattr(place or cases, name, getattr(mutant, name))
    with pytest.raises((AssertionError, IllegalBatch, BackendFailed, RuntimeError, ValueError, KeyError)):
        killing_test()
