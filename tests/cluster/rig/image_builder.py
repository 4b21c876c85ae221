"""Runs BuildKit for the duration of some builds and bounds its cache. `images` decides what to build; this module
handles processes, sockets, control groups and BuildKit's progress output."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.rig import image_runc
from cluster.rig.binaries import ensure
from cluster.rig.cache import Cache
from cluster.rig.cgroups import ROOT_GROUP, Group
from cluster.rig.machine import StartFailed, wait_until
from cluster.rig.needs import require_machine, search_path

# Layers, cache mounts and unpacked bases; a build of every image takes about 9 GB.
MAX_STATE_BYTES = 14_000_000_000

_GROUP = Group(f"{ROOT_GROUP}-build")
_STOP_SECONDS = 60
_MAX_REPORTED_LINES = 15


class BuildFailed(Exception):
    """A step failed or the Dockerfile is wrong; the message has the step and the end of its output."""


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
        """The frontend's response to a sub-request, e.g. `frontend.lint`. Raises BuildFailed on an error."""
        command = [*self.command, "build", "--progress=plain", "--frontend=dockerfile.v0", *arguments]
        done = subprocess.run([*command, f"--opt=requestid={request}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildFailed("\n".join(done.stderr.strip().splitlines()[-_MAX_REPORTED_LINES:]))
        return done.stdout.strip()

    def prune(self, max_bytes: int) -> None:
        """Removes the least recently used entries until at most `max_bytes` remain."""
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
        """The steps of the Dockerfile, without BuildKit's internal ones."""
        return [
            Step(v["name"], cached=bool(v.get("cached")), seconds=_seconds(v))
            for v in self._vertexes.values()
            if re.match(r"\[(?!internal|context|auth)", v["name"])
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
    started, completed = (datetime.fromisoformat(vertex[name]) for name in ("started", "completed"))
    return (completed - started).total_seconds()


@contextmanager
def running_builder(cache: Cache, say: Callable[[str], None] = print) -> Iterator[Builder]:
    """BuildKit with its state in the cache; one at a time per cache.

    Raises:
        NotPossibleHere: the machine lacks something, or BuildKit cannot be built; the message has the remedy.
        StartFailed: buildkitd does not come up.
    """
    require_machine()
    programs = ensure("buildkit", cache=cache, say=say)["buildkit"]
    state = cache.folder("buildkit")
    with (
        cache.lock("buildkit", on_wait=lambda: say("waiting: another run is building images")),
        tempfile.TemporaryDirectory(prefix="neuron-serving-buildkit-") as run_name,
    ):
        _sweep()
        files = Path(run_name)
        daemon = _start(programs, state, files)
        try:
            builder = Builder((str(programs / "buildctl"), f"--addr={_address(files)}"), say)
            _wait_until_it_answers(builder, daemon, files / "log")
            yield builder
            builder.prune(MAX_STATE_BYTES)
        finally:
            daemon.terminate()
            try:
                daemon.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            _sweep()


def _address(files: Path) -> str:
    return f"unix://{files}/buildkitd.sock"


def _start(programs: Path, state: Path, files: Path) -> subprocess.Popen[bytes]:
    runc = shutil.which("runc", path=search_path())
    wrapper = files / "runc"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", image_runc.__file__, str(runc)])} "$@"\n')
    wrapper.chmod(0o755)
    settings = files / "buildkitd.toml"
    # Host network: steps use the machine's routes and resolver. BuildKit's own garbage collection is off: it keeps a
    # share of the disk free and would drop what the next build needs.
    settings.write_text(
        f"""root = {json.dumps(str(state))}
[grpc]
  address = [{json.dumps(_address(files))}]
[worker.oci]
  enabled = true
  snapshotter = "overlayfs"
  networkMode = "host"
  binary = {json.dumps(str(wrapper))}
  defaultCgroupParent = {json.dumps(_GROUP.path)}
  gc = false
  max-parallelism = {os.cpu_count() or 1}
[worker.containerd]
  enabled = false
"""
    )
    group = _GROUP / "daemon"
    group.make()
    joins = "; ".join(f"echo $$ > {folder / 'cgroup.procs'}" for folder in group.folders())
    # The daemon ends with its parent process.
    launch = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "sh", "-ec", f'{joins}; exec "$@"', "sh"]
    with (files / "log").open("wb") as log:
        return subprocess.Popen(
            [*launch, str(programs / "buildkitd"), f"--config={settings}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": search_path(), "TMPDIR": str(files)},
        )


def _wait_until_it_answers(builder: Builder, daemon: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        if daemon.poll() is not None:
            last = next(reversed(log.read_text(errors="replace").strip().splitlines()), "no message")
            raise StartFailed(f"buildkitd ended during its start: {last}")
        return subprocess.run([*builder.command, "debug", "workers"], capture_output=True, check=False).returncode == 0

    wait_until("buildkitd answers", answers, pause_seconds=0.1)


def _sweep() -> None:
    """Ends processes left by an interrupted run; its mounts ended with its mount namespace."""
    _GROUP.kill()
    _GROUP.remove()
