"""Slow, numerous, disconnected or flooding clients: their cost is bounded, and others do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.front_end import Served, english_token_ids, running_front_end, write_text_files
from helpers.chat_model import write_chat_model
from helpers.front_end import make_model, serving
from helpers.ports import free_ports
from helpers.serve_command import ENGINE, FRONT_END, ServeCommand, children, get, metric, post, serve, stop
from neuron_runtime.core import First, TokenEvent
from neuron_runtime.engine import messages
from neuron_runtime.engine.messages import Step
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.processes.supervisor import listen, url_of
from neuron_runtime.server.bodies import BODIES_AT_ONCE

LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw)


def connect(url: str, receive_bytes: int = 0) -> socket.socket:
    """A connection; `receive_bytes` limits the kernel's receive buffer."""
    host, _, port = url.removeprefix("http://").partition(":")
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect((host, int(port)))
    return made


def mapped_files(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def threads_seconds(pid: int) -> tuple[float, float]:
    """CPU time of a process's first thread, which runs the event loop, and of all others."""
    ticks = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        after_name = (thread / "stat").read_text().rpartition(")")[2].split()
        ticks[int(thread.name)] = (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return ticks.pop(pid), sum(ticks.values())


# Slow and disconnected readers


class Engine:
    """The engine of a front end process, driven by the test."""

    def __init__(self, model: Path, served: Served) -> None:
        self._tokens = english_token_ids(model)
        self._served = served
        self._num_steps = 0
        self._begun: set[str] = set()

    def step(self, ids: Iterable[str]) -> None:
        """One token for each request."""
        token = self._tokens[self._num_steps % len(self._tokens)]
        news = tuple(TokenEvent(one, (token,), first=None if one in self._begun else First(0, 0.0, ())) for one in ids)
        self._begun.update(one.request_id for one in news)
        self._num_steps += 1
        self._served.send(Step(news, (), EngineStats(num_running=len(news))))


ENDLESS = request({"prompt": [1, 2], "max_tokens": 900_000, "ignore_eos": True, "stream": True})


def next_event(stream: socket.socket) -> None:
    """The disconnect must arrive without any other event."""
    received = b""
    while b"data: " not in received:
        received += stream.recv(65536)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_files(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
def test_256_stalled_clients_use_bounded_memory_and_delay_no_other_stream(text_dir: Path) -> None:
    num_slow, num_to_fill, num_more = 256, 600, 1000
    with running_front_end(text_dir, num_slow + 1) as served, contextlib.ExitStack() as connections:
        for _ in range(num_slow):
            connections.enter_context(connect(served.url, receive_bytes=2048)).sendall(ENDLESS)
        slow = served.take_requests(num_slow)
        fast = connections.enter_context(connect(served.url))
        fast.sendall(ENDLESS)
        ids = [*slow, *served.take_requests(1)]
        engine = Engine(text_dir, served)
        for _ in range(num_to_fill):
            engine.step(ids)
            next_event(fast)
        full = resident_bytes(served.pid)
        for _ in range(num_more):
            engine.step(ids)
            next_event(fast)
        # Beyond the buffers, only the text is stored, some bytes per token.
        assert resident_bytes(served.pid) - full < num_more * num_slow * 30


def test_a_client_that_reads_nothing_is_disconnected_and_its_request_aborted(text_dir: Path) -> None:
    with running_front_end(text_dir, 2, stall_seconds=1) as served, connect(served.url, receive_bytes=2048) as stuck:
        stuck.sendall(ENDLESS)
        ids = served.take_requests(1)
        engine = Engine(text_dir, served)
        for _ in range(2000):
            engine.step(ids)
        # More than the buffers hold: the engine gets the abort before the answer has ended.
        assert messages.decode_to_engine(served.inbox.recv()) == messages.Abort(tuple(ids))


@pytest.fixture(scope="module")
def front_end(text_dir: Path) -> Iterator[Served]:
    """One for all clients that leave."""
    with running_front_end(text_dir, 2) as served:
        yield served


@pytest.mark.parametrize("ending", ["closed", "reset"])
def test_a_disconnect_reaches_the_engine_within_a_step(text_dir: Path, front_end: Served, ending: str) -> None:
    with connect(front_end.url) as leaving:
        leaving.sendall(ENDLESS)
        ids = front_end.take_requests(1)
        engine = Engine(text_dir, front_end)
        engine.step(ids)
        next_event(leaving)
        if ending == "reset":
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if ending == "closed":
        # It might still read: its system refuses the next token.
        engine.step(ids)
    # No other step runs meanwhile.
    assert messages.decode_to_engine(front_end.inbox.recv()) == messages.Abort(tuple(ids))


def test_a_client_that_leaves_before_its_answer_reaches_the_engine_without_a_step(front_end: Served) -> None:
    with connect(front_end.url) as leaving:
        leaving.sendall(ENDLESS)
        ids = front_end.take_requests(1)
    assert messages.decode_to_engine(front_end.inbox.recv()) == messages.Abort(tuple(ids))


def test_silent_connections_are_probed_and_closed_at_the_configured_time() -> None:
    with (
        listen("127.0.0.1", 0, stall_seconds=7) as listener,
        connect(url_of(listener)),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


# Bodies


async def test_a_slowly_sent_body_is_refused_and_its_connection_closed(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        served.front_end.bodies._seconds = 0.2
        url = served.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        answer = await reader.read()  # until the server closes it
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_too_slow" in answer


async def test_the_total_size_of_bodies_is_bounded(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        bodies = served.front_end.bodies
        bodies._max_bytes = size = 256 * 1024
        url = served.http.base_url
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
        opened = [await asyncio.open_connection(url.host, url.port) for _ in range(BODIES_AT_ONCE + 2)]
        for _, writer in opened:
            writer.write(head + b" " * (size - 1000))
        answers = [asyncio.create_task(reader.read(65536)) for reader, _ in opened]
        # Some are refused because of the total; when the others have ended, there is room again.
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert {answer.result()[:12] for answer in done} == {b"HTTP/1.1 429"}
        assert bodies._num_bytes <= BODIES_AT_ONCE * size
        for _, writer in opened:
            writer.write(b" " * 1000)
        await asyncio.wait(waiting)
        codes = Counter(answer.result()[9:12] for answer in answers)
        assert codes[b"400"] >= BODIES_AT_ONCE - 1  # read completely: invalid JSON
        assert codes[b"400"] + codes[b"429"] == len(opened)
        assert bodies._num_bytes == 0
        for _, writer in opened:
            writer.close()
        assert (await served.http.post("/v1/completions", content=b" " * size)).status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            {"prompt": "some words " * 100_000, "user": "x" * 9_000_000, "max_tokens": 10_000_000},
            marks=pytest.mark.long,
        ),
        pytest.param({"prompt": [1] * 3_000_000}, marks=pytest.mark.long),
        {"messages": [{"role": "user", "content": "two words"}] * 200_000},
        {"prompt": [[]] * 3_000_000},
    ],
    ids=["text", "token ids", "messages", "empty lists"],
)
def test_a_stream_and_liveness_continue_while_ten_megabytes_are_parsed(text_dir: Path, body: dict[str, Any]) -> None:
    """Measured in CPU time, which does not depend on other load. Processing a body costs more than reading it and runs
    on a thread other than the event loop's."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    raw = json.dumps(body).encode()
    with running_front_end(text_dir, 2) as served, connect(served.url) as stream, ThreadPoolExecutor(1) as thread:
        loop, others = threads_seconds(served.pid)
        assert httpx.post(f"{served.url}{path}", content=raw, timeout=60).status_code == 400
        loop_now, others_now = threads_seconds(served.pid)
        assert loop_now - loop < others_now - others
        stream.sendall(ENDLESS)
        ids = served.take_requests(1)
        engine = Engine(text_dir, served)
        with httpx.Client(base_url=served.url, timeout=60) as http:
            handled = thread.submit(httpx.post, f"{served.url}{path}", content=raw, timeout=60)
            while not handled.done():
                engine.step(ids)
                next_event(stream)
                assert http.get("/live").status_code == 200
        assert handled.result().status_code == 400, handled.result().text[:200]


# Many connections


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny", max_length=4096)


@contextlib.contextmanager
def simulated(model_dir: Path, *flags: str, step_milliseconds: float = 5) -> Iterator[ServeCommand]:
    device = json.dumps({"stepMilliseconds": step_milliseconds})
    backend = ["--backend", "simulated", "--override-neuron-config", device, "--no-access-log"]
    # The port is still free when the command has ended.
    with free_ports() as port, serve(str(model_dir), "--port", str(port), *backend, *flags) as command:
        yield command


@pytest.mark.slow
def test_a_thousand_connections_are_served_with_a_lower_file_limit(chat_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"only {hard} open files are allowed")
    with contextlib.ExitStack() as connections:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            command = connections.enter_context(simulated(chat_dir))
            url = command.until_ready()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        pid = command.child(FRONT_END)
        get(f"{url}/live")
        before = resident_bytes(pid)
        opened = [connections.enter_context(connect(url)) for _ in range(1000)]
        # One more is served while they are idle; then all of them at once.
        body = LONG | {"max_tokens": 5, "stream": False}
        assert post(f"{url}/v1/completions", body).status_code == 200
        for one in opened:
            one.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert {one.recv(12) for one in opened} == {b"HTTP/1.1 200"}
        assert resident_bytes(pid) - before < 1000 * 64 * 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
async def test_in_a_flood_over_http_every_client_that_honours_retry_after_is_served(chat_dir: Path) -> None:
    """Four rows and eight queue places, all occupied, and forty clients at once."""
    refusals: list[int] = []
    places = ("--max-num-seqs", "4", "--max-queued-requests", "8")
    with simulated(chat_dir, *places, step_milliseconds=20) as command:
        url = command.until_ready()
        body = LONG | {"max_tokens": 5, "stream": False}
        async with httpx.AsyncClient(timeout=200, limits=httpx.Limits(max_connections=None), verify=False) as http:

            async def ask() -> None:
                while True:
                    answer = await http.post(f"{url}/v1/completions", json=body)
                    if answer.status_code == 200:
                        assert answer.json()["usage"]["completion_tokens"] == 5
                        return
                    assert answer.status_code == 429, answer.text
                    refusals.append(int(answer.headers["retry-after"]))
                    await asyncio.sleep(refusals[-1])

            # The rate is known from here on.
            await asyncio.gather(*(ask() for _ in range(12)))
            assert refusals == []
            long = body | {"max_tokens": 4000}
            taken = [asyncio.create_task(http.post(f"{url}/v1/completions", json=long)) for _ in range(12)]
            while await asyncio.to_thread(metric, url, "vllm:num_requests_waiting") < 8:
                await asyncio.sleep(0.01)
            flood = [asyncio.create_task(ask()) for _ in range(40)]
            while not refusals:
                await asyncio.sleep(0.01)
            for one in taken:
                one.cancel()
            # The number of retries depends on the machine; test_backpressure uses its own clock.
            await asyncio.gather(*flood)
    assert 1 <= min(refusals) <= max(refusals) <= 60


# After the end


@pytest.mark.slow
def test_frozen_and_killed_processes_under_load_leave_nothing_behind(chat_dir: Path) -> None:
    """`serve` itself checks the port, the files and the processes."""
    with simulated(chat_dir, "--max-num-seqs", "8") as command:
        url = command.until_ready()
        with contextlib.ExitStack() as connections:
            for _ in range(16):
                one = connections.enter_context(connect(url))
                one.sendall(request(LONG | {"max_tokens": 4000}))
            pids = [pid for pid, line in children(command.process.pid) if "neuron_runtime" in line]
            assert len(pids) == 2
            for pid in pids:
                stop(pid)
            shared = {path for pid in pids for path in mapped_files(pid) if path.startswith("/dev/shm/")}
            os.kill(command.child(ENGINE), signal.SIGKILL)
            command.process.send_signal(signal.SIGINT)
            command.until(lambda: "stopping:" in command.text)
            command.process.send_signal(signal.SIGINT)
            assert command.wait() == 0
        assert [path for path in shared if os.path.exists(path)] == []
        with pytest.raises(httpx.ConnectError):
            get(f"{url}/live")
