"""The simulated backend: its device is a timeline, it accepts what the strict backend accepts, its tokens do not depend
on other rows, and it can serve a model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from bench.cpu_clock import CpuClock
from helpers import strict_backend
from helpers.chat_model import write_chat_model
from helpers.guides import FORM, Rule, RuleGuides
from helpers.serve_command import serve
from helpers.strict_backend import StrictBackend
from neuron_runtime import LLM, SamplingParams
from neuron_runtime.backend.simulated import load_backend
from neuron_runtime.backend.simulated.device import (
    Clock,
    SimulatedBackend,
    Timeline,
    VirtualClock,
    WallClock,
    first_number,
    token_at,
)
from neuron_runtime.backend.simulated.options import MAX_TOP_K, Options, limits_of, read_options, step_times
from neuron_runtime.backend.simulated.step_times import PUBLISHED, Curve, PhaseTimes, StepTimes, constant, milliseconds
from neuron_runtime.backend_protocol import IllegalBatch, StepTime
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import EngineLimits, ModelSource, RuntimeConfig
from neuron_runtime.core import (
    NO_TOKEN,
    SAMPLING_MODES,
    BackendLimits,
    Batch,
    Late,
    Request,
    Sampling,
    StepOutput,
    TokenEvent,
    needs_host,
)
from neuron_runtime.engine.loop import Engine
from neuron_runtime.engine.sequence import Sequence
from neuron_runtime.errors import InvalidConfig

VOCABULARY_SIZE = 101
STEP = StepTimes(decode=PhaseTimes(constant(0.008)), prefill=PhaseTimes(constant(0.008)))


def request(name: str, num_prompt: int, max_tokens: int = 8, **sampling: Any) -> Request:
    prompt = tuple((sum(map(ord, name)) + 3 * at) % VOCABULARY_SIZE for at in range(num_prompt))
    return Request(name, prompt, Sampling(max_tokens=max_tokens, temperature=0.0, **sampling))


def config(limits: EngineLimits | None = None, **other: Any) -> RuntimeConfig:
    return RuntimeConfig(
        version=1,
        model=ModelSource(uri="file:///m"),
        served_names=("m",),
        backend="simulated",
        limits=limits or EngineLimits(),
        **other,
    )


def limits(options: Options | None = None, **wanted: int) -> BackendLimits:
    return limits_of(
        config(EngineLimits(**wanted)), options or Options(), vocabulary_size=VOCABULARY_SIZE, longest=1000
    )


def finish(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for news in engine.step():
            tokens.setdefault(news.request_id, []).extend(news.token_ids)
    return tokens


# The contract


class Twins:
    """Sends each batch to the strict and to the simulated backend and compares tokens."""

    def __init__(self, limits: BackendLimits) -> None:
        self.limits = limits
        self.strict = StrictBackend(limits, vocabulary_size=VOCABULARY_SIZE)
        self.simulated = SimulatedBackend(limits, STEP, VirtualClock())
        self.num_late = 0

    def warm_up(self, progress: Any) -> tuple[StepTime, ...]:
        raise AssertionError("nothing to warm up")

    def graph(self, batch: Batch) -> str:
        return self.simulated.graph(batch)

    def launch(self, batch: Batch) -> None:
        self.strict.launch(batch)
        self.simulated.launch(batch)

    def sample(self, step: int, late: Late | None) -> None:
        self.num_late += late is not None
        self.strict.sample(step, late)
        self.simulated.sample(step, late)

    def collect(self, step: int) -> StepOutput:
        expected, output = self.strict.collect(step), self.simulated.collect(step)
        assert output.token_ids == expected.token_ids
        return output

    def close(self) -> None:
        self.strict.close()
        self.simulated.close()


def simulated_token(context: Any, sampling: Sampling, output_position: int, **more: Any) -> int:
    """Token function for the strict backend that agrees with the simulated one: it depends only on the prompt."""
    num_prompt = len(context) - output_position
    number = first_number(context[:num_prompt], sampling, more["adapter"])
    allowed = more["allowed"]
    token = token_at(number, len(context), more["vocabulary_size"], None if allowed else sampling.allowed_token_ids)
    return min((one for one in allowed if one >= token), default=min(allowed)) if allowed else token


@pytest.fixture
def strict_draws_as_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_backend, "next_token", simulated_token)


def odd_only(asked: Request) -> Rule | None:
    return (lambda output: (1, 3, 5, 7)) if asked.request_id.startswith("odd") else None


@st.composite
def runs(draw: st.DrawFn) -> tuple[BackendLimits, list[Request]]:
    prefill = draw(st.sampled_from(("mixed", "chunks", "whole")))
    layout = draw(st.sampled_from(("blocks", "slots")))
    length = draw(st.sampled_from((24, 40)))
    rows = draw(st.integers(1, 4))
    wanted = EngineLimits(
        max_sequences=rows,
        max_model_length=length,
        max_step_tokens=length if prefill == "whole" else draw(st.sampled_from((rows + 2, 16))),
        block_size=draw(st.sampled_from((2, 4))) if layout == "blocks" else 0,
        num_blocks=draw(st.sampled_from((20, 30, 60))) if layout == "blocks" else 0,
    )
    largest = length if prefill == "whole" else rows + 2
    options = Options(
        prefill=prefill,
        token_feedback=draw(st.sampled_from(("device", "same rows", "host"))),
        prefill_buckets=draw(st.sampled_from(((), (largest,), (2, largest)))),
    )
    mode = draw(st.sampled_from(SAMPLING_MODES))
    requests = []
    for number in range(draw(st.integers(1, 7))):
        num_prompt = draw(st.integers(1, length // 2))
        name = f"{draw(st.sampled_from(('r', 'r', 'odd' if mode != 'Device' else 'r')))}{number}"
        asked = request(name, num_prompt, draw(st.integers(1, length - num_prompt)))
        only = draw(st.sampled_from((None, None, (4, 9, 30)))) if mode != "Device" else None
        first = draw(st.sampled_from((5, 5, 60)))  # so that many share a prefix
        prompt = tuple((first + 3 * at) % VOCABULARY_SIZE for at in range(num_prompt))
        form = FORM if name.startswith("odd") else None
        sampling = replace(asked.sampling, allowed_token_ids=only, form=form)
        requests.append(replace(asked, prompt_token_ids=prompt, sampling=sampling))
    made = limits_of(
        config(wanted, layout=layout, sampling=mode), options, vocabulary_size=VOCABULARY_SIZE, longest=1000
    )
    return made, requests


@pytest.mark.usefixtures("strict_draws_as_simulated")
@settings(
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    database=None,
)
@given(runs())
def test_the_simulated_backend_accepts_what_the_strict_one_accepts_and_samples_from_its_cache(
    run: tuple[BackendLimits, list[Request]],
) -> None:
    limits, requests = run
    assume(len({r.request_id for r in requests}) == len(requests))
    backend = Twins(limits)
    engine = Engine(backend, guides=RuleGuides(odd_only, VOCABULARY_SIZE))
    tokens: dict[str, list[int]] = {}

    def take(events: list[TokenEvent]) -> None:
        for news in events:
            tokens.setdefault(news.request_id, []).extend(news.token_ids)

    for at, asked in enumerate(requests):
        engine.add(asked)
        if at % 2:
            take(engine.step())
    while engine.has_work:
        take(engine.step())
    event(f"shared: {engine.stats.num_prefix_hits_total > 0}, preempted: {engine.stats.num_preemptions_total > 0}")
    for asked in requests:
        quiet = Engine(SimulatedBackend(limits, STEP, VirtualClock()), guides=RuleGuides(odd_only, VOCABULARY_SIZE))
        quiet.add(asked)
        assert finish(quiet)[asked.request_id] == tokens[asked.request_id]
        assert len(tokens[asked.request_id]) == asked.sampling.max_tokens


@pytest.mark.usefixtures("strict_draws_as_simulated")
def test_the_comparison_detects_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        strict_backend, "next_token", lambda context, *rest, **more: (len(context) * 7) % VOCABULARY_SIZE
    )
    engine = Engine(Twins(limits(max_sequences=2)))
    engine.add(request("r", 5))
    with pytest.raises(AssertionError):
        finish(engine)


def test_steps_are_collected_in_order() -> None:
    backend = SimulatedBackend(limits(max_sequences=2), STEP, VirtualClock())
    engine = Engine(backend)
    engine.add(request("r", 5))
    engine.step()
    with pytest.raises(IllegalBatch, match="step 7 was collected before step 1"):
        backend.collect(7)


def test_seed_and_choice_change_drawn_tokens_but_not_greedy_ones() -> None:
    drawn = {
        tuple(
            token_at(first_number((1, 2, 3), Sampling(temperature=t, seed=seed, choice=choice)), at, 32_000)
            for at in range(3, 9)
        )
        for t, seed, choice in ((1.0, 0, 0), (1.0, 1, 0), (1.0, 1, 1), (0.0, 0, 0), (0.0, 1, 0), (0.0, 5, 5))
    }
    assert len(drawn) == 3  # greedy draws as seed 0, choice 0
    assert first_number((1,), Sampling(seed=2**64 - 1)) > 0


def test_logprobs_are_uniform_and_cover_the_prompt() -> None:
    wanted = config(EngineLimits(max_sequences=2, max_step_tokens=4), sampling="Host")
    made = limits_of(wanted, Options(), vocabulary_size=VOCABULARY_SIZE, longest=1000)
    engine = Engine(SimulatedBackend(made, STEP, VirtualClock()))
    engine.add(request("r", 9, max_tokens=2, logprobs=2, prompt_logprobs=0))
    events = []
    while engine.has_work:
        events += engine.step()
    first, second = events
    assert [len(one.logprobs) for one in events] == [1, 1]
    (reported,) = second.logprobs
    assert (reported.token_id,) == second.token_ids
    assert reported.logprob == pytest.approx(-4.6151, abs=1e-4)
    assert [logprob for _, logprob in reported.top] == [reported.logprob] * 2
    asked = request("r", 9)
    assert [one.token_id for one in first.prompt_logprobs] == list(asked.prompt_token_ids[1:])


def test_an_unknown_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of known size"):
        SimulatedBackend(replace(limits(max_sequences=2), vocabulary_size=0), STEP, VirtualClock())


# Drafts

NUM_DRAFTS = 3


def answered(drafting: Guesses | None, asked: list[Request], times: StepTimes = STEP, acceptance: float = 0.0) -> Run:
    wanted = config(EngineLimits(max_sequences=8), sampling="Host")
    made = limits_of(wanted, Options(), vocabulary_size=VOCABULARY_SIZE, longest=1000)
    made = replace(made, max_drafts=NUM_DRAFTS if drafting else 0)
    backend = SimulatedBackend(made, times, VirtualClock(), acceptance=acceptance)
    engine = Engine(backend, drafting=drafting)
    for one in asked:
        engine.add(one)
    return Run(engine, backend, finish(engine))


class Run(NamedTuple):
    engine: Engine
    backend: SimulatedBackend
    tokens: dict[str, list[int]]


class Guesses:
    """Implements `Drafting`: of all rows, always; the tokens that come with one in three wrong, or the device's."""

    def __init__(self, of_device: bool) -> None:
        self._of_device = of_device

    def wants(self, sequences: Collection[Sequence]) -> bool:
        return True

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        if self._of_device:
            return (NO_TOKEN,) * most
        asked, end = sequence.request, len(sequence.tokens)
        number = first_number(asked.prompt_token_ids, asked.sampling)
        return tuple(
            token_at(number, at, VOCABULARY_SIZE, asked.sampling.allowed_token_ids) + (at % 3 == 0)
            for at in range(end, end + most)
        )

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None: ...

    def measure(self, num_rows: int, num_tokens: int, seconds: float, num_prompt_tokens: int = 0) -> None: ...


