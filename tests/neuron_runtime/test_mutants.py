"""One-line mutants of scheduling, each killed by a named test: those tests can fail, and fail for this reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from neuron_runtime.backend.base import IllegalBatch
from neuron_runtime.engine import blocks, loop, scheduler, sequence
from neuron_runtime.errors import BackendFailed

MUTANTS = [
    # One line of a module, what becomes of it, and the test in test_scheduler.py that notices.
    (
        scheduler,
        "may_prefill = not decoding or self._consecutive_prefills < self._max_consecutive_prefills",
        "may_prefill = True",
        "one_prefill_at_most_comes_between_decode_steps_while_rows_run",
    ),
    (
        scheduler,
        "for s in sorted((s for s, _ in missing), key=_slot)]",
        "for s, _ in missing]",
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
        "victim.leaving, victim.computed = False, 0",
        "victim.leaving = False",
        "a_preempted_sequence_goes_on_where_it_was",
    ),
    (
        scheduler,
        "self._num_blocks(head) + growing <= self.blocks.num_free",
        "self._num_blocks(head) <= self.blocks.num_free",
        "a_prompt_is_admitted_only_with_a_block_to_spare_for_each_that_may_grow",
    ),
    (
        scheduler,
        "if not self.waiting or not self.slots.num_free:",
        "if not self.waiting:",
        "waiting_requests_are_admitted_by_priority_then_arrival",
    ),
    (
        scheduler,
        "        insort(self.waiting, sequence, key=_order)",
        "        self.waiting.append(sequence)",
        "waiting_requests_are_admitted_by_priority_then_arrival",
    ),
    (
        scheduler,
        "head = self.waiting[0]",
        "head = min(self.waiting, key=lambda s: len(s.tokens))",
        "the_head_of_the_queue_is_not_overtaken_by_a_smaller_request",
    ),
    (
        scheduler,
        "if sequence.slot >= 0 and (sequence.row is None or self.limits.steps_in_flight == 1):",
        "if sequence.slot >= 0:",
        "what_a_step_in_flight_may_write_to_is_not_handed_out",
    ),
    (
        scheduler,
        "most if s.samples else 0)",
        "1 if s.samples else 0)",
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
        "if self.limits.decodes_all_live_rows and len(ready) < len(decoding):",
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
        "while len(rows) < self.limits.max_prefill_rows:",
        "while len(rows) < self.limits.max_rows:",
        "a_step_prefills_no_more_rows_than_the_backend_can",
    ),
    (
        scheduler,
        "part = min(sequence.todo, budget, self.limits.longest_prefill)",
        "part = min(sequence.todo, budget)",
        "no_step_computes_more_of_a_sequence_than_one_shot_allows",
    ),
    (
        scheduler,
        "return part if whole or (self.limits.chunks_prefill and part >= self.limits.min_chunk_tokens) else 0",
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
        "sequence.computed += batch.rows.num_tokens[i] + max(len(sampled) - 1, 0)",
        "sequence.computed += batch.rows.num_tokens[i]",
        "a_row_behind_one_that_may_be_the_last_waits",
    ),
    (
        scheduler,
        "            if sampled and not sequence.done:",
        "            if sampled:",
        "a_row_of_a_request_that_has_ended_is_discarded",
    ),
    (
        sequence,
        "num_before >= sampling.min_tokens:",
        "num_before > sampling.min_tokens:",
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
]


def load_cases() -> ModuleType:
    """The tests of the scheduler as a module of its own."""
    path = Path(__file__).with_name("test_scheduler.py")
    spec = importlib.util.spec_from_file_location("scheduler_cases", path)
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
    killing_test = getattr(load_cases(), f"test_{killer}")
    killing_test()
    mutant = mutate(module, line, replacement)
    if module is scheduler:
        monkeypatch.setattr(loop, "Scheduler", mutant.Scheduler)
    elif module is sequence:
        monkeypatch.setattr(scheduler, "Sequence", mutant.Sequence)
    else:
        monkeypatch.setattr(scheduler, "Pool", mutant.Pool)
    with pytest.raises((AssertionError, IllegalBatch, BackendFailed, RuntimeError, ValueError, KeyError)):
        killing_test()
