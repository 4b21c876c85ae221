"""The engine under random limits, layouts, arrivals, aborts, stops, preemptions, with 1 to 4 tokens a row."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from helpers.engine_driver import VOCABULARY_SIZE, alone, even_only, request, start
from neuron_runtime.core import BackendLimits, Kind, Request, SamplingParams
from neuron_runtime.engine.admission import check_request, max_new_tokens, max_steps, stream_gap_bound
from neuron_runtime.errors import InvalidRequest

NUM_EXAMPLES = 300
NUM_SLOW_EXAMPLES = int(os.environ.get("NEURON_SERVING_PROPERTY_EXAMPLES", "2000"))


@st.composite
def backend_limits(draw: st.DrawFn) -> BackendLimits:
    max_rows = draw(st.sampled_from((2, 3, 4, 6, 1)))
    length = draw(st.sampled_from((20, 13, 31, 40, 8)))
    per_row = draw(st.sampled_from((1, 1, 2, 3, 4)))
    lookahead = per_row - 1 + draw(st.sampled_from((0, 0, 2)))
    all_live, mixes, chunks = draw(
        st.sampled_from(((True, False, False), *[(False, mixes, chunks) for mixes in (0, 1) for chunks in (0, 1, 1)]))
    )
    min_chunk = draw(st.integers(1, 4)) if chunks else 1
    step_tokens = (
        max_rows - 1 + min_chunk + draw(st.sampled_from((1, 3, 8) if chunks else (length // 2, length, length)))
    )
    one_shot = draw(st.sampled_from((0, 0, 0, step_tokens // 2)))
    one_shot = max(one_shot, min_chunk) if one_shot else 0
    slots = draw(st.sampled_from((False, False, True)))
    block_size = length if slots else draw(st.sampled_from((1, 2, 3, 4, 6)))
    blocks_of_one = -(-length // block_size)
    many = (3 * blocks_of_one // 2, 2 * blocks_of_one)
    device = draw(st.booleans())
    shares = not slots and draw(st.sampled_from((True, True, False)))
    return BackendLimits(
        max_rows=max_rows,
        max_model_length=length,
        max_step_tokens=step_tokens,
        max_prefill_rows=draw(st.integers(1, 3)),
        max_one_shot_prefill=one_shot,
        min_prefill_tokens=draw(st.integers(1, min(2, one_shot or step_tokens))),
        max_tokens_per_row=per_row,
        num_lookahead_tokens=lookahead,
        layout="slots" if slots else "blocks",
        block_size=block_size,
        num_blocks=max_rows if slots else draw(st.sampled_from((blocks_of_one // 2, blocks_of_one, *many))),
        mixes_phases=bool(mixes),
        chunks_prefill=bool(chunks),
        min_chunk_tokens=min_chunk,
        decodes_all_live_rows=all_live,
        sorts_rows=draw(st.booleans()),
        lowest_slot_first=draw(st.booleans()),
        shares_prefixes=shares,
        max_prefix_hit=draw(st.sampled_from((0, 0, 0, 2 * block_size, 5))) if shares else 0,
        max_logprobs=2,
        reports_prompt_logprobs=draw(st.booleans()),
        steps_in_flight=draw(st.sampled_from((1, 2))) if device else 1,
        token_feedback="device" if device else "host",
    )


@st.composite
def requests_for(draw: st.DrawFn, limits: BackendLimits, name: str, earlier: list[Request]) -> Request:
    longest = limits.longest_sequence if limits.chunks_prefill else limits.longest_prefill
    longest = min(longest, max_new_tokens(limits, 0) - 1)
    if longest < limits.min_prefill_tokens:
        return request(name, 0)
    # Few texts, which prompts follow for a while: that of an earlier request and its answer, say.
    told = draw(st.sampled_from(earlier[-3:])) if earlier and draw(st.sampled_from((True, True, False))) else None
    text = [*told.prompt_token_ids, *alone(told, even_only)[0]] if told else []
    num_prompt = draw(st.integers(limits.min_prefill_tokens, max(longest // 2, limits.min_prefill_tokens)))
    if text:
        num_prompt = min(max(num_prompt, draw(st.sampled_from((len(text), len(text) // 2)))), longest)
    room = max_new_tokens(limits, num_prompt)
    max_tokens = draw(st.sampled_from((room, room, max(room // 2, 1), 1, min(room, 2))) | st.integers(1, room))
    seed = draw(st.integers(0, 99))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from((0.0, 1.0))),
        seed=seed % 7,
        choice=seed % 2,
        stop_token_ids=frozenset(draw(st.sampled_from(((), (), (), (1, 2), (3, 5, 8, 9))))),
        min_tokens=seed % (max_tokens + 1),
        prompt_logprobs=draw(st.sampled_from((None,) * 4 + (1,))) if limits.reports_prompt_logprobs else None,
    )
    common = min(draw(st.sampled_from((num_prompt, num_prompt, num_prompt - 1, num_prompt // 2))), len(text))
    prompt = (*text[:common], *(seed * (at + 1) % VOCABULARY_SIZE for at in range(common, num_prompt)))
    return Request(
        name,
        prompt,
        sampling,
        priority=draw(st.sampled_from((0, 0, 1, 2))),
        cache_salt=draw(st.sampled_from(("",) * 7 + ("salt",))),
        adapter=draw(st.sampled_from((0,) * 7 + (1,))),
    )


def check_one_run(data: st.DataObject) -> None:
    limits = data.draw(backend_limits(), "limits")
    prefills = data.draw(st.sampled_from((1, 1, 1, 2, 5)), "prefill steps in a row")
    run = start(limits, late=even_only, max_consecutive_prefills=prefills)
    late = data.draw(st.sampled_from(((), (), (0, 3))), "numbers of requests that need the host")
    requests: list[Request] = []
    for number in range(data.draw(st.sampled_from((4, 6, 10, 1)), "number of requests")):
        asked = data.draw(requests_for(limits, f"{'even' if number in late else 'r'}{number}", requests), "request")
        try:
            check_request(limits, asked)
        except InvalidRequest:
            assert not asked.prompt_token_ids, "a request within the stated room was refused"
            continue
        run.add(asked)
        requests.append(asked)
        for _ in range(data.draw(st.sampled_from((0, 0, 0, 1, 2, 5)), "steps before the next arrival")):
            run.step()
        for name in data.draw(st.sampled_from(((),) * 15 + tuple((r.request_id,) for r in requests)), "abort"):
            if name not in run.reasons:
                run.abort(name)
    bound = max_steps(limits, requests, prefills)
    note(f"at most {bound} steps")
    run.finish(bound)
    assert len(run.backend.batches) <= bound
    run.check_tokens(requests, even_only)
    stats, batches = run.engine.stats, run.backend.batches
    if not stats.num_preemptions_total:
        # Steps that take a second each: the bound on the time is one on their number.
        assert run.worst_gap <= stream_gap_bound(limits, dict.fromkeys(Kind, 1.0), prefills)
    for happened, what in (
        (stats.num_preemptions_total, "preempted"),
        (stats.num_decode_steps_ahead_total, "scheduled ahead"),
        (any(b.kept_blocks for b in batches), "surplus returned"),
        (any(not s for b in batches for s in b.rows.samples), "chunked"),
        (run.aborted, "aborted"),
        (stats.num_prefix_hits_total, "shared a prefix"),
        (run.waited, "waited for a prefix"),
        (stats.num_prefix_hits_total and stats.num_preemptions_total, "shared a prefix and preempted"),
        (len({r.priority for r in requests}) > 1, "several priorities"),
        (any(call == "sample late" for call, _ in run.backend.calls), "sampled late"),
    ):
        if happened:
            event(what)


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(st.data())
def test_every_request_gets_the_tokens_it_would_get_alone_within_the_promised_steps(data: st.DataObject) -> None:
    check_one_run(data)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=NUM_SLOW_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(st.data())
def test_the_same_holds_for_many_more_random_runs(data: st.DataObject) -> None:
    check_one_run(data)
