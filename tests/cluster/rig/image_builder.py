"""BuildKit for the time of some builds: started on need, stopped afterwards, its cache kept within a bound. `images`
says what to build; this module knows processes, sockets, control groups and BuildKit's report of its steps."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.rig import image_runc
from cluster.rig.binaries import ensure
from cluster.rig.cache import Cache
from cluster.rig.needs import NotPossibleHere, search_path

# Layers, cache mounts and unpacked bases; a build of every image takes about 5 GB.
MAX_STATE_BYTES = 10_000_000_000

_CONTROL_GROUP = "neuron-serving-build"
_CONTROL_GROUP_ROOT = Path("/sys/fs/cgroup")
_START_SECONDS = 30
_STOP_SECONDS = 30
_MAX_REPORTED_LINES = 15


class BuildFailed(Exception):
    """A step failed or the Dockerfile is wrong; the message has the step and the end of what it printed."""


@dataclass(frozen=True)
class Step:
    name: str
    cached: bool
    seconds: float


@dataclass(frozen=True)
class Builder:
    """A running BuildKit."""

    command: tuple[str, ...]
    """`buildctl` with the address of the daemon."""
    say: Callable[[str], None] = field(repr=False)

    def build(self, arguments: Sequence[str]) -> list[Step]:
        """Runs a build with BuildKit's Dockerfile frontend; `arguments` are those of `buildctl build`.

        Raises:
            BuildFailed: with the step that failed and its output.
        """
        command = [*self.command, "build", "--progress=rawjson", "--frontend=dockerfile.v0", *arguments]
        progress = _Progress(self.say)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                progress.read(line)
        if process.returncode:
            raise BuildFailed(progress.failure())
        return progress.steps()

    def ask(self, request: str, arguments: Sequence[str]) -> str:
        """What the frontend answers to a sub-request, e.g. `frontend.lint`. Raises BuildFailed when it cannot."""
        command = [*self.command, "build", "--progress=plain", "--frontend=dockerfile.v0", *arguments]
        done = subprocess.run(
            [*command, f"--opt=requestid={request}"], capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            raise BuildFailed("\n".join(done.stderr.strip().splitlines()[-_MAX_REPORTED_LINES:]))
        return done.stdout.strip()

    def prune(self, max_bytes: int) -> None:
        """Removes what was used longest ago until at most `max_bytes` are kept."""
        subprocess.run(
            [*self.command, "prune", f"--keep-storage={max_bytes / 1e6}"], check=True, stdout=subprocess.DEVNULL
        )


class _Progress:
    """BuildKit's `rawjson` progress: a line is a JSON object with changed vertexes and log pieces."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._vertexes: dict[str, dict[str, Any]] = {}
        self._logs: dict[str, bytes] = {}
        self._other: list[str] = []

    def read(self, line: str) -> None:
        try:
            status = json.loads(line)
        except ValueError:
            self._other.append(line.rstrip())
            return
        for vertex in status.get("vertexes") or ():
            known = self._vertexes.setdefault(vertex["digest"], {})
            was_done = "completed" in known
            known.update(vertex)
            if "completed" in known and not was_done and _seconds(known) > 1:
                self._say(f"  {_seconds(known):5.1f} s  {known['name'][:100]}")
        for log in status.get("logs") or ():
            self._logs[log["vertex"]] = self._logs.get(log["vertex"], b"") + base64.b64decode(log["data"])

    def steps(self) -> list[Step]:
        return [
            Step(v["name"], cached=bool(v.get("cached")), seconds=_seconds(v))
            for v in self._vertexes.values()
            if v["name"].startswith("[") and not v["name"].startswith("[internal]")
        ]

    def failure(self) -> str:
        failed = [v for v in self._vertexes.values() if v.get("error") and "context canceled" not in v["error"]]
        lines: list[str] = []
        for vertex in failed:
            output = self._logs.get(vertex["digest"], b"").decode(errors="replace").splitlines()
            lines += [vertex["name"], *output[-_MAX_REPORTED_LINES:], vertex["error"]]
        return "\n".join(lines or self._other[-_MAX_REPORTED_LINES:] or ["buildctl failed without a message"])


