"""What AWS's `neuron-monitor` reports about this server's Neuron devices, for `/metrics`.

The supervisor starts this module as a process of its own where that program is on PATH. It reads the reports, adds up
what they count, and keeps the sums in a file that the first front end reads at a scrape. Whatever the program prints or
however it ends, nothing else notices: the series stay as they were, or end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from neuron_runtime.engine.lifeline import die_with_parent

if TYPE_CHECKING:
    from neuron_runtime.server.series import Labels, Reading

PROGRAM = "neuron-monitor"
TAG_VARIABLE = "NEURON_PROCESS_TAG"
"""By which `neuron-monitor` tells processes that use Neuron devices apart."""

PERIOD_SECONDS = 5
MAX_REPORT_BYTES = 8 * 2**20
"""A longer report is skipped."""
MAX_SERIES = 4096
"""More are not kept: no instance has as many cores."""
RESTART_SECONDS = 30.0
STALE_SECONDS = 6 * PERIOD_SECONDS
"""Without a report for this long, gauges end."""

FILE, CONFIG_FILE = "neuron-monitor.json", "neuron-monitor.conf"


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: tuple[str, ...]
    value: float


class Snapshot(msgspec.Struct, frozen=True):
    """What the file holds."""

    time: float
    """Of the last report, on the monotonic clock."""
    samples: tuple[Sample, ...]


def configuration(tag: str) -> dict[str, Any]:
    """The configuration of `neuron-monitor`: this server's processes alone, and the devices."""
    of_processes = ("neuroncore_counters", "memory_used", "execution_stats")
    return {
        "period": f"{PERIOD_SECONDS}s",
        "neuron_runtimes": [
            {"tag_filter": f"^{re.escape(tag)}$", "metrics": [{"type": group} for group in of_processes]}
        ],
        "system_metrics": [{"type": "neuron_hw_counters"}],
    }


class Sums:
    """Adds up reports. What is missing, or is no number, is left out."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._totals: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], float] = {}

    def add(self, report: Any) -> None:
        self._gauges.clear()
        for runtime in _list(report, "neuron_runtime_data"):
            if _at(runtime, "neuron_runtime_tag") == self._tag:
                self._add_runtime(_at(runtime, "report"))
        for device in _list(report, "system_data", "neuron_hw_counters", "neuron_devices"):
            index = _at(device, "neuron_device_index")
            if isinstance(index, int):
                for event, count in _numbers(device):
                    if event != "neuron_device_index":
                        self._count("neuron_serving_neuron_ecc_events_total", (str(index), event), count)
        for name, size in _numbers(_at(report, "neuron_hardware_info")):
            if name == "neuron_device_memory_size":
                self._set("neuron_serving_neuron_device_memory_size_bytes", (), size)

    def snapshot(self, now: float) -> Snapshot:
        return Snapshot(now, tuple(Sample(*key, value) for key, value in (self._totals | self._gauges).items()))

    def _add_runtime(self, report: Any) -> None:
        used = _at(report, "memory_used", "neuron_runtime_used_bytes")
        for name, number in _numbers(used):
            self._set("neuron_serving_neuron_memory_used_bytes", (name,), number)
        cores = _at(used, "usage_breakdown", "neuroncore_memory_usage")
        for core, breakdown in _items(cores):
            for use, number in _numbers(breakdown):
                self._set("neuron_serving_neuron_core_memory_used_bytes", (core, use), number)
        for core, counters in _items(_at(report, "neuroncore_counters", "neuroncores_in_use")):
            for name, number in _numbers(counters):
                if name == "neuroncore_utilization":
                    self._set("neuron_serving_neuron_core_utilization", (core,), number / 100)
        executions = _at(report, "execution_stats")
        for outcome, number in _numbers(_at(executions, "execution_summary")):
            self._count("neuron_serving_neuron_executions_total", (outcome,), number)
        for error, number in _numbers(_at(executions, "error_summary")):
            self._count("neuron_serving_neuron_execution_errors_total", (error,), number)
        for percentile, seconds in _numbers(_at(executions, "latency_stats", "device_latency")):
            self._set("neuron_serving_neuron_execution_seconds", (percentile,), seconds)

    def _set(self, name: str, labels: Labels, value: float) -> None:
        if len(self._gauges) < MAX_SERIES:
            self._gauges[name, labels] = self._gauges.get((name, labels), 0.0) + value

    def _count(self, name: str, labels: Labels, more: float) -> None:
        key = (name, labels)
        if more >= 0 and (key in self._totals or len(self._totals) < MAX_SERIES):
            self._totals[key] = self._totals.get(key, 0.0) + more


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _list(value: Any, *path: str) -> list[Any]:
    found = _at(value, *path)
    return found if isinstance(found, list) else []


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    for name, number in _items(value):
        if isinstance(number, int | float) and not isinstance(number, bool):
            yield name, float(number)


def reports(lines: IO[bytes]) -> Iterator[Any]:
    """The reports in a stream of lines, without what is none."""
    while line := lines.readline(MAX_REPORT_BYTES):
        if not line.endswith(b"\n"):
            # The rest of a line that is too long; it is no report either.
            continue
        try:
            yield msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue


def readings(run_dir: Path, now: Callable[[], float] = time.monotonic) -> Iterator[Reading]:
    """The present values; counters only if the last report is long ago, nothing without a report."""
    try:
        snapshot = msgspec.json.decode((run_dir / FILE).read_bytes(), type=Snapshot)
    except (OSError, msgspec.DecodeError):
        return
    from neuron_runtime.server.metrics import NEURON  # noqa: PLC0415 - the supervisor has no metrics

    families, stale = {family.name: family for family in NEURON}, now() - snapshot.time > STALE_SECONDS
    for sample in snapshot.samples:
        family = families[sample.name]
        if not (stale and family.kind == "gauge"):
            yield family, sample.labels, sample.value


def start(run_dir: Path) -> subprocess.Popen[bytes] | None:
    """Start the process, which ends with the caller; None if the program is not on PATH. Processes that are started
    later get the tag by which it knows them."""
    if shutil.which(PROGRAM) is None:
        return None
    tag = os.environ.setdefault(TAG_VARIABLE, f"neuron-serving-{os.getpid()}")
    arguments = (f"--run-dir={run_dir}", f"--tag={tag}", f"--parent-pid={os.getpid()}")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "neuron_runtime.server.neuron_monitor", *arguments],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="neuron_runtime.server.neuron_monitor")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--tag", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent_pid)
    config, target = options.run_dir / CONFIG_FILE, options.run_dir / FILE
    config.write_bytes(msgspec.json.encode(configuration(options.tag)))
    sums, own = Sums(options.tag), os.getpid()
    while True:
        with subprocess.Popen(
            [PROGRAM, "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(own),  # noqa: PLW1509 - this process has no threads
        ) as program:
            assert program.stdout is not None
            for report in reports(program.stdout):
                sums.add(report)
                written = target.with_suffix(".new")
                written.write_bytes(msgspec.json.encode(sums.snapshot(time.monotonic())))
                written.replace(target)
        time.sleep(RESTART_SECONDS)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(main())
