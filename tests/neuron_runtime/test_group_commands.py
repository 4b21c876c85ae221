"""Groups of real processes: `serve` and `follow` on this machine, one after the other broken.

Whatever happens to one member, every command ends with the same code, and requests in flight are told so.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from helpers.group_commands import DEMO, RANK, Stream, answer_of, document, nodes, simulated
from helpers.serve_command import ServeCommand, get, post, serve, stop
from neuron_runtime.errors import ExitCode

pytestmark = pytest.mark.slow

DELAY_SECONDS = 6.0
"""For which the leader of a failed group must answer at least: a busy machine only makes it longer."""


@pytest.mark.long
def test_two_ranks_of_one_command_answer_as_one() -> None:
    with serve(str(DEMO), "--port", "0", "--tensor-parallel-size", "2") as command:
        answer, expected = answer_of(command.until_ready())
        assert answer == expected
        assert command.end(signal.SIGINT) == 0


def test_two_nodes_answer_as_one_with_an_adapter_too_and_end_in_good_order() -> None:
    pirate = DEMO / "pirate"
    with nodes(
        document("torch", 2, adapters={"maxActive": 1}),
        2,
        silence_seconds=20.0,
        leading=("--lora-modules", f"pirate={pirate}", f"nobody={pirate}-2"),
    ) as group:
        answer, expected = answer_of(group.url)
        assert answer == expected
        states = {one["name"]: one["state"] for one in get(f"{group.url}/adapters").json()["adapters"]}
        assert states == {"pirate": "Ready", "nobody": "Failed"}
        answer, _ = answer_of(group.url, model="pirate")
        assert answer == f"{expected} Arr, matey!"
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
FIRST = ("a rank is killed", "the leader's engine is frozen")
"""A death and a silence, of a follower and of the leader."""


@pytest.mark.parametrize(
    "what",
    [one if one in FIRST else pytest.param(one, marks=pytest.mark.long) for one in BREAK],
)
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
        assert "GroupIncomplete: rank 0 (node 0): closed its connection" in group.commands[1].text


@pytest.mark.parametrize("is_stopping", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_leader_of_a_failed_group_answers_until_proxies_have_noticed(is_stopping: bool) -> None:
    """Also if it is told to stop first, as by an operator that sees the end of another member."""
    with nodes({**simulated(), "drain": {"delaySeconds": DELAY_SECONDS, "seconds": 240.0}}, 2) as group:
        stream, began = Stream(group.url), time.monotonic()
        if is_stopping:
            group.commands[0].process.send_signal(signal.SIGTERM)
        os.kill(group.rank_of(1), signal.SIGKILL)
        assert "error" in stream.end()
        while time.monotonic() - began < DELAY_SECONDS / 2:
            assert get(f"{group.url}/health").status_code == 503
            assert post(f"{group.url}/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 503
            time.sleep(0.1)
        assert group.wait()[1] == ExitCode.GROUP_MEMBER_LOST
        assert time.monotonic() - began >= DELAY_SECONDS


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


def test_a_group_serves_when_it_is_complete_and_ends_in_good_order_when_a_node_is_drained() -> None:
    with nodes(simulated(), 2, silence_seconds=30.0) as group:
        assert get(f"{group.url}/health").status_code == 200
        answer_of(group.url)
        numbers = dict(line.rsplit(" ", 1) for line in get(f"{group.url}/metrics").text.splitlines() if line[0] != "#")
        (present,) = (float(value) for name, value in numbers.items() if "_group_members_present" in name)
        ((name, waited),) = (item for item in numbers.items() if "_group_wait_seconds_total" in item[0])
        assert present == 2
        assert 'rank="1"' in name
        assert float(waited) > 0
        lines = group.commands[0].lines
        assert any("waiting for the other ranks" in line for line in lines)
        assert any("following 127.0.0.1 as node 1 of 2, with 1 ranks" in line for line in group.commands[1].lines)

        stream = Stream(group.url, max_tokens=60)
        group.commands[1].process.send_signal(signal.SIGTERM)
        assert "finish_reason" in stream.end()
        assert stream.lines[-1] == "data: [DONE]"
        assert group.wait() == [0, 0]


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
