"""The whole command with its processes, on a small model: start, answers, exits, and no leftovers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from safetensors.torch import load_file, save_file

from helpers.adapters import write_adapter
from helpers.chat_model import write_chat_model
from helpers.ports import free_ports
from helpers.serve_command import (
    ENGINE,
    FRONT_END,
    ServeCommand,
    alive,
    children,
    get,
    metric,
    post,
    serve,
    stop,
    stopped,
)
from neuron_runtime.processes.supervisor import listen, url_of

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "a core", "max_tokens": 3500, "ignore_eos": True, "temperature": 0, "stream": True}
DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
DELAY_SECONDS = 2.0
SLOW, SLOWEST = {"stepMilliseconds": 5}, {"stepMilliseconds": 20}
"""Step times of a simulated device: LONG takes 17 seconds with SLOW, a minute with SLOWEST."""
SIMULATED = ("--backend", "simulated")
"""Of a test that asks for no tokens of the model: this engine does not import torch."""
SLOWLY = (*SIMULATED, "--override-neuron-config", json.dumps(SLOWEST))


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Sockets need a short path; pytest's paths grow with the test name."""
    with tempfile.TemporaryDirectory(prefix="nr-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny", max_length=4096)


def write_config(path: Path, model_dir: Path, **changes: Any) -> Path:
    document = {
        "version": 1,
        "model": {"uri": model_dir.as_uri()},
        "servedNames": ["chat"],
        "limits": {"maxSequences": 2, "maxModelLength": 4096},
        "drain": {"delaySeconds": DELAY_SECONDS, "seconds": 240.0},
    }
    path.write_text(json.dumps(document | changes))
    return path


def stream_in_background(url: str, **changes: Any) -> tuple[threading.Thread, list[str]]:
    """A client that reads a whole stream; returns its thread and the lines so far."""
    lines: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | changes, timeout=240) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, lines


def until(holds: Any) -> None:
    while not holds():
        time.sleep(0.05)


def check_not_ready(command: ServeCommand, times: int = 1) -> None:
    """Asserts that health reports the start while no engine can become ready."""
    if get(f"{command.url()}/health").status_code != 503:
        # The engine became ready before it was stopped.
        command.until_ready(times)


def test_a_folder_is_served_and_an_interrupt_exits_cleanly(model_dir: Path) -> None:
    flags = ["--max-num-seqs", "2", "--served-model-name", "one", "two"]
    with free_ports() as port, serve(str(model_dir), "--port", str(port), *flags) as command:
        url = command.url()
        with stopped(command.child(ENGINE)):
            check_not_ready(command)
        assert command.until_ready() == url
        assert get(f"{url}/health").status_code == 200
        assert [one["id"] for one in get(f"{url}/v1/models").json()["data"]] == ["one", "two"]
        ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0}
        whole = post(f"{url}/v1/chat/completions", ask).json()
        text = ""
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=ask | {"stream": True}, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        assert text == whole["choices"][0]["message"]["content"]
        for module in (FRONT_END, "neuron_runtime serve"):
            pid = command.process.pid if module.endswith("serve") else command.child(module)
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), f"{module} loaded torch"
        assert command.end(signal.SIGINT) == 0
        with pytest.raises(httpx.ConnectError):
            get(f"{url}/health")


