"""Simulated traffic: results are reproducible, virtual time is exact, and policies differ as documented."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from neuron_runtime.backend.neuron.devices import PLATFORMS, Target
from neuron_runtime.backend.nxdi.graph_plan import GraphPlan, plan_of
from neuron_runtime.backend.nxdi.inputs import Inputs
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.backend.simulated.device import ShapeUse, VirtualClock
from neuron_runtime.backend.simulated.step_times import PhaseTimes, StepTimes, constant, milliseconds
from neuron_runtime.bench import simulated_tables
from neuron_runtime.bench.device import device_of, powers_of_two
from neuron_runtime.bench.planned import PlannedBackend, limits_of_plan
from neuron_runtime.bench.report import percentile
from neuron_runtime.bench.simulate import group_seconds
from neuron_runtime.bench.simulated_tables import Run, Targets
from neuron_runtime.bench.simulation import PREFILL_FIRST, VLLM_NEURON, Outcome, Policy, Simulation, Timed
from neuron_runtime.bench.traffic import Conversation, Traffic, Turn, conversations
from neuron_runtime.commands.command_line import build_parser, main
from neuron_runtime.config import parse_config
from neuron_runtime.core import BackendLimits, Batch, Request, Sampling, name_of_step
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import InvalidConfig

TRAFFIC = Traffic(
    rate=4.0,
    short_prompt=(20, 100),
    long_prompt=(600, 900),
    long_share=0.2,
    answer=(20, 100),
    turns=1.0,
    follow_up=(5, 20),
    think_seconds=2.0,
    system_tokens=0,
)
LENGTH = 1024
TIMES = StepTimes(
    decode=PhaseTimes(milliseconds(((8, 10),)), (8,)),
    prefill=PhaseTimes(milliseconds(((100, 10), (1000, 90))), (128, 1024)),
)
OURS = Policy("ours")


def limits(**other: Any) -> BackendLimits:
    return BackendLimits(
        **{
            "max_rows": 8,
            "max_model_length": LENGTH,
            "max_step_tokens": LENGTH,
            "block_size": 16,
            "num_blocks": 8 * LENGTH // 16,
            "mixes_phases": False,
            "chunks_prefill": False,
            "vocabulary_size": 128_256,
            "steps_in_flight": 2,
            "token_feedback": "device",
            **other,
        }
    )


def outcome(
    policy: Policy = OURS, traffic: Traffic = TRAFFIC, seconds: float = 40.0, host: float = 0.0, **other: Any
) -> Outcome:
    talks = conversations(traffic, 1, LENGTH)
    device = limits(**other)
    return Simulation(
        talks, device, TIMES, policy, warm_up_seconds=10.0, seconds=seconds, host_seconds_per_step=host
    ).run()


def one_talk(*turns: Turn, begins: float = 0.0) -> Conversation:
    return Conversation(begins, False, turns)


# Traffic


def test_traffic_depends_on_the_seed_alone() -> None:
    def first(seed: int) -> list[Conversation]:
        return list(islice(conversations(replace(TRAFFIC, turns=3.0), seed, LENGTH), 50))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_traffic_matches_the_requested_averages() -> None:
    traffic = replace(TRAFFIC, turns=3.0, system_tokens=7)
    talks = list(islice(conversations(traffic, 0, 10**6), 3000))
    num_turns = sum(len(talk.turns) for talk in talks)
    assert num_turns / len(talks) == pytest.approx(3.0, rel=0.1)
    assert num_turns / talks[-1].begins == pytest.approx(4.0, rel=0.1)
    assert sum(talk.long for talk in talks) / len(talks) == pytest.approx(0.2, rel=0.15)
    pauses = [turn.think_seconds for talk in talks for turn in talk.turns[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.1)
    for talk in talks:
        low, high = traffic.long_prompt if talk.long else traffic.short_prompt
        assert low <= len(talk.turns[0].token_ids) - 7 <= high
        assert all(5 <= len(turn.token_ids) <= 20 for turn in talk.turns[1:])
        assert all(20 <= turn.answer_tokens <= 100 for turn in talk.turns)
    assert len({talk.turns[0].token_ids[:7] for talk in talks}) == 1
    assert len({talk.turns[0].token_ids for talk in talks}) == len(talks)


def test_requests_that_exceed_the_model_length_are_not_generated() -> None:
    for talk in islice(conversations(replace(TRAFFIC, turns=9.0, system_tokens=300), 0, 500), 300):
        assert sum(len(turn.token_ids) + turn.answer_tokens for turn in talk.turns) <= 500


# Virtual time, counted


def test_one_request_takes_the_expected_steps() -> None:
    talks = iter([one_talk(Turn((5,) * 100, 4, 0.0), begins=1.0)])
    (asked,) = Simulation(talks, limits(), TIMES, OURS, warm_up_seconds=0.0, seconds=10.0).run().requests
    # A prompt of 100 tokens in the bucket of 128, then three steps of 10 ms.
    prefill = TIMES.prefill.seconds(100)
    assert prefill == pytest.approx(0.010 + 0.080 * 28 / 900)
    assert asked == Timed(
        arrived=1.0,
        long=False,
        num_prompt=100,
        first=1.0 + prefill,
        last=pytest.approx(1.03 + prefill),
        worst_gap=pytest.approx(0.01),
        num_cached=0,
    )


def test_a_follow_up_arrives_after_its_pause_with_the_whole_conversation() -> None:
    talks = iter(
        [one_talk(Turn((5,) * 64, 16, 0.0), Turn((6,) * 8, 2, 3.0)), one_talk(Turn((1,), 1, 0.0), begins=99.0)]
    )
    run = Simulation(talks, limits(shares_prefixes=True), TIMES, OURS, warm_up_seconds=0.0, seconds=10.0).run()
    first, second = run.requests
    assert second.arrived == pytest.approx(first.last + 3.0)
    assert second.num_prompt == 64 + 16 + 8
    assert second.num_cached == 64  # the last answer token was never fed, so the fifth block is not full
    assert run.cached_share == pytest.approx(64 / (64 + 88))
    assert run.num_tokens == 18


def test_only_requests_of_the_measured_interval_count_and_all_are_completed() -> None:
    run = outcome(traffic=replace(TRAFFIC, rate=9.0), seconds=20.0)
    assert all(10.0 <= asked.arrived < 30.0 for asked in run.requests)
    assert max(asked.last for asked in run.requests) > 30.0
    assert len(run.requests) == pytest.approx(180, rel=0.25)
    assert all(0.0 <= moment < 20.0 for moment, _ in run.queue)
    assert run.busy_share <= 1.0
    assert run.mean_queue > 0.0


def test_an_overload_ends_without_running_forever() -> None:
    num_taken = 0

    def counted() -> Iterator[Conversation]:
        nonlocal num_taken
        for talk in conversations(replace(TRAFFIC, rate=100.0), 1, LENGTH):
            num_taken += 1
            yield talk

    run = Simulation(counted(), limits(), TIMES, OURS, warm_up_seconds=0.0, seconds=5.0).run()
    assert max(asked.last for asked in run.requests) > 30.0
    assert len(run.requests) < num_taken
    # Nearly all requests were measured: almost none were added after the measured interval.
    num_prefilled = sum(use.num_used for (phase, _), use in run.shapes.items() if phase == "prefill")
    assert num_prefilled <= 1.05 * sum(asked.num_prompt for asked in run.requests)


def test_the_same_traffic_gives_the_same_result() -> None:
    assert outcome(seconds=20.0) == outcome(seconds=20.0)


def test_host_work_adds_to_virtual_time() -> None:
    talks = [Turn((5,) * 100, 50, 0.0)]

    def last(host: float, **other: Any) -> float:
        traffic = iter([one_talk(*talks)])
        run = Simulation(
            traffic, limits(**other), TIMES, OURS, warm_up_seconds=0.0, seconds=9.0, host_seconds_per_step=host
        ).run()
        return run.requests[0].last

    host_fed = {"steps_in_flight": 1, "token_feedback": "host"}
    # Device feedback hides it behind the steps, except for the first; host feedback adds it to every step.
    assert last(0.002) - last(0.0) == pytest.approx(0.002)
    assert last(0.002, **host_fed) - last(0.0, **host_fed) == pytest.approx(0.100)


# The policies


@pytest.mark.parametrize("rate", [6.0, 9.0])
def test_long_prompts_delay_running_answers_within_the_bound_of_the_engine(rate: float) -> None:
    traffic = replace(TRAFFIC, rate=rate)
    ours, other = outcome(traffic=traffic), outcome(PREFILL_FIRST, traffic)
    longest = TIMES.prefill.seconds(LENGTH) + TIMES.decode.seconds(8)
    assert ours.gap_bound == pytest.approx(longest)
    assert max(ours.gaps) == pytest.approx(longest)
    assert max(other.gaps) >= 2 * TIMES.prefill.seconds(LENGTH)
    assert other.gap_bound is None
    ours_p99, other_p99 = (percentile(run.gaps, 0.99) for run in (ours, other))
    assert ours_p99 is not None
    assert other_p99 is not None
    assert ours_p99 <= other_p99
    assert ours.num_good(9.0, longest + 1e-6) == len(ours.requests)
    assert other.num_good(9.0, longest + 1e-6) < len(other.requests)


def test_more_consecutive_prefills_lengthen_gaps_and_shorten_first_tokens() -> None:
    traffic = replace(TRAFFIC, rate=7.0)
    runs = [outcome(Policy(str(count), count), traffic) for count in (1, 2, 4)]
    worst = [max(run.gaps) for run in runs]
    assert worst == sorted(worst)
    assert worst[0] < worst[-1]
    assert all(max(run.gaps) <= (run.gap_bound or 0) + 1e-9 for run in runs)


def test_shared_prefixes_are_computed_once() -> None:
    traffic = replace(TRAFFIC, turns=4.0, system_tokens=200)
    plain, shared = (outcome(traffic=traffic, shares_prefixes=shares) for shares in (False, True))
    assert plain.cached_share == 0.0
    assert shared.cached_share > 0.5

    def p99(run: Outcome) -> float:
        return percentile([asked.ttft for asked in run.requests], 0.99) or 0.0

    assert p99(shared) < p99(plain)


def test_mixed_steps_keep_gaps_as_short_as_a_chunk() -> None:
    device = {"mixes_phases": True, "chunks_prefill": True, "max_step_tokens": 128, "max_prefill_rows": 4}
    mixed, other = outcome(OURS, **device), outcome(PREFILL_FIRST, **device)
    assert max(mixed.gaps) <= TIMES.prefill.seconds(128) + TIMES.decode.seconds(8) + 1e-9
    assert max(other.gaps) > max(mixed.gaps)


def test_the_plugin_prefills_one_prompt_at_a_time_while_all_answers_wait() -> None:
    traffic = replace(TRAFFIC, rate=8.0)
    ours, plugin = outcome(traffic=traffic), outcome(VLLM_NEURON, traffic)
    longest = TIMES.prefill.seconds(LENGTH) + TIMES.decode.seconds(8)
    assert max(plugin.gaps) > 2 * longest
    assert plugin.goodput(2.0, longest + 1e-6) < ours.goodput(2.0, longest + 1e-6)
    # One whole prompt per step: the shapes are those of whole prompts, as many as there were requests.
    chunked = outcome(VLLM_NEURON, traffic, chunks_prefill=True, mixes_phases=True, max_step_tokens=64)
    assert chunked.shapes == plugin.shapes


def test_the_plugin_waits_for_the_tokens_of_a_step_before_the_next() -> None:
    ours, plugin = outcome(host=0.005), outcome(VLLM_NEURON, host=0.005)
    decode = TIMES.decode.seconds(8)
    assert percentile(sorted(ours.gaps), 0.5) == pytest.approx(decode)
    assert percentile(sorted(plugin.gaps), 0.5) == pytest.approx(decode + 0.005)


def test_the_plugin_runs_no_more_requests_than_blocks_for_their_full_length_allow() -> None:
    few = limits(num_blocks=3 * LENGTH // 16 + 5)
    assert VLLM_NEURON.applied_to(few).max_rows == 3
    assert OURS.applied_to(few).max_rows == 8


# Figures


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_a_percentile_is_exceeded_by_at_most_the_remaining_share(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected
    assert percentile([], share) is None


def test_the_table_shows_the_counts_of_the_run() -> None:
    run = Outcome(
        policy=OURS,
        seconds=10.0,
        requests=[
            Timed(0.0, False, 100, first=1.0, last=2.0, worst_gap=0.2, num_cached=25),
            Timed(1.0, True, 300, first=4.0, last=5.0, worst_gap=0.1, num_cached=75),
            Timed(2.0, False, 100, first=2.5, last=3.0, worst_gap=0.4),
        ],
        gaps=[0.1] * 98 + [0.2, 0.4],
        queue=[(0.0, 2), (4.0, 0), (5.0, 6)],
        num_tokens=50,
        busy_share=0.5,
        shapes={("decode", 8): ShapeUse(num_steps=3, num_used=12, num_padded=12, seconds=1.0)},
        num_preemptions=3,
        gap_bound=0.45,
    )
    rows = {row.name.strip(): row.values[0] for row in simulated_tables._figures([run], Targets(2.0, 0.3))}
    assert rows == {
        "time to first token, p50": 1000.0,
        "time to first token, p99": 3000.0,
        "of long prompts, p99": 3000.0,
        "gap between tokens, p50": 100.0,
        "gap between tokens, p99": 200.0,
        "gap between tokens, worst": 400.0,
        "bound by the engine": 450.0,
        "good requests": pytest.approx(100 / 3),
        "goodput": pytest.approx(0.1),
        "throughput": 5.0,
        "prompt tokens from the cache": pytest.approx(20.0),
        "requests waiting, mean": pytest.approx((2 * 4 + 6 * 5) / 10),
        "requests waiting, max": 6,
        "preemptions": 3,
        "device busy": 50.0,
        "padding": 50.0,
    }


def test_padding_is_weighted_by_time() -> None:
    run = outcome(seconds=10.0)
    seconds = sum(use.seconds for use in run.shapes.values())
    padding = sum(use.seconds * use.num_padded / (use.num_padded + use.num_used) for use in run.shapes.values())
    *_, last = simulated_tables._figures([run], Targets(1, 1))
    assert (last.name, last.values) == ("padding", (pytest.approx(padding / seconds * 100),))
    (table,) = [table for table in simulated_tables.tables(Run(1.0, [run]), Targets(1, 1)) if "sizes" in table.title]
    assert [row.name for row in table.rows] == ["decode, 8 rows", "prefill, 128 tokens", "prefill, 1024 tokens"]


# The graphs of a plan

MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512,
    "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "slots": {"buckets": {"context": [128, 512, 1024], "tokenGeneration": [256, 1024]}},
    "row buckets": {"buckets": {"context": [128, 1024], "tokenGeneration": [512, 1024], "sequences": [2, 8]}},
    "asynchronous": {"buckets": {"context": [128, 1024], "tokenGeneration": [256, 1024]}, "asyncMode": True},
    "blocks": {
        "layout": "blocks", "prefixCaching": "enabled",
        "buckets": {"context": [128, 256], "prefix": [256, 896], "tokenGeneration": [256, 1024]},
    },
}  # fmt: skip


DRAFTED: dict[str, Any] = {
    "layout": "slots", "sampling": "Host", "speculation": {"method": "NGram", "numTokens": 3}, **SIZES["slots"]
}  # fmt: skip


def planned(**more: Any) -> GraphPlan:
    document = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "nxdi", "compile": True}
    limits = {"maxSequences": 8, "maxModelLength": 1024}
    config = parse_config(json.dumps({**document, "limits": limits, **more}).encode())
    return plan_of(config, MODEL, Target(PLATFORMS["trn2"], 2, 4))


def plan_file(folder: Path, **more: Any) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(planned(**more).document()))
    return path


class Recorded(PlannedBackend):
    """What ran, beside what the scheduler asked for."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, replace(limits_of_plan(settings), vocabulary_size=128_256), TIMES, VirtualClock())
        self.inputs, self.seen = Inputs(settings, self.limits), Counter[str]()

    def launch(self, batch: Batch) -> None:
        expected = name_of_step(graph.name for graph in self.inputs.graphs(batch))
        self.inputs.apply(batch)
        assert self.graph(batch) == expected, batch
        self.seen[expected] += 1
        super().launch(batch)


