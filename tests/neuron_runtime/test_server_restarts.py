"""What the supervisor decides when a process has ended, and the small things it decides with."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from neuron_runtime.engine.lifeline import Deadline
from neuron_runtime.errors import Draining, ExitCode, FatalError
from neuron_runtime.server.gate import Gate
from neuron_runtime.server.restarts import CURED_BY_RESTART, RestartBudget, describe_exit


def test_three_restarts_within_the_window_are_free_and_the_fourth_end_is_the_last() -> None:
    budget = RestartBudget(max_restarts=3, window_seconds=600.0)
    assert [budget.failure_to_end_with("crashed", now) for now in (0.0, 100.0, 599.0)] == [None, None, None]
    error = budget.failure_to_end_with("crashed", 599.9)
    assert error is not None
    assert error.exit_code is ExitCode.RESTART_BUDGET_EXHAUSTED
    assert "crashed" in str(error)


def test_restarts_that_lie_further_back_than_the_window_are_forgotten() -> None:
    budget = RestartBudget(max_restarts=3, window_seconds=600.0)
    assert all(budget.failure_to_end_with("crashed", now) is None for now in range(0, 10_000, 200))


@pytest.mark.parametrize("code", list(ExitCode))
def test_only_a_failure_that_a_restart_can_cure_is_restarted(code: ExitCode) -> None:
    failure = FatalError(code, "why")
    assert RestartBudget().failure_to_end_with(failure, 0.0) == (None if code in CURED_BY_RESTART else failure)
    assert ExitCode.DEVICE_FAILED_NODE not in CURED_BY_RESTART


def test_an_exit_without_a_record_is_described() -> None:
    assert describe_exit("engine process", 7) == "the engine process ended with exit code 7"
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


async def test_a_gate_waits_for_what_began_as_the_last_one_ended() -> None:
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


async def test_a_gate_gives_up_in_time() -> None:
    gate = Gate()
    began = time.monotonic()
    with gate.running():
        assert await gate.drain(0.0, 0.05) is False
    assert time.monotonic() - began >= 0.05
