"""Counts of a front end, continued by its successor."""

from __future__ import annotations

from pathlib import Path

from neuron_runtime.core import FinishReason
from neuron_runtime.engine.messages import Step
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.server.kept_metrics import KeptMetrics
from neuron_runtime.server.metrics import Metrics


def front_end(run_dir: Path) -> tuple[Metrics, KeptMetrics]:
    metrics = Metrics("m")
    return metrics, KeptMetrics(metrics, run_dir)


def value(text: bytes, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(name + "{"))


def test_no_count_decreases_when_a_front_end_is_replaced(tmp_path: Path) -> None:
    metrics, kept = front_end(tmp_path)
    metrics.tokens(5, None)
    metrics.finished(
        FinishReason.LENGTH,
        num_prompt_tokens=4,
        num_cached_tokens=0,
        num_tokens=5,
        seconds=1.0,
        prefill_seconds=0.5,
        decode_seconds=0.5,
    )
    assert value(kept.render(), "vllm:generation_tokens_total") == 5
    metrics.tokens(100, None)  # never reported
    successor_metrics, successor = front_end(tmp_path)
    successor_metrics.tokens(2, None)
    text = successor.render()
    assert value(text, "vllm:generation_tokens_total") == 7
    assert value(text, "vllm:request_success_total") == 1
    assert value(text, "vllm:e2e_request_latency_seconds_count") == 1


def test_gauges_of_the_engine_wait_for_its_next_message(tmp_path: Path) -> None:
    metrics, kept = front_end(tmp_path)
    metrics.step(Step((), (), EngineStats(num_running=3)))
    assert value(kept.render(), "vllm:num_requests_running") == 3
    successor_metrics, successor = front_end(tmp_path)
    assert value(successor.render(), "vllm:num_requests_running") == 0
    successor_metrics.step(Step((), (), EngineStats(num_running=2)))
    assert value(successor.render(), "vllm:num_requests_running") == 2
