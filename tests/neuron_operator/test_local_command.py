"""The `neuron-operator local` command: refusals, and reasons instead of endless waiting."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from helpers.adapters import write_adapter
from helpers.ports import free_ports
from helpers.serve_command import children
from neuron_operator.__main__ import main
from neuron_operator.local.command import _Session, read_manifest, read_manifests
from neuron_operator.local.pods import CannotRunHere

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
MODEL = """
apiVersion: neuron-serving.dev/v1alpha1
kind: NeuronModel
metadata: {name: demo}
spec:
  model: {uri: "%s"}
  accelerator: {type: %s}
%s
"""
SERVABLE = MODEL % ("file:///x", "CPU", "")


def local(folder: Path, manifest: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = folder / "model.yaml"
    file.write_text(manifest)
    command = [sys.executable, "-m", "neuron_operator", "local", "-f", str(file), "--cache-dir", str(folder / "cache")]
    with free_ports() as port:
        command += ["--port", str(port), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def refusal(folder: Path, manifest: str, *arguments: str) -> str:
    """What the command says where it refuses to start anything."""
    file, said = folder / "model.yaml", io.StringIO()
    file.write_text(manifest)
    with free_ports() as port, contextlib.redirect_stderr(said):
        command = ["local", "-f", str(file), "--cache-dir", str(folder / "cache"), "--port", str(port), *arguments]
        assert main(command) == 2
    return said.getvalue()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [(("--picture", "none.png"), "goes with --ask"), (("--picture", "none.png", "--ask", "What?"), "No such file")],
)
def test_a_picture_without_question_or_file_is_refused(tmp_path: Path, flags: tuple[str, ...], complaint: str) -> None:
    assert complaint in refusal(tmp_path, SERVABLE, *flags)


def test_a_missing_model_ends_the_command_with_its_reason_however_long_its_name_is(tmp_path: Path) -> None:
    longest = (MODEL % ("file:///no/such/model", "CPU", "")).replace("demo", "d" * 63)
    ended = local(tmp_path, longest)
    assert ended.returncode == 1
    assert "neuron-operator local: ModelNotFound: /no/such/model is not a folder" in ended.stderr
    assert ended.stderr.count("is not a folder") == 2, "by the pod, and as the reason"
    assert "metadata.name must be a DNS label" in refusal(tmp_path, longest.replace("ddd", "dddd"))


def test_an_unsupported_field_ends_the_command_with_a_remedy(tmp_path: Path) -> None:
    ended = local(tmp_path, MODEL % ("file:///x", "Neuron", "  engine: {backend: optimum}\n  serving: {blockSize: 8}"))
    assert ended.returncode == 1
    assert "FieldNotSupported: spec.serving.blockSize" in ended.stderr
    assert "remove it: with this backend each request has one line of the cache" in ended.stderr


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        ("{", "is not YAML"),
        ("kind: Pod", "contains 0 NeuronModels"),
        ("kind: NeuronModel\n---\nkind: NeuronModel", "contains 2 NeuronModels"),
        ("kind: NeuronModel", "apiVersion must be neuron-serving.dev/v1alpha1"),
        (SERVABLE.replace("v1alpha1", "v9"), "apiVersion must be neuron-serving.dev/v1alpha1"),
        (SERVABLE.replace("{name: demo}", "{}"), "metadata.name is missing"),
        (SERVABLE.replace("{name: demo}", '{name: "a\\0b"}'), "metadata.name must be a DNS label"),
        (SERVABLE.replace("{name: demo}", "{name: a, namespace: ../victim}"), "metadata.namespace must be a DNS label"),
        (SERVABLE.replace("{name: demo}", "{name: a, namespace: 5}"), "metadata.namespace must be a DNS label"),
        ("spec: " + "[" * 5000, "is not YAML"),
        ("spec: &loop {model: *loop}", "is not YAML"),
        (r'spec: "\ud800"', "is not YAML"),
        ("spec: 2026-13-45", "is not YAML"),
    ],
)
def test_a_file_without_exactly_one_model_is_refused_in_one_line(tmp_path: Path, manifest: str, complaint: str) -> None:
    said = refusal(tmp_path, manifest)
    assert complaint in said
    assert said.count("\n") == 1


def test_a_name_with_path_separators_creates_no_folder_outside_the_cache(tmp_path: Path) -> None:
    keep = tmp_path / "victim" / "keep"
    keep.mkdir(parents=True)
    name = "x/../../../victim"
    refusal(tmp_path, SERVABLE.replace("{name: demo}", f"{{name: {name}}}"), "--fresh")
    assert keep.is_dir()


def test_a_model_path_is_relative_to_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(MODEL % ("file:./weights", "CPU", ""))
    assert read_manifest(file)["spec"]["model"]["uri"] == f"file://{tmp_path}/weights"


def test_a_date_in_a_manifest_is_a_string_as_in_kubectl(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(MODEL % ("file:///x", "CPU", "  podTemplate: {metadata: {annotations: {since: 2026-01-02}}}"))
    assert read_manifest(file)["spec"]["podTemplate"]["metadata"]["annotations"] == {"since": "2026-01-02"}


ADAPTER = """
apiVersion: neuron-serving.dev/v1alpha1
kind: NeuronAdapter
metadata: {name: %s}
spec: {model: demo, uri: "file:./%s"}
"""


def test_adapters_come_from_the_file_of_the_model_or_from_a_folder(tmp_path: Path) -> None:
    elsewhere = ADAPTER.replace("{name: %s}", "{name: %s, namespace: other}") % ("far", "far")
    both = "---".join((ADAPTER % ("b", "second"), SERVABLE, ADAPTER % ("a", "first"), elsewhere))
    (tmp_path / "one.yaml").write_text(both)
    (tmp_path / "two.json").write_text(json.dumps({"kind": "Pod"}))
    (tmp_path / "notes.txt").write_text("{")
    for path in (tmp_path / "one.yaml", tmp_path):
        model, adapters = read_manifests(path)
        assert model["metadata"]["name"] == "demo"
        found = [(one["metadata"]["name"], one["spec"]["uri"], one["metadata"]["generation"]) for one in adapters]
        assert found == [("b", f"file://{tmp_path}/second", 1), ("a", f"file://{tmp_path}/first", 1)]
    (tmp_path / "later.yaml").write_text(ADAPTER.replace("v1alpha1", "v9") % ("c", "third"))
    with pytest.raises(CannotRunHere, match="apiVersion must be"):
        read_manifests(tmp_path)
    with pytest.raises(CannotRunHere, match="File name too long"):
        read_manifests(tmp_path / ("x" * 300))


@pytest.mark.long
def test_adapters_of_the_manifests_are_served_and_one_that_does_not_fit_is_tried_again(tmp_path: Path) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    for name, rank in (("voice", 4), ("fat", 16)):
        write_adapter(tmp_path / name, config, rank=rank, scale=0.3)
    serving = "  serving: {adapters: {maxActive: 1, maxRank: 8}}\n  rollout: {drainDelaySeconds: 0}"
    manifests = (MODEL % (DEMO_MODEL.as_uri(), "CPU", serving), ADAPTER % ("voice", "voice"), ADAPTER % ("fat", "fat"))
    (tmp_path / "all.yaml").write_text("---".join(manifests))
    command = [
        sys.executable,
        "-m",
        "neuron_operator",
        "local",
        "-f",
        str(tmp_path),
        "--cache-dir",
        str(tmp_path / "c"),
    ]
    with (
        free_ports() as port,
        subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            lines = "".join(iter_until(running.stdout, "Ctrl-C stops it"))
            body = {"prompt": "What is a pod?", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            url = f"http://127.0.0.1:{port}/v1/completions"
            texts = {
                name: httpx.post(url, json={**body, "model": name}, timeout=60).json()["choices"][0]["text"]
                for name in ("demo", "voice")
            }
            write_adapter(tmp_path / "fat", config, rank=8, scale=0.3)
            later = list(iter_until(running.stdout, "na/fat        True"))
            answer = httpx.post(url, json={**body, "model": "fat"}, timeout=60)
        finally:
            running.send_signal(signal.SIGINT)
        running.communicate(timeout=200)
    assert re.search(r"na/fat +False +RankTooHigh: .*rank 16", lines)
    assert "na/voice      True" in lines + "".join(later)
    assert texts["demo"] != texts["voice"]
    assert answer.status_code == 200


def test_a_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neuron_operator", "local", "-f", str(tmp_path / "none.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "No such file" in ended.stderr


@pytest.mark.parametrize("accelerator", ["Neuron", "Neuron, devices: 1"])
@pytest.mark.parametrize("more", ["", "  engine: {backend: torch}"])
def test_missing_devices_are_reported_with_a_remedy_before_the_model_is_read(
    tmp_path: Path, accelerator: str, more: str
) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo-model"
    (line,) = refusal(tmp_path, MODEL % (demo.as_uri(), accelerator, more)).splitlines()
    assert "is for Neuron devices, this machine has 0 (/dev/neuron*): set spec.accelerator.type: CPU in the" in line


SIMULATED = """
  serving: {sampling: Host}
  engine: {backend: simulated, overrideNeuronConfig: {stepMilliseconds: %s}}
  rollout: {drainDelaySeconds: 0}
