"""What `neuron-monitor` reports reaches `/metrics`, and nothing that it does reaches the server."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neuron_runtime.server import neuron_monitor
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.server.neuron_monitor import STALE_SECONDS, TAG_VARIABLE, readings, start

FAKE = Path(__file__).parents[1] / "fakes" / "neuron-monitor"


@pytest.fixture
def monitored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    monkeypatch.setenv("PATH", str(FAKE), prepend=os.pathsep)
    monkeypatch.setenv(TAG_VARIABLE, "chat.1")
    started = []

    def begin(behaviour: str = "") -> subprocess.Popen[bytes]:
        monkeypatch.setenv("FAKE_MONITOR", behaviour)
        process = start(tmp_path)
        assert process is not None
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def values(run_dir: Path) -> dict[tuple[str, ...], float]:
    prefix = "neuron_serving_neuron_"
    return {(family.name.removeprefix(prefix), *labels): value for family, labels, value in readings(run_dir)}


def eventually(run_dir: Path, name: tuple[str, ...], least: float) -> dict[tuple[str, ...], float]:
    for _ in range(300):
        if (found := values(run_dir)).get(name, 0) >= least:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{name} does not reach {least}: {values(run_dir)}")


def test_reports_of_this_server_alone_are_added_up(
    monitored: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    monitored()
    found = eventually(tmp_path, ("executions_total", "completed"), 2 * 123)
    num_reports = found["executions_total", "completed"] / 123
    assert num_reports == int(num_reports) == found["execution_errors_total", "transient"]
    assert found["ecc_events_total", "0", "mem_ecc_corrected"] == 3 * num_reports
    assert found["memory_used_bytes", "host"] == 6997643264
    assert found["memory_used_bytes", "neuron_device"] == 12519788544
    assert found["core_memory_used_bytes", "1", "constants"] == 193986816
    assert found["core_utilization", "0"] == pytest.approx(0.4201)
    assert found["execution_seconds", "p99"] == 0.01000012
    assert found["device_memory_size_bytes",] == 103079215104


def test_the_numbers_are_in_the_exposition(monitored: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    metrics = Metrics("m")
    metrics.read_at_scrape(lambda: readings(tmp_path))
    assert b"neuron_serving_neuron_memory_used_bytes{" not in metrics.render(metrics.export())
    monitored()
    eventually(tmp_path, ("executions_total", "completed"), 123)
    line = b'neuron_serving_neuron_memory_used_bytes{engine="0",memory="host",model_name="m"} 6.997643264e+09'
    assert line in metrics.render(metrics.export())
    assert line in metrics.render(metrics.export()), "a second scrape does not add to a gauge"


def test_what_is_no_report_is_skipped(monitored: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    monitored("babbles")
    assert eventually(tmp_path, ("executions_total", "completed"), 123)


def test_a_program_that_fails_leaves_no_series_and_ends_nothing(
    monitored: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = monitored("fails")
    while not (tmp_path / neuron_monitor.CONFIG_FILE).exists():
        time.sleep(0.05)
    assert values(tmp_path) == {}
    assert process.poll() is None, "it waits, and starts the program again"


def test_without_reports_gauges_end_and_counters_stay(
    monitored: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    monitored()
    eventually(tmp_path, ("executions_total", "completed"), 123)
    later = time.monotonic() + STALE_SECONDS + 1
    assert {family.kind for family, _, _ in readings(tmp_path, lambda: later)} == {"counter"}


def test_the_program_ends_with_its_reader(monitored: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = monitored()
    eventually(tmp_path, ("executions_total", "completed"), 123)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(200):
        if not Path(f"/proc/{children[0]}/cmdline").exists() or not Path(f"/proc/{children[0]}/cmdline").read_bytes():
            return
        time.sleep(0.05)
    raise AssertionError("neuron-monitor still runs")


def test_without_the_program_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(TAG_VARIABLE, raising=False)
    assert start(tmp_path) is None
    assert TAG_VARIABLE not in os.environ
