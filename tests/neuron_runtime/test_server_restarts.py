"""Decisions of the supervisor about ended processes, and their parts."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from helpers import virtual_time
from helpers.serve_command import stopped
from neuron_runtime.errors import BackendFailed, Draining, ExitCode, FatalError, ServingError
from neuron_runtime.host import describe_exit
from neuron_runtime.processes.children import Child
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.processes.restarts import CURED_BY_RESTART, RestartBudget
from neuron_runtime.record import Record, write
from neuron_runtime.server.gate import Gate

CRASHED = BackendFailed("crashed")


def test_three_restarts_in_the_window_are_allowed_and_the_fourth_failure_is_final() -> None:
    budget = RestartBudget()
    assert [budget.failure_to_end_with(CRASHED, now) for now in (0.0, 100.0, 599.0)] == [None, None, None]
    error = budget.failure_to_end_with(CRASHED, 599.9)
    assert error is not None
    assert error.exit_code is ExitCode.RESTART_BUDGET_EXHAUSTED
    assert "crashed" in str(error)


def test_restarts_before_the_window_are_forgotten() -> None:
    budget = RestartBudget()
    assert all(budget.failure_to_end_with(CRASHED, now) is None for now in range(0, 10_000, 200))


@pytest.mark.parametrize("code", list(ExitCode))
def test_only_failures_that_a_restart_can_fix_are_restarted(code: ExitCode) -> None:
    failure = FatalError(code, "why")
    assert RestartBudget().failure_to_end_with(failure, 0.0) == (None if code in CURED_BY_RESTART else failure)
    assert ExitCode.DEVICE_FAILED_NODE not in CURED_BY_RESTART


def test_temporary_failures_are_left_to_the_pod_restart() -> None:
    failure = ServingError("the hub cannot be reached")
    assert RestartBudget().failure_to_end_with(failure, 0.0) is failure


@pytest.mark.parametrize(
    ("code", "named", "error", "restarts"),
    [
        (1, "the hub cannot be reached", ServingError, False),
        (1, "", BackendFailed, True),
        (13, "no config.json", FatalError, False),
        (32, "device lost", FatalError, True),
        (-9, "", BackendFailed, True),
    ],
)
def test_an_exit_is_classified_by_code_and_record(
    code: int, named: str, error: type[ServingError], restarts: bool, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    if named:
        write(Record(version=1, command="serve", ok=False, exit_code=code, message=named), path)
    process = subprocess.Popen(["sh", "-c", f"exit {code}" if code > 0 else f"kill {code} $$"])
    process.wait()
    failure = Child("engine process", process, path, Deadline(tmp_path / "deadline")).failure()
    assert type(failure) is error
    assert str(failure) == (named or describe_exit("engine process", code))
    assert (RestartBudget().failure_to_end_with(failure, 0.0) is None) is restarts


def test_an_exit_without_a_record_is_described() -> None:
    assert describe_exit("engine process", 7) == "the engine process exited with code 7"
    assert "SIGKILL" in describe_exit("engine process", -9)
    assert "out of memory" in describe_exit("engine process", -9)
    assert "SIGSEGV" in describe_exit("engine process", -11)


def test_a_deadline_set_in_one_mapping_is_read_in_another(tmp_path: Path) -> None:
    with Deadline(tmp_path / "deadline") as ours, Deadline(tmp_path / "deadline") as theirs:
        assert theirs.overdue_seconds == 0
        ours.set(1000.0)
        assert theirs.overdue_seconds == 0
        ours.set(-5.0)
        assert theirs.overdue_seconds >= 5.0
        ours.clear()
        assert theirs.overdue_seconds == 0


def test_a_process_is_late_before_it_is_overdue(tmp_path: Path) -> None:
    with Deadline(tmp_path / "deadline") as deadline:
        deadline.set(1000.0, usual_seconds=500.0)
        assert (deadline.late_seconds, deadline.overdue_seconds) == (0, 0)
        deadline.set(1000.0, usual_seconds=-5.0)
        assert deadline.late_seconds >= 5.0
        assert deadline.overdue_seconds == 0
        deadline.set(-5.0)
        assert deadline.late_seconds >= 5.0
        assert deadline.overdue_seconds >= 5.0


def test_a_stopped_or_late_process_does_not_respond(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process, Deadline(tmp_path / "deadline") as deadline:
        child = Child("engine process", process, tmp_path / "record", deadline)
        deadline.set(1000.0)
        assert child.stall == ""
        with stopped(process.pid):
            assert child.stall == "the engine process is stopped"
            # Looking does not change it.
            assert child.lives
            assert child.stall == "the engine process is stopped"
        while child.stall:
            time.sleep(0.001)
        deadline.set(1000.0, usual_seconds=-1.0)
        assert child.stall == "the engine process is late with its work"
        process.kill()


async def test_a_gate_waits_for_requests_that_started_as_the_last_one_ended() -> None:
    gate = Gate()
    with gate.running():
        drained = asyncio.create_task(gate.drain(0.0, 60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert gate.closed
    with gate.running():
        for _ in range(5):
            await asyncio.sleep(0)
        assert not drained.done()
    assert await drained is True
    with pytest.raises(Draining):
        gate.check_admits()


def test_a_gate_admits_during_its_delay_and_stops_waiting_at_its_timeout() -> None:
    async def drains() -> None:
        gate = Gate()
        with gate.running():
            drained = asyncio.create_task(gate.drain(10.0, 60.0))
            await asyncio.sleep(9.9)
            gate.check_admits()
            assert gate.draining
            await asyncio.sleep(0.2)
            with pytest.raises(Draining):
                gate.check_admits()
            assert await drained is False
        assert virtual_time.now() == pytest.approx(70.0)

    virtual_time.run(drains())
