"""One `neuron-gateway` as a process of its own, for tests of the process and for `bench.gateway`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helpers.ports import free_ports

START_SECONDS = 60.0


class Process:
    """Started at once; `port` is the first of two ports."""

    def __init__(self, port: int, log: Path, document: Mapping[str, Any]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = log
        self._observed = f"http://127.0.0.1:{port + 1}"
        config = {"host": "127.0.0.1", "port": port, "metricsPort": port + 1, **document}
        env = {"PATH": os.environ["PATH"], "NEURON_GATEWAY_CONFIG": json.dumps(config)}
        with log.open("wb") as out:
            command = [sys.executable, "-m", "neuron_operator.gateway.process"]
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)

    def status(self, path: str) -> int:
        """Of the port for metrics and health; 0: nobody answers."""
        try:
            with urllib.request.urlopen(self._observed + path, timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metrics(self) -> str:
        with urllib.request.urlopen(self._observed + "/metrics", timeout=60) as response:
            return str(response.read().decode())

    def metric(self, name: str, *labels: str) -> float:
        """The sum of the series with these labels, each as `name="value"`."""
        lines = (line for line in self.metrics().splitlines() if line.startswith(f"neuron_serving_{name}"))
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))

    def until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self.status("/readyz") != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def started(document: Mapping[str, Any]) -> Iterator[Process]:
    """A gateway that is ready; ended with the block."""
    with tempfile.TemporaryDirectory(prefix="ng-") as folder, free_ports(2) as port:
        process = Process(port, Path(folder) / "log", document)
        try:
            process.until_ready()
            yield process
        finally:
            if process.process.poll() is None:
                process.process.kill()
                process.process.wait()
