"""`neuron-operator local` with `backend: vllm`: from a manifest to tokens, with the real vLLM on the CPU, and to the
reason of a failure, with its stand-in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.rig.needs import NotPossibleHere
from fakes.vllm_serve import serve as stand_in
from helpers import vllm_cpu
from helpers.hub import Shelf, serving
from helpers.ports import free_ports

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
MANIFEST: dict[str, Any] = {
    "apiVersion": "neuron-serving.dev/v1alpha1",
    "kind": "NeuronModel",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"uri": DEMO_MODEL.as_uri()},
        "accelerator": {"type": "CPU"},
        "serving": {"dtype": "float32", "maxModelLength": 512, "maxSequences": 4},
        "rollout": {"drainDelaySeconds": 0, "drainSeconds": 120},
    },
}
EAGER = {"backend": "vllm", "args": ["--enforce-eager"]}
PROMPTS = ("What is a pod?", "A replica of a model", "kubectl")


class Local:
    """The command, while it runs."""

    def __init__(self, folder: Path, spec: dict[str, Any], port: int, env: dict[str, str]) -> None:
        file = folder / "model.yaml"
        file.write_text(json.dumps({**MANIFEST, "spec": {**MANIFEST["spec"], **spec}}))
        self.lines: list[str] = []
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "neuron_operator", "local", "-f", str(file), "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--cache-dir", str(folder / "cache")],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(lines)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            assert self.process.poll() is None, self.text
            time.sleep(0.05)

    def wait(self) -> int:
        code = self.process.wait()
        self._reader.join()
        return code


@contextlib.contextmanager
def local(folder: Path, spec: dict[str, Any], **env: str) -> Iterator[Local]:
    folder.mkdir(exist_ok=True)
    with free_ports(3) as port:
        command = Local(folder, spec, port, env)
        try:
            yield command
        finally:
            for _ in range(2):  # the second kills
                command.process.send_signal(signal.SIGINT)
            command.wait()


def answers(url: str) -> list[tuple[str, int]]:
    """Greedy answers with their number of tokens."""
    found = []
    for prompt in PROMPTS:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        found.append((answer["choices"][0]["text"], answer["usage"]["completion_tokens"]))
    return found


@pytest.fixture(scope="module")
def real() -> dict[str, str]:
    """Variables of a shell in which `vllm` is the real one."""
    try:
        folder = vllm_cpu.folder()
    except NotPossibleHere as error:
        pytest.skip(str(error))
    return {**vllm_cpu.ENVIRONMENT, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """Answers of the torch backend."""
    with local(tmp_path_factory.mktemp("torch"), {"engine": {"backend": "torch"}}) as ours:
        ours.until(lambda: "Ctrl-C stops it" in ours.text)
        return answers(ours.url)


@pytest.mark.long  # three quarters of a minute of CPU; its parser reads our flags in test_vllm_flags.py always
@pytest.mark.timeout(600, func_only=True)
def test_vllm_answers_as_torch_does_and_ends_a_stream_before_itself(
    tmp_path: Path, real: dict[str, str], expected: list[tuple[str, int]]
) -> None:
    one = {**MANIFEST["spec"]["serving"], "maxSequences": 1, "blockSize": 128, "numBlocks": 4}
    with local(tmp_path, {"engine": EAGER, "serving": one}, **real) as theirs:
        theirs.until(lambda: "Ctrl-C stops it" in theirs.text)
        assert answers(theirs.url) == expected
        body = {"model": "demo", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{theirs.url}/v1/completions", json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            theirs.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert '"finish_reason":"length"' in events[-2]
        assert events[-1] == "data: [DONE]"
        assert theirs.wait() == 0, theirs.text


def reason_of(command: Local) -> tuple[str, str]:
    """What the command ended with."""
    (line,) = (line for line in command.lines if line.startswith("neuron-operator local: "))
    reason, _, message = line.removeprefix("neuron-operator local: ").partition(": ")
    return reason, message


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a shell in which `vllm` is the stand-in."""
    program = tmp_path_factory.mktemp("bin") / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in.__file__} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "FAKE_VLLM_VERSION": "cpu"}


def test_a_failure_of_vllm_ends_the_command_with_the_cause_and_not_the_last_line(
    tmp_path: Path, fake: dict[str, str]
) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("corpus"))
    spec = {"engine": {"backend": "vllm"}, "model": {"uri": "file:./model"}}
    with local(tmp_path, spec, FAKE_VLLM_FAULT="cores-busy", **fake) as command:
        assert command.wait() == 1
    found, message = reason_of(command)
    assert found == "DeviceHeld"
    assert "Logical Neuron Core(s) not available" in message


