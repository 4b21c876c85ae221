"""CPU of the front end per streamed token: the real process, real sockets, and a free engine.

Used by the suite. The calling process plays supervisor and engine and sends one message per step with a token for every
stream; this module as a command is the process that reads the streams. A step is sent when every event of the previous
one has been read, so each token is a separate event and write. The figure is the CPU time of all threads of the front
end process: messages, detokenizer, JSON, socket.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
import orjson
import zmq

from bench.report import Meter, Row, at_most
from neuron_runtime.config import CONFIG_VERSION, ModelSource, RuntimeConfig
from neuron_runtime.core import BackendLimits, First, TokenEvent
from neuron_runtime.engine import messages
from neuron_runtime.engine.backpressure import QueueLimits
from neuron_runtime.engine.messages import ModelFound, Ready, Step
from neuron_runtime.engine.stats import EngineStats
from neuron_runtime.processes.control import EngineStarted, encode_line
from neuron_runtime.processes.supervisor import listen, url_of

NUM_STREAMS = (64, 256)
NUM_STEPS = 200
NUM_WARM_UP_STEPS = 30
NUM_RUNS = 3
MUST_MICROSECONDS = 17.0
VOCABULARY_SIZE = 8192
PROMPT = [100] * 16
EVENT_END = b"\n\n"


def measure(
    num_streams: Sequence[int] = NUM_STREAMS, num_steps: int = NUM_STEPS, num_runs: int = NUM_RUNS
) -> list[Row]:
    """One row for each number of streams: microseconds of front-end CPU per streamed token, the median of the runs."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="neuron-bench-") as folder:
        model_dir = write_text_files(Path(folder))
        for count in num_streams:
            meter = Meter()
            taken = [cpu_microseconds_per_token(model_dir, count, num_steps) for _ in range(num_runs)]
            rows.append(
                Row(
                    f"front end, {count} streams",
                    (median(taken),),
                    unit="us CPU/token",
                    target=at_most(MUST_MICROSECONDS) if count == max(num_streams) else None,
                    note=f"median of {num_runs} runs of {num_steps} steps",
                    load=meter.read(),
                )
            )
    return rows


def cpu_microseconds_per_token(model_dir: Path, num_streams: int, num_steps: int) -> float:
    """One run: a front end process serves `num_streams` streams of `num_steps` tokens each, after a warm-up."""
    with running_front_end(model_dir, num_streams) as served, reading_clients(served.url, num_streams) as readers:
        ids = served.take_requests(num_streams)
        tokens = english_token_ids(model_dir)
        spent = 0.0
        for step in range(NUM_WARM_UP_STEPS + num_steps):
            if step == NUM_WARM_UP_STEPS:
                spent = cpu_seconds(served.pid)
            first = None if step else First(0, 0.0, ())
            news = tuple(
                TokenEvent(one, (tokens[(step + 7 * row) % len(tokens)],), first=first) for row, one in enumerate(ids)
            )
            served.send(Step(news, (), EngineStats(num_running=num_streams)))
            readers.await_round()
        return (cpu_seconds(served.pid) - spent) / (num_steps * num_streams) * 1e6


@dataclass(frozen=True)
class Served:
    """A ready front end and the engine's ends of its sockets."""

    url: str
    pid: int
    inbox: Any
    outbox: Any

    def send(self, message: messages.FromEngine) -> None:
        self.outbox.send(messages.encoder.encode(message))

    def take_requests(self, count: int) -> list[str]:
        """Ids of the next requests, in order of arrival."""
        ids: list[str] = []
        while len(ids) < count:
            match messages.decode_to_engine(self.inbox.recv()):
                case messages.Add(request):
                    ids.append(request.request_id)
        return ids