@pytest.mark.parametrize("of_device", [True, False])
def test_drafts_change_no_token_only_the_steps(of_device: bool) -> None:
    asked = [
        *(request(f"r{number}", 3 + number, max_tokens=20 + number) for number in range(6)),
        request("restricted", 5, max_tokens=30, allowed_token_ids=(3, 5, 7)),
        request("logprobs", 6, max_tokens=30, logprobs=2, prompt_logprobs=0),
    ]
    with_drafts = answered(Guesses(of_device), asked, acceptance=0.6)
    assert with_drafts.tokens == answered(None, asked).tokens
    stats = with_drafts.engine.stats
    assert 0 < stats.num_accepted_drafts_total < stats.num_drafts_total


def test_so_many_drafts_of_the_device_are_right_as_asked_for() -> None:
    asked = [request(f"r{number}", 4, max_tokens=600) for number in range(8)]
    first, second, third = answered(Guesses(True), asked, acceptance=0.7).engine.stats.accepted_by_place_total
    num_rows = answered(Guesses(True), asked, acceptance=0.7).engine.stats.num_drafted_rows_total
    assert [first / num_rows, second / first, third / second] == pytest.approx([0.7, 0.7, 0.7], abs=0.05)


@pytest.mark.parametrize(("buckets", "milliseconds_of_drafts"), [((), 36), ((8,), 53)])
def test_a_step_with_drafts_takes_the_time_of_a_prompt_of_its_tokens(
    buckets: tuple[int, ...], milliseconds_of_drafts: int
) -> None:
    """Four rows of four tokens; compiled for eight rows."""
    times = StepTimes(PhaseTimes(constant(0.01), buckets), PhaseTimes(milliseconds(((8, 25), (24, 47), (40, 59)))))
    run = answered(Guesses(True), [request(f"r{number}", 4, max_tokens=400) for number in range(4)], times)
    uses = {shape: use for shape, use in run.backend.timeline.shapes.items() if shape[0] == "verify"}
    (shape,) = [one for one in uses if one[1] == (buckets or (4,))[0]]
    assert uses[shape].seconds / uses[shape].num_steps == pytest.approx(milliseconds_of_drafts / 1000, rel=0.1)


