"""Memory and CPUs that this process may use, from the kernel and the container's limits.

Called once during backend set-up. Reads /proc and the cgroup files below `root`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that is still available: the minimum over the machine and the container's limit minus its usage.

    The page cache (e.g. weights just downloaded) does not count as usage, because the kernel drops it on demand.
    """
    found = [_meminfo(root / "proc/meminfo")]
    for folder, limit, usage, cached in (
        ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        cgroup = root / "sys/fs/cgroup" / folder
        maximum, used = _number(cgroup / limit), _number(cgroup / usage)
        if maximum is not None and used is not None:
            words = _words(cgroup / "memory.stat")
            counts = dict(zip(words[::2], words[1::2], strict=True))
            found.append(max(0, maximum - used + sum(int(counts.get(name, 0)) for name in cached)))
    return min(found)


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs this process may keep busy: the smaller of its affinity and the container's quota, at least 1."""
    counts = [float(len(os.sched_getaffinity(0)))]
    quota = _words(root / "sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        counts.append(int(quota[0]) / int(quota[1]))
    quota_us = _number(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period_us = _number(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota_us is not None and period_us:
        counts.append(quota_us / period_us)
    return max(1, math.floor(min(counts)))


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{path} has no line MemAvailable")


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None if the file is missing or sets no limit (`max`, -1)."""
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdigit() else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
