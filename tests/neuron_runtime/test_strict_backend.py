"""The strict backend: each rule refuses a batch that breaks it, and legal batches give the defined tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from helpers.guides import FORM, mask_of
from helpers.strict_backend import StrictBackend, neuron_limits, next_token, num_kept
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.core import (
    KNOWN,
    NO_TOKEN,
    Added,
    BackendLimits,
    Batch,
    Late,
    PrefillBucket,
    Rows,
    Sampling,
    StepOutput,
    fill,
)

GREEDY = Sampling(temperature=0.0)
PROMPT = (5, 3, 8)
BLOCKS = BackendLimits(max_rows=4, max_model_length=32, max_step_tokens=16, block_size=4, num_blocks=16)
DRAFTS = replace(BLOCKS, max_drafts=3)
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
        num_prefills=len(new),
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
    return Batch(step, Rows(slot, start, (1,) * len(rows), token, waits, (True,) * len(rows)), **other)


def with_drafts(step: int, row: tuple[int, int, int], drafts: tuple[int, ...], **other: Any) -> Batch:
    return with_rows(decode(step, row, **other), num_tokens=(1 + len(drafts),), drafts=(drafts,))


def join(step: int, new: Added, start: int, **other: Any) -> Batch:
    """The rest of a prompt whose prefix is cached."""
    length = len(new.token_ids) - start
    return with_rows(
        prefill(step, new, **other),
        start=(start,),
        num_tokens=(length,),
        token=(new.token_ids[start] if length == 1 else NO_TOKEN,),
    )


def with_rows(batch: Batch, **columns: tuple[Any, ...]) -> Batch:
    return changed(batch, rows=changed(batch.rows, **columns))


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
GUESSED = (0, 3, FIRST)
DECODE = decode(1, GUESSED)
TWO_BLOCKS = prefill(0, added(0, blocks=(0, 1)))
PROMPT_LOGPROBS = replace(GREEDY, prompt_logprobs=0)
TOP_9 = Sampling(top_k=9)
TWO_PREFILLS = replace(BLOCKS, max_prefill_rows=2)


SHARES = replace(BLOCKS, shares_prefixes=True, chunks_prefill=False, max_prefill_start=8)
LONG = (*PROMPT, 6, 1, 4, 2, 7, 9, 3, 5, 8, 0)
FULL = prefill(0, added(0, LONG, (0, 1, 2, 3)))


def sharing(tokens: tuple[int, ...] = LONG, blocks: tuple[int, ...] = (0, 1, 4, 5), **other: Any) -> Added:
    return added(1, tokens, blocks, **other)


def buckets(*sizes: tuple[int, int]) -> BackendLimits:
    return replace(BLOCKS, prefill_buckets=tuple(PrefillBucket(*size) for size in sizes))


def illegal(rule: str, limits: BackendLimits, *batches: Batch) -> Any:
    return pytest.param(limits, batches, rule, id=rule)


@pytest.mark.parametrize(
    ("limits", "batches", "rule"),
    [
        illegal("step 1 is next", BLOCKS, prefill(0, added(0)), prefill(2, added(1))),
        illegal("is released but free", BLOCKS, prefill(0, added(0), released=(1,))),
        illegal("slots are 0 to 3", BLOCKS, prefill(0, added(4))),
        illegal("is added but taken", BLOCKS, prefill(0, added(0)), prefill(1, added(0, blocks=(3,)))),
        illegal("the lowest free is 0", replace(BLOCKS, lowest_slot_first=True), prefill(0, added(1))),
        illegal("instead of its own line", NEURON, prefill(0, added(0, blocks=(1,)))),
        illegal("allowed are 2 to 15", NEURON, prefill(0, added(0, (7,)))),
        illegal("allowed are 1 to 31", BLOCKS, prefill(0, added(0, (7,) * 32))),
        illegal("of 3 tokens are called the prompt", BLOCKS, prefill(0, added(0, num_prompt_tokens=4))),
        illegal("only logits on the host", replace(NEURON, max_top_k=8), prefill(0, added(0, sampling=TOP_9))),
        illegal("only logits on the host", NEURON, prefill(0, added(0, sampling=replace(GREEDY, seeded=True)))),
        illegal("1 logprobs are above 0", BLOCKS, prefill(0, added(0, sampling=replace(GREEDY, logprobs=1)))),
        illegal("0 prompt logprobs are not supported", BLOCKS, prefill(0, added(0, sampling=PROMPT_LOGPROBS))),
        illegal("only logits on the host can serve", NEURON, prefill(0, added(0, sampling=replace(GREEDY, min_p=0.5)))),
        illegal("which does not exist", BLOCKS, prefill(0, added(0, blocks=(16,)))),
        illegal("which another slot holds", BLOCKS, prefill(0, added(0)), prefill(1, added(1, blocks=(0,)))),
        illegal("slot 2 is free", BLOCKS, prefill(0, added(0)), decode(1, (0, 3, FIRST), appended_blocks=((2, 3),))),
        illegal("columns of the rows differ", BLOCKS, with_rows(prefill(0, added(0)), token=())),
        illegal("a slot has two rows", TWO_PREFILLS, with_rows(prefill(0, added(0), added(1)), slot=(0, 0))),
        illegal("slot 3 is free", BLOCKS, prefill(0, added(0)), decode(1, (3, 3, FIRST))),
        illegal("has 4 drafts, the limit is 3", DRAFTS, TWO_BLOCKS, with_drafts(1, GUESSED, (0,) * 4)),
        illegal("has 1 drafts, the limit is 0", BLOCKS, TWO_BLOCKS, with_drafts(1, GUESSED, (0,))),
        illegal(r"has the drafts \(101,\)", DRAFTS, TWO_BLOCKS, with_drafts(1, GUESSED, (101,))),
        illegal(r"has the drafts \(-1, 3\)", DRAFTS, TWO_BLOCKS, with_drafts(1, GUESSED, (NO_TOKEN, 3))),
        illegal("prefills and has drafts", DRAFTS, with_rows(prefill(0, added(0)), drafts=((0,),))),
        illegal("feeds 1 tokens and has 1 drafts", DRAFTS, TWO_BLOCKS, with_rows(DECODE, drafts=((0,),))),
        illegal("none has one", DRAFTS, TWO_BLOCKS, with_rows(DECODE, drafts=((),))),
        illegal("its blocks hold 4", DRAFTS, prefill(0, added(0)), with_drafts(1, GUESSED, (0,))),
        illegal("a row feeds no token", BLOCKS, with_rows(prefill(0, added(0)), num_tokens=(0,))),
        illegal("a row prefills 20 tokens, the limit is 16", BLOCKS, prefill(0, added(0, (7,) * 20, (0, 1, 2, 3, 4)))),
        illegal("a row prefills 3 tokens, the limit is 2", buckets((2, 2)), prefill(0, added(0))),
        illegal(
            "computes 24 tokens, the limit is 16",
            replace(buckets((8, 12)), max_prefill_rows=2),
            prefill(0, added(0), added(1, OTHER, (1, 2))),
        ),
        illegal(
            "prefills a part of 1 tokens, which is not a bucket",
            buckets((2, 2), (4, 4)),
            with_rows(prefill(0, added(0)), num_tokens=(1,), samples=(False,)),
        ),
        illegal(
            "slot 0 prefills from 4, the limit is 2",
            replace(buckets((2, 2), (4, 4)), max_prefill_start=2),
            with_rows(prefill(0, added(0, LONG, (0, 1, 2, 3))), num_tokens=(4,), samples=(False,)),
            Batch(1, Rows((0,), (4,), (4,), (NO_TOKEN,), (KNOWN,), (False,)), 1),
        ),
        illegal("the host feeds tokens here", BLOCKS, prefill(0, added(0)), decode(1, (0, 0, NO_TOKEN), after=(0,))),
        illegal("no step is in flight", DEVICE, prefill(0, added(0)), decode(1, (0, 0, NO_TOKEN), after=(0,))),
        illegal(r"last 0 rows prefill rows: \[True\]", BLOCKS, changed(prefill(0, added(0)), num_prefills=0)),
        illegal(r"last 0 rows prefill rows: \[True\]", BLOCKS, changed(prefill(0, added(0, (7,))), num_prefills=0)),
        illegal(r"last 1 rows prefill rows: \[False\]", BLOCKS, prefill(0, added(0)), changed(DECODE, num_prefills=1)),
        illegal(
            "prefill and decode rows share a step",
            replace(BLOCKS, mixes_phases=False),
            prefill(0, added(0)),
            Batch(
                1,
                Rows((0, 1), (3, 0), (1, 3), (FIRST, NO_TOKEN), (KNOWN, KNOWN), (True, True)),
                num_prefills=1,
                added=(added(1),),
            ),
        ),
        illegal("prefills 2 rows, the limit is 1", BLOCKS, BOTH),
        illegal(
            "not in slot order",
            replace(TWO_PREFILLS, sorts_rows=True),
            BOTH,
            decode(1, (1, 5, OTHER_FIRST), (0, 3, FIRST)),
        ),
        illegal(
            "live slots have no row",
            NEURON,
            prefill(0, added(0)),
            prefill(1, added(1, OTHER)),
            decode(2, (0, 3, FIRST)),
        ),
        illegal("starts at 2, and 3 tokens are computed", BLOCKS, prefill(0, added(0)), decode(1, (0, 2, PROMPT[2]))),
        illegal("feeds tokens up to 4, and 3 are known", BLOCKS, with_rows(prefill(0, added(0)), num_tokens=(4,))),
        illegal("which is not the sequence's", BLOCKS, prefill(0, added(0)), decode(1, (0, 3, FIRST + 1))),
        illegal("samples False at 3 of 3", BLOCKS, with_rows(prefill(0, added(0)), samples=(False,))),
        illegal("samples True at 2 of 3", BLOCKS, with_rows(prefill(0, added(0)), num_tokens=(2,))),
        illegal("its blocks hold 4", BLOCKS, prefill(0, added(0, OTHER))),
        illegal(
            "the model's length is 5",
            replace(BLOCKS, max_model_length=5, num_lookahead_tokens=3),
            prefill(0, added(0, blocks=(0, 1))),
        ),
        illegal(
            "only whole prompts can be prefilled",
            NEURON,
            with_rows(prefill(0, added(0)), num_tokens=(2,), samples=(False,)),
        ),
        illegal(
            "prefills a part of 2 tokens",
            replace(BLOCKS, min_chunk_tokens=3),
            with_rows(prefill(0, added(0)), num_tokens=(2,), samples=(False,)),
        ),
        illegal("starts at 4, and 0 tokens are computed", BLOCKS, FULL, join(1, sharing(blocks=(4, 5, 6, 7)), 4)),
        illegal("nothing is left to feed", SHARES, FULL, join(1, sharing(LONG[:8], (0, 1)), 8)),
        illegal("shares 12 tokens, the limit is 8", SHARES, FULL, join(1, sharing(blocks=(0, 1, 2, 4)), 12)),
        illegal("shares 6 tokens, which is not a multiple of the block size", SHARES, FULL, join(1, sharing(), 6)),
        illegal(
            "shares 8 tokens but requests prompt logprobs",
            replace(SHARES, max_logprobs=1, reports_prompt_logprobs=True),
            FULL,
            join(1, sharing(sampling=replace(GREEDY, prompt_logprobs=1)), 8),
        ),
        illegal("do not contain them", SHARES, FULL, join(1, sharing((*LONG[:7], 0, *LONG[8:])), 8)),
        illegal("do not contain them", SHARES, FULL, join(1, sharing(blocks=(0, 6, 4, 5)), 8)),
        illegal("do not contain them", SHARES, FULL, join(1, sharing((*LONG[4:8], *LONG[8:]), (1, 4, 5)), 4)),
        illegal("has the adapter of place 1, which has none", SHARES, FULL, join(1, sharing(adapter=1), 8)),
        illegal("block 2, which another slot holds", SHARES, FULL, join(1, sharing(blocks=(0, 1, 2, 4)), 8)),
    ],
)  # fmt: skip
def test_an_illegal_batch_is_refused(limits: BackendLimits, batches: tuple[Batch, ...], rule: str) -> None:
    backend = StrictBackend(limits)
    run(backend, *batches[:-1])
    with pytest.raises(IllegalBatch, match=rule):
        run(backend, batches[-1])


def in_flight(limits: BackendLimits, *batches: Batch) -> StrictBackend:
    """A backend that has collected all batches except the last."""
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
        ("not alone in flight", replace(DEVICE, max_drafts=1), lambda b: b.launch(with_drafts(1, GUESSED, (0,)))),
        ("was not sampled", DEVICE, lambda b: (b.collect(0), b.launch(DECODE), b.launch(prefill(2, added(1))))),
        ("sampled twice", DEVICE, lambda b: b.sample(0, None)),
        ("was not launched last", DEVICE, lambda b: (b.launch(NEXT), b.sample(0, None))),
        ("rows that sample are", DEVICE, lambda b: (b.launch(NEXT), b.sample(1, Late((1,), mask_of((3,), 101))))),
        ("which has no form", DEVICE, lambda b: (b.launch(NEXT), b.sample(1, Late((0,), mask_of((3,), 101))))),
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
def test_a_call_that_conflicts_with_the_step_in_flight_is_refused(
    rule: str, limits: BackendLimits, offend: Callable[[StrictBackend], object]
) -> None:
    with pytest.raises(IllegalBatch, match=rule):
        offend(in_flight(limits, prefill(0, added(0))))


def test_legal_batches_give_the_defined_tokens() -> None:
    for limits in (TWO_PREFILLS, replace(TWO_PREFILLS, steps_in_flight=2, token_feedback="device")):
        outputs = run(StrictBackend(limits), BOTH, decode(1, (0, 3, FIRST), (1, 5, OTHER_FIRST)))
        assert [output.token_ids for output in outputs] == [
            ((FIRST,), (OTHER_FIRST,)),
            ((SECOND,), follow(*OTHER, OTHER_FIRST)),
        ]


def test_a_shared_prefix_gives_the_defined_tokens() -> None:
    for start in (4, 8):
        blocks = (0, 1, 4, 5) if start == 8 else (0, 4, 5, 6)
        output = run(StrictBackend(SHARES), FULL, join(1, sharing(blocks=blocks), start))[1]
        assert output.token_ids == (follow(*LONG),)


def test_prompt_logprobs_are_reported_with_the_rows_that_compute_them() -> None:
    sampling = replace(GREEDY, prompt_logprobs=2)
    backend = StrictBackend(replace(BLOCKS, max_logprobs=2, reports_prompt_logprobs=True))
    new = added(0, LONG, (0, 1, 2, 3), sampling=sampling)
    part = with_rows(prefill(0, new), num_tokens=(5,), samples=(False,))
    rest = with_rows(changed(prefill(1, new), added=()), start=(5,), num_tokens=(8,))
    (first,) = follow(*LONG)
    outputs = run(backend, part, rest, decode(2, (0, 13, first)))
    token_ids = [[entry.token_id for row in output.prompt_logprobs for entry in row] for output in outputs]
    assert token_ids == [list(LONG[1:6]), list(LONG[6:]), []]
    assert all(len(entry.top) == 2 for output in outputs for row in output.prompt_logprobs for entry in row)


@pytest.mark.parametrize("of_the_device", [False, True])
def test_rows_with_drafts_give_the_tokens_of_single_ones(of_the_device: bool) -> None:
    backend = StrictBackend(DRAFTS)
    tokens = list(run(backend, prefill(0, added(0, blocks=(0, 1, 2, 3, 4))))[0].token_ids[0])
    counts = set()
    while len(tokens) < 12:
        right = follow(*PROMPT, *tokens, count=3)
        guesses = {1: right, 2: (right[0], 0, 0), 0: (0, *right[1:])}[len(tokens) % 3]
        drafts = (NO_TOKEN,) * 3 if of_the_device else guesses
        (output,) = run(backend, with_drafts(backend._num_launched, (0, 2 + len(tokens), tokens[-1]), drafts))
        counts.add(len(output.token_ids[0]))
        tokens += output.token_ids[0]
    assert tuple(tokens) == follow(*PROMPT, count=len(tokens))
    assert len(counts) > 1
    assert max(counts) <= 4


@pytest.mark.parametrize(
    ("late", "rule"),
    [
        (Late((0,), mask_of((3,), 101), num_positions=2), "has 2 positions per row, its rows have up to 1"),
        (Late((0,), mask_of((102,), 128)), "mask 0 allows no token"),
        (Late((0,), mask_of((), 101)), "mask 0 allows no token"),
        (Late((), memoryview(b"")), "has masks of rows"),
        (Late((0, 0), mask_of((3,), 101)), "has masks of rows"),
    ],
)
def test_late_masks_must_fit_the_rows_and_their_tokens(late: Late, rule: str) -> None:
    backend = StrictBackend(BLOCKS)
    backend.launch(prefill(0, added(0, sampling=replace(GREEDY, form=FORM))))
    with pytest.raises(IllegalBatch, match=rule):
        backend.sample(0, late)


def test_a_late_mask_has_a_place_for_each_token_of_a_row() -> None:
    for only in ((7, 9, 11), (8, 10, 12), (7, 9)):
        backend = StrictBackend(DRAFTS)
        sampling = replace(GREEDY, form=FORM)
        ((first,),) = run(backend, prefill(0, added(0, blocks=(0, 1), sampling=sampling)))[0].token_ids
        backend.launch(with_drafts(1, (0, 3, first), (7, 9)))
        bits = b"".join(mask_of((one,), 101) for one in only)
        backend.sample(1, Late((0,), memoryview(bits), num_positions=len(only)))
        ((*tokens,),) = backend.collect(1).token_ids
        assert tuple(tokens) == (only if only[0] == 7 else only[:1])


def test_late_masks_restrict_the_tokens_of_their_row() -> None:
    backend = StrictBackend(TWO_PREFILLS)
    formed = changed(BOTH.added[0], sampling=replace(GREEDY, form=FORM))
    backend.launch(changed(BOTH, added=(formed, BOTH.added[1])))
    backend.sample(0, Late((0,), mask_of((77,), 101)))
    assert backend.collect(0).token_ids == ((77,), (OTHER_FIRST,))


def test_random_numbers_depend_only_on_seed_choice_and_position() -> None:
    def draw(seed: int, choice: int, position: int, temperature: float = 1.0) -> int:
        sampling = Sampling(seed=seed, choice=choice, temperature=temperature)
        return next_token(PROMPT, sampling, position, vocabulary_size=10**6)

    assert draw(1, 0, 0) == draw(1, 0, 0)
    assert len({draw(1, 0, 0), draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1)}) == 4
    assert draw(1, 0, 0, temperature=0.0) == draw(2, 1, 5, temperature=0.0)


def test_a_device_draws_from_its_likeliest_tokens_and_may_drop_the_one_that_crosses_top_p() -> None:
    host = replace(BLOCKS, sampling="Host")
    device = replace(BLOCKS, sampling="DeviceWithLogits", max_top_k=8, top_p_keeps_crossing=False)

    def kept(limits: BackendLimits, **parameters: Any) -> int:
        """Counted in the tokens that are drawn."""
        some = (Sampling(seed=seed, **parameters) for seed in range(2000))
        drawn = {next_token(PROMPT, one, 0, vocabulary_size=20, limits=limits) for one in some}
        assert len(drawn) == num_kept(Sampling(**parameters), 20, limits)
        return len(drawn)

    assert (kept(host), kept(host, top_k=9), kept(device), kept(device, top_k=3)) == (20, 9, 8, 3)
    assert kept(device, top_k=9) == 9, "the host samples this row"
    assert (kept(host, top_k=8, top_p=0.5), kept(device, top_p=0.5)) == (4, 3)
    assert (kept(host, top_p=0.01), kept(device, top_p=0.01)) == (1, 1), "the likeliest token always stays"


def test_a_batch_filled_on_the_host_equals_the_one_resolved_on_the_device() -> None:
    first = prefill(0, added(0))
    (output,) = run(StrictBackend(BLOCKS), first)
    assert fill(NEXT, output, first) == decode(1, (0, 3, FIRST))
