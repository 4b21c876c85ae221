"""The engine's loop: overlap, late sampling, admission, failures, statistics."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from helpers.engine_driver import (
    VOCABULARY_SIZE,
    OfTheDevice,
    RecordingBackend,
    Run,
    alone,
    even_only,
    max_steps,
    request,
    serve,
    start,
)
from helpers.guides import Rule, RuleGuide, RuleGuides
from helpers.step_counts import StepCounts
from helpers.strict_backend import neuron_limits
from helpers.told_drafts import Told
from neuron_runtime.core import BackendLimits, Batch, FinishReason, Late, PrefillBucket, Request, StepKind, StepOutput
from neuron_runtime.engine.guides import Guide
from neuron_runtime.engine.loop import Engine, stream_gap_bound
from neuron_runtime.errors import BackendFailed, InvalidRequest, Overloaded

HOST = BackendLimits(max_rows=4, max_model_length=256, max_step_tokens=64, block_size=8, num_blocks=128)
DEVICE = replace(HOST, steps_in_flight=2, token_feedback="device")
SAME_ROWS = replace(DEVICE, token_feedback="same rows")
DEVICE_ONE = replace(HOST, steps_in_flight=1, token_feedback="device")
REPORTING = replace(HOST, reports_prompt_logprobs=True)
SPOKEN = replace(HOST, vocabulary_size=9)
NEURON = neuron_limits(max_rows=4, max_model_length=256)


class BlockingBackend(RecordingBackend):
    """`collect` returns only when the gate is open for its step."""

    def __init__(self, limits: BackendLimits) -> None:
        super().__init__(limits)
        self.waits = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def collect(self, step: int) -> StepOutput:
        self.waits.release()
        if not self.gate.acquire(timeout=60):
            raise TimeoutError(f"the gate for step {step} was not opened")
        return super().collect(step)


@pytest.mark.parametrize("limits", [DEVICE, SAME_ROWS, HOST, NEURON])
def test_the_next_step_is_scheduled_during_a_step_and_launched_early_with_device_feedback(
    limits: BackendLimits,
) -> None:
    backend = BlockingBackend(limits)
    engine = Engine(backend)
    steps = StepCounts(engine)
    requests = [request(name, 5, max_tokens=100) for name in "abcd"]
    for asked in requests:
        engine.add(asked)
    got: dict[str, list[int]] = {asked.request_id: [] for asked in requests}

    def work() -> None:
        while engine.has_work:
            for event in engine.step():
                got[event.request_id] += event.token_ids

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    num_decode = num_scheduled_ahead = num_launched_ahead = 0
    while worker.is_alive():
        if not backend.waits.acquire(timeout=0.2):
            continue
        # `collect` blocks now, so everything scheduled or launched was so before the step ended.
        running = engine._scheduler.scheduled[0].batch
        newest = engine._scheduler.scheduled[-1].batch
        if running.kind is StepKind.DECODE:
            num_decode += 1
            num_scheduled_ahead += newest.step == running.step + 1
            num_launched_ahead += backend.batches[-1].step == running.step + 1
        backend.gate.release()
    worker.join()
    assert got == {asked.request_id: list(alone(asked)[0]) for asked in requests}
    assert num_decode >= 99
    assert num_scheduled_ahead >= 0.95 * num_decode
    if limits.token_feedback != "host":
        assert num_launched_ahead >= 0.95 * num_decode
    else:
        assert num_launched_ahead == 0
    assert steps.num_ahead >= 0.95 * steps.num(StepKind.DECODE)


def launched_ahead(run: Run) -> list[bool]:
    """For each step after the first, whether it was launched before the previous one was collected."""
    at = {call: number for number, call in enumerate(run.backend.calls)}
    return [at["launch", step] < at["collect", step - 1] for step in range(1, len(run.backend.batches))]


def test_with_feedback_to_the_same_rows_a_step_is_launched_ahead_only_if_all_its_rows_follow_the_same_rows() -> None:
    run = serve(SAME_ROWS, *[request(name, 5 + 50 * (name == "c"), max_tokens=9 * ord(name) % 37) for name in "abcdef"])
    followed = [a.rows.slot == b.rows.slot for a, b in pairwise(run.backend.batches)]
    assert launched_ahead(run) == followed
    assert followed.count(True) > 10
    assert followed.count(False) > 5, "rows that join and leave"


def test_nothing_is_launched_behind_a_step_with_a_row_that_the_host_samples() -> None:
    greedy, drawn = request("greedy", 5, 40), request("drawn", 6, 20, temperature=1.0, seed=3, seeded=True)
    for feedback in ("device", "same rows"):
        limits = replace(DEVICE, max_prefill_rows=2, sampling="DeviceWithLogits", token_feedback=feedback)
        run = serve(limits, greedy, drawn)
        slots = [batch.rows.slot for batch in run.backend.batches[:-1]]
        assert launched_ahead(run) == [slot == (0,) for slot in slots], "only behind steps of the greedy row alone"
        assert all(launched_ahead(serve(replace(limits, sampling="Host"), drawn)))


@pytest.mark.parametrize("limits", [DEVICE, DEVICE_ONE, SAME_ROWS, HOST, NEURON])
def test_each_step_is_sampled_once_before_the_next_launch_and_collected_in_order(limits: BackendLimits) -> None:
    run = serve(limits, *[request(name, 5, max_tokens=20) for name in "abcdef"])
    by_call = {
        name: [step for call, step in run.backend.calls if call == name] for name in ("launch", "sample", "collect")
    }
    steps = list(range(len(run.backend.batches)))
    assert by_call == {"launch": steps, "sample": steps, "collect": steps}
    for (call, step), (following, same) in zip(run.backend.calls, run.backend.calls[1:], strict=False):
        if call == "launch":
            assert (following, same) == ("sample", step)


def test_with_host_feedback_no_row_depends_on_the_step_in_flight() -> None:
    run = serve(HOST, request("a", 5, max_tokens=9), request("b", 100, max_tokens=9))
    assert not any(batch.waits_for_step_in_flight for batch in run.backend.batches)
    assert run.steps.num_ahead > 0


@pytest.mark.parametrize("limits", [DEVICE, DEVICE_ONE, SAME_ROWS, HOST, replace(NEURON, sampling="DeviceWithLogits")])
def test_a_row_with_a_guide_is_launched_as_others_and_sampled_after_the_previous_step(limits: BackendLimits) -> None:
    asked = [request("even", 5, 12), request("free", 5, 30), request("even again", 7, 12)]
    lengths: list[int] = []

    def late(asker: Request) -> Rule | None:
        rule = even_only(asker)
        if rule is None or asker.request_id != "even":
            return rule

        def noted(output: list[int]) -> tuple[int, ...]:
            lengths.append(len(output))
            return rule(output)

        return noted

    run = start(limits, late=late)
    run.add(*asked)
    run.finish()
    assert lengths == list(range(12)), "the answer so far was incomplete when the host was called"
    run.check_tokens(asked, even_only)
    assert all(token % 2 == 0 for token in run.tokens["even"])
    calls = run.backend.calls
    for at, (call, step) in enumerate(calls):
        if call == "sample late" and step:
            assert ("collect", step - 1) in calls[:at], "sampled before the previous tokens were known"
    assert run.steps.num_ahead >= 0.8 * run.steps.num(StepKind.DECODE)
    samples = [call for call, _ in calls if call.startswith("sample")]
    assert set(samples[-10:]) == {"sample"}, "after the last of them ended, no row is late"


def test_what_a_form_forces_is_a_draft_and_what_it_forbids_is_none() -> None:
    def counting(asked: Request) -> Rule | None:
        """0 to 7 in order, then any token once."""
        return lambda output: (len(output),) if len(output) < 8 else tuple(range(VOCABULARY_SIZE))

    run = start(replace(DEVICE, max_drafts=3), late=counting)
    run.guesses.wants = lambda sequences: False  # type: ignore[method-assign]
    run.add(asked := request("even", 5, 12))
    run.finish()
    run.check_tokens([asked], counting)
    fed = [batch.rows.drafts[0] for batch in run.backend.batches if batch.rows.drafts]
    assert fed[:2] == [(1, 2, 3), (5, 6, 7)]
    assert all(accepted == count for count, accepted in run.guesses.learned[:2])


def test_rows_with_masks_and_rows_with_drafts_share_steps() -> None:
    for limits in (DEVICE, HOST):
        asked = [request("even", 5, 12), request("free", 5, 30)]
        run = start(replace(limits, max_drafts=3), late=even_only)
        run.add(*asked)
        run.finish()
        run.check_tokens(asked, even_only)


# Adding requests


def test_a_request_at_the_limits_runs_to_completion() -> None:
    drafts = replace(DEVICE, max_drafts=3, num_lookahead_tokens=2)
    for limits in (HOST, drafts, NEURON, replace(drafts, num_blocks=5), replace(HOST, num_blocks=3)):
        for num_prompt in (2, 17, limits.max_new_tokens(0) - 1):
            serve(limits, request("a", num_prompt, limits.max_new_tokens(num_prompt)))


def test_a_request_id_in_use_is_refused_until_its_request_has_ended() -> None:
    run = serve(HOST, request("a", 3, 2))
    run.engine.add(request("a", 3, 2))
    with pytest.raises(InvalidRequest, match="'a' is running") as caught:
        run.engine.add(request("a", 3, 2))
    assert caught.value.field == "request_id"


def test_a_full_queue_raises_overloaded_until_a_request_leaves() -> None:
    run = start(HOST, max_queued_requests=2)
    run.add(*[request(name, 3, 50) for name in "abcdef"])
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        run.engine.add(request("g", 3, 2))
    run.step()
    with pytest.raises(Overloaded):
        run.engine.add(request("g", 3, 2))
    run.abort("f")
    run.add(request("g", 3, 2))
    run.finish()


def test_the_step_bound_is_proportional_to_the_tokens() -> None:
    requests = [request(name, 20, 30) for name in "abcd"]
    assert len(serve(HOST, *requests).backend.batches) <= max_steps(HOST, requests) <= 4 * (30 + 2 * 4) + 4
    assert max_steps(HOST, []) == 0


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"max_rows": 0}, "must be positive"),
        ({"layout": "slots"}, "block_size must be max_model_length"),
        ({"steps_in_flight": 2}, "host feedback allows one step in flight"),
        ({"token_feedback": "same rows"}, "needs two steps in flight"),
        ({"max_drafts": -1}, "must be >= 0"),
        ({"max_step_tokens": 3}, "a decode row of every sequence"),
        ({"max_step_tokens": 8, "min_chunk_tokens": 6}, "all but one plus a chunk"),
        ({"prefill_buckets": (PrefillBucket(8, 8), PrefillBucket(4, 8))}, "must be ascending"),
        ({"prefill_buckets": (PrefillBucket(8, 4),)}, "compute at least the tokens that fit"),
        ({"prefill_buckets": (PrefillBucket(62, 62),)}, "beside a decode row of all others"),
        ({"max_prefill_start": 8}, "with chunks needs prefill_buckets"),
        ({"max_step_seconds": -1.0}, "must be >= 0"),
        ({"prefill_buckets": (PrefillBucket(4, 4),), "min_prefill_tokens": 5}, "must fit in one step"),
        ({"decodes_all_live_rows": True}, "excludes partial prompts"),
    ],
)
def test_limits_that_prevent_serving_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(HOST, **changes)


# Failures and statistics


class BrokenBackend(RecordingBackend):
    def __init__(self, limits: BackendLimits, call: str) -> None:
        super().__init__(limits)
        self._call = call

    def launch(self, batch: Batch) -> None:
        self._fail("launch")
        super().launch(batch)

    def sample(self, step: int, late: Late | None) -> None:
        self._fail("sample")
        super().sample(step, late)

    def collect(self, step: int) -> StepOutput:
        self._fail("collect")
        return super().collect(step)

    def _fail(self, call: str) -> None:
        if call == self._call:
            raise OSError(f"the device failed in {call}")


@pytest.mark.parametrize("call", ["launch", "sample", "collect"])
def test_an_exception_of_the_device_is_raised(call: str) -> None:
    engine = Engine(BrokenBackend(HOST, call))
    engine.add(request("a", 3))
    with pytest.raises(OSError, match=f"failed in {call}"):
        engine.step()


def test_an_idle_engine_makes_no_step() -> None:
    run = start(HOST)
    assert not run.engine.has_work
    assert run.engine.step() == []
    assert run.backend.calls == []


def test_the_step_statistics_add_up() -> None:
    run = start(replace(HOST, max_rows=2), max_queued_requests=5)
    asked = [request(name, 10, 6) for name in "abc"]
    run.add(*asked)
    assert (run.engine.stats.num_running, run.engine.stats.num_waiting) == (0, 3)
    fed = 0
    while run.engine.has_work:
        run.step()
        last = run.engine.stats.last_step
        assert last is not None
        assert last.num_tokens == run.backend.batches[last.step].num_tokens
        assert last.device_seconds > 0
        fed += last.num_tokens
    stats = run.engine.stats
    assert fed == 30 + 3 * 5
    assert (stats.num_blocks_used, stats.num_blocks) == (0, 128)
    run.step()
    assert run.engine.stats.last_step is None


def test_blocks_in_use_are_reported_while_a_request_runs() -> None:
    run = start(HOST)
    run.add(request("a", 20, 6))
    run.step()
    assert run.engine.stats.num_blocks_used == HOST.blocks_for(20 + 1)


def test_the_queue_time_is_reported_with_the_first_tokens() -> None:
    now = [100.0]
    engine = Engine(RecordingBackend(replace(HOST, max_rows=1)), clock=lambda: now[0])
    engine.add(request("a", 5, 4))
    engine.add(request("b", 5, 4))
    engine.add(request("gone", 5, 4))
    engine.abort("gone")
    waited = {}
    while engine.has_work:
        now[0] += 1.0
        for event in engine.step():
            if event.first is not None:
                waited[event.request_id] = event.first.queue_seconds
    assert waited["a"] == 1.0
    assert 4.0 <= waited["b"] <= 5.0
    assert engine._added_at == engine._queue_seconds == {}


class TimedBackend(RecordingBackend):
    """Each step takes the time of `seconds`, on a clock that nothing else moves."""

    def __init__(self, limits: BackendLimits, seconds: Callable[[Batch], float]) -> None:
        super().__init__(limits)
        self._seconds = seconds
        self.now = 0.0

    def collect(self, step: int) -> StepOutput:
        self.now += self._seconds(self.batches[step])
        return super().collect(step)


def worst_gap(
    limits: BackendLimits, seconds: Callable[[Batch], float], max_consecutive_prefills: int = 1
) -> tuple[float, float]:
    """The longest gap of streams among arriving and leaving long and short prompts, and its stated bound."""
    backend = TimedBackend(limits, seconds)
    engine = Engine(
        backend,
        max_consecutive_prefills=max_consecutive_prefills,
        clock=lambda: backend.now,
        max_queued_requests=100,
        drafting=OfTheDevice(limits),
    )
    last: dict[str, float] = {}
    worst = 0.0

    def step_while(busy: Callable[[], bool]) -> None:
        nonlocal worst
        while busy():
            for event in engine.step():
                worst = max(worst, backend.now - last.get(event.request_id, backend.now))
                last[event.request_id] = backend.now

    for number in range(18):
        engine.add(request(f"r{number}", 7 + 61 * (number % 3), 5 + 9 * (number % 4)))
        if number % 3 == 2:
            step_while(lambda: engine.stats.num_running + engine.stats.num_waiting > 1)
        if number == 8:
            step_while(lambda: engine.has_work)
            backend.now += 1000.0
    step_while(lambda: engine.has_work)
    assert engine.stats.num_preemptions_total == 0
    return worst, engine.stats.stream_gap_bound_seconds


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("prefills", [1, 3])
@pytest.mark.parametrize("limits", [DEVICE, replace(DEVICE, mixes_phases=False), HOST, NEURON])
def test_gaps_of_a_running_stream_stay_within_the_bound_of_the_longest_steps(
    limits: BackendLimits, prefills: int, max_drafts: int
) -> None:
    limits = replace(limits, max_drafts=max_drafts)
    worst, bound = worst_gap(limits, lambda batch: 0.004 + 0.001 * batch.num_tokens, prefills)
    assert 0 < worst <= bound + 1e-9
    assert bound < 100, "idle time does not count"


@pytest.mark.parametrize("limits", [NEURON, HOST, DEVICE, replace(DEVICE, mixes_phases=False)])
def test_a_refused_client_finds_room_at_its_retry_time_with_waiting_prefills(limits: BackendLimits) -> None:
    backend = TimedBackend(limits, lambda batch: 0.05 if batch.kind is StepKind.DECODE else 0.5)
    engine = Engine(backend, max_queued_requests=20, clock=lambda: backend.now)
    names = (f"r{number}" for number in itertools.count())

    def serve_on(num_requests: int) -> float:
        """Runs with a queue that stays full; returns the duration."""
        began, num_ended = backend.now, 0
        while num_ended < num_requests:
            num_ended += sum(event.finish_reason is not None for event in engine.step())
            while engine.stats.num_running + engine.stats.num_waiting < limits.max_rows + 20:
                engine.add(request(next(names), 20, 10))
        return backend.now - began

    serve_on(100)
    for _ in range(20):
        with pytest.raises(Overloaded) as refused:
            engine.add(request(next(names), 20, 10))
    assert refused.value.retry_after_seconds == pytest.approx(serve_on(20), rel=0.25)


def test_the_bound_on_the_gap_is_reached() -> None:
    times = {StepKind.PREFILL: 0.3, StepKind.DECODE: 0.01, StepKind.MIXED: 0.1}
    for limits, prefills, expected in ((NEURON, 1, 0.31), (NEURON, 3, 0.91), (HOST, 1, 0.1)):
        worst, bound = worst_gap(limits, lambda batch: times[batch.kind], prefills)
        assert bound == pytest.approx(expected)
        assert worst == pytest.approx(expected)


def test_the_bound_on_the_gap_by_the_kinds_of_steps() -> None:
    longest = {StepKind.PREFILL: 5.0, StepKind.DECODE: 1.0, StepKind.MIXED: 3.0}
    assert stream_gap_bound(NEURON, {}) == 0.0
    assert stream_gap_bound(NEURON, {StepKind.PREFILL: 5.0, StepKind.DECODE: 1.0}, 2) == 11.0
    assert stream_gap_bound(DEVICE, longest) == 3.0


def test_logprobs_stay_with_their_tokens() -> None:
    plain = request("a", 6, 20, logprobs=2)
    tokens = alone(plain)[0]
    limits = replace(DEVICE, max_drafts=3, max_logprobs=5)
    asked = replace(plain, sampling=replace(plain.sampling, stop_token_ids=frozenset({tokens[6]})))
    run = start(limits)
    run.engine.add(asked)
    run.engine.add(request("b", 6, 20))
    events = [event for _ in range(60) for event in run.engine.step()]
    for event in events:
        ids = tuple(entry.token_id for entry in event.logprobs)
        assert ids == (event.token_ids if event.request_id == "a" else ())
        assert all(len(entry.top) == 2 for entry in event.logprobs)


# Aborts


def test_an_abort_forgets_the_guide() -> None:
    engine = Engine(RecordingBackend(HOST), guides=RuleGuides(even_only, VOCABULARY_SIZE))
    engine.add(request("even", 3, 4))
    engine.step()
    engine.abort("even")
    while engine.has_work:
        engine.step()
    asked = request("even", 3, 4, form=None)
    engine.add(asked)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.token_ids]
    assert tuple(tokens) == alone(asked)[0]


# Guides


def test_a_request_whose_guide_is_not_ready_waits_without_a_row() -> None:
    run = start(replace(HOST, max_rows=1), late=even_only)
    guides = run.engine._guides
    assert isinstance(guides, RuleGuides)
    held: Future[Guide] = Future()
    guides.held["even"] = held
    even, free = request("even", 5, 6), request("free", 5, 8)
    run.add(even, free)
    for _ in range(6):
        run.step()
    assert len(run.tokens["free"]) >= 5
    assert not run.tokens["even"]
    assert run.engine.stats.num_waiting == 1
    rule = even_only(even)
    assert rule is not None
    held.set_result(RuleGuide(rule))
    run.finish()
    run.check_tokens([even, free], even_only)


def test_a_request_whose_guide_cannot_be_made_is_refused_and_others_go_on() -> None:
    run = start(HOST, late=lambda asked: None)
    free = request("free", 5, 8)
    run.engine.add(request("even", 5, 6))
    run.add(free)
    run.finish()
    ((name, error),) = run.engine.take_refused()
    assert (name, error.field) == ("even", "response_format")
    run.check_tokens([free])


def test_a_request_may_be_aborted_while_its_guide_is_made() -> None:
    run = start(HOST)
    guides = run.engine._guides
    assert isinstance(guides, RuleGuides)
    guides.held["even"] = Future()
    run.engine.add(request("even", 5, 6))
    assert run.engine.has_work
    assert run.engine.step() == []
    run.engine.abort("even")
    assert not run.engine.has_work


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("limits", [DEVICE, HOST])
def test_a_request_whose_guide_fails_is_cut_and_others_go_on(limits: BackendLimits, max_drafts: int) -> None:
    """At the same token if it fails behind a draft."""
    asked = [request("even", 5, 12), request("even too", 5, 12), request("free", 5, 30)]

    def failing(asker: Request) -> Rule | None:
        rule = even_only(asker)
        return (lambda output: () if len(output) == 3 else rule(output)) if rule and asker is asked[0] else rule

    limits = replace(limits, max_drafts=max_drafts)
    drafting = Told({one.request_id: list(alone(one, even_only)[0]) for one in asked}, wrong=0.0)
    backend = RecordingBackend(limits)
    engine = Engine(backend, guides=RuleGuides(failing, VOCABULARY_SIZE), drafting=drafting)
    for one in asked:
        engine.add(one)
    reasons: dict[str, FinishReason | None] = {}
    tokens: dict[str, list[int]] = {one.request_id: [] for one in asked}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            reasons[event.request_id] = event.finish_reason or reasons.get(event.request_id)
    assert reasons == {"even": FinishReason.LENGTH, "even too": FinishReason.LENGTH, "free": FinishReason.LENGTH}
    assert len(tokens["even"]) == 3
    for one in asked[1:]:
        assert tuple(tokens[one.request_id]) == alone(one, even_only)[0]
    assert backend.most_masks == (4 if max_drafts else 1)


class UnmaskedBackend(RecordingBackend):
    """Samples each step after the first few without the masks."""

    def sample(self, step: int, late: Late | None) -> None:
        super().sample(step, late if step < 4 else None)


@pytest.mark.parametrize("limits", [DEVICE, HOST])
@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_with_a_token_that_no_mask_allowed_ends_as_an_error_and_others_go_on(
    limits: BackendLimits, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether that token would end the answer or not."""
    form, free = request("even", 5, 12), request("free", 5, 30)
    if ends:
        odd = frozenset(range(1, VOCABULARY_SIZE, 2))
        form = replace(form, sampling=replace(form.sampling, stop_token_ids=odd))
    engine = Engine(UnmaskedBackend(limits), guides=RuleGuides(even_only, VOCABULARY_SIZE))
    engine.add(form)
    engine.add(free)
    events = [event for _ in range(60) for event in engine.step()]
    ended = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ended == {"even": FinishReason.ERROR, "free": FinishReason.LENGTH}
    tokens = {name: [t for event in events if event.request_id == name for t in event.token_ids] for name in ended}
    assert tokens["even"]
    assert not any(token % 2 for token in tokens["even"])
    assert tuple(tokens["free"]) == alone(free)[0]
    assert not engine.has_work
    assert capsys.readouterr().err.count("broke the form of even") == 1


class ShortBackend(RecordingBackend):
    """Returns a row too few of each step after the first few."""

    def collect(self, step: int) -> StepOutput:
        output = super().collect(step)
        return output if step < 4 else msgspec.structs.replace(output, token_ids=output.token_ids[:-1])


@pytest.mark.parametrize("name", ["even", "free"])
def test_the_output_of_another_step_is_named_with_masks_and_without(name: str) -> None:
    engine = Engine(ShortBackend(DEVICE), guides=RuleGuides(even_only, VOCABULARY_SIZE))
    engine.add(request(name, 5, 12))
    for _ in range(4):
        engine.step()
    with pytest.raises(BackendFailed, match="returned step 4 with 0 rows, expected step 4 with 1 rows"):
        engine.step()


def test_an_abort_of_a_waiting_request_leaves_room_in_the_queue() -> None:
    engine = Engine(RecordingBackend(NEURON), max_queued_tokens=10)
    for name in "abc":
        engine.add(request(name, 10))
        assert engine.stats.num_waiting_tokens == 10
        engine.abort(name)
        assert engine.stats.num_waiting_tokens == 0
