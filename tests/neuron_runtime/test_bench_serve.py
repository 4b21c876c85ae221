"""The load client against correct and faulty servers, and the command against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import write_chat_model
from helpers.ports import free_ports
from neuron_runtime.bench.client import Ask, Run, Sample, Server, run_clients
from neuron_runtime.bench.report import Load
from neuron_runtime.bench.serve import Workload, first_model, outcome_of
from neuron_runtime.bench.spawned import SpawnedServer
from neuron_runtime.commands.command_line import main
from neuron_runtime.errors import ServingError

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LOAD = Load(1.0, 1.0, 0.0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n'
END = b"data: [DONE]\n\n"


class Served:
    """A server on its own thread with scripted responses."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0
        self.most_at_a_time = 0
        self._at_a_time = 0
        self._answer = answer

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                self.bodies.append(json.loads(await reader.readexactly(int(lines["content-length"]))))
                self._at_a_time += 1
                self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
                await self._answer(self.bodies[-1], writer)
                self._at_a_time -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.transport.abort()


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[Served, Server]]:
    served, started, loop = Served(answer), threading.Event(), asyncio.new_event_loop()
    found: list[Server] = []

    async def serve() -> None:
        async with await asyncio.start_server(served.connected, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            found.append(Server(f"http://127.0.0.1:{port}", "/v1/completions"))
            started.set()
            await ended.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None
        await asyncio.sleep(0)

    ended = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield served, found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def asks(count: int = 1) -> list[Ask]:
    return Workload(num_prompts=count, input_len=4, output_len=3, body={"model": "m"}).asks()


def test_tokens_are_counted_for_any_split_of_the_bytes() -> None:
    stream = chunk(event("a\n\nb") + event("é")) + chunk(event("") + event("c") + USAGE + END) + chunk(b"")

    async def by_bytes(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for byte in HEAD + stream:
            writer.write(bytes([byte]))
            await writer.drain()

    with serving(by_bytes) as (_, server):
        (sample,) = run_clients(server, asks(), None).samples
    assert sample.error == ""
    assert len(sample.tokens_at) == 3
    assert sample.tokens_at == sorted(sample.tokens_at)
    assert (sample.num_prompt_tokens, sample.num_output_tokens) == (5, 3)
    assert sample.began < sample.tokens_at[0] <= sample.tokens_at[-1] <= sample.ended


def test_a_role_is_not_counted_as_a_token_and_reasoning_is() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}]

    async def chat(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        frames = (b"data: %b\n\n" % json.dumps({"choices": [{"delta": delta}]}).encode() for delta in deltas)
        writer.write(HEAD + chunk(b"".join(frames)) + chunk(END) + chunk(b""))

    with serving(chat) as (_, server):
        (sample,) = run_clients(server, asks(), None).samples
    assert len(sample.tokens_at) == 2
    assert sample.num_output_tokens is None


def test_concurrency_is_bounded_and_connections_are_reused() -> None:
    async def in_threes(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = len(served.bodies)
        while len(served.bodies) < -(-number // 3) * 3:
            await asyncio.sleep(0.001)
        # An excess request would arrive meanwhile.
        await asyncio.sleep(0.02)
        writer.write(HEAD + chunk(event("a") + USAGE + END) + chunk(b""))

    with serving(in_threes) as (served, server):
        run = run_clients(server, asks(12), 3)
    assert [sample.error for sample in run.samples] == [""] * 12
    assert served.most_at_a_time == 3
    assert served.num_connections == 3


def test_requests_are_sent_on_schedule_regardless_of_answer_times() -> None:
    async def when_all_are_there(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        while len(served.bodies) < 3:
            await asyncio.sleep(0.01)
        writer.write(HEAD + chunk(event("a") + END) + chunk(b""))

    with serving(when_all_are_there) as (served, server):
        body, before = asks()[0].body, time.monotonic()
        run = run_clients(server, [Ask(body, 0.0), Ask(body, 0.1), Ask(body, 0.2)], None)
    assert [sample.error for sample in run.samples] == [""] * 3
    assert all(sample.began - before >= at for sample, at in zip(run.samples, (0.0, 0.1, 0.2), strict=True))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 429 Busy\r\ncontent-length: 29\r\n\r\n" + b'{"error":{"message":"later"}}', "HTTP 429: later"),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\noops", "HTTP 502: oops"),
        (HEAD + chunk(event("a") + b'data: {"error":{"message":"died"}}\n\n') + chunk(b""), "died"),
        (b"SMTP ready\r\n", "not HTTP"),
    ],
)
def test_request_failures_are_reported(answer: bytes, error: str) -> None:
    async def badly(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    with serving(badly) as (_, server):
        (sample,) = run_clients(server, asks(), None).samples
    assert sample.error.startswith(error)


def test_a_lost_or_silent_connection_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asks(3)
    bodies = [json.loads(ask.body) for ask in asked]

    async def first_dies(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        match bodies.index(body):
            case 0:
                writer.write(HEAD + chunk(event("a")))
                await writer.drain()
                writer.close()
            case 1:
                await asyncio.sleep(3600)
            case 2:
                writer.write(HEAD + chunk(event("a") + END) + chunk(b""))

    # The timeout applies to silent connections, not to late responses.
    timeout, seconds = asyncio.timeout, iter((60.0, 0.1, 60.0))
    monkeypatch.setattr(asyncio, "timeout", lambda requested: timeout(next(seconds)))
    with serving(first_dies) as (_, server):
        short = Server(server.base_url, server.path, timeout_seconds=2.0)
        errors = [sample.error for sample in run_clients(short, asked, 1).samples]
    assert errors == ["the server closed the connection", "the response was incomplete after 2 s", ""]


def test_an_absent_server_fails_each_request() -> None:
    with free_ports() as nobodys:
        gone = Server(f"http://127.0.0.1:{nobodys}", "/v1/completions")
        errors = {sample.error for sample in run_clients(gone, asks(2), None).samples}
    assert len(errors) == 1
    assert "cannot connect" in errors.pop()


def test_a_workload_is_reproducible_and_matches_its_description() -> None:
    workload = Workload(
        num_prompts=200,
        input_len=100,
        output_len=50,
        range_ratio=0.5,
        prefix_len=10,
        request_rate=20.0,
        vocabulary_size=1000,
        seed=3,
    )
    first, again = workload.asks(), workload.asks()
    assert first == again
    bodies = [json.loads(ask.body) for ask in first]
    lengths = [len(body["prompt"]) for body in bodies]
    assert 60 <= min(lengths) < max(lengths) <= 160
    assert len({tuple(body["prompt"][:10]) for body in bodies}) == 1
    assert {token for body in bodies for token in body["prompt"]} <= set(range(256, 1000))
    assert {25, 75} >= {min(max(body["max_tokens"], 25), 75) for body in bodies} - set(range(26, 75))
    gaps = [b.at_seconds - a.at_seconds for a, b in pairwise(first)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 20, rel=0.25)


def test_the_result_counts_tokens_as_the_server_does_and_excludes_failures() -> None:
    run = Run(
        (
            Sample(0.0, 4.0, [1.0, 2.0, 3.0], 7, 5),
            Sample(0.5, 5.0, [1.5, 1.5], None, None),
            Sample(0.0, 9.0, [1.0], error="gone"),
        ),
        (0.5,),
    )
    outcome = outcome_of(run, LOAD)
    assert (outcome.num_completed, dict(outcome.errors)) == (2, {"gone": 1})
    assert (outcome.seconds, outcome.num_prompt_tokens, outcome.num_output_tokens) == (9.0, 7, 7)
    assert outcome.first_token == (1.0, 1.0)
    assert outcome.per_token == (0.5, 0.0)
    assert outcome.gaps == (1.0, 1.0, 0.0)
    assert outcome.output_rate == pytest.approx(7 / 9)
    assert not outcome.client_is_busy


def test_a_run_with_only_failures_is_an_error_with_a_cause() -> None:
    with pytest.raises(ServingError, match="every request failed: gone"):
        outcome_of(Run((Sample(0.0, 1.0, error="gone"),), (0.1,)), LOAD)


def test_a_server_without_models_is_reported() -> None:
    with free_ports() as nobodys, pytest.raises(ServingError, match="check that a server runs"):
        first_model(f"http://127.0.0.1:{nobodys}", {})


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--base-url", "http://127.0.0.1:1", "--spawn", "m"],
        ["--base-url", "http://127.0.0.1:1", "--num-prompts", "0"],
        ["--base-url", "http://127.0.0.1:1", "--request-rate", "0"],
        ["--base-url", "http://127.0.0.1:1", "--header", "nothing"],
        ["--spawn", "random:none"],
    ],
)
def test_contradictory_flags_are_refused_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["bench", "serve", *arguments]))
    assert ended.value.code == 2


