"""`neuron-runtime serve` as a child process, for benchmarks that start their own server.

Called by the suite. Starts the command on a free port, waits until it is healthy, records
its output lines with their times, and stops it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

from neuron_runtime.errors import ServingError

POLL_SECONDS = 0.01
END_SECONDS = 60.0
_AT = re.compile(r" at (http://\S+)$")


class SpawnedServer:
    """A context manager; within it `/health` of the server returns 200.

    Raises:
        ServingError: the command exited, or was not ready in time; includes its last line.
    """

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, ready_within_seconds: float = 600.0
    ) -> None:
        self.base_url = ""
        self.seconds_to_ready = 0.0
        """From the start of the command to the first 200."""
        self.lines: list[tuple[float, str]] = []
        """Its output: (seconds since its start, line)."""
        self._arguments = list(arguments)
        self._env = {**os.environ, **(env or {})}
        self._ready_within_seconds = ready_within_seconds

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "neuron_runtime", "serve", "--port", "0", *self._arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=self._env,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append((time.monotonic() - self._began, line.rstrip("\n")))
                if found := _AT.search(self.lines[-1][1]):
                    self.base_url = found[1]

    def _wait_until_ready(self) -> None:
        while not (self.base_url and _healthy(self.base_url)):
            if self.process.poll() is not None:
                self._reader.join()
                raise ServingError(f"the server exited with code {self.process.returncode}: {self._last_line()}")
            if time.monotonic() - self._began > self._ready_within_seconds:
                seconds = self._ready_within_seconds
                raise ServingError(f"the server was not ready within {seconds:.0f} s: {self._last_line()}")
            time.sleep(POLL_SECONDS)
        self.seconds_to_ready = time.monotonic() - self._began

    def _last_line(self) -> str:
        return self.lines[-1][1] if self.lines else "it printed nothing"

    def _end(self) -> None:
        """The first interrupt starts a drain, the second ends it; no requests are running."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                time.sleep(POLL_SECONDS)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()


def _healthy(base_url: str) -> bool:
    try:
        with urlopen(f"{base_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
