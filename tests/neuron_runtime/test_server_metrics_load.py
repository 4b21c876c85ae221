"""Every documented metric after a load with known numbers: real processes, a real model, real HTTP."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.scripted_load import BLOCK_SIZE, NUM_BLOCKS, Scrape, ScriptedLoad, run_against_a_server

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
DOCUMENTED = {
    name: kind
    for name, kind in re.findall(r"^\| `([a-z0-9_:]+)` \| (counter|gauge|histogram) \|", DOCS.read_text(), re.MULTILINE)
    # The latter exist only on a device.
    if not name.startswith(("neuron_operator_", "neuron_serving_neuron_"))
}


@pytest.fixture(scope="module")
def load() -> ScriptedLoad:
    return run_against_a_server()


Check = Callable[[ScriptedLoad, Scrape, str], None]


def is_(expected: Callable[[ScriptedLoad], float]) -> Check:
    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        assert last.total(name) == pytest.approx(expected(load))

    return check


def by(label: str, expected: Callable[[ScriptedLoad], dict[str, int]]) -> Check:
    """Sums by the value of the label; unnamed ones are 0."""

    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        found: Counter[str] = Counter()
        for (n, labels), value in last.values.items():
            if n == name:
                found[dict(labels)[label]] += int(value)
        assert {key: value for key, value in found.items() if value} == expected(load)

    return check


def info(**labels: str) -> Check:
    """One series with these labels and a timestamp or 1 as its value."""

    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        ((found, value),) = [(dict(have), value) for (n, have), value in last.values.items() if n == name]
        assert found == labels
        # Values of the engine that replaced the killed one.
        assert value == 1 or load.began_at < value <= time.time()

    return check


def rises(peak: float) -> Check:
    """A gauge that reached its peak and is 0 at the end."""

    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        assert max(scrape.total(name) for scrape in load.scrapes) == peak
        assert last.total(name) == 0

    return check


def between(low: Callable[[ScriptedLoad], float], high: Callable[[ScriptedLoad], float]) -> Check:
    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        assert low(load) <= last.total(name) <= high(load)

    return check


def times(count: Callable[[ScriptedLoad], float], at_most: Callable[[ScriptedLoad], float] | None = None) -> Check:
    """A histogram of durations: this many, none longer than the load."""

    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        observed = last.total(f"{name}_count")
        assert count(load) <= observed <= (at_most or count)(load)
        assert last.total(f"{name}_bucket", le="+Inf") == observed
        assert 0 < last.total(f"{name}_sum") < observed * load.seconds

    return check


def sizes(expected: Callable[[ScriptedLoad], list[int]], cut_off: bool = False) -> Check:
    """A histogram of counts: these values, and for interrupted answers values from 1 to their limits."""

    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        known, unknown = expected(load), load.expected.cut_off if cut_off else []
        assert last.total(f"{name}_count") == len(known) + len(unknown)
        assert sum(known) + len(unknown) <= last.total(f"{name}_sum") <= sum(known) + sum(unknown)
        for bound in (5, 20):
            below = last.total(f"{name}_bucket", le=f"{bound}.0")
            certain = sum(number <= bound for number in known)
            assert certain <= below <= certain + len(unknown)

    return check


PROCESSES = {"supervisor", "engine", "front-end"}


def each_process(plausible: Callable[[float], bool]) -> Check:
    """One series per process of the command."""

    def check(load: ScriptedLoad, last: Scrape, name: str) -> None:
        found = {dict(labels)["process"]: value for (n, labels), value in last.values.items() if n == name}
        assert found.keys() == PROCESSES
        assert all(map(plausible, found.values())), found

    return check


def num_requests(load: ScriptedLoad) -> int:
    return len(load.expected.prompts)


def fed(load: ScriptedLoad) -> int:
    """Minimum of tokens fed to steps: every prompt once, every token of an answer except the last."""
    expected = load.expected
    return sum(expected.prompts) - expected.prefix_hits + sum(expected.answers) - len(expected.answers)


def fed_at_most(load: ScriptedLoad) -> int:
    """Maximum: one more row for each ended request, plus preempted ones."""
    again = load.expected.preemptions * max(map(sum, zip(load.expected.prompts, load.expected.max_tokens, strict=True)))
    return fed(load) + load.expected.prefix_hits + num_requests(load) + sum(load.expected.cut_off) + again


def steps(load: ScriptedLoad) -> float:
    return load.scrapes[-1].total("vllm:iteration_tokens_total_count")


CHECKS: dict[str, Check] = {
    "vllm:num_requests_running": rises(2),
    "vllm:num_requests_waiting": rises(1),
    "vllm:kv_cache_usage_perc": between(lambda load: 0, lambda load: 0),
    "vllm:cache_config_info": info(block_size=str(BLOCK_SIZE), num_gpu_blocks=str(NUM_BLOCKS)),
    "vllm:lora_requests_info": info(max_lora="0", waiting_lora_adapters="", running_lora_adapters=""),
    "vllm:num_preemptions_total": is_(lambda load: load.expected.preemptions),
    **dict.fromkeys(
        (
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        ),
        is_(lambda load: 0),  # no drafts are configured
    ),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": by("position", lambda load: {}),
    "vllm:prefix_cache_queries_total": is_(lambda load: sum(load.expected.prompts)),
    "vllm:prefix_cache_hits_total": is_(lambda load: load.expected.prefix_hits),
    "vllm:prompt_tokens_total": is_(lambda load: sum(load.expected.prompts)),
    "vllm:prompt_tokens_cached_total": is_(lambda load: load.expected.prefix_hits),
    "vllm:prompt_tokens_by_source_total": by(
        "source",
        lambda load: {
            "local_compute": sum(load.expected.prompts) - load.expected.prefix_hits,
            "local_cache_hit": load.expected.prefix_hits,
        },
    ),
    "neuron_serving_pictures_total": by("source", lambda load: {}),  # texts alone
    "neuron_serving_picture_seconds": sizes(lambda load: []),
    "vllm:generation_tokens_total": is_(lambda load: load.scrapes[-1].total("vllm:request_generation_tokens_sum")),
    "vllm:request_success_total": by("finished_reason", lambda load: load.expected.finished),
    "vllm:time_to_first_token_seconds": times(num_requests),
    "vllm:inter_token_latency_seconds": times(
        lambda load: load.scrapes[-1].total("vllm:generation_tokens_total") - num_requests(load)
    ),
    "vllm:request_time_per_output_token_seconds": times(
        lambda load: sum(number > 1 for number in load.expected.answers),
        lambda load: sum(number > 1 for number in load.expected.answers) + len(load.expected.cut_off),
    ),
    "vllm:e2e_request_latency_seconds": times(num_requests),
    "vllm:request_queue_time_seconds": times(num_requests),
    "vllm:request_prefill_time_seconds": times(num_requests),
    "vllm:request_decode_time_seconds": times(num_requests),
    "vllm:request_inference_time_seconds": times(num_requests),
    "vllm:request_prefill_kv_computed_tokens": lambda load, last, name: is_(
        lambda load: sum(load.expected.prompts) - load.expected.prefix_hits
    )(load, last, f"{name}_sum"),
    "vllm:request_prompt_tokens": sizes(lambda load: load.expected.prompts),
    "vllm:request_generation_tokens": sizes(lambda load: load.expected.answers, cut_off=True),
    "vllm:request_max_num_generation_tokens": sizes(lambda load: load.expected.longest, cut_off=True),
    "vllm:request_params_n": sizes(lambda load: load.expected.choices),
    "vllm:request_params_max_tokens": sizes(lambda load: load.expected.max_tokens),
    "vllm:iteration_tokens_total": lambda load, last, name: between(fed, fed_at_most)(load, last, f"{name}_sum"),
    "neuron_serving_step_seconds": times(steps),
    "neuron_serving_step_host_seconds": times(steps),
    "neuron_serving_device_busy_seconds_total": is_(
        lambda load: load.scrapes[-1].total("neuron_serving_step_seconds_sum")
    ),
    "neuron_serving_work_seconds_total": between(
        lambda load: load.scrapes[-1].total("neuron_serving_device_busy_seconds_total"), lambda load: load.seconds
    ),
    "neuron_serving_group_wait_seconds_total": by("rank", lambda load: {}),
    "neuron_serving_stream_gap_bound_seconds": between(lambda load: 1e-6, lambda load: load.seconds),
    "neuron_serving_fed_tokens_total": is_(lambda load: load.scrapes[-1].total("vllm:iteration_tokens_total_sum")),
    "neuron_serving_computed_tokens_total": is_(
        lambda load: load.scrapes[-1].total("neuron_serving_fed_tokens_total", bucket="none")
    ),
    "neuron_serving_load_seconds": between(lambda load: 1e-6, lambda load: 60),
    "neuron_serving_warm_up_seconds": between(lambda load: 1e-6, lambda load: 60),
    "neuron_serving_engine_restarts_total": is_(lambda load: load.expected.restarts),
    "neuron_serving_waiting_tokens": rises(11),
    "neuron_serving_requests_refused_total": by("reason", lambda load: load.expected.refused),
    "neuron_serving_http_responses_total": by("code", lambda load: load.expected.responses),
    "neuron_serving_idle_seconds": between(lambda load: 0, lambda load: load.seconds),
    "neuron_serving_open_connections": between(lambda load: 1, lambda load: 6),
    "neuron_serving_access_log_lines_lost_total": is_(lambda load: 0),
    "neuron_serving_group_members_present": is_(lambda load: 1),
    "process_cpu_seconds_total": each_process(lambda seconds: seconds > 0),
    "process_resident_memory_bytes": each_process(lambda size: size > 1e6),
    "process_virtual_memory_bytes": each_process(lambda size: size > 1e6),
    "process_open_fds": each_process(lambda number: 0 < number < 1000),
    "process_max_fds": each_process(lambda number: number >= 1000),
    "process_start_time_seconds": each_process(lambda at: at < time.time()),
}


def test_the_checks_cover_exactly_the_documented_metrics() -> None:
    assert CHECKS.keys() == DOCUMENTED.keys()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_metric_matches_the_load(name: str, load: ScriptedLoad) -> None:
    CHECKS[name](load, load.scrapes[-1], name)


AS_OLD_AS_ITS_PROCESS = "process_cpu_seconds_total"


def test_counters_never_decrease_even_when_the_engine_dies(load: ScriptedLoad) -> None:
    counted = tuple(
        f"{name}{suffix}"
        for name, kind in DOCUMENTED.items()
        if name != AS_OLD_AS_ITS_PROCESS
        for suffix in {"counter": ("",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ()}[kind]
    )
    seen: dict[object, float] = {}
    for scrape in load.scrapes:
        for key, value in scrape.values.items():
            if key[0] in counted:
                assert value >= seen.get(key, 0.0), key
                seen[key] = value
    assert len(seen) > 100


def test_without_an_engine_no_request_is_reported_running(load: ScriptedLoad) -> None:
    absent = [scrape for scrape in load.scrapes if scrape.total("neuron_serving_group_members_present") == 0]
    assert len(absent) == 1
    assert absent[0].total("vllm:num_requests_running") == 0


def test_all_counters_are_zero_before_the_first_request(load: ScriptedLoad) -> None:
    first = load.scrapes[0]
    reported = {"vllm:cache_config_info", "vllm:lora_requests_info"}
    reported |= {
        f"neuron_serving_{name}"
        for name in ("load_seconds", "warm_up_seconds", "group_members_present", "open_connections", "idle_seconds")
    }
    counted = {name for (name, _), value in first.values.items() if value and not name.startswith("process_")}
    assert counted == reported


def test_the_phases_of_a_request_add_up(load: ScriptedLoad) -> None:
    last = load.scrapes[-1]

    def seconds(name: str) -> float:
        return last.total(f"vllm:{name}_seconds_sum")

    first_token = seconds("time_to_first_token")
    assert first_token == pytest.approx(seconds("request_queue_time") + seconds("request_prefill_time"))
    assert seconds("inter_token_latency") == pytest.approx(seconds("request_decode_time"))
    inference = seconds("request_prefill_time") + seconds("request_decode_time")
    assert seconds("request_inference_time") == pytest.approx(inference)
    # Interrupted requests ended some time after their last token.
    assert seconds("e2e_request_latency") > first_token + seconds("request_decode_time")


def test_engine_thread_time_is_host_time_plus_backend_time(load: ScriptedLoad) -> None:
    last = load.scrapes[-1]
    host = last.total("neuron_serving_step_host_seconds_sum")
    assert 0 < host < last.total("neuron_serving_work_seconds_total")


def test_cache_usage_is_reported_while_requests_run(load: ScriptedLoad) -> None:
    usage = [scrape.total("vllm:kv_cache_usage_perc") for scrape in load.scrapes]
    running = [scrape.total("vllm:num_requests_running") for scrape in load.scrapes]
    assert all(share > 0 for share, number in zip(usage, running, strict=True) if number)
    assert (usage[0], usage[-1]) == (0, 0)
    assert max(usage) <= 1
