"""Several front ends on one port: the real command with processes killed and frozen while they serve."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import write_chat_model
from helpers.serve_command import ENGINE, FRONT_END, ServeCommand, alive, children, owner, serve, stop, until_healthy
from neuron_runtime.engine.lifeline import Deadline

pytestmark = pytest.mark.slow

NUM_CLIENTS = 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny", max_length=4096)


OPEN: list[Client] = []


@pytest.fixture(autouse=True)
def _closed_afterwards() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@contextlib.contextmanager
def serving(model_dir: Path, step_milliseconds: float = 10) -> Iterator[ServeCommand]:
    device = json.dumps({"stepMilliseconds": step_milliseconds})
    flags = ["--backend", "simulated", "--override-neuron-config", device, "--max-num-seqs", str(NUM_CLIENTS)]
    with serve(str(model_dir), "--port", "0", "--no-access-log", "--api-server-count", "2", *flags) as command:
        yield command


class Client:
    """One persistent connection."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.http = http.client.HTTPConnection(host, int(port), timeout=60)
        self.http.connect()
        self._streams: list[http.client.HTTPResponse] = []
        OPEN.append(self)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self.http.close()

    def get(self, path: str) -> tuple[int, str]:
        self.http.request("GET", path)
        answer = self.http.getresponse()
        return answer.status, answer.read().decode()

    def metric(self, name: str, labels: str = "") -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{") and labels in line)

    def send(self, **changes: Any) -> None:
        body = {"prompt": "a core", "max_tokens": 50, "ignore_eos": True, "stream": True} | changes
        self.http.request("POST", "/v1/completions", json.dumps(body))

    def stream(self, **changes: Any) -> http.client.HTTPResponse:
        """A started stream; its events can be read later."""
        self.send(**changes)
        self._streams.append(self.http.getresponse())
        return self._streams[-1]


def front_ends(command: ServeCommand) -> list[int]:
    return sorted(pid for pid, line in children(command.process.pid) if FRONT_END in line)


def clients_of_each(command: ServeCommand) -> dict[int, list[Client]]:
    """Open connections by front end; every front end is ready and has some."""
    url, pids = command.until_ready(), front_ends(command)
    found: dict[int, list[Client]] = {pid: [] for pid in pids}
    while sum(map(len, found.values())) < NUM_CLIENTS or not all(found.values()):
        client = Client(url)
        until_healthy(client.http)
        found[owner(client.http.sock, pids)].append(client)
    return found


def test_a_burst_of_streams_is_shared(model_dir: Path) -> None:
    num_streams = 48
    with serving(model_dir) as command:
        clients_of_each(command)
        pids = front_ends(command)
        owners: Counter[int] = Counter()
        for _ in range(3):
            clients = [Client(command.url()) for _ in range(num_streams)]
            # All connections wait before any is read.
            for client in clients:
                client.send(max_tokens=10)
            owners.update(owner(client.http.sock, pids) for client in clients)
            assert {client.http.getresponse().read().decode()[-14:] for client in clients} == {"data: [DONE]\n\n"}
        assert max(owners.values()) <= 0.6 * owners.total(), owners


def test_every_front_end_serves_and_reports_the_metrics_of_all(model_dir: Path) -> None:
    with serving(model_dir) as command:
        found = clients_of_each(command)
        assert len(found) == 2
        everybody = [client for clients in found.values() for client in clients]
        asked = everybody[:NUM_CLIENTS]
        spare = Client(command.url())
        streams = [client.stream(temperature=0, max_tokens=400) for client in asked]
        texts = [stream.read().decode() for stream in streams]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        for clients in found.values():
            for client in clients[:2]:
                assert client.metric("vllm:request_success_total", 'finished_reason="length"') == NUM_CLIENTS
                assert client.metric("vllm:generation_tokens_total") == NUM_CLIENTS * 400
                assert client.metric("vllm:prompt_tokens_total") % NUM_CLIENTS == 0
                assert client.metric("vllm:num_requests_running") == 0
        steps = {client.metric("vllm:iteration_tokens_total_count") for client in everybody[:4]}
        assert len(steps) == 1
        # Each ran 400 steps, many of them together.
        assert 400 <= steps.pop() <= NUM_CLIENTS * 401
        # One request per front end runs for most of a minute: every front end reports both.
        for clients in found.values():
            clients[0].stream(max_tokens=4000)
        for client in (spare, *(clients[1] for clients in found.values() if len(clients) > 1)):
            assert client.metric("vllm:num_requests_running") == 2


def test_a_killed_front_end_is_replaced_while_streams_of_others_continue(model_dir: Path) -> None:
    # Slow steps: without an abort, an abandoned request would run for minutes.
    with serving(model_dir, step_milliseconds=40) as command:
        found = clients_of_each(command)
        (victim, survivor), engine = found, command.child(ENGINE)
        short = {"max_tokens": 10, "temperature": 0}
        answers = {events(clients[0].stream(**short))[0] for clients in found.values()}
        assert len(answers) == 1
        lost = [client.stream(max_tokens=4000) for client in found[victim][:4]]
        kept = [client.stream(max_tokens=300, stream_options={"include_usage": True}) for client in found[survivor][:4]]
        spare = Client(command.url())
        before = spare.metric("vllm:generation_tokens_total")
        assert before >= 20
        os.kill(victim, signal.SIGKILL)
        for stream in lost:
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                stream.read()
        command.until_ready(times=2)
        for stream in kept:
            _, usage, end = events(stream)
            assert (json.loads(usage)["usage"]["completion_tokens"], end) == (300, "[DONE]")
        again = clients_of_each(command)
        assert victim not in again
        assert survivor in again
        assert alive(engine)
        for clients in again.values():
            command.until(lambda client=clients[0]: client.metric("vllm:num_requests_running") == 0)
            assert clients[0].metric("vllm:generation_tokens_total") >= before
            assert clients[0].metric("neuron_serving_engine_restarts_total") == 0
        assert {events(clients[0].stream(**short))[0] for clients in again.values()} == answers


def events(stream: http.client.HTTPResponse) -> tuple[str, str, str]:
    """The text of a whole stream and its last two events."""
    reported = [event.removeprefix("data: ") for event in stream.read().decode().split("\n\n") if event]
    parts = [json.loads(event)["choices"] for event in reported[:-1]]
    return "".join(choice["text"] for choices in parts for choice in choices), reported[-2], reported[-1]


def test_a_frozen_front_end_is_ended(model_dir: Path) -> None:
    with serving(model_dir) as command:
        found = clients_of_each(command)
        frozen, other = found
        stop(frozen)
        # The others report its last counts.
        assert found[other][0].get("/metrics")[0] == 200
        new = [Client(command.url()) for _ in range(NUM_CLIENTS)]
        assert {client.get("/health")[0] for client in new} == {200}
        (path,) = (
            path
            for path in command.tmp_dir.glob("neuron-runtime-*/front-end-?")
            if f"--{path.name[:-2]}={path.name[-1]}" in Path(f"/proc/{frozen}/cmdline").read_text()
        )
        with Deadline(path) as deadline:
            deadline.set(-1.0)
            command.until_ready(times=2)
        assert "the front end hangs" in command.text
        assert not alive(frozen)
        assert all(clients[0].get("/health")[0] == 200 for clients in clients_of_each(command).values())


def test_a_drain_waits_for_the_streams_of_all_front_ends(model_dir: Path) -> None:
    with serving(model_dir) as command:
        found = clients_of_each(command)
        streams = [clients[0].stream(max_tokens=300) for clients in found.values()]
        command.process.send_signal(signal.SIGTERM)
        assert [stream.read().decode().endswith("data: [DONE]\n\n") for stream in streams] == [True, True]
        assert command.wait() == 0


def test_a_killed_engine_fails_the_requests_of_all_front_ends_and_is_replaced(model_dir: Path) -> None:
    with serving(model_dir) as command:
        found = clients_of_each(command)
        streams = [clients[0].stream(max_tokens=4000) for clients in found.values()]
        os.kill(command.child(ENGINE), signal.SIGKILL)
        for stream in streams:
            assert "SIGKILL" in stream.read().decode().rpartition("data: ")[2]
        command.until_ready(times=2)
        assert clients_of_each(command).keys() == found.keys()
