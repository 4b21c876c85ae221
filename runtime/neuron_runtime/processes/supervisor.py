"""The supervisor of `neuron-runtime serve`: owns the listening socket, runs the engine process and the front end.

A small process without an event loop: it wakes up once a second or on a signal. It restarts children that exit a
limited number of times, kills those that hang, turns SIGTERM into a drain, and exits with a code and a record on
failure. It does not handle requests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path
from types import FrameType

import msgspec

from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.distributed.layout import ALONE, Layout
from neuron_runtime.errors import ExitCode, InvalidConfig, ServingError
from neuron_runtime.local_settings import ONLY_NAMED, AdapterSettings, LocalSettings
from neuron_runtime.processes.children import (
    CONFIG_FILE,
    ENGINE_MODULE,
    ENGINE_NAME,
    FRONT_END_DEADLINE,
    FRONT_END_MODULE,
    STOP_SECONDS,
    Child,
    Failures,
    start_child,
)
from neuron_runtime.processes.control import Control, EngineEnded, EngineStalled, EngineStarted, StartDrain, encode_line
from neuron_runtime.processes.ranks import NodeRanks
from neuron_runtime.processes.restarts import CURED_BY_REPLACEMENT, CURED_BY_RESTART, RestartBudget

TICK_SECONDS = 1.0
BACKLOG = 2048
SEND_BUFFER_BYTES = 64 * 1024
"""Kernel buffer for a client that does not read; several hundred tokens."""
NUM_PROBES = 4
ALL_ADDRESSES = ("0.0.0.0", "::")


def listen(host: str, port: int, stall_seconds: int = 60) -> socket.socket:
    """The listening socket. Raises InvalidConfig with advice.

    host: one of ALL_ADDRESSES listens on those of IPv4 and IPv6, of which a cluster's pods may have only one kind.
    stall_seconds: the kernel closes a connection whose client has not read data or answered probes for this long.
    """
    if not 0 <= port <= 65535:
        raise InvalidConfig("--port", f"must be from 0 to 65535, got {port}")
    is_dual = host in ALL_ADDRESSES and socket.has_dualstack_ipv6()
    every = "::" if is_dual else "0.0.0.0"  # a kernel without IPv6 has no other
    address = every if host in ALL_ADDRESSES else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        made = socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"{port} on {host} is in use: stop the program that listens there, or choose another port"
            raise InvalidConfig("--port", message) from error
        raise InvalidConfig("--host", f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    # On Linux accepted connections inherit these.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, stall_seconds)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(stall_seconds // NUM_PROBES, 1))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_seconds * 1000)
    return made


def raise_open_files() -> None:
    """Every connection is an open file: raise the soft limit to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def url_of(listener: socket.socket) -> str:
    """The URL of the socket for users on this machine."""
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ALL_ADDRESSES else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Signals:
    """Records signals, and provides a sleep that they interrupt."""

    def __init__(self) -> None:
        self.num_stops = 0
        self.interrupted = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def sleep(self, seconds: float) -> None:
        if select.select([self._read_fd], [], [], seconds)[0]:
            os.read(self._read_fd, 4096)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.num_stops += 1
        self.interrupted = self.interrupted or number == signal.SIGINT


