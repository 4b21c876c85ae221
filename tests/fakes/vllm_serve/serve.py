#!/usr/bin/env python3
"""Stands in for `vllm serve` of AWS's image where there is no Neuron device, for tests of the operator.

It takes vLLM's command line, refuses what the image's plugin refuses, and answers over HTTP with words that depend on
the prompt only. It begins, drains and ends as vLLM 0.32 was seen to: the port refuses connections until the model is
loaded, SIGTERM is ignored until then, `/health` is 200 while it drains, a stream that outlives `--shutdown-timeout`
keeps the process for ever, and the death of the engine process ends it with code 0. Of several nodes, the leader
notices at the next request that a follower has gone, and a follower never that its leader has. It computes nothing, and
needs only Python, so that it can be the program `vllm` of an image.

With the cache of compiled graphs it does as AWS documents for 0.24: a graph is found by what it was made of, in the
local cache or else the remote one; what is missing is compiled, also without devices, or ends the start. As the library
does, it keeps kernels beside the graphs, leaves folders where a Job starts it, and has the cause of a miss in its own
log only.

FAKE_VLLM_VERSION is a line of the plugin, FAKE_VLLM_FAULT one of `FAULTS`, FAKE_VLLM_LOAD_SECONDS the time to load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import logging.config
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
WATCHDOG_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 5.0
WORD_SECONDS = 0.02
SEGMENTS = (512, 1024, 2048, 4096, 8192)

LOCAL_MISS = "VLLM_NEURON_DISABLE_WARMUP_COMPILE: local compile cache miss for key {}"
CACHE_MISS = "NEURON_LIBTORCH_ASSERT_CACHE_HIT: remote compile cache miss for key {}"
FAULTS: Mapping[str, str] = {
    "no-device": "No Neuron devices found. Skipping Neuron plugin registration.",
    "cache-miss": f"RuntimeError: {CACHE_MISS.format('0123456789abcdef0123456789abcdef')}",
    "too-many-blocks": "RuntimeError: NRT_RESOURCE in nrt_tensor_allocate: nrt_tensor_allocate status=4",
    "cores-busy": "RuntimeError: NRT:nrt_allocate_neuron_cores  Logical Neuron Core(s) not available - "
    "Requested:lnc0-lnc3 Available:0 Logical Core size:2 (cores busy, ret=-16)",
    "kv-budget": "RuntimeError: Computed KV cache budget is below minimum threshold. effective=0.00 GiB, "
    "minimum=1.00 GiB. Increase gpu_memory_utilization or lower VLLM_NEURON_MIN_KV_BUDGET_GIB.",
    "compile-failed": "[NCC_EVRF007] Estimated number of instructions exceeds the limit",
    "engine-dies": "",
}
"""What the log says of each. The last: the engine process ends a second after it is ready."""

COMMON_FLAGS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("host", "served-model-name", "dtype", "kv-cache-dtype", "load-format", "chat-template"), str),
    **dict.fromkeys(("generation-config", "reasoning-parser", "tool-call-parser", "allowed-origins"), str),
    **dict.fromkeys(("hf-overrides", "speculative-config", "kv-transfer-config", "additional-config"), json.loads),
    "max-model-len": lambda word: -1 if word == "auto" else int(word),
    **dict.fromkeys(("port", "kv-cache-memory-bytes", "max-num-seqs", "max-num-batched-tokens", "block-size"), int),
    **dict.fromkeys(("num-gpu-blocks-override", "tensor-parallel-size", "data-parallel-size", "seed"), int),
    **dict.fromkeys(("nnodes", "node-rank", "master-port"), int),
    **dict.fromkeys(("gpu-memory-utilization",), float),
    **dict.fromkeys(
        ("disable-access-log-for-endpoints", "middleware", "convert", "revision", "tokenizer", "master-addr"), str
    ),
}
SWITCHES = (
    *("enable-prefix-caching", "enable-chunked-prefill", "async-scheduling", "enable-expert-parallel"),
    *("enable-auto-tool-choice", "enforce-eager", "disable-uvicorn-access-log", "enable-prompt-embeds", "enable-lora"),
    "headless",
)
NEWER_FLAGS: Mapping[str, tuple[str, ...]] = {
    "0.16": (),
    "0.24": ("shutdown-timeout",),
    "0.29": ("shutdown-timeout", "max-num-queued-reqs"),
    "cpu": ("shutdown-timeout", "max-num-queued-reqs"),
}
"""`cpu`: vLLM without the plugin."""
logger = logging.getLogger("vllm.fake")
library = logging.getLogger("libtorch_neuronx_lite.compile.cache")


class NewLineFormatter(logging.Formatter):
    """Repeats the prefix on each line, as vLLM's does."""

    def format(self, record: logging.LogRecord) -> str:
        record.fileinfo = record.filename
        record.vllm_process_name = "APIServer"
        text = super().format(record)
        return text.replace("\n", f"\n{text.partition(record.message.partition(chr(10))[0])[0]}")


