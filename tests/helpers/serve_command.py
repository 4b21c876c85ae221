"""`neuron-runtime serve` as a person runs it: the real command, its children, its lines, its end."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

READY = re.compile(r"ready after [\d.]+ s: (http://\S+)/v1")
AT = re.compile(r" at (http://\S+)")


class ServeCommand:
    """One running command. Its lines are read as they come."""

    def __init__(self, arguments: list[str], tmp_dir: Path) -> None:
        self.lines: list[str] = []
        self.tmp_dir = tmp_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "neuron_runtime", "serve", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_dir), "OMP_NUM_THREADS": "1"},
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
        """Waits for something that is on its way, as long as the command lives."""
        while not holds():
            if self.process.poll() is not None:
                self._reader.join()
                assert holds(), f"the command ended with {self.process.returncode}:\n{self.text}"
                return
            time.sleep(0.05)

    def url(self) -> str:
        """Where it listens."""
        self.until(lambda: AT.search(self.text))
        found = AT.search(self.text)
        assert found
        return found[1]

    def until_ready(self, times: int = 1) -> str:
        self.until(lambda: len(READY.findall(self.text)) >= times)
        return str(READY.findall(self.text)[-1])

    def child(self, module: str) -> int:
        """Process id of the newest child that runs this module."""
        return max(pid for pid, command in children(self.process.pid) if module in command)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reader.join()
        return code


def children(parent: int) -> list[tuple[int, str]]:
    """Process ids and command lines of a process's children."""
    found = []
    for folder in Path("/proc").iterdir():
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == parent and after_name[0] != "Z":
                    found.append((int(folder.name), (folder / "cmdline").read_bytes().decode().replace("\0", " ")))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def serve(*arguments: str) -> Iterator[ServeCommand]:
    """Runs the command; asserts afterwards that it left no process, no port and no file."""
    with tempfile.TemporaryDirectory(prefix="nr-") as folder:
        command = ServeCommand([*arguments, "--weights-dir", f"{folder}/weights"], Path(folder))
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


def metric(url: str, name: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no series {name}")