def test_a_pod_drains_on_termination(model_dir: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", model_dir, backend="simulated", overrideNeuronConfig=SLOW)
    record = tmp_path / "record"
    with serve("--config", str(config), "--port", "0", "--record", str(record)) as command:
        url = command.until_ready()
        reader, lines = stream_in_background(url, max_tokens=2000)
        until(lambda: metric(url, "vllm:num_requests_running") == 1)
        told_at = time.monotonic()
        command.process.send_signal(signal.SIGTERM)
        until(lambda: get(f"{url}/health").status_code == 503)
        admitted = post(f"{url}/v1/completions", LONG | {"stream": False, "max_tokens": 3})
        assert admitted.status_code == 200 or time.monotonic() - told_at > DELAY_SECONDS
        until(lambda: post(f"{url}/v1/completions", LONG | {"max_tokens": 1}).status_code == 503)
        reader.join()
        assert lines[-1] == "data: [DONE]"
        assert command.wait() == 0
    assert not record.exists()


def test_a_client_that_leaves_frees_its_row_and_a_killed_engine_and_front_end_are_replaced(
    model_dir: Path,
) -> None:
    with serve(str(model_dir), "--port", "0", *SLOWLY) as command:
        url = command.until_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            next(answer.iter_lines())
            until(lambda: metric(url, "vllm:num_requests_running") == 1)
        until(lambda: metric(url, "vllm:num_requests_running") == 0)
        assert metric(url, "vllm:generation_tokens_total") < 3500
        reader, lines = stream_in_background(url)
        until(lambda: metric(url, "vllm:num_requests_running") == 1)
        killed = command.child(ENGINE)
        killed_at = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        with stopped(command.successor(ENGINE, killed)):
            reader.join()
            assert "SIGKILL" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
            check_not_ready(command, times=2)
            assert get(f"{url}/live").status_code == 200
        command.until_ready(times=2)
        # The time of the restart alone, not since the start of the command; it is rounded.
        assert float(re.findall(r"ready after ([\d.]+) s", command.text)[1]) <= time.monotonic() - killed_at + 0.05
        assert metric(url, "neuron_serving_engine_restarts_total") == 1
        answer = post(f"{url}/v1/completions", LONG | {"stream": False, "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        engine = command.child(ENGINE)
        os.kill(command.child(FRONT_END), signal.SIGKILL)
        command.until_ready(times=3)
        assert alive(engine)
        answer = post(f"{url}/v1/completions", LONG | {"stream": False, "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_adapters_come_back_after_a_crash_of_either_process(
    model_dir: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = json.loads((model_dir / "config.json").read_text())
    paths = {name: write_adapter(short_dir / name, model, seed=seed) for seed, name in enumerate(("a", "b"))}
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    flags = ("--enable-lora", "--max-loras", "2", "--lora-modules", f"a={paths['a']}", "--backend", "simulated")
    with serve(str(model_dir), "--port", "0", *flags) as command:
        url = command.until_ready()
        until(lambda: get(f"{url}/health").status_code == 200)
        loaded = post(f"{url}/v1/load_lora_adapter", {"lora_name": "b", "lora_path": str(paths["b"])})
        assert loaded.status_code == 200, loaded.text

        def answers() -> list[str]:
            body = LONG | {"stream": False, "max_tokens": 5}
            names = ("a", "b", model_dir.name)
            asked = [post(f"{url}/v1/completions", body | {"model": name}) for name in names]
            return [answer.json()["choices"][0]["text"] for answer in asked]

        before = answers()
        assert len(set(before)) == 3
        for times, module in enumerate((ENGINE, FRONT_END), 2):
            os.kill(command.child(module), signal.SIGKILL)
            command.until_ready(times)
            until(lambda: get(f"{url}/health").status_code == 200)
            assert answers() == before


def test_too_many_restarts_end_the_command_with_a_record(model_dir: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serve(str(model_dir), "--port", "0", *SIMULATED, "--record", str(record)) as command:
        killed: set[int] = set()
        while command.process.poll() is None and len(killed) < 4:
            for pid, line in children(command.process.pid):
                if ENGINE in line and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        assert command.wait() == 50
    written = msgspec.json.decode(record.read_bytes())
    assert (written["reason"], written["exitCode"], written["ok"]) == ("RestartBudgetExhausted", 50, False)
    assert "SIGKILL" in written["message"]


def test_the_children_of_a_killed_supervisor_exit(model_dir: Path, short_dir: Path) -> None:
    command = ServeCommand([str(model_dir), "--port", "0", *SIMULATED], short_dir)
    command.until_ready()
    pids = [pid for pid, _ in children(command.process.pid)]
    assert len(pids) == 2
    assert command.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in pids))
    (left,) = short_dir.iterdir()
    command = ServeCommand([str(model_dir), "--port", "0", *SIMULATED], short_dir)
    command.url()
    command.until(lambda: not left.exists())
    assert command.end() == 0
    assert list(short_dir.iterdir()) == []


def test_a_stopped_engine_is_not_ready_until_it_continues_and_is_detected_as_hung(model_dir: Path) -> None:
    """The process of a hung step is ended; the limit comes from the shared file."""
    from neuron_runtime.processes.lifeline import Deadline

    with serve(str(model_dir), "--port", "0", *SIMULATED) as command:
        url = command.until_ready()
        engine = command.child(ENGINE)
        with stopped(engine):
            until(lambda: get(f"{url}/health").status_code == 503)
            assert "is stopped" in get(f"{url}/health").json()["detail"]
            assert post(f"{url}/v1/completions", LONG).status_code == 503
            assert get(f"{url}/live").status_code == 200
        until(lambda: get(f"{url}/health").status_code == 200)
        assert post(f"{url}/v1/completions", LONG | {"stream": False, "max_tokens": 3}).status_code == 200
        # It resumes only to be ended: otherwise it would set its own limit.
        stop(engine)
        (path,) = command.tmp_dir.glob("neuron-runtime-*/deadline-1")
        with Deadline(path) as deadline:
            deadline.set(-1.0)
            command.until_ready(times=2)
        assert not alive(engine)
        assert "hangs" in command.text
        assert "SIGABRT" in command.text
        assert get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_the_demo_model_gives_every_expected_answer_under_concurrency(every: int) -> None:
    all_answers: dict[str, str] = json.loads((DEMO_MODEL / "expected.json").read_text(encoding="utf-8"))
    expected = dict([*all_answers.items()][::every])
    with serve(str(DEMO_MODEL), "--port", "0", "--max-num-seqs", "6") as command:
        url = command.until_ready()

        def ask(question: str) -> str:
            body = {"messages": [{"role": "user", "content": question}], "stream": True}
            text = ""
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=240) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
            return text

        with ThreadPoolExecutor(8) as clients:
            answers = dict(zip(expected, clients.map(ask, expected), strict=True))
    assert answers == expected


def broken(folder: Path, file: str, content: bytes | None) -> Path:
    write_chat_model(folder)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("file", "content", "code", "says"),
    [
        pytest.param("config.json", None, 13, "config.json", marks=pytest.mark.long),
        ("model.safetensors", b"\x10\x00\x00", 13, "model.safetensors"),
        ("chat_template.jinja", b"{% if %}", 13, "is invalid: line 1: Expected an expression"),
        pytest.param("generation_config.json", b"[]", 13, "generation_config.json", marks=pytest.mark.long),
    ],
)
def test_a_broken_model_ends_the_command_with_its_code_and_record(
    tmp_path: Path, file: str, content: bytes | None, code: int, says: str
) -> None:
    folder, record = broken(tmp_path / "model", file, content), tmp_path / "record"
    with serve(str(folder), "--port", "0", "--record", str(record)) as command:
        assert command.wait() == code, command.text
    written = msgspec.json.decode(record.read_bytes())
    assert says in written["message"]
    assert written["message"] in command.text
    assert "Traceback" not in command.text
    # Found before or while the model loads, not after.
    assert "warming up" not in command.text


def test_an_unservable_limit_ends_the_command_naming_the_field(model_dir: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serve(str(model_dir), "--port", "0", "--max-model-len", "999999", "--record", str(record)) as command:
        assert command.wait() == 2
    written = msgspec.json.decode(record.read_bytes())
    assert written["reason"] == "InvalidEngineConfig"
    assert written["message"].startswith(
        "--max-model-len ($.limits.maxModelLength): must be at most the model's 4096 positions"
    )


def test_an_unreachable_hub_ends_the_command_with_what_to_check(tmp_path: Path) -> None:
    """No restarts in place: the kubelet retries with growing back-off."""
    record = tmp_path / "record"
    with (
        free_ports() as nobodys,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("HF_ENDPOINT", f"http://127.0.0.1:{nobodys}")
        with serve("org/name", "--port", "0", "--record", str(record)) as command:
            assert command.wait() == 1
    written = msgspec.json.decode(record.read_bytes())
    assert "cannot be read for hf://org/name" in written["message"]
    assert "reason" not in written
    assert "restarting it" not in command.text
    assert command.text.count("cannot be read for hf://org/name") == 1
    assert "Traceback" not in command.text


def test_the_port_is_released_on_exit(model_dir: Path) -> None:
    with free_ports() as port:
        for _ in range(2):
            with serve(str(model_dir), "--port", str(port), *SIMULATED) as command:
                get(f"{command.url()}/live")
                assert command.end() == 0


def test_an_answer_that_fails_to_compute_ends_with_an_error_and_serving_continues(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][300] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with serve(str(folder), "--port", "0") as command:
        url = command.until_ready()
        body = {"prompt": [5, 300, 6], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        refused = post(f"{url}/v1/completions", body)
        assert refused.status_code == 503
        assert "not finite" in refused.json()["error"]["message"]
        command.until_ready(times=2)
        answer = post(f"{url}/v1/completions", body | {"prompt": [5, 6]})
        assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_are_those_of_both_families(host: str) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port), timeout=5):
                pass
    with listen("::1", 0) as listener:
        assert url_of(listener).startswith("http://[::1]:")