def _seconds(vertex: dict[str, Any]) -> float:
    if not (vertex.get("started") and vertex.get("completed")):
        return 0.0

    def moment(text: str) -> float:
        clock, _, fraction = text.removesuffix("Z").partition(".")
        return time.mktime(time.strptime(clock[:19], "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction[:9] or 0}")

    return moment(vertex["completed"]) - moment(vertex["started"])


@contextmanager
def running_builder(cache: Cache, say: Callable[[str], None] = print) -> Iterator[Builder]:
    """BuildKit with its state in the cache; one at a time for each cache, ended when the context is left.

    Raises:
        NotPossibleHere: no root, no runc, or BuildKit cannot be built or started; the message has the reason.
    """
    if os.geteuid() != 0:
        raise NotPossibleHere("building images needs root: run as root, or leave the cluster tests out")
    runc = shutil.which("runc", path=search_path())
    if runc is None:
        raise NotPossibleHere("Debian packages are missing (runc): run `make cluster-deps`")
    programs = ensure("buildkit", cache=cache, say=say)["buildkit"]
    state = cache.folder("buildkit")
    with (
        cache.lock("buildkit", on_wait=lambda: say("waiting: another run is building images")),
        tempfile.TemporaryDirectory(prefix="neuron-serving-buildkit-") as run_name,
    ):
        _sweep(state)
        run = Path(run_name)
        daemon, address = _start(programs, runc, state, run)
        try:
            builder = Builder((str(programs / "buildctl"), f"--addr={address}"), say)
            _wait_until_it_answers(builder, daemon, run / "log")
            yield builder
            builder.prune(MAX_STATE_BYTES)
        finally:
            daemon.terminate()
            try:
                daemon.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            _sweep(state)


def _start(programs: Path, runc: str, state: Path, run: Path) -> tuple[subprocess.Popen[bytes], str]:
    wrapper = run / "runc"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", image_runc.__file__, runc])} "$@"\n')
    wrapper.chmod(0o755)
    address = f"unix://{run}/buildkitd.sock"
    settings = run / "buildkitd.toml"
    # Host network: steps reach what the machine reaches, with its resolver. Collection is ours (`prune`): BuildKit's
    # own keeps a share of the disk free and would drop what the next build needs.
    settings.write_text(
        f"""root = {json.dumps(str(state))}
[grpc]
  address = [{json.dumps(address)}]
[worker.oci]
  enabled = true
  snapshotter = "overlayfs"
  networkMode = "host"
  binary = {json.dumps(str(wrapper))}
  defaultCgroupParent = {json.dumps(_CONTROL_GROUP)}
  gc = false
  max-parallelism = {os.cpu_count() or 1}
[worker.containerd]
  enabled = false
"""
    )
    with (run / "log").open("wb") as log:
        # Ends with the process that started it, however that ends.
        daemon = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", str(programs / "buildkitd"), f"--config={settings}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": search_path()},
        )
    return daemon, address


def _wait_until_it_answers(builder: Builder, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while subprocess.run([*builder.command, "debug", "workers"], capture_output=True, check=False).returncode:
        if daemon.poll() is not None or time.monotonic() > deadline:
            last = next(reversed(log.read_text(errors="replace").strip().splitlines()), "no message")
            raise NotPossibleHere(f"buildkitd did not start: {last}")
        time.sleep(0.1)


def _sweep(state: Path) -> None:
    """Ends the steps and removes the control groups and mounts that an interrupted build left behind."""
    groups = [g for pattern in ("", "*/") for g in _CONTROL_GROUP_ROOT.glob(f"{pattern}{_CONTROL_GROUP}")]
    for group in groups:
        deepest_first = sorted((p for p in (group, *group.rglob("*")) if p.is_dir()), key=lambda p: -len(p.parts))
        for folder in deepest_first:
            _end_processes(folder / "cgroup.procs")
            folder.rmdir()
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if Path(mount.encode().decode("unicode_escape")).is_relative_to(state):
            subprocess.run(["umount", "--lazy", mount], check=True)


def _end_processes(members: Path) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    while pids := members.read_text().split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {' '.join(pids)} of an interrupted build do not end")
        time.sleep(0.05)
