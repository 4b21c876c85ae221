"""Threads whose reads may hang: they run calls as other pools do, but hold neither a close nor the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from neuron_runtime import reading_threads
from neuron_runtime.reading_threads import ReadingThreads

HANGS = """
import sys, threading
from neuron_runtime.reading_threads import ReadingThreads
threads, begun = ReadingThreads(1, "reads"), threading.Event()
threads.submit(lambda: (begun.set(), open(sys.argv[1], "rb")))
begun.wait()
threads.close()
"""


def test_a_process_ends_although_a_read_hangs(tmp_path: Path) -> None:
    # Nobody writes it.
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-P", "-c", HANGS, str(tmp_path / "fifo")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_calls_run_in_order_and_close_waits_for_those_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_threads, "CLOSE_SECONDS", 30.0)
    threads, gate, order = ReadingThreads(1, "reads"), threading.Event(), list[int]()

    def call(number: int) -> int:
        gate.wait()
        order.append(number)
        return number

    calls = [threads.submit(call, number) for number in range(3)]
    failing = threads.submit(lambda: 1 // 0)
    gate.set()
    assert [one.result(30) for one in calls] == order == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    gate.clear()
    begun = threading.Event()
    running = threads.submit(lambda: (begun.set(), call(4)))
    begun.wait()
    waiting = threads.submit(call, 5)
    threading.Timer(0.05, gate.set).start()
    threads.close()
    assert running.done()
    with pytest.raises(CancelledError):
        waiting.result(30)
    assert order == [0, 1, 2, 4]