class Supervisor:
    """Runs one serving command until it is stopped or cannot continue.

    Args:
        run_dir: a folder for this command only.
        layout: the group that it leads.
        began: the monotonic clock when the command started.
        api_key_file: keys that clients must send; None: no key is required.
        adapters: who says which adapters are served, besides those that `run_dir` has already.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        listener: socket.socket,
        signals: Signals,
        *,
        run_dir: Path,
        settings: LocalSettings,
        layout: Layout = ALONE,
        began: float,
        api_key_file: Path | None = None,
        adapters: AdapterSettings = ONLY_NAMED,
    ) -> None:
        self._config = config
        self._listener = listener
        self._settings = settings
        self._keys = [] if api_key_file is None else [f"--api-key-file={api_key_file}"]
        self._adapters = adapters
        self._signals = signals
        self._began = began
        """When the command began, then the last restart."""
        self._budget = RestartBudget()
        self._incarnation = 0
        self._stall = ""
        """What the front end knows about the engine."""
        self._front_end: Child
        self._num_predecessors = 0
        """Number of earlier front ends. Never reset: it makes the ids of requests unique."""
        self._failures = Failures()
        self._run_dir = run_dir
        self._layout = layout.in_folder(run_dir)
        self._ranks: NodeRanks
        (run_dir / CONFIG_FILE).write_bytes(msgspec.json.encode(config))

    def run(self) -> None:
        """Returns after a drain. Raises ServingError if serving cannot continue."""
        raise_open_files()
        self._front_end = self._start_front_end()
        self._start_engine()
        self._ranks = NodeRanks(self._layout, self._settings, self._run_dir, self._engine)
        served = False
        try:
            self._serve()
            served = True
        finally:
            self._end_front_end()
            self._engine.end()
            self._ranks.end(at_once=not served)

    def _serve(self) -> None:
        while not self._signals.num_stops:
            self._signals.sleep(TICK_SECONDS)
            self._report_stall()
            self._kill_hung_children()
            if not self._front_end.lives:
                self._replace_front_end()
            elif not self._ranks.live:
                self._end_group()
            elif not self._engine.lives:
                self._restart_engine()
        self._drain()

    def _drain(self) -> None:
        drain = self._config.drain
        delay = 0.0 if self._signals.interrupted else drain.delay_seconds
        say(
            f"stopping: admitting requests for {delay:.0f} s, then running ones have {drain.seconds:.0f} s to finish"
            if delay
            else f"stopping: running requests have {drain.seconds:.0f} s to finish; interrupt again to end them"
        )
        self._send(StartDrain(delay, drain.seconds))
        deadline = time.monotonic() + delay + drain.seconds + STOP_SECONDS
        stops, engine_lives = self._signals.num_stops, True
        while self._front_end.lives and time.monotonic() < deadline:
            if self._signals.interrupted and self._signals.num_stops > stops:
                stops = self._signals.num_stops
                self._send(StartDrain(0.0, 0.0))
                self._front_end.resume()
                deadline = min(deadline, time.monotonic() + STOP_SECONDS)
            if engine_lives and not self._engine.lives:
                engine_lives = False
                self._send(EngineEnded(str(self._failures.of(self._engine))))
            self._signals.sleep(TICK_SECONDS)
            self._kill_hung_children()

    def _report_stall(self) -> None:
        """Tell the front end when the engine does not respond, before it counts as hung, and when it does again."""
        if self._engine.lives and (stall := self._engine.stall) != self._stall:
            self._stall = stall
            say(f"{stall}: not ready" if stall else "the engine process responds again")
            self._send(EngineStalled(stall))

    def _kill_hung_children(self) -> None:
        for child in (self._front_end, self._engine):
            child.kill_if_hung()
        self._ranks.kill_hung()

    def _restart_engine(self) -> None:
        failure = self._failures.of(self._engine)
        self._send(EngineEnded(str(failure)))
        self._check(failure, CURED_BY_RESTART)
        self._began = time.monotonic()
        self._start_engine()

    def _end_group(self) -> None:
        """A rank has ended, and its part of the state with it: the group comes back as a whole, or not at all.

        With several nodes this one stays for a while: proxies still send it clients, who get an error, not silence.
        """
        failure = self._ranks.failure(self._failures)
        self._send(EngineEnded(str(failure)))
        if self._layout.num_nodes > 1:
            delay = self._config.drain.delay_seconds
            say(f"{failure}: answering with errors for {delay:.0f} s, until proxies have noticed")
            deadline = time.monotonic() + delay
            while (left := deadline - time.monotonic()) > 0:
                self._signals.sleep(left)
        raise failure

    def _replace_front_end(self) -> None:
        """Its connections and their requests are lost. The engine continues, with the model and its cache."""
        ended = self._front_end
        self._check(self._failures.of(ended), CURED_BY_REPLACEMENT)
        ended.close()
        self._num_predecessors += 1
        self._front_end = self._start_front_end()
        self._send(self._engine_started(self._num_predecessors, time.monotonic()))

    def _end_front_end(self) -> None:
        """Stop the front end, which gets time to answer requests in flight with an error."""
        self._send(StartDrain(0.0, 0.0))
        self._front_end.resume()
        self._front_end.wait_or_kill(STOP_SECONDS)
        self._front_end.close()

    def _check(self, failure: ServingError, codes: Set[ExitCode]) -> None:
        error = self._budget.failure_to_end_with(failure, time.monotonic(), codes)
        if error is not None:
            raise error
        say(f"{failure}; restarting it")

    def _start_front_end(self) -> Child:
        fd = self._listener.fileno()
        return start_child(
            "front end",
            FRONT_END_MODULE,
            [
                *(f"--listener-fd={fd}", f"--url={url_of(self._listener)}"),
                *(*self._keys, *self._settings.arguments, *self._adapters.arguments),
            ],
            self._run_dir,
            FRONT_END_DEADLINE,
            stdin=subprocess.PIPE,
            pass_fds=(fd,),
        )

    def _start_engine(self) -> None:
        self._incarnation += 1
        self._stall = ""
        arguments = [*self._settings.arguments, f"--incarnation={self._incarnation}"]
        self._engine = start_child(
            ENGINE_NAME, ENGINE_MODULE, arguments, self._run_dir, f"deadline-{self._incarnation}"
        )
        self._send(self._engine_started(0, self._began))

    def _engine_started(self, num_predecessors: int, began: float) -> EngineStarted:
        return EngineStarted(self._incarnation, num_predecessors, self._engine.process.pid, began)

    def _send(self, message: Control) -> None:
        pipe = self._front_end.process.stdin
        assert pipe is not None
        # The next check finds out that it has exited.
        with contextlib.suppress(BrokenPipeError):
            pipe.write(encode_line(message))
            pipe.flush()