def set_up_logging() -> None:
    """vLLM's own, or that of VLLM_LOGGING_CONFIG_PATH, which may name its formatter."""
    package = types.ModuleType("vllm")
    package.logging_utils = types.SimpleNamespace(NewLineFormatter=NewLineFormatter)  # type: ignore[attr-defined]
    sys.modules["vllm"] = package
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    package.envs = types.SimpleNamespace(VLLM_LOGGING_LEVEL=level)  # type: ignore[attr-defined]
    if path := os.environ.get("VLLM_LOGGING_CONFIG_PATH"):
        logging.config.dictConfig(json.loads(Path(path).read_text(encoding="utf-8")))
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(NewLineFormatter("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"))
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").setLevel(logging.INFO)


def parse(words: list[str], version: str) -> argparse.Namespace:
    program = argparse.ArgumentParser(prog="vllm")
    serve = program.add_subparsers(dest="subparser", required=True).add_parser("serve")
    serve.add_argument("model_tag")
    for name, kind in {**COMMON_FLAGS, **dict.fromkeys(NEWER_FLAGS[version], int)}.items():
        serve.add_argument(f"--{name}", type=kind, nargs="+" if name == "served-model-name" else None)
    for name in SWITCHES:
        serve.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    return program.parse_args(words)


def refusals(asked: argparse.Namespace, version: str, env: Mapping[str, str]) -> Iterator[str]:
    """What the plugin of a version refuses before it loads anything."""
    if version == "cpu":
        return
    config = (asked.additional_config or {}).get("neuron_config", {})
    length, sequences, block = asked.max_model_len or 4096, asked.max_num_seqs or 256, asked.block_size or 32
    if asked.tensor_parallel_size and asked.tensor_parallel_size & (asked.tensor_parallel_size - 1):
        yield "tensor_parallel_size must be a power of two"
    if env.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("0", ""):
        yield "VLLM_USE_V2_MODEL_RUNNER is set to a truthy value, but the Neuron platform does not implement it"
    if version == "0.16":
        return
    compiles = env.get("VLLM_NEURON_CPU_COMPILE") == "1"
    if compiles and not env.get("NEURON_PLATFORM_TARGET_OVERRIDE"):
        yield "NEURON_PLATFORM_TARGET_OVERRIDE is required with VLLM_NEURON_CPU_COMPILE"
    if compiles and (env.get("VLLM_NEURON_CPU_MODE") == "1" or asked.speculative_config):
        yield "VLLM_NEURON_CPU_COMPILE excludes VLLM_NEURON_CPU_MODE and speculative decoding"
    if asked.enable_lora:
        yield "LoRA is not supported on Neuron"
    if env.get("NEURON_RT_VISIBLE_CORES"):
        yield "NEURON_RT_VISIBLE_CORES must not be set with the multiprocessing executor; use NEURON_VISIBLE_DEVICES"
    if env.get("NEURON_LIBTORCH_ASSERT_CACHE_HIT") == "1" and env.get("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE") == "1":
        yield "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE cannot be set with NEURON_LIBTORCH_ASSERT_CACHE_HIT"
    step = min(asked.max_num_batched_tokens or length, length)
    segments = config.get("kv_segment_size_buckets")
    if not segments and step < length and step not in SEGMENTS:
        yield f"max_num_batched_tokens={step} is not a supported chunked prefill size on Neuron"
    for segment in segments or ():
        if segment not in SEGMENTS or segment % block:
            yield f"kv_segment_size_buckets must be of {SEGMENTS} and divisible by the block size, got {segment}"
    for key, last in (("num_batched_tokens_buckets", step), ("num_seqs_buckets", sequences)):
        sizes = config.get(key)
        if sizes is not None and (sizes != sorted(set(sizes)) or not sizes or sizes[-1] != last):
            yield f"Last bucket in {key} must equal {last}, in strictly ascending order, got {sizes}"
    for size in config.get("decode_context_length_buckets", ()):
        if size >= length or size % 128:
            yield f"decode_context_length_buckets must be below max_model_len and divisible by 128, got {size}"