# The timeline


def test_a_step_starts_at_launch_or_at_the_end_of_the_previous_one() -> None:
    timeline = Timeline()
    assert timeline.busy_share == 0.0
    assert timeline.run(1.0, 2.0) == 3.0
    assert timeline.run(1.5, 2.0) == 5.0
    assert timeline.run(7.0, 1.0) == 8.0
    assert timeline.busy_seconds == 5.0
    assert timeline.busy_share == pytest.approx(5 / 7)


def test_padding_is_the_unused_part_of_a_bucket() -> None:
    times = StepTimes(
        decode=PhaseTimes(milliseconds(((1, 5), (8, 12))), (4, 8)),
        prefill=PhaseTimes(milliseconds(((100, 10),)), (32, 128)),
    )
    backend = SimulatedBackend(
        limits(Options(prefill="whole"), max_sequences=8, max_model_length=200), times, VirtualClock()
    )
    engine = Engine(backend)
    for number in range(3):
        engine.add(request(f"r{number}", 20, max_tokens=3))
    finish(engine)
    prefill = backend.timeline.shapes["prefill", 32]
    assert (prefill.num_steps, prefill.num_used, prefill.num_padded) == (3, 60, 36)
    assert [use.num_used + use.num_padded for at, use in backend.timeline.shapes.items() if at[0] == "decode"] == [
        4 * use.num_steps for at, use in backend.timeline.shapes.items() if at[0] == "decode"
    ]