@pytest.mark.parametrize("name", SIZES)
def test_a_planned_device_runs_the_graphs_that_the_backend_of_the_plan_would_run(name: str) -> None:
    settings = planned(**SIZES[name]).settings
    device = Recorded(settings)
    engine = Engine(device, clock=VirtualClock().now)
    random = Random(1)
    text = [random.randrange(1000) for _ in range(1000)]
    for number in range(40):
        length = random.choice((1, 2, 100, 127, 128, 300, 600, 900))
        common = random.choice((0, length // 2, length))
        prompt = (*text[:common], *(random.randrange(1000) for _ in range(length - common)))
        engine.add(Request(str(number), prompt, Sampling(max_tokens=random.choice((1, 20, 90)), seed=number)))
        for _ in range(random.choice((0, 3, 30))):
            engine.step()
    while engine.has_work:
        engine.step()
    assert len(device.seen) > 3


@pytest.mark.parametrize("name", SIZES)
def test_the_table_has_the_waste_of_every_graph_of_a_plan(name: str, tmp_path: Path) -> None:
    path, plan = plan_file(tmp_path, **SIZES[name]), planned(**SIZES[name])
    document = written(tmp_path, "--plan", str(path), flags=TRAFFIC_FLAGS)
    jsonschema.validate(document, SCHEMA)
    traffic, sizes = document["tables"]
    graphs = [row for row in sizes["rows"] if not row["name"].startswith(" ")]
    assert len(graphs) == len(plan.graphs)
    shapes = document["data"]["runs"][0]["policies"][0]["shapes"]
    ran = {tuple(shape.get(key, 0) for key in ("phase", "size", "prefix", "length")) for shape in shapes}
    assert {("prefill", 128, 0, 0), ("decode", 8, 0, 1024)} <= ran
    assert sum(row["values"]["ours"] is None for row in graphs) == len(plan.graphs) - len(shapes)
    (padding,) = [row["values"]["ours"] for row in traffic["rows"] if row["name"] == "padding"]
    assert 0 < padding < 100


def test_positions_without_a_token_are_those_that_rows_read_beyond_their_own() -> None:
    settings = planned(**SIZES["slots"]).settings
    device = Recorded(settings)
    engine = Engine(device, clock=VirtualClock().now)
    engine.add(Request("short", (1,) * 10, Sampling(max_tokens=3)))
    engine.add(Request("long", (1,) * 300, Sampling(max_tokens=2)))
    while engine.has_work:
        engine.step()
    uses = device.timeline.shapes
    # The short one decodes alone and beside the long one, whose position decides the graph.
    assert sum(use.num_used for shape, use in uses.items() if shape[0] == "decode") == 3
    alone, both = uses["decode", 8, 256], uses["decode", 8, 1024]
    assert (alone.num_steps, both.num_steps) == (1, 1)
    assert (alone.num_positions, both.num_positions) == (256, 2 * 1024)
    assert alone.num_filled + both.num_filled == 301 + 11 + 12
    assert both.padded_share == 6 / 8


def test_every_step_of_graphs_that_verify_drafts_takes_the_time_of_a_verification(tmp_path: Path) -> None:
    path = plan_file(tmp_path, **DRAFTED)
    flags = [*TRAFFIC_FLAGS, "--prefill-milliseconds", "32:25", "1000:90"]
    document = written(tmp_path, "--plan", str(path), "--drafts", "3", "--acceptance", "0.9", flags=flags)
    (speeds,) = [table for table in document["tables"] if table["title"] == "Speed by requests at a time"]
    without, with_drafts = (speeds["rows"][0]["values"][name] for name in ("no drafts", "drafts, 90% right"))
    assert without == pytest.approx(1 / 0.025, rel=0.02)
    assert with_drafts / without == pytest.approx(1 + 0.9 + 0.9**2 + 0.9**3, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafts", "3"], "--drafts: is 3, but the graphs of --plan {path} verify 0"),
        (["--max-num-seqs", "4"], "--max-num-seqs: is 4, but --plan {path} has 8: leave out one of them"),
        (["--prefill-buckets", "64"], "--prefill-buckets: is 64, but --plan {path} has 128 512 1024: leave out"),
        (["--layout", "blocks"], "--layout: is blocks, but --plan {path} has slots"),
        (["--prefill", "mixed"], "--prefill: is mixed, but --plan {path} has whole"),
        (["--max-model-len", "2048"], "--max-model-len: is 2048, but --plan {path} has 1024"),
        (["--enable-prefix-caching"], "--enable-prefix-caching: is True, but --plan {path} has False"),
        (["--step-times", "nothing"], "--step-times ($.overrideNeuronConfig.stepTimes): must be one of"),
    ],
)
def test_a_flag_that_contradicts_the_plan_is_refused_with_both(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, **SIZES["slots"])
    assert main(["bench", "simulate", "--plan", str(path), *flags]) == 2
    assert message.format(path=path) in capsys.readouterr().err


def test_a_flag_may_repeat_what_the_plan_says(tmp_path: Path) -> None:
    path = plan_file(tmp_path, **SIZES["slots"])
    repeated = "--max-num-seqs 8 --max-model-len 1024 --layout slots --prefill whole --prefill-buckets 128 512 1024"
    plain, same = (
        written(tmp_path, "--plan", str(path), *flags, flags=TRAFFIC_FLAGS)["data"] for flags in ([], repeated.split())
    )
    assert plain == same


def test_a_policy_of_whole_prompts_needs_a_plan_with_graphs_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["bench", "simulate", "--policy", "vllm-neuron", *TRAFFIC_FLAGS, "--plan"]
    assert main([*flags, str(plan_file(tmp_path, **SIZES["blocks"]))]) == 2
    assert "vllm-neuron computes prompts whole, of up to 1023 tokens" in capsys.readouterr().err
    assert main([*flags, str(plan_file(tmp_path, **SIZES["slots"]))]) == 0


def test_a_file_that_is_no_plan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    for text in ("{}", "text"):
        path.write_text(text)
        assert main(["bench", "simulate", "--plan", str(path)]) == 2
        assert f"--plan: {path} is no plan that" in capsys.readouterr().err
    assert main(["bench", "simulate", "--plan", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


# The command

FLAGS = [
    "--rate", "3", "--seconds", "8", "--warm-up-seconds", "2", "--max-num-seqs", "8", "--max-model-len", "1024",
    "--long-prompt", "600", "900", "--decode-milliseconds", "8:10", "--prefill-milliseconds", "100:10", "1000:90",
]  # fmt: skip

SCHEMA = {
    "type": "object",
    "required": ["version", "command", "options", "versions", "tables", "data"],
    "properties": {
        "command": {"const": "bench simulate"},
        "options": {"type": "object", "required": ["rate", "seed", "device", "limits", "gap_target"]},
        "tables": {"type": "array", "items": {"type": "object", "required": ["title", "rows"]}},
        "data": {
            "type": "object",
            "required": ["runs"],
            "properties": {
                "runs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["rate", "policies"],
                        "properties": {
                            "rate": {"type": "number"},
                            "policies": {
                                "type": "array",
                                "minItems": 2,
                                "maxItems": 3,
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "required": ["name", "num_good", "ttft_seconds", "gap_seconds", "queue", "shapes"],
                                    "properties": {
                                        "name": {"enum": ["ours", "prefill first", "vllm-neuron"]},
                                        "num_requests": {"type": "integer"},
                                        "num_good": {"type": "integer"},
                                        "seconds": {"type": "number"},
                                        "ttft_seconds": {"type": "array", "items": {"type": "number"}, "maxItems": 300},
                                        "gap_seconds": {"type": "array", "items": {"type": "number"}, "maxItems": 300},
                                        "queue": {"type": "array", "maxItems": 300},
                                        "shapes": {"type": "array", "items": {"required": ["phase", "size", "steps"]}},
                                    },
                                },
                            },
                        },
                    },
                }
            },
        },
    },
}


