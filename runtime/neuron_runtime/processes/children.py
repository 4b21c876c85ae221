"""Child processes of a serving command or of `LLM`: how one is started, watched and ended, and why it ended.

Each is a command of this package, never a fork, so it does not import the caller's program. The supervisor has an
engine process and a front end, `LLM` an engine process if its backend wants one; they decide what happens afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from neuron_runtime.console import say
from neuron_runtime.errors import BackendFailed, ExitCode, FatalError, ServingError
from neuron_runtime.host import LIMIT_OF_A_POD, describe_exit, gib, memory_limit, num_oom_kills
from neuron_runtime.processes.lifeline import Deadline, die_with_parent
from neuron_runtime.record import GENERAL_FAILURE, Record

ENGINE_NAME = "engine process"
ENGINE_MODULE = "neuron_runtime.processes.engine"
FRONT_END_MODULE = "neuron_runtime.processes.front_end"
RANK_MODULE = "neuron_runtime.processes.rank"
CONFIG_FILE = "config.json"
"""The configuration of all children, in their common folder."""
FRONT_END_DEADLINE = "front-end"
"""The name of the front end's deadline in that folder."""
STOP_SECONDS = 10.0
"""Time that a child has to exit, in addition to a drain."""


@dataclass
class Child:
    """A child process: a command of this package."""

    name: str
    process: subprocess.Popen[bytes]
    record_path: Path
    deadline: Deadline

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def kill_if_hung(self) -> None:
        """Call this periodically."""
        if self.lives and self.deadline.hangs():
            say(f"the {self.name} hangs ({self.deadline.overdue_seconds:.0f} s over its limit): stopping it")
            # Its fault handler prints where it hangs, even while the GIL is held.
            self.process.send_signal(signal.SIGABRT)
            self.resume()
            self.wait_or_kill(STOP_SECONDS)

    @property
    def stall(self) -> str:
        """Why it does not respond now, although it has not exited; empty if it does."""
        if os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
            return f"the {self.name} is stopped"
        return f"the {self.name} is late with its work" if self.deadline.late_seconds else ""

    def failure(self) -> ServingError:
        """Why it exited: the error in its record, or BackendFailed with its exit code or signal."""
        code = self.process.returncode
        named = self._message()
        message = named or describe_exit(self.name, code)
        if code in set(ExitCode):
            return FatalError(ExitCode(code), message)
        return ServingError(message) if named and code == GENERAL_FAILURE else BackendFailed(message)

    def _message(self) -> str:
        try:
            return msgspec.json.decode(self.record_path.read_bytes(), type=Record).message
        except (OSError, msgspec.DecodeError):
            return ""

    def resume(self) -> None:
        """Continue a stopped process, so that it handles other signals and messages."""
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Let it end its work, then kill it."""
        self.process.terminate()
        self.resume()
        self.wait_or_kill(STOP_SECONDS)

    def close(self) -> None:
        """Release its deadline and pipe after it has exited."""
        self.deadline.close()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def wait_or_kill(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            say(f"the {self.name} did not exit within {seconds:.0f} s: killing it")
            self.process.kill()
            self.process.wait()


def start_child(
    name: str,
    module: str,
    arguments: Sequence[str],
    run_dir: Path,
    deadline: str,
    *,
    stdin: int = subprocess.DEVNULL,
    pass_fds: tuple[int, ...] = (),
) -> Child:
    """Start a module of this package as a command. It ends with the thread that calls this.

    Args:
        run_dir: folder of all children, with `CONFIG_FILE`.
        deadline: name of the file in which the child says until when it shows life.
    """
    record_path = run_dir / f"{deadline}.record"
    record_path.unlink(missing_ok=True)
    common = [
        f"--config={run_dir / CONFIG_FILE}",
        f"--run-dir={run_dir}",
        f"--record={record_path}",
        f"--parent-pid={os.getpid()}",
    ]
    watched = Deadline(run_dir / deadline)
    # An earlier process may have left one.
    watched.clear()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *common, *arguments],
        stdin=stdin,
        pass_fds=pass_fds,
        # Only the parent handles Ctrl-C.
        start_new_session=True,
    )
    return Child(name, process, record_path, watched)


def child_parser(module: str) -> argparse.ArgumentParser:
    """The parser of a child, with the arguments that `start_child` gives to each."""
    parser = argparse.ArgumentParser(prog=module)
    for flag, kind in (("--config", Path), ("--run-dir", Path), ("--record", Path), ("--parent-pid", int)):
        parser.add_argument(flag, type=kind, required=True)
    return parser


def begun(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a child, which from now on ends with its parent."""
    options = parser.parse_args(arguments)
    die_with_parent(options.parent_pid)
    faulthandler.enable()
    return options


class Failures:
    """Why children ended, where the kernel's killing them for memory is told from other signals."""

    def __init__(self) -> None:
        self._num_oom_kills = num_oom_kills()

    def of(self, ended: Child) -> ServingError:
        before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        if ended.process.returncode == -signal.SIGKILL and self._num_oom_kills > before:
            return out_of_memory(ended.name, memory_limit())
        return ended.failure()


def out_of_memory(name: str, limit_bytes: int | None) -> FatalError:
    """The error for a process that the kernel killed because memory ran out, in a control group with this limit."""
    if limit_bytes is None:
        cause, cure = "the machine ran out of memory", "use a machine with more memory"
    else:
        cause = f"the memory limit of {gib(limit_bytes)} was reached"
        cure = f"raise that limit ({LIMIT_OF_A_POD})"
    message = f"the kernel killed the {name} because {cause}: {cure}, or serve fewer or shorter sequences"
    return FatalError(ExitCode.DEVICE_OUT_OF_MEMORY, message)
