"""Runs one `ContainerPlan` like a kubelet: files, command, probes, SIGTERM and grace period.

Called by `local.machine`, which decides what runs and restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import aiohttp

from neuron_operator.local.pods import LOOPBACK, CannotRunHere, ContainerPlan, Probe

MAX_TERMINATION_MESSAGE_BYTES = 4096
MAX_LOG_LINES, MAX_LOG_BYTES = 80, 2048
"""The end of the log that a kubelet takes for the message of a failed container that left none."""
DRAIN_SECONDS = 5.0
"""For output that the process left when it ended. What it started in another session could hold it open for ever."""


@dataclass(frozen=True)
class Terminated:
    exit_code: int
    message: str
    finished_at: str


class PodProcess:
    """Runs one plan and keeps the state that a kubelet would report.

    Call `start` once, then `watch`, which returns when the process has ended: on its own, after a failed liveness or
    start-up probe, or after `stop`. `ready`, `started` and `terminated` may be read at any time.
    """

    def __init__(self, plan: ContainerPlan, log: Callable[[str, str], None]) -> None:
        self.plan = plan
        self.ready = False
        self.was_ready = False
        self.started = False
        self.terminated: Terminated | None = None
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._last = deque[bytes](maxlen=MAX_LOG_LINES)
        self._is_stopping = False
        self.current = plan.first or plan
        """The container that runs or has ended."""

    async def start(self) -> None:
        """Write the files and start the command. Raises CannotRunHere if a file cannot be written."""
        plan = self.current
        try:
            for folder in plan.folders:
                folder.mkdir(parents=True, exist_ok=True)
            for path, text in {**plan.files, **plan.secrets, plan.termination_message: ""}.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600 if path in plan.secrets else 0o666)
                path.write_text(text)
        except OSError as error:
            raise _cannot_write(error) from error
        reading, writing = os.pipe()
        output = os.fdopen(reading, "rb")
        with os.fdopen(writing, "wb") as pipe:
            self._process = await asyncio.create_subprocess_exec(
                *plan.argv,
                env=dict(plan.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,  # with one of asyncio's, waiting for the process is waiting for all that hold the pipe
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach pods: we send SIGTERM instead
                preexec_fn=_end_with_parent,  # no pod outlives a killed `local`
            )
        self._output = asyncio.create_task(self._forward(output))

    def renew(self, files: Mapping[Path, str]) -> None:
        """Replace those of its files that have changed, each at once, as a kubelet does. A restart writes them too.
        Raises CannotRunHere if a file cannot be written."""
        try:
            for path, text in files.items():
                if self.plan.files.get(path) != text:
                    made = path.with_name(f".{path.name}.new")
                    made.write_text(text)
                    made.replace(path)
        except OSError as error:
            raise _cannot_write(error) from error
        is_plan = self.current is self.plan
        self.plan = replace(self.plan, files=files)
        self.current = self.plan if is_plan else self.current

    async def watch(self, changed: Callable[[], None]) -> Terminated:
        """Run probes, and return how the process ended; first the init container, if there is one."""
        ended = await self._watch(changed)
        if self.current is not self.plan and not ended.exit_code and not self._is_stopping:
            self.current = self.plan
            await self.start()
            changed()
            ended = await self._watch(changed)
        self.terminated = ended
        changed()
        return ended

    async def _watch(self, changed: Callable[[], None]) -> Terminated:
        assert self._process is not None
        plan = self.current
        probing = asyncio.create_task(self._probe_forever(changed) if plan is self.plan else asyncio.sleep(0))
        try:
            code = await self._process.wait()
            await self._finish()
        finally:
            # First, because the wait below may be cancelled.
            for path in plan.secrets:
                path.unlink(missing_ok=True)
            probing.cancel()
            await asyncio.wait([probing])  # unlike awaiting the task, this keeps our own cancellation
        self.ready = False
        message = plan.termination_message.read_bytes()[-MAX_TERMINATION_MESSAGE_BYTES:]
        if code and not message and plan.takes_message_from_log:
            message = b"".join(self._last)[-MAX_LOG_BYTES:]
        return Terminated(
            exit_code=code if code >= 0 else 128 - code,
            message=message.decode(errors="replace"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    async def stop(self) -> None:
        """The stop command, SIGTERM, then after the grace period SIGKILL to the whole process group."""
        process, self._is_stopping = self._process, True
        if process is None or process.returncode is not None:
            return
        try:
            async with asyncio.timeout(self.plan.grace_seconds):
                await self._before_stopping()
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
        await self._finish()

    async def _before_stopping(self) -> None:
        if not self.current.stop_command:
            return
        waiting = await asyncio.create_subprocess_exec(
            *self.current.stop_command, env=dict(self.current.env), preexec_fn=_end_with_parent
        )
        try:
            await waiting.wait()
        finally:
            if waiting.returncode is None:
                waiting.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._kill_group(self._process)

    async def _finish(self) -> None:
        """Once the process has ended: the end of all others of the pod, as in a container, and of its output."""
        assert self._process is not None
        assert self._output is not None
        self._kill_group(self._process)
        try:
            await asyncio.wait([self._output], timeout=DRAIN_SECONDS)
        finally:
            self._output.cancel()

    def _kill_group(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    async def _forward(self, output: IO[bytes]) -> None:
        lines = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(lines)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, output)
        with contextlib.closing(transport):
            while line := await _next_line(lines):
                self._last.append(line)
                self._log(self.plan.pod, line.decode(errors="replace").rstrip("\n"))

    async def _probe_forever(self, changed: Callable[[], None]) -> None:
        async with aiohttp.ClientSession() as session:
            if self.plan.startup is not None and not await self._until_started(session, self.plan.startup):
                await self.stop()
                return
            self.started = True
            changed()
            watches = [self._readiness(session, changed)]
            if self.plan.liveness is not None:
                watches.append(self._liveness(session, self.plan.liveness))
            await asyncio.gather(*watches)

    async def _until_started(self, session: aiohttp.ClientSession, probe: Probe) -> bool:
        for _ in range(probe.failure_threshold):
            if await _answers(session, probe):
                return True
            await asyncio.sleep(probe.period_seconds)
        self._log(self.plan.pod, f"start-up probe {probe.path} failed {probe.failure_threshold} times: stopping")
        return False

    async def _readiness(self, session: aiohttp.ClientSession, changed: Callable[[], None]) -> None:
        probe, failures = self.plan.readiness, 0
        if probe is None:
            self.ready = True
            changed()
            return
        while True:
            good = await _answers(session, probe)
            failures = 0 if good else failures + 1
            ready = good or (self.ready and failures < probe.failure_threshold)
            if ready != self.ready:
                self.ready = ready
                self.was_ready = self.was_ready or ready
                changed()
            await asyncio.sleep(probe.period_seconds)

    async def _liveness(self, session: aiohttp.ClientSession, probe: Probe) -> None:
        failures = 0
        while failures < probe.failure_threshold:
            await asyncio.sleep(probe.period_seconds)
            failures = 0 if await _answers(session, probe) else failures + 1
        self._log(self.plan.pod, f"liveness probe {probe.path} failed {failures} times: stopping")
        await self.stop()


def _cannot_write(error: OSError) -> CannotRunHere:
    return CannotRunHere(f"cannot write {error.filename}: {error.strerror}; see --cache-dir")


async def _next_line(output: asyncio.StreamReader) -> bytes:
    """Or a part of one that is too long for a buffer; empty at the end."""
    try:
        return await output.readuntil()
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as longer:
        return await output.readexactly(longer.consumed)


async def _answers(session: aiohttp.ClientSession, probe: Probe) -> bool:
    timeout = aiohttp.ClientTimeout(total=probe.timeout_seconds)
    try:
        async with session.get(f"http://{LOOPBACK}:{probe.port}{probe.path}", timeout=timeout) as response:
            return 200 <= response.status < 400
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