def test_a_server_that_fails_to_start_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with (
        pytest.raises(ServingError, match=r"exited with code 10: .*ModelNotFound"),
        SpawnedServer([str(tmp_path / "none")]),
    ):
        pass


@pytest.mark.slow
def test_bench_serve_starts_a_server_and_two_clients_count_every_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, written, drawn = write_chat_model(tmp_path / "model"), tmp_path / "out.json", tmp_path / "out.svg"
    lengths = ["--random-input-len", "8", "--random-output-len", "12", "--ignore-eos", "--vocabulary-size", "300"]
    load = ["--num-prompts", "10", "--max-concurrency", "4", "--client-processes", "2"]
    outputs = ["--json", str(written), "--plot", str(drawn)]
    assert main(["bench", "serve", "--spawn", str(model), *lengths, *load, *outputs]) == 0
    labels = re.findall(r"<!-- (.+) -->", drawn.read_text())
    assert {"Time to first token", "Gap between events", "milliseconds", "% of requests within"} <= set(labels)
    assert any(label.startswith(f"{model}, /v1/completions") for label in labels)
    found = {row["name"]: row["values"] for row in json.loads(written.read_bytes())["tables"][0]["rows"]}
    assert found["requests completed"]["value"] == 10
    assert found["requests failed"]["value"] == 0
    assert found["output tokens"]["value"] == 120
    assert found["prompt tokens"]["value"] == 80
    assert "gap between events" in capsys.readouterr().out