@contextlib.contextmanager
def running_front_end(
    model_dir: Path, max_rows: int, max_model_length: int = 1_000_000, stall_seconds: int = 60
) -> Iterator[Served]:
    """The process as the supervisor starts it. It exits when this process closes the supervisor connection."""
    config = RuntimeConfig(
        version=CONFIG_VERSION, model=ModelSource(uri=model_dir.as_uri()), served_names=("bench",), backend="simulated"
    )
    limits = BackendLimits(
        max_rows=max_rows,
        max_model_length=max_model_length,
        max_step_tokens=max_model_length,
        num_blocks=max_model_length,
        vocabulary_size=VOCABULARY_SIZE,
    )
    with (
        tempfile.TemporaryDirectory(prefix="neuron-bench-") as folder,
        listen("127.0.0.1", 0, stall_seconds) as listener,
        zmq.Context() as context,
    ):
        run_dir = Path(folder)
        (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
        inbox = messages.socket(context, zmq.PULL, run_dir, messages.ENGINE_INBOX, 1)
        outbox = messages.socket(context, zmq.PUSH, run_dir, messages.ENGINE_OUTBOX, 1)
        fd, url = listener.fileno(), url_of(listener)
        command = [
            *(sys.executable, "-m", "neuron_runtime.processes.front_end"),
            *(f"--config={run_dir}/config.json", f"--run-dir={run_dir}", f"--record={run_dir}/record"),
            *(f"--parent-pid={os.getpid()}", f"--listener-fd={fd}", f"--url={url}"),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # the access log
            stderr=subprocess.DEVNULL,
            pass_fds=(fd,),
            start_new_session=True,
        )
        assert process.stdin is not None
        with process, inbox, outbox:
            process.stdin.write(encode_line(EngineStarted(1)))
            process.stdin.flush()
            served = Served(url, process.pid, inbox, outbox)
            served.send(ModelFound(str(model_dir)))
            served.send(Ready(limits, QueueLimits(max_rows), 0.0, 0.0))
            try:
                _await_healthy(url, process)
                yield served
            finally:
                process.stdin.close()
                process.wait()


def _await_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        # urllib raises for 503 during the start.
        with contextlib.suppress(URLError), urlopen(f"{url}/health"):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the front end ended with {process.returncode}")


class Readers:
    """The process that reads the streams and reports when each has received one more event."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def await_round(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.read(1):
            raise RuntimeError("the reading clients ended")


@contextlib.contextmanager
def reading_clients(url: str, num_streams: int) -> Iterator[Readers]:
    command = [sys.executable, "-m", "bench.front_end", url, str(num_streams)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    # Unbuffered, so that a round is reported when it ends.
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=env) as process:
        try:
            yield Readers(process)
        finally:
            process.kill()


def read_streams(url: str, num_streams: int) -> None:
    """Opens streams and counts their events; writes a byte to stdout for every `num_streams` events."""
    address = urlsplit(url)
    body = orjson.dumps({"prompt": PROMPT, "max_tokens": 900_000, "ignore_eos": True, "stream": True})
    head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n" % len(body)
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        stream = socket.create_connection((address.hostname, address.port))
        stream.sendall(head + body)
        selector.register(stream, selectors.EVENT_READ, stream)
    buffer = bytearray(1 << 18)
    num_events = 0
    while True:
        for key, _ in selector.select():
            ready: socket.socket = key.data
            size = ready.recv_into(buffer)
            if not size:
                raise SystemExit("the server ended a stream")
            # One write of the server is at most one event, so reading everything never splits an event.
            num_events += buffer.count(EVENT_END, 0, size)
        while num_events >= num_streams:
            num_events -= num_streams
            os.write(1, b".")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, from the kernel, in nanoseconds."""
    return _scheduled(pid, 0)


def waited_seconds(pid: int) -> float:
    """Time in which threads of a process could have run, and others had the cores."""
    return _scheduled(pid, 1)


def _scheduled(pid: int, column: int) -> float:
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[column]) for one in stats) / 1e9


def write_text_files(folder: Path) -> Path:
    """The part of a model folder that the front end reads: a byte-level tokenizer, trained on English prose."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_prose(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def english_token_ids(model_dir: Path) -> list[int]:
    """A long text in the tokens of the folder's tokenizer."""
    from neuron_runtime.text.tokenizer import load_tokenizer

    return list(load_tokenizer(model_dir).encode("".join(_prose()[:20])))


def _prose() -> list[str]:
    return [topics[name] for name in sorted(topics)]


if __name__ == "__main__":
    read_streams(sys.argv[1], int(sys.argv[2]))
