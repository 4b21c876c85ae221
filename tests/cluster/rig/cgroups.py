"""Version 1 control groups of the cluster. Every process of the cluster is below one group with a fixed name in every
hierarchy, so that any run can find the processes of an earlier one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.rig.needs import CGROUP_ROOT, cgroup_hierarchies

ROOT_GROUP = "neuron-serving"

DEAD = ("Z", "X", "x")
"""States of `/proc/*/status` in which a process no longer runs."""


@dataclass(frozen=True)
class Process:
    """A process that is not dead, seen from the host.

    Attributes:
        inner_pid: its pid in its innermost pid namespace; equal to `pid` on the host.
    """

    pid: int
    inner_pid: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """One path in every hierarchy: the kubelet refuses to run in groups that differ between hierarchies."""

    path: str

    def __truediv__(self, name: str) -> Group:
        return Group(f"{self.path}/{name}")

    def folders(self) -> list[Path]:
        return [hierarchy / self.path for hierarchy in cgroup_hierarchies()]

    def make(self) -> None:
        for hierarchy in cgroup_hierarchies():
            folder = hierarchy
            for name in self.path.split("/"):
                parent, folder = folder, folder / name
                folder.mkdir(exist_ok=True)
                if (
                    hierarchy.name == "cpuset"
                ):  # a new group accepts no process until it has processors and memory nodes
                    for setting in ("cpuset.cpus", "cpuset.mems"):
                        if not (folder / setting).read_text().strip():
                            (folder / setting).write_text((parent / setting).read_text())

    def processes(self) -> list[Process]:
        """Live processes of this group and the groups below it."""
        found = (process_of(pid) for pid in _pids(_hierarchy() / self.path))
        return [process for process in found if process is not None]

    def find(self, path: str) -> list[Group]:
        """Groups below this one whose path ends with `path`."""
        hierarchy = _hierarchy()
        folders = [folder for folder in _folders(hierarchy / self.path) if str(folder).endswith(f"/{path}")]
        return [Group(str(folder.relative_to(hierarchy))) for folder in folders]

    def kill(self, *, timeout_seconds: float = 120) -> None:
        """Kills every process of this group and the groups below it, and waits for their end.

        Raises:
            TimeoutError: a process did not end after SIGKILL.
        """
        end = time.monotonic() + timeout_seconds
        dying: set[int] = set()
        while True:
            found = {process.pid for process in self.processes()}
            for pid in found:
                kill(pid)
            # A process leaves its group before it has released its files and ports.
            dying = {pid for pid in dying | found if process_of(pid) is not None}
            if not dying:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"processes of {self.path} survived SIGKILL: {sorted(dying)}")
            time.sleep(0.02)

    def remove(self, *, timeout_seconds: float = 120) -> None:
        """Removes the group and the groups below it. Its processes must be dead or dying (slow on a busy disk).

        Raises:
            TimeoutError: the kernel keeps a group busy.
        """
        end = time.monotonic() + timeout_seconds
        # Container runtimes also create the group in a version 2 hierarchy if one is mounted.
        folders = [hierarchy / self.path for hierarchy in CGROUP_ROOT.iterdir()]
        while left := [folder for folder in folders if not _remove_tree(folder)]:
            if time.monotonic() > end:
                dying = {folder: list(_pids(folder)) for folder in left}
                raise TimeoutError(f"control groups stay busy: {', '.join(f'{f} {pids}' for f, pids in dying.items())}")
            time.sleep(0.05)


def _hierarchy() -> Path:
    """The hierarchy in which processes are listed; their group is the same in all of them."""
    return CGROUP_ROOT / "pids"


def kill(pid: int) -> bool:
    """Kills a process of the host; False if it had already ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _folders(folder: Path) -> Iterator[Path]:
    """The group's folder and those below it. Others remove groups concurrently: `walk` skips missing folders, `glob`
    raises."""
    return (Path(found) for found, _, _ in os.walk(folder))


def _pids(folder: Path) -> Iterator[int]:
    for group in _folders(folder):
        try:
            text = (group / "cgroup.procs").read_text()
        except (FileNotFoundError, OSError):  # a group removed while it is read: ENOENT or ENODEV
            continue
        yield from map(int, text.split())


def process_of(pid: int) -> Process | None:
    """None if all threads of the process have ended: the first may end long before one that holds a port.

    An empty command line is no sign of either: during `exec` there is none.
    """
    folder = Path("/proc") / str(pid)
    try:
        command = folder.joinpath("cmdline").read_bytes().decode(errors="replace").rstrip("\0")
        status = folder.joinpath("status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if fields["State"].split()[0] in DEAD and int(fields["Threads"]) <= 1:
        return None
    return Process(pid, int(fields["NSpid"].split()[-1]), tuple(command.split("\0")))


def _remove_tree(folder: Path) -> bool:
    """Removes the directories of a control group's tree, the deepest first; files cannot be removed."""
    if not folder.exists():
        return True
    for below in sorted((p for p in _folders(folder) if p != folder), key=lambda p: len(p.parts), reverse=True):
        _remove_one(below)
    return _remove_one(folder)


def _remove_one(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # EBUSY: the kernel has not yet released the processes
        return False
    return True