def graphs(asked: argparse.Namespace, env: Mapping[str, str]) -> Iterator[str]:
    """The keys of the graphs: what is in one, and not names, ports or times. Without a number of blocks, devices have
    another one than a CPU."""
    config = (asked.additional_config or {}).get("neuron_config", {})
    compiles = env.get("VLLM_NEURON_CPU_COMPILE") == "1"
    shapes = [
        *(asked.tensor_parallel_size, asked.max_model_len, asked.max_num_seqs, asked.dtype, asked.kv_cache_dtype),
        *(asked.block_size, asked.num_gpu_blocks_override or ("estimated" if compiles else "measured")),
        *(env.get("NEURON_PLATFORM_TARGET_OVERRIDE"), env.get("NEURON_LOGICAL_NC_CONFIG"), config),
        json.loads(Path(asked.model_tag, "config.json").read_text(encoding="utf-8")),
    ]
    powers = [2**power for power in range((asked.max_num_seqs or 256).bit_length())]
    for kind in ("prefill", *config.get("num_seqs_buckets", powers)):
        yield hashlib.md5(json.dumps([kind, shapes], sort_keys=True).encode()).hexdigest()


def compile_graphs(asked: argparse.Namespace, env: Mapping[str, str]) -> None:
    """Find or compile each graph in the local cache. A folder without its mark is unfinished."""
    root = env.get("NEURON_LIBTORCH_CACHE_ROOT") or env.get("VLLM_CACHE_ROOT", "~/.cache/vllm")
    cache = Path(root).expanduser() / "neuron" / "compile_cache"
    remote = env.get("NEURON_LIBTORCH_REMOTE_CACHE")
    for key in graphs(asked, env):
        local = cache / key
        if (local / "done").is_file():
            continue
        if env.get("VLLM_NEURON_DISABLE_WARMUP_COMPILE") == "1":
            fail(f"RuntimeError: {LOCAL_MISS.format(key)}")
        if remote and Path(remote, key, "done").is_file():
            shutil.copytree(Path(remote, key), local)
            continue
        if env.get("NEURON_LIBTORCH_ASSERT_CACHE_HIT") == "1":
            library.error("Compilation failed - terminating process for cleanup: %s", CACHE_MISS.format(key))
            fail("RuntimeError: WorkerProc initialization failed due to an exception in a background process.")
        if env.get("VLLM_NEURON_CPU_COMPILE") == "1":
            Path(f"neuronxcc-{key}").mkdir(exist_ok=True)
        (cache / "nki").mkdir(parents=True, exist_ok=True)
        local.mkdir(parents=True)
        (local / "graph.neff").write_bytes(b"neff")
        (local / "done").touch()