def test_a_model_of_a_hub_is_fetched_before_vllm_starts(tmp_path: Path, fake: dict[str, str]) -> None:
    kept = shutil.ignore_patterns("corpus")
    shutil.copytree(DEMO_MODEL, tmp_path / "hub" / "acme" / "tiny" / "main", ignore=kept)
    shelf = Shelf(tmp_path / "hub", private={"acme/tiny": "hf_secret"})
    spec = {"engine": {"backend": "vllm"}, "model": {"uri": "hf://acme/tiny", "credentialsSecretRef": {"name": "hub"}}}
    with serving(shelf) as endpoint:
        shell = {**fake, "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}
        with local(tmp_path, spec, **shell) as command:
            command.until(lambda: "Ctrl-C stops it" in command.text)
            assert httpx.get(f"{command.url}/v1/models").json()["data"][0]["id"] == "demo"
    assert (tmp_path / "cache").is_dir()
    (weights,) = (tmp_path / "cache").rglob("weights/*/model.safetensors")
    assert weights.read_bytes() == (DEMO_MODEL / "model.safetensors").read_bytes()


def test_a_wrong_flag_is_named(tmp_path: Path, fake: dict[str, str]) -> None:
    with local(tmp_path, {"engine": {"backend": "vllm", "args": ["--no-such-flag"]}}, **fake) as command:
        assert command.wait() == 1
    found, message = reason_of(command)
    assert found == "InvalidEngineConfig"
    assert "unrecognized arguments: --no-such-flag" in message


def test_without_vllm_in_the_path_the_command_says_how_to_get_it(tmp_path: Path) -> None:
    with local(tmp_path, {"engine": {"backend": "vllm"}}, PATH="/usr/bin:/bin") as command:
        assert command.wait() == 2
    assert "vllm is not installed: install it into an environment of its own" in command.text


def test_the_key_that_clients_send_comes_from_the_shell(tmp_path: Path, fake: dict[str, str]) -> None:
    serving = {**MANIFEST["spec"]["serving"], "apiKeySecretRef": {"name": "chat", "key": "TOKEN"}}
    spec = {"engine": {"backend": "vllm"}, "serving": serving}
    with local(tmp_path, spec, TOKEN="sk-local", **fake) as command:
        command.until(lambda: "Ctrl-C stops it" in command.text)
        assert httpx.get(f"{command.url}/v1/models").status_code == 401
    assert "sk-local" not in command.text


@pytest.mark.parametrize("value", ["sk-one\nsk-two", "sk-one\n"])
def test_several_lines_as_its_one_key_are_refused(tmp_path: Path, fake: dict[str, str], value: str) -> None:
    serving = {**MANIFEST["spec"]["serving"], "apiKeySecretRef": {"name": "chat", "key": "TOKEN"}}
    with local(tmp_path, {"engine": {"backend": "vllm"}, "serving": serving}, TOKEN=value, **fake) as command:
        assert command.wait() == 2
    assert "spec.serving.apiKeySecretRef: " in command.text
    assert "sk-one" not in command.text


ON_TWO_NODES = {"parallelism": {"nodes": 2}, "engine": EAGER}


def members(command: Local, rank: int) -> list[int]:
    """Process groups of those with that number."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            is_child = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == command.process.pid
            if is_child and f"--node-rank={rank}" in words:
                found.append(int(folder.name))
    return found


@pytest.mark.long  # a minute of CPU; the groups of the stand-in are tested always
@pytest.mark.timeout(600, func_only=True)
def test_vllm_on_two_nodes_answers_as_torch_does_and_fails_as_one(
    tmp_path: Path, real: dict[str, str], expected: list[tuple[str, int]]
) -> None:
    with local(tmp_path, ON_TWO_NODES, **real, GLOO_SOCKET_IFNAME="lo") as command:
        command.until(lambda: "Ctrl-C stops it" in command.text)
        assert answers(command.url) == expected
        (leader,), (follower,) = members(command, 0), members(command, 1)
        os.killpg(follower, signal.SIGKILL)
        command.until(lambda: leader not in members(command, 0))


def test_a_group_on_two_nodes_ends_as_one_and_starts_again_as_one(tmp_path: Path, fake: dict[str, str]) -> None:
    with local(tmp_path, ON_TWO_NODES, **fake) as command:
        command.until(lambda: "Ctrl-C stops it" in command.text)
        (leader,), (follower,) = members(command, 0), members(command, 1)
        assert answers(command.url)
        os.killpg(leader, signal.SIGKILL)
        command.until(lambda: members(command, 0) not in ([], [leader]) and members(command, 1) not in ([], [follower]))
        command.until(lambda: is_answering(command.url))
        (second,) = members(command, 1)
        os.killpg(second, signal.SIGKILL)
        command.until(lambda: members(command, 1) not in ([], [second]))
        command.until(lambda: is_answering(command.url))


def is_answering(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def test_a_follower_stays_until_the_leader_has_given_its_answers(tmp_path: Path, fake: dict[str, str]) -> None:
    with local(tmp_path, ON_TWO_NODES, **fake) as command:
        command.until(lambda: "Ctrl-C stops it" in command.text)
        body = {"model": "demo", "prompt": "a", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{command.url}/v1/completions", json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGTERM)
            time.sleep(1)
            assert members(command, 1)
            assert list(filter(None, lines))[-1] == "data: [DONE]"
        assert command.wait() == 0
