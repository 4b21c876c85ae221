"""Pods as processes on this machine: supported and refused fields, and termination."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.ports import free_ports
from neuron_operator.local.pods import CannotRunHere, LocalHost, interpret
from neuron_operator.local.process import PodProcess

SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists(sys.argv[2]) or self.path == "/live" else 503); self.end_headers()
    def log_message(self, *a): pass
def ended(*_):
    open(sys.argv[3], "w").write('{"ok": true}'); print("bye", flush=True); os._exit(0)
signal.signal(signal.SIGTERM, ended)
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def pod() -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": "chat-0", "namespace": "default", "uid": "u"},
        "spec": {
            "serviceAccountName": "chat",
            "terminationGracePeriodSeconds": 57,
            "containers": [
                {
                    "name": "runtime",
                    "image": "x",
                    "command": [sys.executable, "-c", SERVER, "8000", "/state/ready", "/dev/termination-log"],
                    "env": [
                        {"name": "HOME", "value": "/scratch"},
                        {"name": "CONFIG", "value": "/etc/app/config.json"},
                        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "HF_TOKEN"}}},
                    ],
                    "ports": [{"name": "http", "containerPort": 8000}],
                    "volumeMounts": [
                        {"name": "config", "mountPath": "/etc/app", "readOnly": True},
                        {"name": "tmp", "mountPath": "/scratch"},
                        {"name": "state", "mountPath": "/state"},
                    ],
                    "startupProbe": {
                        "httpGet": {"path": "/live", "port": "http"}, "periodSeconds": 0.05, "timeoutSeconds": 60,
                        "failureThreshold": 2000,
                    },
                    "readinessProbe": {
                        "httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 0.05, "timeoutSeconds": 60
                    },
                    "resources": {"requests": {"cpu": "1"}},
                }
            ],
            "volumes": [
                {"name": "config", "configMap": {"name": "chat-config"}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "state", "emptyDir": {}},
            ],
        },
    }  # fmt: skip


def host(root: Path, devices: int = 0) -> LocalHost:
    config = {"data": {"config.json": "{}"}}
    environment = {"PATH": os.environ["PATH"], "HF_TOKEN": "secret"}
    return LocalHost(root / "default.chat", environment, devices, config_maps={"chat-config": config})


@pytest.fixture
def port() -> Iterator[int]:
    """A port reserved for the pod."""
    with free_ports() as first:
        yield first


def test_paths_ports_and_references_of_a_pod_are_translated_to_this_machine(tmp_path: Path) -> None:
    plan = interpret(pod(), host(tmp_path), {8000: 9001})
    root = tmp_path / "default.chat" / "chat-0"
    assert plan.argv[3:] == ("9001", str(root / "state" / "ready"), str(root / "termination-message"))
    assert plan.env["HOME"] == str(root / "tmp")
    assert plan.env["CONFIG"] == str(root / "config" / "config.json")
    assert (plan.env["IP"], plan.env["TOKEN"]) == ("127.0.0.1", "secret")
    assert plan.files == {root / "config" / "config.json": "{}"}
    assert plan.ports == {"http": 9001}
    assert plan.readiness is not None
    assert plan.readiness.port == 9001
    assert plan.grace_seconds == 57


def test_a_volume_can_have_annotations_as_files(tmp_path: Path) -> None:
    body = pod()
    body["metadata"]["annotations"] = {"example.com/config": '{"version": 1}'}
    item = {"path": "config.json", "fieldRef": {"fieldPath": "metadata.annotations['example.com/config']"}}
    body["spec"]["volumes"][0] = {"name": "config", "downwardAPI": {"items": [item]}}
    plan = interpret(body, host(tmp_path), {8000: 9001})
    assert plan.files == {tmp_path / "default.chat" / "chat-0" / "config" / "config.json": '{"version": 1}'}


def pod_with_keys() -> dict[str, Any]:
    body = pod()
    secret = {"secretName": "chat-keys", "items": [{"key": "api.key", "path": "keys"}], "defaultMode": 292}
    body["spec"]["volumes"].append({"name": "api-key", "secret": secret})
    mount = {"name": "api-key", "mountPath": "/etc/keys", "readOnly": True}
    container = body["spec"]["containers"][0]
    container["volumeMounts"].append(mount)
    container["command"] += ["/etc/keys/keys"]
    return body


def with_variable(here: LocalHost, name: str, value: str) -> LocalHost:
    return replace(here, environment={**here.environment, name: value})


def test_a_claim_is_a_folder_that_the_models_of_this_machine_share(tmp_path: Path) -> None:
    body = copy.deepcopy(pod())
    body["spec"]["volumes"].append({"name": "model", "persistentVolumeClaim": {"claimName": "shared"}})
    mount = {"name": "model", "mountPath": "/mnt/claims/shared", "readOnly": True}
    body["spec"]["containers"][0]["volumeMounts"].append(mount)
    claims = tmp_path / "claims"
    plan = interpret(body, host(tmp_path), {8000: 9001})
    assert claims / "shared" in plan.folders
    assert plan.env["NEURON_SERVING_CLAIMS_DIR"] == str(claims)


def test_a_mounted_secret_comes_from_a_shell_variable(tmp_path: Path) -> None:
    plan = interpret(pod_with_keys(), with_variable(host(tmp_path), "CHAT_KEYS_API_KEY", "sk-1\nsk-2"), {8000: 9001})
    place = tmp_path / "default.chat" / "chat-0" / "api-key" / "keys"
    assert plan.secrets == {place: "sk-1\nsk-2"}
    assert plan.argv[-1] == str(place)
    with pytest.raises(CannotRunHere, match=r"has no Secret chat-keys/api\.key; export CHAT_KEYS_API_KEY="):
        interpret(pod_with_keys(), host(tmp_path), {8000: 9001})


async def test_a_secret_file_is_readable_by_its_owner_only(tmp_path: Path, port: int) -> None:
    body = pod_with_keys()
    program = "import os, sys; print(oct(os.stat(sys.argv[1]).st_mode & 0o777), open(sys.argv[1]).read())"
    body["spec"]["containers"][0]["command"] = [sys.executable, "-c", program, "/etc/keys/keys"]
    plan = interpret(body, with_variable(host(tmp_path), "CHAT_KEYS_API_KEY", "sk-1"), {8000: port})
    stated: list[str] = []
    process = PodProcess(plan, lambda name, line: stated.append(line))
    await process.start()
    await process.watch(lambda: None)
    assert stated == ["0o600 sk-1"]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"sk-1" in path.read_bytes()] == []


def test_a_path_that_resembles_a_mount_is_unchanged(tmp_path: Path) -> None:
    body = pod()
    body["spec"]["containers"][0]["args"] = ["/scratchfile", "/scratch/x", "0.0.0.0"]
    plan = interpret(body, host(tmp_path), {8000: 9001})
    assert plan.argv[-3:] == ("/scratchfile", str(tmp_path / "default.chat/chat-0/tmp/x"), "127.0.0.1")


def test_the_value_of_a_flag_is_translated_by_what_the_flag_means(tmp_path: Path) -> None:
    body = pod()
    several = ["--port=8000", "--port", "8000", "--host=::", "--max-model-len=8000", "--max-num-seqs", "8000"]
    body["spec"]["containers"][0]["args"] = [*several, "--chat-template=/scratch/x", '--config={"a":"/scratch"}']
    plan = interpret(body, host(tmp_path), {8000: 9001})
    assert plan.argv[6:] == (
        *("--port=9001", "--port", "9001", "--host=127.0.0.1", "--max-model-len=8000", "--max-num-seqs", "8000"),
        *(f"--chat-template={tmp_path}/default.chat/chat-0/tmp/x", '--config={"a":"/scratch"}'),
    )


def test_variables_in_a_command_are_replaced_as_by_a_kubelet(tmp_path: Path) -> None:
    body = pod()
    body["spec"]["containers"][0]["args"] = ["--ip=$(IP)", "--home=$(HOME)", "$(NONE)", "$$(IP)", "a$"]
    plan = interpret(body, host(tmp_path), {8000: 9001})
    home = tmp_path / "default.chat" / "chat-0" / "tmp"
    assert plan.argv[6:] == ("--ip=127.0.0.1", f"--home={home}", "$(NONE)", "$(IP)", "a$")


async def test_a_pod_is_told_to_stop_when_its_stop_command_has_ended(tmp_path: Path, port: int) -> None:
    body, lines = pod(), list[str]()
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)"
    hook = {"exec": {"command": [sys.executable, "-c", wait, "/scratch/go"]}}
    body["spec"]["containers"][0]["lifecycle"] = {"preStop": hook}
    process = PodProcess(interpret(body, host(tmp_path), {8000: port}), lambda _, line: lines.append(line))
    await process.start()
    watching = asyncio.create_task(process.watch(lambda: None))
    await _until(lambda: process.started)
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0.5)
    assert lines == ["serving"]
    (tmp_path / "default.chat" / "chat-0" / "tmp" / "go").touch()
    await stopping
    assert (await watching).exit_code == 0
    assert lines == ["serving", "bye"]


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("spec", "initContainers"), [{}], "spec.initContainers"),
        (("spec", "hostNetwork"), True, "spec.hostNetwork"),
        (("spec", "containers", 0, "lifecycle"), {"postStart": {}}, "lifecycle.postStart"),
        (("spec", "containers", 0, "lifecycle"), {"preStop": {"httpGet": {}}}, "lifecycle.preStop.httpGet"),
        (("spec", "containers", 0, "startupProbe"), {"exec": {}}, "startupProbe.exec"),
        (("spec", "containers", 0, "readinessProbe"), {"httpGet": {"port": "web"}}, "web is not a declared port"),
        (("spec", "containers", 0, "resources"), {"limits": {"aws.amazon.com/neuron": 1}}, "accelerator.type: CPU"),
        (("spec", "containers", 0, "resources"), {"limits": {"nvidia.com/gpu": 1}}, "nvidia.com/gpu"),
        (("spec", "containers", 0, "command"), ["no-such-program"], "no-such-program is not installed"),
        (("spec", "volumes", 1), {"name": "tmp", "hostPath": {"path": "/"}}, "hostPath"),
        (("spec", "volumes", 0), {"name": "config", "configMap": {"name": "gone"}}, "no ConfigMap gone"),
        (("spec", "containers", 0, "env", 3, "valueFrom", "secretKeyRef", "key"), "OTHER", "export OTHER="),
        (("spec", "containers", 0, "env", 2, "valueFrom"), {"resourceFieldRef": {}}, "resourceFieldRef"),
    ],
)  # fmt: skip
def test_an_uninterpretable_part_is_refused_by_name(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, complaint: str
) -> None:
    body = copy.deepcopy(pod())
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(CannotRunHere, match=complaint):
        interpret(body, host(tmp_path), {8000: 9001})


def test_available_devices_satisfy_a_pod(tmp_path: Path) -> None:
    body = pod()
    body["spec"]["containers"][0]["resources"] = {"limits": {"aws.amazon.com/neuron": 2}}
    interpret(body, host(tmp_path, devices=2), {8000: 9001})


async def _until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_pod_follows_its_readiness_probe_and_reports_its_termination_message(tmp_path: Path, port: int) -> None:
    lines: list[str] = []
    process = PodProcess(interpret(pod(), host(tmp_path), {8000: port}), lambda _, line: lines.append(line))
    await process.start()
    watching = asyncio.create_task(process.watch(lambda: None))
    await _until(lambda: process.started)
    assert not process.ready
    state = tmp_path / "default.chat" / "chat-0" / "state"
    (state / "ready").touch()
    await _until(lambda: process.ready)
    (state / "ready").unlink()
    await _until(lambda: not process.ready)
    assert process.was_ready
    await process.stop()
    ended = await watching
    assert (ended.exit_code, ended.message) == (0, '{"ok": true}')
    assert lines == ["serving", "bye"]


async def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path: Path, port: int) -> None:
    body = pod()
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    body["spec"]["containers"][0] |= {"command": [sys.executable, "-c", code]}
    body["spec"]["terminationGracePeriodSeconds"] = 0.2
    lines: list[str] = []
    process = PodProcess(interpret(body, host(tmp_path), {8000: port}), lambda _, line: lines.append(line))
    await process.start()
    watching = asyncio.create_task(process.watch(lambda: None))
    await _until(lambda: lines == ["deaf"])
    await process.stop()
    ended = await watching
    assert ended.exit_code == 128 + signal.SIGKILL


@pytest.mark.parametrize("session", [False, True], ids=["in its group", "in a session of its own"])
async def test_a_pod_ends_with_its_first_process_although_another_holds_its_output(
    tmp_path: Path, port: int, session: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_operator.local.process.DRAIN_SECONDS", 0.5)
    body, lines = pod(), list[str]()
    code = (
        f"import subprocess as s; p = s.Popen(['sleep', '600'], start_new_session={session}); print(p.pid, flush=True)"
    )
    body["spec"]["containers"][0] |= {"command": [sys.executable, "-c", f"{code}; print('last'); raise SystemExit(3)"]}
    process = PodProcess(interpret(body, host(tmp_path), {8000: port}), lambda _, line: lines.append(line))
    await process.start()
    try:
        async with asyncio.timeout(30):
            ended = await process.watch(lambda: None)
        assert ended.exit_code == 3
        assert lines[1:] == ["last"]
        await process.stop()
        if not session:
            await _until(lambda: not _lives(int(lines[0])))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(lines[0]), signal.SIGKILL)


def _lives(pid: int) -> bool:
    """Also false if it has ended and nobody waited for it."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