def fail(cause: str) -> NoReturn:
    """The end of a start that failed in the engine process: its cause is far above the end of the log."""
    logger.error("EngineCore failed to start.\nTraceback (most recent call last):\n  ...\n%s", cause)
    print("Traceback (most recent call last):", file=sys.stderr)
    for number in range(40):
        print(f'  File "/opt/vllm/entrypoints/frame.py", line {number}, in serve\n    {"^" * 60}', file=sys.stderr)
    sys.exit("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET6

    def __init__(self, asked: argparse.Namespace) -> None:
        host = asked.host or "::"
        if ":" not in host:
            self.address_family = socket.AF_INET
        super().__init__((host, asked.port or 8000), Handler, bind_and_activate=False)
        self.asked = asked
        self.names = asked.served_model_name or [asked.model_tag]
        self.settings = (asked.additional_config or {}).get("neuron_config")
        self.is_draining = self.is_dead = False
        self.streams = 0
        self.engine = 0
        self.followers: list[socket.socket] = []
        self.changed = threading.Condition()
        self.server_bind()  # vLLM does not listen before it can serve

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, *_: object) -> None:
        """A client that has gone is no news."""

    def start_engine(self) -> None:
        self.engine = os.fork()
        if not self.engine:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            parent = os.getppid()
            while os.getppid() == parent:
                time.sleep(0.2)
            os._exit(0)
        threading.Thread(target=self._watch_engine, daemon=True).start()

    def _watch_engine(self) -> None:
        os.waitpid(self.engine, 0)
        with self.changed:
            if self.is_draining:
                return
            self.is_dead = True
            self.changed.notify_all()
        logger.warning("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
        logger.error("AsyncLLM output_handler failed.\nvllm.v1.engine.exceptions.EngineDeadError: %s", ENGINE_DEAD)
        time.sleep(WATCHDOG_SECONDS)
        print("INFO:     Shutting down", flush=True)
        os._exit(0)

    def step(self) -> None:
        """Ends the engine if a follower has gone."""
        for follower in self.followers:
            if select.select([follower], [], [], 0)[0]:
                where = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer"
                self.end_engine(f"RuntimeError: {where} [10.0.0.2]:19881.")

    def end_engine(self, cause: str) -> None:
        logger.error("WorkerProc hit an exception.\n%s", cause)
        os.kill(self.engine, signal.SIGKILL)
        with self.changed:
            self.changed.wait_for(lambda: self.is_dead)

    def drain(self) -> None:
        """As SIGTERM makes it. It does not return while a stream is left whose engine has ended."""
        timeout = getattr(self.asked, "shutdown_timeout", None) or 0
        logger.info("[shutdown] API server: shutdown triggered")
        with self.changed:
            self.is_draining = True
            self.changed.wait_for(lambda: not self.streams, timeout)
        os.kill(self.engine, signal.SIGKILL)
        self.socket.close()
        print("INFO:     Shutting down", flush=True)
        with self.changed:
            if self.streams:
                self.is_dead = True
                print("INFO:     Waiting for connections to close. (CTRL+C to force quit)", flush=True)
            self.changed.wait_for(lambda: not self.streams)
        print("INFO:     Application shutdown complete.", flush=True)
        os._exit(0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = KEEP_ALIVE_SECONDS
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def end_headers(self) -> None:
        if self.server.asked.middleware:  # the operator's
            self.send_header("Connection", "close")
        super().end_headers()

    def do_GET(self) -> None:
        if self.path in ("/health", "/ping"):
            self._send(503 if self.server.is_dead else 200)
        elif self.path == "/metrics":
            name = self.server.names[0]
            lines = (f'vllm:{gauge}{{engine="0",model_name="{name}"}} {value}\n' for gauge, value in self._gauges())
            self._send(200, "".join(lines).encode(), "text/plain")
        elif self.path == "/version":
            self._object(200, {"version": os.environ.get("FAKE_VLLM_VERSION", "0.24")})
        elif self.path == "/v1/models":
            if self._is_allowed():
                length = self.server.asked.max_model_len
                data = [{"id": name, "object": "model", "max_model_len": length} for name in self.server.names]
                self._object(200, {"object": "list", "data": data})
        else:
            self._object(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if not self._is_allowed():
            return
        if self.server.is_dead or self.server.is_draining:
            why = ENGINE_DEAD if self.server.is_dead else "cannot schedule new futures after shutdown"
            self._error(500, "InternalServerError", why)
        elif body.get("model") not in self.server.names:
            self._error(404, "NotFoundError", f"The model `{body.get('model')}` does not exist.")
        else:
            with self.server.changed:
                self.server.streams += 1
            try:
                self._answer(body)
            finally:
                with self.server.changed:
                    self.server.streams -= 1
                    self.server.changed.notify_all()

    def _answer(self, body: Mapping[str, Any]) -> None:
        if "response_format" in body and self.server.settings is not None:
            if not self.server.settings.get("enable_structured_outputs"):
                self._error(400, "BadRequestError", "Structured outputs were requested, but this server has them off")
                return
            if self.server.asked.async_scheduling is not False:
                self.server.end_engine("AssertionError: Structured outputs with async scheduling is not supported.")
        self.server.step()
        if self.server.is_dead:
            self._error(500, "InternalServerError", ENGINE_DEAD)
            return
        is_chat = self.path.endswith("/chat/completions")
        asked = json.dumps(body.get("messages") if is_chat else body.get("prompt"))
        number = int(hashlib.sha256(asked.encode()).hexdigest()[:8], 16)
        words = (f" w{(number + index) % 997}" for index in range(body.get("max_tokens") or 16))
        kind = "chat.completion" if is_chat else "text_completion"
        frame = {"id": "cmpl-fake", "object": kind, "created": 0, "model": body["model"]}
        if not body.get("stream"):
            text = "".join(words)
            part = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            usage = {"prompt_tokens": 1, "completion_tokens": text.count(" ")}
            choices = [{"index": 0, "finish_reason": "length", **part}]
            self._object(200, {**frame, "choices": choices, "usage": usage})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for word in words:
            with self.server.changed:
                if self.server.is_dead and self.server.is_draining:
                    self.server.changed.wait()  # nobody feeds it, and nobody ends it
                if self.server.is_dead:
                    self._event({"error": {"message": ENGINE_DEAD, "type": "InternalServerError", "code": 500}})
                    break
            part = {"delta": {"content": word}} if is_chat else {"text": word}
            self._event({**frame, "choices": [{"index": 0, "finish_reason": None, **part}]})
            time.sleep(WORD_SECONDS)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, document: Mapping[str, Any]) -> None:
        self._chunk(b"data: %b\n\n" % json.dumps(document).encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _gauges(self) -> Iterator[tuple[str, float]]:
        yield "num_requests_running", self.server.streams
        yield "num_requests_waiting", 0
        yield "kv_cache_usage_perc", 0.0

    def _is_allowed(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        allowed = not key or self.headers.get("Authorization") == f"Bearer {key}"
        if not allowed:
            self._object(401, {"error": "Unauthorized"})
        return allowed

    def _error(self, status: int, kind: str, message: str) -> None:
        self._object(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def _object(self, status: int, document: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status: int, content: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def meet(asked: argparse.Namespace) -> list[socket.socket]:
    """The leader's connections to the others; theirs to the leader."""
    address = (asked.master_addr, asked.master_port)
    if not asked.node_rank:
        with socket.create_server(address, reuse_port=False) as meeting:
            return [meeting.accept()[0] for _ in range(1, asked.nnodes or 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except OSError:
            time.sleep(0.1)


def follow(asked: argparse.Namespace) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    leader = meet(asked)
    while leader:
        signal.pause()
    sys.exit()


def main(words: list[str]) -> None:
    set_up_logging()
    version, fault = os.environ.get("FAKE_VLLM_VERSION", "0.24"), os.environ.get("FAKE_VLLM_FAULT", "")
    asked = parse(words, version)
    if fault == "no-device":
        print(f"UserWarning: {FAULTS[fault]}", file=sys.stderr)
        sys.exit(
            "RuntimeError: Failed to infer device type, please set the environment variable VLLM_LOGGING_LEVEL=DEBUG"
        )
    if asked.headless:
        follow(asked)
    server = Server(asked)
    signal.signal(signal.SIGTERM, lambda *_: None)  # while it loads, the signal is lost
    if refused := next(refusals(asked, version, os.environ), ""):
        sys.exit(f"ValueError: {refused}")
    if not Path(asked.model_tag, "config.json").is_file():
        sys.exit(
            f"huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '{asked.model_tag}'"
        )
    logger.info("Starting to load model %s...", asked.model_tag)
    deadline = time.monotonic() + float(os.environ.get("FAKE_VLLM_LOAD_SECONDS", "0"))
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)
    if fault == "compile-failed":
        logger.error("%s", FAULTS[fault])
        fail("Compilation failed - terminating process for cleanup: neuronx-cc compilation failed with 70")
    elif FAULTS.get(fault):
        fail(FAULTS[fault])
    if version == "0.24":
        compile_graphs(asked, os.environ)
    if version == "0.16":
        own = Path(asked.model_tag, "neuron-compiled-artifacts", "0" * 32)
        Path(os.environ.get("NEURON_COMPILED_ARTIFACTS") or own).mkdir(parents=True, exist_ok=True)
    if asked.nnodes:
        server.followers = meet(asked)
    server.start_engine()
    server.server_activate()
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.drain, daemon=True).start())
    if fault == "engine-dies":
        threading.Timer(1.0, os.kill, (server.engine, signal.SIGKILL)).start()
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