TRAFFIC_FLAGS = [
    "--rate", "5", "--seconds", "8", "--warm-up-seconds", "2", "--long-prompt", "600", "900",
    "--decode-milliseconds", "8:10", "--prefill-milliseconds", "100:10", "1000:90",
]  # fmt: skip


def written(folder: Path, *more: str, flags: list[str] | None = None) -> dict[str, Any]:
    path = folder / "out.json"
    assert main(["bench", "simulate", *(flags or FLAGS), "--json", str(path), *more]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_the_command_writes_identical_json_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = written(tmp_path)
    jsonschema.validate(document, SCHEMA)
    printed = capsys.readouterr().out
    assert "Simulated traffic, 3 requests/s" in printed
    assert "gap between tokens, worst" in printed
    assert written(tmp_path) == document
    assert written(tmp_path, "--seed", "7")["data"] != document["data"]


@pytest.mark.parametrize("rates", [["3"], ["2", "4"]])
def test_the_plot_shows_tails_and_good_requests_over_the_rate(rates: list[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    written(tmp_path, "--plot", str(plot), "--rate", *rates)
    drawn = plot.read_text()
    assert drawn.count('<g id="axes_') == 3
    wide, thin = drawn.index("stroke-width: 5"), drawn.index("stroke: #1f77b4; stroke-width: 1.5")
    assert wide < thin, "where both are equal, the thin line is above the wide one"


def test_our_policy_is_compared_with_those_that_are_asked_for(tmp_path: Path) -> None:
    document = written(tmp_path, "--policy", "vllm-neuron", "prefill-first", "--rate", "2", "4")
    (first, _) = document["data"]["runs"]
    assert [one["name"] for one in first["policies"]] == ["ours", "vllm-neuron", "prefill first"]
    (alone,) = written(tmp_path, "--policy", "vllm-neuron")["data"]["runs"]
    assert [one["name"] for one in alone["policies"]] == ["ours", "vllm-neuron"]


def test_drafts_that_are_right_are_compared_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here a verification takes 15 ms instead of 10: right drafts pay, wrong ones are not made."""
    times = ("--prefill-milliseconds", "32:10", "40:15", "1000:90")
    plot = tmp_path / "plot.svg"
    document = written(tmp_path, *times, "--drafts", "4", "--acceptance", "0.02", "0.9", "--plot", str(plot))
    (run,) = document["data"]["runs"]
    names = ["ours", "drafts, 2% right", "drafts, 90% right", "prefill first"]
    assert [one["name"] for one in run["policies"]] == names
    (speeds,) = [table for table in document["tables"] if table["title"] == "Speed by requests at a time"]
    assert [row["name"] for row in speeds["rows"]] == ["1 request", *(f"{n} requests" for n in (2, 4, 8))]
    for row in speeds["rows"]:
        without, wrong, right = row["values"].values()
        assert without == pytest.approx(100 * int(row["name"].split()[0]), rel=0.02)
        assert wrong > 0.97 * without
        assert right > 2.3 * without
    assert "verification of drafts, 8 rows" in capsys.readouterr().out
    assert plot.read_text().count('<g id="axes_') == 4


def test_a_model_that_makes_drafts_takes_its_time(tmp_path: Path) -> None:
    """Four steps of a tenth beside a verification of 15 ms, and none of a model that is as slow as the one it helps."""
    times = ("--prefill-milliseconds", "32:10", "40:15", "1000:90")
    shares, costs = ("--acceptance", "0.9", "0.9", "0.9"), ("--draft-cost", "0", "0.1", "1")
    document = written(tmp_path, *times, "--drafts", "4", *shares, *costs)
    (speeds,) = [table for table in document["tables"] if table["title"] == "Speed by requests at a time"]
    for row in speeds["rows"]:
        without, free, cheap, dear = row["values"].values()
        assert cheap / free == pytest.approx(15 / (15 + 4), rel=0.05)
        assert 0.97 * without < dear < 1.01 * without
    (run,) = document["data"]["runs"]
    names = ["drafts, 90% right", "drafts, 90% right, cost 0.1", "drafts, 90% right, cost 1"]
    assert [one["name"] for one in run["policies"]][1:-1] == names
    (first,) = [table for table in document["tables"] if table["title"].startswith("Simulated traffic")]
    (waits,) = [row for row in first["rows"] if row["name"] == "time to first token, p50"]
    _, free, cheap, *_ = waits["values"].values()
    assert cheap > free, "it computes prompts, too"


def test_groups_of_several_sizes_are_compared_under_the_same_traffic(tmp_path: Path) -> None:
    """64 ranks cost the host a millisecond or two, which shows where a step waits for the tokens of the one before."""
    flags = ("--policy", "prefill-first", "--ranks", "1", "64", "--token-feedback", "host")
    (run,) = written(tmp_path, *flags)["data"]["runs"]
    alone, group, _ = run["policies"]
    assert [one["name"] for one in run["policies"]] == ["ours", "64 ranks", "prefill first"]
    slower = group["gap_seconds"][0] - alone["gap_seconds"][0]
    assert slower == pytest.approx(group_seconds(64) - group_seconds(1), abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rate", "0"], "--rate: must be positive, got 0"),
        (["--rate", "nan"], "--rate: must be positive"),
        (["--seconds", "-1"], "--seconds: must be positive"),
        (["--seconds", "0.001"], "--seconds: no request arrived"),
        (["--turns", "0.5"], "--turns: must be at least 1"),
        (["--warm-up-seconds", "-1"], "--warm-up-seconds: must be at least 0"),
        (["--long-share", "2"], "--long-share: must be from 0 to 1"),
        (["--acceptance", "0.5", "1.5"], "--acceptance: must be from 0 to 1, got 1.5"),
        (
            ["--acceptance", "0.5", "0.7", "0.9", "--draft-cost", "0", "0.1"],
            "--draft-cost: must be one number, or as many as --acceptance has (3), got 2",
        ),
        (["--drafts", "-1"], "--drafts: must be at least 0"),
        (["--answer", "9", "3"], "--answer: must be MIN MAX with 1 <= MIN <= MAX, got 9 3"),
        (["--answer", "0", "3"], "--answer: must be MIN MAX"),
        (["--max-consecutive-prefills", "0"], "--max-consecutive-prefills: must be at least 1"),
        (
            ["--step-times", "tpu"],
            "--step-times ($.overrideNeuronConfig.stepTimes): must be one of llama",
        ),
        (
            ["--step-milliseconds", "8"],
            "--step-milliseconds ($.overrideNeuronConfig.stepMilliseconds): cannot be combined with other times",
        ),
        (
            ["--decode-milliseconds", "8:1", "4:1"],
            "$.overrideNeuronConfig.decodeMilliseconds): sizes must be positive and in ascending order",
        ),
        (
            ["--prefill-buckets", "128", "512"],
            "--prefill-buckets ($.overrideNeuronConfig.prefillBuckets): the largest must fit a prompt of 1023 tokens",
        ),
        (
            ["--prefill-buckets", "9", "8"],
            "--prefill-buckets ($.overrideNeuronConfig.prefillBuckets): must be positive and in ascending order",
        ),
        (["--max-num-seqs", "-1"], "--max-num-seqs ($.limits.maxSequences): Expected `int` >= 0, got -1"),
        (
            ["--max-num-batched-tokens", "9", "--prefill", "mixed", "--max-num-seqs", "32"],
            "--max-num-batched-tokens ($.limits.maxStepTokens): 9",
        ),
        (
            ["--num-gpu-blocks-override", "3", "--layout", "blocks"],
            "--num-gpu-blocks-override ($.limits.numBlocks): one sequence of",
        ),
        (["--layout", "slots", "--block-size", "4"], "--layout ($.layout): layout slots has no blocks"),
        (["--layout", "slots", "--enable-prefix-caching"], "--enable-prefix-caching ($.prefixCaching): "),
    ],
)
def test_an_impossible_value_is_refused_naming_the_flag(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["bench", "simulate", *FLAGS, *flags]))
    assert ended.value.code == 2
    stderr = capsys.readouterr().err.splitlines()[-1]
    assert says in stderr


@pytest.mark.parametrize("point", ["8", "a:1", "8:x", ":"])
def test_a_malformed_point_is_refused_with_an_example(point: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "simulate", "--decode-milliseconds", point])
    assert "is not SIZE:MILLISECONDS, such as 64:12.5" in capsys.readouterr().err


def parsed(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "simulate", *flags])


def test_the_default_device_uses_the_measured_times() -> None:
    device = device_of(parsed("--step-times", "llama-3-70b-trn1-tp32"))
    assert (device.limits.max_rows, device.limits.max_model_length, device.limits.layout) == (4, 4096, "slots")
    assert device.times.decode.buckets == (4,)
    assert device.times.prefill.buckets == (128, 256, 512, 1024, 2048, 4096)
    assert device_of(parsed()).settings["stepTimes"] == "llama-3.1-8b-trn2-tp4"


def test_own_times_replace_the_published_ones() -> None:
    device = device_of(parsed("--decode-milliseconds", "1:6", "64:20", "--prefill-milliseconds", "128:15", "4096:150"))
    assert device.times.decode.curve.seconds(64) == pytest.approx(0.020)
    assert device.limits.max_rows == 32
    whole = device_of(parsed("--step-milliseconds", "5", "--decode-buckets", "0", "--prefill-buckets", "0"))
    assert (whole.times.decode.buckets, whole.times.prefill.buckets) == ((), ())
    assert whole.times.decode.curve == constant(0.005)


def test_prefix_caching_is_on_by_default() -> None:
    assert device_of(parsed("--layout", "blocks")).limits.shares_prefixes
    assert device_of(parsed("--enable-prefix-caching")).limits.layout == "blocks"
    assert not device_of(parsed("--layout", "blocks", "--no-enable-prefix-caching")).limits.shares_prefixes
    with pytest.raises(InvalidConfig, match="--enable-prefix-caching"):
        device_of(parsed("--enable-prefix-caching", "--layout", "slots"))


def test_default_buckets_are_powers_of_two_and_the_maximum() -> None:
    assert powers_of_two(100) == [100]
    assert powers_of_two(128) == [128]
    assert powers_of_two(3000) == [128, 256, 512, 1024, 2048, 3000]