def test_a_mixed_step_takes_the_time_of_both_phases_and_reports_both_buckets() -> None:
    times = StepTimes(decode=PhaseTimes(constant(0.01), (4,)), prefill=PhaseTimes(constant(0.1), (16,)))
    clock = VirtualClock()
    backend = SimulatedBackend(limits(max_sequences=4, max_step_tokens=8), times, clock)
    engine = Engine(backend)
    engine.add(request("a", 6, max_tokens=9))
    engine.step()
    engine.add(request("b", 6, max_tokens=9))
    seen = set()
    while engine.has_work:
        engine.step()
        if step := engine.stats.last_step:
            seen.add((step.kind.value, round(step.device_seconds, 6)))
    assert seen == {("decode", 0.01), ("mixed", 0.11)}


def test_each_prompt_takes_a_size_of_its_own_unless_phases_mix() -> None:
    for prefill, sizes in (("chunks", {16: 3, 64: 1}), ("mixed", {128: 1})):
        options = Options(prefill=prefill, prefill_buckets=(16, 64))  # type: ignore[arg-type]
        made = replace(limits(options, max_sequences=4, max_step_tokens=128), max_prefill_rows=4)
        backend = SimulatedBackend(made, StepTimes(STEP.decode, PhaseTimes(constant(0.008), (16, 64))), VirtualClock())
        engine = Engine(backend)
        for name, length in (("a", 60), ("b", 5), ("c", 6), ("d", 16)):
            engine.add(request(name, length, max_tokens=2))
        engine.step()
        step = engine.stats.last_step
        assert step is not None
        assert Counter(graph.name for graph in step.graphs) == {f"prefill_{n}": count for n, count in sizes.items()}
        assert sum(graph.num_tokens for graph in step.graphs) == step.num_tokens == 87
        uses = {size: use for (phase, size), use in backend.timeline.shapes.items() if phase == "prefill"}
        assert sum(use.num_used for use in uses.values()) == 87
        if prefill == "chunks":
            assert {size: use.num_steps for size, use in uses.items()} == sizes
            assert {size: use.num_padded for size, use in uses.items()} == {16: 21, 64: 4}


