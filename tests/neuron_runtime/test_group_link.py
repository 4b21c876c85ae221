"""A group over a link that loses everything: neither side is told that the other is gone.

The follower runs in a network namespace of its own, which needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from helpers.group_commands import Stream, answer_of, document, nodes, simulated
from neuron_runtime.errors import ExitCode

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "iptables"))), reason="needs root, ip and iptables"
    ),
]

HERE, THERE = "10.213.0.1", "10.213.0.2"


class Link:
    """Between this machine and a namespace."""

    def __init__(self) -> None:
        self._name = f"nsgroup{os.getpid()}"
        self._outside = f"nsg{os.getpid()}a"
        self.within = ("ip", "netns", "exec", self._name)

    def __enter__(self) -> Link:
        name, inside = self._name, f"nsg{os.getpid()}b"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", self._outside, "type", "veth", "peer", "name", inside, "netns", name)
        run("ip", "addr", "add", f"{HERE}/30", "dev", self._outside)
        run("ip", "link", "set", self._outside, "up")
        run(*self.within, "ip", "addr", "add", f"{THERE}/30", "dev", inside)
        run(*self.within, "ip", "link", "set", inside, "up")
        run(*self.within, "ip", "link", "set", "lo", "up")
        return self

    def __exit__(self, *error: object) -> None:
        run("ip", "link", "del", self._outside)
        run("ip", "netns", "del", self._name)

    def cut(self) -> None:
        """Packets are lost, not refused."""
        for chain in ("INPUT", "OUTPUT"):
            run(*self.within, "iptables", "-A", chain, "-j", "DROP")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@pytest.fixture
def link() -> Iterator[Link]:
    with Link() as made:
        yield made


def test_both_sides_of_a_cut_link_end_by_themselves(link: Link) -> None:
    with nodes(simulated(), 2, leader=HERE, within=link.within) as group:
        stream = Stream(group.url)
        link.cut()
        assert "error" in stream.end()
        assert group.wait() == [int(ExitCode.GROUP_MEMBER_LOST)] * 2
        assert "rank 1 (node 1): silent for " in group.commands[0].text
        assert "rank 0 (node 0): silent for " in group.commands[1].text


def test_ranks_inside_a_collective_end_too_when_the_link_is_cut(link: Link) -> None:
    """Tensors travel over the link, at addresses that each node finds by itself."""
    with nodes(document("torch", 2), 2, leader=HERE, within=link.within) as group:
        answer, expected = answer_of(group.url)
        assert answer == expected
        stream = Stream(group.url)
        link.cut()
        assert "error" in stream.end()
        assert group.wait() == [int(ExitCode.GROUP_MEMBER_LOST)] * 2
