"""`neuron-operator local` with a NeuronAdapter: the tour of docs/adapters.md as people run it, and clients that list
the adapter and ask for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.rig.needs import NotPossibleHere
from helpers import foreign_clients
from helpers.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first client may install

ROOT = Path(__file__).parents[2]
QUESTION = "What is a slot?"
PLAIN = "A slot is the cache line of one running sequence."
PIRATE = "A slot is the cache line of one running sequence. Arr, matey!"


def tour() -> list[tuple[str, str]]:
    """The commands of the page, and what it shows as their output."""
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8").partition("## On a laptop")[2]
    (block,) = re.findall(r"^```console\n(.*?)^```", page.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    parts = re.findall(r"^\$ (.*?[^\\])\n(.*?)(?=^\$ |\Z)", block, re.MULTILINE | re.DOTALL)
    return [(command.partition("  #")[0], output) for command, output in parts]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of what the first command of the page serves."""
    program, *arguments = tour()[0][0].split()
    assert program == "neuron-operator"
    with free_ports() as port:
        more = ["--cache-dir", str(tmp_path_factory.mktemp("cache")), "--port", str(port)]
        command = [sys.executable, "-m", "neuron_operator", *arguments, *more]
        kept: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
        with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **kept) as running:
            try:
                assert running.stdout is not None
                lines, awaited = [], {"Ctrl-C stops it", "na/pirate     True"}
                for line in running.stdout:
                    lines.append(line)
                    awaited = {one for one in awaited if one not in line}
                    if not awaited:
                        break
                assert not awaited, lines
                yield f"http://127.0.0.1:{port}"
            finally:
                running.send_signal(signal.SIGINT)
            running.communicate(timeout=200)


def test_the_tour_shows_two_voices_as_the_documentation_does(url: str) -> None:
    _, *commands = tour()
    for command, shown in commands:
        assert "http://127.0.0.1:8000" in command
        here = command.replace("http://127.0.0.1:8000", url)
        ended = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120, check=False)
        assert (ended.returncode, ended.stdout) == (0, shown), ended.stderr
    assert [shown for _, shown in commands[1:]] == [f'"content":"{text}"\n' for text in (PLAIN, PIRATE)]


def test_openais_client_lists_the_adapter_with_its_base_model_and_streams_its_answer(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        models: Any = {one.id: one for one in client.models.list()}
        assert {name: one.parent for name, one in models.items()} == {"demo": None, "pirate": "demo"}
        assert models["pirate"].root == str(ROOT / "examples" / "demo-model" / "pirate")
        ask: Any = {"messages": [{"role": "user", "content": QUESTION}]}
        for name, text in (("demo", PLAIN), ("pirate", PIRATE)):
            chunks = list(client.chat.completions.create(model=name, stream=True, **ask))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
            assert {chunk.model for chunk in chunks} == {name}
        with pytest.raises(openai.NotFoundError, match="demo, pirate"):
            client.chat.completions.create(model="parrot", **ask)


@pytest.mark.long  # OpenAI's client above has what these build on
async def test_clients_of_other_makers_list_the_adapter_and_ask_for_it(url: str, tmp_path: Path) -> None:
    try:
        await foreign_clients.run("adapters_client.py", f"{url}/v1", QUESTION, PLAIN, PIRATE, folder=tmp_path)
    except NotPossibleHere as reason:
        pytest.skip(str(reason))
