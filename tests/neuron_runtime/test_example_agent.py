"""The tour of an agent, `examples/agent.py`, as people run it: against the demo model of a server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.serve_command import serve

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with serve(str(EXAMPLES / "demo-model"), "--port", "0", "--served-model-name", "demo") as command:
        yield f"{command.until_ready()}/v1"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "agent.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("more", [(), ("--stream",)])
def test_the_tour_calls_tools_and_prints_what_the_documentation_shows(base_url: str, more: tuple[str, ...]) -> None:
    page = (EXAMPLES.parent / "docs" / "tools.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\$ python examples/agent.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    ended = run("--base-url", base_url, *more)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rstrip() == shown.rstrip()
    assert shown.count("({") == 3


def test_the_agent_says_which_server_does_not_answer() -> None:
    ended = run("--base-url", "http://127.0.0.1:9/v1", "Which models are there?")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("http://127.0.0.1:9/v1: ")
