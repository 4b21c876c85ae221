"""The thread that writes the access log: lines are whole and in order, and a slow reader blocks no caller."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import pytest

from neuron_runtime.server import access_log
from neuron_runtime.server.access_log import MAX_QUEUED_LINES, LineWriter


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.005)


def test_lines_arrive_whole_and_in_order() -> None:
    read_fd, write_fd = os.pipe()
    writer = LineWriter(write_fd)
    sent = [b"%d %b\n" % (n, b"x" * (n % 700)) for n in range(500)]
    for line in sent:
        writer.write(line)
    received = b""
    while len(received) < sum(map(len, sent)):
        received += os.read(read_fd, 65536)
    writer.close()
    assert received.splitlines(keepends=True) == sent
    assert writer.num_lost == 0
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_close_writes_the_queued_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "GATHER_SECONDS", 3600.0)
    monkeypatch.setattr(access_log, "FLUSH_SECONDS", 60.0)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    writer = LineWriter(write_fd)
    for _ in range(50):
        writer.write(b"x" * 999 + b"\n")
    writer.close()
    assert os.read(read_fd, 65536).count(b"\n") == 50
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_a_slow_reader_costs_lines_and_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "FLUSH_SECONDS", 0.05)
    read_fd, write_fd = os.pipe()
    writer = LineWriter(write_fd)
    line = b"x" * 999 + b"\n"
    num_sent = 2 * MAX_QUEUED_LINES
    for _ in range(num_sent):
        writer.write(line)
    assert MAX_QUEUED_LINES - 200 <= writer.num_lost <= MAX_QUEUED_LINES
    writer.close()
    received = 0
    # The reader now gets every line that was not lost.
    os.set_blocking(read_fd, False)
    while received < (num_sent - writer.num_lost) * len(line):
        with contextlib.suppress(BlockingIOError):
            received += len(os.read(read_fd, 1 << 20))
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_a_closed_reader_costs_lines_and_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    writer = LineWriter(write_fd)
    writer.write(b"x\n")
    until(lambda: writer.num_lost == 1)
    writer.write(b"x\n")
    until(lambda: writer.num_lost == 2)
    writer.close()
    os.close(write_fd)
    assert capsys.readouterr().err.count("the access log cannot be written: Broken pipe") == 1


def test_a_non_blocking_descriptor_loses_nothing() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    writer = LineWriter(write_fd)
    for _ in range(300):
        writer.write(b"x" * 999 + b"\n")
    received = 0
    while received < 300_000:
        received += len(os.read(read_fd, 4096))
    writer.close()
    assert writer.num_lost == 0
    for fd in (read_fd, write_fd):
        os.close(fd)