@pytest.mark.parametrize(
    ("policy", "code", "is_taken"),
    [("FallbackToLogsOnError", 3, True), ("File", 3, False), ("FallbackToLogsOnError", 0, False)],
)
async def test_the_end_of_the_log_is_the_message_of_a_failed_pod_that_left_none(
    tmp_path: Path, port: int, policy: str, code: int, is_taken: bool
) -> None:
    body = pod()
    program = f"print('early'); print('x' * 3000); print('the cause'); raise SystemExit({code})"
    body["spec"]["containers"][0] |= {"command": [sys.executable, "-c", program], "terminationMessagePolicy": policy}
    process = PodProcess(interpret(body, host(tmp_path), {8000: port}), lambda _, line: None)
    await process.start()
    ended = await process.watch(lambda: None)
    assert (ended.exit_code, ended.message.endswith("x\nthe cause\n")) == (code, is_taken)
    assert len(ended.message) == (2048 if is_taken else 0)


async def test_a_pod_may_write_long_lines(tmp_path: Path, port: int) -> None:
    lines: list[str] = []
    body = pod()
    script = "print('x' * 5_000_000, flush=True); print('y' * 300, flush=True); raise SystemExit(7)"
    body["spec"]["containers"][0]["command"] = [sys.executable, "-c", script]
    process = PodProcess(interpret(body, host(tmp_path), {8000: port}), lambda _, line: lines.append(line))
    async with asyncio.timeout(60):
        await process.start()
        ended = await process.watch(lambda: None)
    assert ended.exit_code == 7
    assert lines[-1] == "y" * 300
    assert "".join(lines[:-1]) == "x" * 5_000_000


async def test_a_pod_with_a_failing_startup_probe_is_stopped(tmp_path: Path, port: int) -> None:
    body = pod()
    body["spec"]["containers"][0]["startupProbe"] |= {"failureThreshold": 2, "httpGet": {"path": "/no", "port": "http"}}
    lines: list[str] = []
    process = PodProcess(interpret(body, host(tmp_path), {8000: port}), lambda _, line: lines.append(line))
    await process.start()
    await process.watch(lambda: None)
    assert not process.started
    assert any("start-up probe /no failed 2 times" in line for line in lines)