@pytest.mark.parametrize("feedback", ["device", "same rows", "host"])
def test_the_next_step_is_launched_before_the_device_idles(feedback: Any) -> None:
    # 1 ms of host work before each launch: device feedback hides all of it, host feedback puts all of it between two
    # steps of 8 ms, since the result of the step in flight is needed.
    options = Options(token_feedback=feedback)
    backend = SimulatedBackend(limits(options, max_sequences=4), STEP, VirtualClock(), host_seconds_per_step=0.001)
    engine = Engine(backend)
    engine.add(request("r", 4, max_tokens=500))
    finish(engine)
    assert backend.timeline.busy_share == pytest.approx(8 / 9 if feedback == "host" else 1.0, abs=0.002)
    assert backend.timeline.num_steps == pytest.approx(500, abs=1)


@pytest.mark.parametrize("clock", [VirtualClock(), WallClock(), CpuClock()])
def test_clocks_are_monotonic_and_sleep_as_requested(clock: Clock) -> None:
    began = clock.now()
    clock.sleep_until(began + 0.01)
    assert clock.now() >= began + 0.01 - 1e-9  # rounding of the sum of two readings
    now = clock.now()
    clock.sleep_until(began)
    assert clock.now() >= now


def test_the_cpu_clock_excludes_other_processes() -> None:
    clock = CpuClock()
    cpu = time.thread_time()  # first and last, so that pauses between readings do not count
    began = clock.now()
    time.sleep(0.05)
    ended = clock.now()
    assert ended - began <= time.thread_time() - cpu


# Step times


def test_times_are_interpolated_linearly() -> None:
    curve = milliseconds(((10, 5), (20, 10), (40, 12)))
    assert [round(curve.seconds(size) * 1000, 6) for size in (1, 10, 15, 20, 30, 40, 60)] == [5, 5, 7.5, 10, 11, 12, 14]
    assert [milliseconds(((10, 5),)).seconds(size) * 1000 for size in (5, 10, 20)] == [5, 5, 10]
    assert constant(0.008).seconds(1) == constant(0.008).seconds(9000) == 0.008


def test_a_size_runs_in_the_smallest_bucket_that_fits() -> None:
    phase = PhaseTimes(Curve(((1, 1.0), (100, 100.0))), (8, 32))
    assert [phase.bucket(size) for size in (1, 8, 9, 32, 33, 70)] == [8, 8, 32, 32, 64, 96]
    assert PhaseTimes(phase.curve).bucket(9) == 9


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (2, 2.0)), ((3, 1.0), (2, 2.0)), ((1, 0.0),)])
def test_invalid_curves_are_refused(points: Any) -> None:
    with pytest.raises(ValueError, match=r"sizes must|must be positive"):
        Curve(points)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_table_gives_increasing_times(name: str) -> None:
    times = step_times(Options(step_times=name))
    for curve, sizes in ((times.decode.curve, (1, 8, 32, 64)), (times.prefill.curve, (1, 128, 1000, 4096, 8192))):
        seconds = [curve.seconds(size) for size in sizes]
        assert seconds == sorted(seconds)
        assert 0.001 < seconds[0] < seconds[-1] < 10
    assert PUBLISHED[name].source


# As the backend of a served model


