"""The front end is replaced without the engine: the real command, whose front end is killed or frozen under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helpers.chat_model import write_chat_model
from helpers.serve_command import ENGINE, FRONT_END, ServeCommand, alive, get, metric, post, serve, stop
from neuron_runtime.processes.children import FRONT_END_DEADLINE
from neuron_runtime.processes.lifeline import Deadline

pytestmark = pytest.mark.slow

PROMPT = "a core and another core and one more core and then a whole device of cores"
BODY = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny", max_length=4096)


@contextlib.contextmanager
def serving(model_dir: Path) -> Iterator[ServeCommand]:
    # Slow steps: without an abort, an abandoned request would run for minutes.
    device = json.dumps({"stepMilliseconds": 40})
    flags = ["--backend", "simulated", "--override-neuron-config", device, "--max-num-seqs", "8"]
    with serve(str(model_dir), "--port", "0", "--no-access-log", "--enable-prefix-caching", *flags) as command:
        yield command


@contextlib.contextmanager
def stream(url: str) -> Iterator[http.client.HTTPResponse]:
    """A started stream of minutes."""
    address = urlsplit(url)
    assert address.hostname
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(BODY | {"max_tokens": 4000, "stream": True}))
        with connection.getresponse() as answer:
            yield answer


def connect(url: str) -> socket.socket:
    """A connection that has sent a request."""
    address = urlsplit(url)
    made = socket.create_connection((address.hostname, address.port), timeout=60)
    made.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    return made


def test_a_killed_front_end_and_a_frozen_one_are_replaced_while_the_engine_keeps_its_state(model_dir: Path) -> None:
    with serving(model_dir) as command:
        url, engine, victim = command.until_ready(), command.child(ENGINE), command.child(FRONT_END)
        answer = post(f"{url}/v1/completions", BODY).json()["choices"]
        assert metric(url, "vllm:generation_tokens_total") == 10
        with contextlib.ExitStack() as opened:
            lost = [opened.enter_context(stream(url)) for _ in range(4)]
            # It does not accept any more; the supervisor's socket still does.
            stop(victim)
            waiting = opened.enter_context(connect(url))
            os.kill(victim, signal.SIGKILL)
            for one in lost:
                with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                    one.read()
            assert waiting.recv(12) == b"HTTP/1.1 200"
        command.until_ready(times=2)
        assert command.child(FRONT_END) != victim
        assert alive(engine)
        assert metric(url, "neuron_serving_engine_restarts_total") == 0
        # Its own counters begin again, as after any restart.
        assert metric(url, "vllm:generation_tokens_total") == 0
        command.until(lambda: metric(url, "vllm:num_requests_running") == 0)
        hits = metric(url, "vllm:prefix_cache_hits_total")
        assert post(f"{url}/v1/completions", BODY).json()["choices"] == answer
        assert metric(url, "vllm:prefix_cache_hits_total") > hits
        frozen = command.child(FRONT_END)
        stop(frozen)
        (path,) = command.tmp_dir.glob(f"neuron-runtime-*/{FRONT_END_DEADLINE}")
        with Deadline(path) as deadline:
            deadline.set(-1.0)
            command.until_ready(times=3)
        assert "the front end hangs" in command.text
        assert not alive(frozen)
        assert alive(engine)
        assert get(f"{url}/health").status_code == 200
