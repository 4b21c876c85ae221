"""This machine as the kernel shows it: memory and CPUs that this process may use, within the limits of its control
groups, the memory of other processes, and Neuron devices.

A limit of any group between the process's own and the root of the mounted tree applies. In a container that root is
usually the container's own group, whatever the process's path says.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
PROC = Path("/proc")
DEV = Path("/dev")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
SESSION = 3
"""Index among the fields of `stat` behind the name: state, parent, group, session."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that is still available to this process, in bytes."""

    available: int
    limit: int | None = None
    """The memory limit that leaves so little; None: the machine has no more."""

    def __str__(self) -> str:
        return f"{gib(self.available)} free" + ("" if self.limit is None else f" of the limit of {gib(self.limit)}")

    def cure(self, needed: int) -> str:
        """What a user can do if this many bytes must be available."""
        missing = needed - self.available
        if self.limit is None:
            return f"free at least {gib(missing)}, or use a machine with more memory"
        return f"raise the memory limit to at least {gib(self.limit + missing)} ({LIMIT_OF_A_POD})"


LIMIT_OF_A_POD = "in a NeuronModel: podTemplate.spec.resources.limits.memory"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


class _MemoryFiles(NamedTuple):
    """Names of a hierarchy's files, and of the page cache in `memory.stat`, which the kernel drops on demand."""

    limit: str
    usage: str
    cached: tuple[str, str]
    events: str


_MEMORY_FILES = {
    "cgroup2": _MemoryFiles("memory.max", "memory.current", ("inactive_file", "active_file"), "memory.events"),
    "cgroup": _MemoryFiles(
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("total_inactive_file", "total_active_file"),
        "memory.oom_control",
    ),
}
"""By the type of file system, which differs between the two versions of control groups."""


def free_memory(root: Path = ROOT) -> FreeMemory:
    """The least of what the machine and each memory limit leave."""
    machine = _counts(root / "proc/meminfo")
    if "MemAvailable:" not in machine:
        raise OSError(f"{root / 'proc/meminfo'} has no line MemAvailable")
    limits = [FreeMemory(machine["MemAvailable:"] * 1024)]
    for kind, group in _groups(root, "memory"):
        names = _MEMORY_FILES[kind]
        maximum, used = _number(group / names.limit), _number(group / names.usage)
        if maximum is not None and used is not None:
            counts = _counts(group / "memory.stat")
            cached = sum(counts.get(name, 0) for name in names.cached)
            limits.append(FreeMemory(max(0, maximum - used + cached), maximum))
    return min(limits, key=lambda one: one.available)


def memory_limit(root: Path = ROOT) -> int | None:
    """The smallest memory limit; None: none is smaller than the machine's memory."""
    limits = [_number(group / _MEMORY_FILES[kind].limit) for kind, group in _groups(root, "memory")]
    smallest = min((limit for limit in limits if limit is not None), default=None)
    machine = _counts(root / "proc/meminfo").get("MemTotal:", 0) * 1024
    return smallest if smallest is not None and smallest < machine else None


def num_oom_kills(root: Path = ROOT) -> int:
    """Processes of this control group that the kernel has killed because memory ran out; 0 if it is not told."""
    own = dict(reversed(list(_groups(root, "memory"))))
    return sum(_counts(group / _MEMORY_FILES[kind].events).get("oom_kill", 0) for kind, group in own.items())


def describe_exit(name: str, return_code: int) -> str:
    """A message for a process that exited without saying why."""
    if return_code >= 0:
        return f"the {name} exited with code {return_code}"
    try:
        killer = signal.Signals(-return_code).name
    except ValueError:
        killer = f"signal {-return_code}"
    hint = " (often because the machine ran out of memory)" if killer == "SIGKILL" else ""
    return f"the {name} was killed by {killer}{hint}"


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs this process may keep busy: the smaller of its affinity and the smallest quota, at least 1."""
    counts = [float(len(os.sched_getaffinity(0)))]
    for kind, group in _groups(root, "cpu"):
        if kind == "cgroup2":
            quota, period = [*_words(group / "cpu.max"), "", ""][:2]
        else:
            quota, period = (" ".join(_words(group / f"cpu.cfs_{what}_us")) for what in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            counts.append(int(quota) / int(period))
    return max(1, math.floor(min(counts)))


def session_bytes(session: int) -> int:
    """Memory of all processes of a session; a page that several share counts once. 0 where there is no /proc."""
    total = 0
    for name in os.listdir(PROC) if PROC.is_dir() else ():
        if not name.isdigit():
            continue
        try:
            stat = (PROC / name / "stat").read_bytes()
            if int(stat.rpartition(b")")[2].split()[SESSION]) != session:
                continue
            share = _PSS.search((PROC / name / "smaps_rollup").read_bytes())
        except OSError:
            continue  # it ended meanwhile
        total += int(share[1]) * 1024 if share else 0
    return total


def device_nodes(dev: Path = DEV) -> list[Path]:
    """The nodes `/dev/neuron0`, `/dev/neuron1`, ... in order of their numbers."""
    nodes = [node for node in dev.glob("neuron*") if re.fullmatch(r"neuron\d+", node.name)]
    return sorted(nodes, key=lambda node: int(node.name.removeprefix("neuron")))


def _groups(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """The control groups of this process in each hierarchy that may limit the controller's resource: the type of its
    file system, and the folder of a group; the process's own group first, then those above it."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Version 2 is number 0 and lists no controllers.
        paths.update(dict.fromkeys(["cgroup2"] if number == "0" else controllers.split(","), path))
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        _, _, _, top, mount, *_ = map(_unescaped, before.split())
        kind, *_, options = after.split()
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            own = paths.get("cgroup2" if kind == "cgroup2" else controller)
            if own is not None:
                yield from ((kind, group) for group in _upwards(top, root / mount.lstrip("/"), own))


def _upwards(top: str, mount: Path, path: str) -> Iterator[Path]:
    """The folder of the group at `path`, and those above it up to the mount point, which shows the group `top`."""
    own = PurePosixPath(path)
    # With a namespace of groups, or a mount made in another one, the path may lie outside of the mounted tree.
    below = own.relative_to(top).parts if own.is_relative_to(top) and ".." not in own.parts else ()
    for depth in range(len(below), -1, -1):
        yield mount.joinpath(*below[:depth])


def _unescaped(text: str) -> str:
    """mountinfo writes spaces and the like in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None if the file is missing or sets no limit (`max`, -1)."""
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None


def _counts(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in _lines(path))
    return {line[0]: int(line[1]) for line in words if len(line) >= 2 and line[1].isdigit()}


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
