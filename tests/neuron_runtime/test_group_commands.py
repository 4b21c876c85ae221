"""Groups of real processes: `serve` and `follow` on this machine, one after the other broken.

Whatever happens to one member, every command ends with the same code, and requests in flight are told so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.ports import free_ports
from helpers.serve_command import ENGINE, ServeCommand, children, get, post, serve, stop
from neuron_runtime.errors import ExitCode

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
RANK = "neuron_runtime.distributed.process"


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
def nodes(config: dict[str, Any], count: int, silence_seconds: float = 6.0) -> Iterator[Nodes]:
    """A ready group of `count` nodes on this machine; at the end nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="nr-") as folder, free_ports(3) as port:
        path, secret = Path(folder, "config.json"), Path(folder, "secret")
        path.write_text(json.dumps(config))
        secret.write_text("x" * 40)
        commands: list[ServeCommand] = []
        try:
            for node in range(count):
                scratch = Path(folder, f"node-{node}")
                scratch.mkdir()
                own = ["--port", "0"] if node == 0 else []
                commands.append(
                    ServeCommand(
                        ["--config", str(path), *own, "--weights-dir", f"{folder}/weights"],
                        scratch,
                        command="follow" if node else "serve",
                        environment={
                            "NEURON_SERVING_RANK": str(node),
                            "NEURON_SERVING_GROUP_SIZE": str(count),
                            "NEURON_SERVING_LEADER": "127.0.0.1",
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


def answer_of(url: str) -> tuple[str, str]:
    """What the demo model answers to the first question, and what it should."""
    expected: dict[str, str] = json.loads((DEMO / "expected.json").read_text())
    question = next(iter(expected))
    ask = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200}
    answer = post(f"{url}/v1/chat/completions", ask).json()
    return answer["choices"][0]["message"]["content"].strip(), expected[question].strip()


def test_two_ranks_of_one_command_answer_as_one() -> None:
    with serve(str(DEMO), "--port", "0", "--tensor-parallel-size", "2") as command:
        answer, expected = answer_of(command.until_ready())
        assert answer == expected
        assert command.end(signal.SIGINT) == 0


def test_two_nodes_answer_as_one_and_end_in_good_order() -> None:
    with nodes(document("torch", 2), 2, silence_seconds=20.0) as group:
        answer, expected = answer_of(group.url)
        assert answer == expected
        group.commands[0].process.send_signal(signal.SIGTERM)
        assert group.wait() == [0, 0]


@pytest.mark.long
def test_four_ranks_on_two_nodes_answer_as_one() -> None:
    with nodes(document("torch", 4), 2, silence_seconds=20.0) as group:
        answer, expected = answer_of(group.url)
        assert answer == expected
        group.commands[0].process.send_signal(signal.SIGTERM)
        assert group.wait() == [0, 0]


BREAK = {
    "a rank is killed": lambda group: os.kill(group.rank_of(1), signal.SIGKILL),
    "a rank is frozen": lambda group: stop(group.rank_of(1)),
    "a node is killed": lambda group: os.kill(group.commands[1].process.pid, signal.SIGKILL),
    "the leader's engine is frozen": lambda group: stop(group.rank_of(0)),
    "the leader's engine is killed": lambda group: os.kill(group.rank_of(0), signal.SIGKILL),
}


@pytest.mark.parametrize("what", BREAK)
def test_a_group_without_one_member_ends_everywhere_and_says_so(what: str) -> None:
    with nodes(simulated(), 2) as group:
        stream = Stream(group.url)
        BREAK[what](group)
        assert "error" in stream.end()
        codes = group.wait()
        lost = int(ExitCode.GROUP_MEMBER_LOST)
        assert codes == [lost, -signal.SIGKILL if what == "a node is killed" else lost]
        assert "GroupIncomplete: " in group.commands[0].text


def test_a_follower_ends_when_the_whole_leader_is_killed() -> None:
    with nodes(simulated(), 2) as group:
        group.commands[0].process.kill()
        assert group.wait() == [-signal.SIGKILL, int(ExitCode.GROUP_MEMBER_LOST)]
        assert "GroupIncomplete: rank 0: silent for " in group.commands[1].text


def test_an_idle_group_notices_a_frozen_member_too() -> None:
    with nodes(simulated(), 2) as group:
        stop(group.rank_of(1))
        assert group.wait() == [int(ExitCode.GROUP_MEMBER_LOST)] * 2
        assert "rank 1 (node 1): silent for " in group.commands[0].text


def test_a_killed_rank_of_one_command_ends_it_by_name() -> None:
    arguments = ["--backend", "simulated", "--override-neuron-config", '{"stepMilliseconds": 50}']
    with serve(str(DEMO), "--port", "0", "--tensor-parallel-size", "3", *arguments) as command:
        stream = Stream(command.until_ready())
        os.kill(command.child(RANK), signal.SIGKILL)
        assert "killed by SIGKILL" in stream.end()
        assert command.wait() == ExitCode.GROUP_MEMBER_LOST


def test_a_node_that_is_drained_ends_the_group_in_good_order() -> None:
    with nodes(simulated(), 2) as group:
        stream = Stream(group.url, max_tokens=60)
        group.commands[1].process.send_signal(signal.SIGTERM)
        assert "finish_reason" in stream.end()
        assert stream.lines[-1] == "data: [DONE]"
        assert group.wait() == [0, 0]


def test_a_group_serves_only_when_it_is_complete() -> None:
    with nodes(simulated(), 2) as group:
        assert get(f"{group.url}/health").status_code == 200
        lines = group.commands[0].lines
        assert any("waiting for the other ranks" in line for line in lines)
        assert any("following 127.0.0.1 as node 1 of 2, with 1 ranks" in line for line in group.commands[1].lines)


@pytest.mark.parametrize(
    ("command", "node", "message"),
    [
        ("follow", "0", "NEURON_SERVING_RANK: is 0: use `neuron-runtime serve` here instead of `follow`"),
        ("serve", "1", "NEURON_SERVING_RANK: is 1: use `neuron-runtime follow` here instead of `serve`"),
    ],
)
def test_the_wrong_command_for_a_node_is_refused(command: str, node: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(simulated()))
    (tmp_path / "secret").write_text("x" * 40)
    run = ServeCommand(
        ["--config", str(tmp_path / "config.json")],
        tmp_path,
        command=command,
        environment={
            "NEURON_SERVING_RANK": node,
            "NEURON_SERVING_GROUP_SIZE": "2",
            "NEURON_SERVING_LEADER": "127.0.0.1",
            "NEURON_SERVING_GROUP_SECRET_FILE": str(tmp_path / "secret"),
        },
    )
    assert run.wait() == ExitCode.INVALID_ENGINE_CONFIG
    assert message in run.text
