"""Counts of several front ends, reported by any of them, even after others ended."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from neuron_runtime.core import FinishReason
from neuron_runtime.engine import messages
from neuron_runtime.engine.messages import Refused, Step, Update
from neuron_runtime.engine.process import Border
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.server import summed_metrics
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.server.summed_metrics import SummedMetrics


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit long enough for every live front end, even on a stalled machine."""
    monkeypatch.setattr(summed_metrics, "PEER_SECONDS", 60.0)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Sockets have short names.
    with tempfile.TemporaryDirectory(prefix="nr-") as folder:
        yield Path(folder)


def front_end(run_dir: Path, number: int) -> tuple[Metrics, SummedMetrics]:
    metrics = Metrics("m")
    return metrics, SummedMetrics(metrics, run_dir, number, 2)


def value(text: bytes, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(name + "{"))


async def test_counts_are_summed_and_engine_values_appear_once(run_dir: Path) -> None:
    ends = [front_end(run_dir, number) for number in range(2)]
    for number, (metrics, summed) in enumerate(ends):
        await summed.open()
        metrics.step(Step((), (), EngineStats(num_running=3, num_waiting=1)))
        metrics.tokens(10 + number, None)
    for _, summed in ends:
        text = await summed.render()
        assert value(text, "vllm:generation_tokens_total") == 21
        assert value(text, "vllm:num_requests_running") == 3
        assert value(text, "vllm:num_requests_waiting") == 1
        summed.close()


async def test_no_count_decreases_when_a_front_end_is_replaced(run_dir: Path) -> None:
    (metrics, summed), (peer_metrics, peer) = front_end(run_dir, 0), front_end(run_dir, 1)
    await summed.open()
    await peer.open()
    peer_metrics.tokens(5, None)
    peer_metrics.finished(
        FinishReason.LENGTH,
        num_prompt_tokens=4,
        num_cached_tokens=0,
        num_tokens=5,
        seconds=1.0,
        prefill_seconds=0.5,
        decode_seconds=0.5,
    )
    metrics.tokens(1, None)
    assert value(await summed.render(), "vllm:generation_tokens_total") == 6
    peer_metrics.tokens(100, None)  # never reported
    peer.close()
    assert value(await summed.render(), "vllm:generation_tokens_total") == 6
    successor_metrics, successor = front_end(run_dir, 1)
    await successor.open()
    successor_metrics.tokens(2, None)
    for one in (summed, successor):
        text = await one.render()
        assert value(text, "vllm:generation_tokens_total") == 8
        assert value(text, "vllm:request_success_total") == 1
        assert value(text, "vllm:e2e_request_latency_seconds_count") == 1
        one.close()


async def test_an_unresponsive_front_end_keeps_its_last_counts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (metrics, summed), (peer_metrics, peer) = front_end(run_dir, 0), front_end(run_dir, 1)
    await peer.open()
    peer_metrics.tokens(7, None)
    await peer.render()
    peer.close()
    await summed.open()
    monkeypatch.setattr(summed_metrics, "PEER_SECONDS", 0.05)
    path = run_dir / "metrics-1.socket"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        metrics.tokens(1, None)
        assert value(await summed.render(), "vllm:generation_tokens_total") == 8
    summed.close()


def test_each_front_end_gets_its_own_events_and_all_get_the_statistics(run_dir: Path) -> None:
    with zmq.Context() as context:
        border = Border(run_dir, 1, num_front_ends=3)
        inboxes = [messages.socket(context, zmq.PULL, run_dir, messages.outbox_of(number), 1) for number in range(3)]
        news = tuple(Update(messages.request_id(number, 7 + number), (number,)) for number in (2, 0, 2))
        refused = (Refused(messages.request_id(1, 3), "no"),)
        border.send_step(Step(news, refused, EngineStats(num_running=3)))
        heard = [messages.decode_from_engine(inbox.recv()) for inbox in inboxes]
        steps = [step for step in heard if isinstance(step, Step)]
        assert [step.stats.num_running for step in steps] == [3, 3, 3]
        assert [[one.request_id for one in step.updates] for step in steps] == [["0-7"], [], ["2-9", "2-9"]]
        assert [[one.request_id for one in step.refused] for step in steps] == [[], ["1-3"], []]
        for inbox in inboxes:
            inbox.close(linger=0)
        border.close()
