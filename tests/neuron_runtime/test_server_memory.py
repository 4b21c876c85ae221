"""`serve` with too little memory, in a real control group: the last line and the exit code say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.memory_groups import MemoryGroup, memory_group
from helpers.serve_command import ENGINE, FRONT_END, get, serve, state
from neuron_runtime.errors import ExitCode

DEMO = str(Path(__file__).parents[2] / "examples" / "demo-model")
MIB = 2**20
FILL = """
import sys
from pathlib import Path
Path(f"/proc/{sys.argv[1]}/oom_score_adj").write_text("1000")
def lives():
    try:
        return Path(f"/proc/{sys.argv[1]}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
taken = []
while lives():
    taken.append(bytearray(2**18))
"""
"""Fills the memory of its group until the kernel has killed this process."""


def fill_memory_until_killed(group: MemoryGroup, pid: int) -> None:
    filling = [*group.within, sys.executable, "-c", FILL, str(pid)]
    for _ in range(5):
        # The kernel may kill the filling process, too, or instead.
        subprocess.run(filling, check=False)
        if state(pid) in ("", "Z"):
            return
    raise AssertionError(f"the kernel did not kill process {pid}")


@pytest.mark.slow
def test_where_torch_does_not_fit_the_command_ends_at_once_and_names_the_memory_limit() -> None:
    with memory_group(96 * MIB) as group, serve(DEMO, "--port=0", within=group.within) as command:
        assert command.wait() == ExitCode.DEVICE_OUT_OF_MEMORY
        last = command.lines[-1]
        assert last.startswith("neuron-runtime: DeviceOutOfMemory: not enough memory to import torch: it needs 0.")
        assert "of the limit of 0.09 GiB; raise the memory limit to at least 0." in last
        assert "restarting" not in command.text


@pytest.mark.slow
def test_an_engine_that_the_kernel_killed_for_memory_is_reported_as_such_and_not_restarted() -> None:
    with (
        memory_group(400 * MIB) as group,
        serve(DEMO, "--port=0", "--backend=simulated", within=group.within) as command,
    ):
        command.until_ready()
        fill_memory_until_killed(group, command.child(ENGINE))
        assert command.wait() == ExitCode.DEVICE_OUT_OF_MEMORY
        assert (
            "DeviceOutOfMemory: the kernel killed the engine process because the memory limit of 0.39 GiB was "
            in (command.lines[-1])
        )
        assert "raise that limit" in command.lines[-1]
        assert "restarting" not in command.text


@pytest.mark.slow
def test_a_front_end_that_the_kernel_killed_for_memory_is_replaced_alone() -> None:
    with (
        memory_group(400 * MIB) as group,
        serve(DEMO, "--port=0", "--backend=simulated", within=group.within) as command,
    ):
        url, engine = command.until_ready(), command.child(ENGINE)
        fill_memory_until_killed(group, command.child(FRONT_END))
        command.until_ready(2)
        assert "the kernel killed the front end because the memory limit of 0.39 GiB was reached" in command.text
        assert get(f"{url}/health").status_code == 200
        assert command.child(ENGINE) == engine
        assert state(engine) not in ("", "Z")
