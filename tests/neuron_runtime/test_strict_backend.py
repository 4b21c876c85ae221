"""The strict backend: every rule has a naive caller that breaks it and is caught, and silent damage shows in tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from helpers.strict_backend import StrictBackend, neuron_limits, next_token
from neuron_runtime.backend.base import IllegalBatch
from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    Kind,
    Late,
    Rows,
    Sampling,
    StepOutput,
    fill,
)

GREEDY = Sampling(temperature=0.0)
PROMPT = (5, 3, 8)
BLOCKS = BackendLimits(max_rows=4, max_model_length=32, max_step_tokens=16, block_size=4, num_blocks=16)
DEVICE = replace(BLOCKS, steps_in_flight=2, token_feedback="device")
NEURON = neuron_limits(max_rows=2, max_model_length=16)


def added(slot: int, tokens: tuple[int, ...] = PROMPT, blocks: tuple[int, ...] | None = None, **other: Any) -> Added:
    values = {"num_prompt_tokens": len(tokens), "sampling": GREEDY, **other}
    return Added(slot=slot, token_ids=tokens, blocks=(slot,) if blocks is None else blocks, **values)


def prefill(step: int, *new: Added, **other: Any) -> Batch:
    """Whole prompts of new sequences."""
    lengths = tuple(len(a.token_ids) for a in new)
    return Batch(
        step=step,
        kind=Kind.PREFILL,
        rows=Rows(
            slot=tuple(a.slot for a in new),
            start=(0,) * len(new),
            num_tokens=lengths,
            token=tuple(a.token_ids[0] if len(a.token_ids) == 1 else NO_TOKEN for a in new),
            after=(KNOWN,) * len(new),
            samples=(True,) * len(new),
        ),
        added=new,
        **other,
    )


def decode(step: int, *rows: tuple[int, int, int], after: tuple[int, ...] | None = None, **other: Any) -> Batch:
    """One token each of (slot, start, token)."""
    slot, start, token = zip(*rows, strict=True)
    waits = after or (KNOWN,) * len(rows)
    return Batch(step, Kind.DECODE, Rows(slot, start, (1,) * len(rows), token, waits, (True,) * len(rows)), **other)


def join(step: int, new: Added, start: int, **other: Any) -> Batch:
    """The rest of a prompt whose beginning is in the cache."""
    length = len(new.token_ids) - start
    return with_rows(
        prefill(step, new, **other),
        start=(start,),
        num_tokens=(length,),
        token=(new.token_ids[start] if length == 1 else NO_TOKEN,),
    )


def with_rows(batch: Batch, **columns: tuple[Any, ...]) -> Batch:
    return replace(batch, rows=replace(batch.rows, **columns))


def run(backend: StrictBackend, *batches: Batch) -> list[StepOutput]:
    outputs = []
    for batch in batches:
        backend.launch(batch)
        backend.sample(batch.step, None)
        outputs.append(backend.collect(batch.step))
    return outputs


def follow(*tokens: int, count: int = 1) -> tuple[int, ...]:
    """The greedy continuation of `tokens`."""
    context = list(tokens)
    for at in range(count):
        context.append(next_token(context, GREEDY, at, vocabulary_size=101))
    return tuple(context[len(tokens) :])


FIRST, SECOND = follow(*PROMPT, count=2)
OTHER = (9, 2, 4, 7, 1)
(OTHER_FIRST,) = follow(*OTHER)
BOTH = prefill(0, added(0), added(1, OTHER, (1, 2)))
DECODE = decode(1, (0, 3, FIRST))
TOLD = replace(GREEDY, prompt_logprobs=0)
TOP_9 = replace(GREEDY, top_k=9)
TWO_PREFILLS = replace(BLOCKS, max_prefill_rows=2)


SHARES = replace(BLOCKS, shares_prefixes=True, max_prefix_hit=8)
LONG = (*PROMPT, 6, 1, 4, 2, 7, 9, 3, 5, 8, 0)
FULL = prefill(0, added(0, LONG, (0, 1, 2, 3)))


def sharing(tokens: tuple[int, ...] = LONG, blocks: tuple[int, ...] = (0, 1, 4, 5), **other: Any) -> Added:
    return added(1, tokens, blocks, **other)


def naive(rule: str, limits: BackendLimits, *batches: Batch) -> Any:
    return pytest.param(limits, batches, rule, id=rule)


@pytest.mark.parametrize(
    ("limits", "batches", "rule"),
    [
        naive("step 1 is next", BLOCKS, prefill(0, added(0)), prefill(2, added(1))),
        naive("is released but free", BLOCKS, prefill(0, added(0), released=(1,))),
        naive("slots are 0 to 3", BLOCKS, prefill(0, added(4))),
        naive("is added but taken", BLOCKS, prefill(0, added(0)), prefill(1, added(0, blocks=(3,)))),
        naive("the lowest free is 0", replace(BLOCKS, lowest_slot_first=True), prefill(0, added(1))),
        naive("instead of its own line", NEURON, prefill(0, added(0, blocks=(1,)))),
        naive("allowed are 2 to 15", NEURON, prefill(0, added(0, (7,)))),
        naive("allowed are 1 to 31", BLOCKS, prefill(0, added(0, (7,) * 32))),
        naive("of 3 tokens are called the prompt", BLOCKS, prefill(0, added(0, num_prompt_tokens=4))),
        naive("top_k 9 is above 8", replace(BLOCKS, max_top_k=8), prefill(0, added(0, sampling=TOP_9))),
        naive("1 logprobs are above 0", BLOCKS, prefill(0, added(0, sampling=replace(GREEDY, logprobs=1)))),
        naive("of a prompt are wanted, 0 each", BLOCKS, prefill(0, added(0, sampling=TOLD))),
        naive("only logits on the host can serve", NEURON, prefill(0, added(0, sampling=replace(GREEDY, min_p=0.5)))),
        naive("which does not exist", BLOCKS, prefill(0, added(0, blocks=(16,)))),
        naive("which another slot holds", BLOCKS, prefill(0, added(0)), prefill(1, added(1, blocks=(0,)))),
        naive("slot 2 is free", BLOCKS, prefill(0, added(0)), decode(1, (0, 3, FIRST), appended_blocks=((2, 3),))),
        naive("has 1 blocks and keeps 1", BLOCKS, prefill(0, added(0)), replace(DECODE, kept_blocks=((0, 1),))),
        naive("columns of the rows differ", BLOCKS, with_rows(prefill(0, added(0)), token=())),
        naive("a slot has two rows", TWO_PREFILLS, with_rows(prefill(0, added(0), added(1)), slot=(0, 0))),
        naive("slot 3 is free", BLOCKS, prefill(0, added(0)), decode(1, (3, 3, FIRST))),
        naive("a row feeds no token", BLOCKS, with_rows(prefill(0, added(0)), num_tokens=(0,))),
        naive("feeds 20 tokens, the limit is 16", BLOCKS, prefill(0, added(0, (7,) * 20, (0, 1, 2, 3, 4)))),
        naive("the host feeds tokens here", BLOCKS, prefill(0, added(0)), decode(1, (0, 0, NO_TOKEN), after=(0,))),
        naive("no step is in flight", DEVICE, prefill(0, added(0)), decode(1, (0, 0, NO_TOKEN), after=(0,))),
        naive("is called decode and is prefill", BLOCKS, replace(prefill(0, added(0)), kind=Kind.DECODE)),
        naive("is called decode and is prefill", BLOCKS, replace(prefill(0, added(0, (7,))), kind=Kind.DECODE)),
        naive("is called prefill and is decode", BLOCKS, prefill(0, added(0)), replace(DECODE, kind=Kind.PREFILL)),
        naive(
            "prefill and decode rows share a step",
            replace(BLOCKS, mixes_phases=False),
            prefill(0, added(0)),
            Batch(
                1,
                Kind.MIXED,
                Rows((0, 1), (3, 0), (1, 3), (FIRST, NO_TOKEN), (KNOWN, KNOWN), (True, True)),
                added=(added(1),),
            ),
        ),
        naive("prefills 2 rows, the limit is 1", BLOCKS, BOTH),
        naive(
            "not in slot order",
            replace(TWO_PREFILLS, sorts_rows=True),
            BOTH,
            decode(1, (1, 5, OTHER_FIRST), (0, 3, FIRST)),
        ),
        naive(
            "live slots have no row",
            NEURON,
            prefill(0, added(0)),
            prefill(1, added(1, OTHER)),
            decode(2, (0, 3, FIRST)),
        ),
        naive("starts at 2, and 3 tokens are computed", BLOCKS, prefill(0, added(0)), decode(1, (0, 2, PROMPT[2]))),
        naive("feeds tokens up to 4, and 3 are known", BLOCKS, with_rows(prefill(0, added(0)), num_tokens=(4,))),
        naive("which is not the sequence's", BLOCKS, prefill(0, added(0)), decode(1, (0, 3, FIRST + 1))),
        naive("samples False at 3 of 3", BLOCKS, with_rows(prefill(0, added(0)), samples=(False,))),
        naive("samples True at 2 of 3", BLOCKS, with_rows(prefill(0, added(0)), num_tokens=(2,))),
        naive("its blocks hold 4", BLOCKS, prefill(0, added(0, OTHER))),
        naive(
            "the model's length is 5",
            replace(BLOCKS, max_model_length=5, max_tokens_per_row=4, num_lookahead_tokens=3),
            prefill(0, added(0, blocks=(0, 1))),
        ),
        naive("prefills 3 tokens, the limit is 2", replace(BLOCKS, max_one_shot_prefill=2), prefill(0, added(0))),
        naive(
            "only whole prompts can be prefilled",
            NEURON,
            with_rows(prefill(0, added(0)), num_tokens=(2,), samples=(False,)),
        ),
        naive(
            "prefills a part of 2 tokens",
            replace(BLOCKS, min_chunk_tokens=3),
            with_rows(prefill(0, added(0)), num_tokens=(2,), samples=(False,)),
        ),
        naive("starts at 4, and 0 tokens are computed", BLOCKS, FULL, join(1, sharing(blocks=(4, 5, 6, 7)), 4)),
        naive("nothing is left to feed", SHARES, FULL, join(1, sharing(LONG[:8], (0, 1)), 8)),
        naive("shares 12 tokens, the limit is 8", SHARES, FULL, join(1, sharing(blocks=(0, 1, 2, 4)), 12)),
        naive("shares 6 tokens, which ends within a block", SHARES, FULL, join(1, sharing(), 6)),
        naive(
            "the log-probabilities of all of them are wanted",
            replace(SHARES, max_logprobs=1, reports_prompt_logprobs=True),
            FULL,
            join(1, sharing(sampling=replace(GREEDY, prompt_logprobs=1)), 8),
        ),
        naive("do not hold them", SHARES, FULL, join(1, sharing((*LONG[:7], 0, *LONG[8:])), 8)),
        naive("do not hold them", SHARES, FULL, join(1, sharing(blocks=(0, 6, 4, 5)), 8)),
        naive("do not hold them", SHARES, FULL, join(1, sharing((*LONG[4:8], *LONG[8:]), (1, 4, 5)), 4)),
        naive("do not hold them", SHARES, FULL, join(1, sharing(adapter=1), 8)),
        naive("block 2, which another slot holds", SHARES, FULL, join(1, sharing(blocks=(0, 1, 2, 4)), 8)),
    ],
)  # fmt: skip
def test_a_naive_caller_is_refused(limits: BackendLimits, batches: tuple[Batch, ...], rule: str) -> None:
    backend = StrictBackend(limits)
    run(backend, *batches[:-1])
    with pytest.raises(IllegalBatch, match=rule):
        run(backend, batches[-1])


def in_flight(limits: BackendLimits, *batches: Batch) -> StrictBackend:
    """All batches but the last are collected."""
    backend = StrictBackend(limits)
    run(backend, *batches[:-1])
    backend.launch(batches[-1])
    backend.sample(batches[-1].step, None)
    return backend


REUSED_SLOT = prefill(1, added(0, blocks=(5,)), released=(0,))
REUSED_BLOCK = prefill(1, added(1, blocks=(0,)), released=(0,))
NEXT = decode(1, (0, 0, NO_TOKEN), after=(0,))


@pytest.mark.parametrize(
    ("rule", "limits", "offend"),
    [
        ("the limit is 1", BLOCKS, lambda b: b.launch(prefill(1, added(1)))),
        ("the limit is 2", DEVICE, lambda b: (b.launch(NEXT), b.sample(1, None), b.launch(prefill(2, added(1))))),
        ("was not sampled", DEVICE, lambda b: (b.collect(0), b.launch(DECODE), b.launch(prefill(2, added(1))))),
        ("sampled twice", DEVICE, lambda b: b.sample(0, None)),
        ("was not launched last", DEVICE, lambda b: (b.launch(NEXT), b.sample(0, None))),
        ("must name each of the 1 rows", DEVICE, lambda b: (b.launch(NEXT), b.sample(1, Late(())))),
        ("not the oldest", DEVICE, lambda b: (b.launch(NEXT), b.sample(1, None), b.collect(1))),
        ("before it was sampled", DEVICE, lambda b: (b.launch(NEXT), b.collect(0), b.collect(1))),
        ("does not wait for it", DEVICE, lambda b: b.launch(decode(1, (0, 3, FIRST)))),
        ("which is another's", DEVICE, lambda b: b.launch(with_rows(NEXT, after=(1,)))),
        ("the step in flight has a row in it", DEVICE, lambda b: b.launch(REUSED_SLOT)),
        ("to which the step in flight still writes", DEVICE, lambda b: b.launch(REUSED_BLOCK)),
        (
            "shares block 0, to which the step in flight still writes",
            replace(DEVICE, shares_prefixes=True),
            lambda b: b.launch(join(1, added(1, (*PROMPT, 6, 1), (0, 1)), 4)),
        ),
    ],
)  # fmt: skip
def test_a_caller_careless_of_the_step_in_flight_is_refused(
    rule: str, limits: BackendLimits, offend: Callable[[StrictBackend], object]
) -> None:
    with pytest.raises(IllegalBatch, match=rule):
        offend(in_flight(limits, prefill(0, added(0))))


# Silent damage: the same broken batches, run without being refused, give wrong tokens.


def test_legal_batches_give_the_tokens_of_the_definition() -> None:
    for limits in (TWO_PREFILLS, replace(TWO_PREFILLS, steps_in_flight=2, token_feedback="device")):
        outputs = run(StrictBackend(limits), BOTH, decode(1, (0, 3, FIRST), (1, 5, OTHER_FIRST)))
        assert [output.token_ids for output in outputs] == [
            ((FIRST,), (OTHER_FIRST,)),
            ((SECOND,), follow(*OTHER, OTHER_FIRST)),
        ]


def contiguous(*batches: Batch) -> list[StepOutput]:
    backend = StrictBackend(NEURON, refuses=False)
    return run(backend, prefill(0, added(0)), prefill(1, added(1, OTHER)), *batches)


def test_a_live_line_left_out_of_a_decode_step_is_overwritten() -> None:
    damaged = contiguous(decode(2, (0, 3, FIRST)), decode(3, (0, 4, SECOND), (1, 5, OTHER_FIRST)))
    assert damaged[2].token_ids == ((SECOND,),)
    assert damaged[3].token_ids[1] != follow(*OTHER, OTHER_FIRST)


def test_rows_out_of_line_order_are_mixed_up() -> None:
    (output,) = contiguous(decode(2, (1, 5, OTHER_FIRST), (0, 3, FIRST)))[2:]
    assert output.token_ids[0] != follow(*OTHER, OTHER_FIRST)
    assert output.token_ids[1] != (SECOND,)


def test_a_prompt_of_one_token_finds_its_last_token_in_the_padding() -> None:
    (output,) = run(StrictBackend(NEURON, refuses=False), prefill(0, added(0, (7,))))
    assert output.token_ids[0] != follow(7)


def test_a_block_handed_out_while_the_step_in_flight_writes_to_it_loses_what_the_new_owner_wrote() -> None:
    backend = StrictBackend(DEVICE, refuses=False)
    backend.launch(prefill(0, added(0)))
    backend.sample(0, None)
    backend.launch(prefill(1, added(1, OTHER, (0, 1)), released=(0,)))
    backend.sample(1, None)
    backend.collect(0)
    backend.collect(1)
    (output,) = run(backend, decode(2, (1, 5, OTHER_FIRST)))
    assert output.token_ids[0] != follow(*OTHER, OTHER_FIRST)


def test_a_prefix_that_is_shared_gives_the_tokens_of_the_definition() -> None:
    for start in (4, 8):
        blocks = (0, 1, 4, 5) if start == 8 else (0, 4, 5, 6)
        output = run(StrictBackend(SHARES), FULL, join(1, sharing(blocks=blocks), start))[1]
        assert output.token_ids == (follow(*LONG),)


def test_an_equal_block_computed_behind_other_tokens_is_not_what_it_seems() -> None:
    shifted = (*LONG[4:8], 1, 2)
    output = run(StrictBackend(SHARES, refuses=False), FULL, join(1, sharing(shifted, (1, 4)), 4))[1]
    assert output.token_ids != (follow(*shifted),)


def test_whoever_computes_into_a_shared_block_spoils_it_for_the_others() -> None:
    backend = StrictBackend(SHARES, refuses=False)
    other = (4, 4, *LONG[2:])
    (first, _) = run(backend, FULL, prefill(1, sharing(other)))
    (token,) = first.token_ids[0]
    (output,) = run(backend, decode(2, (0, 13, token)))
    assert output.token_ids != (follow(*LONG, token),)


def test_logprobs_of_a_prompt_come_with_the_rows_that_compute_it() -> None:
    sampling = replace(GREEDY, prompt_logprobs=2)
    backend = StrictBackend(replace(BLOCKS, max_logprobs=2, reports_prompt_logprobs=True))
    new = added(0, LONG, (0, 1, 2, 3), sampling=sampling)
    part = with_rows(prefill(0, new), num_tokens=(5,), samples=(False,))
    rest = with_rows(replace(prefill(1, new), added=()), start=(5,), num_tokens=(8,))
    (first,) = follow(*LONG)
    outputs = run(backend, part, rest, decode(2, (0, 13, first)))
    told = [[entry.token_id for row in output.prompt_logprobs for entry in row] for output in outputs]
    assert told == [list(LONG[1:6]), list(LONG[6:]), []]
    assert all(len(entry.top) == 2 for output in outputs for row in output.prompt_logprobs for entry in row)


def test_a_row_that_writes_past_its_blocks_hits_another_sequence() -> None:
    backend = StrictBackend(BLOCKS, refuses=False)
    run(backend, prefill(0, added(0)), prefill(1, added(1, (9, 2, 4, 7), (1,))))
    (first,) = follow(9, 2, 4, 7)
    outputs = run(backend, decode(2, (1, 4, first)), decode(3, (0, 3, FIRST)))
    assert outputs[1].token_ids[0] != (SECOND,)


# What legal settings beyond the plain ones do.


def test_several_tokens_per_row_are_those_of_one_token_per_row() -> None:
    limits = replace(BLOCKS, max_tokens_per_row=4, num_lookahead_tokens=3)
    backend = StrictBackend(limits)
    tokens = list(run(backend, prefill(0, added(0, blocks=(0, 1, 2, 3, 4))))[0].token_ids[0])
    counts = set()
    while len(tokens) < 12:
        (output,) = run(backend, decode(backend._num_launched, (0, 3 + len(tokens) - 1, tokens[-1])))
        counts.add(len(output.token_ids[0]))
        tokens += output.token_ids[0]
    assert tuple(tokens) == follow(*PROMPT, count=len(tokens))
    assert len(counts) > 1
    assert max(counts) <= 4


def test_late_ids_narrow_the_choice_of_their_row() -> None:
    backend = StrictBackend(TWO_PREFILLS)
    backend.launch(BOTH)
    backend.sample(0, Late(((77,), None)))
    assert backend.collect(0).token_ids == ((77,), (OTHER_FIRST,))


def test_random_numbers_depend_on_seed_choice_and_output_position_alone() -> None:
    def draw(seed: int, choice: int, position: int, temperature: float = 1.0) -> int:
        sampling = Sampling(seed=seed, choice=choice, temperature=temperature)
        return next_token(PROMPT, sampling, position, vocabulary_size=10**6)

    assert draw(1, 0, 0) == draw(1, 0, 0)
    assert len({draw(1, 0, 0), draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1)}) == 4
    assert draw(1, 0, 0, temperature=0.0) == draw(2, 1, 5, temperature=0.0)


def test_a_batch_filled_by_the_host_is_the_batch_the_device_resolves() -> None:
    first = prefill(0, added(0))
    (output,) = run(StrictBackend(BLOCKS), first)
    assert fill(NEXT, output, first) == decode(1, (0, 3, FIRST))
