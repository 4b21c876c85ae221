"""One `neuron-operator run` as a process of its own, for tests of the process and for `bench.operator_scale`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from cluster.rig.machine import WAIT_SECONDS
from helpers.operator_rights import OPERATOR_NAMESPACE


class Process:
    """Started at once. `port` is the first of two ports: of metrics and of health."""

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        port: int,
        *flags: str,
        host: str = "127.0.0.1",
        program: Sequence[str] = ("-m", "neuron_operator"),
    ) -> None:
        """program: of Python, with the flags of the command behind it."""
        self.host = host
        self.port = port
        self.log = log
        environ = {
            "PATH": os.environ["PATH"],
            "NEURON_OPERATOR_RUNTIME_IMAGE": "example.com/runtime:1",
            "NEURON_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
            "NEURON_OPERATOR_KUBECONFIG": str(kubeconfig),
        }
        command = [sys.executable, *program, "run", "--http-host", host]
        ports = ["--http-port", str(port), "--health-port", str(port + 1)]
        with log.open("wb") as out:
            self.process = subprocess.Popen([*command, *ports, *flags], env=environ, stdout=out, stderr=out)

    def get(self, path: str) -> tuple[int, str]:
        port = self.port + 1 if path == "/healthz" else self.port
        try:
            authority = f"[{self.host}]" if ":" in self.host else self.host
            with urllib.request.urlopen(f"http://{authority}:{port}{path}", timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError:
            return 0, ""

    def is_leading(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "neuron_operator_leader 1.0" in self.get("/metrics")[1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
