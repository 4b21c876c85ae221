"""Groups of real commands on this machine, for tests that break one of them: `serve` leads, `follow` follows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from helpers.ports import free_ports
from helpers.serve_command import ENGINE, ServeCommand, children, post

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
RANK = "neuron_runtime.processes.rank"


LONG: dict[str, Any] = {"prompt": "a core", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}


def document(backend: str, tensor: int, **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "model": {"uri": DEMO.as_uri()},
        "servedNames": ["demo"],
        "backend": backend,
        "parallelism": {"tensor": tensor},
        "drain": {"delaySeconds": 0.0, "seconds": 240.0},
        **more,
    }


def simulated(tensor: int = 2, milliseconds: int = 50) -> dict[str, Any]:
    """A group that needs no torch; LONG takes more than a minute."""
    return document("simulated", tensor, overrideNeuronConfig={"stepMilliseconds": milliseconds})


@dataclass
class Nodes:
    """The commands of a group, the leader first."""

    commands: list[ServeCommand]
    url: str

    def wait(self) -> list[int]:
        """The exit codes of all."""
        return [command.wait() for command in self.commands]

    def rank_of(self, node: int) -> int:
        """Pid of a rank of a node; the leader's is its engine process."""
        return self.commands[node].child(RANK if node else ENGINE)


@contextlib.contextmanager
def nodes(
    config: dict[str, Any],
    count: int,
    *,
    silence_seconds: float = 6.0,
    environment: Mapping[str, str] = MappingProxyType({}),
    leader: str = "127.0.0.1",
    within: Sequence[str] = (),
    leading: Sequence[str] = (),
) -> Iterator[Nodes]:
    """A ready group of `count` nodes on this machine; at the end nothing of it is left.

    leading: flags of the first command alone.
    within: a command that runs those of followers, such as `ip netns exec`.
    """
    with tempfile.TemporaryDirectory(prefix="nr-") as folder, free_ports(3) as port:
        path, secret = Path(folder, "config.json"), Path(folder, "secret")
        path.write_text(json.dumps(config))
        secret.write_text("x" * 40)
        commands: list[ServeCommand] = []
        try:
            for node in range(count):
                scratch = Path(folder, f"node-{node}")
                scratch.mkdir()
                own = ["--port", "0", *leading] if node == 0 else []
                commands.append(
                    ServeCommand(
                        [
                            "--config",
                            str(path),
                            *own,
                            "--weights-dir",
                            f"{folder}/weights",
                            "--artifacts-dir",
                            f"{folder}/artifacts",
                        ],
                        scratch,
                        within if node else (),
                        command="follow" if node else "serve",
                        environment={
                            **environment,
                            "NEURON_SERVING_RANK": str(node),
                            "NEURON_SERVING_GROUP_SIZE": str(count),
                            "NEURON_SERVING_LEADER": leader,
                            "NEURON_SERVING_GROUP_SECRET_FILE": str(secret),
                            "NEURON_SERVING_GROUP_PORT": str(port),
                            "NEURON_SERVING_GROUP_SILENCE_SECONDS": str(silence_seconds),
                        },
                    )
                )
            yield Nodes(commands, commands[0].until_ready())
        finally:
            pids = [pid for command in commands for pid, _ in children(command.process.pid)]
            for command in commands:
                command.process.kill()
                command.wait()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Stream:
    """A client that reads a long answer."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.lines: list[str] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(f"{url}/v1/completions", LONG | changes))
        self._thread.start()
        assert self._begun.wait(120), "no token came"

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url, json=body, timeout=240) as answer:
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
                    self._begun.set()

    def end(self) -> str:
        """The last line, once the answer has ended."""
        self._thread.join(240)
        assert not self._thread.is_alive(), "the answer never ended"
        return [line for line in self.lines if line != "data: [DONE]"][-1]


def answer_of(url: str, **fields: Any) -> tuple[str, str]:
    """What the demo model answers to the first question, and what it should."""
    expected: dict[str, str] = json.loads((DEMO / "expected.json").read_text())
    question = next(iter(expected))
    ask = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200, **fields}
    answer = post(f"{url}/v1/chat/completions", ask).json()
    return answer["choices"][0]["message"]["content"].strip(), expected[question].strip()
