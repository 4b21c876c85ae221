"""The tours of docs/speculation.md as people run them: answers are those without drafts, which metrics count."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from helpers.serve_command import serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo-model"
PAGE = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
MANY = 40
"""Questions after which drafts must have been made."""


def tour(title: str) -> list[tuple[str, str]]:
    """The commands below a heading, and what the page shows as their output."""
    text = re.split(r"^#+ ", PAGE.partition(f"### {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found: list[tuple[str, str]] = re.findall(
        r"^\$ ([^\n]*(?:\n +[^\n]*)*)\n((?:[^$ \n][^\n]*\n)*)", "".join(blocks), re.MULTILINE
    )
    return found


def answer_in(printed: str) -> str:
    (found,) = re.findall(r'"content":"[^"]*"', printed)
    return str(json.loads(f"{{{found}}}")["content"])


@pytest.mark.parametrize("title", ["A draft model guesses", pytest.param("The text guesses", marks=pytest.mark.long)])
def test_a_tour_shows_the_answer_without_drafts_and_counts_them(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (started, _), (asked, answered), (counted, shown) = tour(title)
    program, command, *arguments = shlex.split(started)
    assert (program, command) == ("neuron-runtime", "serve")
    monkeypatch.chdir(ROOT)
    with serve(*arguments, "--port", "0") as server:
        url = server.until_ready()

        def run(line: str) -> str:
            here = line.replace("localhost:8000", url.removeprefix("http://"))
            ended = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120, check=True)
            return ended.stdout

        expected = json.loads((DEMO / "expected.json").read_text(encoding="utf-8"))["What is neuron-serving?"]
        assert not answered or answer_in(answered) == expected
        names = [line.rsplit(" ", 1)[0] for line in shown.splitlines() if line != "..."]
        # On a busy machine drafts may seem not to pay, and metrics follow an answer.
        for _ in range(MANY):
            assert answer_in(run(asked)) == expected
            found = dict(line.rsplit(" ", 1) for line in run(counted).splitlines())
            num_drafts, num_tokens, num_accepted = (float(found[name]) for name in names)
            if num_accepted:
                break
    assert 1 <= num_drafts <= num_tokens
    assert 0 < num_accepted <= num_tokens