"""


def test_a_simulated_device_is_served_locally(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo-model"
    file = tmp_path / "model.yaml"
    file.write_text(MODEL % (demo.as_uri(), "CPU", SIMULATED % 5))
    command = [sys.executable, "-m", "neuron_operator", "local", "-f", str(file), "--cache-dir", str(tmp_path / "c")]
    with (
        free_ports() as port,
        subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            lines = list(iter_until(running.stdout, "Ctrl-C stops it"))
            body = {"model": "demo", "prompt": "What is a pod?", "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
        finally:
            running.send_signal(signal.SIGINT)
        running.communicate(timeout=200)
    assert any("simulates a device with backend simulated" in line for line in lines)
    assert any("WeightsReady" in line and line.rstrip().endswith(f"from {demo.as_uri()}") for line in lines)
    assert answer["usage"]["completion_tokens"] == 6
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 6


@pytest.mark.slow
def test_a_replica_on_two_nodes_is_two_processes_that_answer_and_end_as_one(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo-model"
    file = tmp_path / "model.yaml"
    file.write_text(MODEL % (demo.as_uri(), "CPU", "  parallelism: {nodes: 2}\n  rollout: {drainDelaySeconds: 0}"))
    command = [sys.executable, "-m", "neuron_operator", "local", "-f", str(file), "--cache-dir", str(tmp_path / "c")]
    with (
        free_ports(3) as port,
        subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            lines = list(iter_until(running.stdout, "Ctrl-C stops it"))
            body = {"model": "demo", "prompt": "What is a pod?", "max_tokens": 6, "ignore_eos": True}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
            programs = [command_line.split()[2] for _, command_line in children(running.pid)]
        finally:
            running.send_signal(signal.SIGINT)
        rest, _ = running.communicate(timeout=200)
    assert answer["usage"]["completion_tokens"] == 6, lines
    assert sorted(programs) == ["follow", "serve"]
    assert running.returncode == 0, rest
    assert rest.rstrip().endswith("stopped")
    assert not list((tmp_path / "c").rglob("group-secret/secret")), "the secret stays no longer than the processes"


def iter_until(lines: IO[str], last: str) -> Iterator[str]:
    for line in lines:
        yield line
        if last in line:
            return


@pytest.mark.slow
def test_a_model_is_compiled_once_and_the_cache_keeps_its_artifact(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo-model"
    options = "  engine: {backend: simulated, compile: Enabled}\n  rollout: {drainDelaySeconds: 0}"
    manifest = MODEL % (demo.as_uri(), "CPU", options)
    with free_ports() as port:
        first, second = (local(tmp_path, manifest, "--exit", "--port", str(port)) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr
    assert "Compiled      False  Compiling: compiling the model" in first.stderr
    assert re.search(r"compiled in \d+ s", first.stderr)
    assert "nothing to compile" in second.stderr
    assert "Compiled      True   artifact" in second.stderr


def test_an_unknown_setting_of_a_simulated_device_ends_the_command_naming_it(tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo-model"
    ended = local(tmp_path, MODEL % (demo.as_uri(), "CPU", (SIMULATED % 5).replace("stepMilliseconds", "speed")))
    assert ended.returncode == 1
    reported = [line for line in ended.stderr.splitlines() if line.startswith("neuron-operator local: ")]
    ended_with = "InvalidEngineConfig: pod demo-0 ended with exit code 2 (restarts: 0): $.overrideNeuronConfig.speed: "
    assert len(reported) == 1
    assert f"{ended_with}the simulated backend has no such setting" in reported[0]


def test_a_second_local_for_the_same_model_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "cache" / "local" / "default.demo.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another `neuron-operator local` is serving demo" in refusal(tmp_path, SERVABLE)


WITH_KEYS = "  serving: {apiKeySecretRef: {name: chat-keys, key: api.keys}}"


def test_a_missing_key_secret_is_reported_with_a_remedy(tmp_path: Path) -> None:
    said = refusal(tmp_path, MODEL % (DEMO_MODEL.as_uri(), "CPU", WITH_KEYS))
    assert "`local` has no Secret chat-keys/api.keys; export CHAT_KEYS_API_KEYS=... first" in said


@pytest.mark.slow
def test_api_keys_come_from_the_shell_and_local_uses_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_KEYS_API_KEYS", "\nsk-local-first\nsk-local-second\n")
    manifest = MODEL % (DEMO_MODEL.as_uri(), "CPU", WITH_KEYS + "\n  engine: {backend: simulated}")
    with free_ports() as port:
        ended = local(tmp_path, manifest, "--port", str(port), "--ask", "What is a device?", "--exit")
    assert ended.returncode == 0, ended.stderr
    assert "first token after" in ended.stdout
    assert '"api_key":1' in ended.stderr
    written = [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert written
    assert not [one for one in (ended.stdout.encode(), ended.stderr.encode(), *written) if b"sk-local" in one]


async def test_no_line_of_a_pod_lands_inside_a_printed_answer(tmp_path: Path) -> None:
    options = argparse.Namespace(ask="What?", picture=None, exit=True, quiet=False)
    session = _Session({}, tmp_path, options)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in ("one ", "two"):
            await answer.write(b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": piece}}]}).encode())
            session._log("demo-0", "an access log line")
        await answer.write_eof()
        return answer

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
    shown = io.StringIO()
    async with TestServer(app) as server:
        plan = SimpleNamespace(ports={"http": server.port}, secrets={}, env={})
        pods = SimpleNamespace(running=[SimpleNamespace(process=SimpleNamespace(ready=True, plan=plan))])
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            await session._announce(pods)  # type: ignore[arg-type]
            session._log("demo-0", "a later line")
    question, _, rest = shown.getvalue().partition("  > What?\n")
    answer, _, after = rest.partition(" tokens in ")
    assert "an access log line" not in question + answer
    assert "one two" in answer
    assert [line.strip() for line in after.splitlines() if "|" in line] == [
        "demo-0 | an access log line",
        "demo-0 | an access log line",
        "demo-0 | a later line",
    ]


@pytest.mark.long  # test_torch_draft_model.py and test_draft_models.py have both sides
@pytest.mark.timeout(300)
async def test_a_draft_model_makes_drafts_and_the_status_shows_how_many_are_right(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DEMO_MODEL / "draft", draft)
    for file in DEMO_MODEL.glob("tokenizer*.json"):  # a model without is none
        shutil.copy(file, draft)
    speculation = f'{{method: Draft, model: {{uri: "{draft.as_uri()}"}}}}'
    serving = f"  serving: {{speculation: {speculation}}}\n  rollout: {{drainDelaySeconds: 0}}"
    (tmp_path / "model.yaml").write_text(MODEL % (DEMO_MODEL.as_uri(), "CPU", serving))
    with free_ports() as port:
        options = argparse.Namespace(port=port, ask="", exit=False, quiet=True, picture=None)
        session = _Session(read_manifest(tmp_path / "model.yaml"), tmp_path, options)
        running = asyncio.create_task(session.run())
        try:
            while not session.announced and not running.done():
                await asyncio.sleep(0.1)
            asked = {"model": "demo", "messages": [{"role": "user", "content": "What is neuron-serving?"}]}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                while not running.done() and "acceptedLength" not in session.model.body["status"]:
                    await client.post("/v1/chat/completions", json={**asked, "temperature": 0})
                    session.wake.set()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await running
    status = session.model.body["status"]
    assert status["draft"]["digest"] != status["model"]["digest"]
    assert 2 < float(status["acceptedLength"]) <= 5