@pytest.mark.parametrize(
    ("given", "path", "says"),
    [
        ({"speed": 9}, ".speed", "no such setting"),
        ({"stepMilliseconds": "8"}, ".stepMilliseconds", "Expected `float"),
        ({"stepMilliseconds": 0}, ".stepMilliseconds", "must be positive"),
        ({"stepMilliseconds": 8, "stepTimes": "x"}, ".stepMilliseconds", "cannot be combined"),
        ({"stepTimes": "tpu"}, ".stepTimes", "llama-3.1-8b-trn2-tp4"),
        ({"decodeMilliseconds": [[4, 1], [2, 1]]}, ".decodeMilliseconds", "in ascending order"),
        ({"decodeMilliseconds": [4]}, ".decodeMilliseconds[0]", "Expected `array`"),
        ({"prefillBuckets": [128, 64]}, ".prefillBuckets", "ascending"),
        ({"prefill": "never"}, ".prefill", "Invalid enum value 'never': must be one of `"),
    ],
)
def test_invalid_settings_are_named(given: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_options(given)
    assert caught.value.field == f"$.overrideNeuronConfig{path}"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "other", "field"),
    [
        ({"max_model_length": 1001}, {}, "$.limits.maxModelLength"),
        ({"num_blocks": 3}, {}, "$.limits.numBlocks"),
        ({"block_size": 4}, {"layout": "slots"}, "$.layout"),
        ({"max_step_tokens": 3, "max_sequences": 9}, {}, "$.limits.maxStepTokens"),
    ],
)
def test_invalid_limits_are_named(wanted: dict[str, int], other: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        limits_of(config(EngineLimits(**wanted), **other), Options(), vocabulary_size=9, longest=1000)
    assert caught.value.field == field


def test_contiguous_limits_match_a_compiled_model_with_cache_lines() -> None:
    made = limits(Options(prefill="whole"), max_sequences=4, max_model_length=128)
    assert made.layout == "slots"
    assert (made.mixes_phases, made.chunks_prefill, made.decodes_all_live_rows) == (False, False, True)
    assert made.longest_prefill == 128
    assert limits(Options(prefill="whole"), block_size=8).layout == "blocks"
    assert limits(max_sequences=4).shares_prefixes


@pytest.mark.parametrize(
    ("prefill", "asked", "field"),
    [
        ("mixed", {"prefix_caching": "enabled", "layout": "slots"}, "$.prefixCaching"),
        ("whole", {"chunked_prefill": "enabled"}, "$.chunkedPrefill"),
        ("mixed", {"chunked_prefill": "disabled"}, "$.chunkedPrefill"),
    ],
)
def test_unsupported_switches_are_refused_by_name(prefill: Any, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        limits_of(config(EngineLimits(), **asked), Options(prefill=prefill), vocabulary_size=9, longest=1000)
    assert caught.value.field == field


def test_supported_switches_are_applied() -> None:
    plain = limits_of(config(EngineLimits(), prefix_caching="disabled"), Options(), vocabulary_size=9, longest=1000)
    assert not plain.shares_prefixes
    asked = config(EngineLimits(), prefix_caching="enabled", chunked_prefill="enabled")
    made = limits_of(asked, Options(), vocabulary_size=9, longest=1000)
    assert (made.shares_prefixes, made.chunks_prefill) == (True, True)
    whole = config(EngineLimits(), prefix_caching="enabled", chunked_prefill="disabled")
    made = limits_of(whole, Options(prefill="whole"), vocabulary_size=9, longest=1000)
    assert (made.layout, made.shares_prefixes, made.chunks_prefill) == ("blocks", True, False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A chat model without weights."""
    folder = write_chat_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    return folder


def test_a_model_without_weights_generates(model: Path) -> None:
    with LLM(str(model), backend="simulated", override_neuron_config={"stepMilliseconds": 0.01}) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        together = llm.generate(["one", "two", "three"], params, use_tqdm=False)
        alone = llm.generate("two", params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in together] == [12, 12, 12]
    assert alone[0].outputs[0].token_ids == together[1].outputs[0].token_ids


def test_limits_are_derived_from_the_model(model: Path) -> None:
    backend = load_backend(model, config(), lambda stage, share: None)
    assert backend.limits.vocabulary_size > 256
    assert backend.limits.max_model_length <= 4096


@pytest.mark.parametrize("mode", SAMPLING_MODES)
def test_the_mode_decides_what_a_simulated_device_samples(model: Path, mode: Any) -> None:
    limits = load_backend(model, config(sampling=mode), lambda stage, share: None).limits
    on_host = mode == "Host"
    assert (limits.sampling, limits.max_top_k) == (mode, 0 if on_host else MAX_TOP_K)
    assert limits.top_p_keeps_crossing is limits.reports_prompt_logprobs is on_host
    assert bool(limits.max_logprobs) is (mode != "Device")
    asks = replace(Sampling(), seed=1, seeded=True)
    assert needs_host(asks, limits) is (mode == "DeviceWithLogits")


def test_the_simulated_backend_serves_over_http(model: Path) -> None:
    settings = '{"stepMilliseconds": 1}'
    with serve(str(model), "--backend", "simulated", "--port", "0", "--override-neuron-config", settings) as command:
        url = command.until_ready()
        body = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
        assert answer["usage"]["completion_tokens"] == 20
        assert command.end() == 0


def test_an_invalid_setting_is_refused_before_a_port_opens(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", str(model), "--backend", "simulated", "--override-neuron-config"]
    assert main([*arguments, '{"speed": 9}']) == 2
    reported = capsys.readouterr().err
    assert (
        "--override-neuron-config ($.overrideNeuronConfig.speed): the simulated backend has no such setting" in reported
    )
    assert main([*arguments, "{"]) == 2
    assert "is not JSON" in capsys.readouterr().err
