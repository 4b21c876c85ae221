"""Runs the real `neuron-runtime serve` command and observes its children, output and exit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

READY = re.compile(r"ready after [\d.]+ s: (http://\S+)/v1")
AT = re.compile(r" at (http://\S+)")
FRONT_END, ENGINE = "neuron_runtime.processes.front_end", "neuron_runtime.processes.engine"
PATIENCE_SECONDS = 60.0
"""Time limit of a response on a busy machine."""
END_SECONDS = 240.0


class ServeCommand:
    """One running command; its output is read continuously."""

    def __init__(
        self,
        arguments: list[str],
        tmp_dir: Path,
        within: Sequence[str] = (),
        *,
        command: str = "serve",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """within: a command that runs the one in its arguments, such as `nice`."""
        self.lines: list[str] = []
        self.tmp_dir = tmp_dir
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "neuron_runtime", command, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_dir), "OMP_NUM_THREADS": "1", **environment},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, holds: Callable[[], object]) -> None:
        """Waits for a condition while the command runs."""
        while not holds():
            if self.process.poll() is not None:
                self._reader.join()
                assert holds(), f"the command ended with {self.process.returncode}:\n{self.text}"
                return
            time.sleep(0.05)

    def url(self) -> str:
        """The address of the server."""
        self.until(lambda: AT.search(self.text))
        found = AT.search(self.text)
        assert found
        return found[1]

    def until_ready(self, times: int = 1) -> str:
        self.until(lambda: len(READY.findall(self.text)) >= times)
        return str(READY.findall(self.text)[-1])

    def child(self, module: str) -> int:
        """Pid of the newest child that runs this module; waits until there is one."""
        return self.successor(module, 0)

    def successor(self, module: str, pid: int) -> int:
        """Pid of the child that replaced another one with this module."""
        found: list[int] = []

        def runs() -> bool:
            found[:] = [one for one, command in children(self.process.pid) if module in command and one != pid]
            return bool(found)

        self.until(runs)
        return max(found)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(END_SECONDS)
        self._reader.join()
        return code


def children(parent: int) -> list[tuple[int, str]]:
    """Pids and command lines of the children of a process."""
    found = []
    for folder in Path("/proc").iterdir():
        # A process may end while it is inspected.
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == parent and after_name[0] != "Z":
                    found.append((int(folder.name), (folder / "cmdline").read_bytes().decode().replace("\0", " ")))
    return found


def state(pid: int) -> str:
    """The kernel's letter, `T` for stopped, `Z` for a zombie; empty without a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def stop(pid: int) -> None:
    """Stops a process and waits until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while state(pid) != "T":
        time.sleep(0.001)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process for a while."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def serve(
    *arguments: str, within: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ServeCommand]:
    """Runs the command and asserts afterwards that it left no process, port or file."""
    with tempfile.TemporaryDirectory(prefix="nr-") as folder:
        command = ServeCommand(
            [*arguments, "--weights-dir", f"{folder}/weights"], Path(folder), within, environment=environment
        )
        known: list[int] = []
        try:
            command.until(lambda: len(children(command.process.pid)) >= 2 or command.process.poll() is not None)
            known = [pid for pid, _ in children(command.process.pid)]
            yield command
            known += [pid for pid, _ in children(command.process.pid)]
        finally:
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGINT)
                command.process.send_signal(signal.SIGINT)
            command.wait()
        assert [pid for pid in known if alive(pid)] == []
        assert list(Path(folder).iterdir()) == []


def get(url: str) -> httpx.Response:
    # Nothing here is encrypted: certificates are not even read.
    return httpx.get(url, timeout=PATIENCE_SECONDS, verify=False)


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(url, json=body, headers=headers, timeout=PATIENCE_SECONDS, verify=False)


def metric(url: str, name: str) -> float:
    for line in get(f"{url}/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no series {name}")
